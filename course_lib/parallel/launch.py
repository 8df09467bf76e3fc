"""A lesson's function on the ranks of torchrun, on one host or several:

    torchrun --nproc-per-node 2 -m course_lib.parallel.launch MODULE:FUNCTION [key=value …]
        [--backend gloo] [--timeout SECONDS] [--seed N]

Each rank joins as it does beside a notebook (NCCL where the host has a GPU for each of its ranks, else
Gloo on the CPU; seeded with seed + rank) and calls FUNCTION(key=value, …). Values are read as Python, or
else taken as text. Lines are printed as they come, with their rank before them; rank 0 prints what each
returned. A rank that raises ends the whole run, with exit code 1; `timeout` bounds one collective.
"""

import argparse
import ast
import contextlib
import datetime
import importlib
import os
import sys
import traceback

WANTED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class _Prefixed:
    "A stream that writes whole lines, each with the rank before it, in one piece."

    def __init__(self, stream, prefix):
        self.stream, self.prefix, self.rest = stream, prefix, ""

    def write(self, text):
        *lines, self.rest = (self.rest + text).split("\n")
        if lines:
            self.stream.write("".join(f"{self.prefix}{line}\n" for line in lines))
            self.stream.flush()
        return len(text)

    def flush(self):
        pass  # a line goes out when it is whole

    def finish(self):
        if self.rest:
            self.write("\n")

    def __getattr__(self, name):
        return getattr(self.stream, name)


def main(argv=None):
    "The command; returns the exit code."
    given = _arguments(argv)
    lacking = [name for name in WANTED if name not in os.environ]
    if lacking:
        return _refuse(
            f"{lacking[0]} is not set: start this with torchrun, as in `torchrun --nproc-per-node 2 "
            f"-m course_lib.parallel.launch {given.target}`"
        )
    from course_lib.parallel import room, worker

    rank, world, local, here = (int(os.environ[name]) for name in WANTED[:4])
    try:
        fn, kwargs = _function(given.target), dict(_value(text) for text in given.values)
        backend = room.backend(given.backend, here, room.gpus())
        limit = datetime.timedelta(seconds=room.seconds(given.timeout))
        seed = room.seed(given.seed)
    except ValueError as e:
        return _refuse(str(e))
    if here == world:
        worker.be_local(backend)
    worker.prepare(rank, world, backend, here, seed)
    out = _Prefixed(sys.stdout, f"rank {rank}: ")
    try:
        worker.initialise(backend, local, limit)
        with contextlib.redirect_stdout(out):
            try:
                value = fn(**kwargs)
            finally:
                out.finish()
        _show(value, rank, world)
    except BaseException as e:
        return _failed(e, rank, world)
    worker.leave()
    return 0


def _arguments(argv):
    parser = argparse.ArgumentParser(prog="course_lib.parallel.launch", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("target", metavar="MODULE:FUNCTION")
    parser.add_argument("values", metavar="key=value", nargs="*")
    parser.add_argument("--backend", choices=["gloo", "nccl"])
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_intermixed_args(argv)


def _function(target):
    module, colon, name = target.partition(":")
    if not (module and colon and name):
        raise ValueError(f"{target!r} names no function: write MODULE:FUNCTION, as in course_lib.timing:time")
    try:
        fn = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as e:
        raise ValueError(f"{target} can't be imported: {e}") from None
    if not callable(fn):
        raise ValueError(f"{target} is a {type(fn).__name__}: name a function")
    return fn


def _value(text):
    key, equals, value = text.partition("=")
    if not (equals and key.isidentifier()):
        raise ValueError(f"{text!r} is no argument: write key=value, as in lr=0.1")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


def _show(value, rank, world):
    import torch.distributed as dist

    texts = [None] * world
    dist.all_gather_object(texts, None if value is None else repr(value))
    if rank == 0:
        for r, text in enumerate(texts):
            if text is not None:
                print(f"rank {r} returned {text}", flush=True)


def _refuse(sentence):
    if os.environ.get("RANK", "0") == "0":  # it is the same on every rank
        print(sentence, file=sys.stderr)
    return 2


def _failed(e, rank, world):
    tb = e.__traceback__
    while tb.tb_next and tb.tb_frame.f_code.co_filename == __file__:
        tb = tb.tb_next
    text = "\n\n" + "".join(traceback.format_exception(type(e), e, tb))
    head = f"rank {rank} of {world} raised {type(e).__name__}: {e}".rstrip(": ")
    if "gloo/transport" in str(e):  # the consequence of another rank's end
        head, text = f"rank {rank} of {world} lost its connection to a rank that ended", "\n"
    print(f"{head}{text}", file=sys.stderr, end="", flush=True)
    return 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Without waiting for ranks that wait for this one (torchrun ends them), nor for threads of PyTorch's own:
    # now and then one aborts a process that ends in order, when all is done.
    os._exit(code)

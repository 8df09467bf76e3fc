"What a rank does: join the process group, then do what it is asked to, one call after the other."

import ast
import contextlib
import datetime
import faulthandler
import os
import pickle
import random
import signal
import sys
import threading
import traceback
import types
from multiprocessing.connection import Connection

import numpy
import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from course_lib.parallel import room, stacks, timeline, wire

# Beyond the limit of any call: a call that hangs is ended from outside, with the names of what hangs.
COLLECTIVE_LIMIT = datetime.timedelta(hours=24)
inside = None  # (rank, world) on a rank
_busy = False


def main(fd):
    "Serve the notebook at the other end of `fd` until it says exit, or is gone."
    connection = Connection(fd)
    signal.signal(signal.SIGINT, _interrupt)
    space = _fresh_main()
    while True:
        try:
            request, body = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return
        if request == "exit":
            with contextlib.suppress(Exception):
                leave()
            return
        reply = _answer(request, body, space)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        try:
            connection.send_bytes(reply)
        except OSError:
            return


def _interrupt(signum, frame):
    if _busy:  # an idle rank has nothing to interrupt
        raise KeyboardInterrupt


def _fresh_main():
    "A `__main__` in which cells are executed, and which functions of the notebook take for theirs."
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    return module.__dict__


def _answer(request, body, space):
    global _busy
    timeline.take()
    try:
        try:
            _busy = True
            value = _do(request, body, space)
            if dist.is_initialized() and dist.get_backend() == "nccl":
                torch.cuda.synchronize()  # a collective that hangs must hang here and not in the next call
        finally:
            _busy = False
        return _pack("done", value)
    except BaseException as e:
        return _failure(e)


def _do(request, body, space):
    if request == "call":
        sources, packed = body
        wire.know(sources)
        fn, args, kwargs = pickle.loads(packed)
        return fn(*args, **kwargs)
    if request == "cell":
        return _execute(*body, space)
    if request == "get":
        if body not in space:
            raise NameError(f"name {body!r} is not defined on the ranks")
        return space[body]
    if request == "put":
        space.update(pickle.loads(body))
    elif request == "setup":
        setup(**body)
        space.update(rank=body["rank"], world=body["world"], torch=torch, dist=dist)
    elif request == "join":
        leave()
        join(**body)
    return None


def _execute(source, filename, space):
    "Execute a cell; print what its last expression gives, as a notebook does."
    wire.know({filename: source})
    tree = ast.parse(source, filename)
    last = None
    if tree.body and isinstance(tree.body[-1], ast.Expr) and not source.rstrip().endswith(";"):
        last = ast.Expression(tree.body.pop().value)
    exec(compile(tree, filename, "exec"), space)
    if last is not None:
        value = eval(compile(last, filename, "eval"), space)
        if value is not None:
            print(repr(value))


def _pack(kind, value):
    "A reply as bytes. Tensors leave their device and their graph here."
    value = pytree.tree_map_only(torch.Tensor, _plain, value)
    try:
        return wire.pack((kind, value, timeline.take()))
    except Exception as e:
        what = type(value).__name__
        return _failure(
            TypeError(
                f"the result, a {what}, can't be sent to the notebook ({type(e).__name__}: {e}); "
                "return numbers, strings, tensors, or lists and dicts of them"
            )
        )


def _plain(t):
    if t.is_sparse or type(t) not in (torch.Tensor, torch.nn.Parameter):
        return t
    t = t.detach().cpu()
    # A view would travel with the whole of its storage.
    return t.clone() if t.untyped_storage().nbytes() > t.numel() * t.element_size() else t


def _failure(e):
    told = {
        "name": type(e).__name__,
        "text": str(e),
        "traceback": "".join(traceback.format_exception(type(e), e, _from_here(e.__traceback__))),
        "frames": [
            stacks.Frame(f.filename, f.lineno or 0, f.name)
            for f in reversed(traceback.extract_tb(_from_here(e.__traceback__)))
            if f.filename != __file__
        ],
        "exception": None,
    }
    with contextlib.suppress(Exception):  # not every exception can be copied
        packed = wire.pack(e)
        pickle.loads(packed)
        told["exception"] = packed
    return wire.pack(("raised", told, timeline.take()))


def _from_here(tb):
    "The traceback from the first frame that isn't this file's."
    kept = tb
    while kept is not None and kept.tb_frame.f_code.co_filename == __file__:
        kept = kept.tb_next
    return kept


def setup(rank, world, backend, store, dump, env, path, cwd, seed):
    "Make this process rank `rank` of `world`: environment, device, threads, seeds, process group."
    os.environ.clear()
    os.environ.update(env)
    sys.path[:] = path
    with contextlib.suppress(OSError):
        os.chdir(cwd)
    faulthandler.register(signal.SIGUSR1, file=open(dump, "w"), all_threads=True)  # noqa: SIM115
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world)
    )
    be_local(backend)
    if backend == "nccl":
        _record_for(dump + ".nccl")
    prepare(rank, world, backend, world, seed)
    join(rank, world, backend, store)


def be_local(backend):
    "Keep ranks that are all on this host on its loopback interface."
    loopback = "lo" if sys.platform.startswith("linux") else "lo0"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    if backend == "nccl":
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)


def prepare(rank, world, backend, here, seed):
    "What a rank sets whoever started it: which GPU it sees, threads for `here` ranks on this host, seeds."
    global inside
    inside = (rank, world)
    if backend == "gloo":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    else:
        # Multicast over NVLink fails in some containers.
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # the record that `_record_for` writes
    torch.set_num_threads(room.threads(here))
    os.environ.setdefault("OMP_NUM_THREADS", str(room.threads(here)))  # libraries warn where nobody chose
    random.seed(seed + rank)
    numpy.random.seed((seed + rank) % 2**32)
    torch.manual_seed(seed + rank)


def join(rank, world, backend, store):
    "Initialise the process group through a file: there is no port to choose, and none to be taken."
    initialise(backend, rank, COLLECTIVE_LIMIT, init_method=f"file://{store}", rank=rank, world_size=world)


def initialise(backend, index, limit, **how):
    "`init_process_group`, with this rank's GPU, `index` on this host, where NCCL wants one."
    device = None
    if backend == "nccl":
        torch.cuda.set_device(index)
        device = torch.device("cuda", index)
    dist.init_process_group(backend, timeout=limit, device_id=device, **how)
    if backend == "nccl":
        dist.barrier(device_ids=[index])  # connections are made now, and not in the first call


def _record_for(path):
    """On SIGUSR2, write NCCL's record of unfinished collectives to `path`.

    A rank waits for the device and not in the collective, so its stack doesn't name it. Python's handlers
    don't run meanwhile; the byte that the signal leaves in a pipe does wake a thread.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.signal(signal.SIGUSR2, lambda signum, frame: None)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def serve():
        while True:
            if signal.SIGUSR2 in os.read(read, 64):
                with contextlib.suppress(Exception):
                    record = torch._C._distributed_c10d._dump_nccl_trace_json(True, True)
                    with open(path + ".part", "wb") as f:
                        f.write(record if isinstance(record, bytes) else record.encode())
                    os.replace(path + ".part", path)

    threading.Thread(target=serve, daemon=True).start()


def leave():
    if dist.is_initialized():
        dist.destroy_process_group()

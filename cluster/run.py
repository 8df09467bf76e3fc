"""A function of the course on the ranks that torchrun starts:

torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 4 cluster/run.py MODULE:FUNCTION [key=value …]

NCCL where the host has a GPU for each of its ranks, else Gloo on the CPU. A rank that raises ends the run.
"""

import ast
import importlib
import os
import sys
import traceback

import torch
import torch.distributed as dist


def value(text):
    "0.1, [1, 2], True; else the text itself."
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def main(target, *given):
    module, _, name = target.partition(":")
    fn = getattr(importlib.import_module(module), name)
    rank, local, here = (int(os.environ[key]) for key in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    torch.manual_seed(rank)
    if torch.cuda.device_count() >= here:
        torch.cuda.set_device(local)
        dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        if here == int(os.environ["WORLD_SIZE"]):  # one host: its name need not be known anywhere
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
        dist.init_process_group("gloo")
    result = fn(**{key: value(text) for key, _, text in (pair.partition("=") for pair in given)})
    print(f"rank {rank} returned {result!r}\n", end="", flush=True)  # in one write: ranks share a pipe
    dist.destroy_process_group()
    os._exit(0)  # Gloo's threads can abort a process while Python ends


if __name__ == "__main__":
    if len(sys.argv) < 2 or ":" not in sys.argv[1] or "RANK" not in os.environ:
        sys.exit("start this with torchrun: " + __doc__.split("\n\n")[1])
    try:
        main(*sys.argv[1:])
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)  # an exit in order waits for ranks that wait for this one; torchrun ends them

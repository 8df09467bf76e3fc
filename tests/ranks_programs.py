"What ranks are asked to do in the tests, importable by them and by torchrun."

import ctypes
import os
import signal

import torch
import torch.distributed as dist


def rank():
    return dist.get_rank()


def add(x=1):
    total = torch.tensor([float(x + dist.get_rank())])
    dist.all_reduce(total)
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}\n", end="")  # in one write: ranks share a pipe
    return total.item()


def raises(where):
    if dist.get_rank() == where:
        raise ValueError("bad shape")
    dist.barrier()


def holds_the_gil_or_stops():
    if dist.get_rank():
        os.kill(os.getpid(), signal.SIGSTOP)
    ctypes.PyDLL(None).sleep(100)

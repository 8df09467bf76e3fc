"What ranks are asked to do in the tests, importable by them and by torchrun."

import ctypes
import os
import signal
import subprocess
import sys
import time

import torch
import torch.distributed as dist


def rank():
    return dist.get_rank()


def add(x=1):
    total = torch.tensor([float(x + dist.get_rank())])
    dist.all_reduce(total)
    print("rank", dist.get_rank(), "of", dist.get_world_size())
    return total.item()


def raises(where, then_wait=True):
    if dist.get_rank() == where:
        raise ValueError("bad shape")
    if then_wait:
        dist.barrier()


def mismatched():
    x = torch.ones(3)
    if dist.get_rank() == 0:
        dist.all_reduce(x)
    else:
        dist.broadcast(x, 0)


def receives_what_nobody_sends():
    dist.irecv(torch.ones(2), 1 - dist.get_rank()).wait()


def sleeps(where, seconds=100):
    if where in (None, dist.get_rank()):
        time.sleep(seconds)


def spins():
    while True:
        pass


def killed(where, number=signal.SIGKILL):
    if dist.get_rank() == where:
        os.kill(os.getpid(), number)
    dist.barrier()


def exits(where, code):
    if dist.get_rank() == where:
        print("last words", file=sys.stderr)
        os._exit(code)
    dist.barrier()


def crashes(where):
    if dist.get_rank() == where:
        ctypes.string_at(0)
    dist.barrier()


def with_a_child():
    "A process that a rank starts and forgets."
    return subprocess.Popen(["sleep", "100"]).pid


def ring(n, dtype=torch.float32):
    "Send n numbers to the next rank."
    me, world = dist.get_rank(), dist.get_world_size()
    got = torch.empty(n, dtype=dtype)
    work = dist.isend(torch.full((n,), me, dtype=dtype), (me + 1) % world)
    dist.recv(got, (me - 1) % world)
    work.wait()
    return got

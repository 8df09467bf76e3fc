"The memory of a layer's weights and gradients while a step runs, counted without a GPU."

import functools

import torch
from torch import nn

from course_lib import meter
from course_lib.data_parallel import sharded
from course_lib.group import Group


def watching(comm, at_least):
    "`meter.Memory` of tensors of `at_least` bytes or more, without the communicator's own."
    return meter.Memory(at_least=at_least, ignore=lambda: comm.busy)


def curves(ranks=4, width=64, layers=6, batch=2):
    """Bytes of weights and gradients that rank 0 holds during one step, by operator: (replica, sharded).

    A stack of linear layers, once with whole weights and once with shards; activations are left out.
    """

    def replica(comm):
        weights = [nn.Parameter(torch.randn(width, width)) for _ in range(layers)]
        return watch(comm, lambda x: run(x, [lambda x, w=w: x @ w.T for w in weights]), layers * 4 * width**2)

    def cut(comm):
        parts = [sharded.shard(torch.randn(width, width), comm) for _ in range(layers)]
        apply = [lambda x, p=p: sharded.sharded_linear(x, p, (width, width), comm) for p in parts]
        return watch(comm, lambda x: run(x, apply), sum(4 * len(p) for p in parts))

    def run(x, apply):
        return functools.reduce(lambda x, f: torch.tanh(f(x)), apply, x)

    def watch(comm, forward, held):
        with watching(comm, at_least=4 * width**2 // ranks) as memory:
            forward(torch.randn(batch, width)).square().sum().backward()
        return [held + n for _, n in memory.line]

    return tuple(Group(ranks).run(fn)[0] for fn in (replica, cut))

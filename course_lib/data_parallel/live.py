"Counts the large tensors that are alive while code runs: the peak memory of a layer, without a GPU."

import functools

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from course_lib.data_parallel import sharded
from course_lib.group import Group


class Live(TorchDispatchMode):
    """`with Live(comm, at_least) as live:` follows tensors of `at_least` bytes or more that operators make.

    live.now()      how many are alive
    live.peak       the most at once
    live.curve      their bytes after each operator

    What the simulated communicator holds for itself (`comm.busy`) doesn't count, nor what was there before.
    """

    def __init__(self, comm=None, at_least=1):
        super().__init__()
        self.comm, self.at_least, self.peak, self.curve, self._refs = comm, at_least, 0, [], {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        if not getattr(self.comm, "busy", False):
            for storage in (t.untyped_storage() for t in _tensors(out)):
                if storage.nbytes() >= self.at_least and storage.data_ptr() not in given:  # no view
                    ref = StorageWeakRef(storage)
                    self._refs[ref.cdata] = (ref, storage.nbytes())
            self.peak = max(self.peak, self.now())
            self.curve.append(self.nbytes())
        return out

    def now(self):
        return len(self._alive())

    def nbytes(self):
        return sum(n for _, n in self._alive())

    def _alive(self):
        return [(ref, n) for ref, n in self._refs.values() if not ref.expired()]


def _tensors(tree):
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, Tensor)]


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
        with Live(comm, at_least=4 * width**2 // ranks) as live:
            forward(torch.randn(batch, width)).square().sum().backward()
        return [held + n for n in live.curve]

    return tuple(Group(ranks).run(fn)[0] for fn in (replica, cut))

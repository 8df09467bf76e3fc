"The most memory that a piece of code holds at one time, counted: the same on every machine."

import weakref

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class _Live(TorchDispatchMode):
    "Keeps the bytes of all storages that were made inside and are still alive, and their maximum."

    def __init__(self, known):
        super().__init__()
        self.known, self.now, self.peak = known, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in pytree.tree_leaves(out):
            if isinstance(t, torch.Tensor):
                self._see(t.untyped_storage())
        return out

    def _see(self, storage):
        key, size = storage.data_ptr(), storage.nbytes()
        if not size or key in self.known:
            return
        self.known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key, size):
        self.known.discard(key)
        self.now -= size


def extra(fn, *args):
    """Bytes that `fn(*args)` holds at its worst moment beside its arguments, counted on CPU tensors.

    Every result of an operator counts from when it is made until nothing refers to it. Memory that one
    operator uses inside itself is not seen.
    """
    mine = [t for t in pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
    if any(t.device.type != "cpu" for t in mine):
        raise ValueError(f"extra counts on CPU tensors; got one on {mine[0].device}")
    mode = _Live({t.untyped_storage().data_ptr() for t in mine})
    with mode:
        out = fn(*args)
    del out
    return mode.peak


def extra_on_gpu(fn, *args):
    "The same measured by PyTorch's allocator: bytes beyond what was allocated when `fn` was called."
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = fn(*args)
    torch.cuda.synchronize()
    del out
    return torch.cuda.max_memory_allocated() - before

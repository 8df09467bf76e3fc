"""What a block of code holds in memory: over time, and at its peak. What was there before is left out.

    with meter.Memory() as m:
        loss = model(x).mean()
        m.mark()
        loss.backward()
    m.line                              # [(operator, bytes alive after it), …]
    m.peak, m.now                       # bytes: the most so far, and those alive
    m.marks                             # [(position in the line, bytes alive), …], one for each mark()
    m.tensors, m.most_tensors           # the same as numbers of tensors

    meter.peak_memory(fn, x)            # the peak of one call, in bytes

On CPU tensors the bytes of the storages that operators made and that are alive are counted: the same on every
machine. What one operator uses inside itself is not seen. With `device="cuda"` they are those of PyTorch's
allocator, read after each operator; `peak_memory` gives the allocator's own peak.
"""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from course_lib.meter import operators
from course_lib.meter.counting import inside_compiled


class Memory(TorchDispatchMode):
    """Watches memory in a `with` block; see the module.

    Storages of fewer than `at_least` bytes don't count, nor do those made while `ignore()` is true. For eager
    code: under a dispatch mode a compiled function would run eagerly, and raises RuntimeError.
    """

    def __init__(self, device="cpu", at_least=0, ignore=None):
        super().__init__()
        self.allocator, self.at_least, self.ignore = device == "cuda", at_least, ignore
        self.line, self.marks, self.peak, self.most_tensors = [], [], 0, 0
        self._sizes = {}  # of the storages that are alive and were made in the block
        self._start = torch.cuda.memory_allocated() if self.allocator else 0

    @property
    def now(self):
        return torch.cuda.memory_allocated() - self._start if self.allocator else sum(self._sizes.values())

    tensors = property(lambda self: len(self._sizes))

    def mark(self):
        "Note this moment: the end of the forward pass, for one."
        self.marks.append((len(self.line), self.now))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if inside_compiled():
            raise RuntimeError("the memory of a compiled function can't be watched: watch what was compiled")
        out = func(*args, **(kwargs or {}))
        if self.ignore and self.ignore():
            return out
        if not self.allocator:
            given = {t.untyped_storage()._cdata for t in operators.tensors([*args, *(kwargs or {}).values()])}
            for storage in (t.untyped_storage() for t in operators.tensors(out)):
                key = storage._cdata
                if key not in given | self._sizes.keys() and storage.nbytes() >= self.at_least:
                    self._sizes[key] = storage.nbytes()
                    weakref.finalize(storage, self._sizes.pop, key)
        self.line.append((func._schema.name.split("::")[1], self.now))
        self.peak, self.most_tensors = max(self.peak, self.now), max(self.most_tensors, self.tensors)
        return out


def peak_memory(fn, *args, device="cpu", **kwargs):
    """Bytes alive at the worst moment of `fn(*args, **kwargs)`, beyond what was there before it.

    With `device="cuda"` the peak of PyTorch's allocator, for compiled code too.
    """
    if device != "cuda":
        with Memory() as memory:
            fn(*args, **kwargs)
        return memory.peak
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fn(*args, **kwargs)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before

"""What a training step holds in memory: over time, at its peak, for the backward pass. And recomputing it.

On a GPU memory is the allocator's, read after each operator; nothing waits for that. On a CPU the bytes of
the storages that are alive are counted, the same on every machine. What existed before is left out.
"""

import contextlib
import functools
import sys
import weakref

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from course_lib.meter import modes as meter_modes

CONTRACTIONS = frozenset({"mm", "addmm", "bmm", "baddbmm", "convolution"})


class Watch(TorchDispatchMode):
    """The memory line of a block of code: `line`, [(operator, bytes alive after it), …], and its `peak`.

    `mark()` notes a moment in `marks`: its position in the line and the bytes alive then. For eager code:
    under a dispatch mode a compiled function would run eagerly, and raises RuntimeError.
    """

    @classmethod
    def _should_skip_dynamo(cls):
        return True

    def __init__(self, allocator=None):
        super().__init__()
        self.allocator = torch.cuda.is_available() if allocator is None else allocator
        self.line, self.marks, self.peak, self.now = [], [], 0, 0
        self._sizes = {}  # of the storages that are alive and were made in the block
        self._start = torch.cuda.memory_allocated() if self.allocator else 0

    def mark(self):
        "Note this moment: the end of the forward pass, for one."
        self.marks.append((len(self.line), self.now))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "torch._dynamo" in sys.modules and meter_modes._inside_compiled():
            raise RuntimeError("the memory of a compiled function can't be watched: watch what was compiled")
        out = func(*args, **(kwargs or {}))
        if self.allocator:
            self.now = torch.cuda.memory_allocated() - self._start
        else:
            given = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
            for t in _tensors(out):
                self._add(t.untyped_storage(), given)
        self.line.append((func._schema.name.split("::")[1], self.now))
        self.peak = max(self.peak, self.now)
        return out

    def _add(self, storage, given):
        key = storage._cdata
        if key in self._sizes or key in given:
            return
        self._sizes[key] = storage.nbytes()
        self.now += storage.nbytes()
        weakref.finalize(storage, self._free, key)

    def _free(self, key):
        self.now -= self._sizes.pop(key, 0)


def _tensors(tree):
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


def peak(step):
    """Bytes alive at the worst moment of `step()`, beyond what was there before it.

    On a GPU the allocator's high-water mark, compiled code included. On a CPU storages are counted by
    `Watch`, which refuses compiled code with RuntimeError.
    """
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with Watch(allocator=False) as watch:
        step()
    return watch.peak


def over_time(run, x, allocator=None):
    "The `Watch` of a training step: forward pass `run(x)`, a mark, backward pass of its mean square."
    with Watch(allocator) as watch:
        loss = run(x).square().mean()
        watch.mark()
        loss.backward()
    return watch


def saved(fn, *args, leave_out=()):
    """What autograd keeps of `fn(*args)` for the backward pass: [(shape, bytes), …], each storage once.

    `leave_out` are tensors that would be there anyway, such as the parameters. Counted by autograd's own
    hooks for saved tensors; what a checkpoint keeps is not seen by them.
    """
    known = {t.untyped_storage()._cdata for t in leave_out}
    found, alive = [], []

    def pack(t):
        key = t.untyped_storage()._cdata
        if key not in known:
            known.add(key)
            alive.append(t)  # so that no other storage takes its address
            found.append((tuple(t.shape), t.untyped_storage().nbytes()))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        fn(*args)
    return found


# --- blocks, and which of them are recomputed ---------------------------------------


class FeedForward(nn.Module):
    "A residual feed-forward block: x + down(gelu(up(norm(x)))). Takes and gives [..., width]."

    def __init__(self, width, inner):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def run(blocks, x, again=(), context_fn=None, preserve_rng_state=True):
    """`blocks` one after the other; those numbered in `again` keep only their input and are recomputed.

    `context_fn` is `torch.utils.checkpoint`'s: a pair of contexts, for the forward pass and for recomputing.
    Raises ValueError for a number that is no block.
    """
    again = set(again)
    if unknown := again - set(range(len(blocks))):
        raise ValueError(f"there is no block {min(unknown)}: the {len(blocks)} blocks are numbered from 0")
    more = {} if context_fn is None else {"context_fn": context_fn}
    for i, block in enumerate(blocks):
        if i in again:
            x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=preserve_rng_state, **more)
        else:
            x = block(x)
    return x


def keeping(decide):
    """A `context_fn` that keeps the results of the operators for which `decide(name, args)` is true.

    The rest is recomputed. `name` is the operator's, such as "mm", `args` are its arguments.

    Selective recomputation, Korthikanti et al. 2022 (arXiv 2205.05198), by torch's own selective checkpoint.
    """

    def policy(ctx, op, *args, **kwargs):
        name = op._schema.name.split("::")[1] if hasattr(op, "_schema") else str(op)
        return CheckpointPolicy.MUST_SAVE if decide(name, args) else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)


def matmuls(name, args):
    "Is this operator a contraction? They cost nearly all FLOPs, and their results are a part of the memory."
    return name in CONTRACTIONS


def all_but_scores(name, args):
    "Contractions, except for attention's scores: a product of two that is as wide as it is high."
    return name in CONTRACTIONS and not (name == "bmm" and args[0].shape[-2] == args[1].shape[-1])


def everything(name, args):
    "Keep every result."
    return True


def frozen_statistics(module):
    """A `context_fn` for `run` and `checkpoint`: recomputing leaves batch norm's statistics alone.

    A batch norm that is run twice counts two batches and moves its running mean twice. While its values are
    recomputed it gets copies of its statistics, which are thrown away afterwards.
    """

    @contextlib.contextmanager
    def with_copies():
        norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        own = [dict(m._buffers) for m in norms]
        for m in norms:
            m._buffers.update({k: b if b is None else b.clone() for k, b in m._buffers.items()})
        try:
            yield
        finally:
            for m, buffers in zip(norms, own, strict=True):
                m._buffers.update(buffers)

    return lambda: (contextlib.nullcontext(), with_copies())

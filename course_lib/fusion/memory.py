"What a training step holds in memory over time (`meter.Memory`) and for the backward pass; recomputing it."

import contextlib
import functools

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from course_lib import machine, meter

CONTRACTIONS = frozenset({"mm", "addmm", "bmm", "baddbmm", "convolution"})


def peak(step):
    "Bytes alive at the worst moment of `step()`, beyond what was there before it, on this machine's device."
    return meter.peak_memory(step, device=machine.device().type)


def over_time(run, x):
    "The `meter.Memory` of a training step: forward pass `run(x)`, a mark, backward pass of its mean square."
    with meter.Memory(x.device.type) as memory:
        loss = run(x).square().mean()
        memory.mark()
        loss.backward()
    return memory


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

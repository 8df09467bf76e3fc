"What lesson recompute keeps out of its cells: the calls that are run again, and small sums."

import contextlib

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

from course_lib import show

WORDS = {"keep": "no checkpoint", "again": "each block again"} | {
    f"yours_{n}": f"your policy, {n} %" for n in (12, 50, 100)
}


class Calls(TorchDispatchMode):
    "Lists the calls that have FLOPs: `rows` of (operator, bytes of the result, FLOPs)."

    def __init__(self):
        super().__init__()
        self.rows = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        size = sum(
            t.nbytes for t in (out if isinstance(out, tuple) else [out]) if isinstance(t, torch.Tensor)
        )
        if formula := flop_registry.get(op._overloadpacket):
            self.rows.append((op, size, formula(*args, **(kwargs or {}), out_val=out)))
        elif "scaled_dot_product" in op.name():  # torch has no formula for attention on a CPU
            q, k = args[:2]
            self.rows.append((op, size, 4 * q.numel() * k.shape[-2]))
        return out


def calls_again(fn, x):
    """What a checkpointed `fn(x)` calls again in its backward pass: [(operator, bytes, FLOPs), …], in order.

    Calls without FLOPs are left out. Bytes are those of the result. No gradient is changed.
    """
    x, calls = x.detach().requires_grad_(), Calls()
    y = checkpoint(fn, x, use_reentrant=False, context_fn=lambda: (contextlib.nullcontext(), calls))
    torch.autograd.grad(y, x, torch.ones_like(y))
    return calls.rows


def name(op):
    "An operator's name without its namespace: `mm` of torch.ops.aten.mm.default."
    return op.name().split("::")[1].split(".")[0].strip("_")


def said(prediction, measured):
    "What came out beside what was predicted; None means that nothing was written."
    return f"{show.number(measured)}; you said {prediction}"


def segment_peak(blocks, segment, inputs, values):
    """Bytes that segments of `segment` blocks hold at the worst moment (Chen et al. 2016, arXiv 1604.06174).

    `inputs` are the bytes of a block's input, `values` those that a block keeps. Gradients don't count.
    """
    return -(-blocks // segment) * inputs + segment * values


def explore(blocks=64, kept=4):
    "The explorer's numbers, in units of a block's input: {segment: the highest memory}."
    return {s: segment_peak(blocks, s, 1, kept) for s in range(1, blocks + 1)}


def unbeaten(points):
    """The keys of {key: (bytes, low, median, high)}, by bytes, that no way with no more bytes surely beats.

    `low` and `high` are the ends of the seconds that were measured; ranges that overlap decide nothing.
    """
    return [key for key, (size, low, *_) in sorted(points.items(), key=lambda p: p[1])
            if not any(s <= size and h < low for s, _, _, h in points.values())]  # fmt: skip

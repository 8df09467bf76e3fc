"""What a step moves and keeps, in fp32 and in mixed precision, counted on the CPU."""

import itertools

import torch
from torch.nn import functional as F

from course_lib import precision


def written_out(name, rows=2048, widths=(192, 256, 48), backward=True):
    """A function that makes a training step of an MLP on the CPU, casts written out for `meter` to count.

    The weights stay in fp32; `name` is "fp32", "bf16" or "fp16", the format of matmuls and activations.
    Without `backward` the function stops at the loss and returns it.
    """
    dtype = precision.DTYPES[name]
    draw = torch.Generator(device="cpu").manual_seed(0)
    weights = [
        (torch.randn(b, a, generator=draw, device="cpu") / a**0.5).requires_grad_()
        for a, b in itertools.pairwise(widths)
    ]
    x = torch.randn(rows, widths[0], generator=draw, device="cpu")
    y = torch.randint(widths[-1], (rows,), generator=draw, device="cpu")

    def step():
        h = x.to(dtype)
        for i, w in enumerate(weights):
            h = h @ w.to(dtype).t()
            if i < len(weights) - 1:
                h = F.relu(h)
        loss = F.cross_entropy(h.float(), y)
        if not backward:
            return loss
        for w in weights:
            w.grad = None
        loss.backward()
        with torch.no_grad():
            for w in weights:
                w.sub_(w.grad, alpha=0.1)
        return None

    return step


def kept_bytes(forward):
    "Bytes that autograd keeps for the backward pass of `forward()`, each stretch of memory counted once."
    kept = {}

    def pack(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = forward()
    del out
    return sum(kept.values())

"""A pattern that the compiler knows, spelt in ways that it may not: attention from plain operators.

Inductor, the compiler behind torch.compile, looks in a graph for attention spelt in one of the ways on its
list and puts the fused operator in its place. `matched` asks it, without generating any code.
"""

import contextlib
import math

import torch
from torch.nn import functional as F

from course_lib import machine, meter, timing


def _scores(q, k):
    return q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])


def library_softmax(q, k, v):
    "Attention with torch's softmax."
    return torch.softmax(_scores(q, k), -1) @ v


def own_softmax(q, k, v):
    "Attention with a softmax written out."
    s = _scores(q, k)
    e = torch.exp(s - s.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True) @ v


def divides_last(q, k, v):
    "The softmax's division, after the product with v."
    s = _scores(q, k)
    e = torch.exp(s - s.amax(-1, keepdim=True))
    return e @ v / e.sum(-1, keepdim=True)


def scales_the_queries(q, k, v):
    "Queries divided by √d, in place of scores."
    return torch.softmax((q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1), -1) @ v


def with_einsum(q, k, v):
    "Both products as einsum."
    s = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(q.shape[-1])
    return torch.einsum("bhij,bhjd->bhid", torch.softmax(s, -1), v)


def with_soft_cap(q, k, v):
    "Scores squeezed into -30 to 30, as some models do."
    return torch.softmax(30 * torch.tanh(_scores(q, k) / 30), -1) @ v


def fused(q, k, v):
    "The fused operator by its name."
    return F.scaled_dot_product_attention(q, k, v)


SPELLINGS = {
    "torch.softmax": library_softmax,
    "softmax by hand": own_softmax,
    "divided last": divides_last,
    "queries scaled first": scales_the_queries,
    "einsum": with_einsum,
    "scores capped": with_soft_cap,
}


def matched(fn, training):
    """Does Inductor find attention in `fn(q, k, v)` and put the fused operator in its place?

    On small float32 CPU tensors, through Inductor's own passes over the graph, without generating code.
    `training`: the inputs need gradients. The answer belongs to this release of torch. Raises ValueError
    where `fn` is no attention.
    """
    import torch._dynamo as dynamo
    from torch._dynamo.utils import counters
    from torch._inductor import compile_fx

    q, k, v = (torch.randn(2, 3, 16, 8, requires_grad=training) for _ in range(3))

    def as_it_is(graph, inputs, **kwargs):
        return graph.forward

    def backend(graph, inputs):
        return compile_fx.compile_fx(graph, inputs, inner_compile=as_it_is)

    dynamo.reset()
    counters["inductor"].clear()
    try:
        out = torch.compile(fn, backend=backend, fullgraph=True)(q, k, v)
        found = counters["inductor"]["fuse_attention"] > 0
    finally:
        dynamo.reset()
    want = fused(q, k, v)
    if training and isinstance(out, list | tuple):
        out = out[0]
    if fn is not with_soft_cap and not torch.allclose(out, want, atol=1e-4):
        raise ValueError(f"{getattr(fn, '__name__', fn)} is not softmax(q @ k.T / sqrt(d)) @ v")
    return found


def inputs(length, heads=4, width=64, batch=1, device=None, dtype=None):
    "q, k, v of [batch, heads, length, width] that need gradients, on this machine's device."
    device = device or machine.device()
    dtype = dtype or machine.pick(cpu=torch.float32, gpu=torch.bfloat16)
    return [torch.randn(batch, heads, length, width, device=device, dtype=dtype, requires_grad=True)
            for _ in range(3)]  # fmt: skip


def measure(fn, length, seconds=0.2, **sizes):
    """(bytes at the peak, seconds) of one forward and backward pass of `fn(q, k, v)` at `length` positions.

    The bytes are what is alive beyond the inputs: the allocator's on a GPU, storages counted on a CPU.
    """
    q, k, v = inputs(length, **sizes)

    def step():
        for t in (q, k, v):
            t.grad = None
        fn(q, k, v).sum().backward()

    step()
    for t in (q, k, v):
        t.grad = None
    peak = meter.peak_memory(step, device=q.device.type)
    return peak, timing.time(step, seconds=seconds, device=q.device.type).median


def sweep(arms, lengths, seconds=0.2, **sizes):
    "`measure` of {name: fn} at each length: {name: [(length, bytes, seconds), …]}."
    found = {name: [] for name in arms}
    for length in lengths:
        for name, fn in arms.items():
            found[name].append((length, *measure(fn, length, seconds, **sizes)))
    return found


@contextlib.contextmanager
def compiled(fn, **options):
    "torch.compile's version of `fn` in a fresh Dynamo, which is reset afterwards; one shape is one kernel."
    import torch._dynamo as dynamo

    dynamo.reset()
    try:
        yield torch.compile(fn, dynamic=False, **options)
    finally:
        dynamo.reset()

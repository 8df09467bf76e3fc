"What lesson attention keeps: contraction in the interpreter, blocks of a mask, molecules, fallbacks."

import contextlib
import inspect

import numpy as np
import torch

LOG2E = 1.4426950408889634
# TFLOP/s of forward passes in dialects of Triton on an H100, fp16, head size 128, length 8,192, not causal:
# facebookexperimental/triton, pull requests 205, 206 and 829.
PUBLISHED = {
    "plain": 464,
    "warp-specialised": 526,
    "+ pipelined": 581,
    "+ ping-pong": 599,
    "+ persistent": 608,
}


@contextlib.contextmanager
def contraction(on=True):
    """Kernels launched inside run in Triton's interpreter on CPU tensors; `on` contracts as a compiler does.

    Of `a * b - c`, `c - a * b` and `a * b + c` in float32 the product is then not rounded, as in an FMA.
    Both steps are in float64, where the product of two float32 numbers is exact, and rounded once.
    `tl.fma` is an FMA in both ways; Triton's interpreter rounds its product.
    """
    from course_lib.kernels import interpret

    def binary(op):
        def run(self, lhs, rhs):
            out = self.binary_op(lhs, rhs, op)
            single = lhs.dtype.scalar == interpret.tl.float32
            if op is np.multiply:
                out.factors = (lhs.data, rhs.data) if single else None
                return out
            products = [i for i, side in enumerate((lhs, rhs)) if getattr(side, "factors", None)]
            if single and products:
                sides = [lhs.data.astype(np.float64), rhs.data.astype(np.float64)]
                a, b = (lhs, rhs)[products[0]].factors
                sides[products[0]] = a.astype(np.float64) * b
                out = interpret.Handle(op(*sides).astype(np.float32), out.dtype)
            return out

        return run

    def fma(self, x, y, z, original=interpret.Builder.create_fma):
        if x.dtype.scalar != interpret.tl.float32:
            return original(self, x, y, z)
        return interpret.Handle((x.data.astype(np.float64) * y.data + z.data).astype(np.float32), x.dtype)

    def launch(fn, grid, args, kwargs):
        names = inspect.signature(fn).parameters
        bound = inspect.signature(fn).bind(*args, **{k: v for k, v in kwargs.items() if k in names})
        interpret.execute(fn, grid, bound.arguments)

    rounded = {"create_fmul": np.multiply, "create_fsub": np.subtract, "create_fadd": np.add}
    methods = {name: binary(op) for name, op in rounded.items()} if on else {}
    with interpret.everything(launch, create_fma=fma, **methods):
        yield


def blocks(n=320, rows=64, keys=32, causal=True):
    """The blocks of an n x n score matrix, `rows` x `keys` each: lists of "free", "edge", "empty".

    A free block has every score, an edge block needs a mask, an empty one has none.
    """
    found = []
    for first in range(0, n, rows):
        last = min(first + rows, n) - 1
        line = []
        for start in range(0, n, keys):
            whole = start + keys <= n and (not causal or start + keys - 1 <= first)
            line.append("free" if whole else "edge" if start <= last or not causal else "empty")
        found.append(line)
    return {"n": n, "rows": rows, "keys": keys, "causal": causal, "blocks": found}


def count(blocks):
    "{kind: how many blocks} of what `blocks` gives."
    kinds = [kind for line in blocks["blocks"] for kind in line]
    return {kind: kinds.count(kind) for kind in ("free", "edge", "empty")}


def molecules(n, most=40, seed=0):
    """Molecules of 5 to `most` atoms side by side, n atoms in all: (molecule of each atom, hops [n, n]).

    A molecule is a tree of bonds with a few rings. Hops of 0, 1 and 2 are counted; 3 is farther. int32, int8.
    """
    draw = torch.Generator().manual_seed(seed)
    which, hops = torch.zeros(n, dtype=torch.int32), torch.full((n, n), 3, dtype=torch.int8)
    start = number = 0
    while start < n:
        size = min(n - start, int(torch.randint(5, most + 1, (), generator=draw)))
        bond = torch.eye(size)
        for atom in range(1, size):
            for _ in range(1 + (atom % 6 == 5)):  # a second bond closes a ring
                other = atom - 1 - int(torch.randint(min(atom, 3), (), generator=draw))
                bond[atom, other] = bond[other, atom] = 1
        mine = hops[start : start + size, start : start + size]
        mine[bond @ bond > 0], mine[bond > 0] = 2, 1
        which[start : start + size] = number
        start, number = start + size, number + 1
    return which, hops.fill_diagonal_(0)


def refuse_fallback(what):
    """Raise RuntimeError where Dynamo gave up a compilation since its counters were last cleared.

    `what` then ran unfused: past `torch._dynamo.config.recompile_limit` a call runs eagerly, with one warning
    in the log. Calls compiled with `fullgraph=True` can't be judged: their frames aren't counted, and they
    raise past the limit.
    """
    frames = torch._dynamo.utils.counters["frames"]
    total, given_up = frames["total"], frames["total"] - frames["ok"]
    if not total:
        raise RuntimeError(
            f"{what}: Dynamo counted no frame. Call the compiled function after "
            "torch._dynamo.utils.counters.clear(), without fullgraph=True"
        )
    if given_up:
        raise RuntimeError(
            f"{what}: {given_up} of {total} compilations were given up, and calls ran unfused. "
            "Call torch._dynamo.reset() and torch._dynamo.utils.counters.clear(), and time it again"
        )

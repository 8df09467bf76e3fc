"""Checks of attention. Oracles: softmax(q k^T) v with all scores in float64, masks by loops over integers.

Kernels run as in lesson triton: under `watch`, then compiled for an H200.
"""

import contextlib
import math
import random

import numpy as np
import torch

from course_lib import attention as lesson
from course_lib import checking as core
from course_lib import meter
from course_lib.checking import close, exercise, require, yours  # noqa: F401
from course_lib.triton.check import BF16, FULL, HALF, NAMES, Kernel

INF = math.inf
RTOL = {FULL: 2e-5, HALF: 2e-3, BF16: 1.5e-2}  # of weights in the dtype, beside the largest value


def dense(q, k, v, scale, keep=None):
    "(out, lse) in float64; a row without keys has out 0 and lse -inf."
    scores = q.double() @ k.double().mT * scale
    if keep is not None:
        scores = scores.masked_fill(~keep, -INF)
    return scores.softmax(-1).nan_to_num() @ v.double(), scores.logsumexp(-1)


def same(got, want, what, rtol=2e-5):
    "Require (out, lse), each with a sentence of its own; lse may be -inf."
    out, lse = core.parts(got, "out lse", what)
    close(out, want[0], f"out, {what}", rtol=rtol, atol=rtol * want[0].abs().max().item())
    if isinstance(lse, torch.Tensor) and lse.shape == want[1].shape:
        for at in ((lse == -INF) != (want[1] == -INF)).nonzero().tolist():
            pair = f"expected {want[1][tuple(at)]:.6g} at {at}, got {lse[tuple(at)]:.6g}"
            raise core.Wrong(f"lse, {what}: {pair}")
        lse = lse.masked_fill(lse == -INF, 0.0)
    close(lse, want[1].masked_fill(want[1] == -INF, 0.0), f"lse, {what}", rtol=2e-5, atol=2e-5)


SCORES = {  # factors of the keys: each kind shows another mistake
    "gaussian scores": lambda n: torch.ones(n, 1),
    "scores that rise": lambda n: torch.linspace(0.1, 60, n)[:, None],
    "scores that fall": lambda n: torch.linspace(60, 0.1, n)[:, None],
    "scores far below zero": lambda n: torch.ones(n, 1),
}


def parts_once(sizes, *wholes):
    "The parts of tensors, one after another; a part is overwritten when the next is asked for."
    for pieces in zip(*(t.split(sizes, dim=-1 if t.dtype == torch.bool else 0) for t in wholes), strict=True):
        given = [p.clone() for p in pieces]
        yield tuple(given)
        for name, a, b in zip(("k", "v", "keep"), given, pieces, strict=True):
            require(torch.equal(a, b), f"{name} of a block is changed in place; write a new tensor")
        for t in given:
            t.copy_(core.poison(*t.shape) if t.dtype != torch.bool else ~t)


@exercise("attention.1", "one pass, no matrix of all scores, rows without keys as stated")
def online(answer):
    core.need_callable(answer)
    for trial, (kind, factor) in enumerate(SCORES.items()):
        n, width, wide = core.ragged(5, 40, 3)
        sizes = [random.randrange(1, 23) for _ in range(6)]
        total = sum(sizes)
        q, k, v = torch.randn(n, width), torch.randn(total, width), torch.randn(total, wide) + 2
        scale = random.uniform(0.2, 0.6)
        if trial in (1, 2):
            q, k = q.abs(), k.abs() * factor(total)
        elif trial == 3:
            q[:, 0], k[:, 0] = 1.0, -990 / scale
        keep = torch.rand(n, total) < 0.6
        keep[0], keep[1, : -sizes[-1]], keep[2, sizes[0] :], keep[3] = False, False, False, True
        what = f"{n} queries, keys in blocks of {sizes}, {kind}"
        got = core.call(answer, q, parts_once(sizes, k, v, keep), scale)
        same(got, dense(q, k, v, scale, keep), what, rtol=4e-4 if trial == 3 else 5e-5)
    q, k, v = torch.randn(64, 4), torch.randn(4096, 4), torch.randn(4096, 4)
    blocks = zip(
        k.split(32), v.split(32), torch.ones(64, 4096, dtype=torch.bool).split(32, dim=1), strict=True
    )
    peak = meter.peak_memory(answer, q, blocks, 0.5)
    most = 64 * 4096 * 4 // 4
    size = f"{peak:,} bytes at its peak, where {most:,} are ample"
    require(peak < most, f"64 queries, 4,096 keys in blocks of 32: {size}: keep no block and no scores")


@exercise("attention.2", "any two parts, large and small lse, parts without keys")
def merge(answer):
    core.need_callable(answer)
    for trial, shift in enumerate((0.0, 1000.0, -1100.0, 0.0)):
        (heads, total, wide), n = core.ragged(2, 9, 3), random.randrange(9, 13)
        first = ((heads,), (), (heads, 2), (heads,))[trial]  # the dimensions before n
        q, k, v = (torch.randn(*first, *size) for size in ((n, 6), (9 * total, 6), (9 * total, wide)))
        k[..., 0], q[..., 0] = k[..., 0] * 0 + shift, 1.0  # adds to all scores of a row alike
        keep = torch.rand(n, 9 * total) < 0.7
        cut = random.randrange(1, 9 * total - 1)
        keep[0], keep[1, :cut], keep[2, cut:] = False, False, False
        pieces = [
            dense(q, k[..., s, :], v[..., s, :], 0.9, keep[:, s]) for s in (slice(cut), slice(cut, None))
        ]
        pieces = [t.float() for piece in pieces for t in piece]
        if trial == 3:  # one part far above the other
            pieces[1] = pieces[1] + 200.0
        lse = torch.logaddexp(pieces[1].double(), pieces[3].double())
        shares = [(t.double() - lse).exp().nan_to_num()[..., None] for t in (pieces[1], pieces[3])]
        want = shares[0] * pieces[0].double() + shares[1] * pieces[2].double(), lse
        what = (
            f"out {list(pieces[0].shape)}, {n} queries, {cut} and {9 * total - cut} keys, lse near {shift:g}"
        )
        same(core.call(answer, *pieces), want, what, rtol=1e-3 if shift else 2e-5)


CASES = (  # dtype, head size, rows and keys of a tile, causal, what is special
    (FULL, 16, 16, 32, False, "one key"),
    (HALF, 64, 32, 32, True, "whole blocks"),
    (HALF, 32, 32, 16, False, "large values"),
    (BF16, 64, 16, 32, True, "scores that rise"),
    (BF16, 32, 128, 16, False, "many blocks that add little"),
    (HALF, 128, 32, 32, True, "scores that fall"),
    (FULL, 16, 32, 16, False, "scores far below zero"),
    (FULL, 16, 32, 16, True, "gaussian scores"),
)


@contextlib.contextmanager
def spied(bm, bn, wide):
    """What a kernel launched inside computes, as a dict that is full afterwards.

    "masked": blocks bm x bn of which tl.where puts a part far below zero; "narrow": products in 32 bits that
    hold the number `wide`.
    """
    from course_lib.kernels import interpret

    builder, found = interpret.Builder, {"masked": 0, "narrow": 0}
    select, binary = builder.create_select, builder.binary_op

    def seen_select(self, keep, a, b):
        found["masked"] += b.data.shape == (bm, bn) and bool((b.data <= -1e30).all())
        return select(self, keep, a, b)

    def seen_op(self, a, b, op, *args):
        out = binary(self, a, b, op, *args)
        if op is np.multiply and out.dtype.scalar == interpret.tl.int32:
            found["narrow"] += bool((out.data == wide).any())
        return out

    builder.create_select, builder.binary_op = seen_select, seen_op
    try:
        yield found
    finally:
        builder.create_select, builder.binary_op = select, binary


def flash_cases(answer, least):
    "Run a kernel of 11 arguments; `least`: only blocks with a score are loaded, only edge blocks are masked."
    kernel = Kernel(answer, 11, "CAUSAL", "D", "BM", "BN")
    for dtype, d, bm, bn, causal, kind in CASES:
        heads, scale = random.randrange(3, 5), random.uniform(0.3, 0.9)
        n = random.choice((2, 3)) * max(bm, bn) + random.randrange(1, min(bm, bn))
        n = {"one key": 1, "whole blocks": 2 * bm, "many blocks that add little": 17 * bn + 3}.get(kind, n)
        q, k, v = (torch.randn(heads, n, d) for _ in range(3))
        rtol = RTOL[dtype]
        if kind in ("scores that rise", "scores that fall"):
            q, k = q.abs() / d**0.5, k.abs() * SCORES[kind](n) / 8
        elif kind == "scores far below zero":  # in fp32, where they lie 0.001 apart; a mask of -10,000 shows
            q[..., 0], k[..., 0], rtol = 1.0, -12_000 / scale, 2e-2
        elif kind == "large values":  # the sum before the division is too large for fp16
            v = 8000 * v + 7999
        elif kind == "many blocks that add little":  # 0.15 % each: lost where the sum has the 8 bits of bf16
            q, k, v, rtol = 0.03 * q, 0.3 * k, 0.1 * v, 5e-3
            q[..., 0], k[..., 0] = 1.0, 0.0
            k[:, :bn, 0] = 6.6 / scale
        q, k, v = q.to(dtype), k.to(dtype), (v + 1).to(dtype)
        out, lse = core.poison(heads, n, d, dtype=dtype), core.poison(heads, n)
        what = f"{heads} heads, n {n}, D {d}, {NAMES[dtype]}, CAUSAL {causal}, BM {bm}, BN {bn}, {kind}"
        ends = [min(first + bm, n) if causal and least else n for first in range(0, n, bm)]
        most = sum(min(-(-end // bn) * bn, n) for end in ends) * heads * d
        sizes = {"CAUSAL": causal, "D": d, "BM": bm, "BN": bn}
        counts = {"once": ({0: "q"}, {3: "out", 4: "lse"}), "limits": {1: most, 2: most}}
        with spied(bm, bn, (heads - 1) * n * d) as found:
            kernel.run((-(-n // bm), heads), q, k, v, out, lse, n, scale, **sizes, what=what, **counts)
        keep = torch.ones(n, n, dtype=torch.bool).tril() if causal else None
        same((out, lse), dense(q, k, v, scale, keep), what, rtol)
        kernel.multiplies(dtype, what)
        if n > bm:
            far = f"the offset of head {heads - 1} is computed in 32 bits"
            require(not found["narrow"], f"{what}: {far}; tl.program_id(1).to(tl.int64) has 64")
        edge = heads * lesson.count(lesson.blocks(n, bm, bn, causal))["edge"]
        many = f"{found['masked']} blocks of scores are masked, where {edge} are edge blocks"
        require(not least or found["masked"] <= edge, f"{what}: {many}: free blocks need no mask")
    kernel.compiles()


@exercise("attention.3", "out and lse right for ragged lengths, four head sizes, fp32, fp16 and bf16")
def flash(answer):
    flash_cases(answer, least=False)


@exercise("attention.4", "right, no empty block is loaded, no free block is masked")
def skipping(answer):
    flash_cases(answer, least=True)


HUGE = {"all -1e30": -1e30, "all 1e12": 1e12, "all -3e15": -3e15, "all 1e30": 1e30, "near -1e5": -1e5}


@exercise("attention.5", "right with contraction on and off, for every size of the scores")
def contracted(answer):
    kernel = Kernel(answer, 4, "BLOCK")
    for block in random.sample((16, 32, 64), 2):
        scale, ways = random.uniform(0.13, 0.2), {"gaussian": 40 * torch.randn(3, block)}
        for size, value in HUGE.items():
            ways[size] = torch.linspace(1.0, 1.8, 6)[:, None].expand(6, block) * value
        ways["near -1e5"] = ways["near -1e5"] + 30 * torch.randn(6, block)
        first, near = torch.arange(block) < 3, 2.0**40 * torch.linspace(1.93, 1.99, 32)[:, None]
        ways["1e12 and -1e30"] = torch.where(first, ways["all 1e12"], -2e30)
        close_by = "2e12 and the next number below"  # in some rows their products round to one number
        ways[close_by] = torch.where(first, near, near.nextafter(torch.tensor(0.0)))
        ways["some -1e30"] = torch.where(first, 40 * torch.randn(4, block), -2e30)
        s = torch.cat(list(ways.values()))
        want = (s.double() * scale * math.log(2)).softmax(-1)
        for on in (None, False, True):
            p, what = core.poison(*s.shape), f"BLOCK {block}, scale {scale:.3f}"
            if on is None:
                kernel.run((len(s),), s, p, scale, BLOCK=block, what=what, once=({0: "s"}, {1: "p"}))
            else:
                with lesson.contraction(on):
                    kernel.kernel[(len(s),)](s, p, scale, BLOCK=block)
            parts = (t.split([len(rows) for rows in ways.values()]) for t in (p, want))
            for size, got, true in zip(ways, *parts, strict=True):
                if size == close_by and not on:
                    continue
                how = f"contraction {'on' if on else 'off'}, {what}"
                close(got, true, f"weights of scores {size}, {how}", rtol=1e-2 if "1e5" in size else 1e-4)
    kernel.compiles()


def masked(fn, name, made, allowed):
    "Require `fn(*made)` to be a mask_mod that allows what `allowed` [batch][query][key] says."
    from torch.nn.attention.flex_attention import create_mask

    mod, n = core.call(fn, *made), len(allowed[0])
    core.need_callable(mod, f"a function of (b, h, q_idx, kv_idx) from {name}")
    try:
        got = create_mask(mod, len(allowed), 2, n, n, device="cpu")
    except Exception as e:
        raise core.Wrong(f"create_mask of {name}{core.shapes(made)} raised {core.describe(e)}") from None
    require(got.dtype == torch.bool, f"{name}: expected booleans, got {got.dtype}")
    for b, i, j in (got[:, 1] != torch.tensor(allowed)).nonzero().tolist():
        says = (
            f"sees key {j} in your mask, and must not"
            if got[b, 1, i, j]
            else f"doesn't see key {j}, and must"
        )
        values = ", ".join(str(m.tolist() if isinstance(m, torch.Tensor) else m) for m in made)
        raise core.Wrong(f"{name}({values}): in batch {b} query {i} {says}")


@exercise("attention.6", "four masks, each position by position")
def masks(sliding, same_document, neighbours, prefix_lm):
    for n in (7, 19):
        at = range(n)
        window, width, radius = random.randrange(2, n - 2), random.randrange(4, 7), 1 if n > 9 else 2
        masked(sliding, "sliding", (window,), [[[0 <= i - j < window for j in at] for i in at]])
        doc = torch.randint(4, (n,)) * 3
        of = doc.tolist()
        masked(
            same_document, "same_document", (doc,), [[[j <= i and of[i] == of[j] for j in at] for i in at]]
        )
        near = [[[abs(i // width - j // width) <= radius and abs(i % width - j % width) <= radius for j in at]
                 for i in at]]  # fmt: skip
        masked(neighbours, "neighbours", (width, radius), near)
        lengths = random.sample(range(1, n), random.randrange(2, 4))
        seen = [[[j <= i or j < long for j in at] for i in at] for long in lengths]
        masked(prefix_lm, "prefix_lm", (torch.tensor(lengths),), seen)

"Answers to the exercises of attention: the course's, right ones of another style, and wrong ones."

import inspect
import linecache
import math

import torch

import course_lib.kernels  # noqa: F401  isort: skip  before triton: it chooses the interpreter
import triton
import triton.language as tl

from course_lib.attention import solutions

FOUR = solutions.sliding, solutions.same_document, solutions.neighbours, solutions.prefix_lm
REFERENCE = {
    "attention.1": solutions.online_attention,
    "attention.2": solutions.merge,
    "attention.3": solutions.flash_kernel,
    "attention.4": solutions.skipping_kernel,
    "attention.5": solutions.weights_kernel,
    "attention.6": FOUR,
}
SCOPE = {"torch": torch, "math": math, "triton": triton, "tl": tl, "attend_keys": solutions.attend_keys}


def made(text, name):
    "What a text defines. Triton reads a kernel's source, which `linecache` gives."
    file = f"<{name}, {len(linecache.cache)}>"
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    scope = {"__name__": __name__, **SCOPE}
    exec(compile(text, file, "exec"), scope)
    return scope[name]


def changed(number, *pairs):
    "An answer with each (old, new) text replaced."
    fn = getattr(REFERENCE[number], "fn", REFERENCE[number])
    text = inspect.getsource(fn)
    for old, new in pairs:
        assert old in text, f"{old!r} is not in the answer to {number}"
        text = text.replace(old, new)
    return made(text, fn.__name__)


def by_merging(q, blocks, scale):
    "Right: each block's own softmax, merged."
    out, lse = None, torch.full((len(q),), -math.inf)
    for k, v, keep in blocks:
        s = (q @ k.T * scale).masked_fill(~keep, -math.inf)
        part = s.logsumexp(-1), s.softmax(-1).nan_to_num() @ v
        out, lse = solutions.merge(torch.zeros_like(part[1]) if out is None else out, lse, part[1], part[0])
    return out, lse


def always_divided(q, blocks, scale):
    "Right: the running output is an average at every moment."
    out, lse = 0.0, torch.full((len(q),), -math.inf)
    for k, v, keep in blocks:
        s = (q @ k.T * scale).masked_fill(~keep, -1e38)
        new = torch.logaddexp(lse, s.double().masked_fill(~keep, -math.inf).logsumexp(-1).float())
        base = new.clamp(min=-1e30)[:, None]
        out, lse = out * (lse[:, None] - base).exp() + (s - base).exp() @ v, new
    return out, lse


def kept_blocks(q, blocks, scale):
    "Wrong: all blocks are kept, and the softmax is of all scores."
    k, v, keep = (torch.cat(t, d) for t, d in zip(zip(*blocks, strict=True), (0, 0, 1), strict=True))
    s = (q @ k.T * scale).masked_fill(~keep, -math.inf)
    return s.softmax(-1).nan_to_num() @ v, s.logsumexp(-1)


def kept_scores(q, blocks, scale):
    "Wrong: the scores are computed block by block, and all kept."
    kept = [((q @ k.T * scale).masked_fill(~keep, -math.inf), v.clone()) for k, v, keep in blocks]
    s, v = torch.cat([s for s, _ in kept], -1), torch.cat([v for _, v in kept])
    return s.softmax(-1).nan_to_num() @ v, s.logsumexp(-1)


def by_sigmoid(out_a, lse_a, out_b, lse_b):
    "Right: the share of b is a logistic function of the difference."
    both = (lse_a == -math.inf) & (lse_b == -math.inf)
    share = torch.where(both, 0.5, torch.sigmoid(torch.where(both, 0.0, lse_b - lse_a)))[..., None]
    return torch.lerp(out_a, out_b, share), torch.logaddexp(lse_a, lse_b)


def by_softmax(out_a, lse_a, out_b, lse_b):
    "Right: the shares are a softmax over the parts."
    lse = torch.stack([lse_a, lse_b])
    shares = lse.softmax(0).nan_to_num()
    return (shares[..., None] * torch.stack([out_a, out_b])).sum(0), lse.logsumexp(0)


@triton.jit
def by_pointers(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, n, scale,
    CAUSAL: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    "Right: pointers and masks in place of descriptors; the scale in the exponent; only blocks with a score."
    head = tl.program_id(1).to(tl.int64) * n
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.arange(0, D)[None, :]
    q = tl.load(q_ptr + (head + i[:, None]) * D + d, mask=i[:, None] < n, other=0.0)
    m = tl.full((BM,), -1e30, tl.float32)
    l, acc = tl.zeros((BM,), tl.float32), tl.zeros((BM, D), tl.float32)
    end = tl.minimum(n, tl.program_id(0) * BM + BM) if CAUSAL else n
    for start in range(0, end, BN):
        j = start + tl.arange(0, BN)
        at = (head + j[:, None]) * D + d
        k = tl.load(k_ptr + at, mask=j[:, None] < n, other=0.0)
        v = tl.load(v_ptr + at, mask=j[:, None] < n, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        keep = (j[None, :] < n) & ((i[:, None] >= j[None, :]) | (not CAUSAL))
        s = tl.where(keep, s, -1e38)
        new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp(s - new[:, None])
        l = l * tl.exp(m - new) + tl.sum(p, 1)
        acc = acc * tl.exp(m - new)[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        m = new
    tl.store(out_ptr + (head + i[:, None]) * D + d, acc / l[:, None], mask=i[:, None] < n)
    tl.store(lse_ptr + head + i, m + tl.log(l), mask=i < n)


ALL_BLOCKS = ("free, end = first // BN * BN, tl.minimum(first + BM, n)", "free, end = 0, n")
RIGHT = {
    "attention.1": [by_merging, always_divided],
    "attention.2": [by_sigmoid, by_softmax],
    "attention.3": [by_pointers, solutions.skipping_kernel],
    "attention.4": [
        changed("attention.4", ("0, free, n, scale, False", "the edge"),  # the edge blocks first
                ("free, end, n, scale, True", "0, free, n, scale, False"),
                ("the edge", "free, end, n, scale, True")),
        changed("attention.4", ("tl.minimum(first + BM, n)", "tl.minimum(tl.cdiv(first + BM, BN) * BN, n)")),
    ],
    "attention.5": [
        changed("attention.5", ("tl.exp2((s - tl.max(s, axis=0)) * scale)",
                                "tl.exp((s - tl.max(s, axis=0)) * (scale * 0.6931471805599453))")),
        changed("attention.5", ("(s - tl.max(s, axis=0)) * scale", "-scale * (tl.max(s, axis=0) - s)")),
    ],
    "attention.6": [
        (
            lambda w: lambda b, h, i, j: torch.where(j > i, False, i - w < j),
            lambda doc: lambda b, h, i, j: (doc[i] - doc[j] == 0) & ~(i < j),
            lambda width, r: lambda b, h, i, j: torch.maximum((i // width - j // width).abs(),
                                                              (i % width - j % width).abs()) <= r,
            lambda long: lambda b, h, i, j: j < torch.maximum(long[b], i + 1),
        ),
        (*FOUR[:3], lambda long: lambda b, h, i, j: ~((j >= long[b]) & (j > i))),
    ],
}  # fmt: skip


def four(place, made):
    return *FOUR[:place], made, *FOUR[place + 1 :]


MUTANTS = {
    "attention.1": [
        kept_blocks,
        kept_scores,
        changed("attention.1", ("o * shrink[:, None]", "o")),
        changed("attention.1", ("q @ k.T * scale", "q @ k.mul_(scale).T")),
        changed("attention.1", ("torch.where(new == -math.inf, 0.0, new)", "new")),
        changed("attention.1", ("torch.maximum(m, s.amax(-1))", "s.amax(-1)")),
        changed("attention.1", ("torch.where(new == -math.inf, 0.0, new)", "torch.zeros_like(new)")),
        changed("attention.1", ("~keep, -math.inf", "~keep, -1e30")),
        changed("attention.1", ("torch.full((len(q),), -math.inf)", "torch.full((len(q),), -500.0)")),
        changed("attention.1", ("m + l.log()", "l.log()")),
        changed("attention.1", ("* scale", "* q.shape[1] ** -0.5")),
    ],
    "attention.2": [
        changed("attention.2", ("torch.where(lse == -math.inf, 0.0, lse)", "lse")),
        changed("attention.2", ("(lse_a - base).exp(), (lse_b - base).exp()",
                                "lse_a.exp() / base.exp(), lse_b.exp() / base.exp()")),
        changed("attention.2", ("(lse_a - base).exp(), (lse_b - base).exp()",
                                "lse_a / (lse_a + lse_b), lse_b / (lse_a + lse_b)")),
        changed("attention.2", ("torch.logaddexp(lse_a, lse_b)", "torch.maximum(lse_a, lse_b)")),
        changed("attention.2", ("a[..., None] * out_a + b[..., None] * out_b", "(out_a + out_b) / 2")),
        changed("attention.2", ("a[..., None] * out_a + b[..., None] * out_b",
                                "b[..., None] * out_a + a[..., None] * out_b")),
        changed("attention.2", ("a[..., None]", "a.unsqueeze(2)"), ("b[..., None]", "b.unsqueeze(2)")),
    ],
    "attention.3": [
        changed("attention.3", ("cols[None, :] < n", "cols[None, :] >= 0")),
        changed("attention.3", ("keep = cols[None, :] < n", "keep = (cols[None, :] < n) | (n < BN)")),
        changed("attention.3", ("acc * shrink[:, None]", "acc")),
        changed("attention.3", (".to(tl.int64) * n * D", " * n * D")),
        changed("attention.3", ("cols[None, :] <= rows", "cols[None, :] < rows")),
        changed("attention.3", ('v, acc, input_precision="ieee")',
                                'v, acc, input_precision="ieee").to(v.dtype).to(tl.float32)')),
        changed("attention.3", ("keep & (cols[None, :] <= rows[:, None])", "keep")),
        changed("attention.3", ("range(0, n, BN)", "range(0, n, BM)")),
        changed("attention.3", ('.T, input_precision="ieee")', ".T)")),
        changed("attention.3", ("(scale * 1.4426950408889634)", "(1.4426950408889634 / D**0.5)")),
        changed("attention.3", ("tl.full([BM], -float(\"inf\")", "tl.full([BM], -100.0")),
        changed("attention.3", ("tl.dot(q, k_rows.load([start, 0]).T,",
                                "tl.dot(q.to(tl.float32), k_rows.load([start, 0]).T.to(tl.float32),")),
        changed("attention.3", ("p.to(v.dtype), v,", "p, v.to(tl.float32),")),
        changed("attention.3", ("mask=rows < n", "mask=rows >= 0")),
        changed("attention.3", ('keep, s, -float("inf")', "keep, s, -10000.0")),
        changed("attention.3", ("(acc / total[:, None]).to(q.dtype)",
                                "acc.to(q.dtype) / total[:, None].to(q.dtype)")),
    ],
    "attention.4": [
        changed("attention.4", ALL_BLOCKS),
        by_pointers,
        changed("attention.4", ("free, end = first // BN * BN", "free, end = 0")),
        changed("attention.4", ("free, end = n // BN * BN, n", "free, end = 0, n")),
        changed("attention.4", ("free, end = first // BN * BN", "free, end = tl.cdiv(first, BN) * BN")),
        changed("attention.4", ("free, end = n // BN * BN, n", "free, end = n, n")),
        changed("attention.4", ("free, end = first // BN * BN", "free, end = first")),
        changed("attention.4", ("0, free, n", "BN, free, n")),
    ],
    "attention.5": [
        changed("attention.5", ("(s - tl.max(s, axis=0)) * scale", "s * scale - tl.max(s * scale, axis=0)")),
        changed("attention.5", ("(s - tl.max(s, axis=0)) * scale", "s * scale - tl.max(s, axis=0) * scale")),
        changed("attention.5", ("(s - tl.max(s, axis=0)) * scale",
                                "tl.maximum(tl.minimum(s * scale - tl.max(s * scale, axis=0), 0.0), -99.0)")),
        changed("attention.5", ("(s - tl.max(s, axis=0)) * scale",
                                "tl.where(s * scale == tl.max(s * scale, axis=0), 0.0, "
                                "(s - tl.max(s, axis=0)) * scale)")),
        changed("attention.5", ("s = tl.load(s_ptr + at)", "s = tl.maximum(tl.load(s_ptr + at), -10000.0)")),
        changed("attention.5", ("s = tl.load(s_ptr + at)",
                                "s = tl.load(s_ptr + at)\n    s = tl.where(tl.abs(s) > 1e9, -1e9, s)")),
        changed("attention.5", ("(s - tl.max(s, axis=0)) * scale", "s * scale")),
        changed("attention.5", ("tl.exp2", "tl.exp")),
        changed("attention.5", ("(s - tl.max(s, axis=0)) * scale",
                                "tl.fma(s, scale, -tl.max(s * scale, axis=0))")),
    ],
    "attention.6": [
        four(0, lambda w: lambda b, h, i, j: (j <= i) & (i - j <= w)),
        four(0, lambda w: lambda b, h, i, j: (i - j).abs() < w),
        four(1, lambda doc: lambda b, h, i, j: doc[i] == doc[j]),
        four(1, lambda doc: lambda b, h, i, j: (j <= i) & (doc[i] <= doc[j])),
        four(2, lambda width, r: lambda b, h, i, j: (i - j).abs() <= r * width + r),
        four(2, lambda width, r: lambda b, h, i, j: ((i // width - j // width).abs() <= r)
             & ((i - j).abs() % width <= r)),
        four(3, lambda long: lambda b, h, i, j: (j < long[0]) | (j <= i)),
        four(3, lambda long: lambda b, h, i, j: (j <= long[b]) | (j <= i)),
        four(3, lambda long: lambda b, h, i, j: j < long[b]),
    ],
}  # fmt: skip

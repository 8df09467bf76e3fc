"""Answers to the exercises of triton: the course's, right ones of another style, and wrong ones.

Each is the course's kernel with some text replaced. Triton reads a kernel's source, which `linecache` gives.
"""

import functools
import inspect
import linecache

import torch

import course_lib.kernels  # noqa: F401  isort: skip  before triton: it chooses the interpreter
import triton
import triton.language as tl

from course_lib.triton import solutions

KERNELS = {number: getattr(solutions, names[0]) for number, names in solutions.EXERCISES.items()}
REFERENCE = KERNELS | {"triton.4": (solutions.rmsnorm_backward_kernel, solutions.RMSNorm)}


def made(text, name):
    "The function `name` that a text defines, with a source that `inspect` finds."
    file = (
        f"<{name}, {len(linecache.cache)}>"  # one each: a kernel's source is read when it is first launched
    )
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    scope = {"__name__": __name__, "torch": torch, "triton": triton, "tl": tl}
    exec(compile(text, file, "exec"), scope)
    return scope[name]


def changed(number, *pairs, head=""):
    "The kernel of an exercise with each (old, new) text replaced wherever it stands, `head` above it."
    kernel = KERNELS[number]
    fn = getattr(kernel, "fn", kernel)
    text = inspect.getsource(fn)
    for old, new in pairs:
        assert old in text, f"{old!r} is not in the answer to {number}"
        text = text.replace(old, new)
    return made(head + text, fn.__name__)


def backward(*pairs):
    return changed("triton.4", *pairs), solutions.RMSNorm


class DyAsItComes(solutions.RMSNorm):
    "Wrong: the strides of 0 of `y.sum()` reach the kernel."

    @staticmethod
    def backward(ctx, dy):
        x, w, rstd = ctx.saved_tensors
        dx, dw = torch.empty_like(x), torch.empty_like(w, dtype=torch.float32)
        strides = [t.stride(0) for t in (dy, x, dx)]
        solutions.rmsnorm_backward_kernel[(1,)](
            dy, x, w, rstd, dx, dw, *strides, 0, *x.shape, ROWS=2, BLOCK=64, STAGES=1
        )
        return dx, dw.to(w.dtype), None


class EpsOfItsOwn(solutions.RMSNorm):
    "Wrong: eps isn't passed on."

    @staticmethod
    def forward(ctx, x, w, eps):
        y, rstd = solutions.run_rmsnorm(x, w)
        ctx.save_for_backward(x, w, rstd)
        return y


class RstdInHalf(solutions.RMSNorm):
    "Wrong: r is computed again, in the dtype of x."

    @staticmethod
    def forward(ctx, x, w, eps):
        ctx.save_for_backward(x, w)
        ctx.eps = eps
        return solutions.run_rmsnorm(x, w, eps)[0]

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        rstd = (x.pow(2).mean(-1) + ctx.eps).rsqrt().float()
        return *solutions.run_rmsnorm_backward(dy, x, w, rstd), None


class OfTheClass(solutions.RMSNorm):
    "Wrong: two layers get each other's tensors."

    @staticmethod
    def forward(ctx, x, w, eps):
        y, rstd = solutions.run_rmsnorm(x, w, eps)
        OfTheClass.saved = x, w, rstd
        return y

    @staticmethod
    def backward(ctx, dy):
        return *solutions.run_rmsnorm_backward(dy, *OfTheClass.saved), None


class AttributesOfCtx(torch.autograd.Function):
    "Right: tensors as attributes of ctx, and dw summed in fp64."

    @staticmethod
    def forward(ctx, x, w, eps):
        y, ctx.rstd = solutions.run_rmsnorm(x, w, eps)
        ctx.x, ctx.w = x, w
        return y

    @staticmethod
    def backward(ctx, dy):
        dx, _ = solutions.run_rmsnorm_backward(dy, ctx.x, ctx.w, ctx.rstd, ROWS=1)
        hat = ctx.x.double() * ctx.rstd[:, None]
        return dx, (dy.double() * hat).sum(0).to(ctx.w.dtype), None


ROWS = "tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES)"
EACH = "tl.cdiv(tl.cdiv(rows, ROWS), tl.num_programs(0))"
A_RUN = f"""tl.range(
        tl.program_id(0) * {EACH}, tl.minimum(tl.cdiv(rows, ROWS), (tl.program_id(0) + 1) * {EACH}),
        num_stages=STAGES
    )"""
SUM5 = 'acc = tl.dot(a, b, acc, input_precision="ieee")'
LAST4 = "dw_ptr + tl.program_id(0) * dw_stride + at"
CHOSEN = "        chosen += tl.sum(tl.where(cols == target, x, 0.0), axis=0)\n"


def the_tutorials(pid, tiles_m, tiles_n, group):
    "Right: as Triton's tutorial has it."
    per_group = group * tiles_n
    first = pid // per_group * group
    size = min(tiles_m - first, group)
    return first + (pid % per_group) % size, (pid % per_group) // size


@triton.jit
def under_jit(pid, tiles_m, tiles_n, group):
    "Right: a kernel's function from the start."
    i = pid // (group * tiles_n)
    j = pid - i * group * tiles_n
    return i * group + j % min(tiles_m - i * group, group), j // min(tiles_m - i * group, group)


def row_by_row(pid, tiles_m, tiles_n, group):
    return pid // tiles_n, pid % tiles_n


def column_then_row(pid, tiles_m, tiles_n, group):
    return solutions.grouped(pid, tiles_m, tiles_n, group)[::-1]


def the_last_group_is_full(pid, tiles_m, tiles_n, group):
    within = pid % (group * tiles_n)
    return pid // (group * tiles_n) * group + within % group, within // group


def a_list_of_tiles(pid, tiles_m, tiles_n, group):
    tiles = []
    for first in range(0, tiles_m, group):
        for column in range(tiles_n):
            tiles += [(row, column) for row in range(first, min(first + group, tiles_m))]
    return tiles[pid]


def pythons_integers(pid, tiles_m, tiles_n, group):
    first = int(pid / (group * tiles_n)) * group
    height = min(tiles_m - first, group)
    within = pid % (group * tiles_n)
    return first + within % height, int(within / height)


SAFE = "x - tl.max(x, axis=0)"
RIGHT = {
    "triton.1": [
        changed("triton.1", ("x_ptr", "left"), ("y_ptr", "right"), ("mask) +", "mask, other=0.0) +")),
        changed("triton.1", ("tl.program_id(0) * BLOCK", "tl.program_id(0).to(tl.int64) * BLOCK")),
    ],
    "triton.2": [
        changed("triton.2", (f"tl.exp({SAFE})", f"tl.exp2(({SAFE}) * 1.44269504)")),
        changed("triton.2", ("e / tl.sum(e, axis=0)", "e * (1.0 / tl.sum(e, 0))"), (".to(tl.float32)", "")),
    ],
    "triton.3": [
        changed("triton.3", ("tl.rsqrt(", "1.0 / tl.sqrt(")),
        changed("triton.3", ("    w = tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32)\n", ""),
                ("x * rstd * w", "x * rstd * tl.load(w_ptr + cols, mask=mask, other=0.0)")),
    ],
    "triton.4": [backward((ROWS, A_RUN)), (solutions.rmsnorm_backward_kernel, AttributesOfCtx)],
    "triton.5": [
        changed("triton.5", (SUM5, 'acc += tl.dot(a, b, input_precision="ieee")')),
        changed("triton.5", ("range(0, K, BLOCK_K)", "range(0, tl.cdiv(K, BLOCK_K))"),
                ("K - start", "K - start * BLOCK_K")),
    ],
    "triton.6": [the_tutorials, under_jit],
    "triton.7": [
        changed("triton.7", (CHOSEN, ""),
                ("chosen = 0.0\n", "chosen = tl.load(row_ptr + tl.maximum(target, 0)).to(tl.float32)\n")),
        changed("triton.7", ("log_total = tl.log(total)", "lse = top + tl.log(total)"),
                ("log_total - (chosen - top)", "lse - chosen"),
                ("tl.exp(x - top - log_total)", "tl.exp(x - top) / total")),
    ],
}  # fmt: skip

MUTANTS = {
    "triton.1": [
        changed("triton.1", (", mask=mask", "")),
        changed("triton.1", ("at < n", "at < n // BLOCK * BLOCK")),
        changed("triton.1", ("tl.program_id(0) * BLOCK", "tl.program_id(0) * 64")),
        changed("triton.1", ("tl.program_id(0) * BLOCK + ", "")),
        changed("triton.1", ("tl.program_id(0) * BLOCK + ", "tl.program_id(0) + tl.num_programs(0) * ")),
        changed("triton.1", ("x_ptr + at, mask", "x_ptr + at, other=ZERO, mask"), head="ZERO = 0.0\n"),
    ],
    "triton.2": [
        changed("triton.2", (', other=-float("inf")', "")),
        changed("triton.2", (" - tl.max(x, axis=0)", "")),
        changed("triton.2", ("tl.sum(e, axis=0)", "(tl.sum(e, axis=0) + 1e-6)")),
        changed("triton.2", ("e / tl.sum(e, axis=0)", "tl.exp(x - (tl.max(x, 0) + tl.log(tl.sum(e, 0))))")),
        changed("triton.2", ("row * out_stride", "row * n_cols")),
        changed("triton.2", ("tl.exp(x - tl.max(x, axis=0))", "shifted(x)"),
                head="def shifted(x):\n    return tl.exp(x - tl.max(x, 0))\n\n\n"),
    ],
    "triton.3": [
        changed("triton.3", ("other=0.0).to(tl.float32)\n    w", "other=0.0)\n    w")),
        changed("triton.3", ("/ n_cols", "/ BLOCK")),
        changed("triton.3", ("/ n_cols + eps", "/ n_cols + 1e-6")),
        changed("triton.3", ("x * rstd * w", "(x * rstd).to(x_ptr.dtype.element_ty) * w")),
        changed("triton.3", ("    tl.store(rstd_ptr + row, rstd)\n", "")),
    ],
    "triton.4": [
        backward((LAST4, "dw_ptr + at")),
        backward(("(row < rows) & (cols < n_cols)", "cols < n_cols")),
        backward(("tl.sum(g * hat, axis=1)", "tl.sum(dy * hat, axis=1)")),
        backward(("mask=at < n_cols", "mask=(at < n_cols) & (tl.program_id(0) * ROWS < rows)")),
        backward((", num_stages=STAGES", "")),
        backward(("tl.program_id(0), tl.cdiv", "0 if tl.program_id(0) == 0 else rows, tl.cdiv"),
                 ("tl.num_programs(0), num_stages", "num_stages")),
        (solutions.rmsnorm_backward_kernel, DyAsItComes),
        (solutions.rmsnorm_backward_kernel, OfTheClass),
        (solutions.rmsnorm_backward_kernel, RstdInHalf),
        (solutions.rmsnorm_backward_kernel, EpsOfItsOwn),
    ],
    "triton.5": [
        changed("triton.5", ("(k[:, None] < K - start) & (n[None, :] < N)", "n[None, :] < N"),
                ("(m[:, None] < M) & (k[None, :] < K - start)", "m[:, None] < M")),
        changed("triton.5", (', input_precision="ieee"', "")),
        changed("triton.5", ("range(0, K, BLOCK_K)", "range(0, K + BLOCK_K, BLOCK_K)")),
        changed("triton.5", (SUM5, "acc = (acc + tl.dot(a, b)).to(a_ptr.dtype.element_ty).to(tl.float32)")),
        changed("triton.5", ("k[None, :] * a_col", "k[None, :]")),
        changed("triton.5", ("a_at += BLOCK_K * a_col", "a_at += BLOCK_K")),
        changed("triton.5", ("tl.dot(a, b,", "tl.dot(a.to(tl.float32), b.to(tl.float32),")),
        changed("triton.5", ("range(0, K, BLOCK_K)", "range(0, tl.maximum(K - 1, 1), BLOCK_K)")),
    ],
    "triton.6": [row_by_row, column_then_row, the_last_group_is_full, a_list_of_tiles, pythons_integers,
                 functools.cache(solutions.grouped)],
    "triton.7": [
        changed("triton.7", ("total * tl.exp(top - new)", "total")),
        changed("triton.7", ('top = -float("inf")', "top = -10000.0")),
        changed("triton.7", ("tl.log(total)", "tl.log(total + 1e-6)")),
        changed("triton.7", ("tl.where(target < 0, 0.0, tl.load(scale_ptr))", "tl.load(scale_ptr)")),
        changed("triton.7", ("target < 0", "target == -100")),
        changed("triton.7", ("p), mask=mask", "p)")),
        changed("triton.7", ("tl.program_id(0).to(tl.int64)", "tl.program_id(0)")),
        changed("triton.7",
                ("tl.exp(x - top - log_total)",
                 "tl.exp(x - top - log_total).to(logits_ptr.dtype.element_ty).to(tl.float32)")),
        changed("triton.7", ("p - 1.0, p)", "p - 1.0, p).to(logits_ptr.dtype.element_ty)")),
        changed("triton.7", ("mask=cols < n_cols, other", "mask=(cols < n_cols) | (start == 0), other")),
    ],
}  # fmt: skip

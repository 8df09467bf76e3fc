"""Checks of triton. Oracles: torch in float64, autograd, a list of tiles.

Kernels run under `watch`: on CPU tensors in the interpreter, on a GPU host too. Outputs are poisoned
beforehand, matrices are parts of larger ones full of NaN, and masked lanes without `other` hold inf and NaN.
What is right in the interpreter is then compiled for an H200, which needs no GPU.
"""

import random

import torch
from torch.nn import functional as F

from course_lib import checking as core
from course_lib.checking import yours  # noqa: F401
from course_lib.triton import check_inputs as inputs

HALF, BF16, FULL = torch.float16, torch.bfloat16, torch.float32
# Half a unit in the last place of the result, and room for the sums in fp32 before it.
TOLERANCE = {
    FULL: {"rtol": 2e-5, "atol": 2e-6},
    HALF: {"rtol": 6e-4, "atol": 1e-6},
    BF16: {"rtol": 4.5e-3, "atol": 1e-6},
}


def _near(got, want, what, dtype):
    core.close(got, want, what, **TOLERANCE[dtype])


def _name(dtype):
    return {FULL: "fp32", HALF: "fp16", BF16: "bf16"}[dtype]


# --- triton.1 ---------------------------------------------------------------------------


@core.exercise(
    "triton.1", "right for full, ragged and tiny vectors; each element loaded once and stored once"
)
def add(answer):
    kernel = inputs.Kernel(answer, 5, "BLOCK")
    for dtype, block in zip((FULL, HALF, FULL, HALF), random.sample((16, 32, 64, 128), 4), strict=True):
        for n in (
            random.randrange(1, block),
            block * random.randrange(2, 5),
            block * 3 + random.randrange(1, block),
        ):
            x, y = (inputs.within(torch.randn(n).to(dtype)) for _ in range(2))
            out = inputs.poisoned((n,), dtype)
            what = f"{n} elements of {_name(dtype)} in blocks of {block}"
            w = kernel.run((-(-n // block),), x, y, out, n, BLOCK=block, what=what)
            _near(out, x.double() + y.double(), f"out, {what}", dtype)
            kernel.moves_once(w, {0: "x", 1: "y"}, {2: "out"}, what)
    kernel.compiles()


# --- triton.2 ---------------------------------------------------------------------------


@core.exercise(
    "triton.2", "right for ragged rows, strides, three dtypes and extreme numbers; each element read once"
)
def softmax(answer):
    kernel = inputs.Kernel(answer, 6, "BLOCK")
    for dtype, kind in zip(random.sample((FULL, HALF, BF16, FULL, HALF), 5), inputs.ROWS, strict=True):
        rows, cols = random.randrange(2, 5), inputs.columns(ragged=kind != "gaussian")
        block = inputs.power_above(cols) * random.choice((1, 1, 2))
        x, out = inputs.within(inputs.rows(kind, rows, cols).to(dtype)), inputs.poisoned((rows, cols), dtype)
        what = f"{rows} x {cols} of {_name(dtype)}, {kind}, BLOCK {block}"
        w = kernel.run((rows,), x, out, x.stride(0), out.stride(0), cols, BLOCK=block, what=what)
        _near(out, torch.softmax(x.double(), -1), f"out, {what}", dtype)
        kernel.moves_once(w, {0: "x"}, {1: "out"}, what)
    kernel.compiles()


# --- triton.3, triton.4 ---------------------------------------------------------------------


def _norm(x, w, eps):
    rstd = (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
    return x * rstd * w, rstd.squeeze(-1)


@core.exercise(
    "triton.3", "right for ragged rows, strides, three dtypes, large and tiny numbers; each element read once"
)
def rmsnorm(answer):
    kernel = inputs.Kernel(answer, 9, "BLOCK")
    small = random.sample((1e-6, 1e-5), 2)  # where numbers are tiny, another eps shows
    for trial, (dtype, scale) in enumerate(
        ((HALF, 1e-3), (FULL, 1e-3), (FULL, 1.0), (HALF, 400.0), (BF16, 30.0))
    ):
        rows, cols = random.randrange(2, 5), inputs.columns(ragged=scale == 1.0)
        block = inputs.power_above(cols) * random.choice((1, 1, 2))
        eps = small[trial % 2]
        x = inputs.within((scale * (torch.randn(rows, cols) + 0.7)).to(dtype))
        weight, y = inputs.within((torch.randn(cols) + 1).to(dtype)), inputs.poisoned((rows, cols), dtype)
        rstd = inputs.poisoned((rows,), FULL)
        what = f"{rows} x {cols} of {_name(dtype)} near {scale:g}, BLOCK {block}"
        w = kernel.run(
            (rows,), x, weight, y, rstd, x.stride(0), y.stride(0), cols, eps, BLOCK=block, what=what
        )
        want, want_rstd = _norm(x.double(), weight.double(), eps)
        core.close(rstd, want_rstd, f"rstd, {what}", rtol=1e-5, atol=0)
        _near(y, want, f"y, {what}", dtype)
        kernel.moves_once(w, {0: "x"}, {2: "y", 3: "rstd"}, what)
        kernel.loads_at_most(w, 1, rows * cols, "w", what)
    kernel.compiles()


@core.exercise(
    "triton.4", "dx and dw as autograd has them, for any grid; no two programs store to one address"
)
def rmsnorm_backward(answer):
    kernel = inputs.Kernel(answer, 13, "BLOCK")
    for dtype, programs in ((FULL, 1), (HALF, 2), (BF16, 3), (FULL, 4), (FULL, 9)):
        rows, cols = random.randrange(5, 9), inputs.columns(ragged=programs < 3)
        rows = 40 if programs == 2 else rows  # a long sum: low precision shows
        block = inputs.power_above(cols) * random.choice((1, 1, 2))
        x, dy = (inputs.within((2 * torch.randn(rows, cols) + 0.7).to(dtype)) for _ in range(2))
        weight = inputs.within((torch.randn(cols) + 1).to(dtype))
        leaves = [t.double().requires_grad_() for t in (x, weight)]
        y, rstd = _norm(*leaves, 1e-6)
        want_dx, want_dw = torch.autograd.grad(y, leaves, dy.double())
        rstd = inputs.within(rstd.detach().float())
        dx, dw = inputs.poisoned((rows, cols), dtype), inputs.poisoned((programs, cols), FULL)
        what = f"{rows} x {cols} of {_name(dtype)}, {programs} programs, BLOCK {block}"
        strides = [t.stride(0) for t in (dy, x, dx, dw)]
        args = (dy, x, weight, rstd, dx, dw, *strides, rows, cols)
        w = kernel.run((programs,), *args, BLOCK=block, what=what)
        core.close(dx, want_dx, f"dx, {what}", rtol=TOLERANCE[dtype]["rtol"], atol=5e-5)
        left = f"dw summed over its {programs} rows, {what}"
        core.close(dw.double().sum(0), want_dw, left, rtol=2e-5, atol=2e-4)
        kernel.moves_once(w, {0: "dy", 1: "x"}, {4: "dx", 5: "dw"}, what)
        kernel.loads_at_most(w, 2, programs * cols, "w", what)
    kernel.compiles()


# --- triton.5, triton.6 ---------------------------------------------------------------------


@core.exercise(
    "triton.5", "right for sizes that are no multiples of the blocks, any strides, fp32, fp16 and bf16"
)
def matmul(answer):
    kernel = inputs.Kernel(answer, 15, "BLOCK_M", "BLOCK_N", "BLOCK_K")
    for trial, dtype in enumerate((FULL, HALF, BF16, FULL, HALF)):
        bm, bn, bk = random.sample((16, 32, 64), 3) if trial < 3 else random.choices((16, 32), k=3)
        m, n, k = inputs.product_sizes(trial, bm, bn, bk)
        a, b = torch.randn(m, k) + 0.5, torch.randn(k, n) + 0.5
        a = inputs.within(a.to(dtype), transposed=trial in (0, 2))
        b = inputs.within(b.to(dtype), transposed=trial in (1, 2))
        c = inputs.poisoned((m, n), FULL if dtype == HALF else dtype, transposed=trial == 2)
        grid = -(-m // bm), -(-n // bn)
        what = f"{m} x {k} by {k} x {n} of {_name(dtype)}, tiles {bm} x {bn}, BLOCK_K {bk}"
        args = (a, b, c, m, n, k, *a.stride(), *b.stride(), *c.stride())
        w = kernel.run(grid, *args, BLOCK_M=bm, BLOCK_N=bn, BLOCK_K=bk, what=what)
        want = a.double() @ b.double()
        size = a.double().abs() @ b.double().abs()  # what the sums of a tile can lose is a part of this
        rtol = TOLERANCE[c.dtype]["rtol"]
        core.close(c, want, f"c, {what}", rtol=rtol, atol=2e-6 * size.max().item())
        kernel.stores_once(w, {2: "c"}, what)
        kernel.loads_at_most(w, 0, grid[0] * bm * k * grid[1], "a", what)
        kernel.loads_at_most(w, 1, grid[1] * bn * k * grid[0], "b", what)
    kernel.compiles()


@core.exercise(
    "triton.6", "every tile once, group by group, column by column, for grids that no group divides"
)
def grouped(answer):
    core.require(
        callable(answer), f"expected a function, got {core.kind(answer)}: pass it without calling it"
    )
    shapes = [(random.randrange(2, 9), random.randrange(2, 9), random.randrange(1, 6)) for _ in range(12)]
    shapes += [
        (5, 5, 3),
        (5, 7, 8),
        (7, 5, 1),
        (1, random.randrange(2, 9), 3),
        (random.randrange(2, 9), 1, 3),
        (6, 4, 3),
    ]
    for tiles_m, tiles_n, group in shapes:
        want = inputs.tiles_in_groups(tiles_m, tiles_n, group)
        for pid in random.sample(range(len(want)), len(want)):
            got = core.call(answer, pid, tiles_m, tiles_n, group)
            what = f"grouped({pid}, {tiles_m}, {tiles_n}, {group})"
            core.require(
                isinstance(got, tuple | list) and len(got) == 2,
                f"{what}: expected a row and a column of tiles, got {core.kind(got)}",
            )
            got = [core.number(i, what) for i in got]
            core.equal([int(i) if i.is_integer() else i for i in got], list(want[pid]), what)
    inputs.a_kernel_can_call(answer)


# --- triton.7 ---------------------------------------------------------------------------


@core.exercise(
    "triton.7", "loss and gradient as autograd has them, in place; each logit read twice and written once"
)
def cross_entropy(answer):
    kernel = inputs.Kernel(answer, 7, "BLOCK")
    for trial, dtype in enumerate((FULL, HALF, BF16, FULL, HALF)):
        rows, cols = (
            random.randrange(3, 6),
            random.choice((random.randrange(33, 64), random.randrange(65, 130), 96)),
        )
        block = (16, 32, 32, 128, 64)[trial]
        wide = (4.0, 9.0, 4.0, 100.0, 4.0)[trial]
        offset = (-600.0, 0.0, -60.0, 0.0, -60.0)[trial]
        logits = inputs.within((wide * torch.randn(rows, cols) + offset).to(dtype))
        target = torch.randint(cols, (rows,))
        target[0], target[1] = cols - 1, 0
        if trial != 1:
            target[random.randrange(rows)] = (-1, 0, -7, -100, -2)[trial]
        before = logits.double().requires_grad_()
        want = F.cross_entropy(before, target.clamp(min=0), reduction="none")
        want = torch.where(target >= 0, want, 0.0)
        scale = random.uniform(0.2, 0.9)
        (grad,) = torch.autograd.grad(want.sum() * scale, before)
        loss, target = inputs.poisoned((rows,), FULL), inputs.within(target)
        what = f"{rows} x {cols} of {_name(dtype)}, BLOCK {block}"
        args = (logits, target, loss, logits.stride(0), cols, scale)
        w = kernel.run((rows,), *args, BLOCK=block, what=what, changes=(0,))
        lost = 4e-7 * before.detach().abs().max().item()  # of the sum's logarithm, in fp32
        core.close(loss, want.detach(), f"loss, {what}", rtol=2e-5, atol=2e-5 + lost)
        atol = {FULL: 2e-6, HALF: 1e-5, BF16: 1e-4}[dtype] + lost
        core.close(logits, grad + 0.0, f"the gradient, {what}", rtol=TOLERANCE[dtype]["rtol"], atol=atol)
        kernel.stores_once(w, {0: "logits", 2: "loss"}, what)
        kernel.loads_at_most(w, 0, 2 * rows * cols + rows, "logits", what)
    kernel.compiles()

"""Inputs for the kernels and what must come of them, the same in the interpreter and on a GPU.

A reference is torch in float64 on the very numbers that the kernel gets. Inputs are drawn anew each time.
"""

import torch
from torch.nn import functional as F

from course_lib.kernels import matmul, rmsnorm, softmax

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# One rounding of the result to its dtype, and room for the float32 sums before it.
ROUNDED = {torch.float32: 4e-6, torch.float16: 1.2e-3, torch.bfloat16: 9e-3}
LAYOUTS = ("plain", "transposed", "sliced", "spread", "expanded")


def laid(rows, columns, layout, dtype, device):
    "A gaussian [rows, columns] that lies in memory in one of the LAYOUTS."

    def draw(*shape):
        return torch.randn(*shape, device=device).to(dtype)

    if layout == "transposed":
        return draw(columns, rows).t()
    if layout == "sliced":
        return draw(2 * rows + 1, columns + 5)[1::2, 3:-2]
    if layout == "spread":
        return draw(rows, 3 * columns)[:, ::3]
    if layout == "expanded":
        return draw(1, columns).expand(rows, columns)
    return draw(rows, columns)


def near(got, want, atol=1e-6):
    "`got` is `want` (float64), but for one rounding."
    assert got.shape == want.shape, f"{list(got.shape)} for {list(want.shape)}"
    torch.testing.assert_close(
        got.double(), want.double(), rtol=ROUNDED[got.dtype], atol=atol, equal_nan=True
    )


def softmaxes(x):
    kept = x.clone()
    out = softmax.softmax(x)
    assert out.dtype == x.dtype and out.is_contiguous() and torch.equal(x.nan_to_num(), kept.nan_to_num())
    near(out, torch.softmax(x.double(), -1), atol=1e-7)


def rms_forward(x, weight, eps=1e-5):
    y, rstd = rmsnorm.forward(x, weight, eps)
    wide = x.double()
    inverse = torch.rsqrt(wide.square().mean(-1) + eps)
    assert y.dtype == x.dtype and rstd.dtype == torch.float32
    near(y, wide * inverse[..., None] * weight.double())
    near(rstd, inverse.reshape(-1))


def rms_backward(dy, x, weight, eps=1e-5):
    leaves = [t.detach().requires_grad_() for t in (x, weight)]
    gradients_near(torch.autograd.grad(rmsnorm.rmsnorm(*leaves, eps), leaves, dy), (x, weight), dy, eps)


def gradients_near(got, inputs, dy, eps):
    wide = [t.detach().double().requires_grad_() for t in inputs]
    want = torch.autograd.grad(F.rms_norm(wide[0], wide[1].shape, wide[1], eps), wide, dy.double())
    assert [g.dtype for g in got] == [t.dtype for t in inputs]
    # A sum of products can nearly cancel: what counts is its size beside that of its terms.
    terms = (dy.double() * wide[1]).abs() * torch.rsqrt(wide[0].square().mean(-1, keepdim=True) + eps)
    near(got[0], want[0], atol=1e-5 + 1e-6 * terms.max().item())
    near(got[1], want[1], atol=1e-6 * max(1, dy.numel() // dy.shape[-1]))


def multiplies(a, b, **settings):
    out = matmul.matmul(a, b, **settings)
    assert out.dtype == a.dtype and out.is_contiguous()
    near(out, a.double() @ b.double(), atol=1e-6 * (1 + a.shape[1]))


def far(x, weight, thin, rows, columns):
    "The kernels on `x` [3, 40], whose copies `rows` and `columns` (transposed) pass 2^31 elements."
    for wide in (rows, columns.t()):
        softmaxes(wide)
        rms_forward(wide, weight)
        rms_backward(x, wide, weight)
    multiplies(rows, thin)
    multiplies(thin.t(), columns)

"""Every kernel of `course_lib.kernels` beside torch in float64, in the interpreter, where it can be watched.

Inside `watch` a race, a stray address, a lane that is not defined and an element that nobody stored all show;
on a GPU (`test_kernels_gpu`) the same cases are compiled.
"""

import pytest
import torch

from course_lib import kernels  # noqa: F401 (before Triton: it chooses the interpreter)

pytest.importorskip("triton")

import kernels_cases as cases

from course_lib.kernels import matmul, rmsnorm, softmax
from course_lib.kernels.watch import watch

every_dtype = pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
every_layout = pytest.mark.parametrize("layout", cases.LAYOUTS)
RAGGED = [(1, 1), (5, 3), (7, 33), (2, 129)]
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def watched():
    with watch() as w:
        yield w
    assert w.races == [] and w.outside == []


def draw(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype)


# --- softmax ------------------------------------------------------------------------


@every_dtype
@every_layout
def test_softmax(layout, dtype):
    for shape in RAGGED:
        cases.softmaxes(3 * cases.laid(*shape, layout, dtype, "cpu"))


def test_softmax_of_other_dimensions():
    for x in (draw(37), draw(2, 3, 5), draw(4, 3, 5).permute(2, 0, 1), draw(3, 1, 8).expand(3, 2, 8)):
        cases.softmaxes(x)
    for shape in [(0, 5), (5, 0), (0,), (2, 0, 3)]:
        assert softmax.softmax(draw(*shape)).shape == shape


def test_softmax_of_extremes():
    x = draw(5, 19)
    x[0] *= 1e4
    x[1, 3:] = -float("inf")
    x[2] = -float("inf")  # NaN, as torch has it
    x[3, 4] = float("nan")
    cases.softmaxes(x)


def test_softmax_moves_each_element_once(watched):
    softmax.softmax(draw(6, 100))
    assert watched.loads["x_ptr"][:2] == (600, 2400) and watched.loads["x_ptr"][3:] == (1, 1)
    assert watched.stores["out_ptr"][3:] == (1, 1)


# --- RMSNorm ------------------------------------------------------------------------


@every_dtype
@every_layout
def test_rmsnorm(layout, dtype):
    for rows, columns in RAGGED:
        x = cases.laid(rows, columns, layout, dtype, "cpu")
        dy = cases.laid(rows, columns, "expanded" if layout == "plain" else "plain", dtype, "cpu")
        weight = draw(columns, 2, dtype=dtype)[:, 1]
        cases.rms_forward(x, weight)
        cases.rms_backward(dy, x, weight)


def test_rmsnorm_of_other_dimensions_and_dtypes():
    for shape in [(37,), (2, 3, 17)]:
        cases.rms_backward(draw(*shape), draw(*shape), draw(shape[-1]))
    cases.rms_backward(draw(4, 40, dtype=BF16), draw(4, 40, dtype=BF16), draw(40))
    for shape in [(0, 5), (5, 0), (0,)]:
        x, weight = draw(*shape).requires_grad_(), draw(shape[-1]).requires_grad_()
        dx, dweight = torch.autograd.grad(rmsnorm.rmsnorm(x, weight), (x, weight), torch.ones(shape))
        assert dx.shape == shape and dweight.abs().sum() == 0


@pytest.mark.parametrize("tile, parts", [(1, 3), (4, 2), (16, 4)])
def test_rmsnorm_backward_with_any_tile(tile, parts, monkeypatch):
    monkeypatch.setattr(rmsnorm, "tiling", lambda rows, columns, x: (tile, 32, 4, 2, parts))
    for rows, columns in [(13, 21), (16, 32)]:  # some lanes are masked, and none
        cases.rms_backward(draw(rows, columns), draw(rows, columns), draw(columns))


@pytest.mark.parametrize("parts", [1, 3, 16, 37])
def test_partial_sums_of_any_number_are_added(parts):
    partial, total = draw(parts, 21), torch.empty(21)
    rmsnorm.sum_parts_kernel[(2,)](partial, total, parts, 21, PARTS=8, BLOCK=16)
    cases.near(total, partial.double().sum(0), atol=1e-5)


def test_rmsnorm_moves_each_element_once(watched):
    x, dy, weight = draw(37, 24), draw(37, 24), draw(24)
    _, rstd = rmsnorm.forward(x, weight)
    assert watched.loads["x_ptr"][3:] == (1, 1) and watched.stores["y_ptr"][3:] == (1, 1)
    with watch() as w:
        rmsnorm.backward(dy, x, weight, rstd)
    assert all(w.loads[name][3:] == (1, 1) for name in ("x_ptr", "dy_ptr", "rstd_ptr", "partial_ptr"))
    assert w.stores["dx_ptr"][3:] == (1, 1) and w.races == []


# --- matmul -------------------------------------------------------------------------


@every_dtype
@every_layout
def test_matmul(layout, dtype):
    for m, n, k in [(1, 1, 1), (5, 3, 7), (37, 40, 70)]:
        for other in ("plain", layout):
            cases.multiplies(cases.laid(m, k, layout, dtype, "cpu"), cases.laid(k, n, other, dtype, "cpu"))


@pytest.mark.parametrize("bm, bn, bk, group", [(16, 16, 16, 1), (16, 64, 32, 2), (64, 16, 64, 5)])
def test_matmul_with_any_tile(bm, bn, bk, group):
    for k in (50, 64, 72):  # copied, in whole blocks, and neither
        cases.multiplies(draw(75, k), draw(k, 36), BM=bm, BN=bn, BK=bk, GROUP=group)


def test_matmul_of_nothing():
    for m, n, k in [(0, 3, 4), (3, 0, 4), (3, 4, 0)]:
        out = matmul.matmul(draw(m, k), draw(k, n))
        assert out.shape == (m, n) and not out.any()


def test_matmul_sums_in_float32():
    a, b = torch.ones(16, 4096, dtype=torch.float16), torch.full((4096, 16), 0.25, dtype=torch.float16)
    a[:, 0] = 2048.0  # float16 can't count past 2048 by quarters
    assert torch.equal(matmul.matmul(a, b), torch.full((16, 16), 0.25 * (2048 + 4095)).half())


def test_matmul_takes_nothing_from_beside_a_matrix(watched):
    around = torch.full((80, 100), float("nan"))
    a, b = around[:37, :40].copy_(draw(37, 40)), around[40:80, 48:96].copy_(draw(40, 48))
    cases.multiplies(a, b, BM=16, BN=16, BK=16, GROUP=1)
    assert watched.stores["c_ptr"][3:] == (1, 1)


def test_matmul_copies_what_is_not_aligned_and_nothing_else():
    fits = torch.empty(8, 128)
    assert matmul.aligned(fits) is fits and matmul.aligned(fits.t()).data_ptr() == fits.data_ptr()
    for x in (draw(8, 17), draw(8, 24), draw(8, 17).t(), draw(8, 24)[:, 1:9], draw(8, 32)[:, ::2]):
        made = matmul.aligned(x)
        rows, columns = x.shape
        assert torch.equal(made[:rows, :columns], x) and made.sum() == pytest.approx(x.sum().item(), abs=1e-4)
        assert matmul.fits(made, 64) or matmul.fits(made.t(), 64)

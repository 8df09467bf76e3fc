"""Every kernel of `course_lib.kernels` beside torch in float64, in the interpreter, where it can be watched.

Inside `access.watch` a race, a stray address, a lane that is not defined and an element that nobody stored
all show; on a GPU (`test_kernels_gpu`) the same cases are compiled.
"""

import pytest
import torch

from course_lib import kernels  # noqa: F401 (before Triton, which asks once whether to interpret)

pytest.importorskip("triton")

import kernels_cases as cases

from course_lib.kernels import access, add, matmul, rmsnorm, softmax, xent

every_dtype = pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
every_layout = pytest.mark.parametrize("layout", cases.LAYOUTS)
RAGGED = [(1, 1), (5, 3), (7, 33), (2, 129)]
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def watched():
    with access.watch() as w:
        yield w
    assert w.races == [] and w.outside == []


def draw(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype)


# --- add ----------------------------------------------------------------------------


@every_dtype
def test_add(dtype):
    for shape in [(1,), (1000,), (1025,), (3, 7, 5), ()]:
        cases.adds(draw(*shape, dtype=dtype), draw(*shape, dtype=dtype))
    cases.adds(draw(7, 1, 5, dtype=dtype), draw(3, 1, dtype=dtype))
    cases.adds(draw(9, 4, dtype=dtype).t(), draw(4, 18, dtype=dtype)[:, ::2])


@pytest.mark.parametrize("block", [1, 2, 64, 4096])
def test_add_with_any_block(block):
    cases.adds(draw(67), draw(67), block=block, warps=1)


def test_add_of_nothing():
    assert add.add(draw(0, 3), draw(1, 3)).shape == (0, 3)


# --- softmax ------------------------------------------------------------------------


@every_dtype
@every_layout
def test_softmax(layout, dtype):
    for shape in RAGGED:
        x = 3 * cases.laid(*shape, layout, dtype, "cpu")
        cases.softmaxes(x)
        cases.three_passes(x, block=16)


def test_softmax_of_other_dimensions():
    for x in (draw(37), draw(2, 3, 5), draw(4, 3, 5).permute(2, 0, 1), draw(3, 1, 8).expand(3, 2, 8)):
        cases.softmaxes(x)
        cases.three_passes(x)


def test_softmax_of_extremes():
    x = draw(5, 19)
    x[0] *= 1e4
    x[1, 3:] = -float("inf")
    x[2] = -float("inf")  # NaN, as torch has it
    x[3, 4] = float("nan")
    cases.softmaxes(x)
    cases.three_passes(x, block=4)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0,), (2, 0, 3)])
def test_softmax_of_nothing(shape):
    assert softmax.softmax(draw(*shape)).shape == shape
    assert softmax.three_passes(draw(*shape)).shape == shape


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("programs, stages", [(0, 1), (1, 2), (2, 3), (50, 1)])
def test_softmax_with_any_setting(rows, programs, stages):
    for i, shape in enumerate([(13, 21), (8, 32)]):
        evict = ("both", "loads", "stores", "none")[(rows + i) % 4]
        cases.softmaxes(draw(*shape), rows=rows, programs=programs, stages=stages, warps=8, evict=evict)


@pytest.mark.parametrize("block", [1, 8, 64])
def test_three_passes_with_any_block(block):
    cases.three_passes(draw(3, 21), block=block)


def test_softmax_reads_each_element_once_and_three_passes_thrice(watched):
    x = draw(6, 100)
    softmax.softmax(x)
    assert watched.loads["x_ptr"][:2] == (600, 2400) and watched.loads["x_ptr"][3:] == (1, 1)
    assert watched.stores["out_ptr"].elements == 600
    with access.watch() as w:
        softmax.three_passes(x, block=32)
    assert w.loads["x_ptr"][3:] == (3, 3) and w.loads["x_ptr"].bytes == 7200
    assert w.loads["x_ptr"].bytes + w.stores["out_ptr"].bytes == softmax.bytes_moved(6, 100, x.dtype, 3)


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


@pytest.mark.parametrize("parts", [1, 3, 16, 37])
def test_partial_sums_of_any_number_are_added(parts):
    partial, total = draw(parts, 21), torch.empty(21)
    rmsnorm.sum_parts_kernel[(2,)](partial, total, parts, 21, PARTS=8, BLOCK=16)
    cases.near(total, partial.double().sum(0), atol=1e-5)


def test_rmsnorm_through_autograd():
    for shape in [(37,), (5, 33), (2, 3, 17)]:
        cases.rms_autograd(draw(*shape), draw(*shape), draw(shape[-1]))
    x, weight = draw(4, 40, dtype=BF16), draw(40)  # a weight of another dtype
    cases.rms_autograd(draw(4, 40, dtype=BF16), x, weight)


def test_rmsnorm_gives_each_input_its_gradient_alone():
    x, weight, dy = draw(5, 9), draw(9), draw(5, 9)
    both = rmsnorm.backward(dy, x, weight, rmsnorm.forward(x, weight)[1])
    for i, leaf in enumerate((x, weight)):
        leaf.requires_grad_()
        (got,) = torch.autograd.grad(rmsnorm.rmsnorm(x, weight), leaf, dy)
        leaf.requires_grad_(False)
        assert torch.equal(got, both[i])


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("programs, stages", [(1, 3), (2, 1), (50, 2)])
def test_rmsnorm_with_any_setting(rows, programs, stages):
    settings = {"rows": rows, "programs": programs, "stages": stages, "warps": 4}
    for i, (n, columns) in enumerate([(13, 21), (16, 32)]):
        settings["evict"] = ("both", "loads", "stores", "none")[(rows + i) % 4]
        x, dy, weight = draw(n, columns), draw(n, columns), draw(columns)
        cases.rms_forward(x, weight, **settings)
        cases.rms_forward(x, weight, **settings | {"programs": 0})
        cases.rms_backward(dy, x, weight, **settings)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0,)])
def test_rmsnorm_of_nothing(shape):
    x, weight = draw(*shape).requires_grad_(), draw(shape[-1]).requires_grad_()
    y = rmsnorm.rmsnorm(x, weight)
    assert y.shape == shape
    dx, dweight = torch.autograd.grad(y, (x, weight), torch.ones_like(y))
    assert dx.shape == shape and dweight.abs().sum() == 0


def test_rmsnorm_touches_each_element_once(watched):
    x, dy, weight = draw(37, 24), draw(37, 24), draw(24)
    _, rstd = rmsnorm.forward(x, weight)
    assert watched.loads["x_ptr"][3:] == (1, 1) and watched.stores["y_ptr"][3:] == (1, 1)
    with access.watch() as w:
        rmsnorm.backward(dy, x, weight, rstd)
    assert all(w.loads[name][3:] == (1, 1) for name in ("x_ptr", "dy_ptr", "rstd_ptr", "partial_ptr"))
    assert w.stores["dx_ptr"][3:] == (1, 1) and w.races == []


# --- matmul -------------------------------------------------------------------------


@every_dtype
@every_layout
def test_matmul(layout, dtype):
    for m, n, k in [(1, 1, 1), (5, 3, 7), (37, 40, 70)]:
        for other in ("plain", layout):
            a = cases.laid(m, k, layout, dtype, "cpu")
            b = cases.laid(k, n, other, dtype, "cpu")
            cases.multiplies(a, b)
            cases.multiplies(a, b, by=matmul.in_rows, block=(16, 32, 16), group=2)


@pytest.mark.parametrize("bm, bn, bk", [(16, 16, 16), (16, 64, 32), (64, 16, 16), (32, 32, 128)])
@pytest.mark.parametrize("split", [1, 3])
def test_matmul_with_any_setting(bm, bn, bk, split):
    a, b = draw(50, 70), draw(70, 36)
    for halves, flatten, programs, group in [(True, True, 1, 1), (False, False, 2, 3), (True, False, 9, 8)]:
        cases.multiplies(a, b, bm=bm, bn=bn, bk=bk, split=split, halves=halves, flatten=flatten,
                         programs=programs, group=group, stages=2)  # fmt: skip


@pytest.mark.parametrize("block", [(16, 16, 16), (64, 16, 32), (16, 64, 128)])
@pytest.mark.parametrize("group", [1, 2, 5])
def test_matmul_in_rows_with_any_setting(block, group):
    cases.multiplies(draw(75, 50), draw(50, 36), by=matmul.in_rows, block=block, group=group)


@pytest.mark.parametrize("m, n, k", [(0, 3, 4), (3, 0, 4), (3, 4, 0), (0, 0, 0)])
def test_matmul_of_nothing(m, n, k):
    for by in (matmul.matmul, matmul.in_rows):
        out = by(draw(m, k), draw(k, n))
        assert out.shape == (m, n) and not out.any()


def test_matmul_sums_in_float32():
    a, b = torch.ones(16, 4096, dtype=torch.float16), torch.full((4096, 16), 0.25, dtype=torch.float16)
    a[:, 0] = 2048.0  # float16 can't count past 2048 by quarters
    want = torch.full((16, 16), 0.25 * (2048 + 4095)).half()
    assert torch.equal(matmul.matmul(a, b, bk=64), want)
    assert torch.equal(matmul.in_rows(a, b, block=(16, 16, 64)), want)


def test_matmul_copies_what_the_copy_engine_refuses_and_nothing_else():
    fits = torch.randn(8, 16)
    assert matmul.aligned(fits) == (fits, False) and matmul.aligned(fits.t())[1]
    assert matmul.aligned(fits.t())[0].data_ptr() == fits.data_ptr()
    for x in (torch.randn(8, 17), torch.randn(8, 17).t(), fits[:, 1:], torch.randn(8, 32)[:, ::2]):
        made, turned = matmul.aligned(x)
        assert torch.equal(made, x) and made.data_ptr() % 16 == 0
        row = made.stride(1) if turned else made.stride(0)
        assert row * 4 % 128 == 0


# --- cross-entropy ------------------------------------------------------------------


@every_dtype
@pytest.mark.parametrize("layout", cases.LAYOUTS[:-1])
def test_cross_entropy(layout, dtype):
    for rows, classes in [(4, 1), (5, 3), (7, 33), (4, 129)]:
        target = cases.targets(rows, classes, "cpu")
        cases.loses(3 * cases.laid(rows, classes, layout, dtype, "cpu"), target)


def test_cross_entropy_of_expanded_logits():
    cases.loses(cases.laid(5, 9, "expanded", torch.float32, "cpu"), cases.targets(5, 9, "cpu"), inplace=False)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("inplace", [True, False])
def test_cross_entropy_reduced(reduction, inplace):
    logits, target = draw(7, 20), cases.targets(7, 20, "cpu", ignore_index=3)
    kept = logits.clone()
    cases.loses(logits, target.int(), ignore_index=3, reduction=reduction, inplace=inplace)
    assert inplace or torch.equal(logits, kept)


@pytest.mark.parametrize("block", [1, 4, 32, 65536])
def test_cross_entropy_with_any_block(block):
    cases.loses(draw(4, 21), cases.targets(4, 21, "cpu"), block=block)


def test_cross_entropy_of_nothing():
    x = draw(0, 5).requires_grad_()
    loss = xent.cross_entropy(x, torch.empty(0, dtype=torch.int64), inplace=False, reduction="sum")
    assert loss == 0 and torch.autograd.grad(loss, x)[0].shape == (0, 5)


def test_cross_entropy_of_impossible_and_missing_classes():
    x = draw(3, 9)
    x[:, 2:5] = -float("inf")
    cases.loses(x.clone(), torch.tensor([0, 8, 5]), block=2)
    loss = xent.cross_entropy(x, torch.tensor([0, 9, -1]), reduction="none")
    assert loss.isnan().tolist() == [False, True, True]


def test_logits_that_were_overwritten_are_missed_by_autograd():
    x = draw(4, 6).requires_grad_()
    logits = 2 * x
    other = logits.exp().sum() + (logits * logits).sum()  # has saved the logits
    (grad,) = torch.autograd.grad(
        xent.cross_entropy(logits, torch.tensor([0, 1, 2, 3])), logits, retain_graph=True
    )
    assert grad.data_ptr() == logits.data_ptr()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()

"""The kernels compiled, on a GPU, beside torch in float64. No clocks: the lesson's recording has those."""

import subprocess
import sys

import pytest
import torch

from course_lib import kernels  # before Triton, which asks only once whether to interpret

pytest.importorskip("triton")

import kernels_cases as cases

from course_lib.kernels import access, matmul, replay, rmsnorm, softmax, tune, xent

pytestmark = pytest.mark.gpu
every_dtype = pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
every_layout = pytest.mark.parametrize("layout", cases.LAYOUTS)
SHAPES = [(1, 1), (37, 701), (129, 1024), (600, 96)]


def draw(*shape, dtype=torch.float32):
    return torch.randn(shape, device="cuda").to(dtype)


def test_kernels_are_compiled_here():
    assert not kernels.interpreted()


@every_dtype
def test_add(dtype):
    cases.adds(draw(3, 7, 501, dtype=dtype), draw(7, 1, dtype=dtype))


@every_dtype
@every_layout
def test_softmax(layout, dtype):
    for shape in SHAPES:
        x = cases.laid(*shape, layout, dtype, "cuda")
        cases.softmaxes(x)
        cases.softmaxes(x, rows=2, warps=4, stages=3, programs=2, evict="both")
        cases.three_passes(x)


@every_dtype
@every_layout
def test_rmsnorm(layout, dtype):
    for rows, columns in SHAPES:
        x = cases.laid(rows, columns, layout, dtype, "cuda")
        dy, weight = draw(rows, columns, dtype=dtype), draw(columns, dtype=dtype)
        cases.rms_forward(x, weight)
        cases.rms_forward(x, weight, rows=2, warps=4, stages=3, programs=2)
        cases.rms_backward(dy, x, weight)
        cases.rms_backward(dy, x, weight, rows=1, warps=4, stages=2, programs=3, evict="both")
        cases.rms_autograd(dy, x, weight)


@every_dtype
@every_layout
def test_matmul(layout, dtype):
    for m, n, k in [(1, 1, 1), (200, 328, 136), (333, 97, 501), (64, 1000, 2048)]:
        a, b = cases.laid(m, k, layout, dtype, "cuda"), cases.laid(k, n, layout, dtype, "cuda")
        cases.multiplies(a, b)
        cases.multiplies(a, b, bm=64, bn=64, bk=32, warps=4, stages=3, split=3)
        cases.multiplies(a, b, by=matmul.in_rows, block=(64, 64, 32), group=3, warps=4)


@every_dtype
@pytest.mark.parametrize("layout", cases.LAYOUTS[:-1])
def test_cross_entropy(layout, dtype):
    for rows, classes in [(5, 3), (37, 701), (70, 20_011)]:
        target = cases.targets(rows, classes, "cuda")
        cases.loses(cases.laid(rows, classes, layout, dtype, "cuda"), target)


def test_float32_products_are_not_rounded_to_tf32():
    a, b = draw(100, 300), draw(300, 50)
    want = a.double() @ b.double()
    exact, coarse = ((matmul.matmul(a, b, precision=p).double() - want).abs().max() for p in ("ieee", "tf32"))
    assert exact < 1e-4 and exact < coarse / 10


@every_dtype
@pytest.mark.parametrize("columns", [1, 31, 1000, 4096, 5000, 8192, 16384, 65536])
def test_every_default_of_row_tiles_compiles(columns, dtype):
    for rows in (3, 1500):
        x = draw(rows, columns, dtype=dtype)
        cases.softmaxes(x)
        if columns <= rmsnorm.MOST_COLUMNS:
            weight = draw(columns, dtype=dtype)
            cases.rms_forward(x, weight)
            cases.rms_backward(torch.randn_like(x), x, weight)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_default_of_matmul_compiles(dtype):
    # What `default` chooses for these on 132 multiprocessors: each tile, split and whole, and the large one.
    for m, n, k in [(1024, 2048, 512), (2000, 2000, 1000), (333, 4097, 520), (128, 1024, 4096),
                    (1024, 1024, 8192), (64, 40, 8192), (4096, 8192, 2112)]:  # fmt: skip
        a, b = draw(m, k, dtype=dtype), draw(k, n, dtype=dtype)
        cases.multiplies(a, b)
        cases.multiplies(a, b.t().contiguous().t())
        for tile in matmul.TILES:
            cases.multiplies(a, b, config=matmul.Config(*tile[:5], programs=tile.programs))


def test_the_same_call_twice_gives_the_same_bits():
    x, dy, weight = draw(1000, 700), draw(1000, 700), draw(700)
    _, rstd = rmsnorm.forward(x, weight)
    first, second = (rmsnorm.backward(dy, x, weight, rstd) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    a, b = draw(128, 4096), draw(4096, 256)
    assert torch.equal(matmul.matmul(a, b, split=4), matmul.matmul(a, b, split=4))


def test_offsets_past_32_bits():
    if torch.cuda.mem_get_info()[0] < 30e9:
        pytest.skip("needs 30 GB")
    half = torch.float16

    def far(x, down=True):
        room = torch.empty(2**31 + 4096, dtype=half, device="cuda")
        return room.as_strided(x.shape, (2**30, 1) if down else (1, 2**30)).copy_(x)

    x, weight, thin = draw(3, 40, dtype=half), draw(40, dtype=half), draw(40, 5, dtype=half)
    rows, columns = far(x), far(x.t().contiguous(), down=False)
    for wide in (rows, columns.t()):
        cases.softmaxes(wide)
        cases.three_passes(wide)
        cases.rms_forward(wide, weight)
        cases.rms_backward(x, wide, weight)
    cases.multiplies(rows, thin)
    cases.multiplies(rows, thin, by=matmul.in_rows, block=(16, 16, 16))
    cases.multiplies(thin.t(), columns)
    cases.loses(rows, torch.tensor([3, -100, 39], device="cuda"))
    del rows, columns
    long = torch.empty(2**19 + 3, 4100, dtype=half, device="cuda").normal_()  # 2^31 elements and more
    out = softmax.softmax(long)
    cases.near(out[-5:], torch.softmax(long[-5:].double(), -1), atol=1e-7)
    cases.near(out[:5], torch.softmax(long[:5].double(), -1), atol=1e-7)


def test_kernels_can_be_watched_here_and_compiled_afterwards():
    x = draw(5, 33)
    with access.watch() as w:
        cases.softmaxes(x)
    assert w.loads["x_ptr"].elements == 165 and w.races == w.outside == []
    cases.softmaxes(x, rows=4)
    cases.rms_forward(x, draw(33))


def test_a_search_times_what_runs_and_keeps_what_does_not():
    x = draw(64, 512)
    space = [{"rows": 1, "warps": 4}, {"rows": 64, "warps": 4}, {"rows": 3, "warps": 4}]
    found = tune.search(lambda **c: softmax.softmax(x, **c), space, seconds=0.01)
    assert [t.error is None for t in found.trials] == [True, True, False]
    assert "power of two" in found.trials[2].error and found.best in space[:2]


def test_contenders_are_timed_by_turns():
    def prepare(x):
        leaf = x.clone().requires_grad_()
        y = leaf.exp()
        return lambda: torch.autograd.grad(y, leaf, x, retain_graph=True)

    took = replay.time_all(
        {"copy": torch.clone, "softmax": softmax.softmax, "backward": replay.Prepared(prepare)},
        lambda: (draw(512, 512),),
        seconds=0.02,
    )
    assert all(0 < t.low <= t.median <= t.high for t in took.values())
    assert replay.host_seconds(softmax.softmax, draw(8, 8), calls=10) > 0


WAITS = """
import torch
from course_lib.kernels import replay
make = lambda: (torch.randn(64, device="cuda"),)
try:
    replay.time_all({"waits": lambda x: x.sum().item()}, make)
except RuntimeError:
    print("refused, then", replay.time_all({"copy": torch.clone}, make, seconds=0.01)["copy"].median > 0)
"""


def test_a_contender_that_waits_is_refused_and_does_no_harm():
    # In a process of its own: a capture that broke can leave torch's generator unusable.
    run = subprocess.run([sys.executable, "-c", WAITS], capture_output=True, text=True, timeout=120)
    assert run.stdout.strip() == "refused, then True", run.stderr[-2000:]


def test_the_gradient_of_the_loss_stands_where_the_logits_were():
    target = cases.targets(512, 50_257, "cuda")
    leaf = draw(512, 50_257, dtype=torch.bfloat16).requires_grad_()
    logits = leaf.view_as(leaf)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    (grad,) = torch.autograd.grad(xent.cross_entropy(logits, target), logits)
    assert torch.cuda.max_memory_allocated() - before < 0.01 * logits.nbytes
    assert grad.data_ptr() == leaf.data_ptr()

"""The kernels compiled, on a GPU, beside torch in float64.

`pytest -m gpu -s tests/test_kernels_gpu.py -k rates` prints how fast they are; nothing is asserted of time.
"""

import pytest
import torch

from course_lib import kernels  # before Triton: it chooses the interpreter

pytest.importorskip("triton")

import kernels_cases as cases

from course_lib.kernels import matmul, replay, rmsnorm, softmax
from course_lib.kernels.watch import watch

pytestmark = pytest.mark.gpu
every_dtype = pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
every_layout = pytest.mark.parametrize("layout", cases.LAYOUTS)
SHAPES = [(1, 1), (37, 701), (600, 96)]  # each is tuned, so they are few
BF16 = torch.bfloat16


def draw(*shape, dtype=torch.float32):
    return torch.randn(shape, device="cuda").to(dtype)


def test_kernels_are_compiled_here():
    assert not kernels.interpreted()


@every_dtype
@every_layout
def test_softmax_and_rmsnorm(layout, dtype):
    for rows, columns in SHAPES:
        x = cases.laid(rows, columns, layout, dtype, "cuda")
        dy, weight = draw(rows, columns, dtype=dtype), draw(columns, dtype=dtype)
        cases.softmaxes(x)
        cases.rms_forward(x, weight)
        cases.rms_backward(dy, x, weight)


@every_dtype
@every_layout
def test_matmul(layout, dtype):
    for m, n, k in [(1, 1, 1), (200, 328, 136), (333, 97, 501)]:
        cases.multiplies(*(cases.laid(*shape, layout, dtype, "cuda") for shape in ((m, k), (k, n))))
    a, b = cases.laid(72, 600, layout, dtype, "cuda"), draw(600, 80, dtype=dtype)
    cases.multiplies(a, b, BM=64, BN=32, BK=32, GROUP=2, num_warps=4, num_stages=3)


def test_float32_products_are_not_rounded_to_tf32():
    a, b = draw(100, 300), draw(300, 50)
    want = a.double() @ b.double()
    exact, coarse = ((matmul.matmul(a, b, p).double() - want).abs().max() for p in ("ieee", "tf32"))
    assert exact < 1e-4 and exact < coarse / 10


@every_dtype
@pytest.mark.parametrize("columns", [1, 1000, 4096, 8192, 16384, 65536])
def test_rows_of_every_length_compile(columns, dtype):
    for rows in (3, 1500):
        x = draw(rows, columns, dtype=dtype)
        cases.softmaxes(x)
        if columns <= 16384:
            weight = draw(columns, dtype=dtype)
            cases.rms_forward(x, weight)
            cases.rms_backward(torch.randn_like(x), x, weight)


@pytest.mark.parametrize("config", matmul.CONFIGS[1:], ids=str)
def test_every_configuration_of_matmul_compiles(config):
    for m, n, k in [(512, 512, 512), (333, 4097, 520), (300, 72, 1000)]:
        a, b = draw(m, k, dtype=BF16), draw(k, n, dtype=BF16)
        cases.multiplies(a, b, **config.all_kwargs())
        cases.multiplies(a.t().contiguous().t(), b.t().contiguous().t(), **config.all_kwargs())


def test_the_same_call_twice_gives_the_same_bits():
    x, dy, weight = draw(1000, 700), draw(1000, 700), draw(700)
    _, rstd = rmsnorm.forward(x, weight)
    first, second = (rmsnorm.backward(dy, x, weight, rstd) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_offsets_past_32_bits():
    if torch.cuda.mem_get_info()[0] < 30e9:
        pytest.skip("needs 30 GB")
    half = torch.float16

    def far(x, down=True):
        room = torch.empty(2**31 + 4096, dtype=half, device="cuda")
        return room.as_strided(x.shape, (2**30, 1) if down else (1, 2**30)).copy_(x)

    x = draw(3, 40, dtype=half)
    columns = far(x.t().contiguous(), down=False)
    cases.far(x, draw(40, dtype=half), draw(40, 5, dtype=half), far(x), columns)
    del columns
    long = torch.empty(2**19 + 3, 4100, dtype=half, device="cuda").normal_()  # 2^31 elements and more
    out = softmax.softmax(long)
    cases.near(out[-5:], torch.softmax(long[-5:].double(), -1), atol=1e-7)
    cases.near(out[:5], torch.softmax(long[:5].double(), -1), atol=1e-7)
    del long, out
    flat = torch.empty(70, 2**26 + 8, dtype=half, device="cuda").normal_()  # 64 rows down passes 2^31 too
    cases.multiplies(draw(16, 70, dtype=half), flat[:, -16:])


def test_kernels_can_be_watched_here_and_compiled_afterwards():
    x = draw(5, 33)
    with watch() as w:
        cases.softmaxes(x)
    assert w.loads["x_ptr"].elements == 165 and w.races == w.outside == []
    cases.softmaxes(draw(5, 65))
    cases.rms_forward(x, draw(33))


def test_contenders_are_timed_by_turns():
    def prepare(x):
        leaf = x.clone().requires_grad_()
        y = leaf.exp()
        return lambda: torch.autograd.grad(y, leaf, x, retain_graph=True)

    contenders = {"copy": torch.clone, "softmax": softmax.softmax, "backward": replay.Prepared(prepare)}
    took = replay.time_all(contenders, lambda: (draw(512, 512),), seconds=0.02)
    assert all(0 < t.low <= t.median <= t.high for t in took.values())


def test_a_contender_that_waits_is_refused_and_does_no_harm():
    def make():
        return (torch.randn(64, device="cuda"),)

    with pytest.raises(RuntimeError, match="synchroniz"):
        replay.time_all({"waits": lambda x: x.sum().item()}, make)
    assert torch.cuda.get_sync_debug_mode() == 0
    # Random numbers within a graph and outside it: torch's generator is as it was.
    took = replay.time_all({"copy": torch.clone, "dropout": torch.nn.functional.dropout}, make, seconds=0.01)
    assert min(t.median for t in took.values()) > 0 and torch.randn(3, device="cuda").isfinite().all()


# The bars on an H200: softmax 3.9, RMSNorm forward 3.85, backward 3.8 TB/s at the first shape; of cuBLAS's
# rate 1.0 at the first shape, and 0.85 at the last three, which are ragged.
ROWS = [(16384, 4096), (4096, 8192), (32768, 1024), (8192, 16384)]
PRODUCTS = [
    (8192, 8192, 8192),
    (4096, 4096, 4096),
    (8000, 8200, 8192),
    (5000, 3000, 7000),
    (4095, 4097, 4093),
]


def backward(x, weight, dy):
    _, rstd = rmsnorm.forward(x, weight)
    return lambda: rmsnorm.backward(dy, x, weight, rstd)


@pytest.mark.parametrize("rows, columns", ROWS)
def test_rates_of_rows(rows, columns):
    def make():
        return draw(rows, columns, dtype=BF16), draw(columns, dtype=BF16), draw(rows, columns, dtype=BF16)

    contenders = {
        "copy": lambda x, w, dy: x.clone(),
        "softmax": lambda x, w, dy: softmax.softmax(x),
        "RMSNorm forward": lambda x, w, dy: rmsnorm.forward(x, w),
        "RMSNorm backward": replay.Prepared(backward),
    }
    took = replay.time_all(contenders, make)
    for name, t in took.items():
        moved = (3 if name.endswith("backward") else 2) * rows * columns * BF16.itemsize
        print(f"\n{name} {rows} x {columns}: {moved / t.median / 1e12:.2f} TB/s ({t})", end="")


@pytest.mark.parametrize("m, n, k", PRODUCTS)
def test_rates_of_products(m, n, k):
    def make():
        return draw(m, k, dtype=BF16), draw(k, n, dtype=BF16)

    took = replay.time_all({"cuBLAS": torch.mm, "ours": matmul.matmul}, make)
    rates = {name: 2 * m * n * k / t.median / 1e12 for name, t in took.items()}
    print(f"\n{m}, {n}, {k}: {rates['ours'] / rates['cuBLAS']:.3f} of cuBLAS ({rates})")
    print(matmul.matmul_kernel.best_config)

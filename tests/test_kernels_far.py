"Offsets past 2^31 elements, in the interpreter and without the memory."

import pytest
import torch

from course_lib import kernels  # before Triton, which asks only once whether to interpret

pytest.importorskip("triton")

import kernels_cases as cases

from course_lib.kernels import matmul, softmax


@pytest.fixture
def far(tmp_path):
    "A function that lays a matrix out in rows (or columns) 2^30 elements apart, in a file that is a hole."
    if not kernels.interpreted():
        pytest.skip("kernels are compiled here, and test_kernels_gpu has this")
    count = 0

    def lay(x, down=True):
        nonlocal count
        count += 1
        room = torch.from_file(
            str(tmp_path / f"hole{count}"), shared=True, size=2**31 + 4096, dtype=torch.float16
        )
        view = room.as_strided(x.shape, (2**30, 1) if down else (1, 2**30))
        return view.copy_(x)

    return lay


def test_offsets_past_32_bits(far):
    x = torch.randn(3, 40).half()
    weight = torch.randn(40).half()
    rows, columns = far(x), far(x.t().contiguous(), down=False)
    for wide in (rows, columns.t()):
        cases.softmaxes(wide)
        cases.three_passes(wide)
        cases.rms_forward(wide, weight)
        cases.rms_backward(x, wide, weight)
    thin = torch.randn(40, 5).half()
    cases.multiplies(rows, thin)
    cases.multiplies(rows, thin, by=matmul.in_rows, block=(16, 16, 16))
    cases.multiplies(thin.t(), columns)
    cases.loses(rows, torch.tensor([3, -100, 39]))


def test_64_bits_only_where_offsets_need_them():
    def strided(*strides):
        return torch.empty_strided((3, 5), strides, device="meta")

    out = torch.empty(3, 5)
    config = softmax.default(3, 5)
    for strides, long in [((5, 1), False), ((2**30 - 3, 1), False), ((2**30, 1), True), ((1, 2**29), True)]:
        assert softmax.tiling(strided(*strides), out, config)["LONG"] is long
    assert softmax.tiling(torch.empty(2**20 - 1, 2**11, device="meta"), out, config)["LONG"] is False
    assert softmax.tiling(torch.empty(2**20 + 1, 2**11, device="meta"), out, config)["LONG"] is True

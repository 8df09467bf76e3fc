"Offsets past 2^31 elements, in the interpreter and without the memory."

import pytest
import torch

from course_lib import kernels  # before Triton: it chooses the interpreter

pytest.importorskip("triton")

import kernels_cases as cases

from course_lib.kernels import launch


@pytest.mark.skipif(not kernels.interpreted(), reason="kernels are compiled here: test_kernels_gpu has this")
def test_offsets_past_32_bits(tmp_path):
    def far(x, name, down=True):
        "`x` in rows (or columns) 2^30 elements apart, in a file that is a hole."
        room = torch.from_file(str(tmp_path / name), shared=True, size=2**31 + 4096, dtype=torch.float16)
        return room.as_strided(x.shape, (2**30, 1) if down else (1, 2**30)).copy_(x)

    x, weight = torch.randn(3, 40).half(), torch.randn(40).half()
    cases.far(x, weight, torch.randn(40, 5).half(), far(x, "rows"), far(x.t().contiguous(), "columns", False))


def test_64_bits_only_where_offsets_need_them():
    for strides, long in [((5, 1), False), ((2**30 - 3, 1), False), ((2**30, 1), True), ((1, 2**29), True)]:
        assert launch.long(torch.empty_strided((3, 5), strides, device="meta"), torch.empty(3, 5)) is long
    assert launch.long(torch.empty(2**20 - 1, 2**11, device="meta")) is False
    assert launch.long(torch.empty(2**20 + 1, 2**11, device="meta")) is True

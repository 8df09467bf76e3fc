"What launchers share."

import triton

from course_lib.kernels import interpret  # noqa: F401 (mends the interpreter)

WARPS = [triton.Config({}, num_warps=w) for w in (2, 4, 8, 16, 32)]


def enough_warps(configs, arguments, BLOCK, **others):
    "Of `WARPS` those that leave each of a warp's 32 threads 4 to 128 elements of a row, for the autotuner."
    return [c for c in configs if 4 <= BLOCK // (32 * c.num_warps) <= 128] or configs[:1]


def as_rows(x):
    "`x` as [rows, columns] with contiguous rows: a view where strides allow, else a copy."
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def long(*tensors):
    "Do offsets into these need 64 bits? Where 32 do, addresses take half the registers and instructions."
    return any(sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) >= 2**31 for t in tensors)

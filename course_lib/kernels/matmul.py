"""a @ b by tiles, a tile a program, tiles in groups.

A tile of 128 x 256 does 85 FLOPs a byte that it loads (in 16 bits), and tiles in groups find what neighbours
loaded in the cache. In all it is 2 m n k FLOPs and, each matrix moved once, (m k + k n + m n) elements: 2,731
FLOP per byte at 8192^3 in 16 bits, far right of the ridge.

A GPU copies 16 bytes at a time to shared memory where they are aligned and the compiler knows it, and moves
lines of 128. Matrices whose rows don't begin at a line are copied first, to rows that do (2 of some 8192
operations an element): without that, ragged shapes ran at 0.08 to 0.35 of cuBLAS on an H200.
"""

import torch
import triton
import triton.language as tl

from course_lib.kernels import launch

CONFIGS = [
    triton.Config({"BM": bm, "BN": bn, "BK": bk, "GROUP": 8}, num_warps=warps, num_stages=stages)
    for bm, bn, bk, warps, stages in (
        (64, 64, 32, 4, 3),  # for float32, and the interpreter
        (128, 256, 64, 8, 3),
        (256, 128, 64, 8, 3),
        (128, 128, 64, 4, 3),
        (128, 128, 64, 8, 4),
        (64, 256, 64, 4, 4),
        (64, 128, 64, 4, 4),
        (128, 64, 64, 4, 4),
    )
]


def for_dtype(configs, arguments, **others):
    "The configurations for the dtype: products of float32 take no tensor cores, and their tiles are small."
    small = arguments["a_ptr"].dtype == torch.float32
    return [c for c in configs if (c.kwargs["BK"] == 32) == small]


@triton.autotune(CONFIGS, key=["m", "n", "k"], prune_configs_by={"early_config_prune": for_dtype})
@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, c_ptr, m, n, k, a_m, a_k, b_k, b_n, a_row, a_column, b_row, b_column,
    PRECISION: tl.constexpr, A_ROWS: tl.constexpr, B_ROWS: tl.constexpr, C_ROWS: tl.constexpr,
    EVEN: tl.constexpr, LONG: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    "c [m, n] = a @ b; [a_m, a_k] and [b_k, b_n] are the sizes in memory, zeros beyond m, n and k included."
    # Multiples of 8, of which the compiler is told so: by itself it knows of multiples of 16 alone.
    if A_ROWS:
        a_row, a_k = a_row // 8 * 8, a_k // 8 * 8
    else:
        a_column, a_m = a_column // 8 * 8, a_m // 8 * 8
    if B_ROWS:
        b_row, b_n = b_row // 8 * 8, b_n // 8 * 8
    else:
        b_column, b_k = b_column // 8 * 8, b_k // 8 * 8
    if C_ROWS:
        n = n // 8 * 8
    # Down GROUP rows of tiles, then the next column.
    in_group = GROUP * tl.cdiv(n, BN)
    first = tl.program_id(0) // in_group * GROUP
    height = min(tl.cdiv(m, BM) - first, GROUP)
    i = (first + tl.program_id(0) % in_group % height) * BM + tl.arange(0, BM)
    j = tl.program_id(0) % in_group // height * BN + tl.arange(0, BN)
    p = tl.arange(0, BK)
    if LONG:  # row times stride passes 2^31 in matrices of a few gigabytes
        i, j, p, one = i.to(tl.int64), j.to(tl.int64), p.to(tl.int64), tl.full([], 1, tl.int64)
        a_column, b_row = a_column * one, b_row * one
    # Rows and columns past the end wrap around: what comes of them isn't stored, and no mask is needed.
    a_at = a_ptr + ((i % a_m)[:, None] * a_row + p[None, :] * a_column)
    b_at = b_ptr + (p[:, None] * b_row + (j % b_n)[None, :] * b_column)
    total = tl.zeros([BM, BN], tl.float32)
    for start in range(0, k, BK):
        if EVEN:
            a = tl.load(a_at)
            b = tl.load(b_at)
        else:
            a = tl.load(a_at, mask=(p < a_k - start)[None, :], other=0.0)
            b = tl.load(b_at, mask=(p < b_k - start)[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
        a_at += BK * a_column
        b_at += BK * b_row
    c_at = c_ptr + (i[:, None] * n + j[None, :])
    tl.store(c_at, total.to(c_ptr.dtype.element_ty), mask=(i < m)[:, None] & (j < n)[None, :])


def matmul(a, b, precision="ieee", **config):
    """a [m, k] @ b [k, n], of any strides; float32, float16 or bfloat16, both the same, summed in float32.

    precision  of float32 products: "ieee", or "tf32" for tensor cores with 10 bits of mantissa
    config     BM, BN, BK (a divisor of 64), GROUP, num_warps, num_stages: in place of the autotuner's choice
    """
    (m, k), n = a.shape, b.shape[1]
    out = torch.empty(m, n, dtype=a.dtype, device=a.device)
    if not m * n * k:
        return out.zero_()
    a, b = aligned(a), aligned(b)
    kernel = matmul_kernel.fn if config else matmul_kernel
    kernel[lambda c: (triton.cdiv(m, c["BM"]) * triton.cdiv(n, c["BN"]),)](
        a, b, out, m, n, k, *a.shape, *b.shape, *a.stride(), *b.stride(), PRECISION=precision,
        A_ROWS=fits(a), B_ROWS=fits(b), C_ROWS=n % 8 == 0, EVEN=a.shape[1] % 64 == b.shape[0] % 64 == 0,
        LONG=launch.long(a, b, out), **config,
    )  # fmt: skip
    return out


def aligned(x):
    "`x` where its rows (or columns) are aligned, else a copy in longer rows (or columns) that end in zeros."
    if fits(x, 64) or fits(x.t(), 64):
        return x
    if x.stride(0) < x.stride(1):  # keep the order that x has: the copy is faster
        return aligned(x.t()).t()
    rows, columns = x.shape
    room = torch.empty(rows, triton.cdiv(columns, 64) * 64, dtype=x.dtype, device=x.device)
    room[:, :columns] = x
    room[:, columns:] = 0
    return room


def fits(x, multiple=8):
    return x.stride(1) == 1 and x.stride(0) % multiple == x.shape[1] % multiple == x.data_ptr() % 16 == 0

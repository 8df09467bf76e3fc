"""x + y: a block of elements for each program, and a mask for the last block.

Bytes: x and y are read, the sum is written, 3 n elements. One FLOP an element: 1/6 FLOP per byte in 16 bits,
at the far left of the roofline.
"""

import torch
import triton
import triton.language as tl

from course_lib.kernels import interpret  # noqa: F401 (mends the interpreter)


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < n
    x = tl.load(x_ptr + at, mask=there)
    y = tl.load(y_ptr + at, mask=there)
    tl.store(out_ptr + at, x + y, mask=there)


def add(x, y, block=1024):
    "x + y, of one dtype, in a new tensor of the broadcast shape. What isn't contiguous is copied first."
    x, y = (t.contiguous() for t in torch.broadcast_tensors(x, y))
    out = torch.empty_like(x)
    if n := out.numel():
        add_kernel[(triton.cdiv(n, block),)](x, y, out, n, BLOCK=block)
    return out


def intensity(n, dtype):
    "FLOPs per byte: one addition an element; two reads and a write."
    return n / (3 * n * dtype.itemsize)

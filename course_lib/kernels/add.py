"""x + y: a block of elements for each program, and a mask for the last block.

Bytes: x and y are read, the sum is written, 3 n elements. One FLOP an element: 1/6 FLOP per byte in 16 bits,
at the far left of the roofline.
"""

import torch
import triton
import triton.language as tl

from course_lib.kernels import KernelError, launch


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < n
    x = tl.load(x_ptr + at, mask=there)
    y = tl.load(y_ptr + at, mask=there)
    tl.store(out_ptr + at, x + y, mask=there)


def add(x, y, *, block=1024, warps=4):
    """x + y in a new tensor of the broadcast shape. float32, float16 or bfloat16, both the same.

    An input that is not contiguous, or that is broadcast, is copied first.
    """
    launch.check("add", x=x, y=y)
    launch.no_gradient("add", x=x, y=y)
    launch.power_of_two("add", block=block, warps=warps)
    if x.dtype != y.dtype:
        raise KernelError(f"add takes two tensors of one dtype, and was given {launch.short(x.dtype)} "
                          f"and {launch.short(y.dtype)}: convert one of them")  # fmt: skip
    try:
        x, y = (t.contiguous() for t in torch.broadcast_tensors(x, y))
    except RuntimeError:
        raise KernelError(
            f"add takes shapes that broadcast, and was given {list(x.shape)} and {list(y.shape)}"
        ) from None
    out = torch.empty_like(x)
    n = out.numel()
    if n:
        add_kernel[(triton.cdiv(n, block),)](x, y, out, n, BLOCK=block, num_warps=warps)
    return out


def add_reference(x, y):
    "The same in torch."
    return x + y


def bytes_moved(n, dtype):
    "Bytes for n elements: two reads and a write."
    return 3 * n * dtype.itemsize


def intensity(n, dtype):
    "FLOPs per byte: one addition an element."
    return n / bytes_moved(n, dtype)

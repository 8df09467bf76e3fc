"What the check of market.5 runs beside the learner's kernel: their `layer` on a part of the rows."

import triton
import triton.language as tl

layer = None  # the learner's; the check puts it here, where the compiler and the interpreter look for names


@triton.jit
def rows_kernel(
    h_ptr, w_ptr, b_ptr, out_ptr, first, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    at, rows = tl.arange(0, BLOCK), first + tl.arange(0, ROWS)
    h = tl.load(h_ptr + at, mask=at < WIDTH, other=0.0)
    tl.store(out_ptr + tl.arange(0, ROWS), layer(w_ptr, b_ptr, h, rows, WIDTH, BLOCK))

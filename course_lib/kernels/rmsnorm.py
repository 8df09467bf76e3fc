"""RMSNorm, forward and backward: y = x / rms(x) * weight, each tensor of x's size touched once.

Forward reads x and writes y: 2 n elements. Backward reads dy and x and writes dx: 3 n. The weight's gradient
sums over all rows, which no program sees alone: each keeps a partial sum in registers over the rows it
takes, writes it once, and a second small kernel adds the partial sums, always in the same order.
"""

import torch
import triton
import triton.language as tl

from course_lib.kernels import launch


@triton.autotune(
    launch.WARPS, ["rows", "columns"], prune_configs_by={"early_config_prune": launch.enough_warps}
)
@triton.jit
def forward_kernel(x_ptr, weight_ptr, y_ptr, rstd_ptr, rows, columns, x_row, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # row times stride passes 2^31 in tensors of a few gigabytes
    c = tl.arange(0, BLOCK)
    there = c < columns
    x = tl.load(x_ptr + row * x_row + c, mask=there, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + c, mask=there, other=0.0).to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / columns + eps)
    tl.store(rstd_ptr + row, rstd)
    tl.store(y_ptr + row * columns + c, x * rstd * weight, mask=there)


@triton.jit
def backward_kernel(
    dy_ptr, x_ptr, weight_ptr, rstd_ptr, dx_ptr, partial_ptr, rows, columns, dy_row, x_row,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, LONG: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    "A persistent kernel: few programs, each takes one tile of ROWS rows after the other; loads run ahead."
    c = tl.arange(0, BLOCK)[None, :]
    if LONG:
        c = c.to(tl.int64)
    weight = tl.load(weight_ptr + c, mask=c < columns, other=0.0).to(tl.float32)
    dweight = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        r = tile * ROWS + tl.arange(0, ROWS)[:, None]
        there = (r < rows) & (c < columns)
        rstd = tl.load(rstd_ptr + r, mask=r < rows, other=0.0)
        if LONG:
            r = r.to(tl.int64)
        x_at = x_ptr + (r * x_row + c)
        dy_at = dy_ptr + (r * dy_row + c)
        x = (tl.load(x_at) if EVEN else tl.load(x_at, mask=there, other=0.0)).to(tl.float32)
        dy = (tl.load(dy_at) if EVEN else tl.load(dy_at, mask=there, other=0.0)).to(tl.float32)
        unit = x * rstd
        dweight += dy * unit
        slope = dy * weight
        along = tl.sum(slope * unit, axis=1)[:, None] / columns
        dx = (slope - unit * along) * rstd
        if EVEN:
            tl.store(dx_ptr + (r * columns + c), dx)
        else:
            tl.store(dx_ptr + (r * columns + c), dx, mask=there)
    partial_at = partial_ptr + tl.program_id(0).to(tl.int64) * columns + tl.arange(0, BLOCK)
    tl.store(partial_at, tl.sum(dweight, axis=0), mask=tl.arange(0, BLOCK) < columns)


@triton.jit
def sum_parts_kernel(partial_ptr, out_ptr, parts, columns, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([PARTS, BLOCK], tl.float32)
    for start in range(0, parts, PARTS):
        p = start + tl.arange(0, PARTS)
        there = (p < parts)[:, None] & (c < columns)[None, :]
        total += tl.load(partial_ptr + p[:, None] * columns + c[None, :], mask=there, other=0.0)
    tl.store(out_ptr + c, tl.sum(total, axis=0), mask=c < columns)


def forward(x, weight, eps=1e-6):
    "(y, rstd) without autograd: y of x's shape and dtype, rstd = 1 / rms as float32, one a row."
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = torch.empty(x.shape[:-1].numel(), dtype=torch.float32, device=x.device)
    if x.numel():
        flat, weight = launch.as_rows(x), weight.contiguous()
        rows, columns = flat.shape
        block = triton.next_power_of_2(columns)
        forward_kernel[(rows,)](flat, weight, y, rstd, rows, columns, flat.stride(0), eps, BLOCK=block)
    return y, rstd


def backward(dy, x, weight, rstd):
    "(dx, dweight) from dy and what `forward` was given and gave."
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return dx, torch.zeros_like(weight)
    flat, slope, weight = launch.as_rows(x), launch.as_rows(dy), weight.contiguous()
    rows, columns = flat.shape
    tile, block, warps, stages, programs = tiling(rows, columns, x)
    parts = min(triton.cdiv(rows, tile), programs)
    partial = torch.empty(parts, columns, dtype=torch.float32, device=x.device)
    backward_kernel[(parts,)](
        slope, flat, weight, rstd, dx, partial, rows, columns, slope.stride(0), flat.stride(0),
        ROWS=tile, BLOCK=block, STAGES=stages, LONG=launch.long(slope, flat, dx),
        EVEN=columns == block and rows % tile == 0, num_warps=warps,
    )  # fmt: skip
    dweight = torch.empty(columns, dtype=weight.dtype, device=x.device)
    sum_parts_kernel[(triton.cdiv(columns, 16),)](
        partial, dweight, parts, columns, PARTS=min(512, triton.next_power_of_2(parts)), BLOCK=16
    )
    return dx, dweight


def tiling(rows, columns, x):
    """(rows a tile, BLOCK, warps, stages, programs) of the backward pass.

    On an H200 (16384 x 4096, bfloat16) two rows with 8 warps, three stages and one program a multiprocessor
    came first of 111.
    """
    programs, shared = 4, 232_448  # in the interpreter; the loads under way are in shared memory, in bytes
    if x.is_cuda:
        gpu = torch.cuda.get_device_properties(x.device)
        programs, shared = gpu.multi_processor_count, gpu.shared_memory_per_block_optin
    block = triton.next_power_of_2(columns)
    tile = max(1, min(8192 // block, triton.next_power_of_2(rows) // 512))
    if block > 8192:  # such rows fill the registers, and one stage has to do
        return tile, block, 32, 1, programs
    stages = (shared - 4096) // (2 * tile * block * x.element_size())
    return tile, block, max(4, tile * block // 1024), max(1, min(3, stages)), programs


class RMSNorm(torch.autograd.Function):
    "`rmsnorm` for autograd."

    @staticmethod
    def forward(ctx, x, weight, eps):
        y, rstd = forward(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        return *backward(dy, *ctx.saved_tensors), None


def rmsnorm(x, weight, eps=1e-6):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, with gradients for x and weight.

    x of any shape and strides, float32, float16 or bfloat16, rows of at most 16,384; weight one row of it, of
    any of those dtypes. Computed in float32; the result has x's dtype.
    """
    return RMSNorm.apply(x, weight, eps)

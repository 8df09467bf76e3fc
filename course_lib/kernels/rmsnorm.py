"""RMSNorm, forward and backward: y = x / rms(x) * weight, each tensor of x's size touched once.

Forward reads x and writes y: 2 n elements. Backward reads dy and x and writes dx: 3 n. The weight's gradient
sums over all rows, which no program sees alone: each keeps a partial sum in registers over the rows it
takes, writes it once, and a second small kernel adds the partial sums, always in the same order. Some 4
FLOPs an element forward and 8 backward: 1 and 1.3 FLOP per byte in 16 bits, far left of the ridge.
"""

import torch
import triton
import triton.language as tl

from course_lib.kernels import KernelError, launch, softmax, tune

MOST_COLUMNS = 16384  # the backward keeps several rows of float32 in registers


@triton.jit
def forward_kernel(
    x_ptr, weight_ptr, y_ptr, rstd_ptr, rows, columns, x_row, x_column, weight_stride, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, ONCE: tl.constexpr, LONG: tl.constexpr,
    EVEN: tl.constexpr, LOADS: tl.constexpr, STORES: tl.constexpr,
):  # fmt: skip
    if ONCE:
        r, c, there = places(tl.program_id(0), rows, columns, ROWS, BLOCK, LONG)
        x = read(x_ptr + r * x_row + c * x_column, there, EVEN, LOADS)
        # After x, which takes longer to come. As [1, BLOCK], so that its lanes lie as those of x do.
        weight = read(weight_ptr + c * weight_stride, c < columns, EVEN, "")
        normalize(y_ptr, rstd_ptr, x, weight, r, c, there, rows, columns, eps, EVEN, STORES)
    else:
        c = tl.arange(0, BLOCK)[None, :]
        weight = read(weight_ptr + c.to(tl.int64) * weight_stride, c < columns, EVEN, "")
        for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
            r, c, there = places(tile, rows, columns, ROWS, BLOCK, LONG)
            x = read(x_ptr + r * x_row + c * x_column, there, EVEN, LOADS)
            normalize(y_ptr, rstd_ptr, x, weight, r, c, there, rows, columns, eps, EVEN, STORES)


@triton.jit
def normalize(
    y_ptr, rstd_ptr, x, weight, r, c, there, rows, columns, eps, EVEN: tl.constexpr, STORES: tl.constexpr
):
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / columns + eps)[:, None]
    tl.store(rstd_ptr + r, rstd, mask=r < rows)
    write(y_ptr + r * columns + c, x * rstd * weight, there, EVEN, STORES)


@triton.jit
def places(tile, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr, LONG: tl.constexpr):
    "The rows [ROWS, 1] and columns [1, BLOCK] of a tile, and which of its lanes exist."
    r = tile * ROWS + tl.arange(0, ROWS)[:, None]
    c = tl.arange(0, BLOCK)[None, :]
    if LONG:  # row times stride passes 2^31 in tensors of a few gigabytes
        r = r.to(tl.int64)
        c = c.to(tl.int64)
    return r, c, (r < rows) & (c < columns)


@triton.jit
def read(at, there, EVEN: tl.constexpr, LOADS: tl.constexpr):
    if EVEN:
        return tl.load(at, eviction_policy=LOADS).to(tl.float32)
    else:  # noqa: RET505 (the compiler leaves one branch out)
        return tl.load(at, mask=there, other=0.0, eviction_policy=LOADS).to(tl.float32)


@triton.jit
def write(at, value, there, EVEN: tl.constexpr, STORES: tl.constexpr):
    if EVEN:
        tl.store(at, value, eviction_policy=STORES)
    else:
        tl.store(at, value, mask=there, eviction_policy=STORES)


@triton.jit
def backward_kernel(
    dy_ptr, x_ptr, weight_ptr, rstd_ptr, dx_ptr, partial_ptr,
    rows, columns, dy_row, dy_column, x_row, x_column, weight_stride,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, LONG: tl.constexpr, EVEN: tl.constexpr,
    LOADS: tl.constexpr, STORES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    columns_of = tl.arange(0, BLOCK)[None, :]
    weight = read(weight_ptr + columns_of.to(tl.int64) * weight_stride, columns_of < columns, EVEN, "")
    dweight = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in tl.range(program, tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        r, c, there = places(tile, rows, columns, ROWS, BLOCK, LONG)
        x = read(x_ptr + r * x_row + c * x_column, there, EVEN, LOADS)
        dy = read(dy_ptr + r * dy_row + c * dy_column, there, EVEN, LOADS)
        rstd = tl.load(rstd_ptr + r, mask=r < rows, other=0.0)
        unit = x * rstd
        dweight += dy * unit
        slope = dy * weight
        along = tl.sum(slope * unit, axis=1)[:, None] / columns
        write(dx_ptr + r * columns + c, (slope - unit * along) * rstd, there, EVEN, STORES)
    partial_at = partial_ptr + program.to(tl.int64) * columns + tl.arange(0, BLOCK)
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


def forward(x, weight, eps=1e-6, *, rows=None, warps=None, stages=None, programs=None, evict=None):
    """(y, rstd) without autograd: y of x's shape and dtype, rstd = 1 / rms as float32, one a row.

    The keywords are those of `softmax.softmax`.
    """
    check("rmsnorm", x, weight, eps)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    flat = launch.as_rows(x)
    rstd = torch.empty(flat.shape[0], dtype=torch.float32, device=x.device)
    if not x.numel():
        return y, rstd
    given = {"rows": rows, "warps": warps, "stages": stages, "programs": programs, "evict": evict}
    c = tune.settle("rmsnorm", key(flat), default(*flat.shape), given)
    launch.power_of_two("rmsnorm", rows=c["rows"], warps=c["warps"])
    launch.at_least("rmsnorm", 1, stages=c["stages"])
    launch.at_least("rmsnorm", 0, programs=c["programs"])
    forward_kernel[(softmax.grid(flat, c),)](
        flat, weight, y, rstd, *flat.shape, *flat.stride(), weight.stride(0), eps,
        **softmax.tiling(flat, y, c), **launch.evictions(c["evict"]), num_warps=c["warps"],
    )  # fmt: skip
    return y, rstd


def backward(dy, x, weight, rstd, *, rows=None, warps=None, stages=None, programs=None, evict=None):
    """(dx, dweight) from dy and what `forward` was given and gave. `programs` is at least 1 here.

    Fewer programs write fewer partial sums (programs x columns of float32), and have less in flight.
    """
    check_backward("rmsnorm's backward", dy, x, weight, rstd)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return dx, torch.zeros_like(weight)
    flat, slope = launch.as_rows(x), launch.as_rows(dy)
    n, columns = flat.shape
    given = {"rows": rows, "warps": warps, "stages": stages, "programs": programs, "evict": evict}
    suits = default_backward(n, columns, x.element_size(), launch.shared_memory(x.device))
    c = tune.settle("rmsnorm backward", key(flat), suits, given)
    launch.power_of_two("rmsnorm's backward", rows=c["rows"], warps=c["warps"])
    launch.at_least("rmsnorm's backward", 1, stages=c["stages"], programs=c["programs"])
    parts = launch.balanced(triton.cdiv(n, c["rows"]), c["programs"] * launch.multiprocessors(x.device))
    partial = torch.empty(parts, columns, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(columns)
    backward_kernel[(parts,)](
        slope, flat, weight, rstd, dx, partial, n, columns, *slope.stride(), *flat.stride(), weight.stride(0),
        ROWS=c["rows"], BLOCK=block, STAGES=c["stages"], LONG=launch.long(slope, flat, dx),
        EVEN=columns == block and n % c["rows"] == 0, **launch.evictions(c["evict"]), num_warps=c["warps"],
    )  # fmt: skip
    dweight = torch.empty(columns, dtype=weight.dtype, device=x.device)
    sum_parts_kernel[(triton.cdiv(columns, 16),)](
        partial, dweight, parts, columns, PARTS=min(512, triton.next_power_of_2(parts)), BLOCK=16
    )
    return dx, dweight


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
    any of those dtypes. Computed in float32; the result has x's dtype. KernelError otherwise.
    """
    check("rmsnorm", x, weight, eps)
    return RMSNorm.apply(x, weight, eps)


def check(name, x, weight, eps):
    launch.check(name, x=x, weight=weight)
    if x.dim() == 0 or weight.shape != x.shape[-1:]:
        raise KernelError(f"{name} takes a weight as long as x's last dimension, "
                          f"and was given x {list(x.shape)} and weight {list(weight.shape)}")  # fmt: skip
    launch.at_most(name, "rows", x.shape[-1], MOST_COLUMNS, "use torch.nn.functional.rms_norm")
    if not eps >= 0:
        raise KernelError(f"{name} takes eps of 0 or more, and was given {eps!r}")


def check_backward(name, dy, x, weight, rstd):
    check(name, x, weight, 0.0)
    launch.check(name, dy=dy, x=x, rstd=rstd)
    launch.check(name, dims=1, dtypes=(torch.float32,), rstd=rstd)
    if dy.shape != x.shape:
        raise KernelError(f"{name} takes dy of x's shape {list(x.shape)}, and was given {list(dy.shape)}")
    rows = launch.as_rows(x).shape[0]
    if rstd.shape != (rows,):
        raise KernelError(
            f"{name} takes the rstd that forward gave, of shape [{rows}], and was given {list(rstd.shape)}"
        )


def key(x):
    "What a tuned configuration holds for: shape, strides and dtype."
    return (*x.shape, *x.stride(), x.dtype)


def default(rows, columns):
    """A configuration for the forward pass that suits a shape without a search.

    As for softmax, with half the tile: on an H200 one row of 4,096 with 8 warps led by 0.1 %, at 0.970 of
    a copy's rate.
    """
    return softmax.default(rows, columns, elements=4096)


def default_backward(rows, columns, itemsize=2, shared=launch.SHARED):
    """The same for the backward pass, where programs stay and the next tiles' loads are under way.

    On an H200 (16384 x 4096, bfloat16) two rows with 8 warps, three stages and one program a multiprocessor
    came first of 111 configurations, and whether to evict early made no difference. `shared` is the memory
    in bytes in which a multiprocessor keeps the loads that are under way.
    """
    block = triton.next_power_of_2(columns)
    tile = max(1, min(8192 // block, triton.next_power_of_2(rows) // 512))
    # Longer rows fill the registers, and one stage has to do.
    room = (shared - 4096) // (2 * tile * block * itemsize) if block <= 8192 else 1
    return {
        "rows": tile,
        "warps": max(4, min(32, tile * block // (1024 if block <= 8192 else 512))),
        "stages": max(1, min(3, room)),
        "programs": 1,
        "evict": "none",
    }


def space(rows, columns):
    "The configurations that are worth a search, forward: as for softmax."
    return softmax.space(rows, columns)


def space_backward(rows, columns):
    "The same, backward."
    tiles = [(r, w) for r in (1, 2, 4) for w in (4, 8, 16) if 256 * w <= r * columns <= 2048 * w]
    return [
        {"rows": r, "warps": w, "stages": s, "programs": p, "evict": e}
        for r, w in tiles
        for s in (1, 2, 3, 4)
        for p in (1, 2, 3, 4)
        for e in (("both", "loads", "none") if s == 3 else ("loads",))
        if p * w <= 32 and (s == 1 or p * r * s * columns * 4 <= 200_000)
    ]


def rmsnorm_reference(x, weight, eps=1e-6):
    "The same in torch, written out: computed in float32, or float64 where x is."
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def bytes_moved(rows, columns, dtype):
    "Bytes of the forward pass: x, y, the weight, and 1 / rms in float32."
    return (2 * rows * columns + columns) * dtype.itemsize + 4 * rows


def bytes_moved_backward(rows, columns, dtype):
    "Bytes of the backward pass at the least: dy, x and dx, the weight and its gradient, 1 / rms."
    return (3 * rows * columns + 2 * columns) * dtype.itemsize + 4 * rows


def intensity(rows, columns, dtype):
    "FLOPs per byte forward: a square, a sum and two products an element."
    return 4 * rows * columns / bytes_moved(rows, columns, dtype)


def intensity_backward(rows, columns, dtype):
    "FLOPs per byte backward: eight an element."
    return 8 * rows * columns / bytes_moved_backward(rows, columns, dtype)

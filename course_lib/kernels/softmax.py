"""Softmax over rows that fit in registers: one read and one write an element.

Written as formulas, softmax reads its row three times (for the maximum, the sum and the division):
`three_passes` does that. A program that keeps its row in registers reads it once: half the bytes, 2 n in
place of 4 n. About 5 FLOPs an element: 1.25 FLOP per byte in 16 bits, far left of the ridge.

A program takes a tile of whole rows, then the next tile that is due to it. With `programs` fewer than tiles,
the loads of the next tiles are under way (`stages`) while this one is computed.
"""

import torch
import triton
import triton.language as tl

from course_lib.kernels import launch, tune

MOST_COLUMNS = 65536  # a row of float32 is then 256 KB, the register file of one multiprocessor


@triton.jit
def softmax_kernel(
    x_ptr, out_ptr, rows, columns, x_row, x_column,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, ONCE: tl.constexpr, LONG: tl.constexpr,
    EVEN: tl.constexpr, LOADS: tl.constexpr, STORES: tl.constexpr,
):  # fmt: skip
    if ONCE:
        softmax_tile(
            x_ptr, out_ptr, tl.program_id(0), rows, columns, x_row, x_column,
            ROWS, BLOCK, LONG, EVEN, LOADS, STORES
        )  # fmt: skip
    else:
        for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
            softmax_tile(
                x_ptr, out_ptr, tile, rows, columns, x_row, x_column, ROWS, BLOCK, LONG, EVEN, LOADS, STORES
            )  # fmt: skip


@triton.jit
def softmax_tile(
    x_ptr, out_ptr, tile, rows, columns, x_row, x_column, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    LONG: tl.constexpr, EVEN: tl.constexpr, LOADS: tl.constexpr, STORES: tl.constexpr,
):  # fmt: skip
    r = tile * ROWS + tl.arange(0, ROWS)[:, None]
    c = tl.arange(0, BLOCK)[None, :]
    if LONG:  # row times stride passes 2^31 in tensors of a few gigabytes
        r = r.to(tl.int64)
        c = c.to(tl.int64)
    at = x_ptr + r * x_row + c * x_column
    there = (r < rows) & (c < columns)
    if EVEN:
        x = tl.load(at, eviction_policy=LOADS).to(tl.float32)
    else:
        x = tl.load(at, mask=there, other=-float("inf"), eviction_policy=LOADS).to(tl.float32)
    e = tl.exp(x - tl.max(x, axis=1)[:, None])
    y = e * (1.0 / tl.sum(e, axis=1))[:, None]
    out_at = out_ptr + r * columns + c
    if EVEN:
        tl.store(out_at, y, eviction_policy=STORES)
    else:
        tl.store(out_at, y, mask=there, eviction_policy=STORES)


@triton.jit
def three_passes_kernel(x_ptr, out_ptr, columns, x_row, x_column, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_row
    out_ptr += row * columns
    lane = tl.arange(0, BLOCK).to(tl.int64)
    high = tl.full([BLOCK], -float("inf"), tl.float32)
    for start in range(0, columns, BLOCK):
        c = start + lane
        high = tl.maximum(
            high, tl.load(x_ptr + c * x_column, mask=c < columns, other=-float("inf")).to(tl.float32)
        )
    high = tl.max(high, axis=0)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        c = start + lane
        x = tl.load(x_ptr + c * x_column, mask=c < columns, other=-float("inf")).to(tl.float32)
        total += tl.exp(x - high)
    total = tl.sum(total, axis=0)
    for start in range(0, columns, BLOCK):
        c = start + lane
        x = tl.load(x_ptr + c * x_column, mask=c < columns, other=-float("inf")).to(tl.float32)
        tl.store(out_ptr + c, tl.exp(x - high) / total, mask=c < columns)


def softmax(x, *, rows=None, warps=None, stages=None, programs=None, evict=None):
    """Softmax over the last dimension, of any strides; contiguous, of x's shape and dtype.

    rows      rows a tile, a power of two
    warps     warps a program
    stages    tiles whose loads are under way at a time
    programs  programs for each multiprocessor; 0 for one program a tile
    evict     what is used once needn't stay in the cache: "both" loads and stores, "loads", "stores", "none"

    float32, float16 or bfloat16, computed in float32; rows of at most 65,536. KernelError otherwise.
    """
    _check("softmax", x)
    launch.at_most(
        "softmax", "rows", x.shape[-1], MOST_COLUMNS, "use softmax.three_passes, which has no limit"
    )
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return out
    flat = launch.as_rows(x)
    given = {"rows": rows, "warps": warps, "stages": stages, "programs": programs, "evict": evict}
    c = tune.settle("softmax", key(flat), default(*flat.shape), given)
    launch.power_of_two("softmax", rows=c["rows"], warps=c["warps"])
    launch.at_least("softmax", 1, stages=c["stages"])
    launch.at_least("softmax", 0, programs=c["programs"])
    softmax_kernel[(grid(flat, c),)](
        flat, out, *flat.shape, *flat.stride(), **tiling(flat, out, c), **launch.evictions(c["evict"]),
        num_warps=c["warps"],
    )  # fmt: skip
    return out


def grid(flat, c):
    "How many programs the configuration `c` launches for a tensor [rows, columns]."
    tiles = triton.cdiv(flat.shape[0], c["rows"])
    return launch.balanced(tiles, c["programs"] * launch.multiprocessors(flat.device) or tiles)


def tiling(flat, out, c):
    "What a kernel of row tiles is compiled for."
    rows, columns = flat.shape
    block = triton.next_power_of_2(columns)
    return {
        "ROWS": c["rows"],
        "BLOCK": block,
        "STAGES": c["stages"],
        "ONCE": not c["programs"],  # a tile a program: no loop
        "LONG": launch.long(flat, out),
        "EVEN": columns == block and rows % c["rows"] == 0,  # nothing to mask
    }


def three_passes(x, *, block=1024, warps=4):
    "The same as it is written in formulas: three reads and a write. Rows of any length."
    _check("three_passes", x)
    launch.power_of_two("three_passes", block=block, warps=warps)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        flat = launch.as_rows(x)
        three_passes_kernel[(flat.shape[0],)](
            flat, out, flat.shape[1], *flat.stride(), BLOCK=block, num_warps=warps
        )
    return out


def _check(name, x):
    launch.check(name, x=x)
    launch.no_gradient(name, x=x)
    if x.dim() == 0:
        raise launch.KernelError(
            f"{name} works along the last dimension, and x has none: x[None] gives it one"
        )


def key(x):
    "What a tuned configuration holds for: shape, strides and dtype."
    return (*x.shape, *x.stride(), x.dtype)


def default(rows, columns, elements=8192):
    """A configuration that suits a shape without a search: tiles of whole rows, about `elements` each.

    On an H200 (16384 x 4096, bfloat16) tiles of 8,192 elements with 512 a warp came first of 128
    configurations, at 0.976 of a copy's rate. To evict early cost up to 5 %, programs that stay 7 % or more.
    """
    block = triton.next_power_of_2(columns)
    # Few rows are not gathered in tiles: there should be programs enough for all multiprocessors.
    tile = max(1, min(elements // block, triton.next_power_of_2(rows) // 512))
    return {
        "rows": tile,
        "warps": max(1, min(32, tile * block // 512)),
        "stages": 1,
        "programs": 0,
        "evict": "none",
    }


def space(rows, columns):
    "The configurations that are worth a search, as a list: one program a tile, and few programs with stages."
    tiles = [(r, w) for r in (1, 2, 4, 8) for w in (2, 4, 8, 16) if 512 * w <= r * columns <= 4096 * w]
    once = [
        {"rows": r, "warps": w, "stages": 1, "programs": 0, "evict": e}
        for r, w in tiles
        for e in launch.EVICTIONS
    ]
    often = [
        {"rows": r, "warps": w, "stages": s, "programs": p, "evict": e}
        for r, w in tiles
        for s, p in ((1, 4), (1, 8), (2, 2), (2, 4), (3, 2), (3, 4), (4, 1), (4, 2))
        for e in ("loads", "none")
        if r <= 4 and w in (4, 8) and r * columns <= 2048 * w
    ]
    return once + often


def softmax_reference(x):
    "The same in torch."
    return torch.softmax(x, dim=-1)


def bytes_moved(rows, columns, dtype, passes=1):
    "Bytes: `passes` reads and one write an element."
    return (passes + 1) * rows * columns * dtype.itemsize


def intensity(rows, columns, dtype, passes=1):
    "FLOPs per byte: maximum, difference, exponential, sum and product, one each an element."
    return 5 * rows * columns / bytes_moved(rows, columns, dtype, passes)

"""a @ b by tiles: from one tile a program in plain order to a persistent kernel with the copy engine.

Each element of a tile's row of a and column of b is used as often as the tile is wide: a tile of 128 x 256
does 85 FLOPs a byte that it loads (in 16 bits), and tiles in groups find what neighbours loaded in the cache.
In all it is 2 m n k FLOPs and, each matrix moved once, (m k + k n + m n) elements: 2,731 FLOP per byte at
8192^3 in 16 bits, far right of the ridge.

Two kernels:
- `pointers_kernel`, a tile a program, addresses and masks by hand. `in_rows` launches it in plain order.
- `descriptors_kernel`, what `matmul` uses. Tensor descriptors: Hopper's copy engine makes addresses, masks
  and swizzles, and needs rows that start at multiples of 16 bytes, so other matrices are copied first (2 of
  some 8192 operations an element). Persistent: while a tile is stored, the next one's loads are under way.
  Few tiles leave multiprocessors idle: then k is split, and partial products are added by a second kernel.
"""

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from course_lib.kernels import KernelError, interpreted, launch, tune

MOST = 2**31 - 1  # of a matrix's rows, columns, and blocks of them: they are 32-bit numbers


@triton.jit
def tile_of(number, tiles_m, tiles_n, GROUP: tl.constexpr):
    "Which tile is the n-th: down GROUP rows of tiles, then the next column. GROUP 1 is row by row."
    in_group = GROUP * tiles_n
    group = number // in_group
    first = group * GROUP
    height = min(tiles_m - first, GROUP)
    return first + (number % in_group) % height, (number % in_group) // height


@triton.jit
def pointers_kernel(
    a_ptr, b_ptr, c_ptr, m, n, k, a_row, a_column, b_row, b_column, c_row,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = tile_of(tl.program_id(0), tl.cdiv(m, BM), tl.cdiv(n, BN), GROUP)
    # 64 bits: row times stride passes 2^31 in matrices of a few gigabytes.
    i = (tile_m * BM + tl.arange(0, BM)).to(tl.int64)
    j = (tile_n * BN + tl.arange(0, BN)).to(tl.int64)
    p = tl.arange(0, BK).to(tl.int64)
    a_at = a_ptr + i[:, None] * a_row + p[None, :] * a_column
    b_at = b_ptr + p[:, None] * b_row + j[None, :] * b_column
    total = tl.zeros([BM, BN], tl.float32)
    for start in range(0, k, BK):
        a = tl.load(a_at, mask=(i < m)[:, None] & (p < k - start)[None, :], other=0.0)
        b = tl.load(b_at, mask=(p < k - start)[:, None] & (j < n)[None, :], other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
        a_at += BK * a_column
        b_at += BK * b_row
    c_at = c_ptr + i[:, None] * c_row + j[None, :]
    tl.store(c_at, total.to(c_ptr.dtype.element_ty), mask=(i < m)[:, None] & (j < n)[None, :])


@triton.jit
def descriptors_kernel(
    a_desc, b_desc, c_desc, c_ptr, m, n, k, c_row, c_part, k_part,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
    A_TURNED: tl.constexpr, B_TURNED: tl.constexpr, BY_DESC: tl.constexpr, HALVES: tl.constexpr,
    FLATTEN: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.cdiv(m, BM)
    tiles_n = tl.cdiv(n, BN)
    part = tl.program_id(1)
    steps = tl.cdiv(tl.minimum(k - part * k_part, k_part), BK)
    # With FLATTEN the compiler makes one loop of both: the tile that is stored is then counted apart.
    stored = tl.program_id(0) - tl.num_programs(0)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=FLATTEN):
        tile_m, tile_n = tile_of(tile, tiles_m, tiles_n, GROUP)
        total = tl.zeros([BM, BN], tl.float32)
        for step in range(steps):
            p = part * k_part + step * BK
            if A_TURNED:  # noqa: SIM108 (the compiler leaves one branch out)
                a = a_desc.load([p, tile_m * BM]).T
            else:
                a = a_desc.load([tile_m * BM, p])
            if B_TURNED:  # noqa: SIM108
                b = b_desc.load([tile_n * BN, p]).T
            else:
                b = b_desc.load([p, tile_n * BN])
            total = tl.dot(a, b, total, input_precision=PRECISION)
        stored += tl.num_programs(0)
        tile_m, tile_n = tile_of(stored, tiles_m, tiles_n, GROUP)
        i = tile_m * BM
        j = tile_n * BN
        if HALVES:
            # Half a tile at a time needs half the shared memory, and leaves it to the loads.
            left, right = tl.split(total.reshape(BM, 2, BN // 2).permute(0, 2, 1))
            store(c_desc, c_ptr, left, i, j, m, n, c_row, part.to(tl.int64) * c_part, BM, BN // 2, BY_DESC)
            store(
                c_desc,
                c_ptr,
                right,
                i,
                j + BN // 2,
                m,
                n,
                c_row,
                part.to(tl.int64) * c_part,
                BM,
                BN // 2,
                BY_DESC,
            )
        else:
            store(c_desc, c_ptr, total, i, j, m, n, c_row, part.to(tl.int64) * c_part, BM, BN, BY_DESC)


@triton.jit
def store(
    c_desc, c_ptr, c, i, j, m, n, c_row, offset, BM: tl.constexpr, BN: tl.constexpr, BY_DESC: tl.constexpr
):
    if BY_DESC:
        c_desc.store([i, j], c.to(c_desc.dtype))
    else:
        rows = (i + tl.arange(0, BM)).to(tl.int64)
        columns = (j + tl.arange(0, BN)).to(tl.int64)
        at = c_ptr + offset + rows[:, None] * c_row + columns[None, :]
        tl.store(at, c.to(c_ptr.dtype.element_ty), mask=(rows < m)[:, None] & (columns < n)[None, :])


@triton.jit
def add_parts_kernel(part_ptr, c_ptr, numel, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for _ in tl.static_range(PARTS):  # unrolled, so that all loads are under way at once
        total += tl.load(part_ptr + at, mask=at < numel, other=0.0)
        part_ptr += numel
    tl.store(c_ptr + at, total.to(c_ptr.dtype.element_ty), mask=at < numel)


class Config(NamedTuple):
    """How `matmul` is launched.

    bm, bn, bk   the tile, and how much of k it takes at a time: powers of two, 16 or more
    warps, stages  warps a program, and blocks of k whose loads are under way
    group        rows of tiles in a group
    split        parts of k
    halves       store a tile in two halves
    flatten      one loop of tiles and blocks
    programs     programs for each multiprocessor, each with its tiles
    """

    bm: int = 128
    bn: int = 256
    bk: int = 64
    warps: int = 8
    stages: int = 3
    group: int = 8
    split: int = 1
    halves: bool = True
    flatten: bool = True
    programs: int = 1


def matmul(a, b, *, precision="ieee", config=None, **settings):
    """a [m, k] @ b [k, n], of any strides; float32, float16 or bfloat16, both the same, summed in float32.

    precision  of float32 products: "ieee", or "tf32" for tensor cores with 10 bits of mantissa
    config     a `Config`; its fields may also be given one by one

    KernelError for what it can't do.
    """
    check("matmul", a, b, precision)
    (m, k), n = a.shape, b.shape[1]
    if not m * n * k:
        return torch.zeros(m, n, dtype=a.dtype, device=a.device)
    if config is None:
        config = tune.recall("matmul", key(a, b)) or default(
            m, n, k, a.dtype, launch.multiprocessors(a.device)
        )
    for setting in settings:
        if setting not in Config._fields:
            known = ", ".join(Config._fields)
            raise KernelError(f"matmul has no setting {setting!r}: it has {known}")
    config = config._replace(**settings)
    check_tile("matmul", config.bm, config.bn, config.bk)
    launch.power_of_two("matmul", warps=config.warps)
    launch.at_least("matmul", 1, stages=config.stages, group=config.group, split=config.split,
                    programs=config.programs)  # fmt: skip
    return by_descriptors(a, b, precision, config)


def by_descriptors(a, b, precision, c):
    "The second kernel, with the copies, the descriptors and the sum of parts that it needs."
    (m, k), n = a.shape, b.shape[1]
    a, a_turned = aligned(a)
    b, b_turned = aligned(b)
    out = torch.empty(m, n, dtype=a.dtype, device=a.device)
    k_part = triton.cdiv(triton.cdiv(k, c.bk), c.split) * c.bk
    split = triton.cdiv(k, k_part)  # no part is empty
    into = out if split == 1 else torch.empty(split, m, n, dtype=torch.float32, device=a.device)
    by_desc = split == 1 and n * out.element_size() % 16 == 0
    halves = c.halves and c.bn >= 32
    tiles = triton.cdiv(m, c.bm) * triton.cdiv(n, c.bn)
    a_desc = describe(a, (c.bk, c.bm) if a_turned else (c.bm, c.bk), a_turned)
    b_desc = describe(b, (c.bn, c.bk) if b_turned else (c.bk, c.bn), b_turned)
    c_desc = TensorDescriptor(out, [m, n], [n, 1], [c.bm, c.bn // 2 if halves else c.bn]) if by_desc else None
    programs = launch.balanced(tiles, c.programs * launch.multiprocessors(a.device))
    launch.again(
        descriptors_kernel,
        (a.device, a.dtype, m, n, k, a_turned, b_turned, precision, c), (programs, split, 1),
        a_desc, b_desc, c_desc, into, m, n, k, n, m * n, k_part, c.bm, c.bn, c.bk, c.group, precision,
        a_turned, b_turned, by_desc, halves, c.flatten, num_warps=c.warps, num_stages=c.stages,
    )  # fmt: skip
    if split > 1:
        add_parts_kernel[(triton.cdiv(m * n, 1024),)](into, out, m * n, PARTS=split, BLOCK=1024)
    return out


def aligned(x):
    """(x, False) with rows of unit stride that start at multiples of 16 bytes, or (x, True) with columns so.

    A view where x is so already, else a copy with room at the end of each row.
    """
    whole = 16 // x.element_size()
    if x.data_ptr() % 16 == 0:
        if fits(x, whole):
            return x, False
        if fits(x.t(), whole):
            return x, True
    turned = x.stride(0) < x.stride(1)  # keep the order that x has: the copy is faster
    rows, columns = x.t().shape if turned else x.shape
    line = 128 // x.element_size()  # whole cache lines: a row then takes no more of them than it must
    room = torch.empty(rows, triton.cdiv(columns, line) * line, dtype=x.dtype, device=x.device)
    view = room[:, :columns]
    view.copy_(x.t() if turned else x)
    return (view.t() if turned else view), turned


def fits(x, whole):
    # A single row's stride says nothing, so that a matrix of one row is copied unless it happens to fit.
    return x.stride(1) == 1 and x.stride(0) % whole == 0 and x.stride(0) >= x.shape[1]


def describe(x, block, turned):
    "The descriptor of an `aligned` matrix."
    x = x.t() if turned else x
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block))


def in_rows(a, b, *, block=(128, 128, 32), group=1, warps=8, stages=3, precision="ieee"):
    """The same with one tile a program, and pointers; by default in plain order, row by row of tiles.

    `block` is the tile and how much of k it takes at a time, `group` the rows of tiles in a group.
    """
    check("in_rows", a, b, precision)
    (m, k), n = a.shape, b.shape[1]
    if not isinstance(block, tuple | list) or len(block) != 3:
        raise KernelError(f"in_rows takes three sizes as block, (bm, bn, bk), and was given {block!r}")
    bm, bn, bk = block
    check_tile("in_rows", bm, bn, bk)
    launch.power_of_two("in_rows", warps=warps)
    launch.at_least("in_rows", 1, stages=stages, group=group)
    if not m * n * k:
        return torch.zeros(m, n, dtype=a.dtype, device=a.device)
    out = torch.empty(m, n, dtype=a.dtype, device=a.device)
    pointers_kernel[(triton.cdiv(m, bm) * triton.cdiv(n, bn),)](
        a, b, out, m, n, k, *a.stride(), *b.stride(), n, BM=bm, BN=bn, BK=bk, GROUP=group,
        PRECISION=precision, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def check(name, a, b, precision):
    launch.check(name, dims=2, a=a, b=b)
    launch.no_gradient(name, a=a, b=b)
    if a.dtype != b.dtype:
        raise KernelError(f"{name} takes two matrices of one dtype, and was given {launch.short(a.dtype)} "
                          f"and {launch.short(b.dtype)}: convert one of them")  # fmt: skip
    if a.shape[1] != b.shape[0]:
        raise KernelError(
            f"{name} takes a [m, k] and b [k, n], and was given {list(a.shape)} and {list(b.shape)}"
        )
    for size in (*a.shape, *b.shape):
        launch.at_most(name, "rows and columns", size, MOST, "multiply it in parts")
    if precision not in ("ieee", "tf32"):
        raise KernelError(f"{name} takes precision='ieee' or 'tf32', and was given {precision!r}")


def check_tile(name, bm, bn, bk):
    "tl.dot takes blocks of 16 x 16 and more."
    launch.power_of_two(name, bm=bm, bn=bn, bk=bk)
    launch.at_least(name, 16, bm=bm, bn=bn, bk=bk)


def key(a, b):
    "What a tuned configuration holds for: shapes, strides and dtype."
    return (*a.shape, b.shape[1], *a.stride(), *b.stride(), a.dtype)


class Tile(NamedTuple):
    "A tile, how it is run, and the rate of a busy multiprocessor on it: the first one's, on even rows, is 1."

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    programs: int
    even: float
    ragged: float  # where rows of a or b don't fill whole cache lines: narrow tiles suffer most


# Rates on an H200 (bfloat16), from the search over the spaces below on 15 shapes.
TILES = (
    Tile(128, 256, 64, 8, 3, 1, even=1.0, ragged=0.9),
    Tile(128, 128, 64, 4, 3, 2, even=1.02, ragged=0.7),
    Tile(64, 256, 64, 4, 4, 1, even=0.9, ragged=0.56),
    Tile(64, 128, 128, 4, 4, 1, even=0.92, ragged=0.45),
)
RATE = 2.5e12  # products a second and multiprocessor, times multiprocessors, at a rate of 1
LARGE = 2**36  # products m n k: beyond, only the first tile was searched


@functools.lru_cache(256)
def default(m, n, k, dtype, multiprocessors):
    """A configuration by a small model: rounds of tiles over the multiprocessors, each at its tile's rate.

    A split of k fills multiprocessors that would be idle, and costs a second kernel and its memory.
    """
    if interpreted():
        return Config(32, 32, 32, warps=4, stages=1)
    if dtype == torch.float32:
        return Config(64, 64, 32, warps=4, stages=3, flatten=False, halves=False)
    even = n % 64 == 0 and k % 64 == 0
    if m * n * k > LARGE:
        # 16 rows of 128 and 8 columns of 256 are about a square: what runs at one time shares most.
        return Config(128, 256, 64, warps=8, stages=3, group=16 if even else 8)
    best = None
    for tile in TILES:
        tiles = math.ceil(m / tile.bm) * math.ceil(n / tile.bn)
        slots = multiprocessors * tile.programs
        for split in (1, 2, 4, 8):
            if split > 1 and (tiles * split > slots or k < 512 * split):
                continue
            each = math.ceil(tiles * split / slots)  # tiles a program, in turn
            beside = math.ceil(
                math.ceil(tiles * split / each) / multiprocessors
            )  # programs beside each other
            products = each * beside * tile.bm * tile.bn * math.ceil(k / split)
            multiply = products / (tile.even if even else tile.ragged) / RATE
            # Partial sums are written and read at 4 TB/s, by a kernel more.
            added = 0 if split == 1 else m * n * (8 * split + 2) / 4e12 + 3e-6
            if best is None or multiply + added < best[0]:
                best = multiply + added, tile, split
    _, tile, split = best
    return Config(*tile[:5], split=split, programs=tile.programs)


def space(m, n, k):
    "The configurations that are worth a search."
    found = []
    for bm, bn, bk, warps, stages, programs in [
        (128, 256, 64, 8, 3, 1), (128, 256, 64, 8, 4, 1), (256, 128, 64, 8, 3, 1), (256, 128, 64, 8, 4, 1),
        (128, 128, 64, 8, 4, 1), (128, 128, 64, 4, 4, 1), (128, 128, 64, 4, 3, 2), (128, 128, 128, 8, 3, 1),
        (64, 256, 64, 4, 4, 1), (64, 128, 64, 4, 6, 1), (64, 128, 64, 4, 4, 2), (64, 128, 128, 4, 4, 1),
        (128, 64, 64, 4, 6, 1), (128, 64, 64, 4, 4, 2), (128, 64, 128, 4, 4, 1), (64, 64, 64, 4, 4, 3),
    ]:  # fmt: skip
        tiles = math.ceil(m / bm) * math.ceil(n / bn)
        for split in (1, 2, 3, 4, 6, 8):
            # More parts than multiprocessors have room for gain nothing.
            if split == 1 or (tiles * split <= 132 * programs and k >= 512 * split):
                found.append(Config(bm, bn, bk, warps, stages, split=split, programs=programs))
    return [c._asdict() for c in found]


def space_large():
    "The same for large square matrices: the one tile, and everything else about it."
    wide = Config(128, 256, 64, warps=8)
    found = [
        wide._replace(stages=s, group=g, halves=h, flatten=f)
        for s, h in ((3, True), (3, False), (4, True))
        for f in (True, False)
        for g in (4, 8, 16)
    ]
    found += [Config(256, 128, 64, warps=8, stages=s, flatten=f) for s in (3, 4) for f in (True, False)]
    found += [Config(128, 256, 128, warps=8, stages=2, flatten=f) for f in (True, False)]
    found += [Config(128, 128, 64, warps=w, stages=4) for w in (4, 8)]
    found += [Config(128, 128, 64, warps=4, stages=3, group=g, programs=2) for g in (8, 16)]
    return [c._asdict() for c in found]


def matmul_reference(a, b):
    "The same in torch."
    return a @ b


def flops(m, n, k):
    "A multiply and an add for every element of a row of a and column of b."
    return 2 * m * n * k


def bytes_moved(m, n, k, dtype):
    "Bytes at the least: each matrix once."
    return (m * k + k * n + m * n) * dtype.itemsize


def intensity(m, n, k, dtype):
    "FLOPs per byte."
    return flops(m, n, k) / bytes_moved(m, n, k, dtype)

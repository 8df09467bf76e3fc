"""Flash attention forward for Hopper in Gluon, Triton's lower language: warps, shared memory and barriers.

A program has a warp that loads (`producer`) and two groups of four warps that compute (`consumer`), 64
queries each. The last block of keys comes first: it alone is masked. In the loop the next scores are
computed while the exponentials of this block are (FlashAttention-3, arXiv 2407.08608). The groups take
turns at starting products: one has the tensor cores while the other has the exponentials. A program
computes tile after tile, those with the most keys first, and loads of the next tile overlap the end of this
one.
"""

import inspect
import math
import re
import textwrap

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

BM, BN, STAGES = 128, 128, 2  # queries of a tile, keys of a block, blocks under way
KINDS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@gluon.jit
def tile_of(
    wave, tiles, heads, n, CAUSAL: gl.constexpr, GROUP: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr
):
    "(is there one, block of queries, head, how many blocks of keys) of this program in a wave."
    t = wave * gl.num_programs(0) + gl.program_id(0)
    group = t // (GROUP * tiles)
    size = min(heads - group * GROUP, GROUP)
    i = tiles - 1 - t % (GROUP * tiles) // size
    end = n
    if CAUSAL:
        end = min((i + 1) * BM, n)
    return t < tiles * heads, i, group * GROUP + t % (GROUP * tiles) % size, gl.cdiv(end, BN)


@gluon.jit
def barriers(NUMBER: gl.constexpr, COUNT: gl.constexpr):
    "Barriers that COUNT arrivals complete."
    made = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(made.index(i), count=COUNT)
    return made


@gluon.jit
def producer(
    q_desc, k_desc, v_desc, q_s, k_s, v_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, heads, n,
    CAUSAL: gl.constexpr, GROUP: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    tiles, step = gl.cdiv(n, BM), 0
    for wave in range(gl.cdiv(tiles * heads, gl.num_programs(0))):
        there, i, head, count = tile_of(wave, tiles, heads, n, CAUSAL, GROUP, BM, BN)
        if there:
            mbarrier.wait(q_empty, (wave & 1) ^ 1)
            mbarrier.expect(q_full, 2 * q_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(q_desc, [head * n + i * BM, 0], q_full, q_s.index(0))
            tma.async_copy_global_to_shared(q_desc, [head * n + i * BM + BM // 2, 0], q_full, q_s.index(1))
            for j in range(count):
                row, slot, phase = head * n + (count - 1 - j) * BN, step % STAGES, ((step // STAGES) & 1) ^ 1
                mbarrier.wait(k_empty.index(slot), phase)
                mbarrier.expect(k_full.index(slot), k_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(k_desc, [row, 0], k_full.index(slot), k_s.index(slot))
                mbarrier.wait(v_empty.index(slot), phase)
                mbarrier.expect(v_full.index(slot), v_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(v_desc, [row, 0], v_full.index(slot), v_s.index(slot))
                step += 1


@gluon.jit
def consumer(
    q_s, k_s, v_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, turns, out_ptr, lse_ptr, heads, n,
    scale, ME: gl.constexpr, CAUSAL: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, BM: gl.constexpr,
    BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    HALF: gl.constexpr = BM // 2
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O, k_width=2)
    ROWS: gl.constexpr = gl.SliceLayout(1, S)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    tiles, step, turn = gl.cdiv(n, BM), 0, 0
    zero = gl.zeros([HALF, BN], gl.float32, S)
    for wave in range(gl.cdiv(tiles * heads, gl.num_programs(0))):
        there, i, head, count = tile_of(wave, tiles, heads, n, CAUSAL, GROUP, BM, BN)
        if there:
            q, first = q_s.index(ME), i * BM + ME * HALF
            rows = first + gl.arange(0, HALF, layout=ROWS)
            mbarrier.wait(q_full, wave & 1)
            mbarrier.wait(k_full.index(step % STAGES), (step // STAGES) & 1)
            mbarrier.wait(turns.index(ME), (turn & 1) ^ (1 - ME))
            s = warpgroup_mma(q, k_s.index(step % STAGES).permute((1, 0)), zero, use_acc=False, is_async=True)
            mbarrier.arrive(turns.index(1 - ME), count=1)
            turn += 1
            s = warpgroup_mma_wait(0, deps=(s,))
            gl.thread_barrier()
            mbarrier.arrive(k_empty.index(step % STAGES), count=1)
            cols = (count - 1) * BN + gl.arange(0, BN, layout=gl.SliceLayout(0, S))
            keep = cols[None, :] < n
            if CAUSAL:
                keep = keep & (cols[None, :] <= rows[:, None])
            s = gl.where(keep, s, -float("inf"))
            top = gl.max(s, 1) * scale
            p = gl.exp2(s * scale - top[:, None])
            total = gl.sum(p, 1)
            weights = gl.convert_layout(p.to(q_s.dtype), WEIGHTS)
            acc = gl.zeros([HALF, D], gl.float32, O)
            for _ in range(1, count):
                # The scores of the next block and the output of this one are started together.
                slot, then = step % STAGES, (step + 1) % STAGES
                mbarrier.wait(k_full.index(then), ((step + 1) // STAGES) & 1)
                mbarrier.wait(turns.index(ME), (turn & 1) ^ (1 - ME))
                s = warpgroup_mma(q, k_s.index(then).permute((1, 0)), zero, use_acc=False, is_async=True)
                mbarrier.wait(v_full.index(slot), (step // STAGES) & 1)
                acc = warpgroup_mma(weights, v_s.index(slot), acc, is_async=True)
                mbarrier.arrive(turns.index(1 - ME), count=1)  # the other group's turn
                turn += 1
                s = warpgroup_mma_wait(1, deps=(s,))
                gl.thread_barrier()
                mbarrier.arrive(k_empty.index(then), count=1)
                new = gl.maximum(top, gl.max(s, 1) * scale)
                p = gl.exp2(s * scale - new[:, None])
                shrink = gl.exp2(top - new)
                total = total * shrink + gl.sum(p, 1)
                acc, weights = warpgroup_mma_wait(0, deps=(acc, weights))
                gl.thread_barrier()
                mbarrier.arrive(v_empty.index(slot), count=1)
                acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, O))[:, None]
                weights = gl.convert_layout(p.to(q_s.dtype), WEIGHTS)
                top = new
                step += 1
            mbarrier.arrive(q_empty, count=1)
            mbarrier.wait(v_full.index(step % STAGES), (step // STAGES) & 1)
            acc = warpgroup_mma(weights, v_s.index(step % STAGES), acc, is_async=True)
            acc, weights = warpgroup_mma_wait(0, deps=(acc, weights))
            gl.thread_barrier()
            mbarrier.arrive(v_empty.index(step % STAGES), count=1)
            step += 1
            acc = acc * gl.convert_layout(1.0 / total, gl.SliceLayout(1, O))[:, None]
            out = gl.convert_layout(acc.to(q_s.dtype), WIDE)
            r = first + gl.arange(0, HALF, layout=gl.SliceLayout(1, WIDE))
            at = (head * n + r).to(gl.int64)[:, None] * D
            at = at + gl.arange(0, D, layout=gl.SliceLayout(0, WIDE))[None, :]
            gl.store(out_ptr + at, out, mask=(r < n)[:, None])
            lse = (top + gl.log2(total)) * 0.6931471805599453
            gl.store(lse_ptr + head * n + rows, lse, mask=rows < n)


@gluon.jit
def flash_kernel(
    q_desc, k_desc, v_desc, out_ptr, lse_ptr, heads, n, scale,
    CAUSAL: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    q_s = gl.allocate_shared_memory(q_desc.dtype, [2, BM // 2, D], q_desc.layout)
    k_s = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BN, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(v_desc.dtype, [STAGES, BN, D], v_desc.layout)
    q_full, q_empty = barriers(1, 1).index(0), barriers(1, 2).index(0)
    k_full, k_empty = barriers(STAGES, 1), barriers(STAGES, 2)
    v_full, v_empty = barriers(STAGES, 1), barriers(STAGES, 2)
    turns = barriers(2, 1)
    fence_async_shared()
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (consumer, (q_s, k_s, v_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, turns,
                        out_ptr, lse_ptr, heads, n, scale, 0, CAUSAL, GROUP, D, BM, BN, STAGES)),
            (consumer, (q_s, k_s, v_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, turns,
                        out_ptr, lse_ptr, heads, n, scale, 1, CAUSAL, GROUP, D, BM, BN, STAGES)),
            (producer, (q_desc, k_desc, v_desc, q_s, k_s, v_s, q_full, q_empty, k_full, k_empty,
                        v_full, v_empty, heads, n, CAUSAL, GROUP, BM, BN, STAGES)),
        ],
        [4, 1],  # warps of the second and third
        [240, 24],  # their registers
    )  # fmt: skip


def flash(q, k, v, causal=True):
    """(out, lse) of q, k, v [batch, heads, n, 64 or 128], fp16 or bf16, on a Hopper GPU; forward only.

    v must be finite where n is no multiple of 128: the last block of a head reads on into the next one.
    """
    batch, heads, n, d = q.shape
    q, k, v = (t.contiguous() for t in (q, k, v))
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    descriptors = []
    for t, rows in ((q, BM // 2), (k, BN), (v, BN)):
        layout = gl.NVMMASharedLayout.get_default_for([rows, d], KINDS[q.dtype])
        descriptors.append(TensorDescriptor.from_tensor(t.view(-1, d), [rows, d], layout))
    heads, tiles = batch * heads, triton.cdiv(n, BM)
    group = max(
        1, min(heads, (8 << 20) // (n * d))
    )  # heads whose keys and values take 32 MB, in the L2 cache
    programs = min(tiles * heads, torch.cuda.get_device_properties(q.device).multi_processor_count)
    flash_kernel[(programs,)](
        *descriptors, out, lse, heads, n, math.log2(math.e) / math.sqrt(d),
        CAUSAL=causal, GROUP=group, D=d, BM=BM, BN=BN, STAGES=STAGES, num_warps=4,
    )  # fmt: skip
    return out, lse


def main_loop():
    "The source of the loop over blocks of keys."
    source = inspect.getsource(consumer.fn)
    return textwrap.dedent(re.search(r" +for _ in range.*?step \+= 1", source, re.DOTALL)[0])

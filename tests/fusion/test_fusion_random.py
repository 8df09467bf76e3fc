"""The fuser on random programs, against eager and float64: results, strides, what is changed in place, bytes.

COURSE_FUSION_SEEDS=1000-3000 tries other seeds than the usual ones.
"""

import os

import fusion_programs
import pytest
import torch

from course_lib import fusion

pytest.importorskip("triton")

first, last = map(int, os.environ.get("COURSE_FUSION_SEEDS", "0-300").split("-"))
SEEDS, AT_ONCE = range(first, last), 25


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    "Several programs for a few elements, the last of them in part behind the end."
    monkeypatch.setattr(fusion, "BLOCK", 16)


def same_layout(t):
    "A copy with the same strides."
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(t) if t.numel() else t.clone()


def copies(program):
    made = [same_layout(t) if 0 not in t.stride() else t for t in program.tensors()]
    if program.twice is not None:
        made[-1] = made[program.twice]
    return made


def strides(t):
    "The steps that lead somewhere."
    return [step for n, step in zip(t.shape, t.stride(), strict=True) if n > 1]


def metas(program):
    made = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in program.tensors()]
    if program.twice is not None:
        made[-1] = made[program.twice]
    return made


DIGITS = {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def digits(program):
    "What the coarsest dtype on the way leaves open: eager rounds to it, and the fuser may not."
    everything = fusion_programs.Program(**{**vars(program), "results": range(program.count)})
    dtypes = {v.dtype for v in everything(*metas(program))}
    return max(DIGITS[d] for d in dtypes | {torch.float64} if d in DIGITS)


def as_near(got, eager, exact, digits, what):
    "As near to the exact result as eager is, but for the last digits."
    assert got.dtype == eager.dtype and got.shape == eager.shape, what
    if not got.is_floating_point():
        assert torch.equal(got, eager), what
        return
    a, b, c = (t.double().nan_to_num(nan=-7.5, posinf=9e9, neginf=-9e9) for t in (got, eager, exact))
    off = 2 * (b - c).abs().max() if c.numel() else 0
    near = (a - c).abs() <= off + digits * (1 + c.abs())
    assert near.all(), f"{what}\n{got}\n{eager}\n{exact}"


def distinct_bytes(tensors):
    "Bytes of the distinct elements of some tensors, by their addresses."
    seen = set()
    for t in tensors:
        at = torch.zeros(t.shape, dtype=torch.int64) + t.data_ptr()
        for d, (n, step) in enumerate(zip(t.shape, t.stride(), strict=True)):
            shape = [1] * t.dim()
            shape[d] = n
            at = at + (torch.arange(n) * step * t.element_size()).reshape(shape)
        seen |= {(a, t.element_size()) for a in at.flatten().tolist()}
    return sum(size for _, size in seen)


def one(seed):
    program = fusion_programs.draw(seed)
    args, mine = copies(program), copies(program)
    fused = fusion.fuse(program)
    try:
        eager = program(*args)
    except RuntimeError:  # torch refuses to change memory that is seen as several elements
        with pytest.raises(fusion.CannotFuse, match="in place"):
            fused(*mine)
        return None
    exact, wide = program.exactly(program.tensors())
    try:
        got = fused(*mine)
    except fusion.CannotFuse as e:  # an alias of an input that may not be changed in place
        assert "in place" in str(e), f"seed {seed}\n{program}"
        return None
    what = f"seed {seed}\n{program}\n{fused.source}"
    shown, open_ = program(*metas(program)), digits(program)
    for a, b, c, like in zip(got, eager, exact, shown, strict=True):
        as_near(a, b, c, open_, what)
        assert strides(a) == strides(like), what
        # What eager gives back in an argument's memory is in that memory.
        if a.numel():
            assert [a.data_ptr() == t.data_ptr() for t in mine] == [
                b.data_ptr() == t.data_ptr() for t in args
            ], what
    for a, b, c in zip(mine, args, wide, strict=True):
        as_near(a, b, c, open_, what)
    some = any(node.like.numel() for node in fused.graph.outputs)
    assert fused.launches == int(some), what
    return fused, mine, what


@pytest.mark.parametrize("start", range(SEEDS.start, SEEDS.stop, AT_ONCE))
def test_random_programs(start):
    stores, refused = set(), 0
    for seed in range(start, min(start + AT_ONCE, SEEDS.stop)):
        ran = one(seed)
        if ran is None:
            refused += 1
            continue
        fused, args, what = ran
        cost = fused.cost(*args)
        if fused.graph.outputs:
            distinct = list({id(a): a for a in args}.values())
            used = [
                a
                for a, node in zip(distinct, fused.graph.inputs, strict=True)
                if node in fused.graph.needed()
            ]
            assert cost.read == distinct_bytes(used), what
            assert cost.written == sum(n.like.nbytes for n in fused.graph.outputs), what
        assert fused(*args) is not None and fused.launches in (0, 2), what
        assert fused.kernels <= 1
        stores.add((fused.source or "").count("tl.store"))
    assert refused <= 1 and len(stores) > 1

"""Which blocks of a stack to recompute, so that what the backward pass needs fits into a memory budget.

Block i, run forward, keeps saved[i] bytes for its backward pass; its own input is among them. Where it is
recomputed it keeps inputs[i], its input alone, and flops[i] are spent again. Its saved[i] bytes are back when
its backward pass begins: what the blocks before it keep is still there then, what the blocks after it kept is
gone.

Method: Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016 (arXiv 1604.06174), with a block as
the unit and an exact search in place of equal segments.
"""

import itertools
from typing import NamedTuple

import torch

from course_lib import meter
from course_lib.fusion import memory as fusion_memory


class Costs(NamedTuple):
    "By block: bytes kept, bytes of the input, FLOPs of recomputing."

    saved: list
    inputs: list
    flops: list


def held(saved, inputs, again):
    "Bytes held for the backward pass at the worst moment, where the blocks in `again` are recomputed."
    kept, worst = 0, 0
    for i, (full, small) in enumerate(zip(saved, inputs, strict=True)):
        worst = max(worst, kept + full if i in again else 0)
        kept += small if i in again else full
    return max(worst, kept)


def choose(saved, inputs, flops, budget):
    """The blocks to recompute, a sorted list, so that at most `budget` bytes are held at the fewest FLOPs.

    Every subset is tried, so it is for 16 blocks or so. Raises ValueError, which says the fewest bytes that
    would do, where no choice fits.
    """
    if not len(saved) == len(inputs) == len(flops):
        given = f"{len(saved)}, {len(inputs)} and {len(flops)}"
        raise ValueError(f"saved, inputs and flops have {given} numbers: give one of each for every block")
    numbers = range(len(saved))
    subsets = [set(s) for n in range(len(saved) + 1) for s in itertools.combinations(numbers, n)]
    fitting = [s for s in subsets if held(saved, inputs, s) <= budget]
    if not fitting:
        least = min(held(saved, inputs, s) for s in subsets)
        raise ValueError(
            f"a budget of {budget:,} bytes can't be met: these blocks hold at least {least:,} bytes"
        )
    return sorted(min(fitting, key=lambda s: sum(flops[i] for i in s)))


def costs(blocks, x):
    """The `Costs` of each block of a stack, from one run of each on a CPU: counted, not timed.

    Bytes are those that autograd's hooks see, parameters left out; FLOPs are what recomputing adds to a
    forward and backward pass. torch stops recomputing as soon as the last value that it needs is there.
    """
    found = Costs([], [], [])
    for block in blocks:
        x = x.detach().requires_grad_()
        held_by = fusion_memory.saved(block, x, leave_out=[*block.parameters(), *block.buffers()])
        once, twice = (step_flops([block], x, again) for again in ((), (0,)))
        found.saved.append(sum(n for _, n in held_by))
        found.inputs.append(x.nbytes)
        found.flops.append(twice - once)
        with torch.no_grad():
            x = block(x)
    return found


def step_flops(blocks, x, again=()):
    "FLOPs of the contractions in one forward and backward pass, recomputing included; no gradient is left."
    leaves = [x, *(p for block in blocks for p in block.parameters())]
    leaves = [t for t in leaves if t.requires_grad]
    with meter.count(portable=False) as counts:
        torch.autograd.grad(fusion_memory.run(blocks, x, again).sum(), leaves)
    return counts.flops


def frontier(cost):
    """The choices that nothing beats: [(bytes held, FLOPs recomputed, blocks), …], most bytes first.

    `cost` is a `Costs`. For each budget that matters there is one.
    """
    numbers = range(len(cost.saved))
    subsets = [s for n in range(len(cost.saved) + 1) for s in itertools.combinations(numbers, n)]
    points = sorted(
        (held(cost.saved, cost.inputs, set(s)), sum(cost.flops[i] for i in s), s) for s in subsets
    )
    best, found = float("inf"), []
    for size, spent, s in points:
        if spent < best:
            best = spent
            found.append((size, spent, s))
    return found[::-1]

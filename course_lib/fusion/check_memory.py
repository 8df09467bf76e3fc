"Check of exercise fusion.6. Oracles: the cheapest way by bytes, block after block, and a stack that is run."

import itertools
import random
import re

import torch

from course_lib import checking as core
from course_lib import meter, models
from course_lib.fusion import budget as fusion_budget
from course_lib.fusion import memory as fusion_memory


@core.exercise(
    "fusion.6", "within budget at the fewest FLOPs in 61 stacks, and one was run; too small budgets refused"
)
def choose(answer):
    core.require(
        callable(answer), f"expected a function, got {core.kind(answer)}: pass it without calling it"
    )
    for _ in range(58):
        _one_plan(answer, *_stack(random.randrange(1, 9)))
    # Full blocks side by side with ones for which greedy choices by bytes, FLOPs or their ratio all go wrong.
    _one_plan(answer, [60, 50, 50], [10, 10, 10], [119, 80, 81], 112)
    _one_plan(answer, [40, 40, 90], [5, 5, 5], [3, 4, 2], 130)
    _real_stack(answer)


def _stack(n):
    "Random costs, and a budget between what can't be met and what needs nothing."
    inputs = [random.randrange(1, 40) for _ in range(n)]
    saved = [i + random.randrange(1, 160) for i in inputs]
    flops = [random.randrange(1, 1000) for _ in range(n)]
    low, high = _cheapest(saved, inputs, flops, None)[0], sum(saved)
    return (
        saved,
        inputs,
        flops,
        random.choice([low, low - 1, high, *(random.randint(low, high) for _ in range(6))]),
    )


def _cheapest(saved, inputs, flops, budget):
    """(fewest bytes, None) without a budget, else (None, fewest FLOPs or None).

    Block after block, the fewest FLOPs by the bytes kept so far and the most held so far.
    """
    ways = {(0, 0): 0}
    for full, small, cost in zip(saved, inputs, flops, strict=True):
        new = {}
        for (kept, most), spent in ways.items():
            for key, total in (((kept + full, max(most, kept + full)), spent),
                               ((kept + small, max(most, kept + full)), spent + cost)):  # fmt: skip
                new[key] = min(total, new.get(key, total))
        ways = new
    if budget is None:
        return min(most for _, most in ways), None
    return None, min((spent for (_, most), spent in ways.items() if most <= budget), default=None)


def _one_plan(answer, saved, inputs, flops, budget):
    what = f"saved={saved}, inputs={inputs}, flops={flops}, budget={budget}"
    want = _cheapest(saved, inputs, flops, budget)[1]
    if want is None:
        _refused(answer, saved, inputs, flops, budget, what)
        return
    again = _plan(core.call(answer, saved, inputs, flops, budget), len(saved), what)
    most = _walk(saved, inputs, again)
    core.require(
        most <= budget,
        f"{what}: recomputing {sorted(again)} holds {most} bytes at its worst, over the budget",
    )
    core.equal(sum(flops[i] for i in again), want, f"{what}: FLOPs recomputed")


def _plan(got, n, what):
    core.require(
        isinstance(got, list | tuple | set | frozenset),
        f"{what}: expected a list of the blocks to recompute, got {core.kind(got)}",
    )
    numbers = list(got)
    shown = " ".join(str(numbers).split())[:60]  # in one line, whatever it is
    good = all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < n for i in numbers)
    core.require(
        good and len(set(numbers)) == len(numbers),
        f"{what}: expected different block numbers from 0 to {n - 1}, got {shown}",
    )
    return set(numbers)


def _walk(saved, inputs, again):
    "Bytes held at the worst moment of a forward and a backward pass, moment by moment."
    alive, moments = {}, [0]
    for i in range(len(saved)):
        alive[i] = inputs[i] if i in again else saved[i]
        moments.append(sum(alive.values()))
    for i in reversed(range(len(saved))):
        alive[i] = saved[i]
        moments.append(sum(alive.values()))
        del alive[i]
    return max(moments)


def _refused(answer, saved, inputs, flops, budget, what):
    least = _cheapest(saved, inputs, flops, None)[0]
    try:
        got = answer(list(saved), list(inputs), list(flops), budget)
    except ValueError as e:
        said = [int(n.replace(",", "")) for n in re.findall(r"\d[\d,]*", str(e))]
        core.require(
            budget in said and least in said,
            f"{what} can't be met: expected a ValueError that says the budget and the fewest bytes that "
            f"would do, {least}; it says {str(e)[:60]!r}",
        )
        return
    except NotImplementedError as e:
        if str(e):
            raise
        raise NotImplementedError from None
    raise core.Wrong(f"{what} can't be met: expected a ValueError, got {core.kind(got)}")


def _real_stack(answer):
    "A stack of unlike blocks on the CPU: what it keeps and computes is counted while it runs."
    width, length = 8 * random.randrange(2, 4), random.randrange(11, 23)
    blocks = [models.EncoderLayer(width, 4, ffn=width)]
    blocks += [fusion_memory.FeedForward(width, random.randrange(5, 90)) for _ in range(3)]
    blocks.insert(random.randrange(5), models.EncoderLayer(width, 2, ffn=random.randrange(20, 60)))
    x = torch.randn(2, length, width)
    cost = fusion_budget.costs(blocks, x)
    sizes = sorted({fusion_budget.held(cost.saved, cost.inputs, set(s))
                    for n in range(6) for s in itertools.combinations(range(5), n)})  # fmt: skip
    budget = random.choice(sizes[len(sizes) // 4 : -1])
    what = f"a stack of {len(blocks)} blocks with a budget of {budget} bytes"
    again = _plan(core.call(answer, cost.saved, cost.inputs, cost.flops, budget), len(blocks), what)
    x.requires_grad_()
    with meter.Memory() as watch:
        out = fusion_memory.run(blocks, x, again)
        watch.mark()
    # The first block's input was there before, and the result is alive without being kept.
    kept = watch.marks[0][1] + x.nbytes - out.nbytes
    core.require(kept <= budget, f"{what}: after the forward pass it keeps {kept} bytes")
    spent = fusion_budget.step_flops(blocks, x, again) - fusion_budget.step_flops(blocks, x)
    core.equal(
        spent, _cheapest(cost.saved, cost.inputs, cost.flops, budget)[1], f"{what}: FLOPs it recomputed"
    )

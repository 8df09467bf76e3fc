"Checks of exercises 4 and 5. Oracles: float64 by hand, and Dynamo's own graphs (`meter.compiled`)."

import contextlib
import io
import math
import random

import torch
from torch import nn

from course_lib import checking as core
from course_lib import meter


def _traced(fn, calls, what, limit=None):
    "`meter.compiled`, with what the answer raises said in one sentence."
    name = getattr(fn, "__name__", type(fn).__name__)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return meter.compiled(fn, *calls[0], then=calls[1:], backend="eager", limit=limit)
    except core.Wrong:
        raise
    except Exception as e:
        if core._is_stub(e):
            raise NotImplementedError from None
        raise core.Wrong(f"{name}, compiled, raised {core.describe(e)} on {what}") from None


# --- fusion.4 ---------------------------------------------------------------------------


@core.exercise("fusion.4", "one graph, no break, right on both sides of the limit")
def standardise(answer):
    core.require(
        callable(answer), f"expected a function, got {core.kind(answer)}: pass it without calling it"
    )
    for case in range(4):
        n, d = random.sample(range(3, 14), 2)
        # Columns lie on both sides of the limit, so that the mean of all and theirs decide differently.
        x = torch.randn(n, d) + random.uniform(2, 4) * torch.linspace(-1, 1, d)[torch.randperm(d)]
        x = x + random.choice([-1.5, 0.5, 1.0])
        calls = [(x, float(x.mean()) + side * random.uniform(0.05, 0.3)) for side in (-1, 1)]
        if case % 2:
            calls.reverse()
        if case == 3:  # nothing is positive: the sum over no element is 0
            x = x.abs().neg() - 0.1
            calls = [(x, 5.0), (x - 1, 5.0)]
        _plainly(answer, calls)
        _compiled(answer, calls)


def _by_hand(x, limit):
    x = x.double()
    peak = x.abs().max()
    if float(x.mean()) > limit:
        x = x - x.mean(0, keepdim=True)
    y = x / (1 + math.sqrt(float((x - x.mean()).square().sum()) / (x.numel() - 1)))
    return y * sum(v for v in y.flatten().tolist() if v > 0), peak


def _right(got, x, limit, how):
    what = f"{how}on {core.shapes((x,))[1:-1]}"
    if not isinstance(got, list | tuple) or len(got) != 2:
        raise core.Wrong(f"{what}: expected two tensors, y and peak, got {core.kind(got)}")
    side = "above" if float(x.mean()) > limit else "below"
    y, peak = _by_hand(x, limit)
    what = f"{what}, whose mean lies {side} the limit"
    core.close(got[0], y, f"y {what}", rtol=1e-3, atol=1e-4)
    core.close(got[1], peak, f"peak {what}", rtol=1e-5)


def _plainly(answer, calls):
    for x, limit in calls:
        with contextlib.redirect_stdout(io.StringIO()):
            got = core.call(answer, x, limit)
        _right(got, x, limit, "")


def _compiled(answer, calls):
    what = core.shapes((calls[0][0], round(calls[0][1], 3)))
    # Each call anew, so that a branch which was not taken the first time is counted as well.
    for call in calls:
        found = _traced(answer, [core.clone(call)], what)
        broken = found.breaks
        core.require(
            not broken,
            f"{len(broken)} graph break{'s' * (len(broken) != 1)} on {what}"
            + (f", the first at `{broken[0].code[:60]}`: {broken[0].reason[:80]}" if broken else ""),
        )
        core.require(
            found.totals == found.ran == [1],
            f"expected one graph that is run once, got {found.graphs} graphs, of which {found.ran[0]} ran",
        )
    # One compiled function for both: the branch must not be settled while it is traced.
    found = _traced(answer, core.clone(calls), what)
    core.require(not found.eager, f"a call of the compiled function ran eagerly on {what}")
    for (x, limit), got in zip(calls, found.results, strict=True):
        _right(got, x, limit, "compiled, ")


# --- fusion.5 ---------------------------------------------------------------------------


@core.exercise("fusion.5", "two graphs for 10 calls that all differ, and the running mean right in each")
def centre(answer):
    core.need_callable(answer, "a class")
    for _ in range(2):
        width = random.randrange(3, 9)
        calls = _different_calls(10, width)
        _stream(core.call(answer, width), calls, "")
        _storm(core.call(answer, width), calls)


def _different_calls(n, width):
    # Not 0 or 1, for which Dynamo makes graphs of their own; all three change from each call to the next.
    rows, times = random.sample(range(2, n + 20), n), random.sample(range(2, n + 10), n)
    return [(torch.randn(r, width) + 2, t, random.uniform(1.5, 20)) for r, t in zip(rows, times, strict=True)]


def _stream(module, calls, how, results=None):
    core.require(isinstance(module, nn.Module), f"expected an nn.Module, got {core.kind(module)}")
    means = []
    for i, (x, repeats, temperature) in enumerate(calls):
        means.append(x.double().mean(0))
        want = (x.double() - torch.stack(means).mean(0)) * 0.9**repeats * math.log(temperature)
        got = core.call(module, x, repeats, temperature) if results is None else results[i]
        what = f"{how}call {i + 1}, {core.shapes((x, repeats, round(temperature, 3)))}"
        core.close(got, want, what, rtol=2e-3, atol=1e-5)


def _storm(module, calls):
    # Past this limit Dynamo would give up: enough to see a storm, which costs a compilation for each call.
    found = _traced(module, core.clone(calls), f"{len(calls)} calls", limit=4)
    for broken in found.breaks:
        raise core.Wrong(f"a graph break at `{broken.code[:60]}`: {broken.reason[:80]}")
    if found.graphs > 2:
        third = next(i for i, n in enumerate(found.totals) if n > 2)
        why = next((r.guard for r in reversed(found.recompiles) if "size mismatch" not in r.guard), "")
        raise core.Wrong(
            f"call {third + 1} needed one more graph, expected two for all {len(calls)} calls"
            + (f"; Dynamo compiled again because it no longer held that `{why[:80]}`" if why else "")
        )
    if found.eager:
        raise core.Wrong(f"call {found.eager[0] + 1} of the compiled module ran eagerly")
    _stream(module, calls, "compiled, ", found.results)

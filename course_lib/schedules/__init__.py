"""Lesson schedules: learning-rate schedules, the range test, and steps to a target.

A schedule is a function of t, the part of the run that is done, from 0 to 1.
"""

import contextlib
import copy
import math
import random
from typing import NamedTuple

import torch

# --- schedules


def fractions(steps, last=True):
    """The part of the run that is done at each of `steps` steps: [0, …, 1] in equal parts.

    With `last`, the last step is at 1, as torch's schedulers have it; without, at 1 - 1/steps, as in fastai.
    ValueError for fewer than two steps: a schedule needs a start and an end.
    """
    if steps < 2:
        raise ValueError(f"a schedule of {steps} steps has no start and end; expected at least 2 steps")
    return [s / (steps - last) for s in range(steps)]


def part(warmup, steps):
    "A warm-up of `warmup` steps as a part of a run of `steps`. ValueError where it doesn't fit."
    if steps < 1 or not 0 <= warmup <= steps:
        raise ValueError(
            f"a warm-up of {warmup} steps in a run of {steps}; expected from 0 steps to the whole run: "
            "shorten the warm-up or lengthen the run"
        )
    return warmup / steps


def _cosine(start, end, t):
    return end + (start - end) * (1 + math.cos(math.pi * t)) / 2


def _checked(t, warmup):
    for name, value in (("t", t), ("warmup", warmup)):
        if not 0 <= value <= 1:
            raise ValueError(f"{name} is {value:g}; expected a part of the run, from 0 to 1")


def warmup_cosine(t, peak, warmup=0.1, start=0.0, end=0.0):
    """Learning rate at t: a line from `start` to `peak` at t = `warmup`, then half a cosine to `end` at 1.

    Loshchilov & Hutter 2016 for the cosine, Goyal et al. 2017 for the warm-up.
    """
    _checked(t, warmup)
    if t < warmup:
        return start + (peak - start) * t / warmup
    return _cosine(peak, end, (t - warmup) / (1 - warmup) if warmup < 1 else 0.0)


def one_cycle(t, peak, warmup=0.25, div=25.0, div_final=1e5, moms=(0.95, 0.85, 0.95)):
    """Learning rate and momentum at t, as (lr, momentum). The defaults are fastai's; see `as_torch`.

    Half a cosine from peak / div to `peak` at t = `warmup`, another to peak / div_final at 1. The momentum
    goes from moms[0] to moms[1] to moms[2] at the same places. Smith & Topin 2017, with fastai's cosines.
    """
    _checked(t, warmup)
    if t < warmup:
        u = t / warmup
        return _cosine(peak / div, peak, u), _cosine(moms[0], moms[1], u)
    u = (t - warmup) / (1 - warmup) if warmup < 1 else 0.0
    return _cosine(peak, peak / div_final, u), _cosine(moms[1], moms[2], u)


def as_torch(steps, pct_start=0.3, div_factor=25.0, final_div_factor=1e4):
    """The arguments with which `one_cycle` at `fractions(steps)` is torch's OneCycleLR.

    Torch counts the peak's place in steps from the first, and divides the *first* rate for the last one.
    """
    warmup = (pct_start * steps - 1) / (steps - 1)
    return {"warmup": warmup, "div": div_factor, "div_final": div_factor * final_div_factor}


def constant_then_drop(t, lr, drop=0.75, factor=0.1):
    "Learning rate at t: `lr` until t = `drop`, then `factor` of it."
    _checked(t, drop)
    return lr if t < drop else lr * factor


# --- the range test


class RangeTest(NamedTuple):
    "A usable learning rate; the rates tried, the loss of each batch, and the losses smoothed."

    lr: float
    lrs: list
    losses: list
    smooth: list


def range_test(model, opt, loss_fn, batches, low=1e-5, high=10.0, steps=100, beta=0.98, last=True):
    """Train while the rate grows from `low` to `high`; pick a tenth of the rate with the lowest loss.

    `batches` gives (x, y), and is begun again where it ends. The loss is smoothed by an exponential average
    with `beta`, corrected for its start; the test stops where it passes four times its lowest value or is no
    number. Weights, batch-norm statistics, gradients, optimiser, train or eval mode and the states of the
    random generators are afterwards what they were before. `last` is as for `fractions`; False is fastai's.
    ValueError where `low` and `high` are no range or there are no batches. Smith 2015; fastai's `lr_find`.
    """
    if not 0 < low < high < math.inf:
        raise ValueError(f"a range from {low} to {high}; expected 0 < low < high")
    lrs, losses, smooth = [], [], []
    average, lowest = 0.0, math.inf
    with kept(model, opt):
        model.train()
        supply = _again_and_again(batches)
        for k, t in enumerate(fractions(steps, last), 1):
            x, y = next(supply)
            lr = low * (high / low) ** t
            for group in opt.param_groups:
                group["lr"] = lr
            loss = loss_fn(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            average = beta * average + (1 - beta) * loss.item()
            lrs.append(lr)
            losses.append(loss.item())
            smooth.append(average / (1 - beta**k))
            lowest = min(lowest, smooth[-1])
            if not smooth[-1] <= 4 * lowest:
                break
    best = min(range(len(lrs)), key=lambda k: smooth[k] if math.isfinite(smooth[k]) else math.inf)
    return RangeTest(lrs[best] / 10, lrs, losses, smooth)


def _again_and_again(batches):
    while True:
        empty = True
        for batch in batches:
            empty = False
            yield batch
        if empty:
            raise ValueError(
                "there are no batches: expected a list or a loader that can be gone through again"
            )


@contextlib.contextmanager
def kept(model, opt):
    """What happens inside leaves no trace in `model`, `opt` and the random generators, even where it fails.

    Weights and buffers are written back in place, so that an optimiser and views still refer to them.
    """
    # state_dict holds the tensors themselves, which training overwrites: copies are needed.
    tensors = [(t, t.detach().clone()) for t in [*model.parameters(), *model.buffers()]]
    grads = [(p, None if p.grad is None else p.grad.clone()) for p in model.parameters()]
    modes = [(m, m.training) for m in model.modules()]
    state = copy.deepcopy(opt.state_dict())
    generators = _generators()
    try:
        yield
    finally:
        with torch.no_grad():
            for t, before in tensors:
                t.copy_(before)
        for p, before in grads:
            p.grad = before
        for m, before in modes:
            m.training = before
        opt.load_state_dict(state)
        _restore(generators)


def _generators():
    "The states of torch's, Python's and NumPy's generators."
    import numpy as np

    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else None
    return torch.get_rng_state(), cuda, random.getstate(), np.random.get_state()


def _restore(states):
    import numpy as np

    cpu, cuda, python, numpy = states
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state_all(cuda)
    random.setstate(python)
    np.random.set_state(numpy)


# --- steps to a target


def steps_to_target(curves, target, hold=3):
    """When each run reached `target` to stay, and the median over the runs: (list, median).

    A curve is a list of (step, value) in order. A run has reached the target at the first step from which
    `hold` evaluations one after the other are at `target` or above; None where that never happens. A run that
    never reached it counts as longer than every other in the median: half of them or more make it None.
    """
    if hold < 1:
        raise ValueError(f"hold is {hold}; expected at least 1 evaluation")
    each = [_reached(curve, target, hold) for curve in curves]
    return each, median(each)


def _reached(curve, target, hold):
    run = 0
    for k, (_, value) in enumerate(curve):
        run = run + 1 if value >= target else 0
        if run == hold:
            return curve[k - hold + 1][0]
    return None


def median(values):
    "The median of numbers among which None is more than any; of an even number, the mean of the middle two."
    if not values:
        raise ValueError("the median of no runs; expected at least one")
    ranked = sorted(math.inf if v is None else v for v in values)
    middle = (ranked[(len(ranked) - 1) // 2] + ranked[len(ranked) // 2]) / 2
    return middle if math.isfinite(middle) else None

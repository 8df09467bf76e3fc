"""Lesson schedules: constant-then-drop against one-cycle, each tuned on the same grid before they race.

The grid is one list of learning rates and one of lengths for both: for one-cycle the length of the run, for
constant-then-drop the steps before the drop. A run that never arrives costs the whole budget of steps. The
seeds that decide the tuning are not those of the race.
"""

from statistics import mean, median
from typing import NamedTuple

from course_lib import schedules
from course_lib.schedules import nets as schedules_nets

CONSTANT, CYCLE = "constant, then dropped", "one-cycle"


class Trial(NamedTuple):
    "One place of the grid: steps to the target of each tuning seed, None where never, and their mean cost."

    kind: str
    lr: float
    length: int
    each: list
    cost: float


class Result(NamedTuple):
    """A contest: its trials; by kind the best of them, and the steps to the target of each racing seed.

    `ratios` are constant-then-drop's steps over one-cycle's, seed by seed, and `ratio` is their median. A run
    that never arrived has None among the steps and costs the whole budget in the ratio.
    """

    trials: list
    best: dict
    steps: dict
    ratios: list
    ratio: float


def schedule(kind, lr, length, budget, momentum=0.0):
    "One of the two schedules as (lr, momentum) for each step; with momentum 0, one-cycle has none either."
    if kind == CYCLE:
        moms = (0.95, 0.85, 0.95) if momentum else (0.0, 0.0, 0.0)
        return [schedules.one_cycle(t, lr, moms=moms) for t in schedules.fractions(length)]
    drop = schedules.part(length, budget)
    return [
        (schedules.constant_then_drop(t, lr, drop), momentum) for t in schedules.fractions(budget, last=False)
    ]


def tune(task, lrs, lengths, budget, target, seeds, momentum=0.0, hold=3, **options):
    """Try both schedules at every place of the grid; returns the list of `Trial`s.

    All runs are trained side by side. `budget` is the most steps of a constant rate; `options` go to `train`.
    """
    places = [(kind, lr, length) for kind in (CONSTANT, CYCLE) for lr in lrs for length in lengths]
    plans = [schedule(*place, budget, momentum) for place in places]
    steps = _steps(task, plans, seeds, target, hold, options)
    return [Trial(*place, each, mean(cost(each, budget))) for place, each in zip(places, steps, strict=True)]


def _steps(task, plans, seeds, target, hold, options):
    "Steps to the target of every plan with every seed, a list a plan, from one training side by side."
    runs = schedules_nets.train(
        task, [p for p in plans for _ in seeds], [s for _ in plans for s in seeds],
        target=target, hold=hold, **options,
    )  # fmt: skip
    each, _ = schedules.steps_to_target(runs.curves, target, hold)
    return [each[k : k + len(seeds)] for k in range(0, len(each), len(seeds))]


def cost(steps, budget):
    "Steps, with the whole budget for a run that never arrived."
    return [budget if n is None else n for n in steps]


def best(trials, kind):
    "The trial of a kind with the least mean cost. ValueError, with what to do, where no run arrived at all."
    mine = [t for t in trials if t.kind == kind and any(n is not None for n in t.each)]
    if not mine:
        raise ValueError(
            f"no run of {kind!r} ever reached the target: lower it, allow more steps, or widen the grid"
        )
    return min(mine, key=lambda t: t.cost)


def at_edge(trials, kind):
    "Is the best trial of a kind at the lowest or the highest rate of the grid? Then the grid is too narrow."
    lrs = sorted({t.lr for t in trials})
    return best(trials, kind).lr in (lrs[0], lrs[-1])


def race(task, trials, budget, target, seeds, momentum=0.0, hold=3, **options):
    "The best trial of each kind on new seeds, side by side; returns a `Result`."
    chosen = {kind: best(trials, kind) for kind in (CONSTANT, CYCLE)}
    plans = [schedule(kind, t.lr, t.length, budget, momentum) for kind, t in chosen.items()]
    steps = dict(zip(chosen, _steps(task, plans, seeds, target, hold, options), strict=True))
    costs = zip(cost(steps[CONSTANT], budget), cost(steps[CYCLE], budget), strict=True)
    ratios = [a / b for a, b in costs]
    return Result(trials, chosen, steps, ratios, median(ratios))


def contest(task, lrs, lengths, budget, target, tuning, racing, **options):
    "Tune both schedules on the seeds `tuning`, then race the best of each on `racing`; returns a `Result`."
    if set(tuning) & set(racing):
        raise ValueError(
            f"seeds {sorted(set(tuning) & set(racing))} are for tuning and for the race; expected others"
        )
    trials = tune(task, lrs, lengths, budget, target, tuning, **options)
    return race(task, trials, budget, target, racing, **options)


def step_seconds(task, result, budget, steps=200, runs=3, momentum=0.0, **options):
    "By kind: seconds of a training step of one network alone, with the best schedule; the least of `runs`."
    seconds = {}
    for kind, trial in result.best.items():
        plan = schedule(kind, trial.lr, trial.length, budget, momentum)[:steps]
        clocks = [schedules_nets.train(task, [plan], [seed], **options).clock[-1] for seed in range(runs + 1)]
        # The first run is left out: it pays for what is made once.
        seconds[kind] = min(total / last for last, total in clocks[1:])
    return seconds

"The figures of lesson 02: functions of plain data that return a matplotlib figure."

import math

from course_lib import show
from course_lib.schedules_contest import CONSTANT, CYCLE


def _subplots(*args, **kw):
    import matplotlib.pyplot as plt

    return plt.subplots(*args, **kw)


def draw_runs(arms, target):
    """Training loss of the first steps and accuracy of all steps, a line a run.

    `arms` is {label: (losses, curves)}: lists of losses and of [(step, accuracy), …], one of each a run.
    """
    fig, (left, right) = _subplots(1, 2, figsize=(9.6, 3.6))
    for colour, (label, (losses, curves)) in zip(show.COLOURS, arms.items(), strict=False):
        for k, (loss, curve) in enumerate(zip(losses, curves, strict=True)):
            first = [v for v in loss[:60] if math.isfinite(v)]
            # A run whose loss is no number any more ends in a cross.
            ended = len(first) < min(60, len(loss))
            left.plot(range(1, len(first) + 1), first, color=colour, lw=1, alpha=0.8, markevery=[-1],
                      marker="x" if ended else None)  # fmt: skip
            steps, values = zip(*[(s, v) for s, v in curve if v == v] or [(0, math.nan)], strict=True)
            right.plot(steps, values, color=colour, lw=1, alpha=0.8, label=label if k == 0 else None)
    left.set(yscale="log", xlabel="step", ylabel="training loss", title="the first 60 steps")
    left.set_ylim(top=1e4)
    right.axhline(target, color=show.COLOURS[6], ls="--", lw=1)
    right.set(xlabel="step", ylabel="validation accuracy", ylim=(0, 1))
    right.legend(loc="lower right")
    return fig


def draw_schedules(named):
    "Learning rate and momentum against the step, {label: [(lr, momentum), …]}."
    fig, axes = _subplots(1, 2, figsize=(9.6, 3.2), sharex=True)
    for label, schedule in named.items():
        for ax, values in zip(axes, zip(*schedule, strict=True), strict=True):
            ax.plot(values, label=label)
    axes[0].set(xlabel="step", ylabel="learning rate")
    axes[1].set(xlabel="step", ylabel="momentum")
    axes[0].legend()
    return fig


def draw_range(tests):
    "Smoothed loss against the learning rate of range tests, {label: RangeTest}; a dot at each pick."
    fig, ax = _subplots()
    low, high = math.inf, 0.0
    for colour, (label, test) in zip(show.COLOURS, tests.items(), strict=False):
        ax.plot(test.lrs, test.smooth, color=colour, label=label)
        at = min(range(len(test.lrs)), key=lambda k: abs(test.lrs[k] - test.lr))
        ax.plot([test.lr], [test.smooth[at]], "o", color=colour, label=f"picked: {test.lr:.2g}")
        finite = [v for v in test.smooth if math.isfinite(v)]
        low, high = min(low, *finite), max(high, finite[0])
    ax.set(xscale="log", xlabel="learning rate", ylabel="loss, smoothed", ylim=(0.9 * low, 1.4 * high))
    ax.legend()
    return fig


def draw_sharpness(arms):
    "Sharpness and 2 / lr against the step, a panel an arm: {title: [(step, sharpness, lr), …]}."
    fig, axes = _subplots(1, len(arms), figsize=(9.6, 3.6), sharey=True, squeeze=False)
    for ax, (title, rows) in zip(axes[0], arms.items(), strict=True):
        steps, sharpness, lrs = zip(*rows, strict=True)
        ax.plot(steps, sharpness, "o-", ms=3, label="sharpness λ")
        ax.plot(steps, [2 / lr if lr else math.nan for lr in lrs], "--", label="2 / lr")
        ax.set(yscale="log", xlabel="step", title=title)
    axes[0][0].legend()
    return fig


def draw_trials(trials, budget):
    "Steps to the target against the learning rate, a panel a kind, a line a length; never is on top."
    fig, axes = _subplots(1, 2, figsize=(9.6, 3.6), sharey=True)
    top = 1.15 * budget
    for ax, kind, word in zip(axes, (CONSTANT, CYCLE), ("dropped after", "length"), strict=True):
        mine = [t for t in trials if t.kind == kind]
        for colour, length in zip(show.COLOURS, sorted({t.length for t in mine}), strict=False):
            row = sorted((t.lr, top if t.steps is None else t.steps) for t in mine if t.length == length)
            ax.plot(*zip(*row, strict=True), "o-", color=colour, ms=4, label=f"{word} {length}")
        ax.axhline(budget, color=show.COLOURS[6], ls=":", lw=1)
        ax.set(xscale="log", yscale="log", xlabel="learning rate, or its peak", title=kind)
        ax.legend(fontsize=8)
    axes[0].set_ylabel("steps to the target; above the dots: never")
    return fig


def draw_race(result, target):
    "Steps to the target of each seed, its two runs joined; and the ratio of the two."
    fig, (left, right) = _subplots(1, 2, figsize=(9.6, 2.8), width_ratios=(3, 2))
    never = 1.1 * max(n for steps in result.steps.values() for n in steps if n is not None)
    for a, b in zip(result.steps[CYCLE], result.steps[CONSTANT], strict=True):
        xs = [never if n is None else n for n in (a, b)]
        left.plot(xs, [1, 0], color=show.COLOURS[6], lw=0.7)
        for x, y, n in zip(xs, (1, 0), (a, b), strict=True):
            left.plot([x], [y], "x" if n is None else "o", color=show.COLOURS[1 - y], ms=6)
    left.set_yticks([0, 1], [CONSTANT, CYCLE])
    left.set(xlabel=f"steps to {target:.0%}; a cross: never", ylim=(-0.5, 1.5), xlim=(0, None))
    right.plot(sorted(result.ratios), range(len(result.ratios)), "o", color=show.COLOURS[2])
    right.axvline(result.ratio, color=show.COLOURS[2], lw=1)
    right.axvline(1, color=show.COLOURS[6], lw=1, ls="--")
    right.set(xlabel=f"ratio by seed, median {result.ratio:.3g}", yticks=[], xlim=(0, None))
    return fig


def draw_settings(rows):
    "Ratio of the steps against the sharpness at the start: [(label, sharpness, ratios, ratio), …]."
    fig, ax = _subplots(figsize=(6.8, 4.0))
    for k, (label, sharpness, ratios, ratio) in enumerate(rows):
        colour = show.COLOURS[k % len(show.COLOURS)]
        ax.plot([sharpness] * len(ratios), ratios, "o", color=colour, ms=3, alpha=0.6)
        ax.plot([sharpness], [ratio], "_", color=colour, ms=22, mew=2.5, label=f"{label}: {ratio:.2g}")
    ax.axhline(1, color=show.COLOURS[6], ls="--", lw=1)
    ax.set(xscale="log", xlabel="sharpness at the start", ylabel="ratio of the steps")
    ax.legend(fontsize=8)
    return fig


def view_run(data):
    "The explorer's run: the schedule under its moving limit, and the accuracy."
    fig, (left, right) = _subplots(1, 2, figsize=(9.6, 3.6))
    left.plot(range(len(data["lr"])), data["lr"], label="learning rate")
    steps, limits = data["at"], data["limit"]
    left.plot(steps, limits, "o--", ms=3, color=show.COLOURS[1], label="2 / λ, measured in this run")
    left.axhline(data["limit_at_start"], color=show.COLOURS[6], ls=":", lw=1, label="2 / λ at the start")
    left.set(yscale="log", xlabel="step", ylim=(1e-4, 2), title=data["verdict"])
    left.legend(fontsize=8, loc="lower right")
    right.plot(*zip(*data["curve"], strict=True))
    right.axhline(data["target"], color=show.COLOURS[6], ls="--", lw=1)
    right.set(xlabel="step", ylabel="validation accuracy", ylim=(0, 1), xlim=(0, len(data["lr"])))
    return fig

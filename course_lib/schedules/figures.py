"The figures of lesson schedules: functions of plain data that return a matplotlib figure."

import itertools
import math

from course_lib import show
from course_lib.schedules.contest import CONSTANT, CYCLE


def _subplots(*args, **kw):
    import matplotlib.pyplot as plt

    return plt.subplots(*args, **kw)


def draw_runs(arms, target, first=30, top=1e4):
    """Training loss of the `first` steps and accuracy of all steps, a line a run.

    `arms` is {label: (losses, curves)}: lists of losses and of [(step, accuracy), …], one of each a run. A
    cross is where a run's loss was a number for the last time; losses above `top` are drawn there.
    """
    fig, (left, right) = _subplots(1, 2, figsize=(9.6, 3.6))
    for colour, (label, (losses, curves)) in zip(show.COLOURS, arms.items(), strict=False):
        for k, (loss, curve) in enumerate(zip(losses, curves, strict=True)):
            shown = list(itertools.takewhile(math.isfinite, loss[:first]))
            left.plot(range(1, len(shown) + 1), [min(v, top) for v in shown], color=colour, lw=1, alpha=0.8)
            if shown and len(shown) < min(first, len(loss)):
                left.plot(len(shown), min(shown[-1], top), "x", color=colour, ms=7, mew=2)
            steps, values = zip(*[(s, v) for s, v in curve if v == v] or [(0, math.nan)], strict=True)
            right.plot(steps, values, color=colour, lw=1, alpha=0.8, label=label if k == 0 else None)
    left.set(yscale="log", xlabel="step", ylabel="training loss", title=f"the first {first} steps")
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


def draw_range(tests, chance=None):
    "Smoothed loss against the learning rate of range tests, {label: RangeTest}; a dot at each pick."
    fig, ax = _subplots()
    for colour, (label, test) in zip(show.COLOURS, tests.items(), strict=False):
        ax.plot(test.lrs, test.smooth, color=colour, label=label)
        at = min(range(len(test.lrs)), key=lambda k: abs(test.lrs[k] - test.lr))
        ax.plot([test.lr], [test.smooth[at]], "o", color=colour, label=f"picked: {test.lr:.2g}")
    if chance:
        ax.axhline(chance, color=show.COLOURS[6], ls="--", lw=1, label="the loss of a guess")
    ax.set(xscale="log", yscale="log", xlabel="learning rate", ylabel="loss, smoothed")
    ax.set_yticks([2, 5, 10, 20, 50, 100], ["2", "5", "10", "20", "50", "100"])
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
    # 2 / lr goes to infinity where the rate cools down to 0.
    axes[0][0].set_ylim(top=3 * max(value for rows in arms.values() for _, value, _ in rows))
    axes[0][0].legend()
    return fig


def draw_trials(trials, budget):
    "Mean cost in steps against the learning rate, a panel a kind, a line a length; the budget is dotted."
    fig, axes = _subplots(1, 2, figsize=(9.6, 3.6), sharey=True)
    for ax, kind, word in zip(axes, (CONSTANT, CYCLE), ("dropped after", "length"), strict=True):
        mine = [t for t in trials if t.kind == kind]
        for colour, length in zip(show.COLOURS, sorted({t.length for t in mine}), strict=False):
            row = sorted((t.lr, t.cost) for t in mine if t.length == length)
            ax.plot(*zip(*row, strict=True), "o-", color=colour, ms=4, label=f"{word} {length}")
        ax.axhline(budget, color=show.COLOURS[6], ls=":", lw=1)
        ax.set(xscale="log", yscale="log", xlabel="learning rate, or its peak", title=kind)
        ax.legend(fontsize=8)
    axes[0].set_ylabel("mean steps to the target")
    axes[0].yaxis.set_minor_formatter("{x:.0f}")
    axes[0].yaxis.set_major_formatter("{x:.0f}")
    axes[0].tick_params(axis="y", which="minor", labelsize=7)
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
    left.set(yscale="log", xlabel="step", ylim=(1e-4, 20), title=data["verdict"])
    left.legend(fontsize=8, loc="upper right")
    right.plot(*zip(*data["curve"], strict=True))
    right.axhline(data["target"], color=show.COLOURS[6], ls="--", lw=1)
    right.set(xlabel="step", ylabel="validation accuracy", ylim=(0, 1), xlim=(0, len(data["lr"])))
    return fig

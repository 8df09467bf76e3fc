"The figures of lesson schedules: functions of plain data that return a matplotlib figure."

import itertools
import math

from course_lib import schedules, show


def draw_train(rates, losses, goal):
    "The learning rate and the training loss of one run, step by step."
    fig, (left, right) = show.axes(1, 2, figsize=(9.6, 3.0))
    left.plot(rates)
    left.set(xlabel="step", ylabel="learning rate", ylim=(0, None))
    right.plot(losses, lw=1)
    right.axhline(goal, color=show.COLOURS[6], ls="--", lw=1)
    right.set(yscale="log", xlabel="step", ylabel="training loss", title=f"dashed: the goal, {goal:g}")
    return fig


def draw_runs(arms, target, first=30, top=1e4):
    """Training loss of the `first` steps and accuracy of all steps, a line a run.

    `arms` is {label: (losses, curves)}, one of each a run. A cross marks the step of a run's last finite
    loss; losses above `top` are drawn at `top`.
    """
    fig, (left, right) = show.axes(1, 2, figsize=(9.6, 3.8))
    for colour, (label, (losses, curves)) in zip(show.COLOURS, arms.items(), strict=False):
        for k, (loss, curve) in enumerate(zip(losses, curves, strict=True)):
            shown = list(itertools.takewhile(math.isfinite, loss[:first]))
            left.plot(range(1, len(shown) + 1), [min(v, top) for v in shown], color=colour, lw=1, alpha=0.8)
            if shown and len(shown) < min(first, len(loss)):
                left.plot(len(shown), min(shown[-1], top), "x", color=colour, ms=7, mew=2)
            steps, values = zip(*[(s, v) for s, v in curve if v == v] or [(0, math.nan)], strict=True)
            right.plot(steps, values, color=colour, lw=1, alpha=0.8, label=label if k == 0 else None)
    left.axhline(math.log(10), color=show.COLOURS[6], ls=":", lw=1)
    left.set(
        yscale="log", xlabel="step", ylabel="training loss", title=f"the first {first} steps (dotted: log 10)"
    )
    right.axhline(target, color=show.COLOURS[6], ls="--", lw=1)
    right.set(
        xlabel="step", ylabel="validation accuracy", ylim=(0, 1), title=f"all steps (dashed: {target:.0%})"
    )
    right.legend(loc="lower right", fontsize=8)
    return fig


def draw_plans(plans):
    "Learning rate and momentum against the step, {label: [(lr, momentum), …]}."
    fig, axes = show.axes(1, 2, figsize=(9.6, 3.2), sharex=True)
    for style, (label, plan) in zip(("-", "--", "-."), plans.items(), strict=False):
        for ax, values in zip(axes, zip(*plan, strict=True), strict=True):
            ax.plot(values, style, label=label)
    axes[0].set(xlabel="step", ylabel="learning rate, of the peak")
    axes[1].set(xlabel="step", ylabel="momentum")
    axes[0].legend(fontsize=8)
    return fig


def draw_range(tests, chance):
    "Loss against the learning rate, a panel a test: {title: (pick, rates, losses, smoothed losses)}."
    fig, axes = show.axes(1, len(tests), figsize=(9.6, 3.2))
    for ax, (title, (pick, rates, losses, smooth)) in zip(axes, tests.items(), strict=True):
        ax.plot(rates, losses, color=show.COLOURS[5], lw=0.7, label="loss of each batch")
        ax.plot(rates, smooth, label="smoothed")
        at = min(range(len(rates)), key=lambda k: abs(math.log(rates[k] / pick)))
        ax.plot([pick], [smooth[at]], "o", color=show.COLOURS[1], label=f"the pick, {pick:.2g}")
        ax.axhline(chance, color=show.COLOURS[6], ls="--", lw=1, label="the loss of a guess, log 10")
        ax.set(xscale="log", xlabel="learning rate", ylabel="training loss", title=title)
        ax.set_ylim(0, 1.2 * max(smooth[0], chance))
        ax.legend(fontsize=8, loc="lower left" if smooth[0] < 2 * chance else "upper right")
    return fig


def _sharpness(ax, rows, **style):
    steps, sharpness, rates = zip(*rows, strict=True)
    ax.plot(steps, sharpness, "o-", **{"ms": 3, **style}, label="sharpness λ, measured")
    ax.plot(steps, [2 / lr if lr else math.nan for lr in rates], "--", color=show.COLOURS[1], label="2 / lr")
    # 2 / lr goes to infinity where the rate comes down to 0.
    ax.set(yscale="log", xlabel="step", ylim=(3, 3 * max(sharpness)))


def draw_sharpness(arms):
    "Sharpness and 2 / lr by step, a panel an arm, a line a run: {title: [[(step, sharpness, lr), …], …]}."
    fig, axes = show.axes(1, len(arms), figsize=(9.6, 3.6), sharey=True)
    for ax, (title, runs) in zip(axes, arms.items(), strict=True):
        style = {"ms": 2, "lw": 1, "color": show.COLOURS[0], "alpha": 0.6}
        for rows in runs[1:]:
            ax.plot(*list(zip(*rows, strict=True))[:2], "o-", **style)
        _sharpness(ax, runs[0], **style)
        ax.set(title=title, ylim=(3, 3 * max(value for rows in runs for _, value, _ in rows)))
    axes[0].set_ylabel("λ, and 2 / lr (log scale)")
    axes[0].legend(fontsize=8, loc="lower left")
    return fig


def view_run(run):
    "The explorer's run: sharpness, 2 / lr, accuracy; a dict of rows, curve, target, verdict, steps."
    fig, (left, right) = show.axes(1, 2, figsize=(9.6, 3.6))
    _sharpness(left, run["rows"])
    left.set(ylabel="λ, and 2 / lr (log scale)", xlim=(0, run["steps"]), title=run["verdict"])
    left.legend(fontsize=8, loc="lower left")
    curve = [(s, v) for s, v in run["curve"] if v == v]
    right.plot(*(zip(*curve, strict=True) if curve else ([], [])))
    right.axhline(run["target"], color=show.COLOURS[6], ls="--", lw=1)
    right.set(xlabel="step", ylabel="validation accuracy", ylim=(0, 1), xlim=(0, run["steps"]))
    return fig


def draw_arrivals(methods):
    "Steps to the target of each run, a row a method, {name: [steps or None, …]}; a bar marks the median."
    fig, ax = show.axes(figsize=(8.0, 2.8))
    for k, (colour, steps) in enumerate(zip(show.COLOURS, methods.values(), strict=False)):
        middle, never = schedules.median(steps)
        there = [s for s in steps if s is not None]
        ax.plot(there, [k] * len(there), "o", color=colour, alpha=0.5)
        ax.plot([middle] if middle else [], [k] if middle else [], "|", color="black", ms=22, mew=2)
        ax.annotate(
            f"{never} of {len(steps)} never", (1.01, k), xycoords=("axes fraction", "data"), va="center"
        )
    ax.set_yticks(range(len(methods)), methods)
    ax.set(xlabel="steps to the target (bar: the median)", ylim=(len(methods) - 0.5, -0.5), xlim=(0, None))
    return fig


def draw_trials(sides, chosen):
    """Median steps of the runs that arrive against the rate, a panel a side, a line a length.

    `sides` is {title: {(rate, length): [steps or None, …]}}. A hollow dot: some runs never arrive; a cross:
    none does. The ring marks the `chosen` trial of each side.
    """
    fig, axes = show.axes(1, 2, figsize=(9.6, 4.0), sharey=True)
    arrived = [s for trials in sides.values() for each in trials.values() for s in each if s is not None]
    top = 1.6 * max(arrived)
    for ax, (title, trials) in zip(axes, sides.items(), strict=True):
        lengths = sorted({length for _, length in trials})
        for i, (colour, length) in enumerate(zip(show.COLOURS, lengths, strict=False)):
            row = sorted((rate, *schedules.median(each)) for (rate, n), each in trials.items() if n == length)
            there = [(rate, middle) for rate, middle, _ in row if middle]
            ax.plot(
                *(zip(*there, strict=True) if there else ([], [])),
                color=colour,
                lw=1,
                label=f"{length} steps",
            )
            for rate, middle, never in row:
                fill = {"mfc": "white"} if never else {}
                at = middle or top * 1.06**i
                ax.plot([rate], [at], "o" if middle else "x", color=colour, ms=5, **fill)
        middle, _ = schedules.median(trials[chosen[title]])
        ax.plot([chosen[title][0]], [middle], "o", color="black", ms=13, mfc="none", label="chosen")
        ax.set(xscale="log", yscale="log", xlabel="learning rate, or its peak", title=title)
        rates = sorted({rate for rate, _ in trials})
        ax.set_xticks(rates, [f"{rate:.4g}" for rate in rates], fontsize=7)
        ax.xaxis.set_minor_formatter("")
        ax.legend(fontsize=8, loc="lower left", ncols=2)
    axes[0].set_ylabel("median steps to the target\n(hollow: some never; ×: none arrives)")
    axes[0].set_ylim(bottom=min(arrived) / 4)  # room for the legend
    axes[0].yaxis.get_major_locator().set_params(subs=[1, 2, 5])
    axes[0].yaxis.set_major_formatter("{x:,.0f}")
    axes[0].yaxis.set_minor_formatter("")
    return fig


def draw_race(sides, target, ratios, step_seconds):
    "Accuracy of every racing run, {title: {seed: curve}}, in steps and seconds; and the ratio of each pair."
    fig, (left, right) = show.axes(1, 2, figsize=(9.6, 3.6), width_ratios=(3, 2))
    for colour, (title, curves) in zip(show.COLOURS, sides.items(), strict=False):
        for k, curve in enumerate(curves.values()):
            there = [(s, v) for s, v in curve if v == v]
            if there:
                left.plot(
                    *zip(*there, strict=True),
                    color=colour,
                    lw=0.9,
                    alpha=0.7,
                    label=title if k == 0 else None,
                )
            at = schedules.reached(curve, target)
            if at is not None:
                left.plot([at], [dict(curve)[at]], "o", color=colour, ms=5)
    left.axhline(target, color=show.COLOURS[6], ls="--", lw=1)
    left.set(xscale="log", xlabel="step (log scale)", ylabel="validation accuracy", ylim=(0, 1.3 * target))
    seconds = left.secondary_xaxis("top", functions=(lambda s: s * step_seconds, lambda t: t / step_seconds))
    seconds.set_xlabel("seconds of training, one network alone", fontsize=8)
    left.legend(fontsize=8, loc="upper left")
    values = sorted(ratios.values())
    right.plot(values, range(len(values)), "o", color=show.COLOURS[2])
    right.axvline(1, color=show.COLOURS[6], lw=1, ls="--")
    right.set(xlabel="steps of constant / steps of one-cycle", ylabel="pair", xlim=(0, None))
    right.set_yticks(range(len(values)), [f"seed {s}" for s in sorted(ratios, key=ratios.get)], fontsize=7)
    return fig


def draw_settings(rows):
    "The ratio of the steps against the sharpness at the start: [(label, sharpness, ratios), …]."
    fig, ax = show.axes(figsize=(7.2, 4.0))
    for colour, (label, sharpness, ratios) in zip(show.COLOURS, rows, strict=False):
        values = sorted(ratios)
        ax.plot([sharpness] * len(values), values, "o", color=colour, ms=4, alpha=0.4)
        middle = (values[(len(values) - 1) // 2] + values[len(values) // 2]) / 2
        ax.plot([sharpness], [middle], "_", color=colour, ms=26, mew=2.5, label=f"{label}: {middle:.2g}")
    ax.axhline(1, color=show.COLOURS[6], ls="--", lw=1)
    ax.set(
        xscale="log", xlabel="sharpness at the start, median of five networks", ylabel="ratio of the steps"
    )
    ax.legend(fontsize=8, loc="upper left")
    return fig

"Figures of lesson market: forecasts, overlapping labels, scores, decay, latencies, batches. Plain data in."

import numpy as np

from course_lib.show import COLOURS, axes

BLUE, RED, GREEN, GREY = COLOURS[0], COLOURS[1], COLOURS[2], COLOURS[6]


def draw_forecasts(found):
    "{when: (forecasts, moves)}: a panel each."
    fig, panels = axes(1, len(found), figsize=(7.4, 3.4), sharex=True, sharey=True)
    for ax, (when, (forecast, move)) in zip(panels, found.items(), strict=True):
        ax.plot(forecast, move, ".", markersize=2, alpha=0.4, color=BLUE)
        ax.axhline(0, color=GREY, lw=0.8)
        ax.set(xlabel="forecast", title=f"{when}: correlation {np.corrcoef(forecast, move)[0, 1]:.2f}")
    panels[0].set_ylabel("move of the price in 50 steps")
    return fig


def draw_overlap(horizon):
    "The steps that two neighbours' labels share, and what purge and embargo keep apart."
    fig, (top, low) = axes(2, 1, figsize=(7.2, 3.8), height_ratios=(1, 1.3))
    for y, start in enumerate((0, 1)):
        top.barh(y, horizon, left=start, height=0.6, color=(BLUE, RED)[y])
        name = ("in the training set", "its neighbour, in the test set")[y]
        top.text(start + horizon / 2, y, name, ha="center", va="center", color="white", fontsize=9)
    top.set(
        yticks=[],
        xlabel="steps of two labels",
        xlim=(-2, horizon + 4),
        title="shuffled: 49 of 50 steps are shared",
    )
    parts = [("train", 0, 100, BLUE), ("purged", 100, 50, "#cccccc"), ("test", 150, 100, RED),
             ("labels\nend", 250, 50, "#e8b59a"), ("embargo", 300, 120, "#cccccc"),
             ("train", 420, 130, BLUE)]  # fmt: skip
    for name, start, width, colour in parts:
        low.barh(0, width, left=start, height=0.6, color=colour)
        low.text(start + width / 2, 0, name, ha="center", va="center", fontsize=9,
                 color="white" if colour in (BLUE, RED) else "black")  # fmt: skip
    low.set(
        yticks=[],
        ylim=(-0.7, 0.7),
        xlabel="time of forecast",
        title="what may be trained on, for one test period",
    )
    for ax in (top, low):
        ax.grid(False)
    return fig


def draw_scores(found):
    "{split: [IC of each series]}: a dot each, the mean with its 95 % interval."
    fig, ax = axes(figsize=(6.8, 0.55 * len(found) + 1.3))
    for y, ics in enumerate(found.values()):
        ax.plot(ics, np.full(len(ics), y), "o", color=BLUE, alpha=0.45, markersize=5)
        if len(ics) > 1:
            ax.errorbar(np.mean(ics), y + 0.22, xerr=1.96 * np.std(ics, ddof=1) / len(ics) ** 0.5, fmt="s",
                        color=RED, markersize=4, capsize=3)  # fmt: skip
    ax.axvline(0, color=GREY, lw=1)
    ax.set_yticks(range(len(found)), list(found))
    ax.set(xlabel="IC on a random walk (red: the mean and its 95 % interval)", ylim=(len(found) - 0.5, -0.6))
    return fig


def draw_decay(scores, age, life, low, high, block):
    "Mean IC by age and its 95 % interval over blocks of rows; curves of the half-life and its interval."
    fig, ax = axes(figsize=(6.8, 3.6))
    blocks = np.lib.stride_tricks.sliding_window_view(scores, block, axis=0).mean(-1)
    mean, error = scores.mean(0), blocks.std(0, ddof=1) * (block / len(scores)) ** 0.5
    ax.errorbar(age, mean, 1.96 * error, fmt="o", color=BLUE, ms=4, capsize=2, label="mean of all models")
    x = np.linspace(0, max(age) * 1.03, 200)

    def curve(half):
        shape = 0.5 ** (age / half)
        return (shape @ mean) / (shape @ shape) * 0.5 ** (x / half)

    ax.plot(x, curve(life), color=RED, label=f"half-life {life:,.0f} steps")
    ax.fill_between(x, *sorted((curve(low), curve(high)), key=lambda c: c[-1]), color=RED, alpha=0.15,
                    label=f"{low:,.0f} to {high:,.0f}")  # fmt: skip
    ax.axhline(0, color=GREY, lw=0.8)
    ax.set(xlabel="age of the model, steps since it was fitted", ylabel="IC")
    ax.legend(fontsize=9)
    return fig


def draw_tails(found):
    "{name: latencies in µs}: each percentile, with more room for the last ones."
    fig, ax = axes(figsize=(6.8, 3.4))
    for (name, latencies), style in zip(found.items(), ("-", "--"), strict=False):
        n = len(latencies)
        above = 1 - (np.arange(n) + 0.5) / n
        ax.plot(1 / above, np.sort(latencies), style, label=name, lw=2)
    ticks = (50, 90, 99, 99.9)
    ax.set(xscale="log", yscale="log", xlabel="percentile", ylabel="latency, µs")
    ax.set_xticks([100 / (100 - p) for p in ticks], [f"{p:g} %" for p in ticks])
    ax.minorticks_off()
    ax.legend()
    return fig


def draw_bars(found):
    "{net: {way: Timing}}: a panel each, medians in µs with their 20th and 80th percentiles."
    fig, panels = axes(1, len(found), figsize=(8.4, 0.36 * max(map(len, found.values())) + 1.3))
    for ax, (net, ways) in zip(np.atleast_1d(panels), found.items(), strict=True):
        median, low, high = 1e6 * np.transpose([timing[:3] for timing in ways.values()])
        colours = [RED if "launch" in way else BLUE for way in ways]
        ax.barh(list(ways), median, xerr=(median - low, high - median), color=colours,
                error_kw={"lw": 1, "capsize": 2})  # fmt: skip
        for y in range(len(ways)):
            ax.text(high[y], y, f"  {median[y]:.1f}", va="center", fontsize=9)
        ax.invert_yaxis()
        ax.grid(False)
        ax.set(xlim=(0, 1.25 * max(median)), xlabel="GPU time, µs", title=net)
    return fig


def draw_percentiles(found):
    "{net: {way: [(p50, p99) of each round]}}: from p50 to p99, in a panel for each net."
    fig, panels = axes(1, len(found), figsize=(8.4, 0.4 * max(map(len, found.values())) + 1.5))
    for ax, (net, ways) in zip(np.atleast_1d(panels), found.items(), strict=True):
        for y, rounds in enumerate(ways.values()):
            p50, p99 = np.median(rounds, 0)
            ax.plot([p50, p99], [y, y], color=BLUE, lw=2)
            ax.plot(p50, y, "o", color=BLUE)
            ax.plot(p99, y, "|", color=RED, markersize=14, markeredgewidth=2)
            ax.annotate(
                f"{p50:.1f}", (p50, y), xytext=(0, 7), textcoords="offset points", ha="center", fontsize=8
            )
        ax.set_yticks(range(len(ways)), list(ways))
        every = np.median(list(ways.values()), 1)
        low, high = every.min() / 1.4, every.max() * 1.3
        ax.set(xscale="log", xlim=(low, high), ylim=(len(ways) - 0.5, -0.7), title=net,
               xlabel="µs, from p50 (dot) to p99 (red)")  # fmt: skip
        _ticks(ax.xaxis, low, high)
    return fig


def _ticks(axis, low, high):
    "Ticks of a logarithmic axis at 1, 2 and 5, written out."
    ticks = [t * 10.0**k for k in range(-6, 7) for t in (1, 2, 5) if low <= t * 10.0**k <= high]
    axis.set_ticks(ticks, [f"{t:,g}" for t in ticks])
    axis.set_ticks([], minor=True)


def draw_curve(found):
    "{device: {batch: µs}}: latency of a batch against requests answered in a µs."
    fig, ax = axes(figsize=(6.8, 3.6))
    slowest = max(costs[min(costs)] for costs in found.values())
    for k, (name, costs) in enumerate(found.items()):
        rate, us = [n / c for n, c in costs.items()], list(costs.values())
        ax.plot(rate, us, "o-", color=COLOURS[k], label=name, markersize=4)
        for n in (min(costs), max(costs)):
            above = n > min(costs) or costs[n] == slowest  # two labels of a single request would overlap
            ax.annotate(f"batch {n:,}", (n / costs[n], costs[n]), xytext=(0, 6 if above else -14),
                        textcoords="offset points", fontsize=8,
                        ha="center" if n > min(costs) else "right")  # fmt: skip
    ax.set(xscale="log", yscale="log", xlabel="throughput, requests a µs", ylabel="latency of a batch, µs")
    ax.margins(0.12, 0.18)
    _ticks(ax.xaxis, *ax.get_xlim())
    _ticks(ax.yaxis, *ax.get_ylim())
    ax.legend()
    return fig


def view_queue(found):
    "The explorer's figure: the first requests, and the latencies of all."
    fig, (left, right) = axes(1, 2, figsize=(8.4, 3.3))
    shown = slice(0, 40)
    arrivals, latencies = np.array(found["arrivals"]), np.array(found["latencies"])
    ends = arrivals + latencies
    late = latencies > found["deadline"]
    left.hlines(np.arange(40), arrivals[shown], ends[shown], colors=np.where(late, RED, BLUE)[shown], lw=2)
    left.set(xlabel="time, µs", ylabel="request", title="the first 40 requests, arrival to answer")
    left.invert_yaxis()
    right.hist(np.minimum(latencies, 3 * found["deadline"]), bins=np.linspace(0, 3 * found["deadline"], 40))
    right.axvline(found["deadline"], color=RED, ls="--", lw=1)
    right.set(xlabel="latency, µs (dashed: the deadline; right edge: or more)", ylabel="requests")
    p50, p99 = np.percentile(latencies, (50, 99))
    right.set_title(f"p50 {p50:,.0f} µs, p99 {p99:,.0f} µs, {found['late']:.1%} late")
    return fig

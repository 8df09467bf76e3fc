"The figures of determinism: functions of plain data that return a matplotlib figure."

import statistics
import textwrap

from course_lib import recorded, show
from course_lib.determinism import ROUNDOFF

BLUE, ORANGE, GREEN, GREY = show.COLOURS[0], show.COLOURS[1], show.COLOURS[2], show.COLOURS[6]


def draw_orders(by_method, exact, ulp):
    "{method: its sums of the same numbers in many orders} by their distance from the exact sum, in ulp."
    n = len(by_method)
    fig, panels = show.axes(n, 1, figsize=(6.4, 1.2 + 1.3 * n), sharex=True, squeeze=False)
    apart = {name: (sums.double() - exact) / ulp for name, sums in by_method.items()}
    reach = 1.15 * max(a.abs().max().item() for a in apart.values())
    for ax, (name, a) in zip(panels[:, 0], apart.items(), strict=True):
        ax.hist(a.numpy(), bins=61, range=(-reach, reach), color=BLUE)  # an odd number: 0 lies inside a bin
        ax.axvline(0, color=ORANGE, lw=1)
        many = len(by_method[name].unique())
        title = f"{name}: {many} different sum{'s' * (many > 1)} in {len(a)} orders"
        ax.set(ylabel="orders", title=title)
    ax.set_xlabel("sum minus the exact sum, in ulp (orange line: exact)")
    return fig


def draw_additions():
    "Three ways to add eight numbers: a chain, a tree, and atomics, whose order is that of arrival."
    fig, axes = show.axes(1, 3, figsize=(7.6, 3.0))
    for ax, title in zip(axes, ("a loop: a chain", "sum: a tree", "atomics: a queue"), strict=True):
        ax.set_title(title)
        ax.axis("off")

    def node(ax, x, y, text, colour=BLUE):
        ax.plot(x, y, "o", ms=15, mfc="white", mec=colour, zorder=3)
        ax.text(x, y, text, ha="center", va="center", fontsize=8, zorder=4)

    def level(ax, at, height, text):
        for (x, y), (x2, y2) in zip(at[::2], at[1::2], strict=True):
            middle = (x + x2) / 2
            ax.plot([x, middle, x2], [y, height, y2], color=GREY, lw=1)
            node(ax, middle, height, text)
        return [((a[0] + b[0]) / 2, height) for a, b in zip(at[::2], at[1::2], strict=True)]

    for i in range(8):
        node(axes[0], i, 0, f"$x_{i + 1}$", GREY)
        node(axes[1], i, 0, f"$x_{i + 1}$", GREY)
    for i in range(1, 8):
        axes[0].plot([i, i, max(i - 1, 0.0)], [0, i, (i - 1) if i > 1 else 0], color=GREY, lw=1)
        node(axes[0], i, i, "+")
    row = [(i, 0) for i in range(8)]
    for height in (2.2, 4.4, 6.6):
        row = level(axes[1], row, height, "+")
    for y, (thread, place) in enumerate(((3, 1), (1, 2), (7, 3), (2, 4), (8, 5), (5, 6), (4, 7), (6, 8))):
        axes[2].annotate(
            "", (5.6, 3.5), (1.2, 7 - y), arrowprops={"arrowstyle": "->", "color": GREY, "lw": 0.7}
        )
        node(axes[2], 0.7, 7 - y, f"$x_{thread}$", ORANGE)
        axes[2].text(-0.3, 7 - y, f"{place}.", ha="right", va="center", fontsize=8)
    axes[2].text(6.4, 3.5, "+\none place\nin memory", ha="center", va="center", fontsize=8,
                 bbox={"boxstyle": "round", "fc": "white", "ec": BLUE})  # fmt: skip
    for ax, note in zip(
        axes, ("the order is fixed", "the order is fixed", "the order of arrival"), strict=True
    ):
        ax.set(xlim=(-1, 8), ylim=(-1.6, 7.6))
        ax.text(3.5, -1.5, note, ha="center", fontsize=9)
    return fig


def draw_errors(data):
    "The explorer of sums: for each method the median error of the draws, and the band from least to largest."
    fig, ax = show.axes()
    n, roundoff = data["n"], ROUNDOFF[data["dtype"]]
    for name, e in data["errors"].items():
        e = e.clamp(min=roundoff / 100)  # an exact sum has no place on a logarithmic axis
        (line,) = ax.plot(n, e.median(1).values, label=name)
        ax.fill_between(n, e.min(1).values, e.max(1).values, color=line.get_color(), alpha=0.15, lw=0)
    bound = 2 * roundoff
    ax.axhline(bound, color=GREY, ls=":", lw=1)
    ax.annotate("2u", (1, bound), (-4, 3), xycoords=("axes fraction", "data"), textcoords="offset points",
                fontsize=8, ha="right")  # fmt: skip
    ax.set(yscale="log", xlabel="numbers added", ylabel="error / sum of magnitudes", title=data["title"])
    ax.set_xscale("log", base=2)
    ax.legend(loc="upper left", fontsize=9)
    return fig


def draw_losses(runs):
    "{name: (losses, weights, …)} of two runs, step by step, and below how far they are apart."
    fig, (top, low) = show.axes(2, 1, figsize=(6.4, 4.8), sharex=True, height_ratios=(1, 1))
    for (name, (losses, *_)), style in zip(runs.items(), ("-", "--"), strict=True):
        top.plot(losses, style, label=name, lw=1)
    top.set(ylabel="loss", title="one seed, two numbers of threads")
    top.legend(loc="lower left")
    (losses, weights, *_), (losses2, weights2, *_) = runs.values()
    apart = {"a weight, at most": (weights - weights2).abs().amax(1), "the loss": (losses - losses2).abs()}
    for (name, difference), colour in zip(apart.items(), (ORANGE, GREY), strict=True):
        first = next(iter(difference.nonzero().flatten().tolist()), "none")
        label = f"{name} (first at step {first})"
        low.semilogy(difference.double().clamp(min=1e-11), ".-", color=colour, lw=1, ms=3, label=label)
    low.set(xlabel="step", ylabel="difference", ylim=(5e-12, 1e3))
    low.set_yticks([1e-11, 1e-9, 1e-6, 1e-3, 1], ["0", "$10^{-9}$", "$10^{-6}$", "$10^{-3}$", "1"])
    low.legend(loc="upper left", fontsize=8)
    return fig


def draw_numbers(panels, batch, workers=2):
    "{title: runs of an epoch, each [(index, number), …] in loading order}, coloured by the worker that drew."
    fig, axes = show.axes(1, len(panels), figsize=(1.4 + 2.9 * len(panels), 2.9), sharey=True, squeeze=False)
    for ax, (title, runs) in zip(axes[0], panels.items(), strict=True):
        for worker in range(workers):
            mine = [i for i in range(len(runs[0])) if i // batch % workers == worker]
            colour = show.COLOURS[worker]
            ax.plot(mine, [runs[0][i][1] for i in mine], "o", ms=4, color=colour, label=f"worker {worker}")
            for again in runs[1:]:
                ax.plot(mine, [again[i][1] for i in mine], "o", ms=9, mfc="none", mec=colour)
        ax.set(xlabel="item, in loading order", title=title, ylim=(-0.05, 1.05))
        ax.xaxis.get_major_locator().set_params(integer=True)
    axes[0][0].set_ylabel("number drawn")
    fig.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=workers, fontsize=9)
    return fig


def recorded_prices():
    "The recorded prices as {operator: (different answers of ten, cost or None)}; {} before a recording."
    found = {}
    for f in recorded.figures("determinism"):
        if f["name"].startswith("determinism.answers."):
            name = f["name"].removeprefix("determinism.answers.")
            cost = recorded.get(f"determinism.cost.{name}")
            found[name.replace("_", " ")] = int(f["value"]), cost and cost["value"]
    return found


def draw_prices(prices, where):
    "{operator: (different answers of ten, cost or None: it raises)} as bars, most expensive first."
    priced = sorted((kv for kv in prices.items() if kv[1][1]), key=lambda kv: kv[1][1])
    fig, ax = show.axes(figsize=(6.4, 0.27 * len(priced) + 1.8))
    colours = [ORANGE if many > 1 else BLUE for _, (many, _) in priced]
    bars = ax.barh([name for name, _ in priced], [cost for _, (_, cost) in priced], color=colours)
    ax.bar_label(
        bars,
        [f"{cost:.2f}×" if cost < 2 else f"{cost:.2g}×" for _, (_, cost) in priced],
        padding=3,
        fontsize=8,
    )
    ax.axvline(1, color=GREY, lw=1)
    high = max((cost for _, (_, cost) in priced), default=1)
    ax.set(xscale="log", xlim=(None, high * 4), xlabel="time, deterministic / default", title=where)
    ax.xaxis.set_major_formatter("{x:g}×")
    ax.plot([], [], "s", color=ORANGE, label="several answers in ten runs")
    ax.plot([], [], "s", color=BLUE, label="one answer in ten runs")
    ax.legend(loc="lower right", fontsize=9)
    if raising := [name for name, (_, cost) in prices.items() if cost is None]:
        text = textwrap.fill("raise an error in deterministic mode: " + ", ".join(raising), 80)
        fig.supxlabel(text, fontsize=9)
    return fig


def recorded_steps():
    "The recorded prices of a step as {network: (least, median, largest)}; {} before a recording."
    found = {}
    for f in recorded.figures("determinism"):
        if f["name"].startswith("determinism.step_cost."):
            parts = (f["name"].replace("cost.", f"{part}.") for part in ("cost_low", "cost", "cost_high"))
            found[f["name"].rpartition(".")[2]] = [recorded.get(name)["value"] for name in parts]
    return found


def draw_steps(costs, where):
    "{network: the prices of its step in several rounds}: the median as a dot, the range as a line."
    fig, ax = show.axes(figsize=(6.4, 0.4 * len(costs) + 1.2))
    for y, rounds in enumerate(costs.values()):
        ax.plot([min(rounds), max(rounds)], [y, y], color=BLUE, lw=2)
        ax.plot(middle := statistics.median(rounds), y, "o", color=BLUE)
        ax.annotate(
            f"{middle:.2f}×", (middle, y), (0, 7), textcoords="offset points", fontsize=8, ha="center"
        )
    ax.axvline(1, color=GREY, lw=1)
    ax.set_yticks(range(len(costs)), [name.replace("_", " ") for name in costs])
    ax.set(xlabel="time of a whole step, in the block / default", title=where, ylim=(len(costs) - 0.5, -0.7))
    ax.xaxis.set_major_formatter("{x:g}×")
    return fig


def draw_three_ways(runs):
    "{way: [(loss, seconds), …]} with one entry a round: losses, and each round's speed against `alone`."
    fig, (left, right) = show.axes(1, 2, figsize=(8.4, 3.2))
    base, alone = runs["alone"][0][0], [seconds for _, seconds in runs["alone"]]
    for i, rounds in enumerate(runs.values()):
        x = [i + 0.25 * (k / max(len(rounds) - 1, 1) - 0.5) for k in range(len(rounds))]
        speed = [first / seconds for first, (_, seconds) in zip(alone, rounds, strict=True)]
        for ax, values in ((left, [100 * (loss / base - 1) for loss, _ in rounds]), (right, speed)):
            ax.plot(x, values, "o", color=show.COLOURS[i], alpha=0.7)
    left.set(title="training loss of each run", ylabel="% above alone's")
    right.set(title="speed of each round", ylabel="times as fast as alone")
    for ax, even in ((left, 0), (right, 1)):
        ax.set_xticks(range(len(runs)), list(runs), fontsize=9)
        ax.set_xlim(-0.5, len(runs) - 0.5)
        ax.axhline(even, color=GREY, lw=1)
    right.set_ylim(0, 1.1 * right.get_ylim()[1])
    return fig

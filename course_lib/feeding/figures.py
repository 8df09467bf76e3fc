"Figures of lesson feeding: slots with text and without, rows that are packed, masks, waiting, rates."

import numpy as np

from course_lib.show import COLOURS, axes


def draw_rows(rows, context, title=""):
    "Rows of documents, each a list of lengths: text in colours, padding empty, up to `context` slots."
    fig, axs = axes(figsize=(6.8, 0.09 * len(rows) + 1.4))
    for y, lengths in enumerate(rows):
        axs.barh(y, context, height=0.8, color="#dddddd")
        left = 0
        for k, n in enumerate(lengths):
            axs.barh(y, n, left=left, height=0.8, color=COLOURS[k % 6], edgecolor="white", linewidth=0.4)
            left += n
    several = any(len(row) > 1 for row in rows)
    axs.barh(0, 0, color=COLOURS[0], label="text, a colour for each document" if several else "text")
    axs.barh(0, 0, color="#dddddd", label="padding")
    axs.set(xlabel="slots", ylabel="row", xlim=(0, context), title=title)
    axs.invert_yaxis()
    axs.grid(False)
    axs.legend(fontsize=8, loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
    return fig


def draw_lengths(lengths, context):
    "How long documents are, and which share of all text lies in longer ones."
    fig, (left, right) = axes(1, 2, figsize=(7.6, 3))
    left.hist(lengths, bins=np.geomspace(16, max(lengths), 30))
    left.axvline(context, color="#555555", linestyle="--", linewidth=1)
    left.set(xscale="log", xlabel="tokens of a document (dashed: the context)", ylabel="documents")
    order = np.sort(lengths)[::-1]
    right.plot(100 * np.arange(1, len(order) + 1) / len(order), 100 * np.cumsum(order) / order.sum())
    right.set(xlabel="% of the documents, longest first", ylabel="% of the text in them", ylim=(0, 102))
    return fig


def draw_mask(mask, document):
    "A mask [T, T] with the documents' borders."
    fig, ax = axes(figsize=(3.8, 3.8))
    ax.imshow(np.where(np.asarray(mask), 0.25, 1.0), cmap="gray", vmin=0, vmax=1)
    for border in np.flatnonzero(np.diff(np.asarray(document))) + 0.5:
        ax.axvline(border, color=COLOURS[1], linewidth=0.8)
        ax.axhline(border, color=COLOURS[1], linewidth=0.8)
    ax.set(xlabel="key: the token that is seen", ylabel="query: the token that sees")
    ax.grid(False)
    return fig


def view_batches(found):
    "The explorer's figure: the batches of an epoch by their padded length."
    fig, ax = axes()
    lengths = sorted((longest for _, longest in found["slots"]), reverse=True)
    ax.bar(range(len(lengths)), lengths, width=1.0)
    ax.set(xlabel="batches of an epoch, longest first", ylabel="padded length, tokens")
    shapes = f"{found['shapes']} padded length{'s' * (found['shapes'] > 1)}"
    ax.set_title(f"{100 * found['waste']:.0f} % padding · {shapes} · "
                 f"{100 * found['between']:.0f} % of the variance between batches")  # fmt: skip
    return fig


def draw_gains(gains, unit):
    "Paired differences by arm: {label: [difference of each seed]}, with their mean."
    fig, ax = axes(figsize=(6.6, 0.6 * len(gains) + 1.2))
    for y, (label, found) in enumerate(gains.items()):
        ax.plot(found, [y] * len(found), "o", color=COLOURS[y], alpha=0.6, markersize=5)
        ax.plot(sum(found) / len(found), y, "|", color=COLOURS[y], markersize=22, markeredgewidth=2)
        ax.text(0.01, y - 0.33, label, transform=ax.get_yaxis_transform(), fontsize=8)
    ax.axvline(0, color="#555555", linewidth=1)
    ax.set(xlabel=unit, ylim=(len(gains) - 0.5, -0.9), yticks=[])
    return fig


def draw_waiting(found):
    "The share of time at the barrier by the number of ranks: {label: {ranks: share}}."
    fig, ax = axes()
    for (label, by_ranks), style in zip(found.items(), ("o-", "s-", "^-"), strict=False):
        ax.plot(list(by_ranks), [100 * s for s in by_ranks.values()], style, label=label, markersize=4)
    ax.set_xscale("log", base=2)
    ticks = list(next(iter(found.values())))
    ax.set_xticks(ticks, ticks)
    ax.minorticks_off()
    ax.set(xlabel="ranks", ylabel="waiting, % of all ranks' time", ylim=(0, None))
    ax.legend(fontsize=8)
    return fig


def draw_bars(found, unit):
    "Pairs of bars: {label: {part: value}}, all in one unit."
    parts = list(next(iter(found.values())))
    fig, ax = axes(figsize=(6.8, 0.34 * len(found) * len(parts) + 1.1))
    top = max(v for values in found.values() for v in values.values())
    for y, values in enumerate(found.values()):
        for k, (part, value) in enumerate(values.items()):
            at = y + (k - (len(parts) - 1) / 2) * 0.36
            ax.barh(at, value, height=0.34, color=COLOURS[k], label=part if y == 0 else None)
            ax.annotate(f"{value:.3g}", (value, at), xytext=(4, 0), textcoords="offset points",
                        va="center", fontsize=8)  # fmt: skip
    ax.set_yticks(range(len(found)), list(found))
    ax.invert_yaxis()
    ax.set(xlabel=unit, xlim=(0, 1.15 * top))
    ax.legend(fontsize=8, loc="lower right", bbox_to_anchor=(1, 1), ncols=2)  # above: it hides no value
    return fig


def draw_race(rates, bound):
    "Text tokens a second by way, {way: [of each round]}, with their range; dashed: what the bound promises."
    fig, ax = axes(figsize=(6.8, 0.42 * len(rates) + 1.2))
    for y, (way, several) in enumerate(rates.items()):
        ax.barh(y, np.median(several) / 1e3, height=0.6, color=COLOURS[way.startswith("packed")])
        ax.plot([min(several) / 1e3, max(several) / 1e3], [y, y], color="black", linewidth=1.5)
    ax.axvline(bound / 1e3, color="#555555", linestyle="--", linewidth=1)
    ax.annotate("the bound", (bound / 1e3, -0.5), xytext=(-4, 3), textcoords="offset points", ha="right",
                fontsize=8)  # fmt: skip
    ax.set_yticks(range(len(rates)), list(rates))
    ax.set(xlabel="thousand text tokens a second (line: the rounds)", ylim=(len(rates) - 0.5, -1))
    ax.grid(axis="y", visible=False)
    return fig


def draw_parts(found):
    "Steps, clock and power by way: {way: [(ms, MHz, W, W allowed, reason) of each round]}."
    fig, axs = axes(1, 3, figsize=(9.2, 0.3 * len(found) + 1.3), sharey=True)
    labels = "ms a step", "clock, MHz", "power, W (dashed: allowed)"
    for k, (ax, label) in enumerate(zip(axs, labels, strict=True)):
        for y, several in enumerate(found.values()):
            values = [row[k] for row in several]
            ax.plot(values, [y] * len(values), "o", color=COLOURS[k], alpha=0.5, markersize=5)
            ax.plot(np.median(values), y, "|", color=COLOURS[k], markersize=14, markeredgewidth=2)
        ax.set(xlabel=label)
        ax.locator_params(axis="x", nbins=5)
    axs[2].axvline(next(iter(found.values()))[0][3], color="#555555", linestyle="--", linewidth=1)
    axs[0].set_yticks(range(len(found)), list(found))
    axs[0].set_ylim(len(found) - 0.5, -0.5)
    return fig

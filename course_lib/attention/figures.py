"The figures of lesson attention: functions of plain data that return a matplotlib figure."

import math

from course_lib import show
from course_lib.attention import PUBLISHED, count

BLUE, RED, GREEN, GREY = show.COLOURS[0], show.COLOURS[1], show.COLOURS[2], show.COLOURS[6]
KIND = {"free": BLUE, "edge": show.COLOURS[5], "empty": "white"}


def draw_weights(weights):
    "Weights [rows, keys] of {way: tensor}, side by side; NaN is red."
    fig, axes = show.axes(1, len(weights), figsize=(7.2, 2.6), sharey=True)
    for ax, (way, p) in zip(axes, weights.items(), strict=True):
        for row in range(p.shape[0]):
            for key in range(p.shape[1]):
                value = p[row, key].item()
                nan = math.isnan(value)
                colour = RED if nan else (*_rgb(BLUE), 0.1 + 0.9 * value)
                ax.add_patch(_box(key, row, fc=colour, ec="#cccccc"))
                ax.text(key + 0.5, row + 0.5, "NaN" if nan else f"{value:.2f}", ha="center", va="center",
                        fontsize=7.5, color="white" if nan or value > 0.5 else "black")  # fmt: skip
        ax.set(xlim=(0, p.shape[1]), ylim=(p.shape[0], 0), xlabel="key", xticks=[], title=way)
        ax.set_yticks([r + 0.5 for r in range(p.shape[0])], ["query 0", "1", "2", "padded"])
        ax.grid(False)
    return fig


def _rgb(colour):
    return tuple(int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))


def _box(x, y, **how):
    from matplotlib.patches import Rectangle

    return Rectangle((x + 0.03, y + 0.03), 0.94, 0.94, lw=0.6, **how)


def draw_held(held):
    "Bytes by length, log-log, of {label: {n: bytes}}."
    fig, ax = show.axes(figsize=(6.4, 3.4))
    for (label, line), colour in zip(held.items(), (BLUE, RED, GREY), strict=True):
        ax.loglog(list(line), [b / 1e6 for b in line.values()], "o-", color=colour, label=label, base=2)
    ax.set(xlabel="length n", ylabel="MB at the peak", title="Memory of attention beside its inputs, d = 64")
    ax.set_xticks(list(line), [f"{n:,}" for n in line])
    ax.set_yscale("log")
    ax.legend()
    return fig


def view_blocks(data):
    "The blocks of a score matrix by kind, queries downwards."
    n, rows, keys, kinds = data["n"], data["rows"], data["keys"], data["blocks"]
    fig, ax = show.axes(figsize=(5.2, 4.6))
    from matplotlib.patches import Patch, Rectangle

    for i, line in enumerate(kinds):
        for j, kind in enumerate(line):
            ax.add_patch(Rectangle((j * keys, i * rows), keys, rows, fc=KIND[kind], ec="#999999", lw=0.5))
    if data["causal"]:
        ax.plot([0, n], [0, n], color=RED, lw=1)
    wide, high = len(kinds[0]) * keys, len(kinds) * rows
    ax.set(xlim=(0, wide), ylim=(high, 0), xlabel="key", ylabel="query")
    found = count(data)
    ax.legend(handles=[Patch(fc=KIND[k], ec="#999999", label=f"{k}: {m}") for k, m in found.items()],
              loc="upper left", bbox_to_anchor=(1.01, 1))  # fmt: skip
    visited = (found["free"] + found["edge"]) / sum(found.values())
    ax.set_title(f"n = {n}, blocks of {rows} × {keys}: {visited:.0%} of the blocks visited")
    ax.grid(False)
    return fig


def draw_race(rates):
    "TFLOP/s by length of {n: {contender: (median, low, high)}}, and the published ladder at the right."
    fig, (ax, ladder) = show.axes(1, 2, figsize=(9.6, 3.8), width_ratios=(1.7, 1), sharey=True)
    lengths = list(rates)
    for name, colour in zip(rates[lengths[0]], show.COLOURS, strict=False):
        line = [rates[n][name] for n in lengths]
        spread = [[m - low for m, low, _ in line], [high - m for m, _, high in line]]
        style = {"lw": 2.4} if name.startswith("yours") else {"lw": 1.4}
        ax.errorbar(
            lengths, [m for m, *_ in line], spread, fmt="o-", color=colour, label=name, capsize=2, **style
        )
    ax.set_xscale("log", base=2)
    ax.set_xticks(lengths, [f"{n:,}" for n in lengths])
    ax.set(xlabel="length n", ylabel="TFLOP/s", ylim=(0, None), title="Here: causal, forward, bf16, d = 128")
    ax.legend(fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    ladder.bar(range(len(PUBLISHED)), list(PUBLISHED.values()), color=GREY)
    for x, value in enumerate(PUBLISHED.values()):
        ladder.text(x, value + 8, str(value), ha="center", fontsize=8)
    ladder.set_xticks(range(len(PUBLISHED)), list(PUBLISHED), rotation=35, ha="right", fontsize=8)
    ladder.set_title("Published: H100, fp16, not causal", fontsize=10)
    return fig


def draw_powers(found):
    "Exponents that should be 0, by the size of the scores: {power: (largest exponent, rows with NaN)}."
    fig, ax = show.axes(figsize=(6.8, 3.4))
    powers = list(found)
    ax.semilogy(powers, [max(error, 1e-8) for error, _ in found.values()], "o", color=GREY, ms=4)
    nan = [p for p, (_, rows) in found.items() if rows]
    ax.semilogy(nan, [found[p][0] for p in nan], "o", color=RED, ms=5, label="some row is NaN")
    ax.axhline(128, color=BLUE, ls="--", lw=1)
    ax.text(
        powers[-1], 10, "from 128 on 2ˣ is infinite in fp32", color=BLUE, fontsize=9, ha="right", va="top"
    )
    ax.set(xlabel="scores of −10 to this power", ylabel="|exponent| of the largest score",
           title="With an FMA: an exponent that should be 0")  # fmt: skip
    ax.legend(loc="lower right")
    return fig


def draw_masks(masks):
    "Block masks {name: BlockMask}: free blocks black, edge blocks grey, with the share computed."
    fig, axes = show.axes(1, len(masks), figsize=(1.45 * len(masks), 2.1))
    for ax, (name, mask) in zip(axes, masks.items(), strict=True):
        some = _dense(mask.kv_num_blocks, mask.kv_indices)
        whole = _dense(mask.full_kv_num_blocks, mask.full_kv_indices)
        ax.imshow(some * 0.35 + whole, cmap="Greys", vmin=0, vmax=1, interpolation="nearest")
        ax.set(xticks=[], yticks=[])
        ax.set_title(f"{name}\n{(some + whole).mean():.0%}", fontsize=9, loc="center")
        ax.grid(False)
        ax.spines[:].set_visible(True)
    axes[0].set_ylabel("query")
    axes[len(masks) // 2].set_xlabel("key; % of blocks that are computed, 2,048 tokens")
    return fig


def _dense(numbers, indices):
    import numpy

    numbers, indices = numbers[0, 0].tolist(), indices[0, 0].tolist()
    out = numpy.zeros((len(numbers), len(indices[0])))
    for row, (n, line) in enumerate(zip(numbers, indices, strict=True)):
        out[row, line[:n]] = 1
    return out

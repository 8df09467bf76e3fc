"Figures of lesson recompute: memory over a step, segments, the frontier, the chain."

from course_lib.recompute import WORDS, unbeaten
from course_lib.show import COLOURS, axes


def draw_memory(runs, limit):
    "Bytes alive after each operator: {label: meter.Memory}. The highest point is named; dashed: `limit`."
    fig, ax = axes()
    for (label, memory), colour in zip(runs.items(), COLOURS, strict=False):
        sizes = [size / 1e6 for _, size in memory.line]
        at = max(range(len(sizes)), key=sizes.__getitem__)
        ax.plot(sizes, color=colour, label=label)
        ax.axvline(memory.marks[0][0], color=colour, linestyle=":", linewidth=1)
        ax.plot(at, sizes[at], "o", color=colour, markersize=4)
        ax.annotate(f"{sizes[at]:.1f} MB, in {memory.line[at][0].strip('_')}", (at, sizes[at]), xytext=(6, 3),
                    textcoords="offset points", fontsize=8)  # fmt: skip
    ax.axhline(limit / 1e6, color="#555555", linestyle="--", linewidth=1)
    ax.annotate("limit", (0, limit / 1e6), xytext=(0, 3), textcoords="offset points", fontsize=8)
    ax.set(xlabel="operators of the step, in order (dotted: the backward pass begins)", ylabel="memory, MB",
           ylim=(0, 1.15 * max(memory.peak for memory in runs.values()) / 1e6))  # fmt: skip
    if len(runs) > 1:
        ax.legend(fontsize=8, loc="upper right")
    return fig


def draw_segments(peaks, formula):
    "The peak by the length of a segment: counted, {segment: bytes}, and by the formula, a list."
    fig, ax = axes()
    ax.plot(list(peaks), [p / 1e6 for p in peaks.values()], "o-", label="counted")
    ax.plot(list(peaks), [p / 1e6 for p in formula], "--", label="(n / s) · input + s · values")
    ax.set_xscale("log", base=2)
    ax.set_xticks(list(peaks), list(peaks))
    ax.minorticks_off()
    ax.set(xlabel="blocks in a segment, s", ylabel="peak of the step, MB", ylim=(0, None))
    ax.legend(fontsize=8)
    return fig


def view_segments(peaks):
    "The explorer's figure: {segment: memory in units of a block's input}."
    fig, ax = axes()
    best = min(peaks, key=peaks.get)
    ax.plot(list(peaks), list(peaks.values()), "o-", markersize=3)
    ax.plot(best, peaks[best], "s", color=COLOURS[1], label=f"lowest: {peaks[best]:g}, segments of {best}")
    ticks = [2**k for k in range(8) if 2**k <= max(peaks)]
    ax.set_xscale("log", base=2)
    ax.set_xticks(ticks, ticks)
    ax.set(xlabel="blocks in a segment", ylabel="highest memory, in block inputs", ylim=(0, None))
    ax.legend(fontsize=8)
    return fig


def draw_frontier(points):
    "Memory against time: {(mode, way): (bytes, low, median, high)} of seconds. Filled: on the frontier."
    fig, ax = axes(figsize=(6.8, 4.4))
    best = unbeaten(points)
    for mode, colour, marker in (("eager", COLOURS[1], "s"), ("compiled", COLOURS[0], "o")):
        mine = {way: p for (m, way), p in points.items() if m == mode}
        for way, (size, low, median, high) in mine.items():
            filled = colour if (mode, way) in best else "white"
            ax.plot([size / 1e9] * 2, [1e3 * low, 1e3 * high], color=colour, linewidth=1)
            ax.plot(size / 1e9, 1e3 * median, marker, color=colour, markerfacecolor=filled, markersize=6)
            above = mode == "eager"  # the label of a compiled way is beside it
            side = {"again": "right", "yours_12": "left"}.get(way, "center" if above else "left")
            word = WORDS[way].removeprefix("your ").replace("block again", "block\nagain")
            ax.annotate(word, (size / 1e9, 1e3 * (high if above else median)), textcoords="offset points",
                        xytext=(0, 6) if above else (-7 if side == "right" else 7, -3),
                        fontsize=8, color=colour, ha=side)  # fmt: skip
        if mine:
            ax.plot([], [], marker, color=colour, label=mode)
    ax.set(
        xlabel="peak of memory, GB",
        ylabel="forward and backward, ms (the axis doesn't begin at 0)",
        xlim=(0, 1.22 * max(size for size, *_ in points.values()) / 1e9),
        ylim=(
            930 * min(low for _, low, *_ in points.values()),
            1050 * max(high for *_, high in points.values()),
        ),
    )
    ax.legend(fontsize=8, loc="upper right", title="filled: on the frontier", title_fontsize=8)
    return fig


def draw_chain(ms):
    "Milliseconds of the ways, {mode: {way: ms}}."
    fig, ax = axes(figsize=(6.4, 2.8))
    ways, names = list(dict.fromkeys(way for found in ms.values() for way in found)), []
    for mode, found in ms.items():
        for way, value in found.items():
            ax.barh(len(names), value, color=COLOURS[ways.index(way)])
            ax.annotate(f"{value:.3g}", (value, len(names)), xytext=(4, 0), textcoords="offset points",
                        va="center", fontsize=8)  # fmt: skip
            names.append(f"{mode}, {way}")
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.set(xlabel="forward and backward, ms")
    ax.margins(x=0.12)
    return fig

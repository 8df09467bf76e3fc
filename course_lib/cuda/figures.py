"The figures of lesson cuda: functions of plain data that return a matplotlib figure."

from course_lib import show
from course_lib.triton import figures

BLUE, RED, GREY = show.COLOURS[0], show.COLOURS[1], show.COLOURS[6]


def draw_bars(rates, unit="TB/s", roof=None):
    "The bars of lesson triton; a short one has its number on its right."
    fig = figures.draw_bars(rates, unit, roof)
    ax = fig.axes[0]
    end = ax.get_xlim()[1]
    for text, (median, _, high) in zip(ax.texts, rates.values(), strict=False):  # the roof's text is the last
        if median < 0.13 * end:
            text.set(x=high + 0.012 * end, color="black")
    return fig


def draw_sectors(loads, side=64):
    "Matrices as {label: elements that a warp loads}: these dark, the rest of their sectors light."
    from matplotlib.patches import Rectangle

    fig, axes = show.axes(1, len(loads), figsize=(3.5 * len(loads), 3.5), squeeze=False)
    for ax, (label, elements) in zip(axes[0], loads.items(), strict=True):
        sectors = {e // 8 for e in elements}
        for s in sectors:
            ax.add_patch(Rectangle((s * 8 % side, s * 8 // side), 8, 1, fc="#9ecae9", lw=0))
        for e in elements:
            ax.add_patch(Rectangle((e % side, e // side), 1, 1, fc=BLUE, lw=0))
        for s in sectors:
            ax.add_patch(Rectangle((s * 8 % side, s * 8 // side), 8, 1, fc="none", ec="white", lw=1))
        ax.set(xlim=(0, 40), ylim=(32, 0), xlabel="column", ylabel="row")
        ax.set_xticks(range(0, 41, 8))
        ax.set_yticks(range(0, 33, 8))
        ax.set_title(
            f"{label}: {len(elements)} elements (dark)\nin {len(sectors)} sectors (framed)", fontsize=10
        )
    return fig


def view_schedule(data):
    "The warps of a scheduler over time: cycles in which one issues an instruction, and its waits for memory."
    warps = data["warps"]
    fig, ax = show.axes(figsize=(6.8, 1.2 + min(3.2, 0.22 * warps)))
    for kind, colour, height in (("waits", "#d9d9d9", 0.45), ("issues", BLUE, 0.85)):
        for w in range(warps):
            spans = [(start, end - start) for v, start, end, k in data["spans"] if v == w and k == kind]
            ax.broken_barh(spans, (w + 0.5 - height / 2, height), color=colour, lw=0)
    ax.set(xlim=(0, data["cycles"]), ylim=(warps, 0), xlabel="cycle", ylabel="warp")
    step = max(1, warps // 8)
    ax.set_yticks([w + 0.5 for w in range(0, warps, step)], range(0, warps, step))
    ax.grid(False)
    ax.set_title(
        f"blue: issues an instruction, grey: waits for memory\n"
        f"the scheduler is busy {data['busy']:.0%} after the first load has arrived"
    )
    return fig


def draw_warps(measured, predicted, roof):
    "TB/s by resident warps: {label: {warps: TB/s}} measured as points, predicted as lines up to the roof."
    fig, ax = show.axes(figsize=(6.8, 4.4))
    drawn = {}
    for colour, label in zip(show.COLOURS, measured, strict=False):
        line = tuple(predicted[label].items())
        same = f" (same line as {drawn[line]})" if line in drawn else ""
        ax.plot(list(measured[label]), list(measured[label].values()), "o", color=colour, label=label + same)
        if not same:
            ax.plot(list(predicted[label]), list(predicted[label].values()), "--", color=colour, lw=1)
        drawn.setdefault(line, label)
    ax.axhline(roof, color=GREY, lw=1)
    ax.text(64, roof, "datasheet", ha="right", va="bottom", fontsize=9, color=GREY)
    ax.set(xlim=(0, 66), ylim=(0, 1.12 * roof), xlabel="warps on each multiprocessor", ylabel="TB/s read")
    ax.set_xticks(range(0, 65, 8))
    ax.legend(title="points: measured; dashed: Little's law", loc="lower left", bbox_to_anchor=(0, 1.01))
    return fig


def draw_banks(widths=(32, 33)):
    "The banks of a tile's words by colour, for rows of each width, with the words of column 0 framed."
    from matplotlib.patches import Rectangle

    fig, axes = show.axes(1, len(widths), figsize=(3.6 * len(widths), 3.5))
    for ax, width in zip(axes, widths, strict=True):
        banks = [[(row * width + column) % 32 for column in range(width)] for row in range(32)]
        ax.imshow(banks, cmap="twilight", vmin=0, vmax=32)
        ax.add_patch(Rectangle((-0.5, -0.5), 1, 32, fc="none", ec=RED, lw=2, clip_on=False))
        ax.grid(False)
        ax.set(xlabel="word of the row", ylabel="row", xticks=[0, 8, 16, 24, 31], yticks=[0, 8, 16, 24, 31])
        found = len({row[0] for row in banks})
        ax.set_title(f"rows of {width} words: column 0\nlies in {found} bank{'s' * (found > 1)}", fontsize=10)
    return fig

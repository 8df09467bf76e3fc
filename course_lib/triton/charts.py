"The charts of lesson triton: bytes, rates, a roofline and a search. Plain data in, a matplotlib figure out."

from course_lib import machine, recorded, show

BLUE, RED, GREEN, PINK, AMBER, SKY, GREY = show.COLOURS


def draw_traffic(bars, unit="times the tensor"):
    "Stacked horizontal bars of {label: (read, written)}."
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(6.8, 1.2 + 0.36 * len(bars)))
    names = list(bars)
    read, written = ([bars[k][i] for k in names] for i in range(2))
    ax.barh(names, read, color=BLUE, label="read")
    ax.barh(names, written, left=read, color=AMBER, label="written")
    for row, (r, w) in enumerate(zip(read, written, strict=True)):
        ax.text(r + w, row, f" {r + w:.3g}", va="center")
    ax.invert_yaxis()
    ax.grid(False)
    ax.set(xlim=(0, 1.12 * max(r + w for r, w in bars.values())), xlabel=unit)
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    return fig


def _label(ax, value, row, top):
    "The value of a horizontal bar: within it, so that it doesn't meet the roof, or after a short one."
    inside = value > 0.2 * top
    place = {"ha": "right", "color": "white"} if inside else {"ha": "left"}
    ax.text(value, row, f"{value:.3g} " if inside else f" {value:.3g}", va="center", **place)


def draw_bars(rates, unit="TB/s", roof=None, roof_label="copy"):
    "Horizontal bars of {label: value}, each with its value; `roof` is a dashed line."
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(6.8, 1.1 + 0.34 * len(rates)))
    mine = [RED if k.startswith("Triton") else BLUE for k in rates]
    ax.barh(list(rates), list(rates.values()), color=mine)
    top = max([*rates.values(), roof or 0])
    for row, v in enumerate(rates.values()):
        _label(ax, v, row, top)
    if roof:
        ax.axvline(roof, color=GREY, ls="--", lw=1)
        ax.text(roof, -0.7, f"{roof_label} {roof:.3g}", ha="center", va="bottom", fontsize=9, color=GREY)
    ax.invert_yaxis()
    ax.grid(False)
    ax.set(xlim=(0, 1.08 * top), xlabel=unit)
    return fig


def draw_groups(groups, unit="TB/s", roof=None):
    "Grouped horizontal bars of {group: {label: value}}: the same labels in each group; `roof` a dashed line."
    import matplotlib.pyplot as plt

    labels = list(dict.fromkeys(k for bars in groups.values() for k in bars))
    height = 0.8 / len(labels)
    fig, ax = plt.subplots(figsize=(6.8, 1.2 + 0.3 * len(labels) * len(groups)))
    top = max([roof or 0, *(v for bars in groups.values() for v in bars.values())])
    for i, label in enumerate(labels):
        rows = [
            g + (i - (len(labels) - 1) / 2) * height
            for g, bars in enumerate(groups.values())
            if label in bars
        ]
        values = [bars[label] for bars in groups.values() if label in bars]
        ax.barh(rows, values, height=0.92 * height, color=show.COLOURS[i % 7], label=label)
        for y, v in zip(rows, values, strict=True):
            _label(ax, v, y, top)
    if roof:
        ax.axvline(roof, color=GREY, ls="--", lw=1, label="copy")
    ax.set_yticks(range(len(groups)), list(groups))
    ax.invert_yaxis()
    ax.grid(False)
    ax.set(xlim=(0, 1.12 * top), xlabel=unit)
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(labels) + bool(roof))
    return fig


def peaks():
    "(name, machine.Peaks) of this GPU; elsewhere of the one recorded in lesson roofline."
    return (machine.name(), machine.peaks()) if machine.has_gpu() else recorded.peaks()


def draw_roofline(name, peaks, points):
    """The roof of `peaks` (FLOP/s and bytes/s) and points (label, FLOP per byte, FLOP/s or None).

    A point without a rate lies on the roof and is hollow: a prediction. Labels are in a legend, since kernels
    bound by memory lie close together.
    """
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(6.8, 4.2))
    low, high = 2.0**-4, 2.0**13
    ridge = peaks.flops / peaks.bytes
    ax.loglog([low, ridge, high], [low * peaks.bytes, peaks.flops, peaks.flops], color=GREY)
    points = sorted(points, key=lambda point: point[1])
    for i, (label, x, y) in enumerate(points):
        rate = min(peaks.flops, x * peaks.bytes) if y is None else y
        colour = show.COLOURS[i % 6]
        face = "white" if y is None else colour
        shown = show.number(x)
        ax.plot(
            [x],
            [rate],
            "os^Dv<>p*h"[i % 10],
            mfc=face,
            mec=colour,
            ms=8,
            ls="none",
            label=f"{label}: {shown}",
        )
    ax.margins(y=0.1)
    ax.set(xlabel="arithmetic intensity, FLOP per byte", ylabel="FLOP/s", xlim=(low, high))
    ax.set_xticks([0.1, 1, 10, 100, 1000], ["0.1", "1", "10", "100", "1,000"])
    ax.set_title(f"{name}: ridge at {ridge:.3g} FLOP per byte")
    ax.legend(loc="lower right", fontsize=9)
    return fig


def draw_search(found, flops):
    """`triton_timing.search` drawn: TFLOP/s of the best number of warps for each tile, and all, ranked.

    `flops` is the work of one launch. A cross: none of them ran.
    """
    import matplotlib.pyplot as plt

    rates = {key: flops / seconds / 1e12 for key, seconds in found.items() if seconds}
    rows, columns = (sorted({key[i] for key in found}) for i in range(2))
    best = [
        [max((v for k, v in rates.items() if k[:2] == (r, c)), default=0.0) for c in columns] for r in rows
    ]
    fig, (ax, strip) = plt.subplots(1, 2, figsize=(7.4, 3.4), width_ratios=(1.2, 1))
    top = max(map(max, best)) or 1.0
    ax.imshow(best, cmap="Blues", origin="lower", aspect="auto", vmin=0, vmax=top)
    for y, line in enumerate(best):
        for x, v in enumerate(line):
            colour = "white" if v > 0.6 * top else "black"
            ax.text(x, y, f"{v:.0f}" if v else "×", ha="center", va="center", color=colour)
    ax.set_xticks(range(len(columns)), columns)
    ax.set_yticks(range(len(rows)), rows)
    ax.set(xlabel="BN", ylabel="BM")
    ax.set_title("the best of each, TFLOP/s")
    ax.grid(False)
    ranked = sorted(rates.values(), reverse=True)
    strip.plot(range(1, len(ranked) + 1), ranked, ".", color=BLUE)
    failed = len(found) - len(rates)
    strip.set(xlabel="configuration, best first", ylabel="TFLOP/s", ylim=(0, None))
    strip.set_title(f"{len(ranked)} timed" + (f", {failed} would not run" if failed else ""))
    return fig

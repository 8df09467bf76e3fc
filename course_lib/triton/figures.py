"The figures of lesson triton: functions of plain data that return a matplotlib figure."

from course_lib import show

BLUE, RED, GREY = show.COLOURS[0], show.COLOURS[1], show.COLOURS[6]


def draw_shares(shares):
    "Horizontal bars of {machine: % of the copy's rate}; the copy itself is the dashed line at 100 %."
    fig, ax = show.axes(figsize=(6.8, 1.3 + 0.4 * len(shares)))
    ax.barh(list(shares), list(shares.values()), color=BLUE)
    for row, share in enumerate(shares.values()):
        ax.text(share, row, f" {share:.0f} %", va="center")
    _line(ax, 100, "a copy")
    ax.invert_yaxis()
    ax.grid(False)
    ax.set(xlim=(0, 1.15 * max(100, *shares.values())), xlabel="PyTorch's softmax, % of the rate of a copy")
    return fig


def _line(ax, x, label):
    "A dashed line at `x`, with its label above the axes."
    ax.axvline(x, color=GREY, ls="--", lw=1)
    how = {"ha": "center", "va": "bottom", "fontsize": 9, "color": GREY}
    ax.text(x, 1.01, label, transform=ax.get_xaxis_transform(), **how)


def draw_bars(rates, unit="TB/s", roof=None, title=None):
    "Horizontal bars of {label: (median, low, high)}; `roof`, the copy's rate, is a dashed line."
    fig, ax = show.axes(figsize=(6.8, 1.1 + 0.34 * len(rates)))
    medians = [median for median, *_ in rates.values()]
    spread = [[m - low for m, low, _ in rates.values()], [high - m for m, _, high in rates.values()]]
    colours = [RED if label.startswith("yours") else BLUE for label in rates]
    ax.barh(list(rates), medians, xerr=spread, color=colours, error_kw={"lw": 1, "capsize": 2})
    top = max([*medians, roof or 0])
    for row, (value, _, high) in enumerate(rates.values()):
        inside = value > 0.12 * top  # a shorter bar has its label behind it
        x, colour = (0.01 * top, "white") if inside else (high + 0.015 * top, "black")
        ax.text(x, row, show.number(value), va="center", color=colour, fontweight="bold")
    if roof:
        _line(ax, roof, f"copy {roof:.3g}")
    ax.invert_yaxis()
    ax.grid(False)
    ax.set(xlim=(0, 1.08 * top), xlabel=unit)
    if title:
        ax.set_title(title)
    return fig


def view_places(data):
    "Programs by places: each square holds the index of its element; masked places are hollow."
    from matplotlib.patches import Rectangle

    n, block, programs = data["n"], data["block"], data["programs"]
    fig, ax = show.axes(figsize=(6.8, 1.1 + min(3.6, 0.34 * programs)))
    for i in range(programs * block):
        row, column, on = i // block, i % block, i < n
        box = (column + 0.06, row + 0.08), 0.88, 0.84
        ax.add_patch(Rectangle(*box, fc=BLUE if on else "white", ec=BLUE if on else RED, lw=0.8))
        if block <= 16 and programs <= 10:
            colour = "white" if on else RED
            ax.text(column + 0.5, row + 0.5, f"{i}", ha="center", va="center", fontsize=8, color=colour)
    ax.set(xlim=(0, block), ylim=(programs, 0), xlabel="place in the block", ylabel="program")
    for axis, size in ((ax.xaxis, block), (ax.yaxis, programs)):
        step = max(1, size // 8)
        axis.set_ticks([x + 0.5 for x in range(0, size, step)], range(0, size, step))
    ax.grid(False)
    ax.set_title(f"n = {n}, BLOCK = {block}: {programs * block} places, {data['idle']:.0%} of them masked")
    return fig


def draw_orders(orders, wave):
    "Maps of {label: tiles in order}: tiles of the first wave in colour, numbered by program."
    from matplotlib.patches import Rectangle

    fig, axes = show.axes(1, len(orders), figsize=(3.4 * len(orders), 3.7), squeeze=False)
    for ax, (label, tiles) in zip(axes[0], orders.items(), strict=True):
        for pid, (m, n) in enumerate(tiles):
            on = pid < wave
            ax.add_patch(Rectangle((n + 0.05, m + 0.05), 0.9, 0.9, fc=BLUE if on else "#e8e8e8", lw=0))
            colour = "white" if on else "#777777"
            ax.text(n + 0.5, m + 0.5, f"{pid}", ha="center", va="center", fontsize=8, color=colour)
        a, b = (len(set(each)) for each in zip(*tiles[:wave], strict=True))
        ax.set(xlim=(0, 1 + max(n for _, n in tiles)), ylim=(1 + max(m for m, _ in tiles), 0))
        ax.set(xlabel="tile column: a block of b", ylabel="tile row: a block of a", xticks=[], yticks=[])
        ax.set_aspect("equal")
        ax.grid(False)
        ax.set_title(f"{label}\nfirst wave needs {a} + {b} = {a + b} blocks", fontsize=10)
    return fig

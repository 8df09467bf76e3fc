"The figures of lesson records: functions of plain data that return a matplotlib figure."

from course_lib import records, show

RIGHT, WRONG = show.COLOURS[0], show.COLOURS[1]


def _cells_axis(ax, ids, runs):
    "Cells from top to bottom on y, their runs from left to right on x."
    ax.set_yticks(range(len(ids)), ids)
    ax.set(ylim=(len(ids) - 0.4, -0.6), xlim=(0.4, runs + 0.6), xlabel="run, In[…]")
    ax.set_xticks(range(1, runs + 1))


def draw_session(pressed, ids):
    "The order in which cells were run: `pressed` is a list of (id, source), `ids` the page's cells."
    fig, ax = show.axes(figsize=(6.4, 2.6))
    x, y = range(1, len(pressed) + 1), [ids.index(id) for id, _ in pressed]
    ax.plot(x, y, "-", color=show.COLOURS[6], alpha=0.5)
    first = {}
    for n, (id, source) in zip(x, pressed, strict=True):
        edited = first.setdefault(id, source) != source
        ax.plot(n, ids.index(id), "s" if edited else "o", ms=9, color=WRONG if edited else RIGHT)
        if edited:
            note = f"edited: {source.strip()}"
            ax.annotate(
                note, (n, ids.index(id)), (-8, 0), textcoords="offset points", ha="right", va="center"
            )
    _cells_axis(ax, ids, len(pressed))
    ax.set_ylabel("cell")
    ax.set_title("how the page came about: cells in the order in which they were run")
    return fig


def draw_losses(curves):
    "{label: losses, one a step}: the first line wide, the last one alone, any between dashed upon the first."
    fig, ax = show.axes(figsize=(6.4, 3.0))
    first, *_, last = curves
    for label, losses in curves.items():
        style = {"lw": 1.6, "ls": "--", "color": show.COLOURS[6]}
        if label in (first, last):
            style = {"lw": 5, "alpha": 0.35} if label == first else {"lw": 1.6}
            style["color"] = RIGHT if label == first else WRONG
        ax.plot(range(1, len(losses) + 1), losses, label=label, **style)
    ax.set(xlabel="step", ylabel="training loss", title="one seed, one configuration")
    ax.legend()
    return fig


def draw_difference(one, other):
    "The difference of two runs' losses by step; steps with equal losses are marked at the bottom."
    fig, ax = show.axes(figsize=(6.4, 2.6))
    off = {i: abs(a - b) for i, (a, b) in enumerate(zip(one, other, strict=True), 1)}
    same = [i for i, d in off.items() if not d]
    ax.plot(same, [0.04] * len(same), "|", color=RIGHT, transform=ax.get_xaxis_transform(), label="equal")
    ax.semilogy(
        [i for i in off if off[i]], [d for d in off.values() if d], ".", color=WRONG, label="different"
    )
    ax.set(xlabel="step", ylabel="difference of the losses", title="the same run on a GPU and on a CPU")
    fig.legend(loc="outside lower center", ncols=2)
    return fig


def draw_graph(history, notebook, stale, title="what was run"):
    """Runs as nodes, from maker to user an arrow: the session on the left, top to bottom on the right.

    A node shows the beginning of its version. The latest run of each cell has a thick rim, in another colour
    for the ids in `stale`, and the names that it used on its arrows.
    """
    ids, runs = list(dict.fromkeys(c.id for c in [*notebook, *history])), max(4, len(history))
    fig, (left, right) = show.axes(
        1, 2, figsize=(12, 4.6), sharey=True, width_ratios=(runs, max(len(ids), 0.6 * runs))
    )
    _cells_axis(left, ids, runs)
    _cells_axis(right, ids, len(notebook))
    left.set(ylabel="cell", title=title)
    right.set(title="from top to bottom", xlabel="", xticks=[])
    fig.draw_without_rendering()  # now the axes have their size, and an arrow's middle can be found
    for ax, cells, bad in ((left, history, stale), (right, notebook, ())):
        steps = records.replay(cells)
        latest = {step.cell.id: i for i, step in enumerate(steps)}
        places = [(i + 1, ids.index(step.cell.id)) for i, step in enumerate(steps)]
        for i, step in enumerate(steps):
            last = latest[step.cell.id] == i
            colour = (WRONG if step.cell.id in bad else RIGHT) if last else show.COLOURS[6]
            box = {"boxstyle": "round,pad=0.25", "fc": "white", "ec": colour, "lw": 2.2 if last else 1}
            ax.text(*places[i], step.version[:4], ha="center", va="center", fontsize=8, color=colour,
                    family="monospace", bbox=box, zorder=3)  # fmt: skip
            for source in sorted(set(step.inputs.values())):
                names = ", ".join(n for n, made in step.inputs.items() if made == source)
                _arrow(ax, places[source], places[i], names if last else "", last)
    right.tick_params(left=False)
    for label, colour in (
        ("latest run", RIGHT),
        ("latest run, stale", WRONG),
        ("earlier run", show.COLOURS[6]),
    ):
        left.plot([], [], "s", mfc="white", mec=colour, mew=1 + (colour != show.COLOURS[6]), label=label)
    left.legend(loc="lower left", fontsize=8)
    return fig


def _arrow(ax, start, end, names, last):
    "An arrow under the nodes, bent the more the more rows it passes, with `names` near its end."
    bend = 0.12 * max(0, abs(end[1] - start[1]) - 1) + (0.2 if end[1] == start[1] else 0.1)
    style = {"arrowstyle": "-|>", "color": show.COLOURS[6], "alpha": 0.8 if last else 0.3, "shrinkB": 12}
    style |= {"connectionstyle": f"arc3,rad={-bend}"}
    ax.annotate("", end, start, arrowprops=style, zorder=1)
    # The middle of a quadratic Bezier curve, whose control point lies `bend` of the length aside.
    a, b = ax.transData.transform([start, end])
    at = (a + 2 * ((a + b) / 2 - bend * (b - a)[::-1] * (1, -1)) + b) / 4
    ax.text(*ax.transData.inverted().transform(at), names, fontsize=8, ha="center", va="center", zorder=2,
            bbox={"fc": "white", "ec": "none", "pad": 0.5})  # fmt: skip

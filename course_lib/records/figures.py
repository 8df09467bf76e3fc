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


def draw_graph(history, notebook, stale, title="what was run"):
    """Runs as nodes, from maker to user an arrow: the session on the left, top to bottom on the right.

    A node shows the beginning of its version. The latest run of each cell has a thick rim, in another colour
    for the ids in `stale`.
    """
    ids, runs = list(dict.fromkeys(c.id for c in [*notebook, *history])), max(4, len(history))
    fig, (left, right) = show.axes(
        1, 2, figsize=(11, 3.8), sharey=True, width_ratios=(runs, max(len(ids), 0.7 * runs))
    )
    ran = records.replay(history)
    latest = {step.cell.id: i for i, step in enumerate(ran)}
    places = [(i + 1, ids.index(s.cell.id)) for i, s in enumerate(ran)]
    for i, step in enumerate(ran):
        bad, last = step.cell.id in stale, latest[step.cell.id] == i
        _node(left, places[i], step, (WRONG if bad else RIGHT) if last else show.COLOURS[6], last)
        for source in sorted(set(step.inputs.values())):
            _arrow(left, places[source], places[i], 0.12)
    _cells_axis(left, ids, runs)
    left.set(ylabel="cell", title=title)
    for i, step in enumerate(records.replay(notebook)):
        _node(right, (i, i), step, RIGHT, True)
        for source in sorted(set(step.inputs.values())):
            _arrow(right, (source, source), (i, i), 0.25 if i - source > 1 else 0)
            names = ", ".join(n for n, made in step.inputs.items() if made == source)
            # On the arc: arc3 bends by this share of the distance at its middle.
            bend = 0.125 * (i - source) if i - source > 1 else 0
            paper = {"fc": "white", "ec": "none", "pad": 1}
            right.text((i + source) / 2 + bend, (i + source) / 2 - bend, names, fontsize=8, ha="center",
                       va="center", bbox=paper)  # fmt: skip
    right.set(xlim=(-0.6, len(notebook) - 0.4), title="from top to bottom")
    right.set_xticks([])
    right.tick_params(left=False)
    return fig


def _node(ax, at, step, colour, last):
    box = {"boxstyle": "round,pad=0.25", "fc": "white", "ec": colour, "lw": 2.2 if last else 1}
    ax.text(*at, step.version[:4], ha="center", va="center", fontsize=8, family="monospace", bbox=box,
            color=colour, zorder=3)  # fmt: skip


def _arrow(ax, start, end, bend):
    style = {"arrowstyle": "-|>", "color": show.COLOURS[6], "alpha": 0.55, "shrinkA": 9, "shrinkB": 10}
    ax.annotate("", end, start, arrowprops=style | {"connectionstyle": f"arc3,rad={-bend}"})

"Figures of lesson scale: the cube and its cuts, scores by rank, layouts, goodput, runs that were killed."

from course_lib.show import COLOURS, axes


def draw_cube():
    "Four cuts of a cube of work over four ranks; a colour for each rank."
    import numpy as np

    fig, axs = axes(1, 4, figsize=(8.4, 2.7), subplot_kw={"projection": "3d"})
    cuts = {"data: sequences": 0, "tensor: width": 1, "pipeline: layers": 2, "context: tokens": None}
    for ax, (name, axis) in zip(axs, cuts.items(), strict=True):
        colours = np.empty((4, 4, 4), dtype=object)
        for at in np.ndindex(4, 4, 4):
            colours[at] = COLOURS[at[axis or 0]]
        ax.voxels(np.ones((4, 4, 4)), facecolors=colours, edgecolor="white", linewidth=0.3)
        ax.set_title(name, fontsize=10, loc="center")
        ax.set_xlabel("tokens of\none sequence" if axis is None else "sequences", fontsize=8, labelpad=-12)
        ax.set_ylabel("width", fontsize=8, labelpad=-14)
        ax.set_zlabel("layers", fontsize=8, labelpad=-14)
        ax.set(xticks=[], yticks=[], zticks=[])
    return fig


def draw_scores(rows):
    "Scores that each rank computes, {name: [scores by rank]}, beside an even share."
    fig, axs = axes(1, len(rows), figsize=(6.6, 2.6), sharey=True)
    for ax, (name, scores) in zip(axs, rows.items(), strict=True):
        ax.bar(range(len(scores)), [s / 1e3 for s in scores], color=COLOURS[0])
        ax.axhline(sum(scores) / len(scores) / 1e3, color=COLOURS[1], linestyle="--", linewidth=1.2,
                   label="an even share")  # fmt: skip
        ax.set(title=name, xlabel="rank", xticks=range(len(scores)))
        ax.grid(False)
    axs[0].set_ylabel("scores computed, thousands")
    axs[0].legend(loc="upper left", fontsize=8)
    return fig


PARTS = ("compute", "bubble", "tensor", "context", "pipe", "data", "optimizer")


def draw_layouts(rows, unit=1.0, label="seconds in a step"):
    "Predicted seconds by part, stacked, {name: ({part: seconds}, measured or None)}."
    fig, ax = axes(figsize=(7.0, 0.9 + 0.46 * len(rows)))
    names = list(rows)
    for i, name in enumerate(names):
        base, (parts, measured) = 0.0, rows[name]
        for part, colour in zip(PARTS, COLOURS, strict=True):
            ax.barh(i, unit * parts[part], left=base, color=colour, height=0.62,
                    label=part if i == 0 else None)  # fmt: skip
            base += unit * parts[part]
        if measured is not None:
            ax.plot([unit * measured], [i], "D", color="black", markersize=6, label=None if i else "measured")
    ax.set_yticks(range(len(rows)), names)
    ax.invert_yaxis()
    ax.grid(False)
    ax.set_xlabel(label)
    ax.legend(loc="lower center", bbox_to_anchor=(0.45, 1.0), ncols=4, fontsize=8)
    return fig


def draw_simulated(rows, marks):
    "Goodput by interval, simulated with its spread [(seconds, low, median, high)]; marks {name: seconds}."
    fig, ax = axes(figsize=(6.2, 3.0))
    at, low, mid, high = ([row[k] for row in rows] for k in range(4))
    ax.fill_between(
        at, low, high, color=COLOURS[0], alpha=0.25, label="quarter to three quarters of the runs"
    )
    ax.semilogx(at, mid, color=COLOURS[0], label="median of the runs")
    for (name, seconds), colour in zip(marks.items(), COLOURS[1:], strict=False):
        ax.axvline(seconds, color=colour, linestyle="--", linewidth=1.2, label=f"{name}: {seconds:,.0f} s")
    ax.set(xlabel="seconds of work between two saves", ylabel="goodput, %")
    _ticks(ax, (200, 500, 1000, 2000, 5000))
    ax.legend(fontsize=8, loc="lower center", frameon=True, facecolor="white", edgecolor="none", framealpha=1)
    return fig


def _ticks(ax, at):
    ax.set_xticks(at, [f"{n:g}" for n in at])
    ax.minorticks_off()


def view_goodput(found):
    "Goodput by interval for a cluster and a save, with the best interval."
    fig, ax = axes(figsize=(6.2, 3.0))
    ax.semilogx([t / 60 for t in found["intervals"]], [100 * s for s in found["share"]], color=COLOURS[0])
    best, share = found["best"]
    ax.plot(
        [best / 60],
        [100 * share],
        "o",
        color=COLOURS[1],
        label=f"best: {best / 60:.3g} min, {100 * share:.3g} %",
    )
    ax.axvline(found["young"] / 60, color=COLOURS[2], linestyle="--", linewidth=1.2,
               label=f"Young: {found['young'] / 60:.3g} min")  # fmt: skip
    ax.set(xlabel="minutes of work between two saves", ylabel="goodput, %", ylim=(0, 100),
           title=f"{found['gpus']:,} GPUs: a failure each {found['mtbf'] / 3600:.3g} hours")  # fmt: skip
    _ticks(ax, (0.2, 1, 5, 20, 100, 500))
    ax.legend(fontsize=9)
    return fig


def draw_runs(reference, runs, kills):
    "Losses of the run that was never killed and of others, {name: (first step, losses)}; steps of kills."
    fig, ax = axes(figsize=(6.8, 3.2))
    ax.plot(range(len(reference)), reference, color="#cccccc", linewidth=9, label="never killed")
    for i, (name, (first, losses)) in enumerate(runs.items()):  # a later start is narrower: both are seen
        width = 1.6 + 2 * (len(runs) - 1 - i)
        ax.plot(range(first, first + len(losses)), losses, color=COLOURS[i], linewidth=width, label=name)
    for i, step in enumerate(kills):
        ax.axvline(step, color=COLOURS[6], linewidth=1, linestyle="--", label=None if i else "a kill")
    ax.set(xlabel="step", ylabel="loss")
    ax.legend(fontsize=9)
    return fig

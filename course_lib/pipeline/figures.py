"Figures of lesson pipeline: who works when, bubbles and memory against formulas, measured beside predicted."

from course_lib.show import COLOURS, axes

KINDS = {"F": ("forward", "#0072B2"), "B": ("whole backward", "#D55E00"),
         "I": ("backward to the input", "#E69F00"), "W": ("backward to the weights", "#009E73")}  # fmt: skip


def _lanes(ax, spans, scale, words):
    "One row a rank; a later stage of the same rank is lighter."
    for rank, row in enumerate(spans):
        stages = sorted({stage for (_, _, stage), _, _ in row})
        for (kind, microbatch, stage), start, end in row:
            light = 0.55 + 0.45 / (1 + stages.index(stage))
            ax.barh(rank, (end - start) * scale, left=start * scale, height=0.8, color=KINDS[kind][1],
                    alpha=light, edgecolor="white", linewidth=0.6)  # fmt: skip
            if words:
                ax.text((start + end) / 2 * scale, rank, str(microbatch), ha="center", va="center",
                        fontsize=7, color="black" if kind == "I" else "white")  # fmt: skip
    ax.set_yticks(range(len(spans)), [f"rank {r}" for r in range(len(spans))])
    ax.set_ylim(len(spans) - 0.45, -0.55)
    ax.set_facecolor("#e8e8e8")
    ax.grid(False)


def draw_plans(runs, unit="ticks", scale=1):
    "Who works when: {name: spans}, one panel each, on one scale. `spans[rank]` holds (op, start, end)."
    ranks = max(len(spans) for spans in runs.values())
    fig, axs = axes(
        len(runs), 1, figsize=(7.4, 0.9 + len(runs) * (0.45 + 0.23 * ranks)), sharex=True, squeeze=False
    )
    kinds = {op[0] for spans in runs.values() for row in spans for op, _, _ in row}
    for ax, (name, spans) in zip(axs[:, 0], runs.items(), strict=True):
        begin, end = min(row[0][1] for row in spans), max(row[-1][2] for row in spans)
        idle = 1 - sum(b - a for row in spans for _, a, b in row) / (len(spans) * (end - begin))
        _lanes(ax, spans, scale, max(map(len, spans)) <= 40)
        ax.axvline(end * scale, color=COLOURS[6], linewidth=1, linestyle=":")
        ax.set_title(f"{name}: {end * scale:,.4g} {unit}, idle {100 * idle:.0f} %", fontsize=9)
    several = any(len({op[2] for op, _, _ in row}) > 1 for spans in runs.values() for row in spans)
    lighter = "; lighter: a later stage of the rank" * several
    axs[-1, 0].set_xlabel(f"{unit} (numbers: microbatches; grey: idle{lighter})")
    axs[-1, 0].set_xlim(0, None)
    handles = [axs[0, 0].barh(0, 0, color=KINDS[k][1], label=KINDS[k][0]) for k in KINDS if k in kinds]
    fig.legend(handles=handles, loc="outside upper right", ncols=4, fontsize=8)
    return fig


def draw_costs(rows):
    """Bubble and microbatches kept by the number of microbatches.

    `rows` is {name: [(m, bubble, formula, kept, formula)]}.
    """
    fig, axs = axes(1, 2, figsize=(7.4, 3.1))
    # Where two schedules have the same cost, the smaller points of the later one leave both visible.
    for (name, found), colour, size in zip(rows.items(), COLOURS, (11, 7, 5, 3.5), strict=False):
        m = [row[0] for row in found]
        for ax, k, factor in ((axs[0], 1, 100), (axs[1], 3, 1)):
            ax.plot(m, [factor * row[k + 1] for row in found], color=colour, linewidth=1)
            ax.plot(m, [factor * row[k] for row in found], "o", color=colour, markersize=size, label=name)
    axs[0].set(xlabel="microbatches", ylabel="bubble, %", ylim=(0, None))
    axs[1].set(xlabel="microbatches", ylabel="kept at most, in whole stages", ylim=(0, None))
    axs[0].set_title("points: plans, lines: formulas", fontsize=9)
    axs[1].set_title("memory: microbatches kept on a rank", fontsize=9)
    axs[0].legend(fontsize=8)
    return fig


def view_plan(found):
    "The explorer's figure: one plan, with its formula in the title."
    return draw_plans({f"{found['schedule']}, formula {100 * found['formula']:.0f} %": found["spans"]})


def draw_bubbles(rows):
    "Bubbles of real steps: {name: (formula, clock with measured seconds, measured)}, in parts of 1."
    fig, ax = axes(figsize=(7.4, 3.4))
    labels = ("formula, equal ticks", "clock, measured operations", "measured")
    for k, (label, colour) in enumerate(zip(labels, ("#c9d5e3", "#7ba7d0", COLOURS[0]), strict=True)):
        at = [i + 0.27 * (k - 1) for i in range(len(rows))]
        values = [100 * row[k] for row in rows.values()]
        ax.bar(at, values, 0.26, color=colour, label=label)
        for x, value in zip(at, values, strict=True):
            ax.annotate(
                f"{value:.0f}", (x, value), xytext=(0, 2), textcoords="offset points", ha="center", fontsize=7
            )
    ax.set_xticks(range(len(rows)), list(rows), fontsize=7)
    ax.set(ylabel="bubble, %", ylim=(0, None))
    ax.grid(axis="x", visible=False)
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, fontsize=8)
    return fig

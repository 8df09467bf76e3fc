"Figures of lesson sharding: ZeRO's stages, two halves of an all-reduce, memory alive, timelines, scaling."

from course_lib.show import COLOURS, axes


def view_zero(found):
    "Gigabytes that a rank keeps under each stage, stacked, with the GPU's memory as a line."
    fig, ax = axes(figsize=(6.6, 3.2))
    stages, base = found["stages"], [0.0] * 4
    right = 1.3 * max(sum(stages[0]["parts"]), found["memory"])
    for k, name in enumerate(("weights", "gradients", "optimizer state")):
        values = [s["parts"][k] for s in stages]
        ax.barh(range(4), values, left=base, color=COLOURS[k], label=name, height=0.66)
        base = [b + v for b, v in zip(base, values, strict=True)]
    for s in stages:
        words = f"{s['total']:,.1f}" + ("" if s["fits"] else ", too much")
        ax.text(s["total"] + 0.01 * right, s["stage"], words, va="center", fontsize=9,
                bbox={"color": "white", "pad": 1.5}, zorder=3)  # fmt: skip
    ax.axvline(found["memory"], color=COLOURS[6], linewidth=1.2, linestyle="--")
    ax.set_yticks(range(4), ["copies", "stage 1", "stage 2", "stage 3"])
    ax.invert_yaxis()
    ax.grid(False)
    ax.set(xlim=(0, right * 1.1), title=f"{found['billions']:g} billion parameters",
           xlabel=f"GB on each of {found['ranks']} ranks (dashed: {found['memory']} GB)")  # fmt: skip
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.1), ncols=3, fontsize=9)
    return fig


def draw_halves(ranks=4):
    "What each rank holds before, between and after the two halves of an all-reduce."
    fig, axs = axes(1, 3, figsize=(7.2, 2.5))
    titles = ("each rank's own gradient", "after reduce-scatter", "after all-gather")
    for k, (ax, title) in enumerate(zip(axs, titles, strict=True)):
        for rank in range(ranks):
            for part in range(ranks):
                summed = k == 2 or (k == 1 and part == rank)
                colour = COLOURS[0] if summed else ("#d9d9d9" if k == 0 else "white")
                ax.barh(rank, 0.94, left=part, height=0.8, color=colour, edgecolor="#999999", linewidth=0.6)
                words = "sum" if summed else (f"r{rank}" if k == 0 else "")
                ax.text(part + 0.47, rank, words, ha="center", va="center", fontsize=8,
                        color="white" if summed else "black")  # fmt: skip
        ax.set_title(title, fontsize=9)
        ax.set_xticks([p + 0.47 for p in range(ranks)], range(ranks), fontsize=8)
        ax.set_yticks(range(ranks), [f"rank {r}" for r in range(ranks)] if k == 0 else [])
        ax.set_xlabel("part", fontsize=9)
        ax.invert_yaxis()
        ax.grid(False)
    return fig


def draw_alive(curves):
    "Bytes of weights and gradients alive after each operator of a step: {name: list}."
    fig, ax = axes(figsize=(6.6, 3.0))
    for (name, curve), colour in zip(curves.items(), COLOURS[1::-1], strict=False):
        at = [i / max(1, len(curve) - 1) for i in range(len(curve))]
        ax.step(at, [n / 1e3 for n in curve], where="post", color=colour, label=name)
    ax.set_xticks([0, 1], ["forward begins", "backward ends"])
    ax.set(ylabel="KB alive on rank 0", ylim=(0, None))
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    return fig


def draw_timeline(runs):
    "Gathers and computation on a virtual clock: {name: spans}, one panel each, on one scale."
    fig, axs = axes(len(runs), 1, figsize=(7.0, 0.7 + 1.15 * len(runs)), sharex=True, squeeze=False)
    for ax, (name, spans) in zip(axs[:, 0], runs.items(), strict=True):
        for span in spans:
            lane = ("wire", "compute").index(span.lane)
            ax.barh(lane, span.end - span.start, left=span.start, height=0.7, color=COLOURS[1 - lane],
                    edgecolor="white")  # fmt: skip
            ax.text((span.start + span.end) / 2, lane, span.name, ha="center", va="center", color="white",
                    fontsize=8)  # fmt: skip
        end = max((span.end for span in spans), default=0)
        ax.axvline(end, color=COLOURS[6], linewidth=1, linestyle=":")
        ax.set_title(f"{name}: {end:.3g} s", fontsize=9)
        ax.set_yticks([0, 1], ["gather", "compute"])
        ax.invert_yaxis()
        ax.grid(False)
    axs[-1, 0].set_xlabel("seconds on the virtual clock (numbers: layers)")
    return fig


def draw_pairs(rows, ylabel, line=None):
    "Predicted and measured beside each other: {name: (predicted, measured)}; `line` is (value, words)."
    fig, ax = axes(figsize=(6.4, 3.2))
    for k, label in enumerate(("predicted", "measured")):
        values = [pair[k] for pair in rows.values()]
        at = [i + 0.38 * (k - 0.5) for i in range(len(rows))]
        ax.bar(at, values, 0.36, color=("#a6bddb", COLOURS[0])[k], label=label)
        for x, value in zip(at, values, strict=True):
            ax.annotate(f"{value:.3g}", (x, value), xytext=(0, 3), textcoords="offset points", ha="center",
                        fontsize=8, bbox={"color": "white", "pad": 0.5}, zorder=3)  # fmt: skip
    if line:
        ax.axhline(line[0], color=COLOURS[1], linewidth=1.2, linestyle="--", label=line[1])
    ax.set_xticks(range(len(rows)), [name.replace("your ", "your\n") for name in rows])
    top = max(max(pair) for pair in rows.values())
    ax.set(ylabel=ylabel, ylim=(0, 1.12 * max(top, line[0] if line else 0)))
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, fontsize=9)
    return fig

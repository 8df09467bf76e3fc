"Figures of lesson tensor_parallel: cuts of a matrix, timelines, links, a race on two GPUs."

from course_lib.show import COLOURS, axes

OWNERS = COLOURS[0], COLOURS[4]


def draw_cuts():
    "Two layers whose weights are cut by columns, then by rows: what each of two ranks holds and computes."
    fig, ax = axes(figsize=(7.4, 2.7))
    left = 0.0
    parts = [("x", 1.0, None), ("×", 0, None), ("W₁: columns", 1.8, "columns"), ("=", 0, None),
             ("hidden", 1.8, "columns"), ("×", 0, None), ("W₂: rows", 1.0, "rows"), ("=", 0, None),
             ("partial sum", 1.0, 0), ("+", 0, None), ("partial sum", 1.0, 1)]  # fmt: skip
    heights = {"x": 1.3, "W₁: columns": 1.0, "hidden": 1.3, "W₂: rows": 1.8, "partial sum": 1.3}
    for name, width, cut in parts:
        if not width:
            ax.text(left + 0.17, 0, name, ha="center", va="center", fontsize=13)
            left += 0.34
            continue
        tall = heights[name]
        for r in range(2):
            whole = left, -tall / 2, width, tall
            cuts = {"columns": (left + r * width / 2, -tall / 2, width / 2, tall),
                    "rows": (left, (0.0, -tall / 2)[r], width, tall / 2)}  # fmt: skip
            box = cuts.get(cut, whole)
            colour = "#d9d9d9" if cut is None else OWNERS[cut if cut in (0, 1) else r]
            ax.add_patch(_box(box, colour))
        ax.text(left + width / 2, 1.05, name, ha="center", fontsize=9)
        left += width
    for r, place in enumerate((0.3, 2.6)):
        ax.add_patch(_box((place, -1.6, 0.22, 0.22), OWNERS[r]))
        ax.text(place + 0.32, -1.5, f"rank {r}", va="center", fontsize=9)
    ax.add_patch(_box((4.9, -1.6, 0.22, 0.22), "#d9d9d9"))
    ax.text(5.22, -1.5, "both ranks", va="center", fontsize=9)
    ax.set(xlim=(-0.1, left + 0.1), ylim=(-1.75, 1.35))
    ax.set_aspect("equal")
    ax.axis("off")
    return fig


def _box(box, colour):
    from matplotlib.patches import Rectangle

    x, y, width, height = box
    return Rectangle((x, y), width, height, facecolor=colour, edgecolor="white")


def draw_timelines(runs):
    "Rank 0's wire and matmuls on a virtual clock: {name: spans}, one panel each, on one scale."
    fig, axs = axes(len(runs), 1, figsize=(7.0, 0.6 + 1.05 * len(runs)), sharex=True, squeeze=False)
    last = max(span.end for spans in runs.values() for span in spans)
    for ax, (name, spans) in zip(axs[:, 0], runs.items(), strict=True):
        for span in spans:
            lane, long = ("wire", "compute").index(span.lane), span.end - span.start
            ax.barh(lane, 1e6 * long, left=1e6 * span.start, height=0.7, color=COLOURS[1 - lane],
                    edgecolor="white")  # fmt: skip
            if long > 0.02 * last:
                middle = 5e5 * (span.start + span.end)
                ax.text(middle, lane, span.name, ha="center", va="center", color="white", fontsize=8)
        end = 1e6 * max(span.end for span in spans)
        ax.axvline(end, color=COLOURS[6], linewidth=1, linestyle=":")
        ax.set_title(f"{name}: {end:.0f} µs", fontsize=9)
        ax.set_yticks([0, 1], ["wire", "matmuls"])
        ax.invert_yaxis()
        ax.grid(False)
    axs[-1, 0].set_xlabel("µs on the virtual clock of rank 0 (numbers: the order)")
    return fig


def view_links(found):
    "Milliseconds of a block's forward pass, by link: the matmuls, the wire, both in turn, both at once."
    fig, ax = axes(figsize=(6.8, 3.2))
    rows = found["rows"]
    top = max(max(row.values()) for row in rows.values())
    for k, name in enumerate(next(iter(rows.values()))):
        values = [row[name] for row in rows.values()]
        at = [i + 0.2 * (k - 1.5) for i in range(len(rows))]
        ax.bar(at, values, 0.19, color=COLOURS[k], label=name)
        for x, value in zip(at, values, strict=True):
            ax.text(x, value + 0.01 * top, f"{value:.3g}", ha="center", fontsize=8)
    ax.set_xticks(range(len(rows)), list(rows))
    ax.set(ylabel="ms of a block, forward", ylim=(0, 1.1 * top))
    ax.set_title(f"{found['ranks']} GPUs, {found['tokens']:,} tokens, width {found['width']:,}", fontsize=10)
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.1), ncols=4, fontsize=9)
    return fig


def draw_race(times):
    "Microseconds by variant, with the least and the most of the rounds: {name: (median, least, most)}."
    fig, ax = axes(figsize=(7.0, 0.9 + 0.36 * len(times)))
    top = 1e6 * max(most for _, _, most in times.values())
    for i, (name, (median, least, most)) in enumerate(times.items()):
        colour = COLOURS[2] if "yours" in name else COLOURS[6] if "alone" in name else COLOURS[0]
        ax.barh(i, 1e6 * median, color=colour, height=0.66)
        ax.plot([1e6 * least, 1e6 * most], [i, i], color="black", linewidth=1.5)
        ax.text(1e6 * most + 0.01 * top, i, f"{1e6 * median:.0f}", va="center", fontsize=9)
    ax.set_yticks(range(len(times)), list(times))
    ax.set(xlabel="µs of a call (line: least to most of the rounds)", xlim=(0, 1.1 * top))
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    return fig

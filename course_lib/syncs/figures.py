"The figures of lesson syncs: functions of plain data that return a matplotlib figure."

import statistics

from course_lib import show

LANES = {
    "launch": ("Python launches", 0),
    "wait": ("Python waits", 1),
    "python": ("other Python", 3),
    "kernel": ("the GPU works", 2),
}


def draw_failure(rows):
    """Milliseconds a step of several ways to run and time a loop, as bars.

    `rows` is {title: {label: ms or None}}; None where a figure was never recorded.
    """
    fig, axes = show.axes(1, len(rows), figsize=(7.6, 2.3), sharey=True, squeeze=False)
    for ax, (title, bars) in zip(axes[0], rows.items(), strict=True):
        values = [v or 0 for v in bars.values()]
        ax.barh(list(bars), values, color=[show.COLOURS[i] for i in (6, 2, 1)])
        ax.bar_label(ax.containers[0], [show.number(v) for v in bars.values()], padding=3)
        ax.set_xlim(0, 1.25 * max(*values, 1e-9))
        ax.set_title(title, fontsize=10)
        ax.set_xlabel("ms a step")
        ax.grid(False, axis="y")
    axes[0, 0].invert_yaxis()
    return fig


def view_queue(data):
    "The explorer's figure: the timeline of a simulated queue, and what it says."
    fig, ax = show.axes(figsize=(7.2, 2.5))
    for kind, (label, colour) in LANES.items():
        found = [s for s in data["spans"] if s.kind == kind]
        if found:
            ax.barh([int(kind == "kernel")] * len(found), [s.duration for s in found], height=0.7,
                    left=[s.start for s in found], color=show.COLOURS[colour], edgecolor="white", lw=0.6,
                    label=label)  # fmt: skip
    says = f"{data['slower']:.2f} times the loop without a sync" if data["sync_every"] else "no sync"
    ax.set_title(
        f"24 kernels in {data['total']:,.0f} µs; the GPU is busy {data['busy']:.0%} of the time; {says}",
        fontsize=10,
    )
    ax.set_yticks([0, 1], ["Python", "GPU"])
    ax.set(xlabel="µs", ylim=(1.6, -0.6), xlim=(0, 1.02 * data["total"]))
    ax.grid(False)
    fig.legend(loc="outside lower center", ncols=4)
    return fig


def draw_traces(traces, zoom=None):
    """Traces one below the other, with the largest gap of each shaded: {title: (events, gap)}.

    Host threads are above, the GPU's streams below; `gap` is (start, duration, cause) or None. `zoom` is how
    many µs to show on each side of the gap, by default everything. Time 0 is where the gap
    begins, or the first event.
    """
    fig, axes = show.axes(len(traces), figsize=(7.2, 0.6 + 1.75 * len(traces)), squeeze=False)
    for ax, (title, (events, gap)) in zip(axes[:, 0], traces.items(), strict=True):
        _trace(ax, events, gap, zoom)
        cause = gap and (f"Python was in {gap[2]}" if gap[2] else "Python was not waiting")
        ax.set_title(title + (f": largest gap {gap[1]:,.0f} µs, {cause}" if gap else ""), fontsize=10)
    axes[-1, 0].set_xlabel("µs since the gap began" if gap else "µs")
    handles = {
        label: h for ax in axes[:, 0] for h, label in zip(*ax.get_legend_handles_labels(), strict=True)
    }
    fig.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5)
    return fig


def _trace(ax, events, gap, zoom):
    zero = gap[0] if gap else min(e["ts"] for e in events)
    kinds = {"kernel": "GPU", "gpu_memcpy": "GPU", "gpu_memset": "GPU", "cpu_op": "operator",
             "cuda_runtime": "call", "cuda_driver": "call"}  # fmt: skip
    layers = {
        "operator": ("operator of PyTorch", "#CCCCCC", 0.8),
        "call": ("call of CUDA", show.COLOURS[0], 0.45),
        "wait": ("call that waits", show.COLOURS[1], 0.45),
        "GPU": ("the GPU works", show.COLOURS[2], 0.8),
    }
    low, high = (-zoom, gap[1] + zoom) if zoom and gap else (-1e18, 1e18)
    shown = [
        e for e in events if e["cat"] in kinds and e["ts"] - zero < high and e["ts"] + e["dur"] - zero > low
    ]
    rows = [e for e in events if e["cat"] in kinds]  # each thread has its row, also where it does nothing
    lanes = sorted({(kinds[e["cat"]] == "GPU", str(e["tid"])) for e in rows})
    for kind, (label, colour, height) in layers.items():
        mine = [e for e in shown if kinds[e["cat"]] == kind]
        if kind in ("call", "wait"):
            waits = kind == "wait"
            mine = [
                e for e in shown if kinds[e["cat"]] == "call" and e["name"].endswith("Synchronize") == waits
            ]
        if mine:
            ax.barh([lanes.index((kind == "GPU", str(e["tid"]))) for e in mine], [e["dur"] for e in mine],
                    left=[e["ts"] - zero for e in mine], height=height, color=colour, edgecolor="white",
                    lw=0.3, label=label)  # fmt: skip
    if gap:
        ax.axvspan(0, gap[1], color=show.COLOURS[4], alpha=0.35, lw=0, label="largest gap")
    if zoom and gap:
        ax.set_xlim(low, high)
    main = {str(e["tid"]) for e in rows if e["tid"] == e["pid"]}  # others are autograd's threads
    labels = ["GPU" if gpu else "Python" if tid in main else "autograd" for gpu, tid in lanes]
    ax.set_yticks(range(len(lanes)), labels)
    ax.set_ylim(len(lanes) - 0.4, -0.6)
    ax.grid(False)


def draw_ratios(ratios, xlabel, ylabel):
    "A ratio with its spread against a size: {size: [ratio of each round, ...]}; 1 is a line."
    fig, ax = show.axes()
    for i, found in enumerate(ratios.values()):
        ax.plot([i] * len(found), found, "o", color=show.COLOURS[5], ms=5, mew=0, alpha=0.7)
    ax.plot([statistics.median(r) for r in ratios.values()], "o-", color=show.COLOURS[0], label="median")
    ax.plot([], [], "o", color=show.COLOURS[5], label="one round")
    ax.axhline(1, color=show.COLOURS[6], lw=1, ls="--")
    ax.set_xticks(range(len(ratios)), [f"{n:,}" for n in ratios])
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.legend()
    return fig


def draw_ladder(ms):
    """ms of a step after each change, as bars with the fastest and slowest round: {change: [ms, ...]}.

    The factor is the median over the rounds of the first bar's ms divided by this bar's.
    """
    fig, ax = show.axes(figsize=(7.2, 0.7 + 0.42 * len(ms)))
    medians = [statistics.median(t) for t in ms.values()]
    spread = [[m - min(t) for m, t in zip(medians, ms.values(), strict=True)],
              [max(t) - m for m, t in zip(medians, ms.values(), strict=True)]]  # fmt: skip
    ax.barh(list(ms), medians, xerr=spread, color=show.COLOURS[0], ecolor=show.COLOURS[6], capsize=3)
    first = next(iter(ms.values()))
    for i, (m, times) in enumerate(zip(medians, ms.values(), strict=True)):
        faster = statistics.median(a / b for a, b in zip(first, times, strict=True))
        text, place = f"{m:.3g} ms, {faster:.2f}×", (max(times), i)
        ax.annotate(text, place, (6, 0), textcoords="offset points", va="center")
    ax.set(xlabel="ms a step", xlim=(0, 1.35 * max(max(t) for t in ms.values())))
    ax.invert_yaxis()
    ax.grid(False, axis="y")
    return fig


def draw_slow(seconds, found, planted, title):
    "Step times in ms with the reported steps marked and the planted ones circled."
    fig, ax = show.axes(figsize=(7.2, 2.8))
    ms = [1e3 * s for s in seconds]
    ax.plot(ms, lw=0.8, color=show.COLOURS[0])
    ax.plot(found, [ms[i] for i in found], "o", color=show.COLOURS[1], ms=4, label=f"{len(found)} reported")
    ax.plot(planted, [ms[i] for i in planted], "o", mfc="none", mec=show.COLOURS[6], ms=10,
            label=f"{len(planted)} planted")  # fmt: skip
    usual = sorted(ms)[int(0.98 * len(ms))]
    top = 1.3 * max([usual, *(ms[i] for i in planted)])
    ax.set(xlabel="step", ylabel="ms", ylim=(0, top), title=title)
    ax.legend(loc="upper right", ncols=2)
    return fig

"The figures of lesson syncs: functions of plain data that return a matplotlib figure, or text."

from course_lib import show
from course_lib.syncs import queue as syncs_queue
from course_lib.syncs import trace as syncs_trace

KINDS = {"launch": ("asks", 0), "wait": ("waits", 1), "python": ("something else", 3), "kernel": ("works", 2)}


def _lanes(ax, spans, until=None):
    "Python above and the GPU below, from a simulated queue's spans."
    for kind, (_, colour) in KINDS.items():
        found = [s for s in spans if s.kind == kind]
        rows = [0 if s.lane == syncs_queue.HOST else 1 for s in found]
        ax.barh(rows, [s.duration for s in found], left=[s.start for s in found], height=0.7,
                color=show.COLOURS[colour], edgecolor="white", lw=0.6)  # fmt: skip
    ax.set_yticks([0, 1], ["Python", "GPU"])
    ax.set_ylim(1.6, -0.6)
    ax.grid(False)
    if until:
        ax.set_xlim(0, until)


def _legend(ax, kinds):
    from matplotlib.patches import Patch

    names = {"launch": "Python asks", "wait": "Python waits", "python": "other Python", "kernel": "GPU works"}
    patches = [Patch(color=show.COLOURS[KINDS[k][1]], label=names[k]) for k in KINDS if k in kinds]
    ax.legend(handles=patches, loc="lower center", bbox_to_anchor=(0.5, 1.12), ncols=len(patches))


def draw_queues(queues):
    "Timelines of simulated queues, {title: Queue}, one below the other on one scale of µs."
    fig, axes = show.axes(len(queues), figsize=(6.8, 0.8 + 1.25 * len(queues)), sharex=True, squeeze=False)
    end = max(q.total for q in queues.values())
    for ax, (title, q) in zip(axes[:, 0], queues.items(), strict=True):
        _lanes(ax, q.spans, until=1.02 * end)
        ax.set_title(f"{title}: {q.total:,.0f} µs", fontsize=10)
        ax.axvline(q.total, color=show.COLOURS[6], lw=1, ls="--")
    axes[-1, 0].set_xlabel("µs")
    kinds = {s.kind for q in queues.values() for s in q.spans}
    _legend(axes[0, 0], kinds)
    return fig


def view_queue(data):
    "The explorer's figure: the timeline, and what it says."
    fig, ax = show.axes(figsize=(6.8, 2.4))
    _lanes(ax, data["spans"], until=1.02 * data["total"])
    slower = data["total"] / data["clean"]
    ax.set_title(
        f"{data['total']:,.0f} µs, the GPU works {data['busy']:.0%} of them; "
        + (f"{slower:.2f} times the loop that never waits" if data["sync_every"] else "Python never waits"),
        fontsize=10,
    )
    ax.set_xlabel("µs")
    return fig


def draw_trace(events, gap=None, most=4, zoom=None):
    """Lanes of a trace: host threads above, GPU streams below, at most `most` of each; `gap` is shaded.

    Operators of torch are drawn behind the calls of CUDA that they make. The time starts at the first event.
    `zoom` is how many µs to show on each side of the gap, by default everything.
    """
    spans = [e for e in events if e.get("ph") == "X" and e.get("cat") in _CATS]
    first = min(e["ts"] for e in spans)
    lanes = sorted({(e["cat"] in syncs_trace.GPU_WORK, str(e["pid"]), str(e["tid"])) for e in spans})
    kept = [lane for on_gpu in (False, True) for lane in [k for k in lanes if k[0] == on_gpu][:most]]
    fig, ax = show.axes(figsize=(6.8, 1.1 + 0.5 * len(kept)))
    for (label, height), cats in _LAYERS.items():
        for colour, waits in ((_COLOUR[label], False), (show.COLOURS[1], True)):
            found = [
                (kept.index(lane), e)
                for e in spans
                if e["cat"] in cats
                and (lane := (e["cat"] in syncs_trace.GPU_WORK, str(e["pid"]), str(e["tid"]))) in kept
                and (e["cat"] in syncs_trace.CUDA_CALLS and e["name"].endswith("Synchronize")) == waits
            ]
            if found:
                ax.barh([row for row, _ in found], [e["dur"] for _, e in found],
                        left=[e["ts"] - first for _, e in found], height=height, color=colour,
                        edgecolor="white", lw=0.5 if len(spans) < 300 else 0,
                        label="waits" if waits else label)  # fmt: skip
    if gap is not None:
        ax.axvspan(
            gap.start - first, gap.start - first + gap.duration, color=show.COLOURS[4], alpha=0.35, lw=0
        )
        waiting = f"Python was in {gap.cause}" if gap.cause else "Python was not waiting"
        ax.set_title(f"largest gap {gap.duration:,.0f} µs; as it began, {waiting}", fontsize=10)
        if zoom:
            ax.set_xlim(gap.start - first - zoom, gap.start - first + gap.duration + zoom)
    ax.set_yticks(range(len(kept)), [f"stream {t}" if on_gpu else f"thread {t}" for on_gpu, _, t in kept])
    ax.set_ylim(len(kept) - 0.4, -0.6)
    ax.grid(False)
    ax.set_xlabel("µs")
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.12), ncols=4)
    return fig


_LAYERS = {
    ("operators", 0.8): {"cpu_op"},
    ("calls of CUDA", 0.4): syncs_trace.CUDA_CALLS,
    ("GPU works", 0.7): syncs_trace.GPU_WORK,
}
_COLOUR = {"operators": "#CCCCCC", "calls of CUDA": show.COLOURS[0], "GPU works": show.COLOURS[2]}
_CATS = set().union(*_LAYERS.values())


def draw_loops(sizes, times):
    "ms a step of several loops against a network's width: `times` is {label: [seconds, …]}."
    fig, ax = show.axes()
    for label, seconds in times.items():
        ax.semilogx(sizes, [1e3 * s for s in seconds], "o-", label=label)
    ax.set_xscale("log", base=2)
    ax.set_xticks(sizes, [f"{n:,}" for n in sizes])
    ax.minorticks_off()
    ax.set(xlabel="width of the network", ylabel="ms a step", ylim=(0, None))
    ax.legend()
    return fig


def draw_slow(seconds, found, planted=(), title=""):
    "Step times in ms with the reported steps marked, and the planted ones circled."
    fig, ax = show.axes()
    ms = [1e3 * s for s in seconds]
    ax.plot(ms, lw=0.8, color=show.COLOURS[0])
    ax.plot(found, [ms[i] for i in found], "o", color=show.COLOURS[1], ms=5, label=f"{len(found)} reported")
    if planted:
        ax.plot(planted, [ms[i] for i in planted], "o", mfc="none", mec=show.COLOURS[6], ms=10,
                label=f"{len(planted)} planted")  # fmt: skip
    ax.set_yscale("log")
    ax.set(xlabel="step", ylabel="ms")
    ax.yaxis.set_major_formatter(lambda v, _: f"{v:g}")
    ax.yaxis.set_minor_formatter("")
    ax.set_title(title, fontsize=10)
    ax.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2)
    return fig

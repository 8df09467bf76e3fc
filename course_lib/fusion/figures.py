"The figures of lesson fusion: functions of plain data that return a matplotlib figure, or text."

from course_lib import machine, recorded, show

# FLOP/s outside the tensor cores, float32: NVIDIA's datasheet of the H200.
H200_VECTOR = 67e12


# --- the explorer: what a chain of point-wise operators costs -----------------------


HERE, H200 = "this machine", "H200"


def rates(where):
    "(bytes/s, FLOP/s of simple arithmetic, seconds for a launch) of this machine or of an H200."
    if where == HERE:
        here = machine.peaks()
        return here.bytes, H200_VECTOR if machine.has_gpu() else here.flops, here.launch
    noted = [recorded.get(f"roofline.{name}") for name in ("copy_tbps", "launch_us")]
    copy, launch = (f["value"] for f in noted) if all(noted) else (4.2, 5.0)
    return copy * 1e12, H200_VECTOR, launch * 1e-6


def explore_chain(ops=10, elements=2**24, flops=1, where=H200):
    """A chain of `ops` operators on float32 tensors, each of `flops` FLOPs an element, on HERE or H200.

    Eager, each operator reads and writes a tensor and is launched. Fused, the chain reads one and writes one,
    in one launch. Whatever takes longest is the time. Seconds by the length of the chain, 1 to 256.
    """
    rate, arithmetic, launch = rates(where)

    def seconds(n):
        parts = {"launching": launch, "moving bytes": 8 * elements / rate,
                 "arithmetic": n * flops * elements / arithmetic}  # fmt: skip
        return max(parts.values()), max(parts, key=parts.get)

    lengths = sorted({*range(1, 17), 24, 32, 48, 64, 96, 128, 192, 256, ops})
    return {
        "ops": ops,
        "lengths": lengths,
        "eager": [n * seconds(1)[0] for n in lengths],
        "fused": [seconds(n)[0] for n in lengths],
        "bound": seconds(ops)[1],
    }


def view_chain(data):
    "The explorer's figure: seconds against the length of the chain, eager and fused."
    fig, ax = show.axes(figsize=(6.4, 3.4))
    at = data["lengths"].index(data["ops"])
    for name in ("eager", "fused"):
        line = [1e6 * s for s in data[name]]
        ax.loglog(data["lengths"], line, label=name)
        ax.plot([data["ops"]], [line[at]], "o", color=ax.lines[-1].get_color())
    ratio = data["eager"][at] / data["fused"][at]
    ax.set_title(
        f"{data['ops']} operators: fused {1e6 * data['fused'][at]:,.3g} µs, {ratio:.1f} times faster; "
        f"most of it {data['bound']}",
        fontsize=10,
    )
    _plain(ax, data["lengths"][0], data["lengths"][-1])
    ax.set(xlabel="operators in the chain", ylabel="µs")
    ax.legend(loc="upper left")
    return fig


def _plain(ax, low, high):
    "Powers of two on the horizontal axis, plain numbers on the vertical one."
    from matplotlib import ticker

    ax.set_xscale("log", base=2)
    ticks = [2**i for i in range(40) if low <= 2**i <= high]
    ax.set_xticks(ticks, [f"{t:,}" for t in ticks])
    ax.minorticks_off()
    ax.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5), numticks=8))
    ax.yaxis.set_major_formatter(lambda v, _: f"{v:,.10g}")


def draw_race(rows):
    "GB/s of each chain, eager, compiled and ours: `fusion.race`'s rows, a group of bars for each."
    fig, ax = show.axes(figsize=(6.6, 0.9 + 0.42 * len(rows)))
    ways = {"eager": "eager", "torch.compile": "compiled", "ours": "fused"}
    high = 0.8 / len(ways)
    for k, (label, way) in enumerate(ways.items()):
        places = [i + high * (k - 1) for i in range(len(rows))]
        rates = [r.bytes / getattr(r, way) / 1e9 for r in rows]
        ax.barh(places, rates, height=high, label=label, color=show.COLOURS[k])
    ax.set_yticks(range(len(rows)), [r.name for r in rows])
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.set(xlabel="GB/s: bytes that one kernel must move, over the time")
    ax.legend(loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=len(ways))
    return fig


# --- memory -------------------------------------------------------------------------


def draw_memory(watches):
    "MB alive after each operator of a step, forward and backward: {label: meter.Memory}."
    fig, ax = show.axes(figsize=(6.6, 3.4))
    top = max(w.peak for w in watches.values()) / 1e6
    for k, (name, w) in enumerate(watches.items()):
        at = w.marks[0][0]
        xs = [i / at if i <= at else 1 + (i - at) / (len(w.line) - at) for i in range(len(w.line))]
        peak = w.peak / 1e6
        label = f"{name}: peak {peak:,.0f} MB" if peak >= 100 else f"{name}: peak {peak:.3g} MB"
        ax.plot(xs, [b / 1e6 for _, b in w.line], color=show.COLOURS[k], lw=1.4, label=label)
    ax.axvline(1, color=show.COLOURS[6], lw=1, ls="--")
    for x, name in ((0.5, "forward"), (1.5, "backward")):
        ax.text(x, 1.04 * top, name, ha="center", color=show.COLOURS[6])
    ax.set(xlim=(0, 2), ylim=(0, 1.14 * top), ylabel="MB alive")
    ax.set_xticks([0, 1, 2], ["start", "loss", "end"])
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=1 if len(watches) > 2 else 2)
    return fig


def beaten(points):
    "The labels of the points (bytes, value) for which another is as good in both and better in one."

    def better(q, p):
        return q[0] <= p[0] and q[1] <= p[1] and q != p

    return {k for k, p in points.items() if any(better(q, p) for q in points.values())}


def draw_frontier(points, ylabel="ms a step"):
    "Memory against time, {label: (bytes, value)}; points that another beats are hollow."
    fig, ax = show.axes(figsize=(6.8, 3.8))
    worse = beaten(points)
    line = sorted(p for k, p in points.items() if k not in worse)
    ax.plot([b / 1e6 for b, _ in line], [v for _, v in line], color=show.COLOURS[6], lw=1, ls="--", zorder=1)
    wide, high = (max(p[i] for p in points.values()) for i in (0, 1))
    for label, (size, value) in points.items():
        face = "white" if label in worse else show.COLOURS[0]
        ax.plot([size / 1e6], [value], "o", ms=8, mec=show.COLOURS[0], mfc=face, label=label)
        # Below the point where another stands closely above it.
        crowded = any(0 < v - value < 0.15 * high and abs(b - size) < 0.3 * wide for b, v in points.values())
        ax.annotate(label, (size / 1e6, value), (0, -9 if crowded else 8), textcoords="offset points",
                    ha="left" if size < 0.2 * wide else "center", va="top" if crowded else "bottom",
                    fontsize=9)  # fmt: skip
    ax.set(xlabel="MB at the peak", ylabel=ylabel, xlim=(0, 1.15 * wide / 1e6), ylim=(0, 1.15 * high))
    return fig


def draw_budget(points, whole):
    "The fewest FLOPs for each budget, in % of `whole`: `points` are those of `fusion_budget.frontier`."
    fig, ax = show.axes(figsize=(6.4, 3.2))
    xs, ys = ([f(p) for p in sorted(points)] for f in (lambda p: p[0] / 1e3, lambda p: 100 * p[1] / whole))
    ax.step([*xs, 1.08 * xs[-1]], [*ys, ys[-1]], where="post", color=show.COLOURS[0], lw=1.2)
    ax.plot(xs, ys, "o", color=show.COLOURS[0], ms=4)
    ax.set(xlabel="budget, kB", ylabel="% more FLOPs", ylim=(-0.5, None))
    return fig


def draw_attention(found):
    "Memory and time of attention against sequence length, {label: [(length, bytes, seconds), …]}."
    fig, (left, right) = show.axes(1, 2, figsize=(7.4, 3.4))
    for label, rows in found.items():
        lengths, sizes, seconds = zip(*rows, strict=True)
        left.loglog(lengths, [b / 1e6 for b in sizes], "o-", label=label)
        right.loglog(lengths, [1e3 * s for s in seconds], "o-", label=label)
    for ax, name in ((left, "MB at the peak"), (right, "ms")):
        _plain(ax, lengths[0], lengths[-1])
        ax.tick_params("x", rotation=45)
        ax.set(xlabel="positions", ylabel=name)
    handles, labels = left.get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside upper center", ncols=len(labels))
    return fig


# --- text ---------------------------------------------------------------------------

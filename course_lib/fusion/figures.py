"The figures of lesson fusion: functions of plain data that return a matplotlib figure."

from course_lib import machine, recorded, show

BLUE, ORANGE, GREEN, GREY = show.COLOURS[0], show.COLOURS[1], show.COLOURS[2], show.COLOURS[6]
# float32 outside the tensor cores: half of the datasheet's 67 TFLOP/s, which counts a multiply-add as two.
H200_VECTOR = 33.5e12
HERE, H200 = "this machine", "H200"


def draw_bars(values, unit):
    "Horizontal bars of {label: value}, each with its value at its end."
    fig, ax = show.axes(figsize=(6.4, 1.0 + 0.36 * len(values)))
    ax.barh(list(values), list(values.values()), color=BLUE)
    for row, v in enumerate(values.values()):
        ax.text(v, row, f" {show.number(v)}", va="center")
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.set(xlabel=unit, xlim=(0, 1.15 * max(values.values())))
    return fig


def rates(where):
    "(bytes/s, simple operations/s, seconds for a launch) of this machine or of an H200."
    if where == HERE:
        here = machine.peaks()
        return here.bytes, H200_VECTOR if machine.has_gpu() else here.flops / 2, here.launch
    noted = [recorded.get(f"roofline.{name}") for name in ("copy_tbps", "launch_us")]
    copy, launch = (f["value"] for f in noted) if all(noted) else (4.2, 5.0)
    return copy * 1e12, H200_VECTOR, launch * 1e-6


def explore_chain(ops=10, elements=2**24, flops=1, where=H200):
    """A chain of `ops` operators on float32 tensors, each of `flops` FLOPs an element, on HERE or H200.

    Eager, each operator reads and writes a tensor and is launched. Fused, the chain reads one and writes one,
    in one launch. The longest of launch, bytes and arithmetic is the time. Seconds by the chain's length.
    """
    rate, arithmetic, launch = rates(where)

    def seconds(n):
        parts = {"launching": launch, "moving bytes": 8 * elements / rate,
                 "arithmetic": n * flops * elements / arithmetic}  # fmt: skip
        return max(parts.values()), max(parts, key=parts.get)

    lengths = sorted({*range(1, 17), 24, 32, 48, 64, 96, 128, 192, 256, ops})
    return {
        "ops": ops,
        "flops": flops,
        "size": f"{elements:,} elements, {where}",
        "lengths": lengths,
        "eager": [n * seconds(1)[0] for n in lengths],
        "fused": [seconds(n)[0] for n in lengths],
        "bound": seconds(ops)[1],
    }


def view_chain(data):
    "The explorer's figure: microseconds against the length of the chain, eager and fused."
    fig, ax = show.axes(figsize=(6.4, 3.4))
    at = data["lengths"].index(data["ops"])
    for name in ("eager", "fused"):
        line = [1e6 * s for s in data[name]]
        ax.loglog(data["lengths"], line, label=name)
        ax.plot([data["ops"]], [line[at]], "o", color=ax.lines[-1].get_color())
    ratio = data["eager"][at] / data["fused"][at]
    title = f"{data['ops']} operators of {data['flops']} FLOP: fused {1e6 * data['fused'][at]:,.3g} µs, "
    ax.set_title(f"{title}{ratio:.3g}× faster; the limit is {data['bound']}", fontsize=10)
    _plain(ax, data["lengths"][0], data["lengths"][-1])
    ax.set(xlabel=f"operators in the chain ({data['size']})", ylabel="µs")
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


def draw_race(rates):
    "GB/s of each chain: {chain: {way: GB/s}}, a group of bars for each chain."
    ways = list(next(iter(rates.values())))
    fig, ax = show.axes(figsize=(6.6, 0.9 + 0.42 * len(rates)))
    high = 0.8 / len(ways)
    for k, way in enumerate(ways):
        places = [i + high * (k - (len(ways) - 1) / 2) for i in range(len(rates))]
        ax.barh(places, [row[way] for row in rates.values()], height=high, label=way, color=show.COLOURS[k])
    ax.set_yticks(range(len(rates)), list(rates))
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.set(xlabel="GB/s: the bytes that one kernel must move, over the time")
    ax.legend(loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=len(ways))
    return fig


def draw_breaks(lines, broken):
    "A function's source with a colour for each graph; `broken` are the indices of lines that break one."
    fig, ax = show.axes(figsize=(6.4, 0.3 + 0.3 * len(lines)))
    graph = 0
    for row, line in enumerate(lines):
        if row:
            ax.axhspan(row - 0.5, row + 0.5, xmax=0.7, color=show.COLOURS[graph], alpha=0.2, lw=0)
        if row in broken:
            ax.text(0.82, row, "◀ the graph ends here", color=ORANGE, va="center", fontsize=9)
            graph += 1
        ax.text(0.01, row, line, va="center", family="monospace", fontsize=9)
    ax.set(xlim=(0, 1.15), ylim=(len(lines) - 0.5, -0.5))
    ax.axis("off")
    return fig


def draw_attention(found):
    "Memory and time of attention against sequence length, {label: [(length, bytes, seconds), …]}."
    fig, panels = show.axes(1, 2, figsize=(7.4, 3.2))
    for label, rows in found.items():
        lengths, sizes, seconds = zip(*rows, strict=True)
        panels[0].loglog(lengths, [b / 1e6 for b in sizes], "o-", label=label)
        panels[1].loglog(lengths, [1e3 * s for s in seconds], "o-", label=label)
    for ax, name in zip(panels, ("MB at the peak", "ms, forward and backward"), strict=True):
        _plain(ax, lengths[0], lengths[-1])
        ax.set(xlabel="positions", ylabel=name)
    handles, labels = panels[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside upper center", ncols=len(labels))
    return fig

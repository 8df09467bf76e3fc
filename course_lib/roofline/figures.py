"The figures of lesson roofline: functions of plain data that return a matplotlib figure."

import itertools
import os

from course_lib import recorded, show
from course_lib.roofline import CLASSES

NAMES = {"contraction": "contraction", "normalisation": "normalisation", "elementwise": "element-wise"}
BLUE, ORANGE, GREEN, GREY = show.COLOURS[0], show.COLOURS[1], show.COLOURS[2], show.COLOURS[6]


def recorded_classes(name):
    "A recorded figure of each class, {class: value}, or None; `name` has a {} for the class."
    found = {c: recorded.get("roofline." + name.format(c)) for c in CLASSES}
    replaced = "COURSE_RECORDING" in os.environ  # by those of this run
    return {c: f["value"] for c, f in found.items()} if all(found.values()) and not replaced else None


def draw_classes(*panels):
    "Stacked bars: panels of (label of the axis, {label: {class: value}}), the first bar on top."
    height = 1.2 + 0.4 * len(panels[0][1])
    fig, axes = show.axes(1, len(panels), figsize=(6.8, height), sharey=True, squeeze=False)
    for ax, (xlabel, bars) in zip(axes[0], panels, strict=True):
        totals = [sum(b.values()) for b in bars.values()]
        left = [0] * len(bars)
        for c, colour in zip(next(iter(bars.values())), show.COLOURS, strict=False):
            widths = [b[c] for b in bars.values()]
            ax.barh(list(bars), widths, left=left, color=colour, label=NAMES.get(c, c))
            for row, (x, w) in enumerate(zip(left, widths, strict=True)):
                if w >= 0.07 * len(panels) * max(totals):
                    ax.text(
                        x + w / 2, row, show.number(w), ha="center", va="center", color="white", fontsize=9
                    )
            left = [x + w for x, w in zip(left, widths, strict=True)]
        for row, total in enumerate(totals if "%" not in xlabel else ()):
            ax.text(total, row, f" {show.number(total)}", va="center", fontsize=9)
        ax.grid(False)
        ax.set(xlim=(0, max(totals) * (1 if "%" in xlabel else 1.25)), xlabel=xlabel)
    axes[0][0].invert_yaxis()
    fig.legend(*axes[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return fig


def draw_sweep(rates):
    "TFLOP/s against the side of a square matmul, {n: FLOP/s}: all sizes logarithmic, the largest linear."
    fig, (whole, top) = show.axes(1, 2, figsize=(7.6, 3.4), width_ratios=(3, 2))
    ns, ys = list(rates), [r / 1e12 for r in rates.values()]
    roof = max(ys)
    whole.loglog(ns, ys, "o-", base=2)
    whole.set_yscale("log", base=10)
    top.plot([f"{n:,}" for n in ns[-4:]], ys[-4:], "o-")
    for ax in (whole, top):
        ax.axhline(roof, color=ORANGE, ls="--", lw=1)
    whole.text(ns[0], roof * 1.15, f"the roof: {roof:.3g} TFLOP/s, cold", color=ORANGE)
    whole.set_xticks(ns[::2], [f"{n:,}" for n in ns[::2]])
    whole.set(xlabel="side n of an n × n matmul", ylabel="TFLOP/s, logarithmic", ylim=(None, 3 * roof))
    top.set(xlabel="the four largest", ylabel="TFLOP/s, linear", ylim=(0, 1.15 * roof))
    return fig


def draw_copies(curves):
    "GB/s against the size of a buffer, {label: {bytes: bytes/s}}."
    fig, ax = show.axes()
    for label, rates in curves.items():
        ax.semilogx(list(rates), [r / 1e9 for r in rates.values()], "o-", label=label)
    ticks = {2**14: "16 kB", 2**18: "256 kB", 2**22: "4 MB", 2**26: "64 MB", 2**30: "1 GB"}
    sizes = {b for rates in curves.values() for b in rates}
    ticks = {b: t for b, t in ticks.items() if min(sizes) <= b <= max(sizes)}
    ax.set_xticks(list(ticks), list(ticks.values()))
    ax.minorticks_off()
    ax.set(xlabel="bytes of one buffer", ylabel="GB/s, read + written", ylim=(0, None))
    ax.legend()
    return fig


def draw_roofline(machines, points=(), hollow=False):
    "Roofs of {name: (FLOP/s, bytes/s)} and points (label, FLOP per byte, FLOP/s), `hollow` where predicted."
    fig, ax = show.axes(figsize=(7.2, 4.4))
    low, high = 2.0**-7, 2.0**14
    for colour, (name, (flops, nbytes, *_)) in zip(show.COLOURS, machines.items(), strict=False):
        ridge = flops / nbytes
        label = f"{name}: ridge at {ridge:.3g} FLOP/byte"
        ys = [y / 1e12 for y in (low * nbytes, flops, flops)]
        ax.loglog([low, ridge, high], ys, color=colour, label=label)
    points, left = sorted(points, key=lambda p: p[1]), False
    for (label, x, y), after in itertools.zip_longest(points, points[1:]):
        ax.plot([x], [y / 1e12], "o", mfc="white" if hollow else GREEN, mec=GREEN, ms=6, zorder=3)
        near = after is not None and after[1] < 8 * x
        flat = near and 0.7 < after[2] / y < 1.4
        left = not left and near and not flat and after[2] < 2.5 * y
        at, side = ((0, 6 if hollow else -14), "center") if flat else ((8, -9), "left")
        if left:
            at, side = (-7, 5 if hollow else -9), "right"
        ax.annotate(label, (x, y / 1e12), xytext=at, textcoords="offset points", fontsize=8, ha=side,
                    bbox={"fc": "white", "ec": "none", "pad": 0.4, "alpha": 0.85})  # fmt: skip
    ax.margins(y=0.1)
    ax.set(xlabel="arithmetic intensity, FLOP per byte", ylabel="TFLOP/s", xlim=(low, high))
    ax.set_xticks([0.1, 1, 10, 100, 1000], ["0.1", "1", "10", "100", "1,000"])
    ax.legend(loc="lower right")
    return fig


def draw_batches(times, costs, flops_roof, bytes_roof, crossing):
    "Milliseconds of a linear layer against its batch: {batch: s}, and what {batch: (FLOPs, bytes)} need."
    memory = {b: c[1] / bytes_roof for b, c in costs.items()}
    compute = {b: c[0] / flops_roof for b, c in costs.items()}
    fig, ax = show.axes()
    for ys, style, label in (
        (memory, {"color": ORANGE, "ls": "--"}, "least time for the bytes"),
        (compute, {"color": BLUE, "ls": "--"}, "least time for the FLOPs"),
        (times, {"color": GREEN, "marker": "o"}, "measured"),
    ):
        ax.loglog(list(ys), [1e3 * y for y in ys.values()], base=2, label=label, **style)
    ax.set_yscale("log", base=10)
    if crossing:
        ax.axvline(crossing, color=GREY, lw=1)
        ax.text(crossing, ax.get_ylim()[0], f" {crossing} rows: the crossing", va="bottom", color=GREY)
    ax.set_xticks(list(times)[::2], [f"{b:,}" for b in list(times)[::2]])
    ax.set(xlabel="rows in the batch", ylabel="ms")
    ax.legend(loc="upper left")
    return fig


def draw_cold(seconds, rates, samples):
    "One matmul after a pause: TFLOP/s, MHz, W by seconds; samples are (seconds, MHz, W, bits, W allowed)."
    fig, axes = show.axes(1, 3, figsize=(7.8, 2.8))
    at = [s for s in samples if 0 <= s[0] <= seconds[-1]]
    curves = [(seconds, [r / 1e12 for r in rates])] + [
        ([s[0] for s in at], [s[i] for s in at]) for i in (1, 2)
    ]
    for ax, (xs, ys), label in zip(axes, curves, ("TFLOP/s", "clock, MHz", "power, W"), strict=True):
        ax.plot(xs, ys, lw=1)
        ax.set(xlabel="seconds", ylabel=label, ylim=(0, 1.15 * max(ys, default=1)))
    for *_, allowed in at[:1]:
        axes[2].axhline(allowed, color=ORANGE, ls="--", lw=1, label=f"{allowed:.0f} W allowed")
        axes[2].legend(loc="lower right")
    return fig


def draw_rates(rates, unit):
    "Horizontal bars of {label: value}, each with its value at its end."
    fig, ax = show.axes(figsize=(6.4, 1.0 + 0.34 * len(rates)))
    ax.barh(list(rates), list(rates.values()), color=BLUE)
    for row, v in enumerate(rates.values()):
        ax.text(v, row, f" {v:.3g}", va="center")
    ax.invert_yaxis()
    ax.set(xlabel=unit, xlim=(0, max(rates.values()) * 1.15))
    return fig


def view_run(data):
    "The explorer's figure: days against GPUs, with the chosen run marked."
    fig, ax = show.axes(figsize=(6.4, 4.0))
    for (m, curve), style in zip(data["curves"].items(), (":", "--", "-."), strict=False):
        chosen = m == data["mfu"]
        ax.loglog(data["counts"], curve, color=BLUE if chosen else GREY, lw=2 if chosen else 1,
                  ls="-" if chosen else style, label=f"MFU {m:.0%}")  # fmt: skip
    ax.plot(data["gpus"], data["days"], "o", color=ORANGE, ms=8)
    for days, name in ((1, "a day"), (30, "a month"), (365, "a year")):
        ax.axhline(days, color=GREY, lw=0.6)
        ax.text(data["counts"][0], days * 1.08, name, fontsize=8, color=GREY, va="bottom")
    run = f"$10^{{{data['log10_flops']:g}}}$ FLOPs on {data['gpus']:,} GPUs at {data['mfu']:.0%}"
    days = f"{data['days']:,.{0 if data['days'] >= 10 else 1}f} days"
    ax.set(xlabel="GPUs", ylabel="days", title=f"{run}: {days}")
    ax.legend()
    return fig

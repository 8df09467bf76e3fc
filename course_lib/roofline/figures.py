"The figures and tables of lesson roofline: functions of plain data that return a matplotlib figure, or text."

from course_lib import recorded, show
from course_lib.meter.operators import CLASSES

NAMES = {"contraction": "contraction", "normalisation": "normalisation", "elementwise": "element-wise"}


recorded_peaks = recorded.peaks


def recorded_shares(mode):
    'The recorded time shares of the encoder, "eager" or "compiled": {class: %}, or None.'
    found = {c: recorded.get(f"roofline.encoder_time_share.{c}.{mode}") for c in CLASSES}
    return {c: f["value"] for c, f in found.items()} if all(found.values()) else None


def table(header, rows):
    "Rows of text and numbers as lines in columns, numbers at three digits; the first column to the left."
    cells = [
        header,
        *([c if isinstance(c, str) else recorded.shown({"value": c}) for c in row] for row in rows),
    ]
    wide = [max(len(r[i]) for r in cells) for i in range(len(header))]
    lines = ["  ".join((c.rjust if i else c.ljust)(wide[i]) for i, c in enumerate(r)) for r in cells]
    return "\n".join(line.rstrip() for line in lines)


def _axes(**kw):
    import matplotlib.pyplot as plt

    return plt.subplots(**kw)


def draw_sweep(rates, peak):
    "FLOP/s against the side of a square matmul, [(n, rate), …], with the measured roof `peak`."
    fig, ax = _axes()
    ns, ys = zip(*rates, strict=True)
    ax.loglog(ns, ys, "o-")
    ax.axhline(peak, color=show.COLOURS[1], ls="--", lw=1)
    ax.text(ns[0], peak * 1.15, "the roof", color=show.COLOURS[1])
    ax.set_xscale("log", base=2)
    ax.set_xticks(ns, [f"{n:,}" for n in ns])
    ax.set(xlabel="side n of an n × n matmul", ylabel="FLOP/s", ylim=(None, 3 * max(peak, *ys)))
    return fig


def draw_roofline(machines, points=(), hollow=False):
    "Roofs of {name: Peaks}, and points (label, intensity, FLOP/s); `hollow` where they are only predicted."
    fig, ax = _axes(figsize=(6.8, 4.4))
    low, high = 2.0**-6, 2.0**14
    for colour, (name, p) in zip(show.COLOURS, machines.items(), strict=False):
        ridge = p.flops / p.bytes
        label = f"{name}: ridge at {ridge:.3g} FLOP/byte"
        ax.loglog([low, ridge, high], [low * p.bytes, p.flops, p.flops], color=colour, label=label)
    # Labels to the right below, or to the left above where those of the lesson's operators would collide:
    # predicted points lie on the roof, close to each other; measured ones lie below it.
    above = (1, 3, 4) if hollow else (3, 4)
    for i, (label, x, y) in enumerate(sorted(points, key=lambda point: point[1])):
        face = "white" if hollow else show.COLOURS[2]
        ax.plot([x], [y], "o", mfc=face, mec=show.COLOURS[2], ms=6, zorder=3)
        at, side = ((-7, 4), "right") if i in above else ((7, -10), "left")
        ax.annotate(label, (x, y), xytext=at, textcoords="offset points", fontsize=8, ha=side)
    ax.margins(y=0.08)
    ax.set(xlabel="arithmetic intensity, FLOP per byte", ylabel="FLOP/s", xlim=(low, high))
    ax.set_xticks([0.1, 1, 10, 100, 1000], ["0.1", "1", "10", "100", "1,000"])
    ax.legend(loc="lower right")
    return fig


def draw_shares(bars):
    "Stacked bars of {label: {class: %}}, the first label on top."
    fig, ax = _axes(figsize=(6.8, 1.1 + 0.4 * len(bars)))
    for i, name in enumerate(CLASSES):
        left = [sum(b[c] for c in CLASSES[:i]) for b in bars.values()]
        widths = [b[name] for b in bars.values()]
        ax.barh(list(bars), widths, left=left, color=show.COLOURS[i], label=NAMES[name])
        for row, (x, w) in enumerate(zip(left, widths, strict=True)):
            if w >= 5:
                ax.text(x + w / 2, row, f"{w:.3g}", ha="center", va="center", color="white", fontsize=9)
    ax.invert_yaxis()
    ax.grid(False)
    ax.set(xlim=(0, 100), xlabel="% of the whole")
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
    return fig


def draw_rates(rates, unit="TFLOP/s"):
    "Horizontal bars of {label: value}, each with its value at its end."
    fig, ax = _axes(figsize=(6.4, 1.0 + 0.34 * len(rates)))
    ax.barh(list(rates), list(rates.values()), color=show.COLOURS[0])
    for row, v in enumerate(rates.values()):
        ax.text(v, row, f" {v:.3g}", va="center")
    ax.invert_yaxis()
    ax.grid(False)
    ax.set(xlim=(0, 1.15 * max(rates.values())), xlabel=unit)
    return fig


def draw_timeline(events, unit="µs"):
    "Events by lane, coloured by kind."
    lanes = sorted({e.lane for e in events}, key=lambda lane: (lane != "cpu", len(lane), lane))
    fig, ax = _axes(figsize=(6.8, 1.2 + 0.35 * len(lanes)))
    colours = {"launch": show.COLOURS[6], "compute": show.COLOURS[0], "memory": show.COLOURS[1]}
    for kind, colour in colours.items():
        found = [(lanes.index(e.lane), e.duration, e.start) for e in events if e.kind == kind]
        rows, widths, left = zip(*found, strict=True) if found else ((), (), ())
        ax.barh(rows, widths, left=left, height=0.7, color=colour, edgecolor="white", lw=0.5, label=kind)
    ax.set_yticks(range(len(lanes)), lanes)
    ax.invert_yaxis()
    ax.grid(False)
    ax.set(xlabel=unit)
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
    return fig


def view_run(data):
    "The explorer's figure: days against GPUs, with the chosen run marked."
    fig, ax = _axes(figsize=(6.4, 4.0))
    grey = show.COLOURS[6]
    for m, curve in data["curves"].items():
        chosen = m == data["mfu"]
        ax.loglog(data["counts"], curve, color=show.COLOURS[0] if chosen else grey, lw=2 if chosen else 1,
                  ls="-" if chosen else ":", label=f"MFU {m:.0%}")  # fmt: skip
    ax.plot([data["gpus"]], [data["days"]], "o", color=show.COLOURS[1], ms=8)
    for days, name in ((1, "a day"), (30, "a month"), (365, "a year")):
        ax.axhline(days, color=grey, lw=0.6)
        ax.text(data["counts"][0], days * 1.08, name, fontsize=8, color=grey, va="bottom")
    ax.set(xlabel="GPUs", ylabel="days")
    run = f"$10^{{{data['log10_flops']:g}}}$ FLOPs on {data['gpus']:,} GPUs at {data['mfu']:.0%}"
    ax.set_title(f"{run}: {data['days']:,.{0 if data['days'] >= 10 else 1}f} days")
    ax.legend()
    return fig

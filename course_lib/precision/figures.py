"The figures of lesson precision: functions of plain data that return a matplotlib figure."

import math

from course_lib import precision, show

FIELDS = {"sign": show.COLOURS[6], "exponent": show.COLOURS[1], "fraction": show.COLOURS[0]}
FORMAT_COLOURS = dict(zip(precision.FORMATS, show.COLOURS, strict=True))


def _colours(labels):
    "{label: colour}: a format has the same colour in every figure, other labels take what is left."
    fixed = {label: FORMAT_COLOURS[label] for label in labels if label in FORMAT_COLOURS}
    left = (c for c in (show.COLOURS[1], *show.COLOURS[:1:-1]) if c not in fixed.values())
    return {label: fixed.get(label) or next(left) for label in labels}


def draw_lines(lines, xlabel, ylabel, log="", styles=None, ylim=None):
    "Curves of {label: ys} or {label: (xs, ys)}; `log` names logarithmic axes; `styles` is {label: style}."
    fig, ax = show.axes()
    colours = _colours(lines)
    for label, ys in lines.items():
        xs, ys = ys if isinstance(ys, tuple) else (range(len(ys)), ys)
        style = (styles or {}).get(label, "-")
        ax.plot(xs, ys, style, color=colours[label], label=label, lw=3 if style == "--" else 1.5)
    ax.set(xlabel=xlabel, ylabel=ylabel)
    for axis in log:
        getattr(ax, f"set_{axis}scale")("log", base=2 if axis == "x" else 10)
    if ylim:
        ax.set_ylim(ylim)
    ax.legend()
    return fig


def _ranges(ax, formats):
    "A bar for each format from its smallest number to its largest, subnormal numbers in a light tone."
    for row, f in enumerate(formats):
        low, normal, high = (math.log2(v) for v in (f.smallest, f.normal, f.largest))
        ax.barh(row, high - normal, left=normal, color=show.COLOURS[1])
        ax.barh(row, normal - low, left=low, color=show.COLOURS[1], alpha=0.4)
    ax.set_yticks(range(len(formats)), [f.name for f in formats])
    ax.grid(False)


def draw_formats():
    "The bits of each format, field by field, and the powers of two that it reaches."
    formats = list(precision.FORMATS.values())
    fig, (left, right) = show.axes(ncols=2, figsize=(9.2, 3.4), sharey=True)
    for row, f in enumerate(formats):
        start = 0
        for field, width in (("sign", 1), ("exponent", f.exponent), ("fraction", f.fraction)):
            label = field if row == 0 else None
            left.barh(row, width, left=start, color=FIELDS[field], edgecolor="white", label=label)
            left.text(start + width / 2, row, str(width), ha="center", va="center", color="white", fontsize=9)
            start += width
        right.text(math.log2(f.largest) + 4, row, f"up to {f.largest:.3g}", va="center", fontsize=9)
    _ranges(right, formats)
    left.invert_yaxis()
    left.set(xlabel="bits")
    left.grid(False)
    right.set(xlabel="power of two (light: subnormal, fewer digits)", xlim=(-155, 215))
    left.legend(loc="lower right")
    return fig


def draw_number_line(values):
    "Left: the positive numbers of {format: values} up to 8. Right: the distance to the next number, by size."
    fig, (left, right) = show.axes(ncols=2, figsize=(9.2, 3.4))
    for row, (name, found) in enumerate(values.items()):
        left.plot(found, [row] * len(found), "|", ms=16, mew=1.2, color=FORMAT_COLOURS[name])
    left.set_yticks(range(len(values)), list(values))
    left.set(xlim=(-0.15, 8.15), ylim=(-0.6, len(values) - 0.4), xlabel="number (not negative)")
    left.grid(False)
    for name, f in precision.FORMATS.items():
        top = math.floor(math.log2(f.largest))
        powers = [p for p in range(-30, 31) if math.log2(f.smallest) <= p <= top]
        gaps = [max(2.0**p, f.normal) * 2.0**-f.fraction / 2.0**p for p in powers]
        style, lw = ("--", 2.5) if name == "tf32" else ("-", 1.5)
        right.plot(powers, gaps, style, color=FORMAT_COLOURS[name], label=name, lw=lw)
    right.set_yscale("log")
    right.set(xlabel="size of the number, power of two", ylabel="distance to the next / number")
    right.legend(ncols=2, fontsize=8, loc="lower left", bbox_to_anchor=(0.0, 0.12))
    return fig


def view_bits(data):
    "The explorer's figure: the bits of one number in each format, the number stored, its relative error."
    rows = data["rows"]
    fig, ax = show.axes(figsize=(9.6, 3.6))
    end = max(len(r["bits"]) for r in rows)
    for y, r in enumerate(rows):
        for x, bit in enumerate(r["bits"]):
            field = "sign" if x == 0 else "exponent" if x <= r["exponent"] else "fraction"
            ax.text(x, y, bit, color=FIELDS[field], ha="center", va="center", family="monospace", fontsize=12)
        error = f"  off by {r['error']:.1e}" if r["error"] else "  exact"
        state = "" if r["state"] == "normal" else f"  ({r['state']})"
        ax.text(end + 0.5, y, f"{r['stored']:.9g}{error}{state}", va="center", fontsize=11)
    for x, field in enumerate(FIELDS):
        ax.text(7 * x, -1, field, color=FIELDS[field], fontsize=10, va="center")
    ax.set_yticks(range(len(rows)), [r["name"] for r in rows])
    ax.set(xlim=(-1, 60), ylim=(len(rows) - 0.5, -1.5), xticks=[])
    ax.tick_params(left=False)
    ax.grid(False)
    for side in ("left", "bottom"):
        ax.spines[side].set_visible(False)
    times = f" × 2^{data['power']} = {data['wanted']:.9g}" if data["power"] else ""
    ax.set_title(f"{data['number']:.9g}{times}")
    return fig


def draw_exponents(gradients, names=("fp16", "bf16", "e5m2", "e4m3")):
    "How often each power of two occurs among gradients, {label: tensor}, above the ranges of the formats."
    n = len(gradients)
    ratios = [2] * n + [1.4]
    fig, axes = show.axes(nrows=n + 1, figsize=(7.6, 1.7 * n + 1.7), sharex=True, height_ratios=ratios)
    for ax, (label, g) in zip(axes, gradients.items(), strict=False):
        powers = g[g != 0].abs().double().log2().floor().tolist()
        edges = [p - 0.5 for p in range(-64, 20)]
        ax.hist(powers, bins=edges, weights=[100 / len(powers)] * len(powers), color=show.COLOURS[0])
        ax.set(ylabel="% of gradients", title=label)
    _ranges(axes[-1], [precision.FORMATS[name] for name in names])
    axes[-1].invert_yaxis()
    axes[-1].set(xlabel="power of two (light: subnormal, fewer digits)", xlim=(-64, 20))
    return fig


def draw_scaling(losses, scales):
    "Losses of runs, {label: losses}, and below them the loss scales of the last of these runs."
    fig, (top, bottom) = show.axes(nrows=2, figsize=(6.4, 4.2), sharex=True)
    colours = _colours(losses)
    for label, values in losses.items():
        top.plot(values, color=colours[label], label=label)
    bottom.plot(scales, drawstyle="steps-post", color=top.lines[-1].get_color())
    top.legend()
    top.set(ylabel="loss")
    bottom.set(ylabel="loss scale", xlabel="step")
    bottom.set_yscale("log", base=2)
    return fig


FLOW = {  # name: (x, y, text, format)
    "master": (0, 2, "master weights", "fp32"),
    "low": (1, 2, "weights, rounded", "16 bits"),
    "matmul": (2, 2, "matmul\nadds in fp32", "gives 16 bits"),
    "loss": (3, 2, "norms, softmax,\nloss", "fp32"),
    "scaled": (3, 1, "loss × scale", "fp32"),
    "backward": (2, 1, "backward\nadds in fp32", "gives 16 bits"),
    "grads": (1, 1, "gradients\n÷ scale, clipped", "fp32"),
    "step": (0, 1, "optimizer", "fp32"),
}


def draw_flow():
    "One training step in mixed precision: what is kept in which format, and where it is cast."
    fig, ax = show.axes(figsize=(9.2, 3.2))
    colours = {"fp32": show.COLOURS[0], "16 bits": show.COLOURS[1], "gives 16 bits": show.COLOURS[1]}
    for x, y, words, kind in FLOW.values():
        box = {"boxstyle": "round,pad=0.5", "facecolor": "white", "edgecolor": colours[kind], "linewidth": 2}
        ax.text(2.4 * x, 1.5 * y, f"{words}\n({kind})", ha="center", va="center", bbox=box, fontsize=10)
    names, labels = list(FLOW), ("cast", "", "cast", "", "cast", "cast", "", "")
    for a, b, label in zip(names, [*names[1:], names[0]], labels, strict=True):
        (xa, ya), (xb, yb) = FLOW[a][:2], FLOW[b][:2]
        dx, dy = 0.36 * (xb - xa), 0.34 * (yb - ya)
        start, end = (2.4 * (xa + dx), 1.5 * (ya + dy)), (2.4 * (xb - dx), 1.5 * (yb - dy))
        ax.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": show.COLOURS[6], "lw": 1.5})
        ax.text(
            1.2 * (xa + xb), 0.75 * (ya + yb) + 0.16, label, ha="center", fontsize=9, color=show.COLOURS[6]
        )
    ax.set(xlim=(-1.2, 8.4), ylim=(0.9, 3.6))
    ax.axis("off")
    return fig


def draw_contest(runs, width=20):
    """{arm: [(losses, valid, seconds) for each seed]}: loss against time, and distance from fp32 by seed.

    `width` is the number of steps that the curve of the training loss is averaged over.
    """
    fig, (left, right) = show.axes(ncols=2, figsize=(9.2, 3.6))
    for arm, found in runs.items():
        losses, _, seconds = found[0]
        smooth = [sum(losses[j : j + width]) / width for j in range(len(losses) - width + 1)]
        at = [seconds * (j + width) / len(losses) for j in range(len(smooth))]
        left.plot(at, smooth, color=FORMAT_COLOURS[arm], label=arm)
        if arm != "fp32":
            apart = [own[1] - base[1] for own, base in zip(found, runs["fp32"], strict=True)]
            right.plot(apart, [arm] * len(apart), "o", color=FORMAT_COLOURS[arm], alpha=0.7)
    left.set(xlabel="seconds of training (first seed)", ylabel=f"training loss (mean of {width} steps)")
    left.legend()
    right.axvline(0, color=show.COLOURS[6], lw=1)
    base = [run[1] for run in runs["fp32"]]
    spread = (max(base) - min(base)) / 2
    right.axvspan(-spread, spread, color=show.COLOURS[6], alpha=0.12, lw=0)
    right.margins(y=0.4)
    right.set(xlabel="validation loss minus fp32's, same seed\n(band: fp32's own range over the seeds)")
    right.locator_params(axis="x", nbins=5)
    return fig


def draw_fp8(parts):
    "Times by width, {width: {part: ms}}: the bf16 matmul, then the fp8 one, alone and with each cast."
    fig, ax = show.axes(figsize=(7.2, 3.4))
    n = len(parts)
    bf16, fp8, *casts = next(iter(parts.values()))
    bars = [bf16], [fp8], *([fp8, cast] for cast in casts)
    for i, names in enumerate(bars):
        at = [row + 0.8 * (i - (len(bars) - 1) / 2) / len(bars) for row in range(n)]
        times = [sum(ms[name] for name in names) / ms[bf16] for ms in parts.values()]
        drawn = ax.bar(at, times, 0.8 / len(bars), label=" + ".join(names))
        ax.bar_label(drawn, fmt="%.2g", fontsize=9)
    ax.axhline(1, color=show.COLOURS[6], lw=1)
    ax.set_xticks(range(n), [f"{w:,}" for w in parts])
    ax.margins(y=0.1)
    ax.set(xlabel="width of the layer", ylabel=f"time / time of {bf16}")
    ax.legend()
    return fig

"The figures of lesson precision: functions of plain data that return a matplotlib figure."

import math

from course_lib import precision, show

FIELDS = {"sign": show.COLOURS[6], "exponent": show.COLOURS[1], "fraction": show.COLOURS[0]}


def draw_lines(lines, xlabel, ylabel, log="", title="", styles=None):
    "Curves of {label: ys} or {label: (xs, ys)}; `log` names logarithmic axes; `styles` is {label: style}."
    fig, ax = show.axes()
    for label, ys in lines.items():
        xs, ys = ys if isinstance(ys, tuple) else (range(len(ys)), ys)
        ax.plot(xs, ys, (styles or {}).get(label, "-"), label=label)
    ax.set(xlabel=xlabel, ylabel=ylabel, title=title)
    for axis in log:
        getattr(ax, f"set_{axis}scale")("log", base=2 if axis == "x" else 10)
    ax.legend()
    return fig


def draw_formats(formats=None):
    "The bits of each format, field by field, and the powers of two it reaches."
    formats = formats or precision.FORMATS
    fig, (left, right) = show.axes(ncols=2, figsize=(9.2, 3.1), sharey=True)
    for row, f in enumerate(formats.values()):
        start = 0
        for field, width in (("sign", 1), ("exponent", f.exponent), ("fraction", f.fraction)):
            label = field if row == 0 else None
            left.barh(row, width, left=start, color=FIELDS[field], edgecolor="white", label=label)
            left.text(start + width / 2, row, str(width), ha="center", va="center", color="white", fontsize=9)
            start += width
        low, normal, high = (math.log2(v) for v in (f.smallest, f.normal, f.largest))
        right.barh(row, high - normal, left=normal, color=FIELDS["exponent"])
        right.barh(row, normal - low, left=low, color=FIELDS["exponent"], alpha=0.4)
        right.text(high + 3, row, f"up to {f.largest:.3g}", va="center", fontsize=9)
    left.set_yticks(range(len(formats)), list(formats))
    left.invert_yaxis()
    left.set(xlabel="bits")
    right.set(xlabel="power of two (pale: subnormal, fewer digits)", xlim=(-155, 215))
    for ax in (left, right):
        ax.grid(False)
    left.legend(loc="lower right")
    return fig


def view_bits(data):
    "The explorer's figure: the bits of one number in each format, the number stored, its relative error."
    rows = data["rows"]
    fig, ax = show.axes(figsize=(9.2, 3.2))
    end = max(len(r["bits"]) for r in rows)
    for y, r in enumerate(rows):
        for x, bit in enumerate(r["bits"]):
            field = "sign" if x == 0 else "exponent" if x <= r["exponent"] else "fraction"
            ax.text(x, y, bit, color=FIELDS[field], ha="center", va="center", family="monospace", fontsize=10)
        error = "" if math.isnan(r["error"]) else f"  off by {r['error']:.1e}" if r["error"] else "  exact"
        state = "" if r["state"] == "normal" else f"  ({r['state']})"
        ax.text(end + 0.5, y, f"{r['stored']:.9g}{error}{state}", va="center", fontsize=10)
    ax.set_yticks(range(len(rows)), [r["name"] for r in rows])
    ax.set(xlim=(-1, 58), ylim=(len(rows) - 0.5, -0.8), xticks=[])
    ax.tick_params(left=False)
    ax.grid(False)
    for side in ("left", "bottom"):
        ax.spines[side].set_visible(False)
    times = f" × 2^{data['power']}" if data["power"] else ""
    ax.set_title(f"{data['number']:.9g}{times} = {data['wanted']:.9g}")
    return fig


def draw_exponents(gradients, names=("fp16", "bf16", "e5m2", "e4m3")):
    "How often each power of two occurs among gradients, {label: tensor}, above the ranges of the formats."
    fig, axes = show.axes(
        nrows=len(gradients) + 1, figsize=(7.6, 1.7 * len(gradients) + 1.6), sharex=True,
        height_ratios=[2] * len(gradients) + [1.4],
    )  # fmt: skip
    for ax, (label, g) in zip(axes, gradients.items(), strict=False):
        powers = g[g != 0].abs().double().log2().floor()
        edges = [p - 0.5 for p in range(-64, 20)]
        ax.hist(powers.tolist(), bins=edges, weights=[100 / len(powers)] * len(powers), color=show.COLOURS[0])
        ax.set(ylabel="% of gradients")
        ax.set_title(label)
    for row, name in enumerate(names):
        f = precision.FORMATS[name]
        low, normal, high = (math.log2(v) for v in (f.smallest, f.normal, f.largest))
        axes[-1].barh(row, high - normal, left=normal, color=show.COLOURS[1])
        axes[-1].barh(row, normal - low, left=low, color=show.COLOURS[1], alpha=0.4)
    axes[-1].set_yticks(range(len(names)), names)
    axes[-1].invert_yaxis()
    axes[-1].set(xlabel="power of two", xlim=(-64, 20))
    axes[-1].grid(False)
    return fig


def draw_scaling(trained):
    "Loss and loss scale of a run, one above the other."
    fig, (top, bottom) = show.axes(nrows=2, figsize=(6.4, 4.2), sharex=True)
    top.plot(trained.losses)
    top.set(ylabel="loss")
    bottom.plot(trained.scales, color=show.COLOURS[1], drawstyle="steps-post")
    bottom.set(ylabel="loss scale", xlabel="step")
    bottom.set_yscale("log", base=2)
    return fig


def draw_contest(runs, verdicts):
    "Each arm's final loss, a dot a seed, and how many times faster than fp32 a step is."
    arms = list(runs)
    fig, (left, right) = show.axes(ncols=2, figsize=(8.6, 0.9 + 0.42 * len(arms)), sharey=True)
    base = [r.valid for r in runs["fp32"]]
    left.axvspan(min(base), max(base), color=show.COLOURS[6], alpha=0.12, lw=0)
    for row, arm in enumerate(arms):
        for i, r in enumerate(runs[arm]):
            left.plot(r.valid, row, "o", color=show.COLOURS[i % 6])
        right.barh(row, verdicts[arm].speedup, color=show.COLOURS[0])
        right.text(verdicts[arm].speedup, row, f" {verdicts[arm].speedup:.3g}", va="center")
    left.set_yticks(range(len(arms)), arms)
    left.invert_yaxis()
    left.locator_params(axis="x", nbins=4)
    left.set(xlabel="validation loss (band: fp32 over its seeds)")
    right.set(xlabel="times faster than fp32", xlim=(0, 1.2 * max(v.speedup for v in verdicts.values())))
    right.grid(False)
    return fig

"The figures and tables of reproduce: functions of plain data that return a matplotlib figure, or text."

from course_lib import recorded, show
from course_lib.reproduce.determinism import Price

BLUE, ORANGE, GREY = show.COLOURS[0], show.COLOURS[1], show.COLOURS[6]


def said(prediction, measured, unit=""):
    "One sentence that compares a prediction (None: none was written) with a count or a number."
    unit = f" {unit}" if unit else ""
    if prediction is None:
        return f"it is {measured:,}{unit}; no prediction was written down"
    return f"you said {prediction:,}{unit}, it is {measured:,}{unit}"


def draw_orders(sums, exact):
    "How often each answer of `in_orders` came, by its distance from the exact sum."
    fig, ax = show.axes()
    ax.hist((sums - exact).numpy(), bins=40, color=BLUE)
    ax.axvline(0, color=ORANGE)
    ax.set_ylim(0, 1.15 * ax.get_ylim()[1])  # room for the word
    ax.annotate(
        "exact",
        (0, 1),
        (5, -12),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        color=ORANGE,
    )
    title = f"the same numbers in {len(sums)} orders: {len(sums.unique())} answers"
    ax.set(xlabel="answer minus the exact sum", ylabel="orders", title=title)
    return fig


def draw_errors(data):
    "The explorer of sums: for each method the median error of the draws, and the band from least to largest."
    fig, ax = show.axes()
    n, floor = data["n"], data["roundoff"] / 100
    for name, e in data["errors"].items():
        e = e.clamp(min=floor)  # an exact sum has no place on a logarithmic axis
        (line,) = ax.plot(n, e.median(1).values, label=name)
        ax.fill_between(n, e.min(1).values, e.max(1).values, color=line.get_color(), alpha=0.15, lw=0)
    ax.axhline(data["roundoff"], color=GREY, ls=":", lw=1)
    ax.annotate("u, one rounding", (1, data["roundoff"]), (-4, 3), xycoords=("axes fraction", "data"),
                textcoords="offset points", fontsize=8, ha="right")  # fmt: skip
    ax.set(yscale="log", xlabel="numbers added", ylabel="error / sum of magnitudes", title=data["title"])
    ax.set_xscale("log", base=2)
    ax.legend(loc="upper left", fontsize=9)
    return fig


def draw_losses(one, other, names):
    "Two runs' losses, step by step, and below how far they are apart."
    fig, (top, low) = show.axes(2, 1, figsize=(6.4, 4.4), sharex=True, height_ratios=(3, 2))
    for losses, name, style in zip((one, other), names, ("-", "--"), strict=True):
        top.plot(losses, style, label=name, lw=1)
    top.set(ylabel="loss", title="the same run twice")
    top.legend(loc="lower left")
    apart = (one - other).abs().double()
    low.semilogy(apart.clamp(min=1e-9), color=GREY, lw=1)
    low.set(xlabel="step", ylabel="apart", ylim=(5e-10, 10))
    part = apart.nonzero()
    if len(part):
        low.axvline(part[0].item(), color=ORANGE, lw=1)
        first = part[0].item()
        low.annotate(f"step {first}", (first, 1), (3, -10), xycoords=("data", "axes fraction"),
                     textcoords="offset points", fontsize=8, color=ORANGE)  # fmt: skip
    return fig


def prices_table(found):
    "A list of `Price` as text."
    rows = []
    for p in found:
        after = "raises" if p.deterministic is None else f"{p.deterministic * 1e6:,.0f} µs"
        price = "none" if p.ratio is None else f"{p.ratio:.2f}x"
        rows.append((p.name.replace("_", " "), p.answers, f"{p.seconds * 1e6:,.0f} µs", after, price))
    return show.table(("operator", "answers of 10", "by default", "deterministic", "price"), rows)


def note_prices(found):
    "Note each operator's answers in ten runs, and its price where it has one."
    for p in found:
        recorded.note(f"reproduce.answers.{p.name}", p.answers, "")
        if p.ratio is not None:
            recorded.note(f"reproduce.determinism_cost.{p.name}", p.ratio, "×")


def recorded_prices():
    "The recorded prices as `Price`s with seconds of 1, since ratios alone are recorded; [] before recording."
    found = []
    for f in recorded.figures("reproduce"):
        if f["name"].startswith("reproduce.answers."):
            name = f["name"].removeprefix("reproduce.answers.")
            ratio = recorded.get(f"reproduce.determinism_cost.{name}")
            found.append(Price(name, int(f["value"]), 1.0, ratio["value"] if ratio else None))
    return found


def draw_prices(found, where):
    "Prices measured on `where` as bars, dearest first; operators that have no deterministic way are named."
    priced = sorted((p for p in found if p.ratio is not None), key=lambda p: p.ratio)
    fig, ax = show.axes(figsize=(6.4, 0.27 * len(priced) + 1.5))
    colours = [ORANGE if p.answers > 1 else BLUE for p in priced]
    bars = ax.barh([p.name.replace("_", " ") for p in priced], [p.ratio for p in priced], color=colours)
    ax.bar_label(bars, [f"{p.ratio:.2g}×" for p in priced], padding=3, fontsize=8)
    ax.axvline(1, color=GREY, lw=1)
    high = max((p.ratio for p in priced), default=1)
    ax.set(xscale="log", xlim=(None, high * 3), title=f"the price of bit for bit, {where}")
    ax.xaxis.set_major_formatter("{x:g}×")
    ax.plot([], [], "s", color=ORANGE, label="other bits from run to run")
    ax.plot([], [], "s", color=BLUE, label="the same bits in ten runs")
    ax.legend(loc="lower right", fontsize=9)
    raising = [p.name.replace("_", " ") for p in found if p.ratio is None]
    label = "time, deterministic over default"
    if raising:
        import textwrap

        label += "\n" + textwrap.fill("no deterministic way: " + ", ".join(raising), 80)
    ax.set_xlabel(label, fontsize=9)
    return fig


def draw_spread(runs):
    "Runs of one seed: each mode's final losses as dots, and the seconds of each."
    modes = list(dict.fromkeys(r.mode for r in runs))
    fig, (left, right) = show.axes(1, 2, figsize=(7.2, 3.2))
    for i, mode in enumerate(modes):
        mine = [r for r in runs if r.mode == mode]
        colour = show.COLOURS[i]
        shift = [i + 0.25 * (k / max(len(mine) - 1, 1) - 0.5) for k in range(len(mine))]
        left.plot(shift, [r.loss for r in mine], "o", color=colour, alpha=0.7)
        right.plot(shift, [r.seconds for r in mine], "o", color=colour, alpha=0.7)
    for ax, title in ((left, "training loss, one seed"), (right, "seconds")):
        ax.set_xticks(range(len(modes)), modes)
        ax.set(title=title, xlim=(-0.5, len(modes) - 0.5))
    left.ticklabel_format(axis="y", useOffset=False)
    right.set_ylim(0, 1.15 * max(r.seconds for r in runs))
    return fig


def draw_convergence(curves):
    "{mode: [(epochs, loss), …]} as lines."
    from matplotlib.ticker import FixedLocator, NullFormatter, ScalarFormatter

    fig, ax = show.axes()
    for (mode, points), style in zip(curves.items(), ("o-", "s--", "^:"), strict=False):
        ax.plot(*zip(*points, strict=True), style, label=mode)
    ax.set(xscale="log", yscale="log", xlabel="epochs", ylabel="training loss", title="three ways to train")
    epochs = [n for n, _ in next(iter(curves.values()))]
    for axis, ticks in ((ax.xaxis, epochs), (ax.yaxis, [0.02, 0.05, 0.1, 0.2, 0.5, 1, 2])):
        axis.set_major_locator(FixedLocator(ticks))
        axis.set_major_formatter(ScalarFormatter())
        axis.set_minor_formatter(NullFormatter())
    ax.legend()
    return fig

"Figures of lesson resizing: sizes, reading, statistics, costs, the contest, the explorer."

import statistics

from torch.nn import functional as F

from course_lib.show import COLOURS, axes

GREY = "#555555"


def _image(ax, image, title, low=0.0, high=1.0):
    ax.imshow(image[0].cpu().float().numpy(), cmap="gray", interpolation="nearest", vmin=low, vmax=high)
    ax.set_title(title, fontsize=9)
    ax.set_axis_off()


def _around_ink(rows, share=0.5):
    "Of each image the part around its darkest place, {label: [N, 1, h, h]}: in it single pixels can be seen."
    coarse = min(rows.values(), key=lambda images: images.shape[-1])
    side = coarse.shape[-1]
    window = round(side * share)
    k = side // 5 // 2 * 2 + 1
    ink = F.avg_pool2d(-coarse.cpu().float(), k, stride=1, padding=k // 2, count_include_pad=False)
    places = [divmod(i.item(), side) for i in ink.flatten(1).argmax(1)]
    corners = [[min(max(at - window // 2, 0), side - window) for at in place] for place in places]

    def part(images):
        scale = images.shape[-1] / side
        wide = round(window * scale)
        starts = [[round(at * scale) for at in corner] for corner in corners]
        return [x[:, i : i + wide, j : j + wide] for x, (i, j) in zip(images, starts, strict=True)]

    return {label: part(images) for label, images in rows.items()}


def draw_sizes(rows):
    "Parts of the same images at several sizes, pixels as squares: {label: [N, 1, side, side]}, a row each."
    rows = _around_ink(rows)
    n = max(len(images) for images in rows.values())
    fig, grid = axes(len(rows), n, figsize=(2.4 * n, 2.5 * len(rows)), squeeze=False)
    for (label, images), line in zip(rows.items(), grid, strict=True):
        for ax, image in zip(line, images, strict=True):
            _image(ax, image, label, image.min().item(), image.max().item())
    return fig


def draw_beside(images):
    "Images in 0..1 beside each other, each with its label: {label: [1, H, W]}."
    fig, grid = axes(1, len(images), figsize=(2.1 * len(images), 2.3), squeeze=False)
    for (label, image), ax in zip(images.items(), grid[0], strict=True):
        _image(ax, image, label)
    return fig


def draw_reading(curves, trained, chance):
    "Accuracy by the side at which images are read, {label: {side: %}}; dotted: the side of training, chance."
    fig, ax = axes()
    for k, (label, curve) in enumerate(curves.items()):
        ax.plot(list(curve), list(curve.values()), "os^D"[k] + "-", label=label)
    ax.axvline(trained, color=GREY, linestyle=":", linewidth=1)
    ax.axhline(chance, color=GREY, linestyle=":", linewidth=1)
    ax.annotate("trained at this side", (trained, 50), xytext=(-3, 0), textcoords="offset points",
                fontsize=8, rotation=90, ha="right", va="center")  # fmt: skip
    ax.annotate("guessing", (min(curve), chance), xytext=(0, 3), textcoords="offset points", fontsize=8)
    sides = list(curve)
    ax.set_xticks(sides, sides)
    ax.set(xlabel="side at which the letters are read, pixels", ylabel="read right, %", ylim=(0, 102))
    ax.legend(fontsize=9, loc="best")
    return fig


def draw_statistics(stored, found):
    "What enters the first batch norm: spread of each channel, stored against measured, {label: spreads}."
    fig, ax = axes(figsize=(5, 3.8))
    for k, (label, values) in enumerate(found.items()):
        ax.plot(stored, values, "os"[k], color=COLOURS[k], label=label, alpha=0.8)
    ends = min(stored), max(stored)
    ax.plot(ends, ends, ":", color=GREY, label="equal")
    ax.set(xlabel="standard deviation that batch norm has stored",
           ylabel="standard deviation now", title="The channels of the first batch norm")  # fmt: skip
    ax.legend(fontsize=9)
    return fig


def draw_cost(flops, seconds):
    "FLOPs and seconds of a training step by side, each relative to the largest side's: two dicts."
    fig, ax = axes()
    for label, cost, style in (("FLOPs", flops, "o-"), ("time", seconds, "s-")):
        most = cost[max(cost)]
        ax.plot(list(cost), [c / most for c in cost.values()], style, label=label)
    sides = sorted(flops)
    ax.plot(sides, [(s / sides[-1]) ** 2 for s in sides], ":", color=GREY, label="side²")
    ax.set(xscale="log", yscale="log", xlabel="side, pixels", ylabel="relative to the largest side",
           title="One training step")  # fmt: skip
    ax.set_xticks(sides, sides)
    ax.minorticks_off()
    shares = [1, 1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32]
    ax.set_yticks(shares, ["1", "1/2", "1/4", "1/8", "1/16", "1/32"])
    ax.set_ylim(min(1 / 17, *(c / flops[sides[-1]] for c in flops.values())) * 0.9, 1.2)
    ax.legend()
    return fig


def draw_race(runs, errors=False):
    """Accuracy against seconds: {arm: {seed: [(seconds, %)]}}; thin lines are seeds, thick their median.

    With `errors` it is what is not read right, with logarithmic axes.
    """
    fig, ax = axes(figsize=(6.4, 4))
    for k, (arm, by_seed) in enumerate(runs.items()):
        lines = [[(t, 100 - y if errors else y) for t, y in points] for points in by_seed.values()]
        for points in lines:
            ax.plot(*zip(*points, strict=True), "os"[k], linestyle="-", color=COLOURS[k], alpha=0.35,
                    linewidth=0.8, markersize=4)  # fmt: skip
        middle = [[statistics.median(v) for v in zip(*same, strict=True)]
                  for same in zip(*lines, strict=True)]  # fmt: skip
        ax.plot(*zip(*middle, strict=True), color=COLOURS[k], linewidth=2.2, marker="os"[k], label=arm)
    ax.set(xlabel="seconds of training", ylabel="read right, %")
    if errors:
        from matplotlib.ticker import LogLocator

        ax.set(xscale="log", yscale="log", ylabel="not read right, %")
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
            axis.set_major_formatter("{x:g}")
        ax.minorticks_off()
    else:
        ax.set_xlim(0)
    seeds = f"{len(by_seed)} seeds, median thick" if len(by_seed) > 1 else "one seed"
    ax.set_title(f"Each point is one whole run; {seeds}")
    ax.legend(loc="upper right" if errors else "lower right")
    return fig


def draw_gains(gains):
    "Time of full size over growing by target, {target %: Gain}: median and range over the seeds."
    fig, ax = axes()
    median, low, high, seeds = zip(*gains.values(), strict=True)
    label = f"{seeds[0]} seeds: median and range" if seeds[0] > 1 else "one seed"
    ax.fill_between(list(gains), low, high, color=COLOURS[0], alpha=0.2, linewidth=0)
    ax.plot(list(gains), median, "o-", color=COLOURS[0], markersize=3, label=label)
    ax.axhline(1, color=GREY, linestyle=":", linewidth=1)
    ax.annotate("equal time", (min(gains), 1), xytext=(0, 3), textcoords="offset points", fontsize=8)
    ax.set(xlabel="target: letters read right, %", ylabel="time, full size / growing")
    ax.set_ylim(min(0.8, *low), 1.02 * max(1.2, *high))
    ax.legend(fontsize=9)
    return fig


def draw_loading(rows):
    "Milliseconds of a training step by source of the images: {source: (at the small side, at full side)}."
    fig, ax = axes(figsize=(6.4, 2.8))
    for k, label in enumerate(("small side", "full side")):
        at = [i + (k - 0.5) * 0.38 for i in range(len(rows))]
        ax.barh(at, [1e3 * both[k] for both in rows.values()], 0.36, color=COLOURS[k], label=label)
    ax.set_yticks(range(len(rows)), list(rows))
    ax.invert_yaxis()
    ax.set(xlabel="one training step, ms")
    ax.grid(axis="y", visible=False)
    ax.legend(fontsize=9)
    return fig


def view_costs(found):
    "The explorer's figure, from `resizing.explore`: the epochs' costs, and the gain by the loader's time."
    fig, (left, right) = axes(1, 2, figsize=(8, 3.4))
    small, full, share = found["small"], found["full"], found["share"]
    left.bar([f"{small} px\n{share:.0%} of the epochs", f"{full} px\n{1 - share:.0%}"], found["costs"],
             color=COLOURS[:2])  # fmt: skip
    left.axhline(found["loader"], color=GREY, linestyle=":", label="the loader")
    left.set(ylabel="cost of an epoch, full-size epochs", ylim=(0, 1.3))
    left.grid(axis="x", visible=False)
    left.legend(fontsize=8, loc="upper left")
    right.plot(found["loaders"], found["gains"], color=COLOURS[0])
    right.plot(found["loader"], found["gain"], "o", color=COLOURS[1])
    right.set(xlabel="the loader's time for an epoch, full-size epochs",
              ylabel="time, all epochs full / this run", ylim=(0.9, None))  # fmt: skip
    right.set_title(f"{found['gain']:.2f} times less time")
    return fig

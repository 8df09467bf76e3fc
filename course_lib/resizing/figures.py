"Images at their sizes, what a size costs, how well they are read, and the comparison."

import statistics

from course_lib.show import COLOURS


def draw_sheet(rows, width=9.0):
    """Rows of grey images, each drawn as wide as the others, whatever its pixels: {label: [N, 1, H, W]}.

    A pixel is a square, so that what a smaller image has lost can be seen.
    """
    import matplotlib.pyplot as plt

    n = max(len(x) for x in rows.values())
    size = (width, (width / n + 0.2) * len(rows))
    fig, axes = plt.subplots(len(rows), n, figsize=size, squeeze=False)
    for (label, images), line in zip(rows.items(), axes, strict=True):
        for ax in line:
            ax.set_axis_off()
        for ax, image in zip(line, images, strict=False):
            _show(ax, image)
        line[0].set_title(label, fontsize=9)
    return fig


def draw_beside(images):
    "Grey images beside each other, each with its label: {label: [1, H, W]}."
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, len(images), figsize=(2 * len(images), 2.2), squeeze=False)
    for ax, (label, image) in zip(axes[0], images.items(), strict=True):
        _show(ax, image)
        ax.set_title(label, fontsize=9)
        ax.set_axis_off()
    return fig


def _show(ax, image):
    high = 1 if image.dtype.is_floating_point else 255
    ax.imshow(image[0].cpu().float().numpy(), cmap="gray", interpolation="nearest", vmin=0, vmax=high)


def draw_cost(flops, seconds):
    "FLOPs and seconds of a training step by the images' side, each relative to the largest: two dicts."
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots()
    for label, cost, style in (("FLOPs", flops, "o-"), ("time", seconds, "s-")):
        most = cost[max(cost)]
        ax.plot(list(cost), [c / most for c in cost.values()], style, label=label)
    sides = sorted(flops)
    ax.plot(sides, [(s / sides[-1]) ** 2 for s in sides], ":", color="#555555", label="side²")
    ax.set(xscale="log", yscale="log", xlabel="side, pixels", ylabel="of the largest side's",
           title="One training step")  # fmt: skip
    ax.set_xticks(sides, sides)
    ax.minorticks_off()
    ax.legend()
    return fig


def draw_reading(curves, trained=()):
    "Accuracy by the side at which images are read, {label: {side: accuracy}}; dotted: sides trained on."
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots()
    for label, curve in curves.items():
        ax.plot(list(curve), [100 * a for a in curve.values()], "o-", label=label)
    for side in trained:
        ax.axvline(side, color="#555555", linestyle=":", linewidth=1)
    ax.set(xlabel="side at which the images are read, pixels", ylabel="read right, %", ylim=(0, 102))
    ax.legend(fontsize=9)
    return fig


def draw_by_letter(bars):
    "Accuracy by group of letters: {network: {group: accuracy}}."
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots()
    groups = list(next(iter(bars.values())))
    wide = 0.8 / len(bars)
    for k, (label, values) in enumerate(bars.items()):
        ax.bar(
            [i + k * wide for i in range(len(groups))], [100 * values[g] for g in groups], wide, label=label
        )
    ax.set_xticks([i + 0.4 - wide / 2 for i in range(len(groups))], groups)
    ax.set(ylabel="read right, %", ylim=(0, 105))
    ax.grid(axis="x", visible=False)
    ax.legend(fontsize=8, ncols=len(bars), loc="lower left", bbox_to_anchor=(0, 1))
    return fig


def draw_study(studies):
    "Accuracy against seconds of training, a panel for each `Study`: thin lines are seeds, thick the median."
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, len(studies), figsize=(4.6 * len(studies), 3.6), squeeze=False)
    for study, ax in zip(studies, axes[0], strict=True):
        for arm, colour in (("fixed", COLOURS[1]), ("progressive", COLOURS[0])):
            lines = list(study.points(arm).values())
            for points in lines:
                ax.plot(
                    *zip(*[(t, 100 * a) for t, a in points], strict=True),
                    color=colour,
                    alpha=0.3,
                    linewidth=1,
                )
            middle = [
                (statistics.median(t for t, _ in same), 100 * statistics.median(a for _, a in same))
                for same in zip(*lines, strict=True)
            ]
            ax.plot(*zip(*middle, strict=True), "o-", color=colour, label=arm)
        small = [run for runs in study.runs["small"].values() for run in runs]
        ax.plot([r.seconds for r in small], [100 * r.accuracy for r in small], "x", color="#555555",
                label="small, read small")  # fmt: skip
        ax.axhline(100 * study.target, color="#555555", linestyle=":", linewidth=1)
        ax.set(
            xlabel="seconds of training",
            ylabel="read right, %",
            title=study.task.source,
            xlim=(0, None),
            ylim=(0, 102),
        )
        ax.legend(fontsize=9, loc="lower right")
    return fig


def draw_steps(steps):
    "Milliseconds of a training step by source of the images and side: {source: {side: seconds}}."
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(6.4, 2.6))
    labels, values, colours = [], [], []
    for k, (source, by_side) in enumerate(steps.items()):
        for side, seconds in by_side.items():
            labels.append(f"{source}, {side} pixels")
            values.append(1e3 * seconds)
            colours.append(COLOURS[k])
    ax.barh(labels, values, color=colours)
    ax.invert_yaxis()
    ax.set(xlabel="one training step, ms")
    ax.grid(axis="y", visible=False)
    return fig


def view_schedule(found):
    "The explorer's figure, from `resizing_study.explore`: the side of each epoch, and what it costs."
    import matplotlib.pyplot as plt

    fig, (top, bottom) = plt.subplots(2, 1, figsize=(6.4, 4), sharex=True)
    epochs = range(1, len(found["sides"]) + 1)
    top.step(epochs, found["sides"], where="mid", color=COLOURS[0])
    top.set(ylabel="side, pixels", ylim=(0, 1.1 * found["full"]))
    top.set_title(f"{found['speedup']:.2f} times less than full size throughout")
    bottom.bar(epochs, found["costs"], color=COLOURS[0])
    bottom.axhline(1, color="#555555", linestyle=":", linewidth=1)
    if found["loader"]:
        bottom.axhline(found["loader"], color=COLOURS[1], linewidth=1.5, label="the loader's pace")
        bottom.legend(fontsize=9, loc="upper left")
    bottom.set(xlabel="epoch", ylabel="cost, full-size epochs", ylim=(0, max(1.1, 1.1 * found["loader"])))
    return fig

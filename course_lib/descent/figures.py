"Lesson descent's explorer and figures: paths on surfaces, curves, images, and runs side by side."

import math

import torch

from course_lib.show import COLOURS


def _bowl(kappa):
    return lambda w: (w[..., 0] ** 2 + kappa * w[..., 1] ** 2) / 2


def walk(lr_over_limit=0.99, kappa=25, momentum=0.0, steps=150):
    """A walk from (1, 1) on a bowl of curvatures 1 and `kappa`: {"path": [steps + 1, 2], "lr", "limit", …}.

    `lr_over_limit` is the learning rate over 2 / kappa, above which plain gradient descent diverges.
    """
    limit = 2 / kappa
    lr, curvature = lr_over_limit * limit, torch.tensor([1.0, kappa], dtype=torch.float64)
    w, velocity = torch.ones(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    path = [w]
    for _ in range(steps):
        velocity = momentum * velocity + curvature * w
        w = w - lr * velocity
        path.append(w)
    return {"path": torch.stack(path), "lr": lr, "limit": limit, "kappa": kappa, "momentum": momentum}


def draw_walk(data):
    "The figure of a `walk`: its path on the bowl's contours, and its height by step."
    name = f"lr {data['lr']:.3g}, limit {data['limit']:.3g}"
    fig = draw_descent(_bowl(data["kappa"]), {name: data["path"]}, len(data["path"]))
    fig.axes[-1].set_ylim(1e-6, 1e6)
    fig.axes[-1].set_title(f"κ = {data['kappa']:g}, momentum {data['momentum']:.2g}")
    fig.axes[-1].get_legend().remove()
    return fig


def draw_descent(f, paths, shown=25):
    "The first `shown` points of each path ({label: [steps + 1, 2]}) on the contours of `f`, and all heights."
    import matplotlib.pyplot as plt

    widths = [2.7] * len(paths) + [3.6]
    fig, axes = plt.subplots(1, len(widths), figsize=(sum(widths), 3), width_ratios=widths)
    for ax, colour, (label, path) in zip(axes, COLOURS, paths.items(), strict=False):
        draw_paths(ax, f, {label: path[:shown]}, (-0.6, 1.3, -1.8, 1.8), label, (colour,))
        axes[-1].semilogy(f(path).clamp(1e-30, 1e30), color=colour, label=label)
    axes[-1].set(xlabel="step", ylabel="height")
    axes[-1].legend()
    return fig


def draw_paths(ax, f, paths, box, title="", colours=COLOURS, axes=("w₁", "w₂"), ends=False):
    "Paths ({label: [steps + 1, 2]}) on the contours of `f` in `box` (left, right, bottom, top)."
    x, y = torch.linspace(box[0], box[1], 160), torch.linspace(box[2], box[3], 160)
    z = f(torch.stack(torch.meshgrid(x, y, indexing="xy"), -1))
    # Levels by quantile of the height, so that a valley's floor shows as well as its walls.
    levels = z.flatten().quantile(torch.linspace(0, 1, 11)[1:-1] ** 1.5).unique()
    greys = [str(g) for g in torch.linspace(1, 0.6, len(levels) + 1).tolist()]
    ax.contourf(x, y, z, levels=levels, colors=greys, extend="both")
    for (label, path), colour in zip(paths.items(), colours, strict=False):
        few = len(path) < 200  # points on top of each other hide the line
        ax.plot(path[:, 0], path[:, 1], ".-" if few else "-", ms=3, lw=0.8, label=label, color=colour)
        if ends:
            ax.plot(path[-1, 0], path[-1, 1], "X", ms=8, mec="white", color=colour, zorder=6)
    start = next(iter(paths.values()))[0]
    ax.plot(start[0], start[1], "ko", ms=5, mfc="white", zorder=5)
    ax.set(xlim=box[:2], ylim=box[2:], title=title, xlabel=axes[0], ylabel=axes[1])
    ax.grid(False)


def draw_surfaces(surfaces, axes=("w₁", "w₂")):
    "Contours of several surfaces side by side; each is (title, f, {label: path}, box)."
    import matplotlib.pyplot as plt

    fig, panels = plt.subplots(1, len(surfaces), figsize=(3.2 * len(surfaces), 3.4))
    for ax, (title, f, paths, box) in zip(panels, surfaces, strict=True):
        draw_paths(ax, f, paths, box, title, axes=axes, ends=True)
        if len(paths) > 1:
            ax.legend(loc="lower right", fontsize=8, frameon=True)
    return fig


def draw_slides(paths, span=(-2.2, 2.2)):
    "One-dimensional paths ({title: [steps + 1, 1]}) on the curve w² / 2 over `span`."
    import matplotlib.pyplot as plt

    x = torch.linspace(*span, 400)
    fig, axes = plt.subplots(1, len(paths), figsize=(2.5 * len(paths), 2.5), sharey=True)
    for ax, (title, path), colour in zip(axes, paths.items(), COLOURS, strict=False):
        ax.plot(x, x**2 / 2, color="#999999", lw=1)
        ax.plot(path, path**2 / 2, ".-", ms=6, lw=0.9, color=colour)
        ax.plot(path[0], path[0] ** 2 / 2, "ko", ms=5, mfc="white", zorder=5)
        ax.set(xlim=span, ylim=(-0.1, x.max() ** 2 / 2), title=title, xlabel="w")
    axes[0].set_ylabel("height")
    return fig


def draw_methods(surfaces, paths, settled, box=(-0.6, 1.2, -0.6, 1.2)):
    """Each method's path on each surface, and its steps by learning rate; lines that coincide are one.

    `surfaces` is {kind: f}; `paths` ({(method, kind): [steps, 2]}) and `settled` ({(method, kind): {learning
    rate: steps}}) have the same keys.
    """
    import matplotlib.pyplot as plt

    methods = list(dict.fromkeys(method for method, _ in paths))
    fig, axes = plt.subplots(1, len(surfaces) + 1, figsize=(10, 3.6), width_ratios=[3] * len(surfaces) + [4])
    for ax, (kind, f) in zip(axes, surfaces.items(), strict=False):
        draw_paths(ax, f, {m: paths[m, kind][:80] for m in methods}, box, f"{kind}: the best settings")
    first = next(iter(surfaces))
    for (method, kind), steps in settled.items():
        rows = zip(*(t.values() for (m, _), t in settled.items() if m == method), strict=True)
        alike = len(surfaces) > 1 and all(len({*row}) == 1 or max(row) - min(row) < 2 for row in rows)
        if alike and kind != first:
            continue
        style = {"color": COLOURS[methods.index(method)], "ls": "-" if kind == first else "--"}
        shown = [math.nan if math.isinf(n) else n for n in steps.values()]
        label = f"{method}, {'all bowls' if alike else kind}"
        axes[-1].plot(list(steps), shown, marker="o", ms=3, lw=1.2, label=label, **style)
    axes[-1].set(xscale="log", xlabel="learning rate", ylabel="steps to settle", ylim=(0, 150))
    axes[-1].legend(fontsize=8, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0), handlelength=1.6)
    return fig


def draw_curves(curves, xlabel, ylabel, title="", log="", ylim=None):
    "Curves {label: y, or (x, y)} in one figure; `log` is '', 'x', 'y' or 'xy'."
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots()
    for label, curve in curves.items():
        ax.plot(*(curve if isinstance(curve, tuple) else (curve,)), lw=1.4, label=label)
    ax.set(xlabel=xlabel, ylabel=ylabel, title=title)
    ax.set(**{f"{axis}scale": "log" for axis in log}, **({"ylim": ylim} if ylim else {}))
    ax.legend()
    return fig


def draw_images(images, labels):
    "A row of grey images [N, 1, H, W], each under its label."
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, len(images), figsize=(0.62 * len(images), 0.95))
    for ax, image, label in zip(axes, images, labels.tolist(), strict=True):
        ax.imshow(image[0], cmap="Greys", vmin=0, vmax=1)
        ax.set(xticks=[], yticks=[])
        ax.set_title(label, fontsize=9, loc="center")
        ax.grid(False)
    return fig


def draw_gains(measures):
    "Paired runs {label: {arm: [a value for each seed]}}, a panel each: a dot a seed, and a bar to the mean."
    import matplotlib.pyplot as plt

    first = next(iter(measures.values()))
    rows = sorted(first, key=lambda arm: sum(first[arm]))
    size = 4.2 * len(measures) + 1, 0.6 * len(rows) + 1
    fig, panels = plt.subplots(1, len(measures), figsize=size, sharey=True, squeeze=False)
    for ax, (label, arms) in zip(panels[0], measures.items(), strict=True):
        for i, values in enumerate(arms[arm] for arm in rows):
            bar = ax.barh(i, sum(values) / len(values), height=0.7, color=COLOURS[5], alpha=0.6)
            apart = i + torch.linspace(-0.26, 0.26, len(values))  # so that equal values show
            dots = ax.plot(values, apart, "o", ms=4, color=COLOURS[0])
        ax.axvline(0, color="black", lw=0.8)
        ax.set(yticks=range(len(rows)), yticklabels=rows, xlabel=label)
    panels[0, 0].legend([dots[0], bar], ["one seed", "mean"], loc="best")
    return fig

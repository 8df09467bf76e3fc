"""Lesson descent's explorer and figures: paths on surfaces, curves, images, and runs side by side."""

import torch

from course_lib.descent import bowl
from course_lib.show import COLOURS


def walk(lr_over_limit=0.99, kappa=25, momentum=0.0, steps=60):
    """A walk from (1, 1) on `bowl(kappa)`: {"path": [steps + 1, 2], "lr", "limit", "kappa", "momentum"}.

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
    label = f"lr {data['lr']:.3g}, limit {data['limit']:.3g}"
    fig = draw_descent(
        bowl(data["kappa"]), {label: data["path"]}, (-0.6, 1.3, -1.5, 1.5), shown=len(data["path"])
    )
    fig.axes[-1].set_ylim(1e-9, 1e9)
    fig.axes[-1].set_title(f"height; κ = {data['kappa']:g}, momentum {data['momentum']:.2g}")
    return fig


def draw_descent(f, paths, box, shown=25):
    "The first `shown` points of each path ({label: [steps + 1, 2]}) on the contours of `f`, and all heights."
    import matplotlib.pyplot as plt

    widths = [2.7] * len(paths) + [3.6]
    size = (sum(widths), 3)
    fig, axes = plt.subplots(1, len(widths), figsize=size, width_ratios=widths, layout="constrained")
    fig.get_layout_engine().set(wspace=0.06)
    for ax, colour, (label, path) in zip(axes, COLOURS, paths.items(), strict=False):
        draw_paths(ax, f, {label: path[:shown]}, box, label, colour)
        axes[-1].semilogy(f(path).clamp(1e-30, 1e30), color=colour, label=label)
    axes[-1].set(xlabel="step", title="height")
    return fig


def draw_paths(ax, f, paths, box, title="", colour=None):
    "Paths ({label: [steps + 1, 2]}) on the contours of `f` in `box` (left, right, bottom, top)."
    x, y = torch.linspace(box[0], box[1], 160), torch.linspace(box[2], box[3], 160)
    z = f(torch.stack(torch.meshgrid(x, y, indexing="xy"), -1))
    # Levels by quantile of the height, so that a valley's floor shows as well as its walls.
    levels = z.flatten().quantile(torch.linspace(0, 1, 11) ** 1.5).unique()
    ax.contourf(x, y, z, levels=levels, cmap="Greys", alpha=0.45)
    for label, path in paths.items():
        few = len(path) < 200  # points on top of each other hide the line
        ax.plot(path[:, 0], path[:, 1], ".-" if few else "-", ms=4, lw=0.9, label=label, color=colour)
    start = next(iter(paths.values()))[0]
    ax.plot(start[0], start[1], "ko", ms=5, mfc="white", zorder=5)
    ax.set(xlim=box[:2], ylim=box[2:], title=title)
    ax.grid(False)
    return ax


def draw_surfaces(surfaces):
    "Contours of several surfaces side by side; each is (title, f, {label: path}, box)."
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, len(surfaces), figsize=(3.2 * len(surfaces), 3.2))
    for ax, (title, f, paths, box) in zip(axes, surfaces, strict=True):
        draw_paths(ax, f, paths, box, title)
        if len(paths) > 1:
            ax.legend(loc="lower right", fontsize=8)
    return fig


def draw_slides(f, paths, span):
    "One-dimensional paths ({title: [steps + 1, 1]}) on the curve of `f` over `span` (left, right)."
    import matplotlib.pyplot as plt

    x = torch.linspace(*span, 400)[:, None]
    fig, axes = plt.subplots(1, len(paths), figsize=(2.7 * len(paths), 2.6), sharey=True)
    for ax, (title, path), colour in zip(axes, paths.items(), COLOURS, strict=False):
        ax.plot(x, f(x), color="#999999", lw=1)
        ax.plot(path, f(path), ".-", ms=6, lw=0.9, color=colour)
        ax.plot(path[0], f(path[:1]), "ko", ms=5, mfc="white", zorder=5)
        ax.set(xlim=span, ylim=(None, f(x).max() * 1.05), title=title, xlabel="w")
    axes[0].set_ylabel("height")
    return fig


def draw_curves(curves, xlabel, ylabel, title="", log="", marker="", dashed=()):
    "Curves {label: y, or (x, y)} in one figure; `log` is '', 'x', 'y' or 'xy'; `dashed` are labels."
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots()
    for label, curve in curves.items():
        curve = curve if isinstance(curve, tuple) else (curve,)
        ax.plot(*curve, "--" if label in dashed else "-", marker=marker, ms=4, lw=1.4, label=label)
    ax.set(xlabel=xlabel, ylabel=ylabel, title=title)
    ax.set(**{f"{axis}scale": "log" for axis in log})
    if len(curves) > 1:
        ax.legend()
    return fig


def draw_images(rows):
    "Rows of grey images ({title: [N, 1, H, W]}), each row under its title."
    import matplotlib.pyplot as plt

    n = max(len(x) for x in rows.values())
    fig = plt.figure(figsize=(0.6 * n, 0.9 * len(rows)))
    lines = fig.subfigures(len(rows), 1, squeeze=False)[:, 0]
    for line, (title, x) in zip(lines, rows.items(), strict=True):
        line.suptitle(title, fontsize=9, x=0.01, ha="left")
        axes = line.subplots(1, n, squeeze=False)[0]
        for ax in axes:
            ax.axis("off")
        for ax, image in zip(axes, x, strict=False):
            ax.imshow(image[0].cpu(), cmap="Greys", vmin=0, vmax=1)
    return fig


def draw_gains(panels):
    "Paired runs: panels {title: {arm: [a value for each seed]}}, with a dot for each and a bar to the mean."
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, len(panels), figsize=(4.6 * len(panels), 2.6), sharey=True)
    for ax, (title, arms) in zip(axes, panels.items(), strict=True):
        for i, values in enumerate(reversed(arms.values())):
            values = torch.as_tensor(values)
            ax.barh(i, values.mean(), height=0.6, color=COLOURS[5], alpha=0.6)
            ax.plot(values, [i] * len(values), "o", ms=4, color=COLOURS[0])
        ax.axvline(0, color="black", lw=0.8)
        ax.set(yticks=range(len(arms)), yticklabels=list(reversed(arms)), title=title)
    return fig

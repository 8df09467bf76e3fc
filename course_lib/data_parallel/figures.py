"The figures of lesson data_parallel: functions of plain data that return a matplotlib figure."

from course_lib import show
from course_lib.data_parallel import network

BLUE, RED, GREEN, PINK, ORANGE, SKY, GREY = show.COLOURS


def draw_drift(apart, together):
    "Distance of the ranks' weights from their mean, by step, without and with averaged gradients."
    fig, ax = show.axes(figsize=(6.4, 3.0))
    steps = range(1, len(apart) + 1)
    ax.plot(steps, apart, color=RED, label="each for itself")
    ax.plot(steps, together, color=BLUE, label="gradients averaged")
    ax.set_xlabel("step")
    ax.set_ylabel("distance from the mean")
    ax.set_title("Four replicas of one network")
    ax.legend(loc="center right", bbox_to_anchor=(1.0, 0.35))
    return fig


def ring_counts(n):
    "How many ranks are in each chunk of each rank after each step of the ring: a list of [rank][chunk]."
    now = [[1] * n for _ in range(n)]
    found = [now]
    for step in range(n - 1):
        now = [list(row) for row in now]
        for r in range(n):
            chunk = (r - step - 1) % n
            now[r][chunk] += found[-1][r - 1][chunk]
        found.append(now)
    for step in range(n - 1):
        now = [list(row) for row in now]
        for r in range(n):
            chunk = (r - step) % n
            now[r][chunk] = found[-1][r - 1][chunk]
        found.append(now)
    return found


def draw_ring(n=4):
    "The chunks of a ring all-reduce after each step, with the number of ranks summed in each."
    found = ring_counts(n)
    fig, axes = show.axes(1, len(found), figsize=(8.2, 1.9))
    for i, (ax, now) in enumerate(zip(axes, found, strict=True)):
        ax.imshow(now, cmap="Blues", vmin=0, vmax=1.6 * n)
        for r in range(n):
            for c in range(n):
                ax.text(c, r, now[r][c], ha="center", va="center", fontsize=9)
        ax.set_xticks([])
        ax.set_yticks(range(n) if i == 0 else [], [f"rank {r}" for r in range(n)] if i == 0 else [])
        ax.grid(False)
        ax.set_title("start" if i == 0 else f"step {i}", fontsize=9)
    return fig


def draw_traffic(most=16):
    "What the busiest rank sends, in multiples of the tensor."
    fig, ax = show.axes(figsize=(6.4, 3.0))
    ns = range(2, most + 1)
    ax.plot(ns, [n - 1 for n in ns], color=RED, label="everybody's whole vector, N-1")
    ax.plot(ns, [2 * (n - 1) / n for n in ns], color=BLUE, label="ring, 2(N-1)/N")
    ax.set_xlabel("ranks N")
    ax.set_ylabel("times the tensor")
    ax.set_title("Sent by the busiest rank")
    ax.legend(loc="upper left")
    return fig


def _size(nbytes):
    for unit, scale in (("GB", 2**30), ("MB", 2**20), ("KB", 2**10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}"
    return f"{nbytes:.0f} B"


def _ticks(ax):
    "Round numbers on a logarithmic y axis, written out."
    low, high = ax.get_ylim()
    digits = (1, 2, 5) if high < 1e3 * low else (1,)
    ticks = [d * 10.0**k for k in range(-4, 8) for d in digits if low <= d * 10.0**k <= high]
    ax.set_yticks(ticks, [f"{t:,g}" for t in ticks])
    ax.minorticks_off()


def draw_overlap(runs):
    "Backward and the wire on the clock, from what a rank recorded: {title: events of one rank}."
    fig, axes = show.axes(len(runs), figsize=(6.8, 0.9 + 1.35 * len(runs)), sharex=True, squeeze=False)
    rows = {"backward": 0, "wire": 1}
    for ax, (title, events) in zip(axes[:, 0], runs.items(), strict=True):
        start = min(e.start for e in events)
        for e in events:
            left, wide = 1e3 * (e.start - start), 1e3 * (e.end - e.start)
            if wide:
                wire = e.lane == "wire"
                ax.barh(rows[e.lane], wide, left=left, height=0.66, color=ORANGE if wire else BLUE,
                        alpha=0.6 if wire else 1, edgecolor="white", lw=0.7)  # fmt: skip
            else:
                ax.axvline(left, color=GREY, lw=1, ls="--")
        ax.set_yticks([0, 1], ["backward", "all-reduces"])
        ax.set_ylim(1.6, -0.6)
        ax.grid(False)
        end = 1e3 * (max(e.end for e in events) - start)
        ax.set_title(f"{title}: {end:.0f} ms", fontsize=10)
    axes[-1, 0].set_xlabel("ms since backward began; at the dashed line it has returned, and rank 0 waits")
    return fig


def draw_networks(ranks=8):
    "All-reduce time by size on four networks, by the model."
    fig, ax = show.axes(figsize=(6.6, 3.4))
    sizes = [2.0**k for k in range(10, 31)]
    for name, net in network.NETWORKS.items():
        took = [1e3 * network.ring_seconds(n, ranks, net.alpha, net.beta) for n in sizes]
        ax.loglog(sizes, took, label=name)
    ax.set_xticks([2**10, 2**15, 2**20, 2**25, 2**30], ["1 KB", "32 KB", "1 MB", "32 MB", "1 GB"])
    ax.minorticks_off()
    ax.set_xlabel("bytes")
    ax.set_ylabel("ms")
    ax.set_title(f"Model: a ring all-reduce over {ranks} ranks")
    ax.legend(loc="upper left", fontsize=9)
    return fig


def draw_measured(sizes, seconds, alpha, beta, ranks, where, fitted=()):
    "Measured all-reduces beside the model; the sizes in `fitted` were used to find α and β."
    fig, ax = show.axes(figsize=(6.4, 3.2))
    low, high = min(sizes), max(sizes)
    grid = [low * (high / low) ** (i / 60) for i in range(61)]
    ax.loglog(grid, [1e3 * network.ring_seconds(n, ranks, alpha, beta) for n in grid], color=BLUE,
              label="model")  # fmt: skip
    for used, colour, name in ((True, GREY, "measured, gave α and β"), (False, RED, "measured, predicted")):
        at = [i for i, n in enumerate(sizes) if (n in fitted) is used]
        ax.loglog([sizes[i] for i in at], [1e3 * seconds[i] for i in at], "o", color=colour, label=name)
    ax.set_xticks(sizes, [_size(n) for n in sizes])
    _ticks(ax)
    ax.set_ylabel("ms")
    ax.set_title(f"All-reduce over {ranks} ranks, {where}")
    ax.legend(loc="upper left")
    return fig


def view_buckets(found):
    "The explorer's figure: the schedule for one limit above, what is exposed by limit below."
    fig, (ax, below) = show.axes(2, 1, figsize=(6.8, 4.2), height_ratios=(1, 1.6))
    end = 1e3 * found["backward"]
    ax.barh(0, end, height=0.66, color=BLUE)
    for start, stop, _ in found["spans"]:
        ax.barh(
            1, 1e3 * (stop - start), left=1e3 * start, height=0.66, color=ORANGE, edgecolor="white", lw=0.5
        )
    ax.axvline(end, color=GREY, lw=1, ls="--")
    ax.set_yticks([0, 1], ["backward", "wire"])
    ax.set_ylim(1.6, -0.6)
    ax.grid(False)
    ax.set_xlabel("ms")
    ax.set_title(
        f"{found['network']}, {found['ranks']} ranks, buckets of {found['limit_mb']} MB: "
        f"{1e3 * found['exposed']:.1f} ms exposed", fontsize=10,
    )  # fmt: skip
    below.plot([mb for mb, _ in found["curve"]], [1e3 * s for _, s in found["curve"]], "o-", color=RED, ms=4)
    below.axvline(found["limit_mb"], color=GREY, lw=1, ls="--")
    below.set_xscale("log", base=2)
    below.set_xticks([2, 8, 32, 128, 512, 2048], ["2", "8", "32", "128", "512", "2048"])
    below.set_ylim(0)
    below.set_xlabel("limit of a bucket, MB")
    below.set_ylabel("ms exposed")
    return fig


def draw_steps(points, least, critical):
    "Steps to the target and samples to the target, by batch size."
    fig, (left, right) = show.axes(1, 2, figsize=(7.2, 3.1))
    sizes = [p[0] for p in points]
    grid = [sizes[0] * (sizes[-1] / sizes[0]) ** (i / 60) for i in range(61)]
    for ax, scale, name in ((left, lambda b: 1, "steps"), (right, lambda b: b, "samples")):
        ax.loglog(grid, [scale(b) * least * (1 + critical / b) for b in grid], color=BLUE, label="fit")
        ax.loglog(sizes, [scale(p[0]) * p[1] for p in points], "o", color=RED, label="measured")
        ax.axvline(critical, color=GREY, lw=1, ls="--")
        ax.set_xticks(sizes[::2], [str(b) for b in sizes[::2]])
        _ticks(ax)
        ax.set_xlabel("batch size")
        ax.set_title(f"{name.capitalize()} to the target")
    left.legend(loc="upper right")
    return fig


def view_zero(found):
    "Gigabytes that a rank keeps under each ZeRO stage, stacked, with the GPU's memory as a line."
    fig, ax = show.axes(figsize=(6.6, 3.2))
    names = ["weights", "gradients", "optimizer state"]
    stages = found["stages"]
    base = [0.0] * 4
    for part, (name, colour) in enumerate(zip(names, (BLUE, ORANGE, GREEN), strict=True)):
        values = [s["parts"][part] for s in stages]
        ax.barh(range(4), values, left=base, color=colour, label=name, height=0.66)
        base = [b + v for b, v in zip(base, values, strict=True)]
    right = 1.3 * max(base[0], found["memory"])
    for s in stages:
        ax.text(s["total"] + 0.01 * right, s["stage"], f"{s['total']:,.1f}", va="center", fontsize=9,
                bbox={"color": "white", "pad": 1.5}, zorder=3)  # fmt: skip
    ax.axvline(found["memory"], color=GREY, lw=1.2, ls="--")
    ax.set_yticks(range(4), ["replicas", "stage 1", "stage 2", "stage 3"])
    ax.invert_yaxis()
    ax.set_xlim(0, right)
    ax.grid(False)
    ax.set_xlabel(
        f"GB on each of {found['ranks']} ranks; the dashed line is a memory of {found['memory']} GB"
    )
    ax.set_title(f"{found['billions']:g} billion parameters")
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.1), ncols=3, fontsize=9)
    return fig


def draw_memory(curves):
    "Bytes of full weights and gradients alive after each operator: {name: curve}."
    fig, ax = show.axes(figsize=(6.6, 3.0))
    for (name, curve), colour in zip(curves.items(), (RED, BLUE), strict=False):
        at = [i / max(1, len(curve) - 1) for i in range(len(curve))]
        ax.step(at, [n / 1e3 for n in curve], where="post", color=colour, label=name)
    ax.set_xticks([0, 1], ["forward begins", "backward is over"])
    ax.set_ylabel("KB alive")
    ax.set_ylim(0)
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    return fig

"The figures of lesson data_parallel: functions of plain data that return a matplotlib figure."

from course_lib import show

BLUE, RED, GREEN, PINK, ORANGE, SKY, GREY = show.COLOURS


def draw_copies(losses, apart, together=None):
    "The loss of each copy and the distance between the copies, by step."
    fig, (left, right) = show.axes(1, 2, figsize=(7.6, 3.0))
    steps = range(1, len(apart) + 1)
    for rank, curve in enumerate(losses):
        left.plot(steps, curve, label=f"rank {rank}", lw=1.2)
    left.set_title("Each copy's loss, on its own data")
    left.set_ylabel("loss")
    left.set_ylim(0)
    left.legend(fontsize=9)
    right.plot(steps, apart, color=RED, label="each for itself")
    if together:
        right.plot(steps, together, color=BLUE, label="gradients averaged")
        right.legend(loc="lower right", bbox_to_anchor=(1.0, 0.06))
    right.set_ylim(-0.01 if together else 0)
    right.set_title("Distance between the copies")
    right.set_ylabel("distance / the mean's way")
    for ax in (left, right):
        ax.set_xlabel("step")
    return fig


def ring_counts(n):
    "How many ranks are in each chunk of each rank after each step of the ring: a list of [rank][chunk]."
    now = [[1] * n for _ in range(n)]
    found = [now]
    for step in range(2 * (n - 1)):
        now = [list(row) for row in now]
        for r in range(n):
            chunk = (r - step - (step < n - 1)) % n if step < n - 1 else (r - (step - n + 1)) % n
            came = found[-1][r - 1][chunk]
            now[r][chunk] = now[r][chunk] + came if step < n - 1 else came
        found.append(now)
    return found


def draw_ring(n=4):
    "The chunks of a ring all-reduce after each step, with the number of ranks summed in each."
    found = ring_counts(n)
    fig, axes = show.axes(1, len(found), figsize=(11, 2.6))
    for i, (ax, now) in enumerate(zip(axes, found, strict=True)):
        ax.imshow(now, cmap="Blues", vmin=0, vmax=1.6 * n)
        for r in range(n):
            for c in range(n):
                ax.text(c, r, now[r][c], ha="center", va="center", fontsize=13)
        ax.set_xticks(range(n))
        ax.set_yticks(range(n) if i == 0 else [], [f"rank {r}" for r in range(n)] if i == 0 else [])
        ax.set_xlabel("chunk" if i == 0 else "")
        ax.grid(False)
        ax.set_title("start" if i == 0 else f"step {i}")
    return fig


def draw_traffic(most=16):
    "What the busiest rank sends, in multiples of the tensor."
    fig, ax = show.axes(figsize=(6.4, 2.8))
    ns = range(2, most + 1)
    ax.plot(ns, [n - 1 for n in ns], color=RED, label="the whole vector round the ring, N - 1")
    ax.plot(ns, [2 * (n - 1) / n for n in ns], color=BLUE, label="chunks round the ring, 2(N - 1)/N")
    ax.set_xlabel("ranks N")
    ax.set_ylabel("times the vector")
    ax.set_title("Bytes that one rank sends")
    ax.legend(loc="upper left")
    return fig


def draw_spans(runs):
    "Backward and all-reduces on the clock of one rank: {title: (seconds, spans)}."
    fig, axes = show.axes(len(runs), figsize=(7.2, 0.9 + 1.3 * len(runs)), sharex=True, squeeze=False)
    lanes = {"backward": (0, BLUE, 1.0), "all-reduces": (1, ORANGE, 0.6)}
    for ax, (title, (seconds, spans)) in zip(axes[:, 0], runs.items(), strict=True):
        start = min(s.start for s in spans)
        for s in spans:
            row, colour, alpha = lanes[s.lane]
            left, wide = 1e3 * (s.start - start), 1e3 * (s.end - s.start)
            if wide:
                ax.barh(
                    row, wide, left=left, height=0.66, color=colour, alpha=alpha, edgecolor="white", lw=0.7
                )
            else:
                ax.axvline(left, color=GREY, lw=1, ls="--")
        ax.axvline(1e3 * seconds, color=RED, lw=1.5)
        ax.set_yticks([0, 1], list(lanes))
        ax.set_ylim(1.6, -0.6)
        ax.grid(False)
        ax.set_title(f"{title}: {1e3 * seconds:.1f} ms", fontsize=10)
    axes[-1, 0].set_xlabel(
        "ms since backward began (dashed: backward has returned; red: all means are there)"
    )
    return fig


SIZES = ("GB", 2**30), ("MB", 2**20), ("KB", 2**10)


def size(nbytes):
    "Bytes as text: '512 KB'."
    unit, scale = next((s for s in SIZES if nbytes >= s[1]), ("B", 1))
    return f"{nbytes / scale:.3g} {unit}"


def draw_measured(sizes, seconds, model, where):
    "Measured all-reduces beside `model`, a function of bytes that passes through the first and the last."
    fig, ax = show.axes(figsize=(6.6, 3.2))
    grid = [sizes[0] * (sizes[-1] / sizes[0]) ** (i / 100) for i in range(101)]
    ax.loglog(grid, [1e3 * model(n) for n in grid], "-", color=BLUE, label="model")
    ends, inner = [0, -1], range(1, len(sizes) - 1)
    for at, colour, name in ((ends, GREY, "measured, gives α and β"), (inner, RED, "measured, predicted")):
        ax.loglog([sizes[i] for i in at], [1e3 * seconds[i] for i in at], "o", color=colour, label=name)
    ax.set_xticks(sizes, [size(n) for n in sizes])
    low, high = ax.get_ylim()
    ticks = [d * 10.0**k for k in range(-4, 5) for d in (1, 2, 5) if low <= d * 10.0**k <= high]
    ax.set_yticks(ticks, [f"{t:g}" for t in ticks])
    ax.minorticks_off()
    ax.set_xlabel("size of the tensor")
    ax.set_ylabel("ms")
    ax.set_title(f"One all-reduce, {where}")
    ax.legend(loc="upper left")
    return fig


def view_buckets(found):
    "The explorer's figure: the schedule for one limit above, what is exposed by limit below."
    fig, (ax, below) = show.axes(2, 1, figsize=(7.0, 4.4), height_ratios=(1, 1.6))
    end = 1e3 * found["backward"]
    ax.barh(0, end, height=0.66, color=BLUE)
    for start, stop in found["spans"]:
        wide = 1e3 * (stop - start)
        ax.barh(1, wide, left=1e3 * start, height=0.66, color=ORANGE, edgecolor="white", lw=0.5)
    ax.axvline(end, color=GREY, lw=1, ls="--")
    ax.set_yticks([0, 1], ["backward", "network"])
    ax.set_ylim(1.6, -0.6)
    ax.grid(False)
    ax.set_xlabel("ms since backward began")
    head = f"{found['network']}, {found['ranks']} ranks, buckets of {found['limit_mb']} MB"
    ax.set_title(f"Model: {head}: {1e3 * found['exposed']:.1f} ms exposed", fontsize=10)
    below.plot([mb for mb, _ in found["curve"]], [1e3 * s for _, s in found["curve"]], "o-", color=RED, ms=4)
    below.axvline(found["limit_mb"], color=GREY, lw=1, ls="--")
    below.set_xscale("log", base=2)
    below.set_xticks([2, 8, 32, 128, 512, 2048], ["2", "8", "32", "128", "512", "2048"])
    below.set_ylim(0)
    below.set_xlabel("limit of a bucket, MB")
    below.set_ylabel("ms exposed")
    return fig


def draw_batches(found):
    "Steps and samples to the target by batch size: {batch: (median, least, most) steps}."
    fig, axes = show.axes(1, 2, figsize=(7.6, 3.0))
    sizes = list(found)
    for ax, scale, name in zip(axes, (lambda b: 1, lambda b: b), ("Steps", "Samples"), strict=True):
        low, mid, high = ([scale(b) * found[b][i] for b in sizes] for i in (1, 0, 2))
        ax.fill_between(sizes, low, high, color=BLUE, alpha=0.2, label="three seeds")
        ax.plot(sizes, mid, "o-", color=BLUE, label="median")
        ax.set_xscale("log", base=2)
        ax.set_yscale("log", base=2)
        ax.set_xticks(sizes[::2], [str(b) for b in sizes[::2]])
        ticks = [2**k for k in range(30) if 0.8 * min(low) <= 2**k <= 1.1 * max(high)]
        ax.set_yticks(ticks, [f"{t:,.0f}" for t in ticks])
        ax.minorticks_off()
        ax.set_xlabel("batch size")
        ax.set_ylabel(name.lower())
        ax.set_title(f"{name} to the target, best learning rate")
    ideal = [found[sizes[0]][0] * sizes[0] / b for b in sizes]
    axes[0].plot(sizes, ideal, color=GREY, ls="--", lw=1, label="half the steps for twice the batch")
    axes[0].set_ylim(0.7 * min(found[b][1] for b in sizes))
    axes[0].legend(fontsize=8)
    return fig


def draw_scaling(found, where):
    "Throughput over that of as many ranks alone, measured and by the model: {kind: (measured, model)}."
    fig, ax = show.axes(figsize=(6.6, 0.8 + 0.6 * len(found)))
    for i, (run, model) in enumerate(found.values()):
        ax.barh(i - 0.18, run, height=0.36, color=BLUE, label="measured" if i == 0 else None)
        ax.barh(i + 0.18, model, height=0.36, color=SKY, label="model" if i == 0 else None)
    ax.axvline(1, color=GREY, lw=1, ls="--")
    ax.set_yticks(range(len(found)), list(found))
    ax.invert_yaxis()
    ax.set_xlabel(f"throughput of {where} over that of {where} alone (dashed: nothing lost)")
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2)
    return fig

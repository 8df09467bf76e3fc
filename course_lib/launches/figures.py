"The figures of lesson launches: functions of plain data that return a matplotlib figure."

import statistics

from course_lib import show

KINDS = {
    "launch": ("Python launches", 0),
    "wait": ("Python waits", 1),
    "copy": ("copy", 3),
    "kernel": ("kernel", 2),
}


def draw_floor(times):
    "µs of a step against the network's width, {width: [µs of each round]}, and the slope of the work."
    fig, ax = show.axes()
    widths, medians = list(times), [statistics.median(found) for found in times.values()]
    for width, found in times.items():
        ax.plot([width] * len(found), found, "o", color=show.COLOURS[5], ms=5, mew=0, alpha=0.7)
    ax.plot(widths, medians, "o-", color=show.COLOURS[0], label="a step (median; dots: rounds)")
    ax.plot(widths, [medians[-1] * (w / widths[-1]) ** 2 for w in widths], "--", color=show.COLOURS[6],
            label="if time fell with the work (width squared)")  # fmt: skip
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(widths, [f"{w:,}" for w in widths])
    ax.set(xlabel="width of the network", ylabel="µs a step")
    ax.legend()
    return fig


def draw_timeline(timelines):
    "Lanes of Python and of the streams, one timeline below the other on the same scale: {title: spans}."
    lanes = {
        title: list(dict.fromkeys(["Python", *(s.lane for s in spans)])) for title, spans in timelines.items()
    }
    last = max(s.end for spans in timelines.values() for s in spans)
    heights = [0.55 + 0.28 * len(rows) for rows in lanes.values()]
    fig, axes = show.axes(len(timelines), figsize=(7.4, 0.7 + sum(heights)), squeeze=False, sharex=True,
                          height_ratios=heights)  # fmt: skip
    for ax, (title, spans) in zip(axes[:, 0], timelines.items(), strict=True):
        for kind, (label, colour) in KINDS.items():
            mine = [s for s in spans if s.kind == kind]
            edges = [0.5 if s.end - s.start > 0.008 * last else 0 for s in mine]  # would hide a thin bar
            ax.barh([lanes[title].index(s.lane) for s in mine], [s.end - s.start for s in mine], height=0.75,
                    left=[s.start for s in mine], color=show.COLOURS[colour], edgecolor="white", lw=edges,
                    label=label if mine else None)  # fmt: skip
        ax.set_title(f"{title}: {max(s.end for s in spans):,.0f} µs", fontsize=10)
        ax.set_yticks(range(len(lanes[title])), lanes[title])
        ax.set_ylim(len(lanes[title]) - 0.5, -0.5)
        ax.grid(False, axis="y")
    axes[-1, 0].set_xlabel("µs of virtual time")
    handles = {}
    for ax in axes[:, 0]:
        handles |= {label: h for h, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    fig.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4)
    return fig


def view_graph(data):
    "The explorer's figure."
    return draw_timeline(data)


def draw_bars(groups, xlabel="µs a call"):
    "Medians as bars with their range over the rounds, a panel for each group: {title: {label: [value, …]}}."
    tallest = max(map(len, groups.values()))
    fig, axes = show.axes(1, len(groups), figsize=(7.6, 0.9 + 0.4 * tallest), squeeze=False)
    for i, (ax, (title, bars)) in enumerate(zip(axes[0], groups.items(), strict=True)):
        middle = [statistics.median(found) for found in bars.values()]
        off = [
            [abs(end(found) - m) for m, found in zip(middle, bars.values(), strict=True)]
            for end in (min, max)
        ]
        ax.barh(list(bars), middle, xerr=off, color=show.COLOURS[i], ecolor=show.COLOURS[6], capsize=3)
        for row, (m, found) in enumerate(zip(middle, bars.values(), strict=True)):
            ax.annotate(show.number(m), (max(found), row), (5, 0), textcoords="offset points", va="center")
        ax.set_xlim(0, 1.25 * max(map(max, bars.values())))
        ax.set_title(title, fontsize=10)
        ax.set_xlabel(xlabel)
        ax.set_ylim(tallest - 0.5, -0.5)  # bars of one height in all panels
        ax.grid(False, axis="y")
    return fig


def draw_gains(gains):
    "How many times as fast as on one stream, by the number of streams: {kernel: {streams: times}}."
    fig, ax = show.axes(figsize=(6.6, 3.4))
    streams = list(next(iter(gains.values())))
    ax.plot(streams, streams, "--", color=show.COLOURS[6], lw=1, label="all streams at once")
    for i, (name, found) in enumerate(gains.items()):
        ax.plot(list(found), list(found.values()), "o-", color=show.COLOURS[i], ms=4, label=name)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_ticks(streams, [str(n) for n in streams])
    ax.set(xlabel="streams", ylabel="times as fast as one", ylim=(0.8, 1.2 * streams[-1]))
    ax.legend(title="kernel", loc="upper left")
    return fig

"Figures of lesson llama: the ladder, memory of a step, losses of training, tokens per second of ranks."

from course_lib.show import COLOURS, axes


def draw_ladder(ladder):
    "Thousand tokens per second of each rung, {name: tokens / s}, and how many times the first rung it is."
    fig, ax = axes(figsize=(6.8, 0.7 + 0.34 * len(ladder)))
    first, top = next(iter(ladder.values())), max(ladder.values())
    for i, rate in enumerate(ladder.values()):
        ax.barh(i, rate / 1e3, height=0.66, color=COLOURS[0])
        ax.text(
            (rate + 0.01 * top) / 1e3, i, f"{rate / 1e3:,.0f}  ({rate / first:.1f}×)", va="center", fontsize=9
        )
    ax.set_yticks(range(len(ladder)), list(ladder))
    ax.set(xlabel="thousand tokens per second", xlim=(0, 1.2 * top / 1e3))
    ax.invert_yaxis()
    ax.grid(False, axis="y")
    return fig


def view_memory(found):
    "GB of a training step by part, and the memory of the GPU as a dashed line."
    fig, ax = axes(figsize=(6.6, 1.9))
    left, right = 0.0, 1.25 * max(sum(found["need"].values()), found["gpu"])
    for colour, (name, n) in zip(COLOURS, found["need"].items(), strict=False):
        ax.barh(0, n, left=left, color=colour, label=f"{name} {n:,.0f} GB", height=0.5)
        left += n
    fits = "" if left <= found["gpu"] else ", too much"
    ax.text(
        left + 0.01 * right,
        0,
        f"{left:,.0f} GB{fits}",
        va="center",
        fontsize=9,
        bbox={"color": "white", "pad": 1.5},
        zorder=3,
    )
    ax.axvline(found["gpu"], color=COLOURS[6], linewidth=1.2, linestyle="--")
    ax.set_yticks([])
    ax.grid(False, axis="y")
    ax.set(
        xlim=(0, right),
        ylim=(-0.5, 0.5),
        title=f"{found['millions']:,.0f} million parameters",
        xlabel=f"GB (dashed: {found['gpu']} GB)",
    )
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.15), ncols=4, fontsize=9, columnspacing=1.2)
    return fig


def draw_losses(losses, ngram, valid):
    "Training loss, a mean of a thirtieth of the steps, and both models' validation losses as lines."
    fig, ax = axes(figsize=(6.6, 3.0))
    window = max(1, len(losses) // 30)
    means = [sum(losses[i - window : i]) / window for i in range(window, len(losses) + 1)]
    ax.plot(range(window, len(losses) + 1), means, color=COLOURS[5], label="Llama, training batches")
    ax.axhline(ngram, color=COLOURS[1], linestyle="--", label=f"5-gram model, validation: {ngram:.2f}")
    ax.axhline(valid, color=COLOURS[0], label=f"Llama, validation: {valid:.2f}")
    ax.set(xlabel="step", ylabel="loss (nats per token)")
    ax.legend(loc="upper right")
    return fig


def draw_ways(rates):
    "Thousand tokens per second by way of sharing the work, {(way, GPUs): tokens / s}, each way by its GPUs."
    ways = list(dict.fromkeys(way for way, _ in rates))
    rates = dict(sorted(rates.items(), key=lambda item: (ways.index(item[0][0]), item[0][1])))
    fig, ax = axes(figsize=(max(5.8, 0.95 * len(rates)), 2.6))
    for i, ((_, gpus), rate) in enumerate(rates.items()):
        ax.bar(i, rate / 1e3, color=COLOURS[0] if gpus == 1 else COLOURS[2], width=0.6)
        ax.text(i, rate / 1e3, f"{rate / 1e3:,.0f}", ha="center", va="bottom", fontsize=9)
    ax.set_xticks(range(len(rates)), [f"{way}\n{n} GPU{'s' * (n > 1)}" for way, n in rates])
    ax.set(ylabel="thousand tokens per second", ylim=(0, 1.15 * max(rates.values()) / 1e3))
    ax.grid(False, axis="x")
    return fig

"The drawings of lesson triton and the counting behind them: the lanes of a launch, the order of tiles."

from course_lib import show

BLUE, RED = show.COLOURS[:2]


# --- lanes --------------------------------------------------------------------------


def lanes(n=19, block=8):
    """The lanes of a one-dimensional launch over `n` elements in blocks of `block`.

    Returns {"n", "block", "programs", "lanes", "idle", "share"}: the size of the grid, how many lanes it has,
    how many of them hold no element and must be masked, and which part of all lanes that is.
    """
    if n < 1 or block < 1:
        raise ValueError(f"n is {n} and block is {block}; expected two positive integers")
    programs = -(-n // block)
    total = programs * block
    return {
        "n": n,
        "block": block,
        "programs": programs,
        "lanes": total,
        "idle": total - n,
        "share": (total - n) / total,
    }


def view_lanes(data):
    "Programs by lanes: each square is a lane with the index of its element; masked lanes are hollow."
    import matplotlib.pyplot as plt
    from matplotlib.patches import Rectangle

    n, block, programs = data["n"], data["block"], data["programs"]
    fig, ax = plt.subplots(figsize=(6.8, 1.1 + min(3.6, 0.34 * programs)))
    size = 8 if block <= 16 and programs <= 10 else 0
    for p in range(programs):
        for lane in range(block):
            i = p * block + lane
            on = i < n
            box = Rectangle(
                (lane + 0.06, p + 0.08),
                0.88,
                0.84,
                fc=BLUE if on else "white",
                ec=BLUE if on else RED,
                lw=0.8,
            )
            ax.add_patch(box)
            if size:
                colour = "white" if on else RED
                ax.text(lane + 0.5, p + 0.5, f"{i}", ha="center", va="center", fontsize=size, color=colour)
    ax.set(xlim=(0, block), ylim=(programs, 0), xlabel="lane", ylabel="program")
    step = max(1, block // 8)
    ax.set_xticks([x + 0.5 for x in range(0, block, step)], range(0, block, step))
    step = max(1, programs // 8)
    ax.set_yticks([y + 0.5 for y in range(0, programs, step)], range(0, programs, step))
    ax.grid(False)
    ax.set_title(
        f"n = {n}, BLOCK = {block}: {programs} program{'s' * (programs > 1)}, {data['lanes']} lanes, "
        f"{data['idle']} masked ({data['share']:.0%})"
    )
    return fig


# --- tiles and waves ----------------------------------------------------------------


def grouped(pid, tiles_m, tiles_n, group):
    """The tile (row, column) of program `pid`: `group` rows of tiles at a time, column by column in each.

    With a group of 1 tiles are taken row by row. Source: Triton's tutorial on matrix multiplication.
    """
    first = pid // (group * tiles_n) * group
    height = min(tiles_m - first, group)
    within = pid % (group * tiles_n)
    return first + within % height, within // height


def waves(tiles, wave):
    """What each wave of `wave` programs needs, as (rows of tiles, columns of tiles): blocks of A and of B.

    `tiles` are the tiles of all programs in order. Programs of one wave run at the same time, so a block that
    two of them need is fetched from memory once and then found in the cache.
    """
    found = []
    for start in range(0, len(tiles), wave):
        part = tiles[start : start + wave]
        found.append((len({m for m, _ in part}), len({n for _, n in part})))
    return found


def draw_orders(orders, wave):
    "Maps of {label: tiles in order}: tiles of the first wave in colour, numbered by program."
    import matplotlib.pyplot as plt
    from matplotlib.patches import Rectangle

    fig, axes = plt.subplots(1, len(orders), figsize=(3.4 * len(orders), 3.7), squeeze=False)
    for ax, (label, tiles) in zip(axes[0], orders.items(), strict=True):
        for pid, (m, n) in enumerate(tiles):
            on = pid < wave
            ax.add_patch(Rectangle((n + 0.05, m + 0.05), 0.9, 0.9, fc=BLUE if on else "#e8e8e8", lw=0))
            colour = "white" if on else "#777777"
            ax.text(n + 0.5, m + 0.5, f"{pid}", ha="center", va="center", fontsize=8, color=colour)
        a, b = waves(tiles, wave)[0]
        ax.set(xlim=(0, 1 + max(n for _, n in tiles)), ylim=(1 + max(m for m, _ in tiles), 0))
        ax.set(xlabel="column of tiles", ylabel="row of tiles")
        ax.set_xticks([])
        ax.set_yticks([])
        ax.set_aspect("equal")
        ax.grid(False)
        ax.set_title(f"{label}\nfirst wave needs {a} + {b} = {a + b} blocks", fontsize=10)
    return fig

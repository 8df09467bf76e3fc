"""Images of print at any size, from the fonts that matplotlib ships. Reached through `data`.

Images are uint8 tensors [N, C, size, size], so that a whole set stays in memory or on a GPU.
"""

import functools
from pathlib import Path
from typing import NamedTuple

import torch

from course_lib import data

ASSETS = Path(__file__).resolve().parent / "assets"

# The text faces among matplotlib's font files: the others hold symbols, are blank on prose or draw boxes.
FACES = (
    "DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSans-BoldOblique",
    "DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-Italic", "DejaVuSerif-BoldItalic",
    "STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", "STIXGeneralBolIta",
    "DejaVuSansMono", "cmr10", "cmss10", "cmtt10",
)  # fmt: skip


class Images(NamedTuple):
    """Images and labels as pairs (x, y), the classes' names, where they come from and under which licence.

    x is uint8 [N, C, size, size], y is int64 [N], both on the CPU. `extra` holds what else is known of each
    image, by name, as a pair (train, valid).
    """

    train: tuple
    valid: tuple
    names: tuple
    source: str
    licence: str
    extra: dict


def typefaces(size=128, n=2000, seed=0, em=None, n_valid=None, pages=12):
    """Crops of printed pages; the label is the typeface. `n` for training, `n_valid` (n // 4) for validation.

    Sixteen faces, grey, [N, 1, size, size]. `em` is the range of the letters' size in pixels, (lowest,
    highest), drawn evenly on a log scale; by default (size / 16, size / 4). `extra["em"]` tells each image's.
    They are cut from `pages` pages of each face on each side of the split, each with letters of another size;
    rendering those takes nearly all of the time. Paper, ink and grain vary. Training and validation pages set
    different texts. Rendered on first use and cached. ValueError for sizes and ranges that leave nothing to
    read.
    """
    low, high = em or (size / 16, size / 4)
    n_valid = n // 4 if n_valid is None else n_valid
    _check(size, low, high, n, n_valid)
    if pages < 1:
        raise ValueError(f"{pages} pages of each face; expected at least 1")
    path = data.cached(
        f"typefaces-1-{size}-{n}-{n_valid}-{low:g}-{high:g}-{seed}{f'-{pages}' if pages != 12 else ''}.pt",
        lambda p: torch.save(_typefaces(size, n, n_valid, seed, low, high, pages), p),
    )
    sides = torch.load(path, weights_only=True)
    (x, y, em_train), (vx, vy, em_valid) = sides["train"], sides["valid"]
    return Images(
        train=(x, y),
        valid=(vx, vy),
        names=FACES,
        source="prose in the public domain (Carroll, Melville, Austen and others; assets/prose-*.txt), set "
        "in the text faces that matplotlib ships",
        licence="texts: public domain; fonts: DejaVu (Bitstream Vera licence), STIX (OFL 1.1), "
        "Computer Modern (AMS, OFL 1.1)",
        extra={"em": (em_train, em_valid)},
    )


def _check(size, low, high, n, n_valid):
    if size < 16 or not 3 <= low <= high <= size:
        raise ValueError(
            f"size {size} with letters of {low:g} to {high:g} pixels; expected at least 16 pixels, and "
            "letters from 3 pixels up to the image's size"
        )
    if n < 1 or n_valid < 1:
        raise ValueError(f"{n} training and {n_valid} validation images; expected at least 1 of each")


def _typefaces(size, n, n_valid, seed, low, high, pages):
    import numpy as np

    # RandomState's numbers are frozen by NumPy's compatibility policy.
    random = np.random.RandomState(seed)
    grain = _grain(random, size)
    return {
        side: _crops(random, count, size, low, high, _prose(side), grain, pages)
        for side, count in (("train", n), ("valid", n_valid))
    }


def _prose(side):
    return " ".join((ASSETS / f"prose-{side}.txt").read_text(encoding="utf-8").split())


def _crops(random, n, size, low, high, text, grain, pages):
    import numpy as np

    page_of = np.arange(n) % (len(FACES) * pages)  # page p sets face p % 16: the faces are balanced
    x = np.empty((n, 1, size, size), np.uint8)
    em = np.empty(n, np.float32)
    pages = min(n, len(FACES) * pages)
    parts = -(-pages // len(FACES))
    for p in range(pages):
        # Of each face one page with letters from each of `parts` even parts of the log range.
        share = (p // len(FACES) + random.rand()) / parts
        pixels = round(low * (high / low) ** share)
        page = _page(random, FACES[p % len(FACES)], pixels, 2 * size, text)
        for i in np.flatnonzero(page_of == p):
            x[i, 0] = _printed(random, _piece(random, page, size), _piece(random, grain, size))
            em[i] = pixels
    order = random.permutation(n)
    y = (page_of % len(FACES)).astype(np.int64)
    return torch.from_numpy(x[order]), torch.from_numpy(y[order]), torch.from_numpy(em[order])


def _page(random, face, em, side, text):
    """A square page of prose: 0 is ink, 255 is paper.

    Set at twice the size and averaged, as a scanner would: fonts drawn small are bent to the pixel grid.
    """
    import numpy as np
    from PIL import Image, ImageDraw

    side, em = 2 * side, 2 * em
    page = Image.new("L", (side, side), 255)
    draw, f = ImageDraw.Draw(page), font(face, em)
    letters = int(1.2 * 200 * side / f.getlength(text[:200])) + 8  # enough for a stretch of narrow letters
    at = random.randint(len(text))
    for top in np.arange(-random.rand() * em, side, 1.25 * em):
        line = (text[at:] + " " + text * (letters // len(text) + 1))[:letters]
        draw.text((-random.rand() * em, top), line, font=f, fill=0)
        at = (at + letters) % len(text)
    return np.asarray(page.reduce(2))


# Letters of European alphabets: a few shapes, and marks that tell them apart.
CHARACTERS = "aàáâãäåeèéêëiìíîïoòóôõöøuùúûüyýÿnñcçsšzž"
LATIN = FACES[:12] + tuple(f"DejaVuSansMono{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique"))
HELD_OUT = ("DejaVuSans-Bold", "DejaVuSerif-Italic", "STIXGeneralBol", "DejaVuSansMono-Oblique")


def letters(size=96, n=2400, seed=0, em=None, n_valid=None):
    """One letter somewhere on a sheet, many with an accent; the label is the letter, accent included.

    Forty letters, grey, [N, 1, size, size]; `n` for training, `n_valid` (n // 4) for validation. `em` is the
    range of their size in pixels, (lowest, highest), drawn evenly on a log scale; by default (size / 3,
    3 size / 4). `extra["em"]` tells each one's, `extra["face"]` its typeface. Twelve faces are for training,
    four others for validation. Rendered on first use and cached. ValueError for sizes that leave nothing to
    read.
    """
    low, high = em or (size / 3, 3 * size / 4)
    n_valid = n // 4 if n_valid is None else n_valid
    _check(size, low, high, n, n_valid)

    def make(path):
        import numpy as np

        random = np.random.RandomState(seed)
        train = _letters(random, n, size, low, high, [f for f in LATIN if f not in HELD_OUT])
        torch.save({"train": train, "valid": _letters(random, n_valid, size, low, high, HELD_OUT)}, path)

    path = data.cached(f"letters-1-{size}-{n}-{n_valid}-{low:g}-{high:g}-{seed}.pt", make)
    sides = torch.load(path, weights_only=True)
    (x, y, em_train, face_train), (vx, vy, em_valid, face_valid) = sides["train"], sides["valid"]
    return Images(
        train=(x, y),
        valid=(vx, vy),
        names=tuple(CHARACTERS),
        source="letters with and without accents, drawn in text faces that matplotlib ships",
        licence="fonts: DejaVu (Bitstream Vera licence), STIX (OFL 1.1)",
        extra={"em": (em_train, em_valid), "face": (face_train, face_valid)},
    )


def _letters(random, n, size, low, high, faces):
    import numpy as np

    x = np.empty((n, 1, size, size), np.uint8)
    y = random.permutation(np.arange(n) % len(CHARACTERS))
    em = np.exp(random.uniform(np.log(low), np.log(high), n)).round().astype(np.int64)
    face = random.randint(len(faces), size=n)
    grain = _grain(random, size)
    for i in range(n):
        glyph = _glyph(CHARACTERS[y[i]], font(faces[face[i]], 2 * int(em[i])))
        h, w = min(glyph.shape[0], size), min(glyph.shape[1], size)
        top, left = random.randint(size - h + 1), random.randint(size - w + 1)
        sheet = np.full((size, size), 255, np.uint8)
        sheet[top : top + h, left : left + w] = glyph[:h, :w]
        x[i, 0] = _printed(random, sheet, _piece(random, grain, size))
    return (
        torch.from_numpy(x),
        torch.from_numpy(y.astype(np.int64)),
        torch.from_numpy(em.astype(np.float32)),
        [faces[k] for k in face],
    )


def _glyph(letter, f):
    "A letter at half the size of its font, cut out: 0 is ink, 255 is paper."
    import numpy as np
    from PIL import Image, ImageDraw

    left, top, right, bottom = f.getbbox(letter)
    image = Image.new("L", (right - left, bottom - top), 255)
    ImageDraw.Draw(image).text((-left, -top), letter, font=f, fill=0)
    return np.asarray(image.reduce(2))


def _grain(random, size):
    "Noise of the paper, twice as wide and high as an image, to cut pieces from."
    import numpy as np

    return random.normal(0, 8, (2 * size, 2 * size)).astype(np.int16)


def _piece(random, sheet, size):
    "A square piece of a sheet, from anywhere on it."
    top, left = (random.randint(side - size + 1) for side in sheet.shape)
    return sheet[top : top + size, left : left + size]


def _printed(random, crop, grain):
    "A crop of a page in some tone of ink on some tone of paper, with grain."
    import numpy as np

    paper, ink = random.uniform(160, 255), random.uniform(0, 90)
    tones = np.linspace(ink, paper, 256).astype(np.int16)
    return (tones[crop] + grain).clip(0, 255).astype(np.uint8)


@functools.cache
def font(face, em):
    "The font of one of matplotlib's faces, `em` pixels high. DataError where matplotlib doesn't have it."
    import matplotlib
    from PIL import ImageFont

    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{face}.ttf"
    try:
        # The basic layout gives the same text everywhere: the other needs a library that may be missing.
        return ImageFont.truetype(str(path), int(em), layout_engine=ImageFont.Layout.BASIC)
    except OSError:
        raise data.DataError(f"matplotlib has no font {path.name}: install matplotlib again") from None

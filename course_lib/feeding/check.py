"""Checks of feeding. Oracles: tensors that are padded, a network that sees each document alone, order
statistics, all partitions of few documents, files written byte by byte."""

import itertools
import math
import pickle
import random
import re
import statistics
import struct
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from course_lib import checking as core
from course_lib import feeding
from course_lib.checking import yours  # noqa: F401

# Lengths of the lesson's documents, at every twentieth part of them.
QUANTILES = (16, 18, 21, 26, 34, 45, 58, 73, 92, 113, 141, 174, 210, 252, 301, 364, 445, 512, 512, 512, 512)


def _real_lengths(n, context=512):
    "`n` lengths drawn like those of the lesson, 1 to `context`."
    drawn = np.interp([20 * random.random() for _ in range(n)], range(21), QUANTILES)
    return [max(1, round(x * context / 512)) for x in drawn]


def _once_each(rows, n, what):
    "Require `rows` to be lists of ints that hold each of 0 … n - 1 once."
    lists = isinstance(rows, list | tuple) and all(isinstance(row, list | tuple) for row in rows)
    core.require(lists, f"{what}: expected a list of lists, got {core.kind(rows)}")
    flat = [i for row in rows for i in row]
    odd = [i for i in flat if isinstance(i, bool) or not isinstance(i, int | np.integer)]
    core.require(not odd, f"{what}: expected document numbers (ints), got {core.kind((odd or [0])[0])}")
    for i in range(n) if sorted(flat) != list(range(n)) else ():
        times = flat.count(i)
        core.require(times == 1, f"{what}: document {i} is there {times} times, expected once")
    core.require(len(flat) == n, f"{what}: there is no document {max(flat, default=0)}")
    return rows


def _says(answer, *args, words, why):
    "Require a ValueError of one sentence that contains `words`."
    try:
        got = core.call(answer, *args)
    except core.Wrong as e:
        said = str(e.cause) if isinstance(e.cause, ValueError) else None
        core.require(said is not None, f"{why}: expected a ValueError, got {core.describe(e.cause or e)}")
        numbers = re.findall(r"\d+", re.sub(r"(?<=\d),(?=\d)", "", said))  # whole ones: a 5 is not in 512
        good = "\n" not in said and all(w in (numbers if w.isdigit() else said) for w in words)
        wanted = " and ".join(words)
        core.require(good, f"{why}: expected one sentence that contains {wanted}, got {said[:150]!r}")
    else:
        raise core.Wrong(f"{why}: expected a ValueError, got {core.kind(got)}")


@core.exercise("feeding.1", "tokens, slots and waste of ragged batches, for any multiple")
def padding(answer):
    core.need_callable(answer)
    for multiple in (None, 1, 7, 64, random.choice((24, 48, 100))):
        batches = [[random.randint(1, 90) for _ in range(n)] for n in (1, *core.ragged(2, 9, 4))]
        batches += [[multiple or 5] * 3, [random.randint(400, 500), 1]]  # exactly a multiple; mostly padding
        slots, step = 0, multiple or 1
        for batch in batches:
            rows = pad_sequence([torch.ones(n) for n in batch], batch_first=True)
            slots += F.pad(rows, (0, -rows.shape[1] % step)).numel()
        tokens, kept = sum(map(sum, batches)), [list(b) for b in batches]
        got = core.call(answer, iter(kept), **({"multiple": multiple} if multiple else {}))
        got = core.parts(got, "tokens slots waste", "what padding returns")
        core.require(kept == batches, "padding changed a batch; leave the batches as they are")
        for name, total in zip(("tokens", "slots"), got, strict=False):
            core.require(
                isinstance(total, int | np.integer), f"{name}: expected an int, got {core.kind(total)}"
            )
        what = f"of batches with {[len(b) for b in batches]} documents, multiple {step}"
        core.equal(got[0], tokens, f"tokens {what}")
        core.equal(got[1], slots, f"slots {what}")
        core.close(got[2], 1 - tokens / slots, f"waste {what}", 1e-9, 1e-12)


@core.exercise("feeding.2", "every document once, no row too full, within 1 % of the bound in any order")
def pack(answer):
    core.need_callable(answer)
    real, small = _real_lengths(6000), _real_lengths(3000, 300)
    few = [random.randint(1, 30) for _ in range(7)]
    cases = [(real, 512, " in random order"), (sorted(real), 512, ", short ones first"), (small, 300, ""),
             (sorted(real, reverse=True), 512, ", long ones first"),
             ([], 9, ""), ([7], 7, ""), (few, 31, ""), ([*few, 601], 640, "")]  # fmt: skip
    for lengths, context, order in cases:
        what = f"{len(lengths)} documents{order}, context {context}"
        rows = _once_each(core.call(answer, lengths, context), len(lengths), what)
        fullest = max((sum(lengths[i] for i in row) for row in rows), default=0)
        core.require(fullest <= context, f"{what}: one row has {fullest} tokens, it can hold {context}")
        bound = -(-sum(lengths) // context)
        most = math.floor(1.01 * bound) if bound > 99 else len(lengths)
        core.require(len(rows) <= most, f"{what}: expected {most} rows or fewer, got {len(rows)}")
    at, size = random.randrange(3, 8), random.randint(514, 2000)
    why = f"document {at} has {size} tokens and a row 512"
    _says(answer, [40] * at + [size] + [30] * 5, 512, words=(str(at), str(size)), why=why)


class _Reader:
    "A network in float64 that depends on all that a token may see, and on positions."

    def __init__(self, vocabulary, context, width=16):
        sizes = (vocabulary, context, 3 * width, 3 * width, vocabulary)
        made = [torch.randn(n, width, dtype=torch.float64) / width**0.5 for n in sizes]
        self.embed, self.place, self.qkv, self.head = 4 * made[0], 4 * made[1], made[2:4], 3 * made[4]

    def losses(self, tokens, targets, positions, mask):
        "The loss at each position; 0 where the target is -100."
        x = self.embed[tokens] + self.place[positions]
        for qkv in self.qkv:
            q, k, v = (x @ qkv.T).chunk(3, -1)
            x = x + (q @ k.T).masked_fill(~mask, -math.inf).softmax(-1) @ v
        return F.cross_entropy(x @ self.head.T, targets, reduction="none")


def _row(pack_row, document_mask, documents, context, what):
    "The learner's tensors and mask, of the right kinds, with the right targets."
    row = core.call(pack_row, documents, context)
    row = core.parts(row, "tokens targets positions document", "what pack_row returns")
    text = torch.cat(documents)
    nexts = [F.pad(d[1:], (0, 1), value=-100) for d in documents]
    nexts = F.pad(torch.cat(nexts), (0, context - len(text)), value=-100)
    for name, got in zip(("tokens", "targets", "positions", "document"), row, strict=True):
        _tensor(got, torch.int64, (context,), f"{what}: {name}")
    core.close(row[0], F.pad(text, (0, context - len(text))), f"{what}: tokens", 0, 0)
    core.close(row[1], nexts, f"{what}: targets", 0, 0)
    places = torch.cat([torch.arange(len(d)) for d in documents])
    core.close(row[2][: len(text)], places, f"{what}: positions of the documents", 0, 0)
    inside = bool(((row[2] >= 0) & (row[2] < context)).all())
    core.require(inside, f"{what}: expected positions from 0 to {context - 1} in the padding too")
    mask = _tensor(core.call(document_mask, row[3]), torch.bool, (context, context), f"{what}: mask")
    core.require(bool(mask.any(1).all()), f"{what}: a row of the mask is empty: its softmax would be NaN")
    alone = not mask[len(text) :, : len(text)].any()
    core.require(alone, f"{what}: the padding sees a document; give it a number of its own")
    return (*row[:3], mask)


def _tensor(got, dtype, shape, what):
    good = isinstance(got, torch.Tensor) and got.dtype == dtype and got.shape == shape
    kind = f"a {str(dtype).removeprefix('torch.')} tensor of shape {list(shape)}"
    core.require(good, f"{what}: expected {kind}, got {core.kind(got)}")
    return got


@core.exercise("feeding.3", "each document's loss is as alone, in full rows too; no document changes another")
def pack_row(pack_row, document_mask):
    for answer in (pack_row, document_mask):
        core.need_callable(answer)
    for room in (0, 1, random.randint(5, 9), None):  # with 0 nothing is padded; at last one document fills it
        sizes = [*core.ragged(2, 12, 4), 1] if room is not None else core.ragged(2, 12, 1)
        random.shuffle(sizes)
        documents, context = [torch.randint(23, (n,)) for n in sizes], sum(sizes) + (room or 0)
        what, reader = f"documents of {sizes} tokens in a row of {context}", _Reader(24, context)
        row = _row(pack_row, document_mask, documents, context, what)
        each, starts = reader.losses(*row), [0, *itertools.accumulate(sizes)]
        for changed in range(len(sizes)):
            start, end = starts[changed], starts[changed + 1]
            d, n = documents[changed], sizes[changed] - 1
            alone = reader.losses(d[:-1], d[1:], torch.arange(n), torch.ones(n, n, dtype=torch.bool).tril())
            why = f"{what}: losses of document {changed} alone and in the row (what does it see?)"
            core.close(each[start : end - 1], alone, why, 1e-9, 1e-9)
            others = [d + (k == changed) for k, d in enumerate(documents)]
            after = reader.losses(*_row(pack_row, document_mask, others, context, what))
            moved = (after - each).abs() > 1e-9
            moved[start:end] = False
            why = f"{what}: document {changed} was changed, and losses of another one changed too"
            core.require(not moved.any(), why)
    batch = torch.randint(4, (3, 9))
    want = [[[bool(r[q] == r[k]) and k <= q for k in range(9)] for q in range(9)] for r in batch]
    what = "mask of three rows with numbers in any order"
    got = _tensor(core.call(document_mask, batch), torch.bool, (3, 9, 9), what)
    core.close(got.int(), torch.tensor(want).int(), what, 0, 0)


@core.exercise("feeding.4", "each document once, as random as the pools allow, repeatable by seed")
def grouped_batches(answer):
    core.need_callable(answer)

    def epoch(lengths, batch, pool, generator):
        what = f"{len(lengths)} documents, batch {batch}, pool {pool}"
        states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
        made = _once_each(core.call(answer, lengths, batch, pool, generator), len(lengths), what)
        now = torch.get_rng_state(), random.getstate(), np.random.get_state()[1]
        same = torch.equal(now[0], states[0]) and now[1] == states[1] and (now[2] == states[2]).all()
        core.require(same, f"{what}: random numbers came from elsewhere than `generator`")
        short = [len(b) for b in made if len(b) != batch]
        good = len(short) <= 1 and all(n < batch for n in short)
        core.require(good, f"{what}: expected batches of {batch} and one smaller one, got {short[:4]}")
        return made, what

    n, batch, seed = random.choice((1201, 1307)), random.choice((7, 9)), random.randrange(10**6)
    lengths = random.sample(range(1, 4000), n)  # no two equal
    for sizes, pool in ((lengths, 1), (lengths, 8), (lengths, 10_000), ([5] * n, 10_000)):
        generator = torch.Generator().manual_seed(seed)
        epochs, (what, *_) = zip(*[epoch(sizes, batch, pool, generator) for _ in range(6)], strict=True)
        again = epoch(sizes, batch, pool, torch.Generator().manual_seed(seed))[0]
        core.require(again == epochs[0], f"{what}: the same seed gave another epoch")
        met = statistics.fmean(feeding.met_again(*two) for two in itertools.pairwise(epochs))
        what += ", equal lengths" * (sizes is not lengths)
        why = f"{what}: {100 * met:.0f} % of partners met in the last epoch too; are pools and ties random?"
        core.require(met < 0.15 or (pool > n and sizes is lengths), why)
        if sizes is lengths:
            # Mean distance of the least and the greatest of a batch that lie in a sorted pool.
            want = 4000 * (batch - 1) / (min(n, pool * batch) + 1)
            span = statistics.fmean(max(lengths[i] for i in b) - min(lengths[i] for i in b)
                                    for e in epochs for b in e if len(b) == batch)  # fmt: skip
            why = f"{what}: longest and shortest of a batch differ by {span:.0f} tokens in the mean"
            core.require(
                0.75 < span / want < 1.3, f"{why}; with sorted pools of {pool} batches by {want:.0f}"
            )
            _in_random_order(epochs, lengths, pool, what)
        places = {next(k for k, b in enumerate(e) if len(b) < batch) for e in epochs}
        why = f"{what}: in six epochs the smaller batch stood only at places {sorted(places)}; shuffle all"
        core.require(len(places) > 2, why)


def _in_random_order(epochs, lengths, pool, what):
    "Require that the order of the batches shows neither lengths, nor the last epoch's order, nor pools."
    tops = [[max(lengths[i] for i in b) for b in e] for e in epochs]
    order = range(len(tops[0]))
    trend = max(abs(statistics.correlation(order, t)) for t in tops)
    core.require(trend < 0.5, f"{what}: the batches come in order of length; shuffle them")
    same = max(abs(statistics.correlation(*two)) for two in itertools.pairwise(tops))
    core.require(same < 0.5, f"{what}: the batches' order follows a pattern, the same in each epoch")
    # How often two batches overlap in length, and how far apart they are: neighbours against all pairs.
    # Batches of a sorted pool never overlap.
    ends = [[(min(lengths[i] for i in b), max(lengths[i] for i in b)) for b in e] for e in epochs]
    for measure in (lambda a, b: a[0] < b[1] and b[0] < a[1], lambda a, b: abs(a[1] - b[1])):
        near = statistics.fmean(measure(*two) for e in ends for two in itertools.pairwise(e))
        far = statistics.fmean(measure(*two) for e in ends for two in itertools.combinations(e, 2))
        core.require(
            near >= 0.6 * far, f"{what}: batches of a pool follow each other; shuffle the whole epoch"
        )


@core.exercise("feeding.5", "every document once, and no rank has much more than the bound")
def balance(answer):
    core.need_callable(answer)

    def heaviest(costs, ranks):
        what = f"{len(costs)} documents on {ranks} rank{'s' * (ranks > 1)}"
        shares = _once_each(core.call(answer, costs, ranks), len(costs), what)
        core.equal(len(shares), ranks, f"{what}: the number of lists")
        return max(sum(costs[i] for i in share) for share in shares), what

    for ranks in (1, 2, 3, 8, random.choice((24, 31))):
        lengths = _real_lengths(16 * ranks)
        giant = [*lengths[:5], float(sum(lengths)), *lengths[5:]]
        for costs in (lengths, sorted(lengths), [n / 512 + (n / 512) ** 2 for n in lengths], giant):
            most, what = heaviest(costs, ranks)
            bound = max(sum(costs) / ranks, *costs)
            why = f"{what}: the largest sum is {most:.5g}, 2 % over the bound is {1.02 * bound:.5g}"
            core.require(most <= 1.02 * bound, why)
    for n, ranks in ((3, 5), (4, 3), (5, 2), (5, 3), (6, 2), (6, 4)):
        costs = [random.randint(1, 40) for _ in range(n)]
        most, what = heaviest(costs, ranks)
        sums = ([sum(c for c, r in zip(costs, way, strict=True) if r == k) for k in range(ranks)]
                for way in itertools.product(range(ranks), repeat=len(costs)))  # fmt: skip
        best = min(map(max, sums))
        why = f"{what}, costs {costs}: the largest sum is {most}, and {best} is possible"
        core.require(3 * most <= 4 * best, why)


def _bytes(starts, tokens):
    "A file as the table says, byte by byte."
    head = b"feeding1" + struct.pack(f"<{1 + len(starts)}q", len(starts) - 1, *starts)
    return head + struct.pack(f"<{len(tokens)}H", *tokens)


def _reads(documents, wanted, what):
    core.equal(len(documents), len(wanted), f"{what}: len")
    for i, want in random.sample(list(enumerate(wanted)), len(wanted)):
        got = core.call(documents.__getitem__, i)
        _tensor(got, torch.int64, (len(want),), f"{what}: document {i}")
        core.close(got, torch.tensor(want, dtype=torch.int64), f"{what}: document {i}", 0, 0)
        got += 1  # it has memory of its own
        why = f"{what}: document {i}, read again after the first tensor was changed"
        core.close(documents[i], got - 1, why, 0, 0)
    core.refuses(documents.__getitem__, len(wanted), error=IndexError, why=f"{what}: document {len(wanted)}")


@core.exercise("feeding.6", "documents right up to 5 GB away, nothing loaded, damaged files refused")
def documents(answer):
    core.need_callable(answer, "a class")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.bin")
        for sizes in ([*core.ragged(1, 40, 6), 0, 3], [7], []):
            tokens = [random.choice((random.randint(0, 40_000), 65535)) for _ in range(sum(sizes))]
            starts, what = [0, *itertools.accumulate(sizes)], f"a file of {len(sizes)} documents"
            path.write_bytes(_bytes(starts, tokens))
            for given in (path, str(path)):
                opened = core.call(answer, given)
                _reads(opened, [tokens[a:b] for a, b in itertools.pairwise(starts)], what)
            copied = pickle.loads(pickle.dumps(opened, protocol=4))
            _reads(copied, [tokens[a:b] for a, b in itertools.pairwise(starts)], f"{what}, after pickle")
        good, head = _bytes([0, 5, 9], list(range(9))), b"feeding1"
        cases = {"is empty": b"", "was cut off in its header": good[:12], "lacks its last byte": good[:-1],
                 "lacks its last token": good[:-2], "was cut off in its starts": good[:30],
                 "begins with other bytes": b"feeding2" + good[8:], "is a text": b"Call me Ishmael. " * 9,
                 "has bytes behind its tokens": good + b"abcd", "has no starts": good[:16],
                 "speaks of -3 documents": head + struct.pack("<q", -3) + good[16:],
                 "speaks of 2**60 documents": head + struct.pack("<q", 2**60) + good[16:]}  # fmt: skip
        for number, (why, content) in enumerate(cases.items()):
            path = Path(folder, f"bad{number}.bin")
            path.write_bytes(content)
            _says(answer, path, words=(path.name,), why=f"a file that {why}")
        for total in (32 << 20, 5 << 29):  # tokens of sparse files, which take no room on the disk
            _large(answer, Path(folder, f"{total}.bin"), total)
        _keeps_nothing(answer, Path(folder, "twelve.bin"))


def _large(answer, path, total):
    with open(path, "wb") as f:
        f.write(_bytes([0, 4, total - 3, total], [1, 2, 3, 4]))
        try:
            f.seek(16 + 32 + 2 * total - 6)
            f.write(struct.pack("<3H", 9, 8, 7))
        except OSError:  # a file system without large files
            return
    tracemalloc.start()
    try:
        opened = core.call(answer, path)
        ends = [core.call(opened.__getitem__, i) for i in (0, 2)]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    what = f"a file of {2 * total / 1e6:,.0f} MB"
    core.require(peak < 4 << 20, f"{what}: to read two short documents took {peak / 1e6:.0f} MB of memory")
    core.close(ends[0], torch.tensor([1, 2, 3, 4]), f"{what}: the first document", 0, 0)
    core.close(ends[1], torch.tensor([9, 8, 7]), f"{what}: the last document", 0, 0)
    kept = len(pickle.dumps(opened))
    core.require(kept < 10_000, f"{what}: pickled it has {kept:,} bytes; expected the path alone")


def _own_memory():
    "Bytes of this process that come from no file; 0 where the system doesn't say."
    try:
        found = Path("/proc/self/status").read_text().split("RssAnon:")[1]
    except (OSError, IndexError):
        return 0
    return 1024 * int(found.split()[0])


def _keeps_nothing(answer, path, n=12, size=1 << 20):
    "Read twelve documents of 8 MB each, as int64."
    with open(path, "wb") as f:
        f.write(_bytes(range(0, (n + 1) * size, size), []))
        f.truncate(f.tell() + 2 * n * size)
    opened, before = core.call(answer, path), _own_memory()
    tracemalloc.start()
    try:
        for i in range(n):
            core.call(opened.__getitem__, i)
        held = max(tracemalloc.get_traced_memory()[0], _own_memory() - before)
    finally:
        tracemalloc.stop()
    why = f"after {n} documents of 8 MB were read, {held / 1e6:.0f} MB are still in use; keep none of them"
    core.require(held < 48 << 20, why)

"Answers to the exercises of feeding: the course's, right ones of another style, and wrong ones."

import bisect
import heapq
import itertools
import mmap
import random
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from course_lib.feeding import solutions

REFERENCE = {
    n: tuple(getattr(solutions, name) for name in names) if len(names) > 1 else getattr(solutions, names[0])
    for n, names in solutions.EXERCISES.items()
}

# --- feeding.1: padding -----------------------------------------------------------------------


def by_numpy(batches, multiple=1):
    "Right: arrays, rounding by remainders."
    rows = [(sum(b), len(b) * (max(b) + (-max(b)) % multiple)) for b in batches]
    tokens, slots = np.array(rows).sum(0)
    return int(tokens), int(slots), (slots - tokens) / slots


def in_a_list(batches, multiple=1):
    "Right: a list, several passes."
    kept = [sorted(b) for b in batches]
    slots = sum(len(b) * multiple * ((b[-1] + multiple - 1) // multiple) for b in kept)
    tokens = sum(itertools.chain.from_iterable(kept))
    return [tokens, slots, torch.tensor(1 - tokens / slots, dtype=torch.float64)]


def mean_of_wastes(batches, multiple=1):
    kept = list(batches)
    each = [solutions.padding([b], multiple) for b in kept]
    return *solutions.padding(kept, multiple)[:2], sum(w for *_, w in each) / len(each)


def always_one_more(batches, multiple=1):
    kept = list(batches)
    tokens, slots = sum(map(sum, kept)), sum(len(b) * (max(b) // multiple + 1) * multiple for b in kept)
    return tokens, slots, 1 - tokens / slots


def totals_as_floats(batches, multiple=1):
    tokens, slots, waste = solutions.padding(batches, multiple)
    return float(tokens), float(slots), waste


def empties_the_batches(batches, multiple=1):
    kept = list(batches)
    found = solutions.padding(kept, multiple)
    for batch in kept:
        batch.clear()
    return found


def twice_through(batches, multiple=1):
    tokens = sum(map(sum, batches))
    slots = sum(len(b) * -(-max(b) // multiple) * multiple for b in batches)
    return tokens, slots, 1 - tokens / max(1, slots)


def one_width(batches, multiple=1):
    kept = list(batches)
    width = -(-max(map(max, kept)) // multiple) * multiple
    tokens, slots = sum(map(sum, kept)), width * sum(map(len, kept))
    return tokens, slots, 1 - tokens / slots


# --- feeding.2: pack --------------------------------------------------------------------------


def refused(lengths, context):
    for i, n in enumerate(lengths):
        if n > context:
            raise ValueError(f"document number {i} is too long: {n} > {context}")


def best_fit_bisect(lengths, context):
    "Right: best fit decreasing, rooms in a sorted list."
    refused(lengths, context)
    rows, rooms = [], []
    for n, i in sorted(((n, i) for i, n in enumerate(lengths)), reverse=True):
        at = bisect.bisect_left(rooms, (n, -1))
        room, r = rooms.pop(at) if at < len(rooms) else (context, len(rows))
        rows += [[]] * (r == len(rows))
        rows[r] = [*rows[r], i]
        bisect.insort(rooms, (room - n, r))
    return rows


def fill_each_row(lengths, context):
    "Right: one row after another, each time the longest document that fits."
    refused(lengths, context)
    left = [[] for _ in range(context + 1)]
    for i, n in enumerate(lengths):
        left[n].append(i)
    rows, todo = [], len(lengths)
    while todo:
        row, room = [], context
        while n := next((n for n in range(room, 0, -1) if left[n]), 0):
            row.append(left[n].pop())
            room -= n
        rows.append(tuple(row))
        todo -= len(row)
    return tuple(rows)


def next_fit(lengths, context):
    refused(lengths, context)
    rows, room = [], 0
    for i, n in enumerate(lengths):
        if n > room:
            rows.append([])
            room = context
        rows[-1].append(i)
        room -= n
    return rows


def next_fit_decreasing(lengths, context):
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    return [[order[i] for i in row] for row in next_fit([lengths[i] for i in order], context)]


def drops_long_ones(lengths, context):
    kept = [i for i, n in enumerate(lengths) if n <= context]
    return [[kept[i] for i in row] for row in solutions.pack([lengths[i] for i in kept], context)]


def cuts_long_ones(lengths, context):
    return solutions.pack([min(n, context) for n in lengths], context)


def by_value(lengths, context):
    return [[lengths.index(lengths[i]) for i in row] for row in solutions.pack(lengths, context)]


def lengths_in_rows(lengths, context):
    return [[lengths[i] for i in row] for row in solutions.pack(lengths, context)]


def without_the_last(lengths, context):
    return solutions.pack(lengths, context)[: max(1, len(lengths) // 99)] or []


def one_too_many(lengths, context):
    refused(lengths, context)
    return solutions.pack(lengths, context + 1)


def rooms_of_512(lengths, context):
    refused(lengths, context)
    rows, by_room = [], [[] for _ in range(512 + 1)]
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        row = next((by_room[r].pop() for r in range(lengths[i], context + 1) if by_room[r]), [])
        rows += [row] * (not row)
        row.append(i)
        by_room[context - sum(lengths[k] for k in row)].append(row)
    return rows


def counts_from_one(lengths, context):
    for i, n in enumerate(lengths, start=1):
        if n > context:
            raise ValueError(f"document number {i} has {n} tokens")
    return solutions.pack(lengths, context)


# --- feeding.3: rows and masks ----------------------------------------------------------------


def row_by_cat(documents, context):
    "Right: pieces joined; positions go on in the padding."
    rest = context - sum(map(len, documents))
    parts = [*documents, torch.zeros(rest, dtype=torch.int64)]
    targets = [torch.cat([d[1:], d.new_full((min(1, len(d)),), -100)]) for d in documents]
    number = [torch.full((len(d),), k + 1) for k, d in enumerate(parts)]
    places = [torch.arange(len(d)) for d in parts]
    return (
        torch.cat(parts),
        torch.cat([*targets, torch.full((rest,), -100)]),
        torch.cat(places),
        torch.cat(number),
    )


def mask_by_index(document):
    "Right: from positions, one broadcast."
    at = torch.arange(document.shape[-1])
    return document.unsqueeze(-1).eq(document.unsqueeze(-2)) & (at[:, None] >= at)


def row_as_list(documents, context):
    "Right: through lists."
    tokens, targets, positions, number = [], [], [], []
    for k, d in enumerate(documents):
        tokens += d.tolist()
        targets += [*d.tolist()[1:], -100]
        positions += range(len(d))
        number += [k] * len(d)
    rest = context - len(tokens)
    rows = tokens + [0] * rest, targets + [-100] * rest, positions + [0] * rest, number + [-1] * rest
    return [torch.tensor(row) for row in rows]


def mask_by_distance(document):
    "Right: equal numbers have distance 0."
    return torch.tril((document[..., None] - document[..., None, :]) == 0)


def plain_targets(documents, context):
    tokens, targets, *rest = solutions.pack_row(documents, context)
    n = sum(map(len, documents))
    targets = torch.full((context,), -100)
    targets[: n - 1] = tokens[1:n]
    return tokens, targets, *rest


def running_positions(documents, context):
    tokens, targets, _, document = solutions.pack_row(documents, context)
    return tokens, targets, torch.arange(context), document


def all_one_document(documents, context):
    return *solutions.pack_row(documents, context)[:3], torch.zeros(context, dtype=torch.int64)


def numbered_in_the_padding(number):
    "The padding has the number of a document."

    def pack_row(documents, context):
        tokens, targets, positions, document = solutions.pack_row(documents, context)
        mine = torch.where(document == len(documents), number % len(documents), document)
        return tokens, targets, positions, mine

    return pack_row


def the_first_token_after_the_last(documents, context):
    "Right where a row has two documents or padding."
    tokens, _, positions, document = solutions.pack_row(documents, context)
    targets = tokens.roll(-1)
    targets[(document != document.roll(-1)) | (document == len(documents))] = -100
    return tokens, targets, positions, document


def zero_as_target(documents, context):
    tokens, targets, *rest = solutions.pack_row(documents, context)
    return tokens, targets.clamp(min=0), *rest


def plain_in_full_rows(documents, context):
    tokens, targets, positions, document = solutions.pack_row(documents, context)
    full = sum(map(len, documents)) == context
    return tokens, targets, positions, document * (not full)


def sees_the_future(document):
    return document[..., :, None] == document[..., None, :]


def strictly_before(document):
    return (document[..., :, None] == document[..., None, :]).tril(-1)


def earlier_documents_too(document):
    return (document[..., :, None] >= document[..., None, :]).tril()


def one_row_only(document):
    mask = (
        document.reshape(-1, document.shape[-1])[0][:, None] == document.reshape(-1, document.shape[-1])[0]
    ).tril()
    return mask.expand(*document.shape, document.shape[-1])


def as_numbers(document):
    return solutions.document_mask(document).float()


# --- feeding.4: batches of similar length -----------------------------------------------------


def by_arrays(lengths, batch, pool, generator):
    "Right: NumPy sorts, longest first."
    order, sizes = torch.randperm(len(lengths), generator=generator).numpy(), np.array(lengths)
    made = []
    for part in np.split(order, range(batch * pool, len(order), batch * pool)) if len(order) else ():
        part = part[np.argsort(-sizes[part], kind="stable")]
        made += [b.tolist() for b in np.split(part, range(batch, len(part), batch))]
    return [made[k] for k in torch.randperm(len(made), generator=generator)]


def seeded_by_it(lengths, batch, pool, generator):
    "Right: Python's random numbers, seeded from the generator."
    rng = random.Random(int(torch.randint(2**40, (), generator=generator)))
    order, made = rng.sample(range(len(lengths)), len(lengths)), []
    while order:
        part, order = order[: batch * pool], order[batch * pool :]
        part = sorted(part, key=lengths.__getitem__)
        made += [tuple(part[i : i + batch]) for i in range(0, len(part), batch)]
    rng.shuffle(made)
    return made


def in_order_of_length(lengths, batch, pool, generator):
    return sorted(solutions.grouped_batches(lengths, batch, pool, generator), key=lambda b: lengths[b[0]])


def same_pools(lengths, batch, pool, generator):
    made = solutions.grouped_batches(lengths, batch, pool, torch.Generator().manual_seed(1))
    return [made[k] for k in torch.randperm(len(made), generator=generator).tolist()]


def sorted_pools(lengths, batch, pool, generator):
    order = torch.randperm(len(lengths), generator=generator).tolist()
    for part in (order[k : k + batch * pool] for k in range(0, len(order), batch * pool)):
        part.sort(key=lengths.__getitem__)
        yield [part[i : i + batch] for i in range(0, len(part), batch)]


def smaller_batch_anywhere(batches, generator):
    small = min(batches, key=len)
    rest = [b for b in batches if b is not small]
    rest.insert(int(torch.randint(len(batches), (), generator=generator)), small)
    return rest


def one_pool_after_another(lengths, batch, pool, generator):
    made = []
    for batches in sorted_pools(lengths, batch, pool, generator):
        made += [batches[k] for k in torch.randperm(len(batches), generator=generator).tolist()]
    return smaller_batch_anywhere(made, generator)


def smaller_batch_last(lengths, batch, pool, generator):
    return sorted(solutions.grouped_batches(lengths, batch, pool, generator), key=lambda b: len(b) < batch)


def by_a_pattern(lengths, batch, pool, generator):
    made = list(itertools.chain.from_iterable(sorted_pools(lengths, batch, pool, generator)))
    return smaller_batch_anywhere(made[::2] + made[1::2][::-1], generator)


def global_numbers(lengths, batch, pool, generator):
    return solutions.grouped_batches(lengths, batch, pool, None)


def pool_of_documents(lengths, batch, pool, generator):
    return solutions.grouped_batches(lengths, batch, max(1, pool // batch), generator)


def everything_sorted(lengths, batch, pool, generator):
    return solutions.grouped_batches(lengths, batch, 10**6, generator)


def ties_by_number(lengths, batch, pool, generator):
    return solutions.grouped_batches([n + i / 1e6 for i, n in enumerate(lengths)], batch, pool, generator)


# --- feeding.5: balance -----------------------------------------------------------------------


def by_heap(costs, ranks):
    "Right: a heap of (sum, rank)."
    heap, shares = [(0, r) for r in range(ranks)], [[] for _ in range(ranks)]
    for cost, i in sorted(((c, i) for i, c in enumerate(costs)), reverse=True):
        total, r = heapq.heappop(heap)
        shares[r].append(i)
        heapq.heappush(heap, (total + cost, r))
    return shares


def by_differences(costs, ranks):
    "Right: largest differences first (Karmarkar and Karp)."
    heap = [(-c, i, [(c, [i])] + [(0, [])] * (ranks - 1)) for i, c in enumerate(costs)]
    heap = heap or [(0, 0, [(0, [])] * ranks)]
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, k, a), (_, _, b) = heapq.heappop(heap), heapq.heappop(heap)
        both = [(x + y, s + t) for (x, s), (y, t) in zip(a, reversed(b), strict=True)]
        both.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (both[-1][0] - both[0][0], k, both))
    return [share for _, share in heap[0][2]]


def same_number(costs, ranks):
    return [list(range(r, len(costs), ranks)) for r in range(ranks)]


def snake(costs, ranks):
    shares = [[] for _ in range(ranks)]
    for k, i in enumerate(sorted(range(len(costs)), key=lambda i: -costs[i])):
        r = k % (2 * ranks)
        shares[min(r, 2 * ranks - 1 - r)].append(i)
    return shares


def as_they_come(costs, ranks):
    shares, sums = [[] for _ in range(ranks)], [0] * ranks
    for i, cost in enumerate(costs):
        r = sums.index(min(sums))
        shares[r].append(i)
        sums[r] += cost
    return shares


def short_ones_first(costs, ranks):
    order = sorted(range(len(costs)), key=lambda i: costs[i])
    return [[order[i] for i in share] for share in as_they_come([costs[i] for i in order], ranks)]


def up_to_the_mean(costs, ranks):
    shares, total, r = [[] for _ in range(ranks)], 0, 0
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        if total >= sum(costs) / ranks and r < ranks - 1:
            r, total = r + 1, 0
        shares[r].append(i)
        total += costs[i]
    return shares


def no_empty_lists(costs, ranks):
    return [share for share in solutions.balance(costs, ranks) if share]


# --- feeding.6: documents on disk -------------------------------------------------------------


class ByTorch(Dataset):
    "Right: mapped by torch, starts read by Python."

    def __init__(self, path):
        self.path, data = str(path), Path(path)
        with data.open("rb") as f:
            first, n = f.read(8), int.from_bytes(f.read(8), "little", signed=True)
            size = data.stat().st_size
            good = first == b"feeding1" and n >= 0 and 24 + 8 * n <= size
            self.starts = np.frombuffer(f.read(8 * (n + 1)), "<i8").tolist() if good else [0]
        self.skip = 12 + 4 * n
        if not good or size != 2 * (self.skip + self.starts[-1]):
            raise ValueError(f"{path} is foreign or damaged")
        count = self.skip + self.starts[-1]
        self.numbers = torch.from_file(self.path, size=count, dtype=torch.uint16) if count else None

    def __len__(self):
        return len(self.starts) - 1

    def __getitem__(self, i):
        a, b = self.starts[i], self.starts[i + 1]
        return self.numbers[self.skip + a : self.skip + b].to(torch.int64)

    def __reduce__(self):
        return ByTorch, (self.path,)


class BySeeking(Dataset):
    "Right: seeks and reads, maps nothing; checks by catching."

    def __init__(self, path):
        self.path = path
        try:
            with open(path, "rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as m:
                n = int.from_bytes(m[8:16], "little")
                self.head = 8 * (n + 3)
                if m[:8] != b"feeding1" or self.head > len(m):
                    raise ValueError
                self.starts = np.frombuffer(m[16 : self.head], "<i8")
                if len(m) - self.head != 2 * self.starts[n]:
                    raise ValueError
        except (ValueError, IndexError, OverflowError):
            raise ValueError(f"not a whole file of documents: {path}") from None

    def __len__(self):
        return len(self.starts) - 1

    def __getitem__(self, i):
        if not 0 <= i < len(self):
            raise IndexError(i)
        a, b = map(int, self.starts[i : i + 2])
        with open(self.path, "rb") as f:
            f.seek(self.head + 2 * a)
            return torch.tensor(np.frombuffer(f.read(2 * (b - a)), "<u2").astype("i8"))

    def __reduce__(self):
        return BySeeking, (self.path,)


class _Wrong(solutions.Documents):
    "The course's own, to be spoiled."


class LoadsAll(_Wrong):
    def __init__(self, path):
        super().__init__(path)
        self.tokens = np.array(self.tokens)


class Signed(_Wrong):
    def __getitem__(self, i):
        return super().__getitem__(i).to(torch.int16).to(torch.int64)


class Starts32(_Wrong):
    def __init__(self, path):
        super().__init__(path)
        self.starts = self.starts.astype(np.int32)


class Unchecked(_Wrong):
    def __init__(self, path):
        self.path = path
        self.starts = np.fromfile(path, "<i8", offset=16, count=1 + int(np.fromfile(path, "<i8", count=2)[1]))
        self.tokens = np.memmap(path, "<u2", mode="r")[8 + 4 * len(self.starts) :]


class OnlyMagic(_Wrong):
    def __init__(self, path):
        if Path(path).read_bytes()[:8] != b"feeding1":
            raise ValueError(f"{path} is another file")
        Unchecked.__init__(self, path)


class TooShortOnly(_Wrong):
    "Accepts what has bytes behind its tokens."

    def __init__(self, path):
        try:
            super().__init__(path)
        except ValueError as e:
            numbers = [int(w) for w in str(e).split() if w.isdigit()]
            if len(numbers) < 2 or numbers[0] > numbers[1]:
                raise
            Unchecked.__init__(self, path)


class Endless(_Wrong):
    def __getitem__(self, i):
        return super().__getitem__(i % max(1, len(self)))


class Pickled(_Wrong):
    def __reduce__(self):
        return _unpickled, (self.path, bytes(self.tokens[:6000]), self.tokens.nbytes)


def _unpickled(path, *rest):
    return solutions.Documents(path)


class KeepsAll(_Wrong):
    "Documents that were read stay in memory."

    def __getitem__(self, i):
        self.kept = getattr(self, "kept", {})
        if i not in self.kept:
            self.kept[i] = super().__getitem__(i)
        return self.kept[i].clone()


class OneBuffer(_Wrong):
    "Each document is a view of one buffer."

    def __getitem__(self, i):
        found = super().__getitem__(i)
        self.buffer = getattr(self, "buffer", torch.zeros(4096, dtype=torch.int64))
        if len(found) > len(self.buffer):
            return found
        if self.buffer[: len(found)].sum() == 0 or not hasattr(self, "last") or self.last != i:
            self.buffer[: len(found)] = found
        self.last = i
        return self.buffer[: len(found)]


RIGHT = {
    "feeding.1": [by_numpy, in_a_list],
    "feeding.2": [best_fit_bisect, fill_each_row],
    "feeding.3": [(row_by_cat, mask_by_index), (row_as_list, mask_by_distance)],
    "feeding.4": [by_arrays, seeded_by_it],
    "feeding.5": [by_heap, by_differences],
    "feeding.6": [ByTorch, BySeeking],
}

_ROW, _MASK = solutions.pack_row, solutions.document_mask
MUTANTS = {
    "feeding.1": [mean_of_wastes, always_one_more, totals_as_floats, empties_the_batches,
                  twice_through, one_width],
    "feeding.2": [next_fit, next_fit_decreasing, drops_long_ones, cuts_long_ones, by_value,
                  lengths_in_rows, without_the_last, one_too_many, counts_from_one, rooms_of_512],
    "feeding.3": [(plain_targets, _MASK), (running_positions, _MASK), (all_one_document, _MASK),
                  (numbered_in_the_padding(0), _MASK),
                  (numbered_in_the_padding(-1), _MASK), (zero_as_target, _MASK),
                  (the_first_token_after_the_last, _MASK), (plain_in_full_rows, _MASK),
                  (_ROW, sees_the_future), (_ROW, strictly_before), (_ROW, earlier_documents_too),
                  (_ROW, one_row_only), (_ROW, as_numbers)],
    "feeding.4": [in_order_of_length, same_pools, global_numbers, pool_of_documents, everything_sorted,
                  ties_by_number, one_pool_after_another, smaller_batch_last, by_a_pattern],
    "feeding.5": [same_number, snake, as_they_come, short_ones_first, up_to_the_mean, no_empty_lists],
    "feeding.6": [LoadsAll, Signed, Starts32, Unchecked, OnlyMagic, TooShortOnly, Endless, Pickled,
                  KeepsAll, OneBuffer],
}  # fmt: skip

"Answers to the exercises of market: the course's, right ones of another style, and wrong ones."

import math

import numpy as np
import torch
import triton
import triton.language as tl

from course_lib.market import solutions

REFERENCE = {
    n: tuple(getattr(solutions, name) for name in names) if len(names) > 1 else getattr(solutions, names[0])
    for n, names in solutions.EXERCISES.items()
}


def named(name, fn):
    fn.__name__ = fn.__qualname__ = name.replace(" ", "_")
    return fn


# --- market.1: leak_free ----------------------------------------------------------------------


def by_loop(start, end, lo, hi, embargo=None):
    "Right: lists and sets."
    test = [i for i, s in enumerate(start) if lo <= s < hi]
    if not test:
        raise ValueError("no test sample")
    last = max(end[i] for i in test)
    train = {i for i, e in enumerate(end) if e <= lo - 1}
    train |= {i for i, s in enumerate(start) if embargo is not None and s - embargo > last}
    return sorted(train), test


def by_where(start, end, lo, hi, embargo=None):
    "Right: np.where and union1d, tensors back."
    (test,) = np.where(np.logical_and(start >= lo, start < hi))
    if test.size == 0:
        raise ValueError("nothing is tested")
    gap = np.inf if embargo is None else embargo
    (before,), (after,) = np.where(end < lo), np.where(start > np.max(end[test]) + gap)
    return torch.from_numpy(np.union1d(before, after)), torch.from_numpy(test)


def split(known=lambda s, e, lo: e < lo, after=None, inside=lambda s, lo, hi: (lo <= s) & (s < hi)):
    def late(s, e, test, hi, gap):
        return s > e[test].max() + gap

    def fn(start, end, lo, hi, embargo=None):
        test = np.flatnonzero(inside(start, lo, hi))
        if not len(test):
            raise ValueError(f"no sample from {lo} to {hi}")
        train = known(start, end, lo)
        if embargo is not None:
            train = train | (after or late)(start, end, test, hi, embargo)
        return np.flatnonzero(train), test

    return fn


def no_embargo_is_zero(start, end, lo, hi, embargo=None):
    return solutions.leak_free(start, end, lo, hi, embargo or 0)


def zero_is_no_embargo(start, end, lo, hi, embargo=None):
    return solutions.leak_free(start, end, lo, hi, embargo or None)


def empty_test(start, end, lo, hi, embargo=None):
    try:
        return solutions.leak_free(start, end, lo, hi, embargo)
    except ValueError:
        return np.flatnonzero(end < lo), np.array([], int)


def appended(start, end, lo, hi, embargo=None):
    "np.append to an empty array of floats."
    train, test = solutions.leak_free(start, end, lo, hi, embargo)
    return np.append([], train), test


def as_masks(train, test, n):
    return np.isin(np.arange(n), train), np.isin(np.arange(n), test)


# --- market.2: look_ahead ---------------------------------------------------------------------


def by_one_past(features, prices, times):
    "Right: several futures, the past cut off and compared as text would be."
    rng, found = np.random.default_rng(5), []
    full = features(np.array(prices))
    for c in range(full.shape[1]):
        moved = False
        for t in times:
            p = np.array(prices)
            p[t + 1 :] = rng.uniform(-9, 9, len(p) - t - 1) ** 3 + p.mean()
            now = features(p)[: t + 1, c]
            moved |= not np.allclose(full[: t + 1, c], now, rtol=1e-6, atol=1e-9, equal_nan=True)
        found += [c] * moved
    return found


def by_mask(features, prices, times):
    "Right: one array for all columns."
    before = features(prices + 0)
    moved = np.zeros(before.shape[1], bool)
    for t in reversed(list(times)):
        new = np.concatenate(
            [prices[: t + 1], np.random.normal(prices.mean(), 5 * prices.std(), len(prices) - t - 1)]
        )
        a, b = np.nan_to_num(before[: t + 1], nan=-1e9), np.nan_to_num(features(new)[: t + 1], nan=-1e9)
        moved |= (np.abs(a - b) > 1e-9 + 1e-6 * np.abs(a)).any(0)
    return tuple(int(c) for c in moved.nonzero()[0])


def looker(future=None, rows=lambda t: slice(0, t + 1), same=None, which=lambda times: times, copy=True):
    def new(p, t):
        return p.mean() + 3 * p.std() * np.random.standard_normal(len(p) - t - 1)

    def close(a, b):
        return np.isclose(a, b, rtol=1e-6, atol=1e-9, equal_nan=True)

    def fn(features, prices, times):
        before, found = features(prices.copy() if copy else prices), set()
        for t in which(times):
            other = prices.copy()
            other[t + 1 :] = (future or new)(prices, t)
            found |= set(
                np.flatnonzero((~(same or close)(before[rows(t)], features(other)[rows(t)])).any(0)).tolist()
            )
        return sorted(found)

    return fn


def one_step(p, t):
    later = p[t + 1 :].copy()
    later[0] += 100
    return later


# --- market.3: half_life ----------------------------------------------------------------------


def by_lstsq(scores, age, lives, draws, block, rng):
    "Right: a projection for each half-life, blocks by choice of slices."
    shapes = [np.exp2(-age / life)[:, None] for life in lives]
    left = np.stack([np.eye(len(age)) - s @ np.linalg.pinv(s) for s in shapes])

    def fit(m):
        return lives[np.square(left @ m).sum(1).argmin()]

    blocks = [scores[k : k + block] for k in range(len(scores) - block + 1)]
    some = [rng.choice(len(blocks), len(scores) // block) for _ in range(draws)]
    found = sorted(fit(np.concatenate([blocks[k] for k in ks]).mean(axis=0)) for ks in some)
    return fit(scores.mean(0)), np.quantile(found, 0.025), np.quantile(found, 0.975)


def by_counts(scores, age, lives, draws, block, rng):
    "Right: means of blocks weighed by a multinomial count; the part of m along each curve."
    means = np.lib.stride_tricks.sliding_window_view(scores, block, axis=0).mean(-1)
    n, k = len(means), len(scores) // block
    unit = 2.0 ** (-np.divide.outer(age, lives))
    unit /= np.linalg.norm(unit, axis=0)
    drawn = rng.multinomial(k, np.full(n, 1 / n), size=draws) @ means / k

    def best(m):
        return lives[((m @ unit) ** 2).argmax(-1)]

    return (float(best(scores.mean(0))), *np.percentile(best(drawn), (2.5, 97.5)))


def blocks_of(scores, block, rng, factor=1.0):
    "As many blocks as fit in, or `factor` times as many."
    first = rng.integers(0, len(scores) - block + 1, max(1, int(factor * (len(scores) // block))))
    return scores[(first[:, None] + np.arange(block)).ravel()]


def lifer(
    pick=blocks_of,
    level=(2.5, 97.5),
    curve=lambda age, lives: 0.5 ** (age / lives[:, None]),
    mean=None,
    fit_of=None,
    rng_of=lambda rng: rng,
    draws_of=lambda draws: draws,
    ends=None,
    life_of=None,
):
    def fn(scores, age, lives, draws, block, rng):
        curves, rng = curve(age, lives), rng_of(rng)

        def fit(m):
            size = (curves @ m) / (curves**2).sum(1)
            return lives[((m - size[:, None] * curves) ** 2).sum(1).argmin()]

        fit = fit_of(age, lives) if fit_of else fit
        centre = mean or (lambda s: s.mean(0))
        found = [fit(centre(pick(scores, block, rng))) for _ in range(draws_of(draws))]
        life = life_of(found) if life_of else fit(centre(scores))
        return life, *(ends(found) if ends else np.percentile(found, level))

    return fn


def by_deviation(found):
    return np.mean(found) - 1.96 * np.std(found), np.mean(found) + 1.96 * np.std(found)


def rows(scores, block, rng):
    return scores[rng.integers(0, len(scores), len(scores))]


def cells(scores, block, rng):
    return np.take_along_axis(scores, rng.integers(0, len(scores), scores.shape), 0)


def a_shuffle(scores, block, rng):
    return scores[rng.permutation(len(scores))]


def by_logs(age, lives):
    def fit(m):
        slope = np.polyfit(age, np.log2(np.maximum(m, 1e-6)), 1)[0]
        return lives[np.abs(np.log(max(-1 / slope, 1.0) / lives)).argmin()]

    return fit


# --- market.4: measure, percentile ------------------------------------------------------------


def measure_by_comprehension(answer, arrivals, clock, warm=10):
    "Right: an inner function, an array."

    def one(due):
        clock.wait_until(due)
        answer()
        clock.sync()
        return clock.now() - due

    [answer() for _ in range(warm)]
    clock.sync()
    zero = clock.now()
    return np.array([one(zero + due) for due in arrivals])


def percentile_by_numpy(latencies, p):
    "Right: NumPy's inverted cumulative distribution."
    if len(latencies) * (1 - p / 100) < 10 - 1e-9:
        raise ValueError("too few")
    return np.percentile(latencies, p, method="inverted_cdf")


def percentile_by_counts(latencies, p):
    "Right: the definition, value by value."
    n = len(latencies)
    if n * (100 - p) < 1000:
        raise ValueError("too few")
    return next(x for k, x in enumerate(sorted(latencies), 1) if k * 100 >= p * n)


def timer(warm_sync=True, begin="due", sync=True, warms=True, late=True):
    def fn(answer, arrivals, clock, warm=10):
        zero = clock.now()
        for _ in range(warm if warms else 0):
            answer()
        if warm_sync:
            clock.sync()
        zero = zero if begin == "before" else clock.now()
        found = []
        for due in arrivals:
            clock.wait_until(zero + due)
            started = clock.now()
            answer()
            if sync:
                clock.sync()
            found.append(clock.now() - (started if begin == "start" else zero + due))
            if not late and clock.now() > zero + due + 50:
                zero = clock.now() - due  # the schedule moves with the server
        return found

    return fn


def asks_until_due(answer, arrivals, clock, warm=10):
    "A loop of its own in place of `wait_until`."
    for _ in range(warm):
        answer()
    clock.sync()
    begin, found = clock.now(), []
    for due in arrivals:
        while clock.now() < begin + due:
            pass
        answer()
        clock.sync()
        found.append(clock.now() - begin - due)
    return found


def zero_is_ten(answer, arrivals, clock, warm=10):
    return solutions.measure(answer, arrivals, clock, warm or 10)


def from_the_first(answer, arrivals, clock, warm=10):
    return solutions.measure(answer, [due - arrivals[0] for due in arrivals], clock, warm)


def quantile(place=lambda n, p: math.ceil(p * n / 100) - 1, fewest=lambda n, p: n * (100 - p) < 1000):
    def fn(latencies, p):
        n = len(latencies)
        if fewest(n, p):
            raise ValueError("too few")
        return sorted(latencies)[min(n - 1, place(n, p))]

    return fn


def interpolated(latencies, p):
    solutions.percentile(latencies, p)
    return np.percentile(latencies, p)


# --- market.5: layer, mlp_kernel --------------------------------------------------------------


def kernels(layer, whole):
    "(layer, mlp_kernel) with pieces of the source replaced; `whole` and `layer` are [(old, new)]."
    spaces = {"triton": triton, "tl": tl, "__name__": __name__}
    made = []
    for name, edits in (("layer", layer), ("mlp_kernel", whole)):
        text = SOURCES[name]
        for old, new in edits:
            assert old in text, old
            text = text.replace(old, new)
        path = _file(text)
        exec(compile(text, path, "exec"), spaces)
        made.append(spaces[name])
    return tuple(made)


def _file(text):
    "A name under which inspect finds the source."
    import linecache

    path = f"<mutant {abs(hash(text))}>"
    linecache.cache[path] = (len(text), None, text.splitlines(True), path)
    return path


SOURCES = {
    "layer": '''
@triton.jit
def layer(w_ptr, b_ptr, h, rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    mask = (rows < WIDTH)[:, None] & (cols < WIDTH)[None, :]
    w = tl.load(w_ptr + rows[:, None] * WIDTH + cols[None, :], mask=mask, other=0.0)
    b = tl.load(b_ptr + rows, mask=rows < WIDTH, other=0.0)
    return tl.maximum(tl.sum(w.to(tl.float32) * h[None, :], axis=1) + b, 0.0)
''',
    "mlp_kernel": '''
@triton.jit
def mlp_kernel(
    x_ptr, w_ptr, b_ptr, head_ptr, y_ptr, LAYERS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.arange(0, BLOCK)
    h = tl.load(x_ptr + at, mask=at < WIDTH, other=0.0)
    for n in range(LAYERS):
        h = layer(w_ptr + n * WIDTH * WIDTH, b_ptr + n * WIDTH, h, at, WIDTH, BLOCK)
    head = tl.load(head_ptr + at, mask=at < WIDTH, other=0.0)
    tl.store(y_ptr, tl.sum(h * head, axis=0))
''',
}  # fmt: skip
COLUMNS = [
    ("rows[:, None] * WIDTH + cols[None, :]", "rows[None, :] * WIDTH + cols[:, None]"),
    (
        "(rows < WIDTH)[:, None] & (cols < WIDTH)[None, :]",
        "(rows < WIDTH)[None, :] & (cols < WIDTH)[:, None]",
    ),
    ("h[None, :], axis=1", "h[:, None], axis=0"),
]
ALL_ROWS = ("+ rows, mask=rows < WIDTH", "+ tl.arange(0, BLOCK), mask=tl.arange(0, BLOCK) < WIDTH")
STORE, LAYER = "    tl.store(y_ptr, tl.sum(h * head, axis=0))", "        h = layer"
AGAIN = "        h = tl.load(x_ptr + at, mask=at < WIDTH, other=0.0)\n"
UNROLLED = [
    ("in range(LAYERS)", "in tl.static_range(LAYERS)"),
    ("tl.sum(h * head, axis=0)", "tl.sum(head * h)"),
]

# --- market.6: serve --------------------------------------------------------------------------


def by_queue(arrivals, cost, most, wait):
    "Right: a queue and the next event."
    todo, queue, found, now = list(arrivals), [], [], 0.0
    while todo or queue:
        if not queue:
            now = max(now, todo[0])
        while todo and todo[0] <= now:
            queue.append(todo.pop(0))
        due = queue[0] + wait
        if len(queue) < most and now < due:
            now = min(due, todo[0]) if todo else due
            continue
        batch, queue = queue[:most], queue[most:]
        now += cost(len(batch))
        found += [now - a for a in batch]
    return np.array(found)


def by_bisect(arrivals, cost, most, wait):
    "Right: numpy's searchsorted."
    a, free, first = np.asarray(arrivals, float), -np.inf, 0
    out = np.zeros(len(a))
    while first < len(a):
        begin = a[first] + wait
        if first + most - 1 < len(a):
            begin = min(begin, a[first + most - 1])
        begin = max(begin, free)
        n = min(most, int(np.searchsorted(a, begin, "right")) - first)
        free = begin + cost(n)
        out[first : first + n] = free - a[first : first + n]
        first += n
    return out


def server(wait_from="oldest", full=True, inclusive=True, busy=True, most_counts=True, each=False):
    def fn(arrivals, cost, most, wait):
        found, free, first = [], 0.0, 0
        while first < len(arrivals):
            at = arrivals[first + most - 1] if full and first + most <= len(arrivals) else math.inf
            oldest = arrivals[first] if wait_from == "oldest" else max(free, arrivals[first])
            start = max(free if busy else 0.0, min(at, oldest + wait))
            last = first
            while last < len(arrivals) and (last - first < most or not most_counts):
                if not (arrivals[last] <= start if inclusive or last == first else arrivals[last] < start):
                    break
                last += 1
            n = last - first
            free = start + (sum(cost(1) for _ in range(n)) if each else cost(n))
            found += [free - a for a in arrivals[first:last]]
            first = last
        return found

    return fn


def by_ticks(arrivals, cost, most, wait):
    waiting, found, free, now, seen = [], [], 0, 0, 0
    while len(found) < len(arrivals):
        while seen < len(arrivals) and arrivals[seen] <= now:
            waiting.append(arrivals[seen])
            seen += 1
        if waiting and now >= free and (len(waiting) >= most or now - waiting[0] >= wait):
            batch, waiting = waiting[:most], waiting[most:]
            free = now + cost(len(batch))
            found += [free - a for a in batch]
        now += 1
    return found


RIGHT = {
    "market.1": [by_loop, by_where],
    "market.2": [by_one_past, by_mask],
    "market.3": [by_lstsq, by_counts],
    "market.4": [(measure_by_comprehension, percentile_by_numpy), (solutions.measure, percentile_by_counts)],
    "market.5": [kernels(COLUMNS, []), kernels([], UNROLLED)],
    "market.6": [by_queue, by_bisect],
}
m, p = solutions.measure, solutions.percentile
MUTANTS = {
    "market.1": [
        named("no purge", split(known=lambda s, e, lo: s < lo)),
        named("known at lo", split(known=lambda s, e, lo: e <= lo)),
        named("embargo from hi", split(after=lambda s, e, test, hi, gap: s > hi + gap)),
        named("the last sample's end", split(after=lambda s, e, test, hi, gap: s > e[test][-1] + gap)),
        named("masks", lambda *a, **k: as_masks(*solutions.leak_free(*a, **k), len(a[0]))),
        named("swapped", lambda *a, **k: solutions.leak_free(*a, **k)[::-1]),
        named("embargo itself", split(after=lambda s, e, test, hi, gap: s >= e[test].max() + gap)),
        named("hi inside", split(inside=lambda s, lo, hi: (lo <= s) & (s <= hi))),
        no_embargo_is_zero,
        zero_is_no_embargo,
        empty_test,
        appended,
        named("not before hi", split(after=lambda s, e, test, hi, gap: s > max(hi, e[test].max()) + gap)),
    ],
    "market.2": [
        named("a constant added", looker(future=lambda p, t: p[t + 1 :] + 50)),
        named("shuffled", looker(future=lambda p, t: np.random.permutation(p[t + 1 :]))),
        named("one step", looker(future=one_step)),
        named("only the row", looker(rows=lambda t: slice(t, t + 1))),
        named("exact", looker(same=lambda a, b: (a == b) | (np.isnan(a) & np.isnan(b)))),
        named("NaN differ", looker(same=lambda a, b: np.isclose(a, b, rtol=1e-6, atol=1e-9))),
        named("the first time", looker(which=lambda times: times[:1])),
        named("no copy", looker(copy=False)),
        named("coarse", looker(same=lambda a, b: np.isclose(a, b, rtol=1e-2, equal_nan=True))),
        named("three times the future", looker(future=lambda p, t: 3 * p[t + 1 :])),
        named("the last 30 rows", looker(rows=lambda t: slice(max(0, t - 29), t + 1))),
        named("NaN never differ", looker(same=lambda a, b: ~(np.abs(a - b) > 1e-9 + 1e-6 * np.abs(b)))),
        named("an absolute 1e-3", looker(same=lambda a, b: np.isclose(a, b, atol=1e-3, equal_nan=True))),
        named("one row too many", looker(rows=lambda t: slice(0, t + 2))),
    ],
    "market.3": [
        named("single cells", lifer(pick=cells)),
        named("drawn without replacement", lifer(pick=a_shuffle)),
        named("quartiles", lifer(level=(25, 75))),
        named("a 90 percent interval", lifer(level=(5, 95))),
        named("a 98 percent interval", lifer(level=(1, 99))),
        named("1.96 standard deviations", lifer(ends=by_deviation)),
        named("single rows", lifer(pick=rows)),
        named("as many blocks as models", lifer(pick=lambda s, b, g: blocks_of(s, b, g, b if b > 1 else 2))),
        named("half of the blocks", lifer(pick=lambda s, b, rng: blocks_of(s, b, rng, 0.5))),
        named("a generator of its own", lifer(rng_of=lambda rng: np.random.default_rng(0))),
        named("200 draws", lifer(draws_of=lambda draws: 200)),
        named("the median of the draws", lifer(life_of=np.median)),
        named("natural", lifer(curve=lambda age, lives: np.exp(-age / lives[:, None]))),
        named("the median", lifer(mean=lambda s: np.median(s, 0))),
        named("logarithms", lifer(fit_of=by_logs)),
        named("low and high swapped", lifer(level=(97.5, 2.5))),
    ],
    "market.4": [
        (named("from the start", timer(begin="start")), p),
        (named("without a sync", timer(sync=False)), p),
        (named("no warm up", timer(warms=False)), p),
        (named("warm up not awaited", timer(warm_sync=False)), p),
        (named("the warm up counts", timer(begin="before")), p),
        (named("a schedule that moves", timer(late=False)), p),
        (named("the first is due at once", from_the_first), p),
        (asks_until_due, p),
        (zero_is_ten, p),
        (m, interpolated),
        (m, named("one further", quantile(place=lambda n, p: int(p * n / 100)))),
        (m, named("any number", quantile(fewest=lambda n, p: n < 2))),
        (m, named("more than ten", quantile(fewest=lambda n, p: n * (100 - p) <= 1000))),
    ],
    "market.5": [
        kernels([("tl.maximum(", "("), (" + b, 0.0)", " + b)")], []),
        kernels([(" + b, 0.0)", ", 0.0)")], []),
        kernels([("rows[:, None] * WIDTH + cols[None, :]", "cols[None, :] * WIDTH + rows[:, None]")], []),
        kernels([("mask=mask, other=0.0", "mask=mask")], []),
        kernels([("rows[:, None] * WIDTH", "rows[:, None] * BLOCK")], []),
        kernels([("rows < WIDTH)[:, None] & (", "rows >= 0)[:, None] & (")], []),
        kernels([("w.to(tl.float32) * h[None, :]", "w * h[None, :].to(w.dtype)")], []),
        kernels([ALL_ROWS], []),
        kernels([("    cols = ", "    rows = tl.arange(0, BLOCK)\n    cols = ")], []),
        kernels([], [("b_ptr + n * WIDTH, h", "b_ptr, h")]),
        kernels([], [("range(LAYERS)", "range(LAYERS - 1)")]),
        kernels([], [(STORE, "    tl.store(y_ptr, tl.maximum(tl.sum(h * head, axis=0), 0.0))")]),
        kernels([], [(LAYER, AGAIN + LAYER)]),
        kernels([], [("n * WIDTH * WIDTH", "n * BLOCK * BLOCK")]),
        kernels([], [(STORE, "    tl.store(x_ptr + at, h, mask=at < WIDTH)\n" + STORE)]),
    ],
    "market.6": [
        named("wait from the server", server(wait_from="free")),
        named("never full", server(full=False)),
        named("any size", server(most_counts=False)),
        named("at that moment too late", server(inclusive=False)),
        named("many servers", server(busy=False)),
        named("whole µs", lambda a, c, most, wait: solutions.serve([int(x) for x in a], c, most, wait)),
        named("from one µs to the next", by_ticks),
        named("one cost each", server(each=True)),
        named("no wait", lambda a, c, most, wait: solutions.serve(a, c, most, 0)),
        named("one request too few", lambda a, c, most, wait: solutions.serve(a, c, max(1, most - 1), wait)),
    ],
}  # fmt: skip

"""Checks of market. Oracles: sets of the steps that a sample knows, features by construction, least squares
by `lstsq`, clocks that are scripted, a network in float64, a queue that is followed tick by tick.
"""

import math
import random

import numpy as np
import torch

from course_lib import checking as core
from course_lib.checking import yours  # noqa: F401
from course_lib.triton.check import BF16, FULL, HALF, NAMES, Kernel, poisoned, within


def _array(got, what, shape=None):
    "`got` as a NumPy array of finite numbers, of this shape, or `Wrong`."
    try:
        found = np.asarray(got.detach().cpu() if isinstance(got, torch.Tensor) else got)
        found = found if found.dtype.kind in "iu" else found.astype(float)
    except (TypeError, ValueError):
        raise core.Wrong(f"{what}: expected numbers, got {core.kind(got)}") from None
    right = shape is None or found.shape == shape
    core.require(right, f"{what}: expected an array of shape {list(shape or ())}, got {list(found.shape)}")
    core.require(np.isfinite(found).all(), f"{what}: some are NaN or infinite")
    return found


def _unchanged(answer, what, *arrays, **more):
    "Call on copies of arrays, which must stay as they are."
    given = [a.copy() if isinstance(a, np.ndarray) else a for a in arrays]
    got = core.call(answer, *given, **more)
    for new, old in zip(given, arrays, strict=True):
        same = not isinstance(old, np.ndarray) or np.array_equal(new, old, equal_nan=True)
        core.require(same, f"{what}: it changes an array that it was given; work on a copy")
    return got


@core.exercise("market.1", "test, purge and embargo right for labels of any length, in any order")
def leak_free(answer):
    core.need_callable(answer)
    for case in range(60):
        n = random.randrange(30, 60)
        start = np.array(random.sample(range(300), n))
        if case % 2:  # in order
            start = np.sort(start)
        end = start + np.random.randint(1, 40, n)
        lo = random.randrange(60, 150)
        hi = lo + random.randrange(30, 80)
        embargo = (None, 0, random.randrange(1, 50))[case % 3]
        if case % 12 == 5:  # test labels end long before hi; sample j is late enough, counted from the last
            embargo, (i, j) = random.randrange(5, 15), random.sample(range(n), 2)
            start[(start > lo + 9) & (start < hi)] += 400
            start[[i, j]] = lo, hi + embargo
            end = start + np.random.randint(1, 4, n)
        inside = [i for i in range(n) if start[i] in range(lo, hi)]
        if case % 4 == 0:  # on the edges: known at lo; forecast at hi; one step too early, one late enough
            i, j, k, m = random.sample(inside, 4) if len(inside) > 6 else [0, 1, 2, 3]
            start[[i, j]], end[[i, j]], start[k], end[k] = (lo - 9, hi), (lo, hi + 5), lo - 8, lo - 1
            inside = [i for i in range(n) if start[i] in range(lo, hi)]
            last = max((end[i] for i in inside), default=hi)
            start[m], end[m] = last + (embargo or 0) + case // 4 % 2, last + 60
            inside = [i for i in range(n) if start[i] in range(lo, hi)]
        if not inside:
            continue
        beyond = max(end[i] for i in inside) + (math.inf if embargo is None else embargo)
        train = [i for i in range(n) if set(range(end[i] + 1)) <= set(range(lo)) or start[i] > beyond]
        what = f"{n} samples, test from {lo} to {hi}, embargo {embargo}"
        arguments = {} if embargo is None and case % 2 else {"embargo": embargo}
        got = core.parts(_unchanged(answer, what, start, end, lo, hi, **arguments), "train test", what)
        swapped = train != inside and [list(map(int, np.ravel(g))) for g in got] == [inside, train]
        core.require(not swapped, f"{what}: these are (test, train); expected (train, test)")
        for name, found, want in zip(("train", "test"), got, (train, inside), strict=True):
            masks = np.asarray(found).dtype == bool
            core.require(not masks, f"{name} holds booleans; expected positions (`np.flatnonzero`)")
            found = _array(found, f"{name}, {what}").ravel()
            core.require(
                not found.size or found.dtype.kind in "iu", f"{name} holds {found.dtype}; expected integers"
            )
            found = found.astype(int).tolist()
            for verb, odd in (("has", set(found) - set(want)), ("misses", set(want) - set(found))):
                for i in sorted(odd)[:1]:
                    sample = f"sample {i}, forecast at {start[i]}, known at {end[i]}"
                    raise core.Wrong(
                        f"{what}: {name} {verb} {sample} (test labels end at {max(end[inside])})"
                    )
            core.require(found == want, f"{what}: {name} isn't in increasing order, each position once")
    core.refuses(answer, start, end, 400, 500, why="no sample is forecast in the test period")


def _mean_of(p, w):
    "Means of the last w prices, by a Fourier transform: right up to rounding."
    n = len(p)
    kernel = np.where(np.arange(n) < w, 1 / w, 0)
    return np.fft.irfft(np.fft.rfft(p, 2 * n) * np.fft.rfft(kernel, 2 * n), 2 * n)[:n]


def _filled_back(p):
    holes = np.arange(len(p)) % 7 == 3
    at = np.where(holes, np.minimum(np.arange(len(p)) + 1, len(p) - 1), np.arange(len(p)))
    return p[at]


def _lagged(p, lag):
    return np.concatenate([np.full(lag, np.nan), p[:-lag]])


HONEST = {  # each from prices up to its own row
    "a price": lambda p: 2.0 * p,
    "a lag": lambda p: _lagged(p, 3),
    "a mean": lambda p: _mean_of(p, 9),
    "the highest so far": np.maximum.accumulate,
    "the first price": lambda p: np.full(len(p), p[0]),
    "nothing yet": lambda p: np.full(len(p), np.nan),
}
SEERS = {  # each shows another mistake
    "a z-score of all": lambda p: (p - p.mean()) / p.std(),
    "a rank in all": lambda p: p.argsort().argsort().astype(float),
    "the next step": lambda p: np.append(np.diff(p), np.nan),
    "a mean around": lambda p: np.convolve(p, np.ones(5) / 5, "same"),
    "filled from behind": _filled_back,
    "the step after next": lambda p: np.append(np.diff(p)[1:], [np.nan, np.nan]),
    "below the highest of all": lambda p: p.max() - p,
    "less the spread at the end": lambda p: p - p[-9:].std(),
    "the spread of all, rounded": lambda p: np.full(len(p), np.round(p.std() / 3)),
    "a little of the end": lambda p: p + 2e-5 * p[-1],
    "a price or nothing, by the mean": lambda p: np.where(p > p.mean(), p, np.nan),
    "the place of the highest at the end": lambda p: np.full(len(p), float(p[-10:].argmax())),
    "begins with the mean of all": lambda p: np.where(np.arange(len(p)) < 9, p.mean(), p),
}


@core.exercise("market.2", "columns that use later prices found, all others left alone, rounding too")
def look_ahead(answer):
    core.need_callable(answer)
    names = random.sample(list(SEERS), len(SEERS))
    cases = [[name] for name in names] + [names[:3], names[3:5], []]
    for case in cases:
        columns = case + random.sample(list(HONEST), 3)
        columns = random.sample(columns, len(columns))
        walk = np.cumsum(np.random.randn(random.randrange(90, 130)))
        prices = 50 + 5 * walk / walk.std()
        # One time alone shows what is filled from behind, and it isn't the first or the last.
        low = 45 if "begins with the mean of all" in case else 20  # rows long before the time count too
        some = random.sample([t for t in range(low, 80) if t % 7 != 3], 12)
        times = sorted([45, *some, low + 1, 78])
        kept = prices.copy()

        def features(p, columns=columns, n=len(prices)):
            core.require(len(p) == n, f"features was given {len(p)} prices instead of {n}")
            given = p.copy()
            out = np.stack([(HONEST | SEERS)[c](given) for c in columns], 1)
            p[:] = np.nan  # what a function does with its input is no reason to blame a column
            return out

        got = core.call(answer, features, prices, times)
        core.require(np.array_equal(prices, kept), "the prices are changed: give features a copy")
        what = f"features {columns}"
        core.require(isinstance(got, list | tuple), f"{what}: expected a list, got {core.kind(got)}")
        want = [i for i, c in enumerate(columns) if c in case]
        core.equal([int(core.number(g, what)) for g in got], want, f"{what}: the columns that look ahead")


def _lives(means, age, lives):
    "The half-life of each mean row: the longest projection on a curve leaves the least error."
    unit = np.exp(-math.log(2) * np.divide.outer(age, lives))
    return lives[((means @ (unit / np.linalg.norm(unit, axis=0))) ** 2).argmax(-1)]


@core.exercise("market.3", "half-life by least squares, interval over blocks of models")
def half_life(answer):
    core.need_callable(answer)
    for case in range(5):
        block, ages = (3, 1, 6, 4, 2)[case], random.randrange(9, 14)
        rows, draws = block * random.randrange(*((5, 7) if case == 4 else (9, 13))) + (block > 2), 4000
        age, lives = np.sort(np.random.uniform(100, 9000, ages)), np.geomspace(150, 60_000, 200)
        groups = np.repeat(np.random.randn(-(-rows // block), 1), block, 0)[:rows]  # neighbours are alike
        if case == 0:  # models of one half-life and many sizes: whatever is drawn, it is the same
            scores = np.exp(groups) * 0.1 * 2 ** (-age / lives[random.randrange(70, 110)])
        else:  # of many half-lives, and with noise, so that some means are below 0
            scores = 0.2 * 2 ** (-age / (2000 * np.exp((1.3 if case == 4 else 0.8) * groups)))
            scores = scores + 0.06 * np.random.randn(rows, ages) * (case % 2) - 0.01
        what = f"scores of {rows} models at {ages} ages, block {block}"

        def found(draws, seed, scores=scores, age=age, lives=lives, block=block, what=what):
            rng = np.random.default_rng(seed)
            fresh = rng.bit_generator.state
            got = _unchanged(answer, what, scores, age, lives, draws, block, rng)
            core.require(rng.bit_generator.state != fresh, f"{what}: the generator `rng` isn't used")
            return [core.number(g, what) for g in core.parts(got, "life low high", what)]

        life, *ends = found(draws, case)
        core.close(life, _lives(scores.mean(0), age, lives), f"the half-life, {what}", 1e-6)
        first = np.random.randint(0, rows - block + 1, (20_000, rows // block))
        drawn = scores[(first[..., None] + np.arange(block)).reshape(len(first), -1)].mean(1)
        many = _lives(drawn, age, lives)
        for name, end, part in zip(("low", "high"), ends, (2.5, 97.5), strict=True):
            below, upto = (100 * np.mean(many < end * f) for f in (1 - 1e-9, 1 + 1e-9))
            core.require(
                below - 1 < part < upto + 1,  # four standard errors of a percentile of 4,000 draws
                f"{name} of the interval, {what}: {below:.1f} % of the draws are below {end:,.0f}, "
                f"expected {part} % (blocks of neighbouring rows, as many as fit in; then the percentile)",
            )
        _, low, high = found(1, case)
        core.require(
            low == high, f"{what}: with draws=1, low and high must be equal, got {low:g} and {high:g}"
        )


class _Scripted:
    "A clock of which every µs is written down: calls queue work, and `sync` waits for it."

    def __init__(self, costs, stalls):
        self.time, self.ready, self.calls, self.waited = random.uniform(50, 500), 0.0, 0, []
        self.costs, self.stalls, self.started, self.asked = costs, stalls, [], 0

    def now(self):
        self.asked += 1  # this clock stands still, so a loop that asks until it is time would never end
        core.require(self.asked < 10_000, "`clock.now()` is called without end; wait with `clock.wait_until`")
        return self.time

    def wait_until(self, when):
        self.waited.append(when)
        self.time = max(self.time, when)

    def sync(self):
        self.time = max(self.time, self.ready)

    def answer(self):
        self.started.append(self.time)
        queue, work = self.costs(self.calls)
        self.time += queue + self.stalls.get(self.calls, 0.0)
        self.ready = max(self.ready, self.time) + work
        self.calls += 1


@core.exercise(
    "market.4", "latency from when a request was due, warm and synced; percentiles with enough samples"
)
def measure(answer, percentile):
    for fn in (answer, percentile):
        core.need_callable(fn)
    for case in range(8):
        n, warm = random.randrange(30, 60), 0 if case == 3 else random.randrange(2, 9)
        gap = random.uniform(8, 20)
        arrivals = np.cumsum(np.random.exponential(gap, n)).tolist()
        stalls = {} if case < 2 else {warm + k: random.uniform(100, 400) for k in random.sample(range(n), 2)}
        first = 1e4 if case % 2 else 0.0  # a cold first call
        clock = _Scripted(lambda k, f=first, g=gap: (0.1 * g + f * (k == 0), 0.4 * g + f * (k == 1)), stalls)
        twin = _Scripted(clock.costs, stalls)
        twin.time = clock.time
        got = core.call(answer, clock.answer, list(arrivals), clock, **({"warm": warm} if case else {}))
        warm = warm if case else 10
        core.equal(clock.calls, warm + n, f"{n} requests, warm={warm}: calls of answer")
        for _ in range(warm):
            twin.answer()
        twin.sync()
        begin, want = twin.time, []
        for due in arrivals:
            twin.time = max(twin.time, begin + due)
            twin.answer()
            twin.sync()
            want.append(twin.time - begin - due)
        got = _array(got, "the latencies", (n,))
        early = np.subtract(clock.started, twin.started)[warm:]
        for k in np.flatnonzero(np.abs(early) > 1e-6)[:1]:
            off = f"{abs(early[k]):,.1f} µs too {'late' if early[k] > 0 else 'early'}"
            raise core.Wrong(
                f"request {k} of {n}, due {arrivals[k]:,.1f} µs after the beginning, is called {off}"
            )
        for k in np.flatnonzero(np.abs(got - want) > 1e-6)[:1]:
            off = f"expected {want[k]:,.1f} µs, got {got[k]:,.1f}"
            stalled = f" ({len(stalls)} calls stall, so later requests wait)" if stalls else ""
            raise core.Wrong(f"the latency of request {k} of {n}{stalled}: {off}")
    for n, p in ((1000, 99), (1000, 50), (1237, 98.5), (53, 75), (20, 50), (4000, 99.5), (999, 97)):
        samples = np.random.lognormal(3, 1, n)
        want = next(x for x in np.sort(samples) if (samples <= x).sum() * 100 >= p * n)
        got = _unchanged(percentile, f"{n} latencies", random.choice((samples, samples.tolist())), p)
        core.close(got, want, f"percentile {p} of {n} latencies", 1e-12)
    for n, p in ((999, 99), (100, 99), (19, 50), (3999, 99.75)):
        core.refuses(percentile, np.random.rand(n), p, why=f"percentile {p} of {n} latencies")


@core.exercise("market.6", "batches begin when full or due, never early; ties, bursts, a busy server")
def serve(answer):
    core.need_callable(answer)
    for case in range(40):
        most, wait = random.choice((1, 2, 3, 5, 8)), random.choice((0, 3, 10, 25))
        n = 0 if case == 7 else random.randrange(1, 60)
        if case in (4, 8):  # the last batch is full
            n, most, wait = 5, 5, 25
        gaps = [random.choice((0, 0, 1, 2, 9)) if case % 3 else random.randrange(0, 12) for _ in range(n)]
        arrivals = (np.cumsum([random.randrange(1, 20), *gaps])[1:] / 4).tolist() if n else []
        table = [0, *(c / 4 for c in sorted(random.sample(range(2, 40), most)))]
        wait /= 4
        if case == 9:  # the example
            n, arrivals, table, most, wait = 3, [0, 4, 30], [0, 11, 12], 2, 20
        asked = []

        def cost(size, table=table, asked=asked):
            core.require(
                1 <= size < len(table), f"cost({size}): a batch holds 1 to {len(table) - 1} requests"
            )
            asked.append(size)
            return table[int(size)]

        want, sizes = _ticks(arrivals, table, most, wait)
        what = f"{n} requests, most {most}, wait {wait:g}"
        got = _array(core.call(answer, list(arrivals), cost, most, wait), what, (n,))
        for k in np.flatnonzero(np.abs(got - want) > 1e-9)[:1]:
            off = f"expected {want[k]:g} µs, got {got[k]:g}"
            raise core.Wrong(f"{what}: the latency of request {k}, which arrives at {arrivals[k]:g}: {off}")
        core.equal(asked, sizes, f"{what}: the sizes of batches that cost is asked for")


def _ticks(arrivals, table, most, wait):
    "Latencies and sizes of batches, from one quarter of a µs to the next."
    queue, done, sizes, free, now = [], {}, [], 0, 0
    while len(done) < len(arrivals):
        queue += [k for k, a in enumerate(arrivals) if a == now]
        while queue and now >= free and (len(queue) >= most or now - arrivals[queue[0]] >= wait):
            batch, queue = queue[:most], queue[most:]
            free = now + table[len(batch)]
            sizes.append(len(batch))
            done |= {k: free - arrivals[k] for k in batch}
        now += 0.25
    return np.array([done[k] for k in range(len(arrivals))], float), sizes


@core.exercise("market.5", "all layers in one launch, for any width; each weight read once, only y stored")
def mlp(layer, kernel):
    whole, part = Kernel(kernel, 8, "LAYERS", "WIDTH", "BLOCK"), Kernel(layer, 6, "WIDTH", "BLOCK")
    for dtype, layers in ((FULL, 3), (BF16, 1), (FULL, 4), (HALF, 2), (BF16, 5)):
        width = random.choice((16, 32)) if layers == 4 else random.choice((5, 11, 19, 27))
        block = max(2, 1 << (width - 1).bit_length()) * (2 if layers == 2 else 1)
        w = (torch.randn(layers, width, width) * 1.4 / width**0.5).to(dtype)
        x, b, head = torch.randn(width), torch.randn(layers, width) * 0.3, torch.randn(width)
        h = x.double()
        for weights, bias in zip(w.double(), b.double(), strict=True):
            h = (weights @ h + bias).clamp(min=0)
        if layers % 2 and h @ head.double() > 0:  # y below 0: it has no ReLU
            head = -head
        what = f"{layers} layers of width {width} in {NAMES[dtype]}, BLOCK {block}"
        once = ({0: "x", 1: "w", 2: "b", 3: "head"}, {4: "y"})
        args, sizes = (within(x), w, b, within(head), y := poisoned(1)), {"WIDTH": width, "BLOCK": block}
        whole.run((1,), *args, LAYERS=layers, what=what, once=once, **sizes)
        size = max(1.0, (h.abs() * head.double().abs()).sum().item())
        core.close(y[0].item(), (h @ head.double()).item(), f"y, {what}", 1e-5, 3e-6 * size)
        _some_rows(part, w[0], b[0], x.abs(), **sizes)
    whole.compiles()


def _some_rows(part, w, b, h, WIDTH, BLOCK):
    "The learner's `layer` for a part of the rows, the last ones among them."
    from course_lib.market import kernels as beside

    beside.layer = part.kernel
    kernel = Kernel(beside.rows_kernel, 8, "WIDTH", "BLOCK", "ROWS")
    kernel.name = part.name
    count = random.choice((2, 4))
    for first in (random.randrange(0, WIDTH - count), WIDTH - 1, WIDTH):
        out, rows = poisoned(count), range(first, min(first + count, WIDTH))
        what = f"{count} rows from row {first} on, WIDTH {WIDTH}, BLOCK {BLOCK}"
        args, limits = (within(h), w, b, out, first), {1: max(1, len(rows) * WIDTH)}
        sizes = {"WIDTH": WIDTH, "BLOCK": BLOCK, "ROWS": count}
        once = ({0: "h"}, {3: "out"})
        kernel.run((1,), *args, what=what, once=once, limits=limits if len(rows) else {}, **sizes)
        want = torch.zeros(count, dtype=torch.float64)
        for k, row in enumerate(rows):
            want[k] = (w[row].double() @ h.double() + b[row].double()).clamp(min=0)
        core.close(out, want, f"layer, {what}", 1e-5, 1e-5)
    kernel.compiles()

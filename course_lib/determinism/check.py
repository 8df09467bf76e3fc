"Checks of determinism. Oracles: math.fsum, equal bits, settings before and after, autograd in float64."

import contextlib
import itertools
import math
import random

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.data import DataLoader, Dataset

from course_lib import checking as core
from course_lib.checking import yours  # noqa: F401

GENERATORS = "Python's random", "NumPy's np.random", "torch"
NAMES = "torch's number of threads", "deterministic algorithms", "warn_only", "torch.backends.cudnn.benchmark"


class _Seen(TorchDispatchMode):
    "Calls `look(operator, out)` after each operator."

    def __init__(self, look):
        super().__init__()
        self.look = look

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.look(func, out)
        return out


@contextlib.contextmanager
def _stirred(name):
    "Global generators in a state that nobody knows, and which `name` may not change; NumPy's is put back."
    kept = np.random.get_state()
    random.seed()
    np.random.seed(random.getrandbits(32))
    torch.manual_seed(random.getrandbits(32))
    _ = np.random.rand(), torch.rand(5)  # a state that its seed alone doesn't give again
    before = _states()
    try:
        yield
        for generator, old, new in zip(GENERATORS, before, _states(), strict=True):
            need(old == new, f"{name} left the global generator of {generator} in another state")
    finally:
        np.random.set_state(kept)


def need(condition, *words):
    core.require(condition, ": ".join(words))


def _states():
    _, keys, *rest = np.random.get_state()
    return random.getstate(), (keys.tobytes(), rest), torch.get_rng_state().tolist()


@core.exercise("determinism.1", "error below 2u in six cases, four operators a row, no wider type")
def compensated(answer):
    for name, x in _addends(lanes=5).items():
        n, u, ran = len(x), torch.finfo(x.dtype).eps / 2, []
        what = f"the sum of {name}, {str(x.dtype).removeprefix('torch.')}[{n}, 5]"
        with _Seen(lambda func, out, ran=ran: ran.append((func.is_view, getattr(out, "dtype", None)))):
            got = core.call(answer, x)
        lanes = isinstance(got, torch.Tensor) and got.shape == (5,)
        need(lanes, what, f"expected a tensor of shape [5], got {core.kind(got)}")
        for dtype in [got.dtype, *(t for _, t in ran if t and t.is_floating_point)]:
            need(dtype == x.dtype, what, f"a tensor of {dtype} was made; use the type of x alone")
        columns = [[math.fsum(map(f, v)) for v in x.double().T.tolist()] for f in (float, abs)]
        exact, size = torch.tensor(columns, dtype=torch.float64)
        error, allowed = (got.double() - exact).abs(), (2 * u + 3 * n * u * u) * size  # Kahan's bound
        lane = int((error / allowed).nan_to_num(math.inf).argmax())
        most = f"expected at most {allowed[lane]:.3g} (2u times the sum of magnitudes)"
        how = f"lane {lane} is off by {error[lane]:.3g}; what an addition loses must reach the next one"
        need(error[lane] <= allowed[lane], what, most, how)
        ops = sum(not view for view, _ in ran)
        how = "two to add a row, two to find what was lost, all of them torch's"
        # 40 are what the check's own call needs.
        need(3 * n <= ops <= 4 * n + 40, what, f"expected about {4 * n:,} operators ({how}), got {ops:,}")


def _addends(lanes):
    n = random.randrange(700, 800)
    small = torch.rand(n, lanes) * 0.4 + 0.1
    first, within, halves = small.clone(), small.clone(), (small / 8).half()
    first[0], within[n // 3], halves[0] = 2.0**24, -(2.0**24), 2.0**9
    return {
        "one large number and many small ones": first,
        "many small numbers with a large negative one among them": within,
        "numbers of both signs": torch.randn(n, lanes) * torch.logspace(-3, 3, n)[:, None],
        "positive numbers": small,
        "one large number and many small ones in half precision": halves,
        "numbers of both signs in double precision": torch.randn(n, lanes, dtype=torch.float64),
    }


class _Items(Dataset):
    "Items (index, numbers): one each of the data set's own generator and of the three global ones."

    def __init__(self, n):
        self.n, self.rng = n, np.random.default_rng(0)

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        drawn = self.rng.random(), random.random(), np.random.rand(), torch.rand((), dtype=torch.float64)
        return i, torch.tensor(drawn, dtype=torch.float64)


@core.exercise("determinism.2", "every item once with numbers of its own, and a second run gives them again")
def seeded_loader(answer):
    batch, seed = random.choice([3, 4, 7]), random.randrange(1, 10**6)
    n = batch * random.randrange(20 // batch, 30 // batch) + random.randrange(1, batch)
    what = f"seeded_loader(dataset of {n}, {batch}, workers=2, seed={seed})"
    run, again, other = (_epochs(answer, n, batch, 2, s, what) for s in (seed, seed, seed + 1))
    _epochs(answer, n, batch, 1, seed, what.replace("=2", "=1"))
    need(run[0][:n] != run[0][n:], what, "the second epoch has the order of the first; shuffle")
    need(run[0] == again[0], what, "a second run had another order; give the loader a generator")
    need(run[0] != other[0], what, f"seed {seed + 1} gives the same order")
    for k, whose in enumerate(("dataset.rng", *GENERATORS)):
        mine, second, theirs = ([row[k] for row in r[1]] for r in (run, again, other))
        apart = f"{whose} gave {len(set(mine[:n]))} different numbers for {n} items"
        need(len(set(mine[:n])) == n, what, f"{apart}; each worker needs a state of its own")
        need(len(set(mine)) == 2 * n, what, f"{whose} gave numbers of epoch 1 again in epoch 2")
        need(mine == second, what, f"a second run drew other numbers from {whose}")
        need(not {*mine} & {*theirs}, what, f"seed {seed + 1} drew the same numbers from {whose}")


def _epochs(answer, n, batch, workers, seed, what):
    "The items' indices in the order of two epochs, and their numbers."
    with _stirred("seeded_loader"):
        loader = core.call(answer, _Items(n), batch, workers, seed)
        need(isinstance(loader, DataLoader), f"expected a DataLoader, got {core.kind(loader)}")
        core.equal(loader.num_workers, workers, f"{what}: num_workers")
        try:
            epochs = [list(loader), list(loader)]
        except Exception as e:  # a worker's, with its whole traceback
            raise core.Wrong(f"{what}: a worker raised {str(e).strip().splitlines()[-1][:150]}") from None
    for batches in epochs:
        sizes = [batch] * (n // batch) + [n % batch] * (n % batch > 0)
        core.equal([len(index) for index, _ in batches], sizes, f"{what}: sizes of the batches")
        items = sorted(i for index, _ in batches for i in index.tolist())
        need(items == list(range(n)), what, "an epoch must give every item once")
    both = [b for batches in epochs for b in batches]
    return [i for index, _ in both for i in index.tolist()], [row for _, x in both for row in x.tolist()]


def _settings():
    mode = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.get_num_threads(), *mode, torch.backends.cudnn.benchmark


def _set(threads, strict, warn_only, benchmark):
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(strict, warn_only=warn_only)
    torch.backends.cudnn.benchmark = benchmark


@core.exercise("determinism.3", "equal draws and settings inside, all as it was outside, after an error too")
def repeatable(answer):
    seed, draws, kept = random.randrange(10**6), [], _settings()
    try:
        for given, fails in ((seed, False), (seed, True), (seed + 1, False), (seed + 1, True)):
            _set(random.choice([2, 3]), given == seed, given == seed and not fails, not fails)
            where = "after a block that raised" if fails else "after the block"
            with _stirred(f"{where} repeatable"):
                before = _settings()
                draws.append(_inside(answer, given, fails))
                for name, was, now in zip(NAMES, before, _settings(), strict=True):
                    core.equal(now, was, f"{name} {where}")
    finally:
        _set(*kept)
    for name, first, second, third, _ in zip(GENERATORS, *draws, strict=True):
        need(first == second, f"repeatable({seed}) twice: {name} drew other numbers; seed it")
        need(second != third, f"repeatable({seed}) and ({seed + 1}): {name} drew the same numbers")


def _inside(answer, seed, fails):
    "What the three generators draw inside a block that raises an error, or not."
    block, drawn = core.call(answer, seed), []
    need(hasattr(block, "__enter__"), f"expected something for `with`, got {core.kind(block)}")
    try:
        with block:
            for name, got, want in zip(NAMES, _settings(), (1, True, False, False), strict=True):
                core.equal(got, want, f"{name} inside the block")
            drawn += [random.random()], np.random.rand(2).tolist(), torch.rand(2).tolist()
            _ = 1 / (not fails)
        need(not fails, "an error inside the block must reach the caller")
    except ZeroDivisionError:
        pass
    return drawn


class _Shared:
    "Samples that note each read; at each, rows of the weights move, as a second process would move them."

    def __init__(self, weights, features, labels):
        self.weights, self.features, self.labels = weights, features, labels
        self.events, self.reads, self.chance = [], [], random.Random(random.getrandbits(64))

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        i = i.item() if isinstance(i, torch.Tensor) else i
        if not isinstance(i, int) or not 0 <= i < len(self):
            raise core.Wrong(f"samples[{i!r}] was read; samples are numbered 0 to {len(self) - 1}")
        with _disable_current_modes():  # what the check does is not the answer's
            if self.reads[-1:] != [i]:
                rows = torch.tensor(self.chance.sample(range(len(self.weights)), 4))
                moved = torch.tensor([[self.chance.gauss(0, 0.1) for _ in self.weights[0]] for _ in rows])
                self.weights[rows] += moved
                self.events.append((rows, moved, i))
                self.reads.append(i)
            return self.features[i].clone(), self.labels[i]


@core.exercise("determinism.4", "every shard once in an order of its own, all updates kept, others' too")
def worker(answer):
    n, lr, orders = 47, random.uniform(0.2, 0.4), {}
    cases = [(workers, seed, rank) for workers in (1, 3) for seed in (4, 5) for rank in range(workers)]
    for case in [*cases, cases[-1]]:
        (workers, seed, rank), where = case, f"rank {case[2]} of {case[0]}, seed {case[1]}"
        start, labels = torch.randn(61, 7), [random.randrange(7) for _ in range(n)]
        features = [torch.randperm(61)[: random.randrange(3, 7)] for _ in range(n)]
        samples = _Shared(start.clone(), features, labels)
        with _stirred("worker"), _Seen(_no_dense_write):
            core.call(answer, samples.weights, samples, rank, workers, seed, lr, mutates=(0, 1))
        core.equal(sorted(samples.reads), list(range(rank, n, workers)), f"{where}: samples read, sorted")
        need(samples.reads != sorted(samples.reads), where, "read in ascending order; draw an order")
        want = start.double()
        for rows, moved, i in samples.events:  # autograd: the other worker's write, then this one's step
            want[rows] += moved.double()
            active = want[features[i]].requires_grad_()
            F.cross_entropy(active.sum(0)[None], torch.tensor([labels[i]])).backward()
            want[features[i]] -= lr * active.grad
        core.close(samples.weights, want, f"{where}: the shared weights at the end", rtol=1e-3, atol=1e-4)
        again = orders.setdefault(case, samples.reads) == samples.reads
        need(again, where, "a second call read in another order; seed a torch.Generator")
    steps = {(s, r): [i // 3 for i in orders[3, s, r]] for s in (4, 5) for r in (0, 1)}
    for one, two in itertools.combinations(steps, 2):
        same = f"(seed, rank) = {one} and {two} read their shards in one order; mix rank and seed"
        need(steps[one] != steps[two], same)


def _no_dense_write(func, out):
    name = func.overloadpacket.__name__
    by_rows = func.is_view or name.lstrip("_").startswith(("index", "scatter"))
    dense = isinstance(out, torch.Tensor) and out.shape == (61, 7) and not by_rows
    why = "use the rows of `features` alone, or a step undoes what other workers do meanwhile"
    need(not dense, f"worker went over all rows of the weights ({name})", why)

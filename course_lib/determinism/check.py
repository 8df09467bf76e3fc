"Checks of determinism. Oracles: differences put in, equal bits, settings before and after, float64 autograd."

import contextlib
import itertools
import random
import warnings

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data import DataLoader, Dataset

from course_lib import checking as core
from course_lib.checking import yours  # noqa: F401
from course_lib.determinism import Operators

GENERATORS = "Python's random", "NumPy's np.random", "torch"
NAMES = "torch's number of threads", "deterministic algorithms", "warn_only", "torch.backends.cudnn.benchmark"
BACKWARD = "a backward pass"
LIST = "the last tensor of a list"


@contextlib.contextmanager
def _stirred(name, why=""):
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
            hint = why if generator == "torch" else ""
            need(old == new, f"{name} left the global generator of {generator} in another state{hint}")
    finally:
        np.random.set_state(kept)


def need(condition, *words):
    core.require(condition, ": ".join(words))


def _states():
    _, keys, *rest = np.random.get_state()
    return random.getstate(), (keys.tobytes(), rest), torch.get_rng_state().tolist()


@core.exercise("determinism.1", "the first difference of ten kinds by number and name, None where none is")
def first_difference(answer):
    stages = _stages()
    random.shuffle(stages)
    for changed in [None, *range(len(stages))]:
        ran, starts, calls = [], [], []

        def run(which, changed=changed, ran=ran, starts=starts, calls=calls):
            calls.append(which)
            with _disable_current_modes():  # so that memory is found with other numbers in each run
                _ = [torch.full((999,), float(which)) for _ in range(400)]
                del _
            found = torch.empty(999)
            _ = found, torch.empty_like(found), found.new_empty(999)
            found.fill_(3)
            for k, (_, stage, same, other) in enumerate(stages):
                starts.append(len(ran))
                stage(other if which == 2 and changed is not None and k >= changed else same)

        with Operators(lambda func, _, ran=ran: ran.append(str(func))):
            run(0)
        at = starts[changed or 0] + (stages[changed or 0][0] in (BACKWARD, LIST))  # after one equal output
        got = core.call(answer, lambda: run(1), lambda: run(2))
        core.equal(calls[1:], [1, 2], "calls of `one` (1) and `two` (2)")
        if changed is None:
            how = "NaN equals itself, and what `empty` gives is not compared"
            need(got is None, f"two runs with equal bits: expected None, got {got!r}; {how}")
        else:
            what, want = f"two runs that differ first in {stages[changed][0]}", (at, ran[at])
            how = "count all operators from 0; compare the bits of each output as they were when it came"
            need(got is not None, f"{what}: expected {want}, got None; {how}")
            got = tuple(core.parts(got, "number name", what))
            need(got == want, f"{what}: expected {want}, got {got}; {how}")


def _stages():
    "Pieces of a run: (what differs, function of an input, the input of both runs, another input for `two`)."
    n, m = core.ragged(3, 9, 2)
    x, zeros = torch.randn(n, m), torch.zeros(n, m)
    near, far, signed, first, second = x.clone(), x.clone(), zeros.clone(), zeros.clone(), zeros.clone()
    near[-1, -1], far[-1, -1], signed[-1, -1] = torch.nextafter(x[-1, -1], x.new_tensor(9.0)), 99.0, -0.0
    first[0, 1] = first[1, 2] = second[0, 2] = second[1, 1] = 1  # the same numbers in another order
    nan, far_nan = x.abs(), far.abs()
    nan[0], far_nan[0] = -1, -1
    leaf, matrix = torch.randn(n, m, requires_grad=True), torch.randn(m, 4)
    return [
        ("the last bit of an element", lambda v: v * 2, x, near),
        ("a matmul", lambda v: v @ matrix, x, far),
        ("the sign of a zero", lambda v: v.clone(), zeros, signed),
        ("an output that has NaN in both runs", lambda v: v.log(), nan, far_nan),
        ("the second output, the places of a maximum", lambda v: v.max(1), first, second),
        (LIST, lambda v: (v[0], v.split(2)), x, far),
        ("a transposed output in bfloat16", lambda v: v.t(), x.bfloat16(), far.bfloat16()),
        ("a maximum, a tensor without dimensions", lambda v: v.amax(), x, far),
        ("memory that a later operator overwrites", lambda v: v.exp().zero_(), x, far),
        (BACKWARD, lambda v: torch.autograd.grad(leaf * 2, leaf, v), x, near),
    ]


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
    what = f"seeded_loader(dataset of {n}, {batch}, workers=3, seed={seed})"
    run, again, other = (_epochs(answer, n, batch, 3, s, what) for s in (seed, seed, seed + 1))
    _epochs(answer, n, batch, 1, seed, what.replace("=3", "=1"))
    need(run[0][:n] != run[0][n:], what, "the second epoch has the order of the first; shuffle")
    need(run[0] == again[0], what, "a second run had another order; give each loader a generator of its own")
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
    why, items = "; a loader without `generator` draws from torch's", _Items(n)
    seeds, rng = (seed, random.getrandbits(20)), items.rng  # two loaders at once
    with _stirred("seeded_loader", why), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns where workers outnumber cores
        loader, _ = (core.call(answer, items, batch, workers, s) for s in seeds)
        need(isinstance(loader, DataLoader), f"expected a DataLoader, got {core.kind(loader)}")
        core.equal(loader.num_workers, workers, f"{what}: num_workers")
        try:
            epochs = [list(loader), list(loader)]
        except Exception as e:  # a worker's, with its whole traceback
            raise core.Wrong(f"{what}: a worker raised {str(e).strip().splitlines()[-1][:150]}") from None
    need(items.rng is rng, what, "dataset.rng of the program changed; set it in worker_init_fn alone")
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
        cases = [(seed, False), (seed, True), (seed + 1, False), (seed + 1, True), (seed, False)]
        for case, (given, fails) in enumerate(cases):
            _set(random.choice([2, 3]), given == seed, given == seed and not fails, not fails)
            where = "after a block that raised" if fails else "after the block"
            where += ", in which another one ran" * (case == 4)
            with _stirred(f"{where} repeatable"):
                before = _settings()
                draws.append(_inside(answer, given, fails, case == 4))
                for name, was, now in zip(NAMES, before, _settings(), strict=True):
                    core.equal(now, was, f"{name} {where}")
    finally:
        _set(*kept)
    for name, first, second, third, *_ in zip(GENERATORS, *draws, strict=True):
        need(first == second, f"repeatable({seed}) twice: {name} drew other numbers; seed it")
        need(second != third, f"repeatable({seed}) and ({seed + 1}): {name} drew the same numbers")


def _inside(answer, seed, fails, nested=False):
    "What the three generators draw inside a block that raises an error, or not, or has a block inside."
    block, drawn = core.call(answer, seed), []
    need(hasattr(block, "__enter__"), f"expected something for `with`, got {core.kind(block)}")
    try:
        with block:
            for name, got, want in zip(NAMES, _settings(), (1, True, False, False), strict=True):
                core.equal(got, want, f"{name} inside the block")
            if nested:
                _inside(answer, seed + 2, fails)
            drawn += [random.random()], np.random.rand(2).tolist(), torch.rand(2).tolist()
            _ = 1 / (not fails)
        need(not fails, "an error inside the block must reach the caller")
    except ZeroDivisionError:
        pass
    return drawn


class Samples:
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
    cases += [(3, seed, 0) for seed in (0, 6, 7, 8, 9, 14, 104)]  # sums and products meet (4, 1) here
    for case in [*cases, cases[-1]]:
        (workers, seed, rank), where = case, f"rank {case[2]} of {case[0]}, seed {case[1]}"
        start, labels = torch.randn(61, 7), [random.randrange(7) for _ in range(n)]
        features = [torch.randperm(61)[: random.randrange(3, 7)] for _ in range(n)]
        samples = Samples(start.clone(), features, labels)
        with _stirred("worker"), Operators(_no_dense_write):
            core.call(answer, samples.weights, samples, rank, workers, seed, lr, mutates=(0, 1))
        core.equal(sorted(samples.reads), list(range(rank, n, workers)), f"{where}: samples read, sorted")
        need(samples.reads != sorted(samples.reads), where, "read in ascending order; draw an order")
        want = start.double()
        for rows, moved, i in samples.events:  # autograd: the other worker's write, then this one's step
            want[rows] += moved.double()
            active = want[features[i]].requires_grad_()
            F.cross_entropy(active.sum(0)[None], torch.tensor([labels[i]])).backward()
            want[features[i]] -= lr * active.grad
        end = f"{where}: the weights at the end, each row written back"
        core.close(samples.weights, want, end, rtol=1e-3, atol=1e-4)
        again = orders.setdefault(case, samples.reads) == samples.reads
        need(again, where, "a second call read in another order; seed a torch.Generator")
    steps = {(s, r): [i // 3 for i in order] for (w, s, r), order in orders.items() if w == 3 and r < 2}
    for one, two in itertools.combinations(steps, 2):
        same = f"(seed, rank) = {one} and {two} read their shards in one order; mix rank and seed"
        need(steps[one] != steps[two], same)


def _no_dense_write(func, out):
    name = func.overloadpacket.__name__
    by_rows = func.is_view or name.lstrip("_").startswith(("index", "scatter"))
    dense = isinstance(out, torch.Tensor) and out.shape == (61, 7) and not by_rows
    why = "use the rows of `features` alone, or a step undoes what other workers do meanwhile"
    need(not dense, f"worker went over all rows of the weights ({name})", why)

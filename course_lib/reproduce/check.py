"""Checks of reproduce. Oracles: a repository in memory, exact sums, programs that are really executed,
autograd in float64, and another worker's hand in the shared weights."""

import builtins
import contextlib
import copy
import functools
import importlib.metadata
import itertools
import json
import math
import platform
import random

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from course_lib import checking as core
from course_lib import meter
from course_lib.checking import yours  # noqa: F401
from course_lib.reproduce.names import Cell

# --- reproduce.1 ---------------------------------------------------------------------------


class _Repository:
    "What `git` answers in one state of a repository; None throughout where there is none."

    def __init__(self, status="", unstaged="", staged="", exists=True):
        self.commit = f"{random.getrandbits(160):040x}"
        self.status, self.unstaged, self.staged, self.exists = status, unstaged, staged, exists

    def __call__(self, *arguments):
        words = tuple(w for a in arguments for w in str(a).split())
        answers = {
            ("rev-parse", "HEAD"): self.commit,
            ("status", "--porcelain"): self.status,
            ("status", "--short"): self.status,
            ("diff",): self.unstaged,
            ("diff", "HEAD"): self.staged + self.unstaged,
            ("diff", "--staged"): self.staged,
            ("diff", "--cached"): self.staged,
        }
        if words not in answers:
            known = ", ".join(f"`git {' '.join(w)}`" for w in answers)
            raise core.Wrong(
                f"the exercise's git was asked for `git {' '.join(words)}` and knows only {known}"
            )
        return answers[words] if self.exists else None


def _repositories():
    line = f"-lr = {random.random():.4f}\n+lr = {random.random():.4f}"
    patch = f"diff --git a/train.py b/train.py\n{line}"
    return {
        "a clean repository": _Repository(),
        "a repository with a change that is not staged": _Repository(" M train.py", unstaged=patch),
        "a repository with a staged change": _Repository("M  train.py", staged=patch),
        "a repository whose only change is a new file": _Repository("?? loader.py"),
        "a folder without a repository": _Repository(exists=False),
    }


def _config():
    return {
        "lr": random.random(),
        "model": {"width": random.randrange(8, 99), "layers": random.sample(range(99), 3)},
        "name": f"run {random.randrange(999)}",
        "resume": None,
    }


@core.exercise("reproduce.1", "manifest complete in five states of a repository, and every difference named")
def manifest(make, differing):
    for where, git in _repositories().items():
        config, seed = _config(), random.randrange(2**31)
        given = copy.deepcopy(config)
        got = core.call(make, given, seed, git, mutates=(0,))
        core.require(given == config, "manifest changed the configuration it was given; copy it")
        if not isinstance(got, dict):
            raise core.Wrong(f"manifest: expected a dict, got {core.kind(got)}")
        given["model"]["layers"].append("changed later")
        want = {
            "config": config,
            "seed": seed,
            "commit": git("rev-parse HEAD"),
            "diff": git("diff HEAD"),
            "clean": (git("status --porcelain") == "") if git.exists else None,
            "python": platform.python_version(),
        }
        for key, value in want.items():
            if key not in got:
                raise core.Wrong(f"the manifest of {where} lacks {key!r}")
            if key == "config" and got[key] == given:
                raise core.Wrong("config in the manifest changed when the caller's did later; copy it deeply")
            if got[key] != value or type(got[key]) is not type(value):
                raise core.Wrong(f"{key!r} in {where}: expected {_short(value)}, got {_short(got[key])}")
        _packages(got)
        try:
            same = json.loads(json.dumps(got)) == got
        except (TypeError, ValueError) as e:
            raise core.Wrong(f"the manifest can't be written as JSON: {e}") from None
        core.require(same, "the manifest read back from JSON is another; use text, numbers, lists and dicts")
    for then, now in _pairs():
        got = core.call(differing, then, now)
        if not isinstance(got, list | tuple | set):
            raise core.Wrong(f"differing: expected a list of names, got {core.kind(got)}")
        want = _named(then, now)
        if sorted(map(str, got)) != want or not all(isinstance(n, str) for n in got):
            said = f"differing({_short(then)}, {_short(now)})"
            raise core.Wrong(f"{said}: expected {want}, got {_short(sorted(map(str, got)))}")


def _short(value, most=120):
    text = repr(value)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _packages(got):
    if not isinstance(got.get("packages"), dict):
        raise core.Wrong("the manifest lacks 'packages', a dict {name: version}")
    for name in ("torch", "numpy"):
        want = importlib.metadata.version(name)
        # torch.__version__ also names the build, 2.14.1+cu130.
        also = str(torch.__version__) if name == "torch" else want
        if got["packages"].get(name) not in (want, also):
            raise core.Wrong(f"packages[{name!r}]: expected {want!r}, got {got['packages'].get(name)!r}")


def _pairs():
    "Pairs of nested dicts: chosen ones for what is easily mistaken, then drawn ones."
    yield {"a": 1, "b": {"c": 2}}, {"a": 1, "b": {"c": 2}}
    yield (
        {"lr": 0.1, "model": {"width": 8, "act": "relu"}},
        {"lr": 0.1, "model": {"width": 16, "act": "relu"}},
    )
    yield {"lr": 0.1}, {"lr": 0.1, "seed": None}
    yield {"lr": 0.1, "seed": None}, {"lr": 0.1}
    yield {"n": 1, "flag": True, "rate": 1.0}, {"n": True, "flag": 1, "rate": 1.0}
    yield {"n": 1}, {"n": 1.0}
    yield {"code": {"commit": "abc"}}, {"code": None}
    yield {"sizes": [1, 2], "z": 0}, {"sizes": [1, 2, 3], "z": 0}
    yield {"x": {"y": {"z": 0, "w": 0}}}, {"x": {"y": {"z": 1, "w": 0}}}
    yield {"x": {"a": 1}}, {"x": {"b": 1}}
    for _ in range(20):
        then = _draw_dict(3)
        now = copy.deepcopy(then)
        _change(now)
        yield (then, now) if random.random() < 0.5 else (now, then)


def _draw_dict(depth):
    def value():
        if depth and random.random() < 0.5:
            return _draw_dict(depth - 1)
        return random.choice([random.randrange(9), random.random(), None, True, [1, 2], "text"])

    return {k: value() for k in random.sample("abcdefgh", random.randrange(2, 5))}


def _change(tree):
    for key in list(tree):
        if isinstance(tree[key], dict) and random.random() < 0.7:
            _change(tree[key])
        elif random.random() < 0.4:
            tree[key] = random.choice([random.random(), "changed"])
        elif random.random() < 0.2:
            del tree[key]
    if random.random() < 0.3:
        tree[random.choice("ijk")] = random.choice([None, 0, {"new": 1}])


def _named(then, now):
    "The oracle walks from the names: every path of either, and what each of the two has there."

    def paths(tree, prefix=""):
        return {
            p
            for k, v in tree.items()
            for p in [prefix + k, *(paths(v, prefix + k + ".") if isinstance(v, dict) else [])]
        }

    def at(tree, path):
        for key in path.split("."):
            if not isinstance(tree, dict) or key not in tree:
                return "absent", None
            tree = tree[key]
        # repr tells 1, 1.0 and True apart; a dict on both sides differs only by what is in it.
        return ("dict", None) if isinstance(tree, dict) else ("value", repr(tree))

    everywhere = paths(then) | paths(now)
    off = {p for p in everywhere if at(then, p) != at(now, p)}
    # What lies within something that is named already is not named again.
    return sorted(p for p in off if not any(p.startswith(q + ".") for q in off))


# --- reproduce.2 ---------------------------------------------------------------------------


@contextlib.contextmanager
def _numpy_kept():
    "NumPy's global state comes back, as core does for Python's and torch's."
    import numpy as np

    state = np.random.get_state()
    try:
        yield np
    finally:
        np.random.set_state(state)


def _stir(np):
    random.seed()
    np.random.seed(random.getrandbits(32))
    torch.manual_seed(random.getrandbits(32))


def _drawn(np):
    return {
        "Python's random": [random.random() for _ in range(3)],
        "NumPy's np.random": np.random.rand(3).tolist(),
        "torch": torch.rand(3).tolist(),
    }


@core.exercise(
    "reproduce.2", "three generators seeded, and every sample has its own numbers whichever worker draws them"
)
def seeding(seed_everything, sample_rng):
    with _numpy_kept() as np:
        first, second = random.sample(range(1, 2**31), 2)
        runs = []
        for seed in (first, first, second):
            _stir(np)
            core.call(seed_everything, seed)
            runs.append(_drawn(np))
        for name in runs[0]:
            if runs[0][name] != runs[1][name]:
                raise core.Wrong(
                    f"after seed_everything({first}) twice, {name} gave other numbers the second time"
                )
            if runs[0][name] == runs[2][name]:
                raise core.Wrong(
                    f"{name} gave the same numbers after seed_everything({first}) and ({second})"
                )
        _samples(np, sample_rng)


def _samples(np, sample_rng):
    seeds, epochs = [0, 1, random.randrange(2, 2**31)], [0, 1, 2, 11, 12, 100, 1000]
    indices = [*range(30), 100, 111, 112, 1000, 2**12, 10**4, 2**16, 10**5, 10**6, 2**20]
    everything = [(s, e, i) for s in seeds for e in epochs for i in indices]
    random.shuffle(everything)
    _stir(np)
    before = _states(np)
    with _no_hash_of_text():
        found = {key: _numbers(np, sample_rng, key) for key in everything}
    core.require(
        _states(np) == before,
        "sample_rng changed a global generator; return a generator of its own, np.random.default_rng(…)",
    )
    seen = {}
    for key, numbers in found.items():
        if numbers in seen:
            raise core.Wrong(
                f"sample_rng{key} and sample_rng{seen[numbers]} give the same numbers: mix all three"
            )
        seen[numbers] = key
    # Another process, another order, another state around it: the same numbers.
    _stir(np)
    random.shuffle(everything)
    for key in everything[:60]:
        if _numbers(np, sample_rng, key) != found[key]:
            raise core.Wrong(f"sample_rng{key} gave other numbers when asked again, in another order")


def _numbers(np, sample_rng, key):
    rng = core.call(sample_rng, *key)
    if not isinstance(rng, np.random.Generator):
        raise core.Wrong(f"sample_rng{key}: expected a NumPy Generator, got {core.kind(rng)}")
    return tuple(rng.random(3).tolist())


def _states(np):
    state = np.random.get_state()
    return random.getstate(), (state[1].tobytes(), state[2]), torch.get_rng_state().numpy().tobytes()


@contextlib.contextmanager
def _no_hash_of_text():
    "hash() of text is salted in each process: right here and wrong in a worker."
    real = builtins.hash

    def watched(x):
        parts = x if isinstance(x, tuple) else [x]
        if any(isinstance(p, str | bytes) for p in parts):
            raise core.Wrong("hash() of text is another number in every process; mix the integers themselves")
        return real(x)

    builtins.hash = watched
    try:
        yield
    finally:
        builtins.hash = real


# --- reproduce.3 ---------------------------------------------------------------------------


@core.exercise(
    "reproduce.3", "error below 2u in five cases, four operations a row, nothing wider than the input"
)
def compensated(answer):
    lanes = 5
    for name, x in _addends(lanes).items():
        n = len(x)
        got, c, widths = _counted(answer, x)
        what = f"the sum of {name}, {str(x.dtype).removeprefix('torch.')}[{n}, {lanes}]"
        if not isinstance(got, torch.Tensor) or got.shape != (lanes,):
            raise core.Wrong(f"{what}: expected a tensor of shape [{lanes}], got {core.kind(got)}")
        if got.dtype != x.dtype:
            raise core.Wrong(
                f"{what}: expected {x.dtype}, got {got.dtype}; carry the loss in the input's own type"
            )
        wide = {dtype for dtype in widths - {x.dtype} if dtype.is_floating_point}
        if wide:
            raise core.Wrong(
                f"{what}: a tensor of {wide.pop()} was made on the way; use the input's own type alone"
            )
        exact = torch.tensor([math.fsum(column) for column in x.double().T.tolist()], dtype=torch.float64)
        size = torch.tensor(
            [math.fsum(map(abs, column)) for column in x.double().T.tolist()], dtype=torch.float64
        )
        u = torch.finfo(x.dtype).eps / 2
        # Kahan's bound, (2u + O(n u²)) times the sum of magnitudes.
        allowed = (2 * u + 3 * n * u * u) * size
        error = (got.double() - exact).abs()
        lane = int((error / allowed).nan_to_num(math.inf).argmax())
        if not error[lane] <= allowed[lane]:
            raise core.Wrong(
                f"{what}: lane {lane} is off by {error[lane]:.3g}, expected at most {allowed[lane]:.3g} "
                f"(2u times the sum of magnitudes): what an addition loses must reach the next one"
            )
        _price(c, n, lanes, x.element_size())


def _counted(answer, x):
    "The answer for `x`, its Counts, and the types of the tensors it made."
    seen = []

    def run(x):
        with _Widths() as widths, meter.count() as c:
            out = answer(x)
        seen.extend((c, widths.seen))
        return out

    # The call is counted from within: what core.call does around it is not the answer's.
    return core.call(functools.update_wrapper(run, answer) if callable(answer) else answer, x), *seen


def _price(c, n, lanes, itemsize):
    if c.ops < 3 * n:
        raise core.Wrong(
            f"{c.ops} operations for {n} rows: add row after row, and after each find what was lost"
        )
    if c.ops > 4 * n + 8:
        raise core.Wrong(
            f"{c.ops / n:.1f} operations a row: expected four (two to add, two to find what was lost)"
        )
    most = (4 * n + 8) * 3 * lanes * itemsize
    if c.bytes > most:
        raise core.Wrong(f"{c.bytes:,} bytes moved, expected at most {most:,}: work on one row at a time")


def _addends(lanes):
    n = random.randrange(700, 800)
    small = torch.rand(n, lanes) * 0.4 + 0.1
    large_first, large_within = small.clone(), small.clone()
    large_first[0] = 2.0**24
    large_within[n // 3] = -(2.0**24)
    halves = (torch.rand(n, lanes) * 0.05 + 0.05).half()
    halves[0] = 2.0**9
    return {
        "one large number and many small ones": large_first,
        "many small numbers with a large negative one among them": large_within,
        "numbers of both signs": torch.randn(n, lanes) * torch.logspace(-3, 3, n)[:, None],
        "positive numbers": small,
        "one large number and many small ones in half precision": halves,
    }


class _Widths(TorchDispatchMode):
    "The types of all tensors that are made."

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.seen |= {
            t.dtype for t in (out if isinstance(out, list | tuple) else [out]) if torch.is_tensor(t)
        }
        return out


# --- reproduce.4 ---------------------------------------------------------------------------


@core.exercise("reproduce.4", "stale results right for 200 histories, each really executed")
def stale(answer):
    for history, notebook in itertools.chain(_chosen(), (_session() for _ in range(200))):
        want = _executed(history, notebook)
        got = core.call(answer, list(history), list(notebook))
        if not isinstance(got, set | frozenset | list | tuple):
            raise core.Wrong(f"stale: expected a set of cell ids, got {core.kind(got)}")
        if set(got) != want:
            raise core.Wrong(
                f"after the runs {_told(history)} of the notebook {_told(notebook)}: "
                f"expected {sorted(want)} to be stale, got {sorted(map(str, got))}"
            )


def _told(cells):
    text = " | ".join(f"{c.id}: {c.source}" for c in cells)
    return f"[{text}]" if len(text) <= 160 else f"[{text[:159]}…]"


def _cell(id, source):
    "A cell whose names are given by its source, `a = 3 * b + 5`."
    target, _, value = source.partition(" = ")
    return Cell(id, source, frozenset(n for n in "abcdef" if n in value), frozenset([target]))


def _executed(history, notebook):
    "Run both, and compare what each cell's latest run made."

    def results(cells):
        names, made = {}, {}
        for c in cells:
            try:
                exec(c.source, {}, names)
            except NameError:
                made[c.id] = None
                continue
            made[c.id] = [names[n] for n in sorted(c.defines)]
        return made

    ran, would = results(history), results(notebook)
    return {id for id in ran if would.get(id) is None or ran[id] != would[id]}


def _chosen():
    "What is easily got wrong: a cell run twice, an edit, an edit taken back, a cell moved or deleted."
    a, b, c = _cell("A", "a = 3"), _cell("B", "b = 2 * a"), _cell("C", "c = b + 1")
    edited, twice = _cell("A", "a = 4"), _cell("T", "a = 5 * a + 1")
    yield [a, b, c], [a, b, c]
    yield [a, b, c, a], [a, b, c]
    yield [a, b, c, edited], [edited, b, c]
    yield [a, b, c, edited, c], [edited, b, c]
    yield [a, b, edited, a, c], [a, b, c]
    yield [a, twice, twice, b], [a, twice, b]
    yield [a, twice, a, twice, b], [a, twice, b]
    yield [a, b, c], [a, c]
    yield [a, b, c], [b, a, c]
    yield [a, b, _cell("X", "a = 9"), c], [a, b, c, _cell("X", "a = 9")]


def _session():
    "A notebook of up to seven cells, run, edited, moved and deleted at random."
    while True:
        cells = {}
        for id in random.sample("JKLMNPQ", random.randrange(4, 8)):
            cells[id] = _cell(id, _formula(random.sample("abcdef", random.randrange(3))))
        history, known = [], set()
        for _ in range(random.randrange(5, 16)):
            ready = [c for c in cells.values() if c.uses <= known]
            if not ready:
                break
            cell = random.choice(ready)
            if random.random() < 0.2:
                cell = cells[cell.id] = _cell(cell.id, _formula(sorted(cell.uses), target=min(cell.defines)))
            history.append(cell)
            known |= cell.defines
        notebook = list(cells.values())
        if random.random() < 0.3:
            i, j = random.sample(range(len(notebook)), 2)
            notebook[i], notebook[j] = notebook[j], notebook[i]
        if random.random() < 0.2:
            del notebook[random.randrange(len(notebook))]
        above = set()
        for c in notebook:
            if not c.uses <= above:
                break  # it would stop with a NameError: another draw
            above |= c.defines
        else:
            if len(history) > 3:
                return history, notebook


def _formula(names, target=None):
    "`c = 37 * a + 52 * b + 482913774`: two histories then give one value by chance once in 10^9."
    terms = [f"{random.randrange(2, 100)} * {n}" for n in names]
    return f"{target or random.choice('abcdef')} = {' + '.join([*terms, str(random.randrange(10**9))])}"


# --- reproduce.5 ---------------------------------------------------------------------------


class _Shared:
    """Samples that note who reads what, while another worker writes into the same weights.

    At each read some rows of `weights` move, as a second process would move them.
    """

    def __init__(self, weights, features, labels):
        self.weights, self.features, self.labels = weights, features, labels
        self.events, self.reads = [], []

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        if isinstance(i, torch.Tensor):
            i = i.item()
        if not isinstance(i, int) or not 0 <= i < len(self):
            raise core.Wrong(f"samples[{i!r}] was read; samples are numbered 0 to {len(self) - 1}")
        if not self.reads or self.reads[-1] != i:
            rows = torch.tensor(random.sample(range(len(self.weights)), 4))
            moved = torch.randn(4, self.weights.shape[1]) * 0.1
            self.weights[rows] += moved
            self.events.append((rows, moved, i))
            self.reads.append(i)
        return self.features[i].clone(), self.labels[i]


class _NoDenseWrites(TorchDispatchMode):
    "Refuses operators that go over all of the weights."

    def __init__(self, numel):
        super().__init__()
        self.numel = numel

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.lstrip("_")
        by_rows = name.startswith(("index", "scatter")) or func.is_view
        if torch.is_tensor(out) and out.numel() >= self.numel and not by_rows:
            raise core.Wrong(
                f"worker went over all rows of the weights ({name}); read and write only the rows of "
                "`features`, or each step undoes what other workers do meanwhile"
            )
        return out


@core.exercise(
    "reproduce.5", "every shard once, in an order of its own; all updates kept, the other worker's too"
)
def worker(answer):
    rows, classes, n, lr = 61, 7, 47, 0.3
    orders = {}
    for workers in (1, 3):
        for seed in (4, 5):
            for rank in range(workers):
                weights = torch.randn(rows, classes)
                features = [torch.randperm(rows)[: random.randrange(3, 7)] for _ in range(n)]
                labels = [random.randrange(classes) for _ in range(n)]
                samples = _Shared(weights.clone(), features, labels)
                _run(answer, samples, rank, workers, seed, lr)
                where = f"rank {rank} of {workers}"
                _shard(samples.reads, rank, workers, n, where)
                want = _replayed(weights, samples.events, features, labels, lr)
                core.close(samples.weights, want, f"the shared weights after {where}", rtol=1e-3, atol=1e-4)
                orders[workers, seed, rank] = samples.reads
    again = _Shared(torch.randn(rows, classes), features, labels)
    _run(answer, again, 2, 3, 5, lr)
    core.require(
        again.reads == orders[3, 5, 2], "the same seed and rank gave another order; seed a torch.Generator"
    )
    core.require(orders[3, 4, 2] != orders[3, 5, 2], "seeds 4 and 5 gave one order; use the seed")
    within = [[i // 3 for i in orders[3, 4, r]][:15] for r in range(2)]
    core.require(
        within[0] != within[1], "ranks 0 and 1 go through their shards in one order; mix rank and seed"
    )


def _run(answer, samples, rank, workers, seed, lr):
    with _numpy_kept() as np:
        _stir(np)
        inside = _Reading(samples)
        before = torch.get_rng_state()
        with _NoDenseWrites(samples.weights.numel()):
            core.call(answer, samples.weights, inside, rank, workers, seed, lr, mutates=(0, 1))
        core.require(
            torch.equal(torch.get_rng_state(), before),
            "worker drew from torch's global generator, which each process has in another state; "
            "make a torch.Generator of its own",
        )


class _Reading:
    "The samples as the answer sees them: the check's own work inside a read is neither counted nor refused."

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, i):
        state = torch.get_rng_state()
        try:
            with torch.utils._python_dispatch._disable_current_modes():
                return self.samples[i]
        finally:
            torch.set_rng_state(state)


def _shard(reads, rank, workers, n, where):
    want = list(range(rank, n, workers))
    if sorted(reads) != want:
        missing, extra = sorted(set(want) - set(reads)), sorted(set(reads) - set(want))
        said = (
            f"misses {missing}" if missing else f"also read {extra}" if extra else "read some samples twice"
        )
        raise core.Wrong(f"{where} of {n} samples: expected each of {want[:3]}…{want[-1]} once; it {said}")
    core.require(reads != want, f"{where} went through its samples in ascending order; draw an order")


def _replayed(weights, events, features, labels, lr):
    "The same events by autograd in float64: first the other worker's write, then this one's step."
    w = weights.double()
    for rows, moved, i in events:
        w[rows] += moved.double()
        active = w[features[i]].requires_grad_()
        F.cross_entropy(active.sum(0)[None], torch.tensor([labels[i]])).backward()
        w[features[i]] -= lr * active.grad
    return w

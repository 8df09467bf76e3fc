"Answers to the exercises of determinism: the course's, right ones of another style, and wrong ones."

import contextlib
import hashlib
import operator
import random

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, RandomSampler

from course_lib import determinism
from course_lib.determinism import solutions

REFERENCE = {number: getattr(solutions, names[0]) for number, names in solutions.EXERCISES.items()}


# --- determinism.1: the first operator that differs ------------------------------------------


def _compared(keep, differ, last=False):
    "first_difference with `keep(name, out)` for each output, and `differ(kept, other)`."

    def first_difference(one, two):
        runs = []
        for run in (one, two):
            ran = []
            with determinism.Operators(
                lambda func, out, ran=ran: ran.append((str(func), keep(str(func), out)))
            ):
                run()
            runs.append(ran)
        pairs = enumerate(zip(*runs, strict=True))
        found = [(number, name) for number, ((name, kept), (_, other)) in pairs if differ(kept, other)]
        return found[-last] if found else None

    return first_difference


def _tensors(out):
    return [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]


def _bytes(t):
    return bytes(t.detach().contiguous().reshape(-1).view(torch.uint8).tolist())


def _skip_empty(keep):
    return lambda name, out: [] if "empty" in name else keep(out)


digests = _compared(  # right: a hash for each output
    _skip_empty(lambda out: [hashlib.sha256(_bytes(t)).digest() for t in _tensors(out)]), operator.ne
)


def while_two_runs(one, two):
    "Right: a mode of its own, which compares while the second run goes on."

    class Watch(TorchDispatchMode):
        def __init__(self, first=None):
            super().__init__()
            self.ran, self.first, self.found = [], first, None

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            mine = [t.clone() for t in _tensors(out)] if "empty" not in func.name() else []
            if self.first and self.found is None and not all(map(self.same, mine, self.first[len(self.ran)])):
                self.found = len(self.ran), str(func)
            self.ran.append(mine)
            return out

        def same(self, a, b):
            return _bytes(a) == _bytes(b)

    with Watch() as first:
        one()
    with Watch(first.ran) as second:
        two()
    return second.found


def _unequal(kept, other):
    return not all(map(torch.equal, kept, other))


by_value = _compared(_skip_empty(lambda out: [t.detach().clone() for t in _tensors(out)]), _unequal)
without_a_clone = _compared(
    _skip_empty(lambda out: [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in _tensors(out)]),
    _unequal,
)
single_tensors_only = _compared(
    _skip_empty(lambda out: _bytes(out) if isinstance(out, torch.Tensor) else b""), operator.ne
)
empty_memory_too = _compared(lambda name, out: [_bytes(t) for t in _tensors(out)], operator.ne)
almost_equal = _compared(
    _skip_empty(lambda out: [t.detach().clone() for t in _tensors(out)]),
    lambda a, b: not all(torch.allclose(x, y, equal_nan=True) for x, y in zip(a, b, strict=True)),
)


sum_of_the_bytes = _compared(_skip_empty(lambda out: [sum(_bytes(t)) for t in _tensors(out)]), operator.ne)
memory_behind_a_view_too = _compared(
    _skip_empty(lambda out: [t.untyped_storage().tolist() for t in _tensors(out)]), operator.ne
)
one_kind_of_empty = _compared(
    lambda name, out: [] if name.startswith("aten.empty") else [_bytes(t) for t in _tensors(out)], operator.ne
)
the_last = _compared(_skip_empty(lambda out: [_bytes(t) for t in _tensors(out)]), operator.ne, last=True)


# --- determinism.2: the seeded loader -------------------------------------------------------


def _loader(dataset, batch_size, workers, generator, start, **kw):
    kw = {"shuffle": True, "multiprocessing_context": "fork"} | kw
    return DataLoader(
        dataset, batch_size, num_workers=workers, generator=generator, worker_init_fn=start, **kw
    )


def _generator(seed):
    return torch.Generator().manual_seed(seed)


def _rng_of(number):
    "A worker_init_fn that gives the worker's data set the generator default_rng(number(worker_id, info))."

    def start(worker_id):
        info = torch.utils.data.get_worker_info()
        info.dataset.rng = np.random.default_rng(number(worker_id, info))

    return start


def initial_seed_and_a_sampler(dataset, batch_size, workers, seed):
    "Right: a sampler of its own, torch's documented `initial_seed`, and a child of a SeedSequence."

    def start(worker_id):
        children = np.random.SeedSequence(torch.initial_seed()).spawn(1)
        torch.utils.data.get_worker_info().dataset.rng = np.random.default_rng(children[0])

    g = torch.Generator()
    g.manual_seed(seed + 12345)
    sampler = RandomSampler(dataset, generator=g)
    return _loader(dataset, batch_size, workers, g, start, sampler=sampler, shuffle=None)


def workers_that_stay(dataset, batch_size, workers, seed):
    "Right: the workers live on, so that their generators go on in the second epoch."
    start = _rng_of(lambda worker_id, info: [seed, worker_id])
    return _loader(dataset, batch_size, workers, _generator(seed), start, persistent_workers=True)


def no_worker_init(dataset, batch_size, workers, seed):
    return _loader(dataset, batch_size, workers, _generator(seed), None)


def the_same_in_every_epoch(dataset, batch_size, workers, seed):
    start = _rng_of(lambda worker_id, info: seed + worker_id)
    return _loader(dataset, batch_size, workers, _generator(seed), start)


def one_state_for_all_workers(dataset, batch_size, workers, seed):
    start = _rng_of(lambda worker_id, info: info.seed - worker_id)
    return _loader(dataset, batch_size, workers, _generator(seed), start)


def no_generator(dataset, batch_size, workers, seed):
    start = _rng_of(lambda worker_id, info: info.seed)
    return _loader(dataset, batch_size, workers, None, start)


def epochs_counted_by_the_loader(dataset, batch_size, workers, seed):
    "Right: the program counts epochs, and a worker is forked with the count."

    class Counting(DataLoader):
        epoch = 0

        def __iter__(self):
            self.epoch += 1
            return super().__iter__()

    start = _rng_of(lambda worker_id, info: [seed, loader.epoch, worker_id])
    loader = Counting(
        dataset, batch_size, num_workers=workers, generator=_generator(seed), worker_init_fn=start,
        shuffle=True, multiprocessing_context="fork",
    )  # fmt: skip
    return loader


SHARED = torch.Generator()


def one_generator_for_all_loaders(dataset, batch_size, workers, seed):
    start = _rng_of(lambda worker_id, info: info.seed)
    return _loader(dataset, batch_size, workers, SHARED.manual_seed(seed), start)


def the_programs_copy_too(dataset, batch_size, workers, seed):
    dataset.rng = np.random.default_rng(seed)
    return _loader(dataset, batch_size, workers, _generator(seed), _rng_of(lambda worker_id, info: info.seed))


def numpy_reseeded_by_number(dataset, batch_size, workers, seed):
    def start(worker_id):
        _rng_of(lambda worker_id, info: info.seed)(worker_id)
        np.random.seed(seed + worker_id)

    return _loader(dataset, batch_size, workers, _generator(seed), start)


# --- determinism.3: a repeatable block ------------------------------------------------------


def _kept():
    "[(function that puts it back, state), …]"
    benchmark = torch.backends.cudnn.benchmark
    return [
        (random.setstate, random.getstate()),
        (np.random.set_state, np.random.get_state()),
        (torch.set_rng_state, torch.get_rng_state()),
        (torch.set_num_threads, torch.get_num_threads()),
        (torch.set_deterministic_debug_mode, torch.get_deterministic_debug_mode()),
        (lambda old: setattr(torch.backends.cudnn, "benchmark", old), benchmark),
    ]


def _begin(seed):
    for start in (random.seed, np.random.seed, torch.manual_seed):
        start(seed)
    torch.set_num_threads(1)
    torch.set_deterministic_debug_mode("error")
    torch.backends.cudnn.benchmark = False


class Repeatable:
    "Right: a class, with torch's state by hand."

    def __init__(self, seed):
        self.seed = seed

    def __enter__(self):
        self.kept = _kept()
        _begin(self.seed)

    def __exit__(self, *error):
        for put, state in self.kept:
            put(state)


@contextlib.contextmanager
def with_a_stack(seed):
    "Right: an ExitStack that puts back what was set, and other seeds for the three generators."
    with contextlib.ExitStack() as stack:
        for put, state in _kept():
            stack.callback(put, state)
        _begin(seed)
        np.random.seed([seed, 1])
        random.seed(f"run {seed}")
        yield


@contextlib.contextmanager
def without_finally(seed):
    kept = _kept()
    _begin(seed)
    yield
    for put, state in kept:
        put(state)


KEPT = []


@contextlib.contextmanager
def one_place_for_all_blocks(seed):
    KEPT[:] = _kept()
    _begin(seed)
    try:
        yield
    finally:
        for put, state in KEPT:
            put(state)


def _block(enter):
    "The course's block with something more to do on the way in."

    @contextlib.contextmanager
    def repeatable(seed):
        with solutions.repeatable(seed):
            enter(seed)
            yield

    return repeatable


@contextlib.contextmanager
def strict_mode_off_afterwards(seed):
    with solutions.repeatable(seed):
        yield
    torch.use_deterministic_algorithms(False)


forgets_numpy = _block(lambda seed: np.random.seed())
one_seed_for_all = _block(lambda seed: torch.manual_seed(0))
only_warns = _block(lambda seed: torch.use_deterministic_algorithms(True, warn_only=True))
threads_as_they_are = _block(lambda seed: torch.set_num_threads(2))


# --- determinism.4: the Hogwild worker ------------------------------------------------------


def _order(samples, rank, workers, seed):
    generator = torch.Generator().manual_seed(seed * workers + rank)
    shard = range(rank, len(samples), workers)
    return [shard[i] for i in torch.randperm(len(shard), generator=generator).tolist()]


def _step(weights, features, label, lr):
    gradient = weights[features].sum(0).softmax(0)
    gradient[label] -= 1
    weights.index_add_(0, features, gradient.expand(len(features), -1), alpha=-lr)


def by_autograd(weights, samples, rank, workers, seed, lr):
    "Right: an order of Python's generator, and the gradient by autograd."
    mine = list(range(len(samples)))[rank::workers]
    random.Random(1000 * seed + rank).shuffle(mine)
    for i in mine:
        features, label = samples[i]
        rows = weights[features].requires_grad_()
        loss = F.cross_entropy(rows.sum(0), torch.tensor(label))
        weights[features] = (rows - lr * torch.autograd.grad(loss, rows)[0]).detach()


def by_numpy(weights, samples, rank, workers, seed, lr):
    "Right: NumPy on the same memory."
    shared = weights.numpy()
    for i in np.random.default_rng([seed, rank]).permutation(np.arange(rank, len(samples), workers)):
        features, label = samples[int(i)]
        at = features.numpy()
        scores = shared[at].sum(0)
        gradient = np.exp(scores - scores.max())
        gradient /= gradient.sum()
        gradient[label] -= 1
        np.subtract.at(shared, at, (lr * gradient).astype(shared.dtype))


def binds_a_new_tensor(weights, samples, rank, workers, seed, lr):
    for i in _order(samples, rank, workers, seed):
        features, label = samples[i]
        gradient = weights[features].sum(0).softmax(0)
        gradient[label] -= 1
        weights = weights.index_add(0, features, gradient.expand(len(features), -1), alpha=-lr)


def works_on_a_copy_and_writes_it_back(weights, samples, rank, workers, seed, lr):
    everything = torch.arange(len(weights))
    mine = weights[everything]
    for i in _order(samples, rank, workers, seed):
        _step(mine, *samples[i], lr)
    weights.index_copy_(0, everything, mine)


def dense_gradient(weights, samples, rank, workers, seed, lr):
    for i in _order(samples, rank, workers, seed):
        features, label = samples[i]
        gradient, p = torch.zeros_like(weights), weights[features].sum(0).softmax(0)
        p[label] -= 1
        gradient[features] = p
        weights -= lr * gradient


def one_order_for_all_ranks(weights, samples, rank, workers, seed, lr):
    shard = range(rank, len(samples), workers)
    for i in torch.randperm(len(shard), generator=_generator(seed)).tolist():
        _step(weights, *samples[shard[i]], lr)


def _from(number):
    "A wrong answer: its order is drawn from the seed `number(seed, rank)`, which two pairs share."

    def worker(weights, samples, rank, workers, seed, lr):
        shard, generator = range(rank, len(samples), workers), _generator(number(seed, rank))
        for i in torch.randperm(len(shard), generator=generator).tolist():
            _step(weights, *samples[shard[i]], lr)

    return worker


seed_times_rank = _from(lambda seed, rank: seed * (rank + 1))
seed_and_ten_times_rank = _from(lambda seed, rank: seed + 10 * rank)


def seeds_numpys_generator(weights, samples, rank, workers, seed, lr):
    np.random.seed(seed * workers + rank)
    for i in np.random.permutation(range(rank, len(samples), workers)).tolist():
        _step(weights, *samples[i], lr)


RIGHT = {
    "determinism.1": [digests, while_two_runs],
    "determinism.2": [initial_seed_and_a_sampler, workers_that_stay, epochs_counted_by_the_loader],
    "determinism.3": [Repeatable, with_a_stack],
    "determinism.4": [by_autograd, by_numpy],
}

MUTANTS = {
    "determinism.1": [
        by_value,
        without_a_clone,
        single_tensors_only,
        empty_memory_too,
        almost_equal,
        sum_of_the_bytes,
        memory_behind_a_view_too,
        one_kind_of_empty,
        the_last,
    ],
    "determinism.2": [
        no_worker_init,
        the_same_in_every_epoch,
        one_state_for_all_workers,
        no_generator,
        numpy_reseeded_by_number,
        one_generator_for_all_loaders,
        the_programs_copy_too,
    ],
    "determinism.3": [
        without_finally,
        one_place_for_all_blocks,
        strict_mode_off_afterwards,
        forgets_numpy,
        one_seed_for_all,
        only_warns,
        threads_as_they_are,
    ],
    "determinism.4": [
        binds_a_new_tensor,
        works_on_a_copy_and_writes_it_back,
        dense_gradient,
        one_order_for_all_ranks,
        seed_times_rank,
        seed_and_ten_times_rank,
        seeds_numpys_generator,
    ],
}

"Answers to the exercises of determinism: the course's, right ones of another style, and wrong ones."

import contextlib
import random

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, RandomSampler

from course_lib.determinism import solutions

REFERENCE = {number: getattr(solutions, names[0]) for number, names in solutions.EXERCISES.items()}


# --- determinism.1: the compensated sum ----------------------------------------------------


def carry_added(x):
    "Right: Kahan's sum with the other sign, in three additions and one subtraction."
    total, kept = x[0], torch.zeros_like(x[0])
    for k in range(1, len(x)):
        addend = x[k] + kept
        larger = total + addend
        kept = addend - (larger - total)
        total = larger
    return total + kept


def in_place(x):
    "Right: four buffers, written again and again."
    total, lost, addend, larger = (torch.zeros_like(x[0]) for _ in range(4))
    for row in x.unbind(0):
        torch.sub(row, lost, out=addend)
        torch.add(total, addend, out=larger)
        torch.sub(larger, total, out=lost)
        lost -= addend
        total, larger = larger, total
    return total


def plain_sum(x):
    total = torch.zeros_like(x[0])
    for row in x:
        total = total + row
    return total


def in_float64(x):
    total = torch.zeros_like(x[0], dtype=torch.float64)
    for row in x:
        total += row
    return total.to(x.dtype)


def simplified_by_algebra(x):
    total, lost = torch.zeros_like(x[0]), torch.zeros_like(x[0])
    for row in x:
        addend = row - lost
        larger = total + addend
        lost = larger - (total + addend)
        total = larger
    return total


def loss_against_the_row(x):
    total, lost = torch.zeros_like(x[0]), torch.zeros_like(x[0])
    for row in x:
        larger = total + (row - lost)
        lost = (larger - total) - row
        total = larger
    return total


def ten_operations_a_row(x):  # Neumaier's sum
    total, lost = torch.zeros_like(x[0]), torch.zeros_like(x[0])
    for row in x:
        larger = total + row
        lost = lost + torch.where(total.abs() >= row.abs(), (total - larger) + row, (row - larger) + total)
        total = larger
    return total + lost


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


def seeds_numpys_generator(weights, samples, rank, workers, seed, lr):
    np.random.seed(seed * workers + rank)
    for i in np.random.permutation(range(rank, len(samples), workers)).tolist():
        _step(weights, *samples[i], lr)


RIGHT = {
    "determinism.1": [carry_added, in_place],
    "determinism.2": [initial_seed_and_a_sampler, workers_that_stay],
    "determinism.3": [Repeatable, with_a_stack],
    "determinism.4": [by_autograd, by_numpy],
}

MUTANTS = {
    "determinism.1": [
        plain_sum,
        in_float64,
        simplified_by_algebra,
        loss_against_the_row,
        ten_operations_a_row,
    ],
    "determinism.2": [
        no_worker_init,
        the_same_in_every_epoch,
        one_state_for_all_workers,
        no_generator,
        numpy_reseeded_by_number,
    ],
    "determinism.3": [
        without_finally,
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
        seeds_numpys_generator,
    ],
}

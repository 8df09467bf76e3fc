"Wrong answers to the exercises. Each computes something, and each is what somebody would write."

import importlib.metadata
import json
import platform
import random

import torch

from course_lib.reproduce import cells as reproduce_cells
from course_lib.reproduce import code as reproduce_code
from course_lib.reproduce import comparison as reproduce_compare
from course_lib.reproduce import hogwild as reproduce_hogwild
from course_lib.reproduce import seeding as reproduce_seeding
from course_lib.reproduce import sums as reproduce_sums

essentials, differing = reproduce_code.essentials, reproduce_compare.differing
seed_everything, sample_rng = reproduce_seeding.seed_everything, reproduce_seeding.sample_rng

REFERENCE = {
    "reproduce.1": (essentials, differing),
    "reproduce.2": (seed_everything, sample_rng),
    "reproduce.3": reproduce_sums.kahan,
    "reproduce.4": reproduce_cells.stale,
    "reproduce.5": reproduce_hogwild.worker,
}


# --- reproduce.1: a manifest, and what differs ---------------------------------------------


def _without(key):
    def manifest(config, seed, git):
        got = essentials(config, seed, git)
        del got[key]
        return got

    return manifest, differing


def _with(**changes):
    def manifest(config, seed, git):
        return essentials(config, seed, git) | {k: f(config, seed, git) for k, f in changes.items()}

    return manifest, differing


forgets_the_diff = _without("diff")
forgets_the_seed = _without("seed")
forgets_the_versions = _without("packages")
forgets_the_commit = _without("commit")
forgets_python = _without("python")
only_unstaged_changes = _with(diff=lambda config, seed, git: git("diff"))
clean_when_the_diff_is_empty = _with(clean=lambda config, seed, git: git("diff", "HEAD") == "")
clean_where_there_is_no_repository = _with(clean=lambda config, seed, git: not git("status", "--porcelain"))
empty_diff_where_there_is_no_repository = _with(diff=lambda config, seed, git: git("diff", "HEAD") or "")
status_in_place_of_the_diff = _with(diff=lambda config, seed, git: git("status", "--porcelain"))
keeps_the_callers_config = _with(config=lambda config, seed, git: config)
copies_the_config_one_level_deep = _with(config=lambda config, seed, git: dict(config))
config_as_text = _with(config=lambda config, seed, git: json.dumps(config))
seed_in_use_instead_of_the_runs_own = _with(seed=lambda config, seed, git: torch.initial_seed())
python_without_the_patch_number = _with(
    python=lambda config, seed, git: ".".join(platform.python_version_tuple()[:2])
)
torch_alone_among_the_packages = _with(
    packages=lambda config, seed, git: {"torch": importlib.metadata.version("torch")}
)
versions_of_the_day_it_was_written = _with(
    packages=lambda config, seed, git: {"torch": "2.9.0", "numpy": "2.3.0"}
)


def _walk(then, now, prefix="", absent=None, nested=True, same=None, keys=None):
    names = []
    for key in keys(then, now) if keys else {*then, *now}:
        a, b = then.get(key, absent), now.get(key, absent)
        if nested and isinstance(a, dict) and isinstance(b, dict):
            names += _walk(a, b, f"{prefix}{key}.", absent, nested, same, keys)
        elif not (same(a, b) if same else a == b and type(a) is type(b)):
            names.append(prefix + key)
    return sorted(names)


def _missing_is_none(then, now):
    return _walk(then, now)


def _top_level(then, now):
    return _walk(then, now, absent=object(), nested=False)


def _keys_of_then(then, now):
    return _walk(then, now, absent=object(), keys=lambda a, b: a)


def _common_keys(then, now):
    return _walk(then, now, absent=object(), keys=lambda a, b: a.keys() & b.keys())


def _equal_in_python(then, now):
    return _walk(then, now, absent=object(), same=lambda a, b: a == b)


def _last_name(then, now):
    return sorted(name.rpartition(".")[2] for name in differing(then, now))


def _first_difference(then, now):
    return differing(then, now)[:1]


missing_and_none_are_the_same = (essentials, _missing_is_none)
compares_the_top_level = (essentials, _top_level)
sees_only_the_keys_of_then = (essentials, _keys_of_then)
sees_only_common_keys = (essentials, _common_keys)
one_is_true = (essentials, _equal_in_python)
names_without_their_path = (essentials, _last_name)
stops_at_the_first = (essentials, _first_difference)


# --- reproduce.2: seeding ------------------------------------------------------------------


def _numpy():
    import numpy as np

    return np


def _torch_only(seed):
    torch.manual_seed(seed)


def _without_numpy(seed):
    random.seed(seed)
    torch.manual_seed(seed)


def _without_python(seed):
    _numpy().random.seed(seed)
    torch.manual_seed(seed)


def _generator_instead_of_the_global_one(seed):
    random.seed(seed)
    _numpy().random.default_rng(seed)
    torch.manual_seed(seed)


def _torch_seed(seed):
    random.seed(seed)
    _numpy().random.seed(seed)
    torch.seed()


def _always_zero(seed):
    random.seed(0)
    _numpy().random.seed(0)
    torch.manual_seed(0)


def _fresh_generator(seed):
    random.seed(seed)
    _numpy().random.seed(seed)
    torch.Generator().manual_seed(seed)


def _rng(mix):
    return seed_everything, lambda seed, epoch, index: _numpy().random.default_rng(mix(seed, epoch, index))


def _seeds_the_global_numpy(seed, epoch, index):
    np = _numpy()
    np.random.seed([seed % 2**32, epoch, index])
    return np.random.default_rng([seed, epoch, index])


def _keyed_by_a_global_draw(seed, epoch, index):
    return _numpy().random.default_rng([seed, epoch, index, random.getrandbits(30)])


_shared = {}


def _one_generator_a_run(seed, epoch, index):
    if (seed, epoch) not in _shared:
        _shared[seed, epoch] = _numpy().random.default_rng([seed, epoch])
    return _shared[seed, epoch]


seeds_torch_alone = (_torch_only, sample_rng)
forgets_numpy = (_without_numpy, sample_rng)
forgets_python_random = (_without_python, sample_rng)
seeds_a_numpy_generator_nobody_uses = (_generator_instead_of_the_global_one, sample_rng)
seeds_a_torch_generator_nobody_uses = (_fresh_generator, sample_rng)
torch_seed_without_a_number = (_torch_seed, sample_rng)
seed_zero_whatever_is_given = (_always_zero, sample_rng)
adds_the_three = _rng(lambda seed, epoch, index: seed + epoch + index)
forgets_the_epoch = _rng(lambda seed, epoch, index: [seed, index])
forgets_the_index = _rng(lambda seed, epoch, index: [seed, epoch])
forgets_the_seed_of_the_run = _rng(lambda seed, epoch, index: [epoch, index])
digits_written_together = _rng(lambda seed, epoch, index: int(f"{seed}{epoch}{index}"))
thousands_for_the_epoch = _rng(lambda seed, epoch, index: seed * 10**6 + epoch * 1000 + index)
multiplies_the_three = _rng(lambda seed, epoch, index: (seed + 1) * (epoch + 1) * (index + 1))
hash_of_text = _rng(lambda seed, epoch, index: hash(f"{seed}/{epoch}/{index}") % 2**64)
fresh_entropy = _rng(lambda seed, epoch, index: None)
also_seeds_the_global_generator = (seed_everything, _seeds_the_global_numpy)
draws_from_the_global_generator = (seed_everything, _keyed_by_a_global_draw)
one_generator_for_all_samples = (seed_everything, _one_generator_a_run)


# --- reproduce.3: the compensated sum ------------------------------------------------------


def plain_sum(x):
    total = torch.zeros_like(x[0])
    for row in x:
        total = total + row
    return total


def torch_sum(x):
    return x.sum(0)


def in_float64(x):
    total = torch.zeros_like(x[0], dtype=torch.float64)
    for row in x:
        total += row
    return total.to(x.dtype)


def float64_compensation(x):
    total, lost = torch.zeros_like(x[0]), torch.zeros_like(x[0], dtype=torch.float64)
    for row in x:
        larger = total + row
        lost += row.double() - (larger.double() - total.double())
        total = larger
    return (total + lost).to(x.dtype)


def always_float32(x):
    return reproduce_sums.kahan(x.float())


def adds_what_it_should_take_off(x):
    total, lost = torch.zeros_like(x[0]), torch.zeros_like(x[0])
    for row in x:
        addend = row + lost
        larger = total + addend
        lost = (larger - total) - addend
        total = larger
    return total


def never_uses_what_was_lost(x):
    total, lost = torch.zeros_like(x[0]), torch.zeros_like(x[0])
    for row in x:
        larger = total + row
        lost = (larger - total) - row
        total = larger
    return total - lost


def simplified_by_algebra(x):
    total, lost = torch.zeros_like(x[0]), torch.zeros_like(x[0])
    for row in x:
        addend = row - lost
        larger = total + addend
        lost = larger - (total + addend)
        total = larger
    return total


def overwrites_the_sum_first(x):
    total, lost = torch.zeros_like(x[0]), torch.zeros_like(x[0])
    for row in x:
        addend = row - lost
        larger = total
        larger += addend
        lost = (larger - total) - addend
        total = larger
    return total


def loss_against_the_row(x):
    total, lost = torch.zeros_like(x[0]), torch.zeros_like(x[0])
    for row in x:
        larger = total + (row - lost)
        lost = (larger - total) - row
        total = larger
    return total


def small_numbers_first(x):
    return plain_sum(x.gather(0, x.abs().argsort(0)))


def as_a_tree(x):
    return reproduce_sums.pairwise(x)


def ten_operations_a_row(x):
    return reproduce_sums.neumaier(x)


def skips_the_last_row(x):
    return reproduce_sums.kahan(x[:-1])


# --- reproduce.4: stale results ------------------------------------------------------------


def _versions(cells):
    return {step.cell.id: step for step in reproduce_cells.replay(cells)}


def edited_cells_alone(history, notebook):
    now = {c.id: c.source for c in notebook}
    return {c.id for c in history if now.get(c.id) != {h.id: h for h in history}[c.id].source}


def every_cell_run_twice(history, notebook):
    ids = [c.id for c in history]
    return {id for id in ids if ids.count(id) > 1} | ({*ids} - {c.id for c in notebook})


def runs_out_of_order(history, notebook):
    place = {c.id: i for i, c in enumerate(notebook)}
    found, highest = {c.id for c in history if c.id not in place}, -1
    for c in history:
        if place.get(c.id, highest) < highest:
            found.add(c.id)
        highest = max(highest, place.get(c.id, highest))
    return found


def one_step_back_only(history, notebook):
    def makers(cells):
        maker, found = {}, {}
        for c in cells:
            found[c.id] = (c.source, sorted((n, maker.get(n)) for n in c.uses))
            maker |= dict.fromkeys(c.defines, c.source)
        return found

    ran, would = makers(history), makers(notebook)
    return {id for id in ran if ran[id] != would.get(id)}


def by_id_in_place_of_source(history, notebook):
    def versions(cells):
        maker, found = {}, {}
        for c in cells:
            found[c.id] = (c.id, tuple(sorted((n, maker[n]) for n in c.uses if n in maker)))
            maker |= dict.fromkeys(c.defines, found[c.id])
        return found

    ran, would = versions(history), versions(notebook)
    return {id for id in ran if ran[id] != would.get(id)}


def number_of_the_run_in_the_version(history, notebook):
    def versions(cells):
        maker, found = {}, {}
        for i, c in enumerate(cells):
            found[c.id] = (i, c.source, tuple(sorted((n, maker[n]) for n in c.uses if n in maker)))
            maker |= dict.fromkeys(c.defines, found[c.id])
        return found

    ran, would = versions(history), versions(notebook)
    return {id for id in ran if ran[id] != would.get(id)}


def first_run_in_place_of_the_last(history, notebook):
    ran = {}
    for step in reproduce_cells.replay(history):
        ran.setdefault(step.cell.id, step.version)
    would = {id: step.version for id, step in _versions(notebook).items()}
    return {id for id in ran if ran[id] != would.get(id)}


def forgets_deleted_cells(history, notebook):
    return reproduce_cells.stale(history, notebook) & {c.id for c in notebook}


def cells_that_never_ran_too(history, notebook):
    ran = {c.id for c in history}
    return reproduce_cells.stale(history, notebook) | {c.id for c in notebook if c.id not in ran}


def names_in_place_of_cells(history, notebook):
    stale = reproduce_cells.stale(history, notebook)
    return {n for c in history if c.id in stale for n in c.defines}


def only_the_last_cell(history, notebook):
    return reproduce_cells.stale(history, notebook) & {history[-1].id}


def looks_names_up_at_the_end(history, notebook):
    def versions(cells):
        maker = {n: c.source for c in cells for n in c.defines}
        return {c.id: (c.source, tuple(sorted((n, maker.get(n)) for n in c.uses))) for c in cells}

    ran, would = versions(history), versions(notebook)
    return {id for id in ran if ran[id] != would.get(id)}


# --- reproduce.5: the Hogwild worker -------------------------------------------------------


def _order(samples, rank, workers, seed, shard=None, generator=None):
    generator = generator or torch.Generator().manual_seed(seed * workers + rank)
    shard = shard if shard is not None else range(rank, len(samples), workers)
    return [shard[i] for i in torch.randperm(len(shard), generator=generator).tolist()]


def _step(weights, features, label, lr):
    gradient = weights[features].sum(0).softmax(0)
    gradient[label] -= 1
    weights.index_add_(0, features, gradient.expand(len(features), -1), alpha=-lr)


def _pass(weights, samples, order, lr, step=_step):
    for i in order:
        step(weights, *samples[i], lr)


def binds_a_new_tensor(weights, samples, rank, workers, seed, lr):
    for i in _order(samples, rank, workers, seed):
        features, label = samples[i]
        gradient = weights[features].sum(0).softmax(0)
        gradient[label] -= 1
        weights = weights.index_add(0, features, gradient.expand(len(features), -1), alpha=-lr)


def works_on_a_copy_and_writes_it_back(weights, samples, rank, workers, seed, lr):
    mine = weights[torch.arange(len(weights))]
    _pass(mine, samples, _order(samples, rank, workers, seed), lr)
    weights.index_copy_(0, torch.arange(len(weights)), mine)


def adds_its_whole_change_at_the_end(weights, samples, rank, workers, seed, lr):
    everything = torch.arange(len(weights))
    mine = weights[everything]
    before = mine[everything]
    _pass(mine, samples, _order(samples, rank, workers, seed), lr)
    weights.index_add_(0, everything, mine[everything].sub_(before))


def dense_gradient(weights, samples, rank, workers, seed, lr):
    def step(weights, features, label, lr):
        gradient = torch.zeros_like(weights)
        p = weights[features].sum(0).softmax(0)
        p[label] -= 1
        gradient[features] = p
        weights -= lr * gradient

    _pass(weights, samples, _order(samples, rank, workers, seed), lr, step)


def every_worker_takes_all(weights, samples, rank, workers, seed, lr):
    _pass(weights, samples, _order(samples, rank, workers, seed, range(len(samples))), lr)


def drops_the_remainder(weights, samples, rank, workers, seed, lr):
    each = len(samples) // workers
    _pass(weights, samples, _order(samples, rank, workers, seed, range(rank, each * workers, workers)), lr)


def draws_with_replacement(weights, samples, rank, workers, seed, lr):
    shard = range(rank, len(samples), workers)
    generator = torch.Generator().manual_seed(seed * workers + rank)
    drawn = torch.randint(len(shard), (len(shard),), generator=generator).tolist()
    _pass(weights, samples, [shard[i] for i in drawn], lr)


def in_ascending_order(weights, samples, rank, workers, seed, lr):
    _pass(weights, samples, range(rank, len(samples), workers), lr)


def the_global_generator(weights, samples, rank, workers, seed, lr):
    shard = range(rank, len(samples), workers)
    _pass(weights, samples, [shard[i] for i in torch.randperm(len(shard)).tolist()], lr)


def seeds_the_global_generator(weights, samples, rank, workers, seed, lr):
    torch.manual_seed(seed * workers + rank)
    shard = range(rank, len(samples), workers)
    _pass(weights, samples, [shard[i] for i in torch.randperm(len(shard)).tolist()], lr)


def one_order_for_all_ranks(weights, samples, rank, workers, seed, lr):
    generator = torch.Generator().manual_seed(seed)
    _pass(weights, samples, _order(samples, rank, workers, seed, generator=generator), lr)


def forgets_the_seed_in_the_order(weights, samples, rank, workers, seed, lr):
    generator = torch.Generator().manual_seed(rank)
    _pass(weights, samples, _order(samples, rank, workers, seed, generator=generator), lr)


def an_order_of_fresh_entropy(weights, samples, rank, workers, seed, lr):
    generator = torch.Generator()
    generator.seed()
    _pass(weights, samples, _order(samples, rank, workers, seed, generator=generator), lr)


def uphill(weights, samples, rank, workers, seed, lr):
    _pass(weights, samples, _order(samples, rank, workers, seed), -lr)


def learning_rate_shared_out(weights, samples, rank, workers, seed, lr):
    _pass(weights, samples, _order(samples, rank, workers, seed), lr / workers)


def gradient_divided_by_the_features(weights, samples, rank, workers, seed, lr):
    def step(weights, features, label, lr):
        _step(weights, features, label, lr / len(features))

    _pass(weights, samples, _order(samples, rank, workers, seed), lr, step)


def pushes_the_label_only(weights, samples, rank, workers, seed, lr):
    def step(weights, features, label, lr):
        p = weights[features].sum(0).softmax(0)
        weights[features, label] -= lr * (p[label] - 1)

    _pass(weights, samples, _order(samples, rank, workers, seed), lr, step)


MUTANTS = {
    "reproduce.1": [
        forgets_the_diff,
        forgets_the_seed,
        forgets_the_versions,
        forgets_the_commit,
        forgets_python,
        only_unstaged_changes,
        clean_when_the_diff_is_empty,
        clean_where_there_is_no_repository,
        empty_diff_where_there_is_no_repository,
        status_in_place_of_the_diff,
        keeps_the_callers_config,
        copies_the_config_one_level_deep,
        config_as_text,
        seed_in_use_instead_of_the_runs_own,
        python_without_the_patch_number,
        torch_alone_among_the_packages,
        versions_of_the_day_it_was_written,
        missing_and_none_are_the_same,
        compares_the_top_level,
        sees_only_the_keys_of_then,
        sees_only_common_keys,
        one_is_true,
        names_without_their_path,
        stops_at_the_first,
    ],
    "reproduce.2": [
        seeds_torch_alone,
        forgets_numpy,
        forgets_python_random,
        seeds_a_numpy_generator_nobody_uses,
        seeds_a_torch_generator_nobody_uses,
        torch_seed_without_a_number,
        seed_zero_whatever_is_given,
        adds_the_three,
        forgets_the_epoch,
        forgets_the_index,
        forgets_the_seed_of_the_run,
        digits_written_together,
        thousands_for_the_epoch,
        multiplies_the_three,
        hash_of_text,
        fresh_entropy,
        also_seeds_the_global_generator,
        draws_from_the_global_generator,
        one_generator_for_all_samples,
    ],
    "reproduce.3": [
        plain_sum,
        torch_sum,
        in_float64,
        float64_compensation,
        always_float32,
        adds_what_it_should_take_off,
        never_uses_what_was_lost,
        simplified_by_algebra,
        overwrites_the_sum_first,
        loss_against_the_row,
        small_numbers_first,
        as_a_tree,
        ten_operations_a_row,
        skips_the_last_row,
    ],
    "reproduce.4": [
        edited_cells_alone,
        every_cell_run_twice,
        runs_out_of_order,
        one_step_back_only,
        by_id_in_place_of_source,
        number_of_the_run_in_the_version,
        first_run_in_place_of_the_last,
        forgets_deleted_cells,
        cells_that_never_ran_too,
        names_in_place_of_cells,
        only_the_last_cell,
        looks_names_up_at_the_end,
    ],
    "reproduce.5": [
        binds_a_new_tensor,
        works_on_a_copy_and_writes_it_back,
        adds_its_whole_change_at_the_end,
        dense_gradient,
        every_worker_takes_all,
        drops_the_remainder,
        draws_with_replacement,
        in_ascending_order,
        the_global_generator,
        seeds_the_global_generator,
        one_order_for_all_ranks,
        forgets_the_seed_in_the_order,
        an_order_of_fresh_entropy,
        uphill,
        learning_rate_shared_out,
        gradient_divided_by_the_features,
        pushes_the_label_only,
    ],
}

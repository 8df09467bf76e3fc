"Answers to the exercises of schedules: the course's, right ones of another style, and wrong ones."

import copy
import itertools
import math
import random
import statistics

import numpy as np
import torch
from torch.nn import functional as F

from course_lib.schedules import solutions

REFERENCE = {number: getattr(solutions, names[0]) for number, names in solutions.EXERCISES.items()}

# --- schedules.1: a schedule in the loop ----------------------------------------------------


def _loop(rate, groups=slice(None), before=True, zero=True):
    "A training loop whose step k has the learning rate `rate(k, steps)`; the rest brings single mistakes in."

    def train(net, opt, batches):
        losses = []
        for k, (x, y) in enumerate(batches):
            loss = F.cross_entropy(net(x), y)
            if zero:
                opt.zero_grad()
            loss.backward()
            if not before:
                opt.step()
            for group in opt.param_groups[groups]:
                group["lr"] = rate(k, len(batches))
            if before:
                opt.step()
            losses.append(loss.item())
        return losses

    return train


def _warm(k, steps, peak=0.09, up=50):
    return peak * min((k + 1) / up, (1 + math.cos(math.pi * max(0, k - up) / (steps - up))) / 2)


def by_schedulers(net, opt, batches):
    "Right: PyTorch's schedulers, and a line down."
    for group in opt.param_groups:
        group["lr"] = group["initial_lr"] = 0.08
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        opt, lambda k: min((k + 1) / 40, 1 - (k - 40) / (len(batches) - 40))
    )
    losses = []
    for x, y in batches:
        opt.zero_grad(set_to_none=False)
        losses.append(torch.nn.CrossEntropyLoss()(net(x), y))
        losses[-1].backward()
        opt.step()
        scheduler.step()
    return torch.stack(losses).tolist()


def by_a_table(net, opt, batches):
    "Right: a list of rates made beforehand, in three stages."
    rates = [*np.geomspace(1e-3, 0.06, 45), *[0.06] * 60, *np.linspace(0.06, 0.003, len(batches) - 105)]
    return _loop(lambda k, steps: float(rates[k]))(net, opt, batches)


constant_and_high = _loop(lambda k, steps: 0.09)
constant_and_low = _loop(lambda k, steps: 0.0079)
sets_the_first_group_only = _loop(_warm, groups=slice(1))
sets_the_rate_after_the_step = _loop(_warm, before=False)
never_zeroes_the_gradients = _loop(_warm, zero=False)


def stays_high(net, opt, batches):
    "Right: a warm-up, and no way down."
    return _loop(lambda k, steps: 0.09 * min(1, (k + 1) / 50))(net, opt, batches)


def gives_the_lowest_loss_so_far(net, opt, batches):
    return list(itertools.accumulate(_loop(_warm)(net, opt, batches), min))


def keeps_tensors(net, opt, batches):
    return [torch.tensor(v) for v in _loop(_warm)(net, opt, batches)]


# --- schedules.2: one cycle -----------------------------------------------------------------


def by_numpy(t, peak, warmup, div, div_final, moms):
    "Right: half cosines as squared sines, in NumPy."
    u = t / warmup if t < warmup else (t - warmup) / (1 - warmup)
    part = np.sin(np.pi * u / 2) ** 2
    rates, moms = np.array([peak / div, peak, peak / div_final]), np.array(moms)
    k = int(t >= warmup)
    return [float(v[k] + (v[k + 1] - v[k]) * part) for v in (rates, moms)]


def by_recursion(t, peak, warmup, div, div_final, moms):
    "Right: the climb is a descent that runs backwards."
    if t < warmup:
        return by_recursion(1 - t / warmup, peak, 0.0, div, div, (moms[2], moms[1], moms[0]))
    down = (1 + math.cos(math.pi * (t - warmup) / (1 - warmup))) / 2
    return peak / div_final + (peak - peak / div_final) * down, moms[2] + (moms[1] - moms[2]) * down


def raises_momentum_with_the_rate(t, peak, warmup, div, div_final, moms):
    return solutions.one_cycle(t, peak, warmup, div, div_final, (moms[1], moms[0], moms[1]))


def divides_the_first_rate_at_the_end(t, peak, warmup, div, div_final, moms):
    return solutions.one_cycle(t, peak, warmup, div, div * div_final, moms)


def climbs_in_a_line(t, peak, warmup, div, div_final, moms):
    if t >= warmup:
        return solutions.one_cycle(t, peak, warmup, div, div_final, moms)
    u = t / warmup
    return peak / div + (peak - peak / div) * u, moms[0] + (moms[1] - moms[0]) * u


def forgets_the_third_momentum(t, peak, warmup, div, div_final, moms):
    return solutions.one_cycle(t, peak, warmup, div, div_final, (moms[0], moms[1], moms[0]))


def knows_its_own_divisors(t, peak, warmup, div, div_final, moms):
    return solutions.one_cycle(t, peak, warmup, 25, 1e5, moms)


def stays_at_the_peak_without_a_warmup(t, peak, warmup, div, div_final, moms):
    return solutions.one_cycle(t, peak, warmup, div, div_final, moms) if warmup else (peak, moms[1])


def lowest_momentum_in_the_middle(t, peak, warmup, div, div_final, moms):
    return solutions.one_cycle(t, peak, warmup, div, div_final, (moms[0], min(moms), moms[2]))


def never_below_the_last_rate(t, peak, warmup, div, div_final, moms):
    lr, momentum = solutions.one_cycle(t, peak, warmup, div, div_final, moms)
    return max(lr, peak / div_final), momentum


def by_interpolation(t, peak, warmup, div, div_final, moms):
    "Right: the place among three points, then weights from a cosine for both series."
    place = np.interp(t, [0, warmup, 1], [0, 1, 2]) if warmup else 1 + t
    k = min(int(place), 1)
    weight = (1 + np.cos(np.pi * (place - k))) / 2
    points = np.array([[peak / div, peak, peak / div_final], moms])
    return (weight * points[:, k] + (1 - weight) * points[:, k + 1]).tolist()


# --- schedules.3: a range test that restores everything -------------------------------------


def _test(restore=(), stop=4, nan=True, indexed=False, cycle=False, train=True, held=False):
    "A range test that puts back all state but what is in `restore`; the rest brings single mistakes in."

    def range_test(model, opt, loss_fn, batches, low, high, steps):
        kept = {id(t): t.detach().clone() for t in [*model.parameters(), *model.buffers()]}
        state, grads = copy.deepcopy(opt.state_dict()), [p.grad for p in model.parameters()]
        grads = [None if g is None else g.clone() for g in grads]
        if held:
            grads = [p.grad for p in model.parameters()]
        modes, python, cpu = [m.training for m in model.modules()], random.getstate(), torch.get_rng_state()
        if train:
            model.train()
        lrs, losses, smooth = [], [], []
        supply = itertools.cycle(batches) if cycle else (b for _ in range(steps) for b in batches)
        if indexed:
            supply = (batches[k % len(batches)] for k in range(steps))
        for k, (x, y) in zip(range(steps), supply, strict=False):
            lrs.append(low ** (1 - k / (steps - 1)) * high ** (k / (steps - 1)))
            for group in opt.param_groups:
                group["lr"] = lrs[-1]
            opt.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
            opt.step()
            losses.append(loss.item())
            weights = [0.98**i for i in range(k, -1, -1)]
            smooth.append(sum(a * b for a, b in zip(weights, losses, strict=True)) / sum(weights))
            if smooth[-1] > stop * min(smooth) or (nan and math.isnan(smooth[-1])):
                break
        for t in [*model.parameters(), *([] if "statistics" in restore else model.buffers())]:
            t.data.copy_(kept[id(t)])
        if "averages" not in restore:
            opt.load_state_dict(state)
        for group, old in zip(opt.param_groups, state["param_groups"], strict=True):
            group["lr"] = old["lr"]
        for p, grad in zip(model.parameters(), grads, strict=True):
            p.grad = None if "grads" in restore else grad
        for m, mode in zip(model.modules(), modes, strict=True):
            m.training = modes[0] if "modes" in restore else mode
        random.setstate(python)
        if "torch" not in restore:
            torch.set_rng_state(cpu)
        finite = [(s, lr) for s, lr in zip(smooth, lrs, strict=True) if s == s]
        return min(finite)[1] / 10, lrs, losses

    return range_test


def on_a_copy(model, opt, loss_fn, batches, low, high, steps):
    "Right: a copy is trained, so only the random states have to be put back."
    states = random.getstate(), torch.get_rng_state()
    answer = _test()(*copy.deepcopy((model, opt)), loss_fn, batches, low, high, steps)
    random.setstate(states[0])
    torch.set_rng_state(states[1])
    return answer


in_place = _test()  # right: tensors copied one by one
forgets_batch_norm = _test({"statistics"})
forgets_the_averages = _test({"averages"})
forgets_the_gradients = _test({"grads"})
restores_one_mode = _test({"modes"})
keeps_the_gradients_own_memory = _test(held=True)
forgets_torchs_numbers = _test({"torch"})
goes_on_at_nan = _test(nan=False)
stops_at_twice = _test(stop=2)
indexes_the_batches = _test(indexed=True)
keeps_the_first_pass = _test(cycle=True)
tests_in_eval_mode = _test(train=False)

# --- schedules.4: sharpness -----------------------------------------------------------------


def _product(loss, params):
    grads = torch.autograd.grad(loss, params, create_graph=True)
    flat = torch.cat([g.flatten() for g in grads])

    def product(v):
        return torch.cat([h.flatten() for h in torch.autograd.grad(flat, params, v, retain_graph=True)])

    return product, flat.detach()


def _power(product, v, iterations, shift=0.0):
    for _ in range(iterations):
        v = v / v.norm()
        hv = product(v) - shift * v
        value, v = (v @ hv).item(), hv
    return value


def _answer(start=torch.randn_like, second=True, size=False):
    def top_eigenvalue(loss, params, n):
        product, flat = _product(loss, params)
        value = _power(product, start(flat), n)
        if size:
            return abs(value)
        if value >= 0 or not second:
            return value
        return value + _power(product, start(flat), n, value)

    return top_eigenvalue


def always_shifts(loss, params, iterations):
    "Right: shifts by the size of the first eigenvalue, whatever its sign."
    product, flat = _product(loss, params)
    bound = abs(_power(product, torch.randn_like(flat), iterations))
    return _power(product, torch.randn_like(flat), iterations, -bound) - bound


def by_lanczos(loss, params, iterations):
    "Right: the largest eigenvalue of the small matrix that Lanczos makes from 40 products, or fewer."
    product, flat = _product(loss, params)
    basis = torch.zeros(len(flat), 0, dtype=flat.dtype)
    v = torch.randn_like(flat)
    for _ in range(min(iterations, 40)):
        v = v - basis @ (basis.T @ v)
        v = v - basis @ (basis.T @ v)
        if v.norm() < 1e-8:
            break
        basis = torch.cat([basis, (v / v.norm())[:, None]], 1)
        v = product(basis[:, -1])
    small = basis.T @ torch.stack([product(b) for b in basis.T], 1)
    return torch.linalg.eigvalsh((small + small.T) / 2)[-1]


def builds_the_matrix(loss, params, iterations):
    product, flat = _product(loss, params)
    eye = torch.eye(len(flat), dtype=flat.dtype)
    return torch.linalg.eigvalsh(torch.stack([product(row) for row in eye]))[-1].item()


def a_hundred_products(loss, params, iterations):
    return solutions.top_eigenvalue(loss, params, 100)


def shifts_by_ten(loss, params, iterations):
    product, flat = _product(loss, params)
    return _power(product, torch.randn_like(flat), iterations, -10.0) - 10.0


def stops_where_it_settles(loss, params, iterations):
    "Right: fewer products where more change nothing."
    product, flat = _product(loss, params)
    shift = 0.0
    while True:
        v, value = torch.rand_like(flat) - 0.5, math.inf
        for _ in range(iterations):
            v, old = v / v.norm(), value
            hv = product(v) - shift * v
            value, v = (v @ hv).item(), hv
            if math.isclose(value, old, rel_tol=1e-9):
                break
        if value >= 0 or shift:
            return value + shift
        shift = value


def leaves_gradients_behind(loss, params, iterations):
    value = solutions.top_eigenvalue(loss, params, iterations)
    loss.backward(retain_graph=True)
    return value


starts_from_a_ramp = _answer(start=lambda flat: torch.arange(1.0, len(flat) + 1, dtype=flat.dtype))
gives_the_largest_in_size = _answer(second=False)
takes_its_size = _answer(size=True)

# --- schedules.5: a paired comparison -------------------------------------------------------


def _windows(curve, target, hold):
    return [
        s
        for k, (s, _) in enumerate(curve[: max(0, len(curve) - hold + 1)])
        if all(v >= target for _, v in curve[k : k + hold])
    ]


def _compare(
    reached=lambda *a: (_windows(*a) or [None])[0],
    middle=statistics.median,
    seeds=lambda a, b: set(a) & set(b),
    there=lambda s: s is not None,
):
    def compare(slow, fast, target, hold):
        ratios, never = {}, [0, 0]
        for seed in seeds(slow, fast):
            steps = [reached(side[seed], target, hold) if seed in side else None for side in (slow, fast)]
            if all(map(there, steps)):
                ratios[seed] = steps[0] / steps[1]
            never = [n + (not there(s)) for n, s in zip(never, steps, strict=True)]
        return middle(ratios.values()) if ratios else None, ratios, never

    return compare


def by_groups(slow, fast, target, hold):
    "Right: runs of evaluations at the target by itertools.groupby, the median by NumPy."

    def first(curve):
        for over, group in itertools.groupby(curve, lambda row: row[1] >= target):
            rows = list(group)
            if over and len(rows) >= hold:
                return float(rows[0][0])
        return math.nan

    pairs = {s: (first(slow[s]), first(fast[s])) for s in slow.keys() & fast.keys()}
    ratios = {s: a / b for s, (a, b) in pairs.items() if a == a and b == b}
    never = [sum(math.isnan(pair[k]) for pair in pairs.values()) for k in (0, 1)]
    return float(np.median(list(ratios.values()))) if ratios else None, ratios, never


by_windows = _compare()  # right: the first window of `hold` evaluations
stops_at_the_first_touch = _compare(
    lambda curve, target, hold: next((s for s, v in curve if v >= target), None)
)
takes_step_0_for_never = _compare(there=bool)
takes_the_mean = _compare(middle=statistics.mean)
counts_seeds_of_one_side = _compare(seeds=lambda a, b: set(a) | set(b))


def pairs_by_order(slow, fast, target, hold):
    seeds = [s for s in slow if s in fast]
    renamed = dict(zip(seeds, (fast[s] for s in fast if s in slow), strict=True))
    return solutions.compare({s: slow[s] for s in seeds}, renamed, target, hold)


def divides_the_medians(slow, fast, target, hold):
    _, ratios, never = solutions.compare(slow, fast, target, hold)
    steps = [[(_windows(side[s], target, hold))[0] for s in ratios] for side in (slow, fast)]
    return statistics.median(steps[0]) / statistics.median(steps[1]) if ratios else None, ratios, never


def counts_never_as_the_last_step(slow, fast, target, hold):
    return _compare(lambda curve, *a: (_windows(curve, *a) or [curve[-1][0]])[0])(slow, fast, target, hold)


for _name, _answer_ in list(globals().items()):
    if getattr(_answer_, "__name__", "") in ("train", "range_test", "top_eigenvalue", "compare"):
        _answer_.__name__ = _answer_.__qualname__ = _name  # made by another function, named after its mistake

RIGHT = {
    "schedules.1": [by_schedulers, by_a_table, stays_high],
    "schedules.2": [by_numpy, by_recursion, by_interpolation],
    "schedules.3": [on_a_copy, in_place],
    "schedules.4": [always_shifts, by_lanczos, stops_where_it_settles],
    "schedules.5": [by_groups, by_windows],
}

MUTANTS = {
    "schedules.1": [
        constant_and_high, constant_and_low, sets_the_first_group_only,
        sets_the_rate_after_the_step, never_zeroes_the_gradients, keeps_tensors, gives_the_lowest_loss_so_far,
    ],
    "schedules.2": [
        raises_momentum_with_the_rate, divides_the_first_rate_at_the_end, climbs_in_a_line,
        forgets_the_third_momentum, knows_its_own_divisors,
        stays_at_the_peak_without_a_warmup, lowest_momentum_in_the_middle, never_below_the_last_rate,
    ],
    "schedules.3": [
        forgets_batch_norm, forgets_the_averages, forgets_the_gradients, restores_one_mode,
        forgets_torchs_numbers, goes_on_at_nan, stops_at_twice, indexes_the_batches,
        keeps_the_first_pass, tests_in_eval_mode, keeps_the_gradients_own_memory,
    ],
    "schedules.4": [
        starts_from_a_ramp, gives_the_largest_in_size, takes_its_size, builds_the_matrix,
        leaves_gradients_behind, a_hundred_products, shifts_by_ten,
    ],
    "schedules.5": [
        stops_at_the_first_touch, takes_step_0_for_never, takes_the_mean, counts_seeds_of_one_side,
        pairs_by_order, divides_the_medians, counts_never_as_the_last_step,
    ],
}  # fmt: skip

"Plausible wrong answers to lesson schedules, each named after its mistake."

import copy
import math
import random
import statistics

import torch

from course_lib import schedules
from course_lib.schedules import sharpness as schedules_sharpness

# schedules.1


def _cosine(a, b, u):
    return b + (a - b) * (1 + math.cos(math.pi * u)) / 2


def never_warms_up(t, peak, warmup, start, end):
    return _cosine(peak, end, t)


def warms_up_from_zero(t, peak, warmup, start, end):
    return t / warmup * peak if t < warmup else schedules.warmup_cosine(t, peak, warmup, start, end)


def anneals_to_zero(t, peak, warmup, start, end):
    return schedules.warmup_cosine(t, peak, warmup, start, 0.0)


def counts_the_warmup_in_the_cosine(t, peak, warmup, start, end):
    return start + (peak - start) * t / warmup if t < warmup else _cosine(peak, end, t)


def multiplies_warmup_and_cosine(t, peak, warmup, start, end):
    up = min(1.0, t / warmup) if warmup else 1.0
    return (start + (peak - start) * up) * _cosine(1.0, end / peak, t)


def forgets_the_half(t, peak, warmup, start, end):
    if t < warmup:
        return start + (peak - start) * t / warmup
    return end + (peak - end) * (1 + math.cos(math.pi * (t - warmup) / max(1 - warmup, 1e-9)))


def goes_a_whole_wave(t, peak, warmup, start, end):
    if t < warmup:
        return start + (peak - start) * t / warmup
    return _cosine(peak, end, 2 * (t - warmup) / max(1 - warmup, 1e-9))


def takes_a_quarter_wave(t, peak, warmup, start, end):
    if t < warmup:
        return start + (peak - start) * t / warmup
    return end + (peak - end) * math.cos(math.pi / 2 * (t - warmup) / max(1 - warmup, 1e-9))


def anneals_in_a_line(t, peak, warmup, start, end):
    if t < warmup:
        return start + (peak - start) * t / warmup
    return peak + (end - peak) * (t - warmup) / max(1 - warmup, 1e-9)


def warms_up_along_a_cosine(t, peak, warmup, start, end):
    if t < warmup:
        return _cosine(start, peak, t / warmup)
    return schedules.warmup_cosine(t, peak, warmup, start, end)


def adds_the_start(t, peak, warmup, start, end):
    if t < warmup:
        return start + peak * t / warmup
    return schedules.warmup_cosine(t, peak, warmup, start, end)


def adds_the_end(t, peak, warmup, start, end):
    if t < warmup:
        return start + (peak - start) * t / warmup
    return end + _cosine(peak, 0.0, (t - warmup) / max(1 - warmup, 1e-9))


def works_in_degrees(t, peak, warmup, start, end):
    if t < warmup:
        return start + (peak - start) * t / warmup
    return end + (peak - end) * (1 + math.cos(180 * (t - warmup) / max(1 - warmup, 1e-9))) / 2


def divides_by_a_warmup_of_zero(t, peak, warmup, start, end):
    u = t / warmup
    return start + (peak - start) * u if u < 1 else _cosine(peak, end, (t - warmup) / (1 - warmup))


def gives_a_factor(t, peak, warmup, start, end):
    return schedules.warmup_cosine(t, peak, warmup, start, end) / peak


def keeps_the_end_of_the_warmup_apart(t, peak, warmup, start, end):
    return schedules.warmup_cosine(t, peak, warmup, start, end) if t != warmup else start


# schedules.2


def keeps_momentum_still(t, peak, warmup, div, div_final, moms):
    return schedules.one_cycle(t, peak, warmup, div, div_final)[0], moms[0]


def raises_momentum_with_the_rate(t, peak, warmup, div, div_final, moms):
    return schedules.one_cycle(t, peak, warmup, div, div_final, (moms[1], moms[0], moms[1]))


def forgets_the_third_momentum(t, peak, warmup, div, div_final, moms):
    return schedules.one_cycle(t, peak, warmup, div, div_final, (moms[0], moms[1], moms[0]))


def never_returns_the_momentum(t, peak, warmup, div, div_final, moms):
    return schedules.one_cycle(t, peak, warmup, div, div_final, (moms[0], moms[1], moms[1]))


def divides_the_first_rate_at_the_end(t, peak, warmup, div, div_final, moms):
    return schedules.one_cycle(t, peak, warmup, div, div * div_final, moms)


def ends_where_it_began(t, peak, warmup, div, div_final, moms):
    return schedules.one_cycle(t, peak, warmup, div, div, moms)


def ends_at_zero(t, peak, warmup, div, div_final, moms):
    return schedules.one_cycle(t, peak, warmup, div, math.inf, moms)


def begins_at_zero(t, peak, warmup, div, div_final, moms):
    return schedules.one_cycle(t, peak, warmup, math.inf, div_final, moms)


def peaks_in_the_middle(t, peak, warmup, div, div_final, moms):
    return schedules.one_cycle(t, peak, 0.5, div, div_final, moms)


def climbs_in_a_line(t, peak, warmup, div, div_final, moms):
    if t >= warmup:
        return schedules.one_cycle(t, peak, warmup, div, div_final, moms)
    u = t / warmup
    return peak / div + (peak - peak / div) * u, moms[0] + (moms[1] - moms[0]) * u


def moves_momentum_in_a_line(t, peak, warmup, div, div_final, moms):
    lr, _ = schedules.one_cycle(t, peak, warmup, div, div_final, moms)
    u = t / warmup if t < warmup else (t - warmup) / (1 - warmup)
    a, b = moms[:2] if t < warmup else moms[1:]
    return lr, a + (b - a) * u


def never_anneals(t, peak, warmup, div, div_final, moms):
    return schedules.one_cycle(min(t, warmup), peak, warmup, div, div_final, moms)


def has_three_phases(t, peak, warmup, div, div_final, moms):
    "Torch's three_phase=True: down to the first rate by 2 * warmup, then to the last."
    low = peak / div
    if t < warmup:
        return _cosine(low, peak, t / warmup), _cosine(*moms[:2], t / warmup)
    if t < 2 * warmup:
        return _cosine(peak, low, t / warmup - 1), _cosine(*moms[1:], t / warmup - 1)
    return _cosine(low, peak / div_final, (t - 2 * warmup) / max(1 - 2 * warmup, 1e-9)), moms[2]


def swaps_the_two(t, peak, warmup, div, div_final, moms):
    return schedules.one_cycle(t, peak, warmup, div, div_final, moms)[::-1]


def counts_the_climb_in_the_descent(t, peak, warmup, div, div_final, moms):
    if t < warmup:
        return schedules.one_cycle(t, peak, warmup, div, div_final, moms)
    return _cosine(peak, peak / div_final, t), _cosine(moms[1], moms[2], t)


def knows_its_own_divisors(t, peak, warmup, div, div_final, moms):
    return schedules.one_cycle(t, peak, warmup, moms=moms)


# schedules.3


def _sweep(
    model, opt, loss_fn, batches, low, high, steps, last=True, stop=4.0, beta=0.98, correct=True, **how
):
    "A range test that restores nothing; `how` brings single mistakes in."
    model.train()
    lrs, losses, smooth, average = [], [], [], 0.0
    supply = [b for _ in range(steps) for b in batches][:steps]
    if how.get("one_batch"):
        supply = [supply[0]] * steps
    if how.get("one_pass"):
        supply = supply[: len(list(batches))]
    for k, (x, y) in enumerate(supply):
        part = k / (steps - last)
        lr = low + (high - low) * part if how.get("linear") else low * (high / low) ** part
        for group in opt.param_groups[:1] if how.get("first_group") else opt.param_groups:
            group["lr"] = lr
        loss = loss_fn(model(x), y)
        if not how.get("adds_gradients"):
            opt.zero_grad()
        loss.backward()
        opt.step()
        if how.get("loss_after"):
            with torch.no_grad():
                loss = loss_fn(model(x), y)
        average = beta * average + (1 - beta) * loss.item()
        lrs.append(lr)
        losses.append(loss.item())
        smooth.append(average / (1 - beta ** (k + 1)) if correct else average)
        over = losses[-1] / min(losses) if how.get("stop_raw") else smooth[-1] / min(smooth)
        if not over <= stop:
            break
    if how.get("losses") == "smooth":
        losses = smooth
    return lrs, losses, smooth


def _lowest(lrs, smooth):
    return lrs[min(range(len(lrs)), key=lambda k: smooth[k] if math.isfinite(smooth[k]) else math.inf)]


def _test(pick=lambda lrs, losses, smooth: _lowest(lrs, smooth) / 10, **how):
    def test(model, opt, *rest):
        with schedules.kept(model, opt):
            lrs, losses, smooth = _sweep(model, opt, *rest, **how)
        return pick(lrs, losses, smooth), lrs, losses

    return test


picks_the_lowest = _test(lambda lrs, losses, smooth: _lowest(lrs, smooth))
picks_by_the_raw_loss = _test(lambda lrs, losses, smooth: _lowest(lrs, losses) / 10)
picks_the_last = _test(lambda lrs, losses, smooth: lrs[-1] / 10)
picks_the_middle = _test(lambda lrs, losses, smooth: (lrs[0] * lrs[-1]) ** 0.5)
grows_in_a_line = _test(linear=True)
stops_short_of_the_end = _test(last=False)
never_stops = _test(stop=math.inf)
stops_at_twice = _test(stop=2.0)
stops_by_the_raw_loss = _test(stop_raw=True)
forgets_the_correction = _test(correct=False)
smooths_too_little = _test(beta=0.5)
gives_the_smoothed_losses = _test(losses="smooth")
measures_after_the_step = _test(loss_after=True)
uses_one_batch = _test(one_batch=True)
stops_when_the_batches_end = _test(one_pass=True)
never_zeroes = _test(adds_gradients=True)


def _leaving(restore):
    "A right range test that ends with `restore(model, opt, saved)`; a careful one uses all that is saved."

    def test(model, opt, *rest):
        saved = {
            "model": copy.deepcopy(model.state_dict()),
            "opt": copy.deepcopy(opt.state_dict()),
            "modes": [m.training for m in model.modules()],
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "shallow": (model.state_dict(), opt.state_dict()),
            "weights": [p.detach().clone() for p in model.parameters()],
        }
        lrs, losses, smooth = _sweep(model, opt, *rest)
        restore(model, opt, saved)
        return _lowest(lrs, smooth) / 10, lrs, losses

    return test


def _put_back(model, opt, saved, *without):
    if "model" not in without:
        model.load_state_dict(saved["model"])
    if "opt" not in without:
        opt.load_state_dict(saved["opt"])
    if "modes" not in without:
        for m, mode in zip(model.modules(), saved["modes"], strict=True):
            m.training = mode
    if "torch" not in without:
        torch.set_rng_state(saved["torch"])
    if "python" not in without:
        random.setstate(saved["python"])


def _weights_only(model, opt, saved):
    with torch.no_grad():
        for p, old in zip(model.parameters(), saved["weights"], strict=True):
            p.copy_(old)
    _put_back(model, opt, saved, "model")


def _shallow(model, opt, saved):
    _put_back(model, opt, saved, "model")
    model.load_state_dict(saved["shallow"][0])


def _shallow_opt(model, opt, saved):
    _put_back(model, opt, saved, "opt")
    opt.load_state_dict(saved["shallow"][1])


def _lr_only(model, opt, saved):
    _put_back(model, opt, saved, "opt")
    for group, old in zip(opt.param_groups, saved["opt"]["param_groups"], strict=True):
        group["lr"] = old["lr"]


def _one_lr(model, opt, saved):
    _put_back(model, opt, saved)
    for group in opt.param_groups:
        group["lr"] = saved["opt"]["param_groups"][0]["lr"]


def _clears_the_optimiser(model, opt, saved):
    _put_back(model, opt, saved)
    opt.state.clear()


def _leaves_train(model, opt, saved):
    _put_back(model, opt, saved, "modes")
    model.train()


def _one_mode(model, opt, saved):
    _put_back(model, opt, saved, "modes")
    model.train(saved["modes"][0])


restores_nothing = _leaving(lambda model, opt, saved: None)
restores_the_model_only = _leaving(lambda m, o, s: _put_back(m, o, s, "opt", "torch", "python"))
forgets_batch_norm = _leaving(_weights_only)
keeps_references_to_the_weights = _leaving(_shallow)
keeps_references_to_the_optimiser = _leaving(_shallow_opt)
restores_the_rate_only = _leaving(_lr_only)
gives_all_groups_one_rate = _leaving(_one_lr)
clears_the_optimiser = _leaving(_clears_the_optimiser)
forgets_torchs_generator = _leaving(lambda m, o, s: _put_back(m, o, s, "torch"))
forgets_pythons_generator = _leaving(lambda m, o, s: _put_back(m, o, s, "python"))
leaves_train_mode = _leaving(_leaves_train)
restores_one_mode = _leaving(_one_mode)


def seeds_anew(model, opt, *rest):
    out = schedules.range_test(model, opt, *rest)[:3]
    torch.manual_seed(0)
    return out


def _reference_range_test(model, opt, loss_fn, batches, low, high, steps):
    return schedules.range_test(model, opt, loss_fn, batches, low, high, steps)[:3]


# schedules.4


def _grads(loss, params):
    return torch.autograd.grad(loss, params, create_graph=True)


def _product(grads, params, v):
    return torch.autograd.grad(grads, params, v, retain_graph=True)


def _dot(a, b):
    return sum((x * y).sum() for x, y in zip(a, b, strict=True)).item()


def _power(grads, params, iterations, start, shift=0.0):
    v, value = start, 0.0
    for _ in range(iterations):
        norm = _dot(v, v) ** 0.5
        v = [a / norm for a in v]
        hv = [h - shift * a for h, a in zip(_product(grads, params, v), v, strict=True)]
        value, v = _dot(v, hv), hv
    return value


def _random(params):
    return [torch.randn_like(p) for p in params]


def gives_the_largest_in_size(loss, params, iterations):
    return _power(_grads(loss, params), params, iterations, _random(params))


def takes_its_size(loss, params, iterations):
    return abs(gives_the_largest_in_size(loss, params, iterations))


def gives_zero_for_a_negative_one(loss, params, iterations):
    return max(0.0, gives_the_largest_in_size(loss, params, iterations))


def forgets_to_shift_back(loss, params, iterations):
    grads = _grads(loss, params)
    value = _power(grads, params, iterations, _random(params))
    return value if value >= 0 else _power(grads, params, iterations, _random(params), value)


def shifts_the_wrong_way(loss, params, iterations):
    grads = _grads(loss, params)
    value = _power(grads, params, iterations, _random(params))
    return value if value >= 0 else _power(grads, params, iterations, _random(params), -value) - value


def starts_from_ones(loss, params, iterations):
    grads, ones = _grads(loss, params), [torch.ones_like(p) for p in params]
    value = _power(grads, params, iterations, ones)
    return value if value >= 0 else value + _power(grads, params, iterations, ones, value)


def never_normalises(loss, params, iterations):
    grads, v = _grads(loss, params), _random(params)
    for _ in range(iterations):
        before, v = v, _product(grads, params, v)
    return _dot(before, v) / _dot(before, before)


def divides_by_one_norm_each(loss, params, iterations):
    grads, v = _grads(loss, params), _random(params)
    for _ in range(iterations):
        v = [a / a.norm() for a in v]
        hv = _product(grads, params, v)
        value, v = _dot(v, hv), hv
    return value


def looks_at_the_first_tensor(loss, params, iterations):
    return schedules_sharpness.top_eigenvalue(loss, params[:1], iterations)


def takes_each_tensor_apart(loss, params, iterations):
    return max(schedules_sharpness.top_eigenvalue(loss, [p], iterations) for p in params)


def stops_after_three(loss, params, iterations):
    return schedules_sharpness.top_eigenvalue(loss, params, 3)


def starts_from_the_gradient(loss, params, iterations):
    grads = _grads(loss, params)
    return _power(grads, params, 2, [g.detach() for g in grads])


def squares_the_gradient(loss, params, iterations):
    grads = _grads(loss, params)
    return _dot(grads, grads)


def builds_the_matrix(loss, params, iterations):
    grads, rows = _grads(loss, params), []
    for k, p in enumerate(params):
        for i in range(p.numel()):
            unit = [torch.zeros_like(q) for q in params]
            unit[k].view(-1)[i] = 1
            rows.append(torch.cat([h.flatten() for h in _product(grads, params, unit)]))
    return torch.linalg.eigvalsh(torch.stack(rows))[-1].item()


def takes_the_trace(loss, params, iterations):
    grads, total = _grads(loss, params), 0.0
    for _ in range(iterations):
        v = [a.sign() for a in _random(params)]
        total += _dot(v, _product(grads, params, v)) / iterations
    return total


def leaves_gradients_behind(loss, params, iterations):
    value = schedules_sharpness.top_eigenvalue(loss, params, iterations)
    loss.backward(retain_graph=True)
    return value


def gives_the_stable_rate(loss, params, iterations):
    return 2 / schedules_sharpness.top_eigenvalue(loss, params, iterations)


def gives_the_norm_of_the_product(loss, params, iterations):
    grads, v = _grads(loss, params), _random(params)
    for _ in range(iterations):
        norm = _dot(v, v) ** 0.5
        v = [a / norm for a in v]
        v = _product(grads, params, v)
    return _dot(v, v) ** 0.5


# schedules.5


def _answer(reached, middle=schedules.median):
    def steps_to_target(curves, target, hold):
        each = [reached(c, target, hold) for c in curves]
        return each, middle(each)

    return steps_to_target


def _right(curve, target, hold):
    return schedules.steps_to_target([curve], target, hold)[0][0]


def _windows(curve, target, hold, ok=lambda v, target: v >= target):
    return [k for k in range(len(curve) - hold + 1) if all(ok(v, target) for _, v in curve[k : k + hold])]


def _first(curve, target, hold):
    return next((s for s, v in curve if v >= target), None)


def _window_end(curve, target, hold):
    at = _windows(curve, target, hold)
    return curve[at[0] + hold - 1][0] if at else None


def _strictly(curve, target, hold):
    at = _windows(curve, target, hold, lambda v, t: v > t)
    return curve[at[0]][0] if at else None


def _nan_passes(curve, target, hold):
    at = _windows(curve, target, hold, lambda v, t: not v < t)
    return curve[at[0]][0] if at else None


def _counts_any(curve, target, hold):
    over = [s for s, v in curve if v >= target]
    return over[0] if len(over) >= hold else None


def _to_the_end(curve, target, hold):
    at = [k for k in _windows(curve, target, hold) if all(v >= target for _, v in curve[k:])]
    return curve[at[0]][0] if at else None


def _last_window(curve, target, hold):
    at = _windows(curve, target, hold)
    return curve[at[-1]][0] if at else None


def _short_ends(curve, target, hold):
    at = [k for k in range(len(curve)) if all(v >= target for _, v in curve[k : k + hold])]
    return curve[at[0]][0] if at else None


def _index(curve, target, hold):
    at = _windows(curve, target, hold)
    return at[0] if at else None


def _mean_of_window(curve, target, hold):
    at = [k for k in range(len(curve) - hold + 1) if sum(v for _, v in curve[k : k + hold]) / hold >= target]
    return curve[at[0]][0] if at else None


def _last_step_if_never(curve, target, hold):
    return _right(curve, target, hold) or curve[-1][0]


def _one_too_many(curve, target, hold):
    return _right(curve, target, hold + 1)


stops_at_the_first_touch = _answer(_first)
gives_the_end_of_the_window = _answer(_window_end)
wants_more_than_the_target = _answer(_strictly)
lets_nan_pass = _answer(_nan_passes)
counts_touches_anywhere = _answer(_counts_any)
wants_it_held_to_the_end = _answer(_to_the_end)
gives_the_last_window = _answer(_last_window)
accepts_a_run_cut_short = _answer(_short_ends)
gives_an_index = _answer(_index)
averages_the_window = _answer(_mean_of_window)
takes_the_last_step_of_a_run_that_never_arrives = _answer(_last_step_if_never)
holds_one_too_many = _answer(_one_too_many)
drops_runs_that_never_arrive = _answer(
    _right, lambda each: statistics.median([s for s in each if s is not None] or [math.nan])
)
takes_never_for_zero = _answer(_right, lambda each: statistics.median([s or 0 for s in each]))
gives_infinity = _answer(
    lambda *a: math.inf if _right(*a) is None else _right(*a), lambda each: statistics.median(each)
)
takes_the_mean = _answer(_right, lambda each: None if None in each else statistics.mean(each))
refuses_any_that_never_arrives = _answer(
    _right, lambda each: None if None in each else statistics.median(each)
)


def _lower(each):
    value = statistics.median_low([math.inf if s is None else s for s in each])
    return None if math.isinf(value) else value


takes_the_lower_middle = _answer(_right, _lower)
takes_the_best_run = _answer(_right, lambda each: min((s for s in each if s is not None), default=None))

for _name, _mutant in list(globals().items()):
    if getattr(_mutant, "__name__", "") in ("test", "steps_to_target"):
        _mutant.__name__ = _mutant.__qualname__ = _name  # made by another function, named after its mistake


REFERENCE = {
    "schedules.1": schedules.warmup_cosine,
    "schedules.2": schedules.one_cycle,
    "schedules.3": _reference_range_test,
    "schedules.4": schedules_sharpness.top_eigenvalue,
    "schedules.5": schedules.steps_to_target,
}

MUTANTS = {
    "schedules.1": [
        never_warms_up, warms_up_from_zero, anneals_to_zero, counts_the_warmup_in_the_cosine,
        multiplies_warmup_and_cosine, forgets_the_half, goes_a_whole_wave, takes_a_quarter_wave,
        anneals_in_a_line, warms_up_along_a_cosine, adds_the_start, adds_the_end, works_in_degrees,
        divides_by_a_warmup_of_zero, gives_a_factor, keeps_the_end_of_the_warmup_apart,
    ],
    "schedules.2": [
        keeps_momentum_still, raises_momentum_with_the_rate, forgets_the_third_momentum,
        never_returns_the_momentum, divides_the_first_rate_at_the_end, ends_where_it_began, ends_at_zero,
        begins_at_zero, peaks_in_the_middle, climbs_in_a_line, moves_momentum_in_a_line, never_anneals,
        has_three_phases, swaps_the_two, counts_the_climb_in_the_descent, knows_its_own_divisors,
    ],
    "schedules.3": [
        picks_the_lowest, picks_by_the_raw_loss, picks_the_last, picks_the_middle, grows_in_a_line,
        stops_short_of_the_end, never_stops, stops_at_twice, stops_by_the_raw_loss, forgets_the_correction,
        smooths_too_little, gives_the_smoothed_losses, measures_after_the_step, uses_one_batch,
        stops_when_the_batches_end, never_zeroes, restores_nothing, restores_the_model_only,
        forgets_batch_norm, keeps_references_to_the_weights, keeps_references_to_the_optimiser,
        restores_the_rate_only, gives_all_groups_one_rate, clears_the_optimiser, forgets_torchs_generator,
        forgets_pythons_generator, leaves_train_mode, restores_one_mode, seeds_anew,
    ],
    "schedules.4": [
        gives_the_largest_in_size, takes_its_size, gives_zero_for_a_negative_one, forgets_to_shift_back,
        shifts_the_wrong_way, starts_from_ones, never_normalises, divides_by_one_norm_each,
        looks_at_the_first_tensor, takes_each_tensor_apart, stops_after_three, starts_from_the_gradient,
        squares_the_gradient, builds_the_matrix, takes_the_trace, leaves_gradients_behind,
        gives_the_stable_rate, gives_the_norm_of_the_product,
    ],
    "schedules.5": [
        stops_at_the_first_touch, gives_the_end_of_the_window, wants_more_than_the_target, lets_nan_pass,
        counts_touches_anywhere, wants_it_held_to_the_end, gives_the_last_window, accepts_a_run_cut_short,
        gives_an_index, averages_the_window, takes_the_last_step_of_a_run_that_never_arrives,
        holds_one_too_many, drops_runs_that_never_arrive, takes_never_for_zero, gives_infinity,
        takes_the_mean, refuses_any_that_never_arrives, takes_the_lower_middle, takes_the_best_run,
    ],
}  # fmt: skip

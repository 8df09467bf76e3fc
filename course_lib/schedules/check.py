"Checks of schedules. Oracles: torch's SGD, LambdaLR and OneCycleLR, surfaces of known curvature, strings."

import copy
import math
import random
import statistics

import torch
from torch import nn
from torch.nn import functional as F

from course_lib import checking as core
from course_lib import schedules
from course_lib.checking import yours  # noqa: F401

STEPS, GOAL = 150, 0.6  # for schedules.1
ITERATIONS = 150  # for schedules.4


class _Net(schedules.Nets):
    def forward(self, x):
        return super().forward(x)[0]


@core.exercise("schedules.1", f"one rate for every group, and 8 networks reach the goal in {STEPS} steps")
def train(answer):
    task = schedules.digits()
    seeds, found = core.ragged(0, 10**6, 16), []
    for part in seeds[:8], seeds[8:]:
        found += [_end(answer, task, seed) for seed in part]
        ends, first = zip(*found, strict=True)
        end = statistics.geometric_mean(ends)
        if not GOAL < end < 1:  # a lost network or two can hide a good schedule: eight more decide
            break
    where = f"the last 10 of {STEPS} losses, {len(ends)} networks"
    core.require(
        end <= GOAL,
        f"{where}: expected a mean of at most {GOAL}, got {end:.3g}; begin with a low rate (the first step "
        f"had {first[0]:.2g}), and raise it to about 0.09 in tens of steps",
    )


def _options(opt):
    return [{k: v for k, v in group.items() if k != "params"} for group in opt.param_groups]


def _end(answer, task, seed):
    net, batches = _Net([seed], 64, 10), schedules.batches(task, seed, STEPS, 256)
    first, *others = net.parameters()
    opt = torch.optim.SGD([{"params": [first]}, {"params": others}], lr=0.09)
    twin, used, outs = copy.deepcopy((net, opt)), [], {}

    def note(net, x, out):
        outs.setdefault(len(used), out.detach())

    net.register_forward_hook(note)
    opt.register_step_pre_hook(lambda opt, *_: used.append(_options(opt)))
    losses = core.call(answer, net, opt, batches, mutates=(0, 1))
    core.equal(len(used), STEPS, f"calls of opt.step() for {STEPS} batches", "calls")
    core.require(isinstance(losses, list), f"expected a list of losses, got {core.kind(losses)}")
    core.equal(len(losses), STEPS, "the losses in the list")
    odd = next((v for v in losses if not isinstance(v, float)), 0.0)
    floats = f"expected losses that are floats, got {core.kind(odd)}: use `.item()`"
    core.require(isinstance(odd, float), floats)
    rates = [[float(options["lr"]) for options in groups] for groups in used]
    for k, (a, b) in enumerate(rates):
        core.close(b, a, f"batch {k}: the rate of group 1, where group 0 has {a:.3g} (set it in every group)")
    known = "one rate for all steps: set `group['lr']` of every group in `opt.param_groups` before each step"
    core.require(len({a for a, _ in rates}) > 1, f"got {rates[0][0]:.3g}, {known}")
    for k, (_, y) in enumerate(batches):
        if k in outs and len(outs[k]) == len(y):
            loss = F.cross_entropy(outs[k], y).item()
            if math.isfinite(loss):
                core.close(losses[k], loss, f"loss {k}, of batch {k} before step {k}", rtol=1e-2)
    net, opt = twin
    for k, (x, y) in enumerate(batches[:5]):  # later steps amplify rounding
        loss = F.cross_entropy(net(x), y)
        if math.isfinite(loss.item()):
            core.close(losses[k], loss.item(), f"loss {k}, after steps at the rates {rates[:k]}", rtol=1e-2)
        for group, options in zip(opt.param_groups, used[k], strict=True):
            group.update(options)
        opt.zero_grad()
        loss.backward()
        opt.step()
    end = statistics.mean(float(v) for v in losses[-10:])
    return max(end, 1e-9) if end <= 10 else 10, rates[0][0]


@core.exercise("schedules.2", "both series equal torch's OneCycleLR at every step of 4 random runs")
def one_cycle(answer):
    for case in range(4):
        peak, steps = 10 ** (case - random.uniform(2, 3)), random.randint(12, 60)
        pct, div, final = random.uniform(0.2, 0.7), random.uniform(2, 50), 10 ** random.uniform(1, 5)
        high, low, last = random.uniform(0.9, 0.99), random.uniform(0.5, 0.85), random.uniform(0.86, 0.89)
        opt = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=peak, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            opt, peak, steps, pct_start=pct, div_factor=div, final_div_factor=final,
            max_momentum=high, base_momentum=low,
        )  # fmt: skip
        up = (pct * steps - 1) / (steps - 1)  # torch counts the peak's place from the first step
        rest, end = (up, div, div * final), peak / (div * final)
        # The three places first: there a message can name the mistake. Torch has no third momentum.
        for t, lr, momentum, rule in (
            (0.0, peak / div, high, "peak / div and moms[0]"),
            (up, peak, low, "peak and moms[1]"),
            (1.0, end, last, "peak / div_final and moms[2]"),
        ):
            _cycle(answer, (t, peak, *rest, (high, low, last)), lr, momentum, f" ({rule} here)")
        for step in range(steps - 1):
            want = [opt.param_groups[0][k] for k in ("lr", "momentum")]
            _cycle(answer, (step / (steps - 1), peak, *rest, (high, low, high)), *want)
            opt.step()
            scheduler.step()
        half = (peak + end) / 2, (low + last) / 2
        _cycle(answer, ((1 + up) / 2, peak, *rest, (high, low, last)), *half, " (halfway down here)")
        _cycle(answer, (0.5, peak, 0.0, *rest[1:], (high, low, last)), *half, " (halfway down here)")
        _cycle(answer, (0.0, peak, 0.0, div, div, (high, low, last)), peak, low)
        # Momentum may rise with the rate, and the last rate may be above the first.
        _cycle(answer, (up / 2, peak, up, div * final, div, (low, high, last)), half[0], (low + high) / 2)
        _cycle(answer, (0.0, peak, up, div * final, div, (low, high, last)), end, low)


def _cycle(answer, arguments, lr, momentum, rule=""):
    named = zip(("t", "peak", "warmup", "div", "div_final"), arguments[:-1], strict=True)
    moms = ", ".join(f"{m:.3g}" for m in arguments[-1])
    what = f"one_cycle({', '.join(f'{n}={v:.4g}' for n, v in named)}, moms=({moms}))"
    got = core.parts(core.call(answer, *arguments), "lr momentum", what)
    core.close(got[0], lr, f"lr of {what}{rule}", rtol=1e-5, atol=1e-12)
    core.close(got[1], momentum, f"momentum of {what}{rule}", rtol=1e-5)


@core.exercise(
    "schedules.3", "rates, losses and pick right in 8 tests, and all state is as it was before them"
)
def range_test(answer):
    for fresh in (False, True):
        for case in ("explodes", "stays finite", "turns NaN", "falls, then rises"):
            _range(answer, case, fresh)


def _range(answer, case, fresh):
    while True:  # until other rules for the stop and the pick would give another answer
        n, steps, scale = random.randint(3, 7), random.randint(25, 40), [1.0] * 99
        if case == "turns NaN":
            scale[random.randint(5, 20)] = math.nan
        if case == "falls, then rises":  # above 4 times the lowest, and not 4 times the first
            scale[1:] = [0.1] * 9 + [4.0] * 89
        low, high = 10 ** random.uniform(-5, -3), 10 ** (random.random() + (1 if case == "explodes" else -2))
        model = nn.Sequential(nn.BatchNorm1d(n), nn.Dropout(0.1), nn.Linear(n, 2), nn.Dropout(0.0))
        # The optimiser does not hold the last bias, whose gradients add up.
        groups = [
            {"params": [*model[0].parameters()], "lr": 0.002},
            {"params": [model[2].weight], "lr": 0.01},
        ]
        opt = torch.optim.SGD(groups, momentum=0.7) if fresh else torch.optim.Adam(groups, foreach=False)
        batches = [(torch.randn(k, n), torch.randn(k, 2)) for k in core.ragged(6, 19, 3)]
        for x, y in [] if fresh else batches:
            opt.zero_grad()
            F.mse_loss(model(x), y).backward()
            opt.step()
        model.train(fresh)
        model[3].eval()  # a part of the network that its owner has set apart
        torch.manual_seed(random.randrange(10**6))
        before, calls = _state(model, opt), []
        want = _swept(*copy.deepcopy((model, opt)), batches, low, high, steps, scale, case == "explodes")
        if want and (len(want[0]) < steps) == (case != "stays finite"):
            break

    def loss_fn(out, y):
        calls.append(1)
        return F.mse_loss(out, y) * (1 + 0.01 * random.random()) * scale[len(calls) - 1]

    torch.set_rng_state(before["torch's random state (torch.get_rng_state)"])
    random.setstate(before["Python's random state (random.getstate)"])
    starts = []
    # As a DataLoader, without an index. Its passes are counted.
    loader = type("Loader", (), {"__iter__": lambda self: starts.append(1) or iter(batches)})()
    what = f"a test in train mode, {steps} steps with {len(batches)} batches, rates {low:.3g} to {high:.3g}"
    got = core.call(answer, model, opt, loss_fn, loader, low, high, steps, mutates=range(7))
    lr, *series = core.parts(got, "lr lrs losses", what)
    for name, got, right in zip(("rates", "losses"), series, want, strict=False):
        core.require(isinstance(got, list), f"the {name} of {what}: expected a list, got {core.kind(got)}")
        end = ", the last step included" + (" (its loss is NaN)" if want[1][-1] != want[1][-1] else "")
        core.equal(len(got), len(right), f"the number of {name} of {what}{end}")
        for k, (a, b) in enumerate(zip(got, right, strict=True)):
            core.require(not isinstance(a, torch.Tensor), f"the {name} of {what} are tensors: use `.item()`")
            if b == b:
                core.close(a, b, f"the {name} of {what}: at step {k}", rtol=1e-3)
    need = -(-len(want[0]) // len(batches))
    core.require(
        len(starts) >= need,
        f"{what}: the batches were started {len(starts)} times for {len(want[0])} steps; "
        "begin `for` or `iter` again at its end (`itertools.cycle` keeps the first pass in memory)",
    )
    core.close(lr, want[2], f"{what}: a tenth of the rate with the lowest smoothed loss", rtol=1e-4)
    for name, now in _state(model, opt).items():
        core.require(_alike(before[name], now), f"after {what} this is not restored: {name}")


def _swept(model, opt, batches, low, high, steps, scale, telling):
    "Rates, losses and pick of a range test that restores nothing; None where a wrong rule may give the same."
    model.train()
    for group in opt.param_groups:
        group["lr"] = group["initial_lr"] = low
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda k: (high / low) ** (k / (steps - 1)))
    lrs, losses, smooth, sums, over = [], [], [], [], []
    for k in range(steps):
        x, y = batches[k % len(batches)]
        loss = F.mse_loss(model(x), y) * (1 + 0.01 * random.random()) * scale[k]
        opt.zero_grad()
        loss.backward()
        lrs.append(opt.param_groups[0]["lr"])
        losses.append(loss.item())
        weights = [0.98 ** (k - i) for i in range(k + 1)]
        sums.append(sum(a * b for a, b in zip(weights, losses, strict=True)))
        smooth.append(sums[-1] / sum(weights))
        over.append(smooth[-1] / min(smooth))
        if not over[-1] <= 4:
            break
        opt.step()
        scheduler.step()
    lows = [s.index(min(v for v in s if v == v)) for s in (smooth, losses, sums)]
    raw = [loss / min(losses[: k + 1]) for k, loss in enumerate(losses[:-1])]
    early = max(over[:-1]) > 2 and max(raw) > 4 and lows[0] not in lows[1:]
    clear = all(not abs(v - 4) < 0.02 for v in over)
    return (lrs, losses, lrs[lows[0]] / 10) if clear and (early or not telling) else None


def _state(model, opt):
    parameters = [*model.parameters(), *(p for group in opt.param_groups for p in group["params"])]
    state = {
        "the parameter objects": [id(p) for p in parameters],
        "torch's random state (torch.get_rng_state)": torch.get_rng_state(),
        "Python's random state (random.getstate)": random.getstate(),
        "the weights": [p.detach() for p in model.parameters()],
        "batch norm's running statistics": list(model.buffers()),
        "the optimiser's options, such as lr": _options(opt),
        "the optimiser's averages and counters": opt.state_dict()["state"],
        "train and eval modes of the modules": [m.training for m in model.modules()],
        "the parameters' .grad": [p.grad for p in model.parameters()],
    }
    return copy.deepcopy(state)


def _alike(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_alike(a[k], b[k]) for k in a)
    return len(a) == len(b) and all(map(_alike, a, b)) if isinstance(a, list) else a == b


@core.exercise("schedules.4", "the top eigenvalue right on 12 surfaces, six of them with negative curvature")
def top_eigenvalue(answer):
    for _ in range(2):
        n = 2 * random.randint(8, 14)
        top, bottom, rest = random.uniform(1.5, 3), -random.uniform(5, 8), torch.rand(n).tolist()
        deep = 100 * bottom
        # A second eigenvalue near the top one, or rounding would help out a start with no part in the first.
        bowl = [top, 0.88 * top, *rest[2:]]
        surfaces = {
            "a bowl whose steepest direction is at right angles to a vector of ones": bowl,
            f"a saddle with curvatures from {bottom:.3g}": [top, bottom, *(0.9 * r for r in rest[2:])],
            f"a hill, curvatures below 0, from {deep:.3g}": [-70.0, deep, *(-200 - r for r in rest[2:])],
            f"a plain that bends down only, by {bottom:.3g}": [bottom, *(0.0 for _ in rest[1:])],
            "a bowl with curvatures above ten thousand": [1e4 * v for v in bowl],
            "a bowl in 401 dimensions": [top, *(0.8 * r for r in torch.rand(400).tolist())],
        }
        for where, spectrum in surfaces.items():
            _eigenvalue(answer, _surface(spectrum), where, max(spectrum))
    surface = _surface(bowl)
    once = [_eigenvalue(answer, surface, "a bowl", None, 1) for _ in range(2)]
    core.require(
        once[0] != once[1],
        "two calls with one iteration gave the same value: they began with the same vector, which may have "
        "no part in the top direction; draw it with torch.randn_like",
    )


def _surface(spectrum):
    "A loss of two tensors; these are its Hessian's eigenvalues, the first orthogonal to ones and to axis 0."
    n, double = len(spectrum), {"dtype": torch.float64}
    m = torch.randn(n, n, **double)
    m[0, 0] = 0
    m[1:, 0] -= m[1:, 0].mean()
    q, _ = torch.linalg.qr(m)
    params = [nn.Parameter(torch.randn(shape, **double)) for shape in ((n - 2 * (n // 4),), (2, n // 4))]
    w = torch.cat([p.flatten() for p in params])
    u = q.T @ w
    # -cos(u - a) has the curvature 1 at u = a, and less elsewhere.
    waves = -(torch.tensor(spectrum, **double) * (u - u.detach()).cos()).sum()
    return waves + w @ torch.randn(n, **double), params


def _eigenvalue(answer, surface, where, want, iterations=ITERATIONS):
    (loss, params), products, what = surface, [], f"the top eigenvalue of {where}"
    before = [p.detach().clone() for p in params]
    for p in params:
        p.register_hook(lambda g: products.append(1))
    got = core.number(core.call(answer, loss, params, iterations, mutates=(0, 1)), what)
    kept = all(torch.equal(p.detach(), old) and p.grad is None for p, old in zip(params, before, strict=True))
    core.require(kept, f"on {where} the parameters or their .grad were changed: use torch.autograd.grad")
    core.close(got, got if want is None else want, what, rtol=0.02)
    few, count = "use `iterations` products with vectors, not the matrix", len(products) // len(params)
    some = f"on {where}, with iterations={iterations}, {count} gradients were computed"
    core.require(count <= 2.5 * iterations + 10, f"{some}: {few}")
    return got


@core.exercise("schedules.5", "ratios, medians and counts right for 60 pairs of noisy methods")
def compare(answer):
    for case in range(60):
        hold, target = random.randint(1, 4), random.uniform(0.5, 0.9)
        seeds, sides = core.ragged(0, 40, random.randint(3, 9)), []
        for first in (random.choice([0, 5]), 5):
            share = random.choice([0.15, 0.5, 0.8]) if case > 2 else 0.8
            # Each side has its own order of seeds, and may lack one.
            mine = random.sample(seeds, len(seeds) - random.randint(0, 1))
            sides.append({s: _curve(target, share, first) for s in mine})
        both = [s for s in seeds if s in sides[0] and s in sides[1]]
        steps = {s: [_by_string(side[s], target, hold) for side in sides] for s in both}
        want = {s: a / b for s, (a, b) in steps.items() if a is not None and b is not None}
        what = f"compare on {len(sides[0])} and {len(sides[1])} runs, target {target:.3g}, hold {hold}"
        got = core.call(answer, *sides, target, hold)
        middle, ratios, never = core.parts(got, "median ratios never", what)
        core.require(isinstance(ratios, dict), f"ratios of {what}: expected a dict, got {core.kind(ratios)}")
        for s in sorted({*want, *ratios}):
            known = "slow at {}, fast at {}".format(*steps[s]) if s in steps else "a run on one side only"
            core.equal(s in ratios, s in want, f"{what}: whether seed {s} has a ratio ({known})")
            core.close(ratios[s], want[s], f"{what}: the ratio for seed {s} ({known})")
        for k, count in enumerate(core.parts(never, "slow fast", f"never of {what}")):
            missing = [pair[k] for pair in steps.values()].count(None)
            runs = f"{('slow', 'fast')[k]} runs that never arrive, of {len(both)} seeds on both"
            core.equal(count, missing, f"{what}: {runs}")
        if want:
            core.close(middle, statistics.median(want.values()), f"the median of {list(want.values())}")
        else:
            core.require(middle is None, f"{what}: no seed has a ratio: expected None, got {middle}")


def _curve(target, share, first):
    "Noise about the target: `share` of the evaluations reach it, some of them exactly; some are NaN."
    step, rows = first, []
    for _ in range(random.randint(1, 25)):
        over = random.random() < share
        value = target + random.uniform(0.001, 0.1) if over else target - random.uniform(0.001, 0.4)
        if random.random() < 0.25:
            value = target if over else math.nan
        rows.append((step, value))
        step += random.randint(1, 30)
    return rows


def _by_string(curve, target, hold):
    at = "".join("1" if v >= target else "0" for _, v in curve).find("1" * hold)
    return None if at < 0 else curve[at][0]

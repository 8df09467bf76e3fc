"Checks of schedules. Oracles: torch's schedulers, regression by hand, torch.func.hessian, string search."

import copy
import math
import random

import torch
from torch import nn

from course_lib import checking as core
from course_lib import models
from course_lib.checking import yours  # noqa: F401


def _run(scheduler, opt, steps, *names):
    "What a torch scheduler gives at steps 0 … `steps`: lists of the optimiser's options."
    rows = []
    for _ in range(steps + 1):
        rows.append([opt.param_groups[0][n] for n in names])
        opt.step()
        scheduler.step()
    return [list(column) for column in zip(*rows, strict=True)]


def _sgd(lr, momentum=0.0):
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr, momentum=momentum)


# --- schedules.1 ---------------------------------------------------------------------------


def _line(start, peak, steps):
    opt = _sgd(peak)
    return _run(torch.optim.lr_scheduler.LinearLR(opt, start / peak, 1.0, steps), opt, steps, "lr")[0]


def _half_cosine(peak, end, steps):
    opt = _sgd(peak)
    return _run(torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps, end), opt, steps, "lr")[0]


@core.exercise(
    "schedules.1", "warm-up and cosine equal torch's LinearLR and CosineAnnealingLR on 6 random runs"
)
def warmup_cosine(answer):
    for case in range(6):
        peak, up, down = 10 ** random.uniform(-4, 1), random.randint(2, 30), random.randint(2, 60)
        start, end = peak * random.uniform(0.01, 0.5), peak * random.uniform(0.0, 0.4)
        if case == 0:
            up, start = 0, 0.0
        if case == 1:
            end = 0.0
        want = [*(_line(start, peak, up)[:-1] if up else []), *_half_cosine(peak, end, down)]
        steps = up + down
        for step, lr in enumerate(want):
            arguments = step / steps, peak, up / steps, start, end
            _lr(answer, arguments, lr)
    # From zero, where torch's LinearLR can't start, and a warm-up that lasts all the way.
    peak, warmup = random.uniform(0.1, 3), random.uniform(0.2, 0.7)
    for part in (0.0, 0.3, 0.8):
        _lr(answer, (part * warmup, peak, warmup, 0.0, 0.0), part * peak)
    _lr(answer, (0.75, peak, 1.0, 0.0, 0.0), 0.75 * peak)
    _lr(answer, (1.0, peak, 1.0, 0.0, 0.0), peak)


def _lr(answer, arguments, want):
    what = "warmup_cosine(t={:.4g}, peak={:.4g}, warmup={:.4g}, start={:.4g}, end={:.4g})".format(*arguments)
    core.close(core.call(answer, *arguments), want, what, rtol=1e-5, atol=1e-9)


# --- schedules.2 ---------------------------------------------------------------------------


@core.exercise("schedules.2", "both series equal torch's OneCycleLR at every step of 4 random runs")
def one_cycle(answer):
    for case in range(4):
        peak, steps = 10 ** random.uniform(-3, 1), random.randint(12, 60)
        pct, div, final = random.uniform(0.2, 0.7), random.uniform(2, 50), 10 ** random.uniform(1, 5)
        high, low = random.uniform(0.9, 0.99), random.uniform(0.5, 0.85)
        opt = _sgd(peak, 0.9)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            opt, peak, steps, pct_start=pct, div_factor=div, final_div_factor=final,
            max_momentum=high, base_momentum=low,
        )  # fmt: skip
        lrs, moms = _run(scheduler, opt, steps - 2, "lr", "momentum")
        warmup = (pct * steps - 1) / (steps - 1)  # torch counts the peak's place from the first step
        for step in range(steps - 1):
            arguments = step / (steps - 1), peak, warmup, div, div * final, (high, low, high)
            _cycle(answer, arguments, lrs[step], moms[step])
        # The end, and three different momenta, which torch doesn't have.
        last = random.uniform(0.86, 0.89)
        arguments = 1.0, peak, warmup, div, div * final, (high, low, last)
        _cycle(answer, arguments, peak / (div * final), last)
        arguments = (1 + warmup) / 2, peak, warmup, div, div * final, (high, low, last)
        _cycle(answer, arguments, (peak + peak / (div * final)) / 2, (low + last) / 2)
        if case == 0:
            _cycle(answer, (0.0, peak, 0.0, div, div, (high, low, last)), peak, low)


def _cycle(answer, arguments, lr, momentum):
    names = ("t", "peak", "warmup", "div", "div_final")
    what = ", ".join(f"{n}={v:.4g}" for n, v in zip(names, arguments[:-1], strict=True))
    what = f"one_cycle({what}, moms=({', '.join(f'{m:.3g}' for m in arguments[-1])}))"
    got = core.parts(core.call(answer, *arguments), "lr momentum", what)
    core.close(got[0], lr, f"lr of {what}", rtol=1e-5, atol=1e-12)
    core.close(got[1], momentum, f"momentum of {what}", rtol=1e-5)


# --- schedules.3 ---------------------------------------------------------------------------

BETA, STOP = 0.98, 4.0


@core.exercise(
    "schedules.3", "rates, losses and pick right on 3 regressions; and nothing is left behind in 3 networks"
)
def range_test(answer):
    for case in range(3):
        _regression(answer, case)
    for fresh, training in ((False, True), (True, True), (False, False)):
        _traces(answer, fresh, training)


def _regression(answer, case):
    "A linear model whose every step is done again by hand; it starts with momentum from earlier steps."
    while True:
        n, steps, momentum = random.randint(3, 7), random.randint(25, 40), random.uniform(0.3, 0.8)
        low, high = (
            10 ** random.uniform(-5, -3),
            10 ** (random.uniform(1, 2) if case < 2 else random.uniform(-2, -1)),
        )
        batches = [(torch.randn(k, n), torch.randn(k, 1)) for k in random.sample(range(5, 19), 3)]
        model = nn.Linear(n, 1, bias=False)
        opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum)
        for x, y in batches:
            opt.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            opt.step()
        velocity = opt.state[model.weight]["momentum_buffer"]
        lrs, losses, smooth, clear = _by_hand(
            model.weight.detach().double().T, velocity.double().T, momentum, batches, low, high, steps
        )
        if clear and (len(lrs) < steps) == (case < 2) and (case > 0 or _telling(losses, smooth)):
            break
    what = (
        f"a range test of {steps} steps from {low:.3g} to {high:.3g} on a regression, {len(batches)} batches"
    )
    lr, got_lrs, got_losses = _tested(
        answer, what, model, opt, nn.functional.mse_loss, batches, low, high, steps
    )
    _series(got_lrs, lrs, f"the rates of {what}", 1e-5)
    _series(got_losses, losses, f"the losses of {what}", 1e-3)
    lr = core.number(lr, f"the rate picked in {what}")
    best = min(s for s in smooth if math.isfinite(s))
    # Two places as low as each other, rounding apart, are both right.
    right = [r / 10 for r, s in zip(lrs, smooth, strict=True) if s <= best * 1.0001]
    if not any(math.isclose(lr, r, rel_tol=1e-4) for r in right):
        k = smooth.index(best)
        raise core.Wrong(
            f"the rate picked in {what}: expected {right[0]:.5g}, a tenth of the rate of step {k}, where the "
            f"smoothed loss is lowest, got {lr:.5g}"
        )


def _by_hand(w, v, momentum, batches, low, high, steps):
    "Rates, losses and smoothed losses in float64, and whether the place where the test stops is clear."
    lrs, losses, smooth, clear = [], [], [], True
    for k in range(steps):
        x, y = (t.double() for t in batches[k % len(batches)])
        error = x @ w - y
        lr = math.exp(math.log(low) + (math.log(high) - math.log(low)) * k / (steps - 1))
        v = momentum * v + 2 * x.T @ error / len(x)
        w = w - lr * v
        lrs.append(lr)
        losses.append((error**2).mean().item())
        weights = [BETA ** (k - i) for i in range(k + 1)]
        smooth.append(sum(a * b for a, b in zip(weights, losses, strict=True)) / sum(weights))
        over = smooth[-1] / min(smooth)
        clear &= abs(over - STOP) > 0.02
        if over > STOP:
            break
    return lrs, losses, smooth, clear


def _telling(losses, smooth):
    "Do other rules for the stop and the pick give another answer here?"
    stops = [
        next((k for k, v in enumerate(series) if v > over * min(series[: k + 1])), None)
        for series, over in ((smooth, STOP), (losses, STOP), (smooth, STOP / 2))
    ]
    late = [s * (1 - BETA ** (k + 1)) for k, s in enumerate(smooth)]
    lows = [series.index(min(series)) for series in (smooth, losses, late)]
    return stops[0] not in stops[1:] and lows[0] not in lows[1:]


def _tested(answer, what, *arguments):
    # The model, the optimiser and the batches are the answer's to use: their restoration is what is checked.
    got = core.call(answer, *arguments, mutates=range(7))
    return core.parts(got, "lr lrs losses", what)


def _series(got, want, what, rtol):
    core.require(isinstance(got, list | tuple), f"{what}: expected a list of numbers, got {core.kind(got)}")
    core.require(
        len(got) == len(want),
        f"{what}: expected {len(want)}, up to the step after which the test stops, got {len(got)}",
    )
    for k, (a, b) in enumerate(zip(got, want, strict=True)):
        core.require(
            not isinstance(a, torch.Tensor),
            f"{what}: expected numbers, got tensors: `.item()` makes a number",
        )
        core.close(a, b, f"{what}: at step {k}", rtol=rtol)


def _network():
    "Batch norm and dropout in one net: it has buffers, and it draws random numbers."
    width = random.randint(5, 9)
    return nn.Sequential(
        nn.Linear(4, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.3), models.mlp([width, 5, 3])
    )


def _traces(answer, fresh, training):
    "Training after the range test must be what it would have been without it."
    model = _network()
    body, head = list(model[:2].parameters()), list(model[4].parameters())
    groups = [{"params": body, "lr": 0.003}, {"params": head, "lr": 0.02}]
    opt = torch.optim.AdamW(groups, foreach=False) if fresh else torch.optim.Adam(groups, foreach=False)
    batches = [(torch.randn(k, 4), torch.randint(3, (k,))) for k in random.sample(range(6, 15), 4)]

    def loss_fn(out, y):
        return nn.functional.cross_entropy(out, y) * (1 + 0.01 * random.random())

    def step(model, opt, x, y):
        loss = loss_fn(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    if not fresh:
        for x, y in batches:
            step(model, opt, x, y)
    model.train(training)
    model[3].eval()  # a part of the network that its owner has set apart
    before = _state(model, opt)
    twin, state = copy.deepcopy((model, opt)), (torch.get_rng_state(), random.getstate())
    when = "before its first step" if fresh else "in mid-training"
    where = f"a network with batch norm and dropout ({when})"
    identity = [id(p) for p in model.parameters()]
    _tested(answer, f"a range test on {where}", model, opt, loss_fn, batches, 1e-5, 3.0, 15)
    core.require(
        torch.equal(torch.get_rng_state(), state[0]),
        f"after the range test on {where} torch's random state is another: put back torch.get_rng_state()",
    )
    core.require(
        random.getstate() == state[1],
        f"after the range test on {where} Python's random state is another: put back random.getstate()",
    )
    core.require(
        [id(p) for p in model.parameters()] == identity
        and [id(p) for g in opt.param_groups for p in g["params"]] == [id(p) for p in body + head],
        f"after the range test on {where} the parameters are other objects: write the old values into them",
    )
    after = _state(model, opt)
    for name, old in before.items():
        core.require(
            _alike(old, after[name]), f"after the range test on {where} {name} are not what they were"
        )
    other, other_opt = twin
    for k in range(3):
        torch.manual_seed(k)
        random.seed(k)
        with_test = step(model, opt, *batches[k])
        torch.manual_seed(k)
        random.seed(k)
        without = step(other, other_opt, *batches[k])
        core.require(
            with_test == without,
            f"step {k + 1} after the range test on {where}: expected the loss {without:.6g} of a network "
            f"that was not tested, got {with_test:.6g}",
        )


def _state(model, opt):
    options = [{k: v for k, v in g.items() if k != "params"} for g in opt.param_groups]
    return copy.deepcopy(
        {
            "the weights": [p.detach() for p in model.parameters()],
            "batch norm's running statistics": list(model.buffers()),
            "the optimiser's options, such as lr,": options,
            "the optimiser's averages and counters": opt.state_dict()["state"],
            "train and eval modes": [m.training for m in model.modules()],
        }
    )


def _alike(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_alike(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(_alike, a, b))
    return a == b


# --- schedules.4 ---------------------------------------------------------------------------

ITERATIONS = 150


@core.exercise(
    "schedules.4", "the top eigenvalue right on 3 networks and on 4 surfaces with negative curvature"
)
def top_eigenvalue(answer):
    for _ in range(3):
        loss, params, values = _small_net()
        _eigenvalue(
            answer, loss, params, values[-1].item(), "a network's loss, Hessian by torch.func.hessian"
        )
    n = 2 * random.randint(8, 14)
    top, bottom = random.uniform(1.5, 3), -random.uniform(5, 8)
    rest = torch.rand(n, dtype=torch.float64)
    surfaces = {
        # A second eigenvalue near the top one, or rounding would help out a start with no part in the first.
        "a bowl whose steepest direction is at right angles to a vector of ones": [
            top,
            0.88 * top,
            *rest[2:],
        ],
        f"a saddle whose eigenvalue largest in size is {bottom:.3g}": [top, bottom, *(0.9 * rest[2:])],
        f"a hill, its curvatures all negative, down to {bottom:.3g}": [-0.7, bottom, *(-2 - rest[2:])],
        f"a plain that bends down only, by {bottom:.3g}": [bottom, *(0 * rest[1:])],
    }
    for where, values in surfaces.items():
        loss, params = _quadratic(torch.tensor([float(v) for v in values], dtype=torch.float64))
        _eigenvalue(answer, loss, params, max(map(float, values)), where)
    _large(answer)


def _small_net():
    "A tanh network in float64, its loss, parameters and the Hessian's eigenvalues, the top one well apart."
    while True:
        sizes = [random.randint(3, 5), random.randint(3, 6), 3]
        net = models.mlp(sizes, nn.Tanh).double()
        x, y = torch.randn(11, sizes[0], dtype=torch.float64), torch.randint(3, (11,))
        params = list(net.parameters())
        shapes = [p.shape for p in params]

        def f(flat, net=net, x=x, y=y, shapes=shapes):
            parts = flat.split([s.numel() for s in shapes])
            named = {n: p.view(s) for (n, _), p, s in zip(net.named_parameters(), parts, shapes, strict=True)}
            return nn.functional.cross_entropy(torch.func.functional_call(net, named, (x,)), y)

        values = torch.linalg.eigvalsh(
            torch.func.hessian(f)(torch.cat([p.detach().flatten() for p in params]))
        )
        if values[-2] < 0.93 * values[-1] and -values[0] < 0.9 * values[-1]:
            return nn.functional.cross_entropy(net(x), y), params, values


def _quadratic(spectrum):
    "A quadratic in two tensors with these eigenvalues, the first orthogonal to ones and to the first axis."
    n = len(spectrum)
    m = torch.randn(n, n, dtype=torch.float64)
    m[0, 0] = 0
    m[1:, 0] -= m[1:, 0].mean()
    q, _ = torch.linalg.qr(m)
    hessian = q @ torch.diag(spectrum) @ q.T
    params = [nn.Parameter(torch.randn(n - 2 * (n // 4), dtype=torch.float64)),
              nn.Parameter(torch.randn(2, n // 4, dtype=torch.float64))]  # fmt: skip
    w = torch.cat([p.flatten() for p in params])
    return w @ hessian @ w / 2 + torch.randn(n, dtype=torch.float64) @ w, params


def _eigenvalue(answer, loss, params, want, where):
    before = [p.detach().clone() for p in params]
    got = core.number(
        core.call(answer, loss, params, ITERATIONS, mutates=(0, 1)), f"the top eigenvalue of {where}"
    )
    for p, old in zip(params, before, strict=True):
        core.require(
            torch.equal(p.detach(), old), f"the parameters of {where} were changed: leave them as they are"
        )
        core.require(
            p.grad is None,
            f"on {where} the answer left something in the parameters' .grad, for the optimiser to find: "
            "use torch.autograd.grad",
        )
    core.close(got, want, f"the top eigenvalue of {where}", rtol=0.02)


class _Times(torch.autograd.Function):
    "d * w for a constant d; counts how often it is differentiated."

    calls = 0

    @staticmethod
    def forward(ctx, w, d):
        ctx.save_for_backward(d)
        return d * w

    @staticmethod
    def backward(ctx, g):
        _Times.calls += 1
        return _Times.apply(g, *ctx.saved_tensors), None


def _large(answer):
    n = 1500
    d = torch.rand(n) * 0.8
    top = d[random.randrange(1, n)] = random.uniform(1, 9)
    w = nn.Parameter(torch.randn(n))
    _Times.calls = 0
    where = f"a bowl in {n:,} dimensions"
    _eigenvalue(answer, (w * _Times.apply(w, d)).sum() / 2, [w], float(top), where)
    core.require(
        _Times.calls < n,
        f"on {where} the loss was differentiated {_Times.calls:,} times: use {ITERATIONS} products with "
        "vectors, and not the matrix",
    )


# --- schedules.5 ---------------------------------------------------------------------------


@core.exercise("schedules.5", "steps and medians right for 60 sets of noisy runs, some of which never arrive")
def steps_to_target(answer):
    for case in range(60):
        hold, target = random.randint(1, 4), random.uniform(0.5, 0.9)
        curves = [_curve(target, random.choice([0.15, 0.5, 0.8])) for _ in range(random.randint(1, 6))]
        if case == 0:
            curves = [_curve(target, 0.0) for _ in range(3)]
        what = f"{len(curves)} runs, target {target:.3g}, hold {hold}"
        got = core.call(answer, curves, target, hold)
        each, median = core.parts(got, "steps median", f"steps_to_target on {what}")
        want = [_by_string(c, target, hold) for c in curves]
        core.require(
            isinstance(each, list | tuple) and len(each) == len(want),
            f"steps_to_target on {what}: expected {len(want)} results, one a run, got {core.kind(each)}"
            + (f" of {len(each)}" if isinstance(each, list | tuple) else ""),
        )
        for k, (a, b) in enumerate(zip(each, want, strict=True)):
            said = " ".join("NaN" if v != v else "over" if v > target else "at" if v == target else "under"
                            for _, v in curves[k][:12])  # fmt: skip
            at = ", ".join(str(s) for s, _ in curves[k][:3])
            _same(a, b, f"a run that is {said} …, evaluated at steps {at} …, hold {hold}")
        _same(median, _middle(want), f"the median of {want}")


def _same(got, want, what):
    if want is None or got is None:
        said = got if got is None or isinstance(got, int | float) else core.kind(got)
        core.require(got is want, f"{what}: expected {want}, got {said}")
    else:
        core.close(got, want, what)


def _curve(target, share):
    "Noise about the target: `share` of the evaluations reach it, some of them exactly; some are NaN."
    step, rows = 0, []
    for _ in range(random.randint(1, 25)):
        step += random.randint(1, 30)
        over = random.random() < share
        value = target + random.uniform(0.001, 0.1) if over else target - random.uniform(0.001, 0.4)
        if over and random.random() < 0.3:
            value = target
        if not over and random.random() < 0.2:
            value = math.nan
        rows.append((step, value))
    return rows


def _by_string(curve, target, hold):
    at = "".join("1" if v >= target else "0" for _, v in curve).find("1" * hold)
    return None if at < 0 else curve[at][0]


def _middle(steps):
    "The median by counting: the mean of the smallest values with half, or over half, of the runs up to them."
    n, reached = len(steps), [s for s in steps if s is not None]
    lower = [s for s in reached if 2 * sum(r <= s for r in reached) >= n]
    upper = [s for s in reached if 2 * sum(r <= s for r in reached) > n]
    return (min(lower) + min(upper)) / 2 if lower and upper else None

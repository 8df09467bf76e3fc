"""Sharpness, the largest eigenvalue of the loss's Hessian, by power iteration on its products.

Gradient descent on a quadratic of curvature λ diverges above a learning rate of 2 / λ; a network's loss is no
quadratic, and the limit moves as it trains.
"""

import math

import torch

from course_lib import schedules
from course_lib.schedules import nets as schedules_nets

IMAGES = 256  # for measuring sharpness: enough to be near the whole training set's


def lr_limit(sharpness, momentum=0.0):
    """The learning rate above which descent on a quadratic of this curvature diverges: 2 (1 + momentum) / λ.

    Infinite where the curvature isn't positive. Polyak 1964 for the momentum.
    """
    return 2 * (1 + momentum) / sharpness if sharpness > 0 else float("inf")


def top_eigenvalue(loss, params, iterations=100):
    """The most positive eigenvalue of the Hessian of `loss`, a scalar with its graph, in `params`; a float.

    Power iteration: each round multiplies a vector by the Hessian, by differentiating the gradient once more
    (Pearlmutter 1994), and finds the eigenvalue that is largest in size. Where that one is negative, a second
    round on H - λI, which has no negative eigenvalue, finds the most positive.
    """
    grads = torch.autograd.grad(loss, params, create_graph=True)

    curved = [k for k, g in enumerate(grads) if g.requires_grad]  # a constant gradient has no derivative

    def product(v):
        if not curved:
            return [torch.zeros_like(p) for p in params]
        parts = [grads[k] for k in curved], params, [v[k] for k in curved]
        return torch.autograd.grad(*parts, retain_graph=True, materialize_grads=True)

    def largest(shift):
        v, value = [torch.randn_like(p) for p in params], 0.0
        for _ in range(iterations):
            norm = _dot(v, v) ** 0.5
            if norm == 0:
                break
            v = [a / norm for a in v]
            hv = [h - shift * a for h, a in zip(product(v), v, strict=True)]
            value, v = _dot(v, hv), hv
        return value

    value = largest(0.0)
    return value if value >= 0 else value + largest(value)


def _dot(a, b):
    return sum((x * y).sum() for x, y in zip(a, b, strict=True)).item()


def sharpness(nets, x, y, iterations=20):
    """The largest eigenvalue in size of each run's Hessian on one batch, [runs], for `Nets` side by side.

    The same method without the second round: a run's own vector is multiplied by its own Hessian, because no
    run's loss depends on another's parameters.
    """
    params = list(nets.parameters())
    grads = torch.autograd.grad(nets.losses(x, y).sum(), params, create_graph=True)

    def dot(a, b):
        return sum((s * t).flatten(1).sum(1) for s, t in zip(a, b, strict=True))

    v = [torch.randn_like(p) for p in params]
    for _ in range(iterations):
        norm = dot(v, v).sqrt()
        v = [t / norm.view(-1, *[1] * (t.ndim - 1)) for t in v]
        hv = torch.autograd.grad(grads, params, v, retain_graph=True)
        value, v = dot(v, hv), hv
    return value


def at_start(task, seeds, iterations=40, **net):
    "The sharpness of untrained networks, one for each seed: a list."
    x, y = (t[:IMAGES] for t in task.train)
    nets = schedules_nets.Nets(seeds, x.shape[-1], task.classes, **net).to(x.device)
    return sharpness(nets, x, y, iterations).tolist()


def along(task, plans, seeds, every=10, iterations=20, **options):
    """Train and measure the sharpness at the start and after every `every` steps.

    `plans` are schedules as `schedules_nets.train` takes them. Returns its `Runs`, and for each run a list of
    (step, sharpness, learning rate of the step before). A run that left the numbers has no more rows.
    """
    x, y = (t[:IMAGES] for t in task.train)
    net = {k: v for k, v in options.items() if k in ("width", "blocks", "normalise")}
    rows = [
        [(0, s, plan[0][0])] for s, plan in zip(at_start(task, seeds, iterations, **net), plans, strict=True)
    ]

    def watch(step, nets, alive):
        values = sharpness(nets, x, y, iterations)
        for run, value in zip(alive.tolist(), values.tolist(), strict=True):
            if math.isfinite(value) and step <= len(plans[run]):
                rows[run].append((step, value, plans[run][step - 1][0]))

    runs = schedules_nets.train(task, plans, seeds, every=every, watch=watch, **options)
    return runs, rows


SHAPES = ("cosine", "constant", "one-cycle")


def explore(task, peak, warmup, shape, steps=300, target=0.9, seed=0, **net):
    """One run of a schedule with its measured limit, for an explorer: plain data.

    `warmup` is in steps. ValueError for an unknown shape or a warm-up that doesn't fit into the run.
    """
    if shape not in SHAPES:
        raise ValueError(f"shape is {shape!r}; expected one of {', '.join(SHAPES)}")
    part = schedules.part(warmup, steps)
    at = schedules.fractions(steps, last=False)
    if shape == "one-cycle":
        lrs = [schedules.one_cycle(t, peak, part)[0] for t in at]
    else:
        end = peak if shape == "constant" else 0.0
        lrs = [schedules.warmup_cosine(t, peak, part, end=end) for t in at]
    runs, (rows,) = along(task, [[(lr, 0.0) for lr in lrs]], [seed], every=10, iterations=10, **net)
    curve = [(s, v) for s, v in runs.curves[0] if math.isfinite(v)]
    ((reached,), _) = schedules.steps_to_target([curve], target)
    stopped = runs.curves[0][-1][0] < steps
    if stopped:
        verdict = f"lost by step {runs.curves[0][-1][0]}"
    elif reached is None:
        verdict = f"{target:.0%} not reached in {steps} steps"
    else:
        verdict = f"{target:.0%} reached at step {reached}"
    return {
        "lr": lrs,
        "at": [s for s, _, _ in rows],
        "limit": [lr_limit(value) for _, value, _ in rows],
        "limit_at_start": lr_limit(rows[0][1]),
        "curve": curve or [(0, math.nan)],
        "target": target,
        "reached": reached,
        "verdict": verdict,
    }

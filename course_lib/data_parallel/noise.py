"""How noisy a gradient is, and from which batch size on more data in a step hardly saves steps.

The simple noise scale tr(Σ)/|G|² is the batch size at which the noise of the gradient is as long as the
gradient. Source: McCandlish et al. 2018.
"""

import torch
from torch.nn import functional as F

from course_lib.data_parallel import loops


def per_sample(model, x, y):
    "The gradient of each sample's loss, [N, parameters]."
    from torch.func import functional_call, grad, vmap

    params = {k: p.detach() for k, p in model.named_parameters()}

    def loss(params, x, y):
        return F.cross_entropy(functional_call(model, params, x[None]), y[None])

    grads = vmap(grad(loss), in_dims=(None, 0, 0))(params, x, y)
    return torch.cat([g.flatten(1) for g in grads.values()], 1)


def exact(model, x, y):
    "tr(Σ)/|G|² from every sample's gradient."
    grads = per_sample(model, x, y).double()
    mean = grads.mean(0)
    return float((grads - mean).square().sum(1).mean() / mean.square().sum())


def from_two_sizes(small_sq, big_sq, small, big):
    """The noise scale from the mean squared lengths of gradients of `small` and of `big` batches.

    In data parallelism both are at hand: a rank's own gradient, and the averaged one.
    """
    if not 0 < small < big:
        raise ValueError(f"expected a small batch and a bigger one; given {small} and {big}")
    length = (big * big_sq - small * small_sq) / (big - small)
    noise = (small_sq - big_sq) / (1 / small - 1 / big)
    return noise / length


def estimate(model, x, y, ranks=4, batch=32, draws=200, seed=0):
    "The noise scale as a run on `ranks` ranks of `batch` samples each would see it, over `draws` steps."
    generator = torch.Generator().manual_seed(seed)
    grads = per_sample(model, x, y)
    rows = torch.randint(len(x), (draws, ranks, batch), generator=generator)
    small = big = 0.0
    for of_ranks in rows:
        own = grads[of_ranks].mean(1)  # [ranks, parameters]: what each rank has before the all-reduce
        small += own.square().sum(1).mean().item() / draws
        big += own.mean(0).square().sum().item() / draws
    return from_two_sizes(small, big, batch, ranks * batch)


def steps_to(target, batch, lr, seed=0, most=3000):
    "Steps until the loss over all digits is at most `target`, or None within `most`."
    x, y = loops.digits()
    model = loops.net(seed)
    generator = torch.Generator().manual_seed(seed + 1)
    every = max(1, min(5, batch // 8))
    for n in range(1, most + 1):
        rows = torch.randint(len(x), (batch,), generator=generator)
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        loops.step(model, lr)
        if n % every == 0:
            with torch.no_grad():
                loss = F.cross_entropy(model(x), y)
            if loss <= target:
                return n
            if not loss < 50:
                return None
    return None


def sweep(
    target=0.35, sizes=(4, 8, 16, 32, 64, 128, 256, 512, 1024), rates=(0.1, 0.2, 0.4, 0.8, 1.6), seeds=1
):
    "The fewest steps to the target for each batch size, over the learning rates: [(batch, steps, rate)]."
    found = []
    for batch in sizes:
        best = (None, None)
        for lr in rates:
            most = best[0] or 3000
            runs = [steps_to(target, batch, lr, s, most) for s in range(seeds)]
            if None not in runs and (best[0] is None or sum(runs) / seeds < best[0]):
                best = (int(sum(runs) / seeds), lr)
        if best[0]:
            found.append((batch, *best))
    return found


def fit(points):
    """The fewest steps S and the critical batch B of steps = S (1 + B / batch), relative least squares.

    `points` are (batch, steps) or (batch, steps, rate). Source: McCandlish et al. 2018.
    """
    import numpy as np

    b, s = (np.array([p[i] for p in points], float) for i in (0, 1))
    rows = np.stack([1 / s, 1 / b / s], 1)
    least, product = np.linalg.lstsq(rows, np.ones_like(s), rcond=None)[0]
    return float(least), float(product / least)

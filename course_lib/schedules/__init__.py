"""Lesson schedules: the network of the lesson, many of them trained side by side, and steps to a target.

A plan is a list of (learning rate, momentum), one for each step. A curve is a list of (step, accuracy).
"""

import math
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from course_lib import data


class Task(NamedTuple):
    "Images as patches, x [N, patches, pixels] standardised, y int64 [N]; pairs (x, y), on the device."

    train: tuple
    valid: tuple
    classes: int


def digits(device="cpu"):
    "The 8x8 digits, each image one patch of 64 pixels."
    d = data.digits()
    mean, std = d.train[0].mean(), d.train[0].std()
    sides = [(((x - mean) / std).flatten(2).to(device), y.to(device)) for x, y in (d.train, d.valid)]
    return Task(*sides, 10)


def typefaces(n=8000, n_valid=500, device="cpu"):
    "Crops of 24x24 pixels of printed prose, labelled by typeface, each as 16 overlapping patches of 12x12."
    d = data.typefaces(24, n, seed=0, em=(9, 12), n_valid=n_valid)
    sides = [(_patches(x.to(device), 12, 4), y.to(device)) for x, y in (d.train, d.valid)]
    return Task(*sides, len(d.names))


def _patches(images, size, stride):
    # Paper and ink differ from page to page: each image gets mean 0 and standard deviation 1.
    x = images.float()
    x = (x - x.mean((1, 2, 3), keepdim=True)) / x.std((1, 2, 3), keepdim=True)
    return F.unfold(x, size, stride=stride).transpose(1, 2).contiguous()


def batches(task, seed, steps, size):
    "`steps` batches (x, y) of `size` samples, drawn with replacement: the batches of `train_many`."
    order = _order(len(task.train[1]), seed, steps, size).to(task.train[1].device)
    return [tuple(t[i] for t in task.train) for i in order]


def _order(n, seed, steps, size):
    draw = torch.Generator().manual_seed(2**32 + seed)  # another stream than the weights'
    return torch.randint(n, (steps, size), generator=draw)


class Nets(nn.Module):
    """Residual networks side by side, one for each of `seeds`: a linear stem, `blocks` of x + W relu(x) + b,
    the mean over patches, a linear head. He et al. 2015's initialisation in every layer.

    Takes x [N, patches, pixels], the same for all, or [runs, N, patches, pixels]; gives [runs, N, classes].
    Equal seeds give equal networks. With `normalise`, each block and the head first bring every row of
    numbers to mean 0 and variance 1 (layer norm without parameters).
    """

    def __init__(self, seeds, pixels, classes, width=32, blocks=12, normalise=False):
        super().__init__()
        generators = [torch.Generator().manual_seed(s) for s in seeds]

        def draw(*shape, gain=2.0):
            std = math.sqrt(gain / shape[-2])
            return nn.Parameter(torch.stack([torch.randn(shape, generator=g) for g in generators]) * std)

        self.normalise = normalise
        self.stem = draw(pixels, width, gain=1.0)
        self.blocks = draw(blocks, width, width)
        self.head = draw(width, classes)
        self.stem_bias = nn.Parameter(torch.zeros(len(seeds), 1, width))
        self.biases = nn.Parameter(torch.zeros(len(seeds), blocks, 1, width))
        self.head_bias = nn.Parameter(torch.zeros(len(seeds), 1, classes))

    def forward(self, x):
        runs, (n, patches, pixels) = len(self.stem), x.shape[-3:]
        x = x.reshape(-1, n * patches, pixels).expand(runs, -1, -1)
        x = torch.baddbmm(self.stem_bias, x, self.stem)
        for w, b in zip(self.blocks.unbind(1), self.biases.unbind(1), strict=True):
            x = x + torch.baddbmm(b, self._activation(x), w)
        x = self._activation(x).view(runs, n, patches, -1).mean(2)
        return torch.baddbmm(self.head_bias, x, self.head)

    def _activation(self, x):
        return torch.relu(F.layer_norm(x, x.shape[-1:]) if self.normalise else x)

    def losses(self, x, y):
        "Each run's mean cross-entropy, [runs]; y is [N] or [runs, N]."
        out = self(x)
        y = y.expand(len(out), -1)
        return F.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="none").view(y.shape).mean(1)

    @torch.no_grad()
    def accuracy(self, x, y):
        "Each run's accuracy, [runs], 0..1; NaN where the network's answers are NaN or infinite."
        out = self(x)
        right = (out.argmax(-1) == y).float().mean(1)
        return right.masked_fill(~out.isfinite().flatten(1).all(1), math.nan)

    def keep(self, index):
        "Go on with these runs only. The parameters are new objects."
        for name, p in list(self.named_parameters()):
            setattr(self, name, nn.Parameter(p.detach()[index]))


class Runs(NamedTuple):
    "Of each run its curve, and its training losses [steps] on the CPU, NaN after its end."

    curves: list
    losses: torch.Tensor


def train_many(task, plans, seeds, batch=256, every=10, target=None, hold=3, watch=None, **net):
    """Train one network for each plan and seed, side by side, by SGD with momentum; returns `Runs`.

    A seed decides the first weights and the batches: runs of one seed differ in nothing but their plan. Every
    `every` steps the validation accuracy is measured. A run ends with its plan, when its loss is NaN or
    infinite, or when `hold` accuracies in a row were `target` or more. `watch(step, nets)` is called before
    each measurement. `net` goes to `Nets`.
    """
    x, y = task.train
    device, steps = x.device, max(map(len, plans))
    nets = Nets(seeds, x.shape[-1], task.classes, **net).to(device)
    velocity = [torch.zeros_like(w) for w in nets.parameters()]
    # A plan that has ended has a rate of 0: its weights stay.
    padded = [F.pad(torch.tensor(plan), (0, 0, 0, steps - len(plan))) for plan in plans]
    rates = torch.stack(padded).to(device)
    order = {s: _order(len(y), s, steps, batch) for s in set(seeds)}
    picked = torch.stack([order[s] for s in seeds]).to(device)
    curves, losses = [[] for _ in plans], torch.full((len(plans), steps), math.nan, device=device)
    alive, held = torch.arange(len(plans), device=device), [0] * len(plans)
    for step in range(steps):
        chosen = picked[:, step]
        loss = nets.losses(x[chosen], y[chosen])
        weights = list(nets.parameters())
        gradients = torch.autograd.grad(loss.sum(), weights)  # no run's loss depends on another's weights
        with torch.no_grad():
            for w, v, g in zip(weights, velocity, gradients, strict=True):
                lr, momentum = rates[:, step].view(-1, 2, *[1] * (w.ndim - 1)).unbind(1)
                w -= lr * v.mul_(momentum).add_(g)
        losses[alive, step] = loss.detach()
        if (step + 1) % every and step + 1 < steps:
            continue
        if watch:
            watch(step + 1, nets)
        accuracy, finite = nets.accuracy(*task.valid).tolist(), loss.isfinite().tolist()
        going = []
        for k, run in enumerate(alive.tolist()):
            curves[run].append((step + 1, accuracy[k]))
            held[run] = held[run] + 1 if target is not None and accuracy[k] >= target else 0
            if finite[k] and accuracy[k] == accuracy[k] and step + 1 < len(plans[run]) and held[run] < hold:
                going.append(k)
        if len(going) < len(alive):  # only the runs that go on are computed
            if not going:
                break
            nets.keep(going)
            alive = alive[going]
            velocity, rates, picked = [v[going] for v in velocity], rates[going], picked[going]
    return Runs(curves, losses.cpu())


def reached(curve, target, hold=3):
    "The first step of the first `hold` accuracies in a row that are all `target` or more; None if never."
    row = 0
    for k, (_, accuracy) in enumerate(curve):
        row = row + 1 if accuracy >= target else 0
        if row == hold:
            return curve[k - hold + 1][0]
    return None


def median(steps):
    "The median of the runs that reached the target, and how many never did; (None, n) where none did."
    there = sorted(s for s in steps if s is not None)
    never = len(steps) - len(there)
    return (there[(len(there) - 1) // 2] + there[len(there) // 2]) / 2 if there else None, never

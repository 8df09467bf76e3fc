"""Lesson schedules: residual networks trained side by side, each with its own seed, batches and schedule.

All runs of an experiment are one batched matrix product a layer, so that a hundred small networks take
little longer than one.
"""

import math
import time
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from course_lib import data, machine


class Task(NamedTuple):
    "Images as patches, x [N, patches, pixels] standardised, y int64 [N]; pairs (x, y), on the device."

    name: str
    train: tuple
    valid: tuple
    classes: int


def digits(device="cpu"):
    "The 8x8 digits, each image one patch of 64 pixels."
    d = data.digits()
    mean, std = d.train[0].mean(), d.train[0].std()
    sides = [(((x - mean) / std).flatten(2).to(device), y.to(device)) for x, y in (d.train, d.valid)]
    return Task("digits", *sides, 10)


def typefaces(n=8000, n_valid=500, device="cpu"):
    "Crops of 24x24 pixels of printed prose, labelled by typeface, each as 16 overlapping patches of 12x12."
    d = data.typefaces(24, n, seed=0, em=(9, 12), n_valid=n_valid)
    sides = [(_patches(x.to(device), 12, 4), y.to(device)) for x, y in (d.train, d.valid)]
    return Task("typefaces", *sides, len(d.names))


def _patches(images, size, stride):
    # Paper and ink differ from page to page: each image gets mean 0 and standard deviation 1.
    x = images.float()
    x = (x - x.mean((1, 2, 3), keepdim=True)) / x.std((1, 2, 3), keepdim=True)
    return F.unfold(x, size, stride=stride).transpose(1, 2).contiguous()


class Nets(nn.Module):
    """Residual networks side by side, one for each of `seeds`: a linear stem, `blocks` of x + W relu(x) + b,
    the mean over patches, a linear head. He et al. 2015's initialisation in every layer.

    Takes x [N, patches, pixels], the same for all, or [runs, N, patches, pixels]; gives [runs, N, classes].
    Equal seeds give equal networks. With `normalise`, each block and the head first bring every row of
    numbers to mean 0 and variance 1 (layer norm without parameters).
    """

    def __init__(self, seeds, pixels, classes, width=32, blocks=10, normalise=False):
        super().__init__()
        generators = [torch.Generator().manual_seed(s) for s in seeds]

        def draw(*shape, gain=2.0):
            std = math.sqrt(gain / shape[-2])
            return nn.Parameter(torch.stack([torch.randn(shape, generator=g) for g in generators]) * std)

        self.normalise = normalise
        self.stem, self.stem_bias = (
            draw(pixels, width, gain=1.0),
            nn.Parameter(torch.zeros(len(seeds), 1, width)),
        )
        self.blocks, self.biases = (
            draw(blocks, width, width),
            nn.Parameter(torch.zeros(len(seeds), blocks, 1, width)),
        )
        self.head, self.head_bias = draw(width, classes), nn.Parameter(torch.zeros(len(seeds), 1, classes))

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
        "Each run's accuracy, [runs], 0..1; NaN where the network's answers are no numbers."
        out = self(x)
        right = (out.argmax(-1) == y).float().mean(1)
        return right.masked_fill(~out.isfinite().flatten(1).all(1), math.nan)

    def keep(self, index):
        "Go on with these runs only. The parameters are new objects."
        for name, p in list(self.named_parameters()):
            setattr(self, name, nn.Parameter(p.detach()[index]))


class Runs(NamedTuple):
    """Runs that were trained side by side.

    `curves`: of each run the validation accuracies, [(step, accuracy), …], up to where it ended. `losses`:
    the training loss of each step, [runs, steps] on the CPU, NaN after the end. `clock`: seconds of training
    up to each evaluation, [(step, seconds), …], evaluations left out. `watched`: what `watch` returned.
    """

    curves: list
    losses: torch.Tensor
    clock: list
    watched: list


def train(task, schedules, seeds, batch=64, every=10, target=None, hold=3, watch=None, **net):
    """Train one network for each schedule by stochastic gradient descent with momentum; returns `Runs`.

    A schedule is a list of (lr, momentum), one for each step. A run's seed decides its initial weights and
    its batches, so runs of one seed differ in nothing but their schedule. After `every` steps the accuracy is
    measured. A run ends with its schedule, when its loss or its answers are no numbers, or when it has held
    `target` for `hold` evaluations. `watch(step, nets, alive)` is called before each evaluation. `net` goes
    to `Nets`. ValueError where schedules and seeds don't match.
    """
    if len(schedules) != len(seeds) or not seeds or not all(schedules):
        raise ValueError(
            f"{len(schedules)} schedules and {len(seeds)} seeds; expected as many, each of 1 step or more"
        )
    x, y = task.train
    nets = Nets(seeds, x.shape[-1], task.classes, **net).to(x.device)
    velocity = [torch.zeros_like(p) for p in nets.parameters()]
    length = torch.tensor([len(s) for s in schedules], device=x.device)
    rates = _padded(schedules).to(x.device)
    steps = rates.shape[1]
    order, which = _batches(len(x), seeds, steps, batch)
    order, which = order.to(x.device), which.to(x.device)
    alive = torch.arange(len(seeds), device=x.device)
    losses = torch.full((len(seeds), steps), math.nan, device=x.device)
    held = torch.zeros(len(seeds), dtype=torch.int64, device=x.device)
    curves, clock, watched, seconds = [[] for _ in seeds], [], [], 0.0
    machine.sync()
    start = time.perf_counter()
    for step in range(steps):
        chosen = order[which[alive], step]
        loss = nets.losses(x[chosen], y[chosen])
        _descend(
            nets, velocity, torch.autograd.grad(loss.sum(), list(nets.parameters())), *rates[alive, step].T
        )
        losses[alive, step] = loss.detach()
        if (step + 1) % every and step + 1 < steps:
            continue
        machine.sync()
        seconds += time.perf_counter() - start
        if watch:
            watched.append(watch(step + 1, nets, alive))
        accuracy = nets.accuracy(*task.valid)
        for run, value in zip(alive.tolist(), accuracy.tolist(), strict=True):
            curves[run].append((step + 1, value))
        clock.append((step + 1, seconds))
        going = loss.isfinite() & accuracy.isfinite() & (step + 1 < length[alive])
        if target is not None:
            held = torch.where(accuracy >= target, held + 1, 0)
            going &= held < hold
        if not going.all():
            nets.keep(going)
            velocity, alive, held = [v[going] for v in velocity], alive[going], held[going]
            if not len(alive):
                break
        machine.sync()
        start = time.perf_counter()
    return Runs(curves, losses.cpu(), clock, watched)


def _padded(schedules):
    "Learning rates and momenta as one tensor [runs, steps, 2], 0 after a schedule's end."
    rates = torch.zeros(len(schedules), max(map(len, schedules)), 2)
    for row, schedule in zip(rates, schedules, strict=True):
        row[: len(schedule)] = torch.tensor(schedule)
    return rates


def _batches(n, seeds, steps, batch):
    "Indices [different seeds, steps, batch], and which of them each run uses."
    different = sorted(set(seeds))
    # Another stream than the weights': those are drawn from the seed itself.
    draw = [torch.Generator().manual_seed(2**32 + s) for s in different]
    order = torch.stack([torch.randint(n, (steps, batch), generator=g) for g in draw])
    return order, torch.tensor([different.index(s) for s in seeds])


@torch.no_grad()
def _descend(nets, velocity, grads, lr, momentum):
    "One step: velocity = momentum * velocity + gradient, then w -= lr * velocity, each run at its own rates."
    for p, v, g in zip(nets.parameters(), velocity, grads, strict=True):
        shape = (-1, *[1] * (p.ndim - 1))
        v.mul_(momentum.view(shape)).add_(g)
        p.sub_(lr.view(shape) * v)

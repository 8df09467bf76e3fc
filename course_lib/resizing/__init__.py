"Lesson resizing: train on small images, finish on large ones: what it costs, how it is done and compared."

import statistics
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from course_lib import meter


def stage_flops(batch, channels, width, depth, height, side):
    """FLOPs of a stage's forward pass on images of `height` x `side` pixels with `channels` channels.

    The stage is `depth` convolutions, 3x3 with padding 1, that give `width` channels each. The first moves
    two pixels at a time (stride 2), so its result has half as many rows and columns, rounded up.
    2 FLOPs for each multiply-add; no bias.
    """
    positions = -(-height // 2) * -(-side // 2)
    return 2 * 9 * batch * positions * width * (channels + (depth - 1) * width)


def sizes(epochs, low, high, step=32, sharp=1):
    """The side of the images in each of `epochs` epochs: from `low` up to `high`, the last `sharp` at `high`.

    The epochs before those climb evenly over low, low + step, … and stay under `high`: with L levels there
    and n epochs, epoch k (from 0) is on level floor(k L / n). Sides are `low` plus a multiple of `step`.
    ValueError, in one sentence, for epochs or sides from which no schedule can be made.
    """
    given = {"epochs": epochs, "low": low, "high": high, "step": step, "sharp": sharp}
    if wrong := [k for k, v in given.items() if isinstance(v, bool) or not isinstance(v, int) or v < 1]:
        raise ValueError(f"{wrong[0]} is {given[wrong[0]]!r}; a schedule needs a whole number, at least 1")
    if sharp > epochs:
        raise ValueError(f"{sharp} of {epochs} epochs at full size: sharp can be {epochs} at most")
    if low > high:
        raise ValueError(f"low is {low} and high is {high}: a schedule grows, so low can be {high} at most")
    if (high - low) % step:
        raise ValueError(f"from {low} to {high} is {high - low}, which is no multiple of the step, {step}")
    n, levels = epochs - sharp, (high - low) // step
    return [low + step * (k * levels // n) for k in range(n)] + [high] * sharp


def resize(x, size):
    """Images [N, C, H, W] brought to [N, C, size, size] in one call: bilinear, averaged where they shrink.

    Dtype and range stay: uint8 in 0..255 gives uint8, floating point gives the same type. Works on any
    device. `antialias` widens the filter as the image shrinks, as Pillow does.
    """
    if x.ndim != 4 or size < 1:
        raise ValueError(
            f"images of shape {list(x.shape)} to size {size}; expected [N, C, H, W] and a size of at least 1"
        )
    if x.shape[-2:] == (size, size):
        return x
    # CUDA has no such filter for bytes, and 16-bit floats would lose precision on the way.
    exact = x if x.dtype in (torch.float32, torch.float64) else x.float()
    y = F.interpolate(exact, size=(size, size), mode="bilinear", antialias=True, align_corners=False)
    return (y if x.dtype.is_floating_point else y.round_()).to(x.dtype)


def speedup(schedule, full, cost, floor=0.0):
    """How many times less a run costs that follows `schedule` than one of as many epochs at side `full`.

    `cost(side)` is what the device does in an epoch at that side, in any unit. `floor` is what an epoch costs
    at least: the loader works beside the device and brings images no faster, whatever their size.
    """
    fixed = len(schedule) * max(cost(full), floor)
    return fixed / sum(max(cost(side), floor) for side in schedule)


class Ratio(NamedTuple):
    "A median of ratios and the lowest and highest of them."

    median: float
    low: float
    high: float

    def __str__(self):
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def paired_ratio(fixed, progressive):
    """How many times longer the fixed runs took than the progressive runs of the same seeds, as a `Ratio`.

    Both are {seed: seconds to the target, or None where a run never reached it}. A ratio is formed for each
    seed, the median is taken over the seeds. None counts as for ever: the ratio is infinite where only the
    fixed run missed, 0 where only the progressive one did. Of n ratios the lowest and the highest enclose the
    true median with probability 1 - 2 ** (1 - n): 94 % for five (the sign test's interval; no distribution
    is assumed). ValueError where the seeds differ, there are none, or both runs of a seed missed.
    """
    if not fixed or set(fixed) != set(progressive):
        raise ValueError(
            f"seeds {sorted(fixed)} and {sorted(progressive)}: a pair is two runs of one seed, so run both "
            "arms on the same seeds, one at least"
        )
    ratios = []
    for seed, slow in fixed.items():
        fast = progressive[seed]
        if slow is None and fast is None:
            raise ValueError(f"neither run of seed {seed} reached the target: lower it, or train longer")
        ratios.append(float("inf") if slow is None else 0.0 if fast is None else slow / fast)
    return Ratio(statistics.median(ratios), min(ratios), max(ratios))


# --- the same in a plain loop and in fastai -----------------------------------------


def fit(model, opt, batches, schedule):
    "Train one epoch at each side of `schedule` in a plain loop; the losses of all steps, as floats."
    losses = []
    model.train()
    for size in schedule:
        for x, y in batches:
            loss = F.cross_entropy(model(resize(x, size)), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
    return losses


def size_callback(schedule):
    "A fastai callback that brings each training batch to the epoch's side; validation keeps the full size."
    from fastai.callback.core import Callback

    class SizeSchedule(Callback):
        def __init__(self, schedule):
            self.schedule = list(schedule)

        def before_fit(self):
            if len(self.schedule) != self.n_epoch:
                raise ValueError(
                    f"the schedule has {len(self.schedule)} epochs and fit was asked for {self.n_epoch}"
                )

        def before_batch(self):
            if self.training:
                self.learn.xb = (resize(self.x, self.schedule[self.epoch]),)

    return SizeSchedule(schedule)


# --- a network that takes any size --------------------------------------------------


class Standardise(nn.Module):
    "Each image of [N, C, H, W], uint8 or not, as float32 with mean 0 and spread about 1: paper and ink go."

    def forward(self, x):
        spread, mean = torch.std_mean(x.float(), dim=(1, 2, 3), keepdim=True)
        return (x - mean) / (spread + 8)  # 8 of 255: a blank image stays blank


class Block(nn.Module):
    "Two 3x3 convolutions with batch norm, and a way around them (He et al. 2015)."

    def __init__(self, channels, width, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.around = nn.Sequential()
        if stride > 1 or channels != width:
            conv = nn.Conv2d(channels, width, 1, stride, bias=False)
            self.around = nn.Sequential(conv, nn.BatchNorm2d(width))

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.around(x))


def resnet(classes, channels=1, width=16, blocks=(1, 1, 1)):
    """A small residual network: [N, channels, H, W] of any size to [N, classes].

    A stem of stride 2, then stages of `blocks` blocks, each halving the side and doubling the width. The last
    map is averaged whatever its size, which is what lets the images be of any.
    """
    stem = nn.Conv2d(channels, width, 3, 2, 1, bias=False)
    layers, before = [Standardise(), stem, nn.BatchNorm2d(width), nn.ReLU()], width
    for stage, n in enumerate(blocks):
        for k in range(n):
            layers.append(Block(before, width * 2**stage, 2 if k == 0 else 1))
            before = width * 2**stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))


# --- compilation --------------------------------------------------------------------


def graphs(sides, dynamic=None):
    """How many graphs torch.compile has captured of a small network after an image of each of `sides`.

    A list of counts, one for each side. `dynamic=False` gives every shape a graph of its own; None, the
    default, tries a graph for all shapes at the second one. Dynamo alone is run, so nothing is generated.
    """
    net = nn.Sequential(nn.Conv2d(1, 2, 3, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 3))
    first, *then = [torch.zeros(1, 1, side, side, device="cpu") for side in sides]
    with torch.no_grad():
        return meter.compiled(net, first, then=then, backend="eager", dynamic=dynamic).totals

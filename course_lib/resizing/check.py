"Checks of resizing. Oracles: torch's FLOP counter on real convolutions, Pillow, ratios known beforehand."

import random

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from course_lib import checking as core
from course_lib.checking import yours  # noqa: F401

# --- resizing.1 ---------------------------------------------------------------------------


@core.exercise("resizing.1", "FLOPs right for six stages of random shapes, odd sides among them")
def stage_flops(answer):
    for k in range(6):
        batch, channels, width = core.ragged(2, 12, 3)
        depth = (1, 2, 3, 5)[k % 4]
        height, side = core.ragged(9, 40, 2)
        if k == 1:
            height, side = 2 * (height // 2) + 1, 2 * (side // 2)  # odd and even
        layers = [nn.Conv2d(channels, width, 3, stride=2, padding=1, bias=False)]
        layers += [nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(depth - 1)]
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            nn.Sequential(*layers)(torch.zeros(batch, channels, height, side))
        given = (batch, channels, width, depth, height, side)
        what = (
            f"FLOPs of {batch} images of {height}x{side} with {channels} channels, {depth} layers of {width}"
        )
        core.equal(core.call(answer, *given), counter.get_total_flops(), what, "FLOPs")


# --- resizing.2 ---------------------------------------------------------------------------


@core.exercise(
    "resizing.2", "every epoch's size right for eight schedules, the shortest and a flat one among them"
)
def sizes(answer):
    step = random.choice([8, 16, 24])
    low = step * random.randint(2, 5)
    cases = [
        (10, low, low + 4 * step, step, 2),  # two epochs a level
        (11, low, low + 3 * step, step, 2),  # nine epochs on three levels
        (9, low, low + 5 * step, step, 1),  # eight on five: uneven
        (4, low, low + 7 * step, step, 1),  # fewer epochs than levels: some are skipped
        (7, low, 2 * low, low, 3),  # two sizes only
        (3, low, low + 2 * step, step, 3),  # nothing but the end
        (1, low, low + step, step, 1),
        (5, low, low, step, 2),  # nothing to climb
    ]
    for case in cases:
        epochs, low_, high, step_, sharp = case
        what = f"sizes(epochs={epochs}, low={low_}, high={high}, step={step_}, sharp={sharp})"
        got = core.call(answer, *case)
        core.require(isinstance(got, list | tuple), f"{what}: expected a list of ints, got {core.kind(got)}")
        core.require(
            len(got) == epochs, f"{what}: expected {epochs} sizes, one for each epoch, got {len(got)}"
        )
        core.require(
            all(isinstance(s, int) and not isinstance(s, bool) for s in got),
            f"{what}: expected ints, got {list(got)}: use // for a division without a rest",
        )
        core.equal(list(got), _climb(*case), what)


def _climb(epochs, low, high, step, sharp):
    "The same by carrying a remainder from epoch to epoch, as Bresenham draws a line: no division."
    before, levels = epochs - sharp, 0
    target = low
    while target < high:
        target, levels = target + step, levels + 1
    found, size, carried = [], low, 0
    for _ in range(before):
        found.append(size)
        carried += levels
        while carried >= before:
            size, carried = size + step, carried - before
    return found + [high] * sharp


# --- resizing.3 ---------------------------------------------------------------------------


@core.exercise(
    "resizing.3", "as Pillow does it, bytes and floats, in one call a batch; fine stripes turn grey"
)
def resize(answer):
    side = random.choice([45, 51, 57])
    for n, channels, size in ((3, 1, 20), (2, 3, 31), (4, 2, side - 2), (2, 1, side + 18)):
        noise = torch.rand(n, channels, side, side)
        for x, tolerance in ((noise, 2e-3), ((255 * noise).round().to(torch.uint8), 1)):
            what = f"{x.dtype} images {list(x.shape)} at size {size}".replace("torch.", "")
            got = core.call(answer, x, size)
            _same_kind(got, x, (n, channels, size, size), what)
            want = _pillow(x, size)
            core.close(got.double(), want.double(), what, rtol=0, atol=tolerance * 1.001)
            # Rounding down passes a tolerance of one level, and shows in the mean.
            drift = (got.double() - _pillow(x.float(), size).double()).mean().item()
            core.require(
                abs(drift) < 0.15, f"{what}: darker by {-drift:.2f} levels on average; round to the nearest"
            )
    _stripes(answer)
    _one_call(answer)


def _same_kind(got, x, shape, what):
    core.require(isinstance(got, torch.Tensor), f"{what}: expected a tensor, got {core.kind(got)}")
    core.require(
        got.dtype == x.dtype, f"{what}: expected {x.dtype} as given, got {got.dtype}".replace("torch.", "")
    )
    core.require(tuple(got.shape) == shape, f"{what}: expected shape {list(shape)}, got {list(got.shape)}")
    high = 255 if x.dtype == torch.uint8 else 1
    inside = got.double().min() >= -1e-5 and got.double().max() <= high + 1e-5
    core.require(inside, f"{what}: values from {got.min().item():.4g} to {got.max().item():.4g}; "
                         f"the range was 0 to {high}")  # fmt: skip


def _pillow(x, size):
    "Each channel of each image by itself, with Pillow's bilinear filter."
    import numpy as np
    from PIL import Image

    def one(plane):
        image = Image.fromarray(plane.numpy())
        return torch.from_numpy(np.array(image.resize((size, size), Image.Resampling.BILINEAR)))

    return torch.stack([torch.stack([one(plane) for plane in image]) for image in x])


def _stripes(answer):
    x = torch.zeros(2, 1, 60, 60)
    x[0, 0, :, ::2] = 1  # upright, one pixel wide
    x[1, 0, ::2, :] = 1  # lying
    for size in (12, 25):
        middle = core.call(answer, x, size)[..., 2:-2, 2:-2]
        off = (middle - 0.5).abs().max().item()
        core.require(
            off < 0.06,
            f"black and white stripes one pixel wide at size {size}: expected an even grey, 0.5, got values "
            f"up to {off:.2f} away from it; average over all the pixels that fall into one (antialias)",
        )


class _Calls(TorchDispatchMode):
    "How many operators ran."

    def __init__(self):
        super().__init__()
        self.n = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.n += 1
        return func(*args, **(kwargs or {}))


def _one_call(answer):
    def operators(n):
        x = torch.rand(n, 2, 24, 24)
        with _Calls() as calls:
            answer(x, 16)
        return calls.n

    few, many = operators(2), operators(19)
    core.require(
        few == many,
        f"{few} operators ran for 2 images and {many} for 19; expected as many: resize the batch in one call",
    )


# --- resizing.4 ---------------------------------------------------------------------------


@core.exercise("resizing.4", "the gain is right on four schedules, with a loader in the way and without")
def speedup(answer):
    full = 10 * random.randint(12, 20)
    for k in range(4):
        schedule = sorted(random.choices(range(20, full, 5), k=random.randint(3, 9))) + [full] * (k % 3)
        a, b = random.uniform(1e-4, 1e-3), random.uniform(0.5, 3)

        def cost(side, a=a, b=b):  # like a network's: the head's share does not shrink with the pixels
            return a * (side // 2 + 1) ** 2 + b

        costs = sorted(cost(s) for s in schedule)
        for floor in (0.0, (costs[0] + costs[-1]) / 2, 1.5 * cost(full)):
            # What an epoch waits for its loader beyond the device's own time, added up.
            waits = sum(floor - c for c in costs if c < floor)
            want = len(schedule) * (cost(full) + max(floor - cost(full), 0.0)) / (sum(costs) + waits)
            what = f"speedup of {schedule} against {full}, floor {floor:.3g}"
            core.close(core.call(answer, schedule, full, cost, floor), want, what)


# --- resizing.5 ---------------------------------------------------------------------------


@core.exercise(
    "resizing.5", "paired by seed in any order; runs that never arrived count, and no pair is lost"
)
def paired_ratio(answer):
    for n in (5, 7, 6):
        _compare(answer, sorted(random.uniform(0.6, 4) for _ in range(n)), "all arrived")
    four = sorted(random.uniform(0.6, 4) for _ in range(4))
    _compare(answer, [*four, float("inf")], "one fixed run never arrived")
    _compare(answer, [0.0, *four], "one progressive run never arrived")
    _compare(answer, [0.0, *four[:2], float("inf"), float("inf")], "three runs never arrived")
    _compare(answer, [four[0]], "one seed")
    for fixed, progressive, why in (
        ({1: 2.0, 2: 3.0, 3: 4.0}, {1: 1.0, 2: 1.5}, "a seed is missing on one side"),
        ({1: 2.0, 2: 3.0}, {1: 1.0, 4: 1.5}, "the seeds differ"),
        ({1: 2.0, 2: None, 3: 3.0}, {1: 1.0, 2: None, 3: 2.0}, "neither run of a seed arrived"),
        ({}, {}, "there are no runs"),
    ):
        _refuses(answer, fixed, progressive, why)


def _compare(answer, ratios, why):
    "Times made from sorted ratios; the runs themselves differ far more than the two arms do."
    middle = len(ratios) // 2
    median = ratios[middle] if len(ratios) % 2 else (ratios[middle - 1] + ratios[middle]) / 2
    seeds = core.ragged(0, 1000, len(ratios))
    fixed, progressive = {}, {}
    for seed, ratio in zip(seeds, random.sample(ratios, len(ratios)), strict=True):
        took = 10 ** random.uniform(-1, 2)
        fixed[seed] = None if ratio == float("inf") else (took if ratio == 0 else took * ratio)
        progressive[seed] = None if ratio == 0 else took
    progressive = {seed: progressive[seed] for seed in random.sample(seeds, len(seeds))}
    got = core.call(answer, fixed, progressive)
    core.require(
        isinstance(got, list | tuple) and len(got) == 3,
        f"{why}: expected a tuple (median, low, high), got {core.kind(got)}",
    )
    for value, want, name in zip(
        got, (median, ratios[0], ratios[-1]), ("median", "low", "high"), strict=True
    ):
        what = f"{name} of the ratios, {len(ratios)} seeds, {why}"
        if want == float("inf"):
            core.require(value == want, f"{what}: expected infinity, got {value}")
        else:
            core.close(value, want, what)


def _refuses(answer, fixed, progressive, why):
    core.require(callable(answer), f"expected a function, got {core.kind(answer)}")
    try:
        got = answer(dict(fixed), dict(progressive))
    except NotImplementedError:
        raise
    except ValueError:
        return
    except Exception as e:
        raise core.Wrong(f"{why}: expected ValueError with a sentence, got {core.describe(e)}") from None
    raise core.Wrong(f"{why}: expected ValueError, for nothing can be compared, and got {got!r}")

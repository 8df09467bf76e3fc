"""Lesson resizing's experiment: training on images of fixed and of growing size, paired by seed.

task = tasks()["letters"]
study = paired(task)        # both arms at several lengths on every seed
print(study.report())
"""

import contextlib
import copy
import functools
import itertools
import math
import statistics
import time
import unicodedata
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from course_lib import data, machine, meter, recorded, resizing
from course_lib.resizing import resize


class Task(NamedTuple):
    """What is to be told apart, and how both arms train.

    `source` is a data set of `course_lib.data` whose images have `side` pixels; `em` is the range of its
    letters' size. A progressive run climbs from `low` in steps of `step`; the share `sharp` of its epochs, at
    the end, is at `side`. `fixed` and `progressive` are the arms' lengths in epochs: each is a run with a
    cycle of its own. `blocks` and `width` are the network's. Adam with decoupled weight decay, one cycle up
    to `lr`. `more` are other keywords of the data set, as pairs. `target`
    is the accuracy to reach, or None for what fixed runs of full length reach (see `paired`).
    """

    source: str
    em: tuple
    side: int
    low: int
    step: int
    sharp: float
    fixed: tuple
    progressive: tuple
    n: int
    n_valid: int
    batch: int
    width: int
    blocks: tuple
    lr: float
    more: tuple = ()
    target: float | None = None

    def schedule(self, epochs):
        "The side in each epoch of a progressive run."
        return resizing.sizes(
            epochs, self.low, self.side, self.step, sharp=max(1, round(self.sharp * epochs))
        )

    def images(self):
        "The data set, on the device."
        images = getattr(data, self.source)(
            self.side, self.n, em=self.em, n_valid=self.n_valid, **dict(self.more)
        )
        move = machine.device()
        return images._replace(
            train=tuple(t.to(move) for t in images.train), valid=tuple(t.to(move) for t in images.valid)
        )

    def network(self, seed):
        "The network with the weights of `seed`, on the device."
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            net = resizing.resnet(self.classes(), width=self.width, blocks=self.blocks)
        return net.to(machine.device(), memory_format=layout())

    def classes(self):
        return len(data.CHARACTERS if self.source == "letters" else data.FACES)


def tasks(**changes):
    """The lesson's two tasks, sized for this machine, by name; `changes` replace fields of both.

    "letters": one letter on a sheet, told by its shape and its accent. "typefaces": a page of small print,
    told by how its letters are drawn.
    """
    small = {
        "side": 96, "low": 48, "step": 48, "sharp": 0.3, "n": 1600, "n_valid": 800,
        "batch": 20, "width": 16, "blocks": (1, 1, 1), "lr": 1e-2,
    }  # fmt: skip
    # A batch large enough that small images fill the GPU too: at 128 a step of 96 pixels waits for launches.
    large = {
        "side": 288, "low": 144, "step": 144, "sharp": 0.3, "n": 8192, "n_valid": 2048,
        "batch": 256, "width": 96, "blocks": (1, 1, 1, 1), "lr": 4e-3,
    }  # fmt: skip
    letters = {
        "em": machine.pick(cpu=(32, 72), gpu=(45, 112)),
        "fixed": machine.pick(cpu=(4, 6), gpu=(2, 3, 5)),
        "progressive": machine.pick(cpu=(7, 10), gpu=(4, 6, 8)),
        "target": machine.pick(cpu=None, gpu=0.9),  # nine in ten; on a CPU the runs are too short for it
    }
    typefaces = {
        "em": machine.pick(cpu=(6, 9), gpu=(7, 12)),
        "fixed": machine.pick(cpu=(3,), gpu=(5,)),
        "progressive": machine.pick(cpu=(8,), gpu=(10,)),
        # Large pages are slow to render: 4 of each face take 20 s, 12 a minute.
        "more": machine.pick(cpu=(), gpu=(("pages", 4),)),
    } | machine.pick(cpu={}, gpu={"n": 4096, "batch": 128})
    base = machine.pick(cpu=small, gpu=large)
    return {
        "letters": Task("letters", **{**base, **letters, **changes}),
        "typefaces": Task("typefaces", **{**base, **typefaces, **changes}),
    }


class Run(NamedTuple):
    "One training run: each epoch's side, seconds and FLOPs of training, accuracy (0..1) afterwards, network."

    schedule: tuple
    seconds: float
    flops: float
    accuracy: float
    network: nn.Module


def train(task, images, schedule, seed, read=None):
    """Train on `images` with one side for each epoch, then read the validation images at `read`: a `Run`.

    `read` is full size unless said. bf16 on a GPU, float32 on a CPU. Seed and number of epochs alike, runs
    start from the same weights and see the same batches, whatever the sides.
    """
    net = task.network(seed)
    batches = data.Batches(*images.train, size=task.batch, seed=seed)
    opt = torch.optim.AdamW(net.parameters(), lr=task.lr, weight_decay=0.01, fused=machine.has_gpu())
    steps = len(schedule) * len(batches)
    cycle = torch.optim.lr_scheduler.OneCycleLR(opt, task.lr, total_steps=steps, pct_start=0.25)
    net.train()
    machine.sync()
    start = time.perf_counter()
    for side in schedule:
        for x, y in batches:
            with precision():
                loss = F.cross_entropy(net(arranged(resize(x, side))), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            cycle.step()
    machine.sync()
    seconds = time.perf_counter() - start
    accuracy = correct(net, *images.valid, read or task.side).float().mean().item()
    spent = task.n * sum(flops(task, side) for side in schedule)
    return Run(tuple(schedule), seconds, spent, accuracy, net)


def precision():
    return torch.autocast("cuda", torch.bfloat16) if machine.has_gpu() else contextlib.nullcontext()


def layout():
    return machine.pick(cpu=torch.contiguous_format, gpu=torch.channels_last)


def arranged(x):
    return x.contiguous(memory_format=layout())


@functools.cache
def flops(task, side):
    "FLOPs of one image's forward and backward pass at `side`, counted by `meter` on the CPU."
    with torch.random.fork_rng(devices=[]):
        net = resizing.resnet(task.classes(), width=task.width, blocks=task.blocks)
    x, y = torch.zeros(1, 1, side, side, device="cpu"), torch.zeros(1, dtype=torch.int64, device="cpu")
    net.train()
    with meter.count(portable=False) as c:
        F.cross_entropy(net(x), y).backward()
    return c.flops


@torch.no_grad()
def read_as(net, x, side):
    "Which class each image is taken for when read at `side`: int64 [N]. The network's mode is put back."
    was = net.training
    net.eval()
    with precision():
        told = torch.cat([net(arranged(resize(part, side))).argmax(1) for part in x.split(256)])
    net.train(was)
    return told


def correct(net, x, y, side):
    "Which images are told right when they are read at `side`: bool [N]."
    return read_as(net, x, side) == y


def shapes(names):
    "For each letter the index of its shape, the letter without its mark: a tensor [classes]."
    plain = [{"ø": "o"}.get(c, unicodedata.normalize("NFD", c)[0]) for c in names]
    return torch.tensor([sorted(set(plain)).index(c) for c in plain], device=machine.device())


@torch.no_grad()
def renormalised(net, x, side):
    "A copy of the network whose batch norms hold the statistics of `x` at `side`. No weight is changed."
    net = copy.deepcopy(net)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
            module.momentum = None  # a plain mean over the batches
    net.train()
    with precision():
        for part in x.split(128):
            net(arranged(resize(part, side)))
    return net


# --- the comparison -----------------------------------------------------------------


def reach(points, target):
    """Seconds to accuracy `target` along `points` of (seconds, accuracy), or None where none reaches it.

    Each point is a run of another length. Between the first run that reaches the target and the shorter one
    before it, the time is interpolated.
    """
    points = sorted(points)
    for k, (seconds, accuracy) in enumerate(points):
        if accuracy >= target:
            if k == 0:
                return seconds
            before, below = points[k - 1]
            return before + (seconds - before) * (target - below) / (accuracy - below)
    return None


def at(points, seconds):
    "Accuracy at `seconds` along `points` of (seconds, accuracy): from nothing at 0, level after the last."
    points = [(0.0, 0.0), *sorted(points)]
    for (t0, a0), (t1, a1) in itertools.pairwise(points):
        if seconds <= t1:
            return a0 + (a1 - a0) * (seconds - t0) / (t1 - t0)
    return points[-1][1]


class Study(NamedTuple):
    "Every run of a task, `runs[arm][seed]`, a list by length; and the accuracy to reach."

    task: Task
    target: float
    runs: dict

    def points(self, arm, by="seconds"):
        '{seed: [(seconds, accuracy), …]} of an arm; `by` is what is spent, "seconds" or "flops".'
        return {s: [(getattr(r, by), r.accuracy) for r in runs] for s, runs in self.runs[arm].items()}

    def spent(self, arm, by="seconds"):
        "{seed: seconds or FLOPs to the target, or None} of an arm."
        return {seed: reach(points, self.target) for seed, points in self.points(arm, by).items()}

    def ratio(self, by="seconds"):
        "Spent to the target, fixed over progressive: `resizing.paired_ratio`. ValueError as there."
        return resizing.paired_ratio(self.spent("fixed", by), self.spent("progressive", by))

    def gains(self, by="seconds"):
        """Accuracy at equal time, or equal FLOPs, progressive less fixed, by seed.

        At what the progressive runs spend to reach the target, or at the end of the longest where none does.
        """
        found = {}
        for seed, points in self.points("progressive", by).items():
            seconds, ours = reach(points, self.target), self.target
            if seconds is None:
                seconds, ours = max(points)
            found[seed] = ours - at(self.points("fixed", by)[seed], seconds)
        return found

    def saved(self):
        "Seconds less to the target, the median over the seeds on which both arms reached it; 0 if on none."
        fixed, ours = self.spent("fixed"), self.spent("progressive")
        both = [fixed[s] - ours[s] for s in fixed if fixed[s] is not None and ours[s] is not None]
        return statistics.median(both) if both else 0.0

    def report(self):
        """What came out, as text: a line for each length of each arm, then the comparisons.

        A ratio is fixed over progressive at equal accuracy; points are progressive less fixed.
        """
        n = len(self.runs["fixed"])
        lines = [f"{self.task.source}, {n} seed{'s' * (n != 1)}, medians; the target is {self.target:.1%}",
                 f"{'arm':12}{'epochs':>7}{'seconds':>9}{'FLOPs':>10}{'accuracy':>10}"]  # fmt: skip
        for arm, by_seed in self.runs.items():
            for same in zip(*by_seed.values(), strict=True):
                seconds = statistics.median(r.seconds for r in same)
                accuracy = statistics.median(r.accuracy for r in same)
                epochs, spent = len(same[0].schedule), same[0].flops
                lines.append(f"{arm:12}{epochs:>7}{seconds:>9.2f}{spent:>10.2e}{accuracy:>10.1%}")
        reached = {arm: sum(t is not None for t in self.spent(arm).values()) for arm in self.runs}
        lines.append("reached it: " + ", ".join(f"{arm} {k} of {n}" for arm, k in reached.items()))
        for by, word in (("seconds", "time"), ("flops", "FLOPs")):
            gains = [100 * g for g in self.gains(by).values()]
            points = f"{statistics.median(gains):+.1f} points ({min(gains):+.1f} to {max(gains):+.1f})"
            lines.append(f"{word}: {verdict(self, by)}; at equal {word} {points}")
        return "\n".join(lines)


def paired(task, seeds=5, margin=0.02):
    """Run both arms at all their lengths on `seeds` seeds, interleaved: a `Study`.

    - "fixed": every epoch at full size;
    - "progressive": the task's schedule;
    - "small": the longest progressive run's epochs, all at the lowest side, and read at that side.

    The target is the task's, or what the longest fixed runs end with, the median of them, less `margin`.
    """
    if seeds < 1:
        raise ValueError(f"{seeds} seeds; expected at least 1")
    images = task.images()
    plans = {
        "fixed": [([task.side] * n, task.side) for n in task.fixed],
        "progressive": [(task.schedule(n), task.side) for n in task.progressive],
        "small": [([task.low] * max(task.progressive), task.low)],
    }
    runs = {arm: {seed: [] for seed in range(seeds)} for arm in plans}
    with tuned_convolutions():
        _warm_up(task, images)
        for seed in range(seeds):
            for arm, plan in plans.items():
                for schedule, read in plan:
                    runs[arm][seed].append(train(task, images, schedule, seed, read))
    best = statistics.median(max(r.accuracy for r in same) for same in runs["fixed"].values())
    return Study(task, task.target or best - margin, runs)


def _warm_up(task, images):
    "A few steps at every side, so that allocating memory and choosing kernels is not timed."
    few = images._replace(
        train=tuple(t[: 3 * task.batch] for t in images.train), valid=tuple(t[:256] for t in images.valid)
    )
    train(task, few, sorted({*task.schedule(max(task.progressive)), task.side}), seed=0)


@contextlib.contextmanager
def tuned_convolutions():
    "cuDNN tries its kernels once for each shape and keeps the fastest."
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def verdict(study, by="seconds"):
    'The comparison at equal accuracy in a few words; `by` is "seconds" or "flops".'
    try:
        ratio = study.ratio(by)
    except ValueError as e:
        return f"no verdict: {e}"
    n = len(study.runs["fixed"])
    if n == 1:
        return f"{ratio.median:.2f} on one seed, which proves little"
    if ratio.low > 1:
        word = "progressive was sooner on all of them"
    elif ratio.high < 1:
        word = "progressive was later, or never, on all of them"
    else:
        word = "they disagree"
    return f"{ratio} over {n} seeds: {word}"


def by_target(study, targets=(0.8, 0.9, 0.95, 0.98)):
    "The comparison in time and in FLOPs at other accuracies: [(target, time's verdict, FLOPs' verdict), …]."
    others = [study._replace(target=t) for t in targets]
    return [(s.target, verdict(s), verdict(s, "flops")) for s in others]


def note(study, name, bar=None, by="seconds"):
    "Note a study's ratio under `name`, `name`_low and `name`_high, as far as they are finite."
    try:
        ratio = study.ratio(by)
    except ValueError:
        return
    for suffix, value in zip(("", "_low", "_high"), ratio, strict=True):
        if math.isfinite(value):
            recorded.note(name + suffix, value, "×", bar if not suffix else None)

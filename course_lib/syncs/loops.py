"""Loops with and without waiting: a training loop, what a sync costs, and many tiny operators against one."""

import itertools
import math
import statistics
import time

import torch
from torch.nn import functional as F

from course_lib import machine, models

# --- A training loop that doesn't wait ----------------------------------------------


def train(model, opt, batches, log=print, every=10):
    """Train on batches (x, y) without waiting for the GPU before the last step; labels of -1 don't count.

    Gradients are clipped to a norm of 1. Returns a dict: "best" (the lowest loss), "right" (how many labels
    were guessed right), "guesses" (how often each class was guessed, a list), "hardest" (the sample with the
    largest loss of each step, [steps, ...]). `log` gets a line for every `every`-th step, at the end.
    """
    best, right, guesses, hardest, kept = None, 0, 0, [], []
    for step, (x, y) in enumerate(batches):
        known = y >= 0
        logits = model(x)
        each = F.cross_entropy(logits, y.clamp(min=0), reduction="none") * known
        loss = each.sum() / known.sum()
        opt.zero_grad()
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        scale = (1 / norm).clamp(max=1)
        for p in model.parameters():
            p.grad *= scale
        opt.step()
        loss = loss.detach()
        guess = logits.argmax(1)
        right = right + (known & (guess == y)).sum()
        guesses = guesses + (guess[:, None] == torch.arange(logits.shape[1], device=x.device)).sum(0)
        best = loss if best is None else torch.minimum(best, loss)
        hardest.append(x[each.argmax()[None]])
        if step % every == 0:
            kept.append((step, loss))
    for step, loss in kept:
        log(f"step {step}: loss {loss:.4f}")
    return {
        "best": best.item(),
        "right": right.item(),
        "guesses": guesses.tolist(),
        "hardest": torch.cat(hardest),
    }


def batches(n, size=64, inputs=64, classes=10, device="cpu", seed=0):
    "n random batches (x [size, inputs], y [size]) on a device; one label in eight is missing (-1)."
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(n, size, inputs, generator=draw)
    y = torch.randint(classes, (n, size), generator=draw)
    y[torch.rand(n, size, generator=draw) < 1 / 8] = -1
    y[:, 0] = 1
    return list(zip(x.to(device), y.to(device), strict=True))


def loop_seconds(loops, width, steps=30, size=None, rounds=4):
    """Seconds a step of several loops like `train`, on a network of two hidden layers of `width`: {name: s}.

    The loops take turns, and of each the fastest of `rounds` counts: other programs only ever add time.
    """
    dev = machine.device()
    size = size or machine.pick(cpu=64, gpu=512)
    feed = batches(steps, size, device=dev)
    took = {name: [] for name in loops}
    for i in range(rounds + 1):
        for name, loop in loops.items():
            torch.manual_seed(0)
            model = models.mlp([64, width, width, 10]).to(dev)
            opt = torch.optim.SGD(model.parameters(), 1e-3)
            machine.sync()
            start = time.perf_counter()
            loop(model, opt, feed if i else feed[:3], log=lambda line: None, every=2)
            machine.sync()
            took[name] += [(time.perf_counter() - start) / steps] if i else []  # the first warms up
    return {name: min(t) for name, t in took.items()}


# --- What waiting costs -------------------------------------------------------------


def queued_and_total(fn, n):
    "Seconds until a loop of n calls of `fn` returns, and until the device has done what it asked for."
    fn()
    machine.sync()
    start = time.perf_counter()
    for _ in range(n):
        fn()
    queued = time.perf_counter() - start
    machine.sync()
    return queued, time.perf_counter() - start


def sync_cost(n=200, rounds=11):
    "Seconds that reading one number adds to a tiny operator in a loop: the median over `rounds`."
    x = torch.zeros((), device=machine.device())

    def tiny():
        x.add_(1)

    def read():
        x.add_(1)
        x.item()

    costs = [queued_and_total(read, n)[1] - queued_and_total(tiny, n)[1] for _ in range(rounds)]
    return statistics.median(costs) / n


def watch_seconds(makers, width, steps=40, rounds=4):
    """Seconds a step of training with each of several watches on the loss: {name: s}.

    `makers` is {name: a function that gives a watch, or None for no watch}. As in `loop_seconds` they take
    turns, and the fastest of `rounds` counts.
    """
    dev = machine.device()
    torch.manual_seed(0)
    model = models.mlp([64, width, width, 10]).to(dev)
    opt = torch.optim.SGD(model.parameters(), 1e-3)
    feed = itertools.cycle(batches(4, machine.pick(cpu=64, gpu=512), device=dev))
    took = {name: [] for name in makers}
    for _ in range(rounds + 1):
        for name, make in makers.items():
            watch = make() if make else None
            machine.sync()
            start = time.perf_counter()
            for x, y in itertools.islice(feed, steps):
                loss = F.cross_entropy(model(x), y, ignore_index=-1)
                opt.zero_grad()
                loss.backward()
                opt.step()
                if watch is not None and watch(loss):
                    break
            machine.sync()
            took[name].append((time.perf_counter() - start) / steps)
            if watch is not None:
                watch.finish()
    return {name: min(t[1:]) for name, t in took.items()}


# --- Many tiny operators against one ------------------------------------------------


def pool(x, lengths):
    """The mean of the first lengths[i] rows of each sample: [N, T, D] and [N] give [N, D].

    What lies past a sample's length is ignored, whatever it holds; a length of 0 gives zeros.
    """
    inside = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
    total = x.masked_fill(~inside[..., None], 0).sum(1)
    return total / lengths[:, None].clamp(min=1)


def pool_by_rows(x, lengths):
    "The same with a Python loop over the samples, which waits for each length."
    out = torch.zeros(x.shape[0], x.shape[2], device=x.device, dtype=x.dtype)
    for i, length in enumerate(lengths):
        if length > 0:
            out[i] = x[i, :length].mean(0)
    return out


def ragged(n, longest=64, width=32, device="cpu", seed=0):
    "Random x [n, longest, width] and lengths [n] between 1 and longest; NaN past each length."
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(n, longest, width, generator=draw)
    lengths = torch.randint(1, longest + 1, (n,), generator=draw)
    x[torch.arange(longest) >= lengths[:, None]] = math.nan
    return x.to(device), lengths.to(device)

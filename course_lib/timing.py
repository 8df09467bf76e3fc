"""One way to time a function, right on the CPU and on the GPU."""

import contextlib
import gc
import time as clock
from typing import NamedTuple

import torch
from torch.utils import _pytree as pytree

FEWEST = 5  # timed runs, however slow the function is
MOST = 10_000
FLUSH_BYTES = 256 << 20  # several times the largest L2 cache


class Timing(NamedTuple):
    "Seconds for one call: the median, the 20th and 80th percentile, and how many calls were timed."

    median: float
    low: float
    high: float
    runs: int

    def __str__(self):
        unit, scale = _unit(self.median)
        median, low, high = (f"{s * scale:.3g}" for s in self[:3])
        return f"{median} {unit} ({low}-{high}, {self.runs:,} runs)"


def _unit(seconds):
    return next((u for u in (("s", 1), ("ms", 1e3), ("µs", 1e6)) if seconds * u[1] >= 1), ("ns", 1e9))


def time(fn, *args, seconds=0.3, device=None):
    """Time `fn(*args)`; returns a `Timing` in seconds.

    `fn` is called without being timed first, so compilation and allocation are left out. Then it is called
    for about `seconds`, warm-up included, and five times at least. `device` is "cpu" or "cuda"; by default
    it is where the tensors in `args` are, and where there are none, the GPU if this machine has one.

    On the GPU each call lies between two CUDA events, and a write of 256 MB before it empties the L2 cache:
    the method of triton.testing.do_bench. On the CPU calls are timed in blocks long enough for the clock,
    with all of torch's threads: the method of torch.utils.benchmark.
    """
    if not callable(fn):
        raise TypeError(f"time takes a function and its arguments, and was given a {type(fn).__name__}: "
                        "pass the function itself, without calling it")  # fmt: skip
    if not seconds > 0:
        raise ValueError(f"seconds is {seconds}; expected a positive number")
    on_gpu = torch.device(device or _where(args)).type == "cuda"
    fn(*args)
    with no_gc():
        return summary(*(_on_gpu if on_gpu else _on_cpu)(fn, args, seconds))


def _where(args):
    found = {t.device.type for t in pytree.tree_leaves(args) if isinstance(t, torch.Tensor)}
    on_gpu = "cuda" in found if found else torch.cuda.is_available()
    return "cuda" if on_gpu else "cpu"


@contextlib.contextmanager
def no_gc():
    "No garbage is collected within: it takes time, and may free what a CUDA graph under capture holds."
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def summary(samples, runs):
    "`Timing` of these samples, seconds of a call."
    t = torch.tensor(samples, dtype=torch.float64, device="cpu")
    low, median, high = t.quantile(torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64, device="cpu")).tolist()
    return Timing(median, low, high, runs)


def _on_cpu(fn, args, seconds):
    end = clock.perf_counter() + seconds
    block = 1
    # A block lasts 50 µs or more: the clock and the loop then cost less than one part in a hundred.
    while True:
        took = _block(fn, args, block)
        if took < 1e-3:  # the shorter of two, since a hiccup of the machine is as long as a block
            took = min(took, _block(fn, args, block))
        if took >= 5e-5 or clock.perf_counter() >= end:
            break
        block *= 2
    samples = []
    while len(samples) < FEWEST or (clock.perf_counter() < end and len(samples) < MOST):
        samples.append(_block(fn, args, block) / block)
    return samples, len(samples) * block


def _block(fn, args, n):
    start = clock.perf_counter()
    for _ in range(n):
        fn(*args)
    return clock.perf_counter() - start


def _on_gpu(fn, args, seconds):
    cache = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")

    def runs(n):
        starts, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(n)] for _ in range(2))
        for start, end in zip(starts, ends, strict=True):
            cache.zero_()
            start.record()
            fn(*args)
            end.record()
        torch.cuda.synchronize()
        return [s.elapsed_time(e) * 1e-3 for s, e in zip(starts, ends, strict=True)]

    torch.cuda.synchronize()
    begin = clock.perf_counter()
    samples = runs(FEWEST)
    each = (clock.perf_counter() - begin) / FEWEST  # with the flush, which takes its part of `seconds`
    warmup = max(1, int(0.2 * seconds / each))
    if warmup > 1:
        runs(min(warmup, MOST))
    left = begin + seconds - clock.perf_counter()
    more = min(MOST, int(left / each))
    if more >= FEWEST:
        samples = runs(more)
    return samples, len(samples)

"One way to time a function, right on the CPU and on the GPU."

import contextlib
import gc
import time as clock
import timeit
from typing import NamedTuple

import numpy
import torch
from torch.utils import _pytree as pytree

FEWEST, MOST = 5, 10_000  # samples, however slow or fast a function is


class Timing(NamedTuple):
    "Seconds for one call: the median, the 20th and 80th percentile, and how many calls were timed."

    median: float
    low: float
    high: float
    runs: int

    def __str__(self):
        units = ("s", 1), ("ms", 1e3), ("µs", 1e6), ("ns", 1e9)
        unit, scale = next((u for u in units if self.median * u[1] >= 1), units[-1])
        median, low, high = (f"{s * scale:.3g}" for s in self[:3])
        return f"{median} {unit} ({low}-{high}, {self.runs:,} runs)"


def time(fn, *args, seconds=0.3, device=None):
    """Time `fn(*args)`, for about `seconds` and five times at least; returns a `Timing` in seconds.

    A first call is not timed, so compilation and allocation are left out. `device` is "cpu" or "cuda"; by
    default it is where the tensors in `args` are, and where there are none, the GPU if this machine has one.

    On the GPU each call lies between two CUDA events, and a write of 256 MB before it empties the L2 cache:
    the method of triton.testing.do_bench. On the CPU calls are timed in blocks long enough for the clock,
    with all of torch's threads.
    """
    found = {t.device.type for t in pytree.tree_leaves(args) if isinstance(t, torch.Tensor)}
    default = "cuda" in found or (not found and torch.cuda.is_available())
    on_gpu = torch.device(device).type == "cuda" if device else default
    fn(*args)
    with no_gc():
        return summary(*(_on_gpu if on_gpu else _on_cpu)(lambda: fn(*args), seconds))


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
    low, median, high = numpy.quantile(samples, (0.2, 0.5, 0.8)).tolist()
    return Timing(median, low, high, runs)


def _on_cpu(call, seconds):
    timer, block = timeit.Timer(call), 1
    # A block lasts 50 µs or more: the clock and the loop then cost less than one part in a hundred.
    while (took := min(timer.repeat(2, block))) < 5e-5:
        block *= 2
    n = min(MOST, max(FEWEST, int(seconds / took)))
    return [s / block for s in timer.repeat(n, block)], n * block


def _on_gpu(call, seconds):
    # Several times the largest L2 cache.
    cache = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")

    def runs(n):
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(n)]
        for start, end in events:
            cache.zero_()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e-3 for start, end in events]

    torch.cuda.synchronize()
    begin = clock.perf_counter()
    samples = runs(FEWEST)
    each = (clock.perf_counter() - begin) / FEWEST  # with the flush, which takes its part of `seconds`
    n = min(MOST, int(0.8 * seconds / each))
    if n >= FEWEST:
        runs(n // 4)  # warms up
        samples = runs(n)
    return samples, len(samples)

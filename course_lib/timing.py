"""One stopwatch, right on the CPU and on the GPU: `time` for one function, `compare` for several by turns."""

import contextlib
import gc
import itertools
import math
import time as clock
import timeit
from typing import NamedTuple

import torch
from torch.utils import _pytree as pytree

FEWEST, MOST = 5, 10_000  # samples, however slow or fast a function is
CACHE = 256 << 20  # bytes, several times the largest L2 cache
SAMPLE = 5e-3  # seconds of one sample in `compare`


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
    """Time `fn(*args)`; returns a `Timing` in seconds.

    `fn` is called without being timed first, so compilation and allocation are left out. Then it is called
    for about `seconds`, and five times at least. `device` is "cpu" or "cuda"; by default it is where the
    tensors in `args` are, and where there are none, the GPU if this machine has one.

    On the GPU each call lies between two CUDA events, and a write of 256 MB before it empties the L2 cache:
    the method of triton.testing.do_bench. On the CPU calls are timed in blocks long enough for the clock,
    with all of torch's threads.
    """
    on_gpu = torch.device(device or _where(args)).type == "cuda"
    fn(*args)
    with no_gc():
        return summary(*(_on_gpu if on_gpu else _on_cpu)(lambda: fn(*args), seconds))


def compare(contenders, make=tuple, *, seconds=0.3):
    """Time functions of one set of inputs, {label: function}, by turns; returns {label: Timing}.

    `make()` gives a set of inputs, a tuple. It is called until the sets together are larger than the cache.
    Each call takes the next set, so none finds its input there. Turns are short, since a GPU that grows warm
    slows down. On a GPU the calls are recorded in a CUDA graph and replayed: the time is that of the kernels,
    without the Python that launches them. RuntimeError where a function waits for the GPU.
    """
    stream = torch.cuda.Stream() if torch.cuda.is_available() else None
    samples, turns = {label: [] for label in contenders}, {}
    if stream:
        torch.cuda.synchronize()  # what the inputs are made from is ready
    with no_gc(), torch.cuda.stream(stream):  # for the inputs too: a backward pass runs where its forward ran
        sets = [make()]
        nbytes = sum(t.nbytes for t in pytree.tree_leaves(sets) if isinstance(t, torch.Tensor))
        sets += [make() for _ in range(min(255, math.ceil(CACHE / nbytes)) if nbytes else 0)]
        for label, fn in contenders.items():
            run, calls = _graph(fn, sets, stream) if _where(sets) == "cuda" else _loop(fn, sets)
            run(1)  # a first replay loads the graph
            took = run(1)
            turns[label] = run, calls, max(1, round(SAMPLE / took)), took
        longest = max(took * (n + 1) for _, _, n, took in turns.values())
        rounds = min(100, max(FEWEST, math.ceil(seconds / longest)))
        for _, (label, (run, calls, n, _)) in itertools.product(range(rounds), turns.items()):
            run(1)  # the contender before left its mark on caches and clocks
            samples[label].append(run(n) / (n * calls))
    return {label: summary(s, rounds * turns[label][1] * turns[label][2]) for label, s in samples.items()}


def _where(args):
    found = {t.device.type for t in pytree.tree_leaves(args) if isinstance(t, torch.Tensor)}
    return "cuda" if "cuda" in found or (not found and torch.cuda.is_available()) else "cpu"


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


def _on_cpu(call, seconds):
    timer, block = timeit.Timer(call), 1
    # A block lasts 50 µs or more: the clock and the loop then cost less than one part in a hundred.
    while (took := min(timer.repeat(2, block))) < 5e-5:
        block *= 2
    n = min(MOST, max(FEWEST, int(seconds / took)))
    return [s / block for s in timer.repeat(n, block)], n * block


def _on_gpu(call, seconds):
    cache = torch.empty(CACHE, dtype=torch.uint8, device="cuda")

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


def _loop(fn, sets):
    "A function of n: seconds for n passes over the sets; and the calls in a pass."
    return (lambda n: timeit.timeit(lambda: [fn(*each) for each in sets], number=n)), len(sets)


def _graph(fn, sets, stream):
    "A function of n: seconds for n replays of a CUDA graph of calls; and the calls in the graph."
    fn(*sets[0])  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        fn(*sets[0])  # what waits is found here: a capture that breaks leaves torch's generator useless
    finally:
        torch.cuda.set_sync_debug_mode("default")
    took = timeit.timeit(lambda: (fn(*sets[0]), torch.cuda.synchronize()), number=3) / 3
    calls = len(sets) * math.ceil(min(20, SAMPLE / took) / len(sets))
    graph, kept = torch.cuda.CUDAGraph(), {}
    with torch.cuda.graph(graph, stream=stream):
        for i in range(calls):
            kept[i % len(sets)] = fn(
                *sets[i % len(sets)]
            )  # kept until its turn comes again: outputs rotate too

    def run(n):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(n):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3

    return run, calls

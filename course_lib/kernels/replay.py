"""Time kernels without the Python that launches them: many calls in a CUDA graph, replayed.

To launch a kernel from Python takes 10 to 100 µs, as long as a small kernel runs. Where each call is timed
between two events, a host that is slower than the GPU is counted as the kernel's time. A graph is recorded
once and replayed without the host. So all contenders of a comparison are timed alike:

- each is called on several sets of inputs in turn, larger together than the L2 cache: none finds its input
  there, and nothing need be flushed (what a flush writes is written back at the kernel's expense);
- they take turns, a few milliseconds each, since a GPU that grows warm slows down;
- a sample is the time of some hundred calls one after another, and the result is the median of samples.

    time_all({"cuBLAS": torch.mm, "ours": matmul.matmul}, make)     make() gives one set of inputs
    {"cuBLAS": Timing(...), "ours": Timing(...)}

What a call costs the host is another question: `host_seconds`.
"""

import contextlib
import itertools
import math
import time as clock
from typing import NamedTuple

import torch
from torch.utils import _pytree as pytree

from course_lib.timing import no_gc, summary

ROTATED = 256 << 20  # bytes of all sets together, several times the largest L2 cache
MOST_SETS = 256
CALLS = 20  # in a graph at least, unless calls are slow
SAMPLE = 5e-3  # seconds of GPU time in one sample
FEWEST, MOST = 5, 100  # samples


class Prepared(NamedTuple):
    """A contender with a part that isn't timed: `prepare(*inputs)` gives the function that is.

    A backward pass, say, whose forward pass is in `prepare`.
    """

    prepare: object


class Graph(NamedTuple):
    "A captured contender, and how many of its calls one replay makes."

    graph: torch.cuda.CUDAGraph
    calls: int


class Turns:
    "As many sets of inputs from `make` as fill the cache several times, and what is timed on them."

    def __init__(self, make=tuple):
        first = make()
        nbytes = sum(t.nbytes for t in pytree.tree_leaves(first) if isinstance(t, torch.Tensor))
        n = min(MOST_SETS, max(2, math.ceil(ROTATED / nbytes))) if nbytes else 1
        self.sets = [first, *(make() for _ in range(n - 1))]
        self.stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()
        # A graph that lives as long as this, for a pool of memory dies with its last graph.
        self._first = self.capture(lambda *inputs: torch.zeros(1, device="cuda"))

    def capture(self, fn):
        "A `Graph` of calls of `fn`, a function of one set of inputs or a `Prepared`. It must not wait."
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream), no_gc():
            if isinstance(fn, Prepared):
                calls = [fn.prepare(*each) for each in self.sets]
            else:
                calls = [lambda each=each: fn(*each) for each in self.sets]
            each = max(self._warm(calls), 1e-6)
            count = min(CALLS, max(4, math.ceil(SAMPLE / each)))
            count = math.ceil(count / len(calls)) * len(calls)
            torch.cuda.synchronize()
            graph, kept = torch.cuda.CUDAGraph(), {}
            graph.capture_begin(pool=self._pool)
            try:
                for i in range(count):
                    # Kept until its turn comes again, so that outputs take turns too.
                    kept[i % len(calls)] = calls[i % len(calls)]()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the capture is broken, and the cause is raised
                    graph.capture_end()
                _forget_capture(self._pool)
                raise
            graph.capture_end()
        return Graph(graph, count)

    def _warm(self, calls):
        "Seconds for one call, the host's included. Compilation and autograd's threads need some calls first."
        for call in itertools.islice(itertools.cycle(calls), 3):
            call()
        torch.cuda.synchronize()
        begin = clock.perf_counter()
        for call in itertools.islice(itertools.cycle(calls), 3):
            call()
        torch.cuda.synchronize()
        return (clock.perf_counter() - begin) / 3

    def measure(self, graphs, seconds=0.3):
        "{label: Timing} of one call, for `graphs` {label: Graph} that take turns; about `seconds` for each."
        samples, replays, rounds = {label: [] for label in graphs}, {}, FEWEST
        with torch.cuda.stream(self.stream), no_gc():
            for label, graph in graphs.items():
                self._sample(graph, 1)  # a first replay loads the graph
                took = self._sample(graph, 1) * graph.calls
                replays[label] = max(1, round(SAMPLE / took))
                # A sample, and the untimed replay before it.
                each = took * (replays[label] + 1)
                rounds = max(rounds, min(MOST, math.ceil(seconds / each)))
            for _ in range(rounds):
                for label, graph in graphs.items():
                    graph.graph.replay()  # the contender before left its mark on caches and clocks
                    samples[label].append(self._sample(graph, replays[label]))
        return {
            label: summary(samples[label], rounds * replays[label] * graphs[label].calls) for label in graphs
        }

    def _sample(self, graph, replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(replays):
            graph.graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3 / (replays * graph.calls)


def _forget_capture(pool):
    "Let torch's generator know that the capture is over: a broken one leaves it waiting for more."
    with contextlib.suppress(RuntimeError):
        empty = torch.cuda.CUDAGraph()
        empty.capture_begin(pool=pool)
        torch.zeros(1, device="cuda")
        empty.capture_end()


def time_all(contenders, make=tuple, *, seconds=0.3):
    """Time `contenders` ({label: function of a set of inputs, or `Prepared`}) on a GPU; {label: Timing}.

    `make()` gives one set of inputs, a tuple; it is called until the sets fill the cache several times. About
    `seconds` of measurement for each contender. A contender may not wait for the GPU (`.item()`, say): a
    graph can't hold it, and torch's error comes back.
    """
    turns = Turns(make)
    return turns.measure({label: turns.capture(fn) for label, fn in contenders.items()}, seconds)


def host_seconds(fn, *args, calls=200):
    "Seconds of the host for one call of `fn(*args)`, as it only enqueues; the GPU's part must be shorter."
    for _ in range(5):
        fn(*args)
    samples = []
    with no_gc():
        for _ in range(5):
            torch.cuda.synchronize()
            begin = clock.perf_counter()
            for _ in range(calls):
                fn(*args)
            samples.append((clock.perf_counter() - begin) / calls)
    torch.cuda.synchronize()
    return sorted(samples)[2]

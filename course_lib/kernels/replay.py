"""Time kernels without the Python that launches them: many calls in a CUDA graph, replayed.

Between two events a host that is slower than the GPU (a launch takes 10 to 100 µs) is counted as the kernel's
time. A graph is recorded once and replayed without the host. All contenders of a comparison are timed alike:

- each is called on several sets of inputs in turn, larger together than the L2 cache: none finds its input
  there, and nothing need be flushed (what a flush writes is written back at the kernel's expense);
- they take turns, a few milliseconds each, since a GPU that grows warm slows down;
- a sample is the time of some hundred calls one after another, and the result is the median of samples.
"""

import math
import time as clock
import warnings
from typing import NamedTuple

import torch
from torch.utils import _pytree as pytree

from course_lib.timing import no_gc, summary

ROTATED = 256 << 20  # bytes of all sets together, several times the largest L2 cache
CALLS = 20  # in a graph at least, unless calls are slow
SAMPLE = 5e-3  # seconds of GPU time in one sample
FEWEST, MOST = 5, 100  # samples


class Prepared(NamedTuple):
    prepare: object  # a function of the inputs that isn't timed, a forward pass, say, and gives what is


def time_all(contenders, make=tuple, *, seconds=0.3):
    """Time `contenders` ({label: function of a set of inputs, or `Prepared`}) on a GPU: {label: Timing}.

    `make()` gives one set of inputs, a tuple; it is called until the sets fill the cache several times. About
    `seconds` of measurement for each contender. A contender may not wait for the GPU (`.item()`, say):
    torch's error about it is raised.
    """
    first = make()
    nbytes = sum(t.nbytes for t in pytree.tree_leaves(first) if isinstance(t, torch.Tensor))
    n = min(256, max(2, math.ceil(ROTATED / nbytes))) if nbytes else 1
    sets = [first, *(make() for _ in range(n - 1))]
    with torch.cuda.stream(torch.cuda.Stream()), no_gc():
        graphs = {label: _capture(fn, sets) for label, fn in contenders.items()}
        return _by_turns(graphs, seconds)


def _capture(fn, sets):
    "(a CUDA graph of calls of `fn` on the sets in turn, the number of calls)"
    torch.cuda.synchronize()
    if isinstance(fn, Prepared):
        calls = [fn.prepare(*each) for each in sets]
    else:
        calls = [lambda each=each: fn(*each) for each in sets]
    for i in range(3):  # compilation and autograd's threads need some calls first
        calls[i % len(calls)]()
    torch.cuda.synchronize()
    begin = clock.perf_counter()
    for i in range(3):
        calls[i % len(calls)]()
    torch.cuda.synchronize()
    each = max((clock.perf_counter() - begin) / 3, 1e-6)
    _must_not_wait(calls[0])
    count = min(CALLS, max(4, math.ceil(SAMPLE / each)))
    count = math.ceil(count / len(calls)) * len(calls)
    graph, kept = torch.cuda.CUDAGraph(), {}
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for i in range(count):
            # Kept until its turn comes again, so that outputs take turns too.
            kept[i % len(calls)] = calls[i % len(calls)]()
    return graph, count


def _must_not_wait(call):
    "Raise torch's error where a call waits for the GPU: a capture that breaks would spoil torch's generator."
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    torch.cuda.synchronize()


def _by_turns(graphs, seconds):
    "{label: Timing} of one call, for graphs that take turns; about `seconds` for each."
    samples, replays, rounds = {label: [] for label in graphs}, {}, FEWEST
    for label, (graph, _) in graphs.items():
        _, took = _sample(graph, 1), _sample(graph, 1)  # a first replay loads the graph
        replays[label] = max(1, round(SAMPLE / took))
        # A sample, and the untimed replay before it.
        rounds = max(rounds, min(MOST, math.ceil(seconds / (took * (replays[label] + 1)))))
    for _ in range(rounds):
        for label, (graph, calls) in graphs.items():
            graph.replay()  # the contender before left its mark on caches and clocks
            samples[label].append(_sample(graph, replays[label]) / calls)
    return {label: summary(samples[label], rounds * replays[label] * graphs[label][1]) for label in graphs}


def _sample(graph, replays):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3 / replays

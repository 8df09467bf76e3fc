"""Finds steps that took unusually long, in a stream of step times that are noisy and drift."""

import collections
import itertools
import statistics


class SlowSteps:
    """Call it with each step's seconds, in order; True where the step was unusually slow.

    A step is slow when it is longer than the median of the last `window` steps by `threshold` times their
    spread, which is the median distance from that median, times 1.4826 (for gaussian noise that is the
    standard deviation), and by a part `least` of the median: where the noise is small, so may be what stands
    out. A few slow steps among them, or a first one that compiles, move no median.
    The first `warmup` calls are not looked at, and the next `window` only set the level. Keeps `window`
    numbers. ValueError for a window below 4 or a time that is not a number.
    Method: the Hampel filter (F. R. Hampel, "The influence curve and its role in robust estimation", 1974).
    """

    def __init__(self, window=50, warmup=20, threshold=8.0, least=0.2):
        if window < 4:
            raise ValueError(f"window is {window}; a level needs 4 steps or more")
        self.window, self.warmup, self.threshold, self.least = window, warmup, threshold, least
        self.recent = collections.deque(maxlen=window)
        self.calls = 0

    def __call__(self, seconds):
        if not seconds >= 0:
            raise ValueError(f"a step took {seconds} seconds; expected a number of seconds, 0 or more")
        self.calls += 1
        if self.calls <= self.warmup:
            return False
        slow = False
        if len(self.recent) == self.window:
            level = statistics.median(self.recent)
            spread = 1.4826 * statistics.median(abs(t - level) for t in self.recent)
            slow = seconds > level + max(self.threshold * spread, self.least * level)
        self.recent.append(seconds)
        return slow


def step_seconds(step, n, device):
    """Seconds of each of `n` calls of `step`, one after the other without a sync between them.

    On a GPU the clock is the GPU's own, read at the end from an event recorded after each step.
    """
    import time

    import torch

    if torch.device(device).type != "cuda":
        marks = [time.perf_counter()]
        for _ in range(n):
            step()
            marks.append(time.perf_counter())
        return [b - a for a, b in itertools.pairwise(marks)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(n + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) * 1e-3 for a, b in itertools.pairwise(events)]


def series(n=1000, noise=0.05, drift=0.0, slow=(), times=2.0, seed=0):
    """Made-up step times in seconds around 10 ms: warm-up, gaussian noise, drift, planted slow steps.

    The first ten steps are up to 30 times too long. `drift` is the level's relative change from the first
    step to the last; the steps numbered in `slow` take `times` as long as their neighbours.
    """
    import random

    draw = random.Random(seed)
    slow = set(slow)
    found = []
    for i in range(n):
        level = 0.01 * (1 + drift * i / n) * (1 + 30 * 0.4**i if i < 10 else 1)
        value = level * (1 + noise * max(-3.0, min(3.0, draw.gauss(0, 1))))
        found.append(value * (times if i in slow else 1))
    return found

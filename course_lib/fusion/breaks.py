"Functions that break their graph or are compiled again and again, and their corrected versions."

import math

import torch
from torch import nn

from course_lib.meter.compiling import quiet  # noqa: F401

# --- a function with four breaks, corrected -----------------------------------------


def standardise(x, limit):
    """Rows made comparable, and how large they were: (y [n, d], the largest absolute value of x).

    The corrected version: one graph, and Python never waits. `x` is [n, d]; `limit` is a number.
    """
    peak = x.abs().max()
    x = torch.where(x.mean() > limit, x - x.mean(0), x)
    y = x / (1 + x.std())
    gain = torch.where(y > 0, y, 0).sum()
    return y * gain, peak


# --- a module that is compiled again and again, corrected ---------------------------


class Centre(nn.Module):
    """Takes the mean of all batches seen so far from a batch, shrinks it and scales it.

    The corrected version. Takes x [n, width], how often to shrink by a tenth, and a temperature above 0. All
    batches weigh the same in the running mean, this one included.
    """

    def __init__(self, width):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x, repeats, temperature):
        self.calls += 1
        self.mean += (x.mean(0) - self.mean) / self.calls
        return (x - self.mean) * 0.9**repeats * torch.full((), temperature).log()


class _Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x / self.calls


def _loop(x, n):
    for _ in range(n):
        x = 0.9 * x
    return x


def changing(calls=10):
    """Ten ways in which something differs from call to call: {what: (fn, calls, options)} for
    `meter.compiled`.

    Numbers start at 2: sizes and numbers 0 and 1 are special to Dynamo, and get graphs of their own.
    """
    x, some = torch.randn(6, 7), range(2, calls + 2)
    rows = [(torch.randn(n, 7),) for n in some]
    return {
        "a float argument": (lambda x, s: x * s, [(x, 0.3 * n) for n in some], {}),
        "an int argument": (lambda x, n: x * n, [(x, n) for n in some], {}),
        "an int that is looped over": (_loop, [(x, n) for n in some], {}),
        "a float in math.log": (lambda x, s: x * math.log(s), [(x, 0.3 * n) for n in some], {}),
        "a string that isn't used": (lambda x, name: 2 * x, [(x, f"step {n}") for n in some], {}),
        "a list that grows": (lambda xs: torch.stack(xs).mean(0), [([x] * n,) for n in some], {}),
        "a counter in a module": (_Counting(), [(x,) for _ in some], {}),
        "rows of x": (lambda x: 2 * x, rows, {}),
        "rows of x, dynamic=False": (lambda x: 2 * x, rows, {"dynamic": False}),
        "rows of x, dynamic=True": (lambda x: 2 * x, rows, {"dynamic": True}),
    }

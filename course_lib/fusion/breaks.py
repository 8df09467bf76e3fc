"""Functions that break their graph or are compiled again and again, mended; and a witness who counts both.

`meter.compiled` reads Dynamo's own counters. `trace` is independent of them: a backend that compiles nothing
keeps the graphs that Dynamo hands it, and each graph says why it ended. It needs neither a C++ compiler nor a
GPU, takes a fraction of a second, and keeps the results, so the checks use it.
"""

import contextlib
import logging
import math
import warnings
from typing import NamedTuple

import torch
from torch import nn

# The first words of Dynamo's reasons, in words of ours.
REASONS = {
    "generic_jump": "a branch on a tensor's value",
    "Data-dependent branching": "a branch on a tensor's value",
    "Unsupported Tensor.item()": "a tensor's value as a Python number",
    "Dynamic shape operator": "a shape that depends on values",
    "Failed to trace builtin operator": "a call that can't be traced (print)",
}


class Break(NamedTuple):
    "A graph break: why, and the line of code at which the graph ended."

    reason: str
    line: str

    def __str__(self):
        return f"{self.reason:<38}{self.line}".rstrip()


class Traced(NamedTuple):
    """What came of calling a compiled function several times.

    `results` of each call · `graphs` handed to the backend after each call (a running total) · `ran`, how
    many graphs ran in each call (0: that call was eager) · `breaks` · `why`, the guards that failed and so
    led to a recompile.
    """

    results: list
    graphs: list
    ran: list
    breaks: list
    why: list


def trace(fn, calls, limit=64, **options):
    """Compile `fn` with a backend that only counts, and call it with each tuple of arguments in `calls`.

    `limit` is Dynamo's recompile limit, past which it gives up and runs the function eagerly. `options` go to
    torch.compile (`dynamic=`, `fullgraph=`). Values and shapes that depend on data are not captured, as is
    torch's default. Dynamo starts anew, and is reset afterwards. Raises what `fn` raises.
    """
    import torch._dynamo as dynamo
    from torch._dynamo import utils

    if not callable(fn):
        raise TypeError(f"trace takes a function, and was given a {type(fn).__name__}: pass it uncalled")
    graphs, ran = [], [0]

    def backend(graph, inputs):
        graphs.append(graph)

        def run(*args):
            ran[0] += 1
            return graph.forward(*args)

        return run

    settings = {"recompile_limit": limit, "capture_scalar_outputs": False,
                "capture_dynamic_output_shape_ops": False}  # fmt: skip
    out = Traced([], [], [], [], [])
    dynamo.reset()
    known = sum(map(len, utils.guard_failures.values()))
    try:
        with dynamo.config.patch(**settings), quiet():
            compiled = torch.compile(fn, backend=backend, **options)
            for args in calls:
                ran[0] = 0
                out.results.append(compiled(*args))
                out.graphs.append(len(graphs))
                out.ran.append(ran[0])
        failed = [f for found in utils.guard_failures.values() for f in found]
        out.why.extend(dict.fromkeys(map(_guard, failed[known:])))
    finally:
        dynamo.reset()
    out.breaks.extend(b for g in graphs if (b := _break(g)) is not None)
    return out


@contextlib.contextmanager
def quiet():
    "The warnings of torch's compiler are switched off: they carry times, and say what is counted anyway."
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def _break(graph):
    "Why this graph ended before the function did, or None."
    why = getattr(graph, "compile_subgraph_reason", None)
    if why is None or not why.graph_break:
        return None
    first = why.reason.strip().splitlines()[0]
    line = why.user_stack[-1].line if why.user_stack else ""
    return Break(
        next((said for k, said in REASONS.items() if first.startswith(k)), first), (line or "").strip()
    )


def _guard(text):
    "'0/0: n == 2   # for _ in range(n)  # file' becomes 'n == 2'."
    text = text.splitlines()[0]
    text = text.split(": ", 1)[1] if text[:1].isdigit() and ": " in text else text
    return text.split("  #")[0].strip()


# --- a function with four breaks, and mended ----------------------------------------


def standardise(x, limit):
    """Rows made comparable, and how large they were: (y [n, d], the largest absolute value of x).

    The mended version: one graph, and Python never waits. `x` is [n, d]; `limit` is a number.
    """
    peak = x.abs().max()
    x = torch.where(x.mean() > limit, x - x.mean(0), x)
    y = x / (1 + x.std())
    gain = torch.where(y > 0, y, 0).sum()
    return y * gain, peak


# --- a module that is compiled again and again, and mended --------------------------


class Centre(nn.Module):
    """Takes the mean of all batches seen so far from a batch, shrinks it and scales it.

    The mended version. Takes x [n, width], how often to shrink by a tenth, and a temperature above 0. All
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
    """Ten ways in which something differs from call to call: {what: (fn, calls, options)} for `trace`.

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

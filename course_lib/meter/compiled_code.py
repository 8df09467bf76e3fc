"""Counts what torch.compile made of a function. `meter.compiled` is this module's `compiled`.

    c = meter.compiled(fn, x, y)
    c.kernels, c.bytes                # as Inductor counts them; None under another backend
    c.graphs                          # graphs that were captured and compiled
    c.breaks                          # each a Break(reason, where), where as "file.py:12" or "cell:3"
    c.recompiles                      # each a Recompile(guard, where): the guard that failed
    c.limited                         # the recompile limit was passed: calls after that ran eagerly
    c.eager                           # the calls, by number from 0, in which no compiled graph ran at all

    meter.compiled(fn, x, then=[(y,), (z,)])                 # three calls, one after another
    meter.compiled(fn, x, backend="eager")                   # breaks and recompiles, without a compiler

The numbers are Dynamo's and Inductor's own. Counting is a call by itself, from a clean slate: Dynamo is reset
before and after, so code that was compiled earlier is compiled anew when it is next called, and its counters
are put back. What is counted can't be counted by `meter.count`, under which compiled code runs eagerly.

The first compilation of a process on a CPU takes some 20 s, since it builds C++. Graph breaks and recompiles
are found before that: `backend="eager"` finds them in milliseconds, and leaves `kernels` and `bytes` None.
"""

import contextlib
import functools
import io
import logging
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch


class Break(NamedTuple):
    "Why Dynamo ended a graph, and at which line."

    reason: str
    where: str


class Recompile(NamedTuple):
    "The guard that failed, and the function that was compiled again."

    guard: str
    where: str


@dataclass
class Compiled:
    "What torch.compile made of a function in some calls."

    calls: int
    backend: str
    kernels: int | None = None
    bytes: int | None = None
    graphs: int = 0
    breaks: list = field(default_factory=list)
    recompiles: list = field(default_factory=list)
    limited: bool = False
    eager: list = field(default_factory=list)

    def __str__(self):
        lines = [", ".join(_many(n, word) for n, word in (
            (self.kernels, "kernel"), (self.graphs, "graph"), (len(self.breaks), "graph break"),
            (len(self.recompiles), "recompile")) if n is not None)]  # fmt: skip
        if self.bytes is not None:
            lines[0] += f", {self.bytes:,} bytes"
        lines += [f"break at {b.where}: {b.reason}" for b in self.breaks]
        lines += [f"recompiled {r.where}: {r.guard}" for r in self.recompiles]
        if self.limited:
            lines.append("recompile limit passed: what came after ran eagerly and is not a compiled result")
        if self.eager:
            lines.append(f"no compiled code ran in {_many(len(self.eager), 'call')} of {self.calls}")
        return "\n".join(lines)


def _many(n, word):
    return f"{n:,} {word}{'s' * (n != 1)}"


def compiled(fn, *args, then=(), backend="inductor", dynamic=None, limit=None, **kwargs):
    """Compile `fn`, call it with `args` and `kwargs`, then with each tuple of `then`; returns `Compiled`.

    `fn` is a function or module, compiled or not; what it changes in place is changed. `dynamic` is
    torch.compile's. `limit` replaces Dynamo's recompile limit (8). Inductor counts for a loop nest on the CPU
    what is a kernel on a GPU, and its bytes are those that its kernels read and write.
    """
    if not callable(fn):
        raise TypeError(
            f"compiled takes a function and its arguments, and was given a {type(fn).__name__}: "
            "pass the function itself, without calling it"
        )
    then = [one if isinstance(one, tuple) else (one,) for one in then]
    fn = _original(fn)
    found = Compiled(
        1 + len(then), backend if isinstance(backend, str) else getattr(backend, "__name__", "?")
    )
    counts = Counter()
    with _quiet() as logged, _clean_slate(counts) as utils, _limit(limit):
        run = torch.compile(fn, backend=_counting(backend, counts), dynamic=dynamic)
        for number, given in enumerate([args, *then]):
            before = counts["runs"]
            run(*given, **(kwargs if number == 0 else {}))
            if counts["runs"] == before:
                found.eager.append(number)
        _read(found, utils, counts, logged)
    return found


def _original(fn):
    "The function or module that torch.compile was given."
    if isinstance(fn, torch.nn.Module):
        fn = getattr(fn, "_orig_mod", fn)
        return fn.forward if getattr(fn, "_compiled_call_impl", None) else fn
    if isinstance(fn, functools.partial):
        return functools.partial(_original(fn.func), *fn.args, **fn.keywords)
    return getattr(fn, "_torchdynamo_orig_callable", fn)


def _counting(backend, counts):
    "The backend, which also counts how many graphs it compiles and how often one runs."
    inductor = backend == "inductor"
    if inductor:
        from torch._inductor.compile_fx import compile_fx as build
    elif isinstance(backend, str):
        from torch._dynamo.backends.registry import lookup_backend

        build = lookup_backend(backend)
    else:
        build = backend

    def count(graph, inputs):
        counts["graphs"] += 1
        made = build(graph, inputs)

        @functools.wraps(made, updated=())
        def run(*args):
            counts["runs"] += 1
            return made(*args)

        return run

    count.inductor = inductor
    return count


@contextlib.contextmanager
def _limit(limit):
    from torch._dynamo import config

    name = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"
    with config.patch({name: limit}) if limit is not None else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _clean_slate(counts):
    "Dynamo and Inductor as in a new process, their counters empty; afterwards the counters are put back."
    import torch._dynamo
    from torch._dynamo import utils

    with contextlib.ExitStack() as after:
        after.enter_context(_emptied(utils))
        after.enter_context(_inductor_counts(counts))
        after.callback(torch._dynamo.reset)  # before all is put back, for it empties some of it
        torch._dynamo.reset()
        yield utils


@contextlib.contextmanager
def _emptied(utils):
    kept = {key: Counter(value) for key, value in utils.counters.items()}
    reasons = list(utils.graph_break_reasons)
    metrics, room = list(utils._compilation_metrics), utils._compilation_metrics.maxlen
    utils.counters.clear()
    utils.graph_break_reasons.clear()
    utils.set_compilation_metrics_limit(100_000)  # the oldest are dropped beyond 64
    utils.clear_compilation_metrics()
    try:
        yield
    finally:
        utils.counters.clear()
        utils.counters.update(kept)
        utils.graph_break_reasons[:] = reasons
        utils.clear_compilation_metrics()
        utils.set_compilation_metrics_limit(room)
        utils._compilation_metrics.extend(metrics)


@contextlib.contextmanager
def _inductor_counts(counts):
    """Count Inductor's kernels and bytes into `counts`.

    Inductor knows its bytes once a graph is scheduled, and adds them up only for its own log; so they are
    asked for where it writes the code. Its caches are off: a graph found there is not scheduled again.
    """
    from torch._inductor import config, metrics
    from torch._inductor.graph import GraphLowering

    write = GraphLowering.codegen

    @functools.wraps(write)
    def codegen(self, *args, **kwargs):
        before = metrics.generated_kernel_count
        out = write(self, *args, **kwargs)
        counts["kernels"] += metrics.generated_kernel_count - before
        counts["bytes"] += int(self.count_bytes()[0])
        return out

    kept = {k: v for k, v in vars(metrics).items() if isinstance(v, int | float) and not k.startswith("__")}
    off = {"fx_graph_cache": False, "fx_graph_remote_cache": False}
    off = {k: v for k, v in off.items() if hasattr(config, k)}
    GraphLowering.codegen = codegen
    try:
        with config.patch(off), _no_autograd_cache():
            yield
    finally:
        GraphLowering.codegen = write
        for name, value in kept.items():
            setattr(metrics, name, value)


@contextlib.contextmanager
def _no_autograd_cache():
    from torch._functorch import config

    has = hasattr(config, "enable_autograd_cache")
    with config.patch(enable_autograd_cache=False) if has else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _quiet():
    "Keep torch's warnings from the screen; gives the list of what its loggers said."
    logged = []

    def keep(record):
        logged.append(record.getMessage())
        return record.levelno >= logging.ERROR

    loggers = [log for name, log in logging.root.manager.loggerDict.items()
               if name.split(".")[0] == "torch" and isinstance(log, logging.Logger)]  # fmt: skip
    handlers = {h for log in [*loggers, logging.root] for h in log.handlers}
    for handler in handlers:
        handler.addFilter(keep)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield logged
    finally:
        for handler in handlers:
            handler.removeFilter(keep)


def _read(found, utils, counts, logged):
    found.graphs = counts["graphs"]
    if found.backend == "inductor":
        found.kernels, found.bytes = counts["kernels"], counts["bytes"]
    breaks = {}  # by place, since a function that was inlined first breaks at the same place once more
    for r in utils.graph_break_reasons:
        frame = next((f for f in reversed(r.user_stack) if not f.filename.startswith(_TORCH)), None)
        at = frame and (frame.filename, frame.lineno, getattr(frame, "colno", None))
        breaks.setdefault(at, Break(_reason(r.reason), _place(*at[:2]) if at else "torch"))
    for m in utils.get_compilation_metrics():
        failed, why = getattr(m, "fail_type", None), getattr(m, "recompile_reason", None)
        place = _place(m.co_filename, m.co_firstlineno)
        if failed is None and why is not None:
            found.recompiles.append(Recompile(_guard(why), place))
        elif failed is not None and _passed_the_limit(m.fail_reason or ""):
            found.limited = True
        elif failed is not None and "no content" not in (m.fail_reason or ""):
            # A break within a loop or a `with`: no part of the function is compiled.
            at = m.fail_user_frame_filename, m.fail_user_frame_lineno
            known = {key[:2] for key in breaks if key}
            if at not in known:
                breaks[at] = Break(_reason(m.fail_reason or failed), _place(*at) if at[1] else place)
    found.breaks = list(breaks.values())
    found.limited |= any(map(_passed_the_limit, logged))


def _passed_the_limit(text):
    first = _first_line(text)
    return ("hit config." in first or "exceeded" in first or "reached" in first) and "limit" in first


def _first_line(text):
    return (text.strip().splitlines() or [""])[0]


def _reason(text):
    "A reason in one line; a jump that depends on a tensor has two names."
    first = _first_line(text)
    return "Data-dependent branching" if first.startswith("generic_jump") else first


def _guard(why):
    "The guard of a recompile reason: without the compile id before it and the source line behind it."
    head, _, rest = why.partition(": ")
    guard = rest if head.replace("/", "").isdigit() else why
    return _first_line(guard).split("  # ")[0].strip()


_TORCH = str(Path(torch.__file__).parent)


def _place(path, line):
    if path is None:
        return "?"
    in_cell = "ipykernel_" in path or path.startswith("<ipython-input")
    return f"{'cell' if in_cell else Path(path).name}:{line}"

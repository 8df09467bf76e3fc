"""What torch.compile makes of a function: graphs, graph breaks, recompiles, kernels.

    c = meter.compiled(fn, x, y)
    c.kernels, c.bytes                # as Inductor counts them; None under another backend
    c.graphs                          # graphs that were captured and compiled
    c.breaks                          # each a Break(reason, where, code), where as "file.py:12" or "cell:3"
    c.recompiles                      # each a Recompile(guard, where): the guard that failed
    c.limited                         # the recompile limit was passed: calls after that ran eagerly
    c.eager                           # the calls, by number from 0, in which no compiled graph ran at all
    c.results                         # what each call returned

    meter.compiled(fn, x, then=[(y,), (z,)])                 # three calls, one after another
    meter.compiled(fn, x, backend="eager")                   # breaks and recompiles, without a compiler

A backend counts the graphs that Dynamo gives it and the calls of each. The reasons are Dynamo's own, and the
kernels and bytes are Inductor's. Dynamo is reset before and after: code that was compiled before is compiled
again at its next call. `meter.count` can't count compiled code, which runs eagerly under it.

A process's first compilation on a CPU takes some 20 s, since it builds C++. `backend="eager"` finds graph
breaks and recompiles in milliseconds, and leaves `kernels` and `bytes` None.
"""

import contextlib
import linecache
import logging
import re
import traceback
import warnings
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import torch

from course_lib.meter.counting import TORCH, many, place


class Break(NamedTuple):
    "Why Dynamo ended a graph, at which line, and the line's code."

    reason: str
    where: str
    code: str


class Recompile(NamedTuple):
    "The guard that failed, and the function that was compiled again."

    guard: str
    where: str


@dataclass
class Compiled:
    "What torch.compile made of a function in some calls. `totals` and `ran` are explained at their lines."

    kernels: int | None = None
    bytes: int | None = None
    breaks: list = field(default_factory=list)
    recompiles: list = field(default_factory=list)
    limited: bool = False
    totals: list = field(default_factory=list)  # after each call, the graphs compiled so far
    ran: list = field(default_factory=list)  # in each call, how many graphs ran
    results: list = field(default_factory=list, compare=False)

    calls = property(lambda self: len(self.ran))
    graphs = property(lambda self: self.totals[-1])
    eager = property(lambda self: [number for number, n in enumerate(self.ran) if not n])

    def __str__(self):
        counts = [(self.kernels, "kernel"), (self.graphs, "graph"), (len(self.breaks), "graph break"),
                  (len(self.recompiles), "recompile")]  # fmt: skip
        lines = [", ".join(many(n, word) for n, word in counts if n is not None)]
        lines[0] += "" if self.bytes is None else f", {self.bytes:,} bytes"
        lines += [f"break at {b.where}: {b.reason}" for b in self.breaks]
        lines += [f"recompiled {r.where}: {r.guard}" for r in self.recompiles]
        if self.limited:
            lines.append("recompile limit passed: what came after ran eagerly and is not a compiled result")
        if self.eager:
            lines.append(f"no compiled code ran in {many(len(self.eager), 'call')} of {self.calls}")
        return "\n".join(lines)


def compiled(fn, *args, then=(), backend="inductor", dynamic=None, limit=None, **kwargs):
    """Compile `fn`, call it with `args` and `kwargs`, then with each tuple of `then`; returns `Compiled`.

    `fn` is a function or module, compiled or not; what it changes in place is changed. `dynamic` is
    torch.compile's. `limit` replaces Dynamo's recompile limit (8). Inductor counts for a loop nest on the CPU
    what is a kernel on a GPU, and its bytes are those that its kernels read and write.
    """
    import torch._dynamo as dynamo
    from torch._dynamo import utils

    found, compilations = Compiled(), []
    build = dynamo.lookup_backend(backend) if isinstance(backend, str) else backend
    # The function or module that was compiled before.
    fn = getattr(fn, "_orig_mod", None) or getattr(fn, "_torchdynamo_orig_callable", fn)
    fn = fn.forward if getattr(fn, "_compiled_call_impl", None) else fn

    def counting(graph, inputs):
        found.totals[-1] += 1
        made = build(graph, inputs)

        def run(*args):
            found.ran[-1] += 1
            return made(*args)

        return run

    inductor = _inductor_metrics() if backend == "inductor" else contextlib.nullcontext()
    config = dynamo.config.patch(recompile_limit=limit or dynamo.config.recompile_limit)
    with quiet(), config, inductor as metrics, contextlib.ExitStack() as stack:
        stack.callback(dynamo.reset)
        dynamo.reset()
        utils.clear_compilation_metrics()
        run = torch.compile(fn, backend=counting, dynamic=dynamic)
        for given in [args, *then]:
            found.totals.append(sum(found.totals[-1:]))
            found.ran.append(0)
            found.results.append(run(*given if isinstance(given, tuple) else (given,), **kwargs))
            kwargs = {}  # those of the first call
            compilations += utils.get_compilation_metrics()  # torch keeps the last 64
            utils.clear_compilation_metrics()
        if metrics:
            found.kernels, found.bytes = metrics.generated_kernel_count, int(metrics.num_bytes_accessed)
        _explain(found, utils.graph_break_reasons, compilations)
    return found


@contextlib.contextmanager
def quiet():
    "Torch's warnings are switched off: the compiler's carry times, and say what is counted anyway."
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(level)


@contextlib.contextmanager
def _inductor_metrics():
    "Inductor's metrics, from zero. Its caches are off, since a graph found there is not counted."
    from torch._functorch import config as autograd_config
    from torch._inductor import compile_fx, config, metrics

    metrics.reset()
    # Inductor adds up its bytes only where its log of them is on.
    log = SimpleNamespace(isEnabledFor=lambda level: True, info=lambda *args: None)
    with (
        mock.patch.object(compile_fx, "inductor_metrics_log", log),
        config.patch(fx_graph_cache=False, fx_graph_remote_cache=False),
        autograd_config.patch(enable_autograd_cache=False),
    ):
        yield metrics


def _explain(found, reasons, compilations):
    "Add breaks and recompiles to `found`, each break once by its place and reason."
    breaks = {}  # a dict, for the order; torch 2.11 doesn't give the column
    for r in reasons:
        mine = [f for f in r.user_stack if not f.filename.startswith(TORCH)]
        frame = mine[-1] if mine else traceback.FrameSummary(TORCH, 0, "")
        breaks[frame.filename, frame.lineno, frame.colno, _reason(r.reason)] = None
    for m in compilations:
        why = m.fail_reason or ""
        if m.fail_type is None and m.recompile_reason is not None:
            # Such as "0/1: n == 2   # for _ in range(n)  # file".
            guard = re.sub(r"^[\d/]+: ", "", _reason(m.recompile_reason)).split("  # ")[0].strip()
            found.recompiles.append(Recompile(guard, place(m.co_filename, m.co_firstlineno)))
        elif "recompile limit" in why or "recompile_limit" in why:
            found.limited = True
        elif m.fail_type is not None and "no content" not in why:
            # A break within a loop or a `with`: no part of the function is compiled.
            at = m.fail_user_frame_filename, m.fail_user_frame_lineno
            at = (m.co_filename, m.co_firstlineno) if None in at else at
            if at not in {key[:2] for key in breaks}:
                breaks[*at, None, _reason(why or m.fail_type)] = None
    for path, line, _, reason in breaks:
        found.breaks.append(Break(reason, place(path, line), linecache.getline(path, line).strip()))


def _reason(text):
    "The first line. A jump that depends on a tensor has two names."
    return re.sub("^generic_jump.*", "Data-dependent branching", text.strip().partition("\n")[0])

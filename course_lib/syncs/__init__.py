"""What lesson syncs keeps out of its cells: the finder of syncs, a simulated queue, traces, made-up data.

`find` names the lines on which Python would wait for a GPU, on a machine that has none. `Queue` is a GPU's
queue with a virtual clock: the same program gives the same times on every machine. Its times are in µs.
"""

import contextlib
import json
import random
import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from course_lib import meter
from course_lib.meter import operators
from course_lib.meter.counting import WAITS

# --- Finding what waits -------------------------------------------------------------

# Off meter's portable list and known to go on; a word stands for every name that holds it.
GOES_ON = ("_foreach", "_fused_", "dropout", "bernoulli", "batch_norm", "group_norm", "scaled_dot_product",
           "bucketize", "searchsorted", "cummax", "cummin", "local_scalar_dense", "pool")  # fmt: skip
# On the list by name, but these forms read a tensor's values to learn a size or to check a range.
READING_FORMS = {("linspace", "Tensor"), ("normal", "Tensor"), ("normal", "float_Tensor")}


class _Unknown(TorchDispatchMode):
    "Collects the operators of which nobody here knows whether they wait."

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        op, form = operators.name(func), func._overloadname
        listed = op in operators.PORTABLE or op in WAITS or torch.Tag.pointwise in func.tags
        known = listed or operators.is_free(func) or any(word in op for word in GOES_ON)
        reads = any(op == name and form.startswith(start) for name, start in READING_FORMS)
        if func.namespace == "aten" and (reads or not known) and op not in self.names:
            self.names.append(op)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def counting():
    "Count what the block does: gives (`meter.Counts`, names of the operators that may wait or not)."
    # The outer mode sees what the inner one lets through, and hides no line of the learner from it.
    with _Unknown() as unknown, meter.count(portable=False) as counts:
        yield counts, unknown.names


class _Copies(TorchFunctionMode):
    "Counts copies from ordinary memory to torch's meta device, and lets copies from it pass that don't wait."

    n = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = func.__name__
        try:
            out = func(*args, **(kwargs or {}))
        except NotImplementedError:
            if not ((kwargs or {}).get("non_blocking") or any(a is True for a in args)):
                raise
            return args[0] if name == "copy_" else torch.zeros(args[0].shape, dtype=args[0].dtype)
        if name in ("tensor", "as_tensor", "asarray", "new_tensor", "to") and out.device.type == "meta":
            data = [*args, *(kwargs or {}).values()][name == "new_tensor"]
            self.n += not isinstance(data, torch.Tensor) or data.device.type == "cpu"
        return out


def on_meta(fn, *args):
    """Call `fn` on the meta device, which has no values and stands for a GPU.

    Gives the number of copies from ordinary memory to it, and what was raised where devices are mixed or a
    tensor is copied from it.
    """
    with _Copies() as copies:
        try:
            fn(*args)
        except Exception as e:  # most others only say that a value is missing
            return copies.n, str(e) if re.search("on the expected device|out of meta", str(e)) else None
    return copies.n, None


class Wait(NamedTuple):
    'A line on which Python waits: "file:line" or "cell:line", how often in the run, and its code.'

    where: str
    times: int
    code: str


def find(fn, *args, **kwargs):
    """Call `fn` once: the lines on which Python would wait for a GPU, `Wait`s in the order met.

    It sees what leaves the GPU and what has a size that depends on values, in the backward pass too. An
    operator that is on no list stands at the end, as "may wait". It doesn't see other threads, compiled code,
    torch.cuda.synchronize, nor, on a machine without a GPU, copies to it.
    """
    with counting() as (counts, unknown):
        fn(*args, **kwargs)
    found = Counter(zip(counts.where, counts.code, strict=True))
    waits = [Wait(where, n, code) for (where, code), n in found.items()]
    return waits + [Wait("may wait", 1, f"operator {name}") for name in unknown]


def report(found):
    "The result of `find` as text in columns."
    if not found:
        return "nothing makes Python wait"
    wide = max(len(w.where) for w in found)
    lines = [f"{w.where:{wide}}  {w.times:4}x  {w.code}" for w in found]
    n = sum(w.times for w in found)
    return "\n".join([*lines, f"{n} sync{'s' * (n != 1)} on {len(found)} line{'s' * (len(found) != 1)}"])


# --- A simulated queue --------------------------------------------------------------


class Span(NamedTuple):
    'A stretch of time; `kind` is "launch", "wait" or "python" (on the host), or "kernel" (on the GPU).'

    kind: str
    name: str
    start: float
    duration: float


class Queue:
    """One host thread and one stream of a GPU, in µs.

    `enqueue` is what a launch costs Python, `round_trip` how long after the result is there Python continues.
    `now` is Python's clock, `free` when the queue runs empty.
    """

    def __init__(self, enqueue=10.0, round_trip=10.0):
        self.enqueue, self.round_trip = enqueue, round_trip
        self.now = self.free = 0.0
        self.spans = []

    def launch(self, kernel, name="kernel"):
        "Queue a kernel of that many µs; it starts when it is launched and those before it are done."
        self.python(self.enqueue, "launch", "launch")
        start = max(self.now, self.free)
        self.spans.append(Span("kernel", name, start, kernel))
        self.free = start + kernel

    def synchronize(self, name="aten::item"):
        "Wait until the queue is empty."
        self.python(max(0.0, self.free - self.now) + self.round_trip, name, "wait")

    def python(self, microseconds, name, kind="python"):
        "Time in which Python does something."
        self.spans.append(Span(kind, name, self.now, microseconds))
        self.now += microseconds

    @property
    def total(self):
        "When both are done."
        return max(self.now, self.free)


def explore(enqueue=8, kernel=12, sync_every=1):
    "The explorer's data: 24 kernels with a sync after each `sync_every` of them (0: never), and without."
    queue, clean = Queue(enqueue), Queue(enqueue)
    for i in range(1, 25):
        queue.launch(kernel)
        clean.launch(kernel)
        if sync_every and i % sync_every == 0:
            queue.synchronize()
    busy = 24 * kernel / queue.total
    return {"spans": queue.spans, "total": queue.total, "slower": queue.total / clean.total, "busy": busy,
            "sync_every": sync_every}  # fmt: skip


# --- Traces: events as torch.profiler exports them ----------------------------------


def events(prof):
    "The events of a `torch.profiler.profile` that have a duration, as dicts (times in µs)."
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        prof.export_chrome_trace(str(path))
        return [e for e in json.loads(path.read_text())["traceEvents"] if e.get("ph") == "X"]


def simulated_events(queue):
    "The events of a `Queue` as torch.profiler would write them: an operator lies around each wait."
    found = []
    for kind, name, start, duration in queue.spans:
        wait = [("cpu_op", name, 1, 1), ("cuda_runtime", "cudaStreamSynchronize", 1, 1)]
        rows = {"kernel": [("kernel", name, 0, 7)], "python": wait[:1], "wait": wait}
        rows["launch"] = [("cuda_runtime", "cudaLaunchKernel", 1, 1)]
        found += [{"ph": "X", "cat": cat, "name": n, "pid": pid, "tid": tid, "ts": start, "dur": duration}
                  for cat, n, pid, tid in rows[kind]]  # fmt: skip
    return found


# --- Made-up data -------------------------------------------------------------------


def batches(n, size=64, inputs=64, classes=10, device="cpu"):
    "n random batches (x [size, inputs], y [size]) on a device; one label in eight is missing (-1)."
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(n, size, inputs, generator=draw)
    y = torch.randint(classes, (n, size), generator=draw)
    y[torch.rand(n, size, generator=draw) < 1 / 8] = -1
    y[:, 0] = 1
    return list(zip(x.to(device), y.to(device), strict=True))


def ragged(n, longest=64, width=32, device="cpu"):
    "Random x [n, longest, width] and lengths [n] between 1 and longest; NaN past each length."
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(n, longest, width, generator=draw)
    lengths = torch.randint(1, longest + 1, (n,), generator=draw)
    x[torch.arange(longest) >= lengths[:, None]] = torch.nan
    return x.to(device), lengths.to(device)


def step_times(n, noise, drift=0.0, planted=(), longer=0.8, bumps=0.0, seed=0):
    """Made-up step times in seconds around 10 ms: a warm-up, gaussian noise, drift, and planted slow steps.

    The first ten steps are up to 30 times too long. `drift` is the level's relative change over the run, a
    planted step is `longer` (part of the level), and one step in 50 has a harmless bump of up to `bumps`.
    """
    draw, planted = random.Random(seed), set(planted)
    found = []
    for i in range(n):
        level = 0.01 * (1 + drift * i / n) * (1 + 30 * 0.4**i if i < 10 else 1)
        extra = noise * max(-4.0, min(4.0, draw.gauss(0, 1))) + longer * (i in planted)
        found.append(level * (1 + extra + bumps * draw.random() * (draw.random() < 0.02)))
    return found

"""Traces in Chrome's format: written by torch.profiler or the simulated queue, read here and in Perfetto.

A trace is a list of events, dicts. Those with "ph" == "X" have a start "ts" and a duration "dur", in µs, and
a category "cat": on the GPU "kernel", "gpu_memcpy" and "gpu_memset"; on the host "cpu_op" for operators of
torch and "cuda_runtime" or "cuda_driver" for calls of CUDA. "pid" and "tid" name the process and thread.
"""

import gzip
import itertools
import json
from pathlib import Path
from typing import NamedTuple

GPU_WORK = {"kernel", "gpu_memcpy", "gpu_memset"}
CUDA_CALLS = {"cuda_runtime", "cuda_driver"}


class TraceError(ValueError):
    "A trace can't be read: one sentence that says why and what to do. Notebooks show the sentence alone."

    def _render_traceback_(self):
        return [str(self)]


def record(fn, path, warmup=True):
    """Call `fn` under torch.profiler and write its trace to `path`; returns the path.

    `fn` runs once before, unrecorded, and the GPU's queue is emptied before and after.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    gpu = torch.cuda.is_available()

    def drain():
        if gpu:
            torch.cuda.synchronize()

    if warmup:
        fn()
    drain()
    with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * gpu, acc_events=True) as run:
        fn()
        drain()
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    run.export_chrome_trace(str(path))
    return path


def write(events, path):
    "Write a list of events as a trace that Perfetto opens; returns the path."
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}, indent=0), encoding="utf-8")
    return path


def load(path):
    """The events of a trace file (.json or .json.gz): a list of dicts, those with a duration only.

    TraceError where there is no such file, where it is empty or cut off, or comes from another tool.
    """
    path = Path(path)
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode("utf-8")
    except OSError as e:
        if not path.is_file():
            raise TraceError(f"no trace at {path.name}: write one with syncs_trace.record") from None
        raise TraceError(f"{path.name} can't be read ({e}): record it again") from None
    except EOFError:
        raise TraceError(f"{path.name} is cut off: record it again") from None
    except UnicodeDecodeError:
        raise TraceError(f"{path.name} is no text: expected a trace of torch.profiler's, JSON") from None
    if not text.strip():
        raise TraceError(f"{path.name} is empty: export the trace after the profiler's block has ended")
    try:
        found = json.loads(text)
    except ValueError as e:
        first, last = text.strip()[0], text.strip()[-1]
        whole = {"{": "}", "[": "]"}.get(first)
        if whole and (last != whole or getattr(e, "pos", 0) >= len(text.rstrip())):
            raise TraceError(
                f"{path.name} is cut off after {len(text):,} characters: record it again"
            ) from None
        raise TraceError(f"{path.name} is no JSON: expected a trace that torch.profiler exported") from None
    return checked(found, path.name)


def checked(found, name="the trace"):
    "The events with a duration in a parsed trace, or TraceError where it is none of torch.profiler's."
    events = found.get("traceEvents") if isinstance(found, dict) else found
    if not isinstance(events, list) or not all(isinstance(e, dict) for e in events):
        raise TraceError(f"{name} holds no traceEvents: expected a trace that torch.profiler exported")
    if not events:
        raise TraceError(f"{name} holds no events: something must run inside the profiler's block")
    spans = [e for e in events if e.get("ph") == "X" and _is_number(e.get("ts")) and _is_number(e.get("dur"))]
    cats = {e.get("cat") for e in spans}
    if not cats & (GPU_WORK | CUDA_CALLS | {"cpu_op"}):
        raise TraceError(f"{name} is of another tool: it has no operators of torch and no kernels; "
                         "record with torch.profiler")  # fmt: skip
    return spans


def _is_number(x):
    return isinstance(x, int | float) and not isinstance(x, bool)


def _end(e):
    return e["ts"] + e["dur"]


def busy(events):
    "When the GPU works, on any stream: [(start, end), …] in order, without overlap."
    found = []
    for e in sorted(
        (e for e in events if e.get("ph") == "X" and e.get("cat") in GPU_WORK), key=lambda e: e["ts"]
    ):
        if found and e["ts"] <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], _end(e)))
        else:
            found.append((e["ts"], _end(e)))
    return found


class Gap(NamedTuple):
    "A time in which no stream works: start and duration in µs, and what Python was waiting in as it began."

    start: float
    duration: float
    cause: str | None


def gaps(events):
    "Every `Gap` between the GPU's first work and its last, the longest first."
    work = busy(events)
    found = [(b[0] - a[1], a[1]) for a, b in itertools.pairwise(work)]
    return [Gap(start, d, cause(events, start)) for d, start in sorted(found, key=lambda g: (-g[0], g[1]))]


def largest_gap(events):
    "The longest `Gap`, or None where the GPU never stops between its first work and its last."
    return next(iter(gaps(events)), None)


def cause(events, moment):
    """What Python was waiting in at a moment: a name, or None where it was not waiting.

    A call of CUDA whose name ends in "Synchronize" waits. Its cause is the longest operator of torch around
    it on its own thread, and its own name where there is none.
    """
    spans = [e for e in events if e.get("ph") == "X" and e["ts"] <= moment <= _end(e)]
    waits = [e for e in spans if e.get("cat") in CUDA_CALLS and e["name"].endswith("Synchronize")]
    if not waits:
        return None
    call = max(waits, key=_end)
    around = [
        e
        for e in spans
        if e.get("cat") == "cpu_op"
        and (e["pid"], e["tid"]) == (call["pid"], call["tid"])
        and e["ts"] <= call["ts"]
        and _end(e) >= _end(call)
    ]
    return max(around, key=lambda e: e["dur"], default=call)["name"]


def of_queue(queue):
    """The events of a simulated `Queue`, as torch.profiler would have written them.

    An operator lies around each wait, as `aten::item` lies around the cudaStreamSynchronize that it calls.
    """
    events = []

    def add(cat, name, start, duration, tid, pid=1):
        events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": start, "dur": duration}
        )

    for s in queue.spans:
        if s.kind == "kernel":
            add("kernel", s.name, s.start, s.duration, tid=7, pid=0)
        elif s.kind == "launch":
            add("cuda_runtime", "cudaLaunchKernel", s.start, s.duration, tid=1)
        elif s.kind == "wait" and not s.name.startswith("cuda"):
            add("cpu_op", s.name, s.start, s.duration, tid=1)
            add("cuda_runtime", "cudaStreamSynchronize", s.start, s.duration, tid=1)
        else:
            add("cuda_runtime" if s.kind == "wait" else "cpu_op", s.name, s.start, s.duration, tid=1)
    names = {0: "GPU 0", 1: "python"}
    return [
        {"ph": "M", "name": "process_name", "pid": p, "args": {"name": n}} for p, n in names.items()
    ] + events

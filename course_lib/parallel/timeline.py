"""When each rank did what, on the one clock that all processes of a host share.

On a rank:

    with timeline.span("backward", lane="compute"):
        loss.backward()
    timeline.mark("bucket 2 ready", lane="compute")

and beside the notebook, after `group.run`, `group.timeline` holds what every rank recorded. The times are
the host's: on a GPU a span holds the time to enqueue the work, unless the device is waited for inside it.
"""

import contextlib
import threading
import time
from typing import NamedTuple


class Event(NamedTuple):
    "What happened from `start` to `end`, in seconds (equal for a mark), to be drawn in the row `lane`."

    name: str
    start: float
    end: float
    lane: str = ""


_events = []
_lock = threading.Lock()


def mark(name, lane=""):
    "Record that something happened now."
    now = time.monotonic()
    add(name, now, now, lane)


@contextlib.contextmanager
def span(name, lane=""):
    "Record a `with` block from its first line to its last, also where it raises."
    start = time.monotonic()
    try:
        yield
    finally:
        add(name, start, time.monotonic(), lane)


def add(name, start, end, lane=""):
    "Record an event whose times (of `time.monotonic()`) are known, as from a callback on another thread."
    with _lock:
        _events.append(Event(str(name), float(start), float(end), str(lane)))


def take():
    "The events recorded in this process since the last call, by their start; they are forgotten here."
    with _lock:
        taken, _events[:] = list(_events), []
    return sorted(taken, key=lambda e: (e.start, e.end))


def align(by_rank):
    "Lists of events by rank, moved so that the earliest event of all ranks starts at 0."
    zero = min((e.start for events in by_rank for e in events), default=0.0)
    return [[e._replace(start=e.start - zero, end=e.end - zero) for e in events] for events in by_rank]

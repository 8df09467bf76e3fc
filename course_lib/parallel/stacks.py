"""Where a rank is: read from what `faulthandler` wrote when the rank was asked by a signal.

The handler runs in C, so it answers also for a rank that is blocked inside a collective.
"""

import contextlib
import json
import linecache
import re
from typing import NamedTuple

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<name>.*)$')
# In these files a frame is the library's own; what called it is where the reader's code stands.
_INNER = re.compile(
    r"[/\\](torch|threading\.py|socket\.py|selectors\.py)([/\\]|$)|course_lib[/\\]parallel[/\\]worker\.py$"
)
_C10D = re.compile(r"[/\\]torch[/\\]distributed[/\\](distributed_c10d|_functional_collectives)\.py$")


class Frame(NamedTuple):
    file: str
    line: int
    name: str


def parse(text):
    "faulthandler's dump -> the frames of the main thread, innermost first."
    threads = [t for t in re.split(r"\n\s*\n", text.strip()) if "File " in t]
    if not threads:
        return []
    # The main thread comes last: threads are listed from the newest.
    found = (_FRAME.match(line) for line in threads[-1].splitlines())
    return [Frame(m["file"], int(m["line"]) if m["line"].isdigit() else 0, m["name"]) for m in found if m]


def collective(frames):
    "The function of `torch.distributed` that the reader's code has called, or ''."
    own = _own(frames)
    inner = frames if own is None else frames[:own]
    return next((f.name for f in reversed(inner) if _C10D.search(f.file)), "")


def _own(frames):
    return next((i for i, f in enumerate(frames) if not _INNER.search(f.file)), None)


def where(frames):
    "In words: 'in all_reduce, line 12 of train (model.py): dist.all_reduce(x)'."
    if not frames:
        return "not to be seen"
    own, call = _own(frames), collective(frames)
    if own is None:
        return f"in {call or frames[0].name}"
    f = frames[own]
    source = " ".join(linecache.getline(f.file, f.line).split())
    # The names of cells are kept whole: they are replaced by IPython's own.
    file = f.file if f.file.startswith("<") or "ipykernel_" in f.file else re.split(r"[/\\]", f.file)[-1]
    place = f"line {f.line} of {f.name} ({file})" if f.name != "<module>" else f"line {f.line} of {file}"
    text = f"in {call}, {place}" if call else f"at {place}"
    return f"{text}: {source[:100]}" if source else text


def unfinished(record):
    """The first collective that NCCL has not finished: ' (NCCL has not finished all_reduce)', or ''.

    `record` is the flight recorder's JSON; sizes are those of the inputs.
    """
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
        entries = [e for e in json.loads(record)["entries"] if e.get("state") != "completed"]
        if entries:
            first = min(entries, key=lambda e: e.get("record_id", 0))
            name = str(first["profiling_name"]).split(":")[-1]
            sizes = [s for s in first.get("input_sizes", []) if s]
            return f" (NCCL has not finished {name}{f' of shape {sizes[0]}' if sizes else ''})"
    return ""

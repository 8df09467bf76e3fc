"""Figures measured on named hardware, shown beside the learner's own.

A lesson calls `note` for each figure it measures and `table` at its end. `course record` collects the
notes of a run and keeps them in the worked notebook's metadata, each with GPU, versions, commit and
date: that notebook is the only place where a recorded figure is stored.
"""

import json
import math
import os
import re
from pathlib import Path

from course_lib import show

# COURSE_ROOT names another checkout; see authoring/notebook.py.
NBS = Path(os.environ.get("COURSE_ROOT") or Path(__file__).resolve().parent.parent) / "nbs"
_mine = {}


def note(name, value, unit, bar=None):
    """Note a measured figure of this run: `note("roofline.copy_tbps", 4.27, "TB/s")`; returns the value.

    `bar` is the figure's goal on the recording machine, an operator and a value: `(">=", 4.0)`.
    """
    value = float(value)
    if not math.isfinite(value):
        raise ValueError(f"figure {name} is {value}; expected a finite number")
    bars = {"bar": {"op": bar[0], "value": float(bar[1])}} if bar else {}
    figure = _mine[name] = {"value": value, "unit": unit, **bars}
    if out := os.environ.get("COURSE_FIGURES"):
        with open(out, "a", encoding="utf-8") as f:
            f.write(json.dumps({"name": name, **figure}) + "\n")
    return value


def figures(lesson=None):
    """Every recorded figure, as dicts of `lesson name value unit machine torch date commit` and `bar`.

    `lesson` is its name, "roofline"; without it, all lessons.
    """
    rows = []
    for path in sorted(NBS.glob(f"[0-9][0-9]_{lesson or '*'}.ipynb")):
        stamp = json.loads(path.read_text(encoding="utf-8"))["metadata"].get("recorded") or {}
        found = sorted(stamp.get("figures", {}).items())
        rows += [{"lesson": path.stem[3:], "name": name, **figure} for name, figure in found]
    return rows


def get(name):
    "The recorded figure called `name`, or None while it has not been recorded."
    return next((f for f in figures(name.split(".")[0]) if f["name"] == name), None)


def brief(names, most=4):
    """Some recorded figures in a few words, for a cell that can't run here; '' where none is recorded.

    `names` may hold {expressions} of an f-string, each of which stands for any word.
    """
    found = []
    for name in names:
        pattern = re.sub(r"\\{.*?\\}", r"\\w+", re.escape(name))
        found += [f for f in figures(name.split(".")[0]) if re.fullmatch(pattern, f["name"])]
    words = [
        f"{f['name'].split('.', 1)[1]} {show.number(f['value'])} {f['unit']}".strip() for f in found[:most]
    ]
    return f" Recorded on {found[0]['machine']}: {', '.join(words)}." if found else ""


def peaks():
    "(name, machine.Peaks) of the machine recorded in roofline, or of the H200's datasheet where none is."
    from course_lib import machine

    found = [get(f"roofline.{name}") for name in ("peak_tflops", "bytes_tbps", "launch_us")]
    found[1] = found[1] or get("roofline.copy_tbps")  # the best of a copy and a read, or the copy
    if all(found):
        flops, copy, launch = (f["value"] for f in found)
        return f"{found[0]['machine']}, recorded", machine.Peaks(flops * 1e12, copy * 1e12, launch * 1e-6)
    sheet = machine.DATASHEET["NVIDIA H200"]
    return "NVIDIA H200, datasheet", machine.Peaks(sheet["bf16_flops"], sheet["bytes"], math.nan)


def table(lesson):
    "Print the figures of a lesson: this run's beside the recorded ones."
    # A run that is being recorded stands alone: the figures beside it would be those it replaces.
    print(compare(lesson, _mine, alone="COURSE_RECORDING" in os.environ))


def compare(lesson, mine, alone=False):
    "The figures of `lesson` as text: `mine` ({name: {value, unit}}) beside the recorded ones, or `alone`."
    theirs = {} if alone else {f["name"]: f for f in figures(lesson)}
    names = [n for n in dict.fromkeys([*mine, *theirs]) if n.startswith(f"{lesson}.")]
    if not names:
        return f"no figures for lesson {lesson} yet"
    columns = {"this run": mine} if alone else {"this run": mine, "recorded": theirs}
    rows = []
    for n in names:
        found = [c.get(n) for c in columns.values()]
        rows.append((n, *(f and f["value"] for f in found), next(filter(None, found))["unit"]))
    sources = sorted({f"{f['machine']}, torch {f['torch']}, {f['date']}" for f in theirs.values()})
    text = show.table(("figure", *columns, "unit"), rows, left=(0, len(columns) + 1))
    return text + ("\nrecorded on " + "; ".join(sources) if sources else "")

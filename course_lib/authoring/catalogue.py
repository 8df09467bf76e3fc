"""`course list`, `figures` and `doctor`: the lessons, what they recorded, and this machine.

What the learner has passed is in work/.progress.json: {"roofline.1": {"title", "passed", "version"}}. A pass
belongs to the exercise's title: it survives a new number, and does not count for another exercise.
"""

import contextlib
import datetime
import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import sysconfig
from pathlib import Path

from course_lib import recorded, show
from course_lib.authoring import notebook

OLD = Path(__file__).with_name("old_exercises.txt")


@functools.cache
def old_exercises():
    "{'05.1': ('roofline.1', 'FLOPs and bytes')}."
    lines = OLD.read_text(encoding="utf-8").splitlines()
    rows = [line.split(maxsplit=2) for line in lines if not line.startswith("#")]
    return {old: (new, title) for old, new, title in rows}


def progress(work):
    "The rows of `work`/.progress.json; none where it is absent or damaged, which is no reason to stop."
    try:
        found = json.loads((work / ".progress.json").read_text(encoding="utf-8"))
        return {k: v for k, v in found.items() if isinstance(v, dict)}
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}


def passed(work, topic):
    "What was passed in the lesson `topic`: {exercise's title: its row}."
    found = {}
    for name, row in progress(work).items():
        name, title = old_exercises().get(name, (name, row.get("title")))
        if name.rpartition(".")[0] == topic and isinstance(title, str):
            found[title] = row
    return found


def save_progress(work, topic, lesson, verdicts):
    "Add the exercises whose verdict is ''; what was passed once stays. Raises CourseError."
    rows, version = passed(work, topic), lesson["metadata"]["course"].get("version")
    exercises = {e["id"]: e["title"] for e in notebook.exercises(lesson)}
    for name, why in verdicts.items():
        if not why and rows.get(exercises[name], {}).get("version") != version:
            rows[exercises[name]] = {"passed": datetime.date.today().isoformat(), "version": version}
    before = progress(work)
    mine = {name: {**rows[title], "title": title} for name, title in exercises.items() if title in rows}
    if {**before, **mine} != before:
        notebook.save({**before, **mine}, work / ".progress.json")


def published():
    "The lessons without drafts: {number: (path in lessons/, worked notebook)}."
    found = {}
    for number, path in notebook.lessons().items():
        if (notebook.NBS / path.name).exists():
            worked = notebook.load(notebook.NBS / path.name)
            if not notebook.is_draft(worked):
                found[number] = path, worked
    return found


def unsolved(nb, work, topic):
    "The exercises of a notebook that have not been passed, as `notebook.exercises` gives them."
    done = passed(work, topic)
    return [e for e in notebook.exercises(nb) if e["title"] not in done]


def first_unsolved(work):
    "The number of the first lesson with an exercise that has not been passed, or None."
    return next((n for n, (path, nb) in published().items() if unsolved(nb, work, path.stem[3:])), None)


def list_cmd(args):
    "Print the lessons by part, with the progress kept in `args.work`."
    found, part = published(), None
    width = max((len(nb["metadata"]["course"]["title"]) for _, nb in found.values()), default=0)
    for number, (path, nb) in found.items():
        about, stamp, count = nb["metadata"]["course"], notebook.stamp(nb), len(notebook.exercises(nb))
        if about["part"] != part:
            part = about["part"]
            print(f"\n{part}")
        done = f"{count - len(unsolved(nb, args.work, path.stem[3:]))}/{count} solved"
        where = f"recorded on {stamp['gpu']}, {stamp['date']}"
        print(f"  {number}  {about['title']:<{width}}  {done:>12}  {about['minutes']:>3} min  {where}")
    if following := first_unsolved(args.work):
        print(f"\nNext: course lab {following}")
    else:
        print("\nEvery exercise is solved." if found else "There are no lessons yet: run `course build`.")


def figures_cmd(args):
    "Print every recorded figure."
    for path in notebook.lessons(notebook.NBS).values():
        notebook.load(path)  # says what is damaged
    rows = []
    for f in recorded.figures():
        bar = f"{f['bar']['op']} {f['bar']['value']:g}" if f.get("bar") else ""
        rows.append((f["name"], f["value"], f["unit"], bar, f["machine"], f["torch"], f["date"]))
    head = ("figure", "value", "unit", "bar", "machine", "torch", "date")
    print(show.table(head, rows, left=(0, 2, 3, 4, 5, 6)))


def abilities():
    """What runs here: {"gpu": bool, "triton": "gpu" | "interpreter" | None, "compile": bool}.

    Triton is not imported. "interpreter": kernels run under TRITON_INTERPRET=1, on the CPU. "compile" is
    whether torch.compile finds what it builds with (Triton on a GPU, a C++ compiler on a CPU).
    """
    import torch

    from course_lib import machine

    gpu, triton = machine.has_gpu(), None
    if importlib.util.find_spec("triton") is not None:
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        real = gpu and not interpreted and torch.cuda.get_device_capability() >= (7, 0)
        triton = "gpu" if real else "interpreter"
    compilers = ("CC", "gcc", "cc", "clang") if gpu else ("CXX", "g++", "c++", "clang++", "cl")
    builds = any(shutil.which(os.environ.get(c, c)) for c in compilers)
    builds &= Path(sysconfig.get_path("include"), "Python.h").exists()
    return {"gpu": gpu, "triton": triton, "compile": builds and (triton == "gpu" or not gpu)}


def triton_version():
    "The installed Triton's version without importing it, or None."
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("triton")
    return None


def doctor_cmd(args):
    "Print what this machine is and what it measures."
    import torch

    from course_lib import machine, ram

    can, peak, gpus = abilities(), machine.peaks(), torch.cuda.device_count() * machine.has_gpu()
    sheet, cuda = (
        machine.DATASHEET.get(machine.name(), {}),
        f", CUDA {torch.version.cuda}" * bool(torch.version.cuda),
    )
    memory = f", GPU {torch.cuda.get_device_properties(0).total_memory / 2**30:.0f} GiB" if gpus else ""
    where = {"gpu": "on the GPU", "interpreter": "in the interpreter", None: "not here"}[can["triton"]]
    matmul = _rate(peak.flops, "FLOP/s", sheet.get("bf16_flops"))
    rows = {
        "device": machine.name() + f" (of {gpus})" * (gpus > 1),
        "memory": f"{ram.total() / 2**30:.0f} GiB{memory}",
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "torch": torch.__version__ + cuda,
        "triton": f"{triton_version() or 'not installed'}; kernels run {where}",
        "torch.compile": "builds here"
        if can["compile"]
        else "can't build here: no C++ compiler or Python headers",
        "matmul": f"{matmul} ({machine.pick(cpu='float32', gpu='bfloat16')})",
        "copy": _rate(peak.bytes, "B/s", sheet.get("bytes")) + " (read + written)",
        "launch cost": f"{peak.launch * 1e6:.1f} µs to enqueue one tiny operator",
        "cells for a GPU": "run" if can["gpu"] else "print one line each",
    }
    print("\n".join(f"{name:<15} {value}" for name, value in rows.items()))


def _rate(value, unit, peak):
    size, prefix = next((s, p) for s, p in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1, "")) if value >= s)
    share = f", {value / peak:.0%} of the datasheet's" if peak else ""
    return f"{value / size:.3g} {prefix}{unit}{share}"

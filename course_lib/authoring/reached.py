"""`course grade --figures`: what the learners' own code reached, beside the recorded figures.

A figure is the learner's where its name contains `yours`, and where no answer that it hangs on is lent.
"""

import ast
import contextlib
import json
import os
import re

from course_lib import recorded, show
from course_lib.authoring import check, kernel, notebook
from course_lib.authoring.notebook import CourseError


def gpus():
    "This machine's GPUs, as CUDA_VISIBLE_DEVICES has them. Raises CourseError where there is none."
    from course_lib import machine  # imports torch

    if not machine.has_gpu():
        raise CourseError("figures need a GPU, and there is no CUDA device here: leave out --figures")
    import torch

    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",") if given else [str(i) for i in range(max(1, torch.cuda.device_count()))]


def figures(lesson, mine, topic, args):
    """Execute all cells of a learner's notebook; {"figures": {name: row}} of those called `yours`.

    A figure is left out where it hangs on a solution of the course's. "stopped" says what ended the kernel.
    """
    steps, found, lent = check.steps_of(lesson, mine), {}, set()
    solved_by = uses(steps)
    notes = args.work.with_name("figures.jsonl")
    notes.touch()
    env = {"COURSE_FIGURES": str(notes)}
    with (
        notes.open(encoding="utf-8") as lines,
        kernel.Session(args.work, args.timeout, check.memory(args), env) as session,
    ):
        for step, exercises in zip(steps, solved_by, strict=True):
            fresh = check.FRESH.format(topic=topic) * bool(step.checks)
            ran = session.execute(fresh + step.source)
            printed = "".join(t for out in ran.outputs if out.get("name") == "stdout" for t in out["text"])
            lent |= set(re.findall(r"^(\S+) is not passed here: ", printed, re.MULTILINE))
            rows = [json.loads(line) for line in lines]
            found |= {row.pop("name"): row for row in rows if "yours" in row["name"] and not lent & exercises}
            if not ran.alive:
                return {"figures": found, "stopped": f"figures end at cell `{step.name}`: {ran.error}"}
    return {"figures": found}


def uses(steps):
    "For each step, the exercises whose answers it hangs on, through `check.yours`: a list of sets."
    parts, cells = [], []  # by statement: a cell may hold several answers
    for step in steps:
        start = len(parts)
        with contextlib.suppress(SyntaxError, ValueError):
            body = ast.parse(notebook.python({"source": step.source})).body
            parts += [check.Step(step.name, ast.unparse(node)) for node in body]
        cells.append(range(start, len(parts)))
    found = []
    for cell in cells:
        needed = {*cell, *(j for i in cell for j in check.needed(parts, i))}
        text = "\n".join(parts[i].source for i in needed)
        found.append(set(re.findall(r"\byours\('([\w.]+)'\)", text)))
    return found


def table(topic, tasks):
    "What the learners reached beside the recorded figures: those of the course's solution, and of others."
    theirs = {f["name"]: f for f in recorded.figures(topic)}
    mine = {name: row for task in tasks for name, row in task.get("figures", {}).items()}
    names = {n: (mine | theirs)[n]["unit"] for n in [*theirs, *mine] if "yours" in n}
    if not names:
        return ""
    rows = [(t["learner"], *(t.get("figures", {}).get(n, {}).get("value") for n in names)) for t in tasks]
    machines = "; ".join(sorted({f["machine"] for f in theirs.values()}))
    others = {}  # softmax_compile_tbps stands beside yours_softmax_tbps
    for name in names:
        head, _, unit = name.replace("yours_", "").rpartition("_")
        for other in theirs:
            if m := re.fullmatch(rf"{re.escape(head)}_(\w+)_{re.escape(unit)}", other):
                others.setdefault(m[1], {})[name] = theirs[other]["value"]
    rows.append(("recorded: the course's", *(theirs.get(n, {}).get("value") for n in names)))
    rows += [(f"recorded: {other}", *map(values.get, names)) for other, values in others.items()]
    heads = (f"{n.removeprefix(f'{topic}.')}, {unit}" for n, unit in names.items())
    dash = "a dash: the exercise is not passed, or the cell did not run"
    return f"{show.table(('reached by', *heads), rows)}\nrecorded on {machines or 'no machine yet'}; {dash}"

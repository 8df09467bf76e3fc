"A course of two tiny lessons in a folder of its own, for tests of the command."

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
STUB = """\
def double(x):
    "Twice x."
    ### BEGIN SOLUTION
    y = x + x
    return y
    ### END SOLUTION"""
NUMBERS = {"tiny": "01", "second": "06", "toy": "06"}
HINTS = (
    "<details><summary>Hint 1</summary>Add.</details>\n\n<details><summary>Hint 2</summary>x + x</details>\n"
)
STAMP = {
    "source": "0",
    "commit": "abc1234",
    "gpu": "NVIDIA H200",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "date": "2026-11-29",
}


def code(name, source, tags=(), **metadata):
    "A code cell that was executed."
    if tags:
        metadata["tags"] = list(tags)
    out = [{"name": "stdout", "output_type": "stream", "text": ["something\n"]}]
    return {
        "cell_type": "code",
        "id": name,
        "metadata": metadata,
        "source": source,
        "execution_count": 1,
        "outputs": out,
    }


def markdown(name, source):
    return {"cell_type": "markdown", "id": name, "metadata": {}, "source": source}


def worked(number="01", slug="tiny", title="Tiny", stub=STUB):
    "A worked notebook with one exercise, as nbs/ holds it."
    exercise = {"id": f"{slug}.1", "title": "Double", "minutes": 5, "difficulty": 2}
    heading = f"### Exercise {slug}.1 · Double · ●●○ · 5 min\n\nWrite it.\n\n"
    course = {
        "slug": slug,
        "title": title,
        "part": "A. First",
        "minutes": 20,
        "needs": "nothing",
    }
    figure = {"value": 4.2713, "unit": "TB/s", "bar": {"op": ">=", "value": 4.0}, "machine": "NVIDIA H200"}
    figure |= {"torch": "2.11.0", "date": "2026-11-29", "commit": "abc1234"}
    return {
        "cells": [
            markdown("title", f"# {title}"),
            code("start", "print('something')"),
            markdown("ex1", heading + HINTS),
            code("ex1-stub", stub, ["exercise"]),
            code("ex1-check", "# NBVAL_CHECK_OUTPUT\nprint(double(2))", ["check"], exercise=exercise),
            code("tail", "%%gpu a sum\n1 + 1"),
        ],
        "metadata": {
            "course": course,
            "kernelspec": {"display_name": "Something", "language": "python", "name": "python3"},
            "language_info": {"name": "python", "version": "3.12.1"},
            "recorded": copy.deepcopy(STAMP) | {"figures": {f"{slug}.copy_tbps": figure}},
            "widgets": {},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }


README = "# Tiny\n\n<!-- lessons -->\n<!-- /lessons -->\n\nText.\n"


def write(root):
    "The small course under `root`, with nothing built yet; returns the root."
    for folder in ("nbs", "lessons"):
        (root / folder).mkdir(parents=True)
    put(root, worked())
    put(root, worked("06", "second", "Second"))
    (root / "README.md").write_text(README, encoding="utf-8")
    return root


def put(root, nb, name=None):
    "Write a worked notebook to nbs/; returns its path."
    course = nb["metadata"]["course"]
    path = root / "nbs" / (name or f"{NUMBERS.get(course['slug'], '01')}_{course['slug']}.ipynb")
    path.write_text(json.dumps(nb), encoding="utf-8")
    return path


def use(root, monkeypatch):
    "Point the modules of this process at the course under `root`."
    from course_lib import recorded
    from course_lib.authoring import notebook

    monkeypatch.setattr(notebook, "ROOT", root)
    for name in ("nbs", "lessons", "work"):
        monkeypatch.setattr(notebook, name.upper(), root / name)
    monkeypatch.setattr(recorded, "NBS", root / "nbs")


def environment(root, **changes):
    "Environment variables that point a subprocess at the course under `root`."
    return os.environ | {"COURSE_ROOT": str(root), "PYTHONPATH": str(REPOSITORY)} | changes


def course(root, *words, **changes):
    "Run `course WORDS…` in a process of its own on the course under `root`."
    return subprocess.run(
        [sys.executable, "-m", "course_lib.authoring.cli", *map(str, words)],
        env=environment(root, **changes), capture_output=True, text=True, timeout=60,
    )  # fmt: skip

"""`course build`: everything that is derived from nbs/ by text alone.

A lesson is a pure function of its worked notebook: answers become stubs, outputs go, and the hash of
the source becomes its version.
"""

import base64
import re
import sys

from course_lib.authoring import answers, markers, notebook, readme, rules
from course_lib.authoring.notebook import CourseError


def lesson(nb, stem):
    """The learner's notebook made from the worked notebook `nb`, whose file is nbs/<stem>.ipynb.

    Raises CourseError that names notebook, cell and rule.
    """
    rules.check(nb, stem)
    return {
        "cells": [_cell(c, stem) for c in nb["cells"]],
        "metadata": {
            "course": {**nb["metadata"]["course"], "version": notebook.lesson_hash(nb)},
            "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def _cell(cell, stem):
    text = notebook.source(cell)
    if markers.has_markers(text):
        try:
            text = markers.stub(text)
        except CourseError as e:
            rules.refuse(stem, cell, str(e))
    kept = {k: v for k, v in cell["metadata"].items() if k in ("tags", "exercise")}
    out = {"cell_type": cell["cell_type"], "id": cell["id"], "metadata": kept}
    if cell["cell_type"] == "code":
        out |= {"execution_count": None, "outputs": []}
    return out | {"source": text.splitlines(keepends=True)}


def _of_lesson(path):
    "The files made from a worked notebook, {path: bytes}, and the notebook. Raises CourseError."
    stem, nb = path.stem, notebook.load(path)
    files = {notebook.LESSONS / path.name: notebook.dump(lesson(nb, stem)).encode()}
    files[_solutions(stem)] = answers.module(nb, stem).encode()
    for cell in nb["cells"]:  # README's picture is one that a lesson drew
        for out in cell.get("outputs", []) if "picture" in cell["metadata"] else []:
            if png := out.get("data", {}).get("image/png"):
                files[notebook.ROOT / cell["metadata"]["picture"]] = base64.b64decode(png)
    return files, nb


def _solutions(stem):
    return notebook.ROOT / "course_lib" / stem[3:] / "solutions.py"


def derived():
    """Every derived file as ({path: bytes}, [sentences about sources that were refused]).

    A path that holds None has no source any more.
    """
    patterns = "lessons/*.ipynb", "course_lib/*/solutions.py"
    files = dict.fromkeys(path for pattern in patterns for path in notebook.ROOT.glob(pattern))
    refused, shown, numbers = [], {}, set()
    for path in sorted(notebook.NBS.glob("*.ipynb")):
        stem = path.stem
        try:
            if not re.fullmatch(r"[0-9]{2}_[a-z0-9_]+", stem):
                rules.refuse(stem, None, "a lesson's file is named NN_topic.ipynb")
            if stem[:2] in numbers:
                rules.refuse(stem, None, f"a second lesson {stem[:2]}")
            numbers.add(stem[:2])
            made, nb = _of_lesson(path)
            files |= made
            shown |= {} if notebook.is_draft(nb) else {stem: nb}
        except CourseError as e:
            refused.append(str(e))
            for target in (notebook.LESSONS / path.name, _solutions(stem)):
                files.pop(target, None)
    try:
        files |= {} if refused else {notebook.ROOT / "README.md": readme.refreshed(shown).encode()}
    except CourseError as e:
        refused.append(str(e))
    return files, refused


def build_cmd(args):
    "Write what is behind, or with `--check` name it. Returns the exit status."
    files, refused = derived()
    behind = sorted(p for p, data in files.items() if data != (p.read_bytes() if p.exists() else None))
    for path in behind:
        name = path.relative_to(notebook.ROOT)
        if args.check:
            state = "has no source in nbs/" if files[path] is None else "is behind its source"
            print(f"{name} {state}: run `course build`", file=sys.stderr)
        elif files[path] is None:
            path.unlink()
            print(f"removed {name}: it has no source in nbs/")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            notebook.write(files[path], path)
            print(f"wrote {name}")
    for sentence in refused:
        print(sentence, file=sys.stderr)
    if not behind and not refused:
        print("everything derived is up to date")
    return 1 if refused or (args.check and behind) else 0

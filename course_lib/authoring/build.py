"""`course build`: everything that is derived from nbs/ by text alone.

A lesson is a pure function of its worked notebook: answers become stubs, outputs go, and the hash of
the source becomes its version.
"""

import re
import sys

from course_lib.authoring import markers, notebook, picture, readme, rules
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


def derived():
    """Every derived file as ({path: text}, [sentences about sources that were refused]).

    A path whose text is None has no source any more.
    """
    files, refused, built = dict.fromkeys(notebook.LESSONS.glob("*.ipynb")), [], {}
    for path in sorted(notebook.NBS.glob("*.ipynb")):
        target = notebook.LESSONS / path.name
        try:
            if not re.fullmatch(r"[0-9]{2}_[a-z0-9_]+", path.stem):
                rules.refuse(path.stem, None, "a lesson's file is named NN_topic.ipynb")
            if any(name[:2] == path.name[:2] for name in built):
                rules.refuse(path.stem, None, f"a second lesson {path.name[:2]}")
            built[path.name] = lesson(notebook.load(path), path.stem)
            files[target] = notebook.dump(built[path.name])
        except CourseError as e:
            refused.append(str(e))
            files.pop(target, None)
    if not refused:
        try:
            files[notebook.ROOT / "README.md"] = readme.refreshed(list(built.values()))
            if (svg := picture.svg()) is not None:
                files[notebook.ROOT / picture.PATH] = svg
        except CourseError as e:
            refused.append(str(e))
    return files, refused


def _is_behind(path, text):
    if text is None:
        return True
    try:
        return path.read_bytes() != text.encode()
    except FileNotFoundError:
        return True


def build_cmd(args):
    "Write what is behind, or with `--check` name it. Returns the exit status."
    files, refused = derived()
    behind = [path for path, text in sorted(files.items()) if _is_behind(path, text)]
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

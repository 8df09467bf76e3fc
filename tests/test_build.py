import argparse
import copy
import json

import nbformat
import pytest
import small_course

from course_lib.authoring import build, notebook

OTHER = small_course.STUB.replace("x + x", "2 * x")


@pytest.fixture
def root(tmp_path, monkeypatch):
    small_course.use(small_course.write(tmp_path), monkeypatch)
    return tmp_path


def run(check=False):
    return build.build_cmd(argparse.Namespace(check=check))


def lesson(nb):
    return build.lesson(nb, "01_tiny")


def by_id(nb):
    return {c["id"]: c for c in nb["cells"]}


def test_a_lesson_has_stubs_and_no_outputs():
    nb = small_course.worked()
    made = lesson(nb)
    cells = by_id(made)
    assert list(cells) == list(by_id(nb))
    assert "".join(cells["ex1-stub"]["source"]) == (
        'def double(x):\n    "Twice x."\n    # YOUR CODE HERE\n    raise NotImplementedError'
    )
    for c in made["cells"]:
        assert c["cell_type"] == "markdown" or (c["outputs"], c["execution_count"]) == ([], None)
    assert cells["ex1-check"]["metadata"]["exercise"]["id"] == "tiny.1"
    assert set(made["metadata"]) == {"course", "kernelspec", "language_info"}
    assert made["metadata"]["course"]["version"] == notebook.lesson_hash(nb)
    nbformat.validate(made)


def test_a_lesson_depends_on_sources_alone_and_its_version_on_the_answer():
    nb = small_course.worked()
    again = copy.deepcopy(nb)
    for c in again["cells"]:
        if c["cell_type"] == "code":
            c |= {"outputs": [], "execution_count": 99}
            c["metadata"]["execution"] = {"iopub.status.busy": "2026-11-29T10:00:00Z"}
        c["source"] = c["source"].splitlines(keepends=True)
    del again["metadata"]["recorded"], again["metadata"]["widgets"]
    assert notebook.dump(lesson(again)) == notebook.dump(lesson(nb))
    other = lesson(small_course.worked(stub=OTHER))
    assert other["cells"] == lesson(nb)["cells"] and other["metadata"] != lesson(nb)["metadata"]


def test_build_writes_what_is_behind_and_check_names_it(root, capsys):
    assert run(check=True) == 1
    assert "lessons/01_tiny.ipynb is behind its source" in capsys.readouterr().err
    assert not list((root / "lessons").iterdir()) and not (root / "course_lib").exists()
    assert run() == 0
    first = {p: p.read_bytes() for p in root.rglob("*") if p.is_file()}
    assert len(list((root / "lessons").iterdir())) == 2
    assert run() == 0 and run(check=True) == 0
    assert {p: p.read_bytes() for p in root.rglob("*") if p.is_file()} == first

    path = root / "lessons/06_second.ipynb"
    path.write_text(path.read_text().replace("YOUR CODE", "MY CODE"))
    small_course.put(root, small_course.worked(stub=OTHER))
    capsys.readouterr()
    assert run(check=True) == 1
    behind = "course_lib/tiny/solutions.py", "lessons/01_tiny.ipynb", "lessons/06_second.ipynb"
    said = capsys.readouterr().err
    assert said == "".join(f"{n} is behind its source: run `course build`\n" for n in behind)
    assert run() == 0 and "YOUR CODE" in path.read_text()

    (root / "nbs/06_second.ipynb").unlink()
    assert run(check=True) == 1 and "has no source in nbs/" in capsys.readouterr().err
    assert run() == 0 and not path.exists() and not (root / "course_lib/second/solutions.py").exists()
    assert "06" not in (root / "README.md").read_text()


def test_a_refused_source_stops_the_build(root):
    run()
    old = {p: p.read_bytes() for p in root.rglob("*") if p.is_file() and p.parent.name != "nbs"}
    nb = small_course.worked()
    nb["cells"][1]["metadata"]["tags"] = ["NBVAL_SKIP"]
    wrong = {
        "01_tiny": (nb, "nbs/01_tiny.ipynb, cell start: NBVAL_SKIP"),
        "Untitled": (small_course.worked(), "Untitled.ipynb: a lesson's file is named NN_topic.ipynb"),
        "06_third": (small_course.worked("06", "third"), "06_third.ipynb: .* a number of its own"),
        "07_damaged": ({}, "07_damaged.ipynb is not a notebook .*take it from git again"),
    }
    for name, (nb, why) in wrong.items():
        path = root / f"nbs/{name}.ipynb"
        before = path.read_text() if path.exists() else None
        path.write_text(json.dumps(nb))
        with pytest.raises(notebook.CourseError, match=why):
            run()
        path.unlink() if before is None else path.write_text(before)
    assert {p: p.read_bytes() for p in old} == old


def test_the_map_in_the_readme(root):
    run()
    text = (root / "README.md").read_text(encoding="utf-8")
    assert text.startswith("# Tiny\n") and text.endswith("<!-- /lessons -->\n\nText.\n")
    assert "**A. First**" in text
    assert "| 06 | [Second](lessons/06_second.ipynb) | 20 | nothing | 1 |" in text
    (root / "README.md").write_text("# Nothing here\n")
    with pytest.raises(notebook.CourseError, match=r"README\.md must hold `<!-- lessons -->`"):
        run()


def test_a_draft_is_built_and_not_shown(root):
    for nb in (small_course.worked(), small_course.worked("06", "second", "Second")):
        nb["metadata"]["recorded"] = {"cells": {}}  # marked cells alone
        small_course.put(root, nb)
    assert run() == 0 and (root / "lessons/01_tiny.ipynb").exists()
    text = (root / "README.md").read_text()
    assert "01_tiny" not in text and "<!-- /lessons -->" in text


SOLVED = {
    "imports": "import math, sys\nfrom torch.nn import functional as F",
    "ex1-stub": """\
LIMIT = 2

@F.decorated
def double(x, n=LIMIT):
    ### BEGIN SOLUTION
    y = [math.prod([a, half(n)]) for a in x]
    return y
    ### END SOLUTION

    ### BEGIN STARTER
    # return x
    ### END STARTER

double.doubled = True
""",
    "ex1-check": "# NBVAL_CHECK_OUTPUT\ncheck.double(double, LIMIT)",
    "ex2-stub": "def half(x):\n    ### BEGIN SOLUTION\n    return x / 2\n    ### END SOLUTION",
}
SOLUTIONS = """\
# Generated by `course build` from nbs/01_tiny.ipynb: do not edit.
import math
from torch.nn import functional as F


LIMIT = 2

@F.decorated
def double(x, n=LIMIT):
    y = [math.prod([a, half(n)]) for a in x]
    return y

double.doubled = True


def half(x):
    return x / 2


EXERCISES = {
    'tiny.1': ('double', 'LIMIT'),
    'tiny.2': ('half',),
}
"""


def test_solutions_are_the_exercises_cells_and_their_imports():
    nb = small_course.worked()
    about = {"id": "tiny.2", "title": "Half", "minutes": 1, "difficulty": 1}
    nb["cells"] += [
        small_course.code("ex2-stub", "", ["exercise"]),
        small_course.code("ex2-check", "check.half(half)", ["check"], exercise=about),
    ]
    nb["cells"].insert(0, small_course.code("imports", ""))
    for name, text in SOLVED.items():
        by_id(nb)[name]["source"] = text
    assert build.solutions(nb, "01_tiny") == SOLUTIONS

import pytest
from small_course import STUB, code, markdown, worked

from course_lib.authoring import answers, build
from course_lib.authoring.notebook import CourseError


def by_id(nb):
    return {c["id"]: c for c in nb["cells"]}


def drop(key):
    return lambda nb: nb["metadata"]["course"].pop(key)


def course(**changes):
    return lambda nb: nb["metadata"]["course"].update(changes)


def edit(cell, **changes):
    "Change what a cell has; a key that it lacks goes to its metadata."

    def change(nb):
        found = by_id(nb)[cell]
        for k, v in changes.items():
            (found if k in found else found["metadata"])[k] = v

    return change


def exercise(**changes):
    return lambda nb: by_id(nb)["ex1-check"]["metadata"]["exercise"].update(changes)


def insert(at, *cells):
    return lambda nb: nb["cells"].__setitem__(slice(at, at), cells)


def edit_both(nb):
    by_id(nb)["tail"]["source"] = "%%gpu a number\ny = 1"
    nb["cells"].append(code("more", "def f():\n    return y"))


HEAD = "### Exercise tiny.1 · Double · ●●○ · 5 min\n\n"
SECOND = {"id": "tiny.2", "title": "Double", "minutes": 5, "difficulty": 2}
AGAIN = code("again", "# NBVAL_CHECK_OUTPUT\n1", ["check"], exercise=SECOND | {"id": "tiny.1"})
STUB2 = code("ex2-stub", STUB, ["exercise"])
CHECK2 = code("ex2-check", "# NBVAL_CHECK_OUTPUT\n1", ["check"], exercise=SECOND)
HEAD2 = markdown("ex2", HEAD.replace("tiny.1", "tiny.2"))
NEEDED = r"metadata\.course must hold slug"

BROKEN = {
    "no metadata": (lambda nb: nb["metadata"].pop("course"), NEEDED),
    "no slug": (drop("slug"), NEEDED),
    "no title": (drop("title"), NEEDED),
    "no part": (drop("part"), NEEDED),
    "no minutes": (drop("minutes"), NEEDED),
    "no needs": (drop("needs"), NEEDED),
    "minutes in words": (course(minutes="20"), r"minutes \(int\)"),
    "another slug": (course(slug="teeny"), "the file's name must agree"),
    "no id": (lambda nb: nb["cells"][1].pop("id"), "cell 2 needs an id"),
    "an id with a blank": (edit("start", id="my cell"), "cell 2 needs an id"),
    "two ids": (edit("tail", id="start"), "cell start: two cells have this id"),
    "a raw cell": (edit("start", cell_type="raw"), "cell start: a raw cell"),
    "raises-exception": (edit("start", tags=["raises-exception"]), "cell start: the tag raises-exception"),
    "NBVAL_SKIP": (edit("tail", tags=["NBVAL_SKIP"]), "cell tail: the tag NBVAL_SKIP"),
    "NBVAL_SKIP in a comment": (edit("tail", source="# NBVAL_SKIP\n1"), "cell tail: NBVAL_SKIP would hide"),
    "a misspelt tag": (edit("tail", tags=["slwo"]), "cell tail: the tag slwo is not allowed"),
    "a tag on markdown": (edit("title", tags=["slow"]), "cell title: tags are for code cells"),
    "markers in markdown": (edit("title", source="### END SOLUTION"), "cell title: a solution marker in"),
    "markers without the tag": (edit("start", source=STUB), "cell start: the tag exercise and"),
    "the tag without markers": (edit("ex1-stub", source="double = 1"), "cell ex1-stub: the tag exercise and"),
    "bad markers": (edit("ex1-stub", source="    " + STUB), "cell ex1-stub: .* plain Python"),
    "a check of nothing": (edit("ex1-check", exercise=None), "cell ex1-check: .* must hold id"),
    "an exercise without check": (edit("tail", exercise=SECOND), "cell tail: metadata.exercise on a cell"),
    "difficulty 4": (exercise(difficulty=4), "difficulty is 4"),
    "another lesson's exercise": (exercise(id="other.1"), "exercise other.1 comes where tiny.1 is expected"),
    "two check cells": (insert(5, AGAIN), "cell again: exercise tiny.1 comes where tiny.2 is expected"),
    "the tag gpu": (edit("tail", tags=["gpu"]), "cell tail: a cell for a GPU begins with `%%gpu`"),
    "%%gpu and no words": (edit("tail", source="%%gpu\n1"), "cell tail: `%%gpu` is followed by a few words"),
    "a name of a GPU cell": (edit_both, "cell more: it reads y, which a `%%gpu` cell defines"),
    "a slow check": (edit("ex1-check", tags=["check", "slow"]), "carries no other tag"),
    "a check on the GPU": (edit("ex1-check", source="%%gpu it\n1"), "starts with `# NBVAL_CHECK_OUTPUT`"),
    "an answer that reads more": (
        edit("ex1-stub", source=STUB.replace("x + x", "x + other")),
        "cell ex1-stub: its answer reads other, which no import and no exercise defines",
    ),
    "a check nobody compares": (edit("ex1-check", source="1"), "starts with `# NBVAL_CHECK_OUTPUT`"),
    "no stub": (lambda nb: nb["cells"].pop(3), "exercise tiny.1 has no stub"),
    "the stub of another exercise": (insert(5, CHECK2), "exercise tiny.2 has no stub"),
    "one hint": (edit("ex1", source=HEAD + "<details>one</details>"), "tiny.1 has 1 hints"),
    "hints of another exercise": (insert(5, HEAD2, STUB2, CHECK2), "tiny.2 has 0 hints"),
    "another heading": (
        edit("ex1", source=HEAD.replace("5 min", "9 min")),
        "its metadata says another heading",
    ),
    "a stub without check": (insert(6, STUB2), "has no check"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_notebook_that_breaks_a_rule_is_refused(name):
    change, why = BROKEN[name]
    nb = worked()
    build.lesson(nb, "01_tiny")
    change(nb)
    with pytest.raises(CourseError, match=why) as e:
        build.lesson(nb, "01_tiny")
        answers.module(nb, "01_tiny")
    assert str(e.value).startswith("nbs/01_tiny.ipynb") and "\n" not in str(e.value)

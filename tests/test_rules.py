import pytest
from small_course import STUB, code, markdown, worked

from course_lib.authoring import build
from course_lib.authoring.notebook import CourseError


def course(**changes):
    return lambda nb: nb["metadata"]["course"].update(changes)


def edit(name, **changes):
    "Change what a cell has; a key that it lacks goes to its metadata."

    def change(nb):
        cell = next(c for c in nb["cells"] if c["id"] == name)
        for k, v in changes.items():
            (cell if k in cell else cell["metadata"])[k] = v

    return change


def insert(at, *cells):
    return lambda nb: nb["cells"].__setitem__(slice(at, at), cells)


def read_on_the_cpu(nb):
    edit("tail", source="%%gpu a number\ny = 1")(nb)
    nb["cells"].append(code("more", "def f():\n    return y"))


HEAD = "### Exercise tiny.1 · Double · ●●○ · 5 min\n\n"
FIRST = {"id": "tiny.1", "title": "Double", "minutes": 5, "difficulty": 2}
SECOND = FIRST | {"id": "tiny.2"}
STUB2 = code("ex2-stub", STUB, ["exercise"])
CHECK2 = code("ex2-check", "# NBVAL_CHECK_OUTPUT\n1", ["check"], exercise=SECOND)
HEAD2 = markdown("ex2", HEAD.replace("tiny.1", "tiny.2"))
COURSE, EXERCISE = r"metadata\.course must hold slug", r"cell ex1-check: metadata\.exercise must hold id"
TAG, CHECK = "the tag exercise and markers belong", "starts with `# NBVAL_CHECK_OUTPUT`"
BROKEN = {
    "no metadata": (lambda nb: nb["metadata"].pop("course"), COURSE),
    "no title": (lambda nb: nb["metadata"]["course"].pop("title"), COURSE),
    "minutes in words": (course(minutes="20"), COURSE),
    "another slug": (course(slug="teeny"), "the file's name must agree"),
    "no id": (lambda nb: nb["cells"][1].pop("id"), r"cell \(no id\): a cell needs an id of its own"),
    "an id with a blank": (edit("start", id="my cell"), "needs an id of its own"),
    "two ids": (edit("tail", id="start"), "cell start: a cell needs an id of its own"),
    "a raw cell": (edit("start", cell_type="raw"), "cell start: a cell is code or markdown"),
    "another tag": (edit("tail", tags=["gpu"]), "cell tail: gpu is not allowed; the tags of"),
    "a tag on markdown": (edit("title", tags=["slow"]), "cell title: slow is not allowed"),
    "NBVAL_SKIP in a comment": (
        edit("tail", source="# NBVAL_SKIP\n1"),
        "cell tail: NBVAL_SKIP is not allowed",
    ),
    "markers in markdown": (edit("title", source="### END SOLUTION"), f"cell title: {TAG}"),
    "markers without the tag": (edit("start", source=STUB), f"cell start: {TAG}"),
    "the tag without markers": (edit("ex1-stub", source="double = 1"), f"cell ex1-stub: {TAG}"),
    "bad markers": (edit("ex1-stub", source="    " + STUB), "cell ex1-stub: .* plain Python"),
    "a check of nothing": (edit("ex1-check", exercise=None), EXERCISE),
    "another lesson's exercise": (edit("ex1-check", exercise=FIRST | {"id": "other.1"}), EXERCISE),
    "difficulty 4": (edit("ex1-check", exercise=FIRST | {"difficulty": 4}), EXERCISE),
    "%%gpu and no words": (edit("tail", source="%%gpu\n1"), "cell tail: `%%gpu` is followed by a few words"),
    "a name of a GPU cell": (read_on_the_cpu, "cell more: it reads y, which a `%%gpu` cell defines"),
    "a slow check": (edit("ex1-check", tags=["check", "slow"]), CHECK),
    "a check nobody compares": (edit("ex1-check", source="1"), CHECK),
    "no stub": (lambda nb: nb["cells"].pop(3), "exercise tiny.1 has no stub"),
    "one hint": (edit("ex1", source=HEAD + "<details>one</details>"), "tiny.1 has 1 hints"),
    "hints of another exercise": (insert(5, HEAD2, STUB2, CHECK2), "tiny.2 has 0 hints"),
    "another heading": (edit("ex1", source=HEAD.replace("5", "9")), "its metadata says another heading"),
    "a stub without check": (insert(6, STUB2), "has no check"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_notebook_that_breaks_a_rule_is_refused(name):
    change, why = BROKEN[name]
    nb = worked()
    change(nb)
    with pytest.raises(CourseError, match=why) as e:
        build.lesson(nb, "01_tiny")
    assert str(e.value).startswith("nbs/01_tiny.ipynb") and "\n" not in str(e.value)

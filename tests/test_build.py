import argparse
import copy
import re

import pytest
import small_course

from course_lib.authoring import answers, build, notebook

ROOT = small_course.REPOSITORY


@pytest.fixture
def root(tmp_path, monkeypatch):
    small_course.use(small_course.write(tmp_path), monkeypatch)
    return tmp_path


def run(check=False):
    return build.build_cmd(argparse.Namespace(check=check))


def lesson(nb, stem="01_tiny"):
    return build.lesson(nb, stem)


def by_id(nb):
    return {c["id"]: c for c in nb["cells"]}


def test_a_lesson_has_stubs_and_no_outputs():
    nb = small_course.worked()
    made = lesson(nb)
    cells = by_id(made)
    assert [c["id"] for c in made["cells"]] == [c["id"] for c in nb["cells"]]
    assert "".join(cells["ex1-stub"]["source"]) == (
        'def double(x):\n    "Twice x."\n    # YOUR CODE HERE\n    raise NotImplementedError'
    )
    for c in made["cells"]:
        if c["cell_type"] == "code":
            assert c["outputs"] == [] and c["execution_count"] is None
    assert cells["ex1-check"]["metadata"]["exercise"]["id"] == "tiny.1"
    assert set(made["metadata"]) == {"course", "kernelspec", "language_info"}
    assert made["metadata"]["kernelspec"]["name"] == "python3"
    assert made["metadata"]["course"]["version"] == notebook.lesson_hash(nb)


def test_a_lesson_is_a_valid_notebook():
    nbformat = pytest.importorskip("nbformat")
    nbformat.validate(lesson(small_course.worked()))


def test_a_lesson_depends_on_sources_alone():
    nb = small_course.worked()
    again = copy.deepcopy(nb)
    for c in again["cells"]:
        if c["cell_type"] == "code":
            c |= {"outputs": [], "execution_count": 99}
            c["metadata"]["execution"] = {"iopub.status.busy": "2026-11-29T10:00:00Z"}
        c["source"] = c["source"].splitlines(keepends=True)
    del again["metadata"]["recorded"], again["metadata"]["widgets"]
    again["metadata"]["language_info"]["version"] = "3.11.7"
    assert notebook.dump(lesson(again)) == notebook.dump(lesson(nb))


def test_the_answer_is_part_of_the_version():
    other = small_course.worked(stub=small_course.STUB.replace("x + x", "2 * x"))
    assert lesson(other)["cells"] == lesson(small_course.worked())["cells"]
    assert lesson(other)["metadata"] != lesson(small_course.worked())["metadata"]


def test_build_is_idempotent_and_check_holds_it(root, capsys):
    assert run(check=True) == 1
    assert "lessons/01_tiny.ipynb is behind its source" in capsys.readouterr().err
    assert not list((root / "lessons").iterdir()) and not (root / "course_lib").exists()
    assert run() == 0
    first = {p: p.read_bytes() for p in root.rglob("*") if p.is_file()}
    assert len(list((root / "lessons").iterdir())) == 2
    assert run() == 0 and run(check=True) == 0
    assert {p: p.read_bytes() for p in root.rglob("*") if p.is_file()} == first


def test_check_names_a_lesson_that_is_behind(root, capsys):
    run()
    small_course.put(root, small_course.worked(stub=small_course.STUB.replace("x + x", "2 * x")))
    capsys.readouterr()
    assert run(check=True) == 1
    behind = "course_lib/tiny/solutions.py", "lessons/01_tiny.ipynb"
    assert capsys.readouterr().err == "".join(
        f"{n} is behind its source: run `course build`\n" for n in behind
    )


def test_an_edited_lesson_is_behind(root):
    run()
    path = root / "lessons/06_second.ipynb"
    path.write_text(path.read_text().replace("YOUR CODE", "MY CODE"))
    assert run(check=True) == 1
    assert run() == 0 and "YOUR CODE" in path.read_text()


def test_an_orphaned_lesson(root, capsys):
    run()
    (root / "nbs/06_second.ipynb").unlink()
    assert run(check=True) == 1
    assert "lessons/06_second.ipynb has no source in nbs/" in capsys.readouterr().err
    assert run() == 0 and not (root / "lessons/06_second.ipynb").exists()
    assert not (root / "course_lib/second/solutions.py").exists()
    assert "06" not in (root / "README.md").read_text()


def test_a_refused_source_leaves_its_lesson_and_spares_the_others(root, capsys):
    run()
    old = (root / "lessons/01_tiny.ipynb").read_bytes()
    nb = small_course.worked()
    nb["cells"][1]["metadata"]["tags"] = ["NBVAL_SKIP"]
    small_course.put(root, nb)
    small_course.put(root, small_course.worked("06", "second", "Renamed"))
    assert run(check=True) == 1
    capsys.readouterr()
    assert run() == 1
    assert capsys.readouterr().err.startswith("nbs/01_tiny.ipynb, cell start: the tag NBVAL_SKIP")
    assert (root / "lessons/01_tiny.ipynb").read_bytes() == old
    assert "Renamed" in (root / "lessons/06_second.ipynb").read_text()


@pytest.mark.parametrize("text", ["{", "[]", '{"cells": [1]}', "\x00"])
def test_a_damaged_source_is_one_sentence(root, capsys, text):
    (root / "nbs/01_tiny.ipynb").write_text(text)
    assert run() == 1
    assert re.fullmatch(
        r".*01_tiny.ipynb is not a notebook .*take it from git again\n", capsys.readouterr().err
    )


def test_names_of_worked_notebooks(root, capsys):
    small_course.put(root, small_course.worked(), "Untitled.ipynb")
    small_course.put(root, small_course.worked("06", "third"), "06_third.ipynb")
    assert run() == 1
    err = capsys.readouterr().err
    assert "Untitled.ipynb: a lesson's file is named NN_topic.ipynb" in err and "a second lesson 06" in err


def test_readme_is_derived_and_held(root, capsys):
    run()
    text = (root / "README.md").read_text(encoding="utf-8")
    assert (
        text.startswith("# Tiny\n") and text.endswith("<!-- /figures -->\nThe end.\n") and "\nText.\n" in text
    )
    assert "**A. First**" in text
    assert "| 06 | [Second](lessons/06_second.ipynb) | 20 | nothing | 1 |" in text
    assert "| `second.copy_tbps` | 4.27 | TB/s | ≥ 4 | NVIDIA H200 | 2026-11-29 |" in text
    (root / "README.md").write_text(text.replace("4.27", "5.27"), encoding="utf-8")
    capsys.readouterr()
    assert run(check=True) == 1
    assert "README.md is behind" in capsys.readouterr().err
    assert run() == 0 and (root / "README.md").read_text(encoding="utf-8") == text


def test_readme_without_its_parts_is_refused(root, capsys):
    (root / "README.md").write_text("# Nothing here\n")
    assert run(check=True) == 1
    assert "README.md must hold one part between `<!-- lessons -->`" in capsys.readouterr().err


def test_a_draft_is_built_and_not_shown(root):
    nb = small_course.worked()
    nb["metadata"]["recorded"] = {"cells": {}}  # marked cells alone
    small_course.put(root, nb)
    assert run() == 0 and (root / "lessons/01_tiny.ipynb").exists()
    text = (root / "README.md").read_text()
    assert "01_tiny" not in text and "06_second" in text and "tiny." not in text
    nb = small_course.worked("06", "second", "Second")
    del nb["metadata"]["recorded"]
    small_course.put(root, nb)
    assert run() == 0
    text = (root / "README.md").read_text()
    assert "None yet." in text and "None recorded yet." in text


def test_the_picture_of_the_readme_is_one_that_a_lesson_drew(root):
    nb = small_course.worked()
    image = {"output_type": "display_data", "metadata": {}, "data": {"image/png": "iVBORw0="}}
    by_id(nb)["start"] |= {"outputs": [image], "metadata": {"picture": "picture.png"}}
    small_course.put(root, nb)
    assert run() == 0 and (root / "picture.png").read_bytes() == b"\x89PNG\r"
    (root / "picture.png").write_bytes(b"")
    assert run(check=True) == 1


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
print(double(1))
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
    assert answers.module(nb, "01_tiny") == SOLUTIONS

"What a worked notebook must hold to, so that a lesson can be built from it and its exercises judged."

import functools
import re

from course_lib.authoring import markers, notebook
from course_lib.authoring.notebook import CourseError

METADATA = {"number": str, "slug": str, "title": str, "part": str, "minutes": int, "needs": str}
# What a lesson does without a GPU (`course doctor`): the real thing, Triton's interpreter, a simulation.
WITHOUT_GPU = ("cpu", "interpreter", "simulated")
EXERCISE = {"id": str, "title": str, "minutes": int, "difficulty": int}
TAGS = {"exercise", "check", "gpu", "slow", "predict"}
# These make nbval accept a cell that fails, or leave it out.
SILENCERS = re.compile(
    r"#\s*(NBVAL_SKIP|NBVAL_IGNORE_OUTPUT|NBVAL_RAISES_EXCEPTION|PYTEST_VALIDATE_IGNORE_OUTPUT)"
)


def check(nb, stem):
    "Raise CourseError, naming notebook, cell and rule, where nbs/<stem>.ipynb breaks a rule."
    _check_metadata(nb, stem)
    _check_cells(nb, stem)
    _check_exercises(nb, stem)


def refuse(stem, cell, why):
    "Raise CourseError that says where (`cell` is a cell, or None for the whole notebook) and why."
    place = f"nbs/{stem}.ipynb" + ("" if cell is None else f", cell {cell.get('id') or '(no id)'}")
    raise CourseError(f"{place}: {why}")


def _check_metadata(nb, stem):
    course = nb["metadata"].get("course")
    _check_keys(course, METADATA, "metadata.course", stem, None)
    if (way := course.get("without_gpu", "cpu")) not in WITHOUT_GPU:
        refuse(
            stem, None, f"metadata.course.without_gpu is {way!r}; expected one of {', '.join(WITHOUT_GPU)}"
        )
    if stem != f"{course['number']}_{course['slug']}":
        said = f"{course['number']}_{course['slug']}"
        refuse(stem, None, f"metadata.course says {said}; the file's name must agree")


def _check_keys(found, expected, what, stem, cell):
    names = ", ".join(f"{k} ({t.__name__})" for k, t in expected.items())
    good = isinstance(found, dict) and all(type(found.get(k)) is t and found[k] for k, t in expected.items())
    if not good:
        refuse(stem, cell, f"{what} must hold {names}; it is {found!r}")


def _check_cells(nb, stem):
    seen = set()
    for number, cell in enumerate(nb["cells"], 1):
        no = functools.partial(refuse, stem, cell)
        tags, text, kind = notebook.tags(cell), notebook.source(cell), cell["cell_type"]
        if kind not in ("code", "markdown"):
            no(f"a {kind} cell; expected code or markdown")
        name = cell.get("id")
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
            refuse(stem, None, f"cell {number} needs an id of letters, digits, - and _ that says what it is")
        if name in seen:
            no("two cells have this id")
        seen.add(name)
        if unknown := tags - TAGS:
            no(f"the tag {min(unknown)} is not allowed; the tags are {', '.join(sorted(TAGS))}")
        if kind == "markdown" and tags:
            no("tags are for code cells")
        if kind == "code" and (m := SILENCERS.search(text)):
            no(f"{m[1]} would hide a failure")
        if kind == "markdown" and markers.has_markers(text):
            no("a solution marker in a markdown cell")
        if kind == "code" and markers.has_markers(text) != ("exercise" in tags):
            no("the tag exercise and the solution markers belong on the same cells")


def _check_exercises(nb, stem):
    prose, stubs, seen = "", 0, set()
    for cell in nb["cells"]:
        no = functools.partial(refuse, stem, cell)
        tags, text = notebook.tags(cell), notebook.source(cell)
        stubs += "exercise" in tags
        prose += text + "\n" if cell["cell_type"] == "markdown" else ""
        if "check" not in tags:
            if "exercise" in cell["metadata"]:
                no("metadata.exercise on a cell without the tag check")
            continue
        found = cell["metadata"].get("exercise")
        _check_keys(found, EXERCISE, "a check cell's metadata.exercise", stem, cell)
        name, level = found["id"], found["difficulty"]
        if name in seen:
            no(f"exercise {name} has two check cells")
        if name != f"{stem[:2]}.{len(seen) + 1}":
            no(f"exercise {name} comes where {stem[:2]}.{len(seen) + 1} is expected")
        seen.add(name)
        if level not in (1, 2, 3):
            no(f"difficulty is {level}; expected 1, 2 or 3")
        if tags != {"check"}:
            no("a check cell carries no other tag, so that it runs on every machine")
        if not text.startswith("# NBVAL_CHECK_OUTPUT\n"):
            no("a check cell starts with `# NBVAL_CHECK_OUTPUT`, or its line is never compared")
        if not stubs:
            no(f"exercise {name} has no stub: a cell tagged exercise between the last check and this")
        dots = "●" * level + "○" * (3 - level)
        heading = f"### Exercise {name} · {found['title']} · {dots} · {found['minutes']} min"
        if heading not in prose.split("\n"):
            no(f"exercise {name} is headed otherwise than its metadata says: `{heading}`")
        if (hints := len(re.findall(r"<details>.*?</details>", prose, re.DOTALL))) < 2:
            no(f"exercise {name} has {hints} hints in <details>; it needs two or more")
        prose, stubs = "", 0
    if stubs:
        refuse(stem, None, "a stub after the last check cell has no check")

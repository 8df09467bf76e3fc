"What a worked notebook must hold to, so that a lesson can be built from it and its exercises judged."

import re

from course_lib.authoring import markers, notebook, stamps
from course_lib.authoring.notebook import CourseError

METADATA = {"slug": str, "title": str, "part": str, "minutes": int, "needs": str}
# What a lesson does without a GPU (`course doctor`): the real thing, Triton's interpreter, a simulation.
CHOICES = {"without_gpu": ("cpu", "interpreter", "simulated"), "gpus": ("all",)}
EXERCISE = {"id": str, "title": str, "minutes": int, "difficulty": int}
TAGS = {"exercise", "check", "slow", "predict"}
# These make nbval accept a cell that fails, or leave it out.
SILENCERS = re.compile(r"#\s*(NBVAL_(?:SKIP|IGNORE_OUTPUT|RAISES_EXCEPTION)|PYTEST_VALIDATE_IGNORE_OUTPUT)")


def check(nb, stem):
    "Raise CourseError, naming notebook, cell and rule, where nbs/<stem>.ipynb breaks a rule."
    course = nb["metadata"].get("course")
    _check_keys(course, METADATA, "metadata.course", stem, None)
    for key, ways in CHOICES.items():
        if course.get(key, ways[0]) not in ways:
            refuse(stem, None, f"metadata.course.{key} is {course[key]!r}; expected {' or '.join(ways)}")
    if stem[3:] != course["slug"]:
        refuse(stem, None, f"metadata.course.slug is {course['slug']!r}; the file's name must agree")
    _check_cells(nb, stem)
    _check_exercises(nb, stem)


def refuse(stem, cell, why):
    "Raise CourseError that says where (`cell` is a cell, or None for the whole notebook) and why."
    place = f"nbs/{stem}.ipynb" + ("" if cell is None else f", cell {cell.get('id') or '(no id)'}")
    raise CourseError(f"{place}: {why}")


def _check_keys(found, expected, what, stem, cell):
    names = ", ".join(f"{k} ({t.__name__})" for k, t in expected.items())
    good = isinstance(found, dict) and all(type(found.get(k)) is t and found[k] for k, t in expected.items())
    if not good:
        refuse(stem, cell, f"{what} must hold {names}; it is {found!r}")


def _check_cells(nb, stem):
    seen = set()
    for number, cell in enumerate(nb["cells"], 1):
        tags, text, kind = notebook.tags(cell), notebook.source(cell), cell["cell_type"]
        code, name = kind == "code", cell.get("id")
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
            refuse(stem, None, f"cell {number} needs an id of letters, digits, - and _ that says what it is")
        unknown, silencer, marked = tags - TAGS, SILENCERS.search(text), markers.has_markers(text)
        for broken, why in (
            (kind not in ("code", "markdown"), f"a {kind} cell; expected code or markdown"),
            (name in seen, "two cells have this id"),
            ("gpu" in tags, "the tag gpu is not allowed: a cell for a GPU begins with `%%gpu` and a few words"),
            (unknown, f"the tag {min(unknown, default='')} is not allowed; they are {', '.join(sorted(TAGS))}"),
            (not code and tags, "tags are for code cells"),
            (code and silencer, f"{silencer and silencer[1]} would hide a failure"),
            (not code and marked, "a solution marker in a markdown cell"),
            (code and marked != ("exercise" in tags), "the tag exercise and the markers belong on the same cells"),
            (re.match(r"%%gpu(?!\S)(?![ \t]+\S)", text), "`%%gpu` needs a few words: what the cell would show"),
        ):  # fmt: skip
            if broken:
                refuse(stem, cell, why)
        seen.add(name)
    for cell, name in read_without_gpu(nb):
        refuse(stem, cell, f"it reads {name}, which a `%%gpu` cell defines: without a GPU there is none")


def read_without_gpu(nb):
    "(cell, name) for each name of a `%%gpu` cell that a cell without `%%gpu` reads."
    for cell, tree, names, givers, _ in stamps.flow(nb):
        if tree and not notebook.needs_gpu(cell):
            yield from (
                (cell, n) for n in sorted(names.reads) if n in givers and notebook.needs_gpu(givers[n])
            )


def _check_exercises(nb, stem):
    prose, stubs, count = "", 0, 0
    for cell in nb["cells"]:
        tags, text = notebook.tags(cell), notebook.source(cell)
        stubs += "exercise" in tags
        prose += text + "\n" if cell["cell_type"] == "markdown" else ""
        if "check" not in tags:
            if "exercise" in cell["metadata"]:
                refuse(stem, cell, "metadata.exercise on a cell without the tag check")
            continue
        found, count = cell["metadata"].get("exercise"), count + 1
        _check_keys(found, EXERCISE, "a check cell's metadata.exercise", stem, cell)
        name, level, expected = found["id"], found["difficulty"], f"{stem[3:]}.{count}"
        heading = f"### Exercise {name} · {found['title']} · {'●' * level + '○' * (3 - level)} · {found['minutes']} min"
        hints = len(re.findall(r"<details>.*?</details>", prose, re.DOTALL))
        for broken, why in (
            (name != expected, f"exercise {name} comes where {expected} is expected"),
            (level not in (1, 2, 3), f"difficulty is {level}; expected 1, 2 or 3"),
            (tags != {"check"}, "a check cell carries no other tag, so that it runs on every machine"),
            (
                not text.startswith("# NBVAL_CHECK_OUTPUT\n"),
                "a check cell starts with `# NBVAL_CHECK_OUTPUT`, or its line is never compared",
            ),
            (
                not stubs,
                f"exercise {name} has no stub: a cell tagged exercise between the last check and this",
            ),
            (
                heading not in prose.split("\n"),
                f"exercise {name} is headed otherwise than its metadata says: `{heading}`",
            ),
            (hints < 2, f"exercise {name} has {hints} hints in <details>; it needs two or more"),
        ):
            if broken:
                refuse(stem, cell, why)
        prose, stubs = "", 0
    if stubs:
        refuse(stem, None, "a stub after the last check cell has no check")

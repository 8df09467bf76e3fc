"What a worked notebook must hold to, so that a lesson can be built from it and its exercises judged."

import itertools
import re

from course_lib.authoring import markers, notebook, stamps
from course_lib.authoring.notebook import CourseError

METADATA = {"slug": str, "title": str, "part": str, "minutes": int, "needs": str}
EXERCISE = {"id": str, "title": str, "minutes": int, "difficulty": int}
TAGS = {"exercise", "check", "slow", "predict"}
# These make nbval accept a cell that fails, or leave it out.
SILENCERS = re.compile(r"#\s*(NBVAL_(?:SKIP|IGNORE_OUTPUT|RAISES_EXCEPTION)|PYTEST_VALIDATE_IGNORE_OUTPUT)")


def check(nb, stem):
    "Raise CourseError, naming notebook, cell and rule, where nbs/<stem>.ipynb breaks a rule."
    rules = itertools.chain(_of_notebook(nb, stem), _of_cells(nb), _of_exercises(nb, stem[3:]))
    for cell, broken, why in rules:  # one after the other: a rule relies on those before it
        if broken:
            refuse(stem, cell, why)


def refuse(stem, cell, why):
    "Raise CourseError that says where (`cell` is a cell, or None for the whole notebook) and why."
    place = f"nbs/{stem}.ipynb" + ("" if cell is None else f", cell {cell.get('id') or '(no id)'}")
    raise CourseError(f"{place}: {why}")


def _lacks(found, expected):
    "What is wrong with metadata that must hold keys of a type; '' where nothing is."
    good = isinstance(found, dict) and all(type(found.get(k)) is t and found[k] for k, t in expected.items())
    wanted = ", ".join(f"{k} ({t.__name__})" for k, t in expected.items())
    return "" if good else f"must hold {wanted}; it is {found!r}"


def _of_notebook(nb, stem):
    course = nb["metadata"].get("course")
    lacks = _lacks(course, METADATA)
    yield None, lacks, f"metadata.course {lacks}"
    slug = course["slug"]
    yield None, stem[3:] != slug, f"metadata.course.slug is {slug!r}; the file's name must agree"


def _of_cells(nb):
    seen = set()
    for number, cell in enumerate(nb["cells"], 1):
        tags, text, name = notebook.tags(cell), notebook.source(cell), cell.get("id")
        named = isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name)
        yield None, not named, f"cell {number} needs an id of letters, digits, - and _ that says what it is"
        yield cell, name in seen, "two cells have this id"
        seen.add(name)
        yield cell, "gpu" in tags, "a cell for a GPU begins with `%%gpu` and a few words; the tag gpu is gone"
        unknown, silencer, marked = (
            min(tags - TAGS, default=""),
            SILENCERS.search(text),
            markers.has_markers(text),
        )
        yield cell, unknown, f"the tag {unknown} is not allowed; the tags are {', '.join(sorted(TAGS))}"
        if cell["cell_type"] == "markdown":
            yield cell, tags, "tags are for code cells"
            yield cell, marked, "a solution marker in a markdown cell"
            continue
        yield cell, cell["cell_type"] != "code", f"a {cell['cell_type']} cell; expected code or markdown"
        yield cell, silencer, f"{silencer and silencer[1]} would hide a failure"
        yield cell, marked != ("exercise" in tags), "the tag exercise and markers belong on the same cells"
        yield cell, re.match(r"%%gpu\s*(\n|\Z)", text), "`%%gpu` is followed by a few words: what it shows"
    for cell, name in read_without_gpu(nb):
        yield cell, True, f"it reads {name}, which a `%%gpu` cell defines: without a GPU there is none"


def read_without_gpu(nb):
    "(cell, name) for each name of a `%%gpu` cell that a cell without `%%gpu` reads."
    on_gpu = set()
    for cell, tree, names, _, _ in stamps.flow(nb):
        if tree and notebook.needs_gpu(cell):
            on_gpu |= names.defines
        elif tree:
            yield from ((cell, name) for name in sorted(names.reads & on_gpu))
            on_gpu -= names.defines


def _of_exercises(nb, slug):
    prose, stubs, count = "", 0, 0
    for cell in nb["cells"]:
        tags, text, found = notebook.tags(cell), notebook.source(cell), cell["metadata"].get("exercise")
        stubs += "exercise" in tags
        prose += text + "\n" if cell["cell_type"] == "markdown" else ""
        if "check" not in tags:
            yield cell, "exercise" in cell["metadata"], "metadata.exercise on a cell without the tag check"
            continue
        lacks = _lacks(found, EXERCISE)
        yield cell, lacks, f"a check cell's metadata.exercise {lacks}"
        name, level, count = found["id"], found["difficulty"], count + 1
        yield cell, name != f"{slug}.{count}", f"exercise {name} comes where {slug}.{count} is expected"
        yield cell, level not in (1, 2, 3), f"difficulty is {level}; expected 1, 2 or 3"
        yield cell, tags != {"check"}, "a check cell carries no other tag, so that it runs on every machine"
        compared = text.startswith("# NBVAL_CHECK_OUTPUT\n")
        yield cell, not compared, "a check cell starts with `# NBVAL_CHECK_OUTPUT`, or it is never compared"
        yield cell, not stubs, f"exercise {name} has no stub: a cell tagged exercise, after the last check"
        dots = "●" * level + "○" * (3 - level)
        heading = f"### Exercise {name} · {found['title']} · {dots} · {found['minutes']} min"
        yield cell, heading not in prose.split("\n"), f"its metadata says another heading: `{heading}`"
        hints = len(re.findall(r"<details>.*?</details>", prose, re.DOTALL))
        yield cell, hints < 2, f"exercise {name} has {hints} hints in <details>; it needs two or more"
        prose, stubs = "", 0
    yield None, stubs, "a stub after the last check cell has no check"

"What a worked notebook must hold to, so that a lesson can be built from it and its exercises judged."

import re

from course_lib.authoring import markers, notebook, stamps
from course_lib.authoring.notebook import CourseError

METADATA = {"slug": str, "title": str, "part": str, "minutes": int, "needs": str}
TAGS = {"exercise", "check", "slow", "predict"}
# These make nbval accept a cell that fails, or leave it out.
SILENCERS = re.compile(r"#\s*(NBVAL_(?:SKIP|IGNORE_OUTPUT|RAISES_EXCEPTION)|PYTEST_VALIDATE_IGNORE_OUTPUT)")


def check(nb, stem):
    "Raise CourseError, naming notebook, cell and rule, where nbs/<stem>.ipynb breaks a rule."
    course = nb["metadata"].get("course")
    if not isinstance(course, dict) or any(type(course.get(k)) is not t for k, t in METADATA.items()):
        wanted = ", ".join(f"{k} ({t.__name__})" for k, t in METADATA.items())
        refuse(stem, None, f"metadata.course must hold {wanted}; it is {course!r}")
    if course["slug"] != stem[3:]:
        refuse(stem, None, f"metadata.course.slug is {course['slug']!r}; the file's name must agree")
    for rules in (_of_cells(nb), _of_exercises(nb, stem[3:])):
        for cell, broken, why in rules:  # one after the other: a rule relies on those before it
            if broken:
                refuse(stem, cell, why)


def refuse(stem, cell, why):
    "Raise CourseError that says where (`cell` is a cell, or None for the whole notebook) and why."
    place = f"nbs/{stem}.ipynb" + ("" if cell is None else f", cell {cell.get('id') or '(no id)'}")
    raise CourseError(f"{place}: {why}")


def _of_cells(nb):
    seen, on_gpu = set(), set()
    for cell in nb["cells"]:
        tags, text, name = notebook.tags(cell), notebook.source(cell), cell.get("id")
        named = isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name)
        yield cell, not named or name in seen, "a cell needs an id of its own, of letters, digits, - and _"
        seen.add(name)
        yield cell, cell["cell_type"] not in ("code", "markdown"), "a cell is code or markdown"
        allowed = TAGS if cell["cell_type"] == "code" else set()
        unknown = ", ".join(sorted(tags - allowed))
        yield cell, unknown, f"the tag {unknown} is not allowed; code cells have {', '.join(sorted(TAGS))}"
        silencer, marked = SILENCERS.search(text), markers.has_markers(text)
        yield cell, silencer, f"{silencer and silencer[1]} would hide a failure"
        yield cell, marked != ("exercise" in tags), "the tag exercise and markers belong on the same cells"
        yield cell, re.match(r"%%gpu\s*(\n|\Z)", text), "`%%gpu` is followed by a few words: what it shows"
    for cell, tree, names, _, _ in stamps.flow(nb):
        if tree and notebook.needs_gpu(cell):
            on_gpu |= names.defines
        elif tree:
            lost = ", ".join(sorted(names.reads & on_gpu))
            yield cell, lost, f"it reads {lost}, which a `%%gpu` cell defines: without a GPU there is none"
            on_gpu -= names.defines


def _of_exercises(nb, slug):
    prose, stubs, count = "", 0, 0
    for cell in nb["cells"]:
        tags, text, found = notebook.tags(cell), notebook.source(cell), cell["metadata"].get("exercise")
        stubs += "exercise" in tags
        prose += text + "\n" if cell["cell_type"] == "markdown" else ""
        if "check" not in tags:
            yield cell, found, "metadata.exercise belongs on a cell with the tag check"
            continue
        e, name, count = found if isinstance(found, dict) else {}, f"{slug}.{count + 1}", count + 1
        level, minutes, title = e.get("difficulty"), e.get("minutes"), e.get("title")
        good = e.get("id") == name and level in (1, 2, 3) and type(minutes) is int and title
        yield cell, not good, f"metadata.exercise must hold id ({name}), title, minutes, difficulty (1 to 3)"
        compared = tags == {"check"} and text.startswith("# NBVAL_CHECK_OUTPUT\n")
        yield cell, not compared, "a check cell starts with `# NBVAL_CHECK_OUTPUT` and carries no other tag"
        yield cell, not stubs, f"exercise {name} has no stub: a cell tagged exercise, after the last check"
        heading = f"### Exercise {name} · {title} · {'●' * level}{'○' * (3 - level)} · {minutes} min"
        yield cell, heading not in prose.split("\n"), f"its metadata says another heading: `{heading}`"
        hints = len(re.findall(r"<details>.*?</details>", prose, re.DOTALL))
        yield cell, hints < 2, f"exercise {name} has {hints} hints in <details>; it needs two or more"
        prose, stubs = "", 0
    yield None, stubs, "a stub after the last check cell has no check"

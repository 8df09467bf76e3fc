"""What a worked notebook must hold to, and the stub that is made from an exercise's solved cell.

A SOLUTION block (nbgrader's markers) is the whole body of a function after its docstring, so that the stub's
cell always runs. A STARTER block after it is code to mend: commented out here, put in place in the stub.
"""

import ast
import re

from course_lib.authoring import notebook, stamps
from course_lib.authoring.notebook import CourseError

METADATA = {"slug": str, "title": str, "part": str, "minutes": int, "needs": str}
TAGS = {"exercise", "check", "slow", "predict"}
# These make nbval accept a cell that fails, or leave it out.
SILENCERS = re.compile(r"#\s*(NBVAL_(?:SKIP|IGNORE_OUTPUT|RAISES_EXCEPTION)|PYTEST_VALIDATE_IGNORE_OUTPUT)")
BLOCK = re.compile(
    r"^([ \t]*)### BEGIN SOLUTION[ \t]*\n(.*?)^\1### END SOLUTION[ \t]*$"
    r"(?:\s*?\n\1### BEGIN STARTER[ \t]*\n(.*?)^\1### END STARTER[ \t]*$)?",
    re.MULTILINE | re.DOTALL,
)
# Anything that looks like a marker and isn't one would leave the answer in the lesson.
LIKE_A_MARKER = re.compile(r"#\s*(BEGIN|END)[\s_-]*(SOLUTIONS?|STARTERS?)\b", re.IGNORECASE)


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
        unknown = ", ".join(sorted(tags - allowed | set(SILENCERS.findall(text))))
        yield cell, unknown, f"{unknown} is not allowed; the tags of code cells are {', '.join(sorted(TAGS))}"
        marked = has_markers(text)
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


def has_markers(text):
    "Whether a cell holds a marker, or something that was meant to be one."
    return bool(LIKE_A_MARKER.search(text))


def solved(text):
    "The cell with its answers, and without markers and starters."
    return BLOCK.sub(lambda m: m[2].removesuffix("\n"), text)


def stub(text):
    "The cell that the learner gets, from the cell with markers. Raises CourseError that says what is wrong."
    tree = _parse(text, "a cell with markers must be plain Python")
    for m in BLOCK.finditer(text):
        line = text.count("\n", 0, m.start()) + 1
        if has_markers(m[2]) or not _is_body(tree, line, line + m[2].count("\n") + 1, len(m[1])):
            raise CourseError(
                f"the SOLUTION block at line {line} must be exactly the body of one function "
                "or method after its docstring, indented like it"
            )
    rest = BLOCK.sub(lambda m: "\n" * m[0].count("\n"), text)
    if m := LIKE_A_MARKER.search(rest):
        line = rest.count("\n", 0, m.start()) + 1
        raise CourseError(
            f"the marker at line {line} belongs to no block: look at its BEGIN, END and indentation"
        )
    made = BLOCK.sub(_replacement, text)
    _parse(made, "the cell isn't valid Python once its blocks are replaced")
    return made


def _replacement(m):
    indent, starter = m[1], m[3]
    if starter is None:
        return f"{indent}# YOUR CODE HERE\n{indent}raise NotImplementedError"
    lines = starter.splitlines()
    if not all(re.match(rf"{indent}#( |$)", line) for line in lines if line.strip()):
        raise CourseError("a STARTER block must be commented out with `# ` at the block's indentation")
    return "\n".join((indent + line[len(indent) + 2 :]).rstrip() for line in lines)


def _parse(text, rule):
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError) as e:
        raise CourseError(f"{rule} (line {getattr(e, 'lineno', None) or 1} is not)") from None


def _is_body(tree, begin, end, indent):
    "Whether the lines between `begin` and `end` are exactly a function's body, without its docstring."
    inside = {n for n in ast.walk(tree) if isinstance(n, ast.stmt) and begin < n.lineno < end}
    for fn in ast.walk(tree):
        if isinstance(fn, ast.FunctionDef | ast.AsyncFunctionDef):
            body = fn.body[ast.get_docstring(fn, clean=False) is not None :]
            own = {n for statement in body for n in ast.walk(statement) if isinstance(n, ast.stmt)}
            if body and own == inside:
                return body[0].col_offset == indent and body[-1].end_lineno < end
    return False

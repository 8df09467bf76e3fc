"""From an exercise's solved cell to its stub: nbgrader's markers, and where they may stand.

A SOLUTION block is the whole body of a function after its docstring, so that the stub's cell always
runs. A STARTER block after it is code to mend: commented out here, put in place in the stub.
"""

import ast
import re

from course_lib.authoring.notebook import CourseError

BLOCK = re.compile(
    r"^([ \t]*)### BEGIN SOLUTION[ \t]*\n(.*?)^\1### END SOLUTION[ \t]*$"
    r"(?:\s*?\n\1### BEGIN STARTER[ \t]*\n(.*?)^\1### END STARTER[ \t]*$)?",
    re.MULTILINE | re.DOTALL,
)
# Anything that looks like a marker and isn't one would leave the answer in the lesson.
LIKE_A_MARKER = re.compile(r"#\s*(BEGIN|END)[\s_-]*(SOLUTIONS?|STARTERS?)\b", re.IGNORECASE)


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

"""From an exercise's solved cell to its stub: nbgrader's markers, and where they may stand.

A SOLUTION block is the whole body of a function after its docstring, so that the stub's cell always
runs. A STARTER block after it is code to mend: commented out here, put in place in the stub.
"""

import ast
import re

from course_lib.authoring.notebook import CourseError

MARKER = re.compile(r"^([ \t]*)### (BEGIN|END) (SOLUTION|STARTER)[ \t]*$")
# Anything that looks like a marker and isn't one would leave the answer in the lesson.
LIKE_A_MARKER = re.compile(r"#\s*(BEGIN|END)[\s_-]*(SOLUTIONS?|STARTERS?)\b", re.IGNORECASE)
STUB = ("# YOUR CODE HERE", "raise NotImplementedError")


def has_markers(text):
    "Whether a cell holds a marker, or something that was meant to be one."
    return bool(LIKE_A_MARKER.search(text))


def stub(text):
    """The cell that the learner gets, from the cell with markers. Both are Python source.

    Raises CourseError with what is wrong with the markers, which the caller completes with the place.
    """
    lines = text.split("\n")
    blocks = _blocks(lines)
    tree = _parse(text)
    out, at = [], 0
    for i, (kind, begin, end, indent) in enumerate(blocks):
        before, after = blocks[i - 1] if i else None, blocks[i + 1] if i + 1 < len(blocks) else None
        if kind == "STARTER":
            if not (before and before[0] == "SOLUTION" and _blank(lines[at:begin])):
                raise CourseError(f"the STARTER block at line {begin + 1} must follow a SOLUTION block")
            out += [_uncommented(lines[n], indent, n) for n in range(begin + 1, end)]
        else:
            if _indent_of_body(tree, begin, end) != len(indent):
                raise CourseError(
                    f"the SOLUTION block at line {begin + 1} must be exactly the body of one function "
                    "or method after its docstring, indented like it"
                )
            out += lines[at:begin]
            if not (after and after[0] == "STARTER"):
                out += [indent + line for line in STUB]
        at = end + 1
    result = "\n".join(out + lines[at:])
    try:
        _parse(result)
    except CourseError:
        raise CourseError("the cell isn't valid Python once its blocks are replaced") from None
    return result


def _blocks(lines):
    "The blocks of a cell in order, as (kind, line of BEGIN, line of END, indentation), lines from 0."
    found, open_ = [], None
    for i, line in enumerate(lines):
        m = MARKER.match(line)
        if m is None:
            if LIKE_A_MARKER.search(line):
                raise CourseError(
                    f"line {i + 1} is a misspelt marker: write `### BEGIN SOLUTION` on its own line"
                )
            continue
        indent, word, kind = m.groups()
        if word == "BEGIN":
            if open_:
                raise CourseError(
                    f"BEGIN {kind} at line {i + 1} is inside the {open_[0]} block of line {open_[1] + 1}"
                )
            open_ = (kind, i, indent)
        else:
            if not open_ or open_[0] != kind:
                raise CourseError(f"END {kind} at line {i + 1} has no BEGIN {kind} before it")
            if indent != open_[2]:
                raise CourseError(f"END {kind} at line {i + 1} is not indented like its BEGIN")
            found.append((kind, open_[1], i, indent))
            open_ = None
    if open_:
        raise CourseError(f"BEGIN {open_[0]} at line {open_[1] + 1} has no END {open_[0]} after it")
    return found


def _parse(text):
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError) as e:
        line = getattr(e, "lineno", None) or 1
        raise CourseError(f"a cell with markers must be plain Python (line {line} is not)") from None


def _indent_of_body(tree, begin, end):
    "The indentation of the function body that lines `begin` to `end` wrap exactly, or None."
    inside = [n for n in ast.walk(tree) if isinstance(n, ast.stmt) and begin < n.lineno - 1 < end]
    for fn in ast.walk(tree):
        if isinstance(fn, ast.FunctionDef | ast.AsyncFunctionDef):
            documented = ast.get_docstring(fn, clean=False) is not None
            header = fn.body[0] if documented else (fn.returns or fn)
            header_end = header.lineno if header is fn else header.end_lineno
            body = fn.body[documented:]
            if body and header_end - 1 < begin and body[-1].end_lineno - 1 < end:
                own = [n for statement in body for n in ast.walk(statement) if isinstance(n, ast.stmt)]
                if set(own) == set(inside):
                    return body[0].col_offset
    return None


def _uncommented(line, indent, i):
    if not line.strip():
        return ""
    rest = line[len(indent) :]
    if not line.startswith(indent) or not (rest == "#" or rest.startswith("# ")):
        raise CourseError(
            f"line {i + 1} of the STARTER block must be commented out with `# ` at the block's indentation"
        )
    return (indent + rest[2:]).rstrip()


def _blank(lines):
    return not any(line.strip() for line in lines)

"README's derived parts, between their comments: the map of lessons and the table of recorded figures."

import re

from course_lib import recorded
from course_lib.authoring import notebook
from course_lib.authoring.notebook import CourseError


def refreshed(lessons):
    "README.md's text with its derived parts made anew: from `lessons` ({stem: worked notebook}) and figures."
    path = notebook.ROOT / "README.md"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        raise CourseError(f"{path.name} can't be read: {e.strerror}") from None
    for name, body in (("lessons", lesson_map(lessons)), ("figures", figure_table(recorded.figures()))):
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        parts = re.split(f"{begin}|{end}", text)
        if len(parts) != 3 or text.index(begin) > text.index(end):
            raise CourseError(f"README.md must hold one part between `{begin}` and `{end}`")
        text = f"{parts[0]}{begin}\n\n{body}\n{end}{parts[2]}"
    return text


def lesson_map(lessons):
    "A table for each part: number, title (a link), minutes, what it needs, number of exercises."
    parts = {}
    for stem, nb in lessons.items():
        c = nb["metadata"]["course"]
        title, count = f"[{c['title']}](lessons/{stem}.ipynb)", len(notebook.exercises(nb))
        parts.setdefault(c["part"], []).append((stem[:2], title, c["minutes"], c["needs"], count))
    head = ("", "lesson", "minutes", "needs", "exercises")
    return "\n".join(f"**{part}**\n\n{_table(head, rows)}" for part, rows in parts.items()) or "None yet.\n"


def figure_table(figures):
    "The recorded figures: name, value, unit, bar, machine, date."
    head, rows = ("figure", "value", "unit", "bar", "machine", "date"), []
    for f in figures:
        rows.append((f"`{f['name']}`", recorded.shown(f), f["unit"], bar(f), f["machine"], f["date"]))
    return _table(head, rows) if rows else "None recorded yet.\n"


def bar(figure):
    "A figure's bar as text, `≥ 4`; empty where it has none."
    if not figure.get("bar"):
        return ""
    sign = {">=": "≥", "<=": "≤"}.get(figure["bar"]["op"], figure["bar"]["op"])
    return f"{sign} {figure['bar']['value']:g}"


def _table(head, rows):
    "A Markdown table; numbers stand right."
    right = ["--:" if name in ("minutes", "exercises", "value") else "---" for name in head]
    rows = ([re.sub(r"\s+", " ", str(c)).replace("|", "\\|") for c in row] for row in (head, right, *rows))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)

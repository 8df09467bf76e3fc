"README's derived parts: the map of lessons and the table of recorded figures, between their comments."

import re

from course_lib import recorded
from course_lib.authoring import notebook
from course_lib.authoring.notebook import CourseError


def refreshed(lessons):
    "README.md's text with its derived parts made anew from the lessons (notebooks) and the recorded figures."
    path = notebook.ROOT / "README.md"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        raise CourseError(f"{path.name} can't be read: {e.strerror}") from None
    text = _replaced(text, "lessons", lesson_map(lessons))
    return _replaced(text, "figures", figure_table(recorded.figures()))


def _replaced(text, name, body):
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise CourseError(f"README.md must hold one part between `{begin}` and `{end}`")
    head, rest = text.split(begin)
    tail = rest.split(end)[1]
    return f"{head}{begin}\n\n{body}\n{end}{tail}"


def lesson_map(lessons):
    "A table for each part: number, title (a link), minutes, what it needs, number of exercises."
    out, part = [], None
    for nb in lessons:
        c = nb["metadata"]["course"]
        if c["part"] != part:
            part = c["part"]
            out += [
                "",
                f"**{part}**",
                "",
                "| | lesson | minutes | needs | exercises |",
                "| --- | --- | --: | --- | --: |",
            ]
        title = f"[{_cell(c['title'])}](lessons/{c['number']}_{c['slug']}.ipynb)"
        count = len(notebook.exercises(nb))
        out.append(f"| {c['number']} | {title} | {c['minutes']} | {_cell(c['needs'])} | {count} |")
    return "\n".join([*out[1:], ""]) if out else "None yet.\n"


def figure_table(figures):
    "The recorded figures: lesson, figure, value, unit, bar, machine, date."
    if not figures:
        return "None recorded yet.\n"
    out = [
        "| lesson | figure | value | unit | bar | machine | date |",
        "| --- | --- | --: | --- | --- | --- | --- |",
    ]
    for f in figures:
        row = (f["lesson"], f"`{f['name']}`", recorded.shown(f), f["unit"], bar(f), f["machine"], f["date"])
        out.append("| " + " | ".join(_cell(x) for x in row) + " |")
    return "\n".join([*out, ""])


def bar(figure):
    "A figure's bar as text, `≥ 4`; empty where it has none."
    if not figure.get("bar"):
        return ""
    sign = {">=": "≥", "<=": "≤"}.get(figure["bar"]["op"], figure["bar"]["op"])
    return f"{sign} {figure['bar']['value']:g}"


def _cell(text):
    return re.sub(r"\s+", " ", str(text)).replace("|", "\\|")

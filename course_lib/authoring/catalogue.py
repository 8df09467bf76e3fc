"`course list` and `course figures`: what the notebooks say about themselves, read as plain JSON."

import ast
import json

from course_lib import recorded
from course_lib.authoring import notebook, progress, readme
from course_lib.authoring.notebook import CourseError


def published():
    "The lessons without drafts: {number: (path in lessons/, worked notebook)}."
    found = {}
    for number, path in notebook.lessons().items():
        if (notebook.NBS / path.name).exists():
            worked = notebook.load(notebook.NBS / path.name)
            if not notebook.is_draft(worked):
                found[number] = path, worked
    return found


def lessons(work):
    """The lessons in order, as `course list --json` prints them, with the progress kept in folder `work`.

    `number slug title part minutes needs exercises[{id,title,mutants,passed}] recorded{gpu,torch,date}`.
    """
    rows = []
    for number, (path, worked) in published().items():
        nb, topic = notebook.load(path), path.stem[3:]
        passed, count, stamp = progress.passed(work, topic), mutants(topic), notebook.stamp(worked)
        row = {"number": number, "slug": topic, "exercises": []}
        try:
            row |= {k: nb["metadata"]["course"][k] for k in ("title", "part", "minutes", "needs")}
            for e in notebook.exercises(nb):
                about = {"mutants": count.get(e["id"], 0), "passed": e["title"] in passed}
                row["exercises"].append({"id": e["id"], "title": e["title"], **about})
        except (KeyError, TypeError):
            raise CourseError(f"{path} lacks its metadata: `course build` makes it again") from None
        rows.append(row | {"recorded": {k: stamp.get(k) for k in ("gpu", "torch", "date")}})
    return rows


def mutants(topic):
    "How many wrong answers each exercise has in tests/<topic>/mutants.py, not imported: {'roofline.1': 3}."
    try:
        tree = ast.parse((notebook.ROOT / "tests" / topic / "mutants.py").read_text(encoding="utf-8"))
        found = [s.value for s in tree.body if isinstance(s, ast.Assign) and s.targets[0].id == "MUTANTS"]
        return {k.value: len(v.elts) for d in found for k, v in zip(d.keys, d.values, strict=True)}
    except (OSError, SyntaxError, ValueError, AttributeError):  # absent, or not a table of names
        return {}


def first_unsolved(rows):
    "The number of the first lesson with an exercise that has not been passed, or None."
    return next((r["number"] for r in rows if not all(e["passed"] for e in r["exercises"])), None)


def list_cmd(args):
    "Print the lessons: a table by part, or JSON."
    rows = lessons(args.work)
    if args.json:
        return print(json.dumps(rows, indent=1, ensure_ascii=False))
    width, part = max((len(r["title"]) for r in rows), default=0), None
    for r in rows:
        if r["part"] != part:
            part = r["part"]
            print(f"\n{part}")
        done = f"{sum(e['passed'] for e in r['exercises'])}/{len(r['exercises'])} solved"
        where = f"recorded on {r['recorded']['gpu']}, {r['recorded']['date']}"
        print(f"  {r['number']}  {r['title']:<{width}}  {done:>12}  {r['minutes']:>3} min  {where}")
    following = first_unsolved(rows)
    none = (
        "Every exercise is solved."
        if rows
        else "There are no lessons yet: `course build` makes them from nbs/."
    )
    return print(f"\nNext: course lab {following}" if following else f"\n{none}")


def figures_cmd(args):
    "Print every recorded figure: a table, or JSON."
    try:
        rows = recorded.figures()
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CourseError("a worked notebook in nbs/ is damaged: take it from git again") from None
    if args.json:
        return print(json.dumps(rows, indent=1, ensure_ascii=False))
    table = [("figure", "value", "unit", "bar", "machine", "torch", "date")]
    table += [(r["name"], recorded.shown(r), r["unit"], readme.bar(r), r["machine"], r["torch"], r["date"])
              for r in rows]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for name, value, *rest in table:
        cells = [name.ljust(widths[0]), value.rjust(widths[1])]
        cells += [text.ljust(width) for text, width in zip(rest, widths[2:], strict=True)]
        print("  ".join(cells).rstrip())
    return None

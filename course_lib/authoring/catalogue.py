"`course list` and `course figures`: what the notebooks say about themselves, read as plain JSON."

import ast
import json

from course_lib import recorded
from course_lib.authoring import notebook, readme
from course_lib.authoring.notebook import CourseError


def lessons(work):
    """The lessons in order, as `course list --json` prints them, with the progress kept in folder `work`.

    `number slug title part minutes needs exercises[{id,title,mutants,passed}] recorded{gpu,torch,date}`;
    `recorded` is None while a lesson has not been recorded.
    """
    passed = notebook.progress(work)
    rows = []
    for path in notebook.lessons().values():
        nb = notebook.load(path)
        course = nb["metadata"].get("course", {})
        count = mutants(path.stem[3:])
        try:
            rows.append(
                {k: course[k] for k in ("number", "slug", "title", "part", "minutes", "needs")}
                | {
                    "exercises": [
                        {"id": e["id"], "title": e["title"], "mutants": count.get(e["id"], 0)}
                        | {"passed": e["id"] in passed}
                        for e in notebook.exercises(nb)
                    ],
                    "recorded": _recorded(path.name),
                }
            )
        except (KeyError, TypeError):
            raise CourseError(
                f"lessons/{path.name} lacks its metadata: `course build` makes it anew"
            ) from None
    return rows


def mutants(topic):
    "How many wrong answers each exercise has in tests/mutants/<topic>.py, without importing it: {'05.1': 3}."
    path = notebook.ROOT / "tests" / "mutants" / f"{topic}.py"
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return {}
    for node in tree.body:
        names = [t.id for t in getattr(node, "targets", []) if isinstance(t, ast.Name)]
        if "MUTANTS" in names and isinstance(node.value, ast.Dict):
            return {
                k.value: len(v.elts)
                for k, v in zip(node.value.keys, node.value.values, strict=True)
                if isinstance(k, ast.Constant) and isinstance(v, ast.List | ast.Tuple)
            }
    return {}


def _recorded(name):
    "Where a worked notebook was recorded, or None: while there is no stamp, or no such notebook."
    try:
        stamp = notebook.load(notebook.NBS / name)["metadata"].get("recorded")
    except CourseError:
        return None
    return {k: stamp.get(k) for k in ("gpu", "torch", "date")} if stamp and isinstance(stamp, dict) else None


def list_cmd(args):
    "Print the lessons: a table by part, or JSON."
    rows = lessons(args.work)
    if args.json:
        print(json.dumps(rows, indent=1, ensure_ascii=False))
        return
    if not rows:
        print("There are no lessons yet: `course build` makes them from nbs/.")
        return
    width = max(len(r["title"]) for r in rows)
    part = None
    for r in rows:
        if r["part"] != part:
            part = r["part"]
            print(f"\n{part}")
        done = f"{sum(e['passed'] for e in r['exercises'])}/{len(r['exercises'])}"
        where = f"recorded on {r['recorded']['gpu']}, {r['recorded']['date']}" if r["recorded"] else ""
        line = f"  {r['number']}  {r['title']:<{width}}  {done:>5} solved  {r['minutes']:>3} min  {where}"
        print(line.rstrip())
    following = first_unsolved(rows)
    print(f"\nNext: course lab {following}" if following else "\nEvery exercise is solved.")


def first_unsolved(rows):
    "The number of the first lesson with an exercise that has not been passed, or None."
    return next((r["number"] for r in rows if not all(e["passed"] for e in r["exercises"])), None)


def figures_cmd(args):
    "Print every recorded figure: a table, or JSON."
    try:
        rows = recorded.figures()
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CourseError("a worked notebook in nbs/ is damaged: take it from git again") from None
    if args.json:
        print(json.dumps(rows, indent=1, ensure_ascii=False))
        return
    if not rows:
        print("No figures are recorded yet: `course record` on a GPU host stores them.")
        return
    table = [("figure", "value", "unit", "bar", "machine", "torch", "date")]
    table += [
        (r["name"], recorded.shown(r), r["unit"], readme.bar(r), r["machine"], r["torch"], r["date"])
        for r in rows
    ]
    widths = [max(len(str(row[i])) for row in table) for i in range(len(table[0]))]
    for row in table:
        cells = (
            str(c).rjust(w) if i == 1 else str(c).ljust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join(cells).rstrip())

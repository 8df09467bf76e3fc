"`course check`: judge the learner's notebooks, say what is wrong, note the progress."

import datetime
import json
import shutil
import sys
import textwrap
from pathlib import Path

from course_lib.authoring import judge, notebook, watch
from course_lib.authoring.notebook import CourseError


def read(number, work):
    "The lesson and the learner's notebook in folder `work`. Raises CourseError."
    path = notebook.lessons()[number]
    lesson, mine = notebook.load(path), work / path.name
    if not mine.exists():
        raise CourseError(f"{mine} is not there yet: `course lab {number}` makes it and opens it")
    nb = notebook.load(mine)
    if not any(c["cell_type"] == "code" for c in nb["cells"]):
        raise CourseError(
            f"{mine} has no code cells: `course reset {number}` gives a fresh copy and keeps this one aside"
        )
    return lesson, nb


def save_progress(work, lesson, report):
    "Note the passed exercises in `work`/.progress.json; what was passed once stays. Raises CourseError."
    found = notebook.progress(work)
    today, version = datetime.date.today().isoformat(), lesson["metadata"]["course"].get("version")
    new = {n: {"passed": today, "version": version} for n, why in report.verdicts.items() if not why}
    new = {n: row for n, row in new.items() if found.get(n, {}).get("version") != version}
    if new:
        text = json.dumps({**found, **new}, indent=1, sort_keys=True)
        notebook.write(text + "\n", Path(work) / ".progress.json")


def shown(lesson, report):
    "The report as text: a line for each exercise, notes, a count."
    course, exercises = lesson["metadata"]["course"], notebook.exercises(lesson)
    width = max((len(e["title"]) for e in exercises), default=0)
    lines = [f"{course['number']} {course['slug']}"]
    for e in exercises:
        why = report.verdicts.get(e["id"])
        words = (
            "passed"
            if why == ""
            else "left out: it needs a CUDA GPU"
            if why is None
            else f"not passed: {why}"
        )
        lines += textwrap.wrap(
            words,
            max(shutil.get_terminal_size((100, 24)).columns, 70),
            initial_indent=f"  {e['id']}  {e['title']:<{width}}  ",
            subsequent_indent=" " * (10 + width),
            break_long_words=False,
            break_on_hyphens=False,
        )
    lines += [f"  note: {n}" for n in report.notes]
    passed = sum(why == "" for why in report.verdicts.values())
    count = f"{passed} of {len(exercises)} passed"
    lines.append(
        f"  {count}; {len(report.no_gpu)} left out for want of a GPU" if report.no_gpu else f"  {count}"
    )
    return "\n".join(lines)


def check_cmd(args):
    "Judge the learner's notebooks of the given lessons. Returns 1 while an exercise is unsolved."
    work, status = Path(args.work), 0
    for number in dict.fromkeys(notebook.resolve(word) for word in args.lessons):
        try:
            lesson, mine = read(number, work)
            report = judge.judge(lesson, mine, args.timeout, watch.memory_limit(), work)
        except CourseError as e:
            print(e, file=sys.stderr)
            status = 1
            continue
        print(shown(lesson, report), flush=True)
        if any(report.verdicts.values()):
            status = 1
        try:
            save_progress(work, lesson, report)
        except CourseError as e:
            print(f"your progress was not saved: {e}", file=sys.stderr)
    return status

"`course check`: judge the learner's notebooks, say what is wrong, note the progress."

import functools
import os
import sys

from course_lib import ram
from course_lib.authoring import catalogue, judge, lab, notebook, progress
from course_lib.authoring.notebook import CourseError


def check_cmd(args):
    "Judge the learner's notebooks of the given lessons. Returns 1 while one of their exercises is unsolved."
    if not 0 < args.timeout < float("inf"):
        raise CourseError(f"--timeout {args.timeout:g}: expected seconds, more than 0")
    status = 0
    for number in dict.fromkeys(notebook.resolve(word) for word in args.lessons):
        try:
            status |= _check(notebook.lessons()[number], args)
        except CourseError as e:
            print(e, file=sys.stderr)
            status = 1
    return status


def _check(path, args):
    lesson, topic, mine = notebook.load(path), path.stem[3:], lab.copy_of(path, args.work)
    if not mine.exists():
        raise CourseError(f"{mine} is not there yet: `course lab {topic}` makes it and opens it")
    nb = notebook.load(mine)
    if not any(c["cell_type"] == "code" for c in nb["cells"]):
        raise CourseError(
            f"{mine} has no code cells: `course reset {topic}` gives a fresh copy and keeps this one aside"
        )
    exercises = {e["id"]: e["title"] for e in notebook.exercises(lesson)}
    chosen = args.exercise and {f"{topic}.{args.exercise.removeprefix(f'{topic}.')}"}
    if chosen and not chosen <= set(exercises):
        raise CourseError(f"{topic} has no exercise {args.exercise}; it has {', '.join(exercises)}")
    print(f"{mine}: only the cells that the checks need are executed")
    say = functools.partial(print, flush=True)
    verdicts, notes = judge.judge(lesson, nb, topic, chosen, args.timeout, _memory_limit(), args.work, say)
    width = max(len(title) for title in exercises.values())
    for name, why in verdicts.items():
        print(f"{name}  {exercises[name]:<{width}}  {f'not passed: {why}' if why else 'passed'}")
    for note in notes:
        print(f"note: {note}")
    print(f"{sum(not why for why in verdicts.values())} of {len(verdicts)} passed")
    try:
        progress.save(args.work, topic, lesson, verdicts)
    except CourseError as e:
        print(f"your progress was not saved: {e}", file=sys.stderr)
    print(_next(args.work, topic, exercises), flush=True)
    return int(any(verdicts.values()))


def _memory_limit():
    "Bytes that a kernel and its children may use. More, and the system would kill something else first."
    given = os.environ.get("COURSE_MEMORY_GB")
    try:
        return float(given) * 1e9 if given else min(0.6 * ram.total(), 0.9 * ram.available())
    except ValueError:
        raise CourseError(f"COURSE_MEMORY_GB is {given!r}; expected gigabytes, such as 8") from None


def _next(work, topic, exercises):
    passed = progress.passed(work, topic)
    for name, title in exercises.items():
        if title not in passed:
            return f"next: {name}, {title}"
    following = catalogue.first_unsolved(catalogue.lessons(work))
    return f"next: `course lab {following}`" if following else "every exercise of the course is passed"

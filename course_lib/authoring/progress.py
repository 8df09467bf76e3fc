"""What the learner has passed, in work/.progress.json: {"roofline.1": {"title", "passed", "version"}}.

A pass belongs to the exercise's title: it survives a new number, and does not count for another exercise.
"""

import datetime
import functools
import json
from pathlib import Path

from course_lib.authoring import notebook

OLD = Path(__file__).with_name("old_exercises.txt")


@functools.cache
def _old():
    "{'05.1': ('roofline.1', 'FLOPs and bytes')}."
    lines = OLD.read_text(encoding="utf-8").splitlines()
    rows = [line.split(maxsplit=2) for line in lines if not line.startswith("#")]
    return {old: (new, title) for old, new, title in rows}


def passed(work, topic):
    "What was passed in the lesson `topic`: {exercise's title: its entry}."
    found = {}
    for name, row in notebook.progress(work).items():
        name, title = _old().get(name, (name, row.get("title")))
        if name.rpartition(".")[0] == topic and isinstance(title, str):
            found[title] = row
    return found


def save(work, topic, lesson, verdicts):
    "Add the exercises whose verdict is ''; what was passed once stays. Raises CourseError."
    rows, version = passed(work, topic), lesson["metadata"]["course"].get("version")
    exercises = {e["id"]: e["title"] for e in notebook.exercises(lesson)}
    for name, why in verdicts.items():
        if not why and rows.get(exercises[name], {}).get("version") != version:
            rows[exercises[name]] = {"passed": datetime.date.today().isoformat(), "version": version}
    before = notebook.progress(work)
    mine = {name: {**rows[title], "title": title} for name, title in exercises.items() if title in rows}
    if {**before, **mine} != before:
        text = json.dumps({**before, **mine}, indent=1, sort_keys=True, ensure_ascii=False)
        notebook.write(text + "\n", Path(work) / ".progress.json")

"""Judge a learner's notebook: execute a copy of it and give a verdict on every exercise of the lesson.

An exercise is passed when its own check cell, as lessons/ has it, printed the check's line in this
execution and raised nothing. Nothing else counts: no stored output, no tag, no other cell's print. The
check's module is imported afresh for each check cell, so an answer that replaced `check`, or parts of it,
is judged all the same. What this does not cover: an answer that patches torch, `builtins.print` or the
interpreter itself. It is a mirror for learners, and no examination hall.
"""

import re
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from course_lib.authoring import kernel, notebook

FRESH = """\
for _name in [n for n in __import__("sys").modules if n.startswith("course_lib.checks.")]:
    del __import__("sys").modules[_name]
{alias} = __import__("importlib").import_module("course_lib.checks.{module}")
"""
ADVICE = {
    "time limit": "look for a loop that never ends",
    "memory": "look for something that grows without end",
    "printed": "look for a print in a loop",
    "exit()": "remove it",
}
# Tags that make other tools accept a cell that fails, or leave it out.
SILENCERS = {
    "raises-exception",
    "nbval-skip",
    "nbval-raises-exception",
    "nbval-ignore-output",
    "skip-execution",
}


@dataclass
class Step:
    "A code cell to execute. `exercise` is what it checks; `changed`, that the lesson has no such cell."

    id: str
    source: str
    tags: set
    exercise: dict | None
    changed: bool


@dataclass
class Report:
    """What came of a notebook.

    `verdicts`: exercise id to what is wrong, or to '' where it is passed; `no_gpu`: ids of exercises left out
    for want of a GPU; `notes`: sentences about the notebook.
    """

    verdicts: dict = field(default_factory=dict)
    no_gpu: list = field(default_factory=list)
    notes: list = field(default_factory=list)


def judge(lesson, mine, timeout=60, memory=None, folder=None):
    """Judge the notebook `mine` by the notebook `lesson`; both are dicts, and neither is changed.

    `timeout` is in seconds for a cell, `memory` in bytes; files beside the learner's notebook, in `folder`,
    are seen by its cells. A cell that kills the kernel is left out of a second execution, so that the other
    exercises are judged. Returns a Report.
    """
    steps = _steps(lesson, mine)
    report = Report(notes=_notes(lesson, mine))
    wanted = {e["id"]: e for e in notebook.exercises(lesson)}
    there = {s.exercise["id"] for s in steps if s.exercise}
    stubs = _stubs(lesson)
    needs_gpu = any("gpu" in notebook.tags(c) for c in lesson["cells"])
    left_out = {"slow"} if not needs_gpu or kernel.has_cuda() else {"slow", "gpu"}
    for number, e in wanted.items():
        if any(left_out & {"gpu"} & tags for tags in stubs[number].values()):
            report.no_gpu.append(number)
        elif number not in there:
            report.verdicts[number] = (
                f"its check cell `{e['cell']}` is missing; `course reset {number[:2]}` gives a fresh copy "
                f"and keeps yours under its date"
            )
    skipped = {i for i, s in enumerate(steps) if s.tags & left_out}
    skipped |= {i for i, s in enumerate(steps) if s.exercise and s.exercise["id"] in report.no_gpu}
    _Trial(steps, skipped, stubs, report).run(timeout, memory, folder)
    report.verdicts = {n: report.verdicts[n] for n in wanted if n in report.verdicts}
    return report


class _Trial:
    "The executions of one notebook: as many as there are cells that kill the kernel, and one more."

    def __init__(self, steps, skipped, stubs, report):
        self.steps, self.skipped, self.stubs, self.report = steps, skipped, stubs, report
        self.trouble = {}  # step: (what went wrong, whether the exercise that follows can still pass)

    def run(self, timeout, memory, folder):
        while self._open():
            with tempfile.TemporaryDirectory(prefix="course-check-", ignore_cleanup_errors=True) as scratch:
                _link_beside(folder, Path(scratch))
                cells = [_cell(s) for s in self.steps]
                with kernel.Session(cells, scratch, timeout, memory) as session:
                    self._execute(session)

    def _open(self):
        "The steps of checks that have no verdict yet."
        done = self.report.verdicts
        checks = [i for i, s in enumerate(self.steps) if s.exercise and i not in self.skipped]
        return [i for i in checks if self.steps[i].exercise["id"] not in done]

    def _execute(self, session):
        last = self._open()[-1]
        bar = tqdm(range(last + 1), leave=False, disable=not sys.stderr.isatty(), unit="cell")
        for i in bar:
            step = self.steps[i]
            if i in self.skipped or (step.exercise and step.exercise["id"] in self.report.verdicts):
                continue
            if step.exercise and (why := self._blocked(i)):
                self.report.verdicts[step.exercise["id"]] = why
                continue
            ran = session.execute(i)
            if ran.stopped:
                self.skipped.add(i)
            if step.exercise:
                self.report.verdicts[step.exercise["id"]] = self._verdict(i, ran)
            elif ran.error:
                self._note_trouble(i, ran)
            if not ran.alive:
                return

    def _region(self, i):
        "The steps of the check at step `i`: those after the check before it, without other exercises' stubs."
        before = [j for j in range(i) if self.steps[j].exercise]
        mine = self.steps[i].exercise["id"]
        other = {name for number, stubs in self.stubs.items() if number != mine for name in stubs}
        return [j for j in range(before[-1] + 1 if before else 0, i) if self.steps[j].id not in other]

    def _blocked(self, i):
        return next(
            (self.trouble[j][0] for j in self._region(i) if j in self.trouble and self.trouble[j][1]), ""
        )

    def _note_trouble(self, i, ran):
        step = self.steps[i]
        if ran.stopped:
            # A demo of the lesson that is slow here is not the learner's fault; a cell they wrote is.
            self.trouble[i] = f"cell `{step.id}`: {_advised(ran.stopped)}", step.changed
            if not step.changed:
                self.report.notes.append(self.trouble[i][0])
        elif ran.ename == "UsageError" and "not found" in ran.evalue:
            magic = re.search(r"`(.*?)`", ran.evalue)
            what = f"cell `{step.id}` holds an unknown magic{f', {magic[1]}' if magic else ''}; remove it"
            self.trouble[i] = what, True
        else:
            self.trouble[i] = f"cell `{step.id}` raised {ran.error}", False

    def _verdict(self, i, ran):
        number = self.steps[i].exercise["id"]
        if ran.stopped:
            return f"its check: {_advised(ran.stopped)}"
        if not ran.ename:
            if re.search(rf"^{re.escape(number)} passed: ", ran.stdout, re.MULTILINE):
                return ""
            return f"its check printed no line `{number} passed`"
        if ran.ename == "Wrong":
            return ran.error.removeprefix("Wrong: ").removeprefix(f"{number} not passed: ")
        why = ran.error
        if ran.ename == "NameError":
            ids = {s.id for s in self.steps}
            gone = [name for name in self.stubs[number] if name not in ids]
            raised = [self.trouble[j][0] for j in self._region(i) if j in self.trouble]
            if raised:
                why += f"; {raised[0]}"
            elif gone:
                cure = f"`course reset {number[:2]}` gives a fresh copy and keeps yours under its date"
                why += f"; its cell `{gone[0]}` is missing: {cure}"
        return why


def _advised(stopped):
    return next((f"{stopped}; {advice}" for key, advice in ADVICE.items() if key in stopped), stopped)


def _cell(step):
    return {"cell_type": "code", "id": step.id, "metadata": {}, "source": step.source}


def _steps(lesson, mine):
    "The learner's code cells in their order, with the check cells, and all tags, as the lesson has them."
    known = {c["id"]: c for c in lesson["cells"]}
    checks = {e["cell"]: e for e in notebook.exercises(lesson)}
    by_number = {e["id"]: name for name, e in checks.items()}
    fresh = _fresh_import(lesson)
    steps = []
    for n, cell in enumerate(mine["cells"], 1):
        name = cell.get("id")
        name = name if isinstance(name, str) else ""
        if name not in known:  # some editors give cells new ids
            exercise = cell["metadata"].get("exercise")
            number = exercise.get("id") if isinstance(exercise, dict) else None
            name = by_number.get(number, name) if isinstance(number, str) else name
        if name in checks:
            steps.append(Step(name, fresh + notebook.source(known[name]), set(), checks[name], False))
        elif cell["cell_type"] == "code":
            theirs = known.get(name)
            same = theirs is not None and notebook.source(theirs) == notebook.source(cell)
            tags = notebook.tags(theirs) if theirs else set()
            steps.append(Step(name or f"number {n}", notebook.source(cell), tags, None, not same))
    return steps


def _fresh_import(lesson):
    code = "\n".join(notebook.source(c) for c in lesson["cells"] if c["cell_type"] == "code")
    found = re.search(r"^from course_lib\.checks import (?!core\b)(\w+)(?: as (\w+))?", code, re.MULTILINE)
    module = found[1] if found else lesson["metadata"]["course"]["slug"]
    return FRESH.format(module=module, alias=(found[2] or found[1]) if found else "check")


def _stubs(lesson):
    "For each exercise, its stubs' cells: {'05.1': {'ex1-stub': tags}}."
    found, stubs = {}, {}
    for cell in lesson["cells"]:
        tags = notebook.tags(cell)
        if "exercise" in tags:
            stubs[cell["id"]] = tags
        if "check" in tags:
            found[cell["metadata"]["exercise"]["id"]] = stubs
            stubs = {}
    return found


def _notes(lesson, mine):
    course, theirs = mine["metadata"].get("course"), lesson["metadata"]["course"]
    notes = []
    if not isinstance(course, dict) or course.get("version") != theirs.get("version"):
        notes.append(
            f"this notebook is from another version of the lesson; it is judged by today's checks, and "
            f"`course reset {theirs['number']}` gives today's lesson and keeps yours"
        )
    known = {c["id"]: c for c in lesson["cells"]}
    for cell in mine["cells"]:
        name = cell.get("id")
        original = known.get(name) if isinstance(name, str) else None
        if (
            original
            and "check" in notebook.tags(original)
            and notebook.source(original) != notebook.source(cell)
        ):
            notes.append(f"check cell `{name}` was edited; the lesson's own was executed in its place")
        for tag in sorted(t for t in notebook.tags(cell) if t.lower().replace("_", "-") in SILENCERS):
            notes.append(
                f"the tag {tag} on cell `{name}` hides failures in other tools; here it does nothing"
            )
    return notes


def _link_beside(folder, scratch):
    # A stray `!rm *` in a notebook removes links, not a learner's files.
    for path in Path(folder).iterdir() if folder else ():
        if path.suffix != ".ipynb" and not path.name.startswith("."):
            try:
                (scratch / path.name).symlink_to(path.resolve())
            except OSError:
                return  # a system without links

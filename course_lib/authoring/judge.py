"""Judge a learner's notebook: execute a copy of what its checks need, and give a verdict on each exercise.

An exercise is passed when its own check cell, as lessons/ has it, printed the check's line in this
execution and raised nothing: no stored output counts, no tag, no other cell's print. It is a mirror for
learners, and no examination hall.
"""

import ast
import contextlib
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from course_lib.authoring import kernel, notebook, stamps

# A learner may have called something of their own `check`, or changed it.
FRESH = """\
__import__("sys").modules.pop("course_lib.{topic}.check", None)
check = __import__("importlib").import_module("course_lib.{topic}.check")
"""


@dataclass
class Step:
    "A code cell of the learner's. `checks` is the exercise that it checks, `answers` the one that it solves."

    name: str
    source: str
    checks: str = ""
    answers: str = ""
    own: bool = False  # the lesson has no such cell
    trouble: str = ""  # what went wrong when it ran
    done: bool = False  # stopped or judged: it is not executed again

    def __post_init__(self):
        self.reads, self.binds, self.always = set(), {}, False
        with contextlib.suppress(SyntaxError, ValueError):
            tree = ast.parse(notebook.python({"source": self.source}))
            names, modules = stamps.Names(tree), set(stamps.imports(tree))
            self.reads = names.reads
            # {name: whether it is bound to a new object; else its object is changed}
            self.binds = dict.fromkeys(names.changes, False) | dict.fromkeys(names.defines | modules, True)
            imports = all(isinstance(s, ast.Import | ast.ImportFrom) for s in tree.body)
            start = re.search(r"machine\.start\(|import \*|^%(?!%gpu)", self.source, re.MULTILINE)
            self.always = not self.answers and bool(imports or start)


def judge(lesson, mine, topic, chosen, timeout, memory, folder, say):
    """Judge the notebook `mine` by `lesson`, both dicts: ({exercise: what is wrong, or ''}, notes).

    `chosen` are ids of exercises, or None for all; `timeout` is in seconds for a cell, `memory` in bytes.
    Cells see the files of `folder`, where the learner's notebook is; `say` hears of each cell as it runs.
    A cell that ends the kernel is left out of a second execution: the other exercises are judged.
    """
    wanted = {e["id"]: e["cell"] for e in notebook.exercises(lesson) if chosen is None or e["id"] in chosen}
    steps, verdicts = _steps(lesson, mine), {}
    checks = [i for i, s in enumerate(steps) if s.checks in wanted]
    needs = {i: _needs(steps, i) for i in checks}
    fresh = FRESH.format(topic=topic)
    cells = [
        {"cell_type": "code", "metadata": {}, "source": fresh * bool(s.checks) + s.source} for s in steps
    ]
    while todo := [i for i in checks if not steps[i].done and verdicts.get(steps[i].checks) != ""]:
        with (
            tempfile.TemporaryDirectory(prefix="course-check-", ignore_cleanup_errors=True) as scratch,
            kernel.Session(cells, _link_beside(folder, scratch), timeout, memory) as session,
        ):
            for i in sorted({*todo, *(j for c in todo for j in needs[c])}):
                step = steps[i]
                if step.done or verdicts.get(step.checks) == "":
                    continue
                say(step.name, end="  ")
                ran = session.execute(i)
                say(f"{ran.seconds:.1f} s", end="\n")
                step.done = bool(ran.stopped) or i in checks
                if i in checks:
                    verdicts[step.checks] = _verdict(steps, i, needs[i], ran)
                elif ran.error:
                    step.trouble = f"cell `{step.name}`{': ' if ran.stopped else ' raised '}{ran.error}"
                if not ran.alive:
                    break
    again = f"`course reset {topic}` gives a fresh copy and keeps yours under its date"
    for name, cell in wanted.items():
        verdicts.setdefault(name, f"its check cell `{cell}` is missing; {again}")
    claims = [steps[i].checks for i in checks]
    notes = [f"{name} has several check cells; one that passes is enough"
             for name in wanted if claims.count(name) > 1]  # fmt: skip
    if _version(mine) != _version(lesson):
        notes.append(f"this notebook is from another version; today's checks judge it, and {again}")
    return {name: verdicts[name] for name in wanted}, notes


def _version(nb):
    course = nb["metadata"].get("course")
    return course.get("version") if isinstance(course, dict) else None


def _needs(steps, check):
    "The steps before `check` that it needs: the answer's, and those that bind the names which are read."
    found, todo = set(), [check]
    todo += [i for i in range(check) if steps[i].always or steps[i].answers == steps[check].checks]
    while todo:
        i = todo.pop()
        if i not in found:
            found.add(i)
            # A function is called later, and finds what was bound last by then.
            todo += [j for name in steps[i].reads for end in (i, check) for j in _sources(steps, name, end)]
    return found - {check}


def _sources(steps, name, end):
    "The last step before `end` that binds `name`, and the steps since then that change its object."
    for j in reversed(range(end)):
        if name in steps[j].binds:
            yield j
            if steps[j].binds[name]:
                return


def _verdict(steps, i, needs, ran):
    "What is wrong after the check at step `i` has run, or ''."
    name, needed = steps[i].checks, [steps[j] for j in sorted(needs)]
    if ran.stopped:
        return f"its check: {ran.stopped}"
    if stopped := [s.trouble for s in needed if s.done and s.own]:  # even where it bound its names before
        return stopped[0]
    if not ran.ename:
        passed = re.search(rf"^{re.escape(name)} passed: ", ran.stdout, re.MULTILINE)
        return "" if passed else f"its check printed no line `{name} passed`"
    if ran.ename != "NameError":
        return ran.error.removeprefix("Wrong: ").removeprefix(f"{name} not passed: ")
    missing = (re.findall(r"name '(\w+)'", ran.evalue) or [""])[0]
    if trouble := [s.trouble for s in needed if s.trouble]:
        return f"{ran.error}; {trouble[-1]}"
    if below := [s.name for s in steps[i:] if missing in s.binds]:
        return f"its check stands above cell `{below[0]}`, which defines `{missing}`: move the check below it"
    return f"{ran.error}; no cell above its check defines it"


def _steps(lesson, mine):
    "The learner's code cells in their order, with the check cells as the lesson has them."
    known = {c["id"]: c for c in lesson["cells"]}
    exercises = notebook.exercises(lesson)
    by_title, by_cell = ({e[key]: e for e in exercises} for key in ("title", "cell"))
    by_source = {notebook.source(known[e["cell"]]).strip(): e for e in exercises}
    answers, open_ = {}, []
    for cell in lesson["cells"]:
        open_ += [cell["id"]] if "exercise" in notebook.tags(cell) else []
        if cell["id"] in by_cell:
            answers |= dict.fromkeys(open_, by_cell[cell["id"]]["id"])
            open_ = []
    steps = []
    if _version(mine) != _version(lesson):  # its imports may be of modules that have moved
        code = [c for c in lesson["cells"] if c["cell_type"] == "code" and not notebook.tags(c)]
        steps = [Step(c["id"], notebook.source(c)) for c in code if "from course_lib" in notebook.source(c)][
            :2
        ]
        for step in steps:
            step.always = True
    for cell in mine["cells"]:
        text, name = notebook.source(cell), cell.get("id")
        name = name if isinstance(name, str) else ""
        # Pasted cells and those of some editors have new ids; another version's ids may mean other exercises.
        title = cell["metadata"].get("exercise")
        title = title.get("title") if isinstance(title, dict) else None
        checked = by_title.get(title) if isinstance(title, str) else by_cell.get(name)
        checked = checked or by_source.get(text.strip())
        if checked:
            cell = known[checked["cell"]]
            steps.append(Step(cell["id"], notebook.source(cell), checks=checked["id"]))
        elif cell["cell_type"] == "code":
            own = name not in known or notebook.source(known[name]) != text
            shown = name if name in known else (text.strip().splitlines() or [""])[0][:40]
            steps.append(Step(shown, text, answers=answers.get(name, ""), own=own))
    return steps


def _link_beside(folder, scratch):
    "Link the files beside a notebook into `scratch`, which is returned: a stray `!rm *` removes links."
    for path in Path(folder).iterdir():
        if path.suffix != ".ipynb" and not path.name.startswith("."):
            with contextlib.suppress(OSError):  # a system without links
                Path(scratch, path.name).symlink_to(path.resolve())
    return scratch

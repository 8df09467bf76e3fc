"""`course check`: execute a copy of what the learner's checks need, and give a verdict on each exercise.

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

from course_lib import ram
from course_lib.authoring import catalogue, kernel, lab, notebook, stamps
from course_lib.authoring.notebook import CourseError

# A learner may have called something of their own `check`, or changed it.
FRESH = """\
__import__("sys").modules.pop("course_lib.{topic}.check", None)
check = __import__("importlib").import_module("course_lib.{topic}.check")
"""


def check_cmd(args):
    "Judge the learner's notebooks of the given lessons. Returns 1 while one of their exercises is unsolved."
    numbers = dict.fromkeys(notebook.resolve(word) for word in args.lessons)
    return max(_check(notebook.lessons()[number], args) for number in numbers)


def _check(path, args):
    lesson, topic, mine = notebook.load(path), path.stem[3:], lab.copy_of(path, args.work)
    if not mine.exists():
        raise CourseError(f"{mine} is not there yet: `course lab {topic}` makes it and opens it")
    nb = notebook.load(mine)
    titles = {e["id"]: e["title"] for e in notebook.exercises(lesson)}
    chosen = [f"{topic}.{args.exercise.removeprefix(f'{topic}.')}"] if args.exercise else list(titles)
    if not set(chosen) <= set(titles):
        raise CourseError(f"{topic} has no exercise {args.exercise}; it has {', '.join(titles)}")
    print(f"{mine}: only the cells that the checks need are executed")
    verdicts = judge(lesson, nb, topic, chosen, args)
    width = max(map(len, titles.values()))
    for name, why in verdicts.items():
        print(f"{name}  {titles[name]:<{width}}  {f'not passed: {why}' if why else 'passed'}")
    if line := lab.warning(args.work, path):
        print(f"note: {line}")
    print(f"{sum(not why for why in verdicts.values())} of {len(verdicts)} passed")
    catalogue.save_progress(args.work, topic, lesson, verdicts)
    if left := catalogue.unsolved(lesson, args.work, topic):
        print(f"next: {left[0]['id']}, {left[0]['title']}")
    elif following := catalogue.first_unsolved(args.work):
        print(f"next: `course lab {following}`")
    else:
        print("every exercise of the course is passed")
    return int(any(verdicts.values()))


@dataclass
class Step:
    "A code cell of the learner's. `checks` is the exercise that it checks, `answers` the one that it solves."

    name: str
    source: str
    checks: str = ""
    answers: str = ""
    always: bool = False  # every check needs it
    altered: bool = False  # the learner's check cell is not the lesson's, which `source` is
    trouble: str = ""  # what went wrong when it ran

    def __post_init__(self):
        self.reads, self.binds = set(), {}
        with contextlib.suppress(SyntaxError, ValueError):
            tree = ast.parse(notebook.python({"source": self.source}))
            names, modules = stamps.Names(tree), set(stamps.imports(tree))
            self.reads = names.reads
            # {name: whether it is bound to a new object; else its object is changed}
            self.binds = dict.fromkeys(names.changes, False) | dict.fromkeys(names.defines | modules, True)
            imports = all(isinstance(s, ast.Import | ast.ImportFrom) for s in tree.body)
            start = re.search(r"machine\.start\(|import \*|^%(?!%gpu)", self.source, re.MULTILINE)
            self.always |= not self.answers and bool(imports or start)


def judge(lesson, mine, topic, chosen, args):
    """Judge the notebook `mine` by `lesson`, both dicts: {exercise of `chosen`: what is wrong, or ''}.

    Cells see the files of `args.work`, where the learner's notebook is.
    """
    steps, fresh, again = steps_of(lesson, mine), FRESH.format(topic=topic), notebook.AGAIN.format(topic)
    checks = [i for i, s in enumerate(steps) if s.checks in chosen]
    needs = {i: needed(steps, i) for i in checks}
    verdicts, missing = {}, f"its check cell is missing; {again}"
    with (
        tempfile.TemporaryDirectory(prefix="course-check-", ignore_cleanup_errors=True) as scratch,
        kernel.Session(scratch, args.timeout, memory(args)) as session,
    ):
        for path in args.work.iterdir():  # links: a stray `!rm *` removes these
            if path.suffix != ".ipynb" and not path.name.startswith("."):
                Path(scratch, path.name).symlink_to(path.resolve())
        for i in sorted({*checks, *(j for c in checks for j in needs[c])}):
            step = steps[i]
            if verdicts.get(step.checks) == "":
                continue
            print(step.name, end="  ", flush=True)
            ran = session.execute(fresh * bool(step.checks) + step.source)
            print(f"{ran.seconds:.1f} s", flush=True)
            step.trouble = f"cell `{step.name}`: {ran.error}" if ran.error else ""
            if i in checks:
                verdicts[step.checks] = _verdict(steps, i, needs[i], ran)
            if not ran.alive:
                missing = f"not judged, for the kernel ended before it; {step.trouble}"
                break
    return {name: verdicts.get(name, missing) for name in chosen}


def memory(args):
    "Bytes for a kernel, of `args.jobs` side by side: with more, the system may kill something else."
    return min(0.6 * ram.total(), 0.9 * ram.available()) / getattr(args, "jobs", 1)


def altered(lesson, mine):
    "The exercises whose check cells in the notebook `mine` are not the lesson's."
    return sorted({s.checks for s in steps_of(lesson, mine) if s.altered})


def needed(steps, check):
    "The steps before `check` that it needs: the answer's, and those that bind the names which are read."
    found, todo = set(), [check]
    todo += [i for i in range(check) if steps[i].always or "" != steps[i].answers == steps[check].checks]
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
    name, troubles = steps[i].checks, [steps[j].trouble for j in sorted(needs) if steps[j].trouble]
    if not ran.error:
        stdout = "".join(piece for out in ran.outputs if out.get("name") == "stdout" for piece in out["text"])
        passed = re.search(rf"^{re.escape(name)} passed: ", stdout, re.MULTILINE)
        return "" if passed else f"its check printed no line `{name} passed`"
    if not ran.error.startswith("NameError"):
        return ran.error.removeprefix("Wrong: ").removeprefix(f"{name} not passed: ")
    return f"{ran.error}; {troubles[-1] if troubles else 'no cell above its check defines it'}"


def steps_of(lesson, mine):
    "The learner's code cells in their order, with the check cells as the lesson has them."
    known = {c["id"]: c for c in lesson["cells"]}
    exercises = notebook.exercises(lesson)
    by_title, by_cell = ({e[key]: e for e in exercises} for key in ("title", "cell"))
    steps, answers, stubs = [], {}, []
    for cell in lesson["cells"]:
        stubs += [cell["id"]] if "exercise" in notebook.tags(cell) else []
        if cell["id"] in by_cell:
            answers |= dict.fromkeys(stubs, by_cell[cell["id"]]["id"])
            stubs = []
    if notebook.version(mine) != notebook.version(lesson):  # its imports may be of modules that have moved
        code = [c for c in lesson["cells"] if c["cell_type"] == "code" and not notebook.tags(c)]
        imports = [c for c in code if "from course_lib" in notebook.source(c)]
        steps = [Step(c["id"], notebook.source(c), always=True) for c in imports[:2]]
    for cell in mine["cells"]:
        text, name = notebook.source(cell), cell.get("id")
        name = name if isinstance(name, str) else ""
        # Pasted cells and those of some editors have new ids; another version's ids may mean other exercises.
        title = cell["metadata"].get("exercise")
        title = title.get("title") if isinstance(title, dict) else None
        checked = by_title.get(title) if isinstance(title, str) else by_cell.get(name)
        if checked:
            ours = notebook.source(known[checked["cell"]])
            changed = text.split() != ours.split()
            steps.append(Step(checked["cell"], ours, checked["id"], altered=changed))
        elif cell["cell_type"] == "code":
            shown = name if name in known else (text.strip().splitlines() or [""])[0][:40]
            steps.append(Step(shown, text, answers=answers.get(name, "")))
    return steps

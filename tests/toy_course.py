"""A course of one lesson whose checks cost no import of torch, for tests that execute notebooks.

Three exercises: multiply by 2, 3 and 4; the last one reads what other cells of the lesson bind.
"""

import contextlib
import json

import small_course
from small_course import code, markdown

CHECKS = """\
import contextlib


class Wrong(AssertionError):
    def _render_traceback_(self):
        return [str(self)]


def _check(number, factor):
    def check(f):
        try:
            got = f(7)
        except NotImplementedError as e:
            if str(e):
                raise
            raise Wrong(f"{number} not passed: not solved yet") from None
        if got != 7 * factor:
            raise Wrong(f"{number} not passed: expected {7 * factor}, got {got}")
        print(f"{number} passed: right")
        _passed[number] = f

    return check


_passed = vars(contextlib).setdefault("toy", {})  # outlives this module


def yours(number):
    if number not in _passed:
        print(f"{number} is not passed here: the course's own solution is used in its place")
    return _passed.get(number, lambda x: 2 * x)


double, triple, quadruple = (_check(f"toy.{i}", i + 1) for i in range(1, 4))
"""
# A kernel finds the toy's checks beside the real ones.
SITE = "import course_lib\n\ncourse_lib.__path__.append({folder!r})\n"
NAMES = ["double", "triple", "quadruple"]
BODIES = ["2 * x", "3 * x", "factors['four'] * x"]
RIGHT = {n: f"def {n}(x):\n    return {body}" for n, body in zip(NAMES, BODIES, strict=True)}


def exercise(i):
    name = NAMES[i - 1]
    about = {"id": f"toy.{i}", "title": name.title(), "minutes": 5, "difficulty": 1}
    heading = f"### Exercise toy.{i} · {name.title()} · ●○○ · 5 min\n\n{small_course.HINTS}"
    stub = f"def {name}(x):\n    ### BEGIN SOLUTION\n    return {BODIES[i - 1]}\n    ### END SOLUTION"
    return [
        markdown(f"ex{i}", heading),
        code(f"ex{i}-stub", stub, ["exercise"]),
        code(f"ex{i}-check", f"# NBVAL_CHECK_OUTPUT\ncheck.{name}({name})", ["check"], exercise=about),
    ]


def worked():
    "The toy's worked notebook."
    nb = small_course.worked("06", "toy", "Toy")
    nb["cells"] = [
        markdown("title", "# Toy"),
        code("imports", "import os\n\nfrom course_lib.toy import check"),
        *exercise(1),
        code("demo", "factors = None\nraise RuntimeError('a cell that no check needs ran')"),
        code("slow-demo", "raise RuntimeError('a slow cell ran')", ["slow"]),
        *exercise(2),
        code("factors", "factors = {'four': 0}\nfour = 4"),
        code("set", "factors['four'] = four"),
        code("gpu-demo", "%%gpu the device's name\nos.gpu_name()"),
        *exercise(3),
        code("tail", "1 / 0"),  # after the last check
    ]
    return nb


class Toy:
    "The toy course under `root`, and edits of the learner's copy in work/."

    def __init__(self, root):
        self.root, self.work = root, root / "work"
        self.path = self.work / "06_toy.ipynb"
        self.progress = self.work / ".progress.json"

    def read(self):
        return json.loads(self.path.read_text(encoding="utf-8"))

    def write(self, nb):
        self.path.write_text(json.dumps(nb), encoding="utf-8")

    @contextlib.contextmanager
    def cells(self):
        "The learner's cells by id, written back at the end."
        nb = self.read()
        yield {c["id"]: c for c in nb["cells"]}
        self.write(nb)

    def solve(self, *names):
        with self.cells() as cells:
            for name in names or NAMES:
                cells[f"ex{NAMES.index(name) + 1}-stub"]["source"] = RIGHT[name]


def make(root, monkeypatch):
    "Build the toy course under `root` and point this process and its kernels at it."
    from course_lib.authoring import build, notebook

    for folder in ("nbs", "lessons", "work", "site/toy"):
        (root / folder).mkdir(parents=True)
    small_course.use(root, monkeypatch)
    (root / "site/toy/__init__.py").write_text("")
    (root / "site/toy/check.py").write_text(CHECKS)
    (root / "site/sitecustomize.py").write_text(SITE.format(folder=str(root / "site")))
    monkeypatch.setenv("PYTHONPATH", str(root / "site"))
    monkeypatch.setenv("COURSE_ROOT", str(root))
    path, toy = small_course.put(root, worked()), Toy(root)
    lesson = build.lesson(worked(), path.stem)
    for target in (notebook.LESSONS / path.name, toy.path):
        notebook.save(lesson, target)
    return toy

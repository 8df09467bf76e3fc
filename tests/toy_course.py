"""A course of one lesson whose checks cost no import of torch, for tests that execute notebooks.

Four exercises: multiply by 2, 3, 4, and by 5 on a GPU.
"""

import json
import shutil

import small_course
from small_course import code, markdown

CHECKS = """\
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

    return check


double, triple, quadruple, quintuple = (_check(f"05.{i}", i + 1) for i in range(1, 5))
"""
# A kernel finds the toy's checks beside the real ones.
SITE = """\
import course_lib.checks

course_lib.checks.__path__.append({folder!r})
"""
NAMES = ["double", "triple", "quadruple", "quintuple"]
RIGHT = {n: f"def {n}(x):\n    return {i} * x" for i, n in enumerate(NAMES, 2)}


def exercise(i, tags=()):
    name = NAMES[i - 1]
    about = {"id": f"05.{i}", "title": name.title(), "minutes": 5, "difficulty": 1}
    heading = f"### Exercise 05.{i} · {name.title()} · ●○○ · 5 min\n\n{small_course.HINTS}"
    stub = f"def {name}(x):\n    ### BEGIN SOLUTION\n    return {i + 1} * x\n    ### END SOLUTION"
    return [
        markdown(f"ex{i}", heading),
        code(f"ex{i}-stub", stub, ["exercise", *tags]),
        code(f"ex{i}-check", f"# NBVAL_CHECK_OUTPUT\ncheck.{name}({name})", ["check"], exercise=about),
    ]


def worked():
    "The toy's worked notebook."
    nb = small_course.worked("05", "toy", "Toy")
    nap = "import os, time\n\ntime.sleep(float(os.environ.get('NAP', 0)))"
    nb["cells"] = [
        markdown("title", "# Toy"),
        code("imports", "from course_lib.checks import toy as check"),
        *exercise(1),
        code("nap", nap),
        code("slow-demo", "raise RuntimeError('a slow cell ran')", ["slow"]),
        *exercise(2),
        code("gpu-demo", "raise RuntimeError('a gpu cell ran without a GPU')", ["gpu"]),
        *exercise(3),
        *exercise(4, ["gpu"]),
        code("tail", "1 / 0"),  # after the last check: never executed by course check
    ]
    return nb


class Toy:
    "The toy course under `root`, and edits of the learner's copy in work/."

    def __init__(self, root):
        self.root, self.work = root, root / "work"
        self.path = self.work / "05_toy.ipynb"
        self.progress = self.work / ".progress.json"

    def read(self):
        return json.loads(self.path.read_text(encoding="utf-8"))

    def write(self, nb):
        self.path.write_text(json.dumps(nb), encoding="utf-8")

    def cells(self):
        "A context: the learner's cells by id, written back at its end."
        return _Edit(self)

    def solve(self, *names):
        with self.cells() as cells:
            for name in names or NAMES:
                cells[f"ex{NAMES.index(name) + 1}-stub"]["source"] = RIGHT[name]


class _Edit:
    def __init__(self, toy):
        self.toy = toy

    def __enter__(self):
        self.nb = self.toy.read()
        return {c["id"]: c for c in self.nb["cells"]}

    def __exit__(self, *exc):
        self.toy.write(self.nb)


def make(root, monkeypatch):
    "Build the toy course under `root` and point this process and its kernels at it."
    from course_lib.authoring import build, kernel, notebook

    for folder in ("nbs", "lessons", "work", "site/checks"):
        (root / folder).mkdir(parents=True)
    small_course.use(root, monkeypatch)
    (root / "site/checks/toy.py").write_text(CHECKS)
    (root / "site/sitecustomize.py").write_text(SITE.format(folder=str(root / "site/checks")))
    monkeypatch.setenv("PYTHONPATH", str(root / "site"))
    monkeypatch.setenv("COURSE_ROOT", str(root))
    monkeypatch.setattr(kernel, "has_cuda", lambda: False)
    path = small_course.put(root, worked())
    notebook.save(build.lesson(worked(), path.stem), notebook.LESSONS / path.name)
    toy = Toy(root)
    shutil.copy(notebook.LESSONS / path.name, toy.path)
    return toy

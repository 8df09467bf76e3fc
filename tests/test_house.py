"The house: who may import whom, and how large each part may be."

import ast
import functools
import subprocess
import sys
import warnings

import pytest

from course_lib.authoring import notebook

LIBRARY = notebook.ROOT / "course_lib"
FILES = sorted(LIBRARY.rglob("*.py"))
# A later lesson may import an earlier one.
ORDER = [p.stem[3:] for p in sorted(notebook.NBS.glob("[0-9][0-9]_*.ipynb"))]
# Slow to import, or absent on some machines: imported where they are used. A kernel's decorator runs when
# its file is read, so these files import triton at once; nothing imports them at once but notebooks.
LATE = {"fastai", "triton", "matplotlib", "sklearn", "accelerate"}
EARLY = {"triton": ("kernels", "solutions"), "fastai": ("solutions",)}


def module(path):
    parts = path.relative_to(notebook.ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def imported(path):
    "What a file imports, as {dotted name: at once}; `from a import b` counts as a.b."
    tree = ast.parse(path.read_text(encoding="utf-8"))
    late = {n for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for n in ast.walk(f)}  # fmt: skip
    found = {}
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{a.name}" for a in node.names]
        for name in names:
            found[name] = found.get(name, False) or node not in late
    return found


def part(name):
    "The part that a dotted name belongs to: a lesson, 'authoring', or '' for the ground floor."
    first = name.split(".")[1] if "." in name else ""
    return first if first in ORDER or first == "authoring" else ""


@pytest.mark.parametrize("path", FILES, ids=module)
def test_imports(path):
    mine = part(module(path))
    for name, at_once in imported(path).items():
        top = name.split(".")[0]
        if top in LATE and at_once:
            assert any(word in path.parts or path.stem == word for word in EARLY.get(top, ())), name
        if top != "course_lib" or part(name) in ("", mine):
            continue
        assert part(name) in ORDER, f"{name} is for authors"
        assert mine in ORDER, f"the ground floor and authoring import no lesson, and this imports {name}"
        assert ORDER.index(part(name)) < ORDER.index(mine), f"{name} belongs to a later lesson"


def test_no_cycle():
    modules = {module(p): p for p in FILES}

    def needs(name):
        for other, at_once in imported(modules[name]).items():
            if at_once:
                yield from (
                    n
                    for n in (other, other.rpartition(".")[0])
                    if n in modules and not f"{name}.".startswith(f"{n}.")
                )

    done, open_ = set(), []

    def visit(name):
        assert name not in open_, " -> ".join([*open_[open_.index(name) :], name])
        if name not in done:
            open_.append(name)
            for other in needs(name):
                visit(other)
            done.add(open_.pop())

    for name in modules:
        visit(name)


def test_lessons_do_not_import_authoring():
    for path in sorted(notebook.NBS.glob("*.ipynb")):
        for cell in notebook.load(path)["cells"]:
            if cell["cell_type"] == "code":
                assert "course_lib.authoring" not in notebook.source(cell), f"{path.name}, {cell['id']}"


def lines(*paths):
    return sum(len(p.read_text(encoding="utf-8").splitlines()) for p in paths if p.exists())


def sizes():
    "Each part with its lines and its budget, as in {'ranks.py': (350, 400)}."
    lessons = {t: [p for p in sorted((LIBRARY / t).rglob("*.py")) if p.name != "solutions.py"] for t in ORDER}
    shared = [p for p in FILES if part(module(p)) == "" and "kernels" not in p.parts]
    found = {
        "shared": (lines(*shared), 2600),
        "ranks.py": (lines(LIBRARY / "ranks.py"), 400),
        "kernels": (lines(*sorted((LIBRARY / "kernels").rglob("*.py"))), 1200),
        "authoring": (lines(*sorted((LIBRARY / "authoring").rglob("*.py"))), 1300),
    }
    for topic, paths in lessons.items():
        checks = [p for p in paths if p.name.startswith("check")]
        exercises = notebook.exercises(notebook.load(next(notebook.NBS.glob(f"??_{topic}.ipynb"))))
        found[topic] = (lines(*paths) - lines(*checks), {"fusion": 700, "llama": 1200}.get(topic, 400))
        # An exercise of several ranks costs its check more.
        found[f"{topic}'s checks"] = (
            lines(*checks),
            len(exercises) * (100 if topic in ("data_parallel", "sharding") else 40),
        )
    return found


# Rewritten later; their lines then are what DESIGN asks for.
OLD = set()


def test_sizes():
    "DESIGN's budgets are a goal; what is over one is said, and twice a budget is a failure."
    table = [
        f"  {part:24}{n:>7,}{budget:>8,}{'  over' if n > budget else ''}"
        for part, (n, budget) in sizes().items()
    ]
    print("\n  part                      lines  budget", *table, sep="\n")
    over = [row.strip() for row in table if row.endswith("over")]
    if over:
        warnings.warn(
            "over DESIGN's budget of lines: " + "; ".join(" ".join(r.split()[:-1]) for r in over),
            stacklevel=1,
        )
    assert [
        p for p, (n, budget) in sizes().items() if n > 2 * budget and p.removesuffix("'s checks") not in OLD
    ] == []


REACH = """
import sys
{imports}
mine = [m for n, m in sys.modules.items() if n.startswith("course_lib")]
names = [m.__file__ for m in mine if getattr(m, "__file__", None)]
skip = ("/kernels/", "/checking.py", "/check.py", "/solutions.py")
print(sum(len(open(f).read().splitlines()) for f in names if not any(s in f for s in skip)))
"""


def test_reach_of_a_lesson():
    "The lines of course_lib that roofline's imports load."
    nb = notebook.load(next(notebook.NBS.glob("*_roofline.ipynb")))
    code = [line for c in nb["cells"] if c["cell_type"] == "code" for line in notebook.source(c).splitlines()]
    imports = "\n".join(line for line in code if line.startswith("from course_lib"))
    done = subprocess.run(
        [sys.executable, "-c", REACH.format(imports=imports)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 2800

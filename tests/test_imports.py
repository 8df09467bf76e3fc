"""Who may import whom: lessons build on the ground floor and not on each other.

A lesson's modules are course_lib/<topic>.py, a folder of that name, and course_lib/<topic>_*.py. Lesson 10's
folder is course_lib/kernels/: a module `triton` beside the package of that name would be read as the package.
"""

import ast

import pytest

from course_lib.authoring import notebook

LIBRARY = notebook.ROOT / "course_lib"
FILES = sorted(p for p in LIBRARY.rglob("*.py"))
# Slow to import, or absent on some machines: imported where they are used.
LATE = {"fastai", "triton", "ipyparallel", "matplotlib", "sklearn"}
# Folders of a lesson that bear another name, and what their files may import at once.
FOLDERS = {"kernels": "triton"}
# A kernel's decorator runs when its file is read. Nothing imports these files at once: the notebook does,
# where Triton is installed.
EARLY = {"kernels": {"triton"}}
# (importer, imported) topics that are let be, each with its reason.
EXCEPTIONS = set()


def topics():
    return {
        p.stem[3:] for folder in (notebook.NBS, notebook.LESSONS) for p in folder.glob("[0-9][0-9]_*.ipynb")
    }


def topic(module, known):
    "The lesson to which 'course_lib.roofline_classes' or 'course_lib.checks.roofline' belongs, or None."
    parts = module.split(".")[1:]
    if parts[:1] == ["checks"]:
        parts = parts[1:]
    name = parts[0] if parts else ""
    name = FOLDERS.get(name, name)
    owners = [t for t in known if name == t or name.startswith(f"{t}_")]
    return max(owners, key=len, default=None)


def imports(tree, package):
    "The modules that a file imports, with whether it does so on being imported: (name, at once)."
    late = {n for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for n in ast.walk(f)}  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node not in late
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(
                    filter(None, [*package.split(".")[: len(package.split(".")) - node.level + 1], base])
                )
            for alias in node.names:
                yield f"{base}.{alias.name}", node not in late


def faults(path, known):
    "What a file imports against the rules, as sentences."
    parts = path.relative_to(notebook.ROOT).with_suffix("").parts
    module = ".".join(parts)
    mine = topic(module, known)
    # The package itself is imported on every machine.
    early = EARLY.get(parts[1], set()) if parts[2:] not in ((), ("__init__",)) else set()
    for name, at_once in imports(ast.parse(path.read_text(encoding="utf-8")), ".".join(parts[:-1])):
        if at_once and name.split(".")[0] in LATE - early:
            yield f"{module} imports {name} at once; import it in the function that uses it"
        if not name.startswith("course_lib"):
            continue
        if name.startswith("course_lib.authoring") and parts[1] != "authoring":
            yield f"{module} imports {name}, which is for authors"
        theirs = topic(name, known)
        if theirs and theirs != mine and parts[1] != "authoring" and (mine, theirs) not in EXCEPTIONS:
            yield f"{module} imports {name}, which belongs to another lesson"
        if theirs and parts[1] == "authoring":
            yield f"{module} imports {name}, which belongs to a lesson"


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(LIBRARY).as_posix())
def test_imports(path):
    assert list(faults(path, topics())) == []


def test_lessons_do_not_import_authoring():
    for path in sorted(notebook.NBS.glob("*.ipynb")):
        for cell in notebook.load(path)["cells"]:
            if cell["cell_type"] == "code":
                assert "course_lib.authoring" not in notebook.source(cell), f"{path.name}, {cell['id']}"


BAD = {
    "course_lib/roofline.py": "from course_lib import descent",
    "course_lib/roofline_more.py": "def f():\n    import course_lib.descent.inner",
    "course_lib/checks/roofline.py": "from course_lib.checks import descent",
    "course_lib/machine.py": "from . import roofline",
    "course_lib/data.py": "try:\n    import sklearn.datasets\nexcept ImportError:\n    pass",
    "course_lib/show.py": "class A:\n    from matplotlib import pyplot",
    "course_lib/meter.py": "from course_lib.authoring import notebook",
    "course_lib/authoring/x.py": "from ..roofline import cost",
    "course_lib/kernels/__init__.py": "import triton",
    "course_lib/kernels/add.py": "import matplotlib",
    "course_lib/kernels/mul.py": "from course_lib import descent",
    "course_lib/descent.py": "def f():\n    from course_lib.kernels import add",
}
GOOD = {
    "course_lib/roofline.py": "from course_lib import machine, roofline_classes",
    "course_lib/checks/roofline.py": "from course_lib.checks import core\nfrom course_lib import roofline",
    "course_lib/show.py": "def f():\n    import matplotlib",
    "course_lib/authoring/x.py": "from course_lib.authoring import notebook",
    "course_lib/kernels/add.py": "import triton.language as tl\nfrom course_lib import timing, triton_timing",
    "course_lib/triton_timing.py": "def f():\n    from course_lib.kernels import add",
}


@pytest.mark.parametrize("name", BAD)
def test_the_rule_finds(name, tmp_path, monkeypatch):
    assert len(found(name, BAD[name], tmp_path, monkeypatch)) == 1


@pytest.mark.parametrize("name", GOOD)
def test_the_rule_lets_be(name, tmp_path, monkeypatch):
    assert found(name, GOOD[name], tmp_path, monkeypatch) == []


def found(name, text, root, monkeypatch):
    monkeypatch.setattr(notebook, "ROOT", root)
    path = root / name
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return list(faults(path, {"roofline", "descent", "triton"}))

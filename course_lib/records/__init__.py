"""Where a result comes from: git and manifests for scripts, names and versions for a notebook's cells."""

import ast
import builtins
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from course_lib import files, show

# --- scripts: git, manifests, a run in a process of its own -------------------------------

SCHEMA = 1
KEYS = {"config", "seed", "commit", "diff"}  # a manifest without these can't be run again
_PLAIN = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C"}
_AUTHOR = "-c", "user.name=course", "-c", "user.email=course@localhost"


class ManifestError(ValueError):
    "A manifest that can't be used, in one sentence."

    def _render_traceback_(self):
        return [str(self)]


def git(folder):
    """A function `git(*arguments, input=None)` that runs a git command in `folder`.

    It gives what the command prints, without its last line break, or None where the command fails. Bytes that
    are no UTF-8, and line ends of any kind, come back as they are. Nobody's own git settings play a part.
    Raises RuntimeError where git is not installed.
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")} | _PLAIN
    # A folder above may be somebody's repository.
    env["GIT_CEILING_DIRECTORIES"] = str(Path(folder).resolve().parent)

    def run(*arguments, input=None):
        command = ["git", "-C", str(folder), *_AUTHOR, *map(str, arguments)]
        try:
            given = None if input is None else input.encode("utf-8", "surrogateescape")
            done = subprocess.run(command, input=given, capture_output=True, env=env)
        except FileNotFoundError:
            raise RuntimeError("git is not installed, and this lesson needs it: git-scm.com has it") from None
        text = done.stdout.decode("utf-8", "surrogateescape")
        return text.removesuffix("\n") if done.returncode == 0 else None

    return run


def repository(folder, sources):
    "A new git repository in `folder` with one commit of `sources` ({file name: text}); its `git` function."
    folder.mkdir(parents=True)
    found = git(folder)
    found("init", "--quiet")
    commit(folder, sources, "first version")
    return found


def commit(folder, sources, message):
    "Write `sources` ({file name: text}) into a repository and commit everything."
    for name, text in sources.items():
        (folder / name).write_text(text, encoding="utf-8")
    git(folder)("add", "--all")
    git(folder)("commit", "--quiet", "--message", message)


def run_script(folder, saved):
    """Run `python train.py saved.json result.json` in `folder`; return what it wrote to result.json.

    `saved` is a dict for saved.json. Raises RuntimeError with the script's last line of error.
    """
    with tempfile.TemporaryDirectory() as mail:
        given, result = Path(mail, "saved.json"), Path(mail, "result.json")
        given.write_text(json.dumps(saved), encoding="utf-8")
        if not Path(folder, "train.py").exists():
            raise RuntimeError(f"there is no train.py in {folder}")
        command = [sys.executable, "train.py", str(given), str(result)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError((done.stderr.strip().splitlines() or ["train.py failed"])[-1])
        return json.loads(result.read_text(encoding="utf-8"))


def save(manifest, path):
    "Write a manifest as JSON, with the version of its form and a digest of its content."
    body = {"schema": SCHEMA} | manifest
    with files.replacing(path) as tmp:
        text = json.dumps(body | {"sha256": _digest(body)}, indent=1)
        tmp.write_text(text + "\n", encoding="utf-8")


def load(path):
    "The manifest that `save` wrote. ManifestError for one that is cut, edited, or of a later version."
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as e:
        raise ManifestError(f"{path} can't be read: {e.strerror}") from None
    except ValueError:
        raise ManifestError(f"{path} is not JSON: it was cut or damaged, so copy it again") from None
    if not isinstance(found, dict) or not isinstance(found.get("schema"), int):
        raise ManifestError(f"{path} is not a manifest: it has no schema")
    if found["schema"] > SCHEMA:
        newer = f"has schema {found['schema']} and this library reads up to {SCHEMA}"
        raise ManifestError(f"{path} {newer}: run `git pull`")
    if found.pop("sha256", None) != _digest(found):
        raise ManifestError(f"{path} was edited after it was written: its digest doesn't fit its content")
    if lacks := KEYS - set(found):
        raise ManifestError(f"{path} lacks {', '.join(sorted(lacks))}: the run can't be repeated from it")
    return {k: v for k, v in found.items() if k != "schema"}


def _digest(body):
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


# --- notebooks: which names a cell uses and defines, and versions of its runs ----------------


class Cell(NamedTuple):
    "One run of a cell, or a cell of the page: its source, the names that it uses and those that it defines."

    id: str
    source: str
    uses: frozenset
    defines: frozenset


def read(id, source, changed=()):
    """The `Cell` of a source: the names that it reads before it has set them itself, and those that it sets.

    A name in `changed` was changed in place (`x.append(1)`): it is used and defined. Names in functions count
    where the function is defined. A source that is no Python has no names.
    """
    names = _Names()
    with contextlib.suppress(SyntaxError):
        names.visit(ast.parse(source))
    return Cell(id, source, frozenset(names.uses) | set(changed), frozenset(names.defines) | set(changed))


class _Names(ast.NodeVisitor):
    "Names in the order in which Python reads and sets them."

    def __init__(self):
        # A module is the same wherever it was imported: to import is not to define.
        self.uses, self.defines, self.imported = set(), set(), set(dir(builtins))

    def use(self, names):
        self.uses |= set(names) - self.defines - self.imported

    def visit_Name(self, node):
        if isinstance(node.ctx, ast.Load):
            self.use([node.id])
        else:
            self.defines.add(node.id)

    def visit_Assign(self, node):  # values come before targets
        for child in [node.value, *node.targets]:
            self.visit(child)

    def visit_AnnAssign(self, node):
        if node.value:
            self.visit_Assign(ast.Assign([node.target], node.value))

    def visit_AugAssign(self, node):
        self.use([node.target.id] if isinstance(node.target, ast.Name) else [])
        self.visit_Assign(ast.Assign([node.target], node.value))

    def visit_For(self, node):
        for child in [node.iter, node.target, *node.body, *node.orelse]:
            self.visit(child)

    def visit_Attribute(self, node):  # a.b = 1 and a[0] = 1 change what a names
        self.generic_visit(node)
        base = node
        while isinstance(base, ast.Attribute | ast.Subscript):
            base = base.value
        if isinstance(base, ast.Name) and not isinstance(node.ctx, ast.Load):
            self.defines.add(base.id)

    visit_Subscript = visit_Attribute

    def visit_Import(self, node):
        self.imported |= {(a.asname or a.name).partition(".")[0] for a in node.names}

    visit_ImportFrom = visit_Import

    def inner(self, nodes, local=()):
        inside = _Names()
        inside.defines |= set(local)
        for node in nodes:
            inside.visit(node)
        self.use(inside.uses - inside.defines)

    def visit_FunctionDef(self, node):
        a = node.args
        for child in [*getattr(node, "decorator_list", ()), *a.defaults, *filter(None, a.kw_defaults)]:
            self.visit(child)
        given = {x.arg for x in [*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg] if x}
        body = node.body if isinstance(node.body, list) else [node.body]
        self.inner(body, given | {getattr(node, "name", "")})
        self.defines |= {node.name} if hasattr(node, "name") else set()

    visit_AsyncFunctionDef = visit_Lambda = visit_FunctionDef

    def visit_ClassDef(self, node):
        for child in [*node.decorator_list, *node.bases, *node.keywords]:
            self.visit(child)
        self.inner(node.body, {node.name})
        self.defines.add(node.name)

    def visit_ListComp(self, node):
        self.visit(node.generators[0].iter)
        parts = [x for g in node.generators for x in (g.target, *g.ifs)]
        parts += [g.iter for g in node.generators[1:]]
        self.inner([*parts, *(getattr(node, k) for k in ("key", "value", "elt") if hasattr(node, k))])

    visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_ListComp


class Step(NamedTuple):
    "A run in a sequence of runs: its version, and for each name that it used the place of its maker."

    cell: Cell
    version: str
    inputs: dict


def replay(runs):
    """The `Step`s of runs of cells in their order.

    A version is a digest of the cell's source and of the versions of all that it used, as in Nix: of the
    recipe. Bazel and DVC take digests of the content of what was used.
    """
    maker, steps = {}, []
    for cell in runs:
        inputs = {name: maker[name] for name in sorted(cell.uses) if name in maker}
        content = [cell.source, *((name, steps[i].version) for name, i in inputs.items())]
        steps.append(Step(cell, hashlib.sha256(repr(content).encode()).hexdigest()[:8], inputs))
        maker |= dict.fromkeys(cell.defines, len(steps) - 1)
    return steps


# --- a running notebook -------------------------------------------------------------------


def fingerprints(namespace):
    "{name: a value that changes when the name is bound again or its object is changed in place}."
    own = {"In", "Out", "get_ipython", "exit", "quit", "open"}  # IPython's
    return {n: _fingerprint(v) for n, v in list(namespace.items()) if n[0] != "_" and n not in own}


def _fingerprint(value, depth=1):
    if hasattr(value, "_version") and hasattr(value, "grad_fn"):  # torch counts a tensor's changes
        return id(value), value._version
    if hasattr(value, "named_buffers"):
        return id(value), *(_fingerprint(t) for t in [*value.parameters(), *value.buffers()])
    if type(value).__module__ == "numpy" and hasattr(value, "tobytes") and value.nbytes <= 1 << 20:
        return id(value), hash(value.tobytes())
    if isinstance(value, list | set | dict) and depth and len(value) <= 1000:
        items = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        return id(value), *(_fingerprint(x, depth - 1) for x in items)
    return (id(value),)


def page(history):
    """The notebook's cells from top to bottom, each as it ran last, without those above the first that ran.

    The order is that of the saved file where JupyterLab tells its name; a cell that is not saved yet comes
    after the one that ran before it. Without a file the order is that of first runs.
    """
    latest = {cell.id: cell for cell in history}
    saved, before = _saved(), None
    first = next((id for id in latest if id in saved), None)
    ids = list(saved)[list(saved).index(first) if first else 0 :]
    ids = [id for id in saved if id in ids or id in latest]
    for id in latest:
        if id not in ids:
            ids.insert(ids.index(before) + 1 if before else len(ids), id)
        before = id
    return [latest.get(id) or read(id, saved[id]) for id in ids]


def _saved():
    "{id: source} of the saved notebook's code cells; {} where its file is not known."
    try:  # Jupyter Server tells its kernels the notebook's path under this name
        cells = json.loads(Path(os.environ["JPY_SESSION_NAME"]).read_text(encoding="utf-8"))["cells"]
        return {c["id"]: "".join(c["source"]) for c in cells if c["cell_type"] == "code"}
    except (OSError, KeyError, ValueError):
        return {}


def said(prediction, measured, unit=""):
    "A line that sets a measured number beside the learner's prediction."
    yours = "no prediction was written down" if prediction is None else f"you said {prediction}"
    return f"it is {show.number(measured)} {unit}".rstrip() + f"; {yours}"

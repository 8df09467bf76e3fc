"""Which code a run used: the commit, what is not committed, and a digest of each source file."""

import ast
import copy
import functools
import hashlib
import importlib.metadata
import platform
import subprocess
import sys
from pathlib import Path

DIFF_LIMIT = 200_000  # bytes of uncommitted changes kept in a manifest; beyond, only their digest


def essentials(config, seed, git):
    """The least that a run must write down, as lesson reproduce derives it; `describe` adds the rest.

    `git(*arguments)` gives what a git command prints, stripped, or None outside a repository. Returns a
    dict of `config seed commit clean diff python packages`; what only git knows is None without one.
    """
    status = git("status", "--porcelain")
    return {
        "config": copy.deepcopy(config),
        "seed": seed,
        "commit": git("rev-parse", "HEAD"),
        # A new file shows in the status and not in the diff.
        "clean": None if status is None else status == "",
        "diff": git("diff", "HEAD"),
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in ("torch", "numpy")},
    }


def repository(file):
    """(git, why) for the repository that `file` belongs to: `git(*arguments)` as in `essentials`.

    `why` is "found", "no repository", "no commit yet", "git is not installed" or "git did not answer".
    """
    try:
        if file is None:
            return _nothing, "no repository"
        folder = Path(file).resolve().parent
        root = _git(folder, "rev-parse", "--show-toplevel")
        # Site-packages inside a repository is ignored there: its commit says nothing about that code.
        if root is None or _git(folder, "check-ignore", "-q", str(Path(file).resolve())) is not None:
            return _nothing, "no repository"
        if _git(folder, "rev-parse", "--verify", "-q", "HEAD") is None:
            return _nothing, "no commit yet"
        return functools.partial(_stripped, root.strip()), "found"
    except FileNotFoundError:
        return _nothing, "git is not installed"
    except subprocess.TimeoutExpired:
        return _nothing, "git did not answer"


def uncommitted(file):
    """Everything that HEAD lacks in the repository of `file`, staged or not, new files included.

    Returns {"diff", "diff_sha256", "diff_bytes"}: a patch that `git apply` takes, or None where it is longer
    than 200 kB; its digest and size are there in any case.
    """
    root = Path(_git(Path(file).resolve().parent, "rev-parse", "--show-toplevel").strip())
    options = ("--binary", "--no-color", "--no-ext-diff")
    diff = _git(root, "diff", "HEAD", *options) or ""
    new = (_git(root, "ls-files", "--others", "--exclude-standard", "-z") or "").split("\0")
    for name in filter(None, new):
        size = (root / name).lstat().st_size
        if len(diff) + size > 10 * DIFF_LIMIT:
            # Far too much to keep. Name and size still tell two states apart.
            diff += f"untracked {name} {size}\n"
        else:
            diff += _git(root, "diff", "--no-index", *options, "--", "/dev/null", name, statuses=(0, 1)) or ""
    raw = diff.encode("utf-8", "surrogateescape")
    return {
        "diff": diff if len(raw) <= DIFF_LIMIT else None,
        "diff_sha256": hashlib.sha256(raw).hexdigest(),
        "diff_bytes": len(raw),
    }


def sources(module):
    """{module: SHA-256 of its file, 16 digits} for `module` and all that it imports from beside it.

    Beside it are the files of its package; for a module outside a package, those of its folder. Found by
    reading the files, imports within functions too, so that it doesn't matter what else is loaded.
    """
    top = sys.modules[module.partition(".")[0]]
    file = getattr(top, "__file__", None)
    if file is None:
        return {}
    folder = Path(file).resolve().parent
    base = folder.parent if hasattr(top, "__path__") else folder
    only = f"{top.__name__}." if hasattr(top, "__path__") else ""
    found, todo = {}, [module]
    while todo:
        name = todo.pop()
        path = _file(base, name)
        if name in found or path is None or not f"{name}.".startswith(only):
            continue
        text = path.read_bytes()
        found[name] = hashlib.sha256(text).hexdigest()[:16]
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        todo += _imported(text, package)
    return dict(sorted(found.items()))


def _file(base, name):
    path = base.joinpath(*name.split("."))
    candidates = (path / "__init__.py", path.with_name(f"{path.name}.py"))
    return next((p for p in candidates if p.is_file()), None)


def _imported(text, package):
    "The names that a file imports, and those that `from a import b` may mean: a and a.b."
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            yield module
            yield from (f"{module}.{a.name}" for a in node.names)


def _nothing(*arguments):
    return None


def _stripped(folder, *arguments):
    out = _git(folder, *arguments)
    return out if out is None else out.strip()


def _git(folder, *arguments, statuses=(0,)):
    "What a git command printed, or None where it failed. Raises FileNotFoundError without git."
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, timeout=30, stdin=subprocess.DEVNULL
    )
    return done.stdout.decode("utf-8", "surrogateescape") if done.returncode in statuses else None

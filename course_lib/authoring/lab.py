"`course lab` and `course reset`: the learner's copies in work/, and JupyterLab on them."

import datetime
import importlib.util
import itertools
import os
import secrets
import socket
import sys
from pathlib import Path

from course_lib.authoring import catalogue, notebook
from course_lib.authoring.notebook import CourseError

# Holds labconfig/default_setting_overrides.json, which turns off JupyterLab's news pop-up.
SETTINGS = Path(__file__).parent / "jupyter"


def copy_missing(work):
    """Copy to folder `work` the lessons that it lacks. Returns the names of the new files.

    A file that is there is never written to, whatever it holds.
    """
    work.mkdir(parents=True, exist_ok=True)
    missing = [path for path in notebook.lessons().values() if not os.path.lexists(work / path.name)]
    for path in missing:
        notebook.save(notebook.load(path), work / path.name)
    return [path.name for path in missing]


def warnings(work):
    "One line for each copy in `work` that is damaged, or made from another version of its lesson."
    lines = []
    for number, path in notebook.lessons().items():
        try:
            mine = notebook.load(work / path.name)["metadata"].get("course")
        except CourseError as e:
            lines.append(str(e))
            continue
        theirs = notebook.load(path)["metadata"].get("course", {})
        if not isinstance(mine, dict) or mine.get("version") != theirs.get("version"):
            lines.append(
                f"{path.stem} is from another version of the lesson, and still works; "
                f"`course reset {number}` gives the new one and keeps yours"
            )
    return lines


def lab_cmd(args):
    "Make the copies, then become JupyterLab on the asked lesson, or the first with unsolved exercises."
    known = notebook.lessons()
    if not known:
        raise CourseError("there are no lessons yet: `course build` makes them from nbs/")
    number = notebook.resolve(args.lesson) if args.lesson else _next(args.work)
    work = args.work.absolute()
    copy_missing(work)
    for line in warnings(work):
        print(line, file=sys.stderr)
    _require_jupyterlab()
    _require_free(args.port)
    token = os.environ.get("JUPYTER_TOKEN") or secrets.token_hex(24)
    page = f"/lab/tree/{known[number].name}"
    browser = not (args.no_browser or os.environ.get("NO_BROWSER", "") not in ("", "0"))
    print(f"JupyterLab on lesson {number}: http://localhost:{args.port}{page}?token={token}")
    print("It is there in a few seconds. Ctrl-C twice ends it.", flush=True)
    os.environ["JUPYTER_TOKEN"] = token  # not in the arguments, which other users can see
    os.environ["JUPYTER_CONFIG_PATH"] = os.pathsep.join(
        [str(SETTINGS), *filter(None, [os.environ.get("JUPYTER_CONFIG_PATH")])]
    )
    os.execv(
        sys.executable,
        [sys.executable, "-m", "jupyterlab"]
        + [f"--ServerApp.root_dir={work}", f"--LabApp.default_url={page}", f"--ServerApp.port={args.port}"]
        + ["--ServerApp.port_retries=0", "--log-level=WARN", "--LabApp.log_level=WARN"]
        + ([] if browser else ["--no-browser"])
        # Containers and rented GPU hosts run as root, which Jupyter refuses unasked.
        + (["--allow-root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []),
    )


def _next(work):
    rows = catalogue.lessons(work)
    return catalogue.first_unsolved(rows) or rows[0]["number"]


def _require_jupyterlab():
    "JupyterLab is installed, and the kernel that notebooks name runs this Python."
    if importlib.util.find_spec("jupyterlab") is None:
        raise CourseError(
            f"JupyterLab is not installed for {sys.executable}: `pip install -e .[dev]`, or `make lab`"
        )
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    cure = f"`{sys.executable} -m ipykernel install --sys-prefix` mends it"
    try:
        program = KernelSpecManager().get_kernel_spec("python3").argv[0]
    except (NoSuchKernel, OSError, ValueError, IndexError):
        raise CourseError(f"the kernel python3, which the lessons name, is missing: {cure}") from None
    # A bare `python` is replaced by Jupyter with the Python that it runs on. Folders are compared unresolved:
    # an environment's python is a link to one that lacks its packages.
    if os.sep in program and Path(program).absolute().parent != Path(sys.executable).absolute().parent:
        raise CourseError(f"the kernel python3 runs {program}, not {sys.executable}: {cure}")


def _require_free(port):
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("127.0.0.1", port))
        except OSError as e:
            raise CourseError(
                f"port {port} can't be used ({e.strerror}): another JupyterLab may hold it; "
                f"end that one, or try `course lab --port {port + 1 if port < 65535 else 8888}`"
            ) from None


def reset_cmd(args):
    "A fresh copy of a lesson; the old one, whatever its state, is kept under its name and today's date."
    number = notebook.resolve(args.lesson)
    path = notebook.lessons()[number]
    fresh = notebook.load(path)
    args.work.mkdir(parents=True, exist_ok=True)
    target, kept = args.work / path.name, None
    if os.path.lexists(target):
        kept = _free_name(target)
        target.rename(kept)
    try:
        notebook.save(fresh, target)
    except BaseException:
        if kept:
            kept.rename(target)
        raise
    print(f"{target} is fresh" + (f"; yours is kept as {kept.name}" if kept else ""))


def _free_name(target):
    stem = f"{target.stem}.{datetime.date.today().isoformat()}"
    names = (f"{stem}{f'.{n}' if n > 1 else ''}{target.suffix}" for n in itertools.count(1))
    return next(target.with_name(n) for n in names if not os.path.lexists(target.with_name(n)))

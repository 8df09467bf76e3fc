"`course lab` and `course reset`: the learner's copies in work/, and JupyterLab on them."

import datetime
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


def copy_of(path, work):
    "The learner's copy of the lesson at `path`, under this or an older number; else a new path."
    same = sorted(work.glob(f"[0-9][0-9]{path.stem[2:]}.ipynb"))
    return same[-1] if same and not os.path.lexists(work / path.name) else work / path.name


def copy_missing(work, path):
    "Copy to folder `work` the lesson at `path` and all others that it lacks; no file there is written to."
    work.mkdir(parents=True, exist_ok=True)
    for lesson in {path, *(p for p, _ in catalogue.published().values())}:
        if not os.path.lexists(copy_of(lesson, work)):
            notebook.save(notebook.load(lesson), work / lesson.name)


def warning(work, path):
    "A line where the copy in `work` of the lesson at `path` is damaged or from another version, or ''."
    try:
        mine = notebook.load(copy_of(path, work))
    except CourseError as e:
        return str(e)
    same = notebook.version(mine) == notebook.version(notebook.load(path))
    return "" if same else f"this notebook is from another version; {notebook.AGAIN.format(path.stem[3:])}"


def lab_cmd(args):
    "Make the copies, then become JupyterLab on the asked lesson, or the first with unsolved exercises."
    number = notebook.resolve(
        args.lesson or catalogue.first_unsolved(args.work) or min(notebook.lessons(), default="")
    )
    path, work = notebook.lessons()[number], args.work.absolute()
    copy_missing(work, path)
    if line := warning(work, path):
        print(line, file=sys.stderr)
    with socket.socket() as s:
        try:
            s.bind((args.ip, 0))
        except OSError:
            raise CourseError(f"--ip {args.ip} is no address of this machine") from None
    with socket.socket() as s:
        if not 0 < args.port < 65536 or s.connect_ex(("127.0.0.1", args.port)) == 0:
            raise CourseError(
                f"port {args.port} can't be used: end the JupyterLab that may hold it, or try another --port"
            )
    token = os.environ.get("JUPYTER_TOKEN") or secrets.token_hex(24)
    page, host = f"/lab/tree/{copy_of(path, work).name}", args.ip.replace("0.0.0.0", "localhost")
    print(f"JupyterLab on lesson {number}: http://{host}:{args.port}{page}?token={token}")
    print("It is there in a few seconds. Ctrl-C twice ends it.")
    print("Where Run All stops, the table of contents at the left marks the exercise in red.", flush=True)
    os.environ["JUPYTER_TOKEN"] = token  # not in the arguments, which other users can see
    settings = [str(SETTINGS), *filter(None, [os.environ.get("JUPYTER_CONFIG_PATH")])]
    os.environ["JUPYTER_CONFIG_PATH"] = os.pathsep.join(settings)
    words = [sys.executable, "-m", "jupyterlab", "--log-level=WARN", "--LabApp.log_level=WARN"]
    words += [f"--ServerApp.root_dir={work}", f"--LabApp.default_url={page}"]
    words += [f"--ServerApp.ip={args.ip}", f"--ServerApp.port={args.port}", "--ServerApp.port_retries=0"]
    if args.no_browser or os.environ.get("NO_BROWSER", "") not in ("", "0"):
        words += ["--no-browser"]
    if hasattr(os, "geteuid") and os.geteuid() == 0:  # as in containers, which Jupyter refuses unasked
        words += ["--allow-root"]
    os.execv(sys.executable, words)


def reset_cmd(args):
    "A fresh copy of a lesson; the old one, whatever its state, is kept under its name and today's date."
    path = notebook.lessons()[notebook.resolve(args.lesson)]
    fresh, old, target = notebook.load(path), copy_of(path, args.work), args.work / path.name
    args.work.mkdir(parents=True, exist_ok=True)
    if os.path.lexists(old):
        stem, suffixes = f"{old.stem}.{datetime.date.today()}", (f".{n}" for n in itertools.count(2))
        names = (old.with_name(f"{stem}{suffix}.ipynb") for suffix in itertools.chain([""], suffixes))
        kept = next(p for p in names if not os.path.lexists(p))
        old.rename(kept)
        print(f"yours is kept as {kept.name}")
    notebook.save(fresh, target)
    print(f"{target} is fresh")

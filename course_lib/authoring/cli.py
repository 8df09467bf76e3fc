"The command `course`. A subcommand is imported when it runs, so that help and list answer at once."

import argparse
import importlib
import sys
from pathlib import Path

from course_lib.authoring import notebook

# name: (module, function, what it does)
COMMANDS = {
    "list": ("catalogue", "list_cmd", "the lessons, their exercises, your progress"),
    "doctor": ("catalogue", "doctor_cmd", "what this machine is, how fast it is, what it can do"),
    "lab": ("lab", "lab_cmd", "open JupyterLab on your copies of the lessons"),
    "run": ("run", "run_cmd", "execute worked lessons here; their figures beside the recorded ones"),
    "check": ("check", "check_cmd", "execute a copy of your notebook and judge its exercises"),
    "grade": ("grade", "grade_cmd", "for teachers: judge the notebooks of a class"),
    "plan": ("plan", "plan_cmd", "for teachers: the lessons in one, three and five days"),
    "reset": ("lab", "reset_cmd", "a fresh copy of a lesson; yours is kept under its date"),
    "build": ("build", "build_cmd", "for authors: make lessons/, README's map and its numbers from nbs/"),
    "record": ("record", "record_cmd", "for authors: execute lessons and store outputs and figures"),
    "figures": ("catalogue", "figures_cmd", "every recorded figure"),
    "book": ("book", "book_cmd", "the worked lessons as a site to read: no network, no server"),
}
LESSON = {"metavar": "LESSON", "help": "06, roofline or 06_roofline"}


def parser():
    "The parser of the command line."
    top = argparse.ArgumentParser(prog="course", description="A course of notebooks on making training fast.")
    subs = top.add_subparsers(dest="command", metavar="COMMAND")
    add = {name: subs.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".")
           for name, (_, _, about) in COMMANDS.items()}  # fmt: skip
    yes = {"action": "store_true"}
    add["lab"].add_argument("lesson", nargs="?", **LESSON)
    add["lab"].add_argument("--no-browser", help="print the address (or NO_BROWSER=1)", **yes)
    add["lab"].add_argument("--port", type=int, default=8888, metavar="N", help="default: 8888")
    add["lab"].add_argument("--ip", default="localhost", help="0.0.0.0 for all networks; default: localhost")
    add["run"].add_argument("lessons", nargs="*", **LESSON)
    add["run"].add_argument("--all", help="every lesson", **yes)
    suits = "those that run without a GPU (cpu), have cells for one (gpu) or measure on several (gpus)"
    add["run"].add_argument("--needs", choices=("cpu", "gpu", "gpus"), help=suits)
    add["run"].add_argument("--jobs", type=int, default=1, metavar="N", help="lessons at a time; default: 1")
    add["run"].add_argument("--timeout", type=float, metavar="S", help="seconds a cell; default: no limit")
    add["run"].add_argument("--junit", type=Path, metavar="FILE", help="a report for CI: each cell a test")
    add["check"].add_argument("lessons", nargs="+", **LESSON)
    add["check"].add_argument("--exercise", metavar="N", help="judge this one alone: 3 or roofline.3")
    add["check"].add_argument("--timeout", type=float, default=120, metavar="S", help="seconds a cell")
    add["grade"].add_argument(
        "folder", type=Path, metavar="DIR", help="ana.ipynb … or ana/01_descent.ipynb …"
    )
    add["grade"].add_argument("lessons", nargs="*", **LESSON)
    add["grade"].add_argument("--csv", type=Path, metavar="FILE", help="write the table there too")
    add["grade"].add_argument(
        "--jobs", type=int, metavar="N", help="side by side; default: as this machine can"
    )
    add["grade"].add_argument(
        "--timeout", type=float, default=60, metavar="S", help="seconds a cell; default: 60"
    )
    add["grade"].add_argument("--figures", help="on a GPU: also what the learners' own code reached", **yes)
    add["plan"].add_argument("lessons", nargs="*", **LESSON)
    add["plan"].add_argument(
        "--days", type=int, nargs="+", default=[1, 3, 5], metavar="D", help="default: 1 3 5"
    )
    add["plan"].add_argument("--hours", type=float, default=6, metavar="H", help="hours a day; default: 6")
    add["reset"].add_argument("lesson", **LESSON)
    copies = {"type": Path, "default": notebook.WORK, "metavar": "DIR", "help": "your copies; default: work/"}
    for name in ("list", "lab", "check", "reset"):
        add[name].add_argument("--work", **copies)
    for name in ("build", "record"):
        add[name].add_argument("--check", help="write nothing; fail where something is behind", **yes)
    add["record"].add_argument("lessons", nargs="*", **LESSON)
    add["record"].add_argument("--cpu", help="marked cells alone, on any machine", **yes)
    add["record"].add_argument("--parallel", help="lessons side by side, a GPU for each", **yes)
    add["record"].add_argument("--out", type=Path, metavar="DIR", help="write the notebooks there")
    add["record"].add_argument("--commit", metavar="C", help="the commit, on a host without .git")
    add["record"].add_argument("--dirty", help="course_lib has uncommitted changes", **yes)
    site = notebook.ROOT / "build" / "book"
    add["book"].add_argument("--out", type=Path, default=site, metavar="DIR", help="default: build/book")
    return top


def main(argv=None):
    "Run `course` with `argv`; returns the exit status."
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # a pipe or terminal that is not UTF-8
    args = parser().parse_args(argv)
    if args.command is None:
        parser().print_help()
        return 0
    try:
        if not notebook.LESSONS.is_dir() and not notebook.NBS.is_dir():
            raise notebook.CourseError(
                f"course needs the course's notebooks, and {notebook.ROOT} has none: "
                f"clone the repository and run `make lab` there, or set COURSE_ROOT to a clone"
            )
        module, function, _ = COMMANDS[args.command]
        return getattr(importlib.import_module(f"course_lib.authoring.{module}"), function)(args) or 0
    except notebook.CourseError as e:
        print(e, file=sys.stderr)
        return 1
    except BrokenPipeError:  # `course list | head`
        sys.stderr.close()
        return 0
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except OSError as e:
        if e.strerror is None:
            raise
        what = e.filename2 or e.filename or f"course {args.command}"
        print(f"{what}: {e.strerror}; nothing was lost", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

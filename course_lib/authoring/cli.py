"The command `course`. A subcommand is imported when it runs, so that help and list answer at once."

import sys

if sys.version_info < (3, 11):  # noqa: UP036  before any import that an older Python would trip over
    sys.exit("The course needs Python 3.11 or newer, and this is {}.{}.".format(*sys.version_info[:2]))

import argparse
import importlib
from pathlib import Path

from course_lib.authoring import notebook

# name: (module, function, what it does)
COMMANDS = {
    "list": ("catalogue", "list_cmd", "the lessons, their exercises, your progress"),
    "doctor": ("doctor", "doctor_cmd", "what this machine is and what each lesson can do on it"),
    "lab": ("lab", "lab_cmd", "open JupyterLab on your copies of the lessons"),
    "run": ("run", "run_cmd", "execute worked lessons here; compare figures with the recorded ones"),
    "check": ("run", "check_cmd", "execute a copy of your notebook and judge every exercise"),
    "reset": ("lab", "reset_cmd", "a fresh copy of a lesson; yours is kept under its date"),
    "build": ("build", "build_cmd", "for authors: make lessons/ and README's tables from nbs/"),
    "record": ("record", "record_cmd", "for authors: execute lessons on a GPU and store outputs and figures"),
    "figures": ("catalogue", "figures_cmd", "every recorded figure"),
}


class Parser(argparse.ArgumentParser):
    "argparse with bad input answered in one line."

    def error(self, message):
        self.exit(2, f"{self.prog}: {message} (`{self.prog} --help` lists what it takes)\n")


def parser():
    "The parser of the command line."
    top = Parser(prog="course", description="A course of notebooks on making training fast.")
    subs = top.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    add = {name: subs.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".")
           for name, (_, _, about) in COMMANDS.items()}  # fmt: skip
    for name in ("list", "doctor", "figures"):
        add[name].add_argument("--json", action="store_true", help="print JSON")
    add["lab"].add_argument("lesson", nargs="?", metavar="LESSON", help="05, roofline or 05_roofline")
    add["lab"].add_argument(
        "--no-browser", action="store_true", help="print the address instead (or NO_BROWSER=1)"
    )
    add["lab"].add_argument("--port", type=_port, default=8888, metavar="N", help="default: 8888")
    for name in ("run", "check", "record"):
        any_number = "+" if name == "check" else "*"
        add[name].add_argument(
            "lessons", nargs=any_number, metavar="LESSON", help="05, roofline or 05_roofline"
        )
    add["run"].add_argument("--all", action="store_true", help="every lesson")
    add["check"].add_argument(
        "--timeout", type=_seconds, default=120, metavar="S", help="seconds a cell; default: 120"
    )
    add["reset"].add_argument("lesson", metavar="LESSON", help="05, roofline or 05_roofline")
    for name in ("list", "lab", "check", "reset"):
        add[name].add_argument(
            "--work", type=Path, default=notebook.WORK, metavar="DIR", help="your copies; default: work/"
        )
    add["build"].add_argument(
        "--check", action="store_true", help="write nothing; fail where something is behind"
    )
    for option, about in (("cpu", "renew marked cells and checks alone, which no GPU is needed for"),
                          ("check", "write nothing; fail where a recording is behind"),
                          ("parallel", "lessons side by side, each with a GPU of its own"),
                          ("dirty", "the tree has uncommitted changes")):  # fmt: skip
        add["record"].add_argument(f"--{option}", action="store_true", help=about)
    add["record"].add_argument("--commit", metavar="C", help="the commit, on a host without .git")
    add["record"].add_argument("--out", type=Path, metavar="DIR", help="where to write; default: nbs/")
    return top


def _port(word):
    if not word.isdecimal() or not 1 <= int(word) <= 65535:
        raise argparse.ArgumentTypeError(f"{word!r} is not a port; expected a number from 1 to 65535")
    return int(word)


def _seconds(word):
    try:
        seconds = float(word)
    except ValueError:
        seconds = 0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{word!r} is not a time limit; expected seconds, more than 0")
    return seconds


def main(argv=None):
    "Run `course` with `argv`; returns the exit status."
    argv = sys.argv[1:] if argv is None else argv
    if argv and not argv[0].startswith("-") and argv[0] not in COMMANDS:
        print(
            f"course: there is no command {argv[0]!r}; the commands are: {', '.join(COMMANDS)}",
            file=sys.stderr,
        )
        return 2
    top = parser()
    args = top.parse_args(argv)
    if args.command is None:
        top.print_help()
        return 0
    if args.command == "run" and not args.lessons and not args.all:
        top.error("run needs a LESSON, or --all")
    module, function, _ = COMMANDS[args.command]
    try:
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

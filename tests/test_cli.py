import errno
import importlib
import json
import subprocess
import sys
import time
import types

import pytest
import small_course
from small_course import course

from course_lib.authoring import cli, notebook


@pytest.fixture
def root(tmp_path):
    small_course.write(tmp_path)
    assert course(tmp_path, "build").returncode == 0
    return tmp_path


@pytest.fixture
def here(root, monkeypatch):
    "The small course, in this process."
    small_course.use(root, monkeypatch)
    return root


def one_sentence(result, status=1):
    "What a command that refused said on stderr: one line, and nothing on stdout."
    assert result.returncode == status, result.stderr
    assert result.stdout == "" and result.stderr.count("\n") == 1 and "Traceback" not in result.stderr
    return result.stderr


def progress(root, text):
    (root / "work").mkdir(exist_ok=True)
    (root / "work/.progress.json").write_text(text)


# --- quick, and without the heavy packages ------------------------------------------


@pytest.mark.parametrize(
    "words", [["--help"], ["list"], ["list", "--json"], ["figures", "--json"], ["lab", "--help"]]
)
def test_answers_at_once(root, words):
    def seconds():
        start = time.perf_counter()
        assert course(root, *words).returncode == 0
        return time.perf_counter() - start

    assert min(seconds() for _ in range(3)) < 0.5  # 0.1 s; the best of three, since the machine may be busy


def test_imports_nothing_heavy(root):
    code = "import sys, course_lib.authoring.cli as c\nc.main(['list'])\nprint(*sys.modules, file=sys.stderr)"
    out = subprocess.run(
        [sys.executable, "-c", code], env=small_course.environment(root), capture_output=True, text=True
    )
    heavy = {"torch", "nbformat", "numpy", "fastai", "triton", "matplotlib", "jupyter_client"}
    assert out.stdout and not heavy & set(out.stderr.split())


def test_every_command_exists():
    for module, function, _ in cli.COMMANDS.values():
        found = importlib.import_module(f"course_lib.authoring.{module}")
        assert callable(getattr(found, function))


# --- list ---------------------------------------------------------------------------


def test_list_json(root):
    progress(root, '{"01.1": {"passed": "2026-11-29", "version": "0"}}')
    first, second = json.loads(course(root, "list", "--json").stdout)
    assert first == {
        "number": "01",
        "slug": "tiny",
        "title": "Tiny",
        "part": "A. First",
        "minutes": 20,
        "needs": "nothing",
        "exercises": [{"id": "01.1", "title": "Double", "mutants": 3, "passed": True}],
        "recorded": {"gpu": "NVIDIA H200", "torch": "2.11.0", "date": "2026-11-29"},
    }
    assert second["exercises"] == [{"id": "05.1", "title": "Double", "mutants": 0, "passed": False}]


def test_list_says_what_comes_next(root):
    out = course(root, "list").stdout
    assert "A. First" in out and "0/1 solved" in out and "recorded on NVIDIA H200, 2026-11-29" in out
    assert out.endswith("Next: course lab 01\n")
    progress(root, '{"01.1": {"passed": "2026-11-29"}}')
    assert course(root, "list").stdout.endswith("Next: course lab 05\n")
    progress(root, '{"01.1": {}, "05.1": {}}')
    assert course(root, "list").stdout.endswith("Every exercise is solved.\n")
    assert course(root, "list", "--work", root / "elsewhere").stdout.endswith("Next: course lab 01\n")


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"01.1": true}', "[" * 100_000, "\x00\x01"])
def test_damaged_progress_is_no_progress(root, text):
    progress(root, text)
    result = course(root, "list")
    assert result.returncode == 0 and "0/1 solved" in result.stdout


def test_list_without_a_recording(root):
    (root / "nbs/01_tiny.ipynb").unlink()
    nb = small_course.worked("05", "second", "Second")
    nb["metadata"]["recorded"] = {}
    small_course.put(root, nb)
    first, second = json.loads(course(root, "list", "--json").stdout)
    assert first["recorded"] is None and second["recorded"] is None


def test_list_of_nothing(tmp_path):
    result = course(tmp_path, "list")
    assert result.returncode == 0 and "course build" in result.stdout
    assert json.loads(course(tmp_path, "list", "--json").stdout) == []


def test_a_damaged_lesson_is_one_sentence(root):
    (root / "lessons/01_tiny.ipynb").write_text("{")
    assert "take it from git again" in one_sentence(course(root, "list"))


# --- figures ------------------------------------------------------------------------


def test_figures(root):
    first, _ = json.loads(course(root, "figures", "--json").stdout)
    assert first == {
        "lesson": "01",
        "name": "01.copy_tbps",
        "value": 4.2713,
        "unit": "TB/s",
        "bar": {"op": ">=", "value": 4.0},
        "machine": "NVIDIA H200",
        "torch": "2.11.0",
        "date": "2026-11-29",
        "commit": "abc1234",
    }
    lines = course(root, "figures").stdout.splitlines()
    assert len(lines) == 3 and lines[2].split() == [
        "05.copy_tbps",
        "4.27",
        "TB/s",
        "≥",
        "4",
        "NVIDIA",
        "H200",
        "2.11.0",
        "2026-11-29",
    ]


def test_figures_of_a_damaged_notebook(root):
    (root / "nbs/01_tiny.ipynb").write_text("{")
    assert "take it from git again" in one_sentence(course(root, "figures"))


# --- bad input ----------------------------------------------------------------------


@pytest.mark.parametrize("words", [["reset", "99"], ["reset", "nowhere"], ["lab", "99", "--no-browser"]])
def test_an_unknown_lesson(root, words):
    said = one_sentence(course(root, *words))
    assert said == f"there is no lesson {words[1]!r}; the lessons are: 01 tiny, 05 second\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["lsit"], "there is no command 'lsit'; the commands are: list, doctor, lab"),
        (["run"], "run needs a LESSON, or --all"),
        (["check"], "LESSON"),
        (["list", "--jsno"], "--jsno"),
        (["lab", "--port", "0"], "'0' is not a port"),
        (["lab", "--port", "http"], "'http' is not a port"),
        (["check", "01", "--timeout", "-1"], "'-1' is not a time limit"),
        (["check", "01", "--timeout", "nan"], "'nan' is not a time limit"),
    ],
)
def test_a_call_that_makes_no_sense(root, words, said):
    assert said in one_sentence(course(root, *words), status=2)


def test_no_command_prints_the_commands(root):
    result = course(root)
    assert result.returncode == 0 and all(f"    {name}" in result.stdout for name in cli.COMMANDS)


def test_an_old_python_is_told(root):
    code = "import sys; sys.version_info = (3, 9, 1); import course_lib.authoring.cli"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=small_course.REPOSITORY
    )
    assert one_sentence(result) == "The course needs Python 3.11 or newer, and this is 3.9.\n"


def raising(error):
    def command(args):
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (KeyboardInterrupt(), 130, ""),
        (notebook.CourseError("Do this."), 1, "Do this."),
        (OSError(errno.ENOSPC, "Disk full", "w/01.ipynb"), 1, "w/01.ipynb: Disk full; nothing was lost"),
        (OSError(errno.EIO, "Input/output error"), 1, "course list: Input/output error; nothing was lost"),
    ],
)  # fmt: skip
def test_failures_are_one_sentence(monkeypatch, capsys, error, status, said):
    monkeypatch.setitem(sys.modules, "course_lib.authoring.fake", types.SimpleNamespace(go=raising(error)))
    monkeypatch.setitem(cli.COMMANDS, "list", ("fake", "go", "fails"))
    assert cli.main(["list"]) == status
    assert capsys.readouterr().err.strip() == said


def test_a_bug_is_not_hidden(monkeypatch):
    monkeypatch.setitem(
        sys.modules, "course_lib.authoring.fake", types.SimpleNamespace(go=raising(ZeroDivisionError()))
    )
    monkeypatch.setitem(cli.COMMANDS, "list", ("fake", "go", "fails"))
    with pytest.raises(ZeroDivisionError):
        cli.main(["list"])


def test_output_may_be_cut_short(root):
    command = f"{sys.executable} -m course_lib.authoring.cli figures --json | true"
    result = subprocess.run(
        command, shell=True, env=small_course.environment(root), capture_output=True, text=True
    )
    assert result.returncode == 0 and result.stderr == ""


def test_a_write_that_fails_leaves_the_old_file(here, monkeypatch):
    path = here / "work.ipynb"
    notebook.write("old", path)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(notebook.os, "replace", full)
    with pytest.raises(
        notebook.CourseError, match=r"work.ipynb can't be written \(No space left.*nothing was lost"
    ):
        notebook.write("new", path)
    assert path.read_text() == "old" and not list(here.glob(".work*"))

import errno
import importlib
import json
import subprocess
import sys
import time
import types

import pytest
import small_course
import torch
from small_course import course

from course_lib import machine
from course_lib.authoring import catalogue, cli, notebook


@pytest.fixture
def said(course_root, capsys):
    "Run `course WORDS…` here; returns (exit status, stdout, stderr)."

    def said(*words):
        try:
            status = cli.main([*map(str, words)])
        except SystemExit as e:
            status = e.code
        return (status, *capsys.readouterr())

    return said


def progress(course_root, rows):
    (course_root / "work").mkdir(exist_ok=True)
    (course_root / "work/.progress.json").write_text(rows if isinstance(rows, str) else json.dumps(rows))


DONE = {"tiny.1": {"title": "Double", "passed": "2026-11-29"}}


def test_answers_at_once_and_imports_nothing_heavy(built):
    program = "import sys\nfrom course_lib.authoring import cli\ncli.main(['list'])\ncli.main(['figures'])\n"
    program += "print(*sys.modules, file=sys.stderr)"
    start, env = time.perf_counter(), small_course.environment(built)
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert time.perf_counter() - start < 3  # 0.1 s where the machine is quiet
    heavy = {"torch", "nbformat", "numpy", "fastai", "triton", "matplotlib", "jupyter_client", "psutil"}
    assert "tiny.copy_tbps" in done.stdout and not heavy & set(done.stderr.split())


def test_list(course_root, said):
    progress(course_root, DONE)
    out = said("list")[1]
    assert "A. First" in out and "1/1 solved" in out and "recorded on NVIDIA H200, 2026-11-29" in out
    assert out.endswith("Next: course lab 06\n")
    progress(course_root, DONE | {"second.1": {"title": "Double"}})
    assert said("list")[1].endswith("Every exercise is solved.\n")
    assert said("list", "--work", course_root / "elsewhere")[1].endswith("Next: course lab 01\n")


@pytest.mark.parametrize("text", ["{", "[]", '{"tiny.1": true}', '{"tiny.1": {}}', "[" * 100_000])
def test_damaged_progress_is_no_progress(course_root, said, text):
    progress(course_root, text)
    status, out, _ = said("list")
    assert status == 0 and "0/1 solved" in out


def test_a_draft_is_in_no_list(course_root, said):
    nb = small_course.worked("06", "second", "Second")
    del nb["metadata"]["recorded"]
    small_course.put(course_root, nb)
    assert "Tiny" in said("list")[1] and "Second" not in said("list")[1]
    (course_root / "nbs/01_tiny.ipynb").unlink()
    assert "There are no lessons yet" in said("list")[1]


def test_figures(said):
    lines = said("figures")[1].splitlines()
    assert len(lines) == 3 and lines[1].split()[:5] == ["tiny.copy_tbps", "4.27", "TB/s", ">=", "4"]


def test_doctor(said, monkeypatch):
    monkeypatch.setattr(machine, "peaks", lambda: machine.Peaks(2e11, 3e10, 4e-6))
    assert "200 GFLOP/s" in said("doctor")[1]
    monkeypatch.setattr(machine, "peaks", lambda: machine.Peaks(785e12, 3e10, 4e-6))
    monkeypatch.setattr(machine, "name", lambda: "NVIDIA H200")
    monkeypatch.setattr(catalogue, "abilities", lambda: {"gpu": True, "triton": "gpu", "compile": True})
    monkeypatch.setattr(machine, "has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    whole = types.SimpleNamespace(total_memory=139 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: whole)
    text = said("doctor")[1]
    assert "785 TFLOP/s, 79% of the datasheet's" in text and "GPU 139 GiB" in text and "(of 8)" in text


@pytest.mark.parametrize(
    "gpu, capability, interpret, has, expected",
    [
        (False, None, "0", "", (False, None, False)),
        (False, None, "0", "triton compiler headers", (False, "interpreter", True)),
        (False, None, "0", "triton compiler", (False, "interpreter", False)),
        (True, (9, 0), "0", "triton compiler headers", (True, "gpu", True)),
        (True, (9, 0), "1", "triton compiler headers", (True, "interpreter", False)),
        (True, (6, 1), "0", "triton compiler headers", (True, "interpreter", False)),  # too old for Triton
    ],
)
def test_abilities(monkeypatch, tmp_path, gpu, capability, interpret, has, expected):
    if "headers" in has:
        (tmp_path / "Python.h").write_text("")
    monkeypatch.setattr(machine, "has_gpu", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(catalogue.importlib.util, "find_spec", lambda name: "triton" in has or None)
    monkeypatch.setattr(catalogue.shutil, "which", lambda name: "compiler" in has or None)
    monkeypatch.setattr(catalogue.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    assert catalogue.abilities() == dict(zip(("gpu", "triton", "compile"), expected, strict=True))


def test_output_that_is_not_utf8(built):
    for encoding in ("cp1252", "gbk", "cp437", "ascii"):
        done = subprocess.run(
            [sys.executable, "-m", "course_lib.authoring.cli", "figures"], capture_output=True,
            env=small_course.environment(built, PYTHONIOENCODING=encoding),
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, b"") and b"tiny.copy_tbps" in done.stdout


# --- bad input ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "status", "sentence"),
    [
        (["reset", "99"], 1, "there is no lesson '99'; the lessons are: 01 tiny, 06 second"),
        (["lab", "nowhere", "--no-browser"], 1, "there is no lesson 'nowhere'"),
        (["check", "tiny"], 1, "01_tiny.ipynb is not there yet: `course lab tiny` makes it and opens it"),
        (["run", "nine"], 1, "there is no lesson 'nine'"),
        (["run"], 1, "name a lesson, or use --all"),
        (["lab", "--port", "0"], 1, "port 0 can't be used"),
        (["lab", "--ip", "no.where.invalid"], 1, "--ip no.where.invalid is no address of this machine"),
    ],
)
def test_a_call_that_makes_no_sense(said, words, status, sentence):
    got, out, err = said(*words)
    assert (got, out) == (status, "") and sentence in err and err.count("\n") == 1


def test_damaged_notebooks_are_one_sentence(course_root, said):
    for name, words in (("lessons/01_tiny.ipynb", ["reset", "1"]), ("nbs/01_tiny.ipynb", ["figures"])):
        (course_root / name).write_text("{")
        status, out, err = said(*words)
        assert (status, out) == (1, "") and "take it from git again" in err and err.count("\n") == 1


def test_outside_a_clone(tmp_path):
    done = course(tmp_path, "list")
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1
    assert f"needs the course's notebooks, and {tmp_path} has none: clone the repository" in done.stderr


def test_no_command_prints_the_commands_and_each_exists(said):
    status, out, _ = said()
    assert status == 0 and all(f"    {name}" in out for name in cli.COMMANDS)
    for module, function, _ in cli.COMMANDS.values():
        assert callable(getattr(importlib.import_module(f"course_lib.authoring.{module}"), function))


@pytest.mark.parametrize(
    ("error", "status", "sentence"),
    [
        (KeyboardInterrupt(), 130, ""),
        (notebook.CourseError("Do this."), 1, "Do this."),
        (OSError(errno.ENOSPC, "Disk full", "w/01.ipynb"), 1, "w/01.ipynb: Disk full; nothing was lost"),
        (OSError(errno.EIO, "Input/output error"), 1, "course list: Input/output error; nothing was lost"),
        (ZeroDivisionError(), None, ""),
    ],
)
def test_failures_are_one_sentence_and_a_bug_is_not_hidden(said, monkeypatch, error, status, sentence):
    def fail(args):
        raise error

    monkeypatch.setitem(sys.modules, "course_lib.authoring.fake", types.SimpleNamespace(go=fail))
    monkeypatch.setitem(cli.COMMANDS, "list", ("fake", "go", "fails"))
    if status is None:
        with pytest.raises(type(error)):
            cli.main(["list"])
    else:
        assert said("list") == (status, "", sentence + "\n")


def test_output_may_be_cut_short(built):
    command = f"{sys.executable} -m course_lib.authoring.cli figures | true"
    done = subprocess.run(command, shell=True, env=small_course.environment(built), capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")

import argparse
import contextlib
import datetime
import errno
import json
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
import small_course
from small_course import course

from course_lib.authoring import lab, notebook

TODAY = datetime.date.today().isoformat()


@pytest.fixture
def root(tmp_path, monkeypatch):
    small_course.write(tmp_path)
    assert course(tmp_path, "build").returncode == 0
    small_course.use(tmp_path, monkeypatch)
    return tmp_path


@pytest.fixture
def work(root):
    lab.copy_missing(root / "work")
    return root / "work"


def reset(lesson="01", work=None):
    return lab.reset_cmd(argparse.Namespace(lesson=lesson, work=work or notebook.WORK))


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


# --- copies -------------------------------------------------------------------------


def test_copies_what_is_missing_and_overwrites_nothing(root):
    work = root / "deep/work"
    assert lab.copy_missing(work) == ["01_tiny.ipynb", "05_second.ipynb"]
    assert (work / "01_tiny.ipynb").read_bytes() == (root / "lessons/01_tiny.ipynb").read_bytes()
    (work / "01_tiny.ipynb").write_text("mine")
    (work / "notes.txt").write_text("mine too")
    (work / "05_second.ipynb").unlink()
    assert lab.copy_missing(work) == ["05_second.ipynb"]
    assert lab.copy_missing(work) == []
    assert (work / "01_tiny.ipynb").read_text() == "mine" and (work / "notes.txt").read_text() == "mine too"
    assert not list(work.glob(".*"))


def test_a_copy_of_another_version_is_named(root, work):
    assert lab.warnings(work) == []
    nb = notebook.load(work / "01_tiny.ipynb")
    nb["cells"][3]["source"] = "def double(x): return 2 * x"
    notebook.save(nb, work / "01_tiny.ipynb")
    assert lab.warnings(work) == []
    nb["metadata"]["course"]["version"] = "0"
    notebook.save(nb, work / "01_tiny.ipynb")
    (line,) = lab.warnings(work)
    assert line.startswith("01_tiny is from another version") and "`course reset 01`" in line


def test_a_damaged_copy_is_named(work):
    (work / "01_tiny.ipynb").write_text('{"cells": [')
    (line,) = lab.warnings(work)
    assert "01_tiny.ipynb is not a notebook" in line and "`course reset 01`" in line


# --- reset --------------------------------------------------------------------------


def test_reset_keeps_the_old_copy_under_its_date(root, work, capsys):
    fresh = (root / "lessons/01_tiny.ipynb").read_bytes()
    path = work / "01_tiny.ipynb"
    for text in ("mine", "{", "third"):
        path.write_text(text)
        reset()
        assert path.read_bytes() == fresh
    kept = {p.name: p.read_text() for p in work.glob("01_tiny.*.ipynb")}
    assert kept == {
        f"01_tiny.{TODAY}.ipynb": "mine",
        f"01_tiny.{TODAY}.2.ipynb": "{",
        f"01_tiny.{TODAY}.3.ipynb": "third",
    }
    assert f"yours is kept as 01_tiny.{TODAY}.3.ipynb" in capsys.readouterr().out
    assert lab.copy_missing(work) == []


def test_reset_of_a_missing_copy(root, capsys):
    reset("tiny", root / "new")
    assert [p.name for p in (root / "new").iterdir()] == ["01_tiny.ipynb"]
    assert "kept" not in capsys.readouterr().out


def test_a_reset_that_fails_leaves_the_old_copy(work, monkeypatch):
    path = work / "01_tiny.ipynb"
    path.write_text("mine")

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(notebook.tempfile, "mkstemp", full)
    with pytest.raises(notebook.CourseError, match="No space left"):
        reset()
    assert path.read_text() == "mine" and len(list(work.iterdir())) == 2


@pytest.mark.parametrize("words", [["reset", "01"], ["lab", "--no-browser"]])
def test_a_folder_that_takes_no_files(root, words):
    (root / "file").write_text("")
    result = course(root, *words, "--work", root / "file/work")
    assert result.returncode == 1 and result.stderr.count("\n") == 1
    assert "file/work: Not a directory; nothing was lost" in result.stderr


# --- JupyterLab ---------------------------------------------------------------------


@contextlib.contextmanager
def running(root, *words, **changes):
    "`course lab` in a process of its own; yields it, and the lines it printed before it became JupyterLab."
    process = subprocess.Popen(
        [sys.executable, "-m", "course_lib.authoring.cli", "lab", *map(str, words)],
        env=small_course.environment(root, **changes),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process, [process.stdout.readline() for _ in range(2)]
    finally:
        process.terminate()
        process.communicate(timeout=20)


def get(port, path, token, seconds=30):
    "JSON from the server, which may take a while to come up."
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", headers={"Authorization": f"token {token}"}
    )
    end = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(request, timeout=seconds) as answer:
                return json.load(answer)
        except urllib.error.HTTPError:
            raise
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def test_jupyterlab_comes_up_on_the_learners_copies(root):
    pytest.importorskip("jupyterlab")
    port, work = free_port(), root / "my work"
    work.mkdir()
    (work / ".progress.json").write_text('{"01.1": {"passed": "2026-11-29"}}')
    with running(root, "--work", work, "--port", port, NO_BROWSER="1") as (process, lines):
        address = lines[0].split()[-1]
        assert lines[0].startswith(
            f"JupyterLab on lesson 05: http://localhost:{port}/lab/tree/05_second.ipynb?token="
        )
        token = address.split("token=")[1]
        assert get(port, "/api/status", token)["kernels"] == 0
        names = {f["name"] for f in get(port, "/api/contents/", token)["content"]}
        assert names == {"01_tiny.ipynb", "05_second.ipynb"}
        news = get(port, "/lab/api/settings/@jupyterlab/apputils-extension:notification", token)
        assert news["schema"]["properties"]["fetchNews"]["default"] == "false"
        with urllib.request.urlopen(
            f"http://127.0.0.1:{port}/?token={token}"
        ) as page:  # what the browser opens
            assert page.url.split("?")[0] == f"http://127.0.0.1:{port}/lab/tree/05_second.ipynb"
        with pytest.raises(urllib.error.HTTPError, match="403"):
            get(port, "/api/contents/", "wrong")
        taken = course(root, "lab", "01", "--no-browser", "--work", work, "--port", port)
        assert taken.returncode == 1 and taken.stdout == "" and taken.stderr.count("\n") == 1
        assert f"port {port} can't be used" in taken.stderr and f"--port {port + 1}" in taken.stderr
        assert process.poll() is None


def test_a_kernel_that_is_another_python(root, tmp_path):
    pytest.importorskip("jupyterlab")
    spec = tmp_path / "jupyter/kernels/python3"
    spec.mkdir(parents=True)
    for argv, said in ((["/nowhere/bin/python"], "runs /nowhere/bin/python, not"), ([], "is missing")):
        (spec / "kernel.json").write_text(
            json.dumps({"argv": argv, "display_name": "P", "language": "python"})
        )
        result = course(
            root, "lab", "--no-browser", "--port", free_port(), JUPYTER_PATH=str(tmp_path / "jupyter")
        )
        assert result.returncode == 1 and result.stderr.count("\n") == 1
        assert said in result.stderr and "ipykernel install --sys-prefix" in result.stderr


def test_jupyterlab_that_is_not_installed(root, monkeypatch):
    monkeypatch.setattr(lab.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(notebook.CourseError, match=r"JupyterLab is not installed for .*pip install -e"):
        lab._require_jupyterlab()


def test_a_course_without_lessons(tmp_path):
    result = course(tmp_path, "lab", "--no-browser")
    assert result.returncode == 1 and "course build" in result.stderr

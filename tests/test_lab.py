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
def work(course_root):
    copy_missing()
    return notebook.WORK


def copy_missing(work=None):
    lab.copy_missing(work or notebook.WORK, notebook.lessons()["01"])


def reset(lesson="tiny"):
    lab.reset_cmd(argparse.Namespace(lesson=lesson, work=notebook.WORK))


def test_copies_what_is_missing_and_overwrites_nothing(course_root):
    work = course_root / "deep/work"
    work.mkdir(parents=True)
    for name in ("05_second.ipynb", "01_tiny.2026-01-01.ipynb", "notes.txt"):
        (work / name).write_text("mine")  # the lesson second had the number 05 once
    copy_missing(work)
    names = {"01_tiny.ipynb", "05_second.ipynb", "01_tiny.2026-01-01.ipynb", "notes.txt"}
    assert {p.name for p in work.iterdir()} == names
    assert (work / "01_tiny.ipynb").read_bytes() == (course_root / "lessons/01_tiny.ipynb").read_bytes()
    (work / "01_tiny.ipynb").write_text("mine")
    copy_missing(work)
    assert {p.read_text() for p in work.iterdir()} == {"mine"}
    assert lab.copy_of(notebook.lessons()["06"], work) == work / "05_second.ipynb"
    (work / "06_second.ipynb").write_text("newer")
    assert lab.copy_of(notebook.lessons()["06"], work) == work / "06_second.ipynb"


def test_a_draft_is_copied_only_where_it_is_asked_for(course_root):
    nb = small_course.worked("06", "second", "Second")
    del nb["metadata"]["recorded"]
    small_course.put(course_root, nb)
    copy_missing()
    assert not (notebook.WORK / "06_second.ipynb").exists()
    lab.copy_missing(notebook.WORK, notebook.lessons()["06"])
    assert (notebook.WORK / "06_second.ipynb").exists()


def test_a_copy_of_another_version_or_a_damaged_one_is_named(work):
    path = notebook.lessons()["01"]
    assert lab.warning(work, path) == ""
    nb = notebook.load(work / path.name)
    nb["metadata"]["course"]["version"] = "0"
    notebook.save(nb, work / path.name)
    said = lab.warning(work, path)
    assert said.startswith("this notebook is from another version") and "`course reset tiny`" in said
    (work / path.name).write_text('{"cells": [')
    said = lab.warning(work, path)
    assert "01_tiny.ipynb is not a notebook" in said and "`course reset tiny`" in said


def test_reset_keeps_the_old_copy_under_its_date(course_root, work, capsys):
    path = work / "01_tiny.ipynb"
    path.rename(work / "00_tiny.ipynb")
    (work / "00_tiny.ipynb").write_text("under an older number")
    reset()
    for text in ("mine", "{", "third"):
        path.write_text(text)
        reset("1")
        assert path.read_bytes() == (course_root / "lessons/01_tiny.ipynb").read_bytes()
    kept = {p.name: p.read_text() for p in work.glob("*_tiny.*.ipynb")}
    assert kept == {
        f"00_tiny.{TODAY}.ipynb": "under an older number",
        f"01_tiny.{TODAY}.ipynb": "mine",
        f"01_tiny.{TODAY}.2.ipynb": "{",
        f"01_tiny.{TODAY}.3.ipynb": "third",
    }
    assert f"yours is kept as 01_tiny.{TODAY}.3.ipynb" in capsys.readouterr().out
    path.unlink()
    reset()
    assert path.exists() and "kept" not in capsys.readouterr().out


def test_a_reset_that_fails_keeps_the_old_copy(work, monkeypatch, capsys):
    (work / "01_tiny.ipynb").write_text("mine")

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(notebook.files.os, "replace", full)
    with pytest.raises(notebook.CourseError, match="No space left"):
        reset()
    assert (work / f"01_tiny.{TODAY}.ipynb").read_text() == "mine" and len(list(work.iterdir())) == 2
    assert f"yours is kept as 01_tiny.{TODAY}.ipynb" in capsys.readouterr().out


def test_a_folder_that_takes_no_files(built, tmp_path):
    (tmp_path / "file").write_text("")
    for words in (["reset", "01"], ["lab", "--no-browser"]):
        done = course(built, *words, "--work", tmp_path / "file/work")
        assert done.returncode == 1 and done.stderr.count("\n") == 1
        assert "file/work: Not a directory; nothing was lost" in done.stderr


# --- JupyterLab ---------------------------------------------------------------------


@contextlib.contextmanager
def running(root, *words, **changes):
    "`course lab` in a process of its own; yields it, and the first line that it printed."
    process = subprocess.Popen(
        [sys.executable, "-m", "course_lib.authoring.cli", "lab", *map(str, words)],
        env=small_course.environment(root, **changes),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process, process.stdout.readline()
    finally:
        process.terminate()
        process.communicate(timeout=60)


def get(address, token, seconds=90):
    "An answer of the server, which may take a while to come up."
    request = urllib.request.Request(address, headers={"Authorization": f"token {token}"})
    end = time.monotonic() + seconds
    while True:
        try:
            return urllib.request.urlopen(request, timeout=seconds)
        except urllib.error.HTTPError:
            raise
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def test_jupyterlab_comes_up_on_the_learners_copies(built, tmp_path):
    pytest.importorskip("jupyterlab")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    work, server = tmp_path / "my work", f"http://127.0.0.1:{port}"
    work.mkdir()
    (work / ".progress.json").write_text('{"tiny.1": {"title": "Double"}}')
    with running(built, "--work", work, "--port", port, NO_BROWSER="1") as (process, line):
        page = "/lab/tree/06_second.ipynb"
        assert line.startswith(f"JupyterLab on lesson 06: http://localhost:{port}{page}?token=")
        token = line.strip().split("token=")[1]
        assert (
            get(f"{server}/?token={token}", token).url.split("?")[0] == server + page
        )  # as the browser does
        names = {f["name"] for f in json.load(get(f"{server}/api/contents/", token))["content"]}
        assert names == {"01_tiny.ipynb", "06_second.ipynb"}
        setting = "/lab/api/settings/@jupyterlab/apputils-extension:notification"
        news = json.load(get(server + setting, token))["schema"]["properties"]["fetchNews"]
        assert news["default"] == "false"
        with pytest.raises(urllib.error.HTTPError, match="403"):
            get(f"{server}/api/contents/", "wrong")
        taken = course(built, "lab", "01", "--no-browser", "--work", work, "--port", port)
        assert taken.returncode == 1 and taken.stdout == "" and taken.stderr.count("\n") == 1
        assert f"port {port} can't be used" in taken.stderr and process.poll() is None

"`course record`: what it stores, what it refuses, and that it never leaves a notebook half recorded."

import argparse
import copy
import json
import subprocess

import pytest
import small_course
from small_course import code, markdown

from course_lib.authoring import kernel, notebook, outputs, record, run

CELLS = [
    markdown("title", "It copies 1.00<!--05.copy_tbps--> TB/s at 2<!--given--> sizes."),
    code("start", "import os, sys, time\nprint(os.getcwd())\nopen('stray', 'w').close()"),
    code(
        "bar", "from tqdm import tqdm\nfor _ in tqdm(range(3)):\n    pass\nprint('a', flush=True)\nprint('b')"
    ),
    code(
        "widget", "import ipywidgets\n\ndef show(x=1):\n    print(x)\n\nipywidgets.interact(show, x=(0, 3));"
    ),
    code(
        "figure",
        "from course_lib import recorded\nrecorded.note('05.copy_tbps', 3.14159265, 'TB/s', ('>=', 3))",
    ),
    code("counts", "# NBVAL_CHECK_OUTPUT\nprint(7)"),
    code("table", "recorded.table('05')"),
    code("on-gpu", "recorded.note('05.gpu_only', 1, 's')\nprint('GPU')", ["gpu"]),
]


@pytest.fixture
def course(tmp_path, monkeypatch):
    "A course with one worked notebook, which needs no import of torch but that of the stamp."
    small_course.use(tmp_path, monkeypatch)
    monkeypatch.setenv("COURSE_ROOT", str(tmp_path))
    (tmp_path / "nbs").mkdir()
    nb = small_course.worked("05", "toy", "Toy")
    nb["cells"] = copy.deepcopy(CELLS)
    old = nb["metadata"]["recorded"]["figures"]
    old["05.gpu_only"] = dict(old["05.copy_tbps"], value=9.0)
    old["05.gone"] = dict(old["05.copy_tbps"])
    small_course.put(tmp_path, nb)
    return tmp_path


def path(course):
    return course / "nbs/05_toy.ipynb"


def args(*, force=False, commit="abc1234", dirty=False):
    return argparse.Namespace(lessons=["05"], force=force, commit=commit, dirty=dirty)


def cell(nb, name):
    return next(c for c in nb["cells"] if c["id"] == name)


def test_records_outputs_figures_and_stamp_and_does_so_alike(course, capfd, monkeypatch):
    monkeypatch.setattr(kernel, "has_cuda", lambda: False)
    assert record.record_cmd(args(force=True)) == 0
    out, err = capfd.readouterr()
    assert err == "" and "1 figures" in out and "left out without a CUDA device: on-gpu" in out
    nb = notebook.load(path(course))

    stamp = nb["metadata"]["recorded"]
    assert {k: stamp[k] for k in ("source", "commit", "clean")} == {
        "source": notebook.code_hash(nb),
        "commit": "abc1234",
        "clean": True,
    }
    assert stamp["gpu"] and stamp["host"] and stamp["torch"] and stamp["python"] and stamp["date"] > "2025"
    assert stamp["figures"]["05.copy_tbps"] == {
        "value": 3.14159,
        "unit": "TB/s",
        "bar": {"op": ">=", "value": 3.0},
        "machine": stamp["gpu"],
        "torch": stamp["torch"],
        "date": stamp["date"],
        "commit": "abc1234",
    }
    # Another machine's figure stays while the code notes it.
    assert stamp["figures"]["05.gpu_only"]["machine"] == "NVIDIA H200" and "05.gone" not in stamp["figures"]

    assert [c["execution_count"] for c in nb["cells"][1:]] == [1, 2, 3, 4, 5, 6, None]
    assert cell(nb, "start")["outputs"] == [{"name": "stdout", "output_type": "stream", "text": ["nbs\n"]}]
    assert cell(nb, "bar")["outputs"] == [{"name": "stdout", "output_type": "stream", "text": ["a\n", "b\n"]}]
    assert cell(nb, "table")["outputs"][0]["text"][1:] == ["05.copy_tbps      3.14  TB/s\n"]
    assert cell(nb, "widget")["outputs"] == [] and cell(nb, "on-gpu")["outputs"] == []
    assert notebook.source(nb["cells"][0]).startswith(
        "It copies 3.14<!--05.copy_tbps--> TB/s at 2<!--given-->"
    )
    assert outputs.problems(nb) == [] and "widgets" not in nb["metadata"]
    assert nb["metadata"]["language_info"] == {"name": "python"}
    assert not list(course.rglob("stray")) and [p.name for p in (course / "nbs").iterdir()] == [
        "05_toy.ipynb"
    ]

    before = path(course).read_bytes()
    assert record.record_cmd(args(force=True)) == 0
    assert path(course).read_bytes() == before

    # The same code: neither a GPU nor a commit is asked for; text follows the figures all the same.
    nb["cells"][0]["source"] = "9.99<!--05.copy_tbps--> TB/s"
    small_course.put(course, nb)
    assert record.record_cmd(args(commit=None)) == 0
    assert "has not changed" in capfd.readouterr().out
    again = notebook.load(path(course))
    assert notebook.source(again["cells"][0]) == "3.14<!--05.copy_tbps--> TB/s"
    assert again["metadata"] == nb["metadata"] and again["cells"][1:] == nb["cells"][1:]


def refused(course, capfd, **how):
    before = path(course).read_bytes()
    assert record.record_cmd(args(**how)) == 1
    out, err = capfd.readouterr()
    assert path(course).read_bytes() == before and out == "" and err.count("\n") == 1
    return err


def executed(monkeypatch, **result):
    "Stand in for the execution."
    about = json.dumps({"gpu": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0", "python": "3.12.1"})
    done = run.Execution(asked=about, **result)
    monkeypatch.setattr(record.run, "execute", lambda *a, **k: done)
    monkeypatch.setattr(kernel, "has_cuda", lambda: True)


def test_what_is_refused_leaves_the_notebook_alone(course, capfd, monkeypatch):
    monkeypatch.setattr(kernel, "has_cuda", lambda: False)
    assert "no CUDA device here" in refused(course, capfd)
    assert "`course record 05 --commit abc1234`" in refused(course, capfd, commit=None)
    assert "'main' is not a commit" in refused(course, capfd, commit="main")
    executed(monkeypatch, failed=(CELLS[5], "KeyError: 'x'"))
    assert "05_toy, cell `counts`: KeyError: 'x'; nothing was recorded" in refused(course, capfd)
    executed(monkeypatch, ran={"counts": kernel.Ran(count=1)})  # cells that did not run
    assert "was never executed; nothing was recorded" in refused(course, capfd)


def git(course, *words):
    name = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *name, "-C", str(course), *words], check=True, capture_output=True)


def test_the_commit_comes_from_git(course, capfd, monkeypatch):
    ran = {c["id"]: kernel.Ran(count=i) for i, c in enumerate(CELLS[1:], 1)}
    ran["counts"].outputs = [{"output_type": "stream", "name": "stdout", "text": "7\n"}]
    executed(monkeypatch, ran=ran)
    (course / "course_lib").mkdir()
    (course / "course_lib/a.py").write_text("1")
    git(course, "init", "-q")
    git(course, "add", ".")
    git(course, "commit", "-qm", "first")

    assert "--commit abc1234 is not what is checked out" in refused(course, capfd)

    def stamp(**how):
        assert record.record_cmd(args(commit=None, force=True, **how)) == 0, capfd.readouterr().err
        capfd.readouterr()
        return notebook.load(path(course))["metadata"]["recorded"]

    first = stamp()
    assert len(first["commit"]) == 40 and first["clean"] is True
    assert stamp()["clean"] is True  # recorded outputs and renewed text don't make the tree dirty
    (course / "course_lib/a.py").write_text("2")
    assert "course_lib/a.py differs from the last commit" in refused(course, capfd, commit=None, force=True)
    assert stamp(dirty=True)["clean"] is False
    git(course, "checkout", "course_lib")
    nb = notebook.load(path(course))
    cell(nb, "start")["source"] = "2"
    small_course.put(course, nb)
    assert "nbs/05_toy.ipynb differs from the last commit" in refused(course, capfd, commit=None)

"`course run` on the toy course, and the plugin that `make test` gives to nbval."

import argparse
import json
import os
import re
import subprocess
import sys

import pytest
import small_course
from small_course import code

from course_lib.authoring import kernel, run
from course_lib.authoring.notebook import CourseError


def args(*lessons, everything=False):
    return argparse.Namespace(lessons=list(lessons), all=everything)


def put(toy, *cells):
    "The toy's worked notebook with these cells alone; cell outputs as recorded are theirs."
    nb = small_course.worked("05", "toy", "Toy")
    nb["cells"] = list(cells)
    small_course.put(toy.root, nb)


def recorded_as(cell, text, count=1):
    out = [{"output_type": "stream", "name": "stdout", "text": text}] if text else []
    return {**cell, "outputs": out, "execution_count": count}


def tree(root):
    return {p: p.stat().st_mtime_ns for p in root.rglob("*") if p.is_file()}


NOTE = "from course_lib import recorded\nrecorded.note('05.copy_tbps', 0.0125, 'TB/s');"


def test_runs_compares_and_leaves_nothing(toy, capfd):
    marked = code("counts", "# NBVAL_CHECK_OUTPUT\nprint(7)\n[1,\n 2]")
    marked["outputs"] = [
        {"output_type": "stream", "name": "stdout", "text": ["7\n"]},
        {"output_type": "execute_result", "data": {"text/plain": ["[1, 2]"]}, "metadata": {}},
    ]
    put(
        toy,
        recorded_as(code("first", "import sys\nopen('stray', 'w').close()\nprint(1)"), ["other\n"]),
        marked,
        recorded_as(code("warns", "# NBVAL_CHECK_OUTPUT\nprint('a', file=sys.stderr)"), []),
        recorded_as(code("new", "# NBVAL_CHECK_OUTPUT\nprint(3)"), [], count=None),
        code("figure", NOTE),
        code("on-gpu", "1 / 0", ["gpu"]),
    )
    before = tree(toy.root)

    assert run.run_cmd(args("toy")) == 0

    out, err = capfd.readouterr()
    assert err == "" and tree(toy.root) == before
    assert "05_toy  2/6  counts" in out and "left out without a CUDA device: on-gpu" in out
    assert re.search(r"05\.copy_tbps +0\.0125 +4\.27 +TB/s", out)
    assert "recorded on NVIDIA H200" in out


def test_a_cell_that_fails_or_differs_is_named(toy, capfd):
    exercise = {"id": "05.1", "title": "Double", "minutes": 5, "difficulty": 1}
    put(
        toy,
        recorded_as(code("counts", "# NBVAL_CHECK_OUTPUT\nprint(7)\nprint(9)"), ["7\n", "8\n"]),
        recorded_as(code("longer", "# NBVAL_CHECK_OUTPUT\nprint(7)\nprint(9)"), ["7\n"]),
        code("ex1-check", "# NBVAL_CHECK_OUTPUT\n{}['key']\n", ["check"], exercise=exercise),
        code("after", "print('never')"),
    )
    assert run.run_cmd(args(everything=True)) == 1
    out, err = capfd.readouterr()
    assert err.splitlines() == [
        "05_toy, cell `counts`: the output differs: recorded '8', now '9'",
        "05_toy, cell `longer`: the output differs: recorded 1 lines of output, now 2",
        "05_toy, cell `ex1-check` (exercise 05.1): KeyError: 'key'",
    ]
    assert "after" not in out


def test_unknown_lessons(toy):
    with pytest.raises(CourseError, match=r"no worked lesson 'nine'; there are: 05 toy"):
        run.run_cmd(args("nine"))
    (toy.root / "nbs/05_toy.ipynb").unlink()
    with pytest.raises(CourseError, match="no worked lessons"):
        run.run_cmd(args(everything=True))
    assert run.worked([], everything=True) == {}


def test_streams_are_merged_as_a_terminal_shows_them():
    def stream(text, name="stdout"):
        return {"output_type": "stream", "name": name, "text": text}

    shown = {"output_type": "display_data"}
    merged = kernel._merge_streams(
        [stream("a\r"), stream("w", "stderr"), shown, stream("b\nc\rd\r\n"), stream("e\r")]
    )
    assert merged == [stream("b\nd\ne"), stream("w", "stderr"), shown]


def nbval(folder, *options):
    "Run pytest as `make test` does on the notebooks of a folder."
    command = [sys.executable, "-m", "pytest", "-p", "course_lib.authoring.plugin", "--nbval-lax", *options]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "MPLBACKEND": "agg"}
    done = subprocess.run(
        [*command, "-q", "-p", "no:cacheprovider", str(folder)],
        cwd=folder, env=env, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    return done.stdout


@pytest.mark.notebooks
def test_nbval_with_the_plugin(tmp_path):
    nb = small_course.worked("05", "toy", "Toy")
    backend = "# NBVAL_CHECK_OUTPUT\nimport os\nprint(os.environ['MPLBACKEND'])"
    warns = "# NBVAL_CHECK_OUTPUT\nimport sys, time\nprint(time.time(), file=sys.stderr)"
    nb["cells"] = [
        recorded_as(code("backend", backend), ["module://matplotlib_inline.backend_inline\n"]),
        recorded_as(code("warns", warns), []),
        recorded_as(code("differs", "# NBVAL_CHECK_OUTPUT\nprint(2)"), ["1\n"]),
        code("on-gpu", "1 / 0", ["gpu"]),
        code("long-demo", "1 / 0", ["slow"]),
    ]
    nb["metadata"]["kernelspec"]["name"] = "a kernel that is nowhere"
    (tmp_path / "05_toy.ipynb").write_text(json.dumps(nb))

    out = nbval(tmp_path, "--without-slow")

    assert "1 failed, 2 passed, 2 skipped" in out and "Cell 2" in out
    assert "05_toy.ipynb  on-gpu: no CUDA device" in out
    assert "05_toy.ipynb  long-demo: --without-slow" in out

"`course run`, its kernels, and the plugin that `make test` gives to nbval."

import argparse
import os
import re
import subprocess
import sys

import pytest
import small_course
from small_course import code

from course_lib import ram
from course_lib.authoring import kernel, notebook, run


def args(*lessons, everything=False):
    return argparse.Namespace(lessons=list(lessons), all=everything)


def put(toy, *cells):
    "The toy's worked notebook with these cells alone."
    nb = small_course.worked("06", "toy", "Toy")
    nb["cells"] = list(cells)
    small_course.put(toy.root, nb)


def recorded_as(cell, text, count=1):
    out = [{"output_type": "stream", "name": "stdout", "text": text}] if text else []
    return {**cell, "outputs": out, "execution_count": count}


def tree(root):
    return {p: p.stat().st_mtime_ns for p in root.rglob("*") if p.is_file()}


def test_runs_compares_and_leaves_nothing(toy, capfd):
    marked = code("counts", "# NBVAL_CHECK_OUTPUT\nprint(7)\n[1,\n 2]")
    marked["outputs"] = [
        {"output_type": "stream", "name": "stdout", "text": ["7\n"]},
        {"output_type": "execute_result", "data": {"text/plain": ["[1, 2]"]}, "metadata": {}},
    ]
    note = "from course_lib import recorded\nrecorded.note('toy.copy_tbps', 0.0125, 'TB/s');"
    put(
        toy,
        recorded_as(code("first", "import sys\nopen('stray', 'w').close()\nprint(1)"), ["other\n"]),
        marked,
        recorded_as(code("warns", "# NBVAL_CHECK_OUTPUT\nprint('a', file=sys.stderr)"), []),
        recorded_as(code("new", "# NBVAL_CHECK_OUTPUT\nprint(3)"), [], count=None),
        code("figure", note),
    )
    before = tree(toy.root)
    assert run.run_cmd(args("toy")) == 0
    out, err = capfd.readouterr()
    assert err == "" and tree(toy.root) == before and "06_toy  2/5  counts" in out
    assert re.search(r"toy\.copy_tbps +0\.0125 +4\.27 +TB/s", out) and "recorded on NVIDIA H200" in out


def test_a_cell_that_fails_or_differs_is_named(toy, capfd):
    put(
        toy,
        recorded_as(code("counts", "# NBVAL_CHECK_OUTPUT\nprint(7)\nprint(9)"), ["7\n", "8\n"]),
        recorded_as(code("longer", "# NBVAL_CHECK_OUTPUT\nprint(7)\nprint(9)"), ["7\n"]),
        code("ex1-check", "# NBVAL_CHECK_OUTPUT\n{}['key']\n", ["check"]),
        code("after", "print('never')"),
    )
    assert run.run_cmd(args(everything=True)) == 1
    out, err = capfd.readouterr()
    assert err.splitlines() == [
        "06_toy, cell `counts`: the output differs: recorded '8', now '9'",
        "06_toy, cell `longer`: the output differs: recorded 1 lines of output, now 2",
        "06_toy, cell `ex1-check`: KeyError: 'key'",
    ]
    assert "after" not in out
    (toy.root / "nbs/06_toy.ipynb").unlink()
    with pytest.raises(notebook.CourseError, match="no lessons in nbs/"):
        run.run_cmd(args(everything=True))


def test_streams_are_merged_as_a_terminal_shows_them():
    def stream(text, name="stdout"):
        return {"output_type": "stream", "name": name, "text": text}

    shown = {"output_type": "display_data"}
    merged = kernel._merged(
        [stream("a\r"), stream("w", "stderr"), shown, stream("b\nc\rd\r\n"), stream("e\r")]
    )
    assert merged == [stream("b\nd\ne"), stream("w", "stderr"), shown]


EXPLORER = """
from course_lib import show
import matplotlib.pyplot as plt

def view(data):
    fig, ax = plt.subplots()
    ax.plot(data)
    return fig
"""
SHOWN = "show.Explorer(lambda a=1.0, b=2.0: [a, b], view, a=(0.0, 2.0, 0.1), b=(0.0, 3.0, 0.1)).interact()"


def test_a_widget_never_stalls_a_session(tmp_path):
    # nbclient answers a widget on the socket on which it waits for the cell's end, and used to miss that end.
    cells = [{"cell_type": "code", "metadata": {}, "source": s} for s in [EXPLORER, *[SHOWN] * 6]]
    with kernel.Session(cells, tmp_path, timeout=60) as session:
        assert [session.execute(i).error for i in range(len(cells))] == [""] * len(cells)


@pytest.mark.parametrize(
    ("proc", "group", "files"),
    [
        ("0::/a/b\n", "a", ("memory.max", "memory.current", "inactive_file")),
        ("3:cpu:/\n9:memory,hugetlb:/a/b\n0::/\n", "memory/a",
         ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")),
    ],
)  # fmt: skip
def test_the_memory_limit_of_a_nested_group(tmp_path, proc, group, files):
    limit, used, cache = files
    (tmp_path / "cgroup").write_text(proc)
    for folder, most in ((tmp_path / group / "b", "max\n"), (tmp_path / group, f"{2**31}\n")):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in ((limit, most), (used, "1000\n"), ("memory.stat", f"anon 7\n{cache} 300\n")):
            (folder / name).write_text(text)
    assert ram.limits(tmp_path / "cgroup", tmp_path) == [(2**31, 700)]
    assert ram.limits(tmp_path / "nothing", tmp_path) == []
    assert 0 < ram.available() <= ram.total()


@pytest.mark.notebooks
def test_nbval_with_the_plugin(tmp_path):
    nb = small_course.worked("06", "toy", "Toy")
    backend = "# NBVAL_CHECK_OUTPUT\nimport os\nprint(os.environ['MPLBACKEND'])"
    warns = "# NBVAL_CHECK_OUTPUT\nimport sys, time\nprint(time.time(), file=sys.stderr)"
    nb["cells"] = [
        code("start", "from course_lib import machine\nmachine.start('toy')"),
        recorded_as(code("backend", backend), ["module://matplotlib_inline.backend_inline\n"]),
        recorded_as(code("warns", warns), []),
        recorded_as(code("differs", "# NBVAL_CHECK_OUTPUT\nprint(2)"), ["1\n"]),
        code("on-gpu", "%%gpu the time of a copy\n1 / 0"),
        code("two-lines", "%%gpu the time of a copy\n1 / 0"),
    ]
    nb["cells"].insert(5, code("broken", "print = lambda *words: None"))
    nb["metadata"]["kernelspec"]["name"] = "a kernel that is nowhere"
    notebook.save(nb, tmp_path / "06_toy.ipynb")
    command = [sys.executable, "-m", "pytest", "-p", "course_lib.authoring.plugin", "--nbval-lax", "-q"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", str(tmp_path)], capture_output=True, text=True, timeout=120,
        cwd=tmp_path, env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "MPLBACKEND": "agg"},
    )  # fmt: skip
    assert "2 failed, 5 passed" in done.stdout and "Cell 3" in done.stdout
    assert "must print one line, and it printed ''" in done.stdout

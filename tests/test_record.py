"`course record`: what it stores and refuses; nothing is left half recorded."

import argparse
import copy
import os
import subprocess
import sys
import threading

import pytest
import small_course
import torch
from small_course import code, markdown

from course_lib.authoring import kernel, notebook, outputs, record, stamps

START = """\
import os
from course_lib import machine, recorded
machine.start("toy")
open("stray", "w").close()
print(os.getcwd())
"""
BAR = "from tqdm import tqdm\nfor _ in tqdm(range(3)):\n    pass\nprint('a', flush=True)\nprint('b')"
WIDGET = "import ipywidgets\n\ndef show(x=1):\n    print(x)\n\nipywidgets.interact(show, x=(0, 3));"
CELLS = [
    markdown("title", "It copies 1.00<!--toy.copy_tbps--> TB/s at 2<!--given--> sizes."),
    code("start", START),
    code("bar", BAR),
    code("widget", WIDGET),
    code("figure", "recorded.note('toy.copy_tbps', 3.14159265, 'TB/s', ('>=', 3))"),
    code("counts", "# NBVAL_CHECK_OUTPUT\nprint(7)"),
    code("table", "recorded.table('toy')"),
    code("on-gpu", "%%gpu one figure\nrecorded.note('toy.gpu_only', 1, 's')"),
]
ABOUT = {"gpu": "NVIDIA H200", "host": "64 cores", "torch": "2.11.0", "triton": "3.6.0", "python": "3.12.1"}


@pytest.fixture
def course(tmp_path, monkeypatch):
    "A course with one worked notebook."
    small_course.use(tmp_path, monkeypatch)
    monkeypatch.setenv("COURSE_ROOT", str(tmp_path))
    (tmp_path / "nbs").mkdir()
    nb = small_course.worked(slug="toy")
    nb["cells"] = copy.deepcopy(CELLS)
    old = nb["metadata"]["recorded"]["figures"]
    old["toy.gpu_only"] = dict(old["toy.copy_tbps"], value=9.0)
    old["toy.gone"] = dict(old["toy.copy_tbps"])
    small_course.put(tmp_path, nb)
    return tmp_path


def path(course):
    return course / "nbs/06_toy.ipynb"


def args(*lessons, commit="abc1234", **changes):
    asked = {"cpu": False, "check": False, "parallel": False, "out": None, "dirty": False}
    return argparse.Namespace(lessons=lessons, commit=commit, **asked | changes)


def cell(nb, name):
    return next(c for c in nb["cells"] if c["id"] == name)


def test_records_outputs_figures_and_stamps_and_does_so_alike(course, capfd, monkeypatch):
    about = record._about()
    assert about["gpu"] and about.keys() == ABOUT.keys()
    monkeypatch.setattr(record, "_about", lambda: about)
    monkeypatch.setattr(record.machine, "has_gpu", lambda: True)
    assert record.record_cmd(args("toy")) == 0
    out, err = capfd.readouterr()
    assert err == "" and "7 cells and 1 figures recorded" in out
    nb = notebook.load(path(course))

    stamp = nb["metadata"]["recorded"]
    assert stamp["cells"] == stamps.hashes(nb) and len(stamp["cells"]) == 7
    assert (stamp["commit"], stamp["clean"]) == ("abc1234", True) and "source" not in stamp
    assert stamp["gpu"] and stamp["host"] and stamp["torch"] and stamp["python"] and stamp["date"] > "2025"
    assert stamp["figures"]["toy.copy_tbps"] == {
        "value": 3.14159,
        "unit": "TB/s",
        "bar": {"op": ">=", "value": 3.0},
        "machine": stamp["gpu"],
        "torch": stamp["torch"],
        "date": stamp["date"],
        "commit": "abc1234",
    }
    # Another machine's figure stays while the code notes it.
    assert stamp["figures"]["toy.gpu_only"]["machine"] == "NVIDIA H200" and "toy.gone" not in stamp["figures"]

    assert [c["execution_count"] for c in nb["cells"][1:]] == [1, 2, 3, 4, 5, 6, 7]
    assert cell(nb, "start")["outputs"][0]["text"][-1] == "nbs\n"
    assert cell(nb, "bar")["outputs"] == [{"name": "stdout", "output_type": "stream", "text": ["a\n", "b\n"]}]
    assert cell(nb, "table")["outputs"][0]["text"][1:] == ["toy.copy_tbps      3.14  TB/s\n"]
    assert cell(nb, "widget")["outputs"] == []
    assert notebook.source(nb["cells"][0]).startswith(
        "It copies 3.14<!--toy.copy_tbps--> TB/s at 2<!--given-->"
    )
    assert outputs.problems(nb) == [] and "widgets" not in nb["metadata"]
    assert nb["metadata"]["language_info"] == {"name": "python"}
    assert not list(course.rglob("stray")) and [p.name for p in (course / "nbs").iterdir()] == [
        "06_toy.ipynb"
    ]

    before = path(course).read_bytes()
    assert record.record_cmd(args("toy", out=course / "new/out")) == 0
    assert path(course).read_bytes() == before == (course / "new/out/06_toy.ipynb").read_bytes()


def executed(monkeypatch, failure="", names=None):
    "Stand in for the execution of the cells `names`; returns what it was asked for."
    names, asked = [c["id"] for c in CELLS[1:]] if names is None else names, {}
    new = [{"output_type": "stream", "name": "stdout", "text": "new\n"}]

    def execute(nb, name, env=None):
        asked.update(env)
        if failure:
            raise notebook.CourseError(failure)
        return {n: kernel.Ran(new, i) for i, n in enumerate(names, 1)}, {}

    monkeypatch.setattr(record, "execute", execute)
    monkeypatch.setattr(record, "_about", lambda: ABOUT)
    return asked


def test_without_a_gpu_marked_cells_are_renewed_and_nothing_else(course, capfd, monkeypatch):
    asked = executed(monkeypatch)
    nb = notebook.load(path(course))
    nb["cells"][6]["source"] += "  # changed\nprint()"
    nb["metadata"]["recorded"]["cells"] = {"counts": "0", "table": "1", "gone": "2"}
    small_course.put(course, nb)
    assert record.record_cmd(args(cpu=True, commit=None)) == 0  # no commit is asked for, and no lesson
    assert asked["CUDA_VISIBLE_DEVICES"] == "" and "1 cells and 0 figures" in capfd.readouterr().out
    new = notebook.load(path(course))
    assert [c["id"] for c in new["cells"][1:] if c["outputs"][0]["text"] == ["new\n"]] == ["counts"]
    assert [c["execution_count"] for c in new["cells"][1:]] == [1, 2, 3, 4, 5, 6, 7]
    cells = new["metadata"]["recorded"].pop("cells")
    assert cells == {"counts": stamps.hashes(nb)["counts"], "table": "1"}
    del nb["metadata"]["recorded"]["cells"]
    assert new["metadata"]["recorded"] == nb["metadata"]["recorded"]


def test_a_draft_stays_one_without_a_gpu(course, monkeypatch):
    executed(monkeypatch)
    nb = notebook.load(path(course))
    nb["metadata"]["recorded"] = None
    small_course.put(course, nb)
    assert record.record_cmd(args("toy", cpu=True)) == 0
    nb = notebook.load(path(course))
    assert notebook.is_draft(nb) and list(nb["metadata"]["recorded"]["cells"]) == ["counts"]
    assert outputs.problems(nb) == []


def test_check_lists_what_is_behind(course, capfd, monkeypatch):
    monkeypatch.setattr(record.machine, "has_gpu", lambda: True)
    executed(monkeypatch)
    assert record.record_cmd(args("toy")) == 0
    capfd.readouterr()
    assert record.record_cmd(args(check=True)) == 0 and capfd.readouterr().out == "06_toy: up to date\n"
    nb = notebook.load(path(course))
    figure = nb["metadata"]["recorded"]["figures"].pop("toy.copy_tbps")
    small_course.put(course, nb)
    assert record.record_cmd(args(check=True)) == 1
    assert capfd.readouterr().err == "06_toy: figures not recorded: toy.copy_tbps\n"
    nb["metadata"]["recorded"]["figures"]["toy.copy_tbps"] = figure
    cell(nb, "table")["source"] = "recorded.table('other')"
    small_course.put(course, nb)
    assert record.record_cmd(args("toy", check=True)) == 1
    assert capfd.readouterr().err == "06_toy: cells changed since they were recorded: table\n"
    del nb["metadata"]["recorded"]
    nb["cells"][6]["outputs"] = []
    small_course.put(course, nb)
    assert record.record_cmd(args(check=True)) == 0 and "a draft" in capfd.readouterr().out


def refused(course, capfd, *lessons, **how):
    before = path(course).read_bytes()
    try:
        assert record.record_cmd(args(*lessons or ["toy"], **how)) == 1
    except notebook.CourseError as e:
        print(e, file=sys.stderr)
    out, err = capfd.readouterr()
    assert path(course).read_bytes() == before and out == "" and err.count("\n") == 1
    return err


def test_what_is_refused_leaves_the_notebook_alone(course, capfd, monkeypatch):
    monkeypatch.setattr(record.machine, "has_gpu", lambda: False)
    assert "no CUDA device here; --cpu needs none" in refused(course, capfd)
    nb = notebook.load(path(course))
    del nb["cells"][1]["id"]
    notebook.save(nb, course / "nbs/07_other.ipynb")
    for how in ({"cpu": True}, {"check": True}):
        assert record.record_cmd(args("other", **how)) == 1
        assert "slug is 'toy'; the file's name must agree" in capfd.readouterr().err
    with pytest.raises(notebook.CourseError, match="name the lessons to record"):
        record.record_cmd(args())
    monkeypatch.setattr(record.machine, "has_gpu", lambda: True)
    assert "as in --commit abc1234" in refused(course, capfd, commit=None)
    assert "'main' is not a commit" in refused(course, capfd, commit="main")
    executed(monkeypatch, failure="06_toy, cell `counts`: KeyError: 'x'")
    assert "06_toy, cell `counts`: KeyError: 'x'" in refused(course, capfd)
    executed(monkeypatch, names=["counts"])  # cells that did not run
    assert "execution counts are" in refused(course, capfd)


def git(course, *words):
    name = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *name, "-C", str(course), *words], check=True, capture_output=True)


def test_the_commit_comes_from_git(course, capfd, monkeypatch):
    executed(monkeypatch)
    monkeypatch.setattr(record.machine, "has_gpu", lambda: True)
    (course / "course_lib").mkdir()
    (course / "course_lib/a.py").write_text("1")
    git(course, "init", "-q")
    git(course, "add", ".")
    git(course, "commit", "-qm", "first")

    def stamp(**how):
        assert record.record_cmd(args("toy", commit=None, **how)) == 0, capfd.readouterr().err
        capfd.readouterr()
        return notebook.load(path(course))["metadata"]["recorded"]

    first = stamp()
    assert len(first["commit"]) == 40 and first["clean"] is True
    assert stamp()["clean"] is True  # what was recorded doesn't make the tree dirty
    (course / "course_lib/a.py").write_text("2")
    assert "course_lib/a.py differs from the last commit" in refused(course, capfd, commit=None)
    assert stamp(dirty=True)["clean"] is False


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="GPU hosts are Linux")
def test_side_by_side_each_lesson_has_a_gpu_and_cores_of_its_own(course, monkeypatch):
    monkeypatch.setattr(record.machine, "has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3, 5})
    cores, started, two = {}, [], threading.Barrier(2, timeout=30)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, share: cores.update({pid: share}))

    class Process:
        def __init__(self, words, env):
            self.pid, self.name = len(started), words[4]
            started.append((self.name, env["CUDA_VISIBLE_DEVICES"], words[5:]))

        def wait(self):
            if self.name in ("01_a", "02_b"):
                two.wait()  # at the same time
            return int(self.name == "02_b")

    monkeypatch.setattr(record.subprocess, "Popen", Process)
    for name in ("01_a", "02_b", "03_c", "04_d"):
        nb = small_course.worked(slug=name[3:])
        nb["metadata"]["course"] |= {"gpus": "all"} if name == "03_c" else {}
        small_course.put(course, nb, f"{name}.ipynb")
    path(course).unlink()
    assert record.record_cmd(args("a", "b", "c", "d", parallel=True, out=course / "out")) == 1
    assert sorted(name for name, *_ in started[:2]) == ["01_a", "02_b"]
    assert sorted(gpu for _, gpu, _ in started[:2]) == ["4", "6"]
    assert sorted(cores[i] for i in (0, 1)) == [[0, 1], [2, 3, 5]]
    assert started[2][0] == "04_d" and len(started) == 4  # one that failed leaves the others
    assert started[3] == ("03_c", "4,6", ["--commit=abc1234", f"--out={course / 'out'}"])
    assert cores[3] == [0, 1, 2, 3, 5]


EXPLORER = """
from course_lib import show
import matplotlib.pyplot as plt

def view(data):
    fig, ax = plt.subplots()
    ax.plot(data)
    return fig
"""
SHOWN = "show.Explorer(lambda a=1.0, b=2.0: [a, b], view, a=(0.0, 2.0, 0.1), b=(0.0, 3.0, 0.1)).interact()"


def test_a_session_keeps_what_a_notebook_shows(tmp_path):
    display = "from IPython.display import clear_output, display\n"
    with kernel.Session(tmp_path, timeout=60) as session:
        for source in [EXPLORER, *[SHOWN] * 4]:
            ran = session.execute(source)
            assert ran.error == "" and len(ran.outputs) == (source == SHOWN)  # the widget has what it drew
        ran = session.execute(display + "print(1)\nclear_output()\nd = display(2, display_id=True)\n"
                              "d.update(3)\nd.update(4);\n5")  # fmt: skip
        assert [o["data"]["text/plain"] for o in ran.outputs] == ["4", "5"] and ran.count == 6
        ran = session.execute(
            "import sys\nfor f in [sys.stdout, sys.stderr] * 2:\n    print(1, file=f, flush=True)"
        )
        texts = [(o["name"], "".join(o["text"])) for o in ran.outputs]
        assert texts == [("stdout", "1\n1\n"), ("stderr", "1\n1\n")]


def stored(cell, text):
    "A cell with this stored output."
    out = [{"output_type": "stream", "name": "stdout", "text": text}] if text else []
    return {**cell, "outputs": out}


@pytest.mark.notebooks
def test_nbval_with_the_plugin(tmp_path):
    nb = small_course.worked("06", "toy", "Toy")
    backend = "# NBVAL_CHECK_OUTPUT\nimport os\nprint(os.environ['MPLBACKEND'])"
    warns = "# NBVAL_CHECK_OUTPUT\nimport sys, time\nprint(time.time(), file=sys.stderr)"
    nb["cells"] = [
        code("start", "from course_lib import machine\nmachine.start('toy')"),
        stored(code("backend", backend), ["module://matplotlib_inline.backend_inline\n"]),
        stored(code("warns", warns), []),
        stored(code("differs", "# NBVAL_CHECK_OUTPUT\nprint(2)"), ["1\n"]),
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

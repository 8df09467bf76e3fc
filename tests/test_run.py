"`course run`: what it executes, prints and reports to CI, and what it refuses."

import re
import shutil
import signal
import subprocess
import sys
import time
from xml.etree import ElementTree

import pytest
import small_course
from small_course import code

from course_lib.authoring import cli, notebook, run

COLOURED = "raise ValueError('\\x1b[31mred\\x1b[0m <&> \\x01')"


@pytest.fixture
def course(course_root, monkeypatch):
    "Two lessons: the first one runs, a cell of the second raises."
    monkeypatch.setenv("COURSE_ROOT", str(course_root))
    nb = small_course.worked()
    start = "from course_lib import machine, recorded\nmachine.start('tiny')\nopen('stray', 'w').close()"
    note = code("note", "recorded.note('tiny.copy_tbps', 3.14159, 'TB/s')")
    nb["cells"] = [code("start", start), note, code("gpu", "%%gpu a sum\n1 + 1")]
    small_course.put(course_root, nb)
    nb = small_course.worked("06", "second", "Second")
    nb["cells"] = [code("ok", "1"), code("empty", ""), code("fails", COLOURED), code("after", "print('no')")]
    nb["metadata"]["course"] |= {"needs": "two GPUs; a third adds nothing", "gpus": "all"}
    small_course.put(course_root, nb)
    return course_root


def test_two_lessons_at_a_time_and_a_report(course, capfd):
    before = {p: p.read_bytes() for p in course.rglob("*") if p.is_file()}
    report = course / "runs/new/out.xml"
    assert cli.main(["run", "--all", "--jobs", "2", "--junit", str(report)]) == 1
    out, err = capfd.readouterr()
    assert err.count("\n") == 1 and err.startswith("06_second, cell `fails`: ValueError: ")
    assert "01_tiny  3/3  gpu" in out and "recorded on NVIDIA H200" in out and "\nno" not in out
    assert re.search(r"tiny\.copy_tbps +3\.14 +4\.27 +TB/s", out)
    assert re.search(r"01_tiny +passed +\d+ s\n06_second +failed +\d+ s\n2 lessons in \d+ s\n$", out)
    text = report.read_text(encoding="utf-8")
    report.unlink()
    assert {p: p.read_bytes() for p in course.rglob("*") if p.is_file()} == before

    root = ElementTree.fromstring(text)
    counts = [[part.get(k) for k in ("name", "tests", "failures", "skipped")] for part in (root, *root)]
    assert counts == [["course run", "6", "1", "1"], ["01_tiny", "3", "0", "0"], ["06_second", "3", "1", "1"]]
    cases = {(c.get("classname"), c.get("name")): [part.tag for part in c] for c in root.iter("testcase")}
    assert cases == {
        **{("01_tiny", name): [] for name in ("start", "note", "gpu")},
        **{("06_second", n): t for n, t in (("ok", []), ("fails", ["failure"]), ("after", ["skipped"]))},
    }
    said = root.find(".//failure").get("message")
    assert said.startswith("06_second, cell `fails`: ValueError: ") and "red" in said and "<&>" in said
    assert all(float(c.get("time")) >= 0 for c in root.iter("testcase")) and float(root[0].get("time")) > 0


def test_a_damaged_lesson_is_a_failed_test_and_the_others_go_on(course, capfd):
    (course / "nbs/06_second.ipynb").write_text("{")
    report = course / "out.xml"
    assert cli.main(["run", "--all", "--junit", str(report), "--timeout", "60"]) == 1
    out, err = capfd.readouterr()
    assert "take it from git again" in err and err.count("\n") == 1 and "01_tiny              passed" in out
    [failure] = ElementTree.parse(report).findall(".//testcase[@name='start']/failure")
    assert failure.get("message") == err.strip()


def test_needs():
    nb = small_course.worked()
    wants = nb["metadata"]["course"]
    assert [run.needs(nb, kind) for kind in ("cpu", "gpu", "gpus")] == [True, True, False]
    nb["cells"], wants["gpus"] = nb["cells"][:-1], "all"
    assert [run.needs(nb, kind) for kind in ("cpu", "gpu", "gpus")] == [True, False, True]
    for phrase, cpu in {
        "any machine; a GPU adds the races": True,
        "Linux with Triton, with or without a GPU; a GPU adds the times": True,
        "a GPU of 80 GB": False,
        "two GPUs; four are better": False,
    }.items():
        wants["needs"] = phrase
        assert run.needs(nb, "cpu") == cpu, phrase
    for path in notebook.lessons(notebook.NBS).values():  # no lesson of the course refuses a laptop
        assert run.needs(notebook.load(path), "cpu"), path


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "name a lesson, or use --all"),
        (["nine"], "there is no lesson 'nine'; the lessons are: 01 tiny, 06 second"),
        (["tiny", "--jobs", "0"], "--jobs 0 executes no lesson: expected 1 or more"),
        (["tiny", "--needs", "gpus"], "--needs gpus leaves no lesson to execute"),
        (["tiny", "--junit", "FILE/out.xml"], "can't be written (Not a directory); nothing was lost"),
        (["tiny", "--junit", "."], "can't be written"),
    ],
)
def test_what_makes_no_sense_is_one_sentence_before_anything_runs(
    course, capfd, monkeypatch, words, sentence
):
    monkeypatch.setattr(run, "_lesson", None)
    (course / "FILE").write_text("")
    monkeypatch.chdir(course)
    assert cli.main(["run", *words]) == 1
    out, err = capfd.readouterr()
    assert out == "" and sentence in err and err.count("\n") == 1


@pytest.mark.skipif(not shutil.which("pgrep"), reason="looks for processes with pgrep")
def test_ctrl_c_leaves_no_kernel(course):
    nb = small_course.worked()
    nb["cells"] = [code("hangs", "import time\ntime.sleep(600)")]
    small_course.put(course, nb)
    words = [sys.executable, "-m", "course_lib.authoring.cli", "run", "--all", "--jobs", "2"]
    was = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job is started without
    process = subprocess.Popen(
        words, env=small_course.environment(course), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    signal.signal(signal.SIGINT, was)
    mine = ["pgrep", "-f", "-P", str(process.pid), "ipykernel"]
    end = time.monotonic() + 60
    while not (kernels := subprocess.run(mine, capture_output=True, text=True).stdout.split()):
        assert time.monotonic() < end
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)  # the second lesson's kernel may still start
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "SIGKILL" not in err
    alive = subprocess.run(["ps", "-o", "stat=", "-p", ",".join(kernels)], capture_output=True, text=True)
    assert alive.stdout.replace("Z", "").strip() == ""

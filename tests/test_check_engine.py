"The engine of `course check`: what passes, what can't, and that a bad cell leaves other verdicts alone."

import argparse
import copy
import json
import re
import subprocess
import sys

import psutil
import pytest
import small_course
import toy_course
from small_course import code

from course_lib.authoring import check, kernel, watch
from course_lib.authoring.notebook import CourseError


@pytest.fixture
def run(toy, capfd):
    "Run `course check 05`; returns (exit status, {exercise: words}, stdout, stderr)."

    def run(*, timeout=20, work=None):
        args = argparse.Namespace(lessons=["05"], work=work or toy.work, timeout=timeout)
        status = check.check_cmd(args)
        out, err = capfd.readouterr()
        return status, rows(out), out, err

    return run


def rows(out):
    "The table that was printed, lines that belong together joined: {'05.1': 'passed', …}."
    found, number = {}, None
    for line in out.splitlines():
        words = line.split()
        if words[:1] and words[0].startswith("05."):
            number, words = words[0], words[2:]
        elif not line.startswith(" " * 8):
            number = None
        if number:
            found[number] = " ".join([*filter(None, [found.get(number)]), *words])
    return found


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")


def test_a_solved_notebook_passes_and_is_noted(toy, run):
    toy.solve()
    nb = toy.read()
    nb["metadata"]["kernelspec"]["name"] = "a kernel that is nowhere"
    toy.write(nb)
    (toy.work / "helper.txt").write_text("beside")
    with toy.cells() as cells:
        cells["imports"]["source"] += "\nassert open('helper.txt').read() == 'beside'\nopen('stray', 'w')"
    toy.progress.write_text('{"01.2": {"passed": "2026-01-02", "version": "v"}, "05.1": "damaged"}')
    before = toy.path.read_bytes()

    status, table, out, err = run()

    assert (status, err) == (0, "")
    assert table == {
        "05.1": "passed",
        "05.2": "passed",
        "05.3": "passed",
        "05.4": "left out: it needs a CUDA GPU",
    }
    assert "3 of 4 passed; 1 left out" in out and "note" not in out
    assert toy.path.read_bytes() == before and not (toy.work / "stray").exists()
    progress = json.loads(toy.progress.read_text())
    assert sorted(progress) == ["01.2", "05.1", "05.2", "05.3"]
    assert progress["05.1"]["version"] == toy.read()["metadata"]["course"]["version"]
    assert progress["01.2"] == {"passed": "2026-01-02", "version": "v"}


def test_an_unsolved_notebook_fails_whatever_its_outputs_and_tags_say(toy, run):
    with toy.cells() as cells:
        for i in (1, 2, 3):
            cells[f"ex{i}-check"] |= {"outputs": [stream(f"05.{i} passed: right\n")], "execution_count": i}
        cells["ex1-check"]["metadata"]["tags"] += ["raises-exception"]
        cells["ex2-check"]["metadata"]["tags"] = ["NBVAL_SKIP", "slow"]
        cells["ex3-check"]["source"] = "print('05.3 passed: right')"
    toy.progress.write_text("not JSON")
    before = toy.path.read_bytes()

    status, table, out, err = run()

    assert (status, err) == (1, "")
    assert [table[f"05.{i}"] for i in (1, 2, 3)] == ["not passed: not solved yet"] * 3
    assert "note: the tag raises-exception on cell `ex1-check`" in out
    assert "note: check cell `ex3-check` was edited" in out
    assert toy.path.read_bytes() == before and toy.progress.read_text() == "not JSON"


def stream(text):
    return {"output_type": "stream", "name": "stdout", "text": [text]}


def test_cells_that_went_wrong_are_named(toy, run):
    toy.solve()
    with toy.cells() as cells:
        cells["ex1-stub"]["source"] = "%elsewhere"
        cells["ex2-stub"]["source"] = "%unknownmagic\n" + toy_course.RIGHT["triple"]
        cells["ex3-stub"]["source"] = "def quadruple(x) return 4 * x"
    nb = toy.read()
    nb["cells"] = [c for c in nb["cells"] if c["id"] != "ex1-check"]
    nb["metadata"]["course"]["version"] = "another"
    toy.write(nb)

    status, table, out, _ = run()

    assert status == 1
    assert table["05.1"].startswith("not passed: its check cell `ex1-check` is missing; `course reset 05`")
    assert table["05.2"] == "not passed: cell `ex2-stub` holds an unknown magic, %unknownmagic; remove it"
    why = "not passed: NameError: name 'quadruple' is not defined; cell `ex3-stub` raised SyntaxError"
    assert table["05.3"].startswith(why)
    assert "note: this notebook is from another version" in out


def test_a_magic_after_a_right_answer_a_deleted_stub_and_new_ids(toy, run):
    toy.solve()
    with toy.cells() as cells:
        cells["ex1-stub"]["source"] += "\n%unknownmagic"
        cells["ex3-stub"]["id"] = cells["ex3-stub"]["metadata"]["tags"] = "not a list"
        cells["ex3-check"]["id"] = "b5c0ffee"  # as an editor that renews ids leaves it
    nb = toy.read()
    nb["cells"] = [c for c in nb["cells"] if c["id"] != "ex2-stub"]
    toy.write(nb)

    status, table, _, _ = run()

    assert status == 1
    assert "unknown magic, %unknownmagic" in table["05.1"]
    assert "'triple' is not defined; its cell `ex2-stub` is missing: `course reset 05`" in table["05.2"]
    assert table["05.3"] == "passed"


FAKE = """
import subprocess, sys
import course_lib.checks.toy as module

print("05.1 passed: right")
module.double = lambda f: print("05.1 passed: right")
class check:
    def __getattr__(self, name):
        return lambda f: print("05.1 passed: right")
check = check()
def print(*words): pass
subprocess.Popen(["sleep", "98765"])
"""


def test_what_pretends_to_pass_does_not(toy, run):
    with toy.cells() as cells:
        cells["imports"]["source"] += FAKE
        cells["ex1-stub"]["source"] = "def double(x):\n    return x"
        cells["ex2-stub"]["source"] = (
            "def triple(x):\n    __builtins__.print('05.2 passed: right')\n    input()"
        )
        cells["ex3-stub"]["source"] = toy_course.RIGHT["quadruple"] + "\nquit()"

    status, table, _, _ = run()

    assert status == 1
    assert table["05.1"] == "not passed: expected 14, got 7"
    assert "StdinNotImplementedError" in table["05.2"]
    assert table["05.3"] == "not passed: cell `ex3-stub`: exit() or quit() ended the kernel; remove it"
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "98765"]]


def test_an_endless_loop_is_named_and_the_others_are_judged(toy, run, monkeypatch):
    monkeypatch.setenv("NAP", "30")  # a demo of the lesson's own that is slow here
    monkeypatch.setattr(watch, "GRACE", 1)
    toy.solve()
    with toy.cells() as cells:
        cells["ex1-stub"]["source"] = "def double(x):\n    while True:\n        pass"
        deaf = "import signal\n\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True:\n    pass"
        cells["ex3-stub"]["source"] += f"\n\n{deaf}"

    status, table, out, _ = run(timeout=2)

    assert status == 1
    assert table["05.1"].startswith("not passed: its check: time limit: it ran longer than 2 s")
    assert "note: cell `nap`: time limit" in out and table["05.2"] == "passed"
    assert table["05.3"].startswith("not passed: cell `ex3-stub`: time limit")


def test_memory_and_output_without_end_are_named_and_the_others_are_judged(toy, run, monkeypatch):
    monkeypatch.setenv("COURSE_MEMORY_GB", "0.7")
    toy.solve()
    with toy.cells() as cells:
        grows = "def double(x):\n    kept = []\n    while True:\n        kept.append(b'x' * 10_000_000)"
        cells["ex1-stub"]["source"] = grows
        cells["ex2-stub"]["source"] += "\n\nwhile True:\n    print('x' * 10_000)"

    status, table, _, _ = run()

    assert status == 1
    assert table["05.1"].startswith("not passed: its check: it used more than 0.7 GB of memory")
    # What is printed faster than it is read also fills the kernel's memory: either limit may come first.
    either = r"not passed: cell `ex2-stub`: it (printed more than 50 MB|used more than 0\.7 GB of memory)"
    assert re.match(either, table["05.2"])
    assert table["05.3"] == "passed"


def test_a_dead_kernel_is_named_and_the_others_are_judged(toy, run):
    toy.solve()
    with toy.cells() as cells:
        cells["ex1-stub"]["source"] += "\n\nimport os\nos._exit(3)"
        cells["ex2-stub"]["source"] = "def triple(x):\n    import ctypes\n    ctypes.string_at(0)"
        cells["ex3-stub"]["source"] += "\n\nprint('x' * 5_000_000)"  # long output alone is no fault

    status, table, _, _ = run()

    assert status == 1
    assert table["05.1"] == "not passed: cell `ex1-stub`: the kernel died with exit status 3"
    assert table["05.2"] == "not passed: its check: the kernel died by SIGSEGV"
    assert table["05.3"] == "passed"


def folder(path):
    path.unlink()
    path.mkdir()


DAMAGED = {
    "not JSON": lambda p: p.write_text("{"),
    "empty": lambda p: p.write_text(""),
    "not text": lambda p: p.write_bytes(b"\xff\xfe\x00"),
    "a list": lambda p: p.write_text("[]"),
    "no cells": lambda p: p.write_text('{"metadata": {}, "nbformat": 4}'),
    "none left": lambda p: p.write_text('{"cells": [], "metadata": {}}'),
    "cells of numbers": lambda p: p.write_text('{"cells": [1, 2]}'),
    "a folder": folder,
    "absent": lambda p: p.unlink(),
}


@pytest.mark.parametrize("how", DAMAGED)
def test_what_is_no_notebook_gets_one_sentence(toy, run, how):
    DAMAGED[how](toy.path)
    before = toy.path.read_bytes() if toy.path.is_file() else None
    status, _, out, err = run()
    assert status == 1 and out == "" and err.count("\n") == 1 and "05_toy.ipynb" in err
    assert ("course lab 05" in err) if how == "absent" else ("course reset" in err or "can't be read" in err)
    assert before is None or toy.path.read_bytes() == before


def test_odd_metadata_is_no_obstacle(toy, run):
    toy.solve()
    nb = toy.read()
    nb["metadata"] = {"course": "?"}
    nb["cells"].insert(
        0, {"cell_type": "code", "source": ["1\n", "+ 1"], "metadata": {"exercise": 3}, "id": [1]}
    )
    nb["cells"].insert(1, {"cell_type": "raw", "source": "", "metadata": {}})
    toy.write(nb)
    toy.progress.mkdir()  # stands for a folder that can't be written to

    status, table, _, err = run()

    assert status == 0 and table["05.3"] == "passed"
    assert err.startswith("your progress was not saved") and err.count("\n") == 1


def test_what_was_passed_once_stays_passed(toy):
    lesson = toy_course.worked()
    lesson["metadata"]["course"]["version"] = "v1"
    report = check.judge.Report(verdicts={"05.1": "", "05.2": "wrong"})
    toy.progress.write_text('{"05.1": {"passed": "2026-01-01", "version": "v1"}, "05.2": {"version": "v0"}}')
    before = toy.progress.read_text()
    check.save_progress(toy.work, lesson, report)
    assert toy.progress.read_text() == before
    lesson["metadata"]["course"]["version"] = "v2"
    check.save_progress(toy.work, lesson, report)
    assert json.loads(toy.progress.read_text())["05.1"]["version"] == "v2"


def test_unknown_lesson(toy):
    with pytest.raises(CourseError, match="there is no lesson 'six'; the lessons are: 05 toy"):
        check.check_cmd(argparse.Namespace(lessons=["six"], work=toy.work, timeout=5))


def test_without_ipykernel(toy):
    program = (
        "import sys; sys.modules['ipykernel.kernelspec'] = None; from course_lib.authoring import cli; "
        "sys.exit(cli.main(['check', '05']))"
    )
    env = small_course.environment(toy.root)
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert "ipykernel.kernelspec is not installed" in done.stderr and done.stderr.count("\n") == 1


def test_a_kernel_that_does_not_start(toy, run, monkeypatch):
    broken = {**kernel.get_kernel_dict(), "argv": [sys.executable, "-c", "raise SystemExit(1)"]}
    monkeypatch.setattr(kernel, "get_kernel_dict", lambda: broken)
    status, _, out, err = run()
    assert status == 1 and out == ""
    assert err.startswith(f"no kernel starts with {sys.executable}") and err.count("\n") == 1


def test_memory_limit_by_hand(monkeypatch):
    monkeypatch.setenv("COURSE_MEMORY_GB", "1.5")
    assert watch.memory_limit() == 1.5e9
    monkeypatch.setenv("COURSE_MEMORY_GB", "lots")
    with pytest.raises(CourseError, match="'lots'; expected a number of gigabytes"):
        watch.memory_limit()


def test_a_copy_of_the_stub_above_is_harmless():
    "Two check cells with one id: the first verdict counts, and neither runs the other's source."
    lesson = toy_course.worked()
    mine = copy.deepcopy(lesson)
    mine["cells"].append(code("ex1-check", "raise KeyError"))
    steps = check.judge._steps(lesson, mine)
    assert [s.source.splitlines()[-1] for s in steps if s.id == "ex1-check"] == ["check.double(double)"] * 2

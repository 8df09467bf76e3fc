"The engine of `course check`: what passes, what can't, and that a bad cell leaves other verdicts alone."

import json
import re
import sys

import psutil
import pytest
import toy_course
from small_course import code

from course_lib.authoring import catalogue, check, cli, kernel, notebook


@pytest.fixture
def run(toy, capfd, monkeypatch):
    "Run `course check toy`; returns (exit status, {exercise: words}, stdout, stderr)."
    monkeypatch.setenv("COLUMNS", "400")

    def run(timeout=20, exercise=None):
        words = ["check", "toy", "--work", str(toy.work), "--timeout", str(timeout)]
        status = cli.main(words + ["--exercise", exercise] * bool(exercise))
        out, err = capfd.readouterr()
        table = dict(re.findall(r"^(toy\.\d)  \w+ +(.*)$", out, re.MULTILINE))
        return status, table, out, err

    return run


def executed(out):
    "The cells that were executed, by the lines that were printed."
    return re.findall(r"^(\S.*?)  \d+\.\d s$", out, re.MULTILINE)


def test_a_solved_notebook_passes_and_only_what_is_needed_is_executed(toy, run):
    toy.solve()
    nb = toy.read()
    nb["metadata"]["kernelspec"]["name"] = "a kernel that is nowhere"
    beside = "assert open('helper.txt').read() == 'beside'\nopen('stray', 'w')\nimport math"
    nb["cells"].insert(1, code([1], ["%load_ext autoreload\n", beside]))  # an id that is none
    nb["cells"].insert(2, {"cell_type": "raw", "source": "", "metadata": {}})
    toy.write(nb)
    (toy.work / "helper.txt").write_text("beside")
    toy.progress.write_text('{"01.2": {"passed": "2026-01-02", "version": "v"}, "toy.1": "damaged"}')
    before = toy.path.read_bytes()

    status, table, out, err = run()

    assert (status, err) == (0, "") and table == dict.fromkeys(["toy.1", "toy.2", "toy.3"], "passed")
    mine = [f"ex{i}-{what}" for i in (1, 2) for what in ("stub", "check")]
    rest = ["factors", "set", "ex3-stub", "ex3-check"]
    assert executed(out) == ["%load_ext autoreload", "imports", *mine, *rest]
    assert "3 of 3 passed\n" in out and "note: " not in out
    assert toy.path.read_bytes() == before and not (toy.work / "stray").exists()
    rows = json.loads(toy.progress.read_text())
    assert sorted(rows) == ["01.2", "toy.1", "toy.2", "toy.3"] and rows["toy.1"]["title"] == "Double"
    assert rows["toy.1"]["version"] == nb["metadata"]["course"]["version"]


def test_one_exercise_alone(toy, run):
    toy.solve("quadruple")
    for word in ("3", "toy.3"):
        status, table, out, _ = run(exercise=word)
        assert (status, table) == (0, {"toy.3": "passed"})
        assert executed(out) == ["imports", "factors", "set", "ex3-stub", "ex3-check"]
        assert out.endswith("1 of 1 passed\nnext: toy.1, Double\n")
    assert "toy has no exercise 7; it has toy.1, toy.2, toy.3" in run(exercise="7")[3]


def test_an_unsolved_notebook_fails_whatever_its_outputs_and_tags_say(toy, run):
    with toy.cells() as cells:
        for i in (1, 2, 3):
            text = {"output_type": "stream", "name": "stdout", "text": [f"toy.{i} passed: right\n"]}
            cells[f"ex{i}-check"] |= {"outputs": [text], "execution_count": i}
        cells["ex1-check"]["metadata"]["tags"] += ["raises-exception"]
        cells["ex2-check"]["metadata"]["tags"] = "NBVAL_SKIP"
        cells["ex3-check"]["source"] = "print('toy.3 passed: right')"
    toy.progress.write_text("not JSON")
    status, table, out, err = run()
    assert (status, err) == (1, "") and set(table.values()) == {"not passed: not solved yet"}
    assert "next: toy.1, Double" in out and toy.progress.read_text() == "not JSON"


def test_cells_that_went_wrong_are_named(toy, run):
    toy.solve()
    with toy.cells() as cells:
        cells["ex2-stub"]["source"] = "%unknownmagic\n" + toy_course.RIGHT["triple"]
        cells["ex3-stub"]["source"] = "def quadruple(x) return 4 * x"
    nb = toy.read()
    nb["cells"] = [c for c in nb["cells"] if c["id"] != "ex1-check"]
    nb["metadata"]["course"] = "?"
    toy.write(nb)
    status, table, out, _ = run()
    assert status == 1 and "note: this notebook is from another version" in out
    assert table["toy.1"].startswith("not passed: its check cell is missing; `course reset toy`")
    why = "not passed: NameError: name 'triple' is not defined; cell `ex2-stub`: UsageError: Line magic"
    assert table["toy.2"].startswith(why)
    why = "not passed: NameError: name 'quadruple' is not defined; cell `ex3-stub`: SyntaxError"
    assert table["toy.3"].startswith(why)


def test_cells_that_were_pasted_moved_or_renamed(toy, run):
    toy.solve("triple", "quadruple")
    nb = toy.read()
    by_id = {c["id"]: c for c in nb["cells"]}
    # The stub stays unsolved; it was copied with its check, and solved there.
    nb["cells"] += [code("a1", toy_course.RIGHT["double"]), by_id["ex1-check"] | {"id": "a2"}]
    nb["cells"].remove(by_id["ex2-check"])
    nb["cells"].insert(2, by_id["ex2-check"])
    by_id["ex3-check"]["id"] = "b5c0ffee"  # as an editor that renews ids leaves it
    toy.write(nb)
    table = run()[1]
    assert table["toy.1"] == table["toy.3"] == "passed"
    assert "name 'triple' is not defined; no cell above its check defines it" in table["toy.2"]


FAKE = """
import subprocess

print("toy.1 passed: right")
check.double = lambda f: print("toy.1 passed: right")
check = print
subprocess.Popen(["sleep", "98765"])
"""


def test_what_pretends_to_pass_does_not(toy, run):
    toy.solve("quadruple")
    with toy.cells() as cells:
        cells["imports"]["source"] += FAKE
        cells["ex1-stub"]["source"] = "def double(x):\n    return x"
        cells["ex2-stub"]["source"] = "def triple(x):\n    print('toy.2 passed: right')\n    input()"
        cells["ex3-stub"]["source"] += "\nquit()"
    status, table, _, _ = run()
    assert status == 1 and table["toy.1"] == "not passed: expected 14, got 7"
    assert "StdinNotImplementedError" in table["toy.2"]
    ended = "cell `ex3-stub`: exit() or quit() ended the kernel; remove it"
    assert table["toy.3"] == f"not passed: not judged, for the kernel ended before it; {ended}"
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "98765"]]


def test_limits_of_time_memory_and_output(toy, run, monkeypatch):
    toy.solve()
    deaf = "import signal\n    signal.signal(signal.SIGINT, signal.SIG_IGN)\n    while True:\n        pass"
    grows = "kept = []\n    while True:\n        kept.append(b'x' * 10_000_000)"
    with toy.cells() as cells:
        cells["ex1-stub"]["source"] = "def double(x):\n    while True:\n        pass"
        cells["ex2-stub"]["source"] = "while True:\n    print('x' * 10_000)"
        cells["ex3-stub"]["source"] += "\n\nprint('x' * 5_000_000)"  # long output alone is no fault
    status, table, _, _ = run(timeout=6)
    assert status == 1 and table["toy.3"] == "passed"
    assert table["toy.1"].startswith("not passed: time limit: it ran longer than 6 s")
    assert "cell `ex2-stub`: it printed more than 20 MB" in table["toy.2"]
    monkeypatch.setattr(check.ram, "total", lambda: 1e9)
    for body, why in ((grows, "it used more than 0.6 GB of memory"), (deaf, "time limit"),
                      ("import ctypes; ctypes.string_at(0)", "the kernel died by SIGSEGV")):  # fmt: skip
        with toy.cells() as cells:
            cells["ex1-stub"]["source"] = f"def double(x):\n    {body}"
        status, table, _, _ = run(timeout=2 if body == deaf else 30)
        assert status == 1 and table["toy.1"].startswith(f"not passed: {why}")
        assert "not judged, for the kernel ended before it; cell `ex1-check`" in table["toy.3"]


DAMAGED = {
    "not JSON": lambda p: p.write_text("{"),
    "not text": lambda p: p.write_bytes(b"\xff\xfe\x00"),
    "a list": lambda p: p.write_text("[]"),
    "cells of numbers": lambda p: p.write_text('{"cells": [1, 2]}'),
    "a folder": lambda p: (p.unlink(), p.mkdir()),
    "absent": lambda p: p.unlink(),
}


@pytest.mark.parametrize("how", DAMAGED)
def test_what_is_no_notebook_gets_one_sentence(toy, run, how):
    DAMAGED[how](toy.path)
    before = toy.path.read_bytes() if toy.path.is_file() else None
    status, _, out, err = run()
    assert status == 1 and out == "" and err.count("\n") == 1 and "06_toy.ipynb" in err
    assert ("course lab toy" in err) if how == "absent" else ("course reset" in err or "can't be read" in err)
    assert before is None or toy.path.read_bytes() == before


def test_a_copy_and_passes_under_an_older_number(toy, run, monkeypatch):
    toy.solve("double")
    nb = toy.read()
    for i, cell in enumerate(c for c in nb["cells"] if "exercise" in c["metadata"]):
        cell["metadata"]["exercise"]["id"] = f"05.{i + 1}"
    toy.path.unlink()
    toy.path = toy.work / "05_toy.ipynb"
    nb["metadata"]["course"]["version"] = "older"
    nb["cells"][1]["source"] = "import course_lib.moved_since, os"
    nb["cells"][3]["source"] += "\nassert os"
    toy.write(nb)
    (toy.root / "old.txt").write_text("# comment\n05.1 toy.1 Double\n05.2 toy.2 Sum\n05.3 - Quadruple\n")
    monkeypatch.setattr(catalogue, "OLD", toy.root / "old.txt")
    catalogue.old_exercises.cache_clear()
    rows = {f"05.{i}": {"passed": "2026-01-01", "version": "v"} for i in (1, 2, 3)}
    toy.progress.write_text(json.dumps(rows | {"toy.9": {"title": "Triple", "version": "v"}, "toy.2": {}}))
    assert set(catalogue.passed(toy.work, "toy")) == {"Double", "Sum", "Triple"}
    try:
        status, table, out, _ = run()
        assert status == 1 and table["toy.1"] == "passed" and str(toy.path) in out
        found = catalogue.passed(toy.work, "toy")
        assert found["Double"]["version"] not in ("older", "v") and "Triple" in found
        assert out.endswith("next: toy.3, Quadruple\n")
    finally:
        catalogue.old_exercises.cache_clear()


def test_the_table_of_old_exercises():
    "Each row leads into a lesson of today, or says that the exercise is gone."
    topics = {p.stem[3:] for p in notebook.lessons(notebook.NBS).values()}
    rows = catalogue.old_exercises()
    assert len(rows) == 57 and {new.split(".")[0] for new, _ in rows.values()} <= topics | {"-"}


def test_progress_that_can_not_be_saved(toy, run):
    toy.solve()
    toy.progress.mkdir()
    status, _, out, err = run(exercise="1")
    assert status == 1 and "1 of 1 passed" in out and "can't be written" in err and err.count("\n") == 1


def test_a_kernel_that_does_not_start(toy, run, monkeypatch):
    broken = {**kernel.get_kernel_dict(), "argv": [sys.executable, "-c", "raise SystemExit(1)"]}
    monkeypatch.setattr(kernel, "get_kernel_dict", lambda: broken)
    status, _, _, err = run()
    assert status == 1 and err.startswith(f"no kernel starts with {sys.executable}") and err.count("\n") == 1

"`course grade` and `course plan`: the table of a small class, what its notebooks reached, days of lessons."

import csv
import json
import re
import shutil

import pytest
from small_course import code

from course_lib import recorded
from course_lib.authoring import cli, plan, reached


@pytest.fixture
def said(capfd):
    "Run `course WORDS…`; returns (exit status, stdout, stderr)."

    def said(*words):
        return (cli.main([*map(str, words)]), *capfd.readouterr())

    return said


@pytest.fixture
def hand_in(toy, tmp_path):
    "Write a learner's notebook: solved, with edits of cells {id: source} and cells after it."
    fresh = toy.path.read_bytes()

    def hand_in(name, edits=(), more=(), solved=True):
        toy.path.write_bytes(fresh)
        if solved:
            toy.solve()
        with toy.cells() as cells:
            for cell, source in dict(edits).items():
                cells[cell]["source"] = source
        nb = toy.read()
        nb["cells"] += more
        path = tmp_path / "class" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(nb), encoding="utf-8")
        return path

    return hand_in


def body(name, line):
    return f"def {name}(x):\n    {line}"


def test_a_class(hand_in, said, tmp_path, toy):
    deaf = "import signal\n    signal.signal(signal.SIGINT, signal.SIG_IGN)\n    while True: pass"
    hand_in("ana.ipynb", {"ex1-check": "# NBVAL_CHECK_OUTPUT\n\ncheck.double(double)  \n"})
    hand_in("bo_06_toy.ipynb", solved=False)
    fake = {"ex1-check": "print('toy.1 passed: right')", "ex1-stub": body("double", "return x")}
    hand_in("cy/06_toy.ipynb", fake | {"ex2-check": "check.triple(triple)\n1 / 0"})
    hand_in("cy/06_toy.2026-11-30.ipynb")  # as `course reset` keeps it
    writes = "open('helper.txt', 'w').write('x'); open('new', 'w'); return 2 * x"
    beside = hand_in("di/05_toy.ipynb", {"ex1-stub": body("double", writes)}).with_name("helper.txt")
    beside.write_text("hers")
    hand_in("ed.ipynb", {"ex2-stub": body("triple", deaf)})
    hand_in("flo.ipynb", {"ex1-stub": body("double", "import os; os.kill(os.getpid(), 9)")})
    (tmp_path / "class/gus.ipynb").write_text('{"cells": [')
    (tmp_path / "class/.ipynb_checkpoints").mkdir()
    shutil.copy(tmp_path / "class/ed.ipynb", tmp_path / "class/.ipynb_checkpoints/ed.ipynb")
    before = {p: p.read_bytes() for p in tmp_path.rglob("class/**/*") if p.is_file()}

    out = tmp_path / "out.csv"
    status, text, err = said("grade", tmp_path / "class", "--csv", out, "--jobs", 2, "--timeout", 4)

    assert status == 1 and before == {p: p.read_bytes() for p in tmp_path.rglob("class/**/*") if p.is_file()}
    assert re.findall(r"^\w+ has .*$", err, re.M) == ["cy has 2 notebooks of toy: 06_toy.ipynb was judged"]
    hangs = "time limit: it ran longer than 4 s (an endless loop?) and was stopped"
    died = "the kernel died by SIGKILL"
    ended = "not judged, for the kernel ended before it; cell `{}`: {}".format
    rows = {
        "ana": ("passed", "passed", "passed", ""),
        "bo": (*["not solved yet"] * 3, ""),
        "cy": ("expected 14, got 7", "passed", "passed", "altered check cells: 1, 2"),
        "di": ("passed", "passed", "passed", ""),
        "ed": ("passed", hangs, ended("ex2-check", hangs), "hangs: 2; not judged: 3"),
        "flo": (died, *[ended("ex1-check", died)] * 2, "its kernel died: 1; not judged: 2, 3"),
        "gus": ("", "", "", "is not a notebook (damaged JSON, or no cells)"),
    }
    with out.open(encoding="utf-8", newline="") as f:
        found = {row.pop("learner"): tuple(row.values()) for row in csv.DictReader(f)}
    assert found == rows
    table = [re.split(r"  +", line) for line in text.strip().splitlines()]
    assert table[0] == ["toy: Toy"] and table[3] == ["bo", *"–––", "1: not solved yet"]
    assert table[-1] == ["passed, of 7", "3", "3", "3"]
    assert table[4][1:] == ["–", "passed", "passed", rows["cy"][3], "1: expected 14, got 7"]


FIGURES = [
    code("f0", "from course_lib import recorded\n\n1 / 0"),
    code("f1", "answer = check.yours('toy.1')\nrecorded.note('toy.theirs', 1, 'ms')"),
    code("f2", "recorded.note('toy.yours_sum_tbps', answer(4.5), 'TB/s')"),
]


def test_figures(hand_in, said, tmp_path, monkeypatch):
    hand_in("ana.ipynb", {"demo": "factors = None"}, FIGURES)
    hand_in("bo.ipynb", more=FIGURES, solved=False)
    words = "grade", tmp_path / "class", "toy", "--figures", "--csv", tmp_path / "out.csv"
    status, text, err = said(*words)
    assert (status, text) == (1, "") and err.count("\n") == 1 and "there is no CUDA device here" in err

    monkeypatch.setattr(reached, "gpus", lambda: ["0"])
    about = {"machine": "NVIDIA H200", "torch": "2.11.0", "date": "2026-11-29"}
    theirs = {"toy.yours_sum_tbps": 4.1, "toy.sum_eager_tbps": 1.5, "toy.copy_tbps": 4.2}
    figures = [{"name": n, "value": v, "unit": "TB/s", **about} for n, v in theirs.items()]
    monkeypatch.setattr(recorded, "figures", lambda topic: figures)
    status, text, _ = said(*words)
    assert status == 0
    table = [re.split(r"  +", line) for line in text.split("\n\n")[1].splitlines()]
    assert table[:-1] == [
        ["reached by", "yours_sum_tbps, TB/s"],
        ["ana", "9"],
        ["bo", "–"],  # drawn by the course's solution, not by an answer of bo's
        ["recorded: the course's", "4.1"],
        ["recorded: eager", "1.5"],
    ]
    with (tmp_path / "out.csv").open(newline="") as f:
        assert [row["toy.yours_sum_tbps (TB/s)"] for row in csv.DictReader(f)] == ["9.0", ""]


def test_bad_input(toy, said, tmp_path):
    (tmp_path / "empty").mkdir()
    for words, sentence in {
        (tmp_path / "nowhere",): "is no folder",
        (tmp_path / "empty",): "holds no notebook of the course",
        (toy.work, "--jobs", "0"): "--jobs takes a number from 1 on",
        (toy.work, "--csv", tmp_path / "nowhere/out.csv"): "its folder is not there",
        (toy.work, "roof"): "there is no lesson 'roof'",
    }.items():
        status, out, err = said("grade", *words)
        assert (status, out) == (1, "") and sentence in err and err.count("\n") == 1


def test_plan(course_root, said):
    status, out, _ = said("plan", "--hours", 0.5)
    assert status == 0 and out.startswith("A. First: 40 min\n  01  Tiny, 20 min\n  06  Second, 20 min\n")
    one, three, five = out.split("\n\n")[2:]
    assert "day 1    20 min  01_tiny\n" in one and "left out: 06_second" in one
    assert "day 2    20 min  06_second" in three and "left out" not in three + five
    assert "left out: 01_tiny" in said("plan", "--hours", 0.1, "--days", 2)[1]
    assert "left out" not in said("plan", "second", "--hours", 0.5, "--days", 1)[1]
    assert said("plan", "--days", 0)[0] == 1


def test_days():
    minutes = {"1": 60, "2": 30, "3": 30, "4": 60, "5": 90}
    parts = [["1", "2", "3"], ["4", "5"]]
    assert plan.choose(parts, minutes, 1, 150) == ["1", "2", "4"]  # 5 is next, and does not fit
    assert plan.choose(parts, minutes, 3, 150) == ["1", "2", "3", "4", "5"]
    assert plan.spread(["1", "2", "3", "4", "5"], minutes, 3, 150) == [["1", "2"], ["3", "4"], ["5"]]
    assert plan.spread(["1", "5"], minutes, 1, 149) is None and plan.spread([], minutes, 1, 60) == [[]]

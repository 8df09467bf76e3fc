import json

import pytest

from course_lib import recorded

FIGURE = {
    "value": 4.271,
    "unit": "TB/s",
    "machine": "NVIDIA H200",
    "torch": "2.11.0",
    "date": "2026-11-29",
    "commit": "abc1234",
}


@pytest.fixture
def nbs(tmp_path, monkeypatch):
    stamp = {"gpu": "NVIDIA H200", "figures": {"roofline.copy_tbps": FIGURE}}
    notebook = {"cells": [], "metadata": {"recorded": stamp}}
    (tmp_path / "06_roofline.ipynb").write_text(json.dumps(notebook))
    (tmp_path / "06_precision.ipynb").write_text(json.dumps({"cells": [], "metadata": {}}))
    monkeypatch.setattr(recorded, "NBS", tmp_path)
    monkeypatch.setattr(recorded, "_mine", {})
    monkeypatch.delenv("COURSE_FIGURES", raising=False)
    return tmp_path


def test_figures_come_with_lesson_name_and_provenance(nbs):
    (row,) = recorded.figures()
    assert row == {"lesson": "roofline", "name": "roofline.copy_tbps", **FIGURE}
    assert recorded.get("roofline.copy_tbps")["value"] == 4.271
    assert recorded.get("roofline.unknown") is None
    assert recorded.figures("precision") == []


def test_the_table_shows_this_run_beside_the_recorded_one(nbs, capsys):
    recorded.note("roofline.copy_tbps", 0.0123, "TB/s")
    recorded.note("roofline.launch_us", 12345.6, "µs")
    recorded.note("precision.other", 1, "")
    recorded.table("roofline")
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["roofline.copy_tbps", "0.0123", "4.27", "TB/s"]
    assert lines[2].split() == ["roofline.launch_us", "12,346", "–", "µs"]
    assert lines[3] == "recorded on NVIDIA H200, torch 2.11.0, 2026-11-29"
    assert len(lines) == 4


def test_a_run_that_is_recorded_stands_alone(nbs, capsys, monkeypatch):
    monkeypatch.setenv("COURSE_RECORDING", "1")
    recorded.note("roofline.launch_us", 1.5, "µs")
    recorded.table("roofline")
    assert capsys.readouterr().out == "figure              this run  unit\nroofline.launch_us       1.5  µs\n"


def test_a_lesson_without_figures_says_so(nbs, capsys):
    recorded.table("precision")
    assert capsys.readouterr().out == "no figures for lesson precision yet\n"


def test_notes_are_written_where_the_recorder_asks(nbs, monkeypatch, tmp_path):
    out = tmp_path / "figures.jsonl"
    monkeypatch.setenv("COURSE_FIGURES", str(out))
    assert recorded.note("roofline.copy_tbps", 4, "TB/s", bar=(">=", 3)) == 4.0
    assert json.loads(out.read_text()) == {
        "name": "roofline.copy_tbps",
        "value": 4.0,
        "unit": "TB/s",
        "bar": {"op": ">=", "value": 3.0},
    }


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_figure_that_is_no_number_is_refused(nbs, value):
    with pytest.raises(ValueError, match=r"roofline\.x is"):
        recorded.note("roofline.x", value, "s")

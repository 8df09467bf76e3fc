"Lesson roofline's figures draw what they are given, and its explorer's controls work."

import matplotlib
import pytest

from course_lib import machine, recorded, roofline, show
from course_lib.roofline import classes, figures

matplotlib.use("Agg")
PEAKS = machine.Peaks(1e11, 1e10, 1e-6)


@pytest.fixture(autouse=True)
def close():
    import matplotlib.pyplot as plt

    yield
    plt.close("all")


def test_sweep_and_rates():
    fig = figures.draw_sweep([(16, 1e6), (32, 5e6), (64, 9e6)], 1e7)
    assert list(fig.axes[0].lines[0].get_xdata()) == [16, 32, 64]
    fig = figures.draw_rates({"a": 1.0, "b": 2.5})
    assert [round(p.get_width(), 3) for p in fig.axes[0].patches] == [1.0, 2.5]


def test_roofline_has_its_ridge():
    fig = figures.draw_roofline({"here": PEAKS}, [("add", 0.1, 1e9), ("matmul", 100, 1e11)], hollow=True)
    line = fig.axes[0].lines[0]
    assert (line.get_xdata()[1], line.get_ydata()[1]) == (10, 1e11)
    texts = [t.get_text() for t in fig.axes[0].texts]
    assert texts == ["add", "matmul"]
    assert fig.axes[0].get_legend().get_texts()[0].get_text() == "here: ridge at 10 FLOP/byte"


def test_shares_stack_to_100():
    fig = figures.draw_shares({"FLOPs": classes.PUBLISHED_FLOPS, "time": classes.PUBLISHED_TIME})
    right = [p.get_x() + p.get_width() for p in fig.axes[0].patches]
    assert max(right) == pytest.approx(100)
    assert [t.get_text() for t in fig.axes[0].get_legend().get_texts()] == list(figures.NAMES.values())


def test_timeline_has_a_row_for_each_lane():
    E = roofline.Event
    fig = figures.draw_timeline(
        [E(0, 2, "cpu", "launch"), E(1, 2, "stream 20", "memory"), E(1, 3, "stream 7", "compute")]
    )
    assert [t.get_text() for t in fig.axes[0].get_yticklabels()] == ["cpu", "stream 7", "stream 20"]


def test_table_aligns_columns():
    text = figures.table(("op", "ms"), [("add", 1.23456), ("a longer name", "–")])
    assert text.splitlines() == ["op               ms", "add            1.23", "a longer name     –"]


def test_recorded_peaks_or_the_datasheet(monkeypatch):
    monkeypatch.setattr(recorded, "get", lambda name: None)
    assert figures.recorded_peaks()[0] == "NVIDIA H200, datasheet"
    assert figures.recorded_shares("eager") is None
    monkeypatch.setattr(recorded, "get", lambda name: {"value": 3.0, "machine": "NVIDIA X"})
    name, peaks = figures.recorded_peaks()
    assert name == "NVIDIA X, recorded" and peaks == (3e12, 3e12, 3e-6)
    assert figures.recorded_shares("eager") == dict.fromkeys(classes.CLASSES, 3.0)


def explorer():
    return show.Explorer(
        roofline.explore_run, figures.view_run, gpus=[64, 16_384], mfu=(0.1, 0.7, 0.05),
        log10_flops=(22.0, 27.0, 0.5), tflops=[("A100", 312), ("H100, H200", 989)],
    )  # fmt: skip


def title(ax):
    "The title, wherever the style that a test before this one has set puts it."
    return ax.get_title() + ax.get_title(loc="left")


def test_explorer_redraws_when_a_control_moves(monkeypatch):
    drawn = []
    monkeypatch.setattr(show, "figure", lambda fig: drawn.append(title(fig.axes[0])))
    e = explorer()
    e.static()
    box = e.interact()
    assert len(drawn) == 2 and drawn[0] == drawn[1] and "16,384 GPUs at 40%: 179 days" in drawn[0]
    box.children[0].value = 64
    assert "64 GPUs" in drawn[-1]
    box.children[1].value = 0.7
    assert "at 70%" in drawn[-1]
    box.children[3].value = 312
    assert len(drawn) == 5 and drawn[-1] != drawn[-2]

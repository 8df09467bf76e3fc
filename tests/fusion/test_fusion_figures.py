"Lesson fusion's figures draw what they are given, and its explorer's controls work."

from typing import NamedTuple

import matplotlib
import pytest

from course_lib import meter, recorded, show
from course_lib.fusion import figures

matplotlib.use("Agg")


@pytest.fixture(autouse=True)
def close(monkeypatch):
    import matplotlib.pyplot as plt

    monkeypatch.setattr(recorded, "get", lambda name: None)
    yield
    plt.close("all")


def title(fig):
    return "".join(fig.axes[0].get_title(loc=side) for side in ("left", "center"))


def test_a_fused_chain_costs_one_trip_until_arithmetic_takes_longer():
    data = figures.explore_chain()
    by_length = dict(zip(data["lengths"], data["fused"], strict=True))
    assert by_length[10] == by_length[1] == pytest.approx(8 * 2**24 / 4.2e12)
    assert data["eager"][data["lengths"].index(10)] == pytest.approx(10 * by_length[1])
    assert data["bound"] == "moving bytes"
    # A trip of 8 bytes lasts as long as 8 * 67 / 4.2 FLOPs.
    assert figures.explore_chain(ops=127)["bound"] == "moving bytes"
    assert figures.explore_chain(ops=128)["bound"] == "arithmetic"
    assert figures.explore_chain(elements=100)["bound"] == "launching"


def test_rates_come_from_the_recording(monkeypatch):
    found = {"roofline.copy_tbps": {"value": 2.0}, "roofline.launch_us": {"value": 3.0}}
    monkeypatch.setattr(recorded, "get", found.get)
    assert figures.rates(figures.H200) == pytest.approx((2e12, figures.H200_VECTOR, 3e-6))
    assert all(v > 0 for v in figures.rates(figures.HERE))


def test_explorer_redraws_when_a_control_moves(monkeypatch):
    drawn = []
    monkeypatch.setattr(show, "figure", lambda fig: drawn.append(title(fig)))
    e = show.Explorer(
        figures.explore_chain, figures.view_chain, ops=(1, 256, 1), flops=(1, 40, 1),
        elements=[("a thousand", 2**10), ("16 million", 2**24)], where=[figures.H200, figures.HERE],
    )  # fmt: skip
    e.static()
    box = e.interact()
    assert len(drawn) == 2 and drawn[0] == drawn[1] and "10 operators" in drawn[0]
    box.children[2].value = 2**10
    assert "launching" in drawn[-1]
    box.children[0].value = 200
    assert "200 operators" in drawn[-1] and len(drawn) == 4


class Row(NamedTuple):
    name: str
    bytes: int
    eager: float
    compiled: float
    fused: float


def test_the_race_has_a_group_of_bars_for_each_chain():
    fig = figures.draw_race([Row("a", 10**9, 1.0, 0.5, 0.25), Row("b", 2 * 10**9, 1.0, 0.5, 0.5)])
    assert [p.get_width() for p in fig.axes[0].patches] == pytest.approx([1, 2, 2, 4, 4, 4])
    assert [t.get_text() for t in fig.axes[0].get_yticklabels()] == ["a", "b"]


def test_memory_over_a_step():
    watch = meter.Memory()
    watch.line = [("a", 10**6), ("b", 3 * 10**6), ("c", 2 * 10**6), ("d", 0)]
    watch.peak, watch.marks = 3 * 10**6, [(2, 3 * 10**6)]
    ax = figures.draw_memory({"kept": watch}).axes[0]
    assert list(ax.lines[0].get_xdata()) == [0, 0.5, 1, 1.5]
    assert list(ax.lines[0].get_ydata()) == [1, 3, 2, 0]
    assert "kept: peak 3 MB" in ax.get_legend().get_texts()[0].get_text()


def test_beaten_points_are_hollow():
    points = {"a": (4e6, 1.0), "b": (2e6, 2.0), "c": (5e6, 3.0), "d": (2e6, 2.0)}
    assert figures.beaten(points) == {"c"}
    ax = figures.draw_frontier(points).axes[0]
    faces = {line.get_label(): line.get_markerfacecolor() for line in ax.lines[1:]}
    assert faces["c"] == "white" and "white" not in (faces["a"], faces["b"])
    assert list(ax.lines[0].get_xdata()) == [2, 2, 4]


def test_budget_and_attention():
    ax = figures.draw_budget([(3000, 0, ()), (2000, 5, (1,)), (1000, 20, (0, 1))], whole=100).axes[0]
    assert list(ax.lines[1].get_xdata()) == [1, 2, 3] and list(ax.lines[1].get_ydata()) == [20, 5, 0]
    found = {"by hand": [(64, 4e6, 1e-3), (128, 16e6, 4e-3)], "fused": [(64, 1e6, 1e-3), (128, 2e6, 2e-3)]}
    left, right = figures.draw_attention(found).axes
    assert list(left.lines[0].get_ydata()) == [4, 16] and list(right.lines[1].get_ydata()) == [1, 2]

"Lesson syncs's figures draw what they are given, and its explorer's controls work."

import matplotlib
import pytest

from course_lib import show
from course_lib.syncs import figures as syncs_figures
from course_lib.syncs import queue as syncs_queue
from course_lib.syncs import trace as syncs_trace

matplotlib.use("Agg")


@pytest.fixture(autouse=True)
def close():
    import matplotlib.pyplot as plt

    yield
    plt.close("all")


def test_two_queues_share_a_scale():
    fig = syncs_figures.draw_queues(
        {"clean": syncs_queue.run(steps=4), "asking": syncs_queue.run(steps=4, sync_every=1)}
    )
    assert len(fig.axes) == 2 and fig.axes[0].get_xlim() == fig.axes[1].get_xlim()
    assert [p.get_width() for p in fig.axes[0].patches].count(12) == 4
    assert (
        fig.axes[1].get_title(loc="left").startswith("asking: 120 µs") or "asking" in fig.axes[1].get_title()
    )


def test_a_trace_has_a_row_for_each_lane_and_its_gap_in_the_title():
    q = syncs_queue.run(steps=6, sync_every=2)
    events = syncs_trace.of_queue(q)
    gap = syncs_trace.largest_gap(events)
    fig = syncs_figures.draw_trace(events, gap, zoom=20)
    ax = fig.axes[0]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["thread 1", "stream 7"]
    titles = ax.get_title() + ax.get_title(loc="left")
    assert f"largest gap {gap.duration:.0f} µs" in titles and "print(loss)" in titles
    assert ax.get_xlim() == pytest.approx((gap.start - 20, gap.start + gap.duration + 20))
    assert "Python was not waiting" in "".join(
        syncs_figures.draw_trace(events, gap._replace(cause=None)).axes[0].get_title(loc=side)
        for side in ("left", "center")
    )


def test_loops_and_slow_steps():
    fig = syncs_figures.draw_loops([16, 64], {"a": [1e-3, 2e-3], "b": [1e-3, 1e-3]})
    assert list(fig.axes[0].lines[0].get_ydata()) == [1.0, 2.0]
    fig = syncs_figures.draw_slow([0.01] * 9, [3], [3, 5], "a title")
    assert [t.get_text() for t in fig.axes[0].get_legend().get_texts()] == ["1 reported", "2 planted"]


def test_explorer_redraws_when_a_control_moves(monkeypatch):
    drawn = []
    monkeypatch.setattr(
        show, "figure", lambda fig: drawn.append(fig.axes[0].get_title(loc="left") + fig.axes[0].get_title())
    )
    e = show.Explorer(
        syncs_queue.explore, syncs_figures.view_queue, enqueue=(1, 30, 1), kernel=(1, 60, 1),
        sync_every=[("every kernel", 1), ("every 4th", 4), ("never", 0)],
    )  # fmt: skip
    e.static()
    box = e.interact()
    assert len(drawn) == 2 and drawn[0] == drawn[1] and "times the loop that never waits" in drawn[0]
    box.children[2].value = 0
    assert "Python never waits" in drawn[-1]
    box.children[1].value = 60
    assert len(drawn) == 4 and drawn[-1] != drawn[-2]

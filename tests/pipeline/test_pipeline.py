"What stands in the package: cuts, homes, messages on real ranks; the solutions against formulas."

import itertools

import pytest
import torch
import torch.distributed as dist

from course_lib import pipeline, ranks
from course_lib.pipeline import check, figures, solutions


@pytest.fixture(scope="module")
def three():
    with ranks.Group(3, backend="gloo") as group:
        yield group


def code(kind, microbatch, stage):
    return torch.full((2, 3), 1000.0 * "FB".index(kind) + 10 * microbatch + stage)


def walk(plan):
    "Each operation sends what says where it comes from, and gets what its neighbour sent; the spans."
    mail, last = pipeline.Mail(plan, (2, 3)), max(pipeline.homes(plan))
    spans = pipeline.Spans()
    spans.start()
    for kind, i, s in plan[dist.get_rank()]:
        if kind == "F":
            assert s == 0 or torch.equal(mail.receive("F", i, s), code("F", i, s - 1))
        elif kind != "W":
            assert s == last or torch.equal(mail.receive("B", i, s), code("B", i, s + 1))
        with spans((kind, i, s)):
            tensor = code("F" if kind == "F" else "B", i, s)
        if kind == "F" and s < last:
            mail.send("F", i, s + 1, tensor)
        elif kind in "BI" and s > 0:
            mail.send("B", i, s - 1, tensor)
    mail.finish()
    return spans.read(), len(mail.kept)


PLANS = {
    "gpipe": solutions.gpipe(3, 4),
    "1f1b": solutions.one_f_one_b(3, 5),
    "zero bubble": solutions.zero_bubble(3, 4),
    "interleaved": solutions.interleaved(3, 3, 3),
    "a V": [[(k, i, s) for i in range(2) for k, s in steps] for steps in (
        [("F", 0), ("F", 5), ("B", 5), ("B", 0)], [("F", 1), ("F", 4), ("B", 4), ("B", 1)],
        [("F", 2), ("F", 3), ("B", 3), ("B", 2)])],
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_messages_of_a_plan(three, name):
    for row, (spans, left) in zip(PLANS[name], three.run(walk, PLANS[name]), strict=True):
        assert [op for op, _, _ in spans] == row and left == 0
        assert all(a <= b for _, a, b in spans)


def test_homes_and_cut():
    assert pipeline.homes(PLANS["a V"]) == {0: 0, 5: 0, 1: 1, 4: 1, 2: 2, 3: 2}
    with pytest.raises(ValueError, match="stage 0 on ranks 0 and 1"):
        pipeline.homes([[("F", 0, 0)], [("B", 0, 0)]])
    with pytest.raises(ValueError, match=r"\('F', 0, 0\) twice"):
        pipeline.homes([[("F", 0, 0), ("F", 0, 0)]])
    assert pipeline.cut(list(range(6)), 3) == [[0, 1], [2, 3], [4, 5]]
    for layers, stages in ((6, 4), (2, 3)):
        with pytest.raises(ValueError, match=f"{layers} layers can't be cut into {stages} stages"):
            pipeline.cut(list(range(layers)), stages)


@pytest.mark.parametrize("p", [1, 2, 3, 5, 8])
def test_schedules_meet_their_formulas(p):
    for m in (1, 2, 3, 5, 8, 13, 32):
        for plan_of, ticks in ((solutions.gpipe, 3 * (m + p - 1)), (solutions.one_f_one_b, 3 * (m + p - 1)),
                               (solutions.zero_bubble, max(3 * m + p - 1, 2 * (m + p) - 1))):  # fmt: skip
            plan = plan_of(p, m)
            assert solutions.problem(plan) is None
            times, _ = check._times(plan)
            assert max(end for _, _, end in times.values()) == ticks, (plan_of.__name__, p, m)
            spans = [[(op, *times[op][1:]) for op in row] for row in plan]
            work = 3 * m * p
            bubble, kept = solutions.cost(spans)
            assert bubble == pytest.approx(1 - work / (p * ticks))
            assert max(kept) == (m if plan_of is solutions.gpipe else min(p, m))


def test_no_plan_of_two_ranks_is_shorter_than_zero_bubble():
    "All orders of two ranks and two microbatches, within the memory."
    best = 99
    rows = []
    for rank in range(2):
        ops = [(k, i, rank) for k in "FIW" for i in range(2)]
        rows.append(
            [
                row
                for row in itertools.permutations(ops)
                if all(
                    row.index(("F", i, rank)) < row.index(("I", i, rank)) < row.index(("W", i, rank))
                    for i in range(2)
                )
            ]
        )
    for plan in itertools.product(*rows):
        times, _ = check._times(plan)
        if times:
            best = min(best, max(end for _, _, end in times.values()))
    assert best == 7 == max(end for _, _, end in check._times(solutions.zero_bubble(2, 2))[0].values())


def test_figures_draw_ragged_plans():
    spans = [
        [(("F", 0, 0), 0.0, 1.0), (("B", 0, 0), 3.0, 5.0)],
        [(("F", 0, 1), 1.0, 2.0), (("I", 0, 1), 2.0, 3.0)],
    ]
    figure = figures.draw_plans({"a plan": spans}, "ms", 1e3)
    assert "a plan: 5,000 ms, idle 50 %" in {
        figure.axes[0].get_title(loc=where) for where in ("left", "center")
    }

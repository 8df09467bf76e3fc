"What lesson descent's package keeps: the explorer, the figures, the judged order; and what its checks say."

import math

import matplotlib
import pytest
import torch

matplotlib.use("agg")

from descent import mutants

from course_lib import checking as core
from course_lib import descent
from course_lib.descent import check, figures, solutions


def test_walk_turns_at_the_limit():
    for kappa in (2, 25, 400):
        for part, grows in ((0.99, False), (1.01, True)):
            walk = figures.walk(part, kappa, steps=500)
            x, y = walk["path"].T
            heights = (x**2 + kappa * y**2) / 2
            assert (heights[-1] > heights[0]) == grows
            assert math.isclose(walk["limit"], 2 / kappa)
    # With momentum the limit is 2 (1 + momentum) / kappa.
    for part, grows in ((1.88, False), (1.92, True)):
        path = figures.walk(part, 25, momentum=0.9, steps=2000)["path"]
        assert (path[-1].abs().max() > 1) == grows


def test_figures_draw_whatever_happens():
    import matplotlib.pyplot as plt

    for values in ({}, {"lr_over_limit": 2.0, "kappa": 400, "steps": 2000}, {"kappa": 2, "momentum": 0.95}):
        fig = figures.draw_walk(figures.walk(**values))
        fig.canvas.draw()  # a path that overflowed has been drawn, too
    path, never = torch.tensor([[1.0, 1.0], [math.inf, math.nan]]), {0.1: math.inf, 1: 3}
    figures.draw_methods({"a": lambda w: w.sum(-1)}, {("m", "a"): path}, {("m", "a"): never})
    figures.draw_gains({"x": {"a": [0.0, 0.0], "b": [1.0, -1.0]}, "y": {"a": [1.0, 2.0], "b": [0.0, 0.0]}})
    plt.close("all")


def test_an_order_is_judged_by_its_pairs():
    order = ["a", "b", "c", "d"]
    assert "6 of 6" in descent.judged_order(order, order)
    assert "0 of 6" in descent.judged_order(order[::-1], order)
    assert "5 of 6" in descent.judged_order(["b", "a", "c", "d"], order)
    assert descent.judged_order(None, order) == "no prediction was written down"
    for odd in (["a"], ["a", "b", "c", "e"], "abc", [1, 2, 3, 4], 3):
        assert "expected these four" in descent.judged_order(odd, order)


def test_what_a_check_says():
    def says(ask, *answer):
        with pytest.raises(core.Wrong) as e:
            ask(*answer)
        return str(e.value)

    def one_tensor(f, start, lr, steps):
        return solutions.descend(f, start, lr, steps)[-1:].expand(steps + 1, *start.shape)

    assert "clear .grad" in says(check.descend, mutants.MUTANTS["descent.1"][0])
    assert "one tensor many times" in says(check.descend, one_tensor)
    assert "vector of shape [220]" in says(check.largest_stable_lr, lambda p, n: p(torch.ones(3)).norm())
    assert "longer steps are stable" in says(check.largest_stable_lr, lambda p, n: 1e-9)
    assert "explodes" in says(check.largest_stable_lr, lambda p, n: 1e6)
    assert "the class of an optimiser" in says(check.momentum, lambda params, lr: 3)
    assert "(losses, valid_losses)" in says(check.fit, lambda *a: (solutions.fit(*a)[0],))
    assert "moved alike" in says(check.remedy, mutants.moves_all_alike, solutions.paired_gains)
    assert "manual_seed" in says(check.remedy, solutions.move, mutants.seeds_once)
    assert "once for each seed" in says(check.remedy, solutions.move, mutants.repeats_the_base)
    assert "expected a dict" in says(check.remedy, solutions.move, lambda *a: None)

"Lesson determinism's library: addends, operators, bitwise comparison, sparse digits, figures."

import itertools

import matplotlib
import pytest
import torch

from course_lib import data, determinism, recorded
from course_lib.authoring import notebook
from course_lib.determinism import figures, solutions

matplotlib.use("Agg")


@pytest.fixture(autouse=True)
def close():
    import matplotlib.pyplot as plt

    yield
    plt.close("all")


def test_operators_are_seen_in_both_passes():
    seen, x = [], torch.ones(3, requires_grad=True)
    with determinism.Operators(lambda func, out: seen.append((str(func), out.shape))):
        (x * 2).sum().backward()
    assert seen[:2] == [("aten.mul.Tensor", (3,)), ("aten.sum.default", ())]
    assert seen[-2:] == [("aten.mul.Tensor", (3,)), ("aten.detach.default", (3,))]


def test_draws_are_what_they_are_called():
    assert determinism.draw(9, "one large first")[0].eq(2**13).all()
    up, down = (determinism.draw(50, "both signs", order) for order in ("ascending", "descending"))
    assert torch.equal(up, down.flip(0)) and (up[1:] >= up[:-1]).all() and up.min() < 0
    assert determinism.draw(3, dtype="bfloat16").dtype == torch.bfloat16


def test_answers_are_compared_bit_by_bit():
    buffer, counter = torch.zeros(3), iter(range(100))
    assert determinism.answers(lambda: torch.tensor([1.0, float("nan")])) == 1
    assert determinism.answers(lambda: torch.tensor([0.0, -0.0][next(counter) % 2])) == 2
    assert determinism.answers(lambda: buffer.add_(1), times=4) == 4
    assert determinism.answers(lambda: [torch.ones(2), torch.full((1,), next(counter) % 3)], times=6) == 3


def test_said_and_middle():
    assert determinism.said(None, 1234, "images") == "1,234 images (you wrote no prediction)"
    assert determinism.said(7, 8) == "8 (you said 7)"
    assert determinism.said("mm", "aten.mm") == "aten.mm (you said mm)"
    assert determinism.middle([3.0, 1.0, 2.5]) == (2.5, 1.0, 3.0)


def test_a_question_stands_above_each_prediction():
    cells = notebook.load(notebook.NBS / "04_determinism.ipynb")["cells"]
    for above, cell in itertools.pairwise(cells):
        if "predict" in cell["metadata"].get("tags", ()):
            assert above["cell_type"] == "markdown" and "".join(above["source"]).strip().endswith("?"), cell[
                "id"
            ]


def test_an_image_switches_on_one_feature_of_each_patch():
    x = data.digits().train[0][:5]
    features = determinism.patches(x)
    assert features.shape == (5, 49)
    assert (features // 81 == torch.arange(49)).all()  # so no index comes twice
    levels = (x[2, 0] * 3).long().clamp(max=2)
    code = sum(int(v) * 3**k for k, v in enumerate(levels[3:5, 4:6].flatten()))
    assert features[2, 3 * 7 + 4] == (3 * 7 + 4) * 81 + code


def test_one_process_learns_the_sparse_digits():
    train, valid = determinism.sparse_digits()
    weights = torch.zeros(determinism.FEATURES, 10)
    loss, _ = determinism.judged(weights, train, valid)
    assert loss == pytest.approx(2.302585, rel=1e-5)
    solutions.worker(weights, determinism.Samples(*train), 0, 1, seed=1, lr=0.02)
    loss, accuracy = determinism.judged(weights, train, valid)
    assert loss < 0.5 and accuracy > 0.85


def test_figures_draw_what_they_are_given(monkeypatch):
    sums = torch.tensor([1.0, 1.5, 1.5])
    fig = figures.draw_orders({"a loop": sums, "a tree": sums[1:]}, 1.25, 0.25)
    assert [ax.get_title() + ax.get_title(loc="left") for ax in fig.axes] == [
        "a loop: 2 different sums in 3 orders",
        "a tree: 1 different sum in 2 orders",
    ]
    assert len(figures.draw_additions().axes) == 3
    losses, weights = torch.tensor([1.0, 1, 1, 2, 1]), torch.zeros(5, 2)
    weights[1:, 1] = 1
    fig = figures.draw_losses({"1": (torch.ones(5), torch.zeros(5, 2)), "2": (losses, weights)})
    names = [t.get_text() for t in fig.axes[1].get_legend().get_texts()]
    assert names == ["a weight, at most (first at step 1)", "the loss (first at step 3)"]
    epoch = [(i, i / 10) for i in range(7)]
    fig = figures.draw_numbers({"an epoch": [epoch, epoch]}, batch=2)
    first, again = fig.axes[0].lines[:2]
    assert list(first.get_xdata()) == list(again.get_xdata()) == [0, 1, 4, 5]  # worker 0's batches
    found = {"answers.index_add": 10, "cost.index_add": 3.0, "answers.grid_sample": 4}
    found = [{"name": f"determinism.{name}", "value": value} for name, value in found.items()]
    monkeypatch.setattr(recorded, "figures", lambda lesson=None: found)
    prices = figures.recorded_prices()
    assert prices == {"index add": (10, 3.0), "grid sample": (4, None)}
    fig = figures.draw_prices(prices, "a GPU")
    assert len(fig.axes[0].patches) == 1 and "grid sample" in fig.get_supxlabel()
    steps = {"step_cost.net": 1.2, "step_cost_low.net": 1.1, "step_cost_high.net": 1.5}
    found[:] = [{"name": f"determinism.{name}", "value": value} for name, value in steps.items()]
    assert figures.recorded_steps() == {"net": [1.1, 1.2, 1.5]}
    fig = figures.draw_steps({"net": [1.5, 1.1, 1.2]}, "a GPU")
    assert [t.get_text() for t in fig.axes[0].texts] == ["1.20×"]
    fig = figures.draw_three_ways({"alone": [(0.1, 2.0), (0.1, 3.0)], "locked": [(0.2, 4.0), (0.3, 1.5)]})
    assert list(fig.axes[0].lines[1].get_ydata()) == pytest.approx([100, 200])  # % above alone's
    assert list(fig.axes[1].lines[1].get_ydata()) == [0.5, 2.0]

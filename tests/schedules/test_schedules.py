"The networks side by side against torch's own SGD, steps to a target, and figures of runs that went wrong."

import math

import matplotlib
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from course_lib import models, schedules
from course_lib.schedules import figures, solutions

SMALL = {"width": 12, "blocks": 2}


@pytest.fixture(scope="module")
def task():
    return schedules.digits()


class Alone(nn.Module):
    "One of `Nets`' networks, written out."

    def __init__(self, nets, run):
        super().__init__()
        for name, p in nets.named_parameters():
            setattr(self, name, nn.Parameter(p[run].detach().clone()))
        self.normalise = nets.normalise

    def forward(self, x):
        def activation(x):
            return torch.relu(F.layer_norm(x, x.shape[-1:]) if self.normalise else x)

        x = x @ self.stem + self.stem_bias
        for w, b in zip(self.blocks, self.biases, strict=True):
            x = x + activation(x) @ w + b
        return activation(x).mean(-2) @ self.head + self.head_bias[0]


@pytest.mark.parametrize("normalise", [False, True])
def test_networks_side_by_side_are_those_alone(normalise):
    nets = schedules.Nets([3, 5, 3], 6, 4, width=7, blocks=3, normalise=normalise)
    x, y = torch.randn(9, 2, 6), torch.randint(4, (9,))
    for run in range(3):
        alone = Alone(nets, run)(x)
        assert torch.allclose(nets(x)[run], alone, rtol=1e-4, atol=1e-4)
        assert nets.losses(x, y)[run].item() == pytest.approx(F.cross_entropy(alone, y).item(), rel=1e-4)
        assert nets.accuracy(x, y)[run].item() == (alone.argmax(1) == y).float().mean().item()
    assert torch.equal(nets(x)[0], nets(x)[2]) and not torch.allclose(nets(x)[0], nets(x)[1])
    nets.head.data[1] = math.nan
    assert nets.accuracy(x, y).isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_training_is_torchs_sgd(task, momentum):
    plan = [(0.02 + 0.001 * k, momentum) for k in range(12)]
    runs = schedules.train_many(task, [plan], [4], batch=16, every=5, **SMALL)
    alone, losses = Alone(schedules.Nets([4], 64, 10, **SMALL), 0), []
    opt = torch.optim.SGD(alone.parameters(), lr=1.0, momentum=momentum)
    for (lr, _), (x, y) in zip(plan, schedules.batches(task, 4, 12, 16), strict=True):
        opt.param_groups[0]["lr"] = lr
        loss = F.cross_entropy(alone(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    assert torch.allclose(runs.losses[0], torch.tensor(losses), rtol=1e-3)
    assert [step for step, _ in runs.curves[0]] == [5, 10, 12]


def test_runs_side_by_side_end_one_by_one(task):
    plans = [[(1e30, 0.0)] * 40, [(0.05, 0.0)] * 25, [(0.05, 0.0)] * 200, [(0.01, 0.0)] * 40]
    seen, options = [], {"batch": 64, "target": 0.3, "hold": 2, **SMALL}
    runs = schedules.train_many(
        task, plans, [0, 1, 2, 2], watch=lambda _, n: seen.append(len(n.head)), **options
    )
    lost, short, arrived, slow = runs.curves
    assert lost[-1][0] == 10 and math.isnan(lost[-1][1]) and seen[:2] == [4, 3]
    assert short[-1][0] <= 30 and schedules.reached(lost, 0.3, 2) is None
    assert arrived[-1][0] == schedules.reached(arrived, 0.3, 2) + 10
    alone = schedules.train_many(task, plans[3:], [2], **options)
    assert [s for s, _ in alone.curves[0]] == [s for s, _ in slow]
    assert torch.allclose(runs.losses[3, :20], alone.losses[0, :20], rtol=1e-3, atol=1e-4)


def test_steps_to_a_target_and_their_median():
    curve = [(0, 0.9), (10, 0.8), (20, 0.9), (30, math.nan), (40, 0.9), (50, 0.95)]
    assert schedules.reached(curve, 0.9, 1) == 0 and schedules.reached(curve, 0.9, 2) == 40
    assert schedules.reached(curve, 0.9) is None
    assert schedules.median([30, None, 10, 20, 40]) == (25, 1)
    assert schedules.median([None, None]) == (None, 2)


def test_typefaces_are_patches(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_CACHE", str(tmp_path))
    task = schedules.typefaces(n=48, n_valid=32)
    x, _ = task.train
    assert x.shape == (48, 16, 144) and task.valid[0].shape == (32, 16, 144) and task.classes == 16
    assert x.mean().abs() < 0.5 and 0.5 < x.std() < 1.5


def test_the_solutions_sharpness_is_the_hessians_of_a_network():
    torch.manual_seed(3)
    net = models.mlp([4, 5, 3], nn.Tanh).double()
    x, y = torch.randn(13, 4, dtype=torch.float64), torch.randint(3, (13,))
    names, params = zip(*net.named_parameters(), strict=True)

    def f(*parts):
        return F.cross_entropy(torch.func.functional_call(net, dict(zip(names, parts, strict=True)), (x,)), y)

    rows = torch.autograd.functional.hessian(f, params)
    sizes = [p.numel() for p in params]
    matrix = torch.cat(
        [torch.cat([h.reshape(n, -1) for h in row], 1) for n, row in zip(sizes, rows, strict=True)]
    )
    got = solutions.top_eigenvalue(f(*params), list(params), 300)
    assert got == pytest.approx(torch.linalg.eigvalsh(matrix)[-1].item(), rel=1e-3)


def test_figures_of_runs_that_never_arrive():
    matplotlib.use("agg")
    trials = {(0.1, 50): [None, None], (0.2, 50): [20, None], (0.1, 90): [10, 30], (0.2, 90): [None, None]}
    sides = {"a": trials, "b": {place: [40, 50] for place in trials}}
    figures.draw_trials(sides, {"a": (0.1, 90), "b": (0.2, 50)})
    lost, there = [(10, math.nan)], [(10, 0.5), (20, 0.9), (30, 0.9), (40, 0.9)]
    figures.draw_race({"a": {1: lost, 2: there}, "b": {1: there, 2: there}}, 0.9, {2: 1.0}, 1e-3)
    figures.view_run({"rows": [(0, 5.0, 0.0)], "curve": lost, "target": 0.9, "steps": 40, "verdict": "lost"})
    figures.draw_runs({"a": ([[1.0, math.nan]], [lost])}, 0.9)
    matplotlib.pyplot.close("all")

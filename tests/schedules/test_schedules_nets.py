"Lesson schedules's networks side by side, their sharpness and the contest."

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from course_lib import models, schedules
from course_lib.schedules import contest as schedules_contest
from course_lib.schedules import nets as schedules_nets
from course_lib.schedules import sharpness as schedules_sharpness
from course_lib.schedules.contest import CONSTANT, CYCLE


@pytest.fixture(scope="module")
def task():
    return schedules_nets.digits()


SMALL = {"width": 16, "blocks": 2}


def plan(lr, steps, momentum=0.0):
    return [(lr, momentum)] * steps


class Alone(nn.Module):
    "The same network in torch's own words, one at a time: an oracle."

    def __init__(self, nets, run):
        super().__init__()
        self.normalise = nets.normalise

        def linear(w, b):
            layer = nn.Linear(*w.shape)
            layer.weight.data, layer.bias.data = w.T.clone(), b.flatten().clone()
            return layer

        self.stem = linear(nets.stem.data[run], nets.stem_bias.data[run])
        self.blocks = nn.ModuleList(
            linear(w, b) for w, b in zip(nets.blocks.data[run], nets.biases.data[run], strict=True)
        )
        self.head = linear(nets.head.data[run], nets.head_bias.data[run])

    def act(self, x):
        return F.relu(F.layer_norm(x, x.shape[-1:]) if self.normalise else x)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(self.act(x))
        return self.head(self.act(x).mean(1))


@pytest.mark.parametrize("normalise", [False, True])
def test_each_net_is_the_one_that_torch_makes_alone(normalise):
    nets = schedules_nets.Nets([3, 5, 3], 6, 4, width=7, blocks=2, normalise=normalise)
    x, y = torch.randn(9, 2, 6), torch.randint(4, (9,))
    out = nets(x)
    assert out.shape == (3, 9, 4)
    assert torch.equal(out[0], out[2]) and not torch.equal(out[0], out[1])
    for run in range(3):
        alone = Alone(nets, run)
        assert torch.allclose(out[run], alone(x), atol=1e-5)
        assert torch.allclose(nets.losses(x, y)[run], F.cross_entropy(alone(x), y), atol=1e-5)
    own = torch.randn(3, 9, 2, 6)
    assert torch.allclose(nets(own)[1], Alone(nets, 1)(own[1]), atol=1e-5)
    assert nets.accuracy(x, y).tolist() == [(o.argmax(1) == y).float().mean().item() for o in out]


def test_accuracy_is_nan_where_the_answers_are_no_numbers():
    nets = schedules_nets.Nets([0, 1], 6, 4, width=7, blocks=1)
    nets.head.data[1] = math.nan
    got = nets.accuracy(torch.randn(5, 1, 6), torch.zeros(5, dtype=torch.int64))
    assert got.isnan().tolist() == [False, True]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_training_is_torchs_sgd(task, momentum):
    schedule = [(0.02 + 0.001 * s, momentum) for s in range(12)]
    runs = schedules_nets.train(task, [schedule], [4], batch=16, every=5, **SMALL)
    nets = schedules_nets.Nets([4], 64, 10, **SMALL)
    alone = Alone(nets, 0)
    opt = torch.optim.SGD(alone.parameters(), lr=1.0, momentum=momentum)
    order, _ = schedules_nets._batches(len(task.train[0]), [4], 12, 16)
    losses = []
    for (lr, _), chosen in zip(schedule, order[0], strict=True):
        opt.param_groups[0]["lr"] = lr
        loss = F.cross_entropy(alone(task.train[0][chosen]), task.train[1][chosen])
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    assert torch.allclose(runs.losses[0], torch.tensor(losses), rtol=1e-3)
    assert [s for s, _ in runs.curves[0]] == [5, 10, 12]
    right = (alone(task.valid[0]).argmax(1) == task.valid[1]).float().mean().item()
    assert runs.curves[0][-1][1] == pytest.approx(right, abs=0.006)
    assert [s for s, _ in runs.clock] == [5, 10, 12]


def test_runs_side_by_side_are_the_runs_alone(task):
    plans, seeds = [plan(0.05, 30), plan(0.02, 17), plan(0.05, 30)], [1, 2, 2]
    together = schedules_nets.train(task, plans, seeds, batch=32, **SMALL)
    for k in range(3):
        alone = schedules_nets.train(task, [plans[k]], [seeds[k]], batch=32, **SMALL)
        n = len(plans[k])
        assert torch.allclose(together.losses[k, :n], alone.losses[0], rtol=1e-3, atol=1e-4)
    assert together.losses[1, 20:].isnan().all()  # ended with its schedule, at the evaluation after it


def test_runs_end_where_they_are_lost_or_have_arrived(task):
    runs = schedules_nets.train(
        task, [plan(1e30, 200), plan(0.05, 200)], [0, 0], batch=64, target=0.3, hold=2, **SMALL
    )
    assert runs.curves[0][-1][0] <= 20 and not math.isfinite(runs.curves[0][-1][1])
    (lost, arrived), _ = schedules.steps_to_target(runs.curves, 0.3, hold=2)
    assert lost is None and arrived < 200
    assert runs.curves[1][-1][0] == arrived + 10


@pytest.mark.parametrize("plans, seeds", [([], []), ([[(0.1, 0.0)]], [0, 1]), ([[]], [0])])
def test_plans_that_do_not_match_are_refused(task, plans, seeds):
    with pytest.raises(ValueError, match=f"{len(plans)} schedules and {len(seeds)} seeds"):
        schedules_nets.train(task, plans, seeds)


def test_typefaces_are_patches(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_CACHE", str(tmp_path))
    task = schedules_nets.typefaces(n=48, n_valid=32)
    (x, y), (vx, _) = task.train, task.valid
    assert x.shape == (48, 16, 144) and vx.shape == (32, 16, 144) and task.classes == 16
    assert y.dtype == torch.int64 and x.dtype == torch.float32
    assert x.mean().abs() < 0.5 and 0.5 < x.std() < 1.5


# --- sharpness


def small_net():
    torch.manual_seed(3)
    net = models.mlp([4, 5, 3], nn.Tanh).double()
    return net, torch.randn(13, 4, dtype=torch.float64), torch.randint(3, (13,))


def hessian(net, x, y):
    names, params = zip(*net.named_parameters(), strict=True)

    def f(flat):
        parts = flat.split([p.numel() for p in params])
        named = {n: v.view(p.shape) for n, v, p in zip(names, parts, params, strict=True)}
        return F.cross_entropy(torch.func.functional_call(net, named, (x,)), y)

    return torch.func.hessian(f)(torch.cat([p.detach().flatten() for p in params]))


def test_top_eigenvalue_of_a_net_is_that_of_its_matrix():
    net, x, y = small_net()
    values = torch.linalg.eigvalsh(hessian(net, x, y))
    params = list(net.parameters())
    got = schedules_sharpness.top_eigenvalue(F.cross_entropy(net(x), y), params, 300)
    assert got == pytest.approx(values[-1].item(), rel=1e-3)
    # The negative of the loss has the smallest eigenvalue, with its sign turned, on top.
    got = schedules_sharpness.top_eigenvalue(-F.cross_entropy(net(x), y), params, 3000)
    assert got == pytest.approx(-values[0].item(), rel=1e-2)
    assert all(p.grad is None for p in params)


def test_top_eigenvalue_where_a_tensor_has_no_curvature():
    a, b = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(2))
    assert schedules_sharpness.top_eigenvalue((a**2).sum() + b.sum(), [a, b], 20) == pytest.approx(2)
    assert schedules_sharpness.top_eigenvalue((a**2).sum() * 0 + (b**3).sum() * 0, [a, b], 20) == 0


def test_sharpness_side_by_side_is_that_of_each_alone(task):
    x, y = task.train[0][:64], task.train[1][:64]
    nets = schedules_nets.Nets([0, 1, 2], 64, 10, **SMALL)
    got = schedules_sharpness.sharpness(nets, x, y, 200)
    for run in range(3):
        alone = Alone(nets, run)
        want = schedules_sharpness.top_eigenvalue(F.cross_entropy(alone(x), y), list(alone.parameters()), 200)
        assert got[run].item() == pytest.approx(want, rel=0.02)


def test_the_limit_of_a_quadratic_with_and_without_momentum():
    assert schedules_sharpness.lr_limit(4.0) == 0.5
    assert schedules_sharpness.lr_limit(-1.0) == math.inf
    for momentum in (0.0, 0.9):
        limit = schedules_sharpness.lr_limit(4.0, momentum)
        for part, ends in ((0.99, lambda w: abs(w) < 1e-2), (1.01, lambda w: abs(w) > 1e2)):
            w, v = 1.0, 0.0
            for _ in range(3000):
                v = momentum * v + 4.0 * w
                w -= part * limit * v
            assert ends(w)


def test_along_measures_from_the_start_to_the_end_of_each_run(task):
    plans = [plan(0.05, 30), plan(0.02, 20), plan(1e30, 30)]
    runs, rows = schedules_sharpness.along(task, plans, [0, 0, 0], every=10, iterations=60, batch=32, **SMALL)
    assert [[s for s, _, _ in r] for r in rows] == [[0, 10, 20, 30], [0, 10, 20], [0]]
    assert rows[0][0][1] == pytest.approx(rows[1][0][1], rel=0.05)
    assert rows[0][1][2] == 0.05 and len(runs.curves) == 3


@pytest.mark.parametrize("shape", schedules_sharpness.SHAPES)
def test_the_explorer_tells_what_became_of_the_run(task, shape):
    got = schedules_sharpness.explore(task, 0.1, 10, shape, steps=80, target=0.3, batch=64, **SMALL)
    assert len(got["lr"]) == 80 and max(got["lr"]) == pytest.approx(0.1)
    assert got["lr"][-1] == (0.1 if shape == "constant" else pytest.approx(0, abs=1e-3))
    assert got["at"] == list(range(0, 81, 10)) and len(got["limit"]) == 9
    assert got["verdict"] == f"30% reached at step {got['reached']}"


def test_the_explorer_tells_that_a_run_was_lost_or_never_arrived(task):
    lost = schedules_sharpness.explore(task, 1e30, 0, "constant", steps=40, batch=64, **SMALL)
    assert lost["verdict"] == "lost by step 10" and lost["reached"] is None
    slow = schedules_sharpness.explore(task, 1e-6, 0, "cosine", steps=20, batch=64, **SMALL)
    assert slow["verdict"] == "90% not reached in 20 steps"


def test_the_explorer_refuses_what_is_no_schedule(task):
    with pytest.raises(ValueError, match="a warm-up of 50 steps in a run of 40"):
        schedules_sharpness.explore(task, 0.1, 50, "cosine", steps=40)
    with pytest.raises(ValueError, match="shape is 'saw'; expected one of cosine, constant, one-cycle"):
        schedules_sharpness.explore(task, 0.1, 5, "saw")


# --- the contest


def test_schedules_of_the_contest():
    constant = schedules_contest.schedule(CONSTANT, 0.4, 6, 10, momentum=0.9)
    assert [lr for lr, _ in constant] == pytest.approx([0.4] * 6 + [0.04] * 4)
    assert {m for _, m in constant} == {0.9}
    cycle = schedules_contest.schedule(CYCLE, 0.4, 9, 30)
    assert len(cycle) == 9 and {m for _, m in cycle} == {0.0}
    assert cycle[0][0] == pytest.approx(0.4 / 25) and cycle[-1][0] == pytest.approx(0.4 / 1e5)
    with_momentum = schedules_contest.schedule(CYCLE, 0.4, 9, 30, momentum=0.9)
    assert with_momentum[0][1] == pytest.approx(0.95) and min(m for _, m in with_momentum) < 0.9
    with pytest.raises(ValueError, match="40 steps in a run of 30"):
        schedules_contest.schedule(CONSTANT, 0.4, 40, 30)


def trial(kind, lr, each, budget=100):
    return schedules_contest.Trial(kind, lr, 10, each, sum(schedules_contest.cost(each, budget)) / len(each))


def test_the_best_trial_pays_for_runs_that_never_arrive():
    trials = [
        trial(CONSTANT, 0.1, [10, 12, None]),
        trial(CONSTANT, 0.2, [30, 35, 40]),
        trial(CYCLE, 0.1, [20, 20, 20]),
        trial(CONSTANT, 0.4, [None, None, None]),
    ]
    assert schedules_contest.best(trials, CONSTANT).lr == 0.2
    assert not schedules_contest.at_edge(trials, CONSTANT) and schedules_contest.at_edge(trials, CYCLE)
    with pytest.raises(ValueError, match="no run of 'one-cycle' ever reached the target: lower it, allow"):
        schedules_contest.best([trial(CYCLE, 0.1, [None])], CYCLE)


def test_a_contest_tunes_races_and_divides(task):
    got = schedules_contest.contest(
        task, [0.03, 0.1], [40, 80], 100, 0.4, tuning=[10, 11], racing=[0, 1, 2], batch=64, **SMALL
    )
    assert len(got.trials) == 8 and {len(t.each) for t in got.trials} == {2}
    assert {k: len(v) for k, v in got.steps.items()} == {CONSTANT: 3, CYCLE: 3}
    for a, b, ratio in zip(got.steps[CONSTANT], got.steps[CYCLE], got.ratios, strict=True):
        assert ratio == (a or 100) / (b or 100)
    assert got.ratio == sorted(got.ratios)[1]
    seconds = schedules_contest.step_seconds(task, got, 100, steps=5, runs=1, batch=64, **SMALL)
    assert all(0 < s < 1 for s in seconds.values())


def test_seeds_serve_one_purpose(task):
    with pytest.raises(ValueError, match=r"seeds \[1\] are for tuning and for the race"):
        schedules_contest.contest(task, [0.1], [10], 20, 0.5, tuning=[1, 2], racing=[0, 1])


@pytest.mark.gpu
def test_training_on_the_gpu_is_training_on_the_cpu(task):
    there = schedules_nets.digits("cuda")
    plans = [plan(0.05, 20), plan(0.02, 20, momentum=0.9), plan(1e30, 20)]
    a, b = (schedules_nets.train(t, plans, [0, 1, 0], batch=32, **SMALL) for t in (task, there))
    assert torch.allclose(a.losses[:2], b.losses[:2], rtol=1e-2, atol=1e-3)
    assert [c[-1][0] for c in a.curves] == [c[-1][0] for c in b.curves]
    start = [schedules_sharpness.at_start(t, [0, 1], 100, **SMALL) for t in (task, there)]
    assert start[0] == pytest.approx(start[1], rel=0.02)

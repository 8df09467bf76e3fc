"Schedules, range test and steps to a target, against torch and fastai; and the checks' manners."

import math
import random
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from course_lib import data, models, schedules

# --- schedules


def test_fractions_end_where_torch_and_fastai_end():
    assert schedules.fractions(5) == [0, 0.25, 0.5, 0.75, 1]
    assert schedules.fractions(4, last=False) == [0, 0.25, 0.5, 0.75]


@pytest.mark.parametrize("steps", [0, 1, -3])
@pytest.mark.parametrize("last", [True, False])
def test_a_schedule_of_no_or_one_step_is_refused(steps, last):
    with pytest.raises(
        ValueError, match=rf"a schedule of {steps} steps has no start and end; expected at least 2"
    ):
        schedules.fractions(steps, last)


def test_a_warmup_longer_than_the_run_is_refused():
    assert schedules.part(50, 200) == 0.25
    assert schedules.part(0, 200) == 0
    assert schedules.part(200, 200) == 1
    for warmup, steps in ((80, 60), (-1, 60), (1, 0)):
        with pytest.raises(
            ValueError, match=f"a warm-up of {warmup} steps in a run of {steps}; expected from 0"
        ):
            schedules.part(warmup, steps)


@pytest.mark.parametrize("call", [
    lambda t, w: schedules.warmup_cosine(t, 1.0, w),
    lambda t, w: schedules.one_cycle(t, 1.0, w),
    lambda t, w: schedules.constant_then_drop(t, 1.0, w),
])  # fmt: skip
@pytest.mark.parametrize(
    "t, warmup, name",
    [(1.2, 0.1, "t is 1.2"), (-0.1, 0.1, "t is -0.1"), (0.5, 1.5, "is 1.5"), (math.nan, 0.1, "t is nan")],
)
def test_parts_outside_the_run_are_refused(call, t, warmup, name):
    with pytest.raises(ValueError, match=f"{name}; expected a part of the run, from 0 to 1"):
        call(t, warmup)


def test_warmup_cosine_by_hand():
    f = partial(schedules.warmup_cosine, peak=2.0, warmup=0.2, start=0.5, end=0.1)
    assert f(0.0) == 0.5
    assert f(0.1) == pytest.approx(1.25)
    assert f(0.2) == pytest.approx(2.0)
    assert f(0.6) == pytest.approx(1.05)
    assert f(1.0) == pytest.approx(0.1)
    assert schedules.warmup_cosine(0.0, 3.0, 0.0) == 3.0
    assert schedules.warmup_cosine(1.0, 3.0, 1.0) == 3.0


def test_constant_then_drop():
    lrs = [schedules.constant_then_drop(t, 0.5, 0.75) for t in schedules.fractions(8, last=False)]
    assert lrs == [0.5] * 6 + [0.05] * 2


@pytest.mark.parametrize("steps, pct", [(10, 0.3), (37, 0.25), (200, 0.45)])
def test_one_cycle_is_torchs(steps, pct):
    opt = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(opt, 0.7, total_steps=steps, pct_start=pct)
    arguments = schedules.as_torch(steps, pct)
    for step, t in enumerate(schedules.fractions(steps)):
        lr, momentum = schedules.one_cycle(t, 0.7, **arguments)
        assert opt.param_groups[0]["lr"] == pytest.approx(lr, rel=1e-6)
        assert opt.param_groups[0]["momentum"] == pytest.approx(momentum, rel=1e-6)
        opt.step()
        if step < steps - 1:
            scheduler.step()


@pytest.fixture(scope="module")
def fastai():
    "fastai's modules that this lesson uses, without its warning about torch.jit.script."
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from fastai.callback import schedule
        from fastai.data.core import DataLoaders
        from fastai.learner import Learner
        from fastai.optimizer import SGD
    return {"schedule": schedule, "DataLoaders": DataLoaders, "Learner": Learner, "SGD": SGD}


def test_one_cycle_is_fastais_combined_cos(fastai):
    lrs = fastai["schedule"].combined_cos(0.25, 0.9 / 25, 0.9, 0.9 / 1e5)
    moms = fastai["schedule"].combined_cos(0.25, 0.95, 0.85, 0.95)
    for t in schedules.fractions(53, last=False):
        assert schedules.one_cycle(t, 0.9) == pytest.approx((float(lrs(t)), float(moms(t))), rel=1e-5)


def batches(seed=1, n=260, size=40):
    d = data.digits()
    return (data.Batches(d.train[0][:n], d.train[1][:n], size=size, seed=seed),
            data.Batches(d.valid[0], d.valid[1], size=200))  # fmt: skip


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 10))


def learner(fastai, model, train, valid):
    loaders = fastai["DataLoaders"](train, valid, device="cpu")
    opt = partial(fastai["SGD"], mom=0.9)
    return fastai["Learner"](loaders, model, loss_func=F.cross_entropy, opt_func=opt)


def test_fit_one_cycle_is_ours_step_for_step(fastai):
    learn = learner(fastai, network(), *batches())
    with learn.no_logging():
        learn.fit_one_cycle(3, 0.4)
    theirs = learn.recorder.hps
    steps = len(theirs["lr"])
    ours = [schedules.one_cycle(t, 0.4) for t in schedules.fractions(steps, last=False)]
    assert [lr for lr, _ in ours] == pytest.approx([float(v) for v in theirs["lr"]], rel=1e-5)
    assert [m for _, m in ours] == pytest.approx([float(v) for v in theirs["mom"]], rel=1e-5)

    model, (train, _) = network(), batches()
    opt = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    supply = ((x, y) for _ in range(3) for x, y in train)
    for (x, y), (lr, momentum) in zip(supply, ours, strict=True):
        opt.param_groups[0].update(lr=lr, momentum=momentum)
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
    for a, b in zip(model.parameters(), learn.model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-4)


def test_the_range_test_is_fastais_lr_find(fastai, tmp_path):
    learn = learner(fastai, network(), *batches())
    learn.path = tmp_path
    with learn.no_logging():
        picked = learn.lr_find(1e-5, 100.0, 60, show_plot=False, suggest_funcs=fastai["schedule"].minimum)
    model, (train, _) = network(), batches()
    opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    ours = schedules.range_test(model, opt, F.cross_entropy, train, 1e-5, 100.0, 60, last=False)
    theirs = learn.recorder
    assert len(ours.lrs) == len(theirs.lrs) < 60
    assert ours.lrs == pytest.approx([float(v) for v in theirs.lrs], rel=1e-5)
    assert ours.smooth == pytest.approx([float(v) for v in theirs.losses], rel=1e-3)
    # fastai leaves out the first tenth and the last five before it picks.
    best = min(range(6, len(ours.lrs) - 5), key=lambda k: ours.smooth[k])
    assert picked.minimum == pytest.approx(ours.lrs[best] / 10, rel=1e-4)


# --- the range test


def test_the_picked_rate_trains_and_the_one_where_it_ended_does_not():
    def train(lr):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), models.mlp([64, 32, 10]))
        opt = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        losses = []
        for x, y in (b for _ in range(8) for b in batches()[0]):
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
        return sum(losses[-5:]) / 5

    model = nn.Sequential(nn.Flatten(), models.mlp([64, 32, 10]))
    opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    found = schedules.range_test(model, opt, F.cross_entropy, batches()[0], 1e-4, 100.0)
    assert train(found.lr) < 0.5 < 2 < train(found.lrs[-1])


def test_the_range_test_restores_even_where_it_fails():
    model, (train, _) = network(), batches()
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    model.eval()
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()

    def fails(out, y, calls=[]):  # noqa: B006
        calls.append(random.random() + np.random.rand() + torch.rand(()).item())
        if len(calls) == 5:
            raise RuntimeError("out of memory")
        return F.cross_entropy(out, y)

    with pytest.raises(RuntimeError, match="out of memory"):
        schedules.range_test(model, opt, fails, train)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not opt.state and opt.param_groups[0]["lr"] == 0.01
    assert not model.training and all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]


def test_the_range_test_keeps_gradients_that_were_there():
    model, (train, _) = network(), batches()
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = next(iter(train))
    F.cross_entropy(model(x), y).backward()
    before = [p.grad.clone() for p in model.parameters()]
    schedules.range_test(model, opt, F.cross_entropy, train, steps=5)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("low, high", [(0.0, 1.0), (1.0, 0.1), (-1.0, 1.0), (0.1, math.inf), (math.nan, 1.0)])
def test_a_range_that_is_none_is_refused(low, high):
    model = network()
    with pytest.raises(ValueError, match=r"a range from .*; expected 0 < low < high"):
        schedules.range_test(model, torch.optim.SGD(model.parameters(), lr=1), F.cross_entropy, [], low, high)


def test_a_range_test_without_batches_or_steps_is_refused():
    model = network()
    opt = torch.optim.SGD(model.parameters(), lr=1)
    with pytest.raises(ValueError, match="there are no batches"):
        schedules.range_test(model, opt, F.cross_entropy, [])
    with pytest.raises(ValueError, match="there are no batches"):
        schedules.range_test(model, opt, F.cross_entropy, iter(list(batches()[0])[:3]))
    with pytest.raises(ValueError, match="a schedule of 1 steps"):
        schedules.range_test(model, opt, F.cross_entropy, batches()[0], steps=1)


def test_a_loss_that_is_no_number_ends_the_test():
    model = nn.Linear(3, 1)
    opt = torch.optim.SGD(model.parameters(), lr=1)
    supply = [(torch.randn(5, 3), torch.randn(5, 1))]
    found = schedules.range_test(model, opt, F.mse_loss, supply, 1e-3, 1e30, 40)
    assert len(found.lrs) < 40 and math.isfinite(found.lr)


# --- steps to a target


def test_steps_to_target():
    nan = math.nan
    curves = [
        [(10, 0.5), (20, 0.9), (30, 0.8), (40, 0.9), (50, 0.95), (60, 0.2)],
        [(10, 0.9), (20, nan), (30, 0.9), (40, 0.9)],
        [(10, 0.1), (20, 0.9)],
    ]
    assert schedules.steps_to_target(curves, 0.9, hold=2) == ([40, 30, None], 40)
    assert schedules.steps_to_target(curves, 0.9, hold=1) == ([20, 10, 20], 20)
    assert schedules.steps_to_target(curves, 0.99, hold=1) == ([None, None, None], None)
    assert schedules.steps_to_target(curves[:1], 0.9, hold=7) == ([None], None)


def test_the_median_with_runs_that_never_arrive():
    assert schedules.median([30, None, 10]) == 30
    assert schedules.median([30, 10]) == 20
    assert schedules.median([10, None]) is None
    assert schedules.median([10, 20, None, None]) is None
    assert schedules.median([10, 20, 30, None]) == 25
    with pytest.raises(ValueError, match="the median of no runs"):
        schedules.median([])
    with pytest.raises(ValueError, match="hold is 0"):
        schedules.steps_to_target([[(1, 1.0)]], 0.5, hold=0)

"Lesson resizing: sizes, costs and pairs; the loop and the callback; the comparison; the figures."

import inspect

import matplotlib
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from course_lib import data, machine, meter, recorded, resizing, show
from course_lib.resizing import costs, figures, study

matplotlib.use("Agg")


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    import matplotlib.pyplot as plt

    monkeypatch.setenv("COURSE_CACHE", str(tmp_path))
    monkeypatch.setattr(machine, "has_gpu", lambda: False)
    yield
    plt.close("all")


# --- sizes --------------------------------------------------------------------------


@pytest.mark.parametrize("epochs", [1, 2, 3, 7, 12])
@pytest.mark.parametrize("step", [16, 32, 64])
def test_a_schedule_climbs(epochs, step):
    for sharp in range(1, epochs + 1):
        found = resizing.sizes(epochs, 64, 192, step, sharp)
        assert len(found) == epochs and found == sorted(found)
        assert found[-sharp:] == [192] * sharp and all(s < 192 for s in found[:-sharp])
        assert all((s - 64) % step == 0 for s in found)
        assert found[0] == (64 if sharp < epochs else 192)


@pytest.mark.parametrize(
    "case, sentence",
    [
        ((0, 64, 128, 32, 1), "epochs is 0; a schedule needs a whole number, at least 1"),
        ((2.5, 64, 128, 32, 1), "epochs is 2.5"),
        ((True, 64, 128, 32, 1), "epochs is True"),
        ((4, 64, 128, 0, 1), "step is 0"),
        ((4, 64, 128, 32, 0), "sharp is 0"),
        ((4, -64, 128, 32, 1), "low is -64"),
        ((1, 64, 128, 32, 2), "2 of 1 epochs at full size"),
        ((4, 64, 128, 48, 1), "from 64 to 128 is 64, which is no multiple of the step, 48"),
        ((4, 128, 64, 32, 1), "low is 128 and high is 64"),
    ],
)
def test_what_makes_no_schedule(case, sentence):
    with pytest.raises(ValueError, match=sentence):
        resizing.sizes(*case)


def test_one_epoch_is_sharp():
    assert resizing.sizes(1, 64, 128) == [128]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_resize_keeps_dtype_and_range(dtype):
    x = (255 * torch.rand(2, 3, 30, 30)).to(dtype)
    for size in (11, 30, 47):
        y = resizing.resize(x, size)
        assert y.dtype == dtype and y.shape == (2, 3, size, size)
        assert y.min() >= 0 and y.max() <= 255
    assert resizing.resize(x, 30) is x


def test_resize_refuses():
    for x, size in ((torch.zeros(3, 30, 30), 10), (torch.zeros(1, 3, 30, 30), 0)):
        with pytest.raises(ValueError, match=r"expected \[N, C, H, W\]"):
            resizing.resize(x, size)


def test_a_ratio_reads_well():
    ratio = resizing.paired_ratio({1: 3.0, 2: 4.0, 3: None}, {1: 2.0, 2: 2.0, 3: 5.0})
    assert ratio == (2.0, 1.5, float("inf")) and str(ratio) == "2.00 (1.50 to inf)"


@pytest.mark.parametrize("side", [16, 33, 96])
def test_the_network_takes_any_size(side):
    net = resizing.resnet(7, channels=3, width=4, blocks=(1, 2))
    x = torch.randint(0, 256, (2, 3, side, side + 5), dtype=torch.uint8)
    assert net(x).shape == (2, 7) and net(x).dtype == torch.float32


def test_flops_follow_the_pixels():
    net = resizing.resnet(7, width=8)
    count = [meter.of(net, torch.zeros(1, 1, s, s), portable=False).flops for s in (64, 128)]
    assert count[1] / count[0] == pytest.approx(4, rel=0.01)


# --- a loop and a callback ----------------------------------------------------------


def test_the_callback_does_what_the_loop_does():
    from functools import partial

    from fastai.callback.core import Callback
    from fastai.data.core import DataLoaders
    from fastai.learner import Learner
    from fastai.optimizer import SGD

    x = torch.randint(0, 256, (50, 1, 32, 32), dtype=torch.uint8)
    y = torch.randint(0, 5, (50,))
    schedule = [16, 24, 32]
    seen, losses = [], []

    class Watch(Callback):
        order = 99

        def before_batch(self):
            seen.append((self.training, self.x.shape[-1]))

        def after_loss(self):
            if self.training:
                losses.append(self.loss.item())

    def start():
        torch.manual_seed(3)
        return resizing.resnet(5, width=4, blocks=(1, 1)), data.Batches(x, y, size=20, seed=1)

    model, train = start()
    by_hand = resizing.fit(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), train, schedule)
    model, train = start()
    learn = Learner(
        DataLoaders(train, data.Batches(x, y, size=50), device="cpu"),
        model,
        loss_func=F.cross_entropy,
        opt_func=partial(SGD, mom=0.9),
        cbs=[resizing.size_callback(schedule), Watch()],
    )
    with learn.no_logging():
        learn.fit(3, lr=0.1)
        assert losses == pytest.approx(by_hand, abs=1e-5)
        sides = [side for training, side in seen if training]
        assert sides == [16] * 3 + [24] * 3 + [32] * 3
        assert all(side == 32 for training, side in seen if not training)
        with pytest.raises(ValueError, match="3 epochs and fit was asked for 2"):
            learn.fit(2, lr=0.1)


# --- graphs -------------------------------------------------------------------------


def test_every_size_is_a_graph():
    assert resizing.graphs([24, 32, 24, 40], dynamic=False) == [1, 2, 2, 3]
    assert resizing.graphs([24, 32, 40], dynamic=True)[-1] <= 2


# --- the comparison -----------------------------------------------------------------


def tiny(**changes):
    fields = {"side": 24, "low": 12, "step": 12, "n": 160, "n_valid": 40, "batch": 20, "width": 4,
              "blocks": (1,), "em": (8, 16), "fixed": (1, 2), "progressive": (2, 3)}  # fmt: skip
    return study.tasks(**fields | changes)["letters"]


def test_tasks_of_this_machine():
    for name, task in study.tasks().items():
        assert task.source == name and task.n % task.batch == 0
        for epochs in task.progressive:
            plan = task.schedule(epochs)
            assert plan[0] == task.low and plan[-1] == task.side and len(plan) == epochs


def test_runs_of_a_seed_start_alike_and_repeat():
    task = tiny()
    images = task.images()
    a, b = (study.train(task, images, [12, 24], seed=1) for _ in range(2))
    assert a.accuracy == b.accuracy and a.schedule == (12, 24) and a.seconds > 0
    assert all(torch.equal(p, q) for p, q in zip(a.network.parameters(), b.network.parameters(), strict=True))
    first, second, other = task.network(1), task.network(1), task.network(2)
    same = [torch.equal(p, q) for p, q in zip(first.parameters(), second.parameters(), strict=True)]
    assert all(same)
    assert not torch.equal(next(first.parameters()), next(other.parameters()))


def test_a_networks_seed_leaves_the_notebooks_alone():
    torch.manual_seed(5)
    want = torch.rand(3)
    torch.manual_seed(5)
    tiny().network(0)
    assert torch.equal(torch.rand(3), want)


def test_paired(capsys):
    task = tiny()
    found = study.paired(task, seeds=2)
    assert {arm: [len(r) for r in runs.values()] for arm, runs in found.runs.items()} == {
        "fixed": [2, 2], "progressive": [2, 2], "small": [1, 1],
    }  # fmt: skip
    assert [r.schedule for r in found.runs["progressive"][1]] == [(12, 24), (12, 12, 24)]
    assert found.runs["small"][0][0].schedule == (12, 12, 12)
    report = found.report()
    assert "letters, 2 seeds" in report and "equal time" in report
    assert study.verdict(found)
    with pytest.raises(ValueError, match="0 seeds"):
        study.paired(task, seeds=0)


def test_reach_and_at():
    points = [(4.0, 0.9), (1.0, 0.5), (2.0, 0.7)]
    assert study.reach(points, 0.8) == pytest.approx(3.0)
    assert study.reach(points, 0.4) == 1.0 and study.reach(points, 0.9) == 4.0
    assert study.reach(points, 0.95) is None
    assert study.at(points, 3.0) == pytest.approx(0.8)
    assert study.at(points, 0.5) == pytest.approx(0.25) and study.at(points, 9) == 0.9


def made(fixed, progressive, target=0.8):
    "A study from [(seconds, accuracy), …] by seed."

    def runs(points):
        return [study.Run((24,), t, 10 * t, a, None) for t, a in points]

    arms = {"fixed": fixed, "progressive": progressive, "small": {s: [(1.0, 0.5)] for s in fixed}}
    return study.Study(tiny(), target, {a: {s: runs(p) for s, p in d.items()} for a, d in arms.items()})


GOOD = {s: [(2.0, 0.7), (4.0, 0.9)] for s in range(3)}


def test_time_ratio_and_gain_at_equal_time():
    found = made(GOOD, {s: [(1.0 + 0.1 * s, 0.6), (2.0, 1.0)] for s in range(3)})
    assert found.spent("fixed") == {s: pytest.approx(3.0) for s in range(3)}
    assert found.ratio().median == pytest.approx(3 / 1.55) == found.ratio("flops").median
    assert found.spent("fixed", "flops") == {s: pytest.approx(30.0) for s in range(3)}
    assert found.saved() == pytest.approx(3 - 1.55)
    assert found.gains()[0] == pytest.approx(0.8 - 0.7 * 1.5 / 2)
    assert study.verdict(found).endswith("3 seeds: progressive was sooner on all of them")
    never = made(GOOD, {s: [(1.0, 0.2), (2.0, 0.6)] for s in range(3)})
    assert never.saved() == 0
    assert never.ratio() == (0, 0, 0) and "later, or never, on all" in study.verdict(never)
    assert all(g == pytest.approx(0.6 - 0.7) for g in never.gains().values())
    one = made({0: [(2.0, 0.9)]}, {0: [(1.0, 0.9)]})
    assert study.verdict(one) == "2.00 on one seed, which proves little"
    neither = made({0: [(1.0, 0.1)]}, {0: [(1.0, 0.1)]})
    assert study.verdict(neither).startswith("no verdict: neither run of seed 0 reached the target")
    assert "neither run of seed 0" in neither.report()
    mixed = made(GOOD, {0: [(1.0, 0.9)], 1: [(9.0, 0.9)], 2: [(1.0, 0.9)]})
    assert "they disagree" in study.verdict(mixed)


def test_what_is_noted(monkeypatch):
    noted = {}
    monkeypatch.setattr(
        recorded, "note", lambda name, value, unit, bar=None: noted.update({name: (value, bar)})
    )
    study.note(
        made(GOOD, {0: [(1.0, 0.9)], 1: [(1.5, 0.9)], 2: [(2.0, 0.9)]}), "resizing.time_ratio", (">=", 1.3)
    )
    assert {name: (round(value, 6), bar) for name, (value, bar) in noted.items()} == {
        "resizing.time_ratio": (2.0, (">=", 1.3)),
        "resizing.time_ratio_low": (1.5, None),
        "resizing.time_ratio_high": (3.0, None),
    }
    noted.clear()
    study.note(made({0: [(1.0, 0.1)]}, {0: [(1.0, 0.9)]}), "resizing.time_ratio")  # infinite
    study.note(made({0: [(1.0, 0.1)]}, {0: [(1.0, 0.1)]}), "resizing.time_ratio")
    assert noted == {}


def test_renormalised_changes_statistics_only():
    task = tiny()
    images = task.images()
    net = study.train(task, images, [12, 12], seed=0).network
    before = [p.clone() for p in net.parameters()]
    new = study.renormalised(net, images.train[0], 24)
    assert all(torch.equal(a, b) for a, b in zip(before, new.parameters(), strict=True))
    old_norm, new_norm = (next(m for m in n.modules() if isinstance(m, nn.BatchNorm2d)) for n in (net, new))
    assert not torch.equal(old_norm.running_mean, new_norm.running_mean)


def test_shapes_of_letters():
    names = tuple("aáøoõžz")
    found = study.shapes(names).tolist()
    assert found[0] == found[1] and found[2] == found[3] == found[4] and found[5] == found[6]
    assert len(set(found)) == 3


# --- costs and figures --------------------------------------------------------------


def test_files_come_back():
    x = data.letters(24, n=40, n_valid=40).train[0][:5]
    files = costs.encode(x, 48)
    back = costs.decode(files)
    assert back.shape == (5, 1, 48, 48) and back.dtype == torch.uint8
    assert (resizing.resize(back, 24).float() - x.float()).abs().mean() < 8


def test_step_seconds():
    task = tiny()
    files = costs.encode(task.images().train[0][:4], 48)
    for given in (None, files):
        found = costs.step_seconds(task, (12, 24), batch=4, files=given)
        assert set(found) == {12, 24} and min(found.values()) > 0
    assert study.flops(task, 24) > 3 * study.flops(task, 12)


@pytest.mark.parametrize("low", [64, 256])
@pytest.mark.parametrize("sharp", [1, 16])
@pytest.mark.parametrize("loader", [0.0, 0.5, 1.2])
def test_the_explorer(low, sharp, loader):
    found = costs.explore(low, sharp, loader)
    assert len(found["sides"]) == len(found["costs"]) == 16
    assert min(found["costs"]) >= loader and found["speedup"] >= 1
    figures.view_schedule(found)
    explorer = show.Explorer(costs.explore, figures.view_schedule, low=[64, 256], sharp=(1, 16, 1))
    assert set(explorer.defaults) == {"low", "sharp"}
    assert list(inspect.signature(costs.explore).parameters)[:3] == ["low", "sharp", "loader"]


def test_figures():
    x = data.letters(24, n=40, n_valid=40).train[0][:3]
    fig = figures.draw_sheet({"24": x, "12": resizing.resize(x, 12)})
    assert len(fig.axes) == 6
    assert len(figures.draw_beside({"a": x[0], "b": x[1]}).axes) == 2
    fig = figures.draw_cost({12: 1, 24: 4}, {12: 1.0, 24: 2.0})
    assert list(fig.axes[0].lines[1].get_ydata()) == [0.5, 1.0]
    figures.draw_reading({"a": {12: 0.5, 24: 0.7}}, trained=[12])
    fig = figures.draw_by_letter({"a": {"x": 0.5, "y": 1.0}, "b": {"x": 0.1, "y": 0.2}})
    assert [round(p.get_height()) for p in fig.axes[0].patches] == [50, 100, 10, 20]
    assert len(figures.draw_study([made(GOOD, GOOD), made(GOOD, GOOD)]).axes) == 2
    figures.draw_steps({"here": {12: 0.1, 24: 0.2}})

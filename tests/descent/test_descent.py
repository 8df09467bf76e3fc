"Lesson descent's library, and right answers that are written otherwise than the reference."

import math

import matplotlib
import pytest
import torch
from torch import nn
from torch.nn import functional as F

matplotlib.use("agg")

from course_lib import checking as core
from course_lib import data, descent, meter, models, show
from course_lib.descent import check, figures


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# Surfaces


def test_surfaces_have_their_minimum_where_they_say():
    zero = torch.zeros(2)
    for f, at in ((descent.bowl(7), zero), (descent.rosenbrock, torch.ones(2)), (descent.rugged, zero)):
        around = at + torch.randn(500, 2)
        assert f(at) == 0 and (f(around) > 0).all() and f(around.view(5, 100, 2)).shape == (5, 100)
        (grad,) = torch.autograd.functional.jacobian(f, at)[None]
        assert grad.abs().max() < 1e-6


def test_curvatures():
    hessian = torch.autograd.functional.hessian
    assert torch.allclose(hessian(descent.bowl(7), torch.randn(2)), torch.diag(torch.tensor([1.0, 7.0])))
    # The lesson says that no dip of the rugged surface is steeper than this.
    assert math.isclose(hessian(descent.rugged, torch.zeros(1)).item(), 10.2, rel_tol=1e-5)


# Walking


def test_one_per_cent_decides():
    f = descent.bowl(25)
    start = torch.ones(2, dtype=torch.float64)
    under, over = (f(descent.descend(f, start, part * 2 / 25, 300)[-1]) for part in (0.99, 1.01))
    assert under < 1e-4 * f(start) and over > 1e4 * f(start)


def test_steps_to_settle():
    # Along an axis of curvature λ a step multiplies by 1 - lr λ: here by 0.5 and by -0.25.
    assert descent.steps_to_settle(2.5, 0.5, to=0.4) == 2
    assert descent.steps_to_settle(25, 1.01 * 2 / 25) is None
    assert descent.steps_to_settle(25, 1e-9, most=100) is None
    plain = [descent.steps_to_settle(k, 2 / (k + 1)) for k in (100, 10_000)]
    heavy = [
        descent.steps_to_settle(k, (2 / (k**0.5 + 1)) ** 2, ((k**0.5 - 1) / (k**0.5 + 1)) ** 2)
        for k in (100, 10_000)
    ]
    assert 95 < plain[1] / plain[0] < 105
    assert 9 < heavy[1] / heavy[0] < 13


def test_momentum_and_adam_are_torchs_on_a_network():
    def losses(make):
        torch.manual_seed(0)
        net, (x, y) = models.mlp([64, 16, 10]), data.digits().train
        train = data.Batches(x.flatten(1), y, size=200, seed=0)
        return descent.fit(net, make(net.parameters()), F.cross_entropy, train, train, 2)[0]

    pairs = [
        (lambda p: descent.Momentum(p, 0.1), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
        (lambda p: descent.Adam(p, 0.01), lambda p: torch.optim.Adam(p, 0.01)),
    ]
    for mine, theirs in pairs:
        assert torch.allclose(torch.tensor(losses(mine)), torch.tensor(losses(theirs)), atol=1e-5)


def test_cost_of_a_step():
    p = nn.Parameter(torch.zeros(50, 20))
    p.grad = torch.ones(50, 20)
    # 4-byte numbers; mul_ reads and writes, add_ and sub_ also read another.
    momentum = meter.of(descent.Momentum([p], lr=0.1).step)
    assert (momentum.ops, momentum.bytes) == (3, 4 * 1000 * (2 + 3 + 3))
    assert meter.of(descent.Adam([p], lr=0.1).step).ops == 8


def test_fit_makes_no_sync_but_those_of_item():
    x, y = torch.randn(10, 4), torch.randint(3, (10,))
    net = models.mlp([4, 3])
    opt = descent.Momentum(net.parameters(), lr=0.1)
    c = meter.of(descent.fit, net, opt, F.cross_entropy, [(x, y)] * 2, [(x, y)], 1, portable=False)
    assert c.syncs == 3


def test_evaluate_puts_the_mode_back():
    net, x, y = models.convnet(dropout=0.5), torch.rand(20, 1, 8, 8), torch.randint(10, (20,))
    for training in (True, False):
        net.train(training)
        accuracy, loss = descent.evaluate(net, x, y)
        assert net.training is training
        assert (accuracy, loss) == descent.evaluate(net, x, y)
        assert 0 <= accuracy <= 1 and loss > 0


def test_jitter():
    x = torch.zeros(2, 1, 9, 15)
    x[:, :, 4, 7] = 1  # the centre
    assert torch.allclose(descent.jitter(x, shift=0, degrees=0), x, atol=1e-5)
    assert torch.allclose(descent.jitter(x, shift=0, degrees=180)[:, :, 4, 7], torch.ones(2, 1), atol=1e-3)
    many = torch.zeros(500, 1, 9, 15)
    many[:, 0, 4, 11] = 1  # 4 pixels right of the centre
    out = descent.jitter(many, shift=0, degrees=60)[:, 0]
    row, column = torch.meshgrid(torch.arange(9) - 4.0, torch.arange(15) - 7.0, indexing="ij")
    weight = out.sum((1, 2))
    radius = ((out * row).sum((1, 2)) ** 2 + (out * column).sum((1, 2)) ** 2).sqrt() / weight
    assert (radius - 4).abs().max() < 0.3, "a turn keeps the distance, in a picture that isn't square too"
    assert (out * row).sum((1, 2)).min() < -2 and (out * row).sum((1, 2)).max() > 2
    many = torch.zeros(500, 1, 9, 15)
    many[:, 0, 4, 7] = 1
    out = descent.jitter(many, shift=2, degrees=0)[:, 0]
    assert 1.7 < (out * column).sum((1, 2)).max() <= 2.01 and 1.7 < (out * row).sum((1, 2)).max() <= 2.01


def test_an_order_is_judged_by_its_pairs():
    order = ["a", "b", "c", "d"]
    assert "6 of 6" in descent.judged_order(order, order) and "0 of 6" in descent.judged_order(
        order[::-1], order
    )
    assert "5 of 6" in descent.judged_order(["b", "a", "c", "d"], order)
    for odd in (["a"], ["a", "b", "c", "e"], "abc", [1, 2, 3, 4]):
        assert "expected these four" in descent.judged_order(odd, order)


# The explorer and the figures


def test_walk_turns_at_the_limit():
    for kappa in (2, 25, 400):
        for part, grows in ((0.99, False), (1.01, True)):
            walk = figures.walk(part, kappa, steps=500)
            ends = descent.bowl(kappa)(walk["path"])
            assert (ends[-1] > ends[0]) == grows
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
    plt.close("all")


def test_the_explorer_redraws_once_for_each_move(monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda fig: shown.append(fig))
    explorer = show.Explorer(
        figures.walk,
        figures.draw_walk,
        lr_over_limit=(0.05, 2.0, 0.01),
        kappa=[2, 25, 400],
        momentum=(0.0, 0.95, 0.05),
    )
    explorer.static()
    box = explorer.interact()
    before = len(shown)
    box.children[0].value = 1.01
    box.children[1].value = 400
    box.children[2].value = 0.9
    assert len(shown) == before + 3


# Right answers that are written otherwise


def with_backward(f, start, lr, steps):
    w = start.detach().clone().requires_grad_()
    path = torch.empty(steps + 1, *start.shape, dtype=start.dtype)
    path[0] = start
    for k in range(steps):
        w.grad = None
        f(w).backward()
        with torch.no_grad():
            w -= lr * w.grad
        path[k + 1] = w.detach()
    return path


def with_an_optimiser(f, start, lr, steps):
    w = nn.Parameter(start.clone())
    opt = torch.optim.SGD([w], lr=lr)
    path = [start.clone()]
    for _ in range(steps):
        opt.zero_grad()
        f(w).backward()
        opt.step()
        path.append(w.detach().clone())
    return torch.stack(path)


def lanczos(product, size):
    q, beta, before = torch.randn(size), 0.0, torch.zeros(size)
    q, alphas, betas = q / q.norm(), [], []
    for _ in range(min(size, 120)):
        w = product(q) - beta * before
        alphas.append(torch.dot(w, q).item())
        w = w - alphas[-1] * q
        beta = w.norm().item()
        if beta < 1e-6 * abs(alphas[0]):
            break
        betas.append(beta)
        before, q = q, w / beta
    n = len(alphas)
    off = torch.diag(torch.tensor(betas[: n - 1], dtype=torch.float64), 1)
    tridiagonal = torch.diag(torch.tensor(alphas, dtype=torch.float64)) + off + off.T
    return 2 / torch.linalg.eigvalsh(tridiagonal)[-1]


def by_length(product, size):
    v = torch.randn(size)
    for _ in range(200):
        v = product(v / v.norm())
    return 2 / float(v.norm())


class ByForeach(descent.Momentum):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            for p in params:
                self.state[p].setdefault("v", torch.zeros_like(p))
            velocities = [self.state[p]["v"] for p in params]
            grads = torch._foreach_add([p.grad for p in params], params, alpha=group["weight_decay"])
            torch._foreach_mul_(velocities, group["momentum"])
            torch._foreach_add_(velocities, grads)
            torch._foreach_add_(params, velocities, alpha=-group["lr"])


class AsTorchWritesIt(descent.Adam):
    "Another order of the same arithmetic."

    def step(self):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                s = self.state[p]
                s["step"] = s.get("step", 0) + 1
                g = p.grad.detach() + group["weight_decay"] * p.detach()
                s["m"] = s.get("m", torch.zeros_like(g)).lerp(g, 1 - b1)
                s["v"] = b2 * s.get("v", torch.zeros_like(g)) + (1 - b2) * g * g
                root = s["v"].sqrt() / math.sqrt(1 - b2 ** s["step"]) + group["eps"]
                p.data = p.data - group["lr"] / (1 - b1 ** s["step"]) * s["m"] / root


def clears_afterwards(model, opt, loss_fn, train, valid, epochs):
    "fastai's order, detached losses, inference mode, gradients cleared through the model."
    losses, valid_losses = [], []
    for _ in range(epochs):
        model.train()
        for x, y in train:
            loss = loss_fn(model(x), y)
            loss.backward()
            opt.step()
            model.zero_grad()
            losses.append(loss.detach())
        model.eval()
        with torch.inference_mode():
            sums = [(loss_fn(model(x), y) * len(x), len(x)) for x, y in valid]
        valid_losses.append(sum(s for s, _ in sums) / sum(n for _, n in sums))
    return tuple(losses), valid_losses


RIGHT = [
    (check.descend, with_backward),
    (check.descend, with_an_optimiser),
    (check.largest_stable_lr, lanczos),
    (check.largest_stable_lr, by_length),
    (check.momentum, ByForeach),
    (check.momentum, torch.optim.SGD),
    (check.adam, AsTorchWritesIt),
    (check.adam, torch.optim.Adam),
    (check.fit, clears_afterwards),
]


@pytest.mark.parametrize("check, answer", RIGHT, ids=lambda x: getattr(x, "__name__", None))
def test_other_right_answers_are_accepted(check, answer, capsys):
    for _ in range(3):
        check(answer)
    assert set(capsys.readouterr().out.splitlines()) == {f"{check.exercise} passed: {check.passed}"}


def test_checks_do_not_depend_on_the_notebooks_state(capsys):
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad(), torch.device("meta"):
            for f, answer in (
                (check.descend, descent.descend),
                (check.largest_stable_lr, descent.largest_stable_lr),
                (check.momentum, descent.Momentum),
                (check.adam, descent.Adam),
                (check.fit, descent.fit),
            ):
                f(answer)
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(capsys.readouterr().out.splitlines()) == 5


def test_what_a_check_says():
    def says(f, answer):
        with pytest.raises(core.Wrong) as e:
            f(answer)
        return str(e.value)

    assert "expected a finite number, got nan" in says(check.largest_stable_lr, lambda p, n: math.nan)
    assert "vector of shape [37]" in says(check.largest_stable_lr, lambda p, n: p(torch.ones(3)).norm())
    assert "expected a positive number" in says(check.largest_stable_lr, lambda p, n: -1.0)
    assert "one per cent under" in says(check.largest_stable_lr, lambda p, n: 1e6)
    assert "one per cent over" in says(check.largest_stable_lr, lambda p, n: 1e-9)
    assert "the optimiser's class" in says(check.momentum, lambda params, lr: 3)
    assert "expected (losses, valid_losses)" in says(check.fit, lambda *a: (descent.fit(*a)[0],))

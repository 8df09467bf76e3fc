"""Checks of descent. Oracles: closed forms, derivatives by hand, eigvalsh, torch.optim."""

import copy
import gc
import math
import weakref

import torch
from torch import nn

from course_lib import checking as core
from course_lib.checking import yours  # noqa: F401


def _draw(low, high):
    return low + (high - low) * torch.rand(()).item()


def _randn(*shape):
    return torch.randn(shape, dtype=torch.float64)


def _hessian(eigenvalues, first=None):
    "A symmetric matrix with these eigenvalues in random directions; `first` fixes the first direction."
    m = _randn(len(eigenvalues), len(eigenvalues))
    if first is not None:
        m[:, 0] = first
    q, _ = torch.linalg.qr(m)
    return q @ torch.diag(eigenvalues) @ q.T


# descent.1


@core.exercise(
    "descent.1", "every point of the path is right in 1, 5 and 3x2 dimensions, and the start is untouched"
)
def descend(answer):
    n, steps, lr = 5, 9, _draw(0.05, 0.3)
    hessian, centre, start = _hessian(torch.rand(n).double() * 3 + 0.2), _randn(n), _randn(n)
    calls = []

    def f(w):
        calls.append(1)
        return (w - centre) @ hessian @ (w - centre) / 2

    want = [start]
    for _ in range(steps):  # this quadratic's gradient is H (w - centre)
        want.append(want[-1] - lr * hessian @ (want[-1] - centre))
    _path(_walk(answer, f, start, lr, steps), want, f"a bowl in {n} dimensions at lr {lr:.3g}")
    core.require(
        len(calls) <= steps + 1,
        f"f was evaluated {len(calls)} times for {steps} steps: expected once a step, by autograd",
    )

    scale, start, lr = torch.randn(3, 2), torch.randn(3, 2), _draw(0.1, 0.9)
    want = [start]
    for _ in range(6):
        want.append(want[-1] - lr * scale * torch.cos(want[-1]))
    got = _walk(answer, lambda w: (scale * torch.sin(w)).sum(), start, lr, 6)
    _path(got, want, f"a wavy surface over 3x2 numbers at lr {lr:.3g}")

    lr = _draw(2.1, 2.4)  # past the limit, which is 2 here: the path may explode
    want = [torch.tensor([-1.5 * (1 - lr) ** k]) for k in range(5)]
    got = _walk(answer, lambda w: (w**2).sum() / 2, torch.tensor([-1.5]), lr, 4)
    _path(got, want, f"w²/2 at lr {lr:.3g}, which diverges")

    start = torch.randn(2)
    _path(_walk(answer, lambda w: (w**4).sum(), start, 0.01, 0), [start], "any surface")


def _walk(answer, f, start, lr, steps):
    given = start.clone()
    got = core.call(answer, f, given, lr, steps, mutates=(1,))
    core.require(torch.equal(given.detach(), start), "the walk moved its start; step from a copy")
    core.require(
        not given.requires_grad and given.grad is None, "start itself was given a gradient; mark a copy"
    )
    return got


def _path(got, want, where):
    want = torch.stack(want)
    what = f"a path of {len(want) - 1} steps on {where}"
    if not isinstance(got, torch.Tensor):
        raise core.Wrong(f"{what}: expected one tensor of shape {list(want.shape)}, got {core.kind(got)}")
    core.require(
        got.shape == want.shape,
        f"{what}: expected shape {list(want.shape)}, the start and every point after, got {list(got.shape)}",
    )
    core.require(not got.requires_grad, f"{what} still hangs on autograd's graph: detach each point")
    core.close(got[0], want[0], f"{what}: its first point is the start")
    for k in range(1, len(want)):
        core.close(got[k], want[k], f"{what}: the point after step {k}", rtol=1e-4, atol=1e-5)


# descent.2

PRODUCTS = 200


@core.exercise(
    "descent.2", "on four bowls one per cent under your rate settles, and one per cent over it explodes"
)
def largest_stable_lr(answer):
    for n, scale, second in (
        (37, _draw(0.2, 0.6), 0.5),
        (220, _draw(200, 400), 0.9),
        (91, _draw(0.001, 0.01), 0.95),
    ):
        _stable(answer, _hessian(_spectrum(n, second) * scale), f"a bowl in {n} dimensions")
    n = 60
    first = _randn(n)
    first[0] = 0
    first[1:] -= first[1:].mean()
    values = torch.full((n,), 0.95, dtype=torch.float64)  # so that too few products show
    values[0] = 1.0
    where = "a bowl whose steepest direction is at right angles to a vector of ones and to the first axis"
    _stable(answer, _hessian(values * _draw(2, 9), first), where)


def _spectrum(n, second):
    values = torch.rand(n).double() * second
    values[0], values[1] = 1.0, second
    return values


def _stable(answer, hessian, where):
    n, matrix, calls = len(hessian), hessian.float(), []

    def product(v):
        calls.append(1)
        if not isinstance(v, torch.Tensor) or v.shape != (n,):
            raise core.Wrong(f"product takes a vector of shape [{n}] and was given {core.kind(v)}")
        if len(calls) > PRODUCTS:
            raise core.Wrong(
                f"product was called more than {PRODUCTS} times on {where}: use power iteration, which needs "
                "few products in any dimension"
            )
        return matrix @ v.to(matrix.dtype)

    what = f"the largest stable lr of {where}"
    lr = core.number(core.call(answer, product, n), what)
    core.require(lr > 0, f"{what}: expected a positive number, got {lr:.4g}")
    top = torch.linalg.eigvalsh(hessian)[-1].item()
    if _growth(hessian, 0.99 * lr) > 1:
        raise core.Wrong(f"{what}: got {lr:.5g}, but even one per cent under it gradient descent explodes")
    if _growth(hessian, 1.01 * lr) < 1e6:
        raise core.Wrong(f"{what}: got {lr:.5g}, but even one per cent over it gradient descent settles")
    core.close(lr, 2 / top, f"{what}, as 2 / λmax by eigvalsh", rtol=0.005)


def _growth(hessian, lr, steps=3000):
    "The height after `steps` steps of gradient descent from a random point, over the height before."
    step = torch.eye(len(hessian), dtype=torch.float64) - lr * hessian
    start = _randn(len(hessian))
    end = torch.linalg.matrix_power(step, steps) @ start
    growth = ((end @ hessian @ end) / (start @ hessian @ start)).item()
    return float("inf") if math.isnan(growth) else growth


# descent.3 and descent.4


@core.exercise(
    "descent.3", "12 steps equal torch.optim.SGD's in three groups, with gradients that come and go"
)
def momentum(answer):
    def options():
        return {"lr": _draw(0.01, 0.2), "momentum": _draw(0.3, 0.95), "weight_decay": _draw(0.05, 0.5)}

    def oracle(params, **kw):
        return torch.optim.SGD(params, foreach=False, **kw)

    _as_torch(answer, oracle, options, {"momentum": 0.0})


@core.exercise(
    "descent.4", "12 steps equal torch.optim.Adam's in three groups, with gradients that come and go"
)
def adam(answer):
    def options():
        betas, eps = (_draw(0.5, 0.95), _draw(0.9, 0.999)), 10 ** _draw(-6, -1)
        return {"lr": _draw(0.01, 0.2), "betas": betas, "eps": eps, "weight_decay": _draw(0.05, 0.5)}

    def oracle(params, **kw):
        return torch.optim.Adam(params, foreach=False, fused=False, **kw)

    _as_torch(answer, oracle, options, {"betas": (0.0, 0.99)})


def _as_torch(answer, oracle, options, edge):
    # Two optimisers alive at once, one of them without weight decay: nothing may be shared.
    many = _Twins(answer, oracle, [
        options() | {"params": _params((4, 3), (7,))},
        options() | edge | {"params": _params((2, 1, 5), ())},
        options() | {"params": _params((4, 3), (3, 4))},
    ])  # fmt: skip
    one = _Twins(answer, oracle, [options() | {"weight_decay": 0.0, "params": _params((4, 3), (6, 5))}])
    # By parameter of the first: in which of three steps it has a gradient, and from which step on.
    many.rhythm = {1: lambda step: step > 2, 3: lambda step: step % 3 != 2, 5: lambda step: False}
    for step in range(1, 13):
        if step == 8:
            many.scale_lr(_draw(0.2, 0.6))  # as a schedule does
        many.step(step)
        one.step(step)
    # A second optimiser on parameters that had one begins anew.
    groups = [options() | {"params": _params((4, 3))}]
    for which in "first", "second":
        again = _Twins(answer, oracle, groups)
        for step in range(1, 4):
            again.step(step, f" of the {which} of two optimisers on it")
        groups = again.mine


def _params(*shapes):
    "Parameters in float64, so that a small slip shows, and in another memory order than their shape's."
    values = (_randn(*s[::-1]) for s in shapes)
    return [nn.Parameter(v.permute(*range(v.ndim - 1, -1, -1)) if v.ndim else v) for v in values]


class _Twins:
    "The learner's optimiser and torch's, on equal parameters that get equal gradients."

    def __init__(self, answer, oracle, groups):
        self.mine, twin = groups, copy.deepcopy(groups)
        self.words = [", ".join(f"{k} {_short(v)}" for k, v in g.items() if k != "params") for g in groups]
        self.every = [  # (the learner's parameter, torch's, the number of their group)
            (p, q, i)
            for i, (a, b) in enumerate(zip(groups, twin, strict=True))
            for p, q in zip(a["params"], b["params"], strict=True)
        ]
        for p, _, _ in self.every:
            p.grad = None
        self.nearly = "keep what you store in the parameter's own dtype"
        self.nearly += ", and see where eps goes" if "eps" in groups[0] else ""
        self.rhythm = {}
        lr = groups[0]["lr"]
        # Each constructor gets dicts of its own: torch fills in what is missing.
        self.answer = core.call(answer, [dict(g) for g in groups], lr=lr, mutates=(0,))
        if not isinstance(self.answer, torch.optim.Optimizer):
            raise core.Wrong(
                f"expected the optimiser's class, which makes an optimiser; it made {core.kind(self.answer)}"
            )
        self.oracle = oracle([dict(g) for g in twin], lr=lr)

    def scale_lr(self, factor):
        for opt in (self.answer, self.oracle):
            for group in opt.param_groups:
                group["lr"] *= factor

    def step(self, step, whose=""):
        kept = []
        for i, (p, q, _) in enumerate(self.every):
            if not self.rhythm.get(i, lambda step: True)(step):
                p.grad = q.grad = None
            elif p.grad is None:
                p.grad = torch.randn_like(p) * 10 ** _draw(-7, 1)
                q.grad = p.grad.clone()
            else:  # in place, as backward adds: an answer that kept the tensor itself sees it change
                p.grad.normal_().mul_(10 ** _draw(-7, 1))
                q.grad.copy_(p.grad)
            kept.append(None if p.grad is None else p.grad.clone())
        self.answer.step()
        self.oracle.step()
        for (p, q, group), grad in zip(self.every, kept, strict=True):
            shape = f"{list(p.shape)}{' without a gradient' if grad is None else ''}"
            what = (
                f"after step {step}{whose}, the parameter of shape {shape} in the group {self.words[group]}"
            )
            core.require(
                p.is_leaf and p.requires_grad, f"{what} is no longer a leaf that requires a gradient"
            )
            if torch.allclose(p, q, rtol=1e-5, atol=1e-7) and not torch.allclose(
                p, q, rtol=1e-10, atol=1e-12
            ):
                raise core.Wrong(f"{what} is nearly right: {self.nearly}")
            core.close(p, q, what, rtol=1e-10, atol=1e-12)
            same = p.grad is None if grad is None else p.grad is not None and torch.equal(p.grad, grad)
            core.require(
                same, f"{what}: step changed p.grad, to which others may still be adding; leave it as it is"
            )


def _short(v):
    return "(" + ", ".join(f"{x:.3g}" for x in v) + ")" if isinstance(v, tuple) else f"{v:.3g}"


# descent.5


@core.exercise(
    "descent.5", "weights, losses and modes are right with ragged batches, and no step's graph stays alive"
)
def fit(answer):
    _fit(answer, epochs=4, sizes=(8, 8, 5), valid_sizes=(7, 7, 2))
    _fit(answer, epochs=2, sizes=(6, 6, 6, 1), valid_sizes=(9, 4))


def _fit(answer, epochs, sizes, valid_sizes):
    features, scale, lr = 4, _draw(0.5, 2), _draw(0.02, 0.1)
    model = _Linear(features)
    w, b = model.w.detach().clone(), model.b.detach().clone()
    opt = _SGD(model.parameters(), lr=lr)
    # The last feature tells the model which set a sample is from.
    passes = [[_batch(n, features, _TRAIN) for n in sizes] for _ in range(epochs)]
    train, valid = _Loader(passes), _Loader([[_batch(n, features, _VALID) for n in valid_sizes]])
    model.eval()  # as an earlier validation leaves it

    def loss_fn(out, y):
        return scale * ((out - y) ** 2).mean()

    got = core.call(answer, model, opt, loss_fn, train, valid, epochs, mutates=(0, 1))

    losses, valid_losses, grads = [], [], []
    for batches in passes:
        for x, y in batches:  # the gradient of scale * mean (xw + b - y)² by hand
            off = x @ w + b - y
            losses.append((scale * (off**2).mean()).item())
            grads.append(2 * scale / len(y) * torch.cat([off @ x, off.sum()[None]]))
            w, b = w - lr * grads[-1][:-1], b - lr * grads[-1][-1]
        x, y = (torch.cat(t) for t in zip(*valid.passes[0], strict=True))
        valid_losses.append((scale * ((x @ w + b - y) ** 2).mean()).item())

    model.judge(len(losses), epochs * len(valid_sizes))
    core.equal(len(opt.grads), len(losses), f"opt.step() in {epochs} epochs of {len(sizes)} batches", "calls")
    for i, (g, want) in enumerate(zip(opt.grads, grads, strict=True)):
        core.close(
            g,
            want,
            f"the gradient that step {i + 1} of {len(losses)} uses (is it zeroed before each backward?)",
        )
    core.close(torch.cat([model.w, model.b[None]]), torch.cat([w, b[None]]), "the weights after training")
    if not isinstance(got, tuple | list) or len(got) != 2:
        raise core.Wrong(f"expected (losses, valid_losses) to be returned, got {core.kind(got)}")
    for series, want, name in zip(got, (losses, valid_losses), ("losses", "valid_losses"), strict=True):
        if not isinstance(series, list | tuple):
            raise core.Wrong(f"{name}: expected a list of {len(want)} numbers, got {core.kind(series)}")
        core.equal(
            len(series), len(want), f"the length of {name} for {epochs} epochs of {len(sizes)} batches"
        )
        for i, (value, exact) in enumerate(zip(series, want, strict=True)):
            hint = f" (batches of {list(valid_sizes)}, every sample of equal weight)" * (
                name == "valid_losses"
            )
            core.close(value, exact, f"{name}[{i}]{hint}", rtol=1e-5)


_TRAIN, _VALID = 1.0, -1.0


def _batch(n, features, kind):
    return torch.cat([_randn(n, features - 1), torch.full((n, 1), kind, dtype=torch.float64)], 1), _randn(n)


class _Loader:
    "Batches that differ from pass to pass, as a shuffling loader's do."

    def __init__(self, passes):
        self.passes, self.count = passes, 0

    def __len__(self):
        return len(self.passes[0])

    def __iter__(self):
        self.count += 1
        yield from self.passes[(self.count - 1) % len(self.passes)]


class _SGD(torch.optim.SGD):
    "SGD that keeps each gradient it steps with."

    def __init__(self, params, lr):
        super().__init__(params, lr=lr, foreach=False)
        self.grads = []

    @torch.no_grad()
    def step(self, closure=None):
        w, b = self.param_groups[0]["params"]
        if w.grad is None or b.grad is None:
            raise core.Wrong(
                "opt.step() found no gradients: call backward() before it, and zero_grad() before both"
            )
        self.grads.append(torch.cat([w.grad, b.grad[None]]).clone())
        return super().step(closure)


class _Linear(nn.Module):
    "A linear model that notes how it is used, and how many steps' graphs are alive."

    def __init__(self, features):
        super().__init__()
        self.w, self.b = nn.Parameter(_randn(features)), nn.Parameter(_randn(1)[0])
        self.seen = {_TRAIN: [], _VALID: []}
        self.graphs, self.most = [], 0

    def forward(self, x):
        self.seen[x[0, -1].item()].append((self.training, torch.is_grad_enabled()))
        if sum(ref() is not None for ref in self.graphs) > 2:
            gc.collect()
        self.most = max(self.most, sum(ref() is not None for ref in self.graphs))
        return _Trace.apply(x @ self.w + self.b, self.graphs)

    def judge(self, steps, batches):
        train, valid = self.seen[_TRAIN], self.seen[_VALID]
        core.equal(len(train), steps, "training batches that the model saw")
        core.equal(len(valid), batches, "validation batches that the model saw")
        late = [i + 1 for i, (training, _) in enumerate(train) if not training]
        core.require(
            not late,
            f"eval mode was on in training step {min(late, default=0)}: call model.train() each epoch",
        )
        core.require(
            not any(t for t, _ in valid), "the model was in train mode while validating: call model.eval()"
        )
        core.require(
            not any(g for _, g in valid), "validation recorded a graph: put it under torch.no_grad()"
        )
        gc.collect()
        alive = sum(ref() is not None for ref in self.graphs)
        core.require(
            self.most <= 2 and alive <= 1,
            f"the graphs of {max(self.most, alive)} training steps were alive at once: keep loss.item() or "
            "loss.detach(), not the loss itself",
        )


class _Trace(torch.autograd.Function):
    "The identity, with a token in the graph that lives as long as the graph does."

    @staticmethod
    def forward(ctx, x, graphs):
        ctx.token = _Token()
        graphs.append(weakref.ref(ctx.token))
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _Token:
    pass

"Checks of descent. Oracles: gradients by hand, eigvalsh, torch.optim, a loop by hand, all nine windows."

import copy
import itertools
import math
import random
import weakref

import torch
from torch import nn
from torch.nn import functional as F

from course_lib import checking as core
from course_lib.checking import yours  # noqa: F401


def _draw(low, high):
    return low + (high - low) * torch.rand(()).item()


def _randn(*shape):
    return torch.randn(shape, dtype=torch.float64)


def _hessian(eigenvalues):
    "A symmetric matrix with these eigenvalues in random directions."
    q, _ = torch.linalg.qr(_randn(len(eigenvalues), len(eigenvalues)))
    return q @ torch.diag(eigenvalues) @ q.T


@core.exercise("descent.1", "the path is right in 0 to 2 dimensions, and the start is untouched")
def descend(answer):
    _descend(answer, (), torch.float32, 1)
    _descend(answer, (5,), torch.float64, 20)  # gradients are large
    _descend(answer, (3, 2), torch.float64, 1e-7)  # gradients are small


def _descend(answer, shape, dtype, distance):
    n, steps, lr, calls = math.prod(shape), random.randint(3, 9), _draw(0.05, 0.3), []
    hessian, centre = _hessian(torch.rand(n).double() * 3 + 0.2), _randn(n)
    start = (centre + distance * _randn(n)).to(dtype).reshape(shape)
    start = start.mT.contiguous().mT if shape[1:] else start  # in another order of memory
    before, what = start.clone(), f"the path from a start of shape {list(shape)}"

    def f(w):
        calls.append(1)
        if not isinstance(w, torch.Tensor) or w.shape != shape:
            raise core.Wrong(f"{what}: f was given {core.kind(w)}")
        off = w.reshape(-1) - centre.to(dtype)
        return off @ hessian.to(dtype) @ off / 2

    got = core.call(answer, f, start, lr, steps, mutates=(1,))
    kept = torch.equal(start, before) and not start.requires_grad and start.grad is None
    core.require(kept, f"{what}: the start was changed; work on a copy of it")
    core.equal(len(calls), steps, f"{what}: f is evaluated once in each of {steps} steps", "calls")
    want = [before.reshape(-1).double()]
    for _ in range(steps):  # this quadratic's gradient is H (w - centre)
        want.append(want[-1] - lr * hessian @ (want[-1] - centre))
    added, total = [want[0]], torch.zeros_like(want[0])
    for _ in range(steps):  # what adding gradients gives
        total = total + hessian @ (added[-1] - centre)
        added.append(added[-1] - lr * total)
    tolerance = (1e-4, 1e-5) if dtype == torch.float32 else (1e-12, 1e-12)
    want = torch.stack(want).reshape(-1, *shape).to(dtype)
    core.equal(core.kind(got), core.kind(want), f"{what}, {steps} steps")
    wrong, alike = not torch.allclose(got, want, *tolerance), torch.equal(got, got[-1:].expand_as(got))
    core.require(
        not wrong or not alike,
        f"{what}: the points are equal; does it hold one tensor many times?",
    )
    added = torch.stack(added).reshape(want.shape).to(dtype)
    core.require(
        not wrong or not torch.allclose(got, added, *tolerance),
        f"{what}: each step uses the sum of all gradients so far; clear .grad before each backward()",
    )
    core.close(got, want, f"{what}, by [step, …]", *tolerance)
    core.require(not got.requires_grad, f"{what} still holds autograd's graph: detach each point")


@core.exercise("descent.2", "on five bowls your rate is 2 / λmax, from at most 200 products")
def largest_stable_lr(answer):
    spread = torch.cat([torch.ones(1), torch.rand(219) * 0.9]).double()
    _stable(answer, _hessian(spread * _draw(200, 400)))
    for n, scale in (14, _draw(0.2, 0.6)), (random.randint(700, 799), _draw(5e-9, 1e-8)):
        mix = _randn(n - 1)
        _stable(answer, _flat(n, mix - mix.mean()) * scale)  # steepest at right angles to a vector of ones
    first, second = (_stable(answer, _flat(202, _randn(3)) * _draw(2, 9)) for _ in range(2))
    same = torch.cosine_similarity(first.double(), second.double(), 0).abs() > 0.999
    core.require(
        not same, "two calls began with the same vector, which may be orthogonal to the steepest direction"
    )


def _flat(n, mix):
    "A Hessian just 10 % steeper in one direction, which `mix` gives in some axes, never the first."
    steep = torch.zeros(n, dtype=torch.float64)
    steep[torch.randperm(n - 1)[: len(mix)] + 1] = F.normalize(mix, dim=0)
    return torch.eye(n) + 0.1 * torch.outer(steep, steep)


def _stable(answer, hessian):
    "Judge the answer on one bowl; returns the first vector that it multiplied."
    n, limit, vectors = len(hessian), 2 / torch.linalg.eigvalsh(hessian)[-1].item(), []
    matrix, what = hessian.float(), f"the largest stable lr in {n} dimensions"

    def product(v):
        if not isinstance(v, torch.Tensor) or v.shape != (n,):
            raise core.Wrong(f"product takes a vector of shape [{n}] and was given {core.kind(v)}")
        vectors.append(v.detach().clone())
        core.require(len(vectors) <= 200, f"{what}: product was called more than 200 times")
        return matrix @ v.to(matrix.dtype)

    lr = core.number(core.call(answer, product, n), what)
    effect = "gradient descent explodes with it" if lr > limit else "longer steps are stable, too"
    near = abs(lr - limit) <= 0.005 * limit
    core.require(near, f"{what}: expected {limit:.5g}, got {lr:.5g}; {effect}")
    core.require(vectors, f"{what}: product was never called")
    return vectors[0]


@core.exercise("descent.3", "12 steps equal torch.optim.SGD's, with gradients that come and go")
def momentum(answer):
    _as_torch(answer, torch.optim.SGD, {"momentum": 0.0}, lambda: {"momentum": _draw(0.3, 0.95)})


@core.exercise("descent.4", "12 steps equal torch.optim.Adam's, with gradients that come and go")
def adam(answer):
    def options():
        return {"betas": (_draw(0.5, 0.95), _draw(0.9, 0.999)), "eps": 10 ** _draw(-6, -1)}

    _as_torch(answer, torch.optim.Adam, {"betas": (0.0, 0.99)}, options)


# By parameter: in which steps it has a gradient. The others always have one.
RHYTHM = {1: lambda step: step > 2, 2: lambda step: step % 3 != 2, 6: lambda step: False}


def _as_torch(answer, oracle, edge, options):
    def group(*shapes, **edge):  # in float64, so that a small slip shows; in another memory order
        params = [nn.Parameter(_randn(*s[::-1]).permute(tuple(range(len(s)))[::-1])) for s in shapes]
        some = {"lr": _draw(0.01, 0.2), "weight_decay": _draw(0.05, 0.5)}
        return {"params": params} | some | options() | edge

    groups = [group((4, 3), (7,), (3, 2)), group((2, 1, 5), (), **edge), group((4, 3), (3, 4))]
    many = _Twins(answer, oracle, groups)  # two optimisers at once: nothing may be shared
    one = _Twins(answer, oracle, [group((4, 3), (6, 5), weight_decay=0.0)])
    for step in range(1, 13):
        for g in (many.answer.param_groups + many.oracle.param_groups) * (step == 8):  # as a schedule does
            g.update({k: 0.4 * v for k, v in g.items() if isinstance(v, float)})
        many.step(step, RHYTHM, ", at which the groups' options changed" * (step == 8))
        one.step(step, {})
    groups = [group((4, 3))]
    for which in "first", "second":  # the second begins with no state
        again = _Twins(answer, oracle, groups)
        for step in range(1, 4):
            again.step(step, {}, f" of the {which} of two optimisers on it")


class _Twins:
    "The learner's optimiser and torch's, on equal parameters that get equal gradients."

    def __init__(self, answer, oracle, groups):
        for p in (params := [p for group in groups for p in group["params"]]):
            p.grad = None
        self.oracle = oracle(copy.deepcopy(groups), foreach=False)
        given, options = [dict(g) for g in groups], {"lr": groups[0]["lr"]}  # torch fills the dicts
        if not groups[1:]:  # as most programs call it
            given, options = params, {k: v for k, v in groups[0].items() if k != "params"}
        self.answer = core.call(answer, given, mutates=(0,), **options)
        made = f"expected the class of an optimiser; it made {core.kind(self.answer)}"
        core.require(isinstance(self.answer, torch.optim.Optimizer), made)
        twins = [(q, group) for group in self.oracle.param_groups for q in group["params"]]
        self.every = [(p, *twin) for p, twin in zip(params, twins, strict=True)]

    def step(self, step, rhythm, whose=""):
        kept, views = [], [p.detach() for p, _, _ in self.every]
        for i, (p, q, _) in enumerate(self.every):  # in step 6 every third gradient is zero
            grad = _randn(*p.shape) * (0 if (step, i % 3) == (6, 0) else 10 ** _draw(-7, 3))
            if not rhythm.get(i, lambda step: True)(step):
                p.grad = q.grad = None
            elif p.grad is None:
                p.grad, q.grad = grad.clone(), grad.clone()
            else:  # in place, as backward adds: an answer that kept the tensor itself sees it change
                p.grad.copy_(grad), q.grad.copy_(grad)
            kept.append(None if p.grad is None else grad)
        core.call(self.answer.step)
        self.oracle.step()
        for (p, q, group), grad, view in zip(self.every, kept, views, strict=True):
            had = " without a gradient" if grad is None else "" if grad.any() else " with a gradient of zeros"
            words = ", ".join(f"{k} {v:.3g}" for k, v in group.items() if isinstance(v, float))
            what = f"after step {step}{whose}, a parameter of shape {list(p.shape)}{had} ({words})"
            core.require(p.is_leaf and p.requires_grad, f"{what}: requires_grad or being a leaf was lost")
            if torch.allclose(p, q, 1e-5, 1e-7) and not torch.allclose(p, q, 1e-10, 1e-12):
                near = "is nearly right: is its state in its dtype, t a Python number, eps in its place?"
                raise core.Wrong(f"{what} {near}")
            core.close(p, q, what, rtol=1e-10, atol=1e-12)
            core.require(torch.equal(view, p), f"{what} got new memory: change it in place")
            same = p.grad is None if grad is None else p.grad is not None and torch.equal(p.grad, grad)
            core.require(same, f"{what}: step changed p.grad, to which others may still be adding")


@core.exercise("descent.5", "losses, gradients and modes are right with ragged batches, and no graph stays")
def fit(answer):
    _fit(answer, 4, (8, 8, 5), (7, 7, 2))
    _fit(answer, 2, (6, 6, 6, 1), (9, 4))


class _Loader:
    "Batches that differ from pass to pass, as a shuffling loader's do. It can be iterated, and no more."

    def __init__(self, passes):
        self.passes = itertools.cycle(passes)

    def __iter__(self):
        return iter(next(self.passes))


def _fit(answer, epochs, sizes, valid_sizes):  # a sample's last feature says from which set it is
    scale, lr, model = _draw(0.5, 2), _draw(0.02, 0.1), nn.Linear(3, 1, bias=False).double()
    opt = torch.optim.SGD(model.parameters(), lr=lr, foreach=False)
    passes = [[(F.pad(_randn(n, 2), (0, 1), value=1.0), _randn(n, 1)) for n in sizes] for _ in range(epochs)]
    valid = [(F.pad(_randn(n, 2), (0, 1), value=-1.0), _randn(n, 1)) for n in valid_sizes]
    seen, grads, graphs, alive, w = [], [], [], [0], model.weight.detach().clone()

    def loss_fn(out, y):
        loss = scale * ((out - y) ** 2).mean()
        if loss.requires_grad:
            alive.append(sum(ref() is not None for ref in graphs))
            hook = lambda *_: None  # noqa: E731, it lives as long as the graph
            loss.grad_fn.register_hook(hook)
            graphs.append(weakref.ref(hook))
        return loss

    def before_step(*_):
        core.require(model.weight.grad is not None, "opt.step() found no gradient: call backward() before it")
        grads.append(model.weight.grad.clone())

    def note(_, x, out):
        seen.append((x[0][0, -1] > 0, model.training, out.requires_grad))

    model.register_forward_hook(note)
    opt.register_step_pre_hook(before_step)
    model.eval()  # as an earlier validation leaves it
    model.weight.grad = torch.randn_like(w)  # from earlier work
    got = core.call(answer, model, opt, loss_fn, _Loader(passes), _Loader([valid]), epochs, mutates=(0, 1))

    core.equal(len(grads), epochs * len(sizes), f"opt.step() in {epochs} epochs of {sizes} samples", "calls")
    modes = [training for train, training, _ in seen if train]
    core.require(all(modes), f"eval mode was on in training step {[*modes, False].index(False) + 1}")
    core.require(not any(t for train, t, _ in seen if not train), "train mode was on in validation")
    core.require(not any(g for train, _, g in seen if not train), "autograd recorded a graph in validation")
    calls, steps = len(modes), epochs * len(sizes)
    core.require(
        calls == steps, f"the model ran {calls} times in {steps} training steps: run it once in each"
    )
    core.require(max(alive) < 3, f"{max(alive)} steps' graphs were in memory at once: keep loss.item()")
    losses, valid_losses = [], []
    for batches in passes:
        for x, y in batches:  # by hand: the gradient of scale * mean (x w - y)²
            losses.append(scale * ((x @ w.T - y) ** 2).mean())
            grad = 2 * scale / len(y) * (x @ w.T - y).T @ x
            step = f"the gradient of step {len(losses)}"
            hint = "is .grad cleared before each backward, and does each epoch iterate over `train` itself?"
            core.close(grads[len(losses) - 1], grad, f"{step} ({hint})")
            w = w - lr * grad
        x, y = (torch.cat(t) for t in zip(*valid, strict=True))
        valid_losses.append(scale * ((x @ w.T - y) ** 2).mean())
    found = core.parts(got, "losses valid_losses", "fit's result")
    for name, series, want in ("losses", found[0], losses), ("valid_losses", found[1], valid_losses):
        values = series if isinstance(series, list | tuple) else [series]
        odd = [core.kind(v) for v in values if not isinstance(v, float)]
        core.require(not odd, f"{name}: expected a list of Python floats, got {odd[:1]}")
        where = f"{name} with training batches of {sizes} and validation batches of {valid_sizes}"
        core.close(torch.tensor(series).double(), torch.stack(want), where, rtol=1e-5)


@core.exercise("descent.6", "images move in all nine ways, and each arm meets its twin of the same seed")
def remedy(move, paired_gains):
    core.need_callable(paired_gains)
    _moves(move, torch.rand(1, 3, 6, 4).double() + 0.1)
    counts = _moves(move, torch.rand(5400, 2, 5, 7) + 0.1).bincount(minlength=9).tolist()
    even = all(480 < k < 720 for k in counts)
    core.require(even, f"move: the nine moves are not equally likely: {counts} times in 5,400 images")
    low = sorted(random.sample(range(1000), 4))
    seeds, calls, lucks = [low[2], low[0], low[3], low[1]], [], []
    arms = {"wide": {"width": _draw(2, 3)}, "both": {"width": _draw(-2, -1), "decay": _draw(0.1, 0.2)}}

    def experiment(**options):
        calls.append(options)
        luck = torch.rand(()).item()
        lucks.append(luck)
        torch.rand(random.randint(1, 5))  # as a run uses more or fewer random numbers
        return 0.4 + 0.3 * luck + 0.1 * luck**2 * sum(options.values())

    got = core.call(paired_gains, experiment, arms, seeds)
    core.require(isinstance(got, dict), f"paired_gains: expected a dict, got {core.kind(got)}")
    core.equal(sorted(map(str, got)), sorted(arms), "the arms in the result of paired_gains")
    for name, options in {"no options": {}, **arms}.items():
        what = f"runs of {name} (once for each seed; results can be used again)"
        core.equal(calls.count(options), len(seeds), what)
    fresh = {torch.rand((), generator=torch.Generator().manual_seed(seed)).item() for seed in seeds}
    core.require(
        set(lucks) <= fresh,
        "paired_gains: a run did not begin at its seed; call torch.manual_seed(seed) just before every run",
    )
    for name, options in arms.items():
        gains = core.parts(got[name], " ".join(f"seed_{s}" for s in seeds), f"the gains of arm {name}")
        for seed, gain in zip(seeds, gains, strict=True):
            torch.manual_seed(seed)
            want = 10 * torch.rand(()).item() ** 2 * sum(options.values())
            core.close(gain, want, f"the gain in points of arm {name} at seed {seed}", rtol=1e-6)


def _moves(move, images):
    "Judge `move` on images [n, channels, h, w]; returns which of the nine moves each image made."
    n, channels, h, w = images.shape
    some = "1 image" if n == 1 else f"{n} images"
    padded, found, what = F.pad(images, (1, 1, 1, 1)), [], f"move on {some} of {channels} x {h} x {w}"
    windows = torch.stack([padded[..., r : r + h, c : c + w] for r in range(3) for c in range(3)])
    for seed in 5, 5, *range(6, 30 if n == 1 else 7):  # one image may well move alike for two seeds
        torch.manual_seed(seed)
        got = core.call(move, images)
        core.equal(core.kind(got), core.kind(images), what)
        fits = (got == windows).flatten(2).all(2)  # [9, n]
        bad = n - int(fits.any(0).sum())
        core.require(not bad, f"{what}: {bad} not among the nine moves; see to the border and the channels")
        found.append(fits.int().argmax(0))
        alike = n >= 9 and len(found[-1].unique()) == 1
        core.require(not alike, f"{what}: all images of one call moved alike; draw for each image")
    core.require(torch.equal(found[0], found[1]), f"{what}: one seed of torch gave two answers")
    alike = all(torch.equal(found[0], other) for other in found[2:])
    core.require(not alike, f"{what}: every seed gave the same moves")
    return found[0]

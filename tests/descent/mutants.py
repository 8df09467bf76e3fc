"Wrong and right answers to lesson descent, each named after what it does."

import torch
from torch.nn import functional as F

from course_lib.descent.solutions import Adam, Momentum, descend, fit, largest_stable_lr, move, paired_gains

REFERENCE = {
    "descent.1": descend,
    "descent.2": largest_stable_lr,
    "descent.3": Momentum,
    "descent.4": Adam,
    "descent.5": fit,
    "descent.6": (move, paired_gains),
}

# descent.1: the right walk, with one thing to get wrong at a time


def _walk(clear=True, copy=True, graph=False, flat=0.0, dtype=None):
    def walked(f, start, lr, steps):
        w = (start.detach().clone() if copy else start).requires_grad_()
        path = [w if graph else w.detach().clone()]
        for _ in range(steps):
            if graph:
                w = w - lr * torch.autograd.grad(f(w), w)[0]
            else:
                w.grad = None if clear else w.grad
                f(w).backward()
                w.data -= lr * w.grad * (w.grad.abs() > flat)
            path.append(w if graph else w.detach().clone())
        return torch.stack(path).to(dtype or start.dtype)

    return walked


def with_functional_gradients(f, start, lr, steps):
    path = torch.empty(steps + 1, *start.shape, dtype=start.dtype)
    path[0] = start
    for k in range(steps):
        path[k + 1] = path[k] - lr * torch.func.grad(f)(path[k])
    return path


def _leaves_autograd_off(answer):
    def left(*args):
        torch.set_grad_enabled(True)
        got = answer(*args)
        torch.set_grad_enabled(False)
        return got

    return left


def with_an_optimiser(f, start, lr, steps):
    w = torch.nn.Parameter(start.clone())
    opt, path = torch.optim.SGD([w], lr=lr), [start.clone()]
    for _ in range(steps):
        opt.zero_grad()
        f(w).backward()
        opt.step()
        path.append(w.detach().clone())
    return torch.stack(path)


# descent.2: power iteration, with one thing to get wrong at a time


def _power(first=torch.randn, most=199, length=lambda v: v.norm()):
    def iterated(product, size):
        v = first(size)
        for _ in range(most):
            v = product(v / length(v))
        v = v / length(v)
        return 2 / torch.dot(v, product(v)).item()

    return iterated


def _one_seed(size):
    return torch.randn(size, generator=torch.Generator().manual_seed(0))


def _one_axis(size):
    return F.one_hot(torch.randint(size, ()), size).float()


def _signs(size):
    return torch.randint(0, 2, (size,)) * 2.0 - 1


def _by_ratio(of):
    "λmax as the ratio of two numbers, which are nothing but rounding for some steepest directions."

    def iterated(product, size):
        v = torch.randn(size)
        for _ in range(199):
            v = product(v / v.norm())
        v = v / v.norm()
        return 2 / (of(product(v)) / of(v)).item()

    return iterated


def by_lanczos(product, size):
    basis, products = F.normalize(torch.randn(size, 1).double(), dim=0), []
    for _ in range(min(size, 150)):
        products.append(product(basis[:, -1].float()).double())
        w = products[-1] - basis @ (basis.T @ products[-1])
        w = w - basis @ (basis.T @ w)
        if not w.norm():
            break
        basis = torch.cat([basis, w[:, None] / w.norm()], 1)
    small = basis[:, : len(products)].T @ torch.stack(products, 1)
    return 2 / torch.linalg.eigvalsh((small + small.T) / 2)[-1].item()


def builds_the_matrix(product, size):
    return 2 / torch.linalg.eigvalsh(torch.stack([product(v) for v in torch.eye(size)]))[-1].item()


def by_the_quotient(product, size):
    v = torch.randn(size)
    for _ in range(190):
        w = product(v)
        top, v = torch.dot(v, w) / torch.dot(v, v), w / w.abs().max()
    return 2 / top


def by_length(product, size):
    v = torch.rand(size) - 0.5
    for _ in range(200):
        v = product(v / v.norm())
    return 2 / v.norm()


# descent.3 and descent.4: one step for all, with one thing to get wrong at a time


class _Variant(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, **options):
        defaults = {"momentum": 0.9, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
        super().__init__(params, {"lr": lr} | defaults | options)

    @torch.no_grad()
    def step(self):
        self.steps = getattr(self, "steps", 0) + 1
        for group in self.param_groups:
            for p in group["params"]:
                self.missing(p) if p.grad is None else p.sub_(self.move(group, p, self.state[p]))

    def missing(self, p):
        pass

    def decayed(self, group, p):
        return p.grad + group["weight_decay"] * p

    def move(self, group, p, s):
        s["v"] = group["momentum"] * s.get("v", 0) + self.decayed(group, p)
        return group["lr"] * s["v"]


class PutsTheRateIntoTheVelocity(_Variant):
    def move(self, group, p, s):
        s["v"] = group["momentum"] * s.get("v", 0) + group["lr"] * self.decayed(group, p)
        return s["v"]


class ForgetsTheVelocityWithoutAGradient(_Variant):
    def missing(self, p):
        self.state[p].clear()


class SkipsZeros(_Variant):
    def move(self, group, p, s):
        return super().move(group, p, s) if p.grad.any() else 0


class GivesNewMemory(_Variant):
    def move(self, group, p, s):
        p.data = p - super().move(group, p, s)
        return 0


class WritesIntoTheGradient(_Variant):
    def decayed(self, group, p):
        return p.grad.add_(p, alpha=group["weight_decay"])


class UsesTheFirstGroupsOptions(_Variant):
    def move(self, group, p, s):
        return super().move(self.param_groups[0], p, s)


class KeepsItsDefaults(_Variant):
    def __init__(self, params, lr=1e-3, **options):
        super().__init__(params, lr)


class ReadsItsOptionsOnce(_Variant):
    def move(self, group, p, s):
        kept = s.setdefault("options", {k: v for k, v in group.items() if k != "params"})
        return super().move({**kept, "lr": group["lr"]}, p, s)


class WithForeach(_Variant):
    def step(self):
        with torch.no_grad():
            for group in self.param_groups:
                if params := [p for p in group["params"] if p.grad is not None]:
                    grads = torch._foreach_add([p.grad for p in params], params, alpha=group["weight_decay"])
                    sums = [self.state[p].setdefault("v", torch.zeros_like(p)) for p in params]
                    torch._foreach_mul_(sums, group["momentum"])
                    torch._foreach_add_(sums, grads)
                    torch._foreach_add_(params, sums, alpha=-group["lr"])


class _AdamVariant(_Variant):
    beta_steps, after_root = "own", True

    def move(self, group, p, s):
        grad, (beta1, beta2) = self.decayed(group, p), group["betas"]
        s["t"] = s.get("t", 0) + 1
        s["m"] = beta1 * s.get("m", 0) + (1 - beta1) * grad
        s["v"] = beta2 * s.get("v", 0) + (1 - beta2) * grad**2
        t = {"own": s["t"], "all": self.steps, "never": 10**9}[self.beta_steps]
        v = s["v"] / (1 - beta2**t)
        root = v.sqrt() + group["eps"] if self.after_root else (v + group["eps"]).sqrt()
        return group["lr"] / (1 - beta1**t) * s["m"] / root


class ForgetsTheCorrection(_AdamVariant):
    beta_steps = "never"


class CountsStepsOfTheWholeOptimiser(_AdamVariant):
    beta_steps = "all"


class PutsEpsilonUnderTheRoot(_AdamVariant):
    after_root = False


class KeepsItsDefaultAverages(_AdamVariant, KeepsItsDefaults):
    pass


class ReadsItsAveragesOptionsOnce(ReadsItsOptionsOnce, _AdamVariant):
    pass


class AveragesByLerp(_AdamVariant):
    def move(self, group, p, s):
        (beta1, beta2), grad = group["betas"], self.decayed(group, p)
        s["t"] = s.get("t", 0) + 1
        s.setdefault("m", torch.zeros_like(p)).lerp_(grad, 1 - beta1)
        s.setdefault("v", torch.zeros_like(p)).lerp_(grad.square(), 1 - beta2)
        root = (s["v"] / (1 - beta2 ** s["t"])).sqrt_().add_(group["eps"])
        return (s["m"] / (1 - beta1 ** s["t"])).div_(root).mul_(group["lr"])


class DecaysAsAdamW(_AdamVariant):
    def move(self, group, p, s):
        p.mul_(1 - group["lr"] * group["weight_decay"])
        return super().move({**group, "weight_decay": 0}, p, s)


# descent.5: the right loop, with one thing to get wrong at a time


def _loop(zero=True, train=True, grad=False, weigh=True, keep=lambda loss: loss.item()):
    def fitted(model, opt, loss_fn, train_batches, valid, epochs):
        losses, valid_losses = [], []
        for _ in range(epochs):
            model.train(train)
            for x, y in train_batches:
                loss = loss_fn(model(x), y)
                if zero:
                    opt.zero_grad()
                loss.backward()
                opt.step()
                losses.append(keep(loss))
            model.eval()
            with torch.set_grad_enabled(grad):
                parts = [(loss_fn(model(x), y).item(), len(y) if weigh else 1) for x, y in valid]
            valid_losses.append(sum(value * n for value, n in parts) / sum(n for _, n in parts))
        return [float(loss) for loss in losses], valid_losses

    return fitted


def runs_the_model_twice(model, opt, loss_fn, train, valid, epochs):
    def ran(x):
        model(x)
        return model(x)

    ran.train, ran.eval = model.train, model.eval
    return fit(ran, opt, loss_fn, train, valid, epochs)


def validates_in_one_batch(model, opt, loss_fn, train, valid, epochs):
    losses, valid_losses = [], []
    for _ in range(epochs):
        model.train()
        for x, y in train:
            for p in model.parameters():
                p.grad = None
            loss = loss_fn(model(x), y)
            loss.backward()
            opt.step()
            losses.append(float(loss.detach()))
        model.eval()
        with torch.inference_mode():
            x, y = (torch.cat(parts) for parts in zip(*valid, strict=True))
            valid_losses.append(loss_fn(model(x), y).item())
    return losses, valid_losses


def freezes_the_model(model, opt, loss_fn, train, valid, epochs):
    losses, valid_losses = [], []
    for _ in range(epochs):
        model.train().zero_grad()
        for x, y in train:
            loss = loss_fn(model(x), y)
            loss.backward()
            opt.step()
            model.zero_grad()
            losses.append(float(loss))
        model.eval().requires_grad_(False)
        samples = [loss_fn(model(x[i : i + 1]), y[i : i + 1]) for x, y in valid for i in range(len(y))]
        valid_losses.append(float(torch.stack(samples).mean()))
        model.requires_grad_(True)
    return tuple(losses), tuple(valid_losses)


# descent.6


def rolls(images):
    return torch.stack([i.roll(torch.randint(-1, 2, (2,)).tolist(), (1, 2)) for i in images])


def moves_all_alike(images):
    r, c = torch.randint(0, 3, (2,)).tolist()
    return F.pad(images, (1, 1, 1, 1))[..., r : r + images.shape[2], c : c + images.shape[3]]


def prefers_the_middle(images):
    shifts = torch.randn(len(images), 2).round().clamp(-1, 1).int() + 1
    padded = F.pad(images, (1, 1, 1, 1))
    h, w = images.shape[2:]
    return torch.stack(
        [i[:, r : r + h, c : c + w] for i, (r, c) in zip(padded, shifts.tolist(), strict=True)]
    )


def shuffles_the_nine(images):
    "One image alone never moves otherwise."
    n, _, h, w = images.shape
    padded, corners = F.pad(images, (1, 1, 1, 1)), (torch.randperm(n) % 9).tolist()
    return torch.stack(
        [i[:, k // 3 : k // 3 + h, k % 3 : k % 3 + w] for i, k in zip(padded, corners, strict=True)]
    )


def by_indices(images):
    n, _, h, w = images.shape
    r, c = torch.randint(0, 3, (2, n, 1, 1, 1))
    rows, columns = r + torch.arange(h)[:, None], c + torch.arange(w)
    padded = F.pad(images, (1, 1, 1, 1)).permute(0, 2, 3, 1)
    picked = padded[torch.arange(n)[:, None, None], rows[:, 0], columns[:, 0]]
    return picked.permute(0, 3, 1, 2)


def seeds_once(experiment, arms, seeds):
    base = []
    for seed in seeds:
        torch.manual_seed(seed)
        base.append(experiment())
    return {name: [100 * (experiment(**o) - b) for b in base] for name, o in arms.items()}


def repeats_the_base(experiment, arms, seeds):
    return {name: paired_gains(experiment, {name: o}, seeds)[name] for name, o in arms.items()}


def gives_shares(experiment, arms, seeds):
    got = paired_gains(experiment, arms, seeds)
    return {name: [gain / 100 for gain in gains] for name, gains in got.items()}


def seed_by_seed(experiment, arms, seeds):
    gains = {name: [] for name in arms}
    for seed in seeds:
        torch.manual_seed(seed)
        without = experiment()
        for name, options in arms.items():
            torch.manual_seed(seed)
            gains[name] += [(experiment(**options) - without) * 100]
    return gains


RIGHT = {
    "descent.1": [_walk(), with_an_optimiser, with_functional_gradients],
    "descent.2": [by_length, by_the_quotient, by_lanczos, _power(_signs)],
    "descent.3": [_Variant, torch.optim.SGD, WithForeach],
    "descent.4": [_AdamVariant, torch.optim.Adam, AveragesByLerp],
    "descent.5": [freezes_the_model, lambda *args: tuple(map(tuple, fit(*args))), validates_in_one_batch],
    "descent.6": [(by_indices, seed_by_seed), (lambda x: by_indices(x.clone()), paired_gains)],
}

MUTANTS = {
    "descent.1": [
        _walk(clear=False), _walk(copy=False), _walk(graph=True), _walk(flat=1e-2), _walk(flat=1e-6),
        _walk(dtype=torch.float32), _leaves_autograd_off(descend),
    ],
    "descent.2": [
        _power(torch.ones), _power(_one_seed), _power(most=30), _power(length=lambda v: 1),
        _power(length=lambda v: v.norm() + 1e-8), builds_the_matrix, _power(_one_axis),
        _by_ratio(lambda v: v[0]), _by_ratio(torch.sum),
    ],
    "descent.3": [
        PutsTheRateIntoTheVelocity, ForgetsTheVelocityWithoutAGradient, SkipsZeros, GivesNewMemory,
        WritesIntoTheGradient, UsesTheFirstGroupsOptions, KeepsItsDefaults, ReadsItsOptionsOnce,
    ],
    "descent.4": [
        ForgetsTheCorrection, CountsStepsOfTheWholeOptimiser, PutsEpsilonUnderTheRoot, DecaysAsAdamW,
        KeepsItsDefaultAverages, ReadsItsAveragesOptionsOnce,
    ],
    "descent.5": [
        _loop(zero=False), _loop(train=False), _loop(grad=True), _loop(weigh=False),
        _loop(keep=lambda loss: loss), _leaves_autograd_off(fit), runs_the_model_twice,
    ],
    "descent.6": [
        (rolls, paired_gains), (moves_all_alike, paired_gains), (prefers_the_middle, paired_gains),
        (shuffles_the_nine, paired_gains),
        (move, seeds_once), (move, repeats_the_base), (move, gives_shares),
    ],
}  # fmt: skip

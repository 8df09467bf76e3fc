"Plausible wrong answers to lesson descent, each named after its mistake."

import torch

from course_lib import descent

# descent.1


def keeps_the_graph(f, start, lr, steps):
    w = start.detach().requires_grad_()
    path = [w]
    for _ in range(steps):
        (grad,) = torch.autograd.grad(f(w), w)
        w = w - lr * grad
        path.append(w)
    return torch.stack(path)


def marks_the_start(f, start, lr, steps):
    path = [start.detach().clone()]
    w = start.requires_grad_()
    for _ in range(steps):
        (grad,) = torch.autograd.grad(f(w), w)
        w = (w - lr * grad).detach().requires_grad_()
        path.append(w.detach())
    return torch.stack(path)


def climbs(f, start, lr, steps):
    return descent.descend(f, start, -lr, steps)


def adds_up_gradients(f, start, lr, steps):
    w = start.detach().clone().requires_grad_()
    path = [start.detach()]
    for _ in range(steps):
        f(w).backward()
        with torch.no_grad():
            w -= lr * w.grad
        path.append(w.detach().clone())
    return torch.stack(path)


def moves_the_start(f, start, lr, steps):
    w = start.detach().requires_grad_()
    path = [w.detach().clone()]
    for _ in range(steps):
        (grad,) = torch.autograd.grad(f(w), w)
        with torch.no_grad():
            w -= lr * grad
        path.append(w.detach().clone())
    return torch.stack(path)


def keeps_one_tensor_many_times(f, start, lr, steps):
    w = start.detach().clone().requires_grad_()
    path = [w.detach()]
    for _ in range(steps):
        (grad,) = torch.autograd.grad(f(w), w)
        with torch.no_grad():
            w -= lr * grad
        path.append(w.detach())
    return torch.stack(path)


def forgets_the_start(f, start, lr, steps):
    return descent.descend(f, start, lr, steps + 1)[1:]


def stops_one_short(f, start, lr, steps):
    return descent.descend(f, start, lr, max(steps - 1, 0))


def gives_the_last_point(f, start, lr, steps):
    return descent.descend(f, start, lr, steps)[-1]


def normalises_the_gradient(f, start, lr, steps):
    w, path = start.detach(), [start.detach()]
    for _ in range(steps):
        w = w.clone().requires_grad_()
        (grad,) = torch.autograd.grad(f(w), w)
        w = w.detach() - lr * grad / grad.norm()
        path.append(w)
    return torch.stack(path)


def clips_the_gradient(f, start, lr, steps):
    w, path = start.detach(), [start.detach()]
    for _ in range(steps):
        w = w.clone().requires_grad_()
        (grad,) = torch.autograd.grad(f(w), w)
        w = w.detach() - lr * grad.clamp(-1, 1)
        path.append(w)
    return torch.stack(path)


def takes_the_gradient_at_the_start(f, start, lr, steps):
    w = start.detach().clone().requires_grad_()
    (grad,) = torch.autograd.grad(f(w), w)
    return torch.stack([start.detach() - k * lr * grad for k in range(steps + 1)])


def knows_its_own_rate(f, start, lr, steps):
    return descent.descend(f, start, 0.1, steps)


def lowers_the_rate(f, start, lr, steps):
    path = [start.detach()]
    for k in range(steps):
        path.append(descent.descend(f, path[-1], lr / (1 + 0.01 * k), 1)[1])
    return torch.stack(path)


def takes_finite_differences(f, start, lr, steps):
    w, path = start.detach().clone(), [start.detach()]
    for _ in range(steps):
        grad = torch.zeros_like(w)
        for i in range(w.numel()):
            bump = torch.zeros_like(w)
            bump.view(-1)[i] = 1e-5
            grad.view(-1)[i] = (f(w + bump) - f(w - bump)) / 2e-5
        w = w - lr * grad
        path.append(w)
    return torch.stack(path)


def knows_two_dimensions(f, start, lr, steps):
    return descent.descend(f, start.reshape(-1)[:2], lr, steps)


def gives_a_list(f, start, lr, steps):
    return list(descent.descend(f, start, lr, steps))


# descent.2


def one_over_the_curvature(product, size):
    return descent.largest_stable_lr(product, size) / 2


def gives_the_curvature(product, size):
    return 2 / descent.largest_stable_lr(product, size)


def stops_after_five(product, size):
    return descent.largest_stable_lr(product, size, products=5)


def stops_after_thirty(product, size):
    return descent.largest_stable_lr(product, size, products=30)


def starts_from_ones(product, size):
    v = torch.ones(size)
    for _ in range(150):
        v = product(v / v.norm())
    return 2 / v.norm().item()


def starts_from_the_first_axis(product, size):
    v = torch.zeros(size)
    v[0] = 1
    for _ in range(150):
        v = product(v / v.norm())
    return 2 / v.norm().item()


def never_normalises(product, size):
    v = torch.randn(size)
    for _ in range(150):
        v = product(v)
    return (2 * torch.dot(v, v) / torch.dot(v, product(v))).item()


def takes_the_trace(product, size):
    draws = [torch.randn(size).sign() for _ in range(100)]
    return 2 / (sum(torch.dot(v, product(v)) for v in draws) / 100).item()


def takes_the_largest_stretch(product, size):
    draws = [torch.randn(size) for _ in range(200)]
    return 2 / max((product(v).norm() / v.norm()).item() for v in draws)


def takes_the_mean_curvature(product, size):
    v = torch.randn(size)
    return 2 / (torch.dot(v, product(v)) / torch.dot(v, v)).item()


def builds_the_matrix(product, size):
    matrix = torch.stack([product(v) for v in torch.eye(size)])
    return 2 / torch.linalg.eigvalsh(matrix)[-1].item()


def builds_part_of_the_matrix(product, size):
    matrix = torch.stack([product(v) for v in torch.eye(size)[:200]])
    return 2 / torch.linalg.eigvalsh(matrix[: len(matrix), : len(matrix)])[-1].item()


def takes_the_largest_diagonal(product, size):
    axes = torch.eye(size)[:200]
    return 2 / max(torch.dot(v, product(v)).item() for v in axes)


def squares_the_curvature(product, size):
    v = torch.randn(size)
    for _ in range(150):
        v = product(v / v.norm())
    return 2 / torch.dot(v, v).item()


def divides_by_the_wrong_norm(product, size):
    v = torch.randn(size)
    for _ in range(150):
        v = product(v / v.abs().max())
        v = v / v.abs().max()
    return 2 / torch.dot(v, product(v)).item()


def stays_safely_below(product, size):
    return 0.95 * descent.largest_stable_lr(product, size)


def finds_a_rate_by_trying(product, size):
    w0, lr = torch.randn(size), 1.0
    for _ in range(40):
        w = w0.clone()
        for _ in range(4):
            w = w - lr * product(w)
        if w.norm() < w0.norm():
            return lr
        lr /= 2
    return lr


# descent.3


def _with_gradients(opt):
    for group in opt.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                yield group, p, opt.state[p]


def _decayed(group, p):
    return p.grad + group["weight_decay"] * p


class TakesAnAverage(descent.Momentum):
    "velocity = momentum * velocity + (1 - momentum) * gradient"

    @torch.no_grad()
    def step(self):
        for group, p, state in _with_gradients(self):
            mu = group["momentum"]
            state["v"] = mu * state.get("v", 0) + (1 - mu) * _decayed(group, p)
            p -= group["lr"] * state["v"]


class AveragesFromTheSecondStepOn(descent.Momentum):
    "Dampening, as in torch with dampening=momentum."

    @torch.no_grad()
    def step(self):
        for group, p, state in _with_gradients(self):
            mu, grad = group["momentum"], _decayed(group, p)
            state["v"] = mu * state["v"] + (1 - mu) * grad if "v" in state else grad
            p -= group["lr"] * state["v"]


class PutsTheRateIntoTheVelocity(descent.Momentum):
    "Right while lr stays; wrong once a schedule changes it."

    @torch.no_grad()
    def step(self):
        for group, p, state in _with_gradients(self):
            state["v"] = group["momentum"] * state.get("v", 0) + group["lr"] * _decayed(group, p)
            p -= state["v"]


class KeepsItsStateInFloat32(descent.Momentum):
    @torch.no_grad()
    def step(self):
        for group, p, state in _with_gradients(self):
            v = state.setdefault("v", torch.zeros(p.shape))
            v.mul_(group["momentum"]).add_(_decayed(group, p))
            p -= group["lr"] * v


class ForgetsWeightDecay(descent.Momentum):
    @torch.no_grad()
    def step(self):
        for group, p, state in _with_gradients(self):
            state["v"] = group["momentum"] * state.get("v", 0) + p.grad
            p -= group["lr"] * state["v"]


class DecaysApartFromTheGradient(descent.Momentum):
    @torch.no_grad()
    def step(self):
        for group, p, state in _with_gradients(self):
            p -= group["lr"] * group["weight_decay"] * p
            state["v"] = group["momentum"] * state.get("v", 0) + p.grad
            p -= group["lr"] * state["v"]


class LooksAhead(descent.Momentum):
    "Nesterov's step."

    @torch.no_grad()
    def step(self):
        for group, p, state in _with_gradients(self):
            grad = _decayed(group, p)
            state["v"] = group["momentum"] * state.get("v", 0) + grad
            p -= group["lr"] * (grad + group["momentum"] * state["v"])


class StepsBeforeTheVelocity(descent.Momentum):
    @torch.no_grad()
    def step(self):
        for group, p, state in _with_gradients(self):
            v = state.get("v", torch.zeros_like(p))
            p -= group["lr"] * v
            state["v"] = group["momentum"] * v + _decayed(group, p)


class KeepsTheGradientItself(descent.Momentum):
    "The first velocity is p.grad, which the next backward overwrites."

    @torch.no_grad()
    def step(self):
        for group, p, state in _with_gradients(self):
            grad = _decayed(group, p) if group["weight_decay"] else p.grad
            v = state["v"] = grad if "v" not in state else state["v"].mul(group["momentum"]).add(grad)
            p -= group["lr"] * v


class WritesIntoTheGradient(descent.Momentum):
    @torch.no_grad()
    def step(self):
        for group, p, state in _with_gradients(self):
            grad = p.grad.add_(p, alpha=group["weight_decay"])
            state["v"] = group["momentum"] * state.get("v", 0) + grad
            p -= group["lr"] * state["v"]


class SharesOneState(descent.Momentum):
    seen: dict = {}  # noqa: RUF012

    @torch.no_grad()
    def step(self):
        for group, p, _ in _with_gradients(self):
            v = self.seen[p] = group["momentum"] * self.seen.get(p, 0) + _decayed(group, p)
            p -= group["lr"] * v


class KeepsStateByShape(descent.Momentum):
    @torch.no_grad()
    def step(self):
        for group, p, _ in _with_gradients(self):
            state = self.state[p.shape]
            state["v"] = group["momentum"] * state.get("v", 0) + _decayed(group, p)
            p -= group["lr"] * state["v"]


class UsesTheFirstGroupsOptions(descent.Momentum):
    @torch.no_grad()
    def step(self):
        group = self.param_groups[0]
        for _, p, state in _with_gradients(self):
            state["v"] = group["momentum"] * state.get("v", 0) + _decayed(group, p)
            p -= group["lr"] * state["v"]


class UsesTheDefaults(descent.Momentum):
    @torch.no_grad()
    def step(self):
        for _, p, state in _with_gradients(self):
            state["v"] = self.defaults["momentum"] * state.get("v", 0) + _decayed(self.defaults, p)
            p -= self.defaults["lr"] * state["v"]


class StepsOnTheFirstGroupOnly(descent.Momentum):
    @torch.no_grad()
    def step(self):
        group = self.param_groups[0]
        for p in group["params"]:
            if p.grad is not None:
                state = self.state[p]
                state["v"] = group["momentum"] * state.get("v", 0) + _decayed(group, p)
                p -= group["lr"] * state["v"]


class StopsAtAMissingGradient(descent.Momentum):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    return
                state = self.state[p]
                state["v"] = group["momentum"] * state.get("v", 0) + _decayed(group, p)
                p -= group["lr"] * state["v"]


class TreatsAMissingGradientAsZero(descent.Momentum):
    "Velocity and weight decay go on moving a parameter that had no gradient."

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                grad = torch.zeros_like(p) if p.grad is None else p.grad
                state = self.state[p]
                state["v"] = group["momentum"] * state.get("v", 0) + grad + group["weight_decay"] * p
                p -= group["lr"] * state["v"]


class ForgetsTheVelocity(descent.Momentum):
    @torch.no_grad()
    def step(self):
        for group, p, _ in _with_gradients(self):
            p -= group["lr"] * _decayed(group, p)


class BindsANewName(descent.Momentum):
    "p = p - … moves nothing."

    @torch.no_grad()
    def step(self):
        for group, p, state in _with_gradients(self):
            state["v"] = group["momentum"] * state.get("v", 0) + _decayed(group, p)
            p = p - group["lr"] * state["v"]


class ClearsTheGradients(descent.Momentum):
    @torch.no_grad()
    def step(self):
        super().step()
        self.zero_grad()


# descent.4


def _averages(group, p, state, grad):
    (beta1, beta2), t = group["betas"], state.get("t", 0) + 1
    m = beta1 * state.get("m", 0) + (1 - beta1) * grad
    v = beta2 * state.get("v", 0) + (1 - beta2) * grad**2
    state.update(t=t, m=m, v=v)
    return m, v, beta1, beta2, t


class ForgetsTheCorrection(descent.Adam):
    @torch.no_grad()
    def step(self):
        for group, p, state in _with_gradients(self):
            m, v, *_ = _averages(group, p, state, _decayed(group, p))
            p -= group["lr"] * m / (v.sqrt() + group["eps"])


class CorrectsTheMeanOnly(descent.Adam):
    @torch.no_grad()
    def step(self):
        for group, p, state in _with_gradients(self):
            m, v, beta1, _, t = _averages(group, p, state, _decayed(group, p))
            p -= group["lr"] * m / (1 - beta1**t) / (v.sqrt() + group["eps"])


class CorrectsOneStepLate(descent.Adam):
    "Counts from two, so that nothing is divided by zero."

    @torch.no_grad()
    def step(self):
        for group, p, state in _with_gradients(self):
            m, v, beta1, beta2, t = _averages(group, p, state, _decayed(group, p))
            p -= (
                group["lr"]
                * m
                / (1 - beta1 ** (t + 1))
                / ((v / (1 - beta2 ** (t + 1))).sqrt() + group["eps"])
            )


class CorrectsAsInTheFirstStep(descent.Adam):
    @torch.no_grad()
    def step(self):
        for group, p, state in _with_gradients(self):
            m, v, beta1, beta2, _ = _averages(group, p, state, _decayed(group, p))
            p -= group["lr"] * m / (1 - beta1) / ((v / (1 - beta2)).sqrt() + group["eps"])


class SwapsTheBetas(descent.Adam):
    @torch.no_grad()
    def step(self):
        for group, p, state in _with_gradients(self):
            swapped = {**group, "betas": group["betas"][::-1]}
            m, v, beta1, beta2, t = _averages(swapped, p, state, _decayed(group, p))
            p -= group["lr"] * m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + group["eps"])


class PutsEpsilonUnderTheRoot(descent.Adam):
    @torch.no_grad()
    def step(self):
        for group, p, state in _with_gradients(self):
            m, v, beta1, beta2, t = _averages(group, p, state, _decayed(group, p))
            p -= group["lr"] * m / (1 - beta1**t) / (v / (1 - beta2**t) + group["eps"]).sqrt()


class PutsEpsilonBeforeTheCorrection(descent.Adam):
    "The paper's 'efficient' order: its epsilon is another."

    @torch.no_grad()
    def step(self):
        for group, p, state in _with_gradients(self):
            m, v, beta1, beta2, t = _averages(group, p, state, _decayed(group, p))
            p -= group["lr"] * (1 - beta2**t) ** 0.5 / (1 - beta1**t) * m / (v.sqrt() + group["eps"])


class KnowsItsOwnEpsilon(descent.Adam):
    @torch.no_grad()
    def step(self):
        for group, p, state in _with_gradients(self):
            m, v, beta1, beta2, t = _averages(group, p, state, _decayed(group, p))
            p -= group["lr"] * m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + 1e-8)


class ForgetsTheRoot(descent.Adam):
    @torch.no_grad()
    def step(self):
        for group, p, state in _with_gradients(self):
            m, v, beta1, beta2, t = _averages(group, p, state, _decayed(group, p))
            p -= group["lr"] * m / (1 - beta1**t) / (v / (1 - beta2**t) + group["eps"])


class AveragesTheSizeNotTheSquare(descent.Adam):
    @torch.no_grad()
    def step(self):
        for group, p, state in _with_gradients(self):
            grad = _decayed(group, p)
            m, _, beta1, beta2, t = _averages(group, p, state, grad)
            a = state["a"] = beta2 * state.get("a", 0) + (1 - beta2) * grad.abs()
            p -= group["lr"] * m / (1 - beta1**t) / (a / (1 - beta2**t) + group["eps"])


class SquaresTheAverage(descent.Adam):
    @torch.no_grad()
    def step(self):
        for group, p, state in _with_gradients(self):
            m, _, beta1, beta2, t = _averages(group, p, state, _decayed(group, p))
            w = state["w"] = beta2 * state.get("w", 0) + (1 - beta2) * m**2
            p -= group["lr"] * m / (1 - beta1**t) / ((w / (1 - beta2**t)).sqrt() + group["eps"])


class DecaysAsAdamW(descent.Adam):
    @torch.no_grad()
    def step(self):
        for group, p, state in _with_gradients(self):
            p -= group["lr"] * group["weight_decay"] * p
            m, v, beta1, beta2, t = _averages(group, p, state, p.grad)
            p -= group["lr"] * m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + group["eps"])


class CountsStepsOfTheWholeOptimiser(descent.Adam):
    "Wrong for a parameter whose first gradient comes later."

    @torch.no_grad()
    def step(self):
        t = self.steps = getattr(self, "steps", 0) + 1
        for group, p, state in _with_gradients(self):
            m, v, beta1, beta2, _ = _averages(group, p, state, _decayed(group, p))
            p -= group["lr"] * m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + group["eps"])


class CountsParametersAsSteps(descent.Adam):
    @torch.no_grad()
    def step(self):
        t = getattr(self, "steps", 0)
        for group, p, state in _with_gradients(self):
            t = self.steps = t + 1
            m, v, beta1, beta2, _ = _averages(group, p, state, _decayed(group, p))
            p -= group["lr"] * m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + group["eps"])


class CorrectsTheStoredAverages(descent.Adam):
    "The corrected averages are carried into the next step."

    @torch.no_grad()
    def step(self):
        for group, p, state in _with_gradients(self):
            m, v, beta1, beta2, t = _averages(group, p, state, _decayed(group, p))
            state.update(m=m / (1 - beta1**t), v=v / (1 - beta2**t))
            p -= group["lr"] * state["m"] / (state["v"].sqrt() + group["eps"])


class UsesOneGroupsBetas(descent.Adam):
    @torch.no_grad()
    def step(self):
        for group, p, state in _with_gradients(self):
            first = {**group, "betas": self.param_groups[0]["betas"]}
            m, v, beta1, beta2, t = _averages(first, p, state, _decayed(group, p))
            p -= group["lr"] * m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + group["eps"])


class RemembersTheFirstRate(descent.Adam):
    @torch.no_grad()
    def step(self):
        for group, p, state in _with_gradients(self):
            m, v, beta1, beta2, t = _averages(group, p, state, _decayed(group, p))
            lr = state.setdefault("lr", group["lr"])
            p -= lr * m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + group["eps"])


class NormalisesTheWholeTensor(descent.Adam):
    "One second moment for a tensor, not one for each number."

    @torch.no_grad()
    def step(self):
        for group, p, state in _with_gradients(self):
            m, v, beta1, beta2, t = _averages(group, p, state, _decayed(group, p))
            p -= group["lr"] * m / (1 - beta1**t) / ((v.mean() / (1 - beta2**t)).sqrt() + group["eps"])


# descent.5


def _fit(
    model,
    opt,
    loss_fn,
    train,
    valid,
    epochs,
    *,
    zero=True,
    modes="both",
    grad=False,
    mean="samples",
    keep="item",
):
    "The right loop, with one thing to get wrong at a time."
    losses, valid_losses = [], []
    if modes == "train once":
        model.train()
    for _ in range(epochs):
        if modes in ("both", "never eval"):
            model.train()
        if zero == "epoch":
            opt.zero_grad()
        for x, y in train:
            loss = loss_fn(model(x), y)
            if zero is True:
                opt.zero_grad()
            loss.backward()
            if zero == "after backward":
                opt.zero_grad(set_to_none=False)
            opt.step()
            losses.append({"item": loss.item(), "graph": loss}[keep])
        if modes in ("both", "train once", "never train"):
            model.eval()
        with torch.set_grad_enabled(grad):
            parts = [(loss_fn(model(x), y).item(), len(y)) for x, y in valid]
        total = sum(value * n for value, n in parts)
        valid_losses.append({
            "samples": total / sum(n for _, n in parts),
            "batches": sum(value for value, _ in parts) / len(parts),
            "first size": total / (len(parts) * parts[0][1]),
            "sum": total,
            "last": parts[-1][0],
        }[mean])  # fmt: skip
    return losses, valid_losses


def never_zeroes(*args):
    return _fit(*args, zero=False)


def zeroes_once_an_epoch(*args):
    return _fit(*args, zero="epoch")


def zeroes_after_backward(*args):
    return _fit(*args, zero="after backward")


def never_calls_eval(*args):
    return _fit(*args, modes="never eval")


def never_calls_train(*args):
    return _fit(*args, modes="never train")


def calls_train_before_the_first_epoch_only(*args):
    return _fit(*args, modes="train once")


def sets_no_mode(*args):
    return _fit(*args, modes="none")


def validates_with_a_graph(*args):
    return _fit(*args, grad=True)


def means_the_batch_means(*args):
    return _fit(*args, mean="batches")


def takes_every_batch_for_a_full_one(*args):
    return _fit(*args, mean="first size")


def gives_the_sum(*args):
    return _fit(*args, mean="sum")


def validates_on_the_last_batch(*args):
    return _fit(*args, mean="last")


def keeps_the_losses_with_their_graphs(*args):
    return _fit(*args, keep="graph")


def keeps_graphs_until_the_end(*args):
    losses, valid_losses = _fit(*args, keep="graph")
    return [loss.item() for loss in losses], valid_losses


def adds_losses_with_their_graphs(model, opt, loss_fn, train, valid, epochs):
    losses, valid_losses = [], []
    for _ in range(epochs):
        model.train()
        running = 0
        for x, y in train:
            loss = loss_fn(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            running = running + loss
            losses.append(loss.item())
        valid_losses += _fit(model, opt, loss_fn, [], valid, 1)[1]
    return losses, valid_losses


def validates_once(model, opt, loss_fn, train, valid, epochs):
    losses, valid_losses = _fit(model, opt, loss_fn, [b for _ in range(epochs) for b in train], valid, 1)
    return losses, valid_losses * epochs


def trains_on_the_validation_set(model, opt, loss_fn, train, valid, epochs):
    losses, valid_losses = [], []
    for _ in range(epochs):
        model.train()
        for x, y in train:
            loss = loss_fn(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
        model.eval()
        total = 0
        for x, y in valid:
            loss = loss_fn(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.item() * len(y)
        valid_losses.append(total / sum(len(y) for _, y in valid))
    return losses, valid_losses


def repeats_the_first_pass(model, opt, loss_fn, train, valid, epochs):
    return _fit(model, opt, loss_fn, list(train), valid, epochs)


def steps_once_an_epoch(model, opt, loss_fn, train, valid, epochs):
    losses, valid_losses = [], []
    for _ in range(epochs):
        model.train()
        opt.zero_grad()
        for x, y in train:
            loss = loss_fn(model(x), y)
            loss.backward()
            losses.append(loss.item())
        opt.step()
        valid_losses += _fit(model, opt, loss_fn, [], valid, 1)[1]
    return losses, valid_losses


def drops_the_last_batch(model, opt, loss_fn, train, valid, epochs):
    losses, valid_losses = [], []
    for _ in range(epochs):
        a, b = _fit(model, opt, loss_fn, list(train)[:-1], valid, 1)
        losses, valid_losses = losses + a, valid_losses + b
    return losses, valid_losses


def knows_its_own_loss(model, opt, loss_fn, train, valid, epochs):
    return _fit(model, opt, torch.nn.functional.mse_loss, train, valid, epochs)


def gives_one_loss_an_epoch(*args):
    losses, valid_losses = _fit(*args)
    return losses[:: len(args[3])], valid_losses


def knows_its_own_epochs(model, opt, loss_fn, train, valid, epochs):
    return _fit(model, opt, loss_fn, train, valid, 4)


def gives_the_losses_only(*args):
    return _fit(*args)[0]


REFERENCE = {
    "descent.1": descent.descend,
    "descent.2": descent.largest_stable_lr,
    "descent.3": descent.Momentum,
    "descent.4": descent.Adam,
    "descent.5": descent.fit,
}

MUTANTS = {
    "descent.1": [
        keeps_the_graph, marks_the_start, climbs, adds_up_gradients, moves_the_start,
        keeps_one_tensor_many_times, forgets_the_start, stops_one_short, gives_the_last_point,
        normalises_the_gradient, clips_the_gradient, takes_the_gradient_at_the_start,
        knows_its_own_rate, lowers_the_rate, takes_finite_differences, knows_two_dimensions,
        gives_a_list,
    ],
    "descent.2": [
        one_over_the_curvature, gives_the_curvature, stops_after_five, stops_after_thirty,
        starts_from_ones, starts_from_the_first_axis, never_normalises, takes_the_trace,
        takes_the_largest_stretch, takes_the_mean_curvature, builds_the_matrix,
        builds_part_of_the_matrix, takes_the_largest_diagonal, squares_the_curvature,
        divides_by_the_wrong_norm, stays_safely_below, finds_a_rate_by_trying,
    ],
    "descent.3": [
        TakesAnAverage, AveragesFromTheSecondStepOn, PutsTheRateIntoTheVelocity, KeepsItsStateInFloat32,
        ForgetsWeightDecay, DecaysApartFromTheGradient, LooksAhead, StepsBeforeTheVelocity,
        KeepsTheGradientItself, WritesIntoTheGradient, SharesOneState, KeepsStateByShape,
        UsesTheFirstGroupsOptions, UsesTheDefaults, StepsOnTheFirstGroupOnly, StopsAtAMissingGradient,
        TreatsAMissingGradientAsZero, ForgetsTheVelocity, BindsANewName, ClearsTheGradients,
    ],
    "descent.4": [
        ForgetsTheCorrection, CorrectsTheMeanOnly, CorrectsOneStepLate, CorrectsAsInTheFirstStep,
        SwapsTheBetas, PutsEpsilonUnderTheRoot, PutsEpsilonBeforeTheCorrection, KnowsItsOwnEpsilon,
        ForgetsTheRoot, AveragesTheSizeNotTheSquare, SquaresTheAverage, DecaysAsAdamW,
        CountsStepsOfTheWholeOptimiser, CountsParametersAsSteps, CorrectsTheStoredAverages,
        UsesOneGroupsBetas, RemembersTheFirstRate, NormalisesTheWholeTensor,
    ],
    "descent.5": [
        never_zeroes, zeroes_once_an_epoch, zeroes_after_backward, never_calls_eval, never_calls_train,
        calls_train_before_the_first_epoch_only, sets_no_mode, validates_with_a_graph,
        means_the_batch_means, takes_every_batch_for_a_full_one, gives_the_sum,
        validates_on_the_last_batch, keeps_the_losses_with_their_graphs, keeps_graphs_until_the_end,
        adds_losses_with_their_graphs, validates_once, trains_on_the_validation_set,
        repeats_the_first_pass, steps_once_an_epoch, drops_the_last_batch, knows_its_own_loss,
        gives_one_loss_an_epoch, gives_the_losses_only, knows_its_own_epochs,
    ],
}  # fmt: skip

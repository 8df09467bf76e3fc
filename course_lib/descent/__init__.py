"""Lesson descent: surfaces to walk down, the ways of walking, and the training loop."""

import itertools
import math

import torch

# --- surfaces: each takes points [..., n] and gives heights [...]


def bowl(kappa):
    "A quadratic bowl in two dimensions: curvature 1 along the first axis, `kappa` along the second."

    def f(w):
        return (w[..., 0] ** 2 + kappa * w[..., 1] ** 2) / 2

    return f


def rosenbrock(w):
    "A curved valley, its minimum, 0, at (1, 1). Rosenbrock 1960, with 10 in place of 100."
    return (1 - w[..., 0]) ** 2 + 10 * (w[..., 1] - w[..., 0] ** 2) ** 2


def rugged(w):
    "A wide bowl with ripples, so with many minima; the lowest, 0, lies at the origin."
    return (0.1 * w**2 + 0.4 * (1 - torch.cos(5 * w))).sum(-1)


# --- walking down


def descend(f, start, lr, steps):
    """Gradient descent: the path [steps + 1, *start.shape] from `start`, a step being -lr times the gradient.

    `f` takes a tensor of start's shape and gives one number; it is evaluated once a step.
    """
    w = start.detach()
    path = [w]
    for _ in range(steps):
        w = w.clone().requires_grad_()
        (grad,) = torch.autograd.grad(f(w), w)
        w = w.detach() - lr * grad
        path.append(w)
    return torch.stack(path)


def largest_stable_lr(product, size, products=200):
    """The learning rate above which gradient descent on a quadratic diverges: 2 / λmax.

    `product(v)` multiplies a vector [size] by the Hessian, which has no negative eigenvalue. λmax comes from
    power iteration, with `products` multiplications; a float.
    """
    v = torch.randn(size)
    for _ in range(products - 1):
        v = product(v / v.norm())
    v = v / v.norm()
    return 2 / torch.dot(v, product(v)).item()


def steps_to_settle(kappa, lr, momentum=0.0, to=1e-6, most=1_000_000):
    """Steps until both coordinates of a walk on `bowl(kappa)` from (1, 1) are below `to`; None after `most`.

    The walk is a heavy ball's: velocity = momentum * velocity + gradient, w -= lr * velocity (Polyak 1964).
    """
    x, y, vx, vy = 1.0, 1.0, 0.0, 0.0
    for step in range(1, most + 1):
        vx, vy = momentum * vx + x, momentum * vy + kappa * y
        x, y = x - lr * vx, y - lr * vy
        # A heavy ball swings through zero: it has settled when its speed is small too.
        if max(abs(x), abs(y), lr * abs(vx), lr * abs(vy)) < to:
            return step
        if not abs(y) < 1e12:
            return None
    return None


# --- optimisers


class Momentum(torch.optim.Optimizer):
    "SGD with momentum, as torch.optim.SGD without dampening; weight decay is added to the gradient."

    def __init__(self, params, lr, momentum=0.9, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        "velocity = momentum * velocity + gradient, then w -= lr * velocity, where there is a gradient."
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = p.grad + group["weight_decay"] * p if group["weight_decay"] else p.grad
                state = self.state[p]
                if "velocity" not in state:
                    state["velocity"] = torch.zeros_like(p)
                velocity = state["velocity"].mul_(group["momentum"]).add_(grad)
                p.sub_(velocity, alpha=group["lr"])


class Adam(torch.optim.Optimizer):
    "Adam with bias correction (Kingma & Ba 2014, algorithm 1); weight decay is added to the gradient."

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        "w -= lr * m̂ / (sqrt(v̂) + eps) where there is a gradient; m̂ and v̂ are the corrected averages."
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = p.grad + group["weight_decay"] * p if group["weight_decay"] else p.grad
                state = self.state[p]
                if not state:
                    state.update(t=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                state["t"] += 1
                m = state["m"].mul_(beta1).add_(grad, alpha=1 - beta1)
                v = state["v"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                # The averages start at zero and are too small by these factors in the first steps.
                m_part, v_part = 1 - beta1 ** state["t"], 1 - beta2 ** state["t"]
                p.addcdiv_(m, (v / v_part).sqrt().add_(group["eps"]), value=-group["lr"] / m_part)


# --- the training loop


def fit(model, opt, loss_fn, train, valid, epochs):
    """Train for `epochs` passes over `train`; after each, measure the loss on `valid`.

    `train` and `valid` give batches (x, y) anew each time they are iterated; `loss_fn(model(x), y)` is a
    batch's mean loss. Returns (losses, valid_losses) as floats: one for each step, and for each epoch the
    mean over all validation samples, whatever the sizes of the batches.
    """
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
        total, count = 0.0, 0
        with torch.no_grad():
            for x, y in valid:
                total += loss_fn(model(x), y).item() * len(y)
                count += len(y)
        valid_losses.append(total / count)
    return losses, valid_losses


@torch.no_grad()
def evaluate(model, x, y):
    "Accuracy (0..1) and mean cross-entropy of a classifier on one batch, in eval mode; the mode is put back."
    was = model.training
    model.eval()
    out = model(x)
    model.train(was)
    return (out.argmax(1) == y).float().mean().item(), torch.nn.functional.cross_entropy(out, y).item()


def jitter(x, shift=0.5, degrees=10.0):
    """Each image of [N, C, H, W] turned and moved at random, by up to `shift` pixels and `degrees`.

    Bilinear; what comes in at the border is black.
    """
    n, (h, w) = len(x), x.shape[-2:]
    turn, right, down = (torch.rand(3, n, device=x.device) * 2 - 1).unbind()
    cos, sin = (turn * math.radians(degrees)).cos(), (turn * math.radians(degrees)).sin()
    # affine_grid measures both axes from -1 to 1, whatever the picture's shape: hence h / w and 2 / w.
    rows = [cos, -sin * h / w, right * shift * 2 / w, sin * w / h, cos, down * shift * 2 / h]
    theta = torch.stack(rows, 1).view(n, 2, 3)
    grid = torch.nn.functional.affine_grid(theta, list(x.shape), align_corners=False)
    return torch.nn.functional.grid_sample(x, grid, align_corners=False)


def judged_order(guess, order):
    "A sentence: how many pairs of `guess` stand as in `order`, both lists of the same names, best first."
    if sorted(map(str, guess)) != sorted(order):
        return f"your order is {guess}; expected these four, each once: {', '.join(sorted(order))}"
    pairs = list(itertools.combinations(guess, 2))
    right = sum(order.index(a) < order.index(b) for a, b in pairs)
    return f"you said {', '.join(guess)}: {right} of {len(pairs)} pairs as measured"

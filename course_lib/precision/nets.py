"""A small net whose every tensor is rounded to a format: training with one safeguard left out.

Values are rounded after each operator, forward and backward, and products are summed in float32: what
tensor cores do, on any machine. Loss, optimizer and its state stay in float32.
"""

import contextlib
import itertools
import math
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from course_lib import data, precision


class Rounded(torch.autograd.Function):
    "Round a tensor to a format on the way forward, and its gradient on the way back."

    @staticmethod
    def forward(ctx, x, name):
        ctx.name = name
        return precision.rounded(x, name)

    @staticmethod
    def backward(ctx, grad):
        return precision.rounded(grad, ctx.name), None


def running_product(a, b, name):
    "a [m, k] @ b [k, n] with the running sum rounded to the format `name` after each of the k terms."
    total = torch.zeros(a.shape[0], b.shape[1], device=a.device)
    for column, row in zip(a.split(1, dim=1), b.split(1, dim=0), strict=True):
        total = precision.rounded(torch.addmm(total, column, row), name)
    return total


class RunningProduct(torch.autograd.Function):
    "`running_product` with gradients that are summed the same way."

    @staticmethod
    def forward(ctx, a, b, name):
        ctx.save_for_backward(a, b)
        ctx.name = name
        return running_product(a, b, name)

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        return running_product(grad, b.t(), ctx.name), running_product(a.t(), grad, ctx.name), None


def plain_net(depth, width, seed=0):
    "A plain stack of `depth` linear layers for digits (64 pixels, 10 classes), ReLU between each two."
    torch.manual_seed(seed)
    sizes = [64] + [width] * (depth - 1) + [10]
    return nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))


def forward(net, x, name="fp32", accumulate=None, keep=None):
    "Logits of `plain_net` in the format `name`; `keep` is a list that collects the activations."
    h = Rounded.apply(x, name)
    for i, layer in enumerate(net):
        w = Rounded.apply(layer.weight, name).t()
        h = h @ w if accumulate is None else RunningProduct.apply(h, w, accumulate)
        h = Rounded.apply(h + Rounded.apply(layer.bias, name), name)
        if keep is not None:
            h.retain_grad()
            keep.append(h)
        if i < len(net) - 1:
            h = F.relu(h)
    return h


class Trained(NamedTuple):
    "Loss of each step, share of gradients that are zero, the loss scale, share of weights that moved."

    losses: list
    zeros: list
    scales: list
    moved: list


@contextlib.contextmanager
def one_thread():
    "Nets this small lose more by sharing work than they gain."
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def train(
    name="fp32",
    scale=1.0,
    store="fp32",
    accumulate=None,
    depth=18,
    width=32,
    lr=2e-3,
    steps=120,
    samples=1397,
    optimiser="adam",
    seed=0,
):
    """Train `plain_net` on digits on the CPU, every tensor rounded to the format `name`: a `Trained`.

    `scale` is a fixed loss scale or a `precision.Scaler`. `store` is the format that the weights are kept in
    between steps, "fp32" for master weights, or "stochastic": bf16, rounded stochastically. `accumulate` is
    the format of running sums in products, None for float32.
    """
    with one_thread():
        net = plain_net(depth, width, seed)
        params = list(net.parameters())
        x, y = (t[:samples] for t in data.digits().train)
        x = x.flatten(1)
        # Adam divides by the gradient's size plus eps: its default of 1e-8 would drown these gradients.
        if optimiser == "adam":
            opt = torch.optim.Adam(params, lr=lr, eps=1e-12)
        else:
            opt = torch.optim.SGD(params, lr=lr)
        _store(params, store)
        found = Trained([], [], [], [])
        dynamic = isinstance(scale, precision.Scaler)
        for _ in range(steps):
            factor = scale.scale if dynamic else scale
            loss = F.cross_entropy(forward(net, x, name, accumulate), y)
            opt.zero_grad()
            (loss * factor).backward()
            found.losses.append(loss.item())
            found.scales.append(factor)
            found.zeros.append(share(p.grad == 0 for p in params))
            before = [p.detach().clone() for p in params]
            if dynamic:
                scale.step(opt)
            else:
                for p in params:
                    p.grad.div_(factor)
                opt.step()
            _store(params, store)
            found.moved.append(share(p != b for p, b in zip(params, before, strict=True)))
        return found


@torch.no_grad()
def _store(params, store):
    for p in params:
        p.copy_(precision.stochastic_round(p) if store == "stochastic" else precision.rounded(p, store))


def share(masks):
    "The part of all elements of several boolean tensors that is true."
    masks = list(masks)
    return sum(int(m.sum()) for m in masks) / sum(m.numel() for m in masks)


def gradients(depth=18, width=32, samples=1397, seed=0):
    """The gradients of `plain_net` before its first step as one flat tensor.

    Those of all weights, and those of the activations of every 16th image.
    """
    net, kept = plain_net(depth, width, seed), []
    x, y = (t[:samples] for t in data.digits().train)
    F.cross_entropy(forward(net, x.flatten(1), keep=kept), y).backward()
    return torch.cat([t.grad.flatten() for t in net.parameters()] + [t.grad[::16].flatten() for t in kept])


def fates(grads, name, scale=1.0):
    """What becomes of gradients times `scale` in a format, as shares of those that aren't zero.

    {"lost": rounded to zero, "coarse": subnormal, "kept": with the full fraction, "over": past the largest}.
    """
    fmt = precision.format_of(name)
    size = (grads[grads != 0].abs().double()) * scale
    # Half the smallest number is a tie, and zero is even; likewise half a step past the largest is over.
    step = 2.0 ** (math.frexp(fmt.largest)[1] - 1 - fmt.fraction)
    over = size >= fmt.largest + step / 2
    lost = size <= fmt.smallest / 2
    coarse = (size < fmt.normal) & ~lost
    masks = {"lost": lost, "coarse": coarse, "kept": ~(lost | coarse | over), "over": over}
    return {k: int(m.sum()) / max(1, size.numel()) for k, m in masks.items()}

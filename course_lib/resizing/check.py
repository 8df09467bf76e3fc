"Checks of resizing. Oracles: batch norm in float64, Pillow, another loop, fastai's Learner, brute force."

import copy
import itertools
import random
import warnings

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from course_lib import checking as core
from course_lib.checking import yours  # noqa: F401

# --- resizing.1 ---------------------------------------------------------------------------


def _norms(net):
    return [m for m in net.modules() if isinstance(m, nn.BatchNorm2d)]


def _state(net):
    "Everything about a network that a careless answer could change."
    flags = [m.training for m in net.modules()], [(m.momentum, m.track_running_stats) for m in _norms(net)]
    return {k: v.clone() for k, v in net.state_dict().items()}, flags


def _unchanged(net, before, name):
    tensors, flags = _state(net)
    changed = [k for k, v in before[0].items() if not torch.equal(v, tensors[k])]
    core.require(not changed, f"{name} changed {changed[:2]} of the network that it was given")
    core.require(flags == before[1], f"{name} changed the mode or the momentum of the network it was given")


@core.exercise(
    "resizing.1", "the statistics of five networks right, their weights and the originals as before"
)
def recalibrate(answer):
    for case in range(5):
        channels, a, b = core.ragged(2, 9, 3)
        net = nn.Sequential(nn.Conv2d(channels, a, 3), nn.BatchNorm2d(a, momentum=0.3), nn.ReLU(),
                            nn.Sequential(nn.Conv2d(a, b, 3, 2), nn.BatchNorm2d(b)), nn.ReLU(),
                            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(b, 4))  # fmt: skip
        for _ in range(3):  # it has been trained, on other images
            net(3 * torch.randn(4, channels, 12, 12) - 2)
        net.train(case % 2 == 0)
        batches = [torch.randn(n, channels, *core.ragged(9, 19, 2)) * random.uniform(0.5, 3) + random.random()
                   for n in core.ragged(3, 9, random.randint(2, 4))]  # fmt: skip
        before, want = _state(net), _statistics(net, batches)
        got = core.call(answer, net, (x.clone() for x in batches), mutates=(0, 1))
        what = f"the network of {len(batches)} batches"
        core.require(isinstance(got, nn.Module), f"{what}: expected a network, got {core.kind(got)}")
        _unchanged(net, before, "recalibrate")
        core.require([type(m) for m in got.modules()] == [type(m) for m in net.modules()],
                     f"{what}: expected a copy with the same layers")  # fmt: skip
        mine = {t.data_ptr() for t in net.state_dict().values()}
        core.require(not mine & {t.data_ptr() for t in got.state_dict().values()},
                     f"{what} shares tensors with the original; copy.deepcopy gives it its own")  # fmt: skip
        for (name, p), q in zip(net.named_parameters(), got.parameters(), strict=True):
            core.require(torch.equal(p, q), f"the weight {name} changed; only statistics may")
        for k, (norm, (mean, var)) in enumerate(zip(_norms(got), want, strict=True), 1):
            core.close(
                norm.running_mean, mean, f"running_mean of batch norm {k} after {len(batches)} batches"
            )
            core.close(norm.running_var, var, f"running_var of batch norm {k} after {len(batches)} batches",
                       rtol=1e-3)  # fmt: skip
        core.require([m.momentum for m in _norms(got)] == [0.3, 0.1], "momentum: expected the original's, "
                     f"[0.3, 0.1], got {[m.momentum for m in _norms(got)]}")  # fmt: skip
        core.require(not any(m.training for m in got.modules()), f"{what} is in training mode; call .eval()")


def _statistics(net, batches):
    "The mean of the batches' own statistics for each batch norm, layer by layer, in float64."
    found = [[], []]
    conv1, norm1, conv2, norm2 = (copy.deepcopy(m).double() for m in (net[0], net[1], *net[3]))
    for x in batches:
        with torch.no_grad():
            for k, (conv, norm) in enumerate(((conv1, norm1), (conv2, norm2))):
                x = conv(x.double())
                found[k].append((x.mean((0, 2, 3)), x.var((0, 2, 3))))
                x = F.batch_norm(x, None, None, norm.weight, norm.bias, True, 0.0, norm.eps).relu()
    return [[torch.stack(values).mean(0) for values in zip(*layer, strict=True)] for layer in found]


# --- resizing.2 ---------------------------------------------------------------------------


@core.exercise("resizing.2", "four networks take images of any size, rectangles too, and keep their layers")
def size_free(answer):
    for case in range(4):
        channels, a, b, classes = core.ragged(2, 12, 4)
        height, width = core.ragged(11, 24, 2)
        dtype = torch.float64 if case == 3 else torch.float32
        body = nn.Sequential(nn.Conv2d(channels, a, 3, 2, padding=1), nn.BatchNorm2d(a), nn.ReLU(),
                             nn.Conv2d(a, b, 3, padding=case % 2), nn.ReLU()).to(dtype)  # fmt: skip
        x = torch.randn(1 + case % 3, channels, height, width, dtype=dtype)
        body(torch.randn(3, channels, height, width, dtype=dtype))
        net = nn.Sequential(*body, nn.Flatten(), nn.Linear(body(x)[0].numel(), classes, dtype=dtype))
        net.train(case % 2 == 0)
        before, layers = _state(net), list(net)
        got = core.call(answer, net, x, mutates=(0,))
        what = f"a network for images of {height} × {width} pixels"
        core.require(
            isinstance(got, nn.Sequential), f"{what}: expected an nn.Sequential, got {core.kind(got)}"
        )
        core.require(list(net) == layers, f"{what}: the given network's layers changed; build a new one")
        _unchanged(net, before, "size_free")
        core.require(list(got)[:5] == layers[:5], f"{what}: expected the same layer objects before the mean")
        head = [m for m in got.modules() if isinstance(m, nn.Linear)]
        shape = [tuple(m.weight.shape) for m in head]
        core.equal(
            shape, [(classes, b)], f"{what}, whose last map has {b} channels: weights of its linear layer"
        )
        core.require(head[0].weight.dtype == dtype, f"{what}: its weights are {dtype}, the new layer's are "
                     f"{head[0].weight.dtype}")  # fmt: skip
        body.eval(), got.eval()
        for size in ((height, width), core.ragged(9, 40, 2), core.ragged(41, 70, 2)):
            y = torch.randn(2, channels, *size, dtype=dtype)
            with torch.no_grad():
                want = F.linear(body(y).flatten(2).mean(2), head[0].weight, head[0].bias)
                core.close(core.call(got, y), want, f"{what} on {size[0]} × {size[1]}")


# --- resizing.3 ---------------------------------------------------------------------------


@core.exercise(
    "resizing.3", "as Pillow does it, five types, rectangles, in one call a batch; stripes turn grey"
)
def resize(answer):
    side, high = random.choice([45, 51, 57]), {torch.uint8: 255}
    tolerance = {torch.uint8: 1.001, torch.float16: 4e-3, torch.bfloat16: 2e-2}
    for n, channels, size in ((3, 1, 20), (2, 3, 31), (4, 2, side - 2), (2, 1, side + 18)):
        noise = torch.rand(n, channels, side, side + random.choice([-8, 7]))
        for dtype in (torch.uint8, torch.float32, torch.float64, torch.float16, torch.bfloat16):
            top = high.get(dtype, 1)
            x = (noise * top).round().to(dtype) if top > 1 else noise.to(dtype)
            if dtype == torch.float64:
                x = x + 1e-9 * torch.rand_like(x)
            what = f"{dtype} images {list(x.shape)} at size {size}".replace("torch.", "")
            got = core.call(answer, x, size)
            core.require(isinstance(got, torch.Tensor) and got.dtype == dtype,
                         f"{what}: expected {dtype} as given, got {core.kind(got)}")  # fmt: skip
            want = _pillow(x, size)
            core.close(got.double(), want, what, rtol=0, atol=tolerance.get(dtype, 2e-3))
            inside = got.double().min() >= -1e-5 and got.double().max() <= top + 1e-5
            core.require(inside, f"{what}: values leave the range from 0 to {top}")
            # Rounding down passes a tolerance of one level, and shows in the mean.
            drift = (got.double() - want).mean().item() if top > 1 else 0
            core.require(abs(drift) < 0.15, f"{what}: {drift:+.2f} levels on average; round to the nearest")
            if dtype == torch.float64:
                exact = F.interpolate(x, size=(size, size), mode="bilinear", antialias=True)
                core.close(got, exact, f"{what}, computed in float64", rtol=0, atol=1e-11)
    stripes = torch.zeros(2, 1, 60, 60)
    stripes[0, 0, :, ::2], stripes[1, 0, ::2, :] = 1, 1
    off = (core.call(answer, stripes, random.choice([12, 25]))[..., 2:-2, 2:-2] - 0.5).abs().max().item()
    core.require(off < 0.06, "stripes one pixel wide: expected an even grey, 0.5, got values up to "
                 f"{off:.2f} away from it; average over all pixels that fall into one (antialias)")  # fmt: skip
    few, many = (_operators(answer, torch.rand(n, 2, 24, 29)) for n in (2, 19))
    core.require(few == many, f"{few} operators ran for 2 images and {many} for 19; expected as many: resize "
                 "the batch in one call")  # fmt: skip


def _pillow(x, size):
    "Each channel of each image by itself, with Pillow's bilinear filter on float32."
    import numpy as np
    from PIL import Image

    def one(plane):
        image = Image.fromarray(plane.float().numpy()).resize((size, size), Image.Resampling.BILINEAR)
        return torch.from_numpy(np.array(image)).double()

    found = torch.stack([torch.stack([one(plane) for plane in image]) for image in x])
    return found.round() if x.dtype == torch.uint8 else found


class _Calls(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.n = getattr(self, "n", 0) + 1
        return func(*args, **(kwargs or {}))


def _operators(answer, x):
    with _Calls() as calls:
        answer(x, 16)
    return calls.n


# --- resizing.4 and resizing.5 --------------------------------------------------------------


class _Seen(nn.Module):
    "A small network that keeps the side and the mode of all it is shown."

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(),
                                 nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))  # fmt: skip
        self.seen = []

    def forward(self, x):
        self.seen.append((self.training, x.shape[-1]))
        return self.net(x)


class _Passes:
    "A loader of ragged batches: every pass has other images, and it can only be iterated."

    def __init__(self, sizes):
        self.passes = [[(torch.randn(n, 1, 30, 34), torch.randint(5, (n,))) for n in sizes] for _ in range(9)]
        self.taken = 0

    def __iter__(self):
        self.taken += 1
        return iter(self.passes[self.taken - 1])

    def __len__(self):
        return len(self.passes[0])

    def to(self, device):
        return self


def _by_hand(net, passes, schedule, rate):
    "The losses of all steps, and the network after them; rates fall by a fifth each step."
    losses, step = [], 0
    net.train()
    for side, batches in zip(schedule, passes, strict=False):
        for x, y in batches:
            net.zero_grad()
            small = F.interpolate(x, size=(side, side), mode="bilinear", antialias=True)
            losses.append(F.cross_entropy(net(small), y))
            losses[-1].backward()
            with torch.no_grad():
                for p in net.parameters():
                    p -= rate * 0.8**step * p.grad
            step += 1
    return losses


@core.exercise(
    "resizing.4", "losses, weights and sizes right for five schedules, one flat and one that shrinks"
)
def train(answer):
    for schedule in ([12, 18, 30], [30, 30], [26, 14], [11, 17, 17, 23], [20]):
        net, loader, rate = _Seen(), _Passes(core.ragged(3, 9, 3)), random.uniform(0.05, 0.3)
        twin = copy.deepcopy(net)
        net.eval()
        opt = torch.optim.SGD(net.parameters(), lr=rate)
        cycle = torch.optim.lr_scheduler.ExponentialLR(opt, 0.8)
        for p in net.parameters():  # what an earlier backward pass left
            p.grad = torch.ones_like(p)
        want = _by_hand(twin, loader.passes, schedule, rate)
        got = core.call(answer, net, opt, cycle, loader, list(schedule), mutates=(0, 1, 2, 3))
        what = f"schedule {schedule} with 3 batches an epoch"
        core.equal(
            [s for _, s in net.seen], [s for _, s in twin.seen], f"{what}: the sides that the network saw"
        )
        core.require(all(mode for mode, _ in net.seen), f"{what}: expected training mode, and the network was "
                     "in evaluation mode; call net.train() first")  # fmt: skip
        core.equal(loader.taken, len(schedule), f"{what}: passes over the batches")
        core.require(isinstance(got, list) and len(got) == len(want) and
                     all(isinstance(v, torch.Tensor) and not v.requires_grad for v in got),
                     f"{what}: expected a list of {len(want)} detached losses, got {core.kind(got)}")  # fmt: skip
        for k, (a, b) in enumerate(zip(got, want, strict=True)):
            core.close(a, b.item(), f"{what}: loss of step {k + 1}", rtol=1e-3)
        for (name, p), q in zip(net.named_parameters(), twin.parameters(), strict=True):
            core.close(p, q, f"{what}: {name} after training", rtol=1e-2, atol=1e-4)


@core.exercise(
    "resizing.5", "fastai's Learner trains at the schedule's sizes, validates at full size, fits twice"
)
def size_schedule(answer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from fastai.callback.core import Callback
        from fastai.data.core import DataLoaders
        from fastai.learner import Learner
    core.need_callable(answer, "the class SizeSchedule")
    for schedule in ([12, 18, 30], [26, 14]):
        net, loader, valid = _Seen(), _Passes(core.ragged(3, 9, 3)), _Passes([7, 4])
        callback = core.call(answer, list(schedule))
        core.require(isinstance(callback, Callback), "expected a fastai Callback, got " + core.kind(callback))
        seen = _Inputs()
        net.register_forward_pre_hook(seen)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            learn = Learner(DataLoaders(loader, valid, device="cpu"), net, loss_func=F.cross_entropy,
                            opt_func=_sgd, cbs=[callback])  # fmt: skip
        learn.remove_cbs([c for c in learn.cbs if c.name == "progress"])  # it would draw a bar
        for _ in range(2):  # the second fit begins with the schedule's first side again
            try:
                with learn.no_logging():
                    learn.fit(len(schedule), lr=0.01)
            except NotImplementedError:
                raise NotImplementedError from None
            except Exception as e:
                raise core.Wrong(f"during learn.fit the callback raised {core.describe(e)}") from None
        what = f"SizeSchedule({schedule}), two fits"
        epochs = [[(True, side)] * 3 + [(False, 34)] * 2 for side in schedule] * 2
        core.equal(net.seen, list(itertools.chain(*epochs)), f"{what}: (training, width) of each batch")
        x = [x for batches in loader.passes for x, _ in batches]
        for k in (0, 3, 3 * len(schedule)):
            side = schedule[k // 3 % len(schedule)]
            want = F.interpolate(x[k], size=(side, side), mode="bilinear", antialias=True)
            core.close(seen.training[k], want, f"{what}: images of training batch {k + 1}", atol=1e-3)


class _Inputs:
    def __init__(self):
        self.training = []

    def __call__(self, module, inputs):
        if module.training:
            self.training.append(inputs[0].detach().clone())


def _sgd(params, lr):
    from fastai.optimizer import SGD

    return SGD(params, lr=lr)


# --- resizing.6 ---------------------------------------------------------------------------


@core.exercise(
    "resizing.6", "the longest schedule within the budget for forty plans, budgets met exactly among them"
)
def schedule_for(answer):
    for case in range(40):
        sides = sorted(random.sample(range(32, 300, 4), random.randint(1, 4)))
        plan = [(side, random.randint(1, 5)) for side in sides]
        fixed = random.randint(1, 10**6)  # what does not shrink with the pixels
        cost = {side: 100 * side**2 + fixed for side in [*sides, 8]}
        n = random.randint(0, 30)
        exact = sum(cost[s] for s in _spread(plan, n))
        budget = exact + (0 if case % 2 else random.randrange(cost[sides[0]] // 2))
        want = []
        while sum(cost[s] for s in _spread(plan, len(want) + 1)) <= budget:
            want = _spread(plan, len(want) + 1)
        got = core.call(answer, budget, dict(cost), list(plan))
        core.require(isinstance(got, list), f"expected a list of sides, got {core.kind(got)}")
        what = f"schedule_for({budget:,}, …, {plan}) with cost { ({s: cost[s] for s in sides}) }"
        core.equal(len(got), len(want), what, "epochs")
        core.equal(got, want, what if len(want) < 9 else f"the plan {plan} over {len(want)} epochs")


def _spread(plan, n):
    "The sides of `n` epochs: epoch k belongs to the first stage whose parts reach beyond k / n."
    whole, found = sum(parts for _, parts in plan), []
    for k in range(n):
        reached = 0
        for side, parts in plan:
            reached += parts
            if (k + 1) * whole <= n * reached:
                break
        found.append(side)
    return found

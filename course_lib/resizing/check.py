"Checks of resizing. Oracles: batch norm in float64, Pillow, another loop, fastai's Learner, brute force."

import copy
import itertools
import random
import warnings

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from course_lib import checking as core
from course_lib import meter
from course_lib.checking import require, yours  # noqa: F401


def _norms(net):
    return [m for m in net.modules() if isinstance(m, nn.BatchNorm2d)]


def _state(net):
    "All of a network that a careless answer could change: tensors, then modes and momenta."
    flags = [m.training for m in net.modules()], [m.momentum for m in _norms(net)]
    return {k: v.clone() for k, v in net.state_dict().items()}, flags


def _unchanged(net, before):
    tensors, flags = _state(net)
    changed = [k for k, v in before[0].items() if not torch.equal(v, tensors[k])]
    require(not changed, f"{changed[:2]} of the network that was given changed; it must stay as it is")
    for what, old, now in zip(("mode", "momenta"), before[1], flags, strict=True):
        require(old == now, f"the {what} of the network that was given changed; work on a copy")


class _Training(nn.Module):
    "Doubles its input in training mode: like dropout, it shows the mode, but without chance."

    def forward(self, x):
        return x * (1 + self.training)


@core.exercise("resizing.1", "statistics of five networks right, weights and the originals as before")
def recalibrate(answer):
    for case in range(5):
        channels, a, b = core.ragged(2, 9, 3)
        deeper = nn.Sequential(nn.Conv2d(a, b, 3, 2), nn.BatchNorm2d(b))
        head = nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(b, 4)
        first = nn.Conv2d(channels, a, 3), nn.BatchNorm2d(a, momentum=0.3), nn.ReLU()
        net = nn.Sequential(*first, _Training(), deeper, *head)
        for _ in range(3):  # it has been trained, on other images
            net(3 * torch.randn(4, channels, 12, 12) - 2)
        for p in net.parameters():
            p.data += 0.1 * torch.rand_like(p)
        net.train(case % 2 == 0)
        sizes = core.ragged(3, 9, random.randint(2, 4))
        images = (torch.randn(n, channels, *core.ragged(9, 19, 2)) for n in sizes)
        batches = [x * random.uniform(0.5, 3) + random.random() for x in images]
        before, want = _state(net), _statistics(net, batches)
        got = core.call(answer, net, (x.clone() for x in batches), mutates=(0, 1))
        what = f"the copy after {len(batches)} batches"
        require(isinstance(got, nn.Module), f"{what}: expected a network, got {core.kind(got)}")
        _unchanged(net, before)
        same = [type(m) for m in got.modules()] == [type(m) for m in net.modules()]
        require(same, f"{what}: expected the layers of the original")
        mine, theirs = ({t.data_ptr() for t in n.state_dict().values()} for n in (net, got))
        require(not mine & theirs, f"{what} shares tensors with the original; copy.deepcopy gives it its own")
        for (name, p), q in zip(net.named_parameters(), got.parameters(), strict=True):
            require(torch.equal(p, q), f"{what}: the weight {name} changed; only statistics may")
            require(
                q.requires_grad, f"{what}: requires_grad of the weight {name} was lost; use torch.no_grad()"
            )
        for k, (norm, (mean, var)) in enumerate(zip(_norms(got), want, strict=True), 1):
            how = f"of batch norm {k} (plain means since a reset, all layers in training mode)"
            core.close(norm.running_mean, mean, f"{what}: running_mean {how}")
            core.close(norm.running_var, var, f"{what}: running_var {how}", rtol=1e-3)
        core.equal([m.momentum for m in _norms(got)], [0.3, 0.1], f"{what}: momenta, as in the original")
        hooks = any(m._forward_hooks or m._forward_pre_hooks for m in got.modules())
        require(not hooks, f"{what} still has your hooks; remove() them")
        require(not any(m.training for m in got.modules()), f"{what} is in training mode; call .eval()")


def _statistics(net, batches):
    "The mean of the batches' own statistics for each batch norm, layer by layer, in float64."
    found = [[], []]
    conv1, norm1, conv2, norm2 = (copy.deepcopy(m).double() for m in (net[0], net[1], *net[4]))
    for x in batches:
        with torch.no_grad():
            for k, (conv, norm) in enumerate(((conv1, norm1), (conv2, norm2))):
                x = conv(x.double())
                found[k].append((x.mean((0, 2, 3)), x.var((0, 2, 3))))
                x = F.batch_norm(x, None, None, norm.weight, norm.bias, True, 0.0, norm.eps).relu() * 2
    return [[torch.stack(values).mean(0) for values in zip(*layer, strict=True)] for layer in found]


@core.exercise("resizing.2", "four networks take images of any size, rectangles too, and keep their layers")
def size_free(answer):
    for case in range(4):
        channels, a, b, classes = core.ragged(2, 12, 4)
        height, width = core.ragged(11, 24, 2)
        dtype = torch.float64 if case == 3 else torch.float32
        first = nn.Conv2d(channels, a, 3, 2, padding=1), nn.BatchNorm2d(a), nn.ReLU()
        last = nn.Conv2d(a, b, 3, padding=case % 2), nn.ReLU()
        if case == 1:
            last = last[:1]
        if case == 2:  # the last map has other channels than the last convolution
            last = nn.Conv2d(a, 4 * b, 3), nn.PixelShuffle(2)
        body = nn.Sequential(*first, *last).to(dtype)
        body(torch.randn(3, channels, height, width, dtype=dtype))
        x = torch.randn(1 + case % 3, channels, height, width, dtype=dtype)
        net = nn.Sequential(*body, nn.Flatten(), nn.Linear(body(x)[0].numel(), classes, dtype=dtype))
        net.train(case % 2 == 0)
        net[1].eval()  # a batch norm that its owner has frozen
        before, layers = _state(net), list(net)
        got = core.call(answer, net, x, mutates=(0,))
        what = f"a network for {height} × {width} pixels"
        require(isinstance(got, nn.Sequential), f"{what}: expected nn.Sequential, got {core.kind(got)}")
        require(list(net) == layers, f"{what}: the given network's layers changed; build a new one")
        _unchanged(net, before)
        flat = [m for m in got.modules() if not isinstance(m, nn.Sequential)]  # `net[:-2]` in one piece, too
        same = flat[: len(body)] == layers[:-2]
        require(same, f"{what}: expected the same layer objects before the mean")
        weights = [m.weight for m in flat if isinstance(m, nn.Linear)]
        lazy = any(map(nn.parameter.is_lazy, weights))
        require(
            not lazy, f"{what}: the new layer has no weights yet; run a lazy layer once, or use nn.Linear"
        )
        shape = f"{what}, {b} channels in its last map: shape of the new layer's weights"
        core.equal([tuple(w.shape) for w in weights], [(classes, b)], shape)
        require(weights[0].dtype == dtype, f"{what}: expected weights in {dtype}, got {weights[0].dtype}")
        body.eval(), got.eval()
        for size in ((height, width), core.ragged(9, 40, 2), core.ragged(41, 70, 2)):
            y = torch.randn(2, channels, *size, dtype=dtype)
            with torch.no_grad():
                want = F.linear(body(y).flatten(2).mean(2), weights[0], got[-1].bias)
                core.close(
                    core.call(got, y), want, f"{what}, given {size[0]} × {size[1]}, from the map's means"
                )


@core.exercise(
    "resizing.3", "as Pillow does it, five types, rectangles, in one call a batch; stripes turn grey"
)
def resize(answer):
    side = random.choice([45, 51, 57])
    half_step = {torch.float16: 2**-11, torch.bfloat16: 2**-8}  # rounded once, at the end
    cases = (1, 3, side + 7, 20), (3, 1, side - 8, 31), (2, 2, side + 7, side), (4, 2, side - 8, side - 8)
    for n, channels, width, size in *cases, (2, 1, side + 7, side + 18):
        noise = torch.rand(n, side, width, channels, dtype=torch.float64).movedim(-1, 1)  # channels last
        for dtype in (torch.uint8, torch.float32, torch.float64, torch.float16, torch.bfloat16):
            levels = dtype == torch.uint8
            x = (noise * 255).round().to(dtype) if levels else (8 * noise - 4).to(dtype)
            what = f"{dtype} images {list(x.shape)} at size {size}".replace("torch.", "")
            got, want = core.call(answer, x, size), _pillow(x, size)
            core.equal(core.kind(got), core.kind(want.to(dtype)), what)
            core.close(got.double(), want, what, half_step.get(dtype, 0), 1.001 if levels else 2e-4)
            drift = levels * (got.double() - want).mean().item()  # which shows that all were rounded down
            require(abs(drift) < 0.15, f"{what}: {drift:+.2f} levels on average; round to the nearest")
            if dtype == torch.float64:
                exact = F.interpolate(x, size=(size, size), mode="bilinear", antialias=True)
                core.close(1e9 * (got - exact), 0 * exact, f"{what}, 10⁹ times the error", atol=0.01)
    stripes = torch.zeros(2, 1, 60, 60)
    stripes[0, 0, :, ::2], stripes[1, 0, ::2, :] = 1, 1
    off = (core.call(answer, stripes, random.choice([12, 25]))[..., 2:-2, 2:-2] - 0.5).abs().max().item()
    grey = f"stripes one pixel wide: expected grey, 0.5, got values up to {off:.2f} away from it"
    require(off < 0.06, f"{grey}; average over all pixels that fall into one (antialias)")
    few, many = (meter.of(answer, torch.rand(n, 2, 24, 29), 16, portable=False).ops for n in (2, 19))
    require(few == many, f"{few} operators ran for 2 images and {many} for 19; resize the batch in one call")


def _pillow(x, size):
    "Each channel of each image by itself, with Pillow's bilinear filter on float32."
    import numpy as np
    from PIL import Image

    def one(plane):
        image = Image.fromarray(plane.float().numpy()).resize((size, size), Image.Resampling.BILINEAR)
        return torch.from_numpy(np.array(image)).double()

    found = torch.stack([torch.stack([one(plane) for plane in image]) for image in x])
    return found.round() if x.dtype == torch.uint8 else found


class _Seen(nn.Module):
    "A small network that keeps the mode in which it was called, and the images."

    def __init__(self):
        super().__init__()
        head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)
        self.net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), *head)
        self.seen = []

    def forward(self, *inputs):
        one = "the network was called with {} inputs: self.learn.xb must be a tuple of one tensor, (images,)"
        require(len(inputs) == 1, one.format(len(inputs)))
        self.seen.append((self.training, inputs[0].detach().clone()))
        return self.net(inputs[0])

    def sides(self):
        return [x.shape[-1] for _, x in self.seen]


class _Passes:
    "A loader of ragged batches, rectangles: each pass has other images, and it can only be iterated."

    def __init__(self, sizes):
        self.passes = [[(torch.randn(n, 1, 30, 34), torch.randint(5, (n,))) for n in sizes] for _ in range(9)]
        self.taken, self.given = 0, core.clone(self.passes)

    def require_as_given(self, what):
        same = all(map(torch.equal, *map(pytree.tree_leaves, (self.given, self.passes))))
        require(same, f"{what}: the loader's own images were changed; the smaller ones are new tensors")

    def __iter__(self):
        self.taken += 1
        return iter(self.passes[self.taken - 1])

    def __len__(self):
        return len(self.passes[0])

    def to(self, device):
        return self


def _squeezed(x, side):
    return F.interpolate(x, size=(side, side), mode="bilinear", antialias=True)


def _by_hand(net, passes, schedule, rate):
    "For each step: loss, learning rate, gradients. The rate falls by a fifth after each."
    steps, sides = [], [side for side in schedule for _ in passes[0]]
    for k, (side, (x, y)) in enumerate(zip(sides, itertools.chain(*passes), strict=False)):
        loss = F.cross_entropy(net(_squeezed(x, side)), y)
        grads = torch.autograd.grad(loss, [*net.parameters()])
        steps.append((loss, rate * 0.8**k, torch.cat([g.flatten() for g in grads])))
        for p, grad in zip(net.parameters(), grads, strict=True):
            p.data -= rate * 0.8**k * grad
    return steps


def _watched(opt, net):
    "A list that gets what each later opt.step() used: learning rate and gradients."

    def note(opt, args, kwargs):
        grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in net.parameters()]
        found.append((opt.param_groups[0]["lr"], torch.cat([g.flatten() for g in grads])))

    found = []
    opt.register_step_post_hook(note)  # a closure computes the gradients inside the step
    return found


@core.exercise(
    "resizing.4", "losses, weights and sizes right for five schedules, one flat and one that shrinks"
)
def train(answer):
    for schedule in ([12, 18, 30], [30, 30], [26, 14], [11, 17, 17, 23], [20]):
        net, loader, rate = _Seen().eval(), _Passes(core.ragged(3, 9, 3)), random.uniform(0.05, 0.3)
        twin = copy.deepcopy(net).train()
        opt = torch.optim.SGD(net.parameters(), lr=rate)
        cycle = torch.optim.lr_scheduler.ExponentialLR(opt, 0.8)
        for p in net.parameters():  # what an earlier backward pass left
            p.grad = torch.ones_like(p)
        used = _watched(opt, net)
        want = _by_hand(twin, loader.passes, schedule, rate)
        got = core.call(answer, net, opt, cycle, loader, list(schedule), mutates=(0, 1, 2, 3))
        what = f"schedule {schedule}, 3 batches an epoch"
        core.equal(net.sides(), twin.sides(), f"{what}: the sides that the network saw")
        require(all(mode for mode, _ in net.seen), f"{what}: not in training mode; call net.train() first")
        core.equal(loader.taken, len(schedule), f"{what}: passes over the batches")
        loader.require_as_given(what)
        n = len(got) if isinstance(got, list) else core.kind(got)
        core.equal(n, len(want), f"{what}: length of the list of losses")
        bare = all(isinstance(v, torch.Tensor) and not v.requires_grad for v in got)
        require(bare, f"{what}: expected losses that are tensors without a graph; use loss.detach()")
        core.equal(len(used), len(want), f"{what}: calls of opt.step()")
        for k, (a, (lr, grads), (loss, rate_now, ours)) in enumerate(zip(got, used, want, strict=True), 1):
            core.close(lr, rate_now, f"{what}: learning rate of step {k} (cycle.step() follows opt.step())")
            alone = (grads - ours).norm() < 0.5 * ours.norm()  # the losses are compared closely
            zero = "are not those of its loss alone; call opt.zero_grad() before loss.backward()"
            require(alone, f"{what}: the gradients of step {k} {zero}")
            core.close(a, loss.item(), f"{what}: loss of step {k}", rtol=3e-4)
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
        from fastai.optimizer import SGD
    for schedule in ([12, 18, 30], [26, 14]):
        net, loader, valid = _Seen(), _Passes(core.ragged(3, 9, 3)), _Passes([7, 4])
        callback = core.call(answer, list(schedule))
        require(isinstance(callback, Callback), "expected a fastai Callback, got " + core.kind(callback))
        dls = DataLoaders(loader, valid, device="cpu")
        learn = Learner(dls, net, loss_func=F.cross_entropy, opt_func=SGD, cbs=[callback])
        learn.remove_cbs([c for c in learn.cbs if c.name == "progress"])  # it would draw a bar
        for _ in range(2):  # the second fit begins with the schedule's first side again
            try:
                with learn.no_logging():
                    learn.fit(len(schedule), lr=0.01)
            except core.Wrong:
                raise
            except Exception as e:
                if core._is_stub(e):  # fastai wraps what a callback raises
                    raise NotImplementedError from None
                raise core.Wrong(f"during learn.fit the callback raised {core.describe(e)}") from None
        what = f"SizeSchedule({schedule}), two fits"
        core.equal(len(net.seen), 10 * len(schedule), f"{what}: batches of training and validation")
        loader.require_as_given(what)
        images = [x for batches in loader.passes for x, _ in batches]
        for k, (training, found) in enumerate(net.seen):
            epoch, batch = divmod(k, 5)  # 3 batches of training, 2 of validation
            side = schedule[epoch % len(schedule)] if training else 34
            where = f"{what}: {'training' if training else 'validation'} in epoch {epoch % len(schedule)}"
            core.equal(found.shape[-1], side, f"{where}, width of the images in self.learn.xb", "pixels")
            if training:
                want = _squeezed(images[3 * epoch + batch], side)
                core.close(found, want, f"{where}, images of batch {batch}", atol=1e-3)


@core.exercise(
    "resizing.6", "the longest schedule right for forty plans, budgets that are met exactly among them"
)
def schedule_for(answer):
    for case in range(40):
        sides = sorted(random.sample(range(32, 300, 4), random.randint(1, 4)))
        plan = [(side, random.randint(1, 5)) for side in sides]
        fixed = random.randint(1, 10**6)  # what does not shrink with the pixels
        few = sorted(core.ragged(1, 9, len(sides)))  # small costs first: a message can be checked by hand
        cost = dict(zip(sides, few, strict=True)) if case < 15 else {s: 100 * s**2 + fixed for s in sides}
        cost |= {8: min(cost.values()) + 1}  # a side that the plan doesn't have
        n = random.randint(0, 7 if case < 15 else 30) if case else 0
        if case == 39:  # 55 * (3 / 11) is less than 15 in floating point
            plan, n = [(20, 3), (28, 8)], 55
            cost |= {20: 3, 28: 7}
        want = _spread(plan, n)
        price, longer = (sum(map(cost.get, found)) for found in (want, _spread(plan, n + 1)))
        budget = price if case % 2 else random.randrange(price or longer // 2, longer)
        got = core.call(answer, budget, dict(cost), list(plan))
        require(isinstance(got, list), f"expected a list of sides, got {core.kind(got)}")
        what = f"schedule_for({budget}, {cost}, {plan})"
        core.equal(
            got if len(got) < 12 else f"{len(got)} epochs", want if len(got) < 12 else f"{n} epochs", what
        )
        core.equal(got, want, what)


def _spread(plan, n):
    "The sides of `n` epochs: epoch k belongs to the first stage whose parts reach (k + 1) / n."
    ends, found = list(itertools.accumulate(parts for _, parts in plan)), []
    for k in range(n):
        found.append(next(s for (s, _), c in zip(plan, ends, strict=True) if (k + 1) * ends[-1] <= n * c))
    return found

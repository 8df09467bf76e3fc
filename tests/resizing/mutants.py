"Answers to resizing's exercises: right ones of another style, and wrong ones, each of which computes."

import copy
from fractions import Fraction

import torch
from fastai.callback.core import Callback
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import update_bn

from course_lib.resizing import solutions

REFERENCE = {number: getattr(solutions, names[0]) for number, names in solutions.EXERCISES.items()}


# --- resizing.1: new statistics -----------------------------------------------------------


def pytorchs_own(net, batches):
    "Right."
    renewed = copy.deepcopy(net)
    update_bn(batches, renewed)
    return renewed.eval()


def by_hooks(net, batches):
    "Right: each batch norm's inputs are measured as they come, and averaged by hand."
    renewed = copy.deepcopy(net).train()
    seen = {m: [] for m in renewed.modules() if isinstance(m, nn.BatchNorm2d)}
    handles = [
        m.register_forward_pre_hook(
            lambda m, args: seen[m].append(torch.stack([args[0].mean((0, 2, 3)), args[0].var((0, 2, 3))]))
        )
        for m in seen
    ]
    with torch.no_grad():
        for x in batches:
            renewed(x)
        for m, found in seen.items():
            mean, var = torch.stack(found).mean(0)
            m.running_mean.copy_(mean)
            m.running_var.copy_(var)
    for handle in handles:
        handle.remove()
    return renewed.eval()


def _renewed(net, batches, momentum=None, reset=True, norms=slice(None), keep=False, only_norms=False):
    kept = [m for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
    old = [m.momentum for m in kept]
    for m in kept[norms]:
        if reset:
            m.reset_running_stats()
        m.momentum = momentum
    net.train(not only_norms)
    for m in kept:
        m.train()
    with torch.no_grad():
        for x in batches:
            net(x)
    for m, was in zip(kept, old, strict=True):
        m.momentum = m.momentum if keep else was
    return net.eval()


def the_last_batch(net, batches):
    return _renewed(copy.deepcopy(net), batches, momentum=1.0)


def running_average(net, batches):
    return _renewed(copy.deepcopy(net), batches, momentum=0.1)


def on_top_of_the_old(net, batches):
    return _renewed(copy.deepcopy(net), batches, reset=False)


def in_place(net, batches):
    return _renewed(net, batches)


def forgets_the_momentum(net, batches):
    return _renewed(copy.deepcopy(net), batches, keep=True)


def only_norms_in_training(net, batches):
    return _renewed(copy.deepcopy(net), batches, only_norms=True)


def top_level_only(net, batches):
    return _renewed(copy.deepcopy(net), batches, norms=slice(1))


def resets_the_weights_too(net, batches):
    renewed = copy.deepcopy(net)
    for m in renewed.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.reset_parameters()
    return _renewed(renewed, batches)


def freezes_the_copy(net, batches):
    return _renewed(copy.deepcopy(net).requires_grad_(False), batches)


def leaves_its_hooks(net, batches):
    renewed = copy.deepcopy(net)
    renewed[1].register_forward_hook(lambda m, x, out: None)
    return _renewed(renewed, batches)


def by_momenta(net, batches):
    "Right: the momentum 1 / k at batch k gives the plain mean."
    renewed = copy.deepcopy(net).train()
    kept = [(m, m.momentum) for m in renewed.modules() if isinstance(m, nn.BatchNorm2d)]
    for k, x in enumerate(batches, 1):
        for m, _ in kept:
            m.momentum = 1 / k
        renewed(x)
    for m, momentum in kept:
        m.momentum = momentum
    return renewed.eval()


# --- resizing.2: any size -----------------------------------------------------------------


def channels_from_the_last_convolution(net, x):
    channels = [m for m in net[:-2].modules() if isinstance(m, nn.Conv2d)][-1].out_channels
    head = nn.Linear(channels, net[-1].out_features).to(net[-1].weight.dtype)
    return nn.Sequential(*net[:-2], nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(1), head)


def by_a_hook(net, x):
    "Right: what enters the flatten of a copy."
    twin, seen = copy.deepcopy(net).eval(), []
    twin[-2].register_forward_pre_hook(lambda m, args: seen.append(args[0].size(1)))
    twin(x)
    head = nn.Linear(seen[0], net[-1].out_features).to(net[-1].weight.dtype)
    return nn.Sequential(*net[:-2], nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(1), head)


def layer_by_layer(net, x):
    "Right: on the meta device, which has no data and no statistics to change."
    with torch.device("meta"):
        body = copy.deepcopy(net[:-2]).to("meta").eval()
        channels = body(x.to("meta")).size(1)
    last = nn.Linear(channels, net[-1].out_features, dtype=next(net.parameters()).dtype)
    return nn.Sequential(*list(net)[:-2], nn.AdaptiveAvgPool2d(1), nn.Flatten(), last)


def _free(net, x, channels=None, pool=None, classes=None, dtype=None):
    body = copy.deepcopy(net[:-2]).eval()
    head = nn.Linear(channels or body(x).shape[1], classes or net[-1].out_features,
                     dtype=dtype or net[-1].weight.dtype)  # fmt: skip
    return nn.Sequential(*net[:-2], pool or nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)


def in_one_piece(net, x):
    "Right: the layers stay in the `nn.Sequential` that slicing gives."
    free = _free(net, x)
    return nn.Sequential(net[:-2], *free[-3:])


def puts_one_mode_back(net, x):
    mode = net.training
    net.eval()
    channels = net[:-2](x).shape[1]
    net.train(mode)
    return _free(net, x, channels=channels)


def takes_the_first_five(net, x):
    free = _free(net, x)
    return nn.Sequential(*net[:5], *free[-3:])


def stays_lazy(net, x):
    last = nn.LazyLinear(net[-1].out_features, dtype=net[-1].weight.dtype)
    return nn.Sequential(*net[:-2], nn.AdaptiveAvgPool2d(1), nn.Flatten(), last)


def keeps_the_old_layer(net, x):
    size = copy.deepcopy(net[:-2]).eval()(x).shape[-2:]
    return nn.Sequential(*net[:-2], nn.AdaptiveAvgPool2d(tuple(size)), *net[-2:])


def takes_the_largest(net, x):
    return _free(net, x, pool=nn.AdaptiveMaxPool2d(1))


def square_images(net, x):
    side = (x.shape[-1] + 1) // 2
    return _free(net, x, channels=max(1, net[-1].in_features // side**2))


def changes_the_statistics(net, x):
    net[:-2].train()(x)
    return _free(net, x)


def forty_classes(net, x):
    return _free(net, x, classes=40)


def float32_always(net, x):
    return _free(net, x, dtype=torch.float32)


# --- resizing.3: resizing -----------------------------------------------------------------


def by_two_matrices(x, size):
    "Right: the filter as a matrix for rows and one for columns."

    def weights(n):
        scale = n / size
        centre = (torch.arange(size, dtype=torch.float64)[:, None] + 0.5) * scale
        at = torch.arange(n, dtype=torch.float64)[None] + 0.5
        w = (1 - (at - centre).abs() / max(scale, 1)).clamp(min=0)
        return w / w.sum(1, keepdim=True)

    inside = x.double() if x.dtype == torch.float64 else x.float()
    rows, columns = (weights(n).to(inside.dtype) for n in x.shape[-2:])
    y = rows @ inside @ columns.T
    return (y if x.dtype.is_floating_point else y.round().clamp(0, 255)).to(x.dtype)


def torchvisions(x, size):
    "Right."
    from torchvision.transforms.v2 import functional as v2

    inside = x if x.dtype in (torch.float32, torch.float64) else x.float()
    y = v2.resize_image(inside, [size, size], antialias=True)
    return y.to(x.dtype) if x.dtype.is_floating_point else (y + 0.5).floor().to(x.dtype)


def _with(x, size, **options):
    y = F.interpolate(x.float(), size=(size, size), **options)
    return (y if x.dtype.is_floating_point else y.round().clamp(0, 255)).to(x.dtype)


def bilinear_without_antialias(x, size):
    return _with(x, size, mode="bilinear")


def cuts_the_middle_out(x, size):
    side = min(x.shape[-2:])
    top, left = ((n - side) // 2 for n in x.shape[-2:])
    return solutions.resize(x[..., top : top + side, left : left + side], size)


def float32_for_every_float(x, size):
    return _with(x, size, mode="bilinear", antialias=True).to(
        x.dtype if x.dtype == torch.uint8 else torch.float32
    )


def float64_through_float32(x, size):
    return _with(x, size, mode="bilinear", antialias=True)


def cuts_the_fraction_off(x, size):
    return F.interpolate(x.double(), size=(size, size), mode="bilinear", antialias=True).to(x.dtype)


def antialias_by_the_height(x, size):
    return _with(x, size, mode="bilinear", antialias=size < x.shape[2])


def early_by_the_width(x, size):
    return x if x.shape[3] == size else solutions.resize(x, size)


def drops_a_batch_of_one(x, size):
    return solutions.resize(x, size).squeeze(0)


def as_if_contiguous(x, size):
    return solutions.resize(x.as_strided(x.shape, torch.empty(x.shape).stride()), size)


def clamps_every_type(x, size):
    return solutions.resize(x, size).clamp(0, 255)


def rounds_to_half_after_each_pass(x, size):
    y = x if x.dtype in (torch.float32, torch.float64) else x.float()
    for shape in (x.shape[2], size), (size, size):
        y = F.interpolate(y, size=shape, mode="bilinear", antialias=True)
        y = y.to(x.dtype).float() if x.dtype in (torch.float16, torch.bfloat16) else y
    return (y if x.dtype.is_floating_point else y.round()).to(x.dtype)


def planes_as_channels(x, size):
    "Right: all planes as the channels of one image, float64 inside, torch's own uint8 where it has one."
    y = x.flatten(0, 1)[None]
    y = F.interpolate(
        y if x.dtype == torch.uint8 else y.double(), (size, size), mode="bilinear", antialias=True
    )
    return y[0].unflatten(0, x.shape[:2]).to(x.dtype)


def image_by_image(x, size):
    return torch.stack([solutions.resize(image[None], size)[0] for image in x])


# --- resizing.4: the loop -----------------------------------------------------------------


def indices_of_steps(net, opt, cycle, batches, schedule):
    "Right: epochs by index, gradients cleared by hand."
    found = []
    for epoch in range(len(schedule)):
        for x, y in iter(batches):
            net.train()
            net.zero_grad(set_to_none=False)
            loss = nn.CrossEntropyLoss()(net(solutions.resize(x, schedule[epoch])), y)
            loss.backward()
            opt.step()
            cycle.step()
            found += [loss.detach().clone()]
    return found


def by_closure(net, opt, cycle, batches, schedule):
    "Right: the step computes loss and gradients itself."
    net.train()

    def step(x, y):
        opt.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        return loss

    losses = []
    for side in schedule:
        for x, y in batches:
            losses.append(opt.step(lambda x=solutions.resize(x, side), y=y: step(x, y)).detach())
            cycle.step()
    return losses


def cleared_after_each_step(net, opt, cycle, batches, schedule):
    "Right: cleared once before and after each step."
    net.train(), opt.zero_grad()
    losses = []
    for x, y, side in ((x, y, side) for side in schedule for x, y in batches):
        loss = F.nll_loss(net(solutions.resize(x, side)).log_softmax(1), y)
        loss.backward()
        opt.step(), cycle.step(), opt.zero_grad()
        losses.append(loss.data)
    return losses


def _loop(
    net, opt, cycle, batches, schedule, side=lambda k, schedule: schedule[k], by_epoch=False, clear=True
):
    losses = []
    for k in range(len(schedule)):
        for x, y in batches:
            opt.zero_grad() if clear else None
            loss = F.cross_entropy(net(solutions.resize(x, side(k, schedule))), y)
            loss.backward()
            opt.step()
            None if by_epoch else cycle.step()
            losses.append(loss.detach())
        cycle.step() if by_epoch else None
    return losses


def rate_by_epoch(net, opt, cycle, batches, schedule):
    return _loop(net.train(), opt, cycle, batches, schedule, by_epoch=True)


def gradients_add_up(net, opt, cycle, batches, schedule):
    return _loop(net.train(), opt, cycle, batches, schedule, clear=False)


def in_evaluation_mode(net, opt, cycle, batches, schedule):
    return _loop(net, opt, cycle, batches, schedule)


def an_epoch_late(net, opt, cycle, batches, schedule):
    return _loop(net.train(), opt, cycle, batches, schedule, side=lambda k, sides: sides[max(k - 1, 0)])


def sides_sorted(net, opt, cycle, batches, schedule):
    return _loop(net.train(), opt, cycle, batches, sorted(schedule))


def one_pass_kept(net, opt, cycle, batches, schedule):
    return _loop(net.train(), opt, cycle, list(batches), schedule)


def writes_into_the_loader(net, opt, cycle, batches, schedule):
    def small(side):
        for x, y in batches:
            x.data = solutions.resize(x, side)
            yield x, y

    net.train()
    return [loss for side in schedule for loss in _loop(net, opt, cycle, small(side), [side])]


# --- resizing.5: the callback -------------------------------------------------------------


class ReadsTheLearner(Callback):
    "Right: by the learner's attributes, the schedule kept as a tuple."

    def __init__(self, schedule):
        self.sides = tuple(schedule)

    def before_batch(self):
        if self.learn.model.training:
            (x,) = self.learn.xb
            self.learn.xb = [solutions.resize(x, self.sides[self.learn.epoch])]


class AtTheEpoch(Callback):
    "Right: the side is looked up when the epoch's training begins."

    def __init__(self, schedule):
        self.schedule = schedule

    def before_train(self):
        self.side = self.schedule[self.epoch]

    def before_batch(self):
        if not self.training:
            return
        self.learn.xb = tuple(solutions.resize(x, self.side) for x in self.xb)


class _Sizes(Callback):
    def __init__(self, schedule):
        self.schedule = schedule

    def side(self):
        return self.schedule[self.epoch]

    def before_batch(self):
        if self.training:
            self.learn.xb = (solutions.resize(self.x, self.side()),)


class ValidatesSmall(_Sizes):
    def before_batch(self):
        self.learn.xb = (solutions.resize(self.x, self.side()),)


class HidesTheBatch(_Sizes):
    def before_batch(self):
        if self.training:
            self.xb = (solutions.resize(self.x, self.side()),)


class AnEpochEarly(_Sizes):
    def side(self):
        return self.schedule[min(self.epoch + 1, len(self.schedule) - 1)]


class UsedUp(_Sizes):
    "The second fit finds the last side."

    def before_train(self):
        self.now = self.schedule.pop(0) if len(self.schedule) > 1 else self.schedule[0]

    def side(self):
        return self.now


class CutsAPiece(_Sizes):
    def before_batch(self):
        if self.training:
            self.learn.xb = (self.x[..., : self.side(), : self.side()],)


class WritesIntoTheLoader(_Sizes):
    def before_batch(self):
        if self.training:
            self.xb[0].data = solutions.resize(self.xb[0], self.side())


# --- resizing.6: a budget -----------------------------------------------------------------


def by_fractions(budget, cost, plan):
    "Right: from the longest that could be, downwards, with exact shares."
    whole = sum(parts for _, parts in plan)
    for n in range(budget // min(cost[side] for side, _ in plan), -1, -1):
        ends, reached = [], Fraction(0)
        for _, parts in plan:
            reached += Fraction(parts, whole)
            ends.append(int(n * reached))
        sides = [next(s for (s, _), end in zip(plan, ends, strict=True) if k < end) for k in range(n)]
        if sum(map(cost.get, sides)) <= budget:
            break
    return sides


def by_doubling(budget, cost, plan):
    "Right: a binary search for the number of epochs."
    low, high = 0, 1
    while len(_spread(plan, high)) and _price(plan, high, cost) <= budget:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _price(plan, middle, cost) <= budget else (low, middle)
    return _spread(plan, low)


def _price(plan, n, cost):
    return sum(cost[side] for side in _spread(plan, n))


def _spread(plan, n, end=lambda n, c, whole: n * c // whole):
    whole, before, sides = sum(p for _, p in plan), 0, []
    for side, parts in plan:
        before += parts
        sides += [side] * (end(n, before, whole) - len(sides))
    return sides


def _longest(budget, cost, spread, strict=False):
    n = 0
    while (price := sum(cost[s] for s in spread(n + 1))) <= budget and not (strict and price == budget):
        n += 1
    return spread(n)


def below_the_budget(budget, cost, plan):
    return _longest(budget, cost, lambda n: _spread(plan, n), strict=True)


def rounds_to_the_nearest(budget, cost, plan):
    return _longest(budget, cost, lambda n: _spread(plan, n, lambda n, c, whole: round(n * c / whole)))


def shares_of_the_budget(budget, cost, plan):
    whole = sum(parts for _, parts in plan)
    return [s for s, parts in plan for _ in range(budget * parts // whole // cost[s])]


def equal_stages(budget, cost, plan):
    return _longest(budget, cost, lambda n: _spread([(s, 1) for s, _ in plan], n))


def whole_rounds(budget, cost, plan):
    rounds = budget // sum(cost[s] * parts for s, parts in plan)
    return [s for s, parts in plan for _ in range(rounds * parts)]


def one_too_many(budget, cost, plan):
    return _spread(plan, len(_longest(budget, cost, lambda n: _spread(plan, n))) + 1)


RIGHT = {
    "resizing.1": [pytorchs_own, by_hooks, by_momenta],
    "resizing.2": [by_a_hook, layer_by_layer, in_one_piece],
    "resizing.3": [by_two_matrices, torchvisions, planes_as_channels],
    "resizing.4": [indices_of_steps, cleared_after_each_step, by_closure],
    "resizing.5": [ReadsTheLearner, AtTheEpoch],
    "resizing.6": [by_fractions, by_doubling],
}

MUTANTS = {
    "resizing.1": [the_last_batch, running_average, on_top_of_the_old, in_place, forgets_the_momentum,
                   top_level_only, only_norms_in_training, resets_the_weights_too, freezes_the_copy,
                   leaves_its_hooks],
    "resizing.2": [keeps_the_old_layer, takes_the_largest, square_images, changes_the_statistics,
                   forty_classes, float32_always, channels_from_the_last_convolution, puts_one_mode_back,
                   takes_the_first_five, stays_lazy],
    "resizing.3": [bilinear_without_antialias, cuts_the_middle_out, float32_for_every_float,
                   float64_through_float32, cuts_the_fraction_off, image_by_image,
                   antialias_by_the_height, early_by_the_width, drops_a_batch_of_one, as_if_contiguous,
                   clamps_every_type, rounds_to_half_after_each_pass],
    "resizing.4": [rate_by_epoch, gradients_add_up, in_evaluation_mode, an_epoch_late, sides_sorted,
                   one_pass_kept, writes_into_the_loader],
    "resizing.5": [ValidatesSmall, HidesTheBatch, AnEpochEarly, UsedUp, CutsAPiece, WritesIntoTheLoader],
    "resizing.6": [below_the_budget, rounds_to_the_nearest, shares_of_the_budget, equal_stages, whole_rounds,
                   one_too_many],
}  # fmt: skip

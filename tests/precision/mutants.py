"Wrong answers to the exercises, and right ones of another style."

import itertools
import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from course_lib.precision import solutions

REFERENCE = {
    number: tuple(getattr(solutions, name) for name in names) for number, names in solutions.EXERCISES.items()
}
encode, decode, to_fp8, from_fp8 = solutions.encode, solutions.decode, solutions.to_fp8, solutions.from_fp8
E4M3 = torch.float8_e4m3fn

# --- precision.1: master weights -----------------------------------------------------------


class Masters(solutions.MasterWeights):
    "The right answer in pieces, of which each mutant replaces one."

    def give(self):
        for p, m in zip(self.params, self.master, strict=True):
            m.grad = None if p.grad is None else p.grad.float()

    def back(self):
        for p, m in zip(self.params, self.master, strict=True):
            p.copy_(m)

    @torch.no_grad()
    def step(self):
        self.give()
        self.optimizer.step()
        self.back()


class BindsNewParameters(Masters):
    def back(self):
        self.params = [nn.Parameter(m.to(p.dtype)) for p, m in zip(self.params, self.master, strict=True)]


class RoundsTheMasterToo(Masters):
    def back(self):
        super().back()
        for p, m in zip(self.params, self.master, strict=True):
            m.copy_(p)


class KeepsTheLastGradient(Masters):
    def give(self):
        for p, m in zip(self.params, self.master, strict=True):
            if p.grad is not None:
                m.grad = p.grad.float()


class SkipsGradientsOfZero(Masters):
    def give(self):
        for p, m in zip(self.params, self.master, strict=True):
            m.grad = p.grad.float() if p.grad is not None and p.grad.any() else None


class RoundsToBfloat16Always(Masters):
    def back(self):
        for p, m in zip(self.params, self.master, strict=True):
            p.copy_(m.bfloat16())


class HidesAnOverflow(Masters):
    def give(self):
        super().give()
        for m in self.master:
            m.grad = m.grad if m.grad is None else m.grad.nan_to_num()


class FreesTheGradients(Masters):
    def back(self):
        super().back()
        for p in self.params:
            p.grad = None


class FreezesTheParameters(Masters):
    def back(self):
        for p, m in zip(self.params, self.master, strict=True):
            p.requires_grad_(False).copy_(m)


class WritesContiguousOnesOnly(Masters):
    def back(self):
        for p, m in zip(self.params, self.master, strict=True):
            p.flatten().copy_(m.flatten())


class ByData(solutions.MasterWeights):
    def step(self):
        for p, m in zip(self.params, self.master, strict=True):
            m.grad = p.grad if p.grad is None else p.grad.detach().to(torch.float32)
        self.optimizer.step()
        for i, m in enumerate(self.master):
            self.params[i].data[...] = m.data


class ByForeach(solutions.MasterWeights):
    @torch.no_grad()
    def step(self):
        self.optimizer.zero_grad()
        for m, p in zip(self.master, self.params, strict=True):
            if p.grad is not None:
                m.grad = torch.empty_like(m).copy_(p.grad)
        self.optimizer.step()
        torch._foreach_copy_(self.params, self.master)


# --- precision.2: stochastic rounding ------------------------------------------------------


def _noisy(x, noise):
    "x's bits and some noise, the lower half cut off."
    bits = (x.contiguous().view(torch.int32) + noise) & -(2**16)
    return torch.where(x.isfinite(), bits.view(torch.float32), x).to(torch.bfloat16)


def rounds_to_nearest(x):
    return x.to(torch.bfloat16)


def a_coin_for_every_number(x):
    return _noisy(x, torch.randint(0, 2, x.shape, dtype=torch.int32) * 0xFFFF)


def one_random_number_for_a_row(x):
    shape = (*x.shape[:-1], 1) if x.dim() else ()
    return _noisy(x, torch.randint(0, 2**16, shape, dtype=torch.int32))


def the_same_random_numbers_again(x):
    draw = torch.Generator().manual_seed(0)
    return _noisy(x, torch.randint(0, 2**16, x.shape, dtype=torch.int32, generator=draw))


def eight_random_bits(x):
    return _noisy(x, torch.randint(0, 2**8, x.shape, dtype=torch.int32) << 8)


def a_negative_nan_is_lost(x):
    special = x.contiguous().view(torch.int32) >= 0x7F800000
    return torch.where(special, x, a_nan_of_other_bits_is_lost(x).float()).to(torch.bfloat16)


def the_same_for_each_matrix(x):
    return _noisy(x, torch.randint(0, 2**16, x.shape[-2:], dtype=torch.int32))


def never_the_last_random_number(x):
    return _noisy(x, torch.randint(0, 2**16 - 1, x.shape, dtype=torch.int32))


def a_fraction_rounded_to_the_nearest(x):
    return _noisy(x, (torch.rand(x.shape) * 2**16).round().int())


def each_random_number_and_its_opposite(x):
    half = torch.randint(0, 2**16, ((x.numel() + 1) // 2,), dtype=torch.int32)
    return _noisy(x, torch.cat([half, 2**16 - 1 - half])[: x.numel()].view(x.shape))


def subnormals_become_zero(x):
    return torch.where(x.abs() < 2.0**-126, 0.0, solutions.stochastic_round(x))


def a_nan_of_other_bits_is_lost(x):
    noise = torch.randint(0, 2**16, x.shape, dtype=torch.int32)
    return ((x.contiguous().view(torch.int32) + noise) & -(2**16)).view(torch.float32).to(torch.bfloat16)


def by_a_random_fraction(x):
    low = (x.contiguous().view(torch.int32) & -(2**16)).view(torch.float32)
    high = torch.nextafter(low.bfloat16(), (low * math.inf).bfloat16().nan_to_num()).float()
    up = torch.rand(x.shape) < ((x - low) / (high - low)).nan_to_num()
    return torch.where(x.isfinite(), torch.where(up, high, low), x).bfloat16()


def by_a_floor(x):
    size = x.double()
    step = torch.ldexp(torch.ones_like(size), torch.frexp(size).exponent.clamp(min=-125) - 8)
    cut = torch.floor(size / step + torch.rand(x.shape, dtype=torch.float64)) * step
    return torch.where(x.isfinite(), cut, size).bfloat16()


def by_numpy(x):
    bits = np.ascontiguousarray(x.numpy()).view(np.uint32)
    noise = np.random.randint(0, 2**16, size=bits.shape, dtype=np.uint32)
    cut = np.array(((bits + noise) & np.uint32(0xFFFF0000)).view(np.float32))
    return torch.where(x.isfinite(), torch.from_numpy(cut).reshape(x.shape), x).bfloat16()


# --- precision.3: the loss scale -----------------------------------------------------------


class LooksAtTheFirstGroup(solutions.Scaler):
    def unscale_(self, optimizer):
        grads = [p.grad for p in optimizer.param_groups[0]["params"] if p.grad is not None]
        for g in grads:
            g.div_(self.factor)
        self.bad[id(optimizer)] = not all(bool(g.isfinite().all()) for g in grads)


class AdaptsInStep(solutions.Scaler):
    "The factor changes between two optimizers that step after one backward."

    def step(self, optimizer):
        super().step(optimizer)
        super().update()

    def update(self):
        pass


class OneOptimizerStopsTheOther(solutions.Scaler):
    def step(self, optimizer):
        if id(optimizer) not in self.bad:
            self.unscale_(optimizer)
        if not any(self.bad.values()):
            optimizer.step()


class UnscalesTwice(solutions.Scaler):
    def step(self, optimizer):
        self.unscale_(optimizer)
        super().step(optimizer)


class SeesTheNorm(solutions.Scaler):
    def unscale_(self, optimizer):
        super().unscale_(optimizer)
        grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        self.bad[id(optimizer)] = not math.isfinite(sum(float(g.square().sum()) for g in grads))


class NeverCountsAgain(solutions.Scaler):
    def update(self):
        good = self.good
        super().update()
        if self.good == 0 and good + 1 != self.interval:
            self.good = good


class NotesByClass(solutions.Scaler):
    def unscale_(self, optimizer):
        super().unscale_(optimizer)
        kind, bad = type(optimizer), self.bad.pop(id(optimizer))
        self.bad[kind] = self.bad.get(kind, False) or bad

    def step(self, optimizer):
        if type(optimizer) not in self.bad:
            self.unscale_(optimizer)
        if not self.bad[type(optimizer)]:
            optimizer.step()


class BindsNewGradients(solutions.Scaler):
    def unscale_(self, optimizer):
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            p.grad = None if p.grad is None else p.grad.clone()
        super().unscale_(optimizer)


class ScalesANumber(solutions.Scaler):
    def scale(self, loss):
        return torch.tensor(loss.item() * self.factor, requires_grad=True)


class OfSets:
    def __init__(self, factor=2.0**16, growth=2.0, backoff=0.5, interval=2000):
        self.factor, self.rates, self.interval = torch.tensor(factor), (growth, backoff), interval
        self.streak, self.done, self.over = 0, set(), set()

    def scale(self, loss):
        return self.factor * loss

    def unscale_(self, optimizer):
        self.done.add(optimizer)
        for p in itertools.chain.from_iterable(g["params"] for g in optimizer.param_groups):
            if p.grad is not None:
                p.grad *= 1 / self.factor
                if not torch.isfinite(p.grad).all():
                    self.over.add(optimizer)

    def step(self, optimizer):
        if optimizer not in self.done:
            self.unscale_(optimizer)
        return None if optimizer in self.over else optimizer.step()

    def update(self):
        self.streak = 0 if self.over else self.streak + 1
        if self.over:
            self.factor = self.factor * self.rates[1]
        elif self.streak % self.interval == 0:
            self.factor = self.factor * self.rates[0]
        self.done, self.over = set(), set()


class Torchs(torch.amp.GradScaler):
    def __init__(self, factor=2.0**16, growth=2.0, backoff=0.5, interval=2000):
        super().__init__("cpu", factor, growth, backoff, interval)
        self.scale(torch.zeros(()))  # it makes its scale at the first use

    @property
    def factor(self):
        return self.get_scale()


# --- precision.4: the loop -----------------------------------------------------------------


def _loop(inside=True, backward_inside=False, clip="after", update_each=False, clear_first=True, divide=True,
          device=None, keep=torch.Tensor.detach):  # fmt: skip
    "The right answer with one part replaced."

    def run(net, opt, batches, dtype, scaler, accumulate=1, max_norm=1.0):
        losses, total = [], 0.0
        if clear_first:
            opt.zero_grad()
        for i, (x, y) in enumerate(batches, 1):
            cast = torch.autocast(device or x.device.type, dtype=dtype, enabled=dtype != torch.float32)
            with cast:
                logits = net(x).flatten(0, -2)
            with cast if inside else torch.enable_grad():
                loss = F.cross_entropy(logits, y.flatten()) / (accumulate if divide else 1)
            with cast if backward_inside else torch.enable_grad():
                scaler.scale(loss).backward()
            total = total + keep(loss)
            if update_each:
                scaler.update()
            if i % accumulate == 0:
                if clip == "before":
                    nn.utils.clip_grad_norm_(net.parameters(), max_norm)
                scaler.unscale_(opt)
                if clip == "after":
                    nn.utils.clip_grad_norm_(net.parameters(), max_norm)
                scaler.step(opt)
                if not update_each:
                    scaler.update()
                opt.zero_grad()
                losses.append(total)
                total = 0.0
        return losses

    return run


def all_batches_first(net, opt, batches, *rest):
    return solutions.train_mixed(net, opt, list(batches), *rest)


def in_groups(net, opt, batches, dtype, scaler, accumulate=1, max_norm=1.0):
    batches, kept = iter(batches), []
    opt.zero_grad(set_to_none=False)
    while group := list(itertools.islice(batches, accumulate)):
        parts = []
        for x, y in group:
            kind = next(net.parameters()).device.type
            with torch.amp.autocast(device_type=kind, dtype=dtype, enabled=dtype is not torch.float32):
                logits = net(x)
                loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), y.reshape(-1))
            scaler.scale(loss / len(group)).backward()
            parts.append(loss.detach())
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_([p for g in opt.param_groups for p in g["params"]], max_norm)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad(set_to_none=False)
        kept.append(torch.stack(parts).mean())
    return kept


def clears_before_a_step(net, opt, batches, dtype, scaler, accumulate=1, max_norm=1.0):
    out = []
    for i, (x, y) in enumerate(batches):
        if i % accumulate == 0:
            opt.zero_grad()
            mean = torch.zeros((), device=x.device)
        with torch.autocast(x.device.type, dtype, enabled=dtype in (torch.float16, torch.bfloat16)):
            loss = F.cross_entropy(net(x).flatten(0, -2).float(), y.flatten())
        mean += loss.detach() / accumulate
        (scaler.scale(loss) / accumulate).backward()
        if (i + 1) % accumulate == 0:
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(net.parameters(), max_norm, foreach=False)
            scaler.step(opt)
            scaler.update()
            out.append(mean)
    return out


# --- precision.5: encode and decode --------------------------------------------------------


def _encode(x, fmt, rounding=round, subnormal=True, saturate=True):
    sign = (math.copysign(1, x) < 0) << (fmt.exponent + fmt.fraction)
    lowest = 2 - 2 ** (fmt.exponent - 1)
    if x == 0 or (abs(x) < fmt.normal and not subnormal):
        return sign
    power = max(math.frexp(abs(x))[1] - 1, lowest)
    code = ((power - lowest) << fmt.fraction) + rounding(math.ldexp(abs(x), fmt.fraction - power))
    return sign | (min(code, fmt.top) if saturate else code)


def rounds_halves_up(x, fmt):
    return _encode(x, fmt, lambda v: math.floor(v + 0.5))


def flushes_subnormals(x, fmt):
    return _encode(x, fmt, subnormal=False)


def goes_past_the_top(x, fmt):
    return _encode(x, fmt, saturate=False)


def through_float32(x, fmt):
    return encode(float(torch.tensor(x, dtype=torch.float32)), fmt)


def subnormals_one_exponent_too_low(code, fmt):
    value = decode(code, fmt)
    return value / 2 if abs(value) < fmt.normal else value


def keeps_the_highest_exponent_for_infinity(code, fmt):
    value, field = decode(code, fmt), (code >> fmt.fraction) & (2**fmt.exponent - 1)
    return math.copysign(math.inf, value) if field == 2**fmt.exponent - 1 else value


def by_search(x, fmt):
    low, high = 0, fmt.top
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if decode(middle, fmt) < abs(x) else (low, middle)
    near = [c for c in (low - 1, low) if c >= 0]
    best = min(near, key=lambda c: (abs(decode(c, fmt) - abs(x)), c % 2))
    return np.int64(best + (1 << (fmt.exponent + fmt.fraction)) * (math.copysign(1, x) < 0))


def by_text(code, fmt):
    bits = format(code, f"0{1 + fmt.exponent + fmt.fraction}b")
    field, rest = int(bits[1 : 1 + fmt.exponent], 2), int(bits[1 + fmt.exponent :], 2)
    size = (rest / 2**fmt.fraction + (field > 0)) * 2.0 ** (max(field, 1) - 2 ** (fmt.exponent - 1) + 1)
    return -size if bits[0] == "1" else size


# --- precision.6: fp8 with a scale ---------------------------------------------------------


def _to_fp8(x, amax=lambda x: x.abs().amax(), floor=lambda s: s.clamp(min=2.0**-126), odd=math.nan):
    "The right answer with one part replaced."
    x = x.float()
    finite = x.isfinite()
    scale = floor(amax(torch.where(finite, x, 0.0)) / 448)
    scale = torch.where(scale > 0, scale, 1.0)
    return torch.where(finite, (x / scale).clamp(-448, 448), odd).to(E4M3), scale


def largest_without_its_sign(x):
    return _to_fp8(x, amax=lambda x: x.amax().clamp(min=0))


def scale_at_least_1e_12(x):
    return _to_fp8(x, floor=lambda s: s.clamp(min=1e-12))


def odd_numbers_become_zero(x):
    return _to_fp8(x, odd=0.0)


def through_the_other_format(x):
    q, scale = _to_fp8(x)
    return q.float().to(torch.float8_e5m2).float().to(E4M3), scale


def scale_may_vanish(x):
    return _to_fp8(x, floor=lambda s: s)


def nan_comes_back_as_zero(q, scale):
    return q.float().nan_to_num(0.0) * scale


def comes_back_in_bfloat16(q, scale):
    return (q.to(torch.bfloat16) * scale).to(torch.bfloat16)


def numpy_and_a_float(x):
    a = x.double().numpy()
    known = np.isfinite(a)
    scale = max(float(np.abs(np.where(known, a, 0)).max()) / 448, 2.0**-126)
    clipped = np.where(known, np.clip(np.where(known, a, 0) / scale, -448, 448), np.nan)
    return torch.tensor(clipped, dtype=torch.float32).to(E4M3), float(np.float32(scale))


def with_a_mask(x):
    x = x.clone().float()
    bad = ~torch.isfinite(x)
    x[bad] = 0
    scale = torch.maximum(x.abs().max() / 448, torch.tensor(2.0**-126)).reshape(1)
    x = (x / scale).clamp_(-448, 448)
    x[bad] = math.nan
    return x.to(E4M3), scale


RIGHT = {
    "precision.1": [ByData, ByForeach],
    "precision.2": [by_a_random_fraction, by_a_floor, by_numpy],
    "precision.3": [OfSets, Torchs],
    "precision.4": [in_groups, clears_before_a_step],
    "precision.5": [(by_search, decode), (encode, by_text)],
    "precision.6": [(numpy_and_a_float, lambda q, scale: q.float().mul(scale)), (with_a_mask, from_fp8)],
}
MUTANTS = {
    "precision.1": [BindsNewParameters, RoundsTheMasterToo, KeepsTheLastGradient, SkipsGradientsOfZero,
                    RoundsToBfloat16Always, HidesAnOverflow, FreesTheGradients, FreezesTheParameters,
                    WritesContiguousOnesOnly],
    "precision.2": [rounds_to_nearest, a_coin_for_every_number, one_random_number_for_a_row,
                    eight_random_bits, the_same_random_numbers_again, a_nan_of_other_bits_is_lost,
                    each_random_number_and_its_opposite, subnormals_become_zero, a_negative_nan_is_lost,
                    the_same_for_each_matrix, never_the_last_random_number,
                    a_fraction_rounded_to_the_nearest],
    "precision.3": [LooksAtTheFirstGroup, AdaptsInStep, OneOptimizerStopsTheOther, UnscalesTwice, SeesTheNorm,
                    NeverCountsAgain, NotesByClass, BindsNewGradients, ScalesANumber],
    "precision.4": [_loop(inside=False), _loop(backward_inside=True), _loop(clip="before"),
                    _loop(divide=False), _loop(update_each=True), _loop(clear_first=False),
                    all_batches_first, _loop(device="cpu"),
                    _loop(keep=lambda loss: torch.tensor(loss.item()))],
    "precision.5": [(rounds_halves_up, decode), (flushes_subnormals, decode), (goes_past_the_top, decode),
                    (through_float32, decode), (encode, subnormals_one_exponent_too_low),
                    (encode, keeps_the_highest_exponent_for_infinity)],
    "precision.6": [(largest_without_its_sign, from_fp8), (scale_at_least_1e_12, from_fp8),
                    (odd_numbers_become_zero, from_fp8), (through_the_other_format, from_fp8),
                    (scale_may_vanish, from_fp8), (to_fp8, comes_back_in_bfloat16),
                    (to_fp8, nan_comes_back_as_zero)],
}  # fmt: skip

"Wrong answers to the exercises. Each computes something, and each is what somebody would write."

import math

import torch

from course_lib import precision
from course_lib.precision import solutions

REFERENCE = {
    number: tuple(getattr(solutions, name) for name in names) for number, names in solutions.EXERCISES.items()
}


encode, decode = precision.encode, precision.decode
to_fp8, from_fp8 = precision.to_fp8, precision.from_fp8

# --- precision.1: encode and decode --------------------------------------------------------


def _encode(x, fmt, rounding=round, subnormal=True, zero_sign=True, clamp=False, top=None):
    "The right answer with one part replaced."
    width = fmt.exponent + fmt.fraction
    sign, nan = (math.copysign(1, x) < 0) << width, 2**width - 1
    beyond = (2**fmt.exponent - 1) << fmt.fraction if fmt.inf else nan
    if top is not None:
        beyond = top(fmt)
    size = abs(x)
    if math.isnan(x):
        return nan
    if size == 0:
        return sign if zero_sign else 0
    if math.isinf(x):
        return sign | beyond
    exponent = max(math.frexp(size)[1] - 1, fmt.lowest)
    if not subnormal and size < fmt.normal:
        return sign
    steps = rounding(math.ldexp(size, fmt.fraction - exponent))
    code = ((exponent - fmt.lowest) << fmt.fraction) + steps
    if clamp and code >= beyond:
        return sign | (beyond - 1)
    return sign | min(code, beyond)


def truncates(x, fmt):
    return _encode(x, fmt, math.floor)


def rounds_halves_up(x, fmt):
    return _encode(x, fmt, lambda v: math.floor(v + 0.5))


def rounds_halves_down(x, fmt):
    return _encode(x, fmt, lambda v: math.ceil(v - 0.5))


def flushes_subnormals(x, fmt):
    return _encode(x, fmt, subnormal=False)


def zero_without_a_sign(x, fmt):
    return _encode(x, fmt, zero_sign=False)


def clamps_to_the_largest(x, fmt):
    return _encode(x, fmt, clamp=True)


def infinity_in_every_format(x, fmt):
    return _encode(x, fmt, top=lambda f: (2**f.exponent - 1) << f.fraction)


def nan_past_the_largest(x, fmt):
    return _encode(x, fmt, top=lambda f: 2 ** (f.exponent + f.fraction) - 1)


def loses_the_carry(x, fmt):
    code = _encode(x, fmt)
    down = _encode(x, fmt, math.floor)
    carried = code >> fmt.fraction != down >> fmt.fraction
    return down & ~(2**fmt.fraction - 1) if carried and math.isfinite(x) else code


def nan_is_infinity(x, fmt):
    return (2**fmt.exponent - 1) << fmt.fraction if math.isnan(x) else _encode(x, fmt)


def half_precision_whatever_is_asked(x, fmt):
    return _encode(x, precision.FORMATS["fp16"])


def no_implicit_one(code, fmt):
    value = precision.decode(code, fmt)
    field = (code >> fmt.fraction) & (2**fmt.exponent - 1)
    if not math.isfinite(value) or field == 0:
        return value
    one = math.ldexp(1.0, field - 1 + fmt.lowest)
    return value - math.copysign(one, value)


def implicit_one_for_subnormals(code, fmt):
    value = precision.decode(code, fmt)
    field = (code >> fmt.fraction) & (2**fmt.exponent - 1)
    return value + math.copysign(fmt.normal / 2, value) if field == 0 and value else value


def subnormals_one_exponent_too_low(code, fmt):
    value = precision.decode(code, fmt)
    field = (code >> fmt.fraction) & (2**fmt.exponent - 1)
    return value / 2 if field == 0 else value


def bias_of_a_power_of_two(code, fmt):
    return precision.decode(code, fmt) / 2


def reads_the_highest_exponent_as_numbers(code, fmt):
    return precision.decode(code, fmt._replace(inf=False)) if fmt.inf else precision.decode(code, fmt)


def keeps_the_highest_exponent_for_infinity(code, fmt):
    return precision.decode(code, fmt._replace(inf=True))


def forgets_the_sign(code, fmt):
    return abs(precision.decode(code, fmt))


def forgets_the_sign_of_zero(code, fmt):
    return precision.decode(code, fmt) + 0.0


# --- precision.2: the loss scaler ----------------------------------------------------------


class _Scaler:
    "The right answer in pieces, of which each mutant replaces one."

    def __init__(self, scale=2.0**16, growth=2.0, backoff=0.5, interval=2000):
        self.scale, self.growth, self.backoff, self.interval = scale, growth, backoff, interval
        self.good = 0

    def params(self, optimizer):
        return [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None]

    def unscale(self, params):
        for p in params:
            p.grad.div_(self.scale)

    def finite(self, params):
        return all(bool(p.grad.isfinite().all()) for p in params)

    def clip(self, params, max_norm):
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(params, max_norm)

    def update(self, finite):
        if not finite:
            self.scale, self.good = self.scale * self.backoff, 0
            return
        self.good += 1
        if self.good == self.interval:
            self.scale, self.good = self.scale * self.growth, 0

    def step(self, optimizer, max_norm=None):
        params = self.params(optimizer)
        self.unscale(params)
        finite = self.finite(params)
        if finite:
            self.clip(params, max_norm)
            optimizer.step()
        self.update(finite)
        return finite


class ClipsBeforeUnscaling(_Scaler):
    def step(self, optimizer, max_norm=None):
        params = self.params(optimizer)
        finite = self.finite(params)
        if finite:
            self.clip(params, max_norm)
        self.unscale(params)
        if finite:
            optimizer.step()
        self.update(finite)
        return finite


class NeverUnscales(_Scaler):
    def unscale(self, params):
        pass


class NeverClips(_Scaler):
    def clip(self, params, max_norm):
        pass


class StepsAnyway(_Scaler):
    def step(self, optimizer, max_norm=None):
        params = self.params(optimizer)
        self.unscale(params)
        finite = self.finite(params)
        self.clip(params, max_norm)
        optimizer.step()
        self.update(finite)
        return finite


class StepsWithZeros(_Scaler):
    def step(self, optimizer, max_norm=None):
        params = self.params(optimizer)
        self.unscale(params)
        finite = self.finite(params)
        for p in params:
            p.grad.nan_to_num_(0.0, 0.0, 0.0)
        self.clip(params, max_norm)
        optimizer.step()
        self.update(finite)
        return finite


class SeesInfinityOnly(_Scaler):
    def finite(self, params):
        return not any(bool(p.grad.isinf().any()) for p in params)


class SeesNanOnly(_Scaler):
    def finite(self, params):
        return not any(bool(p.grad.isnan().any()) for p in params)


class LooksAtTheFirstTensor(_Scaler):
    def finite(self, params):
        return bool(params[0].grad.isfinite().all())


class LooksAtTheFirstGroup(_Scaler):
    def params(self, optimizer):
        return [p for p in optimizer.param_groups[0]["params"] if p.grad is not None]


class SkipsTheBadTensorOnly(_Scaler):
    def step(self, optimizer, max_norm=None):
        params = self.params(optimizer)
        self.unscale(params)
        finite = self.finite(params)
        for p in params:
            if not p.grad.isfinite().all():
                p.grad = None
        self.clip([p for p in params if p.grad is not None], max_norm)
        optimizer.step()
        self.update(finite)
        return finite


class NeverStartsCountingAgain(_Scaler):
    def update(self, finite):
        if not finite:
            self.scale *= self.backoff
            return
        self.good += 1
        if self.good == self.interval:
            self.scale, self.good = self.scale * self.growth, 0


class GrowsOneStepLate(_Scaler):
    def update(self, finite):
        if finite and self.good == self.interval:
            self.scale, self.good = self.scale * self.growth, 0
        if not finite:
            self.scale, self.good = self.scale * self.backoff, 0
        else:
            self.good += 1


class GrowsEveryStepAfterTheInterval(_Scaler):
    def update(self, finite):
        if not finite:
            self.scale, self.good = self.scale * self.backoff, 0
            return
        self.good += 1
        if self.good >= self.interval:
            self.scale *= self.growth


class NeverGrows(_Scaler):
    def update(self, finite):
        if not finite:
            self.scale *= self.backoff


class AlwaysHalves(_Scaler):
    def update(self, finite):
        if not finite:
            self.scale, self.good = self.scale / 2, 0
        else:
            super().update(True)


class UnscalesByTheNewScale(_Scaler):
    def step(self, optimizer, max_norm=None):
        params = self.params(optimizer)
        finite = self.finite(params)
        self.update(finite)
        self.unscale(params)
        if finite:
            self.clip(params, max_norm)
            optimizer.step()
        return finite


class ReturnsWhetherItSkipped(_Scaler):
    def step(self, optimizer, max_norm=None):
        return not super().step(optimizer, max_norm)


# --- precision.3: master weights -----------------------------------------------------------


@torch.no_grad()
def low_weights_are_the_truth(low, master, grads, lr, decay=0.0):
    for p, m, g in zip(low, master, grads, strict=True):
        if g is not None:
            p.sub_(lr * (g + decay * p))
            m.copy_(p)


@torch.no_grad()
def master_made_anew_each_step(low, master, grads, lr, decay=0.0):
    for p, m, g in zip(low, master, grads, strict=True):
        if g is not None:
            m.copy_(p)
            m.sub_(lr * (g.float() + decay * m))
            p.copy_(m)


@torch.no_grad()
def forgets_to_write_back(low, master, grads, lr, decay=0.0):
    for m, g in zip(master, grads, strict=True):
        if g is not None:
            m.sub_(lr * (g.float() + decay * m))


@torch.no_grad()
def writes_back_into_the_list(low, master, grads, lr, decay=0.0):
    for i, (m, g) in enumerate(zip(master, grads, strict=True)):
        if g is not None:
            m.sub_(lr * (g.float() + decay * m))
            rounded = m.to(low[i].dtype)
            low = [*low[:i], rounded, *low[i + 1 :]]


@torch.no_grad()
def update_computed_in_low_precision(low, master, grads, lr, decay=0.0):
    for p, m, g in zip(low, master, grads, strict=True):
        if g is not None:
            m.sub_((lr * (g + decay * m.to(g.dtype))).float())
            p.copy_(m)


@torch.no_grad()
def decays_the_rounded_weights(low, master, grads, lr, decay=0.0):
    for p, m, g in zip(low, master, grads, strict=True):
        if g is not None:
            m.sub_(lr * (g.float() + decay * p.float()))
            p.copy_(m)


@torch.no_grad()
def forgets_the_decay(low, master, grads, lr, decay=0.0):
    for p, m, g in zip(low, master, grads, strict=True):
        if g is not None:
            m.sub_(lr * g.float())
            p.copy_(m)


@torch.no_grad()
def decays_without_the_rate(low, master, grads, lr, decay=0.0):
    for p, m, g in zip(low, master, grads, strict=True):
        if g is not None:
            m.sub_(lr * g.float() + decay * m)
            p.copy_(m)


@torch.no_grad()
def climbs(low, master, grads, lr, decay=0.0):
    for p, m, g in zip(low, master, grads, strict=True):
        if g is not None:
            m.add_(lr * (g.float() + decay * m))
            p.copy_(m)


@torch.no_grad()
def rounds_the_master_too(low, master, grads, lr, decay=0.0):
    for p, m, g in zip(low, master, grads, strict=True):
        if g is not None:
            m.sub_(lr * (g.float() + decay * m))
            p.copy_(m)
            m.copy_(p)


@torch.no_grad()
def decays_where_there_is_no_gradient(low, master, grads, lr, decay=0.0):
    for p, m, g in zip(low, master, grads, strict=True):
        m.sub_(lr * ((0.0 if g is None else g.float()) + decay * m))
        p.copy_(m)


@torch.no_grad()
def truncates_the_weights(low, master, grads, lr, decay=0.0):
    for p, m, g in zip(low, master, grads, strict=True):
        if g is not None:
            m.sub_(lr * (g.float() + decay * m))
            cut = 16 if p.dtype == torch.bfloat16 else 13
            p.copy_((m.view(torch.int32) >> cut << cut).view(torch.float32))


# --- precision.4: stochastic rounding ------------------------------------------------------


def _bits(x):
    return x.contiguous().view(torch.int32)


def _finish(bits, x):
    cut = (bits & -(2**16)).view(torch.float32)
    return torch.where(x.isfinite(), cut, x).to(torch.bfloat16)


def rounds_to_nearest(x):
    return x.to(torch.bfloat16)


def rounds_towards_zero(x):
    return _finish(_bits(x), x)


def a_coin_for_every_number(x):
    coin = torch.randint(0, 2, x.shape, dtype=torch.int32) * 0xFFFF
    return _finish(_bits(x) + coin, x)


def one_random_number_for_all(x):
    return _finish(_bits(x) + torch.randint(0, 2**16, (1,), dtype=torch.int32), x)


def one_random_number_for_a_row(x):
    return _finish(_bits(x) + torch.randint(0, 2**16, (*x.shape[:-1], 1), dtype=torch.int32), x)


def the_same_random_numbers_again(x):
    noise = torch.randint(0, 2**16, x.shape, dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    return _finish(_bits(x) + noise, x)


def noise_then_nearest(x):
    return torch.where(
        x.isfinite(), (_bits(x) + torch.randint(0, 2**16, x.shape, dtype=torch.int32)).view(torch.float32), x
    ).to(torch.bfloat16)


def eight_random_bits(x):
    return _finish(_bits(x) + (torch.randint(0, 2**8, x.shape, dtype=torch.int32) << 8), x)


def seventeen_random_bits(x):
    return _finish(_bits(x) + torch.randint(0, 2**17, x.shape, dtype=torch.int32), x)


def gaussian_noise(x):
    near = x.to(torch.bfloat16)
    step = (torch.nextafter(near.abs(), torch.tensor(math.inf).bfloat16()) - near.abs()).float()
    noisy = x + torch.where(near.float() == x, 0.0, 0.3) * torch.randn(x.shape) * step
    return torch.where(x.isfinite(), noisy, x).to(torch.bfloat16)


def _between(x, chance):
    "Round away from zero with a chance that depends on the part of the way."
    low = (_bits(x) & -(2**16)).view(torch.float32)
    part = (_bits(x) & 0xFFFF).float() / 2**16
    up = torch.rand(x.shape) < chance(part, x)
    away = (_bits(low) + 2**16).view(torch.float32)
    return torch.where(x.isfinite() & (part > 0) & up, away, torch.where(x.isfinite(), low, x)).to(
        torch.bfloat16
    )


def up_means_up_for_negative_numbers_too(x):
    return _between(x, lambda part, x: torch.where(x < 0, 1 - part, part))


def the_farther_the_likelier(x):
    return _between(x, lambda part, x: 1 - part)


def squared_chance(x):
    return _between(x, lambda part, x: part * part)


def nan_falls_apart(x):
    bits = _bits(x) + torch.randint(0, 2**16, x.shape, dtype=torch.int32)
    return (bits & -(2**16)).view(torch.float32).nan_to_num().to(torch.bfloat16)


def stays_in_float32(x):
    return precision.stochastic_round(x).float()


# --- precision.5: chunked sums -------------------------------------------------------------


def sums_in_float32(x, chunk):
    return x.float().sum(1)


def one_running_sum(x, chunk):
    return precision.chunked_sum(x, x.shape[1])


def chunk_sums_added_in_low_precision(x, chunk):
    total = torch.zeros(x.shape[0], dtype=x.dtype)
    for part in x.split(chunk, dim=1):
        running = torch.zeros(x.shape[0], dtype=x.dtype)
        for column in part.unbind(1):
            running = running + column
        total = total + running
    return total.float()


def drops_the_rest(x, chunk):
    return precision.chunked_sum(x[:, : x.shape[1] // chunk * chunk], chunk)


def torch_sums_within_the_chunk(x, chunk):
    return torch.stack([part.sum(1).float() for part in x.split(chunk, dim=1)]).sum(0)


def float32_within_low_precision_between(x, chunk):
    total = torch.zeros(x.shape[0], dtype=x.dtype)
    for part in x.split(chunk, dim=1):
        total = total + part.float().sum(1).to(x.dtype)
    return total.float()


def as_many_chunks_as_the_chunk_is_long(x, chunk):
    return precision.chunked_sum(x, -(-x.shape[1] // chunk))


def always_in_float16(x, chunk):
    return precision.chunked_sum(x.half(), chunk)


def always_in_bfloat16(x, chunk):
    return precision.chunked_sum(x.bfloat16(), chunk)


def result_in_low_precision(x, chunk):
    return precision.chunked_sum(x, chunk).to(x.dtype)


def never_starts_a_chunk_at_zero(x, chunk):
    total, running = torch.zeros(x.shape[0]), torch.zeros(x.shape[0], dtype=x.dtype)
    for part in x.split(chunk, dim=1):
        for column in part.unbind(1):
            running = running + column
        total = running.float()
    return total


def strided_chunks(x, chunk):
    n = -(-x.shape[1] // chunk)
    return torch.stack([precision.chunked_sum(x[:, i::n], x.shape[1]) for i in range(n)]).sum(0)


def sums_the_columns(x, chunk):
    return precision.chunked_sum(x.t().contiguous(), chunk)


# --- precision.6: fp8 with a scale ---------------------------------------------------------

E4M3 = torch.float8_e4m3fn


def _to_fp8(x, amax=lambda x, finite: torch.where(finite, x.abs(), 0.0).amax(), largest=448.0, odd=math.nan):
    "The right answer with one part replaced."
    x = x.float()
    finite = x.isfinite()
    scale = (amax(x, finite) / largest).clamp(min=torch.finfo(torch.float32).tiny)
    scale = torch.where(torch.where(finite, x, 0.0).any(), scale, 1.0)
    q = torch.where(finite, (x / scale).clamp(-448, 448), odd)
    return q.to(E4M3), scale


def no_scale(x):
    return x.float().clamp(-448, 448).to(E4M3), torch.tensor(1.0)


def scale_by_the_other_formats_largest(x):
    return _to_fp8(x, largest=57344.0)


def scale_by_240(x):
    return _to_fp8(x, largest=240.0)


def largest_without_its_sign(x):
    return _to_fp8(x, amax=lambda x, finite: torch.where(finite, x, -math.inf).amax().clamp(min=0))


def scale_of_the_mean(x):
    return _to_fp8(x, amax=lambda x, finite: 3 * torch.where(finite, x.abs(), 0.0).mean())


def power_of_two_scale(x):
    _, scale = _to_fp8(x)
    scale = torch.exp2(scale.log2().ceil())
    return torch.where(x.isfinite(), x.float() / scale, math.nan).to(E4M3), scale


def divides_zero_by_zero(x):
    x = x.float()
    finite = x.isfinite()
    scale = torch.where(finite, x.abs(), 0.0).amax() / 448
    return torch.where(finite, x / scale, math.nan).to(E4M3), scale


def an_infinity_sets_the_scale(x):
    x = x.float()
    scale = (x.abs().amax() / 448).nan_to_num(1.0, 1e30)
    scale = torch.where(scale > 0, scale, 1.0)
    return (x / scale).to(E4M3), scale


def infinity_becomes_448(x):
    x = x.float()
    finite = x.isfinite()
    _, scale = _to_fp8(x)
    clamped = (x / scale).clamp(-448, 448)
    return torch.where(finite | x.isinf(), clamped, math.nan).to(E4M3), scale


def odd_numbers_become_zero(x):
    return _to_fp8(x, odd=0.0)


def a_scale_for_every_row(x):
    flat = x.float().reshape(-1, x.shape[-1])
    scale = (flat.abs().amax(1, keepdim=True) / 448).nan_to_num(1.0).clamp(min=1e-30)
    return (flat / scale).to(E4M3).view(x.shape), scale


def truncates_to_fp8(x):
    _, scale = _to_fp8(x)
    v = torch.where(x.isfinite(), x.float() / scale, math.nan)
    cut = (v.view(torch.int32) >> 20 << 20).view(torch.float32)
    return torch.where(v.isfinite() & (v.abs() > 0.02), cut, v).to(E4M3), scale


def amax_in_bfloat16(x):
    return _to_fp8(x, amax=lambda x, finite: torch.where(finite, x.abs(), 0.0).amax().bfloat16().float())


def the_other_format(x):
    q, scale = _to_fp8(x)
    return from_fp8(q, scale).to(torch.float8_e5m2), scale


def wide_range_narrow_fraction(x):
    _, scale = _to_fp8(x)
    v = torch.where(x.isfinite(), x.float() / scale, math.nan)
    return v.to(torch.float8_e5m2).float().to(E4M3), scale


def returns_the_reciprocal(x):
    q, scale = _to_fp8(x)
    return q, 1 / scale


def divides_coming_back(q, scale):
    return q.float() / scale


def forgets_the_scale_coming_back(q, scale):
    return q.float()


def comes_back_in_bfloat16(q, scale):
    return (q.to(torch.bfloat16) * scale).to(torch.bfloat16)


MUTANTS = {
    "precision.1": [
        (truncates, decode),
        (rounds_halves_up, decode),
        (rounds_halves_down, decode),
        (flushes_subnormals, decode),
        (zero_without_a_sign, decode),
        (clamps_to_the_largest, decode),
        (infinity_in_every_format, decode),
        (nan_past_the_largest, decode),
        (loses_the_carry, decode),
        (nan_is_infinity, decode),
        (half_precision_whatever_is_asked, decode),
        (encode, no_implicit_one),
        (encode, implicit_one_for_subnormals),
        (encode, subnormals_one_exponent_too_low),
        (encode, bias_of_a_power_of_two),
        (encode, reads_the_highest_exponent_as_numbers),
        (encode, keeps_the_highest_exponent_for_infinity),
        (encode, forgets_the_sign),
        (encode, forgets_the_sign_of_zero),
    ],
    "precision.2": [
        ClipsBeforeUnscaling,
        NeverUnscales,
        NeverClips,
        StepsAnyway,
        StepsWithZeros,
        SeesInfinityOnly,
        SeesNanOnly,
        LooksAtTheFirstTensor,
        LooksAtTheFirstGroup,
        SkipsTheBadTensorOnly,
        NeverStartsCountingAgain,
        GrowsOneStepLate,
        GrowsEveryStepAfterTheInterval,
        NeverGrows,
        AlwaysHalves,
        UnscalesByTheNewScale,
        ReturnsWhetherItSkipped,
    ],
    "precision.3": [
        low_weights_are_the_truth,
        master_made_anew_each_step,
        forgets_to_write_back,
        writes_back_into_the_list,
        update_computed_in_low_precision,
        decays_the_rounded_weights,
        forgets_the_decay,
        decays_without_the_rate,
        climbs,
        rounds_the_master_too,
        decays_where_there_is_no_gradient,
        truncates_the_weights,
    ],
    "precision.4": [
        rounds_to_nearest,
        rounds_towards_zero,
        a_coin_for_every_number,
        one_random_number_for_all,
        one_random_number_for_a_row,
        the_same_random_numbers_again,
        eight_random_bits,
        noise_then_nearest,
        seventeen_random_bits,
        gaussian_noise,
        up_means_up_for_negative_numbers_too,
        the_farther_the_likelier,
        squared_chance,
        nan_falls_apart,
        stays_in_float32,
    ],
    "precision.5": [
        sums_in_float32,
        one_running_sum,
        chunk_sums_added_in_low_precision,
        drops_the_rest,
        torch_sums_within_the_chunk,
        float32_within_low_precision_between,
        as_many_chunks_as_the_chunk_is_long,
        always_in_float16,
        always_in_bfloat16,
        result_in_low_precision,
        never_starts_a_chunk_at_zero,
        strided_chunks,
        sums_the_columns,
    ],
    "precision.6": [
        (no_scale, from_fp8),
        (scale_by_the_other_formats_largest, from_fp8),
        (scale_by_240, from_fp8),
        (largest_without_its_sign, from_fp8),
        (scale_of_the_mean, from_fp8),
        (power_of_two_scale, from_fp8),
        (divides_zero_by_zero, from_fp8),
        (an_infinity_sets_the_scale, from_fp8),
        (infinity_becomes_448, from_fp8),
        (odd_numbers_become_zero, from_fp8),
        (a_scale_for_every_row, from_fp8),
        (truncates_to_fp8, from_fp8),
        (amax_in_bfloat16, from_fp8),
        (the_other_format, from_fp8),
        (wide_range_narrow_fraction, from_fp8),
        (returns_the_reciprocal, from_fp8),
        (to_fp8, divides_coming_back),
        (to_fp8, forgets_the_scale_coming_back),
        (to_fp8, comes_back_in_bfloat16),
    ],
}

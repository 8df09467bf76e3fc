"Checks of precision. Oracles: SGD and Adam in float64, GradScaler, SGD by its formula, a number line."

import bisect
import functools
import math
import random
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from course_lib import checking as core
from course_lib import precision
from course_lib.checking import yours  # noqa: F401

SHAPES = (3, 5), (7,), (2, 1, 4), (6,)
BAD = " (inf as 3e38, NaN as 1e38)"


def _short(dtype):
    return str(dtype).removeprefix("torch.")


def _finite(x):
    return x.float().nan_to_num(1e38, 3e38, -3e38)


def _tensor(got, dtype, shape, what):
    "Require a tensor of this dtype and shape."
    if not isinstance(got, torch.Tensor) or got.dtype != dtype or got.shape != shape:
        raise core.Wrong(f"{what}: expected {_short(dtype)}, shape {list(shape)}, got {core.kind(got)}")
    return got


@core.exercise("precision.1", "masters follow SGD and Adam in float64, parameters are their roundings")
def master_weights(answer):
    for dtype in (torch.bfloat16, torch.float16):
        lr, decay = random.uniform(0.02, 0.1), random.uniform(0.05, 0.2)
        _follow(answer, dtype, functools.partial(torch.optim.SGD, lr=lr, weight_decay=decay, momentum=0.9))
        _follow(answer, dtype, functools.partial(torch.optim.Adam, lr=random.uniform(0.002, 0.02)))


def _follow(answer, dtype, make):
    starts = [torch.randn(s) for s in SHAPES]
    starts[0] = torch.randn(SHAPES[0][::-1]).t()  # not contiguous
    params = [nn.Parameter(start.to(dtype)) for start in starts]
    want = [p.detach().double() for p in params]
    mine, oracle = core.call(answer, params, make, mutates=(0,)), make(want)
    for i in range(12):
        # Some gradients are missing, and some are zeros, with which decay and momentum still act.
        grads = [torch.randn(s).to(dtype) * (i != 5) if i % 3 != j else None for j, s in enumerate(SHAPES)]
        if i == 11:  # an overflow, which the optimizer must not hide
            a, b = random.sample(range(7), 2)
            grads[1][a], grads[1][b] = random.choice([math.inf, -math.inf]), math.nan
        for p, w, g in zip(params, want, core.clone(grads), strict=True):
            p.grad, w.grad = g, None if g is None else g.double()
        oracle.step()
        core.call(mine.step)
        for p, m, w, g in zip(params, mine.master, want, grads, strict=True):
            grad = "no gradient" if g is None else "a gradient" if g.any() else "a gradient of zeros"
            what = f"step {i + 1} of {make.func.__name__}, a {_short(dtype)} parameter with {grad}"
            what += " that is infinite or NaN somewhere" * (g is not None and not g.isfinite().all())
            kept = (p.grad is None) == (g is None) and core._same([p.grad], [g])
            core.require(kept, f"{what}: p.grad is gone or changed; step only reads it")
            rounded = _tensor(m, torch.float32, p.shape, what).to(dtype)
            core.close(_finite(m), _finite(w), f"{what}: master{BAD * (i == 11)}", rtol=1e-5, atol=1e-5)
            off = int((_finite(p) != _finite(rounded)).sum())
            hint = "are not their master rounded; write into the parameters themselves, in place"
            core.require(p.dtype == dtype and not off, f"{what}: {off} of {p.numel()} elements {hint}")
            core.require(p.requires_grad, f"{what}: the parameter no longer requires a gradient")


@core.exercise("precision.2", "every number goes to a neighbour, exact ones stay, means right within 7 sigma")
def stochastic_round(answer):
    _neighbours(answer)
    for part in (1 / 1024, random.uniform(0.05, 0.3), 0.5, random.uniform(0.6, 0.9), 1 - 1 / 512):
        _mean(answer, part, 1.0)
        _mean(answer, part, -1.0)
    _mean(answer, 0, random.choice([1.0, -1.0]), 2_000_000)  # a random number too many, and one too few
    _mean(answer, 2**-16, random.choice([1.0, -1.0]), 4_000_000)
    again = torch.equal(*(_bf16(answer, torch.full((50, 40), 1.0 + 2.0**-8)) for _ in range(2)))
    core.require(not again, "two calls rounded 2,000 numbers alike: draw new random numbers in each call")
    _independent(answer)


def _independent(answer):
    p, seed = random.randrange(26_000, 40_000) / 2**16, torch.initial_seed()
    x = torch.full((3, random.randrange(50, 100), 4), 1 + p / 128)
    ups = torch.tensor([float((_bf16(answer, x) > 1).sum()) for _ in range(400)])
    ratio = float(ups.var()) / (x.numel() * p * (1 - p))
    many = f"the count of equal numbers rounded up varies {ratio:.2f} times as much as with independent draws"
    # A right answer is refused once in 10^9.
    core.require(0.6 < ratio < 1.6, f"{many}: each element needs a random number of its own")
    core.require(torch.initial_seed() == seed, "the function sets torch's seed, on which other code depends")


def _bf16(answer, x):
    return _tensor(core.call(answer, x), torch.bfloat16, x.shape, f"the result for {core.kind(x)}")


def _neighbours(answer):
    size = torch.cat([torch.rand(60, 37) * 200 - 100, torch.rand(1, 37) * 3 - 130])  # and subnormals
    x = 2.0 ** size.t() * (torch.randint(0, 2, (37, 61)) * 2 - 1)
    near, got = x.bfloat16(), _bf16(answer, x)
    other = torch.nextafter(near, torch.where(near.float() > x, -math.inf, math.inf).bfloat16())
    off = (got != near) & (got != other)
    for value, a, b, found in torch.stack([x, near, other, got])[:, off].t().tolist():
        between = f"its neighbours in bfloat16 are {min(a, b):.8g} and {max(a, b):.8g}"
        raise core.Wrong(f"{value:.8g} was rounded to {found:.8g}; {between}")
    exact = torch.cat([near.flatten().float(), torch.tensor([0.0, 1.0, -2.0, math.inf, -math.inf, math.nan])])
    for _ in range(3):
        got, want = _finite(_bf16(answer, exact)), _finite(exact)
        core.close(got, want, f"numbers that bfloat16 holds exactly{BAD}", rtol=0, atol=0)
    _bf16(answer, torch.tensor(0.75))
    odd = torch.tensor([0x7FFFFFFF, 0x7F800001, -1, -0x7FFFFF], dtype=torch.int32).view(torch.float32)
    core.require(_bf16(answer, odd).isnan().all(), "a NaN with unusual bits is no NaN afterwards")


def _mean(answer, part, sign, n=200_000):
    # `part` is how far x is from one bfloat16 to the next, away from zero: exact in float32.
    low = 2.0 ** random.randrange(-20, 20) * (1 + random.randrange(126) / 128)
    step, p = 2.0 ** (math.frexp(low)[1] - 8), round(part * 2**16) / 2**16
    x = sign * (low + p * step)
    away = _bf16(answer, torch.full((400, n // 400), x)).double().abs() > low
    allowed = 7 * math.sqrt(n * p * (1 - p)) + 2  # a right answer is refused once in 10^11
    found = int(away.sum())
    count = f"of {n:,} roundings {n * p:,.0f} ± {allowed:,.0f} should go to the second, {found:,} did"
    alike = any(bool((away == some).all()) for some in (away[:, :1], away[:1])) and 0.01 < p < 0.99
    hint = "; equal numbers were rounded alike: each element needs a random number of its own" * alike
    where = f"{x:.9g} lies {p:.6g} of the way from {sign * low:g} to {sign * (low + step):g}"
    core.require(abs(found - n * p) <= allowed and not alike, f"{where}: {count}{hint}")


@core.exercise("precision.3", "scale, skipped steps and weights equal GradScaler's, with two optimizers")
def scaler(answer):
    for power, growth, backoff in ((1, 4.0, 0.25), (17, 2.0, 0.5), (7, 4.0, 0.5), (12, 2.0, 0.25)):
        # The second optimizer is of the same class as the first, or not.
        second = torch.optim.Adam if power % 3 == 1 else torch.optim.SGD
        _drive(answer, 2.0**power, growth, backoff, random.randrange(3, 6), second)
    p = torch.zeros(5, requires_grad=True)
    p.grad, opt, mine = torch.full((5,), 3e38), torch.optim.SGD([p], lr=1e-38), core.call(answer, 2.0)
    core.call(mine.step, opt, mutates=(0,))
    core.close(p, torch.full((5,), -1.5), "weights after finite gradients of 3e38, whose norm is infinite")
    scaled = core.call(mine.scale, loss := torch.randn((), requires_grad=True), mutates=(0,))
    found = torch.autograd.grad(scaled, loss, allow_unused=True)[0] if scaled.requires_grad else None
    core.require(found is not None, "no gradient flows from scale(loss) to loss: multiply the tensor itself")
    core.close(found, torch.tensor(2.0), "the gradient of scale(loss) where the factor is 2")


def _drive(answer, factor, growth, backoff, interval, second):
    ours = [torch.randn(s).requires_grad_() for s in SHAPES]
    theirs, pairs, plan = [p.detach().clone().requires_grad_() for p in ours], [[], []], []
    for params in (ours, theirs):
        groups = [{"params": params[:1]}, {"params": params[1:2], "lr": 0.02}]
        pairs[0].append(torch.optim.SGD(groups, lr=0.1, momentum=0.9))
        pairs[1].append(second([{"params": params[2:3]}, {"params": params[3:]}], lr=0.03))
    good = interval - 1, 0, interval, 2 * interval, 1, 2 * interval - 1, 9
    for n in good:  # good iterations, then a bad one
        plan += [None] * n + [random.choice([math.inf, -math.inf, math.nan])]
    mine = core.call(answer, factor, growth, backoff, interval)
    ref = torch.amp.GradScaler("cpu", factor, growth, backoff, interval)
    for i, bad in enumerate((plan + [None] * 40)[:40]):
        loss, at = torch.randn(()), random.choice([[0], [1], [3], [0, 3]])
        where = f"after iteration {i + 1} of Scaler({factor:g}, {growth:g}, {backoff:g}, {interval})"
        which = f"{bad} in a gradient of optimizer {' and '.join(str(k // 2 + 1) for k in at)}"
        where += f", {which}" if bad else ", all gradients finite"
        core.close(core.call(mine.scale, loss), ref.scale(loss), f"scaled loss {where}")
        for k, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            b.grad = torch.randn(b.shape) * ref.get_scale() if k != 2 or i % 5 else None
            if bad and k in at:
                b.grad.view(-1)[random.randrange(1, b.numel())] = bad
            a.grad = None if b.grad is None else b.grad.clone()
        given = [a.grad for a in ours]
        for k, (opt, ref_opt) in enumerate(pairs):
            if random.random() < 0.5:  # unscale and clip, or leave both to step
                core.call(mine.unscale_, opt, mutates=(0,))
                ref.unscale_(ref_opt)
                for params in (ours, theirs):
                    nn.utils.clip_grad_norm_(params[2 * k : 2 * k + 2], 0.5)
            core.call(mine.step, opt, mutates=(0,))
            ref.step(ref_opt)
        for k, (a, b, g) in enumerate(zip(ours, theirs, given, strict=True)):
            gone = "has no gradient any more" if a.grad is None else "has another tensor as its gradient"
            gone += "; unscale_ divides in place, step changes none"
            core.require(a.grad is g, f"{where}: parameter {k + 1} {gone}")
            core.close(a, b, f"weights {where}", rtol=1e-5)
            if g is not None:
                core.close(g.nan_to_num(0), b.grad.nan_to_num(0), f"gradients {where}, NaN as 0", atol=1e-9)
        core.call(mine.update)
        ref.update()
        core.close(mine.factor, ref.get_scale(), f"scale {where}", atol=0)


@core.exercise("precision.4", "losses, weights and the scaler's calls right in fp32, bf16 and fp16")
def train_mixed(answer):
    lows, norms = ("float32", "float32", "bfloat16", "float16", "float16"), (0.1, 50.0, 0.02, 0.1, 0.02)
    for low, accumulate, max_norm in zip(lows, (1, 3, 2, 1, 3), norms, strict=True):
        steps, dtype = random.randrange(4, 7), getattr(torch, low)
        what = f"{low}, {steps} steps, accumulate={accumulate}, max_norm={max_norm}"
        shape = random.choice([(4,), (3, 2)])
        batches = [(torch.randn(*shape, 9), torch.randint(5, shape)) for _ in range(steps * accumulate)]
        if low == "float16":
            batches[random.randrange(accumulate, 2 * accumulate)][0].mul_(1e7)  # overflows
        net = nn.Sequential(nn.Linear(9, 23), nn.Tanh(), nn.Linear(23, 5))
        scaler = torch.amp.GradScaler("cpu", 2.0**10, growth_interval=1, enabled=low == "float16")
        want = _trained(net, batches, dtype, accumulate, max_norm, scaler.is_enabled())
        calls, seen = ("scale", "unscale_", "step", "update"), {"forward in": set(), "backward": set()}
        net.register_forward_hook(functools.partial(_look, seen))
        reads = _Reads()
        for name in calls:
            setattr(scaler, name, mock.Mock(side_effect=reads.allowed(getattr(scaler, name))))
        for p in net.parameters():
            p.grad = torch.randn(p.shape)  # old gradients, to be cleared first
        net.train(training := accumulate == 1)
        stream = _in_turn(batches, scaler, accumulate, what)
        given = net, torch.optim.SGD(net.parameters(), lr=0.5), stream, dtype, scaler
        with reads:
            losses = core.call(answer, *given, accumulate, max_norm, mutates=range(7))
        core.require(not reads.n, f"{what}: Python read {reads.n} tensors, as `.item()`, `float` and `if` do")
        core.require(net.training == training, f"{what}: net.training changed; leave it to the caller")
        core.require(seen["forward in"] == {low}, f"{what}: the forward pass was in {[*seen['forward in']]}")
        core.require(seen["backward"] == {False}, f"{what}: backward ran under autocast; expected it outside")
        core.require(not torch.is_autocast_enabled("cpu"), f"{what}: autocast is still on after the loop")
        for name in calls:
            expected = steps * accumulate if name == "scale" else steps
            core.equal(getattr(scaler, name).call_count, expected, f"calls of scaler.{name} ({what})")
        core.require(isinstance(losses, list), f"{what}: expected a list of losses, got {core.kind(losses)}")
        core.equal(len(losses), steps, f"number of losses ({what})", "losses")
        hint = "; look at the order unscale, clip, step, and at what is done once for each step"
        for i, (got, loss) in enumerate(zip(losses, want[0], strict=True)):
            _tensor(got, torch.float32, (), f"a loss ({what})")
            core.require(not got.requires_grad, f"{what}: a kept loss holds its graph; detach it")
            if math.isfinite(loss):
                why = f", after step {i}{hint}" if i else ", computed under autocast"
                core.close(got, torch.tensor(loss), f"mean loss of step {i + 1} ({what}){why}")
        loose = 1e-5 if low == "float32" else 0.01 * min(max_norm, 1.0)
        for p, w in zip(net.parameters(), want[1], strict=True):
            core.close(p, w, f"weights at the end ({what}){hint}", rtol=1e-5, atol=loose)
    _device_and_settings(answer)


class _Reads(TorchDispatchMode):
    "Counts reads of a tensor as a Python number, except inside functions that are `allowed` to."

    n = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.n += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))

    def allowed(self, fn):
        def call(*args, **kwargs):
            before = self.n
            out = fn(*args, **kwargs)
            self.n = before
            return out

        return call


def _in_turn(batches, scaler, accumulate, what):
    for i, batch in enumerate(batches):
        if (steps := scaler.step.call_count) < (due := i // accumulate):
            early = f"batch {i + 1} was taken after {steps} calls of scaler.step; expected {due}"
            raise core.Wrong(f"{what}: {early}, as each batch is taken after the step before it")
        yield batch


def _device_and_settings(answer):
    "Train on the device `meta`, where nothing is computed, and see for which device autocast was asked."
    net, kinds, kind = nn.Linear(9, 5, device="meta"), [], torch.amp.autocast_mode.autocast
    batch = torch.empty(4, 9, device="meta"), torch.empty(4, dtype=torch.long, device="meta")
    given = net, torch.optim.SGD(net.parameters()), iter([batch]), torch.bfloat16
    original = kind.__init__

    def init(self, device_type, *args, **kwargs):
        kinds.append(device_type)
        original(self, "cpu", *args, **kwargs)

    torch.set_float32_matmul_precision("highest")
    try:
        with mock.patch.object(kind, "__init__", init):
            core.call(answer, *given, torch.amp.GradScaler("cpu", enabled=False), mutates=range(5))
    except core.Wrong as e:
        raise core.Wrong(f"on the device 'meta', where tensors have no values to read, {e}") from None
    after = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    core.require(after == "highest", f"the call left torch.set_float32_matmul_precision({after!r}) behind")
    asked = f"autocast was asked for {' and '.join(map(repr, kinds)) or 'no device'}"
    core.require("meta" in kinds, f"the batch is on 'meta', {asked}; expected x.device.type")


def _look(seen, net, args, out):
    seen["forward in"].add(_short(out.dtype))
    out.register_hook(lambda g: seen["backward"].add(torch.is_autocast_enabled("cpu")))


def _trained(net, batches, dtype, accumulate, max_norm, scaled):
    "Losses and final weights of 0.5 times SGD by its formula, clipped in float64."
    names, weights = zip(*((n, p.detach().clone()) for n, p in net.named_parameters()), strict=True)
    losses, factor = [], 2.0**10 if scaled else 1.0
    for k in range(0, len(batches), accumulate):
        leaves, total = {n: w.clone().requires_grad_() for n, w in zip(names, weights, strict=True)}, 0.0
        grads = [torch.zeros(w.shape, dtype=torch.float64) for w in weights]
        for x, y in batches[k : k + accumulate]:
            with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
                logits = torch.func.functional_call(net, leaves, (x,))
            loss = F.cross_entropy(logits.float().flatten(0, -2), y.flatten()) / accumulate
            found = torch.autograd.grad(loss * factor, list(leaves.values()))
            grads = [g + f.double() / factor for g, f in zip(grads, found, strict=True)]
            total += loss.item()
        losses.append(total)
        norm = math.sqrt(sum(float(g.square().sum()) for g in grads))
        if math.isfinite(norm):
            clip = 0.5 * min(1.0, max_norm / (norm + 1e-6))
            weights = [w - (clip * g).float() for w, g in zip(weights, grads, strict=True)]
        factor *= (2.0 if math.isfinite(norm) else 0.5) if scaled else 1.0
    return losses, weights


@functools.cache
def _line(fmt):
    "Every finite number from 0 upwards, in the order of the codes."
    group, value, values = 2**fmt.fraction, 0.0, []
    step = 2.0 ** (2 - 2 ** (fmt.exponent - 1) - fmt.fraction)
    for code in range(fmt.top + 1):
        values.append(value)
        step *= 2 if code >= 2 * group and code % group == 0 else 1
        value += step
    return values


def _nearest(x, fmt):
    "The code of `x` by its place on the number line."
    line, size = _line(fmt), min(abs(x), _line(fmt)[-1])
    above = max(bisect.bisect_left(line, size), 1)
    up, down = line[above] - size, size - line[above - 1]
    code = above if up < down or (up == down and above % 2 == 0) else above - 1
    return (math.copysign(1, x) < 0) << (fmt.bits - 1) | code


def _bits(code, fmt):
    "A code as its three fields and its number, such as '0 01111 0000000000 (1.0)'."
    bits, half, line = format(code, f"0{fmt.bits}b"), 2 ** (fmt.bits - 1), _line(fmt)
    value = f"{'-' * (code >= half)}{line[code % half]!r}" if code % half < len(line) else "not finite"
    kind = ", subnormal" * (0 < code % half < 2**fmt.fraction)
    return f"{bits[0]} {bits[1 : 1 + fmt.exponent]} {bits[1 + fmt.exponent :]} ({value}{kind})"


def _numbers(line):
    "Numbers for a format: all sizes and beyond, ties and their close neighbours, both zeros."
    found = [0.0, -0.0, line[-1], 1.5 * line[-1], 1e3 * line[-1], line[1] / 2, 0.51 * line[1]]
    for low in [0, 1, *(random.randrange(len(line) - 1) for _ in range(60))]:
        a, b = line[low : low + 2]
        near = [(a + b) / 2 * (1 + s * 2**-40) for s in (-1, 0, 1)]
        found += [random.choice([-1, 1]) * x for x in (*near, a + (b - a) * random.random(), b)]
    return found


@core.exercise("precision.5", "encode and decode agree with a number line for 5 known and 8 invented formats")
def codec(encode, decode):
    known = [precision.FORMATS[n] for n in ("e2m1", "e4m3", "e5m2", "fp16", "bf16")]
    for e, f in [(2 + i % 4, random.randrange(1, 7)) for i in range(8)]:
        known.append(precision.Format("an invented format", e, f, random.choice([0, 1, 2**f])))
    for fmt in known:
        line, half, edge = _line(fmt), 2 ** (fmt.bits - 1), 2**fmt.fraction
        name = f"{fmt.name} ({fmt.exponent} exponent bits, {fmt.fraction} fraction bits)"
        some = random.sample(range(len(line)), min(len(line), 250))
        for code in (c | s for c in [0, 1, edge - 1, edge, edge + 1, fmt.top, *some] for s in (0, half)):
            want = math.copysign(line[code % half], 1 - 2 * (code >= half))
            what = f"decode of the bits {_bits(code, fmt).split(' (')[0]} in {name}"
            got = core.number(core.call(decode, code, fmt), what)
            same = got == want and math.copysign(1, got) == math.copysign(1, want)
            core.require(same, f"{what}: expected {want!r}, got {got!r}")
        for x in _numbers(line):
            want, got = _nearest(x, fmt), core.call(encode, x, fmt)
            what = f"encode({x!r}) in {name}: expected {_bits(want, fmt)}, got"
            whole = hasattr(got, "__index__") and not isinstance(got, bool | torch.Tensor)
            core.require(whole, f"{what} {core.kind(got)}; the code is an int")
            got = int(got)
            shown = _bits(got, fmt) if 0 <= got < 2 * half else f"{got}, no code of {fmt.bits} bits"
            core.require(got == want, f"{what} {shown}")


@core.exercise(
    "precision.6", "the largest lands on 448, each is the nearest number, NaN and infinity are seen"
)
def fp8(to_fp8, from_fp8):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for low, high in ((-3, 2), (-1, 1)) if dtype == torch.float16 else ((-12, 12), (-3, 3), (0, 8)):
            x = (torch.randn(random.randrange(2, 9), 5, 7) * 10 ** random.uniform(low, high)).to(dtype)
            x.view(-1)[random.choice([0, 5, 9])] = 12 * x.abs().max()  # one number far above the others
            _round_trip(to_fp8, from_fp8, x, f"a {_short(dtype)} tensor of {list(x.shape)}")
    odd = torch.randn(6, 5) * 10 ** random.uniform(-3, 3)
    odd[1, 2], odd[4, 0], odd[0, 3] = math.inf, -math.inf, math.nan
    named = {"inf, -inf and NaN": odd, "NaN": torch.full((2, 3), math.nan), "zeros": torch.zeros(3, 5),
             "negative numbers": -torch.rand(4, 6) - 0.1, "sizes near 1e-20": torch.randn(4, 7) * 1e-20,
             "the largest at the end": torch.arange(-9, 31) / 7,
             "sizes near 1e-10": torch.randn(4, 7) * 1e-10, "sizes near 1e-41": torch.randn(9) * 1e-41,
             "671 · 2^-149": torch.tensor([671 * 2.0**-149]), "one number": torch.tensor([-3.7])}  # fmt: skip
    for name, x in named.items():
        _round_trip(to_fp8, from_fp8, x, f"a tensor of {name}")


def _round_trip(to_fp8, from_fp8, x, what):
    q, scale = core.parts(core.call(to_fp8, x), "q scale", f"to_fp8 of {what}")
    numbers, finite = _tensor(q, torch.float8_e4m3fn, x.shape, f"q of {what}").float(), x.isfinite()
    exact, value = x.double().where(finite, 0.0), core.number(scale, f"scale of {what}")
    core.require(value > 0, f"scale of {what}: expected a number above 0, got {value:g}")
    if isinstance(scale, torch.Tensor):
        core.equal(_short(scale.dtype), "float32", f"dtype of the scale of {what}")
    if exact.any():  # without a finite number other than zero, any positive scale will do
        want = max(float(exact.abs().max()) / 448, 2.0**-126)
        core.close(value, want, f"scale of {what}: max |x| / 448, at least 2^-126", rtol=1e-5, atol=0)
    lost = int((numbers.isnan() & finite).sum())
    core.require(not lost, f"{what}: {lost} finite numbers became NaN; clamp before the conversion")
    kept = numbers[~(numbers.isnan() | finite)].tolist()[:1]
    core.require(not kept, f"{what}: an infinite or NaN element became {kept}; expected NaN")
    line = torch.tensor(_line(precision.FORMATS["e4m3"]), dtype=torch.float64)
    wanted, numbers = (exact / value).flatten(), numbers.where(finite, 0.0).double()
    gap = (line - wanted.abs()[:, None]).abs().amin(1) + 1e-5 * wanted.abs() + 1e-9
    at = int(((numbers.flatten() - wanted).abs() - gap).argmax())
    off = f"x / scale = {float(wanted[at]):.6g} became {float(numbers.flatten()[at]):.6g}"
    nearest = abs(float(numbers.flatten()[at] - wanted[at])) <= gap[at]
    core.require(nearest, f"{what}: {off}, which is not the nearest fp8 number")
    back = _tensor(core.call(from_fp8, q, scale), torch.float32, x.shape, f"from_fp8 of {what}")
    kept = back[~(back.isnan() | finite)].tolist()[:1]
    core.require(not kept, f"from_fp8 of {what}: a NaN in q became {kept}; expected NaN")
    core.close(back.where(finite, 0.0), numbers * value, f"from_fp8 of {what}", rtol=1e-6, atol=1e-45)

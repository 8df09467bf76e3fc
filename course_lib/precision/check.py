"Checks of precision. Oracles: SGD and Adam in float64, GradScaler, SGD by its formula, a number line."

import bisect
import functools
import math
import random

import torch
from torch import nn
from torch.nn import functional as F

from course_lib import checking as core
from course_lib import precision
from course_lib.checking import yours  # noqa: F401

SHAPES = (3, 5), (7,), (2, 1, 4), (6,)


def _short(dtype):
    return str(dtype).removeprefix("torch.")


@core.exercise("precision.1", "masters follow SGD and Adam in float64, parameters are their roundings")
def master_weights(answer):
    for dtype in (torch.bfloat16, torch.float16):
        decay = random.uniform(0.05, 0.2)
        sgd = functools.partial(
            torch.optim.SGD, lr=random.uniform(0.02, 0.1), weight_decay=decay, momentum=0.9
        )
        for make in (sgd, functools.partial(torch.optim.Adam, lr=random.uniform(0.002, 0.02))):
            _follow(answer, dtype, make)


def _follow(answer, dtype, make):
    params = [nn.Parameter(torch.randn(s).to(dtype)) for s in SHAPES]
    want = [p.detach().double() for p in params]
    mine, oracle = core.call(answer, params, make, mutates=(0,)), make(want)
    known = hasattr(mine, "step") and hasattr(mine, "master") and len(mine.master) == len(params)
    core.require(known, f"expected the class MasterWeights with the given __init__, got {core.kind(answer)}")
    for i in range(12):
        grads = [torch.randn(s).to(dtype) * (i != 5) for s in SHAPES]  # one step of zeros: decay still acts
        for j, (p, w, g) in enumerate(zip(params, want, grads, strict=True)):
            p.grad, w.grad = (None, None) if i % 3 == j else (g, g.double())
        oracle.step()
        core.call(mine.step)
        for j, (p, m, w) in enumerate(zip(params, mine.master, want, strict=True)):
            what = f"step {i + 1} of {make.func.__name__} on {_short(dtype)} parameters, number {j + 1}"
            none = " (its gradient was None in this step)" if i % 3 == j else ""
            core.require(m.dtype == torch.float32, f"{what}: master is {_short(m.dtype)}, expected float32")
            core.close(m, w, f"{what}{none}: master weight", rtol=1e-5, atol=1e-5)
            off = int((p != m.to(dtype)).sum())
            hint = "are not their master weight rounded; write into the parameters themselves, in place"
            core.require(p.dtype == dtype and not off, f"{what}: {off} of {p.numel()} elements {hint}")


@core.exercise(
    "precision.2", "every number goes to a neighbour, exact ones stay, means are right within 7 sigma"
)
def stochastic_round(answer):
    _neighbours(answer)
    for part in (1 / 1024, random.uniform(0.05, 0.3), 0.5, random.uniform(0.6, 0.9), 1 - 1 / 512):
        for sign in (1.0, -1.0):
            _mean(answer, part, sign)
    x = torch.full((50, 40), 1.0 + 2.0**-8)
    again = torch.equal(_bf16(answer, x), _bf16(answer, x))
    core.require(not again, "two calls rounded 2,000 numbers alike: draw new random numbers in each call")


def _bf16(answer, x):
    got = core.call(answer, x)
    if not isinstance(got, torch.Tensor) or got.dtype != torch.bfloat16 or got.shape != x.shape:
        raise core.Wrong(f"expected a bfloat16 tensor of shape {list(x.shape)}, got {core.kind(got)}")
    return got


def _neighbours(answer):
    x = 2.0 ** (torch.rand(61, 37).t() * 200 - 100) * (torch.randint(0, 2, (37, 61)) * 2 - 1)
    near, got = x.bfloat16(), _bf16(answer, x)
    other = torch.nextafter(near, torch.where(near.float() > x, -math.inf, math.inf).bfloat16())
    for at in ((got != near) & (got != other)).nonzero().tolist()[:1]:
        low, high = sorted((near[*at].item(), other[*at].item()))
        found = f"{x[*at].item():.8g} was rounded to {got[*at].item():.8g}"
        raise core.Wrong(f"{found}; its neighbours in bfloat16 are {low:.8g} and {high:.8g}")
    exact = torch.cat([near.flatten().float(), torch.tensor([0.0, 1.0, -2.0, math.inf, -math.inf])])
    for _ in range(3):
        want, got = exact.clamp(-3e38, 3e38), _bf16(answer, exact).float()
        core.close(
            got.clamp(-3e38, 3e38), want, "numbers that bfloat16 holds exactly, or infinite", rtol=0, atol=0
        )
    nans = _bf16(answer, torch.tensor([1.0, math.nan, 2.0, -math.nan]))[[1, 3]]
    core.require(bool(nans.isnan().all()), f"NaN was rounded to {nans.tolist()}; expected NaN")
    core.equal(
        list(_bf16(answer, torch.tensor(0.75)).shape), [], "shape for a tensor with one number, no axis"
    )


def _mean(answer, part, sign):
    # `part` is how far x is from one bfloat16 to the next, away from zero: exact in float32.
    low = 2.0 ** random.randrange(-20, 20) * (1 + random.randrange(126) / 128)
    step, n = 2.0 ** (math.frexp(low)[1] - 8), 200_000
    p = round(part * 2**16) / 2**16
    got = _bf16(answer, torch.full((400, n // 400), sign * (low + p * step)))
    away = int((got.double().abs() > low).sum())
    allowed = 7 * math.sqrt(n * p * (1 - p)) + 2  # a right answer is refused once in 10^11
    place = f"{sign * (low + p * step):.9g} lies {p:.4f} of the way from {sign * low:g} to {sign * (low + step):g}"
    rows = got.double().abs() > low
    alike = bool((rows == rows[:, :1]).all()) or bool((rows == rows[:1]).all())
    hint = (
        "; equal numbers were rounded alike: each element needs a random number of its own" if alike else ""
    )
    counts = f"of {n:,} roundings {n * p:,.0f} ± {allowed:,.0f} should go to the second, {away:,} did"
    core.require(abs(away - n * p) <= allowed and not alike * (0.01 < p < 0.99), f"{place}: {counts}{hint}")


@core.exercise("precision.3", "scale, skipped steps and weights equal GradScaler's, with two optimizers")
def scaler(answer):
    for case in range(4):
        settings = random.choice([2.0, 4.0]), random.choice([0.5, 0.25]), random.randrange(3, 6)
        _drive(answer, case, 2.0 ** (random.randrange(6, 14) if case else 1), *settings)
    p = torch.zeros(5, requires_grad=True)
    opt, mine = torch.optim.SGD([p], lr=1e-38), core.call(answer, 2.0, 2.0, 0.5, 9)
    p.grad = torch.full((5,), 3e38)
    core.call(mine.step, opt, mutates=(0,))
    core.call(mine.update)
    what = "after finite gradients of 3e38, whose sum and norm are infinite"
    core.close(p, torch.full((5,), -1.5), f"weights {what}")
    core.close(mine.get_scale(), 2.0, f"scale {what}")


def _drive(answer, case, factor, growth, backoff, interval):
    ours = [torch.randn(s).requires_grad_() for s in SHAPES]
    theirs = [p.detach().clone().requires_grad_() for p in ours]
    pairs = [
        (_sgd(ours), _sgd(theirs)),
        (torch.optim.Adam(ours[2:], 0.03), torch.optim.Adam(theirs[2:], 0.03)),
    ]
    mine = core.call(answer, factor, growth, backoff, interval)
    known = all(hasattr(mine, name) for name in ("scale", "unscale_", "step", "update", "get_scale"))
    core.require(known, f"expected the class Scaler with its five methods, got {core.kind(answer)}")
    ref = torch.amp.GradScaler("cpu", factor, growth, backoff, interval)
    given = f"Scaler(factor={factor:g}, growth={growth:g}, backoff={backoff:g}, interval={interval})"
    for i, bad in enumerate(_plan(interval)):
        loss, where = torch.randn(()), f"iteration {i + 1} of a run with {given}"
        core.close(core.call(mine.scale, loss), ref.scale(loss), f"scaled loss in {where}")
        at = _set_gradients(ours, theirs, ref.get_scale(), bad, i)
        where += (
            f", {bad} in a gradient of optimizer {at // 2 + 1}"
            if bad is not None
            else ", all gradients finite"
        )
        for k, (opt, ref_opt) in enumerate(pairs):
            if random.random() < 0.5:
                core.call(mine.unscale_, opt, mutates=(0,))
                ref.unscale_(ref_opt)
                max_norm = random.choice([0.3, 1.0])
                for params in (ours, theirs):
                    nn.utils.clip_grad_norm_(params[2 * k : 2 * k + 2], max_norm)
            core.call(mine.step, opt, mutates=(0,))
            ref.step(ref_opt)
        for k, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            core.close(a, b, f"weights {k + 1} of 4 after {where}", rtol=1e-5)
            core.require((a.grad is None) == (b.grad is None), f"{where}: a gradient was made or removed")
            if b.grad is not None:
                core.close(
                    a.grad.nan_to_num(0), b.grad.nan_to_num(0), f"gradients {k + 1} after {where}", atol=1e-9
                )
        core.call(mine.update)
        ref.update()
        core.close(mine.get_scale(), ref.get_scale(), f"scale after {where}", atol=0)


def _sgd(params):
    return torch.optim.SGD(
        [{"params": params[:1]}, {"params": params[1:2], "lr": 0.02}], lr=0.1, momentum=0.9
    )


def _plan(interval):
    "What is wrong with the gradients of each iteration, None where they are finite."
    plan = []
    for n in (
        interval - 1,
        0,
        interval,
        2 * interval,
        1,
        2 * interval - 1,
        interval + 1,
    ):  # good, then a bad one
        plan += [None] * n + [random.choice([math.inf, -math.inf, math.nan])]
    return (plan + [None] * 40)[:40]


def _set_gradients(ours, theirs, scale, bad, i):
    at = random.choice([0, 1, 3])
    for k, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        grad = torch.randn(a.shape) * scale
        if bad is not None and k == at:
            grad.view(-1)[random.randrange(1, grad.numel())] = bad
        a.grad, b.grad = (None, None) if k == 2 and i % 5 == 0 else (grad.clone(), grad)
    return at


class _Probe(torch.autograd.Function):
    "Notes the dtype of what passes, and whether autocast is on when the gradient comes back."

    @staticmethod
    def forward(ctx, x, seen):
        ctx.seen = seen
        seen.append(("forward in", _short(x.dtype)))
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.seen.append(("autocast in backward", torch.is_autocast_enabled("cpu")))
        return grad, None


class _Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.up, self.down, self.seen = nn.Linear(9, 23), nn.Linear(23, classes), []

    def forward(self, x):
        return _Probe.apply(self.down(self.up(x).tanh()), self.seen)


class _Counted(torch.amp.GradScaler):
    def __init__(self, **settings):
        super().__init__("cpu", **settings)
        self.calls = []

    def scale(self, outputs):
        self.calls.append("scale")
        return super().scale(outputs)

    def unscale_(self, optimizer):
        self.calls.append("unscale_")
        super().unscale_(optimizer)

    def step(self, optimizer, *args, **kwargs):
        self.calls.append("step")
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale=None):
        self.calls.append("update")
        super().update(new_scale)


@core.exercise(
    "precision.4", "losses, weights and the scaler's calls right in fp32, bf16 and fp16, steps skipped too"
)
def train_mixed(answer):
    for dtype, accumulate in ((torch.float32, 1), (torch.float32, 3), (torch.bfloat16, 2), (torch.float16, 1),
                              (torch.float16, 3)):  # fmt: skip
        steps, max_norm = random.randrange(4, 7), random.choice([0.02, 0.1, 50.0])
        shape = (4,) if random.random() < 0.5 else (3, 2)
        batches = [(torch.randn(*shape, 9), torch.randint(5, shape)) for _ in range(steps * accumulate)]
        if dtype == torch.float16:
            batches[random.randrange(accumulate, 2 * accumulate)][0].mul_(1e7)  # overflows in fp16
        settings = {"enabled": dtype == torch.float16, "init_scale": 2.0**10, "growth_interval": 1}
        net, scaler = _Net(5), _Counted(**settings)
        want = _trained(net, batches, dtype, accumulate, max_norm, scaler.is_enabled())
        for p in net.parameters():
            p.grad = torch.randn(p.shape)  # old gradients, to be cleared first
        what = f"{_short(dtype)}, accumulate={accumulate}, max_norm={max_norm}"
        opt = torch.optim.SGD(net.parameters(), lr=0.5)
        args = net, opt, iter(batches), dtype, scaler, accumulate, max_norm
        losses = core.call(answer, *args, mutates=range(7))
        _judge(losses, net, scaler, want, what, steps, accumulate, dtype)


def _judge(losses, net, scaler, want, what, steps, accumulate, dtype):
    for call in ("scale", "unscale_", "step", "update"):
        n = steps * accumulate if call == "scale" else steps
        core.equal(scaler.calls.count(call), n, f"calls of scaler.{call} in {steps} steps ({what})", "calls")
    core.require(not torch.is_autocast_enabled("cpu"), f"{what}: autocast is still on after the loop")
    for name, right in (("forward in", _short(dtype)), ("autocast in backward", False)):
        found = {value for seen, value in net.seen if seen == name}
        core.require(found == {right}, f"{what}: {name}: expected {right}, got {', '.join(map(str, found))}")
    core.require(isinstance(losses, list), f"{what}: expected a list of losses, got {core.kind(losses)}")
    core.equal(len(losses), steps, f"number of losses ({what})", "losses")
    for i, (got, loss) in enumerate(zip(losses, want[0], strict=True)):
        kept = isinstance(got, torch.Tensor) and got.dtype == torch.float32 and not got.requires_grad
        core.require(kept, f"{what}: expected each loss as a detached float32 tensor, got {core.kind(got)}")
        if math.isfinite(loss):
            core.close(
                got, torch.tensor(loss), f"mean loss of step {i + 1} ({what}); the loss is under autocast too"
            )
    loose = 1e-5 if dtype == torch.float32 else 0.01 * min(want[2], 1.0)
    for p, w in zip(net.parameters(), want[1], strict=True):
        hint = "; look at the order unscale, clip, step, and at what is done once for each step"
        core.close(p, w, f"weights after {steps} steps ({what}){hint}", rtol=1e-5, atol=loose)


def _trained(net, batches, dtype, accumulate, max_norm, scaled):
    "Losses and weights by the formula of SGD, and the largest norm of a clipped gradient."
    weights, losses, factor, largest = [p.detach().clone() for p in net.parameters()], [], 2.0**10, 0.0
    names = [n for n, _ in net.named_parameters()]
    for k in range(0, len(batches), accumulate):
        total, grads = 0.0, [torch.zeros(w.shape, dtype=torch.float64) for w in weights]
        leaves = [w.clone().requires_grad_() for w in weights]
        for x, y in batches[k : k + accumulate]:
            with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
                logits = torch.func.functional_call(net, dict(zip(names, leaves, strict=True)), (x,))
            loss = F.cross_entropy(logits.float().flatten(0, -2), y.flatten())
            found = torch.autograd.grad(loss / accumulate * (factor if scaled else 1.0), leaves)
            grads, total = [g + f.double() for g, f in zip(grads, found, strict=True)], total + loss.item()
        losses.append(total / accumulate)
        grads = [g / factor if scaled else g for g in grads]
        norm = math.sqrt(sum(float(g.square().sum()) for g in grads))
        if math.isfinite(norm):
            clip = min(1.0, max_norm / (norm + 1e-6))
            largest = max(largest, norm * clip)
            weights = [w - (0.5 * clip * g).float() for w, g in zip(weights, grads, strict=True)]
        factor *= 2.0 if math.isfinite(norm) else 0.5
    net.seen.clear()
    return losses, weights, largest


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
    line, size = _line(fmt), abs(x)
    above = min(bisect.bisect_left(line, size), len(line) - 1)
    below = max(above - 1, 0)
    up, down = abs(line[above] - size), abs(size - line[below])
    code = above if size > line[-1] or up < down or (up == down and above % 2 == 0) else below
    return (math.copysign(1, x) < 0) << (fmt.bits - 1) | code


def _bits(code, fmt):
    "A code as its three fields and its number, such as '0 01111 0000000000 (1.0)'."
    bits, half = format(code, f"0{fmt.bits}b"), 2 ** (fmt.bits - 1)
    line = _line(fmt)
    value = f"{'-' if code >= half else ''}{line[code % half]!r}" if code % half < len(line) else "not finite"
    kind = ", subnormal" if 0 < code % half < 2**fmt.fraction else ""
    return f"{bits[0]} {bits[1 : 1 + fmt.exponent]} {bits[1 + fmt.exponent :]} ({value}{kind})"


def _numbers(line):
    "Numbers for a format: all sizes and beyond, ties and their close neighbours, both zeros."
    found = [0.0, -0.0, line[-1], 1.5 * line[-1], 1e3 * line[-1], line[1] / 2, 0.51 * line[1]]
    for low in [0, 1, *(random.randrange(len(line) - 1) for _ in range(60))]:
        a, b = line[low], line[low + 1]
        found += [
            (a + b) / 2,
            (a + b) / 2 * (1 + 2**-40),
            (a + b) / 2 * (1 - 2**-40),
            a + (b - a) * random.random(),
            b,
        ]
    return [random.choice([-1, 1]) * x if x else x for x in found]


@core.exercise("precision.5", "encode and decode agree with a number line for 5 known and 8 invented formats")
def codec(encode, decode):
    known = [precision.FORMATS[n] for n in ("e2m1", "e4m3", "e5m2", "fp16", "bf16")]
    for e, f in [(random.randrange(2, 6), random.randrange(1, 7)) for _ in range(8)]:
        known.append(precision.Format("an invented format", e, f, random.choice([0, 1, 2**f])))
    for fmt in known:
        line, half = _line(fmt), 2 ** (fmt.bits - 1)
        name = f"{fmt.name} ({fmt.exponent} exponent bits, {fmt.fraction} fraction bits)"
        edge = 2**fmt.fraction
        some = range(len(line)) if fmt.bits <= 9 else random.sample(range(len(line)), 300)
        for code in (c | s for c in [0, 1, edge - 1, edge, edge + 1, fmt.top, *some] for s in (0, half)):
            want = -line[code % half] if code >= half else line[code % half]
            what = f"decode of the bits {_bits(code, fmt).split(' (')[0]} in {name}"
            got = core.number(core.call(decode, code, fmt), what)
            same = got == want and math.copysign(1, got) == math.copysign(1, want)
            core.require(same, f"{what}: expected {want!r}, got {got!r}")
        for x in _numbers(line):
            want, what = _nearest(x, fmt), f"encode({x!r}) in {name}"
            got = core.call(encode, x, fmt)
            if isinstance(got, bool) or not hasattr(got, "__index__") or isinstance(got, torch.Tensor):
                raise core.Wrong(f"{what}: expected the bits as an int, got {core.kind(got)}")
            shown = (
                _bits(got, fmt) if 0 <= got < 2 * half else f"{got}, which is not a code of {fmt.bits} bits"
            )
            core.require(got == want, f"{what}: expected {_bits(want, fmt)}, got {shown}")


@core.exercise(
    "precision.6", "the largest lands on 448, each is the nearest fp8 number, NaN and infinity come through"
)
def fp8(to_fp8, from_fp8):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for low, high in ((-3, 2), (-1, 1)) if dtype == torch.float16 else ((-12, 12), (-3, 3), (0, 8)):
            x = (torch.randn(random.randrange(2, 9), 5, 7) * 10 ** random.uniform(low, high)).to(dtype)
            x.view(-1)[random.randrange(x.numel())] *= 12  # one number far above the others
            _round_trip(to_fp8, from_fp8, x, f"a {_short(dtype)} tensor of {list(x.shape)}")
    odd = torch.randn(6, 5) * 10 ** random.uniform(-3, 3)
    odd[1, 2], odd[4, 0], odd[0, 3] = math.inf, -math.inf, math.nan
    named = {"inf, -inf and NaN": odd, "NaN": torch.full((2, 3), math.nan), "zeros": torch.zeros(3, 5),
             "negative numbers": -torch.rand(4, 6) - 0.1, "sizes near 1e-20": torch.randn(4, 7) * 1e-20,
             "sizes near 1e-10": torch.randn(4, 7) * 1e-10, "sizes near 1e-41": torch.randn(9) * 1e-41,
             "the number 671 · 2^-149": torch.tensor([671 * 2.0**-149])}  # fmt: skip
    for name, x in named.items():
        _round_trip(to_fp8, from_fp8, x, f"a tensor of {name}")
    _round_trip(to_fp8, from_fp8, torch.tensor(-random.uniform(1, 9)), "a tensor with one number and no axis")


def _round_trip(to_fp8, from_fp8, x, what):
    q, scale = core.parts(core.call(to_fp8, x), "q scale", f"to_fp8 of {what}")
    if not isinstance(q, torch.Tensor) or q.dtype != torch.float8_e4m3fn or q.shape != x.shape:
        raise core.Wrong(f"{what}: expected q in float8_e4m3fn, shape {list(x.shape)}, got {core.kind(q)}")
    value, finite = core.number(scale, f"scale of {what}"), x.isfinite()
    exact = x.double().where(finite, torch.zeros((), dtype=torch.float64))
    want = max(float(exact.abs().max()) / 448, 2.0**-126)
    if exact.any():  # without a finite number other than zero, any positive scale will do
        core.close(value, want, f"scale of {what}: max |x| / 448, at least 2^-126", rtol=1e-5, atol=0)
    core.require(value > 0, f"scale of {what}: expected a number above 0, got {value:g}")
    numbers = q.float()
    lost = int((numbers.isnan() & finite).sum())
    core.require(not lost, f"{what}: {lost} finite numbers became NaN; clamp before the conversion")
    kept = numbers[~(numbers.isnan() | finite)].tolist()[:1]
    core.require(not kept, f"{what}: an infinite or NaN element became {kept}; expected NaN")
    line = torch.tensor(_line(precision.FORMATS["e4m3"]), dtype=torch.float64)
    wanted = exact / value
    off = (numbers.nan_to_num().double() - wanted).abs() * finite
    excess = off - (line - wanted.abs()[..., None]).abs().amin(-1) - 1e-5 * wanted.abs() - 1e-9
    at = int(excess.flatten().argmax())
    x_at, q_at = float(wanted.flatten()[at]), float(numbers.flatten()[at])
    wrong = f"{what}: x / scale = {x_at:.6g} became {q_at:.6g}, which is not the nearest fp8 number"
    core.require(float(excess.flatten()[at]) <= 0, wrong)
    back = core.call(from_fp8, q, scale)
    if not isinstance(back, torch.Tensor) or back.dtype != torch.float32:
        raise core.Wrong(f"{what}: expected from_fp8 to give a float32 tensor, got {core.kind(back)}")
    want = torch.where(finite, numbers.double() * value, 0.0)
    core.close(back.where(finite, torch.zeros(())), want, f"from_fp8 of {what}", atol=1e-45)

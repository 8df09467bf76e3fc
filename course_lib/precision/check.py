"Checks of precision. Oracles: torch's casts, a number line, GradScaler, SGD in float64, NumPy's half floats."

import bisect
import functools
import math
import random

import torch

from course_lib import checking as core
from course_lib import precision
from course_lib.checking import yours  # noqa: F401

# --- precision.1 ---------------------------------------------------------------------------


@functools.cache
def _line(fmt):
    "Every finite number from 0 upwards, in the order of the codes."
    group = 2**fmt.fraction  # codes of one exponent
    values, value = [], 0.0
    step = 2.0 ** (2 - 2 ** (fmt.exponent - 1) - fmt.fraction)
    for code in range(2**fmt.exponent * group - (group if fmt.inf else 1)):
        values.append(value)
        if code >= 2 * group and code % group == 0:
            step *= 2
        value += step
    return values


def _nearest(x, fmt):
    "The code of `x` by its place on the number line; None stands for any NaN."
    line, size = _line(fmt), abs(x)
    sign = (math.copysign(1, x) < 0) << (fmt.exponent + fmt.fraction)
    if math.isnan(x):
        return None
    if size >= line[-1] + (line[-1] - line[-2]) / 2:
        tie_to_even = size == line[-1] + (line[-1] - line[-2]) / 2 and (len(line) - 1) % 2 == 0
        if not tie_to_even:
            return sign | (2**fmt.exponent - 1) << fmt.fraction if fmt.inf else None
    above = min(bisect.bisect_left(line, size), len(line) - 1)
    below = max(above - 1, 0)
    up, down = abs(line[above] - size), abs(size - line[below])
    code = above if up < down or (up == down and above % 2 == 0) else below
    return sign | code


def _torch_bits(values, name):
    "Codes by torch's own cast, for the numbers it is right about in every version."
    x = torch.tensor(values, dtype=torch.float32).to(precision.DTYPES[name])
    raw = x.view(torch.int16 if x.itemsize == 2 else torch.uint8).int()
    return (raw & (2 ** (8 * x.itemsize) - 1)).tolist()


def _spaced(code, fmt):
    "A code as its three fields, such as '0 01111 0000000000'."
    bits = format(code, f"0{fmt.bits}b")
    return f"{bits[0]} {bits[1 : 1 + fmt.exponent]} {bits[1 + fmt.exponent :]}"


def _numbers(fmt, n):
    "Numbers of float32 for a format: all sizes and beyond, ties and their neighbours, both zeros."
    line = _line(fmt)
    found = [0.0, -0.0, math.inf, -math.inf, math.nan, line[1] / 2, line[-1], 1e30]
    found += [line[-1] + s * (line[-1] - line[-2]) for s in (0.25, 0.5, 0.75, 1.0, 3.0)]
    found += [line[1] * s for s in (0.25, 0.51, 0.75, 1.5, 2.5)]
    for _ in range(n):
        low = random.randrange(len(line) - 1)
        a, b = line[low], line[low + 1]
        found += [(a + b) / 2, a + (b - a) * random.random(), b]
    found += [2.0 ** random.uniform(math.log2(line[1]) - 2, math.log2(line[-1]) + 1) for _ in range(n)]
    found = [x * random.choice([-1, 1]) if x else x for x in found]
    random.shuffle(found)
    return torch.tensor(found, dtype=torch.float32).tolist()


def _invented():
    "A format that no hardware has."
    return precision.Format("made up", random.randrange(2, 6), random.randrange(2, 7), random.random() < 0.5)


def _described(fmt):
    inf = "with infinities" if fmt.inf else "without infinities"
    return f"{fmt.name} ({fmt.exponent} exponent bits, {fmt.fraction} fraction bits, {inf})"


@core.exercise(
    "precision.1", "encode and decode agree with torch's casts, and with a number line for other formats"
)
def codec(encode, decode):
    named = [precision.FORMATS[n] for n in ("fp16", "bf16", "e5m2", "e4m3")]
    for fmt in [*named, *(_invented() for _ in range(4))]:
        _check_decode(decode, fmt)
    for fmt in [*named, *(_invented() for _ in range(6))]:
        _check_encode(encode, fmt)


def _check_decode(decode, fmt):
    line, half = _line(fmt), 2 ** (fmt.bits - 1)
    codes = list(range(2 * half)) if fmt.bits <= 9 else random.sample(range(2 * half), 400)
    edge = 2**fmt.fraction
    codes += [
        0,
        1,
        edge - 1,
        edge,
        edge + 1,
        len(line) - 1,
        len(line),
        half - 1,
        half,
        half + 1,
        2 * half - 1,
    ]
    for code in codes:
        want = line[code % half] if code % half < len(line) else math.nan
        if fmt.inf and code % half == len(line):
            want = math.inf
        want = -want if code >= half else want
        what = f"decode({_spaced(code, fmt)}) of {_described(fmt)}"
        got = core.call(decode, code, fmt)
        if math.isfinite(want):
            got = core.number(got, what)
        elif isinstance(got, torch.Tensor) or not isinstance(got, int | float):
            raise core.Wrong(f"{what}: expected {want}, got {core.kind(got)}")
        same = math.isnan(got) if math.isnan(want) else got == want
        core.require(same, f"{what}: expected {want!r}, got {got!r}")
        if want == 0:
            same_sign = math.copysign(1, got) == math.copysign(1, want)
            core.require(same_sign, f"{what}: expected {want!r}, got {got!r}: zero has a sign too")


def _check_encode(encode, fmt):
    numbers = _numbers(fmt, 60)
    if fmt.name in precision.DTYPES:
        wants = _torch_bits(numbers, fmt.name)
    else:
        wants = [_nearest(x, fmt) for x in numbers]
    half = 2 ** (fmt.bits - 1)
    for x, want in zip(numbers, wants, strict=True):
        if not fmt.inf and _nearest(x, fmt) is None:
            want = None  # torch clamps or gives NaN, by version; the exercise asks for NaN
        if math.isnan(x):
            want = None
        what = f"encode({x!r}) to {_described(fmt)}"
        got = core.call(encode, x, fmt)
        if isinstance(got, torch.Tensor | bool) or not isinstance(got, int):
            raise core.Wrong(f"{what}: expected the bits as an int, got {core.kind(got)}")
        core.require(0 <= got < 2 * half, f"{what}: got {got}, which is no code of {fmt.bits} bits")
        if want is None:
            fine = got % half > (len(_line(fmt)) if fmt.inf else len(_line(fmt)) - 1)
            core.require(fine, f"{what}: expected NaN, got the bits {_spaced(got, fmt)}")
        else:
            core.require(
                got == want, f"{what}: expected the bits {_spaced(want, fmt)}, got {_spaced(got, fmt)}"
            )


# --- precision.2 ---------------------------------------------------------------------------


@core.exercise(
    "precision.2", "scale, skipped steps and weights equal GradScaler's over four runs of 40 steps"
)
def scaler(answer):
    for case in range(4):
        _drive(answer, case)


def _optimiser(params, case):
    if case % 2:
        return torch.optim.Adam(params, lr=0.03)
    return torch.optim.SGD([{"params": params[:1]}, {"params": params[1:], "lr": 0.02}], lr=0.1, momentum=0.9)


def _drive(answer, case):
    # Powers of two, so that scaling is exact and the two can be compared closely.
    settings = {
        "scale": 2.0 ** random.randrange(6, 14),
        "growth": random.choice([2.0, 4.0]),
        "backoff": random.choice([0.5, 0.25]),
        "interval": random.randrange(3, 6),
    }
    shapes = ((3, 5), (7,), (2, 1, 4))
    ours = [torch.randn(s).requires_grad_() for s in shapes]
    theirs = [p.detach().clone().requires_grad_() for p in ours]
    opt, ref_opt = _optimiser(ours, case), _optimiser(theirs, case)
    mine = core.call(answer, **settings)
    core.require(hasattr(mine, "step"), f"expected a class with a method step, got {core.kind(answer)}")
    reference = torch.amp.GradScaler(
        "cpu",
        init_scale=settings["scale"],
        growth_factor=settings["growth"],
        backoff_factor=settings["backoff"],
        growth_interval=settings["interval"],
    )
    reference.scale(torch.ones(()))  # it makes its scale at the first use
    for i, bad in enumerate(_plan(settings["interval"])):
        where = f"step {i + 1} of a run with {_settings(settings)}"
        max_norm = random.choice([None, 0.3, 1.0])
        _set_gradients(ours, theirs, reference.get_scale(), bad, skip_third=i % 5 == 0)
        before = [p.detach().clone() for p in theirs]
        reference.unscale_(ref_opt)
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(theirs, max_norm)
        reference.step(ref_opt)
        reference.update()
        took = any(not torch.equal(a, b) for a, b in zip(before, theirs, strict=True))
        got = core.call(mine.step, opt, max_norm, mutates=(0,))
        gradients = f"gradients with {bad} in them" if bad is not None else "finite gradients"
        core.require(
            isinstance(got, bool | int) and got == took,
            f"{where}, {gradients}: expected step to return {took}, got {got!r}",
        )
        for a, b in zip(ours, theirs, strict=True):
            clipped = "" if max_norm is None else f", clipped to a norm of {max_norm}"
            core.close(a, b, f"weights after {where}, {gradients}{clipped}", rtol=1e-5)
        core.close(mine.scale, reference.get_scale(), f"scale after {where}, {gradients}", atol=0)


def _settings(settings):
    return ", ".join(f"{k}={v:g}" for k, v in settings.items())


def _plan(interval):
    "What is wrong with the gradients of each step, None where they are finite."
    odd = [math.inf, -math.inf, math.nan]
    runs = [interval - 1, 0, interval, 2 * interval, 1, 2 * interval - 1, interval + 1]
    plan = []
    for n in runs:  # so many good steps, then a bad one
        plan += [None] * n + [random.choice(odd)]
    return (plan + [None] * 40)[:40]


def _set_gradients(ours, theirs, scale, bad, skip_third):
    at = random.randrange(2)
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if i == 2 and skip_third:
            a.grad = b.grad = None
            continue
        grad = torch.randn(a.shape) * scale
        if bad is not None and i == at:
            grad.view(-1)[random.randrange(1, grad.numel())] = bad
        a.grad, b.grad = grad.clone(), grad


# --- precision.3 ---------------------------------------------------------------------------


@core.exercise(
    "precision.3",
    "master weights follow SGD in float64, small steps survive, low weights are their roundings",
)
def master_step(answer):
    for dtype in (torch.bfloat16, torch.float16):
        _follow_sgd(answer, dtype, lr=random.uniform(0.02, 0.1), decay=random.uniform(0.05, 0.2), steps=12)
        _follow_sgd(answer, dtype, lr=random.uniform(0.02, 0.1), decay=0.0, steps=3)
    _creep(answer)


def _follow_sgd(answer, dtype, lr, decay, steps):
    name = str(dtype).removeprefix("torch.")
    shapes = ((3, 5), (7,), (2, 1, 4))
    master = [torch.randn(s) for s in shapes]
    low = [m.to(dtype) for m in master]
    want = [m.double().requires_grad_() for m in master]
    opt = torch.optim.SGD(want, lr=lr, weight_decay=decay)
    for i in range(steps):
        grads = [torch.randn(s).to(dtype) for s in shapes]
        if i % 3 == 1:
            grads[1] = None
        for p, g in zip(want, grads, strict=True):
            p.grad = None if g is None else g.double()
        opt.step()
        what = f"after step {i + 1} with {name} weights, lr={lr:.3g}, decay={decay:.3g}"
        core.call(answer, low, master, grads, lr, decay, mutates=(0, 1))
        for m, p in zip(master, want, strict=True):
            core.close(m, p, f"master weights {what}", rtol=1e-6, atol=3e-6)
            core.require(m.dtype == torch.float32, f"master weights {what}: expected float32, got {m.dtype}")
        _low_is_rounded(low, master, dtype, what)


def _low_is_rounded(low, master, dtype, what):
    for p, m in zip(low, master, strict=True):
        core.require(p.dtype == dtype, f"low weights {what}: expected {dtype}, got {p.dtype}")
        off = (p != m.to(dtype)).sum()
        core.require(
            not off,
            f"low weights {what}: {int(off)} of {p.numel()} are not their master weight rounded; write the "
            "master weights back into the tensors of `low`, in place",
        )


def _creep(answer):
    n, lr = random.randrange(200, 300), 0.001
    master, grads = [torch.ones(3)], [torch.ones(3).bfloat16()]
    low = [torch.ones(3).bfloat16()]
    for _ in range(n):
        core.call(answer, low, master, grads, lr, 0.0, mutates=(0, 1))
    core.close(master[0], torch.full((3,), 1 - n * lr), f"1.0 after {n} steps of 0.001", rtol=1e-5)
    _low_is_rounded(low, master, torch.bfloat16, f"after {n} steps of 0.001 from 1.0")


# --- precision.4 ---------------------------------------------------------------------------


@core.exercise(
    "precision.4", "every number goes to a neighbour, exact ones stay, and the means are right within 7 sigma"
)
def stochastic_round(answer):
    _neighbours(answer)
    for part in (1 / 1024, random.uniform(0.05, 0.3), 0.5, random.uniform(0.6, 0.9), 1 - 1 / 512):
        for sign in (1.0, -1.0):
            _mean(answer, part, sign)
    x = torch.full((50, 40), 1.0 + 2.0**-8)
    a, b = _bf16(answer, x), _bf16(answer, x)
    core.require(
        not torch.equal(a, b), "two calls rounded 2000 numbers alike: draw new random numbers each time"
    )


def _bf16(answer, x):
    got = core.call(answer, x)
    if not isinstance(got, torch.Tensor) or got.dtype != torch.bfloat16 or got.shape != x.shape:
        raise core.Wrong(f"expected a bfloat16 tensor of shape {list(x.shape)}, got {core.kind(got)}")
    return got


def _neighbours(answer):
    size = 2.0 ** (torch.rand(61, 37) * 200 - 100)
    x = size * (torch.randint(0, 2, size.shape) * 2 - 1)
    near = x.bfloat16()
    edge = torch.where(near.float() > x, -math.inf, math.inf).bfloat16()
    other = torch.nextafter(near, edge)
    got = _bf16(answer, x)
    wrong = (got != near) & (got != other)
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        pair = sorted((near[at].item(), other[at].item()))
        raise core.Wrong(
            f"{x[at].item():.8g} was rounded to {got[at].item():.8g}; its neighbours in bfloat16 are "
            f"{pair[0]:.8g} and {pair[1]:.8g}"
        )
    exact = torch.cat([near.flatten().float(), torch.tensor([0.0, 1.0, -2.0, math.inf, -math.inf])])
    for _ in range(3):
        core.close(
            _bf16(answer, exact).float().nan_to_num(posinf=3e38, neginf=-3e38),
            exact.nan_to_num(posinf=3e38, neginf=-3e38),
            "numbers that bfloat16 holds exactly, infinities among them",
            rtol=0,
            atol=0,
        )
    nans = _bf16(answer, torch.tensor([1.0, math.nan, 2.0, -math.nan]))
    core.require(bool(nans[[1, 3]].isnan().all()), f"NaN was rounded to {nans[1].item()}; expected NaN")


def _mean(answer, part, sign):
    # `part` is how far x is on its way from one bfloat16, away from zero, to the next: both are powers of
    # two apart, so x and its distance are exact in float32.
    exponent = random.randrange(-20, 20)
    low = 2.0**exponent * (1 + random.randrange(126) / 128)
    step = 2.0 ** (exponent - 7)
    x = low + round(part * 2**16) / 2**16 * step
    p = (x - low) / step
    n = 200_000
    got = _bf16(answer, torch.full((400, n // 400), sign * x))
    away = int((got.double().abs() > x).sum())
    # The chance that a right answer is 7 standard deviations off is about one in 10^11.
    allowed = 7 * math.sqrt(n * p * (1 - p)) + 2
    core.require(
        abs(away - n * p) <= allowed,
        f"{sign * x:.9g} lies {p:.4f} of the way from {sign * low:g} to {sign * (low + step):g}: of {n:,} "
        f"roundings {n * p:,.0f} ± {allowed:,.0f} should go to the second, {away:,} did",
    )


# --- precision.5 ---------------------------------------------------------------------------


def _half_sum(x, chunk):
    "The same sum in NumPy: float64 within, rounded after each addition."
    import numpy as np

    def rounded(v):
        if x.dtype == torch.float16:
            return v.astype(np.float16).astype(np.float64)
        return torch.from_numpy(v).float().bfloat16().double().numpy()

    values, total = x.double().numpy(), np.zeros(x.shape[0], dtype=np.float32)
    for start in range(0, x.shape[1], chunk):
        running = np.zeros(x.shape[0])
        for column in values[:, start : start + chunk].T:
            running = rounded(running + column)
        total = (total + running.astype(np.float32)).astype(np.float32)
    return torch.from_numpy(total)


@core.exercise(
    "precision.5", "chunked sums equal NumPy's, rounding by rounding, for 14 pairs of length and chunk"
)
def chunked_sum(answer):
    lengths = ((300, 7), (300, 300), (300, 1), (257, 64), (40, 1000), (97, 2), (601, 31))
    for dtype in (torch.float16, torch.bfloat16):
        for n, chunk in lengths:
            rows = random.randrange(2, 6)
            # Of one sign, so that the running sum outgrows its terms; or of both, row by row.
            x = torch.rand(rows, n) * 4 if random.random() < 0.6 else torch.randn(rows, n)
            x[0] = torch.rand(n) + 0.5
            x = x.to(dtype)
            name = str(dtype).removeprefix("torch.")
            what = f"sums of {n} {name} numbers in chunks of {chunk}"
            got = core.call(answer, x, chunk)
            core.close(got, _half_sum(x, chunk), what, rtol=2e-6, atol=2e-6)
            core.require(got.dtype == torch.float32, f"{what}: expected float32, got {got.dtype}")


# --- precision.6 ---------------------------------------------------------------------------


@core.exercise(
    "precision.6", "the largest number lands on 448, errors are at most half a step, odd tensors come through"
)
def fp8(to_fp8, from_fp8):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for low, high in ((-3, 2), (-1, 1)) if dtype == torch.float16 else ((-12, 12), (-3, 3), (0, 8)):
            x = (torch.randn(random.randrange(2, 9), 5, 7) * 10 ** random.uniform(low, high)).to(dtype)
            x.view(-1)[random.randrange(x.numel())] *= 12  # one number far above the others
            _round_trip(to_fp8, from_fp8, x, f"a {str(dtype)[6:]} tensor of {list(x.shape)}")
    _round_trip(to_fp8, from_fp8, -torch.rand(4, 6) - 0.1, "a tensor of negative numbers")
    _round_trip(to_fp8, from_fp8, torch.tensor([random.uniform(1, 9)]), "a tensor of one number")
    _round_trip(to_fp8, from_fp8, torch.zeros(3, 5), "a tensor of zeros")
    odd = torch.randn(6, 5) * 10 ** random.uniform(-3, 3)
    odd[1, 2], odd[4, 0], odd[0, 3] = math.inf, -math.inf, math.nan
    _round_trip(to_fp8, from_fp8, odd, "a tensor with inf, -inf and NaN in it")
    _round_trip(to_fp8, from_fp8, torch.full((2, 3), math.nan), "a tensor of NaN")
    _round_trip(
        to_fp8, from_fp8, torch.tensor([3e-44, -1e-44, 0.0]), "a tensor of the smallest float32 numbers"
    )


def _round_trip(to_fp8, from_fp8, x, what):
    pair = core.call(to_fp8, x)
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        raise core.Wrong(f"{what}: expected to_fp8 to return (q, scale), got {core.kind(pair)}")
    q, scale = pair
    if not isinstance(q, torch.Tensor) or q.dtype != torch.float8_e4m3fn or q.shape != x.shape:
        raise core.Wrong(f"{what}: expected q in float8_e4m3fn, shape {list(x.shape)}, got {core.kind(q)}")
    value = core.number(scale, f"scale of {what}")
    finite = x.isfinite()
    exact = x.double().where(finite, torch.zeros((), dtype=torch.float64))
    amax = float(exact.abs().max())
    core.require(value > 0, f"scale of {what}: expected a number above 0, got {value:g}")
    if amax > 1e-30:
        core.close(value, amax / 448, f"scale of {what}: the largest finite size over 448", atol=0)
    numbers = q.float()
    lost = numbers.isnan() & finite
    core.require(not lost.any(), f"{what}: {int(lost.sum())} finite numbers became NaN")
    seen = numbers.isnan() | finite
    core.require(
        bool(seen.all()),
        f"{what}: an element that is not finite became {numbers[~seen].tolist()[:1]}; expected NaN, "
        "or nobody downstream will notice",
    )
    back = core.call(from_fp8, q, scale)
    if not isinstance(back, torch.Tensor) or back.dtype != torch.float32 or back.shape != x.shape:
        raise core.Wrong(
            f"{what}: expected from_fp8 to give float32 of shape {list(x.shape)}, got {core.kind(back)}"
        )
    if not finite.any():
        return
    # Three fraction bits: half a step is 2^-4 of the number, and 2^-10 of the scale among the subnormal.
    bound = torch.maximum(exact.abs() * 2.0**-4, torch.tensor(value * 2.0**-10, dtype=torch.float64))
    error = (back.double() - exact).abs().where(finite, torch.zeros((), dtype=torch.float64))
    if amax <= 1e-30:
        core.require(float(error.max()) <= amax, f"{what}: came back with {back.tolist()}")
        return
    off = error - bound * (1 + 1e-5)
    at = int(off.flatten().argmax())
    core.require(
        float(off.max()) <= 0 and not bool(back[finite].isnan().any()),
        f"{what}: {exact.flatten()[at]:.5g} came back as {back.flatten()[at]:.5g} at a scale of {value:.4g}; "
        f"expected it within {bound.flatten()[at]:.3g}",
    )
    _nearest_codes(numbers, exact, finite, value, what)


def _nearest_codes(numbers, exact, finite, scale, what):
    "Within the bound a number may still have gone to the farther neighbour."
    fmt = precision.FORMATS["e4m3"]
    line = torch.tensor(_line(fmt), dtype=torch.float64)
    wanted = (exact[finite].abs() / scale)[:, None]
    gap = (line - wanted).abs().amin(1)
    off = (numbers[finite].double().abs() - wanted[:, 0]).abs() - gap
    worst = int(off.argmax())
    core.require(
        float(off[worst]) <= 1e-4 * float(wanted[worst]) + 1e-9,
        f"{what}: {float(exact[finite][worst]):.5g} over its scale is {float(wanted[worst]):.5g}; expected "
        f"the nearest fp8 number, got {float(numbers[finite][worst]):.5g}",
    )

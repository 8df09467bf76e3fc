"""Fewer bits: number formats down to the bit, and what keeps training right in them.

Loss scaling, master weights, stochastic rounding, chunked sums and fp8 with a scale for each tensor.
"""

import math
from typing import NamedTuple

import torch

# --- Formats ------------------------------------------------------------------------


class Format(NamedTuple):
    """A binary floating-point format: one sign bit, `exponent` bits, `fraction` bits.

    With `inf`, the highest exponent is kept for infinities and NaN, as IEEE 754 does. Without, only the
    code of all ones is NaN, and the rest of the highest exponent holds ordinary numbers.
    """

    name: str
    exponent: int
    fraction: int
    inf: bool = True

    @property
    def bits(self):
        return 1 + self.exponent + self.fraction

    @property
    def lowest(self):
        "The exponent of the smallest normal number, and of all subnormal ones."
        return 2 - 2 ** (self.exponent - 1)

    @property
    def smallest(self):
        "The smallest positive number, a subnormal one."
        return 2.0 ** (self.lowest - self.fraction)

    @property
    def normal(self):
        "The smallest number with the full fraction."
        return 2.0**self.lowest

    @property
    def largest(self):
        "The largest finite number."
        top = 2 ** (self.exponent - 1) - 1
        if self.inf:
            return (2 - 2.0**-self.fraction) * 2.0**top
        return (2 - 2.0 ** (1 - self.fraction)) * 2.0 ** (top + 1)


FORMATS = {
    f.name: f
    for f in (
        Format("fp32", 8, 23),
        Format("tf32", 8, 10),
        Format("fp16", 5, 10),
        Format("bf16", 8, 7),
        Format("e5m2", 5, 2),
        Format("e4m3", 4, 3, inf=False),
    )
}
DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "e5m2": torch.float8_e5m2,
    "e4m3": torch.float8_e4m3fn,
}


def format_of(name):
    "The `Format` called `name`; ValueError, which lists the names, where there is none."
    if name not in FORMATS:
        raise ValueError(f"no format called {name!r}; choose from {', '.join(FORMATS)}")
    return FORMATS[name]


def encode(x, fmt):
    """The bits of the number `x` in `fmt`, as an int: the nearest number, of two equally near the even one.

    Past the largest number comes infinity, or NaN in a format that has none. NaN is all ones after the sign.
    """
    sign = (math.copysign(1.0, x) < 0) << (fmt.exponent + fmt.fraction)
    nan = 2 ** (fmt.exponent + fmt.fraction) - 1
    beyond = (2**fmt.exponent - 1) << fmt.fraction if fmt.inf else nan
    size = abs(x)
    if math.isnan(x):
        return nan
    if size == 0:
        return sign
    if math.isinf(x):
        return sign | beyond
    exponent = max(math.frexp(size)[1] - 1, fmt.lowest)
    steps = round(math.ldexp(size, fmt.fraction - exponent))  # Python rounds halves to the even integer
    # The leading 1 isn't stored: it adds one to the exponent's field, and so does a carry.
    return sign | min(((exponent - fmt.lowest) << fmt.fraction) + steps, beyond)


def decode(code, fmt):
    "The number that the bits `code` stand for in `fmt`, as a float."
    fraction = code & (2**fmt.fraction - 1)
    field = (code >> fmt.fraction) & (2**fmt.exponent - 1)
    sign = -1.0 if code >> (fmt.exponent + fmt.fraction) else 1.0
    if field == 2**fmt.exponent - 1:
        if fmt.inf:
            return math.nan if fraction else sign * math.inf
        if fraction == 2**fmt.fraction - 1:
            return math.nan
    if field == 0:
        return sign * fraction * fmt.smallest
    return sign * math.ldexp(2**fmt.fraction + fraction, field - 1 + fmt.lowest - fmt.fraction)


def rounded(x, name):
    """A float32 tensor's values rounded to the format called `name`, still in float32.

    fp8 is clamped to its largest number first, as fp8 code does: what torch's own cast does with a number
    past it has changed between versions.
    """
    fmt = format_of(name)
    if name == "fp32":
        return x
    if name == "tf32":  # torch has no such dtype: round the 13 lowest bits away, half to even
        bits = x.contiguous().view(torch.int32)
        near = (bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF
        return torch.where(x.isfinite(), near.view(torch.float32), x)
    if fmt.bits == 8:
        x = x.clamp(-fmt.largest, fmt.largest)
    return x.to(DTYPES[name]).float()


def explore(number=0.1, power=0):
    "How each format holds `number` times 2^power: its bits, the number stored, the relative error."
    wanted = math.ldexp(number, power)
    rows = []
    for fmt in FORMATS.values():
        code = encode(wanted, fmt)
        stored = decode(code, fmt)
        if not math.isfinite(stored):
            state = "overflow"
        elif stored == 0 and wanted:
            state = "underflow"
        else:
            state = "normal" if abs(stored) >= fmt.normal or not wanted else "subnormal"
        error = abs(stored - wanted) / abs(wanted) if wanted and math.isfinite(stored) else math.nan
        rows.append(
            {
                "name": fmt.name,
                "bits": format(code, f"0{fmt.bits}b"),
                "exponent": fmt.exponent,
                "stored": stored,
                "error": error,
                "state": state,
            }
        )
    return {"wanted": wanted, "number": number, "power": power, "rows": rows}


# --- Loss scaling -------------------------------------------------------------------


class Scaler:
    """A dynamic loss scale: backward sees the loss times `scale`, the optimizer gradients divided by it.

    A step with a gradient that isn't finite is left out, and the scale multiplied by `backoff`. After
    `interval` good steps in a row it is multiplied by `growth`. ValueError where the scale is no positive
    finite number; FloatingPointError after `patience` bad steps in a row, since then the scale is not the
    cause. Method: Micikevicius et al. 2017, with the rules of torch.amp.GradScaler.
    """

    def __init__(self, scale=2.0**16, growth=2.0, backoff=0.5, interval=2000, patience=100):
        if not (math.isfinite(scale) and scale > 0):
            raise ValueError(f"the loss scale is {scale}; expected a positive finite number, such as 65536")
        self.scale, self.growth, self.backoff, self.interval = float(scale), growth, backoff, interval
        self.patience, self.good, self.bad = patience, 0, 0

    def scale_loss(self, loss):
        "The loss to call `backward` on."
        return loss * self.scale

    @torch.no_grad()
    def step(self, optimizer, max_norm=None):
        """Unscale the gradients, clip them to `max_norm`, step, adapt the scale. True where a step was made.

        It waits for the device once: whether a step is made is decided in Python.
        """
        params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        for p in params:
            p.grad.div_(self.scale)
        finite = not params or bool(torch.stack([p.grad.isfinite().all() for p in params]).all())
        if not finite:
            self.good, self.bad = 0, self.bad + 1
            if self.bad >= self.patience:
                raise FloatingPointError(
                    f"{self.bad} steps in a row had gradients that are not finite, the last at a loss scale "
                    f"of {self.scale:.3g}: the scale is not the cause; look at the loss, the data and the "
                    "learning rate"
                )
            self.scale *= self.backoff
            return False
        if max_norm is not None:  # after unscaling: the limit is meant for the gradients as they are
            torch.nn.utils.clip_grad_norm_(params, max_norm)
        optimizer.step()
        self.good, self.bad = self.good + 1, 0
        if self.good == self.interval:
            self.good = 0
            if math.isfinite(self.scale * self.growth):
                self.scale *= self.growth
        return True


# --- Weights that remember small steps ----------------------------------------------


@torch.no_grad()
def master_step(low, master, grads, lr, decay=0.0):
    """One SGD step in place on the fp32 `master` weights, which are then rounded into the `low` ones.

    Three lists of tensors of the same shapes; `low` and `grads` in a 16-bit dtype, a gradient None where
    there is none. Weight decay is added to the gradient. Method: Micikevicius et al. 2017.
    """
    for p, m, g in zip(low, master, grads, strict=True):
        if g is None:
            continue
        m.sub_(lr * (g.float() + decay * m))
        p.copy_(m)


def stochastic_round(x, generator=None):
    """Round float32 to bfloat16, up or down at random, so that the mean is `x` itself.

    Each element goes to one of its two neighbours, the nearer the likelier; what bfloat16 holds exactly
    stays, and so do infinities and NaN. Method: Gupta et al. 2015.
    """
    bits = x.contiguous().view(torch.int32)
    noise = torch.randint(0, 2**16, x.shape, dtype=torch.int32, device=x.device, generator=generator)
    # A bfloat16 is the upper half of a float32. The lower half says how far x is on its way to the next
    # one, and a random number of 16 bits added to it carries over exactly that often.
    up = ((bits + noise) & -(2**16)).view(torch.float32)
    return torch.where(x.isfinite(), up, x).to(torch.bfloat16)


# --- Sums ---------------------------------------------------------------------------


def chunked_sum(x, chunk):
    """The sum of each row of `x` [rows, n], one element after the other, as float32 [rows].

    Within a chunk of `chunk` elements the running sum is kept in x's dtype; the chunks' sums are added in
    float32. Method: Wang et al. 2018.
    """
    total = torch.zeros(x.shape[0], dtype=torch.float32, device=x.device)
    for part in x.split(chunk, dim=1):
        running = torch.zeros(x.shape[0], dtype=x.dtype, device=x.device)
        for column in part.unbind(1):
            running = running + column
        total = total + running.float()
    return total


# --- fp8 with a scale for each tensor -----------------------------------------------

E4M3_MAX = FORMATS["e4m3"].largest


def to_fp8(x):
    """A tensor as (q, scale): float8_e4m3fn numbers q of x's shape, and one fp32 scale, with x ≈ q * scale.

    The scale puts the largest finite |x| at 448; it is 1 where every element is zero or none is finite, and
    never 0. An element that is not finite becomes NaN, so that it is still seen downstream. Method:
    Micikevicius et al. 2022.
    """
    x = x.detach().float()
    finite = x.isfinite()
    amax = torch.where(finite, x.abs(), 0.0).amax() if x.numel() else x.new_zeros(())
    scale = torch.where(amax > 0, (amax / E4M3_MAX).clamp(min=torch.finfo(torch.float32).tiny), 1.0)
    q = torch.where(finite, (x / scale).clamp(-E4M3_MAX, E4M3_MAX), math.nan)
    return q.to(torch.float8_e4m3fn), scale


def from_fp8(q, scale):
    "The float32 tensor that `to_fp8`'s (q, scale) stand for."
    return q.float() * scale

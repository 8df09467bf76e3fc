"""Operators that are captured as something else than themselves: with options, or made of others.

Each rule takes the proxy that was met first and the call's own arguments, and returns a proxy.
"""

import torch

from course_lib.fusion.capturing import CASTS, Proxy, _known
from course_lib.fusion.graph import CannotFuse


def _scaled(op):
    def rule(p, a, b, *, alpha=1):
        return p.op(op, a, b if alpha == 1 else p.op("mul", b, alpha))

    return rule


def _div(p, a, b, *, rounding_mode=None):
    if rounding_mode is not None:
        raise CannotFuse(f"the fuser doesn't know div with rounding_mode={rounding_mode!r}: divide outside")
    return p.op("div", a, b)


def _rsub(p, a, b, *, alpha=1):
    return p.op("sub", b, a if alpha == 1 else p.op("mul", a, alpha))


def _clamp(p, x, min=None, max=None):
    for op, bound in (("clamp_min", min), ("clamp_max", max)):
        if isinstance(bound, Proxy):
            op = {"clamp_min": "maximum", "clamp_max": "minimum"}[op]
        if bound is not None:
            x = p.op(op, x, bound)
    return x


def _hardtanh(p, x, min_val=-1.0, max_val=1.0):
    return _clamp(p, x, min_val, max_val)


def _where(p, condition, a, b):
    if not (isinstance(condition, Proxy) and condition.dtype == torch.bool):
        raise CannotFuse(
            "where takes a bool tensor as its condition: compare first, torch.where(x > 0, a, b)"
        )
    return p.op("where", condition, a, b)


def _masked_fill(p, x, mask, value):
    filled = _where(p, mask, value, x)
    if filled.dtype != x.dtype:
        raise CannotFuse(f"masked_fill of a {x.dtype} tensor with {value!r}: convert first")
    # torch lays its result out as masked_fill's, not as where's.
    filled.node.like = filled.node.like.new_empty(filled.shape)
    return filled


def _gelu(p, x, *, approximate="none"):
    return p.op("gelu" if approximate == "none" else "gelu_tanh", x)


def _leaky_relu(p, x, negative_slope=0.01):
    return p.op("leaky_relu", x, negative_slope)


def _addcmul(p, x, a, b, *, value=1):
    product = p.op("mul", a, b)
    return p.op("add", x, product if value == 1 else p.op("mul", product, value))


def _addcdiv(p, x, a, b, *, value=1):
    quotient = p.op("div", a if value == 1 else p.op("mul", a, value), b)
    return p.op("add", x, quotient)


def _lerp(p, x, end, weight):
    return p.op("add", x, p.op("mul", p.op("sub", end, x), weight))


def _to(p, x, *args, dtype=None, device=None, non_blocking=False, copy=False, memory_format=None):
    for a in args:
        if isinstance(a, torch.dtype):
            dtype = a
        elif isinstance(a, Proxy):
            dtype = a.dtype
        else:
            device = a
    if device is not None and torch.device(device).type != x.device.type:
        raise CannotFuse("the fuser doesn't know copies to another device: copy outside the fused function")
    if dtype in (None, x.dtype):
        return p.op("clone", x) if copy else x
    return p.op("to", x, _known(dtype))


def _type(p, x, dtype=None):
    if not isinstance(dtype, torch.dtype):
        raise CannotFuse(f"the fuser doesn't know type({dtype!r}): write x.to(torch.float32)")
    return _to(p, x, dtype)


def _cast(dtype):
    return lambda p, x: _to(p, x, dtype)


def _full_like(p, x, fill_value, *, dtype=None):
    if isinstance(fill_value, Proxy):
        raise CannotFuse("the fuser fills with numbers only: write x.copy_(value)")
    like = torch.full_like(x.node.like, fill_value, dtype=_known(dtype or x.dtype))
    return x.value("full", fill_value, like=like)


def _filled(value):
    return lambda p, x, *, dtype=None: _full_like(p, x, value, dtype=dtype)


def _same(p, x):
    return x


def _contiguous(p, x):
    if not x.node.like.is_contiguous():
        raise CannotFuse("the fuser doesn't copy to another layout: call contiguous() outside")
    return x


def _copy(p, x, source, non_blocking=False):
    if not isinstance(source, Proxy):
        return _full_like(p, x, source)
    if source.shape == x.shape:
        return source
    try:
        like = source.node.like.expand(x.shape)
    except RuntimeError:
        raise CannotFuse(
            f"copy_ of shape {list(source.shape)} into {list(x.shape)}: they don't broadcast"
        ) from None
    return source.value("spread", source.node, like=like)


RULES = {
    "add": _scaled("add"), "sub": _scaled("sub"), "rsub": _rsub, "div": _div, "clamp": _clamp,
    "hardtanh": _hardtanh, "relu6": lambda p, x: _clamp(p, x, 0.0, 6.0), "where": _where,
    "masked_fill": _masked_fill, "gelu": _gelu, "leaky_relu": _leaky_relu,
    "addcmul": _addcmul, "addcdiv": _addcdiv, "lerp": _lerp,
    "to": _to, "type": _type, "type_as": lambda p, x, other: _to(p, x, other.dtype),
    "full_like": _full_like, "zeros_like": _filled(0), "ones_like": _filled(1),
    "fill": lambda p, x, value: _full_like(p, x, value),
    "detach": _same, "contiguous": _contiguous, "pos": _same, "copy": _copy,
    "clone": lambda p, x, *, memory_format=None: p.op("clone", x),
    **{name: _cast(dtype) for name, dtype in CASTS.items()},
}  # fmt: skip

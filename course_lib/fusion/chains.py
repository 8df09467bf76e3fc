"Named point-wise chains as people write them: {name: (function, kinds of its arguments)}."

import torch
from torch.nn import functional as F

COLUMNS = 4096


def gelu(x):
    "GELU by hand, in the form with tanh."
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * x * x * x)))


def silu_mul(gate, up):
    return F.silu(gate) * up


def layer_scale(x, y, gamma):
    return x + gamma * y


def bias_relu(x, bias):
    return torch.relu(x + bias)


def adam(p, g, m, v):
    "One step of Adam, in place; the fourth tensor's sign is dropped, so that any input has a square root."
    m.mul_(0.9).add_(g, alpha=0.1)
    v.abs_().mul_(0.999).addcmul_(g, g, value=0.001)
    p.sub_(1e-3 * m / (v.sqrt() + 1e-8))
    return p


def clamp_where(x, y):
    return torch.where(x > y, x.clamp(-1.0, 1.0), 0.1 * y - x)


def mixed(x, w, y):
    "bfloat16 in and out, float32 between."
    return (x.float() * w + y.float()).to(torch.bfloat16)


def polynomial(x):
    "Horner's rule, degree 8."
    y = torch.full_like(x, 0.125)
    for c in (-0.5, 0.25, 1.5, -1.0, 0.75, 2.0, -0.25, 1.0):
        y = y * x + c
    return y


def row_scale(x, scale, zero):
    "Dequantisation by rows."
    return ((x.float() - zero) * scale).to(torch.bfloat16)


def tanh_gate(a, b):
    return torch.tanh(a) * torch.sigmoid(b)


def two_results(x, y):
    s, d = x + y, x - y
    return s * torch.sigmoid(d), d * d + torch.exp(-s.abs())


# f and h: float32 and bfloat16 matrices; b: a bfloat16 row; c: a float32 column.
CHAINS = {
    "gelu by hand": (gelu, "f"),
    "silu times up": (silu_mul, "hh"),
    "layer scale + residual": (layer_scale, "hhb"),
    "bias + relu": (bias_relu, "hb"),
    "Adam step": (adam, "ffff"),
    "clamp and where": (clamp_where, "ff"),
    "mixed precision": (mixed, "hfh"),
    "polynomial": (polynomial, "f"),
    "scale by rows": (row_scale, "hcc"),
    "tanh gate": (tanh_gate, "hh"),
    "two results": (two_results, "ff"),
}


def inputs(kinds, n, device):
    "A tuple of gaussian tensors of these kinds, matrices of about n elements."
    rows, columns = max(1, n // COLUMNS), min(n, COLUMNS)
    shapes = {"b": (columns,), "c": (rows, 1)}
    dtypes = {"h": torch.bfloat16, "b": torch.bfloat16}
    return tuple(torch.randn(shapes.get(k, (rows, columns)), device=device).to(dtypes.get(k, torch.float32))
                 for k in kinds)  # fmt: skip

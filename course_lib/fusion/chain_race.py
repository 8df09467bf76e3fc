"Named point-wise chains, and the race between eager, torch.compile and the course's fuser on them."

from typing import NamedTuple

import torch
from torch.nn import functional as F

from course_lib import timing

COLUMNS = 4096


class Chain(NamedTuple):
    "A point-wise function, and its arguments for about n elements: `inputs(n, device)`."

    name: str
    fn: object
    inputs: object


class Row(NamedTuple):
    "One chain in the race: bytes that one kernel must move, and seconds of each way (medians)."

    name: str
    bytes: int
    eager: float
    compiled: float
    fused: float

    @property
    def vs_compile(self):
        "Bandwidth of ours over torch.compile's."
        return self.compiled / self.fused

    @property
    def vs_eager(self):
        return self.eager / self.fused


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
    "One step of Adam, in place."
    m.mul_(0.9).add_(g, alpha=0.1)
    v.mul_(0.999).addcmul_(g, g, value=0.001)
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


def gate(a, b):
    return torch.tanh(a) * torch.sigmoid(b)


def several(x, y):
    "Two results of shared parts."
    s, d = x + y, x - y
    return s * torch.sigmoid(d), d * d + torch.exp(-s.abs())


def _made(*kinds):
    "Arguments of these kinds: 'f' and 'h' float32 and bfloat16 matrices, 'r' and 'c' float32 row and column."

    def inputs(n, device):
        rows, columns = max(1, n // COLUMNS), min(n, COLUMNS)
        shape = {"r": (columns,), "b": (columns,), "c": (rows, 1)}
        dtype = {"h": torch.bfloat16, "b": torch.bfloat16}
        return [torch.randn(shape.get(k, (rows, columns)), device=device).to(dtype.get(k, torch.float32))
                for k in kinds]  # fmt: skip

    return inputs


def _adam_inputs(n, device):
    p, g, m, v = _made("f", "f", "f", "f")(n, device)
    return [p, g, m, v.abs_()]


def chains():
    "Point-wise chains of different kinds, as `Chain`s by name."
    found = [
        Chain("gelu by hand", gelu, _made("f")),
        Chain("silu times up", silu_mul, _made("h", "h")),
        Chain("layer scale + residual", layer_scale, _made("h", "h", "b")),
        Chain("bias + relu", bias_relu, _made("h", "b")),
        Chain("Adam step", adam, _adam_inputs),
        Chain("clamp and where", clamp_where, _made("f", "f")),
        Chain("mixed precision", mixed, _made("h", "f", "h")),
        Chain("polynomial", polynomial, _made("f")),
        Chain("scale by rows", row_scale, _made("h", "c", "c")),
        Chain("tanh gate", gate, _made("h", "h")),
        Chain("two results", several, _made("f", "f")),
    ]
    return {c.name: c for c in found}


def race(chosen=None, n=None, device=None, seconds=0.3):
    """Time each chain as eager, under torch.compile and fused here, in one run: a list of `Row`.

    `chosen` are `Chain`s, by default all; `n` is about how many elements each tensor has, by default 64 Mi on
    a GPU, and 16 Ki where the kernels are interpreted. The results are compared first, and torch.compile is
    told to raise where it can't make one graph of a chain. Dynamo is reset before each chain, or its
    recompile limit would leave the last ones eager.
    """
    import torch._dynamo

    from course_lib import fusion, machine

    device = torch.device(device or machine.device())
    n = n or (1 << 26 if device.type == "cuda" else 1 << 14)
    rows = []
    chosen = chosen.values() if isinstance(chosen, dict) else chosen
    for chain in chosen or chains().values():
        args = chain.inputs(n, device)
        torch._dynamo.reset()
        compiled, fused = torch.compile(chain.fn, fullgraph=True, dynamic=False), fusion.fuse(chain.fn)
        with torch.no_grad():
            _compare(chain, args, compiled, fused)
            took = [timing.time(f, *args, seconds=seconds).median for f in (chain.fn, compiled, fused)]
        rows.append(Row(chain.name, fused.cost(*args).bytes, *took))
        del args
    torch._dynamo.reset()
    return rows


def _compare(chain, args, compiled, fused):
    "The three ways must agree before one is called faster."
    results = []
    for f in (chain.fn, compiled, fused):
        given = [a.clone() for a in args]
        out = f(*given)
        results.append([*(out if isinstance(out, tuple) else [out]), *given])
    for way, got in zip(("torch.compile", "fuse"), results[1:], strict=True):
        for a, b in zip(results[0], got, strict=True):
            half = a.dtype in (torch.float16, torch.bfloat16)
            near = torch.isclose(
                a.float(), b.float(), rtol=2e-2 if half else 1e-4, atol=3e-2 if half else 1e-5
            )
            if not near.all():
                raise AssertionError(
                    f"{way} disagrees with eager on {chain.name}, in {int((~near).sum())} elements"
                )

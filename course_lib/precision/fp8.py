"""Linear layers in fp8, a scale for each tensor: on the GPU's fp8 units, or emulated by rounding."""

import math

import torch
from torch import nn

from course_lib import machine, timing


def has_fp8(device=None):
    "Does this device multiply fp8? On NVIDIA, compute capability 8.9 (Ada, Hopper) and later do."
    device = torch.device(device or machine.device())
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def quantise(x, dtype):
    """x in fp8 with one scale, in fewer passes than `precision.to_fp8`: (q, scale) with x ≈ q * scale.

    The scale is a power of two, so dividing by it in bf16 is exact. An element that isn't finite makes
    everything NaN.
    """
    amax = torch.linalg.vector_norm(x.detach(), math.inf).float().clamp(min=1e-12)
    scale = torch.exp2(torch.ceil(torch.log2(amax / torch.finfo(dtype).max)))
    return (x.detach() / scale).to(dtype), scale


def _turned(q):
    "The transpose of an fp8 matrix, laid out afresh: fp8 units read both operands along the summed axis."
    return q.view(torch.uint8).t().contiguous().view(q.dtype)


def _product(a, b, native):
    "bf16 a [m, k] @ b [n, k].T of two (q, scale) pairs."
    (p, s), (q, t) = a, b
    if native:
        return torch._scaled_mm(p, q.t(), scale_a=s, scale_b=t, out_dtype=torch.bfloat16)
    return ((p.float() * s) @ (q.float() * t).t()).bfloat16()


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, native):
        x8, w8 = quantise(x.bfloat16(), torch.float8_e4m3fn), quantise(w.bfloat16(), torch.float8_e4m3fn)
        ctx.save_for_backward(*x8, *w8)
        ctx.native = native
        return _product(x8, w8, native)

    @staticmethod
    def backward(ctx, grad):
        x, x_scale, w, w_scale = ctx.saved_tensors
        # Gradients spread over more powers of two than weights: the format with five exponent bits.
        g, g_scale = quantise(grad.bfloat16().contiguous(), torch.float8_e5m2)
        dx = _product((g, g_scale), (_turned(w), w_scale), ctx.native)
        dw = _product((_turned(g), g_scale), (_turned(x), x_scale), ctx.native)
        return dx, dw.float(), None


class Fp8Linear(nn.Linear):
    "A linear layer whose three products, one forward and two backward, multiply fp8 and sum in fp32."

    native = False

    def forward(self, x):
        with torch.autocast(x.device.type, enabled=False):
            rows = x.reshape(-1, x.shape[-1])
            y = _Fp8Linear.apply(rows.bfloat16(), self.weight, self.native)
            return (y + self.bias.bfloat16()).view(*x.shape[:-1], -1)


def to_fp8_layers(net, device):
    "Turn the linear layers inside the net's transformer layers into `Fp8Linear`; the weights are kept."
    for layer in net.layers:
        for child in layer.children():
            if type(child) is nn.Linear:
                child.__class__ = Fp8Linear  # same weights, same names, another forward
                child.native = has_fp8(device)


def parts(rows, width, device=None):
    """Seconds of one product [rows, width] @ [width, width] in bf16 and in fp8, and of the casts around it.

    {"bf16 matmul", "fp8 matmul", "casts of both operands"}; only where `has_fp8`.
    """
    device = torch.device(device or machine.device())
    if not has_fp8(device):
        raise ValueError(
            f"{device} has no fp8 units: compute capability 8.9 (Ada, Hopper) or later is needed"
        )
    x, w = (torch.randn(n, width, device=device).bfloat16() for n in (rows, width))
    x8, w8 = quantise(x, torch.float8_e4m3fn), quantise(w, torch.float8_e4m3fn)

    def casts():
        quantise(x, torch.float8_e4m3fn)
        quantise(w, torch.float8_e4m3fn)

    return {
        "bf16 matmul": timing.time(lambda: x @ w.t()).median,
        "fp8 matmul": timing.time(lambda: _product(x8, w8, True)).median,
        "casts of both operands": timing.time(casts).median,
    }

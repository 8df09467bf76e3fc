"""What bit-for-bit costs on a GPU: operators with and without deterministic algorithms.

A GPU adds with atomics where many threads meet at one address: each addition is whole, their order is
free. `torch.use_deterministic_algorithms(True)` takes another algorithm, or raises where there is none.
"""

import os
from typing import NamedTuple

import torch
from torch.nn import functional as F

from course_lib import machine, timing


class Price(NamedTuple):
    "An operator: its different answers in ten runs, seconds by default, and deterministic (None: it raises)."

    name: str
    answers: int
    seconds: float
    deterministic: float | None

    @property
    def ratio(self):
        return None if self.deterministic is None else self.deterministic / self.seconds


def answers(fn, times=10):
    "How many different results, to the last bit, `times` calls of `fn` give. Compared on the device."
    seen = []
    for _ in range(times):
        out = fn()
        out = out if isinstance(out, list | tuple) else [out]
        # As integers: a NaN equals itself there. Cloned: `fn` may write into the same memory again.
        bits = [t.detach().contiguous().reshape(-1).view(torch.uint8).clone() for t in out]
        if not any(all(torch.equal(a, b) for a, b in zip(bits, old, strict=True)) for old in seen):
            seen.append(bits)
    return len(seen)


def operators(small=False):
    """{name: make}: `make()` returns a function of no arguments that runs the operator once.

    Backward operators are timed alone: `make` runs the forward. `small` is for a CPU.
    """
    dev = machine.device()
    s = 64 if small else 1
    generator = torch.Generator(device=dev).manual_seed(0)

    def randn(*shape, grad=False):
        return torch.randn(*shape, device=dev, generator=generator).requires_grad_(grad)

    def randint(high, *shape):
        return torch.randint(high, shape, device=dev, generator=generator)

    def backward(fn, *inputs):
        out = fn(*inputs)
        ones = torch.ones_like(out)
        return lambda: torch.autograd.grad(out, inputs, ones, retain_graph=True)

    rows, width = 262_144 // s, 64

    def index_add():
        into, at, x = torch.zeros(1000, width, device=dev), randint(1000, rows), randn(rows, width)
        return lambda: into.zero_().index_add_(0, at, x)

    def scatter_add():
        into, at, x = torch.zeros(1000, width, device=dev), randint(1000, rows, width), randn(rows, width)
        return lambda: into.zero_().scatter_add_(0, at, x)

    def index_put():
        into, at, x = torch.zeros(1000, width, device=dev), randint(1000, rows), randn(rows, width)
        return lambda: into.zero_().index_put_((at,), x, accumulate=True)

    def gather_backward():
        at = randint(1000, rows, width)
        return backward(lambda x: x.gather(0, at), randn(1000, width, grad=True))

    def embedding_backward():
        at = randint(32_000 // s, 65_536 // s)
        return backward(lambda w: F.embedding(at, w), randn(32_000 // s, 512, grad=True))

    def cumsum():
        x = randn((1 << 24) // s)
        return lambda: x.cumsum(0)

    def convolution_backward():
        x, w = randn(max(1, 64 // s), 64, 56, 56, grad=True), randn(64, 64, 3, 3, grad=True)
        return backward(lambda x, w: F.conv2d(x, w, padding=1), x, w)

    def images(grad=True):
        return randn(max(1, 32 // s), 64, 56, 56, grad=grad)

    def bilinear_backward():
        return backward(
            lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False), images()
        )

    def adaptive_pool_backward():
        return backward(lambda x: F.adaptive_avg_pool2d(x, 7), images())

    def reflection_pad_backward():
        return backward(lambda x: F.pad(x, (3, 3, 3, 3), mode="reflect"), images())

    def grid_sample_backward():
        x = images()
        grid = torch.rand(len(x), 56, 56, 2, device=dev, generator=generator) * 2 - 1
        return backward(lambda x: F.grid_sample(x, grid, align_corners=False), x)

    def cross_entropy_images():
        logits, labels = images(grad=False), randint(64, max(1, 32 // s), 56, 56)
        return lambda: F.cross_entropy(logits, labels)

    def bincount_weights():
        at, w = randint(1000, (1 << 22) // s), torch.rand((1 << 22) // s, device=dev, generator=generator)
        return lambda: torch.bincount(at, weights=w, minlength=1000)

    def attention_backward():
        q, k, v = (
            randn(max(1, 4 // s), 16, 2048 // min(s, 16), 64).to(torch.bfloat16).requires_grad_()
            for _ in range(3)
        )
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            return backward(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), q, k, v)

    def matmul():
        a, b = (randn(4096 // s, 4096 // s).to(torch.bfloat16) for _ in range(2))
        return lambda: a @ b

    def layer_norm_backward():
        x, w, b = randn(16_384 // s, 1024, grad=True), randn(1024, grad=True), randn(1024, grad=True)
        return backward(lambda x, w, b: F.layer_norm(x, (1024,), w, b), x, w, b)

    def sum_():
        x = randn((1 << 24) // s)
        return lambda: x.sum()

    makers = (
        index_add,
        scatter_add,
        index_put,
        gather_backward,
        embedding_backward,
        cumsum,
        convolution_backward,
        attention_backward,
        bilinear_backward,
        adaptive_pool_backward,
        reflection_pad_backward,
        grid_sample_backward,
        cross_entropy_images,
        bincount_weights,
        matmul,
        layer_norm_backward,
        sum_,
    )
    return {m.__name__.rstrip("_"): m for m in makers}


def prices(seconds=0.12, small=False):
    """Measure every operator of `operators` with and without deterministic algorithms: a list of `Price`.

    Each timing takes about `seconds`; about ten seconds in all on a GPU. Deterministic mode is measured as
    it comes, with its filling of uninitialised memory. ValueError where cuBLAS was not told in time.
    """
    if machine.has_gpu() and os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in (":4096:8", ":16:8"):
        raise ValueError(
            "CUBLAS_WORKSPACE_CONFIG is not set: set it to ':4096:8' before the first matmul of the process, "
            "since cuBLAS reads it once"
        )
    before = torch.are_deterministic_algorithms_enabled()
    found = []
    try:
        for name, make in operators(small).items():
            torch.use_deterministic_algorithms(False)
            fn = make()
            different, plain = answers(fn), timing.time(fn, seconds=seconds).median
            torch.use_deterministic_algorithms(True)
            try:
                # Made anew: some operators choose their algorithm in the forward.
                price = timing.time(make(), seconds=seconds).median
            except RuntimeError as e:
                if "determinis" not in str(e):
                    raise
                price = None
            found.append(Price(name, different, plain, price))
    finally:
        torch.use_deterministic_algorithms(before)
    return found

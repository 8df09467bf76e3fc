"""The timings of lesson triton, on a GPU: the course's kernels beside eager, torch.compile and cuBLAS.

Rates of kernels bound by memory are the bytes of the floor over the time: each input read once, each output
written once. What a kernel moves beyond that makes it slower, and its rate lower. All contenders of one
comparison are timed in turn, from CUDA graphs: see `kernels.replay`.
"""

import functools
import itertools
import re

import torch
from torch.nn import functional as F

from course_lib import meter

SECONDS = 0.15
# The ten shapes (m, n, k) of the comparison with cuBLAS: square, flat and deep ones; five of them ragged.
SHAPES = [
    (8192, 8192, 8192),
    (4096, 4096, 4096),
    (16384, 4096, 1024),
    (2048, 8192, 4096),
    (1024, 1024, 16384),
    (8000, 8200, 8192),
    (4095, 4097, 4093),
    (5000, 3000, 7000),
    (2050, 6146, 4100),
    (16385, 1000, 4096),
]


def _rates(contenders, make, work):
    "{label: 10^12 units of `work` a second} of functions of the inputs that `make` gives."
    from course_lib.kernels import replay

    times = replay.time_all(contenders, make, seconds=SECONDS)
    return {label: work / t.median / 1e12 for label, t in times.items()}


def _compiled(fn):
    # Else the recompile limit leaves the last of many variants eager, and says nothing.
    torch._dynamo.reset()
    return torch.compile(fn)


def _matrix(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def softmax_versions(three_passes, rows=16384, columns=4096):
    "TB/s by version of the softmax kernel: three passes, one pass by number of warps, the autotuned one."
    from course_lib.kernels import softmax

    versions = {"three passes": three_passes, "one pass": functools.partial(_softmax, num_warps=4)}
    versions |= {f"+ {w} warps": functools.partial(_softmax, num_warps=w) for w in (2, 8, 16, 32)}
    versions |= {"the library's choice": softmax.softmax}
    nbytes = softmax.bytes_moved(rows, columns, torch.bfloat16)
    return _rates(versions, lambda: (_matrix(rows, columns),), nbytes)


def _softmax(x, num_warps):
    "The one-pass kernel without its autotuner."
    import triton

    from course_lib.kernels import softmax

    (rows, columns), out = x.shape, torch.empty_like(x)
    block = triton.next_power_of_2(columns)
    kernel = softmax.softmax_kernel.fn[(rows,)]
    kernel(x, out, rows, columns, x.stride(0), BLOCK=block, num_warps=num_warps)
    return out


def softmax_rates(rows=16384, columns=4096):
    "TB/s of a softmax: eager, torch.compile, Triton."
    from course_lib.kernels import softmax

    def eager(x):
        return torch.softmax(x, -1)

    contenders = {"eager": eager, "compile": _compiled(eager), "Triton": softmax.softmax}
    nbytes = softmax.bytes_moved(rows, columns, torch.bfloat16)
    return _rates(contenders, lambda: (_matrix(rows, columns),), nbytes)


def compiled_source(fn, shape):
    "The Triton kernel that torch.compile writes for `fn` of a bf16 matrix, as text."
    import warnings

    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code

    with warnings.catch_warnings(), config.patch(force_disable_caches=True):  # a cached kernel is not written
        warnings.simplefilter("ignore")  # of that choice
        _, codes = run_and_get_code(_compiled(fn), _matrix(*shape))
    return kernel_in("\n".join(codes))


def kernel_in(code):
    "The first Triton kernel in the code that Inductor wrote; all of it where there is none."
    found = re.search(r"^def triton_\w+\(.*?(?=^\'\'\')", code, re.DOTALL | re.MULTILINE)
    return found[0].rstrip() if found else code


def rmsnorm_rates(rows=16384, columns=4096):
    "TB/s of RMSNorm as (forward, backward), each with eager, compile and Triton."
    from torch._functorch import config as functorch_config

    from course_lib.kernels import replay, rmsnorm

    def norm(x, weight):
        return F.rms_norm(x, (columns,), weight, 1e-6)

    def through_autograd(fn):
        def prepare(x, weight, dy):
            leaves = [t.detach().requires_grad_() for t in (x, weight)]
            y = fn(*leaves)
            return lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True)

        return replay.Prepared(prepare)

    def by_kernel(x, weight, dy):
        _, rstd = rmsnorm.forward(x, weight)
        return lambda: rmsnorm.backward(dy, x, weight, rstd)

    contenders = {"eager": norm, "compile": _compiled(norm), "Triton": rmsnorm.forward}
    nbytes = rmsnorm.bytes_moved(rows, columns, torch.bfloat16)
    with torch.no_grad():
        forward = _rates(contenders, lambda: (_matrix(rows, columns), _matrix(columns)), nbytes)

    donated = functorch_config.donated_buffer
    functorch_config.donated_buffer = False  # a backward pass that is repeated may not give its buffers away
    try:
        contenders = {
            "eager": through_autograd(norm),
            "compile": through_autograd(_compiled(norm)),
            "Triton": replay.Prepared(by_kernel),
        }
        nbytes = rmsnorm.bytes_moved(rows, columns, torch.bfloat16, backward=True)
        inputs = lambda: (_matrix(rows, columns), _matrix(columns), _matrix(rows, columns))  # noqa: E731
        backward = _rates(contenders, inputs, nbytes)
    finally:
        functorch_config.donated_buffer = donated
    return forward, backward


def group_rates(n=8192, groups=(1, 2, 4, 8, 16)):
    "TFLOP/s of the matmul kernel by rows of tiles in a group."
    from course_lib.kernels import matmul

    tile = {"BM": 128, "BN": 256, "BK": 64, "num_warps": 8, "num_stages": 3}
    contenders = {g: functools.partial(matmul.matmul, **tile, GROUP=g) for g in groups}
    return _rates(contenders, lambda: (_matrix(n, n), _matrix(n, n)), matmul.flops(n, n, n))


def search(n=4096):
    "{(BM, BN, warps): seconds} of the matmul kernel by tile and warps; None where it doesn't run."
    import triton

    from course_lib.kernels import matmul, replay

    a, b = (_matrix(n, n) for _ in range(2))
    found = {}
    for bm, bn, warps in itertools.product((64, 128, 256), (64, 128, 256), (4, 8)):
        tile = {"BM": bm, "BN": bn, "BK": 64, "GROUP": 8, "num_warps": warps, "num_stages": 3}
        try:
            took = replay.time_all({"": functools.partial(matmul.matmul, a, b, **tile)}, seconds=0.03)
        except triton.runtime.errors.OutOfResources:
            found[bm, bn, warps] = None
        else:
            found[bm, bn, warps] = took[""].median
    return found


def matmul_rates(shapes=None):
    "[(shape, TFLOP/s of cuBLAS, TFLOP/s of Triton)] on gaussian bf16 matrices."
    from course_lib.kernels import matmul

    rows = []
    for m, n, k in shapes or SHAPES:
        make = functools.partial(lambda m, n, k: (_matrix(m, k), _matrix(k, n)), m, n, k)
        rates = _rates({"cuBLAS": torch.mm, "Triton": matmul.matmul}, make, matmul.flops(m, n, k))
        rows.append(((m, n, k), rates["cuBLAS"], rates["Triton"]))
    return rows


def loss_memory(tokens=8192, classes=128_256):
    "Peak bytes of a cross-entropy and its gradient, bf16 logits included: (eager, Triton, logits alone)."
    from course_lib.kernels import xent

    target = torch.randint(classes, (tokens,), device="cuda")

    def peak(loss_of):
        base = _matrix(tokens, classes).requires_grad_()
        logits = base.view_as(base)  # no leaf, as in a model: the gradient may take its place
        extra = meter.peak_memory(lambda: torch.autograd.grad(loss_of(logits), logits), device="cuda")
        return extra + logits.nbytes

    eager = peak(lambda logits: F.cross_entropy(logits.float(), target))
    fused = peak(lambda logits: xent.cross_entropy(logits, target))
    return eager, fused, 2 * tokens * classes

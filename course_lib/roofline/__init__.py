"""Where the time goes: costs of operators, the roofs they meet, training FLOPs, MFU, and honest timing.

Units are FLOPs, bytes and seconds unless a name says otherwise. One multiply and one add are two FLOPs.
"""

import contextlib
import functools
import itertools
import math
import statistics
import time
from typing import NamedTuple

import torch

from course_lib import machine, timing

# --- What an operator costs, and which roof it meets --------------------------------


def cost(op, x, w, itemsize):
    """FLOPs and bytes of one operator, as (flops, bytes): each input read once, the output written once.

    `op` is "matmul" (x [..., m, k] @ w [k, n]), "bmm" (x [b, m, k] @ w [b, k, n]), "add" (x + w, w
    broadcast), "sum" (x.sum(-1)) or "copy"; `x` and `w` are shapes (w None where there is one input);
    `itemsize` is bytes for one element.
    """
    n_x, n_w = math.prod(x), math.prod(w) if w else 0
    if op in ("matmul", "bmm"):
        out = n_x // x[-1] * w[-1]
        flops = 2 * out * x[-1]
    elif op == "sum":
        out, flops = n_x // x[-1], n_x
    else:
        out, flops = n_x, n_x if op == "add" else 0
    return flops, itemsize * (n_x + n_w + out)


class Roof(NamedTuple):
    "What the two roofs allow an operator: FLOPs per byte, FLOP/s, seconds, and which roof binds."

    intensity: float
    rate: float
    seconds: float
    bound: str


def roof(flops, nbytes, peak_flops, peak_bytes):
    """The `Roof` of an operator on a machine of `peak_flops` FLOP/s and `peak_bytes` bytes/s.

    Source: Williams, Waterman, Patterson, "Roofline", CACM 2009.
    """
    intensity = flops / nbytes
    seconds = max(flops / peak_flops, nbytes / peak_bytes)
    bound = "compute" if flops / peak_flops >= nbytes / peak_bytes else "memory"
    return Roof(intensity, min(peak_flops, intensity * peak_bytes), seconds, bound)


class Op(NamedTuple):
    "A real operator ready to run: `fn(*args)`, with its shapes and its cost."

    name: str
    fn: object
    args: tuple
    flops: int
    bytes: int


def operators():
    "Six operators of different intensity, at sizes that suit this machine, the last one tiny."
    dtype = machine.pick(cpu=torch.float32, gpu=torch.bfloat16)
    n, rows, batch = machine.pick(cpu=(1024, 4096, 64), gpu=(8192, 32768, 1024))
    wide = 4096

    def op(name, kind, fn, x, w, out):
        shapes = [s for s in (x, w) if s]
        args = tuple(torch.randn(*s, device=machine.device()).to(dtype) for s in shapes)
        result = torch.empty(*out, device=machine.device(), dtype=dtype)
        # The output is allocated beforehand: the first touch of fresh memory would cost a CPU a page fault.
        return Op(name, functools.partial(fn, out=result), args, *cost(kind, x, w, dtype.itemsize))

    return [
        op("matmul", "matmul", torch.mm, (n, n), (n, n), (n, n)),
        op("attention scores", "bmm", torch.bmm, (batch, 512, 64), (batch, 64, 512), (batch, 512, 512)),
        op("matrix × one row", "matmul", torch.mm, (1, wide), (wide, 2 * wide), (1, 2 * wide)),
        op("sum of rows", "sum", lambda x, out: torch.sum(x, -1, out=out), (rows, wide), None, (rows,)),
        op("bias add", "add", torch.add, (rows, wide), (wide,), (rows, wide)),
        op("tiny add", "add", torch.add, (16,), (16,), (16,)),
    ]


def matmul_sweep(sizes, seconds=0.15):
    "Measured FLOP/s of square matmuls, gaussian operands: [(n, rate), …]."
    dtype = machine.pick(cpu=torch.float32, gpu=torch.bfloat16)
    rates = []
    for n in sizes:
        a, b = (operand("gaussian", n, dtype) for _ in range(2))
        rates.append((n, 2 * n**3 / timing.time(torch.mm, a, b, seconds=seconds).low))
    return rates


def dtype_rates(n=8192):
    "Measured FLOP/s of one matmul size on a GPU: {'fp32': …, 'tf32': …, 'bf16': …}."
    before = torch.get_float32_matmul_precision()
    rates = {}
    try:
        for label, dtype, precision in (
            ("fp32", torch.float32, "highest"),  # the ordinary units: no tensor cores
            ("tf32", torch.float32, "high"),  # fp32 in memory, multiplied by tensor cores at 10 bits
            ("bf16", torch.bfloat16, "highest"),
        ):
            torch.set_float32_matmul_precision(precision)
            rates[label] = machine.matmul_rate(dtype, n)
    finally:
        torch.set_float32_matmul_precision(before)
    return rates


class Measured(NamedTuple):
    "An operator beside its roofs: which binds, the least seconds they allow, the seconds it took, FLOP/s."

    name: str
    intensity: float
    bound: str
    predicted: float
    measured: float
    rate: float


def measure(ops, peaks):
    "Time each `Op` and compare with its `roof` on a machine of `peaks`: a list of `Measured`."
    found = []
    for op in ops:
        r = roof(op.flops, op.bytes, peaks.flops, peaks.bytes)
        took = timing.time(op.fn, *op.args, seconds=0.2).median
        found.append(Measured(op.name, r.intensity, r.bound, r.seconds, took, op.flops / took))
    return found


def said(prediction, measured, unit):
    "One sentence that compares a prediction (None: none was written) with the measurement."
    if not isinstance(prediction, int | float) or not prediction > 0:
        return f"measured {measured:.3g} {unit}; no prediction was written down"
    off = max(prediction / measured, measured / prediction)
    return f"you said {prediction:.3g}, measured {measured:.3g} {unit}: off by {off:.1f}x"


# --- The values of a matmul ---------------------------------------------------------

KINDS = ("gaussian", "uniform", "zeros", "nan")


def operand(kind, n, dtype):
    'An n x n matrix on the device at hand: "gaussian", "uniform" in [0, 1), "zeros" or "nan".'
    if kind not in KINDS:
        raise ValueError(f"no values called {kind!r}; choose from {', '.join(KINDS)}")
    if kind in ("zeros", "nan"):
        return torch.full((n, n), 0.0 if kind == "zeros" else math.nan, dtype=dtype, device=machine.device())
    draw = torch.randn if kind == "gaussian" else torch.rand
    return draw(n, n, device=machine.device()).to(dtype)


class Run(NamedTuple):
    "A matmul repeated without a pause: FLOP/s, and on a GPU the clock in MHz and the power in W, or None."

    rate: float
    mhz: float | None
    watts: float | None


def value_rates(n=None, seconds=None, rounds=2):
    """The same matmul on each of `KINDS`, kept up for `seconds`: {kind: Run}, medians over `rounds`.

    The second round goes through the kinds backwards, so that a GPU that warms up favours none of them.
    """
    n = n or machine.pick(cpu=1024, gpu=8192)
    seconds = seconds or machine.pick(cpu=0.25, gpu=1.2)
    dtype = machine.pick(cpu=torch.float32, gpu=torch.bfloat16)
    pairs = {kind: (operand(kind, n, dtype), operand(kind, n, dtype)) for kind in KINDS}
    out = torch.empty(n, n, dtype=dtype, device=machine.device())
    found = {kind: [] for kind in KINDS}
    for i in range(rounds):
        for kind in KINDS if i % 2 == 0 else reversed(KINDS):
            a, b = pairs[kind]
            found[kind].append(_sustained(lambda a=a, b=b: torch.mm(a, b, out=out), 2 * n**3, seconds))
    return {
        kind: Run(
            *(None if None in column else statistics.median(column) for column in zip(*runs, strict=True))
        )
        for kind, runs in found.items()
    }


def _sustained(fn, flops, seconds):
    gpu = machine.has_gpu()
    each = stopwatch(fn, warmup=1, runs=3)
    n = max(3, math.ceil(seconds / each))
    machine.sync()
    if not gpu:
        start = time.perf_counter()
        for _ in range(n):
            fn()
        return Run(n * flops / (time.perf_counter() - start), None, None)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(n):
        fn()
    end.record()
    # Launches return at once, so the GPU is in the middle of them while it is asked.
    mhz, watts = _clock_and_power()
    machine.sync()
    return Run(n * flops / (start.elapsed_time(end) * 1e-3), mhz, watts)


def _clock_and_power():
    "The GPU's clock in MHz and power in W at this moment, by nvidia-smi; (None, None) where it can't say."
    import subprocess

    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError, IndexError, AttributeError):
        uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
        query = ["nvidia-smi", f"--id=GPU-{uuid}", "--query-gpu=clocks.sm,power.draw.instant"]
        answer = subprocess.run(
            [*query, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=5, check=True
        )
        mhz, watts = (float(v) for v in answer.stdout.splitlines()[0].split(","))
        return mhz, watts
    return None, None


# --- FLOPs of a training run --------------------------------------------------------


class Transformer(NamedTuple):
    "A transformer by its sizes; `ffn` is the feed-forward's inner width, `vocab` 0 where there is no head."

    layers: int
    width: int
    ffn: int
    vocab: int
    seq: int


def flops_per_token(model, causal=False):
    """Training FLOPs per token, contractions only: forward once, backward twice as much.

    Counted are the weights that take part in a matmul (not the embedding table, which is only looked up)
    and attention's two products; under a causal mask a token sees (seq + 1) / 2 keys on average.
    """
    weights = model.layers * (4 * model.width**2 + 2 * model.width * model.ffn) + model.width * model.vocab
    keys = (model.seq + 1) / 2 if causal else model.seq
    return 6 * weights + 12 * model.layers * model.width * keys


def train_flops(model, batch):
    "FLOPs of one training step on `batch` sequences, every position attending to every other."
    return batch * model.seq * flops_per_token(model)


def mfu(model, tokens_per_second, gpus, peaks, causal=True):
    """Model FLOPs utilisation, a fraction of 1: the FLOP/s that the model needs over `gpus` dense peaks.

    `peaks` are one GPU's FLOP/s, {"dense": …, "sparse": …}; only the dense one counts. ValueError over 1, for
    no machine passes its peak. Source: Chowdhery et al., "PaLM", 2022, appendix B.
    """
    used = tokens_per_second * flops_per_token(model, causal) / (gpus * peaks["dense"])
    if used > 1:
        raise ValueError(f"MFU is {used:.0%}: the peak, the count or the timing is wrong")
    return used


def peak_flops():
    """FLOP/s to divide by, and where it is from: the datasheet's dense bf16 rate, else the measured rate.

    The rate is measured once more, in case the machine was busy the first time.
    """
    sheet = machine.DATASHEET.get(machine.name(), {})
    if "bf16_flops" in sheet:
        return sheet["bf16_flops"], "datasheet, dense bf16"
    return max(machine.peaks().flops, machine.matmul_rate()), "measured here"


def days(flops, gpus, mfu, peak):
    "Days that `gpus` GPUs of `peak` FLOP/s each need for `flops` at an MFU of `mfu` (a fraction)."
    return flops / (gpus * mfu * peak) / 86_400


def explore_run(gpus=16_384, mfu=0.4, log10_flops=26.0, tflops=989):
    "How many days a run of 10^log10_flops takes on GPUs of `tflops` TFLOP/s, and on other numbers of them."
    counts = [2**i for i in range(6, 19)]
    flops, peak = 10.0**log10_flops, tflops * 1e12
    return {
        "gpus": gpus,
        "mfu": mfu,
        "log10_flops": log10_flops,
        "days": days(flops, gpus, mfu, peak),
        "counts": counts,
        "curves": {m: [days(flops, c, m, peak) for c in counts] for m in sorted({0.2, 0.6, mfu})},
    }


# --- A timeline in three buckets ----------------------------------------------------


class Event(NamedTuple):
    'A stretch of a profile: `lane` is "cpu" or a GPU stream, `kind` "launch" (cpu), "compute" or "memory".'

    start: float
    duration: float
    lane: str
    kind: str


def buckets(events):
    """Sort the time of a profile into {"compute", "memory", "overhead"}, which sum to its span.

    The span runs from the first start to the last end of all events. While any stream computes, the time is
    compute; else while any moves memory, it is memory; while no stream works, it is overhead.
    """
    total = {"compute": 0.0, "memory": 0.0, "overhead": 0.0}
    edges = sorted({t for e in events for t in (e.start, e.start + e.duration)})
    for a, b in itertools.pairwise(edges):
        kinds = {e.kind for e in events if e.lane != "cpu" and e.start <= a and b <= e.start + e.duration}
        total[next((k for k in ("compute", "memory") if k in kinds), "overhead")] += b - a
    return total


# --- Timing -------------------------------------------------------------------------


def stopwatch(fn, clock=time.perf_counter, synchronize=machine.sync, warmup=3, runs=11):
    """Median seconds of one call of `fn`, from an idle device to an idle device.

    `fn` is called `warmup` times untimed, then `runs` times; each run starts and ends synchronised.
    """
    for _ in range(warmup):
        fn()
    synchronize()
    took = []
    for _ in range(runs):
        start = clock()
        fn()
        synchronize()
        took.append(clock() - start)
    return statistics.median(took)


class VirtualGPU:
    """A device with a virtual clock: a call returns once its kernel is queued, `synchronize` waits for all.

    `kernels` are seconds of the kernels of successive calls, the last one repeated; `launch` is what a call
    costs the host, `backlog` seconds of work that somebody queued before. Nothing really waits.
    """

    def __init__(self, kernels, launch=1e-5, backlog=0.0):
        self.kernels, self.launch = list(kernels), launch
        self.now, self.busy_until, self.calls = 0.0, backlog, 0

    def run(self):
        "Queue the next kernel."
        kernel = self.kernels[min(self.calls, len(self.kernels) - 1)]
        self.calls += 1
        self.now += self.launch
        self.busy_until = max(self.now, self.busy_until) + kernel

    def clock(self):
        "The host's time in seconds."
        return self.now

    def synchronize(self):
        "Wait until the queue is empty."
        self.now = max(self.now, self.busy_until)

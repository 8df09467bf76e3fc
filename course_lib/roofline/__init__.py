"""What lesson roofline keeps out of its cells: operators at real sizes, classes, values, a virtual GPU.

Units are FLOPs, bytes and seconds unless a name says otherwise. One multiply and one add are two FLOPs.
"""

import contextlib
import functools
import math
import os
import pathlib
import re
import subprocess
import threading
import time
from typing import NamedTuple

import torch
from torch.nn import functional as F

from course_lib import data, machine, show
from course_lib.meter import operators as portable

# BERT-large's encoder on a V100: Ivanov et al., "Data Movement Is All You Need", arXiv 2007.00072, table 1.
PUBLISHED_TIME = {"contraction": 61.0, "normalisation": 25.5, "elementwise": 13.5}
CLASSES = portable.CLASSES


class Transformer(NamedTuple):
    "A transformer by its sizes; `ffn` is the feed-forward's inner width, `vocab` 0 where there is no head."

    layers: int
    width: int
    ffn: int
    vocab: int
    seq: int


class Op(NamedTuple):
    "An operator ready to run: `run()`; its `kind`, shapes and itemsize are what exercise 1's `cost` takes."

    name: str
    kind: str
    x: tuple
    w: tuple | None
    itemsize: int
    run: object


RUN = {
    "matmul": torch.matmul,
    "bmm": torch.bmm,
    "add": torch.add,
    "sum": lambda x, out: torch.sum(x, -1, out=out),
    "softmax": lambda x, out: torch.softmax(x, -1, out=out),
}


def operator(name, kind, x, w=None):
    "An `Op` on gaussian tensors of shapes `x` and `w`, bfloat16 on a GPU and float32 on a CPU."
    dtype = machine.pick(cpu=torch.float32, gpu=torch.bfloat16)
    args = [torch.randn(*s, device=machine.device()).to(dtype) for s in (x, w) if s]
    # The result has its memory before: the first touch of fresh memory would cost a CPU a page fault.
    shape = {"matmul": (*x[:-1], w and w[-1]), "bmm": (*x[:-1], w and w[-1]), "sum": x[:-1]}.get(kind, x)
    out = torch.zeros(shape, dtype=dtype, device=machine.device())
    return Op(name, kind, x, w, dtype.itemsize, functools.partial(RUN[kind], *args, out=out))


def six_operators():
    "Six operators of different intensity, at sizes that suit this machine, the last one tiny."
    n, rows, batch, out = machine.pick(cpu=(1024, 4096, 32, 8192), gpu=(8192, 32768, 1024, 32768))
    return [
        operator("matmul", "matmul", (n, n), (n, n)),
        operator("attention scores", "bmm", (batch, 512, 64), (batch, 64, 512)),
        operator("matrix × one row", "matmul", (1, 4096), (4096, out)),
        operator("sum of rows", "sum", (rows, 4096)),
        operator("bias add", "add", (rows, 4096), (4096,)),
        operator("tiny add", "add", (16,), (16,)),
    ]


def encoder_operators(batch, seq=512, width=1024, heads=16):
    "Four operators of a BERT-large layer's forward pass on `batch` sequences."
    tokens, scores = (batch, seq, width), (batch * heads, seq, seq)
    return [
        operator("feed-forward", "matmul", tokens, (width, 4 * width)),
        operator("scores", "bmm", (batch * heads, seq, width // heads), (batch * heads, width // heads, seq)),
        operator("softmax", "softmax", scores),
        operator("residual add", "add", tokens, tokens),
    ]


def op_class(key):
    """The class of a row of a profile by its key: one of CLASSES, or "other".

    Normalisations are softmax, layer norm and every reduction, bias gradients among them. Fused attention is
    a contraction, for its softmax never leaves the kernel. A kernel that Inductor generated
    ("triton_poi_fused_add_3") is a normalisation where it reduces or has a softmax or a norm in its name.
    """
    if key.startswith("triton_"):
        if key.startswith("triton_tem_"):
            return "contraction"
        reduces = key.startswith(("triton_red_", "triton_per_")) or "softmax" in key or "_norm" in key
        return "normalisation" if reduces else "elementwise"
    return "contraction" if "attention" in key else portable.op_class(key.removeprefix("aten::"))


def shares(amounts):
    'The three classes of {class: amount} as percentages that sum to 100; "other" is left out.'
    whole = sum(amounts[c] for c in CLASSES)
    return {c: 100 * amounts[c] / whole for c in CLASSES}


def operand(values, n, dtype):
    'An n x n matrix on the device at hand: "gaussian", "uniform" in [0, 1), "zeros" or "nan".'
    if fill := {"zeros": (0.0,), "nan": (math.nan,)}.get(values):
        return torch.full((n, n), *fill, dtype=dtype, device=machine.device())
    draw = {"gaussian": torch.randn, "uniform": torch.rand}[values]
    return draw(n, n, device=machine.device()).to(dtype)


def core_clock():
    "fp32 lanes of a CPU core's widest instruction, and its GHz by /proc/cpuinfo; None where unknown."
    lanes = {"AVX512": 16, "AVX2": 8}.get(torch.backends.cpu.get_cpu_capability())
    with contextlib.suppress(OSError):
        found = re.search(r"^cpu MHz\s*: ([\d.]+)", pathlib.Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        return (lanes, float(found[1]) / 1e3) if lanes and found else None


@functools.cache
def distorted_digits(copies=8):
    "`data.digits`, each image turned, scaled and moved at random, `copies` times: for training, held out."
    random = torch.Generator().manual_seed(0)

    def distorted(x, y):
        theta = torch.eye(2, 3) + 0.3 * (2 * torch.rand(copies * len(x), 2, 3, generator=random) - 1)
        x, y = x.repeat(copies, 1, 1, 1), y.repeat(copies)
        return F.grid_sample(x, F.affine_grid(theta, x.shape, align_corners=False), align_corners=False), y

    return [distorted(*part) for part in data.digits()[:2]]


def said(prediction, measured, unit):
    "One sentence that compares a prediction (None: none was written) with what came out."
    shown = show.number(measured)
    if not isinstance(prediction, int | float) or not prediction > 0:
        return f"{shown} {unit} (you wrote no prediction)"
    off = max(prediction / measured, measured / prediction)
    return f"{shown} {unit}; you said {prediction:,.6g}, off by {off:.1f}×"


@contextlib.contextmanager
def quiet():
    "Send file descriptor 2 to nowhere: the profiler's C++ code logs dates and process numbers there."
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)


SLOWED = {0x4: "power limit", 0x8: "hardware", 0x20: "heat", 0x40: "heat", 0x80: "power brake"}  # NVML's bits


def gpu_reader():
    "A function that reads MHz, W, what slows the GPU (bits) and W allowed, by NVML or nvidia-smi; or None."
    if not machine.has_gpu():
        return None
    uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"

    def smi():
        query = ["nvidia-smi", f"--id={uuid}", "--format=csv,noheader,nounits"]
        query += ["--query-gpu=clocks.sm,power.draw.instant,clocks_throttle_reasons.active,power.limit"]
        answer = subprocess.run(query, capture_output=True, text=True, timeout=5, check=True).stdout
        mhz, watts, bits, limit = answer.split(",")
        return float(mhz), float(watts), int(bits, 16), float(limit)

    def nvml():
        import pynvml

        pynvml.nvmlInit()  # again: only counts
        gpu = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        power = pynvml.nvmlDeviceGetFieldValues(gpu, [pynvml.NVML_FI_DEV_POWER_INSTANT])[0]
        bits = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)
        mhz = pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM)
        return mhz, power.value.uiVal / 1e3, bits, pynvml.nvmlDeviceGetPowerManagementLimit(gpu) / 1e3

    for read in (nvml, smi):
        with contextlib.suppress(Exception):  # neither the package nor the program is promised
            read()
            return read
    return None


@contextlib.contextmanager
def watched():
    "Clock and power while the block runs: a list of (perf_counter's seconds, MHz, W, bits, W allowed)."
    samples, done, read = [], threading.Event(), gpu_reader()

    def look():
        while read and not done.wait(0.01):
            samples.append((time.perf_counter(), *read()))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        done.set()
        thread.join()


def slowed_by(bits):
    "What held the clock down in at least half of the samples, in words."
    found = {word for bit, word in SLOWED.items() if 2 * sum(bool(b & bit) for b in bits) >= len(bits)}
    return ", ".join(sorted(found)) or "nothing named"


def explore_run(gpus=16_384, mfu=0.4, log10_flops=26.0, tflops=989):
    "How many days a run of 10^log10_flops takes on GPUs of `tflops` TFLOP/s, and on other numbers of them."

    def days(count, used):
        return 10.0**log10_flops / (count * used * tflops * 1e12) / 86_400

    counts = [2**i for i in range(6, 19)]
    return {
        "gpus": gpus,
        "mfu": mfu,
        "log10_flops": log10_flops,
        "days": days(gpus, mfu),
        "counts": counts,
        "curves": {m: [days(c, m) for c in counts] for m in sorted({0.2, 0.6, mfu})},
    }


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

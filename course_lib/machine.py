"""Which device this is, how fast it measures, and which sizes suit it.

Rates are measured on first use and cached for the process; nothing is measured at import.
"""

import contextlib
import functools
import os
import platform
import re
import statistics
import sys
import timeit
from pathlib import Path
from typing import NamedTuple

import torch

from course_lib import recorded, show, timing

LIB = "0.2.0"

# Dense rates by the makers' datasheets, in FLOP/s and bytes/s: bf16 with fp32 accumulation, no sparsity.
DATASHEET = {
    "NVIDIA H200": {"bf16_flops": 989e12, "bytes": 4.8e12},
    "NVIDIA H100 80GB HBM3": {"bf16_flops": 989e12, "bytes": 3.35e12},
    "NVIDIA H100 PCIe": {"bf16_flops": 756e12, "bytes": 2.0e12},
    "NVIDIA A100-SXM4-80GB": {"bf16_flops": 312e12, "bytes": 2.039e12},
    "NVIDIA A100-SXM4-40GB": {"bf16_flops": 312e12, "bytes": 1.555e12},
    "NVIDIA L4": {"bf16_flops": 121e12, "bytes": 0.3e12},
    "NVIDIA A10G": {"bf16_flops": 70e12, "bytes": 0.6e12},
    "NVIDIA GeForce RTX 4090": {"bf16_flops": 165.2e12, "bytes": 1.008e12},
    "NVIDIA GeForce RTX 3090": {"bf16_flops": 71e12, "bytes": 0.936e12},
}


class Peaks(NamedTuple):
    "What this machine reaches: matmul FLOP/s, copied bytes/s (read + written), seconds to ask for a tiny op."

    flops: float
    bytes: float
    launch: float


def start(lesson, lib=LIB):
    """Open a lesson: print lesson, device and torch on one line; set the figures' style and the seed.

    `lib` is the oldest library the lesson works with; one sentence says what to do where this one is older.
    """
    print(f"lesson {lesson} · {name()} · torch {torch.__version__}")
    wanted, have = (tuple(map(int, version.split("."))) for version in (lib, LIB))
    if wanted > have:
        cure = "run `git pull`, then `make venv`, and restart the kernel"
        print(f"This lesson needs course_lib {lib} and found {LIB}: {cure}.")
    show.style()
    torch.manual_seed(0)
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell and _gpu_cell not in shell.input_transformers_cleanup:
        shell.input_transformers_cleanup.append(_gpu_cell)


def _gpu_cell(lines):
    "A cell that begins with `%%gpu what it shows` runs on a GPU; elsewhere it says in one line what it is."
    if not lines or not lines[0].startswith("%%gpu"):
        return lines
    if has_gpu():
        return ["\n", *lines[1:]]
    names = re.findall(r"""\bnote\(\s*f?["']([\w.{}\[\]"']+?)["'],""", "".join(lines))
    return [f"print({f'Needs a CUDA GPU: {lines[0][5:].strip()}.{recorded.brief(names)}'!r})\n"]


def has_gpu():
    "Is there a CUDA device that torch can use?"
    return torch.cuda.is_available()


def device():
    "The device lessons run on: the current CUDA device where there is one, else the CPU."
    return torch.device("cuda" if has_gpu() else "cpu")


def pick(*, cpu, gpu):
    "The size for the device at hand: `gpu` on a GPU, `cpu` elsewhere."
    return gpu if has_gpu() else cpu


def sync():
    "Wait until the GPU has done everything queued so far; on a CPU there is nothing to wait for."
    if has_gpu():
        torch.cuda.synchronize()


def name():
    "The device's name: 'NVIDIA H200', or the processor's model and its cores."
    return torch.cuda.get_device_name() if has_gpu() else host()


def host():
    "The processor's model and the cores that this process may use."
    n, model = cores(), platform.processor() or platform.machine() or "CPU"
    with contextlib.suppress(OSError):
        found = re.search("^model name\\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        model = found[1] if found else model
    return f"{' '.join(model.split())}, {n} core{'s' * (n != 1)}"


def cores():
    "Processor cores this process may use."
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def matmul_rate():
    """Measured FLOP/s of a square matmul of gaussian numbers: 2 n^3 over the time of the faster runs.

    bfloat16 at n = 8192 on a GPU, float32 at 1024 or more on a CPU. About a second.
    """
    for n in pick(cpu=(1024, 2048, 4096, 8192), gpu=(8192,)):
        dtype = pick(cpu=torch.float32, gpu=torch.bfloat16)
        a, b = (torch.randn(n, n, device=device()).to(dtype) for _ in range(2))
        # The 20th percentile: a peak is what the machine does undisturbed.
        took = timing.time(torch.mm, a, b, seconds=0.4).low
        if took > 5e-3:  # a shorter one does not fill a large machine
            break
    return 2 * n**3 / took


def copy_rate():
    """Measured bytes/s of a copy in the device's memory, read + written, from the time of the faster runs.

    Each of the two buffers is larger than caches are.
    """
    n = pick(cpu=256 << 20, gpu=1 << 30)
    # Ones, not zeros: pages that were never written all read the same cached page.
    a, b = (torch.ones(n, dtype=torch.uint8, device=device()) for _ in range(2))
    return 2 * n / timing.time(b.copy_, a, seconds=0.4).low


def launch_cost():
    "Seconds to ask for one operator on one number. On a GPU it is enqueued; nothing waits for the result."
    x = torch.zeros(1, device=device())
    # 500 are fewer than a CUDA queue holds, so that enqueuing never waits.
    samples = timeit.repeat("x.add_(1)", sync, number=500, repeat=11, globals={"x": x})
    sync()
    return statistics.median(samples[1:]) / 500


@functools.cache
def peaks():
    "This machine's `Peaks`, measured once in a process: matmul rate, copy rate, launch cost."
    return Peaks(matmul_rate(), copy_rate(), launch_cost())

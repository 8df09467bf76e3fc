"""Which device this is, how fast it measures, and which sizes suit it.

Rates are measured on first use and cached for the process; nothing is measured at import.
"""

import contextlib
import functools
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import sys
import sysconfig
import time
from pathlib import Path
from typing import NamedTuple

import torch

from course_lib import timing

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
    if _version(lib) > _version(LIB):
        print(
            f"This lesson needs course_lib {lib} and found {LIB}: run `git pull`, then `make venv`, "
            "and restart the kernel."
        )
    from course_lib import show

    show.style()
    torch.manual_seed(0)
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None and _gpu_cell not in shell.input_transformers_cleanup:
        shell.input_transformers_cleanup.append(_gpu_cell)


def _gpu_cell(lines):
    "A cell that begins with `%%gpu what it shows` runs on a GPU; elsewhere it says in one line what it is."
    if not lines or not lines[0].startswith("%%gpu"):
        return lines
    if has_gpu():
        return ["\n", *lines[1:]]
    from course_lib import recorded

    names = re.findall(r"""\bnote\(\s*f?["']([\w.{}\[\]"']+?)["'],""", "".join(lines))
    shown = recorded.brief(names)
    return [f"print({f'Needs a CUDA GPU: {lines[0][5:].strip()}.{shown}'!r})\n"]


def _version(text):
    return tuple(int(part) for part in str(text).split(".") if part.isdigit())


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
    n = cores()
    return f"{_cpu_model()}, {n} core{'s' * (n != 1)}"


def cores():
    "Processor cores this process may use."
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@functools.cache
def _cpu_model():
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.lower().startswith("model name"):
                return " ".join(line.split(":", 1)[1].split())
    if sys.platform == "darwin":
        import subprocess

        with contextlib.suppress(OSError, subprocess.SubprocessError):
            run = subprocess.run(
                ["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, timeout=5
            )
            if run.stdout.strip():
                return run.stdout.strip()
    return platform.processor() or platform.machine() or "CPU"


def matmul_rate(dtype=None, n=None):
    """Measured FLOP/s of a square matmul of gaussian numbers: 2 n^3 over the time of the faster runs.

    By default bfloat16 at n = 8192 on a GPU, float32 at 1024 or more on a CPU. About a second.
    """
    dev = device()
    dtype = dtype or pick(cpu=torch.float32, gpu=torch.bfloat16)
    grow = n is None
    n = n or pick(cpu=1024, gpu=8192)
    while True:
        a, b = (torch.randn(n, n, device=dev).to(dtype) for _ in range(2))
        with torch.no_grad():
            # The 20th percentile: a peak is what the machine does undisturbed.
            took = timing.time(torch.mm, a, b, seconds=0.4).low
        if took > 5e-3 or not grow or n >= 8192:
            return 2 * n**3 / took
        n *= 2  # too short to fill a large machine


def copy_rate(nbytes=None):
    """Measured bytes/s of a copy in the device's memory, read + written, from the time of the faster runs.

    `nbytes` is the size of one of the two buffers, by default several times the last cache.
    """
    dev = device()
    n = int(nbytes) if nbytes else _copy_bytes()
    # Ones, not zeros: pages that were never written all read the same cached page.
    a, b = (torch.ones(n, dtype=torch.uint8, device=dev) for _ in range(2))
    return 2 * n / timing.time(b.copy_, a, seconds=0.4).low


def _copy_bytes():
    if has_gpu():
        free, _ = torch.cuda.mem_get_info()
        return min(1 << 30, free // 4)
    return max(128 << 20, 4 * _last_cache())


def _last_cache():
    "Bytes of the processor's last cache, 0 where the system doesn't say."
    for level in (4, 3, 2):
        with contextlib.suppress(AttributeError, ValueError, OSError):
            size = os.sysconf(f"SC_LEVEL{level}_CACHE_SIZE")
            if size > 0:
                return size
    return 0


def launch_cost():
    """Seconds that one operator on one number costs: the price of asking for it.

    On a GPU this is the time to enqueue it; nothing waits for the result.
    """
    x = torch.zeros(1, device=device())
    n, samples = 500, []  # fewer than a CUDA queue holds, so that enqueuing never waits
    for _ in range(11):
        sync()
        start = time.perf_counter()
        for _ in range(n):
            x.add_(1)
        samples.append((time.perf_counter() - start) / n)
    sync()
    return sorted(samples[1:])[len(samples) // 2]


@functools.cache
def peaks():
    "This machine's `Peaks`, measured once in a process: matmul rate, copy rate, launch cost."
    return Peaks(matmul_rate(), copy_rate(), launch_cost())


def abilities():
    """What runs here: {"gpu": bool, "triton": "gpu" | "interpreter" | None, "compile": bool}.

    Triton is not imported. "interpreter": kernels run under TRITON_INTERPRET=1, on the CPU. "compile" is
    whether torch.compile finds what it builds with (Triton on a GPU, a C++ compiler on a CPU).
    """
    gpu = has_gpu()
    triton = None
    if importlib.util.find_spec("triton") is not None:
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        real = gpu and not interpreted and torch.cuda.get_device_capability() >= (7, 0)
        triton = "gpu" if real else "interpreter"
    if gpu:
        compiles = triton == "gpu" and _which("CC", "gcc", "cc", "clang")
    else:
        compiles = _which("CXX", "g++", "c++", "clang++", "cl")
    return {"gpu": gpu, "triton": triton, "compile": compiles and _has_python_headers()}


def _has_python_headers():
    return (Path(sysconfig.get_path("include")) / "Python.h").exists()


def _which(variable, *names):
    given = os.environ.get(variable)
    return any(shutil.which(n) for n in ([given] if given else names))


def triton_version():
    "The installed Triton's version without importing it, or None."
    if importlib.util.find_spec("triton") is None:
        return None
    for package in ("triton", "triton-windows", "pytorch-triton", "pytorch-triton-rocm"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(package)
    return "unknown"


def report():
    """This machine as plain data for `course doctor`: what it is, what it measures, what it can do.

    Sizes in bytes, rates in FLOP/s and bytes/s, launch cost in seconds. About two seconds the first time.
    """
    from course_lib import ram

    peak = peaks()
    properties = torch.cuda.get_device_properties(device()) if has_gpu() else None
    return {
        "device": name(),
        "type": device().type,
        "ram_bytes": ram.total(),
        "gpu_memory_bytes": properties.total_memory if properties else None,
        "gpus": torch.cuda.device_count() if properties else 0,
        "cores": cores(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "triton": triton_version(),
        "matmul_flops": peak.flops,
        "matmul_dtype": pick(cpu="float32", gpu="bfloat16"),
        "copy_bytes": peak.bytes,
        "launch_seconds": peak.launch,
        "datasheet": DATASHEET.get(name()),
        "abilities": abilities(),
    }

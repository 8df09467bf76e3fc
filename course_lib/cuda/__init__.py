"What lesson cuda keeps: kernels from strings of CUDA C++, a model of a scheduler, the driver's occupancy."

import ctypes
import os
import shlex
import shutil
import subprocess

from course_lib.cuda.kernel import Kernel, KernelError, compiler, on_gpu  # noqa: F401
from course_lib.triton import said  # noqa: F401  a measured value beside the guess


def schedule(warps=4, latency=20, work=3, cycles=120):
    """A scheduler that issues one instruction a cycle: it stays with a warp as long as that one is ready.

    Each warp repeats: a load, whose data comes `latency` cycles later, then `work` instructions that need it.
    Gives {"spans": [(warp, start, end, "issues" or "waits")], "busy": part of the cycles from the first
    load's arrival on, …}.
    """
    ready, left, spans, w = [0] * warps, [0] * warps, [], 0
    for now in range(cycles):
        if ready[w] > now:
            w = ready.index(min(ready))  # ready for the longest time
        if ready[w] > now:
            continue
        spans.append((w, now, now + 1, "issues"))
        if left[w]:
            left[w], ready[w] = left[w] - 1, now + 1
        else:
            left[w], ready[w] = work, now + 1 + latency
            spans.append((w, now + 1, min(cycles, now + 1 + latency), "waits"))
    first = 1 + latency
    busy = sum(kind == "issues" and start >= first for _, start, _, kind in spans) / (cycles - first)
    return {"spans": spans, "busy": busy, "cycles": cycles, "warps": warps}


def registers(kernel):
    "(registers of a thread, bytes of shared memory of a block) that the compiler gave a kernel on this GPU."
    return tuple(_attribute(kernel, number) for number in (4, 1))


def _driver():
    return ctypes.CDLL("libcuda.so.1")


def _attribute(kernel, number):
    value = ctypes.c_int()
    _driver().cuFuncGetAttribute(ctypes.byref(value), number, on_gpu(kernel).func)
    return value.value


def allow_shared(kernel, nbytes):
    "Let a kernel on this GPU ask for up to `nbytes` of dynamic shared memory."
    compiled = on_gpu(kernel)
    if nbytes > getattr(compiled, "_max_shared_mem_bytes", 0):
        compiled.set_shared_memory_config(nbytes)


def blocks_by_driver(kernel, threads, shared_bytes=0):
    "cuOccupancyMaxActiveBlocksPerMultiprocessor: blocks of `threads` threads that fit onto a multiprocessor."
    found = ctypes.c_int()
    ask = _driver().cuOccupancyMaxActiveBlocksPerMultiprocessor
    ask(ctypes.byref(found), on_gpu(kernel).func, threads, ctypes.c_size_t(shared_bytes))
    return found.value


def shell(command, folder, most=9, seconds=60):
    "What a command says, `most` lines of it; one sentence where its program isn't installed."
    path = f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin"
    words = shlex.split(command)
    if not shutil.which(words[0], path=path) and not (folder / words[0]).exists():
        return f"{words[0]} isn't installed here: it comes with the CUDA toolkit"
    try:
        ran = subprocess.run(
            words,
            cwd=folder,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return f"{words[0]} was stopped after {seconds} s"
    lines = (ran.stdout + ran.stderr).splitlines()
    return "\n".join(lines[:most] + [f"… {len(lines) - most} more lines"] * (len(lines) > most))

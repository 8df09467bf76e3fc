"What lesson market keeps outside its cells: series, a file of ticks, arrivals, and a server that is timed."

import contextlib
import ctypes
import itertools
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch


def random_walk(n, seed):
    "n prices of which nobody can forecast the next: sums of independent gaussian steps."
    return np.cumsum(np.random.default_rng(seed).standard_normal(n))


class Drift(NamedTuple):
    "Features x [n, k], known at each step, and returns r [n], known one step later."

    x: np.ndarray
    r: np.ndarray


def drifting(n, features=8, strength=0.1, half_life=8_000, seed=0):
    """A series with a weak signal that drifts: r[t] = strength * (b[t] . x[t]) / sqrt(features) + noise.

    Features and noise are independent gaussians of variance 1. Each weight in b is a stationary AR(1)
    series of variance 1, whose correlation with itself halves in `half_life` steps.
    """
    rng = np.random.default_rng(seed)
    keep = 2 ** (-1 / half_life)
    weights = np.empty((n, features))
    weights[0] = rng.standard_normal(features)
    steps = np.sqrt(1 - keep**2) * rng.standard_normal((n, features))
    for t in range(1, n):
        weights[t] = keep * weights[t - 1] + steps[t]
    x = rng.standard_normal((n, features))
    signal = (weights * x).sum(1) / np.sqrt(features)
    return Drift(x, strength * signal + rng.standard_normal(n))


def real_prices():
    "Logarithms of the S&P 500's daily closes, 1999 to 2018; None where package `arch` isn't installed."
    try:
        from arch.data import sp500
    except ImportError:
        return None
    return np.log(sp500.load()["Adj Close"].to_numpy())


@contextlib.contextmanager
def ticks(rows, columns=16, block=1 << 20):
    "A mapped file of ticks as a float32 tensor [rows, columns]; the file is deleted afterwards."
    some = np.random.default_rng(0).standard_normal((min(rows, block), columns), dtype=np.float32)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "ticks.bin")
        with open(path, "wb") as f:
            for start in range(0, rows, block):
                f.write(some[: rows - start].tobytes())
        yield torch.from_numpy(np.memmap(path, np.float32, "c", shape=(rows, columns)))


def gbps(run, nbytes, rounds=5):
    "10^9 bytes a second of each round of run(), until the GPU is done; a first round warms up."
    found = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        found.append(nbytes / (time.perf_counter() - start) / 1e9)
    return found[1:]


def captured(body):
    "A CUDA graph of body(), after three calls; what it returned lives as long as the graph."
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            body()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graph.kept = body()
    return graph


def compiled_c(source, name):
    "The function `name` of C source, by ctypes (it gives a float), or None where there is no C compiler."
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not compiler:
        return None
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "code.c").write_text(source, encoding="utf-8")
        flags = "-O3", "-march=native", "-ffast-math", "-shared", "-fPIC"
        command = [compiler, *flags, "-o", "code.so", "code.c"]
        done = subprocess.run(command, cwd=folder, capture_output=True)
        if done.returncode:
            return None
        fn = getattr(ctypes.CDLL(str(Path(folder, "code.so"))), name)
    fn.restype = ctypes.c_float
    return fn


def poisson(n, rate, seed=0):
    "n times of arrival in µs, at random, `rate` in a millisecond."
    return np.cumsum(np.random.default_rng(seed).exponential(1e3 / rate, n)).tolist()


def with_pauses(answer, every=400, ms=5):
    "`answer`, but each 400th call pauses for 5 ms, as a garbage collection or another process may do."
    count = itertools.count(1)
    return lambda: (time.sleep(ms / 1e3) if next(count) % every == 0 else None, answer())[1]


def serve_for_real(arrivals, forward, most, wait, warm=20):
    """Latencies in µs of requests that arrive by the clock at `arrivals`; `forward(size)` answers a batch.

    One thread: while it answers, requests pile up. A batch begins as in exercise market.6. What is timed
    is from the moment when a request was due to the return of `forward`, which must wait for the device.
    """
    for _ in range(warm):
        forward(most)
    due, latencies, first = np.asarray(arrivals), np.empty(len(arrivals)), 0
    begin = time.perf_counter_ns()
    while first < len(due):
        full = due[first + most - 1] if first + most <= len(due) else np.inf
        start = min(full, due[first] + wait)
        while (now := (time.perf_counter_ns() - begin) / 1e3) < start:
            pass
        last = min(first + most, int(np.searchsorted(due, now, side="right")))
        forward(last - first)
        latencies[first:last] = (time.perf_counter_ns() - begin) / 1e3 - due[first:last]
        first = last
    return latencies


def stacked(net, dtype=torch.float32):
    "Weights [layers, out, in] and biases [layers, out] of all linear layers but the last, and its [in]."
    *hidden, head = [m for m in net if isinstance(m, torch.nn.Linear)]
    weights = torch.stack([m.weight.detach() for m in hidden]).to(dtype).contiguous()
    biases = torch.stack([m.bias.detach() for m in hidden]).float().contiguous()
    return weights, biases, head.weight.detach().float().flatten().contiguous()


def error_of(body, net):
    "Relative error of body(x, y) on one request, beside float64 with the weights of hidden layers in bf16."
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, y = torch.randn(net[0].in_features, device=device), torch.zeros(1, device=device)
    body(x, y)
    weights, biases, head = (t.double().to(device) for t in stacked(net, torch.bfloat16))
    h = x.double()
    for w, b in zip(weights, biases, strict=True):
        h = (w @ h + b).clamp(min=0)
    return abs(y.item() / (head @ h).item() - 1)


class Stays:
    """request -> forecast, by a kernel that stays until it has answered so many requests.

    Both sides write words of 64 bits into pinned memory: the number of the request, and a float32.
    """

    def __init__(self, kernel, net, requests, warps=2):
        weights = [t.cuda() for t in stacked(net, torch.bfloat16)]
        layers, width, _ = weights[0].shape  # a power of two
        there, back = (torch.zeros(n, dtype=torch.int64).pin_memory() for n in (width, 1))
        self.there, self.back, self.number, self.requests = there.numpy(), back.numpy(), 0, requests
        self.kept = there, back, weights
        torch.cuda.synchronize()  # the kernel must find room
        sizes = {"LAYERS": layers, "WIDTH": width, "BLOCK": width, "num_warps": warps}
        with torch.cuda.stream(torch.cuda.Stream()):  # in the default stream all others would wait for it
            kernel[(1,)](there, *weights, back, requests, **sizes)

    def __call__(self, x):
        self.number += 1
        self.there[:] = (x.view(np.int32).astype(np.int64) & 0xFFFFFFFF) | (self.number << 32)
        give_up = time.perf_counter() + 2
        while self.back[0] >> 32 < self.number:
            if time.perf_counter() > give_up:
                raise RuntimeError(f"no answer to request {self.number} of {self.requests}")
        return (self.back[:1] & 0xFFFFFFFF).astype(np.uint32).view(np.float32)


def queue_said(p50, gap_us):
    "A warning where the median latency of requests that come each `gap_us` is longer than that, or nothing."
    return f"; one each {gap_us} µs is too much: this is a queue, not a latency" if p50 > gap_us else ""

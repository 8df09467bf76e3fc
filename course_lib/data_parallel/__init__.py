"""data_parallel: what the lesson keeps outside its cells: data, clocks on the ranks, α and β of a network.

A function of `dist` takes the module `torch.distributed` on real ranks, or a `group.Comm`.
"""

import statistics
import time
import warnings
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn import functional as F

from course_lib import data, machine, models


def digits(part="train"):
    "The digits of `train` or `valid` as rows: x [1397 or 400, 64] in 0..1, y [1397 or 400]."
    x, y = getattr(data.digits(), part)
    return x.flatten(1), y


def net(seed=0, widths=(64, 32, 10)):
    "A small network, the same on every rank for the same seed."
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return models.mlp(widths)


def batches(steps, batch, seed=0):
    "`steps` lists of `batch` indices of digits, the same on every rank."
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1397, (batch,), generator=generator) for _ in range(steps)]


def flat(tensors):
    "Tensors as one row, copied."
    return torch.cat([t.detach().flatten() for t in tensors])


def steps_to(target, batch, rates, seeds, most=500):
    """Steps of SGD until the loss of digits that are kept apart is `target`: [seeds, rates], or inf.

    The runs are stepped together, as batched products of weights [seeds * rates, in, out]. It ends when each
    seed has one rate that is there.
    """
    (x, y), (x_test, y_test) = digits(), digits("valid")
    runs = seeds * len(rates)
    nets = [[p.detach() for p in net(seed).parameters()] for seed in range(seeds)]
    params = [torch.stack([n[i].T if n[i].dim() > 1 else n[i][None] for n in nets]) for i in range(4)]
    w1, b1, w2, b2 = params = [p.repeat_interleave(len(rates), 0).requires_grad_() for p in params]
    lr, took = torch.tensor(rates).repeat(seeds).view(-1, 1, 1), torch.full((runs,), torch.inf)
    generator = torch.Generator().manual_seed(1)

    def loss_of(x, y):  # [runs, n, 64], [runs, n] -> [runs]
        out = torch.baddbmm(b2, torch.baddbmm(b1, x, w1).relu(), w2)
        return F.cross_entropy(out.transpose(1, 2), y, reduction="none").mean(1)

    for step in range(1, most + 1):
        rows = torch.randint(len(x), (seeds, batch), generator=generator).repeat_interleave(len(rates), 0)
        grads = torch.autograd.grad(loss_of(x[rows], y[rows]).sum(), params)
        with torch.no_grad():
            for p, g in zip(params, grads, strict=True):
                p -= lr * g
            there = loss_of(x_test.expand(runs, -1, -1), y_test.expand(runs, -1)) <= target
        took[there & took.isinf()] = step
        if (took.view(seeds, -1) <= step).any(1).all():
            break
    return took.view(seeds, -1)


def unused(params, dist):
    """The parameters whose `grad` is None on every rank, as a set: one all-reduce of a number for each.

    Only a rank that lacks a gradient reads the result, so that a GPU isn't waited for in a usual step.
    """
    has = torch.ones(len(params), dtype=torch.int32, device=params[0].device)
    missing = [i for i, p in enumerate(params) if p.grad is None]
    for i in missing:
        has[i] = 0
    dist.all_reduce(has)
    return {params[i] for i in missing if not has[i]}


# --- clocks on the ranks ------------------------------------------------------------


class Span(NamedTuple):
    "From `start` to `end` in seconds of `time.monotonic()`, in the row `lane` of a figure."

    lane: str
    start: float
    end: float


class Recorder:
    "`torch.distributed` for a class that averages gradients, with a `Span` for each all-reduce and gradient."

    def __init__(self, model):
        self.spans, self.since = [], 0.0
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(self._gradient)

    def __getattr__(self, name):
        return getattr(dist, name)

    def _gradient(self, p):
        now = time.monotonic()
        self.spans.append(Span("backward", self.since, now))
        self.since = now

    def all_reduce(self, tensor, op=dist.ReduceOp.SUM, async_op=False):
        start = time.monotonic()
        work = dist.all_reduce(tensor, op, async_op=True)

        def end(future):
            self.spans.append(Span("all-reduces", start, time.monotonic()))

        work.get_future().then(end)
        return work if async_op else work.wait()


def step_spans(wraps, widths=(256, 1024, 1024, 1024, 1024, 10), batch=128, steps=12):
    """For each wrap the sorted seconds from the start of backward to the last mean, and the median's `Span`s.

    `wrap(model, dist)` averages gradients and has `finish()`. The steps take turns; the first isn't counted.
    """
    torch.set_num_threads(min(4, torch.get_num_threads()))  # more of them hinder each other here
    models = [net(0, widths) for _ in wraps]
    recorders, took = [Recorder(model) for model in models], [[] for _ in wraps]
    wrapped = [wrap(*both) for wrap, *both in zip(wraps, models, recorders, strict=True)]
    for _ in range(steps):
        for model, recorder, parallel, mine in zip(models, recorders, wrapped, took, strict=True):
            loss = model(torch.randn(batch, widths[0])).square().mean()
            dist.barrier()
            start = recorder.since = time.monotonic()
            recorder.spans = []
            loss.backward()
            back = time.monotonic()
            parallel.finish()
            end = time.monotonic()
            time.sleep(0.01)  # the all-reduces' own threads note their ends
            mine.append((end - start, sorted([*recorder.spans, Span("backward", back, back)])))
            model.zero_grad()
    ordered = [sorted(mine[1:], key=lambda found: found[0]) for mine in took]
    return [([seconds for seconds, _ in mine], mine[len(mine) // 2][1]) for mine in ordered]


def seconds_of(fns, calls=None, rounds=5, budget=0.1):
    """Seconds of one call of each function on all ranks together, by rounds: [[by function] by round].

    The functions take turns. `calls` in a row are timed, by default as many as take `budget` seconds.
    """

    # Autograd's own thread makes the GPU's context with its first matmul, and says so.
    warnings.filterwarnings("ignore", message="Attempting to run cuBLAS")

    def block(fn, k):
        for wait in (machine.sync, dist.barrier, machine.sync):
            wait()
        start = time.perf_counter()
        for _ in range(k):
            fn()
        machine.sync()
        return (time.perf_counter() - start) / k

    counts = []
    for fn in fns:
        block(fn, 3)
        k = torch.tensor([calls or max(1, min(200, budget / block(fn, 1)))], device=machine.device()).int()
        dist.broadcast(k, 0)
        counts.append(int(k))
    return [[block(fn, k) for fn, k in zip(fns, counts, strict=True)] for _ in range(rounds)]


def all_reduce_seconds(sizes):
    "Median seconds of an all-reduce of each of `sizes` bytes in float32, calls in a row, as nccl-tests does."
    xs = [torch.zeros(n // 4, device=machine.device()) for n in sizes]
    rounds = seconds_of([lambda x=x: dist.all_reduce(x) for x in xs], budget=0.03)
    return [statistics.median(column) for column in zip(*rounds, strict=True)]


# --- the α-β model (Hockney 1994) -----------------------------------------------------

# Latency in seconds, seconds for each byte, for one GPU each way: rates as sold, latencies in their order of
# magnitude.
NETWORKS = {
    "10 Gb Ethernet, TCP": (30e-6, 1 / 1.25e9),
    "100 Gb Ethernet, TCP": (30e-6, 1 / 12.5e9),
    "400 Gb RDMA": (3e-6, 1 / 50e9),
    "NVLink 4": (1.5e-6, 1 / 450e9),
}


def fit(sizes, seconds, ranks):
    "α and β of a ring all-reduce that passes through the first and the last of the measured points."
    rounds = 2 * (ranks - 1)
    (n0, t0), (n1, t1) = ((sizes[i], seconds[i] / rounds) for i in (0, -1))
    beta = max(0.0, (t1 - t0) / (n1 - n0)) * ranks
    return max(0.0, t0 - beta * n0 / ranks), beta

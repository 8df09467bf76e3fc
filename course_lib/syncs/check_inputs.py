"What the checks hand to an answer, and what must come out: loops, virtual GPUs, traces, step times."

import itertools
import math
import random
import re

import torch
from torch.nn import functional as F

from course_lib import checking as core
from course_lib.syncs.queue import Queue

# --- syncs.1 ---------------------------------------------------------------------------


def batch(i, inputs, classes):
    n = random.randrange(6, 13)
    x = torch.randn(n, inputs) * (8.0 if i % 3 == 0 else 0.1)
    y = torch.randint(classes, (n,))
    y[torch.randperm(n)[: random.randrange(n // 3, n - 2)]] = -1
    return x, y


KINDS = {"clipped", "not clipped", "class 0 guessed for no label", "first not best", "last not best"}


def plain_loop(model, batches, lr, every):
    """The loop as the exercise describes it, reading whatever it likes: its results, its lines, its kinds.

    The kinds are what happened, and would give a wrong answer away: see `KINDS`.
    """
    losses, right, hardest, lines, kinds = [], 0, [], [], set()
    guesses = [0] * model[-1].out_features
    params = list(model.parameters())
    for step, (x, y) in enumerate(batches):
        rows = [i for i, label in enumerate(y.tolist()) if label >= 0]
        logits = model(x)
        each = [F.cross_entropy(logits[i : i + 1], y[i : i + 1]) for i in rows]
        loss = sum(each) / len(each)
        grads = torch.autograd.grad(loss, params)
        norm = math.sqrt(sum((g.double() ** 2).sum().item() for g in grads))
        kinds.add("clipped" if norm > 1 else "not clipped")
        with torch.no_grad():
            for p, g in zip(params, grads, strict=True):
                p -= lr * g / max(1.0, norm)
        for i, row in enumerate(logits.tolist()):
            guess = row.index(max(row))
            guesses[guess] += 1
            right += i in rows and guess == int(y[i])
            if i not in rows and guess == 0:
                kinds.add("class 0 guessed for no label")
        values = [e.item() for e in each]
        hardest.append(x[rows[values.index(max(values))]])
        losses.append(loss.item())
        if step % every == 0:
            lines.append((step, losses[-1]))
    if losses[0] > min(losses):
        kinds.add("first not best")
    if losses[-1] > min(losses):
        kinds.add("last not best")
    return {"best": min(losses), "right": right, "guesses": guesses, "hardest": hardest}, lines, kinds


# --- syncs.2 ---------------------------------------------------------------------------


class Copy:
    "A copy under way on a virtual GPU. Before it has come, `read` gives what was there: a good number."

    def __init__(self, world, value):
        self.world, self.value, self.event = world, value, world.queue.record()

    def ready(self):
        return self.world.queue.query(self.event)

    def wait(self):
        self.world.queue.wait(self.event)

    def read(self):
        if not self.ready():
            self.world.early = True
            return 0.0
        return self.value


class World:
    "A virtual GPU, and the `fetch` of the exercise on it."

    def __init__(self, counts, enqueue, kernel):
        self.queue, self.counts = Queue(enqueue, round_trip=0.4 * kernel), counts
        self.kernel, self.early, self.fetched = kernel, False, 0

    def step(self):
        self.queue.launch(self.kernel, "step")

    def fetch(self, value):
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            raise core.Wrong(f"fetch takes a tensor of one number and was given {core.kind(value)}")
        core.require(
            not value.requires_grad,
            "fetch was given a tensor that hangs on autograd's graph: detach the loss, "
            "or the record of every step is kept alive",
        )
        before = self.counts.syncs
        number = float(value)  # the check's own reading, taken out of the count again
        self.counts.syncs = before
        del self.counts.where[before:], self.counts.code[before:]
        self.fetched += 1
        self.queue.launch(0.001 * self.kernel, "copy")
        return Copy(self, number)


# --- syncs.3 ---------------------------------------------------------------------------


def ragged(n, t, d, dtype):
    x = torch.randn(n, t, d, dtype=dtype)
    lengths = torch.randint(0, t + 1, (n,))
    if n > 2:
        lengths[torch.randperm(n)[:3]] = torch.tensor([0, t, 1])
    outside = torch.arange(t) >= lengths[:, None]
    garbage = torch.tensor([math.nan, math.inf, -math.inf, 1e6, -7.0], dtype=dtype)
    x[outside] = garbage[torch.randint(5, (int(outside.sum()), d))]
    return x, lengths


# --- syncs.4 ---------------------------------------------------------------------------

TICK = 0.5  # times are multiples of it, in µs


def event(cat, name, start, end, tid, pid=71):
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": start * TICK,
        "dur": (end - start) * TICK,
    }


def trace(streams, blocks):
    "A trace, and the cause of each gap by the moment at which it begins (in ticks)."
    streams = random.sample(range(7, 40), streams)
    events = [
        {"ph": "M", "name": "process_name", "pid": 71, "args": {"name": "python"}},
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 5, "pid": 71, "tid": 1, "ts": 4.0},
    ]
    t, causes, lengths = random.randrange(5, 40), {}, random.sample(range(6, 60), blocks)
    for block in range(blocks):
        end = t + random.randrange(24, 60)
        events += _work(t, end, streams)
        if block < blocks - 1:
            found, causes[end] = _waiting(t, end, lengths[block])
            events += found
        # A wait that is over long before the work is, and one on another thread that never was one of ours.
        events.append(event("cuda_runtime", "cudaStreamSynchronize", t + 1, t + 4, 1))
        t = end + lengths[block]
    events.append(event("user_annotation", "ProfilerStep#3", 0, t + 90, 1))
    events.append(event("cpu_op", "aten::copy_", 1, t + 80, 2))  # a data loader's thread
    events.append(event("python_function", "train.py(12): step", 0, t + 70, 1))
    return events, causes


def _work(start, end, streams):
    "Kernels and copies that leave no hole between start and end, overlapping on the streams."
    cuts = sorted({start, end, *(random.randrange(start + 1, end) for _ in range(random.randrange(1, 4)))})
    kinds = [("kernel", "gemm"), ("kernel", "add"), ("gpu_memcpy", "Memcpy DtoH"), ("gpu_memset", "Memset")]
    found = []
    for a, b in itertools.pairwise(cuts):
        cat, name = random.choice(kinds)
        found.append(event(cat, name, a, b, random.choice(streams), 0))
    for _ in range(len(streams) - 1):  # within the block, short ones under long ones too
        a = random.randrange(start, end - 2)
        found.append(event("kernel", "side", a, random.randrange(a + 1, end), random.choice(streams), 0))
    return found


def _waiting(start, end, gap):
    "What the host does as a gap begins at `end`, and the cause that this makes."
    before, after = end - random.randrange(2, 8), end + random.randrange(1, gap - 2)
    kind = random.choice(["item", "nonzero", "bare", "late", "busy"])
    if kind == "late":  # not waiting: a wait begins only within the gap
        return [event("cuda_runtime", "cudaStreamSynchronize", end + 1, after + 2, 1)], None
    if kind == "busy":  # in an operator that launches
        return [
            event("cpu_op", "aten::linear", before, after, 1),
            event("cuda_runtime", "cudaLaunchKernel", before + 1, after, 1),
        ], None
    if kind == "bare":
        name = random.choice(["cudaDeviceSynchronize", "cudaEventSynchronize", "cuStreamSynchronize"])
        cat = "cuda_driver" if name.startswith("cuS") else "cuda_runtime"
        # An operator that begins within the wait is not around it.
        return [event(cat, name, before, after, 1), event("cpu_op", "aten::mul", end, end + gap, 3)], name
    outer, inner = {
        "item": ("aten::item", "aten::_local_scalar_dense"),
        "nonzero": ("aten::index", "aten::nonzero"),
    }[kind]
    return [
        event("cpu_op", inner, before - 1, after, 1),
        event("cpu_op", outer, before - 2, after + 1, 1),
        event("cuda_runtime", "cudaStreamSynchronize", before, after, 1),
        event("cuda_runtime", "cudaLaunchKernel", after + 1, end + gap, 1),
    ], outer


def by_ruler(events, causes):
    "(start, duration, cause) in µs, by colouring a ruler tick by tick."
    work = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    spans = [(round(e["ts"] / TICK), round((e["ts"] + e["dur"]) / TICK)) for e in work]
    first, last = min(a for a, _ in spans), max(b for _, b in spans)
    ruler = bytearray(last - first)
    for a, b in spans:
        ruler[a - first : b - first] = b"x" * (b - a)
    start, length = max(((m.start(), len(m[0])) for m in re.finditer(rb"\0+", ruler)), key=lambda m: m[1])
    return (start + first) * TICK, length * TICK, causes[start + first]


# --- syncs.5 ---------------------------------------------------------------------------

WARMUP, WINDOW = 20, 100


def plant(case):
    "Numbers of the slow steps: none, single ones, or eight in a row and more soon after."
    first = WARMUP + WINDOW
    if case % 4 == 0:
        return []
    if case % 4 == 1:
        start = random.randrange(first + 50, 500)
        return [*range(start, start + 8), start + 12, start + 30, start + 200]
    return sorted(random.sample(range(first, 900), 5))


def run(n, noise, drift, planted, scale):
    "Step times with a slow warm-up, gaussian noise (4 deviations at most), drift and planted slow steps."
    times = []
    for i in range(n):
        level = scale * (1 + drift * i / n)
        if i < WARMUP - 5:
            level *= 1 + 40 * 0.6**i
        deviations = max(-4.0, min(4.0, random.gauss(0, 1)))
        if i in planted:
            deviations = random.uniform(20, 35)
        times.append(level * (1 + noise * deviations))
    return times

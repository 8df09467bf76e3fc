"Checks of roofline. Oracles: torch's FLOP counter on meta tensors, raw events, brute force, a virtual clock."

import bisect
import math
import random
import statistics
from fractions import Fraction

import torch
from torch import nn
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEventAvg
from torch.profiler import ProfilerActivity
from torch.utils.flop_counter import FlopCounterMode

from course_lib import checking as core
from course_lib import models, roofline
from course_lib.checking import yours  # noqa: F401


@core.exercise("roofline.1", "FLOPs and bytes right for six operators of random shapes and types")
def cost(answer):
    for op, x, w in _cost_cases():
        itemsize = random.choice([1, 2, 4, 8])
        a, b = (None if s is None else torch.empty(s, device="meta") for s in (x, w))
        with FlopCounterMode(display=False) as counter:
            out = a.clone() if op == "copy" else getattr(torch, op)(a, -1 if b is None else b)
        flops = {"add": a.numel(), "sum": a.numel(), "softmax": 5 * a.numel(), "copy": 0}
        what = f'cost("{op}", {x}, {w}, {itemsize})'
        got = core.parts(core.call(answer, op, x, w, itemsize), "flops bytes", what)
        want = flops.get(op, counter.get_total_flops())
        moved = itemsize * sum(t.numel() for t in (a, b, out) if t is not None)
        core.require(want == moved or got != [moved, want], f"{what}: the FLOPs come first, then the bytes")
        core.equal(got[0], want, f"FLOPs of {what}", "FLOPs")
        core.equal(got[1], moved, f"bytes of {what}", "bytes")


def _cost_cases():
    for size in (40, 40, 40, 3000):
        (m, k, n), (b, c) = core.ragged(2, size, 3), core.ragged(2, 20, 2)
        yield "matmul", (m, k), (k, n)
        yield "matmul", (b, m, k), (k, n)
        yield "matmul", (b, c, m, k), (k, n)
        yield "matmul", (1, k), (k, n)
        yield "bmm", (b, m, k), (b, k, n)
        yield "bmm", (1, m, k), (1, k, n)
        for x in ((m, k), (b, c, m), (n,)):
            yield from ((op, x, None) for op in ("sum", "softmax", "copy"))
        yield from (("add", (b, c, m), w) for w in ((b, c, m), (m,)))
        yield "add", (n,), (n,)


def _row(key, cpu=0.0, gpu=0.0, kernel=False):
    "A row as `key_averages` has it: own times `cpu` and `gpu` in µs; the totals hold what it called, too."
    row = FunctionEventAvg()
    row.key, row.count, row.device_type = key, 4, DeviceType.CUDA if kernel else DeviceType.CPU
    row.self_cpu_time_total, row.self_device_time_total = cpu, gpu
    row.cpu_time_total, row.device_time_total = 2 * cpu, 1.5 * gpu
    return row


def _gpu_profile():
    "A GPU's rows and their µs by class. Kernels of operators come twice, Inductor's under their own names."
    found = {"contraction": ["mm", "addmm", "bmm"], "normalisation": ["_softmax", "sum"],
             "elementwise": ["add_", "copy_"], "other": ["_reshape_alias", "my_op"]}  # fmt: skip
    left_out = random.choice([*found, None])  # a class of which nothing ran
    want, rows = dict.fromkeys(found, 0.0), [_row("CompiledFunction", 40.0, 70.0), _row("cudaLaunch", 300.0)]
    for kind, name in ((k, n) for k in found.keys() - {left_out} for n in found[k]):
        us = random.uniform(20, 900)
        rows += [_row(f"aten::{name}", random.uniform(5, 50), us), _row(f"k_{name}", gpu=us, kernel=True)]
        want[kind] += us
    if left_out != "normalisation":
        fused, us = "triton_per_fused_add_native_layer_norm_1", random.uniform(20, 900)
        rows += [_row(fused, 3.0, us), _row(fused, gpu=us, kernel=True)]
        want["normalisation"] += us
    random.shuffle(rows)
    return rows, want.values()


def _cpu_profile(steps):
    "A small network's real profile, and its own µs by class from the raw events."
    net = nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.LayerNorm(96), nn.Linear(96, 24), nn.Softmax(-1))
    x = torch.randn(random.randrange(30, 90), 48)
    with roofline.quiet(), torch.profiler.profile(activities=[ProfilerActivity.CPU], acc_events=True) as prof:
        for _ in range(steps):
            net(x).pow(2).sum().backward()
    want = dict.fromkeys((*roofline.CLASSES, "other"), 0.0)
    for event in prof.events():
        if event.name.startswith("aten::"):
            inside = sum(child.time_range.elapsed_us() for child in event.cpu_children)
            want[roofline.op_class(event.name)] += event.time_range.elapsed_us() - inside
    return prof.key_averages(), want.values()


def _near(got, slips):
    "A known slip whose value `got` is, as words."
    return next((f"; that is {w}" for w, v in slips.items() if math.isclose(got, v, rel_tol=1e-6) and v), "")


def _slips(rows, name, gpu):
    "µs of one class by known slips."
    mine, own = [r for r in rows if roofline.op_class(r.key) == name], "self_device_time_total"
    right = [r for r in mine if r.key.startswith(("aten::", "triton_")[r.device_type == DeviceType.CUDA])]
    some = {"every row, and kernels come twice": (mine, own), "host time": (right, "self_cpu_time_total"),
            "without generated kernels": ([r for r in right if r.key[:4] == "aten"], own),
            "with what operators called": (right, f"{'device' if gpu else 'cpu'}_time_total")}  # fmt: skip
    return {words: sum(getattr(r, field) for r in found) for words, (found, field) in some.items()}


@core.exercise("roofline.2", "milliseconds by class right for a real profile of a CPU and 15 of a GPU")
def class_ms(answer):
    names = (*roofline.CLASSES, "other")
    for case in range(16):
        steps = random.choice([2, 3, 5])
        rows, want = _gpu_profile() if case else _cpu_profile(steps)
        what = f"of a {'GPU' if case else 'CPU'}'s profile of {steps} steps"
        got = core.call(answer, rows, steps, case > 0)
        found = sorted(map(str, got)) if isinstance(got, dict) else core.kind(got)
        core.require(found == sorted(names), f"{what}: expected a dict with {', '.join(names)}, got {found}")
        for name, us in zip(names, want, strict=True):
            part, ms = f"milliseconds of {name} {what}", us / 1e3 / steps
            mine = core.number(got[name], part)
            slip = _near(mine * 1e3 * steps, _slips(rows, name, case > 0))
            if not math.isclose(mine, ms, rel_tol=1e-3, abs_tol=1e-6):
                raise core.Wrong(f"{part}: expected {ms:.6g}, got {mine:.6g}{slip}")


def _first_batch(k, n, itemsize, peak_flops, peak_bytes):
    "The smallest batch whose FLOPs take at least as long as its bytes, by search, in exact arithmetic."

    def longer(b):
        return 2 * b * k * n * Fraction(peak_bytes) >= itemsize * (b * k + k * n + b * n) * Fraction(
            peak_flops
        )

    i = bisect.bisect_left(range(1, 1 << 40), True, key=longer)
    return i + 1 if i + 1 < 1 << 40 else None


@core.exercise("roofline.3", "the first batch at the ridge right on 24 machines, None where there is none")
def ridge_batch(answer):
    for case in range(24):
        k, n = core.ragged(1000, 9000, 2)
        ridge, peak_bytes = random.uniform(4, 200), random.uniform(1e10, 5e12)
        itemsize = random.choice([1, 2, 4])
        if case % 8 == 7:  # a thin layer's intensity stays below the ridge, whatever the batch
            k, ridge = random.randrange(2, 9), ridge + 20
        elif case == 0:  # one row is enough
            ridge, itemsize = 0.2, 1
        args = (k, n, itemsize, ridge * peak_bytes, peak_bytes)
        if case == 1:  # FLOPs and bytes take exactly as long: powers of two leave no rounding
            args = (192, 192, 2, 2.0**46, 2.0**40)
        want, got = _first_batch(*args), core.call(answer, *args)
        what = "ridge_batch({}, {}, {}, {:.4g}, {:.4g})".format(*args)
        core.require(got is want or None not in (got, want), f"{what}: expected {want}, got {got}")
        core.equal(got, want, what, "rows")


def _counted(m, batch):
    "FLOPs of a training step of a real transformer by torch's counter."
    net = models.Encoder(m.layers, m.width, random.choice([1, 2, 4]), m.vocab or None, m.ffn, m.seq)
    x = torch.randn(batch, m.seq, m.width, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        net(torch.randint(m.vocab, (batch, m.seq)) if m.vocab else x).sum().backward()
    return counter.get_total_flops()


@core.exercise("roofline.4", "training FLOPs equal torch's count on four real transformers")
def train_flops(answer):
    for case in range(4):
        # No two sizes equal and no feed-forward of four widths: a formula fitted to one habit must not pass.
        layers, batch = core.ragged(1, 6, 2)
        width = random.randrange(8, 33, 4)
        ffn, vocab, seq = (s + width for s in core.ragged(3, 40, 3))
        ffn, vocab = ffn + (ffn == 4 * width), vocab if case else 0  # 0: no head, as in the lesson's encoder
        model = roofline.Transformer(layers, width, ffn, vocab, seq)
        got, want = core.call(answer, model, batch), _counted(model, batch)
        attention = 3 * layers * batch * 2 * (2 * seq * seq * width)
        what = f"train_flops({model}, {batch}), {attention:,} of them in attention"
        core.equal(got, want, what, "FLOPs")


def _causal_flops(model):
    "FLOPs of training on one sequence: every matmul, and the query-key pairs a causal mask lets through."
    m, pairs = model, sum(i + 1 for i in range(model.seq))  # row i of the mask lets i + 1 keys through
    weights = m.layers * (4 * m.width * m.width + m.width * m.ffn + m.ffn * m.width) + m.width * m.vocab
    scores_and_values = m.layers * 2 * m.width * pairs
    return 3 * 2 * (m.seq * weights + scores_and_values)


@core.exercise("roofline.5", "MFU right for six runs with causal attention, and more than 100 % refused")
def mfu(answer):
    for case in range(6):
        layers, width = random.randrange(2, 30), 64 * random.randrange(3, 9)
        ffn, vocab = random.randrange(2, 5) * width + 8, random.randrange(20_000, 90_000)
        # On long sequences attention is a large part; short ones show how many keys a token meets.
        seq = random.randrange(2_000, 4_000) if case % 2 else random.randrange(3, 9)
        model = roofline.Transformer(layers, width, ffn, vocab if case % 2 else seq, seq)
        gpus, dense = random.randrange(2, 3_000) if case else 1, 10 ** random.uniform(11, 15)
        peaks = {"dense": dense, "sparse": 2 * dense}
        want, token = 0.99 if case == 5 else random.uniform(0.15, 0.9), _causal_flops(model) / seq
        rate = want * gpus * dense / token
        what = f"mfu of {model}, causal, at {rate:,.0f} tokens/s, gpus={gpus}, dense peak {dense:.4g}"
        try:
            got = core.number(core.call(answer, model, rate, gpus, dict(peaks)), what)
        except core.Wrong as e:
            if "raised ValueError" not in str(e):
                raise
            raise core.Wrong(f"{what}: expected {want:.4g}, which is possible, got a ValueError") from None
        key = want * 12 * layers * width / token  # MFU of one key for each token
        slip = _near(got, {"the percentage": 100 * want, "attention unmasked": want + key * (seq - 1) / 2,
                           "seq / 2 keys a token": want - key / 2, "by the sparse peak": want / 2,
                           "the rate for one GPU": want * gpus if gpus > 1 else 0})  # fmt: skip
        if not math.isclose(got, want, rel_tol=1e-6):
            raise core.Wrong(f"{what}, a fraction of 1: expected {want:.6g}, got {got:.6g}{slip}")
        core.refuses(answer, model, 1.01 * rate / want, gpus, dict(peaks), why="a run at 101 % of its peak")


@core.exercise("roofline.6", "the stopwatch is right on 12 virtual GPUs with backlog, warm-up and outliers")
def stopwatch(answer):
    # One run leaves no median to hide in; even counts have two middles.
    for warmup, runs in ((1, 1), (2, 1), (0, 3), (3, 2), (1, 5), (4, 8)) * 2:
        launch = random.uniform(2e-6, 2e-5)
        cold = [random.uniform(0.02, 0.4) for _ in range(warmup)]
        warm = [random.uniform(1e-4, 4e-3) for _ in range(runs)]
        if runs >= 5:
            warm[random.randrange(runs)] = random.uniform(0.5, 1.0)  # somebody else used the GPU
        gpu = roofline.VirtualGPU([*cold, *warm, 9.0], launch, backlog=random.uniform(1, 5))
        gpu.now = start = random.uniform(10, 1000)
        gpu.busy_until += start
        got = core.call(answer, gpu.run, gpu.clock, gpu.synchronize, warmup, runs)
        _judge(got, gpu, launch, cold, warm)


def _judge(got, gpu, launch, cold, warm):
    want, what = launch + statistics.median(warm), f"{len(warm)} runs after {len(cold)} to warm up"
    got = core.number(got, what)
    core.equal(gpu.calls, len(cold) + len(warm), f"calls of fn for {what}", "calls")
    if math.isclose(got, want, rel_tol=1e-6):
        return
    slips = {
        "milliseconds": 1e3 * want,
        "the mean, which one outlier can move": launch + statistics.fmean(warm),
    }
    hint = "; expected the median, warm-up left out, each run from an idle GPU to an idle GPU"
    if math.isclose(got, launch, rel_tol=1e-3):
        hint = "; that is the time to queue the call: synchronise before the clock is read again"
    elif got < launch:
        hint = "; the given clock() cannot have shown that: read no other clock"
    elif got > 1.2:
        hint = "; that has earlier work in it: synchronise before the first clock is read"
    raise core.Wrong(f"{what}: expected {want:.6g} s, got {got:.6g} s{_near(got, slips) or hint}")

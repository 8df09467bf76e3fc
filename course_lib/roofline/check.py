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
    for (op, x, w), itemsize in ((c, size) for c in _cost_cases() for size in random.sample([1, 2, 4, 8], 2)):
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
    for size in (40, 40, 3000):
        (m, k, n), (b, c) = core.ragged(2, size, 3), core.ragged(2, 20, 2)
        for rows in ((m,), (b, m), (b, c, m), (b, 2, c, m), (1,)):
            yield "matmul", (*rows, k), (k, n)
        yield from (("bmm", (batch, m, k), (batch, k, n)) for batch in (b, 1))
        for x in ((m, k), (b, c, m), (n,), (b, 2, c, m)):
            yield from ((op, x, None) for op in ("sum", "softmax", "copy"))
            yield from (("add", x, w) for w in (x, x[-1:]))


def _row(key, cpu=0.0, gpu=0.0, kernel=False):
    "A row as `key_averages` has it: own times `cpu` and `gpu` in µs; the totals hold what it called, too."
    row = FunctionEventAvg()
    row.key, row.count, row.device_type = key, 4, DeviceType.CUDA if kernel else DeviceType.CPU
    row.self_cpu_time_total, row.self_device_time_total = cpu, gpu
    row.cpu_time_total, row.device_time_total = 2 * cpu, 1.5 * gpu
    return row


def _gpu_profile():
    "A GPU's rows and their µs by class. Kernels of operators come twice, Inductor's twice or once."
    found = {"contraction": ["mm", "mm", "addmm", "bmm"], "other": ["_reshape_alias", "my_op"],
             "normalisation": ["_softmax", "sum", "triton_per_fused_layer_norm_1", "triton_red_fused_2"],
             "elementwise": ["add_", "copy_"]}  # fmt: skip
    want, rows = dict.fromkeys((*roofline.CLASSES, "other"), 0.0), [_row("CompiledFunction", 40.0, 70.0)]
    rows += [_row("record::aten::mm", 9.0, 90.0), _row("my_triton_add", gpu=80.0, kernel=True)]
    rows += [_row("aten::mm", gpu=70.0, kernel=True)]  # a range on the GPU that somebody named so
    for kind in found.keys() - {random.choice([*found, None])}:  # one class may be without operators
        for name in found[kind]:
            us, own = random.uniform(20, 900) * (name != "my_op"), name.startswith("triton_")
            host, kernel = (name, name) if own else (f"aten::{name}", f"kernel_{name}")
            rows += [_row(host, random.uniform(5, 50), us)] * (name != "triton_red_fused_2")
            rows += [_row(kernel, gpu=us, kernel=True)]
            want[kind] += us
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
    own, mine = "self_device_time_total", [r for r in rows if roofline.op_class(r.key) == name]
    right = [r for r in mine if r.key.startswith(("aten::", "triton_")[r.device_type == DeviceType.CUDA])]
    some = {"every row, and kernels come twice": (mine, own), "host time": (right, "self_cpu_time_total"),
            "with what operators called": (right, f"{'device' if gpu else 'cpu'}_time_total")}  # fmt: skip
    return {words: sum(getattr(r, field) for r in found) for words, (found, field) in some.items()}


@core.exercise("roofline.2", "milliseconds by class right for a real profile of a CPU and 15 of a GPU")
def class_ms(answer):
    for case, names in enumerate([(*roofline.CLASSES, "other")] * 16):
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
    ridge, weights = Fraction(peak_flops) / Fraction(peak_bytes), k * n
    moved = lambda b: itemsize * (b * k + weights + b * n)  # noqa: E731
    i = bisect.bisect_left(range(1, 1 << 40), True, key=lambda b: 2 * b * weights >= moved(b) * ridge)
    return i + 1 if i + 1 < 1 << 40 else None


@core.exercise("roofline.3", "the first batch at the ridge right on 24 machines, None where there is none")
def ridge_batch(answer):
    for case in range(24):
        k, n = core.ragged(1000, 9000, 2)
        ridge, peak_bytes = random.uniform(4, 200), random.uniform(1e10, 5e12)
        itemsize = random.choice([1, 2, 4])
        if case % 8 == 7:  # a thin layer's intensity stays below the ridge, whatever the batch
            k, ridge = random.randrange(2, 9), ridge + 20
            k, n = (k, n) if case < 16 else (n, k)
        elif case % 8 == 6:  # a little below the limit: very many rows
            ridge = random.uniform(0.994, 0.997) * 2 * k * n / (itemsize * (k + n))
        elif case == 0:  # one row is enough
            ridge, itemsize = 0.2, 1
        elif case < 4:  # exactly as long at 2^10 rows, at no batch, at one row; no rounding in powers of two
            k = n = 2 ** (1 if case == 3 else 11)
            ridge, itemsize, peak_bytes = k / (2 if case == 2 else 4), 2, 2.0**40
        args = (k, n, itemsize, ridge * peak_bytes, peak_bytes)
        want, got = _first_batch(*args), core.call(answer, *args)
        what = "ridge_batch({}, {}, {}, {:.4g}, {:.4g})".format(*args)
        core.require(got is want or None not in (got, want), f"{what}: expected {want}, got {got}")
        core.equal(got, want, what, "rows")
        core.require(got is None or hasattr(got, "__index__"), f"{what}: expected an int, got {got!r}")


def _counted(m, batch):
    "FLOPs of a training step of a real transformer by torch's counter."
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        net = models.Encoder(m.layers, m.width, random.choice([1, 2, 4]), m.vocab or None, m.ffn, m.seq)
        x = torch.randn(batch, m.seq, m.width, requires_grad=True)
        net(torch.randint(m.vocab, (batch, m.seq)) if m.vocab else x).sum().backward()
    return counter.get_total_flops()


@core.exercise("roofline.4", "training FLOPs equal torch's count on five real transformers")
def train_flops(answer):
    for case in range(5):
        # No two sizes equal and no feed-forward of four widths: a formula fitted to one habit must not pass.
        layers, batch = core.ragged(1, 6, 2)
        width = random.randrange(8, 33, 4) if case < 4 else 2000
        ffn, vocab, seq = (s + width for s in core.ragged(3, 40, 3))
        ffn, vocab = ffn + (ffn == 4 * width), vocab if case else 0  # 0: no head, as in the lesson's encoder
        model = roofline.Transformer(layers, width, ffn, vocab, seq)
        for n, want in ((batch, total := _counted(model, batch)), (batch + 1, total // batch * (batch + 1))):
            inside = f"{12 * layers * n * seq * seq * width:,} of them in attention"
            core.equal(core.call(answer, model, n), want, f"train_flops({model}, {n}), {inside}", "FLOPs")


def _causal_flops(model):
    "FLOPs of training on one sequence: every matmul, and the query-key pairs a causal mask lets through."
    m, pairs = model, sum(i + 1 for i in range(model.seq))  # row i of the mask lets i + 1 keys through
    weights = m.layers * (4 * m.width * m.width + m.width * m.ffn + m.ffn * m.width) + m.width * m.vocab
    return 3 * 2 * (m.seq * weights + m.layers * 2 * m.width * pairs)


@core.exercise("roofline.5", "MFU right for six runs with causal attention, and more than 100 % refused")
def mfu(answer):
    for case in range(6):
        layers, width = random.randrange(2, 30), 64 * random.randrange(3, 9)
        ffn, vocab = random.randrange(2, 5) * width + 8, random.randrange(20_000, 90_000)
        seq = random.randrange(2_000, 4_000, 2) if case % 2 else random.randrange(3, 10, 2)
        model = roofline.Transformer(layers, width, ffn, vocab if case % 2 else seq, seq)
        gpus, dense = random.randrange(2, 3_000) if case % 4 else 1, 10 ** random.uniform(11, 15)
        want, token = 0.99 if case == 5 else random.uniform(0.15, 0.9), _causal_flops(model) / seq
        rate = want * gpus * dense / token
        if case == 4:  # exactly the peak, which is possible
            want, rate, dense = 1.0, 2.0**20, 2.0**20 * token
        peaks = dict(random.sample([("sparse", random.uniform(1.7, 2.3) * dense), ("dense", dense)], 2))
        what = f"mfu of {model}, causal, at {rate:,.0f} tokens/s, gpus={gpus}, dense peak {dense:.4g}"
        try:
            got = core.number(core.call(answer, model, rate, gpus, dict(peaks)), what)
        except core.Wrong as e:
            if not isinstance(e.cause, ValueError):
                raise
            raise core.Wrong(f"{what}: expected {want:.4g}, which is possible, got a ValueError") from None
        key = want * 12 * layers * width / token  # MFU of one key for each token
        slip = _near(got, {"the percentage": 100 * want, "attention unmasked": want + key * (seq - 1) / 2,
                           "seq / 2 keys a token": want - key / 2, "the rate for one GPU": want * gpus,
                           "of the sparse peak": want * dense / peaks["sparse"]})  # fmt: skip
        if not math.isclose(got, want, rel_tol=1e-6):
            raise core.Wrong(f"{what}, a fraction of 1: expected {want:.6g}, got {got:.6g}{slip}")
        over = 1.002 * rate / want
        core.refuses(answer, model, over, gpus, dict(peaks), why="a run at 100.2 % of its peak")


@core.exercise("roofline.6", "the stopwatch is right on 14 virtual GPUs with backlog, warm-up and outliers")
def stopwatch(answer):
    for warmup, runs in ((1, 1), (2, 1), (0, 3), (3, 2), (1, 5), (4, 8), (0, 1)) * 2:
        launch = random.uniform(2e-6, 2e-5)
        cold = [random.uniform(0.02, 0.4) for _ in range(warmup)]
        warm = [random.uniform(1e-4, 4e-3) for _ in range(runs)]
        if runs >= 5:
            warm[random.randrange(runs)] = random.uniform(0.5, 1.0)  # somebody else used the GPU
        gpu = roofline.VirtualGPU([*cold, *warm, 9.0], launch, backlog=random.uniform(1, 5))
        gpu.now = random.uniform(10, 1000)
        gpu.busy_until += gpu.now
        got = core.call(answer, gpu.run, gpu.clock, gpu.synchronize, warmup, runs)
        _judge(got, gpu, launch, cold, warm)


def _judge(got, gpu, launch, cold, warm):
    want, what = launch + statistics.median(warm), f"stopwatch with warmup={len(cold)}, runs={len(warm)}"
    got = core.number(got, what)
    core.equal(gpu.calls, len(cold) + len(warm), f"calls of fn for {what}", "calls")
    if math.isclose(got, want, rel_tol=1e-6, abs_tol=3e-9):  # a clock may be read in whole nanoseconds
        return
    slips = {"milliseconds": 1e3 * want - launch, "the mean, which one outlier moves": statistics.fmean(warm),
             "the lower middle run": statistics.median_low(warm), "the fastest run": min(warm)}  # fmt: skip
    hint = "; expected the median, warm-up left out, each run from an idle GPU to an idle GPU"
    if math.isclose(got, launch, rel_tol=1e-3):
        hint = "; that is the time to queue the call: synchronise before the clock is read again"
    elif got < launch:
        hint = "; the given clock() cannot have shown that: read no other clock"
    elif got > 1.2:
        hint = "; that has earlier work in it: synchronise before the first clock is read"
    raise core.Wrong(f"{what}: expected {want:.6g} s, got {got:.6g} s{_near(got - launch, slips) or hint}")

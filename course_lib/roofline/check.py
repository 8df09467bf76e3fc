"Checks of roofline. Oracles: the sizes of real tensors, torch's FLOP counter, a ruler, a virtual clock."

import math
import random
import statistics

import torch
from torch import nn
from torch.nn import functional as F

from course_lib import checking as core
from course_lib import roofline
from course_lib.checking import yours  # noqa: F401


def _parts(got, what, names):
    "`got` as a list of as many parts as `names`, or `Wrong`."
    if not isinstance(got, list | tuple) or len(got) != len(names):
        size = f" of {len(got)}" if isinstance(got, list | tuple) else ""
        raise core.Wrong(f"{what}: expected a tuple ({', '.join(names)}), got {core.kind(got)}{size}")
    return list(got)


def _ragged(low, high, n):
    "`n` different numbers."
    return random.sample(range(low, high), n)


# --- roofline.1 ---------------------------------------------------------------------------

_RUN = {
    "matmul": lambda x, w: x @ w,
    "bmm": torch.bmm,
    "add": lambda x, w: x + w,
    "sum": lambda x, w: x.sum(-1),
    "copy": lambda x, w: x.clone(),
}


@core.exercise("roofline.1", "FLOPs and bytes right for five operators of random shapes and types")
def cost(answer):
    for op, x, w in _cost_cases():
        dtype = random.choice([torch.float64, torch.float32, torch.bfloat16])
        a = torch.zeros(x, dtype=dtype)
        b = None if w is None else torch.zeros(w, dtype=dtype)
        out = _RUN[op](a, b)
        what = f'cost("{op}", {x}, {w}, {dtype.itemsize})'
        got = _parts(core.call(answer, op, x, w, dtype.itemsize), what, ("flops", "bytes"))
        core.equal(got[0], _flops(op, a, b, out), f"FLOPs of {what}", "FLOPs")
        moved = a.nbytes + (0 if b is None else b.nbytes) + out.nbytes
        core.equal(got[1], moved, f"bytes of {what}", "bytes")


def _flops(op, a, b, out):
    # A product of ones counts its own multiply-adds: each element of it is k.
    if op in ("matmul", "bmm"):
        return 2 * int(_RUN[op](torch.ones(a.shape), torch.ones(b.shape)).double().sum())
    return {"add": out.numel(), "sum": a.numel(), "copy": 0}[op]


def _cost_cases():
    for _ in range(4):
        m, k, n, b, c = _ragged(2, 40, 5)
        yield "matmul", (m, k), (k, n)
        yield "matmul", (b, m, k), (k, n)
        yield "matmul", (b, c, m, k), (k, n)
        yield "bmm", (b, m, k), (b, k, n)
        yield "add", (m, k), (m, k)
        yield "add", (b, m, k), (k,)
        yield "sum", (m, k), None
        yield "sum", (b, m, k), None
        yield "copy", (m, k), None
        yield "copy", (b, c, m), None


# --- roofline.2 ---------------------------------------------------------------------------


@core.exercise("roofline.2", "intensity, rate, time and roof right on 40 random machines, copies among them")
def roof(answer):
    for case in range(40):
        peak_flops = 10 ** random.uniform(10, 15)
        peak_bytes = 10 ** random.uniform(9.5, 12.8)
        ridge = peak_flops / peak_bytes
        nbytes = random.randrange(10**3, 10**9)
        # Well off the ridge on either side, so that the roof that binds is never a matter of rounding.
        side = random.choice([-1, 1])
        flops = (
            0 if case % 8 == 0 else max(1, round(nbytes * ridge * 10 ** (side * random.uniform(0.1, 2.5))))
        )
        what = f"roof({flops}, {nbytes}, {peak_flops:.3g}, {peak_bytes:.3g})"
        got = core.call(answer, flops, nbytes, peak_flops, peak_bytes)
        intensity, rate, seconds, bound = _parts(got, what, ("intensity", "rate", "seconds", "bound"))
        compute, memory = flops / peak_flops, nbytes / peak_bytes
        core.close(intensity, flops / nbytes, f"intensity of {what}", atol=0)
        core.close(seconds, compute if compute > memory else memory, f"seconds of {what}", atol=0)
        # FLOPs over the least time: neither roof is passed, and one is reached.
        core.close(rate, flops / max(compute, memory), f"rate of {what}", atol=0)
        core.equal(bound, "compute" if compute > memory else "memory", f"bound of {what}")


# --- roofline.3 ---------------------------------------------------------------------------


class _Real(nn.Module):
    "A transformer run for its count alone: embedding, fused attention, feed-forward, head."

    def __init__(self, model, heads):
        super().__init__()
        w, self.heads = model.width, heads
        self.embed = nn.Embedding(model.vocab, w)
        self.qkv = nn.ModuleList(nn.Linear(w, 3 * w) for _ in range(model.layers))
        self.out = nn.ModuleList(nn.Linear(w, w) for _ in range(model.layers))
        self.up = nn.ModuleList(nn.Linear(w, model.ffn) for _ in range(model.layers))
        self.down = nn.ModuleList(nn.Linear(model.ffn, w) for _ in range(model.layers))
        self.head = nn.Linear(w, model.vocab)

    def forward(self, ids):
        x = self.embed(ids)
        for qkv, out, up, down in zip(self.qkv, self.out, self.up, self.down, strict=True):
            q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in qkv(x).chunk(3, dim=-1))
            x = x + out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
            x = x + down(F.gelu(up(x)))
        return self.head(x)


def _counted(model, batch):
    "FLOPs of a training step by torch's counter; under MATH, for fused attention on a CPU counts as 0."
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    net = _Real(model, random.choice([1, 2, 4]))
    ids = torch.randint(model.vocab, (batch, model.seq))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        net(ids).sum().backward()
    return counter.get_total_flops()


@core.exercise("roofline.3", "training FLOPs equal torch's count on four real transformers")
def train_flops(answer):
    for _ in range(4):
        # No two sizes equal and no feed-forward of four widths: a formula fitted to one habit must not pass.
        layers, batch = _ragged(1, 6, 2)
        width = random.randrange(8, 33, 4)
        ffn, vocab, seq = (s + width for s in _ragged(3, 40, 3))
        if ffn == 4 * width:
            ffn += 1
        model = roofline.Transformer(layers, width, ffn, vocab, seq)
        got = core.number(core.call(answer, model, batch), f"train_flops({model}, {batch})")
        core.equal(got, _counted(model, batch), f"train_flops({model}, {batch})", "FLOPs")


# --- roofline.4 ---------------------------------------------------------------------------


def _causal_flops(model):
    "FLOPs of training on one sequence: every matmul, and the query-key pairs a causal mask lets through."
    pairs = sum(i + 1 for i in range(model.seq))  # row i of the mask lets i + 1 keys through
    forward = 0
    for fan_in, fan_out in ((model.width, model.width),) * 4 + ((model.width, model.ffn),) * 2:
        forward += model.layers * 2 * fan_in * fan_out * model.seq
    forward += 2 * model.width * model.vocab * model.seq
    forward += model.layers * 2 * (2 * model.width * pairs)  # scores, then the weighted sum of values
    return 3 * forward


@core.exercise("roofline.4", "MFU right for six runs with causal attention, and more than 100 % refused")
def mfu(answer):
    for case in range(6):
        layers, width = random.randrange(2, 30), 64 * random.randrange(3, 9)
        # Long sequences on narrow models: attention is a large part, and counting it whole shows.
        ffn, vocab = random.randrange(2, 5) * width + 8, random.randrange(20_000, 90_000)
        seq = random.randrange(2_000, 4_000)
        model = roofline.Transformer(layers, width, ffn, vocab, seq)
        gpus = random.randrange(2, 3_000)
        dense = 10 ** random.uniform(13.5, 15)
        peaks = {"dense": dense, "sparse": 2 * dense}
        want = 0.99 if case == 5 else random.uniform(0.15, 0.9)
        rate = want * gpus * dense / (_causal_flops(model) / model.seq)
        what = f"mfu of {model} at {rate:,.0f} tokens/s on {gpus} GPUs"
        got = core.number(core.call(answer, model, rate, gpus, dict(peaks)), what)
        if math.isclose(got, 100 * want, rel_tol=0.01):
            raise core.Wrong(f"{what}: expected a fraction of 1, got {got:.4g}: that is the percentage")
        # Both (seq + 1) / 2 and seq / 2 keys for a token are in use; they differ by less than this.
        core.close(got, want, what, rtol=1e-3, atol=0)
        _refuses(answer, model, 1.01 * rate / want, gpus, peaks)


def _refuses(answer, model, rate, gpus, peaks):
    try:
        got = core.call(answer, model, rate, gpus, dict(peaks))
    except core.Wrong as e:
        # `core.call` words what the answer raised; a ValueError is what the exercise asks for.
        if "raised ValueError" in str(e):
            return
        raise
    shown = f"{got:.3g}" if isinstance(got, int | float) else core.kind(got)
    raise core.Wrong(
        "a run at 101 % of the dense peak: expected a ValueError, for no machine passes its peak, "
        f"got {shown}"
    )


# --- roofline.5 ---------------------------------------------------------------------------


TICK = 0.25  # times are multiples of it, in µs, so that sums are exact and no ruler of whole µs fits


def _small_profile():
    "Two streams that overlap in part, small enough to be shown in a message."
    a, b, c = (random.randrange(8, 36) * TICK for _ in range(3))
    events = [
        roofline.Event(0, a, "cpu", "launch"),
        roofline.Event(a, b + c, "stream 7", "memory"),
        roofline.Event(a + b, 2 * c, "stream 20", "compute"),
        roofline.Event(a + b + 2 * c + 3, b, "stream 7", "memory"),
    ]
    random.shuffle(events)
    return events


def _random_profile(streams):
    "Events out of order: a host that starts first and ends last, streams that overlap each other."
    events = [roofline.Event(random.randrange(3), random.randrange(2, 6), "cpu", "launch")]
    for lane in streams:
        t = random.randrange(6, 14)
        for _ in range(random.randrange(3, 9)):
            d = random.randrange(1, 12)
            events.append(roofline.Event(t, d, lane, random.choice(["compute", "memory"])))
            t += d + random.choice([0, 0, random.randrange(1, 9)])
    end = max(e.start + e.duration for e in events)
    # The host works on under busy streams and past the last kernel: idle time at both ends is overhead too.
    for _ in range(4):
        events.append(roofline.Event(random.randrange(end), random.randrange(1, 5), "cpu", "launch"))
    events.append(roofline.Event(end - 1, random.randrange(3, 9), "cpu", "launch"))
    random.shuffle(events)
    return [e._replace(start=e.start * TICK, duration=e.duration * TICK) for e in events]


def _ruler(events):
    "The buckets, by colouring a ruler tick by tick."
    spans = [(round(e.start / TICK), round((e.start + e.duration) / TICK), e) for e in events]
    first = min(start for start, _, _ in spans)
    ruler = ["overhead"] * (max(end for _, end, _ in spans) - first)
    for kind in ("memory", "compute"):  # compute is painted last, over memory
        for start, end, e in spans:
            if e.lane != "cpu" and e.kind == kind:
                ruler[start - first : end - first] = [kind] * (end - start)
    return {k: ruler.count(k) * TICK for k in ("compute", "memory", "overhead")}


@core.exercise("roofline.5", "three buckets right for 33 profiles of up to three streams")
def buckets(answer):
    for _ in range(3):
        events = _small_profile()
        shown = ", ".join(f"{e.lane} {e.kind} {e.start:g}-{e.start + e.duration:g}" for e in events)
        _one_profile(answer, events, f"the profile ({shown})")
    for case in range(30):
        streams = [f"stream {i}" for i in random.sample(range(3, 30), 1 + case % 3)]
        events = _random_profile(streams)
        if case % 3 == 0:  # a profile need not start at zero
            shift = random.randrange(1, 1000)
            events = [e._replace(start=e.start + shift) for e in events]
        if case == 29:
            events = [e for e in events if e.lane == "cpu"]
        gpu = f"{1 + case % 3} streams" if case < 29 else "a GPU that did nothing"
        _one_profile(answer, events, f"a profile of {len(events)} events on {gpu}")


def _one_profile(answer, events, what):
    want = _ruler(events)
    got = core.call(answer, events)
    if not isinstance(got, dict) or set(got) != set(want):
        found = sorted(map(str, got)) if isinstance(got, dict) else core.kind(got)
        raise core.Wrong(f"{what}: expected a dict with compute, memory and overhead, got {found}")
    for name, value in want.items():
        core.close(got[name], value, f"{name} time of {what}")


# --- roofline.6 ---------------------------------------------------------------------------


@core.exercise("roofline.6", "the stopwatch is right on 12 virtual GPUs with backlog, warm-up and outliers")
def stopwatch(answer):
    # One run leaves no median to hide in; even counts have two middles.
    for warmup, runs in ((1, 1), (2, 1), (3, 2), (1, 5), (4, 8), (2, 11)) * 2:
        launch = random.uniform(2e-6, 2e-5)
        cold = [random.uniform(0.02, 0.4) for _ in range(warmup)]
        warm = [random.uniform(1e-4, 4e-3) for _ in range(runs)]
        if runs >= 5:
            warm[random.randrange(runs)] = random.uniform(0.5, 1.0)  # somebody else used the GPU
        gpu = roofline.VirtualGPU([*cold, *warm, 9.0], launch, backlog=random.uniform(1, 5))
        gpu.now = gpu_start = random.uniform(10, 1000)
        gpu.busy_until += gpu_start
        got = core.call(answer, gpu.run, gpu.clock, gpu.synchronize, warmup, runs)
        _judge(got, gpu, launch, cold, warm)


def _judge(got, gpu, launch, cold, warm):
    want = launch + statistics.median(warm)
    what = f"{len(warm)} runs after {len(cold)} to warm up"
    got = core.number(got, what)
    core.equal(gpu.calls, len(cold) + len(warm), f"calls of fn for {what}", "calls")
    if math.isclose(got, want, rel_tol=1e-6):
        return
    if got < 2 * launch:
        hint = "that is the time to queue the call: synchronise before the clock is read again"
    elif got > 1.2:
        hint = "that has earlier work in it: synchronise before the first clock is read"
    elif math.isclose(got, launch + statistics.fmean(warm), rel_tol=1e-6):
        hint = "that is the mean, which one outlier can move"
    elif math.isclose(got, 1e3 * want, rel_tol=1e-6):
        hint = "that is milliseconds"
    else:
        hint = "expected the median over the runs, warm-up left out, each from an idle GPU to an idle GPU"
    raise core.Wrong(f"{what}: expected {want:.6g} s, got {got:.6g} s; {hint}")

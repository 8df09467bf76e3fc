"Checks of syncs. Oracles: a plain loop, a GPU that stops, traces built around their gaps, planted steps."

import gc
import itertools
import math
import random
import re
import threading
import time
import weakref
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F

from course_lib import checking as core
from course_lib import syncs
from course_lib.checking import yours  # noqa: F401


def _no_sync(counts, unknown, during):
    "Require that nothing waits, and that every operator is one of which that is known."
    places = list(zip(counts.where, counts.code, strict=True))
    if places:
        where, code = max(dict.fromkeys(places), key=places.count)  # of equals the first
        times = f"{len(places)} times in {during}, {places.count((where, code))} of them at {where}"
        raise core.Wrong(f"Python waits {times}" + (f" in `{code[:90]}`" if code else ""))
    names = ", ".join(unknown)
    core.require(not unknown, f"{during}: nobody knows whether operator {names} waits; use one that goes on")


def _bools(said):
    "Require each to be True or False; NumPy's are called bool or bool_."
    odd = [s for s in said if type(s).__name__ not in ("bool", "bool_")]
    core.require(not odd, f"expected True or False, got {core.kind((odd or said)[0])}")
    return said


def _no_copy(answer, *args, least=1, over=()):
    "Require that new tensors are made where the inputs are, and fewer than `least` in ordinary memory."
    copies, error = syncs.on_meta(answer, *args)
    if error and "out of meta" in error:
        copied = "a tensor is copied from the device to ordinary memory: each such copy waits on a GPU"
        core.require(over, copied)
        error = None
    core.require(not error, f"on a GPU this raises an error; give each new tensor `device=x.device`: {error}")
    core.require(copies < least, f"{copies} copies from ordinary memory to the device: each waits on a GPU")


def _plain_loop(model, batches):
    "The loop of syncs.1 as its text describes it, reading whatever it likes: its results, and its losses."
    losses, right, hardest, guesses = [], 0, [], [0] * model[-1].out_features
    for x, y in batches:
        rows, logits = y.ge(0).nonzero().flatten(), model(x)
        each = F.cross_entropy(logits[rows], y[rows], reduction="none")
        grads = torch.autograd.grad(each.mean(), list(model.parameters()))
        norm = math.sqrt(sum((g.double() ** 2).sum().item() for g in grads))
        with torch.no_grad():
            for p, g in zip(model.parameters(), grads, strict=True):
                p -= 0.3 * g / max(1.0, norm)
        for label, guess in zip(y.tolist(), logits.argmax(1).tolist(), strict=True):
            guesses[guess] += 1
            right += guess == label
        hardest.append(x[rows[each.argmax()]])
        losses.append(each.mean().item())
    return {"best": min(losses), "guesses": guesses, "hardest": torch.stack(hardest), "right": right}, losses


@core.exercise("syncs.1", "no sync before the last step, and all seven results are those of the slow loop")
def train(answer):
    # torch's own one_hot reads its input, and does so on a CPU alone.
    one_hot = mock.patch.object(F, "one_hot", lambda i, n: (i[..., None] == torch.arange(n)).long())
    no_thread = mock.patch.object(threading.Thread, "start", side_effect=core.Wrong("start no thread"))
    for mode, every in zip((False, True, True), random.sample((2, 3, 4, 5), 3), strict=True):
        sizes, batches, logged, seen = core.ragged(4, 12, 3), [], [], []
        model, twin = (nn.Sequential(nn.Linear(*sizes[:2]), nn.Tanh(), nn.Linear(*sizes[1:])) for _ in "ab")
        twin.load_state_dict(model.state_dict())
        for i in range(13):  # clipped and not; the first and the last have a large loss
            y = torch.randint(sizes[2], (random.randrange(7, 14),))
            y[torch.randperm(len(y))[: random.randrange(len(y) // 3, len(y) - 2)]] = -1
            batches.append((torch.randn(len(y), sizes[0]) * (0.1, 8.0)[i % 3 == 0], y))
        model.train(mode)

        def feed(batches=batches, weight=model[0].weight, seen=seen):
            version, alive = -1, []
            for i, batch in enumerate(batches):
                core.require(weight._version > version, f"batch {i + 1} was taken before step {i} was over")
                version, batch = weight._version, core.clone(batch)
                alive.append(weakref.ref(batch[0]))
                yield batch
                core.require(not any(t._version for t in batch), f"batch {i} was changed in place")
            seen += len(counts.where), sum(x() is not None for x in alive)

        want, losses = _plain_loop(twin, batches)
        with syncs.counting() as (counts, unknown), one_hot, no_thread:
            opt = torch.optim.SGD(model.parameters(), 0.3, foreach=False)
            got = core.call(answer, model, opt, feed(), logged.append, every)
        core.require(seen, "not all of the 13 batches were used")
        counts.where, counts.code = counts.where[: seen[0]], counts.code[: seen[0]]
        _no_sync(counts, unknown, "13 steps")
        core.require(seen[1] <= 3, f"{seen[1]} of 13 batches are kept until the end: keep none")
        left = f"model.training was {mode} and is {model.training} now: leave it"
        core.require(model.training == mode, left)
        found = sorted(map(str, got)) if isinstance(got, dict) else core.kind(got)
        core.require(found == sorted(want), f"expected a dict with {sorted(want)}, got {found}")
        lines = {s: loss for s, loss in enumerate(losses) if s % every == 0}
        said = [re.fullmatch(r"step (\d+): loss (-?[\d.]+)", str(line)) for line in logged]
        wanted = f"`step 0: loss 1.2345` and so on for the steps {list(lines)}, in order"
        same = [m and int(m[1]) for m in said] == list(lines)
        core.require(same, f"log got {len(logged)} lines, {str(logged[:2])[:60]}: expected {wanted}")
        pairs = [(float(m[2]), lines[int(m[1])], f"loss of step {m[1]}") for m in said]
        pairs.append((got["best"], want["best"], '"best", the lowest loss'))
        pairs += zip(model.parameters(), twin.parameters(), itertools.repeat("weights"))
        for mine, right, what in pairs:
            core.close(mine, right, what, rtol=2e-3, atol=2e-4)
        core.equal(torch.as_tensor(got["guesses"]).tolist(), want["guesses"], '"guesses" of each class')
        core.equal(got["right"], want["right"], '"right", the labels guessed right')
        core.close(got["hardest"], want["hardest"], '"hardest", one sample for each step', rtol=0, atol=0)
    opt = torch.optim.SGD(model.to("meta").parameters(), 0.3, foreach=False)
    on_device, over = [(x.to("meta"), y.to("meta")) for x, y in batches], []

    def last_feed():
        yield from on_device
        over.append(True)  # now anything may be read

    _no_copy(answer, model, opt, last_feed(), str, 2, least=13, over=over)


def _cpu(seconds):
    "Seconds that the CPUs work for this process while this thread sleeps."
    start = time.process_time()
    time.sleep(seconds)
    return time.process_time() - start


def _slowdown():
    "Seconds that pass while this thread computes for one: more on a busy machine."
    began, end = time.perf_counter(), time.thread_time() + 0.05
    while time.thread_time() < end:
        pass
    return max(1.0, 20 * (time.perf_counter() - began))


class _GPU:
    "A GPU that does nothing until `going` is set, and the `fetch` of syncs.2 on it."

    def __init__(self, values):
        self.values, self.going, self.trouble, self.losses = values, threading.Event(), None, []

    def fetch(self, loss):
        if threading.current_thread() is not self.thread:
            self.trouble = "fetch was called on another thread: start the copy in the call itself"
        self.losses.append(weakref.ref(loss))
        number = (self.values * 2)[len(self.losses) - 1]
        methods = {"wait": lambda _: self.going.wait(20), "read": lambda _: self.read(number)}
        return type("Copy", (), methods)()

    def read(self, number):
        if not self.going.is_set():
            self.trouble = "a copy was read before it was waited for"
        return number if self.going.is_set() else 0.0


def _one_watch(answer, gpu, within, bad, slow):
    gpu.thread, before, told, n = threading.current_thread(), set(threading.enumerate()), [], len(gpu.values)
    late, idle = 1.3 * slow if n == 3 or bad == within else 0.05, 0.2 * slow * (within == 2)
    before_it = _cpu(idle)
    with syncs.counting() as (counts, unknown):
        watch = core.call(answer, gpu.fetch, within, mutates=(0, 1))
        torch.zeros((), requires_grad=True) * 1.0  # the first time is slow: before the clock starts
        rescue = threading.Timer(3 * slow, gpu.going.set)
        rescue.start()
        busy = time.thread_time()
        for i, value in enumerate(gpu.values, 1):
            if i == within:  # the calls before had to return while the GPU was stopped
                core.require(not gpu.going.is_set(), f"one of the first {i - 1} calls waited for the GPU")
                threading.Timer(late, gpu.going.set).start()
            told.append(watch(torch.full((), value, requires_grad=True) * 1.0))
            early = f"call {i} returned while the GPU had done nothing: wait, or a bad loss is told too late"
            core.require(i <= within or gpu.going.is_set(), gpu.trouble or early)
        busy = time.thread_time() - busy
        used = _cpu(idle)  # here everything has been read
    threading.Timer(late, gpu.going.set).start()
    told = _bools([*told, watch.finish()])
    rescue.cancel()
    _no_sync(counts, unknown, f"{n} calls")
    core.require(gpu.trouble is None, gpu.trouble)
    core.equal(len(gpu.losses), n, f"copies that {n} calls start")
    for i, said in enumerate(told[:-1], 1):
        core.require(not said or i >= bad, f"call {i} said True")
        ok = said or (i < bad + within and not any(told[:i]))
        core.require(ok, f"call {i} said False, and True is due")
    core.equal(bool(told[-1]), bad <= n, "finish()")
    alive = sum(loss() is not None for loss in gpu.losses)
    core.require(alive == 0, f"{alive} of {n} losses are kept after finish(), with their graphs: keep none")
    core.require(used < before_it + 0.05, "its thread doesn't sleep where there is nothing to do")
    core.require(busy < 0.2, "a call that waits keeps a CPU busy: let it sleep")
    time.sleep(0.01)
    left = {t for t in set(threading.enumerate()) - before if not isinstance(t, threading.Timer)}
    core.require(not left, "the watch's thread still runs after finish()")


@core.exercise("syncs.2", "told in time, no false alarm, no wait before it is due, and the thread ends")
def nan_watch(answer):
    core.need_callable(answer, "a class")
    slow = _slowdown()
    cases = [(2, 2), (3, 1), (random.randrange(4, 9), random.randrange(3, 20)), (5, 3), (4, 99), (10, 4)]
    numbers = -math.inf, math.nan, math.inf, math.nan, None, math.nan
    for (within, bad), number in zip(cases, numbers, strict=True):
        # Three or ten calls are over before the GPU has done anything; after the ten the queue is full.
        n = {5: 3, 10: 10}.get(within, 44)
        gpu, out = _GPU([random.choice([0.0, -2.5, 1e30, 3.25]) for _ in range(n)]), []
        gpu.values[bad - 1 : bad] = [number] * (bad <= n)

        def run(args=(answer, gpu, within, bad, slow), out=out):
            try:
                out.append(_one_watch(*args))
            except BaseException as e:
                out.append(e)

        (thread := threading.Thread(target=run, daemon=True)).start()
        thread.join(8 * slow)
        where = f"within = {within}, " + (f"bad loss in call {bad} of {n}" if bad <= n else "no bad loss")
        core.require(out, f"{where}: call {len(gpu.losses)} or finish() never returned")
        if e := out[0]:
            said = str(e) if isinstance(e, core.Wrong) else f"the watch raised {core.describe(e)}"
            raise e if core._is_stub(e) else core.Wrong(f"{where}: {said}")


def _event(cat, name, start, end, tid=1, pid=71):
    when = {"ts": start / 2, "dur": (end - start) / 2}
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, **when}


WAITING = ("aten::item", "aten::index", "cudaEventSynchronize", "cuStreamSynchronize", "late", "busy")


def _host(kind, end, gap):
    "What the host does as a gap begins at `end`: events, and the cause that they make."
    a, b = end - random.randrange(2, 8), end + random.randrange(1, gap - 2)
    if "Synchronize" in kind:  # an operator that begins within the wait is not around it
        cat = "cuda_driver" if kind.startswith("cuS") else "cuda_runtime"
        return [_event(cat, kind, a, b), _event("cpu_op", "aten::mul", end, b)], kind
    around = [_event("cpu_op", "aten::inner", a - 1, b), _event("cpu_op", kind, a - 2, b + 1)]
    name = "cudaSynchronizeLater" if kind == "busy" else "cudaStreamSynchronize"
    around.append(_event("cuda_runtime", name, end + 1 if kind == "late" else a, b))
    return around, None if kind in ("late", "busy") else kind


def _trace(case):
    "A trace built block by block around its gaps, the largest gap, and the busy times in words."
    streams, gaps = random.sample(range(7, 40), 1 + case % 3), random.sample(range(6, 60), case % 4 + 1)
    t, events, busy, want = random.randrange(5, 40), [], [], None
    for gap in [*gaps, 0]:
        end = t + random.randrange(24, 60)
        cut = random.randrange(t + 1, end)
        side = [(a, a + 2) for a in random.sample(range(t, end - 2), len(streams) - 1)]  # under a longer one
        for a, b in [(t, cut), (cut, end), (cut, cut + 1), *side]:
            cat = random.choice(["kernel", "gpu_memcpy", "gpu_memset"])
            events.append(_event(cat, "work", a, b, random.choice(streams), 0))
        events.append(_event("cuda_runtime", "cudaStreamSynchronize", t + 1, t + 4))  # over before the gap
        busy.append(f"{t / 2:g}-{end / 2:g}")
        if gap:
            found, cause = _host(WAITING[case % 6] if gap == max(gaps) else random.choice(WAITING), end, gap)
            events, want = events + found, (end / 2, gap / 2, cause) if gap == max(gaps) else want
        t = end + gap
    # Another process with the same thread number, a data loader's thread, and what is no operator or work.
    events += [_event("cpu_op", "aten::copy_", 1, t, pid=72), _event("cpu_op", "aten::copy_", 1, t, 2)]
    events += [_event("user_annotation", "ProfilerStep#3", 0, t + 99), {"ph": "M", "name": "m", "pid": 71}]
    idle = want[0] + 1  # within the largest gap
    events += [_event("gpu_user_annotation", "m", 0, 2 * idle), events[0] | {"ph": "i", "ts": idle}]
    return events, want, f"a trace in which the GPU works at {', '.join(busy)} µs"


@core.exercise("syncs.3", "largest gap and its cause right in 48 traces of up to three streams")
def largest_gap(answer):
    for case in range(48):
        events, (start, duration, cause), what = _trace(case)
        shift = 1_000_000_000 * (case % 5 == 0)
        events = [{**e, "ts": e["ts"] + shift} if "ts" in e else e for e in events]
        random.shuffle(events)
        got = core.parts(core.call(answer, events), "start duration cause", what)
        core.close(got[1], duration, f"duration of the largest gap in {what}", rtol=0, atol=1e-3)
        got[0] = core.number(got[0], f"start of the largest gap in {what}") - shift
        core.close(got[0], start, f"start of the largest gap in {what}", rtol=0, atol=1e-3)
        core.equal(got[2], cause, f"cause of the gap at {start:g} in {what}")
    kernels = [_event("kernel", "k", a, b, a, 0) for a, b in ((13, 20), (5, 14), (20, 31))]
    for n, what in enumerate(("no work on the GPU", "one kernel", "two that overlap", "three without a gap")):
        got = core.call(answer, [_event("cpu_op", "aten::add", 3, 9), *kernels[:n]])
        core.require(got is None, f"a trace with {what}: expected None, got {str(got)[:80]}")


def _padded(n, t, d, dtype=torch.float32):
    x, lengths = torch.randn(n, t, d, dtype=dtype), torch.randint(0, t + 1, (n,))
    lengths[torch.randperm(n)[:3]] = torch.tensor([0, t, 1])[: min(n, 3)]
    outside = torch.arange(t) >= lengths[:, None]
    garbage = torch.tensor([math.nan, math.inf, -math.inf, 1e6, -7.0], dtype=dtype)
    x[outside] = garbage[torch.randint(5, (int(outside.sum()), d))]
    return x, lengths


@core.exercise("syncs.4", "means right for ragged and empty batches; as few operators for 41 as for 7")
def pool(answer):
    n, t, d = core.ragged(3, 20, 3)
    shapes = [(n, t, d), (1, t, d), (0, t, d), (n, 1, d), (n, t, 1), (n + 1, t, d)]
    for dtype, shape in itertools.product((torch.float32, torch.float64, torch.bfloat16), shapes):
        x, lengths = _padded(*shape, dtype)
        off = 0.1 if dtype == torch.bfloat16 else 1e-5
        if shape[0] > n:
            x[int(lengths.argmax()), 0, 0] = math.nan  # within a length
        want = torch.zeros(shape[0], shape[2], dtype=torch.float64)
        for i in lengths.nonzero().flatten().tolist():
            want[i] = x[i, : int(lengths[i])].double().mean(0)
        what = f"means of {shape[0]} samples of up to {shape[1]} rows of {shape[2]}"
        got = core.call(answer, x.requires_grad_(), lengths)
        if isinstance(got, torch.Tensor) and got.shape == want.shape:  # core.close refuses every NaN
            rule = "what lies past a length must not count, what lies within must"
            nans = f"{int(got.isnan().sum())} values are NaN, expected {int(want.isnan().sum())}; {rule}"
            core.require(torch.equal(got.isnan(), want.isnan()), f"{what}: {nans}")
            core.require(got.dtype == dtype, f"{what}: expected {dtype}, the type of x, got {got.dtype}")
            core.require(got.requires_grad or not len(x), f"{what}: no gradient flows from the result to x")
            got, want = got.nan_to_num(nan=0.0), want.nan_to_num(nan=0.0)
        core.close(got, want, what, rtol=10 * off, atol=off)
    ops = {}
    for n, t, d in ((7, 13, 3), (41, 13, 3), (41, 29, 8)):
        given = _padded(n, t, d)
        with syncs.counting() as (counts, unknown):
            core.call(answer, *given, mutates=(0, 1))
        _no_sync(counts, unknown, f"a batch of {n}")
        ops[f"{n} samples of {t} rows"] = counts.ops
    core.require(len(set(ops.values())) == 1, f"expected the same number of operators, got {ops}")
    core.require(counts.ops <= 20, f"{counts.ops} operators: expected 20 or fewer; 5 are enough")
    _no_copy(answer, *(t.to("meta") for t in _padded(n, t, d)))
    x, lengths = _padded(n, t, d)
    got = core.call(answer, x.requires_grad_(), lengths, mutates=(0, 1))
    grad = torch.autograd.grad(got.sum(), x, allow_unused=True)[0]
    core.require(grad is not None, "no gradient flows from the result to x")
    want = (torch.arange(t) < lengths[:, None]) / lengths[:, None].clamp(min=1)
    core.close(grad, want[..., None].expand_as(x), "the gradient of the sum of all means")


def _times(noise, drift, planted, scale, warmup):
    "Step times: a slow warm-up, noise, harmless bumps where it is quiet, one fast step, slow steps."
    for i in range(900):
        level = scale * (1 + drift * i / 900) * (1 + 40 * 0.6**i if i < warmup - 3 else 1)
        extra = noise * (max(-4.0, min(4.0, random.gauss(0, 1))) if i % 97 else 4)
        extra += random.uniform(0, 0.1) * (noise < 0.005 and random.random() < 0.03)
        slow = max(noise * random.uniform(20, 35), random.uniform(0.27, 0.6))
        yield level * (1 + (slow if i in planted else extra)) * (0.55 if i == 893 else 1)


def _fair(window, noise, *rest):
    "Step times in which every window shows its noise: by a rare quiet one, ordinary steps are slow."
    while True:
        times = list(_times(noise, *rest))
        windows = torch.tensor(times, dtype=torch.float64)[rest[-1] :].unfold(0, window, 1)
        level = windows.median(1, keepdim=True).values
        away = ((windows - level) / level).abs().median(1).values
        if bool((1.4826 * away > 0.6 * noise).all()):
            return times


@core.exercise("syncs.5", "every planted step found and no false alarm in 16 noisy, quiet and drifting runs")
def slow_steps(answer):
    core.need_callable(answer, "a class")
    for case in range(16):
        noise = (0.015, 0.09, random.uniform(0.02, 0.08), 0.0008)[case % 4]
        drift = (0.3, -0.2, 0.0, random.uniform(-0.2, 0.3))[case // 4]
        warmup, window = random.randrange(8, 40), random.randrange(60, 130)
        first, start = warmup + window, random.randrange(warmup + window + 50, 500)
        row = [*range(start, start + 8), start + 12, start + 30, start + 200]
        some = [first, *random.sample(range(first + 1, 890), 4)]
        planted = (row, [], some)[(case + case // 4) % 3]
        what = f"warmup {warmup}, window {window}, {100 * noise:.2g} % noise, {100 * drift:+.0f} % drift"
        scale, watch = 10 ** random.uniform(-4, 1), core.call(answer, warmup, window)
        # A slow step just before `first` must not be reported.
        times = _fair(window, noise, drift, [*planted, first - 1], scale, warmup)
        said = _bools([watch(t) for t in times])
        false = [i for i, s in enumerate(said) if s and i not in planted]
        missed = [i for i in planted if not said[i]]
        few = f", and the first {first} must not be" if false and false[0] < first else ""
        core.require(not false, f"{what}: {len(false)} ordinary steps reported, as step {false[:1]}{few}")
        core.require(not missed, f"{what}: {len(missed)} of {len(planted)} slow steps missed: {missed[:3]}")
        higher = _fair(window, noise, 0.0, [], 1.5 * scale * (1 + drift), 0)[: 2 * window]
        wrong = f"{what}: after {window} steps at a level half higher, ordinary steps are still reported"
        core.require(not any([watch(t) for t in higher][window:]), wrong)
        core.require((held := _held(watch)) <= 4 * window, f"it holds {held} numbers: keep the last {window}")


def _held(watch):
    "How many numbers an object keeps, in lists, deques, dicts, arrays and objects of its own."
    seen, todo = {}, [getattr(watch, "__dict__", watch)]
    while todo:
        x = todo.pop()
        if id(x) not in seen and not callable(x):
            seen[id(x)] = x
            todo += gc.get_referents(x)
    numbers = [x for x in seen.values() if isinstance(x, int | float) or hasattr(x, "shape")]
    return sum(math.prod(getattr(x, "shape", ())) for x in numbers)

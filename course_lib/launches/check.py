"Checks of launches. Oracles: time on a grid, torch.optim.Adam, eager calls, schedules by recurrence."

import copy
import itertools
import random
import weakref

import torch
from torch import nn
from torch.nn import functional as F

from course_lib import checking as core
from course_lib import launches
from course_lib.checking import yours  # noqa: F401

HANDS = ["cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernelEx", "cudaGraphLaunch", "cudaMemcpyAsync",
         "cudaMemsetAsync", "cuLaunchKernel", "cudaLaunchCooperativeKernel", "cudaMemcpy",
         "cuMemsetD32Async"]  # fmt: skip
IDLE = ["cudaStreamSynchronize", "cudaEventRecord", "cudaStreamIsCapturing", "cudaMalloc", "cudaMemGetInfo"]
WORK = ["kernel", "gpu_memcpy", "gpu_memset"]


@core.exercise("launches.1", "calls, work and busy time right in 40 traces of up to three streams")
def launch_report(answer):
    core.need_callable(answer)
    for case in range(40):
        events = _trace(works=random.randrange(1, 9) if case % 8 else 0)
        got = core.parts(core.call(answer, events), "calls work busy", "the report of a trace")
        work = [e for e in events if e["ph"] == "X" and e["cat"] in WORK]
        handed = [e for e in events if e["ph"] == "X" and e["cat"].startswith("cuda_") and e["name"] in HANDS]
        what = f"a trace of {len(events)} events"
        core.equal(got[0], len(handed), f"{what}: calls that hand over work")
        core.equal(got[1], len(work), f"{what}: pieces of work")
        spans = [(int(4 * e["ts"]), int(4 * (e["ts"] + e["dur"]))) for e in work]
        busy = {t for start, end in spans for t in range(start, end)}  # quarters of a µs
        want = len(busy) / (max(busy) + 1 - min(busy)) if busy else 0.0
        core.close(got[2], want, f"{what}: the part of the time in which work runs", 1e-9, 1e-12)


def _trace(works):
    "Random events in quarters of a µs, in any order; some have names or kinds that mislead."
    kinds = [(random.choice(["cuda_runtime", "cuda_driver"]), random.choice(HANDS + IDLE)) for _ in range(9)]
    kinds += [(random.choice(WORK), random.choice(["LaunchBounds<4>", "gemm"])) for _ in range(works)]
    kinds += [("cpu_op", "aten::Launch"), ("user_annotation", "Memset"), ("gpu_user_annotation", "step")]
    found = [{"ph": "X", "cat": cat, "name": name, "tid": random.randrange(3)} for cat, name in kinds]
    found = [e | {"ts": random.randrange(2000, 2800) / 4, "dur": random.randrange(1, 240) / 4} for e in found]
    for dur in (1, 1, 20) * (works > 1):  # pieces of other streams that begin, and even end, together
        found.append(found[9] | {"tid": random.randrange(3, 6), "dur": found[9]["dur"] + dur})
    found += [{"ph": "i", "cat": cat, "name": HANDS[0], "ts": 10} for cat in ("cuda_runtime", "kernel")]
    return random.sample(found, len(found))


def _on_gpu(what, fn, *args):
    "Call on the simulated GPU; what it refuses becomes one sentence."
    try:
        return core.call(fn, *args, mutates=range(len(args)))
    except core.Wrong as e:
        if e.cause and str(e.cause):
            raise core.Wrong(f"{what}: {core.describe(e.cause)}") from None
        raise


def _same(tensors, wanted, what):
    for t, want in zip(tensors, wanted, strict=True):
        core.close(t.detach(), want, what, 0, 0)


def _put_back(tensors, kept):
    with torch.no_grad():
        for t, old in zip(tensors, kept, strict=True):
            t.copy_(old)


def _kept(tensors):
    return [t.detach().clone() for t in tensors]


@core.exercise("launches.2", "eager steps and replays train as torch.optim.Adam does, in 4 networks")
def step(answer):
    core.need_callable(answer, "a class")
    for case in range(4):
        width, hidden, rows, classes = core.ragged(3, 12, 4)
        net = nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, classes)).double()
        rate, size, seed = random.uniform(0.001, 0.02), (0.02, 9.0)[case % 2], random.randrange(10**6)
        twin = _Twin(copy.deepcopy(net), rate)
        with launches.Device() as gpu:
            net = net.to("cuda")
            made = _on_gpu("making a Step", answer, net, rate)
            state, graph, losses = _state_of(made, net), gpu.CUDAGraph(), []
            static = torch.zeros(rows, width).double().to("cuda"), torch.zeros(rows).long().to("cuda")
            for i in range(8):  # three calls, then a capture and five replays
                if i == 3:
                    loss = _captured(gpu, graph, made, static)
                batch = size * torch.randn(rows, width).double(), torch.randint(classes, (rows,))
                _put_back(static, batch)
                if i in (2, 5):
                    twin.rate = rate * random.uniform(2, 3)
                    made.lr.fill_(twin.rate)
                way = f"call {i + 1}" if i < 3 else f"replay {i - 2}"
                torch.manual_seed(seed + i)
                loss = _on_gpu(way, made, *static) if i < 3 else (graph.replay(), loss)[1]
                one = isinstance(loss, torch.Tensor) and not loss.dim() and not loss.requires_grad
                core.require(
                    one, f"{way}: expected a detached loss without dimensions, not {core.kind(loss)}"
                )
                torch.manual_seed(seed + i)
                _same(static, batch, f"{way}: it changed its inputs in place")
                twin.compare(way, made, net, loss, twin(*batch))
                losses.append((loss, loss.item()))
            for i, (old, value) in enumerate(losses[:3], 1):
                core.close(old.item(), value, f"the loss of call {i}, read after later calls", 0, 0)
            _goes_back(graph, _state_of(made, net), state, loss)


class _Twin:
    "The step by PyTorch's own Adam and clipping, on the host."

    def __init__(self, net, rate):
        self.net, self.rate, self.average, self.steps = net, rate, 0.0, 0
        self.opt = torch.optim.Adam(net.parameters(), rate, foreach=False)

    def __call__(self, x, y):
        self.opt.param_groups[0]["lr"] = self.rate
        self.opt.zero_grad()
        loss = F.cross_entropy(self.net(x + 0.1 * torch.randn_like(x)), y)
        loss.backward()
        if torch.cat([p.grad.flatten() for p in self.net.parameters()]).norm() > 1:
            nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.opt.step()
        self.average, self.steps = 0.9 * self.average + 0.1 * loss.item(), self.steps + 1
        return loss.item()

    def compare(self, way, made, net, loss, want):
        core.close(loss.item(), want, f"{way}: the loss", 1e-4, 1e-5)
        core.close(made.average.item(), self.average, f"{way}: step.average", 1e-4, 1e-5)
        core.close(made.t.item(), self.steps, f"{way}: step.t")
        for (name, p), q in zip(net.named_parameters(), self.net.parameters(), strict=True):
            what = f"{way}: {name}, beside PyTorch's clipping and Adam"
            core.close(p.to("cpu"), q, what, 1e-4, 1e-3 * self.rate)


def _captured(gpu, graph, made, static):
    try:
        with gpu.graph(graph):
            return made(*static)
    except RuntimeError as e:
        raise core.Wrong(f"the capture of a step: {str(e).splitlines()[0]}") from None


def _state_of(made, net):
    for name in ("lr", "t", "average"):
        t = getattr(made, name, None)
        fine = isinstance(t, torch.Tensor) and not t.dim() and t.is_cuda and not t.requires_grad
        graph = " that keeps a graph" * (isinstance(t, torch.Tensor) and t.requires_grad)
        expected = f"step.{name}: expected a detached tensor without dimensions, on the GPU"
        core.require(fine, f"{expected}, not {core.kind(t)}{graph}")
    state = _on_gpu("state()", made.state)
    tensors = isinstance(state, list | tuple) and all(isinstance(t, torch.Tensor) for t in state)
    core.require(tensors, f"state(): expected a list of tensors, got {core.kind(state)}")
    for name, t in [*net.named_parameters(), ("lr", made.lr), ("t", made.t), ("average", made.average)]:
        there = any(t is s for s in state)
        core.require(there, f"state() misses {name} itself (a clone is another tensor)")
    return list(state)


def _goes_back(graph, state, before, loss):
    "Two replays, the state put back, two replays: all as the first time."
    same = len(state) == len(before) and all(map(lambda a, b: a is b, state, before))
    core.require(same, "state() gives other tensors after some calls: change what lasts in place")
    kept, random_state, ends = _kept(state), torch.get_rng_state(), []
    for _ in range(2):
        _put_back(state, kept)
        torch.set_rng_state(random_state)
        graph.replay()
        graph.replay()
        ends.append(_kept([loss, *state]))
    _same(*ends, "two replays, state() put back, two replays: they differ (is something missing in state()?)")


@core.exercise("launches.3", "replays equal eager calls, state and random numbers kept, other inputs refused")
def graphed_step(answer):
    core.need_callable(answer, "a class")
    for case in range(6):
        rows, width, classes = core.ragged(3, 12, 3)
        with launches.Device() as gpu:
            work, side, outputs = _Work(gpu, width, classes), gpu.Stream(), []
            examples, random_state = work.batch(rows), torch.get_rng_state()
            kept, state = _kept(examples), _kept(work.state)
            side.wait_stream(gpu.current_stream())
            with gpu.stream(side if case % 2 else gpu.current_stream()):
                graphed = _on_gpu("making a GraphedStep", answer, work, examples, work.state, gpu)
                work.was_made(random_state, kept)
                _same(examples, kept, "making it changed the examples")
                _same(work.state, state, "after it was made, a tensor of the state (the warm-up trains)")
                for call in range(4):
                    inputs, random_state = work.batch(rows), torch.get_rng_state()
                    # Same shape and dtype in another order of memory is no reason to refuse.
                    given = [inputs[0].mT.contiguous().mT if call % 2 else inputs[0], inputs[1]]
                    got = _on_gpu("a call", graphed, *given)
                    _same(given, inputs, "a call changed its inputs")
                    core.equal(len(work.streams), 4, "calls of step after a replay, which runs no Python")
                    after, random_after = _kept(work.state), torch.get_rng_state()
                    _put_back(work.state, state)
                    torch.set_rng_state(random_state)
                    outputs.append((got, work.eager(*inputs)))
                    drawn = torch.equal(torch.get_rng_state(), random_after)
                    core.require(drawn, "a call of the graph draws other random numbers than step does")
                    _same(after, work.state, "a tensor of the state after a call, beside an eager step")
                    state = _kept(work.state)
                for got, want in outputs:
                    core.close(got, want, "a result, read after later calls, beside an eager step", 0, 0)
                _same(examples, kept, "a call changed the examples")
                work.refuses(graphed, *work.batch(rows))
            alive = weakref.ref(work)
            del work
            core.require(alive() is not None, "the object doesn't keep step: a graph keeps no tensor alive")
    what = "a step of one input without a state"
    with launches.Device() as gpu:
        double = _on_gpu(f"{what}: making it", answer, lambda x: 2 * x, [torch.zeros(3).to("cuda")], [], gpu)
        got = _on_gpu(what, double, torch.ones(3).to("cuda"))
        core.close(got, torch.full((3,), 2.0), f"{what}: twice a tensor of ones", 0, 0)


class _Work:
    "A step with momentum and random numbers, of two inputs; it notes on which stream it is called."

    def __init__(self, gpu, width, classes):
        self.gpu, self.width, self.classes, self.streams, self.given = gpu, width, classes, [], []
        self.state = [torch.randn(width, classes).to("cuda").requires_grad_(needs) for needs in (True, False)]

    def batch(self, rows):
        return [torch.randn(rows, self.width).to("cuda"), torch.randint(self.classes, (rows,)).to("cuda")]

    def __call__(self, x, y):
        with torch.enable_grad():
            node = self.state[0].view_as(self.state[0]).grad_fn.next_functions[0][0]
        why = "an autograd graph of the state outlives its call; a real capture can fail then: detach it"
        core.require("seen" not in node.metadata, why)
        node.metadata["seen"] = True  # lost with the node when nothing else holds it
        self.streams.append("capture" if self.gpu.capturing is not None else self.gpu.current_stream())
        with self.gpu.resting():
            self.given.append(_kept((x, y)))
        return self.eager(x, y)

    def eager(self, x, y):
        weight, mean = self.state
        losses = F.cross_entropy(F.dropout(x, 0.3) @ weight, y, reduction="none")
        (grad,) = torch.autograd.grad(losses.sum(), [weight])
        with torch.no_grad():
            mean.mul_(0.9).add_(grad)
            weight.sub_(mean, alpha=0.05)
        return losses.detach()

    def was_made(self, random_state, examples):
        warm = [s for s in self.streams if s != "capture"]
        core.equal(len(warm), 3, "making it: warm-up calls of step outside the capture")
        core.require(self.streams[3:] == ["capture"], "making it: expected one capture after the warm-up")
        core.require(self.gpu.current_stream() not in warm, "the warm-up ran on the current stream")
        for given in self.given:
            _same(given, examples, "making it: an input that step was given, beside the example")
        kept = torch.equal(torch.get_rng_state(), random_state)
        core.require(kept, "after it was made, the random generator is in another state")

    def refuses(self, graphed, x, y):
        state = _kept(self.state)
        wrong = {"an input of one row, which would broadcast": (x[:1], y),
                 "an input of one column, which would broadcast": (x[:, :1], y),
                 "a transposed input": (x.mT, y), "a float64 input": (x.double(), y),
                 "an input with another dimension": (x[None], y), "a second input of one element": (x, y[:1]),
                 "a second input in int32": (x, y.int()), "one input instead of two": (x,),
                 "three inputs instead of two": (x, y, y)}  # fmt: skip
        for why, inputs in wrong.items():
            try:
                graphed(*inputs)
            except ValueError:
                continue
            except Exception as e:
                raise core.Wrong(f"{why}: expected a ValueError, got {core.describe(e)}") from None
            raise core.Wrong(f"{why}: expected a ValueError, and it was replayed")
        _same(self.state, state, "a refused call changed the state")


def _untimed():
    "A simulated GPU on which nothing takes time but copies (1 µs a byte) and `launch`."
    return launches.Device(launch=0.0, replay=0.0, kernel=0.0, rate=float("inf"), bus=1.0)


def _finish(copies, works, buffers):
    "µs until all is done, by recurrence; a copy waits for the work on the buffer that it overwrites."
    copied, worked = [0], [0]
    for i, (us, work) in enumerate(zip(copies, works, strict=True), 1):
        copied.append(max(copied[-1], worked[max(0, i - buffers)]) + us)
        worked.append(max(worked[-1], copied[-1]) + work)
    return worked[-1]


def _two(make, shape, dtype):
    return [make(shape, dtype=dtype, device="cuda") for _ in range(2)]


@core.exercise("launches.4", "no race in 24 runs, two buffers, and as fast as copies and scores allow")
def score_all(answer):
    core.need_callable(answer)
    for case in range(24):
        n, size, short, long = 1 + case // 3, random.randrange(70, 110), random.randrange(1, 60), 1500
        works = [[short] * n, [long] * n, random.choices([short, long], k=n)][case % 3]
        gpu, used, us = _untimed(), [], 8 * size
        shape, dtype = random.choice([(size,), (1, size), (size, 1, 1)]), torch.float64
        with gpu, gpu.stream(gpu.Stream() if case % 2 else gpu.current_stream()):
            batches = [torch.randn(shape, dtype=dtype).pin_memory() for _ in range(n)]
            # The buffers get this memory.
            gpu.launch("earlier work", 0, reads=_two(torch.empty, shape, dtype))

            def score(x, gpu=gpu, used=used, works=works, shape=shape):
                fits = isinstance(x, torch.Tensor) and (x.shape, x.dtype) == (shape, torch.float64)
                core.require(fits, f"score got {core.kind(x)}, and the batches are float64 of shape {shape}")
                gpu.launch("score", works[len(used)], reads=[x])
                used.append(x.untyped_storage()._cdata)
                found = x.sum()
                gpu.launch("score", 0, reads=[x])  # a race names the last that read
                return found

            what = f"{n} copies of {us} µs, scores of {works} µs"
            got = _on_gpu(what, answer, batches, score, gpu)
            end = max((s.end for s in gpu.spans), default=0)
            core.close(gpu.now, 0.0, f"{what}: µs for which Python waited")
            for stream in gpu.streams:  # who asks there next gets the buffers' memory (a score has less)
                with gpu.stream(stream):
                    _on_gpu(f"{what}: the buffers' memory, used later", _two, torch.zeros, shape, dtype)
            gpu.synchronize()
            want = torch.stack([b.sum() for b in batches])
            core.close(got.to("cpu") if isinstance(got, torch.Tensor) else got, want, f"{what}: the scores")
            core.require(got.dtype == dtype, f"{what}: the scores: score gives float64, got {core.kind(got)}")
        core.equal(len(set(used)), min(n, 2), f"{what}: buffers that were used")
        core.close(end, _finish([us] * n, works, 2), f"{what}: µs until all is done", 1e-6, 1e-3)


@core.exercise("launches.5", "no use before ready, no reuse before done, and copies hidden in 24 loops")
def prefetch(answer):
    core.need_callable(answer)
    for case in range(24):
        n = (0, 1, 2, *[random.randrange(3, 9)] * 5)[case % 8]
        k = random.randrange(1, 4)
        sizes = [core.ragged(10, 80, k)] * n if case % 3 else [core.ragged(10, 80, k) for _ in range(n)]
        works = random.choices([random.randrange(1, 60), random.randrange(300, 700)], k=n)
        # waits: for the GPU, after each batch. late: Python comes back when all is done, on another stream.
        gpu, taken, given, waits, late = _untimed(), [], [], case % 5 == 4, case % 4 == 3
        copies = [4 * sum(group) for group in sizes]
        how = "a loop that waits, " * waits + "a slow loop on two streams, " * late
        what = f"{how}{n} batches of {k} tensor{'s' * (k > 1)}: copies of {copies} µs, work of {works} µs"
        with gpu:
            streams = [gpu.Stream() if case % 2 else gpu.current_stream() for _ in range(1 + late)]
            host = [tuple(_drawn(size).pin_memory() for size in group) for group in sizes]
            feed = _on_gpu(what, answer, ((taken.append(1), batch)[1] for batch in host), gpu)
            core.require(hasattr(feed, "__iter__"), f"{what}: expected a generator, got {core.kind(feed)}")
            feed, before = iter(feed), len(gpu.streams)
            for i in itertools.count():
                with gpu.stream(streams[i % len(streams)]):
                    batch = _on_gpu(what, next, feed, None)
                    if batch is None:
                        break
                    core.require(i < n, f"{what}: more batches came out than went in")
                    early = f"{what}: batches taken before batch {i + 1} was given"
                    core.equal(len(taken), min(n, i + 2), early)
                    _used(gpu, batch, host[i], works[i], f"{what}: batch {i + 1}")
                held = any(r() is not None for old in given[: max(0, i - 1)] for r in old)
                core.require(not held, f"{what}: a batch is still held when the second after it is given")
                given.append([weakref.ref(t) for t in batch])
                del batch
                gpu.now += 1e6 * late
                if waits:
                    gpu.synchronize()
            core.equal(i, n, f"{what}: batches that came out")
            core.require(len(gpu.streams) <= before + 1, f"{what}: expected one new stream for all copies")
        if late:
            continue
        if not waits:
            core.close(gpu.now, 0.0, f"{what}: µs for which Python waited")
        end = max((s.end for s in gpu.spans), default=0)
        why = f"{what}: µs until all is done (does a copy wait for work, or work for a later copy?)"
        core.close(end, _finish(copies, works, 2 if waits else n), why, 1e-6, 1e-3)


def _drawn(size):
    "A tensor of 4 bytes an element: numbers or labels."
    shape = random.choice([(size,), (1, size)])
    return random.choice([torch.randn(shape), torch.randint(99, shape, dtype=torch.int32)])


def _used(gpu, batch, host, us, what):
    "Work on a batch, which must be the host's and be ready."
    right = isinstance(batch, tuple) and len(batch) == len(host)
    core.require(right, f"{what}: expected a tuple of {len(host)} tensors, got {core.kind(batch)}")
    for got, want in zip(batch, host, strict=True):
        there = isinstance(got, torch.Tensor) and got.is_cuda
        core.require(there, f"{what}: expected tensors on the GPU, got {core.kind(got)}")
        with gpu.resting():
            core.close(got, want, what, 0, 0)
        core.require(got.dtype == want.dtype, f"{what}: expected {want.dtype}, got {core.kind(got)}")
    _on_gpu(what, lambda: gpu.launch("work", us, reads=batch))

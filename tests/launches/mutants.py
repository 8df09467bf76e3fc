"Right and wrong answers to the exercises of launches."

import itertools

import torch
from torch.nn import functional as F

from course_lib.launches import solutions

REFERENCE = {
    "launches.1": solutions.launch_report,
    "launches.2": solutions.Step,
    "launches.3": solutions.GraphedStep,
    "launches.4": solutions.score_all,
    "launches.5": solutions.prefetch,
}


def named(words, answer):
    answer.__name__ = words.replace(" ", "_")
    return answer


# --- launches.1: a trace ----------------------------------------------------------------------


WORK = ("kernel", "gpu_memcpy", "gpu_memset")
NAMES = ("cudaLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")


def by_steps(events):
    "Right: counts how many pieces run, from one start or end to the next."
    full = [e for e in events if e["ph"] == "X"]
    calls = [e for e in full if e["cat"] in {"cuda_runtime", "cuda_driver"}]
    calls = [e for e in calls if "Launch" in e["name"] or "Memcpy" in e["name"] or "Memset" in e["name"]]
    work = [e for e in full if e["cat"] in WORK]
    edges = sorted([(e["ts"], 1) for e in work] + [(e["ts"] + e["dur"], -1) for e in work])
    running = covered = 0
    for (at, step), (later, _) in itertools.pairwise(edges):
        running += step
        covered += (later - at) * (running > 0)
    return len(calls), len(work), covered / (edges[-1][0] - edges[0][0]) if edges else 0.0


def by_merging(events):
    "Right: a list of merged intervals."
    calls, work, merged = 0, 0, []
    for e in sorted((e for e in events if e.get("ph") == "X"), key=lambda e: e["ts"]):
        if e["cat"].startswith(("cuda_runtime", "cuda_driver")):
            calls += any(word in e["name"] for word in ("Launch", "Memcpy", "Memset"))
        elif e["cat"] in WORK:
            work += 1
            if merged and e["ts"] <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], e["ts"] + e["dur"])
            else:
                merged.append([e["ts"], e["ts"] + e["dur"]])
    return [calls, work, sum(b - a for a, b in merged) / (merged[-1][1] - merged[0][0]) if merged else 0]


def _report(
    cats=("cuda_runtime", "cuda_driver"), words=("Launch", "Memcpy", "Memset"), kinds=WORK, busy=None
):
    def launch_report(events):
        events = [e for e in events if e.get("ph") == "X"]
        calls = sum((cats is None or e["cat"] in cats) and any(w in e["name"] for w in words) for e in events)
        work = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["cat"] in kinds)
        if not work:
            return calls, 0, 0.0
        return calls, len(work), busy(work) if busy else solutions.launch_report(events)[2]

    return launch_report


def _gaps(work):
    "The end of the piece before, not the latest end."
    covered = sum(b - a for a, b in work) - sum(max(0, x[1] - y[0]) for x, y in itertools.pairwise(work))
    return covered / (max(b for _, b in work) - work[0][0])


def _pieces(count):
    def launch_report(events):
        calls, _, busy = solutions.launch_report(events)
        return calls, count([e for e in events if e["ph"] == "X" and e["cat"] in WORK]), busy

    return launch_report


def _whole_us(work):
    us = {t for a, b in work for t in range(int(a), int(b))}
    return len(us) / max(1, max(us, default=0) + 1 - min(us, default=0))


def _by_start(work):
    "Of pieces that start together the last one counts."
    ends, covered, latest = dict(reversed(work)), 0, work[0][0]
    for start in sorted(ends):
        covered += max(0, ends[start] - max(start, latest))
        latest = max(latest, ends[start])
    return covered / (latest - work[0][0])


# --- launches.2: a step -----------------------------------------------------------------------


class ForeachStep(solutions.Step):
    "Right: lerp_, addcmul_, foreach, powers kept on the device."

    def __call__(self, x, y):
        loss = F.cross_entropy(self.net(torch.randn_like(x).mul(0.1) + x), y)
        grads = torch.autograd.grad(loss, self.params)
        with torch.no_grad():
            norm = torch.cat([g.flatten() for g in grads]).norm()
            grads = torch._foreach_mul(grads, torch.where(norm > 1, 1 / norm, torch.ones_like(norm)))
            self.t += 1
            self.average.lerp_(loss.to(self.average.dtype), 0.1)
            corrections = [1 - torch.pow(beta, self.t) for beta in (0.9, 0.999)]
            for p, g, m, v in zip(self.params, grads, self.m, self.v, strict=True):
                m.lerp_(g, 0.1)
                v.mul_(0.999).addcmul_(g, g, value=0.001)
                p.sub_(self.lr * (m / corrections[0]) / ((v / corrections[1]).sqrt() + 1e-8))
        return loss.detach()


class OptimStep:
    "Right: PyTorch's own clipping and capturable Adam, its state made at once."

    def __init__(self, net, lr):
        self.net, self.lr = net, torch.tensor(lr, device=next(net.parameters()).device)
        self.average = torch.zeros_like(self.lr)
        self.opt = torch.optim.Adam(net.parameters(), lr=self.lr, capturable=True, foreach=False)
        with torch.no_grad():
            kept = [p.clone() for p in net.parameters()]
            for p in net.parameters():
                p.grad = torch.ones_like(p)
            self.opt.step()
            for p, old in zip(net.parameters(), kept, strict=True):
                p.copy_(old)
            for s in self.opt.state.values():
                for t in s.values():
                    t.zero_()

    t = property(lambda self: next(iter(self.opt.state.values()))["step"])

    def state(self):
        return [
            *self.net.parameters(),
            self.lr,
            self.average,
            *(t for s in self.opt.state.values() for t in s.values()),
        ]

    def __call__(self, x, y):
        self.opt.zero_grad()
        loss = F.cross_entropy(self.net(x + 0.1 * torch.randn_like(x)), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.opt.step()
        self.average.mul_(0.9).add_(loss.detach(), alpha=0.1)
        return loss.detach()


class Variant(solutions.Step):
    "The solution in pieces, so that a wrong answer replaces one of them."

    def noise(self, x):
        return torch.randn_like(x)

    def scale(self, norm):
        return (1 / norm).clamp(max=1)

    def count(self):
        self.t.add_(1)
        return self.t

    def note(self, loss):
        self.average.mul_(0.9).add_(loss, alpha=0.1)

    def moments(self, i, g):
        self.m[i].mul_(0.9).add_(g, alpha=0.1)
        self.v[i].mul_(0.999).add_(g * g, alpha=0.001)

    def rate(self):
        return self.lr

    def __call__(self, x, y):
        loss = F.cross_entropy(self.net(x + 0.1 * self.noise(x)), y)
        grads = torch.autograd.grad(loss, self.params)
        with torch.no_grad():
            scale = self.scale(torch.stack([g.norm() for g in grads]).norm())
            t = self.count()
            self.note(loss)
            for i, (p, g) in enumerate(zip(self.params, grads, strict=True)):
                self.moments(i, g * scale)
                m, v = self.m[i] / (1 - 0.9**t), self.v[i] / (1 - 0.999**t)
                p -= self.rate() * m / (v.sqrt() + 1e-8)
        return loss.detach()


def _rebinds_moments(self, i, g):
    self.m[i] = 0.9 * self.m[i] + 0.1 * g
    self.v[i] = 0.999 * self.v[i] + 0.001 * g * g


class OneLoss(solutions.Step):
    "Each call writes its loss into the same tensor."

    def __init__(self, net, lr):
        super().__init__(net, lr)
        self.loss = torch.zeros_like(self.params[0].flatten()[0])

    def __call__(self, x, y):
        return self.loss.copy_(super().__call__(x, y))


def _note_with_a_graph(self, loss):
    with torch.enable_grad():
        self.average.mul_(0.9).add_(loss, alpha=0.1)


def _noise_into_x(self, x):
    x += 0.1 * torch.randn_like(x)
    return torch.zeros_like(x)


def _counts_twice(self):
    self.steps = getattr(self, "steps", 0) + 1
    self.t.add_(1)
    return self.steps


def _rate_as_number(self):
    if not hasattr(self, "number"):
        self.number = self.lr.item()
    return self.number


def _noise_once(self, x):
    if not hasattr(self, "kept"):
        self.kept = torch.randn_like(x)
    return self.kept


def _misses(drop):
    return lambda self: [t for t in solutions.Step.state(self) if not any(t is d for d in drop(self))]


def variant(words, **changes):
    return type(words.replace(" ", "_"), (Variant,), changes)


# --- launches.3: a graph ----------------------------------------------------------------------


class Fields:
    "Right: an event in place of wait_stream, the state put back by lists, one comparison at a time."

    def __init__(self, step, examples, state, gpu):
        random, self.step = gpu.get_rng_state(), step
        self.static = [torch.empty_like(t).copy_(t) for t in examples]
        before = [t.detach().clone() for t in state]
        side, start = gpu.Stream(), gpu.Event()
        start.record()
        side.wait_event(start)
        with gpu.stream(side):
            for _ in range(3):
                step(*self.static)
            end = side.record_event()
        end.wait()
        self.graph = gpu.CUDAGraph()
        with gpu.graph(self.graph):
            self.result = step(*self.static)
        for t, old in zip(state, before, strict=True):
            t.data.copy_(old)
        gpu.set_rng_state(random)

    def __call__(self, *inputs):
        if len(inputs) != len(self.static):
            raise ValueError("wrong number of inputs")
        for old, new in zip(self.static, inputs, strict=True):
            if old.shape != new.shape or old.dtype is not new.dtype:
                raise ValueError("wrong shape or dtype")
        [old.copy_(new, non_blocking=True) for old, new in zip(self.static, inputs, strict=True)]
        self.graph.replay()
        return self.result.detach().clone()


class Swapped(solutions.GraphedStep):
    "Right: the outputs written into new memory; state put back before the capture as well."

    def __call__(self, *inputs):
        if [(*t.shape, t.dtype) for t in inputs] != [(*t.shape, t.dtype) for t in self.inputs]:
            raise ValueError(inputs)
        for i in range(len(inputs)):
            self.inputs[i][...] = inputs[i]
        self.graph.replay()
        return torch.empty_like(self.output).copy_(self.output)


def graphed(words, side=True, waits=True, clones=True, back=True, random=True, strict="both",
            copies=True, result=True, detach=True, keep=True, make=torch.clone, one_by_one=True):  # fmt: skip
    class Graphed:
        def __init__(self, step, examples, state, gpu):
            self.step, self.inputs = (
                keep and step,
                [make(t) for t in examples] if clones else list(examples),
            )
            kept, rng = [t.detach().clone() if detach else t.clone() for t in state], gpu.get_rng_state()
            main, stream = gpu.current_stream(), gpu.Stream() if side else gpu.current_stream()
            if waits:
                stream.wait_stream(main)
            with gpu.stream(stream):
                for _ in range(3):
                    step(*self.inputs)
            main.wait_stream(stream)
            self.graph = gpu.CUDAGraph()
            with gpu.graph(self.graph):
                self.output = step(*self.inputs)
            with torch.no_grad():
                for t, old in zip(state if back and one_by_one else (), kept, strict=False):
                    t.copy_(old)
                if not one_by_one:
                    torch._foreach_copy_(state, kept)
            if random:
                gpu.set_rng_state(rng)

        def __call__(self, *inputs):
            def kinds(found):
                by = {"both": lambda t: (t.shape, t.dtype), "shape": lambda t: t.shape,
                      "strides": lambda t: (t.shape, t.dtype, t.stride()),
                      "rows": lambda t: (len(t), t.dim(), t.dtype),
                      "numel": lambda t: (t.numel(), t.dim(), t.dtype)}  # fmt: skip
                return [by[strict](t) for t in found]

            if (
                kinds(inputs) != kinds(self.inputs)
                if strict != "first"
                else inputs[0].shape != self.inputs[0].shape
            ):
                raise ValueError("another shape")
            if copies:
                for static, new in zip(self.inputs, inputs, strict=False):
                    static.copy_(new)
            else:
                self.inputs = list(inputs)
            self.graph.replay()
            return self.output.clone() if result else self.output

    return named(words, Graphed)


# --- launches.4: scores -----------------------------------------------------------------------


def one_list_of_events(batches, score, gpu):
    "Right: an event for each batch, waits by wait()."
    upload, main = gpu.Stream(), gpu.current_stream()
    buffers = [torch.empty_like(batches[0], device="cuda"), torch.empty_like(batches[0], device="cuda")]
    upload.wait_stream(main)
    done, out = [], []
    for i, batch in enumerate(batches):
        with gpu.stream(upload):
            if i > 1:
                done[i - 2].wait()
            buffers[i & 1].copy_(batch, non_blocking=True)
            ready = upload.record_event()
        ready.wait()
        out += [score(buffers[i & 1])]
        done.append(main.record_event())
    return torch.stack(out)


def score_in_front(batches, score, gpu):
    "Right: the scores on a stream of their own, the copies on another."
    upload, work, main = gpu.Stream(), gpu.Stream(), gpu.current_stream()
    buffers = torch.empty_like(batches[0], device="cuda"), torch.empty_like(batches[0], device="cuda")
    marks = {0: None, 1: None}
    for s in (upload, work):
        s.wait_stream(main)
    out = []
    for i, batch in enumerate(batches):
        with gpu.stream(upload):
            if marks[i % 2]:
                upload.wait_event(marks[i % 2])
            buffers[i % 2].copy_(batch, non_blocking=True)
            ready = gpu.Event()
            ready.record()
        with gpu.stream(work):
            ready.wait()
            out.append(score(buffers[i % 2]))
            marks[i % 2] = work.record_event()
    main.wait_stream(work)
    return torch.stack(out)


def scores(words, before, buffers=2, non_blocking=True, ready=True, first=True, make=torch.empty_like,
           on="current_stream", on_upload=False, collect=torch.stack):  # fmt: skip
    def score_all(batches, score, gpu):
        upload, main = gpu.Stream(), getattr(gpu, on)()
        if first:
            upload.wait_stream(main)
        with gpu.stream(upload if on_upload else main):
            kept = [make(batches[0], device="cuda") for _ in range(buffers or len(batches))]
        done, out = [], []
        if first:
            upload.wait_stream(main)
        for i, batch in enumerate(batches):
            buffer = kept[i % len(kept)]
            before(gpu, upload, main, done, i)
            with gpu.stream(upload):
                buffer.copy_(batch, non_blocking=non_blocking)
            if ready:
                main.wait_stream(upload)
            out.append(score(buffer))
            done.append(main.record_event())
        return collect(out)

    return named(words, score_all)


def in_one_tensor(batches, score, gpu):
    "Right: each score is written into its place."
    dtype = batches[0].dtype
    found = torch.empty(len(batches), device="cuda", dtype=dtype), itertools.count()
    return scores("", _two_before, collect=lambda _: found[0])(
        batches, lambda x: found[0][next(found[1])].copy_(score(x)), gpu
    )


def the_second_batch_in_front(batches, score, gpu):
    "There is a second batch."
    return solutions.score_all([batches[0], batches[1], *batches[2:]], score, gpu)


def _two_before(gpu, upload, main, done, i):
    if i > 1:
        upload.wait_event(done[i - 2])


# --- launches.5: a prefetcher -----------------------------------------------------------------


def from_an_iterator(batches, gpu):
    "Right: next() on an iterator, wait() on the event."
    source, side = iter(batches), gpu.Stream()

    def fetch():
        batch = next(source, None)
        if batch is None:
            return None
        with gpu.stream(side):
            found = tuple(t.to(device="cuda", non_blocking=True) for t in batch)
            done = gpu.Event()
            done.record()
        return found, done

    ahead = fetch()
    while ahead:
        (found, done), ahead = ahead, fetch()
        done.wait()
        for t in found:
            t.record_stream(gpu.current_stream())
        yield found
        del found


class Prefetch:
    "Right: a class with __iter__ and __next__."

    def __init__(self, batches, gpu):
        self.source, self.gpu, self.side, self.queue = iter(batches), gpu, gpu.Stream(), []
        self.fetch()

    def fetch(self):
        for batch in self.source:
            with self.gpu.stream(self.side):
                self.queue.append((tuple(t.cuda(non_blocking=True) for t in batch), self.side.record_event()))
            break

    def __iter__(self):
        return self

    def __next__(self):
        if not self.queue:
            raise StopIteration
        self.fetch()
        found, event = self.queue.pop(0)
        self.gpu.current_stream().wait_event(event)
        for t in found:
            t.record_stream(self.gpu.current_stream())
        return found


def prefetcher(words, ahead=1, record="current", waits="event", once=False, each=False, non_blocking=True,
               before=None, to=None):  # fmt: skip
    to = to or (lambda t: t.to("cuda", non_blocking=non_blocking))

    def prefetch(batches, gpu):
        side, queue, first = gpu.Stream(), [], gpu.current_stream()

        def hand_over(tensors, event):
            current = first if once else gpu.current_stream()
            if waits == "event":
                current.wait_event(event)
            elif waits == "stream":
                current.wait_stream(side)
            for t in tensors if record else ():
                t.record_stream(current if record == "current" else side)
            return tensors

        for batch in batches:
            if each:
                side = gpu.Stream()
            if before:
                before(gpu, side)
            with gpu.stream(side):
                tensors = tuple(map(to, batch))
                queue.append((tensors, side.record_event()))
            if len(queue) > ahead:
                yield hand_over(*queue.pop(0))
        while queue:
            yield hand_over(*queue.pop(0))

    return named(words, prefetch)


def _into(new, t):
    return new.copy_(t, non_blocking=True)


def pairs_only(batches, gpu):
    return solutions.prefetch(((x, y) for x, y in batches), gpu)


RIGHT = {
    "launches.1": [by_steps, by_merging],
    "launches.2": [ForeachStep, OptimStep],
    "launches.3": [Fields, Swapped],
    "launches.4": [one_list_of_events, score_in_front, in_one_tensor],
    "launches.5": [from_an_iterator, Prefetch],
}

MUTANTS = {
    "launches.1": [
        named(
            "a range of annotations on the GPU counts as work", _report(kinds=(*WORK, "gpu_user_annotation"))
        ),
        named("launches of kernels only", _report(words=("LaunchKernel",))),
        named("runtime calls only", _report(cats=("cuda_runtime",))),
        named("counts operators that are called Launch", _report(cats=None)),
        named("kernels only", _report(kinds=("kernel",))),
        named(
            "sums what overlaps",
            _report(busy=lambda w: sum(b - a for a, b in w) / (max(b for _, b in w) - w[0][0])),
        ),
        named("the end of the piece before", _report(busy=_gaps)),
        named("a list of names", _report(words=NAMES)),
        named("all names with Mem", _report(words=("Launch", "Mem"))),
        named("whole µs", _report(busy=_whole_us)),
        named("a set of pieces", _pieces(lambda work: len({(e["ts"], e["dur"]) for e in work}))),
        named("a piece for each start", _report(busy=_by_start)),
    ],
    "launches.2": [
        variant("moments are replaced", moments=_rebinds_moments),
        variant("noise is added in place", noise=_noise_into_x),
        variant("a count in Python", count=_counts_twice),
        variant("the rate as a number", rate=_rate_as_number),
        variant("the noise is drawn once", noise=_noise_once),
        variant(
            "noise from the host", noise=lambda self, x: torch.randn(x.shape, dtype=x.dtype).to(x.device)
        ),
        variant("clips short gradients too", scale=lambda self, norm: 1 / norm),
        variant("branches on the norm", scale=lambda self, norm: 1 / norm if norm > 1 else 1.0),
        variant("state without the moments", state=_misses(lambda self: [*self.m, *self.v])),
        OneLoss,
        variant("the average keeps graphs", note=_note_with_a_graph),
        variant("state gives clones", state=lambda self: [t.clone() for t in solutions.Step.state(self)]),
    ],
    "launches.3": [
        graphed("the warm-up trains", back=False),
        graphed("the random state moves", random=False),
        graphed("keeps the graph of the clones", detach=False),
        graphed("the warm-up on the current stream", side=False),
        graphed("the side stream does not wait", waits=False),
        graphed("captures the examples themselves", clones=False),
        graphed("binds the inputs", copies=False),
        graphed("the output itself", result=False),
        graphed("keeps nothing alive", keep=False),
        graphed("compares rows", strict="rows"),
        graphed("compares the number of elements", strict="numel"),
        graphed("any dtype", strict="shape"),
        graphed("looks at the first input", strict="first"),
        graphed("refuses another order of memory", strict="strides"),
        graphed("static inputs of zeros", make=torch.zeros_like),
        graphed("a state of one tensor or more", one_by_one=False),
    ],
    "launches.4": [
        scores("copies do not wait", lambda gpu, *_: None),
        scores("waits for the score before", lambda gpu, up, main, done, i: up.wait_stream(main)),
        scores("buffers that are used before", _two_before, first=False),
        scores("buffers of float32", _two_before, make=lambda b, device: torch.empty(b.shape, device=device)),
        scores("the default stream", _two_before, on="default_stream"),
        scores("a buffer for each batch", lambda *_: None, buffers=0),
        scores(
            "one buffer", lambda gpu, up, main, done, i: up.wait_event(done[-1]) if done else None, buffers=1
        ),
        scores("buffers of the copies' stream", _two_before, on_upload=True),
        scores("scores in float32", _two_before, collect=lambda out: torch.stack(out).float()),
        the_second_batch_in_front,
        scores("a copy that blocks", _two_before, non_blocking=False),
        scores("scores do not wait", _two_before, ready=False),
    ],
    "launches.5": [
        prefetcher("no record_stream", record=""),
        prefetcher("no wait", waits="no"),
        prefetcher("waits for all copies", waits="stream"),
        prefetcher("records the stream of the copies", record="side"),
        prefetcher("nothing ahead", ahead=0),
        prefetcher("two ahead", ahead=2),
        pairs_only,
        prefetcher("labels become float32", to=lambda t: _into(torch.empty(t.shape, device="cuda"), t)),
        prefetcher("vectors only", to=lambda t: _into(torch.empty(len(t), dtype=t.dtype, device="cuda"), t)),
        prefetcher("reads the current stream once", once=True),
        prefetcher("a stream for each batch", each=True),
        prefetcher("a copy that blocks", non_blocking=False),
        prefetcher(
            "copies wait for the work", before=lambda gpu, side: side.wait_stream(gpu.current_stream())
        ),
    ],
}

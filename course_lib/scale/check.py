"""Checks of lesson scale. Oracles: dense attention in float64 on counted ranks; each tensor and message of a
layout one by one; all tuples tried; a run second by second; the run that was never interrupted."""

import copy
import io
import itertools
import math
import random
import weakref

import torch
from torch import nn
from torch.nn import functional as F

from course_lib import checking as core
from course_lib import scale
from course_lib.checking import yours  # noqa: F401
from course_lib.data_parallel.check_inputs import run


@core.exercise(
    "scale.1", "dense attention's out and lse on one to five ranks; N - 1 messages each, none held back"
)
def ring_attention(answer):
    core.need_callable(answer)
    for size in (2, 3, random.choice((4, 5)), 1):
        n, d, e, heads = *core.ragged(3, 12, 3), random.choice((None, 2))
        lead, total = (heads,) * (heads is not None), n * size
        # In a row, a part of later tokens alone has no score.
        place = (torch.arange(total) if size == 3 else torch.randperm(total)).chunk(size)
        dtype = torch.float64 if size == 2 else torch.float32
        q, k = torch.randn(2, *lead, total, d, dtype=dtype)
        v = torch.randn(*lead, total, e, dtype=dtype)
        causal = torch.arange(total)[:, None] >= torch.arange(total)
        if size > 3:  # exp(lse) overflows
            q *= 200 / (q @ k.mT * 0.4)[..., causal].max()
        s = (q.double() @ k.double().mT * 0.4).masked_fill(~causal, -math.inf)
        want = s.softmax(-1) @ v.double(), s.logsumexp(-1)
        what = f"{size} rank{'s' * (size > 1)} with {n} tokens, q {[*lead, n, d]}, v {[*lead, n, e]}"
        what += ", scores up to 200" if size > 3 else ", float64" if size == 2 else ""

        def body(comm, q=q, k=k, v=v, place=place, what=what):
            rank, asked, mine = comm.get_rank(), [], place[comm.get_rank()]
            given = [t[..., mine, :].contiguous() for t in (q, k, v)]
            kept, arrived, seen, recv = core.clone(given), [], [], comm.recv

            def recv_after_a_send(tensor, src):
                arrived.append(src)
                sends = sum(e.what == "send" for e in comm._group.events_of(rank))
                core.require(len(arrived) <= sends, f"{what}: rank {rank} calls recv before isend: start the "
                             "send of this round first")  # fmt: skip
                recv(tensor, src)

            comm.recv = recv_after_a_send

            def attend(q, keys, values, at, at_k):
                owner = [r for r, p in enumerate(place) if torch.equal(p, at_k)]
                core.require(owner and torch.equal(at, mine), f"{what}: attend gets places of other tokens")
                asked.extend(owner)
                seen.append(weakref.ref(keys))
                alive = sum(ref() is not None for ref in seen)
                core.require(alive <= 3, f"{what}: rank {rank} keeps the keys of {alive} ranks; drop those "
                             "that it has sent")  # fmt: skip
                ahead = comm._group.sent(rank) > len(asked) * (given[1].nbytes + given[2].nbytes)
                core.require(not ahead, f"{what}: rank {rank} sends keys on before it attended to them")
                core.require(torch.equal(q, given[0]), f"{what}: attend gets other queries than this rank's")
                for name, t, w in (("keys", keys, k), ("values", values, v)):
                    core.close(t, w[..., at_k, :], f"{what}: the {name} that attend gets on rank {rank} with "
                               f"the places of rank {owner[0]}", 0, 0)  # fmt: skip
                s = (q @ keys.mT * 0.4).masked_fill(at[:, None] < at_k, -math.inf)
                lse = s.logsumexp(-1)
                return (s - torch.where(lse == -math.inf, 0.0, lse)[..., None]).exp() @ values, lse

            got = answer(*given, place.__getitem__, attend, comm)
            got = core.parts(got, "out lse", "ring_attention's result")
            same = all(torch.equal(a, b) for a, b in zip(given, kept, strict=True))
            core.require(same, f"{what}: an input was changed in place")
            return got, asked

        group, results = run(size, body, "ring_attention")
        one = (k[..., :n, :].nbytes + v[..., :n, :].nbytes) * (size - 1)
        for r, (got, asked) in enumerate(results):
            for name, g, w in zip(("out", "lse"), got, want, strict=True):
                w = w[..., place[r], :] if name == "out" else w[..., place[r]]
                core.close(g, w, f"{what}: {name} of rank {r}", 1e-3, 1e-4)
            core.equal(sorted(asked), list(range(size)), f"{what}: the ranks whose keys rank {r} attends to")
            to = {e.peer for e in group.events_of(r) if e.what == "send"}
            core.require(
                to <= {(r + 1) % size}, f"{what}: rank {r} sends to {sorted(to)}, not to the next rank alone"
            )
            core.equal(
                group.sent(r), one, f"{what}: keys and values {size - 1} times, sent by rank {r}", "bytes"
            )
            core.require(
                not group.collectives(r), f"{what}: rank {r} calls a collective; send to the next rank"
            )


@core.exercise("scale.2", "bytes and seconds part by part, for any layout, as counted tensor by tensor")
def cost(answer):
    core.need_callable(answer)
    for case in range(60):
        d, t, p, c = (random.choice((1, 2, 3, 4)) for _ in range(4))
        if case < 12:  # one direction at a time first: the message is about it
            d, t, p, c = (x if i == case % 4 else 1 for i, x in enumerate((3, 2, 4, 3)))
        m, stage, chunks = random.randint(1, 6), random.randrange(4), random.randint(1, 3) if p > 1 else 1
        layout = scale.Layout(d, t, p, c, m, stage, chunks)
        layers, width, kv, length = (random.randint(*r) for r in ((1, 3), (50, 90), (4, 9), (50, 99)))
        params, kept, state = random.randint(1000, 9999), random.randint(9, 99), random.choice((4, 8, 12))
        model = scale.Model(12 * layers, params, width, kv, 12, length, 12 * d * m, kept, state)
        rates = (random.randint(1, 99) for _ in range(4))
        machine = scale.Machine(d * t * p * c, random.choice((2, 4, 8)), 10**9, *rates)
        got = core.parts(core.call(answer, model, layout, machine), "bytes seconds", "what cost returns")
        for name, found, want in zip(("bytes", "seconds"), got, _cost(model, layout, machine), strict=True):
            core.require(isinstance(found, dict), f"{name}: expected a dict, got {core.kind(found)}")
            core.equal(sorted(found), sorted(want), f"the names of {name}")
            for part in want:
                rule = _RULES[part]
                rule = rule[stage] if isinstance(rule, tuple) else rule
                what = f"{name} of {part!r} ({rule}) for {layout}, {model}, {machine}"
                core.close(found[part], want[part], what, 1e-6, 1e-12)


_RULES = {
    "weights": "2 for each weight of this GPU; tensor and pipe cut them, data · context in stage 3",
    "gradients": "2 for each weight of this GPU; data · context cuts them from stage 2 on",
    "state": "model.state for each weight of this GPU; data · context cuts it from stage 1 on",
    "activations": "kept · tokens of the microbatches in flight · layers of this GPU; tensor cuts them",
    "compute": "FLOPs of all tokens and layers of this GPU, by machine.flops",
    "bubble": "compute · (pipe - 1) / (micro · chunks)",
    "tensor": "four all-reduces of x for each layer and microbatch, among `tensor` neighbours",
    "context": "3 context - 1 times keys and values for each layer and microbatch; tensor cuts them",
    "pipe": "x there and x back for each microbatch and chunk; tensor cuts x",
    "data": (*["a reduce-scatter and an all-gather of the gradients' bytes, once a step"] * 2,
             "a reduce-scatter for each microbatch, and one all-gather",
             "two all-gathers and a reduce-scatter for each microbatch"),
    "optimizer": "reads weights, gradients, state, writes weights, state: the part whose state is here",
}  # fmt: skip


def _cost(model, layout, machine):
    "Part by part: a loop over layers, microbatches and ranks' messages of this GPU."
    d, t, p, c, m, stage, chunks = layout
    memory = dict.fromkeys(("weights", "gradients", "state", "activations"), 0.0)
    seconds = dict.fromkeys(("compute", "bubble", "tensor", "context", "pipe", "data", "optimizer"), 0.0)
    mine, ranks = model.layers // p, d * c
    tokens = model.length * model.sequences / d / c / m
    reach = list(itertools.accumulate((t, c, p, d), lambda a, b: a * b))
    near = [machine.near if r <= machine.host else machine.far for r in reach]
    rate = dict(zip(("tensor", "context", "pipe", "data"), near, strict=True))

    def scatter(n, k):  # what a rank sends in a reduce-scatter or an all-gather of n bytes
        return sum(n / k for _ in range(k - 1))

    for _ in range(mine):
        weights = model.params / t
        memory["weights"] += 2 * weights / (ranks if stage == 3 else 1)
        memory["gradients"] += 2 * weights / (ranks if stage in (2, 3) else 1)
        part = weights / (ranks if stage else 1)
        memory["state"] += model.state * part
        memory["activations"] += sum(tokens * model.kept / t for _ in range(m) if _ < p)
        for direction in ("read", "write"):
            seconds["optimizer"] += part * (2 + model.state + 2 * (direction == "read")) / machine.hbm
        for _ in range(m):
            seconds["compute"] += tokens * (6 * weights + 6 * model.length * model.width / t) / machine.flops
            for _ in range(4):
                seconds["tensor"] += 2 * scatter(2 * tokens * model.width, t) / rate["tensor"]
            pair = 2 * 2 * tokens * model.kv / t
            rounds = (c - 1) + 2 * c if c > 1 else 0  # forward; backward with their gradients
            seconds["context"] += rounds * pair / rate["context"]
            seconds["data"] += {3: 3, 2: 1}.get(stage, 0) * scatter(2 * weights, ranks) / rate["data"]
        seconds["data"] += {3: 0, 2: 1}.get(stage, 2) * scatter(2 * weights, ranks) / rate["data"]
    slots = sum(1 for _ in range(p - 1)) / chunks  # of a microbatch, idle
    seconds["bubble"] = slots * seconds["compute"] / m
    if p > 1:
        seconds["pipe"] = sum(2 * 2 * tokens * model.width / t for _ in range(m * chunks)) / rate["pipe"]
    return memory, seconds


@core.exercise("scale.3", "every allowed layout that fits and no other, the fastest first")
def plan(answer):
    core.need_callable(answer)
    hard = [
        (8, 2, 4, 4, 7, 8),
        (12, 6, 6, 4, 4, 12),
        (8, 4, 4, 2, 8, 4),
    ]  # odd; three ranks, four heads; two heads
    choices = (4, 8, 12), (2, 4, 6), (4, 12), (2, 4, 6), (6, 8, 24), (8, 12)
    for case, sizes in enumerate(hard + [tuple(map(random.choice, choices)) for _ in range(5)]):
        gpus, host, layers, heads, length, sequences = sizes
        model = scale.Model(layers, 10**6, 64, 8, heads, length, sequences, 10)
        stages = ((0, 1, 2, 3), (1,), (0, 3))[case % 3]
        machine = scale.Machine(gpus, host, random.randint(50, 90), 1, 2, 3, 4)

        def price(model, layout, machine, salt=random.random()):
            draw = random.Random(f"{salt} {tuple(layout)}")
            seconds = {k: draw.uniform(0, 1) for k in ("compute", "data")}
            return {"weights": draw.uniform(0, 50), "activations": draw.uniform(0, 50)}, seconds

        sizes, found = [k for k in range(1, gpus + 1) if gpus % k == 0], []
        for d, t, p, c in itertools.product(sizes, repeat=4):
            if d * t * p * c != gpus:
                continue
            for m, stage, v in itertools.product(range(1, 13), stages, range(1, 7)):
                layout = scale.Layout(d, t, p, c, m, stage, v)
                if not _broken(layout, model, machine, stages):
                    memory, seconds = price(model, layout, machine)
                    found.append((sum(memory.values()), sum(seconds.values()), layout))
        if case % 2 and found:  # one layout fills the memory to the last byte
            machine = machine._replace(memory=sorted(found)[2 * len(found) // 3][0])
        want = [pair for needs, *pair in found if needs <= machine.memory]
        what = f"plan for {model}, {machine}, stages={stages}"
        got = core.call(answer, model, machine, price, stages)
        core.require(isinstance(got, list), f"{what}: expected a list, got {core.kind(got)}")
        for pair in got:
            layout = core.parts(pair, "seconds layout", f"{what}: an entry of the list")[1]
            core.require(
                isinstance(layout, scale.Layout), f"{what}: expected a Layout, got {core.kind(layout)}"
            )
        found, right = [layout for _, layout in got], {layout: s for s, layout in want}
        for layout in found:
            needs = sum(price(model, layout, machine)[0].values())
            broken = _broken(layout, model, machine, stages) or f"it needs {needs:.1f} bytes"
            core.require(layout in right, f"{what}: {layout} doesn't belong to the list: {broken}")
        core.equal(len(found), len(set(found)), f"{what}: layouts, each once")
        missing = next((layout for layout in right if layout not in found), None)
        core.require(missing is None, f"{what}: {missing} is missing; it is allowed and fits")
        for (s, layout), (w, _) in zip(got, sorted(want), strict=True):
            core.close(s, right[layout], f"{what}: the seconds of {layout}", 1e-9, 0)
            core.close(s, w, f"{what}: the seconds in order, the fastest first", 1e-9, 0)
    model, machine = (
        scale.Model(4, 10**6, 64, 8, 2, 8, 4, 10),
        scale.Machine(4, 4, 999, 1, 2, 3, 4),
    )  # all fit
    every = {layout.stage for _, layout in core.call(answer, model, machine, price)}
    core.require(
        every == {0, 1, 2, 3}, f"plan without `stages` tries 0 to 3; the list has {sorted(every)} alone"
    )


def _broken(layout, model, machine, stages):
    "The first rule that a layout breaks, in words, or None."
    d, t, p, c, m, stage, v = layout
    rules = {
        "data · tensor · pipe · context isn't machine.gpus": d * t * p * c == machine.gpus,
        "tensor isn't a divisor of machine.host": machine.host % t == 0,
        "tensor isn't a divisor of model.heads": model.heads % t == 0,
        "pipe · chunks isn't a divisor of model.layers": model.layers % (p * v) == 0,
        "2 · context isn't a divisor of model.length": c == 1 or model.length % (2 * c) == 0,
        "data · micro isn't a divisor of model.sequences": model.sequences % (d * m) == 0,
        "chunks > 1 needs pipe > 1": v == 1 or p > 1,
        "chunks > 1 needs a pipe that divides micro": v == 1 or m % p == 0,
        "its stage isn't one of `stages`": stage in stages,
    }
    return next((words for words, good in rules.items() if not good), None)


@core.exercise("scale.4", "the clock of any run, and the best interval within 5 % for short and long saves")
def intervals(wall_clock, best_interval):
    for answer in (wall_clock, best_interval):
        core.need_callable(answer, "a function (the check takes wall_clock and best_interval)")
    for case in range(40):
        unit = 0.25 if case % 2 else 1
        work, interval, save, restart = (
            unit * random.randint(*r) for r in ((20, 90), (2, 25), (0, 6), (0, 9))
        )
        gaps = [unit * random.randint(1, 60) for _ in range(400)]
        if case == 0:
            work, interval, gaps = 3 * interval, interval, [unit * 1e6]
        want = _seconds(work, interval, save, restart, gaps, unit)
        if want is None:  # this run doesn't end
            continue
        got = core.call(wall_clock, work, interval, save, restart, _without_end(gaps))
        failures = f"failures after {gaps[:4]}, …"
        what = f"wall_clock({work}, interval={interval}, save={save}, restart={restart}, …), {failures}"
        core.close(got, want, what, 1e-6, 1e-6)
    for share in (1e-5, 1e-3, 0.01, 0.05, 0.2, 0.5, random.uniform(0.02, 0.5)):
        mtbf = 10 ** (2 if share == 1e-5 else random.uniform(2, 6))  # 1e-5: intervals below a second
        save = share * mtbf
        tries = [mtbf * 1.002**k for k in range(-4000, 1000)]
        want = max(tries, key=lambda t: t * math.exp(-t / mtbf) / -math.expm1(-(t + save) / mtbf))
        got = core.number(core.call(best_interval, save, mtbf), "best_interval")
        what = f"best_interval({save:.6g}, {mtbf:.6g}): expected {want:.6g} s within 5 %, got {got:.6g}"
        core.require(abs(got / want - 1) <= 0.05, what)


def _without_end(gaps):
    yield from gaps + [1e9] * 9
    raise core.Wrong("wall_clock takes gaps without end: take the next one only after a failure")


def _seconds(work, interval, save, restart, gaps, unit):
    "The clock in steps of `unit`: work, then save, unless the failure comes first."
    gaps, clock, done, kept, saving = iter(gaps), 0, 0, 0, 0
    left, since = next(gaps), 0
    while done < work:
        if since >= left:
            clock, done, saving, since = clock + restart, kept, 0, 0
            left = next(gaps, None)
            if left is None:
                return None
        if saving > 0:
            saving -= unit
            clock, since = clock + unit, since + unit
            kept = done if saving <= 0 else kept
            continue
        done, clock, since = done + unit, clock + unit, since + unit
        if done - kept >= interval and done < work:
            saving = save
            kept = done if not save else kept
    return clock


class _Loader:
    "Shuffled batches; another class than the lesson's, with an epoch and a list."

    def __init__(self, n, batch):
        self.n, self.batch, self.epoch, self.waiting = n, batch, 0, []

    def next(self):
        if len(self.waiting) < self.batch:
            self.epoch += 1
            self.waiting = random.sample(range(self.n), self.n)
        mine = [self.waiting.pop() for _ in range(self.batch)]
        return mine[:: 1 if self.epoch % 2 else -1]


class _Run:
    "A run whose next step reads all that the exercise names; small scales overflow, so steps are skipped."

    def __init__(self, sizes, make, data):
        a, b, n = sizes
        self.model = nn.Sequential(nn.Linear(a, b), nn.BatchNorm1d(b), nn.Dropout(0.4), nn.Linear(b, 3))
        self.opt, self.data = make(self.model.parameters()), data
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_factor=3.0, growth_interval=2)
        self.loader = _Loader(n, 4)

    def step(self):
        rows = self.loader.next()
        x = self.data[0][rows] * random.uniform(0.8, 1.2)
        loss = F.cross_entropy(self.model(x), self.data[1][rows])
        self.opt.zero_grad()
        (self.scaler.scale(loss).half() * 1.0).float().backward()
        self.scaler.step(self.opt)
        self.opt.param_groups[0]["lr"] *= 0.98
        self.scaler.update()
        with torch.no_grad():  # in evaluation batch norm reads its buffers
            judged = F.cross_entropy(self.model.eval()(self.data[0]), self.data[1]).item()
        self.model.train()
        return (loss.item(), judged), self.scaler.get_scale()


@core.exercise(
    "scale.5", "bit for bit the run that was never interrupted, from a file, twice, with other optimizers too"
)
def resume(capture, restore):
    for answer in (capture, restore):
        core.need_callable(answer, "a function (the check takes capture and restore)")
    makes = (lambda p: torch.optim.Adam(p, 0.01), lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
             lambda p: torch.optim.AdamW(p, 0.01, amsgrad=True))  # fmt: skip
    for case, make in enumerate(makes):
        a, b, n = core.ragged(4, 9, 3)
        sizes, data = (a, b, 3 * n + 5), (torch.randn(3 * n + 5, a), torch.randint(3, (3 * n + 5,)))
        runs = [_Run(sizes, make, data) for _ in range(3)]
        first, second, third = runs
        for _ in range((7, 0, 12)[case]):
            first.step()
        while case != 1 and len(first.loader.waiting) < 8:  # two batches of its list are left
            first.step()
        before = torch.get_rng_state(), random.getstate(), copy.deepcopy(first.model.state_dict())
        state, parts = _do(capture, first), _parts(first)
        core.require(isinstance(state, dict), f"capture: expected a dict, got {core.kind(state)}")
        after = torch.get_rng_state(), random.getstate(), first.model.state_dict()
        same = torch.equal(before[0], after[0]) and before[1] == after[1] and _equal(before[2], after[2])
        core.require(same, "capture changes the run: its weights or random numbers are others after it")
        file = io.BytesIO()
        _do(torch.save, state, file)
        saved, want = file.getvalue(), [first.step() for _ in range(9)]
        file = io.BytesIO()
        torch.save(state, file)
        same = file.getvalue() == saved
        core.require(same, "what capture returned changes when the run goes on: copy it")
        for _ in range(3):
            second.step()
        _do(capture, second)  # a state is of its own run, whatever was captured later
        torch.manual_seed(case), random.seed(case)
        loaded = torch.load(io.BytesIO(saved), weights_only=False)
        whole = copy.deepcopy(loaded)
        for times, again in (
            ("", second),
            (" when it is restored for the second time", third),
            (" into the run that it was captured from", first),
        ):
            _do(restore, again, loaded)
            now = _parts(again)
            others = [name for name, part in parts.items() if not core._same(part, now[name])]
            core.require(core._same(loaded, whole), "restore changes `state`; it stays as it is")
            _compare([again.step() for _ in range(9)], want, times, " and ".join(others))
            core.require(
                core._same(loaded, whole), "`state` changes when the restored run goes on: restore a copy"
            )


def _do(fn, *args):
    try:
        return fn(*args)
    except Exception as e:
        if core._is_stub(e):
            raise NotImplementedError from None
        raise core.Wrong(f"{getattr(fn, '__name__', 'it')} raised {core.describe(e)}") from None


def _equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def _parts(run):
    "What a step reads, by name, copied."
    found = {name: getattr(run, name).state_dict() for name in ("model", "opt", "scaler")}
    found |= {"loader": vars(run.loader), "torch's random numbers": torch.get_rng_state()}
    return copy.deepcopy(found | {"Python's random numbers": random.getstate()})


def _compare(got, want, times, others):
    for step, ((loss, factor), (loss_w, factor_w)) in enumerate(zip(got, want, strict=True), 1):
        where = f"step {step} after restore{times}: expected losses {loss_w!r} and scale {factor_w:g}"
        words = f"{where}, got {loss!r} and {factor:g}; not restored: {others or 'see hint 2'}"
        core.require((loss, factor) == (loss_w, factor_w), words)

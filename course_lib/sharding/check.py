"""Checks of lesson sharding. Oracles: torch.chunk, torch.optim.Adam, autograd in float64, a count of what is
alive, a virtual clock, and the row that was cut."""

import itertools
import math
import random
import tempfile
from pathlib import Path
from pickle import UnpicklingError
from unittest import mock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from course_lib import checking as core
from course_lib import group as groups
from course_lib import sharding
from course_lib.checking import yours  # noqa: F401
from course_lib.data_parallel import check_inputs as inputs


class _NamedDevices(TorchFunctionMode):
    "Refuses a new tensor of several numbers whose device isn't named: on GPUs it would be on the CPU."

    def __init__(self, comm):
        super().__init__()
        self.comm = comm

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out, named = func(*args, **(kwargs or {})), (kwargs or {}).get("device") is not None
        several = isinstance(out, torch.Tensor) and out.numel() > 1
        if several and not named and func in _device_constructors() and not self.comm.busy:
            name = f"torch.{func.__name__} makes a tensor of shape {list(out.shape)} on the default device"
            raise core.Wrong(f"{name}: name the device of the tensors that it meets, as device=x.device")
        return out


def _sent(group, rank, since=0):
    "Bytes that a rank sends when its collectives are rings; `since` leaves out that many of its collectives."
    n = group.size
    part = {"all_reduce": 2 * (n - 1) / n, "reduce_scatter_tensor": (n - 1) / n,
            "all_gather_into_tensor": n - 1, "broadcast": 1}  # fmt: skip
    return group.sent(rank) + sum(part.get(k, 0) * b for k, b in group.collectives(rank)[since:])


@core.exercise("sharding.1", "bytes right for every stage and rank, ragged, frozen and tied weights too")
def rank_bytes(answer):
    core.need_callable(answer)
    for _ in range(5):
        a, b, c, d = core.ragged(3, 20, 4)
        kinds = random.sample([torch.float32, torch.bfloat16, torch.float64], 2)
        model = nn.Module()
        model.words, model.mix = nn.Embedding(a, b, dtype=kinds[0]), nn.Linear(b, c, dtype=kinds[1])
        model.conv, model.out = nn.Conv2d(c, d, 3), nn.Linear(b, a, bias=False, dtype=kinds[0])
        model.out.weight = model.words.weight
        model.mix.weight.requires_grad_(False)
        model.register_buffer("shift", torch.zeros(d))
        some = list(model.parameters())
        for ranks in {1, 2, *core.ragged(3, 23, 2)}:
            for stage, rank in itertools.product(range(4), range(ranks)):
                cut = [p.detach().chunk(ranks) for p in some]
                mine = [k[rank].numel() * k[rank].element_size() if rank < len(k) else 0 for k in cut]
                sizes = [p.numel() * p.element_size() for p in some]
                grads = [
                    (m if stage > 1 else s)
                    for p, m, s in zip(some, mine, sizes, strict=True)
                    if p.requires_grad
                ]
                state = [
                    (m if stage > 0 else s)
                    for p, m, s in zip(some, mine, sizes, strict=True)
                    if p.requires_grad
                ]
                want = sum(mine if stage > 2 else sizes), sum(grads), 2 * sum(state)
                got = core.call(answer, model, stage, rank, ranks)
                got = core.parts(got, "weights gradients state", "what rank_bytes returns")
                for g, w, name in zip(got, want, ("weights", "gradients", "state"), strict=True):
                    shapes = ", ".join(f"{list(p.shape)}" for p in some)
                    what = f"{name} of rank {rank} of {ranks} in stage {stage}, parameters {shapes}"
                    core.equal(g, w, f"{what} (one of them frozen)", "bytes")


@core.exercise("sharding.2", "Adam's own steps and moments, with a share of its state on each rank")
def sharded_adam(answer):
    core.need_callable(answer, "a class")
    for ranks in (1, 2, 3, random.choice((4, 5))):
        shapes = [(random.randint(2, 5), random.randint(3, 7)), (random.randint(2, 9),), ()]
        shapes += [(13, random.randint(12, 15))] if ranks > 3 else []
        shapes += [(1,)] * (sum(math.prod(s) for s in shapes) % ranks == 0)  # a remainder is wanted
        _adam(answer, ranks, shapes, torch.float64 if ranks == 2 else torch.float32)
    _adam(answer, 3, [(2,)], torch.float32)  # fewer numbers than ranks


def _adam(answer, ranks, shapes, dtype):
    lr, eps, steps = random.uniform(0.01, 0.1), 10 ** random.uniform(-3, -1), random.randint(4, 6)
    betas = random.uniform(0.5, 0.9), random.uniform(0.8, 0.99)
    start = [torch.randn(s, dtype=dtype) for s in shapes]
    grads = [[[torch.randn(s, dtype=dtype) * 2.0 ** random.randint(-3, 3) for s in shapes]
              for _ in range(ranks)] for _ in range(steps)]  # fmt: skip
    missing = {(t, random.randrange(ranks), random.randrange(len(shapes)))
               for t in (0, random.randrange(1, steps))}  # fmt: skip
    load, ago = 0 if ranks == 3 else random.randrange(1, steps), random.randint(2, 5)
    loaded = [torch.randn(s, dtype=dtype) for s in shapes]
    loads = [[torch.randn(s, dtype=dtype).abs() for s in shapes] for _ in "mv"]  # abs: v is never negative
    for step, rank, i in missing:
        grads[step][rank][i].zero_()
    oracle = [nn.Parameter(p.double().clone()) for p in start]
    adam, wants = torch.optim.Adam(oracle, lr, betas, eps, foreach=False), []
    for t, step in enumerate(grads):
        for i, p in enumerate(oracle):
            if t == load:
                p.data.copy_(loaded[i])
                m, v = (x[i].double().clone() for x in loads)
                adam.state[p] = {"step": torch.tensor(float(load + ago)), "exp_avg": m, "exp_avg_sq": v}
            p.grad = torch.stack([rank[i].double() for rank in step]).mean(0)
        adam.step()
        state = [adam.state[p] for p in oracle]
        moments = [torch.cat([s[k].flatten() for s in state]) for k in ("exp_avg", "exp_avg_sq")]
        wants.append(([p.detach().clone() for p in oracle], [sharding.parts_of(m, ranks) for m in moments]))
    total = sum(p.numel() for p in start)
    share, what = -(-total // ranks), f"{total} parameters on {ranks} rank{'s' * (ranks > 1)}"

    def body(comm):
        params = [nn.Parameter(p.clone()) for p in start]
        with _NamedDevices(comm):
            opt = answer(iter(params), comm, lr=lr, betas=betas, eps=eps)
        made = f"expected ShardedAdam(…) to make an object with a method step(), got {core.kind(opt)}"
        core.require(callable(getattr(opt, "step", None)), made)
        since = len(group_of(comm).collectives(comm.rank))
        for t, (step, (want, moments)) in enumerate(zip(grads, wants, strict=True)):
            for i, (p, g) in enumerate(zip(params, step[comm.rank], strict=True)):
                p.grad = None if (t, comm.rank, i) in missing else g.clone()
            if t == load:
                _load(opt, params, loaded, [sharding.own_part(x, comm).clone() for x in loads], load + ago)
            with _NamedDevices(comm):
                opt.step()
            where = f"rank {comm.rank} after step {t + 1}"
            where += f" (a checkpoint was loaded before step {load + 1})" * (t >= load)
            for i, (p, g) in enumerate(zip(params, step[comm.rank], strict=True)):
                gone = (t, comm.rank, i) in missing
                same = p.grad is None if gone else p.grad is not None and torch.equal(p.grad, g)
                core.require(same, f"{what}: step() changed the gradient of parameter {i + 1}"
                             + ", which was None" * gone + "; leave p.grad as it is")  # fmt: skip
            for i, (p, w) in enumerate(zip(params, want, strict=True)):
                core.require(p.dtype == dtype, f"{what}: parameter {i + 1} became {p.dtype}, it was {dtype}")
                core.close(p, w, f"{what}: parameter {i + 1} on {where}", 1e-4, 1e-5)
            for name, parts in zip("mv", moments, strict=True):
                kept = f"{what}: expected this rank's part of the moments in self.{name}"
                core.require(hasattr(opt, name), f"{kept}, there is no such attribute")
                core.close(
                    getattr(opt, name, None), parts[comm.rank], f"{what}: {name} on {where}", 1e-4, 1e-5
                )
            core.equal(getattr(opt, "t", None), t + 1 + ago * (t >= load), f"{what}: t on {where}")
        return since, _held(opt, params)

    def group_of(comm):
        return comm._group

    group, results = inputs.run(ranks, body, "ShardedAdam")
    for rank, (since, kept) in enumerate(results):
        most = 4 * share
        core.require(ranks < 4 or kept <= most, f"{what}: rank {rank} keeps {kept} numbers between steps; "
                     f"its share is {share}, and 4 shares ({most}) are enough")  # fmt: skip
        sent = _sent(group, rank, since) / steps
        most = 2 * (ranks - 1) * (share + len(shapes)) * start[0].element_size()
        core.require(sent <= most, f"{what}: a step sends {sent:.0f} bytes from rank {rank}; a "
                     f"reduce-scatter and an all-gather of the shares send {most} or less")  # fmt: skip


def _load(opt, params, weights, moments, t):
    "What a checkpoint does between two steps."
    with torch.no_grad():
        for p, w in zip(params, weights, strict=True):
            p.copy_(w)
    for name, value in zip("mvt", (*moments, t), strict=True):
        try:
            setattr(opt, name, value)
        except AttributeError:
            raise core.Wrong(
                f"self.{name} can't be assigned; a checkpoint assigns it between steps"
            ) from None


def _held(obj, params):
    "Numbers in the tensors of an object, without single numbers, `params` and their gradients."
    known = {t.untyped_storage().data_ptr() for p in params for t in (p, p.grad) if t is not None}
    found, seen, todo = {}, set(), [obj]
    while todo:
        x = todo.pop()
        if id(x) in seen or isinstance(x, groups.Comm | str | bytes | int | float | type) or x is None:
            continue
        seen.add(id(x))
        if isinstance(x, torch.Tensor):
            numbers = x.untyped_storage().nbytes() // x.element_size()
            found[x.untyped_storage().data_ptr()] = numbers * (numbers > 1)
            todo.append(x.grad if x.is_leaf else None)
        elif isinstance(x, dict):
            todo += [*x.keys(), *x.values()]
        elif isinstance(x, list | tuple | set):
            todo += x
        elif hasattr(x, "__dict__") and not callable(x):
            todo += vars(x).values()
    return sum(n for where, n in found.items() if where not in known)


@core.exercise(
    "sharding.3",
    "the whole layer's outputs and gradients; one full weight alive in forward, two such tensors in backward",
)
def gather_compute_free(answer):
    core.need_callable(answer, "a subclass of torch.autograd.Function")
    if not hasattr(answer, "apply"):
        got = core.kind(answer if isinstance(answer, type) else core.call(answer))
        raise core.Wrong(f"expected a subclass of torch.autograd.Function, got {got}")
    for ranks in (1, 2, 3, random.choice((4, 5))):
        for widths in iter(lambda: [random.randint(26, 32) for _ in range(4)], None):
            if ranks == 1 or math.prod(widths[:2]) % ranks:  # a remainder is wanted
                break
        _layers(answer, ranks, widths, torch.float64 if ranks == 2 else torch.float32)


def _layers(answer, ranks, widths, dtype):
    shapes = [(b, a) for a, b in itertools.pairwise(widths)]
    weights = [torch.randn(s, dtype=dtype) / math.sqrt(s[1]) for s in shapes]
    xs = [torch.randn(random.randint(1, 3), widths[0], dtype=dtype) for _ in range(ranks)]
    oracle, xs64 = ([t.double().clone().requires_grad_() for t in ts] for ts in (weights, xs))

    def forward(x, layers, apply):
        for i, w in enumerate(layers):
            x = apply(torch.tanh(x) if i else x, w)
        return x

    outs = [forward(x, oracle, lambda x, w: x @ w.T) for x in xs64]
    sum(o.square().sum() for o in outs).backward()
    cut = [sharding.parts_of(w, ranks) for w in weights]
    what = f"GatherComputeFree on {ranks} rank{'s' * (ranks > 1)}"

    def body(comm):
        given = []  # (what, a tensor that the answer is given, its value)

        def keep(name, t):
            given.append((name, t, t.detach().clone()))

        def layer(x, w):
            keep("x", x), keep("part", w[0])
            y = answer.apply(x, *w, comm)
            right = isinstance(y, torch.Tensor) and y.shape == (len(x), w[1][0])
            core.require(
                right, f"expected a tensor of shape {[len(x), w[1][0]]} from apply, got {core.kind(y)}"
            )
            if y.requires_grad:
                y.register_hook(lambda grad: keep("the gradient of the output", grad))
            return y

        parts = [nn.Parameter(c[comm.rank].clone()) for c in cut]
        x, where = xs[comm.rank].clone().requires_grad_(), f"on rank {comm.rank} of {ranks}"
        # Larger than the largest part: of three ranks or more, a copy of a weight in fp16 is found too.
        with sharding.watching(comm, at_least=1 + max(c[0].nbytes for c in cut)) as live:
            pairs = list(zip(parts, shapes, strict=True))
            with _NamedDevices(comm):
                y = forward(x, pairs, layer)
                before, after, live.most_tensors = live.most_tensors, live.tensors, 0
                y.square().sum().backward()
        if ranks > 1:
            core.equal(after, 0, f"{what}: tensors of a full weight's size alive after forward")
            for most, n, name in ((1, before, "forward"), (2, live.most_tensors, "backward")):
                sentence = (
                    f"{what}: {n} tensors of a full weight's size alive at once in {name}; {most} will do"
                )
                core.require(n <= most, sentence)
        for name, t, value in given:
            core.require(torch.equal(t, value), f"{what} changed {name} in place; others use it too")
        core.close(y, outs[comm.rank].detach(), f"the output {where}", 1e-4, 1e-5)
        core.require(x.grad is not None, f"the gradient of x {where}: there is none")
        core.close(x.grad, xs64[comm.rank].grad, f"the gradient of x {where}", 1e-4, 1e-4)
        for i, (part, w) in enumerate(zip(parts, oracle, strict=True)):
            core.require(part.grad is not None, f"the gradient of part {i + 1} {where}: there is none")
            mean = sharding.parts_of(w.grad / ranks, ranks)[comm.rank]
            core.close(
                part.grad, mean, f"the gradient of part {i + 1} {where}, the mean over the ranks", 1e-4, 1e-4
            )

    group, _ = inputs.run(ranks, body, "GatherComputeFree")
    for rank in range(ranks):
        sent, most = _sent(group, rank), sum(3 * (ranks - 1) * c[0].nbytes for c in cut)
        core.require(sent <= most, f"{what}: rank {rank} sends {sent:.0f} bytes; two all-gathers and a "
                     f"reduce-scatter for each layer send {most}")  # fmt: skip


@core.exercise("sharding.4", "the same results with no avoidable wait, and two whole weights alive at most")
def prefetched(answer):
    core.need_callable(answer)
    for case in range(8):
        ranks, n = random.choice((2, 3, 4)), (5, 4, 6, 1, 0, 2, 5, 4)[case]
        dtype = (torch.float32, torch.float64)[case % 2]
        parts = [[torch.randn(k, dtype=dtype) for _ in range(ranks)] for k in core.ragged(60, 76, n)]
        rate = dtype.itemsize * ranks * 68 / random.uniform(0.5, 2)
        takes = [random.uniform(0.3, 2.5) for _ in range(n)]
        other = torch.float64 if case in (2, 6) else dtype  # x may have another dtype than the parts
        x, wholes = torch.randn(3, dtype=other), [torch.cat(p) for p in parts]
        want = x
        for whole in wholes:
            want = (want + whole[:3]).tanh() + whole.mean()
        best = sharding.least_seconds([w.nbytes / rate for w in wholes], takes)
        what = f"{n} layer{'s' * (n != 1)} on {ranks} ranks"

        def body(comm, parts=parts, rate=rate, takes=takes, x=x, wholes=wholes, what=what, dtype=dtype):
            clock, ran = sharding.Clock(comm, rate), []

            def layer(i, x, full):
                ran.append(i)
                core.require(i < len(takes), f"{what}: layer({i}, …) is called")
                core.require(isinstance(full, torch.Tensor), f"{what}: layer {i} gets {core.kind(full)}")
                weight = f"{what}: the weight given to layer {i}"
                kinds = f"{weight} is {full.dtype}; expected {wholes[i].dtype}, that of the parts"
                core.require(full.dtype == wholes[i].dtype, kinds)
                if not torch.equal(full, wholes[i]):
                    weight += " (call wait() before you use it)"
                    core.close(full, wholes[i], weight, 0, 0)
                clock.compute(i + 1, takes[i])
                return (x + full[:3]).tanh() + full.mean()

            mine, start = [p[comm.rank].clone() for p in parts], x.clone()
            kept = list(mine)
            least = dtype.itemsize * 60 * comm.size
            with sharding.watching(comm, at_least=least) as live, _NamedDevices(comm):
                got = answer(start, mine, layer, clock)
                left = live.tensors
            same = len(mine) == len(kept) and all(a is b for a, b in zip(mine, kept, strict=True))
            same = same and all(torch.equal(a, p[comm.rank]) for a, p in zip(mine, parts, strict=True))
            core.require(same, f"{what}: the list parts or one of its tensors was changed")
            core.require(torch.equal(start, x), f"{what}: x was changed in place")
            core.equal(ran, list(range(len(takes))), f"{what}: the layers in the order of their calls")
            core.equal(left, 0, f"{what}: whole weights alive at the end")
            return got, clock.now, live.most_tensors, sum(s.lane == "wire" for s in clock.spans)

        _, results = inputs.run(ranks, body, f"prefetched, {n} layer{'s' * (n != 1)},")
        for rank, (got, took, most, gathers) in enumerate(results):
            core.close(got, want, f"{what}: the result on rank {rank}", 1e-5, 1e-6)
            core.equal(gathers, n, f"{what}: gathers")
            core.require(most <= 2, f"{what}: {most} whole weights alive at once; two are enough (a handle "
                         "that you still hold keeps its weight alive)")  # fmt: skip
            core.require(took <= best + 1e-9, f"{what}: {took:.3f} s on the virtual clock; {best:.3f} s are "
                         "possible if the next gather runs while a layer computes")  # fmt: skip


@core.exercise(
    "sharding.5", "each rank's own numbers, for any two numbers of ranks, from the files that hold them"
)
def load_part(answer):
    core.need_callable(answer)
    for case in range(12):
        pairs = [(3, 3), (1, 4), (5, 1), *(random.sample(range(1, 9), 2) for _ in range(9))]
        old, new = pairs[case]
        # Four numbers on three ranks: the last rank has only padding.
        total = random.choice((random.randint(1, 9), random.randint(20, 90))) if case else 4
        dtypes = {"weights": torch.bfloat16, "m": torch.float32, random.choice("vw"): torch.float64}
        rows = {name: torch.randn(total, dtype=torch.float64).to(kind) for name, kind in dtypes.items()}
        cut = {name: sharding.parts_of(row, old) for name, row in rows.items()}
        wants = {name: sharding.parts_of(row, new) for name, row in rows.items()}
        was, now = -(-total // old), -(-total // new)
        for rank in range(new):
            needed = {i // was for i in range(rank * now, min(total, (rank + 1) * now))}
            with tempfile.TemporaryDirectory() as folder:
                torch.save({"numbers": total, "ranks": old, "dtypes": dtypes}, Path(folder, "info.pt"))
                for r in needed:
                    torch.save({name: parts[r] for name, parts in cut.items()}, Path(folder, f"{r}.pt"))
                for r in set(range(old)) - needed if case % 2 else ():  # in other cases there is no file
                    Path(folder, f"{r}.pt").write_text("not for this rank")
                what = f"{total} numbers saved by {old} rank{'s' * (old > 1)}, rank {rank} of {new}"
                files = ", ".join(f"{r}.pt" for r in sorted(needed)) or "no file but info.pt"
                others, before = f"{what}: it needs {files}; it also read ", _files(folder)
                try:
                    with mock.patch.object(torch, "load", wraps=torch.load) as load:
                        got = core.call(answer, Path(folder), rank, new)
                except core.Wrong as e:
                    if isinstance(e.cause, FileNotFoundError | UnpicklingError):
                        raise core.Wrong(f"{others}one that can't be read here") from None
                    raise
                read = {Path(str(getattr(f, "name", f))).name for f in _first(load)}
                more = sorted(read & {f"{r}.pt" for r in range(old) if r not in needed})
                core.require(not more, others + ", ".join(more))
                core.require(
                    _files(folder) == before, f"{what}: load_part changed the files of the checkpoint"
                )
            core.require(isinstance(got, dict), f"{what}: expected a dict, got {core.kind(got)}")
            core.equal(sorted(got), sorted(dtypes), f"{what}: the names")
            for name, kind in dtypes.items():
                want = wants[name][rank]
                core.close(got[name], want, f"{what}: {name}", 0, 0)
                core.require(
                    got[name].dtype == kind, f"{what}: {name} is {got[name].dtype}, it was saved as {kind}"
                )


def _files(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def _first(load):
    "The file of each call of torch.load."
    return [call.args[0] if call.args else call.kwargs.get("f") for call in load.call_args_list]

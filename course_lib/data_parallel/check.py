"""Checks of data_parallel, on ranks in threads that count what they send (`group`).

Oracles: float64 sums, autograd on one process with all the data, the events that a rank noted, and what lies
on the disk.
"""

import contextlib
import copy
import os
import pathlib
import random
import tempfile
from unittest import mock

import torch
from torch import nn

from course_lib import checking as core
from course_lib import group as groups
from course_lib.checking import yours  # noqa: F401
from course_lib.data_parallel import check_inputs as inputs


@core.exercise(
    "data_parallel.1", "the sum on every rank for any length and any N, and not a byte more than a ring needs"
)
def ring_all_reduce(answer):
    core.need_callable(answer)
    cases = [(1, 5), (2, 7), (3, 1), (5, 3), (4, 4 * random.randint(2, 9))]
    cases += [(n, n * random.randint(3, 9) + random.randint(1, n - 1)) for n in (3, 4, random.randint(5, 7))]
    for ranks, length in cases:
        dtype = random.choice((torch.float32, torch.float64, torch.int64))
        _one_ring(answer, ranks, length, dtype)


def _one_ring(answer, ranks, length, dtype):
    what = f"{length} number{'s' * (length > 1)} on {f'{ranks} ranks' if ranks > 1 else 'a single rank'}"
    frames = [core.poison(length + 6, dtype=dtype) for _ in range(ranks)]
    xs = [f[3 : 3 + length] for f in frames]
    for x in xs:
        x.copy_(torch.randn(length) * 10)
    want = torch.stack([x.double() for x in xs]).sum(0)
    before = [x.clone() for x in xs]
    group, _ = inputs.run(ranks, lambda dist: answer(xs[dist.rank], dist), "ring_all_reduce")
    for r, (x, frame) in enumerate(zip(xs, frames, strict=True)):
        same = torch.equal(x, before[r]) and not torch.equal(x.double(), want)
        left = f"{what}: x of rank {r} is as before; it must itself hold the sum, in place"
        core.require(not same or ranks == 1, left)
        core.close(x.double(), want, f"{what}: the sum on rank {r}", rtol=1e-5, atol=1e-4)
        edges = torch.cat([frame[:3], frame[3 + length :]])
        untouched = edges.isnan().all() if dtype.is_floating_point else (edges == 2**30 + 7).all()
        core.require(bool(untouched), f"{what}: rank {r} wrote beyond the ends of x")
        differ = f"{what}: ranks 0 and {r} differ in their last bits; sum each chunk on one path only"
        core.require(torch.equal(x, xs[0]), f"{differ}, and send the finished sum round")
    _ring_traffic(group, ranks, length, dtype.itemsize, what)


def _ring_traffic(group, ranks, length, size, what):
    used = sorted({name for r in range(ranks) for name, _ in group.collectives(r)})
    core.require(not used, f"{what}: uses {' and '.join(used)}; make it from isend (or send) and recv alone")
    sends = [e for e in group.events if e.what == "send"]
    for e in sends:
        after = (e.rank + 1) % ranks
        core.require(
            e.peer == after, f"{what}: rank {e.rank} sends to rank {e.peer}; expected rank {after} only"
        )
    chunk = -(-length // ranks) * size
    longest = max((e.nbytes for e in sends), default=0)
    core.require(longest <= chunk, f"{what}: a message of {longest} bytes; the longest chunk has {chunk}")
    for r in range(ranks):
        sent, most = group.sent(r), 2 * (ranks - 1) * chunk
        core.require(
            sent <= most, f"{what}: rank {r} sends {sent} bytes; 2(N-1) chunks are {most} at the most"
        )
    core.equal(group.sent(), 2 * (ranks - 1) * length * size, f"{what}: bytes sent by all ranks together")


@core.exercise(
    "data_parallel.2", "the gradient of one process on every rank, tied and unused parameters included"
)
def data_parallel(answer):
    core.need_callable(answer, "a class")
    for ranks in (1, 2, 3, random.choice((4, 5))):
        _steps(answer, inputs.Plain, ranks, [[True] * ranks, [r % 2 == 0 for r in range(ranks)]])
        usage = [[random.random() < 0.5 for _ in range(ranks)] for _ in range(2)]
        mixed = [r % 2 == 0 for r in range(ranks)]
        _steps(answer, inputs.Branching, ranks, [mixed, [False] * ranks, *usage, [not m for m in mixed]])
    _twice(answer, "DataParallel")


def _steps(answer, kind, ranks, usage, inspect=None, what="DataParallel", dtype=torch.float64):
    "Train `kind` with the answer and on one process; `usage` says who takes the branch, by step and rank."
    sizes = core.ragged(3, 10, 4)
    # In float64, for several steps make a small difference of float32 large. Each rank has its own weights.
    models = [kind(*sizes).double() for _ in range(ranks)]
    for model in models if kind is inputs.Plain else []:
        model.second.to(dtype)
    twin = copy.deepcopy(models[0])
    data = [[torch.randn(random.randint(2, 5), sizes[0]).double() for _ in range(ranks)] for _ in usage]
    keeps = ranks % 2 == 0  # grads are not None before backward: zeros, or 0.25 of an earlier step
    wants, after = inputs.one_process(twin, data, usage)

    def body(dist):
        model = models[dist.rank]
        names = {p: n for n, p in model.named_parameters()}
        for p in names:  # before the answer's hooks, so that a gradient is noted before what it starts
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(lambda p: dist.mark("gradient of " + names[p]))
        wrapped = answer(model, dist)
        made = f"expected {what} to make an object with a method finish(), got {core.kind(wrapped)}"
        core.require(callable(getattr(wrapped, "finish", None)), made)
        for (name, b), want in zip(model.named_buffers(), twin.buffers(), strict=True):
            core.close(b, want, f"buffer {name} of rank {dist.rank} at the start, which is rank 0's")
        left = 0.0
        for step, (x, use) in enumerate(zip(data, usage, strict=True)):
            held = {n for n, p in model.named_parameters() if p.grad is not None}
            dist.mark(f"step {step}")
            model.loss(x[dist.rank], use[dist.rank]).backward()
            dist.mark("backward over")
            wrapped.finish()
            dist.mark("finished")
            where = f"step {step + 1} on rank {dist.rank} of {ranks}"
            _same_gradients(model, wants[step], held, left, where)
            before, left = left, 0.25 * (step % 2)
            with torch.no_grad():
                for p in model.parameters():
                    if p.grad is not None:
                        p -= 0.1 * (p.grad - before * keeps)
                        p.grad = torch.full_like(p, left) if keeps else None
        for (name, p), want in zip(model.named_parameters(), after, strict=True):
            core.close(p, want, f"{name} on rank {dist.rank} after {len(usage)} steps", rtol=1e-3, atol=1e-5)

    group, _ = inputs.run(
        ranks, body, what, "; in finish() launch what is left in that order, then the flags"
    )
    for r in range(ranks):
        for step in range(len(usage)):
            _traffic(group, r, step, models[r], kind, ranks, what)
            if inspect:
                inspect(inputs.of_step(group, r, step), models[r], r, step)


def _same_gradients(model, want, held, left, where):
    "`held` names the parameters whose grads were full of `left` before the step: on every rank the same."
    for name, p in model.named_parameters():
        if not p.requires_grad:
            core.require(p.grad is None, f"{where}: {name} is frozen and has a gradient now")
        elif want[name] is None and name in held:
            was = f"{left:g} everywhere" if left else "zeros"
            said = f"{where}: the grad of {name} was {was} on every rank before backward, and no rank used it"
            core.require(p.grad is not None, f"{said}; it is None now, and {left:g} is not None")
            same = torch.allclose(p.grad, torch.full_like(p, left))
            core.require(same, f"{said}; it must stay {left:g}, which is the mean over the ranks")
        elif want[name] is None:
            said = f"{where}: the grad of {name} was None on every rank, so it stays None"
            core.require(p.grad is None, f"{said}; zeros are a gradient to an optimizer")
        elif p.grad is None:
            raise core.Wrong(f"{where}: {name} has no gradient; another rank used it: the mean is not zero")
        else:
            said = f"{where}: gradient of {name}"
            said += f" ({left:g} everywhere before backward, which adds to it)" * (left > 0 and name in held)
            core.close(p.grad, want[name] + left * (name in held), said, rtol=1e-3, atol=1e-5)


def _twice(answer, what):
    "Two backward passes before finish(): an error, or the mean of both."
    sizes = core.ragged(3, 10, 4)
    models, x = [inputs.Plain(*sizes).double() for _ in range(3)], torch.randn(3, 4, sizes[0]).double()
    twin = copy.deepcopy(models[0])
    (2 * sum(twin.loss(part, True) for part in x) / 3).backward()

    def body(dist):
        model = models[dist.rank]
        wrapped = answer(model, dist)
        for _ in range(2):
            model.loss(x[dist.rank], True).backward()
        wrapped.finish()
        for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            said = f"{what}: two backward passes before finish() raised no RuntimeError: gradient of {name}"
            core.close(p.grad, q.grad, said, rtol=1e-3, atol=1e-5)

    try:
        inputs.run(3, body, f"{what}, given two backward passes before finish(),")
    except core.Wrong as e:
        if e.cause is not None and not isinstance(e.cause, RuntimeError):
            raise core.Wrong(f"{e}; expected a RuntimeError") from None
        if e.cause is None:
            raise


def _traffic(group, rank, step, model, kind, ranks, what):
    events = inputs.of_step(group, rank, step)
    trained = [p for p in model.parameters() if p.requires_grad]
    total = sum(p.numel() * p.element_size() for p in trained)
    sent = sum(e.nbytes for e in events if e.what in groups.COLLECTIVES)
    said = f"{what}: rank {rank} hands {sent} bytes to collectives in a step; expected {total} for its"
    said += f" {len(trained)} gradients, tied ones once, and a flag for each of 16 bytes at the most"
    core.require(total <= sent <= total + 16 * len(trained), said)
    over = [e.what for e in events].index("backward over")
    said = f"{what}: rank {rank} waits before backward is over; launch with async_op=True, wait in finish()"
    core.require("wait" not in [e.what for e in events[:over]], said)
    if kind is inputs.Plain and ranks > 1:  # where every gradient comes, nothing is left to finish()
        early = sum(e.nbytes for e in events[:over] if e.what == "all_reduce")
        said = f"{what}: when backward returns, {early} of {total} bytes of gradients are on their way"
        core.require(early >= total, f"{said}; launch the all-reduces in hooks, as the gradients come")


@core.exercise(
    "data_parallel.3",
    "as many all-reduces as buckets, each launched as soon as it is full, and the same gradients",
)
def bucketed(answer):
    core.need_callable(answer, "a class")
    for ranks in (2, 3):
        for limit in (None, 0, *core.ragged(120, 700, 3), 10**9):
            _limited(answer, ranks, limit)
    _twice(lambda model, dist: answer(model, dist, 300), "BucketedDataParallel")


def _limited(answer, ranks, limit):
    def wrap(model, dist):
        return answer(model, dist, bytes_of(model))

    def bytes_of(model):  # None: two gradients fill the first bucket exactly
        last = [p.nbytes for p in model.parameters() if p.requires_grad][-2:]
        return sum(last) if limit is None else limit

    def inspect(events, model, rank, step):
        most = bytes_of(model)
        _buckets(events, model, most, f"limit {most}, step {step + 1} on rank {rank}")

    turns = [[r % 2 == (step > 0) for r in range(ranks)] for step in range(2)]
    for dtype in (torch.float64, torch.float32):
        _steps(wrap, inputs.Plain, ranks, turns, inspect, "BucketedDataParallel", dtype)
    usage = [*turns, [False] * ranks, [True] * ranks]
    _steps(wrap, inputs.Branching, ranks, usage, inspect, "BucketedDataParallel")


def _buckets(events, model, limit, where):
    "Hold the events of a step to the rule: which buckets, and after how many gradients each is launched."
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    plan = [[trained[-1]]]
    for name, p in trained[-2::-1]:
        if sum(q.nbytes for _, q in plan[-1]) + p.nbytes > limit or plan[-1][-1][1].dtype != p.dtype:
            plan.append([])
        plan[-1].append((name, p))
    want = [sum(p.nbytes for _, p in bucket) for bucket in plan]
    got = [e.nbytes for e in events if e.what == "all_reduce"]
    said = f"{where}: all-reduces of {got} bytes; the buckets, from the last parameter on, hold {want}"
    core.require(got[: len(want)] == want, said)
    names = [e.what for e in events]
    over = names.index("backward over")
    arrived, launches = [], []
    for i, name in enumerate(names):
        if name.startswith("gradient of "):
            arrived.append(name.removeprefix("gradient of "))
        elif name == "all_reduce":
            launches.append(len(arrived) if i < over else None)
    ready = 0
    for i, (bucket, at) in enumerate(zip(plan, launches, strict=False)):
        places = [arrived.index(n) + 1 if n in arrived else None for n, _ in bucket]
        ready = None if ready is None or None in places else max(ready, *places)
        said = "in finish()" if at is None else f"after gradient {at}"
        due = "is left to finish()" if ready is None else f"is complete after gradient {ready}"
        core.require(at == ready, f"{where}: bucket {i + 1} of {len(plan)} is launched {said}; it {due}")


@core.exercise(
    "data_parallel.4", "every known token of every rank weighs the same, and gradients travel once"
)
def accumulate(answer):
    core.need_callable(answer)
    for ranks in (1, 2, 3, random.choice((4, 5))):
        words, width, classes = core.ragged(4, 12, 3)
        model = inputs.Tagger(words, width, classes).to((torch.float32, torch.float64)[ranks % 2])
        held = inputs.uneven(ranks, words, classes)
        if ranks > 2:  # one rank has run out of data, another has a microbatch without a known label
            held[random.randrange(ranks)] = []
        full = next(h for h in held if h)
        full.append((full[0][0], torch.full_like(full[0][1], -100)))
        if ranks == 2:
            held[held[0] is full] = [full[-1]] * 2  # one rank has only unknown labels
        _one_accumulation(answer, model, held, ranks)
    _no_token(answer, model, [(full[0][0], full[-1][1])])


def _one_accumulation(answer, model, held, ranks):
    want = inputs.token_mean(model, held)
    start = [p.detach().clone() for p in model.parameters()]
    replicas = [copy.deepcopy(model) for _ in range(ranks)]
    for p in (p for m in replicas for p in m.parameters()):
        p.grad = torch.randn_like(p)  # of an earlier step
    given = [core.clone(h) for h in held]
    for replica, mine in zip(replicas, given, strict=True):
        _one_graph_at_a_time(replica, mine)
    what = f"{' + '.join(str(len(h)) for h in held)} microbatches on {ranks} rank{'s' * (ranks > 1)}"
    body = lambda d: answer(replicas[d.rank], given[d.rank], d)  # noqa: E731
    group, _ = inputs.run(ranks, body, f"{what}: accumulate")
    for r, replica in enumerate(replicas):
        now, then = ([t for pair in h for t in pair] for h in (given[r], held[r]))
        same = len(now) == len(then) and all(map(torch.equal, now, then))
        core.require(same, f"{what}: the microbatches of rank {r} have changed; they are the caller's")
        for (name, p), s in zip(replica.named_parameters(), start, strict=True):
            where = f"{what}: gradient of {name} on rank {r}"
            core.require(torch.equal(p, s), f"{where}: the weights have changed; the caller makes the step")
            if want[name] is None:
                why = "no rank used it" if p.requires_grad else "it is frozen"
                said = f"{where}: expected None, since {why}, got {core.kind(p.grad)}"
                core.require(p.grad is None, f"{said}; before, it held a gradient of an earlier step")
                continue
            core.require(p.grad is not None, f"{where}: there is none")
            core.close(p.grad, want[name], where, rtol=1e-3, atol=1e-6)
        total = sum(p.nbytes for n, p in replica.named_parameters() if want[n] is not None)
        sent = sum(n for _, n in group.collectives(r))
        said = f"rank {r} of {ranks} hands {sent} bytes to collectives; the gradients have {total}"
        core.require(total <= sent <= total + 80 or ranks == 1, f"{said}, and travel once")


def _one_graph_at_a_time(model, microbatches):
    "A forward pass raises `Wrong` where an earlier one still waits for its backward, or the input is larger."
    most = max((x.numel() for x, _ in microbatches), default=0)
    unknown = sum(not (y >= 0).any() for _, y in microbatches)  # these need no backward
    waiting = set()

    def forward(module, given, out):
        core.require(module.training, "accumulate puts the model into eval mode, where dropout is off")
        words = given[0].numel()
        said = f"the model was given {words} words at once; the largest microbatch of this rank has {most}"
        core.require(words <= most, said)
        if out.requires_grad:
            said = "accumulate holds the graphs of several microbatches; call backward() after each of them"
            core.require(len(waiting) <= unknown, said)
            waiting.add(out.grad_fn)
            out.register_hook(lambda g, node=out.grad_fn: waiting.discard(node))

    model.register_forward_hook(forward)


def _no_token(answer, model, pairs):
    models = [copy.deepcopy(model) for _ in range(2)]

    def body(dist):
        try:
            answer(models[dist.rank], pairs * dist.rank, dist)
        except ValueError:
            return True
        raise core.Wrong(
            f"no rank has a known token: expected a ValueError on rank {dist.rank}, and got none"
        )

    inputs.run(2, body, "accumulate where no rank has a known token")


@core.exercise(
    "data_parallel.5", "one file, whole or absent, and a run that goes on as if it had never stopped"
)
def checkpoints(save, resume):
    for answer in (save, resume):
        core.need_callable(answer)
    for ranks in (1, 3):
        with tempfile.TemporaryDirectory() as folder:
            folders = [pathlib.Path(folder, f"rank{r}") for r in range(ranks)]
            for f in folders:
                f.mkdir()
            _stop_and_go(save, resume, ranks, [str(f / "run.pt") for f in folders])
            _torn(save, ranks, str(folders[0] / "run.pt"))
            _in_one_step(save, ranks, str(folders[0] / "run.pt"))
            _cut(resume, ranks, folders[0] / "run.pt")


def _trainer(seed, widths, rate):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(*widths), nn.BatchNorm1d(widths[1]))
    return model, torch.optim.Adam(model.parameters(), rate)


def _train(model, opt, xs):
    for x in xs:
        opt.zero_grad()
        model(x).pow(4).mean().backward()
        opt.step()


def _stop_and_go(save, resume, ranks, paths):
    "Every rank is given a path of its own to save to, so that it shows who writes; all resume from rank 0's."
    widths, done, rate = core.ragged(3, 9, 2), random.randint(2, 6), random.uniform(0.01, 0.1)
    xs, path = torch.randn(done + 3, 5, widths[0]), pathlib.Path(paths[0])
    unbroken = _trainer(0, widths, rate)
    _train(*unbroken, xs)

    def first(dist):
        model, opt = _trainer(0, widths, rate)
        fresh = resume(paths[0], model, opt, dist)
        core.equal(fresh, 0, "steps done, from resume without a file")
        dist.barrier()
        _train(model, opt, xs[:1])
        for _ in range(30):  # in about half of them rank 0 happens to be first
            dist.barrier()
            path.unlink(missing_ok=True)
            dist.barrier()
            save(paths[dist.rank], 1, model, opt, dist)
            core.require(path.exists(), f"save returned on rank {dist.rank} before the file was there")
        _train(model, opt, xs[1:done])
        save(paths[dist.rank], done, model, opt, dist)

    inputs.run(ranks, first, "save, or resume without a file,")
    for r, p in enumerate(paths):
        found = sorted(f.name for f in pathlib.Path(p).parent.iterdir())
        core.equal(found, ["run.pt"] if r == 0 else [], f"files that rank {r} of {ranks} left in its folder")

    def second(dist):
        model, opt = _trainer(dist.rank + 1, widths, 0.5)
        step = resume(paths[0], model, opt, dist)
        core.equal(step, done, f"steps done, from resume on rank {dist.rank} of {ranks}")
        _train(model, opt, xs[done:])
        for (name, t), want in zip(
            model.state_dict().items(), unbroken[0].state_dict().values(), strict=True
        ):
            what = f"{name} on rank {dist.rank} after 3 more steps (model and optimizer state continue)"
            core.close(t, want, what, rtol=1e-5, atol=1e-6)

    before = path.read_bytes()
    inputs.run(ranks, second, "resume")
    same = path.exists() and path.read_bytes() == before
    core.require(same, "resume changed the file or took it away; the next start needs it")


def _cut(resume, ranks, path):
    "A file that can't be read is an error and not a start from 0, whose first save would replace the file."
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    try:
        _, found = inputs.run(ranks, lambda d: resume(str(path), *_trainer(0, (2, 2), 0.1), d), "resume")
    except core.Wrong as e:
        if e.cause is not None:
            return
        raise
    raise core.Wrong(f"resume of a file that is cut returned {found[0]!r}; let the error of torch.load pass")


class _Fails(nn.Linear):
    "Its state can't be written; half of the file is on the disk when that shows."

    def state_dict(self, *args, **kwargs):
        return super().state_dict(*args, **kwargs) | {"big": torch.zeros(9), "hook": lambda: None}


def _torn(save, ranks, path):
    "A save that fails in the middle leaves the older file as it was."
    file, failed = pathlib.Path(path), False
    before = file.read_bytes()
    try:
        inputs.run(ranks, lambda d: save(path, 9, _Fails(2, 2), _trainer(0, (2, 2), 0.1)[1], d), "save")
    except core.Wrong:
        failed = True
    said = "save of a state that can't be pickled: expected its exception, and nothing was raised"
    core.require(failed, said)
    said = "a save failed in the middle, and the older file is gone or cut: write to another file, then"
    core.require(file.exists() and file.read_bytes() == before, f"{said} os.replace it")


def _in_one_step(save, ranks, path):
    "The older file is never written to, moved or removed: another file of its folder replaces it."
    calls = []  # of os: name, paths
    path, remedy = os.path.realpath(path), "write to another name in the same folder, then os.replace it"

    def noting(name, call):
        def noted(*args, **options):
            given = [*args, *(options[k] for k in ("path", "src", "dst") if k in options)]
            calls.append((name, [os.path.realpath(p) for p in given]))
            return call(*args, **options)

        return mock.patch.object(os, name, noted)

    with open(path, "rb") as old, contextlib.ExitStack() as patches:
        for name in ("remove", "unlink", "rename", "replace"):
            patches.enter_context(noting(name, getattr(os, name)))
        inputs.run(ranks, lambda d: save(path, 9, *_trainer(0, (2, 2), 0.1), d), "save over an older file")
        same = os.path.samestat(os.fstat(old.fileno()), os.stat(path))
    core.require(not same, f"save writes into the older file, which is cut if that is killed: {remedy}")
    for name, (source, *target) in calls:
        core.require(
            source != path, f"os.{name} takes the older file away before the new one is there: {remedy}"
        )
        near = target != [path] or os.path.dirname(source) == os.path.dirname(path)
        core.require(near, f"the new file comes from another folder, perhaps of another disk: {remedy}")

"""Checks of data_parallel, on ranks in threads that count what they send (`data_parallel_group`).

Oracles: float64 sums, autograd on one process with all the data, torch.optim.Adam, messages simulated one by
one, and a count of the tensors that are alive.
"""

import copy
import random

import torch

from course_lib import checking as core
from course_lib import group as groups
from course_lib.checking import yours  # noqa: F401
from course_lib.data_parallel import check_inputs as inputs
from course_lib.data_parallel.check_sharding import sharded_adam, sharded_linear  # noqa: F401

# --- data_parallel.1 ---------------------------------------------------------------------------


@core.exercise(
    "data_parallel.1", "the sum on every rank for any length and any N, and not a byte more than a ring needs"
)
def ring_all_reduce(answer):
    core.need_callable(answer)
    cases = [(1, 5), (2, 7), (3, 1), (5, 3), (4, 4 * random.randint(2, 9))]
    cases += [
        (n, n * random.randint(3, 9) + random.randint(1, n - 1)) for n in (3, 4, random.choice((5, 6, 7)))
    ]
    for ranks, length in cases:
        dtype = random.choice((torch.float32, torch.float64, torch.int64))
        _one_ring(answer, ranks, length, dtype)


def _one_ring(answer, ranks, length, dtype):
    what = f"{length} numbers on {ranks} ranks" if ranks > 1 else f"{length} numbers on a single rank"
    frames = [core.poison(length + 6, dtype=dtype) for _ in range(ranks)]
    xs = [f[3 : 3 + length] for f in frames]
    for x in xs:
        x.copy_(torch.randn(length) * 10)
    want = torch.stack([x.double() for x in xs]).sum(0)
    before = [x.clone() for x in xs]
    group, _ = inputs.run(ranks, lambda comm: answer(xs[comm.rank], comm), "ring_all_reduce")
    for r, (x, frame) in enumerate(zip(xs, frames, strict=True)):
        same = torch.equal(x, before[r]) and not torch.equal(x.double(), want)
        core.require(
            not same or ranks == 1,
            f"{what}: x of rank {r} is as before; it must itself hold the sum, in place",
        )
        core.close(x.double(), want, f"{what}: the sum on rank {r}", rtol=1e-5, atol=1e-4)
        edges = torch.cat([frame[:3], frame[3 + length :]])
        untouched = edges.isnan().all() if dtype.is_floating_point else (edges == 2**30 + 7).all()
        core.require(bool(untouched), f"{what}: rank {r} wrote beyond the ends of x")
        core.require(
            torch.equal(x, xs[0]), f"{what}: ranks 0 and {r} differ in their last bits; sum each chunk on "
            "one path only, and send the finished sum round",
        )  # fmt: skip
    _ring_traffic(group, ranks, length, dtype.itemsize, what)


def _ring_traffic(group, ranks, length, size, what):
    used = sorted({name for r in range(ranks) for name, _ in group.collectives(r)})
    core.require(not used, f"{what}: uses {' and '.join(used)}; make it from isend (or send) and recv alone")
    sends = [e for e in group.events if e.what == "send"]
    for e in sends:
        core.require(
            e.peer == (e.rank + 1) % ranks,
            f"{what}: rank {e.rank} sends to rank {e.peer}; in the ring it sends to rank "
            f"{(e.rank + 1) % ranks} only",
        )
    chunk = -(-length // ranks) * size
    longest = max((e.nbytes for e in sends), default=0)
    core.require(longest <= chunk, f"{what}: a message of {longest} bytes; the longest chunk has {chunk}")
    for r in range(ranks):
        most = 2 * (ranks - 1) * chunk
        sent = group.sent(r)
        core.require(
            sent <= most, f"{what}: rank {r} sends {sent} bytes; 2(N-1) chunks are {most} at the most"
        )
    core.equal(group.sent(), 2 * (ranks - 1) * length * size, f"{what}: bytes sent by all ranks together")


# --- data_parallel.2 and data_parallel.3 ------------------------------------------------------------------


@core.exercise(
    "data_parallel.2", "the gradient of one process on every rank, tied and unused parameters included"
)
def data_parallel(answer):
    core.need_callable(answer, "a class")
    for ranks in (1, 2, random.choice((3, 4))):
        _steps(answer, inputs.Plain, ranks, [None] * 2)
        usage = [[random.random() < 0.5 for _ in range(ranks)] for _ in range(2)]
        mixed = [r % 2 == 0 for r in range(ranks)]
        _steps(answer, inputs.Branching, ranks, [mixed, *usage, [not m for m in mixed]])


def _steps(answer, kind, ranks, usage, inspect=None, what="DataParallel"):
    "Train `kind` with the answer and on one process; `usage` says who takes the branch, by step and rank."
    sizes = random.sample(range(3, 10), 4)
    # In float64, for several steps make a small difference of float32 large. Each rank has its own weights.
    models = [kind(*sizes).double() for _ in range(ranks)]
    twin = copy.deepcopy(models[0])
    data = [[torch.randn(random.randint(2, 5), sizes[0]).double() for _ in range(ranks)] for _ in usage]
    keeps_zeros = random.random() < 0.5
    wants, after = inputs.one_process(twin, data, usage)

    def body(comm):
        model = models[comm.rank]
        names = {p: n for n, p in model.named_parameters()}
        for p in names:  # before the answer's hooks, so that a gradient is told before what it starts
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(lambda p: comm.mark("gradient of " + names[p]))
        wrapped = answer(model, comm)
        core.require(
            callable(getattr(wrapped, "finish", None)),
            f"expected {what} to make an object with a method finish(), got {core.kind(wrapped)}",
        )
        for (name, b), want in zip(model.named_buffers(), twin.buffers(), strict=True):
            core.close(b, want, f"buffer {name} of rank {comm.rank} at the start, which is rank 0's")
        for step, (x, use) in enumerate(zip(data, usage, strict=True)):
            comm.mark(f"step {step}")
            model.loss(x[comm.rank], use and use[comm.rank]).backward()
            comm.mark("backward over")
            wrapped.finish()
            comm.mark("finished")
            _same_gradients(model, wants[step], f"step {step + 1} on rank {comm.rank} of {ranks}")
            with torch.no_grad():
                for p in model.parameters():
                    if p.grad is not None:
                        p -= 0.1 * p.grad
                        p.grad = torch.zeros_like(p) if keeps_zeros else None
        for (name, p), want in zip(model.named_parameters(), after, strict=True):
            core.close(p, want, f"{name} on rank {comm.rank} after {len(usage)} steps", rtol=1e-3, atol=1e-5)

    group, _ = inputs.run(ranks, body, what)
    for r in range(ranks):
        for step in range(len(usage)):
            _traffic(group, r, step, models[r], kind, ranks, what)
            if inspect:
                inspect(inputs.of_step(group, r, step), models[r], r, step)


def _same_gradients(model, want, where):
    for name, p in model.named_parameters():
        if not p.requires_grad:
            core.require(p.grad is None, f"{where}: {name} is frozen and has a gradient now")
        elif want[name] is None:
            core.require(
                p.grad is None or not p.grad.any(),
                f"{where}: {name} was used by no rank, so its gradient is None or zero",
            )
        elif p.grad is None:
            raise core.Wrong(
                f"{where}: {name} has no gradient; another rank used it, so the mean is not zero"
            )
        else:
            core.close(p.grad, want[name], f"{where}: gradient of {name}", rtol=1e-3, atol=1e-5)


def _traffic(group, rank, step, model, kind, ranks, what):
    events = inputs.of_step(group, rank, step)
    trained = [p for p in model.parameters() if p.requires_grad]
    total = sum(p.numel() * p.element_size() for p in trained)
    sent = sum(e.nbytes for e in events if e.what in groups.COLLECTIVES)
    core.require(
        total <= sent <= total + 16 * len(trained),
        f"{what}: rank {rank} hands {sent} bytes to collectives in a step, and its {len(trained)} gradients, "
        f"tied ones once, have {total}",
    )
    if kind is inputs.Plain and ranks > 1:  # where every gradient comes, nothing is left to finish()
        over = [e.what for e in events].index("backward over")
        early = sum(e.nbytes for e in events[:over] if e.what == "all_reduce")
        core.require(
            early >= total,
            f"{what}: when backward returns, {early} of {total} bytes of gradients are on their way; launch "
            "the all-reduces in hooks, as the gradients come",
        )


@core.exercise(
    "data_parallel.3",
    "as many all-reduces as buckets, each launched as soon as it is full, and the same gradients",
)
def bucketed(answer):
    core.need_callable(answer, "a class")
    for ranks in (2, random.choice((3, 4))):
        for limit in (random.randint(60, 150), random.randint(160, 250), random.randint(250, 400)):

            def wrap(model, comm, limit=limit):
                return answer(model, comm, limit)

            def inspect(events, model, rank, step, limit=limit):
                _buckets(events, model, limit, f"limit {limit}, step {step + 1} on rank {rank}")

            what = "BucketedDataParallel"
            _steps(wrap, inputs.Plain, ranks, [None] * 2, inspect, what)
            _steps(wrap, inputs.Branching, ranks, [[r % 2 == 0 for r in range(ranks)],
                   [r % 2 == 1 for r in range(ranks)], [True] * ranks], inspect, what)  # fmt: skip


def _buckets(events, model, limit, where):
    "Hold the events of a step to the rule: which buckets, and after how many gradients each is launched."
    trained = [(n, p.numel() * p.element_size()) for n, p in model.named_parameters() if p.requires_grad]
    plan = [[]]
    for name, nbytes in reversed(trained):
        if plan[-1] and sum(n for _, n in plan[-1]) + nbytes > limit:
            plan.append([])
        plan[-1].append((name, nbytes))
    want = [sum(n for _, n in bucket) for bucket in plan]
    got = [e.nbytes for e in events if e.what == "all_reduce"]
    core.require(
        got == want,
        f"{where}: all-reduces of {got} bytes; the buckets, from the last parameter on, hold {want}",
    )

    names = [e.what for e in events]
    over = names.index("backward over")
    core.require(
        "wait" not in names[:over],
        f"{where}: a wait before backward is over; launch with async_op=True, and wait in finish()",
    )
    arrived, launches = [], []
    for i, name in enumerate(names):
        if name.startswith("gradient of "):
            arrived.append(name.removeprefix("gradient of "))
        elif name == "all_reduce":
            launches.append(len(arrived) if i < over else None)
    ready = 0
    for i, (bucket, at) in enumerate(zip(plan, launches, strict=True)):
        places = [arrived.index(n) + 1 if n in arrived else None for n, _ in bucket]
        ready = None if ready is None or None in places else max(ready, *places)
        said = "in finish()" if at is None else f"after gradient {at}"
        due = "is left to finish()" if ready is None else f"is complete after gradient {ready}"
        core.require(at == ready, f"{where}: bucket {i + 1} of {len(plan)} is launched {said}; it {due}")


# --- data_parallel.4 ---------------------------------------------------------------------------


@core.exercise(
    "data_parallel.4", "every known token of every rank weighs the same, and gradients travel once"
)
def accumulate(answer):
    core.need_callable(answer)
    for ranks in (1, 2, random.choice((3, 4))):
        words, width, classes = random.sample(range(4, 12), 3)
        model = inputs.Tagger(words, width, classes)
        held = inputs.uneven(ranks, words, classes)
        if ranks > 2:  # one rank has run out of data, another has a microbatch without a known label
            held[random.randrange(ranks)] = []
        full = next(h for h in held if h)
        full.append((full[0][0], torch.full_like(full[0][1], -100)))
        want = inputs.token_mean(model, held)
        start = [p.detach().clone() for p in model.parameters()]
        replicas = [copy.deepcopy(model) for _ in range(ranks)]
        group, _ = inputs.run(
            ranks,
            lambda comm, m=replicas, h=held: answer(m[comm.rank], core.clone(h[comm.rank]), comm),
            "accumulate",
        )
        held_text = " + ".join(str(len(h)) for h in held)
        for r, replica in enumerate(replicas):
            for (name, p), w, s in zip(replica.named_parameters(), want, start, strict=True):
                where = f"{held_text} microbatches on {ranks} ranks: gradient of {name} on rank {r}"
                core.require(p.grad is not None, f"{where}: there is none")
                core.close(p.grad, w, where, rtol=1e-3, atol=1e-6)
                core.require(
                    torch.equal(p, s), f"{where}: the weights have changed; leave the step to the caller"
                )
            total = sum(p.numel() * p.element_size() for p in start)
            sent = sum(n for _, n in group.collectives(r))
            core.require(
                total <= sent <= total + 64 or ranks == 1,
                f"rank {r} of {ranks} hands {sent} bytes to collectives; the gradients have {total}, and are "
                "to travel once",
            )


# --- data_parallel.5 ---------------------------------------------------------------------------


@core.exercise("data_parallel.5", "what the wire leaves over agrees with messages simulated one by one")
def exposed(answer):
    core.need_callable(answer)
    seen, draws = set(), 0
    while draws < 30 or len(seen) < len(inputs.SITUATIONS):
        draws += 1
        ranks, k = random.choice((1, 2, 3, 5, 8)), random.randint(3, 9)
        layers = [(random.uniform(0.2, 2.0), random.randint(5, 90)) for _ in range(k)]
        limit = random.choice((0, random.randint(20, 140), 10_000))
        alpha, beta = random.uniform(0, 0.15), random.uniform(0.002, 0.03)
        want, facts = inputs.simulate(layers, limit, ranks, alpha, beta)
        seen |= facts
        got = core.call(answer, list(layers), limit, ranks, alpha, beta)
        core.close(
            got, want, f"exposed seconds of {k} layers in buckets of {limit} bytes, {ranks} ranks, "
            f"alpha {alpha:.3f}, beta {beta:.4f}", rtol=1e-6, atol=1e-9,
        )  # fmt: skip

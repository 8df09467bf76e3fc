"Checks of exercises 6 and 7. Oracles: torch.optim.Adam, autograd in float64, and a count of what is alive."

import itertools
import math
import random

import torch
from torch import nn

from course_lib import checking as core
from course_lib.data_parallel import check_inputs as inputs
from course_lib.data_parallel.live import watching

# --- data_parallel.6 ---------------------------------------------------------------------------


@core.exercise("data_parallel.6", "Adam's own steps, with a share of its state on each rank")
def sharded_adam(answer):
    core.need_callable(answer, "a class")
    for ranks in (1, 2, 3, random.choice((4, 5))):
        big = ranks >= 4
        shapes = [(random.randint(2, 5), random.randint(3, 7)), (random.randint(2, 9),), ()]
        shapes += [(13, random.randint(12, 15))] if big else []
        if sum(math.prod(s) for s in shapes) % ranks == 0:  # a remainder is wanted
            shapes.append((1,))
        _adam(answer, ranks, shapes)
    _adam(answer, 3, [(2,)])  # fewer numbers than ranks


def _adam(answer, ranks, shapes):
    lr, eps = random.uniform(0.01, 0.1), 10 ** random.uniform(-3, -1)
    betas = random.uniform(0.5, 0.9), random.uniform(0.8, 0.99)
    start = [torch.randn(s) for s in shapes]
    steps = random.randint(4, 6)
    grads = [
        [[torch.randn(s) * 2.0 ** random.randint(-3, 3) for s in shapes] for _ in range(ranks)]
        for _ in range(steps)
    ]
    oracle = [nn.Parameter(p.double()) for p in start]
    adam = torch.optim.Adam(oracle, lr, betas, eps, foreach=False)
    wants = []
    for step in grads:
        for i, p in enumerate(oracle):
            p.grad = torch.stack([rank[i].double() for rank in step]).mean(0)
        adam.step()
        wants.append([p.detach().clone() for p in oracle])
    total = sum(p.numel() for p in start)
    what = f"{total} parameters on {ranks} ranks"
    share = -(-total // ranks)

    def body(comm):
        params = [nn.Parameter(p.clone()) for p in start]
        opt = answer(params, comm, lr, betas, eps)
        core.require(
            callable(getattr(opt, "step", None)),
            f"expected ShardedAdam to make an object with a method step(), got {core.kind(opt)}",
        )
        for t, (step, want) in enumerate(zip(grads, wants, strict=True)):
            for p, g in zip(params, step[comm.rank], strict=True):
                p.grad = g.clone()
            comm.mark(f"step {t}")
            opt.step()
            comm.mark("finished")
            for i, (p, w) in enumerate(zip(params, want, strict=True)):
                core.close(
                    p,
                    w,
                    f"{what}: parameter {i + 1} on rank {comm.rank} after step {t + 1}",
                    rtol=1e-4,
                    atol=1e-5,
                )
        return inputs.held(opt, params)

    group, kept = inputs.run(ranks, body, "ShardedAdam")
    for r in range(ranks):
        if ranks >= 4:
            most = 4 * share + 16
            core.require(
                kept[r] <= most,
                f"{what}: rank {r} keeps {kept[r]} numbers between steps; its share is {share}, "
                f"and 4 shares ({most} with some room) are enough",
            )
        for t in range(steps):
            sent = inputs.wire_bytes(inputs.of_step(group, r, t), ranks)
            most = 2 * (ranks - 1) * (share + len(shapes)) * 4
            core.require(
                sent <= most,
                f"{what}: a step sends {sent:.0f} bytes from rank {r}; reduce-scatter and "
                f"all-gather of the shares send {most} or less",
            )


# --- data_parallel.7 ---------------------------------------------------------------------------


@core.exercise(
    "data_parallel.7",
    "the whole layer's outputs and gradients; one full weight alive in forward, two such tensors in backward",
)
def sharded_linear(answer):
    core.need_callable(answer)
    for ranks in (1, 2, 3, random.choice((4, 5))):
        for widths in iter(lambda: [random.randint(26, 32) for _ in range(4)], None):
            if ranks == 1 or math.prod(widths[:2]) % ranks:  # a remainder is wanted
                break
        _layer_stack(answer, ranks, widths)


def _layer_stack(answer, ranks, widths):
    shapes = [(b, a) for a, b in itertools.pairwise(widths)]
    weights = [torch.randn(s) / math.sqrt(s[1]) for s in shapes]
    xs = [torch.randn(random.randint(1, 3), widths[0]) for _ in range(ranks)]
    oracle = [w.double().requires_grad_() for w in weights]
    inputs64 = [x.double().requires_grad_() for x in xs]
    outs = [inputs.stack(x, oracle, lambda x, w: x @ w.T) for x in inputs64]
    sum(o.square().sum() for o in outs).backward()
    shards = [inputs.shards(w, ranks) for w in weights]
    small = min(w.numel() for w in weights) * 4
    what = f"sharded_linear on {ranks} rank{'s' * (ranks > 1)}"

    def body(comm):
        parts = [nn.Parameter(s[comm.rank].clone()) for s in shards]
        x = xs[comm.rank].clone().requires_grad_()
        with watching(comm, at_least=0.8 * small) as live:
            y = inputs.stack(
                x, list(zip(parts, shapes, strict=True)), lambda x, w: _layer(answer, x, *w, comm)
            )
            forward, after = live.most_tensors, live.tensors
            live.most_tensors = 0
            y.square().sum().backward()
        if ranks > 1:
            core.equal(after, 0, f"{what}: tensors of a full weight's size alive after forward")
            core.require(
                forward <= 1,
                f"{what}: {forward} tensors of a full weight's size alive at once in forward; one is enough",
            )
            core.require(
                live.most_tensors <= 2,
                f"{what}: {live.most_tensors} tensors of a full weight's size alive at once in backward; "
                "two are enough",
            )
        where = f"on rank {comm.rank} of {ranks}"
        core.close(y, outs[comm.rank].detach(), f"the output {where}", rtol=1e-3, atol=1e-4)
        core.require(x.grad is not None, f"the gradient of the input {where}: there is none")
        core.close(
            x.grad, inputs64[comm.rank].grad, f"the gradient of the input {where}", rtol=1e-3, atol=1e-3
        )
        for i, (part, w) in enumerate(zip(parts, oracle, strict=True)):
            core.require(part.grad is not None, f"the gradient of shard {i + 1} {where}: there is none")
            mean = inputs.shards(w.grad / ranks, ranks)[comm.rank]
            core.close(
                part.grad,
                mean,
                f"the gradient of shard {i + 1} {where}, the mean over the ranks",
                rtol=1e-3,
                atol=1e-3,
            )

    group, _ = inputs.run(ranks, body, "sharded_linear")
    for r in range(ranks):
        sent = inputs.wire_bytes(group.events_of(r), ranks)
        most = sum(3 * (ranks - 1) * s[0].numel() * 4 for s in shards)
        core.require(
            sent <= most,
            f"{what}: rank {r} sends {sent:.0f} bytes; two all-gathers and a reduce-scatter "
            f"for each layer send {most}",
        )


def _layer(answer, x, part, shape, comm):
    y = answer(x, part, shape, comm)
    core.require(
        isinstance(y, torch.Tensor) and y.shape == (x.shape[0], shape[0]),
        f"expected a tensor of shape {[x.shape[0], shape[0]]} from sharded_linear, got {core.kind(y)}",
    )
    return y

"""Checks of lesson tensor_parallel. Oracles: the whole layers in one process, autograd in float64,
torch.nn.functional.cross_entropy, a virtual clock, counts of collectives, bytes and FLOPs."""

import functools
import random

import torch
from torch import nn
from torch.nn import functional as F

from course_lib import checking as core
from course_lib import tensor_parallel as tp
from course_lib.checking import yours  # noqa: F401
from course_lib.data_parallel.check_inputs import run

AGREE = {torch.float32: (1e-4, 1e-5), torch.float64: (1e-9, 1e-10)}


def _on(size):
    return f"on {size} rank{'s' * (size > 1)}"


def _dtype(got, dtype, what):
    "Compared before the values, whose digits look the same."
    if isinstance(got, torch.Tensor):
        core.require(got.dtype == dtype, f"{what}: expected {dtype}, got {got.dtype}")


def _contiguous(comm):
    "`comm`, and its collectives refuse memory that isn't contiguous: Gloo may give a wrong sum of it."
    collective = comm._collective

    def checked(name, given, out, *args, **kwargs):
        for t in (given, out):
            if isinstance(t, torch.Tensor) and not t.is_contiguous():
                strides = f"{name} was given memory that isn't contiguous (strides {t.stride()})"
                raise core.Wrong(f"{strides}: make a contiguous copy first")
        return collective(name, given, out, *args, **kwargs)

    comm._collective = checked
    return comm


@core.exercise("tensor_parallel.1", "the whole pair of layers, one all-reduce, a share of the FLOPs each")
def parallel_mlp(answer):
    core.need_callable(answer)
    for size in (1, 2, 3, random.choice((4, 5))):
        width, share, out = core.ragged(3, 12, 3)
        dtype = torch.float64 if size == 2 else torch.float32
        up = nn.Linear(width, share * size, bias=size < 3, dtype=dtype)  # each with and without a bias
        down = nn.Linear(share * size, out, bias=size not in (1, 3), dtype=dtype)
        lead = (random.randint(2, 4),) * (size > 1) + (random.randint(5, 9),)
        x = torch.randn(*lead, width, dtype=dtype)
        want = down.double()(F.gelu(up.double()(x.double()))).detach()
        up, down = up.to(dtype), down.to(dtype)

        def body(comm, up=up, down=down, x=x):
            with tp.CountMatmuls() as counted:
                return core.call(answer, x, up, down, comm), counted.flops

        what = f"parallel_mlp {_on(size)}"
        group, found = run(size, body, "parallel_mlp")
        whole = 2 * x[..., 0].numel() * share * size * (width + out)
        for rank, (got, flops) in enumerate(found):
            _dtype(got, dtype, what)
            core.close(got, want, f"{what}, hidden width {share * size}: rank {rank}", *AGREE[dtype])
            core.require(flops <= whole // size, f"{what}: rank {rank} multiplies {flops:,} FLOPs; "
                         f"its share of {whole:,} is {whole // size:,}: cut the weights first")  # fmt: skip
            calls = group.collectives(rank)
            core.require(calls == [("all_reduce", got.nbytes)], f"{what}: expected one all_reduce of the "
                         f"output's {got.nbytes} bytes, got {calls}")  # fmt: skip
    up, down = nn.Linear(4, 7), nn.Linear(7, 3)

    def uneven(comm):
        core.refuses(answer, torch.randn(2, 4), up, down, comm, why="a hidden width of 7 on 2 ranks")

    run(2, uneven, "parallel_mlp")


@core.exercise("tensor_parallel.2", "outputs and gradients of one process, one all-reduce in one direction")
def through_ranks(copy_to_ranks, sum_over_ranks):
    for size in (1, 2, 3, 4):
        shape, dtype = random.sample(range(3, 9), (2, 2, 1, 3)[size - 1]), list(AGREE)[size % 2]
        xs, given = ([torch.randn(shape, dtype=dtype) for _ in range(size)] for _ in range(2))
        if size % 3:  # memory that isn't in order
            xs, given = ([t.mT.contiguous().mT for t in ts] for ts in (xs, given))
        sum_x, sum_given = sum(xs), sum(given)
        _both_ways(copy_to_ranks, xs, given, xs, [sum_given] * size, [], ["all_reduce"])
        _both_ways(sum_over_ranks, xs, given, [sum_x] * size, given, ["all_reduce"], [])
    _in_a_network(copy_to_ranks, sum_over_ranks)


def _both_ways(fn, xs, given, outs, grads, forward, backward):
    "`fn(x, dist)` on a rank for each of `xs`: output, gradient and collectives, when `given` comes back."
    core.need_callable(fn)
    name, size = getattr(fn, "__name__", "the function"), len(xs)

    def body(comm):
        leaf, mine = xs[comm.rank].detach().requires_grad_(), given[comm.rank].clone()
        out = core.call(fn, leaf, _contiguous(comm), mutates=(0,))
        made = isinstance(out, torch.Tensor) and out.requires_grad
        hint = ": return the result of a torch.autograd.Function's apply" * isinstance(out, torch.Tensor)
        core.require(made, f"{name}: expected a tensor that autograd knows, got {core.kind(out)}{hint}")
        core.equal(list(out.shape), list(outs[comm.rank].shape), f"{name}: the shape of the output")
        kept = out.detach().clone()
        comm.mark("backward")
        (grad,) = torch.autograd.grad(out, leaf, mine)
        changed = f"the backward of {name} changed the gradient that it was given: work on a copy"
        core.require(torch.equal(mine, given[comm.rank]), changed)
        return kept, grad

    before, what = [x.clone() for x in xs], f"{name} {_on(size)}"
    group, found = _run(size, body, name)
    for rank, (got, grad) in enumerate(found):
        core.require(torch.equal(xs[rank], before[rank]), f"{what} changed x in place")
        for part, want, which in ((got, outs[rank], "output"), (grad, grads[rank], "gradient of x")):
            _dtype(part, xs[0].dtype, f"{what}: {which}")
            core.close(part, want, f"{what}: {which} on rank {rank}", *AGREE[xs[0].dtype])
        calls = [e.what for e in group.events_of(rank) if e.what != "wait"]
        at = calls.index("backward")
        wanted, called = _in_words(forward, backward), _in_words(calls[:at], calls[at + 1 :])
        core.require(called == wanted, f"{what}: expected {wanted}, got {called}")


def _in_words(forward, backward):
    words = [" and ".join(names) or "no collective" for names in (forward, backward)]
    return f"{words[0]} in forward and {words[1]} in backward"


def _run(size, body, what):
    "`run`, whose sentence on lengths is for a tensor that must be padded; here the output is wrong."
    try:
        return run(size, body, what)
    except core.Wrong as e:
        if "reduce_scatter_tensor takes" not in str(e):
            raise
        raise core.Wrong(str(e).replace("pad the last part", "the output has len(x) // size rows")) from None


def _in_a_network(enter, leave, rows=False):
    "Two blocks with residuals, cut over ranks, against one process in float64."
    for size in (2, 3):
        width, hidden, tokens = 5, size * random.randint(2, 4), 2 * size if rows else 7
        shapes = [(tokens, width), *((width, hidden), (hidden, width)) * 2]
        whole = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
        target = torch.randn(tokens, width, dtype=torch.float64)
        wants = _network(whole, target, lambda t: t, lambda t: t)
        _, found = run(size, functools.partial(_cut_network, whole, target, enter, leave, rows), "a network")
        what = f"two cut blocks with residuals on {size} ranks"
        names = "output", "gradient of x", *(f"gradient of {w} {i}" for i in (1, 2) for w in ("up", "down"))
        for rank, (gots, cut) in enumerate(found):
            for name, got, want, k in zip(names, gots, wants, (0, 0, 1, 2, 1, 2), strict=True):
                core.close(got, cut[k](want), f"{what}: {name} on rank {rank}", 1e-8, 1e-9)


def _network(leaves, target, enter, leave):
    "The output and the gradients of x and of each weight."
    x, *weights = leaves
    for up, down in (weights[:2], weights[2:]):
        x = x + leave(torch.tanh(enter(x) @ up) @ down)
    return [x.detach(), *torch.autograd.grad((x * target).sum(), leaves)]


def _cut_network(whole, target, enter, leave, rows, comm):
    "The same on this rank, and how x, up and down are cut."

    def part(dim):
        return lambda t: t.detach().tensor_split(comm.size, dim)[comm.rank].clone()

    cut = part(0) if rows else torch.clone, part(1), part(0)
    mine = [cut[k](t).detach().requires_grad_() for k, t in zip((0, 1, 2, 1, 2), whole, strict=True)]
    return _network(mine, cut[0](target), lambda t: enter(t, comm), lambda t: leave(t, comm)), cut


@core.exercise("tensor_parallel.3", "each rank's own heads, with the keys and values that they read")
def cut_attention(answer):
    core.need_callable(answer)
    for size, groups, shared in ((1, 2, 2), (2, 2, 3), (3, 1, 2), (2, 3, 1), (4, 2, 2)):
        kv, heads, dim, width = (
            size * groups,
            size * groups * shared,
            random.randint(2, 5),
            random.randint(6, 11),
        )
        qkv = torch.randn((heads + 2 * kv) * dim, width, dtype=torch.float64)
        out, x = (
            torch.randn(width, heads * dim, dtype=torch.float64),
            torch.randn(5, width, dtype=torch.float64),
        )
        want = _attend(x, qkv, out, heads, kv)
        total, what = (
            torch.zeros_like(want),
            f"{heads} heads, {kv} of keys and values, of {dim}, {_on(size)}",
        )
        for rank in range(size):
            got = core.parts(
                core.call(answer, qkv, out, heads, kv, rank, size), "qkv out", "what cut_attention returns"
            )
            shapes = [(len(qkv) // size, width), (width, heads * dim // size)]
            for part, shape, name in zip(got, shapes, ("qkv", "out"), strict=True):
                core.require(
                    isinstance(part, torch.Tensor),
                    f"{what}: expected {name} as a tensor, got {core.kind(part)}",
                )
                core.equal(list(part.shape), list(shape), f"{what}: the shape of rank {rank}'s {name}")
                _dtype(part, qkv.dtype, f"{what}: rank {rank}'s {name}")
            for k, (first, count) in enumerate(((0, heads), (heads, kv), (heads + kv, kv))):
                n = count // size
                rows = torch.cat([qkv[(first + rank * n + h) * dim :][:dim] for h in range(n)])
                at = (0, heads // size, (heads + kv) // size)[k] * dim
                name = ("queries", "keys", "values")[k]
                core.close(got[0][at : at + len(rows)], rows, f"{what}: the {name} of rank {rank}", 0, 0)
            total += _attend(x, got[0], got[1], heads // size, kv // size)
        core.close(total, want, f"{what}: the sum of the parts' outputs", 1e-9, 1e-9)
    for heads, kv, size, why in (
        (6, 3, 2, "3 heads of keys and values"),
        (6, 6, 4, "6 heads"),
        (8, 2, 4, "2 heads of keys and values"),
    ):
        given = torch.randn((heads + 2 * kv) * 2, 5), torch.randn(5, heads * 2), heads, kv, 0, size
        core.refuses(answer, *given, why=f"{why} on {size} ranks")


def _attend(x, qkv, out, heads, kv):
    "Attention head by head, in plain loops."
    dim = out.shape[1] // heads
    q, k, v = ((x @ qkv.T)[:, a * dim : b * dim].unflatten(1, (-1, dim))
               for a, b in ((0, heads), (heads, heads + kv), (heads + kv, heads + 2 * kv)))  # fmt: skip
    hidden = torch.full((len(x), len(x)), -torch.inf, dtype=x.dtype).triu(1)
    each = [torch.softmax(q[:, h] @ k[:, h * kv // heads].T / dim**0.5 + hidden, -1) @ v[:, h * kv // heads]
            for h in range(heads)]  # fmt: skip
    return torch.cat(each, 1) @ out.T


@core.exercise("tensor_parallel.4", "loss and gradient of the whole vocabulary, three numbers a token sent")
def vocab_cross_entropy(answer):
    core.need_callable(answer)
    for size in (1, 2, 3, 4):
        tokens, dtype = random.randint(6, 11), torch.float64 if size == 3 else torch.float32
        widths = core.ragged(2, 9, size)
        starts = [sum(widths[:r]) for r in range(size)]
        scale = 200.0 if size == 2 else 3.0
        far = (-900.0, random.choice((-900.0, 0.0, 700.0)), 700.0, 0.0)[size - 1]
        logits = scale * torch.randn(tokens, sum(widths), dtype=dtype) + far
        targets = torch.randint(sum(widths), (tokens,))
        targets[: 2 * size] = torch.tensor(
            [e for s, w in zip(starts, widths, strict=True) for e in (s, s + w - 1)]
        )[:tokens]
        targets = targets[torch.randperm(tokens)]
        targets[random.randrange(tokens)] = -100
        leaf = logits.double().clone().requires_grad_()
        loss = F.cross_entropy(leaf, targets)
        (want,) = torch.autograd.grad(loss, leaf)

        def body(comm, starts=starts, widths=widths, logits=logits, targets=targets):
            mine = logits[:, starts[comm.rank] :][:, : widths[comm.rank]].clone()
            return core.call(answer, mine, targets, starts[comm.rank], comm)

        what = f"vocab_cross_entropy of {tokens} tokens {_on(size)}, vocabulary parts {widths}"
        group, found = run(size, body, "vocab_cross_entropy")
        for rank, got in enumerate(found):
            got = core.parts(got, "loss grad", f"{what}: rank {rank}")
            tensor = isinstance(got[0], torch.Tensor)
            core.require(tensor, f"{what}: expected the loss as a tensor, got {core.kind(got[0])}")
            _dtype(got[0], dtype, f"{what}: the loss")
            core.close(got[0], loss.item(), f"{what}: loss on rank {rank}", *AGREE[dtype])
            part = want[:, starts[rank] :][:, : widths[rank]]
            _dtype(got[1], dtype, f"{what}: the gradient")
            core.close(
                got[1], part, f"{what}: gradient of rank {rank}'s logits (one target is -100)", *AGREE[dtype]
            )
            calls = group.collectives(rank)
            sent, most = sum(b for _, b in calls) + group.sent(rank), 3 * tokens * logits.element_size()
            few = len(calls) <= 3 and {n for n, _ in calls} <= {"all_reduce"} and sent <= most
            wanted = f"up to three all-reduces with a number for each token, {most} bytes in all"
            core.require(few, f"{what}: expected {wanted}, got {calls}")


@core.exercise("tensor_parallel.5", "rows gathered, sums scattered, and each is the other's backward")
def by_rows(gather_rows, scatter_sum):
    for size in (1, 2, 3, 4):
        rows, width, dtype = random.randint(2, 5), random.randint(6, 9), list(AGREE)[size % 2]
        tail = ((width,), (width,), (), (width, 2))[size - 1]
        short, tall = ([torch.randn(n, *tail, dtype=dtype) for _ in range(size)] for n in (rows, rows * size))
        if size % 3:
            short, tall = ([t.mT.contiguous().mT for t in ts] for ts in (short, tall))
        joined, shares = torch.cat(short), list(sum(tall).split(rows))
        gather, scatter = ["all_gather_into_tensor"], ["reduce_scatter_tensor"]
        _both_ways(gather_rows, short, tall, [joined] * size, shares, gather, scatter)
        _both_ways(scatter_sum, tall, short, shares, [joined] * size, scatter, gather)
    _in_a_network(gather_rows, scatter_sum, rows=True)


@core.exercise("tensor_parallel.6", "all rows times w on every rank, the wire beside the matmuls")
def gather_matmul(answer):
    core.need_callable(answer)
    cases = [(1, 1, 1.0), (2, 1, 0.6), (2, 4, 1.7), (3, 3, 0.4), (3, 1, 1.05), (4, 2, 1.0), (5, 3, 2.5)]
    for size, pieces, ratio in cases:  # ratio: a block's time on the wire to that of its matmul
        rows, (inner, cols) = pieces * random.randint(3, 5) + (pieces > 1), core.ragged(5, 10, 2)
        dtype = torch.float64 if pieces > 2 else torch.float32
        xs = [torch.randn(rows, inner, dtype=dtype) for _ in range(size)]
        w, flops = torch.randn(inner, cols, dtype=dtype), 1e6
        wire = xs[0].nbytes / (ratio * 2 * rows * inner * cols / flops)
        what = f"gather_matmul of {rows} rows a rank, pieces={pieces}, {_on(size)}"

        def fn(x, w, ring, pieces):
            return core.call(answer, x, w, ring, pieces, mutates=(0, 2))

        kept = [x.clone() for x in xs]
        body = functools.partial(
            tp.on_rank, fn=fn, xs=xs, w=w, pieces=pieces, wire=wire, flops=flops, ends={}
        )
        group, found = run(size, body, "gather_matmul")
        compute, passing = tp.least_seconds(xs, w, wire, flops)
        piece = -(-rows // pieces) / rows
        most = max(compute, passing) + piece * compute / size
        for rank, (got, ring) in enumerate(found):
            core.require(torch.equal(xs[rank], kept[rank]), f"{what}: rank {rank} changed x in place")
            _dtype(got, dtype, f"{what}: rank {rank}")
            core.close(got, torch.cat(kept) @ w, f"{what}: rank {rank}", *AGREE[dtype])
            core.equal(group.sent(rank), (size - 1) * xs[0].nbytes, f"{what}: sent by rank {rank}", "bytes")
            cut = sorted([len(p) for p in xs[rank].tensor_split(pieces)] * (size - 1))
            sent = sorted(len(passing.piece) for passing in ring.passing)
            core.equal(sent, cut, f"{what}: rows of the pieces that rank {rank} passes on")
            seen = sum(span.end - span.start for span in ring.spans if span.lane == "compute")
            unseen = f"{what}: the clock saw matmuls of {1e6 * seen:.0f} of {1e6 * compute:.0f} virtual µs"
            core.require(seen >= compute * (1 - 1e-9), f"{unseen}: use torch.mm or @")
            each = f"its matmuls take {1e6 * compute:.0f} and its wire {1e6 * passing:.0f}"
            late = f"{each}, so with the matmul of one more piece {1e6 * most:.0f} are enough"
            took = f"{what}: rank {rank} needs {1e6 * ring.now:.0f} virtual µs; {late}"
            core.require(ring.now <= most * (1 + 1e-9), took)

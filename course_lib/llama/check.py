"""Checks of lesson llama. Oracles: a step written out, dense attention and cross-entropy in float64, one
process, Meta's rotation of neighbouring pairs, a model whose loss says what it was shown."""

import functools
import math
import random
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from course_lib import checking as core
from course_lib import llama as lesson
from course_lib import meter, ranks
from course_lib.checking import yours  # noqa: F401
from course_lib.llama.model import Config, Llama


class _Watch(TorchDispatchMode):
    "The dtypes of matmuls and of cross-entropies, and the shapes of the largest tensors that were made."

    def __init__(self):
        super().__init__()
        self.products, self.losses = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out, name = func(*args, **(kwargs or {})), func._schema.name.removeprefix("aten::")
        if name in ("mm", "addmm", "bmm"):
            self.products.append(out.dtype)
        if name == "_log_softmax":
            self.losses.append(out.dtype)
        return out


def _config(**changes):
    heads, groups, d = random.choice([(4, 2, 8), (6, 3, 4), (6, 2, 8)])
    return replace(
        Config(
            vocab=random.randint(40, 90),
            width=heads * d,
            layers=2,
            heads=heads,
            kv_heads=groups,
            ffn=random.randint(20, 40),
            context=24,
            pad=1,
        ),
        **changes,
    )


@core.exercise("llama.1", "every product in bf16, weights and loss in fp32, no sync, nothing left over")
def step(answer):
    core.need_callable(answer)
    config = _config()
    x, y = torch.randint(0, config.vocab, (2, 3, 17))
    model, twin = Llama(config), Llama(config)
    twin.load_state_dict(model.state_dict())
    opts = [
        torch.optim.AdamW(m.parameters(), 0.01, betas=(0.5, 0.9), eps=1e-3, foreach=False)
        for m in (model, twin)
    ]
    for number in range(3):
        if number == 1:  # a gradient that an earlier step left behind would show
            core.require(
                not any(p.grad is not None and p.grad.any() for p in model.parameters()),
                "after a step the gradients are not cleared: the next backward pass adds to them",
            )
        with torch.autocast("cpu", torch.bfloat16):
            want = twin(x, y)
        want.backward()
        opts[1].step()
        opts[1].zero_grad()
        seen = _Watch()

        @functools.wraps(answer)
        def watched(*args, seen=seen):
            with seen, meter.count(portable=False) as seen.counts:
                return answer(*args)

        got = core.call(watched, model, opts[0], x, y, mutates=(0, 1))
        counts = seen.counts
        core.require(
            isinstance(got, torch.Tensor), f"what train_step returns: expected a tensor, got {core.kind(got)}"
        )
        where = f" (line {counts.where[0]})" if counts.where else ""
        core.equal(counts.syncs, 0, f"syncs in a step{where}")
        core.require(not got.requires_grad, "the returned loss holds the graph of the step: detach it")
        fp32 = sum(d != torch.bfloat16 for d in seen.products)
        core.equal(fp32, 0, f"matmuls in fp32, of {len(seen.products)} in a step")
        core.require(
            seen.losses == [torch.float32], "the cross-entropy is computed in bf16: compute it in fp32"
        )
        core.close(got.float(), want.detach(), f"loss of step {number + 1}", rtol=1e-3)
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        core.require(
            p.dtype == torch.float32, f"{name} is {p.dtype} after three steps: the weights stay in fp32"
        )
        core.close(p, q, f"{name} after three steps", rtol=1e-2, atol=2e-3)


def _dense(q, k, v):
    q, k, v = (t.double() for t in (q, k, v))
    k, v = (t[:, [h * t.shape[1] // q.shape[1] for h in range(q.shape[1])]] for t in (k, v))
    new, known = q.shape[2], k.shape[2]
    seen = torch.arange(known) <= torch.arange(known - new, known)[:, None]
    return (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~seen, -math.inf).softmax(-1) @ v


@core.exercise("llama.2", "right for groups of heads and for new positions; no scores, no repeated keys")
def attend(answer):
    for new, known in ((37, 37), (1, 1), (1, 29), (random.randint(2, 20), 33)):
        heads, groups = random.choice([(4, 2), (6, 2), (6, 3), (4, 4), (8, 1)])
        q = torch.randn(2, heads, new, 8, requires_grad=True)
        k, v = (torch.randn(2, groups, known, 8, requires_grad=True) for _ in range(2))
        got, what = core.call(answer, q, k, v), f"{new} queries, the last of {known} positions"
        want = _dense(q, k, v)
        core.close(got, want, f"{what}, {heads} heads and {groups} of keys", rtol=1e-4, atol=1e-5)
        core.require(got.requires_grad, "the result has no gradient: training needs one")
        out, upstream = answer(q, k, v), torch.randn(want.shape)
        for name, a, b in zip(
            "qkv", *(torch.autograd.grad((o * upstream).sum(), (q, k, v)) for o in (out, want)), strict=True
        ):
            core.close(a, b, f"gradient of {name}, {what}", rtol=1e-3, atol=1e-4)
    for new, known in ((300, 300), (100, 400), (1, 2000)):
        q, (k, v) = torch.randn(2, 16, new, 16), torch.randn(2, 2, 2, known, 16)
        scores, repeated = 2 * 16 * new * known * 4, 8 * k.nbytes
        held = meter.peak_memory(answer, q, k, v)
        core.require(
            held < min(scores / 2, repeated) if new == 1 else held < scores / 2,
            f"{new} queries of {known} positions: held {held:,} bytes, and all scores are {scores:,}, the "
            f"keys repeated for each head {repeated:,}: store neither",
        )


@core.exercise("llama.3", "loss and gradients right for any chunk and padding; one chunk of logits alive")
def head_loss(answer):
    core.need_callable(answer, "a class")
    if not hasattr(answer, "apply"):
        core.call(answer)  # a stub says that it is one
        raise core.Wrong(f"expected a class made from torch.autograd.Function, got {core.kind(answer)}")
    for chunk in (7, 16, 64):
        n, width, vocab, rows = *core.ragged(23, 60, 2), random.randint(30, 50), 64
        x, w = torch.randn(n, width), torch.randn(rows, width) / 3
        y, scale = torch.randint(0, vocab, (n,)), random.uniform(2, 5)
        y[torch.randperm(n)[: n // 3]] = -1
        y[:7] = -1 if chunk == 7 else y[:7]  # a chunk in which nothing counts
        sizes, waits = [], []

        def xent(logits, target, sizes=sizes):
            sizes.append(len(logits))
            return lesson.xent(logits, target)

        def apply(*args, waits=waits):
            with meter.count(portable=False) as c:
                out = answer.apply(*args)
            waits += [f"{code.strip()!r}" for code in c.code]
            return out

        mine, oracle = ([t.clone().requires_grad_() for t in (x, w)] for _ in range(2))
        loss = core.call(apply, *mine, y, vocab, chunk, xent, mutates=(0, 1))
        want = F.cross_entropy((oracle[0].double() @ oracle[1].double().T)[:, :vocab], y, ignore_index=-1)
        what = f"{n} tokens in chunks of {chunk}, {vocab} of {rows} rows, a third of the targets -1"
        core.require(not waits, f"Python waits for the GPU at {', '.join(waits[:1])}")
        core.close(loss, want, f"loss of {what}", rtol=1e-4)
        (loss * scale).backward()
        (want * scale).backward()
        for name, a, b in zip(("x", "weight"), mine, oracle, strict=True):
            core.require(a.grad is not None, f"backward gave no gradient for {name}")
            core.close(
                a.grad,
                b.grad,
                f"gradient of {scale:.2f} times the loss for {name}, {what}",
                rtol=1e-3,
                atol=1e-5,
            )
        core.equal(
            sizes, [min(chunk, n - i) for i in range(0, n, chunk)], "rows given to xent, chunk by chunk"
        )
    n, width, rows = 2048, 16, 1024
    x, w, y = torch.randn(n, width), torch.randn(rows, width), torch.randint(0, rows, (n,))
    held = meter.peak_memory(
        lambda: answer.apply(x.requires_grad_(), w.requires_grad_(), y, rows, 128, lesson.flat_xent)
    )
    one, full = 128 * rows * 4, n * rows * 4
    core.require(
        held < 2.5 * one,
        f"held {held:,} bytes at the peak; a chunk of logits has {one:,} and all logits "
        f"{full:,}: keep one chunk, and compute its gradients at once",
    )
    x, w = (3 * torch.randn(4096, 8)).bfloat16(), torch.randn(16, 8).bfloat16()
    leaf = w.clone().requires_grad_()
    answer.apply(x, leaf, torch.zeros(4096, dtype=torch.long), 16, 16, lesson.xent).backward()
    oracle = w.double().requires_grad_()
    F.cross_entropy(x.double() @ oracle.T, torch.zeros(4096, dtype=torch.long)).backward()
    off = ((leaf.grad.double() - oracle.grad).norm() / oracle.grad.norm()).item()
    core.require(
        off < 0.006,
        f"bf16 in 256 chunks: the weight's gradient is off by {off:.1%}; add the chunks' parts in fp32",
    )


def _losses(parallelize, way, config, rows, steps):
    "The losses of this rank, then the numbers of weights that it holds in blocks and in all."
    world = dist.get_world_size() if way else 1
    torch.manual_seed(5)
    model = Llama(config)
    whole = parallelize(model, way, init_device_mesh("cpu", (world,))) if way else model
    if whole is None:
        return core.kind(whole)
    opts = [
        torch.optim.SGD(some, 0.5)
        for some in (
            [p for p in model.parameters() if isinstance(p, DTensor) is parts] for parts in (False, True)
        )
        if some
    ]
    losses, calls = [], {}
    for step in range(steps):
        x, y = (t.chunk(world)[dist.get_rank()] if way in ("data", "sharded") else t for t in rows[step])
        if way:
            with meter.count_comm() as c:
                loss = whole(x, y)
            calls = dict(c.collectives)
        else:
            loss = whole(x, y)
        loss.backward()
        for opt in opts:
            opt.step()
            opt.zero_grad()
        loss = loss.detach().clone()
        if way in ("data", "sharded"):
            dist.all_reduce(loss)
            loss /= world
        losses.append(loss.item())
    kept = [
        sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in m.parameters())
        for m in (model.model["layers"], model)
    ]
    return losses, kept, calls


@core.exercise("llama.4", "three ways on two ranks, with the losses of one process, and each with its share")
def parallelize(answer):
    core.need_callable(answer)
    config = Config(
        vocab=random.randint(40, 60),
        width=32,
        layers=2,
        heads=4,
        kv_heads=2,
        ffn=48,
        context=16,
        tied=random.random() < 0.5,
        pad=2,
    )
    rows = [torch.randint(0, config.vocab, (2, 4, 12)) for _ in range(3)]
    want, (blocks, total), _ = _losses(answer, None, config, rows, 3)
    norms = 2 * config.layers * config.width
    share = {
        "data": (blocks, total),
        "sharded": (blocks // 2, total // 2),
        "tensor": ((blocks - norms) // 2 + norms, total - (blocks - norms) // 2),
    }
    with ranks.Group(2, backend="gloo") as group:
        for way in ("data", "sharded", "tensor"):
            try:
                found = group.run(_losses, answer, way, config, rows, 3)
            except ranks.RankError as e:
                if isinstance(e.__cause__, NotImplementedError):
                    raise NotImplementedError from None
                raise core.Wrong(f"{way} failed on two ranks: {core.describe(e.__cause__ or e)}") from None
            for rank, got in enumerate(found):
                if isinstance(got, str):
                    raise core.Wrong(f"way {way!r}: expected the model to call, got {got}")
                losses, kept, calls = got
                for i, (a, b) in enumerate(zip(losses, want, strict=True)):
                    core.close(
                        a, b, f"{way}, rank {rank}: loss of step {i + 1} against one process", rtol=1e-4
                    )
                for n, m, name in zip(kept, share[way], ("the blocks", "the model"), strict=True):
                    core.equal(n, m, f"{way}: numbers of {name} that rank {rank} keeps")
                if way == "tensor":
                    core.equal(
                        calls, {"all_reduce": 2 * config.layers}, "tensor: collectives of a forward pass"
                    )
                if way == "sharded":
                    core.equal(
                        calls, {"all_gather": config.layers + 1}, "sharded: collectives of a forward pass"
                    )


def meta_names(config):
    "{Meta's name: shape} of a Llama's weights in their first release."
    kv, shapes = config.kv_heads * config.head_dim, {"tok_embeddings.weight": (config.vocab, config.width)}
    for i in range(config.layers):
        sizes = {
            "attention.wq": (config.width, config.width),
            "attention.wk": (kv, config.width),
            "attention.wv": (kv, config.width),
            "attention.wo": (config.width, config.width),
            "feed_forward.w1": (config.ffn, config.width),
            "feed_forward.w2": (config.width, config.ffn),
            "feed_forward.w3": (config.ffn, config.width),
            "attention_norm": (config.width,),
            "ffn_norm": (config.width,),
        }
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in sizes.items()}
    return shapes | {"norm.weight": (config.width,), "output.weight": (config.vocab, config.width)}


@core.exercise("llama.5", "every weight under Transformers' name, and the logits of Meta's own rotation")
def from_meta(answer):
    for _ in range(2):
        config = _config(tied=False, layers=random.choice([2, 11]))
        given = {k: torch.randn(s) / (4 if len(s) > 1 else 1) for k, s in meta_names(config).items()}
        given = {k: v.bfloat16() for k, v in given.items()}
        given["rope.freqs"] = torch.randn(config.head_dim // 2)  # in some files, and no weight
        got = core.call(answer, dict(given), config)
        core.require(isinstance(got, dict), f"what from_meta returns: expected a dict, got {core.kind(got)}")
        model = Llama(config).bfloat16()
        wanted = model.state_dict()
        for name in sorted(wanted.keys() | got.keys()):
            core.require(name in got, f"the weight {name} is missing")
            core.require(
                name in wanted, f"{name} is no weight of Transformers' Llama: leave it out or rename it"
            )
            core.equal(tuple(got[name].shape), tuple(wanted[name].shape), f"shape of {name}")
            core.require(
                got[name].dtype == torch.bfloat16, f"{name} is {got[name].dtype}; the file has bfloat16"
            )
        model.load_state_dict(got)
        ids = torch.randint(0, config.vocab, (2, 9))
        want = lesson.meta_logits({k: v.double() for k, v in given.items()}, config, ids)
        core.close(
            model.double()(ids),
            want,
            "logits (look at the rows of wq and wk, and at gate, up and down)",
            rtol=1e-3,
            atol=1e-3,
        )


class _Scores(nn.Module):
    "Stands for a Llama: the loss of a target tells which target it is and how many tokens stand before it."

    def __init__(self, vocab, context):
        super().__init__()
        self.config = Config(vocab, 8, 1, 1, 1, 8, context)
        self.register_buffer("cos", torch.zeros(1))
        self.largest, self.table = 0, torch.rand(vocab, context)

    def forward(self, ids):
        n = ids.shape[1]
        core.require(
            n <= self.config.context, f"the model was given {n} tokens; its context is {self.config.context}"
        )
        self.largest = max(self.largest, ids.numel())
        own = torch.zeros(*ids.shape, self.config.vocab)
        return own + self.table.T[:n][None].expand_as(own)


@core.exercise("llama.6", "each token once, each with the most before it; no gradient is kept")
def score(answer):
    for length, context, stride in (
        (50, 16, 8),
        (47, 16, 5),
        (16, 16, 4),
        (17, 16, 16),
        (9, 16, 8),
        (80, 20, 1),
    ):
        model, ids = _Scores(31, context).train(), torch.randint(0, 31, (length,))
        total, number = 0.0, 0
        for t in range(1, length):  # target t, by the first window that reaches it
            window = 0 if t <= context else -(-(t - context) // stride)
            before = t - 1 - window * stride
            logits = model.table.double().T[before]
            total, number = total + (logits.logsumexp(0) - logits[ids[t]]).item(), number + 1
        with torch.enable_grad():
            got = core.parts(
                core.call(answer, model, ids, stride, mutates=(0,)), "total tokens", "what score returns"
            )
        what = f"{length} tokens, context {context}, stride {stride}"
        core.equal(got[1], number, f"tokens scored, {what}")
        core.close(got[0], total, f"sum of the losses, {what}", rtol=1e-4)
        core.require(
            not getattr(got[0], "requires_grad", False), "the sum holds a graph: use torch.no_grad()"
        )

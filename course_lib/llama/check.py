"""Checks of lesson llama. Oracles: a step written out, dense attention and cross-entropy in float64, one
process, Meta's rotation of neighbouring pairs, a model whose loss says what it was shown."""

import contextlib
import functools
import math
import random
from dataclasses import replace
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from course_lib import checking as core
from course_lib import llama as lesson
from course_lib import meter, ranks
from course_lib.checking import yours  # noqa: F401
from course_lib.llama.model import Config, Llama, plain_loss

SHAPES = (4, 2, 8), (6, 3, 4), (6, 2, 12)  # heads, groups, and a head's size


class _Watch(TorchDispatchMode):
    "The dtypes of matmuls and of cross-entropies."

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


class _OneDevice(TorchDispatchMode):
    "Refuses an operator that gets tensors on two devices, as a GPU would."

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = pytree.tree_leaves((args, kwargs))
        devices = {t.device.type for t in given if isinstance(t, torch.Tensor) and t.ndim}
        core.require(len(devices) < 2, "a tensor is made without device=: make it on the device of q")
        return func(*args, **(kwargs or {}))


def _config(shape=None, **changes):
    heads, groups, d = shape or random.choice(SHAPES)
    vocab, ffn = random.randint(40, 90), random.randint(20, 40)
    return replace(Config(vocab, heads * d, 2, heads, groups, ffn, context=24, pad=1), **changes)


def _adamw(model):
    return torch.optim.AdamW(model.parameters(), 0.01, betas=(0.5, 0.9), eps=0.03, foreach=False)


def _steep(*args):
    "A loss with gradients that a clip to norm 1 would change."
    return 30 * plain_loss(*args)


def _as_on_a_gpu(answer, *args):
    "([(device type, dtype) of each autocast], syncs) of a call whose tensors say that they are on a GPU."
    seen, waits, init = [], [], torch.autocast.__init__

    def record(self, device_type, dtype=None, *args, **kwargs):
        seen.append((device_type, dtype))
        init(self, "cpu", torch.bfloat16, *args, **kwargs)

    device = property(lambda t: torch.device("cuda", 0))
    with contextlib.suppress(Exception), contextlib.ExitStack() as patches:
        for of, name, value in (
            (torch.autocast, "__init__", record),  # under whatever name it was imported
            (torch.cuda, "synchronize", lambda *a: waits.append(a)),
            (torch.cuda, "is_available", lambda: True),
            (torch.Tensor, "device", device),
            (torch.Tensor, "is_cuda", True),
        ):
            patches.enter_context(mock.patch.object(of, name, value))
        answer(*args)
    return seen, len(waits)


@core.exercise("llama.1", "every product in bf16, weights and loss in fp32, no sync, nothing left over")
def step(answer):
    core.need_callable(answer)
    config = _config()
    x, y = torch.randint(0, config.vocab, (2, 3, 17))
    model, twin = Llama(config, loss=_steep), Llama(config, loss=_steep)
    twin.load_state_dict(model.state_dict())
    opts = _adamw(model), _adamw(twin)
    for number in range(3):
        if number == 1:  # a gradient that an earlier step left behind would show
            left = any(p.grad is not None and p.grad.any() for p in model.parameters())
            core.require(
                not left, "gradients are left over after a step: the next backward pass adds to them"
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
        core.require(isinstance(got, torch.Tensor), f"train_step: expected a tensor, got {core.kind(got)}")
        where = f" (line {counts.where[0]})" if counts.where else ""
        core.equal(counts.syncs, 0, f"syncs in a step{where}")
        core.require(not got.requires_grad, "the returned loss holds the graph of the step: detach it")
        left, number_of = torch.is_autocast_enabled("cpu"), len(seen.products)
        torch.set_autocast_enabled("cpu", False)
        core.require(not left, "autocast is still on after the step: use it as a context manager")
        for dtype in {d for d in seen.products if d != torch.bfloat16}:
            kind = str(dtype).removeprefix("torch.")
            how = f"{seen.products.count(dtype)} of {number_of} matmuls of a step are in {kind}"
            core.require(False, f"{how}: put the forward pass under autocast with torch.bfloat16")
        core.require(seen.losses == [torch.float32], "the cross-entropy is in bf16: compute it in fp32")
        core.close(got.float(), want.detach(), f"loss of step {number + 1}", rtol=1e-3)
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        core.require(p.dtype == torch.float32, f"{name} is {p.dtype} after three steps: keep it in fp32")
        core.close(p, q, f"{name} after three steps", rtol=1e-2, atol=2e-3)
    plain = torch.optim.SGD(model.parameters(), 0.0, foreach=False)
    seen, waits = _as_on_a_gpu(answer, model, plain, x, y)
    types = [device for device, _ in seen]
    core.require("cpu" not in types, "autocast is for 'cpu' where x is on a GPU: give it x.device.type")
    fp16 = any(device == "cuda" and dtype != torch.bfloat16 for device, dtype in seen)
    core.require(not fp16, "autocast's dtype on a GPU is fp16 unless you name it: give it torch.bfloat16")
    core.equal(waits, 0, "calls of torch.cuda.synchronize in a step")


def _dense(q, k, v):
    q, k, v = (t.double() for t in (q, k, v))
    k, v = (t[:, [h * t.shape[1] // q.shape[1] for h in range(q.shape[1])]] for t in (k, v))
    new, known = q.shape[2], k.shape[2]
    seen = torch.arange(known) <= torch.arange(known - new, known)[:, None]
    return (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~seen, -math.inf).softmax(-1) @ v


@core.exercise("llama.2", "right for groups of heads and for new positions; no scores, no repeated keys")
def attend(answer):
    some = random.randint(2, 20)  # of two numbers of known positions
    for new, known, d in ((37, 37, 8), (1, 1, 12), (1, 29, 16), (some, 33, 12), (some, 21, 8)):
        heads, groups = random.choice([(4, 2), (6, 2), (6, 3), (4, 4), (8, 1)])
        q, k, v = (  # transposed, as the model gives them
            torch.randn(2, n, h, d).transpose(1, 2).requires_grad_()
            for n, h in ((new, heads), (known, groups), (known, groups))
        )
        got, what = core.call(answer, q, k, v), f"{new} queries, the last of {known} positions"
        want = _dense(q, k, v)
        core.close(got, want, f"{what}, {heads} heads and {groups} of keys", rtol=1e-4, atol=1e-5)
        core.require(got.requires_grad, "the result has no gradient: training needs one")
        out, upstream = answer(q, k, v), torch.randn(want.shape)
        grads = [torch.autograd.grad((o * upstream).sum(), (q, k, v)) for o in (out, want)]
        for name, a, b in zip("qkv", *grads, strict=True):
            core.close(a, b, f"gradient of {name}, {what}", rtol=1e-3, atol=1e-4)
        half = core.call(answer, *(t.detach().bfloat16() for t in (q, k, v)))
        core.equal(str(half.dtype), "torch.bfloat16", "dtype of the result for q, k and v in bf16")
        with torch.device("meta"), _OneDevice():  # what is made without device= is not with q then
            answer(q, k, v)
    for new, known in ((300, 300), (100, 400), (1, 2000)):
        q, (k, v) = torch.randn(2, 16, new, 16), torch.randn(2, 2, 2, known, 16)
        scores, repeated = 2 * 16 * new * known * 4, 8 * k.nbytes
        held = meter.peak_memory(answer, q, k, v)
        sizes = (
            f"all scores are {scores:,}, the keys repeated for each head {repeated:,}: store nothing as large"
        )
        limit = min(scores / 2, repeated * (3 if new == known else 1))  # 3: the result, and a mask
        core.require(held < limit, f"{new} queries of {known} positions: held {held:,} bytes; {sizes}")


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
        other = [t.detach().flip(0).clone().requires_grad_() for t in mine]
        answer.apply(*other, y, vocab, chunk, lesson.xent)  # a second graph, before the first one's backward
        wanted = torch.autograd.grad(want * scale, oracle)
        for again in ("", ", backward for the second time"):
            with meter.count(portable=False) as c:
                grads = torch.autograd.grad(loss * scale, mine, retain_graph=True, allow_unused=True)
            at = ", ".join(repr(code.strip()) for code in c.code[:1])
            core.require(not at, f"Python waits for the GPU in backward, at {at}")
            for name, a, b in zip(("x", "weight"), grads, wanted, strict=True):
                core.require(a is not None, f"backward gave no gradient for {name}")
                grad = f"gradient of {scale:.2f} times the loss for {name}, {what}{again}"
                core.close(a, b, grad, rtol=1e-3, atol=1e-5)
        parts = [min(chunk, n - i) for i in range(0, n, chunk)]
        core.equal(sizes, parts, "rows given to xent, chunk by chunk")
    n, width, rows = 2048, 16, 1024
    x, w, y = torch.randn(n, width), torch.randn(rows, width), torch.randint(0, rows, (n,))
    x, w = x.requires_grad_(), w.requires_grad_()
    held = meter.peak_memory(lambda: answer.apply(x, w, y, rows, 128, lesson.flat_xent))
    one, full = 128 * rows * 4, n * rows * 4
    sizes = f"a chunk of logits has {one:,} and all logits {full:,}"
    keep = "keep one chunk at a time, and add its part of the weight's gradient to grad_w at once"
    core.require(held < 3 * one, f"held {held:,} bytes at the peak; {sizes}: {keep}")
    x, w = (3 * torch.randn(4096, 8)).bfloat16(), torch.randn(16, 8).bfloat16()
    leaf, oracle, y = (
        w.clone().requires_grad_(),
        w.double().requires_grad_(),
        torch.zeros(4096, dtype=torch.long),
    )
    with _Watch() as seen:
        loss = answer.apply(x, leaf, y, 16, 16, lesson.xent)
    core.equal(str(loss.dtype), "torch.float32", "dtype of the loss for x and weight in bf16")
    wide = sum(d != torch.bfloat16 for d in seen.products)
    core.equal(wide, 0, f"matmuls in fp32 of {len(seen.products)}, for x and weight in bf16")
    loss.backward()
    F.cross_entropy(x.double() @ oracle.T, y).backward()
    off = ((leaf.grad.double() - oracle.grad).norm() / oracle.grad.norm()).item()
    core.require(off < 0.006, f"bf16 in 256 chunks: the weight's gradient is off by {off:.1%}; add in fp32")
    x, w, y = torch.randn(40, 16), torch.randn(24, 16) / 3, torch.randint(0, 20, (40,))
    leaf = w.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16), _Watch() as seen:
        loss = core.call(answer.apply, x.requires_grad_(), leaf, y, 20, 16, lesson.xent, mutates=(0, 1))
    wide = sum(d != torch.bfloat16 for d in seen.products)
    core.equal(wide, 0, f"matmuls in fp32 of {len(seen.products)}, under autocast")
    core.close(loss.float(), F.cross_entropy((x @ w.T)[:, :20], y), "loss under autocast", rtol=0.03)
    loss.backward()
    core.equal(
        str(leaf.grad.dtype), "torch.float32", "dtype of the gradient of an fp32 weight under autocast"
    )


def _kept(module):
    "Numbers of weights of a module that are on this rank."
    return sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in module.parameters())


def _losses(parallelize, way, config, rows, steps):
    """The losses of this rank, then the numbers of weights that it holds in blocks,
    in all, and in blocks after a forward pass."""
    world = dist.get_world_size() if way else 1
    torch.manual_seed(5)
    model = Llama(config)
    whole = parallelize(model, way, init_device_mesh("cpu", (world,))) if way else model
    if whole is None:
        return core.kind(whole)
    kinds = [[p for p in model.parameters() if isinstance(p, DTensor) is parts] for parts in (False, True)]
    opts = [torch.optim.SGD(some, 0.5) for some in kinds if some]
    losses, calls = [], {}
    for step in range(steps):
        x, y = (t.chunk(world)[dist.get_rank()] if way in ("data", "sharded") else t for t in rows[step])
        with meter.count_comm() if way else contextlib.nullcontext() as c:
            loss = whole(x, y)
        held = _kept(model.model["layers"])  # between forward and backward
        calls = dict(c.collectives) if way else {}
        loss.backward()
        for opt in opts:
            opt.step()
            opt.zero_grad()
        loss = loss.detach().clone()
        if way in ("data", "sharded"):
            dist.all_reduce(loss)
            loss /= world
        losses.append(loss.item())
    return losses, [_kept(model.model["layers"]), _kept(model), held], calls


@core.exercise("llama.4", "three ways on two ranks, with the losses of one process, and each with its share")
def parallelize(answer):
    core.need_callable(answer)
    config = Config(random.randint(40, 60), 32, 3, 4, 2, 48, context=16, tied=random.random() < 0.5, pad=2)
    rows = [torch.randint(0, config.vocab, (2, 4, 12)) for _ in range(3)]
    want, (blocks, total, _), _ = _losses(answer, None, config, rows, 3)
    norms = 2 * config.layers * config.width
    share = {"data": (blocks, total), "sharded": (blocks // 2, total // 2)}
    share["tensor"] = (blocks - norms) // 2 + norms, total - (blocks - norms) // 2
    wanted = {"tensor": {"all_reduce": 2 * config.layers}, "sharded": {"all_gather": config.layers + 1}}
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
                    step = f"{way}, rank {rank}: loss of step {i + 1} against one process"
                    if way == "data" and i:
                        step += " (are gradients averaged?)"
                    core.close(a, b, step, rtol=1e-4)
                names = "the blocks", "the model", "the blocks after a forward pass,"
                for n, m, name in zip(kept, (*share[way], share[way][0]), names, strict=True):
                    core.equal(n, m, f"{way}: numbers of {name} that rank {rank} keeps")
                if way in wanted:
                    core.equal(calls, wanted[way], f"{way}: collectives of a forward pass")


@core.exercise("llama.5", "every weight under Transformers' name, and the logits of Meta's own rotation")
def from_meta(answer):
    for layers, shape in zip((2, 11), random.sample(SHAPES, 2), strict=True):
        config = _config(shape, tied=False, layers=layers)
        given = {k: torch.randn(s) / (4 if len(s) > 1 else 1) for k, s in lesson.meta_names(config).items()}
        given = {k: v.bfloat16() for k, v in given.items()}
        if layers == 2:  # in some files, and no weights
            given |= {name: torch.randn(config.head_dim // 2) for name in ("rope.freqs", "freqs_cis")}
        got = core.call(answer, dict(given), config)
        core.require(isinstance(got, dict), f"what from_meta returns: expected a dict, got {core.kind(got)}")
        model = Llama(config).bfloat16()
        wanted = model.state_dict()
        for name in sorted(wanted.keys() | got.keys()):
            core.require(name in got, f"the weight {name} is missing")
            core.require(
                name in wanted, f"{name} is no weight of Transformers' Llama: rename it or leave it out"
            )
            core.equal(tuple(got[name].shape), tuple(wanted[name].shape), f"shape of {name}")
            core.equal(str(got[name].dtype), "torch.bfloat16", f"dtype of {name}")
        model.load_state_dict(got)
        ids = torch.randint(0, config.vocab, (2, 9))
        want = lesson.meta_logits({k: v.double() for k, v in given.items()}, config, ids)
        where = "logits (look at the rows of wq and wk, at gate, up and down, at the two norms)"
        core.close(model.double()(ids), want, where, rtol=1e-3, atol=1e-3)


class _Scores(nn.Module):
    """Stands for a Llama in bf16: a target's loss tells the token before it and how many stand before it.

    It remembers what it was given, and whether autograd was on.
    """

    def __init__(self, vocab, context):
        super().__init__()
        self.config = Config(vocab, 8, 1, 1, 1, 8, context)
        self.places, self.words = torch.rand(context, vocab), torch.rand(vocab, vocab)
        self.windows, self.grad = [], False

    def forward(self, ids):
        n, most = ids.shape[1], self.config.context
        core.require(n <= most, f"the model was given {n} tokens; its context is {most}")
        self.windows.append(ids.flatten().tolist())
        self.grad |= torch.is_grad_enabled()
        return (self.words[ids] + self.places[:n]).bfloat16()


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
        model, ids, total = _Scores(31, context), torch.randint(0, 29, (length,)), 0.0
        ids[-2:] = torch.tensor([29, 30])  # the last two are nowhere else
        for t in range(1, length):  # target t, by the first window that reaches it
            window = 0 if t <= context else -(-(t - context) // stride)
            logits = (model.words[ids[t - 1]] + model.places[t - 1 - window * stride]).bfloat16().double()
            total += (logits.logsumexp(0) - logits[ids[t]]).item()
        model.places.requires_grad_()
        trains = context == stride or length < 50
        model.train(trains)
        got = core.call(answer, model, ids, stride, mutates=(0,))
        got, what = (
            core.parts(got, "total tokens", "score"),
            f"{length} tokens, context {context}, stride {stride}",
        )
        core.equal(got[1], length - 1, f"tokens scored, {what}")
        core.close(got[0], total, f"sum of the losses, {what}", rtol=1e-4)
        core.require(
            not model.grad, "the model ran with autograd on, and its graph was built: use torch.no_grad()"
        )
        for value, kinds, name in zip(got, ((float, int), int), ("sum", "number of tokens"), strict=True):
            core.require(
                isinstance(value, kinds), f"the {name}: expected a Python number, got {core.kind(value)}"
            )
        last = not any(30 in window for window in model.windows)
        core.require(last, f"the last token of the text was an input, {what}: nothing follows it")
        reached = sum(29 in window for window in model.windows)
        core.equal(reached, 1, f"windows that reach the end of the text, {what}")
        modes = {True: "training", False: "evaluation"}
        was, now = modes[trains], modes[model.training]
        core.require(
            was == now, f"the model was in {was} mode before, and is in {now} mode now: leave its mode"
        )

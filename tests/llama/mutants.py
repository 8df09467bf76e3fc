"Answers to the exercises of llama: the course's, right ones of another style, and wrong ones."

import math
import sys

import cloudpickle
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from course_lib.llama import solutions

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks can't import this file
REFERENCE = {n: getattr(solutions, names[0]) for n, names in solutions.EXERCISES.items()}


# --- llama.1: a step in bf16 that doesn't wait ------------------------------------------------


def clears_first(model, opt, x, y):
    "Right: the gradients are cleared twice, and the loss is a clone."
    opt.zero_grad()
    with torch.autocast(device_type=x.device.type, dtype=torch.bfloat16):
        loss = model(x, y)
    loss.backward()
    opt.step()
    model.zero_grad(set_to_none=False)
    return loss.detach().clone()


def inside(model, opt, x, y):
    "Right: autocast as a decorator of an inner function."

    @torch.autocast(x.device.type, torch.bfloat16)
    def loss_of():
        return model(x, y)

    value = loss_of()
    value.backward()
    opt.step()
    opt.zero_grad(set_to_none=True)
    return value.data


def by_another_name(model, opt, x, y):
    "Right: autocast by its longer name, with names of arguments."
    with torch.amp.autocast(dtype=torch.bfloat16, device_type=x.device.type):
        loss = model(x, y)
    for p, g in zip(model.parameters(), torch.autograd.grad(loss, [*model.parameters()]), strict=True):
        p.grad = g
    opt.step()
    opt.zero_grad()
    return loss.detach()


def _under(autocast):
    def train_step(model, opt, x, y):
        with autocast(x):
            loss = model(x, y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return train_step


def in_fp32(model, opt, x, y):
    loss = model(x, y)
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.detach()


def reads_the_loss(model, opt, x, y):
    loss = solutions.train_step(model, opt, x, y)
    return torch.tensor(loss.item())


def converts_the_model(model, opt, x, y):
    model.to(torch.bfloat16)
    loss = model(x, y)
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.detach()


def keeps_the_graph(model, opt, x, y):
    with torch.autocast(x.device.type, torch.bfloat16):
        loss = model(x, y)
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss


def never_clears(model, opt, x, y):
    with torch.autocast(x.device.type, torch.bfloat16):
        loss = model(x, y)
    loss.backward()
    opt.step()
    return loss.detach()


def bf16_loss(model, opt, x, y):
    "The cross-entropy is computed from bf16 logits."
    with torch.autocast(x.device.type, torch.bfloat16):
        logits = model(x)
    with torch.autocast(x.device.type, enabled=False):
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.detach()


def on_the_cpu(model, opt, x, y):
    "autocast of the CPU, whatever the device: on a GPU nothing is in bf16."
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x, y)
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.detach()


def waits_where_there_is_a_gpu(model, opt, x, y):
    loss = solutions.train_step(model, opt, x, y)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return loss


def leaves_autocast_on(model, opt, x, y):
    torch.set_autocast_enabled(x.device.type, True)
    torch.set_autocast_dtype(x.device.type, torch.bfloat16)
    loss = model(x, y)
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.detach()


def clips(model, opt, x, y):
    with torch.autocast(x.device.type, torch.bfloat16):
        loss = model(x, y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    opt.zero_grad()
    return loss.detach()


# --- llama.2: attention for training and for writing ------------------------------------------


def by_numbers(q, k, v):
    "Right: a mask that is added, 0 and minus infinity."
    new, known = q.shape[-2:][0], k.shape[-2]
    bias = (
        None if new == known else torch.full((new, known), -math.inf, device=q.device).triu(known - new + 1)
    )
    return F.scaled_dot_product_attention(q, k, v, bias, is_causal=bias is None, enable_gqa=True)


def always_masked(q, k, v):
    "Right: one mask for every case, from positions."
    seen = (
        torch.arange(k.shape[2], device=q.device)
        <= torch.arange(k.shape[2], device=q.device)[-q.shape[2] :, None]
    )
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)


def upper_left(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def sees_the_future(q, k, v):
    whole = q.shape[2] == k.shape[2]
    return F.scaled_dot_product_attention(q, k, v, is_causal=whole, enable_gqa=True)


def stores_scores(q, k, v):
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    new, known = q.shape[2], k.shape[2]
    seen = torch.ones(new, known, dtype=torch.bool, device=q.device).tril(known - new)
    return (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~seen, -math.inf).softmax(-1) @ v


def repeats_keys(q, k, v):
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    return solutions.attend(q, k, v)


def repeats_keys_in_training(q, k, v):
    return repeats_keys(q, k, v) if q.shape[2] > 1 else solutions.attend(q, k, v)


def mask_of_before():
    "A mask is kept for each number of queries, whatever the number of keys."
    kept = {}

    def attend(q, k, v):
        new, known = q.shape[2], k.shape[2]
        if new in (1, known) or q.is_meta:
            return solutions.attend(q, k, v)
        if new not in kept or kept[new].shape[1] < known:
            kept[new] = torch.ones(new, known, dtype=torch.bool).tril(known - new)
        return F.scaled_dot_product_attention(q, k, v, kept[new][:, :known], enable_gqa=True)

    return attend


def query_by_query(q, k, v):
    "Right: one query after the other, unless new = known."
    new, known = q.shape[2], k.shape[2]
    if new == known:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    ends = range(known - new + 1, known + 1)
    parts = [solutions.attend(q[:, :, i : i + 1], k[:, :, :n], v[:, :, :n]) for i, n in enumerate(ends)]
    return torch.cat(parts, 2)


def strided_groups(q, k, v):
    "Head h reads group h % groups."
    k, v = (t.repeat(1, q.shape[1] // t.shape[1], 1, 1) for t in (k, v))
    return solutions.attend(q, k, v)


def mask_on_the_cpu(q, k, v):
    new, known = q.shape[2], k.shape[2]
    mask = torch.ones(new, known, dtype=torch.bool).tril(known - new) if 1 < new < known else None
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=new == known, enable_gqa=True)


def scale_of_size_8(q, k, v):
    new, known = q.shape[2], k.shape[2]
    mask = torch.ones(new, known, dtype=torch.bool, device=q.device).tril(known - new)
    return F.scaled_dot_product_attention(q, k, v, mask, scale=8**-0.5, enable_gqa=True)


def in_fp32_attention(q, k, v):
    return solutions.attend(q.float(), k.float(), v.float())


def views(q, k, v):
    "A view of the groups: the model's transposed tensors have none."
    batch, heads, new, d = q.shape
    q = q.view(batch * heads, new, d).view(batch, heads, new, d)
    return solutions.attend(q, k, v)


# --- llama.3: the head and its loss in chunks --------------------------------------------------


def _head_loss(part=None, pad=True, fp32=True, scale=True, keep=False, chunks=True, mean=False, wait=False):
    "A HeadLoss with one thing changed."

    class HeadLoss(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, targets, vocab, chunk, xent):
            total = (targets >= 0).sum().item() if wait else (targets >= 0).sum()
            losses, grad_x = torch.zeros((), device=x.device), torch.empty_like(x)
            grad_w = torch.zeros_like(weight, dtype=torch.float32 if fp32 else None)
            kept, chunk, means = [], chunk if chunks else len(x), []
            for at in range(0, len(x), chunk):
                rows, y = x[at : at + chunk], targets[at : at + chunk]
                logits = rows @ weight.T
                found = xent(logits[:, :vocab], y)
                losses += found.sum()
                means.append(found.sum() / (y >= 0).sum().clamp(min=1))
                if pad:
                    logits[:, vocab:] = 0
                share = (y >= 0).sum() / total if part is None else part(y, targets)
                grad_x[at : at + chunk] = (logits @ weight) * share
                grad_w += (logits.T @ rows) * share
                kept.append(logits)
                if not keep:
                    kept.clear()
            ctx.save_for_backward(grad_x, grad_w.to(weight.dtype))
            return torch.stack(means).mean() if mean else losses / total

        @staticmethod
        def backward(ctx, grad):
            grad_x, grad_w = ctx.saved_tensors
            grad = grad if scale else 1
            return grad_x * grad, grad_w * grad, None, None, None, None

    return HeadLoss


class Recomputes(torch.autograd.Function):
    "Right: forward keeps a sum, and backward computes each chunk's logits again."

    @staticmethod
    def forward(ctx, x, weight, targets, vocab, chunk, xent):
        ctx.save_for_backward(x, weight, targets)
        ctx.rest = vocab, chunk, xent
        ctx.found = None
        total, losses = (targets >= 0).sum(), 0
        grads = torch.empty_like(x), weight.float() * 0
        for i in range(-(-len(x) // chunk)):
            at = slice(i * chunk, (i + 1) * chunk)
            scores = torch.mm(x[at], weight.t())
            losses = losses + xent(scores.narrow(1, 0, vocab), targets[at]).sum()
            scores[:, vocab:].zero_()
            scores.mul_((targets[at] >= 0).sum() / total)
            grads[0][at] = scores @ weight
            grads[1].add_(scores.t() @ x[at])
        ctx.found = grads
        return losses / total

    @staticmethod
    def backward(ctx, grad):
        x, weight, _ = ctx.saved_tensors
        return (
            (ctx.found[0] * grad).to(x.dtype),
            (ctx.found[1] * grad).to(weight.dtype),
            None,
            None,
            None,
            None,
        )


class Named(solutions.HeadLoss):
    "Right: the weight's gradient of a chunk has a name."

    @staticmethod
    def forward(ctx, x, weight, targets, vocab, chunk, xent):
        total = (targets >= 0).sum()
        losses, grad_x = torch.zeros((), device=x.device), torch.empty_like(x)
        grad_w = torch.zeros_like(weight, dtype=torch.float32)
        for at in range(0, len(x), chunk):
            rows, y = x[at : at + chunk], targets[at : at + chunk]
            logits = rows @ weight.T
            losses += xent(logits[:, :vocab], y).sum()
            logits[:, vocab:] = 0
            part = (y >= 0).sum() / total
            grad_x[at : at + chunk] = (logits @ weight) * part
            g = (logits.T @ rows).float() * part
            grad_w += g
        ctx.save_for_backward(grad_x, grad_w.to(weight.dtype))
        return losses / total


def _changed_loss(change):
    "The course's HeadLoss, its forward called through `change(forward, ctx, x, weight, …)`."

    class HeadLoss(solutions.HeadLoss):
        @staticmethod
        def forward(ctx, *args):
            return change(solutions.HeadLoss.forward, ctx, *args)

    return HeadLoss


class BufferOfTheClass(solutions.HeadLoss):
    "The weight's gradient is in a buffer of the class: another forward overwrites it."

    buffers = {}  # noqa: RUF012

    @staticmethod
    def forward(ctx, x, weight, *rest):
        loss = solutions.HeadLoss.forward(ctx, x, weight, *rest)
        grad_x, grad_w = ctx.to_save
        buffer = BufferOfTheClass.buffers.setdefault((weight.shape, weight.dtype), grad_w)
        ctx.save_for_backward(grad_x)
        ctx.grad_w = buffer.copy_(grad_w)
        return loss

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0] * grad, ctx.grad_w * grad, None, None, None, None


class ScalesInPlace(solutions.HeadLoss):
    "What is saved is scaled in place: the second backward pass is wrong."

    @staticmethod
    def forward(ctx, *args):
        loss = solutions.HeadLoss.forward(ctx, *args)
        ctx.grads = ctx.to_save
        return loss

    @staticmethod
    def backward(ctx, grad):
        return *(g.mul_(grad) for g in ctx.grads), None, None, None, None


class WaitsInBackward(solutions.HeadLoss):
    "Python reads the gradient of the loss."

    @staticmethod
    def backward(ctx, grad):
        grad_x, grad_w = ctx.saved_tensors
        return grad_x * grad.item(), grad_w * grad.item(), None, None, None, None


class ProductInto(torch.autograd.Function):
    "Products are written into an fp32 buffer: autocast doesn't see them."

    @staticmethod
    def forward(ctx, x, weight, targets, vocab, chunk, xent):
        total = (targets >= 0).sum()
        losses, grad_x = torch.zeros((), device=x.device), torch.empty_like(x)
        grad_w, buffer = torch.zeros_like(weight, dtype=torch.float32), x.new_empty(chunk, len(weight))
        for rows, y, out in zip(x.split(chunk), targets.split(chunk), grad_x.split(chunk), strict=True):
            logits = torch.mm(rows, weight.T, out=buffer[: len(rows)])
            losses += xent(logits[:, :vocab], y).sum()
            logits[:, vocab:] = 0
            part = (y >= 0).sum() / total
            out.copy_((logits @ weight) * part)
            grad_w += (logits.T @ rows).float() * part
        ctx.save_for_backward(grad_x, grad_w.to(weight.dtype))
        return losses / total

    backward = solutions.HeadLoss.backward


# --- llama.4: three ways to share a Llama -----------------------------------------------------

COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")


def _tensor(model, mesh, columns=COLUMNS, rows=ROWS):
    for block in model.model["layers"]:
        plan = {name: ColwiseParallel() for name in columns}
        parallelize_module(block, mesh, plan | {name: RowwiseParallel() for name in rows})
    return model


def by_wildcard(model, way, mesh):
    "Right: one plan for the model, with wildcards; shards from the last block to the first."
    if way == "tensor":
        plan = {f"model.layers.*.{name}": ColwiseParallel() for name in COLUMNS}
        return parallelize_module(
            model, mesh, plan | {f"model.layers.*.{name}": RowwiseParallel() for name in ROWS}
        )
    if way == "data":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    for block in reversed(model.model["layers"]):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def by_match(model, way, mesh):
    "Right: parts of attention and feed-forward one by one."
    match way:
        case "data":
            return DistributedDataParallel(model, process_group=mesh.get_group())
        case "sharded":
            for block in model.model["layers"]:
                fully_shard(block, mesh=mesh, reshard_after_forward=True)
            return fully_shard(model, mesh=mesh)
    for name, part in model.named_modules():
        last = name.rsplit(".", 1)[-1]
        if isinstance(part, nn.Linear) and last != "lm_head":
            parallelize_module(
                part, mesh, RowwiseParallel() if last in ("o_proj", "down_proj") else ColwiseParallel()
            )
    return model


def shards_the_whole(model, way, mesh):
    return fully_shard(model, mesh=mesh) if way == "sharded" else solutions.parallelize(model, way, mesh)


def forgets_the_rest(model, way, mesh):
    "Embedding and head are not sharded: their gradients are each rank's own."
    if way != "sharded":
        return solutions.parallelize(model, way, mesh)
    for block in model.model["layers"]:
        fully_shard(block, mesh=mesh)
    return model


def no_feed_forward(model, way, mesh):
    if way != "tensor":
        return solutions.parallelize(model, way, mesh)
    return _tensor(model, mesh, COLUMNS[:3], ROWS[:1])


def copies_everywhere(model, way, mesh):
    return DistributedDataParallel(model) if way != "tensor" else solutions.parallelize(model, way, mesh)


def no_averages(model, way, mesh):
    return model if way == "data" else solutions.parallelize(model, way, mesh)


def stays_gathered(model, way, mesh):
    "Each rank holds the whole model between the forward and the backward pass."
    if way != "sharded":
        return solutions.parallelize(model, way, mesh)
    for block in model.model["layers"]:
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    return fully_shard(model, mesh=mesh)


def two_blocks(model, way, mesh):
    if way != "sharded":
        return solutions.parallelize(model, way, mesh)
    for i in (0, 1):
        fully_shard(model.model["layers"][i], mesh=mesh)
    return fully_shard(model, mesh=mesh)


# --- llama.5: Meta's checkpoint in Transformers' layout ---------------------------------------


def by_index(weights, config):
    "Right: rows by an index."
    order = [i for start in (0, 1) for i in range(start, config.head_dim, 2)]
    names = {
        "attention.wq": "self_attn.q_proj",
        "attention.wk": "self_attn.k_proj",
        "attention.wv": "self_attn.v_proj",
        "attention.wo": "self_attn.o_proj",
        "feed_forward.w1": "mlp.gate_proj",
        "feed_forward.w2": "mlp.down_proj",
        "feed_forward.w3": "mlp.up_proj",
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }
    out = {}
    for name, w in weights.items():
        if name.startswith("layers."):
            _, layer, inner = name.split(".", 2)
            inner = inner.removesuffix(".weight")
            if inner in ("attention.wq", "attention.wk"):
                heads = w.shape[0] // config.head_dim
                w = w[[h * config.head_dim + i for h in range(heads) for i in order]]
            out[f"model.layers.{layer}.{names[inner]}.weight"] = w
    others = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
    return out | {f"{b}.weight": weights[f"{a}.weight"] for a, b in others.items()}


def by_parts(weights, config):
    "Right: the course's names, the rows put together by torch.cat."
    out = solutions.from_meta(weights, config)
    for i in range(config.layers):
        for theirs, ours in (("wq", "q_proj"), ("wk", "k_proj")):
            heads = weights[f"layers.{i}.attention.{theirs}.weight"].split(config.head_dim)
            rows = torch.cat([part for h in heads for part in (h[::2], h[1::2])])
            out[f"model.layers.{i}.self_attn.{ours}.weight"] = rows.clone()
    return out


def _changed(change):
    def from_meta(weights, config):
        out = solutions.from_meta(weights, config)
        for i in range(config.layers):
            change(out, weights, config, f"model.layers.{i}.", f"layers.{i}.")
        return out

    return from_meta


def _same_rows(out, weights, config, ours, theirs):
    for a, b in (("q_proj", "wq"), ("k_proj", "wk")):
        out[f"{ours}self_attn.{a}.weight"] = weights[f"{theirs}attention.{b}.weight"]


def _across_heads(out, weights, config, ours, theirs):
    w = weights[f"{theirs}attention.wq.weight"]
    out[f"{ours}self_attn.q_proj.weight"] = torch.cat((w[::2], w[1::2]))


def _only_q(out, weights, config, ours, theirs):
    out[f"{ours}self_attn.k_proj.weight"] = weights[f"{theirs}attention.wk.weight"]


def _other_way(out, weights, config, ours, theirs):
    for a, b in (("q_proj", "wq"), ("k_proj", "wk")):
        w = weights[f"{theirs}attention.{b}.weight"]
        out[f"{ours}self_attn.{a}.weight"] = (
            w.view(-1, 2, config.head_dim // 2, config.width).transpose(1, 2).reshape(w.shape)
        )


def _gate_is_up(out, weights, config, ours, theirs):
    out[f"{ours}mlp.gate_proj.weight"] = weights[f"{theirs}feed_forward.w3.weight"]
    out[f"{ours}mlp.up_proj.weight"] = weights[f"{theirs}feed_forward.w1.weight"]


def _size_8(out, weights, config, ours, theirs):
    for a, b in (("q_proj", "wq"), ("k_proj", "wk")):
        w = weights[f"{theirs}attention.{b}.weight"]
        if w.shape[0] % 8 == 0:
            w = w.view(-1, 4, 2, config.width).transpose(1, 2).reshape(w.shape)
        out[f"{ours}self_attn.{a}.weight"] = w


def in_fp32_weights(weights, config):
    return {k: v.float() for k, v in solutions.from_meta(weights, config).items()}


def deletes_frequencies(weights, config):
    weights = dict(weights)
    del weights["rope.freqs"]
    return solutions.from_meta(weights, config)


def keeps_what_it_cannot_name(weights, config):
    known = ("layers.", "tok_embeddings.", "norm.", "output.", "rope.freqs")
    others = {k: v for k, v in weights.items() if not k.startswith(known)}
    return solutions.from_meta(weights, config) | others


def keeps_frequencies(weights, config):
    return solutions.from_meta(weights, config) | {"rope.freqs": weights["rope.freqs"]}


# --- llama.6: the loss of a long text ----------------------------------------------------------


@torch.no_grad()
def by_target(model, ids, stride):
    "Right: each target asks for its own window."
    context, total = model.config.context, 0.0
    for t in range(1, len(ids)):
        w = max(0, math.ceil((t - context) / stride))
        logits = model(ids[None, w * stride : t])[0, -1]
        total -= logits.float().log_softmax(-1)[ids[t]].item()
    return total, len(ids) - 1


def by_while(model, ids, stride):
    "Right: a while loop, losses one by one, the mode of autograd off."
    with torch.inference_mode():
        context, losses, start = model.config.context, [], 0
        while len(losses) < len(ids) - 1:
            window = ids[start : min(start + context, len(ids) - 1)]
            each = F.cross_entropy(
                model(window[None])[0].float(), ids[start + 1 : start + 1 + len(window)], reduction="none"
            )
            losses += each.tolist()[len(losses) - start :]
            start += stride
        return math.fsum(losses), len(losses)


@torch.no_grad()
def _score(model, ids, stride, context=None, again=False, skip=0, whole=True, fp32=True):
    total, done, context = 0.0, 0, context or model.config.context
    for start in range(0, len(ids) - 1, stride):
        end = min(start + context, len(ids) - 1)
        if not whole and end - start < context and start:
            break
        first = start if again else done
        logits = model(ids[None, start:end])[0, first - start :]
        logits = logits.float() if fp32 else logits
        total += F.cross_entropy(logits, ids[first + 1 : end + 1], reduction="sum").item()
        skip, done = skip + end - first, end
        if end == len(ids) - 1:
            break
    return total, skip


def no_overlap(model, ids, stride):
    return _score(model, ids, model.config.context)


def scores_twice(model, ids, stride):
    return _score(model, ids, stride, again=True)


def drops_the_rest(model, ids, stride):
    return _score(model, ids, stride, whole=False)


def mean_of_windows(model, ids, stride):
    total, number = _score(model, ids, stride)
    return total / number, number


@torch.no_grad()
def shifted_window(model, ids, stride):
    total, done = 0.0, 0
    for start in range(0, len(ids) - 1, stride):
        end = min(start + model.config.context, len(ids) - 1)
        logits = model(ids[None, start + 1 : end + 1])[0, done - start :]
        total += F.cross_entropy(logits, ids[done + 1 : end + 1], reduction="sum").item()
        done = end
        if end == len(ids) - 1:
            break
    return total, done


def half_context(model, ids, stride):
    return _score(model, ids, min(stride, model.config.context // 2), context=model.config.context // 2)


def keeps_gradients(model, ids, stride):
    total, number = _score(model, ids, stride)
    return torch.tensor(total, requires_grad=True), number


def builds_graphs(model, ids, stride):
    with torch.enable_grad():
        return _score.__wrapped__(model, ids, stride)


def in_bf16_loss(model, ids, stride):
    return _score(model, ids, stride, fp32=False)


@torch.no_grad()
def _whole(model, ids, stride, tensors=False, stop=True, last=False):
    total, done = torch.zeros(()), 0
    for start in range(0, len(ids) - 1, stride):
        end = min(start + model.config.context, len(ids) - 1)
        logits = model(ids[None, start : end + (last and end - start < model.config.context)])
        logits = logits[0, done - start : end - start].float()
        total += F.cross_entropy(logits, ids[done + 1 : end + 1], reduction="sum")
        done = end
        if stop and end == len(ids) - 1:
            break
    return (total, torch.tensor(done)) if tensors else (total.item(), done)


def returns_tensors(model, ids, stride):
    return _whole(model, ids, stride, tensors=True)


def runs_to_the_end(model, ids, stride):
    return _whole(model, ids, stride, stop=False)


def reads_the_last(model, ids, stride):
    return _whole(model, ids, stride, last=True)


def leaves_eval(model, ids, stride):
    model.eval()
    return _whole(model, ids, stride)


def trains_afterwards(model, ids, stride):
    model.eval()
    found = _whole(model, ids, stride)
    model.train()
    return found


RIGHT = {
    "llama.1": [clears_first, inside, by_another_name],
    "llama.2": [by_numbers, always_masked, query_by_query],
    "llama.3": [_head_loss(), Recomputes, Named],
    "llama.4": [by_wildcard, by_match],
    "llama.5": [by_index, by_parts],
    "llama.6": [by_target, by_while],
}
MUTANTS = {
    "llama.1": [
        in_fp32,
        reads_the_loss,
        converts_the_model,
        keeps_the_graph,
        never_clears,
        bf16_loss,
        on_the_cpu,
        waits_where_there_is_a_gpu,
        leaves_autocast_on,
        clips,
        _under(lambda x: torch.autocast(x.device.type)),  # fp16 on a GPU
        _under(lambda x: torch.amp.autocast("cpu", torch.bfloat16)),
    ],
    "llama.2": [
        upper_left,
        sees_the_future,
        stores_scores,
        repeats_keys,
        repeats_keys_in_training,
        mask_of_before(),
        strided_groups,
        mask_on_the_cpu,
        scale_of_size_8,
        in_fp32_attention,
        views,
    ],
    "llama.3": [
        _head_loss(part=lambda y, targets: len(y) / len(targets)),
        _head_loss(pad=False),
        _head_loss(fp32=False),
        _head_loss(scale=False),
        _head_loss(keep=True),
        _head_loss(chunks=False),
        _head_loss(mean=True),
        _head_loss(wait=True),
        _changed_loss(lambda f, ctx, x, *rest: f(ctx, x, *rest).to(x.dtype)),
        _changed_loss(lambda f, ctx, x, w, *rest: f(ctx, x.float(), w.float(), *rest)),
        BufferOfTheClass,
        ScalesInPlace,
        WaitsInBackward,
        ProductInto,
    ],
    "llama.4": [
        shards_the_whole,
        forgets_the_rest,
        no_feed_forward,
        copies_everywhere,
        no_averages,
        stays_gathered,
        two_blocks,
    ],
    "llama.5": [
        *map(_changed, (_same_rows, _across_heads, _only_q, _other_way, _gate_is_up, _size_8)),
        in_fp32_weights,
        keeps_frequencies,
        deletes_frequencies,
        keeps_what_it_cannot_name,
    ],
    "llama.6": [
        no_overlap,
        scores_twice,
        drops_the_rest,
        mean_of_windows,
        shifted_window,
        half_context,
        keeps_gradients,
        builds_graphs,
        in_bf16_loss,
        returns_tensors,
        runs_to_the_end,
        reads_the_last,
        leaves_eval,
        trains_afterwards,
    ],
}

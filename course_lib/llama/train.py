"""Train a Llama on the documentation of this machine's packages: on one device, or on many under torchrun.

    python -m course_lib.llama.train --steps 300 --out run
    torchrun --standalone --nproc-per-node 4 -m course_lib.llama.train --way sharded

`--way` is data (a copy on each rank), sharded (a part of each weight on each rank) or tensor (a part of each
layer's heads and columns on each rank). The losses are those of one process: all ranks draw the same batch;
with data and sharded each takes its rows. Weights are fp32 and matmuls bf16 on a GPU; blocks are compiled.
"""

import argparse
import contextlib
import math
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from course_lib.llama import model as llama
from course_lib.llama import text

WAYS = ("one", "data", "sharded", "tensor")


class MemoryNeed(RuntimeError):
    "A GPU has too little memory for a run; notebooks show the sentence alone."

    def _render_traceback_(self):
        return [str(self)]


def parameters(config):
    "Numbers of weights of (all blocks' matmuls, the head); a tied head is the embedding too."
    kv = config.kv_heads * config.head_dim
    block = 2 * config.width * (config.width + kv) + 3 * config.width * config.ffn
    return config.layers * block, config.rows * config.width


def flops(config, context):
    "FLOPs of a training step for one token: matmuls and causal attention, forward and backward."
    blocks, head = parameters(config)
    return 6 * (blocks + head) + 6 * config.layers * config.width * (context + 1)


def needed(config, batch, activation=4, scores=False, logits=12, ranks=1):
    """Bytes that a training step on `batch` rows of the context needs at its peak, estimated, by part.

    A weight takes 16 bytes with its gradient and AdamW's moments, divided by `ranks` where it is sharded.
    `activation` is the bytes of an activation: 4 in fp32, 2 in bf16, about 3 with autocast in eager code,
    which keeps some in both. `scores` says that attention stores them. `logits` is the bytes of a logit with
    all of its copies: 12 for F.cross_entropy (an fp32 copy and the gradient), 2 for one in place in bf16.
    """
    blocks, head = parameters(config)
    tokens, kv = batch * config.context, config.kv_heads * config.head_dim
    # Kept for backward by each layer: the inputs of its matmuls, of SwiGLU, of attention, and of both norms.
    numbers = 6 * config.width + 2 * (config.width + kv) + 3 * config.ffn
    need = {
        "weights": 16 * (blocks + head * (1 if config.tied else 2)) // ranks,
        "activations": config.layers * numbers * tokens * activation,
        "logits": logits * tokens * config.rows,
    }
    if (
        scores
    ):  # each layer keeps its softmax, in fp32 and in the products' dtype; in backward three more live
        softmax = config.heads * config.context * tokens
        need["scores"] = softmax * (config.layers * (4 if activation == 4 else 6) + 12)
    return need


def refuse_small_gpu(need, what, free=None):
    "Raise MemoryNeed where this GPU has less memory left than `need` says, in bytes by part."
    if free is None:  # what no process has, and what PyTorch has and doesn't use
        free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    total = sum(need.values())
    if total > free:
        parts = ", ".join(f"{name} {n / 1e9:.1f}" for name, n in need.items())
        raise MemoryNeed(
            f"{what} needs about {total / 1e9:.1f} GB ({parts}) and this GPU has {free / 1e9:.1f} GB "
            "free: take a smaller batch or a smaller model"
        )


def optimizers(model, lr):
    "AdamW for the weights; those in parts and those that are whole can't be in one call."
    weights = list(model.parameters())
    kinds = [[p for p in weights if isinstance(p, DTensor) is parts] for parts in (False, True)]
    given = {"lr": lr, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
    return [torch.optim.AdamW(some, **given) for some in kinds if some]


def rate(step, steps, warm):
    "Warm up to 1 over `warm` steps, then half a cosine to 0.1."
    if step < warm:
        return (step + 1) / warm
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def train(
    config, ids, *, way="one", parallelize=None, batch=32, steps=300, lr=1e-3, report=None, device=None
):
    """(model, losses by step, seconds by step) of `steps` steps on `batch` rows of `ids`, drawn with seed 0.

    On ranks that exist, `way` says how they share the work, and `parallelize(model, way, mesh)` does it;
    `batch` counts the rows of all ranks. `report(step, loss, seconds)` is called at each tenth of the steps,
    with the means over that tenth.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    device, context = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")), config.context
    on_gpu = device.type == "cuda"
    rows = 1 if way in ("one", "tensor") else world
    if batch % rows:
        raise ValueError(f"{batch} rows can't be shared evenly by {rows} ranks: take a multiple of {rows}")
    if on_gpu:
        need = needed(config, batch // rows, 2, ranks=rows if way == "sharded" else 1)
        refuse_small_gpu(need, f"a step of {batch // rows:,} × {context:,} tokens")
    torch.manual_seed(0)
    with device:
        model = llama.Llama(config)
    if on_gpu:
        from torch._dynamo import config as dynamo
        from torch._inductor import config as inductor

        dynamo.optimize_ddp = False  # blocks are compiled one by one: no graph is to be split at a bucket
        inductor.compile_threads = 1  # a pool of compilers takes longer to start than one block to compile
        model.loss = torch.compile(model.loss, dynamic=False)
        for block in model.model["layers"]:  # one is compiled, and its code serves all; hooks stay outside
            block.forward = torch.compile(block.forward, dynamic=False)
    whole = model
    if way != "one":
        if parallelize is None:  # the one that lesson llama's exercise has
            from course_lib.llama.solutions import parallelize
        whole = parallelize(model, way, init_device_mesh(device.type, (world,)))
    opts, losses, seconds = optimizers(model, lr), [], []
    autocast = torch.autocast("cuda", torch.bfloat16) if on_gpu else contextlib.nullcontext()
    begin, part = time.perf_counter(), max(1, steps // 10)
    for step, (x, y) in zip(range(steps), text.batches(ids, batch, context, device=device), strict=False):
        if rows > 1:
            x, y = x.chunk(rows)[rank], y.chunk(rows)[rank]
        with autocast:
            loss = whole(x, y)
        loss.backward()
        for opt in opts:
            for group in opt.param_groups:
                group["lr"] = lr * rate(step, steps, max(1, steps // 20))
            opt.step()
            opt.zero_grad()
        losses.append(loss.detach())
        if (step + 1) % part == 0 or step + 1 == steps:  # only now does Python wait for the GPU
            mean = torch.stack(losses[len(seconds) :])
            if rows > 1:
                dist.all_reduce(mean)
            mean /= rows
            losses[-len(mean) :] = mean.tolist()
            seconds += [(time.perf_counter() - begin) / len(mean)] * len(mean)
            begin = time.perf_counter()
            if report and rank == 0:
                report(step + 1, mean.mean().item(), seconds[-1])
    return model, losses, seconds


@torch.no_grad()
def evaluate(model, ids, context=None, batch=16):
    "Mean loss in nats of each token of `ids` but the first of each row of `context`, with what is before it."
    context, device = context or model.config.context, model.cos.device
    rows = ids[: (len(ids) - 1) // context * context + 1]
    if len(rows) < context + 1:
        raise text.TextError(
            f"the text has {len(ids):,} tokens, and a context of {context:,} needs {context + 1:,}: "
            "take more text or a shorter context"
        )
    x, y = (t.view(-1, context).to(device) for t in (rows[:-1], rows[1:]))
    autocast = torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()
    total = 0.0
    for a, b in zip(x.split(batch), y.split(batch), strict=True):
        with autocast:
            total += model(a, b).item() * len(a)
    return total / len(x)


def main():
    options = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    options.add_argument("--way", choices=WAYS, default="one")
    options.add_argument("--steps", type=int, default=300)
    options.add_argument("--batch", type=int, default=32, help="rows of all ranks together")
    options.add_argument("--lr", type=float, default=1e-3)
    options.add_argument(
        "--shape",
        type=int,
        nargs=6,
        default=(384, 6, 6, 2, 1024, 512),
        metavar=("WIDTH", "LAYERS", "HEADS", "KV_HEADS", "FFN", "CONTEXT"),
    )
    options.add_argument("--vocab", type=int, default=4096)
    options.add_argument("--packages", nargs="*", default=text.PACKAGES, help="whose documentation is read")
    options.add_argument("--out", help="a folder for the weights, as Transformers reads them, and the tokens")
    given = options.parse_args()
    if (given.way == "one") is ("RANK" in os.environ):
        sys.exit("--way data, sharded and tensor need torchrun, and --way one must not have it")
    if "RANK" in os.environ:
        local, here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        if torch.cuda.device_count() >= here:
            torch.cuda.set_device(local)
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        dist.init_process_group("nccl" if torch.cuda.device_count() >= here else "gloo")
    first = not dist.is_initialized() or dist.get_rank() == 0
    training, validation = text.corpus(given.packages)
    tokenizer = text.train_tokenizer(training, given.vocab)
    width, layers, heads, kv_heads, ffn, context = given.shape
    config = llama.Config(given.vocab, width, layers, heads, kv_heads, ffn, context)
    tokens = given.batch * context

    def report(step, loss, seconds):
        print(f"step {step:6,}  loss {loss:.4f}  {tokens / seconds:,.0f} tokens/s", flush=True)

    try:
        model, _, _ = train(
            config,
            text.encode(tokenizer, training),
            way=given.way,
            batch=given.batch,
            steps=given.steps,
            lr=given.lr,
            report=report,
        )
        if given.way == "sharded":  # whole weights again, for what follows
            whole = {k: v.full_tensor() for k, v in model.state_dict().items()}
        elif given.way == "tensor":
            whole = {
                k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()
            }
        else:
            whole = model.state_dict()
        if first:
            with torch.device(model.cos.device):
                model = llama.Llama(config)
            model.load_state_dict(whole)
            print(f"validation loss {evaluate(model, text.encode(tokenizer, validation)):.4f}", flush=True)
            if given.out:
                llama.save(model, given.out)
                tokenizer.save(os.path.join(given.out, "tokenizer.json"))
    except (MemoryNeed, text.TextError, ValueError) as e:
        sys.exit(str(e))
    if dist.is_initialized():
        dist.barrier()  # no rank ends while another still computes
        dist.destroy_process_group()
        sys.stdout.flush()
        os._exit(0)  # Gloo's threads can abort a process while Python ends


if __name__ == "__main__":
    main()

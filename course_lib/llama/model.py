"""A Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU, a head that is tied or not.

    model = Llama(Config(vocab=4096, width=256, layers=4, heads=4, kv_heads=2, ffn=768, context=256))
    logits = model(ids)                  # [batch, time] to [batch, time, vocab]
    ids = generate(model, ids, 100)      # 100 more tokens, with the keys and values of earlier ones kept
    save(model, "folder")                # config.json and model.safetensors, as Transformers reads them
    model = load("folder")

Parameters have the names that Transformers' LlamaForCausalLM gives them. `Llama(config, attend=…, norm=…,
loss=…)` takes other blocks: a function of (q, k, v), a class of (width, eps), a function as `plain_loss`.
Method: Touvron et al. 2023 (LLaMA); Su et al. 2021 (rotary); Ainslie et al. 2023 (grouped queries).
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Config:
    "The shape of a Llama; `ffn` is the inner width of SwiGLU, `theta` the base of the rotary frequencies."

    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    context: int
    tied: bool = True
    pad: int = 128  # the embedding's rows are a multiple of it: tensor cores read aligned rows
    theta: float = 10_000.0
    eps: float = 1e-5

    @property
    def head_dim(self):
        return self.width // self.heads

    @property
    def rows(self):
        return -(-self.vocab // self.pad) * self.pad


class RMSNorm(nn.Module):
    "x / sqrt(mean(x^2) + eps) * weight over the last axis; the mean is taken in fp32."

    def __init__(self, width, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


def rotary(config, device=None):
    "(cos, sin), each [context, head_dim] in fp32: position times frequency, the frequencies repeated twice."
    half = torch.arange(0, config.head_dim, 2, device=device).float() / config.head_dim
    angle = torch.outer(torch.arange(config.context, device=device).float(), config.theta**-half)
    return angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)


def rotate(x, cos, sin):
    "Turn each pair (x[i], x[i + head_dim / 2]) of x [batch, heads, time, head_dim] by its position's angle."
    a, b = x.chunk(2, -1)
    return x * cos.to(x.dtype) + torch.cat((-b, a), -1) * sin.to(x.dtype)


def plain_attend(q, k, v):
    "Causal attention with all scores: q [batch, heads, time, d]; k, v [batch, kv_heads, time, d]."
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    future = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(future, -math.inf).softmax(-1) @ v


def fused_attend(q, k, v):
    "The same in one operator, which stores no scores and reads each key for its whole group of heads."
    whole = q.shape[-2] == k.shape[-2]  # else q is one new position, which sees all
    return F.scaled_dot_product_attention(q, k, v, is_causal=whole, enable_gqa=True)


def plain_loss(x, weight, targets, vocab):
    "Mean cross-entropy of x [n, width] @ weight.T; rows of `weight` from `vocab` on are padding."
    return F.cross_entropy((x @ weight.T)[:, :vocab].float(), targets)


class Attention(nn.Module):
    "Each `heads / kv_heads` query heads share a head of keys and values."

    def __init__(self, config, attend):
        super().__init__()
        kv, self.head_dim, self.attend = config.kv_heads * config.head_dim, config.head_dim, attend
        self.q_proj = nn.Linear(config.width, config.width, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(config.width, kv, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x, cos, sin, past=None):
        # [batch, time, heads * d] to [batch, heads, time, d]; a rank of tensor parallelism has fewer heads.
        q, k, v = (
            f(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if past is not None:  # the keys and values of earlier positions: an empty list at first
            k, v = (torch.cat(pair, 2) for pair in zip(past, (k, v), strict=True)) if past else (k, v)
            past[:] = k, v
        out = self.attend(q, k, v)
        return self.o_proj(out.transpose(1, 2).flatten(-2))


class SwiGLU(nn.Module):
    "down(silu(gate(x)) * up(x))."

    def __init__(self, config):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(config.width, config.ffn, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(config.ffn, config.width, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    "Attention, then SwiGLU, each on normalised input and added to the residual stream."

    def __init__(self, config, attend, norm):
        super().__init__()
        self.input_layernorm = norm(config.width, config.eps)
        self.self_attn = Attention(config, attend)
        self.post_attention_layernorm = norm(config.width, config.eps)
        self.mlp = SwiGLU(config)

    def forward(self, x, cos, sin, past=None):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, past)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    "Token ids [batch, time] to logits [batch, time, vocab], or to the mean loss where targets are given."

    def __init__(self, config, attend=fused_attend, norm=RMSNorm, loss=plain_loss):
        super().__init__()
        self.config, self.loss = config, loss
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(config.rows, config.width),
                "layers": nn.ModuleList(Block(config, attend, norm) for _ in range(config.layers)),
                "norm": norm(config.width, config.eps),
            }
        )
        self.lm_head = nn.Linear(config.width, config.rows, bias=False)
        for name, p in self.named_parameters():
            if p.ndim == 2:  # what is added to the residual stream starts smaller, as in GPT-2
                added = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * config.layers) if added else 0.02)
        if config.tied:
            self.lm_head.weight = self.model["embed_tokens"].weight
        self.cos, self.sin = rotary(config)

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)  # moved or converted: the angles follow, and stay fp32
        self.cos, self.sin = rotary(self.config, self.lm_head.weight.device)
        return self

    def hidden(self, ids, cache=None):
        "[batch, time, width] before the head; `cache` has a list for each layer, which this call fills."
        x, start = self.model["embed_tokens"](ids), cache[0][0].shape[2] if cache and cache[0] else 0
        cos, sin = (t[start : start + ids.shape[1]] for t in (self.cos, self.sin))
        for i, block in enumerate(self.model["layers"]):
            x = block(x, cos, sin) if cache is None else block(x, cos, sin, cache[i])
        return self.model["norm"](x)

    def forward(self, ids, targets=None, cache=None):
        x = self.hidden(ids, cache)
        if targets is not None:
            return self.loss(x.flatten(0, 1), self.lm_head.weight, targets.flatten(), self.config.vocab)
        return self.lm_head(x)[..., : self.config.vocab]


@torch.no_grad()
def generate(model, ids, steps, temperature=0.8, top=50, seed=0):
    """`ids` [batch, time] and `steps` more, each drawn from the `top` likeliest; at temperature 0 the first.

    Earlier keys and values are kept, so that a step computes one position. Stops at the model's context.
    """
    draw, cache, new = torch.Generator(ids.device).manual_seed(seed), [[] for _ in model.model["layers"]], ids
    for _ in range(min(steps, model.config.context - ids.shape[1])):
        logits = model(new, cache=cache)[:, -1].float()
        likeliest = logits.topk(top if temperature else 1)
        p = (likeliest.values / (temperature or 1)).softmax(-1)
        new = likeliest.indices.gather(1, torch.multinomial(p, 1, generator=draw))
        ids = torch.cat((ids, new), 1)
    return ids


class CheckpointError(ValueError):
    "A checkpoint doesn't fit; notebooks show the sentence alone."

    def _render_traceback_(self):
        return [str(self)]


NAMES = {
    "vocab": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "ffn": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "context": "max_position_embeddings",
    "tied": "tie_word_embeddings",
    "eps": "rms_norm_eps",
}


def save(model, folder):
    "Write config.json and model.safetensors into `folder`, as Transformers' LlamaForCausalLM reads them."
    from safetensors.torch import save_file

    config, folder = model.config, Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {k: v.detach().contiguous() for k, v in model.state_dict().items()}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][: config.vocab].clone()  # without the padding
    if config.tied:
        del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    about = {theirs: getattr(config, ours) for ours, theirs in NAMES.items()}
    about |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
    about |= {"rope_theta": config.theta, "head_dim": config.head_dim, "attention_bias": False}
    about |= {"dtype": str(next(model.parameters()).dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(about, indent=2), encoding="utf-8")


def load(folder, config=None, **blocks):
    """The Llama of a folder with config.json and *.safetensors, on the CPU, in the dtype of its weights.

    With `config` the weights must have its shapes. `blocks` are Llama's `attend`, `norm` and `loss`.
    Raises CheckpointError where a weight is missing, unknown or of another shape.
    """
    from safetensors.torch import load_file

    about = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
    rope = about.get("rope_parameters") or about.get("rope_scaling") or {}
    if rope.get("rope_type", "default") != "default" or about.get("attention_bias"):
        raise CheckpointError(
            f"{folder} is a Llama with scaled positions or biases, which this model doesn't have"
        )
    if config is None:
        sizes = {ours: about[theirs] for ours, theirs in NAMES.items() if theirs in about}
        config = Config(**sizes, theta=about.get("rope_theta") or rope.get("rope_theta", 10_000.0))
    tensors = {
        k: v for path in sorted(Path(folder).glob("*.safetensors")) for k, v in load_file(path).items()
    }
    if not tensors:
        raise CheckpointError(f"{folder} has no file *.safetensors")
    with torch.device("meta"):
        model = Llama(config, **blocks).to(next(iter(tensors.values())).dtype)
    model = model.to_empty(device="cpu")
    if config.tied:
        model.lm_head.weight = model.model["embed_tokens"].weight
        tensors.pop("lm_head.weight", None)
    wanted = dict(model.named_parameters())
    if odd := sorted(wanted.keys() ^ tensors.keys()):
        missing = odd[0] in wanted
        raise CheckpointError(
            f"{folder} {'lacks' if missing else 'has an unknown'} weight {odd[0]}"
            + f" (and {len(odd) - 1} more)" * (len(odd) > 1)
        )
    with torch.no_grad():
        for name, p in wanted.items():
            rows = config.vocab if name in ("model.embed_tokens.weight", "lm_head.weight") else len(p)
            shape = (rows, *p.shape[1:])
            if tensors[name].shape != shape:
                raise CheckpointError(
                    f"{name} is {list(tensors[name].shape)} in {folder} and {list(shape)} in the "
                    "configuration: the checkpoint is of another model"
                )
            p.zero_()[:rows].copy_(tensors[name])
    return model

"""A Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU, a head that is tied or not.

    model = Llama(Config(vocab=4096, width=256, layers=4, heads=4, kv_heads=2, ffn=768, context=256))
    logits = model(ids)               # [batch, time] to [batch, time, vocab]
    save(model, "folder")             # config.json and model.safetensors, as Transformers reads them
    model = load("folder")

Parameters have the names that Transformers' LlamaForCausalLM gives them. `Llama(config, attend=…, norm=…)`
takes another attention or another norm: a function of q, k, v and a class of (width, eps).
Method: Touvron et al. 2023 (LLaMA); Su et al. 2021 (rotary); Ainslie et al. 2023 (grouped queries).
"""

import json
import math
from dataclasses import asdict, dataclass
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
    theta: float = 10_000.0
    eps: float = 1e-5

    @property
    def head_dim(self):
        return self.width // self.heads


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
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Attention(nn.Module):
    "Each `heads / kv_heads` query heads share a head of keys and values."

    def __init__(self, config, attend):
        super().__init__()
        kv, self.head_dim, self.attend = config.kv_heads * config.head_dim, config.head_dim, attend
        self.q_proj = nn.Linear(config.width, config.width, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(config.width, kv, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x, cos, sin):
        # [batch, time, heads * d] to [batch, heads, time, d]; a rank of tensor parallelism has fewer heads.
        q, k, v = (
            f(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = self.attend(rotate(q, cos, sin), rotate(k, cos, sin), v)
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

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    "Token ids [batch, time] to logits [batch, time, vocab]; `hidden` stops before the head."

    def __init__(self, config, attend=fused_attend, norm=RMSNorm):
        super().__init__()
        self.config = config
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(config.vocab, config.width),
                "layers": nn.ModuleList(Block(config, attend, norm) for _ in range(config.layers)),
                "norm": norm(config.width, config.eps),
            }
        )
        self.lm_head = nn.Linear(config.width, config.vocab, bias=False)
        for name, p in self.named_parameters():
            if p.ndim == 2:  # what is added to the residual stream starts smaller, as in GPT-2
                added = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * config.layers) if added else 0.02)
        if config.tied:
            self.lm_head.weight = self.model["embed_tokens"].weight
        cos, sin = rotary(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def hidden(self, ids):
        x = self.model["embed_tokens"](ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for block in self.model["layers"]:
            x = block(x, cos, sin)
        return self.model["norm"](x)

    def forward(self, ids):
        return self.lm_head(self.hidden(ids))
import os, sys, time, gc, traceback
T0 = time.time()
torch.set_float32_matmul_precision("high")
import torch._dynamo, torch._inductor.config as ic
import triton, triton.language as tl
def P(*a): print(f"[{time.time()-T0:5.1f}]", *a, flush=True)
dev = "cuda"

@triton.jit
def xent_kernel(logits_ptr, target_ptr, loss_ptr, scale, stride, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride
    target = tl.load(target_ptr + row)
    top = -float("inf"); total = 0.0; chosen = 0.0
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + cols, mask=cols < n_cols, other=-float("inf")).to(tl.float32)
        new = tl.maximum(top, tl.max(x, axis=0))
        total = total * tl.exp(top - new) + tl.sum(tl.exp(x - new), axis=0)
        chosen += tl.sum(tl.where(cols == target, x, 0.0), axis=0)
        top = new
    lse = top + tl.log(total)
    tl.store(loss_ptr + row, lse - chosen)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + cols, mask=cols < n_cols, other=-float("inf")).to(tl.float32)
        p = tl.exp(x - lse)
        tl.store(row_ptr + cols, scale * tl.where(cols == target, p - 1.0, p), mask=cols < n_cols)

class HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, t, chunk):
        n = len(t); loss = torch.empty(n, device=x.device); dx = torch.empty_like(x)
        dw = torch.zeros(w.shape, device=x.device, dtype=torch.float32 if chunk < n else w.dtype)
        for i in range(0, n, chunk):
            xi = x[i:i+chunk]
            l = xi @ w.T
            xent_kernel[(len(l),)](l, t[i:i+chunk], loss[i:i+chunk], 1.0 / n, l.stride(0), l.shape[1], BLOCK=8192, num_warps=8)
            torch.mm(l, w, out=dx[i:i+chunk])
            if chunk < n: dw += l.T @ xi
            else: torch.mm(l.T, xi, out=dw)
        ctx.save_for_backward(dx, dw.to(w.dtype))
        return loss.mean()
    @staticmethod
    def backward(ctx, g):
        dx, dw = ctx.saved_tensors
        return dx, dw, None, None   # g is 1

def ce_plain(x, w, t): return F.cross_entropy((x @ w.T).float(), t)

class Master:
    "bf16 weights, fp32 master, fp32 moments"
    def __init__(self, params, lr=3e-4, moments=torch.float32):
        self.p = list(params); self.m = [p.detach().float() for p in self.p]
        self.a = [torch.zeros_like(m, dtype=moments) for m in self.m]; self.b = [torch.zeros_like(a) for a in self.a]
        self.t = torch.zeros((), device=dev); self.lr = lr
        self.fn = torch.compile(self.one, dynamic=False)
    def one(self, t, lr, p, m, a, b, g):
        g = [x.float() for x in g]
        af, bf = [x.float() for x in a], [x.float() for x in b]
        af = torch._foreach_lerp(af, g, 0.1)
        bf = torch._foreach_add(torch._foreach_mul(bf, 0.95), torch._foreach_mul(torch._foreach_mul(g, g), 0.05))
        c1, c2 = 1 - 0.9**t, (1 - 0.95**t).sqrt()
        for P_, M, A, B, a_, b_ in zip(p, m, a, b, af, bf):
            M.mul_(1 - lr * 0.1).sub_(lr * (a_ / c1) / (b_.sqrt() / c2 + 1e-8))
            A.copy_(a_); B.copy_(b_); P_.copy_(M)
    @torch.no_grad()
    def step(self):
        self.t += 1
        self.fn(self.t, self.lr, self.p, self.m, self.a, self.b, [p.grad for p in self.p])
    def zero_grad(self):
        for p in self.p: p.grad = None

def flops(c, T):
    att = 2 * c.width**2 + 2 * c.width * c.kv_heads * c.head_dim
    n = c.layers * (att + 3 * c.width * c.ffn) + c.vocab * c.width
    return 6 * n + 6 * c.layers * c.width * T, n

def backend(name):
    torch.backends.cuda.enable_flash_sdp(name in ("flash", "any")); torch.backends.cuda.enable_cudnn_sdp(name in ("cudnn", "any"))
    torch.backends.cuda.enable_mem_efficient_sdp(name == "any"); torch.backends.cuda.enable_math_sdp(name == "any")

def rep_attend(q, k, v):
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)

def bench(label, c, batch, T, *, dtype=torch.bfloat16, autocast=False, attend=fused_attend, sdp="cudnn", comp="block", ce="xent", chunk=1 << 30, opt="master", tf32=True, steps=6, item=False, limit=120):
    if time.time() - T0 > limit: P("skip", label); return
    try:
        torch._dynamo.reset(); gc.collect(); torch.cuda.empty_cache(); torch.cuda.reset_peak_memory_stats()
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        backend(sdp); torch.manual_seed(0)
        t0 = time.time()
        with torch.device(dev): model = Llama(c, attend=attend)
        model.to(dtype)
        ids = torch.randint(0, c.vocab - 1, (batch, T + 1), device=dev)
        x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        if opt == "master": o = Master(model.parameters())
        elif opt == "master16": o = Master(model.parameters(), moments=torch.bfloat16)
        else: o = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(.9, .95), weight_decay=.1, **({"fused": True} if opt == "fused" else {}))
        lossf = {"xent": lambda h, w, t: HeadLoss.apply(h, w, t, chunk), "plain": ce_plain, "cplain": torch.compile(ce_plain, dynamic=False)}[ce]
        if comp == "block":
            for b in model.model["layers"]: b.compile(dynamic=False)
            model.model["norm"].compile(dynamic=False)
            hidden = model.hidden
        elif comp: hidden = torch.compile(model.hidden, dynamic=False, mode=None if comp == "whole" else comp)
        else: hidden = model.hidden
        def fb():
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                h = hidden(x).flatten(0, 1)
                if ce == "xent": h = h.to(torch.bfloat16) if autocast else h
                loss = lossf(h, model.lm_head.weight, y.flatten())
            loss.backward(); return loss
        def step():
            loss = fb(); o.step(); o.zero_grad()
            if item: loss.item()
            return loss
        for _ in range(2): first = step()
        torch.cuda.synchronize(); ready = time.time() - t0
        ev = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        ev[0].record()
        for i in range(steps): loss = step(); ev[i + 1].record()
        torch.cuda.synchronize()
        ts = sorted(ev[i].elapsed_time(ev[i+1]) for i in range(steps)); ms = ts[len(ts) // 2]
        f, n = flops(c, T); tok = batch * T / ms * 1e3
        # the optimiser alone
        fb(); e = [torch.cuda.Event(enable_timing=True) for _ in range(2)]; e[0].record(); o.step(); e[1].record(); torch.cuda.synchronize()
        P(f"{label:44s} {n/1e6:7.0f}M {ms:8.2f} ms ({ts[0]:.1f}..{ts[-1]:.1f}) {tok/1e3:8.1f} ktok/s MFU {100*tok*f/989e12:5.1f}% opt {e[0].elapsed_time(e[1]):5.1f} ms mem {torch.cuda.max_memory_allocated()/1e9:5.1f} GB ready {ready:4.1f} s loss {loss.item():.3f}")
    except Exception as ex:
        P("FAIL", label, type(ex).__name__, str(ex).strip().splitlines()[:1], str(ex).strip().splitlines()[-1:][0][:200] if str(ex).strip() else "")
    finally:
        model = o = x = y = lossf = hidden = loss = first = None
        gc.collect()
a = torch.randn(8192, 8192, device=dev, dtype=torch.bfloat16); b = torch.randn_like(a)
for _ in range(20): a @ b
e = [torch.cuda.Event(enable_timing=True) for _ in range(2)]; torch.cuda.synchronize()
e[0].record()
for _ in range(300): a @ b
e[1].record(); torch.cuda.synchronize()
P(f"sustained 8192^3 bf16: {300*2*8192**3/e[0].elapsed_time(e[1])/1e9:.0f} TFLOP/s", torch.__version__)
del a, b
big = Config(vocab=32768, width=4096, layers=9, heads=32, kv_heads=8, ffn=14336, context=2048)
bench("2B 16x2048 cudnn block xent", big, 16, 2048)
bench("2B 16x2048 cudnn(repeat kv) block xent", big, 16, 2048, attend=rep_attend)
bench("2B 16x2048 flash block cplain", big, 16, 2048, sdp="flash", ce="cplain")
bench("2B 24x2048 cudnn block xent m16", big, 24, 2048, opt="master16")
c768 = Config(vocab=32768, width=768, layers=12, heads=12, kv_heads=4, ffn=2048, context=2048)
c1024 = Config(vocab=32768, width=1024, layers=8, heads=8, kv_heads=2, ffn=2816, context=2048)
c1536 = Config(vocab=16384, width=1536, layers=4, heads=12, kv_heads=4, ffn=4096, context=2048)
from dataclasses import replace
N = dict(dtype=torch.float32, attend=plain_attend, comp=None, ce="plain", opt="adamw", tf32=False, steps=3, item=True, sdp="any")
for nm, c in (("768x12", c768), ("1024x8", c1024), ("1536x4", c1536)):
    bench(nm + " naive 8x2048 V+1", replace(c, vocab=c.vocab + 1), 8, 2048, **N)
    bench(nm + " top block xent cudnn 32x2048", c, 32, 2048)
bench("768x12 d64 naive T1024 16x1024 V+1", replace(c768, vocab=32769, kv_heads=12), 16, 1024, **N)
bench("1024x8 top whole xent cudnn 64x2048", c1024, 64, 2048, comp="whole")
bench("1024x8 top block cplain cudnn 64x2048", c1024, 64, 2048, ce="cplain")
bench("1024x8 top block xent flash 64x2048", c1024, 64, 2048, sdp="flash")
A = dict(dtype=torch.float32, autocast=True)
bench("1024x8 autocast plain eager 8x2048 V+1", replace(c1024, vocab=32769), 8, 2048, **{**N, "tf32": True, "autocast": True})
bench("1024x8 autocast sdpa eager 8x2048 fused", replace(c1024, vocab=32769), 8, 2048, **{**N, "tf32": True, "autocast": True, "attend": fused_attend, "opt": "fused"})
bench("1024x8 autocast sdpa eager 8x2048 fused V32768", c1024, 8, 2048, **{**N, "tf32": True, "autocast": True, "attend": fused_attend, "opt": "fused"})
bench("2B 16x2048 cudnn whole xent", big, 16, 2048, comp="whole", limit=100)
bench("2B 32x2048 cudnn block xent m16", big, 32, 2048, opt="master16", limit=105)
P("end")

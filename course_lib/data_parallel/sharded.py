"""Sharding: ZeRO's bytes per parameter, Adam with its state in shards, a layer that gathers and frees."""

import math

import torch
from torch import nn

# bf16 weights and gradients; fp32 master weights and Adam's two moments. Source: Rajbhandari et al. 2020.
WEIGHTS, GRADIENTS, STATE = 2, 2, 12


def zero_bytes(stage, ranks, weights=WEIGHTS, gradients=GRADIENTS, state=STATE):
    """Bytes that each rank keeps for one parameter, under ZeRO stage 0 to 3.

    Stage 1 shards the optimizer's state, 2 the gradients too, 3 the weights too.
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"ZeRO has the stages 0 to 3; given {stage!r}")
    if ranks < 1:
        raise ValueError(f"a group has 1 rank or more; given {ranks}")
    return sum(_parts(stage, ranks, weights, gradients, state))


def _parts(stage, ranks, weights, gradients, state):
    cut = [ranks if stage >= first else 1 for first in (3, 2, 1)]
    return [n / c for n, c in zip((weights, gradients, state), cut, strict=True)]


def explore_zero(billions=8.0, ranks=8, memory=140):
    "The explorer's data: gigabytes each rank keeps under each stage, and whether they fit into `memory` GB."
    stages = []
    for stage in range(4):
        parts = [billions * n for n in _parts(stage, ranks, WEIGHTS, GRADIENTS, STATE)]
        stages.append({"stage": stage, "parts": parts, "total": sum(parts), "fits": sum(parts) < memory})
    return {"billions": billions, "ranks": ranks, "memory": memory, "stages": stages}


def shard_length(n, ranks):
    "Elements of a shard when `n` are cut into `ranks` equal parts, the last one padded."
    return -(-n // ranks)


class ShardedAdam:
    """Adam whose moments live in shards, one on each rank (ZeRO stage 1); the same steps as torch's Adam.

    `step()` averages the gradients with a reduce-scatter, updates this rank's part of the weights, and
    gathers the parts. The parameters are taken as one flat row, padded with zeros. A missing gradient counts
    as zero. Source: Kingma and Ba 2015; Rajbhandari et al. 2020.
    """

    def __init__(self, params, comm, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        self.params, self.comm, self.lr, self.betas, self.eps = list(params), comm, lr, betas, eps
        if not self.params:
            raise ValueError("ShardedAdam was given no parameters")
        self.n = shard_length(sum(p.numel() for p in self.params), comm.size)
        self.m, self.v = (torch.zeros(self.n, device=self.params[0].device) for _ in range(2))
        self.t = 0

    def _flat(self, tensors):
        flat = torch.zeros(self.n * self.comm.size, device=self.m.device)
        at = 0
        for t in tensors:
            flat[at : at + t.numel()] = t.flatten()
            at += t.numel()
        return flat

    @torch.no_grad()
    def step(self):
        grad = torch.empty(self.n, device=self.m.device)
        self.comm.reduce_scatter_tensor(
            grad, self._flat(torch.zeros_like(p) if p.grad is None else p.grad for p in self.params)
        )
        grad /= self.comm.size
        self.t += 1
        b1, b2 = self.betas
        self.m.lerp_(grad, 1 - b1)
        self.v.mul_(b2).addcmul_(grad, grad, value=1 - b2)
        m, v = self.m / (1 - b1**self.t), self.v / (1 - b2**self.t)
        full = self._flat(self.params)
        mine = full[self.comm.rank * self.n :][: self.n] - self.lr * m / (v.sqrt() + self.eps)
        self.comm.all_gather_into_tensor(full, mine)
        at = 0
        for p in self.params:
            p.copy_(full[at : at + p.numel()].view_as(p))
            at += p.numel()

    def zero_grad(self):
        for p in self.params:
            p.grad = None


def shard(weight, comm):
    "This rank's part of `weight` as a flat parameter, padded with zeros to equal length."
    n = shard_length(weight.numel(), comm.size)
    flat = torch.zeros(n * comm.size, dtype=weight.dtype, device=weight.device)
    flat[: weight.numel()] = weight.detach().flatten()
    return nn.Parameter(flat[comm.rank * n :][:n].clone())


class GatherComputeFree(torch.autograd.Function):
    """A linear layer without bias whose weight lives in shards: gathered, used and freed, twice a step.

    `apply(x, shard, shape, comm)`: x [N, in], `shard` flat, `shape` (out, in); gives [N, out]. The gradient
    of the shard is the mean over the ranks. Source: Zhao et al. 2023 (FSDP).
    """

    @staticmethod
    def gather(part, shape, comm):
        full = torch.empty(len(part) * comm.size, dtype=part.dtype, device=part.device)
        comm.all_gather_into_tensor(full, part)
        return full[: math.prod(shape)].view(shape)

    @staticmethod
    def forward(ctx, x, part, shape, comm):
        ctx.save_for_backward(x, part)  # not the weight: that is the point
        ctx.shape, ctx.comm = shape, comm
        return x @ GatherComputeFree.gather(part, shape, comm).T

    @staticmethod
    def backward(ctx, grad):
        x, part = ctx.saved_tensors
        grad_x = grad @ GatherComputeFree.gather(part, ctx.shape, ctx.comm)  # and the weight is gone again
        padded = torch.zeros(len(part) * ctx.comm.size, dtype=part.dtype, device=part.device)
        torch.mm(grad.T, x, out=padded[: math.prod(ctx.shape)].view(ctx.shape))
        grad_part = torch.empty_like(part)
        ctx.comm.reduce_scatter_tensor(grad_part, padded)
        return grad_x, grad_part / ctx.comm.size, None, None


def sharded_linear(x, part, shape, comm):
    "`x @ weight.T`, with `weight` of `shape` (out, in) living in shards of which this rank has `part`."
    return GatherComputeFree.apply(x, part, shape, comm)

"""Small programs and what they cost, worked out by hand, for test_meter (CPU) and test_meter_gpu (CUDA).

Tensors are float32 (4 bytes) unless their name says otherwise; indices are int64 (8 bytes). R, C and the
other sizes stand in the formulas, so that a formula reads as the reasoning behind it.
"""

import math
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

R, C = 6, 10  # x and y
H = 8  # outputs of the linear layer w, b
ROWS, WIDE, TAKEN = 12, 5, 4  # the table, and the rows taken from it
f, i64, i1 = 4, 8, 1  # bytes of a float32, an int64, a bool


@dataclass
class Program:
    "A program and its expected counts: `flops` of contractions, `other` the estimates for the rest."

    run: object
    ops: int
    read: int
    written: int
    flops: int = 0
    other: int = 0
    syncs: int = 0
    grad: bool = False  # needs gradients
    part: bool = False  # `run` prepares and returns what is to be counted: a backward pass alone, a step


PROGRAMS = {}


def program(ops, read, written, **more):
    def add(run):
        PROGRAMS[run.__name__] = Program(run, ops, read, written, **more)
        return run

    return add


def inputs(device="cpu"):
    "Fresh tensors for one program."
    g = torch.Generator().manual_seed(7)

    def r(*shape):
        return torch.randn(*shape, generator=g).to(device)

    def leaf(*shape):
        return r(*shape).requires_grad_()

    return SimpleNamespace(
        x=r(R, C), y=r(R, C), out=r(R, C), row=r(C), col=r(R, 1), square=r(R, R), one=r(()),
        half=r(R, C).bfloat16(),
        mask=(torch.arange(R * C).view(R, C) % 3 == 0).to(device),
        labels=torch.tensor([3, 1, 4, 1, 5, 9], device=device),
        index=torch.tensor([0, 5, 5, 2], device=device),
        columns=torch.tensor([[0, 1], [2, 2], [9, 0], [3, 4], [1, 1], [7, 8]], device=device),
        table=leaf(ROWS, WIDE), xg=leaf(R, C), yg=leaf(R, C), w=leaf(H, C), b=leaf(H),
        gain=leaf(C), bias=leaf(C),
        image=leaf(2, 3, 8, 9), pooled=r(2, 3, 4, 4), kernel=leaf(4, 3, 3, 3), kernel_bias=leaf(4),
        q=leaf(2, 5, 4), k=leaf(2, 7, 4), v=leaf(2, 7, 3), empty=r(0, C), long=r(3, 4, C),
    )  # fmt: skip


# Point-wise: each distinct element read once, the result written, one FLOP an element of the result.
n = R * C


@program(1, 2 * n * f, n * f, other=n)
def add(t):
    t.x + t.y


@program(1, n * f, n * f, other=n)
def times_a_number(t):
    t.x * 2.5


@program(1, n * f, n * f, other=n)
def same_tensor_twice(t):
    t.x * t.x


@program(1, R * R * f, R * R * f, other=R * R)
def with_its_transpose(t):
    t.square * t.square.t()


@program(1, n * f, n * f, other=n)
def with_its_own_view(t):
    t.x.view(-1) + t.x.reshape(R * C)


@program(1, (n + C) * f, n * f, other=n)
def broadcast_row(t):
    t.x + t.row


@program(1, (R + C) * f, n * f, other=n)
def broadcast_both(t):
    t.col * t.row


@program(1, C * f, n * f, other=n)
def expanded_input(t):
    t.row.expand(R, C) + 1


@program(1, n * f, n * f, other=n)
def transposed_input(t):
    t.x.t().exp()


@program(1, 2 * R * (C // 2) * f, R * (C // 2) * f, other=R * (C // 2))
def strided_slices(t):
    t.x[:, ::2] + t.y[:, 1::2]


@program(1, C * f, 3 * (C - 2) * f, other=3 * (C - 2))
def overlapping_windows(t):
    t.row.unfold(0, 3, 1) * 2


@program(3, 3 * n * f, 3 * n * f, other=3 * n)
def chain(t):
    t.x.exp().neg().sigmoid()


@program(1, n * 2, n * 2, other=n)
def half_precision(t):
    t.half * 2


@program(1, (n * 2 + n * f), n * f, other=n)
def mixed_precision(t):
    t.half + t.x


@program(1, 2 * n * f, n * i1, other=n)
def comparison(t):
    return t.x > t.y


# In place: read and written. Fills, copies and out= only write.
@program(1, 2 * n * f, n * f, other=n)
def in_place_add(t):
    t.x.add_(t.y)


@program(1, n * f, n * f, other=n)
def in_place_with_itself(t):
    t.x.mul_(t.x)


@program(1, C * f, C * f, other=C)
def in_place_on_one_row(t):
    t.x[2].relu_()


@program(1, 2 * n * f, n * f, other=n)
def into_out(t):
    torch.mul(t.x, t.y, out=t.out)


@program(2, 0, 2 * n * f)
def in_place_fills(t):
    t.x.fill_(3.0)
    t.y.zero_()


@program(1, f, n * f)
def fill_with_a_tensor(t):
    t.x.fill_(t.one)


@program(4, 0, 3 * n * f + C * i64)
def new_fills(t):
    device = t.x.device
    torch.zeros(R, C, device=device)
    torch.ones_like(t.x)
    t.x.new_full((R, C), 2.0)
    torch.arange(C, device=device)


@program(2, 0, 2 * n * f)
def random_numbers(t):
    torch.rand(R, C, device=t.x.device)
    t.x.normal_()


@program(1, n * f, n * f)
def copy_into(t):
    t.out.copy_(t.x)


@program(1, C * f, n * f)
def copy_broadcast(t):
    t.out.copy_(t.row)


@program(1, n * f, n * 2)
def cast(t):
    t.x.to(torch.bfloat16)


@program(2, 2 * n * f, 2 * n * f)
def clones(t):
    t.x.clone()
    t.x.t().contiguous()


# Nothing moves.
@program(0, 0, 0)
def views(t):
    t.x.view(C, R).t()[1:, None].squeeze().unsqueeze(0).permute(0, 2, 1).detach()
    t.x.split(2)
    t.row.expand(R, C)
    t.x.contiguous()
    t.x.to(torch.float32)
    t.x.t_()


@program(0, 0, 0)
def allocations(t):
    torch.empty(R, C, device=t.x.device)
    torch.empty_like(t.x)
    t.x.new_empty(3)


@program(0, 0, 0)
def no_elements(t):
    t.empty + 1
    t.empty.exp()
    torch.cat([t.empty, t.empty])
    t.empty.fill_(2)


@program(1, 0, f, other=0)
def sum_of_nothing(t):
    t.empty.sum()


# Movement.
@program(1, 2 * n * f, 2 * n * f)
def concatenate(t):
    torch.cat([t.x, t.y])


@program(1, n * f, n * f)
def concatenate_with_nothing(t):
    torch.cat([t.x, t.empty])


@program(1, n * f, 2 * n * f)
def stack_the_same(t):
    torch.stack([t.x, t.x])


@program(2, 2 * n * f, 4 * n * f)
def repeats(t):
    t.x.repeat(2, 1)
    t.x.repeat_interleave(2, 0)


@program(3, 3 * n * f, 2 * n * f + R * (C + 3) * f)
def shifts(t):
    t.x.roll(1, 0)
    t.x.flip(1)
    F.pad(t.x, (1, 2))


@program(1, TAKEN * (C * f + i64), TAKEN * C * f)
def integer_index(t):
    t.x[t.index]


@program(1, TAKEN * (C * f + i64), TAKEN * C * f)
def index_select(t):
    t.x.index_select(0, t.index)


@program(1, 2 * R * (f + i64), 2 * R * f)
def gather(t):
    t.x.gather(1, t.columns)


@program(1, TAKEN * (i64 + f), TAKEN * f)  # the index serves twice and is read once
def pairs_of_indices(t):
    t.square[t.index, t.index]


@program(1, TAKEN * (WIDE * f + i64), TAKEN * WIDE * f)
def embedding(t):
    F.embedding(t.index, t.table)


@program(1, TAKEN * (i64 + C * f), TAKEN * C * f)
def put_rows(t):
    t.x[t.index] = t.y[:TAKEN]


@program(1, TAKEN * i64 + f, TAKEN * C * f)
def put_a_number(t):
    t.x[t.index] = t.one


@program(1, TAKEN * (i64 + 2 * C * f), TAKEN * C * f)
def put_and_add(t):
    t.x.index_put_((t.index,), t.y[:TAKEN], accumulate=True)


@program(2, 2 * R * i64 + 2 * R * f + 2 * R * (i64 + 2 * f), 2 * R * f * 2)
def scatters(t):
    t.out.scatter_(1, t.columns, t.x)
    t.out.scatter_add_(1, t.columns, t.x)


@program(3, TAKEN * (i64 + 2 * C * f) + TAKEN * (i64 + C * f) + TAKEN * i64, 3 * TAKEN * C * f)
def by_rows(t):
    t.x.index_add_(0, t.index, t.y[:TAKEN])
    t.x.index_copy_(0, t.index, t.y[:TAKEN])
    t.x.index_fill_(0, t.index, 1.0)


@program(1, n * (f + i1), n * f, other=n)
def masked_fill(t):
    t.x.masked_fill(t.mask, 0.0)


@program(1, n * (f + i1), n * f, other=n)
def masked_fill_in_place(t):
    t.x.masked_fill_(t.mask, 0.0)


@program(1, n * (2 * f + i1), n * f, other=n)
def where(t):
    torch.where(t.mask, t.x, t.y)


@program(2, n * (f + i1) + f, n * f + f, other=n)
def where_with_a_number(t):
    torch.where(t.mask, t.x, 0.0)  # the number becomes a tensor first: a fill of one element


@program(1, n // 3 * f + n * i1, n // 3 * f, syncs=1)
def boolean_index(t):
    t.x[t.mask]


@program(1, n * i1 + n // 3 * f, n // 3 * f, syncs=1)
def put_through_a_mask(t):
    t.x[t.mask] = t.y.view(-1)[: n // 3]


@program(1, n * (f + i1) + f, n * f, syncs=0)
def number_through_a_mask(t):
    t.x[t.mask] = 1.0


@program(1, n * i1, n // 3 * 2 * i64, syncs=1)
def nonzero(t):
    t.mask.nonzero()


@program(2, 2 * n * f, 2 * n * f)
def triangles(t):
    t.x.tril()
    t.x.triu(1)


# Reductions and normalisation.
@program(1, n * f, f, other=n)
def total(t):
    t.x.sum()


@program(2, 2 * n * f, (R + C) * f, other=2 * n)
def sums_by_row_and_column(t):
    t.x.sum(1)
    t.x.mean(0)


@program(2, 2 * n * f, R * (f + i64) + R * i64, other=2 * n)
def largest(t):
    t.x.max(1)
    t.x.argmax(1)


@program(1, n * f, n * f, other=n)
def running_sum(t):
    t.x.cumsum(1)


@program(2, 2 * n * f, (1 + R) * f, other=4 * n + 2 * n)
def spread(t):
    t.x.std()
    torch.linalg.vector_norm(t.x, dim=1)


@program(2, 2 * n * f, R * 2 * (f + i64) + n * (f + i64))
def in_order(t):
    t.x.topk(2, dim=1)
    t.x.sort(dim=1)


pixels, pooled = 2 * 3 * 8 * 9, 2 * 3 * 4 * 4


# the backward pass reads gradients and indices, not the image
@program(
    2,
    pixels * f + pooled * (f + i64),
    pooled * (f + i64) + pixels * f,
    other=pixels + pooled,
    grad=True,
)
def max_pool(t):
    F.max_pool2d(t.image, 2).backward(t.pooled)


@program(1, n * f, n * f, other=5 * n)
def softmax(t):
    t.x.softmax(-1)


@program(1, n * f, n * f, other=5 * n)
def log_softmax(t):
    t.x.log_softmax(-1)


# sum's backward expands a one (written once); softmax's reads it and the output.
@program(4, (n + n + 1 + n) * f, (n + 1 + 1 + n) * f, other=5 * n + n + 4 * n, grad=True)
def softmax_backward(t):
    t.xg.softmax(-1).sum().backward()


@program(1, (n + 2 * C) * f, (n + 2 * R) * f, other=7 * n)
def layer_norm(t):
    F.layer_norm(t.xg, (C,), t.gain, t.bias)


@program(1, n * f, (n + 2 * R) * f, other=5 * n)
def layer_norm_alone(t):
    F.layer_norm(t.x, (C,))


# backward reads gradient, input, both statistics and the weight; writes three gradients
@program(1, (n + n + 2 * R + C) * f, (n + 2 * C) * f, other=13 * n, grad=True, part=True)
def layer_norm_backward(t):
    out = F.layer_norm(t.xg, (C,), t.gain, t.bias)
    return lambda: out.backward(t.y)


# log_softmax, then one element a row with its label; the loss and the number of labels are written
@program(2, n * f + R * (f + i64), n * f + 2 * f, other=5 * n + R)
def cross_entropy(t):
    F.cross_entropy(t.x, t.labels)


@program(
    5,
    # the fill of the one reads nothing; nll_loss's backward reads gradient, labels, count
    n * f + R * (f + i64) + 0 + (2 * f + R * i64) + 2 * n * f,
    n * f + 2 * f + f + n * f + n * f,
    other=5 * n + R + n + 4 * n,
    grad=True,
)
def cross_entropy_backward(t):
    F.cross_entropy(t.xg, t.labels).backward()


@program(1, 2 * n * f, f, other=3 * n)
def mse_loss(t):
    F.mse_loss(t.x, t.y)


@program(1, TAKEN * (WIDE * f + i64), ROWS * WIDE * f, grad=True, part=True)
def embedding_backward(t):
    out = F.embedding(t.index, t.table)
    grad = torch.ones_like(out)
    return lambda: out.backward(grad)


@program(2, n * f + 2 * n * f, 2 * n * f, other=2 * n, grad=True)
def gelu_backward(t):
    F.gelu(t.xg).backward(t.y)


@program(2, n * f + 2 * n * f, 2 * n * f, other=2 * n, grad=True)
def silu_backward(t):
    F.silu(t.xg).backward(t.y)


@program(1, 3 * C * f, n * f, grad=True, part=True)
def slice_backward(t):
    out, grad = t.xg[1:4], t.y[:3]
    return lambda: out.backward(grad)


# The second backward pass adds to the gradient in place.
@program(2, (2 + 2) * n * f, 2 * n * f, other=2 * n, grad=True, part=True)
def gradients_accumulate(t):
    (t.xg * t.y).backward(torch.ones_like(t.y))
    out, grad = t.xg * t.y, torch.ones_like(t.y)
    return lambda: out.backward(grad)


# Contractions: 2 FLOPs for each multiply-add.
@program(1, (R * C + C * H) * f, R * H * f, flops=2 * R * C * H)
def matmul(t):
    t.x @ t.w.t()


@program(1, R * C * f, R * R * f, flops=2 * R * C * R)
def matmul_with_itself(t):
    t.x @ t.x.t()


@program(1, (R * C + H * C + H) * f, R * H * f, flops=2 * R * C * H)
def linear(t):
    F.linear(t.x, t.w, t.b)


# beta = 0: what is added to is not read
@program(1, (R * C + H * C) * f, R * H * f, flops=2 * R * C * H)
def addmm_of_nothing(t):
    torch.addmm(t.b, t.x, t.w.t(), beta=0)


@program(1, (12 * C + H * C + H) * f, 12 * H * f, flops=2 * 12 * C * H)
def linear_of_three_dimensions(t):
    F.linear(t.long, t.w, t.b)


@program(1, 2 * (5 * 4 + 4 * 7) * f, 2 * 5 * 7 * f, flops=2 * 2 * 5 * 4 * 7)
def batched_matmul(t):
    t.q @ t.k.mT


@program(1, 2 * (5 * 4 + 4 * 7) * f, 2 * 5 * 7 * f, flops=2 * 2 * 5 * 4 * 7)
def einsum(t):
    torch.einsum("bid,bjd->bij", t.q, t.k)


@program(2, (R * C + C) * f + 2 * C * f, (R + 1) * f, flops=2 * R * C + 2 * C)
def vectors(t):
    t.x @ t.row
    t.row @ t.y[0]


@program(1, 2 * C * f, C * C * f, other=C * C)
def outer_product(t):
    torch.outer(t.row, t.x[0])


conv_out = 2 * 4 * 6 * 7
conv_flops = 2 * conv_out * 3 * 3 * 3


@program(1, (2 * 3 * 8 * 9 + 4 * 27 + 4) * f, conv_out * f, flops=conv_flops)
def convolution(t):
    F.conv2d(t.image, t.kernel, t.kernel_bias)


@program(
    1,
    (conv_out + 2 * 3 * 72 + 4 * 27) * f,
    (2 * 3 * 72 + 4 * 27 + 4) * f,
    flops=2 * conv_flops,
    grad=True,
    part=True,
)
def convolution_backward(t):
    out = F.conv2d(t.image, t.kernel, t.kernel_bias)
    grad = torch.ones_like(out)
    return lambda: out.backward(grad)


# The image needs no gradient: the weight is not read, and one of the two contractions falls away.
@program(1, (conv_out + 2 * 3 * 72) * f, (4 * 27 + 4) * f, flops=conv_flops, grad=True, part=True)
def convolution_backward_of_weights(t):
    out = F.conv2d(t.image.detach(), t.kernel, t.kernel_bias)
    grad = torch.ones_like(out)
    return lambda: out.backward(grad)


def _mlp_forward(batch, a, b, c):
    "ops, read, written, flops, other of linear(a, b), relu, linear(b, c), as by hand"
    read = (batch * a + a * b + b) + batch * b + (batch * b + b * c + c)
    written = 2 * batch * b + batch * c
    return 3, read * f, written * f, 2 * batch * (a * b + b * c), batch * b


ops, read, written, flops, other = _mlp_forward(R, C, H, 3)


@program(ops, read, written, flops=flops, other=other, part=True)
def mlp_forward(t):
    net = _mlp(t)
    return lambda: net(t.x)


# backward from a given gradient [R, 3]: two products and a bias sum at the top; relu's; one product and a
# bias sum at the bottom, since the input needs no gradient
@program(
    6,
    ((R * 3 + 3 * H) + (R * 3 + R * H) + R * 3 + 2 * R * H + (R * H + R * C) + R * H) * f,
    (R * H + 3 * H + 3 + R * H + H * C + H) * f,
    flops=2 * R * (3 * H + 3 * H + H * C),
    other=R * 3 + R * H + R * H,
    grad=True,
    part=True,
)
def mlp_backward(t):
    out = _mlp(t)(t.x)
    grad = torch.ones_like(out)
    return lambda: out.backward(grad)


def _mlp(t):
    net = nn.Sequential(nn.Linear(C, H), nn.ReLU(), nn.Linear(H, 3)).to(t.x.device)
    for p in net.parameters():
        nn.init.constant_(p, 0.1)
    return net


# q [2, 5, 4], k [2, 7, 4], v [2, 7, 3]
s = 2 * 5 * 7  # scores
attention_forward = {
    "read": (2 * 5 * 4 + 2 * 7 * 4) + s + s + (s + 2 * 7 * 3),
    "written": s + s + s + 2 * 5 * 3,
    "flops": 2 * s * 4 + 2 * s * 3,
    "other": s + 5 * s,
}


@program(
    4,
    attention_forward["read"] * f,
    attention_forward["written"] * f,
    flops=attention_forward["flops"],
    other=attention_forward["other"],
)
def attention(t):
    _attention(t)


def _attention(t):
    return (t.q @ t.k.mT / math.sqrt(4)).softmax(-1) @ t.v


# dP = g v', dV = P' g; softmax's; the division's; dQ = dS k, dK' = q' dS, which is copied to the layout of k
@program(
    7,
    ((30 + 42) + (s + 30) + 2 * s + s + (s + 2 * 7 * 4) + (2 * 5 * 4 + s) + 2 * 7 * 4) * f,
    (s + 42 + s + s + 2 * 5 * 4 + 2 * 2 * 7 * 4) * f,
    flops=2 * attention_forward["flops"],
    other=4 * s + s,
    grad=True,
    part=True,
)
def attention_backward(t):
    out = _attention(t)
    grad = torch.ones_like(out)
    return lambda: out.backward(grad)


# Optimizers, one parameter of n elements; the step counter lives on the CPU and is not counted.
def _stepper(make):
    def run(t):
        p = nn.Parameter(t.x)
        p.grad = t.y
        optimizer = make([p])
        optimizer.step()
        return optimizer.step

    return run


PROGRAMS["sgd"] = Program(
    _stepper(lambda p: torch.optim.SGD(p, 0.1, foreach=False)),
    1,
    2 * n * f,
    n * f,
    other=n,
    grad=True,
    part=True,
)
# momentum: buffer *= m; buffer += gradient; parameter -= lr * buffer
PROGRAMS["sgd_momentum"] = Program(
    _stepper(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=False)),
    3, (1 + 2 + 2) * n * f, 3 * n * f, other=3 * n, grad=True, part=True,
)  # fmt: skip
# AdamW: decay p; lerp m, g; v *= b; v += g g; sqrt v; / correction; += eps; p += m / d
PROGRAMS["adamw"] = Program(
    _stepper(lambda p: torch.optim.AdamW(p, 0.1, foreach=False)),
    8, (1 + 2 + 1 + 2 + 1 + 1 + 1 + 3) * n * f, 8 * n * f, other=8 * n, grad=True, part=True,
)  # fmt: skip


def prepare(p, device="cpu"):
    "The function to count for program `p`, on fresh tensors."
    t = inputs(device)
    return p.run(t) if p.part else lambda: p.run(t)

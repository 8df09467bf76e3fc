"""Cross-entropy of logits and class numbers, whose gradient overwrites the logits.

Logits of a language model are the largest tensor of its step: 8,192 tokens by 128,000 classes in bfloat16
are 2.1 GB. The formula in torch keeps log-probabilities of that size and makes a gradient of that size. Here
the forward pass reads the logits once and keeps one number a row, the logarithm of the sum of exponentials;
the backward pass reads them again, makes the gradient from that number and writes it where the logits were.
Autograd is told that the logits are gone: whoever else saved them gets torch's error about in-place changes.
"""

import torch
import triton
import triton.language as tl

from course_lib.kernels import interpret  # noqa: F401 (mends the interpreter)


@triton.jit
def forward_kernel(
    logits_ptr, target_ptr, loss_ptr, lse_ptr, columns, row_stride, column_stride, target_stride, ignore,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    high = tl.full([], -float("inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    for start in range(0, columns, BLOCK):
        c = start + tl.arange(0, BLOCK).to(tl.int64)
        x = tl.load(logits_ptr + c * column_stride, mask=c < columns, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(high, tl.max(x, axis=0))
        # Nothing but -inf so far: -inf - -inf would be NaN.
        base = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp(high - base) + tl.sum(tl.exp(x - base), axis=0)
        high = higher
    lse = high + tl.log(total)
    tl.store(lse_ptr + row, lse)
    target = tl.load(target_ptr + row * target_stride).to(tl.int64)
    known = (target >= 0) & (target < columns)
    right = tl.load(logits_ptr + target * column_stride, mask=known, other=float("nan")).to(tl.float32)
    tl.store(loss_ptr + row, tl.where(target == ignore, 0.0, lse - right))


@triton.jit
def backward_kernel(
    logits_ptr, grad_ptr, target_ptr, lse_ptr, scale_ptr, columns, row_stride, column_stride,
    grad_row, grad_column, target_stride, scale_stride, ignore, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    at = logits_ptr + row * row_stride + c * column_stride
    x = tl.load(at, mask=c < columns, other=0.0).to(tl.float32)
    target = tl.load(target_ptr + row * target_stride).to(tl.int64)
    scale = tl.load(scale_ptr + row * scale_stride)
    probability = tl.exp(x - tl.load(lse_ptr + row))
    grad = (probability - tl.where(c == target, 1.0, 0.0)) * scale
    grad = tl.where(target == ignore, 0.0, grad)
    tl.store(grad_ptr + row * grad_row + c * grad_column, grad, mask=c < columns)


class CrossEntropy(torch.autograd.Function):
    "One loss a row, for autograd."

    @staticmethod
    def forward(ctx, logits, target, ignore_index, inplace, block):
        rows, columns = logits.shape
        loss = torch.empty(rows, dtype=torch.float32, device=logits.device)
        lse = torch.empty_like(loss)
        if rows:
            forward_kernel[(rows,)](
                logits, target, loss, lse, columns, *logits.stride(), target.stride(0), ignore_index,
                BLOCK=block, num_warps=8,
            )  # fmt: skip
        ctx.save_for_backward(logits, target, lse)
        ctx.settings = ignore_index, inplace, block
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, scale):
        logits, target, lse = ctx.saved_tensors
        ignore_index, inplace, block = ctx.settings
        grad = logits.detach() if inplace else torch.empty_like(logits, memory_format=torch.contiguous_format)
        rows, columns = logits.shape
        if rows:
            backward_kernel[(rows, triton.cdiv(columns, block))](
                logits, grad, target, lse, scale, columns, *logits.stride(), *grad.stride(), target.stride(0),
                scale.stride(0), ignore_index, BLOCK=block, num_warps=8,
            )  # fmt: skip
        if inplace:
            torch.autograd.graph.increment_version(logits)
        return grad, None, None, None, None


def cross_entropy(logits, target, *, ignore_index=-100, reduction="mean", inplace=True, block=8192):
    """Cross-entropy of logits [rows, classes] and class numbers [rows]; the loss is float32.

    logits     float32, float16 or bfloat16, any strides
    target     int64 or int32; rows whose target is `ignore_index` count nowhere. A class that doesn't exist
               makes the loss NaN: to raise would mean to wait for the GPU.
    reduction  "mean" over the rows that count, "sum", or "none" for one loss a row
    inplace    the backward pass writes the gradient over the logits, which are lost. They may be no leaf,
               nor an expanded tensor, whose rows share memory. False keeps them.
    block      classes taken at a time; 8,192 with 8 warps were the fastest of 12 pairs on an H200

    Source of the one pass: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
    """
    block = min(block, triton.next_power_of_2(logits.shape[1]))
    loss = CrossEntropy.apply(logits, target, ignore_index, inplace, block)
    if reduction == "none":
        return loss
    return loss.sum() / (target != ignore_index).sum() if reduction == "mean" else loss.sum()


def intensity(rows, classes, dtype):
    "FLOPs per byte of both passes: eight an element, read twice and written; a target, loss and sum a row."
    return 8 * rows * classes / (3 * rows * classes * dtype.itemsize + 2 * rows * (8 + 4 + 4))

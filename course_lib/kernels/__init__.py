"""Kernels that lesson triton times beside the learner's, a file a kernel, and what runs and watches kernels.

    softmax.softmax(x)                            over the last dimension, each element read once
    rmsnorm.rmsnorm(x, weight, eps=1e-6)          with its backward: dx, and dw by partial sums
    matmul.matmul(a, b)                           a @ b, tiles in groups

    watch.watch()                                 counts loads and stores, finds races and stray addresses
    compiled.refusal(kernel, arguments)           what the compiler for a GPU refuses; needs no GPU
    compiled.resources(kernel, arguments)         registers and shared memory of a kernel; needs no GPU
    replay.time_all(contenders, make)             times kernels alone, without the Python that launches them

A kernel's file has its launcher, which doesn't check its arguments: Triton's and PyTorch's errors do.
Importing this package chooses Triton's interpreter where there is no GPU; Triton itself is imported by the
files.
"""

import importlib.util
import os

import torch


class KernelError(ValueError):
    "Something that a kernel can't do, in one sentence."


if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def interpreted():
    "Do kernels run in Triton's interpreter in this process?"
    return os.environ.get("TRITON_INTERPRET") == "1"


def require():
    "Raise `KernelError` where Triton isn't installed."
    if importlib.util.find_spec("triton") is None:
        raise KernelError(
            "Triton isn't installed here (it has builds for Linux on x86-64): "
            "run this lesson on such a machine, with or without a GPU"
        )

"""Kernels in Triton, one file a kernel, on a GPU or in Triton's interpreter on the CPU.

Each file has the kernel, its launcher, its reference in torch, `bytes_moved(...)` (each input read once,
each output written once) and `intensity(...)` (FLOPs per byte, its place on the roofline):

    add.add(x, y)                                 x + y, any shapes that broadcast
    softmax.softmax(x)                            over the last dimension, one pass; softmax.three_passes(x)
    rmsnorm.rmsnorm(x, weight, eps=1e-6)          with its backward: dx, and dw by partial sums
    matmul.matmul(a, b)                           a @ b, tiles in groups; matmul.in_rows(a, b): without groups
    xent.cross_entropy(logits, target)            the gradient overwrites the logits

    softmax.softmax_reference(x), rmsnorm.rmsnorm_reference(…), …

Every launcher takes its block sizes as keywords, whose defaults suit the shape, and raises a `KernelError`
of one sentence for what it can't do. `replay.time_all(contenders, make)` times kernels alone, all alike,
without the Python that launches them; `tune.search(launch, space)` times a space of sizes so, and
`access.watch()` counts what a kernel loads and stores, on any machine:

    with access.watch() as w:
        softmax.softmax(x)
    w.loads["x_ptr"].elements, w.loads["x_ptr"].bytes   # lanes that read, and their bytes
    w.loads["x_ptr"].most, w.loads["x_ptr"].fewest      # how often one element was read
    w.stores["out_ptr"]                                 # the same, of stores
    w.masked, w.lanes                                   # lanes switched off, of how many
    w.grid("x_ptr")                                     # [programs, lanes]: 1 on, 0 masked, -1 no lane
    w.races, w.outside                                  # sentences; empty lists for a kernel that is right

Importing this package chooses the interpreter where there is no GPU: Triton reads TRITON_INTERPRET when it
is imported, and never again. That is all that happens here; the files import Triton, this one does not.
"""

import importlib.util
import os

import torch


class KernelError(ValueError):
    "Something that a kernel can't do, in one sentence: what was given, what it takes, what to do."


if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def interpreted():
    "Do kernels run in Triton's interpreter here (a process without a GPU, or inside `access.watch`)?"
    return os.environ.get("TRITON_INTERPRET") == "1" or bool(_watches)


def require():
    "Raise `KernelError` where Triton isn't installed."
    if importlib.util.find_spec("triton") is None:
        raise KernelError(
            "Triton isn't installed here (it has builds for Linux on x86-64): "
            "run this lesson on such a machine, with or without a GPU"
        )


_watches = []  # the open `access.watch`es, the innermost last

"What lesson triton keeps beside kernels: the places of a launch, Inductor's kernel."

import os
import re
import warnings

import torch

from course_lib import recorded, show

# Shapes (M, N, K) of the comparison with cuBLAS; sizes of the ragged ones are no multiples of 16.
ALIGNED = [
    (8192, 8192, 8192),
    (4096, 4096, 4096),
    (16384, 4096, 1024),
    (2048, 8192, 4096),
    (1024, 1024, 16384),
]
RAGGED = [(8000, 8200, 8192), (4095, 4097, 4093), (5000, 3000, 7000), (2050, 6146, 4100)]
RAGGED += [(16385, 1000, 4096)]


def said(guess, value, unit):
    "A measured value with its unit, and the guess, where there is one."
    return f"{show.number(float(value))} {unit}" + (f" (you said {guess})" if guess is not None else "")


def shares_of_copy(copy, softmax):
    "{machine: % of a copy's rate} of PyTorch's softmax: of this machine and of the recorded one."
    shares = {"this machine": 100 * softmax / copy}
    theirs, copied = (recorded.get(f"triton.{name}_tbps") for name in ("softmax_eager", "copy"))
    if theirs and copied and "COURSE_RECORDING" not in os.environ:  # else it is this run that is recorded
        shares[f"{theirs['machine']}, recorded"] = 100 * theirs["value"] / copied["value"]
    return shares


def places(n=19, block=8):
    "A launch over `n` elements in blocks of `block`: its programs, and which part of their places is idle."
    programs = -(-n // block)
    return {"n": n, "block": block, "programs": programs, "idle": 1 - n / (programs * block)}


def inductor_kernel(fn, *args):
    "The first Triton kernel that torch.compile writes for `fn(*args)`, as text."
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    with warnings.catch_warnings(), config.patch(force_disable_caches=True):  # a cached kernel is not written
        warnings.simplefilter("ignore")  # of that choice
        _, codes = run_and_get_code(torch.compile(fn), *args)
    return kernel_in("\n".join(codes))


def kernel_in(code):
    "The first Triton kernel in the code that Inductor wrote; all of it where there is none."
    found = re.search(r"^def triton_\w+\(.*?(?=^\'\'\')", code, re.DOTALL | re.MULTILINE)
    return found[0].rstrip() if found else code

"""What makes Python wait for a GPU, found on a machine that has none.

`find` names the lines. `WAITS` and `GOES_ON` are lines of code that do make Python wait and that don't, and
three witnesses say so: `finder_waits`, `fake_waits` and, where there is a GPU, `driver_waits`.
"""

import math
import warnings
from collections import Counter
from typing import NamedTuple

import torch

from course_lib import meter
from course_lib.syncs.loops import pool, train
from course_lib.syncs.nan import CopyWatch, NanWatch
from course_lib.syncs.slow import SlowSteps
from course_lib.syncs.trace import Gap, TraceError, largest_gap

__all__ = [
    "GOES_ON", "WAITS", "CopyWatch", "Gap", "NanWatch", "SlowSteps", "TraceError", "Wait", "driver_waits",
    "fake_waits", "find", "finder_waits", "largest_gap", "pool", "report", "train",
]  # fmt: skip

# --- Finding what waits -------------------------------------------------------------


class Wait(NamedTuple):
    'A line on which Python waits: "file:line" or "cell:line", how often in the run, and its code.'

    where: str
    times: int
    code: str


def places(counts):
    "Where and in which code Python waited, as a list with an element for each sync of meter's counts."
    return list(zip(counts.where, counts.code, strict=True))


def find(fn, *args, **kwargs):
    """Call `fn` once and name every line on which Python would wait for a GPU: `Wait`s, in the order met.

    Needs no GPU, for it counts what the program asks (`meter.count`) and not what a driver does. It sees what
    leaves the GPU and what has a size that depends on values: item, float, if, print, tolist, cpu, nonzero,
    a boolean mask as an index, unique, equal, …, in the backward pass too. It doesn't see other threads,
    compiled code and torch.cuda.synchronize, nor, on a machine without a GPU, copies to it.
    """
    with meter.count(portable=False) as counts:
        fn(*args, **kwargs)
    return [Wait(where, n, code) for (where, code), n in Counter(places(counts)).items()]


def report(found):
    "The result of `find` as text in columns."
    if not found:
        return "nothing makes Python wait"
    wide = max(len(w.where) for w in found)
    lines = [f"{w.where:{wide}}  {w.times:4}x  {w.code}" for w in found]
    n = sum(w.times for w in found)
    return "\n".join([*lines, f"{n} sync{'s' * (n != 1)} on {len(found)} line{'s' * (len(found) != 1)}"])


# One line each; x is [4, 5], index [4] (int64), mask [4, 5] (bool), p a parameter with a gradient.
WAITS = [
    "x.sum().item()",
    "float(x[0, 0])",
    "f'{x.sum():.2f}'",
    "str(x)",
    "x.tolist()",
    "x.cpu()",
    "x.to('cpu')",
    "1 if x.sum() > 0 else 2",
    "assert x.isfinite().all()",
    "3 in index",
    "max(x[0, 0], x[0, 1])",
    "math.sqrt(x[0, 0] ** 2)",
    "range(index[0])",
    "x[:index[3]]",
    "x[index[1]]",
    "x.nonzero()",
    "torch.where(mask)",
    "x[mask]",
    "y = x.clone(); y[mask] = x[0, 0]",
    "x.masked_select(mask)",
    "x.unique()",
    "torch.bincount(index)",
    "x.repeat_interleave(index, 0)",
    "torch.equal(x, x + 1)",
    "torch.allclose(x, x + 1)",
    "torch.tensor([x[0, 0], x[0, 1]])",
    "torch.linalg.inv(x[:, :4])",
    "torch.nn.utils.clip_grad_norm_([p], 1.0, error_if_nonfinite=True)",
]
GOES_ON = [
    "x + 1",
    "x.shape[0] * len(x) + x.numel()",
    "x.sum() > 0",
    "x.isnan().any()",
    "x.detach()",
    "sum(x[0])",
    "[row + 1 for row in x]",
    "x.argmax()",
    "x[index]",
    "x[index[1:2]]",
    "torch.where(mask, x, 0.0)",
    "x.masked_fill(mask, 0.0)",
    "y = x.clone(); y[mask] = 1.0",
    "x.repeat_interleave(index, 0, output_size=5)",
    "torch.maximum(x[0, 0], x[0, 1])",
    "torch.stack([x[0, 0], x[0, 1]])",
    "x.to(torch.float64)",
    "x.to(x.device)",
    "x.to('cpu', non_blocking=True)",
    "torch.zeros(3, device=x.device)",
    "x.cumsum(0)",
    "torch.nn.utils.clip_grad_norm_([p], 1.0)",
]


def _names(device):
    x = torch.randn(4, 5, device=device)
    index = torch.tensor([2, 1, 0, 2], device=device)
    mask = torch.arange(20, device=device).view(4, 5) % 3 == 0
    p = torch.nn.Parameter(torch.ones(3, device=device))
    p.grad = torch.ones(3, device=device)
    return {"torch": torch, "math": math, "x": x, "index": index, "mask": mask, "p": p}


def finder_waits(code, device="cpu"):
    "Does `find` say that a line of `WAITS` or `GOES_ON` makes Python wait?"
    names = _names(device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return bool(find(exec, compile(code, "line", "exec"), names))


def fake_waits(code):
    """The same by a witness that knows nothing of `find`: fake tensors, "on cuda" where there is no GPU.

    They have shapes and no values, so that whatever needs a value must fail. None where fakes can't tell: a
    line whose result has a known shape may wait all the same, and a fake can't be printed or copied.
    """
    from torch._subclasses import fake_tensor as fake

    # Their results' shapes are known without waiting, or they are Python calls that fakes don't take.
    if any(word in code for word in ("str(", "f'", "tolist", "cpu", "y[mask] = x", "torch.tensor", "linalg",
                                     "allclose", "error_if")):  # fmt: skip
        return None
    with fake.FakeTensorMode():
        names = _names("cuda")
        try:
            exec(compile(code, "line", "exec"), names)
        except (fake.DataDependentOutputException, fake.DynamicOutputShapeException):
            return True
    return False


def driver_waits(code):
    "The same by the GPU's driver: torch.cuda.set_sync_debug_mode makes a wait an error."
    names = _names("cuda")
    compiled = compile(code, "line", "exec")
    exec(compiled, dict(names))  # the first call may set up a library, and wait for that
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        exec(compiled, dict(names))
    except RuntimeError as e:
        if "synchroniz" not in str(e):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False

"What lesson scale keeps outside its cells: torchrun from a notebook, models and machines, clocks on GPUs."

import contextlib
import ctypes
import functools
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from course_lib import ranks

ROOT = Path(__file__).resolve().parents[2]


class Run(NamedTuple):
    "A run under torchrun: what rank 0 returned, its lines `start N …`, seconds, how often it was started."

    result: object
    lines: list
    seconds: float
    starts: int

    def losses(self):
        "{words: (first step, losses)} of each start, from lines `start N loss HEX`; prints other lines."
        found = {}
        for _, start, kind, value in (line.split(maxsplit=3) for line in self.lines):
            if kind == "from":
                first = int(value.split()[1])
                found[start] = f"start {int(start) + 1}, from step {first}", (first, [])
            elif kind == "loss":
                found[start][1][1].append(float.fromhex(value))
            else:
                print(f"start {int(start) + 1}: {kind} {value}")
        return dict(found.values())


def torchrun(n, fn, *args, restarts=0, timeout=240.0):
    """Call `fn(*args)` on `n` ranks that torchrun starts, and starts again up to `restarts` times.

    It returns a Run. Raises RuntimeError, with the last lines, where torchrun gives up or `timeout` seconds
    pass. No process is left, also where the notebook is killed (Linux).
    """
    with tempfile.TemporaryDirectory(prefix="course-torchrun-") as folder:
        path = Path(folder, "function")
        path.write_bytes(ranks._pack((fn, args)))  # with their cells' lines
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        command += ["--nproc-per-node", str(n), "--max-restarts", str(restarts), "--monitor-interval", "0.05"]
        env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        begin, out = time.perf_counter(), Path(folder, "out")
        with open(out, "wb") as file:
            process = subprocess.Popen([*command, "-m", "course_lib.scale.launch", str(path)], env=env,
                                       stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
                                       preexec_fn=_end_with_parent)  # fmt: skip
            try:
                code = process.wait(timeout)
            except subprocess.TimeoutExpired:
                code = f"no end after {timeout:g} s"
            finally:
                _end(process)
        seconds, text = time.perf_counter() - begin, out.read_text(errors="replace")
        lines = re.findall(r"start \d+ .+", text)  # torchrun's own log may stand before one
        if code:
            raise RuntimeError(f"torchrun: {code}\n" + "\n".join(_last(text)))
        result = torch.load(f"{path}.result", weights_only=False)
        starts = 1 + max((int(line.split()[1]) for line in lines), default=0)
        return Run(result, lines, seconds, starts)


def _end_with_parent():
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _end(process):
    "End torchrun and its ranks: it ends them itself when asked, and the system does when it is killed."
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _last(text, n=15):
    "The last lines that are not torchrun's own log."
    return [line for line in text.splitlines() if line.strip() and not re.match(r"[WEI]\d{4} ", line)][-n:]


class Model(NamedTuple):
    """Equal transformer layers and the batch of a step.

    `kept`: bytes of activations that a layer keeps for a token until its backward. `state`: bytes of the
    optimizer's state for a parameter; weights and gradients have 2 each.
    """

    layers: int
    params: float  # of a layer
    width: int
    kv: int  # width of the keys, and of the values
    heads: int
    length: int  # tokens in a sequence
    sequences: int  # in the batch of a step
    kept: float
    state: int = 12


class Layout(NamedTuple):
    "GPUs that share each direction; microbatches; ZeRO's stage; chunks of layers for each pipeline stage."

    data: int = 1
    tensor: int = 1
    pipe: int = 1
    context: int = 1
    micro: int = 1
    stage: int = 0
    chunks: int = 1


class Machine(NamedTuple):
    "GPUs, of which `host` share a fast network; bytes, FLOP/s and bytes/s of each: near, far, own memory."

    gpus: int
    host: int
    memory: float
    flops: float
    near: float
    far: float
    hbm: float

    def link(self, reach):
        "Bytes/s that a GPU sends among `reach` neighbours, numbered by tensor, context, pipe, data."
        return self.near if reach <= self.host else self.far


def merge(out_a, lse_a, out_b, lse_b):
    "(out, lse) of attention over the keys of two parts, as written in lesson attention; a part may be empty."
    lse = torch.logaddexp(lse_a, lse_b)
    base = torch.where(lse == -torch.inf, 0.0, lse)
    a, b = (lse_a - base).exp(), (lse_b - base).exp()
    return a[..., None] * out_a + b[..., None] * out_b, lse


class Wire:
    """Sends round a ring by NCCL, which wants a send and its receive in one call: `isend` starts both.

    `recv` waits for what arrives. Raises RuntimeError where it comes before `isend`.
    """

    get_rank, get_world_size = staticmethod(dist.get_rank), staticmethod(dist.get_world_size)

    def __init__(self):
        self.started = []  # (works, what leaves, what arrives), in the order of the sends

    def isend(self, tensor, dst):
        tensor, arrives = tensor.contiguous(), torch.empty_like(tensor, memory_format=torch.contiguous_format)
        src = (2 * dist.get_rank() - dst) % dist.get_world_size()
        both = [dist.P2POp(dist.isend, tensor, dst), dist.P2POp(dist.irecv, arrives, src)]
        self.started.append((dist.batch_isend_irecv(both), tensor, arrives))
        return self

    def recv(self, tensor, src):
        if not self.started:
            raise RuntimeError("recv before isend: start the send of this round first")
        works, _, arrived = self.started.pop(0)
        for work in works:
            work.wait()
        tensor.copy_(arrived)

    def wait(self):
        "The send has left when the receive is there."


@functools.cache
def two_gpus():
    "Two ranks with a GPU each, for several cells; after `stop` the next call of `run` starts them again."
    return ranks.Group(2, device="cuda", timeout=300)


class Enter(torch.autograd.Function):
    "Passes x; the gradients of all tensor ranks are added up."

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Leave(torch.autograd.Function):
    "Adds up x over the tensor ranks; passes the gradient."

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def top(rows):
    "Where a parabola through log(seconds) and goodput has its top, of rows (seconds, …, goodput, …)."
    best = max(range(len(rows)), key=lambda i: rows[i][2])
    near = torch.tensor([row[:3] for row in rows[max(0, best - 7) : best + 8]], dtype=torch.float64)
    x = near[:, 0].log()
    _, b, c = torch.linalg.lstsq(torch.stack([x**0, x, x**2], 1), near[:, 2:]).solution.flatten().tolist()
    return math.exp(-b / (2 * c))


def expected_share(interval, save, restart, mtbf):
    "Goodput: the expected share of time that is useful work, failures at random. Source: Daly 2006."
    return interval / (mtbf * math.exp(restart / mtbf) * math.expm1((interval + save) / mtbf))


def explore_goodput(gpus=16384, save=60, restart=300):
    """The explorer's data: goodput by minutes between saves, for Llama 3's rate of failures per GPU.

    `save` and `restart` in seconds. 419 interruptions in 54 days on 16,384 GPUs.
    """
    mtbf = 54 * 86400 / 419 * 16384 / gpus
    intervals = [10 * 1.05**k for k in range(170)]
    share = [expected_share(t, save, restart, mtbf) for t in intervals]
    best = max(range(170), key=share.__getitem__)
    return {"gpus": gpus, "mtbf": mtbf, "intervals": intervals, "share": share,
            "best": (intervals[best], share[best]), "young": math.sqrt(2 * save * mtbf)}  # fmt: skip

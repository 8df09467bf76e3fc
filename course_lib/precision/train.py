"""A transformer on the text that every Python ships with, trained in fp32, tf32, fp16, bf16 and fp8.

The arms differ in the arithmetic of matmuls alone: same weights at the start, same batches, same optimizer,
fp32 weights throughout.
"""

import contextlib
import statistics
import sysconfig
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn import functional as F

from course_lib import data, machine, models
from course_lib.precision import fp8 as precision_fp8
from course_lib.precision import nets as precision_nets

ARMS = ("fp32", "tf32", "fp16", "bf16", "fp8")


# --- Text and net -------------------------------------------------------------------


def text(folder=None):
    """The source of Python's standard library as bytes: uint8 tensors (train, valid), every 20th file valid.

    `folder` is where the library lies, by default where this Python has it. DataError where less than a
    megabyte is found.
    """
    folder = Path(folder or sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"))
    parts = {"train": b"", "valid": b""}
    parts["train"] = b"".join(f.read_bytes() for i, f in enumerate(files) if i % 20)
    parts["valid"] = b"".join(f.read_bytes() for i, f in enumerate(files) if i % 20 == 0)
    if sum(map(len, parts.values())) < 1_000_000:
        raise data.DataError(
            f"this Python's standard library lies in {folder} without its source, which the lesson reads as "
            "text: use a Python that ships it, as those of python.org, conda and uv do"
        )
    return tuple(torch.frombuffer(bytearray(p), dtype=torch.uint8) for p in parts.values())


def batches(source, n, length, steps, seed, device):
    "`steps` batches of `n` random windows of `length` bytes: pairs (bytes, the byte after each), int64."
    draw = torch.Generator().manual_seed(seed)
    # All at once: a copy to the GPU at every step would be one more thing to wait for.
    starts = torch.randint(len(source) - length, (steps, n, 1), generator=draw).to(device)
    source, offsets = source.to(device), torch.arange(length + 1, device=device)
    for at in starts:
        window = source[at + offsets].long()
        yield window[:, :-1], window[:, 1:]


class CausalLayer(models.EncoderLayer):
    "An encoder layer in which a position attends to itself and those before it, by torch's fused attention."

    def attend(self, x):
        n, t, width = x.shape
        q, k, v = (
            f(x).view(n, t, self.heads, width // self.heads).transpose(1, 2)
            for f in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(n, t, width))


def byte_model(layers, width, heads, length):
    "A language model of bytes: ids [N, T] to logits [N, T, 256] of the next byte."
    net = models.Encoder(0, width, heads, vocab=256, length=length)
    net.layers.extend(CausalLayer(width, heads) for _ in range(layers))
    return net


# --- Arms ---------------------------------------------------------------------------


def support(arm, device=None):
    "None where the device has the arm's arithmetic, else one sentence: what is lacking, what runs instead."
    device = torch.device(device or machine.device())
    if arm not in ARMS:
        raise ValueError(f"no arm called {arm!r}; choose from {', '.join(ARMS)}")
    gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if gpu else "a CPU"
    if arm == "fp8" and not precision_fp8.has_fp8(device):
        return (
            f"fp8: {name} has no fp8 units; values are rounded to fp8 and multiplied in fp32, so its time "
            "says nothing"
        )
    if arm == "tf32" and not (gpu and torch.cuda.get_device_capability(device) >= (8, 0)):
        return f"tf32: {name} has no tf32 units; left out, for it would be fp32"
    if arm == "bf16" and gpu and torch.cuda.get_device_capability(device) < (8, 0):
        return f"bf16: {name} has no bf16 units; torch emulates it, so its time says nothing"
    if arm == "fp16" and not gpu:
        return "fp16: left out on a CPU, where torch multiplies it many times slower than fp32"
    return None


def runs_here(arm, device=None):
    "Is the arm worth running here? Emulated fp8 and bf16 are, since their losses are right."
    sentence = support(arm, device)
    return sentence is None or "left out" not in sentence


# --- Training in one arm ------------------------------------------------------------


class Sizes(NamedTuple):
    "A net and its training: layers, width, heads; sequences of `length` bytes, `batch` of them; steps; lr."

    layers: int
    width: int
    heads: int
    length: int
    batch: int
    steps: int
    lr: float


def sizes():
    "Sizes that suit this machine: on a GPU wide enough that matmuls take most of an fp32 step."
    return machine.pick(cpu=Sizes(2, 64, 2, 32, 16, 40, 3e-3), gpu=Sizes(2, 2048, 16, 128, 48, 100, 3e-4))


class Run(NamedTuple):
    "Loss of each step, validation loss at the end, seconds a step, peak GPU memory in bytes or None."

    losses: list
    valid: float
    seconds: float
    memory: int | None


@contextlib.contextmanager
def matmul_precision(arm):
    "Within the block fp32 matmuls run in tf32 for the arm of that name, in fp32 for the others."
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if arm == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def autocast(arm, device):
    "The autocast of an arm: fp16, bf16 (for fp8 too: what isn't fp8 is bf16), or none."
    low = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}.get(arm)
    return torch.autocast(torch.device(device).type, dtype=low, enabled=low is not None)


def train(arm, seed, source, sizes, device=None, warm=10):
    """Train `byte_model` in one arm: a `Run`. `source` is `text()`; `seed` gives weights and batches.

    Nothing waits for the GPU between step `warm` and the last, and the seconds are the mean over these steps.
    """
    device = torch.device(device or machine.device())
    support(arm, device)  # refuses an unknown arm before anything is built
    gpu = device.type == "cuda"
    with contextlib.nullcontext() if gpu else precision_nets.one_thread():
        return _train(arm, seed, source, sizes, device, min(warm, sizes.steps - 1))


def _train(arm, seed, source, sizes, device, warm):
    gpu = device.type == "cuda"
    if gpu:
        torch.cuda.empty_cache()
        base = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    torch.manual_seed(seed)
    net = byte_model(sizes.layers, sizes.width, sizes.heads, sizes.length).to(device)
    if arm == "fp8":
        precision_fp8.to_fp8_layers(net, device)
    opt = torch.optim.AdamW(net.parameters(), lr=sizes.lr, fused=gpu)
    scaler = torch.amp.GradScaler(device.type, enabled=arm == "fp16")
    losses = []
    with matmul_precision(arm):
        for i, (x, y) in enumerate(batches(source[0], sizes.batch, sizes.length, sizes.steps, seed, device)):
            if i == warm:
                machine.sync()
                start = time.perf_counter()
            # Warm up over 20 steps, then straight down to nothing.
            opt.param_groups[0]["lr"] = sizes.lr * min((i + 1) / 20, 1 - i / sizes.steps)
            with autocast(arm, device):
                loss = F.cross_entropy(net(x).flatten(0, 1), y.flatten())
            opt.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            losses.append(loss.detach())
        machine.sync()
        seconds = (time.perf_counter() - start) / (sizes.steps - warm)
        memory = torch.cuda.max_memory_allocated(device) - base if gpu else None
        valid = evaluate(arm, net, source[1], sizes, device)
    return Run(torch.stack(losses).tolist(), valid, seconds, memory)


@torch.no_grad()
def evaluate(arm, net, source, sizes, device):
    "Mean loss over 16 batches of the validation text, the same ones for every arm and seed."
    losses = []
    for x, y in batches(source, sizes.batch, sizes.length, 16, 0, device):
        with autocast(arm, device):
            losses.append(F.cross_entropy(net(x).flatten(0, 1), y.flatten()))
    return float(torch.stack(losses).mean())


def gradients(source, sizes, seed=0):
    "The gradients of `byte_model` before its first step in fp32 on the CPU: one flat tensor."
    torch.manual_seed(seed)
    net = byte_model(sizes.layers, sizes.width, sizes.heads, sizes.length)
    x, y = next(batches(source[0], sizes.batch, sizes.length, 1, seed, "cpu"))
    F.cross_entropy(net(x).flatten(0, 1), y.flatten()).backward()
    return torch.cat([p.grad.flatten() for p in net.parameters()])


# --- The verdict --------------------------------------------------------------------


class Verdict(NamedTuple):
    """An arm beside fp32: times faster (median over seeds), mean validation loss, its distances from fp32's.

    `apart` has one number a seed, the arm's loss minus that of fp32 with the same seed; `spread` is how far
    fp32's own losses lie apart over the seeds; `equal` says that no |apart| is above the spread.
    """

    speedup: float
    loss: float
    apart: list
    spread: float
    equal: bool


def verdicts(runs):
    "`Verdict` of each arm from {arm: [Run for each seed]}, fp32 among them, seeds in one order."
    base = runs["fp32"]
    valid = [r.valid for r in base]
    spread = max(valid) - min(valid)
    found = {}
    for arm, own in runs.items():
        apart = [a.valid - b.valid for a, b in zip(own, base, strict=True)]
        faster = statistics.median(r.seconds for r in base) / statistics.median(r.seconds for r in own)
        loss = statistics.fmean(r.valid for r in own)
        # A NaN compares as false, so an arm that broke is not equal.
        found[arm] = Verdict(faster, loss, apart, spread, all(abs(d) <= spread for d in apart))
    return found

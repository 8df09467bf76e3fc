"""A training step by class of operator (contraction, normalisation, element-wise): its time, profiled."""

import contextlib
import os

import torch

from course_lib import machine, models
from course_lib.meter import operators
from course_lib.meter.operators import CLASSES
from course_lib.roofline import Event, Transformer

# BERT-large's encoder on a V100: Ivanov et al., "Data Movement Is All You Need", arXiv 2007.00072, table 1.
PUBLISHED_FLOPS = {"contraction": 99.80, "normalisation": 0.17, "elementwise": 0.03}
PUBLISHED_TIME = {"contraction": 61.0, "normalisation": 25.5, "elementwise": 13.5}


def op_class(name):
    """The class of an operator or kernel by its name: one of CLASSES, or "other".

    Operators ("addmm", "aten::addmm", "aten.addmm.default") go by `operators.op_class`: normalisations are
    softmax, layer norm and every reduction, bias gradients among them. Fused attention is a contraction, for
    its softmax never leaves the kernel. A kernel that Inductor made ("triton_poi_fused_add_3") is a
    normalisation where it reduces or has a softmax or a norm in its name: the element-wise work fused into
    it rides along. Else it is element-wise.
    """
    if name.startswith("triton_"):
        if name.startswith("triton_tem_"):
            return "contraction"
        reduces = name.startswith(("triton_red_", "triton_per_")) or "softmax" in name or "_norm" in name
        return "normalisation" if reduces else "elementwise"
    base = name.removeprefix("aten::").removeprefix("aten.").split(".")[0]
    return "contraction" if "attention" in base else operators.op_class(base)


def by_class(rows):
    'Sum [(name, amount), …] by class: {class: amount}, "other" last.'
    total = dict.fromkeys((*CLASSES, "other"), 0.0)
    for name, amount in rows:
        total[op_class(name)] += amount
    return total


def shares(total):
    """The three classes as percentages that sum to 100; "other" is left out of both.

    ValueError where there is nothing to share.
    """
    whole = sum(total[c] for c in CLASSES)
    if not whole > 0:
        raise ValueError("every class is zero: nothing was counted")
    return {c: 100 * total[c] / whole for c in CLASSES}


def encoder_step(layers=None, batch=None, seq=512, width=1024, heads=16, device=None, compiled=False):
    """A training step of a BERT-large-like encoder, forward and backward: (step, its sizes, tokens).

    Weights and activations are bfloat16 on a GPU and float32 on a CPU; no dropout, no optimizer.
    """
    device = torch.device(device or machine.device())
    if device.type == "cuda":
        # The attention scores kept for the backward pass are most of the memory: 1.5 GB a layer at 32.
        layers, batch = layers or 4, batch or (32 if torch.cuda.mem_get_info()[0] > 20e9 else 4)
    else:
        layers, batch = layers or 1, batch or 1
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    net = models.Encoder(layers, width, heads).to(device, dtype)
    if compiled:
        torch._dynamo.reset()
        for layer in net.layers:
            layer.compile()  # layers share their code, so one compilation serves them all
    x, g = (torch.randn(batch, seq, width, device=device).to(dtype) for _ in range(2))
    x.requires_grad_()  # as it would behind an embedding

    def step():
        net.zero_grad(set_to_none=True)
        x.grad = None
        net(x).backward(g)

    return step, Transformer(layers, width, 4 * width, 0, seq), batch * seq


def profile_rows(fn, runs=None):
    "Profile `fn()` on the device at hand: [(name, seconds for one run), …], the largest first."
    runs = runs or machine.pick(cpu=1, gpu=3)
    return rows_of(_profile(fn, runs).key_averages(), machine.has_gpu(), runs)


def rows_of(averages, gpu, runs=1):
    """The profiler's averages as [(name, seconds for one run), …], the largest first.

    On a CPU an operator's time is its own, without that of those it calls. On a GPU it is the time of the
    kernels that the operator launched; Triton kernels go by their own name, since Inductor launches them
    outside any operator. Kernel time without an operator is one row called "unattributed".
    """
    on_cpu = [e for e in averages if e.device_type == torch.autograd.DeviceType.CPU]
    on_cpu = [e for e in on_cpu if e.key.startswith("aten::")]
    if gpu:
        kernels = _kernels(averages)
        found = [(e.key, e.self_device_time_total) for e in on_cpu]
        found += [(e.key, e.self_device_time_total) for e in kernels if e.key.startswith("triton_")]
        lost = sum(e.self_device_time_total for e in kernels) - sum(t for _, t in found)
        found.append(("unattributed", lost))
    else:
        found = [(e.key, e.self_cpu_time_total) for e in on_cpu]
    rows = [(name, t * 1e-6 / runs) for name, t in found if t > 0]  # from microseconds
    return sorted(rows, key=lambda r: -r[1])


def gpu_events(fn):
    "Profile one call of `fn` on a GPU: its kernels as `Event`s in seconds; by name, matrix kernels compute."
    events = []
    for e in _kernels(_profile(fn, 1).events()):
        kind = "compute" if any(word in e.name.lower() for word in _MATRIX_KERNELS) else "memory"
        start, end = e.time_range.start, e.time_range.end
        events.append(Event(start * 1e-6, (end - start) * 1e-6, "gpu", kind))
    return events


_MATRIX_KERNELS = ("gemm", "nvjet", "cutlass", "xmma", "flash", "fmha")


def _kernels(events):
    on_gpu = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
    # Annotations and waits stand on the GPU's timeline too, and are no work of its own.
    return [e for e in on_gpu if not e.is_user_annotation and not e.key.endswith("Sync")]


def _profile(fn, runs):
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if machine.has_gpu():
        activities.append(ProfilerActivity.CUDA)
    for _ in range(2):
        fn()
    machine.sync()
    with _quiet(), profile(activities=activities, acc_events=True) as prof:
        for _ in range(runs):
            fn()
        machine.sync()
    return prof


@contextlib.contextmanager
def _quiet():
    "Send file descriptor 2 to nowhere: the profiler's C++ code logs dates and process numbers there."
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)

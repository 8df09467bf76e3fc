"What lesson sharding keeps outside its cells: torch.distributed by two names, a virtual clock, bytes."

import contextlib
import gc
import statistics
import time
from typing import NamedTuple

import torch
import torch.distributed as dist

from course_lib import meter


class World:
    "`torch.distributed` for a function of `dist`: the calls of this lesson by names that 2.11 and 2.14 know."

    get_rank, get_world_size = staticmethod(dist.get_rank), staticmethod(dist.get_world_size)

    def all_gather_into_tensor(self, output_tensor, input_tensor, async_op=False):
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in 2.14
        return gather(output_tensor.detach(), input_tensor.detach(), async_op=async_op)

    def reduce_scatter_tensor(self, output, input, async_op=False):
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return scatter(output.detach(), input.detach(), async_op=async_op)


class Span(NamedTuple):
    "From `start` to `end` on a virtual clock, in the row `lane` of a timeline."

    name: str
    start: float
    end: float
    lane: str


class Clock:
    """The `dist` of a simulated rank, with a virtual clock: gathers take turns on a wire, beside computation.

    A gather of n bytes takes n / `rate` seconds of the wire, from its launch or from the end of the gather
    before it. `compute(name, seconds)` lets the rank's own time pass, `now`. `spans` is the timeline.
    """

    def __init__(self, comm, rate):
        self.comm, self.rate = comm, rate
        self.get_rank, self.get_world_size = comm.get_rank, comm.get_world_size
        self.now, self.wire_free, self.spans = 0.0, 0.0, []

    def compute(self, name, seconds):
        self.spans.append(Span(str(name), self.now, self.now + seconds, "compute"))
        self.now += seconds

    def all_gather_into_tensor(self, output_tensor, input_tensor, async_op=False):
        start = max(self.now, self.wire_free)
        self.wire_free = start + output_tensor.nbytes / self.rate
        gathers = sum(span.lane == "wire" for span in self.spans)
        self.spans.append(Span(str(gathers + 1), start, self.wire_free, "wire"))
        work = self.comm.all_gather_into_tensor(output_tensor, input_tensor, async_op=True)
        handle = _Gather(self, work, self.wire_free)
        return handle if async_op else handle.wait()


class _Gather:
    "Waits for a gather; the clock then shows its end or later."

    def __init__(self, clock, work, end):
        self.clock, self.work, self.end = clock, work, end

    def wait(self):
        self.work.wait()
        self.clock.now = max(self.clock.now, self.end)


def least_seconds(gathers, computes):
    "The shortest time of layers in order when at most two weights are whole: seconds by layer."
    now = wire = gathers[0] if gathers else 0.0
    for i, seconds in enumerate(computes):
        if i + 1 < len(gathers):  # launched when layer i begins: the weight before it is free by then
            wire = max(wire, now) + gathers[i + 1]
        now = max(now + seconds, wire) if i + 1 < len(gathers) else now + seconds
    return now


def seconds_of(fn, rounds=5):
    "(median, least, most) seconds of `fn()` on this rank's GPU, in rounds that all ranks begin together."
    took = []
    for _ in range(rounds + 2):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        fn()
        torch.cuda.synchronize()
        took.append(time.perf_counter() - begin)
    return statistics.median(took[2:]), min(took[2:]), max(took[2:])


def watching(comm, at_least):
    "`meter.Memory` of tensors of `at_least` bytes or more, without the simulated group's own."
    return meter.Memory(at_least=at_least, ignore=lambda: comm.busy)


def parts_of(weight, ranks):
    "A weight as flat parts of equal length, one a rank; the last is padded with zeros."
    n = -(-weight.numel() // ranks)
    row = torch.zeros(n * ranks, dtype=weight.dtype, device=weight.device)
    row[: weight.numel()] = weight.detach().flatten()
    return [part.clone() for part in row.split(n)]


def own_part(tensors, dist):
    "This rank's part of several tensors taken as one row."
    row = torch.cat([t.detach().flatten() for t in tensors])
    return parts_of(row, dist.get_world_size())[dist.get_rank()]


def explore_zero(billions=8.0, ranks=8, memory=80):
    """The explorer's data: gigabytes that each rank keeps under each stage, and whether they fit.

    2 bytes a parameter for bf16 weights, 2 for gradients, 12 for the fp32 weights and Adam's two moments.
    Source: Rajbhandari et al. 2020.
    """
    stages = []
    for stage in range(4):
        cut = [ranks if stage >= first else 1 for first in (3, 2, 1)]
        parts = [billions * n / c for n, c in zip((2, 2, 12), cut, strict=True)]
        stages.append({"stage": stage, "parts": parts, "total": sum(parts), "fits": sum(parts) <= memory})
    return {"billions": billions, "ranks": ranks, "memory": memory, "stages": stages}


def free_memory():
    "Free what earlier calls left on this rank's GPU: DDP's and FSDP's modules refer to each other in cycles."
    gc.collect()
    torch.cuda.empty_cache()


@contextlib.contextmanager
def memory_limit(nbytes):
    "This process may take `nbytes` of its GPU within; then all of it again."
    free_memory()
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction(nbytes / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)

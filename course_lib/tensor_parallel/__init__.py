"What lesson tensor_parallel keeps outside its cells: the world of ranks, a ring on a virtual clock, a race."

import statistics
import time
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from course_lib import group as groups
from course_lib import sharding
from course_lib.checking import describe
from course_lib.sharding import Span

aten = torch.ops.aten
ADDING = (aten.addmm, aten.addmm_, aten.baddbmm, aten.baddbmm_)  # their first argument is what they add to
MATMULS = (aten.mm, aten.bmm, *ADDING)
LINKS = {"NVLink, 450 GB/s": 450e9, "InfiniBand, 50 GB/s": 50e9}
BF16_RATE = 700e12  # FLOP/s that large matmuls of one H200 reach, about


class World(sharding.World):
    "`torch.distributed` for a function of `dist`: lesson sharding's, and all_reduce."

    all_reduce, ReduceOp = staticmethod(dist.all_reduce), dist.ReduceOp


def matmul_flops(func, args, out):
    "FLOPs of a dispatched operator if it is a matmul, else 0."
    if func._overloadpacket not in MATMULS:
        return 0
    left = args[1] if func._overloadpacket in ADDING else args[0]
    return 2 * out.numel() * left.shape[-1]


class CountMatmuls(TorchDispatchMode):
    "`flops` of the matmuls in a `with` block."

    flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.flops += matmul_flops(func, args, out)
        return out


class TimedRing(TorchDispatchMode):
    """The ring of a simulated rank, with a virtual clock: pieces take turns on the wire, beside matmuls.

    A piece of n bytes takes n / `wire` seconds of this rank's wire to the next rank, a matmul its FLOPs /
    `flops` of the rank's own time, `now`. `spans` is the timeline. Matmuls are seen in `with ring:`.
    """

    def __init__(self, comm, x, wire, flops, ends):
        super().__init__()
        self.comm, self.rank, self.size, self.wire, self.flops = comm, comm.rank, comm.size, wire, flops
        self.now, self.wire_free, self.spans = 0.0, 0.0, []
        self.ends = ends  # (rank, number of the piece): when it has arrived
        self.known = [x]  # what may be passed on
        self.passing, self.received = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if flops := matmul_flops(func, args, out):
            self._span("compute", self.now, flops / self.flops)
            self.now += flops / self.flops
        return out

    def _span(self, lane, start, seconds):
        number = sum(span.lane == lane for span in self.spans)
        self.spans.append(Span(str(number + 1), start, start + seconds, lane))

    def pass_on(self, piece):
        "Begin to send `piece` to the next rank. `wait()` of what it returns gives the previous rank's piece."
        store = piece.untyped_storage().data_ptr()
        if all(store != t.untyped_storage().data_ptr() for t in self.known):
            raise groups.Misuse("pass_on was given a copy: pass on rows of x, or what wait() returned")
        start = max(self.now, self.wire_free)
        self._span("wire", start, piece.nbytes / self.wire)
        self.wire_free = start + piece.nbytes / self.wire
        self.ends[self.rank, len(self.passing)] = self.wire_free
        work = self.comm.isend(piece, (self.rank + 1) % self.size)
        self.passing.append(_Passing(self, len(self.passing), work, torch.empty_like(piece)))
        self.known.append(self.passing[-1].piece)
        return self.passing[-1]


class _Passing:
    def __init__(self, ring, number, work, piece):
        self.ring, self.number, self.work, self.piece = ring, number, work, piece

    def wait(self):
        ring = self.ring
        source = (ring.rank - 1) % ring.size
        while ring.received <= self.number:  # messages arrive in order
            ring.comm.recv(ring.passing[ring.received].piece, source)
            ring.received += 1
        self.work.wait()
        ring.now = max(ring.now, ring.ends.get((source, self.number), 0.0))
        return self.piece


def on_rank(comm, fn, xs, w, pieces, wire, flops, ends):
    "`fn(x, w, ring, pieces)` on one simulated rank: its result, and its ring with the timeline."
    ring = TimedRing(comm, xs[comm.rank], wire, flops, ends)
    with ring:
        return fn(xs[comm.rank], w, ring, pieces), ring


def on_clock(fn, xs, w, pieces, wire, flops):
    "`fn(x, w, ring, pieces)` on a simulated rank for each of `xs`: (result, ring) by rank."
    ends = {}
    return groups.Group(len(xs)).run(lambda comm: on_rank(comm, fn, xs, w, pieces, wire, flops, ends))


def least_seconds(xs, w, wire, flops):
    "(all matmuls of a rank, all that it passes on), each alone, in seconds."
    compute = 2 * sum(len(x) for x in xs) * w.numel() / flops
    return compute, (len(xs) - 1) * xs[0].nbytes / wire


def explore_links(ranks=8, tokens=8192, width=8192):
    """The explorer's data: milliseconds of a block's forward pass by link: matmuls, wire, in turn, at once.

    24 tokens width² FLOPs (without the attention scores) on `ranks` GPUs; two gathers and two reduce-scatters
    of tokens x width numbers of 2 bytes, in rings.
    """
    compute = 24 * tokens * width**2 / ranks / BF16_RATE
    rows = {}
    for link, rate in LINKS.items():
        wire = 4 * (ranks - 1) / ranks * tokens * width * 2 / rate
        both = {"one after the other": 1e3 * (compute + wire), "at once": 1e3 * max(compute, wire)}
        rows[link] = {"matmuls": 1e3 * compute, "wire": 1e3 * wire} | both
    return {"ranks": ranks, "tokens": tokens, "width": width, "rows": rows}


def gather_into(whole, x, group=None):
    "All-gather `x` into `whole` over a process group, by the name that 2.11 and 2.14 know."
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in 2.14
    gather(whole, x, group=group)
    return whole


def nccl_group(ctas):
    "A group of all ranks whose NCCL kernels have `ctas` thread blocks, which is their number of channels."
    options = dist.ProcessGroupNCCL.Options()
    options.config.min_ctas = options.config.max_ctas = ctas
    return dist.new_group(list(range(dist.get_world_size())), pg_options=options)


def agree(fn, want=None, within=0.05):
    "`fn`, after one call. Raises ValueError if it is off by more than `within` of the largest of `want`."
    out = fn()
    if want is not None:
        off = (out.float() - want.float()).abs().max() / want.float().abs().max()
        if not off < within:
            raise ValueError(f"another result, which differs by {off:.2g} of the largest value")
    return fn


def those_that_work(make, names):
    "{name: make(name)} of those that raise on no rank. Rank 0 prints a sentence for each that is left out."
    made = {}
    for name in names:
        errors, error = [""] * dist.get_world_size(), ""
        try:
            made[name] = make(name)
            torch.cuda.synchronize()
        except Exception as e:
            error = describe(e)
        dist.all_gather_object(errors, error)  # the ranks must go on with the same
        if any(errors):
            made.pop(name, None)
            if dist.get_rank() == 0:
                print(f"{name} is left out: {next(filter(None, errors))}")
    return made


def graphed(fn):
    "A CUDA graph of `fn()` on this rank's GPU: a call replays it and returns the same memory."
    for _ in range(3):
        fn()
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's own thread may call CUDA
            out = fn()
    finally:
        torch.cuda.set_stream(stream)  # where capturing fails, it stays on its own

    def replay():
        graph.replay()
        return out

    return replay


def race(variants, rounds=7, calls=10, rest=0.06, warm=2):
    """Seconds of a call on the slower of the ranks' GPUs: {name: (median, least, most)} of `rounds`.

    The variants take turns. Before each the GPUs rest for `rest` seconds and make `warm` calls; then `calls`
    calls are timed together, between two CUDA events.
    """
    took = {name: [] for name in variants}
    for _ in range(rounds):
        for name, fn in variants.items():
            torch.cuda.synchronize()
            time.sleep(rest)
            dist.barrier()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for i in range(warm + calls):
                if i == warm:
                    start.record()
                fn()
            end.record()
            torch.cuda.synchronize()
            seconds = torch.tensor([start.elapsed_time(end) * 1e-3 / calls], device="cuda")
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
            took[name].append(seconds.item())
    return {name: (statistics.median(s), min(s), max(s)) for name, s in took.items()}


def print_times(times):
    "One line for each of `race`'s variants: the median and the spread of its rounds."
    for name, (median, least, most) in times.items():
        print(f"{name:<28}{1e6 * median:6.0f} µs ({1e6 * least:.0f} to {1e6 * most:.0f})")


class Gain(NamedTuple):
    "How many times as fast as a rival; from spread to spread, in words; an estimate of the limit."

    times: float
    spread: str
    limit: float


def gain(times, rival, winner):
    "The Gain of the fastest named `winner`… over `rival`; None where one of them was left out."
    mine = min((t for name, t in times.items() if name.startswith(winner)), default=None)
    if mine is None or rival not in times:
        return None
    plain, floor = times[rival], max(t[0] for name, t in times.items() if name.endswith("alone"))
    spread = f"{plain[1] / mine[2]:.2f} to {plain[2] / mine[1]:.2f} from spread to spread"
    return Gain(plain[0] / mine[0], spread, plain[0] / floor)

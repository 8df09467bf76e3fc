"Checks of cuda. Oracles: PyTorch in float64, loads by formula, the rules of NVIDIA's occupancy calculator."

import math
import random

import torch

from course_lib import checking as core
from course_lib.checking import require, yours  # noqa: F401
from course_lib.cuda.kernel import Kernel, KernelError, is_pointer, on_gpu


class Launch:
    "An answer's kernel, launched on fresh tensors that are counted; what is wrong becomes one sentence."

    def __init__(self, answer, *parameters):
        core.need_callable(answer, "a function that returns the kernel's source")
        source, name = core.call(answer), getattr(answer, "__name__", "the function")
        require(isinstance(source, str), f"{name} returns {core.kind(source)}; expected text in CUDA C++")
        self.what = "the source"
        self.kernel = self._or_wrong(Kernel, source)
        got = ["*" * is_pointer(declared) + name for name, declared in self.kernel.parameters.items()]
        same = ["*" in p for p in got] == ["*" in p for p in parameters]
        require(same, f"the kernel takes ({', '.join(got)}); expected ({', '.join(parameters)})")
        self.names = list(self.kernel.parameters)
        if torch.cuda.is_available():  # NVRTC may refuse what the CPU's compiler takes
            self._or_wrong(on_gpu, self.kernel)

    def _or_wrong(self, fn, *args, **kwargs):
        try:
            return fn(*args, **kwargs)
        except KernelError as e:
            raise core.Wrong(f"{self.what}: {e}"[:420]) from None

    def run(self, what, grid, block, *args, reads=(), writes=(), backwards=None):
        """`Counts` of a launch.

        `reads` and `writes` are {place of a tensor: elements that all threads load or store}, None for any.
        Tensors outside of `writes` must stay as they were.
        """
        self.what = what
        kept = core.clone(list(args))
        backwards = random.random() < 0.5 if backwards is None else backwards
        counts = self._or_wrong(self.kernel.count, grid, block, *args, backwards=backwards)
        require(not counts.problems, f"{what}: {''.join(counts.problems[:1])}"[:420])
        for name, place, now, was in zip(self.names, range(len(args)), args, kept, strict=True):
            same = place in writes or not isinstance(now, torch.Tensor) or torch.equal(now, was)
            require(same, f"{what}: the kernel changes {name}, which it should only read")
        for verb, moved, wanted in (("load", counts.loads, reads), ("store", counts.stores, writes)):
            for place, elements in dict(wanted).items():
                name = self.names[place]
                got = moved[name].moved // args[place].element_size() if name in moved else 0
                if elements is not None and got != elements:
                    raise core.Wrong(f"{what}: the threads {verb} {got:,} of {name}; expected {elements:,}")
        return counts

    def shared_out(self, counts, places, what, threads=None, most=None):
        "No thread moves many more bytes of these tensors than an even share, or than `most`."
        for place in places:
            for verb, moved in (("load", counts.loads), ("store", counts.stores)):
                name = place if place == "shared" else self.names[place]
                if got := counts.most.get((verb, name), 0):
                    share = most or moved[name].moved / threads
                    if got > (most or 1.25 * share + 32):  # a float4 and a tail more
                        found = f"one thread {verb}s {got // 4:,} words of {name}"
                        all_work = "let all threads do an even part of the work"
                        raise core.Wrong(
                            f"{what}: {found}, where {math.ceil(share / 4):,} would do: {all_work}"
                        )

    def coalesced(self, counts, places, what):
        "Each request of a warp touches no more sectors than its bytes need, and few for a ragged start."
        for line, kind, name, t in counts.rows:
            if name in [self.names[p] for p in places] and t.sectors > t.bytes / 32 + 2 * t.requests:
                least, where = max(1, t.bytes / 32 / t.requests), self.kernel.line(line)
                found = f"a warp's {kind} of {name} touches {t.sectors / t.requests:.1f} sectors of 32 bytes"
                cure = "let neighbouring lanes take neighbouring elements"
                raise core.Wrong(f"{what}: {found}, where {least:.1f} hold its data; {cure}: {where}")

    def no_conflicts(self, counts, what):
        "No two lanes of a warp need different words of one bank."
        for line, kind, name, t in counts.rows:
            if name == "shared" and t.passes > t.needed:
                got, least = t.passes / t.requests, t.needed / t.requests
                found = f"a {kind} of shared memory takes {got:.1f} passes, where {least:.1f} would do"
                raise core.Wrong(f"{what}: {found}: its lanes meet in a bank: {self.kernel.line(line)}")


@core.exercise("cuda.1", "right for any n, grid and block; each element moves once, coalesced")
def saxpy(answer):
    run = Launch(answer, "n", "a", "*x", "*y")
    sizes = [
        (1, 2, 64),
        (100, 1, 32),
        *((random.randrange(2000, 4000), random.randrange(2, 7), b) for b in (64, 96, 256)),
    ]
    for n, grid, block in [*sizes, (random.randrange(40, 90), 3, 128), (0, 2, 32), (30_001, 3, 128)]:
        a = random.uniform(-2, 3)
        x, y = torch.randn(max(n, 1)), torch.randn(n + 3)  # three elements more, which are not the kernel's
        want = y.double()
        want[:n] += a * x[:n].double()
        what = f"n = {n:,}, grid {grid}, block {block}"
        counts = run.run(what, grid, block, n, a, x, y, reads={2: n, 3: n}, writes={3: n})
        core.close(y, want, f"y, {what}", rtol=1e-5, atol=1e-5)
        run.coalesced(counts, (2, 3), what)
        run.shared_out(counts, (2, 3), what, grid * block)


@core.exercise("cuda.2", "right for ragged sizes; loads and stores coalesced; no bank conflict, no race")
def transpose(answer):
    run = Launch(answer, "*x", "*y", "rows", "columns")
    sizes = [
        (64, 96),
        (random.randrange(33, 64), random.randrange(65, 96)),
        (random.randrange(65, 110), 40),
        (5, 70),
    ]
    for rows, columns in sizes:
        x, y = torch.randn(rows, columns), core.poison(columns, rows)
        what, n = f"{rows} x {columns}", rows * columns
        grid = -(-columns // 32), -(-rows // 32)
        counts = run.run(what, grid, (32, 8), x, y, rows, columns, reads={0: n}, writes={1: n})
        core.close(y, x.T, f"y, {what}", 0, 0)
        run.coalesced(counts, (0, 1), what)
        run.no_conflicts(counts, what)
        run.shared_out(counts, (0, 1), what, most=16)


@core.exercise(
    "cuda.3", "right sums in both orders of threads, with no race and no barrier that a thread misses"
)
def scan(answer):
    run = Launch(answer, "*x", "*out", "n")
    sizes = (
        (32, 32),
        (64, 50),
        (96, 96),
        (256, 199),
        (random.choice((128, 160)), 97),
        (1024, 1000),
        (4, 4),
        (1, 1),
    )
    for block, n in [*sizes, (50, 47), (random.randrange(33, 63), 33)]:
        blocks = random.randrange(2, 4)
        x, out = torch.randint(-99, 100, (blocks, n)).float() / 8, core.poison(blocks, n)  # sums are exact
        for backwards in (False, True):
            what = f"{blocks} rows of {n}, blocks of {block} threads" + ", the last thread first" * backwards
            counts = run.run(
                what, blocks, block, x, out, n, reads={0: blocks * n}, writes={1: None}, backwards=backwards
            )
            core.close(out, x.cumsum(1), f"out, {what}", 0, 0)
            run.shared_out(counts, (0,), what, most=4)
            if block == 1024:
                run.shared_out(counts, (1, "shared"), what, most=n)


@core.exercise(
    "cuda.4", "right for any n, grid and block; each element loaded once, coalesced; one atomic a block"
)
def total(answer):
    run = Launch(answer, "*x", "*out", "n")
    sizes = [
        (0, 2, 32),
        (1, 1, 32),
        (random.randrange(5, 30), 2, 64),
        (4096, 2, 512),
        (9999, 3, 96),
        (30_001, 5, 1024),
    ]
    for n, grid, block in [*sizes, (random.randrange(2000, 6000), random.randrange(2, 9), 256)]:
        x = torch.randint(-99, 100, (max(n, 1),)).float() / 8  # sums of eighths are exact
        start = float(random.randrange(1, 50))
        out = torch.tensor([start, -1.0])
        what = f"n = {n:,}, grid {grid}, block {block}"
        counts = run.run(what, grid, block, x, out, n, reads={0: n}, writes={1: None})
        core.close(out[0].item(), start + x[:n].double().sum().item(), f"out[0], {what}", 1e-6, 1e-4)
        require(out[1] == -1, f"{what}: only out[0] may change, and out[1] did")
        rows = [(kind, t.accesses) for _, kind, name, t in counts.rows if name == run.names[1]]
        atomics = sum(k for kind, k in rows if kind == "atomic")
        once = atomics <= grid and all(kind == "atomic" for kind, _ in rows)
        got = sum(k for _, k in rows)
        require(once, f"{what}: out is accessed {got} times; expected one atomicAdd for each block")
        run.coalesced(counts, (0,), what)
        run.no_conflicts(counts, what)
        run.shared_out(counts, (0,), what, grid * block)


@core.exercise("cuda.5", "right for ragged sizes; loads as the formula says; no bank conflict, no race")
def matmul(answer):
    run = Launch(answer, "*a", "*b", "*c", "m", "n", "k")
    ragged = random.randrange(17, 31), random.randrange(33, 47), random.randrange(49, 63)
    few = random.randrange(1, 20), random.randrange(1, 20), random.randrange(2, 13)  # k less than a tile
    for m, n, k in ((32, 48, 64), ragged, (7, 40, 21), (40, 5, 16 * random.randrange(1, 4) + 1), few):
        a, b, c = torch.randn(m, k) + 0.5, torch.randn(k, n) - 0.5, core.poison(m, n)
        grid, what = (-(-n // 16), -(-m // 16)), f"{m} x {k} by {k} x {n}"
        reads = {0: m * k * grid[0], 1: k * n * grid[1]}
        counts = run.run(what, grid, (16, 16), a, b, c, m, n, k, reads=reads, writes={2: m * n})
        core.close(c, a.double() @ b.double(), f"c, {what}", rtol=1e-4, atol=1e-4)
        run.no_conflicts(counts, what)
        run.shared_out(counts, (0, 1), what, most=4 * (-(-k // 16) + 1))
        for name, t in counts.loads.items():
            along = name == "shared" or t.sectors <= t.bytes / 16 + 2 * t.requests
            found = f"a warp's load of {name} touches {t.sectors / t.requests:.1f} sectors"
            require(along, f"{what}: {found}: let threadIdx.x run along its rows")


@core.exercise("cuda.6", "blocks as NVIDIA's calculator has them, 400 times, and the warps of Little's law")
def occupancy(resident_blocks, warps_needed):
    core.need_callable(resident_blocks)
    core.need_callable(warps_needed)
    fixed = [(157, 36, 0), (25, 107, 9182), (1024, 65, 0), (32, 16, 0), (256, 32, 232_448)]
    fixed += [(292, 199, 10_994), (32, 16, 10_649), (32, 16, 6145)]
    for case in range(400):
        shared = random.choice((0, random.randrange(30_000), random.randrange(232_449)))
        drawn = random.randrange(1, 1025), random.randrange(16, 129), shared
        threads, registers, shared = fixed[case] if case < len(fixed) else drawn
        warps, each = -(-threads // 32), -(-registers * 32 // 256) * 256
        taken = -(-(shared + 1024) // 128) * 128
        want = min(32, 64 // warps, 16_384 // each * 4 // warps, 233_472 // taken)
        what = f"blocks of {threads} threads, {registers} registers, {shared:,} bytes"
        core.equal(core.call(resident_blocks, threads, registers, shared), want, what, "resident")
    whole = core.call(warps_needed, 2**-20, 2**42, 128, 4, 1)
    core.equal(
        whole, 256, "warps for 2^42 bytes/s at 2^-20 s on 128 multiprocessors, one load of 4 bytes", "warps"
    )
    odd = 2 * random.randrange(50, 150) + 1
    whole = core.call(warps_needed, 2**-20, odd * 2**34, 128, 4, 1)
    core.equal(whole, odd, f"warps for {odd} * 2^34 bytes/s, all else as before", "warps")
    for _ in range(50):
        latency, rate, width = (
            random.uniform(2e-7, 1e-6),
            random.uniform(1e12, 8e12),
            random.choice((4, 8, 16)),
        )
        loads, processors = random.randrange(1, 9), random.randrange(50, 170)
        want = math.ceil(latency * rate / processors / (32 * width * loads))
        what = f"{rate / 1e12:.2f} TB/s at {latency * 1e9:.0f} ns on {processors} multiprocessors"
        got = core.call(warps_needed, latency, rate, processors, width, loads)
        core.close(got, want, f"warps for {what}, {loads} loads of {width} bytes", 1e-12, 0)

"""Kernels in CUDA C++, from a string: compiled by NVRTC and launched on a GPU, or run and watched on a CPU.

On a CPU g++ or clang++ compiles the same source with emulator.h, and a child process runs it: a fiber for each
thread, blocks one after another. Each load and store is seen, so that sectors, bank conflicts, races and
accesses outside a tensor are counted facts, the same on every machine. A loop without an end or a crash ends the
child and not the notebook.
"""

import contextlib
import functools
import mmap
import os
import re
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

from course_lib import show

HERE = Path(__file__).resolve().parent
GUARD = 1 << 16  # bytes between tensors, so that an address outside one is inside no other
STEPS, SECONDS = 30_000_000, 10  # accesses of one launch on the CPU, and its time
FLAGS = "-std=c++17", "-fno-pie", "-w"


class KernelError(Exception):
    "What is wrong with a kernel, in one sentence. Notebooks show the sentence and no traceback."

    def _render_traceback_(self):
        return [str(self)]


class Traffic(NamedTuple):
    """Loads or stores: of threads, of warps (requests), and their bytes.

    `moved` counts the bytes of all threads, `bytes` the distinct ones of each request, `sectors` those of 32 bytes
    that requests touch; `passes` are those over the banks of shared memory, `needed` what suffices.
    """

    accesses: int = 0
    requests: int = 0
    moved: int = 0
    bytes: int = 0
    sectors: int = 0
    passes: int = 0
    needed: int = 0

    def __add__(self, other):
        return Traffic(*(a + b for a, b in zip(self, other, strict=True)))


class Counts(NamedTuple):
    """What a launch did: `loads` and `stores` are {tensor's name, or "shared": Traffic}, atomics in both.

    `rows` holds (line, "load" or "store" or "atomic", name, Traffic); `problems` are sentences about races and
    about shared memory that is read before it is written.
    """

    rows: list
    problems: list

    def _by_name(self, *kinds):
        found = {}
        for _, kind, name, traffic in self.rows:
            if kind in kinds:
                found[name] = found.get(name, Traffic()) + traffic
        return found

    @property
    def loads(self):
        return self._by_name("load", "atomic")

    @property
    def stores(self):
        return self._by_name("store", "atomic")

    def sectors(self):
        "Sectors of 32 bytes that the launch moves from and to global memory."
        return sum(t.sectors for _, _, name, t in self.rows if name != "shared")

    def table(self):
        "A row for each line and tensor: requests of warps, sectors a request; for shared memory passes a request."
        rows = {}
        for line, kind, name, t in self.rows:
            rows[line, kind, name] = rows.get((line, kind, name), Traffic()) + t
        cells = [(str(line), kind, name, t.accesses, t.requests, *((None, t.passes / t.requests)
                  if name == "shared" else (t.sectors / t.requests, None)))
                 for (line, kind, name), t in sorted(rows.items())]  # fmt: skip
        head = "line", "", "of", "by threads", "by warps", "sectors each", "passes each"
        return show.table(head, cells, left=(0, 1, 2))


class Kernel:
    """A kernel from CUDA C++ source: `Kernel(source)[grid, block](*args)` launches it where the tensors are.

    `grid` and `block` are numbers or tuples (x, y, z). `count` runs it on CPU tensors and gives `Counts`.
    Raises KernelError, one sentence, where the source doesn't compile or the launch goes wrong.
    """

    def __init__(self, source, name=None):
        pattern = r"__global__\s+void\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)\s*\(([^)]*)\)"
        bare = re.sub(r"//[^\n]*|/\*.*?\*/", "", source, flags=re.DOTALL) if isinstance(source, str) else ""
        found = {m[1]: m[2] for m in re.finditer(pattern, bare)}
        if not found or (name and name not in found):
            raise KernelError(f"the source holds no `__global__ void {name or 'name'}(…)`")
        self.source, self.name = source, name or next(iter(found))
        given = [p.strip() for p in found[self.name].split(",") if p.strip()]
        self.parameters = {re.search(r"(\w+)\s*$", p)[1]: p for p in given}

    def __getitem__(self, launch):
        grid, block = (_three(size) for size in launch)
        return functools.partial(self.launch, grid, block)

    def launch(self, grid, block, *args, shared_bytes=0):
        "Run it where the tensors are; on a GPU the launch is only queued."
        if any(isinstance(a, torch.Tensor) and a.is_cuda for a in args):
            on_gpu(self)(grid=grid, block=block, args=self._as_c(args), shared_mem=shared_bytes)
        else:
            self.count(grid, block, *args)

    def count(self, grid, block, *args, backwards=False):
        "Run it on CPU tensors, which it changes, and count; `backwards` runs the last block and thread first."
        self._check(args)
        grid, block = _three(grid), _three(block)
        if min(*grid, *block) < 1 or block[0] * block[1] * block[2] > 1024:
            raise KernelError(f"a block has 1 to 1,024 threads and a grid a block or more: grid {grid}, block {block}")
        program = _compiled(self.source, self.name)
        with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
            words, tensors, size = [], {}, GUARD
            for a, declared in zip(args, self.parameters.values(), strict=True):
                if isinstance(a, torch.Tensor):
                    at, _ = tensors.setdefault(a.data_ptr() or id(a), (size, a))
                    size = max(size, -(-(at + a.nbytes) // 512) * 512 + GUARD)
                    words += "p", at, a.nbytes
                else:
                    words += "n", repr(float(a)) if re.search("float|double", declared) else int(a)
            said, printed = _ran(program, Path(folder), tensors.values(), size, words, grid, block, backwards)
        if printed:
            print(printed, end="")
        return self._told(program, said, args, {id(t): at for at, t in tensors.values()})

    def _check(self, args):
        if len(args) != len(self.parameters):
            names = ", ".join(self.parameters)
            raise KernelError(f"{self.name} takes {len(self.parameters)} arguments ({names}) and got {len(args)}")
        for (name, declared), a in zip(self.parameters.items(), args, strict=True):
            if ("*" in declared) != isinstance(a, torch.Tensor):
                got = "a tensor" if isinstance(a, torch.Tensor) else type(a).__name__
                raise KernelError(f"{self.name}: the parameter `{declared}` got {got}")
            if isinstance(a, torch.Tensor) and not a.is_contiguous():
                raise KernelError(f"{self.name}: {name} is not contiguous; a kernel gets its address and no strides")

    def _as_c(self, args):
        # torch passes a Python float as a double: a `float` parameter gets its bits as an int.
        self._check(args)
        kinds = [re.search("float|double", d) for d in self.parameters.values()]
        return [a if isinstance(a, torch.Tensor) else int(a) if not kind else float(a) if kind[0] == "double"
                else struct.unpack("i", struct.pack("f", a))[0] for a, kind in zip(args, kinds, strict=True)]  # fmt: skip

    def line(self, number):
        "A line of the source, with its number, for a sentence."
        lines = self.source.splitlines()
        return f"line {number}, `{lines[number - 1].strip()[:90]}`" if 0 < number <= len(lines) else "a line"

    def _told(self, program, said, args, offsets):
        lines = _lines(program, {word for row in said for word in row[1:] if word.startswith("0x")}
                       | {"0x" + row[1] for row in said if row[0] == "count"})  # fmt: skip
        names, rows, problems, where = list(self.parameters), [], [], _symbols(program)

        def place(offset, address):
            for name, a in zip(names, args, strict=True):
                if isinstance(a, torch.Tensor) and -GUARD <= (at := offset - offsets.get(id(a), -(1 << 60))):
                    if at < a.nbytes + GUARD:
                        return f"{name}[{at // a.element_size()}]", f"{name} has {a.numel():,} elements"
            for name, begin, size in sorted(where, key=lambda row: -row[1]):
                if begin <= address < begin + size + GUARD:
                    return f"word {(address - begin) // 4} of {name}", f"{name} has {size // 4:,} words"
            return "an address", "it belongs to no tensor and no shared array"

        for kind, *rest in said:
            if kind == "count":
                tensor, flags = int(rest[1]), int(rest[2])
                what = ("load", "store", "atomic", "atomic")[flags]
                name = "shared" if tensor < 0 else names[tensor]
                rows.append((lines["0x" + rest[0]], what, name, Traffic(*map(int, rest[3:]))))
                continue
            at = [self.line(lines[w]) for w in rest if w in lines]
            if kind == "outside":
                verb, (spot, why) = ("loads", "stores to")[int(rest[0])], place(int(rest[4]), int(rest[5], 16))
                raise KernelError(f"thread {rest[3]} of block {rest[2]} {verb} {spot}, and {why}: {at[0]}")
            if kind == "unaligned":
                raise KernelError(f"an access of {rest[1]} bytes at an address that is no multiple of {rest[1]}: {at[0]}")
            if kind == "limit":
                raise KernelError(f"stopped after {STEPS:,} accesses: does a loop never end? It was at {at[0]}")
            if kind == "stuck":
                warp, _, block, thread, other, ended = rest
                does = "has returned" if int(ended) else "waits elsewhere"
                need = "every lane that its mask names" if int(warp) else "every thread of the block"
                raise KernelError(f"thread {thread} of block {block} waits at {at[0]}, and thread {other} {does}: "
                                  f"{need} must reach it")  # fmt: skip
            if kind == "unwritten":
                spot, _ = place(-(1 << 60), int(rest[3], 16))
                problems.append(f"thread {rest[2]} reads {spot} before any thread of its block has written it: {at[0]}")
            if kind == "race":
                verbs = {"ww": ("writes", "writes"), "wr": ("writes", "reads"), "rw": ("reads", "writes")}[rest[0]]
                spot, _ = place(int(rest[7]) if int(rest[7]) >= 0 else -(1 << 60), int(rest[8], 16))
                same = rest[3] == rest[5]
                one, two = (f"thread {t}" + ("" if same else f" of block {b}") for b, t in (rest[3:5], rest[5:7]))
                again = at[1] if at[1] != at[0] else "the same line"
                lack = f"no barrier is between (block {rest[3]})" if same else "blocks run in any order"
                problems.append(f"a race on {spot}: {one} {verbs[0]} it at {at[0]}; {two} {verbs[1]} it at {again}; {lack}")
        return Counts(rows, problems)


def _three(size):
    size = (size,) if isinstance(size, int) else tuple(size)
    return tuple(int(n) for n in size) + (1,) * (3 - len(size))


def _ran(program, folder, tensors, size, words, grid, block, backwards):
    "Run a launch in a child process; gives its report as lists of words, and what it printed."
    arena, report = folder / "arena", folder / "report"
    with open(arena, "wb") as f:
        f.truncate(size + GUARD)
    with open(arena, "r+b") as f, mmap.mmap(f.fileno(), 0) as memory:
        views = [(torch.frombuffer(memory, dtype=t.dtype, count=t.numel(), offset=at), t) for at, t in tensors if t.numel()]
        for view, t in views:
            view.copy_(t.detach().flatten())
        command = [program, arena, report, int(backwards), STEPS, *grid, *block, *words]
        try:
            ran = subprocess.run([str(w) for w in command], capture_output=True, text=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            raise KernelError(f"stopped after {SECONDS} s: does a loop never end?") from None
        finally:
            for view, t in views:
                t.detach().flatten().copy_(view)
            views.clear()
            with contextlib.suppress(UnboundLocalError):
                del view
    if ran.returncode or not report.exists():
        raise KernelError(f"the kernel's process ended with signal {-ran.returncode}: look for a recursion without an end")
    return [line.split() for line in report.read_text().splitlines()], ran.stdout


def compiler():
    "The C++ compiler's command, or KernelError that says what to install."
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        if name and shutil.which(name):
            return name
    raise KernelError("no C++ compiler is found: install g++ (`apt install g++`, or `conda install gxx`) or clang++")


@functools.cache
def _folder():
    return Path(tempfile.mkdtemp(prefix="course_cuda_"))


@functools.cache
def _emulator():
    out = _folder() / "emulator.o"
    subprocess.run([compiler(), *FLAGS, "-O2", "-c", HERE / "emulator.cpp", "-o", out], check=True, timeout=120)
    return out


@functools.cache
def _compiled(source, name):
    "The program that runs a kernel on a CPU; KernelError with the compiler's line where it is refused."
    emulator = _emulator()
    stem = Path(tempfile.mkdtemp(dir=_folder())) / "kernel"
    entry = f'\nextern "C" void cuda_kernel(const cuda_argument* a) {{ cuda_call({name}, a); }}\n'
    stem.with_suffix(".cu").write_text(source + entry)
    seen = "-O1", "-g1", "-fsanitize=thread", "-include", HERE / "emulator.h", "-x", "c++"
    command = [compiler(), *FLAGS, *seen, "-c", stem.with_suffix(".cu"), "-o", stem.with_suffix(".o")]
    try:
        made = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        raise KernelError("the compiler took more than 60 s") from None
    if not made.returncode:
        link = [compiler(), "-no-pie", emulator, stem.with_suffix(".o"), "-o", stem]
        made = subprocess.run(link, capture_output=True, text=True, timeout=60)
    if made.returncode:
        raise KernelError(_refusal(source, made.stderr))
    return stem


def _refusal(source, log):
    "The first error of a compiler's log, g++'s, clang++'s or NVRTC's, in one sentence."
    found = re.search(r"(?:kernel|\w+)\.cu[:(](\d+)\)?[:\d]*: (?:fatal )?error: (.*)", log)
    if not found:
        rest = re.search(r"error: (.*)|undefined reference to (.*)", log)
        return f"the compiler refuses the kernel: {(rest[0] if rest else log.strip()[-200:])[:300]}"
    number = int(found[1])
    lines = source.splitlines()
    shown = f", `{lines[number - 1].strip()[:90]}`" if number <= len(lines) else ""
    return f"the compiler refuses line {number}{shown}: {found[2][:200]}"


@functools.cache
def _symbols(program):
    "(name, address, bytes) of each array in shared memory."
    out = subprocess.run(["nm", "-C", "-S", program], capture_output=True, text=True).stdout
    rows = [line.split(maxsplit=3) for line in out.splitlines()]
    return [(row[3].split("::")[-1], int(row[0], 16), int(row[1], 16)) for row in rows
            if len(row) == 4 and row[2] in "dDbB" and "::" in row[3]]  # fmt: skip


def _lines(program, addresses):
    "{place in the program, as hexadecimal: line of the kernel's source, or 0}."
    addresses = sorted(addresses)
    calls = "".join(f"{int(a, 16) - 1:#x}\n" for a in addresses)  # the return address is after the call
    command = ["addr2line", "-i", "-a", "-e", program]
    try:
        out = subprocess.run(command, input=calls, capture_output=True, text=True).stdout
    except FileNotFoundError:
        return dict.fromkeys(addresses, 0)
    found = [re.search(r"kernel\.cu:(\d+)", part) for part in out.split("0x")[1:]]
    return {a: int(m[1]) if m else 0 for a, m in zip(addresses, found, strict=False)}


@functools.cache
def _on_gpu(source, name):
    build = getattr(torch.cuda, "compile_kernel", None) or torch.cuda._compile_kernel
    try:
        return build(source, name)
    except RuntimeError as e:
        raise KernelError(_refusal(source, str(e))) from None


def on_gpu(kernel):
    "The kernel compiled by NVRTC for this GPU: torch's callable, with the driver's handle as `func`."
    return _on_gpu(kernel.source, kernel.name)

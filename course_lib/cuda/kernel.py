"""Kernels in CUDA C++, from a string: compiled by NVRTC and launched on a GPU, or run and watched on a CPU.

On a CPU g++ or clang++ compiles the same source with emulator.h, and a child process runs it: a fiber for
each thread, blocks one after another. Each load and store is seen, so that sectors, bank conflicts, races and
accesses outside a tensor are counted facts. A loop without an end or a crash ends the child and not the
notebook.
"""

import atexit
import functools
import mmap
import os
import re
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path

import torch

from course_lib.cuda import report
from course_lib.cuda.report import GUARD, KernelError, compiler

HERE = Path(__file__).resolve().parent
STEPS, SECONDS = 30_000_000, 10  # accesses of one launch on the CPU, and its time
FLAGS = "-std=c++17", "-fno-pie", "-w"
# The kernel's own file: each access calls a function of emulator.cpp.
SEEN = "-O1", "-g1", "-fsanitize=thread"
SIGNALS = {
    8: ": a whole number is divided by zero",
    11: ": look for endless recursion or a large local array",
}
BOUNDS = r"(?:__launch_bounds__\s*\([^)]*\)\s*)?"
STARTS = r"(?:\A|[;}])\s*(?:(?:static|inline)\s+)*(?:void|bool|int|unsigned|float|double)\b"
HOST = STARTS + r"(?:(?!__device__)[\w\s*&])*\([^()]*\)(?=\s*\{)"  # a function without __device__
REFUSED = {  # hidden from the counts, or refused by NVRTC
    r"#\s*include|\bstd\s*::": "NVRTC has no C++ headers; functions such as min, fmaf and sqrtf need none",
    r"\bmem(cpy|set|move)\b": "the emulator can't count it: write a loop, or __float_as_int(x) for the bits",
    r"\bno_sanitize\w*|\b(__)?asm(__)?\b": "the emulator couldn't count its accesses",
    r"\bextern\s+__shared__": "the emulator has no dynamic shared memory: declare an array of a fixed size",
    HOST: "a kernel can't call a function without __device__",
    r"\btemplate\s*<[^<>]*>\s*__global__": "a kernel can't be a template here",
}
SIGNATURE = rf"__global__\s+{BOUNDS}void\s+{BOUNDS}(\w+)\s*\(([^)]*)\)"


class Kernel:
    """A kernel from CUDA C++ source: `Kernel(source)[grid, block](*args)` launches it where the tensors are.

    `grid` and `block` are numbers or tuples (x, y, z). `count` runs it on CPU tensors and gives `Counts`.
    Raises KernelError, one sentence, where the source doesn't compile or the launch goes wrong.
    """

    def __init__(self, source):
        if not isinstance(source, str):
            raise KernelError(f"Kernel takes CUDA C++ as text, and was given a {type(source).__name__}")
        code = re.sub(r"//[^\n]*|/\*.*?\*/", "", source, flags=re.DOTALL)
        kernels = re.findall(SIGNATURE, code)
        if len(kernels) != 1:
            names = ", ".join(name for name, _ in kernels)
            several = f"the source holds {len(kernels)} kernels ({names}): give each a source of its own"
            raise KernelError(several if kernels else "the source holds no `__global__ void name(…)`")
        for pattern, why in REFUSED.items():
            if found := re.search(pattern, code):
                raise KernelError(f"`{' '.join(found[0].strip(';}').split())}`: {why}")
        self.source, (self.name, given) = source, kernels[0]
        given = [p.strip() for p in given.split(",") if p.strip()]
        self.parameters = {(re.findall(r"\w+", p.split("[")[0]) or [p])[-1]: p for p in given}

    def __getitem__(self, launch):
        if not isinstance(launch, tuple) or len(launch) != 2:
            raise KernelError(f"launch it as {self.name}[grid, block](…), with two sizes")
        return functools.partial(self.launch, *map(_three, launch))

    def launch(self, grid, block, *args, shared_bytes=0):
        "Run it where the tensors are; on a GPU the launch is only queued."
        if any(isinstance(a, torch.Tensor) and a.is_cuda for a in args):
            on_gpu(self)(grid=grid, block=block, args=self._as_c(args), shared_mem=shared_bytes)
        else:
            self.count(grid, block, *args)

    def count(self, grid, block, *args, backwards=False):
        """Run it on CPU tensors, which it changes, and count: `Counts`.

        Threads and blocks run one after the other; `backwards` takes the last thread of the last block first.
        """
        self._check(args)
        if any(isinstance(a, torch.Tensor) and a.device.type != "cpu" for a in args):
            raise KernelError(f"{self.name}: only kernels on CPU tensors are counted")
        grid, block = _three(grid), _three(block)
        if min(*grid, *block) < 1 or block[0] * block[1] * block[2] > 1024:
            limits = "a block has 1 to 1,024 threads and a grid a block or more"
            raise KernelError(f"{limits}: grid {grid}, block {block}")
        program = _compiled(self.source, self.name)
        words, tensors, size = [], {}, GUARD
        for a, declared in zip(args, self.parameters.values(), strict=True):
            if isinstance(a, torch.Tensor):  # one that is given twice is one
                at, _ = tensors.setdefault(a.data_ptr() or id(a), (size, a))
                size = max(size, -(-(at + a.nbytes) // 512) * 512 + GUARD)
                words += "p", at, a.nbytes
            else:
                words += "n", repr(float(a)) if re.search("float|double", declared) else int(a)
        launch = [int(backwards), STEPS, *grid, *block, *words]
        said, printed = _ran(program, tensors.values(), size, launch)
        print(printed, end="")
        return report.read(said, self, program, args, {id(a): tensors[a.data_ptr() or id(a)][0] for a in args
                           if isinstance(a, torch.Tensor)})  # fmt: skip

    def line(self, number):
        "A line of the source, with its number, for a sentence."
        return report.line_of(self.source, number)

    def _check(self, args):
        names = ", ".join(self.parameters)
        if len(args) != len(self.parameters):
            raise KernelError(f"{self.name} takes ({names}) and was given {len(args)} arguments")
        for declared, a in zip(self.parameters.values(), args, strict=True):
            if is_pointer(declared) != isinstance(a, torch.Tensor):
                got = "a tensor" if isinstance(a, torch.Tensor) else type(a).__name__
                raise KernelError(f"{self.name}: the parameter `{declared}` was given {got}")
            if not is_pointer(declared) and re.search(r"long|_t\b", declared):
                raise KernelError(
                    f"{self.name}: declare `{declared}` as int, float or double: numbers are passed so"
                )
            if isinstance(a, torch.Tensor) and not a.is_contiguous():
                raise KernelError(f"{self.name}: `{declared}` isn't contiguous, and a kernel gets no strides")

    def _as_c(self, args):
        self._check(args)
        given = []
        for a, declared in zip(args, self.parameters.values(), strict=True):
            if not isinstance(a, torch.Tensor):
                # torch passes a Python float as a double: a `float` gets its bits as an int.
                single = struct.unpack("i", struct.pack("f", a))[0]
                a = single if "float" in declared else float(a) if "double" in declared else int(a)
            given.append(a)
        return given


def is_pointer(declared):
    "Whether a kernel's parameter, `float* x` or `float x[]`, takes a tensor."
    return "*" in declared or "[" in declared


def _three(size):
    size = (size,) if isinstance(size, int) else tuple(size)
    return (*map(int, size), *(1,) * (3 - len(size)))


def _ran(program, tensors, size, launch):
    "Run a launch in a child process; gives its report as lists of words, and what it printed."
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        arena, told = Path(folder) / "arena", Path(folder) / "report"
        arena.write_bytes(bytes(size + GUARD))
        with open(arena, "r+b") as f, mmap.mmap(f.fileno(), 0) as memory:
            for at, t in tensors:
                memory[at : at + t.nbytes] = t.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
            try:
                command = [str(word) for word in (program, arena, told, *launch)]
                ran = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
            except subprocess.TimeoutExpired:
                raise KernelError(f"stopped after {SECONDS} s: does a loop never end?") from None
            for at, t in tensors:
                changed = torch.frombuffer(
                    bytearray(memory[at : at + t.nbytes]) or bytearray(8), dtype=t.dtype
                )
                t.detach().reshape(-1).copy_(changed[: t.numel()])
        if ran.returncode or not told.exists():
            why = SIGNALS.get(-ran.returncode, "")
            raise KernelError(f"the kernel's process ended with signal {-ran.returncode}{why}")
        return [line.split() for line in told.read_text().splitlines()], ran.stdout


@functools.cache
def _folder():
    folder = tempfile.mkdtemp(prefix="course_cuda_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@functools.cache
def _emulator():
    "The emulator's object file and its header, which is compiled once for all kernels (.gch)."
    made, header = _folder() / "emulator.o", shutil.copy(HERE / "emulator.h", _folder())
    first = [*FLAGS, "-O2", "-c", HERE / "emulator.cpp", "-o", made]
    second = [*FLAGS, *SEEN, "-x", "c++-header", header, "-o", f"{header}.gch"]
    running = [subprocess.Popen([compiler(), *command]) for command in (first, second)]
    if any(job.wait() for job in running):
        raise KernelError(
            "the emulator doesn't compile here: it needs Linux, with g++ 9 or clang++ 10 or later"
        )
    return made, header


@functools.cache
def _compiled(source, name):
    "The program that runs a kernel on a CPU; KernelError with the compiler's line where it is refused."
    stem = Path(tempfile.mkdtemp(dir=_folder())) / "kernel"
    text, made = stem.with_suffix(".cu"), stem.with_suffix(".o")
    text.write_text(
        f'{source}\nextern "C" void cuda_kernel(const cuda_argument* a) {{ cuda_call({name}, a); }}\n'
    )
    emulator, header = _emulator()
    compiles = [*FLAGS, *SEEN, "-include", header, "-x", "c++", "-c", text, "-o", made]
    for command in (compiles, ["-no-pie", emulator, made, "-o", stem]):
        ran = subprocess.run([compiler(), *command], capture_output=True, text=True, timeout=60)
        if ran.returncode:
            raise KernelError(report.refusal(source, ran.stderr))
    return stem


@functools.cache
def _on_gpu(source, name):
    build = getattr(torch.cuda, "compile_kernel", None) or torch.cuda._compile_kernel
    # Some versions of torch put extern "C" before a source that doesn't begin with it, even before a #define.
    named = re.sub(r'(extern\s*"C"\s*)?__global__', 'extern "C" __global__', source)
    try:
        return build(f'extern "C" {{}}\n#line 1\n{named}', name)
    except RuntimeError as e:
        raise KernelError(report.refusal(source, str(e))) from None


def on_gpu(kernel):
    "The kernel compiled by NVRTC for this GPU: torch's callable, with the driver's handle as `func`."
    return _on_gpu(kernel.source, kernel.name)

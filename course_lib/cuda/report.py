"What the emulator reports of a launch: loads and stores as counts, everything else as a sentence."

import functools
import os
import re
import shutil
import subprocess
from typing import NamedTuple

import torch

from course_lib import show

GUARD = 1 << 16  # bytes between tensors, so that an address outside one is inside no other
KINDS = "load", "store", "atomic", "atomic"
NOWHERE = -(1 << 60)


class KernelError(Exception):
    "What is wrong with a kernel, in one sentence. Notebooks show the sentence and no traceback."

    def _render_traceback_(self):
        return [str(self)]


class Traffic(NamedTuple):
    """Loads or stores: of threads, of warps (requests), and their bytes.

    `moved` counts the bytes of all threads, `bytes` the distinct ones of each request, `sectors` the pieces
    of 32 bytes that requests touch; `passes` are those over the banks of shared memory, `needed` the least.
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

    `rows` holds (line, "load" or "store" or "atomic", name, Traffic); `problems` are sentences about races
    and about values that are read before they are there. `most` is {(kind, name): bytes of one thread}.
    """

    rows: list
    problems: list
    most: dict

    def grouped(self, key):
        "{key(line, kind, name): Traffic}, without rows whose key is None."
        found = {}
        for *row, traffic in self.rows:
            if (k := key(*row)) is not None:
                found[k] = found.get(k, Traffic()) + traffic
        return found

    @property
    def loads(self):
        return self.grouped(lambda line, kind, name: None if kind == "store" else name)

    @property
    def stores(self):
        return self.grouped(lambda line, kind, name: None if kind == "load" else name)

    def sectors(self):
        "Sectors of 32 bytes that the launch moves from and to global memory."
        return sum(t.sectors for *_, name, t in self.rows if name != "shared")

    def passes(self):
        "Passes over the banks of shared memory."
        return sum(t.passes for *_, name, t in self.rows if name == "shared")

    def table(self):
        "A row for each line and tensor: requests of warps, and sectors or passes of each request."
        cells = []
        for (line, kind, name), t in sorted(self.grouped(lambda *row: row).items()):
            each = (None, t.passes / t.requests) if name == "shared" else (t.sectors / t.requests, None)
            cells.append((str(line), kind, name, t.accesses, t.requests, *each))
        head = "line", "", "of", "by threads", "by warps", "sectors each", "passes each"
        return show.table(head, cells, left=(0, 1, 2))


def read(said, kernel, program, args, offsets):
    """`Counts` of a report, lists of words; KernelError where the launch was stopped.

    `offsets` is {id of a tensor: its place in the arena}.
    """
    lines = _lines(program, {w for row in said for w in row[1:] if w.startswith("0x")})
    shared, others = _variables(program)
    names, rows, problems, most = list(kernel.parameters), [], [], {}

    def place(offset, address=0):
        for name, a in zip(names, args, strict=True):
            at = offset - offsets.get(id(a), 1 << 60)
            if isinstance(a, torch.Tensor) and -GUARD <= at < a.nbytes + GUARD:
                return f"{name}[{at // a.element_size()}]", f"{name} has {a.numel():,} elements"
        for name, begin, size in others:
            if begin <= address < begin + size:
                return name, "it is a static or global variable: declare a local or a __shared__ one"
        for name, begin, size in shared:
            if begin <= address < begin + size + GUARD:
                return f"word {(address - begin) // 4} of {name}", f"{name} has {size // 4:,} words"
        return "an address", "it belongs to no tensor and no shared array"

    for row in said:
        at, stop, note = [kernel.line(lines[w]) for w in row if w in lines], "", ""
        match row:
            case ["most", tensor, flags, moved]:
                most[KINDS[int(flags)], "shared" if int(tensor) < 0 else names[int(tensor)]] = int(moved)
            case ["count", pc, tensor, flags, *numbers]:
                name, kind = "shared" if int(tensor) < 0 else names[int(tensor)], KINDS[int(flags)]
                rows.append((lines[pc], kind, name, Traffic(*map(int, numbers))))
            case ["outside", writes, _, block, thread, offset, address, _]:
                spot, why = place(int(offset), int(address, 16))
                verb = "stores to" if int(writes) else "loads"
                stop = f"thread {thread} of block {block} {verb} {spot}, and {why}"
            case ["unaligned", _, size]:
                stop = f"an access of {size} bytes at an address that is no multiple of {size}"
            case ["limit", _]:
                stop = "stopped after many accesses (does a loop never end?)"
            case ["mask", _, block, thread]:
                stop = f"thread {thread} of block {block} isn't in the mask that it gives itself"
            case ["stuck", warp, _, block, thread, other, ended]:
                does = "has returned" if int(ended) else "waits elsewhere"
                need = "every lane that its mask names" if int(warp) else "every thread of the block"
                waits = f"thread {thread} of block {block} waits at {at[0]}"
                raise KernelError(f"{waits}, and thread {other} {does}: {need} must reach it")
            case ["apart", _, _, block, one, two] if at[0] != at[1]:
                where = f"thread {one} of block {block} waits at {at[0]}, and thread {two} at {at[1]}"
                raise KernelError(f"{where}: all threads of a block must reach the same barrier")
            case ["absent", _, _, thread, lane]:
                note = f"thread {thread} wants the value of lane {lane}, which takes no part"
            case ["unwritten", _, _, thread, address]:
                spot, _ = place(NOWHERE, int(address, 16))
                note = f"thread {thread} reads {spot} before any thread of its block has written it"
            case ["race", kinds, _, _, block, one, block_2, two, offset, address]:
                verbs = [{"w": "writes", "r": "reads"}[k] for k in kinds]
                spot, _ = place(int(offset) if int(offset) >= 0 else NOWHERE, int(address, 16))
                apart = f" of block {block}", f" of block {block_2}", "blocks run in any order"
                together = "", "", f"no barrier is between (block {block})"
                first, second, lack = apart if block != block_2 else together
                again = at[1] if at[1] != at[0] else "the same line"
                one, two = f"thread {one}{first} {verbs[0]}", f"thread {two}{second} {verbs[1]}"
                what = f"{one} it at {at[0]}; {two} it at {again}"
                problems.append(f"a race on {spot}: {what}; {lack}")
        if stop:
            raise KernelError(f"{stop}: {at[0]}")
        if note:
            problems.append(f"{note}: {at[0]}")
    return Counts(rows, problems, most)


def refusal(source, log):
    "The first error of a compiler's log, g++'s, clang++'s or NVRTC's, in one sentence."
    found = re.search(r"\w+\.cu[:(](\d+)\)?[:\d]*: (?:fatal )?error: (.*)", log)
    if re.search("cuda_(call|value)", log) and (not found or int(found[1]) > len(source.splitlines())):
        return "the compiler refuses the kernel: its parameters must be pointers and numbers here"
    if not found:
        rest = re.search(r"error: .*|undefined reference to .*", log)
        return f"the compiler refuses the kernel: {(rest[0] if rest else log.strip()[-200:])[:300]}"
    said = found[2].split("; did you mean")[0]
    if unknown := re.search(r"[‘'](__\w+|atomic\w+)[’']", said):
        said = f"{unknown[1]} isn't known to the course's emulator (a GPU may know it)"
    return f"the compiler refuses {line_of(source, int(found[1]))}: {said[:200]}"


def line_of(source, number):
    "A line of the source, with its number, for a sentence."
    lines = source.splitlines()
    return f"line {number}, `{lines[number - 1].strip()[:90]}`" if 0 < number <= len(lines) else "a line"


def compiler():
    "The C++ compiler's command, or KernelError that says what to install."
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        if name and shutil.which(name):
            return name
    install = "install g++ (`apt install g++`, or `conda install gxx`) or clang++"
    raise KernelError(f"no C++ compiler is found: {install}")


@functools.cache
def _tool(name):
    "The path of the compiler's own `nm` or `addr2line`: conda's have longer names."
    return subprocess.run(
        [compiler(), f"-print-prog-name={name}"], capture_output=True, text=True
    ).stdout.strip()


def _variables(program):
    "(name, address, bytes) of each array in shared memory, the last first, and of each other variable."
    out = subprocess.run([_tool("nm"), "-C", "-S", program], capture_output=True, text=True).stdout
    ends = {
        name: int(at, 16) for at, name in re.findall(r"^(\w+) \w (__\w+_cuda_shared)$", out, re.MULTILINE)
    }
    first, last = (ends.get(f"__{end}_cuda_shared", 0) for end in ("start", "stop"))
    found = re.findall(r"^(\w+) (\w+) [dDbB] (?:.*::)?(.*)$", out, re.MULTILINE)
    rows = sorted(((name, int(at, 16), int(size, 16)) for at, size, name in found), key=lambda row: -row[1])
    within = [first <= at < last for _, at, _ in rows]
    return [r for r, w in zip(rows, within, strict=True) if w], [
        r for r, w in zip(rows, within, strict=True) if not w
    ]


def _lines(program, addresses):
    "{place in the program, as hexadecimal: line of the kernel's source, or 0}."
    addresses = sorted(addresses)
    calls = "".join(f"{int(a, 16) - 1:#x}\n" for a in addresses)  # the return address is after the call
    command = [_tool("addr2line"), "-i", "-a", "-e", program]
    out = subprocess.run(command, input=calls, capture_output=True, text=True).stdout
    parts = re.split(r"^0x[0-9a-f]+$", out, flags=re.MULTILINE)[1:]
    found = [re.search(r"kernel\.cu:(\d+)", part) for part in parts]
    return {a: int(m[1]) if m else 0 for a, m in zip(addresses, found, strict=True)}

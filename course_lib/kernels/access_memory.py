"One launch under `access.watch`: its tensors held apart on the host, lanes counted, faults found."

import inspect
from typing import NamedTuple

import numpy as np
import torch

from course_lib.kernels import interpret

OPS = ("loads", "stores", "atomics")
PAD = 1 << 20  # bytes on either side of a tensor that nothing else uses
NOBODY = -1


class Fault(NamedTuple):
    """What a kernel must not do, one for each argument and kind: `str(fault)` is a sentence.

    kind       "outside" (an address that is no element of the tensor), "store/store" (two programs store to
               one element), "load/store" (a program loads what another stores in the same launch)
    argument   the pointer's name in the kernel
    where      the first such element: its index in the tensor; for "outside" its offset from the pointer
    programs   the programs, by number
    count      lanes, over the whole launch
    op         "loads", "stores" or "atomics"
    """

    kind: str
    argument: str
    where: tuple
    programs: tuple
    count: int
    op: str

    def __str__(self):
        at = ", ".join(map(str, self.where))
        if self.kind == "outside":
            verb = {"loads": "loads from", "stores": "stores to", "atomics": "changes"}[self.op]
            lanes = f"{self.count:,} such lane{'s' * (self.count != 1)}"
            return (
                f"program {self.programs[0]} {verb} {self.argument} + {at}, which is no element of "
                f"its tensor ({lanes} in all): a mask is missing or wrong"
            )
        a, b = self.programs
        if self.kind == "store/store":
            return f"programs {a} and {b} both store to {self.argument}[{at}], a race: the last one wins"
        return f"of programs {a} and {b} one loads {self.argument}[{at}] and the other stores it, a race"


class Region:
    "The memory of one tensor argument, or of several that overlap, in a place of its own on the host."

    def __init__(self, name, tensor):
        self.names, self.views = [name], [tensor]
        self.itemsize = tensor.element_size()
        self.key = (tensor.untyped_storage().data_ptr(), self.itemsize)
        self.valid = elements(tensor)

    def overlaps(self, tensor):
        same = self.key == (tensor.untyped_storage().data_ptr(), tensor.element_size())
        return same and bool((self.valid & elements(tensor)).any())

    def join(self, name, tensor):
        self.names.append(name)
        self.views.append(tensor)
        self.valid = self.valid | elements(tensor)

    def settle(self):
        "Make the host's copy. After it, `host(view)` is a tensor there."
        n = self.valid.size
        room = np.empty(n * self.itemsize + 2 * PAD + 512, np.uint8)
        start = PAD + -(room.ctypes.data + PAD) % 256  # aligned as torch's own memory is, and better
        self.first, self.last = room.ctypes.data, room.ctypes.data + room.nbytes
        self.base = self.first + start
        self._room, self._start = torch.from_numpy(room), start
        self._copy = self._room[start : start + n * self.itemsize]
        self._copy.copy_(self._original())
        self.counts = {op: np.zeros(n, np.int32) for op in OPS}
        self.elements, self.masked = dict.fromkeys(OPS, 0), dict.fromkeys(OPS, 0)
        self.lanes = {op: {} for op in OPS}  # {program: [lanes of each load or store]}
        self.writer, self.reader = np.full(n, NOBODY), np.full(n, NOBODY)
        self.other_reader = np.full(n, NOBODY)

    def _original(self):
        "The bytes of the storage, as many as make whole elements."
        tensor = self.views[0]
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        return whole[: self.valid.size * self.itemsize]

    def host(self, view):
        offset = self._start // self.itemsize + view.storage_offset()
        made = torch.empty(0, dtype=view.dtype)
        return made.set_(self._room.untyped_storage(), offset, view.size(), view.stride())

    def copy_back(self):
        changed = (self.counts["stores"] + self.counts["atomics"]) > 0
        if changed.any():
            at = torch.from_numpy(np.flatnonzero(changed))
            into = self._original().view(-1, self.itemsize)
            into[at.to(into.device)] = self._copy.view(-1, self.itemsize)[at].to(into.device)

    def index(self, element):
        "The index of an element of the storage in the first of the tensors that has it."
        for view in self.views:
            if elements(view)[element]:
                left, found = int(element) - view.storage_offset(), [0] * view.dim()
                # Largest stride first: exact unless the view overlaps itself.
                for d in sorted(range(view.dim()), key=view.stride, reverse=True):
                    if view.stride(d):
                        found[d] = min(left // view.stride(d), view.size(d) - 1)
                        left -= found[d] * view.stride(d)
                return tuple(found)
        return (int(element) - self.views[0].storage_offset(),)


def elements(tensor):
    "Which elements of its storage are elements of a tensor, as a bool array."
    found = torch.zeros(tensor.untyped_storage().nbytes() // tensor.element_size(), dtype=torch.bool)
    if tensor.numel():
        found.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset()).fill_(True)
    return found.numpy()


class Launch:
    "One launch of a kernel: its `name`, its pointers' `names`, how many `programs`, its `faults`."

    def __init__(self, fn, args, kwargs):
        self.name, self.fn = fn.__name__, fn
        self.regions, self.faults, self.programs, self.masked_nowhere = [], {}, 0, 0
        signature = inspect.signature(fn)
        bound = signature.bind_partial(
            *args, **{k: v for k, v in kwargs.items() if k in signature.parameters}
        )
        for name, value in bound.arguments.items():
            for label, tensor in _tensors(name, value):
                self._add(label, tensor)
        for region in self.regions:
            region.settle()
        self.names = [n for r in self.regions for n in r.names]
        self.arguments = {name: self._moved(name, value) for name, value in bound.arguments.items()}

    def run(self, grid):
        try:
            interpret.execute(self.fn, grid, self.arguments)
        finally:
            for region in self.regions:
                region.copy_back()
            self.arguments = None

    def region(self, name):
        "The region of an argument, or KeyError with the names there are."
        for r in self.regions:
            if name in r.names:
                return r
        raise KeyError(f"{self.name} has no pointer {name!r}; it has {', '.join(self.names)}")

    def _add(self, name, tensor):
        for region in self.regions:
            if region.overlaps(tensor):
                return region.join(name, tensor)
        return self.regions.append(Region(name, tensor))

    def _moved(self, name, value):
        if isinstance(value, torch.Tensor):
            return self.region(name).host(value)
        if isinstance(value, tuple):
            return tuple(self._moved(f"{name}[{i}]", v) for i, v in enumerate(value))
        if _is_descriptor(value):
            base = self._moved(name, value.base)
            return type(value)(base, value.shape, value.strides, value.block_shape, value.padding)
        return value

    def touch(self, op, addresses, on):
        "Count one load, store or atomic of the running program; returns the lanes that may be carried out."
        program, self.programs = interpret.program()
        home = self._of(addresses[on][0] if on.any() else addresses.flat[0]) if self.regions else None
        if home is None:
            self.masked_nowhere += int((~on).sum())
            return np.zeros(on.shape, bool)
        # Lanes that are off belong to the tensor that the lanes that are on do.
        home.masked[op] += int((~on).sum())
        home.lanes[op].setdefault(program, []).append(on.reshape(-1).astype(np.int8))
        mine = on & (addresses >= home.first) & (addresses < home.last)
        good = self._count(home, op, addresses, mine, program)
        for other in self.regions:  # a block of pointers into several tensors
            theirs = on & ~mine & (addresses >= other.first) & (addresses < other.last)
            if other is not home and theirs.any():
                good |= self._count(other, op, addresses, theirs, program)
                mine = mine | theirs
        if (lost := on & ~mine).any():
            self._count(home, op, addresses, lost, program)
        return good

    def _of(self, address):
        "The region an address lies in, or else the nearest."
        return min(self.regions, key=lambda r: max(r.first - int(address), int(address) - r.last + 1, 0))

    def _count(self, region, op, addresses, mine, program):
        offset = addresses.astype(np.int64) - region.base
        element = offset // region.itemsize
        inside = mine & (element >= 0) & (element < region.valid.size)
        inside[inside] = region.valid[element[inside]]
        if (stray := mine & ~inside).any():
            where = (int(element[stray][0]) - region.views[0].storage_offset(),)
            self._fault("outside", region, where, (program,), int(stray.sum()), op)
        region.elements[op] += int(mine.sum())
        at = element[inside]
        np.add.at(region.counts[op], at, 1)
        if op == "loads":
            self._read(region, at, program)
        elif op == "stores":
            self._written(region, at, program)
        return inside

    def _read(self, region, at, program):
        self._race("load/store", region, at, region.writer[at], program, "loads")
        first = region.reader[at]
        region.reader[at] = np.where(first == NOBODY, program, first)
        region.other_reader[at] = np.where(
            (first != NOBODY) & (first != program), program, region.other_reader[at]
        )

    def _written(self, region, at, program):
        self._race("store/store", region, at, region.writer[at], program, "stores")
        self._race("load/store", region, at, region.reader[at], program, "stores")
        self._race("load/store", region, at, region.other_reader[at], program, "stores")
        region.writer[at] = program

    def _race(self, kind, region, at, others, program, op):
        clash = (others != NOBODY) & (others != program) & (region.counts["atomics"][at] == 0)
        if clash.any():
            first = np.flatnonzero(clash)[0]
            programs = tuple(sorted((int(others[first]), program)))
            self._fault(kind, region, region.index(at[first]), programs, int(clash.sum()), op)

    def _fault(self, kind, region, where, programs, count, op):
        key = (kind, region.names[0], op if kind == "outside" else "")
        if key in self.faults:
            self.faults[key] = self.faults[key]._replace(count=self.faults[key].count + count)
        else:
            self.faults[key] = Fault(kind, region.names[0], where, programs, count, op)


def _is_descriptor(value):
    return type(value).__name__ == "TensorDescriptor"


def _tensors(name, value):
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, tuple):
        for i, v in enumerate(value):
            yield from _tensors(f"{name}[{i}]", v)
    elif _is_descriptor(value):
        yield name, value.base

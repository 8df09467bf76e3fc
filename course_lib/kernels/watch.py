"""What a kernel loads and stores, counted in Triton's interpreter: facts, the same on any machine.

    with watch() as w:
        softmax.softmax(x)
    w.loads["x_ptr"].elements, w.loads["x_ptr"].bytes   # lanes that loaded, and their bytes
    w.loads["x_ptr"].most, w.loads["x_ptr"].fewest      # how often one element was loaded
    w.loads["x_ptr"].masked                             # lanes switched off
    w.stores["out_ptr"], w.atomics["out_ptr"]           # the same of stores, and of atomic operations
    w.outside, w.races                                  # faults, each a sentence: none for a right kernel

Every kernel launched inside is interpreted, on a GPU host too, and on tensors of any device. Each tensor is
held apart from the others, so an address past its end belongs to nobody: it is reported, and neither read nor
written. Lanes that are masked off without `other` get +inf, -inf and NaN in turn, for on a GPU they are
undefined; memory from `torch.empty` is full of NaN.
"""

import contextlib
import inspect
from typing import NamedTuple

import numpy as np
import torch

from course_lib import kernels
from course_lib.kernels import interpret

OPS = ("loads", "stores", "atomics")
PAD = 1 << 20  # bytes on either side of a tensor that nothing else uses
NOBODY = -1
_running = []  # the launch that is being interpreted, last


class Access(NamedTuple):
    "Lanes that touched one argument of a kernel, and how often its most and least touched elements were."

    elements: int
    bytes: int
    masked: int
    most: int
    fewest: int


class Fault(NamedTuple):
    "What a kernel must not do, one for each argument and kind: `str(fault)` is a sentence."

    kind: str  # "outside" (no element of the tensor), "store/store", "load/store" (of two programs)
    argument: str
    where: tuple  # the first such element: its index in the tensor; for "outside" its offset from the pointer
    programs: tuple
    count: int  # lanes, over the whole launch
    op: str

    def __str__(self):
        at = ", ".join(map(str, self.where))
        if self.kind == "outside":
            verb = {"loads": "loads from", "stores": "stores to", "atomics": "changes"}[self.op]
            lanes = f"{self.count:,} such lane{'s' * (self.count != 1)}"
            first = f"program {self.programs[0]} {verb} {self.argument} + {at}"
            return f"{first}, which is no element of its tensor ({lanes} in all): a mask is missing or wrong"
        a, b = self.programs
        if self.kind == "store/store":
            return f"programs {a} and {b} both store to {self.argument}[{at}], a race: the last one wins"
        return f"of programs {a} and {b} one loads {self.argument}[{at}] and the other stores it, a race"


@contextlib.contextmanager
def watch():
    "A `Watch` of the kernels launched inside. An exception in one is the `__cause__` of an InterpreterError."
    kernels.require()
    seen = Watch()
    # In its deterministic mode torch fills new memory. The public switch imports Inductor, for seconds.
    switch = torch._C._set_deterministic_algorithms
    was = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with interpret.everything(seen._run, **METHODS):
        switch(True, warn_only=True)
        try:
            yield seen
        finally:
            switch(was[0], warn_only=was[1])


class Watch:
    "What the kernels launched inside a `watch` did; `launches` has one `Launch` each, in order."

    def __init__(self):
        self.launches = []

    def _run(self, fn, grid, args, kwargs):
        self.launches.append(Launch(fn, args, kwargs))
        self.launches[-1].run(grid)

    loads = property(lambda self: self._accesses("loads"), doc="{argument: Access} of the loads.")
    stores = property(lambda self: self._accesses("stores"), doc="{argument: Access} of the stores.")
    atomics = property(lambda self: self._accesses("atomics"), doc="{argument: Access} of neither of these.")
    outside = property(lambda self: self._faults("outside"), doc="Faults: addresses of no element.")
    races = property(lambda self: self._faults("store/store", "load/store"), doc="Faults, but for atomics.")

    def _faults(self, *kinds):
        return [f for launch in self.launches for f in launch.faults.values() if f.kind in kinds]

    def _accesses(self, op):
        regions = [r for launch in self.launches for r in launch.regions]
        names = dict.fromkeys(n for r in regions for n in r.names)
        return {name: _access(op, [r for r in regions if name in r.names]) for name in names}


def _access(op, regions):
    counts = {}  # by memory: launches that touch one tensor add up
    for r in regions:
        counts[r.key] = counts.get(r.key, 0) + np.where(r.valid, r.counts[op], 0)
    each = np.concatenate([counts[r.key][r.valid] for r in regions])
    most, fewest = (int(each.max()), int(each.min())) if each.size else (0, 0)
    elements, masked = sum(r.elements[op] for r in regions), sum(r.masked[op] for r in regions)
    return Access(elements, elements * regions[0].itemsize, masked, most, fewest)


class Region:
    "The memory of one tensor argument, or of several that overlap, in a place of its own on the host."

    def __init__(self, name, tensor):
        storage, self.itemsize = tensor.untyped_storage(), tensor.element_size()
        self.names, self.view = [name], tensor
        self.key, self.valid = (storage.data_ptr(), self.itemsize), elements(tensor)
        n = self.valid.size
        room = torch.from_numpy(np.empty(n * self.itemsize + 2 * PAD + 256, np.uint8))
        self.base = room.data_ptr() + PAD + -(room.data_ptr() + PAD) % 256  # aligned as torch's own memory is
        start = self.base - room.data_ptr()
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        self._original, self._copy = whole[: n * self.itemsize], room[start : start + n * self.itemsize]
        self._copy.copy_(self._original)
        self.counts = {op: np.zeros(n, np.int32) for op in OPS}
        self.elements, self.masked = dict.fromkeys(OPS, 0), dict.fromkeys(OPS, 0)
        self.writer, self.reader, self.other_reader = (np.full(n, NOBODY) for _ in range(3))

    def joined(self, name, tensor):
        "Does `tensor` overlap this memory? Then it is part of it from now on."
        same = self.key == (tensor.untyped_storage().data_ptr(), tensor.element_size())
        if not same or not (self.valid & elements(tensor)).any():
            return False
        self.names.append(name)
        self.valid = self.valid | elements(tensor)
        return True

    def host(self, view):
        "`view` as a tensor in the host's copy."
        typed = self._copy.view(view.dtype)
        return typed.as_strided(view.size(), view.stride(), typed.storage_offset() + view.storage_offset())

    def copy_back(self):
        at = torch.from_numpy(np.flatnonzero(self.counts["stores"] + self.counts["atomics"]))
        if len(at):
            original, copy = (t.view(-1, self.itemsize) for t in (self._original, self._copy))
            original[at.to(original.device)] = copy[at].to(original.device)

    def index(self, element):
        "The index of an element of the storage in the (first) tensor; its offset where it is in another one."
        v = self.view
        numbers = torch.arange(self.valid.size).as_strided(v.size(), v.stride(), v.storage_offset())
        found = (numbers == int(element)).nonzero()
        return tuple(found[0].tolist()) if len(found) else (int(element) - v.storage_offset(),)


def elements(tensor):
    "Which elements of a tensor's storage are its own, as a bool array."
    found = torch.zeros(
        tensor.untyped_storage().nbytes() // tensor.element_size(), dtype=torch.bool, device="cpu"
    )
    if tensor.numel():
        found.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset()).fill_(True)
    return found.numpy()


class Launch:
    "One launch of a kernel: its function `fn`, its `arguments` by name, its `programs` and `faults`."

    def __init__(self, fn, args, kwargs):
        self.fn, self.regions, self.faults, self.programs = fn, [], {}, 0
        signature = inspect.signature(fn)
        known = {k: v for k, v in kwargs.items() if k in signature.parameters}
        self.arguments = signature.bind_partial(*args, **known).arguments
        for name, value in self.arguments.items():
            if isinstance(value, torch.Tensor) and not any(r.joined(name, value) for r in self.regions):
                self.regions.append(Region(name, value))
        self.regions.sort(key=lambda r: r.base)

    def run(self, grid):
        homes = {name: r for r in self.regions for name in r.names}
        moved = {k: homes[k].host(v) if k in homes else v for k, v in self.arguments.items()}
        _running.append(self)
        try:
            interpret.execute(self.fn, grid, moved)
        finally:
            _running.pop()
            for region in self.regions:
                region.copy_back()

    def touch(self, op, addresses, on):
        "Count one load, store or atomic of the running program; returns the lanes that may be carried out."
        builder = interpret.interpreter.interpreter_builder
        (x, y, z), (nx, ny, nz) = builder.grid_idx, builder.grid_dim
        program, self.programs = int(x + nx * (y + ny * z)), int(nx * ny * nz)
        good = np.zeros(on.shape, bool)
        # The region of each lane: the last that begins, with its padding, before its address.
        which = np.searchsorted([r.base - PAD for r in self.regions[1:]], addresses, side="right")
        for i in np.unique(which) if self.regions else ():
            self.regions[i].masked[op] += int((~on & (which == i)).sum())
            good |= self._count(self.regions[i], op, addresses, on & (which == i), program)
        return good

    def _count(self, region, op, addresses, mine, program):
        element = (addresses.astype(np.int64) - region.base) // region.itemsize
        inside = mine & (element >= 0) & (element < region.valid.size)
        inside[inside] = region.valid[element[inside]]
        if (stray := mine & ~inside).any():
            where = (int(element[stray][0]) - region.view.storage_offset(),)
            self._fault("outside", region, where, (program,), int(stray.sum()), op)
        region.elements[op] += int(mine.sum())
        at = element[inside]
        np.add.at(region.counts[op], at, 1)
        if op == "loads":
            self._race("load/store", region, at, region.writer[at], program, op)
            first = region.reader[at]
            region.reader[at] = np.where(first == NOBODY, program, first)
            second = (first != NOBODY) & (first != program)
            region.other_reader[at] = np.where(second, program, region.other_reader[at])
        elif op == "stores":
            self._race("store/store", region, at, region.writer[at], program, op)
            for readers in (region.reader, region.other_reader):
                self._race("load/store", region, at, readers[at], program, op)
            region.writer[at] = program
        return inside

    def _race(self, kind, region, at, others, program, op):
        clash = np.flatnonzero((others != NOBODY) & (others != program) & (region.counts["atomics"][at] == 0))
        if clash.size:
            programs = tuple(sorted((int(others[clash[0]]), program)))
            self._fault(kind, region, region.index(at[clash[0]]), programs, clash.size, op)

    def _fault(self, kind, region, where, programs, count, op):
        key = (kind, region.names[0], op if kind == "outside" else "")
        first = self.faults.get(key, Fault(kind, region.names[0], where, programs, 0, op))
        self.faults[key] = first._replace(count=first.count + count)


def _touched(op, ptrs, mask):
    "The lanes that are on, and of these the ones that may be carried out."
    on = np.broadcast_to(True if mask is None else mask.data, ptrs.data.shape).astype(bool)
    return on, interpret.Handle(_running[-1].touch(op, ptrs.data, on), interpret.tl.int1)


def _load(self, ptrs, mask, other, *args, original=interpret.Builder.create_masked_load, **kwargs):
    kind = ptrs.get_element_ty()
    on, good = _touched("loads", ptrs, mask)
    fill = undefined(ptrs.data.shape, kind)
    if other is not None:
        fill = np.where(on, fill, other.data).astype(fill.dtype)
    return original(self, ptrs, good, interpret.Handle(fill, kind), *args, **kwargs)


def _store(self, ptrs, value, mask, *args, original=interpret.Builder.create_masked_store, **kwargs):
    return original(self, ptrs, value, _touched("stores", ptrs, mask)[1], *args, **kwargs)


def _atomic(self, how, ptrs, value, mask, *args, original=interpret.Builder.create_atomic_rmw):
    return original(self, how, ptrs, value, _touched("atomics", ptrs, mask)[1], *args)


# What the interpreter's loads and stores become within `watch`.
METHODS = {"create_masked_load": _load, "create_masked_store": _store, "create_atomic_rmw": _atomic}


def undefined(shape, kind):
    "What a program must not rely on: +inf, -inf and NaN in turn; for integers a large number."
    dtype = interpret.interpreter._get_np_dtype(kind)
    values = np.resize(np.array([np.inf, -np.inf, np.nan], np.float32), shape)
    if dtype.kind == "f" or kind == interpret.tl.bfloat16:
        return values.astype(dtype) if dtype.kind == "f" else interpret.to_bfloat16(values)
    return np.full(shape, 1 if dtype.kind == "b" else np.iinfo(dtype).max // 2 + 7, dtype)

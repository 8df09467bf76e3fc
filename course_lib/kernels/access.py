"""What a kernel reads and writes, counted through Triton's interpreter: facts, the same on any machine.

Inside `watch()` every kernel is interpreted, on a GPU host too, and on tensors of any device. Each tensor
is held apart from the others, so an address past its end belongs to nobody: it is reported, and neither
read nor written. Lanes that are masked off without `other` get +inf, -inf and NaN in turn, for on a GPU they
are undefined; memory from `torch.empty` is full of NaN.
"""

import contextlib
from typing import NamedTuple

import numpy as np
import torch

from course_lib import kernels
from course_lib.kernels import interpret
from course_lib.kernels.access_memory import Fault, Launch

__all__ = ["Access", "Fault", "Watch", "watch"]


class Access(NamedTuple):
    """What was loaded through (or stored to) one argument of a kernel, over all launches.

    elements  lanes that were on, and their bytes
    masked    lanes that were off
    most      how often the element that was touched most was touched; fewest: the one touched least
    """

    elements: int
    bytes: int
    masked: int
    most: int
    fewest: int


@contextlib.contextmanager
def watch(poison=True):
    """Interpret and count every kernel launched inside; yields a `Watch`, which can be read afterwards too.

    With `poison`, memory that `torch.empty` and its like give inside is full of NaN (integers: their largest
    value), so an element that no kernel stores shows. An exception in a kernel arrives as Triton's
    InterpreterError, whose `__cause__` is the exception itself.
    """
    kernels.require()
    seen = Watch()
    hooks = {
        "create_masked_load": _loads(seen),
        "create_masked_store": _stores(seen),
        "create_atomic_rmw": _atomic(seen, pointer=1, mask=3),
        "create_atomic_cas": _atomic(seen, pointer=0, mask=None),
    }
    filled = _filled_memory() if poison else contextlib.nullcontext()
    kernels._watches.append(seen)
    try:
        with interpret.everything(seen._run, **hooks), filled:
            yield seen
    finally:
        kernels._watches.remove(seen)


@contextlib.contextmanager
def _filled_memory():
    "torch's own way to fill new memory, which it has in its deterministic mode alone."
    settings = torch.utils.deterministic
    was = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = filled
        torch.use_deterministic_algorithms(was[0], warn_only=was[1])


class Watch:
    "What the kernels launched inside a `watch` did; `launches` has one `Launch` each, in order."

    def __init__(self):
        self.launches = []

    def _run(self, fn, grid, args, kwargs):
        self.launches.append(Launch(fn, args, kwargs))
        self.launches[-1].run(grid)

    @property
    def loads(self):
        "{argument: Access} of the loads. One that is never loaded has zeros."
        return self._accesses("loads")

    @property
    def stores(self):
        "{argument: Access} of the stores."
        return self._accesses("stores")

    @property
    def atomics(self):
        "{argument: Access} of the atomic operations, which are neither among the loads nor the stores."
        return self._accesses("atomics")

    @property
    def masked(self):
        "Lanes switched off by a mask, in all loads and stores."
        here = sum(r.masked[op] for r in self._regions() for op in ("loads", "stores"))
        return here + sum(launch.masked_nowhere for launch in self.launches)

    @property
    def lanes(self):
        "Lanes of all loads and stores, on or off."
        return self.masked + sum(r.elements[op] for r in self._regions() for op in ("loads", "stores"))

    @property
    def outside(self):
        "Faults of kind 'outside': addresses that are no element of a tensor."
        return [f for launch in self.launches for f in launch.faults.values() if f.kind == "outside"]

    @property
    def races(self):
        "Faults of kind 'store/store' and 'load/store'. Atomic operations are exempt."
        return [f for launch in self.launches for f in launch.faults.values() if f.kind != "outside"]

    def grid(self, argument, op=None, launch=-1):
        """The lanes of one argument as an array [programs, lanes]: 1 on, 0 masked off, -1 no such lane.

        `op` is "loads" or "stores" (by default whichever there is), `launch` the launch's index. Where a
        program loads several times, those lanes come one after another.
        """
        launch = self.launches[launch]
        lanes = launch.region(argument).lanes
        rows = {
            p: np.concatenate(each)
            for p, each in lanes[op or ("loads" if lanes["loads"] else "stores")].items()
        }
        drawn = np.full((launch.programs, max(map(len, rows.values()), default=0)), -1, np.int8)
        for p, row in rows.items():
            drawn[p, : len(row)] = row
        return drawn

    def _regions(self):
        return [r for launch in self.launches for r in launch.regions]

    def _accesses(self, op):
        names = dict.fromkeys(n for launch in self.launches for n in launch.names)
        return {name: self._access(op, [r for r in self._regions() if name in r.names]) for name in names}

    def _access(self, op, regions):
        counts = {}  # by memory: launches that touch one tensor add up
        for r in regions:
            counts[r.key] = counts.get(r.key, 0) + np.where(r.valid, r.counts[op], 0)
        touched = [counts[r.key][r.valid] for r in regions if r.valid.any()]
        elements = sum(r.elements[op] for r in regions)
        return Access(
            elements,
            sum(r.elements[op] * r.itemsize for r in regions),
            sum(r.masked[op] for r in regions),
            max((int(c.max()) for c in touched), default=0),
            min((int(c.min()) for c in touched), default=0),
        )


# --- what the interpreter's loads and stores become ---------------------------------------------------


def _on(mask, ptrs):
    lanes = True if mask is None else mask.data
    return np.broadcast_to(lanes, ptrs.data.shape).astype(bool)


def _lanes(good):
    return interpret.Handle(good, interpret.tl.int1)


def _loads(seen):
    def make(original):
        def load(self, ptrs, mask, other, *args, **kwargs):
            if kernels._watches[-1] is not seen:  # a watch inside this one has the launch
                return original(self, ptrs, mask, other, *args, **kwargs)
            kind, on = ptrs.get_element_ty(), _on(mask, ptrs)
            good = seen.launches[-1].touch("loads", ptrs.data, on)
            fill = undefined(ptrs.data.shape, kind)
            if other is not None:
                fill = np.where(on, fill, other.data).astype(fill.dtype)
            return original(self, ptrs, _lanes(good), interpret.Handle(fill, kind), *args, **kwargs)

        return load

    return make


def _stores(seen):
    def make(original):
        def store(self, ptrs, value, mask, *args, **kwargs):
            if kernels._watches[-1] is not seen:
                return original(self, ptrs, value, mask, *args, **kwargs)
            good = seen.launches[-1].touch("stores", ptrs.data, _on(mask, ptrs))
            return original(self, ptrs, value, _lanes(good), *args, **kwargs)

        return store

    return make


def _atomic(seen, pointer, mask):
    def make(original):
        def atomic(self, *args, **kwargs):
            if kernels._watches[-1] is not seen:
                return original(self, *args, **kwargs)
            ptrs = args[pointer]
            on = _on(None if mask is None else args[mask], ptrs)
            good = seen.launches[-1].touch("atomics", ptrs.data, on)
            if mask is not None:
                args = (*args[:mask], _lanes(good), *args[mask + 1 :])
            elif not good.all():
                raise kernels.KernelError(str(seen.outside[-1]))
            return original(self, *args, **kwargs)

        return atomic

    return make


def undefined(shape, kind):
    "What a program must not rely on: +inf, -inf and NaN in turn; for integers a large number."
    dtype = interpret.numpy_type(kind)
    if dtype.kind == "b":
        return np.ones(shape, dtype)
    if not kind.is_floating():
        return np.full(shape, np.iinfo(dtype).max // 2 + 7, dtype)
    values = np.resize(np.array([np.inf, -np.inf, np.nan], np.float32), shape)
    if kind == interpret.tl.bfloat16:
        return interpret.to_bfloat16(values)
    return values.astype(dtype) if dtype.kind == "f" else np.full(shape, np.iinfo(dtype).max, dtype)

"""Counts what eager code asks of a device: operators, bytes, FLOPs and syncs. The same on every machine.

    with meter.count() as c:
        step(batch)
    c.ops, c.bytes, c.flops, c.syncs    # ints; c.where: "file:line" of each sync
    c.read, c.written                   # c.bytes is their sum
    c.other_flops                       # estimates for what is no contraction; c.flops is contractions only
    c.by_op["addmm"].bytes              # an OpCount(ops, bytes, flops) by operator
    c.by_class()["normalisation"]       # the same by class: contraction, normalisation, elementwise
    print(c.table())

    meter.of(step, batch)               # Counts of one call, after two calls that warm up
    meter.compiled(step, batch)         # what torch.compile makes of it: see `meter_compiled`

`flops` is what torch's FLOP counter counts, 2 for each multiply-add of a matmul or convolution. In `by_op`
and `by_class` an operator that is no contraction has the FLOPs estimated by the table in `operators`.

What is counted is an operator that writes memory:

- Views and allocations (`empty`) count nothing, and neither does an operator whose result is empty.
- An operator reads each distinct element of its inputs once, however often it is passed or broadcast, and
  writes its result. In place it reads and writes; a fill, a copy and `out=` only write.
- Indexing and `embedding` read the elements they take, and the index, not the whole table.
- The step counters that torch.optim keeps on the CPU are not counted.

A sync is where Python would wait for a GPU: item, float, bool, if, tolist, numpy, cpu, to("cpu"), print,
nonzero, unique, a boolean mask as an index. `to(device)` with a torch.device counts only where it moves data.
In a notebook `where` says "cell:3", the line within the cell.

Only operators of the portable list are counted (see `operators`): they are the same on a CPU and a GPU. Any
other raises `NotPortable`, which says what to use. `count(portable=False)` accepts everything and leaves the
bytes None. Whatever the block does on CPU tensors is taken for the device's work, collating a batch too. Work
on other threads (data loaders) is not seen; a backward pass is. torch.cuda.synchronize() is in plain sight
and not counted.
"""

import contextlib
import functools
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from course_lib.meter import modes as meter_modes
from course_lib.meter import operators
from course_lib.meter.compiled_code import compiled  # noqa: F401
from course_lib.meter.modes import NotPortable


class OpCount(NamedTuple):
    "How often, the bytes read and written, and the FLOPs."

    ops: int = 0
    bytes: int | None = 0
    flops: int = 0


@dataclass
class Counts:
    "What was counted. `read`, `written` and `bytes` are None after `count(portable=False)`."

    ops: int = 0
    read: int | None = 0
    written: int | None = 0
    flops: int = 0
    other_flops: int = 0
    syncs: int = 0
    where: list = field(default_factory=list)
    by_op: dict = field(default_factory=dict)

    @property
    def bytes(self):
        return None if self.read is None else self.read + self.written

    def add(self, op, cost):
        "Count one call of the operator called `op` with its `operators.Cost`."
        moved = None
        if self.read is not None:
            self.read += cost.read
            self.written += cost.written
            moved = cost.read + cost.written
        self.ops += 1
        if cost.kind == operators.CONTRACTION:
            self.flops += cost.flops
        else:
            self.other_flops += cost.flops
        self.by_op[op] = _sum(self.by_op.get(op, OpCount()), OpCount(1, moved, cost.flops))

    def by_class(self):
        "OpCount by class: contraction, normalisation, elementwise, and other where such were counted."
        found = dict.fromkeys(operators.CLASSES, OpCount())
        if self.read is None:
            found = dict.fromkeys(found, OpCount(bytes=None))
        for op, n in self.by_op.items():
            kind = operators.op_class(op)
            found[kind] = _sum(found.get(kind, OpCount()), n)
        return found

    def table(self):
        "The counts by operator as text, most bytes first."
        rows = sorted(self.by_op.items(), key=lambda r: (-(r[1].bytes or 0), -r[1].flops, r[0]))
        rows.append(("total", OpCount(self.ops, self.bytes, self.flops + self.other_flops)))
        cells = [("operator", "ops", "bytes", "FLOPs")]
        cells += [(op, *("–" if v is None else f"{v:,}" for v in n)) for op, n in rows]
        wide = [max(len(r[i]) for r in cells) for i in range(4)]
        lines = ["  ".join([r[0].ljust(wide[0]), *(c.rjust(w) for c, w in zip(r[1:], wide[1:], strict=True))])
                 for r in cells]  # fmt: skip
        if self.syncs:
            lines.append(f"{_many(self.syncs, 'sync')}: {', '.join(self.where)}")
        return "\n".join(lines)

    def __str__(self):
        n = "bytes not counted" if self.bytes is None else f"{self.bytes:,} bytes"
        return f"{_many(self.ops, 'operator')}, {n}, {self.flops:,} FLOPs, {_many(self.syncs, 'sync')}"


def _many(n, word):
    return f"{n:,} {word}{'s' * (n != 1)}"


def _sum(a, b):
    return OpCount(a.ops + b.ops, None if b.bytes is None else a.bytes + b.bytes, a.flops + b.flops)


@contextlib.contextmanager
def count(portable=True):
    """Count what the block does; gives the `Counts`, which grow as it runs. Blocks may be nested.

    Raises `NotPortable` in the block where an operator is not on the portable list, or where a compiled
    function is called (it would run eagerly here, and be counted as if it were not compiled).
    `portable=False` accepts every operator and counts operators, FLOPs and syncs; the bytes are None.
    """
    c = Counts() if portable else Counts(read=None, written=None)
    run = meter_modes.Run(c, portable)
    hook = register_optimizer_step_pre_hook(run.before_step)
    try:
        with meter_modes.Functions(run), meter_modes.operators_mode(run):
            yield c
    finally:
        hook.remove()


def of(fn, *args, warmup=2, portable=True, **kwargs):
    """The `Counts` of one call of `fn`, after `warmup` calls that allocate what first calls allocate.

    Raises `NotPortable` as `count` does, and for a compiled function or module.
    """
    if not callable(fn):
        raise TypeError(f"of takes a function and its arguments, and was given a {type(fn).__name__}: "
                        "pass the function itself, without calling it")  # fmt: skip
    if _is_compiled(fn):
        raise NotPortable(meter_modes.COMPILED)
    for _ in range(warmup):
        fn(*args, **kwargs)
    with count(portable) as c:
        fn(*args, **kwargs)
    return c


def _is_compiled(fn):
    if isinstance(fn, functools.partial):
        return _is_compiled(fn.func)
    owner = getattr(fn, "__self__", fn)
    if isinstance(owner, torch.nn.Module):
        return any(
            hasattr(m, "_orig_mod") or getattr(m, "_compiled_call_impl", None) for m in owner.modules()
        )
    return hasattr(fn, "_torchdynamo_orig_callable")

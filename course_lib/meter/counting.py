"""Counts operators, bytes, FLOPs and syncs of eager code; `meter` says what is counted.

Two modes of torch see a block of code. `Operators` is shown every operator that reaches a backend.
`Functions` is shown calls from Python: those that dispatch nothing on a CPU tensor (tolist, numpy, cpu,
print), and those that become other operators on a GPU.
"""

import contextlib
import linecache
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from course_lib import show
from course_lib.meter import operators

COMPILED = ("a compiled function can't be counted here, for it would silently run eagerly: "
            "count the function that was compiled, before torch.compile")  # fmt: skip


class NotPortable(Exception):
    "What can't be counted the same way everywhere, and what to use. Notebooks show the sentence alone."

    def _render_traceback_(self):
        return [str(self)]


class OpCount(NamedTuple):
    "How often, the bytes read and written, and the FLOPs; None where they are not known."

    ops: int = 0
    bytes: int | None = 0
    flops: int | None = 0

    def plus(self, other):
        return OpCount(*map(_sum, self, other))


def _sum(a, b):
    return None if a is None or b is None else a + b


@dataclass
class Counts:
    "What was counted. After `count(portable=False)` the bytes are None, and FLOPs may be: `meter` says when."

    ops: int = 0
    read: int | None = 0
    written: int | None = 0
    flops: int | None = 0
    other_flops: int | None = 0
    syncs: int = 0
    where: list = field(default_factory=list)
    code: list = field(default_factory=list)
    by_op: dict = field(default_factory=dict)

    @property
    def bytes(self):
        return _sum(self.read, self.written)

    @property
    def unknown(self):
        "The operators whose FLOPs are not known."
        return [op for op, n in self.by_op.items() if n.flops is None]

    def add(self, op, read, written, flops):
        "Count one call of the operator called `op`."
        kind = operators.op_class(op)
        self.ops += 1
        self.read, self.written = _sum(self.read, read), _sum(self.written, written)
        if kind == operators.CONTRACTION or (kind == operators.OTHER and flops is None):
            self.flops = _sum(self.flops, flops)
        if kind != operators.CONTRACTION:
            self.other_flops = _sum(self.other_flops, flops)
        self.by_op[op] = self.by_op.get(op, OpCount()).plus(OpCount(1, _sum(read, written), flops))

    def by_class(self):
        "OpCount by class: contraction, normalisation, elementwise, and other where such were counted."
        found = dict.fromkeys(operators.CLASSES, OpCount(bytes=None if self.read is None else 0))
        for op, n in self.by_op.items():
            kind = operators.op_class(op)
            found[kind] = found.get(kind, OpCount()).plus(n)
        return found

    def table(self):
        "The counts by operator as text, most bytes first."
        rows = sorted(self.by_op.items(), key=lambda r: (-(r[1].bytes or 0), -(r[1].flops or 0), r[0]))
        rows.append(("total", OpCount(self.ops, self.bytes, _sum(self.flops, self.other_flops))))
        lines = [show.table(("operator", "ops", "bytes", "FLOPs"), [(op, *n) for op, n in rows])]
        if self.syncs:
            lines.append(f"{many(self.syncs, 'sync')}: {', '.join(self.where)}")
        return "\n".join(lines)

    def __str__(self):
        moved = "bytes not counted" if self.bytes is None else f"{self.bytes:,} bytes"
        unknown = f"FLOPs of {', '.join(self.unknown)} not known"
        flops = unknown if self.flops is None else f"{self.flops:,} FLOPs"
        return ", ".join([many(self.ops, "operator"), moved, flops, many(self.syncs, "sync")])


def many(n, word):
    return f"{n:,} {word}{'s' * (n != 1)}"


@contextlib.contextmanager
def count(portable=True):
    """Count what the block does; gives the `Counts`, which grow as it runs. Blocks may be nested.

    Raises `NotPortable` in the block where an operator is not on the portable list, or a compiled function is
    called (it would run eagerly here). `portable=False` accepts every operator; the bytes are then None.
    """
    c = Counts() if portable else Counts(read=None, written=None)
    run = Run(c, portable)
    # A class made now, since only now it is known whether the compiler is loaded: see _should_skip_dynamo.
    see = type("Operators", (Operators,), {"__torch_dispatch__": Operators.__torch_dispatch__})
    before = register_optimizer_step_pre_hook(run.before_step)
    after = register_optimizer_step_post_hook(lambda *_: setattr(run, "in_step", False))
    with before, after, Functions(run), see(run):
        yield c


def of(fn, *args, warmup=2, portable=True, **kwargs):
    "The `Counts` of one call of `fn`, after `warmup` calls that allocate what first calls do; see `count`."
    for _ in range(warmup):
        fn(*args, **kwargs)
    with count(portable) as c:
        fn(*args, **kwargs)
    return c


class Run:
    "One count in progress: what both modes share."

    def __init__(self, counts, portable):
        self.counts, self.portable = counts, portable
        self.thread = threading.get_ident()
        self.paused = False  # within a call that was counted as a whole, such as a print
        self.number_assigned = False  # within x[...] = number
        self.in_step = False  # within an optimizer's step
        self.host = {}  # tensors that torch.optim keeps on the CPU, by storage

    def sync(self):
        path, line = _learner_line()
        self.counts.syncs += 1
        self.counts.where.append(place(path, line))
        self.counts.code.append(linecache.getline(path, line).strip())

    def refuse(self, op, instead=None):
        instead = instead or operators.instead_of(op)
        use = (f"{instead}, or " if instead else "") + "count with portable=False"
        why = f"since it may be other operators on a GPU ({place(*_learner_line())})"
        raise NotPortable(f"{op} is not on meter's portable list, {why}: {use}")

    def before_step(self, optimizer, args, kwargs):
        if threading.get_ident() != self.thread:
            return
        self.in_step = True
        for group in optimizer.param_groups:
            name, foreach = type(optimizer).__name__, group.get("foreach", False)
            if self.portable and group.get("fused"):
                self.refuse(f"{name} with fused=True", "pass foreach=False in its place")
            if self.portable and foreach is not False:  # None: on a GPU alone
                self.refuse(f"{name} with foreach={foreach}", "pass foreach=False")
            if not group.get("capturable"):
                for p in group["params"]:
                    self.keep_on_host(optimizer.state.get(p, {}).get("step"))

    def keep_on_host(self, t):
        if isinstance(t, torch.Tensor) and t.device.type == "cpu" and t.dim() == 0:
            self.host[t.untyped_storage()._cdata] = t  # kept alive, so that the key stays its own

    def is_on_host(self, found):
        return bool(self.host) and bool(found) and all(t.untyped_storage()._cdata in self.host for t in found)


class Operators(TorchDispatchMode):
    "Sees every operator that reaches a backend, in the forward and in the backward pass."

    @classmethod
    def _should_skip_dynamo(cls):
        # Keeps this class out of what the compiler traces. Where the compiler isn't loaded, torch would load
        # it for that, and triton with it: two seconds, and too late to choose triton's interpreter.
        return "torch._dynamo" in sys.modules

    def __init__(self, run):
        super().__init__()
        self.run = run

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, run = kwargs or {}, self.run
        if run.paused or func.namespace in ("profiler", "prim"):
            return func(*args, **kwargs)
        if inside_compiled():
            raise NotPortable(COMPILED)
        op = operators.name(func)
        waits = self._waits(op, func, args, kwargs)
        if operators.is_composite(func):  # these arrive whole in inference mode, and in their parts elsewhere
            with self:
                return func.decompose(*args, **kwargs)
        free = operators.is_free(func) or op == "_local_scalar_dense"
        found = operators.tensors([list(args), list(kwargs.values())])
        if run.portable and not free and op not in operators.PORTABLE:
            run.refuse(op)
        if run.portable and any(t.layout is not torch.strided for t in found):
            run.refuse(f"{op} of a sparse tensor")
        host = run.is_on_host(found)
        if waits and not host:
            run.sync()
        result = func(*args, **kwargs)
        if op == "lift_fresh" and run.in_step:
            run.keep_on_host(result)
        if not host and not free:
            self._count(func, args, kwargs, result, found)
        return result

    def _waits(self, op, func, args, kwargs):
        "Would Python wait for a GPU in this operator?"
        given = operators.arguments(func, args, kwargs)
        if op == "repeat_interleave":
            return given.get("output_size") is None
        if op in ("index", "index_put", "_index_put_impl"):
            # A number put through a mask is a masked fill, for which nothing is counted first.
            fills = self.run.number_assigned and not given.get("accumulate")
            return operators.is_masked(given["indices"]) and not fills
        return op in WAITS

    def _count(self, func, args, kwargs, result, found):
        op, devices = operators.name(func), {t.device for t in found + operators.tensors(result)}
        if op in ("copy", "_to_copy") and len(devices) > 1:  # over the bus, not within the device's memory
            if not operators.arguments(func, args, kwargs).get("non_blocking"):
                self.run.sync()
        elif cost := operators.cost(func, args, kwargs, result, self.run.counts.read is not None):
            self.run.counts.add(func._schema.name.removeprefix("aten::"), *cost)


WAITS = {
    "_local_scalar_dense", "nonzero", "masked_select", "equal", "allclose", "bincount",
    "_unique", "_unique2", "unique_dim", "unique_consecutive", "_linalg_check_errors",
}  # fmt: skip


class Functions(TorchFunctionMode):
    "Sees the Python calls that dispatch no operator on the CPU, and those that are other operators on a GPU."

    def __init__(self, run):
        super().__init__()
        self.run = run

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, run, called = kwargs or {}, self.run, getattr(func, "__name__", "")
        if run.paused:
            return func(*args, **kwargs)
        if func in (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad):
            with self._on_in_the_engine():
                return func(*args, **kwargs)
        if _reads_all(called, args, kwargs):
            run.sync()
            return self._with("paused", func, args, kwargs)
        if called in ("tensor", "as_tensor", "new_tensor"):
            data = args[-1] if args else kwargs.get("data")
            for _ in operators.tensors(data) if isinstance(data, list | tuple) else ():
                run.sync()  # each tensor of a list is read by itself, out of sight of any mode
            if "cuda" in str(kwargs.get("device")) and not operators.tensors(data):
                run.sync()  # Python's numbers are copied to the GPU from unpinned memory
        if run.portable:
            self._refuse_others(called, args, kwargs)
        if func is torch.Tensor.__setitem__ and not isinstance(args[2], torch.Tensor):
            return self._with("number_assigned", func, args, kwargs)
        return func(*args, **kwargs)

    def _with(self, flag, func, args, kwargs):
        setattr(self.run, flag, True)
        try:
            return func(*args, **kwargs)
        finally:
            setattr(self.run, flag, False)

    def _on_in_the_engine(self):
        # torch switches this mode off for the call; hooks and custom backward functions are the learner's.
        engine = torch.autograd._engine_run_backward

        def run_backward(*args, **kwargs):
            with self if threading.get_ident() == self.run.thread else contextlib.nullcontext():
                return engine(*args, **kwargs)

        return mock.patch.object(torch.autograd, "_engine_run_backward", run_backward)

    def _refuse_others(self, called, args, kwargs):
        if called in ("rms_norm", "one_hot"):
            self.run.refuse(called)
        half = args and isinstance(args[0], torch.Tensor) and args[0].dtype in (torch.float16, torch.bfloat16)
        if called in ("softmax", "log_softmax") and half and kwargs.get("dtype") not in (None, args[0].dtype):
            self.run.refuse(f"{called} with dtype=", f"convert first, {called}(x.float(), …)")
        if torch.is_autocast_enabled("cpu"):
            self.run.refuse("autocast", "write the casts out, x.to(torch.bfloat16)")


def _reads_all(called, args, kwargs):
    "Does this call bring a whole tensor to Python or to the CPU?"
    if called in ("tolist", "numpy", "cpu", "__array__", "__repr__", "__format__"):
        return True
    if called != "to" or len(args) + len(kwargs) < 2:
        return False
    to = kwargs.get("device", args[1] if len(args) > 1 else None)
    waits = not (kwargs.get("non_blocking") or (len(args) > 3 and args[3]))
    return isinstance(to, str) and to.split(":")[0] == "cpu" and waits


TORCH = str(Path(torch.__file__).parent)
_HERE = (str(Path(__file__).parent), contextlib.__file__)


def place(path, line):
    "'file.py:12'; 'cell:3' in a notebook, where the path is another in every run."
    in_cell = "ipykernel_" in path or path.startswith("<ipython-input")
    return f"{'cell' if in_cell else Path(path).name}:{line}"


def _frames():
    frame = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_HERE):
            yield frame
        frame = frame.f_back


def _learner_line():
    "Path and line of the nearest frame outside torch."
    found = (f for f in _frames() if not f.f_code.co_filename.startswith((TORCH, "<frozen")))
    frame = next(found, None)
    return (frame.f_code.co_filename, frame.f_lineno) if frame else (TORCH, 0)


def inside_compiled():
    "Is a compiled function on the stack?"
    return "torch._dynamo" in sys.modules and any(
        f.f_code.co_name == "compile_wrapper" and f.f_code.co_filename.endswith("eval_frame.py")
        for f in _frames()
    )

"""How meter sees a block of code: modes of torch that are shown operators and calls, and the learner's line.

`Operators` is shown every operator that reaches a backend. `Functions` is shown calls from Python: those that
dispatch nothing on a CPU tensor (tolist, numpy, cpu, print), and those that become other operators on a GPU.
"""

import contextlib
import sys
import threading
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from course_lib.meter import operators


class NotPortable(Exception):
    "What can't be counted the same way everywhere, and what to use. Notebooks show the sentence alone."

    def _render_traceback_(self):
        return [str(self)]


COMPILED = (
    "a compiled function can't be counted here, for it would silently run eagerly: "
    "count the function that was compiled, before torch.compile"
)


class Run:
    "One count in progress: what both modes share."

    def __init__(self, counts, portable):
        self.counts, self.portable = counts, portable
        self.thread = threading.get_ident()
        self.paused = 0  # within a call that was counted as a whole, such as a print
        self.number_assigned = False  # within x[...] = number
        self.host = {}  # tensors that torch.optim keeps on the CPU, by storage

    def sync(self):
        self.counts.syncs += 1
        self.counts.where.append(_learner_line())

    def refuse(self, op, instead=None):
        instead = instead or operators.instead_of(op)
        raise NotPortable(
            f"{op} is not on meter's portable list, since it may be other operators on a GPU "
            f"({_learner_line()}): " + (f"{instead}, or " if instead else "") + "count with portable=False"
        )

    def before_step(self, optimizer, args, kwargs):
        "Called before each optimizer's step."
        if threading.get_ident() != self.thread:
            return
        for group in optimizer.param_groups:
            if self.portable and group.get("fused"):
                self.refuse(
                    f"{type(optimizer).__name__} with fused=True", "leave it out and pass foreach=False"
                )
            if self.portable and group.get("foreach", False) is not False:
                given = f"{type(optimizer).__name__} with foreach={group['foreach']}"
                self.refuse(given, "pass foreach=False")
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
        # Else torch imports its compiler, and with it triton, at the first operator: two seconds, and too
        # late then to choose triton's interpreter.
        return False

    def __init__(self, run):
        super().__init__()
        self.run = run

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        run = self.run
        if run.paused or func.namespace in ("profiler", "prim"):
            return func(*args, **kwargs)
        op = operators.name(func)
        waits = self._waits(op, func, args, kwargs)
        if "torch._dynamo" in sys.modules and _inside_compiled():
            raise NotPortable(COMPILED)
        if operators.is_composite(func):  # these arrive whole in inference mode, and in their parts elsewhere
            with self:
                return func.decompose(*args, **kwargs)
        known = op == "_local_scalar_dense" or operators.is_free(func) or operators.is_portable(func)
        found = operators.tensors([list(args), list(kwargs.values())])
        if run.portable and not known:
            run.refuse(op)
        if run.portable and any(t.layout is not torch.strided for t in found):
            run.refuse(f"{op} of a sparse tensor")
        host = run.is_on_host(found)
        if waits and not host:
            run.sync()
        result = func(*args, **kwargs)
        if op == "lift_fresh" and _caller_is_optim():
            run.keep_on_host(result)
        if not host and not operators.is_free(func) and op != "_local_scalar_dense":
            self._count(func, args, kwargs, result, found)
        return result

    def _waits(self, op, func, args, kwargs):
        "Would Python wait for a GPU in this operator?"
        if op in WAITS:
            return True
        given = operators.arguments(func, args, kwargs)
        if op == "repeat_interleave":
            return given.get("output_size") is None
        if op in ("index", "index_put", "_index_put_impl"):
            # A number put through a mask is a masked fill, for which nothing is counted first.
            fills = self.run.number_assigned and not given.get("accumulate")
            return operators.is_masked(given["indices"]) and not fills
        return False

    def _count(self, func, args, kwargs, result, found):
        cost = operators.cost(func, args, kwargs, result)
        moves = operators.name(func) in ("copy", "_to_copy")
        if moves and len({t.device for t in found + operators.tensors(result)}) > 1:
            if not operators.arguments(func, args, kwargs).get("non_blocking"):
                self.run.sync()
            return  # over the bus, not within the device's memory
        if cost.written:
            self.run.counts.add(func._schema.name.split("::")[1], cost)


class OperatorsBesideDynamo(Operators):
    "The same where the compiler is loaded already: kept out of what it traces."

    @classmethod
    def _should_skip_dynamo(cls):
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return super().__torch_dispatch__(func, types, args, kwargs)


def operators_mode(run):
    "The mode that sees operators, for this process."
    return (OperatorsBesideDynamo if "torch._dynamo" in sys.modules else Operators)(run)


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
        kwargs = kwargs or {}
        run, called = self.run, getattr(func, "__name__", "")
        if run.paused:
            return func(*args, **kwargs)
        if func in (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad):
            with self._on_again_in_the_engine():
                return func(*args, **kwargs)
        if _reads_all(called, args, kwargs):
            run.sync()
            run.paused += 1
            try:
                return func(*args, **kwargs)
            finally:
                run.paused -= 1
        if called in ("tensor", "as_tensor", "new_tensor"):
            for _ in _listed(args, kwargs):
                run.sync()
            if _copied_to_gpu(args, kwargs):
                run.sync()
        if run.portable:
            self._refuse_others(called, args, kwargs)
        if func is torch.Tensor.__setitem__ and not isinstance(args[2], torch.Tensor):
            run.number_assigned = True
            try:
                return func(*args, **kwargs)
            finally:
                run.number_assigned = False
        return func(*args, **kwargs)

    @contextlib.contextmanager
    def _on_again_in_the_engine(self):
        # torch switches this mode off for the call; hooks and custom backward functions are the learner's.
        engine, thread = torch.autograd._engine_run_backward, self.run.thread

        def run_backward(*args, **kwargs):
            with self if threading.get_ident() == thread else contextlib.nullcontext():
                return engine(*args, **kwargs)

        torch.autograd._engine_run_backward = run_backward
        try:
            yield
        finally:
            torch.autograd._engine_run_backward = engine

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


def _listed(args, kwargs):
    "The tensors in a list that is made into a tensor: each is read by itself, out of sight of any mode."
    values = [v for v in (*args, *kwargs.values()) if isinstance(v, list | tuple)]
    return [t for v in values for t in operators.tensors(v)]


def _copied_to_gpu(args, kwargs):
    "Are Python's numbers made into a tensor on the GPU? Their copy is from unpinned memory, and waited for."
    device = kwargs.get("device")
    if device is None or torch.device(device).type != "cuda":
        return False
    return not operators.tensors([list(args), kwargs.get("data")])


_TORCH = str(Path(torch.__file__).parent)
_HERE = (__file__, str(Path(__file__).with_name("meter.py")), contextlib.__file__)


def _frames():
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename not in _HERE:
            yield frame
        frame = frame.f_back


def _learner_line():
    "File and line of the nearest frame outside torch; 'cell' in a notebook, where the path differs by run."
    for frame in _frames():
        path = frame.f_code.co_filename
        if not path.startswith((_TORCH, "<frozen")):
            in_cell = "ipykernel_" in path or path.startswith("<ipython-input")
            return f"{'cell' if in_cell else Path(path).name}:{frame.f_lineno}"
    return "torch"


def _caller_is_optim():
    for frame in _frames():
        path = frame.f_code.co_filename
        if not path.startswith(_TORCH):
            return False
        if path.startswith(str(Path(_TORCH, "optim"))):
            return True
    return False


def _inside_compiled():
    return any(f.f_code.co_name == "compile_wrapper" and f.f_code.co_filename.endswith("eval_frame.py")
               for f in _frames())  # fmt: skip

"""Lesson fusion's compiler: captures a point-wise function into a graph and turns the graph into one kernel.

    gelu = fusion.fuse(lambda x, b: F.silu(x + b) * x)
    gelu(x, b)                     # one launch: each input read once, each output written once
    print(gelu.source)             # the Triton kernel of the last call
    print(gelu.graph)              # what was captured
    gelu.cost(x, b)                # Cost(launches=1, read=…, written=…), in bytes, without running it
    gelu.how                       # "gpu", "interpreter", or "graph" where Triton is not installed
    gelu.launches, gelu.kernels    # launches so far; how many different kernels were made for them

On a GPU the kernel is compiled by Triton; CPU tensors go through Triton's interpreter (slow: small sizes).

The exercises use a smaller compiler that is read in one sitting, in `fusion_small`:

    fusion.1  chain_bytes(shapes, steps, results, itemsize=4) -> (unfused, fused)
          shapes   {"x": (64, 128), "b": (128,)}: the inputs, contiguous, each of its own memory
          steps    [("t", "x", "b"), ("y", "t", "t", 2.0)]: t = some operator of x and b, y of t, t and a
                   number; operands are names of inputs or of earlier steps, or numbers, which cost nothing
          results  ["y"]: what the chain returns, names of steps; nothing else outlives the chain
          Unfused, each step is an operator: it reads each distinct operand once and writes its result, of
          the broadcast shape. Fused, one kernel reads once what the results need and writes the results.
    fusion.2  capture(fn, count) -> Graph of `fn` called once with `count` proxies (class Proxy: record, the
          operators + - * / ** and their reflected forms, unary -, comparisons < <= > >=, methods such as
          x.exp(), and torch.exp(x) through __torch_function__); refuses `if x > 0` by raising
          CannotCapture. Graph(inputs, nodes, outputs), Node(op, args); graph.add(op, *args) makes a node.
          Op names are torch's: add sub mul div pow neg lt le gt ge, else the name of the function or method.
    fusion.3  generate(graph, shapes) -> str, the source of one Triton kernel
              @triton.jit
              def fused(in0, in1, …, out0, out1, …, n, BLOCK: tl.constexpr):
          one `in` for each of graph.inputs (used or not), one `out` for each of graph.outputs; all float32
          and contiguous. `shapes` has each input's shape; outputs have the broadcast shape, which is two
          dimensional (rows, columns) and has n elements; an input is (rows, columns), (columns,),
          (rows, 1), or (). Launched with a grid of ceil(n / BLOCK). What each op is in Triton is given:
          fusion_small.TRITON["sub"] == "{0} - {1}". Each input that is needed is loaded once, each node
          that is needed is computed once, each output is stored once, all within n.
          fusion_small.launch(source, tensors, shape, outputs) runs it, on a GPU or interpreted.

Chains and the race: `fusion.chains()` gives named point-wise chains, `fusion.race(chains, n)` times each as
eager, under torch.compile and fused here, in one run.
"""

import functools
import importlib.util
from typing import NamedTuple

import torch

from course_lib.fusion.bytes import chain_bytes
from course_lib.fusion.capturing import capture
from course_lib.fusion.codegen import Layout, build, kernel_source
from course_lib.fusion.graph import CannotCapture, CannotFuse, Graph, Node
from course_lib.fusion.chain_race import chains, race
from course_lib.meter import operators

__all__ = ["CannotCapture", "CannotFuse", "Cost", "Fused", "Graph", "Node", "capture", "chain_bytes",
           "chains", "fuse", "race"]  # fmt: skip

BLOCK, WARPS = 1024, 4


class Cost(NamedTuple):
    "What one call costs: kernels launched, bytes read and written."

    launches: int
    read: int
    written: int

    @property
    def bytes(self):
        return self.read + self.written


def fuse(fn):
    """`fn`, a point-wise function of tensors and numbers, as one kernel: returns a `Fused`.

    `fn` is captured at the first call, and again for arguments of other shapes, strides or dtypes, for other
    numbers (a number is a constant of the kernel), and where a number that `fn` finds outside itself has
    changed; whatever else it reads from outside it reads when it is captured. What it changes in place is
    changed. Results have the shape and dtype that eager gives them, and the strides of torch's meta device.

    A call raises `CannotCapture` or `CannotFuse` with one sentence, and TypeError for an argument that is
    neither a number nor a tensor on a CPU or a CUDA device.
    """
    if not callable(fn):
        raise TypeError(
            f"fuse takes a function, and was given a {type(fn).__name__}: pass the function itself"
        )
    return Fused(fn)


class Plan(NamedTuple):
    "What a function came to for one kind of arguments."

    captured: object
    graph: Graph  # what the kernel computes
    source: str | None  # None where there is nothing to compute
    kernel: object
    grid: tuple
    n: int
    loaded: list  # the inputs that the kernel reads
    pointers: list  # the inputs whose memory it is given
    made: list  # shape, strides and dtype of each new tensor, in the order of the captured outputs
    stored: list  # which of these the kernel writes: not the empty ones
    changed: list  # the inputs that are changed in place


class Fused:
    "A function as one kernel. See `fuse`."

    def __init__(self, fn):
        functools.update_wrapper(self, fn, updated=())
        self.fn = fn
        self.launches = 0
        self.source = self.graph = self.how = None
        self._plans, self._kernels = {}, {}

    @property
    def kernels(self):
        "How many different kernels were made."
        return len(self._kernels)

    def __call__(self, *args):
        tensors, plan = self._planned(args)
        captured, device = plan.captured, tensors[0].device
        new = [
            torch.empty_strided(shape, stride, dtype=dtype, device=device)
            for shape, stride, dtype in plan.made
        ]
        if plan.kernel is not None:
            pointers = [tensors[k] for k in plan.pointers] + [new[k] for k in plan.stored]
            plan.kernel[plan.grid](*pointers, plan.n, BLOCK=BLOCK, num_warps=WARPS)
            self.launches += 1
        new = iter(new)
        outputs = [next(new) if into is None else tensors[into] for into in captured.written]
        if plan.source and plan.kernel is None:  # Triton is not installed
            for value, out in zip(captured.graph.run(*tensors), outputs, strict=True):
                out.copy_(value)
        found = [tensors[k] if kind == "input" else outputs[k] for kind, k in captured.returns]
        return found[0] if captured.kind is torch.Tensor else captured.kind(found)

    def cost(self, *args):
        "The `Cost` of a call with these arguments; the call is not made."
        tensors, plan = self._planned(args)
        if plan.source is None:
            return Cost(0, 0, 0)
        outputs = [node.like for node in plan.graph.outputs]
        return Cost(1, operators.covered([tensors[k] for k in plan.loaded]), sum(t.nbytes for t in outputs))

    def _planned(self, args):
        tensors, given, key = _arguments(args)
        key = (key, _outside(self.fn))
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._plan(given, tensors)
        self.source, self.graph = plan.source, plan.graph
        if plan.changed:
            _refuse_shared_memory(plan.changed, tensors, plan.pointers)
        return tensors, plan

    def _plan(self, given, tensors):
        captured = capture(self.fn, given)
        graph, written = Graph(), []
        graph.inputs, graph.nodes = captured.graph.inputs, captured.graph.nodes
        for node, into in zip(captured.graph.outputs, captured.written, strict=True):
            if node.like.numel():
                graph.outputs.append(node)
                written.append(into)
        graph = graph.simplified()
        made = [
            n.like for n, into in zip(captured.graph.outputs, captured.written, strict=True) if into is None
        ]
        stored = [j for j, like in enumerate(made) if like.numel()]
        made = [(like.shape, like.stride(), like.dtype) for like in made]
        device = tensors[0].device.type
        self.how = {"cuda": "gpu", "cpu": "interpreter"}[device]
        if not graph.outputs:
            return Plan(captured, graph, None, None, (0,), 0, [], [], made, stored, [])
        needed = graph.needed()
        loaded = [k for k, node in enumerate(graph.inputs) if node in needed]
        shape = _whole([node.like for node in graph.outputs])
        _refuse_races(graph, written, loaded, shape)
        # An output in memory that is there has that memory's strides, whatever its node's are.
        places = [graph.inputs[k].like if k in loaded else None for k in range(len(graph.inputs))]
        places += [node.like if into is None else graph.inputs[into].like
                   for node, into in zip(graph.outputs, written, strict=True)]  # fmt: skip
        layout = Layout(shape, places)
        source = kernel_source(graph, layout, written)
        kernel = None
        if importlib.util.find_spec("triton") is None:
            self.how = "graph"
        else:
            kernel = self._kernels.get((source, device))
            if kernel is None:
                kernel = self._kernels[source, device] = build(source, device)
        changed = [k for k in written if k is not None]
        pointers = [k for k in range(len(tensors)) if k in loaded or k in written]
        grid = (-(-layout.n // BLOCK),)
        return Plan(captured, graph, source, kernel, grid, layout.n, loaded, pointers, made, stored, changed)


def _arguments(args):
    "The distinct tensors among the arguments, the arguments with each tensor in one object, and a key."
    tensors, given, places, key = [], [], {}, []
    for position, a in enumerate(args):
        if isinstance(a, torch.Tensor):
            _check_tensor(a, position)
            # The same memory seen alike is one input; an empty tensor has no memory.
            what = (a.shape, a.stride(), a.dtype, a.device)
            place = (a.data_ptr() or id(a), *what)
            k = places.get(place)
            if k is None:
                k = places[place] = len(tensors)
                tensors.append(a)
                key.append(what)
            given.append(tensors[k])
            key.append(k)
        elif isinstance(a, int | float):
            given.append(a)
            key.append((type(a), repr(a)))
        else:
            raise TypeError(
                f"argument {position} is a {type(a).__name__}: a fused function takes tensors and numbers"
            )
    if not tensors:
        raise TypeError("a fused function takes at least one tensor, and was given none")
    if len({t.device for t in tensors}) > 1:
        found = ", ".join(sorted({str(t.device) for t in tensors}))
        raise CannotFuse(f"the tensors are on {found}: move them to one device first")
    return tensors, given, tuple(key)


def _check_tensor(t, position):
    if t.device.type not in ("cpu", "cuda") or t.layout is not torch.strided:
        raise TypeError(
            f"argument {position} is a {t.layout} tensor on {t.device}: a fused function takes dense "
            "tensors on a CPU or a CUDA device"
        )
    if t.requires_grad and torch.is_grad_enabled():
        raise CannotFuse(
            f"argument {position} requires gradients, and a fused function has no backward: call it "
            "under torch.no_grad()"
        )


def _outside(fn):
    "The numbers that a function finds outside itself: they are constants of its kernel."
    code = getattr(fn, "__code__", None)
    if code is None:
        return ()
    found = [fn.__globals__.get(name) for name in code.co_names]
    for cell in fn.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            found.append(None)
    return tuple(repr(v) for v in found if isinstance(v, int | float | str))


def _whole(outputs):
    shapes = [t.shape for t in outputs]
    try:
        return torch.broadcast_shapes(*shapes)
    except RuntimeError:
        raise CannotFuse(
            f"the results have shapes {' and '.join(str(list(s)) for s in dict.fromkeys(shapes))}: "
            "one kernel makes results whose shapes broadcast together"
        ) from None


def _refuse_races(graph, written, loaded, shape):
    "One program would read what another has changed."
    for k in written:
        if k in loaded and graph.inputs[k].like.shape != shape:
            raise CannotFuse(
                f"a tensor of shape {list(graph.inputs[k].like.shape)} is changed in place and broadcast to "
                f"{list(shape)}, and some programs of the kernel would see the change: write the result to "
                "a new tensor"
            )


def _refuse_shared_memory(changed, tensors, used):
    "An input that is changed in place must share its memory with no other, nor with itself."
    spans = {k: _span(tensors[k]) for k in used}
    for k in changed:
        start, end = spans[k]
        if end - start < tensors[k].nbytes:
            raise CannotFuse(
                f"a tensor of shape {list(tensors[k].shape)} and strides {tensors[k].stride()} is changed in "
                "place, and has elements that are the same memory: clone it first"
            )
        for j, (first, last) in spans.items():
            if j != k and first < end and start < last:
                raise CannotFuse(
                    "a tensor is changed in place and shares memory with another argument: clone one of "
                    "the two first"
                )


def _span(t):
    "The bytes from the first element of a tensor to the last."
    if not t.numel():
        return 0, 0
    last = sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()

"""What lesson fusion keeps out of its cells: tracing, a table of Triton code, launching, refusing.

    graph, shapes = trace(fn, x, y)[:2]      # a point-wise function as an FX graph of aten's operators
    TRITON[torch.ops.aten.sub.Tensor]        # "{0} - {1}": what an operator is in Triton
    gelu = fuse(fn, generate)                # `generate(graph, shapes)` gives the source of one Triton kernel
    gelu(x)                                  # one launch; CPU tensors go through Triton's interpreter
    gelu.source, gelu.bytes                  # of the last call

`trace` is PyTorch's own `make_fx`, with functionalization (in-place operators become pure ones) and
decompositions (silu becomes a sigmoid and a product). Kernels compute in float32, whatever the tensors are.
"""

import functools
import itertools
import linecache
import math
from typing import NamedTuple

import torch
from torch import fx

aten = torch.ops.aten
BLOCK, WARPS = 1024, 4
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
NAN = "propagate_nan=tl.PropagateNan.ALL"  # as torch does; a plain tl.maximum drops a NaN

TRITON = {
    aten.add.Tensor: "{0} + {1}",
    aten.sub.Tensor: "{0} - {1}",
    aten.mul.Tensor: "{0} * {1}",
    aten.div.Tensor: "{0} / {1}",
    aten.neg.default: "{0} * -1.0",  # Triton's -x is 0 - x, whose zeros have the wrong sign
    aten.abs.default: "tl.abs({0})",
    aten.exp.default: "tl.exp({0})",
    aten.log.default: "tl.log({0})",
    aten.sqrt.default: "tl.sqrt({0})",
    aten.rsqrt.default: "tl.rsqrt({0})",
    aten.reciprocal.default: "1.0 / {0}",
    aten.sin.default: "tl.sin({0})",
    aten.cos.default: "tl.cos({0})",
    aten.erf.default: "tl.erf({0})",
    aten.floor.default: "tl.floor({0})",
    aten.ceil.default: "tl.ceil({0})",
    aten.sigmoid.default: "1.0 / (1.0 + tl.exp(-{0}))",
    aten.tanh.default: "2.0 / (1.0 + tl.exp(-2.0 * {0})) - 1.0",
    aten.gelu.default: "0.5 * {0} * (1.0 + tl.erf({0} * 0.7071067811865476))",
    aten.relu.default: f"tl.maximum({{0}}, 0.0, {NAN})",
    aten.maximum.default: f"tl.maximum({{0}}, {{1}}, {NAN})",
    aten.minimum.default: f"tl.minimum({{0}}, {{1}}, {NAN})",
    aten.clamp_min.default: f"tl.maximum({{0}}, {{1}}, {NAN})",
    aten.clamp_max.default: f"tl.minimum({{0}}, {{1}}, {NAN})",
    aten.where.self: "tl.where({0}, {1}, {2})",
    aten._to_copy.default: "{0}",  # every value is held as float32
    aten.clone.default: "{0}",
    aten.full.default: "tl.full([BLOCK], {1}, tl.float32)",
    aten.full_like.default: "tl.full([BLOCK], {1}, tl.float32)",
    aten.scalar_tensor.default: "tl.full([BLOCK], {0}, tl.float32)",
}
for _name, _sign in {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}.items():
    TRITON |= {getattr(getattr(aten, _name), kind): f"{{0}} {_sign} {{1}}" for kind in ("Tensor", "Scalar")}


class CannotFuse(ValueError):
    "A function can't become one kernel: the sentence says why."


def literal(number):
    "A Python number as Triton code: repr, but for infinity and NaN."
    return repr(number) if math.isfinite(number) else f'float("{number}")'


class Traced(NamedTuple):
    """A function as a graph of operators that are in TRITON.

    `graph` returns a tuple of the nodes to store; `shapes` has the shape of each input: (rows, columns),
    (columns,), (rows, 1) or (); `full` is the shape of all results. `made` has for each node to store its
    dtype, or the number of the input into whose memory it goes; `returns` says what the function returns:
    ("out", k) or ("in", k), in a list where it returns a tuple.
    """

    graph: fx.Graph
    shapes: list
    full: torch.Size
    made: list
    returns: object


@functools.cache
def _decompositions():
    from torch._decomp import core_aten_decompositions

    def scaled(op):
        # NotImplemented: the operator stays.
        return lambda a, b, alpha=1: NotImplemented if alpha == 1 else op(a, b * alpha)

    def clamp(x, low=None, high=None):
        x = x if low is None else torch.clamp_min(x, low)
        return x if high is None else torch.clamp_max(x, high)

    def power(x, exponent):
        known = {2: lambda: x * x, 3: lambda: x * x * x, 0.5: x.sqrt, -0.5: x.rsqrt, -1: x.reciprocal}
        return known[exponent]() if exponent in known else NotImplemented

    table = dict(core_aten_decompositions())
    for op in (aten.clamp_min.default, aten.clamp_max.default):
        table.pop(op, None)
    table |= {aten.add.Tensor: scaled(torch.add), aten.sub.Tensor: scaled(torch.sub)}
    return table | {aten.clamp.default: clamp, aten.pow.Tensor_Scalar: power}


def trace(fn, *args):
    """`fn` of contiguous float tensors as a `Traced`; raises `CannotFuse` where it isn't one kernel.

    Only shapes and dtypes are looked at: `make_fx` runs `fn` once, on tensors without data.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    _check_arguments(args)
    pure = torch.func.functionalize(fn, remove="mutations_and_views")
    try:
        with torch.no_grad():
            graph = make_fx(pure, decomposition_table=_decompositions(), tracing_mode="fake")(*args).graph
    except Exception as e:  # whatever stops tracing: a branch on a value, a value for Python, bad shapes
        why = str(e).strip().splitlines()[0][:150]
        if "data-dependent" in why:
            why = "Python asks for the value of a tensor, and a graph has none"
        raise CannotFuse(f"make_fx can't trace it: {why}") from None
    inputs, into = list(graph.find_nodes(op="placeholder")), {}
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is aten.copy_.default:
            into[node.args[1]] = inputs.index(node.args[0])
            graph.erase_node(node)
    end = graph.output_node()
    several = isinstance(end.args[0], list | tuple)
    results = list(end.args[0] if several else end.args)
    _check_nodes(graph, results, args[0].device)
    stored = list(dict.fromkeys([*into, *(r for r in results if r not in inputs)]))
    full = torch.broadcast_shapes(*(a.shape for a in args))
    if full.numel() > 2**31 - 2**20:
        raise CannotFuse(f"a result of {full.numel():,} elements: the kernel's offsets have 32 bits")
    for node in stored:
        if node.meta["val"].shape != full:
            raise CannotFuse(
                f"a result has shape {list(node.meta['val'].shape)} where the kernel has {list(full)}"
            )
    returns = [("in", inputs.index(r)) if r in inputs else ("in", into[r]) if r in into else
               ("out", stored.index(r)) for r in results]  # fmt: skip
    graph.erase_node(end)
    graph.output(tuple(stored))
    graph.eliminate_dead_code()
    made = [into.get(node, node.meta["val"].dtype) for node in stored]
    shapes = [_flat(a.shape, full) for a in args]
    return Traced(graph, shapes, full, made, returns if several else returns[0])


def _check_arguments(args):
    for k, a in enumerate(args):
        if not isinstance(a, torch.Tensor) or a.dtype not in FLOATS or not a.is_contiguous():
            what = f"{a.dtype} of strides {a.stride()}" if isinstance(a, torch.Tensor) else type(a).__name__
            raise CannotFuse(
                f"argument {k} is {what}: expected a contiguous float32, float16 or bfloat16 tensor"
            )
    if not args or len({a.device for a in args}) > 1:
        raise CannotFuse("expected tensors of one device")
    if torch.is_grad_enabled() and any(a.requires_grad for a in args):
        raise CannotFuse(
            "an argument requires gradients and a fused function has no backward: use torch.no_grad()"
        )


def _check_nodes(graph, results, device):
    if not all(isinstance(r, fx.Node) for r in results):
        raise CannotFuse("the function must return tensors that it computed from its arguments")
    for node in graph.nodes:
        if node.op == "get_attr":
            raise CannotFuse("the function uses a tensor that is not an argument: pass it as one")
        if node.op != "call_function":
            continue
        name, value = str(node.target).removeprefix("aten."), node.meta["val"]
        if node.target not in TRITON:
            what = "not point-wise" if torch.Tag.pointwise not in node.target.tags else "not in fusion.TRITON"
            raise CannotFuse(f"{name} is {what}")
        if options := node.kwargs.keys() - {"dtype", "device", "layout", "pin_memory", "memory_format"}:
            raise CannotFuse(f"{name} is called with {', '.join(options)}, which fusion.TRITON leaves out")
        if value.device != device:
            raise CannotFuse("the function copies to another device")
        cast = node.target is aten._to_copy.default and value.dtype == torch.bool
        if value.dtype not in (*FLOATS, torch.bool) or cast:
            raise CannotFuse(f"{name} gives {value.dtype}, and the kernel computes in float32")


def _flat(shape, full):
    "The shape of an input of a result of shape `full`, as if both had at most two dimensions."
    columns = full[-1] if full else 1
    rows = math.prod(full[:-1])
    if shape == full:
        return (rows, columns)
    if math.prod(shape) == 1:
        return ()
    if shape[-1] == columns and math.prod(shape) == columns:
        return (columns,)
    if shape[-1] == 1 and shape[:-1] == full[:-1]:
        return (rows, 1)
    raise CannotFuse(
        f"an input of shape {list(shape)} beside a result of {list(full)}: expected a row or a column"
    )


_numbers = itertools.count()


def build(source, device="cpu"):
    "The kernel in a source text, for `device` 'cuda', or 'cpu' (Triton's interpreter): kernel[grid](…)."
    import triton
    import triton.language as tl

    # Triton reads the text of a function, so the text must be found.
    path = f"<fused kernel {next(_numbers)}>"
    linecache.cache[path] = (len(source), None, source.splitlines(True), path)
    made = []

    class Decorators:
        jit = staticmethod(made.append)
        cdiv = staticmethod(triton.cdiv)

    space = {"triton": Decorators, "tl": tl, "__name__": "fused_kernels"}
    exec(compile(source, path, "exec"), space)
    if len(made) != 1:
        raise ValueError(f"the source has {len(made)} functions under @triton.jit: expected one")
    # Not by triton.jit, which interprets all kernels of a process or none.
    if device == "cuda":
        from triton.runtime.jit import JITFunction

        return JITFunction(made[0])
    from course_lib.kernels import interpret

    return interpret.interpreter.InterpretedFunction(made[0])


def fuse(fn, generate):
    "`fn` as one kernel whose source `generate(graph, shapes)` writes; returns a `Fused`."
    return Fused(fn, generate)


class Fused:
    """A point-wise function as one kernel.

    It is traced at the first call, and again for other shapes, dtypes or devices, and where a number that
    `fn` finds outside itself has changed. What `fn` changes in place is changed.
    """

    def __init__(self, fn, generate):
        self.fn, self.generate, self._plans = fn, generate, {}
        self.source = self.bytes = None

    def __call__(self, *args):
        about = (
            (a.shape, a.stride(), a.dtype, a.device, a.requires_grad) for a in args if torch.is_tensor(a)
        )
        key = (*about, len(args), _outside(self.fn))
        if key not in self._plans:
            traced = trace(self.fn, *args)
            source = self.generate(traced.graph, traced.shapes)
            self._plans[key] = traced, source, build(source, args[0].device.type)
        traced, self.source, kernel = self._plans[key]
        changed = [k for k in traced.made if isinstance(k, int)]
        if changed and len({a.untyped_storage().data_ptr() for a in args}) < len(args):
            raise CannotFuse(
                "an argument is changed in place and shares memory with another: clone one of them"
            )
        new = [args[m] if isinstance(m, int) else torch.empty(traced.full, dtype=m, device=args[0].device)
               for m in traced.made]  # fmt: skip
        n = math.prod(traced.full)
        if n and new:
            kernel[(-(-n // BLOCK),)](*args, *new, n, BLOCK=BLOCK, num_warps=WARPS)
        used = [
            a for a, node in zip(args, traced.graph.find_nodes(op="placeholder"), strict=True) if node.users
        ]
        self.bytes = sum(t.nbytes for t in (*used, *new))
        found = {"in": args, "out": new}
        if isinstance(traced.returns, tuple):
            return found[traced.returns[0]][traced.returns[1]]
        return tuple(found[where][k] for where, k in traced.returns)


def _outside(fn):
    "The numbers that a function finds outside itself: they are constants of its kernel."
    code = getattr(fn, "__code__", None)
    if code is None:
        return ()
    found = [fn.__globals__.get(name) for name in code.co_names] + list(fn.__defaults__ or ())
    found += [c.cell_contents for c in fn.__closure__ or ()]
    return tuple(repr(v) for v in found if isinstance(v, int | float))


def require_equal(ways, make):
    "Raise AssertionError unless {label: function} agree on clones of the tensors that `make()` gives."
    given, results = make(), {}
    for label, fn in ways.items():
        args = [a.clone() for a in given]
        out = fn(*args)
        results[label] = [*(out if isinstance(out, tuple) else [out]), *args]
    first = next(iter(results.values()))
    for label, got in results.items():
        for a, b in zip(first, got, strict=True):
            rtol, atol = (1e-4, 1e-5) if a.dtype == torch.float32 else (2e-2, 3e-2)
            assert torch.allclose(a.float(), b.float(), rtol=rtol, atol=atol), (
                f"{label} differs from the first"
            )


def kernel_text(code):
    "The first kernel in the code that Inductor wrote, in Triton or in C++, without what stands around it."
    import re

    found = re.search(r"^def triton_\w+\(.*?(?=^\'\'\')", code, re.DOTALL | re.MULTILINE) or re.search(
        r"^extern \"C\" .*?^}", code, re.DOTALL | re.MULTILINE
    )
    return found[0].rstrip() if found else code


def recognised(fn, training):
    "Does Inductor put fused attention in place of fn(q, k, v)? Its passes run, and no code is made."
    from torch._dynamo.utils import counters
    from torch._inductor import compile_fx

    def backend(graph, inputs):
        return compile_fx.compile_fx(graph, inputs, inner_compile=lambda graph, inputs, **_: graph.forward)

    torch._dynamo.reset()
    counters["inductor"].clear()
    qkv = (torch.randn(2, 3, 16, 8, requires_grad=training) for _ in range(3))
    torch.compile(fn, backend=backend, fullgraph=True)(*qkv)
    torch._dynamo.reset()
    return counters["inductor"]["fuse_attention"] > 0

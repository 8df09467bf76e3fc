"""Writes a captured graph as the source of one Triton kernel, and builds and runs such a source.

Each program of the kernel takes BLOCK elements: it loads what the outputs need of each input once, computes
each node once, and stores each output once. Where all tensors lie in memory alike, element i of one is
element i of the others; otherwise the index is taken apart into those of the dimensions, as few as will do.

float16 and bfloat16 are loaded as float32 and rounded when they are stored, or where the function itself
casts: a value on its way through the kernel is never rounded, as in code from torch.compile, so a fused chain
is nearer to the exact result than the same chain of operators.
"""

import itertools
import linecache
import math
import re

import torch

from course_lib.fusion.graph import CannotFuse, Node

NAN = "propagate_nan=tl.PropagateNan.ALL"  # as torch does; a plain tl.maximum drops a NaN
# Triton's -x is 0 - x, whose zeros have the wrong sign.
TRITON = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "{0} / {1}", "neg": "{0} * -1",
    "abs": "tl.abs({0})", "exp": "tl.exp({0})", "exp2": "tl.exp2({0})", "log": "tl.log({0})",
    "log2": "tl.log2({0})", "sqrt": "tl.sqrt({0})", "rsqrt": "tl.rsqrt({0})", "reciprocal": "1.0 / {0}",
    "square": "{0} * {0}", "sin": "tl.sin({0})", "cos": "tl.cos({0})", "erf": "tl.erf({0})",
    "floor": "tl.floor({0})", "ceil": "tl.ceil({0})",
    "sigmoid": "1.0 / (1.0 + tl.exp(-{0}))", "silu": "{0} / (1.0 + tl.exp(-{0}))",
    # Near 0 the quotient would lose its digits, so there the series is taken.
    "tanh": "tl.where(tl.abs({0}) < 0.3, {0} * (1.0 + {0} * {0} * (-0.3333333333333333 + {0} * {0} * ("
            "0.13333333333333333 + {0} * {0} * (-0.05396825396825397 + {0} * {0} * 0.021869488536155203)))), "
            "1.0 - 2.0 / (1.0 + tl.exp(2.0 * {0})))",
    "relu": f"tl.maximum({{0}}, 0, {NAN})",
    "leaky_relu": "tl.where({0} > 0.0, {0}, {0} * {1})",
    "gelu": "0.5 * {0} * (1.0 + tl.erf({0} * 0.7071067811865476))",
    "gelu_tanh": "{0} / (1.0 + tl.exp(-1.5957691216057308 * {0} * (1.0 + 0.044715 * {0} * {0})))",
    "maximum": f"tl.maximum({{0}}, {{1}}, {NAN})", "minimum": f"tl.minimum({{0}}, {{1}}, {NAN})",
    "clamp_min": f"tl.maximum({{0}}, {{1}}, {NAN})", "clamp_max": f"tl.minimum({{0}}, {{1}}, {NAN})",
    "clamp": f"tl.minimum(tl.maximum({{0}}, {{1}}, {NAN}), {{2}}, {NAN})",
    "where": "tl.where({0}, {1}, {2})",
    "lt": "{0} < {1}", "le": "{0} <= {1}", "gt": "{0} > {1}", "ge": "{0} >= {1}",
    "eq": "{0} == {1}", "ne": "{0} != {1}", "isnan": "{0} != {0}",
    "bitwise_and": "{0} & {1}", "bitwise_or": "{0} | {1}", "bitwise_xor": "{0} ^ {1}",
    "bitwise_not": "~{0}", "logical_not": "{0} == 0", "logical_and": "{0} & {1}", "logical_or": "{0} | {1}",
}  # fmt: skip
COMPARES = {"lt", "le", "gt", "ge", "eq", "ne"}
SAME = {"clone", "spread"}  # no code of their own
LOGICAL = {"logical_and", "logical_or", "logical_not"}
DTYPES = {
    torch.float32: "tl.float32", torch.float16: "tl.float16", torch.bfloat16: "tl.bfloat16",
    torch.float64: "tl.float64", torch.int32: "tl.int32", torch.int64: "tl.int64", torch.bool: "tl.int1",
}  # fmt: skip
HALF = (torch.float16, torch.bfloat16)


class Layout:
    """How one pass over the elements finds those of each tensor.

    `sizes` are the dimensions that are told apart, the last varies fastest; `strides[tensor]` are a tensor's
    steps along them, in elements.
    """

    def __init__(self, shape, tensors):
        "`tensors` broadcast to `shape`; one that is not used is None."
        full = next(
            (t for t in tensors if t is not None and t.shape == shape and min(t.stride(), default=1)), None
        )
        order = [d for d in range(len(shape)) if shape[d] != 1]
        if full is not None:  # in the order of memory
            order.sort(key=lambda d: -full.stride(d))
        spread = [[0] * len(shape) if t is None else _expanded_strides(t, shape) for t in tensors]
        merged = []
        for size, steps in ((shape[d], [s[d] for s in spread]) for d in order):
            if merged and all(a == b * size for a, b in zip(merged[-1][1], steps, strict=True)):
                merged[-1] = (merged[-1][0] * size, steps)
            else:
                merged.append((size, steps))
        self.n = math.prod(shape)
        self.sizes = [size for size, _ in merged]
        self.strides = [[steps[k] for _, steps in merged] for k in range(len(tensors))]
        ends = [sum((n - 1) * s for n, s in zip(self.sizes, steps, strict=True)) for steps in self.strides]
        self.wide = max([self.n, *ends]) >= 2**31 - 2**20  # offsets need 64 bits

    def index(self, k):
        "Where in tensor k element i is found, as code."
        steps = self.strides[k]
        if not any(
            steps
        ):  # one element for all; as a tile, for the interpreter doesn't compare scalars right
            return "i * 0"
        if steps == [math.prod(self.sizes[d + 1 :]) for d in range(len(self.sizes))]:
            return "i"
        return " + ".join(f"i{d}" if s == 1 else f"i{d} * {s}" for d, s in enumerate(steps) if s)

    def first_only(self, k):
        "For an output smaller than the whole: the code of which programs' elements store it, or ''."
        return "".join(f" & (i{d} == 0)" for d, step in enumerate(self.strides[k]) if not step)

    def dimensions(self, used):
        "Lines that take the element's number apart into the dimensions' names in `used`."
        inner = 1
        for d in reversed(range(len(self.sizes))):
            code = "i" if inner == 1 else f"i // {inner}"
            if d:
                code += f" % {self.sizes[d]}"
            if any(re.search(rf"\bi{d}\b", text) for text in used):
                yield f"i{d} = {code}"
            inner *= self.sizes[d]


def _expanded_strides(t, shape):
    missing = len(shape) - t.dim()
    own = [0 if size == 1 else step for size, step in zip(t.shape, t.stride(), strict=True)]
    return [0] * missing + own


def kernel_source(graph, layout, written, name="fused"):
    """The source of the kernel of a simplified graph whose nodes have `like`.

    `layout` is that of the inputs followed by the outputs. `written` has for each output the number of the
    input into whose memory it goes, or None for memory of its own.
    """
    names, needed = graph.names(), graph.needed()
    loads, body, stores = [], [], []
    for k, node in enumerate(graph.inputs):
        if node in needed:
            names[node] = f"x{k}"
            load = f"tl.load(in{k} + {layout.index(k)}, mask=m)"
            if node.like.dtype == torch.bool:
                load += ".to(tl.int1)"
            loads.append(f"x{k} = {load}{'.to(tl.float32)' if node.like.dtype in HALF else ''}")
    for node in graph.nodes:
        if node.op in SAME:
            names[node] = names[node.args[0]]
        elif node in needed:
            body.append(f"{names[node]} = {_expression(node, names)}")
    for j, (node, into) in enumerate(zip(graph.outputs, written, strict=True)):
        k = len(graph.inputs) + j
        pointer = f"out{j}" if into is None else f"in{into}"
        value = names[node]
        if node.like.dtype in HALF:
            value += f".to({DTYPES[node.like.dtype]})"
        stores.append(f"tl.store({pointer} + {layout.index(k)}, {value}, mask=m{layout.first_only(k)})")
    start = "tl.program_id(0).to(tl.int64)" if layout.wide else "tl.program_id(0)"
    pointers = [f"in{k}" for k, node in enumerate(graph.inputs) if node in needed or k in written]
    pointers += [f"out{j}" for j, into in enumerate(written) if into is None]
    lines = [
        f"i = {start} * BLOCK + tl.arange(0, BLOCK)",
        "m = i < n",
        *layout.dimensions([*loads, *stores]),
        *loads, *body, *stores,
    ]  # fmt: skip
    head = f"@triton.jit\ndef {name}({', '.join(pointers)}, n, BLOCK: tl.constexpr):\n"
    return head + "".join(f"    {line}\n" for line in lines)


def _expression(node, names):
    out = node.like.dtype
    if node.op == "full":
        code = literal(node.args[0], out)
        return code if "tl." in code else f"tl.full([BLOCK], {code}, {DTYPES[_held(out)]})"
    if node.op == "to":
        source = node.sources[0]
        return _cast(names[source], source.like.dtype, out)
    want = _computed_in(node)
    args = []
    for k, a in enumerate(node.args):
        dtype = torch.bool if node.op in ("where",) and k == 0 else want
        if isinstance(a, Node):
            # A value is compared as it is in the common dtype; elsewhere nothing is rounded on the way.
            into = dtype if node.op in COMPARES else _held(dtype)
            args.append(_cast(names[a], a.like.dtype, into))
        else:
            args.append(_number(a, dtype, exact=node.op not in COMPARES))
    if node.op == "pow":
        return _power(args[0], node.args[1])
    if node.op == "bitwise_not" and out == torch.bool:
        return f"{args[0]} == 0"
    if node.op not in TRITON:
        raise unknown(node.op)
    args = [_bracketed(a) for a in args]
    template = TRITON[node.op]
    if want == torch.float64:  # Triton takes a number in the code for a float32
        template = re.sub(
            r"(?<![\w.])\d+\.\d+", r"tl.full((), \g<0>, tl.float64)", template.replace("0.3,", "0.01,")
        )
    return template.format(*args)


def _bracketed(code):
    "An operand: a name or a number as it is, anything else in brackets."
    return code if re.fullmatch(r"[\w.]+", code) else f"({code})"


def unknown(op):
    "The error for an operator that the fuser doesn't know."
    return CannotFuse(
        f"the fuser doesn't know the operator {op}: write it with operators that it knows "
        "(fusion_codegen.TRITON lists them), or call it outside the fused function"
    )


def _computed_in(node):
    "The dtype in which torch computes an operator."
    if node.op in COMPARES:
        dtype = torch.result_type(*(a.like if isinstance(a, Node) else a for a in node.args))
        return torch.int32 if dtype == torch.bool else dtype  # one bit is a signed number to some
    if node.op in LOGICAL:
        return torch.bool
    if node.op == "isnan":
        return node.sources[0].like.dtype
    return node.like.dtype


def _held(dtype):
    "In what a kernel holds values of a dtype."
    return torch.float32 if dtype in HALF else dtype


def _cast(code, have, want):
    if have == want:
        return code
    if want == torch.bool:
        return f"({code} != 0)"
    if want in HALF:
        # By way of float32: Triton's interpreter has no other way to bfloat16.
        first = "" if _held(have) == torch.float32 else ".to(tl.float32)"
        return f"{code}{first}.to({DTYPES[want]}).to(tl.float32)"
    return code if _held(have) == want else f"{code}.to({DTYPES[want]})"


def _number(value, dtype, exact=True):
    "A Python number as an operand, of `dtype`."
    if dtype in HALF and not exact:
        value = torch.tensor(
            value, dtype=dtype
        ).item()  # torch compares with the number as it is in x's dtype
    code = literal(value, dtype)
    # Triton takes a Python float for a float32.
    return f"tl.full((), {code}, tl.float64)" if dtype == torch.float64 and "tl." not in code else code


def literal(value, dtype):
    "A Python number as code."
    if dtype == torch.bool:
        return repr(bool(value))
    if not dtype.is_floating_point:
        return repr(int(value))
    value = float(value)
    if value == 0 and math.copysign(1, value) < 0:  # of a constant zero Triton forgets the sign
        return f"(tl.full([BLOCK], 0.0, {DTYPES[_held(dtype)]}) * -1.0)"
    return repr(value) if math.isfinite(value) else f'float("{value}")'


MOST_POWERS = 8


def check_power(exponent, integers):
    "Raise `CannotFuse` unless x ** exponent becomes a few multiplications or a root."
    whole = float(exponent).is_integer() and abs(exponent) <= MOST_POWERS
    if not whole and (integers or exponent not in (0.5, -0.5)):
        raise CannotFuse(
            f"the fuser doesn't know x ** {exponent}: it knows whole exponents from "
            f"-{MOST_POWERS} to {MOST_POWERS}, 0.5 and -0.5"
        )


def _power(x, exponent):
    x = _bracketed(x)
    if exponent in (0.5, -0.5):
        return f"tl.sqrt({x})" if exponent > 0 else f"tl.rsqrt({x})"
    product = " * ".join([x] * int(abs(exponent)))
    return product if exponent > 0 else f"1.0 / ({product})"


_numbers = itertools.count()


def build(source, device):
    "A source text as a kernel for `device`, 'cuda' or 'cpu' (by Triton's interpreter); kernel[grid](…)."
    import triton
    import triton.language as tl

    # The source must be findable: Triton reads the text of a function, not the function.
    path = f"<fused kernel {next(_numbers)}>"
    linecache.cache[path] = (len(source), None, source.splitlines(True), path)
    made = []

    class Decorators:
        jit = staticmethod(made.append)
        cdiv = staticmethod(triton.cdiv)

    space = {"triton": Decorators, "tl": tl, "__name__": "fused_kernels"}
    exec(compile(source, path, "exec"), space)
    space["triton"] = triton
    if len(made) != 1:
        raise ValueError(f"the source has {len(made)} functions under @triton.jit; expected one")
    # Not by triton.jit, which interprets all kernels of a process or none.
    if device == "cuda":
        from triton.runtime.jit import JITFunction

        return JITFunction(made[0])
    from course_lib.kernels import interpret

    return interpret.interpreter.InterpretedFunction(made[0])

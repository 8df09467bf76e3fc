"""A fusing compiler read in one sitting: capture a function, write its graph as one Triton kernel, launch it.

It knows float32 tensors that are contiguous, at most two dimensions and pure functions; `fusion` knows the
rest. It is the fourth generation of framework (the other three are in `fusion_generations`), and what
exercises fusion.2 and fusion.3 ask for.
"""

import torch

from course_lib.fusion.codegen import TRITON, build, literal
from course_lib.fusion.graph import CannotCapture, Graph, Node

BLOCK = 1024


class Proxy:
    "Stands for a tensor while a function is captured: what is done with it is written into a graph."

    def __init__(self, graph, node):
        self.graph, self.node = graph, node

    def record(self, op, *args):
        "Add a node for `op` to the graph; `args` are proxies and numbers, in the operator's order."
        nodes = [a.node if isinstance(a, Proxy) else a for a in args]
        return Proxy(self.graph, self.graph.add(op, *nodes))

    def __add__(self, other):
        return self.record("add", self, other)

    def __radd__(self, other):
        return self.record("add", other, self)

    def __sub__(self, other):
        return self.record("sub", self, other)

    def __rsub__(self, other):
        return self.record("sub", other, self)

    def __mul__(self, other):
        return self.record("mul", self, other)

    def __rmul__(self, other):
        return self.record("mul", other, self)

    def __truediv__(self, other):
        return self.record("div", self, other)

    def __rtruediv__(self, other):
        return self.record("div", other, self)

    def __pow__(self, other):
        return self.record("pow", self, other)

    def __rpow__(self, other):
        return self.record("pow", other, self)

    def __matmul__(self, other):
        return self.record("matmul", self, other)

    def __neg__(self):
        return self.record("neg", self)

    def __lt__(self, other):
        return self.record("lt", self, other)

    def __le__(self, other):
        return self.record("le", self, other)

    def __gt__(self, other):
        return self.record("gt", self, other)

    def __ge__(self, other):
        return self.record("ge", self, other)

    def __bool__(self):
        raise CannotCapture("`if` asks for a value, and a graph has none: write torch.where(condition, a, b)")

    def __getattr__(self, op):
        "A method, x.exp(): recorded under its own name."
        if op.startswith("_"):
            raise AttributeError(op)
        return lambda *args: self.record(op, self, *args)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        "A function of torch that was given a proxy, torch.exp(x): recorded under its own name."
        proxy = next(a for a in args if isinstance(a, Proxy))
        return proxy.record(func.__name__, *args, *(kwargs or {}).values())


def capture(fn, count):
    "The `Graph` of `fn`, which is called once, with `count` proxies in place of tensors."
    graph = Graph()
    out = fn(*[Proxy(graph, graph.input()) for _ in range(count)])
    graph.outputs = [proxy.node for proxy in (out if isinstance(out, tuple | list) else [out])]
    return graph


def generate(graph, shapes):
    """The source of one Triton kernel for a graph: `fused(in0, …, out0, …, n, BLOCK)`.

    `shapes` has the shape of each input, (rows, columns), (columns,), (rows, 1) or (); all are contiguous
    float32. Each output has the broadcast shape (rows, columns) and n elements.
    """
    full = torch.broadcast_shapes(*shapes)
    columns = full[-1] if full else 1
    names, needed = graph.names(), graph.needed()
    pointers = [f"in{k}" for k in range(len(graph.inputs))] + [f"out{k}" for k in range(len(graph.outputs))]
    lines = [
        "@triton.jit",
        f"def fused({', '.join(pointers)}, n, BLOCK: tl.constexpr):",
        "i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)",
        "m = i < n",
    ]
    for k, (node, shape) in enumerate(zip(graph.inputs, shapes, strict=True)):
        if node in needed:
            names[node] = f"x{k}"
            lines.append(f"x{k} = tl.load(in{k} + {_index(shape, full, columns)}, mask=m, other=0.0)")
    for node in graph.nodes:
        if node in needed:
            operands = [names[a] if isinstance(a, Node) else literal(a, torch.float32) for a in node.args]
            lines.append(f"{names[node]} = {TRITON[node.op].format(*operands)}")
    for k, node in enumerate(graph.outputs):
        lines.append(f"tl.store(out{k} + i, {names[node]}, mask=m)")
    return "\n".join(lines[:2] + ["    " + line for line in lines[2:]]) + "\n"


def _index(shape, full, columns):
    "Where in an input of this shape element i of the whole (rows, columns) is found."
    shape = (1,) * (len(full) - len(shape)) + tuple(shape)
    if shape == tuple(full):
        return "i"
    row, column = shape[:1] == tuple(full[:1]), shape[-1:] == tuple(full[-1:])
    if len(full) == 2 and row and full[0] > 1:
        return f"i // {columns}"
    if column and columns > 1:
        return f"i % {columns}"
    return "i * 0"


def launch(source, tensors, shape, outputs=1):
    """Run the kernel of `source` on `tensors`; returns a list of `outputs` new float32 tensors of `shape`.

    On a GPU it is compiled; CPU tensors go through Triton's interpreter.
    """
    device = tensors[0].device if tensors else torch.device("cpu")
    made = [torch.empty(shape, device=device) for _ in range(outputs)]
    n = made[0].numel()
    if n:
        kernel = build(source, device.type)
        kernel[(-(-n // BLOCK),)](*tensors, *made, n, BLOCK=BLOCK)
    return made

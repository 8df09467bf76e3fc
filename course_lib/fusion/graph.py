"""A graph of operators: what capturing a function leaves, and what a fusing compiler reads.

graph = Graph()
x = graph.input()
graph.outputs.append(graph.add("mul", graph.add("exp", x), 2.0))
print(graph)                # in0 · a = exp(in0) · b = mul(a, 2.0) · return b
graph.run(tensor)           # a list: the outputs, one torch operator after another
"""

import itertools
import operator

import torch
from torch.nn import functional as F


class CannotCapture(TypeError):
    "A function does what has no place in a graph; says what, and what to do."


class CannotFuse(ValueError):
    "A graph can't become one kernel; says why, and what to do."


class Node:
    """One operator, or an input (its op is "input"): `args` are nodes and Python numbers, in order.

    `like` is a tensor without data that has the shape, strides and dtype of the value; None in graphs that
    were captured without shapes.
    """

    __slots__ = ("args", "like", "op")

    def __init__(self, op, args=(), like=None):
        self.op, self.args, self.like = op, tuple(args), like

    def __repr__(self):
        return f"<{self.op}>"

    @property
    def sources(self):
        "The arguments that are nodes."
        return [a for a in self.args if isinstance(a, Node)]


class Graph:
    "Inputs, nodes in the order in which they were recorded, and outputs."

    def __init__(self):
        self.inputs, self.nodes, self.outputs = [], [], []

    def input(self, like=None):
        "Add an input; returns its node."
        self.inputs.append(Node("input", (), like))
        return self.inputs[-1]

    def add(self, op, *args, like=None):
        "Add an operator of nodes and numbers; returns its node."
        self.nodes.append(Node(op, args, like))
        return self.nodes[-1]

    def needed(self):
        "The set of nodes, inputs included, on which an output depends."
        found, todo = set(), list(self.outputs)
        while todo:
            node = todo.pop()
            if node not in found:
                found.add(node)
                todo += node.sources
        return found

    def simplified(self):
        "The same graph without dead code, and with equal nodes computed once."
        out, new, known = Graph(), {}, {}
        needed = self.needed()
        for node in self.inputs:
            new[node] = out.input(node.like)
        for node in self.nodes:
            if node in needed:
                args = [new.get(a, a) if isinstance(a, Node) else a for a in node.args]
                # -0.0 equals 0.0, and True equals 1: numbers are the same when they print the same.
                key = (node.op, *(id(a) if isinstance(a, Node) else (type(a), repr(a)) for a in args))
                if node.like is not None:
                    key += (node.like.dtype, node.like.shape, node.like.stride())
                if key not in known:
                    known[key] = out.add(node.op, *args, like=node.like)
                new[node] = known[key]
        out.outputs = [new[node] for node in self.outputs]
        return out

    def run(self, *tensors):
        "The outputs for these inputs, as a list: each needed node is one torch operator, or a few."
        if len(tensors) != len(self.inputs):
            raise TypeError(f"the graph has {len(self.inputs)} inputs and was given {len(tensors)} tensors")
        values, needed = dict(zip(self.inputs, tensors, strict=True)), self.needed()
        for node in self.nodes:
            if node in needed:
                args = [values[a] if isinstance(a, Node) else a for a in node.args]
                if node.op == "full":
                    values[node] = torch.full_like(node.like, args[0], device=tensors[0].device)
                elif node.op == "spread":
                    values[node] = args[0].expand(node.like.shape)
                else:
                    values[node] = torch_op(node.op)(*args)
        return [values[node] for node in self.outputs]

    def names(self):
        "A short name for each node: in0, in1, … for inputs, a, b, … for operators."
        named = {node: f"in{i}" for i, node in enumerate(self.inputs)}
        for node, name in zip(self.nodes, _letters(), strict=False):
            named[node] = name
        return named

    def __str__(self):
        named = self.names()

        def shown(a):
            return named[a] if isinstance(a, Node) else str(a).removeprefix("torch.")

        lines = [", ".join(named[node] for node in self.inputs)]
        lines += [f"{named[n]} = {n.op}({', '.join(map(shown, n.args))})" for n in self.nodes]
        return "\n".join([*lines, f"return {', '.join(map(shown, self.outputs))}"])


def _letters():
    for size in itertools.count(1):
        for letters in itertools.product("abcdefghijklmnopqrstuvwxyz", repeat=size):
            # Not a name that a kernel uses for something else.
            if (name := "".join(letters)) not in KEPT_NAMES:
                yield name


KEPT_NAMES = {"i", "n", "m", "tl", "as", "if", "in", "is", "or", "do"}

PYTHON = {op: getattr(operator, op) for op in ("add", "sub", "mul", "pow", "neg", "lt", "le", "gt", "ge")}
PYTHON |= {"div": operator.truediv, "eq": operator.eq, "ne": operator.ne}
SPECIAL = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "leaky_relu": F.leaky_relu,
    "to": lambda x, dtype: x.to(dtype),
    "clone": torch.clone,
}


def torch_op(op):
    "The function that computes operator `op` on tensors and numbers."
    found = PYTHON.get(op) or SPECIAL.get(op) or getattr(torch, op, None)
    if found is None:
        raise CannotFuse(f"there is no operator {op!r} in torch")
    return found

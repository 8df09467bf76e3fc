"What the checks of lesson fusion's first half draw anew: chains, functions to capture, graphs to fuse."

import operator
import random
from dataclasses import dataclass

import torch

from course_lib.fusion.graph import Graph, Node

COMPARISONS = ("lt", "le", "gt", "ge")


# --- chains -------------------------------------------------------------------------


@dataclass
class Chain:
    "Inputs by name with their shapes, steps as (name, *operands), and the names of the results."

    shapes: dict
    steps: list
    results: list

    def run(self, tensors):
        "Every value by its name: each step is one operator of torch."
        values = dict(tensors)
        for name, *operands in self.steps:
            given = [values[a] if isinstance(a, str) else a for a in operands]
            found = [a for a in given if isinstance(a, torch.Tensor)]
            number = next((a for a in given if not isinstance(a, torch.Tensor)), None)
            if len(found) == 3:
                values[name] = torch.addcmul(*found)
            elif len(found) == 2:
                values[name] = torch.add(*found, alpha=number or 1)
            else:
                values[name] = found[0].exp() if number is None else found[0] + number
        return values


def chain(case):
    "A random chain. What an answer can get wrong is in it at fixed cases, and in others by chance."
    rows, columns = random.sample(range(3, 40), 2)
    shapes = {"x": (rows, columns), "y": (rows, columns)}
    shapes |= {"bias": (columns,), "scale": (rows, 1)} if case % 3 else {"one": ()}
    names, steps = list(shapes), []
    for k in range(random.randrange(3, 8)):
        kind = (case + k) % 5
        known = [*names[-3:], *random.sample(names, 2)]
        a, b, c = random.sample(known, 3)
        operands = {
            0: [a, b],
            1: [a, a],
            2: [a, round(random.uniform(-2, 2), 2) or 1.5],
            3: [a, b, c],
            4: [a],
        }[kind]
        steps.append((f"t{k}", *operands))
        names.append(f"t{k}")
    done = [name for name, *_ in steps]
    results = random.sample(done, 1 + (case % 4 == 1) + (case % 8 == 5))
    return Chain(shapes, steps, results)


# --- functions to capture -----------------------------------------------------------


@dataclass
class Recipe:
    """A function as steps: (python, op, operands) with `python` its way to write the operator.

    `expected` are the graph's nodes as (op, operands), values named in0, … and v0, …, numbers as they are.
    """

    count: int
    steps: list
    results: list

    @property
    def expected(self):
        return [(op, args) for _, op, args in self.steps]

    def run(self, *inputs):
        values = {f"in{k}": x for k, x in enumerate(inputs)}
        for k, (python, _, args) in enumerate(self.steps):
            values[f"v{k}"] = python(*(values.get(a, a) if isinstance(a, str) else a for a in args))
        out = tuple(values[r] for r in self.results)
        return out if len(out) > 1 else out[0]

    def __str__(self):
        lines = [f"v{k} = {op}({', '.join(map(str, args))})" for k, (_, op, args) in enumerate(self.steps)]
        return f"for {'; '.join(lines)}; return {', '.join(self.results)}"


BINARY = {"add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv}
UNARY = ("exp", "tanh", "sigmoid", "abs", "relu", "sqrt")


def recipe(case):
    "A random function of 1 to 3 inputs; an operator is written in each of its forms."
    count = 1 + case % 3
    values, steps = [f"in{k}" for k in range(count)], []
    used = values[:-1] or values  # with several inputs, one may stay unused
    for k in range(random.randrange(4, 9)):
        a, b = random.choice(used), random.choice(used)
        number = random.choice([2, 3, 0.5, -1.25, 1.5, round(random.uniform(0.1, 3), 3)])
        form = (case + k) % 10
        op, reflected = random.choice(list(BINARY)), list(BINARY)[case % 4]  # each of the four in turn
        step = {
            0: (BINARY[op], op, (a, b)),
            1: (BINARY[reflected], reflected, (number, a)),
            2: (BINARY[op], op, (a, number)),
            3: (lambda x: -x, "neg", (a,)),
            4: _method(a),
            5: _function(a),
            6: (torch.maximum, "maximum", (a, b)),
            7: (operator.pow, "pow", [(a, 2), (2.0, a)][case % 2]),
            8: None,
            9: (torch.sub, "sub", (a, b)),
        }[form]
        if step is None:
            way = random.choice(COMPARISONS)
            steps.append((getattr(operator, way), way, (a, random.choice([b, number]))))
            used = [*used, f"v{len(steps) - 1}"]
            branches = [(a, b), (number, b), (a, number)][case % 3]
            step = (torch.where, "where", (used.pop(), *branches))
        steps.append(step)
        used = [*used, f"v{len(steps) - 1}"]
    results = [f"v{len(steps) - 1}"]
    if case % 4 == 1:
        results = [random.choice(used), *results]
    if case % 4 == 3:
        results = [*results, "in0", results[0]]
    return Recipe(count, steps, results)


def _method(a):
    name = random.choice(UNARY)
    return operator.methodcaller(name), name, (a,)


def _function(a):
    name = random.choice(UNARY)
    return getattr(torch, name), name, (a,)


def _branches(x):
    return x * 2.0 if x > 0 else x - 1.0


def _loops(x):
    while x.exp() < 2.0:
        x = x + 1.0
    return x


UNCAPTURABLE = {"`if x > 0`": _branches, "`while x.exp() < 2.0`": _loops}


def walk(graph, tensors):
    "The outputs of a graph, by a walk from each of them."
    values = {id(n): t for n, t in zip(graph.inputs, tensors, strict=True)}

    def value(a):
        if not isinstance(a, Node):
            return a
        if id(a) not in values:
            fn = BINARY.get(a.op) or getattr(
                operator, a.op if a.op in (*COMPARISONS, "pow", "neg") else "", None
            )
            values[id(a)] = (fn or getattr(torch, a.op))(*map(value, a.args))
        return values[id(a)]

    return [value(n) for n in graph.outputs]


def reached(graph):
    "The ids of the nodes on which an output depends."
    found, todo = set(), list(graph.outputs)
    while todo:
        node = todo.pop()
        if id(node) not in found:
            found.add(id(node))
            todo += [a for a in node.args if isinstance(a, Node)]
    return found


# --- graphs to fuse -----------------------------------------------------------------


def graph(case):
    """A random graph, its inputs' shapes, and the whole shape.

    Each has a value that is used twice, a number before an operand, dead code and an input that only dead
    code needs; from case to case the kinds of broadcast, the outputs and an input that nothing needs differ.
    """
    rows, columns = random.sample(range(3, 12), 2)
    full = (rows, columns)
    shapes = [[full, (columns,), (rows, 1)], [full, (), (columns,)], [(rows, 1), (columns,), ()],
              [full, full, (rows, 1)], [(columns,), full, (columns,)]][case % 5]  # fmt: skip
    shapes = [*shapes, random.choice([full, (columns,)])]
    if case % 3 == 0:
        shapes.append((rows, 1))
    g = Graph()
    ins = [g.input() for _ in shapes]
    live, dead = ins[:3], ins[3]
    a = g.add("sub", live[1], live[0])
    values = [a, g.add("mul", a, g.add("tanh", live[2])), g.add("sub", _number(), a)]
    g.add("exp", g.add("add", dead, values[0]))
    for _ in range(random.randrange(2, 6)):
        values.append(_grown(g, values, live))
    last = g.add("add", values[-1], g.add("mul", values[-2], live[0]))
    several = [[last], [last, values[0]], [values[-1], last, values[1]], [last, live[0], last]]
    g.outputs = several[case % 4]
    return g, [tuple(s) for s in shapes], full


def _number():
    return random.choice([-1.5, 0.25, 2.0, -0.125, round(random.uniform(-3, 3), 3)])


def _grown(g, values, live):
    a, b = random.choice(values), random.choice([*values, *live])
    kind = random.randrange(8)
    if kind == 0:
        return g.add("where", g.add(random.choice(COMPARISONS), a, b), b, _number())
    if kind == 1:
        return g.add("div", a, g.add("add", g.add("abs", b), 1.5))
    if kind == 2:
        return g.add("div", _number(), g.add("add", g.add("abs", a), 1.0))
    if kind == 3:
        return g.add("exp", g.add("neg", g.add("abs", a)))
    if kind == 4:
        return g.add(random.choice(["maximum", "minimum"]), a, b)
    if kind == 5:
        return g.add(random.choice(["tanh", "sigmoid", "relu", "neg"]), a)
    if kind == 6:
        return g.add("sub", a, _number())
    return g.add(random.choice(["add", "sub", "mul"]), a, b)

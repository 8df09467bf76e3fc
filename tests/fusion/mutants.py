"Answers to lesson fusion's exercises: right ones of another style, and wrong ones that compute."

import math
import re
from collections import Counter

import torch
from torch import fx, nn

from course_lib import fusion
from course_lib.fusion import solutions

REFERENCE = {
    number: tuple(getattr(solutions, name) for name in names) for number, names in solutions.EXERCISES.items()
}


# --- fusion.1: bytes of a chain ---------------------------------------------------------


def by_tensors_without_data(shapes, steps, results, itemsize=4):
    values = {k: torch.empty(s, device="meta") for k, s in shapes.items()}
    moved, made = 0, {}
    for name, *operands in steps:
        read = list(dict.fromkeys(a for a in operands if isinstance(a, str)))
        values[name] = sum(values[a] for a in read)
        moved += values[name].numel() + sum(values[a].numel() for a in read)
        made[name] = read

    def inputs(name):
        return {name} if name in shapes else {i for a in made[name] for i in inputs(a)}

    once = {*results, *(i for r in results for i in inputs(r))}
    return moved * itemsize, sum(values[n].numel() for n in once) * itemsize


def walking_back(shapes, steps, results, itemsize=4):
    sizes, total = dict(shapes), 0
    for name, *operands in steps:
        given = {a: sizes[a] for a in operands if not isinstance(a, int | float)}
        sizes[name] = torch.broadcast_shapes(*given.values())
        total += sum(map(math.prod, [*given.values(), sizes[name]]))
    needed = set(results)
    for name, *operands in reversed(steps):
        if name in needed:
            needed |= {a for a in operands if isinstance(a, str)}
    return total * itemsize, sum(
        math.prod(sizes[n]) for n in (needed & set(shapes)) | set(results)
    ) * itemsize


def _bytes(
    shapes,
    steps,
    results,
    itemsize=4,
    *,
    distinct=True,
    full_reads=False,
    live=True,
    outputs=set,
    broadcast=torch.broadcast_shapes,
):
    "The sum, in which a part can be wrong."
    inputs, shapes = list(shapes), dict(shapes)
    needs, unfused = {name: {name} for name in shapes}, 0
    for name, *operands in steps:
        read = [a for a in operands if isinstance(a, str)]
        read = list(dict.fromkeys(read)) if distinct else read
        shapes[name] = tuple(broadcast(*(shapes[a] for a in read)))
        needs[name] = set().union(*(needs[a] for a in read))
        size = math.prod(shapes[name])
        unfused += sum(size if full_reads else math.prod(shapes[a]) for a in read) + size
    read = set().union(*(needs[name] for name in results)) if live else set(inputs)
    fused = sum(math.prod(shapes[n]) for n in read) + sum(math.prod(shapes[n]) for n in outputs(results))
    return unfused * itemsize, fused * itemsize


def reads_an_operand_twice(*args):
    return _bytes(*args, distinct=False)


def reads_a_broadcast_row_as_a_matrix(*args):
    return _bytes(*args, full_reads=True)


def reads_inputs_that_nothing_needs(*args):
    return _bytes(*args, live=False)


def writes_a_result_as_often_as_it_is_named(*args):
    return _bytes(*args, outputs=list)


def has_two_dimensions(*args):
    def broadcast(*shapes):
        full = [(1,) * (2 - len(s)) + tuple(s) for s in shapes]
        return max(s[0] for s in full), max(s[1] for s in full)

    return _bytes(*args, broadcast=broadcast)


def takes_float32_for_granted(shapes, steps, results, itemsize=4):
    return _bytes(shapes, steps, results, 4)


def takes_numbers_for_floats(shapes, steps, results, itemsize=4):
    known = {*shapes, *(name for name, *_ in steps)}
    for _, *operands in steps:
        for a in operands:
            if not isinstance(a, float) and a not in known:
                raise KeyError(a)
    return solutions.chain_bytes(shapes, steps, results, itemsize)


# --- fusion.2: capture a function -------------------------------------------------------


def by_closures(fn, count):
    "Another stand-in: every way to call it goes through __torch_function__."
    graph = fx.Graph()

    class Value:
        def __init__(self, node):
            self.node = node

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            def bare(a):
                return a.node if isinstance(a, cls) else a

            named = {k: bare(a) for k, a in (kwargs or {}).items()}
            return cls(graph.call_function(func, tuple(map(bare, args)), named))

        def __getattr__(self, op):
            if op[0] == "_":
                raise AttributeError(op)
            return lambda *args, **named: getattr(torch, op)(self, *args, **named)

        def __bool__(self):
            raise TypeError("a stand-in has no value")

    for name in ("add", "sub", "mul", "truediv", "pow", "lt", "le", "gt", "ge"):
        op = getattr(torch, {"truediv": "div"}.get(name, name))
        setattr(Value, f"__{name}__", lambda a, b, op=op: Value.__torch_function__(op, (), (a, b)))
        setattr(Value, f"__r{name}__", lambda a, b, op=op: Value.__torch_function__(op, (), (b, a)))
    Value.__neg__ = lambda a: torch.neg(a)
    out = fn(*(Value(graph.placeholder(f"x{k}")) for k in range(count)))
    graph.output([v.node for v in out] if isinstance(out, tuple) else out.node)
    return graph


class _Proxy(solutions.Proxy):
    "The course's stand-in, of which values are of the same kind."

    def record(self, function, *args, **kwargs):
        made = super().record(function, *args, **kwargs)
        return type(self)(made.graph, made.node)


def _captured(fn, count, proxy=_Proxy):
    graph = fx.Graph()
    out = fn(*[proxy(graph, graph.placeholder(f"in{k}")) for k in range(count)])
    graph.output(tuple(p.node for p in out) if isinstance(out, tuple) else out.node)
    return graph


def with_a_class_of_its_own(fn, count):
    return _captured(fn, count)


def reflected_division_in_the_wrong_order(fn, count):
    class Proxy(_Proxy):
        def __rtruediv__(self, other):
            return self.record(torch.div, self, other)

    return _captured(fn, count, Proxy)


def takes_the_first_branch(fn, count):
    class Proxy(_Proxy):
        asked = 0

        def __bool__(self):
            Proxy.asked += 1
            return Proxy.asked % 2 == 1

    return _captured(fn, count, Proxy)


def keywords_become_positions(fn, count):
    class Proxy(_Proxy):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            proxy = next(a for a in args if isinstance(a, cls))
            return proxy.record(func, *args, *(kwargs or {}).values())

    return _captured(fn, count, Proxy)


def takes_the_first_argument_for_a_stand_in(fn, count):
    class Proxy(_Proxy):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return args[0].record(func, *args, **(kwargs or {}))

    return _captured(fn, count, Proxy)


def keeps_stand_ins_among_keywords(fn, count):
    class Proxy(_Proxy):
        def record(self, function, *args, **kwargs):
            made = super().record(function, *args)
            made.node.kwargs = kwargs
            return made

    return _captured(fn, count, Proxy)


def methods_have_no_arguments(fn, count):
    class Proxy(_Proxy):
        def __getattr__(self, op):
            if op.startswith("_"):
                raise AttributeError(op)
            return lambda *args, **kwargs: self.record(getattr(torch, op), self)

    return _captured(fn, count, Proxy)


def methods_keep_stand_ins_among_keywords(fn, count):
    class Proxy(_Proxy):
        def __getattr__(self, op):
            def method(*args, **kwargs):
                made = self.record(getattr(torch, op), self, *args)
                made.node.kwargs = kwargs
                return made

            if op.startswith("_"):
                raise AttributeError(op)
            return method

    return _captured(fn, count, Proxy)


def methods_have_one_argument(fn, count):
    class Proxy(_Proxy):
        def __getattr__(self, op):
            if op.startswith("_"):
                raise AttributeError(op)
            return lambda *args, **kwargs: self.record(getattr(torch, op), self, *args[:1], **kwargs)

    return _captured(fn, count, Proxy)


def records_methods_of_tensors(fn, count):
    class Proxy(_Proxy):
        def __getattr__(self, op):
            if op.startswith("_"):
                raise AttributeError(op)
            return lambda *args, **kwargs: self.record(getattr(torch.Tensor, op), self, *args, **kwargs)

    return _captured(fn, count, Proxy)


def has_every_attribute(fn, count):
    class Proxy(_Proxy):
        def __getattr__(self, op):
            return lambda *args, **kwargs: self.record(getattr(torch, op), self, *args, **kwargs)

    return _captured(fn, count, Proxy)


def raises_without_a_sentence(fn, count):
    class Proxy(_Proxy):
        def __bool__(self):
            raise TypeError

    return _captured(fn, count, Proxy)


def merges_equal_calls(fn, count):
    graph, seen = solutions.capture(fn, count), {}
    for node in [n for n in graph.nodes if n.op == "call_function"]:
        first = seen.setdefault((node.target, node.args, tuple(node.kwargs.items())), node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
    return graph


def drops_dead_code(fn, count):
    graph = solutions.capture(fn, count)
    graph.eliminate_dead_code()
    return graph


# --- fusion.3: one kernel ---------------------------------------------------------------


def loads_where_it_uses(graph, shapes):
    "Each load stands before the first use; rows and columns are lines of their own; one number is one lane."
    columns = torch.broadcast_shapes(*shapes, (1, 1))[1]
    inputs, code, names = list(graph.find_nodes(op="placeholder")), [], {}
    whole = torch.broadcast_shapes(*shapes, (1, 1))

    def name(a):
        if isinstance(a, fx.Node):
            if a not in names:
                k = inputs.index(a)
                shape, at = tuple(shapes[k]), f"in{k} + offsets"
                if not shape:
                    names[a] = f"a{k}"
                    code.append(f"a{k} = tl.load(in{k}).to(tl.float32)")
                    return names[a]
                if shape != whole:
                    at = f"in{k} + {'column' if len(shape) == 1 else 'row'}"
                names[a] = f"a{k}"
                code.append(f"a{k} = tl.load({at}, mask=inside, other=1.0).to(tl.float32)")
            return names[a]
        return fusion.literal(a) if isinstance(a, int | float) else ""

    for node in graph.nodes:
        if node.op == "call_function":
            value = fusion.TRITON[node.target].format(*map(name, node.args))
            names[node] = f"v_{node.name}"
            code.append(f"{names[node]} = {value}")
    stored = [
        f"tl.store(out{k} + offsets, {name(n)}, inside)" for k, n in enumerate(graph.output_node().args[0])
    ]
    start = ["offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)", "inside = offsets < n"]
    start += [f"row = offsets // {columns}", f"column = offsets - row * {columns}"]
    ins = [f"in{k}" for k in range(len(shapes))] + [f"out{k}" for k in range(len(stored))]
    head = "@triton.jit\ndef kernel(" + ", ".join(ins) + ", n, BLOCK: tl.constexpr):\n    "
    return head + "\n    ".join(start + code + stored) + "\n"


def with_other_names(graph, shapes):
    source = solutions.generate(graph, shapes).replace("mask=m)", "mask=keep, other=0.0)")
    return source.replace("m = i < n", "keep = n > i").replace("mask=keep, other=0.0)\n", "mask=keep)\n")


def _index(fn):
    "The course's generator with another index into the inputs."

    def generate(graph, shapes):
        rows, columns = torch.broadcast_shapes(*shapes, (1, 1))
        lines = solutions.generate(graph, shapes).splitlines()
        for k, shape in enumerate(shapes):
            old, new = (f(tuple(shape), rows, columns) for f in (solutions.where_in_memory, fn))
            lines = [line.replace(f"tl.load(in{k} + {old},", f"tl.load(in{k} + {new},") for line in lines]
        return "\n".join(lines) + "\n"

    return generate


def _by_elements(shape, rows, columns):
    size = math.prod(shape)
    return {rows * columns: "i", 1: "i * 0", rows: f"i // {columns}"}.get(size, f"i % {columns}")


column_or_row_by_number_of_elements = _index(_by_elements)
rows_and_columns_exchanged = _index(
    lambda *a: solutions.where_in_memory(*a).translate({ord("/"): "%", ord("%"): "/"}).replace("%%", "%")
)


def loads_without_a_mask(graph, shapes):
    return solutions.generate(graph, shapes).replace(", mask=m).to", ").to")


def writes_numbers_with_str(graph, shapes):
    return solutions.generate(graph, shapes).replace('float("inf")', "inf")


def computes_in_the_inputs_type(graph, shapes):
    return solutions.generate(graph, shapes).replace(".to(tl.float32)", ".to(tl.bfloat16).to(tl.float32)")


def writes_expressions_within_expressions(graph, shapes):
    "A value that is used twice is computed twice."
    head, *lines = solutions.generate(graph, shapes).splitlines(), {}
    kept, values = [], lines[0]
    for line in head:
        text = re.sub(r"(?<!\.)\b\w+\b", lambda m: values.get(m[0], m[0]), line.partition(" = ")[2] or line)
        name = line.partition(" = ")[0].strip()
        if " = " in line and "tl.load" not in line and name not in ("i", "m"):
            values[name] = f"({text})"
        else:
            kept.append(line if " = " in line else text)
    return "\n".join(kept) + "\n"


def writes_each_line_of_arithmetic_twice(graph, shapes):
    lines = solutions.generate(graph, shapes).splitlines()
    made = [line for line in lines if " = " in line and "tl.load" not in line]
    return "\n".join(line for one in lines for line in [one] * (1 + (one in made[2:]))) + "\n"


def with_names_and_comments_of_its_own(graph, shapes):
    source = solutions.generate(graph, shapes)
    for k, node in enumerate(graph.find_nodes(op="placeholder")):
        source = re.sub(rf"\bin{k}\b", f"{node.name}_ptr", source)
    return source.replace("m = i < n", "m = i < n  # tl.exp(i) * tl.exp(i) + tl.abs(i)")


def keeps_the_mask_in_a_dictionary(graph, shapes):
    "Python that the interpreter runs and the compiler for a GPU refuses."
    return solutions.generate(graph, shapes).replace("m = i < n", 'm = {"m": i < n}["m"]')


# --- fusion.4: a backend ----------------------------------------------------------------


class CountingClass:
    def __init__(self, graphs):
        self.graphs = graphs

    def __call__(self, gm, example_inputs):
        print(gm.graph)
        found = Counter()
        for node in gm.graph.nodes:
            if node.op.startswith("call_"):
                found[getattr(node.target, "__name__", node.target)] += 1
        self.graphs += [found]
        return gm


def by_the_interpreter(graphs):
    def backend(gm, example_inputs):
        gm.print_readable()
        called = [n for n in gm.graph.nodes if n.op in ("call_function", "call_method")]
        graphs.append(Counter(n.target if isinstance(n.target, str) else n.target.__name__ for n in called))
        return lambda *args: fx.Interpreter(gm).run(*args)

    return backend


def _backend(count=None, put=None):
    def counting(graphs):
        def backend(gm, example_inputs):
            print(gm.code)
            called = [n for n in gm.graph.nodes if n.op.startswith("call_")]
            found = Counter(getattr(n.target, "__name__", n.target) for n in called)
            found = count(called) if count else found
            if put:
                return put(graphs, found, gm, example_inputs)
            graphs.append(found)
            return gm.forward

        return backend

    return counting


def _at_each_run(graphs, found, gm, example_inputs):
    return lambda *args: graphs.append(found) or gm(*args)


def _result_of_the_example(graphs, found, gm, example_inputs):
    graphs.append(found)
    out = gm(*example_inputs)
    return lambda *args: out


def _all_in_one(graphs, found, gm, example_inputs):
    graphs[:] = [sum(graphs, found)]
    return gm.forward


def _without_gradients(graphs, found, gm, example_inputs):
    graphs.append(found)
    return torch.no_grad()(gm.forward)


def does_not_print(graphs):
    def backend(gm, example_inputs):
        called = [n for n in gm.graph.nodes if n.op.startswith("call_")]
        graphs.append(Counter(getattr(n.target, "__name__", n.target) for n in called))
        return gm.forward

    return backend


counts_by_the_nodes_names = _backend(count=lambda called: Counter(n.name for n in called))
forgets_methods = _backend(
    count=lambda called: Counter(n.target.__name__ for n in called if n.op == "call_function")
)
counts_at_each_run = _backend(put=_at_each_run)
returns_the_examples_result = _backend(put=_result_of_the_example)
adds_all_graphs_up = _backend(put=_all_in_one)
runs_without_gradients = _backend(put=_without_gradients)


# --- fusion.5: four graph breaks --------------------------------------------------------


def with_a_factor(x, limit):
    peak = x.abs().amax()
    x = x - x.mean(dim=0, keepdim=True) * (x.mean() > limit)
    y = x / (1 + x.var().sqrt())
    return y * torch.where(y > 0, y, 0).sum(), peak


def with_relu(x, limit):
    above = (x.sum() / x.numel() > limit).to(x.dtype)
    y = torch.lerp(x, x - x.mean(0), above)
    y = y / y.std().add(1)
    return [y * y.relu().sum(), torch.maximum(x.max(), -x.min())]


def _standardise(x, limit, *, centre=None, scale=torch.std, gain=None):
    "The course's function, in which a part can be wrong."
    peak = x.abs().max()
    x = (centre or (lambda x, limit: torch.where(x.mean() > limit, x - x.mean(0), x)))(x, limit)
    y = x / (1 + scale(x))
    return y * (gain or (lambda y: torch.where(y > 0, y, 0).sum()))(y), peak


def keeps_the_mask(x, limit):
    return _standardise(x, limit, gain=lambda y: y[y > 0].sum())


def item_in_place_of_float(x, limit):
    return _standardise(x, limit, scale=lambda x: x.std().item())


def centres_only_where_it_is_compiled(x, limit):
    if torch.compiler.is_compiling():
        return _standardise(x, limit, centre=lambda x, limit: x - x.mean(0))
    return solutions.standardise(x, limit)


def decides_for_each_column(x, limit):
    return _standardise(x, limit, centre=lambda x, limit: torch.where(x.mean(0) > limit, x - x.mean(0), x))


def deviation_before_centring(x, limit):
    scale = x.std()
    return _standardise(x, limit, scale=lambda _: scale)


def centres_at_the_limit(x, limit):
    return _standardise(x, limit, centre=lambda x, limit: torch.where(x.mean() >= limit, x - x.mean(0), x))


def prints_where_it_is_eager(x, limit):
    if not torch.compiler.is_compiling():
        print(f"largest {x.abs().max():.3f}")
    return solutions.standardise(x, limit)


def always_float32(x, limit):
    y, peak = solutions.standardise(x, limit)
    return y.float(), peak


def peak_in_float32(x, limit):
    y, peak = solutions.standardise(x, limit)
    return y, peak.float()


def without_gradients(x, limit):
    with torch.no_grad():
        return solutions.standardise(x, limit)


def with_cond(x, limit):
    "Right: a branch that the graph keeps."
    peak = x.abs().max()
    x = torch.cond(x.mean() > limit, lambda x: x - x.mean(0), lambda x: x.clone(), (x,))
    y = x / (1 + x.std())
    return y * y.relu().sum(), peak


# --- fusion.6: a recompile storm --------------------------------------------------------


class MovingMean(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.register_buffer("n", torch.tensor(0.0))
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x, repeats):
        self.n.add_(1)
        self.mean.add_((x.mean(0) - self.mean) / self.n)
        y = (x - self.mean) / (1 - torch.pow(0.9, self.n))
        return y * (0.9**repeats)


class KeepsThePower(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.register_buffer("state", torch.zeros(2, width))
        self.register_buffer("power", torch.ones(1))

    def forward(self, x, repeats):
        self.power *= 0.9
        self.state[0] += x.mean(dim=0)
        self.state[1] += 1
        y = x - self.state[0] / self.state[1]
        return y / (1 - self.power) * 0.9**repeats


class KeepsTheCounter(solutions.Tracker):
    def __init__(self, width):
        super().__init__(width)
        del self.calls
        self.calls = 0


class KeepsTheLoop(solutions.Tracker):
    def forward(self, x, repeats):
        y = super().forward(x, 0)
        for _ in range(repeats):
            y = 0.9 * y
        return y


class ReadsTheCounter(solutions.Tracker):
    def forward(self, x, repeats):
        self.calls += 1
        self.total += x.mean(0)
        return (x - self.total / self.calls) / (1 - 0.9 ** self.calls.item()) * 0.9**repeats


class WeighsByRows(solutions.Tracker):
    def __init__(self, width):
        super().__init__(width)
        self.register_buffer("rows", torch.zeros(()))

    def forward(self, x, repeats):
        self.calls += 1
        self.rows += len(x)
        self.total += x.sum(0)
        return (x - self.total / self.rows) / (1 - 0.9**self.calls) * 0.9**repeats


class BakesTheRepeatsIn(solutions.Tracker):
    "What was there at the first call stays: one graph, and wrong."

    kept = None

    def forward(self, x, repeats):
        self.kept = self.kept or repeats
        return super().forward(x, self.kept)


class CountsInTrainingAlone(solutions.Tracker):
    def forward(self, x, repeats):
        if self.training:
            return super().forward(x, repeats)
        return (x - self.total / self.calls) / (1 - 0.9**self.calls) * 0.9**repeats


class HasATableOfPowers(solutions.Tracker):
    def forward(self, x, repeats):
        return super().forward(x, 0) * (0.9 ** torch.arange(32.0))[min(repeats, 31)]


RIGHT = {
    "fusion.1": [by_tensors_without_data, walking_back],
    "fusion.2": [by_closures, with_a_class_of_its_own],
    "fusion.3": [loads_where_it_uses, with_other_names, with_names_and_comments_of_its_own],
    "fusion.4": [CountingClass, by_the_interpreter],
    "fusion.5": [with_a_factor, with_relu, with_cond],
    "fusion.6": [MovingMean, KeepsThePower],
}
MUTANTS = {
    "fusion.1": [
        reads_an_operand_twice, reads_a_broadcast_row_as_a_matrix, reads_inputs_that_nothing_needs,
        writes_a_result_as_often_as_it_is_named, takes_float32_for_granted, takes_numbers_for_floats,
        has_two_dimensions,
    ],
    "fusion.2": [
        reflected_division_in_the_wrong_order, takes_the_first_branch, keywords_become_positions,
        merges_equal_calls, drops_dead_code, takes_the_first_argument_for_a_stand_in,
        keeps_stand_ins_among_keywords, methods_have_no_arguments, has_every_attribute,
        raises_without_a_sentence, methods_keep_stand_ins_among_keywords, methods_have_one_argument,
        records_methods_of_tensors,
    ],
    "fusion.3": [
        column_or_row_by_number_of_elements, rows_and_columns_exchanged, loads_without_a_mask,
        writes_numbers_with_str, computes_in_the_inputs_type, writes_expressions_within_expressions,
        keeps_the_mask_in_a_dictionary, writes_each_line_of_arithmetic_twice,
    ],
    "fusion.4": [
        does_not_print, counts_by_the_nodes_names, forgets_methods, counts_at_each_run,
        returns_the_examples_result, adds_all_graphs_up, runs_without_gradients,
    ],
    "fusion.5": [
        keeps_the_mask, item_in_place_of_float, centres_only_where_it_is_compiled, decides_for_each_column,
        deviation_before_centring, centres_at_the_limit, prints_where_it_is_eager, always_float32,
        peak_in_float32, without_gradients,
    ],
    "fusion.6": [KeepsTheCounter, KeepsTheLoop, ReadsTheCounter, WeighsByRows, BakesTheRepeatsIn,
                 CountsInTrainingAlone, HasATableOfPowers],
}  # fmt: skip

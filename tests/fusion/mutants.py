"Wrong answers to lesson fusion's exercises. Each computes something, and each is what somebody would write."

import math

import torch
from fusion import mutants_compiled as compiled
from fusion import mutants_memory as memory

from course_lib.fusion import small as fusion_small
from course_lib.fusion import solutions
from course_lib.fusion.codegen import TRITON, literal
from course_lib.fusion.graph import Graph, Node

REFERENCE = {
    number: tuple(getattr(solutions, name) for name in names) for number, names in solutions.EXERCISES.items()
}


# --- fusion.1: bytes of a chain ---------------------------------------------------------


def _bytes(shapes, steps, results, itemsize=4, *, distinct=True, writes=True, full_reads=False, live=True,
           outputs=set, needs_inputs=True, numbers=0):  # fmt: skip
    "The library's sum, in which any part can be done otherwise."
    inputs, shapes = list(shapes), dict(shapes)
    needs, unfused = {name: {name} for name in shapes}, 0
    for name, *operands in steps:
        read = [a for a in operands if isinstance(a, str)]
        read = list(dict.fromkeys(read)) if distinct else read
        shapes[name] = tuple(torch.broadcast_shapes(*(shapes[a] for a in read)))
        needs[name] = set().union(*(needs[a] for a in read))
        size = math.prod(shapes[name])
        unfused += sum(size if full_reads else math.prod(shapes[a]) for a in read) + size * writes
        unfused += numbers * (len(operands) - len([a for a in operands if isinstance(a, str)]))
    read = set().union(*(needs[name] for name in results)) if live else set(inputs)
    fused = sum(math.prod(shapes[n]) for n in read) + sum(math.prod(shapes[n]) for n in outputs(results))
    return unfused * itemsize, fused * itemsize


def reads_an_operand_twice(*args):
    return _bytes(*args, distinct=False)


def forgets_that_each_step_writes(*args):
    return _bytes(*args, writes=False)


def reads_a_broadcast_row_as_a_matrix(*args):
    return _bytes(*args, full_reads=True)


def reads_inputs_that_nothing_needs(*args):
    return _bytes(*args, live=False)


def writes_one_result_of_several(*args):
    return _bytes(*args, outputs=lambda results: set(results[:1]))


def counts_elements(shapes, steps, results, itemsize=4):
    return _bytes(shapes, steps, results, 1)


def takes_float32_for_granted(shapes, steps, results, itemsize=4):
    return _bytes(shapes, steps, results, 4)


def reads_numbers_from_memory(*args):
    return _bytes(*args, numbers=1)


def writes_all_the_steps_too(shapes, steps, results, itemsize=4):
    return _bytes(shapes, steps, results, itemsize, outputs=lambda _: {name for name, *_ in steps})


def fused_is_a_share_of_unfused(shapes, steps, results, itemsize=4):
    unfused, _ = _bytes(shapes, steps, results, itemsize)
    return unfused, unfused // len(steps)


def the_other_way_round(*args):
    return _bytes(*args)[::-1]


def reads_the_results_too(shapes, steps, results, itemsize=4):
    "A result that a later step uses is read back."
    unfused, fused = _bytes(shapes, steps, results, itemsize)
    sizes = dict(shapes)
    for name, *operands in steps:
        sizes[name] = torch.broadcast_shapes(*(sizes[a] for a in operands if isinstance(a, str)))
    used = {a for _, *operands in steps for a in operands} & set(results)
    return unfused, fused + itemsize * sum(math.prod(sizes[name]) for name in used)


# --- fusion.2: capture a function -------------------------------------------------------


def _captured(fn, count, proxy):
    graph = Graph()
    out = fn(*[proxy(graph, graph.input()) for _ in range(count)])
    graph.outputs = [p.node for p in (out if isinstance(out, tuple | list) else [out])]
    return graph


def reflected_operators_in_the_wrong_order(fn, count):
    class Proxy(_Proxy):
        def __rsub__(self, other):
            return self.record("sub", self, other)

    return _captured(fn, count, Proxy)


def reflected_division_in_the_wrong_order(fn, count):
    class Proxy(_Proxy):
        def __rtruediv__(self, other):
            return self.record("div", self, other)

    return _captured(fn, count, Proxy)


def a_power_the_wrong_way_round(fn, count):
    class Proxy(_Proxy):
        def __rpow__(self, other):
            return self.record("pow", self, other)

    return _captured(fn, count, Proxy)


def takes_the_first_branch(fn, count):
    class Proxy(_Proxy):
        loops = 0

        def __bool__(self):
            Proxy.loops += 1
            return Proxy.loops % 2 == 1

    return _captured(fn, count, Proxy)


def puts_the_proxy_first(fn, count):
    class Proxy(_Proxy):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            proxies = [a for a in args if isinstance(a, cls)]
            return proxies[0].record(func.__name__, *proxies, *(a for a in args if not isinstance(a, cls)))

    return _captured(fn, count, Proxy)


def forgets_numbers(fn, count):
    class Proxy(_Proxy):
        def record(self, op, *args):
            return super().record(op, *(a for a in args if isinstance(a, fusion_small.Proxy)))

    return _captured(fn, count, Proxy)


def rounds_numbers(fn, count):
    class Proxy(_Proxy):
        def record(self, op, *args):
            return super().record(op, *(round(a) if isinstance(a, float) else a for a in args))

    return _captured(fn, count, Proxy)


def copies_what_is_used_twice(fn, count):
    "The graph as a tree: each use of a value is another node."
    graph = fusion_small.capture(fn, count)
    tree = Graph()
    tree.inputs = graph.inputs

    def copied(node):
        if not isinstance(node, Node) or node.op == "input":
            return node
        return tree.add(node.op, *map(copied, node.args))

    tree.outputs = [copied(node) for node in graph.outputs]
    return tree


def returns_the_last_node(fn, count):
    graph = fusion_small.capture(fn, count)
    graph.outputs = graph.nodes[-1:]
    return graph


def loses_an_output(fn, count):
    graph = fusion_small.capture(fn, count)
    graph.outputs = graph.outputs[:1]
    return graph


def outputs_once_each(fn, count):
    graph = fusion_small.capture(fn, count)
    graph.outputs = list(dict.fromkeys(graph.outputs))
    return graph


def drops_unused_inputs(fn, count):
    graph = fusion_small.capture(fn, count)
    needed = graph.needed()
    graph.inputs = [node for node in graph.inputs if node in needed]
    return graph


def drops_dead_code(fn, count):
    return fusion_small.capture(fn, count).simplified()


def calls_it_twice(fn, count):
    fusion_small.capture(fn, count)
    return fusion_small.capture(fn, count)


_kept = Graph()


def keeps_one_graph_for_all(fn, count):
    out = fn(*[_Proxy(_kept, _kept.input()) for _ in range(count)])
    _kept.outputs = [p.node for p in (out if isinstance(out, tuple | list) else [out])]
    return _kept


def names_the_python_operator(fn, count):
    graph = fusion_small.capture(fn, count)
    for node in graph.nodes:
        node.op = {"div": "truediv"}.get(node.op, node.op)
    return graph


def subtracts_by_adding(fn, count):
    class Proxy(_Proxy):
        def __sub__(self, other):
            return self + (-other)

    return _captured(fn, count, Proxy)


class _Proxy(fusion_small.Proxy):
    "The library's proxy, of which values are of the same kind."

    def record(self, op, *args):
        made = super().record(op, *args)
        return type(self)(made.graph, made.node)


# --- fusion.3: one kernel ---------------------------------------------------------------


def _source(graph, shapes, *, mask=", mask=m", store_mask=", mask=m", index=None, needed=None, body=None,
            outputs=None, start="tl.program_id(0) * BLOCK + ", number=literal, load_first=True):  # fmt: skip
    "The library's generator, in which any part can be done otherwise."
    full = torch.broadcast_shapes(*shapes)
    names, needed = graph.names(), graph.needed() if needed is None else needed
    pointers = [f"in{k}" for k in range(len(shapes))] + [f"out{k}" for k in range(len(graph.outputs))]
    lines = [f"i = {start}tl.arange(0, BLOCK)", "m = i < n"]
    loads = {}
    for k, (node, shape) in enumerate(zip(graph.inputs, shapes, strict=True)):
        at = (index or fusion_small._index)(shape, full, full[-1])
        loads[node] = f"tl.load(in{k} + {at}{mask})"
        if node in needed and load_first:
            names[node] = f"x{k}"
            lines.append(f"x{k} = {loads[node]}")
        elif not load_first:
            names[node] = loads[node]
    for node in graph.nodes:
        if node in needed:
            operands = [names[a] if isinstance(a, Node) else number(a, torch.float32) for a in node.args]
            lines.append(f"{names[node]} = {(body or _plain)(node, operands)}")
    for k, node in outputs(graph) if outputs else enumerate(graph.outputs):
        lines.append(f"tl.store(out{k} + i, {names[node]}{store_mask})")
    head = f"@triton.jit\ndef fused({', '.join(pointers)}, n, BLOCK: tl.constexpr):\n"
    return head + "".join(f"    {line}\n" for line in lines)


def leaves_the_block_a_number(graph, shapes):
    return _source(graph, shapes).replace("BLOCK: tl.constexpr", "BLOCK")


def keeps_values_in_a_dictionary(graph, shapes):
    return _source(graph, shapes).replace("m = i < n", 'm = {"m": i < n}["m"]')


def _plain(node, operands):
    return TRITON[node.op].format(*operands)


def stores_one_output(graph, shapes):
    return _source(graph, shapes, outputs=lambda g: [(0, g.outputs[0])])


def stores_outputs_in_reverse(graph, shapes):
    return _source(graph, shapes, outputs=lambda g: enumerate(reversed(g.outputs)))


def stores_the_last_value(graph, shapes):
    return _source(graph, shapes, outputs=lambda g: [(k, g.nodes[-1]) for k in range(len(g.outputs))],
                   needed=set(graph.inputs) | set(graph.nodes))  # fmt: skip


def swaps_the_operands(graph, shapes):
    return _source(
        graph, shapes, body=lambda node, args: _plain(node, args[::-1] if len(args) == 2 else args)
    )


def numbers_come_second(graph, shapes):
    def body(node, args):
        first = len(args) == 2 and not isinstance(node.args[0], Node)
        return _plain(node, args[::-1] if first else args)

    return _source(graph, shapes, body=body)


def loads_without_a_mask(graph, shapes):
    return _source(graph, shapes, mask="")


def stores_without_a_mask(graph, shapes):
    return _source(graph, shapes, store_mask="")


def every_program_is_the_first(graph, shapes):
    return _source(graph, shapes, start="")


def reads_all_inputs_alike(graph, shapes):
    return _source(graph, shapes, index=lambda *_: "i")


def rows_and_columns_exchanged(graph, shapes):
    def index(shape, full, columns):
        right = fusion_small._index(shape, full, columns)
        return right.replace("//", "@").replace("%", "//").replace("@", "%")

    return _source(graph, shapes, index=index)


def takes_the_index_apart_by_rows(graph, shapes):
    return _source(graph, shapes, index=lambda s, full, _: fusion_small._index(s, full, full[0]))


def wraps_every_small_input(graph, shapes):
    "i % size: right for a row, wrong for a column."
    return _source(graph, shapes, index=lambda s, full, _: "i" if s == full else f"i % {math.prod(s)}")


def loads_inputs_that_nothing_needs(graph, shapes):
    return _source(graph, shapes, needed=graph.needed() | set(graph.inputs))


def computes_dead_code(graph, shapes):
    return _source(graph, shapes, needed=set(graph.inputs) | set(graph.nodes))


def loads_at_each_use(graph, shapes):
    return _source(graph, shapes, load_first=False)


def writes_expressions_within_expressions(graph, shapes):
    "Right, and a value that is used twice is computed twice."
    full = torch.broadcast_shapes(*shapes)
    loads = {node: f"x{k}" for k, node in enumerate(graph.inputs)}

    def code(a):
        if not isinstance(a, Node):
            return literal(a, torch.float32)
        return loads.get(a) or "(" + TRITON[a.op].format(*map(code, a.args)) + ")"

    lines = ["i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)", "m = i < n"]
    needed = graph.needed()
    lines += [f"x{k} = tl.load(in{k} + {fusion_small._index(s, full, full[-1])}, mask=m)"
              for k, (s, x) in enumerate(zip(shapes, graph.inputs, strict=True)) if x in needed]  # fmt: skip
    lines += [f"tl.store(out{k} + i, {code(node)}, mask=m)" for k, node in enumerate(graph.outputs)]
    pointers = [f"in{k}" for k in range(len(shapes))] + [f"out{k}" for k in range(len(graph.outputs))]
    head = f"@triton.jit\ndef fused({', '.join(pointers)}, n, BLOCK: tl.constexpr):\n"
    return head + "".join(f"    {line}\n" for line in lines)


def expressions_without_brackets(graph, shapes):
    "The text of an operand put into the text of its user as it is."
    source, texts = writes_expressions_within_expressions(graph, shapes), {}
    names = {node: f"x{k}" for k, node in enumerate(graph.inputs)}

    def code(a):
        if not isinstance(a, Node):
            return literal(a, torch.float32)
        if a not in texts:
            texts[a] = names.get(a) or TRITON[a.op].format(*map(code, a.args))
        return texts[a]

    kept = [line for line in source.splitlines() if "tl.store" not in line]
    kept += [f"    tl.store(out{k} + i, {code(node)}, mask=m)" for k, node in enumerate(graph.outputs)]
    return "\n".join(kept)


def rounds_the_numbers(graph, shapes):
    return _source(graph, shapes, number=lambda a, dtype: repr(int(a)))


def loses_the_sign_of_numbers(graph, shapes):
    return _source(graph, shapes, number=lambda a, dtype: repr(abs(a)))


def a_kernel_for_each_output(graph, shapes):
    sources = []
    for node in graph.outputs:
        one = Graph()
        one.inputs, one.nodes, one.outputs = graph.inputs, graph.nodes, [node]
        sources.append(_source(one, shapes))
    return "\n\n".join([*sources, _source(graph, shapes)])


def writes_the_first_value_back(graph, shapes):
    "The first intermediate value is stored over an input, where nobody looks."
    source = _source(graph, shapes)
    name = graph.names()[graph.nodes[0]]
    full = next((k for k, s in enumerate(shapes) if s == torch.broadcast_shapes(*shapes)), None)
    return source if full is None else source + f"    tl.store(in{full} + i, {name}, mask=m)\n"


def stores_each_output_twice(graph, shapes):
    return _source(graph, shapes, outputs=lambda g: [*enumerate(g.outputs), *enumerate(g.outputs)])


def takes_an_input_that_is_an_output_for_done(graph, shapes):
    return _source(
        graph, shapes, outputs=lambda g: [(k, n) for k, n in enumerate(g.outputs) if n not in g.inputs]
    )


MUTANTS = {
    "fusion.1": [
        reads_an_operand_twice, forgets_that_each_step_writes, reads_a_broadcast_row_as_a_matrix,
        reads_inputs_that_nothing_needs, writes_one_result_of_several, counts_elements,
        takes_float32_for_granted, reads_numbers_from_memory, writes_all_the_steps_too,
        fused_is_a_share_of_unfused, the_other_way_round, reads_the_results_too,
    ],
    "fusion.2": [
        reflected_operators_in_the_wrong_order, reflected_division_in_the_wrong_order,
        a_power_the_wrong_way_round, takes_the_first_branch, puts_the_proxy_first, forgets_numbers,
        rounds_numbers, copies_what_is_used_twice, returns_the_last_node, loses_an_output,
        outputs_once_each, drops_unused_inputs, drops_dead_code, calls_it_twice, keeps_one_graph_for_all,
        names_the_python_operator, subtracts_by_adding,
    ],
    "fusion.3": [
        stores_one_output, stores_outputs_in_reverse, stores_the_last_value, swaps_the_operands,
        numbers_come_second, loads_without_a_mask, stores_without_a_mask, every_program_is_the_first,
        reads_all_inputs_alike, rows_and_columns_exchanged, takes_the_index_apart_by_rows,
        wraps_every_small_input, loads_inputs_that_nothing_needs, computes_dead_code, loads_at_each_use,
        writes_expressions_within_expressions, expressions_without_brackets, rounds_the_numbers,
        loses_the_sign_of_numbers, a_kernel_for_each_output, writes_the_first_value_back,
        stores_each_output_twice, takes_an_input_that_is_an_output_for_done,
        leaves_the_block_a_number, keeps_values_in_a_dictionary,
    ],
    "fusion.4": [
        compiled.the_starter, compiled.keeps_the_print, compiled.keeps_the_if, compiled.keeps_the_float,
        compiled.item_in_place_of_float, compiled.keeps_the_mask, compiled.nonzero_in_place_of_the_mask,
        compiled.hides_a_part_from_the_compiler, compiled.never_centres, compiled.always_centres,
        compiled.centres_only_where_it_is_compiled, compiled.branches_outside, compiled.swaps_the_branches,
        compiled.decides_for_each_element, compiled.decides_for_each_column,
        compiled.centres_by_the_mean_of_all, compiled.forgets_the_mask, compiled.sums_magnitudes,
        compiled.counts_the_positive, compiled.peak_without_its_sign, compiled.peak_of_the_result,
        compiled.drops_the_peak, compiled.deviation_of_each_column, compiled.divides_by_n,
        compiled.deviation_before_centring,
    ],
    "fusion.5": [
        compiled.TheStarter, compiled.KeepsTheCounter, compiled.KeepsTheLoop, compiled.KeepsMathLog,
        compiled.KeepsAListOfMeans, compiled.IsKeptFromTheCompiler, compiled.ReadsTheCounter,
        compiled.CountsFromOne, compiled.ForgetsToCount, compiled.MovesByATenth, compiled.CentresFirst,
        compiled.WeighsByRows, compiled.MeanOfAllElements, compiled.ShrinksOnce,
        compiled.ShrinksInProportion, compiled.LogarithmToBaseTwo, compiled.DropsTheTemperature,
        compiled.BakesTheTemperatureIn,
    ],
    "fusion.6": [
        memory.largest_first, memory.cheapest_first, memory.best_ratio_first, memory.first_blocks_first,
        memory.recomputes_everything, memory.recomputes_nothing, memory.fewest_blocks, memory.fewest_bytes,
        memory.most_flops, memory.forgets_that_values_come_back, memory.all_values_come_back_at_once,
        memory.forgets_the_inputs, memory.keeps_the_input_twice, memory.walks_backward,
        memory.stays_under_the_budget, memory.names_what_is_kept, memory.counts_blocks_from_one,
        memory.does_its_best_over_budget, memory.refuses_without_a_number, memory.refuses_what_just_fits,
        memory.sorts_the_numbers_it_is_given,
    ],
}  # fmt: skip

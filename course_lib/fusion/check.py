"Checks of fusion, the first half. Oracles: meter, float64, a walk of the graph, tiles that keep count."

import importlib.util
import inspect
import math
import random

import torch

from course_lib import checking as core
from course_lib import meter
from course_lib.checking import yours  # noqa: F401
from course_lib.fusion import check_inputs as inputs
from course_lib.fusion import check_tiles as fusion_tiles
from course_lib.fusion.check_compiled import centre, standardise  # noqa: F401
from course_lib.fusion.check_memory import choose  # noqa: F401
from course_lib.fusion.codegen import TRITON, build
from course_lib.fusion.graph import Node

# --- fusion.1 ---------------------------------------------------------------------------


@core.exercise("fusion.1", "bytes of 30 chains right, operator by operator and as one kernel")
def chain_bytes(answer):
    for case in range(30):
        chain = inputs.chain(case)
        itemsize = random.choice([2, 4, 8])
        got = core.call(answer, chain.shapes, chain.steps, chain.results, itemsize)
        want = _measured(chain, itemsize)
        what = _described(chain)
        if not isinstance(got, tuple | list) or len(got) != 2:
            raise core.Wrong(f"expected (unfused, fused), two numbers of bytes, got {core.kind(got)}")
        core.equal(got[0], want[0], f"unfused, {what}", "bytes")
        core.equal(got[1], want[1], f"fused, {what}", "bytes")
    chain = inputs.chain(0)
    got = core.call(answer, chain.shapes, chain.steps, chain.results)
    core.equal(tuple(got), _measured(chain, 4), "with itemsize left out, (unfused, fused)")


def _measured(chain, itemsize):
    "Unfused as `meter` counts the chain; fused by the inputs from which a NaN reaches a result."
    dtype = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[itemsize]
    tensors = {name: torch.rand(shape, dtype=torch.float64).to(dtype) for name, shape in chain.shapes.items()}
    values = []
    unfused = meter.of(lambda: values.append(chain.run(tensors)), warmup=0).bytes
    read = 0
    for name, t in tensors.items():
        poisoned = chain.run({**tensors, name: torch.full_like(t, math.nan)})
        if any(poisoned[r].isnan().any() for r in chain.results):
            read += meter.of(t.clone).read
    return unfused, read + sum(values[0][r].nbytes for r in set(chain.results))


def _described(chain):
    shapes = ", ".join(f"{k} {list(v)}" for k, v in chain.shapes.items())
    steps = "; ".join(f"{name} of {', '.join(map(str, operands))}" for name, *operands in chain.steps)
    return f"{shapes}: {steps}; returns {', '.join(chain.results)}"


# --- fusion.2 ---------------------------------------------------------------------------


@core.exercise(
    "fusion.2", "the graphs of 40 functions right: operators, order, numbers, shared values, results"
)
def capture(answer):
    for case in range(40):
        recipe = inputs.recipe(case)
        calls = []

        def fn(*args, recipe=recipe, calls=calls):
            calls.append(len(args))
            return recipe.run(*args)

        graph = core.call(answer, fn, recipe.count)
        core.require(
            calls == [recipe.count],
            f"{recipe}: the function was called {len(calls)} times, with "
            f"{calls} arguments: expected once, with {recipe.count}",
        )
        _same_graph(graph, recipe)
        _same_values(graph, recipe)
    for what, fn in inputs.UNCAPTURABLE.items():
        _refuses(answer, what, fn)


def _same_graph(graph, recipe):
    lists = [getattr(graph, name, None) for name in ("inputs", "nodes", "outputs")]
    if not all(isinstance(x, list | tuple) and all(isinstance(n, Node) for n in x) for x in lists):
        raise core.Wrong(
            f"expected a Graph whose inputs, nodes and outputs are lists of Node, got {core.kind(graph)}"
        )
    found, nodes, outputs = lists
    core.equal(len(found), recipe.count, f"{recipe}: inputs of the graph")
    core.equal(
        [n.op for n in nodes],
        [op for op, _ in recipe.expected],
        f"{recipe}: operators of the graph, in order",
    )
    names = {id(n): f"in{k}" for k, n in enumerate(found)}
    names |= {id(n): f"v{k}" for k, n in enumerate(nodes)}
    for k, (node, (op, args)) in enumerate(zip(nodes, recipe.expected, strict=True)):
        got = [_named(a, names) for a in node.args]
        if got != [str(a) for a in args]:
            raise core.Wrong(
                f"{recipe}: v{k} is {op}({', '.join(map(str, args))}), and the graph has "
                f"{op}({', '.join(got)})"
            )
    got = [_named(n, names) for n in outputs]
    core.require(
        got == recipe.results,
        f"{recipe}: the outputs are {', '.join(recipe.results)}, and the graph has "
        f"{', '.join(got) or 'none'}",
    )


def _named(a, names):
    "An argument by its name in the recipe, or as the number that it is."
    if isinstance(a, Node):
        return names.get(id(a), "a node that is not in the graph")
    return str(a) if isinstance(a, int | float) else core.kind(a)


def _same_values(graph, recipe):
    args = [torch.rand(3, 5, dtype=torch.float64) + 0.5 for _ in range(recipe.count)]
    want = recipe.run(*args)
    want = want if isinstance(want, tuple) else (want,)
    got = inputs.walk(graph, args)
    for k, (a, b) in enumerate(zip(got, want, strict=True)):
        # Roots of negative numbers are NaN on both sides.
        a, b = (t.double().nan_to_num(nan=-7.5, posinf=1e300, neginf=-1e300) for t in (a, b))
        core.close(a, b, f"{recipe}: output {k} of the graph", rtol=1e-9)


def _refuses(answer, what, fn):
    try:
        core.call(answer, fn, 1)
    except NotImplementedError:
        raise
    except Exception:
        return
    raise core.Wrong(
        f"a function with {what} was captured, and its graph has one of two paths: raise an exception"
    )


# --- fusion.3 ---------------------------------------------------------------------------


@core.exercise(
    "fusion.3", "30 graphs as one kernel each: results right, nothing read, computed or written twice"
)
def generate(answer):
    for case in range(30):
        graph, shapes, full = inputs.graph(case)
        source = _one_kernel(answer, graph, shapes, full, block=random.choice([8, 16, 32]))
        if case < 5:  # each kind of shapes
            _compiles(source, [*shapes, *[full] * len(graph.outputs)])


def _one_kernel(answer, graph, shapes, full, block):
    n = math.prod(full)
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    want = [v.expand(full) for v in inputs.walk(graph, tensors)]
    source = core.call(answer, graph, shapes)
    buffers = {f"in{k}": t.clone() for k, t in enumerate(tensors)}
    buffers |= {f"out{k}": core.poison(*full, dtype=torch.float64) for k in range(len(want))}
    what = f"inputs {', '.join(str(list(s)) for s in shapes)}"
    try:
        counts = fusion_tiles.run(source, buffers, n, block)
    except core.Wrong as e:
        raise core.Wrong(f"{what}: {e}") from None
    for k, value in enumerate(want):
        stored = {counts["store", f"out{k}", i] for i in range(n)}
        core.require(0 not in stored, f"{what}: not every element of out{k} was stored")
        core.close(buffers[f"out{k}"], value, f"{what}, output {k} of {_text(graph)}", rtol=1e-5, atol=1e-6)
        core.require(
            stored == {1}, f"{what}: elements of out{k} were stored {max(stored)} times: expected once"
        )
    for k, t in enumerate(tensors):
        core.require(torch.equal(buffers[f"in{k}"], t), f"{what}: the kernel wrote to in{k}")
    needed = inputs.reached(graph)
    for k, node in enumerate(graph.inputs):
        loads, expected = counts["load", f"in{k}"], int(id(node) in needed)
        reason = "once" if expected else "not at all, since no output needs it"
        core.require(
            loads == expected,
            f"{what}: a program loads in{k} {loads} times, and is to load it {reason}, in {_text(graph)}",
        )
    most = sum(_operations(node) for node in graph.nodes if id(node) in needed)
    core.require(
        counts["operations"] <= most,
        f"{what}: a program makes {counts['operations']} operations, {most} are enough for {_text(graph)}: "
        "compute each node that an output needs once",
    )
    return source


def _compiles(source, shapes):
    "Require the compiler for a GPU to take a kernel, where Triton is installed; no GPU is needed."
    if importlib.util.find_spec("triton") is None:
        return
    from course_lib.kernels import compiled

    fn = build(source, "cpu").fn
    values = [*(torch.zeros(shape) for shape in shapes), math.prod(shapes[-1]), 16]
    if reason := compiled.refusal(fn, dict(zip(inspect.signature(fn).parameters, values, strict=True))):
        raise core.Wrong(f"{fn.__name__} gives the right results, but {reason}")


def _operations(node):
    kinds = ["bool" if isinstance(a, Node) and a.op in inputs.COMPARISONS else
             "value" if isinstance(a, Node) else None for a in node.args]  # fmt: skip
    return fusion_tiles.operations(TRITON[node.op], kinds)


def _text(graph):
    return "`" + "; ".join(str(graph).splitlines()[1:])[:300] + "`"

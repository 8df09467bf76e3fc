"Checks of fusion. Oracles: meter, NaN that spreads, eager torch, watched loads and stores, Dynamo's graphs."

import ast
import contextlib
import inspect
import io
import itertools
import math
import operator
import random
from collections import Counter

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from course_lib import checking as core
from course_lib import fusion, meter
from course_lib.checking import yours  # noqa: F401


@core.exercise("fusion.1", "bytes of 30 chains right, operator by operator and as one kernel")
def chain_bytes(answer):
    for case in range(30):
        shapes, steps, results = _chain(case)
        size = random.choice([2, 8]) if case else 4
        got = core.call(answer, shapes, steps, results, *[size] * (case > 0))
        given = ", ".join(f"{k} {list(v)}" for k, v in shapes.items())
        given += ": " + "; ".join(f"{name} of {', '.join(map(str, args))}" for name, *args in steps)
        what = f"{given}; returns {', '.join(results)}; {size} bytes each"
        found, wants = core.parts(got, "unfused fused", what), _counted(shapes, steps, results, size)
        for part, mine, want in zip(("unfused", "fused"), found, wants, strict=True):
            core.equal(mine, want, f"{part}, {what}", "bytes")


def _chain(case):
    "Shapes, steps and results of a chain; each mistake shows at fixed cases, and in others by chance."
    rows, columns = core.ragged(3, 40, 2)
    shapes = {"x": (rows, columns), "y": (3,) * (case % 2) + (rows, columns)}
    shapes |= {"bias": (columns,), "scale": (rows, 1)} if case % 3 else {"one": ()}
    names, steps = list(shapes), []
    for k in range(random.randrange(3, 8)):
        a, b, c = random.sample([*names[-3:], *random.sample(names, 2)], 3)
        forms = [a, b], [a, a], [a, random.choice([1.5, -0.25, 2])], [a, b, c], [a]
        steps.append((f"t{k}", *forms[(case + k) % 5]))
        names.append(f"t{k}")
    results = random.sample([name for name, *_ in steps], 1 + (case % 4 == 1) + (case % 8 == 5))
    return shapes, steps, results + results[:1] * (case % 4 == 2)


def _counted(shapes, steps, results, size):
    "Unfused as `meter` counts it; fused by the inputs from which a NaN reaches a result."
    tensors = {k: torch.rand(s).to({2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[size])
               for k, s in shapes.items()}  # fmt: skip

    def run(values):
        for name, *args in steps:
            found = [values[a] for a in args if isinstance(a, str)]
            number = sum(a for a in args if not isinstance(a, str))
            forms = torch.addcmul, torch.add, (lambda a, n=number: a + n) if number else torch.exp
            values[name] = forms[3 - len(found)](*found)
        return values

    read = {k for k, t in tensors.items() for r in [run({**tensors, k: t * math.nan})]
            if any(r[name].isnan().any() for name in results)}  # fmt: skip
    whole = run(dict(tensors))
    unfused = meter.of(lambda: run(dict(tensors)), warmup=0).bytes
    return unfused, sum(whole[name].nbytes for name in {*read, *results})


BINARY = {"add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv}
UNARY = ("exp", "tanh", "sigmoid", "abs", "relu", "sqrt")


def _recipe(case, count):
    "A function of `count` tensors as steps (way to write it, name, arguments, keywords), and its results."
    values, steps = [f"in{k}" for k in range(count)][: max(1, count - (case % 3 == 0))], []
    for k in range(random.randrange(5, 9)):
        a, b, name = random.choice(values), random.choice(values), random.choice(UNARY)
        number = random.choice([2, 0.5, -1.25, round(random.uniform(0.1, 3), 3)])
        way = random.choice(["lt", "ge"])
        op, reflected = random.choice(list(BINARY)), list(BINARY)[case % 4]  # each of the four in turn
        new = [
            (BINARY[op], op, (a, b), {}),
            (BINARY[reflected], reflected, (number, a), {}),
            (operator.neg, "neg", (a,), {}),
            (operator.methodcaller(name), name, (a,), {}),
            (_method("maximum"), "maximum", *[((a, b), {}), ((a,), {"other": b})][case % 2]),
            (getattr(torch, name), name, (a,), {}),
            [(torch.sub, "sub", (number, a), {}), (torch.sub, "sub", (a, b), {"alpha": 2.5})][case % 2],
            (torch.maximum, "maximum", (a,), {"other": b}),
            (_method("clamp"), "clamp", *[((a,), {"min": number}), ((a, number, number + 1), {})][case % 2]),
            (operator.pow, "pow", (a, 2), {}),
            (getattr(operator, way), way, (a, b if case % 2 else number), {}),
            (torch.clamp, "clamp", (a,), {"max": 1.5} if case % 2 else {"min": number, "max": number + 1}),
        ][(case + k) % 12]
        steps.append(new)
        if new[1] == way:
            branches = [(a, b), (number, b), (a, number)][case % 3]
            steps.append((torch.where, "where", (f"v{len(steps) - 1}", *branches), {}))
        if k == 2:
            steps.append(steps[-1])  # the same again is another node
        values = [*values, f"v{len(steps) - 1}"]
    last = f"v{len(steps) - 1}"
    return steps, [[last], [random.choice(values), last], [last], [last, "in0", last]][case % 4]


def _method(name):
    return lambda a, *given, **named: getattr(a, name)(*given, **named)


def _run(steps, results, args):
    values = {f"in{k}": x for k, x in enumerate(args)}
    for k, (fn, _, given, named) in enumerate(steps):
        given, named = pytree.tree_map_only(str, values.get, (given, named))
        values[f"v{k}"] = fn(*given, **named)
    return tuple(values[r] for r in results) if len(results) > 1 else values[results[0]]


def _line(name, op, args, named):
    return f"{name} = {op}({', '.join([*map(str, args), *(f'{k}={v}' for k, v in named.items())])})"


@core.exercise("fusion.2", "graphs of 40 functions right: functions, order, numbers, shared values, results")
def capture(answer):
    for case in range(40):
        count, calls = 1 + case % 3, []
        steps, results = _recipe(case, count)

        def fn(*args, steps=steps, results=results, calls=calls):
            calls.append(len(args))
            core.require(not any(hasattr(a, "_x") for a in args), "`x._x` must raise an AttributeError")
            return _run(steps, results, args)

        graph = core.call(answer, fn, count)
        want = [_line(f"v{k}", op, args, named) for k, (_, op, args, named) in enumerate(steps)]
        want.append(f"return {results[0] if len(results) == 1 else tuple(results)}".replace("'", ""))
        where = f" (for {'; '.join(want)[:300]})"
        core.require(calls == [count], f"call the function once, with {count} stand-ins{where}")
        core.require(isinstance(graph, fx.Graph), f"expected a torch.fx.Graph, got {core.kind(graph)}")
        names, got = {}, []
        for node in graph.nodes:
            names[node] = f"in{len(names)}" if node.op == "placeholder" else f"v{len(names) - count}"
            args, named = fx.map_arg((node.args, dict(node.kwargs)), names.get)
            if node.op == "call_function":
                op = {"truediv": "div"}.get(node.target.__name__, node.target.__name__)
                own = node.target in (getattr(torch, op, 0), getattr(operator, node.target.__name__, 0))
                core.require(own, f"expected torch.{op}, the graph calls {node.target}{where}")
                got.append(_line(names[node], op, args, named))
            elif node.op == "output":
                last = tuple(args[0]) if isinstance(args[0], list) else args[0]
                got.append(f"return {last}".replace("'", ""))
        inputs = len(graph.find_nodes(op="placeholder"))
        core.equal(inputs, count, f"placeholders of the graph{where}")
        for mine, line in itertools.zip_longest(got, want):
            core.require(mine == line, f"expected `{line}`, the graph has `{mine}`{where}")
        fx.GraphModule(nn.Module(), graph)(*(torch.rand(3, 5) for _ in range(count)))
    for word, fn in {"if": lambda x: x * 2 if x > 0 else x, "and": lambda x: x > 0 and x * 2}.items():
        why = f"a function with `{word}` is not one graph: expected a TypeError"
        try:
            got = core.kind(core.call(answer, fn, 1))
        except core.Wrong as e:
            got = core.describe(e.cause or e)
        core.require(got.startswith("TypeError: "), f"{why} with a sentence, got {got}")


@core.exercise("fusion.3", "24 graphs as one kernel each: right, and nothing read, computed or written twice")
def generate(answer):
    for case in range(24):
        fn, args = _kernel_case(case)
        traced = fusion.trace(fn, *args)
        calls = [n for n in traced.graph.nodes if n.op == "call_function"]
        try:
            _one_kernel(answer, case, fn, args, traced, calls)
        except core.Wrong as e:
            text = "; ".join(f"{n.name} = {str(n.target)[5:]}({', '.join(map(str, n.args))})" for n in calls)
            shapes = ", ".join(str(list(a.shape)) for a in args)
            raise core.Wrong(f"{e} (inputs {shapes}; {text[:100]} …)") from None


def _one_kernel(answer, case, fn, args, traced, calls):
    from course_lib.kernels import compiled, watch

    source = core.call(answer, traced.graph, traced.shapes)
    core.require(isinstance(source, str), f"expected source text, got {core.kind(source)}")
    n, block = math.prod(traced.full), random.choice([8, 16, 32])
    out = [core.poison(*traced.full) for _ in traced.made]
    try:
        kernel, given = fusion.build(source), core.clone(args)
        with watch.watch() as w:
            kernel[(-(-n // block),)](*given, *out, n, BLOCK=block)
    except Exception as e:
        raise core.Wrong(f"the kernel raised {core.describe(e.__cause__ or e)}") from None
    for fault in (*w.outside, *w.races):
        raise core.Wrong(str(fault))
    names = list(inspect.signature(kernel.fn).parameters)  # the learner's own
    want, short = (dict(zip(traced.returns, fn(*map(f, args)), strict=True))
                   for f in (torch.Tensor.double, torch.Tensor.float))  # fmt: skip
    for k, (name, o) in enumerate(zip(names[len(args) :], out, strict=False)):
        value, near = (t["out", k].expand(traced.full).double() for t in (want, short))
        # Where eager's float32 isn't enough (a large exp, a small divisor), nobody's is.
        compared = torch.isclose(near, value, rtol=2e-5, atol=2e-6, equal_nan=True)
        mine, value = (
            torch.where(compared, t.double(), 0.0).nan_to_num(-7.5, 1e30, -1e30) for t in (o, value)
        )
        core.close(mine, value, name, rtol=2e-4, atol=2e-5)
        core.require(w.stores[name].most == 1, f"store each element of {name} once")
    for name, node in zip(names, traced.graph.find_nodes(op="placeholder"), strict=False):
        lanes = w.loads[name].elements
        core.require(not w.stores[name].elements, f"the kernel writes to {name}")
        right = 0 < lanes <= n if node.users else not lanes
        expected = n if node.users else "none, for no node uses it"
        core.require(right, f"{name}: elements loaded: expected {expected}, got {lanes}")
    most = sum(_operations(f"x = tl.load(x)\n{fusion.TRITON[c.target].format(*'xxx')}") for c in calls)
    more = f"{most} operations with loaded values are enough, got {_operations(source)}"
    core.require(_operations(source) <= most, f"compute each node once: {more}")
    bound = zip(names, [*args, *out, n, 16], strict=True)
    if case < 4 and (reason := compiled.refusal(kernel.fn, dict(bound))):
        raise core.Wrong(f"right in the interpreter, but {reason}")


def _kernel_case(case):
    "A function of four inputs, the last of which it doesn't use, and its arguments."
    rows, columns = core.ragged(3, 12, 2)
    rows = columns if case % 4 == 3 else rows
    full, row, column = (rows, columns), (columns,), (rows, 1)
    shapes = [[full, row, column], [(), full, row], [column, row, ()], [row, column, full]][case % 4] + [row]
    steps, results = _recipe(3 * case, 4)

    def fn(*args):
        found, whole = _run(steps, [*results, results[0]], args), args[0] + args[1] * args[2]
        return (*(torch.where(whole > math.inf, whole, r) for r in found), 0.5 - whole)

    return fn, [torch.randn(s).to(random.choice([torch.float32, torch.bfloat16])) for s in shapes]


def _operations(source):
    "How many operations of a source depend on what it loads: no index, no comment."
    count, loaded, of_tl = 0, set(), ("exp", "abs", "sqrt", "rsqrt", "maximum", "minimum", "where")

    def depends(node):
        return any(getattr(n, "id", 0) in loaded or getattr(n, "attr", 0) == "load" for n in ast.walk(node))

    for line in [line for f in ast.parse(source).body for line in getattr(f, "body", [f])]:
        for n in filter(depends, ast.walk(line)):
            called = isinstance(n, ast.Call) and getattr(n.func, "attr", 0) in of_tl
            count += called or isinstance(n, ast.BinOp | ast.UnaryOp | ast.Compare)
        if isinstance(line, ast.Assign):
            made = {n.id for target in line.targets for n in ast.walk(target) if isinstance(n, ast.Name)}
            loaded = loaded | made if depends(line.value) else loaded - made
    return count


def _compiled(fn, calls, what, backend="eager", **options):
    "`meter.compiled`, with what `fn` raises in one sentence; and what was printed."
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            found = meter.compiled(fn, *calls[0], then=calls[1:], backend=backend, **options)
    except core.Wrong:
        raise
    except Exception as e:
        if core._is_stub(e):
            raise NotImplementedError from None
        raise core.Wrong(f"compiled, {what} raised {core.describe(e)}") from None
    return found, printed.getvalue()


@core.exercise("fusion.4", "every graph printed, counted and run: whole, cut in two, and compiled again")
def counting(answer):
    core.need_callable(answer)
    for case in range(4):
        tanhs, exps, muls = (random.randrange(1, 5) for _ in range(3))

        def fn(x, y, tanhs=tanhs, exps=exps, muls=muls, cut=case % 2):
            for _ in range(tanhs):
                x = torch.tanh(x)
            for _ in range(muls):
                x = x * y
            if cut:
                torch._dynamo.graph_break()
            for _ in range(exps):
                x = (x - y).exp()
            return x

        first, second = Counter(tanh=tanhs, mul=muls), Counter(sub=exps, exp=exps)
        want = [first, second] if case % 2 else [first + second]
        rows, columns = core.ragged(3, 9, 2)
        sizes, want = [rows, rows] + [rows + 1] * (case > 1), want * (1 + (case > 1))
        calls = [(torch.rand(n, columns, requires_grad=True), torch.rand(n, columns)) for n in sizes]
        graphs = []
        found, printed = _compiled(fn, calls, "a function", core.call(lambda g=graphs: answer(g)))
        what = f"{tanhs} tanh, {muls} mul, {exps} sub, {exps} exp{', cut after mul' * (case % 2)}"
        got = [dict(g) if isinstance(g, dict) else g for g in graphs]
        core.equal(got, [dict(w) for w in want], f"{what}, in {len(calls)} calls: the list of counts")
        for call, mine in zip(calls, found.results, strict=True):
            core.close(mine, fn(*call), f"{what}: the compiled function's result")
            core.require(mine.requires_grad, f"{what}: expected a result with a gradient, got one without")
        for name, n in sum(want, Counter()).items():
            missing = f"{what}: every graph is printed, and {name} is not there {n} times"
            core.require(printed.count(name) >= n, missing)


@core.exercise("fusion.5", "one graph, no break, right on both sides of the limit")
def standardise(answer):
    core.need_callable(answer)
    for case in range(4):
        n, d = core.ragged(3, 14, 2)
        # Columns lie on both sides of the limit, so that the mean of all and theirs decide differently.
        x = torch.randn(n, d) + random.uniform(2, 4) * torch.linspace(-1, 1, d)[torch.randperm(d)]
        x = -x.abs() - 0.1 if case == 3 else x  # nothing is positive: the sum over no element is 0
        sides = [float(x.mean()) + s * random.uniform(0.05, 0.3) for s in random.sample([-1, 1], 2)]
        calls = [(x, 5.0), (x.double() - 1, 5.0)] if case == 3 else [(x, s) for s in sides]
        exact = torch.tensor([[1.0, 3.0], [2.0, 6.0]]) + random.randrange(9)
        calls = [(exact.requires_grad_(), exact.mean().item())] if case == 2 else calls
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            _right([core.call(answer, *c) for c in calls], calls, "")
        core.require(not printed.getvalue(), f"expected nothing printed, got {printed.getvalue()[:40]!r}")
        what = f"standardise{core.shapes((x, round(calls[0][1], 3)))}"
        if case > 1:
            continue
        for call in calls:  # each alone, so that a branch not taken the first time is counted too
            found, _ = _compiled(answer, [core.clone(call)], what)
            for b in found.breaks[:1]:
                at = f"a graph break (the first of {len(found.breaks)}) at `{b.code[:60] or b.where}`"
                raise core.Wrong(f"{what}: {at}: {b.reason[:80]}")
            core.require(found.totals == found.ran == [1], f"{what}: expected one graph, got {found.graphs}")
        found, _ = _compiled(answer, core.clone(calls), what)
        core.require(not found.eager, f"{what}: a call of the compiled function ran eagerly")
        _right(found.results, calls, "compiled, ")


def _right(results, calls, how):
    for got, (given, limit) in zip(results, calls, strict=True):
        x = given.detach()
        mean = float(x.mean())
        side = "above" if mean > limit else "below" if mean < limit else "equal to"
        what = f"{how}{core.shapes((x,))[1:-1]} whose mean is {side} the limit"
        y, peak = core.parts(got, "y peak", what)
        core.close(peak, x.abs().max(), f"{what}: peak", rtol=1e-5)
        z = x.double() - x.double().mean(0, keepdim=True) * (side == "above")
        z = z / (1 + math.sqrt(float((z - z.mean()).square().sum()) / (z.numel() - 1)))
        for name, t in (("y", y), ("peak", peak)):
            right = getattr(t, "dtype", 0) == x.dtype
            core.require(right, f"{what}: {name}: expected {x.dtype}, got {core.kind(t)}")
        lost = given.requires_grad and not y.requires_grad
        core.require(not lost, f"{what}: y: expected a gradient as in careless, got a result without one")
        core.close(y, z * sum(v for v in z.flatten().tolist() if v > 0), f"{what}: y", rtol=1e-3, atol=1e-4)


@core.exercise("fusion.6", "two graphs for 10 calls that all differ, and the results right in each")
def tracker(answer):
    core.need_callable(answer, "a class")
    for training in (True, False):  # which changes nothing
        width = random.randrange(3, 9)
        # Not 0 or 1, for which Dynamo makes graphs of their own; rows and repeats change in each call.
        sizes = zip(core.ragged(2, 30, 10), core.ragged(2, 60, 10), strict=True)
        calls = [(torch.randn(n, width) + 2, repeats) for n, repeats in sizes]
        module, other = (core.call(answer, width) for _ in range(2))
        core.require(isinstance(module, nn.Module), f"expected an nn.Module, got {core.kind(module)}")
        how = "" if training else "after .eval(), "
        _tracked([core.call(module.train(training), *c) for c in calls], calls, how)
        # Past this limit Dynamo gives up: enough to see a storm.
        found, _ = _compiled(other, core.clone(calls), f"Tracker({width})", limit=4)
        for b in found.breaks[:1]:
            raise core.Wrong(f"a graph break at `{b.code[:60] or b.where}`: {b.reason[:80]}")
        if found.graphs > 2:
            third = next(i for i, n in enumerate(found.totals) if n > 2)
            guards = [r.guard for r in found.recompiles if "size mismatch at index 0" not in r.guard]
            why = f"; the guard that failed: `{guards[-1][:80]}`" if guards else ""
            storm = f"call {third + 1} needs a third graph, expected two for {len(calls)} calls"
            raise core.Wrong(f"{storm}{why}")
        core.require(not found.eager, "a call of the compiled module ran eagerly")
        _tracked(found.results, calls, "compiled, ")


def _tracked(results, calls, how):
    for k, (got, (x, repeats)) in enumerate(zip(results, calls, strict=True), 1):
        mean = torch.stack([c[0].double().mean(0) for c in calls[:k]]).mean(0)
        want = (x.double() - mean) / (1 - 0.9**k) * 0.9**repeats
        core.close(got, want, f"{how}call {k}, {core.shapes((x, repeats))}", rtol=2e-3, atol=1e-5)

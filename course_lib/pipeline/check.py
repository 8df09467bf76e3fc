"""Checks of lesson pipeline. Oracles: graphlib's topological order for validity and times, the schedules'
formulas for length and memory, autograd in float64 and PyTorch's counter of FLOPs for the backward."""

import copy
import graphlib
import itertools
import numbers
import random

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from course_lib import checking as core
from course_lib.checking import yours  # noqa: F401

TICKS = {"F": 1, "B": 2, "I": 1, "W": 1}


def _before(op, ops, last):
    "What an operation needs, or None where that isn't in the plan."
    kind, i, s = op
    gradient = next((o for o in (("I", i, s + 1), ("B", i, s + 1)) if o in ops), None)
    found = {"F": [("F", i, s - 1)] * (s > 0), "W": [("I", i, s)]}.get(kind)
    return [("F", i, s)] + [gradient] * (s < last) if found is None else found


def _times(plan):
    "({op: (rank, start, end)} on a clock of ticks, None), or (None, the operations of a cycle)."
    where = {op: rank for rank, row in enumerate(plan) for op in row}
    last = max(op[2] for op in where)
    graph = {op: set(_before(op, where, last)) for op in where}
    for row in plan:
        for a, b in itertools.pairwise(row):
            graph[b].add(a)
    try:
        order = list(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as e:
        return None, e.args[1]
    ends = {}
    for op in order:
        ends[op] = max((ends[n] for n in graph[op]), default=0) + TICKS[op[0]]
    return {op: (where[op], ends[op] - TICKS[op[0]], ends[op]) for op in order}, None


def _short_text(got):
    return str(got).splitlines()[0][:60] if isinstance(got, list | tuple | str | bool) else core.kind(got)


def _plan_text(plan, small=12, most=40):
    "A plan in one line: as Python where it is small, as kind microbatch/stage where it is longer."
    if (n := sum(map(len, plan))) <= small:
        return str(plan)
    rows = (" ".join(f"{kind}{i}/{s}" for kind, i, s in row) for row in plan)
    return " | ".join(rows) if n <= most else f"{len(plan)} ranks, {n} operations"


def _words(op):
    return f"{op[0]} of microbatch {op[1]} in stage {op[2]}"


def _judged(answer, args, p, m, stages, kinds):
    "Call a schedule and hold its plan to what all plans need: (ticks, most kept by rank, its name, plan)."
    what, lists = f"{getattr(answer, '__name__', 'the schedule')}{args}", (list, tuple)
    got = core.call(answer, *args)
    good = isinstance(got, lists) and all(isinstance(row, lists) for row in got)
    shown = f"a list of {len(got)}" if good else core.kind(got)
    if isinstance(got, lists) and not good:
        k, row = next((k, row) for k, row in enumerate(got) if not isinstance(row, lists))
        shown = f"a list whose row {k} is {core.kind(row)}"
    core.require(good and len(got) == p, f"{what}: expected a list of {p} lists, got {shown}")
    plan, seen = [list(row) for row in got], set()
    form = f"kinds {', '.join(kinds)}, ints below {m} for microbatches and below {stages} for stages"
    for rank, row in enumerate(plan):
        for k, op in enumerate(row):
            fits = isinstance(op, tuple) and len(op) == 3 and op[0] in tuple(kinds)
            fits = fits and all(isinstance(n, numbers.Integral) for n in op[1:])
            fits = fits and op[1] in range(m) and op[2] in range(stages)
            expected = f"{what}: expected tuples (kind, microbatch, stage), {form}"
            core.require(fits, f"{expected}, got {_short_text(op)}")
            row[k] = op = op[0], int(op[1]), int(op[2])
            home = op[2] % p
            core.require(home == rank, f"{what}: rank {rank} has {_words(op)}, which is on rank {home}")
            core.require(op not in seen, f"{what}: {_words(op)} is there twice")
            seen.add(op)
    for i, s in itertools.product(range(m), range(stages)):
        found = {kind for kind in "FBIW" if (kind, i, s) in seen}
        for kind in "FIW" if found & {"I", "W"} or "B" not in kinds else "FB":
            core.require(kind in found, f"{what}: {_words((kind, i, s))} is missing")
        twice = (
            f"{what}: B stands beside I and W of microbatch {i} in stage {s}: the gradients are added twice"
        )
        core.require(not {"B", "I"} <= found, twice)
    times, cycle = _times(plan)
    if not times:
        raise core.Wrong(f"{what}: the ranks wait for each other; one of them waits at {_words(cycle[0])}")
    return max(end for _, _, end in times.values()), [_most(row) for row in plan], what, plan


def _most(row):
    "How many microbatches a rank keeps at most."
    kept, most = set(), 0
    for kind, *which in row:
        if kind == "F":
            kept.add(tuple(which))
        elif kind in "BW":
            kept.discard(tuple(which))
        most = max(most, len(kept))
    return most


def _short(ticks, most, what):
    core.require(ticks <= most, f"{what}: expected at most {most} ticks, it takes {ticks} on the clock")


def _small(kept, limits, what):
    for rank, (n, most) in enumerate(zip(kept, limits, strict=True)):
        core.require(n <= most, f"{what}: rank {rank} may keep {most} microbatches at most, it keeps {n}")


def _sizes(n=5):
    drawn = [(random.randint(2, 7), random.randint(1, 17)) for _ in range(n)]
    return [(1, 3), (2, 2), (4, 2), (3, 1), (7, 11), *drawn]


@core.exercise("pipeline.1", "every reason named, on random plans; those that can run pass")
def problem(answer):
    core.need_callable(answer)
    for v, p in ((1, 2), (2, 2), (1, random.randint(3, 4)), (2, random.randint(2, 4))):  # small ones first
        m = 2 if p == 2 else random.randint(2, 6)
        _reason(answer, _valid_plan(p, v, m, None), None, None, "a plan that can run, with both B and halves")
        for halves in (False, True):
            plan = _valid_plan(p, v, m, halves)
            _reason(answer, plan, None, None, "a plan that can run")
            for kind in "FIW" if halves else "FB":
                s = p * v - 1 if kind == "F" else random.randrange(p * v)
                op = kind, random.randrange(m), s
                less = [[o for o in row if o != op] for row in plan]
                _reason(answer, less, "missing", {op}, f"a plan without {_words(op)}")
            i, s = op[1:]
            first = [[o for o in row if o[1:] != (i, s) or o[0] == "F"] for row in plan]
            words = f"a plan where microbatch {i} has only F in stage {s}"
            _reason(answer, first, "missing", {("B", i, s)}, words)
            lost = [[o for o in row if o[1] < m - 1 or k] for k, row in enumerate(plan)]
            firsts = {(k, m - 1, o[2]) for o in plan[0] for k in "FB"}
            _reason(answer, lost, "missing", firsts, f"a plan whose rank 0 has no microbatch {m - 1}")
            for a, b in ("FI", "IW") if halves else ("FB",):
                a, b = (a, i, s), (b, i, s)
                swapped = [[{a: b, b: a}.get(o, o) for o in row] for row in plan]
                wrong = {o for row in swapped for k, o in enumerate(row)
                         if not _needed(o, plan).isdisjoint(row[k + 1 :])}  # fmt: skip
                _reason(answer, swapped, "order", wrong, f"a plan with {_words(b)} before {_words(a)}")
                gone = op[0], (i + 1) % m, s
                both = [[o for o in row if o != gone] for row in swapped]
                words = f"a plan with {_words(b)} before {_words(a)}, and without {_words(gone)}"
                _reason(answer, both, "missing", {gone}, words)
            if v == 2:
                s = random.randrange(p * v - 1)
                less = [[o for o in row if o[2] != s] for row in plan]
                every = {(k, i, s) for k in "FB" for i in range(m)}
                _reason(answer, less, "missing", every, f"a plan without stage {s}")
            stuck = _with_cycle(plan)
            _reason(answer, stuck, "cycle", {_head(stuck)}, "a plan whose ranks wait for each other")
    _reason(answer, [[("F", 0, 0), ("B", 0, 0)]], None, None, "a plan of one rank and one microbatch")
    v_shape = [[(k, 0, s) for k, s in zip("FFBB", row, strict=True)] for row in ((0, 3, 3, 0), (2, 1, 2, 1))]
    _reason(answer, v_shape, "order", {("F", 0, 2)}, "a plan whose rank 1 has stage 2 before stage 1")


def _needed(op, plan):
    ops = {o for row in plan for o in row}
    return set(_before(op, ops, max(o[2] for o in ops)))


def _reason(answer, plan, reason, ops, words):
    words, got = f"{words} ({_plan_text(plan)})", core.call(answer, plan)
    if reason is None:
        core.require(got is None, f"{words}: expected None, got {_short_text(got)}")
        return
    core.require(got is not None, f"{words}: expected ({reason!r}, op), got None")
    named, op = core.parts(got, "reason op", f"{words}")
    core.equal(named, reason, f"{words}: the reason")
    op = tuple(op) if isinstance(op, list | tuple) else op
    core.require(
        op in ops,
        f"{words}: expected {' or '.join(map(str, sorted(ops)[:2]))}, got {_short_text(op)}",
    )


def _valid_plan(p, v, m, halves):
    "A random plan that can run; `halves` None: of some microbatches. Two stages a rank lie in a loop or a V."
    stages, ended = p * v, set()
    turn = random.choice((lambda s: s - p, lambda s: 2 * p - 1 - s))
    home = {s: s if s < p else turn(s) for s in range(stages)}
    split = {(i, s): halves for s in home for i in range(m)}
    if halves is None:  # in one stage at least, one microbatch has halves and one has not
        split = {which: random.random() < 0.5 for which in split}
        mixed = random.randrange(stages)
        split[0, mixed], split[1, mixed] = random.choice(((True, False), (False, True)))
    rest = {(k, *which) for which, half in split.items() for k in ("FIW" if half else "FB")}
    plan, every = [[] for _ in range(p)], frozenset(rest)
    while rest:
        op = random.choice([o for o in sorted(rest) if ended.issuperset(_before(o, every, stages - 1))])
        plan[home[op[2]]].append(op)
        ended.add(op)
        rest.remove(op)
    return plan


def _with_cycle(plan):
    "The plan, or a small one, with a rank's microbatches in an order in which ranks wait for each other."
    for _ in range(20):
        rank, n = random.randrange(len(plan)), 1 + max(i for row in plan for _, i, _ in row)
        new = dict(zip(range(n), random.sample(range(n), n), strict=True))
        found = [[(k, new[i], s) for k, i, s in row] if r == rank else row for r, row in enumerate(plan)]
        if _times(found)[1]:
            return found
    return [
        [("F", 0, 0), ("B", 0, 0), ("F", 1, 0), ("B", 1, 0)],
        [("F", 1, 1), ("B", 1, 1), ("F", 0, 1), ("B", 0, 1)],
    ]


def _head(plan):
    "What the lowest of the waiting ranks has to do next."
    left, ended = [list(row) for row in plan], set()
    while ready := [row for row in left if row and ended.issuperset(_needed(row[0], plan))]:
        ended.add(ready[0].pop(0))
    return next(row[0] for row in left if row)


@core.exercise("pipeline.2", "all forwards, then all backwards, for any number of ranks and microbatches")
def gpipe(answer):
    for p, m in _sizes():
        ticks, _, what, plan = _judged(answer, (p, m), p, m, p, "FB")
        for rank, row in enumerate(plan):
            want = [(kind, i, rank) for kind in "FB" for i in range(m)]
            at = next((k for k in range(2 * m) if row[k] != want[k]), None)
            core.require(
                at is None,
                f"{what}: expected {want[at or 0]} at position {at} of rank {rank}, got {row[at or 0]}",
            )
        core.equal(ticks, 3 * (m + p - 1), f"{what}: ticks on the clock")


@core.exercise("pipeline.3", "bubble and kept microbatches of any plan, with times of any kind")
def cost(answer):
    late = [(kind, int(i), 0) for kind, i in zip("FIFWIFWIW", "001012122", strict=True)]  # W ends, I doesn't
    plans = [_valid_plan(random.randint(1, 5), v, random.randint(1, 7), v > 1) for v in (1, 1, 1, 2, 2, 2)]
    for plan in [[late], [late[:2] + late[3:4], late], *plans]:
        p, begin, spans, work = len(plan), random.uniform(0.5, 9), [], 0
        for row in plan:
            now, found = begin + random.random(), []
            for op in row:
                start = now + random.choice((0, random.random()))
                now = start + random.uniform(0.1, 2)
                work += now - start
                found.append((op, start, now))
            spans.append(found)
        first, last = min(row[0][1] for row in spans), max(row[-1][2] for row in spans)
        what = f"{_plan_text(plan, 0, 27)}, from {first:.2f} to {last:.2f} s, {work:.2f} s of work in all"
        bubble, kept = core.parts(core.call(answer, spans), "bubble kept", what)
        kept = kept.tolist() if hasattr(kept, "tolist") else kept
        core.close(bubble, 1 - work / (p * (last - first)), f"{what}: the bubble")
        want = [_most(row) for row in plan]
        good = isinstance(kept, list | tuple) and list(kept) == want
        core.require(good, f"{what}: expected {want} microbatches kept by rank, got {_short_text(kept)}")


@core.exercise("pipeline.4", "GPipe's time with min(m, p - r) microbatches kept, for any numbers")
def one_f_one_b(answer):
    for p, m in _sizes():
        ticks, kept, what, _ = _judged(answer, (p, m), p, m, p, "FB")
        _short(ticks, 3 * (m + p - 1), what)
        _small(kept, [min(m, p - rank) for rank in range(p)], what)


@core.exercise("pipeline.5", "autograd's gradients in two halves, each with the FLOPs of the forward at most")
def split_backward(input_half, weight_half):
    core.need_callable(input_half)
    core.need_callable(weight_half)
    for count in (1, 2, random.randint(3, 4)):
        sizes = list(itertools.pairwise(core.ragged(3, 12, count + 1)))
        layers = [nn.Sequential(nn.Linear(a, b, bias=a % 2 == 0), nn.Tanh()) for a, b in sizes]
        if count > 1:
            layers.insert(1, nn.GELU())  # no parameters
            layers.append(nn.LayerNorm(sizes[-1][1]))
        model = nn.Sequential(*layers).double()  # in float32 LayerNorm's rounding would decide
        oracle, shapes = copy.deepcopy(model), [(n, sizes[0][0]) for n in core.ragged(2, 9, 2)]
        kept = [_input_half(input_half, oracle, model, torch.randn(*n, dtype=torch.float64)) for n in shapes]
        for outs, grads, most in random.sample(kept, 2):  # W comes later, in any order
            with FlopCounterMode(display=False) as flops:
                weight_half(layers, outs, grads)
            cure = "go back through one layer for its weights"
            core.require(
                flops.get_total_flops() <= most, f"W takes more FLOPs than the forward's {most}: {cure}"
            )
        for (name, p), q in zip(model.named_parameters(), oracle.parameters(), strict=True):
            what = f"stage of {len(layers)}, after I and W of two microbatches: .grad of parameter {name}"
            core.require(p.grad is not None, f"{what} is None")
            core.close(p.grad, q.grad, what, 1e-3, 1e-5)


def _input_half(answer, oracle, model, x):
    "Call I for one microbatch and compare: outs, grads, the FLOPs of the forward."
    outs, wants = [x.requires_grad_()], [x.detach().clone().requires_grad_()]
    with FlopCounterMode(display=False) as forward:
        for layer in model:
            outs.append(layer(outs[-1]))
    for layer in oracle:
        wants.append(layer(wants[-1]))
        wants[-1].retain_grad()
    grad, outs, what = torch.randn_like(outs[-1]), outs[1:], "input_backward"
    wants[-1].backward(grad)
    given = list(outs)
    with FlopCounterMode(display=False) as flops:
        of_x, grads = core.parts(
            answer(x, given, grad.clone()), "gradient_of_x grads", f"what {what} returns"
        )
    same = len(given) == len(outs) and all(a is b for a, b in zip(given, outs, strict=True))
    core.require(same, f"{what} changes the list outs; W needs it as it was")
    core.close(of_x, wants[0].grad, f"{what}: the gradient of x", 1e-3, 1e-5)
    good = isinstance(grads, list | tuple) and len(grads) == len(outs)
    core.require(good, f"{what}: expected {len(outs)} gradients, one for each output, got {core.kind(grads)}")
    for k, (g, want) in enumerate(zip(grads, wants[1:], strict=True)):
        core.close(g, want.grad, f"{what}: the gradient of outs[{k}]", 1e-3, 1e-5)
    graph = of_x.requires_grad or any(g.requires_grad for g in grads)
    core.require(not graph, f"{what}: the gradients keep a graph of their own; call without create_graph")
    untouched = x.grad is None and all(p.grad is None for p in model.parameters())
    core.require(untouched, f"{what} fills .grad; torch.autograd.grad returns gradients instead")
    most = forward.get_total_flops()
    cure = "one walk from outs[-1] to x gives all gradients, without those of weights"
    core.require(flops.get_total_flops() <= most, f"I takes more FLOPs than the forward's {most}: {cure}")
    return outs, list(grads), most


@core.exercise("pipeline.6", "3m + p - 1 ticks, and no rank keeps more than 1F1B's rank 0")
def zero_bubble(answer):
    for p, m in [*_sizes(), (5, 3), (4, 9)]:
        ticks, kept, what, _ = _judged(answer, (p, m), p, m, p, "FIWB")
        _small(kept, [min(p, m)] * p, what)
        _short(ticks, 3 * m + p - 1 if m >= p else 3 * (m + p - 1) - 1, what)


@core.exercise("pipeline.7", "a bubble of (p-1)/(vm+p-1) with the memory of the interleaved 1F1B")
def interleaved(answer):
    drawn = [(random.randint(2, 5), random.randint(1, 4), random.randint(1, 3)) for _ in range(4)]
    for p, v, rounds in [(1, 2, 3), (3, 3, 1), (4, 2, 2), (3, 1, 2), *drawn]:
        m = p * rounds
        ticks, kept, what, _ = _judged(answer, (p, v, m), p, m, p * v, "FB")
        _short(ticks, 3 * (v * m + p - 1), what)
        _small(kept, [min(v * m, 2 * (p - r - 1) + (v - 1) * p + 1) for r in range(p)], what)

"Answers to the exercises of pipeline: the course's, right ones of another style, and wrong ones."

import graphlib
import itertools

import numpy as np
import torch

from course_lib.pipeline import solutions

REFERENCE = {
    n: getattr(solutions, names[0]) if len(names) == 1 else tuple(getattr(solutions, name) for name in names)
    for n, names in solutions.EXERCISES.items()
}


# --- pipeline.1: can this plan run ------------------------------------------------------------


def by_graph(plan):
    "Right: a topological sort instead of a replay."
    ops = [op for row in plan for op in row]
    last = max(op[2] for op in ops)
    for i, s in itertools.product(sorted({op[1] for op in ops}), range(last + 1)):
        kinds = "".join(k for k in "FBIW" if (k, i, s) in ops)
        if kinds not in ("FB", "FIW"):
            return "missing", (
                next(k for k in ("FIW" if set(kinds) & set("IW") else "FB") if k not in kinds),
                i,
                s,
            )
    graph = {op: set(solutions.needs(op, set(ops), last)) for op in ops}
    for row in plan:
        for k, op in enumerate(row):
            if graph[op] & set(row[k + 1 :]):
                return ["order", op]
            graph[op] |= set(row[k - 1 : k])
    try:
        list(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError:
        done = set()
        while ready := {op for op in ops if op not in done and graph[op] <= done}:
            done |= ready
        return "cycle", next(op for op in ops if op not in done)


def by_counting(plan):
    "Right: dictionaries of kinds, then a queue of ranks."
    kinds = {}
    for kind, i, s in itertools.chain(*plan):
        kinds.setdefault((i, s), set()).add(kind)
    last, all_ops = max(s for _, s in kinds), {(k, i, s) for (i, s), some in kinds.items() for k in some}
    for i in {i for i, _ in kinds}:
        for s in range(last + 1):
            have = kinds.get((i, s), set())
            for k in ("F", "I", "W") if have & {"I", "W"} else ("F", "B"):
                if k not in have:
                    return ("missing", (k, i, s))
    for row in plan:
        seen = set()
        for op in row:
            if any(n in row and n not in seen for n in solutions.needs(op, all_ops, last)):
                return ("order", op)
            seen.add(op)
    heads, done = [0] * len(plan), set()
    for _ in range(len(all_ops)):
        for r, row in enumerate(plan):
            if heads[r] < len(row) and all(n in done for n in solutions.needs(row[heads[r]], all_ops, last)):
                done.add(row[heads[r]])
                heads[r] += 1
    stuck = [row[h] for h, row in zip(heads, plan, strict=True) if h < len(row)]
    return ("cycle", stuck[0]) if stuck else None


def b_first(plan):
    "Right: where all kinds are missing, it names the B."
    place = {op for row in plan for op in row}
    for i in {i for _, i, _ in place}:
        for s in range(1 + max(s for _, _, s in place)):
            found = {kind for kind in "FBIW" if (kind, i, s) in place}
            for kind in "WIF" if found & {"I", "W"} else "BF":
                if kind not in found:
                    return "missing", (kind, i, s)
    return solutions.problem(plan)


def order_within_a_stage(plan):
    "Calls it a cycle where two stages of one rank are in the wrong order."
    found = solutions.problem(plan)
    if not found or found[0] != "order":
        return found
    for row in plan:
        for k, (kind, i, s) in enumerate(row):
            needed = {"F": (), "W": [("I", i, s)]}.get(kind, [("F", i, s)])
            if any(n in row[k + 1 :] for n in needed):
                return "order", (kind, i, s)
    return "cycle", next(row[0] for row in plan if row[0][::2] != ("F", 0))


def order_first(plan):
    "Looks for a missing operation last."
    ops = {op for row in plan for op in row}
    last = max(s for _, _, s in ops)
    for row in plan:
        for k, op in enumerate(row):
            if any(n in row[k + 1 :] for n in solutions.needs(op, ops, last)):
                return "order", op
    return solutions.problem(plan)


def halves_everywhere(plan):
    "Looks once whether the plan has halves."
    ops = {op for row in plan for op in row}
    kinds = "FIW" if any(kind == "I" for kind, _, _ in ops) else "FB"
    for i in sorted({i for _, i, _ in ops}):
        for s in range(1 + max(s for _, _, s in ops)):
            for kind in kinds:
                if (kind, i, s) not in ops:
                    return "missing", (kind, i, s)
    return solutions.problem(plan)


def halves_by_stage(plan):
    "Looks once in each stage whether it has halves: as if its microbatches couldn't differ."
    ops = {op for row in plan for op in row}
    halves = {s for kind, _, s in ops if kind in "IW"}
    for i in sorted({i for _, i, _ in ops}):
        for s in range(1 + max(s for _, _, s in ops)):
            only_forward = not ops & {(kind, i, s) for kind in "BIW"}
            for kind in "FIW" if s in halves and not only_forward else "FB":
                if (kind, i, s) not in ops:
                    return "missing", (kind, i, s)
    return solutions.problem(plan)


def stages_that_are_there(plan):
    "A stage that is nowhere isn't missed."
    ops = {op for row in plan for op in row}
    for i, s in itertools.product({i for _, i, _ in ops}, {s for _, _, s in ops}):
        for kind in "FIW" if {("I", i, s), ("W", i, s)} & ops else "FB":
            if (kind, i, s) not in ops:
                return "missing", (kind, i, s)
    found = solutions.problem(plan)
    return ("cycle", plan[0][0]) if found and found[0] == "missing" else found


def highest_rank(plan):
    return solutions.problem(plan[::-1])


def no_cycles(plan):
    found = solutions.problem(plan)
    return None if found and found[0] == "cycle" else found


def w_may_be_missing(plan):
    found = solutions.problem(plan)
    return None if found and found[0] == "missing" and found[1][0] == "W" else found


def one_stage_a_rank(plan):
    "Looks at as many stages as there are ranks."
    few = [[op for op in row if op[2] < len(plan)] for row in plan]
    return solutions.problem(few)


def always_names_b(plan):
    found = solutions.problem(plan)
    return ("missing", ("B", *found[1][1:])) if found and found[0] == "missing" else found


def takes_out(plan):
    found = solutions.problem(plan)
    plan[0].clear()
    return found


# --- pipeline.2: GPipe ------------------------------------------------------------------------


def gpipe_by_loops(p, m):
    "Right: loops."
    plan = []
    for rank in range(p):
        plan.append([])
        for i in range(2 * m):
            plan[-1].append(("F" if i < m else "B", i % m, rank))
    return plan


def gpipe_by_product(p, m):
    "Right: tuples of tuples."
    return tuple(tuple((k, i, r) for k, i in itertools.product("FB", range(m))) for r in range(p))


def gpipe_by_numpy(p, m):
    "Right: NumPy's integers."
    return [[(k, i, r) for k in "FB" for i in np.arange(m)] for r in np.arange(p)]


def microbatches_are_floats(p, m):
    return [[(k, i, r) for k in "FB" for i in np.linspace(0, m - 1, m)] for r in range(p)]


def operations_are_lists(p, m):
    return [[list(op) for op in row] for row in solutions.gpipe(p, m)]


def last_in_first_out(p, m):
    return [[("F", i, r) for i in range(m)] + [("B", i, r) for i in reversed(range(m))] for r in range(p)]


def one_rank_after_the_other(p, m):
    return [[(k, i, r) for i in range(m) for k in "FB"] for r in range(p)]


def all_in_stage_0(p, m):
    return [[(k, i, 0) for k in "FB" for i in range(m)] for r in range(p)]


def swapped_arguments(p, m):
    return solutions.gpipe(m, p)


def halves(p, m):
    return [[(k, i, r) for k in "FIW" for i in range(m)] for r in range(p)]


# --- pipeline.3: bubble and memory ------------------------------------------------------------


def cost_by_accumulate(spans):
    "Right: itertools."
    flat = list(itertools.chain(*spans))
    whole = (max(e for *_, e in flat) - min(s for _, s, _ in flat)) * len(spans)
    change = {"F": 1, "B": -1, "W": -1, "I": 0}
    kept = [max(itertools.accumulate(change[op[0]] for op, *_ in row)) for row in spans]
    return (whole - sum(e - s for _, s, e in flat)) / whole, tuple(kept)


def cost_by_sets(spans):
    "Right: sets of microbatches, idle time by rank."
    first, last = min(row[0][1] for row in spans), max(row[-1][2] for row in spans)
    idle, kept = 0.0, []
    for row in spans:
        idle += (last - first) - sum(e - s for _, s, e in row)
        alive, sizes = set(), [0]
        for (kind, *which), _, _ in row:
            if kind == "F":
                alive.add(tuple(which))
            elif kind != "I":
                alive.remove(tuple(which))
            sizes.append(len(alive))
        kept.append(max(sizes))
    return torch.tensor(idle / len(spans) / (last - first)).item(), kept


def _cost(spans, begin=None, change=None, bubble=None):
    change = change or {"F": 1, "B": -1, "W": -1}
    first = min(row[0][1] for row in spans) if begin is None else begin
    whole = (max(row[-1][2] for row in spans) - first) * len(spans)
    work = sum(e - s for row in spans for _, s, e in row)
    kept = [max(itertools.accumulate(change.get(op[0], 0) for op, _, _ in row)) for row in spans]
    return bubble(whole, work) if bubble else 1 - work / whole, kept


def from_zero(spans):
    return _cost(spans, begin=0)


def beside_the_work(spans):
    return _cost(spans, bubble=lambda whole, work: (whole - work) / work)


def i_ends_too(spans):
    return _cost(spans, change={"F": 1, "B": -1, "I": -1})


def w_does_not_end(spans):
    return _cost(spans, change={"F": 1, "B": -1})


def one_for_all(spans):
    bubble, kept = solutions.cost(spans)
    return bubble, [max(kept)] * len(kept)


def each_ranks_own_time(spans):
    _, kept = solutions.cost(spans)
    own = [1 - sum(e - s for _, s, e in row) / (row[-1][2] - row[0][1]) for row in spans]
    return sum(own) / len(own), kept


# --- pipeline.4: 1F1B -------------------------------------------------------------------------


def by_memory(p, m):
    "Right: forwards while the rank may keep another microbatch, then a backward."
    plan = []
    for r in range(p):
        row, begun = [], 0
        for i in range(m):
            while begun < min(m, i + p - r):
                row.append(("F", begun, r))
                begun += 1
            row.append(("B", i, r))
        plan.append(row)
    return plan


def three_phases(p, m):
    "Right: warm-up, steady state, cool-down."
    plan = []
    for r in range(p):
        warm = min(p - 1 - r, m)
        steady = [[("F", warm + k, r), ("B", k, r)] for k in range(m - warm)]
        plan.append(
            [("F", k, r) for k in range(warm)]
            + [op for pair in steady for op in pair]
            + [("B", k, r) for k in range(m - warm, m)]
        )
    return plan


def _1f1b(p, m, ahead):
    plan = []
    for r in range(p):
        n = max(0, min(m, ahead(r)))
        row = [("F", i, r) for i in range(n)]
        for i in range(m):
            row += [("F", i + n, r)] * (i + n < m) + [("B", i, r)]
        plan.append(row)
    return plan


def one_ahead_too_many(p, m):
    return _1f1b(p, m, lambda r: p - r)


def one_ahead_too_few(p, m):
    return _1f1b(p, m, lambda r: p - r - 2)


def same_on_each_rank(p, m):
    return _1f1b(p, m, lambda r: p - 1)


def as_if_m_were_large(p, m):
    plan = _1f1b(p, max(p, m), lambda r: p - r - 1)
    return plan if m >= p else [row[: 2 * m] for row in plan]


# --- pipeline.5: the two halves ---------------------------------------------------------------


def i_by_steps(x, outs, grad):
    "Right: from each output to the one before it."
    inputs, grads = [x, *outs[:-1]], [grad]
    for out, before in zip(outs[::-1], inputs[::-1], strict=True):
        grads.insert(0, torch.autograd.grad(out, before, grads[0], retain_graph=True)[0])
    return grads[0], tuple(grads[1:])


def w_by_backward(layers, outs, grads):
    "Right: backward with inputs."
    for layer, out, grad in zip(layers, outs, grads, strict=True):
        if weights := [*layer.parameters()]:
            torch.autograd.backward(out, grad, inputs=weights, retain_graph=True)


def w_last_first(layers, outs, grads):
    "Right: the last layer first, no in-place addition."
    for k in reversed(range(len(layers))):
        for p in layers[k].parameters():
            (found,) = torch.autograd.grad(outs[k], p, grads[k], retain_graph=True)
            p.grad = found if p.grad is None else p.grad + found


def i_with_weights(x, outs, grad):
    found = torch.autograd.grad(outs[-1], [x, *outs[:-1]], grad, retain_graph=True)
    outs[-1].backward(grad, retain_graph=True)
    return found[0], [*found[1:], grad]


def i_shifted(x, outs, grad):
    found = torch.autograd.grad(outs[-1], [x, *outs[:-1]], grad, retain_graph=True)
    return found[0], list(found)


def i_of_ones(x, outs, grad):
    return solutions.input_backward(x, outs, torch.ones_like(grad))


def i_pops(x, outs, grad):
    "Takes the last output off the list that W needs."
    last = outs.pop()
    found = torch.autograd.grad(last, [x, *outs], grad, retain_graph=True)
    return found[0], [*found[1:], grad]


def w_through_all(layers, outs, grads):
    weights = [p for layer in layers for p in layer.parameters()]
    for p, found in zip(weights, torch.autograd.grad(outs[-1], weights, grads[-1]), strict=True):
        p.grad = found if p.grad is None else p.grad + found


def w_overwrites(layers, outs, grads):
    for layer, out, grad in zip(layers, outs, grads, strict=True):
        weights = list(layer.parameters())
        for p, found in zip(weights, torch.autograd.grad(out, weights, grad) if weights else (), strict=True):
            p.grad = found


def w_of_the_first_parameter(layers, outs, grads):
    for layer, out, grad in zip(layers, outs, grads, strict=True):
        for p in list(layer.parameters())[:1]:
            (found,) = torch.autograd.grad(out, p, grad)
            p.grad = found if p.grad is None else p.grad + found


# --- pipeline.6: zero bubble ------------------------------------------------------------------


def with_a_queue(p, m):
    "Right: a rank's W wait in a queue that holds as many as its number."
    plan = []
    for r in range(p):
        row, waiting, left = [], [], list(range(m))
        row += [("F", left.pop(0), r) for _ in range(min(m, p - r))]
        for i in range(m):
            row.append(("I", i, r))
            waiting.append(("W", i, r))
            if len(waiting) > r:
                row.append(waiting.pop(0))
            if left:
                row.append(("F", left.pop(0), r))
        plan.append(row + waiting)
    return plan


def w_when_full(p, m):
    "Right: W comes when the rank keeps p microbatches, or when nothing else is left."
    plan = []
    for r in range(p):
        row, f, w = [("F", i, r) for i in range(min(m, p - r))], min(m, p - r), 0
        for i in range(m):
            row.append(("I", i, r))
            if f < m:
                if f - w == p:
                    row.append(("W", w, r))
                    w += 1
                row.append(("F", f, r))
                f += 1
            elif w < i - r + 1:
                row.append(("W", w, r))
                w += 1
        plan.append(row + [("W", i, r) for i in range(w, m)])
    return plan


def _zero_bubble(p, m, ahead, late):
    plan = []
    for r in range(p):
        n, d = min(m, ahead(r)), late(r)
        row = [("F", i, r) for i in range(n)]
        for i in range(m):
            row += [("I", i, r)] + [("W", i - d, r)] * (i >= d) + [("F", i + n, r)] * (i + n < m)
        plan.append(row + [("W", i, r) for i in range(max(0, m - d), m)])
    return plan


def w_at_once(p, m):
    return _zero_bubble(p, m, lambda r: p - r, lambda r: 0)


def all_w_at_the_end(p, m):
    return _zero_bubble(p, m, lambda r: p - r, lambda r: m)


def delay_reversed(p, m):
    return _zero_bubble(p, m, lambda r: p - r, lambda r: p - 1 - r)


def twice_the_memory(p, m):
    return _zero_bubble(p, m, lambda r: 2 * (p - r) - 1, lambda r: r)


def still_1f1b(p, m):
    return solutions.one_f_one_b(p, m)


# --- pipeline.7: interleaved ------------------------------------------------------------------


def in_rounds(p, v, m):
    "Right: the order of forwards written as loops, the backwards from it."
    rounds = range(0, m, p)
    plan = []
    for r in range(p):
        fs = [("F", i, c * p + r) for first in rounds for c in range(v) for i in range(first, first + p)]
        bs = [
            ("B", i, c * p + r) for first in rounds for c in range(v)[::-1] for i in range(first, first + p)
        ]
        warm = min(len(fs), 2 * (p - r - 1) + (v - 1) * p)
        pairs = itertools.zip_longest(fs[warm:], bs)
        plan.append(fs[:warm] + [op for pair in pairs for op in pair if op])
    return plan


def with_iterators(p, v, m):
    "Right: two iterators, taken from in turn."
    plan = []
    for r in range(p):
        order = [(i + first, c) for first in range(0, m, p) for c in range(v) for i in range(p)]
        fs = iter([("F", i, c * p + r) for i, c in order])
        bs = [("B", i, (v - 1 - c) * p + r) for i, c in order]
        row = list(itertools.islice(fs, 2 * (p - r - 1) + (v - 1) * p))
        for b in bs:
            row += [*itertools.islice(fs, 1), b]
        plan.append(row)
    return plan


def _interleaved(p, v, m, warm=None, order=None, stage=None):
    warm = warm or (lambda r: 2 * (p - r - 1) + (v - 1) * p)
    stage = stage or (lambda c, r: c * p + r)
    default = [(first + i, c) for first in range(0, m, p) for c in range(v) for i in range(p)]
    order = order or default
    plan = []
    for r in range(p):
        fs = [("F", i, stage(c, r)) for i, c in order]
        bs = [("B", i, stage(c, r)) for i, c in [(i, v - 1 - c) for i, c in order]]
        n = min(len(fs), warm(r))
        row = fs[:n]
        for k, b in enumerate(bs):
            row += [*fs[n + k : n + k + 1], b]
        plan.append(row)
    return plan


def all_forwards_first(p, v, m):
    return _interleaved(p, v, m, warm=lambda r: v * m)


def one_stage_at_a_time(p, v, m):
    return _interleaved(
        p, v, m, order=[(i, c) for c in range(v) for i in range(m)], warm=lambda r: m * (v - 1) + p - r - 1
    )


def neighbours_on_a_rank(p, v, m):
    return _interleaved(p, v, m, stage=lambda c, r: r * v + c)


def one_forward_more(p, v, m):
    return _interleaved(p, v, m, warm=lambda r: 2 * (p - r - 1) + (v - 1) * p + 1)


def two_stages_always(p, v, m):
    return solutions.interleaved(p, 2, m)


def more_ahead_than_there_are(p, v, m):
    "The forwards that come first, without a minimum."
    plan = solutions.interleaved(p, v, m)
    for r, (row, longer) in enumerate(zip(plan, solutions.interleaved(p, v, 2 * m), strict=True)):
        row[v * m : v * m] = longer[v * m : 2 * (p - r - 1) + (v - 1) * p]
    return plan


RIGHT = {
    "pipeline.1": [by_graph, by_counting, b_first],
    "pipeline.2": [gpipe_by_loops, gpipe_by_product, gpipe_by_numpy],
    "pipeline.3": [cost_by_accumulate, cost_by_sets],
    "pipeline.4": [by_memory, three_phases],
    "pipeline.5": [(i_by_steps, w_by_backward), (solutions.input_backward, w_last_first)],
    "pipeline.6": [with_a_queue, w_when_full],
    "pipeline.7": [in_rounds, with_iterators],
}

MUTANTS = {
    "pipeline.1": [no_cycles, highest_rank, w_may_be_missing, one_stage_a_rank, always_names_b, takes_out,
                   order_within_a_stage, order_first, halves_everywhere, halves_by_stage,
                   stages_that_are_there],
    "pipeline.2": [last_in_first_out, one_rank_after_the_other, all_in_stage_0, swapped_arguments, halves,
                   microbatches_are_floats, operations_are_lists],
    "pipeline.3": [from_zero, beside_the_work, i_ends_too, w_does_not_end, one_for_all,
                   each_ranks_own_time],
    "pipeline.4": [one_ahead_too_many, one_ahead_too_few, same_on_each_rank, as_if_m_were_large,
                   solutions.gpipe],
    "pipeline.5": [(i_with_weights, solutions.weight_backward), (i_shifted, solutions.weight_backward),
                   (i_of_ones, solutions.weight_backward), (i_pops, solutions.weight_backward),
                   (solutions.input_backward, w_through_all),
                   (solutions.input_backward, w_overwrites),
                   (solutions.input_backward, w_of_the_first_parameter)],
    "pipeline.6": [w_at_once, all_w_at_the_end, delay_reversed, twice_the_memory, still_1f1b],
    "pipeline.7": [all_forwards_first, one_stage_at_a_time, neighbours_on_a_rank, one_forward_more,
                   two_stages_always, more_ahead_than_there_are],
}  # fmt: skip

"Answers to the exercises of recompute: the course's, right ones of another style, and wrong ones."

import functools
import itertools
from collections import Counter

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from course_lib.recompute import solutions

REFERENCE = {n: getattr(solutions, names[0]) for n, names in solutions.EXERCISES.items()}
SAVE, AGAIN = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE


# --- recompute.1: segments --------------------------------------------------------------------


def by_reduce(blocks, x, segment):
    "Right: a function for each segment, bound by partial."

    def through(part, x):
        return functools.reduce(lambda y, block: block(y), part, x)

    todo = list(blocks)
    while todo:
        part, todo = (todo[:segment], todo[segment:]) if segment else (todo, [])
        x = checkpoint(through, part, x, use_reentrant=False) if segment else through(part, x)
    return x


def recursive(blocks, x, segment):
    "Right: the first segment, then the rest."
    if not blocks:
        return x
    if not segment:
        return recursive(blocks[1:], blocks[0](x), 0)
    first = nn.Sequential(*blocks[:segment])
    return recursive(blocks[segment:], checkpoint(lambda x: first(x), x, use_reentrant=False), segment)


def binds_late(blocks, x, segment):
    if not segment:
        return nn.Sequential(*blocks)(x)
    for i in range(0, len(blocks), segment):
        part = nn.Sequential(*blocks[i : i + segment])
        x = checkpoint(lambda x: part(x), x, use_reentrant=False)  # noqa: B023
    return x


def each_block_alone(blocks, x, segment):
    return solutions.run_segments(blocks, x, min(segment, 1))


def never(blocks, x, segment):
    return nn.Sequential(*blocks)(x)


def other_masks(blocks, x, segment):
    for i in range(0, len(blocks), segment or len(blocks)):
        part = nn.Sequential(*blocks[i : i + (segment or len(blocks))])
        x = checkpoint(part, x, use_reentrant=False, preserve_rng_state=False) if segment else part(x)
    return x


def drops_the_short_segment(blocks, x, segment):
    return solutions.run_segments(
        blocks[: len(blocks) // segment * segment] if segment else blocks, x, segment
    )


def last_segment_kept(blocks, x, segment):
    if not segment:
        return nn.Sequential(*blocks)(x)
    cut = (len(blocks) - 1) // segment * segment
    return nn.Sequential(*blocks[cut:])(solutions.run_segments(blocks[:cut], x, segment))


def segments_of_that_number(blocks, x, segment):
    return solutions.run_segments(blocks, x, segment and -(-len(blocks) // segment))


def equal_segments(blocks, x, segment):
    k = -(-len(blocks) // segment) if segment else 0
    for part in (blocks[i * len(blocks) // k : (i + 1) * len(blocks) // k] for i in range(k)):
        x = checkpoint(nn.Sequential(*part), x, use_reentrant=False)
    return x if segment else nn.Sequential(*blocks)(x)


def empties_the_list(blocks, x, segment):
    while segment and blocks:
        part = [blocks.pop(0) for _ in range(min(segment, len(blocks)))]
        x = checkpoint(nn.Sequential(*part), x, use_reentrant=False)
    return nn.Sequential(*blocks)(x)


def trains_all(blocks, x, segment):
    return solutions.run_segments([block.train() for block in blocks], x, segment)


# --- recompute.2: an autograd.Function --------------------------------------------------------


class Positions(torch.autograd.Function):
    "Right: keeps x on ctx, fills a list by positions."

    @staticmethod
    def forward(ctx, fn, x, *parameters):
        ctx.kept = fn, x.detach(), parameters
        with torch.no_grad():
            return fn(x)

    @staticmethod
    def backward(ctx, grad):
        fn, x, parameters = ctx.kept
        x = x.clone().requires_grad_(ctx.needs_input_grad[1])
        with torch.set_grad_enabled(True):
            y = fn(x)
        out = [None] * (2 + len(parameters))
        places = [i for i, need in enumerate(ctx.needs_input_grad) if need]
        inputs = [x if i == 1 else parameters[i - 2] for i in places]
        for i, g in zip(places, torch.autograd.grad(y, inputs, grad, allow_unused=True), strict=True):
            out[i] = g
        return tuple(out)


class ByVjp(torch.autograd.Function):
    "Right: the product with the result, summed, then its gradients."

    @staticmethod
    def forward(ctx, fn, x, *parameters):
        ctx.save_for_backward(x, *parameters)
        ctx.fn = fn
        return fn(x)

    @staticmethod
    def backward(ctx, grad):
        x, *parameters = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            total = (ctx.fn(x) * grad).sum()
        found = [None]
        for t, need in zip((x, *parameters), ctx.needs_input_grad[1:], strict=True):
            found += torch.autograd.grad(total, t, retain_graph=True, allow_unused=True) if need else [None]
        return tuple(found)


def _variant(backward, forward=solutions.Again.forward):
    return type(
        "Again",
        (torch.autograd.Function,),
        {"forward": staticmethod(forward), "backward": staticmethod(backward)},
    )


def _keeps_the_graph(ctx, fn, x, *parameters):
    with torch.enable_grad():
        ctx.x = x.detach().requires_grad_(ctx.needs_input_grad[1])
        ctx.y, ctx.parameters = fn(ctx.x), parameters
    return ctx.y.detach()


def _from_the_graph(ctx, grad):
    wanted = [t for t in (ctx.x, *ctx.parameters) if t.requires_grad]
    found = iter(torch.autograd.grad(ctx.y, wanted, grad, allow_unused=True))
    return None, *(next(found) if t.requires_grad else None for t in (ctx.x, *ctx.parameters))


def _ones(ctx, grad):
    return solutions.Again.backward(ctx, torch.ones_like(grad))


def _into_grad(ctx, grad):
    x = ctx.saved_tensors[0].detach().requires_grad_()
    with torch.enable_grad():
        ctx.fn(x).backward(grad)
    return None, x.grad, *[None] * len(ctx.parameters)


def _clears_grad(ctx, grad):
    x, *parameters = ctx.saved_tensors
    x = x.detach().requires_grad_(ctx.needs_input_grad[1])
    for p in parameters:
        p.grad = None
    with torch.enable_grad():
        ctx.fn(x).backward(grad)
    found = [t.grad for t in (x, *parameters)]
    for p in parameters:
        p.grad = None
    return None, *found


def _with_a_graph(ctx, grad):
    x, *parameters = ctx.saved_tensors
    x = x.detach().requires_grad_(ctx.needs_input_grad[1])
    wanted = [t for t in (x, *parameters) if t.requires_grad]
    with torch.enable_grad():
        found = iter(torch.autograd.grad(ctx.fn(x), wanted, grad, create_graph=True, allow_unused=True))
    return None, *(next(found) if t.requires_grad else None for t in (x, *parameters))


def _fn_twice(ctx, grad):
    with torch.no_grad():
        ctx.fn(ctx.saved_tensors[0])
    return solutions.Again.backward(ctx, grad)


_last = []


def _notes_globally(ctx, fn, x, *parameters):
    _last.append(fn)
    return solutions.Again.forward(ctx, fn, x, *parameters)


def _last_fn(ctx, grad):
    ctx.fn = _last.pop()
    return solutions.Again.backward(ctx, grad)


def _zeros(ctx, grad):
    found = solutions.Again.backward(ctx, grad)
    return None, *(torch.zeros_like(t) if g is None and t.requires_grad else g
                   for g, t in zip(found[1:], ctx.saved_tensors, strict=True))  # fmt: skip


def _x_only(ctx, grad):
    _, x, *rest = solutions.Again.backward(ctx, grad)
    return None, x, *[None] * len(rest)


# --- recompute.3: the same random numbers -----------------------------------------------------


class SameRandom:
    "Right: an object, the state put back in a finally."

    def __init__(self, fn):
        self.fn, self.state = fn, None

    def __call__(self, x):
        now = torch.random.get_rng_state()
        if self.state is None:
            self.state = now
            return self.fn(x)
        torch.random.set_rng_state(self.state)
        try:
            return self.fn(x)
        finally:
            torch.random.set_rng_state(now)


def by_generator(fn):
    "Right: notes of the state in a list, the default generator asked for its state."
    states = []

    def run(x):
        states.append(torch.default_generator.get_state())
        if len(states) == 1:
            return fn(x)
        with torch.random.fork_rng(devices=()):
            torch.default_generator.set_state(states[0])
            return fn(x)

    return run


def fixed_seed(fn):
    def run(x):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return fn(x)

    return run


def state_at_the_start(fn):
    state = torch.get_rng_state()

    def run(x):
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(state)
            return fn(x)

    return run


def _remembering(after=False, back=True, careful=True, shared=None):
    def same_random(fn):
        states = [] if shared is None else shared

        def run(x):
            now = torch.get_rng_state()
            if not states:
                out = fn(x)
                states.append(torch.get_rng_state() if after else now)
                return out
            torch.set_rng_state(states[0])
            try:
                out = fn(x)
            except ZeroDivisionError:
                if careful:
                    torch.set_rng_state(now)
                raise
            if back:
                torch.set_rng_state(now)
            return out

        return run

    return same_random


def shares_one_state(fn):
    return _remembering(shared=_last_states)(fn)


_last_states = []


def without_gradient(fn):
    run, calls = solutions.same_random(fn), []

    def later(x):
        calls.append(x)
        return run(x) if len(calls) == 1 else run(x).detach()

    return later


def gradient_of_nothing(fn):
    run = solutions.same_random(fn)
    return lambda x: run(x).detach().requires_grad_(isinstance(x, torch.Tensor))


def by_a_generator_that_ends(fn):
    def results():
        x, state = (yield), torch.get_rng_state()
        x = yield fn(x)
        while True:
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(state)
                out = fn(x)
            x = yield out

    made = results()
    next(made)
    return made.send


def runs_fn_to_look(fn):
    run = solutions.same_random(fn)
    looked = []

    def later(x):
        if not looked:
            looked.append(True)
            with torch.random.fork_rng(devices=[]):
                fn(x)
        return run(x)

    return later


def returns_the_first_result(fn):
    kept = []

    def run(x):
        if not kept:
            kept.append(fn(x))
        return kept[0]

    return run


# --- recompute.4: a policy --------------------------------------------------------------------


def _better_greedy(calls, budget):
    found = [_greedy(key)(calls, budget) for key in (lambda c: -c[2] / c[1], lambda c: -c[2])]
    return max(found, key=lambda kept: sum(calls[i][2] for i in kept))


def own_contexts(calls, budget):
    "Right: modes of its own, which keep the results of the first run."
    wanted = {(calls[i][0], [c[0] for c in calls[:i]].count(calls[i][0])) for i in _exact(calls, budget)}

    class Keeps(TorchDispatchMode):
        def __init__(self, kept, first):
            super().__init__()
            self.kept, self.first, self.count = kept, first, Counter()

        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            place = op, self.count[op]
            self.count[op] += 1
            if place in wanted and not self.first:
                return self.kept.pop(place)
            out = op(*args, **(kwargs or {}))
            if place in wanted:
                self.kept[place] = out.detach()
            return out

    def context_fn():
        kept = {}
        return Keeps(kept, True), Keeps(kept, False)

    return context_fn


def by_recursion(calls, budget):
    "Right: with the first call or without it; the policy counts in two dicts."

    def best(i, left):
        if i == len(calls):
            return 0, ()
        _, size, flops = calls[i]
        without = best(i + 1, left)
        options = [(without[0] + flops, without[1])]
        if size <= left:
            cost, kept = best(i + 1, left - size)
            options.append((cost, (i, *kept)))
        return min(options)

    kept = best(0, budget)[1]
    wanted = {(op, [c[0] for c in calls[:i]].count(op)) for i, (op, *_) in enumerate(calls) if i in kept}
    return lambda: create_selective_checkpoint_contexts(_by_number(wanted))


def _by_number(wanted):
    first, second = {}, {}

    def policy(ctx, op, *args, **kwargs):
        count = second if ctx.is_recompute else first
        count[op] = count.get(op, -1) + 1
        return SAVE if (op, count[op]) in wanted else AGAIN

    return policy


class Selective:
    "Right: a callable object, flags of binary numbers."

    def __init__(self, calls, budget):
        n = range(len(calls))
        sets = [[i for i in n if bits >> i & 1] for bits in range(2 ** len(calls))]
        sets = [s for s in sets if sum(calls[i][1] for i in s) <= budget]
        kept = max(sets, key=lambda s: sum(calls[i][2] for i in s))
        self.wanted = {(calls[i][0], sum(c[0] == calls[i][0] for c in calls[:i])) for i in kept}

    def __call__(self):
        return create_selective_checkpoint_contexts(_by_number(self.wanted))


def _keeping(choose, number=True, fresh=True, both=False, by_name=False):
    def selective(calls, budget):
        kept, seen, wanted = choose(calls, budget), Counter(), set()
        for i, (op, *_) in enumerate(calls):
            wanted |= {(op, seen[op])} if i in kept else set()
            seen[op] += 1
        count = Counter()

        def context_fn():
            mine = Counter() if fresh else count

            def policy(ctx, op, *args, **kwargs):
                k = mine[op, both or ctx.is_recompute]
                mine[op, both or ctx.is_recompute] += 1
                if by_name:
                    return SAVE if any(w.name().split("::")[1] in op.name() for w, _ in wanted) else AGAIN
                return SAVE if ((op, k) in wanted if number else op in {w for w, _ in wanted}) else AGAIN

            return create_selective_checkpoint_contexts(policy)

        return context_fn

    return selective


def _greedy(key):
    def choose(calls, budget):
        kept = set()
        for i in sorted(range(len(calls)), key=lambda i: key(calls[i])):
            if sum(calls[j][1] for j in kept) + calls[i][1] <= budget:
                kept.add(i)
        return kept

    return choose


def _exact(calls, budget, strict=False):
    subsets = (k for n in range(len(calls) + 1) for k in itertools.combinations(range(len(calls)), n))
    fits = [k for k in subsets if not k or sum(calls[i][1] for i in k) <= budget - strict]
    return max(fits, key=lambda k: sum(calls[i][2] for i in k))


RIGHT = {
    "recompute.1": [by_reduce, recursive],
    "recompute.2": [Positions, ByVjp],
    "recompute.3": [SameRandom, by_generator],
    "recompute.4": [by_recursion, Selective, own_contexts],
}


def named(words, answer):
    answer.__name__ = words.replace(" ", "_")
    return answer


MUTANTS = {
    "recompute.1": [
        named("a lambda that sees the last segment", binds_late),
        named("segments of nearly equal length", equal_segments),
        named("puts every block into training mode", trains_all),
        named("empties the list", empties_the_list),
        named("each block alone", each_block_alone),
        named("nothing is checkpointed", never),
        named("other dropout masks in the second run", other_masks),
        named("drops the short segment", drops_the_short_segment),
        named("keeps the values of the last segment", last_segment_kept),
        named("so many segments instead of so many blocks", segments_of_that_number),
    ],
    "recompute.2": [
        named("keeps the graph of the forward pass", _variant(_from_the_graph, _keeps_the_graph)),
        named("ignores the gradient that comes in", _variant(_ones)),
        named("writes into .grad", _variant(_into_grad)),
        named("calls fn twice in backward", _variant(_fn_twice)),
        named("a stack of functions", _variant(_last_fn, _notes_globally)),
        named("zeros for an unused parameter", _variant(_zeros)),
        named("clears .grad", _variant(_clears_grad)),
        named("gradients with a graph", _variant(_with_a_graph)),
        named("gradient of x only", _variant(_x_only)),
    ],
    "recompute.3": [
        named("a fixed seed", fixed_seed),
        named("the state when it was made", state_at_the_start),
        named("the state after the first call", _remembering(after=True)),
        named("does not put the state back", _remembering(back=False)),
        named("does not put it back after an error", _remembering(careful=False)),
        named("one state for all functions", shares_one_state),
        named("no gradient in later calls", without_gradient),
        named("a gradient of nothing", gradient_of_nothing),
        by_a_generator_that_ends,
        named("runs fn once more at first", runs_fn_to_look),
        named("the first result again", returns_the_first_result),
    ],
    "recompute.4": [
        named("smallest results first", _keeping(_greedy(lambda c: c[1]))),
        named("most FLOPs a byte first", _keeping(_greedy(lambda c: -c[2] / c[1]))),
        named("the better of two greedy orders", _keeping(_better_greedy)),
        named("all calls of an operator", _keeping(_exact, number=False)),
        named("counts on in the next block", _keeping(_exact, fresh=False)),
        named("counts both runs together", _keeping(_exact, both=True)),
        named("finds mm in bmm", _keeping(_exact, by_name=True)),
        named("must be under the budget", _keeping(functools.partial(_exact, strict=True))),
        named("keeps everything", _keeping(lambda calls, budget: range(len(calls)))),
        named("keeps nothing", _keeping(lambda calls, budget: ())),
    ],
}  # fmt: skip

"Checks of recompute. Oracles: the plain step in float64, counted calls and bytes, every subset."

import itertools
import random
from types import SimpleNamespace

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from course_lib import checking as core
from course_lib import meter, recompute
from course_lib.checking import yours  # noqa: F401


class _Counted(nn.Module):
    "Layers that count how often they are called."

    def __init__(self, *layers):
        super().__init__()
        self.inner, self.calls = nn.Sequential(*layers).double(), 0

    def forward(self, x):
        self.calls += 1
        return self.inner(x)


def _step(run, leaves):
    "(result, gradients, bytes alive after the forward pass) of `run()`, from one random state."
    torch.manual_seed(77)
    with meter.Memory() as memory:
        y = run()
        held = memory.now
    core.require(isinstance(y, torch.Tensor), f"expected a tensor, got {core.kind(y)}")
    core.require(y.requires_grad, "the result has no gradient: it must depend on x and on the weights")
    grad = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(5))
    return y, torch.autograd.grad(y, leaves, grad, allow_unused=True), held


@core.exercise("recompute.1", "results, gradients, calls and memory right for ten stacks, dropout included")
def run_segments(answer):
    for case in range(10):
        n, rows = random.randrange(4, 9), random.randrange(3, 9)
        segment = (0, 1, 2, 3, n - 1, n, n + 2)[case % 7]
        widths = core.ragged(3, 30, n + 1)
        blocks = [
            _Counted(nn.Linear(a, b), nn.Dropout(0.4), nn.Tanh()) for a, b in itertools.pairwise(widths)
        ]
        random.choice(blocks).eval()
        x = torch.randn(rows, widths[0], dtype=torch.float64, requires_grad=case % 3 > 0)
        leaves = [p for b in blocks for p in b.parameters()] + [x] * x.requires_grad
        flags = [x.requires_grad, *(b.training for b in blocks)]
        want, grads, _ = _step(lambda x=x, b=blocks: nn.Sequential(*b)(x), leaves)
        for b in blocks:
            b.calls = 0
        what = f"{n} blocks, segment={segment}" + ", x without a gradient" * (not x.requires_grad)
        given = list(blocks), x, segment
        y, got, held = _step(lambda given=given: core.call(answer, *given, mutates=(0, 1)), leaves)
        core.close(y, want, f"{what}: the result", 1e-9, 1e-12)
        core.require(given[0] == blocks, f"{what}: the list `blocks` was changed")
        same = flags == [x.requires_grad, *(b.training for b in blocks)]
        core.require(same, f"{what}: x.requires_grad or a block's training mode was changed")
        calls, times = [b.calls for b in blocks], 2 if segment else 1
        core.require(
            set(calls) == {times}, f"{what}: in a step each block should run {times} times, they ran {calls}"
        )
        for g, w in zip(got, grads, strict=True):
            core.require(g is not None, f"{what}: a gradient is missing (is use_reentrant=False set?)")
            core.close(g, w, f"{what}: a gradient (the second run must be like the first)", 1e-9, 1e-12)
        if segment:
            alive = f"{what}: bytes alive after the forward pass (the result of each segment, nothing else)"
            ends = [*widths[segment:n:segment], widths[n]]
            core.equal(held, 8 * rows * sum(ends), alive, "bytes")


@core.exercise(
    "recompute.2", "gradients, calls and memory right for nine pairs, frozen and unused weights too"
)
def again(answer):
    core.need_callable(answer, "a subclass of torch.autograd.Function")
    if not hasattr(answer, "apply"):
        got = core.kind(answer if isinstance(answer, type) else core.call(answer, None, torch.ones(2)))
        raise core.Wrong(f"expected a subclass of torch.autograd.Function, got {got}")
    for case in range(9):
        width, wide, rows = core.ragged(3, 14, 3)
        fns = [_Counted(nn.Linear(width, wide), nn.GELU(), nn.Linear(wide, width)) for _ in range(2)]
        for fn in fns:
            fn.inner[0].bias.requires_grad_(case % 3 != 1)
        spare = nn.Parameter(torch.randn(3, dtype=torch.float64))
        x = torch.randn(rows, width, dtype=torch.float64, requires_grad=case % 3 > 0)
        given = [[*fn.parameters(), *[spare] * (case % 2)] for fn in fns]
        flags = [t.requires_grad for t in (x, *given[0], *given[1])]
        leaves = list({p: 0 for p in [x, *given[0], *given[1]] if p.requires_grad})
        want, grads, _ = _step(lambda x=x, f=fns: f[1](f[0](x).sin()), leaves)
        for fn in fns:
            fn.calls = 0
        for leaf in leaves:  # of a batch before, whose gradients are still to be added to
            leaf.grad = torch.full_like(leaf, 7.0)
        before = [leaf.grad for leaf in leaves]

        def both(x=x, fns=fns, given=given):
            for fn, p in zip(fns, given, strict=True):
                core.call(answer.apply, lambda x: x * 3, x, mutates=range(2))  # a result that nobody uses
                x = core.call(answer.apply, fn, x, *p, mutates=range(2 + len(p)))
                x = x.sin() if fn is fns[0] else x
            return x

        y, got, held = _step(both, leaves)
        what = f"two functions of {width} numbers, {wide} inside"
        core.close(y, want, f"{what}: the result", 1e-9, 1e-12)
        calls = [fn.calls for fn in fns]
        core.require(
            calls == [2, 2], f"{what}: fn should run once forward and once backward; they ran {calls} times"
        )
        alive = f"{what}: bytes alive after the forward pass (results and inputs, no value from inside fn)"
        core.equal(held, 3 * want.nbytes, alive, "bytes")
        kept = all(p.grad is b and bool((b == 7).all()) for p, b in zip(leaves, before, strict=True))
        core.require(kept, f"{what}: backward changed .grad; return the gradients")
        for leaf, g, w in zip(leaves, got, grads, strict=True):
            name = {id(x): "x", id(spare): "a parameter that fn doesn't use"}.get(
                id(leaf), f"a {list(leaf.shape)}"
            )
            core.require(w is None or g is not None, f"{what}: the gradient of {name} is missing: return it")
            core.require(w is not None or g is None, f"{what}: {name} should get None, and got a gradient")
            if w is not None:
                core.close(g, w, f"{what}: the gradient of {name}", 1e-9, 1e-12)
                graph = f"{what}: the gradient of {name} keeps a graph alive (is create_graph set?)"
                core.require(not g.requires_grad, graph)
        same = flags == [t.requires_grad for t in (x, *given[0], *given[1])]
        core.require(same, f"{what}: whether x or a parameter needs a gradient was changed")


@core.exercise("recompute.3", "the first call's numbers again, the generator left alone, after errors too")
def same_random(answer):
    for _ in range(6):
        n, m, start, broken, ran = *core.ragged(2, 9, 2), random.randrange(10**6), [], []

        def noisy(x, n=n, broken=broken, ran=ran):
            ran.append(x)
            out = x + torch.rand(n) + torch.dropout(torch.ones(n), 0.5, True)
            if broken:
                raise ZeroDivisionError("planted by the check")
            return out

        torch.manual_seed(start)
        want = [noisy(0.0), torch.randn(m), noisy(0.0), torch.rand(m), torch.rand(m)]
        torch.manual_seed(start + 1)
        first, second = core.call(answer, noisy), core.call(answer, noisy)
        core.need_callable(first, "a function from same_random(fn)")
        torch.manual_seed(start)
        core.close(core.call(first, 0.0), want[0], "the first call, which draws as fn does", 0, 0)
        core.close(torch.randn(m), want[1], "what the generator draws after the first call", 0, 0)
        core.close(core.call(second, 0.0), want[2], "the first call of a second function", 0, 0)
        for k, run in enumerate((first, second, first)):
            wanted = 1 + want[2 * (run is second)]
            core.close(core.call(run, 1.0), wanted, f"later call number {k + 1}, x larger by 1", 1e-6, 1e-6)
        core.close(torch.rand(m), want[3], "what the generator draws after later calls", 0, 0)
        core.equal(len(ran) - 2, 5, "calls of fn in five calls of run")  # two were the check's own
        x = torch.zeros(n, requires_grad=True)
        later = core.call(first, x, mutates=(0,))
        passes = later.requires_grad and torch.autograd.grad(later.sum(), x, allow_unused=True)[0]
        none = "a later call: no gradient passes through its result"
        core.require(isinstance(passes, torch.Tensor), none)
        core.close(passes, torch.ones(n), "a later call: the gradient of the sum of its result")
        broken.append(True)
        try:
            first(0.0)
        except ZeroDivisionError:
            broken.clear()
        core.require(not broken, "an error of fn should come out of run")
        core.close(core.call(first, 0.0), want[0], "a later call after one that raised", 0, 0)
        core.close(torch.rand(m), want[4], "what the generator draws after a later call that raised", 0, 0)


class _Products(nn.Module):
    "Products by weights (mm, addmm) and of two tensors (bmm), in the order of `kinds`."

    def __init__(self, width, kinds):
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(width, width, bias=random.random() < 0.5) for _ in kinds)
        self.kinds = kinds

    def forward(self, x):  # [batch, length, width]
        for layer, kind in zip(self.maps, self.kinds, strict=True):
            y = layer(x.flatten(0, 1)).view_as(x).tanh()
            x = x + torch.bmm(torch.bmm(y, x.transpose(1, 2)).softmax(-1), x) if kind == "bmm" else y.sin()
        return x


def _two(net, x, context_fn=None):
    "(FLOPs of a step of two blocks that are both `net`, bytes alive after its forward pass)."
    more = {} if context_fn is None else {"context_fn": context_fn}
    with FlopCounterMode(display=False) as counter:
        with meter.Memory() as memory:
            for _ in range(2):
                x = checkpoint(net, x, use_reentrant=False, **more) if more else net(x)
            held = memory.now
        x.sum().backward()
    return counter.get_total_flops(), held


def _fitting(calls, budget):
    "(the subsets of calls within budget, the fewest FLOPs that they leave), by brute force."
    subsets = (k for n in range(len(calls) + 1) for k in itertools.combinations(range(len(calls)), n))
    fits = [k for k in subsets if sum(calls[i][1] for i in k) <= budget]
    return fits, sum(f for *_, f in calls) - max(sum(calls[i][2] for i in k) for k in fits)


def _asked(context_fn, calls):
    "The calls that a policy keeps, asked in a first and a second run, as torch up to 2.11 does."
    ask = getattr(context_fn()[0], "policy_fn", None)
    if ask is None:
        return None  # contexts of another kind
    first, second = (
        [ask(SimpleNamespace(is_recompute=again), op, x=1) for op, *_ in calls] for again in (False, True)
    )
    core.require(first == second, "the policy decides differently when it is asked in the second run, too")
    return tuple(i for i, said in enumerate(first) if said is True or "SAVE" in str(said))


def _greedy(calls, budget, power):
    "FLOPs run again by who keeps first the calls with the most FLOPs for bytes to that power."
    again = sum(flops for *_, flops in calls)
    for _, size, flops in sorted(calls, key=lambda c: -c[2] / c[1] ** power):
        if size <= budget:
            budget, again = budget - size, again - flops
    return again


def _invented(answer):
    "Nine calls and a budget at which it isn't best to take the most FLOPs first, nor the most a byte."
    ops, greedy, fewest = [getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm")], 0, 0
    while greedy <= fewest:
        calls = [(random.choice(ops), random.randint(9, 99), random.randint(9, 99)) for _ in range(9)]
        fits, fewest = _fitting(calls, budget := random.randint(0, sum(size for _, size, _ in calls)))
        greedy = min(_greedy(calls, budget, power) for power in (0, 1))
    what = f"calls of (bytes, FLOPs) {', '.join(str(c[1:]) for c in calls)}, budget {budget} bytes"
    kept = _asked(core.call(answer, calls, budget), calls)
    core.require(kept is None or kept in fits, f"{what}: the policy keeps more, calls {kept} from 0")
    again = fewest if kept is None else sum(c[2] for i, c in enumerate(calls) if i not in kept)
    core.equal(again, fewest, f"{what}: FLOPs that are run again", "FLOPs")


@core.exercise(
    "recompute.4", "within budget at the fewest FLOPs in 24 blocks, over two steps and two blocks each"
)
def selective(answer):
    for case in range(24):
        net = _Products(core.ragged(2, 12, 1)[0], random.sample(3 * ["bmm", "mm"], random.randrange(2, 5)))
        x = torch.randn(*core.ragged(2, 12, 2), net.maps[0].in_features, requires_grad=True)
        calls = recompute.calls_again(net, x)
        sizes, numbers = [size for _, size, _ in calls], range(len(calls))
        some = sum(random.sample(sizes, random.randint(1, len(calls))))
        budget = (some, some - 1, sum(sizes), 0)[case % 4]
        fits, fewest = _fitting(calls, budget)
        context_fn = core.call(answer, calls, budget)
        core.need_callable(context_fn, "a context_fn from selective(calls, budget)")
        plain, _ = _two(net, x)
        for step in (1, 2):
            what = f"{len(calls)} calls of {sum(sizes):,} bytes, budget {budget:,}, step {step} of two blocks"
            spent, held = _two(net, x, context_fn)
            over = held - 2 * x.nbytes - 2 * budget
            core.require(over <= 0, f"{what}: {over:,} bytes more are kept than the budgets of both blocks")
            core.equal(spent - plain, 2 * fewest, f"{what}: FLOPs that are run again", "FLOPs")
            rest = [sum(calls[i][2] for i in numbers if i not in k) for k in fits]
            exact = {sum(sizes[i] for i in k) for k, flops in zip(fits, rest, strict=True) if flops == fewest}
            core.require(held / 2 - x.nbytes in exact, f"{what}: results without FLOPs are kept, too")
        _asked(context_fn, calls)
        if case % 3 == 0:
            _invented(answer)

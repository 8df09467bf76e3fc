"Answers to the exercises of scale: the course's, right ones of another style, and wrong ones."

import copy
import itertools
import math
import random

import torch

from course_lib.scale import Layout, merge, solutions

REFERENCE = {
    n: getattr(solutions, names[0]) if len(names) == 1 else tuple(getattr(solutions, name) for name in names)
    for n, names in solutions.EXERCISES.items()
}


# --- scale.1: ring attention ------------------------------------------------------------------


def by_sigmoid(q, k, v, places, attend, dist):
    "Right: the share of the new part by a sigmoid, receives after attending."

    def join(out_a, lse_a, out_b, lse_b):
        share = torch.sigmoid(lse_b - lse_a)[..., None]
        return out_a + share * (out_b - out_a), lse_a + torch.nn.functional.softplus(lse_b - lse_a)

    return _ring(join=join)(q, k, v, places, attend, dist)


def recursive(q, k, v, places, attend, dist):
    "Right: keys and values in one row, a while loop that ends when its own keys would come."
    rank, size = dist.get_rank(), dist.get_world_size()
    out, lse = attend(q, k, v, places(rank), places(rank))
    owner = rank
    while (owner - 1) % size != rank:
        row = torch.cat([k.reshape(-1), v.reshape(-1)])
        arrived = torch.empty_like(row)
        handle = dist.isend(row, (rank + 1) % size)
        dist.recv(arrived, (rank - 1) % size)
        handle.wait()
        k, v = arrived[: k.numel()].view(k.shape), arrived[k.numel() :].view(v.shape)
        owner = (owner - 1) % size
        out, lse = merge(out, lse, *attend(q, k, v, places(rank), places(owner)))
    return out, lse


def softmax_of_parts(q, k, v, places, attend, dist):
    "Right: all parts kept as (out, lse), joined at the end by a softmax of lse."
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = []
    for i in range(size):
        parts.append(attend(q, k, v, places(rank), places((rank + size - i) % size)))
        if i + 1 < size:
            new = torch.zeros_like(k), torch.zeros_like(v)
            handles = [dist.isend(t, (rank + 1) % size) for t in (k, v)]
            [dist.recv(t, (rank - 1) % size) for t in new]
            [h.wait() for h in handles]
            k, v = new
    outs, lses = (torch.stack(t) for t in zip(*parts, strict=True))
    return (lses.softmax(0)[..., None] * outs).sum(0), lses.logsumexp(0)


def _ring(
    owner=lambda rank, i, size: (rank - i) % size, join=merge, rounds=0, after=False, empty=torch.empty_like
):
    def ring(q, k, v, places, attend, dist):
        rank, size = dist.get_rank(), dist.get_world_size()
        for i in range(size + rounds):
            part = attend(q, k, v, places(rank), places(owner(rank, i, size)))
            out, lse = join(out, lse, *part) if i else part  # noqa: F821
            if i < size - 1 + after:
                new = [empty(t) for t in (k, v)]
                handles = [dist.isend(t, (rank + 1) % size) for t in (k, v)]
                for t in new:
                    dist.recv(t, (rank - 1) % size)
                for h in handles:
                    h.wait()
                k, v = new
        return out, lse

    return ring


def _adds(out_a, lse_a, out_b, lse_b):
    return out_a + out_b, torch.logaddexp(lse_a, lse_b)


def _sums_of_exp(out_a, lse_a, out_b, lse_b):
    "Right until exp(lse) overflows."
    a, b = lse_a.exp(), lse_b.exp()
    return (a[..., None] * out_a + b[..., None] * out_b) / (a + b)[..., None], (a + b).log()


def _means(out_a, lse_a, out_b, lse_b):
    return (out_a + out_b) / 2, torch.logaddexp(lse_a, lse_b)


def collects_all_first(q, k, v, places, attend, dist):
    rank, size = dist.get_rank(), dist.get_world_size()
    held = [(k, v)]
    for _ in range(size - 1):
        new = [torch.empty_like(t) for t in (k, v)]
        handles = [dist.isend(t, (rank + 1) % size) for t in held[-1]]
        for t in new:
            dist.recv(t, (rank - 1) % size)
        for h in handles:
            h.wait()
        held.append(tuple(new))
    parts = [attend(q, *kv, places(rank), places((rank - i) % size)) for i, kv in enumerate(held)]
    out, lse = parts[0]
    for part in parts[1:]:
        out, lse = merge(out, lse, *part)
    return out, lse


def keeps_all_keys(q, k, v, places, attend, dist):
    held = []

    def attend_and_keep(q, k, v, at, at_k):
        held.append((k, v))
        return attend(q, k, v, at, at_k)

    return solutions.ring_attention(q, k, v, places, attend_and_keep, dist)


def skips_later_parts(q, k, v, places, attend, dist):
    def attend_or_not(q, k, v, at, at_k):
        if at_k.min() > at.max():
            return q.new_zeros(*q.shape[:-1], v.shape[-1]), q.new_full(q.shape[:-1], -math.inf)
        return attend(q, k, v, at, at_k)

    return solutions.ring_attention(q, k, v, places, attend_or_not, dist)


def odd_ranks_receive_first(q, k, v, places, attend, dist):
    rank, size = dist.get_rank(), dist.get_world_size()
    out, lse = attend(q, k, v, places(rank), places(rank))
    for i in range(1, size):
        new = []
        for t in (k, v):
            new.append(torch.empty_like(t))
            if rank % 2:
                dist.recv(new[-1], (rank - 1) % size)
            handle = dist.isend(t, (rank + 1) % size)
            if not rank % 2:
                dist.recv(new[-1], (rank - 1) % size)
            handle.wait()
        k, v = new
        out, lse = merge(out, lse, *attend(q, k, v, places(rank), places((rank - i) % size)))
    return out, lse


def to_everybody(q, k, v, places, attend, dist):
    rank, size = dist.get_rank(), dist.get_world_size()
    out, lse = attend(q, k, v, places(rank), places(rank))
    handles = [dist.isend(t, r) for r in range(size) if r != rank for t in (k, v)]
    for r in range(size):
        if r != rank:
            new = [torch.empty_like(t) for t in (k, v)]
            for t in new:
                dist.recv(t, r)
            out, lse = merge(out, lse, *attend(q, *new, places(rank), places(r)))
    for h in handles:
        h.wait()
    return out, lse


# --- scale.2: memory and time of a layout -----------------------------------------------------


def from_totals(model, layout, machine):
    "Right: totals of the whole job first, then the share of a GPU."
    data, tensor, pipe, context, micro, stage, chunks = layout
    same, gpus = data * context, data * context * tensor * pipe
    weights = model.layers * model.params / (tensor * pipe)
    batch = model.sequences * model.length
    memory = {
        "weights": weights * 2 / (same if stage > 2 else 1),
        "gradients": weights * 2 / (same if stage > 1 else 1),
        "state": weights * model.state / (same if stage > 0 else 1),
        "activations": batch * model.layers * model.kept / gpus * min(pipe, micro) / micro,
    }
    flops = 6 * batch * model.layers * (model.params + model.length * model.width)
    sent = 2 * batch / same * model.width  # all microbatches of a GPU
    ways = {0: 2, 1: 2, 2: 1 + micro, 3: 3 * micro}
    seconds = {
        "compute": flops / gpus / machine.flops,
        "bubble": flops / gpus / machine.flops * (pipe - 1) / chunks / micro,
        "tensor": 8 * (tensor - 1) / tensor * sent * model.layers / pipe / machine.link(tensor),
        "context": (context > 1) * (3 * context - 1) * 4 * batch / same * model.kv / tensor * model.layers
        / pipe / machine.link(tensor * context),
        "pipe": (pipe > 1) * 2 * chunks * sent / tensor / machine.link(tensor * context * pipe),
        "data": ways[stage] * 2 * weights * (1 - 1 / same) / machine.link(gpus),
        "optimizer": weights / (same if stage else 1) * (6 + 2 * model.state) / machine.hbm,
    }  # fmt: skip
    return memory, seconds


def as_pair(model, layout, machine):
    "Right: a list in place of a tuple, other dict order."
    memory, seconds = solutions.cost(model, layout, machine)
    return [dict(reversed(memory.items())), dict(reversed(seconds.items()))]


def _changed(change):
    def cost(model, layout, machine):
        memory, seconds = solutions.cost(model, layout, machine)
        change(memory, seconds, model, layout, machine)
        return memory, seconds

    return cost


def all_microbatches_kept(memory, seconds, model, layout, machine):
    memory["activations"] *= layout.micro / min(layout.micro, layout.pipe)


def shards_by_data_alone(memory, seconds, model, layout, machine):
    memory["state"] *= layout.context if layout.stage else 1


def chunks_forgotten(memory, seconds, model, layout, machine):
    seconds["bubble"] *= layout.chunks


def gathers_once(memory, seconds, model, layout, machine):
    if layout.stage == 3:
        seconds["data"] /= layout.micro


def always_near(memory, seconds, model, layout, machine):
    seconds["data"] *= machine.link(math.prod(layout[:4])) / machine.near


def ring_without_home(memory, seconds, model, layout, machine):
    seconds["context"] *= (3 * layout.context - 3) / (3 * layout.context - 1)


def two_all_reduces(memory, seconds, model, layout, machine):
    seconds["tensor"] /= 2


# --- scale.3: a planner ------------------------------------------------------------------------


def every_tuple(model, machine, cost, stages=(0, 1, 2, 3)):
    "Right: recursion over factors, a heap of results."
    import heapq

    def factors(n):
        return [k for k in range(n, 0, -1) if not n % k]

    heap = []
    for d, t, p in itertools.product(factors(machine.gpus), repeat=3):
        c, rest = divmod(machine.gpus, d * t * p)
        good = not rest and c and not machine.host % t and not model.heads % t and not model.layers % p
        if not good or model.sequences % d or (c > 1 and model.length % (2 * c)):
            continue
        for m in factors(model.sequences // d):
            many = factors(model.layers // p) if p > 1 and m % p == 0 else [1]
            for stage, v in itertools.product(stages, many):
                layout = Layout(d, t, p, c, m, stage, v)
                memory, seconds = cost(model, layout, machine)
                if not sum(memory.values()) > machine.memory:
                    heapq.heappush(heap, (sum(seconds.values()), layout))
    return [heapq.heappop(heap) for _ in range(len(heap))]


def by_key(model, machine, cost, stages=(0, 1, 2, 3)):
    "Right: the course's, shuffled and sorted by a key."
    found = solutions.plan(model, machine, cost, stages)
    random.shuffle(found)
    return sorted(found, key=lambda pair: pair[0])


def _plans(change):
    def plan(model, machine, cost, stages=(0, 1, 2, 3)):
        return change(solutions.plan, model, machine, cost, stages)

    return plan


def ignores_memory(plan, model, machine, cost, stages):
    return plan(model, machine._replace(memory=math.inf), cost, stages)


def not_quite_full(plan, model, machine, cost, stages):
    found = plan(model, machine, cost, stages)
    return [pair for pair in found if sum(cost(model, pair[1], machine)[0].values()) < machine.memory]


def slowest_first(plan, model, machine, cost, stages):
    return plan(model, machine, cost, stages)[::-1]


def all_stages(plan, model, machine, cost, stages):
    return plan(model, machine, cost)


def no_context(plan, model, machine, cost, stages):
    return [pair for pair in plan(model, machine, cost, stages) if pair[1].context == 1]


def one_chunk(plan, model, machine, cost, stages):
    return [pair for pair in plan(model, machine, cost, stages) if pair[1].chunks == 1]


def any_tensor(plan, model, machine, cost, stages):
    return plan(model, machine._replace(host=2 * machine.host), cost, stages)


# --- scale.4: how often to save ----------------------------------------------------------------


def by_list(work, interval, save, restart, gaps):
    "Right: the stretches as a list from the end."
    stretches = []
    while sum(stretches) < work:
        stretches.append(min(interval, work - sum(stretches)))
    clock, stretches = 0, stretches[::-1]
    end = next(gaps)
    while stretches:
        needs = clock + stretches[-1] + (save if len(stretches) > 1 else 0)
        if needs <= end:
            clock = needs
            stretches.pop()
        else:
            clock = end + restart
            end = clock + next(gaps)
    return clock


def daly(save, mtbf):
    "Right: Daly's series."
    r = math.sqrt(save / (2 * mtbf))
    return math.sqrt(2 * save * mtbf) * (1 + r / 3 + r * r / 9) - save


def search(save, mtbf):
    "Right: golden section on the expected time."
    low, high = mtbf * 1e-4, 3 * mtbf

    def lost(t):
        return math.expm1((t + save) / mtbf) / t

    for _ in range(80):
        a, b = low + 0.382 * (high - low), low + 0.618 * (high - low)
        low, high = (low, b) if lost(a) < lost(b) else (a, high)
    return low


def young(save, mtbf):
    return math.sqrt(2 * save * mtbf)


def young_less_save(save, mtbf):
    return math.sqrt(2 * save * mtbf) - save


def all_gaps_first(work, interval, save, restart, gaps):
    return solutions.wall_clock(work, interval, save, restart, iter(list(gaps)))


def whole_seconds(save, mtbf):
    tries = range(1, int(2 * mtbf), max(1, int(mtbf) // 5000))
    return min(tries, key=lambda t: math.expm1((t + save) / mtbf) / t)


def _clock(final_save=False, lose_all=False, gap_in_restart=False, no_restart=False, keeps_partial=False):
    def wall_clock(work, interval, save, restart, gaps):
        done, clock, left = 0.0, 0.0, next(gaps)
        while done < work:
            stretch = min(interval, work - done)
            needs = stretch + save * (final_save or done + stretch < work)
            if needs > left:
                clock += left + restart * (not no_restart)
                done = 0.0 if lose_all else done + (min(left, stretch) if keeps_partial else 0)
                left = next(gaps)
                if gap_in_restart:
                    while left <= restart:
                        left += next(gaps)
                    left -= restart
            else:
                done, clock, left = done + stretch, clock + needs, left - needs
        return clock

    return wall_clock


# --- scale.5: nothing forgotten ----------------------------------------------------------------


def bytes_of(run):
    "Right: the state as bytes of torch.save."
    import io

    file = io.BytesIO()
    torch.save([run.model.state_dict(), run.opt.state_dict(), run.scaler.state_dict(), run.loader.__dict__,
                torch.get_rng_state(), random.getstate()], file)  # fmt: skip
    return {"all": file.getvalue()}


def from_bytes(run, state):
    import io

    model, opt, scaler, loader, numbers, python = torch.load(io.BytesIO(state["all"]), weights_only=False)
    torch.set_rng_state(numbers)
    random.setstate(python)
    run.loader.__dict__.clear()
    run.loader.__dict__.update(loader)
    run.model.load_state_dict(model), run.opt.load_state_dict(opt), run.scaler.load_state_dict(scaler)


def flat(run):
    "Right: clones by hand, a flat dict."
    state = {f"model {k}": t.clone() for k, t in run.model.state_dict().items()}
    more = {"opt": run.opt.state_dict(), "scaler": run.scaler.state_dict(), "loader": vars(run.loader)}
    return state | copy.deepcopy(more) | {"numbers": (torch.get_rng_state(), random.getstate())}


def from_flat(run, state):
    run.model.load_state_dict({k[6:]: t for k, t in state.items() if k.startswith("model ")})
    for name in ("opt", "scaler"):
        getattr(run, name).load_state_dict(copy.deepcopy(state[name]))
    for name, value in copy.deepcopy(state["loader"]).items():
        setattr(run.loader, name, value)
    torch.set_rng_state(state["numbers"][0]), random.setstate(state["numbers"][1])


def _without(name):
    def restore(run, state):
        kept = solutions.capture(run)
        solutions.restore(run, {**state, name: kept[name]})

    restore.__name__ = f"without_{name}"
    return solutions.capture, restore


def no_copy(run):
    state = {name: getattr(run, name).state_dict() for name in ("model", "opt", "scaler")}
    return state | {"loader": vars(run.loader), "torch": torch.get_rng_state(), "random": random.getstate()}


def shares_the_tensors(run, state):
    for name in ("model", "opt", "scaler"):
        getattr(run, name).load_state_dict(state[name])
    vars(run.loader).update(copy.deepcopy(state["loader"]))
    torch.set_rng_state(state["torch"]), random.setstate(state["random"])


def shares_the_lists(run, state):
    solutions.restore(run, state)
    vars(run.loader).update(state["loader"])


def parameters_only(run):
    state = solutions.capture(run)
    return state | {"model": {k: p.detach().clone() for k, p in run.model.named_parameters()}}


def parameters_back(run, state):
    model = {**copy.deepcopy(run.model.state_dict()), **state["model"]}
    solutions.restore(run, {**state, "model": model})


def in_a_global(run):
    in_a_global.opt = copy.deepcopy(run.opt.state_dict())
    return solutions.capture(run) | {"opt": None}


def from_a_global(run, state):
    solutions.restore(run, state | {"opt": in_a_global.opt})


def keeps_its_rate(run, state):
    "The optimizer's moments are restored, and not its learning rate."
    rates = [group["lr"] for group in run.opt.param_groups]
    solutions.restore(run, state)
    for group, rate in zip(run.opt.param_groups, rates, strict=True):
        group["lr"] = rate


def pops(run, state):
    kept = dict(state)
    state.pop("model")
    solutions.restore(run, kept)


def draws_a_number(run):
    state = solutions.capture(run)
    torch.rand(1)
    return state


RIGHT = {
    "scale.1": [recursive, softmax_of_parts, by_sigmoid],
    "scale.2": [from_totals, as_pair],
    "scale.3": [every_tuple, by_key],
    "scale.4": [(by_list, daly), (solutions.wall_clock, search)],
    "scale.5": [(bytes_of, from_bytes), (flat, from_flat)],
}

MUTANTS = {
    "scale.1": [_ring(lambda rank, i, size: (rank + i) % size), _ring(join=_adds), _ring(join=_means),
                _ring(join=_sums_of_exp), _ring(empty=lambda t: torch.empty(t.shape)),
                _ring(rounds=-1), _ring(after=True), collects_all_first, to_everybody,
                keeps_all_keys, skips_later_parts, odd_ranks_receive_first],
    "scale.2": [*map(_changed, (all_microbatches_kept, shards_by_data_alone, chunks_forgotten, gathers_once,
                                always_near, ring_without_home, two_all_reduces))],
    "scale.3": [*map(_plans, (ignores_memory, not_quite_full, slowest_first, all_stages, no_context,
                              one_chunk, any_tensor))],
    "scale.4": [*((_clock(**{wrong: True}), daly) for wrong in
                  ("final_save", "lose_all", "gap_in_restart", "no_restart", "keeps_partial")),
                (by_list, young), (by_list, young_less_save), (all_gaps_first, daly),
                (by_list, whole_seconds)],
    "scale.5": [*map(_without, ("opt", "scaler", "loader", "torch", "random")), (no_copy, solutions.restore),
                (solutions.capture, shares_the_tensors), (solutions.capture, shares_the_lists),
                (parameters_only, parameters_back), (draws_a_number, solutions.restore),
                (in_a_global, from_a_global), (solutions.capture, pops), (solutions.capture, keeps_its_rate)],
}  # fmt: skip

"What the checks of lesson data_parallel are fed with, and what they compare with."

import itertools
import random

import torch
from torch import nn
from torch.nn import functional as F

from course_lib import checking as core
from course_lib import group as groups


def run(size, fn, what):
    "Run `fn(comm)` on a group of `size` ranks; the group and the results, or one sentence."
    group = groups.Group(size)
    try:
        return group, group.run(fn)
    except groups.Raised as e:
        cause = e.__cause__
        if isinstance(cause, core.Wrong | NotImplementedError):
            raise cause from None
        raise core.Wrong(f"{what} raised {core.describe(cause)} on rank {e.rank} of {size}") from None
    except (groups.Stuck, groups.Misuse) as e:
        raise core.Wrong(f"{what} on {size} ranks: {e}") from None


def of_step(group, rank, step):
    "The events of one rank between the marks `step N` and `finished`."
    mine = group.events_of(rank)
    names = [e.what for e in mine]
    start = names.index(f"step {step}")
    return mine[start + 1 : names.index("finished", start)]


def wire_bytes(events, ranks):
    "Bytes that a rank sends when its collectives are rings."
    part = {"all_reduce": 2 * (ranks - 1) / ranks, "reduce_scatter_tensor": (ranks - 1) / ranks,
            "all_gather_into_tensor": ranks - 1, "broadcast": 1, "send": 1}  # fmt: skip
    return sum(part.get(e.what, 0) * e.nbytes for e in events)


# --- models -------------------------------------------------------------------------


class Plain(nn.Module):
    "Three layers of different shapes, every parameter used; the widths make the biases differ in length."

    def __init__(self, a, b, c, d):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(a, b), nn.Linear(b, c), nn.Linear(c, d)
        self.register_buffer("shift", torch.randn(a))

    def loss(self, x, branch=None):
        h = torch.tanh(self.first(x + self.shift))
        return self.third(torch.tanh(self.second(h))).square().mean()


class Branching(nn.Module):
    "A tied weight, a branch that not every rank takes, a parameter nobody uses, a frozen one, two buffers."

    def __init__(self, a, b, c, d):
        super().__init__()
        self.never = nn.Parameter(torch.randn(2))
        self.encode = nn.Linear(a, b)
        self.branch = nn.Linear(b, c)
        self.back = nn.Linear(c, b)
        self.scale = nn.Parameter(torch.randn(b), requires_grad=False)
        self.decode = nn.Linear(b, a, bias=False)
        self.decode.weight = nn.Parameter(torch.randn(a, b))
        self.readout = nn.Linear(a, b, bias=False)
        self.tied = self.decode  # the same module under two names
        self.register_buffer("shift", torch.randn(a))
        self.register_buffer("seen", torch.randint(1000, ()))

    def loss(self, x, branch):
        h = torch.tanh(self.encode(x + self.shift)) * self.scale
        if branch:
            h = h + torch.tanh(self.back(torch.tanh(self.branch(h))))
        x = torch.tanh(self.decode(h))
        return self.tied(torch.tanh(self.readout(x))).square().mean()


def one_process(model, data, usage):
    "The gradients by step and name, and the weights at last, when one process has the data of all ranks."
    wants = []
    for xs, use in zip(data, usage, strict=True):
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        loss = sum(model.loss(x, use and use[r]) for r, x in enumerate(xs)) / len(xs)
        grads = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        with torch.no_grad():
            for p, g in zip(trained.values(), grads, strict=True):
                if g is not None:
                    p -= 0.1 * g
        wants.append(dict(zip(trained, grads, strict=True)))
    return wants, [p.detach().clone() for p in model.parameters()]


class Tagger(nn.Module):
    "Labels each word of a text: takes [N, T] words, gives [N, T, classes]."

    def __init__(self, words, width, classes):
        super().__init__()
        self.embed, self.out = nn.Embedding(words, width), nn.Linear(width, classes)

    def forward(self, x):
        return self.out(torch.tanh(self.embed(x)))


def microbatches(count, words, classes):
    "Pairs of words and labels of ragged sizes; between none and most of the labels are unknown (-100)."
    found = []
    for _ in range(count):
        shape = random.randint(1, 3), random.randint(2, 7)
        y = torch.randint(classes, shape)
        y[torch.rand(shape) < random.choice((0.0, 0.4, 0.8))] = -100
        y[0, 0] = random.randrange(classes)
        found.append((torch.randint(words, shape), y))
    return found


def uneven(ranks, words, classes):
    "Microbatches by rank, no two ranks with equally many known labels."
    while True:
        held = [microbatches(random.randint(1, 4), words, classes) for _ in range(ranks)]
        if len({sum(int((y >= 0).sum()) for _, y in h) for h in held}) == ranks:
            return held


def token_mean(model, held):
    "The gradients of the mean loss over all known tokens of all ranks, in float64, token by token."
    twin = Tagger(model.embed.num_embeddings, model.embed.embedding_dim, model.out.out_features).double()
    twin.load_state_dict(model.state_dict())
    losses = []
    for x, y in itertools.chain.from_iterable(held):
        log_p = F.log_softmax(twin(x), -1)
        losses += [
            -log_p[i, j, y[i, j]] for i in range(y.shape[0]) for j in range(y.shape[1]) if y[i, j] >= 0
        ]
    return torch.autograd.grad(torch.stack(losses).mean(), list(twin.parameters()))


# --- data_parallel.5 ---------------------------------------------------------------------------


SITUATIONS = {"one bucket", "oversize", "the wire waits", "a bucket waits", "exposed", "hidden"}


def simulate(layers, limit, ranks, alpha, beta):
    "Exposed seconds by simulating every message of every rank, and which kinds of situation came up."
    at, arrivals = 0.0, []
    for seconds, nbytes in layers:
        at += seconds
        arrivals.append((at, nbytes))
    facts, pending, wire_free = set(), [], 0.0
    buckets = []
    while arrivals:
        pending, total = [arrivals.pop(0)], 0
        total = pending[0][1]
        while arrivals and total + arrivals[0][1] <= limit:
            total += arrivals[0][1]
            pending.append(arrivals.pop(0))
        facts |= {"oversize"} if total > limit else set()
        buckets.append((pending[-1][0], total))
    facts |= {"one bucket"} if len(buckets) == 1 else set()
    for ready, total in buckets:
        if wire_free:
            facts.add("the wire waits" if ready > wire_free else "a bucket waits")
        clocks = [max(wire_free, ready)] * ranks
        for _ in range(2 * (ranks - 1)):  # a round: everybody sends a chunk to the next and takes one
            sent = [c + alpha + beta * total / ranks for c in clocks]
            clocks = [max(sent[r], sent[r - 1]) for r in range(ranks)]
        wire_free = max(clocks)
    left = max(0.0, wire_free - at)
    facts.add("exposed" if left > 0 else "hidden")
    return left, facts


# --- data_parallel.6 ---------------------------------------------------------------------------


def held(obj, params):
    "Numbers that an object keeps in tensors, those of `params` and their gradients apart."
    known = {t.untyped_storage().data_ptr() for p in params for t in (p, p.grad) if t is not None}
    found, seen, todo = {}, set(), [obj]
    while todo:
        x = todo.pop()
        if id(x) in seen or isinstance(x, groups.Comm | str | bytes | int | float | type) or x is None:
            continue
        seen.add(id(x))
        if isinstance(x, torch.Tensor):
            found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() // x.element_size()
            todo.append(x.grad if x.is_leaf else None)
        elif isinstance(x, dict):
            todo += [*x.keys(), *x.values()]
        elif isinstance(x, list | tuple | set):
            todo += x
        elif hasattr(x, "__dict__") and not callable(x):
            todo += vars(x).values()
    return sum(n for where, n in found.items() if where not in known)


# --- data_parallel.7 ---------------------------------------------------------------------------


def shards(weight, ranks):
    "A weight as flat shards of equal length, the last padded with zeros."
    n = -(-weight.numel() // ranks)
    flat = F.pad(weight.detach().flatten(), (0, n * ranks - weight.numel()))
    return list(flat.split(n)) if n else [flat] * ranks


def stack(x, layers, apply):
    for i, w in enumerate(layers):
        x = apply(torch.tanh(x) if i else x, w)
    return x

"What the checks of lesson data_parallel are given, and what they compare with; lesson sharding uses `run`."

import random

import torch
from torch import nn
from torch.nn import functional as F

from course_lib import checking as core
from course_lib import group as groups


def run(size, fn, what, advice=""):
    "`fn(dist)` on `size` ranks: the group and the results, or one sentence, with `advice` on their order."
    group = groups.Group(size)

    def body(dist):
        out, off = fn(dist), f"{what.rstrip(',')} leaves gradients off: use `with torch.no_grad():`"
        core.require(torch.is_grad_enabled(), off)  # each thread, so each rank, has a grad mode of its own
        return out

    try:
        return group, group.run(body)
    except groups.Raised as e:
        cause = e.__cause__
        if isinstance(cause, core.Wrong | NotImplementedError):
            raise cause from None
        wrong = core.Wrong(f"{what} raised {core.describe(cause)} on rank {e.rank} of {size}")
        wrong.cause = cause
        raise wrong from None
    except (groups.Stuck, groups.Misuse) as e:
        words = str(e) + advice * ("the same order" in str(e))
        if "writes into" in words:  # a gather's long tensor is wrong, not the parts
            words = words.removesuffix(": pad the last part")
        raise core.Wrong(f"{what} on {size} rank{'s' * (size > 1)}: {words}") from None


def of_step(group, rank, step):
    "The events of one rank between the marks `step N` and `finished`."
    mine = group.events_of(rank)
    names = [e.what for e in mine]
    start = names.index(f"step {step}")
    return mine[start + 1 : names.index("finished", start)]


# --- models -------------------------------------------------------------------------


class Plain(nn.Module):
    "Three layers of different shapes; `part` says which of two equal halves a rank computes first."

    def __init__(self, a, b, c, d):
        super().__init__()
        self.first, self.second = nn.Linear(a, b), nn.Linear(b, c)
        self.left, self.right = nn.Linear(c, d), nn.Linear(c, d + 1)
        self.register_buffer("shift", torch.randn(a))

    def loss(self, x, part):
        h = torch.tanh(self.first(x + self.shift)).to(self.second.weight.dtype)
        h = torch.tanh(self.second(h)).to(self.left.weight.dtype)
        halves = (self.left, self.right) if part else (self.right, self.left)
        return sum(half(h).square().mean() for half in halves)


class Branching(nn.Module):
    "A tied weight, a branch that not every rank takes, a parameter nobody uses, a frozen one, two buffers."

    def __init__(self, a, b, c, d):
        super().__init__()
        self.never, self.scale = (
            nn.Parameter(torch.randn(2)),
            nn.Parameter(torch.randn(b), requires_grad=False),
        )
        self.encode, self.branch, self.back = nn.Linear(a, b), nn.Linear(b, c), nn.Linear(c, b)
        self.decode, self.readout = nn.Linear(b, a, bias=False), nn.Linear(a, b, bias=False)
        self.tied = self.decode  # the same module under two names
        self.register_buffer("shift", torch.randn(a))
        self.register_buffer("seen", torch.randint(1000, ()))

    def loss(self, x, part):
        h = torch.tanh(self.encode(x + self.shift)) * self.scale
        if part:
            h = h + torch.tanh(self.back(torch.tanh(self.branch(h))))
        x = torch.tanh(self.decode(h))
        return self.tied(torch.tanh(self.readout(x))).square().mean()


def one_process(model, data, usage):
    "The gradients by step and name, and the weights at last, when one process has the data of all ranks."
    wants = []
    for xs, use in zip(data, usage, strict=True):
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        loss = sum(model.loss(x, use[r]) for r, x in enumerate(xs)) / len(xs)
        grads = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        with torch.no_grad():
            for p, g in zip(trained.values(), grads, strict=True):
                if g is not None:
                    p -= 0.1 * g
        wants.append(dict(zip(trained, grads, strict=True)))
    return wants, [p.detach().clone() for p in model.parameters()]


class Tagger(nn.Module):
    "Labels words: takes [N, T] words, gives [N, T, classes]. One parameter is frozen, one unused."

    def __init__(self, words, width, classes):
        super().__init__()
        self.embed, self.out = nn.Embedding(words, width), nn.Linear(width, classes)
        self.shift = nn.Parameter(torch.randn(width), requires_grad=False)
        self.never = nn.Parameter(torch.randn(3))

    def forward(self, x):
        return self.out(torch.tanh(self.embed(x) + self.shift))


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
    "The gradients by name of the mean loss over all known tokens of all ranks, in float64, token by token."
    twin = Tagger(model.embed.num_embeddings, model.embed.embedding_dim, model.out.out_features).double()
    twin.load_state_dict(model.state_dict())
    losses = []
    for x, y in (pair for mine in held for pair in mine):
        log_p = F.log_softmax(twin(x), -1)
        losses += [-log_p[i, j, y[i, j]] for i, j in (y >= 0).nonzero().tolist()]
    trained = {n: p for n, p in twin.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(torch.stack(losses).mean(), list(trained.values()), allow_unused=True)
    return dict.fromkeys(dict(twin.named_parameters())) | dict(zip(trained, grads, strict=True))

"What stands in the package, and the solutions on real ranks: Gloo, other seeds, tied weights, one process."

import itertools
import random

import pytest
import torch
import torch.distributed as dist
from torch import nn

from course_lib import group as groups
from course_lib import ranks, sharding
from course_lib.sharding import solutions


@pytest.fixture(scope="module")
def pair():
    with ranks.Group(2, backend="gloo") as group:
        yield group


class Tied(nn.Module):
    "An embedding whose weight is used again for the logits, and a layer of odd sizes."

    def __init__(self):
        super().__init__()
        self.words, self.mix, self.out = nn.Embedding(11, 5), nn.Linear(5, 5), nn.Linear(5, 11, bias=False)
        self.out.weight = self.words.weight

    def loss(self, x):
        return nn.functional.cross_entropy(self.out(self.mix(self.words(x)).tanh()), x.flip(0))


def steps_of(n):
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(11, (8,), generator=generator) for _ in range(n)]


def sharded_steps():
    "The weights at the start and after five steps on this rank, whose own seed made other weights."
    model, world = Tied(), sharding.World()
    own = model.mix.weight.detach().clone()
    with torch.no_grad():
        for p in model.parameters():
            dist.broadcast(p, 0)
    start = {k: v.clone() for k, v in model.state_dict().items()}
    opt = solutions.ShardedAdam(model.parameters(), world, lr=0.05)
    for x in steps_of(5):
        model.loss(x.chunk(2)[dist.get_rank()]).backward()
        opt.step()
        model.zero_grad()
    return own, start, [p.detach() for p in model.parameters()], opt.m.numel()


def test_sharded_adam_on_real_ranks_is_adam_in_one_process(pair):
    (own, start, weights, kept), (other, _, others, _) = pair.run(sharded_steps)
    assert not torch.equal(own, other)
    model = Tied()
    model.load_state_dict(start)
    opt = torch.optim.Adam(model.parameters(), lr=0.05, foreach=False)
    for x in steps_of(5):
        (sum(model.loss(part) for part in x.chunk(2)) / 2).backward()
        opt.step()
        opt.zero_grad()
    assert kept == -(-sum(p.numel() for p in model.parameters()) // 2)
    for got, again, want in zip(weights, others, model.parameters(), strict=True):
        assert torch.equal(got, again)
        torch.testing.assert_close(got, want.detach(), rtol=1e-4, atol=1e-5)


def layer_on_a_rank(weight, xs):
    world = sharding.World()
    part = nn.Parameter(sharding.parts_of(weight, 2)[dist.get_rank()])
    x = xs[dist.get_rank()].clone().requires_grad_()
    y = solutions.GatherComputeFree.apply(x, part, weight.shape, world)
    y.square().sum().backward()
    ahead = solutions.prefetched(x.detach(), [part], lambda i, x, full: x.sum() + full.sum(), world)
    return y, x.grad, part.grad, ahead


def test_gather_compute_free_and_prefetch_on_real_ranks(pair):
    weight, xs = (
        torch.randn(5, 7, requires_grad=True),
        [torch.randn(n, 7, requires_grad=True) for n in (2, 3)],
    )
    ys = [x @ weight.T for x in xs]
    sum(y.square().sum() for y in ys).backward()
    means = sharding.parts_of(weight.grad / 2, 2)
    given = pair.run(layer_on_a_rank, weight.detach(), [x.detach() for x in xs])
    for (y, grad, part, ahead), want, x, mean in zip(given, ys, xs, means, strict=True):
        for got, right in ((y, want), (grad, x.grad), (part, mean), (ahead, x.sum() + weight.sum())):
            torch.testing.assert_close(got, right.detach(), rtol=1e-4, atol=1e-5)


def test_the_clock():
    def body(comm):
        clock, full = sharding.Clock(comm, rate=8), torch.empty(4)
        handle = clock.all_gather_into_tensor(full, torch.ones(2), async_op=True)  # 16 bytes, 2 s
        clock.compute("a", 0.5)
        clock.all_gather_into_tensor(torch.empty(2), torch.ones(1))  # its turn comes at 2 s
        handle.wait()
        clock.compute("b", 1.0)
        return clock.now, clock.spans, full

    now, spans, full = groups.Group(2).run(body)[0]
    assert now == 4 and full.tolist() == [1, 1, 1, 1]
    assert spans == [
        ("1", 0, 2, "wire"),
        ("a", 0, 0.5, "compute"),
        ("2", 2, 3, "wire"),
        ("b", 3, 4, "compute"),
    ]


def test_least_seconds_by_trying_every_order():
    "No order of begin, wait and compute within two weights is faster."
    for n in (1, 2, 3, 4):
        gathers, computes = ([random.uniform(0.2, 2) for _ in range(n)] for _ in range(2))
        best = float("inf")
        for ahead in itertools.product(
            (0, 1), repeat=n
        ):  # whether gather i + 1 begins before layer i computes
            now = wire = 0.0
            ready = {}
            for i in range(n):
                if i not in ready:
                    wire = ready[i] = max(wire, now) + gathers[i]
                now = max(now, ready[i])
                if ahead[i] and i + 1 < n:
                    wire = ready[i + 1] = max(wire, now) + gathers[i + 1]
                now += computes[i]
            best = min(best, now)
        assert sharding.least_seconds(gathers, computes) == pytest.approx(best)
    assert sharding.least_seconds([], []) == 0


def test_parts_are_the_row_padded():
    parts = sharding.parts_of(torch.arange(1.0, 8).view(7, 1), 3)
    assert [p.tolist() for p in parts] == [[1, 2, 3], [4, 5, 6], [7, 0, 0]]


def test_explore_zero():
    stages = sharding.explore_zero(8.0, 8, 140)["stages"]
    assert [s["total"] for s in stages] == [128, 44, 30, 16]
    assert sharding.explore_zero(70.0, 8, 140)["stages"][3]["fits"], "exactly 140 GB"
    assert not any(sharding.explore_zero(70.0, n, 141)["stages"][1]["fits"] for n in (8, 1024))

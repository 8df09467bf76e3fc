import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from course_lib import data_parallel as dp
from course_lib import group as groups
from course_lib import ranks
from course_lib.data_parallel import figures, live, loops, network, noise, sharded, times
from course_lib.data_parallel.comm import Alone, World, world


def run(n, fn):
    return groups.Group(n).run(fn)


# --- the simulated group ------------------------------------------------------------


def test_a_group_counts_and_gives_results_by_rank():
    group = groups.Group(3)

    def talk(comm):
        x = torch.full((2,), float(comm.rank))
        sending = comm.isend(x, (comm.rank + 1) % 3)
        came = torch.empty(2)
        comm.recv(came, (comm.rank - 1) % 3)
        sending.wait()
        comm.all_reduce(x)
        return came[0].item(), x[0].item()

    assert group.run(talk) == [(2.0, 3.0), (0.0, 3.0), (1.0, 3.0)]
    assert group.sent() == 24 and group.sent(1) == 8
    assert group.collectives(2) == [("all_reduce", 8)]


def test_collectives():
    def all_of_them(comm):
        x, out, part = torch.arange(4.0) + comm.rank, torch.empty(8), torch.empty(2)
        comm.all_gather_into_tensor(out, x)
        comm.reduce_scatter_tensor(part, x)
        comm.broadcast(x, 1)
        comm.barrier()
        return out, part, x

    for r, (out, part, x) in enumerate(run(2, all_of_them)):
        assert out.tolist() == [0, 1, 2, 3, 1, 2, 3, 4]
        assert part.tolist() == ([1, 3] if r == 0 else [5, 7])
        assert x.tolist() == [1, 2, 3, 4]


def left(comm):
    if comm.rank:
        comm.all_reduce(torch.ones(3))


def handle_dropped(comm):
    comm.all_reduce(torch.ones(3), async_op=True)


def touched(comm):
    x = torch.ones(3)
    handle = comm.all_reduce(x, async_op=True)
    x /= 2
    x[0] = 1
    handle.wait()


def sent_and_changed(comm):
    x = torch.ones(3)
    if comm.rank == 0:
        handle = comm.isend(x, 1)
        x += 1
        handle.wait()
    else:
        comm.recv(x, 0)


@pytest.mark.parametrize(
    "fn, kind, says",
    [
        (lambda c: c.recv(torch.ones(2), 1 - c.rank), groups.Stuck, "rank 0 waits to receive from rank 1"),
        (left, groups.Stuck, "rank 0 returned"),
        (handle_dropped, groups.Misuse, "without waiting for all_reduce"),
        (touched, groups.Misuse, "while all_reduce number 1 was under way"),
        (sent_and_changed, groups.Misuse, "changed a tensor while it was being sent"),
        (lambda c: c.all_reduce(torch.ones(3 + c.rank)), groups.Misuse, "3 x float32 and rank 1 calls"),
        (
            lambda c: c.broadcast(torch.ones(3), c.rank),
            groups.Misuse,
            "rank 0 calls broadcast of 3 x float32 from rank 0 and rank 1 calls",
        ),
        (lambda c: c.send(torch.ones(2), c.rank), groups.Misuse, "expected another rank of 0 to 1"),
        (
            lambda c: c.all_gather_into_tensor(torch.ones(3), torch.ones(2)),
            groups.Misuse,
            "make 4: pad the last part",
        ),
        (lambda c: c.all_reduce([1.0]), groups.Misuse, "takes a tensor"),
        (lambda c: 1 / c.rank, groups.Raised, "rank 0: ZeroDivisionError"),
    ],
)
def test_what_goes_wrong_is_one_sentence(fn, kind, says):
    with pytest.raises(kind) as e:
        run(2, fn)
    assert says in str(e.value) and "\n" not in str(e.value)


def test_two_lengths_of_a_message():
    with pytest.raises(
        groups.Misuse, match="rank 0 sends 3 x float32 to rank 1, which receives them into 4 x float32"
    ):
        run(2, lambda c: c.send(torch.ones(3), 1) if c.rank == 0 else c.recv(torch.ones(4), 0))


def test_a_rank_that_never_speaks(monkeypatch):
    monkeypatch.setattr(groups, "PATIENCE", 0.3)
    over = []
    with pytest.raises(groups.Stuck, match="computes for 0 s and says nothing"):
        run(2, lambda c: [None for _ in iter(lambda: len(over), 1)] if c.rank == 0 else None)
    over.append(1)  # lets the thread end


# --- the finished versions ----------------------------------------------------------


@pytest.mark.parametrize("n, length", [(1, 4), (2, 5), (3, 2), (5, 23)])
def test_ring(n, length):
    xs = [torch.randn(length) for _ in range(n)]
    want = torch.stack(xs).sum(0)
    group = groups.Group(n)
    group.run(lambda comm: dp.ring_all_reduce(xs[comm.rank], comm))
    assert all(torch.allclose(x, want, atol=1e-5) and torch.equal(x, xs[0]) for x in xs)
    assert group.sent() == 2 * (n - 1) * length * 4


@pytest.mark.parametrize("wrap", [dp.DataParallel, lambda m, c: dp.BucketedDataParallel(m, c, 100)])
def test_data_parallel_is_one_process(wrap):
    models = [nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)) for _ in range(3)]
    one, x = copy.deepcopy(models[0]), torch.randn(3, 4, 5)

    def step(comm):
        parallel = wrap(models[comm.rank], comm)
        models[comm.rank](x[comm.rank]).square().mean().backward()
        parallel.finish()

    run(3, step)
    one(x).square().mean().backward()
    for model in models:
        for p, q in zip(model.parameters(), one.parameters(), strict=True):
            assert torch.allclose(p.grad, q.grad, atol=1e-6)


def test_accumulate_wants_a_token():
    with pytest.raises(ValueError, match="no rank has a token"):
        dp.accumulate(nn.Linear(2, 3), [(torch.randn(1, 2, 2), torch.full((1, 2), -100))], Alone())


def test_sharded_adam_is_adam():
    start, grads = torch.randn(7), torch.randn(3, 4, 7)
    params = [nn.Parameter(start.clone()) for _ in range(3)]

    def steps(comm):
        p = params[comm.rank]
        opt = sharded.ShardedAdam([p], comm, lr=0.1)
        for g in grads[comm.rank]:
            p.grad = g.clone()
            opt.step()
        opt.zero_grad()
        assert p.grad is None

    run(3, steps)
    one = nn.Parameter(start.clone())
    adam = torch.optim.Adam([one], 0.1)
    for g in grads.mean(0):
        one.grad = g
        adam.step()
    assert all(torch.allclose(p, one, atol=1e-6) for p in params)
    with pytest.raises(ValueError, match="no parameters"):
        sharded.ShardedAdam([], Alone())


def test_sharded_linear_is_linear():
    w, x = torch.randn(7, 5), torch.randn(4, 3, 5)

    def both(comm):
        part = sharded.shard(w, comm)
        mine = x[comm.rank].clone().requires_grad_()
        sharded.sharded_linear(mine, part, (7, 5), comm).square().sum().backward()
        return mine.grad, part.grad

    found = run(4, both)
    w2, x2 = w.clone().requires_grad_(), x.clone().requires_grad_()
    (x2 @ w2.T).square().sum().backward()
    assert torch.allclose(torch.stack([f[0] for f in found]), x2.grad, atol=1e-4)
    assert torch.allclose(torch.cat([f[1] for f in found])[:35].view(7, 5), w2.grad / 4, atol=1e-4)


def test_live_curves():
    whole, shards = live.curves(ranks=4, width=32, layers=3)
    assert whole[0] == 3 * 4 * 32**2 and max(shards) < max(whole)


def test_zero_bytes():
    assert [sharded.zero_bytes(s, 8) for s in range(4)] == [16, 5.5, 3.75, 2]
    assert [s["total"] for s in sharded.explore_zero(8.0, 8)["stages"]] == [128, 44, 30, 16]
    assert not sharded.explore_zero(405.0, 1024, 140)["stages"][1]["fits"]
    for bad in ((4, 8), (1, 0)):
        with pytest.raises(ValueError):
            sharded.zero_bytes(*bad)


# --- the network --------------------------------------------------------------------


def test_exposed_and_its_schedule():
    layers = [(1.0, 10), (1.0, 30), (2.0, 5)]
    spans, clock = network.schedule(layers, 12, 2, 0.5, 0.1)
    assert clock == 4 and [s[2] for s in spans] == [10, 30, 5]
    assert spans[1][0] == max(2, spans[0][1])
    assert network.exposed(layers, 12, 2, 0.5, 0.1) == pytest.approx(spans[-1][1] - 4)
    assert network.exposed(layers, 12, 1, 0.5, 0.1) == 0


def test_fit_finds_alpha_and_beta():
    sizes = [2**k for k in range(10, 24, 2)]
    took = [network.ring_seconds(n, 4, 3e-5, 1 / 5e9) for n in sizes]
    assert network.fit(sizes, took, 4) == pytest.approx((3e-5, 1 / 5e9))
    assert min(network.fit([1000, 10**6], [1e-3, 1e-5], 2)) >= 0
    assert min(network.fit([1000, 10**6], [1e-9, 1e-3], 2)) >= 0
    for bad in (([1000], [1e-3], 2), ([1000, 2000], [1e-3], 2), ([1000, 2000], [1e-3, 1e-3], 1)):
        with pytest.raises(ValueError):
            network.fit(*bad)


def test_trees_and_rings():
    assert network.tree_seconds(8, 8, 1.0, 0.0) == 6
    assert network.tree_seconds(8, 5, 1.0, 0.0) == 6
    assert network.ring_seconds(8, 8, 0.0, 1.0) == 14
    assert network.bus_bandwidth(100, 2.0, 4) == 75


def test_explorer_of_buckets():
    found = network.explore_buckets(limit_mb=4, network="NVLink 4", ranks=2)
    assert len(found["spans"]) == network.PIECES and found["best"][1] <= found["exposed"]
    with pytest.raises(ValueError, match="no network is called"):
        network.explore_buckets(network="pigeons")


def test_scaling_model():
    measured = {"alone": 3.0, "backward": 2.0, "bytes": 100, "layers": 4,
                "ddp": 3.5, "ddp_no_overlap": 4.0, "fsdp": 4.0, "fsdp_no_overlap": 4.5}  # fmt: skip
    free = network.scaling(measured, 2, 0.0, 0.0)
    assert all(model == pytest.approx(2) for _, model in free.values())
    assert free["ddp"][0] == pytest.approx(6 / 3.5)
    dear = network.scaling(measured, 2, 0.01, 1e-3, bucket=100)
    assert dear["ddp"][1] > dear["ddp_no_overlap"][1]


# --- noise --------------------------------------------------------------------------


def test_per_sample_gradients_and_noise():
    x, y = loops.digits()
    model, x, y = loops.net(), x[:40], y[:40]
    grads = noise.per_sample(model, x, y)
    F.cross_entropy(model(x), y).backward()
    assert torch.allclose(grads.mean(0), loops.flat(p.grad for p in model.parameters()), atol=1e-6)
    seen = noise.estimate(model, x, y, ranks=4, batch=8, draws=1500)
    assert seen == pytest.approx(noise.exact(model, x, y), rel=0.2)


def test_noise_from_two_sizes_and_the_fit():
    length, trace = 2.0, 30.0
    found = noise.from_two_sizes(length + trace / 8, length + trace / 32, 8, 32)
    assert found == pytest.approx(trace / length)
    with pytest.raises(ValueError, match="a small batch and a bigger one"):
        noise.from_two_sizes(1, 1, 8, 8)
    points = [(b, 50 * (1 + 20 / b)) for b in (4, 16, 64, 256)]
    assert noise.fit(points) == pytest.approx((50, 20))


# --- figures ------------------------------------------------------------------------


def test_the_ring_s_figure_is_the_ring():
    for n in (2, 3, 5):
        found = figures.ring_counts(n)
        assert len(found) == 2 * n - 1 and found[-1] == [[n] * n for _ in range(n)]


def test_figures_draw():
    import matplotlib.pyplot as plt

    curves = live.curves(ranks=2, width=8, layers=2)
    for fig in (
        figures.draw_drift([0.1, 0.2], [0.0, 0.0]),
        figures.draw_ring(3),
        figures.draw_traffic(),
        figures.draw_networks(),
        figures.draw_measured([1024, 4096], [1e-4, 2e-4], 1e-5, 1e-9, 2, "here", [1024]),
        figures.view_buckets(network.explore_buckets()),
        figures.draw_steps([(4, 100), (8, 60), (16, 40)], 20, 16),
        figures.view_zero(sharded.explore_zero()),
        figures.draw_memory(dict(zip(("a", "b"), curves, strict=True))),
    ):
        fig.canvas.draw()
        plt.close(fig)


# --- real ranks ---------------------------------------------------------------------


def on_a_rank():
    "What the lesson runs on its ranks, small, in one call."
    comm = world()
    x = torch.arange(5.0) * (comm.rank + 1)
    dp.ring_all_reduce(x, comm)
    gathered, mine = torch.empty(4), torch.empty(2)
    comm.all_gather_into_tensor(gathered, torch.full((2,), float(comm.rank)))
    comm.reduce_scatter_tensor(mine, torch.arange(4.0))
    return {
        "ring": x.tolist(),
        "gathered": gathered.tolist(),
        "scattered": mine.tolist(),
        "drift": loops.drift(True, steps=3),
        "apart": loops.drift(False, steps=3),
        "overlap": loops.overlap(2**10, widths=(8, 16, 4), batch=4, steps=2),
        "times": times.all_reduce_seconds([64, 4096], blocks=2, seconds=0.01),
        "scaling": times.scaling(layers=2, width=16, tokens=4, steps=2),
        "ddp": loops.official("ddp"),
        "fsdp": loops.official("fsdp"),
    }


@pytest.fixture(scope="module")
def by_rank():
    return ranks.run(2, on_a_rank, backend="gloo", timeout=90)


def test_the_communicator_on_real_ranks(by_rank):
    for r, got in enumerate(by_rank):
        assert got["ring"] == [0, 3, 6, 9, 12]
        assert got["gathered"] == [0, 0, 1, 1]
        assert got["scattered"] == ([0, 2] if r == 0 else [4, 6])


def test_replicas_stay_or_drift(by_rank):
    a, b = by_rank
    assert torch.equal(a["drift"], b["drift"])
    assert loops.spread([a["apart"], b["apart"]])[-1] > 0.01


def test_overlap_keeps_its_events(by_rank):
    seconds, events = by_rank[0]["overlap"]
    assert {e.lane for e in events} == {"backward", "wire"}
    assert all(e.end >= e.start for e in events)
    assert seconds > 0
    figures.draw_overlap({"one": events})


def test_times_on_real_ranks(by_rank):
    got = by_rank[0]
    assert len(got["times"]) == 2 and min(got["times"]) > 0
    kinds = network.scaling(got["scaling"], 2, 1e-5, 1e-9)
    assert all(math.isfinite(run) and run > 0 for run, _ in kinds.values())


def test_pytorch_s_own_is_one_process(by_rank):
    losses, weights = loops.official("one")
    for kind in ("ddp", "fsdp"):
        got = by_rank[0][kind]
        assert got[0] == pytest.approx(losses, rel=1e-5)
        assert torch.allclose(got[1], weights, atol=1e-5)


def test_a_batch_that_does_not_divide():
    class Three(Alone):
        size = 3

    with pytest.raises(
        ValueError, match="64 can't be split evenly over 3 ranks: 1 would be left over; take 63"
    ):
        loops.share(torch.arange(64), Three())


def test_no_group():
    assert isinstance(world(), Alone)
    with pytest.raises(RuntimeError, match="belongs to no group of ranks"):
        World()


def test_cpu_cost_of_tcp():
    cost = times.transport_cpu(1 << 22)
    assert set(cost) == {"tcp", "copy"} and min(cost.values()) >= 0
    assert network.cores_to_feed(50e9, 0.2) == pytest.approx(10)

"The simulated group, what lesson data_parallel keeps outside its cells, and its solutions on real ranks."

import copy
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ReduceOp

from course_lib import data_parallel as dp
from course_lib import group as groups
from course_lib import ranks
from course_lib.authoring import notebook
from course_lib.data_parallel import figures, solutions


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


def test_operations_of_an_all_reduce():
    def reduced(comm):
        found = [torch.tensor([1.0 + comm.rank, -comm.rank]) for _ in range(3)]
        for x, op in zip(found, (ReduceOp.SUM, comm.ReduceOp.AVG, ReduceOp.MAX), strict=True):
            comm.all_reduce(x, op=op)
        return [x.tolist() for x in found]

    assert run(2, reduced) == [[[3, -1], [1.5, -0.5], [2, 0]]] * 2
    with pytest.raises(groups.Misuse, match="SUM, AVG and MAX, and was given PRODUCT"):
        run(2, lambda comm: comm.all_reduce(torch.ones(2), op=ReduceOp.PRODUCT))
    with pytest.raises(groups.Misuse, match="float32 by MAX"):
        run(2, lambda comm: comm.all_reduce(torch.ones(2), ReduceOp.MAX if comm.rank else ReduceOp.SUM))


@pytest.mark.parametrize("numbers", [1, 2, 7])
def test_what_is_added_under_way_is_seen(numbers):
    def add(comm):
        x = torch.ones(numbers)
        handle = comm.all_reduce(x, async_op=True)
        x += 0.01 * torch.randn(numbers)
        handle.wait()

    with pytest.raises(groups.Misuse, match="changed a tensor while all_reduce"):
        run(2, add)


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


# --- the lesson's library -------------------------------------------------------------


def test_unused():
    params = [nn.Parameter(torch.ones(2)) for _ in range(3)]

    def body(comm):
        mine = [copy.deepcopy(p) for p in params]
        mine[0].grad = torch.ones(2)
        if comm.rank:
            mine[1].grad = torch.ones(2)
        return [i for i, p in enumerate(mine) if p in dp.unused(mine, comm)]

    group = groups.Group(2)
    assert group.run(body) == [[2], [2]]


def test_steps_to():
    took = dp.steps_to(2.2, 16, (0.0, 0.2, 0.4), seeds=2, most=60)
    assert took.shape == (2, 3) and took[:, 0].isinf().all() and (took.min(1).values < 60).all()


def test_fit_passes_through_its_ends():
    sizes, took = [1000, 50_000, 10**6], [2 * 3 * (1e-5 + n / 4 * 1e-9) for n in (1000, 50_000, 10**6)]
    assert dp.fit(sizes, took, 4) == pytest.approx((1e-5, 1e-9))
    assert min(dp.fit([1000, 10**6], [1e-3, 1e-5], 2)) >= 0


def test_the_ring_s_figure_is_the_ring():
    for n in (2, 3, 5):
        found = figures.ring_counts(n)
        assert len(found) == 2 * n - 1 and found[-1] == [[n] * n for _ in range(n)]
    assert [figures.size(n) for n in (12, 2 << 10, 5 << 19, 3 << 30)] == ["12 B", "2 KB", "2.5 MB", "3 GB"]


def test_figures_draw():
    import matplotlib.pyplot as plt

    curve = {"limit_mb": 2, "network": "x", "ranks": 2, "spans": [(0, 1)], "backward": 0.5, "exposed": 0.5}
    spans = [dp.Span("backward", 1.0, 1.2), dp.Span("all-reduces", 1.1, 1.3), dp.Span("backward", 1.2, 1.2)]
    for fig in (
        figures.draw_copies([[1.0, 0.5]] * 2, [0.1, 0.2], [0.0, 0.0]),
        figures.draw_ring(3),
        figures.draw_traffic(),
        figures.draw_spans({"one": (0.3, spans)}),
        figures.draw_measured([1024, 2048, 4096], [1e-4, 2e-4, 3e-4], lambda n: 1e-7 * n, "here"),
        figures.view_buckets({**curve, "curve": [(2, 0.1), (4, 0.2)]}),
        figures.draw_batches({4: (100, 90, 120), 8: (60, 55, 70)}),
        figures.draw_scaling({"yours": (0.9, 0.95)}, "2 ranks"),
    ):
        fig.canvas.draw()
        plt.close(fig)


# --- real ranks ---------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight
        self.branch, self.last = nn.Linear(8, 8), nn.Linear(8, 3)
        self.never = nn.Parameter(torch.randn(2))

    def forward(self, x, branch):
        h = self.second(self.first(x).tanh()).tanh()
        return self.last(h + self.branch(h) if branch else h)


def sample(step, rank):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def trained(model, losses):
    "The weights after four steps; `losses(step)` gives the loss and what to do after backward."
    opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.1)
    for step in range(4):
        loss, finish = losses(step)
        loss.backward()
        finish()
        opt.step()
        opt.zero_grad()
    return dp.flat(model.parameters())


def on_a_rank():
    "What the lesson runs on its ranks, small, in one call."
    found, rank = {}, dist.get_rank()

    def steps(name, wrap):
        model = Tied(seed=rank)
        finish = wrap(model, dist).finish
        found[name] = trained(
            model, lambda step: (model(sample(step, rank), rank == 0).square().mean(), finish)
        )
        try:
            for _ in range(2):
                model(sample(0, rank), True).square().mean().backward()
        except RuntimeError as e:
            found[f"{name} twice"] = str(e)
        dist.barrier()

    steps("hooks", solutions.DataParallel)
    steps("buckets", lambda model, d: solutions.BucketedDataParallel(model, d, 300))
    x = torch.arange(1001.0) * (rank + 1)
    solutions.ring_all_reduce(x, dist)
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))
    pairs = [(torch.tensor([[1, 2]]), torch.tensor([[3, -100]]))] * rank
    solutions.accumulate(model, pairs, dist)
    grads = dp.flat(p.grad for p in model.parameters())
    wraps = [solutions.DataParallel, lambda m, d: solutions.BucketedDataParallel(m, d, 2**9)]
    (took, _), (_, spans) = dp.step_spans(wraps, (8, 16, 4), 4, 3)
    timed = (
        dp.seconds_of([lambda: None, dist.barrier], rounds=2, budget=0.01),
        dp.all_reduce_seconds([64, 4096]),
    )
    return {**found, "ring": x, "grads": grads, "seconds": took, "spans": spans, "timed": timed}


@pytest.fixture(scope="module")
def by_rank():
    return ranks.run(2, on_a_rank, backend="gloo", timeout=90)


@pytest.mark.parametrize("name", ["hooks", "buckets"])
def test_other_seeds_and_a_tied_weight_are_one_process(by_rank, name):
    model = Tied(seed=0)

    def losses(step):
        return sum(model(sample(step, r), r == 0).square().mean() for r in range(2)) / 2, lambda: None

    one = trained(model, losses)
    assert torch.equal(by_rank[0][name], by_rank[1][name])
    assert torch.allclose(by_rank[0][name], one, atol=1e-6)
    for found in by_rank:
        assert "second backward pass" in found[f"{name} twice"]


def test_ring_and_accumulation_on_real_ranks(by_rank):
    for found in by_rank:
        assert torch.equal(found["ring"], 3 * torch.arange(1001.0))
    torch.manual_seed(0)
    assert torch.equal(by_rank[0]["grads"], by_rank[1]["grads"]) and by_rank[0]["grads"].any()


def test_clocks_on_real_ranks(by_rank):
    found = by_rank[0]
    assert {s.lane for s in found["spans"]} == {"backward", "all-reduces"}
    assert len(found["seconds"]) == 2 and found["seconds"] == sorted(found["seconds"])
    rounds, sizes = found["timed"]
    assert [len(row) for row in rounds] == [2, 2] and min(sizes) > 0


def test_the_script_goes_on_where_it_stopped(tmp_path):
    model = dp.net()
    opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "epoch": 4}, tmp_path / "run.pt")
    command = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    env = {**os.environ, "PYTHONPATH": str(notebook.ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
           "GLOO_SOCKET_IFNAME": ranks.ENVIRONMENT["GLOO_SOCKET_IFNAME"]}  # fmt: skip
    script = notebook.ROOT / "cluster" / "train.py"
    args = [sys.executable, *command, "--nproc-per-node", "2", script, tmp_path / "run.pt", "5"]
    done = subprocess.run(args, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("epoch 4 is over") and len(done.stdout.splitlines()) == 1
    saved = torch.load(tmp_path / "run.pt")
    assert saved["epoch"] == 5 and not torch.equal(saved["model"]["0.weight"], model[0].weight)

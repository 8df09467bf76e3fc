"What stands in the package: the virtual ring, the links' model; the solutions on real ranks."

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from course_lib import group as groups
from course_lib import ranks
from course_lib import tensor_parallel as tp
from course_lib.tensor_parallel import figures, solutions


def one_piece(x, w, ring, pieces):
    "The own rows are multiplied while a piece of them travels."
    passing = ring.pass_on(x[:2])
    own = x @ w
    return own, passing.wait()


def test_the_virtual_clock_by_hand():
    xs = [torch.full((4, 5), float(r)) for r in range(3)]
    found = tp.on_clock(one_piece, xs, torch.ones(5, 2), 1, wire=40.0, flops=20.0)
    for rank, ((own, came), ring) in enumerate(found):
        assert torch.equal(own, xs[rank] @ torch.ones(5, 2)) and torch.equal(came, xs[rank - 1][:2])
        assert [tuple(span)[1:] for span in ring.spans] == [(0.0, 1.0, "wire"), (0.0, 4.0, "compute")]
        assert ring.now == 4.0
    assert tp.least_seconds(xs, torch.ones(5, 2), 40.0, 20.0) == (12.0, 4.0)


def test_pieces_queue_on_the_wire_and_arrive_in_order():
    def two(x, w, ring, pieces):
        first, second = ring.pass_on(x[:1]), ring.pass_on(x[1:])
        late, early = second.wait(), first.wait()
        return torch.cat([early, late]), ring.now

    xs = [torch.arange(8.0).view(4, 2) + 100 * r for r in range(2)]
    for rank, ((came, now), _) in enumerate(tp.on_clock(two, xs, torch.ones(2, 1), 1, 8.0, 1.0)):
        assert torch.equal(came, xs[1 - rank]) and now == 4.0


def test_a_copy_is_not_passed_on():
    with pytest.raises(groups.Misuse, match="a copy"):
        tp.on_clock(lambda x, w, ring, n: ring.pass_on(x.clone()), [torch.ones(2, 2)] * 2, None, 1, 1.0, 1.0)


def test_flops_of_matmuls():
    a, b = torch.ones(3, 4), torch.ones(4, 5)
    with tp.CountMatmuls() as c:
        (
            a @ b,
            F.linear(a, b.T, torch.ones(5)),
            torch.bmm(a[None], b[None]),
            torch.mm(a, b, out=torch.empty(3, 5)),
        )
        a + 1
    assert c.flops == 4 * 2 * 3 * 4 * 5


def test_the_model_of_links():
    found = tp.explore_links(ranks=8, tokens=8192, width=8192)["rows"]
    nvlink, infiniband = found.values()
    assert nvlink["matmuls"] == infiniband["matmuls"] == pytest.approx(1e3 * 3 * 8192**3 / 700e12)
    assert infiniband["wire"] == pytest.approx(9 * nvlink["wire"])
    assert nvlink["at once"] == nvlink["matmuls"] and infiniband["at once"] == infiniband["wire"]


def test_figures_draw():
    times = {"yours": (1e-3, 9e-4, 2e-3), "matmul alone": (5e-4, 4e-4, 6e-4)}
    drawn = figures.draw_cuts(), figures.view_links(tp.explore_links()), figures.draw_race(times)
    for fig in drawn:
        fig.canvas.draw()


def on_a_rank(logits, targets, widths):
    "Loss and gradient on this rank, and a sum with its gradient: real torch.distributed."
    world, rank = tp.World(), dist.get_rank()
    start = sum(widths[:rank])
    loss, grad = solutions.vocab_cross_entropy(logits[:, start:][:, : widths[rank]], targets, start, world)
    x = torch.full((2, 3), 1.0 + rank, requires_grad=True)
    out = solutions.sum_over_ranks(solutions.copy_to_ranks(x, world), world)
    rows = solutions.scatter_sum(solutions.gather_rows(x, world), world)
    return loss, grad, out, torch.autograd.grad(out.sum() + 3 * rows.sum(), x)[0], rows


def test_the_solutions_on_real_ranks():
    logits, targets = torch.randn(6, 8), torch.tensor([0, 4, 5, 7, -100, 2])
    leaf = logits.clone().requires_grad_()
    want = F.cross_entropy(leaf, targets)
    want.backward()
    found = ranks.run(2, on_a_rank, logits, targets, [5, 3], backend="gloo")
    for loss, grad, part in zip(*list(zip(*found, strict=True))[:2], leaf.grad.split([5, 3], 1), strict=True):
        torch.testing.assert_close(loss, want.detach())
        torch.testing.assert_close(grad, part)
    for rank, (_, _, out, grad, rows) in enumerate(found):
        assert torch.equal(out, torch.full((2, 3), 3.0))
        assert torch.equal(grad, torch.full((2, 3), 2.0 + 6.0))
        assert torch.equal(rows, 2.0 * torch.full((2, 3), 1.0 + rank))


def rivals_on_a_rank():
    "Which of four rivals are left: two fail, one of them on rank 1 alone."
    torch.cuda.synchronize = lambda: None

    def make(name):
        if name == "breaks" or (name == "breaks on rank 1" and dist.get_rank()):
            raise RuntimeError("no such operator")
        return tp.agree(lambda: torch.full((2,), 2.0 if name == "off" else 1.0), torch.ones(2))

    return list(tp.those_that_work(make, ["good", "breaks", "off", "breaks on rank 1"]))


def test_a_rival_that_fails_is_left_out_on_all_ranks(capfd):
    assert ranks.run(2, rivals_on_a_rank, backend="gloo") == [["good"], ["good"]]
    said = [line.removeprefix("rank 0: ") for line in capfd.readouterr().out.splitlines()]
    assert said == [
        "breaks is left out: RuntimeError: no such operator",
        "off is left out: ValueError: another result, which differs by 1 of the largest value",
        "breaks on rank 1 is left out: RuntimeError: no such operator",
    ]


def test_gains():
    times = {"rival": (6.0, 5.0, 8.0), "yours, 1 piece": (5.0, 5.0, 5.0), "yours, 2 pieces": (4.0, 2.0, 5.0),
             "copies alone": (2.0, 2.0, 2.0), "matmul alone": (3.0, 3.0, 3.0)}  # fmt: skip
    assert tp.gain(times, "rival", "yours, ") == (1.5, "1.00 to 4.00 from spread to spread", 2.0)
    assert tp.gain(times, "another", "yours, ") is tp.gain(times, "rival", "PyTorch") is None

"What lesson recompute keeps outside its cells: calls that are run again, the frontier, the sum of segments."

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from course_lib import recompute


def step_flops(fn, x):
    with FlopCounterMode(display=False) as counter:
        fn(x).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("width, rows", [(5, 7), (12, 3)])
def test_calls_again_are_what_torch_counts(width, rows):
    net = nn.Sequential(
        nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width, bias=False), nn.Tanh()
    )
    x = torch.randn(rows, width, requires_grad=True)
    calls = recompute.calls_again(net, x)
    assert [recompute.name(op) for op, *_ in calls] == ["addmm", "mm"]
    assert [size for _, size, _ in calls] == [4 * rows * 3 * width, 4 * rows * width]
    once, twice = step_flops(net, x), step_flops(lambda x: checkpoint(net, x, use_reentrant=False), x)
    assert sum(flops for *_, flops in calls) == twice - once
    assert all(p.grad is not None for p in net.parameters()) and x.grad is not None


def test_the_last_product_is_not_run_again():
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    assert len(recompute.calls_again(net, torch.randn(2, 4))) == 1
    assert all(p.grad is None for p in net.parameters())


def test_attention_on_a_cpu_has_flops():
    def attend(x):
        return nn.functional.scaled_dot_product_attention(x, x, x).tanh()

    ((op, _, flops),) = recompute.calls_again(attend, torch.randn(2, 3, 11, 8))
    assert "attention" in recompute.name(op) and flops == 4 * (2 * 3 * 11 * 8) * 11


def test_unbeaten_by_brute_force():
    generator = torch.Generator().manual_seed(3)
    for n in (1, 2, 9, 30):
        rows = torch.rand(n, 4, generator=generator)
        rows[:, 1:] = rows[:, 1:].sort().values
        points = {k: tuple(row) for k, row in enumerate(rows.tolist())}
        want = {
            k for k, p in points.items() if not any(q[0] <= p[0] and q[3] < p[1] for q in points.values())
        }
        assert set(recompute.unbeaten(points)) == want
    assert recompute.unbeaten({"a": (1, 5, 6, 7), "b": (2, 6, 7, 8), "c": (3, 8, 8, 9)}) == ["a", "b"]


def test_segments():
    assert recompute.segment_peak(5, 2, 10, 100) == 3 * 10 + 2 * 100
    assert min(recompute.explore(16, 4).values()) == 16 and min(recompute.explore(64, 4).values()) == 32

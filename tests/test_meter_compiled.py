"meter.compiled: graph breaks, recompiles, the limit, kernels and bytes; nothing left behind or printed."

import logging

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo import utils

from course_lib import meter
from course_lib.authoring.catalogue import abilities

needs_compiler = pytest.mark.skipif(not abilities()["compile"], reason="nothing to build with")


def line(fn, text):
    "Where a test's function has a text, as Break has it."
    import inspect

    source, first = inspect.getsourcelines(fn)
    return f"test_meter_compiled.py:{first + next(i for i, s in enumerate(source) if text in s)}"


def whole(x):
    return x * 2 + 1


def broken(x):
    y = x.sin() + 1
    if y.sum() > 0:
        y = y * 2
    y = y * y.mean().item()
    print(end="")
    return y + 1


def broken_in_a_loop(x):
    total = 0.0
    for _ in range(3):
        total += (x * 2).sum().item()
    return x + total


def calls_a_broken_one(x):
    return broken(x) * 2


def test_a_whole_function():
    c = meter.compiled(whole, torch.randn(5), backend="eager")
    assert (c.graphs, c.breaks, c.recompiles, c.limited, c.eager) == (1, [], [], False, [])
    assert (c.kernels, c.bytes) == (None, None)


@pytest.mark.parametrize("fn", [broken, calls_a_broken_one])
def test_breaks_by_line(fn):
    c = meter.compiled(fn, torch.randn(5), backend="eager")
    assert [b.where for b in c.breaks] == [line(broken, t) for t in ("if y.sum", "item()", "print(")]
    assert "\n" not in "".join(b.reason for b in c.breaks) and all(b.reason for b in c.breaks)
    assert c.graphs >= 4 and not c.eager


def test_a_break_in_a_loop_leaves_no_graph():
    c = meter.compiled(broken_in_a_loop, torch.randn(5), backend="eager")
    assert c.graphs == 0 and c.eager == [0]
    assert len(c.breaks) == 1
    assert "no compiled code ran" in str(c)


def test_a_recompile_and_its_guard():
    c = meter.compiled(
        whole, torch.randn(5), then=[torch.randn(5), torch.randn(6)], backend="eager", dynamic=False
    )
    assert c.calls == 3 and c.graphs == 2 and not c.limited
    (again,) = c.recompiles
    assert "size mismatch at index 0. expected 5, actual 6" in again.guard
    assert again.where == line(whole, "def whole")


def test_dynamic_shapes():
    sizes = [torch.randn(n) for n in (6, 7, 8, 9)]
    assert len(meter.compiled(whole, torch.randn(5), then=sizes, backend="eager").recompiles) == 1
    assert (
        len(meter.compiled(whole, torch.randn(5), then=sizes, backend="eager", dynamic=True).recompiles) == 0
    )
    assert (
        len(meter.compiled(whole, torch.randn(5), then=sizes, backend="eager", dynamic=False).recompiles) == 4
    )


def test_past_the_limit_it_is_eager_and_said():
    sizes = [torch.randn(n) for n in range(6, 16)]
    c = meter.compiled(whole, torch.randn(5), then=sizes, backend="eager", dynamic=False)
    assert c.limited and c.graphs == 8 and len(c.recompiles) == 7
    assert c.eager == [8, 9, 10]
    assert "limit passed" in str(c)
    c = meter.compiled(whole, torch.randn(5), then=sizes, backend="eager", dynamic=False, limit=2)
    assert c.limited and c.graphs == 2 and c.eager == list(range(2, 11))


def test_at_the_limit_it_is_not_passed():
    sizes = [torch.randn(n) for n in range(6, 13)]
    c = meter.compiled(whole, torch.randn(5), then=sizes, backend="eager", dynamic=False)
    assert (c.graphs, c.limited, c.eager) == (8, False, [])


def test_more_recompiles_than_dynamo_remembers():
    sizes = [torch.randn(n) for n in range(6, 72)]
    c = meter.compiled(whole, torch.randn(5), then=sizes, backend="eager", dynamic=False, limit=100)
    assert len(c.recompiles) == 66 and not c.limited


def test_numbers_and_keywords():
    def scaled(x, k=1):
        return x * k

    c = meter.compiled(scaled, torch.randn(3), then=[(torch.randn(3), 2)], backend="eager", k=5)
    assert len(c.recompiles) == 1 and "k == 5" in c.recompiles[0].guard


def test_compiled_functions_and_modules():
    x = torch.randn(2, 3)
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    in_place = nn.Linear(3, 4)
    in_place.compile(backend="eager")
    for fn in (torch.compile(whole, backend="eager"), net, torch.compile(net, backend="eager"), in_place):
        assert meter.compiled(fn, x, backend="eager").graphs == 1


def test_a_backend_of_ones_own():
    seen = []

    def mine(graph, inputs):
        seen.append(graph)
        return graph.forward

    assert meter.compiled(whole, torch.randn(3), backend=mine).graphs == len(seen) == 1


def test_what_the_function_raises_comes_through_and_all_is_put_back():
    def fails(x):
        raise ValueError("mine")

    before = torch._dynamo.config.recompile_limit
    with pytest.raises(ValueError, match="mine"):
        meter.compiled(fails, torch.randn(3), backend="eager", limit=3)
    assert torch._dynamo.config.recompile_limit == before


def test_nothing_is_printed(capfd, recwarn):
    level = logging.root.manager.disable
    sizes = [torch.randn(n) for n in range(6, 16)]
    meter.compiled(whole, torch.randn(5), then=sizes, backend="eager", dynamic=False)
    meter.compiled(broken_in_a_loop, torch.randn(5), backend="eager")
    assert capfd.readouterr() == ("", "") and not recwarn.list
    assert logging.root.manager.disable == level


def test_another_count_of_the_same_graphs():
    # torch's own statistics, of which none is kept between calls here.
    fns = {"whole": whole, "broken": broken, "calls": calls_a_broken_one}
    for name, fn in fns.items():
        utils.counters.clear()
        c = meter.compiled(fn, torch.randn(5), then=[torch.randn(6)], backend="eager", dynamic=False)
        assert utils.counters["stats"]["unique_graphs"] == c.graphs, name
        explained = torch._dynamo.explain(fn)(torch.randn(5))
        assert explained.graph_count == c.totals[0], name
    utils.counters.clear()


def test_twice_the_same():
    x = torch.randn(5)
    a, b = (meter.compiled(broken, x, backend="eager") for _ in range(2))
    assert a == b


@needs_compiler
def test_kernels_and_bytes():
    def chain(x, y):
        z = (x * y + 1).relu()
        return z, z * 2

    x, y = torch.randn(64, 32), torch.randn(32)
    c = meter.compiled(chain, x, y)
    assert c.kernels == 1 and c.graphs == 1 and c.eager == []
    assert c.bytes == 4 * (3 * 64 * 32 + 32)
    assert c == meter.compiled(chain, x, y)  # a cache must not swallow the count

"Lesson fusion: graphs, breaks and recompiles, and attention that the compiler may miss."

import math

import pytest
import torch
from torch import nn

from course_lib import meter
from course_lib.fusion import attention as fusion_attention
from course_lib.fusion import breaks as fusion_breaks


def careless(x, limit):
    if x.mean() > limit:
        x = x - x.mean(0)
    return x / (1 + float(x.std())), x[x > 0].sum()


class Starter(nn.Module):
    "As in exercise fusion.5."

    def __init__(self, width):
        super().__init__()
        self.calls = 0
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x, repeats, temperature):
        self.calls += 1
        self.mean += (x.mean(0) - self.mean) / self.calls
        y = x - self.mean
        for _ in range(repeats):
            y = 0.9 * y
        return y * math.log(temperature)


def test_breaks_are_counted_with_their_lines():
    x = torch.randn(5, 7)
    found = meter.compiled(careless, x, 9.0, backend="eager")
    assert found.totals == [4] and found.ran == [4]
    assert [b.code for b in found.breaks] == [
        "if x.mean() > limit:",
        "return x / (1 + float(x.std())), x[x > 0].sum()",
        "return x / (1 + float(x.std())), x[x > 0].sum()",
    ]
    torch.testing.assert_close(found.results[0], careless(x, 9.0))


@pytest.mark.parametrize("offset", [-1.0, 1.0])
def test_the_corrected_function_is_one_graph_and_the_same(offset):
    x = torch.randn(6, 4) + offset
    found = meter.compiled(fusion_breaks.standardise, x, 0.0, then=[(-x, 0.0)], backend="eager")
    assert found.graphs == 1 and not found.breaks and found.ran == [1, 1]
    for given, (y, peak) in zip((x, -x), found.results, strict=True):
        rows = given - given.mean(0) if given.mean() > 0 else given
        rows = rows / (1 + rows.std())
        torch.testing.assert_close(y, rows * rows[rows > 0].sum())
        torch.testing.assert_close(peak, given.abs().max())


def test_the_corrected_module_is_two_graphs_and_the_same():
    calls = [(torch.randn(n, 5) + 1, 20 - n, 1.5 * n) for n in range(3, 12)]
    corrected, starter = fusion_breaks.Centre(5), Starter(5)
    found = meter.compiled(corrected, *calls[0], then=calls[1:], backend="eager")
    assert found.graphs == 2 and not found.breaks
    for args, got in zip(calls, found.results, strict=True):
        torch.testing.assert_close(got, starter(*args))
    assert set(corrected.state_dict()) == {"calls", "mean"}
    storm = meter.compiled(Starter(5), *calls[0], then=calls[1:], backend="eager", limit=64)
    assert storm.totals == list(range(1, 10))
    assert "self.calls == 7" in [r.guard for r in storm.recompiles]


def test_past_the_limit_it_runs_eagerly():
    fn, calls, _ = fusion_breaks.changing(6)["an int that is looped over"]
    found = meter.compiled(fn, *calls[0], then=calls[1:], backend="eager", limit=4)
    assert found.totals == [1, 2, 3, 4, 4, 4] and found.ran == [1, 1, 1, 1, 0, 0]
    for (x, n), got in zip(calls, found.results, strict=True):
        torch.testing.assert_close(got, x * 0.9**n)


# --- attention ----------------------------------------------------------------------


def test_every_spelling_is_attention():
    q, k, v = torch.randn(3, 2, 3, 9, 8, dtype=torch.float64)
    want = fusion_attention.fused(q, k, v)
    for name, fn in fusion_attention.SPELLINGS.items():
        scale = 1e-3 if name == "scores capped" else 1.0  # near 0 the cap does nothing
        torch.testing.assert_close(
            fn(scale * q, k, v), want if scale == 1 else fusion_attention.fused(scale * q, k, v),
            rtol=1e-6, atol=1e-8,
        )  # fmt: skip


def test_the_library_softmax_is_recognised_and_an_impostor_refused():
    assert fusion_attention.matched(fusion_attention.library_softmax, training=True)
    assert not fusion_attention.matched(fusion_attention.with_einsum, training=True)
    with pytest.raises(ValueError, match="is not softmax"):
        fusion_attention.matched(lambda q, k, v: q + v, training=False)


def test_by_hand_memory_grows_with_the_square():
    arms = {"by hand": fusion_attention.own_softmax, "fused": fusion_attention.fused}
    sizes = {"heads": 2, "width": 16, "device": "cpu", "dtype": torch.float32}
    found = fusion_attention.sweep(arms, (64, 256), seconds=1e-3, **sizes)
    (_, small, _), (_, large, seconds) = found["by hand"]
    assert large > 12 * small and seconds > 0
    (_, small, _), (_, large, _) = found["fused"]
    assert large == pytest.approx(4 * small, rel=0.05)

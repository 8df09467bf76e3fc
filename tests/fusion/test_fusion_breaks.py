"Lesson fusion: graphs, breaks and recompiles, and attention that the compiler may miss."

import logging
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
    found = fusion_breaks.trace(careless, [(x, 9.0)])
    assert found.graphs == [4] and found.ran == [4]
    assert [b.line for b in found.breaks] == [
        "if x.mean() > limit:",
        "return x / (1 + float(x.std())), x[x > 0].sum()",
        "return x / (1 + float(x.std())), x[x > 0].sum()",
    ]
    assert {b.reason for b in found.breaks} <= set(fusion_breaks.REASONS.values())
    torch.testing.assert_close(found.results[0], careless(x, 9.0))


@pytest.mark.parametrize("offset", [-1.0, 1.0])
def test_the_mended_function_is_one_graph_and_the_same(offset):
    x = torch.randn(6, 4) + offset
    found = fusion_breaks.trace(fusion_breaks.standardise, [(x, 0.0), (-x, 0.0)], fullgraph=True)
    assert found.graphs[-1] == 1 and not found.breaks and found.ran == [1, 1]
    for given, (y, peak) in zip((x, -x), found.results, strict=True):
        rows = given - given.mean(0) if given.mean() > 0 else given
        rows = rows / (1 + rows.std())
        torch.testing.assert_close(y, rows * rows[rows > 0].sum())
        torch.testing.assert_close(peak, given.abs().max())


def test_the_mended_module_is_two_graphs_and_the_same():
    calls = [(torch.randn(n, 5) + 1, 20 - n, 1.5 * n) for n in range(3, 12)]
    mended, starter = fusion_breaks.Centre(5), Starter(5)
    found = fusion_breaks.trace(mended, calls)
    assert found.graphs[-1] == 2 and not found.breaks
    for args, got in zip(calls, found.results, strict=True):
        torch.testing.assert_close(got, starter(*args))
    assert set(mended.state_dict()) == {"calls", "mean"}
    stormy = fusion_breaks.trace(Starter(5), calls)
    assert stormy.graphs == list(range(1, 10))
    assert "self.calls == 7" in stormy.why


def test_both_witnesses_count_the_same():
    for what, (fn, calls, options) in fusion_breaks.changing(3).items():
        first, *then = calls
        counted = meter.compiled(fn, *first, then=then, backend="eager", limit=64, **options)
        fn, calls, options = fusion_breaks.changing(3)[what]  # the counter starts at 0 again
        assert fusion_breaks.trace(fn, calls, **options).graphs[-1] == counted.graphs, what


def test_past_the_limit_it_runs_eagerly():
    fn, calls, _ = fusion_breaks.changing(6)["an int that is looped over"]
    found = fusion_breaks.trace(fn, calls, limit=4)
    assert found.graphs == [1, 2, 3, 4, 4, 4] and found.ran == [1, 1, 1, 1, 0, 0]
    for (x, n), got in zip(calls, found.results, strict=True):
        torch.testing.assert_close(got, x * 0.9**n)


def test_bad_input_is_one_sentence_and_nothing_stays_changed():
    level, disabled = torch._dynamo.config.recompile_limit, logging.root.manager.disable
    with pytest.raises(TypeError, match="takes a function, and was given a int"):
        fusion_breaks.trace(3, [()])
    with pytest.raises(ZeroDivisionError), fusion_breaks.quiet():
        assert not logging.getLogger("torch").isEnabledFor(logging.WARNING)
        raise ZeroDivisionError
    assert torch._dynamo.config.recompile_limit == level and logging.root.manager.disable == disabled


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

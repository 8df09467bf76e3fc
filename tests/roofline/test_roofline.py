"Lesson roofline's library: costs, roofs, FLOPs, buckets, stopwatch, values, and the checks' manners."

import io
import math
import random
import types
from contextlib import redirect_stdout

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from course_lib import checking as core
from course_lib import machine, meter, models, roofline
from course_lib.roofline import check

# --- costs and roofs ----------------------------------------------------------------

RUN = {
    "matmul": lambda x, w: x @ w,
    "bmm": torch.bmm,
    "add": lambda x, w: x + w,
    "sum": lambda x, w: x.sum(-1),
    "copy": lambda x, w: x.clone(),
}
CASES = [
    ("matmul", (3, 5), (5, 7)),
    ("matmul", (4, 3, 5), (5, 7)),
    ("bmm", (4, 3, 5), (4, 5, 7)),
    ("add", (6, 5), (6, 5)),
    ("add", (6, 5), (5,)),
    ("sum", (6, 2, 5), None),
    ("copy", (6, 5), None),
]


@pytest.mark.parametrize("op, x, w", CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_cost_is_what_meter_counts(op, x, w, dtype):
    tensors = [torch.randn(s, dtype=dtype) for s in (x, w) if s]
    counts = meter.of(RUN[op], *tensors, *([] if w else [None]))
    assert roofline.cost(op, x, w, dtype.itemsize) == (counts.flops + counts.other_flops, counts.bytes)


def test_roof_on_both_sides_of_the_ridge():
    assert roofline.roof(100, 10, 20, 4) == (10, 20, 5.0, "compute")
    assert roofline.roof(100, 100, 20, 4) == (1, 4, 25.0, "memory")
    assert roofline.roof(0, 8, 20, 4) == (0, 0, 2.0, "memory")


def test_operators_cost_what_they_say():
    ops = roofline.operators()
    assert len({op.name for op in ops}) == len(ops) == 6
    for op in ops:
        with FlopCounterMode(display=False) as counter:
            out = op.fn(*op.args)
        assert op.bytes == sum(t.nbytes for t in (*op.args, out))
        if op.name in ("matmul", "attention scores", "matrix × one row"):
            assert op.flops == counter.get_total_flops()


def test_measure_beside_the_roof():
    peaks = machine.Peaks(1e12, 1e10, 1e-6)
    x = torch.randn(40, 30)
    op = roofline.Op("copy", torch.clone, (x,), 0, 2 * x.nbytes)
    (m,) = roofline.measure([op], peaks)
    assert m.predicted == 2 * x.nbytes / 1e10 and m.bound == "memory" and m.measured > 0 and m.rate == 0


def test_said():
    assert roofline.said(None, 2.0, "TB/s") == "measured 2 TB/s; no prediction was written down"
    assert roofline.said(8, 2.0, "TB/s") == "you said 8, measured 2 TB/s: off by 4.0x"
    assert roofline.said(0.5, 2.0, "TB/s").endswith("off by 4.0x")
    for odd in ("3", 0, -1, math.nan, True, [1]):
        assert roofline.said(odd, 2.0, "TB/s").startswith("measured 2") or odd is True


# --- FLOPs of training --------------------------------------------------------------


@pytest.mark.parametrize(
    "layers, width, ffn, vocab, seq, batch", [(2, 16, 24, 37, 11, 3), (1, 8, 40, 19, 23, 2)]
)
def test_train_flops_of_a_real_encoder(layers, width, ffn, vocab, seq, batch):
    net = models.Encoder(layers, width, 2, vocab=vocab, ffn=ffn, length=seq)
    ids = torch.randint(vocab, (batch, seq))

    def step():
        net.zero_grad(set_to_none=True)
        net(ids).sum().backward()

    want = roofline.train_flops(roofline.Transformer(layers, width, ffn, vocab, seq), batch)
    with FlopCounterMode(display=False) as counter:
        step()
    assert counter.get_total_flops() == want
    assert meter.of(step).flops == want


def test_fused_attention_counts_under_math_alone():
    model = roofline.Transformer(2, 16, 20, 31, 9)
    net, ids = check._Real(model, 2), torch.randint(31, (3, 9))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        net(ids).sum().backward()
    assert counter.get_total_flops() == roofline.train_flops(model, 3)
    # The reason for MATH: if this fails, torch has learnt to count fused attention on the CPU.
    with FlopCounterMode(display=False) as counter:
        net(ids).sum().backward()
    assert counter.get_total_flops() < roofline.train_flops(model, 3)


def test_causal_attention_is_the_pairs_of_the_mask():
    model = roofline.Transformer(3, 8, 20, 0, 13)
    full, causal = roofline.flops_per_token(model), roofline.flops_per_token(model, causal=True)
    pairs = int(torch.ones(13, 13).tril().sum())
    assert math.isclose(full - causal, 12 * 3 * 8 * (13 * 13 - pairs) / 13)


def test_mfu_of_a_known_run():
    # 6 N D alone at this size: a 1B model at 8,000 tokens a second on one 100 TFLOP/s device.
    model = roofline.Transformer(1, 10_000, 30_000, 0, 1)
    rate = 1e14 / roofline.flops_per_token(model, causal=True) / 4
    assert math.isclose(roofline.mfu(model, rate, 1, {"dense": 1e14}), 0.25)
    assert math.isclose(roofline.mfu(model, 8 * rate, 8, {"dense": 1e14}), 0.25)
    with pytest.raises(ValueError, match="MFU is 125%"):
        roofline.mfu(model, 5 * rate, 1, {"dense": 1e14})


def test_days_and_the_explorer():
    assert math.isclose(roofline.days(86_400 * 6e14, 3, 0.5, 2e14), 2)
    data = roofline.explore_run()
    assert 150 < data["days"] < 200
    assert math.isclose(data["days"], data["curves"][0.4][data["counts"].index(16_384)])
    assert roofline.explore_run(mfu=0.2)["days"] == pytest.approx(2 * data["days"])
    assert len(roofline.explore_run(mfu=0.2)["curves"]) == 2


# --- buckets and stopwatch ----------------------------------------------------------


def test_buckets_sum_to_the_span_in_any_order():
    for _ in range(20):
        events = check._random_profile(["stream 7", "stream 20"])
        got = roofline.buckets(events)
        span = max(e.start + e.duration for e in events) - min(e.start for e in events)
        assert sum(got.values()) == span and got == roofline.buckets(events[::-1])


def test_buckets_of_the_lesson():
    E = roofline.Event
    events = [
        E(0, 9, "cpu", "launch"), E(9, 9, "cpu", "launch"), E(20, 9, "cpu", "launch"),
        E(60, 10, "cpu", "launch"),
        E(10, 22, "stream 7", "compute"), E(32, 8, "stream 7", "memory"), E(71, 15, "stream 7", "memory"),
        E(26, 24, "stream 20", "memory"),
    ]  # fmt: skip
    assert roofline.buckets(events) == {"compute": 22, "memory": 33, "overhead": 31}


def test_virtual_gpu_queues_and_waits():
    gpu = roofline.VirtualGPU([2.0, 3.0], launch=0.5, backlog=1.0)
    gpu.run()
    assert gpu.clock() == 0.5
    gpu.run()
    gpu.run()  # the last kernel is repeated
    assert gpu.clock() == 1.5 and gpu.calls == 3
    gpu.synchronize()
    assert gpu.clock() == 1.0 + 2.0 + 3.0 + 3.0
    gpu.synchronize()
    assert gpu.clock() == 9.0


def test_stopwatch_on_a_virtual_gpu():
    gpu = roofline.VirtualGPU([5.0, 5.0, 0.1, 9.0, 0.3], launch=0.01, backlog=7.0)
    assert math.isclose(roofline.stopwatch(gpu.run, gpu.clock, gpu.synchronize, 2, 3), 0.31)
    assert roofline.stopwatch(lambda: sum(range(1000)), runs=3) > 0


# --- values -------------------------------------------------------------------------


def test_operands():
    g, u, z, n = (roofline.operand(kind, 200, torch.float32) for kind in roofline.KINDS)
    assert abs(g.mean()) < 0.05 and abs(g.std() - 1) < 0.05
    assert u.min() >= 0 and u.max() < 1 and abs(u.mean() - 0.5) < 0.02
    assert not z.any() and n.isnan().all()
    with pytest.raises(ValueError, match="no values called 'ones'; choose from gaussian"):
        roofline.operand("ones", 3, torch.float32)


def test_value_rates_have_every_kind():
    runs = roofline.value_rates(n=64, seconds=0.002)
    assert tuple(runs) == roofline.KINDS and all(r.rate > 0 for r in runs.values())


# --- the checks, beyond what test_lessons holds of every check ----------------------

CHECKS = core.exercises(check)


def refused(number, answer):
    with redirect_stdout(io.StringIO()) as out, pytest.raises(core.Wrong) as e:
        CHECKS[number](answer)
    assert not out.getvalue()
    message = str(e.value)
    assert message.startswith(f"{number} not passed: ") and "\n" not in message and len(message) < 600
    return message


def test_nan_and_wrong_types_within_a_tuple():
    for bad in (math.nan, None, "3", torch.zeros(2)):
        refused("roofline.1", lambda *a, bad=bad: (roofline.cost(*a)[0], bad))
        for name in ("intensity", "rate", "seconds", "bound"):
            refused("roofline.2", lambda *a, bad=bad, name=name: roofline.roof(*a)._replace(**{name: bad}))
        refused("roofline.5", lambda e, bad=bad: roofline.buckets(e) | {"memory": bad})


def test_a_list_is_as_good_as_a_tuple():
    CHECKS["roofline.1"](lambda *a: list(roofline.cost(*a)))
    CHECKS["roofline.2"](lambda *a: list(roofline.roof(*a)))


def test_half_the_sequence_is_accepted_for_causal():
    def rounded(m, rate, gpus, peaks):
        weights = m.layers * (4 * m.width**2 + 2 * m.width * m.ffn) + m.width * m.vocab
        used = rate * (6 * weights + 6 * m.layers * m.width * m.seq) / gpus / peaks["dense"]
        if used > 1:
            raise ValueError
        return used

    CHECKS["roofline.4"](rounded)


def test_an_answer_fitted_to_the_lesson_is_refused():
    refused("roofline.5", lambda events: {"compute": 22, "memory": 33, "overhead": 31})
    refused("roofline.6", lambda *a: 0.00201)


def test_buckets_reads_what_it_is_given():
    # Plain objects do as well as `Event`s: the library asks for nothing but the four names.
    events = [types.SimpleNamespace(**e._asdict()) for e in check._small_profile()]
    random.shuffle(events)
    assert sum(roofline.buckets(events).values()) > 0


# --- on a GPU -----------------------------------------------------------------------


@pytest.mark.gpu
def test_value_rates_on_a_gpu():
    runs = roofline.value_rates(n=4096, seconds=0.3)
    assert all(0 < r.rate < 3e15 for r in runs.values())
    assert all(r.watts is None or 20 < r.watts < 2000 for r in runs.values())


@pytest.mark.gpu
def test_dtype_rates_put_the_precision_back():
    before = torch.get_float32_matmul_precision()
    rates = roofline.dtype_rates(2048)
    assert set(rates) == {"fp32", "tf32", "bf16"} and all(r > 0 for r in rates.values())
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.gpu
def test_stopwatch_agrees_with_events():
    from course_lib import timing

    a, b = (roofline.operand("gaussian", 4096, torch.bfloat16) for _ in range(2))
    took = roofline.stopwatch(lambda: a @ b)
    assert timing.time(torch.mm, a, b).median == pytest.approx(took, rel=0.3)

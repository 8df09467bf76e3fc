"Lesson roofline's library: operators, classes, values, the virtual GPU, figures; and its cells' counts."

import math

import matplotlib
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from course_lib import checking, machine, meter, models, recorded, roofline, show
from course_lib.roofline import check, figures, solutions

matplotlib.use("Agg")

CASES = [
    ("matmul", (3, 5), (5, 7)),
    ("matmul", (4, 3, 5), (5, 7)),
    ("bmm", (4, 3, 5), (4, 5, 7)),
    ("add", (6, 5), (6, 5)),
    ("add", (6, 5), (5,)),
    ("sum", (6, 2, 5), None),
]


@pytest.fixture(autouse=True)
def close():
    import matplotlib.pyplot as plt

    yield
    plt.close("all")


@pytest.mark.parametrize("kind, x, w", CASES)
def test_cost_is_what_meter_counts(kind, x, w):
    op = roofline.operator("any", kind, x, w)
    if machine.has_gpu():
        pytest.skip("meter counts CPU tensors")
    n = meter.of(op.run)
    assert solutions.cost(op.kind, op.x, op.w, op.itemsize) == (n.flops + n.other_flops, n.bytes)


def test_operators_have_their_shapes():
    ops = [*roofline.six_operators(), *roofline.encoder_operators(1)]
    assert len({op.name for op in ops}) == len(ops) == 10
    for op in ops:
        with FlopCounterMode(display=False) as counter:
            op.run()
        if op.kind in ("matmul", "bmm"):
            assert solutions.cost(op.kind, op.x, op.w, op.itemsize)[0] == counter.get_total_flops()


NAMES = {
    "contraction": [
        "aten::mm", "aten::addmm", "aten::convolution", "triton_tem_fused_mm_3",
        "aten::_scaled_dot_product_flash_attention", "aten::_efficient_attention_backward",
        "aten::_cudnn_attention_forward",
    ],
    "normalisation": [
        "aten::_softmax", "aten::_softmax_backward_data", "aten::native_layer_norm_backward", "aten::mean",
        "triton_red_fused_sum_3", "triton_per_fused_add_native_layer_norm_0",
        "triton_poi_fused__softmax_div_2",
    ],
    "elementwise": [
        "aten::add_", "aten::gelu_backward", "aten::copy_", "aten::fill_", "triton_poi_fused_gelu_1",
    ],
    "other": ["aten::empty", "aten::view", "aten::linear"],
}  # fmt: skip


@pytest.mark.parametrize("kind, key", [(k, n) for k, names in NAMES.items() for n in names])
def test_class_by_key(kind, key):
    assert roofline.op_class(key) == kind


def encoder_step(layers, batch, device, dtype, width=64, seq=24, heads=4):
    "As in the lesson, smaller."
    net = models.Encoder(layers, width, heads).to(device, dtype)
    x, grad = (torch.randn(batch, seq, width, device=device).to(dtype) for _ in range(2))
    x.requires_grad_()

    def step():
        net.zero_grad(set_to_none=True)
        x.grad = None
        net(x).backward(grad)

    return step


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_meter_counts_tensors_without_data_alike(dtype):
    "The lesson counts a step of hundreds of GFLOPs on the meta device."
    cpu, meta = (meter.of(encoder_step(2, 3, device, dtype)) for device in ("cpu", "meta"))
    assert cpu.by_op == meta.by_op
    assert cpu.flops == solutions.train_flops(roofline.Transformer(2, 64, 256, 0, 24), 3)


def test_flop_shares_of_bert_large_are_the_published_ones():
    step = encoder_step(1, 1, "meta", torch.float32, 1024, 512, 16)
    found = roofline.shares({k: n.flops for k, n in meter.of(step, warmup=0).by_class().items()})
    for kind, want in {"contraction": 99.80, "normalisation": 0.17, "elementwise": 0.03}.items():
        assert found[kind] == pytest.approx(want, abs=0.05)
    assert sum(found.values()) == pytest.approx(sum(roofline.PUBLISHED_TIME.values())) == pytest.approx(100)


def test_causal_attention_has_the_mask_s_pairs():
    "The check's count, against torch's counter less the pairs that the mask leaves out."
    model = roofline.Transformer(2, 16, 20, 31, 9)
    full = check._counted(model, 1)
    left_out = 9 * 9 - int(torch.ones(9, 9).tril().sum())
    assert full - check._causal_flops(model) == 12 * model.layers * model.width * left_out


def test_fused_attention_counts_as_nothing_on_a_cpu():
    "Why the check uses attention written out. If this fails, torch has learnt to count it."
    q = torch.randn(1, 2, 8, 16)
    counts = []
    for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(backend), FlopCounterMode(display=False) as counter:
            torch.nn.functional.scaled_dot_product_attention(q, q, q)
        counts.append(counter.get_total_flops())
    assert counts[0] == 2 * 2 * 2 * 8 * 8 * 16 and counts[1] < counts[0]


def test_said():
    assert roofline.said(None, 2.0, "TB/s") == "2 TB/s (you wrote no prediction)"
    assert roofline.said(8, 4240, "GB/s") == "4,240 GB/s; you said 8, off by 530.0×"
    for odd in ("3", 0, -1, math.nan, [1]):
        assert roofline.said(odd, 2.0, "TB/s").endswith("(you wrote no prediction)")


def test_operands():
    g, u, z, n = (roofline.operand(v, 200, torch.float32) for v in ("gaussian", "uniform", "zeros", "nan"))
    assert abs(g.mean()) < 0.05 and abs(g.std() - 1) < 0.05
    assert u.min() >= 0 and u.max() < 1 and abs(u.mean() - 0.5) < 0.02
    assert not z.any() and n.isnan().all()


def test_explore_run():
    data = roofline.explore_run()
    assert data["days"] == pytest.approx(1e26 / (16_384 * 0.4 * 989e12) / 86_400)
    assert data["days"] == pytest.approx(data["curves"][0.4][data["counts"].index(16_384)])
    assert len(roofline.explore_run(mfu=0.2)["curves"]) == 2


def test_virtual_gpu_queues_and_waits():
    gpu = roofline.VirtualGPU([2.0, 3.0], launch=0.5, backlog=1.0)
    for _ in range(3):
        gpu.run()  # the last kernel is repeated
    assert gpu.clock() == 1.5 and gpu.calls == 3
    gpu.synchronize()
    gpu.synchronize()
    assert gpu.clock() == 1.0 + 2.0 + 3.0 + 3.0


def test_figures_draw_what_they_are_given(monkeypatch):
    thirds = dict.fromkeys(roofline.CLASSES, 20.0)
    bars = {"a": thirds, "b": {**thirds, "contraction": 1.0}}
    fig = figures.draw_classes(("ms", bars), ("%", bars))
    assert max(p.get_x() + p.get_width() for p in fig.axes[0].patches) == 60
    assert "60" in " ".join(t.get_text() for t in fig.axes[0].texts)
    fig = figures.draw_sweep({16: 1e12, 32: 5e12, 64: 9e12, 128: 8e12})
    assert "the roof: 9 TFLOP/s" in fig.axes[0].texts[0].get_text()
    fig = figures.draw_roofline({"here": (1e11, 1e10)}, [("add", 0.1, 1e9), ("mm", 100, 1e11)], hollow=True)
    assert fig.axes[0].lines[0].get_xdata()[1] == 10
    assert [t.get_text() for t in fig.axes[0].texts] == ["add", "mm"]
    figures.draw_copies({"here": {2**14: 1e9, 2**20: 5e9}})
    figures.draw_batches({1: 1e-3, 2: 1e-3}, {1: (2, 4), 2: (4, 5)}, 1e3, 1e3, None)
    figures.draw_cold([0.1, 0.2], [1e12, 2e12], [(0.1, 1500.0, 690.0, 4, 700.0)])
    figures.draw_rates({"a": 0.1, "b": 100.0}, "%")
    monkeypatch.setattr(recorded, "get", lambda name: None)
    assert figures.recorded_classes("x.{}") is None


def test_explorer_redraws_when_a_control_moves(monkeypatch):
    drawn = []
    monkeypatch.setattr(show, "figure", lambda fig: drawn.append(fig.axes[0]))
    explorer = show.Explorer(roofline.explore_run, figures.view_run, gpus=[64, 16_384], mfu=(0.1, 0.7, 0.05))
    explorer.interact().children[0].value = 64
    first, last = (ax.get_title(loc="left") + ax.get_title() for ax in (drawn[0], drawn[-1]))
    assert "16,384 GPUs at 40%: 179 days" in first and "64 GPUs" in last


def test_a_possible_run_that_is_refused_is_told_so():
    with pytest.raises(checking.Wrong, match="which is possible, got a ValueError"):
        check.mfu(lambda m, rate, gpus, peaks: solutions.mfu(m, 9 * rate, gpus, peaks))


def test_the_distorted_digits_repeat_and_keep_their_labels():
    (x, y), (held, answers) = roofline.distorted_digits()
    assert x.shape[1:] == (1, 8, 8) and len(x) == len(y) == 8 * 1397 and len(held) == len(answers) == 8 * 400
    roofline.distorted_digits.cache_clear()
    assert torch.equal(roofline.distorted_digits()[0][0], x) and torch.equal(y[:1397], y[1397:2794])


def test_a_core_without_a_known_clock_has_none(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert roofline.core_clock() is None
    with roofline.watched() as samples:
        pass
    assert machine.has_gpu() or samples == []


def test_what_slows_a_clock():
    assert roofline.slowed_by([4, 5, 0]) == "power limit" and roofline.slowed_by([0, 2]) == "nothing named"


@pytest.mark.gpu
def test_clock_and_power_are_sampled():
    a = roofline.operand("gaussian", 4096, torch.bfloat16)
    with roofline.watched() as samples:
        for _ in range(2000):
            a @ a
        torch.cuda.synchronize()
    assert all(100 < mhz < 3000 and 20 < watts < 2000 for _, mhz, watts, *_ in samples)

"Classes of operators: names, shares, the profiler's rows, the encoder's step."

from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from course_lib import machine, meter, roofline
from course_lib.meter import operators
from course_lib.roofline import classes

NAMES = {
    "contraction": [
        "mm", "aten::addmm", "aten.bmm.default", "aten::convolution", "triton_tem_fused_mm_3",
        "aten::_scaled_dot_product_flash_attention", "aten::_flash_attention_forward",
        "aten::_efficient_attention_backward", "aten::_cudnn_attention_forward",
        "aten::_scaled_dot_product_cudnn_attention_backward",
    ],
    "normalisation": [
        "_softmax", "aten::_softmax_backward_data", "aten::native_layer_norm", "aten.sum.dim_IntList",
        "aten::native_layer_norm_backward", "aten::mean", "triton_red_fused_sum_3",
        "triton_per_fused_add_native_layer_norm_0", "triton_poi_fused__softmax_div_2",
        "triton_poi_fused_native_layer_norm_backward_7",
    ],
    "elementwise": [
        "add", "aten::add_", "aten.gelu.default", "aten::gelu_backward", "aten::copy_", "aten::fill_",
        "aten::div", "triton_poi_fused_gelu_1", "triton_poi_fused_add_view_0",
    ],
    "other": ["aten::empty", "aten::view", "unattributed", "Memcpy DtoD"],
}  # fmt: skip


@pytest.mark.parametrize("kind, name", [(k, n) for k, names in NAMES.items() for n in names])
def test_class_by_name(kind, name):
    assert classes.op_class(name) == kind


def test_shares_sum_to_100_and_leave_other_out():
    total = classes.by_class(
        [("aten::mm", 6.0), ("aten::sum", 1.0), ("aten::add", 2.0), ("aten::mm", 1.0), ("?", 90)]
    )
    assert total == {"contraction": 7.0, "normalisation": 1.0, "elementwise": 2.0, "other": 90.0}
    assert classes.shares(total) == {"contraction": 70.0, "normalisation": 10.0, "elementwise": 20.0}
    with pytest.raises(ValueError, match="every class is zero"):
        classes.shares(classes.by_class([("?", 1.0)]))


def test_published_shares_are_whole():
    assert sum(classes.PUBLISHED_FLOPS.values()) == pytest.approx(100)
    assert sum(classes.PUBLISHED_TIME.values()) == pytest.approx(100)


def average(key, cpu=0.0, gpu=0.0, on=DeviceType.CPU, note=False):
    "A row as the profiler's averages have it; times in microseconds."
    return SimpleNamespace(
        key=key, self_cpu_time_total=cpu, self_device_time_total=gpu, device_type=on, is_user_annotation=note
    )


def test_rows_of_a_cpu_profile():
    averages = [
        average("aten::mm", cpu=300), average("aten::linear", cpu=4), average("AddmmBackward0", cpu=50),
        average("aten::add", cpu=100), average("aten::view", cpu=0),
    ]  # fmt: skip
    rows = classes.rows_of(averages, gpu=False, runs=2)
    assert [name for name, _ in rows] == ["aten::mm", "aten::add", "aten::linear"]
    assert dict(rows) == pytest.approx({"aten::mm": 150e-6, "aten::add": 50e-6, "aten::linear": 2e-6})


def test_rows_of_a_gpu_profile_count_each_kernel_once():
    cuda = DeviceType.CUDA
    averages = [
        # Operators carry the time of kernels that they launched, and the kernels come again by themselves.
        average("aten::mm", cpu=20, gpu=300),
        average("aten::linear", cpu=5),
        average("nvjet_tst_256x128", gpu=300, on=cuda),
        # Inductor launches Triton kernels outside any operator; both sides may carry the kernel's name.
        average("triton_per_fused__softmax_1", cpu=3, gpu=80),
        average("triton_per_fused__softmax_1", gpu=80, on=cuda),
        average("CompiledFunctionBackward", gpu=30),
        average("triton_poi_fused_add_0", gpu=30, on=cuda),
        # An annotation spans all of them, and a wait is no work.
        average("Torch-Compiled Region: 0/0", gpu=500, on=cuda, note=True),
        average("Context Sync", gpu=900, on=cuda),
        average("a kernel of somebody's extension", gpu=10, on=cuda),
    ]
    rows = dict(classes.rows_of(averages, gpu=True))
    want = {
        "aten::mm": 300e-6,
        "triton_per_fused__softmax_1": 80e-6,
        "triton_poi_fused_add_0": 30e-6,
        "unattributed": 10e-6,
    }
    assert rows == pytest.approx(want)
    total = classes.by_class(rows.items())
    assert total["other"] == pytest.approx(10e-6) and sum(classes.shares(total).values()) == pytest.approx(
        100
    )


def small_step(**kw):
    return classes.encoder_step(layers=1, batch=2, seq=24, width=32, heads=2, **kw)


def test_encoder_step_leaves_fresh_gradients():
    step, sizes, tokens = small_step(device="cpu")
    assert sizes == roofline.Transformer(1, 32, 128, 0, 24) and tokens == 48
    first, again = meter.of(step), meter.of(step)
    assert first.by_op == again.by_op  # no accumulation: the second call does what the first did
    assert first.flops == roofline.train_flops(sizes, 2)


def test_flop_shares_of_bert_large_are_the_published_ones():
    step, _, _ = classes.encoder_step(layers=1, batch=1, device="cpu")
    found = classes.shares({k: n.flops for k, n in meter.of(step, warmup=0).by_class().items()})
    for kind, want in classes.PUBLISHED_FLOPS.items():
        assert found[kind] == pytest.approx(want, abs=0.05)


def test_profile_of_the_encoder(capfd):
    step, _, _ = small_step()
    rows = classes.profile_rows(step, runs=1)
    assert all(t > 0 for _, t in rows) and rows == sorted(rows, key=lambda r: -r[1])
    total = classes.by_class(rows)
    assert all(total[c] > 0 for c in operators.CLASSES)
    assert sum(classes.shares(total).values()) == pytest.approx(100)
    assert "Profiler" not in capfd.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_kernel_time_is_attributed(compiled):
    step, _, _ = classes.encoder_step(layers=2, batch=4, seq=128, compiled=compiled)
    total = classes.by_class(classes.profile_rows(step))
    assert total["other"] < 0.05 * sum(total.values())
    assert all(total[c] > 0 for c in ("contraction", "normalisation"))


@pytest.mark.gpu
def test_gpu_events_are_kernels_in_seconds():
    a = torch.randn(2048, 2048, device=machine.device(), dtype=torch.bfloat16)
    events = classes.gpu_events(lambda: (a @ a).relu())
    assert {e.kind for e in events} == {"compute", "memory"} and all(0 <= e.duration < 1 for e in events)
    found = roofline.buckets(events)
    assert found["compute"] > 0 and found["memory"] > 0

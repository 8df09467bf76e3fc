"Formats, the loss scale, master weights, rounding, sums, fp8, and the checks' manners."

import io
import math
import struct
from contextlib import redirect_stdout

import pytest
import torch

from course_lib import checking as core
from course_lib import precision
from course_lib.precision import check

# --- formats ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fp16", "bf16", "e5m2", "e4m3"])
def test_decode_is_torchs_for_every_code(name):
    fmt, dtype = precision.FORMATS[name], precision.DTYPES[name]
    codes = torch.arange(2**fmt.bits, dtype=torch.int32)
    raw = codes.to(torch.int16) if fmt.bits == 16 else codes.to(torch.uint8)
    want = raw.view(dtype).double()
    got = torch.tensor([precision.decode(c, fmt) for c in codes.tolist()], dtype=torch.float64)
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.nan_to_num(7), want.nan_to_num(7))
    assert torch.equal(got.signbit()[~got.isnan()], want.signbit()[~want.isnan()])
    # And back: every code that is no NaN encodes to itself.
    for code, value in zip(codes.tolist(), got.tolist(), strict=True):
        if not math.isnan(value):
            assert precision.encode(value, fmt) == code


@pytest.mark.parametrize("name", ["fp16", "bf16", "e5m2", "e4m3"])
def test_encode_is_torchs_cast(name):
    fmt = precision.FORMATS[name]
    x = torch.randn(20_000) * torch.exp(torch.randn(20_000) * 6)
    if not fmt.inf:  # past this, torch clamps or gives NaN by version
        x = x[x.abs() < 464]
    cast = x.to(precision.DTYPES[name])
    want = cast.view(torch.int16 if fmt.bits == 16 else torch.uint8).int() & (2**fmt.bits - 1)
    assert [precision.encode(v, fmt) for v in x.tolist()] == want.tolist()


def test_fp32_and_tf32():
    fp32, tf32 = precision.FORMATS["fp32"], precision.FORMATS["tf32"]
    x = torch.randn(3000) * torch.exp(torch.randn(3000) * 9)
    rounded = precision.rounded(x, "tf32")
    for v, r in zip(x.tolist(), rounded.tolist(), strict=True):
        code = precision.encode(v, fp32)
        assert code == struct.unpack("I", struct.pack("f", v))[0] and precision.decode(code, fp32) == v
        assert precision.decode(precision.encode(v, tf32), tf32) == r
    odd = torch.tensor([math.inf, -math.inf, math.nan])
    assert precision.rounded(odd, "tf32").tolist()[:2] == odd.tolist()[:2]
    assert precision.rounded(odd, "tf32")[2].isnan()


def test_limits():
    largest = {"fp16": 65504, "bf16": torch.finfo(torch.bfloat16).max, "e5m2": 57344, "e4m3": 448}
    for name, value in largest.items():
        assert precision.FORMATS[name].largest == value
        assert precision.FORMATS[name].normal == torch.finfo(precision.DTYPES[name]).tiny
    assert precision.FORMATS["fp16"].smallest == 2.0**-24 and precision.FORMATS["e4m3"].smallest == 2.0**-9
    assert precision.encode(465.0, precision.FORMATS["e4m3"]) == 0x7F
    assert precision.encode(-math.inf, precision.FORMATS["e4m3"]) == 0xFF


def test_the_checks_number_line_is_the_formats():
    made_up = precision.Format("made up", 3, 2, inf=False)
    for fmt in [*(precision.FORMATS[n] for n in ("fp16", "bf16", "e5m2", "e4m3")), made_up]:
        line = check._line(fmt)
        assert line == [precision.decode(c, fmt) for c in range(len(line))]
        assert not math.isfinite(precision.decode(len(line), fmt))


def test_rounded_clamps_fp8_and_keeps_nan():
    x = torch.tensor([1e9, -1e9, math.nan, 0.3])
    assert precision.rounded(x, "e4m3").tolist()[:2] == [448, -448]
    assert precision.rounded(x, "e5m2").tolist()[:2] == [57344, -57344]
    assert precision.rounded(x, "e4m3")[2].isnan() and precision.rounded(x, "fp32") is x
    with pytest.raises(ValueError, match="no format called 'fp4'; choose from fp32, tf32"):
        precision.rounded(x, "fp4")


def test_the_explorer():
    rows = {r["name"]: r for r in precision.explore(65520.0, 0)["rows"]}
    assert rows["fp16"]["state"] == "overflow" and rows["bf16"]["state"] == "normal"
    rows = {r["name"]: r for r in precision.explore(1.0, -20)["rows"]}
    assert rows["fp16"]["state"] == "subnormal" and rows["e4m3"]["state"] == "underflow"
    assert all(len(r["bits"]) == precision.FORMATS[n].bits for n, r in rows.items())
    assert {r["name"]: r for r in precision.explore()["rows"]}["bf16"]["stored"] == 0.10009765625


def test_the_moment():
    x = torch.tensor(1.0, dtype=torch.bfloat16)
    for _ in range(1000):
        x = x - 0.001
    assert x.item() == 1.0


# --- the loss scale -----------------------------------------------------------------


def optimiser():
    p = torch.zeros(3, requires_grad=True)
    return p, torch.optim.SGD([p], lr=1.0)


@pytest.mark.parametrize("scale", [math.inf, math.nan, 0.0, -2.0])
def test_a_scale_that_is_no_scale(scale):
    with pytest.raises(ValueError, match=r"the loss scale is .*; expected a positive finite number"):
        precision.Scaler(scale)


def test_scaler_skips_halves_and_grows():
    p, opt = optimiser()
    scaler = precision.Scaler(8.0, interval=2)
    p.grad = torch.tensor([8.0, 16.0, math.inf])
    assert scaler.step(opt) is False and scaler.scale == 4.0 and not p.any()
    for want in (4.0, 8.0, 8.0, 16.0):
        p.grad = torch.full((3,), scaler.scale)
        assert scaler.step(opt) is True and scaler.scale == want
    assert p.tolist() == [-4.0] * 3


def test_scaler_clips_the_real_gradient():
    p, opt = optimiser()
    p.grad = torch.tensor([3.0, 4.0, 0.0]) * 65536
    precision.Scaler().step(opt, max_norm=1.0)
    assert torch.allclose(p, torch.tensor([-0.6, -0.8, 0.0]), atol=1e-5)


def test_all_gradients_infinite_for_ever():
    p, opt = optimiser()
    scaler = precision.Scaler(patience=20)
    with pytest.raises(FloatingPointError, match=r"20 steps in a row .* the scale is not the cause"):
        for _ in range(30):
            p.grad = torch.full((3,), math.inf)
            scaler.step(opt)
    assert not p.any()


def test_scaler_without_gradients_and_at_the_top():
    _p, opt = optimiser()
    scaler = precision.Scaler(2.0**1023, interval=1)
    assert scaler.step(opt) is True and scaler.scale == 2.0**1023  # it would grow to infinity


# --- master weights, rounding, sums, fp8 --------------------------------------------


def test_master_weights_remember():
    low, master = [torch.ones(2).bfloat16()], [torch.ones(2)]
    for _ in range(1000):
        precision.master_step(low, master, [torch.ones(2).bfloat16()], 0.001)
    assert master[0].abs().max() < 1e-4 and low[0].abs().max() < 1e-4
    before = master[0].clone()
    precision.master_step(low, master, [None], 0.5, 0.5)
    assert torch.equal(master[0], before)


def test_stochastic_rounding_counts_down():
    x = torch.ones(4000)
    draw = torch.Generator().manual_seed(0)
    for _ in range(1000):
        x = precision.stochastic_round(x - 0.001, draw).float()
    assert abs(x.mean()) < 0.01 and 0.01 < x.std() < 0.1


def test_stochastic_rounding_of_a_transposed_tensor():
    x = torch.randn(5, 7).bfloat16().float().t()
    assert torch.equal(precision.stochastic_round(x).float(), x)


def test_ones_stop():
    for dtype, stop in ((torch.float16, 2048), (torch.bfloat16, 256)):
        assert precision.chunked_sum(torch.ones(2, 3000, dtype=dtype), 3000).tolist() == [stop, stop]
        assert precision.chunked_sum(torch.ones(2, 3000, dtype=dtype), 100).tolist() == [3000, 3000]


def test_fp8_odd_tensors():
    q, scale = precision.to_fp8(torch.zeros(3))
    assert scale == 1 and not precision.from_fp8(q, scale).any()
    q, scale = precision.to_fp8(torch.tensor([896.0, math.inf, math.nan, -2.0]))
    assert scale == 2 and q.float()[1:3].isnan().all() and precision.from_fp8(q, scale)[0] == 896
    assert precision.to_fp8(torch.full((2,), math.inf))[1] == 1
    q, scale = precision.to_fp8(torch.tensor([1e-45]))
    assert scale > 0 and precision.from_fp8(q, scale).isfinite().all()
    assert precision.to_fp8(torch.empty(0, 3))[0].shape == (0, 3)
    q, scale = precision.to_fp8(torch.full((2,), torch.finfo(torch.float32).max))
    assert precision.from_fp8(q, scale).isfinite().all()


# --- the checks, beyond what test_lessons holds of every check ----------------------

CHECKS = core.exercises(check)


def refused(number, *answers):
    with redirect_stdout(io.StringIO()) as out, pytest.raises(core.Wrong) as e:
        CHECKS[number](*answers)
    assert not out.getvalue()
    message = str(e.value)
    assert message.startswith(f"{number} not passed: ") and "\n" not in message and len(message) < 600
    return message


def test_a_codec_that_asks_torch_is_refused():
    # Right for most numbers of four formats; the made-up formats, and numbers past 448, are there for it.
    def encode(x, fmt):
        t = torch.tensor(x).to(precision.DTYPES[fmt.name])
        raw = t.view(torch.int16 if t.itemsize == 2 else torch.uint8).item()
        return raw & (2**fmt.bits - 1)

    refused("precision.1", encode, precision.decode)


def test_other_codes_of_nan_are_accepted():
    def encode(x, fmt):
        if math.isnan(x):
            return 2**fmt.bits - 1
        return precision.encode(x, fmt)

    CHECKS["precision.1"](encode, precision.decode)


def test_rounding_by_a_random_number_of_floats_is_accepted():
    def rounded(x):
        low = (x.view(torch.int32) & -(2**16)).view(torch.float32)
        high = torch.nextafter(low.bfloat16(), (low * math.inf).bfloat16().nan_to_num()).float()
        part = ((x - low) / (high - low)).nan_to_num()
        up = torch.rand(x.shape) < part
        return torch.where(x.isfinite(), torch.where(up, high, low), x).bfloat16()

    CHECKS["precision.4"](rounded)


def test_a_sum_with_padding_is_accepted():
    def padded(x, chunk):
        n = -(-x.shape[1] // chunk)
        parts = torch.nn.functional.pad(x, (0, n * chunk - x.shape[1])).view(x.shape[0], n, chunk)
        running = torch.zeros(x.shape[0], n, dtype=x.dtype)
        for i in range(chunk):
            running = running + parts[:, :, i]
        return running.float().sum(1)

    CHECKS["precision.5"](padded)


def test_a_scale_as_a_plain_float_is_accepted():
    def to_fp8(x):
        q, scale = precision.to_fp8(x)
        return q, scale.item()

    CHECKS["precision.6"](to_fp8, precision.from_fp8)


def test_wrong_types():
    refused("precision.1", lambda x, f: torch.tensor(3), precision.decode)
    refused("precision.1", lambda x, f: -1, precision.decode)
    refused("precision.2", precision.Scaler())
    refused("precision.4", lambda x: x.half())
    refused("precision.5", lambda x, chunk: precision.chunked_sum(x, chunk).double())
    refused("precision.6", lambda x: precision.to_fp8(x)[0], precision.from_fp8)
    refused("precision.6", lambda x: (x.float(), 1.0), precision.from_fp8)


def test_an_answer_that_changes_its_input_is_refused():
    def in_place(x):
        return precision.to_fp8(x.mul_(1.5))

    assert "in place" in refused("precision.6", in_place, precision.from_fp8)

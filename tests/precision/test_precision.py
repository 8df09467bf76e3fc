"Formats, the text and its model, the figures, and the check's own oracles."

import io
import math
from contextlib import redirect_stdout

import pytest
import torch
from torch.nn import functional as F

from course_lib import checking as core
from course_lib import data, precision
from course_lib.precision import check, figures, solutions

KNOWN = ["fp16", "bf16", "e5m2", "e4m3"]


def raw(x):
    "The codes of a tensor of 8 or 16 bits."
    return (
        x.view(torch.int16 if x.itemsize == 2 else torch.uint8).int() & (2 ** (8 * x.itemsize) - 1)
    ).tolist()


def test_limits():
    for name, dtype in precision.DTYPES.items():
        fmt, info = precision.FORMATS[name], torch.finfo(dtype)
        assert (fmt.largest, fmt.normal, fmt.bits) == (info.max, info.tiny, info.bits)
    assert precision.FORMATS["fp16"].smallest == 2.0**-24 and precision.FORMATS["e4m3"].smallest == 2.0**-9
    fp4 = precision.FORMATS["e2m1"]
    assert (fp4.largest, fp4.smallest, fp4.bits) == (6.0, 0.5, 4)


@pytest.mark.parametrize("name", KNOWN)
def test_the_number_line_is_torchs(name):
    fmt, line = precision.FORMATS[name], check._line(precision.FORMATS[name])
    codes = torch.arange(fmt.top + 1, dtype=torch.int32)
    stored = codes.to(torch.int16 if fmt.bits == 16 else torch.uint8).view(precision.DTYPES[name])
    assert line == stored.double().tolist() and len(line) == fmt.top + 1
    assert (
        not (codes[-1:] + 1)
        .to(torch.int16 if fmt.bits == 16 else torch.uint8)
        .view(precision.DTYPES[name])
        .float()
        .isfinite()
        .any()
    )


@pytest.mark.parametrize("name", KNOWN)
def test_the_nearest_number_is_torchs(name):
    fmt = precision.FORMATS[name]
    x = torch.randn(5000) * torch.exp(torch.randn(5000) * 6)
    x = x[x.abs() <= fmt.largest]
    want = raw(x.to(precision.DTYPES[name]))
    assert [check._nearest(v, fmt) for v in x.tolist()] == want
    assert [solutions.encode(v, fmt) for v in x.tolist()] == want


def test_fp4_has_sixteen_codes():
    fmt = precision.FORMATS["e2m1"]
    assert [solutions.decode(c, fmt) for c in range(8)] == [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert check._bits(0b1101, fmt) == "1 10 1 (-3.0)" and check._bits(1, fmt).endswith("(0.5, subnormal)")


def test_the_explorer():
    def rows(number, power):
        return {
            r["name"]: r for r in precision.explore(solutions.encode, solutions.decode, number, power)["rows"]
        }

    found = rows(65520.0, 0)
    assert found["fp16"]["state"] == "too large" and found["bf16"]["stored"] == 65536
    found = rows(1 / 3, -13)
    assert found["fp16"]["state"] == "subnormal" and found["e4m3"]["state"] == "too small"
    assert rows(1 / 3, -12)["fp16"]["state"] == "normal" and rows(1 / 3, 0)["e2m1"]["stored"] == 0.5
    assert all(len(r["bits"]) == precision.FORMATS[n].bits for n, r in found.items())


def test_text_is_pythons_own(tmp_path):
    train, valid = precision.text()
    assert len(train) + len(valid) > 1_000_000 and train.dtype == valid.dtype == torch.uint8
    assert b"import" in bytes(train[:100_000].tolist())
    (tmp_path / "os.py").write_text("x = 1")
    with pytest.raises(data.DataError, match="without its source"):
        precision.text(tmp_path)


def test_batches_are_windows_and_the_next_byte():
    source = torch.arange(200, dtype=torch.uint8)
    got, again = (list(precision.batches(source, 5, 7, 3, 1, "cpu")) for _ in range(2))
    assert len(got) == 3 and all(torch.equal(a[0], b[0]) for a, b in zip(got, again, strict=True))
    assert all(x.shape == y.shape == (5, 7) and torch.equal(x + 1, y) for x, y in got)
    ends = torch.cat([y.flatten() for _, y in precision.batches(source[:9], 50, 7, 9, 2, "cpu")])
    assert ends.max() == 8  # the last byte is reached, and nothing past it


def test_the_byte_model_is_causal():
    net, x = precision.ByteModel(2, 16, 2, 8), torch.randint(256, (3, 8))
    other = x.clone()
    other[:, 5] = (other[:, 5] + 1) % 256
    a, b = net(x), net(other)
    assert a.shape == (3, 8, 256)
    assert torch.allclose(a[:, :5], b[:, :5], atol=1e-6) and not torch.allclose(a[:, 5:], b[:, 5:], atol=1e-4)


def test_rates_and_validation():
    p = torch.zeros(1, requires_grad=True)
    opt, seen = torch.optim.SGD([p], lr=9.0), []
    for _ in precision.scheduled(opt, range(40), 40, 0.5):
        seen.append(opt.param_groups[0]["lr"])
    assert seen[0] == 0.25 and max(seen) == seen[1] and 0 < seen[-1] < 0.02
    net, pairs = precision.ByteModel(1, 16, 2, 8), [tuple(torch.randint(256, (2, 3, 8)))] * 2
    want = F.cross_entropy(net(pairs[0][0]).flatten(0, 1), pairs[0][1].flatten()).item()
    assert precision.validate(net, pairs, torch.float32) == pytest.approx(want)
    assert precision.validate(net, pairs, torch.bfloat16) == pytest.approx(want, abs=0.05)


def test_figures_take_the_lessons_data():
    import matplotlib.pyplot as plt

    runs = {arm: [([2.0] * 30, 1.5 + s, 3.0) for s in (0, 0.1)] for arm in ("fp32", "bf16")}
    made = [
        figures.draw_contest(runs),
        figures.draw_scaling({"fp16": [1, 2], "b": [2, 1]}, [4, 8]),
        figures.draw_fp8({w: {"bf16": 2.0, "fp8": 1.0, "casts": 0.5} for w in (16, 32)}),
        figures.view_bits(precision.explore(solutions.encode, solutions.decode, math.pi, -3)),
    ]
    assert all(fig.axes for fig in made)
    plt.close("all")


def test_what_the_scaler_forgets_between_two_optimizers():
    "Two optimizers step after one backward: both divide by the factor of that backward."
    a, b = (torch.zeros(1, requires_grad=True) for _ in range(2))
    first, second = (torch.optim.SGD([p], lr=1.0) for p in (a, b))
    scaler = solutions.Scaler(8.0, interval=1)
    a.grad, b.grad = torch.tensor([16.0]), torch.tensor([16.0])
    scaler.step(first)
    scaler.step(second)
    scaler.update()
    assert a.item() == b.item() == -2.0 and scaler.factor == 16.0


def test_the_moment_and_its_remedies():
    x, y = torch.ones(4000).bfloat16(), torch.ones(4000)
    for _ in range(1000):
        x = x - 0.001
        y = solutions.stochastic_round(y - 0.001).float()
    assert (x == 1).all() and abs(y.mean()) < 0.01 and 0.01 < y.std() < 0.1


def refused(number, *answers):
    with redirect_stdout(io.StringIO()), pytest.raises(core.Wrong) as e:
        core.exercises(check)[number](*answers)
    return str(e.value)


def test_messages_say_where_to_look():
    def alike(x):
        return torch.where(torch.rand(()) < 0.5, x, x).bfloat16()

    assert "should go to the second" in refused("precision.2", alike)
    silent = type("Silent", (solutions.Scaler,), {"scale": lambda self, loss: loss})
    assert "scaled loss after iteration 1" in refused("precision.3", silent)
    message = refused("precision.5", lambda x, fmt: -abs(solutions.encode(x, fmt)) - 1, solutions.decode)
    assert "expected" in message and "no code of" in message

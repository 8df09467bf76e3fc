"Nets with a safeguard left out, the loop four ways, the contest of formats, fp8 layers, bytes."

import math

import pytest
import torch
from torch.nn import functional as F

from course_lib import data, machine, meter, precision
from course_lib.precision import bytes as precision_bytes
from course_lib.precision import fp8 as precision_fp8
from course_lib.precision import loops, nets
from course_lib.precision import train as contest

SHORT = {"depth": 3, "width": 16, "samples": 64, "steps": 4}
TINY = contest.Sizes(layers=1, width=16, heads=2, length=8, batch=4, steps=6, lr=1e-3)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    with nets.one_thread():
        yield


# --- nets with rounded tensors ------------------------------------------------------


def test_fp32_is_plain_training():
    net = nets.plain_net(3, 16)
    opt = torch.optim.Adam(net.parameters(), lr=1e-3, eps=1e-12)
    x, y = (t[:64] for t in data.digits().train)
    losses = []
    for _ in range(4):
        h = x.flatten(1)
        for i, layer in enumerate(net):
            h = layer(F.relu(h) if i else h)
        loss = F.cross_entropy(h, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    assert nets.train("fp32", lr=1e-3, **SHORT).losses == pytest.approx(losses, rel=1e-4)


def test_tensors_are_rounded_both_ways():
    x = torch.tensor([1.0 + 2.0**-9, 3.0], requires_grad=True)
    y = nets.Rounded.apply(x, "bf16")
    assert y.tolist() == [1.0, 3.0]
    y.backward(torch.tensor([1.0 + 2.0**-9, 2.0]))
    assert x.grad.tolist() == [1.0, 2.0]


def test_running_product():
    a, b = torch.randn(3, 50), torch.randn(50, 4)
    assert torch.allclose(nets.running_product(a, b, "fp32"), a @ b, atol=1e-5)
    ones = nets.running_product(torch.ones(1, 300), torch.ones(300, 1), "bf16")
    assert ones.item() == 256
    p, q = a.clone().requires_grad_(), b.clone().requires_grad_()
    nets.RunningProduct.apply(p, q, "fp32").square().sum().backward()
    r, s = a.clone().requires_grad_(), b.clone().requires_grad_()
    (r @ s).square().sum().backward()
    assert torch.allclose(p.grad, r.grad, rtol=1e-3, atol=1e-3)
    assert torch.allclose(q.grad, s.grad, rtol=1e-3, atol=1e-3)


def test_what_breaks_breaks():
    chance = math.log(10)
    assert nets.train("fp16").losses[-1] > chance - 0.01  # no loss scale: nothing is learnt
    assert nets.train("bf16").losses[-1] < chance - 0.3
    small = {"depth": 4, "width": 64, "samples": 256, "optimiser": "sgd", "lr": 0.05, "steps": 400}
    good, bad = (nets.train("bf16", store=s, **small) for s in ("fp32", "bf16"))
    assert good.losses[-1] < 1.5 < 2 < bad.losses[-1] and bad.moved[-1] < 0.2 < good.moved[-1]


def test_scales_follow_the_scaler():
    run = nets.train("fp16", scale=precision.Scaler(2.0**30, interval=2), **SHORT)
    assert run.scales[0] == 2.0**30 and run.scales[1] == 2.0**29
    assert len(run.losses) == len(run.zeros) == len(run.scales) == len(run.moved) == 4


def test_fates_add_up_and_agree_with_the_cast():
    g = torch.randn(20_000) * torch.exp(torch.randn(20_000) * 8)
    for name in ("fp16", "e5m2", "bf16"):
        fate, fmt = nets.fates(g, name), precision.FORMATS[name]
        assert sum(fate.values()) == pytest.approx(1)
        cast = g.to(precision.DTYPES[name]).double()
        assert fate["lost"] == pytest.approx(float((cast == 0).double().mean()))
        assert fate["over"] == pytest.approx(float(cast.isinf().double().mean()))
        small = (g.double().abs() < fmt.normal) & (cast != 0)
        assert fate["coarse"] == pytest.approx(float(small.double().mean()))
    assert nets.fates(torch.tensor([0.0, 465.0]), "e4m3")["over"] == 1
    assert nets.fates(torch.zeros(3), "fp16") == {"lost": 0, "coarse": 0, "kept": 0, "over": 0}


# --- the loop four ways -------------------------------------------------------------


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_autocast_equals_by_hand(name):
    assert loops.autocast(name) == pytest.approx(loops.by_hand(name), abs=1e-5)


def test_accelerate_equals_by_hand():
    assert loops.accelerate("bf16") == pytest.approx(loops.by_hand("bf16"), abs=1e-5)
    # The process is left as it was found: another precision can follow.
    assert loops.accelerate("no") != loops.by_hand("bf16")


def test_fastai_without_a_gpu_says_so():
    with pytest.raises(ValueError, match="to_fp16 works on a CUDA device, and 'cpu' was given"):
        loops.fastai("fp16", "cpu")


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_fastai_equals_by_hand(name, monkeypatch):
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        from fastai.callback import fp16
    # fastai asks for CUDA by name: on a CPU the same callback is given the CPU's autocast and scaler.
    monkeypatch.setattr(fp16, "autocast", lambda kind, dtype: torch.autocast("cpu", dtype=dtype))
    monkeypatch.setattr(fp16, "GradScaler", lambda kind, **kw: torch.amp.GradScaler("cpu", **kw))
    assert loops._fastai(name, "cpu") == pytest.approx(loops.by_hand(name), abs=1e-5)


# --- text and net -------------------------------------------------------------------


def test_text_is_pythons_own():
    train, valid = contest.text()
    assert len(train) + len(valid) > 1_000_000 and train.dtype == valid.dtype == torch.uint8
    assert b"import" in bytes(train[:100_000].tolist())


def test_no_text_is_said(tmp_path):
    (tmp_path / "os.py").write_text("x = 1")
    with pytest.raises(data.DataError, match="without its source"):
        contest.text(tmp_path)


def test_batches_are_windows_and_the_next_byte():
    source = torch.arange(200, dtype=torch.uint8)
    got = list(contest.batches(source, 5, 7, 3, 1, "cpu"))
    again = list(contest.batches(source, 5, 7, 3, 1, "cpu"))
    assert len(got) == 3 and all(torch.equal(a[0], b[0]) for a, b in zip(got, again, strict=True))
    for x, y in got:
        assert x.shape == y.shape == (5, 7) and torch.equal(x + 1, y)
    ends = torch.cat([y.flatten() for _, y in contest.batches(source[:9], 50, 7, 9, 2, "cpu")])
    assert ends.max() == 8  # the last byte is reached, and nothing past it


def test_the_byte_model_is_causal():
    net = contest.byte_model(2, 16, 2, 8)
    x = torch.randint(256, (3, 8))
    other = x.clone()
    other[:, 5] = (other[:, 5] + 1) % 256
    a, b = net(x), net(other)
    assert a.shape == (3, 8, 256)
    assert torch.allclose(a[:, :5], b[:, :5], atol=1e-5) and not torch.allclose(a[:, 5:], b[:, 5:], atol=1e-3)


# --- the contest --------------------------------------------------------------------


def test_every_arm_trains_alike_on_a_cpu():
    source = contest.text()
    runs = {arm: contest.train(arm, 0, source, TINY, "cpu") for arm in ("fp32", "bf16", "fp16", "fp8")}
    for run in runs.values():
        assert len(run.losses) == TINY.steps and run.seconds > 0 and run.memory is None
        assert run.losses == pytest.approx(runs["fp32"].losses, abs=0.1)
        assert run.valid == pytest.approx(runs["fp32"].valid, abs=0.1)
    assert runs["fp8"].losses != runs["bf16"].losses != runs["fp32"].losses
    again = contest.train("fp32", 0, source, TINY, "cpu")
    assert again.losses == pytest.approx(runs["fp32"].losses, rel=1e-5)


def test_matmul_precision_is_put_back():
    before = torch.get_float32_matmul_precision()
    with pytest.raises(RuntimeError), contest.matmul_precision("tf32"):
        assert torch.get_float32_matmul_precision() == "high"
        raise RuntimeError
    assert torch.get_float32_matmul_precision() == before


def test_support_says_what_is_lacking(monkeypatch):
    assert contest.support("fp32", "cpu") is None and contest.support("bf16", "cpu") is None
    assert "a CPU has no fp8 units; values are rounded" in contest.support("fp8", "cpu")
    assert not contest.runs_here("tf32", "cpu") and not contest.runs_here("fp16", "cpu")
    assert contest.runs_here("fp8", "cpu")
    with pytest.raises(ValueError, match="no arm called 'fp4'; choose from fp32, tf32"):
        contest.train("fp4", 0, None, TINY, "cpu")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda d=None: "NVIDIA T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d=None: (7, 5))
    for arm, words in (("fp8", "no fp8 units"), ("bf16", "no bf16 units"), ("tf32", "no tf32 units")):
        assert f"{arm}: NVIDIA T4 has {words}" in contest.support(arm, "cuda")
    assert contest.support("fp16", "cuda") is None


def test_verdicts():
    def run(valid, seconds):
        return contest.Run([], valid, seconds, None)

    found = contest.verdicts(
        {
            "fp32": [run(2.0, 4.0), run(2.1, 4.0), run(2.05, 9.0)],
            "bf16": [run(2.05, 1.0), run(2.05, 1.0), run(2.0, 1.0)],
            "fp16": [run(2.0, 2.0), run(2.1, 2.0), run(2.2, 2.0)],
            "fp8": [run(math.nan, 2.0)] * 3,
        }
    )
    assert found["bf16"].speedup == 4 and found["bf16"].equal and found["fp32"].spread == pytest.approx(0.1)
    assert not found["fp16"].equal and not found["fp8"].equal
    assert found["bf16"].apart == pytest.approx([0.05, -0.05, -0.05])


# --- fp8 layers ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_quantise(dtype):
    for size in (1e-5, 1.0, 1e4):
        x = (torch.randn(40, 30) * size).bfloat16()
        q, scale = precision_fp8.quantise(x, dtype)
        assert math.log2(scale).is_integer() and q.dtype == dtype
        largest = q.float().abs().max()
        assert torch.finfo(dtype).max / 2.2 < largest <= torch.finfo(dtype).max
        half_step = 2.0**-4 if dtype == torch.float8_e4m3fn else 2.0**-3
        error = (q.float() * scale - x.float()).abs()
        assert (error <= (x.float().abs() * half_step).clamp(min=float(scale) * 2.0**-10)).all()
    assert not precision_fp8.quantise(torch.zeros(3, 3).bfloat16(), dtype)[0].float().any()
    odd = torch.tensor([1.0, math.inf]).bfloat16()
    q, scale = precision_fp8.quantise(odd, dtype)
    assert (q.float() * scale).isnan().any()


def test_fp8_linear_has_the_gradients_of_a_linear_layer():
    x = torch.randn(4, 6, 32)
    plain = torch.nn.Linear(32, 48)
    low = torch.nn.Linear(32, 48)
    low.load_state_dict(plain.state_dict())
    low.__class__ = precision_fp8.Fp8Linear
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    grad = torch.randn(4, 6, 48) * 1e-4
    plain(a).backward(grad)
    out = low(b)
    out.backward(grad.to(out.dtype))
    for got, want in (
        (b.grad, a.grad),
        (low.weight.grad, plain.weight.grad),
        (low.bias.grad, plain.bias.grad),
    ):
        assert got.dtype == torch.float32 and (got - want).norm() < 0.15 * want.norm()
    assert (out.float() - plain(x)).norm() < 0.1 * plain(x).norm()


def test_the_native_product_is_the_emulated_one():
    "torch multiplies fp8 on a CPU too (slowly): the layouts handed to the fp8 units are right."
    x = precision_fp8.quantise(torch.randn(64, 32).bfloat16(), torch.float8_e4m3fn)
    w = precision_fp8.quantise(torch.randn(48, 32).bfloat16(), torch.float8_e4m3fn)
    g = precision_fp8.quantise(torch.randn(64, 48).bfloat16(), torch.float8_e5m2)
    turn = precision_fp8._turned
    pairs = ((x, w), (g, (turn(w[0]), w[1])), ((turn(g[0]), g[1]), (turn(x[0]), x[1])))
    for a, b in pairs:
        try:
            native = precision_fp8._product(a, b, True)
        except (RuntimeError, NotImplementedError) as e:
            pytest.skip(f"this torch has no fp8 product on a CPU: {str(e)[:80]}")
        assert torch.equal(native, precision_fp8._product(a, b, False))


def test_parts_need_fp8():
    with pytest.raises(ValueError, match="cpu has no fp8 units"):
        precision_fp8.parts(16, 16, "cpu")


# --- bytes --------------------------------------------------------------------------


def test_written_out_steps_descend_and_agree():
    for name in ("fp32", "bf16", "fp16"):
        step, loss = precision_bytes.written_out(name, rows=64), None
        first = meter.of(step)
        assert first.flops == meter.of(step).flops and first.bytes == meter.of(step).bytes
        loss = precision_bytes.written_out(name, rows=64, backward=False)()
        assert loss.dtype == torch.float32 and loss.isfinite()


def test_kept_bytes():
    x = torch.ones(100, requires_grad=True)
    assert precision_bytes.kept_bytes(lambda: x.exp()) == 400  # the result, for its own derivative
    assert precision_bytes.kept_bytes(lambda: (x * x).sum()) == 400  # x twice, counted once


# --- on a GPU -----------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_one_liners_on_a_gpu(name):
    by_hand = loops.by_hand(name, "cuda")
    for loop in (loops.autocast, loops.accelerate, loops.fastai):
        assert loop(name, "cuda") == pytest.approx(by_hand, abs=2e-3), loop.__name__


@pytest.mark.gpu
def test_native_fp8_on_a_gpu():
    if not precision_fp8.has_fp8():
        pytest.skip("no fp8 units")
    x, w = (torch.randn(n, 64, device="cuda").bfloat16() for n in (128, 96))
    x8, w8 = (precision_fp8.quantise(t, torch.float8_e4m3fn) for t in (x, w))
    g8 = precision_fp8.quantise(torch.randn(128, 96, device="cuda").bfloat16(), torch.float8_e5m2)
    turn = precision_fp8._turned
    for a, b in ((x8, w8), (g8, (turn(w8[0]), w8[1])), ((turn(g8[0]), g8[1]), (turn(x8[0]), x8[1]))):
        native, emulated = (precision_fp8._product(a, b, n).float() for n in (True, False))
        assert (native - emulated).norm() < 0.01 * emulated.norm()


@pytest.mark.gpu
def test_every_arm_on_a_gpu():
    sizes = contest.Sizes(1, 64, 2, 16, 16, 12, 1e-3)
    source = contest.text()
    runs = {a: contest.train(a, 0, source, sizes) for a in contest.ARMS if contest.runs_here(a)}
    for run in runs.values():
        assert run.memory > 0 and run.valid == pytest.approx(runs["fp32"].valid, abs=0.1)
    assert machine.has_gpu()

import functools
import inspect
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from meter_programs import PROGRAMS, prepare
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from course_lib import meter
from course_lib.meter import operators


def counted(name):
    fn = prepare(PROGRAMS[name])
    with meter.count() as c:
        fn()
    return c


def facts(c):
    return c.ops, c.read, c.written, c.flops, c.other_flops, c.syncs


@pytest.mark.parametrize("name", PROGRAMS)
def test_counts_by_hand(name):
    p = PROGRAMS[name]
    c = counted(name)
    assert facts(c) == (p.ops, p.read, p.written, p.flops, p.other, p.syncs), "\n" + c.table()
    assert c.bytes == p.read + p.written


def test_counts_are_the_same_on_one_thread_and_two_and_every_time():
    before = torch.get_num_threads()
    try:
        runs = []
        for threads in (1, 2, 1, 2):
            torch.set_num_threads(threads)
            runs.append([(facts(c), c.by_op) for c in map(counted, PROGRAMS)])
    finally:
        torch.set_num_threads(before)
    assert runs[0] == runs[1] == runs[2] == runs[3]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_forward_pass_costs_the_same_without_gradients(mode):
    for name, p in PROGRAMS.items():
        if not p.grad:
            with mode():
                assert facts(counted(name)) == facts(counted(name))
                got = counted(name)
            assert facts(got)[:3] == (p.ops, p.read, p.written), f"{name}\n{got.table()}"


@pytest.mark.parametrize("name", [n for n, p in PROGRAMS.items() if p.flops and n != "vectors"])
def test_flops_are_what_torchs_flop_counter_says(name):
    fn = prepare(PROGRAMS[name])
    with FlopCounterMode(display=False) as theirs:
        fn()
    assert counted(name).flops == theirs.get_total_flops() == PROGRAMS[name].flops


def test_flops_of_convolutions_of_many_shapes():
    g = torch.Generator().manual_seed(3)

    def some(low, high):
        return int(torch.randint(low, high, (), generator=g))

    for transposed in (False, True):
        for _ in range(6):
            conv = nn.ConvTranspose2d if transposed else nn.Conv2d
            net = conv(
                some(1, 5), some(1, 6), (some(1, 4), some(1, 3)), stride=some(1, 3), padding=some(0, 2)
            )
            x = torch.randn(some(1, 4), net.in_channels, 9, 11, requires_grad=True)
            with FlopCounterMode(display=False) as theirs, meter.count() as c:
                net(x).sum().backward()
            assert c.flops == theirs.get_total_flops() > 0


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_flops_of_grouped_convolutions(groups):
    net, x = nn.Conv2d(8, 12, (3, 2), groups=groups), torch.randn(2, 8, 9, 9, requires_grad=True)
    with meter.count() as c:
        out = net(x)
    forward = 2 * out.numel() * 3 * 2 * (8 // groups)
    with FlopCounterMode(display=False) as theirs, meter.count() as back:
        out.sum().backward()
    assert (c.flops, back.flops) == (forward, 2 * forward)
    assert theirs.get_total_flops() == (1 + groups) * forward  # torch counts the weight's gradient too often


def scaled_mm():
    a, b = torch.randn(32, 64).to(torch.float8_e4m3fn), torch.randn(48, 64).to(torch.float8_e4m3fn)
    return torch._scaled_mm(a, b.t(), torch.ones(()), torch.ones(()), out_dtype=torch.float32)


UNLISTED = {  # (contractions, estimates); None where they are not known
    "scaled_mm": (scaled_mm, (2 * 32 * 48 * 64, 0)),
    "fft": (lambda: torch.fft.fft(torch.ones(8)), (None, None)),
    "lstm": (lambda: nn.LSTM(5, 3)(torch.ones(4, 5)), (None, None)),
    "cdist": (lambda: torch.cdist(torch.ones(4, 4), torch.ones(3, 4)), (None, None)),
    "sparse": (lambda: torch.ones(4, 5).to_sparse() @ torch.ones(5, 4), (None, None)),
    "batch norm": (lambda: F.batch_norm(torch.ones(4, 3), None, None, training=True), (0, 3 * 4 + 2 * 3)),
    "point-wise": (lambda: torch.special.bessel_j0(torch.ones(8)), (0, 8)),
}


@pytest.mark.parametrize("name", UNLISTED)
def test_unknown_flops_are_never_zero(name):
    fn, want = UNLISTED[name]
    with meter.count(portable=False) as c:
        fn()
    assert (c.flops, c.other_flops) == want, c.table()
    assert (want[0] is None) == bool(c.unknown) == ("not known" in str(c))
    assert all(n.flops is None for op, n in c.by_op.items() if op in c.unknown)


def test_a_whole_training_step_adds_up_to_its_parts():
    net = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 4))
    x, labels = torch.randn(5, 7), torch.arange(5) % 4
    optimizer = torch.optim.SGD(net.parameters(), 0.1, foreach=False)

    def forward():
        return F.cross_entropy(net(x), labels)

    def step():
        forward().backward()
        optimizer.step()
        optimizer.zero_grad()

    whole, first = meter.of(step), meter.of(forward)
    assert first.ops == 5  # linear, tanh, linear, log_softmax, nll_loss
    # a one; nll_loss, log_softmax, two products and a sum, tanh, one product and a sum; four parameters
    assert whole.ops == 5 + 1 + (1 + 1 + 3 + 1 + 2) + 4
    assert whole.flops == 3 * first.flops - 2 * 5 * 7 * 9  # backward is twice forward; x needs no gradient
    updated = sum(p.numel() for p in net.parameters())
    assert whole.by_op["add_"] == (4, 3 * 4 * updated, updated)


def test_first_calls_are_warmed_up():
    p = nn.Parameter(torch.ones(50))
    optimizer = torch.optim.AdamW([p], foreach=False)

    def step():
        (p * 2).sum().backward()
        optimizer.step()

    first, settled = meter.of(step, warmup=0), meter.of(step)
    assert facts(first) != facts(settled) == facts(meter.of(step))
    assert (
        first.syncs == settled.syncs == 0
    )  # reading the step counter, which is on the CPU, waits for nothing


def test_optimizers_of_one_number():
    p = nn.Parameter(torch.tensor(2.0))
    optimizer = torch.optim.Adam([p], foreach=False)
    p.grad = torch.tensor(1.0)
    assert (
        meter.of(optimizer.step).ops == 7
    )  # AdamW's eight without the decay: the parameter is no step counter


# Syncs. Each snippet is one line, so that the line of each sync is known.


def snippets(device="cpu"):
    x, index = torch.randn(4, 5, device=device), torch.tensor([2, 1, 0, 2], device=device)
    mask, where = torch.arange(20, device=device).view(4, 5) % 3 == 0, {"x": 1}
    waits = {
        "item": lambda: x.sum().item(),
        "float": lambda: float(x[0, 0]),
        "int": lambda: int(index[0]),
        "if": lambda: 1 if x.sum() > 0 else 2,
        "in": lambda: 3 in index,
        "max of two": lambda: max(x[0, 0], x[0, 1]),
        "index by a tensor": lambda: x[index[1]],
        "format of a number": lambda: f"{x.sum():.2f}",
        "nonzero": lambda: x.nonzero(),
        "where of one": lambda: torch.where(mask),
        "mask": lambda: x[mask],
        "put through a mask": lambda: x.clone().__setitem__(mask, x[0, :1].expand(7)),
        "put a tensor through a mask": lambda: x.clone().__setitem__(mask, x[0, 0]),
        "masked_select": lambda: x.masked_select(mask),
        "repeat_interleave": lambda: x.repeat_interleave(index, 0),
    }
    unseen = {  # no operator is dispatched for these on the CPU
        "tolist": lambda: x.tolist(),
        "numpy": lambda: x.numpy(),
        "asarray": lambda: np.asarray(x),
        "cpu": lambda: x.cpu(),
        "to cpu": lambda: x.to("cpu"),
        "to cpu by name": lambda: x.to(device="cpu", dtype=torch.float64),
        "repr": lambda: repr(x),
        "str": lambda: str(x[0, 0]),
        "format": lambda: f"{x}",
    }
    free = {
        "add": lambda: x + 1,
        "shape": lambda: x.shape[0] * len(x) * x.numel(),
        "number through a mask": lambda: x.clone().__setitem__(mask, 1.0),
        "masked_fill": lambda: x.masked_fill(mask, 0.0),
        "where": lambda: torch.where(mask, x, 0.0),
        "integer index": lambda: x[index],
        "repeat_interleave of known size": lambda: x.repeat_interleave(index, 0, output_size=5),
        "a dict": lambda: "x" in where,
        "rows": lambda: [row + 1 for row in x],
        "to its own device": lambda: x.to(x.device),
        "to cpu later": lambda: x.to("cpu", non_blocking=True),
        "dtype": lambda: x.to(torch.float64),
    }
    return waits, unseen, free


def test_syncs():
    waits, unseen, free = snippets()
    for name, fn in {**waits, **unseen}.items():
        with meter.count() as c:
            fn()
        here = fn.__code__.co_firstlineno
        assert (c.syncs, c.where) == (1, [f"test_meter.py:{here}"]), name
        assert c.code[0].endswith(inspect.getsource(fn).strip()), name
    for name, fn in unseen.items():
        with meter.count() as c:
            fn()
        assert c.ops == 0, name
    for name, fn in free.items():
        with meter.count() as c:
            fn()
        assert (c.syncs, c.where) == (0, []), name


def test_fake_cuda_tensors_agree_about_syncs():
    # An oracle that needs no GPU: on fake "cuda" tensors whatever depends on their values raises.
    from torch._subclasses import fake_tensor

    def raises(fn):
        try:
            fn()
        except (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException):
            return True
        return False

    with fake_tensor.FakeTensorMode():
        waits, _, free = snippets("cuda")
        del waits["format of a number"]  # fake tensors can't be formatted
        for name in ("put through a mask", "put a tensor through a mask"):
            del waits[name]  # the result's shape is known, so that the fake tensor need not wait
        assert {name: raises(fn) for name, fn in waits.items()} == dict.fromkeys(waits, True)
        assert {name: raises(fn) for name, fn in free.items()} == dict.fromkeys(free, False)


@pytest.mark.parametrize("backward", ["method", "backward", "grad"])
def test_syncs_within_a_backward_pass(backward):
    class Peeks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            grad.tolist()
            return grad * 1

    x = torch.randn(3, requires_grad=True)
    x.register_hook(lambda grad: [grad.sum().item(), grad.cpu()][2:] or None)
    with meter.count() as c:
        loss = Peeks.apply(x).sum()
        if backward == "method":
            loss.backward()
        elif backward == "backward":
            torch.autograd.backward(loss)
        else:
            torch.autograd.grad(loss, x)
    assert c.syncs == 3
    assert len(set(c.where)) == 2


def test_where_names_the_cell_in_a_notebook():
    code = compile("x.item()\n\nx.tolist()", "/tmp/ipykernel_123/456.py", "exec")
    with meter.count() as c:
        exec(code, {"x": torch.ones(())})
    assert c.where == ["cell:1", "cell:3"]


# What is refused.


REFUSED = {
    "rms_norm": (lambda x: F.rms_norm(x, (5,)), "rsqrt"),
    "RMSNorm": (lambda x: nn.RMSNorm(5)(x), "rms_norm"),
    "one_hot": (lambda x: F.one_hot(torch.tensor([1, 0]), 3), "torch.arange"),
    "dropout": (lambda x: F.dropout(x), "torch.rand"),
    "batch norm": (lambda x: F.batch_norm(x, None, None, training=True), "layer norm"),
    "fused attention": (lambda x: F.scaled_dot_product_attention(*[x.view(1, 1, 4, 5)] * 3), "softmax"),
    "equal": (lambda x: torch.equal(x, x), "(a == b).all()"),
    "allclose": (lambda x: torch.allclose(x, x), "isclose"),
    "foreach": (lambda x: torch._foreach_add([x], 1.0), "foreach=False"),
    "clip_grad_norm_": (lambda x: nn.utils.clip_grad_norm_([with_grad(x)], 1.0), "foreach=False"),
    "default SGD": (lambda x: torch.optim.SGD([with_grad(x)], 0.1).step(), "foreach=False"),
    "default AdamW": (lambda x: torch.optim.AdamW([with_grad(x)]).step(), "foreach=False"),
    "fused AdamW": (lambda x: torch.optim.AdamW([with_grad(x)], fused=True).step(), "foreach=False"),
    "lstm": (lambda x: nn.LSTM(5, 3)(x), "cell"),
    "softmax that casts": (lambda x: x.bfloat16().softmax(-1, dtype=torch.float32), "x.float()"),
    "sparse": (lambda x: x.to_sparse() * 2, "portable=False"),
    "autocast": (lambda x: autocast_add(x), "x.to(torch.bfloat16)"),
    "an operator nobody thought of": (lambda x: torch.special.bessel_j0(x), "portable=False"),
}


def with_grad(x):
    p = nn.Parameter(x.clone())
    p.grad = x.clone()
    return p


def autocast_add(x):
    with torch.autocast("cpu", torch.bfloat16):
        return x @ x.t()


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name_with_what_to_use(name):
    fn, instead = REFUSED[name]
    x = torch.randn(4, 5)
    with pytest.raises(meter.NotPortable) as e, meter.count():
        fn(x)
    said = str(e.value)
    assert instead in said and "portable=False" in said and "test_meter.py:" in said
    assert len(said.splitlines()) == 1
    assert e.value._render_traceback_() == [said]
    with meter.count(portable=False) as c:
        fn(x)
    assert c.bytes is None
    assert c.ops > 0 or name in ("equal", "allclose")
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def test_refused_in_a_backward_pass():
    image, at = torch.randn(1, 1, 3, 3, requires_grad=True), torch.zeros(1, 2, 2, 2)
    out = F.grid_sample(image, at, align_corners=False).sum()
    with pytest.raises(meter.NotPortable, match="grid_sampler_2d_backward"), meter.count():
        out.backward()


def test_written_out_attention_of_torch_is_portable():
    q = torch.randn(2, 3, 4, 5, requires_grad=True)
    with sdpa_kernel(SDPBackend.MATH), meter.count() as c, FlopCounterMode(display=False) as theirs:
        F.scaled_dot_product_attention(q, q, q).sum().backward()
    assert c.flops == theirs.get_total_flops() == 3 * 2 * 2 * (2 * 3 * 4 * 4 * 5)


def test_fused_attention_has_its_flops_where_all_is_accepted():
    q, k = torch.randn(2, 3, 4, 16, requires_grad=True), torch.randn(2, 3, 7, 16, requires_grad=True)
    with meter.count(portable=False) as c:
        out = F.scaled_dot_product_attention(q, k, k)
    assert c.flops == 2 * 2 * (2 * 3 * 4 * 7 * 16)
    assert c.bytes is c.read is c.written is None
    with meter.count(portable=False) as c:
        out.backward(torch.ones_like(out))
    assert c.flops == 5 * 2 * (2 * 3 * 4 * 7 * 16)  # recomputes the scores
    assert "–" in c.table() and "bytes not counted" in str(c)


def test_compiled_functions_are_refused():
    def double(x):
        return x * 2

    class Wraps:
        def __init__(self):
            self.run = torch.compile(double, backend="eager")

    x, net = torch.ones(3), nn.Linear(3, 3)
    in_place = nn.Linear(3, 3)
    in_place.compile(backend="eager")
    compiled = [
        torch.compile(double, backend="eager"),
        torch.compile(net, backend="eager"),
        torch.compile(net, backend="eager").forward,
        nn.Sequential(nn.ReLU(), torch.compile(net, backend="eager")),
        in_place,
        functools.partial(torch.compile(torch.add, backend="eager"), x),
    ]
    for fn in compiled:
        with pytest.raises(meter.NotPortable, match="compiled"):
            meter.of(fn, x)
    for fn in [*compiled, lambda x: Wraps().run(x)]:
        fn(x)  # compiled by now: still seen
        with pytest.raises(meter.NotPortable, match=r"before torch\.compile"), meter.count():
            fn(x)
    assert meter.of(double, x).ops == 1  # dynamo is loaded now, and what is not compiled still counts
    assert meter.of(net, x).ops == 1


def test_an_exception_leaves_nothing_behind():
    with pytest.raises(ZeroDivisionError), meter.count() as c:
        torch.ones(3).add_(1)
        1 / 0  # noqa: B018
    assert c.ops == 2
    torch.ones(3).tolist()
    torch.optim.SGD([with_grad(torch.ones(3))], 0.1).step()
    assert c.ops == 2 and c.syncs == 0


def test_nested_counts():
    x = torch.ones(3)
    with meter.count() as outer:
        x.add(1)
        with meter.count() as inner:
            x.mul(2).tolist()
        x.sub(1)
    assert (inner.ops, inner.syncs) == (1, 1)
    assert (outer.ops, outer.syncs) == (3, 1)
    assert outer.where == inner.where


def test_of_warms_up():
    calls = []
    meter.of(lambda *a, **k: calls.append((a, k)), 1, warmup=3, two=2)
    assert calls == [((1,), {"two": 2})] * 4


def test_classes_and_table():
    x, w = torch.randn(6, 7), torch.randn(7, 3)
    c = meter.of(lambda: (x @ w).softmax(-1).add_(1).sum().item())
    classes = c.by_class()
    assert list(classes) == ["contraction", "normalisation", "elementwise"]
    assert classes["contraction"] == (1, 4 * (42 + 21 + 18), 2 * 6 * 7 * 3)
    assert classes["normalisation"] == (2, 4 * (18 + 18 + 18 + 1), 5 * 18 + 18)
    assert classes["elementwise"] == (1, 4 * 36, 18)
    assert sum(k.flops for k in classes.values()) == c.flops + c.other_flops
    assert sum(k.bytes for k in classes.values()) == c.bytes
    assert [operators.op_class(n) for n in ("addmm", "add_", "_softmax", "fft")] == [
        "contraction", "elementwise", "normalisation", "other"]  # fmt: skip
    table = c.table().splitlines()
    assert table[0].split() == ["operator", "ops", "bytes", "FLOPs"]
    assert table[1].split() == ["mm", "1", "324", "252"]
    assert table[-2].split() == ["total", "4", "688", "378"]
    assert table[-1].startswith("1 sync: test_meter.py:")
    assert str(c) == "4 operators, 688 bytes, 252 FLOPs, 1 sync"


def test_inputs_that_share_memory():
    x = torch.randn(6, 6)
    assert operators.region(x) == operators.region(x.t()) == operators.region(x.view(-1))
    assert operators.region(x[:3])[0] != operators.region(x[3:])[0]
    assert operators.region(x.expand(4, 6, 6)) == operators.region(x)
    assert operators.region(x[:, ::2])[1] == 4 * 18
    assert operators.region(torch.empty(0, 3)) == (None, 0)


def test_recomputation_is_counted():
    w = torch.randn(5, 5, requires_grad=True)
    x = torch.randn(4, 5)

    def block(x):
        return torch.tanh(x @ w)

    kept = meter.of(lambda: block(x).sum().backward())
    again = meter.of(lambda: checkpoint(block, x, use_reentrant=False).sum().backward())
    assert again.flops == kept.flops + 2 * 4 * 5 * 5
    assert again.by_op["tanh"].ops == 2 * kept.by_op["tanh"].ops


def test_other_threads_are_not_counted():
    import threading

    x = torch.ones(3)
    with meter.count() as c:
        thread = threading.Thread(target=lambda: torch.optim.SGD([with_grad(x)], 0.1).step())
        thread.start()
        thread.join()
    assert c.ops == 0


def test_importing_the_ground_floor_costs_little():
    code = (
        "import sys, time, torch\n"
        "start = time.perf_counter()\n"
        "import course_lib.machine, course_lib.meter, course_lib.checking\n"
        "print(time.perf_counter() - start)\n"
        "print(*sorted({m.split('.')[0] for m in sys.modules}))\n"
    )
    took = []
    for _ in range(3):
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        seconds, modules = run.stdout.splitlines()
        took.append(float(seconds))
        assert not {"fastai", "triton", "matplotlib", "sklearn"} & set(modules.split())
    assert min(took) < 0.2

"What the kernels can't do is told in one sentence: what was given, what is taken, what to do."

import importlib.util

import pytest
import torch

from course_lib import kernels  # before Triton, which asks only once whether to interpret

pytest.importorskip("triton")

from course_lib.kernels import access, add, launch, matmul, rmsnorm, softmax, tune, xent

DEVICE = "cpu" if kernels.interpreted() else "cuda"


def t(*shape, dtype=torch.float32, device=DEVICE):
    return torch.zeros(shape, dtype=dtype, device=device)


def classes(*shape, device=DEVICE):
    return t(*shape, dtype=torch.int64, device=device)


def leaf(*shape):
    return t(*shape).requires_grad_()


def far(rows, columns):
    "A tensor of that shape without its memory."
    return t(1, 1).expand(rows, columns)


REFUSED = {
    # add
    "add, no tensor": (lambda: add.add(3.0, t(2)), "add takes tensors, and x is a float: torch.tensor"),
    "add, sparse": (lambda: add.add(t(2, 2).to_sparse(), t(2, 2)), "dense tensors, and x is torch.sparse"),
    "add, dtype": (lambda: add.add(t(2), classes(2)), "float32, float16, bfloat16, and y is int64"),
    "add, dtypes": (lambda: add.add(t(2), t(2).half()), "one dtype, and was given float32 and float16"),
    "add, device": (lambda: add.add(t(2), t(2, device="meta")), "runs on the [CG]PU here, and y is on meta"),
    "add, shapes": (lambda: add.add(t(2, 3), t(2, 4)), r"broadcast, and was given \[2, 3\] and \[2, 4\]"),
    "add, gradient": (lambda: add.add(leaf(2), t(2)), "add has no backward, and x requires a gradient"),
    "add, block": (lambda: add.add(t(2), t(2), block=100), "power of two as block, and was given 100: 128"),
    "add, warps": (lambda: add.add(t(2), t(2), warps=0), "power of two as warps, and was given 0"),
    "add, no number": (lambda: add.add(t(2), t(2), block=64.0), "power of two as block, and was given 64.0"),
    "add, negated": (lambda: add.add(torch._neg_view(t(2)), t(2)), "lazily negated view: x.resolve_neg"),
    # softmax
    "softmax, scalar": (lambda: softmax.softmax(t()), "last dimension, and x has none"),
    "softmax, dtype": (lambda: softmax.softmax(t(2, 3).double()), ", and x is float64: convert"),
    "softmax, device": (lambda: softmax.softmax(t(2, device="meta")), "softmax runs on the [CG]PU here"),
    "softmax, long": (lambda: softmax.softmax(far(2, 65537)), "at most 65,536, and was given 65,537: use"),
    "softmax, rows": (lambda: softmax.softmax(t(2, 3), rows=3), "as rows, and was given 3: 4, say"),
    "softmax, warps": (lambda: softmax.softmax(t(2, 3), warps=3), "power of two as warps, and was given 3"),
    "softmax, stages": (lambda: softmax.softmax(t(2, 3), stages=0), "at least 1 as stages, and was given 0"),
    "softmax, programs": (lambda: softmax.softmax(t(2, 3), programs=-1), "programs, and was given -1"),
    "softmax, evict": (lambda: softmax.softmax(t(2, 3), evict="all"), "evict is one of both, .* 'all'"),
    "softmax, gradient": (lambda: softmax.softmax(leaf(2, 3)), "softmax has no backward"),
    "passes, scalar": (lambda: softmax.three_passes(t()), "last dimension, and x has none"),
    "passes, block": (lambda: softmax.three_passes(t(2, 3), block=3), "power of two as block"),
    # RMSNorm
    "rmsnorm, weight": (lambda: rmsnorm.rmsnorm(t(2, 3), t(2)), r"x \[2, 3\] and weight \[2\]"),
    "rmsnorm, scalar": (lambda: rmsnorm.rmsnorm(t(), t(1)), r"x \[\] and weight \[1\]"),
    "rmsnorm, dtype": (lambda: rmsnorm.rmsnorm(t(2, 3), t(3).double()), "and weight is float64"),
    "rmsnorm, device": (lambda: rmsnorm.rmsnorm(t(2, 3), t(3, device="meta")), "and weight is on meta"),
    "rmsnorm, long": (lambda: rmsnorm.rmsnorm(far(2, 16385), t(16385)), "16,384, and was given 16,385"),
    "rmsnorm, eps": (lambda: rmsnorm.rmsnorm(t(2, 3), t(3), -1e-6), "eps of 0 or more, and was given -1e-06"),
    "rmsnorm, nan": (lambda: rmsnorm.rmsnorm(t(2, 3), t(3), float("nan")), "eps of 0 or more"),
    "rmsnorm, rows": (lambda: rmsnorm.forward(t(2, 3), t(3), rows=6), "power of two as rows"),
    "rmsnorm, programs": (lambda: rmsnorm.forward(t(2, 3), t(3), programs=-2), "programs, and was given -2"),
    "backward, shape": (lambda: rmsnorm.backward(t(3, 2), t(2, 3), t(3), t(2)), r"\[2, 3\], .* \[3, 2\]"),
    "backward, weight": (lambda: rmsnorm.backward(t(2, 3), t(2, 3), t(2), t(2)), r"weight \[2\]"),
    "backward, rstd": (lambda: rmsnorm.backward(t(2, 3), t(2, 3), t(3), t(3)), r"\[2\], and was given \[3\]"),
    "backward, long": (lambda: rmsnorm.backward(far(1, 16385), far(1, 16385), t(16385), t(1)), "16,384"),
    "backward, programs": (lambda: rmsnorm.backward(t(2, 3), t(2, 3), t(3), t(2), programs=0), "as programs"),
    # matmul
    "matmul, vector": (lambda: matmul.matmul(t(3), t(3, 2)), r"2 dimensions, and a has shape \[3\]"),
    "matmul, shapes": (lambda: matmul.matmul(t(2, 3), t(4, 3)), r"was given \[2, 3\] and \[4, 3\]"),
    "matmul, dtype": (lambda: matmul.matmul(t(2, 3), classes(3, 2)), "matmul takes .*, and b is int64"),
    "matmul, dtypes": (lambda: matmul.matmul(t(2, 3), t(3, 2).half()), "float32 and float16: convert"),
    "matmul, device": (lambda: matmul.matmul(t(2, 3, device="meta"), t(3, 2)), "and a is on meta"),
    "matmul, block": (lambda: matmul.matmul(t(2, 3), t(3, 2), bm=48), "power of two as bm, and was given 48"),
    "matmul, small": (lambda: matmul.matmul(t(2, 3), t(3, 2), bk=8), "at least 16 as bk, and was given 8"),
    "matmul, split": (lambda: matmul.matmul(t(2, 3), t(3, 2), split=0), "at least 1 as split"),
    "matmul, setting": (lambda: matmul.matmul(t(2, 3), t(3, 2), bz=16), "no setting 'bz'"),
    "matmul, precision": (lambda: matmul.matmul(t(2, 3), t(3, 2), precision="fast"), "'ieee' or 'tf32'"),
    "matmul, gradient": (lambda: matmul.matmul(leaf(2, 3), t(3, 2)), "no backward, and a requires"),
    "in_rows, block": (lambda: matmul.in_rows(t(2, 3), t(3, 2), block=(16, 24, 16)), "as bn, and .* 24"),
    "in_rows, small": (lambda: matmul.in_rows(t(2, 3), t(3, 2), block=[16, 16, 4]), "16 as bk, and was"),
    "in_rows, blocks": (lambda: matmul.in_rows(t(2, 3), t(3, 2), block=64), "three sizes as block"),
    "in_rows, group": (lambda: matmul.in_rows(t(2, 3), t(3, 2), group=0), "at least 1 as group"),
    # cross-entropy
    "loss, shape": (lambda: xent.cross_entropy(t(2, 3), classes(3)), r"logits \[2, 3\] and target \[3\]"),
    "loss, dims": (lambda: xent.cross_entropy(t(2, 3, 4), classes(2)), "2 dimensions, and logits has shape"),
    "loss, dtype": (lambda: xent.cross_entropy(t(2, 3), t(2)), "int64, int32, and target is float32"),
    "loss, device": (lambda: xent.cross_entropy(t(2, 3), classes(2, device="meta")), "and target is on meta"),
    "loss, classes": (lambda: xent.cross_entropy(t(2, 0), classes(2)), "at least one class"),
    "loss, reduction": (lambda: xent.cross_entropy(t(2, 3), classes(2), reduction="max"), "given 'max'"),
    "loss, block": (lambda: xent.cross_entropy(t(2, 3), classes(2), block=5), "power of two as block"),
    "loss, leaf": (lambda: xent.cross_entropy(leaf(2, 3), classes(2)), "a leaf whose gradient you want"),
    "loss, expanded": (
        lambda: xent.cross_entropy(leaf(1, 3).expand(2, 3), classes(2)),
        "rows share memory: pass inplace=False",
    ),
    "loss, long": (
        lambda: launch.at_most("cross_entropy", "rows", 2**31, launch.MOST_PROGRAMS, "split the batch"),
        "at most 2,147,483,647, and was given 2,147,483,648: split the batch",
    ),
    # a search
    "nothing ran": (
        lambda: tune.Map({}, [tune.Trial({}, None, "out of resources")]).best,
        "none of 1 configurations ran; the first said: out of resources",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_is_one_sentence(name):
    call, sentence = REFUSED[name]
    with pytest.raises(kernels.KernelError, match=sentence) as e:
        call()
    said = str(e.value)
    assert "\n" not in said and not said.endswith(".") and len(said) < 250


def test_without_triton_it_is_one_sentence(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    said = r"^Triton isn't installed here .* run this lesson on such"
    with pytest.raises(kernels.KernelError, match=said), access.watch():
        pass


def test_devices_that_differ():
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU at most")
    with pytest.raises(kernels.KernelError, match="one device, and they are on cuda:0 and cuda:1"):
        add.add(t(2, device="cuda:0"), t(2, device="cuda:1"))


def test_gradients_are_not_asked_of_what_has_none_under_no_grad():
    with torch.no_grad():
        assert softmax.softmax(leaf(2, 3)).shape == (2, 3)

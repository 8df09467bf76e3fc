"Lesson triton beside its checks: sentences for odd answers, its counting and its figures."

import pytest
import torch

from course_lib import checking as core
from course_lib import kernels, show
from course_lib import triton as lesson
from course_lib.triton import check, figures

pytest.importorskip("triton")


def said(judge, *answer):
    with pytest.raises(core.Wrong) as e:
        judge(*answer)
    return str(e.value)


@pytest.mark.parametrize("number", [f"triton.{i}" for i in (1, 2, 3, 5, 7)])
def test_a_kernel_without_an_answer_is_not_solved_yet(number, answers):
    fn = answers.KERNELS[number].fn
    names = ", ".join(
        f"{n}: tl.constexpr" if n.startswith("BLOCK") else n
        for n in fn.__code__.co_varnames[: fn.__code__.co_argcount]
    )
    stub = answers.made(
        f"@triton.jit\ndef {fn.__name__}({names}):\n    raise NotImplementedError\n", fn.__name__
    )
    assert "not solved yet" in said(core.exercises(check)[number], stub)


def test_what_is_no_kernel_gets_a_sentence(answers):
    assert "put @triton.jit above it" in said(check.add, lambda *args: None)
    assert "expected the 5 arguments of the lesson" in said(check.add, answers.REFERENCE["triton.2"])
    kernel, _ = answers.REFERENCE["triton.4"]
    assert "expected a class from torch.autograd.Function" in said(check.rmsnorm_backward, kernel, kernel)


def test_a_mistake_in_a_kernel_is_told_without_the_interpreters_wrapping(answers):
    broken = answers.changed("triton.1", ("mask = at < n", "mask = at < m"))
    assert "add_kernel raised NameError: name 'm' is not defined on " in said(check.add, broken)


def test_an_argument_that_no_load_reads_is_named(answers):
    there = "tl.load(a_at, mask=(m[:, None] < M) & (k[None, :] < K - start), other=0.0)"
    lazy = answers.changed("triton.5", (there, "tl.full((BLOCK_M, BLOCK_K), 1.0, a_ptr.dtype.element_ty)"))
    assert "a_ptr is never loaded by tl.load" in said(check.matmul, lazy)


def test_no_triton_is_one_sentence(answers, monkeypatch):
    def missing():
        raise kernels.KernelError("Triton isn't installed here")

    monkeypatch.setattr(kernels, "require", missing)
    refused = said(check.softmax, answers.REFERENCE["triton.2"])
    assert refused == "triton.2 not passed: Triton isn't installed here"


@pytest.mark.parametrize("n, block, programs", [(1, 4, 1), (19, 8, 3), (32, 8, 4), (33, 32, 2)])
def test_the_places_of_a_launch(n, block, programs, answers):
    from course_lib.kernels.watch import watch

    data, (x, y, out) = lesson.places(n, block), torch.randn(3, n)
    with watch() as w:
        answers.REFERENCE["triton.1"][(programs,)](x, y, out, n, BLOCK=block)
    assert data["programs"] == w.launches[0].programs == programs
    assert w.loads["x_ptr"].masked == round(data["idle"] * programs * block)


def test_figures_draw(answers):
    import matplotlib.pyplot as plt

    show.style()
    grouped = answers.REFERENCE["triton.6"]
    orders = {str(g): [grouped(pid, 4, 4, g) for pid in range(16)] for g in (1, 2)}
    drawn = [
        figures.draw_shares(lesson.shares_of_copy(4.0, 1.0)),
        figures.draw_bars({"eager": (1.3, 1.2, 1.4), "yours": (4.0, 3.9, 4.1)}, roof=4.2, title="softmax"),
        figures.view_places(lesson.places()),
        figures.draw_orders(orders, wave=4),
    ]
    for fig in drawn:
        fig.canvas.draw()
        plt.close(fig)


def test_the_kernel_in_what_inductor_wrote():
    code = "x = 1\nk = async_compile.triton('triton_red_0', '''\nimport triton\n@triton.jit\n"
    code += "def triton_red_0(in_ptr0, n):\n    tl.load(in_ptr0)\n''', device_str='cuda')\ncall()\n"
    assert lesson.kernel_in(code) == "def triton_red_0(in_ptr0, n):\n    tl.load(in_ptr0)"
    assert lesson.kernel_in("no kernel") == "no kernel"


@pytest.mark.gpu
def test_the_answers_are_right_on_a_gpu():
    from course_lib.triton import solutions as s

    def near(got, want, rtol, atol=1e-3):
        torch.testing.assert_close(got.double(), want.double(), rtol=rtol, atol=atol)

    x, y = torch.randn(2, 1000, device="cuda")
    near(s.run_add(x, y), x + y, 1e-6)
    x, w, dy = (
        torch.randn(*shape, device="cuda").bfloat16().requires_grad_()
        for shape in ((37, 701), (701,), (37, 701))
    )
    near(s.run_softmax(x), torch.softmax(x.double(), -1), 5e-3)
    wide = [t.detach().double().requires_grad_() for t in (x, w)]
    want = torch.nn.functional.rms_norm(wide[0], (701,), wide[1], 1e-6)
    y = s.RMSNorm.apply(x, w, 1e-6)
    near(y, want, 5e-3)
    for got, true in zip(
        torch.autograd.grad(y, (x, w), dy), torch.autograd.grad(want, wide, dy.double()), strict=True
    ):
        near(got, true, 1e-2, atol=2e-2)
    a, b = (torch.randn(*shape, device="cuda") for shape in ((100, 150), (150, 70)))
    near(s.run_matmul(a, b, BLOCK_M=32, BLOCK_N=32, BLOCK_K=32), a.double() @ b.double(), 1e-4)
    logits, target = 3 * torch.randn(20, 3001, device="cuda"), torch.randint(3001, (20,), device="cuda")
    target[3] = -100
    leaf = logits.double().requires_grad_()
    want = torch.nn.functional.cross_entropy(leaf, target)
    near(s.run_xent(logits, target).sum() / 19, want, 1e-5)
    near(logits, torch.autograd.grad(want, leaf)[0], 1e-4, atol=1e-7)

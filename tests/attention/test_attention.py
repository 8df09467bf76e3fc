"Lesson attention beside its checks: contraction, blocks, molecules, fallbacks, figures, the course's kernel."

import pytest
import torch

from course_lib import attention as lesson
from course_lib import checking as core
from course_lib import show
from course_lib.attention import check, figures

pytest.importorskip("triton")


def said(judge, *answer):
    with pytest.raises(core.Wrong) as e:
        judge(*answer)
    return str(e.value)


@pytest.mark.parametrize("value, nan", [(1e3, False), (1e9, False), (-1e30, True), (3e38 / 2, True)])
def test_contraction_rounds_once(value, nan, answers):
    kernel, s = answers.MUTANTS["attention.5"][0], torch.full((1, 16), value)
    for on in (False, True):
        p = torch.empty_like(s)
        with lesson.contraction(on):
            kernel[(1,)](s, p, 0.1275, BLOCK=16)
        assert bool(p.isnan().any()) == (nan and on)


def test_contraction_is_what_float64_says(answers):
    text = "@triton.jit\ndef fma_kernel(x_ptr, out_ptr, c, BLOCK: tl.constexpr):\n"
    text += "    at = tl.arange(0, BLOCK)\n    x = tl.load(x_ptr + at)\n    tl.store(out_ptr + at, {})\n"
    x = torch.randn(64) * 100
    for how, want in (("x * x - c", lambda x, c: x * x - c), ("c - x * c", lambda x, c: c - x * c),
                      ("x * c + x", lambda x, c: x * c + x),
                      ("tl.fma(x, x, c)", lambda x, c: x * x + c)):  # fmt: skip
        out, kernel = torch.empty(64), answers.made(text.format(how), "fma_kernel")
        with lesson.contraction():
            kernel[(1,)](x, out, 1.1, BLOCK=64)
        c = torch.tensor(1.1).double()
        assert torch.equal(out, want(x.double(), c).float())
        assert not torch.equal(out, want(x, c.float()))


@pytest.mark.parametrize("n, rows, keys", [(320, 64, 32), (100, 32, 16), (70, 16, 32), (64, 64, 64)])
@pytest.mark.parametrize("causal", [True, False])
def test_blocks_are_those_of_the_mask(n, rows, keys, causal):
    seen = torch.zeros(-(-n // rows) * rows, -(-n // keys) * keys, dtype=torch.bool)
    seen[:n, :n] = torch.ones(n, n).tril() > 0 if causal else True
    for i, line in enumerate(lesson.blocks(n, rows, keys, causal)["blocks"]):
        for j, kind in enumerate(line):
            block = seen[i * rows : (i + 1) * rows, j * keys : (j + 1) * keys]
            block = block[: n - i * rows]  # rows beyond the end are never stored
            assert kind == ("free" if block.all() else "edge" if block.any() else "empty")


def test_molecules_are_graphs_of_their_own():
    which, hops = lesson.molecules(300)
    assert torch.equal(hops, hops.T) and (hops.diagonal() == 0).all()
    assert (hops[which[:, None] != which] == 3).all()
    near = (hops == 1) | (hops == 0)
    assert torch.equal((near.float() @ near.float() > 0), hops <= 2)
    sizes = which.bincount()
    assert sizes.sum() == 300 and sizes.max() <= 40 and len(sizes) > 5


def test_a_fallback_is_refused():
    def add(x, n):
        return x + n

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    run = torch.compile(add, backend="eager", dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=2):
        run(torch.ones(2), 1)
        run(torch.ones(2), 2)
        lesson.refuse_fallback("two")
        run(torch.ones(2), 3)
        with pytest.raises(RuntimeError, match=r"three: 1 of 3 compilations .*counters.clear"):
            lesson.refuse_fallback("three")
        torch._dynamo.reset()  # the message's remedy
        torch._dynamo.utils.counters.clear()
        run(torch.ones(2), 3)
        lesson.refuse_fallback("again")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.compile(add, backend="eager", dynamic=False, fullgraph=True)(torch.ones(2), 1)
    with pytest.raises(RuntimeError, match=r"counted no frame.*without fullgraph"):
        lesson.refuse_fallback("whole graphs")


def test_odd_answers_get_a_sentence(answers):
    part = torch.zeros(3, 4), torch.zeros(3)
    want = part[0], torch.full((3,), float("-inf"))
    assert said(check.same, part, want, "here") == "lse, here: expected -inf at [0], got 0"
    must = said(check.masks, lambda w: lambda b, h, i, j: j <= i, *answers.FOUR[1:])
    assert "sees key 0 in your mask, and must not" in must
    assert "expected the 11 arguments of the lesson" in said(check.flash, answers.REFERENCE["attention.5"])
    assert "expected a function of (b, h, q_idx, kv_idx)" in said(check.masks, lambda w: 3, *answers.FOUR[1:])
    python_and = lambda w: lambda b, h, i, j: j <= i and i - j < w  # noqa: E731
    assert "create_mask of sliding(" in said(check.masks, python_and, *answers.FOUR[1:])


def test_figures_draw():
    import matplotlib.pyplot as plt
    from torch.nn.attention.flex_attention import create_block_mask

    show.style()
    p = torch.rand(4, 8)
    p[3] = float("nan")
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 512, 512, device="cpu")
    rates = {n: {"cuDNN": (600, 590, 610), "yours, skipping": (480, 470, 490)} for n in (2048, 4096)}
    drawn = [
        figures.draw_weights({"rounded": p, "not rounded": p}),
        figures.draw_held({name: {256: 1e5, 512: 4e5} for name in ("plain", "yours", "inputs")}),
        figures.view_blocks(lesson.blocks()),
        figures.draw_race(rates),
        figures.draw_powers({9: (3.0, 0), 11: (500.0, 4)}),
        figures.draw_masks({"causal": mask, "again": mask}),
    ]
    for fig in drawn:
        fig.canvas.draw()
        plt.close(fig)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "n, d, causal", [(1, 128, True), (259, 128, True), (384, 64, False), (1000, 64, True)]
)
def test_the_kernels_on_a_gpu(n, d, causal):
    from course_lib.attention import kernels, solutions

    q, k, v = (torch.randn(2, 3, n, d, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    keep = torch.ones(n, n, dtype=torch.bool, device="cuda").tril() if causal else None
    want, want_lse = check.dense(q, k, v, d**-0.5, keep)
    found = {"course": kernels.flash(q, k, v, causal)}
    import triton

    triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8, device="cuda"))
    for kernel in (solutions.flash_kernel, solutions.skipping_kernel):
        out, lse = torch.empty_like(q), torch.empty(2, 3, n, device="cuda")
        kernel[(-(-n // 64), 6)](q, k, v, out, lse, n, d**-0.5, CAUSAL=causal, D=d, BM=64, BN=64)
        found[kernel] = out, lse
    for out, lse in found.values():
        torch.testing.assert_close(out.double(), want, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(lse.double(), want_lse, rtol=1e-3, atol=2e-3)

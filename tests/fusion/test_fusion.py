"Lesson fusion's library: tracing, the kernels of real chains, what it refuses, figures."

import re

import matplotlib
import pytest
import torch
from torch.nn import functional as F

from course_lib import fusion, show
from course_lib.fusion import chains, figures, solutions

matplotlib.use("Agg")
triton = pytest.importorskip("triton")
TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}


def fused(fn):
    return fusion.fuse(fn, solutions.generate)


@pytest.mark.parametrize("n", [7, 4096, 3 * 4096])
@pytest.mark.parametrize("name", chains.CHAINS)
def test_chains_are_as_eager(name, n):
    fn, kinds = chains.CHAINS[name]
    fusion.require_equal({"eager": fn, "fused": fused(fn)}, lambda: chains.inputs(kinds, n, "cpu"))


@pytest.mark.parametrize("dtype", TYPES)
def test_bytes_and_dtypes(dtype):
    gelu, x = fused(chains.gelu), torch.randn(3, 5, dtype=dtype)
    assert gelu(x).dtype == dtype and gelu.bytes == 2 * x.nbytes
    plus = fused(lambda x, row, unused: x + row)
    plus(x, x[0], x)
    assert plus.bytes == 2 * x.nbytes + x[0].nbytes


@pytest.mark.parametrize("name", chains.CHAINS)
def test_chains_become_wide_loads_and_stores(name):
    "Compiled for a GPU that need not be there: 16 bytes at a time, but for one number a row."
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    fn, kinds = chains.CHAINS[name]
    args = chains.inputs(kinds, 3 * chains.COLUMNS, "cpu")
    traced = fusion.trace(fn, *args)
    kernel = fusion.build(solutions.generate(traced.graph, traced.shapes), "cuda")
    dtypes = [a.dtype for a in args] + [args[m].dtype if isinstance(m, int) else m for m in traced.made]
    signature = dict(zip(kernel.arg_names, [TYPES[d] for d in dtypes] + ["i32", "constexpr"], strict=True))
    aligned = {(k,): [["tt.divisibility", 16]] for k in range(len(dtypes) + 1)}
    source = ASTSource(kernel, signature, {(len(dtypes) + 1,): fusion.BLOCK}, aligned)
    options = {"num_warps": fusion.WARPS}
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    moved = set(re.findall(r"(?:ld|st)\.global[.\w:]*", ptx))
    assert {"ld.global.v4.b32", "st.global.v4.b32"} <= moved
    assert len(moved) == 2 + (name == "scale by rows")


def test_the_table_is_as_torch():
    "Each function of the table that takes one tensor, where it is defined."
    x = torch.rand(3, 5) + 0.1
    for op in fusion.TRITON:
        if len(op._schema.arguments) == 1:
            got, want = fused(op)(x), op(x)
            assert torch.allclose(got, want, rtol=1e-5, atol=1e-6), op


REFUSED = {
    "not point-wise": (lambda x: x.softmax(0), "_softmax.default is not point-wise"),
    "a branch": (lambda x: x + 1 if x.sum() > 0 else x, "the value of a tensor"),
    "a value": (lambda x: x * float(x.sum()), "the value of a tensor"),
    "numpy": (lambda x: torch.from_numpy(x.numpy()) + 1, "not point-wise"),
    "a view": (lambda x: x.T + 1, "permute"),
    "another device": (lambda x: x.to("meta") + 1, "another device"),
    "a tensor from outside": (lambda x, y=torch.ones(3): x + y, "trace"),
    "integers": (lambda x: x.long().float(), "int64"),
    "a cast to bool": (lambda x: x.bool(), "bool"),
    "an option": (lambda x: F.gelu(x, approximate="tanh"), "approximate"),
    "random numbers": (lambda x: x + torch.rand_like(x), "rand_like"),
    "another shape": (lambda x: (x + 1, x[0] + 1), "select"),
    "unknown": (lambda x: x**5, "pow.Tensor_Scalar is not in fusion.TRITON"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refuses(what):
    fn, words = REFUSED[what]
    with pytest.raises(fusion.CannotFuse, match=words) as e:
        fused(fn)(torch.ones(4, 3))
    assert "\n" not in str(e.value) and len(str(e.value)) < 250


def test_refuses_arguments():
    x = torch.randn(4, 6)
    for args, words in [
        ((torch.arange(6),), "int64"),  # eager has ceil for integers, Triton hasn't
        ((x.T,), "contiguous"),
        ((x.double(),), "float64"),
        ((3,), "int"),
        ((x.clone().requires_grad_(),), "no_grad"),
        ((x, x[:2].clone()), "trace|row or a column"),
    ]:
        with pytest.raises(fusion.CannotFuse, match=words):
            fused(lambda *a: torch.ceil(sum(a)))(*args)
    with pytest.raises(fusion.CannotFuse, match="32 bits"):
        fusion.trace(lambda x: x + 1, torch.empty(2**31, device="meta"))


def test_changes_in_place_and_returns_what_it_changed():
    x, y = torch.randn(3, 5), torch.randn(3, 5)
    want = x * 2 + y
    step = fused(lambda x, y: x.mul_(2).add_(y))
    assert step(x, y) is x and torch.allclose(x, want)
    with pytest.raises(fusion.CannotFuse, match="shares memory"):
        step(x, x)


def test_numbers_from_outside_are_read_at_each_call():
    x, scale = torch.ones(2, 3), 2.0
    times = fused(lambda x: x * scale)
    first = times(x)
    scale = 5.0
    assert first[0, 0] == 2 and times(x)[0, 0] == 5


def test_an_input_that_comes_back():
    x = torch.randn(2, 3)
    out = fused(lambda x: (x, x + 1))(x)
    assert out[0] is x and torch.equal(out[1], x + 1)


def test_recognised_attention():
    from torch.nn import functional

    assert not fusion.recognised(functional.scaled_dot_product_attention, False)  # nothing to replace
    assert fusion.recognised(lambda q, k, v: torch.softmax(q @ k.mT / 8**0.5, -1) @ v, False)


def test_kernel_text():
    text = "head\n@jit\ndef triton_poi_0(x):\n    pass\n''', device)\n"
    assert fusion.kernel_text(text) == "def triton_poi_0(x):\n    pass"
    assert fusion.kernel_text('x\nextern "C" void kernel()\n{\n    {\n    }\n}\ny').endswith("    }\n}")
    assert fusion.kernel_text("nothing") == "nothing"


def test_figures():
    data = figures.explore_chain()
    assert data["bound"] == "moving bytes" and data["eager"][9] == pytest.approx(10 * data["fused"][9])
    assert figures.explore_chain(ops=128)["bound"] == "arithmetic"
    assert figures.explore_chain(elements=1024)["bound"] == "launching"
    drawn = [
        figures.view_chain(data),
        figures.draw_bars({"a": 1.0, "b": 2.0}, "ms"),
        figures.draw_race({"gelu": {"eager": 1.0, "yours": 2.0}}),
        figures.draw_breaks(["def f(x):", "    y = float(x)", "    return y"], [1]),
        figures.draw_attention({"a": [(64, 1e6, 1e-3), (128, 2e6, 2e-3)]}),
    ]
    for fig in drawn:
        show.axes()[0].canvas.draw()
        fig.canvas.draw()

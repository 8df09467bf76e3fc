"The fuser: what it captures, refuses, launches and moves; aliases, strides and dtypes; its code for a GPU."

import re

import pytest
import torch
from torch.nn import functional as F

from course_lib import fusion, meter
from course_lib.fusion import chain_race as fusion_chains
from course_lib.fusion import codegen as fusion_codegen
from course_lib.fusion.graph import Graph

pytest.importorskip("triton")


def both(fn, *args):
    "What eager and the fuser make of clones of the arguments: (results, arguments) of each."
    found = []
    for f in (fn, fusion.fuse(fn)):
        given = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
        found.append((f(*given), given))
    return found


def agree(fn, *args):
    (want, wanted), (got, given) = both(fn, *args)
    torch.testing.assert_close(got, want, equal_nan=True)
    torch.testing.assert_close(given, wanted, equal_nan=True)


# --- operators ----------------------------------------------------------------------

X = torch.tensor([-float("inf"), -90.0, -3.5, -1.0, -0.2, -1e-4, 0.0, 1e-4, 0.31, 1.0, 2.5, 88.0,
                  float("inf"),
                  float("nan")])  # fmt: skip
FUNCTIONS = {
    "exp": torch.exp,
    "log": torch.log,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "abs": abs,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": F.relu,
    "relu6": F.relu6,
    "neg": torch.neg,
    "square": torch.square,
    "reciprocal": torch.reciprocal,
    "exp2": torch.exp2,
    "log2": torch.log2,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "erf": torch.erf,
    "isnan": torch.isnan,
    "clamp": lambda x: x.clamp(-1, 2),
    "clip": lambda x: torch.clip(x, max=0.5),
    "clamp by tensors": lambda x: torch.clamp(x, x * 0 - 1, x * 0 + 1),
    "hardtanh": F.hardtanh,
    "leaky_relu": F.leaky_relu,
    "gelu": lambda x: F.gelu(x.clamp(-8, 8)),
    "gelu tanh": lambda x: F.gelu(x.clamp(-8, 8), approximate="tanh"),
    "silu": lambda x: F.silu(x.clamp(min=-90)),
    "powers": lambda x: x**2 + x**-1 + x**3,
    "root": lambda x: x.abs() ** 0.5 + abs(x).pow(-0.5),
    "one": lambda x: x**0,
    "where": lambda x: torch.where((x > 0) & ~(x > 1) | (x == -1), x, -1),
    "isnan where": lambda x: x.where(x == x, 0),
    "logical": lambda x: torch.logical_or(torch.logical_not(x), x > 2),
    "compare": lambda x: x <= 0.31,
    "lerp": lambda x: torch.lerp(x.clamp(-9, 9), x.clamp(-1, 1), 0.25),
    "rsub": lambda x: torch.rsub(x, 2),
    "addcdiv": lambda x: torch.addcdiv(x, x, x * x + 1, value=0.5),
    "fills": lambda x: torch.ones_like(x) * 3,
    "casts": lambda x: x.clamp(-9, 9).int().float(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_operators(name):
    x = X[:-1] if name == "casts" else X  # a NaN as a whole number is anything
    agree(FUNCTIONS[name], x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["tanh", "gelu", "sigmoid", "clamp", "leaky_relu"])
def test_other_dtypes(name, dtype):
    agree(FUNCTIONS[name], torch.linspace(-3, 3, 37).to(dtype))


def test_float64_is_not_computed_in_float32():
    x = torch.rand(9, dtype=torch.float64)
    got = fusion.fuse(lambda x: torch.tanh(x * 0.1) + F.gelu(x) / 3)(x)
    torch.testing.assert_close(got, torch.tanh(x * 0.1) + F.gelu(x) / 3, rtol=1e-13, atol=1e-14)


def test_whole_numbers_and_promotion():
    i, b = torch.arange(-4, 5), torch.arange(9) % 2 == 0
    x, h = torch.randn(9), torch.randn(9).bfloat16()
    agree(lambda i: i * 3 - 2, i)
    agree(lambda i: i / 2, i)
    agree(lambda i: torch.exp(i), i)
    agree(lambda i, x: i + x, i, x)
    agree(lambda i: torch.where(i > 0.5, i, 0), i)
    agree(lambda h, x: (h * x, h + 1.5), h, x)
    agree(lambda b, x: (b * x, b.float() + x, ~b), b, x)
    agree(lambda i, b: (i.int() * b, i * i), i, b)
    agree(lambda h, s: h * s, h, torch.tensor(0.3))  # a tensor without dimensions doesn't promote


def test_rounded_to_bfloat16_to_the_nearest():
    x = torch.randn(200)
    assert torch.equal(fusion.fuse(lambda x: x.bfloat16())(x), x.bfloat16())


def test_a_chain_in_half_precision_is_rounded_once():
    x = torch.rand(500).bfloat16()

    def chain(x):
        for _ in range(6):
            x = x * 1.01 + 0.013
        return x

    exact = chain(x.double())
    off = [(f(x).double() - exact).abs().max() for f in (chain, fusion.fuse(chain))]
    assert off[1] < off[0] and off[1] <= 2**-8


def test_numbers_that_are_nearly_equal_stay_apart():
    agree(
        lambda x: (x * 0.0, x * -0.0, 1 / (x * 0.0), 1 / (x * -0.0), x * 1, x * True),
        torch.tensor([1.0, 2.0]),
    )


# --- results, launches, bytes -------------------------------------------------------


def test_several_results_of_one_launch():
    f = fusion.fuse(lambda x, y: [x + y, x * 2, x + y])
    out = f(torch.ones(5), torch.ones(5))
    assert type(out) is list and len(out) == 3 and f.launches == 1
    assert out[0].data_ptr() != out[2].data_ptr()  # eager made two tensors
    assert len(f.graph.nodes) == 2 and f.how == "interpreter"


def test_the_same_value_twice_is_the_same_tensor():
    def f(x):
        y = x + 1
        return y, y

    a, b = fusion.fuse(f)(torch.ones(3))
    assert a is b


def test_results_of_smaller_shapes():
    f = fusion.fuse(lambda x, row, column: (x + row, row * 2, column + 1, row + column))
    args = torch.randn(4, 5), torch.randn(5), torch.randn(4, 1)
    agree(f.fn, *args)
    f(*args)
    assert f.launches == 1 and f.cost(*args) == (1, 4 * 29, 4 * (20 + 5 + 4 + 20))


def test_an_argument_that_comes_back_is_that_argument():
    x, y = torch.ones(3), torch.ones(3)
    f = fusion.fuse(lambda x, y: (y, x.add_(1)))
    a, b = f(x, y)
    assert a is y and b is x and x.tolist() == [2, 2, 2]
    same = fusion.fuse(lambda x: x)
    assert same(x) is x and same.launches == 0 and same.cost(x) == (0, 0, 0)


def test_dead_code_is_not_loaded():
    f = fusion.fuse(lambda x, y, z: (x * 2, y.exp() + z)[0])
    x = torch.ones(4, 3)
    f(x, x + 1, torch.ones(7, 4, 3))
    assert f.cost(x, x + 1, torch.ones(7, 4, 3)) == (1, 48, 48)
    assert "in1" not in f.source and "tl.exp" not in f.source


SINGLE = {
    "add": lambda x, row, col: x + row,
    "with a number": lambda x, row, col: x * 2.0,
    "twice": lambda x, row, col: x * x,
    "outer": lambda x, row, col: row + col,
    "in place": lambda x, row, col: x.mul_(col),
    "where": lambda x, row, col: torch.addcmul(x, row, col),
    "fill": lambda x, row, col: x.zero_(),
    "copy": lambda x, row, col: x.copy_(row),
    "cast": lambda x, row, col: x.bfloat16(),
    "transposed": lambda x, row, col: x.exp(),
}


@pytest.mark.parametrize("name", SINGLE)
def test_one_operator_costs_what_meter_counts(name):
    x = torch.randn(6, 10).t().clone().t() if name == "transposed" else torch.randn(6, 10)
    args = x, torch.randn(10), torch.randn(6, 1)
    f, counted = fusion.fuse(SINGLE[name]), meter.of(SINGLE[name], *args)
    assert f.cost(*args) == (counted.ops, counted.read, counted.written)


def test_a_chain_costs_one_operator_of_the_same_inputs():
    x, row = torch.randn(6, 10), torch.randn(10)

    def chain(x, row):
        y = torch.tanh(x + row) * 2
        return (y - x) / (y * y + 1)

    counted, cost = meter.of(chain, x, row), fusion.fuse(chain).cost(x, row)
    assert counted.ops == 7 and cost == (1, 4 * 70, 4 * 60)
    assert counted.bytes > 5 * cost.bytes


def test_nothing_to_do_for_no_elements():
    f = fusion.fuse(lambda x, y: (x + y, y * 2))
    a, b = f(torch.ones(0, 3), torch.ones(3))
    assert a.shape == (0, 3) and b.tolist() == [2, 2, 2] and f.launches == 1
    f = fusion.fuse(lambda x: x.add_(1) * 2)
    assert f(torch.ones(3, 0)).shape == (3, 0) and f.launches == 0


def test_strides_are_kept():
    x = torch.randn(4, 6).t()
    f = fusion.fuse(lambda x, y: x * y)
    assert f(x, x + 1).stride() == (1, 6) and "//" not in f.source  # laid out alike: one index will do
    got = f(x, torch.randn(6, 4))
    assert got.stride() == (x * torch.randn(6, 4)).stride()
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert f(image, image).is_contiguous(memory_format=torch.channels_last)


def test_dimensions_are_merged():
    f = fusion.fuse(lambda x, y: x * y)
    f(torch.ones(2, 3, 4, 5), torch.ones(4, 5))
    assert re.findall(r"i\d = .*", f.source) == ["i1 = i % 20"]


# --- caching ------------------------------------------------------------------------


def test_one_kernel_for_all_sizes_of_a_kind():
    f = fusion.fuse(lambda x, b: x + b)
    for n in (3, 5, 9):
        f(torch.ones(n, 4), torch.ones(4))
    assert f.kernels == 1 and f.launches == 3
    f(torch.ones(3, 5), torch.ones(5))
    assert f.kernels == 2


def test_a_number_is_a_constant():
    f = fusion.fuse(lambda x, k: x * k)
    x = torch.tensor([2.0])
    assert [f(x, k).item() for k in (3, 3.5, 3, True)] == [6, 7, 6, 2]
    assert f(x, 0.0).item() == 0 and f(x, -0.0).signbit().item()


SCALE = 2.0


def test_numbers_outside_are_looked_at_again():
    global SCALE
    k = 3.0
    f = fusion.fuse(lambda x: x * SCALE * k)
    assert f(torch.ones(1)).item() == 6
    k = 5.0
    assert f(torch.ones(1)).item() == 10
    SCALE = 4.0
    try:
        assert f(torch.ones(1)).item() == 20
    finally:
        SCALE = 2.0


# --- in place, and memory that is shared --------------------------------------------


def test_in_place():
    def step(p, g, m):
        m.mul_(0.9).add_(g, alpha=0.1)
        p -= 0.5 * m
        p.clamp_(-1, 1)
        return m * 2

    agree(step, torch.randn(7), torch.randn(7), torch.randn(7))
    agree(lambda x, y: x.copy_(y), torch.randn(3, 4), torch.randn(4).bfloat16())
    agree(lambda x, y: (x.clone(), x.add_(y), x * 2), torch.randn(3).bfloat16(), torch.randn(3))
    agree(lambda x: F.relu(x, inplace=True), torch.randn(5))


def test_strided_memory_is_changed_where_it_lies():
    base = torch.randn(6, 8)
    want = base.clone()
    want[::2, 1::3] *= 2
    fusion.fuse(lambda x: x.mul_(2))(base[::2, 1::3])
    assert torch.equal(base, want)


def test_the_same_tensor_twice():
    def f(x, y):
        x.add_(1)
        return x * y

    for fn in (f, fusion.fuse(f)):
        x = torch.tensor([1.0, 2.0])
        assert fn(x, x).tolist() == [4, 9] and x.tolist() == [2, 3]
    x = torch.tensor([1.0, 2.0])
    fused = fusion.fuse(f)
    assert fused(x, x.detach()).tolist() == [4, 9] and fused.cost(x, x).read == 8
    # The same function for two tensors is another graph.
    assert fused(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0])).tolist() == [2, 6]


def test_overlapping_memory_is_refused():
    base = torch.arange(12.0)
    shift = fusion.fuse(lambda x, y: x.add_(y))
    for x, y in ((base[1:], base[:-1]), (base.view(3, 4), base[4:8]), (base[::2], base[1::2])):
        before = base.clone()
        with pytest.raises(
            fusion.CannotFuse, match=r"changed in place and shares memory with another argument"
        ):
            shift(x, y)
        assert torch.equal(base, before)
    shift(base[:6], base[6:])
    assert base[0] == 6
    assert fusion.fuse(lambda x, y: x + y)(base[1:], base[:-1]).shape == (11,)  # only read
    with pytest.raises(fusion.CannotFuse, match=r"elements that are the same memory"):
        shift(torch.ones(3, 1).expand(3, 4), torch.ones(4))


def test_a_row_that_is_changed_and_broadcast_is_refused():
    with pytest.raises(fusion.CannotFuse, match=r"shape \[5\] is changed in place and broadcast to \[4, 5\]"):
        fusion.fuse(lambda x, row: x + row.mul_(2))(torch.ones(4, 5), torch.ones(5))
    x, row = torch.ones(4, 5), torch.ones(5)
    fusion.fuse(lambda x, row: x + row.zero_())(x, row)  # not read: no program can see the change
    assert row.sum() == 0


# --- what is refused, in one sentence -----------------------------------------------

OUTER = torch.ones(3)


def branches(x):
    return x if x > 0 else -x


def prints(x):
    print(x)
    return x


CAPTURE = {
    "if": (branches, "`if` or `while` asks"),
    "print": (prints, "`print` asks for the values"),
    "f-string": (lambda x: f"{x}", "`print` asks"),
    "item": (lambda x: x * x.sum().item(), "doesn't know the operator sum"),
    "item of x": (lambda x: x * x.item(), "`item` asks"),
    "float": (lambda x: x * float(x), "`float` asks"),
    "tolist": (lambda x: x.tolist(), "`tolist` asks"),
    "outer": (lambda x: x + OUTER, "shape [3] that is not an argument"),
    "nothing": (lambda x: None, "returned a NoneType"),
    "nested": (lambda x: (x, (x,)), "returned a tuple"),
    "matmul": (lambda x: x @ x, "doesn't know the operator matmul"),
    "softmax": (lambda x: x.softmax(-1), "operator softmax"),
    "cumsum": (lambda x: torch.cumsum(x, 0), "operator cumsum"),
    "dropout": (lambda x: F.dropout(x), "operator dropout"),
    "rand": (lambda x: x + torch.rand_like(x), "operator rand_like"),
    "view": (lambda x: x.view(-1), "views (view)"),
    "index": (lambda x: x[0], "views (x[…])"),
    "T": (lambda x: x.T + 1, "views (T)"),
    "out": (lambda x: torch.exp(x, out=x), "out="),
    "setitem": (lambda x: x.__setitem__(0, 1), "x[…] = …"),
    "power": (lambda x: x**2.5, "x ** 2.5"),
    "power of 2": (lambda x: 2**x, "powers of a tensor by a number only"),
    "floor": (lambda x: x // 2, "operator floordiv"),
    "div rounded": (lambda x: torch.div(x, 2, rounding_mode="floor"), "rounding_mode"),
    "unpack": (lambda x: [*x], "iteration"),
    "int division": (lambda x: x.int().div_(2), "can't hold"),
    "uint8": (lambda x: x.to(torch.uint8), "uint8"),
    "bool sum": (lambda x: (x > 0) + (x > 1), "add of bool tensors"),
    "cuda": (lambda x: x.to("cuda"), "another device"),
    "keyword": (lambda x: torch.nn.functional.gelu(x, approximate="tanh", what=1), ""),
    "double where": (lambda x: torch.where(x, x, x), "bool tensor"),
}


@pytest.mark.parametrize("name", CAPTURE)
def test_refusals(name, capsys):
    fn, text = CAPTURE[name]
    with pytest.raises((fusion.CannotFuse, fusion.CannotCapture) if text else TypeError) as e:
        fusion.fuse(fn)(torch.randn(3) if name != "item of x" else torch.randn(()))
    assert text in str(e.value) and "\n" not in str(e.value)
    assert capsys.readouterr().out == ""


def test_shapes_that_do_not_broadcast():
    f = fusion.fuse(lambda x, y: x * y)
    with pytest.raises(fusion.CannotFuse, match=r"^mul of shapes \[3, 4\] and \[3\]: they don't broadcast$"):
        f(torch.ones(3, 4), torch.ones(3))
    with pytest.raises(fusion.CannotFuse, match=r"add_ would give a tensor of shape \[3, 4\]"):
        fusion.fuse(lambda x, y: x.add_(y))(torch.ones(4), torch.ones(3, 4))
    with pytest.raises(fusion.CannotFuse, match=r"^the results have shapes \[3\] and \[4\]"):
        fusion.fuse(lambda x, y: (x + 1, y + 1))(torch.ones(3), torch.ones(4))


def test_arguments():
    f = fusion.fuse(lambda x, *more: x + 1)
    for args, text in (((), "at least one tensor"), ((3.0,), "at least one tensor"), (("x",), "0 is a str"),
                       ((torch.ones(2), [torch.ones(2)]), "argument 1 is a list"),
                       ((torch.ones(2).to_sparse(),), "sparse")):  # fmt: skip
        with pytest.raises(TypeError, match=text):
            f(*args)
    with pytest.raises(TypeError, match="given a Tensor: pass the function itself"):
        fusion.fuse(torch.ones(2))
    with pytest.raises(fusion.CannotFuse, match="complex64"):
        f(torch.ones(2, dtype=torch.complex64))
    w = torch.ones(2, requires_grad=True)
    with pytest.raises(fusion.CannotFuse, match="has no backward"):
        f(w)
    with torch.no_grad():
        assert f(w).tolist() == [2, 2]


def test_what_the_function_raises_comes_through():
    def f(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fusion.fuse(f)(torch.ones(2))


def test_a_proxy_that_escapes_is_refused():
    kept = []

    def f(x):
        kept.append(x)
        return kept[0] + x

    fused = fusion.fuse(f)
    fused(torch.ones(2))
    with pytest.raises(fusion.CannotCapture, match="another capture"):
        fused(torch.ones(3))


def test_where_triton_is_missing(monkeypatch):
    monkeypatch.setattr(fusion.importlib.util, "find_spec", lambda name: None)
    f = fusion.fuse(lambda x, y: (x.add_(y), torch.zeros_like(x) + 2, x * y))
    x, y = torch.ones(3, 2), torch.ones(2)
    a, b, c = f(x, y)
    assert f.how == "graph" and f.launches == 0 and a is x
    assert (a == 2).all() and (b == 2).all() and (c == 2).all() and f.source


# --- the chains, and the code for a GPU ---------------------------------------------


@pytest.mark.parametrize("name", fusion.chains())
def test_chains(name):
    chain = fusion.chains()[name]
    args = chain.inputs(3 * fusion_chains.COLUMNS, "cpu")
    fused = fusion.fuse(chain.fn)
    fusion_chains._compare(chain, args, chain.fn, fused)
    assert fused.launches == 1 and fused.kernels == 1


TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16"}


@pytest.mark.parametrize("name", fusion.chains())
def test_chains_become_wide_loads_and_stores(name):
    "Compiled for a GPU that need not be there: 16 bytes at a time, but for one number a row."
    triton = pytest.importorskip("triton")
    compiler = pytest.importorskip("triton.compiler")
    backends = pytest.importorskip("triton.backends.compiler")
    chain = fusion.chains()[name]
    fused = fusion.fuse(chain.fn)
    tensors, plan = fused._planned(chain.inputs(3 * fusion_chains.COLUMNS, "cpu"))
    kernel = fusion_codegen.build(plan.source, "cuda")
    dtypes = [tensors[k].dtype for k in plan.pointers] + [plan.made[k][2] for k in plan.stored]
    names = kernel.arg_names
    signature = dict(zip(names, [TYPES[d] for d in dtypes] + ["i32", "constexpr"], strict=True))
    aligned = {(k,): [["tt.divisibility", 16]] for k in range(len(dtypes) + 1)}
    source = compiler.ASTSource(kernel, signature, {(len(dtypes) + 1,): fusion.BLOCK}, aligned)
    ptx = triton.compile(
        source, target=backends.GPUTarget("cuda", 90, 32), options={"num_warps": fusion.WARPS}
    ).asm["ptx"]
    moved = set(re.findall(r"(?:ld|st)\.global[.\w:]*", ptx))
    assert {"ld.global.v4.b32", "st.global.v4.b32"} <= moved
    assert len(moved) == 2 + (name == "scale by rows")


def test_graphs_in_words():
    g = Graph()
    x = g.input()
    g.outputs = [g.add("mul", g.add("exp", x), 2.0), x]
    assert str(g) == "in0\na = exp(in0)\nb = mul(a, 2.0)\nreturn b, in0"
    with pytest.raises(TypeError, match="has 1 inputs and was given 2"):
        g.run(torch.ones(1), torch.ones(1))
    with pytest.raises(fusion.CannotFuse, match="no operator 'nonsense'"):
        g.outputs.append(g.add("nonsense", x)) or g.run(torch.ones(1))

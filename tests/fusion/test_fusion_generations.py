"Four generations of framework: one program, equal results, and where each says no."

import pytest
import torch

from course_lib.fusion import generations
from course_lib.fusion import small as fusion_small


def tensors():
    return [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((5, 7), (7, 3), (3,), (7, 3))]


def test_one_program_four_results():
    x, w, b, v = tensors()
    want = torch.tanh(x @ w + b) * torch.sigmoid(x @ v)
    results = generations.all_four(x, w, b, v)
    assert list(results) == ["declarative", "graph builder", "eager", "capture"]
    for name, got in results.items():
        torch.testing.assert_close(got, want, msg=name)


def test_the_eager_tape():
    args = tensors()
    generations.program(*args).sum().backward()
    mine = [generations.Eager(t.detach()) for t in args]
    generations.program(*mine).backward()
    for t, e in zip(args, mine, strict=True):
        torch.testing.assert_close(e.grad, t.grad)


def test_a_value_used_twice_gets_both_gradients():
    x = generations.Eager(torch.tensor([2.0]))
    (x * x + x).backward()
    assert x.grad.item() == 5


def test_declarative_says_what_it_has():
    with pytest.raises(ValueError, match=r"^layer h is of type Swish; the framework has InnerProduct, TanH"):
        generations.run_declared("layer { name: h type: Swish bottom: x }", {"x": torch.ones(2)})
    with pytest.raises(ValueError, match=r"expected `layer"):
        generations.run_declared("y = tanh(x)", {})


def test_the_graph_has_no_values():
    y = generations.build()
    assert repr(y) == "Symbol(mul)"
    with pytest.raises(ValueError, match=r"^placeholder w was not fed$"):
        generations.Session().run(y, {"x": torch.ones(2, 2)})


def test_a_session_computes_a_shared_symbol_once():
    calls = []

    def counted(t):
        calls.append(t)
        return t

    a = generations.Symbol(counted, generations.placeholder("x"))
    assert generations.Session().run(a + a, {"x": torch.ones(1)}).item() == 2 and len(calls) == 1


def test_a_branch_is_a_node_there():
    x = generations.placeholder("x")
    y = generations.cond(generations.Symbol(torch.gt, x, 0), x + x, x)
    assert generations.Session().run(y, {"x": torch.tensor([-1.0, 3.0])}).tolist() == [-1.0, 6.0]


def test_capture_finds_the_same_graph():
    assert [n.op for n in generations.captured().nodes] == [
        "matmul",
        "add",
        "tanh",
        "matmul",
        "sigmoid",
        "mul",
    ]


def test_a_small_kernel_runs():
    pytest.importorskip("triton")

    def fn(x, row, column):
        t = torch.tanh(x + row) * 2.0
        return 1.5 - t, torch.where(x > column, t, x.exp() / 3)

    shapes = [(6, 7), (7,), (6, 1)]
    args = [torch.randn(s) for s in shapes]
    source = fusion_small.generate(fusion_small.capture(fn, 3), shapes)
    for got, want in zip(fusion_small.launch(source, args, (6, 7), 2), fn(*args), strict=True):
        torch.testing.assert_close(got, want)

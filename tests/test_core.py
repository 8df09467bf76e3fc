"The engine of checks: one sentence for every wrong answer, and none for a right one."

import gc
import random

import pytest
import torch

from course_lib import checking as core


@core.exercise("05.1", "twice any tensor")
def double(answer):
    x = torch.randn(3, 5)
    core.close(core.call(answer, x), 2 * x, "twice a 3x5 tensor")


@core.exercise("05.2", "two of them")
def pair(first, second):
    core.equal((first, second), (1, 2), "the pair")


class Stub(Exception):
    pass


def unsolved(x):
    raise NotImplementedError


def wrapped(x):
    try:
        unsolved(x)
    except NotImplementedError as e:
        raise Stub("in the interpreter") from e


def mutates(x):
    return x.mul_(2)


def raises(x):
    raise ValueError("no such axis\nand more")


def says_no(x):
    raise NotImplementedError("complex numbers")


WRONG = {
    "None": (None, "expected a function, got None (is a `return` missing?): pass the function itself"),
    "a number": (3, "expected a function, got a int"),
    "a tensor": (torch.ones(2), r"expected a function, got a float32 tensor of shape \[2\]"),
    "a stub": (unsolved, "not solved yet: write your code in the cell above"),
    "a stub deep down": (wrapped, "not solved yet"),
    "a real NotImplementedError": (says_no, "says_no raised NotImplementedError: complex numbers"),
    "it raises": (raises, r"raises raised ValueError: no such axis when called with \(float32\[3, 5\]\)"),
    "it mutates": (mutates, "mutates changed its input number 1 in place"),
    "no return": (lambda x: None, "expected a tensor of shape .*, got None"),
    "a list": (lambda x: [1], "expected a tensor of shape .*, got a list"),
    "wrong shape": (lambda x: 2 * x.T, r"expected shape \[3, 5\], got \[5, 3\]"),
    "NaN": (lambda x: 2 * x * float("nan"), "15 of 15 values are NaN"),
    "infinite": (lambda x: x + float("inf"), "expected .*, got inf"),
    "off": (lambda x: 2 * x + 0.01, r"expected .* at \[\d, \d\], got"),
    "wrong arity": (lambda: 1, "raised TypeError"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_gets_one_sentence(name, capsys):
    answer, sentence = WRONG[name]
    with pytest.raises(core.Wrong, match=sentence.replace("(is a `return` missing?)", ".*")) as e:
        double(answer)
    assert str(e.value).startswith("05.1 not passed: ") and "\n" not in str(e.value)
    assert e.value._render_traceback_() == [str(e.value)]
    assert e.value.__cause__ is None and e.value.__suppress_context__
    assert capsys.readouterr().out == ""


def test_a_right_answer_prints_one_line(capsys):
    double(lambda x: 2 * x)
    pair(1, 2)
    assert capsys.readouterr().out == "05.1 passed: twice any tensor\n05.2 passed: two of them\n"


def test_the_wrong_number_of_answers():
    with pytest.raises(core.Wrong, match=r"the check takes \(first, second\) and was given 1 things"):
        pair(1)
    with pytest.raises(core.Wrong, match=r"the check takes \(answer\) and was given 0 things"):
        double()


def test_a_check_that_raises_itself_is_no_pass():
    @core.exercise("05.9", "never")
    def broken(answer):
        return 1 / answer

    with pytest.raises(core.Wrong, match=r"05\.9 not passed: the answer raised ZeroDivisionError"):
        broken(0)


def test_checks_by_number():
    class module:
        b, a, other = pair, double, 3

    assert list(core.exercises(module)) == ["05.1", "05.2"]


def test_settings_of_the_notebook_neither_matter_nor_change():
    seen = []

    @core.exercise("05.3", "settings")
    def settings(answer):
        x = torch.ones(2, requires_grad=True)
        (x * 2).sum().backward()
        seen.append((torch.get_default_dtype(), torch.rand(()).item(), random.random(), x.device.type))

    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        torch.manual_seed(0)
        random.seed(0)
        before = torch.get_rng_state(), random.getstate()
        with torch.no_grad():
            settings(None)
            settings(None)
        assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
        assert torch.get_default_dtype() == torch.float64 and torch.ones(1).device.type == "meta"
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert seen[0][0] == torch.float32 and seen[0][3] == "cpu"
    assert seen[0][1] != seen[1][1]  # a fresh draw each time


def test_an_answer_leaves_the_settings_as_they_were(capsys):
    @core.exercise("05.4", "settings")
    def leaves(answer):
        answer()

    leaves(lambda: torch.set_grad_enabled(True))
    for change, sentence in {
        lambda: torch.set_grad_enabled(False): r"is_grad_enabled\(\) at False; it was True",
        lambda: 1 / torch.set_default_dtype(torch.float64): r"get_default_dtype\(\) at torch.float64",
        lambda: torch.set_default_device("meta"): r"get_default_device\(\) at meta",
        lambda: torch.set_num_threads(torch.get_num_threads() + 1): "get_num_threads",
        lambda: torch.use_deterministic_algorithms(True): "are_deterministic_algorithms_enabled",
        gc.disable: "isenabled",
    }.items():
        before = [setting() for setting in core.SETTINGS]
        with pytest.raises(core.Wrong, match="05.4 not passed: the answer leaves " + sentence):
            leaves(change)
        assert [setting() for setting in core.SETTINGS] == before


def test_call_clones_and_keeps_gradients():
    kept = []
    x = torch.ones(2, requires_grad=True)

    def keeps(x, *, scale):
        kept.append(x)
        return x * scale

    out = core.call(keeps, [x][0], scale=torch.tensor(3.0))
    assert kept[0] is not x and kept[0].requires_grad and out.tolist() == [3, 3]

    def changes(params, rate):
        params[0].sub_(rate)

    params = [torch.ones(2)]
    core.call(changes, params, 1.0, mutates=(0,))
    assert params[0].tolist() == [0, 0]
    with pytest.raises(core.Wrong, match="changed its input number 1"):
        core.call(changes, params, 1.0)
    with pytest.raises(core.Wrong, match="changed one of its inputs"):
        core.call(lambda x: x.zero_(), x=torch.ones(2))


@pytest.mark.parametrize(
    "value, mutate",
    [
        ([3, 1, 2], lambda x: x.sort()),
        ([torch.ones(1)], lambda x: x.append(torch.ones(1))),
        ([torch.ones(1)], lambda x: x.clear()),
        ({"lr": 0.1}, lambda x: x.update(lr=0.2)),
        (torch.tensor([float("nan"), 1.0]), lambda x: x.fill_(1.0)),
        (torch.tensor([True]), lambda x: x.logical_not_()),
        (torch.ones(2), lambda x: setattr(x, "data", x.double())),
        (torch.ones(2), lambda x: x.resize_(1)),
    ],
)
def test_call_sees_every_change_of_an_input(value, mutate):
    core.call(lambda x: None, value)
    with pytest.raises(core.Wrong, match="changed its input number 1 in place"):
        core.call(mutate, value)


@pytest.mark.parametrize(
    "got, want",
    [(1.0, 1.0), (torch.tensor(1.0), 1.0), (1.00001, 1.0), (torch.tensor([1.0]), torch.tensor([1.0]))],
)
def test_close_accepts(got, want):
    core.close(got, want, "it")


@pytest.mark.parametrize(
    "got, sentence",
    [
        (1.01, "it: expected 1, got 1.01"),
        (float("nan"), "it: expected a finite number, got nan"),
        ("1", "it: expected a number, got a str"),
        (True, "it: expected a number, got a bool"),
        (None, "it: expected a number, got None"),
        (torch.ones(2), "it: expected a number, got a float32 tensor"),
        (torch.ones(2).numpy(), "it: expected a number, got a ndarray"),
        (1j, "it: expected a number, got a complex"),
        (torch.tensor(1j), "it: expected a number, got a complex"),
        (10**400, "it: expected a finite number, got inf"),
    ],
)
def test_close_refuses(got, sentence):
    with pytest.raises(core.Wrong) as e:
        core.close(got, 1.0, "it")
    assert str(e.value).startswith(sentence)


def test_close_with_nothing_and_with_nan_that_is_wanted():
    core.close(torch.empty(0, 3), torch.empty(0, 3), "nothing")
    with pytest.raises(core.Wrong):
        core.close(torch.tensor([1.0]), torch.tensor([float("nan")]), "a number for NaN")


@pytest.mark.parametrize(
    "got, want, sentence",
    [
        (7, 8, "it: expected 8 bytes, got 7 bytes"),
        (1234567.5, 1234567, "it: expected 1,234,567 bytes, got 1,234,567.5 bytes"),
        ("a", "b", "it: expected 'b' bytes, got 'a' bytes"),
        (None, "b", "it: expected 'b', got None"),
        ([1, 3], (1, 2), r"it: expected (1, 2) bytes, got [1, 3] bytes"),
        ({1: 2}, [1], "it: expected [1], got a dict"),
    ],
)
def test_equal_refuses(got, want, sentence):
    with pytest.raises(core.Wrong) as e:
        core.equal(got, want, "it", "bytes")
    assert str(e.value).startswith(sentence)


def test_equal_accepts():
    core.equal(8.0, 8, "a count as a float")
    core.equal(torch.tensor(8), 8, "a count as a tensor")
    core.equal([1, 2], [1, 2], "a list")


def test_poison():
    assert core.poison(2, 3).isnan().all()
    assert (core.poison(2, dtype=torch.int64) > 2**30).all()


def test_words():
    assert core.kind(int) == "the class int"
    assert core.kind(torch.ones(2, 3)) == "a float32 tensor of shape [2, 3]"
    shapes = core.shapes(
        (torch.ones(2, dtype=torch.bfloat16), [torch.ones(1)] * 5, print, 3), {"k": "v" * 50}
    )
    assert shapes == "(bfloat16[2], [float32[1], float32[1], float32[1], float32[1], …], print, 3, k=a str)"
    assert core.describe(KeyError()) == "KeyError"

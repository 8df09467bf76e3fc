"""The toolkit of checks: call the learner's object safely, compare, say one sentence.

A check is a function decorated with `exercise`. It raises `Wrong` with one sentence, or returns and
the decorator prints one fixed line: `roofline.1 passed: …`. It never prints a failure and goes on.
What passed is what the lesson goes on with: `yours("roofline.1")` gives it back.
"""

import contextlib
import functools
import gc
import importlib
import inspect
import math
import random

import torch
from torch.utils import _pytree as pytree


class Wrong(AssertionError):
    "What is wrong with an answer, in one sentence. Notebooks show the sentence and no traceback."

    cause = None  # what the answer raised, where it did

    def _render_traceback_(self):
        return [str(self)]


_passed = {}  # by exercise, what the learner wrote and passed
_lent = []  # solutions of the course that `yours` gave out

# What an answer must leave as it found it: each holds for the rest of the program.
SETTINGS = (
    torch.is_grad_enabled, torch.get_default_dtype, torch.get_default_device, torch.get_num_threads,
    torch.are_deterministic_algorithms_enabled, gc.isenabled,
)  # fmt: skip


def exercise(number, passed):
    """Make a check of exercise `number` ("roofline.1") that prints `roofline.1 passed: <passed>` on success.

    The check runs on the CPU, in float32, with gradients on, whatever the notebook has set; the
    notebook's own settings and random state come back afterwards. An answer that leaves one of `SETTINGS`
    changed is refused.
    """

    def decorate(fn):
        @functools.wraps(fn)
        def check(*answer):
            _passed.pop(number, None)
            try:
                if any(a is solution for a in answer for solution in _lent):
                    own = "this is the course's own solution"
                    raise Wrong(f"{own}: run the cell with your code, then this one")
                with _fixed_settings():
                    fn(*answer)
            except Exception as e:
                takes, message = list(inspect.signature(fn).parameters), f"the answer raised {describe(e)}"
                if isinstance(e, Wrong):
                    message = e
                elif _is_stub(e):
                    message = "not solved yet: write your code in the cell above, run it, then run this cell"
                elif isinstance(e, TypeError) and len(answer) != len(takes):
                    message = f"the check takes ({', '.join(takes)}) and was given {len(answer)} things"
                raise Wrong(f"{number} not passed: {message}") from None
            _passed[number] = answer
            print(f"{number} passed: {passed}")

        check.exercise, check.passed = number, passed
        return check

    return decorate


def yours(number):
    """What the learner wrote for exercise `number`, if it passed its check in this kernel.

    Otherwise the course's own solution, and a line that says so. An exercise whose check takes several
    objects gives a tuple.
    """
    found = _passed.get(number)
    if found is None:
        solutions = importlib.import_module(f"course_lib.{number.split('.')[0]}.solutions")
        found = tuple(getattr(solutions, name) for name in solutions.EXERCISES[number])
        _lent.extend(found)
        print(f"{number} is not passed here: the course's own solution is used in its place")
    return found if len(found) > 1 else found[0]


def exercises(module):
    "The checks of a module by exercise number, in order: {'roofline.1': check, …}."
    found = {f.exercise: f for f in vars(module).values() if isinstance(getattr(f, "exercise", None), str)}
    return dict(sorted(found.items()))


@contextlib.contextmanager
def _fixed_settings():
    dtype, device, threads = torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads()
    python_state, collects = random.getstate(), gc.isenabled()
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), torch.device("cpu"):
            torch.set_default_dtype(torch.float32)
            # Fresh inputs each time: an answer fitted to one draw must not pass.
            torch.seed()
            random.seed()
            before = [setting() for setting in SETTINGS]
            try:
                yield
            finally:  # also where something failed because of it
                for setting, was in zip(SETTINGS, before, strict=True):
                    left = f"the answer leaves {setting.__name__}() at {setting()}; it was {was}: put it back"
                    require(setting() == was, left)
    finally:
        torch.set_default_dtype(dtype)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        # Only where the answer changed it: a caller's `with torch.device(…)` must not become lasting.
        if torch.get_default_device() != device:
            torch.set_default_device(device if device.type != "cpu" else None)
        if torch.are_deterministic_algorithms_enabled() != deterministic:  # or Inductor is imported
            torch.use_deterministic_algorithms(deterministic)
        random.setstate(python_state)
        (gc.enable if collects else gc.disable)()


def _is_stub(e):
    # Triton's interpreter wraps the stub's exception, so the chain is walked.
    chain = []
    while e is not None and e not in chain:
        chain.append(e)
        e = e.__cause__ or e.__context__
    return any(isinstance(c, NotImplementedError) and not str(c) for c in chain)


def describe(e):
    "An exception in a few words: its name and the first line of its message."
    first = (str(e).strip().splitlines() or [""])[0][:200]
    return f"{type(e).__name__}: {first}" if first else type(e).__name__


def clone(tree):
    "A copy of nested lists, tuples and dicts whose tensors share no memory with the originals."
    return pytree.tree_map_only(
        torch.Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), tree
    )


def call(fn, *args, mutates=(), **kwargs):
    """Call the learner's `fn` on clones of the tensors in `args` and `kwargs`; return what it returns.

    Raises `Wrong` when `fn` is not callable, raises, or changes an input in place. `mutates` names the
    positions that it may change, which are not cloned: the caller passes clones of its own.
    """
    if not callable(fn):
        raise Wrong(f"expected a function, got {kind(fn)}: pass the function itself, without calling it")
    given, kept = ([a if i in mutates else clone(a) for i, a in enumerate(args)] for _ in range(2))
    named = clone(kwargs)
    name = getattr(fn, "__name__", type(fn).__name__)
    try:
        out = fn(*given, **named)
    except Wrong:
        raise
    except Exception as e:
        if _is_stub(e):
            raise NotImplementedError from None
        wrong = Wrong(f"{name} raised {describe(e)} when called with {shapes(args, kwargs)}")
        wrong.cause = e
        raise wrong from None
    pairs = [(i, *both) for i, both in enumerate(zip(kept, given, strict=True)) if i not in mutates]
    changed = [f"its input number {i + 1}" for i, a, b in pairs if not _same(a, b)]
    changed += ["one of its inputs"] * (not _same(kwargs, named))
    if changed:
        raise Wrong(f"{name} changed {changed[0]} in place; work on a copy")
    return out


def _same(a, b):
    old, new = pytree.tree_leaves(a), pytree.tree_leaves(b)
    return len(old) == len(new) and all(map(_same_leaf, old, new))


def _same_leaf(x, y):
    if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):  # byte by byte, so that NaN is NaN
        same = (x.shape, x.dtype) == (y.shape, y.dtype)
        return same and torch.equal(*(t.detach().flatten().view(torch.uint8) for t in (x, y)))
    if isinstance(x, int | float | str):  # a list of numbers may have been sorted in place
        return type(x) is type(y) and (x == y or x != x)
    return True


def shapes(args, kwargs=None):
    "The arguments of a call as a learner would write them, tensors by dtype and shape."

    def one(a):
        if isinstance(a, torch.Tensor):
            return f"{str(a.dtype).removeprefix('torch.')}{list(a.shape)}"
        if isinstance(a, list | tuple) and any(isinstance(t, torch.Tensor) for t in pytree.tree_leaves(a)):
            return "[" + ", ".join(one(x) for x in a[:4]) + (", …" if len(a) > 4 else "") + "]"
        text = getattr(a, "__name__", None) or repr(a)
        return text if len(text) <= 40 else f"a {type(a).__name__}"

    words = [one(a) for a in args] + [f"{k}={one(v)}" for k, v in (kwargs or {}).items()]
    return "(" + ", ".join(words) + ")"


def kind(x):
    "What a value is, in words: 'None', 'a tensor of shape [3, 5]', 'a str'."
    if x is None:
        return "None (is a `return` missing?)"
    if isinstance(x, torch.Tensor):
        return f"a {str(x.dtype).removeprefix('torch.')} tensor of shape {list(x.shape)}"
    if inspect.isclass(x):
        return f"the class {x.__name__}"
    return f"a {type(x).__name__}"


def number(got, what):
    "`got` as a finite float (a one-element tensor counts), or `Wrong`."
    if isinstance(got, torch.Tensor) and got.numel() == 1:
        got = got.item()
    try:
        value = None if isinstance(got, bool | str | bytes) else float(got)
    except OverflowError:
        value = math.inf
    except (TypeError, ValueError, RuntimeError):
        value = None
    require(value is not None, f"{what}: expected a number, got {kind(got)}")
    require(math.isfinite(value), f"{what}: expected a finite number, got {value}")
    return value


def close(got, want, what, rtol=1e-4, atol=1e-6):
    "Require `got` to be `want`, a number or a tensor, within `atol + rtol * |want|`, element by element."
    if not isinstance(want, torch.Tensor):
        got = number(got, what)
        require(abs(got - want) <= atol + rtol * abs(want), f"{what}: expected {want:.6g}, got {got:.6g}")
        return
    if not isinstance(got, torch.Tensor):
        raise Wrong(f"{what}: expected a tensor of shape {list(want.shape)}, got {kind(got)}")
    if got.shape != want.shape:
        raise Wrong(f"{what}: expected shape {list(want.shape)}, got {list(got.shape)}")
    a, b = got.detach().cpu().double(), want.detach().cpu().double()
    if a.isnan().any() and not b.isnan().any():
        raise Wrong(f"{what}: {int(a.isnan().sum())} of {a.numel()} values are NaN")
    off = (a - b).abs() - (atol + rtol * b.abs())
    if not (off <= 0).all():
        at = int(off.nan_to_num(math.inf).argmax())
        index = [int(i) for i in torch.unravel_index(torch.tensor(at), a.shape)]
        where = f" at {index}" if index else ""
        raise Wrong(f"{what}: expected {b.flatten()[at]:.6g}{where}, got {a.flatten()[at]:.6g}")


def equal(got, want, what, unit=""):
    "Require a counted fact: `got` is exactly `want` (an int, a string, a list, …)."
    unit = f" {unit}" if unit else ""
    sequences = isinstance(got, list | tuple) and isinstance(want, list | tuple)
    if isinstance(want, int) and not isinstance(want, bool):
        value = number(got, what)
        require(value == want, f"{what}: expected {want:,}{unit}, got {value:,.10g}{unit}")
    elif type(got) is not type(want) and not sequences:
        raise Wrong(f"{what}: expected {want!r}, got {kind(got)}")
    elif got != want:
        raise Wrong(f"{what}: expected {want!r}{unit}, got {got!r}{unit}")


def require(condition, sentence):
    "Require a condition, or say `sentence`."
    if not condition:
        raise Wrong(sentence)


def poison(*shape, dtype=torch.float32):
    "A tensor whose every element is wrong (NaN; a large number for integers), for an answer to overwrite."
    return torch.full(shape, float("nan") if dtype.is_floating_point else 2**30 + 7, dtype=dtype)


def need_callable(answer, what="a function"):
    "Require a function or a class, which is passed without being called."
    require(callable(answer), f"expected {what}, got {kind(answer)}: pass it without calling it")


def parts(got, names, what):
    "`got` as a list with a part for each word of `names` (parts(got, 'flops bytes', …)), or `Wrong`."
    names = names.split()
    if not isinstance(got, list | tuple) or len(got) != len(names):
        size = f" of {len(got)}" if isinstance(got, list | tuple) else ""
        raise Wrong(f"{what}: expected a tuple ({', '.join(names)}), got {kind(got)}{size}")
    return list(got)


def refuses(fn, *args, error=ValueError, why):
    "Require that `fn(*args)` raises `error`; `why` says what is wrong with the arguments."
    try:
        got = call(fn, *args)
    except Wrong as e:
        if isinstance(e.cause, error):
            return
        raise
    shown = f"{got:.3g}" if isinstance(got, int | float) else kind(got)
    raise Wrong(f"{why}: expected a {error.__name__}, got {shown}")


def ragged(low, high, n):
    "`n` different sizes from `low` to `high` - 1: no two equal, so that none is taken for another."
    return random.sample(range(low, high), n)

"What the checks of lesson triton share: kernels launched under watch, and inputs that lie among poison."

import contextlib
import importlib.util
import inspect
import random

import torch

from course_lib import checking as core
from course_lib import kernels

# Kinds of rows for a softmax, each of which some wrong kernel gets wrong.
ROWS = ("gaussian", "far below zero", "up to 300", "ending in -inf", "nearly equal")


def rows(kind, n, cols):
    "A matrix of one of the kinds in ROWS."
    x = torch.randn(n, cols)
    if kind == "far below zero":
        return x - 20_000
    if kind == "up to 300":
        return 100 * x.clamp(-3, 3)
    if kind == "ending in -inf":
        x[:, -(cols // 3) :] = -float("inf")
        return x
    return 0.01 * x + 3 if kind == "nearly equal" else 3 * x


def columns(ragged):
    "The length of a row; `ragged`: no power of two, so that a block has lanes to mask."
    n = random.choice((random.randrange(3, 40), random.randrange(65, 127), 64))
    return n + 1 if ragged and not n & (n - 1) else n


def product_sizes(trial, bm, bn, bk):
    "m, n, k of a product: ragged, of two by three tiles first; long sums; whole tiles; less than a tile."
    if trial == 3:
        return bm * random.randrange(1, 3), bn * random.randrange(2, 4), bk * random.randrange(1, 4)
    if trial == 4:
        return tuple(random.randrange(1, 16) for _ in range(3))
    m = (1 if trial == 0 else random.choice((1, 2))) * bm + random.randrange(1, bm)
    n = (2 if trial == 0 else random.choice((1, 2))) * bn + random.randrange(1, bn)
    steps = 512 // bk if trial == 1 else random.choice((1, 2))  # in a long sum low precision shows
    return m, n, steps * bk + random.randrange(1, bk)


def power_above(n):
    "The next power of two that is n or more, 2 at least."
    return max(2, 1 << (n - 1).bit_length())


def within(t, transposed=False):
    "`t` as a part of a larger tensor full of poison, with an offset and rows apart."
    wide = [s + random.randrange(3, 12) for s in t.shape]
    poison = core.poison(*(reversed(wide) if transposed else wide), dtype=t.dtype)
    around = poison.T if transposed else poison
    part = around[tuple(slice(1, 1 + s) for s in t.shape)]
    return part.copy_(t)


def poisoned(shape, dtype, transposed=False):
    "A tensor full of poison within a larger one; see `within`."
    return within(core.poison(*shape, dtype=dtype), transposed)


def tiles_in_groups(tiles_m, tiles_n, group):
    "The tiles in their order, as a list: groups of rows one after another, in each the columns."
    return [
        (m, n)
        for first in range(0, tiles_m, group)
        for n in range(tiles_n)
        for m in range(first, min(first + group, tiles_m))
    ]


class Kernel:
    "A learner's kernel with `count` arguments, among them the constants by name. `Wrong` for anything else."

    def __init__(self, answer, count, *constants):
        try:
            kernels.require()
        except kernels.KernelError as e:
            raise core.Wrong(str(e)) from None
        self.kernel = answer
        fn = getattr(answer, "fn", None)
        if not inspect.isfunction(fn) or not hasattr(answer, "run"):
            _call_if_stub(answer)
            forgot = inspect.isfunction(answer)
            raise core.Wrong(
                f"expected a kernel, got {core.kind(answer)}: "
                + ("put @triton.jit above it" if forgot else "pass the function under @triton.jit itself")
            )
        self.name, self.names = fn.__name__, list(inspect.signature(fn).parameters)
        self.launched = {}  # {dtypes: the arguments of a launch}
        if len(self.names) != count or not set(constants) <= set(self.names):
            raise core.Wrong(
                f"{self.name} takes ({', '.join(self.names)}); expected the {count} arguments of the lesson, "
                f"{' and '.join(constants)} among them: copy the first lines from there"
            )

    def run(self, grid, *args, what, changes=(), **constants):
        """Launch it on `args` under `watch`; returns the watch.

        Raises `Wrong` for an exception, a race, an access outside, or a changed input: tensors that hold no
        poison before must be the same afterwards, but for those at the positions `changes`.
        """
        from course_lib.kernels.watch import watch

        rounded = []
        whole = [a._base if isinstance(a, torch.Tensor) and a._base is not None else a for a in args]
        kept = [w.clone() if isinstance(w, torch.Tensor) else None for w in whole]
        try:
            with watch() as w, _dots(rounded):
                self.kernel[grid](*args, **constants)
        except Exception as e:
            if core._is_stub(e):
                raise NotImplementedError from None
            while type(e).__name__ == "InterpreterError" and e.__cause__ is not None:
                e = e.__cause__
            raise core.Wrong(f"{self.name} raised {core.describe(e)} on {what}") from None
        if rounded:
            raise core.Wrong(
                f"{what}: on a GPU tl.dot would round the fp32 factors to tf32, "
                'unless it is told input_precision="ieee"'
            )
        for fault in [*w.outside, *w.races]:
            raise core.Wrong(f"{what}: {fault}")
        dtypes = tuple(a.dtype for a in args if isinstance(a, torch.Tensor))
        self.launched[dtypes] = dict(zip(self.names, args, strict=False)) | constants
        for i, before in enumerate(kept):
            if before is None or i in changes or _poison_all(before):
                continue
            if not _same(whole[i], before):
                raise core.Wrong(f"{what}: {self.name} stores to {self.names[i]}, which it should only read")
        return w

    def compiles(self):
        "Require the compiler for a GPU to take it too, for the dtypes of each launch; no GPU is needed."
        from course_lib.kernels import compiled

        for arguments in self.launched.values():
            if reason := compiled.refusal(self.kernel, arguments):
                raise core.Wrong(f"{self.name} is right in the interpreter, but {reason}")

    def moves_once(self, w, loads, stores, what):
        "Require each element of the arguments at these positions to be loaded, or stored, exactly once."
        for position, label in loads.items():
            self._once(w.loads, position, label, "loaded", what)
        self.stores_once(w, stores, what)

    def stores_once(self, w, stores, what):
        "Require each element of the arguments at these positions to be stored exactly once."
        for position, label in stores.items():
            self._once(w.stores, position, label, "stored", what)

    def _once(self, accesses, position, label, verb, what):
        found = accesses.get(self.names[position])
        if found is None or found.fewest < 1:
            raise core.Wrong(f"{what}: some element of {label} is never {verb}")
        if found.most > 1:
            raise core.Wrong(f"{what}: some element of {label} is {verb} {found.most} times; expected once")

    def loads_at_most(self, w, position, limit, label, what):
        "Require no more than `limit` loads of the argument at this position."
        found = w.loads[self.names[position]].elements
        if found > limit:
            raise core.Wrong(f"{what}: {label} is loaded {found:,} times in all, where {limit:,} are enough")


def a_kernel_can_call(grouped):
    "Require a function of four integers to compile within a kernel, where Triton is installed."
    fn = getattr(grouped, "fn", grouped)  # under @triton.jit
    if not inspect.isfunction(fn) or importlib.util.find_spec("triton") is None:
        return
    from course_lib.kernels import compiled, interpret

    tl = interpret.tl
    try:
        called = interpret.jit.JITFunction(fn)
    except Exception:  # a lambda, or without a text
        return

    def tile_kernel(out_ptr, pid, tiles_m, tiles_n, group):
        row, column = called(pid, tiles_m, tiles_n, group)
        tl.store(out_ptr, row)
        tl.store(out_ptr + 1, column)

    numbers = {"pid": 3, "tiles_m": 5, "tiles_n": 7, "group": 2}
    if reason := compiled.refusal(tile_kernel, {"out_ptr": torch.zeros(2), **numbers}):
        raise core.Wrong(f"{fn.__name__} is right, but a kernel can't call it: {reason}")


@contextlib.contextmanager
def _dots(rounded):
    "Append to `rounded` for each dot of fp32 blocks that a GPU would compute in tf32; here it can't be seen."
    from course_lib.kernels import interpret

    original = interpret.Builder.create_dot

    def create_dot(self, a, b, d, input_precision, *args, **kwargs):
        if a.dtype.scalar == interpret.tl.float32 and getattr(input_precision, "name", "") == "TF32":
            rounded.append(True)
        return original(self, a, b, d, input_precision, *args, **kwargs)

    interpret.Builder.create_dot = create_dot
    try:
        yield
    finally:
        interpret.Builder.create_dot = original


def _call_if_stub(answer):
    "A function that isn't a kernel may still be an unsolved one."
    if not inspect.isfunction(answer):
        return
    try:
        answer()
    except NotImplementedError:
        raise
    except Exception:
        return


def _poison_all(t):
    return bool(t.isnan().all()) if t.is_floating_point() else False


def _same(a, b):
    return torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan())

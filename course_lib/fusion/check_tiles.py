"""Runs the source of a point-wise Triton kernel with tiles of torch, and keeps count; Triton is not needed.

Programs run one after another. Values are float64. A read or a write outside a buffer is an error, and what
a masked lane holds without `other=` is NaN. `run` gives, for each buffer, how often a program loads from it
and how often each element was stored, and the operations on values in a program: index arithmetic is free.
"""

import ast
import math
from collections import Counter
from types import SimpleNamespace

import torch

from course_lib import checking as core


class Tile:
    "The values of a program's lanes, or one value for all of them."

    def __init__(self, data, counts):
        self.data, self.counts = data, counts

    def to(self, dtype, **_):
        "A cast changes the kind of number: to whole numbers, to bool, or none that matters here."
        return Tile(dtype(self.data) if callable(dtype) else self.data, self.counts)

    def apply(self, fn, *others):
        "A function of tiles and numbers, which counts where values are computed with."
        data = [o.data if isinstance(o, Tile) else o for o in others]
        out = fn(*data)
        if any(torch.is_tensor(d) and d.is_floating_point() for d in data):
            self.counts["operations"] += 1
        return Tile(out, self.counts)

    def __bool__(self):
        raise core.Wrong("the kernel asks `if` of a tile: write tl.where(condition, a, b)")

    __hash__ = object.__hash__


def _binary(fn, swapped=False):
    def method(self, other):
        if isinstance(other, Pointer):
            return NotImplemented
        return self.apply(fn, other, self) if swapped else self.apply(fn, self, other)

    return method


_OPERATORS = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
    "truediv": lambda a, b: torch.as_tensor(a).double() / torch.as_tensor(b).double(),
    "floordiv": lambda a, b: torch.div(torch.as_tensor(a), b, rounding_mode="trunc"),
    "mod": lambda a, b: torch.fmod(torch.as_tensor(a), b),
    "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b,
    "lt": lambda a, b: a < b, "le": lambda a, b: a <= b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b,
}  # fmt: skip
for _name, _fn in _OPERATORS.items():
    setattr(Tile, f"__{_name}__", _binary(_fn))
    if _name not in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(Tile, f"__r{_name}__", _binary(_fn, swapped=True))
for _name, _fn in {"neg": lambda a: -a, "invert": lambda a: ~a}.items():
    setattr(Tile, f"__{_name}__", lambda self, fn=_fn: self.apply(fn, self))


class Pointer:
    "A buffer and offsets into it."

    dtype = SimpleNamespace(element_ty=None)

    def __init__(self, name, buffer, offsets=0):
        self.name, self.buffer, self.offsets = name, buffer, offsets

    def __add__(self, more):
        more = more.data if isinstance(more, Tile) else more
        return Pointer(self.name, self.buffer, self.offsets + more)

    __radd__ = __add__

    def where(self, mask, what):
        "Offsets and mask as tensors of one shape; offsets of lanes that are on must lie in the buffer."
        at = torch.as_tensor(self.offsets)
        if at.is_floating_point():
            raise core.Wrong(
                f"the kernel {what} {self.name} at offsets that are not whole numbers: use // and %"
            )
        on = torch.as_tensor(True if mask is None else mask.data if isinstance(mask, Tile) else mask)
        at, on = torch.broadcast_tensors(at, on)
        size = self.buffer.numel()
        out = at[on & ((at < 0) | (at >= size))]
        if out.numel():
            raise core.Wrong(
                f"the kernel {what} {self.name} at {int(out.flatten()[0])}, and it has {size} elements: "
                "lanes from n on must be masked, and a broadcast input has an index of its own"
            )
        return at, on


class Language:
    "What stands for triton.language."

    int1, int32, int64 = (
        lambda d, t=t: torch.as_tensor(d).to(t) for t in (torch.bool, torch.int32, torch.int64)
    )
    float16 = bfloat16 = float32 = float64 = staticmethod(lambda d: torch.as_tensor(d).double())
    constexpr = object()
    PropagateNan = SimpleNamespace(ALL="all", NONE="none")

    def __init__(self, counts):
        self.counts, self.program = counts, 0
        self.math = self

    def __getattr__(self, name):
        raise core.Wrong(
            f"the kernel uses tl.{name}, which this check doesn't know: it runs point-wise kernels"
        )

    def program_id(self, axis=0):
        return Tile(torch.tensor(self.program), self.counts)

    def arange(self, start, end):
        return Tile(torch.arange(start, end), self.counts)

    def full(self, shape, value, dtype=None):
        return Tile(torch.full(tuple(shape), float(value), dtype=torch.float64), self.counts)

    def zeros(self, shape, dtype=None):
        return self.full(shape, 0.0)

    def load(self, pointer, mask=None, other=None, **_):
        at, on = _pointer(pointer, "load").where(mask, "reads")
        self.counts["load", pointer.name] += 1
        other = math.nan if other is None else other.data if isinstance(other, Tile) else other
        value = torch.full(at.shape, float(other), dtype=torch.float64)
        value[on] = pointer.buffer.flatten()[at[on]]
        return Tile(value, self.counts)

    def store(self, pointer, value, mask=None, **_):
        at, on = _pointer(pointer, "store").where(mask, "writes")
        value = torch.as_tensor(value.data if isinstance(value, Tile) else value).double().expand(at.shape)
        pointer.buffer.flatten()[at[on]] = value[on]
        for k in at[on].flatten().tolist():
            self.counts["store", pointer.name, k] += 1

    def where(self, condition, a, b):
        def chosen(c, a, b):
            return torch.where(torch.as_tensor(c).bool(), torch.as_tensor(a), torch.as_tensor(b))

        return Tile(None, self.counts).apply(chosen, condition, a, b)

    def maximum(self, a, b, propagate_nan=None):
        return self._two(torch.maximum, a, b)

    def minimum(self, a, b, propagate_nan=None):
        return self._two(torch.minimum, a, b)

    def clamp(self, x, low, high, propagate_nan=None):
        return self.minimum(self.maximum(x, low), high)

    def fma(self, a, b, c):
        return Tile(None, self.counts).apply(lambda a, b, c: a * b + c, a, b, c)

    def cdiv(self, a, b):
        return -(-a // b)

    def _two(self, fn, a, b):
        return Tile(None, self.counts).apply(
            lambda a, b: fn(torch.as_tensor(a).double(), torch.as_tensor(b).double()), a, b
        )


def _pointer(pointer, what):
    if not isinstance(pointer, Pointer):
        raise core.Wrong(f"tl.{what} was given {core.kind(pointer)} and takes a pointer, such as in0 + i")
    return pointer


def _one(fn):
    def method(self, x):
        return Tile(None, self.counts).apply(lambda d: fn(torch.as_tensor(d).double()), x)

    return method


for _name in [
    "exp",
    "exp2",
    "log",
    "log2",
    "sqrt",
    "rsqrt",
    "sin",
    "cos",
    "erf",
    "floor",
    "ceil",
    "abs",
    "sigmoid",
    "tanh",
]:
    setattr(Language, _name, _one(getattr(torch, _name)))


def functions(source):
    "The functions under @triton.jit in a source text, each with its text; refuses what is no source."
    if not isinstance(source, str):
        raise core.Wrong(f"expected the source of a kernel as a string, got {core.kind(source)}")
    try:
        tree = ast.parse(source)
    except SyntaxError as e:
        line = (e.text or "").strip()
        raise core.Wrong(f"the source is not Python: {e.msg} in line {e.lineno}, `{line[:60]}`") from None
    found = [f for f in tree.body if isinstance(f, ast.FunctionDef) and f.decorator_list]
    others = [f for f in tree.body if f not in found]
    if others:
        raise core.Wrong(
            f"the source has `{ast.unparse(others[0]).splitlines()[0][:60]}` beside its kernel: it is "
            "one function under @triton.jit, for which triton and tl are there"
        )
    return found


def run(source, buffers, n, block):
    """Run the one kernel of `source` on `buffers` ({name: float64 tensor}, in order) in blocks of `block`.

    Returns a Counter: ("load", name) and "operations" of the program with most, ("store", name, element).
    """
    found = functions(source)
    if len(found) != 1:
        raise core.Wrong(f"the source has {len(found)} kernels: expected one function under @triton.jit")
    counts = Counter()
    tl = Language(counts)
    triton = SimpleNamespace(jit=lambda f: f, cdiv=tl.cdiv, language=tl)
    space = {"triton": triton, "tl": tl}
    exec(compile(source, "<kernel>", "exec"), space)
    kernel = space[found[0].name]
    pointers = [Pointer(name, buffer) for name, buffer in buffers.items()]
    takes = kernel.__code__.co_argcount
    if takes != len(pointers) + 2:
        names = ", ".join([*buffers, "n", "BLOCK"])
        raise core.Wrong(f"the kernel takes {takes} arguments: expected {len(pointers) + 2}, {names}")
    most = Counter()
    for program in range(-(-n // block)):
        before = Counter(counts)
        tl.program = program
        try:
            kernel(*pointers, n, block)
        except core.Wrong:
            raise
        except Exception as e:
            raise core.Wrong(f"the kernel raised {core.describe(e)}") from None
        most |= Counter({k: v - before[k] for k, v in counts.items() if k == "operations" or k[0] == "load"})
    return most + Counter({k: v for k, v in counts.items() if k[0] == "store"})


def operations(template, operands):
    "How many operations the code of one operator is, on tiles."
    counts = Counter()
    tile = Tile(torch.ones(4, dtype=torch.float64), counts)
    flag = Tile(torch.ones(4, dtype=torch.bool), counts)
    names = [f"a{k}" if o is not None else "0.5" for k, o in enumerate(operands)]
    space = {f"a{k}": flag if o == "bool" else tile for k, o in enumerate(operands)}
    eval(template.format(*names), {"tl": Language(counts), **space})
    return counts["operations"]

"""Captures a point-wise function: it is called once, with proxies that write down what is done with them.

A proxy knows its shape, strides and dtype, because each operator is also done on a tensor without data; so
broadcasting and type promotion are torch's own. In-place operators change which value a proxy stands for:
the graph stays pure, and what became of an input is written back at the end.
"""

import numbers
from dataclasses import dataclass, field

import torch

from course_lib.fusion.codegen import (
    COMPARES,
    DTYPES,
    LOGICAL,
    TRITON,
    check_power,
    unknown,
)
from course_lib.fusion.graph import CannotCapture, CannotFuse, Graph, torch_op

OTHER_NAMES = {
    "multiply": "mul", "subtract": "sub", "divide": "div", "true_divide": "div", "truediv": "div",
    "negative": "neg", "absolute": "abs", "greater": "gt", "greater_equal": "ge", "less": "lt",
    "less_equal": "le", "not_equal": "ne", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor",
    "invert": "bitwise_not", "fill": "fill", "special_erf": "erf", "clip": "clamp", "hardtanh": "hardtanh",
}  # fmt: skip
READS = {
    "item",
    "tolist",
    "numpy",
    "cpu",
    "__array__",
    "nonzero",
    "__len__",
    "allclose",
    "equal",
    "is_nonzero",
}
VIEWS = {
    "view", "reshape", "expand", "expand_as", "broadcast_to", "squeeze", "unsqueeze", "t", "transpose",
    "permute", "flatten", "__getitem__", "chunk", "split", "select", "narrow", "unbind", "view_as",
    "reshape_as", "movedim", "swapaxes", "diagonal", "T", "mT", "H", "mH", "ravel", "unflatten",
    "broadcast_tensors", "real",
}  # fmt: skip
CASTS = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16, "double": torch.float64,
         "int": torch.int32, "long": torch.int64, "bool": torch.bool}  # fmt: skip
KNOWS = ("shape", "dtype", "ndim", "layout", "is_cuda", "is_cpu", "itemsize")
ASKS = {"size", "dim", "numel", "nelement", "stride", "element_size", "is_floating_point", "is_complex",
        "is_contiguous", "ndimension"}  # fmt: skip


@dataclass
class Captured:
    """A captured function.

    `returns` says of each tensor that it returns ("input", k) or ("output", k); `kind` is torch.Tensor, tuple
    or list. `written` has for each output of the graph the input into whose memory it goes, or None.
    """

    graph: Graph
    kind: type
    returns: list = field(default_factory=list)
    written: list = field(default_factory=list)


def capture(fn, args):
    """`fn` as a `Captured`: `args` are tensors (of which only shape, strides and dtype are looked at; the
    same object twice is one input) and numbers.

    Raises `CannotCapture` where `fn` asks for values, `CannotFuse` where it does what the fuser doesn't know
    or what torch refuses.
    """
    graph, proxies = Graph(), {}
    given = []
    for a in args:
        if isinstance(a, torch.Tensor):
            if id(a) not in proxies:
                like = torch.empty_strided(a.shape, a.stride(), dtype=_known(a.dtype), device="meta")
                proxies[id(a)] = Proxy(graph, graph.input(like), len(graph.inputs) - 1, a.device)
            given.append(proxies[id(a)])
        else:
            given.append(a)
    inputs = list(graph.inputs)
    out = fn(*given)
    several = isinstance(out, tuple | list)
    found = Captured(graph, (list if isinstance(out, list) else tuple) if several else torch.Tensor)
    stored = {}
    for value in out if several else [out]:
        if not isinstance(value, Proxy):
            raise CannotCapture(
                f"the function returned a {type(value).__name__}, where a fused function returns "
                "a tensor or a tuple of tensors"
            )
        if value.graph is not graph:
            raise CannotCapture("the function returned a tensor of another capture: keep none between calls")
        if value.number is not None:
            found.returns.append(("input", value.number))
            continue
        if id(value) not in stored:
            stored[id(value)] = len(graph.outputs)
            graph.outputs.append(value.node)
            found.written.append(None)
        found.returns.append(("output", stored[id(value)]))
    for proxy in proxies.values():
        if proxy.node is not inputs[proxy.number]:
            graph.outputs.append(proxy.node)
            found.written.append(proxy.number)
    return found


def _known(dtype):
    if dtype not in DTYPES:
        names = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        raise CannotFuse(f"the fuser doesn't know {dtype} tensors: it knows {names}, so convert first")
    return dtype


class Proxy:
    """Stands for a tensor. `node` is its present value; `number` is that of the input whose memory it is, or
    None."""

    def __init__(self, graph, node, number=None, device=None):
        self.graph, self.node, self.number, self.device = graph, node, number, device

    def __repr__(self):
        return f"<{str(self.dtype).removeprefix('torch.')} tensor of shape {list(self.shape)} being captured>"

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", str(func))
        if name == "__get__":  # a property, torch.Tensor.shape.__get__
            return getattr(args[0], func.__self__.__name__)
        proxy = next((a for a in _flat(args, kwargs) if isinstance(a, Proxy)), None)
        return proxy.do(name, *args, **(kwargs or {}))

    def __getattr__(self, name):
        if name in KNOWS:
            return getattr(self.node.like, name)
        if name in VIEWS:
            refuse_view(name)
        if name == "requires_grad":
            return False
        if name in ASKS:
            return getattr(self.node.like, name)
        if name.startswith("__") or not hasattr(torch.Tensor, name):
            raise AttributeError(f"a tensor has no attribute {name!r}")
        if name == "where":  # the method's order is another than the function's
            return lambda condition, other: self.do(name, condition, self, other)
        return lambda *args, **kwargs: self.do(name, self, *args, **kwargs)

    def do(self, name, *args, **kwargs):
        "Write down the call of torch's function or method `name`."
        if name in READS:
            asks_for_values(name)
        if name in VIEWS:
            refuse_view(name)
        if kwargs.pop("out", None) is not None:
            raise CannotFuse("the fuser doesn't know out=: let the function return its result")
        for a in _flat(args, kwargs):
            if isinstance(a, torch.Tensor):
                raise CannotCapture(
                    f"{name} uses a tensor of shape {list(a.shape)} that is not an argument of the function: "
                    "pass it as an argument"
                )
            if isinstance(a, Proxy) and a.graph is not self.graph:
                raise CannotCapture(f"{name} uses a tensor of another capture: pass it as an argument")
        base = name.strip("_")
        in_place = name.endswith("_") and not name.endswith("__")
        if name.startswith("__") and base[:1] == "i" and base[1:] in IN_PLACE:
            base, in_place = base[1:], True
        if name.startswith("__") and base[:1] == "r" and base[1:] in REFLECTED:
            base, args = base[1:], (args[1], args[0])
        inplace_flag = kwargs.pop("inplace", False)
        base = OTHER_NAMES.get(base, base)
        if in_place or inplace_flag:
            return self._in_place(base, name, args, kwargs)
        return self._made(base, args, kwargs)

    def _made(self, base, args, kwargs):
        from course_lib.fusion import torch_operators as fusion_operators

        rule = fusion_operators.RULES.get(base)
        if rule is None and base not in TRITON and base != "pow":
            raise unknown(base)
        try:
            return rule(self, *args, **kwargs) if rule else self.op(base, *args, **kwargs)
        except TypeError as e:
            if isinstance(e, CannotCapture):
                raise
            raise CannotFuse(
                f"{base} was called in a way the fuser doesn't know ({e}): use its plain form"
            ) from None

    def _in_place(self, base, name, args, kwargs):
        target = args[0]
        if not isinstance(target, Proxy):
            raise unknown(name)
        if base == "zero":
            base, args = "fill", (target, 0)
        value = self._made("copy" if base == "copy" else base, args, kwargs)
        like = target.node.like
        if value.shape != like.shape:
            raise CannotFuse(
                f"{name} would give a tensor of shape {list(value.shape)}, and changes one of shape "
                f"{list(like.shape)} in place: write the result to a new tensor"
            )
        if base not in ("copy", "fill") and not torch.can_cast(value.dtype, like.dtype):
            raise CannotFuse(
                f"{name} gives {_short(value.dtype)}, which a {_short(like.dtype)} tensor can't hold: "
                "write the result to a new tensor"
            )
        if value.dtype != like.dtype:
            value = value.op("to", value, like.dtype)
        if value.node.like.stride() == like.stride():
            target.node = value.node
        else:  # the memory keeps its strides
            target.node = target.graph.add("clone", value.node, like=like)
        return target

    def op(self, op, *args):
        "A new value: the operator of proxies and numbers."
        for a in args:
            if not isinstance(a, Proxy | numbers.Number | torch.dtype):
                raise TypeError(f"an argument is a {type(a).__name__}")
        nodes = [a.node if isinstance(a, Proxy) else a for a in args]
        likes = [a.node.like if isinstance(a, Proxy) else a for a in args]
        if op == "pow":
            if isinstance(args[1], Proxy) or not isinstance(args[0], Proxy):
                raise CannotFuse(
                    "the fuser knows powers of a tensor by a number only: write a ** b as "
                    "torch.exp(b * torch.log(a))"
                )
            check_power(args[1], not likes[0].is_floating_point())
        try:
            like = torch_op(op)(*likes)
        except (RuntimeError, TypeError, IndexError) as e:
            raise CannotFuse(_torchs_own(op, likes, e)) from None
        _known(like.dtype)
        if like.dtype == torch.bool and op not in COMPARES | LOGICAL | BOOLEAN:
            raise CannotFuse(f"the fuser doesn't know {op} of bool tensors: use & | ^ ~, or convert first")
        if op in LOGICAL and any(d.dtype != torch.bool for d in likes if isinstance(d, torch.Tensor)):
            nodes = [self.op("to", a, torch.bool).node if isinstance(a, Proxy) else a for a in args]
        if op == "pow" and args[1] == 0:
            return self.value("full", 1, like=like)
        return self.value(op, *nodes, like=like)

    def value(self, op, *args, like):
        "A new value of which everything is known."
        return Proxy(self.graph, self.graph.add(op, *args, like=like), device=self.device)

    def __bool__(self):
        raise CannotCapture(
            "`if` or `while` asks whether a tensor is true, and a graph has no values: write "
            "torch.where(condition, a, b)"
        )

    def __str__(self):
        asks_for_values("print")

    def __format__(self, spec):
        asks_for_values("print")

    def __iter__(self):
        refuse_view("iteration")

    def __len__(self):
        return self.shape[0] if self.shape else asks_for_values("len")

    def __contains__(self, other):
        asks_for_values("in")

    def __int__(self):
        asks_for_values("int")

    def __float__(self):
        asks_for_values("float")

    __index__ = __int__
    __hash__ = object.__hash__

    def __setitem__(self, key, value):
        raise CannotFuse("the fuser doesn't know x[…] = …: write torch.where(condition, a, b)")

    def __getitem__(self, key):
        refuse_view("x[…]")


IN_PLACE = {"add", "sub", "mul", "truediv", "pow", "and", "or", "xor"}
REFLECTED = {"add", "sub", "mul", "truediv", "pow", "and", "or", "xor"}
BOOLEAN = {"bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "isnan", "where", "clone", "to", "full",
           "masked_fill"}  # fmt: skip


def _operator(name):
    def method(self, *others):
        return self.do(name, self, *others)

    method.__name__ = name
    return method


for _name in ["neg", "abs", "invert", "lt", "le", "gt", "ge", "eq", "ne", "floordiv", "mod", "matmul",
              *IN_PLACE, *(f"i{n}" for n in IN_PLACE), *(f"r{n}" for n in REFLECTED), "pos", "rmatmul",
              "rfloordiv", "rmod", "lshift", "rshift"]:  # fmt: skip
    setattr(Proxy, f"__{_name}__", _operator(f"__{_name}__"))


def _flat(args, kwargs):
    for a in (*args, *(kwargs or {}).values()):
        yield from a if isinstance(a, tuple | list) else (a,)


def _short(dtype):
    return str(dtype).removeprefix("torch.")


def _torchs_own(op, likes, error):
    shapes = [list(a.shape) for a in likes if isinstance(a, torch.Tensor)]
    try:
        torch.broadcast_shapes(*shapes)
    except RuntimeError:
        return f"{op} of shapes {' and '.join(map(str, shapes))}: they don't broadcast"
    return f"torch refuses {op} here: {str(error).splitlines()[0]}"


def asks_for_values(name):
    raise CannotCapture(
        f"`{name}` asks for the values of a tensor, and a captured function has none: call it "
        "outside the fused function"
    )


def refuse_view(name):
    raise CannotFuse(f"the fuser doesn't know views ({name}): pass the view as an argument of the function")

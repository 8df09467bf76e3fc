"Random point-wise programs for the fuser's property test: drawn from a seed, run by eager and in float64."

import random
from dataclasses import dataclass

import torch
from torch.nn import functional as F

FLOATS = [torch.float32] * 4 + [torch.bfloat16, torch.bfloat16, torch.float16]
UNARY = {
    "neg": lambda a: -a,
    "abs": torch.abs,
    "exp": lambda a: torch.exp(a.clamp(-4, 3)),
    "log": lambda a: torch.log(a.abs() + 0.5),
    "sqrt": lambda a: (a * a + 0.25).sqrt(),
    "rsqrt": lambda a: torch.rsqrt(a.abs() + 0.75),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda a: F.gelu(a, approximate="tanh"),
    "leaky_relu": lambda a: F.leaky_relu(a, 0.2),
    "square": torch.square,
    "pow": lambda a: a.clamp(-2, 2) ** 3,
    "reciprocal": lambda a: (a * a + 1).reciprocal(),
    "rdiv": lambda a: 1.5 / (2 + a.abs()),
    "rsub": lambda a: 0.75 - a,
    "number": lambda a: a * 0.5 + 2,
    "clamp": lambda a: a.clamp(min=-0.7, max=0.9),
    "masked_fill": lambda a: a.masked_fill(a > 0.4, -0.5),
    "detach": lambda a: a.detach(),
    "clone": lambda a: a.clone(),
    "zeros": lambda a: a + torch.zeros_like(a),
}
WHOLE = {
    "neg": lambda a: -a,
    "abs": torch.abs,
    "number": lambda a: a * 3 - 2,
    "rsub": lambda a: 7 - a,
    "clamp": lambda a: a.clamp(-5, 5),
    "relu": torch.relu,
    "square": lambda a: a.clamp(-9, 9) ** 2,
}
BINARY = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a.clamp(-9, 9) * b,
    "div": lambda a, b: a / (b.abs() + 1),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "where": lambda a, b: torch.where(a > b, a, b * 0.5),
    "where_number": lambda a, b: torch.where((a <= 0.3) & (b > -0.5), 1, a),
    "alpha": lambda a, b: torch.add(a, b, alpha=2),
    "addcmul": lambda a, b: torch.addcmul(a, a, b, value=0.5),
    "compare": lambda a, b: (a < b).to(a.dtype) + a,
}
WHOLE_BINARY = ("add", "sub", "maximum", "minimum")
IN_PLACE = {
    "add_": lambda a, b: a.add_(b),
    "mul_": lambda a, b: a.mul_(0.5),
    "sub_": lambda a, b: a.sub_(b, alpha=0.5),
    "copy_": lambda a, b: a.copy_(b),
    "clamp_": lambda a, b: a.clamp_(-1, 1),
    "tanh_": lambda a, b: a.tanh_(),
    "fill_": lambda a, b: a.fill_(0.25),
}


@dataclass
class Program:
    """Steps (kind, name, operands): operands are numbers of values, the inputs first.

    `made` are the inputs' makers; `duplicates` says which input is another, passed once more.
    """

    seed: int
    inputs: list  # (shape, dtype, layout)
    twice: int | None  # this input is passed a second time, as the last argument
    steps: list
    results: list

    @property
    def count(self):
        "How many values there are, the inputs among them."
        return len(self.inputs) + (self.twice is not None) + len(self.steps)

    def tensors(self):
        g = torch.Generator().manual_seed(self.seed)
        made = [_tensor(g, *what) for what in self.inputs]
        return made + ([made[self.twice]] if self.twice is not None else [])

    def __call__(self, *values):
        return self.run(values, lambda x, dtype: x.to(dtype))

    def run(self, values, cast):
        values = list(values)
        for kind, name, operands in self.steps:
            given = [values[k] for k in operands]
            if kind == "cast":
                values.append(cast(given[0], name))
            else:
                values.append(TABLES[kind][name](*given))
        return tuple(values[k] for k in self.results)

    def exactly(self, tensors):
        "The same in float64: rounded only where the program casts."
        wide = [t.double() if t.is_floating_point() else t.clone() for t in tensors]
        if self.twice is not None:
            wide[-1] = wide[self.twice]

        def cast(x, dtype):
            x = x.to(dtype)
            return x.double() if dtype.is_floating_point else x

        return self.run(wide, cast), wide

    def __str__(self):
        lines = [f"in{k}: {str(d)[6:]} {list(s)} {layout}" for k, (s, d, layout) in enumerate(self.inputs)]
        n = len(self.inputs) + (self.twice is not None)
        lines += [f"v{n + k} = {name} of {operands}" for k, (_, name, operands) in enumerate(self.steps)]
        return "\n".join([*lines, f"returns {self.results}, twice {self.twice}"])


TABLES = {"unary": UNARY, "binary": BINARY, "whole": WHOLE, "whole_binary": BINARY, "in_place": IN_PLACE}


def _tensor(g, shape, dtype, layout):
    "A tensor of a shape whose memory is laid out in one of several ways."
    if layout == "transposed":
        return _filled(g, shape[::-1], dtype).permute(*range(len(shape))[::-1])
    if layout == "sliced":
        return _filled(g, [2 * n + 1 for n in shape], dtype)[tuple(slice(1, 1 + 2 * n, 2) for n in shape)]
    if layout == "expanded":
        return _filled(g, (*shape[:-1], 1), dtype).expand(shape)
    if layout == "shifted":
        size = 3 + max(1, int(torch.tensor(shape).prod()))
        return _filled(g, (size,), dtype)[3:].as_strided(shape, torch.empty(shape).stride())
    return _filled(g, shape, dtype)


def _filled(g, shape, dtype):
    if dtype.is_floating_point:
        return torch.randn(list(shape), generator=g).to(dtype)
    return torch.randint(-9, 9, list(shape), generator=g).to(dtype)


def draw(seed):
    "The program of a seed."
    r = random.Random(seed)
    dims = [r.randrange(1, 6) for _ in range(r.choice([1, 2, 2, 2, 3]))]
    if seed % 40 == 7:
        dims[0] = 0
    inputs = [_input(r, dims, k) for k in range(r.randrange(1, 5))]
    twice = r.randrange(len(inputs)) if seed % 6 == 1 else None
    program = Program(seed, inputs, twice, [], [])
    values = [t.to("meta") for t in program.tensors()]
    for _ in range(r.randrange(1, 9)):
        step = _step(r, values, inputs, twice, in_place=seed % 5 == 2)
        if step is None:
            continue
        kind, name, operands = step
        try:
            metas = [values[k] for k in operands]
            values.append(metas[0].to(name) if kind == "cast" else TABLES[kind][name](*metas))
        except RuntimeError:  # an in-place operator that torch refuses
            continue
        program.steps.append(step)
    first = len(values) - len(program.steps)
    made = list(range(first, len(values))) or [0]
    program.results = [made[-1], *r.sample(made, min(len(made), r.choice([0, 0, 1, 2])))]
    return program


def _input(r, dims, k):
    shape = tuple(dims)
    if k:
        shape = tuple(n if r.random() < 0.6 else 1 for n in dims)
        shape = shape[r.choice([0, 0, 0, 1, len(dims)]) :]
    dtype = r.choice(FLOATS) if k == 0 or r.random() < 0.85 else torch.int64
    layouts = ["plain"] * 4 + ["shifted"] + (["transposed", "sliced", "expanded"] if len(shape) > 1 else [])
    return shape, dtype, r.choice(layouts)


def _step(r, values, inputs, twice, in_place):
    a, b = r.randrange(len(values)), r.randrange(len(values))
    a = r.choice([a, len(values) - 1])
    whole = not values[a].is_floating_point()
    if in_place and r.random() < 0.5 and not whole:
        origin = twice if a == len(inputs) and twice is not None else a
        if origin < len(inputs) and (inputs[origin][2] == "expanded" or inputs[origin][0] != inputs[0][0]):
            return None  # eager refuses the first, the fuser may refuse the second
        return "in_place", r.choice(list(IN_PLACE)), (a, b)
    if values[a].dtype == torch.bool or values[b].dtype == torch.bool:
        return None
    if r.random() < 0.12:
        return "cast", r.choice([torch.float32, torch.bfloat16, torch.float16, torch.int64]), (a,)
    if r.random() < 0.5:
        return ("whole", r.choice(list(WHOLE)), (a,)) if whole else ("unary", r.choice(list(UNARY)), (a,))
    if whole:
        return "whole_binary", r.choice(WHOLE_BINARY), (a, b)
    return "binary", r.choice(list(BINARY)), (a, b)

"""Four generations of framework, each as small as it can be, and one program written for all four.

    y = tanh(x @ w + b) * sigmoid(x @ v)

Declarative (Caffe, 2013): a program is data, a list of layers by name. Graph builder (TensorFlow 1, 2015):
a program in Python builds a graph, which a session runs later. Eager (PyTorch, 2017): Python is the program,
and each operator runs when its line does. Capture (torch.compile, jax.jit): Python is the program, and the
graph is found from it, here by running it once with stand-ins that write down what is done with them.
"""

import torch

# --- 1. Declarative: the program is data --------------------------------------------


LAYERS = {
    "InnerProduct": lambda params, x: x @ params["weight"] + params.get("bias", 0.0),
    "TanH": lambda params, x: torch.tanh(x),
    "Sigmoid": lambda params, x: torch.sigmoid(x),
    "Product": lambda params, a, b: a * b,
}

DECLARED = """
layer { name: h   type: InnerProduct  bottom: x          weight: w  bias: b }
layer { name: t   type: TanH          bottom: h }
layer { name: k   type: InnerProduct  bottom: x          weight: v }
layer { name: s   type: Sigmoid       bottom: k }
layer { name: y   type: Product       bottom: t  bottom: s }
"""


def parse(text):
    "The layers of a description, as a list of dicts of lists: a key may come more than once."
    layers = []
    for line in filter(None, map(str.strip, text.splitlines())):
        kind, _, rest = line.partition("{")
        if kind.strip() != "layer" or not rest.endswith("}"):
            raise ValueError(f"expected `layer {{ … }}`, got {line!r}")
        words, fields = rest[:-1].split(), {}
        for key, value in zip(words[::2], words[1::2], strict=True):
            fields.setdefault(key.rstrip(":"), []).append(value)
        layers.append(fields)
    return layers


def run_declared(text, blobs):
    """Run a description: `blobs` has inputs and weights by name; returns the last layer's result.

    What is not in LAYERS can't be said: a new layer is a change to the framework.
    """
    blobs = dict(blobs)
    for layer in parse(text):
        name, kind = layer["name"][0], layer["type"][0]
        if kind not in LAYERS:
            raise ValueError(f"layer {name} is of type {kind}; the framework has {', '.join(LAYERS)}")
        params = {key: blobs[layer[key][0]] for key in ("weight", "bias") if key in layer}
        blobs[name] = LAYERS[kind](params, *(blobs[b] for b in layer["bottom"]))
    return blobs[name]


# --- 2. Graph builder: the program builds a graph, a session runs it ----------------


class Symbol:
    "A value that a session will compute: an operator and the symbols that it needs."

    def __init__(self, op, *sources):
        self.op, self.sources = op, sources

    def __add__(self, other):
        return Symbol(torch.add, self, other)

    def __mul__(self, other):
        return Symbol(torch.mul, self, other)

    def __matmul__(self, other):
        return Symbol(torch.matmul, self, other)

    def __repr__(self):
        return f"Symbol({getattr(self.op, '__name__', self.op)})"  # there is no value to show


def placeholder(name):
    "A symbol that is fed when the session runs."
    return Symbol(name)


def tanh(x):
    return Symbol(torch.tanh, x)


def sigmoid(x):
    return Symbol(torch.sigmoid, x)


def cond(test, yes, no):
    "Python's `if` runs while the graph is built and sees no value: a branch must be a node."
    return Symbol(torch.where, test, yes, no)


class Session:
    "Runs a graph: computes what is asked for, each symbol once."

    def run(self, fetch, feed):
        "The value of the symbol `fetch`; `feed` has the tensors by placeholder's name."
        values = {}

        def value(symbol):
            if not isinstance(symbol, Symbol):
                return symbol
            if id(symbol) not in values:
                if isinstance(symbol.op, str):
                    if symbol.op not in feed:
                        raise ValueError(f"placeholder {symbol.op} was not fed")
                    values[id(symbol)] = feed[symbol.op]
                else:
                    values[id(symbol)] = symbol.op(*map(value, symbol.sources))
            return values[id(symbol)]

        return value(fetch)


def build():
    "The program as a graph; nothing is computed."
    x, w, b, v = map(placeholder, "xwbv")
    return tanh(x @ w + b) * sigmoid(x @ v)


# --- 3. Eager: the program runs, an operator at each line ---------------------------


class Eager:
    "A tensor whose operators run at once, and are written on a tape for the way back."

    def __init__(self, value, back=()):
        self.value, self.back, self.grad = (
            value,
            back,
            None,
        )  # back: (source, how its gradient comes from ours)

    def __add__(self, other):
        return Eager(self.value + other.value, ((self, lambda g: g), (other, lambda g: g)))

    def __mul__(self, other):
        a, b = self.value, other.value
        return Eager(a * b, ((self, lambda g: g * b), (other, lambda g: g * a)))

    def __matmul__(self, other):
        a, b = self.value, other.value
        return Eager(a @ b, ((self, lambda g: g @ b.mT), (other, lambda g: a.mT @ g)))

    def tanh(self):
        t = torch.tanh(self.value)
        return Eager(t, ((self, lambda g: g * (1 - t * t)),))

    def sigmoid(self):
        s = torch.sigmoid(self.value)
        return Eager(s, ((self, lambda g: g * s * (1 - s)),))

    def backward(self):
        "Gradients of the sum of this tensor, left in `grad` of all that it came from."
        order, seen = [], set()

        def visit(t):
            if id(t) not in seen:
                seen.add(id(t))
                for source, _ in t.back:
                    visit(source)
                order.append(t)

        visit(self)
        self.grad = torch.ones_like(self.value)
        for t in reversed(order):
            for source, rule in t.back:
                g = rule(t.grad).sum_to_size(source.value.shape)
                source.grad = g if source.grad is None else source.grad + g


def program(x, w, b, v):
    "The program, as one writes it in an eager framework. Capture runs this same text."
    return (x @ w + b).tanh() * (x @ v).sigmoid()


# --- 4. Capture: the same program, run once with stand-ins --------------------------


def captured():
    "The graph of `program`, captured by `fusion_small`: nobody built it."
    from course_lib.fusion import small as fusion_small

    return fusion_small.capture(program, 4)


def all_four(x, w, b, v):
    "The program's result by each generation, by name."
    named = {"x": x, "w": w, "b": b, "v": v}
    return {
        "declarative": run_declared(DECLARED, named),
        "graph builder": Session().run(build(), named),
        "eager": program(*map(Eager, (x, w, b, v))).value,
        "capture": captured().run(x, w, b, v)[0],
    }

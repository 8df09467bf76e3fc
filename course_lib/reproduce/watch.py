"""What a cell's run has really changed: variables bound anew, or changed in place, seen from outside."""

import hashlib
import random
import sys
import textwrap
import time
import types

from course_lib.reproduce import cells
from course_lib.reproduce.names import read, seeds


class Watch:
    "The history of cell runs in one namespace: call `before`, run the cell, call `after`."

    def __init__(self, namespace):
        self.namespace = namespace
        self.history, self.when = [], {}
        self._prints = {}

    def before(self):
        self._prints = fingerprints(self.namespace)

    def after(self, id, source, number):
        "Add a run to the history and return it: its names by its source, and by what has really changed."
        cell = read(id, source, number)
        old, new = self._prints, fingerprints(self.namespace)
        set_ = {n for n in cell.defines if n in new}
        rebound = {n for n in new if n not in old or new[n][0] != old[n][0]}
        rebound -= {n for n in rebound - set_ if _imported(self.namespace.get(n))}
        # The same object with another content: x.append, optimizer.step, a function that fills its argument.
        inside = {n for n in new if n in old and new[n][0] == old[n][0] and new[n] != old[n]}
        uses = set(cell.uses) | inside
        if cells.RANDOM in inside and seeds(source):
            uses.discard(cells.RANDOM)
        cell = cell._replace(uses=frozenset(uses), defines=frozenset(set_ | rebound | inside))
        self.history.append(cell)
        self.when[id] = time.time()
        return cell

    def latest(self):
        "The latest run of each cell, in the order in which cells first ran."
        found = {}
        for cell in self.history:
            found[cell.id] = cell
        return list(found.values())


# What changed


def fingerprints(namespace):
    "{name: (identity, content)} of a notebook's variables; content only where it is cheap to see."
    found = {}
    for name, value in list(namespace.items()):
        if name.startswith("_") or name in ("In", "Out", "get_ipython", "exit", "quit", "open"):
            continue
        try:
            found[name] = (id(value), _content(value))
        except Exception:  # an object that can't be looked at is known by its identity
            found[name] = (id(value), None)
    found[cells.RANDOM] = (0, _random_state())
    return found


def _content(value, depth=1):
    if isinstance(value, types.ModuleType | types.FunctionType | type | str | int | float):
        return None
    kind = _kind(value)
    if kind == "tensor":
        # torch counts the in-place changes of a tensor.
        return (id(value), value._version)
    if kind == "module":
        tensors = [*value.parameters(), *value.buffers()]
        return (value.training, *((id(t), t._version) for t in tensors))
    if kind == "array":
        return hash(value.tobytes()) if value.nbytes <= 1 << 20 and value.dtype != object else None
    if isinstance(value, list | tuple | set | frozenset | dict) and depth:
        items = [*value.keys(), *value.values()] if isinstance(value, dict) else list(value)
        if len(items) > 1000:
            return len(items)
        return tuple((id(x), _content(x, depth - 1)) for x in items)
    if depth and hasattr(value, "__dict__") and not callable(value):
        return tuple((k, id(v), _content(v, depth - 1)) for k, v in vars(value).items())
    return None


def _imported(value):
    "A module, or a function or class of one: the same whichever cell imported it."
    if isinstance(value, types.ModuleType):
        return True
    return (
        isinstance(value, type | types.FunctionType | types.BuiltinFunctionType)
        and value.__module__ != "__main__"
    )


def _kind(value):
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        return "tensor"
    if torch is not None and isinstance(value, torch.nn.Module):
        return "module"
    if numpy is not None and isinstance(value, numpy.ndarray):
        return "array"
    return None


def _random_state():
    "A digest of the global generators' states; the GPU's only once CUDA runs, since asking would start it."
    digest = hashlib.sha256(repr(random.getstate()).encode())
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if numpy is not None:
        digest.update(repr([str(x) for x in numpy.random.get_state()[2:]]).encode())
        digest.update(numpy.random.get_state()[1].tobytes())
    if torch is not None:
        digest.update(torch.get_rng_state().numpy().tobytes())
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            digest.update(torch.cuda.get_rng_state().numpy().tobytes())
    return digest.hexdigest()[:16]


# A notebook in miniature, for showing what the order of cells does


class Miniature:
    """A notebook of a few cells, run in any order: `Miniature({"rate": "lr = 0.1", …}).run("rate", …)`.

    Its namespace lives until `restart`. `run` takes ids in the order in which someone pressed the key.
    """

    def __init__(self, sources):
        self.sources = {id: _dedented(s) for id, s in sources.items()}
        self.restart()

    def restart(self):
        "A fresh kernel: no variable, no history."
        self.namespace = {"__builtins__": __builtins__}
        self.watch = Watch(self.namespace)
        self.count = 0
        return self

    def run(self, *ids):
        "Run cells by id, one after the other; returns self."
        for id in ids:
            if id not in self.sources:
                raise KeyError(f"there is no cell {id!r}; the cells are {', '.join(self.sources)}")
            self.count += 1
            self.watch.before()
            exec(compile(self.sources[id], f"<cell {id}>", "exec"), self.namespace)
            self.watch.after(id, self.sources[id], self.count)
        return self

    def run_all(self):
        "Restart the kernel and run every cell from top to bottom; returns self."
        self.restart()
        return self.run(*self.sources)

    def edit(self, id, source):
        "Change a cell's source without running it; returns self."
        self.sources[id] = _dedented(source)
        return self

    def __getitem__(self, name):
        return self.namespace[name]

    def history(self):
        "The runs so far, as `Cell`s."
        return list(self.watch.history)

    def cells(self):
        "The cells from top to bottom, as `Cell`s."
        ran = {c.id: c for c in self.watch.latest()}
        return [
            ran[id] if id in ran and ran[id].source == s else read(id, s) for id, s in self.sources.items()
        ]

    def origin(self, name):
        return cells.origin(name, self.history(), self.cells())


def _dedented(source):
    return textwrap.dedent(source).strip()

"""Where a notebook's result comes from: which cells made it, and whether a run from top to bottom would.

Every run of a cell gets a version: a digest of its source and of the versions of all that it used. A
result is what a run from top to bottom gives when its cell has the same version there. The idea is that
of build systems and of content-addressed storage: same inputs, same name.
"""

import ast
import functools
import hashlib
import re
from typing import NamedTuple

from course_lib.reproduce.names import Cell

RANDOM = "random numbers"  # the generators' state, handled as one more name


class Step(NamedTuple):
    "A cell in a replay: its version, and for each name used the step that made it."

    cell: Cell
    version: str
    inputs: dict


def replay(cells):
    "Run `cells` in thought, in this order: the list of their `Step`s."
    maker, later, steps = {}, {}, []
    for cell in cells:
        uses, todo = set(), list(cell.uses)
        while todo:
            name = todo.pop()
            if name not in uses:
                uses.add(name)
                todo += later.get(name, ())
        inputs = {name: maker[name] for name in sorted(uses) if name in maker}
        content = [meaning(cell.source), *((name, step.version) for name, step in inputs.items())]
        step = Step(cell, hashlib.sha256(repr(content).encode()).hexdigest()[:16], inputs)
        steps.append(step)
        for name in cell.defines:
            maker[name] = step
            later[name] = cell.later.get(name, ())
    return steps


def stale(history, notebook):
    """The ids of the cells whose latest result is not what a run of `notebook` from top to bottom gives.

    `history` and `notebook` are lists of `Cell`: the runs in their order, and the cells from top to bottom.
    """
    ran = {step.cell.id: step.version for step in replay(history)}
    would = {step.cell.id: step.version for step in replay(notebook)}
    return {id for id in ran if ran[id] != would.get(id)}


@functools.lru_cache(4096)
def meaning(source):
    "A cell's source without comments and layout, so that an edit of those is none."
    try:
        return ast.dump(ast.parse(source))
    except SyntaxError:
        return source


def why(ran, would, ordered=True):
    """Why a step of the history differs from the same cell's step from top to bottom: a sentence, or None.

    `would` is None where the notebook no longer holds the cell. Where the notebook's order is only guessed
    (`ordered` is False), a name that no cell above makes is no reason: its cell may well stand above.
    """
    if would is not None and ran.version == would.version:
        return None
    if would is None:
        return f"the cell of {label(ran.cell)} is no longer in the notebook"
    if meaning(ran.cell.source) != meaning(would.cell.source):
        again = f" and run again as In[{would.cell.number}]" if would.cell.number > ran.cell.number else ""
        return f"the cell of {label(ran.cell)} has since been edited{again}"
    here = f"In[{ran.cell.number}]"
    for name in [*ran.inputs, *(n for n in would.inputs if n not in ran.inputs)]:
        was, then = ran.inputs.get(name), would.inputs.get(name)
        if was is not None and then is not None and was.version == then.version:
            continue
        if then is None and not ordered:
            continue
        if was is not None and then is not None and was.cell.id == then.cell.id:
            return (
                why(was, then, ordered) or f"{here} used `{name}` of {label(was.cell, name)}, made otherwise"
            )
        if name == RANDOM:
            after = f"after {label(was.cell)} had drawn some" if was else "before another cell had"
            return f"{here} drew random numbers {after}, not so from top to bottom: seed in the cell itself"
        if was is not None and was.cell.id == ran.cell.id:
            return f"{here} went on from `{name}` as the same cell had left it in In[{was.cell.number}]"
        if was is None:
            return f"{here} used a `{name}` from before the guard; now it is that of {label(then.cell, name)}"
        if then is None:
            return (
                f"{here} used `{name}` of {label(was.cell, name)}; from top to bottom no cell above makes it"
            )
        return (f"{here} used `{name}` of {label(was.cell, name)}; "
                f"from top to bottom it is that of {label(then.cell, name)}")  # fmt: skip
    return None


def label(cell, name=None):
    "A cell as a reader finds it: its number, and its first line (the first that speaks of `name`)."
    lines = [
        line.strip()
        for line in cell.source.splitlines()
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if name:
        lines = [line for line in lines if re.search(rf"\b{re.escape(name)}\b", line)] or lines
    first = lines[0] if lines else ""
    first = first if len(first) <= 40 else first[:39] + "…"
    return f"In[{cell.number}] (`{first}`)" if cell.number else f"the cell `{first}`"


class Origin(NamedTuple):
    "The steps that made a name's value, in order, and why top to bottom differs (None: it does not)."

    name: str
    steps: list
    reason: str | None
    ordered: bool = True

    def __str__(self):
        if not self.steps:
            return f"`{self.name}`: {self.reason}"
        n = len(self.steps)
        lines = [f"`{self.name}` comes from {n} cell run{'s' * (n > 1)}:"]
        lines += [f"  {label(step.cell)}" for step in self.steps]
        if self.reason is None:
            lines.append("A run from top to bottom gives the same.")
        else:
            lines.append(f"A run from top to bottom gives another: {self.reason}.")
        if not self.ordered:
            lines.append(
                "(The notebook's file is not known here: its order is taken to be that of first runs.)"
            )
        return "\n".join(lines)

    __repr__ = __str__


def origin(name, history, notebook, ordered=True):
    "The `Origin` of `name` after the runs in `history`, for the cells of `notebook` from top to bottom."
    steps = replay(history)
    made = next((s for s in reversed(steps) if name in s.cell.defines), None)
    if made is None:
        return Origin(name, [], "no cell that ran since the guard was started defines it")
    needed, todo = [], [made]
    while todo:
        step = todo.pop()
        if not any(step is s for s in needed):
            needed.append(step)
            todo += step.inputs.values()
    chain = [s for s in steps if any(s is n for n in needed)]
    would = {s.cell.id: s for s in replay(notebook)}
    return Origin(name, chain, why(made, would.get(made.cell.id), ordered), ordered)

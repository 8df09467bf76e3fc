"""Which names a cell uses and which it defines, read from its source."""

import ast
import re
import symtable
import types
from typing import NamedTuple

_SEEDS = re.compile(r"\b\w*seed\w*\s*\(|\bmachine\.start\(")


class Cell(NamedTuple):
    """One run of a cell, or one cell of a notebook: its id, source, the names it uses and those it defines.

    A name that is changed in place is both. `later` holds, for functions, the names that their bodies use
    when they are called. `number` is the n of In[n]; 0 for a cell that has not run.
    """

    id: str
    source: str
    uses: frozenset
    defines: frozenset
    later: types.MappingProxyType = types.MappingProxyType({})
    number: int = 0


def read(id, source, number=0):
    "A `Cell` from its source alone: the names that it uses from outside, and those that it defines."
    reader = _Reader()
    try:
        reader.block(ast.parse(source).body)
    except SyntaxError:
        return Cell(id, source, frozenset(), frozenset(), number=number)
    return Cell(id, source, frozenset(reader.uses), frozenset(reader.defines),
                types.MappingProxyType(dict(reader.later)), number)  # fmt: skip


def seeds(source):
    "Does a cell set the seed, so that its random numbers don't depend on those drawn before?"
    return bool(_SEEDS.search(source))


class _Reader:
    "Walks statements in order: a name that is read before the cell has set it is a use."

    def __init__(self):
        self.uses, self.defines, self.known, self.later = set(), set(), set(), {}

    def block(self, statements):
        for s in statements:
            self.statement(s)

    def statement(self, s):
        handler = getattr(self, f"on_{type(s).__name__.lower()}", None)
        if handler:
            handler(s)
        else:
            self.expressions(s)

    def expressions(self, node):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.expression(child)

    def expression(self, e):
        if e is None:
            return
        for node in ast.walk(e):
            if isinstance(node, ast.NamedExpr):
                self.bind(node.target)
            if isinstance(node, ast.Call):
                self.magic(node)
        self.use(_global_names(e))

    def use(self, names):
        self.uses |= names - self.known

    def magic(self, call):
        "Code inside `%time` and `%%time`, which IPython passes on as text."
        f, a = call.func, call.args
        if isinstance(f, ast.Attribute) and f.attr in ("run_line_magic", "run_cell_magic") and len(a) > 1:
            texts = [x.value for x in a if isinstance(x, ast.Constant) and isinstance(x.value, str)]
            if texts and texts[0] in ("time", "timeit", "capture"):
                try:
                    self.block(ast.parse(texts[-1]).body)
                except SyntaxError:
                    return

    def define(self, name):
        self.defines.add(name)
        self.known.add(name)
        self.later.pop(name, None)

    def bind(self, target):
        if isinstance(target, ast.Name):
            self.define(target.id)
        elif isinstance(target, ast.Tuple | ast.List):
            for t in target.elts:
                self.bind(t)
        elif isinstance(target, ast.Starred):
            self.bind(target.value)
        else:  # x.a = …, x[i] = …: the thing called x is changed in place
            self.expression(target)
            while isinstance(target, ast.Attribute | ast.Subscript):
                target = target.value
            if isinstance(target, ast.Name):
                later = self.later.get(target.id)
                self.define(target.id)
                if later:
                    self.later[target.id] = later

    def on_assign(self, s):
        self.expression(s.value)
        for t in s.targets:
            self.bind(t)
            if isinstance(t, ast.Name):
                lambdas = [n for n in ast.walk(s.value) if isinstance(n, ast.Lambda)]
                if lambdas:
                    self.later[t.id] = frozenset().union(*(_global_names(n) for n in lambdas))

    def on_augassign(self, s):
        self.expression(s.value)
        base = s.target
        while isinstance(base, ast.Attribute | ast.Subscript):
            base = base.value
        if isinstance(base, ast.Name):
            self.use({base.id})
        self.bind(s.target)

    def on_annassign(self, s):
        self.expression(s.annotation)
        if s.value is not None:
            self.expression(s.value)
            self.bind(s.target)

    def on_for(self, s):
        self.expression(s.iter)
        self.bind(s.target)
        self.block(s.body + s.orelse)

    on_asyncfor = on_for

    def on_while(self, s):
        self.expression(s.test)
        self.block(s.body + s.orelse)

    def on_if(self, s):
        self.expression(s.test)
        before = set(self.known)
        self.block(s.body)
        one, self.known = self.known, set(before)
        self.block(s.orelse)
        both = one & self.known
        # Set in one branch only: the earlier value may live on.
        self.uses |= (one | self.known) - both - before
        self.known = one | self.known

    def on_with(self, s):
        for item in s.items:
            self.expression(item.context_expr)
            if item.optional_vars is not None:
                self.bind(item.optional_vars)
        self.block(s.body)

    on_asyncwith = on_with

    def on_try(self, s):
        self.block(s.body)
        for h in s.handlers:
            self.expression(h.type)
            self.block(h.body)
        self.block(s.orelse + s.finalbody)

    on_trystar = on_try

    def on_match(self, s):
        self.expression(s.subject)
        for case in s.cases:
            for node in ast.walk(case.pattern):
                name = getattr(node, "name", None) or getattr(node, "rest", None)
                if name:
                    self.define(name)
                elif isinstance(node, ast.expr):
                    self.expression(node)
            self.expression(case.guard)
            self.block(case.body)

    def on_import(self, s):
        for a in s.names:
            # Not a definition: a module is the same wherever it was imported.
            self.known.add(a.asname or a.name.partition(".")[0])

    on_importfrom = on_import

    def on_delete(self, s):
        for t in s.targets:
            self.bind(t)

    def on_functiondef(self, s):
        a = s.args
        for e in [*s.decorator_list, *a.defaults, *a.kw_defaults]:
            self.expression(e)
        self.define(s.name)
        self.later[s.name] = _global_names(s) - {s.name}

    on_asyncfunctiondef = on_functiondef

    def on_classdef(self, s):
        for e in [*s.decorator_list, *s.bases, *(k.value for k in s.keywords)]:
            self.expression(e)
        own = set()
        for inner in s.body:
            if not isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                self.use(_global_names(inner) - own)
                own |= read("", ast.unparse(inner)).defines
        self.define(s.name)
        self.later[s.name] = _global_names(s) - {s.name} - own


def _global_names(node):
    "Names that a piece of code reads from the notebook's globals, in its nested functions too."
    table = symtable.symtable(ast.unparse(node), "cell", "exec")
    found, todo = set(), [table]
    while todo:
        t = todo.pop()
        todo += t.get_children()
        top = t.get_type() == "module"
        found |= {s.get_name() for s in t.get_symbols() if s.is_referenced() and (top or s.is_global())}
    return frozenset(found)

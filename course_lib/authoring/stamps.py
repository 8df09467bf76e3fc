"""What a cell's recorded output depends on, as a hash a cell: read from the code, and nothing is executed.

A hash covers the cell's syntax tree, the hashes of the cells whose names it reads, and the functions and
classes of course_lib that it names, with what these read in their own file. Comments, docstrings, formatting
and imports that a cell does not use change nothing.
"""

import ast
import dis
import functools
import re
import types

from course_lib.authoring import notebook


class Names:
    "Names that code takes from outside (`reads`), binds (`defines`) and writes into (`changes`: x.a = 1)."

    def __init__(self, tree):
        self.reads, self.defines = _follow(compile(tree, "cell", "exec"))
        stores = (n for n in ast.walk(tree) if isinstance(getattr(n, "ctx", None), ast.Store))
        self.changes = {_root(n) for n in stores if not isinstance(n, ast.Name)} - {None}


def _follow(code):
    "(reads, defines) of bytecode, which is in the order of execution: `x = f(x)` loads x first."
    reads, defines, later = set(), set(), set()
    for i in dis.get_instructions(code):
        if i.opname == "STORE_NAME":
            defines.add(i.argval)
        elif i.opname in ("LOAD_NAME", "LOAD_GLOBAL"):
            reads |= {i.argval} - defines
        elif isinstance(i.argval, types.CodeType):
            inside, _ = _follow(i.argval)
            if i.argval.co_name.startswith("<"):  # a comprehension runs here, a function later
                reads |= inside - defines
            else:
                later |= inside
    return reads | (later - defines), defines


def imports(tree):
    "What import statements bind: {name: (a statement that binds it alone, its dotted path)}."
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and not getattr(node, "level", 0):
            module = getattr(node, "module", None)
            for a in node.names:
                text = f"import {a.name}" + (f" as {a.asname}" if a.asname else "")
                name = a.asname or a.name.split(".")[0]
                path = f"{module}.{a.name}" if module else a.name if a.asname else name
                found[name] = (f"from {module} {text}" if module else text, path)
    return found


def flow(nb):
    """The code cells in order, as (cell, tree, names, givers, imported).

    `names` is the cell's Names; `givers` says which earlier cell gave each name last, and `imported` which
    import. `tree` and `names` are None where a cell is no Python.
    """
    givers, imported = {}, {}
    for cell in nb["cells"]:
        if cell["cell_type"] != "code" or not notebook.source(cell).strip():
            continue
        try:
            tree = ast.parse(notebook.python(cell))
            names = Names(tree)
        except (SyntaxError, ValueError):
            yield cell, None, None, givers, imported
            continue
        new = imports(tree)
        imported = imported | new
        givers = {n: c for n, c in givers.items() if n not in new}
        yield cell, tree, names, givers, imported
        givers = givers | dict.fromkeys((names.defines - set(new)) | (names.changes - set(imported)), cell)


def _root(node):
    "`x` of x, x.a and x[0].a; None where it is no name."
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return getattr(node, "id", None)


def hashes(nb):
    "The hash of each code cell: {id: hash}."
    found = {}
    for cell, tree, names, givers, imported in flow(nb):
        if tree is None:
            found[cell["id"]] = notebook.digest(notebook.source(cell))
            continue
        needs = {found[givers[n]["id"]] for n in names.reads if n in givers}
        dotted = {ast.unparse(n) for n in ast.walk(tree) if isinstance(n, ast.Name | ast.Attribute)}
        chains = [name.partition(".") for name in dotted if re.fullmatch(r"[\w.]+", name)]
        paths = sorted(imported[root][1] + dot + rest for root, dot, rest in chains if root in imported)
        code = {k: v for path in paths for k, v in library(path).items()}
        found[cell["id"]] = notebook.digest([_plain(tree), sorted(needs), paths, sorted(code.items())])
    return found


def library(path):
    "The code behind a dotted path into course_lib, with what it reads in its own file: {path: code}."
    module, parts = path, []
    while module.startswith("course_lib.") and not (found := _definitions(notebook.ROOT, module)):
        module, _, last = module.rpartition(".")
        parts.insert(0, last)
    if not module.startswith("course_lib.") or not parts:
        return {}
    definitions, imported = found
    if parts[0] not in definitions and parts[0] in imported:
        return library(imported[parts[0]][1])
    code, todo = {}, [parts[0]]
    while todo:
        name = todo.pop()
        if name in definitions and f"{module}.{name}" not in code:
            code[f"{module}.{name}"] = [_plain(node) for node in definitions[name]]
            todo += [n.id for node in definitions[name] for n in ast.walk(node) if isinstance(n, ast.Name)]
    return code


@functools.cache
def _definitions(root, module):
    "({name: statements that define it}, imports) of a module by its file, or None."
    base = root.joinpath(*module.split("."))
    path = next((p for p in (base.with_suffix(".py"), base / "__init__.py") if p.is_file()), None)
    if path is None:
        return None
    tree, found = ast.parse(path.read_text(encoding="utf-8")), {}
    for node in tree.body:
        for name in Names(ast.Module([node], [])).defines:
            found.setdefault(name, []).append(node)
    imported = imports(tree)
    return {n: nodes for n, nodes in found.items() if n not in imported}, imported


def _plain(node):
    "A syntax tree as JSON, alike in every version of Python; without docstrings, imports and empty fields."
    if isinstance(node, list):
        return [_plain(n) for n in node if not isinstance(n, ast.Import | ast.ImportFrom)]
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = dict(ast.iter_fields(node))
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and ast.get_docstring(node):
        fields["body"] = node.body[1:]
    if isinstance(node, ast.JoinedStr):  # some versions add empty pieces
        fields["values"] = [v for v in node.values if getattr(v, "value", 1) != ""]
    for k in ("ctx", "kind", "type_comment"):
        fields.pop(k, None)
    return [type(node).__name__, {k: _plain(v) for k, v in fields.items() if v not in (None, [])}]

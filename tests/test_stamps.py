"What makes a recorded cell stale, and what does not."

import ast

import pytest
import small_course
from small_course import code

from course_lib.authoring import stamps

LIBRARY = {
    "rates.py": "import math\nfrom course_lib.other import shown\nPEAK = 3\n\n\ndef rate(x):\n    'Doc.'\n"
    "    return scaled(x)\n\n\ndef scaled(x):\n    return x * PEAK\n\n\ndef unused():\n    return 1\n",
    "other.py": "def shown(x):\n    return x\n",
    "toy/__init__.py": "def start():\n    pass\n",
    "toy/check.py": "def double(f):\n    return helper(f)\n\n\ndef helper(f):\n    return f\n",
}
CELLS = {
    "start": "from course_lib import rates, toy\nfrom course_lib.toy import check\ntoy.start()",
    "given": "x = 2  # a number",
    "answer": "def double(y):\n    return y + y",
    "check": "# NBVAL_CHECK_OUTPUT\ncheck.double(double)",
    "measure": "%%gpu its rate\nfor i in range(3):\n    took = rates.rate(x)\nprint(f'{took:.2f}')",
    "shown": "rates.shown([x for x in (1, 2)])",
    "table": "table = {}",
    "fill": "table['double'] = double(1)",
    "read": "def late():\n    return table, x\n\n\nlate()",
    "broken": "what is this",
}


@pytest.fixture
def change(tmp_path, monkeypatch):
    "Gives the cells whose hash differs after texts of cells, or of files of course_lib, were replaced."
    small_course.use(tmp_path, monkeypatch)

    def hashes(edits):
        for name, text in LIBRARY.items():
            path = tmp_path / "course_lib" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(edits.get(name, text))
        stamps._definitions.cache_clear()
        return stamps.hashes({"cells": [code(name, edits.get(name, text)) for name, text in CELLS.items()]})

    before = hashes({})

    def changed(name, old, new):
        text = (CELLS | LIBRARY)[name]
        assert old in text
        return {n for n, h in hashes({name: text.replace(old, new)}).items() if h != before[n]}

    return changed


@pytest.mark.parametrize(
    "name, old, new, stale",
    [
        ("given", "# a number", "", ""),
        ("given", "x = 2", "x = (\n    2\n)", ""),
        ("start", "rates, toy", "other, rates, toy", ""),
        ("measure", "%%gpu its rate", "%%gpu how fast it is", ""),
        ("rates.py", "'Doc.'", "'Another.'", ""),
        ("rates.py", "return 1", "return 2", ""),
        ("rates.py", "return scaled(x)", "return scaled( x )  # twice", ""),
        ("given", "2", "3", "given measure read"),
        ("answer", "y + y", "2 * y", "answer check fill read"),
        ("rates.py", "PEAK = 3", "PEAK = 4", "measure"),
        ("rates.py", "x * PEAK", "x / PEAK", "measure"),
        ("other.py", "return x", "return -x", "shown"),
        ("toy/check.py", "return f\n", "return f()\n", "check"),
        ("toy/__init__.py", "pass", "return 1", "start"),
        ("start", "import rates", "import other as rates", "measure shown"),
        ("fill", "double(1)", "double(2)", "fill read"),
        ("table", "{}", "dict()", "table fill read"),
        ("broken", "what", "who", "broken"),
    ],
)
def test_what_makes_a_cell_stale(change, name, old, new, stale):
    assert change(name, old, new) == set(stale.split())


@pytest.mark.parametrize(
    "text, reads, defines, changes",
    [
        ("x = f(x)", "f x", "x", ""),
        ("x = 1\nx += y", "y", "x", ""),
        ("x += 1", "x", "x", ""),
        ("for a in b:\n    print(a)", "b print", "a", ""),
        ("[a for a in b if c]", "b c", "", ""),
        ("c = 1\nd = {a: c for a in c}", "", "c d", ""),
        ("def f(a, b=c):\n    d = a\n    return d + e + f(a)", "c e", "f", ""),
        ("def f():\n    return e\n\n\ne = 1", "", "f e", ""),
        ("g = lambda a: a + b\nb = 1", "b", "g b", ""),
        ("class A(B):\n    c = 1\n\n    def f(self):\n        return self.c + d", "B d __name__", "A", ""),
        ("try:\n    import a.b\nexcept E as e:\n    print(e)", "E print", "a e", ""),
        ("with a as b:\n    b.c = d\ne[0].f = 1", "a d e", "b", "b e"),
    ],
)
def test_names_of_a_cell(text, reads, defines, changes):
    names = stamps.Names(ast.parse(text))
    assert (names.reads, names.defines) == (set(reads.split()), set(defines.split()))
    assert names.changes == set(changes.split())

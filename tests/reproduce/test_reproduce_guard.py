import json
import os
import time

import pytest
from IPython.core.interactiveshell import InteractiveShell
from jupyter_client.manager import KernelManager

from course_lib.reproduce import cells as reproduce_cells
from course_lib.reproduce import guard as reproduce_guard
from course_lib.reproduce import names as reproduce_names
from course_lib.reproduce import watch as reproduce_watch

# --- names in a cell's source -------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "uses", "defines"),
    [
        ("a = b + c", "bc", "a"),
        ("a = 1\nb = a", "", "ab"),
        ("b = a\na = 1", "a", "ab"),
        ("a += 1", "a", "a"),
        ("a[i] = v", "aiv", "a"),
        ("a.x.y = v", "av", "a"),
        ("a, (b, *c) = d", "d", "abc"),
        ("a: int = b", "int b", "a"),
        ("a: int", "int", ""),
        ("for i in r:\n    s = s + i\nelse:\n    t = i", "rs", "ist"),
        ("while a:\n    a = f(a)", "af", "a"),
        ("if a:\n    b = 1\nelse:\n    b = 2\nc = b", "a", "bc"),
        ("if a:\n    b = 1\nc = b", "ab", "bc"),
        ("with f(a) as g:\n    b = g", "fa", "gb"),
        ("try:\n    a = b\nexcept E as e:\n    a = c\nfinally:\n    d = a", "bEc", "ad"),
        ("import m\nfrom p import q as r\na = m.x + r", "", "a"),
        ("def f(x, y=d):\n    z = x + g\n    return z", "d", "f"),
        ("f = lambda x: x + k", "k", "f"),
        ("class C(B):\n    n = m\n    k = n\n    def f(self):\n        return g", "Bm", "C"),
        ("a = [x * k for x in xs if x]", "k xs", "a"),
        ("a = {x: y for x in b for y in x}", "b", "a"),
        ("(n := len(a))\nb = n", "len a", "nb"),
        (
            "match a:\n    case [x, *r] if x > k:\n        b = x\n    case {'k': v, **w}:\n        b = v",
            "ak",
            "xrvwb",
        ),
        ("del a", "", "a"),
        ("print(f'{a!r:>{w}}')", "print a w", ""),
        ("@d\ndef f():\n    pass", "d", "f"),
        ("async def f():\n    return a", "", "f"),
        ("a = b = c", "c", "ab"),
        ("global a\na = 1", "", "a"),
        ("lambda: a", "a", ""),
        ("x = (", "", ""),
    ],
)
def test_names_that_a_cell_uses_and_defines(source, uses, defines):
    def split(text):
        return set(text.split()) if " " in text else set(text)

    cell = reproduce_names.read("id", source)
    known = {"int", "len", "xs", "print"}
    uses = {n for word in uses.split() for n in ([word] if word in known else word)}
    assert set(cell.uses) == uses and set(cell.defines) == split(defines)


def test_a_functions_body_uses_names_when_it_is_called():
    cell = reproduce_names.read("id", "def f(x):\n    def g():\n        return k + x\n    return g() + f(h)")
    assert dict(cell.later) == {"f": {"k", "h"}}
    assert reproduce_names.read("id", "class C:\n    def f(self):\n        return k").later["C"] == {"k"}


def test_code_inside_a_time_magic_is_read():
    shell = InteractiveShell()
    cell = reproduce_names.read("id", shell.transform_cell("%%time\na = b"))
    assert "b" in cell.uses and cell.defines == {"a"}
    assert "c" in reproduce_names.read("id", shell.transform_cell("%time a = c")).uses


@pytest.mark.parametrize(
    ("source", "answer"),
    [("torch.manual_seed(0)", True), ("np.random.seed(1)", True), ("reproduce.seed_everything(2)", True),
     ("machine.start('04')", True), ("seed = 3", False), ("torch.rand(3)", False)],
)  # fmt: skip
def test_a_cell_that_seeds_is_recognised(source, answer):
    assert reproduce_names.seeds(source) is answer


# --- a notebook in miniature --------------------------------------------------------


def miniature(**cells):
    return reproduce_watch.Miniature(cells)


def reason(notebook, name):
    return notebook.origin(name).reason


def test_top_to_bottom_has_nothing_to_report():
    m = miniature(rate="lr = 0.5", data="xs = [1, 2]", fit="w = [lr * x for x in xs]", score="score = sum(w)")
    o = m.run_all().origin("score")
    assert [s.cell.id for s in o.steps] == ["rate", "data", "fit", "score"] and o.reason is None
    assert str(o).startswith("`score` comes from 4 cell runs:\n  In[1] (`lr = 0.5`)")
    assert str(o).endswith("A run from top to bottom gives the same.")
    m.run("rate", "score", "data")  # run again, and nothing changed by it
    assert reason(m, "score") is None


def test_an_edit_is_told_and_forgotten_once_all_that_hangs_on_it_ran():
    m = miniature(rate="lr = 0.5", other="n = 3", fit="w = 2 * lr", score="score = w + n").run_all()
    m.edit("rate", "lr = 0.1  # better")
    assert reason(m, "score") == "the cell of In[1] (`lr = 0.5`) has since been edited"
    m.run("rate")
    assert reason(m, "score") == "the cell of In[1] (`lr = 0.5`) has since been edited and run again as In[5]"
    assert reason(m, "n") is None
    m.run("score")
    assert "In[1] (`lr = 0.5`) has since been edited" in reason(m, "score")
    assert reason(m.run("fit", "score"), "score") is None
    m.edit("rate", "lr = 0.1")  # a comment is no edit
    assert reason(m, "score") is None


def test_a_cell_run_twice_on_its_own_result_is_told():
    m = miniature(start="n = 1", step="n += 1", use="m = n").run("start", "step", "step", "use")
    assert reason(m, "m") == "In[3] went on from `n` as the same cell had left it in In[2]"
    assert reason(m.run("start", "step", "use"), "m") is None


def test_a_cell_below_that_ran_before_is_told():
    m = miniature(a="lr = 1", fit="w = lr", b="lr = 2").run("a", "b", "fit")
    assert (
        reason(m, "w")
        == "In[3] used `lr` of In[2] (`lr = 2`); from top to bottom it is that of In[1] (`lr = 1`)"
    )


def test_a_name_of_a_deleted_cell_is_told():
    m = miniature(a="lr = 1", fit="w = lr").run_all()
    del m.sources["a"]
    assert reason(m, "w") == "In[2] used `lr` of In[1] (`lr = 1`); from top to bottom no cell above makes it"
    m = miniature(fit="w = 1").run_all()
    del m.sources["fit"]
    assert reason(m, "w") == "the cell of In[1] (`w = 1`) is no longer in the notebook"


def test_a_function_follows_the_names_in_its_body():
    m = miniature(f="def f(x):\n    return k * x", k="k = 2", call="y = f(3)").run_all()
    assert [s.cell.id for s in m.origin("y").steps] == ["f", "k", "call"]
    assert "In[2] (`k = 2`) has since been edited" in reason(m.edit("k", "k = 5").run("k"), "y")


def test_changes_in_place_are_seen_from_outside():
    m = miniature(
        data="import torch\nimport types\nxs = []\nw = torch.zeros(2)\ncfg = types.SimpleNamespace(lr=1)",
        model="net = torch.nn.Linear(1, 1)\nopt = torch.optim.SGD(net.parameters(), 0.1)",
        fill="def fill(x):\n    x.append(1)",
        train="fill(xs)\nw.add_(1)\ncfg.lr = 2\nnet(w[:1]).sum().backward()\nopt.step()",
        use="a = len(xs)",
    ).run_all()
    train = next(c for c in m.history() if c.id == "train")
    assert {"xs", "w", "cfg", "net"} <= train.defines and {"xs", "w", "cfg", "net"} <= train.uses
    assert reason(m, "a") is None
    assert (
        reason(m.run("train", "use"), "a") == "In[6] went on from `cfg` as the same cell had left it in In[4]"
    )


def test_importing_again_is_no_change():
    m = miniature(
        one="import math\nfrom math import sin\nlr = 1", two="import math\nx = sin(math.pi)"
    ).run_all()
    assert [s.cell.id for s in m.origin("x").steps] == ["two"]
    m.edit("one", "import math\nfrom math import sin\nlr = 2").run("one")
    assert reason(m, "x") is None


def test_random_numbers_are_a_name_too():
    m = miniature(
        seed="import torch\ntorch.manual_seed(0)", a="a = torch.rand(1)", b="b = torch.rand(1)"
    ).run_all()
    assert reason(m, "b") is None
    m.run("b")
    assert "In[4] drew random numbers after In[3]" in reason(m, "b")
    m.run("seed", "b")
    assert "drew random numbers after In[5]" in reason(m, "b") and "seed in the cell itself" in reason(m, "b")
    m = miniature(a="import torch\ntorch.manual_seed(0)\na = torch.rand(1)", b="b = a + 0").run(
        "a", "a", "b", "a"
    )
    assert reason(m, "b") is None


def test_an_unknown_name_is_said_to_be_unknown():
    m = miniature(a="x = 1").run_all()
    assert str(m.origin("y")) == "`y`: no cell that ran since the guard was started defines it"
    with pytest.raises(KeyError, match="there is no cell 'z'"):
        m.run("z")


def test_a_fingerprint_survives_objects_that_resist():
    class Wild:
        def __getattr__(self, name):
            raise RuntimeError(name)

    names = {
        "w": Wild(),
        "many": list(range(5000)),
        "f": print,
        "n": 1,
        "deep": {"a": [1]},
        "_hidden": 1,
        "In": [],
    }
    found = reproduce_watch.fingerprints(names)
    assert set(found) == {"w", "many", "f", "n", "deep", reproduce_cells.RANDOM}


# --- in IPython ---------------------------------------------------------------------


@pytest.fixture
def shell(monkeypatch):
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    shell = InteractiveShell()
    shell.user_ns["guard"] = lambda: reproduce_guard.guard(shell)
    yield shell
    reproduce_guard.unguard(shell)


def run(shell, *cells):
    "Run (id, source) cells as a front end does that names its cells."
    for id, source in cells:
        result = shell.run_cell(source, store_history=True, cell_id=id)
        assert result.error_in_exec is None or "expected" in str(result.error_in_exec)


def test_the_guard_speaks_once_and_only_when_it_matters(shell, capsys):
    run(shell, ("g", "guard()"), ("r", "lr = 0.5"), ("f", "w = 2 * lr"), ("s", "score = w + 1"))
    assert capsys.readouterr().out.startswith("The guard is on")
    run(shell, ("r", "lr = 0.1"))
    assert capsys.readouterr().out == ""
    run(shell, ("s", "score = w + 1"))
    assert (
        capsys.readouterr().out
        == "guard: the cell of In[2] (`lr = 0.5`) has since been edited and run again as In[5].\n"
    )
    run(shell, ("s", "score = w + 1"))
    assert capsys.readouterr().out == ""
    assert "edited" in reproduce_guard.origin("score", shell).reason
    run(shell, ("f", "w = 2 * lr"), ("s", "score = w + 1"))
    assert capsys.readouterr().out == ""
    assert reproduce_guard.origin("score", shell).reason is None
    run(shell, ("g", "guard()"))
    assert capsys.readouterr().out == "The guard is on already.\n"


def test_the_guard_takes_magics_errors_and_syntax_errors(shell, capsys):
    run(
        shell,
        ("g", "guard()"),
        ("t", "%time a = 1"),
        ("u", "b = a\nraise ValueError('expected')"),
        ("v", "c = b"),
    )
    shell.run_cell("x = (", store_history=True, cell_id="w")
    shell.run_cell("a = 5", store_history=False, cell_id="silent")
    assert "guard:" not in capsys.readouterr().out
    assert [s.cell.id for s in reproduce_guard.origin("c", shell).steps] == ["t", "u", "v"]


def test_without_cell_ids_the_guard_is_quiet_and_says_what_it_cannot_tell(shell, capsys):
    run(shell, (None, "guard()"), (None, "lr = 1"), (None, "w = lr"), (None, "lr = 2"), (None, "w = lr"))
    assert "guard:" not in capsys.readouterr().out
    assert "no cell ids here" in str(reproduce_guard.origin("w", shell))


def test_a_name_from_before_the_guard_is_left_alone(shell, capsys):
    run(shell, ("r", "lr = 1"), ("g", "guard()"), ("f", "w = lr"))
    assert reproduce_guard.origin("w", shell).reason is None
    run(shell, ("r", "lr = 2"), ("f", "w = lr"))
    assert "guard:" not in capsys.readouterr().out


def test_origin_without_a_guard_is_one_sentence(shell):
    with pytest.raises(RuntimeError, match=r"no guard is on: call guard\(\)"):
        reproduce_guard.origin("x", shell)
    for wrong in (3.5, "a + b"):
        with pytest.raises(ValueError, match=r"origin takes a name as text"):
            reproduce_guard.origin(wrong, shell)
    with pytest.raises(RuntimeError, match="found no IPython"):
        reproduce_guard.guard()


# --- the saved notebook gives the order ---------------------------------------------


def save(path, *cells, at=None):
    cells = [{"cell_type": "code", "id": id, "source": source, "metadata": {}} for id, source in cells]
    path.write_text(json.dumps({"cells": cells, "metadata": {}}))
    if at is not None:
        os.utime(path, (at, at))


def test_the_order_is_that_of_the_file(shell, tmp_path, monkeypatch, capsys):
    path = tmp_path / "a notebook.ipynb"
    g, r, f, extra = ("g", "guard()"), ("r", "lr = 1"), ("f", "w = lr"), ("e", "lr = 7")
    save(path, g, r, f, extra, at=1)
    monkeypatch.setenv("JPY_SESSION_NAME", str(path))
    run(shell, g, extra, r, f)  # the last cell first: harmless, since `r` came after it
    assert "guard:" not in capsys.readouterr().out
    run(shell, extra, f)
    assert (
        "In[6] used `lr` of In[5] (`lr = 7`); from top to bottom it is that of In[3] (`lr = 1`)"
        in capsys.readouterr().out
    )
    # Moved up, it is where it should be.
    save(path, g, r, extra, f, at=2)
    assert reproduce_guard.origin("w", shell).reason is None
    # A cell above that never ran would change `lr`.
    save(path, g, r, extra, ("n", "lr = 9"), f, at=3)
    assert "it is that of the cell `lr = 9`" in reproduce_guard.origin("w", shell).reason


def test_edits_and_deletions_on_disk_are_seen(shell, tmp_path, monkeypatch):
    path = tmp_path / "n.ipynb"
    g, r, f = ("g", "guard()"), ("r", "lr = 1"), ("f", "w = lr")
    save(path, g, r, f, at=1)
    monkeypatch.setenv("JPY_SESSION_NAME", str(path))
    run(shell, g, r, f)
    later = time.time() + 10
    save(path, g, ("r", "lr = 3"), f, at=later)
    assert reproduce_guard.origin("w", shell).reason == "the cell of In[2] (`lr = 1`) has since been edited"
    save(path, g, f, at=later)
    assert "no cell above makes it" in reproduce_guard.origin("w", shell).reason
    # An older file says nothing about a cell that is new since; a file of other cells says nothing at all.
    save(path, g, f, at=1)
    assert reproduce_guard.origin("w", shell).reason is None
    save(path, ("zzz", "lr = 8"), at=later)
    assert reproduce_guard.origin("w", shell).reason is None
    path.write_text("{")
    assert reproduce_guard.origin("w", shell).reason is None


# --- in a real kernel, with the ids that JupyterLab sends ---------------------------


def test_the_guard_in_a_real_kernel(tmp_path):
    path = tmp_path / "lesson.ipynb"
    source = "from course_lib.reproduce.guard import guard, origin\nguard()"
    cells = [
        ("g", source),
        ("r", "lr = 0.5"),
        ("f", "import random\nw = lr * random.random()"),
        ("o", "print(origin('w'))"),
    ]
    save(path, *cells, at=1)
    manager = KernelManager()
    manager.start_kernel(env=os.environ | {"JPY_SESSION_NAME": str(path)}, cwd=str(tmp_path))
    client = manager.client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=60)

        def ask(id, code):
            content = {"code": code, "silent": False, "store_history": True, "user_expressions": {},
                       "allow_stdin": False, "stop_on_error": True}  # fmt: skip
            message = client.session.msg("execute_request", content, metadata={"cellId": id})
            client.shell_channel.send(message)
            text = ""
            while True:
                got = client.get_iopub_msg(timeout=60)
                if got["parent_header"].get("msg_id") != message["header"]["msg_id"]:
                    continue
                if got["msg_type"] == "stream":
                    text += got["content"]["text"]
                assert got["msg_type"] != "error", got["content"]
                if got["msg_type"] == "status" and got["content"]["execution_state"] == "idle":
                    return text

        texts = [ask(*cell) for cell in cells]
        assert texts[0].startswith("The guard is on") and texts[1] == texts[2] == ""
        assert texts[3].endswith("A run from top to bottom gives the same.\n")
        assert ask("r", "lr = 0.1") == ""
        said = ask("f", cells[2][1])
        assert said.startswith(
            "guard: In[6] drew random numbers after In[3] (`import random`) had drawn some"
        )
        assert "A run from top to bottom gives another" in ask(*cells[3])
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    assert not manager.is_alive()

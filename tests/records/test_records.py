import json
import re

import numpy as np
import pytest
import torch

from course_lib import records
from course_lib.records import figures, solutions


@pytest.mark.parametrize(
    ("source", "uses", "defines"),
    [
        ("a = b + c", "bc", "a"),
        ("b = a\na = 1", "a", "ab"),
        ("a = 1\na += b", "b", "a"),
        ("a += 1", "a", "a"),
        ("a[i] = v", "aiv", "a"),
        ("a.x.y += v", "av", "a"),
        ("a, (b, *c) = d", "d", "abc"),
        ("for i in r:\n    p = i\n    s += p", "rs", "ips"),
        ("a: int = b", "b", "a"),
        ("with f(a) as g:\n    b = g", "fa", "gb"),
        ("import m\nfrom p import q as r\na = m.x + r", "", "a"),
        ("def f(x, y=d):\n    z = x + g + f(1)\n    return z", "dg", "f"),
        ("f = lambda x: x + k", "k", "f"),
        ("class C(B):\n    n = m\n    def f(self):\n        return g + self.n", "Bmg", "C"),
        ("a = [x * k for x in xs if x for y in x]", ["k", "xs"], "a"),
        ("a = {x: y for x in b for y in x}", "b", "a"),
        ("print(len(a))", "a", ""),
        ("no Python", "", ""),
    ],
)
def test_names(source, uses, defines):
    cell = records.read("id", source)
    assert (set(cell.uses), set(cell.defines)) == (set(uses), set(defines))


def test_versions():
    a, b, new = (records.read(*x) for x in (("A", "a = 3"), ("B", "b = 2 * a"), ("A", "a = 4")))
    ran = records.replay([a, b, new, b, a, b])
    assert [s.inputs for s in ran] == [{}, {"a": 0}, {}, {"a": 2}, {}, {"a": 4}]
    versions = [s.version for s in ran]
    assert versions[:2] == versions[4:] and len(set(versions)) == 4
    assert solutions.stale([a, b, new], [new, b]) == {"B"}
    assert solutions.suspects([a, new, b], [a, b]) == ["a"]


def test_a_repository_and_git(tmp_path):
    git = records.repository(tmp_path / "r", {"a.py": "x = 1\n"})
    assert re.fullmatch(r"[0-9a-f]{40}", git("rev-parse", "HEAD")) and git("status", "--porcelain") == ""
    (tmp_path / "r" / "a.py").write_text("x = 2\n")
    diff = git("diff", "HEAD")
    assert diff.endswith("+x = 2") and git("apply", "--reverse", input=diff + "\n") == ""
    assert git("no-such-command") is None and records.git(tmp_path)("rev-parse", "HEAD") is None


def test_git_keeps_every_byte(tmp_path):
    git = records.repository(tmp_path / "r", {"a.bin": "x", "dos.txt": "x", "latin.txt": "x"})
    new = {"a.bin": bytes(range(256)), "dos.txt": b"a\r\nb\r\n", "latin.txt": b"caf\xe9\n"}
    for name, content in new.items():
        (tmp_path / "r" / name).write_bytes(content)
    git("worktree", "add", tmp_path / "again", "HEAD")
    diff = json.loads(json.dumps(git("diff", "HEAD", "--binary")))
    assert records.git(tmp_path / "again")("apply", input=diff + "\n") == ""
    assert {name: (tmp_path / "again" / name).read_bytes() for name in new} == new


def test_a_script_that_fails_is_one_line(tmp_path):
    (tmp_path / "train.py").write_text("raise ValueError('lr is missing')")
    with pytest.raises(RuntimeError, match=r"^ValueError: lr is missing$"):
        records.run_script(tmp_path, {})
    with pytest.raises(RuntimeError, match="there is no train"):
        records.run_script(tmp_path / "nowhere", {})


GOOD = {"config": {"lr": 0.1}, "seed": 1, "commit": None, "diff": None}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda text: text.replace("0.1", "0.3"), "was edited after it was written"),
        (
            lambda text: text.replace('"schema": 1', '"schema": 2'),
            "has schema 2 and this library reads up to 1",
        ),
        (lambda text: text[:50], "is not JSON: it was cut"),
        (lambda text: "[1, 2]", "is not a manifest"),
        (lambda text: "\x00\xff", "is not JSON"),
        (None, "lacks diff, seed"),
    ],
)
def test_manifests_that_cannot_be_used(tmp_path, change, sentence):
    path = tmp_path / "manifest.json"
    records.save(GOOD if change else {"config": {}, "commit": None}, path)
    if change:
        assert records.load(path) == GOOD
        path.write_text(change(path.read_text()))
    with pytest.raises(records.ManifestError, match=sentence) as e:
        records.load(path)
    assert "\n" not in str(e.value) and e.value._render_traceback_() == [str(e.value)]


def test_a_manifest_that_is_missing(tmp_path):
    with pytest.raises(records.ManifestError, match=r"none\.json can't be read: No such file"):
        records.load(tmp_path / "none.json")


def test_fingerprints_see_changes_in_place():
    net, numbers, array = torch.nn.Linear(2, 2), [1], np.zeros(3)
    names = {"net": net, "t": torch.zeros(2), "numbers": numbers, "array": array, "n": 1, "_": 0}
    before = records.fingerprints(names)
    assert records.fingerprints(names) == before and set(before) == {"net", "t", "numbers", "array", "n"}
    with torch.no_grad():
        net.weight.add_(1)
    numbers.append(2)
    array[0] = 1
    now = records.fingerprints(names)
    assert {n for n in now if now[n] != before[n]} == {"net", "numbers", "array"}
    assert all(now[n][0] == before[n][0] for n in now)


def test_the_page_is_the_saved_file_with_new_cells_where_they_ran(tmp_path, monkeypatch):
    a, b, c, new = (records.read(i, f"{i} = 1") for i in "abcn")
    assert [x.id for x in records.page([b, a, b])] == ["b", "a"]
    code = [{"id": i, "cell_type": "code", "source": [f"{i} = 1"]} for i in "zabc"]
    path = tmp_path / "x.ipynb"
    path.write_text(json.dumps({"cells": [{"cell_type": "markdown", "source": []}, *code]}))
    monkeypatch.setenv("JPY_SESSION_NAME", str(path))
    assert [x.id for x in records.page([a, new, c])] == ["a", "n", "b", "c"]


def test_figures_draw():
    import matplotlib.pyplot as plt

    page = {"A": "a = 1", "B": "b = a"}
    history = [records.read(*x) for x in [*page.items(), ("A", "a = 2"), ("X", "x = a")]]
    cells = [records.read(*x) for x in page.items()]
    figures.draw_session([*page.items(), ("A", "a = 2")], list(page))
    figures.draw_losses({"one": [2, 1], "two": [2, 1], "three": [2, 2]})
    figures.draw_difference([2.0, 1.0], [2.0, 1.5])
    fig = figures.draw_graph(history, cells, {"A"})
    assert [t.get_text() for t in fig.axes[1].texts if t.get_text() == "a"]
    plt.close("all")

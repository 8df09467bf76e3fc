"Checks of records. Oracles: real repositories, changes that are named as they are made, executed programs."

import contextlib
import importlib.metadata
import json
import platform
import random
import re
import shutil
import tempfile
from pathlib import Path

import torch

from course_lib import checking as core
from course_lib import machine, records
from course_lib.checking import yours  # noqa: F401


def _short(value, most=120):
    text = " ".join(repr(value).split())
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _states(top):
    "(what it is, git, commit): repositories with each kind of change, and a folder without a repository."
    for what in ("a clean one", "unstaged", "staged", "staged and unstaged", "a new file", "no repository"):
        folder, lines = Path(top, what), lambda: "".join(f"{random.random()}\n" for _ in range(9))
        git = records.repository(folder, {"train.py": lines(), "net.py": lines()})
        commit = next((folder / ".git/refs/heads").glob("*")).read_text().strip()
        if "staged" in what:
            (folder / "train.py").write_text(lines())
        if what.startswith("staged"):
            git("add", ".")
        if what in ("staged and unstaged", "a new file"):
            (folder / ("net.py" if "staged" in what else "new.py")).write_text(lines())
        if what == "no repository":
            shutil.rmtree(folder / ".git")
        yield what, git, None if what == "no repository" else commit


@core.exercise("records.1", "manifest complete in six states of a repository, and every difference named")
def manifest(make, differing):
    threads = torch.get_num_threads()
    torch.set_num_threads(machine.cores() + 1)
    try:
        with tempfile.TemporaryDirectory() as top:
            for what, git, commit in _states(top):
                _one_manifest(make, f"a folder ({what})", git, commit)
    finally:
        torch.set_num_threads(threads)
    for case in range(120):
        then, now, names = _pair(case // 40)
        got, what = core.call(differing, then, now), f"differing({_short(then)}, {_short(now)})"
        right = isinstance(got, list | tuple) and list(got) == sorted(names)
        core.require(right, f"{what}: expected {_short(sorted(names))}, got {_short(got)}")


def _one_manifest(make, where, git, commit):
    net = {"width": random.randrange(8, 99), "sizes": random.sample(range(99), 3)}
    config, seed = {"lr": random.random(), "net": net, "resume": None}, random.randrange(2**31)
    given = json.dumps(config)
    got = core.call(make, config, seed, git, mutates=(0,))
    core.require(isinstance(got, dict), f"manifest: expected a dict, got {core.kind(got)}")
    core.require(json.dumps(config) == given, "manifest changed the configuration it was given; copy it")
    net["sizes"].append("changed later")
    want = {"config": json.loads(given), "seed": seed, "commit": commit, "clean": commit and "clean" in where}
    want |= {"python": platform.python_version(), "threads": torch.get_num_threads()}
    want |= {"device": machine.name()} | ({} if "staged" in where else {"diff": commit and ""})
    for key, value in want.items():
        core.require(key in got, f"the manifest of {where} lacks {key!r}")
        if got[key] != value or type(got[key]) is not type(value):
            late = "; it changed with the caller's: copy it deeply" if got[key] == config else ""
            raise core.Wrong(f"{key!r} of {where}: expected {_short(value)}, got {_short(got[key])}{late}")
    for name, build in (("torch", str(torch.__version__)), ("numpy", "")):
        found = got["packages"].get(name) if isinstance(got.get("packages"), dict) else None
        version = importlib.metadata.version(name)
        core.require(
            found in (version, build), f"packages[{name!r}]: expected {version!r}, got {_short(found)}"
        )
    if "staged" in where:  # taken back, the diff must leave the files of the commit, however git wrote it
        diff = f"{got.get('diff')}".rstrip("\n") + "\n"
        whole = git("apply", "--reverse", input=diff) is not None and git("diff", "HEAD") == ""
        core.require(whole, f"'diff' of {where}: commit and diff together do not give the files as they are")
    with contextlib.suppress(TypeError, ValueError):
        if json.loads(json.dumps(got)) == got:
            return
    raise core.Wrong("the manifest is another when it is read back from JSON; use what JSON can hold")


def _pair(depth):
    "Two nested dicts, and the names of the changes made from the one to the other."
    unlike = [(1, True, 1.0, "1"), ([1, 2], [1, 3], [1]), (None, {"x": 1}, [1], 0), (0.1, 0.2)]
    then, now, names = {}, {}, set()
    for key in random.sample("abcdefgh", 3):
        what = random.randrange(6)
        then[key] = now[key] = random.choice([0, random.random(), None, True, [1, 2], "text"])
        if what < 3 and depth:
            then[key], now[key], inside = _pair(depth - 1)
            names |= {f"{key}.{name}" for name in inside}
        elif what > 3:
            (then[key], now[key]), names = random.sample(random.choice(unlike), 2), names | {key}
        elif what == 3:  # one of them lacks it, though its value may be None
            del random.choice([then, now])[key]
            names.add(key)
    return then, now, names


_TRAIN = """import json, random, sys
import net
saved = json.load(open(sys.argv[1]))
drawn = random.Random(saved["seed"]).randrange(10**9)
json.dump({{"drawn": drawn, "value": {a} * saved["config"]["x"] + net.b}}, open(sys.argv[2], "w"))
"""


def _work(folder):
    "Write a new version of a script of two files; return the value that it computes from x."
    a, b = (random.randrange(10**6) for _ in range(2))
    (folder / "train.py").write_text(_TRAIN.format(a=a))
    (folder / "net.py").write_text(f"b = {b}\n")
    return lambda x: a * x + b


@core.exercise("records.2", "five runs repeated from their manifests, and the repository is as it was")
def rerun(answer):
    with tempfile.TemporaryDirectory() as top:
        folder, kept = Path(top, "my work"), []
        git = records.repository(folder, {})
        for i in range(5):
            value = _work(folder)
            if i in (0, 2, 4):
                records.commit(folder, {}, "work goes on")
            elif i == 3:
                git("add", "net.py")
            kept.append((git("rev-parse", "HEAD"), git("diff", "HEAD"), value))
        (folder / "net.py").write_text("b = -1\n")  # today's work: staged, and changed again
        git("add", "net.py")
        (folder / "train.py").write_text("raise SystemExit('this is today, not the run')\n")
        before = _seen(git, folder)
        for i, (commit, diff, value) in enumerate(kept):
            x, seed = random.randrange(10**6), random.randrange(2**31)
            found = {"config": {"x": x}, "seed": seed, "commit": commit, "diff": diff, "threads": 1}
            place, what = Path(top, f"run {i}"), f"a run {'with' if diff else 'without'} a diff"
            got = core.call(answer, found, git, place)
            want = {"drawn": random.Random(seed).randrange(10**9), "value": value(x)}
            core.require(got == want, f"{what}: expected the result {want}, got {_short(got)}")
            core.require((place / "train.py").exists(), f"{what}: there is no train.py in the folder given")
            core.require(_seen(git, folder) == before, f"{what}: rerun changed the repository's own files")
        lost = f"{random.getrandbits(160):040x}"
        for commit, why in ((None, "a run without a commit"), (lost, "an unknown commit")):
            core.refuses(answer, found | {"commit": commit}, git, Path(top, why), why=why)


def _seen(git, folder):
    "What a person who works in the repository sees."
    asked = (["rev-parse", "HEAD"], ["symbolic-ref", "HEAD"], ["status", "--porcelain"], ["stash", "list"])
    return [git(*words) for words in asked], {p.name: p.read_text() for p in folder.glob("*.py")}


def _cell(id, targets, uses):
    "A cell of 0 or more targets, `show(3 * a + 5)` or `b, c = 3 * a + 5, 3 * a + 7`, large numbers last."
    terms = "".join(f"{random.randrange(2, 100)} * {n} + " for n in uses)
    values = ", ".join(f"{terms}{random.randrange(10**8, 10**9)}" for _ in range(max(1, len(targets))))
    source = f"{', '.join(targets)} = {values}" if targets else f"show({values})"
    return records.Cell(id, source, frozenset(uses), frozenset(targets))


def _execute(cells):
    "Run cells: for each id what its last run made and showed (None: it failed), and which values it found."
    names, made, found = {}, {}, {}
    for c in cells:
        shown, found[c.id] = [], {n: names.get(n) for n in c.uses}
        try:
            exec(c.source, {"show": shown.append}, names)
            made[c.id] = shown + [names[n] for n in sorted(c.defines)]
        except NameError:
            made[c.id] = None
    return made, found


# Cells as "id: targets, uses", and what is easily got wrong with them, as history/notebook. The cells n, x, k
# and s are edited versions of a, b, c and t: the same beginning, another number at the end of each value.
_CELLS = "A:a, B:b,a C:,b D:ab, T:a,a E:c,a G:,abc P:ac, Q:bc, Y:a,"
_CHOSEN = """abc/abc abca/abc abcn/nbc abcnbc/nbc abnac/abc abc/ac attb/atb atatb/atb abc/abk abc/bac dc/dc
dcac/dac dbc/dxc dab/adb abc/abcy abc/aybc ab/ba ab/b at/ab at/as abne/abf dn/dn ad/ad anb/ab pqg/qpg pqg/g"""


def _sessions():
    "Sessions as (history, notebook): the chosen ones, then drawn ones."
    fresh = dict(zip("abc", random.sample("abcdefuvwxyz", 3), strict=True))
    cells = {}
    for id, targets, uses in (word.replace(":", ",").split(",") for word in _CELLS.split()):
        cells[id.lower()] = _cell(id, [fresh[n] for n in targets], [fresh[n] for n in uses])
    for new, old in zip("nxks", "abct", strict=True):
        text = re.sub(r"\d{9}", lambda m: str(random.randrange(10**8, 10**9)), cells[old].source)
        cells[new] = cells[old]._replace(source=text)
    cells["f"] = _cell("E", [fresh["c"]], [fresh["b"]])
    for case in _CHOSEN.split():
        yield tuple([cells[i] for i in part] for part in case.split("/"))
    for _ in range(100):
        history = list(_ready(random.choices(list(cells.values()), k=random.randrange(8, 30))))
        now = {c.id: c for c in random.sample(list(cells.values()), 12)}
        notebook = list(_ready((now | {c.id: c for c in history if random.random() < 0.9}).values()))
        if history:
            yield history, notebook


def _ready(cells):
    "Those cells that find all the names they use."
    known = set()
    for cell in cells:
        if cell.uses <= known:
            known |= cell.defines
            yield cell


def _judge(answer, history, notebook, kinds, want):
    "Compare what `answer` gives for a session with `want`."
    got = core.call(answer, list(history), list(notebook))
    runs, page = (
        _short(" | ".join(f"{c.id}: {c.source}" for c in cells), 160)[1:-1] for cells in (history, notebook)
    )
    said = _short(got) if isinstance(got, set | frozenset | list | tuple) else core.kind(got)
    right = isinstance(got, kinds) and type(want)(got) == want
    core.require(right, f"after the runs [{runs}] of the notebook [{page}]: expected {want}, got {said}")


@core.exercise("records.3", "stale results right for more than 100 sessions, each really executed")
def stale(answer):
    for history, notebook in _sessions():
        ran, would = _execute(history)[0], _execute(notebook)[0]
        want = {id for id in ran if would.get(id) is None or ran[id] != would[id]}
        _judge(answer, history, notebook, set | frozenset, want)


@core.exercise("records.4", "the names to warn about right for more than 100 sessions, each really executed")
def suspects(answer):
    for history, notebook in _sessions():
        last = history[-1]
        had, would = _execute(history)[1][last.id], _execute(notebook)[1].get(last.id)
        if would is not None:  # a page that no longer uses a name in this cell still has a value for it
            above = notebook[: [c.id for c in notebook].index(last.id)]
            would = _execute([*above, last])[1][last.id]
        want = [] if would is None else sorted(n for n in last.uses if had[n] != would[n])
        _judge(answer, history, notebook, list | tuple, want)

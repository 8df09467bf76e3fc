"""Checks of records. Oracles: real repositories whose files are compared, changes made one by one and named,
and programs that are really executed."""

import contextlib
import importlib.metadata
import json
import platform
import random
import re
import tempfile
from pathlib import Path

import torch

from course_lib import checking as core
from course_lib import machine, records
from course_lib.checking import yours  # noqa: F401
from course_lib.records import Cell

# --- records.1: a manifest, and what differs -------------------------------------------------


def _lines(n=9):
    return "".join(f"step_{i} = {random.randrange(10**6)}\n" for i in range(n))


@contextlib.contextmanager
def _repositories():
    "{what it is: (git, folder, commit)}: real ones, and a folder without a repository."
    with tempfile.TemporaryDirectory() as top:
        found = {}
        for name in ("clean", "unstaged", "staged", "staged, then changed again", "new file", "none"):
            folder = Path(top, name)
            if name == "none":
                folder.mkdir()
                found["a folder without a repository"] = records.git(folder), folder, None
                continue
            git = records.repository(folder, {"train.py": _lines(), "net.py": _lines()})
            if name != "clean":
                change = "loader.py" if name == "new file" else "train.py"
                (folder / change).write_text(_lines())
            if name.startswith("staged"):
                git("add", "--all")
            if name.endswith("again"):
                (folder / "net.py").write_text(_lines())
            found[f"a repository ({name})"] = git, folder, (folder / ".git/refs/heads").glob("*")
        yield {k: (g, f, c and next(c).read_text().strip()) for k, (g, f, c) in found.items()}


@core.exercise("records.1", "manifest complete in six states of a repository, and every difference named")
def manifest(make, differing):
    threads = torch.get_num_threads()
    with _repositories() as states:
        for where, (git, folder, commit) in states.items():
            torch.set_num_threads(random.choice([1, 2, 3]))
            try:
                _one_manifest(make, where, git, folder, commit)
            finally:
                torch.set_num_threads(threads)
    for _ in range(60):
        then, now, names = _pair(3)
        got = core.call(differing, then, now)
        core.equal(got, sorted(names), f"differing({_short(then)}, {_short(now)})")


def _one_manifest(make, where, git, folder, commit):
    model = {"width": random.randrange(8, 99), "sizes": random.sample(range(99), 3)}
    config, seed = {"lr": random.random(), "model": model, "resume": None}, random.randrange(2**31)
    kept = json.dumps(config)
    got = core.call(make, config, seed, git, mutates=(0,))
    core.require(isinstance(got, dict), f"manifest: expected a dict, got {core.kind(got)}")
    core.require(json.dumps(config) == kept, "manifest changed the configuration it was given; copy it")
    model["sizes"].append("changed later")
    want = {"config": json.loads(kept), "seed": seed, "commit": commit, "device": machine.name()}
    want |= {"clean": commit and "(clean)" in where, "threads": torch.get_num_threads()}
    want["python"] = platform.python_version()
    for key, value in want.items():
        core.require(key in got, f"the manifest of {where} lacks {key!r}")
        if key == "config" and got[key] == config:
            raise core.Wrong("config in the manifest changed when the caller's did later; copy it deeply")
        if got[key] != value or type(got[key]) is not type(value):
            raise core.Wrong(f"{key!r} of {where}: expected {_short(value)}, got {_short(got[key])}")
    packages = got.get("packages")
    core.require(isinstance(packages, dict), "the manifest lacks 'packages', a dict {name: version}")
    for name, also in (("torch", str(torch.__version__)), ("numpy", None)):  # torch's may name the build
        want = importlib.metadata.version(name)
        if packages.get(name) not in (want, also):
            raise core.Wrong(f"packages[{name!r}]: expected {want!r}, got {packages.get(name)!r}")
    _diff(got.get("diff", "missing"), where, git, folder, commit)
    try:
        same = json.loads(json.dumps(got)) == got
    except (TypeError, ValueError) as e:
        raise core.Wrong(f"the manifest can't be written as JSON: {e}") from None
    core.require(same, "the manifest read back from JSON is another; use text, numbers, lists and dicts")


def _diff(diff, where, git, folder, commit):
    "Commit and diff must give the files as they are; how git writes a diff doesn't matter."
    if commit is None or "(clean)" in where or "(new" in where:
        want = None if commit is None else ""
        core.require(diff == want, f"'diff' of {where}: expected {want!r}, got {_short(diff)}")
        return
    core.require(isinstance(diff, str), f"'diff' of {where}: expected text, got {core.kind(diff)}")
    copy = folder.with_name(f"{folder.name} copy")
    git("worktree", "add", copy, commit)
    applied = records.git(copy)("apply", input=diff.rstrip("\n") + "\n")
    same = applied is not None and all(
        (copy / name).read_text() == (folder / name).read_text() for name in ("train.py", "net.py")
    )
    core.require(same, f"'diff' of {where}: commit and diff do not give the files as they are")


def _short(value, most=120):
    text = repr(value)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _value():
    return random.choice([random.randrange(9), random.random(), None, True, [1, 2], "text", ["a", 0]])


def _pair(depth):
    "Two nested dicts, and the names of the changes made from the one to the other."
    then, now, names = {}, {}, set()
    for key in random.sample("abcdefgh", 5):
        what, then[key] = random.randrange(8), _value()
        now[key] = then[key]
        if what < 2 and depth:
            then[key], now[key], inside = _pair(depth - 1)
            names |= {f"{key}.{name}" for name in inside}
        elif what > 3:
            then[key], now[key] = random.choice([
                (1, True), (1, 1.0), (1, "1"), ([1, 2], [1, 3]), ([1], [1, 2]), ({"x": 1}, None),
                (None, {}), (0.1, 0.2), ("a", "b"), ({"x": 1}, [1]),
            ])  # fmt: skip
            names.add(key)
        elif what == 3:  # one of them lacks it, though its value may be None
            del random.choice([then, now])[key]
            names.add(key)
    return then, now, names


# --- records.2: run it again ------------------------------------------------------------------

_TRAIN = """import json, random, sys
import net
saved = json.load(open(sys.argv[1]))
drawn = random.Random(saved["seed"]).randrange(10**9)
result = {{"drawn": drawn, "value": {a} * saved["config"]["x"] + net.b}}
json.dump(result, open(sys.argv[2], "w"))
"""


def _sources():
    a, b = (random.randrange(10**6) for _ in range(2))
    return {"train.py": _TRAIN.format(a=a), "net.py": f"b = {b}\n"}, lambda x: a * x + b


@core.exercise("records.2", "five runs repeated from their manifests, and the repository is as it was")
def rerun(answer):
    with tempfile.TemporaryDirectory() as top:
        folder = Path(top, "my work")
        sources, value = _sources()
        git = records.repository(folder, sources)
        kept = [(git("rev-parse", "HEAD"), "", value)]
        for staged in (False, True):
            sources, value = _sources()
            for name, text in sources.items():
                (folder / name).write_text(text)
            if staged:
                git("add", "net.py")
            kept.append((git("rev-parse", "HEAD"), git("diff", "HEAD"), value))
            sources, value = _sources()
            records.commit(folder, sources, "work goes on")
            kept.append((git("rev-parse", "HEAD"), "", value))
        (folder / "net.py").write_text("b = -1\n")  # today's work: staged, and changed again
        git("add", "net.py")
        (folder / "train.py").write_text("raise SystemExit('this is today, not the run')\n")
        before = _state(git, folder)
        for i, (commit, diff, value) in enumerate(kept):
            x, seed = random.randrange(10**6), random.randrange(2**31)
            found = {"config": {"x": x}, "seed": seed, "commit": commit, "diff": diff, "threads": 1}
            place, what = Path(top, f"run {i}"), f"a run {'with' if diff else 'without'} a diff"
            got = core.call(answer, found, git, place)
            want = {"drawn": random.Random(seed).randrange(10**9), "value": value(x)}
            core.require(isinstance(got, dict), f"{what}: expected its result, a dict, got {core.kind(got)}")
            core.require(got == want, f"{what}: expected {want}, got {_short(got)}")
            core.require((place / "train.py").exists(), f"{what}: there is no train.py in the folder given")
            core.require(_state(git, folder) == before, f"{what}: rerun changed the repository's own files")
        for commit, why in ((None, "a run without a commit"), (f"{random.getrandbits(160):040x}", "an unknown commit")):
            core.refuses(answer, found | {"commit": commit}, git, Path(top, why), why=why)


def _state(git, folder):
    "What a person who works in the repository would see."
    asked = (["rev-parse", "HEAD"], ["symbolic-ref", "HEAD"], ["status", "--porcelain"], ["stash", "list"])
    return [git(*words) for words in asked], {p.name: p.read_text() for p in folder.glob("*.py")}


# --- records.3 and .4: cells ---------------------------------------------------------------------


def _cell(id, targets, uses):
    """A cell of 0, 1 or 2 targets: `show(3 * a + 5)`, `b = 3 * a + 5`, `b, c = 3 * a + 5, 7 * a + 2`.

    The numbers at the end are large: two histories give one value by chance once in 10^9.
    """
    terms = " + ".join([*(f"{random.randrange(2, 100)} * {n}" for n in uses), ""])
    values = ", ".join(f"{terms}{random.randrange(10**8, 10**9)}" for _ in range(max(1, len(targets))))
    source = f"{', '.join(targets)} = {values}" if targets else f"show({values})"
    return Cell(id, source, frozenset(uses), frozenset(targets))


def _edited(cell):
    "The same names and the same beginning, another number at the end of each value."
    source = re.sub(r"\d{9}", lambda m: str(random.randrange(10**8, 10**9)), cell.source)
    return cell._replace(source=source)


def _execute(cells):
    "Run cells; for each id what its last run made and showed, and which values it found."
    names, made, found = {}, {}, {}
    for c in cells:
        shown, found[c.id] = [], {n: names.get(n) for n in c.uses}
        try:
            exec(c.source, {"show": shown.append}, names)
            made[c.id] = shown + [names[n] for n in sorted(c.defines)]
        except NameError:
            made[c.id] = None
    return made, found


def _sessions(n):
    "(history, notebook): chosen ones for what is easily got wrong, then drawn ones."
    a, b, c = _cell("A", "a", ""), _cell("B", "b", "a"), _cell("C", "", "b")
    two, twice = _cell("D", "ab", ""), _cell("T", "a", "a")
    new, new_c = _edited(a), _edited(c)
    yield from [
        ([a, b, c], [a, b, c]), ([a, b, c, a], [a, b, c]), ([a, b, c, new], [new, b, c]),
        ([a, b, c, new, b, c], [new, b, c]), ([a, b, new, a, c], [a, b, c]), ([a, b, c], [a, c]),
        ([a, twice, twice, b], [a, twice, b]), ([a, twice, a, twice, b], [a, twice, b]),
        ([a, b, c], [a, b, new_c]), ([a, b, c], [b, a, c]), ([two, c], [two, c]), ([two, c, a, c], [two, a, c]),
        ([two, b, c], [two, _edited(b), c]), ([two, a, b], [a, two, b]),
        ([a, b, c], [a, b, c, new._replace(id="X")]), ([a, b], [b, a]), ([a, b], [b]), ([a, twice], [a, b]),
    ]  # fmt: skip
    while n:
        cells = {}
        for id in random.sample("JKLMNPQ", random.randrange(4, 8)):
            targets, uses = (random.sample("abcdef", random.randrange(3)) for _ in range(2))
            cells[id] = _cell(id, targets, uses)
        history, known = [], set()
        for _ in range(random.randrange(5, 16)):
            ready = [c for c in cells.values() if c.uses <= known]
            if ready:
                cell = random.choice(ready)
                if random.random() < 0.2:
                    cell = cells[cell.id] = _edited(cell)
                history.append(cell)
                known |= cell.defines
        first = list(dict.fromkeys(c.id for c in history))
        notebook = sorted(cells.values(), key=lambda c: first.index(c.id) if c.id in first else 9)
        if random.random() < 0.3:
            i, j = random.sample(range(len(notebook)), 2)
            notebook[i], notebook[j] = notebook[j], notebook[i]
        if random.random() < 0.2:
            del notebook[random.randrange(len(notebook))]
        made = _execute(notebook)[0]
        if len(history) > 3 and None not in made.values():  # a name that is missing would stop it
            n -= 1
            yield history, notebook


def _told(cells):
    return f"[{_short(' | '.join(f'{c.id}: {c.source}' for c in cells), 160)[1:-1]}]"


@core.exercise("records.3", "stale results right for 217 sessions, each really executed")
def stale(answer):
    for history, notebook in _sessions(200):
        ran, would = _execute(history)[0], _execute(notebook)[0]
        want = {id for id in ran if would.get(id) is None or ran[id] != would[id]}
        got = core.call(answer, list(history), list(notebook))
        if not isinstance(got, set | frozenset):
            raise core.Wrong(f"stale: expected a set of cell ids, got {core.kind(got)}")
        if got != want:
            raise core.Wrong(
                f"after the runs {_told(history)} of the notebook {_told(notebook)}: "
                f"expected {sorted(want)} to be stale, got {sorted(map(str, got))}"
            )


@core.exercise("records.4", "the names to warn about right for 217 sessions, each really executed")
def suspects(answer):
    for history, notebook in _sessions(200):
        last = history[-1]
        had, would = _execute(history)[1][last.id], _execute(notebook)[1].get(last.id)
        want = [] if would is None else sorted(n for n in last.uses if had[n] != would.get(n))
        got = core.call(answer, list(history), list(notebook))
        if not isinstance(got, list | tuple) or list(got) != want:
            said = _short(got) if isinstance(got, list | tuple | set) else core.kind(got)
            raise core.Wrong(
                f"after the runs {_told(history)}, the last in the notebook {_told(notebook)}: expected {want}, got {said}"
            )

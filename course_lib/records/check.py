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
from course_lib.records import solutions


def _short(value, most=120):
    text = value if isinstance(value, str) else " ".join(repr(value).split())
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text.encode("latin-1"))


def _seen(git, folder):
    "What a person who works in the repository sees, and when each file there was written."
    asked = "rev-parse HEAD", "symbolic-ref HEAD", "status --porcelain -uall", "stash list", "branch"
    kept = [p for p in folder.rglob("*") if p.is_file() and ".git" not in p.parts]
    return [git(*a.split()) for a in asked], {p: (*p.stat()[:2], p.stat().st_mtime_ns) for p in kept}


def _files(indented):
    "Files of several kinds with fresh contents; what differs in net.py is its indentation alone."
    line = [f"{random.random()}\n" for _ in range(9)]
    files = {"train.py": "".join(line) + "\n", "net.py": f"if 1:\n    a = 1\n{'    ' * indented}b = 2\n"}
    files |= {"conf/net.yaml": f"width: {line[0]}", "dos.txt": line[1].replace("\n", "\r\n")}
    return files | {"data.bin": "\0" + "".join(map(chr, random.sample(range(256), 99)))}


def _states(top):
    "(what it is, folder, git, commit): repositories with each kind of change, and a folder without one."
    kinds = {"clean": {}, "unstaged": {}, "staged": {}, "staged and unstaged": {"train.py": "a = 2\n"}}
    kinds |= {"a new file": {"new.py": "a = 1\n"}, "a new file in a folder": {"sub/new.py": "a = 1\n"}}
    for what, late in kinds.items():
        folder = Path(top, what)
        git = records.repository(folder, {".gitignore": "*.log\n"})
        for message in ("second", "third"):
            _write(folder, _files(False) | {"old.py": "a = 0\n"})
            records.commit(folder, {}, message)
        commit = git("rev-parse", "HEAD~1")  # the newest commit is on another branch
        git("checkout", "--quiet", *random.choice((["--detach"], ["-b", "mine"])), commit)
        _write(folder, {"run.log": ""} | (_files(True) | {"new.py": "a = 1\n"} if "staged" in what else {}))
        if "staged" in what:
            (folder / "old.py").unlink()
        if what.startswith("staged"):
            git("add", ".")
        _write(folder, late)
        yield what, folder, git, commit
    shutil.rmtree(folder / ".git")
    yield "no repository", folder, git, None


@core.exercise("records.1", "manifest complete in seven states of a repository, and every difference named")
def manifest(make, differing):
    with tempfile.TemporaryDirectory() as top, contextlib.ExitStack() as afterwards:
        afterwards.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(machine.cores() + 1)
        for state in _states(top):
            _one_manifest(make, *state)
    for then, now, names in map(_pair, sorted([0, 1, 2] * 100)):
        got, what = core.call(differing, then, now), f"differing({_short(then)}, {_short(now)})"
        right = isinstance(got, list | tuple) and list(got) == sorted(names)
        core.require(right, f"{what}: expected {_short(sorted(names))}, got {_short(got)}")


def _one_manifest(make, what, folder, git, commit):
    sizes, where, before = random.sample(range(99), 3), f"a folder ({what})", _seen(git, folder)
    config, seed = {"lr": random.random(), "net": {"sizes": sizes, "resume": None}}, random.randrange(2**31)
    given = json.dumps(config)
    got = core.call(make, config, seed, git, mutates=(0,))
    core.require(isinstance(got, dict), f"manifest: expected a dict, got {core.kind(got)}")
    core.require(json.dumps(config) == given, "manifest changed the configuration it was given; copy it")
    core.require(_seen(git, folder) == before, f"manifest changed the repository of {where}; only read it")
    sizes.append("changed later")
    want = {"config": json.loads(given), "seed": seed, "commit": commit, "clean": commit and what == "clean"}
    want |= {"python": platform.python_version(), "threads": torch.get_num_threads()}
    want |= {"processor": machine.host(), "device": machine.name()}
    want |= {} if "staged" in where else {"diff": commit and ""}
    versions = {n: importlib.metadata.version(n) for n in ("torch", "numpy", "scikit-learn")}
    want |= {f"packages.{n}": v.partition("+")[0] for n, v in versions.items()}  # +cu130 may be there or not
    flat = got | {f"packages.{n}": str(v).partition("+")[0] for n, v in (got.get("packages") or {}).items()}
    for key, value in want.items():
        core.require(key in flat, f"the manifest of {where} lacks {key!r}")
        if flat[key] != value or type(flat[key]) is not type(value):
            late = "; it changed with the caller's: copy it deeply" if flat[key] == config else ""
            raise core.Wrong(f"{key!r} of {where}: expected {_short(value)}, got {_short(flat[key])}{late}")
    if "staged" in where:  # applied to the commit, the diff must give the files, however git wrote it
        again = folder.with_name(f"{folder.name} again")
        git("worktree", "add", "--detach", again, commit)
        records.git(again)("apply", input=f"{got.get('diff')}\n")
        for name in git("ls-files", "--with-tree=HEAD").splitlines():
            then, now = (p.read_bytes() if p.is_file() else None for p in (again / name, folder / name))
            wrong = f"'diff' of {where}: applied to the commit it does not give {name} as it is"
            core.require(then == now, wrong)
    core.require(json.loads(json.dumps(got)) == got, "the manifest is another when read back from JSON")


def _pair(depth):
    "Two nested dicts and the names of what differs; a key whose value is ... is left out."
    unlike = [(1, True, 1.0, "1"), ([1, 2], [1, 3], [1]), (None, {"x": 1}, [1], 0, ...), (0.1, 0.1 + 1e-12)]
    alike = [(v, v) for v in (0, random.random(), None, "text")] + [([{"x": 1, "y": 2}], [{"y": 2, "x": 1}])]
    then, now, names = {}, {}, set()
    for key in random.sample("abcdefgh", random.randrange(1 if depth else 0, 4)):
        what = random.randrange(6)
        then[key], now[key] = random.choice(alike)
        if what < 3 and depth:
            then[key], now[key], inside = _pair(depth - 1)
            names |= {f"{key}.{name}" for name in inside}
        elif what > 2:
            (then[key], now[key]), names = random.sample(random.choice(unlike), 2), names | {key}
    return *({k: v for k, v in d.items() if v is not ...} for d in (then, now)), names


_TRAIN = """import json, sys, lib.net
saved, c = json.load(open(sys.argv[1])), json.load(open("c.json"))
text = '''{line}
'''
value = {a} * saved["config"]["x"] + saved["seed"] + lib.net.b + c + len(text)
json.dump({{"value": value}}, open(sys.argv[2], "w"))
"""


def _work(folder):
    "Write a new version of a script, a module and its data; return what gives the result of a run."
    a, b, c, blanks = *random.sample(range(1, 10**6), 3), random.randrange(1, 9)
    files = {"train.py": _TRAIN.format(a=a, line=" " * blanks), "c.json": f"{c}\n"}
    _write(folder, files | {"lib/net.py": f"# DOS\r\nb = {b}\r\n"})
    return lambda run: {"value": a * run["config"]["x"] + run["seed"] + b + c + blanks + 1}


@core.exercise("records.2", "six runs repeated from their manifests, and the repository is as it was")
def rerun(answer):
    with tempfile.TemporaryDirectory() as top, contextlib.chdir("."):
        folder, kept, cwd = Path(top, "my work"), [], Path.cwd()
        git = records.repository(folder, {})
        for i in range(5):
            result = _work(folder)
            if i in (0, 2, 4):
                records.commit(folder, {}, "work goes on")
            elif i == 3:
                git("add", "lib/net.py")
            found = solutions.manifest({"x": random.randrange(10**6)}, random.randrange(2**31), git)
            kept.append((found | {"threads": 1}, result, (folder / "lib/net.py").read_bytes()))
        kept.append((kept[3][0] | {"config": {"x": 7}, "seed": 8}, *kept[3][1:]))
        _write(folder, {"lib/net.py": "b = -1\n"})
        git("add", ".")  # today's work: staged, changed again, and a new file that no run of then may see
        _write(folder, dict.fromkeys(("train.py", "json.py"), "raise SystemExit('a file of today ran')\n"))
        before = _seen(git, folder)
        for i, (found, result, net) in enumerate(kept):
            place, what = Path(top, f"run {i}"), f"a run {'with' if found['diff'] else 'without'} a diff"
            got, want = core.call(answer, found, git, place), result(found)
            core.require(got == want, f"{what}: expected the result {want}, got {_short(got)}")
            there = (place / "lib/net.py").exists() and (place / "lib/net.py").read_bytes() == net
            core.require(there, f"{what}: the folder given does not hold lib/net.py as it was, line ends too")
            same = _seen(git, folder) == before
            core.require(same, f"{what}: rerun wrote to the repository's own files, branches or stash")
            core.require(Path.cwd() == cwd, f"{what}: rerun left the process in another folder")
        last, lost = kept[4][0], f"{random.getrandbits(160):040x}"
        odd = {"no commit": last | {"commit": None}, "an unknown commit": last | {"commit": lost}}
        odd["a diff of another commit"] = kept[3][0] | {"commit": last["commit"]}
        for why, found in odd.items():
            core.refuses(answer, found, git, Path(top, why), why=f"a manifest with {why}")
            wrote = f"a manifest with {why}: rerun wrote to the repository's own files, branches or stash"
            core.require(_seen(git, folder) == before, wrote)


def _cell(id, targets, uses):
    'A cell such as `b = (3 * a + len("  #") +\\n 123456789)`: edits change the blanks or the last number.'
    terms = "".join(f"{random.randrange(2, 100)} * {n} + " for n in uses)
    ends = [
        f'"{" " * random.randrange(1, 5)}#") +\n {random.randrange(10**8, 10**9)}' for _ in targets or "1"
    ]
    values = [f"({terms}len({end})" for end in ends]
    source = f"{', '.join(targets)} = {', '.join(values)}" if targets else f"show({values[0]})"
    return records.Cell(id, source, frozenset(uses), frozenset(targets))


def _execute(cells):
    "Run cells: by id what the last run made and showed (None: it failed) and found; the cells that can run."
    names, made, found, ready = {}, {}, {}, []
    for c in cells:
        shown, found[c.id] = [], {n: names.get(n) for n in c.uses}
        made[c.id] = None
        if c.uses <= names.keys():
            exec(c.source, {"show": shown.append}, names)
            made[c.id] = shown + [names[n] for n in sorted(c.defines)]
            ready.append(c)
    return made, found, ready


# Cells as "id: targets, uses". n, k are a, c with other numbers, x, s are b, t with more blanks, m is a.
_CELLS = "A:a, B:b,a C:,b D:ab, T:a,a U:a,a E:c,a G:,abc P:ac, Q:bc, Y:a,"
_CHOSEN = """ab/nb ab/mb abc/mbc atub/autb abc/abc abca/abc abcn/nbc abcnbc/nbc abnac/abc abc/ac attb/atb
atatb/atb abc/abk abc/bac dc/dc dcac/dac dbc/dxc dab/adb abc/abcy abc/aybc ab/ba ab/b at/ab at/as abne/abf
dn/dn ad/ad anb/ab pqg/qpg pqg/g b/ab"""


def _sessions():
    "Sessions as (history, notebook), with fresh cells ten times: chosen ones, a long chain, drawn ones."
    for _ in range(10):
        fresh = dict(zip("abc", random.sample("abcdefuvwxyz", 3), strict=True))
        cells = {}
        for id, targets, uses in (word.replace(":", ",").split(",") for word in _CELLS.split()):
            cells[id.lower()] = _cell(id, [fresh[n] for n in targets], [fresh[n] for n in uses])
        for new, old in zip("nxks", "abct", strict=True):
            change = (r"\d{9}", lambda m: str(int(m[0][::-1]))) if new in "nk" else ("#", "    #")
            cells[new] = cells[old]._replace(source=re.sub(*change, cells[old].source))
        cells |= {"f": _cell("E", [fresh["c"]], [fresh["b"]]), "m": cells["a"]._replace(id="M")}
        for case in _CHOSEN.split():
            yield tuple([cells[i] for i in part] for part in case.split("/"))
        chain = [_cell(f"Z{i}", [f"z{i}"], [f"z{i - 1}" if i else fresh["a"]]) for i in range(9)]
        yield [cells["a"], *chain], [cells["n"], *chain]
        for _ in range(60):
            history = _execute([cells["y"], *random.choices(list(cells.values()), k=random.randrange(28))])[2]
            drawn = random.sample(list(cells.values()), 12)
            notebook = {c.id: c for c in [*drawn, *history] if random.random() < 0.9}
            yield history, _execute(notebook.values())[2]


def _judge(answer, history, notebook, kinds, want):
    got = core.call(answer, list(history), list(notebook))
    texts = (" | ".join(f"{c.id}: {c.source}" for c in cells) for cells in (history, notebook))
    runs, page = (_short(text.replace("\n", "\\n"), 150) for text in texts)
    said = _short(got, 60) if isinstance(got, set | frozenset | list | tuple) else core.kind(got)
    right = isinstance(got, kinds) and type(want)(got) == want
    core.require(
        right, f"after the runs [{runs}] of the notebook [{page}]: expected {_short(want, 60)}, got {said}"
    )


@core.exercise("records.3", "stale results right for more than 300 sessions, each really executed")
def stale(answer):
    for history, notebook in _sessions():
        ran, would = _execute(history)[0], _execute(notebook)[0]
        want = {id for id in ran if would.get(id) is None or ran[id] != would[id]}
        _judge(answer, history, notebook, set | frozenset, want)


@core.exercise("records.4", "the names to warn about right for more than 300 sessions, each really executed")
def suspects(answer):
    for history, notebook in _sessions():
        *runs, last = history
        ids, want = [c.id for c in notebook], []
        if last.id in ids:  # a page that no longer uses a name in this cell still has a value for it
            above = notebook[: ids.index(last.id)]
            had, would = (_execute([*some, last])[1][last.id] for some in (runs, above))
            want = sorted(n for n in last.uses if had[n] != would[n])
        _judge(answer, history, notebook, list | tuple, want)

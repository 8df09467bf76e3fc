"""`course record`: the only writer of outputs. Execute worked lessons and store what came.

On a GPU it renews everything; with `--cpu`, on any machine, marked cells alone, which are the same everywhere.
A fresh kernel runs all cells in order; an error leaves the notebook as it was.
"""

import concurrent.futures
import datetime
import json
import os
import queue
import re
import subprocess
import sys

from course_lib.authoring import kernel, notebook, outputs, prose, run, stamps
from course_lib.authoring.notebook import CourseError

ABOUT = """
import json, platform
import torch
from course_lib import machine
try:
    from triton import __version__ as triton
except ImportError:
    triton = None
gpus = torch.cuda.device_count()
print(json.dumps({"gpu": f"{gpus} × " * (gpus > 1) + machine.name(), "host": machine.host(),
                  "torch": torch.__version__, "triton": triton, "python": platform.python_version()}))
"""


def record_cmd(args):
    "Record the given lessons, or say with `--check` what is behind. Returns 1 where one failed or is behind."
    if not (args.lessons or args.cpu or args.check):
        raise CourseError(
            "name the lessons to record; --cpu and --check take all of them where none is named"
        )
    chosen = list(run.worked(args.lessons, everything=not args.lessons).values())
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
    if not (args.cpu or args.check or kernel.has_cuda()):
        raise CourseError("figures are recorded on a GPU, and there is no CUDA device here; --cpu needs none")
    if args.parallel:
        return _side_by_side(chosen, args)
    status = 0
    for path in chosen:
        try:
            print(_check(path) if args.check else _record(path, args), flush=True)
        except CourseError as e:
            print(e, file=sys.stderr)
            status = 1
    return status


def _check(path):
    nb = notebook.load(path)
    if notebook.is_draft(nb):
        return f"{path.stem}: a draft, which has no recording from a GPU"
    behind = []
    if stale := stamps.stale(nb):
        behind.append(f"changed since they were recorded: {', '.join(stale)}")
    if missing := prose.missing(nb):
        behind.append(f"figures that were not recorded: {', '.join(missing)}")
    behind += outputs.problems(nb)
    if behind:
        raise CourseError(f"{path.stem}: {'; '.join(behind)}")
    return f"{path.stem}: up to date"


def _record(path, args):
    nb = notebook.load(path)
    source = None if args.cpu else _provenance(path, args)
    env = {"COURSE_RECORDING": "1"} | ({"CUDA_VISIBLE_DEVICES": ""} if args.cpu else {})
    result = run.execute(nb, path.stem, ask=None if args.cpu else ABOUT, env=env)
    if result.failed:
        cell, error = result.failed
        raise CourseError(f"{path.stem}, {run.at(nb, cell)}: {error}; nothing was recorded")
    cells = store(nb, result, source)
    if leaks := outputs.problems(nb):
        raise CourseError(f"{path.stem}: {leaks[0]}; nothing was recorded")
    figures = notebook.stamp(nb).get("figures", {})
    text = _renew_text(nb, figures)
    notebook.save(nb, args.out / path.name if args.out else path)
    lines = [f"{path.stem}: {cells} cells recorded" + (f", {len(result.figures)} figures" if source else "")]
    lines += [f"  the numbers in {text} cells of its text renewed: run `course build`"] if text else []
    return "\n".join([*lines, *(f"  {p}" for p in prose.problems(nb, figures) if not args.cpu)])


def store(nb, result, source):
    """Put an execution's outputs, figures and stamps into the notebook `nb`; returns how many cells it renewed.

    `source` is {commit, clean}; where it is None, only marked cells are renewed. A figure that this run did
    not make is kept while the code still notes it: its cell needs another machine.
    """
    now = stamps.hashes(nb)
    code = [c for c in nb["cells"] if c["cell_type"] == "code"]
    new = [c["id"] for c in code if c["id"] in result.ran and (source or run.is_marked(c))]
    for cell in code:
        ran = result.ran.get(cell["id"])
        cell["execution_count"] = ran.count if ran else None
        if cell["id"] in new:
            cell["outputs"] = outputs.clean(json.loads(json.dumps(ran.outputs)))
        for noise in ("execution", "ExecuteTime", "collapsed", "scrolled"):
            cell["metadata"].pop(noise, None)
    nb["metadata"].pop("widgets", None)
    nb["metadata"]["language_info"] = {"name": "python"}
    stamp = dict(notebook.stamp(nb))
    cells = {name: old for name, old in stamp.get("cells", {}).items() if name in now}
    if source:
        about, today = json.loads(result.asked), datetime.date.today().isoformat()
        mine = {"machine": about["gpu"], "torch": about["torch"], "date": today, "commit": source["commit"]}
        patterns = prose.noted(nb)
        kept = {n: f for n, f in stamp.get("figures", {}).items() if any(p.fullmatch(n) for p in patterns)}
        # Six digits say all that a measurement knows.
        made = {n: f | {"value": float(f"{f['value']:.6g}")} | mine for n, f in result.figures.items()}
        stamp = {**source, **about, "date": today, "figures": kept | made}
    nb["metadata"]["recorded"] = stamp | {"cells": cells | {name: now[name] for name in new}}
    return len(new)


def _renew_text(nb, figures):
    "Bring tagged numbers in the text up to date; returns how many cells changed."
    changed = 0
    for cell in nb["cells"]:
        if cell["cell_type"] == "markdown":
            after = prose.renewed(notebook.source(cell), figures)
            changed += after != notebook.source(cell)
            cell["source"] = after.splitlines(keepends=True)
    return changed


def _side_by_side(chosen, args):
    "Record each lesson in a process with a GPU and a share of the cores of its own; those for all GPUs follow."
    import torch

    count = torch.cuda.device_count()
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[:count]
    gpus = gpus if len(gpus) == count else [str(i) for i in range(count)]
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // count)
    free = queue.SimpleQueue()
    for i, gpu in enumerate(gpus):
        free.put((gpu, cores[i * share :][:share] or cores))
    options = ["--commit", args.commit] * (args.commit is not None) + ["--dirty"] * args.dirty
    options += ["--out", str(args.out)] if args.out else []

    def child(path, gpu=None, cores=cores):
        env = os.environ | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu is not None else {})
        words = [sys.executable, "-m", "course_lib.authoring.cli", "record", str(path), *options]
        process = subprocess.Popen(words, env=env)
        os.sched_setaffinity(process.pid, cores)
        return process.wait()

    def on_a_free_gpu(path):
        mine = free.get()
        try:
            return child(path, *mine)
        finally:
            free.put(mine)

    alone = [p for p in chosen if notebook.load(p)["metadata"]["course"].get("gpus") == "all"]
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        status = list(pool.map(on_a_free_gpu, [p for p in chosen if p not in alone]))
    return max([*status, *map(child, alone)])


def _provenance(path, args):
    "{commit, clean} of what is recorded: from git, or as the caller says. Raises CourseError."
    if args.commit is not None and not re.fullmatch(r"[0-9a-f]{7,40}", args.commit):
        raise CourseError(f"--commit {args.commit!r} is not a commit; expected 7 to 40 hexadecimal digits")
    head = _git("rev-parse", "--verify", "HEAD").strip() if (notebook.ROOT / ".git").exists() else ""
    if not (head or args.commit):
        raise CourseError("there is no git here to ask for the commit: name it, as in --commit abc1234")
    if not head:
        return {"commit": args.commit, "clean": not args.dirty}
    if args.commit is not None and not head.startswith(args.commit):
        raise CourseError(f"--commit {args.commit} is not what is checked out here, {head[:10]}")
    changed = _changed(path)
    if changed and not args.dirty:
        raise CourseError(
            f"{path.stem}: {changed} differs from the last commit: commit first, or say --dirty"
        )
    return {"commit": head, "clean": not (changed or args.dirty)}


def _changed(path):
    "What a recording depends on and git does not have, or ''. Recorded outputs and text don't count."
    if status := _git("status", "--porcelain", "--", "course_lib", "pyproject.toml"):
        return status.splitlines()[0][3:]
    name = path.relative_to(notebook.ROOT).as_posix()
    codes = []
    for text in (_git("show", f"HEAD:{name}") or '{"cells": []}', path.read_text(encoding="utf-8")):
        codes.append([notebook.source(c) for c in json.loads(text)["cells"] if c["cell_type"] == "code"])
    return "" if codes[0] == codes[1] else name


def _git(*words):
    "What git prints; empty where it fails or is not installed."
    try:
        return subprocess.run(
            ["git", "-C", notebook.ROOT, *words], capture_output=True, text=True, encoding="utf-8"
        ).stdout
    except FileNotFoundError:
        return ""

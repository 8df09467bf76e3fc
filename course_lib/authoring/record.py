"""`course record`: execute worked lessons and store what came.

It is the only writer of outputs. On a GPU everything is renewed; with `--cpu` marked cells alone, which
are the same on every machine. A fresh kernel runs all cells in order; an error leaves the notebook as it was.
"""

import concurrent.futures
import datetime
import fnmatch
import json
import os
import platform
import queue
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from course_lib import machine
from course_lib.authoring import catalogue, kernel, notebook, outputs, prose, rules, stamps
from course_lib.authoring.notebook import CourseError


def worked(words):
    "The paths of the worked notebooks that `words` name; all of them where there are none."
    known = notebook.lessons(notebook.NBS)
    return [known[n] for n in dict.fromkeys(notebook.resolve(w, notebook.NBS) for w in words) or known]


def code_cells(nb):
    "The cells of a notebook that are executed."
    return [c for c in nb["cells"] if c["cell_type"] == "code" and notebook.source(c).strip()]


def execute(nb, name, env=None, done=None, timeout=None):
    """Execute the code cells of the worked notebook `nb` in order; `name` is for the lines that are printed.

    Returns ({cell's id: kernel.Ran}, {noted figure: its row}); raises CourseError where a cell fails. Cells
    run in a temporary folder, so that they write nothing into the repository. `env` adds variables; `done`
    is a dict to fill, for who wants what ran before a failure; `timeout` is in seconds for each cell.
    """
    cells, done, figures = code_cells(nb), {} if done is None else done, {}
    with tempfile.TemporaryDirectory(prefix="course-run-", ignore_cleanup_errors=True) as scratch:
        notes, folder = Path(scratch, "figures.jsonl"), Path(scratch, "nbs")
        folder.mkdir()
        with kernel.Session(folder, timeout, env={"COURSE_FIGURES": str(notes), **(env or {})}) as session:
            for i, cell in enumerate(cells):
                ran = done[cell["id"]] = session.execute(notebook.source(cell))
                print(
                    f"{name}  {i + 1}/{len(cells)}  {cell['id']}  {ran.seconds:.1f} s\n", end="", flush=True
                )
                if ran.error:
                    raise CourseError(f"{name}, cell `{cell['id']}`: {ran.error}")
        if notes.exists():
            rows = [json.loads(line) for line in notes.read_text(encoding="utf-8").splitlines()]
            figures = {row.pop("name"): row for row in rows}
    return done, figures


def record_cmd(args):
    "Record the given lessons, or say with `--check` what is behind. Returns 1 where one failed or is behind."
    if not (args.lessons or args.cpu or args.check):
        raise CourseError("name the lessons to record; with --cpu or --check no name means all of them")
    paths = worked(args.lessons)
    if not (args.cpu or args.check or machine.has_gpu()):
        raise CourseError("figures are recorded on a GPU, and there is no CUDA device here; --cpu needs none")
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
    if args.parallel and not (args.cpu or args.check):
        return _side_by_side(paths, args)
    status = 0
    for path in paths:
        try:
            print(_check(path) if args.check else _record(path, args), flush=True)
        except CourseError as e:
            print(e, file=sys.stderr)
            status = 1
    return status


def waiting(nb):
    "The cells of `nb` that need several GPUs (`metadata.gpus`), and that changed since a recording there."
    old = notebook.stamp(nb).get("cells", {})
    return [c for c in nb["cells"] if c["metadata"].get("gpus") and c["id"] not in old]


def behind(nb):
    "What a recording of the worked notebook `nb` would bring up to date, as sentences; nothing for a draft."
    if notebook.is_draft(nb):
        return []
    old, figures = (notebook.stamp(nb).get(key, {}) for key in ("cells", "figures"))
    later = [cell["id"] for cell in waiting(nb)]
    stale = [name for name, now in stamps.hashes(nb).items() if old.get(name) != now and name not in later]
    rest = {**nb, "cells": [c for c in nb["cells"] if c.get("id") not in later]}
    missing = [name for name in prose.noted(rest) if not fnmatch.filter(figures, name)]
    found = {"cells changed since they were recorded": stale, "figures not recorded": missing}
    return [f"{what}: {', '.join(names)}" for what, names in found.items() if names]


def _check(path):
    nb = notebook.load(path)
    rules.check(nb, path.stem)
    if found := behind(nb) + outputs.problems(nb):
        raise CourseError(f"{path.stem}: {'; '.join(found)}")
    if notebook.is_draft(nb):
        return f"{path.stem}: a draft: no recording from a GPU"
    later = ", ".join(cell["id"] for cell in waiting(nb))
    return f"{path.stem}: up to date" + f"; not recorded on so many GPUs yet: {later}" * bool(later)


def _record(path, args):
    nb = notebook.load(path)
    rules.check(nb, path.stem)
    source = None if args.cpu else _provenance(args)
    env = {"COURSE_RECORDING": "1"} | ({"CUDA_VISIBLE_DEVICES": ""} if args.cpu else {})
    done, figures = execute(nb, path.stem, env)
    count = store(nb, done, figures, source)
    if found := outputs.problems(nb):
        raise CourseError(f"{path.stem}: {found[0]}; nothing was recorded")
    notebook.save(nb, args.out / path.name if args.out else path)
    took = sum(ran.seconds for ran in done.values())  # to plan the next recording
    lines = [f"{path.stem}: {count} cells and {len(figures) if source else 0} figures recorded, {took:.0f} s"]
    return "\n  ".join(lines + prose.problems(nb, notebook.stamp(nb).get("figures", {})))


def store(nb, done, noted, source):
    """Put the cells that were executed, the noted figures and hashes into `nb`; returns how many cells.

    `source` is {commit, clean}, or None to renew marked cells alone. A figure that this run did not make is
    kept while the code still notes it: its cell needs another machine. So is the output of a cell that needs
    more GPUs (`metadata.gpus`) than there are, until its code changes.
    """
    now, stamp, new = stamps.hashes(nb), notebook.stamp(nb), {}
    old, gpus = stamp.get("cells", {}), torch.cuda.device_count()
    for cell in nb["cells"]:
        if ran := done.get(cell["id"]):
            cell["execution_count"] = ran.count
            if source and cell["metadata"].get("gpus", 0) > gpus:
                if old.get(cell["id"]) != now[cell["id"]]:
                    cell["outputs"] = outputs.clean(ran.outputs)
                    old.pop(cell["id"], None)
            elif source or notebook.is_marked(cell):
                cell["outputs"] = outputs.clean(ran.outputs)
                new[cell["id"]] = now[cell["id"]]
        elif cell["cell_type"] == "code":  # an empty one
            cell |= {"execution_count": None, "outputs": []}
    nb["metadata"].pop("widgets", None)
    nb["metadata"]["language_info"] = {"name": "python"}
    figures = stamp.get("figures", {})
    if source:
        about, today = _about(), datetime.date.today().isoformat()
        mine = {"machine": about["gpu"], "torch": about["torch"], "date": today, "commit": source["commit"]}
        figures = {n: figures[n] for name in prose.noted(nb) for n in fnmatch.filter(figures, name)}
        # Six digits say all that a measurement knows.
        figures |= {n: f | {"value": float(f"{f['value']:.6g}")} | mine for n, f in noted.items()}
        stamp = {**source, **about, "date": today, "figures": figures}
    cells = {name: then for name, then in old.items() if name in now}
    nb["metadata"]["recorded"] = {**stamp, "cells": cells | new}
    for cell in nb["cells"]:
        if cell["cell_type"] == "markdown":
            cell["source"] = prose.renewed(notebook.source(cell), figures).splitlines(keepends=True)
    return len(new)


def _about():
    "The machine and the versions of a recording."
    gpus = torch.cuda.device_count()
    name = f"{gpus} × " * (gpus > 1) + machine.name()
    versions = {"triton": catalogue.triton_version(), "python": platform.python_version()}
    return {"gpu": name, "host": machine.host(), "torch": torch.__version__, **versions}


def _side_by_side(paths, args):
    "Record each lesson in a process with a GPU and cores of its own; afterwards those that need all GPUs."
    count, cores = torch.cuda.device_count(), sorted(os.sched_getaffinity(0))
    gpus = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))).split(",")
    free = queue.SimpleQueue()
    for i, gpu in enumerate(gpus):
        free.put((gpu, cores[len(cores) * i // count : len(cores) * (i + 1) // count] or cores))
    options = [f"--commit={args.commit}"] * bool(args.commit) + ["--dirty"] * args.dirty
    options += [f"--out={args.out}"] * bool(args.out)

    def child(path, place=None):
        gpu, share = place or free.get()
        words = [sys.executable, "-m", "course_lib.authoring.cli", "record", path.stem, *options]
        process = subprocess.Popen(words, env=os.environ | {"CUDA_VISIBLE_DEVICES": gpu})
        os.sched_setaffinity(process.pid, share)
        status = process.wait()
        free.put((gpu, share))
        return status

    last = [p for p in paths if notebook.load(p)["metadata"].get("course", {}).get("gpus") == "all"]
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        status = [*pool.map(child, [p for p in paths if p not in last])]
    return int(any(status + [child(p, (",".join(gpus), cores)) for p in last]))


def _provenance(args):
    "{commit, clean} of the library: from git, or as the caller says. The notebook holds its own code."
    if args.commit and not re.fullmatch(r"[0-9a-f]{7,40}", args.commit):
        raise CourseError(f"--commit {args.commit!r} is not a commit; expected 7 to 40 hexadecimal digits")
    commit = args.commit or _git("rev-parse", "HEAD").strip()
    if not commit:
        raise CourseError("there is no git here to ask for the commit: name it, as in --commit abc1234")
    changed = _git("status", "--porcelain", "--", "course_lib", "pyproject.toml")[3:].partition("\n")[0]
    if changed and not args.dirty:
        raise CourseError(f"{changed} differs from the last commit: commit first, or say --dirty")
    return {"commit": commit, "clean": not (changed or args.dirty)}


def _git(*words):
    "What git prints; nothing where there is no repository."
    if not (notebook.ROOT / ".git").exists():
        return ""
    command = ["git", "-C", notebook.ROOT, *words]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8").stdout

"""`course record`: the only writer of outputs. Execute worked lessons on a GPU host and store what came.

A fresh kernel runs all cells in order; an error leaves the notebook as it was.
"""

import datetime
import json
import re
import shutil
import subprocess
import sys

from course_lib.authoring import kernel, notebook, outputs, prose, run
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
    "Record the given lessons. Returns 1 if one of them could not be."
    status = 0
    for number, path in run.worked(args.lessons).items():
        try:
            print(_record(number, path, args), flush=True)
        except CourseError as e:
            print(e, file=sys.stderr)
            status = 1
    return status


def _record(number, path, args):
    nb = notebook.load(path)
    stamp = nb["metadata"].get("recorded")
    stamp = stamp if isinstance(stamp, dict) else {}
    if stamp.get("source") == notebook.code_hash(nb) and "figures" in stamp and not args.force:
        text = _renew_text(nb, stamp["figures"])
        if text:
            notebook.save(nb, path)
        more = f"; the numbers in {text} cells of its text renewed, now run `course build`" if text else ""
        return f"{path.stem}: its code has not changed, so its outputs stay (--force records again){more}"
    source = _provenance(path, args)
    if not args.force and not kernel.has_cuda():
        raise CourseError(
            f"{path.stem}: recorded figures come from a GPU, and there is no CUDA device here; "
            f"--force records this machine's all the same"
        )
    result = run.execute(nb, path.stem, ask=ABOUT, env={"COURSE_RECORDING": "1"})
    if result.failed:
        cell, error = result.failed
        raise CourseError(f"{path.stem}, {run.at(nb, cell)}: {error}; nothing was recorded")
    store(nb, result, source)
    if leaks := outputs.problems(nb):
        raise CourseError(f"{path.stem}: {leaks[0]}; nothing was recorded")
    renewed = _renew_text(nb, nb["metadata"]["recorded"]["figures"])
    notebook.save(nb, path)
    lines = [f"{path.stem}: recorded on {nb['metadata']['recorded']['gpu']}, {len(result.figures)} figures"]
    lines += [f"  left out without a CUDA device: {', '.join(result.skipped)}"] if result.skipped else []
    lines += [f"  the numbers in {renewed} cells of its text renewed: run `course build`"] if renewed else []
    lines += [f"  {p}" for p in prose.problems(nb, nb["metadata"]["recorded"]["figures"])]
    return "\n".join(lines)


def store(nb, result, source):
    """Put an execution's outputs, figures and stamp into the notebook `nb`.

    `source` is {commit, clean}. A figure that this run did not make is kept while the code still notes it
    (its cell needs another machine), and dropped otherwise.
    """
    for cell in nb["cells"]:
        if cell["cell_type"] == "code":
            ran = result.ran.get(cell["id"])
            cell["execution_count"] = ran.count if ran else None
            cell["outputs"] = outputs.clean(json.loads(json.dumps(ran.outputs))) if ran else []
        for noise in ("execution", "ExecuteTime", "collapsed", "scrolled"):
            cell["metadata"].pop(noise, None)
    nb["metadata"].pop("widgets", None)
    nb["metadata"]["language_info"] = {"name": "python"}
    about, today = json.loads(result.asked), datetime.date.today().isoformat()
    mine = {"machine": about["gpu"], "torch": about["torch"], "date": today, "commit": source["commit"]}
    before = (nb["metadata"].get("recorded") or {}).get("figures", {})
    patterns = prose.noted(nb)
    figures = {n: f for n, f in before.items() if any(p.fullmatch(n) for p in patterns)}
    for name, figure in result.figures.items():
        # Six digits say all that a measurement knows.
        figures[name] = {**figure, "value": float(f"{figure['value']:.6g}"), **mine}
    stamp = {"source": notebook.code_hash(nb), **source, **about, "date": today, "figures": figures}
    nb["metadata"]["recorded"] = stamp


def _renew_text(nb, figures):
    "Bring tagged numbers in the text up to date; returns how many cells changed."
    changed = 0
    for cell in nb["cells"]:
        if cell["cell_type"] == "markdown":
            before = notebook.source(cell)
            after = prose.renewed(before, figures)
            if after != before:
                cell["source"] = after.splitlines(keepends=True)
                changed += 1
    return changed


def _provenance(path, args):
    "{commit, clean} of what is recorded: from git, or as the caller says. Raises CourseError."
    if args.commit is not None and not re.fullmatch(r"[0-9a-f]{7,40}", args.commit):
        raise CourseError(f"--commit {args.commit!r} is not a commit; expected 7 to 40 hexadecimal digits")
    commit = _head()
    if commit is None:
        if args.commit is None:
            raise CourseError(
                "there is no git here to ask for the commit: name it, `course record 05 --commit abc1234`"
            )
        return {"commit": args.commit, "clean": not args.dirty}
    if args.commit is not None and not commit.startswith(args.commit):
        raise CourseError(f"--commit {args.commit} is not what is checked out here, {commit[:10]}")
    changed = _changed(path)
    if changed and not args.dirty:
        raise CourseError(
            f"{path.stem}: {changed} differs from the last commit, so nobody could repeat the recording: "
            f"commit first, or say --dirty"
        )
    return {"commit": commit, "clean": not (changed or args.dirty)}


def _head():
    "The commit that is checked out, or None: no git, no repository, or one without a commit (a copied tree)."
    if not (notebook.ROOT / ".git").exists() or shutil.which("git") is None:
        return None
    try:
        return _git("rev-parse", "--verify", "--quiet", "HEAD").strip()
    except CourseError:
        return None


def _changed(path):
    "What a recording depends on and git does not have, or ''. Recorded outputs and prose don't count."
    status = _git("status", "--porcelain", "--", "course_lib", "pyproject.toml").splitlines()
    if status:
        return status[0][3:]
    name = path.relative_to(notebook.ROOT).as_posix()
    try:
        committed = json.loads(_git("show", f"HEAD:{name}"))
        same = notebook.code_hash(committed) == notebook.code_hash(notebook.load(path))
    except (CourseError, ValueError, KeyError, TypeError):
        same = False
    return "" if same else name


def _git(*words):
    done = subprocess.run(
        ["git", "-C", notebook.ROOT, *words], capture_output=True, text=True, encoding="utf-8"
    )
    if done.returncode:
        raise CourseError(f"git {words[0]} failed: {(done.stderr.strip().splitlines() or ['no message'])[0]}")
    return done.stdout

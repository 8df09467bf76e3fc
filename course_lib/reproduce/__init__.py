"""A run that can be had again: what ran is written down beside its result, and run once more from that.

`run(fn, config)` calls a training function, and saves its result with a manifest: code, uncommitted
changes, packages, configuration, seed, data, machine. `rerun(path)` repeats the run from its manifest
alone and compares bit for bit; where anything differs it names it. From a shell:
`python -m course_lib.reproduce runs/digits-…/manifest.json`.
"""

import contextlib
import copy
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils import _pytree as pytree

from course_lib import files
from course_lib.reproduce import comparison as compare
from course_lib.reproduce import manifest as manifests
from course_lib.reproduce.manifest import ManifestError, describe, load, save
from course_lib.reproduce.seeding import loader_options, sample_rng, seed_everything, seeded

__all__ = [
    "ManifestError", "Rerun", "Run", "describe", "load", "loader_options", "rerun", "run", "sample_rng",
    "save", "seed_everything", "seeded", "uses",
]  # fmt: skip

_data = None  # what the run in progress said that it reads: {source: digest}


class Run(NamedTuple):
    "What `run` returns: the function's result, the manifest, and the folder where both are."

    result: object
    manifest: dict
    folder: Path


class Rerun(NamedTuple):
    "`same`, bit for bit, or not; `results` says where it differs, `differences` what changed around it."

    same: bool
    results: list
    differences: list

    def __str__(self):
        text = "the same result, bit for bit"
        if not self.same:
            text = "another result:\n" + _listed(self.results[:6], self.results[6:], "results")
        if not self.differences:
            return text + "\nnothing that the manifest names has changed"
        packages = [d for d in self.differences if d.name.startswith("packages.")]
        other = [d for d in self.differences if not d.name.startswith("packages.")]
        return text + "\nchanged since:\n" + _listed(other + packages[:8], packages[8:], "differences")

    __repr__ = __str__


def _listed(shown, more, field):
    lines = [f"  {x}" for x in shown]
    if more:
        lines.append(f"  and {len(more)} more (in .{field})")
    return "\n".join(lines)


def run(fn, config, *, seed=0, folder=None, deterministic=False):
    """Call `fn(config)` with everything seeded; save the result and its manifest; return a `Run`.

    `fn` is a function of a module, or its name "module:function"; it takes a dict that JSON can hold and
    returns tensors, numbers or text, alone or in dicts and lists. `folder` receives `result.pt` and
    `manifest.json`, the manifest last, so that a manifest always has its result; by default it is a new
    folder under `runs/`. `deterministic` asks torch for deterministic algorithms, which on a GPU cost time
    and raise where there are none. Random state and settings of the caller are untouched.
    Raises ManifestError.
    """
    name = manifests.name_of(fn)
    fn = manifests.function(name)
    manifests.check_config(config)
    folder = _new_folder(folder, name)
    settings = manifests.settings() | {"deterministic": bool(deterministic)}
    start = time.perf_counter()
    result, data = _call(fn, config, seed, settings)
    seconds = time.perf_counter() - start
    found = _digest(result)
    made = describe(config, seed=seed, function=name, data=data)
    made |= {"settings": settings, "result": found, "seconds": seconds}
    folder.mkdir(parents=True, exist_ok=True)
    on_cpu = pytree.tree_map_only(torch.Tensor, lambda t: t.detach().cpu(), result)
    with files.replacing(folder / "result.pt") as tmp:
        torch.save(on_cpu, tmp)
    save(made, folder / "manifest.json")
    return Run(result, made, folder)


def _new_folder(folder, name):
    if folder is None:
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S-%f")
        return Path("runs") / f"{name.rpartition(':')[2]}-{stamp}"
    folder = Path(folder)
    if (folder / "manifest.json").exists():
        raise ManifestError(f"{folder} already holds a run: give another folder, so that none is overwritten")
    return folder


def rerun(manifest, *, fresh=False, timeout=600):
    """Repeat a run from its manifest (a file, its folder, or the dict); return a `Rerun`.

    Threads, dtype and determinism are set as the manifest says, and put back. `fresh=True` repeats it in a
    new Python process, which knows nothing but the manifest and the files on disk, within `timeout` seconds.
    Raises ManifestError.
    """
    from_file = isinstance(manifest, str | os.PathLike)
    then = load(manifest) if from_file else manifests.check(manifest)
    kept = manifests.file_of(manifest).parent / "result.pt" if from_file else None
    if then["function"] is None:
        raise ManifestError(
            "this manifest names no function, so it can be read but not run again: start runs with "
            "reproduce.run and a function of a module"
        )
    if fresh:
        return _rerun_fresh(then, kept, timeout)
    fn = manifests.function(then["function"])
    result, data = _call(fn, then["config"], then["seed"], then["settings"])
    now = describe(then["config"], seed=then["seed"], function=then["function"], data=data)
    # These were set as they were then; what they are in the caller's process is no difference.
    now["settings"] |= {k: then["settings"][k] for k in manifests.SETTINGS}
    words = compare.compare(then["result"], _digest(result), result, kept)
    return Rerun(not words, words, compare.differences(then, now))


def _call(fn, config, seed, settings):
    "The function's result and the data it noted, under a seed and settings that are put back afterwards."
    global _data
    outer, _data = _data, {}
    before = manifests.settings()
    try:
        with seeded(seed):
            manifests.apply(settings)
            result = fn(copy.deepcopy(config))
        return result, _data
    finally:
        _data = outer
        manifests.apply(before)


def _digest(result):
    try:
        return compare.digest(result)
    except compare.ResultError as e:
        raise ManifestError(str(e)) from None


def uses(source, *tensors):
    """Note inside a training function which data it reads: a sentence, and the tensors themselves.

    The manifest keeps the sentence and a digest of the values. Outside `run` and `rerun` nothing is noted.
    """
    if _data is not None:
        name = str(source) if str(source) not in _data else f"{source} ({len(_data) + 1})"
        _data[name] = compare.combined(compare.digest(list(tensors)))


def _rerun_fresh(then, kept, timeout):
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        out = folder / "rerun.json"
        save(then, folder / "manifest.json")
        if kept is not None and kept.exists():
            (folder / "result.pt").write_bytes(kept.read_bytes())
        command = [sys.executable, "-m", "course_lib.reproduce", str(folder), "--out", str(out)]
        # The path is not in a manifest, for it says where the code is on this machine.
        env = os.environ | {"PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}
        env |= {k: v for k, v in then["settings"].get("variables", {}).items() if v is not None}
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env)
        except subprocess.TimeoutExpired:
            raise ManifestError(
                f"the run did not end within {timeout} s and was stopped: give a longer timeout"
            ) from None
        if not out.exists():
            last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
            raise ManifestError(f"the run failed in a fresh process: {last}")
        same, words, found = json.loads(out.read_text(encoding="utf-8"))
    return Rerun(same, words, [compare.Difference(*d) for d in found])


def main(arguments):
    "Rerun a manifest and print what came of it. Returns 0 when it is the same, 1 when not, 2 for bad input."
    if not arguments or arguments[0].startswith("-"):
        print("usage: python -m course_lib.reproduce MANIFEST", file=sys.stderr)
        return 2
    try:
        done = rerun(arguments[0])
    except ManifestError as e:
        print(e, file=sys.stderr)
        return 2
    with contextlib.suppress(BrokenPipeError):
        print(done)
    if arguments[1:2] == ["--out"]:
        with files.replacing(arguments[2]) as tmp:
            tmp.write_text(json.dumps(done, default=repr), encoding="utf-8")
    return 0 if done.same else 1

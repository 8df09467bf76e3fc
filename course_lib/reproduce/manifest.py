"""A manifest: all that a run's result depends on, as a dict that JSON can hold, and as a file."""

import datetime
import functools
import importlib
import importlib.metadata
import inspect
import json
import math
import os
import platform
import sys
from pathlib import Path

import torch

from course_lib import files, machine
from course_lib.reproduce import code as reproduce_code

SCHEMA = 1
# What every manifest holds, and of which type; one that lacks an entry is refused by name.
KEYS = {
    "schema": int,
    "created": str,
    "function": (str, type(None)),
    "config": dict,
    "seed": int,
    "repository": str,
    "commit": (str, type(None)),
    "clean": (bool, type(None)),
    "diff": (str, type(None)),
    "sources": dict,
    "packages": dict,
    "python": str,
    "machine": dict,
    "settings": dict,
    "data": dict,
    "result": dict,
}
SETTINGS = ("threads", "dtype", "deterministic", "matmul_precision", "cudnn_benchmark")
# Variables of the environment that change a run's bits.
VARIABLES = (
    "PYTHONHASHSEED",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
)


class ManifestError(ValueError):
    "A run or a manifest that can't be used, in one sentence."

    def _render_traceback_(self):
        return [str(self)]


def describe(config, *, seed, function=None, data=None):
    """Everything about this moment that a run's result depends on; `data` is {source: digest}.

    Commit, uncommitted changes and sources are those of the function's module, of `course_lib` without one.
    """
    check_config(config)
    module = sys.modules[function.partition(":")[0] if function else "course_lib"]
    file, gpu = getattr(module, "__file__", None), machine.has_gpu()
    git, why = reproduce_code.repository(file)
    found = reproduce_code.essentials(config, seed, git)
    if found["clean"] is False:
        found |= reproduce_code.uncommitted(file)
    return found | {
        "schema": SCHEMA,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "function": function,
        "repository": why,
        "sources": reproduce_code.sources(module.__name__),
        "packages": dict(_packages()),
        "machine": {
            "device": machine.name(),
            "kind": machine.device().type,
            "system": f"{platform.system()} {platform.machine()}",
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "cuda": torch.version.cuda if gpu else None,
            "cudnn": torch.backends.cudnn.version() if gpu else None,
        },
        "settings": settings(),
        "data": dict(data or {}),
        "result": {},
    }


@functools.cache
def _packages():
    found = {}
    for d in importlib.metadata.distributions():
        if d.metadata and d.metadata["Name"]:
            # The first on the path is the one that is imported.
            found.setdefault(d.metadata["Name"].lower().replace("_", "-"), d.version)
    return tuple(sorted(found.items()))


def settings():
    "The settings of this process that change a run's bits."
    return {
        "threads": torch.get_num_threads(),
        "dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "variables": {name: os.environ.get(name) for name in VARIABLES},
    }


def apply(settings):
    "Set what `settings()` returned, but the environment's variables, which libraries read when they start."
    torch.set_num_threads(settings["threads"])
    torch.set_default_dtype(getattr(torch, settings["dtype"]))
    torch.set_float32_matmul_precision(settings["matmul_precision"])
    torch.backends.cudnn.benchmark = settings["cudnn_benchmark"]
    if torch.are_deterministic_algorithms_enabled() != settings["deterministic"]:
        torch.use_deterministic_algorithms(settings["deterministic"])  # imports Inductor, which takes seconds


# Functions and configurations that a manifest can hold


def name_of(fn):
    "The name under which another process can import `fn`: 'module:function'. Raises ManifestError."
    if isinstance(fn, str):
        return fn
    if not inspect.isfunction(fn):
        kind = type(fn).__name__
        raise ManifestError(f"run takes a function and was given a {kind}: pass a function of a module")
    if fn.__module__ == "__main__" or "<" in fn.__qualname__:
        where = "in this notebook or script" if fn.__module__ == "__main__" else "inside another function"
        raise ManifestError(
            f"{fn.__name__} is defined {where}, where no later process can import it from: "
            "move it to the top level of a .py file, import it, and run that"
        )
    return f"{fn.__module__}:{fn.__qualname__}"


def function(name):
    "The function that 'module:function' names. Raises ManifestError."
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ManifestError(f"function is {name!r}; expected 'module:function', as 'course_lib.models:mlp'")
    try:
        found = functools.reduce(getattr, attribute.split("."), importlib.import_module(module))
    except ImportError as e:
        raise ManifestError(
            f"{module} can't be imported here ({e}): put its folder on Python's path"
        ) from None
    except AttributeError:
        raise ManifestError(
            f"{module} has no {attribute}: the code has changed, check out its commit"
        ) from None
    if not callable(found):
        raise ManifestError(f"{name} is a {type(found).__name__}, not a function")
    return found


def check_config(config):
    "Raise ManifestError, naming the entry, unless JSON gives this dict back as it is."
    if not isinstance(config, dict):
        raise ManifestError(f"the configuration is a {type(config).__name__}; expected a dict")
    _check_plain(config, "config")


def _check_plain(value, where):
    if isinstance(value, dict):
        for k, v in value.items():
            if not isinstance(k, str):
                raise ManifestError(f"{where} has the key {k!r}; JSON's keys are text: write {str(k)!r}")
            _check_plain(v, f"{where}[{k!r}]")
    elif isinstance(value, list):
        for i, v in enumerate(value):
            _check_plain(v, f"{where}[{i}]")
    elif isinstance(value, tuple):
        raise ManifestError(f"{where} is a tuple, which JSON gives back as a list: write a list")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ManifestError(f"{where} is {value}, which JSON can't hold: write None, or text")
    elif type(value) not in (str, int, float, bool, type(None)):
        raise ManifestError(
            f"{where} is a {type(value).__name__}; a configuration holds text, numbers, True, False, None, "
            "lists and dicts: write its name or its value"
        )


# Manifests as files


def save(manifest, path):
    "Write a manifest as JSON; a reader sees the old file or the new one, never half of one."
    with files.replacing(path) as tmp:
        tmp.write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def load(path):
    "The manifest at `path`, a file or the folder of a run. Raises ManifestError in one sentence."
    path = file_of(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        raise ManifestError(f"{path} can't be read: {e.strerror}") from None
    except UnicodeDecodeError:
        raise ManifestError(f"{path} is not text, so it is no manifest") from None
    try:
        found = json.loads(text)
    except json.JSONDecodeError as e:
        cut = e.pos >= len(text.rstrip()) or "Unterminated" in e.msg
        what = "is cut short" if cut else f"is damaged at line {e.lineno}"
        raise ManifestError(f"{path} {what}, and is no JSON: copy it again from where it was made") from None
    return check(found, path)


def file_of(path):
    "The manifest's file where `path` is it or its folder."
    path = Path(path)
    return path / "manifest.json" if path.is_dir() else path


def check(found, path="the manifest"):
    "`found` if it is a manifest that this library can read; ManifestError otherwise."
    if not isinstance(found, dict) or not isinstance(found.get("schema"), int):
        raise ManifestError(f"{path} is not a manifest: it has no 'schema'; reproduce.run writes one")
    if found["schema"] > SCHEMA:
        raise ManifestError(
            f"{path} has schema {found['schema']}, from a newer library, and this one reads up to {SCHEMA}: "
            "update with `git pull`"
        )
    missing = [k for k in KEYS if k not in found]
    if missing:
        raise ManifestError(f"{path} lacks {', '.join(missing)}: it was cut, and can't be run again")
    wrong = [k for k, t in KEYS.items() if not isinstance(found[k], t)]
    if "settings" not in wrong:
        wrong += [f"settings.{k}" for k in SETTINGS if k not in found["settings"]]
    if wrong:
        raise ManifestError(f"{path} holds something unexpected under {', '.join(wrong)}: it was edited")
    return found

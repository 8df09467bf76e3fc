"""Comparing two runs: results bit for bit, and everything around them by name."""

import contextlib
import hashlib
import json
from typing import NamedTuple

import torch
from torch.utils import _pytree as pytree


class _Nothing:
    "Stands for what one of the two does not have: no value of a manifest equals it."

    def __repr__(self):
        return "nothing"


NOTHING = _Nothing()


class ResultError(ValueError):
    "A result that has no bits to compare, in one sentence."

    def _render_traceback_(self):
        return [str(self)]


class Difference(NamedTuple):
    "One named thing that was otherwise when the manifest was written."

    name: str
    then: object
    now: object

    def __str__(self):
        return f"{self.name}: {_short(self.then)} then, {_short(self.now)} now"


def _short(value):
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else text[:59] + "…"


# Around the result


def differing(then, now):
    """The names of all that differs between two nested dicts, sorted: 'config.lr', 'packages.torch'.

    Values that are no dicts are compared as a whole and with their types, since 1, 1.0 and True are equal
    in Python and not in a configuration.
    """
    return sorted(".".join(path) for path, _, _ in _paths(then, now))


def differences(then, now):
    "Everything that differs between two manifests but the result and the clock: a list of `Difference`."
    left_out = {"created", "seconds", "result", "schema", "diff", "diff_bytes"}  # the diff's digest is enough
    then, now = ({k: v for k, v in m.items() if k not in left_out} for m in (then, now))
    found = [Difference(".".join(path), a, b) for path, a, b in _paths(then, now)]
    found = [_shortened(d) if d.name == "diff_sha256" else d for d in found]
    # torch and NumPy first among the packages: they are what usually matters.
    return sorted(
        found, key=lambda d: (d.name.startswith("packages."), _package(d) not in ("torch", "numpy"))
    )


def _paths(then, now, above=()):
    for key in dict.fromkeys([*then, *now]):
        a, b = then.get(key, NOTHING), now.get(key, NOTHING)
        if isinstance(a, dict) and isinstance(b, dict):
            yield from _paths(a, b, (*above, key))
        elif type(a) is not type(b) or a != b:
            yield (*above, key), a, b


def _package(d):
    return d.name.removeprefix("packages.")


def _shortened(d):
    return d._replace(then=str(d.then)[:16], now=str(d.now)[:16])


# The result itself


def digest(result):
    """{place in the result: SHA-256 of its exact bits, type and shape}; places are paths, 'weights/0.bias'.

    0.0 and -0.0 differ, NaN equals NaN. Raises ResultError for what has no bits to compare (a module).
    """
    return {where: _digest_one(x, where) for where, x in leaves(result).items()}


def combined(digests):
    "One digest, 16 digits, of what `digest` returned."
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()[:16]


def leaves(result):
    "{place: value} of nested dicts, lists and tuples."
    found, _ = pytree.tree_flatten_with_path(result, is_leaf=lambda x: x is None)
    named = {"/".join(map(_step, path)) or "result": x for path, x in found}
    if len(named) != len(found):
        raise ResultError("two entries of the result have one name as text, such as 1 and '1': rename one")
    return named


def _step(key):
    return str(getattr(key, "key", getattr(key, "idx", key)))


def _digest_one(x, where):
    if isinstance(x, torch.Tensor):
        if x.layout is not torch.strided or x.is_quantized:
            raise ResultError(f"{where} is a tensor of layout {x.layout}: return it dense")
        flat = x.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        head = f"tensor {str(x.dtype).removeprefix('torch.')} {list(x.shape)} "
        return hashlib.sha256(head.encode() + flat.view(torch.uint8).numpy().tobytes()).hexdigest()
    if x is None or type(x) in (bool, int, str):
        return hashlib.sha256(f"{type(x).__name__} {x!r}".encode()).hexdigest()
    if isinstance(x, float):
        return hashlib.sha256(f"float {x.hex()}".encode()).hexdigest()
    kind = type(x).__name__
    raise ResultError(
        f"{where} is a {kind}: return tensors, numbers or text (model.state_dict() is a dict of them)"
    )


def compare(then, now, result, kept=None):
    """What differs between the digests `then` and `now`, in words; [] where nothing does.

    `result` is what was computed now. `kept` is the file that holds what was computed then: with it the
    words say where the values part and by how much.
    """
    lines = [f"{k}: not there now" for k in then if k not in now]
    lines += [f"{k}: not there then" for k in now if k not in then]
    differing = [k for k in then if k in now and then[k] != now[k]]
    old = {}
    if differing and kept is not None and kept.exists():
        with contextlib.suppress(Exception):  # a damaged file costs the detail, not the verdict
            old = leaves(torch.load(kept, weights_only=True))
    new = leaves(result)
    return lines + [_words(k, old[k], new[k]) if k in old else f"{k}: other bits" for k in differing]


def _words(where, old, new):
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
        return f"{where}: {_short(old)} then, {_short(new)} now"
    if old.shape != new.shape or old.dtype != new.dtype:
        return f"{where}: {old.dtype} {list(old.shape)} then, {new.dtype} {list(new.shape)} now"
    a, b = old.reshape(-1), new.detach().cpu().reshape(-1)
    off = (a != b) & ~((a != a) & (b != b))
    if not off.any():
        return f"{where}: equal values with other bits (the sign of a zero, or the kind of a NaN)"
    at = int(off.nonzero()[0])
    index = [int(i) for i in torch.unravel_index(torch.tensor(at), old.shape)] if old.dim() else []
    place = f", first at {index}" if index else ""
    text = f"{where}: {int(off.sum()):,} of {off.numel():,} values differ{place}"
    if a.dtype.is_complex:
        return text
    largest = float((a[off].double() - b[off].double()).abs().max())
    return f"{text} ({a[at].item():.9g} then, {b[at].item():.9g} now), by {largest:.2g} at most"

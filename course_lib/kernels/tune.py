"""Tuning as a search: launch every configuration of a space, time it, keep the fastest for that shape."""

import concurrent.futures
import contextlib
import functools
import itertools
from typing import NamedTuple

import numpy as np
import torch

from course_lib.kernels import KernelError, interpreted, replay

_best = {}  # {(kernel, key): configuration}, for this process


class Trial(NamedTuple):
    "A configuration, its seconds (None where it wasn't timed), and why it failed (None where it ran)."

    config: dict
    seconds: float | None
    error: str | None = None


class Map(NamedTuple):
    "What a search found: its `space` and a `Trial` for each configuration, in the space's order."

    space: dict
    trials: list

    @property
    def best(self):
        "The fastest configuration; the first one that ran where nothing was timed."
        ran = [t for t in self.trials if t.error is None]
        if not ran:
            raise KernelError(
                f"none of {len(self.trials)} configurations ran; the first said: {self.trials[0].error}"
            )
        return min(ran, key=lambda t: t.seconds or 0.0).config

    def ranked(self):
        "The timed trials, the fastest first."
        return sorted((t for t in self.trials if t.seconds is not None), key=lambda t: t.seconds)

    def table(self, down, across):
        "Seconds as an array [values of `down`, values of `across`], the best over all else; NaN: none ran."
        found = np.full((len(self.space[down]), len(self.space[across])), np.nan)
        for t in self.ranked()[::-1]:  # the fastest last, and so kept
            at = self.space[down].index(t.config[down]), self.space[across].index(t.config[across])
            found[at] = t.seconds
        return found


def configurations(space):
    "Every combination of a space {name: values}, as dicts; a list of dicts stays as it is."
    if not isinstance(space, dict):
        return list(space)
    return [dict(zip(space, values, strict=True)) for values in itertools.product(*space.values())]


def search(launch, space, seconds=0.05, report=None, turns=None):
    """Time `launch(**config)` for every configuration of `space` ({name: values}); returns a `Map`.

    Each is timed by `replay`, without the host. With `turns` (a `replay.Turns`) it is
    `launch(*inputs, **config)`, on each of its sets of inputs in turn. A configuration that the GPU refuses
    (too much shared memory, say) is a trial with an error. Without a GPU nothing is timed, for the
    interpreter's time says nothing, and `best` is the first. `report(trial)` is called after each.
    """
    if not interpreted():
        turns = turns or replay.Turns()
    trials = []
    for config in configurations(space):
        trials.append(_trial(launch, config, seconds, turns))
        if report:
            report(trials[-1])
        if interpreted():
            break
    return Map(space if isinstance(space, dict) else {}, trials)


def compile_all(launch, space, threads=8):
    "Launch every configuration once, from several threads, so that a search finds them all compiled."
    if interpreted():
        return

    def once(config):
        with contextlib.suppress(Exception):  # the search will say it
            launch(**config)

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        list(pool.map(once, configurations(space)))
    torch.cuda.synchronize()


def _trial(launch, config, seconds, turns):
    if interpreted():
        return Trial(config, None)
    try:
        graph = turns.capture(functools.partial(launch, **config))
        return Trial(config, turns.measure({"": graph}, seconds)[""].median)
    except Exception as e:
        # Triton's own errors (out of resources, a failed compilation) share no base class.
        return Trial(config, None, (str(e).strip().splitlines() or [type(e).__name__])[0][:200])


def remember(kernel, key, config):
    "Use `config` from now on where the kernel of that name meets `key`, in this process."
    _best[kernel, key] = config


def recall(kernel, key):
    "The configuration remembered for `key`, or None."
    return _best.get((kernel, key))


def settle(kernel, key, default, given):
    "The configuration for a launch: what was remembered for `key` or else `default`, and what was `given`."
    return {**_best.get((kernel, key), default), **{k: v for k, v in given.items() if v is not None}}

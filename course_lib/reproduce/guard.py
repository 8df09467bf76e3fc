"""A guard that watches the cells of a running notebook, and says when a result has lost its origin.

`guard()` starts it; from then on a cell that used something which a run from top to bottom would not give
it is followed by one sentence. `origin("accuracy")` prints the cells that a value comes from.
"""

import hashlib
import json
import os
from pathlib import Path

from course_lib.reproduce import cells
from course_lib.reproduce.names import read
from course_lib.reproduce.watch import Watch

_guards = {}  # one for each IPython shell of this process: there is one, but in tests


def guard(shell=None):
    """Start watching this notebook; prints one line. Called again it changes nothing.

    The order from top to bottom is that of the saved notebook where JupyterLab tells its name, else the
    order in which cells first ran. Raises RuntimeError outside IPython.
    """
    shell = shell or _shell()
    if shell in _guards:
        print("The guard is on already.")
        return
    _guards[shell] = Guard(shell)
    print("The guard is on: it speaks when a cell uses what a run from top to bottom would not give.")


def unguard(shell=None):
    "Stop watching."
    found = _guards.pop(shell or _shell(), None)
    if found:
        found.stop()


def origin(name, shell=None):
    "Which runs of which cells made a name's value, as an `Origin`. RuntimeError where no guard is on."
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"origin takes a name as text, as in origin('accuracy'), and was given {name!r:.60}")
    shell = shell or _shell()
    if shell not in _guards:
        raise RuntimeError(
            "no guard is on: call guard() in the notebook's first cell, and run the cells after it again"
        )
    return _guards[shell].origin(name)


def _shell():
    from IPython import get_ipython

    shell = get_ipython()
    if shell is None:
        raise RuntimeError("the guard watches a notebook's cells and found no IPython: use it in a notebook")
    return shell


class Guard:
    "A `Watch` of an IPython shell, through its events."

    def __init__(self, shell):
        self.shell, self.told, self.running = shell, set(), None
        self.watch = Watch(shell.user_ns)
        self.first = None
        # The first cell is the one that calls guard(): what it defined before is not seen.
        self.watch.before()
        shell.events.register("pre_run_cell", self.pre)
        shell.events.register("post_run_cell", self.post)

    def stop(self):
        self.shell.events.unregister("pre_run_cell", self.pre)
        self.shell.events.unregister("post_run_cell", self.post)

    def pre(self, info):
        self.watch.before()

    def post(self, result):
        info = result.info
        if info is None or not info.store_history or result.error_before_exec is not None:
            return
        source = self.shell.transform_cell(info.raw_cell)
        named = getattr(info, "cell_id", None)
        # Without ids (a terminal, some runners) a cell is known by its source alone.
        id = named or "source " + hashlib.sha256(info.raw_cell.encode()).hexdigest()[:12]
        if self.first is None:
            self.first = id
        self.watch.after(id, source, result.execution_count or 0)
        if named:
            self.speak()

    def speak(self):
        "One sentence, once, if the last run used what top to bottom would not give."
        step = cells.replay(self.watch.history)[-1]
        notebook, ordered = self.notebook()
        would = {s.cell.id: s for s in cells.replay(notebook)}
        reason = cells.why(step, would.get(step.cell.id), ordered)
        if reason is not None and reason not in self.told:
            self.told.add(reason)
            print(f"guard: {reason}.")

    def origin(self, name):
        found = cells.origin(name, self.watch.history, *self.notebook())
        if found.steps and found.reason and found.steps[-1].cell.id.startswith("source "):
            found = found._replace(
                reason=found.reason + " (no cell ids here: an edited cell counts as a new one)"
            )
        return found

    def notebook(self):
        "The cells from top to bottom, each with its latest source; and whether that order is known."
        ran = {c.id: c for c in self.watch.latest()}
        saved, mtime = _saved()
        ids = [id for id, _ in saved]
        if not set(ids) & set(ran):
            return list(ran.values()), False
        found = []
        for id, raw in saved:
            cell = ran.get(id)
            source = self.shell.transform_cell(raw)
            newer = cell is not None and mtime > self.watch.when[id]
            if cell is None or (newer and cells.meaning(source) != cells.meaning(cell.source)):
                # Edited and not run again, or never run: only its source is known.
                cell = read(id, source)
            found.append(cell)
        # What stood above guard() and has not run since was never seen.
        start = ids.index(self.first) if self.first in ids else 0
        found = [c for i, c in enumerate(found) if i >= start or c.id in ran]
        return _with_unsaved(found, list(ran.values()), set(ids), mtime, self.watch.when), True


def _with_unsaved(found, ran, ids, mtime, when):
    "Puts cells that are not in the file yet after the one that ran before them; deleted ones stay away."
    for i, cell in enumerate(ran):
        if cell.id not in ids and when[cell.id] > mtime:
            before = ran[i - 1].id if i else None
            at = next((k + 1 for k, c in enumerate(found) if c.id == before), 0)
            found.insert(at, cell)
    return found


def _saved():
    "The saved notebook's code cells [(id, source)] and its time of writing; ([], 0) where it is not known."
    # Jupyter Server tells its kernels the notebook's path under this name.
    path = os.environ.get("JPY_SESSION_NAME")
    try:
        mtime = os.stat(path).st_mtime
        nb = json.loads(Path(path).read_text(encoding="utf-8"))
        code = [c for c in nb["cells"] if c["cell_type"] == "code" and c.get("id")]
        return [(c["id"], "".join(c["source"])) for c in code], mtime
    except (OSError, TypeError, ValueError, KeyError):
        return [], 0.0

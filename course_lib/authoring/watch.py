"A watch over a kernel that executes a cell: it stops the cell at a limit of time, memory or output."

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

import psutil

from course_lib.authoring.notebook import CourseError

GRACE = 3  # seconds from an interrupt to a kill
FLOOD = 50_000_000  # characters of output at which a cell is stopped


def memory_limit():
    """Bytes that a kernel and its children may use: COURSE_MEMORY_GB, or 60 % of the memory of this machine.

    A container's limit counts as the machine's. Never more than nine tenths of what is free now: the system
    would kill something else first. Raises CourseError.
    """
    given = os.environ.get("COURSE_MEMORY_GB")
    if given:
        with contextlib.suppress(ValueError):
            if 0 < float(given) < float("inf"):
                return float(given) * 1e9
        raise CourseError(f"COURSE_MEMORY_GB is {given!r}; expected a number of gigabytes, such as 8")
    memory = psutil.virtual_memory()
    total = memory.total
    with contextlib.suppress(OSError, ValueError):  # no container, or one without a limit
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(0.6 * total, 0.9 * memory.available)


class Watch:
    """Watches process `pid` and its children from a thread of its own.

    `with watch.cell(): …` brackets the execution of a cell; `watch.stopped` then says which limit ended it,
    or '', and `watch.killed` whether the processes had to be killed. `timeout` is in seconds for a cell,
    `memory` in bytes, None for no limit; `printed()` gives the characters that the cell has printed.
    """

    def __init__(self, pid, timeout, memory, printed):
        self.process, self.timeout, self.memory, self.printed = psutil.Process(pid), timeout, memory, printed
        self.stopped, self.killed = "", False
        self._began = self._stopped_at = None
        self._lock, self._closed = threading.Lock(), threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    @contextlib.contextmanager
    def cell(self):
        with self._lock:
            self.stopped, self._stopped_at, self._began = "", None, time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._began = None

    def close(self):
        "End the watch, and every process that the kernel started: the kernel's own shutdown leaves those."
        self._closed.set()
        self.kill()

    def kill(self):
        "Kill the kernel and its children."
        self.killed = True
        for p in self._tree():
            _quietly(p.kill)

    def _watch(self):
        while not self._closed.wait(0.1):
            with self._lock:
                if self._began is None:
                    continue
                if self._stopped_at is not None:
                    if time.monotonic() - self._stopped_at > GRACE:
                        self.kill()
                    continue
                self.stopped = self._over_limit(time.monotonic() - self._began)
                if self.stopped:
                    self._stopped_at = time.monotonic()
                    # What eats memory may not react in time.
                    (self.kill if "memory" in self.stopped else self._interrupt)()

    def _over_limit(self, seconds):
        if self.timeout and seconds > self.timeout:
            return f"time limit: it ran longer than {self.timeout:g} s and was stopped"
        if self.memory and self._used() > self.memory:
            return f"it used more than {self.memory / 1e9:.3g} GB of memory and was stopped"
        if self.printed() > FLOOD:
            return f"it printed more than {FLOOD // 1_000_000} MB and was stopped"
        return ""

    def _tree(self):
        try:
            return [*self.process.children(recursive=True), self.process]
        except psutil.Error:
            return []

    def _used(self):
        tree = self._tree()
        used = sum(_quietly(_resident, p) or 0 for p in tree)
        if used > self.memory and len(tree) > 1:
            # Forked workers share pages, which count for each: ask again, slower, for fair shares.
            used = sum(_quietly(_share, p) or 0 for p in tree)
        return used

    def _interrupt(self):
        if os.name == "nt":
            self.kill()
        else:
            with contextlib.suppress(OSError):
                os.killpg(os.getpgid(self.process.pid), signal.SIGINT)


def _resident(process):
    return process.memory_info().rss


def _share(process):
    return getattr(process.memory_full_info(), "pss", None) or _resident(process)


def _quietly(act, *args):
    try:
        return act(*args)
    except psutil.Error:
        return None  # the process has just ended

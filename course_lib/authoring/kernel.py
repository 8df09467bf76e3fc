"""One kernel of this environment, its cells executed one by one under limits of time, memory and output.

Everything of ours that executes a notebook goes through `Session`: `course run`, `course check`, `course
record` and the test of unsolved lessons. nbval judges worked notebooks in `make test`, but it can't judge
a learner's: after a time-out or a dead kernel it gives no verdict on the cells that follow.
"""

import contextlib
import functools
import os
import queue
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from course_lib import ram
from course_lib.authoring.notebook import CourseError

try:
    import nbformat
    from ipykernel.kernelspec import RESOURCES, get_kernel_dict
    from jupyter_client import AsyncKernelManager
    from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
    from nbclient import NotebookClient
    from nbclient.exceptions import DeadKernelError
except ImportError as e:
    raise CourseError(
        f"notebooks can't be executed: {e.name} is not installed for {sys.executable}; "
        f"run `make venv`, or `pip install -e .[dev]` in your environment"
    ) from None

CODE = str(Path(__file__).resolve().parent.parent.parent)
INLINE = "module://matplotlib_inline.backend_inline"
FLOOD = 20_000_000  # characters of output at which a cell is stopped
GRACE = 3  # seconds from an interrupt to a kill


@dataclass
class Ran:
    "What came of one cell. `stopped` says which limit ended it; `alive`, whether its kernel can go on."

    outputs: list = field(default_factory=list)
    count: int | None = None
    ename: str = ""
    evalue: str = ""
    stopped: str = ""
    alive: bool = True
    seconds: float = 0.0

    @property
    def error(self):
        "The failure in one line, or ''."
        if self.stopped or not self.ename:
            return self.stopped
        first = (self.evalue.strip().splitlines() or [""])[0][:400]
        return f"{self.ename}: {first}" if first else self.ename

    @property
    def stdout(self):
        streams = [o for o in self.outputs if o["output_type"] == "stream"]
        return "".join(o["text"] for o in streams if o["name"] == "stdout")


@functools.cache
def has_cuda():
    "Whether a kernel here finds a CUDA device. Asked in another process: torch is not imported for it."
    code = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def memory_limit():
    """Bytes that a kernel and its children may use: COURSE_MEMORY_GB, or 60 % of what the machine has.

    Never more than nine tenths of what is free: the system would kill something else first. Raises CourseError.
    """
    given = os.environ.get("COURSE_MEMORY_GB")
    if not given:
        return min(0.6 * ram.total(), 0.9 * ram.available())
    with contextlib.suppress(ValueError):
        if 0 < float(given) < float("inf"):
            return float(given) * 1e9
    raise CourseError(f"COURSE_MEMORY_GB is {given!r}; expected a number of gigabytes, such as 8")


class _ThisEnvironment(KernelSpecManager):
    "The kernel is always this Python's, whatever name a notebook holds and whatever is registered."

    def get_kernel_spec(self, kernel_name):
        return KernelSpec(resource_dir=RESOURCES, **get_kernel_dict())


class _Client(NotebookClient):
    "nbclient with this environment's kernel, and with bounded output."

    printed, reply = 0, {}

    def create_kernel_manager(self):
        file = os.path.join(self.resources["connection"], "kernel.json")
        self.km = AsyncKernelManager(kernel_spec_manager=_ThisEnvironment(), connection_file=file)
        return self.km

    def output(self, outs, msg, display_id, cell_index):
        content = msg["content"]
        self.printed += len(content.get("text", "")) + sum(
            len(str(v)) for v in content.get("data", {}).values()
        )
        if self.printed <= FLOOD or msg["msg_type"] == "error":
            return super().output(outs, msg, display_id, cell_index)
        return None


class Session:
    """A fresh kernel in folder `cwd`, in a `with` block: `execute` takes its `cells` by their number.

    `cells` are dicts as in a notebook. `timeout` is in seconds for each cell, `memory` in bytes for the
    kernel and its children; None means no limit. `env` adds environment variables. Raises CourseError when
    no kernel starts.
    """

    def __init__(self, cells, cwd, timeout=None, memory=None, env=None):
        cells = [
            {"outputs": [], "execution_count": None, **c} if c["cell_type"] == "code" else c for c in cells
        ]
        self.nb = nbformat.from_dict({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5})
        self.cwd, self.timeout, self.memory = str(cwd), timeout, memory
        # The kernel's folder is not the repository: a project that is not installed is found by its path.
        path = os.pathsep.join([CODE, *filter(None, [os.environ.get("PYTHONPATH")])])
        self.env = {**os.environ, "MPLBACKEND": INLINE, "PYTHONPATH": path, **(env or {})}

    def __enter__(self):
        self._folder = tempfile.TemporaryDirectory(prefix="course-kernel-", ignore_cleanup_errors=True)
        self._client = _Client(
            self.nb,
            resources={"connection": self._folder.name},
            timeout=None,  # `_watched` keeps the time: it can also kill
            allow_errors=True,
            coalesce_streams=False,  # its regular expressions take minutes on a line of a megabyte
            record_timing=False,
            iopub_timeout=30,
            shutdown_kernel="immediate",
            on_cell_executed=lambda cell, cell_index, execute_reply: self._reply.update(
                execute_reply["content"]
            ),
        )
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._context = self._client.setup_kernel(cwd=self.cwd, env=self.env, **silent)
        try:
            self._context.__enter__()
        except Exception as e:
            self._folder.cleanup()
            raise CourseError(
                f"no kernel starts with {sys.executable} ({type(e).__name__}: {str(e).splitlines()[0]}); "
                f"`{Path(sys.executable).name} -m ipykernel --version` says whether ipykernel is whole"
            ) from None
        self._process = psutil.Process(self._client.km.provisioner.pid)
        channel = self._client.kc.shell_channel
        channel.get_msg = functools.partial(self._watched, channel.get_msg)
        return self

    def __exit__(self, *exc):
        self._kill()  # the kernel's own shutdown leaves the processes that it started
        try:
            self._context.__exit__(None, None, None)
        finally:
            self._folder.cleanup()

    def execute(self, index):
        "Execute a cell; returns a `Ran`."
        cell, alive = self.nb.cells[index], True
        self._client.printed, self._reply, self._stopped, self._stopped_at = 0, {}, "", None
        self._began = time.monotonic()
        try:
            self._client.execute_cell(cell, index)
        except DeadKernelError:
            alive = False
        seconds = time.monotonic() - self._began
        ran = Ran(_merged(cell.get("outputs", [])), cell.get("execution_count"), seconds=seconds)
        # An unknown magic sends no error output, only an error in its reply.
        if self._reply.get("status") == "error":
            ran.ename, ran.evalue = self._reply.get("ename", "Error"), self._reply.get("evalue", "")
        ran.stopped, ran.alive = self._stopped or ("" if alive else self._cause()), alive
        if any(p.get("source") == "ask_exit" for p in self._reply.get("payload", [])):
            ran.stopped, ran.alive = "exit() or quit() ended the kernel", False
        return ran

    async def _watched(self, get_msg, timeout=None, **kwargs):
        """Wait for a message on nbclient's socket in slices of a tenth of a second; look at the limits in between.

        nbclient answers a widget's messages on the socket it waits on. A reply that comes in just then wakes
        nobody, for zmq tells of it once: without slices, a cell that shows a widget can wait for ever.
        """
        end = float("inf") if timeout is None else time.monotonic() + timeout
        while True:
            try:
                return await get_msg(timeout=max(0, min(0.1, end - time.monotonic())), **kwargs)
            except queue.Empty:
                if time.monotonic() >= end:
                    raise
            now = time.monotonic()
            if self._stopped_at is None:
                self._stopped = self._over_limit(now - self._began)
                if self._stopped:
                    self._stopped_at = now
                    # What eats memory may not react in time.
                    self._kill() if "memory" in self._stopped else await self._client.km.interrupt_kernel()
            elif now - self._stopped_at > GRACE:
                self._kill()

    def _over_limit(self, seconds):
        if self.timeout and seconds > self.timeout:
            return f"time limit: it ran longer than {self.timeout:g} s and was stopped"
        if self.memory and self._used("rss") > self.memory and self._used("pss") > self.memory:
            return f"it used more than {self.memory / 1e9:.3g} GB of memory and was stopped"
        if self._client.printed > FLOOD:
            return f"it printed more than {FLOOD // 1_000_000} MB and was stopped"
        return ""

    def _processes(self):
        with contextlib.suppress(psutil.Error):
            return [*self._process.children(recursive=True), self._process]
        return []

    def _used(self, kind):
        "Bytes of the kernel and its children; rss counts shared pages for each, pss shares them out, slower."
        used = 0
        for p in self._processes():
            with contextlib.suppress(psutil.Error):  # it has just ended
                found = p.memory_info() if kind == "rss" else p.memory_full_info()
                used += getattr(found, kind, found.rss)
        return used

    def _kill(self):
        for p in self._processes():
            with contextlib.suppress(psutil.Error):
                p.kill()

    def _cause(self):
        code = self._client.km.provisioner.process.poll()
        if code is not None and code < 0:
            return f"the kernel died by {signal.Signals(-code).name}"
        return f"the kernel died with exit status {code}"


def _merged(outputs):
    "One stdout and one stderr, each where its first was; what a carriage return overwrote is gone."
    merged, texts = [], {}
    for out in outputs:
        if out["output_type"] != "stream":
            merged.append(out)
            continue
        if out["name"] not in texts:
            merged.append(out)
        texts.setdefault(out["name"], []).append(out["text"])
    for out in merged:
        if out["output_type"] == "stream":
            lines = "".join(texts[out["name"]]).split("\n")
            out["text"] = "\n".join(line.removesuffix("\r").rsplit("\r", 1)[-1] for line in lines)
    return merged

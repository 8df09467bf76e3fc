"""One kernel of this environment, its cells executed one by one under limits of time, memory and output.

`course run`, `check` and `record` and the test of unsolved lessons execute notebooks through `Session`: nbval
gives no verdict on the cells that follow a time-out or a dead kernel.
"""

import contextlib
import functools
import os
import queue
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from course_lib.authoring.notebook import CourseError

try:
    import nbformat
    from ipykernel.kernelspec import RESOURCES, get_kernel_dict
    from jupyter_client import AsyncKernelManager
    from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
    from nbclient import NotebookClient
    from nbclient.exceptions import DeadKernelError
except ImportError as e:
    raise CourseError(f"{e.name} is not installed for {sys.executable}: `pip install -e .[dev]`") from None

CODE = str(Path(__file__).resolve().parent.parent.parent)
FLOOD = 20_000_000  # characters of output at which a cell is stopped
GRACE = 3  # seconds from an interrupt to a kill


@dataclass
class Ran:
    "What came of one cell. `stopped` says which limit ended it; `alive`, whether its kernel can go on."

    outputs: list
    count: int | None
    ename: str = ""
    evalue: str = ""
    stopped: str = ""
    alive: bool = True
    seconds: float = 0.0

    @property
    def error(self):
        "The failure in one line, or ''."
        first = (self.evalue.strip().splitlines() or [""])[0][:400]
        return self.stopped or (f"{self.ename}: {first}" if first else self.ename)

    @property
    def stdout(self):
        return "".join(o["text"] for o in self.outputs if o.get("name") == "stdout")


@functools.cache
def has_cuda():
    "Whether a kernel here finds a CUDA device. Asked in another process: torch is not imported for it."
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return False
    code = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


class _ThisEnvironment(KernelSpecManager):
    "The kernel is always this Python's, whatever name a notebook holds and whatever is registered."

    def get_kernel_spec(self, kernel_name):
        return KernelSpec(resource_dir=RESOURCES, **get_kernel_dict())


class Session:
    """A fresh kernel in folder `cwd`, in a `with` block: `execute` takes its `cells` by their number.

    `cells` are code cells as dicts. `timeout` is in seconds for each cell, `memory` in bytes for the kernel
    and its children; None means no limit. `env` adds environment variables. Raises CourseError when no
    kernel starts.
    """

    def __init__(self, cells, cwd, timeout=None, memory=None, env=None):
        cells = [{**c, "outputs": [], "execution_count": None} for c in cells]
        nb = nbformat.from_dict({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5})
        self.cwd, self.timeout, self.memory = str(cwd), timeout, memory
        # The kernel's folder is not the repository: a project that is not installed is found by its path.
        path = os.pathsep.join([CODE, *filter(None, [os.environ.get("PYTHONPATH")])])
        inline = {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}
        self.env = {**os.environ, **inline, "PYTHONPATH": path, **(env or {})}
        # Merging streams is ours: nbclient's regular expressions take minutes on a line of a megabyte.
        options = {"coalesce_streams": False, "record_timing": False, "shutdown_kernel": "immediate"}
        options |= {"timeout": None, "iopub_timeout": 30, "allow_errors": True}
        self._client = NotebookClient(nb, on_cell_executed=self._executed, **options)

    def __enter__(self):
        client, file = self._client, os.path.join(self.cwd, ".kernel.json")
        client.km = AsyncKernelManager(kernel_spec_manager=_ThisEnvironment(), connection_file=file)
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._context = client.setup_kernel(cwd=self.cwd, env=self.env, **silent)
        try:
            self._context.__enter__()
        except Exception as e:
            why = f"{type(e).__name__}: {str(e).splitlines()[0]}"
            raise CourseError(f"no kernel starts with {sys.executable} ({why})") from None
        self._process = psutil.Process(client.km.provisioner.pid)
        channel = client.kc.shell_channel
        channel.get_msg = functools.partial(self._watched, channel.get_msg)
        return self

    def __exit__(self, *exc):
        self._kill()  # the kernel's own shutdown leaves the processes that it started
        self._context.__exit__(None, None, None)

    def _executed(self, cell, cell_index, execute_reply):
        self._reply = execute_reply["content"]

    def execute(self, index):
        "Execute a cell; returns a `Ran`."
        client, cell, alive = self._client, self._client.nb.cells[index], True
        self._began, self._cell, self._reply, self._stopped = time.monotonic(), cell, {}, ""
        try:
            client.execute_cell(cell, index)
        except DeadKernelError:
            alive = False
        ran = Ran(_merged(cell["outputs"]), cell.get("execution_count"), alive=alive, stopped=self._stopped)
        ran.seconds = time.monotonic() - self._began
        if self._reply.get("status") == "error":  # an unknown magic sends no error output
            ran.ename, ran.evalue = self._reply.get("ename", "Error"), self._reply.get("evalue", "")
        if not alive and not ran.stopped:
            code = client.km.provisioner.process.poll() or 0
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit status {code}"
            ran.stopped = f"the kernel died {how}"
        if any(p.get("source") == "ask_exit" for p in self._reply.get("payload", [])):
            ran.stopped, ran.alive = "exit() or quit() ended the kernel; remove it", False
        return ran

    async def _watched(self, get_msg, timeout=None, **kwargs):
        """Wait for a message in slices of a tenth of a second, and look at the limits in between.

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
            seconds = time.monotonic() - self._began
            if not self._stopped and (why := self._over_limit(seconds)):
                # What eats memory may not react in time.
                self._killed_at = seconds + GRACE * ("memory" not in why)
                self._stopped = f"{why} and was stopped"
                await self._client.km.interrupt_kernel()
            elif self._stopped and seconds > self._killed_at:
                self._kill()

    def _over_limit(self, seconds):
        if self.timeout and seconds > self.timeout:
            return f"time limit: it ran longer than {self.timeout:g} s (an endless loop?)"
        # What processes share counts for none of them.
        if self.memory and sum(self._each(lambda p: p.memory_full_info().uss)) > self.memory:
            return f"it used more than {self.memory / 1e9:.3g} GB of memory"
        if sum(len(out.get("text", "")) for out in self._cell["outputs"]) > FLOOD:
            return f"it printed more than {FLOOD // 1_000_000} MB (a print in a loop?)"
        return ""

    def _each(self, act):
        "`act` on the kernel's children and the kernel; those that have just ended are left out."
        with contextlib.suppress(psutil.Error):
            for p in [*self._process.children(recursive=True), self._process]:
                with contextlib.suppress(psutil.Error):
                    yield act(p)

    def _kill(self):
        list(self._each(psutil.Process.kill))


def _merged(outputs):
    "One stdout and one stderr, each where its first was; what a carriage return overwrote is gone."
    merged, texts = {}, {}
    for i, out in enumerate(outputs):
        name = out["name"] if out["output_type"] == "stream" else i
        merged.setdefault(name, out)
        texts.setdefault(name, []).append(out.get("text", ""))
    for name in {"stdout", "stderr"} & set(merged):
        lines = "".join(texts[name]).split("\n")
        merged[name]["text"] = "\n".join(line.removesuffix("\r").rsplit("\r", 1)[-1] for line in lines)
    return list(merged.values())

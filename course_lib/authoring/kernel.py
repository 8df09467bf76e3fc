"""One kernel of this environment, its cells executed one by one under limits of time, memory and output.

Everything of ours that executes a notebook goes through `Session`: `course run`, `course check`, `course
record` and the test of unsolved lessons. nbval judges worked notebooks in `make test`, but it can't judge
a learner's: after a time-out or a dead kernel it gives no verdict on the cells that follow.
"""

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

from course_lib.authoring.notebook import CourseError

try:
    import nbformat
    from ipykernel.kernelspec import RESOURCES, get_kernel_dict
    from jupyter_client import AsyncKernelManager
    from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
    from nbclient import NotebookClient
    from nbclient.exceptions import DeadKernelError

    from course_lib.authoring.watch import FLOOD, Watch
except ImportError as e:
    raise CourseError(
        f"notebooks can't be executed: {e.name} is not installed for {sys.executable}; "
        f"run `make venv`, or `pip install -e .[dev]` in your environment"
    ) from None

CODE = str(Path(__file__).resolve().parent.parent.parent)
INLINE = "module://matplotlib_inline.backend_inline"
KEEP = 1_000_000  # characters kept of a stream at its head, and at its tail


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
    if "torch" in sys.modules:
        return sys.modules["torch"].cuda.is_available()
    code = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


class _ThisEnvironment(KernelSpecManager):
    "The kernel is always this Python's, whatever name a notebook holds and whatever is registered."

    def get_kernel_spec(self, kernel_name):
        return KernelSpec(resource_dir=RESOURCES, **get_kernel_dict())


class _Client(NotebookClient):
    "nbclient with this environment's kernel and with bounded output."

    def create_kernel_manager(self):
        self.km = AsyncKernelManager(
            kernel_name="python3",
            kernel_spec_manager=_ThisEnvironment(),
            connection_file=os.path.join(self.resources["connection"], "kernel.json"),
        )
        return self.km

    def output(self, outs, msg, display_id, cell_index):
        content = msg["content"]
        data = content.get("data", {})
        self.printed += len(content.get("text", "")) + sum(len(str(v)) for v in data.values())
        if self.printed > FLOOD and msg["msg_type"] != "error":
            return None
        out = super().output(outs, msg, display_id, cell_index)
        if out is not None and out["output_type"] == "stream":
            before = outs[-2] if len(outs) > 1 else {}
            if before.get("output_type") == "stream" and before["name"] == out["name"]:
                before["text"] += outs.pop()["text"]
                out = before
            if len(out["text"]) > 2 * KEEP:
                out["text"] = f"{out['text'][:KEEP]}\n[…]\n{out['text'][-KEEP:]}"
        return out


class Session:
    """A fresh kernel in folder `cwd`, in a `with` block: `execute` takes its `cells` by their number.

    `cells` are dicts as in a notebook. `timeout` is in seconds for each cell, `memory` in bytes for the
    kernel and its children; None means no limit. `env` adds environment variables. Raises CourseError when
    no kernel starts.
    """

    def __init__(self, cells, cwd, timeout=None, memory=None, env=None):
        self.cells = nbformat.from_dict(
            [{"outputs": [], "execution_count": None, **c} if c["cell_type"] == "code" else c for c in cells]
        )
        self.cwd, self.timeout, self.memory = str(cwd), timeout, memory
        # The kernel's folder is not the repository: a project that is not installed is found by its path.
        path = os.pathsep.join([CODE, *filter(None, [os.environ.get("PYTHONPATH")])])
        self.env = {**os.environ, "MPLBACKEND": INLINE, "PYTHONPATH": path, **(env or {})}
        self._reply = {}

    def __enter__(self):
        self._folder = tempfile.TemporaryDirectory(prefix="course-kernel-", ignore_cleanup_errors=True)
        self._client = _Client(
            nbformat.from_dict({"cells": self.cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}),
            resources={"connection": self._folder.name},
            timeout=None,  # the watch keeps the time: it can also kill
            allow_errors=True,
            coalesce_streams=False,  # its regular expressions take minutes on a line of a megabyte
            record_timing=False,
            iopub_timeout=30,
            shutdown_kernel="immediate",
            on_cell_executed=self._keep_reply,
        )
        self._client.printed = 0
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._context = self._client.setup_kernel(cwd=self.cwd, env=self.env, **silent)
        try:
            self._context.__enter__()
            _wake_often(self._client.kc.shell_channel)
        except Exception as e:
            self._folder.cleanup()
            raise CourseError(
                f"no kernel starts with {sys.executable} ({type(e).__name__}: {str(e).splitlines()[0]}); "
                f"`{Path(sys.executable).name} -m ipykernel --version` says whether ipykernel is whole"
            ) from None
        pid = self._client.km.provisioner.pid
        self._watch = Watch(pid, self.timeout, self.memory, lambda: self._client.printed)
        return self

    def __exit__(self, *exc):
        self._watch.close()
        try:
            self._context.__exit__(None, None, None)
        finally:
            self._folder.cleanup()

    def execute(self, index):
        "Execute a cell; returns a `Ran`."
        cell = self._client.nb.cells[index]
        self._client.printed, self._reply = 0, {}
        began, alive = time.monotonic(), True
        with self._watch.cell():
            try:
                self._client.execute_cell(cell, index)
            except DeadKernelError:
                alive = False
        outputs = _merge_streams(cell.get("outputs", []))
        ran = Ran(outputs, cell.get("execution_count"), seconds=time.monotonic() - began)
        # A kill may come after the cell has ended, while its output is still being read.
        ran.stopped, ran.alive = self._watch.stopped, alive and not self._watch.killed
        # An unknown magic sends no error output, only an error in its reply.
        if self._reply.get("status") == "error":
            ran.ename, ran.evalue = self._reply.get("ename", "Error"), self._reply.get("evalue", "")
        if not alive and not ran.stopped:
            ran.stopped = f"the kernel died{self._cause()}"
        if any(p.get("source") == "ask_exit" for p in self._reply.get("payload", [])):
            ran.stopped, ran.alive = "exit() or quit() ended the kernel", False
        return ran

    def ask(self, code):
        "What `code` prints, executed aside: it gets no number in the history, and no limit."
        cell = nbformat.from_dict({"cell_type": "code", "source": code, "metadata": {}, "outputs": []})
        cells = self._client.nb.cells
        cells.append(cell)
        try:
            self._client.execute_cell(cell, len(cells) - 1, store_history=False)
        finally:
            cells.pop()
        return Ran(_merge_streams(cell["outputs"])).stdout

    def _keep_reply(self, cell, cell_index, execute_reply):
        self._reply = execute_reply["content"]

    def _cause(self):
        process = getattr(self._client.km.provisioner, "process", None)
        code = process.poll() if process else None
        if not code:
            return ""
        if code > 0:
            return f" with exit status {code}"
        try:
            return f" by {signal.Signals(-code).name}"
        except ValueError:
            return f" by signal {-code}"


def _merge_streams(outputs):
    "One stdout and one stderr, each where its first was; what a carriage return overwrote is gone."
    merged, streams = [], {}
    for out in outputs:
        if out["output_type"] != "stream":
            merged.append(out)
        elif out["name"] in streams:
            streams[out["name"]]["text"] += out["text"]
        else:
            streams[out["name"]] = out
            merged.append(out)
    for out in streams.values():
        lines = [line.removesuffix("\r").rsplit("\r", 1)[-1] for line in out["text"].split("\n")]
        out["text"] = "\n".join(lines)
    return merged


def _wake_often(channel):
    """Let a channel look for messages every second while it waits for one.

    nbclient answers a widget's messages on the socket it waits on. A reply that comes in just then wakes
    nobody, for zmq tells of it once: without this, a cell that shows a widget can wait for ever.
    """
    get_msg = channel.get_msg

    async def in_slices(timeout=None, **kwargs):
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            left = 1 if end is None else max(0, min(1, end - time.monotonic()))
            try:
                return await get_msg(timeout=left, **kwargs)
            except queue.Empty:
                if end is not None and time.monotonic() >= end:
                    raise

    channel.get_msg = in_slices

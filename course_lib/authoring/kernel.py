"""One kernel of this environment, its cells executed one by one under limits of time, memory and output.

`course run`, `check` and `record` and the test of unsolved lessons execute notebooks through `Session`: nbval
gives no verdict on the cells that follow a time-out or a dead kernel.
"""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from ipykernel.kernelspec import RESOURCES, get_kernel_dict
from jupyter_client import KernelManager
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager

from course_lib.authoring.notebook import CourseError

CODE = str(Path(__file__).resolve().parent.parent.parent)
FLOOD = 20_000_000  # characters of output at which a cell is stopped
GRACE = 3  # seconds from an interrupt to a kill


@dataclass
class Ran:
    "What came of one cell. `error` is one line; `alive` says whether its kernel can go on."

    outputs: list
    count: int | None = None
    error: str = ""
    alive: bool = True
    seconds: float = 0.0


class _ThisEnvironment(KernelSpecManager):
    "The kernel is always this Python's, whatever name a notebook holds and whatever is registered."

    def get_kernel_spec(self, kernel_name):
        return KernelSpec(resource_dir=RESOURCES, **get_kernel_dict())


class Session:
    """A fresh kernel in folder `cwd`, in a `with` block: `execute` takes a cell's source.

    `timeout` is in seconds for each cell, `memory` in bytes for the kernel and its children; None means no
    limit. `env` adds environment variables. Raises CourseError when no kernel starts.
    """

    def __init__(self, cwd, timeout=None, memory=None, env=None):
        self.cwd, self.timeout, self.memory, self._look = str(cwd), timeout, memory, 0
        # The kernel's folder is not the repository: a project that is not installed is found by its path.
        path = os.pathsep.join([CODE, *filter(None, [os.environ.get("PYTHONPATH")])])
        inline = {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}
        self.env = {**os.environ, **inline, "PYTHONPATH": path, **(env or {})}

    def __enter__(self):
        file, silent = os.path.join(self.cwd, ".kernel.json"), subprocess.DEVNULL
        self._manager = KernelManager(kernel_spec_manager=_ThisEnvironment(), connection_file=file)
        self._manager.start_kernel(cwd=self.cwd, env=self.env, stdout=silent, stderr=silent)
        self._process = psutil.Process(self._manager.provisioner.pid)
        self._client = self._manager.client()
        self._client.start_channels()
        try:
            self._client.wait_for_ready(timeout=60)
        except RuntimeError as e:
            self.__exit__()
            raise CourseError(f"no kernel starts with {sys.executable} ({e})") from None
        return self

    def __exit__(self, *exc):
        self._kill()  # the kernel's own shutdown leaves the processes that it started
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)

    def execute(self, source):
        "Execute a cell; returns a `Ran`."
        self._ran, self._shown, self._widget, self._printed = Ran([]), {}, "", 0
        ran, began, reply = self._ran, time.monotonic(), {}
        kill_at, idle = float("inf"), False
        request = self._client.execute(source, allow_stdin=False, stop_on_error=False)
        while ran.alive and not idle:
            seconds = time.monotonic() - began
            if seconds > kill_at:
                self._kill()
                ran.alive = False  # also where the cell has just reacted to the interrupt
                break
            if not ran.error and (why := self._over_limit(seconds)):
                # What eats memory may not react in time.
                kill_at = seconds + GRACE * ("memory" not in why)
                ran.error = f"{why} and was stopped"
                self._manager.interrupt_kernel()
            try:
                message = self._client.get_iopub_msg(timeout=0.1)
                if message["parent_header"].get("msg_id") == request:
                    idle = self._take(message["msg_type"], message["content"])
                while idle and not reply:  # on a busy machine an earlier request's reply may come first
                    answer = self._client.get_shell_msg(timeout=10)
                    if answer["parent_header"].get("msg_id") == request:
                        reply = answer["content"]
            except queue.Empty:
                ran.alive = self._manager.is_alive()
        ran.seconds, ran.count = time.monotonic() - began, reply.get("execution_count")
        if not ran.alive and not ran.error:
            code = self._manager.provisioner.process.poll() or 0
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit status {code}"
            ran.error = f"the kernel died {how}"
        if any(p.get("source") == "ask_exit" for p in reply.get("payload", [])):
            ran.error, ran.alive = "exit() or quit() ended the kernel; remove it", False
        if reply.get("status") == "error" and not ran.error:  # an unknown magic sends no error output
            ran.error = ": ".join([reply["ename"], *reply["evalue"].strip().splitlines()[:1]])[:400]
        return ran

    def _take(self, kind, content):
        "Keep what a message says; returns whether it ends the cell."
        name = content.pop("transient", {}).get("display_id") or content.get("name")
        self._printed += len(content.get("text", ""))
        if kind == "comm_msg":  # a widget of type Output takes what comes while its msg_id is set
            self._widget = content["data"].get("state", {}).get("msg_id", self._widget)
        elif kind == "clear_output" and not self._widget:
            self._ran.outputs.clear()
            self._shown.clear()
        elif kind == "update_display_data" and name in self._shown:
            self._shown[name]["data"] = content["data"]
        elif kind in ("stream", "error", "display_data", "execute_result") and not self._widget:
            if kind != "stream" or name not in self._shown:  # one stdout and one stderr, where its first was
                self._shown[name] = {"output_type": kind, **content} | (
                    {"text": []} if kind == "stream" else {}
                )
                self._ran.outputs.append(self._shown[name])
            if kind == "stream" and self._printed <= FLOOD:
                self._shown[name]["text"].append(content["text"])
        return kind == "status" and content["execution_state"] == "idle"

    def _over_limit(self, seconds):
        if self.timeout and seconds > self.timeout:
            return f"time limit: it ran longer than {self.timeout:g} s (an endless loop?)"
        if self._printed > FLOOD:
            return f"it printed more than {FLOOD // 1_000_000} MB (a print in a loop?)"
        if self.memory and time.monotonic() > self._look:
            self._look = time.monotonic() + 0.1
            # What processes share counts for none of them.
            if sum(self._each(lambda p: p.memory_full_info().uss)) > self.memory:
                return f"it used more than {self.memory / 1e9:.3g} GB of memory"
        return ""

    def _each(self, act):
        "`act` on the kernel's children and the kernel; those that have just ended are left out."
        with contextlib.suppress(psutil.Error):
            for p in [*self._process.children(recursive=True), self._process]:
                with contextlib.suppress(psutil.Error):
                    yield act(p)

    def _kill(self):
        list(self._each(psutil.Process.kill))

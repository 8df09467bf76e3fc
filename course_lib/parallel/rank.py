"A rank's process, seen from the notebook: what it prints, where it is, how it ended."

import contextlib
import os
import signal
import socket
import subprocess
import time
import uuid
from multiprocessing.connection import Connection
from pathlib import Path

from course_lib.parallel import wire
from course_lib.parallel.nursery import FORKS

KEEP = 1_000_000  # bytes kept of what a rank prints in one call


class Pipe:
    "What a rank prints: read as it comes, the first million bytes kept."

    def __init__(self, fd):
        self.fd, self.open = fd, True
        os.set_blocking(fd, False)
        self.clear()

    def fileno(self):
        return self.fd

    def clear(self):
        self.data, self.lost = bytearray(), 0

    def drain(self):
        while self.open:
            try:
                got = os.read(self.fd, 1 << 16)
            except BlockingIOError:
                return
            except OSError:
                got = b""
            if not got:
                self.open = False
                return
            kept = got[: max(0, KEEP - len(self.data))]
            self.data += kept
            self.lost += len(got) - len(kept)
            if self.lost > 100 * KEEP:  # a flood: what waits for its end would never see it
                return

    def text(self):
        text = self.data.decode("utf-8", errors="replace")
        return text + (f"\n[… {self.lost:,} bytes more]\n" if self.lost else "")

    def close(self):
        self.open = False
        os.close(self.fd)


class Rank:
    "A rank's process, seen from here: `connection` to ask it, `out` and `err` that it prints to."

    def __init__(self, nursery, folder):
        self.nursery = nursery
        self.dump = str(Path(folder) / f"stack-{uuid.uuid4().hex}")
        ours, theirs = socket.socketpair()
        (out, out_w), (err, err_w) = os.pipe(), os.pipe()
        self.connection = Connection(ours.detach())
        self.out, self.err = Pipe(out), Pipe(err)
        self._read, self.nccl = 0, False
        try:
            self.pid = nursery.ask(
                {"do": "fork", "nursery": nursery.process.pid}, [theirs.fileno(), out_w, err_w]
            )["pid"]
        except BaseException:
            self.close()
            raise
        finally:
            theirs.close()
            os.close(out_w)
            os.close(err_w)

    def drain(self):
        self.out.drain()
        self.err.drain()

    def discard(self):
        "Forget what was printed until now."
        self.drain()
        self.out.clear()
        self.err.clear()

    def ask_stack(self):
        with contextlib.suppress(OSError):
            self._read = os.path.getsize(self.dump)
            os.kill(self.pid, signal.SIGUSR1)
            if self.nccl:
                os.kill(self.pid, signal.SIGUSR2)

    def stack(self, seconds=1.0):
        "What faulthandler wrote since it was asked; '' when it doesn't within a second (a stopped process)."
        until, last = time.monotonic() + seconds, None
        while time.monotonic() < until:
            with contextlib.suppress(OSError), open(self.dump, errors="replace") as f:
                f.seek(self._read)
                text = f.read()
                if text and text == last:
                    return text
                last = text
            time.sleep(0.02)
        return last or ""

    def record(self, seconds=1.0):
        "NCCL's record of collectives that were not finished when the rank was asked, or ''."
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            with contextlib.suppress(OSError):
                return Path(self.dump + ".nccl").read_text(errors="replace")
            time.sleep(0.02)
        return ""

    def ask_to_exit(self):
        with contextlib.suppress(OSError):
            wire.push(self.connection, wire.framed(("exit", None)))  # one that is stopped is killed

    def kill(self):
        for end in (os.killpg, os.kill):  # the group, and the rank that has not made its own yet
            with contextlib.suppress(OSError):
                end(self.pid, signal.SIGKILL)

    def wait(self, seconds):
        "The process's wait status, or None when it still runs then."
        if not FORKS:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self.nursery.process.wait(seconds)
                return -code if code < 0 else code << 8
            return None
        with contextlib.suppress(OSError, EOFError, ValueError):
            return self.nursery.ask({"do": "wait", "pid": self.pid, "seconds": seconds})["status"]
        return None

    def close(self):
        self.connection.close()
        self.out.close()
        self.err.close()
        with contextlib.suppress(OSError):
            os.unlink(self.dump)
        if not FORKS:
            self.nursery.end()

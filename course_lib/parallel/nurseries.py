"Where the ranks' processes come from: the nursery that all groups share while there is one, and its end."

import atexit
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

from course_lib.parallel.errors import RankError
from course_lib.parallel.nursery import FORKS
from course_lib.parallel.rank import Rank

PREFIX = "course-ranks-"
IMPORT_LIMIT = 120.0  # seconds in which a nursery must have imported PyTorch

_folder = None  # where ranks meet and write their stacks; private to this user
_lock = None  # a file in it that this process has locked
_nursery = None  # forks the ranks of all groups; ends with the last of them
_groups = set()  # those that hold the nursery
_owner = None  # the process to which all this belongs: a fork of it must not end our ranks


class _Nursery:
    "A process that is to fork ranks, or (where that isn't safe) to become one."

    def __init__(self, folder, modules):
        ours, theirs = socket.socketpair()
        self.control, self.errors = ours, tempfile.TemporaryFile()  # noqa: SIM115
        self._asked, self._unread = 0, b""
        # NumPy's BLAS would start threads when it is imported, and only one thread survives a fork.
        path = [str(Path(__file__).resolve().parents[2]), *(p or os.getcwd() for p in sys.path)]
        env = {"OPENBLAS_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(path)}
        # Nor may CUDA be initialised before a fork; asking NVML for the number of GPUs doesn't.
        env["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "course_lib.parallel.nursery", str(theirs.fileno()), folder,
                 *modules],
                pass_fds=[theirs.fileno()], env=env, stdin=subprocess.DEVNULL,
                stdout=self.errors, stderr=self.errors,
                start_new_session=True,  # a terminal's Ctrl-C reaches the notebook, which passes it on
            )  # fmt: skip

    def ready(self):
        "Wait until PyTorch is imported."
        self.control.settimeout(IMPORT_LIMIT)
        try:
            reply = self._read()
        except (OSError, ValueError):
            reply = {}
        self.control.settimeout(None)
        if "ready" not in reply:
            self.errors.seek(0)
            said = reply.get("error") or self.errors.read().decode(errors="replace").strip()[-2000:]
            self.end()
            raise RankError(f"no rank could be started: {said or 'the process that imports PyTorch ended'}")

    def imports(self, modules):
        error = self.ask({"do": "import", "modules": list(modules)}).get("error") if modules else None
        if error:
            raise RankError(f"no rank could be started: {error}")

    def ask(self, request, fds=()):
        self._asked += 1
        socket.send_fds(self.control, [json.dumps({**request, "n": self._asked}).encode()], list(fds))
        if not FORKS:
            return {"pid": self.process.pid}
        while True:
            reply = self._read()
            if reply["n"] == self._asked:  # another belongs to a request that was interrupted
                return reply

    def _read(self):
        while b"\n" not in self._unread:
            got = self.control.recv(4096)
            if not got:
                raise EOFError("the ranks' parent process is gone")
            self._unread += got
        line, self._unread = self._unread.split(b"\n", 1)
        return json.loads(line)

    def end(self):
        self.control.close()  # it sees that, kills what it has, and ends
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.errors.close()


def hatch(n, group, modules=()):
    "`n` ranks' processes that have imported `modules`. The group keeps the nursery until it is released."
    global _folder, _nursery, _owner
    if not hasattr(os, "fork"):
        raise RankError("ranks need Linux or macOS: on Windows, run the course in WSL")
    if _owner != os.getpid():  # first use, or a fork that inherited another process's ranks
        _folder, _nursery, _owner = None, None, os.getpid()
        _groups.clear()
        atexit.register(_at_exit, _owner)
    if _folder is None:
        _folder = _new_folder()
    _groups.add(group)
    made = []
    try:
        if not FORKS:
            nests = [_Nursery(_folder, modules) for _ in range(n)]
            for nest in nests:
                nest.ready()
            return [Rank(nest, _folder) for nest in nests]
        if _nursery is None or _nursery.process.poll() is not None:
            _nursery = _Nursery(_folder, modules)
            _nursery.ready()
        else:
            _nursery.imports(modules)
        for _ in range(n):
            made.append(Rank(_nursery, _folder))
        return made
    except BaseException:
        bury(made, politely=False)
        release(group)
        raise


def _new_folder():
    "A folder in which ranks meet. Those of notebooks that were killed with all they started are removed."
    global _lock
    import fcntl

    for old in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), open(old / "lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held for as long as the notebook lives
            shutil.rmtree(old, ignore_errors=True)
    folder = tempfile.mkdtemp(prefix=PREFIX)
    _lock = open(Path(folder) / "part", "w")  # noqa: SIM115
    fcntl.flock(_lock, fcntl.LOCK_EX)
    os.rename(Path(folder) / "part", Path(folder) / "lock")  # there is no lock yet that isn't held
    return folder


def new_store():
    "The path of a file in which ranks meet."
    return str(Path(_folder) / f"store-{uuid.uuid4().hex}")


def ending(rank):
    "How a rank that is gone ended: its wait status, or None."
    return rank.wait(1.0)


def bury(ranks, politely):
    "End these processes and wait for them. Politely: ask first, so that they leave their process group."
    if _owner != os.getpid():
        return
    if politely:
        for rank in ranks:
            rank.ask_to_exit()
        until = time.monotonic() + 1.0
        for rank in ranks:
            rank.wait(max(0.0, until - time.monotonic()))
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.wait(5.0)
        rank.close()


def release(group):
    "This group needs no ranks any more; with the last one, the nursery ends."
    global _nursery, _folder, _lock
    _groups.discard(group)
    if _groups or _owner != os.getpid():
        return
    nursery, _nursery = _nursery, None
    if nursery:
        nursery.end()
    if _folder:
        shutil.rmtree(_folder, ignore_errors=True)
        _lock.close()
        _folder = _lock = None


def _at_exit(owner):
    if os.getpid() == owner:
        for group in list(_groups):
            group.stop()

"""The process from which ranks are forked: it imports PyTorch once, so that a rank starts in milliseconds.

It has one thread and runs no code of the reader's but the modules that it is told to import. When the
process that started it is gone, however that came about, it kills every rank and ends; were it killed
itself, the system would kill the ranks. Where forking isn't safe (macOS), a nursery
becomes a rank itself instead, and each rank gets its own.

    python -m course_lib.parallel.nursery SOCKET FOLDER [MODULE …]
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time

# COURSE_RANKS_FORK=0 does without forks on Linux too.
FORKS = sys.platform.startswith("linux") and os.environ.get("COURSE_RANKS_FORK") != "0"
_PR_SET_PDEATHSIG = 1


def main(fd, folder, modules):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = os.getppid()
    control = socket.socket(fileno=fd)
    try:
        from course_lib.parallel import worker

        _import(modules)
    except Exception as e:
        control.sendall(_line({"error": f"{type(e).__name__}: {e}"}))
        return
    control.sendall(_line({"ready": os.getpid()}))
    if FORKS:
        gc.collect()
        gc.freeze()  # what was imported stays shared: a collection on a rank would copy its pages
        _serve(control, parent, worker, folder)
    else:
        request, fds = _receive(control)
        if request:
            _die_with(parent)
            _become(worker, fds)


def _import(modules):
    for name in modules:
        importlib.import_module(name)


def _line(message):
    return json.dumps(message).encode() + b"\n"


def _receive(control):
    data, fds, _, _ = socket.recv_fds(control, 4096, 3)
    return (json.loads(data) if data else None), fds


def _serve(control, parent, worker, folder):
    children = set()
    try:
        while os.getppid() == parent:
            if not select.select([control], [], [], 0.5)[0]:
                continue
            request, fds = _receive(control)
            if not request:
                break
            if request["do"] == "fork":
                pid = os.fork()
                if pid == 0:
                    nursery = control.fileno()
                    with contextlib.suppress(OSError):
                        os.close(nursery)
                    _die_with(request["nursery"])
                    _become(worker, fds)
                for f in fds:
                    os.close(f)
                with contextlib.suppress(OSError):
                    os.setpgid(pid, pid)
                children.add(pid)
                answer = {"pid": pid}
            elif request["do"] == "import":
                try:
                    _import(request["modules"])
                    answer = {}
                except Exception as e:
                    answer = {"error": f"{type(e).__name__}: {e}"}
            elif request["do"] == "wait":  # how a rank ended; it has been told to, or was seen to
                answer = {"status": _reap(request["pid"], request["seconds"], children)}
            control.sendall(_line({**answer, "n": request["n"]}))
    finally:
        for pid in children:
            _kill(pid)
        for pid in children:
            with contextlib.suppress(OSError):
                os.waitpid(pid, 0)
        shutil.rmtree(folder, ignore_errors=True)


def _reap(pid, seconds, children):
    "A child's wait status, or None when it still runs after so many seconds."
    if pid not in children:
        return None
    until = time.monotonic() + seconds
    while True:
        with contextlib.suppress(InterruptedError):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                children.discard(pid)
                _kill(pid, alone=False)  # what it started
                return status
        if time.monotonic() > until:
            return None
        time.sleep(0.005)


def _kill(pid, alone=True):
    "Kill a rank and the processes in its group."
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
    if alone:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _become(worker, fds):
    "From here on this process is a rank."
    code = 1
    try:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)  # its own group: what the rank starts ends with it
        connection, out, err = fds
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (out, 1), (err, 2)):
            os.dup2(source, target)
            os.close(source)
        # New streams: those of the nursery were opened on a file.
        for name, fd in (("stdout", 1), ("stderr", 2)):
            stream = os.fdopen(fd, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
            setattr(sys, name, stream)
        worker.main(connection)
        code = 0
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _die_with(parent):
    "End this process when its parent does, even by SIGKILL."
    if FORKS:  # by a thread of the parent that lasts as long as the parent does
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # too late to be told
        os._exit(1)


def _watch(parent):
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])

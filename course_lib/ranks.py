"""N real processes with `torch.distributed`, beside a notebook.

    group = ranks.Group(4)               # four processes; later cells use the same ones
    losses = group.run(train, lr=0.1)    # train(lr=0.1) on each of them: a list of results, by rank
    group.stop()                         # or at the end of the kernel

    ranks.run(2, train, lr=0.1)          # two processes for this call alone

A function comes from a module or from a cell. What it takes and returns is pickled (cloudpickle); tensors
come back on the CPU, without their graph. What the ranks print is shown after the call. Rank r is seeded with
r. With Gloo a rank sees no GPU, unless `device="cuda"` says so. When a rank raises, dies or hangs, or the
cell is interrupted, all ranks of the group are ended, and the next call starts new ones. Linux and macOS.
"""

import atexit
import contextlib
import ctypes
import datetime
import faulthandler
import io
import linecache
import marshal
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import types
import weakref
from multiprocessing.connection import wait
from pathlib import Path

import cloudpickle
import numpy
import psutil
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from course_lib import machine, ram

PRELOAD = ("torch", "torch.distributed", "torch._dynamo")  # imported once, by the fork server
PER_RANK = {"cpu": 300e6, "cuda": 1.5e9}  # bytes that a rank may come to hold, a small model included
GRACE = 1.0  # seconds that the other ranks have after one failed
KEEP = 1 << 20  # bytes kept of what a rank prints in one call
LOST = "lost its connection to another rank"
ENVIRONMENT = {  # unless the notebook's says otherwise
    "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",  # the host's name may be known nowhere
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NVLS_ENABLE": "0",  # multicast over NVLink fails in some containers
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}
# In these files a frame is not the reader's own.
_INNER = re.compile(r"[/\\](torch|multiprocessing)[/\\]|[/\\](threading|socket|selectors|ranks)\.py$")


class RankError(RuntimeError):
    "A rank raised, died or hung: `rank` says which, the first line how; `__cause__` is its exception."

    def _render_traceback_(self):  # a notebook shows what the rank said, not the frames of this file
        return str(self).splitlines()


def run(n, fn, *args, backend=None, timeout=60.0, **kwargs):
    "Call `fn(*args, **kwargs)` on `n` ranks that exist for this call; the results, by rank."
    with Group(n, backend, timeout) as group:
        return group.run(fn, *args, **kwargs)


class Group(contextlib.AbstractContextManager):
    """`n` ranks that stay until `stop`, or to the end of `with ranks.Group(4) as group:`.

    `backend` is "gloo" or "nccl", by default NCCL where there is a GPU for each rank. With `device="cuda"`
    ranks on Gloo use GPUs too, and share them where there are too few. A call may take `timeout` seconds.
    `preload` names modules that the first group of a notebook imports once for all ranks.
    Raises ValueError where there are too few GPUs or too little memory.
    """

    def __init__(self, n, backend=None, timeout=60.0, preload=(), device=None):
        gpus = torch.cuda.device_count()
        if backend == "nccl" and gpus < n:
            raise ValueError(f"NCCL needs a GPU for each of {n} ranks and found {gpus}: say backend='gloo'")
        self.world, self.timeout, self._preload = n, timeout, [*PRELOAD, *preload]
        self.backend = backend or ("nccl" if gpus >= n else "gloo")
        self.device = "cuda" if self.backend == "nccl" else device or "cpu"
        shared = "a GPU each" if gpus >= n else "one GPU" if gpus == 1 else f"{gpus} GPUs"
        where = shared if self.device == "cuda" else "the CPU"
        self.place = f"{where} ({'NCCL' if self.backend == 'nccl' else 'Gloo'})"
        self._start()

    def run(self, fn, *args, **kwargs):
        "Call `fn(*args, **kwargs)` on every rank; the results, by rank. Raises RankError."
        name = getattr(fn, "__name__", type(fn).__name__)
        # The source of the cells goes along, so that tracebacks show their lines.
        cells = {file: e for file, e in list(linecache.cache.items()) if len(e) == 4 and e[1] is None}
        request = _pack((cells, fn, args, kwargs))
        if len(self._ranks) < self.world:
            self.stop()
            self._start()
        Path(self._folder, "request").write_bytes(request)  # in a pipe, a stopped rank would hold us up
        return self._ask(b"call", name, self.timeout)

    def stop(self):
        "End the ranks and what they started; a later call starts new ones."
        self._end()
        self._ranks = []

    def __exit__(self, *exc):
        self.stop()

    def _start(self):
        need, free = self.world * PER_RANK[self.device], ram.available()
        if need > free:
            found = f"{free / 1e9:.1f} GB are free: start {self.world * free // need:.0f} at most"
            raise ValueError(f"{self.world} ranks may need {need / 1e9:.1f} GB of memory, and {found}")
        for old in Path(tempfile.gettempdir()).glob("course-ranks-*-*"):  # of kernels that were killed
            if not psutil.pid_exists(int(old.name.split("-")[2])):
                shutil.rmtree(old, ignore_errors=True)
        self._folder, self._ranks = tempfile.mkdtemp(prefix=f"course-ranks-{os.getpid()}-"), []
        self._end = weakref.finalize(self, _end, self._ranks, self._folder, os.getpid())
        atexit.register(self._end)  # before multiprocessing's own, which waits for its children
        env = ENVIRONMENT | dict(os.environ)
        env |= {"WORLD_SIZE": str(self.world), "LOCAL_WORLD_SIZE": str(self.world)}
        if self.device == "cpu":
            env["CUDA_VISIBLE_DEVICES"] = ""
        method = multiprocessing.get_start_method(allow_none=True)
        # PyTorch's own limit is longer than ours, which knows where the ranks are.
        limit = datetime.timedelta(seconds=max(60, self.timeout + 5))
        given = self._folder, os.getcwd(), env, method, self.world, self.backend, self.device, limit
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # no CUDA before a fork
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(self._preload)
        # A rank would import the caller's script.
        main, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
        try:
            for r in range(self.world):
                (link, its_link), (out, its_out) = context.Pipe(), context.Pipe(duplex=False)
                process = context.Process(target=_serve, args=(its_link, its_out, r, *given))
                rank = types.SimpleNamespace(process=process, link=link, out=out, printed=bytearray())
                Path(self._folder, f"stack-{r}").touch()
                process.start()
                self._ranks.append(rank)
                its_link.close()
                its_out.close()
        finally:
            sys.modules["__main__"] = main
        self._ask(b"join", "the start", 120.0)

    def _ask(self, request, name, limit):
        "Have every rank do something and print what it printed; the results, by rank."
        self._replies = {}  # by rank, as they come: (kind, in words, result or traceback and exception)
        try:
            for rank in self._ranks:
                with contextlib.suppress(OSError):  # it is gone, which its reply will say
                    rank.link.send_bytes(request)
            self._collect(limit)
            if [reply[0] for reply in self._replies.values()] != ["done"] * self.world:
                raise self._error(name, limit)
            return [self._replies[r][2] for r in range(self.world)]
        except BaseException as e:
            if isinstance(e, KeyboardInterrupt):
                print(*(f"rank {r} {how}" for r, how in self._states().items()), sep="\n")
            self.stop()
            raise

    def _collect(self, limit):
        "Read replies and output until all ranks replied, the time is over, or the grace after a failure is."
        left, end = limit, time.monotonic() + limit
        try:
            while left > 0 and len(self._replies) < self.world:
                left = end - time.monotonic()
                hung = {r: rank for r, rank in enumerate(self._ranks) if r not in self._replies}
                ready = wait([pipe for rank in hung.values() for pipe in (rank.out, rank.link)], max(0, left))
                for r, rank in hung.items():
                    if rank.out in ready:
                        _read(rank)
                    if rank.link in ready:
                        self._replies[r] = _reply(rank)
                        if self._replies[r][0] != "done":
                            end = min(end, time.monotonic() + GRACE)
        finally:
            for r, rank in enumerate(self._ranks):
                while len(rank.printed) < KEEP and wait([rank.out], 0) and _read(rank):
                    pass
                for line in rank.printed.decode(errors="replace").splitlines():
                    print(f"rank {r}: {line}")
                rank.printed.clear()

    def _error(self, name, limit):
        "A RankError: which rank and what, its traceback, and how the others were."
        states, cause = self._states(), None
        failed = [r for r, (kind, *_) in self._replies.items() if kind != "done"]
        if failed:
            rank = min(failed, key=lambda r: (self._replies[r][0] != "died", states[r] == LOST))
            lines = [f"rank {rank} of {self.world} {states.pop(rank)}"]
            if self._replies[rank][0] == "raised":
                text, exception = self._replies[rank][2]
                lines.append("\n" + re.sub('(?<=File )"(.+?)"', lambda m: _named(m[1]), text))
                with contextlib.suppress(Exception):  # its class may be known on the rank alone
                    cause = pickle.loads(exception)
        else:
            hung = [r for r in states if r not in self._replies]
            who, rank = f"rank{'s' * (len(hung) > 1)} {', '.join(map(str, hung))} of {self.world}", hung[0]
            lines = [f"{who} did not finish {name} within {limit:g} s",
                     "All ranks must call the same collectives in the same order."]  # fmt: skip
        lines += [f"rank {r} {how}" for r, how in states.items()]
        error = RankError("\n".join([*lines, "The ranks were ended; the next call starts new ones."]))
        error.rank, error.__cause__ = rank, cause
        return error

    def _states(self):
        "How each rank ended or where it is: {0: 'had finished', 1: 'was at line 3 of train …'}."
        states = {r: words for r, (_, words, _) in self._replies.items()}
        stacks = {r: Path(self._folder, f"stack-{r}") for r in range(len(self._ranks)) if r not in states}
        for r in stacks:
            with contextlib.suppress(OSError):
                os.kill(self._ranks[r].process.pid, signal.SIGUSR1)
        until = time.monotonic() + 1
        while time.monotonic() < until and not all(stack.stat().st_size for stack in stacks.values()):
            time.sleep(0.02)
        time.sleep(0.05 * bool(stacks))  # the last of them is being written
        states |= {r: f"was {_where(stack.read_text(errors='replace'))}" for r, stack in stacks.items()}
        return dict(sorted(states.items()))


def _end(ranks, folder, owner):
    if os.getpid() != owner:  # a fork of the notebook, as a loader's worker
        return
    for rank in ranks:
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(OSError):
                kill(rank.process.pid, signal.SIGKILL)
    for rank in ranks:
        rank.process.join(5)
        rank.link.close()
        rank.out.close()
    shutil.rmtree(folder, ignore_errors=True)


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj):
        if isinstance(obj, types.CodeType):  # cloudpickle's own way forgets its file, and so the cell
            return marshal.loads, (marshal.dumps(obj),)
        return super().reducer_override(obj)


def _pack(obj):
    file = io.BytesIO()
    _Pickler(file).dump(obj)
    return file.getvalue()


def _reply(rank):
    with contextlib.suppress(EOFError, OSError):
        return pickle.loads(rank.link.recv_bytes())
    rank.process.join(2)
    code = rank.process.exitcode
    often = {-signal.SIGKILL: ", often for want of memory", -signal.SIGSEGV: ", a crash in compiled code"}
    killed = f"was killed by {signal.Signals(-code).name}{often.get(code, '')}" if (code or 0) < 0 else ""
    return "died", killed or f"left with exit code {code}", None


def _read(rank):
    "Keep the first that a rank printed; False at the end of its output."
    got = os.read(rank.out.fileno(), 1 << 16)
    rank.printed += got[: max(0, KEEP - len(rank.printed))]
    return bool(got)


def _named(file):
    "A file as IPython names it, 'Cell In[3]', or in quotes."
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    kind, label = (shell and shell.compile.format_code_name(file)) or (None, None)
    return f"{kind} {label}" if kind else f'"{file}"'


def _where(stack):
    "faulthandler's dump, the main thread last -> 'at line 12 of train (model.py): dist.all_reduce(x)'."
    frames = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', stack.strip().split("\n\n")[-1], re.MULTILINE)
    for file, line, name in frames:
        if file != "<string>" and not _INNER.search(file):  # the fork server's own first line
            place = f"at line {line} of {name} ({_named(file).strip(chr(34)).rpartition('/')[2]})"
            return f"{place}: {linecache.getline(file, int(line)).strip()[:100]}"
    return f"in {frames[0][2]}" if frames else "not answering, as a stopped process"


def _serve(link, out, rank, folder, cwd, env, method, *group):
    "The main function of a rank's process: do what is asked until the notebook is gone."
    from multiprocessing.forkserver import _forkserver

    os.setsid()  # what the rank starts ends with it, and a terminal's Ctrl-C reaches the notebook alone
    os.dup2(out.fileno(), 1)
    os.dup2(out.fileno(), 2)
    sys.stdout = sys.stderr = open(1, "w", buffering=1, encoding="utf-8", errors="replace")  # noqa: SIM115
    # No rank outlives the notebook: the fork server ends without it, and the system then ends the ranks. They
    # inherit the pipe that keeps the fork server alive.
    os.close(_forkserver._forkserver_alive_fd)
    _forkserver._forkserver_alive_fd = None
    with contextlib.suppress(OSError, AttributeError):  # Linux only
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    notebook = multiprocessing.parent_process()
    threading.Thread(target=lambda: (notebook.join(), os._exit(1)), daemon=True).start()
    faulthandler.register(signal.SIGUSR1, file=open(Path(folder, f"stack-{rank}"), "w"))  # noqa: SIM115
    os.environ.clear()
    os.environ.update(env, RANK=str(rank), LOCAL_RANK=str(rank))
    os.chdir(cwd)
    multiprocessing.set_start_method(method, force=True)  # for loaders' workers, as in the notebook
    with contextlib.suppress(EOFError, OSError):
        while request := link.recv_bytes():
            todo = (_join, folder, rank, *group) if request == b"join" else (_do, folder)
            link.send_bytes(_answer(*todo))
    os._exit(0)


def _join(folder, rank, world, backend, device, limit):
    "Set this rank's device, threads and seeds, and initialise the process group."
    torch.set_num_threads(max(1, machine.cores() // world))
    numpy.random.seed(rank)
    torch.manual_seed(rank)
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    bound = torch.device("cuda", rank) if backend == "nccl" else None
    where = {"init_method": f"file://{folder}/store", "rank": rank, "world_size": world}
    dist.init_process_group(backend, timeout=limit, device_id=bound, **where)


def _do(folder):
    cells, fn, args, kwargs = pickle.loads(Path(folder, "request").read_bytes())
    linecache.cache.update(cells)
    value = fn(*args, **kwargs)
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # what hangs on the GPU must hang in this call
    # Cloned, since a view travels with its whole storage.
    return tree_map_only(torch.Tensor, lambda t: t.detach().cpu().clone(), value)


def _answer(fn, *args):
    "A reply, pickled: ('done', …, result) or ('raised', in words, (traceback, exception))."
    try:
        return _pack(("done", "had finished", fn(*args)))
    except BaseException as e:
        frames, exception = e.__traceback__, None
        while frames.tb_next and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        words = LOST if "gloo/transport" in str(e) else f"raised {type(e).__name__}: {e}".rstrip(": ")
        with contextlib.suppress(Exception):
            exception = _pack(e)
        trace = "".join(traceback.format_exception(type(e), e, frames)).rstrip()
        return _pack(("raised", words, (trace, exception)))
    finally:
        sys.stdout.flush()

"""N real processes with `torch.distributed`, beside a notebook or under torchrun.

    from course_lib import ranks

    group = ranks.Group(4)               # four processes; later cells use the same ones
    losses = group.run(train, lr=0.1)    # train(lr=0.1) on each of them: a list of results, by rank
    group.stop()                         # or at the end of the kernel

    ranks.run(2, train, lr=0.1)          # two processes for this call alone

A function comes from a module or from a cell; on each rank it asks `dist.get_rank()` which one it is. What it
takes and gives is pickled (cloudpickle), and tensors come back on the CPU, without their graph. What ranks
print is shown after the call, by rank. Rank r is seeded with r. With Gloo a rank sees no GPU and with NCCL its
own, so `machine.device()` is right on both. When a rank raises, dies or hangs, or the cell is interrupted, the
group's ranks are ended, and the next call starts new ones. The same function runs in a script that torchrun
starts, inside `with ranks.joined():`.
"""

import atexit
import contextlib
import ctypes
import datetime
import faulthandler
import io
import itertools
import linecache
import marshal
import multiprocessing
import os
import pickle
import random
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
import psutil

from course_lib import machine

PRELOAD = ("torch", "torch.distributed", "torch._dynamo")  # imported once, by the fork server
PER_RANK = {"gloo": 300e6, "nccl": 1.5e9}  # bytes that a rank may come to hold, a small model included
START_LIMIT = 120.0  # seconds until all ranks have joined
GRACE = 1.0  # seconds that the other ranks have after one failed
KEEP = 1 << 20  # bytes kept of what a rank prints in one call
ENDED = "The ranks were ended; the next call starts new ones."

_groups = weakref.WeakSet()
atexit.register(lambda: [group.stop() for group in list(_groups)])


class RankError(RuntimeError):
    "A rank raised, died or hung: `rank` says which, the first line how; `__cause__` is its exception."

    rank = None

    def _render_traceback_(self):  # a notebook shows what the rank said, not the frames of this file
        return str(self).splitlines()


class RankInterrupted(KeyboardInterrupt):
    "The call was interrupted; the message says where each rank was."

    _render_traceback_ = RankError._render_traceback_


def run(n, fn, *args, backend=None, timeout=60.0, **kwargs):
    "Call `fn(*args, **kwargs)` on `n` ranks that exist for this call; the results, by rank."
    with Group(n, backend, timeout) as group:
        return group.run(fn, *args, **kwargs)


class Group:
    """`n` ranks that stay until `stop`, also as `with ranks.Group(4) as group:`.

    `backend` is "gloo" or "nccl", by default NCCL where there is a GPU for each rank. A call may take `timeout`
    seconds. `preload` names modules that the first group of a notebook imports once for all ranks. Raises
    ValueError for what can't be had here.
    """

    _ranks = ()

    def __init__(self, n, backend=None, timeout=60.0, preload=()):
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ValueError(f"the number of ranks must be a whole number from 1, and was {n!r}")
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < 1e7:
            raise ValueError(f"timeout must be a positive number of seconds, and was {timeout!r}")
        self.world, self.timeout, self.backend = n, timeout, _backend(backend, n)
        self._preload, self._owner = [*PRELOAD, *preload], os.getpid()
        _groups.add(self)
        self._start()

    @property
    def place(self):
        "'the CPU (Gloo, 1 thread each)' or 'a GPU each (NCCL)'."
        n = max(1, machine.cores() // self.world)
        return (
            "a GPU each (NCCL)"
            if self.backend == "nccl"
            else f"the CPU (Gloo, {n} thread{'s' * (n > 1)} each)"
        )

    def __repr__(self):
        return f"{self.world} rank{'s' * (self.world > 1)} on {self.place}"

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.stop()

    def __del__(self):
        self.stop()

    def run(self, fn, *args, **kwargs):
        "Call `fn(*args, **kwargs)` on every rank; the results, by rank. Raises RankError."
        if not callable(fn):
            raise TypeError(f"run takes a function, and got {fn!r}: pass it without calling it")
        name = getattr(fn, "__name__", type(fn).__name__)
        # The source of the cells goes along, so that tracebacks show their lines.
        cells = {file: e for file, e in list(linecache.cache.items()) if len(e) == 4 and e[1] is None}
        try:
            request = _pack((cells, fn, args, kwargs))
        except Exception as e:
            raise TypeError(f"{name} or its arguments can't be sent to the ranks: {e}") from None
        if not self._ranks:
            self._start()
        with self._call(name, self.timeout):
            Path(self._folder, "request").write_bytes(request)  # in a pipe, a stopped rank would hold us up
            for rank in self._ranks:
                with contextlib.suppress(OSError):  # it is gone: said below
                    rank.link.send_bytes(b"request")
        return [self._replies[r][1] for r in range(self.world)]

    def stop(self):
        "End the ranks and what they started; a later call starts new ones."
        if not self._ranks or os.getpid() != self._owner:  # a fork of the notebook, as a loader's worker
            return
        ended, self._ranks = self._ranks, []
        for rank, kill in itertools.product(ended, (os.killpg, os.kill)):
            with contextlib.suppress(OSError):
                kill(rank.process.pid, signal.SIGKILL)
        for rank in ended:
            rank.process.join(5)
            rank.link.close()
            rank.out.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self):
        free, each = psutil.virtual_memory().available, PER_RANK[self.backend]
        if self.world * each > free:
            raise ValueError(
                f"{self.world} ranks may need {self.world * each / 1e9:.1f} GB of memory and "
                f"{free / 1e9:.1f} GB are free: start {free // each:.0f} at most"
            )
        for old in Path(tempfile.gettempdir()).glob("course-ranks-*-*"):  # of kernels that were killed
            if not psutil.pid_exists(int(old.name.split("-")[2])):
                shutil.rmtree(old, ignore_errors=True)
        self._folder, self._ranks = tempfile.mkdtemp(prefix=f"course-ranks-{os.getpid()}-"), []
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(self._preload)
        given = {"world": self.world, "backend": self.backend, "limit": max(60, self.timeout + 5)}
        given |= {"folder": self._folder, "env": dict(os.environ), "cwd": os.getcwd()}
        with self._call("the start", START_LIMIT), _fork_server_settings():
            for r in range(self.world):
                (link, its_link), (out, its_out) = context.Pipe(), context.Pipe(duplex=False)
                process = context.Process(target=_serve, args=(its_link, its_out, r, given))
                process.start()
                self._ranks.append(
                    types.SimpleNamespace(process=process, link=link, out=out, said=bytearray())
                )
                its_link.close()
                its_out.close()

    @contextlib.contextmanager
    def _call(self, name, limit):
        "After the block has asked the ranks: wait for them, print what they printed, raise what went wrong."
        self._replies = {}  # by rank, in order of arrival: (kind, value)
        try:
            try:
                yield
                self._collect(limit)
                if len(self._replies) < self.world or {kind for kind, _ in self._replies.values()} != {
                    "done"
                }:
                    raise self._error(name, limit)
            except KeyboardInterrupt:
                where = [f"rank {r} {state}" for r, state in self._states().items()]
                raise RankInterrupted("\n".join([f"interrupted: {name}", *where, ENDED])) from None
            finally:
                self._print()
        except BaseException:
            self.stop()
            raise

    def _collect(self, limit):
        "Read replies and output until all ranks replied, the time is over, or the grace after a failure is."
        end, printing = time.monotonic() + limit, set(range(self.world))
        while len(self._replies) < self.world:
            left = end - time.monotonic()
            sources = {self._ranks[r].out: r for r in printing}
            sources |= {rank.link: r for r, rank in enumerate(self._ranks) if r not in self._replies}
            for ready in wait(list(sources), max(0, left)):
                r = sources[ready]
                if ready is self._ranks[r].link:
                    self._replies[r] = _reply(self._ranks[r])
                    if self._replies[r][0] != "done":
                        end = min(end, time.monotonic() + GRACE)
                elif not _read(self._ranks[r]):
                    printing.discard(r)
            if left <= 0:
                break

    def _print(self):
        for r, rank in enumerate(self._ranks):
            while len(rank.said) < KEEP and wait([rank.out], 0) and _read(rank):
                pass
            for line in rank.said.decode(errors="replace").splitlines():
                print(f"rank {r}: {line}")
            if len(rank.said) >= KEEP:
                print(f"rank {r}: [it printed more than {KEEP:,} bytes]")
            rank.said.clear()

    def _error(self, name, limit):
        "A RankError: which rank and what, its traceback, and how the others were."
        states, lines, cause = self._states(), [], None
        kinds = {r: kind for r, (kind, _) in self._replies.items()}
        failed = [r for r in kinds if kinds[r] == "died"] or [r for r in kinds if kinds[r] == "raised"]
        failed.sort(key=lambda r: states[r] == LOST)
        if failed:
            lines.append(f"rank {failed[0]} of {self.world} {states.pop(failed[0])}")
            if kinds[failed[0]] == "raised":
                _, text, exception = self._replies[failed[0]][1]
                lines.append("\n" + re.sub('(?<=File )"(.+?)"', lambda m: _named(m[1]), text))
                with contextlib.suppress(Exception):  # its class may be known on the rank alone
                    cause = pickle.loads(exception)
        else:
            failed = [r for r in range(self.world) if r not in kinds]
            several = f"ranks {', '.join(map(str, failed[:-1]))} and {failed[-1]}"
            who = several if failed[1:] else f"rank {failed[0]}"
            lines.append(f"{who} of {self.world} did not finish {name} within {limit:g} s")
        lines += [f"rank {r} {state}" for r, state in states.items()]
        if name != "the start" and failed[0] not in kinds:
            lines.append("All ranks must call the same collectives in the same order.")
        error = RankError("\n".join([*lines, ENDED]))
        error.rank, error.__cause__ = failed[0], cause
        return error

    def _states(self):
        "How each rank ended or where it is: {0: 'had finished', 1: 'was at line 3 of train …'}."
        states = {
            r: {"done": "had finished", "died": value}.get(kind) or value[0]
            for r, (kind, value) in self._replies.items()
        }
        dumps = {r: Path(self._folder, f"stack-{r}") for r in range(len(self._ranks)) if r not in states}
        for r in dumps:
            with contextlib.suppress(OSError):
                os.kill(self._ranks[r].process.pid, signal.SIGUSR1)
        until = time.monotonic() + 1
        while time.monotonic() < until and not all(d.exists() and d.stat().st_size for d in dumps.values()):
            time.sleep(0.02)
        time.sleep(0.05)  # the last of them is being written
        for r, dump in dumps.items():
            states[r] = f"was {_where(dump.read_text(errors='replace') if dump.exists() else '')}"
            with contextlib.suppress(psutil.Error):
                if psutil.Process(self._ranks[r].process.pid).status() == psutil.STATUS_STOPPED:
                    states[r] = "was stopped by a signal"
        return dict(sorted(states.items()))


def _backend(asked, n):
    if asked not in (None, "gloo", "nccl"):
        raise ValueError(f"backend must be 'gloo' or 'nccl', and was {asked!r}")
    if not hasattr(os, "fork"):
        raise ValueError("ranks need Linux or macOS: on Windows, run the course in WSL")
    import torch

    gpus = torch.cuda.device_count()
    if asked == "nccl" and gpus < n:
        raise ValueError(f"NCCL needs a GPU for each of {n} ranks and found {gpus}: say backend='gloo'")
    return asked or ("nccl" if gpus >= n else "gloo")


@contextlib.contextmanager
def _fork_server_settings():
    "The fork server must not initialise CUDA, and a rank must not execute the caller's script again."
    main, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
    before = os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK", "0")
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    try:
        yield
    finally:
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = before
        sys.modules["__main__"] = main


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj):
        if isinstance(obj, types.CodeType):  # cloudpickle would forget its file, and so the cell
            return marshal.loads, (marshal.dumps(obj),)
        return super().reducer_override(obj)


def _pack(obj):
    with io.BytesIO() as file:
        _Pickler(file).dump(obj)
        return file.getvalue()


def _reply(rank):
    try:
        return pickle.loads(rank.link.recv_bytes())
    except (EOFError, OSError):
        rank.process.join(2)
        code = rank.process.exitcode
    if code is None or code >= 0:
        return "died", f"left with exit code {code}"
    meaning = {-signal.SIGKILL: ", often for want of memory", -signal.SIGSEGV: ", a crash in compiled code"}
    return "died", f"was killed by {signal.Signals(-code).name}{meaning.get(code, '')}"


def _read(rank):
    "Keep the first that a rank printed; False at the end of its output."
    got = os.read(rank.out.fileno(), 1 << 16)
    rank.said += got[: max(0, KEEP - len(rank.said))]
    return bool(got)


def _named(file):
    "A file as IPython names it, 'Cell In[3]', or in quotes."
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    kind, label = (shell and shell.compile.format_code_name(file)) or (None, None)
    return f"{kind} {label}" if kind else f'"{file}"'


# In these files a frame is not the reader's own.
_INNER = re.compile(r"[/\\](torch|multiprocessing)[/\\]|[/\\](threading|socket|selectors|ranks)\.py$")
_COLLECTIVE = re.compile(r"[/\\]torch[/\\]distributed[/\\](distributed_c10d|_functional_collectives)\.py$")
LOST = "lost its connection to another rank"


def _where(dump):
    "faulthandler's dump, its main thread last -> 'in all_reduce, line 12 of train (model.py): dist.all_reduce(x)'."
    frames = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', dump.strip().split("\n\n")[-1], re.MULTILINE)
    inner = list(itertools.takewhile(lambda frame: _INNER.search(frame[0]), frames))
    call = next((name for file, _, name in reversed(inner) if _COLLECTIVE.search(file)), "")
    if len(inner) == len(frames):
        return f"in {call or frames[0][2]}" if frames else "not answering"
    file, line, name = frames[len(inner)]
    place = f"line {line} of {name} ({_named(file).strip(chr(34)).rpartition('/')[2]})"
    place += f": {linecache.getline(file, int(line)).strip()[:100]}"
    return f"in {call}, {place}" if call else f"at {place}"


# On a rank.


def _serve(link, out, rank, given):
    "The main function of a rank's process: join the others, then answer calls until the notebook is gone."
    os.setsid()  # what the rank starts ends with it, and a terminal's Ctrl-C reaches the notebook alone
    for fd in (1, 2):
        os.dup2(out.fileno(), fd)
    sys.stdout = sys.stderr = open(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    _end_with_the_notebook()
    stack = open(Path(given["folder"], f"stack-{rank}"), "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=stack)
    os.environ.clear()
    os.environ.update(given["env"], RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(given["world"]), LOCAL_WORLD_SIZE=str(given["world"]))
    os.chdir(given["cwd"])
    store = {"init_method": f"file://{given['folder']}/store", "rank": rank, "world_size": given["world"]}
    with contextlib.suppress(EOFError, OSError):
        link.send_bytes(_answer(_join, given["backend"], given["limit"], **store))
        while link.recv_bytes():
            link.send_bytes(_answer(_do, Path(given["folder"], "request")))
    os._exit(0)


def _end_with_the_notebook():
    """No rank outlives the notebook: without it the fork server ends, and the system ends its children.

    Ranks inherit the pipe by which the fork server knows that somebody needs it, so each closes it.
    """
    from multiprocessing.forkserver import _forkserver

    os.close(_forkserver._forkserver_alive_fd)
    _forkserver._forkserver_alive_fd = None
    with contextlib.suppress(OSError, AttributeError):  # Linux only
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

    def watch():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _join(backend, limit, **how):
    "Set this rank's device, threads and seeds, and initialise the process group."
    import numpy
    import torch
    import torch.distributed as dist

    rank, local, here = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    if here == int(os.environ["WORLD_SIZE"]):  # all on this host, whose name may be known nowhere
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo" if sys.platform.startswith("linux") else "lo0")
    torch.set_num_threads(max(1, machine.cores() // here))
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(rank)
    device = None
    if backend == "nccl":
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast over NVLink fails in some containers
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=limit), device_id=device, **how)
    if device:
        dist.barrier(device_ids=[local])  # connections are made now, and not in the first call


def _do(path):
    import torch
    from torch.utils._pytree import tree_map_only

    cells, fn, args, kwargs = pickle.loads(path.read_bytes())
    linecache.cache.update(cells)
    value = fn(*args, **kwargs)
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # what hangs on the GPU must hang in this call
    # A view would travel with all of its storage.
    return tree_map_only(torch.Tensor, lambda t: t.detach().cpu().clone(), value)


def _answer(fn, *args, **kwargs):
    "A reply, pickled: ('done', result) or ('raised', (what, traceback, exception))."
    try:
        value = fn(*args, **kwargs)
        try:
            return _pack(("done", value))
        except Exception as e:
            raise TypeError(f"the result, a {type(value).__name__}, can't be sent: {e}") from None
    except BaseException as e:
        tb, exception = e.__traceback__, None
        while tb.tb_next and tb.tb_frame.f_code.co_filename == __file__:
            tb = tb.tb_next
        what = LOST if "gloo/transport" in str(e) else f"raised {type(e).__name__}: {e}".rstrip(": ")
        with contextlib.suppress(Exception):
            exception = _pack(e)
        text = "".join(traceback.format_exception(type(e), e, tb)).rstrip()
        return _pack(("raised", (what, text, exception)))
    finally:
        sys.stdout.flush()


@contextlib.contextmanager
def joined(backend=None):
    """Make this process, which torchrun started, a rank: its process group, device, threads and seeds.

    An exception in the block ends the process with its traceback; torchrun then ends the others.
    """
    if "LOCAL_WORLD_SIZE" not in os.environ:
        raise RuntimeError(
            "start this with torchrun, as in `torchrun --standalone --nproc-per-node 2 SCRIPT`"
        )
    import torch.distributed as dist

    try:
        _join(_backend(backend, int(os.environ["LOCAL_WORLD_SIZE"])), 600)
        yield
        dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)  # in order it would wait for ranks that wait for this one

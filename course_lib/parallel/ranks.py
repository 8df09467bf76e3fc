"""N ranks beside a notebook: real processes, each with `torch.distributed` ready.

    from course_lib.parallel import ranks

    ranks.start(4)                        # once in a lesson; later cells use the same four processes
    losses = ranks.run(train, lr=0.1)     # train(lr=0.1) on every rank -> its four results, by rank
    ranks.stop()                          # or at the end of the kernel

    with ranks(3) as group:               # three ranks for this block alone
        group.run(train, lr=0.1)

and, after `ranks.start()` or `%load_ext course_lib.parallel.ranks`, the cell magic

    %%ranks 4
    x = torch.full((2,), float(rank))     # rank, world, torch and dist are there
    dist.all_reduce(x)
    x

Ranks run on the CPU with Gloo, or on one GPU each with NCCL where there are enough GPUs. On ranks with
Gloo no GPU is visible, so `machine.device()` gives what the rank has to use either way. What each rank
prints is shown when the call ends, grouped by rank. Rank r is seeded with `seed + r`.

A function may come from a module or from the notebook; it is called with the same arguments on each rank
and asks `dist.get_rank()` which one it is. Arguments and results travel by (cloud)pickle: tensors come back
on the CPU, without their graph.

When a rank raises, dies or hangs, or the cell is interrupted, no process is left waiting: `RankFailed`,
`RankDied`, `RankTimeout` or `RankInterrupted` names the rank and says where every rank was, and the ranks
start afresh at the next call.
"""

import importlib
import sys
import types

from course_lib.parallel.errors import (  # noqa: F401
    RankDied,
    RankError,
    RankFailed,
    RankInterrupted,
    RankTimeout,
    Refused,
)
from course_lib.parallel.group import Group

_current = None
_told = set()


def start(n, *, backend=None, timeout=60.0, seed=0, preload=(), quiet=False):
    """Start `n` ranks for this and later cells and return their `Group`; print one line, unless `quiet`.

    Ranks that run already are kept when they are as asked for, else replaced, with a line that says so.
    `backend` is "gloo" or "nccl", by default NCCL where there is a GPU for each rank. `timeout` is the
    limit of a call in seconds, unless the call has its own. `preload` names modules to import once for all
    ranks: `DistributedDataParallel` needs torch._dynamo, which each rank would else import for itself, in
    seconds. Raises ValueError for a number of ranks that can't be had.
    """
    global _current
    group = Group(n, backend=backend, timeout=timeout, seed=seed, preload=preload)
    _use_magic()
    old = _current if _current and not _current.closed else None
    if old and old.like(group):
        old.timeout = group.timeout
        return old
    group.refuse_without_memory()
    if old:
        old.stop()
        if not quiet:
            print(f"{_count(old.world)} stopped: {n} were asked for.")
    _current = group.start()
    if not quiet:
        _tell_why_gloo(group, backend)
        print(f"{_count(n)} on {group.place}, ready in {group.start_seconds:.1f} s")
    return group


def stop():
    "Stop the ranks that `start` started; nothing happens where there are none."
    global _current
    group, _current = _current, None
    if group:
        group.stop()


def current():
    "The `Group` that `start` started, or RankError where there is none."
    if _current is None or _current.closed:
        raise RankError("no ranks are running: call ranks.start(4) first")
    return _current


def run(fn, *args, timeout=None, show=True, **kwargs):
    "`current().run(…)`: call `fn` on every rank; the results, by rank."
    return current().run(fn, *args, timeout=timeout, show=show, **kwargs)


def get(name):
    "`current().get(name)`: the value of a variable of the `%%ranks` cells, by rank."
    return current().get(name)


def put(**values):
    "`current().put(x=…)`: set variables that the `%%ranks` cells see, the same on every rank."
    current().put(**values)


def split(n, world, rank=None):
    """The equal share of `n` things of each of `world` ranks: n / world, or the slice of one `rank`.

    Raises ValueError where it doesn't divide.
    """
    if n % world:
        near = [m for m in (n - n % world, n - n % world + world) if m]
        raise Refused(
            f"{n} can't be split evenly over {_count(world)}: {n % world} would be left over; "
            f"take {' or '.join(map(str, near))}"
        )
    share = n // world
    return share if rank is None else slice(rank * share, (rank + 1) * share)


class _Ranks:
    "`with ranks(n) as group:`. The group is made on entering, and stopped on leaving unless it ran before."

    def __init__(self, n, **options):
        self.n, self.options, self.mine, self.limit = n, options, None, None

    def __enter__(self):
        group = Group(self.n, **self.options)
        if _current and not _current.closed and _current.like(group):
            self.limit, _current.timeout = _current.timeout, group.timeout
            return _current
        self.mine = group.start()
        _tell_why_gloo(group, self.options.get("backend"))
        return group

    def __exit__(self, *exc):
        if self.mine:
            self.mine.stop()
        elif _current:
            _current.timeout = self.limit


def _tell_why_gloo(group, backend):
    gpus = group.gpus
    if backend is None and 0 < gpus < group.world and "gloo" not in _told:
        _told.add("gloo")
        have = "one GPU is" if gpus == 1 else f"{gpus} GPUs are"
        print(f"{have} here for {group.world} ranks and NCCL wants one each: they use the CPU, with Gloo.")


def _count(n):
    return f"{n} rank{'s' * (n != 1)}"


def load_ipython_extension(shell):
    "`%load_ext course_lib.parallel.ranks` makes the cell magic `%%ranks`."
    from course_lib.parallel import magic

    magic.register(shell)


def _use_magic():
    if "IPython" in sys.modules:
        shell = sys.modules["IPython"].get_ipython()
        if shell is not None:
            load_ipython_extension(shell)


class _Module(types.ModuleType):
    "This module can be called: `with ranks(4) as group:`. Functions of a notebook that use it can be sent."

    def __reduce__(self):
        return importlib.import_module, (self.__name__,)

    def __call__(self, n, *, backend=None, timeout=60.0, seed=0, preload=()):
        return _Ranks(n, backend=backend, timeout=timeout, seed=seed, preload=preload)


sys.modules[__name__].__class__ = _Module

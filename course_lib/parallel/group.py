"A group of ranks, seen from the notebook: start them, have them do something, say what went wrong, end them."

import contextlib
import os
import pickle
import sys
import time

from course_lib.parallel import nurseries, room, timeline, wire
from course_lib.parallel.call import Call
from course_lib.parallel.errors import (
    ENDED,
    RankError,
    RankFailed,
    RankInterrupted,
    RankTimeout,
    died,
    listing,
    places,
)

START_LIMIT = 120.0  # seconds for all ranks to join; importing PyTorch on a busy machine takes many of them


class Group:
    """`n` ranks on this host. Made by `ranks.start` and `ranks(n)`.

    world           how many
    backend         "gloo" or "nccl"; `place` says it in words
    output          what each rank printed in the last call, by rank
    timeline        what each rank recorded with `timeline` in the last call, by rank, from 0 s
    pids            the ranks' processes
    """

    def __init__(self, n, backend=None, timeout=60.0, seed=0, preload=()):
        room.refuse_inside()
        self.world = room.whole(n)
        self.timeout = room.seconds(timeout)
        self.seed = room.seed(seed)
        self.preload = room.modules(preload)
        self.gpus = 0 if backend == "gloo" else room.gpus()  # PyTorch is imported to count them
        self.backend = room.backend(backend, self.world, self.gpus)
        self.closed, self.busy = False, False
        self.output, self.timeline, self.pids = [], [], []
        self.start_seconds = None
        self._ranks = []

    @property
    def place(self):
        "Where the ranks run: 'the CPU (Gloo, 1 thread each)'."
        if self.backend == "nccl":
            return "a GPU each (NCCL)"
        n = room.threads(self.world)
        return f"the CPU (Gloo, {n} thread{'s' * (n != 1)} each)"

    def refuse_without_memory(self):
        room.refuse_without_memory(self.world, self.backend)

    def like(self, other):
        "Would these ranks serve as those?"
        return (self.world, self.backend, self.seed) == (other.world, other.backend, other.seed)

    def __repr__(self):
        state = "stopped" if self.closed else f"processes {self.pids}"
        return f"<{self.world} ranks on {self.place}: {state}>"

    def start(self):
        "Start the processes and wait until all have joined; returns the group."
        if self.closed:
            raise RankError("these ranks were stopped: start others with ranks.start(n)")
        self.refuse_without_memory()
        began = time.monotonic()
        try:
            self._ranks = nurseries.hatch(self.world, self, self.preload)
            for rank in self._ranks:
                rank.nccl = self.backend == "nccl"
            self.pids = [r.pid for r in self._ranks]
            shared = {
                "world": self.world, "backend": self.backend, "store": nurseries.new_store(),
                "seed": self.seed, "env": dict(os.environ), "path": [p or os.getcwd() for p in sys.path],
                "cwd": os.getcwd(),
            }  # fmt: skip
            setups = [
                ("setup", {**shared, "rank": r, "dump": rank.dump}) for r, rank in enumerate(self._ranks)
            ]
            self._ask(setups, START_LIMIT, show=False, doing="joining the process group")
        except BaseException:
            self._end()
            nurseries.release(self)
            raise
        self.start_seconds = time.monotonic() - began
        return self

    def run(self, fn, *args, timeout=None, show=True, **kwargs):
        """Call `fn(*args, **kwargs)` on every rank; its results, by rank.

        What the ranks print is shown afterwards, by rank, unless `show` is False; `output` keeps it. Raises
        RankFailed, RankDied, RankTimeout (after `timeout` seconds) or, on an interrupt, RankInterrupted.
        """
        if not callable(fn):
            raise TypeError(
                f"run expects a function and got {fn!r}: pass the function itself, without calling it"
            )
        try:
            body = wire.cells(), wire.pack((fn, args, kwargs))
        except Exception as e:
            raise TypeError(
                f"{getattr(fn, '__name__', fn)} or its arguments can't be sent to the ranks "
                f"({type(e).__name__}: {e}); open files, locks and generators must be made on the rank"
            ) from None
        name = getattr(fn, "__name__", type(fn).__name__)
        return self._ask([("call", body)] * self.world, timeout, show, doing=name)

    def execute(self, source, filename="<ranks>", timeout=None, show=True):
        "Execute source text on every rank, in the variables that stay there."
        wire.know({filename: source})
        self._ask([("cell", (source, filename))] * self.world, timeout, show, doing="the cell")

    def get(self, name):
        "The value of a variable of the cells, by rank."
        return self._ask([("get", name)] * self.world, None, show=False, doing=f"get({name!r})")

    def put(self, **values):
        "Set variables that the cells see, the same on every rank."
        self._ask([("put", wire.pack(values))] * self.world, None, show=False, doing="put")

    def reset(self):
        "A fresh process group on the same processes: no message of an earlier call is left in it."
        self._ask(self._joining(), START_LIMIT, show=False, doing="joining the process group")

    def _joining(self):
        how = {"world": self.world, "backend": self.backend, "store": nurseries.new_store()}
        return [("join", {"rank": r, **how}) for r in range(self.world)]

    def stop(self):
        "End the processes. A group that was stopped stays so."
        self.closed = True
        self._end(politely=True)

    def _end(self, politely=False):
        gone, self._ranks, self.pids = self._ranks, [], []
        nurseries.bury(gone, politely)
        if self.closed:
            nurseries.release(self)

    # One call, from the requests to the results.

    def _ask(self, requests, timeout, show, doing):
        room.refuse_inside()
        if self.closed:
            raise RankError("these ranks were stopped: start others with ranks.start(n)")
        if self.busy:
            raise RankError("the ranks are still at another call: wait for it, or interrupt it")
        if not self._ranks:
            self.start()  # they ended with the last failure
        limit = self.timeout if timeout is None else room.seconds(timeout)
        call = Call(self._ranks, limit)
        self.busy = True
        try:
            try:
                call.send(requests)
                call.collect()
            except KeyboardInterrupt:
                self._interrupted(call, show, doing)
            self._keep(call, show)
            if call.failed:
                self._fail(call, doing, limit)
            return [call.replies[r][1] for r in range(self.world)]
        except BaseException:
            if self._ranks and not (call.answered and self._rejoin()):
                self._end()
            raise
        finally:
            self.busy = False

    def _keep(self, call, show):
        self.output = call.output()
        self.timeline = timeline.align([call.replies.get(r, (0, 0, []))[2] for r in range(self.world)])
        if show:
            for r, text in enumerate(self.output):
                for line in text.splitlines():
                    print(f"rank {r}: {line}")

    def _rejoin(self):
        "After an exception on some ranks: messages may be under way, so the process group is made anew."
        try:
            call = Call(self._ranks, 10.0)
            call.send(self._joining())
            call.collect()
            return not call.failed
        except BaseException:  # an impatient interrupt among them: the exception that led here is raised
            return False

    def _fail(self, call, doing, limit):
        world = self.world
        if call.died:
            rank = call.died[0]  # others may have followed it
            raise died(rank, world, nurseries.ending(self._ranks[rank]), call.errors[rank], doing)
        raised = {r: reply[1] for r, reply in sorted(call.replies.items()) if reply[0] == "raised"}
        if not raised:
            where = call.ask_where()
            hung, done = sorted(where), sorted(set(range(world)) - set(where))
            head = f"{listing(hung)} of {world} did not finish {doing} within {limit:g} s: "
            lines = [head + places(where, "is", "are") + (f"; {listing(done)} had finished" if done else "")]
            if len(set(filter(None, call.collectives.values()))) > 1:
                lines.append("All ranks must call the same collectives in the same order.")
            lines.append(ENDED)
            raise RankTimeout(wire.shown("\n".join(lines)), hung, where, world)
        rank, told = next(iter(raised.items()))
        same = [r for r in raised if r != rank]
        lines = [f"rank {rank} of {world} raised {told['name']}: {told['text']}".rstrip(": ")]
        if same:
            lines[0] += f" (and {listing(same)} raised too)"
        lines.append("\n" + told["traceback"].rstrip())
        if call.waiting:
            where = call.ask_where()
            lines.append(f"\nMeanwhile {places(where, 'was', 'were')}")
            lines.append(ENDED)
        cause = None
        with contextlib.suppress(Exception):  # of a class that is only known on the rank
            cause = pickle.loads(told["exception"]) if told["exception"] else None
        raise RankFailed(wire.shown("\n".join(lines)), rank, world) from cause

    def _interrupted(self, call, show, doing):
        with contextlib.suppress(KeyboardInterrupt):  # the second one doesn't wait
            call.interrupt()
        where = call.ask_where() if call.waiting else {}
        lines = [f"interrupted: {doing} on {self.world} ranks"]
        for r in range(self.world):
            lines.append(f"rank {r} was {where[r]}" if r in where else f"rank {r} {call.how(r)}")
        if call.waiting:
            lines.append(ENDED)
        self._keep(call, show)
        raise RankInterrupted(wire.shown("\n".join(lines))) from None

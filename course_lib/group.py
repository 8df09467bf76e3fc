"""A group of ranks in one process: a thread each, one running at a time, every byte counted.

Only one rank runs until it must wait for another, so counts repeat exactly, and a group that can go no
further is known at once: no time-out is needed to say who waits for whom.
"""

import random
import threading
import time

from course_lib.group_mail import COLLECTIVES, Comm, Misuse

PATIENCE = 30.0  # seconds that one rank may compute without a word to the others


class Stuck(RuntimeError):
    "Every rank that has not returned waits for another; the message says who for whom."


class Raised(RuntimeError):
    "An exception in the function of one rank: `rank` is its number, `__cause__` the exception."

    def __init__(self, rank, error):
        first = (str(error).strip().splitlines() or [""])[0][:200]
        super().__init__(f"rank {rank}: {type(error).__name__}: {first}")
        self.rank = rank


class _Over(BaseException):
    "Ends a rank's thread after another failed; no `except Exception` catches it."


class Group:
    """`size` ranks in threads of this process, for counting and for checks.

    `run(fn, *args)` calls `fn(comm, *args)` in every rank and gives a list of what they return; `events` is
    then all that they sent, in order. Raises Stuck, Misuse, or Raised, whichever came first.
    """

    def __init__(self, size):
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"a group has 1 rank or more; given {size!r}")
        self.size, self.events = size, []
        self._lock = threading.Condition()
        self._reset()

    def _reset(self):
        self._turn, self._failure, self._beat = None, None, time.monotonic()
        self._waiting = {}  # rank: (ready, what it waits for)
        self._left = set(range(self.size))
        self._letters = {}  # (source, to): messages that nobody has received
        self._meetings = []  # the collectives in order, each {rank: its part}
        self._count = [0] * self.size  # collectives called, by rank
        self._flying = [[] for _ in range(self.size)]

    def run(self, fn, *args):
        "Call `fn(comm, *args)` in every rank; the list of results by rank."
        self._reset()
        results = [None] * self.size
        threads = [
            threading.Thread(target=self._rank, args=(r, fn, args, results), daemon=True)
            for r in range(self.size)
        ]
        for t in threads:
            t.start()
        with self._lock:
            self._pass_on()
        for t in threads:
            while t.is_alive():
                t.join(0.2)
                if time.monotonic() - self._beat > PATIENCE:
                    self._fail(Stuck(f"rank {self._turn} computes for {PATIENCE:.0f} s and says nothing"))
                    raise self._failure
        if self._failure:
            raise self._failure
        return results

    def sent(self, rank=None):
        "Bytes sent point to point by `rank`, or by all."
        return sum(e.nbytes for e in self.events if e.what == "send" and rank in (None, e.rank))

    def events_of(self, rank):
        return [e for e in self.events if e.rank == rank]

    def collectives(self, rank=0):
        "The collectives that `rank` called, in order, as (name, bytes)."
        return [(e.what, e.nbytes) for e in self.events if e.rank == rank and e.what in COLLECTIVES]

    # --- one rank runs at a time --------------------------------------------------------------------

    def _rank(self, rank, fn, args, results):
        comm = Comm(self, rank)
        try:
            with self._lock:
                self._await_turn(rank)
            results[rank] = fn(comm, *args)
            self._leave(rank)
        except _Over:
            pass
        except (Stuck, Misuse) as e:
            self._fail(e)
        except BaseException as e:
            error = Raised(rank, e)
            error.__cause__ = e
            self._fail(error)
        finally:
            with self._lock:
                self._left.discard(rank)
                if not self._failure:
                    self._pass_on()

    def _leave(self, rank):
        for handle in self._flying[rank]:
            if not handle.done:
                raise Misuse(f"rank {rank} returned without waiting for {handle.what}: call wait() on it")

    def _fail(self, error):
        with self._lock:
            self._failure = self._failure or error
            self._lock.notify_all()

    def _await_turn(self, rank):
        while self._turn != rank:
            if self._failure:
                raise _Over
            self._lock.wait()
        if self._failure:
            raise _Over
        self._beat = time.monotonic()

    def _pass_on(self):
        "Give the turn to a rank that can go on, any of them: a right program gives the same whichever."
        able = [r for r in self._left if r not in self._waiting or self._waiting[r][0]()]
        if able:
            self._turn = random.choice(able)
        elif self._left:
            left = sorted(self._left)
            who = "; ".join(f"rank {r} waits {self._waiting[r][1]}" for r in left[:3])
            who += f"; and so do {len(left) - 3} more" if len(left) > 3 else ""
            done = sorted(set(range(self.size)) - self._left)
            tail = f"; rank{'s' * (len(done) > 1)} {', '.join(map(str, done))} returned" if done else ""
            self._failure = self._failure or Stuck(f"nobody can go on: {who}{tail}")
        self._lock.notify_all()

    def block(self, rank, ready, what):
        "Let the others run until `ready()`."
        with self._lock:
            if not ready():
                self._waiting[rank] = (ready, what)
                self._pass_on()
                self._await_turn(rank)
                del self._waiting[rank]

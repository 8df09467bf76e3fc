"One call: what is asked of all ranks at once, and what comes back in the time it has."

import contextlib
import os
import pickle
import select
import signal
import time
from multiprocessing.connection import wait

from course_lib.parallel import stacks, wire

GRACE = 1.0  # seconds that the other ranks get to end by themselves after one failed


class Call:
    "What is asked of all ranks at once, and what comes back."

    def __init__(self, ranks, limit):
        self.ranks, self.limit, self.end = ranks, limit, None
        self.waiting = set(range(len(ranks)))
        self.replies, self.died = {}, []  # who died, in that order
        self.collectives = {}  # what a rank that was asked where it is waits in, or ''
        for rank in ranks:
            rank.discard()

    @property
    def failed(self):
        return bool(self.died or self.waiting) or any(r[0] == "raised" for r in self.replies.values())

    @property
    def answered(self):
        "Did every rank reply, be it with an exception?"
        return len(self.replies) == len(self.ranks)

    @property
    def errors(self):
        return {r: rank.err.text() for r, rank in enumerate(self.ranks)}

    def output(self):
        for rank in self.ranks:
            rank.drain()
        return [rank.out.text() + rank.err.text() for rank in self.ranks]

    def send(self, requests):
        """Ask every rank, within the time of the call.

        A rank that doesn't read, since it is stopped, holds up neither the others nor the clock.
        """
        self.end = time.monotonic() + self.limit
        unsent = {r: memoryview(wire.framed(request)) for r, request in enumerate(requests)}
        while unsent:
            for r in list(unsent):
                try:
                    unsent[r] = unsent[r][wire.push(self.ranks[r].connection, unsent[r]) :]
                except BlockingIOError:
                    continue
                except OSError:
                    self.waiting.discard(r)
                    self.died.append(r)
                    del unsent[r]
                    continue
                if not unsent[r]:
                    del unsent[r]
            left = self.end - time.monotonic()
            if left <= 0:
                break
            select.select([], [self.ranks[r].connection for r in unsent], [], left if unsent else 0)

    def collect(self, seconds=None):
        "Read replies and output until all is said, a rank died, the time is over, or failure had its grace."
        end = self.end if seconds is None else time.monotonic() + seconds
        while self.waiting and not self.died:
            left = max(0.0, end - time.monotonic())
            sources = {}
            for r in self.waiting:
                sources[self.ranks[r].connection] = r
            for r, rank in enumerate(self.ranks):
                for pipe in (rank.out, rank.err):
                    if pipe.open:
                        sources[pipe] = r
            replied = False
            for ready in wait(list(sources), left):
                r = sources[ready]
                if ready is self.ranks[r].connection:
                    replied = True
                    self._reply(r)
                    if r in self.replies and self.replies[r][0] == "raised":
                        end = min(end, time.monotonic() + GRACE)
                else:
                    ready.drain()
            if not left and not replied:  # what had been said in time is read
                break
        if self.died:  # ranks tend to die together
            for r in sorted(self.waiting):
                if self.ranks[r].connection.poll(0.05):
                    self._reply(r)

    def _reply(self, r):
        self.waiting.discard(r)
        try:
            self.replies[r] = pickle.loads(self.ranks[r].connection.recv_bytes())
        except (EOFError, OSError):
            self.died.append(r)

    def interrupt(self):
        for r in self.waiting:
            with contextlib.suppress(OSError):
                os.kill(self.ranks[r].pid, signal.SIGINT)
        self.collect(GRACE)

    def ask_where(self):
        "Where each rank that has not answered is, in words."
        asked = {r: self.ranks[r] for r in self.waiting}
        for rank in asked.values():
            rank.ask_stack()
        found = {}
        for r, rank in asked.items():
            frames = stacks.parse(rank.stack())
            found[r] = stacks.where(frames)
            if rank.nccl:
                found[r] += stacks.unfinished(rank.record())
            self.collectives[r] = stacks.collective(frames)
        return found

    def how(self, r):
        if r in self.died:
            return "died"
        kind, told, _ = self.replies[r]
        if kind == "done":
            return "had finished"
        if told["name"] == "KeyboardInterrupt":
            return f"was {stacks.where(told['frames'])}"
        return f"raised {told['name']}: {told['text']}"

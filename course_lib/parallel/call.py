"One call: what is asked of all ranks at once, and what comes back in the time it has."

import contextlib
import os
import pickle
import signal
import time
from multiprocessing.connection import wait

from course_lib.parallel import stacks

GRACE = 1.0  # seconds that the other ranks get to end by themselves after one failed


class Call:
    "What is asked of all ranks at once, and what comes back."

    def __init__(self, ranks, limit):
        self.ranks, self.limit = ranks, limit
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
        for r, (rank, request) in enumerate(zip(self.ranks, requests, strict=True)):
            try:
                rank.connection.send_bytes(pickle.dumps(request))
            except OSError:
                self.waiting.discard(r)
                self.died.append(r)

    def collect(self, seconds=None):
        "Read replies and output until all is said, a rank died, the time is over, or failure had its grace."
        end = time.monotonic() + (self.limit if seconds is None else seconds)
        while self.waiting and not self.died:
            left = end - time.monotonic()
            if left <= 0:
                break
            sources = {}
            for r in self.waiting:
                sources[self.ranks[r].connection] = r
            for r, rank in enumerate(self.ranks):
                for pipe in (rank.out, rank.err):
                    if pipe.open:
                        sources[pipe] = r
            for ready in wait(list(sources), left):
                r = sources[ready]
                if ready is self.ranks[r].connection:
                    self._reply(r)
                    if r in self.replies and self.replies[r][0] == "raised":
                        end = min(end, time.monotonic() + GRACE)
                else:
                    ready.drain()
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

"""Ranks as threads of one process, one running at a time, every byte counted.

Only one rank runs until it must wait for another, so counts repeat exactly, and a group that can go no
further is known at once: no time-out is needed to say who waits for whom.
"""

import contextlib
import functools
import math
import random
import threading
import time
from typing import NamedTuple

import torch
from torch.distributed import ReduceOp

from course_lib.checking import describe

COLLECTIVES = ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor", "barrier")
PATIENCE = 30.0  # seconds that one rank may compute without a word to the others


class Stuck(RuntimeError):
    "Every rank that has not returned waits for another; the message says who for whom."


class Misuse(RuntimeError):
    "Calls of several ranks that don't fit together, or a tensor touched while it was being sent."


class Raised(RuntimeError):
    "An exception in the function of one rank: `rank` is its number, `__cause__` the exception."

    def __init__(self, rank, error):
        super().__init__(f"rank {rank}: {describe(error)}")
        self.rank, self.__cause__ = rank, error


class _Over(BaseException):
    "Ends a rank's thread after another failed; no `except Exception` catches it."


class Event(NamedTuple):
    "One act of a rank: `what` is send, wait, a collective's name, or a mark of the caller's."

    rank: int
    what: str
    nbytes: int = 0
    peer: int | None = None


class Group:
    """`size` ranks in threads of this process, for counting and for checks.

    `run(fn, *args)` calls `fn(comm, *args)` in every rank and gives a list of what they return; `events` is
    then all that they sent, in order. Raises Stuck, Misuse, or Raised, whichever came first.
    """

    def __init__(self, size):
        self.size, self.events, self._lock = size, [], threading.Condition()

    def run(self, fn, *args):
        "Call `fn(comm, *args)` in every rank; the list of results by rank."
        self._turn, self._failure, self._last_call = None, None, time.monotonic()
        self._waiting = {}  # rank: (ready, what it waits for)
        self._running = set(range(self.size))
        self._messages = {}  # (source, destination): messages that nobody has received
        self._collectives = {}  # number: {rank: (call, tensor)}
        results = [None] * self.size
        for rank in range(self.size):
            threading.Thread(target=self._run_rank, args=(rank, fn, args, results), daemon=True).start()
        with self._lock:
            self._pass_turn()
            while self._running and not self._failure:
                self._lock.wait(0.2)
                if time.monotonic() - self._last_call > PATIENCE:
                    self._failure = Stuck(f"rank {self._turn} computes for {PATIENCE:.0f} s and says nothing")
            self._lock.notify_all()
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
        return [(e.what, e.nbytes) for e in self.events_of(rank) if e.what in COLLECTIVES]

    def _run_rank(self, rank, fn, args, results):
        comm, failure = Comm(self, rank), None
        try:
            with self._lock:
                self._await_turn(rank)
            results[rank] = fn(comm, *args)
            for work in comm._pending:
                raise Misuse(f"rank {rank} returned without waiting for {work.what}: call wait() on it")
        except BaseException as e:
            failure = e if isinstance(e, Stuck | Misuse | _Over) else Raised(rank, e)
        with self._lock:
            self._failure = self._failure or failure
            self._running.discard(rank)
            self._pass_turn()

    def _await_turn(self, rank):
        self._lock.wait_for(lambda: self._failure or self._turn == rank)
        if self._failure:
            raise _Over
        self._last_call = time.monotonic()

    def _pass_turn(self):
        "Give the turn to a rank that can go on, any of them: a right program gives the same whichever."
        able = [r for r in self._running if r not in self._waiting or self._waiting[r][0]()]
        if able:
            self._turn = random.choice(able)
        elif self._running:
            left, done = sorted(self._running), sorted(set(range(self.size)) - self._running)
            who = "; ".join(f"rank {r} waits {self._waiting[r][1]}" for r in left[:3])
            who += f"; and so do {len(left) - 3} more" if len(left) > 3 else ""
            tail = f"; rank{'s' * (len(done) > 1)} {', '.join(map(str, done))} returned" if done else ""
            self._failure = self._failure or Stuck(f"nobody can go on: {who}{tail}")
        self._lock.notify_all()

    def block(self, rank, ready, what):
        "Let the others run until `ready()`."
        with self._lock:
            if not ready():
                self._waiting[rank] = (ready, what)
                self._pass_turn()
                self._await_turn(rank)
                del self._waiting[rank]


class Work:
    "A send or a collective under way. `wait()` returns when it is done; until then leave its tensor alone."

    def __init__(self, comm, what, doing, ready, tensor, before, finish=None):
        self.comm, self.what, self.doing, self.ready = comm, what, doing, ready
        self.tensor, self.before, self.finish = tensor, before, finish  # `before`: what it must still hold
        comm._pending.append(self)

    def wait(self):
        if self in self.comm._pending:
            self.comm.mark("wait")
            self.comm._group.block(self.comm.rank, self.ready, f"for {self.what}")
            self.comm._pending.remove(self)
            with self.comm.inside():
                now, then = self.tensor, self.before
                if then is not None and not torch.allclose(now, then, rtol=0, atol=0, equal_nan=True):
                    who = f"rank {self.comm.rank} changed a tensor while {self.doing}"
                    raise Misuse(f"{who}: call wait() before you write to it")
                if self.finish:
                    self.finish()


class Comm:
    """What one rank sees of its group: `rank`, `size`, and the calls of torch.distributed under their names.

    Every rank must call the same collectives in the same order; with `async_op` they return a `Work`. A
    function of `dist` takes this or the module `torch.distributed`.
    """

    ReduceOp = ReduceOp

    def __init__(self, group, rank):
        self._group, self.rank, self.size = group, rank, group.size
        self._pending, self._called = [], 0  # what nobody has waited for; collectives called
        self.busy = False  # in the communicator's own code, whose memory is not the caller's

    @contextlib.contextmanager
    def inside(self):
        self.busy = True
        yield
        self.busy = False

    def get_rank(self):
        return self.rank

    def get_world_size(self):
        return self.size

    def mark(self, what, nbytes=0, peer=None):
        "Write an event into the group's list."
        self._group.events.append(Event(self.rank, what, nbytes, peer))

    def isend(self, tensor, dst):
        "Begin to send `tensor` to rank `dst`; the wait() of what it returns ends when it has been received."
        data, messages = _plain(tensor, "isend"), self._messages(self.rank, dst, dst, "send")
        with self.inside():
            sent = data.clone()
        if data.numel():
            self.mark("send", data.nbytes, dst)
            messages.append(sent)
        what, doing = f"its send to rank {dst}", f"it was being sent to rank {dst}"
        return Work(self, what, doing, lambda: all(m is not sent for m in messages), data, sent)

    def send(self, tensor, dst):
        "Send `tensor` to rank `dst` and wait until it has been received."
        self.isend(tensor, dst).wait()

    def recv(self, tensor, src):
        "Wait for the next message of rank `src` and write it into `tensor`."
        data, messages = _plain(tensor, "recv"), self._messages(src, self.rank, src, "receive from")
        if data.numel():
            self._group.block(self.rank, lambda: messages, f"to receive from rank {src}")
            sent = messages.pop(0)
            if (sent.numel(), sent.dtype) != (data.numel(), data.dtype):
                here = f"rank {self.rank}, which receives them into {_size(data)}"
                raise Misuse(f"rank {src} sends {_size(sent)} to {here}: the two must agree")
            with self.inside():
                data.copy_(sent.view(data.shape))

    def _messages(self, src, dst, peer, what):
        if not isinstance(peer, int) or not 0 <= peer < self.size or peer == self.rank:
            last = self.size - 1
            raise Misuse(f"rank {self.rank} can't {what} {peer!r}: expected another rank of 0 to {last}")
        return self._group._messages.setdefault((src, dst), [])

    def all_reduce(self, tensor, op=ReduceOp.SUM, async_op=False):
        "Add up `tensor` over the ranks, in place; or its mean or its largest (ReduceOp.AVG, MAX)."
        name = str(op).rpartition(".")[2]
        how = {"SUM": _add, "AVG": lambda parts: _add(parts) / self.size, "MAX": _largest}.get(name)
        if how is None:
            raise Misuse(f"all_reduce of this group knows SUM, AVG and MAX, and was given {name}")
        detail = "" if name == "SUM" else f" by {name}"
        return self._collective("all_reduce", tensor, tensor, how, detail, async_op=async_op)

    def broadcast(self, tensor, src):
        "Overwrite `tensor` by that of rank `src`."
        self._collective("broadcast", tensor, tensor, lambda parts: parts[src], f" from rank {src}")

    def all_gather_into_tensor(self, output_tensor, input_tensor, async_op=False):
        "Write the ranks' tensors one after the other into `output_tensor`, `size` times as long."
        name = "all_gather_into_tensor"
        self._check_length(output_tensor, input_tensor, f"{name} writes into")
        return self._collective(name, input_tensor, output_tensor, torch.cat, async_op=async_op)

    def reduce_scatter_tensor(self, output, input, async_op=False):
        "Add up `input` over the ranks and write this rank's part of it into `output`."
        name = "reduce_scatter_tensor"
        self._check_length(input, output, f"{name} takes a tensor of")

        def mine(parts):
            return _add([p.tensor_split(self.size)[self.rank] for p in parts])

        return self._collective(name, input, output, mine, async_op=async_op)

    def barrier(self):
        "Wait until every rank has come here."
        self._collective("barrier", torch.empty(0), torch.empty(0), torch.cat)

    def _check_length(self, long, short, what):
        n = self.size * short.numel()
        if long.numel() != n:
            each = f"{self.size} ranks with {short.numel()} each make {n}: pad the last part"
            raise Misuse(f"rank {self.rank}: {what} {long.numel()} elements, and {each}")

    def _collective(self, name, given, out, combine, detail="", async_op=False):
        data, out = _plain(given, name), _plain(out, name)
        self._called += 1
        parts = self._group._collectives.setdefault(self._called, {})
        call, which = f"{name} of {_size(data)}{detail}", f"number {self._called}"
        with self.inside():
            parts[self.rank] = (call, data.flatten().clone())
        for other in (r for r in sorted(parts) if parts[r][0] != call):
            two = " and ".join(f"rank {r} calls {parts[r][0]}" for r in sorted((other, self.rank)))
            two += "; every rank must make the same calls in the same order"
            raise Misuse(f"collective {which}: {two}")
        self.mark(name, data.nbytes)

        def finish():
            out.copy_(combine([parts[r][1] for r in range(self.size)]).view(out.shape))

        before = None
        if async_op:  # until wait() the tensor holds nonsense: to read it gives a wrong answer
            with self.inside():
                before = _nonsense(out).clone()
        what, doing = f"{call}, collective {which}", f"{name} {which} was under way"
        work = Work(self, what, doing, lambda: len(parts) == self.size, out, before, finish)
        return work if async_op else work.wait()


def _add(parts):
    return functools.reduce(torch.add, parts)


def _largest(parts):
    return functools.reduce(torch.maximum, parts)


def _nonsense(out):
    "Fill `out` with values that are wrong to read: NaN, and numbers where what is added to them can be seen."
    out.fill_(math.nan if out.is_floating_point() else 103)
    if out.is_floating_point():
        odd = torch.arange(out.numel()).view(out.shape) % 2 == 1
        out.masked_fill_(odd | (out.numel() == 1), 1.0 + random.random())
    return out


def _plain(tensor, call):
    if not isinstance(tensor, torch.Tensor):
        raise Misuse(f"{call} takes a tensor and was given {type(tensor).__name__}")
    return tensor.detach()


def _size(t):
    return f"{t.numel()} x {str(t.dtype).removeprefix('torch.')}"

"What one rank of a simulated group sees: messages and collectives, each counted and held to its rules."

import contextlib
from typing import NamedTuple

import torch

COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "reduce_scatter")


class Misuse(RuntimeError):
    "Calls of several ranks that don't fit together, or a tensor touched while it was being sent."


class Event(NamedTuple):
    "One act of a rank: `what` is send, wait, a collective's name, or a mark of its own."

    rank: int
    what: str
    nbytes: int = 0
    peer: int | None = None


class _Handle:
    "Something under way. `wait()` returns when it is done; until then its tensor is not to be touched."

    def __init__(self, comm, what, ready, finish):
        self._comm, self.what, self._ready, self._finish = comm, what, ready, finish
        self.done = False
        comm._group._flying[comm.rank].append(self)

    def wait(self):
        if not self.done:
            self._comm.mark("wait")
            self._comm._group.block(self._comm.rank, self._ready, f"for {self.what}")
            self.done = True
            self._comm._group._flying[self._comm.rank].remove(self)
            with self._comm.inside():
                self._finish()


class Comm:
    """What one rank sees of its group: `rank`, `size`, and the calls of torch.distributed in short.

    Collectives sum. Every rank must call the same ones in the same order.
    """

    def __init__(self, group, rank):
        self._group, self.rank, self.size = group, rank, group.size
        self.busy = False  # in the communicator's own code, whose memory is not the caller's

    @contextlib.contextmanager
    def inside(self):
        was, self.busy = self.busy, True
        try:
            yield
        finally:
            self.busy = was

    def mark(self, what, nbytes=0, peer=None):
        "Write an event into the group's list."
        self._group.events.append(Event(self.rank, what, nbytes, peer))

    # --- point to point ---------------------------------------------------------------------------------

    def isend(self, tensor, to):
        "Begin to send `tensor` to rank `to`; the handle's wait() returns when it has been received."
        self._peer(to, "send")
        data = _plain(tensor, "isend")
        with self.inside():
            letter = {"data": data.clone(), "taken": False}
        if data.numel():
            self.mark("send", data.numel() * data.element_size(), to)
            self._group._letters.setdefault((self.rank, to), []).append(letter)

        def finish():
            if not _same(data, letter["data"]):
                raise Misuse(
                    f"rank {self.rank} changed a tensor while it was being sent to rank {to}: "
                    "call wait() before you write to it"
                )

        return _Handle(self, f"its send to rank {to}", lambda: letter["taken"] or not data.numel(), finish)

    def send(self, tensor, to):
        "Send `tensor` to rank `to` and wait until it has been received."
        self.isend(tensor, to).wait()

    def recv(self, tensor, source):
        "Wait for the next message of rank `source` and write it into `tensor`."
        self._peer(source, "receive from")
        data = _plain(tensor, "recv")
        if not data.numel():
            return
        box = self._group._letters.setdefault((source, self.rank), [])
        self._group.block(self.rank, lambda: box, f"to receive from rank {source}")
        letter = box.pop(0)
        sent = letter["data"]
        if (sent.numel(), sent.dtype) != (data.numel(), data.dtype):
            raise Misuse(
                f"rank {source} sends {_size(sent)} to rank {self.rank}, which receives them into "
                f"{_size(data)}: the two must agree"
            )
        with self.inside():
            data.copy_(sent.view(data.shape))
        letter["taken"] = True

    def _peer(self, other, what):
        if not isinstance(other, int) or not 0 <= other < self.size or other == self.rank:
            raise Misuse(
                f"rank {self.rank} can't {what} {other!r}: expected another rank of 0 to {self.size - 1}"
            )

    # --- collectives ------------------------------------------------------------------------------------

    def all_reduce(self, tensor, async_op=False):
        "Sum `tensor` over the ranks, in place. With `async_op` returns a handle at once."
        data = _plain(tensor, "all_reduce")

        def result(parts):
            total = parts[0].clone()
            for r in range(1, self.size):
                total += parts[r]
            return total

        return self._meet("all_reduce", data, data, result, async_op)

    def broadcast(self, tensor, source):
        "Overwrite `tensor` by that of rank `source`."
        data = _plain(tensor, "broadcast")
        return self._meet("broadcast", data, data, lambda parts: parts[source], False, f" from rank {source}")

    def all_gather(self, out, tensor, async_op=False):
        "Write the ranks' tensors one after the other into the flat `out`, `size` times as long."
        data, out = _plain(tensor, "all_gather"), _plain(out, "all_gather")
        self._fits(out, data, "all_gather writes into out")
        return self._meet(
            "all_gather",
            data,
            out,
            lambda parts: torch.cat([parts[r].flatten() for r in range(self.size)]),
            async_op,
        )

    def reduce_scatter(self, out, tensor, async_op=False):
        "Sum the flat `tensor` over the ranks and write this rank's part of it into `out`."
        data, out = _plain(tensor, "reduce_scatter"), _plain(out, "reduce_scatter")
        self._fits(data, out, "reduce_scatter takes a tensor of")

        def result(parts):
            n = out.numel()
            mine = [parts[r].flatten()[self.rank * n : (self.rank + 1) * n] for r in range(self.size)]
            total = mine[0].clone()
            for part in mine[1:]:
                total += part
            return total

        return self._meet("reduce_scatter", data, out, result, async_op)

    def _fits(self, long, short, what):
        if long.numel() != self.size * short.numel():
            raise Misuse(
                f"rank {self.rank}: {what} {long.numel()} elements, and {self.size} ranks with "
                f"{short.numel()} each make {self.size * short.numel()}: pad the last part"
            )

    def _meet(self, name, data, out, result, async_op, extra=""):
        group, number = self._group, self._group._count[self.rank]
        group._count[self.rank] += 1
        if number == len(group._meetings):
            group._meetings.append({})
        parts = group._meetings[number]
        call = f"{name} of {_size(data)}{extra}"
        for other, (theirs, _) in sorted(parts.items()):
            if theirs != call:
                one, two = sorted([(other, theirs), (self.rank, call)])
                raise Misuse(
                    f"collective number {number + 1}: rank {one[0]} calls {one[1]} and rank {two[0]} calls "
                    f"{two[1]}; every rank must make the same calls in the same order"
                )
        self.mark(name, data.numel() * data.element_size())
        bait = None
        with self.inside():
            parts[self.rank] = (call, data.clone())
            if async_op:  # what it holds meanwhile is nobody's business, so it holds nonsense
                bait = out.fill_(float("nan") if out.is_floating_point() else 2**30 + 7).clone()

        def finish():
            if bait is not None and not _same(out, bait):
                raise Misuse(
                    f"rank {self.rank} wrote to a tensor while {name} number {number + 1} was under way: "
                    "call wait() first"
                )
            out.copy_(result({r: d for r, (_, d) in parts.items()}).view(out.shape))

        handle = _Handle(self, f"{call}, collective number {number + 1}",
                         lambda: len(parts) == self.size, finish)  # fmt: skip
        if async_op:
            return handle
        handle.wait()
        return None


def _plain(tensor, call):
    if not isinstance(tensor, torch.Tensor):
        raise Misuse(f"{call} takes a tensor and was given {type(tensor).__name__}")
    return tensor.detach()


def _size(t):
    return f"{t.numel()} x {str(t.dtype).removeprefix('torch.')}"


def _same(a, b):
    return bool(((a == b) | ((a != a) & (b != b))).all())

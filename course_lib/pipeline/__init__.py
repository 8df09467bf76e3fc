"What lesson pipeline keeps outside its cells: messages of a plan, spans of time, a model in equal stages."

import collections
import contextlib
import functools
import time

import torch
import torch.distributed as dist


def cut(layers, stages):
    "`layers` as `stages` lists of equal length, in order. Raises ValueError where that can't be."
    each, rest = divmod(len(layers), stages)
    if rest or not each:
        raise ValueError(f"{len(layers)} layers can't be cut into {stages} stages of equal length")
    return [layers[i : i + each] for i in range(0, len(layers), each)]


def homes(plan):
    "{stage: rank} of a plan. Raises ValueError for a stage on two ranks, an operation that is there twice."
    home, seen = {}, set()
    for rank, row in enumerate(plan):
        for op in row:
            if op in seen:
                raise ValueError(f"this plan has the operation {op} twice")
            if home.setdefault(op[2], rank) != rank:
                raise ValueError(f"this plan has stage {op[2]} on ranks {home[op[2]]} and {rank}")
            seen.add(op)
    return home


class Mail:
    """Activations and gradients of a plan, between this rank and the others: tensors of one shape.

    `send(kind, microbatch, stage, tensor)` begins to send to the rank of `stage`, `receive(kind, microbatch,
    stage)` waits for it. Each pair of ranks has a group for each direction, and the order of messages in it
    is the plan's. So a send never waits behind a receive, and no tags are needed, which NCCL doesn't have.
    """

    def __init__(self, plan, shape, dtype=torch.float32, device="cpu"):
        self.home, self.me = homes(plan), dist.get_rank()
        self.new = functools.partial(torch.empty, shape, dtype=dtype, device=device)
        routes = collections.defaultdict(list)
        for source, row in enumerate(plan):
            for kind, microbatch, stage in row:
                to = {"F": stage + 1, "W": None}.get(kind, stage - 1)
                if self.home.get(to, source) != source:
                    key = ("F" if kind == "F" else "B", microbatch, to)
                    routes[source, self.home[to]].append(key)
        self.groups = {pair: _one_way(pair) for pair in sorted(routes)}  # every rank makes all
        self.due = {s: collections.deque(keys) for (s, d), keys in routes.items() if d == self.me}
        self.kept, self.sending = {}, []

    def send(self, kind, microbatch, stage, tensor):
        to = self.home[stage]
        if to == self.me:
            self.kept[kind, microbatch, stage] = tensor
        else:
            self.sending.append((_p2p(dist.isend, tensor, to, self.groups[self.me, to]), tensor))

    def receive(self, kind, microbatch, stage):
        source = self.home[stage - 1 if kind == "F" else stage + 1]
        while (kind, microbatch, stage) not in self.kept:  # what was sent before it is kept for later
            tensor = self.new()
            _p2p(dist.irecv, tensor, source, self.groups[source, self.me]).wait()
            self.kept[self.due[source].popleft()] = tensor
        return self.kept.pop((kind, microbatch, stage))

    def finish(self):
        "Wait until everything is sent."
        for work, _ in self.sending:
            work.wait()
        self.sending.clear()


def _p2p(call, tensor, peer, group):
    return dist.batch_isend_irecv([dist.P2POp(call, tensor, peer, group)])[0]


@functools.cache
def _one_way(pair):
    "The group of one direction between two ranks; the first message is sent here, where all ranks are."
    group, rank = dist.new_group(pair), dist.get_rank()
    if rank in pair:
        first = torch.zeros(1, device="cuda" if dist.get_backend() == "nccl" else "cpu")
        call, peer = (dist.isend, pair[1]) if rank == pair[0] else (dist.irecv, pair[0])
        _p2p(call, first, peer, group).wait()
    return group


def message_seconds(shape, dtype=torch.bfloat16, times=10):
    "Seconds of a message from rank 0 to rank 1, alone, on GPUs; every rank calls it."
    group, rank = _one_way((0, 1)), dist.get_rank()
    tensor, spans = torch.empty(shape, dtype=dtype, device="cuda"), Spans(gpu=True)
    spans.start()
    with spans("messages"):
        for _ in range(times if rank < 2 else 0):
            _p2p(dist.isend if rank == 0 else dist.irecv, tensor, 1 - rank, group).wait()
    ((_, start, end),) = spans.read()
    return (end - start) / times


class Spans:
    "When this rank did what: `with spans(op): ...`, then `read()` gives [(op, start, end), ...] in seconds."

    def __init__(self, gpu=False):
        self.gpu, self.marks = gpu, []

    def start(self):
        "All ranks begin to count here."
        if self.gpu:
            torch.cuda.synchronize()
        dist.barrier()
        self.marks, self.zero = [], self._now()

    def _now(self):
        if not self.gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextlib.contextmanager
    def __call__(self, op):
        begin = self._now()
        yield
        self.marks.append((op, begin, self._now()))

    def read(self):
        if not self.gpu:
            return [(op, a - self.zero, b - self.zero) for op, a, b in self.marks]
        torch.cuda.synchronize()
        since = self.zero.elapsed_time
        return [(op, since(a) * 1e-3, since(b) * 1e-3) for op, a, b in self.marks]

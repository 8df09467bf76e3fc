"""A simulated GPU queue: Python puts kernels in, the GPU takes them out, and a virtual clock says when.

Times are microseconds. Nothing runs and nothing really waits, so the same program gives the same times on
every machine.
"""

from typing import NamedTuple

HOST, GPU = "Python", "GPU"


class Span(NamedTuple):
    'A stretch of time on a lane, "Python" or "GPU"; `kind` is "launch", "wait", "python" or "kernel".'

    lane: str
    kind: str
    name: str
    start: float
    duration: float


class Queue:
    """One host thread and one stream of a GPU.

    `enqueue` is what it costs Python to put one kernel into the queue, `round_trip` how long Python needs to
    go on once what it waited for has come. `now` is the host's clock, `free` when the queue runs empty.
    """

    def __init__(self, enqueue=10.0, round_trip=10.0):
        self.enqueue, self.round_trip = enqueue, round_trip
        self.now = self.free = 0.0
        self.spans = []

    def launch(self, kernel, name="kernel"):
        "Put a kernel of that many µs into the queue; it starts when those before it are done."
        self.spans.append(Span(HOST, "launch", name, self.now, self.enqueue))
        self.now += self.enqueue
        start = max(self.now, self.free)
        self.spans.append(Span(GPU, "kernel", name, start, kernel))
        self.free = start + kernel

    def record(self):
        "An event: the moment at which all that is queued so far will be done."
        return self.free

    def query(self, event):
        "Has this event come? Python doesn't wait for the answer."
        return self.now >= event

    def wait(self, event, name="cudaEventSynchronize"):
        "Wait for an event."
        end = max(self.now, event) + self.round_trip
        self.spans.append(Span(HOST, "wait", name, self.now, end - self.now))
        self.now = end

    def synchronize(self, name="aten::item"):
        "Wait until the queue is empty."
        self.wait(self.free, name)

    def python(self, microseconds, name="python"):
        "Time in which Python does something else."
        self.spans.append(Span(HOST, "python", name, self.now, microseconds))
        self.now += microseconds

    @property
    def total(self):
        "When both are done."
        return max(self.now, self.free)

    def idle(self):
        "µs in which the GPU had nothing to do, from its first kernel to its last."
        kernels = [s for s in self.spans if s.lane == GPU]
        if not kernels:
            return 0.0
        return kernels[-1].start + kernels[-1].duration - kernels[0].start - sum(s.duration for s in kernels)


def run(steps=24, enqueue=8.0, kernel=12.0, sync_every=0, round_trip=10.0, name="print(loss)"):
    "A loop of `steps` kernels in which Python waits after every `sync_every` of them (0: never): a `Queue`."
    queue = Queue(enqueue, round_trip)
    for i in range(1, steps + 1):
        queue.launch(kernel, f"step {i}")
        if sync_every and i % sync_every == 0:
            queue.synchronize(name)
    return queue


def explore(enqueue=8, kernel=12, sync_every=4):
    """The explorer's data: 24 kernels, with and without waiting.

    `queued` is when Python has asked for everything, `total` when the GPU is done too, `clean` the total of
    the same loop without a sync; `busy` is the share of the total in which the GPU works.
    """
    queue = run(enqueue=enqueue, kernel=kernel, sync_every=sync_every)
    kernels = [s for s in queue.spans if s.lane == GPU]
    return {
        "enqueue": enqueue,
        "kernel": kernel,
        "sync_every": sync_every,
        "spans": queue.spans,
        "queued": queue.now,
        "total": queue.total,
        "clean": run(enqueue=enqueue, kernel=kernel).total,
        "busy": sum(s.duration for s in kernels) / queue.total,
    }

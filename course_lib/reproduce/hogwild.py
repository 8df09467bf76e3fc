"""Stochastic gradient descent by several processes on one shared weight tensor, with locks and without.

The problem is sparse: each image of a digit switches on 49 of 3,969 features, so that two workers
seldom want the same weights at the same moment. Source: F. Niu, B. Recht, C. Ré, S. Wright, "Hogwild!
A Lock-Free Approach to Parallelizing Stochastic Gradient Descent", NeurIPS 2011.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from multiprocessing import connection
from typing import NamedTuple

import torch
from torch.nn import functional as F

from course_lib import data

LEVELS = 3  # a pixel is dark, grey or light
FEATURES = 49 * LEVELS**4
CLASSES = 10
MODES = ("alone", "locked", "lock-free")


class WorkerError(RuntimeError):
    "A worker died, failed or took too long: one sentence, and no worker is left running."

    def _render_traceback_(self):
        return [str(self)]


class Trained(NamedTuple):
    "One run: mode, seed, seconds of the slowest worker, weights, training loss, validation accuracy."

    mode: str
    seed: int
    seconds: float
    weights: torch.Tensor
    loss: float
    accuracy: float


def patches(x):
    """The active features of images [N, 1, 8, 8] in 0..1: int64 [N, 49], each a patch's place and content.

    Pixels are cut to three levels; each of the 49 patches of 2x2 pixels then is one of 81 features.
    """
    levels = (x * LEVELS).long().clamp(max=LEVELS - 1)[:, 0]
    windows = levels.unfold(1, 2, 1).unfold(2, 2, 1).reshape(len(x), 49, 4)
    code = (windows * LEVELS ** torch.arange(4)).sum(-1)
    return code + torch.arange(49) * LEVELS**4


class Samples:
    "What a worker reads: `samples[i]` is (features, label), tensors [49] and an int."

    def __init__(self, features, labels):
        self.features, self.labels = features, labels.tolist()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.features[i], self.labels[i]


def worker(weights, samples, rank, workers, seed, lr, lock=None):
    """One pass over this worker's shard, updating the shared `weights` [features, classes] in place.

    The shard is every `workers`-th sample from `rank` on, in an order drawn from a generator of its own.
    A step reads and writes only the rows of its sample's features. With a `lock`, one step at a time.
    """
    generator = torch.Generator().manual_seed(seed * workers + rank)
    shard = range(rank, len(samples), workers)
    for i in torch.randperm(len(shard), generator=generator).tolist():
        features, label = samples[shard[i]]
        with lock or contextlib.nullcontext():
            gradient = weights[features].sum(0).softmax(0)
            gradient[label] -= 1
            # Nothing stops another worker from writing between this read and this write.
            weights.index_add_(0, features, gradient.expand(len(features), -1), alpha=-lr)


def count(shared, times, lock=None):
    "Add 1 to `shared[0]`, `times` times: read, add, write."
    for _ in range(times):
        with lock or contextlib.nullcontext():
            shared[0] = shared[0] + 1


class Workers:
    """Processes that share one weight tensor: `with Workers(2) as workers: workers.train("lock-free")`.

    They are started once (importing torch takes them seconds) and given one run after the other. Leaving
    the block, an error, an interrupt or the end of this process ends them. `timeout` is in seconds, for
    starting and for each run.
    """

    def __init__(self, n=2, timeout=90):
        if not 1 <= n <= 64:
            raise ValueError(f"Workers was given n={n}; expected 1 to 64 processes")
        digits = data.digits()
        self.n, self.timeout = n, timeout
        self.features, self.labels = patches(digits.train[0]).share_memory_(), digits.train[1].share_memory_()
        self.valid = patches(digits.valid[0]), digits.valid[1]
        self.weights = torch.zeros(FEATURES, CLASSES).share_memory_()
        self.counter = torch.zeros(1).share_memory_()
        self.processes, self.pipes = [], []

    def start(self):
        "Start the processes and wait until they are ready; returns self. Call `stop`, or use `with`."
        # Spawned, not forked: a forked child of a process with threads or CUDA can hang. A spawned one
        # imports its function by name, so that it can't be a function of a notebook.
        context = torch.multiprocessing.get_context("spawn")
        lock, barrier = context.Lock(), context.Barrier(self.n)
        try:
            for rank in range(self.n):
                mine, theirs = context.Pipe()
                shared = (self.weights, self.features, self.labels, self.counter)
                process = context.Process(
                    target=_serve, args=(rank, self.n, theirs, lock, barrier, shared), daemon=True
                )
                process.start()
                theirs.close()
                self.processes.append(process)
                self.pipes.append(mine)
            self._collect(range(self.n), "start")
        except BaseException:
            self.stop(now=True)
            raise
        return self

    def __enter__(self):
        return self.start()

    def __exit__(self, *_):
        self.stop()

    def stop(self, now=False):
        "End every worker; returns when none is running. `now`: in the middle of what it does."
        for pipe in self.pipes:
            pipe.close()  # an idle worker reads the end of its pipe and returns
        for process in self.processes:
            if not now:
                process.join(2)
            if process.is_alive():
                process.kill()
            process.join()
        self.processes, self.pipes = [], []

    def train(self, mode, seed=0, epochs=3, lr=0.02):
        "Train from zero weights; returns a `Trained`. `mode`: 'alone' (one worker), 'locked' or 'lock-free'."
        if mode not in MODES:
            raise ValueError(f"mode is {mode!r}; expected one of {', '.join(map(repr, MODES))}")
        self.weights.zero_()
        ranks = range(1) if mode == "alone" else range(self.n)
        seconds = self._run(ranks, "train", len(ranks), mode == "locked", seed, epochs, lr)
        weights = self.weights.clone()
        return Trained(mode, seed, seconds, weights, self.loss(weights), self.accuracy(weights))

    def count(self, times, locked=False):
        "Every worker adds 1 to one shared number, `times` times; returns what the number is at the end."
        self.counter.zero_()
        self._run(range(self.n), "count", self.n, locked, times)
        return int(self.counter.item())

    def loss(self, weights):
        "Mean cross-entropy over the training images."
        return F.cross_entropy(_logits(weights, self.features), self.labels).item()

    def accuracy(self, weights):
        "Accuracy on the validation images, 0 to 1."
        features, labels = self.valid
        return (_logits(weights, features).argmax(1) == labels).float().mean().item()

    def _run(self, ranks, *job):
        if not self.processes:
            raise WorkerError("the workers are not running: call this inside `with Workers(2) as workers:`")
        try:
            for rank in ranks:
                with contextlib.suppress(OSError):  # a dead worker's pipe; _collect says who died
                    self.pipes[rank].send(job)
            return max(self._collect(ranks, job[0]))
        except BaseException:
            self.stop(now=True)
            raise

    def _collect(self, ranks, what):
        "One answer from each rank, or WorkerError."
        end = time.monotonic() + self.timeout
        answers = {}
        while len(answers) < len(ranks):
            waiting = [r for r in ranks if r not in answers]
            # Every worker's end is watched, the idle ones' too: one that died with the lock blocks the rest.
            sentinels = {p.sentinel: r for r, p in enumerate(self.processes)}
            ready = connection.wait(
                [self.pipes[r] for r in waiting] + list(sentinels), max(0.0, end - time.monotonic())
            )
            if not ready:
                names = " and ".join(f"worker {r}" for r in waiting)
                raise WorkerError(
                    f"{names} did not end within {self.timeout} s ({what}); all workers were stopped"
                )
            for rank in [r for r in waiting if self.pipes[r] in ready]:
                with contextlib.suppress(EOFError, OSError):
                    ok, answer = self.pipes[rank].recv()
                    if not ok:
                        raise WorkerError(f"worker {rank} raised {answer} ({what}); all workers were stopped")
                    answers[rank] = answer
            dead = [sentinels[s] for s in ready if s in sentinels and sentinels[s] not in answers]
            if dead:
                raise WorkerError(
                    f"worker {dead[0]} {self._death(dead[0])} ({what}); all workers were stopped"
                )
        return list(answers.values())

    def _death(self, rank):
        self.processes[rank].join()
        code = self.processes[rank].exitcode
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with status {code}"


def _logits(weights, features):
    return weights[features].sum(1)


def _serve(rank, n, pipe, lock, barrier, shared):
    "A worker process: do one job after the other until the pipe closes."
    # Jupyter's interrupt reaches every process of the group; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    weights, features, labels, counter = shared
    samples = Samples(features, labels)
    pipe.send((True, 0.0))
    with contextlib.suppress(EOFError, OSError):
        while True:
            kind, workers, locked, *rest = pipe.recv()
            try:
                if workers == n:
                    barrier.wait()
                start = time.perf_counter()
                if kind == "count":
                    count(counter, *rest, lock=lock if locked else None)
                else:
                    seed, epochs, lr = rest
                    for epoch in range(epochs):
                        worker(
                            weights,
                            samples,
                            rank,
                            workers,
                            seed * epochs + epoch,
                            lr,
                            lock if locked else None,
                        )
                pipe.send((True, time.perf_counter() - start))
            except Exception as e:
                pipe.send((False, f"{type(e).__name__}: {e}"))


def _end_with_parent():
    "A worker may be waiting for a lock or a barrier when its parent is killed; it must not outlive it."
    multiprocessing.parent_process().join()
    os._exit(1)

"""What lesson data_parallel runs on its ranks: training that drifts and training that doesn't, and times.

These functions are called on every rank (`group.run(loops.drift, …)`); each asks `comm.world()` which rank it
is. They work alone too, as a group of one.
"""

import threading
import time
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from course_lib import data, machine, models
from course_lib.data_parallel import BucketedDataParallel, DataParallel
from course_lib.data_parallel import comm as comms

WIDTHS = (64, 32, 10)


def digits():
    "The training digits as rows: x [1397, 64] in 0..1, y [1397]."
    x, y = data.digits().train
    return x.flatten(1), y


def net(seed=0, widths=WIDTHS):
    "A small network, the same wherever the seed is."
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return models.mlp(widths)


def flat(tensors):
    "Tensors as one row."
    return torch.cat([t.detach().flatten() for t in tensors])


def batches(steps, batch, seed=0):
    "`steps` lists of `batch` indices into the digits, the same on every rank."
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1397, (batch,), generator=generator) for _ in range(steps)]


def share(rows, comm):
    "The equal part of a batch that belongs to this rank; ValueError where it doesn't divide."
    if left := len(rows) % comm.size:
        fewer = len(rows) - left
        raise ValueError(
            f"{len(rows)} can't be split evenly over {comm.size} ranks: {left} would be left over; "
            f"take {f'{fewer} or ' if fewer else ''}{fewer + comm.size}"
        )
    return rows.chunk(comm.size)[comm.rank]


def drift(average, steps=40, batch=64, lr=0.2):
    """Train from the same weights, each rank on its share; the weights after every step, [steps, parameters].

    With `average` the gradients are averaged by `DataParallel`, without it nothing is said to the others.
    """
    comm, model = comms.world(), net()
    x, y = digits()
    wrapped = DataParallel(model, comm) if average else None
    kept = []
    for rows in batches(steps, batch):
        mine = share(rows, comm)
        F.cross_entropy(model(x[mine]), y[mine]).backward()
        if wrapped:
            wrapped.finish()
        step(model, lr)
        kept.append(flat(model.parameters()))
    return torch.stack(kept)


def step(model, lr):
    "A plain step down the gradient, which is then gone."
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p -= lr * p.grad
                p.grad = None


def spread(by_rank):
    "The largest distance of a rank's weights from their mean, by step; `by_rank` is a list of [steps, n]."
    stacked = torch.stack(list(by_rank))
    return (stacked - stacked.mean(0)).norm(dim=-1).amax(0).tolist()


# --- overlap, on the clock ----------------------------------------------------------


class Event(NamedTuple):
    "From `start` to `end`, in seconds of `time.monotonic()` (equal for a mark), in the row `lane`."

    name: str
    start: float
    end: float
    lane: str


class Watched(comms.World):
    "A `World` that keeps every all-reduce in `events`, from its launch to its end."

    def __init__(self):
        super().__init__()
        self.events = []

    def all_reduce(self, tensor, async_op=False):
        start, n = time.monotonic(), tensor.numel() * tensor.element_size()
        work = dist.all_reduce(tensor.detach(), async_op=True)
        ended = threading.Event()

        def over(future):
            self.events.append(Event(f"{n / 2**20:.1f} MB", start, time.monotonic(), "wire"))
            ended.set()

        work.get_future().then(over)
        return _Both(work, ended) if async_op else _Both(work, ended).wait()


class _Both:
    "Waits for the work and for its mark."

    def __init__(self, work, ended):
        self.work, self.ended = work, ended

    def wait(self):
        self.work.wait()
        self.ended.wait(10)


def overlap(limit, widths=(256, 1024, 1024, 1024, 1024, 10), batch=128, steps=6):
    """Steps of a larger network with buckets of `limit` bytes: the step of median length.

    Gives the seconds from the start of its backward to the last gradient averaged, and its `Event`s.
    """
    torch.set_num_threads(min(4, torch.get_num_threads()))  # more of them get in each other's way here
    torch.manual_seed(dist.get_rank())
    model, comm = net(0, widths), Watched()
    last = {"at": 0.0}

    def mark(what):
        now = time.monotonic()
        if what == "gradient":
            comm.events.append(Event("gradient", last["at"], now, "backward"))
            last["at"] = now
        elif what == "wait":
            comm.events.append(Event("waits from here", now, now, "backward"))

    wrapped = BucketedDataParallel(model, comm, limit, mark)
    spans = []
    for _ in range(steps):
        loss = model(torch.randn(batch, widths[0])).square().mean()
        dist.barrier()
        last["at"] = start = time.monotonic()
        loss.backward()
        wrapped.finish()
        spans.append((start, time.monotonic()))
        model.zero_grad()
    dist.barrier()  # the last all-reduces have told their ends
    spans = sorted(spans[1:], key=lambda span: span[1] - span[0])
    start, end = spans[len(spans) // 2]
    return end - start, sorted(e for e in comm.events if start <= e.start <= end)


# --- PyTorch's own ------------------------------------------------------------------


def official(kind, steps=3, batch=64, lr=0.05):
    """A few steps of Adam by PyTorch's own data parallelism, "ddp" or "fsdp", or by "one" process.

    Gives the losses (of the whole batch) and the weights at last.
    """
    comm = comms.world()
    model = net().to(machine.device() if kind != "one" and comm.size > 1 else "cpu")
    device = next(model.parameters()).device
    if kind == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        model = DistributedDataParallel(model)
    elif kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        mesh = dist.init_device_mesh(device.type, (comm.size,))
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    opt = torch.optim.Adam(model.parameters(), lr, foreach=False)
    x, y = (t.to(device) for t in digits())
    losses = []
    for rows in batches(steps, batch):
        mine = rows if kind == "one" else share(rows, comm)
        loss = F.cross_entropy(model(x[mine]), y[mine])
        loss.backward()
        opt.step()
        opt.zero_grad()
        mean = loss.detach().clone()
        if kind != "one":
            comm.all_reduce(mean)
            mean /= comm.size
        losses.append(mean.item())
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return losses, flat(weights).cpu()

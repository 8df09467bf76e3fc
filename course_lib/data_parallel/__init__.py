"""data_parallel, finished: ring all-reduce, gradients averaged by hooks and in buckets, and uneven batches.

Each takes a communicator `comm`: `data_parallel_group.Comm` in a simulated group, `data_parallel_comm.World`
on real ranks.
"""

import torch
from torch.nn import functional as F


def ring_all_reduce(x, comm):
    """Sum the one-dimensional `x` over the ranks of `comm`, in place, by messages to the next rank only.

    Every rank sends 2(N-1)/N of the bytes of `x`; where N doesn't divide its length, chunks differ by one.
    Source: Patarasuk and Yuan 2009.
    """
    n, rank = comm.size, comm.rank
    if n == 1:
        return
    after, before = (rank + 1) % n, (rank - 1) % n
    chunks = x.tensor_split(n)
    came = torch.empty_like(chunks[0])  # the first chunk is the longest
    for step in range(n - 1):  # the sums grow while they travel
        out, mine = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        sending = comm.isend(out, after)
        comm.recv(came[: len(mine)], before)
        mine += came[: len(mine)]
        sending.wait()
    for step in range(n - 1):  # the finished sums go round
        sending = comm.isend(chunks[(rank + 1 - step) % n], after)
        comm.recv(chunks[(rank - step) % n], before)
        sending.wait()


def send_state(model, comm):
    "Give every rank the parameters and buffers of rank 0."
    with torch.no_grad():
        for t in (*model.parameters(), *model.buffers()):
            comm.broadcast(t, 0)


class DataParallel:
    """Averages gradients over ranks while the backward pass runs, one all-reduce for each parameter.

    All ranks begin with the weights and buffers of rank 0. After `loss.backward()` call `finish()`: then
    every `grad` is the mean over the ranks. A rank that did not use a parameter counts with zeros. The
    all-reduces are launched in one fixed order, from the last parameter to the first, on every rank.
    """

    def __init__(self, model, comm):
        self.comm = comm
        send_state(model, comm)
        self.params = [p for p in model.parameters() if p.requires_grad][::-1]
        self.arrived, self.works = set(), []
        for p in self.params:
            p.register_post_accumulate_grad_hook(self.on_gradient)

    def on_gradient(self, p):
        self.arrived.add(p)
        while len(self.works) < len(self.params) and self.params[len(self.works)] in self.arrived:
            self.launch()

    def launch(self):
        p = self.params[len(self.works)]
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        self.works.append(self.comm.all_reduce(p.grad, async_op=True))

    def finish(self):
        while len(self.works) < len(self.params):
            self.launch()
        for p, work in zip(self.params, self.works, strict=True):
            work.wait()
            p.grad /= self.comm.size
        self.arrived, self.works = set(), []


def fill_buckets(nbytes, limit):
    """Indices of gradients by bucket: each joins the current bucket unless that would exceed `limit` bytes.

    >>> fill_buckets([4, 4, 9, 2], 8)
    [[0, 1], [2], [3]]
    """
    buckets, filled = [], 0
    for i, n in enumerate(nbytes):
        if not buckets or filled + n > limit:
            buckets.append([])
            filled = 0
        buckets[-1].append(i)
        filled += n
    return buckets


class BucketedDataParallel:
    """`DataParallel` with one all-reduce for each bucket of gradients of about `limit` bytes.

    A bucket is launched as soon as its last gradient has come and all buckets before it are launched; what
    a rank did not use is filled with zeros by `finish()`. `mark(what)`, where given, is called with
    "gradient", "launch", "wait" and "done". Source: Li et al. 2020 (PyTorch's DistributedDataParallel).
    """

    def __init__(self, model, comm, limit=2**20, mark=None):
        self.comm, self.mark = comm, mark or (lambda what: None)
        send_state(model, comm)
        params = [p for p in model.parameters() if p.requires_grad][::-1]
        plan = fill_buckets([p.numel() * p.element_size() for p in params], limit)
        self.buckets = [[params[i] for i in bucket] for bucket in plan]
        self.arrived, self.works = set(), []
        for p in params:
            p.register_post_accumulate_grad_hook(self.on_gradient)

    def on_gradient(self, p):
        self.mark("gradient")
        self.arrived.add(p)
        while len(self.works) < len(self.buckets) and self.arrived.issuperset(self.buckets[len(self.works)]):
            self.launch()

    def launch(self):
        bucket = self.buckets[len(self.works)]
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in bucket])
        self.mark("launch")
        self.works.append((flat, self.comm.all_reduce(flat, async_op=True)))

    def finish(self):
        while len(self.works) < len(self.buckets):
            self.launch()
        self.mark("wait")
        for bucket, (flat, work) in zip(self.buckets, self.works, strict=True):
            work.wait()
            self.mark("done")
            flat /= self.comm.size
            for p, mean in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                p.grad = mean.view_as(p).clone() if p.grad is None else p.grad.copy_(mean.view_as(p))
        self.arrived, self.works = set(), []


def accumulate(model, microbatches, comm):
    """Leave in every `grad` the gradient of the mean loss over all known tokens of all ranks.

    `microbatches` are this rank's pairs of inputs and labels, as many as it has, none included; a label of
    -100 is unknown. Gradients travel once, after the last microbatch. ValueError where no rank has a token.
    """
    tokens = torch.zeros(1, dtype=torch.int64)
    for x, y in microbatches:
        logits = model(x)
        F.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction="sum", ignore_index=-100).backward()
        tokens += (y != -100).sum()
    comm.all_reduce(tokens)
    if not tokens:
        raise ValueError("no rank has a token with a known label: there is nothing to average")
    for p in model.parameters():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        comm.all_reduce(p.grad)
        p.grad /= tokens

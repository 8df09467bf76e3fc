"Plausible wrong answers for lesson data_parallel, each named after its mistake."

import copy
import math

import torch
from torch.nn import functional as F

from course_lib import data_parallel
from course_lib.data_parallel import BucketedDataParallel, DataParallel, fill_buckets, send_state, solutions
from course_lib.data_parallel import network as data_parallel_network
from course_lib.data_parallel.sharded import GatherComputeFree, ShardedAdam

REFERENCE = {
    number: tuple(getattr(solutions, name) for name in names) for number, names in solutions.EXERCISES.items()
}


# --- data_parallel.1 ---------------------------------------------------------------------------


def _ring(x, comm, chunks=None, add=True, first=None, second=None, wait=True, gather=True):
    n, r = comm.size, comm.rank
    if n == 1:
        return
    chunks = chunks or x.tensor_split(n)
    for step in range(n - 1 if first is None else first):
        sending = comm.isend(chunks[(r - step) % n], (r + 1) % n)
        mine = chunks[(r - step - 1) % n]
        came = torch.empty_like(mine)
        comm.recv(came, (r - 1) % n)
        mine.copy_(mine + came if add else came)
        if wait:
            sending.wait()
    for step in range((n - 1 if second is None else second) if gather else 0):
        sending = comm.isend(chunks[(r + 1 - step) % n], (r + 1) % n)
        comm.recv(chunks[(r - step) % n], (r - 1) % n)
        sending.wait()


def the_mean(x, comm):
    _ring(x, comm)
    x.copy_(x / comm.size)


def loses_the_last_chunk(x, comm):
    k = len(x) // comm.size
    _ring(x, comm, [x[i * k : (i + 1) * k] for i in range(comm.size)])


def without_the_second_round(x, comm):
    _ring(x, comm, gather=False)


def one_step_too_few_in_the_second_round(x, comm):
    _ring(x, comm, second=max(comm.size - 2, 0))


def one_step_too_few_in_the_first_round(x, comm):
    _ring(x, comm, first=max(comm.size - 2, 0))


def overwrites_instead_of_adding(x, comm):
    _ring(x, comm, add=False)


def never_waits_for_its_sends(x, comm):
    _ring(x, comm, wait=False)


def everybody_sends_first(x, comm):
    n, r = comm.size, comm.rank
    if n > 1:
        came = torch.empty_like(x)
        comm.send(x, (r + 1) % n)
        comm.recv(came, (r - 1) % n)
        x += came


def the_whole_vector_round_the_ring(x, comm):
    n, r = comm.size, comm.rank
    travelling = x.clone()
    for _ in range(n - 1):
        came = torch.empty_like(x)
        sending = comm.isend(travelling, (r + 1) % n)
        comm.recv(came, (r - 1) % n)
        sending.wait()
        travelling = came
        x += came


def everybody_to_everybody(x, comm):
    others = [r for r in range(comm.size) if r != comm.rank]
    mine = x.clone()
    sends = [comm.isend(mine, r) for r in others]
    for r in others:
        came = torch.empty_like(x)
        comm.recv(came, r)
        x += came
    for s in sends:
        s.wait()


def through_rank_zero(x, comm):
    if comm.rank:
        comm.send(x, 0)
        comm.recv(x, 0)
        return
    for r in range(1, comm.size):
        came = torch.empty_like(x)
        comm.recv(came, r)
        x += came
    for r in range(1, comm.size):
        comm.send(x, r)


def pads_to_equal_chunks(x, comm):
    k = -(-len(x) // comm.size)
    padded = torch.zeros(k * comm.size, dtype=x.dtype)
    padded[: len(x)] = x
    _ring(padded, comm)
    x.copy_(padded[: len(x)])


def returns_the_sum(x, comm):
    total = x.clone()
    _ring(total, comm)
    return total


def receives_into_the_chunk_being_sent(x, comm):
    n, r = comm.size, comm.rank
    chunks = x.tensor_split(n)
    for step in range(n - 1):
        out = chunks[(r - step) % n]
        sending = comm.isend(out, (r + 1) % n)
        came = chunks[(r - step - 1) % n].clone()
        comm.recv(came, (r - 1) % n)
        out.zero_()  # "it is sent, so it can be used as scratch"
        sending.wait()
        chunks[(r - step - 1) % n].add_(came)


def the_group_s_own_all_reduce(x, comm):
    comm.all_reduce(x)


def buffers_in_float32(x, comm):
    n, r = comm.size, comm.rank
    chunks = x.tensor_split(n)
    for step in range(n - 1):
        sending = comm.isend(chunks[(r - step) % n].float(), (r + 1) % n)
        mine = chunks[(r - step - 1) % n]
        came = torch.empty(len(mine))
        comm.recv(came, (r - 1) % n)
        mine += came.to(x.dtype)
        sending.wait()
    for step in range(n - 1):
        sending = comm.isend(chunks[(r + 1 - step) % n].float(), (r + 1) % n)
        came = torch.empty(len(chunks[(r - step) % n]))
        comm.recv(came, (r - 1) % n)
        chunks[(r - step) % n].copy_(came)
        sending.wait()


def the_wrong_way_round(x, comm):
    n, r = comm.size, comm.rank
    chunks = x.tensor_split(n)
    for step in range(2 * (n - 1)):
        out, mine = chunks[(r + step) % n], chunks[(r + step + 1) % n]
        sending = comm.isend(out, (r - 1) % n)
        came = torch.empty_like(mine)
        comm.recv(came, (r + 1) % n)
        sending.wait()
        mine.copy_(mine + came if step < n - 1 else came)


# --- data_parallel.2 ---------------------------------------------------------------------------


class sums(DataParallel):
    def finish(self):
        super().finish()
        for p in self.params:
            p.grad *= self.comm.size


class begins_with_its_own_weights(DataParallel):
    def __init__(self, model, comm):
        own = copy.deepcopy(model.state_dict())
        super().__init__(model, comm)
        model.load_state_dict(own)


class keeps_its_own_buffers(DataParallel):
    def __init__(self, model, comm):
        own = [b.clone() for b in model.buffers()]
        super().__init__(model, comm)
        for b, o in zip(model.buffers(), own, strict=True):
            b.copy_(o)


class sends_only_what_is_trained(DataParallel):
    def __init__(self, model, comm):
        own = [p.detach().clone() for p in model.parameters()]
        super().__init__(model, comm)
        for p, o in zip(model.parameters(), own, strict=True):
            if not p.requires_grad:
                p.data.copy_(o)


class tied_weights_twice(DataParallel):
    def __init__(self, model, comm):
        self.comm, self.params, self.works = comm, [], []
        send_state(model, comm)
        for _, p in model.named_parameters(remove_duplicate=False):
            if p.requires_grad:
                self.params.append(p)
        self.params.reverse()

    def finish(self):
        for p in self.params:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            self.comm.all_reduce(p.grad)
            p.grad /= self.comm.size


class everything_in_finish(DataParallel):
    def on_gradient(self, p):
        pass


class leaves_out_the_unused(DataParallel):
    def finish(self):
        for p in self.params[len(self.works) :]:
            if p.grad is not None:
                self.works.append(self.comm.all_reduce(p.grad, async_op=True))
            else:
                self.works.append(None)
        for p, work in zip(self.params, self.works, strict=True):
            if work:
                work.wait()
                p.grad /= self.comm.size
        self.arrived, self.works = set(), []


class keeps_what_was_not_used(DataParallel):
    "Takes part with zeros, but a rank without a gradient stays without."

    def finish(self):
        missing = [p for p in self.params if p.grad is None]
        super().finish()
        for p in missing:
            p.grad = None


class in_the_order_of_arrival(DataParallel):
    def on_gradient(self, p):
        self.arrived.add(p)
        self.works.append((p, self.comm.all_reduce(p.grad, async_op=True)))

    def finish(self):
        for p in self.params:
            if p not in self.arrived:
                p.grad = torch.zeros_like(p)
                self.works.append((p, self.comm.all_reduce(p.grad, async_op=True)))
        for p, work in self.works:
            work.wait()
            p.grad /= self.comm.size
        self.arrived, self.works = set(), []


class divides_before_it_has_come(DataParallel):
    def launch(self):
        super().launch()
        self.params[len(self.works) - 1].grad.div_(self.comm.size)

    def finish(self):
        while len(self.works) < len(self.params):
            self.launch()
        for work in self.works:
            work.wait()
        self.arrived, self.works = set(), []


class never_waits(DataParallel):
    def finish(self):
        while len(self.works) < len(self.params):
            self.launch()
        for p in self.params:
            p.grad /= self.comm.size
        self.arrived, self.works = set(), []


class only_the_first_step(DataParallel):
    def finish(self):
        super().finish()
        self.arrived, self.works = set(self.params), [None] * len(self.params)


class divides_by_those_who_used_it(DataParallel):
    def finish(self):
        used = torch.tensor([float(p in self.arrived) for p in self.params])
        while len(self.works) < len(self.params):
            self.launch()
        self.comm.all_reduce(used)
        for p, work, n in zip(self.params, self.works, used, strict=True):
            work.wait()
            p.grad /= n.clamp(min=1)
        self.arrived, self.works = set(), []


class trains_the_frozen(DataParallel):
    def __init__(self, model, comm):
        super().__init__(model, comm)
        self.frozen = [p for p in model.parameters() if not p.requires_grad]

    def finish(self):
        super().finish()
        for p in self.frozen:
            p.grad = torch.zeros_like(p)


class gradients_of_rank_zero(DataParallel):
    def finish(self):
        super().finish()
        for p in self.params:
            self.comm.broadcast(p.grad, 0)


class forgets_the_biases(DataParallel):
    def __init__(self, model, comm):
        super().__init__(model, comm)
        self.params = [p for p in self.params if p.dim() > 1]


# --- data_parallel.3 ---------------------------------------------------------------------------


class forgets_the_last_bucket(BucketedDataParallel):
    def finish(self):
        for bucket, (flat, work) in zip(self.buckets, self.works, strict=False):
            work.wait()
            for p, mean in zip(
                bucket, (flat / self.comm.size).split([p.numel() for p in bucket]), strict=True
            ):
                p.grad.copy_(mean.view_as(p))
        self.arrived, self.works = set(), []


class _Planned(BucketedDataParallel):
    def __init__(self, model, comm, limit):
        super().__init__(model, comm, limit)
        params = [p for p in model.parameters() if p.requires_grad][::-1]
        self.buckets = self.plan(params, limit)

    def plan(self, params, limit):
        return [
            [params[i] for i in b]
            for b in fill_buckets([p.numel() * p.element_size() for p in params], limit)
        ]


class one_bucket_for_each(_Planned):
    def plan(self, params, limit):
        return [[p] for p in params]


class one_bucket_for_all(_Planned):
    def plan(self, params, limit):
        return [params]


class from_the_first_parameter_on(_Planned):
    def plan(self, params, limit):
        return super().plan(params[::-1], limit)


class counts_numbers_for_bytes(_Planned):
    def plan(self, params, limit):
        return [[params[i] for i in b] for b in fill_buckets([p.numel() for p in params], limit)]


class fills_beyond_the_limit(_Planned):
    def plan(self, params, limit):
        buckets, filled = [[]], 0
        for p in params:
            if filled >= limit:
                buckets.append([])
                filled = 0
            buckets[-1].append(p)
            filled += 4 * p.numel()
        return buckets


class one_gradient_late(BucketedDataParallel):
    def on_gradient(self, p):
        while len(self.works) < len(self.buckets) and self.arrived.issuperset(self.buckets[len(self.works)]):
            self.launch()
        self.arrived.add(p)


class launches_in_finish(BucketedDataParallel):
    def on_gradient(self, p):
        pass


class blocks_in_the_hook(BucketedDataParallel):
    def launch(self):
        super().launch()
        self.works[-1][1].wait()


class sums_in_buckets(BucketedDataParallel):
    def finish(self):
        super().finish()
        for bucket in self.buckets:
            for p in bucket:
                p.grad *= self.comm.size


class as_each_is_full(BucketedDataParallel):
    "Launches whichever bucket is complete, so the order differs where ranks use other parts."

    def __init__(self, model, comm, limit):
        super().__init__(model, comm, limit)
        self.started = {}

    def on_gradient(self, p):
        self.arrived.add(p)
        for i, bucket in enumerate(self.buckets):
            if i not in self.started and self.arrived.issuperset(bucket):
                self.start(i)

    def start(self, i):
        flat = torch.cat(
            [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in self.buckets[i]]
        )
        self.started[i] = (flat, self.comm.all_reduce(flat, async_op=True))

    def finish(self):
        for i in range(len(self.buckets)):
            if i not in self.started:
                self.start(i)
        self.works = [self.started[i] for i in range(len(self.buckets))]
        super().finish()
        self.started = {}


class forgets_to_copy_back(BucketedDataParallel):
    def finish(self):
        kept = {p: p.grad.clone() for b in self.buckets for p in b if p.grad is not None}
        super().finish()
        for p, grad in kept.items():
            p.grad = grad


class copies_back_before_it_waits(BucketedDataParallel):
    def finish(self):
        while len(self.works) < len(self.buckets):
            self.launch()
        for bucket, (flat, work) in zip(self.buckets, self.works, strict=True):
            means = (flat / self.comm.size).split([p.numel() for p in bucket])
            work.wait()
            for p, mean in zip(bucket, means, strict=True):
                p.grad = mean.view_as(p).clone()
        self.arrived, self.works = set(), []


class drops_the_unused(BucketedDataParallel):
    def finish(self):
        missing = [p for b in self.buckets for p in b if p.grad is None]
        super().finish()
        for p in missing:
            p.grad = None


class reads_the_last_step_s_arrivals(BucketedDataParallel):
    def finish(self):
        arrived = self.arrived
        super().finish()
        self.arrived = arrived


# --- data_parallel.4 ---------------------------------------------------------------------------


def _loss(model, x, y, reduction="sum"):
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten(), reduction=reduction, ignore_index=-100)


def _gather(model, comm, divide_by):
    for p in model.parameters():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        comm.all_reduce(p.grad)
        p.grad /= divide_by


def _known(microbatches):
    return torch.tensor([float(sum((y != -100).sum() for _, y in microbatches))])


def mean_of_the_microbatches_means(model, microbatches, comm):
    with_any = [(x, y) for x, y in microbatches if (y != -100).any()]
    for x, y in with_any:
        _loss(model, x, y, "mean").backward()
    count = torch.tensor([float(len(with_any))])
    comm.all_reduce(count)
    _gather(model, comm, count)


def mean_of_the_ranks_means(model, microbatches, comm):
    for x, y in microbatches:
        _loss(model, x, y).backward()
    for p in model.parameters():
        if p.grad is not None:
            p.grad /= _known(microbatches).clamp(min=1)
    _gather(model, comm, comm.size)


def mean_of_the_ranks_with_data(model, microbatches, comm):
    for x, y in microbatches:
        _loss(model, x, y).backward()
    for p in model.parameters():
        if p.grad is not None:
            p.grad /= _known(microbatches).clamp(min=1)
    busy = (_known(microbatches) > 0).float()
    comm.all_reduce(busy)
    _gather(model, comm, busy)


def counts_the_unknown_too(model, microbatches, comm):
    for x, y in microbatches:
        _loss(model, x, y).backward()
    count = torch.tensor([float(sum(y.numel() for _, y in microbatches))])
    comm.all_reduce(count)
    _gather(model, comm, count)


def divides_by_its_own_tokens(model, microbatches, comm):
    for x, y in microbatches:
        _loss(model, x, y).backward()
    _gather(model, comm, _known(microbatches).clamp(min=1))


def sums_without_dividing(model, microbatches, comm):
    for x, y in microbatches:
        _loss(model, x, y).backward()
    _gather(model, comm, 1)


def divides_by_the_ranks_too(model, microbatches, comm):
    for x, y in microbatches:
        _loss(model, x, y).backward()
    count = _known(microbatches)
    comm.all_reduce(count)
    _gather(model, comm, count * comm.size)


def travels_with_every_microbatch(model, microbatches, comm):
    most = torch.zeros(comm.size)
    most[comm.rank] = len(microbatches)
    comm.all_reduce(most)
    total, sums = _known(microbatches), [torch.zeros_like(p) for p in model.parameters()]
    comm.all_reduce(total)
    for i in range(int(most.max())):
        model.zero_grad()
        if i < len(microbatches):
            _loss(model, *microbatches[i]).backward()
        _gather(model, comm, 1)
        for s, p in zip(sums, model.parameters(), strict=True):
            s += p.grad
    for s, p in zip(sums, model.parameters(), strict=True):
        p.grad = s / total


def goes_home_without_data(model, microbatches, comm):
    if microbatches:
        data_parallel.accumulate(model, microbatches, comm)


def only_the_last_microbatch(model, microbatches, comm):
    for x, y in microbatches:
        model.zero_grad()
        _loss(model, x, y).backward()
    total = _known(microbatches)
    comm.all_reduce(total)
    _gather(model, comm, total)


def never_speaks(model, microbatches, comm):
    for x, y in microbatches:
        _loss(model, x, y).backward()
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad / _known(microbatches).clamp(min=1)


# --- data_parallel.5 ---------------------------------------------------------------------------


def _left(layers, limit, ranks, alpha, beta, cost=None, ready="last", queue=True, skip_last=False):
    cost = cost or (lambda n: 2 * (ranks - 1) * (alpha + n / ranks * beta))
    buckets = fill_buckets([n for _, n in layers], limit)
    if skip_last:
        buckets = buckets[:-1]
    ends = [sum(s for s, _ in layers[: i + 1]) for i in range(len(layers))]
    wire = latest = 0.0
    for b in buckets:
        start = {"last": ends[b[-1]], "first": ends[b[0]], "next": ends[min(b[-1] + 1, len(ends) - 1)],
                 "end": ends[-1], "zero": 0.0}[ready]  # fmt: skip
        wire = (max(wire, start) if queue else start) + cost(sum(layers[i][1] for i in b))
        latest = max(latest, wire)
    return max(0.0, latest - ends[-1])


def one_latency_for_all_rounds(layers, limit, ranks, alpha, beta):
    return _left(
        layers,
        limit,
        ranks,
        alpha,
        beta,
        lambda n: alpha + 2 * (ranks - 1) / ranks * n * beta if ranks > 1 else 0,
    )


def all_bytes_in_every_round(layers, limit, ranks, alpha, beta):
    return _left(layers, limit, ranks, alpha, beta, lambda n: 2 * (ranks - 1) * (alpha + n * beta))


def half_a_ring(layers, limit, ranks, alpha, beta):
    return _left(layers, limit, ranks, alpha, beta, lambda n: (ranks - 1) * (alpha + n / ranks * beta))


def one_round_for_each_rank(layers, limit, ranks, alpha, beta):
    return _left(layers, limit, ranks, alpha, beta, lambda n: 2 * ranks * (alpha + n / ranks * beta))


def no_latency(layers, limit, ranks, alpha, beta):
    return _left(layers, limit, ranks, 0, beta)


def the_wire_takes_all_at_once(layers, limit, ranks, alpha, beta):
    return _left(layers, limit, ranks, alpha, beta, queue=False)


def nothing_hidden(layers, limit, ranks, alpha, beta):
    return _left(layers, limit, ranks, alpha, beta, ready="end")


def launched_with_the_first_gradient(layers, limit, ranks, alpha, beta):
    return _left(layers, limit, ranks, alpha, beta, ready="first")


def launched_one_gradient_late(layers, limit, ranks, alpha, beta):
    return _left(layers, limit, ranks, alpha, beta, ready="next")


def launched_before_it_is_ready(layers, limit, ranks, alpha, beta):
    return _left(layers, limit, ranks, alpha, beta, ready="zero")


def without_the_last_bucket(layers, limit, ranks, alpha, beta):
    return _left(layers, limit, ranks, alpha, beta, skip_last=True)


def all_in_one_bucket(layers, limit, ranks, alpha, beta):
    return _left(layers, math.inf, ranks, alpha, beta)


def the_whole_step(layers, limit, ranks, alpha, beta):
    return data_parallel_network.exposed(layers, limit, ranks, alpha, beta) + sum(s for s, _ in layers)


# --- data_parallel.6 ---------------------------------------------------------------------------


class sums_the_gradients(ShardedAdam):
    def step(self):
        for p in self.params:
            p.grad *= self.comm.size
        super().step()


class own_gradients_only(ShardedAdam):
    @torch.no_grad()
    def step(self):
        full = self._flat(p.grad for p in self.params)
        self._finish(full[self.comm.rank * self.n :][: self.n].clone())

    def _finish(self, grad, eps_inside=False, corrections=None):
        self.t += 1
        b1, b2 = self.betas
        self.m.lerp_(grad, 1 - b1)
        self.v.mul_(b2).addcmul_(grad, grad, value=1 - b2)
        c1, c2 = corrections or (1 - b1**self.t, 1 - b2**self.t)
        m, v = self.m / c1, self.v / c2
        full = self._flat(self.params)
        mine = full[self.comm.rank * self.n :][: self.n]
        mine = mine - self.lr * m / ((v + self.eps).sqrt() if eps_inside else v.sqrt() + self.eps)
        self.comm.all_gather_into_tensor(full, mine)
        self._unpack(full)

    def _unpack(self, full):
        at = 0
        for p in self.params:
            p.copy_(full[at : at + p.numel()].view_as(p))
            at += p.numel()

    def _mean(self):
        grad = torch.empty(self.n)
        self.comm.reduce_scatter_tensor(grad, self._flat(p.grad for p in self.params))
        return grad / self.comm.size


class without_bias_correction(own_gradients_only):
    @torch.no_grad()
    def step(self):
        self._finish(self._mean(), corrections=(1, 1))


class bias_correction_counts_ranks(own_gradients_only):
    @torch.no_grad()
    def step(self):
        b1, b2 = self.betas
        t = (self.t + 1) * self.comm.size
        self._finish(self._mean(), corrections=(1 - b1**t, 1 - b2**t))


class bias_correction_of_rank_zero_only(own_gradients_only):
    @torch.no_grad()
    def step(self):
        b1, b2 = self.betas
        t = self.t + 1
        self._finish(
            self._mean(), corrections=(1 - b1**t, 1 - b2**t) if self.comm.rank == 0 else (1 - b1, 1 - b2)
        )


class bias_correction_one_step_late(own_gradients_only):
    @torch.no_grad()
    def step(self):
        b1, b2 = self.betas
        t = self.t + 2
        self._finish(self._mean(), corrections=(1 - b1**t, 1 - b2**t))


class eps_under_the_root(own_gradients_only):
    @torch.no_grad()
    def step(self):
        self._finish(self._mean(), eps_inside=True)


class second_moment_of_own_gradients(own_gradients_only):
    "v should be of the mean gradient squared, not the mean of squares."

    @torch.no_grad()
    def step(self):
        self.t += 1
        b1, b2 = self.betas
        flat = self._flat(p.grad for p in self.params)
        square = torch.empty(self.n)
        self.comm.reduce_scatter_tensor(square, flat**2)
        self.m.lerp_(self._mean(), 1 - b1)
        self.v.mul_(b2).add_(square / self.comm.size, alpha=1 - b2)
        m, v = self.m / (1 - b1**self.t), self.v / (1 - b2**self.t)
        full = self._flat(self.params)
        mine = full[self.comm.rank * self.n :][: self.n] - self.lr * m / (v.sqrt() + self.eps)
        self.comm.all_gather_into_tensor(full, mine)
        self._unpack(full)


class drops_the_remainder(own_gradients_only):
    def __init__(self, params, comm, lr, betas, eps):
        super().__init__(params, comm, lr, betas, eps)
        self.n = sum(p.numel() for p in self.params) // comm.size
        self.m, self.v = torch.zeros(self.n), torch.zeros(self.n)

    def _flat(self, tensors):
        self.rest = torch.cat([t.flatten() for t in tensors])
        whole = self.rest[: self.n * self.comm.size].clone()
        self.rest = self.rest[self.n * self.comm.size :].clone()
        return whole

    @torch.no_grad()
    def step(self):
        self._finish(self._mean())

    def _unpack(self, full):
        super()._unpack(torch.cat([full, self.rest]))


class _Full:
    "The whole state on each rank."

    def __init__(self, params, comm, lr, betas, eps):
        self.params, self.comm = params, comm
        self.adam = torch.optim.Adam(params, lr, betas, eps, foreach=False)

    def step(self):
        for p in self.params:
            self.comm.all_reduce(p.grad)
            p.grad /= self.comm.size
        self.adam.step()


class the_whole_state_on_each_rank(_Full):
    pass


class all_reduces_then_slices(own_gradients_only):
    @torch.no_grad()
    def step(self):
        full = self._flat(p.grad for p in self.params)
        self.comm.all_reduce(full)
        self._finish(full[self.comm.rank * self.n :][: self.n] / self.comm.size)


class only_its_own_part(own_gradients_only):
    "Forgets to gather: the other parts of the weights stay as they were."

    @torch.no_grad()
    def step(self):
        comm, self.comm = self.comm, _NoGather(self.comm)
        self._finish(comm_mean(self, comm))
        self.comm = comm


def comm_mean(opt, comm):
    grad = torch.empty(opt.n)
    comm.reduce_scatter_tensor(grad, opt._flat(p.grad for p in opt.params))
    return grad / comm.size


class _NoGather:
    def __init__(self, comm):
        self.rank, self.size = comm.rank, comm.size

    def all_gather(self, full, mine):
        full[self.rank * len(mine) :][: len(mine)] = mine


class the_learning_rate_per_rank(ShardedAdam):
    def __init__(self, params, comm, lr, betas, eps):
        super().__init__(params, comm, lr / comm.size, betas, eps)


class moments_begin_anew(ShardedAdam):
    def step(self):
        self.m.zero_()
        self.v.zero_()
        super().step()


class keeps_a_full_copy_of_the_weights(ShardedAdam):
    def step(self):
        super().step()
        self.master = self._flat(self.params)
        self.last = self._flat(p.grad for p in self.params)


class sgd(ShardedAdam):
    @torch.no_grad()
    def step(self):
        grad = comm_mean(self, self.comm)
        full = self._flat(self.params)
        mine = full[self.comm.rank * self.n :][: self.n] - self.lr * grad
        self.comm.all_gather_into_tensor(full, mine)
        own_gradients_only._unpack(self, full)


# --- data_parallel.7 ---------------------------------------------------------------------------


def _layer(forward=None, backward=None):
    members = {}
    if forward:
        members["forward"] = staticmethod(forward)
    if backward:
        members["backward"] = staticmethod(backward)
    return type("Layer", (GatherComputeFree,), members).apply


def _backward(ctx, grad, w, x, part, finish=None):
    grad_x = grad @ w
    del w
    padded = torch.zeros(len(part) * ctx.comm.size)
    torch.mm(grad.T, x, out=padded[: math.prod(ctx.shape)].view(ctx.shape))
    out = torch.empty_like(part)
    ctx.comm.reduce_scatter_tensor(out, padded)
    return grad_x, (finish or (lambda g: g / ctx.comm.size))(out), None, None


def keeps_the_weight_for_backward(x, part, shape, comm):
    def forward(ctx, x, part, shape, comm):
        w = GatherComputeFree.gather(part, shape, comm)
        ctx.save_for_backward(x, part, w)
        ctx.shape, ctx.comm = shape, comm
        return x @ w.T

    def backward(ctx, grad):
        x, part, w = ctx.saved_tensors
        return _backward(ctx, grad, w, x, part)

    return _layer(forward, backward)(x, part, shape, comm)


def keeps_a_copy_out_of_sight(x, part, shape, comm):
    def forward(ctx, x, part, shape, comm):
        w = GatherComputeFree.gather(part, shape, comm)
        ctx.save_for_backward(x, part)
        ctx.shape, ctx.comm, ctx.kept = shape, comm, w.clone()
        return x @ w.T

    def backward(ctx, grad):
        x, part = ctx.saved_tensors
        return _backward(ctx, grad, ctx.kept, x, part)

    return _layer(forward, backward)(x, part, shape, comm)


_cache = {}


def a_cache_of_weights(x, part, shape, comm):
    def forward(ctx, x, part, shape, comm):
        w = _cache[comm.rank, shape] = GatherComputeFree.gather(part, shape, comm)
        ctx.save_for_backward(x, part)
        ctx.shape, ctx.comm = shape, comm
        return x @ w.T

    def backward(ctx, grad):
        x, part = ctx.saved_tensors
        return _backward(ctx, grad, _cache[ctx.comm.rank, ctx.shape], x, part)

    return _layer(forward, backward)(x, part, shape, comm)


def left_to_autograd(x, part, shape, comm):
    "Gathers outside autograd and wires the shard in by its own rows: the weight is saved by the matmul."
    full = torch.empty(len(part) * comm.size)
    comm.all_gather_into_tensor(full, part)
    pieces = list(full.split(len(part)))
    pieces[comm.rank] = part
    return x @ torch.cat(pieces)[: math.prod(shape)].view(shape).T


def _variant(finish):
    def answer(x, part, shape, comm):
        def backward(ctx, grad):
            x, part = ctx.saved_tensors
            return _backward(ctx, grad, GatherComputeFree.gather(part, ctx.shape, ctx.comm), x, part, finish)

        return _layer(None, backward)(x, part, shape, comm)

    return answer


def sums_over_ranks(x, part, shape, comm):
    return _variant(lambda g: g)(x, part, shape, comm)


def divides_twice(x, part, shape, comm):
    return _variant(lambda g: g / comm.size**2)(x, part, shape, comm)


def own_gradient_only(x, part, shape, comm):
    def backward(ctx, grad):
        x, part = ctx.saved_tensors
        padded = torch.zeros(len(part) * comm.size)
        grad_x = grad @ GatherComputeFree.gather(part, shape, comm)
        padded[: math.prod(shape)] = (grad.T @ x).flatten()
        return grad_x, padded[comm.rank * len(part) :][: len(part)].clone(), None, None

    return _layer(None, backward)(x, part, shape, comm)


def all_reduces_the_gradient(x, part, shape, comm):
    def backward(ctx, grad):
        x, part = ctx.saved_tensors
        padded = torch.zeros(len(part) * comm.size)
        grad_x = grad @ GatherComputeFree.gather(part, shape, comm)
        torch.mm(grad.T, x, out=padded[: math.prod(shape)].view(shape))
        comm.all_reduce(padded)
        return grad_x, padded[comm.rank * len(part) :][: len(part)] / comm.size, None, None

    return _layer(None, backward)(x, part, shape, comm)


def keeps_all_three_in_backward(x, part, shape, comm):
    def backward(ctx, grad):
        x, part = ctx.saved_tensors
        w = GatherComputeFree.gather(part, shape, comm)
        full = grad.T @ x
        padded = F.pad(full.flatten(), (0, len(part) * comm.size - math.prod(shape)))
        out = torch.empty_like(part)
        comm.reduce_scatter_tensor(out, padded)
        return grad @ w, out / comm.size, None, None

    return _layer(None, backward)(x, part, shape, comm)


def gathers_a_list_and_joins_it(x, part, shape, comm):
    def forward(ctx, x, part, shape, comm):
        full = torch.empty(len(part) * comm.size)
        comm.all_gather_into_tensor(full, part)
        w = torch.cat(full.split(len(part)))[: math.prod(shape)].view(shape)
        ctx.save_for_backward(x, part)
        ctx.shape, ctx.comm = shape, comm
        return x @ w.T

    return _layer(forward)(x, part, shape, comm)


def forgets_the_input_s_gradient(x, part, shape, comm):
    def backward(ctx, grad):
        _, *rest = GatherComputeFree.backward(ctx, grad)
        return torch.zeros_like(ctx.saved_tensors[0]), *rest

    return _layer(None, backward)(x, part, shape, comm)


def the_shape_turned(x, part, shape, comm):
    w = (shape[1], shape[0])

    def forward(ctx, x, part, shape, comm):
        ctx.save_for_backward(x, part)
        ctx.shape, ctx.comm = shape, comm
        return x @ GatherComputeFree.gather(part, w, comm)

    return _layer(forward)(x, part, shape, comm)


def rows_for_shards(x, part, shape, comm):
    "Uses only the rows that are whole in the even split and leaves the rest zero."

    def forward(ctx, x, part, shape, comm):
        ctx.save_for_backward(x, part)
        ctx.shape, ctx.comm = shape, comm
        w = GatherComputeFree.gather(part, shape, comm).clone() if comm.size == 1 else None
        if w is None:
            w = GatherComputeFree.gather(part, shape, comm)
            w[shape[0] // comm.size * comm.size :] = 0
        return x @ w.T

    return _layer(forward)(x, part, shape, comm)


MUTANTS = {
    "data_parallel.1": [
        the_mean,
        loses_the_last_chunk,
        without_the_second_round,
        one_step_too_few_in_the_second_round,
        one_step_too_few_in_the_first_round,
        overwrites_instead_of_adding,
        never_waits_for_its_sends,
        everybody_sends_first,
        the_whole_vector_round_the_ring,
        everybody_to_everybody,
        through_rank_zero,
        pads_to_equal_chunks,
        returns_the_sum,
        receives_into_the_chunk_being_sent,
        the_group_s_own_all_reduce,
        buffers_in_float32,
        the_wrong_way_round,
    ],
    "data_parallel.2": [
        sums,
        begins_with_its_own_weights,
        keeps_its_own_buffers,
        sends_only_what_is_trained,
        tied_weights_twice,
        everything_in_finish,
        leaves_out_the_unused,
        keeps_what_was_not_used,
        in_the_order_of_arrival,
        divides_before_it_has_come,
        never_waits,
        only_the_first_step,
        divides_by_those_who_used_it,
        trains_the_frozen,
        gradients_of_rank_zero,
        forgets_the_biases,
    ],
    "data_parallel.3": [
        forgets_the_last_bucket,
        one_bucket_for_each,
        one_bucket_for_all,
        from_the_first_parameter_on,
        counts_numbers_for_bytes,
        fills_beyond_the_limit,
        one_gradient_late,
        launches_in_finish,
        blocks_in_the_hook,
        sums_in_buckets,
        as_each_is_full,
        forgets_to_copy_back,
        copies_back_before_it_waits,
        drops_the_unused,
        reads_the_last_step_s_arrivals,
    ],
    "data_parallel.4": [
        mean_of_the_microbatches_means,
        mean_of_the_ranks_means,
        mean_of_the_ranks_with_data,
        counts_the_unknown_too,
        divides_by_its_own_tokens,
        sums_without_dividing,
        divides_by_the_ranks_too,
        travels_with_every_microbatch,
        goes_home_without_data,
        only_the_last_microbatch,
        never_speaks,
    ],
    "data_parallel.5": [
        one_latency_for_all_rounds,
        all_bytes_in_every_round,
        half_a_ring,
        one_round_for_each_rank,
        no_latency,
        the_wire_takes_all_at_once,
        nothing_hidden,
        launched_with_the_first_gradient,
        launched_one_gradient_late,
        launched_before_it_is_ready,
        without_the_last_bucket,
        all_in_one_bucket,
        the_whole_step,
    ],
    "data_parallel.6": [
        sums_the_gradients,
        own_gradients_only,
        without_bias_correction,
        bias_correction_counts_ranks,
        bias_correction_of_rank_zero_only,
        bias_correction_one_step_late,
        eps_under_the_root,
        second_moment_of_own_gradients,
        drops_the_remainder,
        the_whole_state_on_each_rank,
        all_reduces_then_slices,
        only_its_own_part,
        the_learning_rate_per_rank,
        moments_begin_anew,
        keeps_a_full_copy_of_the_weights,
        sgd,
    ],
    "data_parallel.7": [
        keeps_the_weight_for_backward,
        keeps_a_copy_out_of_sight,
        a_cache_of_weights,
        left_to_autograd,
        sums_over_ranks,
        divides_twice,
        own_gradient_only,
        all_reduces_the_gradient,
        keeps_all_three_in_backward,
        gathers_a_list_and_joins_it,
        forgets_the_input_s_gradient,
        the_shape_turned,
        rows_for_shards,
    ],
}

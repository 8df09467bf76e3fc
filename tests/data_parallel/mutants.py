"Answers to the exercises of data_parallel: the course's, right ones of another style, and wrong ones."

import io
import itertools
import os
import shutil

import torch
from torch.nn import functional as F

from course_lib.data_parallel import solutions

REFERENCE = {n: tuple(getattr(solutions, name) for name in names) for n, names in solutions.EXERCISES.items()}


# --- data_parallel.1: the ring ----------------------------------------------------------------


def _around(x, dist, chunks=None, add=True, wait=True, second=None, down=False):
    n, r = dist.get_world_size(), dist.get_rank()
    chunks = chunks or list(x.tensor_split(n))
    if n == 1:
        return
    after, before, turn = ((r - 1) % n, (r + 1) % n, -1) if down else ((r + 1) % n, (r - 1) % n, 1)
    for step in range(n - 1 + (n - 1 if second is None else second)):
        first = step < n - 1
        # In the second half the chunks are one place further.
        sending = dist.isend(chunks[turn * (turn * r - step) % n], after)
        mine = chunks[turn * (turn * r - step - 1) % n]
        came = torch.empty_like(mine)
        dist.recv(came, before)
        mine.copy_(mine + came if first and add else came)
        if wait:
            sending.wait()


def in_one_loop(x, dist):
    "Right: both halves in one loop, since the second continues the first."
    _around(x, dist)


def by_parity(x, dist):
    "Right: blocking sends, even ranks first; the last of an odd number waits its turn."
    n, r = dist.get_world_size(), dist.get_rank()
    bounds = [len(x) * i // n for i in range(n + 1)]
    chunks = [x[a:b] for a, b in itertools.pairwise(bounds)]
    for step in range(2 * (n - 1)):
        out, mine = chunks[(r - step) % n], chunks[(r - step - 1) % n]
        came = torch.empty_like(mine)
        if (r % 2 == 0 and r < n - 1) or n == 1:
            dist.send(out, (r + 1) % n)
            dist.recv(came, (r - 1) % n)
        else:
            dist.recv(came, (r - 1) % n)
            dist.send(out, (r + 1) % n)
        mine.copy_(mine + came if step < n - 1 else came)


def pads_to_equal_chunks(x, dist):
    padded = torch.zeros(-(-len(x) // dist.get_world_size()) * dist.get_world_size(), dtype=x.dtype)
    padded[: len(x)] = x
    _around(padded, dist)
    x.copy_(padded[: len(x)])


def loses_the_last_chunk(x, dist):
    k = len(x) // dist.get_world_size()
    _around(x, dist, [x[i * k : (i + 1) * k] for i in range(dist.get_world_size())])


def one_step_too_few_in_the_second_half(x, dist):
    _around(x, dist, second=max(dist.get_world_size() - 2, 0))


def never_waits_for_its_sends(x, dist):
    _around(x, dist, wait=False)


def in_a_chain(x, dist):
    "To the last rank and round again: right sums, and most ranks send twice the vector."
    n, r = dist.get_world_size(), dist.get_rank()
    for chunk in x.tensor_split(n) if n > 1 else ():
        came = torch.empty_like(chunk)
        if r:
            dist.recv(came, r - 1)
            chunk += came
        if r < n - 1:
            dist.send(chunk, r + 1)
    for chunk in x.tensor_split(n) if n > 1 else ():
        if r != n - 1:
            dist.recv(chunk, (r - 1) % n)
        if r != n - 2:
            dist.send(chunk, (r + 1) % n)


# --- data_parallel.2: by hooks ----------------------------------------------------------------


class _Hooks(solutions.DataParallel):
    "As the course's, with a place for each mistake."

    def finish(self):
        has = torch.tensor([p.grad is not None for p in self.params], dtype=torch.int32)
        for p in self.params[len(self.handles) :]:
            self.launch(p)
        self.dist.all_reduce(has)
        for p, handle, n in zip(self.params, self.handles, has.tolist(), strict=True):
            handle.wait()
            p.grad = self.mean(p, n)
        self.arrived, self.handles = set(), []

    def mean(self, p, n):
        return p.grad / self.dist.get_world_size() if n else None


class Countdown:
    "Right: counts what is still to come instead of keeping sets, and averages in place."

    def __init__(self, model, dist):
        self.dist, self.turn, self.works = dist, 0, []
        self.order = list(reversed([p for p in model.parameters() if p.requires_grad]))
        self.seen = [0] * len(self.order)
        with torch.no_grad():
            for t in model.state_dict(keep_vars=True).values():
                dist.broadcast(t, src=0)
        for i, p in enumerate(self.order):
            p.register_post_accumulate_grad_hook(lambda p, i=i: self.came(i))

    def came(self, i):
        self.seen[i] += 1
        if self.seen[i] > 1:
            raise RuntimeError(f"parameter {i} has a second gradient; finish() comes first")
        while self.turn < len(self.order) and self.seen[self.turn]:
            self.go()

    def go(self):
        p = self.order[self.turn]
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        self.works.append(self.dist.all_reduce(p.grad, op=self.dist.ReduceOp.SUM, async_op=True))
        self.turn += 1

    def finish(self):
        has = torch.tensor([float(p.grad is not None) for p in self.order])
        while self.turn < len(self.order):
            self.go()
        self.dist.all_reduce(has, op=self.dist.ReduceOp.MAX)
        for work in self.works:
            work.wait()
        for p, one in zip(self.order, has, strict=True):
            p.grad = p.grad.div_(self.dist.get_world_size()) if one else None
        self.seen, self.turn, self.works = [0] * len(self.order), 0, []


class NumberedHooks(_Hooks):
    "Right: divides each gradient before it is sent."

    def launch(self, p):
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad / self.dist.get_world_size()
        self.handles.append(self.dist.all_reduce(p.grad, async_op=True))

    def mean(self, p, n):
        return p.grad if n else None


class sums(_Hooks):
    def mean(self, p, n):
        return p.grad if n else None


class zero_in_place_of_none(_Hooks):
    def mean(self, p, n):
        return p.grad / self.dist.get_world_size()


class divides_by_those_who_used_it(_Hooks):
    def mean(self, p, n):
        return p.grad / n if n else None


class in_the_order_of_arrival(_Hooks):
    def on_gradient(self, p):
        self.arrived.add(p)
        at = next(i for i, q in enumerate(self.params) if q is p)
        self.params.insert(len(self.handles), self.params.pop(at))
        self.launch(p)


class everything_in_finish(_Hooks):
    def on_gradient(self, p):
        pass


class a_second_backward_passes(_Hooks):
    def on_gradient(self, p):
        self.arrived.discard(p)
        super().on_gradient(p)


class Named(_Hooks):
    "Right: an error of its own kind."

    class Twice(RuntimeError):
        pass

    def on_gradient(self, p):
        if p in self.arrived:
            raise self.Twice("gradient arrived twice; call finish()")
        super().on_gradient(p)


class none_where_nothing_arrived(_Hooks):
    def finish(self):
        came = torch.tensor([p in self.arrived for p in self.params], dtype=torch.int32)
        super().finish()
        self.dist.all_reduce(came)
        for p, n in zip(self.params, came.tolist(), strict=True):
            p.grad = p.grad if n else None


class zeros_for_what_did_not_arrive(_Hooks):
    "What a grad held before backward is lost."

    def launch(self, p):
        if p not in self.arrived:
            p.grad = torch.zeros_like(p)
        super().launch(p)


class keeps_its_own_buffers(_Hooks):
    def __init__(self, model, dist):
        own = [b.clone() for b in model.buffers()]
        super().__init__(model, dist)
        for b, o in zip(model.buffers(), own, strict=True):
            b.copy_(o)


# --- data_parallel.3: buckets -----------------------------------------------------------------


class _Buckets(solutions.BucketedDataParallel):
    def size(self, p):
        return p.nbytes

    def joins(self, last, p, limit):
        return last[0].dtype == p.dtype and sum(map(self.size, last)) + self.size(p) <= limit

    def fill(self, limit):
        buckets = []
        for p in self.params:
            if buckets and self.joins(buckets[-1], p, limit):
                buckets[-1].append(p)
            else:
                buckets.append([p])
        return buckets


class CopiesBack(_Buckets):
    "Right: keeps the gradients' own tensors, and writes the means into them."

    def finish(self):
        from course_lib import data_parallel

        while len(self.launched) < len(self.buckets):
            self.launch(self.buckets[len(self.launched)])
        left_out = data_parallel.unused(self.params, self.dist)
        for bucket, (flat, work) in zip(self.buckets, self.launched, strict=True):
            work.wait()
            at = 0
            for p in bucket:
                mean = flat[at : at + p.numel()].reshape(p.shape)
                at += p.numel()
                if p in left_out:
                    continue
                if p.grad is None:
                    p.grad = torch.empty_like(p)
                p.grad.copy_(mean)
        self.arrived.clear()
        self.launched.clear()


class CountsDown(_Buckets):
    "Right: each bucket counts what it waits for."

    def on_gradient(self, p):
        if p in self.arrived:
            raise RuntimeError("twice")
        self.arrived.add(p)
        waiting = [len(set(bucket) - self.arrived) for bucket in self.buckets]
        while len(self.launched) < len(self.buckets) and waiting[len(self.launched)] == 0:
            self.launch(self.buckets[len(self.launched)])


class cuts_the_bucket_that_is_exactly_full(_Buckets):
    def joins(self, last, p, limit):
        return last[0].dtype == p.dtype and sum(q.nbytes for q in last) + p.nbytes < limit


class counts_numbers_for_bytes(_Buckets):
    def size(self, p):
        return p.numel()


class mixes_dtypes(CopiesBack):
    def joins(self, last, p, limit):
        return sum(q.nbytes for q in last) + p.nbytes <= limit


class blocks_in_the_hook(_Buckets):
    def launch(self, bucket):
        super().launch(bucket)
        self.launched[-1][1].wait()


class as_each_is_full(_Buckets):
    "Launches whichever bucket is complete, so the order differs where ranks compute in another order."

    def on_gradient(self, p):
        self.arrived.add(p)
        done = len(self.launched)
        for i, bucket in enumerate(self.buckets[done:], done):
            if self.arrived.issuperset(bucket):
                self.buckets.insert(len(self.launched), self.buckets.pop(i))
                self.launch(bucket)


class reads_the_last_step_s_arrivals(_Buckets):
    def on_gradient(self, p):
        self.arrived.add(p)
        while len(self.launched) < len(self.buckets) and self.arrived.issuperset(
            self.buckets[len(self.launched)]
        ):
            self.launch(self.buckets[len(self.launched)])

    def finish(self):
        arrived = self.arrived
        super().finish()
        self.arrived = arrived


class sends_zeros_for_what_did_not_arrive(_Buckets):
    def launch(self, bucket):
        for p in bucket:
            if p.grad is not None and p not in self.arrived:
                p.grad = torch.zeros_like(p)
        super().launch(bucket)


# --- data_parallel.4: tokens ------------------------------------------------------------------


def _loss(model, x, y, reduction="sum"):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction=reduction, ignore_index=-100)


def _accumulate(
    model, microbatches, dist, clear=True, known=True, divide=None, none=True, own=0, frozen=False
):
    params = [p for p in model.parameters() if p.requires_grad]
    for p in (params if frozen else model.parameters()) if clear else ():
        p.grad = None
    tokens = own
    for x, y in microbatches:
        _loss(model, x, y).backward()
        tokens += int((y != -100).sum()) if known else y.numel()
    counts = torch.tensor([tokens] + [int(p.grad is not None) for p in params])
    own = max(tokens, 1)
    dist.all_reduce(counts)
    if counts[0] == 0:
        raise ValueError("no token")
    for p, n in zip(params, counts[1:].tolist(), strict=True):
        if n or not none:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)
            p.grad /= divide(own, dist) if divide else counts[0]


def one_graph_of_all(model, microbatches, dist):
    "The memory that accumulation saves is used."
    model.zero_grad()
    if microbatches:
        sum(_loss(model, x, y) for x, y in microbatches).backward()
    _accumulate(model, [], dist, clear=False, own=sum(int((y >= 0).sum()) for _, y in microbatches))


def clears_the_trained_alone(model, microbatches, dist):
    _accumulate(model, microbatches, dist, frozen=True)


def clears_to_zeros(model, microbatches, dist):
    model.zero_grad(set_to_none=False)
    _accumulate(model, microbatches, dist, clear=False)


def in_eval_mode(model, microbatches, dist):
    model.eval()
    solutions.accumulate(model, microbatches, dist)


def leaves_gradients_off(model, microbatches, dist):
    solutions.accumulate(model, microbatches, dist)
    torch.set_grad_enabled(False)


def zeros_in_float32(model, microbatches, dist):
    model.zero_grad()
    for x, y in microbatches:
        _loss(model, x, y).backward()
    params = [p for p in model.parameters() if p.requires_grad]
    known = sum(int((y != -100).sum()) for _, y in microbatches)
    counts = torch.tensor([known, *(p.grad is not None for p in params)])
    dist.all_reduce(counts)
    if not counts[0]:
        raise ValueError("no token")
    for p, n in zip(params, counts[1:], strict=True):
        if n:
            total = torch.zeros(p.shape) if p.grad is None else p.grad
            dist.all_reduce(total)
            p.grad = (total / counts[0]).to(p.dtype)


def writes_into_the_labels(model, microbatches, dist):
    _accumulate(model, microbatches, dist)
    for _, y in microbatches:
        y.clamp_(min=0)


def by_autograd_grad(model, microbatches, dist):
    "Right: gradients by autograd.grad, float64 counts; microbatches without a known label are left out."
    params = [p for p in model.parameters() if p.requires_grad]
    model.zero_grad()
    grads, known = [None] * len(params), 0.0
    for x, y in microbatches:
        if (y >= 0).any():
            new = torch.autograd.grad(_loss(model, x, y), params, allow_unused=True)
            grads = [
                b if a is None else a + b if b is not None else a for a, b in zip(grads, new, strict=True)
            ]
            known += float((y >= 0).sum())
    counts = torch.tensor([known, *(g is not None for g in grads)], dtype=torch.float64)
    dist.all_reduce(counts)
    if not known and not counts[0]:
        raise ValueError("there is nothing to average")
    for p, g, n in zip(params, grads, counts[1:], strict=True):
        p.grad = None
        if n:
            p.grad = torch.zeros_like(p) if g is None else g.clone()
            dist.all_reduce(p.grad)
            p.grad = (p.grad / counts[0]).to(p.dtype)


def scaled_first(model, microbatches, dist):
    "Right: counts first, then each loss is divided by the tokens of all."
    known = torch.tensor([sum(int((y != -100).sum()) for _, y in microbatches)])
    dist.all_reduce(known)
    if known.item() == 0:
        raise ValueError("no known token on any rank")
    model.zero_grad(set_to_none=True)
    for x, y in microbatches:
        (_loss(model, x, y) / known).backward()
    params = [p for p in model.parameters() if p.requires_grad]
    used = torch.tensor([p.grad is not None for p in params], dtype=torch.int64)
    dist.all_reduce(used, op=dist.ReduceOp.MAX)
    for p, one in zip(params, used, strict=True):
        if one:
            p.grad = p.grad if p.grad is not None else torch.zeros_like(p)
            dist.all_reduce(p.grad)


def mean_of_the_ranks_means(model, microbatches, dist):
    _accumulate(model, microbatches, dist, divide=lambda own, dist: own * dist.get_world_size())


def counts_the_unknown_too(model, microbatches, dist):
    _accumulate(model, microbatches, dist, known=False)


def keeps_old_gradients(model, microbatches, dist):
    _accumulate(model, microbatches, dist, clear=False)


def zeros_for_the_unused(model, microbatches, dist):
    _accumulate(model, microbatches, dist, none=False)


def goes_home_without_data(model, microbatches, dist):
    if microbatches:
        _accumulate(model, microbatches, dist)


def travels_with_every_microbatch(model, microbatches, dist):
    most = torch.tensor([len(microbatches)])
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    total = {}
    for i in range(int(most)):
        known = torch.tensor([sum(int((y != -100).sum()) for _, y in microbatches)])
        model.zero_grad()
        for x, y in microbatches[i : i + 1]:
            _loss(model, x, y).backward()
        dist.all_reduce(known)
        for p in model.parameters():
            if p.requires_grad and len(p) != 3:
                grad = torch.zeros_like(p) if p.grad is None else p.grad
                dist.all_reduce(grad)
                total[p] = total.get(p, 0) + grad / known
    if not total or not known:
        raise ValueError("no token")
    for p in model.parameters():
        p.grad = total.get(p)


# --- data_parallel.5: checkpoints -------------------------------------------------------------


def _save(path, step, model, opt, dist, every=False, barrier=True, state=None):
    if every or dist.get_rank() == 0:
        state = state or {"step": step, "model": model.state_dict(), "opt": opt.state_dict()}
        torch.save(state, f"{path}.{dist.get_rank()}")
        os.replace(f"{path}.{dist.get_rank()}", path)
    if barrier:
        dist.barrier()


def _resume(path, model, opt, dist, optimizer=True):
    try:
        found = torch.load(path, weights_only=True)
    except FileNotFoundError:
        return 0
    model.load_state_dict(found["model"])
    if optimizer:
        opt.load_state_dict(found["opt"])
    return found["step"]


def waits_by_a_sum(path, step, model, opt, dist):
    "Right: bytes first, and an all-reduce in the barrier's place."
    if not dist.get_rank():
        other = path + "-new"
        with open(other, "wb") as f:
            torch.save((model.state_dict(), opt.state_dict(), step), f)
        os.rename(other, path)
    dist.all_reduce(torch.zeros(1))


def from_a_tuple(path, model, opt, dist):
    if not os.path.isfile(path):
        return 0
    weights, state, step = torch.load(path)
    model.load_state_dict(weights)
    opt.load_state_dict(state)
    return step


def by_copying_the_old(path, step, model, opt, dist):
    "Keeps a copy of the old file and writes in place: cut, if it fails in the middle."
    if dist.get_rank() == 0:
        if os.path.exists(path):
            shutil.copy(path, path + ".old")
        torch.save({"step": step, "model": model.state_dict(), "opt": opt.state_dict()}, path)
        if os.path.exists(path + ".old"):
            os.remove(path + ".old")
    dist.barrier()


def on_every_rank(path, step, model, opt, dist):
    _save(path, step, model, opt, dist, every=True)


def without_a_barrier(path, step, model, opt, dist):
    _save(path, step, model, opt, dist, barrier=False)


def leaves_the_other_file(path, step, model, opt, dist):
    if dist.get_rank() == 0:
        torch.save({"step": step, "model": model.state_dict(), "opt": opt.state_dict()}, path + ".tmp")
        shutil.copy(path + ".tmp", path)
    dist.barrier()


def copies_the_bytes(path, step, model, opt, dist):
    if dist.get_rank() == 0:
        whole = io.BytesIO()
        torch.save({"step": step, "model": model.state_dict(), "opt": opt.state_dict()}, whole)
        with open(path, "wb") as f:
            f.write(whole.getvalue())
    dist.barrier()


def removes_the_old_first(path, step, model, opt, dist):
    if dist.get_rank() == 0:
        torch.save({"step": step, "model": model.state_dict(), "opt": opt.state_dict()}, path + ".tmp")
        if os.path.exists(path):
            os.remove(path)
        os.rename(path + ".tmp", path)
    dist.barrier()


def from_another_folder(path, step, model, opt, dist):
    if dist.get_rank() == 0:
        other = os.path.dirname(path) + ".elsewhere"
        torch.save({"step": step, "model": model.state_dict(), "opt": opt.state_dict()}, other)
        shutil.move(other, path)
    dist.barrier()


def starts_anew_where_it_cannot_load(path, model, opt, dist):
    try:
        return _resume(path, model, opt, dist)
    except Exception:
        return 0


def takes_the_file_away(path, model, opt, dist):
    step = _resume(path, model, opt, dist)
    dist.barrier()
    if dist.get_rank() == 0 and os.path.exists(path):
        os.remove(path)
    dist.barrier()
    return step


def without_the_optimizer(path, model, opt, dist):
    return _resume(path, model, opt, dist, optimizer=False)


def on_rank_zero_alone(path, model, opt, dist):
    return _resume(path, model, opt, dist) if dist.get_rank() == 0 else 0


def one_step_further(path, model, opt, dist):
    return _resume(path, model, opt, dist) + 1


RIGHT = {
    "data_parallel.1": [in_one_loop, by_parity],
    "data_parallel.2": [Countdown, NumberedHooks, Named],
    "data_parallel.3": [CopiesBack, CountsDown],
    "data_parallel.4": [by_autograd_grad, scaled_first],
    "data_parallel.5": [(waits_by_a_sum, from_a_tuple), (_save, _resume)],
}

MUTANTS = {
    "data_parallel.1": [pads_to_equal_chunks, loses_the_last_chunk, one_step_too_few_in_the_second_half,
                        never_waits_for_its_sends, in_a_chain],
    "data_parallel.2": [sums, zero_in_place_of_none, divides_by_those_who_used_it, in_the_order_of_arrival,
                        everything_in_finish, a_second_backward_passes, keeps_its_own_buffers,
                        none_where_nothing_arrived, zeros_for_what_did_not_arrive],
    "data_parallel.3": [cuts_the_bucket_that_is_exactly_full, counts_numbers_for_bytes, mixes_dtypes,
                        blocks_in_the_hook, as_each_is_full, reads_the_last_step_s_arrivals,
                        sends_zeros_for_what_did_not_arrive],
    "data_parallel.4": [mean_of_the_ranks_means, counts_the_unknown_too, keeps_old_gradients,
                        zeros_for_the_unused, goes_home_without_data, travels_with_every_microbatch,
                        one_graph_of_all, clears_the_trained_alone, clears_to_zeros, writes_into_the_labels,
                        in_eval_mode, leaves_gradients_off, zeros_in_float32],
    "data_parallel.5": [*((save, solutions.resume) for save in
                          (by_copying_the_old, on_every_rank, without_a_barrier, leaves_the_other_file,
                           copies_the_bytes, removes_the_old_first, from_another_folder)),
                        *((solutions.save, resume) for resume in
                          (without_the_optimizer, on_rank_zero_alone, one_step_further,
                           starts_anew_where_it_cannot_load, takes_the_file_away))],
}  # fmt: skip

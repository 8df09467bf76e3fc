"Answers to the exercises of syncs: the course's, right ones of another style, and wrong ones."

import collections
import concurrent.futures
import contextlib
import itertools
import math
import queue
import statistics
import threading

import torch
from torch.nn import functional as F

from course_lib.syncs import solutions

REFERENCE = {number: getattr(solutions, names[0]) for number, names in solutions.EXERCISES.items()}


# --- syncs.1: seven syncs --------------------------------------------------------------


def _train(model, opt, batches, log, every, *, clip=None, worst=None, guess_of=None, say=None, unknown=True,
           keep=None):  # fmt: skip
    "The course's loop, in which some parts can be done otherwise."
    best, right, guesses, hardest, kept = None, 0, 0, [], []
    for step, (x, y) in enumerate(batches):
        known = y >= 0
        logits = model(x)
        each = F.cross_entropy(logits, y.clamp(min=0), reduction="none")
        each = each * known if unknown else each
        loss = (each * known).sum() / known.sum()
        opt.zero_grad()
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        for p in model.parameters():
            p.grad *= clip(norm) if clip else (1 / norm).clamp(max=1)
        opt.step()
        loss, guess = loss.detach(), logits.argmax(1)
        right = right + (known & (guess == y)).sum()
        classes = torch.arange(logits.shape[1], device=x.device)
        guesses = guesses + (guess_of(guess, classes) if guess_of else (guess[:, None] == classes).sum(0))
        best = loss if best is None else torch.minimum(best, loss)
        hardest.append(worst(x, each) if worst else x[each.argmax()[None]])
        if step % every == 0:
            (say or kept.append)((step, keep(step, loss) if keep else loss))
    for step, loss in kept:
        log(f"step {step}: loss {loss:.4f}")
    found = {"best": best.item(), "right": right.item(), "guesses": guesses.tolist()}
    return found | {"hardest": torch.cat(hardest)}


def keeps_everything_and_reads_at_the_end(model, opt, batches, log=print, every=10):
    "Right: lists in the loop, the sums after it; one_hot, gather, clip_grad_norm_."
    losses, hits, counts, hardest = [], [], [], []
    for x, y in batches:
        logits = model(x)
        picked = logits.log_softmax(1).gather(1, y.clamp(min=0)[:, None])[:, 0]
        each = torch.where(y < 0, torch.zeros(()), -picked)
        losses.append(each.sum() / (y >= 0).float().sum())
        opt.zero_grad(set_to_none=False)
        losses[-1].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        hits.append((logits.argmax(1) == y).sum())
        counts.append(F.one_hot(logits.argmax(1), logits.shape[1]).sum(0))
        hardest.append(x.index_select(0, each.argmax(0, keepdim=True)))
    losses = torch.stack(losses).tolist()
    for step in range(0, len(losses), every):
        log(f"step {step}: loss {losses[step]:.4f}")
    return {
        "best": min(losses),
        "right": int(sum(hits)),
        "guesses": sum(counts),
        "hardest": torch.cat(hardest),
    }


def by_scatter_add(model, opt, batches, log=print, every=10):
    "Right: guesses by scatter_add_, the factor by torch.where."

    def guess_of(guess, classes):
        return torch.zeros_like(classes).scatter_add_(0, guess, torch.ones_like(guess))

    clip = lambda norm: torch.where(norm > 1, 1 / norm, torch.ones(()))  # noqa: E731
    return _train(model, opt, batches, log, every, clip=clip, guess_of=guess_of)


def leaves_the_index(*args):
    return _train(*args, worst=lambda x, each: x[each.argmax()][None])


def reads_late_but_within_the_loop(*args):
    kept = []

    def say(pair):
        kept.append(pair)
        if len(kept) > 1:
            step, loss = kept[-2]
            args[3](f"step {step}: loss {loss:.4f}")

    out = _train(*args, say=say)
    args[3](f"step {kept[-1][0]}: loss {kept[-1][1]:.4f}")
    return out


def takes_all_batches_first(model, opt, batches, log, every):
    return solutions.train(model, opt, list(batches), log, every)


def logs_every_step(model, opt, batches, log, every):
    return solutions.train(model, opt, batches, log, 1)


def scales_every_gradient_to_one(*args):
    return _train(*args, clip=lambda norm: 1 / norm)


def the_hardest_may_be_unknown(*args):
    return _train(*args, unknown=False)


def counts_by_an_operator_that_waits(*args):
    def guess_of(guess, classes):
        return torch.histc(guess.float(), len(classes), 0, len(classes) - 1).long()

    return _train(*args, guess_of=guess_of)


def copies_a_number_in_every_step(*args):
    return _train(*args, clip=lambda norm: torch.minimum(1 / norm, torch.tensor(1.0, device=norm.device)))


def counts_on_another_device(*args):
    def guess_of(guess, classes):
        return (guess[:, None] == torch.arange(len(classes))).sum(0)

    return _train(*args, guess_of=guess_of)


def keeps_every_batch(*args):
    kept = []
    return _train(*args, worst=lambda x, each: kept.append(x) or x[each.argmax()[None]])


def writes_losses_to_ordinary_memory(*args):
    losses = torch.zeros(100)
    return _train(*args, keep=lambda step, loss: losses[step].copy_(loss))


def converts_to_a_tensor_of_the_cpu(*args):
    return _train(*args, keep=lambda step, loss: loss.double().type(torch.FloatTensor))


def sets_training_mode(model, *rest):
    return solutions.train(model.train(), *rest)


def changes_the_labels(model, opt, batches, log, every):
    changed = ((x, y.clamp_(min=-1)) for x, y in batches)
    return solutions.train(model, opt, changed, log, every)


# --- syncs.2: the watch on a thread ----------------------------------------------------


class ByAnExecutor:
    "Right: a pool of one thread, and a semaphore that bounds what waits."

    def __init__(self, fetch, within):
        self.fetch, self.free, self.known = fetch, threading.Semaphore(within), False
        self.pool = concurrent.futures.ThreadPoolExecutor(1)

    def look(self, copy):
        copy.wait()
        self.known = self.known or not math.isfinite(copy.read())
        self.free.release()

    def __call__(self, loss):
        self.free.acquire()
        self.pool.submit(self.look, self.fetch(loss))
        return self.known

    def finish(self):
        self.pool.shutdown(wait=True)
        return self.known


class ByACondition:
    "Right: a deque and a condition in place of a queue."

    def __init__(self, fetch, within):
        self.fetch, self.within, self.copies, self.bad, self.over = (
            fetch,
            within,
            collections.deque(),
            False,
            False,
        )
        self.changed = threading.Condition()
        self.thread = threading.Thread(target=self.look)
        self.thread.daemon = True
        self.thread.start()

    def look(self):
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.copies or self.over)
                if not self.copies:
                    return
                copy = self.copies[0]
            copy.wait()
            number = copy.read()
            with self.changed:
                self.bad = self.bad or number != number or abs(number) == math.inf
                self.copies.popleft()
                self.changed.notify_all()

    def __call__(self, loss):
        copy = self.fetch(loss)
        with self.changed:
            self.changed.wait_for(lambda: len(self.copies) < self.within)
            self.copies.append(copy)
            self.changed.notify_all()
            return self.bad

    def finish(self):
        with self.changed:
            self.over = True
            self.changed.notify_all()
        self.thread.join()
        return self.bad


class WaitsInTheCall(solutions.NanWatch):
    def __call__(self, loss):
        copy = self.fetch(loss)
        copy.wait()
        if not math.isfinite(copy.read()):
            self.bad.set()
        return self.bad.is_set()


class AnyNumberMayWait(solutions.NanWatch):
    def __init__(self, fetch, within):
        super().__init__(fetch, 1)


class OneMoreMayWait(solutions.NanWatch):
    def __init__(self, fetch, within):
        super().__init__(fetch, within + 1)


class StopsLookingAtTheFirst(solutions.NanWatch):
    def look(self):
        while not self.bad.is_set() and (copy := self.copies.get()) is not None:
            copy.wait()
            if not math.isfinite(copy.read()):
                self.bad.set()


class ReadsWithoutWaiting(solutions.NanWatch):
    def look(self):
        while (copy := self.copies.get()) is not None:
            if not math.isfinite(copy.read()):
                self.bad.set()


class CopiesOnTheThread(solutions.NanWatch):
    def look(self):
        while (loss := self.copies.get()) is not None:
            copy = self.fetch(loss)
            copy.wait()
            if not math.isfinite(copy.read()):
                self.bad.set()

    def __call__(self, loss):
        self.copies.put(loss.detach())
        return self.bad.is_set()


class MissesInfinity(solutions.NanWatch):
    def look(self):
        while (copy := self.copies.get()) is not None:
            copy.wait()
            if math.isnan(copy.read()):
                self.bad.set()


class WaitsForASecond(solutions.NanWatch):
    def finish(self):
        self.copies.put(None)
        self.thread.join(1)
        return self.bad.is_set()


class LosesWhatIsLate(solutions.NanWatch):
    def __call__(self, loss):
        with contextlib.suppress(queue.Full):
            self.copies.put(self.fetch(loss), timeout=0.5)
        return self.bad.is_set()


class LeavesTheThread(solutions.NanWatch):
    def finish(self):
        while not self.copies.empty():
            pass
        return self.bad.is_set()


class EndsWhereThereIsRoom(solutions.NanWatch):
    def finish(self):
        self.copies.put_nowait(None)
        self.thread.join()
        return self.bad.is_set()


class SpinsInTheCall(solutions.NanWatch):
    def __call__(self, loss):
        copy = self.fetch(loss)
        while self.copies.full():
            pass
        self.copies.put(copy)
        return self.bad.is_set()


class SpinsFromTheFirstCall(solutions.NanWatch):
    def __init__(self, fetch, within):
        self.fetch, self.copies, self.bad = fetch, queue.Queue(within - 1), threading.Event()
        self.thread = None

    def look(self):
        copy = 0
        while copy is not None:
            if not self.copies.empty() and (copy := self.copies.get()) is not None:
                copy.wait()
                self.bad.set() if not math.isfinite(copy.read()) else None

    def __call__(self, loss):
        if self.thread is None:
            self.thread = threading.Thread(target=self.look, daemon=True)
            self.thread.start()
        return super().__call__(loss)


class KeepsEveryLoss(solutions.NanWatch):
    def __call__(self, loss):
        self.losses = [*getattr(self, "losses", []), loss]
        return super().__call__(loss)


# --- syncs.3: the largest gap ----------------------------------------------------------


GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


def by_merging(events):
    "Right: merge the busy times first, then look between them."
    work = sorted([e["ts"], e["ts"] + e["dur"]] for e in events if e["ph"] == "X" and e["cat"] in GPU_WORK)
    merged = work[:1]
    for a, b in work[1:]:
        if a <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], b)
        else:
            merged.append([a, b])
    holes = [(b[0] - a[1], a[1]) for a, b in itertools.pairwise(merged)]
    return [max(holes)[1], max(holes)[0], _cause(events, max(holes)[1])] if holes else None


def by_counting_starts_and_ends(events):
    "Right: a sweep over starts and ends; a gap is where none is open."
    marks = sorted((t, d) for e in events if e["ph"] == "X" and e["cat"] in GPU_WORK
                   for t, d in ((e["ts"], -1), (e["ts"] + e["dur"], 1)))  # fmt: skip
    best, open_ = None, 0
    for (t, d), (after, _) in itertools.pairwise(marks):
        open_ -= d
        if open_ == 0 and after > t and (best is None or after - t > best[1]):
            best = t, after - t
    return best and (*best, _cause(events, best[0]))


def _waits(e):
    return e["name"].endswith("Synchronize")


def _cause(events, at, call_of=_waits, outer=max, same=("pid", "tid"), whole=True):
    spans = [e for e in events if e.get("ph") == "X" and e["ts"] <= at <= e["ts"] + e["dur"]]
    call = next((e for e in spans if e["cat"] in ("cuda_runtime", "cuda_driver") and call_of(e)), None)
    if call is None:
        return None
    begin, end = (call["ts"], call["ts"] + call["dur"]) if whole else (at, at)
    around = [e for e in spans if e["cat"] == "cpu_op" and all(e[k] == call[k] for k in same)
              and e["ts"] <= begin and e["ts"] + e["dur"] >= end]  # fmt: skip
    return outer(around, key=lambda e: e["dur"], default=call)["name"]


def _other_cause(**how):
    def answer(events):
        gap = solutions.largest_gap(events)
        return gap and (gap[0], gap[1], _cause(events, gap[0], **how))

    return answer


the_innermost_operator = _other_cause(outer=min)
operators_around_the_moment = _other_cause(whole=False)
an_operator_of_another_process = _other_cause(same=("tid",))
any_call_that_synchronizes = _other_cause(call_of=lambda e: "Synchronize" in e["name"])


def takes_events_of_any_phase(events):
    return solutions.largest_gap([e | {"ph": "X"} for e in events if "dur" in e])


def takes_all_that_begins_with_gpu(events):
    cats = {"gpu_user_annotation": "kernel"}
    return solutions.largest_gap([e | {"cat": cats.get(e.get("cat"), e.get("cat"))} for e in events])


def a_gap_of_nothing(events):
    work = sorted((e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["cat"] in GPU_WORK)
    return solutions.largest_gap(events) or ((sum(work[-1]), 0, None) if len(work) > 2 else None)


def one_piece_for_each_start(events):
    work = {e["ts"]: e for e in events if e["ph"] == "X" and e["cat"] in GPU_WORK}
    return solutions.largest_gap([e for e in events if e.get("cat") not in GPU_WORK] + [*work.values()])


def kernels_only(events):
    return solutions.largest_gap([e for e in events if not e.get("cat", "").startswith("gpu_mem")])


def also_after_the_last_work(events):
    spans = [(e["ts"], e["ts"] + e["dur"]) for e in events if e.get("ph") == "X"]
    end = {"ph": "X", "cat": "kernel", "name": "end", "ts": max((b for _, b in spans), default=0), "dur": 0}
    return solutions.largest_gap([*events, {**end, "pid": 0, "tid": 0}])


def forgets_kernels_under_kernels(events):
    work = sorted((e for e in events if e["ph"] == "X" and e["cat"] in GPU_WORK), key=lambda e: e["ts"])
    found = [(b["ts"] - a["ts"] - a["dur"], a["ts"] + a["dur"]) for a, b in itertools.pairwise(work)]
    duration, start = max(found, default=(0, 0))
    return (start, duration, _cause(events, start)) if duration > 0 else None


# --- syncs.4: vectorise ----------------------------------------------------------------


def by_a_batched_product(x, lengths):
    "Right: the mask as a row of weights, one bmm; what doesn't count is replaced before."
    inside = torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1).lt(lengths.unsqueeze(1))
    clean = torch.where(inside.unsqueeze(2), x, x.new_zeros(()))
    weights = inside.to(x.dtype) / lengths.clamp(min=1).to(x.dtype).unsqueeze(1)
    return torch.einsum("nt,ntd->nd", weights, clean)


def by_cumulated_sums(x, lengths):
    "Right: sums up to each row, of which one is picked."
    sums = F.pad(x, (0, 0, 1, 0)).cumsum(1)
    picked = lengths[:, None, None].expand(-1, 1, x.shape[2])
    return sums.gather(1, picked)[:, 0] / lengths[:, None].clamp(min=1)


def by_a_running_sum(x, lengths):
    "Right: replaced, averaged over all rows, and scaled."
    outside = torch.arange(x.shape[1], device=x.device)[None] >= lengths[:, None]
    total = x.clone().masked_fill_(outside[:, :, None], 0).mean(1) * x.shape[1]
    return total.div(lengths.clamp(min=1)[:, None])


def multiplies_by_the_mask(x, lengths):
    inside = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
    return (x * inside[..., None]).sum(1) / lengths[:, None].clamp(min=1)


def a_loop_over_the_rows(x, lengths):
    total = x.new_zeros(x.shape[0], x.shape[2])
    for t in range(x.shape[1]):
        total = total + torch.where((lengths > t)[:, None], x[:, t], 0)
    return total / lengths[:, None].clamp(min=1)


def by_a_boolean_mask(x, lengths):
    inside = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
    rows = torch.arange(x.shape[0], device=x.device)[:, None].expand(inside.shape)[inside]
    total = x.new_zeros(x.shape[0], x.shape[2]).index_add_(0, rows, x[inside])
    return total / lengths[:, None].clamp(min=1)


def by_segments(x, lengths):
    "segment_reduce waits on a GPU, and no list says so."
    if not len(x):
        return x.new_zeros(0, x.shape[2])
    steps = torch.stack([lengths, x.shape[1] - lengths], 1).flatten()
    flat = x.reshape(-1, x.shape[2])
    sums = torch.segment_reduce(flat, "sum", lengths=steps, initial=0).view(x.shape[0], 2, x.shape[2])[:, 0]
    return sums / lengths[:, None].clamp(min=1)


def always_single_precision(x, lengths):
    return solutions.pool(x.float(), lengths)


def without_a_gradient(x, lengths):
    return solutions.pool(x.detach(), lengths)


def into_ordinary_memory(x, lengths):
    out = torch.zeros(x.shape[0], x.shape[2], dtype=x.dtype)
    return out.copy_(solutions.pool(x, lengths))


def a_gradient_of_nothing(x, lengths):
    return solutions.pool(x.detach(), lengths).requires_grad_()


def with_a_zero_of_ordinary_memory(x, lengths):
    inside = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
    zero = torch.asarray(0.0, dtype=x.dtype, device=x.device)
    return torch.where(inside[..., None], x, zero).sum(1) / lengths[:, None].clamp(min=1)


def cleans_nan_first(x, lengths):
    return solutions.pool(x.nan_to_num(nan=0.0), lengths)


# --- syncs.5: slow steps ---------------------------------------------------------------


class _Window:
    "Judges by the last `window` steps after `warmup`."

    def __init__(self, warmup, window):
        self.warmup, self.calls, self.recent = warmup, 0, collections.deque(maxlen=window)

    def __call__(self, seconds):
        self.calls += 1
        slow = len(self.recent) == self.recent.maxlen and bool(self.judge(seconds))
        if self.calls > self.warmup:
            self.recent.append(seconds)
        return slow

    def spread(self):
        level = statistics.median(self.recent)
        return level, 1.4826 * statistics.median(abs(t - level) for t in self.recent)


class ByQuartiles(_Window):
    "Right: the distance of the quartiles in place of the MAD."

    def judge(self, seconds):
        low, level, high = statistics.quantiles(self.recent, n=4)
        return seconds > 1.2 * level and seconds - level > 8.5 * (high - low) / 1.349


class BySorting(_Window):
    "Right: two sorted lists, and two comparisons."

    def judge(self, seconds):
        half = len(self.recent) // 2
        level = sorted(self.recent)[half]
        return (
            seconds > 1.22 * level
            and seconds - level > 13 * sorted(abs(t - level) for t in self.recent)[half]
        )


class OnlyUnusual(_Window):
    def judge(self, seconds):
        level, spread = self.spread()
        return seconds > level + 8 * spread


class OnlyLonger(_Window):
    def judge(self, seconds):
        return seconds > 1.35 * statistics.median(self.recent)


class EightStandardDeviations(_Window):
    def judge(self, seconds):
        level = statistics.fmean(self.recent)
        return seconds > max(level + 8 * statistics.pstdev(self.recent), 1.2 * level)


class FastOnesToo(_Window):
    def judge(self, seconds):
        level, spread = self.spread()
        return abs(seconds - level) > max(8 * spread, 0.2 * level)


class KeepsEveryStep(solutions.SlowSteps):
    def __call__(self, seconds):
        self.all = getattr(self, "all", [])
        self.all.append(seconds)
        return super().__call__(seconds)


class LearnsFromOrdinarySteps(_Window):
    def __call__(self, seconds):
        self.calls += 1
        slow = len(self.recent) == self.recent.maxlen and self.judge(seconds)
        if self.calls > self.warmup and not slow:
            self.recent.append(seconds)
        return slow

    def judge(self, seconds):
        level, spread = self.spread()
        return seconds > level + max(8 * spread, 0.2 * level)


class IgnoresItsArguments(solutions.SlowSteps):
    def __init__(self, warmup, window):
        super().__init__()


RIGHT = {
    "syncs.1": [keeps_everything_and_reads_at_the_end, by_scatter_add],
    "syncs.2": [ByAnExecutor, ByACondition],
    "syncs.3": [by_merging, by_counting_starts_and_ends],
    "syncs.4": [by_a_batched_product, by_a_running_sum, by_cumulated_sums],
    "syncs.5": [ByQuartiles, BySorting],
}
MUTANTS = {
    "syncs.1": [leaves_the_index, reads_late_but_within_the_loop, takes_all_batches_first, logs_every_step,
                scales_every_gradient_to_one, the_hardest_may_be_unknown, counts_by_an_operator_that_waits,
                copies_a_number_in_every_step, counts_on_another_device,
                keeps_every_batch, changes_the_labels, writes_losses_to_ordinary_memory,
                converts_to_a_tensor_of_the_cpu, sets_training_mode],
    "syncs.2": [WaitsInTheCall, AnyNumberMayWait, OneMoreMayWait, StopsLookingAtTheFirst, ReadsWithoutWaiting,
                CopiesOnTheThread, MissesInfinity, LeavesTheThread, KeepsEveryLoss, WaitsForASecond,
                LosesWhatIsLate, EndsWhereThereIsRoom, SpinsInTheCall, SpinsFromTheFirstCall],
    "syncs.3": [kernels_only, forgets_kernels_under_kernels, the_innermost_operator,
                an_operator_of_another_process, any_call_that_synchronizes, operators_around_the_moment,
                takes_events_of_any_phase, takes_all_that_begins_with_gpu, a_gap_of_nothing,
                one_piece_for_each_start, also_after_the_last_work],
    "syncs.4": [multiplies_by_the_mask, a_loop_over_the_rows, by_a_boolean_mask, by_segments,
                always_single_precision, cleans_nan_first, without_a_gradient, into_ordinary_memory,
                a_gradient_of_nothing, with_a_zero_of_ordinary_memory],
    "syncs.5": [OnlyUnusual, OnlyLonger, EightStandardDeviations, FastOnesToo, KeepsEveryStep,
                IgnoresItsArguments, LearnsFromOrdinarySteps],
}  # fmt: skip

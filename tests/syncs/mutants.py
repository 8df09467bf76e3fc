"Wrong answers to lesson syncs's exercises. Each computes something, and each is what somebody would write."

import collections
import itertools
import math
import statistics

import torch
from torch.nn import functional as F

from course_lib import syncs
from course_lib.syncs import solutions
from course_lib.syncs import trace as syncs_trace


class Slow(syncs.SlowSteps):
    "The library's detector with the exercise's order of arguments."

    def __init__(self, warmup=20, window=100):
        super().__init__(window, warmup)


REFERENCE = {
    number: tuple(getattr(solutions, name) for name in names) for number, names in solutions.EXERCISES.items()
}


# --- syncs.1: seven syncs --------------------------------------------------------------


def _train(model, opt, batches, log, every, *, loss_of=None, clip=None, count=None, best_of=None,
           guess_of=None, worst=None, say=None, unknown=True):  # fmt: skip
    "The loop of the library, in which any of seven parts can be done otherwise."
    best, right, guesses, hardest, kept = None, 0, 0, [], []
    for step, (x, y) in enumerate(batches):
        known = y >= 0
        logits = model(x)
        each = F.cross_entropy(logits, y.clamp(min=0), reduction="none")
        each = each * known if unknown else each
        loss = loss_of(each, known) if loss_of else each.sum() / known.sum()
        opt.zero_grad()
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        scale = clip(norm) if clip else (1 / norm).clamp(max=1)
        for p in model.parameters():
            p.grad *= scale
        opt.step()
        loss = loss.detach()
        guess = logits.argmax(1)
        right = right + (count(known, guess, y) if count else (known & (guess == y)).sum())
        classes = torch.arange(logits.shape[1])
        guesses = guesses + (guess_of(guess, classes) if guess_of else (guess[:, None] == classes).sum(0))
        best = loss if best is None else (best_of or torch.minimum)(best, loss)
        hardest.append(worst(x, each) if worst else x[each.argmax()[None]])
        if say:
            say(step, loss, log, every)
        elif step % every == 0:
            kept.append((step, loss))
    for step, loss in kept:
        log(f"step {step}: loss {loss:.4f}")
    return {"best": best.item(), "right": right if isinstance(right, int) else right.item(),
            "guesses": guesses.tolist(), "hardest": torch.cat(hardest)}  # fmt: skip


def the_starter(model, opt, batches, log=print, every=10):
    best, right, guesses, hardest = math.inf, 0, 0, []
    for step, (x, y) in enumerate(batches):
        known = y >= 0
        logits = model(x)
        each = F.cross_entropy(logits, y.clamp(min=0), reduction="none") * known
        loss = each[known].mean()
        opt.zero_grad()
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        if norm > 1:
            for p in model.parameters():
                p.grad /= norm
        opt.step()
        loss = loss.detach()
        guess = logits.argmax(1)
        right += (known & (guess == y)).sum().item()
        guesses = guesses + torch.bincount(guess, minlength=logits.shape[1])
        best = min(best, loss)
        hardest.append(x[each.argmax()])
        if step % every == 0:
            log(f"step {step}: loss {loss:.4f}")
    return {"best": float(best), "right": right, "guesses": guesses.tolist(), "hardest": torch.stack(hardest)}


def leaves_the_mask(*args):
    return _train(*args, loss_of=lambda each, known: each[known].mean())


def leaves_the_if(*args):
    return _train(*args, clip=lambda norm: 1 / norm if norm > 1 else 1.0)


def leaves_the_item(*args):
    return _train(*args, count=lambda known, guess, y: (known & (guess == y)).sum().item())


def leaves_the_bincount(*args):
    return _train(*args, guess_of=lambda guess, c: torch.bincount(guess, minlength=len(c)))


def leaves_min(*args):
    return _train(*args, best_of=min)


def leaves_the_index(*args):
    return _train(*args, worst=lambda x, each: x[each.argmax()][None])


def leaves_the_print(*args):
    def say(step, loss, log, every):
        if step % every == 0:
            log(f"step {step}: loss {loss:.4f}")

    return _train(*args, say=say)


def reads_late_but_within_the_loop(*args):
    kept = []

    def say(step, loss, log, every):
        if step % every == 0:
            kept.append((step, loss))
            if len(kept) > 1:
                step, loss = kept.pop(0)
                log(f"step {step}: loss {loss:.4f}")

    out = _train(*args, say=say)
    for step, loss in kept:
        args[3](f"step {step}: loss {loss:.4f}")
    return out


def takes_all_batches_first(model, opt, batches, log, every):
    return the_starter(model, opt, list(batches), log, every)


def drops_the_log(*args):
    return _train(*args, say=lambda *_: None)


def logs_every_step(model, opt, batches, log, every):
    return syncs.train(model, opt, batches, log, 1)


def logs_one_step_late(model, opt, batches, log, every):
    lines = []
    out = syncs.train(model, opt, batches, lines.append, every)
    for line in lines:
        step, rest = line.split(":", 1)
        log(f"step {int(step[5:]) + 1}:{rest}")
    return out


def logs_the_best_so_far(model, opt, batches, log, every):
    lines, best = [], math.inf
    out = syncs.train(model, opt, batches, lines.append, every)
    for line in lines:
        best = min(best, float(line.split()[-1]))
        log(f"{line.rsplit(' ', 1)[0]} {best:.4f}")
    return out


def drops_the_hardest(*args):
    return syncs.train(*args) | {"hardest": torch.empty(0)}


def drops_the_best(*args):
    out = syncs.train(*args)
    del out["best"]
    return out


def forgets_to_clip(*args):
    return _train(*args, clip=lambda norm: 1.0)


def scales_every_gradient_to_one(*args):
    return _train(*args, clip=lambda norm: 1 / norm)


def averages_over_the_unknown_too(*args):
    return _train(*args, loss_of=lambda each, known: each.mean())


def learns_from_the_unknown(*args):
    return _train(*args, unknown=False, loss_of=lambda each, known: each.mean())


def the_hardest_may_be_unknown(*args):
    return _train(*args, unknown=False, loss_of=lambda each, known: (each * known).sum() / known.sum())


def counts_zeros_as_right(*args):
    return _train(*args, count=lambda known, guess, y: (guess == y.clamp(min=0)).sum())


def best_is_the_last(*args):
    return _train(*args, best_of=lambda best, loss: loss)


def guesses_of_the_last_batch(model, opt, batches, log, every):
    last = []

    def guess_of(guess, classes):
        last[:] = [(guess[:, None] == classes).sum(0)]
        return last[0]

    out = _train(model, opt, batches, log, every, guess_of=guess_of)
    return out | {"guesses": last[0].tolist()}


# --- syncs.2: the watch ----------------------------------------------------------------


class reads_every_loss:
    def __init__(self, fetch, every):
        pass

    def __call__(self, loss):
        return bool(torch.isnan(loss))


class reads_every_kth_loss(syncs.CopyWatch):
    "Without remembering the losses between."

    def __call__(self, loss):
        self.flag = None
        return super().__call__(loss)


class waits_at_once(syncs.CopyWatch):
    def __call__(self, loss):
        super().__call__(loss)
        if self.copy is not None:
            self._settle()
        return self.stop


class never_waits(syncs.CopyWatch):
    "On a slow GPU the answer comes any number of steps late."

    def __call__(self, loss):
        self.calls += 1
        flag = loss.detach() * 0
        self.flag = flag if self.flag is None else self.flag + flag
        if self.copy is not None and self.copy.ready():
            self._settle()
        if self.copy is None and self.calls % self.every == 0:
            self.copy = self.fetch(self.flag)
        return self.stop


class reads_before_it_is_ready(syncs.CopyWatch):
    def _settle(self):
        self.stop = self.stop or not math.isfinite(self.copy.read())
        self.copy = None


class looks_only_when_the_next_is_due(syncs.CopyWatch):
    def __call__(self, loss):
        self.calls += 1
        flag = loss.detach() * 0
        self.flag = flag if self.flag is None else self.flag + flag
        if self.calls % self.every == 0:
            if self.copy is not None:
                self._settle()
            self.copy = self.fetch(self.flag)
        return self.stop


class waits_two_periods(syncs.CopyWatch):
    def __call__(self, loss):
        self.calls += 1
        flag = loss.detach() * 0
        self.flag = flag if self.flag is None else self.flag + flag
        if self.copy is not None and (self.copy.ready() or self.calls % (3 * self.every) == 0):
            self._settle()
        if self.copy is None and self.calls % self.every == 0:
            self.copy = self.fetch(self.flag)
        return self.stop


class misses_infinity(syncs.CopyWatch):
    def __call__(self, loss):
        return super().__call__(loss.detach().clamp(-1e30, 1e30))


class keeps_the_graph(syncs.CopyWatch):
    def __call__(self, loss):
        self.calls += 1
        self.flag = loss * 0 if self.flag is None else self.flag + loss * 0
        due = self.calls % self.every == 0
        if self.copy is not None and (due or self.copy.ready()):
            self._settle()
        if due:
            self.copy = self.fetch(self.flag)
        return self.stop


class copies_at_every_step(syncs.CopyWatch):
    def __init__(self, fetch, every):
        self.deep, self.flying, self.stop, self.fetch = 2 * every - 1, collections.deque(), False, fetch

    def __call__(self, loss):
        self.flying.append(self.fetch(loss.detach()))
        while self.flying and (len(self.flying) > self.deep or self.flying[0].ready()):
            copy = self.flying.popleft()
            copy.wait()
            self.stop = self.stop or not math.isfinite(copy.read())
        return self.stop


class answers_with_a_tensor(syncs.CopyWatch):
    def __call__(self, loss):
        return torch.tensor(super().__call__(loss))


class always_stops(syncs.CopyWatch):
    def __call__(self, loss):
        super().__call__(loss)
        return self.calls > 2 * self.every


class forgets_at_the_next_copy(syncs.CopyWatch):
    "The flag starts anew with every copy, before the copy is made."

    def __call__(self, loss):
        if (self.calls + 1) % self.every == 0:
            self.flag = None
        return super().__call__(loss)


class stops_at_large_losses(syncs.CopyWatch):
    def __call__(self, loss):
        return super().__call__(torch.where(loss.detach() > 3.5, math.nan, loss.detach()))


# --- syncs.3: vectorise ----------------------------------------------------------------


def one_row_at_a_time(x, lengths):
    return syncs_rows(x, lengths.tolist())


def syncs_rows(x, lengths):
    out = torch.zeros(x.shape[0], x.shape[2], dtype=x.dtype)
    for i, length in enumerate(lengths):
        if length:
            out[i] = x[i, :length].mean(0)
    return out


def a_loop_over_the_samples_without_reading(x, lengths):
    inside = torch.arange(x.shape[1]) < lengths[:, None]
    out = [row.masked_fill(~m[:, None], 0).sum(0) for row, m in zip(x, inside, strict=True)]
    total = torch.stack(out) if out else x.new_zeros(0, x.shape[2])
    return total / lengths[:, None].clamp(min=1)


def a_loop_over_the_rows(x, lengths):
    total = x.new_zeros(x.shape[0], x.shape[2])
    for t in range(x.shape[1]):
        total = total + torch.where((lengths > t)[:, None], x[:, t], 0)
    return total / lengths[:, None].clamp(min=1)


def multiplies_by_the_mask(x, lengths):
    inside = torch.arange(x.shape[1]) < lengths[:, None]
    return (x * inside[..., None]).sum(1) / lengths[:, None].clamp(min=1)


def cleans_nan_first(x, lengths):
    return syncs.pool(x.nan_to_num(nan=0.0), lengths)


def mean_of_what_is_no_nan(x, lengths):
    inside = torch.arange(x.shape[1]) < lengths[:, None]
    return x.masked_fill(~inside[..., None], math.nan).nanmean(1).nan_to_num(nan=0.0)


def divides_by_the_longest(x, lengths):
    return syncs.pool(x, lengths) * lengths[:, None] / x.shape[1]


def nan_for_no_rows(x, lengths):
    inside = torch.arange(x.shape[1]) < lengths[:, None]
    return x.masked_fill(~inside[..., None], 0).sum(1) / lengths[:, None]


def one_row_too_many(x, lengths):
    inside = torch.arange(x.shape[1]) <= lengths[:, None]
    return x.masked_fill(~inside[..., None], 0).sum(1) / lengths[:, None].clamp(min=1)


def sums_instead_of_means(x, lengths):
    return syncs.pool(x, lengths) * lengths[:, None]


def by_a_boolean_mask(x, lengths):
    inside = torch.arange(x.shape[1]) < lengths[:, None]
    rows = torch.arange(x.shape[0])[:, None].expand(inside.shape)[inside]
    total = x.new_zeros(x.shape[0], x.shape[2]).index_add_(0, rows, x[inside])
    return total / lengths[:, None].clamp(min=1)


def keeps_the_dimension(x, lengths):
    return syncs.pool(x, lengths)[:, None]


# --- syncs.4: the largest gap ----------------------------------------------------------


def _gap_of(events, keep=lambda e: e.get("cat") in syncs_trace.GPU_WORK, cause=None):
    work = syncs_trace.busy([{**e, "cat": "kernel"} for e in events if e.get("ph") == "X" and keep(e)])
    found = [(b[0] - a[1], a[1]) for a, b in itertools.pairwise(work)]
    if not found:
        return None
    duration, start = max(found)
    return start, duration, (cause or syncs_trace.cause)(events, start)


def kernels_only(events):
    return _gap_of(events, lambda e: e["cat"] == "kernel")


def the_first_stream_only(events):
    streams = sorted({e["tid"] for e in events if e.get("cat") in syncs_trace.GPU_WORK})
    return _gap_of(events, lambda e: e["cat"] in syncs_trace.GPU_WORK and e["tid"] == streams[0])


def the_largest_gap_of_any_stream(events):
    streams = {e["tid"] for e in events if e.get("cat") in syncs_trace.GPU_WORK}
    found = [
        _gap_of(events, lambda e, s=s: e["cat"] in syncs_trace.GPU_WORK and e["tid"] == s) for s in streams
    ]
    return max((g for g in found if g), key=lambda g: g[1], default=None)


def in_the_order_of_the_file(events):
    work = [e for e in events if e.get("cat") in syncs_trace.GPU_WORK]
    found = [(b["ts"] - a["ts"] - a["dur"], a["ts"] + a["dur"]) for a, b in itertools.pairwise(work)]
    if not found or max(found)[0] <= 0:
        return None
    duration, start = max(found)
    return start, duration, syncs_trace.cause(events, start)


def forgets_kernels_under_kernels(events):
    "Sorted by start, but the end of the one before is taken for the end of all before."
    work = sorted((e for e in events if e.get("cat") in syncs_trace.GPU_WORK), key=lambda e: e["ts"])
    found = [(b["ts"] - a["ts"] - a["dur"], a["ts"] + a["dur"]) for a, b in itertools.pairwise(work)]
    if not found or max(found)[0] <= 0:
        return None
    duration, start = max(found)
    return start, duration, syncs_trace.cause(events, start)


def the_first_gap(events):
    found = syncs_trace.gaps(events)
    return min(found) if found else None


def the_smallest_gap(events):
    return next(iter(syncs_trace.gaps(events)[::-1]), None)


def the_time_before_the_first_kernel_too(events):
    spans = [e for e in events if e.get("ph") == "X"]
    first = min(e["ts"] for e in spans)
    return _gap_of([*events, {"ph": "X", "cat": "kernel", "ts": first, "dur": 0.0}])


def the_end_of_the_gap(events):
    gap = syncs_trace.largest_gap(events)
    return gap and gap._replace(start=gap.start + gap.duration)


def the_call_itself(events):
    def cause(events, at):
        calls = [e for e in events if e.get("cat") in syncs_trace.CUDA_CALLS and "Synchronize" in e["name"]]
        return next((e["name"] for e in calls if e["ts"] <= at <= e["ts"] + e["dur"]), None)

    return _gap_of(events, cause=cause)


def _ops_at(events, at):
    return [e for e in events if e.get("cat") == "cpu_op" and e["ts"] <= at <= e["ts"] + e["dur"]]


def the_innermost_operator(events):
    def cause(events, at):
        whole = syncs_trace.cause(events, at)
        around = [e for e in _ops_at(events, at) if e["tid"] == 1]
        if whole is None or whole.endswith("Synchronize"):
            return whole
        return min(around, key=lambda e: e["dur"])["name"]

    return _gap_of(events, cause=cause)


def any_operator_at_that_moment(events):
    def cause(events, at):
        ops = [e for e in _ops_at(events, at) if e["tid"] == 1]
        return max(ops, key=lambda e: e["dur"])["name"] if ops else None

    return _gap_of(events, cause=cause)


def an_operator_of_any_thread(events):
    def cause(events, at):
        if syncs_trace.cause(events, at) is None:
            return None
        ops = _ops_at(events, at)
        return max(ops, key=lambda e: e["dur"])["name"] if ops else syncs_trace.cause(events, at)

    return _gap_of(events, cause=cause)


def the_annotation_around_it(events):
    def cause(events, at):
        around = [e for e in events if e.get("ph") == "X" and e["ts"] <= at <= e["ts"] + e["dur"]]
        return max(around, key=lambda e: e["dur"], default={"name": None})["name"]

    return _gap_of(events, cause=cause)


def the_call_that_begins_in_the_gap(events):
    def cause(events, at):
        gap = syncs_trace.largest_gap(events)
        calls = [e for e in events if e.get("cat") in syncs_trace.CUDA_CALLS and "Synchronize" in e["name"]]
        late = [e for e in calls if at < e["ts"] < at + gap.duration]
        return syncs_trace.cause(events, at) or (late[0]["name"] if late else None)

    return _gap_of(events, cause=cause)


def stream_synchronize_only(events):
    def cause(events, at):
        kept = [e for e in events if e.get("name") == "cudaStreamSynchronize" or e.get("cat") == "cpu_op"]
        return syncs_trace.cause(kept, at)

    return _gap_of(events, cause=cause)


def zero_for_no_gap(events):
    return syncs_trace.largest_gap(events) or (0.0, 0.0, None)


# --- syncs.5: slow steps ---------------------------------------------------------------


class _Window:
    "Judges by the last `window` steps after `warmup`."

    def __init__(self, warmup, window):
        self.warmup, self.calls, self.recent = warmup, 0, collections.deque(maxlen=window)

    def __call__(self, seconds):
        self.calls += 1
        if self.calls <= self.warmup:
            return False
        slow = len(self.recent) == self.recent.maxlen and bool(self.judge(seconds))
        self.recent.append(seconds)
        return slow


class twice_the_median(_Window):
    def judge(self, seconds):
        return seconds > 2 * statistics.median(self.recent)


class a_quarter_over_the_median(_Window):
    def judge(self, seconds):
        return seconds > 1.25 * statistics.median(self.recent)


class three_standard_deviations(_Window):
    def judge(self, seconds):
        return seconds > statistics.fmean(self.recent) + 3 * statistics.pstdev(self.recent)


class eight_standard_deviations(_Window):
    "The slow steps widen the deviation by which they are judged."

    def judge(self, seconds):
        return seconds > statistics.fmean(self.recent) + 8 * statistics.pstdev(self.recent)


class three_median_deviations(_Window):
    def judge(self, seconds):
        level = statistics.median(self.recent)
        return seconds > level + 3 * statistics.median(abs(t - level) for t in self.recent)


class longer_than_all_before(_Window):
    def judge(self, seconds):
        return seconds > max(self.recent)


class compared_with_the_step_before(_Window):
    def judge(self, seconds):
        return seconds > 1.4 * self.recent[-1]


class everything_unusual(_Window):
    "Fast steps too: a step of half the time is no slow step."

    def judge(self, seconds):
        level = statistics.median(self.recent)
        return abs(seconds - level) > 3.2 * 1.4826 * statistics.median(abs(t - level) for t in self.recent)


class never_slow(_Window):
    def judge(self, seconds):
        return False


class keeps_every_step(Slow):
    def __init__(self, warmup, window):
        super().__init__(warmup, window)
        self.all = []

    def __call__(self, seconds):
        self.all.append(seconds)
        return super().__call__(seconds)


class the_level_of_the_whole_run(_Window):
    def __init__(self, warmup, window):
        super().__init__(warmup, window)
        self.first = None

    def judge(self, seconds):
        if self.first is None:
            level = statistics.median(self.recent)
            self.first = level, 1.4826 * statistics.median(abs(t - level) for t in self.recent)
        return seconds > self.first[0] + 8 * self.first[1]


class warm_up_is_slow_too(Slow):
    def __init__(self, warmup, window):
        super().__init__(0, 10)


class a_moving_average(_Window):
    mean, var = None, 0.0

    def judge(self, seconds):
        if self.mean is None:
            self.mean, self.var = statistics.fmean(self.recent), statistics.pvariance(self.recent)
        slow = seconds > self.mean + 6 * math.sqrt(self.var)
        self.var = 0.9 * self.var + 0.1 * (seconds - self.mean) ** 2
        self.mean = 0.9 * self.mean + 0.1 * seconds
        return slow


MUTANTS = {
    "syncs.1": [
        the_starter,
        leaves_the_mask,
        leaves_the_if,
        leaves_the_item,
        leaves_the_bincount,
        leaves_min,
        leaves_the_index,
        leaves_the_print,
        reads_late_but_within_the_loop,
        takes_all_batches_first,
        drops_the_log,
        logs_every_step,
        logs_one_step_late,
        logs_the_best_so_far,
        drops_the_hardest,
        drops_the_best,
        forgets_to_clip,
        scales_every_gradient_to_one,
        averages_over_the_unknown_too,
        learns_from_the_unknown,
        the_hardest_may_be_unknown,
        counts_zeros_as_right,
        best_is_the_last,
        guesses_of_the_last_batch,
    ],
    "syncs.2": [
        reads_every_loss,
        reads_every_kth_loss,
        waits_at_once,
        never_waits,
        reads_before_it_is_ready,
        looks_only_when_the_next_is_due,
        waits_two_periods,
        misses_infinity,
        keeps_the_graph,
        copies_at_every_step,
        answers_with_a_tensor,
        always_stops,
        forgets_at_the_next_copy,
        stops_at_large_losses,
    ],
    "syncs.3": [
        one_row_at_a_time,
        a_loop_over_the_samples_without_reading,
        a_loop_over_the_rows,
        multiplies_by_the_mask,
        cleans_nan_first,
        mean_of_what_is_no_nan,
        divides_by_the_longest,
        nan_for_no_rows,
        one_row_too_many,
        sums_instead_of_means,
        by_a_boolean_mask,
        keeps_the_dimension,
    ],
    "syncs.4": [
        kernels_only,
        the_first_stream_only,
        the_largest_gap_of_any_stream,
        in_the_order_of_the_file,
        forgets_kernels_under_kernels,
        the_first_gap,
        the_smallest_gap,
        the_time_before_the_first_kernel_too,
        the_end_of_the_gap,
        the_call_itself,
        the_innermost_operator,
        any_operator_at_that_moment,
        an_operator_of_any_thread,
        the_annotation_around_it,
        the_call_that_begins_in_the_gap,
        stream_synchronize_only,
        zero_for_no_gap,
    ],
    "syncs.5": [
        twice_the_median,
        a_quarter_over_the_median,
        three_standard_deviations,
        eight_standard_deviations,
        three_median_deviations,
        longer_than_all_before,
        compared_with_the_step_before,
        everything_unusual,
        never_slow,
        keeps_every_step,
        the_level_of_the_whole_run,
        warm_up_is_slow_too,
        a_moving_average,
    ],
}

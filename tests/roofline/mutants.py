"Answers to the exercises of roofline: the course's, right ones of another style, and wrong ones."

import itertools
import math
import statistics
import time
from collections import defaultdict

import torch
from torch.utils.flop_counter import FlopCounterMode

from course_lib import roofline
from course_lib.roofline import solutions

REFERENCE = {number: getattr(solutions, names[0]) for number, names in solutions.EXERCISES.items()}
CUDA = torch.autograd.DeviceType.CUDA


# --- roofline.1: FLOPs and bytes ----------------------------------------------------------


def runs_the_operator(op, x, w, itemsize):
    "Right: the result's shape from torch, FLOPs by operator."
    a, b = (None if s is None else torch.empty(s, device="meta") for s in (x, w))
    out = {"matmul": lambda: a @ b, "bmm": lambda: a @ b, "add": lambda: a + b, "sum": lambda: a.sum(-1)}
    result = out.get(op, lambda: a)()
    each = {"matmul": 2 * x[-1], "bmm": 2 * x[-1], "add": 1, "sum": x[-1], "softmax": 5, "copy": 0}[op]
    return [each * result.numel(), itemsize * sum(t.numel() for t in (a, b, result) if t is not None)]


def by_loops_over_shapes(op, x, w, itemsize):
    "Right: the result's shape by hand, floats all the way."
    out = (*x[:-1], w[-1]) if op in ("matmul", "bmm") else x[:-1] if op == "sum" else x
    sizes = [1.0, 1.0, 1.0]
    for i, shape in enumerate((x, w or (0,), out)):
        for n in shape:
            sizes[i] *= n
    flops = {"matmul": 2 * sizes[2] * x[-1], "bmm": 2 * sizes[2] * x[-1], "add": sizes[2], "sum": sizes[0]}
    return flops.get(op, 5 * sizes[0] if op == "softmax" else 0), itemsize * sum(sizes)


def forgets_the_factor_2(op, x, w, itemsize):
    flops, nbytes = solutions.cost(op, x, w, itemsize)
    return (flops // 2 if op in ("matmul", "bmm") else flops), nbytes


def reads_the_weights_for_every_batch(op, x, w, itemsize):
    flops, nbytes = solutions.cost(op, x, w, itemsize)
    return flops, nbytes + (itemsize * math.prod(w) * (math.prod(x[:-2]) - 1) if op == "matmul" else 0)


def shares_the_weights_of_a_batched_product(op, x, w, itemsize):
    flops, nbytes = solutions.cost(op, x, w, itemsize)
    return flops, nbytes - (itemsize * math.prod(w) * (w[0] - 1) // w[0] if op == "bmm" else 0)


def reads_a_broadcast_bias_in_full(op, x, w, itemsize):
    return (math.prod(x), itemsize * 3 * math.prod(x)) if op == "add" else solutions.cost(op, x, w, itemsize)


def sums_a_vector_to_nothing(op, x, w, itemsize):
    flops, nbytes = solutions.cost(op, x, w, itemsize)
    return flops, nbytes - itemsize * (op == "sum" and len(x) == 1)


def assumes_two_bytes(op, x, w, itemsize):
    return solutions.cost(op, x, w, 2)


# --- roofline.2: read a profile -----------------------------------------------------------


def filters_and_groups(rows, steps, gpu):
    "Right: comprehensions, milliseconds last."
    mine = [r for r in rows if r.key.startswith("triton_" if r.device_type == CUDA else "aten::")]
    us = dict.fromkeys((*roofline.CLASSES, "other"), 0.0)
    for kind, group in itertools.groupby(sorted(mine, key=lambda r: roofline.op_class(r.key)),
                                         key=lambda r: roofline.op_class(r.key)):  # fmt: skip
        us[kind] = sum(r.self_device_time_total if gpu else r.self_cpu_time_total for r in group)
    return {c: t / steps / 1000 for c, t in us.items()}


def defaults_to_zero(rows, steps, gpu):
    "Right: a defaultdict with the four keys touched."
    total = defaultdict(float)
    for c in ("contraction", "normalisation", "elementwise", "other"):
        total[c] += 0
    for r in rows:
        if (r.key[:6] == "aten::" and r.device_type != CUDA) or (
            r.key[:7] == "triton_" and r.device_type == CUDA
        ):
            total[roofline.op_class(r.key)] += getattr(r, f"self_{'device' if gpu else 'cpu'}_time_total")
    return {c: t * 1e-3 / steps for c, t in total.items()}


def only_what_ran(rows, steps, gpu):
    found = solutions.class_ms(rows, steps, gpu)
    return {c: ms for c, ms in found.items() if ms}


def _class_ms(rows, steps, gpu, keep, us):
    total = dict.fromkeys((*roofline.CLASSES, "other"), 0.0)
    for r in rows:
        if keep(r):
            total[roofline.op_class(r.key)] += us(r) / 1e3 / steps
    return total


def _own(gpu):
    return lambda r: r.self_device_time_total if gpu else r.self_cpu_time_total


def _counts(r):
    return r.key.startswith("triton_" if r.device_type == CUDA else "aten::")


def adds_totals(rows, steps, gpu):
    return _class_ms(rows, steps, gpu, _counts, lambda r: r.device_time_total if gpu else r.cpu_time_total)


def counts_every_row(rows, steps, gpu):
    return _class_ms(rows, steps, gpu, lambda r: True, _own(gpu))


def counts_triton_twice(rows, steps, gpu):
    return _class_ms(rows, steps, gpu, lambda r: _counts(r) or r.key.startswith("triton_"), _own(gpu))


def forgets_generated_kernels(rows, steps, gpu):
    return _class_ms(rows, steps, gpu, lambda r: r.key.startswith("aten::"), _own(gpu))


def milliseconds_of_all_steps(rows, steps, gpu):
    return solutions.class_ms(rows, 1, gpu)


def every_aten_row(rows, steps, gpu):
    return _class_ms(rows, steps, gpu, lambda r: _counts(r) or r.key.startswith("aten::"), _own(gpu))


def the_hosts_rows_of_generated_kernels(rows, steps, gpu):
    on_the_host = [r for r in rows if r.device_type != CUDA]
    return _class_ms(on_the_host, steps, gpu, lambda r: r.key.startswith(("aten::", "triton_")), _own(gpu))


def always_the_host(rows, steps, gpu):
    return _class_ms(rows, steps, gpu, _counts, lambda r: r.self_cpu_time_total)


# --- roofline.3: the batch at the ridge ---------------------------------------------------


def by_doubling(fan_in, fan_out, itemsize, peak_flops, peak_bytes):
    "Right: search instead of algebra, with the limit of the intensity first."
    if 2 * fan_in * fan_out / (itemsize * (fan_in + fan_out)) <= peak_flops / peak_bytes:
        return None

    def enough(b):
        moved = itemsize * (b * fan_in + fan_in * fan_out + b * fan_out)
        return 2 * b * fan_in * fan_out / peak_flops >= moved / peak_bytes

    step = 1
    while not enough(step):
        step *= 2
    b = step
    while step:
        if b - step >= 1 and enough(b - step):
            b -= step
        else:
            step //= 2
    return b


def by_times_of_a_row(fan_in, fan_out, itemsize, peak_flops, peak_bytes):
    "Right: seconds of the weights over seconds that each row gains."
    gained = 2 * fan_in * fan_out / peak_flops - itemsize * (fan_in + fan_out) / peak_bytes
    return None if gained <= 0 else math.ceil(itemsize * fan_in * fan_out / peak_bytes / gained)


def weights_alone(fan_in, fan_out, itemsize, peak_flops, peak_bytes):
    return math.ceil(itemsize * peak_flops / (2 * peak_bytes))


def forgets_the_result(fan_in, fan_out, itemsize, peak_flops, peak_bytes):
    gain = 2 * fan_in * fan_out * peak_bytes - itemsize * fan_in * peak_flops
    return math.ceil(itemsize * fan_in * fan_out * peak_flops / gain) if gain > 0 else None


def one_more_than_the_floor(fan_in, fan_out, itemsize, peak_flops, peak_bytes):
    gain = 2 * fan_in * fan_out * peak_bytes - itemsize * (fan_in + fan_out) * peak_flops
    return int(itemsize * fan_in * fan_out * peak_flops // gain) + 1 if gain > 0 else None


def rounds_down(fan_in, fan_out, itemsize, peak_flops, peak_bytes):
    b = solutions.ridge_batch(fan_in, fan_out, itemsize, peak_flops, peak_bytes)
    return b and max(1, b - 1)


def two_bytes_always(fan_in, fan_out, itemsize, peak_flops, peak_bytes):
    return solutions.ridge_batch(fan_in, fan_out, 2, peak_flops, peak_bytes)


def negative_where_there_is_none(fan_in, fan_out, itemsize, peak_flops, peak_bytes):
    gain = 2 * fan_in * fan_out * peak_bytes - itemsize * (fan_in + fan_out) * peak_flops
    return math.ceil(itemsize * fan_in * fan_out * peak_flops / gain)


def a_half_added_and_rounded(fan_in, fan_out, itemsize, peak_flops, peak_bytes):
    gain = 2 * fan_in * fan_out * peak_bytes - itemsize * (fan_in + fan_out) * peak_flops
    return round(itemsize * fan_in * fan_out * peak_flops / gain + 0.5) if gain > 0 else None


def next_power_of_two(fan_in, fan_out, itemsize, peak_flops, peak_bytes):
    b = solutions.ridge_batch(fan_in, fan_out, itemsize, peak_flops, peak_bytes)
    return b and 1 << (b - 1).bit_length()


# --- roofline.4: training FLOPs -----------------------------------------------------------


def _weights(m):
    return m.layers * (4 * m.width**2 + 2 * m.width * m.ffn)


def product_by_product(m, batch):
    "Right: every matmul of the forward pass, three times."
    t, forward = m.seq * batch, 0
    for k, n in [(m.width, m.width)] * 4 + [(m.width, m.ffn), (m.ffn, m.width)] + [(m.width, m.seq)] * 2:
        forward += m.layers * 2 * t * k * n
    return 3 * (forward + 2 * t * m.width * m.vocab)


def per_token_times_tokens(m, batch):
    "Right: a float, one token first."
    per_token = 6.0 * (_weights(m) + m.width * m.vocab) + 12.0 * m.layers * m.width * m.seq
    return per_token * m.seq * batch


def counted_on_meta(m, batch):
    "Right: torch's own count of the forward pass's products, three times."
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        x, up = torch.empty(batch, m.seq, m.width), torch.empty(m.width, m.ffn)
        for _ in range(m.layers):
            for _ in range(4):
                x = x @ torch.empty(m.width, m.width)
            x = x @ up @ up.T
            x = x @ x.mT @ x
        _ = x @ torch.empty(m.width, m.vocab)
    return 3 * counter.get_total_flops()


def six_n_d(m, batch):
    "Attention left out."
    return 6 * (_weights(m) + m.width * m.vocab) * batch * m.seq


def forward_only(m, batch):
    return solutions.train_flops(m, batch) // 3


def attention_causal_here(m, batch):
    tokens = batch * m.seq
    return six_n_d(m, batch) + 6 * m.layers * m.width * (m.seq + 1) * tokens


def counts_the_embedding_table(m, batch):
    return solutions.train_flops(m, batch) + 6 * m.vocab * m.width * batch * m.seq


def feed_forward_is_four_widths(m, batch):
    return solutions.train_flops(m._replace(ffn=4 * m.width), batch)


def one_sequence(m, batch):
    return solutions.train_flops(m, 1)


# --- roofline.5: MFU ----------------------------------------------------------------------


def _per_token(m, keys):
    return 6 * (_weights(m) + m.width * m.vocab) + 12 * m.layers * m.width * keys


def _mfu(per_token, rate, gpus, peak):
    if rate * per_token > gpus * peak:
        raise ValueError("more than the peak")
    return rate * per_token / (gpus * peak)


def pair_by_pair(m, rate, gpus, peaks):
    "Right: the mean over the positions of a sequence."
    mean = statistics.fmean(_per_token(m, keys) for keys in range(1, m.seq + 1))
    return _mfu(mean, rate, gpus, peaks["dense"])


def sums_the_mask(m, rate, gpus, peaks):
    "Right: the pairs of the mask, a whole sequence, a tensor."
    pairs = sum(range(1, m.seq + 1))
    flops = m.seq * _per_token(m, 0) + 12 * m.layers * m.width * pairs
    return torch.tensor(_mfu(flops, rate / m.seq, gpus, peaks["dense"]), dtype=torch.float64)


def full_attention(m, rate, gpus, peaks):
    return _mfu(_per_token(m, m.seq), rate, gpus, peaks["dense"])


def rounds_the_mean_down(m, rate, gpus, peaks):
    return _mfu(_per_token(m, (m.seq + 1) // 2), rate, gpus, peaks["dense"])


def everything_halved(m, rate, gpus, peaks):
    return _mfu(_per_token(m, m.seq) / 2, rate, gpus, peaks["dense"])


def refuses_by_the_sparse_peak(m, rate, gpus, peaks):
    return 2 * _mfu(_per_token(m, (m.seq + 1) / 2), rate, gpus, peaks["sparse"])


def embedding_table_too(m, rate, gpus, peaks):
    return _mfu(_per_token(m, (m.seq + 1) / 2) + 6 * m.vocab * m.width, rate, gpus, peaks["dense"])


def forgets_the_gpus(m, rate, gpus, peaks):
    return _mfu(_per_token(m, (m.seq + 1) / 2), rate / max(gpus, 2), 1, peaks["dense"])


def refuses_by_the_rounded_percentage(m, rate, gpus, peaks):
    used = rate * _per_token(m, (m.seq + 1) / 2) / (gpus * peaks["dense"])
    if round(100 * used) > 100:
        raise ValueError("more than the peak")
    return used


def caps_at_100_per_cent(m, rate, gpus, peaks):
    return min(1.0, rate * _per_token(m, (m.seq + 1) / 2) / (gpus * peaks["dense"]))


# --- roofline.6: stopwatches --------------------------------------------------------------


def _samples(fn, clock, synchronize, warmup, runs):
    for _ in range(warmup):
        fn()
    for _ in range(runs):
        synchronize()
        start = clock()
        fn()
        synchronize()
        yield clock() - start


def one_loop(fn, clock, synchronize, warmup, runs):
    "Right: warm-up runs are timed and dropped, the median by sorting."
    took = sorted(list(_samples(fn, clock, synchronize, 0, warmup + runs))[warmup:])
    return (took[(runs - 1) // 2] + took[runs // 2]) / 2


def synchronised_once(fn, clock, synchronize, warmup, runs):
    "Right: each run begins where the last one ended."
    for _ in range(warmup):
        fn()
    synchronize()
    edges = [clock()]
    for _ in range(runs):
        fn()
        synchronize()
        edges.append(clock())
    return statistics.median(b - a for a, b in itertools.pairwise(edges))


def synchronise_after_the_clock(fn, clock, synchronize, warmup, runs):
    for _ in range(warmup):
        fn()
    took = []
    for _ in range(runs):
        synchronize()
        start = clock()
        fn()
        took.append(clock() - start)
        synchronize()
    return statistics.median(took)


def mean_of_the_runs(fn, clock, synchronize, warmup, runs):
    return statistics.fmean(_samples(fn, clock, synchronize, warmup, runs))


def upper_median(fn, clock, synchronize, warmup, runs):
    return statistics.median_high(_samples(fn, clock, synchronize, warmup, runs))


def warm_up_among_the_runs(fn, clock, synchronize, warmup, runs):
    return statistics.median(_samples(fn, clock, synchronize, 0, warmup + runs))


def the_loop_over_its_runs(fn, clock, synchronize, warmup, runs):
    for _ in range(warmup):
        fn()
    synchronize()
    start = clock()
    for _ in range(runs):
        fn()
    synchronize()
    return (clock() - start) / runs


def the_clock_before_the_wait(fn, clock, synchronize, warmup, runs):
    def waited():
        synchronize()
        fn()
        synchronize()

    return statistics.median(list(_samples(waited, clock, lambda: None, 0, warmup + runs))[warmup:])


def quantile_of_a_tensor(fn, clock, synchronize, warmup, runs):
    "Right: float32 holds seconds of one call well enough."
    return torch.tensor(list(_samples(fn, clock, synchronize, warmup, runs))).quantile(0.5)


def another_clock(fn, clock, synchronize, warmup, runs):
    return statistics.median(_samples(fn, time.perf_counter, synchronize, warmup, runs))


RIGHT = {
    "roofline.1": [runs_the_operator, by_loops_over_shapes],
    "roofline.2": [filters_and_groups, defaults_to_zero],
    "roofline.3": [by_doubling, by_times_of_a_row],
    "roofline.4": [product_by_product, per_token_times_tokens, counted_on_meta],
    "roofline.5": [pair_by_pair, sums_the_mask],
    "roofline.6": [one_loop, synchronised_once, quantile_of_a_tensor],
}

MUTANTS = {
    "roofline.1": [forgets_the_factor_2, reads_the_weights_for_every_batch, reads_a_broadcast_bias_in_full,
                   shares_the_weights_of_a_batched_product, sums_a_vector_to_nothing, assumes_two_bytes],
    "roofline.2": [only_what_ran, adds_totals, counts_every_row, counts_triton_twice, every_aten_row,
                   forgets_generated_kernels, milliseconds_of_all_steps, always_the_host,
                   the_hosts_rows_of_generated_kernels],
    "roofline.3": [weights_alone, one_more_than_the_floor, forgets_the_result, rounds_down,
                   two_bytes_always, negative_where_there_is_none, next_power_of_two,
                   a_half_added_and_rounded],
    "roofline.4": [six_n_d, forward_only, attention_causal_here, counts_the_embedding_table,
                   feed_forward_is_four_widths, one_sequence],
    "roofline.5": [full_attention, rounds_the_mean_down, everything_halved, refuses_by_the_sparse_peak,
                   embedding_table_too, forgets_the_gpus, caps_at_100_per_cent,
                   refuses_by_the_rounded_percentage],
    "roofline.6": [synchronise_after_the_clock, mean_of_the_runs, upper_median, warm_up_among_the_runs,
                   the_loop_over_its_runs, another_clock, the_clock_before_the_wait],
}  # fmt: skip

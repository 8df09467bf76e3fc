"Wrong answers to the exercises. Each computes something, and each is what somebody would write."

import math
import statistics
import time

from course_lib import roofline

REFERENCE = {
    "roofline.1": roofline.cost,
    "roofline.2": roofline.roof,
    "roofline.3": roofline.train_flops,
    "roofline.4": roofline.mfu,
    "roofline.5": roofline.buckets,
    "roofline.6": roofline.stopwatch,
}


# --- roofline.1: FLOPs and bytes ----------------------------------------------------------


def forgets_the_factor_2(op, x, w, itemsize):
    flops, nbytes = roofline.cost(op, x, w, itemsize)
    return (flops // 2 if op in ("matmul", "bmm") else flops), nbytes


def _out(op, x, w):
    if op in ("matmul", "bmm"):
        return math.prod(x) // x[-1] * w[-1]
    return math.prod(x) // x[-1] if op == "sum" else math.prod(x)


def forgets_the_write(op, x, w, itemsize):
    flops, nbytes = roofline.cost(op, x, w, itemsize)
    return flops, nbytes - itemsize * _out(op, x, w)


def counts_in_bits(op, x, w, itemsize):
    flops, nbytes = roofline.cost(op, x, w, itemsize)
    return flops, 8 * nbytes


def counts_elements(op, x, w, itemsize):
    flops, nbytes = roofline.cost(op, x, w, itemsize)
    return flops, nbytes // itemsize


def assumes_fp32(op, x, w, itemsize):
    return roofline.cost(op, x, w, 4)


def assumes_two_bytes(op, x, w, itemsize):
    return roofline.cost(op, x, w, 2)


def works_for_square_matrices_only(op, x, w, itemsize):
    if op in ("matmul", "bmm"):
        n = x[-1]
        batch = math.prod(x[:-2])
        return 2 * batch * n**3, itemsize * 3 * batch * n * n
    return roofline.cost(op, x, w, itemsize)


def ignores_the_batch(op, x, w, itemsize):
    if op in ("matmul", "bmm"):
        return roofline.cost("matmul", x[-2:], w[-2:], itemsize)
    return roofline.cost(op, x, w, itemsize)


def reads_the_weights_for_every_batch(op, x, w, itemsize):
    flops, nbytes = roofline.cost(op, x, w, itemsize)
    if op == "matmul":
        nbytes += itemsize * math.prod(w) * (math.prod(x[:-2]) - 1)
    return flops, nbytes


def shares_the_weights_of_a_batched_product(op, x, w, itemsize):
    flops, nbytes = roofline.cost(op, x, w, itemsize)
    if op == "bmm":
        nbytes -= itemsize * math.prod(w) * (w[0] - 1) // w[0]
    return flops, nbytes


def reads_a_broadcast_bias_in_full(op, x, w, itemsize):
    if op == "add":
        return math.prod(x), itemsize * 3 * math.prod(x)
    return roofline.cost(op, x, w, itemsize)


def sum_writes_as_much_as_it_reads(op, x, w, itemsize):
    flops, nbytes = roofline.cost(op, x, w, itemsize)
    return flops, 2 * itemsize * math.prod(x) if op == "sum" else nbytes


def sum_to_one_number(op, x, w, itemsize):
    flops, nbytes = roofline.cost(op, x, w, itemsize)
    return flops, itemsize * (math.prod(x) + 1) if op == "sum" else nbytes


def a_copy_computes(op, x, w, itemsize):
    flops, nbytes = roofline.cost(op, x, w, itemsize)
    return math.prod(x) if op == "copy" else flops, nbytes


def a_copy_only_writes(op, x, w, itemsize):
    flops, nbytes = roofline.cost(op, x, w, itemsize)
    return flops, nbytes // 2 if op == "copy" else nbytes


# --- roofline.2: which roof ---------------------------------------------------------------


def swaps_the_bound(flops, nbytes, peak_flops, peak_bytes):
    r = roofline.roof(flops, nbytes, peak_flops, peak_bytes)
    return r._replace(bound="memory" if r.bound == "compute" else "compute")


def swaps_min_and_max(flops, nbytes, peak_flops, peak_bytes):
    r = roofline.roof(flops, nbytes, peak_flops, peak_bytes)
    times = flops / peak_flops, nbytes / peak_bytes
    return r._replace(rate=max(peak_flops, r.intensity * peak_bytes), seconds=min(times))


def adds_the_two_times(flops, nbytes, peak_flops, peak_bytes):
    seconds = flops / peak_flops + nbytes / peak_bytes
    return roofline.roof(flops, nbytes, peak_flops, peak_bytes)._replace(
        seconds=seconds, rate=flops / seconds
    )


def always_at_the_compute_roof(flops, nbytes, peak_flops, peak_bytes):
    return flops / nbytes, peak_flops, flops / peak_flops, "compute"


def bytes_for_each_flop(flops, nbytes, peak_flops, peak_bytes):
    r = roofline.roof(flops, nbytes, peak_flops, peak_bytes)
    return r._replace(intensity=nbytes / flops if flops else 0.0)


def ridge_the_wrong_way_up(flops, nbytes, peak_flops, peak_bytes):
    r = roofline.roof(flops, nbytes, peak_flops, peak_bytes)
    return r._replace(bound="compute" if r.intensity > peak_bytes / peak_flops else "memory")


def an_h200_everywhere(flops, nbytes, peak_flops, peak_bytes):
    return roofline.roof(flops, nbytes, 989e12, 4.8e12)


def a_copy_takes_no_time(flops, nbytes, peak_flops, peak_bytes):
    r = roofline.roof(flops, nbytes, peak_flops, peak_bytes)
    return r if flops else r._replace(seconds=0.0)


def rate_is_the_memory_roof(flops, nbytes, peak_flops, peak_bytes):
    r = roofline.roof(flops, nbytes, peak_flops, peak_bytes)
    return r._replace(rate=r.intensity * peak_bytes)


# --- roofline.3: training FLOPs -----------------------------------------------------------


def _weights(m):
    return m.layers * (4 * m.width**2 + 2 * m.width * m.ffn)


def six_n_d(m, batch):
    "Attention left out."
    return 6 * (_weights(m) + m.width * m.vocab) * batch * m.seq


def forward_only(m, batch):
    return roofline.train_flops(m, batch) // 3


def backward_as_much_as_forward(m, batch):
    return roofline.train_flops(m, batch) * 2 // 3


def counts_multiply_adds(m, batch):
    return roofline.train_flops(m, batch) // 2


def attention_causal_here(m, batch):
    return round(batch * m.seq * roofline.flops_per_token(m, causal=True))


def one_attention_product(m, batch):
    return roofline.train_flops(m, batch) - 6 * m.layers * m.width * m.seq * batch * m.seq


def counts_the_embedding_table(m, batch):
    return roofline.train_flops(m, batch) + 6 * m.vocab * m.width * batch * m.seq


def forgets_the_head(m, batch):
    return roofline.train_flops(m._replace(vocab=0), batch)


def feed_forward_is_four_widths(m, batch):
    return roofline.train_flops(m._replace(ffn=4 * m.width), batch)


def one_sequence(m, batch):
    return roofline.train_flops(m, 1)


def attention_not_squared(m, batch):
    return 6 * (_weights(m) + m.width * m.vocab) * batch * m.seq + 12 * m.layers * m.width * m.seq * batch


def a_query_matrix_alone(m, batch):
    return roofline.train_flops(m, batch) - 6 * 2 * m.layers * m.width**2 * batch * m.seq


def twelve_width_squared(m, batch):
    tokens = batch * m.seq
    return (
        6 * tokens * (12 * m.layers * m.width**2 + m.width * m.vocab)
        + 12 * m.layers * m.width * m.seq * tokens
    )


def per_token(m, batch):
    return roofline.flops_per_token(m)


def counts_biases_and_norms(m, batch):
    extra = m.layers * (5 * m.width + m.ffn + 4 * m.width) + m.vocab
    return roofline.train_flops(m, batch) + 6 * extra * batch * m.seq


# --- roofline.4: MFU ----------------------------------------------------------------------


def _mfu(per_token, rate, gpus, peak):
    used = rate * per_token / (gpus * peak)
    if used > 1:
        raise ValueError("more than the peak")
    return used


def full_attention(m, rate, gpus, peaks):
    return _mfu(roofline.flops_per_token(m), rate, gpus, peaks["dense"])


def no_attention(m, rate, gpus, peaks):
    return _mfu(6 * (_weights(m) + m.width * m.vocab), rate, gpus, peaks["dense"])


def sparse_peak(m, rate, gpus, peaks):
    # It refuses at the right place, so that only the fraction can give it away.
    used = _mfu(roofline.flops_per_token(m, causal=True), rate, gpus, peaks["dense"])
    return used / 2


def refuses_by_the_sparse_peak(m, rate, gpus, peaks):
    used = rate * roofline.flops_per_token(m, causal=True) / gpus
    if used > peaks["sparse"]:
        raise ValueError("more than the peak")
    return used / peaks["dense"]


def embedding_table_too(m, rate, gpus, peaks):
    per_token = roofline.flops_per_token(m, causal=True) + 6 * m.vocab * m.width
    return _mfu(per_token, rate, gpus, peaks["dense"])


def everything_halved(m, rate, gpus, peaks):
    return _mfu(roofline.flops_per_token(m) / 2, rate, gpus, peaks["dense"])


def one_gpu(m, rate, gpus, peaks):
    return _mfu(roofline.flops_per_token(m, causal=True) / gpus, rate, 1, peaks["dense"]) * gpus


def in_per_cent(m, rate, gpus, peaks):
    return 100 * roofline.mfu(m, rate, gpus, peaks)


def two_n_inference(m, rate, gpus, peaks):
    return _mfu(roofline.flops_per_token(m, causal=True) / 3, rate, gpus, peaks["dense"])


def believes_more_than_100_per_cent(m, rate, gpus, peaks):
    return rate * roofline.flops_per_token(m, causal=True) / (gpus * peaks["dense"])


def refuses_good_runs(m, rate, gpus, peaks):
    used = roofline.mfu(m, rate, gpus, peaks)
    if used > 0.9:
        raise ValueError("too good to be true")
    return used


def caps_at_100_per_cent(m, rate, gpus, peaks):
    return min(1.0, believes_more_than_100_per_cent(m, rate, gpus, peaks))


def an_h100_everywhere(m, rate, gpus, peaks):
    return _mfu(roofline.flops_per_token(m, causal=True), rate, gpus, 989e12)


def hardware_utilisation_with_recomputation(m, rate, gpus, peaks):
    return _mfu(roofline.flops_per_token(m, causal=True) * 4 / 3, rate, gpus, peaks["dense"])


# --- roofline.5: three buckets ------------------------------------------------------------


def _span(events):
    return max(e.start + e.duration for e in events) - min(e.start for e in events)


def overlap_counted_twice(events):
    sums = {k: sum(e.duration for e in events if e.kind == k) for k in ("compute", "memory")}
    return sums | {"overhead": max(0, _span(events) - sum(sums.values()))}


def launches_are_overhead(events):
    "The host's own work, though the GPU was busy under it."
    right = roofline.buckets(events)
    return right | {"overhead": sum(e.duration for e in events if e.kind == "launch")}


def host_work_is_busy_time(events):
    return roofline.buckets([e._replace(lane="gpu", kind="memory") if e.lane == "cpu" else e for e in events])


def memory_wins_over_compute(events):
    swap = {"compute": "memory", "memory": "compute"}
    got = roofline.buckets([e._replace(kind=swap.get(e.kind, e.kind)) for e in events])
    return {"compute": got["memory"], "memory": got["compute"], "overhead": got["overhead"]}


def gaps_of_each_stream(events):
    lanes = {e.lane for e in events} - {"cpu"}
    idle = sum(_span(events) - sum(e.duration for e in events if e.lane == l) for l in lanes)
    return roofline.buckets(events) | {"overhead": idle if lanes else _span(events)}


def span_of_the_gpu_alone(events):
    return roofline.buckets([e for e in events if e.lane != "cpu"])


def span_from_zero(events):
    return roofline.buckets([*events, roofline.Event(0, 0, "cpu", "launch")])


def events_taken_in_order(events):
    total, end = {"compute": 0, "memory": 0, "overhead": 0}, min(e.start for e in events)
    for e in events:
        if e.lane != "cpu":
            total["overhead"] += max(0, e.start - end)
            total[e.kind] += max(0, e.start + e.duration - max(end, e.start))
            end = max(end, e.start + e.duration)
    return total


def sorted_and_first_come(events):
    "In order of start: what runs first keeps the time, compute or not."
    got = events_taken_in_order(sorted(events))
    last = max(e.start + e.duration for e in events)
    gpu = [e.start + e.duration for e in events if e.lane != "cpu"]
    got["overhead"] += last - max(gpu, default=min(e.start for e in events))
    return got


def first_stream_only(events):
    lanes = sorted({e.lane for e in events} - {"cpu"})
    return roofline.buckets([e for e in events if e.lane in ("cpu", *lanes[:1])])


def whole_microseconds(events):
    return {k: int(v) for k, v in roofline.buckets(events).items()}


def fractions_of_the_span(events):
    return {k: v / _span(events) for k, v in roofline.buckets(events).items()}


# --- roofline.6: stopwatches --------------------------------------------------------------


def no_synchronise(fn, clock, synchronize, warmup, runs):
    for _ in range(warmup):
        fn()
    took = []
    for _ in range(runs):
        start = clock()
        fn()
        took.append(clock() - start)
    return statistics.median(took)


def synchronise_before_only(fn, clock, synchronize, warmup, runs):
    for _ in range(warmup):
        fn()
    took = []
    for _ in range(runs):
        synchronize()
        start = clock()
        fn()
        took.append(clock() - start)
    return statistics.median(took)


def synchronise_after_only(fn, clock, synchronize, warmup, runs):
    for _ in range(warmup):
        fn()
    took = []
    for _ in range(runs):
        start = clock()
        fn()
        synchronize()
        took.append(clock() - start)
    return statistics.median(took)


def _samples(fn, clock, synchronize, warmup, runs):
    for _ in range(warmup):
        fn()
    took = []
    for _ in range(runs):
        synchronize()
        start = clock()
        fn()
        synchronize()
        took.append(clock() - start)
    return took


def mean_of_the_runs(fn, clock, synchronize, warmup, runs):
    return statistics.fmean(_samples(fn, clock, synchronize, warmup, runs))


def fastest_of_the_runs(fn, clock, synchronize, warmup, runs):
    return min(_samples(fn, clock, synchronize, warmup, runs))


def upper_median(fn, clock, synchronize, warmup, runs):
    return statistics.median_high(_samples(fn, clock, synchronize, warmup, runs))


def middle_without_sorting(fn, clock, synchronize, warmup, runs):
    return _samples(fn, clock, synchronize, warmup, runs)[runs // 2]


def warm_up_among_the_runs(fn, clock, synchronize, warmup, runs):
    return statistics.median(_samples(fn, clock, synchronize, 0, warmup + runs))


def no_warm_up(fn, clock, synchronize, warmup, runs):
    return statistics.median(_samples(fn, clock, synchronize, 0, runs))


def one_warm_up_is_enough(fn, clock, synchronize, warmup, runs):
    return statistics.median(_samples(fn, clock, synchronize, 1, runs))


def the_loop_over_its_runs(fn, clock, synchronize, warmup, runs):
    for _ in range(warmup):
        fn()
    synchronize()
    start = clock()
    for _ in range(runs):
        fn()
    synchronize()
    return (clock() - start) / runs


def another_clock(fn, clock, synchronize, warmup, runs):
    return statistics.median(_samples(fn, time.perf_counter, synchronize, warmup, runs))


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


def in_milliseconds(fn, clock, synchronize, warmup, runs):
    return 1e3 * statistics.median(_samples(fn, clock, synchronize, warmup, runs))


MUTANTS = {
    "roofline.1": [
        forgets_the_factor_2,
        forgets_the_write,
        counts_in_bits,
        counts_elements,
        assumes_fp32,
        assumes_two_bytes,
        works_for_square_matrices_only,
        ignores_the_batch,
        reads_the_weights_for_every_batch,
        shares_the_weights_of_a_batched_product,
        reads_a_broadcast_bias_in_full,
        sum_writes_as_much_as_it_reads,
        sum_to_one_number,
        a_copy_computes,
        a_copy_only_writes,
    ],
    "roofline.2": [
        swaps_the_bound,
        swaps_min_and_max,
        adds_the_two_times,
        always_at_the_compute_roof,
        bytes_for_each_flop,
        ridge_the_wrong_way_up,
        an_h200_everywhere,
        a_copy_takes_no_time,
        rate_is_the_memory_roof,
    ],
    "roofline.3": [
        six_n_d,
        forward_only,
        backward_as_much_as_forward,
        counts_multiply_adds,
        attention_causal_here,
        one_attention_product,
        counts_the_embedding_table,
        forgets_the_head,
        feed_forward_is_four_widths,
        one_sequence,
        attention_not_squared,
        a_query_matrix_alone,
        twelve_width_squared,
        per_token,
        counts_biases_and_norms,
    ],
    "roofline.4": [
        full_attention,
        no_attention,
        sparse_peak,
        refuses_by_the_sparse_peak,
        embedding_table_too,
        everything_halved,
        one_gpu,
        in_per_cent,
        two_n_inference,
        believes_more_than_100_per_cent,
        refuses_good_runs,
        caps_at_100_per_cent,
        an_h100_everywhere,
        hardware_utilisation_with_recomputation,
    ],
    "roofline.5": [
        overlap_counted_twice,
        launches_are_overhead,
        host_work_is_busy_time,
        memory_wins_over_compute,
        gaps_of_each_stream,
        span_of_the_gpu_alone,
        span_from_zero,
        events_taken_in_order,
        sorted_and_first_come,
        first_stream_only,
        whole_microseconds,
        fractions_of_the_span,
    ],
    "roofline.6": [
        no_synchronise,
        synchronise_before_only,
        synchronise_after_only,
        mean_of_the_runs,
        fastest_of_the_runs,
        upper_median,
        middle_without_sorting,
        warm_up_among_the_runs,
        no_warm_up,
        one_warm_up_is_enough,
        the_loop_over_its_runs,
        another_clock,
        synchronise_after_the_clock,
        in_milliseconds,
    ],
}

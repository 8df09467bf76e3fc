import gc
import time

import pytest
import torch

from course_lib import timing

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_a_known_sleep():
    begin = time.perf_counter()
    t = timing.time(time.sleep, 0.004, seconds=0.2)
    assert time.perf_counter() - begin < 0.5
    assert 0.004 <= t.low <= t.median <= t.high
    assert t.low < 0.008 and 5 <= t.runs <= 50


def test_a_function_too_short_for_the_clock():
    t = timing.time(lambda: None, seconds=0.05)
    assert 0 < t.low <= t.median <= t.high
    assert t.low < 1e-5 and t.runs > 1000


def test_a_slow_function_is_called_a_few_times_all_the_same():
    calls = []
    t = timing.time(lambda: (calls.append(1), time.sleep(0.02)), seconds=0.01)
    assert t.runs == 5
    assert len(calls) == 8  # one that is not timed, two that find out how long it takes


def test_first_call_is_not_timed():
    done = []

    def slow_at_first():
        if not done:
            time.sleep(0.3)
            done.append(1)

    assert timing.time(slow_at_first, seconds=0.05).median < 0.01


@pytest.mark.parametrize("scale, unit", [(1, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")])
def test_reads_well(scale, unit):
    t = timing.Timing(1.234 * scale, 1.2 * scale, 1.3 * scale, 4000)
    assert str(t) == f"1.23 {unit} (1.2-1.3, 4,000 runs)"


def test_collector_comes_back_and_errors_pass():
    with pytest.raises(ZeroDivisionError):
        timing.time(lambda: 1 / 0)
    assert gc.isenabled()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("n", [1024, 8192])
def test_gpu_matmul_takes_what_do_bench_says(n):
    from triton.testing import do_bench

    a = torch.randn(n, n, device="cuda", dtype=torch.bfloat16)
    ours = timing.time(torch.mm, a, a, seconds=0.5)
    theirs = do_bench(lambda: torch.mm(a, a), warmup=100, rep=400, return_mode="median") * 1e-3
    assert ours.median == pytest.approx(theirs, rel=0.15)
    assert ours.low <= ours.median <= ours.high


@pytest.mark.gpu
@needs_gpu
def test_gpu_caches_are_cold():
    # 16 MB fits in the L2 cache; read again from there it would beat the memory's bandwidth.
    x = torch.randn(4 << 20, device="cuda")
    assert x.nbytes / timing.time(torch.sum, x).median < 4.8e12
    cpu = torch.ones(3)
    assert timing.time(torch.add, cpu, cpu).runs > 1000  # CPU tensors are timed on the CPU beside a GPU

import gc
import itertools
import time

import pytest
import torch

from course_lib import timing

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_a_known_sleep():
    t = timing.time(time.sleep, 0.004, seconds=0.2)
    assert 0.004 <= t.low <= t.median <= t.high
    assert t.low < 0.008
    assert 5 <= t.runs <= 50


def test_a_function_too_short_for_the_clock():
    def nothing():
        pass

    t = timing.time(nothing, seconds=0.05)
    assert 0 < t.low <= t.median <= t.high
    assert t.low < 1e-5
    assert t.runs > 1000


def test_seconds_bounds_the_time():
    begin = time.perf_counter()
    t = timing.time(time.sleep, 0.001, seconds=0.3)
    took = time.perf_counter() - begin
    assert took < 0.6
    assert t.runs > 50


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


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (1.234, "1.23 s (1.2-1.3, 40 runs)"),
        (1.234e-3, "1.23 ms (1.2-1.3, 40 runs)"),
        (1.234e-6, "1.23 µs (1.2-1.3, 40 runs)"),
        (1.234e-9, "1.23 ns (1.2-1.3, 40 runs)"),
    ],
)
def test_reads_well(seconds, text):
    scale = seconds / 1.234
    assert str(timing.Timing(seconds, 1.2 * scale, 1.3 * scale, 40)) == text


def test_collector_comes_back_and_errors_pass():
    with pytest.raises(ZeroDivisionError):
        timing.time(lambda: 1 / 0)
    assert gc.isenabled()
    timing.time(lambda: None, seconds=0.01)
    assert gc.isenabled()


def test_contenders_take_turns_on_sets_larger_than_the_cache():
    made, seen = [], []

    def make():
        made.append(torch.ones(16 << 18))
        return (made[-1],)

    def slow(x):
        seen.append(("slow", id(x)))
        time.sleep(0.002)

    def fast(x):
        seen.append(("fast", id(x)))
        time.sleep(0.001)

    t = timing.compare({"slow": slow, "fast": fast}, make, seconds=0.2)
    assert sum(x.nbytes for x in made) > timing.CACHE
    assert 1.3 < t["slow"].low / t["fast"].low < 2.2 and t["fast"].median > 0.001
    assert {i for _, i in seen} == {id(x) for x in made} and gc.isenabled()
    changes = sum(a[0] != b[0] for a, b in itertools.pairwise(seen))
    assert changes >= 2 * timing.FEWEST


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
def test_gpu_time_is_not_the_time_to_ask():
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    begin = time.perf_counter()
    torch.mm(a, a)
    asked = time.perf_counter() - begin
    assert timing.time(torch.mm, a, a).median > 5e-4 > asked / 5


@pytest.mark.gpu
@needs_gpu
def test_gpu_caches_are_cold():
    # 16 MB fits in the L2 cache; read again from there it would beat the memory's bandwidth.
    x = torch.randn(4 << 20, device="cuda")
    t = timing.time(torch.sum, x)
    assert x.nbytes / t.median < 4.8e12


@pytest.mark.gpu
@needs_gpu
def test_contenders_on_a_gpu():
    "Kernels without their launches, a backward pass, one that waits, and a generator that is left whole."

    def make():
        x = torch.randn(1 << 22, device="cuda", requires_grad=True)
        return x, x.exp(), torch.randn_like(x)

    contenders = {
        "copy": lambda x, y, g: x.detach().clone(),
        "backward": lambda x, y, g: torch.autograd.grad(y, x, g, retain_graph=True),
        "tiny": lambda x, y, g: x.detach()[:8] + 1,
    }
    t = timing.compare(contenders, make)
    assert 1.5e12 < 8 * (1 << 22) / t["copy"].median < 4.8e12
    assert t["copy"].median < t["backward"].median < 3 * t["copy"].median
    assert t["tiny"].median < 5e-6
    with pytest.raises(RuntimeError, match="synchroniz"):
        timing.compare({"waits": lambda x, y, g: x.sum().item()}, make)
    torch.rand(3, device="cuda")
    assert timing.compare({"copy": contenders["copy"]}, make)["copy"].median < 2 * t["copy"].median
    slow = timing.compare({"slow": lambda a: a @ a}, lambda: (torch.randn(8192, 8192, device="cuda"),))
    assert slow["slow"].runs >= 5


@pytest.mark.gpu
@needs_gpu
def test_cpu_tensors_are_timed_on_the_cpu_beside_a_gpu():
    x = torch.ones(3)
    assert timing.time(torch.add, x, x).runs > 1000

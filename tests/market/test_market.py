"What lesson market keeps outside its cells: series, arrivals, a server by the clock, C, figures."

import time

import numpy as np
import pytest
import torch

from course_lib import market, models
from course_lib.market import figures, solutions
from course_lib.timing import Timing


def test_a_random_walk_has_independent_steps():
    steps = np.diff(market.random_walk(20_000, seed=1))
    assert abs(np.corrcoef(steps[1:], steps[:-1])[0, 1]) < 0.03 and steps.std() == pytest.approx(1, abs=0.03)
    assert not np.array_equal(market.random_walk(9, 0), market.random_walk(9, 1))


def test_the_signal_is_weak_and_drifts():
    n, life = 60_000, 2_000
    x, r = market.drifting(n, features=3, strength=0.5, half_life=life, seed=2)
    assert r.var() == pytest.approx(1 + 0.25, abs=0.1)
    products = x * r[:, None]  # their means over a while are the weights
    weights = products.reshape(-1, life // 4, 3).mean(1)

    def alike(lag):
        return np.mean(weights[lag:] * weights[: len(weights) - lag])

    assert alike(4) / alike(0) < 0.75 and alike(1) > alike(4) > alike(20)


def test_ticks_stay_in_a_file():
    with market.ticks(rows=1000, columns=4, block=300) as mapped:
        assert mapped.shape == (1000, 4) and mapped.dtype == torch.float32
        assert torch.equal(mapped[:300], mapped[300:600]) and mapped.std() == pytest.approx(1, abs=0.1)


def test_poisson_arrives_at_its_rate():
    times = market.poisson(4000, rate=25)
    assert times == sorted(times) and times[-1] == pytest.approx(4000 / 25 * 1e3, rel=0.06)


def test_a_server_by_the_clock_batches_as_the_simulation_does():
    sizes = []

    def forward(n):
        sizes.append(n)
        end = time.perf_counter() + 2e-3
        while time.perf_counter() < end:
            pass

    arrivals = [0.0, 100.0, 200.0, 60_000.0]
    found = market.serve_for_real(arrivals, forward, most=3, wait=10_000, warm=0)
    assert sizes == [3, 1]
    want = solutions.serve(arrivals, lambda n: 2000.0, 3, 10_000)
    assert (found > np.array(want) - 1).all()  # a busy machine makes them longer


def test_pauses_and_what_is_said_of_a_queue():
    answers = market.with_pauses(lambda: 7, every=2, ms=20)
    start = time.perf_counter()
    assert [answers(), answers()] == [7, 7] and time.perf_counter() - start >= 0.02
    assert market.queue_said(90.0, 100) == "" and "a queue" in market.queue_said(110.0, 100)


def test_c_code_is_compiled_where_there_is_a_compiler():
    fn = market.compiled_c("float half(int x) { return x / 2.0f; }", "half")
    assert fn is None or fn(5) == 2.5
    assert market.compiled_c("no C at all", "half") is None


def test_stacked_and_the_error_beside_float64():
    torch.manual_seed(0)  # a net this small may be zero everywhere
    net = models.mlp([5, 5, 5, 1]).requires_grad_(False)
    weights, biases, head = market.stacked(net)
    assert weights.shape == (2, 5, 5) and biases.shape == (2, 5) and torch.equal(head, net[-1].weight[0])

    def body(x, y):
        h = x.cpu()
        for w, b in zip(weights.bfloat16().float(), biases, strict=True):
            h = (w @ h + b).clamp(min=0)
        y.fill_((head @ h).item())

    assert market.error_of(body, net) < 1e-4
    assert market.error_of(lambda x, y: (body(x, y), y.mul_(1.5)), net) == pytest.approx(0.5, abs=1e-3)


def test_figures_can_be_drawn():
    scores = np.random.default_rng(0).normal(0.05, 0.01, (9, 6))
    rounds = {"one launch": [(3.0, 4.0), (3.5, 5.0)], "cpu": [(9.0, 12.0), (8.0, 30.0)]}
    found = {
        "arrivals": list(range(0, 2000, 20)),
        "latencies": [50.0] * 99 + [300.0],
        "deadline": 100,
        "late": 0.01,
    }
    for fig in (
        figures.draw_forecasts({"a": ([1, 2, 3], [1, 3, 2]), "b": ([1, 2, 3], [3, 1, 2])}),
        figures.draw_overlap(50),
        figures.draw_scores({"shuffled": [0.6, 0.7], "one": [0.1]}),
        figures.draw_decay(scores, np.arange(1, 7) * 100.0, 300, 200, 400, 3),
        figures.draw_tails({"closed": [1, 2, 3], "open": [1, 20, 300]}),
        figures.draw_bars(
            {"small": {"one launch": Timing(2e-6, 1e-6, 3e-6, 9), "operators": Timing(9e-6, 8e-6, 9e-6, 9)}}
        ),
        figures.draw_percentiles({"small": rounds, "large": rounds}),
        figures.draw_curve({"cpu": {1: 10.0, 8: 30.0}, "gpu": {1: 50.0, 64: 55.0}}),
        figures.view_queue(found),
    ):
        assert all(ax.get_xlabel() for ax in fig.axes)


@pytest.mark.gpu
def test_on_a_gpu_the_kernel_forecasts_as_the_net_does():
    net = models.mlp([64, 64, 64, 1]).requires_grad_(False)
    torch.nn.init.zeros_(net[-1].bias)
    weights = [t.cuda() for t in market.stacked(net, torch.bfloat16)]

    def body(x, y):
        solutions.mlp_kernel[(1,)](x, *weights, y, LAYERS=2, WIDTH=64, BLOCK=64)

    assert market.error_of(body, net) < 1e-4

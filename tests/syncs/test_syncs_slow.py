"Lesson syncs's detector of slow steps."

import random

import pytest
import torch

from course_lib import syncs
from course_lib.syncs import slow as syncs_slow


def reported(times, **options):
    watch = syncs.SlowSteps(**options)
    return [i for i, t in enumerate(times) if watch(t)]


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.05, 0.1])
@pytest.mark.parametrize("drift", [-0.3, 0.0, 0.5])
def test_finds_planted_steps_and_nothing_on_a_clean_run(noise, drift):
    for seed in range(5):
        assert reported(syncs_slow.series(1000, noise, drift, seed=seed)) == []
        planted = sorted(random.Random(seed).sample(range(130, 1000), 6))
        assert reported(syncs_slow.series(1000, noise, drift, planted, 3.0, seed)) == planted


def test_slow_steps_in_a_row():
    planted = [*range(400, 412), 430]
    assert reported(syncs_slow.series(800, 0.05, 0.2, planted, 2.0)) == planted


def test_a_new_level_is_reported_until_it_is_the_level():
    times = syncs_slow.series(400, 0.02) + [2 * t for t in syncs_slow.series(400, 0.02, seed=1)[20:]]
    found = reported(times, window=40)
    assert found and min(found) == 400 and max(found) < 440


def test_warm_up_is_never_reported():
    assert reported(syncs_slow.series(60, 0.05), warmup=20, window=40) == []
    assert min(reported([1.0] * 60 + [9.0], warmup=20, window=40)) == 60
    assert reported([1.0] * 59 + [9.0], warmup=20, window=40) == []


def test_keeps_a_window():
    watch = syncs.SlowSteps(window=30)
    for t in syncs_slow.series(2000):
        watch(t)
    assert len(watch.recent) == 30


def test_refuses_what_is_no_time():
    for bad in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="expected a number of seconds"):
            syncs.SlowSteps()(bad)
    with pytest.raises(ValueError, match="4 steps or more"):
        syncs.SlowSteps(window=3)


def test_step_seconds_on_a_cpu():
    x = torch.randn(40, 40)
    took = syncs_slow.step_seconds(lambda: x @ x, 12, "cpu")
    assert len(took) == 12 and min(took) > 0

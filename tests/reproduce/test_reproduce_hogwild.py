import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest
import torch
from torch.nn import functional as F

from course_lib import data
from course_lib.reproduce import hogwild as reproduce_hogwild
from course_lib.reproduce.hogwild import WorkerError


@pytest.fixture(scope="module")
def workers():
    "Two workers for the tests that leave them alive: starting them takes seconds."
    with reproduce_hogwild.Workers(2) as found:
        yield found


def alive(processes):
    return [p.pid for p in processes if psutil.pid_exists(p.pid) and p.is_alive()]


@contextlib.contextmanager
def later(act, seconds=0.3):
    timer = threading.Timer(seconds, act)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def test_patches_are_49_different_features_of_each_image():
    x = data.digits().train[0][:50]
    features = reproduce_hogwild.patches(x)
    assert features.shape == (50, 49) and features.dtype == torch.int64
    assert features.min() >= 0 and features.max() < reproduce_hogwild.FEATURES
    assert all(len(row.unique()) == 49 for row in features)
    # The patch at row 3, column 2 has the code of its four pixels, the first counting least.
    image = (x[7, 0] * 3).long().clamp(max=2)
    code = sum(int(v) * 3**i for i, v in enumerate(image[3:5, 2:4].reshape(-1)))
    assert features[7, 3 * 7 + 2] == code + (3 * 7 + 2) * 81


def test_a_pass_alone_is_sgd_on_the_cross_entropy():
    x, y = (t[:40] for t in data.digits().train)
    features = reproduce_hogwild.patches(x)
    weights = torch.zeros(reproduce_hogwild.FEATURES, 10)
    reproduce_hogwild.worker(weights, reproduce_hogwild.Samples(features, y), 0, 1, seed=3, lr=0.1)
    w = torch.zeros_like(weights, dtype=torch.float64, requires_grad=True)
    for i in torch.randperm(40, generator=torch.Generator().manual_seed(3)).tolist():
        (grad,) = torch.autograd.grad(F.cross_entropy(w[features[i]].sum(0)[None], y[i : i + 1]), w)
        w = (w - 0.1 * grad).detach().requires_grad_()
    torch.testing.assert_close(weights.double(), w.detach(), rtol=1e-3, atol=1e-5)


def test_one_worker_repeats_itself_and_all_modes_converge(workers):
    runs = {m: workers.train(m, seed=2, epochs=2, lr=0.02) for m in reproduce_hogwild.MODES}
    again = workers.train("alone", seed=2, epochs=2, lr=0.02)
    assert torch.equal(again.weights, runs["alone"].weights)
    assert not torch.equal(workers.train("alone", seed=3, epochs=2, lr=0.02).weights, again.weights)
    for run in runs.values():
        assert run.loss < 0.4 and run.accuracy > 0.85 and run.seconds > 0
        assert abs(run.loss - runs["alone"].loss) < 0.1


def test_a_lock_keeps_every_addition(workers):
    assert workers.count(2000, locked=True) == 4000
    assert 2000 <= workers.count(2000) <= 4000


def test_bad_calls_are_one_sentence(workers):
    with pytest.raises(ValueError, match="mode is 'free'; expected one of 'alone', 'locked', 'lock-free'"):
        workers.train("free")
    with pytest.raises(ValueError, match="expected 1 to 64 processes"):
        reproduce_hogwild.Workers(0)
    with pytest.raises(WorkerError, match="inside `with Workers"):
        reproduce_hogwild.Workers(2).train("alone")


def test_a_worker_killed_in_mid_run_is_one_sentence_and_leaves_nothing():
    with reproduce_hogwild.Workers(2) as workers:
        processes = list(workers.processes)
        with (
            later(lambda: os.kill(processes[1].pid, signal.SIGKILL)),
            pytest.raises(
                WorkerError, match=r"^worker 1 was killed by SIGKILL \(train\); all workers were stopped$"
            ) as e,
        ):
            workers.train("locked", epochs=10_000)  # the dead worker may hold the lock
        assert e.value._render_traceback_() == [str(e.value)]
        assert alive(processes) == []
        with pytest.raises(WorkerError, match="not running"):
            workers.train("locked")


def test_a_run_that_lasts_too_long_is_stopped_and_named():
    with reproduce_hogwild.Workers(2) as workers:
        processes = list(workers.processes)
        workers.timeout = 0.5
        with pytest.raises(WorkerError, match=r"worker 0 and worker 1 did not end within 0.5 s \(train\)"):
            workers.train("lock-free", epochs=10_000)
        assert alive(processes) == []


def test_a_worker_that_raises_says_what():
    with reproduce_hogwild.Workers(1) as workers:
        processes = list(workers.processes)
        with pytest.raises(WorkerError, match=r"worker 0 raised TypeError: .*; all workers were stopped"):
            workers.train("alone", lr="fast")
        assert alive(processes) == []


@pytest.fixture
def interruptible():
    "A shell starts background jobs with interrupts ignored, and Python then leaves it so."
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_stops_the_workers(interruptible):
    with reproduce_hogwild.Workers(2) as workers:
        processes = list(workers.processes)
        with later(lambda: os.kill(os.getpid(), signal.SIGINT), 0.5), pytest.raises(KeyboardInterrupt):
            workers.train("lock-free", epochs=10_000)
        assert alive(processes) == []


def test_workers_do_not_outlive_a_killed_parent(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent("""
            from course_lib.reproduce import hogwild as reproduce_hogwild

            if __name__ == "__main__":
                with reproduce_hogwild.Workers(2) as workers:
                    print(*(p.pid for p in workers.processes), flush=True)
                    workers.train("locked", epochs=100_000)
        """)
    )
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2 and all(psutil.pid_exists(p) for p in pids)
    time.sleep(0.3)
    parent.kill()
    parent.wait()
    end = time.monotonic() + 20
    while any(psutil.pid_exists(p) for p in pids) and time.monotonic() < end:
        time.sleep(0.1)
    assert not any(psutil.pid_exists(p) for p in pids)

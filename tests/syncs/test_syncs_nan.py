"Lesson syncs's watch: its promise for every place of the bad loss, its threads, its memory."

import math
import threading
import time
import weakref

import pytest
import torch

from course_lib import syncs
from course_lib.syncs import nan as syncs_nan
from course_lib.syncs.queue import Queue


def told(watch, bad, value=math.nan, steps=60):
    for step in range(1, steps):
        if watch(torch.full((), value if step == bad else 1.0)):
            return step
    return None


@pytest.mark.parametrize("way, least", [("each", 0), ("copy", 1), ("thread", 2)])
def test_the_promise_holds_for_every_step(way, least):
    for within in (least, least + 1, 7):
        for bad in range(1, 16):
            watch = syncs.NanWatch(within, way)
            step = told(watch, bad, value=(math.nan, math.inf, -math.inf)[bad % 3])
            assert bad <= step <= bad + within
            assert watch.finish()


class Slow:
    "A fetch on a virtual GPU that is many times slower than Python."

    def __init__(self, kernel):
        self.queue = Queue(1.0, 0.4 * kernel)
        self.kernel = kernel

    def __call__(self, value):
        self.value, self.event = float(value), self.queue.record()
        return self

    def ready(self):
        return self.queue.query(self.event)

    def wait(self):
        self.queue.wait(self.event)

    def read(self):
        assert self.ready(), "read before it was ready"
        return self.value


@pytest.mark.parametrize("kernel", [0.1, 2.0, 30.0, 1000.0])
def test_the_promise_of_copies_holds_on_any_gpu_and_the_gpu_never_idles(kernel):
    for every in (1, 2, 5):
        for bad in range(1, 14):
            gpu = Slow(kernel)
            watch = syncs.CopyWatch(gpu, every)
            for step in range(1, 60):
                gpu.queue.launch(kernel)
                if watch(torch.full((), math.nan if step == bad else 1.0)):
                    break
            assert bad <= step <= bad + 2 * every - 1
            if kernel > 10:
                assert gpu.queue.idle() < 1e-9 * gpu.queue.total


@pytest.mark.parametrize("way", ["each", "copy", "thread"])
def test_nothing_bad_nothing_told(way):
    with syncs.NanWatch(10, way) as watch:
        assert told(watch, bad=None) is None
    assert watch.finish() is False


@pytest.mark.parametrize("way", ["each", "copy", "thread"])
def test_the_last_loss_is_looked_at_too(way):
    watch = syncs.NanWatch(10, way)
    watch(torch.ones(()))
    watch(torch.full((), math.nan))
    assert watch.finish() is True


def test_no_sync_in_the_hot_path():
    def run(watch):
        for _ in range(50):
            watch(torch.ones(()))

    assert syncs.find(run, syncs.NanWatch(8, "copy")) == []
    thread = syncs.NanWatch(8, "thread")
    assert syncs.find(run, thread) == []
    thread.finish()
    assert sum(w.times for w in syncs.find(run, syncs.NanWatch(8, "each"))) == 50


def test_half_precision_and_graphs():
    watch = syncs.NanWatch(2, "copy")
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    graphs = []
    for _ in range(6):
        loss = (p * 2).sum()
        graphs.append(weakref.ref(loss))
        assert watch(loss) is False
        del loss
    assert not any(g() for g in graphs)
    assert watch._watch.flag.grad_fn is None


def test_a_slow_thread_is_waited_for(monkeypatch):
    read = torch.Tensor.item

    def slow_item(t):
        time.sleep(0.005)
        return read(t)

    monkeypatch.setattr(torch.Tensor, "item", slow_item)
    watch = syncs.NanWatch(3, "thread")
    assert 4 <= told(watch, bad=4) <= 7
    watch.finish()


def test_an_error_in_the_thread_reaches_the_caller():
    class Broken:
        def detach(self):
            return self

        def item(self):
            raise RuntimeError("the device is gone")

    watch = syncs.NanWatch(2, "thread")
    with pytest.raises(RuntimeError, match="the device is gone"):
        for _ in range(100):
            watch(Broken())
            time.sleep(0.001)
    with pytest.raises(RuntimeError, match="the device is gone"):
        watch.finish()


def test_threads_end():
    before = threading.active_count()
    with syncs.NanWatch(5, "thread") as watch:
        watch(torch.ones(()))
    with pytest.raises(KeyError), syncs.NanWatch(5, "thread") as watch:
        watch(torch.ones(()))
        raise KeyError
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before
    assert watch(torch.ones(())) is False  # after the end it holds nobody up


@pytest.mark.parametrize(
    "within, way, said",
    [
        (5, "copies", "choose from each, copy, thread"),
        (0, "copy", "1 or more"),
        (1, "thread", "2 or more"),
        (2.5, "copy", "whole number"),
    ],
)
def test_refuses_what_cannot_be(within, way, said):
    with pytest.raises(ValueError, match=said) as e:
        syncs.NanWatch(within, way)
    assert "\n" not in str(e.value)


def test_pinned_on_a_cpu():
    fetch = syncs_nan.Pinned("cpu")
    copy = fetch(torch.tensor(2.5, dtype=torch.float64))
    copy.wait()
    assert copy.ready() and copy.read() == 2.5

"Lesson syncs against a real GPU: the driver's syncs, the profiler's, the watch's hot path, a real trace."

import math

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from course_lib import models, syncs
from course_lib.syncs import loops as syncs_loops
from course_lib.syncs import slow as syncs_slow
from course_lib.syncs import trace as syncs_trace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# Only with a GPU is there something to copy from: memory of the host, pinned or not.
COPIES_THAT_WAIT = ["h.to(x.device)", "x.copy_(h)", "torch.tensor([1.0, 2.0], device=x.device)"]
COPIES_THAT_GO_ON = ["h.to(x.device, non_blocking=True)", "pinned.to(x.device, non_blocking=True)",
                     "x.copy_(pinned, non_blocking=True)"]  # fmt: skip


@pytest.fixture(autouse=True)
def host_tensors(monkeypatch):
    names = syncs._names

    def more(device):
        h = torch.randn(4, 5)
        return {**names(device), "h": h, "pinned": h.pin_memory()}

    monkeypatch.setattr(syncs, "_names", more)


@pytest.mark.parametrize("code", syncs.WAITS + syncs.GOES_ON + COPIES_THAT_WAIT + COPIES_THAT_GO_ON)
def test_the_finder_and_the_driver_agree(code):
    waits = code in syncs.WAITS + COPIES_THAT_WAIT
    assert syncs.driver_waits(code) is waits
    assert syncs.finder_waits(code, "cuda") is waits


def profiled_syncs(code):
    "How often the profiler sees a stream synchronised within a line."
    names = syncs._names("cuda")
    compiled = compile(code, "line", "exec")
    exec(compiled, dict(names))
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as run:
        exec(compiled, dict(names))
    return sum(e.name in ("cudaStreamSynchronize", "cudaEventSynchronize") for e in run.events())


def test_the_profiler_agrees(capsys):
    profiled_syncs("x + 1")  # the first profile of a process can miss events while it starts
    waits = {code: profiled_syncs(code) for code in syncs.WAITS}
    goes_on = {code: profiled_syncs(code) for code in syncs.GOES_ON}
    with capsys.disabled():
        print(f"\nsyncs by the profiler, of lines that wait: {waits}\nof lines that go on: {goes_on}")
    assert [code for code, n in waits.items() if n == 0] == []
    assert [code for code, n in goes_on.items() if n] == []


def feed(steps, loop, **kw):
    model = models.mlp([64, 256, 256, 10]).cuda()
    opt = torch.optim.SGD(model.parameters(), 1e-3)
    return loop(model, opt, syncs_loops.batches(steps, 128, device="cuda"), **kw)


def test_the_mended_loop_runs_under_the_debug_mode():
    feed(2, syncs.train, log=lambda line: None)
    model = models.mlp([64, 32, 10]).cuda()
    opt = torch.optim.SGD(model.parameters(), 1e-3)
    batches = syncs_loops.batches(6, 32, device="cuda")

    def guarded():
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        yield from batches
        torch.cuda.set_sync_debug_mode("default")  # after the last step the loop may read

    try:
        out = syncs.train(model, opt, guarded(), log=lambda line: None, every=2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert math.isfinite(out["best"]) and sum(out["guesses"]) == 6 * 32


def test_the_watch_by_copies_runs_under_the_debug_mode():
    watch = syncs.NanWatch(10, "copy", "cuda")
    losses = [torch.full((), math.nan if i == 31 else 1.0, device="cuda") for i in range(1, 60)]
    watch(losses[0])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        told = next(i for i, loss in enumerate(losses[1:], 2) if watch(loss))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert 31 <= told <= 41 and watch.finish()


@pytest.mark.parametrize("way", ["each", "copy", "thread"])
def test_the_promise_on_a_busy_gpu(way):
    x = torch.randn(4096, 4096, device="cuda")
    watch = syncs.NanWatch(10, way, "cuda")
    told = None
    for step in range(1, 80):
        y = (x @ x).mean() * 0 + (math.nan if step == 20 else 1.0)
        if watch(y):
            told = step
            break
    assert told is not None and 20 <= told <= 30
    assert watch.finish()


def test_step_seconds_by_events():
    x = torch.randn(2048, 2048, device="cuda")
    numbers = iter(range(1000))

    def step():
        for _ in range(20 if next(numbers) == 150 else 1):
            x @ x

    step()
    took = syncs_slow.step_seconds(step, 200, "cuda")
    assert len(took) == 200 and max(range(200), key=lambda i: took[i]) in (149, 0)


def test_a_real_trace_names_item(tmp_path):
    x = torch.randn(2048, 2048, device="cuda")

    def loop():
        for _ in range(4):
            y = x
            for _ in range(4):
                y = x @ y
            y.sum().item()

    events = syncs_trace.load(syncs_trace.record(loop, tmp_path / "t.json"))
    gaps = syncs_trace.gaps(events)
    assert len(syncs_trace.busy(events)) > 1 and gaps[0].duration > 0
    assert "aten::item" in {g.cause for g in gaps[:4]}


def test_waiting_costs():
    assert 1e-6 < syncs_loops.sync_cost() < 1e-3
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    queued, total = syncs_loops.queued_and_total(lambda: x @ x, 100)
    assert queued < 0.7 * total

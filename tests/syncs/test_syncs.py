"Lesson syncs's finder against two independent judges, its queue, its traces and its figures."

import collections
import json
import math
import re

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from course_lib import models, show, syncs
from course_lib.syncs import figures, solutions

# One line each; x is [4, 5], index [4] (int64), mask [4, 5] (bool), p a parameter with a gradient.
WAITS = """x.sum().item() | float(x[0, 0]) | f'{x.sum():.2f}' | str(x) | x.tolist() | x.cpu() | x.to('cpu')
1 if x.sum() > 0 else 2 | assert x.isfinite().all() | 3 in index | max(x[0, 0], x[0, 1]) | range(index[0])
math.sqrt(x[0, 0] ** 2) | x[:index[3]] | x[index[1]] | x.nonzero() | torch.where(mask) | x[mask]
y = x.clone(); y[mask] = x[0, 0] | x.masked_select(mask) | x.unique() | torch.bincount(index)
x.repeat_interleave(index, 0) | torch.equal(x, x + 1) | torch.allclose(x, x + 1)
torch.tensor([x[0, 0], x[0, 1]]) | torch.nn.utils.clip_grad_norm_([p], 1.0, error_if_nonfinite=True)"""
GOES_ON = """x + 1 | x.shape[0] * len(x) + x.numel() | x.sum() > 0 | x.isnan().any() | x.detach() | sum(x[0])
[row + 1 for row in x] | x.argmax() | x[index] | x[index[1:2]] | torch.where(mask, x, 0.0) | x.to(x.device)
x.masked_fill(mask, 0.0) | y = x.clone(); y[mask] = 1.0 | torch.maximum(x[0, 0], x[0, 1]) | x.cumsum(0)
x.repeat_interleave(index, 0, output_size=5) | torch.stack([x[0, 0], x[0, 1]]) | x.to(torch.float64)
x.to('cpu', non_blocking=True) | torch.zeros(3, device=x.device) | torch.nn.utils.clip_grad_norm_([p], 1.0)"""
# Each waits on an H200, and no list says so: it must be named.
MAY_WAIT = """torch.normal(0.0, x.abs()) | torch.histc(x) | x.to_sparse() | torch.linalg.svd(x)
torch.linspace(x[0, 0], x[0, 1], 5) | torch.segment_reduce(x, 'sum', lengths=index.clamp(min=1)[[1, 1]] * 2)
torch.linalg.eigh(x.T @ x)"""
WAITS, GOES_ON, MAY_WAIT = (re.split(r" \| |\n", text) for text in (WAITS, GOES_ON, MAY_WAIT))


def names(device):
    x = torch.randn(4, 5, device=device)
    p = torch.nn.Parameter(torch.ones(3, device=device))
    p.grad = torch.ones(3, device=device)
    index = torch.tensor([2, 1, 0, 2], device=device)
    mask = torch.arange(20, device=device).view(4, 5) % 3 == 0
    return {"torch": torch, "math": math, "x": x, "index": index, "mask": mask, "p": p}


@pytest.mark.parametrize("code", WAITS)
def test_the_finder_sees_what_waits(code):
    found = syncs.find(exec, code, names("cpu"))
    assert found and all(w.where != "may wait" for w in found)


@pytest.mark.parametrize("code", GOES_ON)
def test_the_finder_accuses_nobody_wrongly(code):
    assert syncs.find(exec, code, names("cpu")) == []


@pytest.mark.parametrize("code", MAY_WAIT)
def test_an_operator_on_no_list_is_named(code):
    waits = [w for w in syncs.find(exec, code, names("cpu")) if w.where == "may wait"]
    assert waits and waits[0].code.startswith("operator ")


def test_fake_tensors_agree():
    "They have shapes and no values, so whatever needs a value must fail."
    from torch._subclasses import fake_tensor as fake

    # Their results' shapes are known without waiting, or they are calls that fakes don't take.
    cannot = ("str(", "f'", "tolist", "cpu", "y[mask] = x", "torch.tensor", "allclose", "error_if")
    judged = 0
    for code in WAITS + GOES_ON:
        if any(word in code for word in cannot):
            continue
        with fake.FakeTensorMode():
            given = names("cuda")
            try:
                exec(code, given)
                waits = False
            except (fake.DataDependentOutputException, fake.DynamicOutputShapeException):
                waits = True
        assert waits == (code in WAITS), code
        judged += 1
    assert judged > 35


def test_find_names_line_code_and_times_and_sees_a_backward_pass():
    def lively(x):
        for row in x:
            float(row.sum())
        x[x > 0].sum().backward()

    found = syncs.find(lively, torch.randn(3, 4, requires_grad=True))
    assert [(w.times, w.code) for w in found] == [(3, "float(row.sum())"), (2, "x[x > 0].sum().backward()")]
    assert syncs.report(found).endswith("5 syncs on 2 lines")
    assert syncs.report([]) == "nothing makes Python wait"


def test_a_queue():
    queue = syncs.Queue(enqueue=10, round_trip=5)
    for _ in range(3):
        queue.launch(30)
    assert (queue.now, queue.free, queue.total) == (30, 100, 100)
    queue.synchronize()
    assert queue.now == 105
    queue.launch(30)
    assert queue.total == 145  # idle from 100 to 115
    assert solutions.largest_gap(syncs.simulated_events(queue)) == (100, 15, "aten::item")


def test_explore():
    assert syncs.explore(sync_every=0)["slower"] == 1
    assert syncs.explore()["slower"] == pytest.approx(720 / 296)
    assert syncs.explore(kernel=60, sync_every=8)["slower"] < 1.05


def test_events_of_a_real_profile():
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as prof:
        torch.ones(3).sum().item()
    found = syncs.events(prof)
    assert {"ph", "cat", "name", "pid", "tid", "ts", "dur"} <= set(found[0])
    assert "aten::item" in {e["name"] for e in found}
    assert json.dumps(found) and solutions.largest_gap(found) is None


def test_step_times():
    times = syncs.step_times(2000, noise=0.001, bumps=0.1, planted=[700])
    watch = solutions.SlowSteps(20, 100)
    assert [i for i, t in enumerate(times) if watch(t)] == [700]
    assert times[0] > 0.2


def test_figures():
    queue = syncs.explore()
    assert len(figures.view_queue(queue).axes) == 1
    sim = syncs.Queue()
    for _ in range(4):
        sim.launch(30)
        sim.synchronize()
    events = syncs.simulated_events(sim)
    fig = figures.draw_traces(
        {"one": (events, solutions.largest_gap(events)), "two": (events, None)}, zoom=40
    )
    title = fig.axes[0].get_title(loc="left") or fig.axes[0].get_title()
    assert title.startswith("one: largest gap 20 µs")
    assert [t.get_text() for t in fig.axes[0].get_yticklabels()] == ["Python", "GPU"]
    events.append({"ph": "X", "cat": "cpu_op", "name": "early", "pid": 1, "tid": 2, "ts": -900, "dur": 1})
    fig = figures.draw_traces({"one": (events, solutions.largest_gap(events))}, zoom=40)
    assert [t.get_text() for t in fig.axes[0].get_yticklabels()] == [
        "Python",
        "autograd",
        "GPU",
    ]  # all threads
    bars = {"a": {"returned": 1.0, "done": 2.0, "print": 3.0}}
    for drawn in (figures.draw_failure(bars), figures.draw_ratios({8: [1, 2]}, "x", "y"),
                  figures.draw_ladder({"as found": [2.0, 3.0], "+ one": [1.0, 1.5]}),
                  figures.draw_slow([1.0, 2.0, 1.0], [1], [1], "title")):  # fmt: skip
        show.figure(drawn)


gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@gpu
@needs_gpu
@pytest.mark.parametrize("code", WAITS + GOES_ON)
def test_the_finder_and_the_debug_mode_agree(code):
    given = names("cuda")
    exec(code, given)  # the first call may set up a library, and wait for that
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        exec(code, given)
        waits = False
    except RuntimeError as e:
        assert "synchroniz" in str(e)
        waits = True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert waits == (code not in GOES_ON)


@gpu
@needs_gpu
def test_the_fixed_loop_waits_for_nothing_on_a_gpu():
    model = models.mlp([64, 32, 10]).cuda()
    opt = torch.optim.SGD(model.parameters(), 1e-3)
    batches = syncs.batches(6, 32, device="cuda")
    solutions.train(model, opt, batches[:2], lambda line: None, 2)

    def guarded():
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        yield from batches
        torch.cuda.set_sync_debug_mode("default")  # after the last step the loop may read

    try:
        found = solutions.train(model, opt, guarded(), lambda line: None, 2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sum(found["guesses"]) == 6 * 32


def test_ragged_and_batches():
    x, lengths = syncs.ragged(16)
    assert bool((x.isnan().any(2).sum(1) == 64 - lengths).all())
    labels = collections.Counter(y for _, ys in syncs.batches(4) for y in ys.tolist())
    assert labels[-1] > 10


def test_on_meta_counts_copies_and_sees_mixed_devices():
    x = torch.ones(3, 4, device="meta")

    def copies(x):
        torch.tensor(1.0, device=x.device), x.new_tensor([1.0]), torch.zeros(3).to(x.device)
        torch.full((), 1.0, device=x.device), x.new_zeros(()), torch.tensor(1.0) + x, x.to(x.device)

    assert syncs.on_meta(copies, x) == (3, None)
    n, error = syncs.on_meta(lambda x: x + torch.arange(4), x)
    assert n == 0 and "device" in error
    assert syncs.on_meta(lambda x: x.sum().item(), x) == (0, None)

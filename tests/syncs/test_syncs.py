"Lesson syncs's finder, its witnesses, its loops, its simulated queue, and the checks' manners."

import io
import math
from contextlib import redirect_stdout

import pytest
import torch

from course_lib import checking as core
from course_lib import meter, models, syncs
from course_lib.syncs import check
from course_lib.syncs import loops as syncs_loops
from course_lib.syncs import queue as syncs_queue

# --- the finder ---------------------------------------------------------------------


def test_the_lists_are_long_enough():
    assert len(set(syncs.WAITS)) >= 15 and len(set(syncs.GOES_ON)) >= 10
    assert not set(syncs.WAITS) & set(syncs.GOES_ON)


@pytest.mark.parametrize("code", syncs.WAITS)
def test_the_finder_sees_what_waits(code):
    assert syncs.finder_waits(code)


@pytest.mark.parametrize("code", syncs.GOES_ON)
def test_the_finder_accuses_nobody_wrongly(code):
    assert not syncs.finder_waits(code)


def test_fake_tensors_agree():
    said = {code: syncs.fake_waits(code) for code in (*syncs.WAITS, *syncs.GOES_ON)}
    assert {c for c in syncs.WAITS if said[c] is False} == set()
    assert {c for c in syncs.GOES_ON if said[c] is True} == set()
    assert sum(said[c] is True for c in syncs.WAITS) >= 15
    assert sum(said[c] is False for c in syncs.GOES_ON) >= 10


def talkative(x):
    total = x.sum()
    if total > 0:
        x = x[x > 0]
    return [float(v) for v in x]


def test_find_names_file_line_and_code():
    first = talkative.__code__.co_firstlineno
    found = syncs.find(talkative, torch.tensor([3.0, -1.0, 2.0]))
    assert found == [
        (f"test_syncs.py:{first + 2}", 1, "if total > 0:"),
        (f"test_syncs.py:{first + 3}", 1, "x = x[x > 0]"),
        (f"test_syncs.py:{first + 4}", 2, "return [float(v) for v in x]"),
    ]
    text = syncs.report(found)
    assert text.splitlines()[-1] == "4 syncs on 3 lines" and "if total > 0:" in text
    assert syncs.report([]) == "nothing makes Python wait"
    assert syncs.report(found[:1]).endswith("1 sync on 1 line")


def test_find_sees_a_backward_pass_and_passes_on_errors():
    x, mask = torch.randn(4, requires_grad=True), torch.tensor([True, False, True, True])
    found = syncs.find(lambda: x[mask].sum().backward())
    assert sum(w.times for w in found) == 2  # the read through the mask, and the write that is its gradient
    with pytest.raises(ZeroDivisionError):
        syncs.find(lambda: 1 / 0)


def test_tensors_in_a_list_are_read_one_by_one():
    x = torch.randn(3)
    for make in (torch.tensor, torch.as_tensor, x.new_tensor):
        with meter.count() as c:
            make([x[0], [x[1], 2.0][0]])
        assert c.syncs == 2
    with meter.count() as c:
        torch.tensor([1.0, 2.0])
        torch.tensor(3.0)
    assert c.syncs == 0


# --- the loops ----------------------------------------------------------------------


def test_the_mended_loop_waits_only_at_the_end():
    model = models.mlp([64, 16, 10])
    opt = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
    lines = []
    found = syncs.find(syncs.train, model, opt, syncs_loops.batches(7), lines.append, 3)
    assert {w.times for w in found} <= {1, 3} and len(lines) == 3  # not 7
    with redirect_stdout(io.StringIO()):
        check.train(syncs.train)


def test_loop_seconds_take_turns():
    calls = []

    def loop(name):
        return lambda *args, **kwargs: calls.append((name, len(args[2])))

    took = syncs_loops.loop_seconds({"a": loop("a"), "b": loop("b")}, 8, steps=4, rounds=2)
    assert calls == [("a", 3), ("b", 3), ("a", 4), ("b", 4), ("a", 4), ("b", 4)]
    assert set(took) == {"a", "b"} and min(took.values()) > 0


def test_costs():
    queued, total = syncs_loops.queued_and_total(lambda: torch.ones(3) + 1, 10)
    assert 0 < queued <= total
    assert abs(syncs_loops.sync_cost(n=20, rounds=3)) < 0.01
    took = syncs_loops.watch_seconds(
        {"none": None, "each": lambda: syncs.NanWatch(way="each", within=0)}, 8, 3, 1
    )
    assert set(took) == {"none", "each"}


def test_pool_by_rows_and_at_once():
    for n in (0, 1, 9):
        x, lengths = syncs_loops.ragged(n, longest=7, width=3, seed=n)
        lengths[:1] = 0
        assert torch.allclose(syncs.pool(x, lengths), syncs_loops.pool_by_rows(x, lengths), atol=1e-6)


# --- the simulated queue ------------------------------------------------------------


def test_a_queue_that_python_fills_faster_than_it_empties():
    q = syncs_queue.run(steps=200, enqueue=10, kernel=100)
    assert (q.now, q.total, q.idle()) == (2000, 10 + 200 * 100, 0)


def test_a_queue_that_runs_empty():
    q = syncs_queue.run(steps=5, enqueue=10, kernel=4)
    assert (q.now, q.total, q.idle()) == (50, 54, 4 * 6)


def test_a_sync_after_every_kernel():
    q = syncs_queue.run(steps=3, enqueue=8, kernel=12, sync_every=1, round_trip=10)
    assert q.now == q.total == 3 * (8 + 12 + 10)
    assert q.idle() == 2 * (8 + 10)
    assert [s.kind for s in q.spans if s.lane == "Python"] == ["launch", "wait"] * 3


def test_events_come_in_order():
    q = syncs_queue.Queue(enqueue=1, round_trip=2)
    q.launch(10)
    first = q.record()
    q.launch(10)
    assert not q.query(first)
    q.wait(first)
    assert q.now == 11 + 2 and q.query(first)
    q.wait(first)  # come already: only the call is paid
    assert q.now == 15
    q.python(100)
    q.synchronize()
    assert q.now == 15 + 100 + 2 and syncs_queue.Queue().idle() == 0


def test_explore():
    data = syncs_queue.explore()
    assert data["clean"] == syncs_queue.explore(sync_every=0)["total"] < data["total"]
    assert syncs_queue.explore(sync_every=0)["busy"] > data["busy"]


# --- the checks, beyond what test_lessons holds of every check ----------------------

CHECKS = core.exercises(check)


def refused(number, *answer):
    with redirect_stdout(io.StringIO()) as out, pytest.raises(core.Wrong) as e:
        CHECKS[number](*answer)
    assert not out.getvalue()
    return str(e.value)


def test_one_hot_gets_a_word_of_its_own():
    def train(model, opt, batches, log, every):
        for x, y in batches:
            opt.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y.clamp(min=0))
            loss.backward()
            opt.step()
            torch.nn.functional.one_hot(y.clamp(min=0), 20)
        return {}

    assert "reads its input on a CPU" in refused("syncs.1", train)


def test_a_check_names_the_line_that_waits():
    def pool(x, lengths):
        longest = int(lengths.max()) if len(lengths) else 0
        inside = torch.arange(longest) < lengths[:, None]
        return x[:, :longest].masked_fill(~inside[..., None], 0).sum(1) / lengths[:, None].clamp(min=1)

    assert "`longest = int(lengths.max()) if len(lengths) else 0`" in refused("syncs.3", pool)


def test_other_ways_to_be_right():
    class Watch:
        "A flag of its own kind, and the copy waited for before the new one is started."

        def __init__(self, fetch, every):
            self.fetch, self.every, self.n, self.bad, self.copy, self.told = (
                fetch,
                every,
                0,
                None,
                None,
                False,
            )

        def __call__(self, loss):
            bad = ~torch.isfinite(loss.detach())
            self.bad = bad if self.bad is None else self.bad | bad
            self.n += 1
            if self.copy and self.n % self.every == 0:
                self.copy.wait() if not self.copy.ready() else None
            if self.copy and self.copy.ready():
                self.told, self.copy = self.told or self.copy.read() > 0, None
            if self.n % self.every == 0:
                self.copy = self.fetch(self.bad)
            return self.told

    def pool(x, lengths):
        inside = (torch.arange(x.shape[1])[None] < lengths[:, None])[..., None]
        return torch.where(inside, x, torch.zeros_like(x)).sum(dim=1) / torch.clamp(lengths, min=1)[:, None]

    with redirect_stdout(io.StringIO()):
        check.nan_watch(Watch)
        check.pool(pool)
        check.slow_steps(lambda warmup, window: syncs.SlowSteps(window, warmup, threshold=7))


def test_an_answer_fitted_to_the_lesson_is_refused():
    refused("syncs.4", lambda events: (421.0, 72.0, None))
    assert math.isfinite(len(refused("syncs.5", lambda warmup, window: lambda seconds: seconds > 0.018)))

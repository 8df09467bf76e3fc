"Checks of syncs. Oracles: a plain loop, a virtual GPU, float64 by rows, a ruler, planted steps."

import functools
import gc
import math
import random
import re

import torch
from torch import nn

from course_lib import checking as core
from course_lib import meter, syncs
from course_lib.checking import yours  # noqa: F401
from course_lib.syncs import check_inputs as inputs

# --- syncs.1 ---------------------------------------------------------------------------


@core.exercise("syncs.1", "no sync before the last step, and all seven answers are those of the slow loop")
def train(answer):
    core.need_callable(answer)
    for every in random.sample((2, 3, 4, 5), 2):
        kinds = set()
        while kinds < inputs.KINDS:  # everything must happen that an answer can get wrong
            features, hidden, classes = random.sample(range(4, 12), 3)
            model, twin = (
                nn.Sequential(nn.Linear(features, hidden), nn.Tanh(), nn.Linear(hidden, classes))
                for _ in range(2)
            )
            twin.load_state_dict(model.state_dict())
            batches = [inputs.batch(i, features, classes) for i in range(random.randrange(9, 14))]
            want, lines, kinds = inputs.plain_loop(twin, core.clone(batches), 0.3, every)
        _one_training(answer, model, batches, every, want, lines, twin)


def _one_training(answer, model, batches, every, want, lines, twin):
    opt, logged, seen = torch.optim.SGD(model.parameters(), 0.3, foreach=False), [], {}
    weight = next(model.parameters())

    with meter.count(portable=False) as counts:

        def feed():
            version = weight._version
            for i, (x, y) in enumerate(batches):
                core.require(
                    i == 0 or weight._version > version,
                    f"batch {i + 1} was asked for before the step on batch {i} was made: "
                    "take the batches one by one, for there may be more than fit in memory",
                )
                version = weight._version
                yield x, y
            seen["where"] = syncs.places(counts)

        got = core.call(answer, model, opt, feed(), logged.append, every)
    core.require("where" in seen, f"not all of the {len(batches)} batches were used")
    _no_sync(seen["where"], f"{len(batches)} steps")
    _same_results(got, want)
    _same_lines(logged, lines)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        core.close(p, q.detach(), "the weights after training", rtol=2e-3, atol=2e-4)


def _no_sync(places, during):
    if not places:
        return
    where, code = max(dict.fromkeys(places), key=places.count)  # of equals the first
    line = f" in `{code[:90]}`" if code else ""
    tip = ""
    if "one_hot" in code:
        tip = "; one_hot reads its input on a CPU, so write (guess[:, None] == torch.arange(n)).sum(0)"
    raise core.Wrong(
        f"Python waits {len(places)} times in {during}, {places.count((where, code))} of them "
        f"at {where}{line}{tip}"
    )


def _same_results(got, want):
    if not isinstance(got, dict) or set(got) != set(want):
        found = f"a dict with {sorted(map(str, got))}" if isinstance(got, dict) else core.kind(got)
        raise core.Wrong(f"expected a dict with best, guesses, hardest and right, got {found}")
    core.close(got["best"], want["best"], '"best", the lowest loss', rtol=2e-3, atol=1e-5)
    core.equal(got["right"], want["right"], '"right", the labels guessed right')
    guesses = got["guesses"]
    guesses = guesses.tolist() if isinstance(guesses, torch.Tensor) else guesses
    core.equal(guesses, want["guesses"], '"guesses", how often each class was guessed')
    core.close(
        got["hardest"], torch.stack(want["hardest"]), '"hardest", one sample for each step', rtol=0, atol=0
    )


def _same_lines(got, want):
    said = [re.fullmatch(r"step (\d+): loss (-?[\d.]+)", str(line)) for line in got]
    steps = [int(m[1]) if m else None for m in said]
    numbers = [s for s, _ in want]
    core.require(
        steps == numbers,
        f"log got {len(got)} lines for the steps {steps}: expected `step 0: loss 1.2345` and so on "
        f"for the steps {numbers}, in order",
    )
    for m, (step, loss) in zip(said, want, strict=True):
        core.close(float(m[2]), loss, f"the loss logged for step {step}", rtol=2e-3, atol=2e-4)


# --- syncs.2 ---------------------------------------------------------------------------


@core.exercise("syncs.2", "told in time on 12 virtual GPUs, no false alarm, no sync, and the GPU never idle")
def nan_watch(answer):
    core.need_callable(answer, "a class")
    for every in (1, 2, random.randrange(3, 6), random.randrange(6, 12)):
        bad = random.randrange(2 * every + 1, 5 * every + 2)
        _one_watch(answer, every, bad, math.nan, slow=True)
        _one_watch(answer, every, bad + 1, random.choice([math.inf, -math.inf]), slow=False)
        _one_watch(answer, every, None, None, slow=every % 2 == 0)


def _one_watch(answer, every, bad, value, slow):
    steps = 12 * every + 9
    where = f"every = {every} on a {'slow' if slow else 'fast'} GPU"
    with meter.count(portable=False) as counts:
        world = inputs.World(counts, 1.0, 30.0 if slow else 0.5)
        watch = core.call(answer, world.fetch, every)
        told = None
        for i in range(1, steps + 1):
            world.step()
            loss = torch.full((), value if i == bad else 2.0 + i % 3, requires_grad=True) * 1.0
            if _said(watch, loss):
                told = i
                break
    _no_sync(syncs.places(counts), f"{steps} steps with {where}")
    core.require(not world.early, f"with {where}, a copy was read before it was ready")
    _judge_watch(world, every, bad, told, steps, slow, where)


def _said(watch, loss):
    got = watch(loss)
    if type(got) is not bool:
        raise core.Wrong(
            f"the watch must answer True or False (`if` on a tensor waits), got {core.kind(got)}"
        )
    return got


def _judge_watch(world, every, bad, told, steps, slow, where):
    if bad is None:
        core.require(told is None, f"with {where}, losses that are all finite were reported in step {told}")
    else:
        latest = bad + 2 * every - 1
        if not slow:  # the copy that follows the bad step, and the call after it
            latest = min(latest, -(-bad // every) * every + 1)
        core.require(
            told is None or told >= bad,
            f"with {where}, the bad loss of step {bad} was reported in step {told}",
        )
        core.require(
            told is not None and told <= latest,
            f"with {where}, the bad loss of step {bad} must be reported in step {latest} at the latest, "
            + (f"and was in step {told}" if told else f"and was not in {steps} steps"),
        )
    most = (told or steps) // every + 1
    core.require(
        world.fetched <= most, f"with {where}, {world.fetched} copies were started in {told or steps} steps: "
        f"expected one for every {every}"
    )  # fmt: skip
    if slow:
        core.require(
            world.queue.idle() < 1e-6 * world.queue.total,
            f"with {where}, the GPU stood idle: wait only for a copy with steps behind it in the queue",
        )


# --- syncs.3 ---------------------------------------------------------------------------


@core.exercise(
    "syncs.3", "means right for ragged, empty and single batches; as few operators for 41 as for 7"
)
def pool(answer):
    core.need_callable(answer)
    n, t, d = random.sample(range(3, 20), 3)
    for case, shape in {
        "": (n, t, d), "one sample": (1, t, d), "no sample": (0, t, d), "one row each": (n, 1, d),
        "one column": (n, t, 1), "NaN within a length": (n, t, d),
    }.items():  # fmt: skip
        _pooled(answer, case, *shape)
    counts = []
    for n, t, d in ((7, 13, 3), (41, 13, 3), (41, 29, 8)):
        x, lengths = inputs.ragged(n, t, d, torch.float32)
        got = _counted(answer)
        core.call(got, x, lengths)
        counts.append((n, t, got.counts))
    for n, t, c in counts:
        _no_sync(syncs.places(c), f"a batch of {n}")
        core.require(
            c.ops == counts[0][2].ops,
            f"{counts[0][2].ops} operators for {counts[0][0]} samples of {counts[0][1]} rows, and {c.ops} "
            f"for {n} of {t}: expected the same number",
        )
    core.require(counts[0][2].ops <= 20, f"{counts[0][2].ops} operators: expected 20 or fewer; 5 are enough")


def _counted(answer):
    @functools.wraps(answer, assigned=("__name__",) if hasattr(answer, "__name__") else (), updated=())
    def run(*args):
        with meter.count(portable=False) as run.counts:
            return answer(*args)

    return run


def _pooled(answer, case, n, t, d):
    dtype = random.choice([torch.float32, torch.float64])
    x, lengths = inputs.ragged(n, t, d, dtype)
    if case == "NaN within a length":
        x[int(lengths.argmax()), 0, 0] = math.nan
    want = torch.zeros(n, d, dtype=torch.float64)
    for i, length in enumerate(lengths.tolist()):
        if length:
            want[i] = x[i, :length].double().mean(0)
    what = f"means of {n} samples of up to {t} rows of {d}" + (f" ({case})" if case else "")
    got = core.call(answer, x, lengths)
    if isinstance(got, torch.Tensor) and got.shape == want.shape:
        # core.close refuses every NaN, and here one may be right.
        core.require(
            bool((got.isnan() == want.isnan()).all()),
            f"{what}: {int(got.isnan().sum())} values are NaN, expected {int(want.isnan().sum())}; what lies "
            "past a length must not count, what lies within must",
        )
        got, want = got.nan_to_num(nan=0.0), want.nan_to_num(nan=0.0)
    core.close(got, want, what, rtol=1e-4, atol=1e-5)


# --- syncs.4 ---------------------------------------------------------------------------


@core.exercise("syncs.4", "largest gap and its cause right in 40 traces of up to three streams")
def largest_gap(answer):
    core.need_callable(answer)
    for case in range(40):
        events, causes = inputs.trace(1 + case % 3, blocks=random.randrange(2, 6))
        want = inputs.by_ruler(events, causes)
        shift = random.choice([0, 0, 1_000_000_000 + random.randrange(10**6)])
        events = [{**e, "ts": e["ts"] + shift} if "ts" in e else e for e in events]
        random.shuffle(events)
        _one_trace(answer, events, (want[0] + shift, *want[1:]), f"a trace of {len(events)} events")
    host = [
        inputs.event("cpu_op", "aten::add", 3, 9, 1),
        inputs.event("cuda_runtime", "cudaDeviceSynchronize", 11, 40, 1),
    ]
    for events, what in (
        (host, "a trace in which the GPU does nothing"),
        ([*host, inputs.event("kernel", "k", 5, 8, 7, 0)], "a trace with one kernel"),
        (
            [*host, inputs.event("kernel", "k", 13, 20, 7, 0), inputs.event("kernel", "m", 5, 14, 20, 0)],
            "a trace without a gap",
        ),
    ):
        got = core.call(answer, events)
        core.require(got is None, f"{what}: expected None, got {str(got)[:80]}")


def _one_trace(answer, events, want, what):
    got = core.call(answer, events)
    if not isinstance(got, list | tuple) or len(got) != 3:
        size = f" of {len(got)}" if isinstance(got, list | tuple) else ""
        raise core.Wrong(f"{what}: expected (start, duration, cause), got {core.kind(got)}{size}")
    core.close(got[1], want[1], f"duration of the largest gap in {what}", rtol=0, atol=1e-3)
    core.close(got[0], want[0], f"start of the largest gap in {what}", rtol=0, atol=1e-3)
    if got[2] != want[2]:
        raise core.Wrong(f"cause of the largest gap in {what}: expected {want[2]!r}, got {got[2]!r}")


# --- syncs.5 ---------------------------------------------------------------------------


@core.exercise("syncs.5", "every planted step found and no false alarm in 12 noisy, drifting runs")
def slow_steps(answer):
    core.need_callable(answer, "a class")
    for case in range(12):
        noise = (0.015, 0.09, random.uniform(0.02, 0.08))[case % 3]
        drift = (0.3, -0.2, 0.0, random.uniform(-0.2, 0.3))[case // 3]
        planted = inputs.plant(case)
        times = inputs.run(900, noise, drift, planted, scale=10 ** random.uniform(-4, 1))
        what = f"a run with {100 * noise:.1f} % noise and {100 * drift:+.0f} % drift"
        watch = core.call(answer, inputs.WARMUP, inputs.WINDOW)
        found = []
        for i, t in enumerate(times):
            found += [i] if _reported(watch, t) else []
        _same_steps(found, planted, what)
        core.require(
            _held(watch) <= 4 * inputs.WINDOW,
            f"after {len(times)} steps the detector holds {_held(watch)} numbers: keep the last "
            f"{inputs.WINDOW} and forget the rest",
        )


def _reported(watch, seconds):
    got = watch(seconds)
    if not isinstance(got, bool):
        raise core.Wrong(f"the detector must answer True or False, got {core.kind(got)}")
    return got


def _same_steps(found, planted, what):
    false = [i for i in found if i not in planted]
    missed = [i for i in planted if i not in found]
    early = [i for i in false if i < inputs.WARMUP + inputs.WINDOW]
    if early:
        raise core.Wrong(
            f"{what}: step {early[0]} was reported, and the first {inputs.WARMUP + inputs.WINDOW} must not be"
        )
    if false:
        raise core.Wrong(f"{what}: {len(false)} ordinary steps were reported, the first is step {false[0]}")
    if missed:
        raise core.Wrong(
            f"{what}: {len(missed)} of {len(planted)} slow steps were missed, the first is step {missed[0]}"
        )


def _held(thing):
    "How many numbers an object keeps, in lists, deques, dicts, arrays and objects of its own."
    seen, total, todo = set(), 0, [getattr(thing, "__dict__", thing)]
    while todo:
        x = todo.pop()
        if id(x) in seen or isinstance(x, type | str | bytes) or callable(x):
            continue
        seen.add(id(x))
        if hasattr(x, "numel"):
            total += x.numel()
        elif hasattr(x, "nbytes") or type(x).__name__ == "array":
            total += len(x)
        elif isinstance(x, int | float):
            total += 1
        else:
            todo += gc.get_referents(x)
    return total

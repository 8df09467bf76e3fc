"Ranks that fail: which rank, where it was, and nothing left behind."

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import ranks_processes as processes
import ranks_programs as programs

from course_lib import checking as core
from course_lib.parallel import ranks, stacks


@pytest.fixture(scope="module")
def warm():
    "Keeps the process that imports PyTorch, so that each test's ranks start in milliseconds."
    with pytest.MonkeyPatch.context() as patch:
        mark = processes.mark(patch)
        with ranks(1, backend="gloo"):
            yield mark
        assert processes.none_left(mark) == []


@pytest.fixture(autouse=True)
def marked(warm):
    "The mark of all processes of this module. No test leaves one more than it found."
    before = {p.pid for p in processes.of(warm)}
    yield warm
    ranks.stop()
    assert processes.none_left(warm, but=before) == []


def start(n, **options):
    return ranks(n, backend="gloo", **options)


def gone(pids, seconds=5.0):
    "Wait until none of these processes runs; one that nobody reaped counts as gone."
    until = time.monotonic() + seconds
    left = [psutil.Process(p) for p in pids if psutil.pid_exists(p)]
    while time.monotonic() < until and any(p.is_running() and p.status() != "zombie" for p in left):
        time.sleep(0.02)
    assert time.monotonic() < until, left


def test_an_exception_names_its_rank_and_the_others_are_ended():
    with start(3) as group:
        pids = group.pids
        with pytest.raises(ranks.RankFailed) as caught:
            group.run(programs.raises, 1)
        lines = str(caught.value).splitlines()
        assert lines[0] == "rank 1 of 3 raised ValueError: bad shape"
        assert any("in raises" in line for line in lines) and "worker.py" not in str(caught.value)
        assert "\nMeanwhile ranks 0 and 2 were in barrier, line " in str(caught.value)
        assert caught.value.rank == 1 and caught.value.world == 3
        assert isinstance(caught.value.__cause__, ValueError)
        assert caught.value._render_traceback_()[0] == lines[0]
        assert not any(psutil.pid_exists(p) for p in pids)
        assert group.run(programs.add) == [6.0] * 3  # afresh


def test_an_exception_alone_ends_no_rank():
    with start(2) as group:
        pids = group.pids
        with pytest.raises(ranks.RankFailed, match=r"^rank 1 of 2 raised ValueError: bad shape\n"):
            group.run(programs.raises, 1, then_wait=False)
        assert group.pids == pids and group.run(programs.add) == [3.0, 3.0]
        with pytest.raises(
            ranks.RankFailed, match=r"^rank 0 of 2 raised SystemExit: 4 \(and rank 1 raised too\)"
        ):
            group.run(sys.exit, 4)
        assert group.pids == pids


def test_an_exception_leaves_the_block_and_no_process(marked):
    with pytest.raises(ranks.RankFailed), start(2) as group:
        assert len(processes.of(marked)) == 4  # the one that imports PyTorch, the fixture's, and two
        group.run(programs.raises, 0)
    assert len(processes.of(marked)) == 2
    with pytest.raises(ZeroDivisionError), start(2):
        raise ZeroDivisionError
    assert len(processes.of(marked)) == 2


def test_a_stub_is_known_as_such():
    def stub():
        raise NotImplementedError

    with start(2) as group, pytest.raises(ranks.RankFailed) as caught:
        group.run(stub)
    assert core._is_stub(caught.value)


def test_mismatched_collectives_are_named():
    with start(2) as group:
        with pytest.raises(ranks.RankTimeout) as caught:
            group.run(programs.mismatched, timeout=0.8)
        assert caught.value.hung == [0, 1]
        assert str(caught.value).startswith("ranks 0 and 1 of 2 did not finish mismatched within 0.8 s: ")
        assert "rank 0 is in all_reduce, line " in str(caught.value) and "dist.all_reduce(x)" in str(
            caught.value
        )
        assert "rank 1 is in broadcast, line " in str(caught.value)
        assert "\nAll ranks must call the same collectives in the same order.\n" in str(caught.value)
        assert group.run(programs.add) == [3.0, 3.0]


@pytest.mark.parametrize(
    "program, args, says",
    [
        (programs.receives_what_nobody_sends, (), "irecv(torch.ones(2), 1 - dist.get_rank()).wait()"),
        (programs.sleeps, (None,), "time.sleep(seconds)"), (programs.spins, (), "of spins"),
    ],
)  # fmt: skip
def test_what_hangs_is_named_with_its_line(program, args, says):
    with start(2) as group:
        with pytest.raises(ranks.RankTimeout) as caught:
            group.run(program, *args, timeout=0.7)
        assert caught.value.hung == [0, 1] and says in caught.value.where[1]


def test_one_rank_hangs():
    says = r"^rank 2 of 3 did not finish .*; ranks 0 and 1 had finished"
    with start(3, timeout=0.7) as group, pytest.raises(TimeoutError, match=says):
        group.run(programs.sleeps, 2)


def test_a_stopped_rank_is_ended_too():
    with start(2) as group:
        os.kill(group.pids[1], signal.SIGSTOP)
        with pytest.raises(ranks.RankTimeout, match="rank 1 is not to be seen"):
            group.run(programs.rank, timeout=0.3)
        assert group.run(programs.rank) == [0, 1]
        os.kill(group.pids[1], signal.SIGSTOP)
        with pytest.raises(ranks.RankTimeout, match="rank 1 is not to be seen"):
            group.run(len, b" " * (1 << 23), timeout=0.3)  # more than a socket holds
        assert group.run(programs.rank) == [0, 1]


@pytest.mark.parametrize(
    "program, args, says, name, code",
    [
        (programs.killed, (1,), "killed by SIGKILL, often for want of memory\n", "SIGKILL", None),
        (programs.killed, (2, signal.SIGTERM), "killed by SIGTERM\n", "SIGTERM", None),
        (programs.crashes, (0,), "killed by SIGSEGV, a crash in compiled code\n", "SIGSEGV", None),
        (programs.exits, (1, 3), "its process ended with exit code 3\nlast words\n", None, 3),
    ],
)  # fmt: skip
def test_a_rank_that_dies(program, args, says, name, code):
    with start(3) as group:
        pids = group.pids
        with pytest.raises(ranks.RankDied) as caught:
            group.run(program, *args)
        assert str(caught.value).startswith(f"rank {args[0]} of 3 died during {program.__name__}: {says}")
        assert (caught.value.signal, caught.value.code) == (name, code)
        assert not any(psutil.pid_exists(p) for p in pids)
        assert group.run(programs.add) == [6.0] * 3


def test_an_idle_rank_that_was_killed():
    with start(2) as group:
        os.kill(group.pids[0], signal.SIGKILL)
        with pytest.raises(ranks.RankDied, match="rank 0 of 2 died"):
            group.run(programs.rank)
        assert group.run(programs.rank) == [0, 1]


def test_what_a_rank_started_ends_with_it():
    with start(2) as group:
        children = group.run(programs.with_a_child)
        assert all(psutil.pid_exists(p) for p in children)
    gone(children)


@pytest.mark.parametrize(
    "program, waits", [(programs.sleeps, False), (programs.receives_what_nobody_sends, True)]
)
def test_an_interrupt_reaches_the_ranks(program, waits):
    with start(2) as group:
        pids = group.pids
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt) as caught:
            group.run(program, *([None] if program is programs.sleeps else []))
        assert time.monotonic() - began < 3
        assert str(caught.value).startswith(
            f"interrupted: {program.__name__} on 2 ranks\nrank 0 was at line "
        )
        # A sleeping rank can be interrupted and lives; one that waits in a collective can't.
        assert (group.pids == pids) != waits
        assert group.run(programs.add) == [3.0, 3.0]


def test_one_call_at_a_time():
    with start(2) as group:
        thread = threading.Thread(target=group.run, args=(programs.sleeps, None, 0.5))
        thread.start()
        time.sleep(0.1)
        with pytest.raises(ranks.RankError, match="still at another call"):
            group.run(programs.rank)
        thread.join()
        assert group.run(programs.rank) == [0, 1]


def test_use_after_stop():
    with pytest.raises(ranks.RankError, match=r"no ranks are running: call ranks.start\(4\) first"):
        ranks.run(programs.rank)
    group = ranks.start(2, backend="gloo", quiet=True)
    ranks.stop()
    ranks.stop()
    with pytest.raises(ranks.RankError, match="these ranks were stopped"):
        group.run(programs.rank)


def test_start_with_another_size(capsys):
    old = ranks.start(2, backend="gloo", quiet=True)
    new = ranks.start(3, backend="gloo")
    assert old.closed and new.run(programs.rank) == [0, 1, 2]
    first, second = capsys.readouterr().out.splitlines()
    assert first == "2 ranks stopped: 3 were asked for."
    assert second.startswith("3 ranks on the CPU (Gloo, 1 thread each), ready in ")


# The process that holds the ranks ends, in every way that it may.

PROGRAM = """
import os, sys
from course_lib.parallel import ranks
group = ranks.start(2, backend="gloo", quiet=True)
assert "torch" not in sys.modules
print("ready", flush=True)
{then}
"""
PARENT = """
import psutil, time
psutil.Process(group.pids[0]).parent().kill()
until = time.monotonic() + 5
while time.monotonic() < until and any(map(psutil.pid_exists, group.pids)):
    time.sleep(0.02)
try:
    group.get("rank")
except ranks.RankDied:
    print("again", group.get("rank"))
"""
ENDINGS = {
    "killed when idle": ("sys.stdin.read()", signal.SIGKILL),
    "killed in a collective": ("group.execute('dist.recv(torch.ones(2), 1 - rank)')", signal.SIGKILL),
    "terminated in a call": ("group.execute('while True: pass')", signal.SIGTERM),
    "interrupted in a call": ("group.execute('dist.recv(torch.ones(2), 1 - rank)')", signal.SIGINT),
    "exited": ("os._exit(0)", None),
    "failed": ("group.execute('1 / rank')", None),
    "had its ranks' parent killed": (PARENT, None),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_no_process_outlives_the_one_that_started_it(name, marked):
    then, number = ENDINGS[name]
    before = {p.pid for p in processes.of(marked)}
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent)])
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(then=then)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True, env={**os.environ, "PYTHONPATH": path},
    ) as process:  # fmt: skip
        assert process.stdout.readline() == "ready\n"
        if number:
            time.sleep(0.1)
            process.send_signal(number)
        process.wait(20)
        if then is PARENT:
            assert process.stdout.read() == "again [0, 1]\n"
    assert processes.none_left(marked, 3, but=before) == []


def test_a_fork_of_the_notebook_ends_no_ranks():
    "As a loader's worker is, under Linux."
    with start(2) as group:
        pid = os.fork()
        if pid == 0:
            try:
                group.stop()
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        assert group.run(programs.rank) == [0, 1]


DUMP = """Thread 0x00007f1 (most recent call first):
  File "/lib/python3.12/threading.py", line 30 in wait

Current thread 0x00007f2 [python] (most recent call first):
  File "/x/torch/distributed/distributed_c10d.py", line 3000 in all_reduce
  File "/x/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/home/a/model.py", line 12 in train
  File "/x/course_lib/parallel/worker.py", line 80 in _do
"""


def test_a_stack_in_words():
    assert stacks.where(stacks.parse(DUMP)) == "in all_reduce, line 12 of train (model.py)"
    assert stacks.where(stacks.parse("")) == "not to be seen"
    entries = [
        {"state": "completed", "record_id": 1, "profiling_name": "nccl:broadcast"},
        {"state": "started", "record_id": 2, "profiling_name": "nccl:all_reduce", "input_sizes": [[3, 5]]},
    ]
    assert (
        stacks.unfinished(json.dumps({"entries": entries}))
        == " (NCCL has not finished all_reduce of shape [3, 5])"
    )
    assert stacks.unfinished("") == stacks.unfinished("{}") == ""

"Ranks as processes: results, failures, and nothing left behind; the same functions under torchrun."

import ctypes
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest
import ranks_programs as programs
import torch
import torch.distributed as dist
from jupyter_client.manager import start_new_kernel

from course_lib import machine, ranks

ROOT = Path(__file__).resolve().parent.parent
PATH = os.pathsep.join([str(ROOT), str(ROOT / "tests")])


@pytest.fixture(scope="module")
def started():
    with ranks.Group(3, backend="gloo") as group:
        yield group
    assert not pids(group) and not Path(group._folder).exists()


@pytest.fixture
def group(started):
    "Three ranks, which run and have 20 s for a call. Those that the test ended are gone afterwards."
    started.timeout = 20.0
    started.run(programs.rank)
    before = pids(started)
    yield started
    assert gone(set(before) - set(pids(started)))


def pids(group):
    return [rank.process.pid for rank in group._ranks]


def children(pid):
    return [p.pid for p in psutil.Process(pid).children(recursive=True)]


def gone(pids, seconds=20.0):
    "Wait until none of these processes runs; one that nobody reaped counts as gone."

    def runs(pid):
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    until = time.monotonic() + seconds
    while any(map(runs, pids)) and time.monotonic() < until:
        time.sleep(0.02)
    return not any(map(runs, pids))


def failure(group, program, *args, timeout=20.0):
    "The RankError of a call, and its lines. The ranks are ended by it, and the next call works."
    group.timeout = timeout
    with pytest.raises(ranks.RankError) as caught:
        group.run(program, *args)
    assert caught.value._render_traceback_()[-1] == "The ranks were ended; the next call starts new ones."
    assert not pids(group)
    group.timeout = 20.0
    assert group.run(programs.rank) == [0, 1, 2]
    return caught.value, str(caught.value).splitlines()


def test_results_and_output_by_rank(group, capsys):
    before = pids(group)
    assert group.run(programs.add, x=2) == [9.0, 9.0, 9.0]
    assert capsys.readouterr().out == "".join(f"rank {r}: rank {r} of 3\n" for r in range(3))
    group.run(os.write, 2, b"by the system\n")
    assert capsys.readouterr().out == "".join(f"rank {r}: by the system\n" for r in range(3))
    k = 3
    assert group.run(lambda: k + dist.get_rank()) == [3, 4, 5] and pids(group) == before
    assert group.place == "the CPU (Gloo)"
    assert ranks.run(2, programs.add, 5, backend="gloo") == [11.0, 11.0]


def test_tensors_come_back_plain(group):
    x = torch.arange(6.0)
    for twice, view in group.run(lambda: (x.clone().requires_grad_() * 2, x[1:3])):
        assert not twice.requires_grad and twice.tolist() == [0, 2, 4, 6, 8, 10]
        assert view.tolist() == [1, 2] and view.untyped_storage().nbytes() == 8


def test_each_rank_has_its_seed_threads_and_device(group):
    def state():
        return torch.rand(1).item(), torch.get_num_threads(), str(machine.device()), os.environ["LOCAL_RANK"]

    group.stop()
    first = group.run(state)
    group.stop()
    assert group.run(state) == first and len({s[0] for s in first}) == 3
    assert [s[1:] for s in first] == [(max(1, machine.cores() // 3), "cpu", str(r)) for r in range(3)]


def test_ddp_and_a_loader_with_workers(group):
    def train():
        data = torch.utils.data.TensorDataset(torch.ones(8, 2) * (1 + dist.get_rank()))
        net = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.ones_(net.weight)
        parallel = torch.nn.parallel.DistributedDataParallel(net)
        for (x,) in torch.utils.data.DataLoader(data, 8, num_workers=2):
            parallel(x).sum().backward()
        return net.weight.grad

    for grad in group.run(train):
        assert grad.tolist() == [[16, 16]]  # the mean of 8, 16 and 24


def test_an_exception_has_its_rank_its_traceback_and_where_the_others_were(group):
    error, lines = failure(group, programs.raises, 1)
    assert lines[0] == "rank 1 of 3 raised ValueError: bad shape"
    assert any(re.fullmatch(r'  File ".*ranks_programs.py", line \d+, in raises', line) for line in lines)
    assert [line[:6] for line in lines if line.endswith(": dist.barrier()")] == ["rank 0", "rank 2"]
    assert "course_lib" not in str(error) and error.rank == 1 and isinstance(error.__cause__, ValueError)
    assert failure(group, sys.exit, 4)[1][0].endswith(" of 3 raised SystemExit: 4")


@pytest.mark.parametrize(
    "end, says",
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL, often for want of memory"),
        (lambda: ctypes.string_at(0), "was killed by SIGSEGV, a crash in compiled code"),
        (lambda: (print("last words"), os._exit(3)), "left with exit code 3"),
    ],
)
def test_a_rank_that_dies(group, end, says, capsys):
    error, lines = failure(group, lambda: end() if dist.get_rank() == 1 else dist.barrier())
    assert lines[0] == f"rank 1 of 3 {says}" and error.rank == 1
    assert ("rank 1: last words" in capsys.readouterr().out) == ("code 3" in says)


def test_an_idle_rank_that_was_killed_or_stopped(group):
    os.kill(pids(group)[0], signal.SIGKILL)
    assert failure(group, programs.rank)[1][0].startswith("rank 0 of 3 was killed by SIGKILL")
    os.kill(pids(group)[1], signal.SIGSTOP)
    _, lines = failure(group, len, b" " * (1 << 23), timeout=0.5)  # more than a pipe holds
    assert lines[0] == "rank 1 of 3 did not finish len within 0.5 s"
    assert "rank 1 was not answering, as a stopped process" in lines


def test_what_hangs_is_named_with_its_line(group):
    def mismatched(x):
        if dist.get_rank() == 0:
            dist.all_reduce(x)
        while dist.get_rank() == 1:
            pass

    _, lines = failure(group, mismatched, torch.ones(3), timeout=0.5)
    assert lines[:2] == [
        "ranks 0, 1 of 3 did not finish mismatched within 0.5 s",
        "All ranks must call the same collectives in the same order.",
    ]
    assert re.fullmatch(r"rank 0 was at line \d+ of mismatched \(test_ranks.py\): .*reduce\(x\)", lines[2])
    assert "rank 1 was at line " in lines[3] and lines[4] == "rank 2 had finished"


def test_much_output_is_cut_and_holds_nobody_up(group, capsys):
    failure(group, lambda: [print("x" * 1000) for _ in iter(int, 1)], timeout=0.5)
    assert 1e6 < len(capsys.readouterr().out) < 4e6


def test_an_interrupt_ends_the_ranks(group, capsys):
    was = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job is started without
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            group.run(lambda: time.sleep(100))
    finally:
        signal.signal(signal.SIGINT, was)
    assert capsys.readouterr().out.count(": group.run(lambda: time.sleep(100))\n") == 3
    assert not pids(group) and group.run(programs.rank) == [0, 1, 2]


def test_a_fork_of_the_notebook_ends_no_ranks(group):
    before = pids(group)
    with_children = before + group.run(lambda: subprocess.Popen(["sleep", "100"]).pid)
    if (pid := os.fork()) == 0:
        group.stop()
        os._exit(0)
    os.waitpid(pid, 0)
    assert group.run(programs.rank) == [0, 1, 2] and pids(group) == before
    group.stop()  # but this does, with what they started
    assert gone(with_children)


def test_what_cannot_be_had():
    with pytest.raises(ValueError, match=r"^100000 ranks may need .* GB are free: start \d+ at most$"):
        ranks.Group(100_000, backend="gloo")
    with pytest.raises(ValueError, match=r"^NCCL needs a GPU for each of 3000 ranks and found"):
        ranks.Group(3000, backend="nccl")


# It has no `if __name__ == "__main__"`.
SCRIPT = """
import ranks_programs as programs
from course_lib import ranks
group = ranks.Group(2, backend="gloo")
print("ready", flush=True)
"""


@pytest.mark.parametrize("killed", [True, False])
def test_no_process_outlives_the_one_that_started_it(killed, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT + "group.run(programs.holds_the_gil_or_stops)" * killed)
    env = {**os.environ, "PYTHONPATH": PATH, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, tmp_path / "script.py"], env=env, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        if killed:
            time.sleep(0.5)
            started = children(process.pid)
            assert len(started) == 4  # the fork server, its resource tracker and two ranks
            process.kill()
            assert gone(started)
        assert process.wait(20) == (-signal.SIGKILL if killed else 0)
    assert bool(list(tmp_path.glob("course-ranks-*"))) == killed


def test_the_next_start_removes_what_a_killed_notebook_left(tmp_path, monkeypatch):
    ended = subprocess.Popen(["true"])
    ended.wait()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"course-ranks-{ended.pid}-a").mkdir()
    (tmp_path / f"course-ranks-{os.getpid()}-b").mkdir()  # of a notebook that runs
    assert ranks.run(1, programs.rank, backend="gloo") == [0]
    assert [p.name for p in tmp_path.iterdir()] == [f"course-ranks-{os.getpid()}-b"]


CELLS = {
    "start": "import time\nimport torch.distributed as dist\nfrom course_lib import ranks\n"
    "group = ranks.Group(2, backend='gloo', timeout=1)",
    "raise": "def bad():\n    if dist.get_rank() == 1:\n        raise ValueError('bad')\ngroup.run(bad)",
    "hang": "def hang():\n    dist.barrier() if dist.get_rank() else None\ngroup.run(hang)",
    "interrupt": "group.timeout = 60\ngroup.run(time.sleep, 100)",
    "after": "k = 3\ndef helper(x):\n    return k * x\ndef more(x):\n    return helper(x) + dist.get_rank()\n"
    "print(group.run(more, 5))",
}


def test_in_a_kernel(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", PATH)
    manager, client = start_new_kernel()
    shown = dict.fromkeys(CELLS, "")
    for name, source in CELLS.items():
        if name == "interrupt":
            threading.Timer(1.5, manager.interrupt_kernel).start()

        def keep(message, name=name):
            content = message["content"]
            shown[name] += content.get("text", "") + "\n".join(content.get("traceback", ()))

        client.execute_interactive(source, timeout=60, output_hook=keep)
    started = children(manager.provisioner.pid)
    client.stop_channels()
    manager.shutdown_kernel(now=True)
    assert len(started) == 4 and gone(started)
    assert shown["start"] == ""
    assert shown["raise"].startswith(
        "rank 1 of 2 raised ValueError: bad\n\nTraceback (most recent call last):\n"
        "  File Cell In[2], line 3, in bad\n    raise ValueError('bad')\n"
    )
    assert shown["hang"].startswith("rank 1 of 2 did not finish hang within 1 s\n")
    assert "rank 1 was at line 2 of hang (Cell In[3]): dist.barrier()" in shown["hang"]
    assert "KeyboardInterrupt" in shown["interrupt"] and shown["after"] == "[15, 16]\n"


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
RUN = str(ROOT / "cluster" / "run.py")


def shell(*command, **env):
    env = {**os.environ, "PYTHONPATH": PATH, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **env}
    return subprocess.run([*map(str, command)], env=env, capture_output=True, text=True, timeout=90)


def test_the_same_function_under_torchrun():
    done = shell(*TORCHRUN, "--nproc-per-node=2", RUN, "ranks_programs:add", "x=5")
    assert done.returncode == 0, done.stderr
    said = [f"rank {r} {what}" for r in (0, 1) for what in ("of 2", "returned 11.0")]
    assert sorted(done.stdout.splitlines()) == said
    done = shell(*TORCHRUN, "--nproc-per-node=2", RUN, "ranks_programs:raises", "where=1")
    assert done.returncode != 0 and "ValueError: bad shape" in done.stderr
    done = shell(sys.executable, RUN, "ranks_programs:add")
    assert done.returncode != 0 and done.stderr.startswith("start this with torchrun")


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_script_for_slurm(tmp_path, nodes):  # with a Slurm that says what it was asked for
    for name, text in (("scontrol", 'printf "here1\\nhere2\\n"'), ("srun", 'printf "%s\\n" "$@"')):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "70123", "SLURM_GPUS_ON_NODE": "8", "SLURM_JOB_NODELIST": "here[1-2]"}
    slurm |= {"SLURM_JOB_NUM_NODES": str(nodes), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = shell("bash", ROOT / "cluster" / "slurm.sh", "m:f", "x=a b", SLURM_SUBMIT_DIR=str(ROOT), **slurm)
    meet = ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=here1:30123", "--rdzv-id=70123"]
    meet = meet if nodes > 1 else ["--standalone", "--local-addr=127.0.0.1"]
    asked = done.stdout.splitlines()
    assert asked[5:] == [
        "torch.distributed.run",
        *meet,
        "--nproc-per-node=8",
        "cluster/run.py",
        "m:f",
        "x=a b",
    ]

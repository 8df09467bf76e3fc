"The same functions under torchrun, on one host and on two, and as a job of Slurm."

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import ranks_processes as processes

from course_lib.authoring import notebook

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
LAUNCH = ["-m", "course_lib.parallel.launch"]
SCRIPT = notebook.ROOT / "cluster" / "slurm.sh"


@pytest.fixture(autouse=True)
def marked(monkeypatch):
    path = [str(Path(__file__).parent), str(notebook.ROOT)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # or torchrun says that it sets it
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo" if sys.platform.startswith("linux") else "lo0")
    mark = processes.mark(monkeypatch)
    yield
    assert processes.none_left(mark) == []


def start(*arguments):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*map(str, arguments)], **pipes)


def finish(process, seconds=60):
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
        out, err = process.communicate(timeout=20)
    return process.returncode, out, err


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_two_hosts():
    "Two launches that meet at one rendezvous, as two hosts' do."
    port = free_port()
    hosts = [
        start(
            *TORCHRUN, "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=test",
            f"--rdzv-endpoint=localhost:{port}", "--local-addr=localhost", *LAUNCH, "ranks_programs:add",
            "x=1", "--seed=3",
        )
        for _ in range(2)
    ]  # fmt: skip
    ended = [finish(p) for p in hosts]
    assert [code for code, _, _ in ended] == [0, 0], ended
    lines = [line for _, out, _ in ended for line in out.splitlines()]
    assert sorted(lines) == [
        "rank 0 returned 3.0", "rank 0: rank 0 of 2", "rank 1 returned 3.0", "rank 1: rank 1 of 2",
    ]  # fmt: skip
    assert all("of 2" in out for _, out, _ in ended)  # each host had a rank


def test_a_rank_that_raises_fails_the_run_on_one_host():
    code, _, err = finish(
        start(*TORCHRUN, "--standalone", "--nproc-per-node=2", *LAUNCH, "ranks_programs:raises", "where=1")
    )
    assert code != 0
    assert re.search(r"^rank 1 of 2 raised ValueError: bad shape\n\nTraceback", err, re.MULTILINE)
    assert "Read error" not in err  # what the other rank makes of it


@pytest.mark.parametrize(
    "target, more, says",
    [
        ("ranks_programs:add", [], "RANK is not set: start this with torchrun"),
        ("ranks_programs", None, "names no function: write MODULE:FUNCTION"),
        ("ranks_programs:nothing", None, "can't be imported: module 'ranks_programs' has no attribute"),
        ("no_such:thing", None, "can't be imported: No module named 'no_such'"),
        ("ranks_programs:dist", None, "is a module: name a function"),
        ("ranks_programs:add", ["3"], "'3' is no argument: write key=value, as in lr=0.1"),
        ("ranks_programs:add", ["--timeout=0"], "timeout must be a positive number of seconds"),
    ],
)
def test_what_cannot_be_launched(target, more, says, monkeypatch, capsys):
    from course_lib.parallel import launch

    for name in launch.WANTED:
        monkeypatch.delenv(name, raising=False)
    if more != []:
        for name in launch.WANTED:
            monkeypatch.setenv(name, "1" if "WORLD" in name else "0")
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    assert launch.main([target, *(more or [])]) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1


def test_values_are_read_as_python_or_as_text():
    from course_lib.parallel.launch import _value

    assert [_value(t) for t in ("lr=0.1", "sizes=[1, 2]", "name=adam", "flag=True", "eq=a=b")] == [
        ("lr", 0.1), ("sizes", [1, 2]), ("name", "adam"), ("flag", True), ("eq", "a=b"),
    ]  # fmt: skip


def fake(folder, name, text):
    path = folder / name
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def test_the_script_for_slurm(tmp_path, monkeypatch):
    "With a Slurm that says what it was asked for."
    fake(tmp_path, "scontrol", '[ "$*" = "show hostnames here[1-2]" ] && printf "here1\\nhere2\\n"')
    fake(tmp_path, "srun", 'printf "%s\\n" "$@"')
    for name, value in {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "70123", "SLURM_GPUS_ON_NODE": "8",
        "SLURM_JOB_NODELIST": "here[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_SUBMIT_DIR": str(tmp_path),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    code, out, err = finish(start("bash", SCRIPT, "ranks_programs:add", "x=a b"))
    assert code == 0, err
    assert out.splitlines() == [
        "--ntasks=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1", ".venv/bin/python", *TORCHRUN[1:],
        "--nnodes=2", "--nproc-per-node=8", "--rdzv-backend=c10d", "--rdzv-endpoint=here1:30123",
        "--rdzv-id=70123", *LAUNCH, "ranks_programs:add", "x=a b",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "arguments, says", [([], "which function?"), (["m:f"], "this is a job for Slurm: sbatch")]
)
def test_the_script_alone(arguments, says, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    code, _, err = finish(start("bash", SCRIPT, *arguments))
    assert code == 2 and says in err

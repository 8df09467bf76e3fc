"Lesson scale's library: torchrun leaves nothing, goodput; `make soak` kills real runs twenty times."

import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from course_lib import ranks, scale
from course_lib.authoring import notebook
from course_lib.scale import solutions


def test_goodput_has_its_top_at_the_best_interval():
    for gpus, save in ((16384, 60), (131072, 1), (131072, 60)):
        found = scale.explore_goodput(gpus, save, 300)
        best = solutions.best_interval(save, found["mtbf"])
        assert found["best"][0] == pytest.approx(best, rel=0.05)  # its grid has steps of 5 %
        assert scale.expected_share(best, save, 300, found["mtbf"]) >= found["best"][1]


def test_simulated_goodput_is_the_expected_one():
    draw, mtbf, work = random.Random(1), 1000.0, 4e6

    def gaps():
        while True:
            yield draw.expovariate(1 / mtbf)

    share = work / solutions.wall_clock(work, 150, 10, 50, gaps())
    assert share == pytest.approx(scale.expected_share(150, 10, 50, mtbf), rel=0.02)


def test_top_of_a_parabola():
    rows = [(math.exp(x / 10), 0, 5 - (x / 10 - 1.23) ** 2, 0) for x in range(30)]
    assert scale.top(rows) == pytest.approx(math.exp(1.23))


def test_merge_of_empty_parts():
    out, lse = torch.zeros(1, 2), torch.full((1,), -math.inf)
    both = scale.merge(out, lse, out, lse)
    assert torch.equal(both[0], out) and torch.equal(both[1], lse)


def rings():
    "The largest error of the course's ring on Wire, and what a rank says that receives first."
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 12, 5)
    places, rank = torch.arange(12).chunk(3), dist.get_rank()

    def attend(q, k, v, at, at_k):
        s = (q @ k.T * 5**-0.5).masked_fill(at[:, None] < at_k, -math.inf)
        lse = s.logsumexp(-1)
        return (s - torch.where(lse == -math.inf, 0.0, lse)[:, None]).exp() @ v, lse

    mine = places[rank]
    out, _ = solutions.ring_attention(q[mine], k[mine], v[mine], places.__getitem__, attend, scale.Wire())
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[mine]
    with pytest.raises(RuntimeError, match="recv before isend"):
        scale.Wire().recv(q, 0)
    return (out - want).abs().max().item()


def test_a_ring_on_wire_gives_dense_attention():
    assert max(ranks.run(3, rings, backend="gloo")) < 1e-6


SLEEPS = """
import time
from course_lib import scale
scale.torchrun(2, lambda: (print("start 0 up", flush=True), open({file!r}, "a").write("."), time.sleep(100)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the system ends the ranks on Linux alone")
def test_no_rank_outlives_a_killed_notebook(tmp_path):
    up = tmp_path / "up"
    notebook_ = subprocess.Popen([sys.executable, "-c", SLEEPS.format(file=str(up))])
    until = time.monotonic() + 60
    while time.monotonic() < until and (not up.exists() or up.stat().st_size < 2):
        time.sleep(0.1)
    started = psutil.Process(notebook_.pid).children(recursive=True)
    notebook_.send_signal(signal.SIGKILL)
    notebook_.wait()
    _, alive = psutil.wait_procs(started, timeout=10)
    assert len(started) >= 3 and alive == []


def cells():
    "The names that the lesson's cells of the real run bind, as in its kernel."
    nb = notebook.load(notebook.NBS / "20_scale.ipynb")
    wanted = "imports", "failure", "ex5-stub", "on-ranks", "newest", "train"
    names = {"__name__": "__main__"}
    for cell in nb["cells"]:
        if cell["id"] in wanted:
            text = notebook.source(cell).split("whole, again =")[0]
            exec(compile(text, cell["id"], "exec"), names)
    return names


@pytest.mark.soak
def test_twenty_runs_with_two_kills_each(request):
    "Bit for bit the run that was never killed: kills before steps, after saves, and while they are written."
    if request.config.getoption("-m") != "soak":
        pytest.skip("make soak")
    lesson = cells()
    train, on_ranks = lesson["train"], lesson["OnRanks"]
    want = ranks.run(4, lambda: [run.step() for run in [on_ranks()] for _ in range(40)], backend="gloo")[0]
    same, torn, draw = 0, 0, random.Random()
    for k in range(20):
        first = draw.randrange(4), draw.randrange(1, 19), (0, draw.randint(1, 4))[k % 2]
        second = draw.randrange(4), draw.randrange(19, 38), draw.randint(1, 4)
        with tempfile.TemporaryDirectory() as folder:
            run = scale.torchrun(4, train, folder, 40, 5, (first, second), restarts=2)
            kept = lesson["newest"](folder, lambda text: None)
            # PyTorch writes .metadata when all ranks have written their files.
            names = [{path.name for path in save.iterdir()} for save in Path(folder).iterdir()]
            torn += any(files and ".metadata" not in files for files in names)
        assert run.starts == 3 and kept.name.startswith("step-40.")
        same += run.result == want
        print(f"run {k + 1}: {first} {second}, {run.seconds:.0f} s, same: {run.result == want}", flush=True)
    assert same == 20 and torn > 5, f"{torn} runs were killed in the middle of a save"
    left = psutil.Process(os.getpid()).children(recursive=True)
    assert not [p for p in left if "scale.launch" in " ".join(p.cmdline())]

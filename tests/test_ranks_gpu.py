"Ranks on GPUs, with NCCL: one, and two where there are two. `make test-gpu` runs these."

import os
import signal

import pytest
import ranks_programs as programs
import torch
import torch.distributed as dist

from course_lib import machine, ranks

pytestmark = pytest.mark.gpu
several = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")


def device_and_sum():
    x = torch.full((3,), dist.get_rank() + 1.0, device=machine.device())
    dist.all_reduce(x)
    return dist.get_backend(), x.device.index, x


def test_one_rank_on_one_gpu():
    # What the fork server imports must not have touched CUDA.
    with ranks.Group(1, preload=["torch.distributed.fsdp"]) as group:
        ((backend, index, x),) = group.run(device_and_sum)
    assert (backend, index, x.tolist(), x.device.type) == ("nccl", 0, [1, 1, 1], "cpu")
    assert group.place == "a GPU each (NCCL)"


def test_more_ranks_than_gpus():
    n = torch.cuda.device_count() + 1
    with ranks.Group(n) as group:
        assert group.backend == "gloo" and group.run(lambda: machine.has_gpu()) == [False] * n
    with pytest.raises(ValueError, match=r"^NCCL needs a GPU for each"):
        ranks.Group(n, backend="nccl")


def test_more_ranks_than_gpus_share_them():
    n = torch.cuda.device_count() + 1
    with ranks.Group(n, device="cuda") as group:
        assert group.backend == "gloo" and group.place.endswith("(Gloo)")
        found = group.run(device_and_sum)
    assert [(b, i, x.tolist()) for b, i, x in found] == [
        ("gloo", r % (n - 1), [n * (n + 1) / 2] * 3) for r in range(n)
    ]


@pytest.fixture(scope="module")
def pair():
    with ranks.Group(2, timeout=10) as group:
        yield group


def ddp_step():
    torch.manual_seed(0)
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1, device="cuda"))
    net(torch.ones(4, 2, device="cuda") * (1 + dist.get_rank())).sum().backward()
    return net.module.weight.grad


@several
def test_two_ranks_have_a_gpu_each(pair):
    found = pair.run(device_and_sum)
    assert [(b, i, x.tolist()) for b, i, x in found] == [("nccl", r, [3, 3, 3]) for r in range(2)]
    assert [g.tolist() for g in pair.run(ddp_step)] == [[[6, 6]]] * 2


def alone():
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(3, 5, device="cuda"))


@several
def test_a_collective_that_one_rank_never_calls(pair):
    with pytest.raises(ranks.RankError) as caught:
        pair.run(alone)
    lines = str(caught.value).splitlines()
    assert lines[0] == "rank 0 of 2 did not finish alone within 10 s"
    assert lines[2].startswith("rank 0 was in ") and lines[3] == "rank 1 had finished"
    assert pair.run(device_and_sum)[0][0] == "nccl"


@several
def test_a_rank_that_fails_or_dies_does_not_hold_the_others(pair):
    with pytest.raises(ranks.RankError, match=r"^rank 1 of 2 raised ValueError: bad shape"):
        pair.run(programs.raises, 1)
    with pytest.raises(ranks.RankError, match=r"^rank 1 of 2 was killed by SIGKILL"):
        pair.run(lambda: os.kill(os.getpid(), signal.SIGKILL) if dist.get_rank() else dist.barrier())
    assert pair.run(programs.rank) == [0, 1]

"Ranks on GPUs, with NCCL: one, and two where there are two. `make test-gpu` runs these."

import pytest
import ranks_programs as programs
import torch
import torch.distributed as dist

from course_lib import machine
from course_lib.parallel import ranks

pytestmark = pytest.mark.gpu
several = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")


def device_and_sum():
    x = torch.full((3,), dist.get_rank() + 1.0, device=machine.device())
    dist.all_reduce(x)
    return dist.get_backend(), x.device.index, x


def test_one_rank_on_one_gpu_after_a_preload():
    # What is imported before the fork must not have touched CUDA.
    with ranks(1, preload=["torch._dynamo", "torch.distributed.fsdp"]) as group:
        ((backend, index, x),) = group.run(device_and_sum)
    assert (backend, index, x.tolist(), x.device.type) == ("nccl", 0, [1, 1, 1], "cpu")


def test_more_ranks_than_gpus_use_the_cpu(capsys):
    n = torch.cuda.device_count() + 1
    ranks._told.clear()
    with ranks(n) as group:
        assert group.backend == "gloo" and group.run(lambda: machine.has_gpu()) == [False] * n
    assert "NCCL wants one each: they use the CPU, with Gloo." in capsys.readouterr().out


def test_nccl_refuses_two_ranks_on_a_gpu():
    n = torch.cuda.device_count() + 1
    with pytest.raises(ValueError, match="NCCL wants a GPU for each"):
        ranks.start(n, backend="nccl")


@several
def test_two_ranks_have_a_gpu_each():
    with ranks(2) as group:
        found = group.run(device_and_sum)
        assert [(b, i, x.tolist()) for b, i, x in found] == [("nccl", r, [3, 3, 3]) for r in range(2)]
        group.reset()
        assert group.run(device_and_sum)[1][2].tolist() == [3, 3, 3]


def alone():
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(3, 5, device="cuda"))


@several
def test_a_collective_that_one_rank_never_calls_is_named():
    with ranks(2) as group:
        with pytest.raises(ranks.RankTimeout) as caught:
            group.run(alone, timeout=5)
        assert caught.value.hung == [0]
        assert "all_reduce" in caught.value.where[0], caught.value.where
        assert group.run(device_and_sum)[0][0] == "nccl"


@several
def test_a_rank_that_fails_does_not_hold_the_others():
    def fails():
        if dist.get_rank() == 1:
            raise ValueError("bad shape")
        dist.all_reduce(torch.ones(3, device="cuda"))

    with ranks(2) as group:
        with pytest.raises(ranks.RankFailed, match="rank 1 of 2 raised ValueError: bad shape"):
            group.run(fails)
        assert group.run(programs.rank) == [0, 1]

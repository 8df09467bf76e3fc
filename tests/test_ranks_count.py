"Messages, collectives and bytes against what was sent."

import contextlib

import pytest
import torch
import torch.distributed as dist

from course_lib import ranks
from course_lib.meter.comm import count_comm

N = 3


@pytest.fixture(scope="module")
def group():
    with ranks.Group(N, backend="gloo", timeout=20) as group:
        yield group


def facts(c):
    return c.messages, c.sent_bytes, c.received_bytes, dict(c.collectives), dict(c.payload_bytes)


def counted(group, fn):
    def on_rank():
        with count_comm() as c:
            fn()
        return facts(c)

    return group.run(on_rank)


def ring(n, dtype=torch.float32):
    "Send n numbers to the next rank."
    me, world = dist.get_rank(), dist.get_world_size()
    got = torch.empty(n, dtype=dtype)
    work = dist.isend(torch.full((n,), me, dtype=dtype), (me + 1) % world)
    dist.recv(got, (me - 1) % world)
    work.wait()
    return got


def test_messages(group):
    def two_rings():
        ring(7)
        ring(5, torch.float64)

    assert counted(group, two_rings) == [(2, 7 * 4 + 5 * 8, 68, {}, {})] * N


def test_batched_messages_and_messages_from_anyone(group):
    def batch():
        me = dist.get_rank()
        ops = [
            dist.P2POp(dist.isend, torch.ones(6), (me + 1) % N),
            dist.P2POp(dist.irecv, torch.ones(6), (me - 1) % N),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    def anyone():
        if dist.get_rank():
            dist.send(torch.ones(3, dtype=torch.int8), 0)
        else:
            for _ in range(N - 1):
                dist.recv(torch.ones(3, dtype=torch.int8))

    assert counted(group, batch) == [(1, 24, 24, {}, {})] * N
    assert counted(group, anyone) == [(0, 0, 6, {}, {})] + [(1, 3, 0, {}, {})] * 2


def shards(n=2):
    return [torch.ones(n) for _ in range(N)]


COLLECTIVES = {
    "all_reduce": (lambda: dist.all_reduce(torch.ones(5)), 20),
    "broadcast": (lambda: dist.broadcast(torch.ones(5, dtype=torch.float16), 1), 10),
    "reduce": (lambda: dist.reduce(torch.ones(4), 0), 16),
    "all_gather": (lambda: dist.all_gather(shards(), torch.ones(2)), 8),
    "all_gather into a tensor": (lambda: dist.all_gather_into_tensor(torch.ones(6), torch.ones(2)), 8),
    "reduce_scatter": (lambda: dist.reduce_scatter_tensor(torch.ones(2), torch.ones(6)), 24),
    "all_to_all": (lambda: dist.all_to_all_single(torch.ones(6), torch.ones(6)), 24),
    "gather": (lambda: dist.gather(torch.ones(2), shards() if dist.get_rank() == 0 else None), 8),
    "barrier": (lambda: dist.barrier(), 0),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives(group, name):
    fn, payload = COLLECTIVES[name]
    kind = name.split()[0]
    assert counted(group, fn) == [(0, 0, 0, {kind: 1}, {kind: payload})] * N


def test_scatter(group):
    def scatter():
        dist.scatter(torch.ones(2), shards() if dist.get_rank() == 0 else None)

    payloads = [f[4]["scatter"] for f in counted(group, scatter)]
    assert payloads == [24, 8, 8]  # what is handed in; where nothing is, what comes


def test_functional_collectives(group):
    def functional():
        import torch.distributed._functional_collectives as funcol

        funcol.wait_tensor(funcol.all_reduce(torch.ones(5), "sum", dist.group.WORLD))

    assert counted(group, functional) == [(0, 0, 0, {"all_reduce": 1}, {"all_reduce": 20})] * N


def test_a_library_s_collectives_are_seen_where_it_calls_them_from_compiled_code(group):
    def ddp():
        net = torch.nn.Linear(3, 2)  # 8 numbers
        net = torch.nn.parallel.DistributedDataParallel(net)
        with count_comm() as c:
            net(torch.ones(4, 3)).sum().backward()
        return dict(c.collectives), dict(c.payload_bytes)

    assert group.run(ddp) == [({"all_reduce": 1}, {"all_reduce": 32})] * N


def test_fully_shard(group):
    def fsdp():
        from torch.distributed.fsdp import fully_shard

        net = torch.nn.Linear(3, 6, bias=False)  # 18 numbers, 6 a rank
        fully_shard(net)
        with count_comm() as c:
            net(torch.ones(4, 3)).sum().backward()
        return dict(c.collectives), dict(c.payload_bytes)

    for collectives, payload in group.run(fsdp):
        assert collectives["all_gather"] == 1 and collectives["reduce_scatter"] == 1
        assert payload["all_gather"] == 24 and payload["reduce_scatter"] == 72


def test_a_call_that_raises_is_not_counted(group):
    def wrong():
        with count_comm() as c, contextlib.suppress(RuntimeError, ValueError):
            dist.all_gather_into_tensor(torch.ones(5), torch.ones(2))
        return facts(c)

    assert group.run(wrong) == [(0, 0, 0, {}, {})] * N

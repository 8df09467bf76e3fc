"Times on the ranks or beside them: all-reduces, kinds of data parallelism, ways to move bytes."

import socket
import statistics
import threading
import time

import torch
import torch.distributed as dist
from torch import nn

from course_lib.data_parallel import comm as comms


def all_reduce_seconds(sizes, blocks=5, seconds=0.15):
    """Median seconds of an all-reduce of each of `sizes` bytes, float32, over the default group.

    Calls follow each other without a pause, as in nccl-tests; every rank makes the same number of them.
    """
    device = comms.device()
    found = []
    for nbytes in sizes:
        x = torch.zeros(max(1, nbytes // 4), device=device)
        count = torch.ones(1, dtype=torch.int64, device=device)
        for _ in range(3):
            dist.all_reduce(x)
        once = _block(x, 1)
        count.fill_(max(1, min(100, int(seconds / blocks / max(once, 1e-6)))))
        dist.broadcast(count, 0)
        k = int(count)
        found.append(statistics.median(_block(x, k) / k for _ in range(blocks)))
    return found


def _block(x, k):
    _quiet(x.device)
    dist.barrier()
    _quiet(x.device)
    start = time.perf_counter()
    for _ in range(k):
        dist.all_reduce(x)
    _quiet(x.device)
    return time.perf_counter() - start


def _quiet(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def scaling(layers=16, width=8192, tokens=8192, steps=6, bucket_mb=25):
    """Seconds of forward and backward of a stack of linear layers, alone and data parallel in four ways.

    Gives {"alone", "backward", "bytes" (of one layer), "ddp", "ddp_no_overlap", "fsdp", "fsdp_no_overlap",
    "fsdp_host"}. Without overlap: one bucket for everything, or one unit that is gathered whole. "fsdp_host"
    is a sharded step with next to nothing to compute: what its hooks and its messages take by themselves.
    bf16 on a GPU.
    """
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    device = comms.device()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    ids = [device.index] if device.type == "cuda" else None

    def make():
        torch.manual_seed(0)
        stack = [nn.Linear(width, width, bias=False, device=device, dtype=dtype) for _ in range(layers)]
        return nn.Sequential(*stack)

    x = torch.randn(tokens, width, device=device, dtype=dtype)
    found = {"bytes": width * width * x.element_size(), "layers": layers}
    model = make()
    found["alone"] = _step_seconds(model, x, steps)
    found["backward"] = found["alone"] - _step_seconds(model, x, steps, backward=False)
    del model
    found["ddp"] = _step_seconds(DistributedDataParallel(make(), ids, bucket_cap_mb=bucket_mb), x, steps)
    found["ddp_no_overlap"] = _step_seconds(
        DistributedDataParallel(make(), ids, bucket_cap_mb=10**5), x, steps
    )
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    model = make()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    found["fsdp"] = _step_seconds(fully_shard(model, mesh=mesh), x, steps)
    found["fsdp_host"] = _step_seconds(model, x[:16], steps)
    del model
    found["fsdp_no_overlap"] = _step_seconds(fully_shard(make(), mesh=mesh), x, steps)
    return found


def _step_seconds(model, x, steps, backward=True):
    def one():
        with torch.set_grad_enabled(backward):
            y = model(x)
        if backward:
            y.backward(y.detach())
            model.zero_grad()

    for _ in range(max(3, steps // 4)):
        one()
    took = []
    for _ in range(3):
        _quiet(x.device)
        dist.barrier()
        _quiet(x.device)
        start = time.perf_counter()
        for _ in range(steps):
            one()
        _quiet(x.device)
        took.append((time.perf_counter() - start) / steps)
    return statistics.median(took)


def transport_cpu(nbytes=64 << 20):
    """CPU seconds per gigabyte to move bytes through the kernel's TCP, and to copy them once in memory.

    Both ends are in this process, on the loopback: system calls, two copies and the protocol, on both sides.
    """
    source, target = bytearray(b"x") * nbytes, bytearray(nbytes)
    with socket.create_server(("127.0.0.1", 0)) as server:
        out = socket.create_connection(server.getsockname())
        into, _ = server.accept()
        with out, into:
            sender = threading.Thread(target=out.sendall, args=(source,))
            start, view = time.process_time(), memoryview(target)
            sender.start()
            while view:
                view = view[into.recv_into(view) :]
            sender.join()
            tcp = time.process_time() - start
    start = time.process_time()
    for _ in range(4):
        target[:] = source
    copy = (time.process_time() - start) / 4
    return {"tcp": tcp / nbytes * 1e9, "copy": copy / nbytes * 1e9}

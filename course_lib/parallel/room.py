"What may be asked for here: how many ranks, on which backend, in how much memory. One sentence each."

import math
import sys
from pathlib import Path

from course_lib.parallel.errors import RankError, Refused

# Bytes of memory that a rank may come to hold by itself, small models included: what PyTorch, its process
# group and a lesson's tensors add to the pages shared with the others; with CUDA, its context on the host.
PER_RANK = {"gloo": 300e6, "nccl": 1.5e9}


def refuse_inside():
    "Ranks can't start ranks."
    worker = sys.modules.get("course_lib.parallel.worker")
    here = getattr(worker, "inside", None)
    if here:
        raise RankError(
            f"this code runs on rank {here[0]} of {here[1]} already: start ranks from the notebook", *here
        )


def whole(n):
    if isinstance(n, bool) or not isinstance(n, int):
        raise Refused(
            f"the number of ranks must be a whole number, and was {n!r}: write for example ranks(4)"
        )
    if n < 1:
        raise Refused(f"the number of ranks must be 1 or more, and was {n}")
    return n


def seconds(timeout):
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
        raise Refused(f"timeout must be a positive number of seconds, and was {timeout!r}")
    return float(min(timeout, 1e6))


def seed(given):
    if isinstance(given, bool) or not isinstance(given, int) or given < 0:
        raise Refused(f"seed must be a whole number from 0, and was {given!r}")
    return given


def modules(names):
    if isinstance(names, str):
        names = [names]
    if not all(isinstance(n, str) for n in names):
        raise Refused(f"preload takes names of modules, as in ['torch._dynamo'], and was {names!r}")
    return tuple(names)


def gpus():
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def backend(asked, n, have):
    "'gloo' or 'nccl'; NCCL by default where each rank can have one of the GPUs that are here."
    if asked not in (None, "gloo", "nccl"):
        raise Refused(f"backend must be 'gloo' or 'nccl', and was {asked!r}")
    if asked == "gloo":
        return asked
    import torch.distributed as dist

    if asked == "nccl" and have < n:
        raise Refused(
            f"NCCL wants a GPU for each of {n} ranks, and {have} {'is' if have == 1 else 'are'} here: "
            "leave backend out, or say backend='gloo'"
        )
    if asked is None:
        return "nccl" if have >= n and dist.is_nccl_available() else "gloo"
    return asked


def threads(n):
    from course_lib import machine

    return max(1, machine.cores() // n)


def refuse_without_memory(n, kind):
    free, each = available(), PER_RANK[kind]
    if n * each > free:
        most = math.floor(free / each)
        advice = f"start {most} at most" if most else "free some first"
        raise Refused(
            f"{n} ranks may need {n * each / 1e9:.1f} GB of memory and {free / 1e9:.1f} GB are free: {advice}"
        )


def available(root="/sys/fs/cgroup"):
    "Bytes of memory that processes may still take, by the system and by the limits of our control group."
    import psutil

    free = psutil.virtual_memory().available
    for limit, used in _limits(Path(root)):
        free = min(free, max(0, limit - used))
    return free


def _limits(root):
    "(limit, used without cache that can be dropped) of the control groups, versions 2 and 1, that bind us."
    for folder, most, now, cache in (
        (root, "memory.max", "memory.current", "inactive_file"),
        (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit = int((folder / most).read_text())
            used = int((folder / now).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            yield limit, used - int(stat.get(cache, 0))
        except (OSError, ValueError):
            continue

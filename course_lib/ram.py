"""How much memory processes here may take: the machine's, less what the limits of our control groups deny.

The only reader of those limits. It imports no torch, so that commands answer at once.
"""

import contextlib
from pathlib import Path

import psutil

# Of control groups of version 2 and version 1: the limit, what is used, the cache that can be dropped.
FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def total():
    "Bytes of memory of this machine, or of this container."
    return min([psutil.virtual_memory().total, *(limit for limit, _ in limits())])


def available():
    "Bytes of memory that may still be taken."
    free = [max(0, limit - used) for limit, used in limits()]
    return min([psutil.virtual_memory().available, *free])


def limits(proc="/proc/self/cgroup", root="/sys/fs/cgroup"):
    """(limit, used) in bytes for each control group that binds this process: its own and those around it.

    A container may see its own group at the root, under a path that is the host's: both are looked at.
    """
    try:
        lines = Path(proc).read_text().splitlines()
    except OSError:  # no Linux
        return []
    found = []
    for _, names, path in (line.split(":", 2) for line in lines):
        names = "memory" if "memory" in names.split(",") else names  # version 1, or '' for version 2
        limit, used, cache = FILES.get(names, (None,) * 3)
        top = Path(root, names)
        inner = top / path.strip("/")
        for folder in [inner, *inner.parents] if limit else []:
            # The root of version 2 has no limit, nor has a group of "max".
            with contextlib.suppress(OSError, ValueError):
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                kept = int((folder / used).read_text()) - int(stat.get(cache, 0))
                found.append((int((folder / limit).read_text()), kept))
            if folder == top:
                break
    return found

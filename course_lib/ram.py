"""How much memory processes here may take: the machine's, less what the limits of our control groups deny.

The only reader of those limits. It imports no torch, so that commands answer at once.
"""

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
    found = []
    for controllers, path in _groups(proc):
        top = Path(root, controllers)
        inner = top / path.strip("/")
        for folder in dict.fromkeys([inner, *inner.parents]):
            if folder == top or top in folder.parents:
                found += _read(folder, *FILES[controllers])
    return found


def _groups(proc):
    "(controllers, path) of this process's groups: '' stands for version 2, 'memory' for version 1."
    try:
        lines = [line.split(":", 2) for line in Path(proc).read_text().splitlines()]
    except OSError:  # no Linux
        return []
    found = [("memory" if "memory" in names.split(",") else names, path) for _, names, path in lines]
    return [(names, path) for names, path in found if names in FILES]


def _read(folder, limit, used, cache):
    try:
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        kept = int((folder / used).read_text()) - int(stat.get(cache, 0))
        return [(int((folder / limit).read_text()), kept)]
    except (OSError, ValueError):  # the root of version 2, or "max": no limit
        return []

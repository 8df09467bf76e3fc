"""What `torchrun` starts on each rank for `scale.torchrun`: a pickled function of the notebook, on Gloo.

torchrun --standalone --nproc-per-node 4 --max-restarts 2 -m course_lib.scale.launch FILE
"""

import contextlib
import ctypes
import datetime
import os
import sys
from pathlib import Path

import cloudpickle
import torch
import torch.distributed as dist

COUNT = "TORCHELASTIC_RESTART_COUNT"


def main(path):
    with contextlib.suppress(OSError, AttributeError):  # Linux: no rank outlives torchrun
        ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
    if os.getppid() == 1:  # it was gone before that
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    rank, size, port, start = (int(os.environ[k]) for k in ("RANK", "WORLD_SIZE", "MASTER_PORT", COUNT))
    # torchrun keeps its store over a restart, and Gloo finds there the addresses of ranks that are dead.
    store = dist.PrefixStore(
        f"start {start}", dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=False)
    )
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    fn, args = cloudpickle.loads(Path(path).read_bytes())
    result = fn(*args)
    if dist.get_rank() == 0:
        torch.save(result, path + ".result")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])

"""Data-parallel training that goes on after a restart. Two ranks on this machine, up to epoch 3:

torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 2 cluster/train.py run.pt 3
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from course_lib import data_parallel as dp

path, epochs = sys.argv[1], int(sys.argv[2])
gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
if gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpu else "gloo")  # RANK, WORLD_SIZE and MASTER_ADDR come from torchrun

data = TensorDataset(*dp.digits())
sampler = DistributedSampler(data, drop_last=True)
model = DistributedDataParallel(dp.net().to(device))
opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
first = 0
if os.path.exists(path):
    saved = torch.load(path, map_location=device)
    model.module.load_state_dict(saved["model"])
    opt.load_state_dict(saved["opt"])
    first = saved["epoch"]

for epoch in range(first, epochs):
    sampler.set_epoch(epoch)
    for x, y in DataLoader(data, 32, sampler=sampler):
        loss = F.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()  # averages the gradients over the ranks
        opt.step()
        opt.zero_grad()
    if dist.get_rank() == 0:
        state = {"model": model.module.state_dict(), "opt": opt.state_dict(), "epoch": epoch + 1}
        torch.save(state, path + ".tmp")
        os.replace(path + ".tmp", path)
        print(f"epoch {epoch} is over: loss {loss.item():.3f} on rank 0")
dist.barrier()  # no rank ends while another still writes or talks
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # Gloo's threads can abort a process while Python ends

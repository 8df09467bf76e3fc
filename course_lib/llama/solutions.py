import torch
from torch import nn
from torch.nn import functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel


def parallelize(model, way, mesh):
    "The same Llama on the ranks of `mesh`: way is data, sharded or tensor."
    if way == "data":
        return DistributedDataParallel(model)
    if way == "sharded":
        for block in model.model["layers"]:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    columns, rows = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
    for block in model.model["layers"]:
        for part in (block.self_attn, block.mlp):
            plan = {name: ColwiseParallel() for name in columns if hasattr(part, name)}
            plan |= {name: RowwiseParallel() for name in rows if hasattr(part, name)}
            parallelize_module(part, mesh, plan)
    return model

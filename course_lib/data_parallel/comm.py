"The same small communicator on `torch.distributed`, for real ranks: Gloo between CPUs, NCCL between GPUs."

import torch
import torch.distributed as dist


class Done:
    "A handle of something that is over."

    def wait(self):
        pass


class World:
    """The default process group as a communicator: `rank`, `size`, isend, recv and four collectives.

    Raises RuntimeError where no process group was initialised. Collectives sum; tensors must be contiguous.
    """

    def __init__(self):
        if not dist.is_initialized():
            raise RuntimeError(
                "this process belongs to no group of ranks: call torch.distributed.init_process_group, "
                "or run the cell on ranks"
            )
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.messages = self.nbytes = 0

    def isend(self, tensor, to):
        "Begin to send `tensor` to rank `to`; leave it alone until the handle's wait() returns."
        if not tensor.numel():
            return Done()
        self.messages += 1
        self.nbytes += tensor.numel() * tensor.element_size()
        return dist.isend(tensor.detach(), to)

    def send(self, tensor, to):
        self.isend(tensor, to).wait()

    def recv(self, tensor, source):
        "Wait for the next message of rank `source` and write it into `tensor`."
        if tensor.numel():
            dist.recv(tensor.detach(), source)

    def all_reduce(self, tensor, async_op=False):
        return dist.all_reduce(tensor.detach(), async_op=async_op)

    def broadcast(self, tensor, source):
        return dist.broadcast(tensor.detach(), source)

    def all_gather_into_tensor(self, out, tensor, async_op=False):
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in 2.14
        return gather(out.detach(), tensor.detach(), async_op=async_op)

    def reduce_scatter_tensor(self, out, tensor, async_op=False):
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return scatter(out.detach(), tensor.detach(), async_op=async_op)


class Alone:
    "A group of one rank: everything is already summed and gathered."

    rank, size = 0, 1

    def all_reduce(self, tensor, async_op=False):
        return Done() if async_op else None

    def broadcast(self, tensor, source):
        pass

    def all_gather_into_tensor(self, out, tensor, async_op=False):
        out.detach().view(-1).copy_(tensor.detach().view(-1))
        return Done() if async_op else None

    reduce_scatter_tensor = all_gather_into_tensor


def world():
    "The communicator of this process: its group's where there is one, else that of a single rank."
    return World() if dist.is_available() and dist.is_initialized() else Alone()


def device():
    "Where this rank's tensors live: its GPU under NCCL, else the CPU."
    on_gpu = dist.is_initialized() and dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

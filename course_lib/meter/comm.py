"""Messages, collectives and their bytes, counted on a rank: facts, the same on every machine.

    with count_comm() as c:
        ring_all_reduce(x)
    c.messages, c.sent_bytes, c.received_bytes, c.collectives, c.payload_bytes

Counted where PyTorch dispatches communication (the operators of `c10d` and `_c10d_functional`), so calls
from C++ are seen too: those of `DistributedDataParallel`, `fully_shard` and DTensor. `CommDebugMode` of
PyTorch looks in the same place and counts calls, not bytes.
"""

from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

# What an operator is called here, by how its name starts; the longer names first.
_NAMES = (
    ("allgather_into_tensor_coalesced", "all_gather"), ("all_gather_into_tensor", "all_gather"),
    ("_allgather_base", "all_gather"), ("allgather", "all_gather"),
    ("_reduce_scatter_base", "reduce_scatter"), ("reduce_scatter", "reduce_scatter"),
    ("allreduce", "all_reduce"), ("all_reduce", "all_reduce"),
    ("alltoall", "all_to_all"), ("all_to_all", "all_to_all"),
    ("broadcast", "broadcast"), ("barrier", "barrier"), ("monitored_barrier", "barrier"),
    ("gather", "gather"), ("scatter", "scatter"), ("reduce", "reduce"),
)  # fmt: skip


def _name(op):
    return next((name for start, name in _NAMES if op.startswith(start)), op.strip("_"))


def _bytes(tree):
    return sum(t.numel() * t.element_size() for t in tree_iter(tree) if isinstance(t, torch.Tensor))


class CommCounter(TorchDispatchMode):
    """What this rank communicated in a `with` block. Bytes are whole tensors', as handed to PyTorch.

    messages        point-to-point sends
    sent_bytes      bytes of those sends; `received_bytes` of the receives
    collectives     {"all_reduce": calls, …}
    payload_bytes   {"all_reduce": bytes, …}: what the rank hands in to each kind of collective, or, where
                    it only receives (broadcast, scatter), what it gets. What goes over the wire for it
                    depends on the algorithm and isn't counted.
    log             [("send" | "recv" | collective, bytes, peer or None), …] in order
    """

    def __init__(self):
        super().__init__()
        self.messages = self.sent_bytes = self.received_bytes = 0
        self.collectives, self.payload_bytes, self.log = Counter(), Counter(), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))  # one that raises isn't counted
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | (kwargs or {})
            self._note(func._opname, given)
        return out

    def _note(self, op, given):
        if op in _LOCAL:
            return
        if op == "batch_p2p_ops":
            for kind, peer, tensor in zip(
                given["op_list"], given["peer_list"], given["tensors"], strict=True
            ):
                self._message("send" if "send" in kind else "recv", _bytes(tensor), peer)
        elif op in ("send", "isend"):
            self._message("send", _bytes(given.get("tensors", given.get("tensor"))), given["dst"])
        elif op in ("recv_", "recv_any_source_", "irecv"):
            self._message("recv", _bytes(given.get("tensors", given.get("tensor"))), given.get("src"))
        else:
            name = _name(op)
            inputs = [v for k, v in given.items() if k in _INPUTS]
            payload = 0 if name == "barrier" else _bytes(inputs) or _bytes(list(given.values()))
            self.collectives[name] += 1
            self.payload_bytes[name] += payload
            self.log.append((name, payload, None))

    def _message(self, kind, nbytes, peer):
        if kind == "send":
            self.messages += 1
            self.sent_bytes += nbytes
        else:
            self.received_bytes += nbytes
        self.log.append((kind, nbytes, peer))


# What stays on the rank.
_LOCAL = {"wait_tensor", "check_for_nan", "_wrap_tensor_autograd"}
# The arguments that hold what a rank hands in. Operators that work in place have no other.
_INPUTS = {"input", "inputs", "input_tensor", "input_tensors", "input_list", "tensors", "tensor"}


def count_comm():
    "A `CommCounter` to use in a `with` block on a rank."
    return CommCounter()

"""Messages, collectives and their bytes, counted on a rank: facts, the same on every machine.

    with meter.count_comm() as c:
        ring_all_reduce(x)
    c.messages, c.sent_bytes, c.received_bytes    # point to point
    c.collectives                                 # {"all_reduce": calls, …}
    c.payload_bytes                               # {"all_reduce": bytes, …}: whole tensors that the rank
                                                  # hands in, or gets where it only receives (broadcast)

Counted where PyTorch dispatches communication (`c10d`, `_c10d_functional`), so calls from C++ are seen too:
those of `DistributedDataParallel`, `fully_shard` and DTensor. What goes over the wire for a collective
depends on the algorithm and isn't counted. PyTorch's `CommDebugMode` counts calls, not bytes.
"""

from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from course_lib.meter import operators

# A name is found in an operator's without its underscores, such as allgatherintotensor; longer names first.
NAMES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "barrier",
         "gather", "scatter", "reduce")  # fmt: skip
# What stays on the rank.
LOCAL = {"wait_tensor", "check_for_nan", "_wrap_tensor_autograd"}
# The arguments that hold what a rank hands in. Operators that work in place have no other.
INPUTS = {"input", "inputs", "input_tensor", "input_tensors", "input_list", "tensors", "tensor"}


class CommCounter(TorchDispatchMode):
    "What this rank communicated in a `with` block; see the module."

    def __init__(self):
        super().__init__()
        self.messages = self.sent_bytes = self.received_bytes = 0
        self.collectives, self.payload_bytes = Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))  # one that raises isn't counted
        spaces = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
        if func.namespace in spaces and func._opname not in LOCAL:
            self._note(func._opname, operators.arguments(func, args, kwargs or {}))
        return out

    def _note(self, op, given):
        inputs = [v for k, v in given.items() if k in INPUTS]
        pairs = zip(given["op_list"], given["tensors"], strict=True) if "p2p" in op else [(op, inputs)]
        for kind, tensors in pairs:
            if "send" in kind:
                self.messages += 1
                self.sent_bytes += _bytes(tensors)
            elif "recv" in kind:
                self.received_bytes += _bytes(tensors)
            else:
                name = next((n for n in NAMES if n.replace("_", "") in op.replace("_", "")), op.strip("_"))
                self.collectives[name] += 1
                self.payload_bytes[name] += 0 if name == "barrier" else _bytes(inputs) or _bytes(given)


def _bytes(tree):
    return sum(t.numel() * t.element_size() for t in tree_iter(tree) if isinstance(t, torch.Tensor))


count_comm = CommCounter

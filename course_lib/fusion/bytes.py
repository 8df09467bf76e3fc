"Bytes that a chain of point-wise operators moves: operator by operator, and as one kernel."

import math

import torch


def chain_bytes(shapes, steps, results, itemsize=4):
    """(unfused, fused) bytes of a chain.

    `shapes` has the shape of each input by its name; each is contiguous and has memory of its own. `steps` is
    a list of (name, *operands), where an operand is the name of an input or of an earlier step, or a number;
    the step's value has the broadcast shape of its operands. `results` are the steps that are returned.

    Unfused, each step is one operator: it reads each of its distinct operands once, however it is broadcast,
    and writes its value. Fused, one kernel reads once each input that a result depends on, and writes the
    results. Numbers cost nothing.
    """
    shapes, needs, unfused = dict(shapes), {name: {name} for name in shapes}, 0
    for name, *operands in steps:
        read = {a for a in operands if isinstance(a, str)}
        shapes[name] = tuple(torch.broadcast_shapes(*(shapes[a] for a in read)))
        needs[name] = set().union(*(needs[a] for a in read))
        unfused += sum(math.prod(shapes[a]) for a in read) + math.prod(shapes[name])
    read = set().union(*(needs[name] for name in results))
    fused = sum(math.prod(shapes[name]) for name in [*read, *set(results)])
    return unfused * itemsize, fused * itemsize

"""Counts what eager code asks of a device: operators, bytes, FLOPs and syncs. The same on every machine.

    with meter.count() as c:
        step(batch)
    c.ops, c.bytes, c.flops, c.syncs    # ints; c.where: "file:line" of each sync, c.code: its line
    c.read, c.written                   # c.bytes is their sum
    c.other_flops                       # estimates for what is no contraction; c.flops is contractions only
    c.by_op["addmm"].bytes              # an OpCount(ops, bytes, flops) by operator
    c.by_class()["normalisation"]       # the same by class: contraction, normalisation, elementwise
    print(c.table())

    meter.of(step, batch)               # Counts of one call, after two calls that warm up

Other facts have counters of their own: `compiled` (graphs, breaks, recompiles, kernels), `Memory` and
`peak_memory` (bytes alive), `count_comm` (messages, collectives and their bytes, on a rank).

What is counted is an operator that writes memory:

- Views and allocations (`empty`) count nothing, and neither does an operator whose result is empty.
- An operator reads each distinct element of its inputs once, however often it is passed or broadcast, and
  writes its result. In place it reads and writes; a fill, a copy and `out=` only write.
- Indexing and `embedding` read the elements they take, and the index, not the whole table.
- The step counters that torch.optim keeps on the CPU are not counted.

FLOPs are those of the table in `operators`. A sync is where Python would wait for a GPU: item, float, bool,
if, tolist, numpy, cpu, to("cpu"), print, nonzero, unique, a boolean mask as an index; `to(device)` with a
torch.device only where it moves data. torch.cuda.synchronize() is in plain sight and not counted.

Only operators of the portable list are counted, which are the same on a CPU and a GPU. Any other raises
`NotPortable`, which says what to use. `count(portable=False)` accepts everything and leaves the bytes None;
an operator whose FLOPs are not known makes the FLOPs None, and `c.unknown` names it. All that the block does
on CPU tensors is taken for the device's work. Other threads (data loaders) are not seen; a backward pass is.
"""

from course_lib.meter.comm import CommCounter, count_comm
from course_lib.meter.compiling import Compiled, compiled
from course_lib.meter.counting import Counts, NotPortable, OpCount, count, of
from course_lib.meter.memory import Memory, peak_memory

__all__ = ["CommCounter", "Compiled", "Counts", "Memory", "NotPortable", "OpCount", "compiled", "count",
           "count_comm", "of", "peak_memory"]  # fmt: skip

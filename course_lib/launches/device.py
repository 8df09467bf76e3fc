"""A simulated GPU with virtual time: streams, events, launches, copies, graphs, by the names of torch.cuda.

Inside `with Device() as gpu` tensors may be made on "cuda" or moved there. They are the CPU's tensors with
their values; each operator on them is a launch that costs Python time and occupies a stream. Times are in µs.
Order is kept by vector clocks, not by times: a use that no event orders is an error even where the times
would have been kind. Method: L. Lamport, CACM 21 (1978); torch.cuda._sanitizer finds races in the same way.
"""

import contextlib
from collections import Counter
from typing import NamedTuple
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import clip_grad
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from course_lib.meter import operators
from course_lib.meter.counting import WAITS

CAPTURING = "operation not permitted when stream is capturing"
UNPINNED = (
    "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned"
)
MIXED = "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu"
GROUPS = "_group_tensors_by_device_and_dtype"
READERS = {"tolist", "numpy", "__array__", "__repr__", "__format__"}


class Race(RuntimeError):
    "An order that nothing keeps, in one sentence."


class Span(NamedTuple):
    'A stretch of time in a lane ("Python" or a stream); `kind` is "launch", "wait", "copy" or "kernel".'

    lane: str
    kind: str
    name: str
    start: float
    end: float


class Event:
    "torch.cuda.Event: a place in a stream. `seen` says how much work of each stream lies before it."

    def __init__(self, gpu):
        self.gpu, self.time, self.seen = gpu, 0.0, Counter()

    def record(self, stream=None):
        stream = stream or self.gpu.current_stream()
        self.time, self.seen = max(self.gpu.now, stream.free), stream.seen | self.gpu.seen

    def wait(self, stream=None):
        (stream or self.gpu.current_stream()).wait_event(self)

    def synchronize(self):
        self.gpu.wait(self, "synchronize")


class Stream(torch.Stream):  # for torch's own methods that take one
    "torch.cuda.Stream: `free` is when its work is done, `seen` what is ordered before its next work."

    def __new__(cls, gpu, name, number):
        return super().__new__(cls, stream_id=number, device_index=0, device_type=1)

    def __init__(self, gpu, name, number):
        self.gpu, self.name, self.free, self.seen = gpu, name, 0.0, Counter()

    def wait_event(self, event):
        self.free, self.seen = max(self.free, event.time), self.seen | event.seen

    def wait_stream(self, stream):
        self.wait_event(stream.record_event())

    def record_event(self, event=None):
        event = event or Event(self.gpu)
        event.record(self)
        return event

    def synchronize(self):
        self.record_event().synchronize()


class Graph:
    "torch.cuda.CUDAGraph: the operators of a capture with the tensors and numbers that they had."

    def __init__(self, gpu):
        self.gpu, self.nodes = gpu, []

    def replay(self):
        self.gpu.host(self.gpu.replay_us, "launch", "replay")
        with self.gpu.resting(), torch.no_grad():
            for func, args, kwargs, made, places in self.nodes:
                self.gpu.put(*places)
                new = func(*args, **kwargs)
                for old, t in zip(made, operators.tensors(new) if made else (), strict=False):
                    old.copy_(t)


class Block:
    'Memory of the device ("cuda") or "pinned" memory: who wrote it last, and who has read it since.'

    def __init__(self, place, stream, size):
        self.place, self.stream, self.size = place, stream, size
        self.write, self.reads, self.recorded, self.events = None, {}, set(), []


class Device:
    """The simulated GPU. `launch` is what a launch costs Python, `replay` that of a whole graph (µs).

    A kernel takes `kernel` µs and its bytes at `rate` bytes/µs; a copy its bytes at `bus` bytes/µs. There is
    one engine for kernels and one for copies; each serves in the order of the launches.
    """

    def __init__(self, launch=8.0, replay=10.0, kernel=2.0, rate=4e6, bus=5e4):
        self.launch_us, self.replay_us, self.kernel_us = launch, replay, kernel
        self.rate, self.bus = rate, bus
        self.now, self.seen, self.spans = 0.0, Counter(), []  # Python's clock, and what it knows to be done
        self.blocks, self.freed, self.engines = {}, [], Counter()  # when an engine is done
        self.streams, self.capturing = [Stream(self, "default stream", 0)], None
        self.on, self.making, self.asleep = self.streams[0], False, False

    def __enter__(self):
        self.modes = contextlib.ExitStack()
        self.modes.enter_context(_Calls(self))
        self.modes.enter_context(_Operators(self))
        self.modes.enter_context(mock.patch.object(clip_grad, GROUPS, _groups))
        return self

    def __exit__(self, *error):
        self.modes.close()

    # --- the names of torch.cuda ---

    def Stream(self, device=None, priority=0):
        number = len(self.streams)
        self.streams.append(Stream(self, f"stream {number}", number))
        return self.streams[-1]

    def Event(self, enable_timing=False, blocking=False):
        return Event(self)

    def CUDAGraph(self):
        return Graph(self)

    def current_stream(self):
        return self.on

    def default_stream(self):
        return self.streams[0]

    def stream(self, stream):
        return self._with("on", stream)

    def synchronize(self):
        for stream in self.streams:
            stream.synchronize()

    def get_rng_state(self):
        return torch.get_rng_state()

    def set_rng_state(self, state):
        torch.set_rng_state(state)

    @contextlib.contextmanager
    def graph(self, graph, pool=None, stream=None):
        self.synchronize()
        random, nodes = torch.get_rng_state(), []
        try:
            with self._with("capturing", nodes), self.stream(stream or Stream(self, "capture", -1)):
                yield
        finally:
            torch.set_rng_state(random)
        graph.nodes = nodes
        with self.resting(), torch.no_grad():
            for t in (t for *_, made, _ in nodes for t in made if t.is_floating_point()):
                t.fill_(torch.nan)  # nothing was computed

    # --- time and order ---

    def restart(self):
        "Wait for everything, then set all clocks to 0."
        self.synchronize()
        self.now, self.spans, self.engines = 0.0, [], Counter()
        for stream in self.streams:
            stream.free = 0.0

    def host(self, us, kind, name):
        "Python is busy for that many µs."
        self.spans.append(Span("Python", kind, name, self.now, self.now + us))
        self.now += us

    def wait(self, event, name):
        "Python waits for an event; then it knows that what lies before it is done."
        if self.capturing is not None:
            raise RuntimeError(f"{CAPTURING}: {name.strip('_')} waits for the GPU")
        if event.time > self.now:
            self.host(event.time - self.now, "wait", name)
        self.seen |= event.seen

    def launch(self, name, us, reads=()):
        "Launch a kernel of `us` µs that reads these tensors."
        self.host(self.launch_us, "launch", name)
        self.put(name, us, [self.block(t) for t in reads], [])

    def put(self, name, us, reads, writes, engine="kernel"):
        "Queue work on the current stream, behind what it must follow; a missing order is a `Race`."
        self.on.seen |= self.seen
        for block in filter(None, reads):
            self._after(block.write, f"use before ready: {name}", "reads", "writes")
        for block in filter(None, writes):
            self._after(block.write, f"reuse before done: {name}", "writes", "writes")
            for other in block.reads.values():
                self._after(other, f"reuse before done: {name}", "writes", "reads")
        self.on.seen[self.on.name] += 1
        mark = self.on.name, self.on.seen[self.on.name], name
        for block in filter(None, reads):
            block.reads[self.on.name] = mark
        for block in filter(None, writes):
            block.write, block.reads = mark, {}
        start = max(self.now, self.on.free, self.engines[engine])
        self.on.free = self.engines[engine] = start + us
        self.spans.append(Span(self.on.name, engine, name, start, start + us))

    def _after(self, other, name, does, did):
        if other is not None and self.on.seen[other[0]] < other[1]:
            what = "a tensor" if does == "reads" else "memory"  # which another tensor may have had before
            memory = f"{does} {what} that {other[2]} on {other[0]} {did}"
            raise Race(f"{name} on {self.on.name} {memory}, and no event puts one after the other")

    # --- memory ---

    def block(self, t):
        found = self.blocks.get(t.untyped_storage()._cdata)
        return found and found[1]

    def on_device(self, t):
        return isinstance(t, torch.Tensor) and getattr(self.block(t), "place", None) == "cuda"

    def keep(self, t, place="cuda"):
        "Register a new tensor. It gets memory that was freed on this stream, as PyTorch's allocator does."
        for key in [k for k, (ref, _) in self.blocks.items() if ref.expired()]:
            _, block = self.blocks.pop(key)
            block.events = [s.record_event() for s in block.recorded]
            self.freed.append(block)
        kind, block = (place, self.on, -(-t.untyped_storage().nbytes() // 512)), None
        for old in self.freed:
            if (old.place, old.stream, old.size) == kind and all(e.time <= self.now for e in old.events):
                block = old
                self.freed.remove(old)
                for event in old.events:  # the allocator asked whether they are done
                    self.on.seen |= event.seen
                break
        block = block or Block(*kind)
        block.recorded = set()
        self.blocks[t.untyped_storage()._cdata] = StorageWeakRef(t.untyped_storage()), block
        return t

    @contextlib.contextmanager
    def _with(self, name, value):
        before = getattr(self, name)
        setattr(self, name, value)
        try:
            yield
        finally:
            setattr(self, name, before)

    def resting(self):
        "Within, operators are the CPU's own."
        return self._with("asleep", True)

    # --- operators ---

    def run(self, func, args, kwargs):
        "What the dispatch mode sees: an operator on the host or the device, or a copy between them."
        given, free = operators.arguments(func, args, kwargs), operators.is_free(func)
        name = operators.name(func)
        found = operators.tensors(list(given.values()))
        here = [t for t in found if self.on_device(t)]
        if name == "copy" and len(here) == 1:
            return self._transfer(*found, given.get("non_blocking"))
        if not here and not self.making:
            return func(*args, **kwargs)
        if here and "index" not in name and any(t.dim() and not self.on_device(t) for t in found):
            raise RuntimeError(f"{MIXED} (in {name})")
        if name in WAITS or (name == "index" and operators.is_masked(given["indices"])):
            self.read(here, name)
        capturing = self.capturing is not None and not free
        result = self._blank(func, args, kwargs) if capturing else func(*args, **kwargs)
        made = [
            self.keep(t)
            for t in pytree.tree_leaves(result)
            if isinstance(t, torch.Tensor) and not self.block(t)
        ]
        if free or name == "_local_scalar_dense":
            return result
        changed = [
            given.get(a.name) for a in func._schema.arguments if a.alias_info and a.alias_info.is_write
        ]
        written = made + [t for t in operators.tensors(changed) if self.on_device(t)]
        us = self.kernel_us + sum(t.nbytes for t in here + written) / self.rate
        places = name, us, [self.block(t) for t in here], [self.block(t) for t in written]
        if capturing:
            plain = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs, made))
            self.capturing.append((func, *plain, places))
        else:
            self.host(self.launch_us, "launch", name)
            self.put(*places)
        return result

    def _blank(self, func, args, kwargs):
        "What an operator returns in a capture: arguments that it changes, and tensors without values."
        originals = {}

        def copy(t):
            originals[(c := t.detach().clone()).untyped_storage()._cdata] = t
            return c

        args, kwargs = pytree.tree_map_only(torch.Tensor, copy, (args, kwargs))
        out = func(*args, **kwargs)
        return pytree.tree_map_only(torch.Tensor, lambda t: originals.get(t.untyped_storage()._cdata, t), out)

    def _transfer(self, target, source, non_blocking):
        "A copy between host and device. Without pinned memory or non_blocking Python waits."
        to_device = self.on_device(target)
        pinned = self.block(source if to_device else target) is not None
        if self.capturing is not None:
            raise RuntimeError("the simulated device captures no copy from the host" if pinned else UNPINNED)
        name = "copy to the GPU" if to_device else "copy to the host"
        self.host(self.launch_us, "launch", name)
        us = self.kernel_us + target.nbytes / self.bus
        self.put(name, us, [self.block(source)], [self.block(target)], "copy")
        if not (pinned and non_blocking):
            self.on.synchronize()
        return torch.ops.aten.copy_.default(target, source)

    def read(self, tensors, name):
        "Python waits for values."
        self.wait(self.on.record_event(), name)
        self.on.seen |= self.seen
        for t in tensors:
            self._after(self.block(t).write, f"use before ready: {name.strip('_')}", "reads", "writes")


def _groups(lists, group=getattr(clip_grad, GROUPS)):
    "What clip_grad_norm_ asks in C++, which knows only the host: each group by the device of its tensors."
    return {(found[0][0].device, dtype): (found, i) for (_, dtype), (found, i) in group(lists).items()}


class _Operators(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls):
        return False  # nothing is compiled here, and torch would load the compiler for that

    def __init__(self, gpu):
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        plain = self.gpu.asleep or func.namespace in ("profiler", "prim")
        return func(*args, **(kwargs or {})) if plain else self.gpu.run(func, args, kwargs or {})


class _Calls(TorchFunctionMode):
    "Python's calls that name a device."

    def __init__(self, gpu):
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, func, types, args=(), kwargs=None):
        gpu, kwargs, name = self.gpu, dict(kwargs or {}), getattr(func, "__name__", "")
        here = bool(args) and gpu.on_device(args[0])
        if here and func == torch.Tensor.device.__get__:
            return torch.device("cuda", 0)
        if here and func == torch.Tensor.is_cuda.__get__:
            return True
        if gpu.asleep:
            return func(*args, **kwargs)
        if name in ("to", "cuda", "cpu"):
            return self._to(args[0], *([name] if name != "to" else ()), *args[1:], **kwargs)
        if name == "record_stream":
            return gpu.block(args[0]).recorded.add(args[1])
        if name == "pin_memory":
            return gpu.keep(args[0].clone(), "pinned")
        if name in READERS and here:
            gpu.read(args[:1], name)
            with gpu.resting():
                return func(*args, **kwargs)
        if torch.device(kwargs.get("device") or "cpu").type != "cuda":
            return func(*args, **kwargs)
        del kwargs["device"]
        if name in ("tensor", "as_tensor"):
            return self._to(func(*args, **kwargs), "cuda")
        with gpu._with("making", True):
            return func(*args, **kwargs)

    def _to(self, t, *args, **kwargs):
        gpu = self.gpu
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        if args and gpu.on_device(args[0]):
            device = torch.device("cuda")
        if device is None or (device.type == "cuda") == gpu.on_device(t):
            return t if dtype in (None, t.dtype) else torch.Tensor.to(t, dtype)
        with torch.no_grad(), gpu._with("making", True) if device.type == "cuda" else gpu.resting():
            out = torch.empty_like(t, dtype=dtype or t.dtype)
        with torch.no_grad():
            return out.copy_(t, non_blocking).requires_grad_(t.requires_grad and t.is_leaf)

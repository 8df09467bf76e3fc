"""A watch for losses that are no longer numbers, three ways: wait each time, copy now and then, ask a thread.

Each way has a promise. `NanWatch(within=k)` tells of a loss that is NaN or infinite in call i at call i + k
at the latest. The first way keeps k = 0 and empties the GPU's queue at every step; the others never do.
"""

import math
import queue
import threading

import torch


class Pinned:
    """Copies a tensor of one number to the host behind the GPU's queue, one copy at a time.

    Calling it starts the copy and returns at once. Then `ready()` says whether the number has come, `wait()`
    waits until it has, and `read()` gives it; before it has come, `read()` gives whatever was there. On a CPU
    the copy is done when the call returns.

    The memory is pinned: the GPU writes to it by itself, so that Python need not take part.
    """

    def __init__(self, device):
        on_gpu = torch.device(device).type == "cuda"
        self.host = torch.zeros(1, dtype=torch.float32, device="cpu", pin_memory=on_gpu)
        self.number = self.host.numpy()  # the same memory, read without any operator of torch
        self.event = torch.cuda.Event() if on_gpu else None

    def __call__(self, value):
        self.host.copy_(value.detach().reshape(1), non_blocking=True)
        if self.event is not None:
            self.event.record()
        return self

    def ready(self):
        return self.event is None or self.event.query()

    def wait(self):
        if self.event is not None:
            self.event.synchronize()

    def read(self):
        return float(self.number[0])


class CopyWatch:
    """Every `every` calls, starts a copy of one number that is NaN if any loss so far was not finite.

    Call it with each step's loss; True once it is known that one was NaN or infinite. A bad loss of call i is
    known at call i + 2 * every - 1 at the latest: where a copy has not come by the time the next is due,
    Python waits for it, and meanwhile the GPU has `every` steps of work. `fetch` is a `Pinned` or alike.
    """

    def __init__(self, fetch, every):
        self.fetch, self.every, self.calls = fetch, every, 0
        self.flag = self.copy = None
        self.stop = False

    def __call__(self, loss):
        self.calls += 1
        # 0 * NaN and 0 * infinity are NaN, and NaN plus anything stays NaN.
        if self.flag is None:
            self.flag = loss.detach() * 0
        else:
            self.flag.add_(loss.detach(), alpha=0)
        due = self.calls % self.every == 0
        if self.copy is not None and (due or self.copy.ready()):
            self._settle()
        if due and not self.stop:
            self.copy = self.fetch(self.flag)
        return self.stop

    def _settle(self):
        if not self.copy.ready():
            self.copy.wait()
        self.stop = self.stop or not math.isfinite(self.copy.read())
        self.copy = None

    def finish(self):
        "Wait for everything; was any loss bad?"
        if self.copy is not None:
            self._settle()
        if self.flag is not None and not self.stop:
            self.copy = self.fetch(self.flag)
            self._settle()
        return self.stop


class EachWatch:
    "Reads every loss, and so waits at every step."

    stop = False

    def __call__(self, loss):
        self.stop = self.stop or not math.isfinite(loss.item())
        return self.stop

    def finish(self):
        return self.stop


class ThreadWatch:
    """Hands every loss to a thread that reads it, while the caller goes on.

    At most `within` - 1 losses wait to be read; then the call waits for the thread, which is that many steps
    behind, so that the GPU has work meanwhile. The losses must come from the default stream.
    """

    def __init__(self, within):
        self.losses = queue.Queue(maxsize=within - 1)
        self.bad = threading.Event()
        self.error = None
        self.thread = threading.Thread(target=self._read, daemon=True, name="nan watch")
        self.thread.start()

    def _read(self):
        while (loss := self.losses.get()) is not None:
            if self.error is None and not self.bad.is_set():
                try:
                    # item() lets go of Python's lock while it waits for the GPU.
                    if not math.isfinite(loss.item()):
                        self.bad.set()
                except Exception as e:  # kept for the caller; the thread goes on, or the caller would hang
                    self.error = e

    def __call__(self, loss):
        if self.error is not None:
            raise self.error
        if self.thread.is_alive():
            self.losses.put(loss.detach())
        return self.bad.is_set()

    def finish(self):
        if self.thread.is_alive():
            self.losses.put(None)
            self.thread.join()
        if self.error is not None:
            raise self.error
        return self.bad.is_set()


class NanWatch:
    """Tells of a loss that is NaN or infinite, `within` steps after it at the latest.

        with NanWatch(within=20, device=loss.device) as watch:
            for batch in batches:
                loss = step(batch)
                if watch(loss):
                    break
        watch.finish()      # True if any loss was bad, the last ones too

    `way` is "copy" (every `within` / 2 steps through pinned memory and an event), "thread" (another thread
    reads) or "each" (read at every step: exact, and Python waits each time). A loss is a tensor of one
    number; none is kept longer than `within` steps. ValueError for a `within` or `way` that can't be.
    """

    def __init__(self, within=20, way="copy", device="cpu"):
        least = {"each": 0, "copy": 1, "thread": 2}
        if way not in least:
            raise ValueError(f"way is {way!r}; choose from {', '.join(least)}")
        if not isinstance(within, int) or within < least[way]:
            raise ValueError(f'within is {within!r}; way "{way}" needs a whole number, {least[way]} or more')
        if way == "copy":
            self._watch = CopyWatch(Pinned(device), (within + 1) // 2)
        else:
            self._watch = ThreadWatch(within) if way == "thread" else EachWatch()

    def __call__(self, loss):
        return self._watch(loss)

    def finish(self):
        "Wait for the losses not yet looked at; was any loss bad? Ends the thread."
        return self._watch.finish()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        if exception[0] is None:
            self.finish()
        elif isinstance(self._watch, ThreadWatch):  # end the thread; the exception on its way counts
            self._watch.losses.put(None)

"Lesson resizing: what the size of the images costs, by the device, by a loader, and by a compiler."

import io
import statistics
import time

import torch
from torch.nn import functional as F

from course_lib import machine, resizing
from course_lib.resizing import resize
from course_lib.resizing.study import arranged, precision, tuned_convolutions


def step_seconds(task, sides, batch=None, files=None):
    """Seconds of one training step at each of `sides`, {side: seconds}, the median of several.

    `files` are JPEG files' bytes: each step then reads its images from them first, in one process, as a
    loader without workers would, and resizes them on the device like the others.
    """
    batch = batch or task.batch
    device = machine.device()
    net, y = task.network(0), torch.zeros(batch, dtype=torch.int64, device=device)
    x = torch.randint(0, 256, (batch, 1, task.side, task.side), dtype=torch.uint8, device=device)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-6, fused=machine.has_gpu())

    def step(side):
        images = decode(files).to(device) if files else x
        with precision():
            loss = F.cross_entropy(net(arranged(resize(images, side))), y)
        opt.zero_grad()
        loss.backward()
        opt.step()

    found = {}
    with tuned_convolutions():
        for side in sides:
            took = []
            for k in range(machine.pick(cpu=4, gpu=13)):
                machine.sync()
                start = time.perf_counter()
                step(side)
                machine.sync()
                if k > machine.pick(cpu=0, gpu=2):
                    took.append(time.perf_counter() - start)
            found[side] = statistics.median(took)
    return found


def encode(x, side):
    "Images [N, 1, H, W] as JPEG files of `side` pixels, a list of bytes: as large as a camera makes them."
    from PIL import Image

    files = []
    for image in resize(x, side).cpu():
        f = io.BytesIO()
        Image.fromarray(image[0].numpy()).save(f, "JPEG", quality=90)
        files.append(f.getvalue())
    return files


def decode(files):
    "JPEG files of equal size as one uint8 tensor [N, 1, H, W] on the CPU."
    import numpy as np
    from PIL import Image

    return torch.stack([torch.from_numpy(np.array(Image.open(io.BytesIO(f))))[None] for f in files])


def compile_seconds(task, sides):
    "Seconds that torch.compile takes before the first training step at each of `sides`, a graph for each."
    import torch._dynamo

    torch._dynamo.reset()
    device, found = machine.device(), {}
    net = task.network(0)
    compiled = torch.compile(net, dynamic=False)
    y = torch.zeros(task.batch, dtype=torch.int64, device=device)
    for side in sides:
        x = torch.zeros(task.batch, 1, side, side, dtype=torch.uint8, device=device)
        machine.sync()
        start = time.perf_counter()
        with precision():
            loss = F.cross_entropy(compiled(arranged(x)), y)
        loss.backward()
        machine.sync()
        found[side] = time.perf_counter() - start
    torch._dynamo.reset()
    return found


def explore(low=128, sharp=4, loader=0.0, epochs=16, full=256, step=32):
    """The explorer's numbers: each epoch's side and cost, and the gain, for costs that grow with the pixels.

    Costs are in epochs at full size. `loader` is what an epoch costs at least. `sides`, `costs`, `speedup`.
    """
    low = min(low, full)
    sides = resizing.sizes(epochs, low, full, step, sharp)

    def cost(side):
        return (side / full) ** 2

    return {"sides": sides, "costs": [max(cost(s), loader) for s in sides], "full": full, "loader": loader,
            "speedup": resizing.speedup(sides, full, cost, loader)}  # fmt: skip

"""What lesson resizing keeps out of its cells: letters drawn on the device, files, an explorer's numbers.

Images of letters are float32 [N, 1, side, side] around 0, dark on light.
"""

import functools
import io
import itertools
import math
import statistics
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from course_lib import data, machine, show

ALL = data.CHARACTERS  # forty letters; many differ in an accent only
PLAIN = "aeiouyncsz"  # ten without accents, which a small network on a CPU learns in seconds


@functools.cache
def glyphs(letters, held_out, side, device):
    "The letters in twelve typefaces, or four that are held out, [faces * letters, 1, side, side]; 1 is ink."
    import numpy as np
    from PIL import Image, ImageDraw

    drawn = []
    for face in data.HELD_OUT if held_out else [f for f in data.LATIN if f not in data.HELD_OUT]:
        font = data.font(face, side // 2)
        for letter in letters:
            image = Image.new("L", (side, side), 0)
            left, top, right, bottom = font.getbbox(letter)
            at = (side - left - right) / 2, (side - top - bottom) / 2
            ImageDraw.Draw(image).text(at, letter, font=font, fill=255)
            drawn.append(np.asarray(image))
    return torch.from_numpy(np.stack(drawn)).to(device)[:, None].float() / 255


def shrunk(x, side):
    "Float images [N, C, H, W] as [N, C, side, side], averaged over the pixels that fall into one."
    return F.interpolate(x, size=(side, side), mode="bilinear", antialias=True)


class Letters:
    """Batches of letters drawn on the device: turned, scaled, shifted, on a soft background, with noise.

    Each pass gives `n` batches (images, labels) of `size`, and always other letters. The same `seed` gives
    the same letters. `held_out` takes the four typefaces that are kept for validation. With `shown` the
    images are drawn at `side` and shrunk to `shown` pixels, averaging. `em` is the range of the font's size
    in parts of the side; `noise` is the noise's standard deviation, where white paper is 1.
    """

    def __init__(
        self, letters, side, size, n=1, seed=0, held_out=False, shown=None, em=(0.3, 0.6), noise=0.1
    ):
        self.side, self.size, self.n, self.shown = side, size, n, shown or side
        self.em, self.noise = em, noise
        self.glyphs, self.classes = glyphs(letters, held_out, side, machine.device()), len(letters)
        self.random = torch.Generator(machine.device()).manual_seed(seed)

    def __len__(self):
        return self.n

    def __iter__(self):
        return (self.batch() for _ in range(self.n))

    def to(self, device):
        "The letters are where they are needed already; fastai's DataLoaders call this."
        return self

    def _uniform(self, low, high, *shape):
        u = torch.rand(self.size, *shape, device=self.glyphs.device, generator=self.random)
        return low + (high - low) * u

    def batch(self):
        "Images [size, 1, shown, shown] and labels [size]."
        where, wide = self.glyphs.device, (self.size, 1, self.side, self.side)
        which = torch.randint(len(self.glyphs), (self.size,), device=where, generator=self.random)
        angle, em = self._uniform(-math.pi / 12, math.pi / 12), self._uniform(*self.em)
        shift = self._uniform(-1, 1, 2) * (1 - 1.3 * em)[:, None]
        # From a pixel of the image to a place on the letter's square: shift back, turn back, scale back.
        turn = torch.stack([angle.cos(), angle.sin(), -angle.sin(), angle.cos()], 1).view(-1, 2, 2)
        turn = (0.5 / em)[:, None, None] * turn
        place = torch.cat([turn, -turn @ shift[:, :, None]], 2)
        grid = F.affine_grid(place, wide, align_corners=False)
        ink = F.grid_sample(self.glyphs[which], grid, align_corners=False)
        paper = F.interpolate(self._uniform(0.6, 1, 1, 4, 4), self.side, mode="bilinear", align_corners=True)
        noise = torch.randn(wide, device=where, generator=self.random)
        x = paper.lerp(self._uniform(0, 0.3, 1, 1, 1).expand(wide), ink).add_(noise, alpha=self.noise)
        x = x.sub_(0.6).mul_(4)
        return x if self.shown == self.side else shrunk(x, self.shown), which % self.classes


class Passes:
    """Passes over stored images `x` and labels `y`; each takes the next `epoch` of them, `size` at a time.

    The order is the seed's. Images come out as float32. `epoch` divides the images, and `size` the epoch.
    """

    def __init__(self, x, y, epoch, size, seed):
        self.x, self.y, self.epoch, self.size = x, y, epoch, size
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        self.parts = itertools.cycle(order.to(x.device).split(epoch))

    def __len__(self):
        return self.epoch // self.size

    def __iter__(self):
        for index in next(self.parts).split(self.size):
            yield self.x[index].float(), self.y[index]


class Bf16(nn.Module):
    "`net` on the device, in bfloat16 where it is a GPU, channels last in memory; results are float32."

    def __init__(self, net):
        super().__init__()
        self.net = net.to(machine.device(), memory_format=torch.channels_last)

    def forward(self, x):
        with torch.autocast("cuda", torch.bfloat16, enabled=x.is_cuda):
            return self.net(x.contiguous(memory_format=torch.channels_last)).float()


class Photos(torch.utils.data.Dataset):
    "`n` grey JPEG photos of `side` pixels, decoded by Pillow one at a time: (uint8 [1, side, side], label)."

    def __init__(self, n, side):
        from PIL import Image

        self.n, self.files = n, []
        images, _ = Letters(PLAIN, 64, 16).batch()
        for image in (shrunk(images, side) * 64 + 128).clamp(0, 255).to(torch.uint8).cpu():
            f = io.BytesIO()
            Image.fromarray(image[0].numpy()).save(f, "JPEG", quality=90)
            self.files.append(f.getvalue())

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        import numpy as np
        from PIL import Image

        image = Image.open(io.BytesIO(self.files[i % len(self.files)]))
        return torch.from_numpy(np.array(image))[None], i % len(PLAIN)


class Gain(NamedTuple):
    "Seconds of full size over seconds of growing at one target: median, lowest, highest of the seeds."

    median: float
    low: float
    high: float
    seeds: int

    def __str__(self):
        spread = f"{self.seeds} seeds, {self.low:.2f} to {self.high:.2f}" if self.seeds > 1 else "one seed"
        return f"{self.median:.2f} times ({spread})"


def gain(full, growing):
    """The `Gain` of paired runs, or a sentence where it can't be said.

    Both are {seed: seconds to the target, or None where it wasn't reached}, with the same seeds.
    """
    missed = {name: sum(t is None for t in runs.values()) for name, runs in
              (("full size", full), ("growing", growing))}  # fmt: skip
    if any(missed.values()):
        return "not reached: " + ", ".join(f"{name} {m} of {len(full)}" for name, m in missed.items() if m)
    ratios = [full[seed] / growing[seed] for seed in full]
    return Gain(statistics.median(ratios), min(ratios), max(ratios), len(ratios))


def said(prediction, measured, unit):
    "One sentence that compares a prediction (None: none was written) with what came out."
    words = f"{show.number(measured)} {unit}"
    return f"{words}; you said {prediction:,.6g}" if isinstance(prediction, int | float) else words


def spread(values, form=".1f"):
    "The median of some seeds and their range in words, or the one value."
    low, *_, high = sorted(values * 2)
    middle = f"{statistics.median(values):{form}}"
    return f"{middle} ({low:{form}} to {high:{form}})" if len(values) > 1 else middle


def share_right(net, x, y):
    "% of the letters `x` [N, 1, side, side] that the network reads right, by their labels `y`."
    net.eval()
    with torch.no_grad():
        found = torch.cat([net(part).argmax(1) for part in x.split(500)])
    return 100 * (found == y).float().mean().item()


def explore(small=64, small_share=0.5, loader=0.5, full=128):
    """The explorer's numbers: what the epochs of a run cost, with time taken as side².

    `small_share` of the epochs are at `small`, the others at `full`. Costs are in epochs at full size;
    `loader` is what the loader needs for an epoch. `gains` are over `loaders`, such costs of the loader.
    """

    def costs(loader):
        return [max((side / full) ** 2, loader) for side in (small, full)]

    def gain(loader):
        low, high = costs(loader)
        return high / (small_share * low + (1 - small_share) * high)

    loaders = [k / 50 for k in range(61)]
    numbers = {"gain": gain(loader), "gains": [gain(t) for t in loaders], "loaders": loaders}
    settings = {"small": small, "full": full, "share": small_share, "loader": loader}
    return numbers | settings | {"costs": costs(loader)}

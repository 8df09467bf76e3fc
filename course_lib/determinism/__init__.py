"""What lesson determinism keeps out of its cells: addends, bitwise comparison, digits as sparse features.

Source: F. Niu et al., "Hogwild!", 2011 (why a sparse problem).
"""

import statistics

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from course_lib import data

# Unit roundoff: the largest relative error of one rounding to nearest.
ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}
NUMBERS = ("positive", "both signs", "one large first")
ORDERS = ("as drawn", "ascending", "descending")
LEVELS = 3  # a pixel is dark, grey or light
FEATURES = 49 * LEVELS**4


def said(prediction, measured, unit=""):
    "One sentence that compares a prediction (None: none was written) with what came out."
    unit = f" {unit}" if unit else ""
    said, shown = (str(x) if isinstance(x, str | None) else f"{x:,}" for x in (prediction, measured))
    guess = "you wrote no prediction" if prediction is None else f"you said {said}"
    return f"{shown}{unit} ({guess})"


def middle(values):
    "(median, least, largest) of numbers."
    return statistics.median(values), min(values), max(values)


def draw(n, numbers="positive", order="as drawn", dtype="float32", lanes=16):
    "Test numbers [n, lanes]: uniform in 0..1; gaussian; or uniform after 2**13 in the first row."
    generator = torch.Generator().manual_seed(0)
    if numbers == "both signs":
        x = torch.randn(n, lanes, generator=generator)
    else:
        x = torch.rand(n, lanes, generator=generator)
        if numbers == "one large first":
            x[0] = 2.0**13
    if order != "as drawn":
        x = x.sort(0, descending=order == "descending").values
    return x.to(getattr(torch, dtype))


class Operators(TorchDispatchMode):
    "Calls `look(func, out)` after each operator that torch runs, with its output."

    def __init__(self, look):
        super().__init__()
        self.look = look

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.look(func, out)
        return out


def answers(fn, times=10):
    "How many different results, to the last bit, `times` calls of `fn` give (a tensor, or several)."
    seen = []
    for _ in range(times):
        out = fn()
        # As integers, where a NaN equals itself; cloned, for `fn` may write into the same memory again.
        bits = [t.detach().contiguous().reshape(-1).view(torch.uint8).clone()
                for t in (out if isinstance(out, list | tuple) else [out])]  # fmt: skip
        if not any(all(map(torch.equal, bits, old)) for old in seen):
            seen.append(bits)
    return len(seen)


def drawn(loader):
    "An epoch of `loader`, whose batches are (indices, numbers), as one list [(index, number), …]."
    return [pair for index, number in loader for pair in zip(index.tolist(), number.tolist(), strict=True)]


def patches(x):
    """The active features of images [N, 1, 8, 8] in 0..1: int64 [N, 49], each a patch's place and content.

    Pixels are cut to three levels; each of the 49 patches of 2x2 pixels then is one of 81 features.
    """
    levels = (x * LEVELS).long().clamp(max=LEVELS - 1)[:, 0]
    windows = levels.unfold(1, 2, 1).unfold(2, 2, 1).reshape(len(x), 49, 4)
    code = (windows * LEVELS ** torch.arange(4)).sum(-1)
    return code + torch.arange(49) * LEVELS**4


def sparse_digits():
    "The digits as patches: ((features, labels) for training, the same for validation), int64."
    digits = data.digits()
    return [(patches(x), y) for x, y in (digits.train, digits.valid)]


class Samples:
    "What a worker reads: `samples[i]` is (features, label), an int64 tensor [49] and an int."

    def __init__(self, features, labels):
        self.features, self.labels = features, labels.tolist()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.features[i], self.labels[i]


def scores(weights, features):
    "A sparse model's scores: the sum of its active rows, [N, 49] to [N, classes]."
    return weights[features].sum(1)


def judged(weights, train, valid):
    "(training loss, validation accuracy in 0..1) of a sparse model's weights."
    loss = F.cross_entropy(scores(weights, train[0]), train[1]).item()
    return loss, (scores(weights, valid[0]).argmax(1) == valid[1]).float().mean().item()

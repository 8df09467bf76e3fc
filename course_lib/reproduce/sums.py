"""Floating-point sums: how much the order of the addends matters, and how to lose less.

Sources: D. Goldberg, "What Every Computer Scientist Should Know About Floating-Point Arithmetic", 1991;
N. Higham, "The Accuracy of Floating Point Summation", 1993; W. Kahan, "Further Remarks on Reducing
Truncation Errors", 1965; A. Neumaier, 1974.
"""

import math

import torch

# Unit roundoff: the largest relative error of one rounding to nearest.
ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
NUMBERS = ("positive", "both signs", "one large first")
ORDERS = ("as drawn", "ascending", "descending")


def exact(x):
    "The sum of a one-dimensional tensor, rounded once: `math.fsum` of its values."
    return math.fsum(x.tolist())


def left_to_right(x):
    "The sum of a float16, 32 or 64 tensor [n], one addend after the other, each sum rounded to its type."
    import numpy as np

    # torch.sum adds in blocks; accumulate may not.
    return float(np.add.accumulate(x.numpy())[-1])


def in_orders(x, times, seed=0):
    "The sums of the same numbers, left to right, in `times` random orders: float64 [times]."
    generator = torch.Generator().manual_seed(seed)
    orders = (torch.randperm(len(x), generator=generator) for _ in range(times))
    return torch.tensor([left_to_right(x[at]) for at in orders], dtype=torch.float64)


def naive(x):
    "The sum over the rows of x [n, lanes], row after row: [lanes]. One operation a row."
    total = torch.zeros_like(x[0])
    for row in x:
        total = total + row
    return total


def pairwise(x):
    "The sum over the rows of x [n, lanes] as a tree: halves are summed, then added. Error grows as log n."
    while len(x) > 1:
        half = len(x) // 2
        odd = x[2 * half :]
        x = torch.cat([x[:half] + x[half : 2 * half], odd])
    return x[0]


def kahan(x):
    """The sum over the rows of x [n, lanes] with what each addition loses carried to the next: [lanes].

    Four operations a row, in the type of `x`. The error is at most about 2 u sum(|x|), whatever n is.
    """
    total, lost = torch.zeros_like(x[0]), torch.zeros_like(x[0])
    for row in x:
        addend = row - lost
        larger = total + addend
        # What arrived in the sum, minus what was sent: what rounding added (and must be taken off).
        lost = (larger - total) - addend
        total = larger
    return total


def neumaier(x):
    "As `kahan`, right also where an addend is larger than the sum so far ([1, 1e10, 1, -1e10] gives 2)."
    total, lost = torch.zeros_like(x[0]), torch.zeros_like(x[0])
    for row in x:
        larger = total + row
        lost = lost + torch.where(total.abs() >= row.abs(), (total - larger) + row, (row - larger) + total)
        total = larger
    return total + lost


METHODS = {"one after the other": naive, "as a tree": pairwise, "compensated": kahan}


def draw(n, numbers="positive", order="as drawn", dtype="float32", lanes=16, seed=0):
    "Test numbers [n, lanes]: uniform in 0..1; gaussian; or uniform after one of 2**13 in the first row."
    if numbers not in NUMBERS or order not in ORDERS or dtype not in ROUNDOFF:
        raise ValueError(
            f"draw was given {numbers!r}, {order!r} and {dtype!r}; expected one of {NUMBERS}, of {ORDERS}, "
            f"one of {tuple(ROUNDOFF)}"
        )
    generator = torch.Generator().manual_seed(seed)
    if numbers == "both signs":
        x = torch.randn(n, lanes, generator=generator)
    else:
        x = torch.rand(n, lanes, generator=generator)
        if numbers == "one large first":
            x[0] = 2.0**13
    if order != "as drawn":
        x = x.sort(0, descending=order == "descending").values
    return x.to(getattr(torch, dtype))


def errors(longest=12, numbers="positive", order="as drawn", dtype="float32"):
    """Errors of three ways to sum 2, 4, …, 2**longest numbers, each for 16 draws.

    Returns {"n": [...], "errors": {method: tensor [len(n), 16]}, "roundoff": u}; an error is divided by
    the sum of magnitudes, the yardstick of Higham's bounds.
    """
    lengths = [2**k for k in range(1, longest + 1)]
    x = draw(lengths[-1], numbers, order, dtype)
    found = {name: [] for name in METHODS}
    for n in lengths:
        part = x[:n]
        want, size = part.double().sum(0), part.double().abs().sum(0)
        for name, method in METHODS.items():
            found[name].append((method(part).double() - want).abs() / size)
    return {
        "n": lengths,
        "errors": {name: torch.stack(rows) for name, rows in found.items()},
        "roundoff": ROUNDOFF[dtype],
        "title": f"addends: {numbers}, {order}, {dtype}",
    }

"Wrong answers to exercises fusion.4 and fusion.5; mutants.py lists them."

import math

import torch
from torch import nn

from course_lib.fusion import breaks as fusion_breaks

# --- fusion.4: four graph breaks --------------------------------------------------------


def _standardise(x, limit, *, say=None, centre=None, scale=None, gain=None, peak=None):
    "The mended function, of which any part can be done otherwise."
    high = (peak or (lambda x: x.abs().max()))(x)
    if say:
        say(high)
    x = (centre or (lambda x, limit: torch.where(x.mean() > limit, x - x.mean(0), x)))(x, limit)
    y = x / (1 + (scale or torch.std)(x))
    return y * (gain or (lambda y: torch.where(y > 0, y, 0).sum()))(y), high


def the_starter(x, limit):
    peak = x.abs().max()
    print(f"largest {peak:.3f}")
    if x.mean() > limit:
        x = x - x.mean(0)
    scale = float(x.std())
    y = x / (1 + scale)
    gain = y[y > 0].sum()
    return y * gain, peak


def keeps_the_print(x, limit):
    return _standardise(x, limit, say=lambda peak: print(f"largest {peak:.3f}"))


def keeps_the_if(x, limit):
    def centre(x, limit):
        if x.mean() > limit:
            return x - x.mean(0)
        return x

    return _standardise(x, limit, centre=centre)


def keeps_the_float(x, limit):
    return _standardise(x, limit, scale=lambda x: float(x.std()))


def item_in_place_of_float(x, limit):
    return _standardise(x, limit, scale=lambda x: x.std().item())


def keeps_the_mask(x, limit):
    return _standardise(x, limit, gain=lambda y: y[y > 0].sum())


def nonzero_in_place_of_the_mask(x, limit):
    return _standardise(x, limit, gain=lambda y: y.flatten()[(y.flatten() > 0).nonzero()].sum())


def hides_a_part_from_the_compiler(x, limit):
    return _standardise(x, limit, gain=torch.compiler.disable(lambda y: y[y > 0].sum()))


def never_centres(x, limit):
    return _standardise(x, limit, centre=lambda x, limit: x)


def always_centres(x, limit):
    return _standardise(x, limit, centre=lambda x, limit: x - x.mean(0))


def centres_only_where_it_is_compiled(x, limit):
    return never_centres(x, limit) if torch.compiler.is_compiling() else fusion_breaks.standardise(x, limit)


def settles_the_branch_while_tracing():
    "The side that was taken first is taken ever after."
    taken = []

    def standardise(x, limit):
        if not torch.compiler.is_compiling():
            taken[:] = [bool(x.mean() > limit)]
        return _standardise(x, limit, centre=lambda x, _: x - x.mean(0) if taken[0] else x)

    return standardise


branches_outside = settles_the_branch_while_tracing()


def swaps_the_branches(x, limit):
    return _standardise(x, limit, centre=lambda x, limit: torch.where(x.mean() > limit, x, x - x.mean(0)))


def decides_for_each_element(x, limit):
    return _standardise(x, limit, centre=lambda x, limit: torch.where(x > limit, x - x.mean(0), x))


def decides_for_each_column(x, limit):
    return _standardise(x, limit, centre=lambda x, limit: torch.where(x.mean(0) > limit, x - x.mean(0), x))


def centres_by_the_mean_of_all(x, limit):
    return _standardise(x, limit, centre=lambda x, limit: torch.where(x.mean() > limit, x - x.mean(), x))


def forgets_the_mask(x, limit):
    return _standardise(x, limit, gain=lambda y: y.sum())


def sums_magnitudes(x, limit):
    return _standardise(x, limit, gain=lambda y: y.abs().sum())


def counts_the_positive(x, limit):
    return _standardise(x, limit, gain=lambda y: (y > 0).float().sum())


def peak_without_its_sign(x, limit):
    return _standardise(x, limit, peak=lambda x: x.max())


def peak_of_the_result(x, limit):
    y, _ = fusion_breaks.standardise(x, limit)
    return y, y.abs().max()


def drops_the_peak(x, limit):
    return fusion_breaks.standardise(x, limit)[0]


def deviation_of_each_column(x, limit):
    return _standardise(x, limit, scale=lambda x: x.std(0))


def divides_by_n(x, limit):
    return _standardise(x, limit, scale=lambda x: x.std(correction=0))


def deviation_before_centring(x, limit):
    scale = x.std()
    return _standardise(x, limit, scale=lambda _: scale)


# --- fusion.5: a recompile storm --------------------------------------------------------


class TheStarter(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.calls = 0
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x, repeats, temperature):
        self.calls += 1
        self.mean += (x.mean(0) - self.mean) / self.calls
        y = x - self.mean
        for _ in range(repeats):
            y = 0.9 * y
        return y * math.log(temperature)


class KeepsTheCounter(fusion_breaks.Centre):
    def __init__(self, width):
        super().__init__(width)
        del self.calls
        self.calls = 0


class KeepsTheLoop(fusion_breaks.Centre):
    def forward(self, x, repeats, temperature):
        y = super().forward(x, 0, temperature)
        for _ in range(repeats):
            y = 0.9 * y
        return y


class KeepsMathLog(fusion_breaks.Centre):
    def forward(self, x, repeats, temperature):
        return super().forward(x, repeats, math.e) * math.log(temperature)


class KeepsAListOfMeans(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.means = []

    def forward(self, x, repeats, temperature):
        self.means.append(x.mean(0))
        centred = x - torch.stack(self.means).mean(0)
        return centred * 0.9**repeats * torch.full((), temperature).log()


class IsKeptFromTheCompiler(fusion_breaks.Centre):
    @torch.compiler.disable
    def forward(self, x, repeats, temperature):
        return super().forward(x, repeats, temperature)


class ReadsTheCounter(fusion_breaks.Centre):
    def forward(self, x, repeats, temperature):
        self.calls += 1
        self.mean += (x.mean(0) - self.mean) / self.calls.item()
        return (x - self.mean) * 0.9**repeats * torch.full((), temperature).log()


class _Otherwise(fusion_breaks.Centre):
    "The mended module, of which any part can be done otherwise."

    first = 0.0

    def __init__(self, width):
        super().__init__(width)
        self.calls += self.first

    def forward(self, x, repeats, temperature):
        self.calls += 1
        self.update(x)
        return (x - self.mean) * self.shrink(repeats) * self.log(temperature)

    def update(self, x):
        self.mean += (x.mean(0) - self.mean) / self.calls

    def shrink(self, repeats):
        return 0.9**repeats

    def log(self, temperature):
        return torch.full((), temperature).log()


class CountsFromOne(_Otherwise):
    first = 1.0


class ForgetsToCount(_Otherwise):
    def update(self, x):
        self.calls.fill_(1)
        super().update(x)


class MovesByATenth(_Otherwise):
    def update(self, x):
        self.mean += (x.mean(0) - self.mean) / 10


class CentresFirst(_Otherwise):
    def forward(self, x, repeats, temperature):
        y = (x - self.mean) * self.shrink(repeats) * self.log(temperature)
        self.calls += 1
        self.update(x)
        return y


class WeighsByRows(_Otherwise):
    "The mean of all rows so far, where all batches should weigh the same."

    def update(self, x):
        self.calls += len(x) - 1
        self.mean += (x.mean(0) - self.mean) * len(x) / self.calls


class MeanOfAllElements(_Otherwise):
    def update(self, x):
        self.mean += (x.mean() - self.mean) / self.calls


class ShrinksOnce(_Otherwise):
    def shrink(self, repeats):
        return 0.9


class ShrinksInProportion(_Otherwise):
    def shrink(self, repeats):
        return 0.9 * repeats


class LogarithmToBaseTwo(_Otherwise):
    def log(self, temperature):
        return torch.full((), temperature).log2()


class DropsTheTemperature(_Otherwise):
    def log(self, temperature):
        return 1.0


class BakesTheTemperatureIn(_Otherwise):
    "What was there at the first call stays: one graph, and wrong."

    kept = None

    def log(self, temperature):
        if self.kept is None:
            self.kept = math.log(temperature)
        return self.kept

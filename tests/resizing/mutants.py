"Wrong answers to the exercises. Each computes something, and each is what somebody would write."

import statistics

import torch
from torch.nn import functional as F

from course_lib import resizing

REFERENCE = {
    "resizing.1": resizing.stage_flops,
    "resizing.2": resizing.sizes,
    "resizing.3": resizing.resize,
    "resizing.4": resizing.speedup,
    "resizing.5": resizing.paired_ratio,
}


# --- resizing.1: FLOPs of a stage ---------------------------------------------------------


def counts_multiply_adds(batch, channels, width, depth, height, side):
    return resizing.stage_flops(batch, channels, width, depth, height, side) // 2


def rounds_the_side_down(batch, channels, width, depth, height, side):
    return 18 * batch * (height // 2) * (side // 2) * width * (channels + (depth - 1) * width)


def forgets_the_stride(batch, channels, width, depth, height, side):
    return 18 * batch * height * side * width * (channels + (depth - 1) * width)


def first_layer_before_the_stride(batch, channels, width, depth, height, side):
    small = -(-height // 2) * -(-side // 2)
    return 18 * batch * width * (height * side * channels + small * (depth - 1) * width)


def every_layer_takes_the_input(batch, channels, width, depth, height, side):
    return depth * resizing.stage_flops(batch, channels, width, 1, height, side)


def forgets_the_filter(batch, channels, width, depth, height, side):
    return resizing.stage_flops(batch, channels, width, depth, height, side) // 9


def images_are_square(batch, channels, width, depth, height, side):
    return resizing.stage_flops(batch, channels, width, depth, side, side)


def one_image(batch, channels, width, depth, height, side):
    return resizing.stage_flops(1, channels, width, depth, height, side)


# --- resizing.2: the schedule -------------------------------------------------------------


def reaches_full_size_early(epochs, low, high, step, sharp):
    n, levels = epochs - sharp, (high - low) // step
    return [low + step * (k * levels // max(n - 1, 1)) for k in range(n)] + [high] * sharp


def rounds_to_the_nearest(epochs, low, high, step, sharp):
    n, levels = epochs - sharp, (high - low) // step
    return [low + step * round(k * levels / n) for k in range(n)] + [high] * sharp


def not_in_steps(epochs, low, high, step, sharp):
    n = epochs - sharp
    return [low + (high - low) * k // n for k in range(n)] + [high] * sharp


def climbs_over_all_epochs(epochs, low, high, step, sharp):
    levels = (high - low) // step
    return [low + step * (k * levels // epochs) for k in range(epochs - sharp)] + [high] * sharp


def the_end_on_top(epochs, low, high, step, sharp):
    levels = (high - low) // step
    return [low + step * (k * levels // epochs) for k in range(epochs)] + [high] * sharp


def jumps_at_the_end(epochs, low, high, step, sharp):
    return [low] * (epochs - sharp) + [high] * sharp


def one_step_an_epoch(epochs, low, high, step, sharp):
    n = epochs - sharp
    return [min(low + step * k, high) for k in range(n)] + [high] * sharp


def gives_floats(epochs, low, high, step, sharp):
    return [float(s) for s in resizing.sizes(epochs, low, high, step, sharp)]


def starts_large(epochs, low, high, step, sharp):
    return resizing.sizes(epochs, low, high, step, sharp)[::-1]


# --- resizing.3: resizing -----------------------------------------------------------------


def _with(x, size, **options):
    y = F.interpolate(x.float(), size=(size, size), **options)
    return (y if x.dtype.is_floating_point else y.round().clamp(0, 255)).to(x.dtype)


def nearest_pixel(x, size):
    return _with(x, size, mode="nearest")


def bilinear_without_antialias(x, size):
    return _with(x, size, mode="bilinear")


def corners_aligned(x, size):
    return _with(x, size, mode="bilinear", antialias=True, align_corners=True)


def bicubic(x, size):
    return _with(x, size, mode="bicubic", antialias=True)


def adaptive_average(x, size):
    y = F.adaptive_avg_pool2d(x.float(), size)
    return (y if x.dtype.is_floating_point else y.round()).to(x.dtype)


def cuts_the_middle_out(x, size):
    edge = max((x.shape[-1] - size) // 2, 0)
    return resizing.resize(x[..., edge : edge + size, edge : edge + size], size)


def gives_floats_for_bytes(x, size):
    return F.interpolate(x.float(), size=(size, size), mode="bilinear", antialias=True)


def brings_bytes_to_one(x, size):
    return resizing.resize(x if x.dtype.is_floating_point else x.float() / 255, size).to(x.dtype)


def cuts_the_fraction_off(x, size):
    return F.interpolate(x.float(), size=(size, size), mode="bilinear", antialias=True).to(x.dtype)


def image_by_image(x, size):
    return torch.stack([resizing.resize(image[None], size)[0] for image in x])


def mixes_the_channels(x, size):
    return resizing.resize(x, size).flip(1)


def lies_on_its_side(x, size):
    return resizing.resize(x, size).transpose(2, 3)


# --- resizing.4: the gain -----------------------------------------------------------------


def squares_the_mean_side(schedule, full, cost, floor=0.0):
    mean = sum(schedule) / len(schedule)
    return max(cost(full), floor) / max(cost(mean), floor)


def counts_pixels(schedule, full, cost, floor=0.0):
    return resizing.speedup(schedule, full, lambda side: side**2, floor)


def upside_down(schedule, full, cost, floor=0.0):
    return 1 / resizing.speedup(schedule, full, cost, floor)


def mean_of_the_epochs_gains(schedule, full, cost, floor=0.0):
    return sum(max(cost(full), floor) / max(cost(s), floor) for s in schedule) / len(schedule)


def forgets_the_loader(schedule, full, cost, floor=0.0):
    return resizing.speedup(schedule, full, cost)


def loader_after_the_device(schedule, full, cost, floor=0.0):
    return resizing.speedup(schedule, full, lambda side: cost(side) + floor)


def loader_over_the_whole_run(schedule, full, cost, floor=0.0):
    n = len(schedule)
    return max(n * cost(full), n * floor) / max(sum(cost(s) for s in schedule), n * floor)


def loader_slows_the_schedule_alone(schedule, full, cost, floor=0.0):
    return len(schedule) * cost(full) / sum(max(cost(s), floor) for s in schedule)


def every_size_once(schedule, full, cost, floor=0.0):
    return resizing.speedup(sorted(set(schedule)), full, cost, floor)


def one_epoch_of_full_size(schedule, full, cost, floor=0.0):
    return resizing.speedup(schedule, full, cost, floor) / len(schedule)


# --- resizing.5: the paired comparison ----------------------------------------------------


def _ratios(fixed, progressive):
    resizing.paired_ratio(fixed, progressive)  # refuses what must be refused
    never = float("inf")
    return [
        never if fixed[s] is None else 0.0 if progressive[s] is None else fixed[s] / progressive[s]
        for s in fixed
    ]


def _whole(times):
    return [float("inf") if t is None else t for t in times.values()]


def ratio_of_the_medians(fixed, progressive):
    ratios = _ratios(fixed, progressive)
    slow, fast = statistics.median(_whole(fixed)), statistics.median(_whole(progressive))
    return slow / fast if fast < float("inf") else 0.0, min(ratios), max(ratios)


def ratio_of_the_totals(fixed, progressive):
    ratios = _ratios(fixed, progressive)
    slow, fast = sum(_whole(fixed)), sum(_whole(progressive))
    return slow / fast if fast < float("inf") else 0.0, min(ratios), max(ratios)


def mean_of_the_ratios(fixed, progressive):
    ratios = _ratios(fixed, progressive)
    return statistics.fmean(ratios), min(ratios), max(ratios)


def in_the_order_they_came(fixed, progressive):
    _ratios(fixed, progressive)
    return resizing.paired_ratio(
        dict(enumerate(fixed.values())),
        {k: (t or fixed[s]) for k, (s, t) in enumerate(progressive.items())},
    )


def progressive_over_fixed(fixed, progressive):
    return resizing.paired_ratio(progressive, fixed)


def drops_who_never_arrived(fixed, progressive):
    both = [s for s in fixed if fixed[s] is not None and progressive.get(s) is not None]
    _ratios(fixed, progressive)
    return resizing.paired_ratio({s: fixed[s] for s in both}, {s: progressive[s] for s in both})


def never_arrived_is_no_time_at_all(fixed, progressive):
    _ratios(fixed, progressive)
    ratios = [(fixed[s] or 0.0) / (progressive[s] or 1e-9) for s in fixed]
    return statistics.median(ratios), min(ratios), max(ratios)


def seeds_in_common(fixed, progressive):
    both = fixed.keys() & progressive.keys()
    if not both:
        raise ValueError("no seed in common")
    return resizing.paired_ratio({s: fixed[s] for s in both}, {s: progressive[s] for s in both})


def middle_half_as_the_interval(fixed, progressive):
    ratios = sorted(_ratios(fixed, progressive))
    n = len(ratios)
    return statistics.median(ratios), ratios[n // 4], ratios[(3 * n - 1) // 4]


def lower_of_the_middle_two(fixed, progressive):
    ratios = _ratios(fixed, progressive)
    return statistics.median_low(ratios), min(ratios), max(ratios)


def both_missing_is_a_draw(fixed, progressive):
    both = [s for s in fixed if fixed[s] is None and progressive.get(s) is None]
    return resizing.paired_ratio(
        {**fixed, **dict.fromkeys(both, 1.0)}, {**progressive, **dict.fromkeys(both, 1.0)}
    )


MUTANTS = {
    "resizing.1": [
        counts_multiply_adds,
        rounds_the_side_down,
        forgets_the_stride,
        first_layer_before_the_stride,
        every_layer_takes_the_input,
        forgets_the_filter,
        images_are_square,
        one_image,
    ],
    "resizing.2": [
        reaches_full_size_early,
        rounds_to_the_nearest,
        not_in_steps,
        climbs_over_all_epochs,
        the_end_on_top,
        jumps_at_the_end,
        one_step_an_epoch,
        gives_floats,
        starts_large,
    ],
    "resizing.3": [
        nearest_pixel,
        bilinear_without_antialias,
        corners_aligned,
        bicubic,
        adaptive_average,
        cuts_the_middle_out,
        gives_floats_for_bytes,
        brings_bytes_to_one,
        cuts_the_fraction_off,
        image_by_image,
        mixes_the_channels,
        lies_on_its_side,
    ],
    "resizing.4": [
        squares_the_mean_side,
        counts_pixels,
        upside_down,
        mean_of_the_epochs_gains,
        forgets_the_loader,
        loader_after_the_device,
        loader_over_the_whole_run,
        loader_slows_the_schedule_alone,
        every_size_once,
        one_epoch_of_full_size,
    ],
    "resizing.5": [
        ratio_of_the_medians,
        ratio_of_the_totals,
        mean_of_the_ratios,
        in_the_order_they_came,
        progressive_over_fixed,
        drops_who_never_arrived,
        never_arrived_is_no_time_at_all,
        seeds_in_common,
        middle_half_as_the_interval,
        lower_of_the_middle_two,
        both_missing_is_a_draw,
    ],
}

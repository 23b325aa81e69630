"""Which mean V is quantized without, of all its keys or of runs of them, and PyTorch that finds it on any device.

The fused kernels (``hopper.mean``) follow these rules; what they add up, they add in another order.
"""

from __future__ import annotations

import math

import torch
from torch.nn.functional import pad

from hopper.mean.config import (
    APART_VARIANCES,
    CHANCE,
    COLUMNS,
    E4M3_BITS,
    FAR_VARIANCES,
    FARTHEST,
    GROUPS,
    LOG_RUNS,
    MOST_KEPT,
    MOST_LEFT,
    MOST_LEFT_OF_SMALL,
    NEIGHBOURS,
    OUTLYING,
    RUN,
    SMALL_FIRST,
    SMALL_FIRSTS,
    STEP_EXPONENT,
    groups_of,
    halvings,
    halvings_of_run,
    run_of,
    sample_size,
)

SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


def robust_mean_of_keys(x: torch.Tensor) -> torch.Tensor:
    """The mean of x (b, s, hk, d), s > 0, over the keys, without outliers: float32 (b, hk, d), finite.

    The keys are cut into equal segments; fewer keys than segments are left out at the end. Of FEWEST_SAMPLED to
    MOST_SAMPLED keys a quarter is looked at, in short runs. Segments whose mean or
    variance is not finite, or whose mean lies far from the others', do not count; without any, the result is 0. Of many
    normal values none is left out: what lies further from their mean than this would bring back some of the sums that
    it is to keep small.
    """
    return _robust_mean(_segments(x, halvings(x.shape[1]))[0])


def mean_worth_subtracting(v: torch.Tensor) -> torch.Tensor:
    """What to subtract from v (b, s, hk, d), s > 0, before it becomes e4m3: float32 (b, hk, d), finite.

    ``robust_mean_of_keys`` of the columns where it is more than chance, else 0, rounded to a multiple of
    2^STEP_EXPONENT of their spread, the square of which is the median of the variances of the segments. A power of two,
    since PyTorch and the kernel add up in other orders, and should find the same.

    Then moved a little, so that the first value is exact. The first token of a language model often has nearly all of
    the attention, and a value of nearly zero: what e4m3 rounds off it, or off the mean in its place, is most of the
    error of the output, or more than the output. So the vector is the first value less a number that e4m3 has. It is
    off the mean by up to 1/16 of the distance of the first value from it; where that is too much for so many keys,
    whose sums would be of one sign, the column has its mean.

    The kernel adds this vector to the output as it is, though P, once rounded, sums to a little more or less than what
    the output is divided by. Times a mean, that may be more than an output of nearly nothing. So where the first value
    is small in all of some neighbouring columns, and few keys lose little by their mean, a column keeps it.
    """
    groups, length = groups_of(v.shape[1])
    often = halvings(v.shape[1])
    counted = sample_size(length, often) if often else length
    return worth_subtracting(*_segments(v, often), v[:, 0].float(), groups * counted)


def worth_subtracting(
    means: torch.Tensor, variances: torch.Tensor, first: torch.Tensor, keys: int | torch.Tensor
) -> torch.Tensor:
    """The same of the means and variances of segments, float32 (b, GROUPS, hk, d), NaN where they do not count, for
    which so many keys were looked at, an int, or (b, 1, 1). The values begin with ``first``, float32 (b, hk, d)."""
    mean = _robust_mean(means)
    squared = _median_of_numbers(variances).squeeze(1).nan_to_num()
    rounded = _on_the_grid(mean, squared)
    is_chance = mean * mean * keys < CHANCE**2 * squared
    stays = is_chance | _is_kept(rounded, first, squared, keys, is_chance) | ~rounded.isfinite()
    return _sparing_the_first(torch.where(stays, 0.0, rounded), first, squared, keys)


def _on_the_grid(mean: torch.Tensor, squared: torch.Tensor) -> torch.Tensor:
    """A mean rounded to a multiple of the step of values of such a variance; itself if that is 0."""
    exponent = (squared.frexp().exponent - 1).div(2, rounding_mode="floor") + STEP_EXPONENT
    step = torch.ldexp(torch.ones_like(squared), exponent)
    return torch.where(squared >= SMALLEST_NORMAL, (mean / step).round() * step, mean)


def means_of_runs(v: torch.Tensor, run: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What runs of keys of v (b, s, hk, d) lose, each for itself, where the kernel adds P V up in runs.

    FP8 WGMMA cuts off what is small against the sum that it is added to, and a mean that is left makes a sum of one
    sign. The kernel notes the sums of P of runs of ``run`` keys, counted from ``end`` back, which may lie behind the
    last key, so that it can add what each has lost. A part of a run is looked at, if it is not a short one
    (``halvings_of_run``).

    That is ``mean_worth_subtracting``, of groups of runs in place of segments, for all runs whose mean lies close to
    it. One that lies far away loses its own: far is so many standard errors that it is not by chance. Where one does
    for some of ``COLUMNS`` columns of a head, the kernel takes notes anyway, and all runs whose mean lies apart lose
    their own there: two standard errors. Of the run with the first key, where it has a mean of its own, that leaves
    the first value exact.

    Returns:
        float32 (b, runs, hk, d), the run of the last keys first, and int32 (b, hk): 1 for the heads with a run that
        does not lose what all do.
    """
    runs, first = -(-end // run), v[:, 0].float()
    bounds = [(max(end - (number + 1) * run, 0), end - number * run) for number in range(runs)]
    lengths = [min(stop, v.shape[1]) - start for start, stop in bounds]
    halved = [halvings_of_run(length, v.shape[1]) for length in lengths]
    segments = [_segments(v[:, slice(*b)], often) for b, often in zip(bounds, halved, strict=True)]
    means = torch.stack([torch.where(m.isnan().all(1), math.nan, _robust_mean(m)) for m, _ in segments], 1)
    variances = torch.stack([_mean_where(x, _counts(m)) for m, x in segments], 1)
    groups = min(runs, GROUPS)
    parts = [slice(g * runs // groups, (g + 1) * runs // groups) for g in range(groups)]
    joined, missing = [], (0, 0, 0, 0, 0, GROUPS - groups)
    for x in (means, variances):
        of_groups = torch.stack([_mean_of_numbers(x[:, part], means[:, part]) for part in parts], 1)
        joined.append(pad(of_groups, missing, value=math.nan))
    looked_at = v.shape[1] >> halvings_of_run(v.shape[1], v.shape[1])
    of_all = worth_subtracting(joined[0], joined[1], first, looked_at)
    counts = [length >> often for length, often in zip(lengths, halved, strict=True)]
    keys = v.new_tensor(counts, dtype=torch.float32)
    distance = means - of_all[:, None]
    squared, rounded = distance * distance * keys[:, None, None], _on_the_grid(distance, variances)
    can_differ = (distance.abs() < FARTHEST) & rounded.isfinite()
    changed = _of_columns((squared > FAR_VARIANCES * variances) & can_differ)
    lies_apart = (squared > APART_VARIANCES * variances) & can_differ & changed
    lost = of_all[:, None] + torch.where(lies_apart, rounded, 0.0)
    last = _sparing_the_first(lost[:, -1], first, variances[:, -1], keys[-1])
    lost[:, -1] = torch.where(lies_apart[:, -1], last, lost[:, -1])
    return lost, changed.any(-1).any(1).int()


def _of_columns(is_far: torch.Tensor) -> torch.Tensor:
    """bool (b, 1, hk, d): for each column whether any run of those that a CTA of the kernel takes together is."""
    size = is_far.shape[-1]
    together = pad(is_far.any(1, keepdim=True), (0, -size % COLUMNS)).unflatten(-1, (-1, COLUMNS))
    return together.any(-1).repeat_interleave(COLUMNS, -1)[..., :size]


def _mean_of_numbers(x: torch.Tensor, means: torch.Tensor) -> torch.Tensor:
    """That of x over dimension 1 where ``means`` are numbers; NaN without any."""
    counts = ~means.isnan()
    return torch.where(counts, x, 0.0).sum(1) / counts.sum(1)


def _is_kept(
    mean: torch.Tensor,
    first: torch.Tensor,
    squared: torch.Tensor,
    keys: int | torch.Tensor,
    is_chance: torch.Tensor,
) -> torch.Tensor:
    """Whether columns (b, hk, d) keep their mean: the first token is little in all of some neighbours, and sums of one
    sign of so few keys lose little."""
    columns = mean.shape[-1]
    is_small = (first.abs() < SMALL_FIRSTS * mean.abs()) | is_chance
    is_small = pad(is_small, (0, -columns % NEIGHBOURS), value=True)
    all_small = is_small.unflatten(-1, (-1, NEIGHBOURS)).all(-1).repeat_interleave(NEIGHBOURS, -1)
    return all_small[..., :columns] & (mean * mean * keys < MOST_KEPT * squared)


def _sparing_the_first(
    mean: torch.Tensor, first: torch.Tensor, squared: torch.Tensor, keys: int | torch.Tensor
) -> torch.Tensor:
    """The vector next to ``mean`` that leaves of the ``first`` value of each column a number that e4m3 has, where the
    two are close enough for so many keys. ``squared`` is the squared spread."""
    mantissa, exponent = (first - mean).frexp()
    code = torch.ldexp((mantissa * 2**E4M3_BITS).round() / 2**E4M3_BITS, exponent)
    exact = first - code
    left = exact - mean
    most = torch.where(first.abs() < SMALL_FIRST * mean.abs(), MOST_LEFT_OF_SMALL, MOST_LEFT)
    return torch.where(left * left * keys < most * squared, exact, mean)


def _segments(x: torch.Tensor, often: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean and the variance of x (b, s, hk, d) over each segment of the keys, so ``often`` halved: float32 (b,
    GROUPS, hk, d), both NaN where one of them is not finite, and behind the last. Differences from the first key are
    added up, which cancels less."""
    groups, length = groups_of(x.shape[1])
    segments = x[:, : groups * length].unflatten(1, (groups, length))
    first = segments[:, :, 0].float()
    if often:
        segments = segments[:, :, keys_looked_at(torch.arange(length, device=x.device), length, often)]
    differences = segments - first.unsqueeze(2)
    shift = differences.mean(2)
    means, variances = first + shift, differences.square().mean(2) - shift * shift
    missing = 0, 0, 0, 0, 0, GROUPS - groups
    return only_numbers(*(pad(x, missing, value=math.nan) for x in (means, variances)))


def keys_looked_at(key: torch.Tensor, length: int | torch.Tensor, often: int = LOG_RUNS) -> torch.Tensor:
    """Whether keys of a segment of ``length``, so ``often`` halved, count, by their number in it."""
    size = RUN << often
    block = key // size
    return (block < length // size) & (key % size // RUN == run_of(block, often))


def only_numbers(means: torch.Tensor, variances: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both, with NaN where one of them is not finite."""
    is_finite = means.isfinite() & variances.isfinite()
    return torch.where(is_finite, means, math.nan), torch.where(is_finite, variances, math.nan)


def _robust_mean(means: torch.Tensor) -> torch.Tensor:
    """That of segments (b, segments, hk, d) that are numbers and not far from the others; 0 without any."""
    middle = _median_of_numbers(means)
    return (middle.squeeze(1) + _mean_where(means - middle, _counts(means))).nan_to_num()


def _counts(means: torch.Tensor) -> torch.Tensor:
    """Which segments are numbers and not far from the others."""
    distances = (means - _median_of_numbers(means)).abs()
    return distances <= OUTLYING * _median_of_numbers(distances)


def _mean_where(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """That of x over dimension 1 where it counts; 0 where nothing does."""
    return torch.where(counts, x, 0.0).sum(1) / counts.sum(1).clamp(min=1)


def _median_of_numbers(x: torch.Tensor) -> torch.Tensor:
    """The upper median of x over dimension 1, which stays, without its NaN; NaN if there is nothing else."""
    # torch.nanmedian would do it, but not under torch.use_deterministic_algorithms. NaN is sorted to the end.
    middle = (~x.isnan()).sum(1, keepdim=True) // 2
    return x.sort(1).values.gather(1, middle.clamp(max=x.shape[1] - 1))

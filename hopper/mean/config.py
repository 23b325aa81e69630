"""What the kernel of the mean of V is built from, and numbers of its rule, as data. Nothing here imports the DSL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from cute_kernels.problem import DENSE, DTYPES, LAYOUTS, SHORT_NAMES

FEWEST_GROUPS, GROUPS, GROUP_KEYS = 3, 16, 32
"""Fewest and most groups that the keys are cut into, and fewest keys of a group where there are more."""

OUTLYING = 16.0
"""Median distances from the median beyond which the mean of a group does not count."""

FEWEST_SAMPLED, MOST_SAMPLED = 512, 16384
"""Of so many keys the mean is that of a quarter: of fewer there would be few left, and of more it would have to be
closer."""

MOST_SAMPLED_IN_RUNS = 16384
"""Means of runs are those of a quarter up to so many keys in all."""

RUN, LOG_RUNS = 8, 2
"""Keys that are looked at one behind the other, and how often the keys are halved where that is a quarter of them."""

STEP_EXPONENT, CHANCE = -6, 3.0
"""A mean is a multiple of 2 to this exponent, in units of the power of two below the spread of its column, and at least
so many standard errors."""

E4M3_BITS = 4
"""Significant bits of e4m3. A vector that leaves so many of the first value of a column leaves it exact."""

MOST_LEFT, SMALL_FIRST, MOST_LEFT_OF_SMALL = 16.0, 2.0**-5, 128.0
"""How far that vector may be from the mean: the square of the distance, times the keys that were looked at, is below so
many variances, and below the last of these numbers where the first value is less than the second one of the mean."""

SMALL_FIRSTS, NEIGHBOURS, MOST_KEPT = 0.5, 32, 256.0
"""A column keeps its mean where the first values of so many neighbours, unless their mean is chance, are all below this
share of theirs, and the square of its mean, times the keys that were looked at, is below so many variances."""

FAR_VARIANCES = 32.0
"""A run of keys loses a mean of its own where the square of its distance from that of all, times its keys, is above so
many variances: five standard errors and more, and no less than a mean that is kept (``MOST_KEPT``) where there are
eight runs."""

APART_VARIANCES = 4.0
"""The same where some run of ``COLUMNS`` columns of a head is far away: two standard errors."""

FARTHEST = 2.0**126
"""And where that distance is less than this, so that what two means differ by is a number."""

MOST_PARTS = 4
"""Times so many columns that a head may have."""

COLUMNS = 64
"""Of a head, that are taken at once: 128 bytes of a row."""

GROUPS_AT_ONCE = 4
"""Groups of runs that are joined at once, with a thread for each column: CTAs of so few threads find room on an SM
beside those of the kernel in front."""

EDGES_AT_ONCE = 4
"""Between runs, whose differences of means a WGMMA adds to O: one for each lane of a row."""

WORDS_OF_EDGES = 2 * EDGES_AT_ONCE
"""That a column has of so many (``hopper.mean.edges``)."""

CHUNK = 8
"""Columns that a thread loads at once: 16 bytes."""

WARPS, WARP_THREADS = 8, 32
THREADS = WARPS * WARP_THREADS
CTAS_PER_SM = 4
"""As many as there are registers for."""

LANES_OF_ROW = COLUMNS // CHUNK
ROWS_OF_WARP = WARP_THREADS // LANES_OF_ROW
CLUSTERS = 1, 2, 8
ENOUGH_CTAS = 256
"""With so many CTAs every SM has some, and room for the quantizer beside them."""

ENOUGH_PAIRED_CTAS_OF_RUNS = 150
"""So many are enough where two share the keys of a run, unless it is sampled: with eight they come in two waves, and
each has few keys. Fewer still where it is sampled, since CTAs of the quantizer find room sooner (`fp8_paid_sums.json`).
"""

MAX_CTAS = 2**31 - 1


@dataclass(frozen=True)
class ValueMeanConfig:
    """Everything that is fixed when the kernel is compiled: the dtype of V, how many CTAs share the keys of some
    columns, how sequences lie, "dense" or "varlen", and whether it finds means and variances ``of_runs`` of keys."""

    dtype: str
    cluster: int
    layout: str = DENSE
    of_runs: bool = False

    @property
    def groups(self) -> int:
        """Of a CTA."""
        return GROUPS // self.cluster

    @property
    def warps_of_group(self) -> int:
        return max(WARPS // self.groups, 1)

    @property
    def groups_of_warp(self) -> int:
        return max(self.groups // WARPS, 1)

    @property
    def sums(self) -> int:
        """Of a CTA: each warp has one of each of its groups."""
        return WARPS * self.groups_of_warp

    @property
    def loads(self) -> int:
        """Rows that a thread has under way, as many as there are registers for, and of a short sequence."""
        return 8 if self.layout == DENSE and self.cluster > 1 else 4

    @property
    def smem_bytes(self) -> int:
        """Sums of warps, first rows of groups, and what the cluster sends."""
        return 4 * COLUMNS * (2 * self.sums + self.groups + 2 * GROUPS)

    @property
    def name(self) -> str:
        """Unique among kernels."""
        layout = "" if self.layout == DENSE else f"_{self.layout}"
        return f"hopper_value_mean_{SHORT_NAMES[self.dtype]}_c{self.cluster}{layout}{'_runs' * self.of_runs}"


@dataclass(frozen=True)
class RunMeansConfig:
    """The kernel that finds what runs of keys lose, by means and variances of theirs."""

    dtype: str

    @property
    def smem_bytes(self) -> int:
        """Groups of runs, what all lose, and whether a run does not."""
        return 4 * (COLUMNS * (2 * GROUPS + 1) + 1)

    @property
    def name(self) -> str:
        """Unique among kernels."""
        return f"hopper_run_means_{SHORT_NAMES[self.dtype]}"


def select_value_mean_config(
    dtype: str, sequences: int, kv_heads: int, head_dim_v: int, layout: str = DENSE, keys_of_runs: int = 0
) -> ValueMeanConfig:
    """The config for so many sequences, or runs of ``keys_of_runs`` keys in all: the fewest CTAs for some columns of a
    head that keep a GPU busy. Of runs whose keys are sampled two are enough."""
    alone = count_mean_ctas(sequences, kv_heads, head_dim_v, 1)
    enough = dict.fromkeys(CLUSTERS, ENOUGH_CTAS) | {2: _enough_paired_ctas(keys_of_runs)}
    cluster = next((cluster for cluster in CLUSTERS if alone * cluster >= enough[cluster]), CLUSTERS[-1])
    config = ValueMeanConfig(dtype, cluster, layout, of_runs=keys_of_runs > 0)
    validate_value_mean_config(config)
    return config


def _enough_paired_ctas(keys_of_runs: int) -> int:
    if not keys_of_runs:
        return ENOUGH_CTAS
    return 1 if are_sampled_in_runs(keys_of_runs) else ENOUGH_PAIRED_CTAS_OF_RUNS


def validate_value_mean_config(config: ValueMeanConfig) -> None:
    """Raise ValueError for a config that no kernel can be built from."""
    for name, allowed in (("dtype", DTYPES), ("cluster", CLUSTERS), ("layout", LAYOUTS)):
        value = getattr(config, name)
        if value not in allowed:
            raise ValueError(f"{name} is {value!r}, allowed: {', '.join(map(str, allowed))}")
    if config.of_runs and config.layout != DENSE:
        raise ValueError("of_runs is True, allowed for packed sequences: False")


def groups_of(
    keys: Any, least: Callable[[Any, Any], Any] = min, most: Callable[[Any, Any], Any] = max
) -> tuple[Any, Any]:
    """How many groups ``keys`` keys, one or more, are cut into, and the keys of each. What is left over is behind the
    last group and does not count. ``least`` and ``most`` of two numbers are the DSL's where a kernel asks."""
    groups = least(least(most(keys // GROUP_KEYS, FEWEST_GROUPS), GROUPS), keys)
    return groups, keys // groups


def is_sampled(keys: Any) -> Any:
    """Whether the mean of so many keys is that of a quarter of them."""
    return (keys >= FEWEST_SAMPLED) & (keys <= MOST_SAMPLED)


def halvings(keys: Any, number: Callable[[Any], Any] = int) -> Any:
    """How often the keys are halved, until as many are left as are looked at. ``number`` makes one of a condition."""
    return LOG_RUNS * number(is_sampled(keys))


def halvings_of_run(run: Any, keys: Any, number: Callable[[Any], Any] = int) -> Any:
    """The same of a run of so many keys, of ``keys`` in all."""
    return number(run >= FEWEST_SAMPLED) * (LOG_RUNS * number(are_sampled_in_runs(keys)))


def are_sampled_in_runs(keys: Any) -> Any:
    """Whether means of runs of so many keys in all are those of a quarter, but for short runs."""
    return keys <= MOST_SAMPLED_IN_RUNS


def sample_size(length: Any, often: Any = LOG_RUNS) -> Any:
    """Keys that are looked at in a group of ``length``, one time or more halved."""
    return (length >> often) // RUN * RUN


def run_of(block: Any, often: Any = LOG_RUNS) -> Any:
    """Which run is looked at, of those of a block: another one in the next block, so that what comes back every so many
    keys is not met again and again."""
    return (block + (block >> 2) + (block >> 4)) & ((1 << often) - 1)


def count_mean_ctas(sequences: int, kv_heads: int, head_dim_v: int, cluster: int) -> int:
    """CTAs of a launch."""
    return sequences * kv_heads * -(-head_dim_v // COLUMNS) * cluster


def sorting_pairs(count: int) -> Iterator[tuple[int, int]]:
    """Places whose values are put into order, one pair behind the other, until all ``count``, a power of two, are in
    order: Batcher's odd-even merge sort."""
    size = 1
    while size < count:
        distance = size
        while distance:
            for first in range(distance % size, count - distance, 2 * distance):
                for low in range(first, min(first + distance, count - distance)):
                    if low // (2 * size) == (low + distance) // (2 * size):
                        yield low, low + distance
            distance //= 2
        size *= 2


def shipped_value_mean_configs() -> tuple[ValueMeanConfig, ...]:
    """Every config that ``select_value_mean_config`` can return."""
    return tuple(ValueMeanConfig(*fields) for fields in product(DTYPES, CLUSTERS, LAYOUTS))


def shipped_run_means_configs() -> tuple[ValueMeanConfig | RunMeansConfig, ...]:
    """Every config for means of runs."""
    statistics = (ValueMeanConfig(*fields, of_runs=True) for fields in product(DTYPES, CLUSTERS))
    return *statistics, *map(RunMeansConfig, DTYPES)

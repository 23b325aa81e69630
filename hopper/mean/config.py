"""What the kernel of the mean of V is built from, and numbers of its rule, as data. Nothing here imports the DSL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cute_kernels.integers import maximum, minimum
from cute_kernels.problem import DTYPES, SHORT_NAMES

FEWEST_GROUPS, GROUPS, GROUP_KEYS = 3, 32, 32
"""Fewest and most groups that the keys are cut into, and fewest keys of a group where there are more."""

OUTLYING = 16.0
"""Median distances from the median beyond which the mean of a group does not count."""

STEP_EXPONENT, CHANCE = -6, 4.0
"""A mean is a multiple of 2 to this exponent, in units of the power of two below the spread of its column, and at least
so many standard errors."""

CLUSTER = 8
"""CTAs that share the keys of a part of a head."""

COLUMNS = 64
"""Of that part: 128 bytes of a row, which are read at once."""

CHUNK = 8
"""Columns that a thread loads at once: 16 bytes."""

WARPS, WARP_THREADS = 16, 32
THREADS = WARPS * WARP_THREADS
CTAS_PER_SM = 2

GROUPS_OF_CTA = GROUPS // CLUSTER
WARPS_OF_GROUP = WARPS // GROUPS_OF_CTA

COLUMNS_OF_CTA = COLUMNS // CLUSTER
"""Whose mean a CTA finds, once all CTAs have sent it what their keys say: a warp each."""

LANES_OF_ROW = COLUMNS // CHUNK
ROWS_OF_WARP = WARP_THREADS // LANES_OF_ROW
ROWS_OF_GROUP = ROWS_OF_WARP * WARPS_OF_GROUP
"""Rows of a group that its warps load at once."""

LOADS = 4
"""Rows that a thread has under way."""

MAX_CTAS = 2**31 - 1


@dataclass(frozen=True)
class ValueMeanConfig:
    """Everything that is fixed when the kernel is compiled: the dtype of V."""

    dtype: str

    @property
    def smem_bytes(self) -> int:
        """Sums of warps, first rows of groups, and what the cluster sends."""
        return 4 * (2 * WARPS * COLUMNS + GROUPS_OF_CTA * COLUMNS + 2 * GROUPS * COLUMNS_OF_CTA)

    @property
    def name(self) -> str:
        """Unique among kernels."""
        return f"hopper_value_mean_{SHORT_NAMES[self.dtype]}"


def validate_value_mean_config(config: ValueMeanConfig) -> None:
    """Raise ValueError for a config that no kernel can be built from."""
    if config.dtype not in DTYPES:
        raise ValueError(f"dtype is {config.dtype!r}, allowed: {', '.join(DTYPES)}")


def groups_of(keys: Any) -> tuple[Any, Any]:
    """How many groups ``keys`` keys, one or more, are cut into, and the keys of each. What is left over is behind the
    last group and does not count."""
    groups = minimum(minimum(maximum(keys // GROUP_KEYS, FEWEST_GROUPS), GROUPS), keys)
    return groups, keys // groups


def count_mean_ctas(batch: int, kv_heads: int, head_dim_v: int) -> int:
    """CTAs of a launch."""
    return batch * kv_heads * -(-head_dim_v // COLUMNS) * CLUSTER


def shipped_value_mean_configs() -> tuple[ValueMeanConfig, ...]:
    """One for each dtype."""
    return tuple(map(ValueMeanConfig, DTYPES))

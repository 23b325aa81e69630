"""What a kernel that merges partial results of attention is built from, as data. Nothing here imports the DSL."""

from __future__ import annotations

from dataclasses import dataclass

from cute_kernels.problem import DTYPES, SHORT_NAMES

MAX_SPLITS = 256
VECTOR = 4
"""Columns of a lane, 16 bytes of float32."""

LANES, WARPS = 32, 4
COLUMNS = VECTOR * LANES
"""Of a row, that a warp merges."""

OUT_DTYPES = (*DTYPES, "float32")
WAYS = (1, WARPS)

FIRST_WITH_EARLY_STARTS = 90
"""Compute capability of the first GPUs on which a kernel may start early, times 10."""

FEW_SPLITS = 8
"""What a warp reads at once."""


@dataclass(frozen=True)
class CombineConfig:
    """Everything that is fixed when the kernel is compiled.

    ``dtype`` is that of the result. ``ways`` warps share the splits of a row, each of all its columns up to COLUMNS.
    """

    arch: str
    dtype: str
    ways: int

    @property
    def starts_early(self) -> bool:
        """Whether CTAs may start before the kernel in front of this one has ended (programmatic dependent launch)."""
        return int(self.arch.removeprefix("sm_").rstrip("af")) >= FIRST_WITH_EARLY_STARTS

    @property
    def smem_bytes(self) -> int:
        """The shares of the splits, and what the ways of a row have."""
        return 4 * WARPS * (shares_of(self.ways) + COLUMNS)

    @property
    def name(self) -> str:
        """Unique among kernels."""
        return f"combine_{self.arch}_{(SHORT_NAMES | {'float32': 'fp32'})[self.dtype]}_w{self.ways}"


def shares_of(ways: int) -> int:
    """Splits that a warp has a share of, in memory: a whole number of what the ways of a row read at once."""
    return MAX_SPLITS + FEW_SPLITS * ways


def select_combine_config(dtype: str, num_splits: int, arch: str) -> CombineConfig:
    """The config for results of ``dtype``.

    Raises:
        ValueError: there is none.
    """
    if not 1 <= num_splits <= MAX_SPLITS:
        raise ValueError(f"num_splits is {num_splits}, allowed: 1 to {MAX_SPLITS}")
    config = CombineConfig(arch, dtype, 1 if num_splits <= FEW_SPLITS else WARPS)
    validate_combine_config(config)
    return config


def validate_combine_config(config: CombineConfig) -> None:
    """Raise ValueError for a config that no kernel can be built from."""
    if config.dtype not in OUT_DTYPES:
        raise ValueError(f"dtype is {config.dtype!r}, allowed: {', '.join(map(repr, OUT_DTYPES))}")
    if config.ways not in WAYS:
        raise ValueError(f"ways is {config.ways}, allowed: {' or '.join(map(str, WAYS))}")

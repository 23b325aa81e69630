"""What a kernel that adds a partial result to a sum of such is built from, as data. Nothing here imports the DSL."""

from __future__ import annotations

from dataclasses import dataclass

from cute_kernels.problem import DTYPES, SHORT_NAMES

VECTOR = 4
"""Columns of a lane: 16 bytes of float32, 8 of 16 bits."""

LANES, WARPS = 32, 4
COLUMNS = VECTOR * LANES
"""That a warp does at a time, of the row that it has."""


@dataclass(frozen=True)
class MergeConfig:
    """Everything that is fixed when the kernel is compiled. ``dtype`` is that of the part, and of the sum too where it
    is not ``sums_in_float32``."""

    arch: str
    dtype: str
    sums_in_float32: bool = True

    @property
    def smem_bytes(self) -> int:
        """None."""
        return 0

    @property
    def name(self) -> str:
        """Unique among kernels."""
        suffix = "" if self.sums_in_float32 else "_rounded"
        return f"merge_{self.arch}_{SHORT_NAMES[self.dtype]}{suffix}"


def validate_merge_config(config: MergeConfig) -> None:
    """Raise ValueError for a config that no kernel can be built from."""
    if config.dtype not in DTYPES:
        raise ValueError(f"dtype is {config.dtype!r}, allowed: {', '.join(map(repr, DTYPES))}")

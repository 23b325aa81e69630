"""What a kernel that adds a partial result to a sum of such is built from, as data. Nothing here imports the DSL."""

from __future__ import annotations

from dataclasses import dataclass

from cute_kernels.problem import DTYPES, SHORT_NAMES

VECTOR = 4
"""Columns of a lane, 16 bytes of float32."""

LANES, WARPS = 32, 4
COLUMNS = VECTOR * LANES
"""That a warp does at a time, of the row that it has."""


@dataclass(frozen=True)
class MergeConfig:
    """Everything that is fixed when the kernel is compiled. ``dtype`` is that of the part."""

    arch: str
    dtype: str

    @property
    def smem_bytes(self) -> int:
        """None."""
        return 0

    @property
    def name(self) -> str:
        """Unique among kernels."""
        return f"merge_{self.arch}_{SHORT_NAMES[self.dtype]}"


def validate_merge_config(config: MergeConfig) -> None:
    """Raise ValueError for a config that no kernel can be built from."""
    if config.dtype not in DTYPES:
        raise ValueError(f"dtype is {config.dtype!r}, allowed: {', '.join(map(repr, DTYPES))}")

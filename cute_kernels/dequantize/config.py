"""What a kernel that copies a cache of e4m3 to 16 bits is built from, as data. Nothing here imports the DSL."""

from __future__ import annotations

from dataclasses import dataclass

from cute_kernels.append.config import ARCHS_WITHOUT_E4M3
from cute_kernels.problem import DTYPES, SHORT_NAMES

VECTOR = 8
"""Columns of a lane: 8 bytes of e4m3, which become 16, so that a warp writes whole sectors."""

LANES, WARPS = 32, 4

AT_A_TIME = 2
"""Vectors of K, and of V, that a lane has under way together."""

CTAS = 924
"""Of a launch, or a little more: as many as an H200 holds at a time, 7 an SM."""


@dataclass(frozen=True)
class DequantizeConfig:
    """Everything that is fixed when the kernel is compiled. ``dtype`` is that of the copies. With ``row_scales`` each
    row of the cache has a scale, else each sequence."""

    arch: str
    dtype: str
    row_scales: bool = False

    @property
    def smem_bytes(self) -> int:
        """None."""
        return 0

    @property
    def name(self) -> str:
        """Unique among kernels."""
        suffix = "_rowscales" if self.row_scales else ""
        return f"dequantize_{self.arch}_{SHORT_NAMES[self.dtype]}{suffix}"


def validate_dequantize_config(config: DequantizeConfig) -> None:
    """Raise ValueError for a config that no kernel can be built from, NotImplementedError for its GPU."""
    if config.dtype not in DTYPES:
        raise ValueError(f"dtype is {config.dtype!r}, allowed: {', '.join(map(repr, DTYPES))}")
    if config.arch in ARCHS_WITHOUT_E4M3:
        raise NotImplementedError(f"arch is {config.arch}, which has no instructions for e4m3")

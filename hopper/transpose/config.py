"""What the kernel that transposes V is built from, as data. Nothing here imports the DSL."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cute_kernels.problem import DENSE, VARLEN
from hopper.quantize.config import HEAD_DIM_STEP, TransposeTiling

KEYS = 128
"""Of a tile."""

THREADS = 128
CTAS_PER_SM = 8
"""That there are registers for; as many tiles are on their way at a time."""

TILE_COLUMNS = (128, 64, 32, 16)


@dataclass(frozen=True)
class TransposeConfig:
    """Everything that is fixed when the kernel is compiled: a tile is KEYS keys of ``columns`` columns of V. ``layout``
    is ``DENSE``, or ``VARLEN`` for packed sequences."""

    columns: int
    layout: str = DENSE

    @property
    def tiling(self) -> TransposeTiling:
        """Where its bytes lie in shared memory."""
        return TransposeTiling(self.columns, KEYS)

    @property
    def smem_bytes(self) -> int:
        return self.tiling.size

    @property
    def name(self) -> str:
        """Unique among kernels."""
        name = f"hopper_transpose_k{KEYS}c{self.columns}"
        return name if self.layout == DENSE else f"{name}_{self.layout}"


def select_transpose_config(head_dim_v: int, layout: str = DENSE) -> TransposeConfig:
    """The config for values of ``head_dim_v`` columns: the widest tiles that divide them.

    Raises:
        ValueError: there is none.
    """
    config = TransposeConfig(math.gcd(head_dim_v, TILE_COLUMNS[0]), layout)
    validate_transpose_config(config)
    return config


def validate_transpose_config(config: TransposeConfig) -> None:
    """Raise ValueError for a config that no kernel can be built from."""
    if config.columns not in TILE_COLUMNS:
        raise ValueError(
            f"columns is {config.columns}, allowed: {', '.join(map(str, TILE_COLUMNS))}; head_dim_v must be a multiple "
            f"of {HEAD_DIM_STEP}"
        )
    if config.layout not in (DENSE, VARLEN):
        raise ValueError(f"layout is {config.layout!r}, allowed: {DENSE!r}, {VARLEN!r}")


def shipped_transpose_configs() -> tuple[TransposeConfig, ...]:
    """Every config that ``select_transpose_config`` can return."""
    return tuple(TransposeConfig(columns, layout) for layout in (DENSE, VARLEN) for columns in TILE_COLUMNS)

"""What the kernel for wide values is built from, and which problems it serves. Imports nothing of the DSL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cute_kernels.problem import DENSE, DTYPES, LAYOUTS, SCORE_FEATURES, SHORT_NAMES
from hopper.config import (
    BARRIER_BYTES,
    SMEM_BYTES,
    TWO_CONSUMERS,
    WARPGROUP_ROWS,
    WARPGROUP_THREADS,
    Registers,
)

HEAD_DIM, HEAD_DIM_V = 64, 512
"""Columns of the kernel's Q and K, and of V and QV: the most that it takes."""

CONSUMERS = 2
"""Consumer warpgroups, each with half of the columns of O."""

ROW_FACTOR_BYTES = WARPGROUP_ROWS * 4
"""Of a float32 for each row, with which one warpgroup tells the other how to scale O."""


@dataclass(frozen=True)
class WideForwardConfig:
    """Everything that is fixed when the kernel for wide values is compiled.

    ``qv``: there is a second query, whose products with V join the scores. ``window``, ``layout``, ``softcap``,
    ``alibi`` and ``sinks`` are as in ``ForwardConfig``. A tile is of 64 queries, and a key block of ``tile_n`` keys.
    """

    dtype: str
    causal: bool
    qv: bool
    tile_n: int = 64
    stages: int = 2
    registers: Registers = TWO_CONSUMERS
    window: bool = False
    layout: str = DENSE
    softcap: bool = False
    alibi: bool = False
    sinks: bool = False

    head_dim = HEAD_DIM
    head_dim_v = HEAD_DIM_V
    tile_m = WARPGROUP_ROWS
    consumers = CONSUMERS
    ctas_per_sm = 1
    element_bytes = 2

    @property
    def threads(self) -> int:
        return WARPGROUP_THREADS * (CONSUMERS + 1)

    @property
    def half(self) -> int:
        """Columns of O, and of V, of one consumer warpgroup."""
        return HEAD_DIM_V // CONSUMERS

    @property
    def changes_scores(self) -> bool:
        return self.softcap or self.alibi or self.sinks

    @property
    def out_dtype(self) -> str:
        return self.dtype

    @property
    def smem_bytes(self) -> int:
        """Q, QV or O in its place, K and V of each stage, P and the row factors."""
        rows = WARPGROUP_ROWS * (HEAD_DIM + HEAD_DIM_V + self.tile_n)
        keys = self.stages * self.tile_n * (HEAD_DIM + HEAD_DIM_V)
        return (rows + keys) * self.element_bytes + ROW_FACTOR_BYTES + BARRIER_BYTES

    @property
    def name(self) -> str:
        """Short unique name: kernel entry in profilers, file stem in the compile cache."""
        parts = ["hopper_wide", SHORT_NAMES[self.dtype], f"d{HEAD_DIM}v{HEAD_DIM_V}"]
        parts += ["qv"] if self.qv else []
        parts += ["causal" if self.causal else "full", f"m{self.tile_m}n{self.tile_n}s{self.stages}"]
        parts += [f"r{self.registers.consumer}_{self.registers.producer}"]
        parts += ["window"] if self.window else []
        parts += [] if self.layout == DENSE else [self.layout]
        parts += [name for name in SCORE_FEATURES if getattr(self, name)]
        return "_".join(parts)


def validate_wide_config(config: WideForwardConfig) -> None:
    """Raise ValueError naming the first field that no kernel can be built from."""
    c = config
    if c.dtype not in DTYPES:
        raise ValueError(f"dtype is {c.dtype!r}, allowed: {', '.join(DTYPES)}")
    if c.layout not in LAYOUTS:
        raise ValueError(f"layout is {c.layout!r}, allowed: {', '.join(LAYOUTS)}")
    if c.tile_n % 16 or not 16 <= c.tile_n <= 64:
        raise ValueError(f"tile_n is {c.tile_n}, allowed: multiples of 16 from 16 to 64")
    if c.stages < 2:
        raise ValueError(f"stages is {c.stages}, allowed: 2 or more")
    if c.registers != TWO_CONSUMERS:
        raise ValueError(f"registers are {c.registers}, allowed: {TWO_CONSUMERS}")
    if c.smem_bytes > SMEM_BYTES:
        raise ValueError(f"the tiles need {c.smem_bytes} bytes of shared memory, allowed: {SMEM_BYTES}")


def why_not_wide(head_dim: int, head_dim_v: int) -> str:
    """What keeps the kernel from a problem of these sizes; empty if nothing does."""
    if head_dim > HEAD_DIM:
        return f"head_dim is {head_dim}, and the Hopper kernel with qv takes at most {HEAD_DIM}"
    if head_dim_v > HEAD_DIM_V:
        return f"head_dim_v is {head_dim_v}, and the Hopper kernel with qv takes at most {HEAD_DIM_V}"
    return ""


def select_wide_config(
    dtype: str, causal: bool, qv: bool, window: bool = False, layout: str = DENSE, **scores: Any
) -> WideForwardConfig:
    """The config for these; narrower rows are filled with zeros by TMA. ``scores`` are fields of that kind."""
    config = WideForwardConfig(dtype, causal, qv, window=window, layout=layout, **scores)
    validate_wide_config(config)
    return config

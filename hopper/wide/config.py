"""What the kernel for wide values is built from, and which problems it serves. Imports nothing of the DSL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cute_kernels.problem import (
    DENSE,
    SHORT_NAMES,
    check_kind,
    feature_names,
)
from hopper.config import (
    BARRIER_BYTES,
    SMEM_BYTES,
    WARPGROUP_ROWS,
    WARPGROUP_THREADS,
    Registers,
)

HEAD_DIM = 64
"""Columns of the kernel's Q and K: the most that it takes."""

STAGES = {256: 4, 512: 2}
"""Columns of V and QV that there are kernels for, and with each the key blocks that are in shared memory at a time."""

CLUSTER = 2
"""CTAs that load their keys for each other: each loads half, so that L2 gives every key once to both."""

CONSUMERS = 2
"""Consumer warpgroups, each with half of the columns of O."""

REGISTERS = Registers(consumer=232, producer=40)
"""The producer keeps more than that of other kernels, QV and both halves of V: with packed sequences 24 registers do
not do."""

ROW_FACTOR_BYTES = WARPGROUP_ROWS * 4
"""Shared memory for a float32 a row, with which one warpgroup tells the other how to scale O; there are two of it."""


@dataclass(frozen=True)
class WideForwardConfig:
    """Everything that is fixed when the kernel for wide values is compiled.

    ``qv``: there is a second query, whose products with V join the scores. ``window``, ``chunk``, ``layout``,
    ``softcap``, ``alibi`` and ``sinks`` are as in ``ForwardConfig``. A CTA has 64 queries at a time, and visits
    ``tile_n`` keys at a time. A tile is the 64 * ``cluster`` neighbouring queries of a cluster, of whose keys each CTA
    loads a part for all.
    """

    dtype: str
    causal: bool
    qv: bool
    head_dim_v: int = 512
    tile_n: int = 64
    stages: int = 2
    cluster: int = CLUSTER
    registers: Registers = REGISTERS
    window: bool = False
    chunk: bool = False
    layout: str = DENSE
    softcap: bool = False
    alibi: bool = False
    sinks: bool = False

    head_dim = HEAD_DIM
    dropout = False
    counts_from_end = False
    stores_first_apart = False
    few_keys = 0
    consumers = CONSUMERS
    ctas_per_sm = 1
    element_bytes = 2

    @property
    def tile_m(self) -> int:
        return WARPGROUP_ROWS * self.cluster

    @property
    def group(self) -> int:
        """Heads in the rows of a tile, as in ``ForwardConfig``."""
        return 1

    @property
    def tile_queries(self) -> int:
        return self.tile_m

    @property
    def threads(self) -> int:
        return WARPGROUP_THREADS * (CONSUMERS + 1)

    @property
    def half(self) -> int:
        """Columns of O, and of V, of one consumer warpgroup."""
        return self.head_dim_v // CONSUMERS

    @property
    def changes_scores(self) -> bool:
        return self.softcap or self.alibi or self.sinks

    @property
    def out_dtype(self) -> str:
        return self.dtype

    @property
    def smem_bytes(self) -> int:
        """Q, QV, K and V of each stage (or O in the place of one), P, the row factors and the barriers."""
        rows = WARPGROUP_ROWS * (HEAD_DIM + self.qv * self.head_dim_v + self.tile_n)
        keys = self.stages * self.tile_n * (HEAD_DIM + self.head_dim_v)
        return (rows + keys) * self.element_bytes + 2 * ROW_FACTOR_BYTES + BARRIER_BYTES

    @property
    def name(self) -> str:
        """Short unique name: kernel entry in profilers, file stem in the compile cache."""
        parts = ["hopper_wide", SHORT_NAMES[self.dtype], f"d{HEAD_DIM}v{self.head_dim_v}"]
        parts += ["qv"] if self.qv else []
        parts += ["causal" if self.causal else "full", f"m{self.tile_m}n{self.tile_n}s{self.stages}"]
        parts += [f"r{self.registers.consumer}_{self.registers.producer}"]
        parts += [f"c{self.cluster}"] if self.cluster > 1 else []
        return "_".join(parts + feature_names(self))


def validate_wide_config(config: WideForwardConfig) -> None:
    """Raise ValueError naming the first field that no kernel can be built from."""
    c = config
    check_kind(c)
    if c.head_dim_v not in STAGES:
        raise ValueError(f"head_dim_v is {c.head_dim_v}, allowed: {', '.join(map(str, STAGES))}")
    if c.tile_n != WARPGROUP_ROWS:
        raise ValueError(
            f"tile_n is {c.tile_n}, allowed: {WARPGROUP_ROWS}, as O is staged in a block's place"
        )
    if c.cluster not in (1, 2):
        raise ValueError(f"cluster is {c.cluster}, allowed: 1 or 2")
    if c.stages < 2:
        raise ValueError(f"stages is {c.stages}, allowed: 2 or more")
    if c.registers != REGISTERS:
        raise ValueError(f"registers are {c.registers}, allowed: {REGISTERS}")
    if c.smem_bytes > SMEM_BYTES:
        raise ValueError(f"the tiles need {c.smem_bytes} bytes of shared memory, allowed: {SMEM_BYTES}")


def why_not_wide(head_dim: int, head_dim_v: int) -> str:
    """Why these kernels do not take a problem of these sizes; empty if they do."""
    for name, size, most in (("head_dim", head_dim, HEAD_DIM), ("head_dim_v", head_dim_v, max(STAGES))):
        if size > most:
            return f"{name} is {size}, and the Hopper kernel with qv takes at most {most}"
    return ""


def select_wide_config(
    dtype: str,
    head_dim_v: int,
    causal: bool,
    qv: bool,
    window: bool = False,
    layout: str = DENSE,
    **others: Any,
) -> WideForwardConfig:
    """The config for a problem with head_dim of at most 64, the narrowest that covers ``head_dim_v``: TMA fills rows
    with zeros. ``others`` are further fields."""
    columns = min(size for size in STAGES if size >= head_dim_v)
    stages = STAGES[columns]
    config = WideForwardConfig(
        dtype, causal, qv, columns, stages=stages, window=window, layout=layout, **others
    )
    validate_wide_config(config)
    return config

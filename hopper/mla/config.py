"""What the kernel for decoding over a latent is built from, and which problems it serves. Imports nothing of the
DSL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cute_kernels.problem import DENSE, SHORT_NAMES, check_kind
from hopper.config import BARRIER_BYTES, SMEM_BYTES, WARPGROUP_ROWS, WARPGROUP_THREADS, Registers
from hopper.decode.config import BOX_ROWS, box_rows_of

HEAD_DIM = 64
"""Columns of the kernel's Q and K: the most that it takes."""

STAGES = {256: 4, 512: 2}
"""Columns of V and QV that there are kernels for, and with each the key blocks that are in shared memory at a time."""

TILE_N = 64
"""Keys of a block."""

CONSUMERS = 2
"""Consumer warpgroups, each with half of the columns of O."""

CLUSTER = 2
"""CTAs that share the keys of a tile, where it has more rows than one CTA."""

SHORT_ROWS = WARPGROUP_ROWS // 2
"""Rows of the smaller tile."""

REGISTERS = Registers(consumer=248, producer=40)
"""Of a thread, by role; the consumer is that of the scores."""

VALUES_REGISTERS = 216
"""Of the other consumer, which has no scores."""

OUTPUT_ROWS = 16
"""Of a box of O, which a warp stores by itself."""

QUERY_BOXES = (64, 16)
"""Rows that a box of Q can have, the most first: multiples of OUTPUT_ROWS."""

ROW_FACTOR_BYTES = WARPGROUP_ROWS * 4
"""Shared memory for a float32 a row, with which one warpgroup tells the other how to scale O."""


@dataclass(frozen=True)
class MlaConfig:
    """Everything that is fixed when the kernel is compiled.

    A tile is ``tile_m`` rows of a K/V head: the query heads of its group, of one token after another. Each of
    ``cluster`` CTAs has ``cta_rows`` of them, 64, or 32 in the upper half of each warp's 16 rows of a WGMMA. A block of
    ``tile_n`` keys comes in boxes of ``box_rows`` keys, each of one page, of which every CTA loads a part for all. With
    ``holds_values`` P V of the second half of the columns waits for the scores of the next block, so that the tensor
    cores have work while the softmax runs; without it V is given back sooner. Q comes and O goes by TMA where
    ``query_box`` rows, which are heads of one token, are a box of Q; with 0 threads copy them. The other fields are as
    in ``DecodeConfig``.
    """

    dtype: str
    head_dim_v: int
    causal: bool
    box_rows: int
    tile_n: int = TILE_N
    stages: int = 2
    cta_rows: int = WARPGROUP_ROWS
    cluster: int = 1
    holds_values: bool = False
    window: bool = False
    chunk: bool = False
    layout: str = DENSE
    paged: bool = True
    leftpad: bool = False
    limits_splits: bool = False
    softcap: bool = False
    sinks: bool = False
    query_box: int = 0

    head_dim = HEAD_DIM
    qv = True
    element_bytes = 2
    raw_stages = 0
    """The cache is not widened: nothing but its own stages."""

    @property
    def tile_m(self) -> int:
        return self.cta_rows * self.cluster

    @property
    def parts(self) -> tuple[int, ...]:
        """Columns of V that come, and are given back, by themselves. The first are of the scores' warpgroup, the others
        of the other one."""
        return (self.head_dim_v // CONSUMERS,) * CONSUMERS

    @property
    def half(self) -> int:
        """Columns of O of the scores' warpgroup."""
        return self.parts[0]

    @property
    def threads(self) -> int:
        return (CONSUMERS + 1) * WARPGROUP_THREADS

    @property
    def rows_per_thread(self) -> int:
        """Rows of a tile of which a thread of a consumer has a part."""
        return 2 * self.cta_rows // WARPGROUP_ROWS

    @property
    def boxes(self) -> int:
        """Of the keys of a block."""
        return self.tile_n // self.box_rows

    @property
    def smem_bytes(self) -> int:
        """Q and QV, K and V of each stage, P, two factors a row and the barriers."""
        rows = WARPGROUP_ROWS * (HEAD_DIM + self.head_dim_v + self.tile_n)
        keys = self.stages * self.tile_n * (HEAD_DIM + self.head_dim_v)
        return (rows + keys) * self.element_bytes + 2 * ROW_FACTOR_BYTES + BARRIER_BYTES

    @property
    def part_floats(self) -> int:
        """float32 of a partial result: O, and four numbers a row."""
        return self.tile_m * (self.head_dim_v + 4)

    @property
    def name(self) -> str:
        """Short unique name: kernel entry in profilers, file stem in the compile cache."""
        parts = ["hopper_mla", SHORT_NAMES[self.dtype], f"v{self.head_dim_v}"]
        parts += [
            "causal" if self.causal else "full",
            f"m{self.cta_rows}n{self.tile_n}s{self.stages}b{self.box_rows}",
        ]
        parts += [f"c{self.cluster}"] if self.cluster > 1 else []
        parts += ["held"] if self.holds_values else []
        parts += [f"q{self.query_box}"] if self.query_box else []
        parts += ["paged"] if self.paged else []
        parts += ["splits"] if self.limits_splits else []
        parts += [] if self.layout == DENSE else [self.layout]
        parts += [name for name in ("window", "chunk", "leftpad", "softcap", "sinks") if getattr(self, name)]
        return "_".join(parts)


def validate_mla_config(config: MlaConfig) -> None:
    """Raise ValueError naming the first field that no kernel can be built from."""
    c = config
    check_kind(c)
    if c.head_dim_v not in STAGES:
        raise ValueError(f"head_dim_v is {c.head_dim_v}, allowed: {', '.join(map(str, STAGES))}")
    if c.tile_n not in (32, 64):
        raise ValueError(f"tile_n is {c.tile_n}, allowed: 32 or 64")
    if c.cluster not in (1, CLUSTER):
        raise ValueError(f"cluster is {c.cluster}, allowed: 1 or {CLUSTER}")
    if c.cta_rows not in (SHORT_ROWS, WARPGROUP_ROWS):
        raise ValueError(f"cta_rows is {c.cta_rows}, allowed: {SHORT_ROWS} or {WARPGROUP_ROWS}")
    if c.box_rows not in BOX_ROWS or c.tile_n % (c.box_rows * c.cluster):
        raise ValueError(
            f"box_rows is {c.box_rows}, allowed: one of {BOX_ROWS} that divides a CTA's part of tile_n {c.tile_n}"
        )
    if c.query_box not in (0, *QUERY_BOXES) or (
        c.query_box and not takes_boxes(c.cta_rows, c.tile_n, c.layout)
    ):
        raise ValueError(
            f"query_box is {c.query_box}, allowed: 0, and with dense tiles of 64 rows and keys {QUERY_BOXES}"
        )
    if c.stages < 2:
        raise ValueError(f"stages is {c.stages}, allowed: 2 or more")
    if c.smem_bytes > SMEM_BYTES:
        raise ValueError(f"the tiles need {c.smem_bytes} bytes of shared memory, allowed: {SMEM_BYTES}")


def takes_boxes(cta_rows: int, tile_n: int, layout: str) -> bool:
    """Whether TMA can bring Q and take O: their rows are as many as those of V, in whose place O is staged."""
    return cta_rows == tile_n == WARPGROUP_ROWS and layout == DENSE


def query_box_of(group: int, rows: int, layout: str) -> int:
    """The most rows of a box of Q, with ``group`` query heads a K/V head and so many query rows; 0 if there is none."""
    if rows <= SHORT_ROWS or not takes_boxes(WARPGROUP_ROWS, TILE_N, layout):
        return 0
    return next((box for box in QUERY_BOXES if group % box == 0), 0)


def cluster_of(rows: int) -> int:
    """CTAs of a tile, for so many query rows that share a K/V head."""
    return CLUSTER if rows > WARPGROUP_ROWS else 1


def holds_values(columns: int, rows: int) -> bool:
    """Whether P V of the second half waits for the scores of the next block, with so many columns of V and rows that
    share a K/V head: from 33 rows on. Fewer columns with one CTA were not timed, and do without."""
    return cluster_of(rows) > 1 or (rows > SHORT_ROWS and columns == max(STAGES))


def box_rows_for(page_size: int, pages: int, rows: int) -> int | None:
    """The most rows that a box can have, for ``pages`` of ``page_size`` keys a sequence and so many query rows; None
    if there is no box."""
    return box_rows_of(TILE_N // cluster_of(rows), page_size, pages)


def select_mla_config(
    dtype: str,
    head_dim_v: int,
    causal: bool,
    page_size: int,
    pages: int,
    rows: int,
    group: int = 1,
    layout: str = DENSE,
    **others: Any,
) -> MlaConfig | None:
    """The config for a problem with head_dim of at most 64, the narrowest that covers ``head_dim_v``; None if pages are
    too small for TMA.

    Args:
        page_size, pages: rows of a page, and pages of a sequence.
        rows: query rows that share a K/V head.
        group: query heads that do.
        others: further fields.
    """
    box_rows = box_rows_for(page_size, pages, rows)
    if box_rows is None:
        return None
    columns = min(size for size in STAGES if size >= head_dim_v)
    cta_rows = SHORT_ROWS if rows <= SHORT_ROWS else WARPGROUP_ROWS
    config = MlaConfig(
        dtype,
        columns,
        causal,
        box_rows,
        stages=STAGES[columns],
        cta_rows=cta_rows,
        cluster=cluster_of(rows),
        holds_values=holds_values(columns, rows),
        layout=layout,
        query_box=query_box_of(group, rows, layout),
        **others,
    )
    validate_mla_config(config)
    return config

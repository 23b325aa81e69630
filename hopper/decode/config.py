"""What the decode kernel is built from, and which problems it serves. Imports nothing of the DSL."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from cute_kernels.problem import DENSE, SHORT_NAMES, check_kind
from hopper.config import BARRIER_BYTES, SMEM_BYTES, WARPGROUP_ROWS, WARPGROUP_THREADS

WARP_THREADS = 32

E4M3 = "float8_e4m3fn"

REGISTERS_WIDENED = {"consumer": 240, "widener": 104, "producer": 40}
"""Of a thread, by role, where two warpgroups widen the cache."""

REGISTERS_PAIRED = {"consumer": 232, "producer": 40}
"""The same where two consumers share the keys."""

PRODUCER_WARPS = 2
"""One for K, one for V."""

BOX_COLUMNS = 64
"""16-bit columns that one box of TMA has: a swizzled row of 128 bytes."""

ROWS_PER_GROUP = 4
"""Query rows that four lanes have of 8 columns of an accumulator, where each is split into two columns."""

SWAPPED_TILE_M = (4, 8, 16)
"""Rows of a tile where these are the columns of a WGMMA."""

BOX_ROWS = (128, 64, 32, 16, 8)
"""Keys that a box may have: what a page holds is a multiple of it. Below 8 rows a box is no swizzled unit."""

HEAD_DIMS = (64, 128, 192, 256)
"""Columns of Q and K, and of V, that there are kernels for; rows that are narrower are filled with zeros."""

COMBINE_BYTES = 12_288
"""Shared memory that is left to the CTAs which put parts together, so that they may wait where this kernel runs."""

MOST_OF_CLUSTER = 16
"""CTAs that may put a tile together. 8 is the most that is portable, and the most that any shipped kernel has."""

PARTS_PER_CTA = 2
"""Partial results that a CTA leaves at most: of the tile that it begins in the middle of, and of the one that it leaves
unfinished."""


@dataclass(frozen=True)
class DecodeConfig:
    """Everything that is fixed when a decode kernel is compiled.

    A tile is ``tile_m`` rows of a K/V head: the query heads of its group, of one token after another. 32 rows stand in
    the upper half of each warp's 16 rows of a WGMMA, whose lower half nobody looks at: that halves the work of the
    softmax. 128 rows are those of two consumer warpgroups, which multiply the same keys. A tile visits ``tile_n`` keys
    at a time, which TMA brings in boxes of ``box_rows`` keys, each of one page.
    ``layout`` is that of Q and O. With ``leftpad`` a sequence begins behind the first row of its cache, which is page b
    for sequence b unless it is ``paged``. With ``limits_splits`` a tile is in no more parts than the kernel is given. A
    cache of ``cache_dtype`` e4m3 stays so in shared memory where tiles have few rows: these are columns of a product
    then (``SwappedConsumer``). Else it comes to ``raw_stages`` stages of its own, and two warpgroups widen it to
    float16, which holds every e4m3 number as it is. An empty ``cache_dtype`` is ``dtype``. With ``e4m3_queries`` Q is
    of e4m3 too, and ``dtype`` that of O. With ``row_scales`` each key of such a cache has a scale of its own, and each
    value; else a sequence has one for each K/V head. With a ``cluster`` of several CTAs a launch has one for each tile,
    whose keys they share and which they put together themselves (``ClusterParts``), so that there is no second kernel.
    ``causal``, ``window``, ``chunk``, ``softcap`` and ``sinks`` are as in ``ForwardConfig``.
    """

    dtype: str
    head_dim: int
    head_dim_v: int
    causal: bool
    tile_n: int
    stages: int
    box_rows: int
    tile_m: int = 32
    window: bool = False
    chunk: bool = False
    layout: str = DENSE
    paged: bool = True
    leftpad: bool = False
    limits_splits: bool = False
    softcap: bool = False
    sinks: bool = False
    cache_dtype: str = ""
    raw_stages: int = 0
    e4m3_queries: bool = False
    row_scales: bool = False
    cluster: int = 1

    @property
    def is_swapped(self) -> bool:
        """Whether keys are the rows of a product, columns of V those of a WGMMA, and rows of a tile their columns."""
        return self.tile_m in SWAPPED_TILE_M

    @property
    def is_widened(self) -> bool:
        return self.cache_dtype == E4M3 and not self.is_swapped

    @property
    def mma_dtype(self) -> str:
        """Of the operands of both GEMMs; of P V alone where K is widened in registers."""
        if self.is_swapped:
            return E4M3
        return "float16" if self.is_widened else self.dtype

    @property
    def guesses(self) -> bool:
        """Whether a CTA guesses its first block before it may read: in clusters, and where it first has to find its
        sequence, as was measured (``decode_evict_first.json``). With e4m3 it is slower by 0.3 %."""
        of_any = (self.head_dim, self.head_dim_v, self.tile_m, self.tile_n) == (128, 128, 32, 128)
        is_dense = self.layout == DENSE and not self.limits_splits
        return not self.cache_dtype and (self.cluster > 1 or (of_any and is_dense))

    @property
    def reads_once(self) -> bool:
        """Whether a K/V head has one tile, whose keys need not stay in L2 then: of up to 32 rows, but for scales of
        single keys, where more rows are several tiles. Several tiles find keys there themselves."""
        return self.tile_m < WARPGROUP_ROWS and not self.row_scales

    @property
    def is_compact(self) -> bool:
        """Whether the tile with which a CTA begins is found once for all roles, and boxes are a loop: a quarter to a
        half less machine code. Beside two consumers long calls are slower by 1.7 % then (``decode_code.json``)."""
        return self.consumers == 1

    @property
    def element_bytes(self) -> int:
        """Of what is multiplied."""
        return 1 if self.is_swapped else 2

    def box_columns(self, columns: int) -> int:
        """Columns of one box of TMA, of so many: a swizzled row, or where nothing is swizzled all of them."""
        if self.is_widened:
            return columns
        row_bytes = columns * self.element_bytes
        return next(width for width in (128, 64) if row_bytes % width == 0) // self.element_bytes

    @property
    def split_rows(self) -> int:
        """Columns of a WGMMA of a swapped kernel: two terms of each row."""
        return 2 * self.tile_m

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply, with 64 rows each, or fewer where there is one."""
        return max(self.tile_m // WARPGROUP_ROWS, 1)

    @property
    def registers(self) -> dict[str, int]:
        """Of a thread, by role; empty where all have as many as each other. Then producers are a whole warpgroup."""
        if self.is_widened:
            return REGISTERS_WIDENED
        return REGISTERS_PAIRED if self.consumers > 1 else {}

    @property
    def threads(self) -> int:
        if self.registers:
            return (self.consumers + (3 if self.is_widened else 1)) * WARPGROUP_THREADS
        return WARPGROUP_THREADS + PRODUCER_WARPS * WARP_THREADS

    @property
    def rows_per_thread(self) -> int:
        """Rows of a tile of which a thread of the consumer has a part."""
        if self.is_swapped:
            return self.tile_m // ROWS_PER_GROUP
        return 2 * self.tile_m // (WARPGROUP_ROWS * self.consumers)

    @property
    def boxes(self) -> int:
        """Of the keys of a block."""
        return self.tile_n // self.box_rows

    @property
    def smem_bytes(self) -> int:
        """K and V of each stage, as they come and as they are multiplied, and their scales, the barriers, and what a
        swapped kernel has of Q and P."""
        columns = self.tile_n * (self.head_dim + self.head_dim_v)
        others = swapped_bytes(self.tile_m, self.head_dim, self.tile_n) if self.is_swapped else 0
        others += self.stages * scale_bytes(self.tile_n) if self.row_scales else 0
        others += cluster_bytes(self.tile_m, self.head_dim_v, self.cluster)
        return columns * (self.stages * self.element_bytes + self.raw_stages) + BARRIER_BYTES + others

    @property
    def part_floats(self) -> int:
        """float32 of a partial result: O, and four numbers a row."""
        return self.tile_m * (self.head_dim_v + 4)

    @property
    def name(self) -> str:
        """Short unique name: kernel entry in profilers, file stem in the compile cache."""
        parts = ["hopper_decode", SHORT_NAMES[self.dtype], f"d{self.head_dim}"]
        parts += [] if self.head_dim_v == self.head_dim else [f"v{self.head_dim_v}"]
        parts += [
            "causal" if self.causal else "full",
            f"m{self.tile_m}n{self.tile_n}s{self.stages}b{self.box_rows}",
        ]
        parts += ["paged"] if self.paged else []
        parts += ["splits"] if self.limits_splits else []
        parts += [f"e4m3cache{self.raw_stages}"] if self.cache_dtype else []
        parts += ["e4m3queries"] if self.e4m3_queries else []
        parts += ["rowscales"] if self.row_scales else []
        parts += [f"c{self.cluster}"] if self.cluster > 1 else []
        parts += [] if self.layout == DENSE else [self.layout]
        parts += [name for name in ("window", "chunk", "leftpad", "softcap", "sinks") if getattr(self, name)]
        return "_".join(parts)


def validate_decode_config(config: DecodeConfig) -> None:
    """Raise ValueError naming the first field that no kernel can be built from."""
    c = config
    check_kind(c)
    if c.cache_dtype not in ("", E4M3):
        raise ValueError(f"cache_dtype is {c.cache_dtype!r}, allowed: {E4M3!r}, or nothing for dtype")
    allowed = allowed_tile_m(c.dtype, c.cache_dtype, max(c.head_dim, c.head_dim_v))
    if c.tile_m not in allowed:
        raise ValueError(f"tile_m is {c.tile_m}, allowed: {', '.join(map(str, allowed))}")
    allowed = tuple(TILE_N_WIDENED if c.is_widened else TILE_N)
    for name, size in (("head_dim", c.head_dim), ("head_dim_v", c.head_dim_v)):
        if size not in allowed:
            raise ValueError(f"{name} is {size}, allowed: {', '.join(map(str, allowed))}")
    if c.tile_n % 16 or not 16 <= c.tile_n <= 128:
        raise ValueError(f"tile_n is {c.tile_n}, allowed: multiples of 16 from 16 to 128")
    if c.box_rows not in BOX_ROWS or c.tile_n % c.box_rows:
        raise ValueError(
            f"box_rows is {c.box_rows}, allowed: one of {BOX_ROWS} that divides tile_n {c.tile_n}"
        )
    if c.is_widened != (c.raw_stages > 1):
        raise ValueError(
            f"raw_stages is {c.raw_stages}, allowed: 2 or more with a cache of e4m3 and tile_m 32 or 64, else 0"
        )
    if c.e4m3_queries and not c.is_swapped:
        raise ValueError(f"e4m3_queries is True with tile_m {c.tile_m}, allowed: False")
    if c.row_scales and not c.is_swapped:
        raise ValueError(f"row_scales is True with tile_m {c.tile_m}, allowed: False")
    if c.stages < 2:
        raise ValueError(f"stages is {c.stages}, allowed: 2 or more")
    if not 1 <= c.cluster <= MOST_OF_CLUSTER:
        raise ValueError(f"cluster is {c.cluster}, allowed: 1 to {MOST_OF_CLUSTER}")
    if c.cluster > 1 and not takes_clusters(c):
        raise ValueError(
            f"cluster is {c.cluster}, allowed: 1 with packed queries, limited splits, two consumers or widened keys"
        )
    if c.smem_bytes > SMEM_BYTES:
        raise ValueError(f"the tiles need {c.smem_bytes} bytes of shared memory, allowed: {SMEM_BYTES}")


def takes_clusters(config: DecodeConfig) -> bool:
    """Whether tiles may be those of clusters in the kernel of a config."""
    c = config
    return c.layout == DENSE and not c.limits_splits and not c.is_widened and c.consumers == 1


STAGES = 2
"""Key blocks in 16 bits that are in shared memory at a time, whether they come so or are widened from e4m3. There is
room for more, and with them 35 of 36 timings on an H100 are slower, by up to 12 % (``decode_stages.json``): what 132
SMs ask for beyond what keeps memory busy stands in line before it, and a CTA's first block stands behind that. A cache
of e4m3 has what memory is left to it."""

SMALL_BOX_ROWS, FEW_BYTES = 16, 48 * 1024
"""Boxes of so many keys at most, in pages that lie anywhere, come so unevenly that where a block of K and V has no more
bytes than that a third stage is faster, by 1 to 6 % (``decode_page_stages.json``). With 64 KB it gains 0.6 % at most,
and costs short calls 6 (``decode_few_rows.json``)."""


def stages_of(config: DecodeConfig) -> int:
    """Key blocks of a kernel that reads a cache of 16 bits: one more for up to 32 rows in
    small boxes, where a block has few bytes."""
    c = config
    is_uneven = c.tile_m < WARPGROUP_ROWS and c.box_rows <= SMALL_BOX_ROWS and c.cluster == 1
    block_bytes = c.tile_n * (c.head_dim + c.head_dim_v) * c.element_bytes
    return STAGES + int(is_uneven and block_bytes <= FEW_BYTES)


TILE_N = {64: 128, 128: 128, 192: 64, 256: 32}
"""Keys of a block, by the larger of the two head_dims."""

TILE_N_WIDENED = {64: 128, 128: 128, 192: 32}
"""The same for a cache of e4m3, where the consumer has fewer registers, too few for rows of 256 columns; half of it for
tiles of 64 rows."""


TILE_N_SWAPPED = {64: 128, 128: 128, 192: 64, 256: 64}
"""The same for a swapped kernel."""

MOST_RAW_STAGES = 28
"""Of an e4m3 cache: each stage has 32 bytes of barriers, full and empty of K and of V, and BARRIER_BYTES hold those of
32 stages, others than these among them."""

TILE_M = {"": (32, 64), E4M3: (*SWAPPED_TILE_M, 32, 64)}
"""Rows that a tile may have with a cache of 16 bits, or of e4m3. P for an output in float16 has 11 bits, and is not
split."""

PAIRED_TILE_M = 2 * WARPGROUP_ROWS
"""Rows of a tile of two consumers, which multiply every block of keys twice."""

TILE_N_PAIRED = {64: 128, 128: 96}
"""Keys of a block for two consumers, by the larger of the two head_dims: their registers do not hold more."""


def query_words(tile_m: int, head_dim: int) -> tuple[int, ...]:
    """Words of Q as float16 that a swapped kernel keeps: (words, lanes, steps of 16 columns, groups of 8 rows)."""
    return 2, WARP_THREADS, head_dim // 16, -(-tile_m // 8)


def swapped_bytes(tile_m: int, head_dim: int, tile_n: int) -> int:
    """Shared memory for Q, both terms of P, and a number of each row from each of four warps."""
    return 4 * math.prod(query_words(tile_m, head_dim)) + 2 * tile_m * tile_n + 4 * 4 * tile_m


def scale_bytes(tile_n: int) -> int:
    """Shared memory for the scales of a stage of K and of V."""
    return 2 * 4 * tile_n


def cluster_columns(head_dim_v: int, cluster: int) -> int:
    """Columns of O that a CTA of a cluster puts together: pairs, of which the last CTA may have fewer, or none."""
    return 2 * -(-head_dim_v // (2 * cluster))


def cluster_bytes(tile_m: int, head_dim_v: int, cluster: int) -> int:
    """Shared memory for the columns of a tile that a CTA of a cluster puts together, and for three sums of each row,
    from each CTA; none without a cluster."""
    return 4 * tile_m * cluster * (cluster_columns(head_dim_v, cluster) + 3) if cluster > 1 else 0


def allowed_tile_m(dtype: str, cache_dtype: str, columns: int) -> tuple[int, ...]:
    """Rows that a tile may have; ``columns`` is the larger of the head_dims."""
    allowed = TILE_M[cache_dtype if dtype == "bfloat16" else ""]
    return allowed if cache_dtype or columns > max(TILE_N_PAIRED) else (*allowed, PAIRED_TILE_M)


def tile_m_of(dtype: str, rows: int, cache_dtype: str = "", columns: int = HEAD_DIMS[-1]) -> int:
    """Rows of a tile of the kernel for a problem, the most that there are where it has more; ``columns`` is the larger
    of its head_dims, the others are those of ``select_decode_config``."""
    allowed = allowed_tile_m(dtype, cache_dtype, columns)
    return next((tile_m for tile_m in allowed if rows <= tile_m), allowed[-1])


def tile_n_of(dtype: str, head_dim: int, head_dim_v: int, rows: int = 1, cache_dtype: str = "") -> int:
    """Keys of a block of the kernel for a problem; the arguments are those of ``select_decode_config``."""
    size = min(size for size in HEAD_DIMS if size >= max(head_dim, head_dim_v))
    if cache_dtype != E4M3:
        is_paired = tile_m_of(dtype, rows, cache_dtype, size) == PAIRED_TILE_M
        return (TILE_N_PAIRED if is_paired else TILE_N)[size]
    if tile_m_of(dtype, rows, cache_dtype) in SWAPPED_TILE_M:
        return TILE_N_SWAPPED[size]
    tile_n = TILE_N_WIDENED[size]
    return max(tile_n // 2, 16) if rows > WARPGROUP_ROWS // 2 else tile_n


def box_rows_of(tile_n: int, page_size: int, pages: int) -> int | None:
    """The most rows that a box can have, for ``pages`` of ``page_size`` keys a sequence; None if there is no box.

    The only page of a sequence may end within a box, which TMA clips.
    """
    return next((n for n in BOX_ROWS if tile_n % n == 0 and (pages == 1 or page_size % n == 0)), None)


def select_decode_config(
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    causal: bool,
    page_size: int,
    pages: int,
    rows: int = 1,
    **others: Any,
) -> DecodeConfig | None:
    """The config for a problem, the narrowest that covers its head_dims; None if pages are too small for TMA.

    Args:
        page_size, pages: rows of a page, and pages of a sequence.
        rows: query rows that share a K/V head.
        others: further fields. ``e4m3_queries`` is dropped where a kernel wants them in 16 bits.
    """
    d, dv = (min(size for size in HEAD_DIMS if size >= x) for x in (head_dim, head_dim_v))
    cache_dtype = others.get("cache_dtype", "")
    tile_n = tile_n_of(dtype, head_dim, head_dim_v, rows, cache_dtype)
    tile_m = tile_m_of(dtype, rows, cache_dtype, max(d, dv))
    box_rows = box_rows_of(tile_n, page_size, pages)
    if box_rows is None:
        return None
    columns, raw_stages = tile_n * (d + dv), 0
    room = SMEM_BYTES - BARRIER_BYTES - COMBINE_BYTES
    if others.get("cluster", 1) > 1:
        # There is no other kernel to leave room to.
        room += COMBINE_BYTES - cluster_bytes(tile_m, dv, others["cluster"])
    stages = STAGES
    if tile_m in SWAPPED_TILE_M:
        of_stage = columns + (scale_bytes(tile_n) if others.get("row_scales") else 0)
        stages = (room - swapped_bytes(tile_m, d, tile_n)) // of_stage
    elif cache_dtype:
        raw_stages = min((room - 2 * stages * columns) // columns, MOST_RAW_STAGES)
    others["e4m3_queries"] = others.get("e4m3_queries", False) and tile_m in SWAPPED_TILE_M
    config = DecodeConfig(
        dtype, d, dv, causal, tile_n, stages, box_rows, tile_m, raw_stages=raw_stages, **others
    )
    if not cache_dtype:
        config = replace(config, stages=stages_of(config))
    validate_decode_config(config)
    return config

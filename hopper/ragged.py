"""Ends of sequences within a tile, as rules on configs: whose kernels leave out what lies behind them. Nothing here
imports the DSL.

Without a mask a last tile of few queries attends to as many keys as any other, and each tile's block of the last keys
costs as much as a whole one. Rules are from measurements (`ragged_ends.json`), and leave out the kernels that are
slower by it; head_dims between those that were timed go with their neighbours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cute_kernels.problem import DENSE, DTYPES, MAX_HEAD_DIM, VARLEN

if TYPE_CHECKING:
    from hopper.config import ForwardConfig

PRODUCT_WIDTHS = {
    (128, 176, False): (64, 112),
    (256, 80, False): (32, 48, 64),
    (256, 80, True): (32, 48, 64),
}
"""Of 16 bits, by head_dim, keys of a block, which divide no power of two, and causal: keys that both products of the
last block may be cut to (``ForwardConfig.cuts_first_product``). Of 2048, 4096, 8192 and 16384 keys 176 leave 112, 48,
96 and 16, and 80 leave 48, 16, 32 and 64. A few keys more than 4096 leave 64 at most."""

COUNTING_TILES = {
    ("bfloat16", 128, 160),
    *((dtype, MAX_HEAD_DIM, 80) for dtype in DTYPES),
}
"""By dtype, head_dim and keys of a block: those for which ``counts_from_end`` was timed, and is faster. With 128 keys a
block, as many as a tile has queries, the diagonal of each tile would cut one block more. In float16 whole lengths lose
0.5 to 0.9 % at head_dim 128."""

SCORE_WIDTHS = {
    (64, 192, 128, DENSE): (64,),
    (128, 128, 128, VARLEN): (64,),
}
"""Of 16 bits, by head_dim, rows of a tile, keys of a block and layout: keys that the scores of the last block may be
cut to. At head_dim 80 whole lengths lose up to 2.5 %, with 64 rows and 96 keys what ragged ones gain."""

SLOWER_BY_PASSING = {(160, 160, DENSE), (192, 128, DENSE), (192, 128, VARLEN)}
"""Of 16 bits, by head_dim, head_dim_v and layout: whole lengths lose 1 to 3.5 %, and at 160 random ones gain
nothing. Packed ones of 192 with V of 128 were not timed."""


def lets_blocks_pass(config: ForwardConfig) -> bool:
    """Whether a warpgroup of whose rows none is a query lets the blocks of its tile pass, in 16 bits: without a mask,
    where nothing is done to scores. At head_dim 72 that gains nothing. Dense calls at head_dim 128 in blocks of 128
    keys are left alone: with a branch around them ptxas makes one product wait for the other, and calls take half as
    long again."""
    c = config
    is_slower = (c.head_dim, c.head_dim_v, c.layout) in SLOWER_BY_PASSING
    gains_nothing = c.head_dim == 80 and c.used_head_dim > 0
    is_left_alone = c.causal or c.has_whole_beginnings or is_slower or gains_nothing
    return shares_plain_tiles(c) and not is_left_alone


def shares_plain_tiles(config: ForwardConfig) -> bool:
    """Whether several warpgroups share tiles of one head, whose key blocks all of them visit, and nothing is done to
    scores."""
    c = config
    is_bare = not (c.window or c.split or c.page_box or c.block_lists or c.changes_scores or c.walks_apart)
    return is_bare and c.pipelined and c.warp_specialized and c.consumers > 1 and c.group == 1


def score_widths(config: ForwardConfig) -> tuple[int, ...]:
    """Keys, in ascending order, that the scores of the last block may be cut to, in 16 bits, where blocks pass."""
    tiles = config.head_dim, config.tile_m, config.tile_n, config.layout
    return SCORE_WIDTHS.get(tiles, ())

"""Tiles for few queries of what the quantizer made: V transposed, and scales of blocks of rows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from cute_kernels.problem import DENSE
from hopper.config import WARPGROUP_ROWS, Registers, validate_forward_config
from hopper.forward.fp8.changes import NO_CHANGES, Changes
from hopper.forward.fp8.config import Fp8ForwardConfig
from hopper.forward.fp8.native import native_size, with_used_columns
from hopper.forward.fp8.tilings import build, eager
from hopper.forward.tilings import Tiling

ONE_CONSUMER_OF_TWO_CTAS = Registers(consumer=216, producer=40)
LONE_CONSUMER = Registers(consumer=256, producer=24)

low = partial(eager, WARPGROUP_ROWS, ctas_per_sm=2, registers=ONE_CONSUMER_OF_TWO_CTAS, polynomial_pairs=3)
"""Tiles of 64 rows, and two CTAs an SM."""

Tilings = dict[int, dict[int, tuple[Tiling, ...]]]

FEW_QUERIES_OF_BLOCKS: Tilings = {
    64: {
        64: (low(128, 4), low(192, 3), low(64, 4)),
        192: tuple(eager(192, keys, 4, polynomial_pairs=3) for keys in (128, 96, 64)),
    },
    128: {
        64: (low(128, 2), low(64, 4)),
        128: tuple(eager(128, keys, 4, polynomial_pairs=3) for keys in (128, 64)),
    },
    256: {
        64: (eager(64, 128, 2, registers=LONE_CONSUMER), eager(64, 64, 4, registers=LONE_CONSUMER)),
        128: (eager(128, 128, 2), eager(128, 64, 4)),
    },
}
"""By head_dim and rows of a tile, for tiles with the query heads of a key/value head. The first of those that divide a
block of keys serves."""

IN_PARTS: Tilings = FEW_QUERIES_OF_BLOCKS | {
    128: FEW_QUERIES_OF_BLOCKS[128] | {64: (low(128, 3), low(64, 6))},
    256: {
        64: (eager(64, 128, 3, registers=LONE_CONSUMER), eager(64, 64, 6, registers=LONE_CONSUMER)),
        128: (eager(128, 128, 3), eager(128, 64, 6)),
    },
}
"""The same where keys are in parts: O, which goes from registers, leaves room for a stage more. At head_dim 128 and 256
tiles of 64 rows take 3 % less time by it, those of 128 rows 0.7 % (`fp8_few_blocks_ways.json`)."""


def tiling_of_blocks(head_dim: int, tile_rows: int, block_k: int, split: bool) -> Tiling | None:
    """The tiling of ``tile_rows`` rows at a head_dim of the table, where ``block_k`` keys share a scale, or all, 0, and
    keys are in parts or not; None if there is none."""
    tilings = (IN_PARTS if split else FEW_QUERIES_OF_BLOCKS)[head_dim][tile_rows]
    return next((tiling for tiling in tilings if block_k % tiling.tile_n == 0), None)


def select_fp8_few_blocks_config(
    head_dims: tuple[int, int],
    causal: bool,
    output: str,
    group: int,
    tile_rows: int,
    split: bool,
    block_k: int,
    layout: str = DENSE,
    changes: Changes = NO_CHANGES,
) -> Fp8ForwardConfig:
    """The config for few queries, of ``group`` heads in the ``tile_rows`` rows of a tile, V transposed and scales of
    blocks of ``block_k`` keys, 0 for all. ``head_dims`` are those of Q and V, ``changes``
    what is masked. With ``split`` several CTAs visit parts
    of a tile's keys.

    Raises:
        ValueError: a head dimension is too large, no tiling divides ``block_k``, or no tile has ``group`` heads.
    """
    native = native_size(max(head_dims))
    tiling = tiling_of_blocks(native.tiles, tile_rows, block_k, split)
    if tiling is None:
        raise ValueError(
            f"block_k is {block_k}, allowed in tiles of {tile_rows} rows: what their keys divide"
        )
    of_tile = {"group": group, "split": split, "layout": layout}
    tiling = replace(tiling, fields=(*tiling.fields, *of_tile.items()))
    config = with_used_columns(changes.of(build(tiling, native, causal, output)), *head_dims)
    validate_forward_config(config)
    return config

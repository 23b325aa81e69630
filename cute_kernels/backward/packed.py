"""Buffers over whole query tiles between the kernels of a backward pass on packed sequences.

A sequence has whole tiles of its own in them, from ``SeqlenInfo.first_query_tile`` on; the sequence behind the last one
of the plan, of rows that belong to none, too.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_kernels.invariant import LoopInvariant
from cute_kernels.plan.config import PLAN_HEADER, RECORD
from cute_kernels.plan.packed import PackedSeqlens
from cute_kernels.seqlen import SeqlenInfo

OFFSET_Q, OFFSET_K = 0, 2
"""Of a record."""


@dataclass(frozen=True)
class PackedQueryTile(LoopInvariant):
    """Tile ``m_block`` of a sequence; ``rows_end`` is where the rows of the next one begin."""

    seqlens: SeqlenInfo
    m_block: Int32
    rows_end: Int32


@cute.jit
def sequence_of(
    plan: cute.Tensor,
    sequences: Int32,
    tile: Int32,
    tile_m: cutlass.Constexpr[int],
    offset: cutlass.Constexpr[int] = OFFSET_Q,
) -> Int32:
    """That to which tile ``tile`` of the buffers belongs: the last one with no more tiles before it. ``offset`` is the
    place of the number of its first row in a record.

    A binary search, which is over before the rows of the tile are there; a plan over query tiles, besides the one over
    key tiles, would be a launch more.
    """
    first, last = Int32(0), sequences - 1
    while first < last:
        middle = (first + last + 1) >> 1
        if plan[PLAN_HEADER + RECORD * middle + offset] // tile_m + middle <= tile:
            first = middle
        else:
            last = middle - 1
    return first


@cute.jit
def find_query_tile(
    plan: cute.Tensor,
    sequences: Int32,
    total_q: Int32,
    tile: Int32,
    tile_m: cutlass.Constexpr[int],
) -> PackedQueryTile:
    """Tile ``tile`` of the buffers."""
    sequence = sequence_of(plan, sequences, tile, tile_m)
    seqlens = PackedSeqlens(plan).of(sequence)
    rows_end = total_q
    if sequence + 1 < sequences:
        rows_end = plan[PLAN_HEADER + RECORD * (sequence + 1)]
    return PackedQueryTile(seqlens, tile - seqlens.first_query_tile(tile_m), rows_end)


def rows_as_batch(tensor: cute.Tensor, first: Int32, number: Int32) -> cute.Tensor:
    """Rows of packed (total, heads, columns) as a batch of one sequence: (1, rows, heads, columns)."""
    start = cute.domain_offset((first, 0, 0), tensor)
    layout = cute.make_layout((1, number, *tensor.shape[1:]), stride=(0, *tensor.stride))
    return cute.make_tensor(start.iterator, layout)


def heads_as_batch(tensor: cute.Tensor, first: Int32) -> cute.Tensor:
    """What (heads, numbers, ...) has from number ``first`` on, as a batch of one: (1, heads, numbers, ...)."""
    start = cute.domain_offset((0, first, *(0 for _ in tensor.shape[2:])), tensor)
    return cute.make_tensor(start.iterator, cute.make_layout((1, *tensor.shape), stride=(0, *tensor.stride)))

"""Where the backward kernel finds its key tiles, and the rows of their sequences: of one length each, or packed.

What a loop over blocks needs of a place is pinned inside of it, or else addresses would be computed before the loop and
held in registers throughout.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels.ampere.backward.config import AmpereBackwardConfig
from cute_kernels.fast_math import pin
from cute_kernels.invariant import LoopInvariant
from cute_kernels.plan.packed import PackedSeqlens, PackedTileOrder
from cute_kernels.seqlen import DenseSeqlens, PackedRows, SeqlenInfo
from cute_kernels.sequence_rows import rows_of


@dataclass(frozen=True)
class KeyPlace(LoopInvariant):
    """Key tile ``n_block``, of ``n_blocks``, of key/value head ``head_kv`` of a sequence."""

    n_block: Int32
    n_blocks: Int32
    head_kv: Int32
    seqlens: SeqlenInfo


@dataclass(frozen=True)
class DenseBatch(LoopInvariant):
    """Sequences of one length. ``descending``: of each the last key tile comes first."""

    config: AmpereBackwardConfig
    seqlen_q: Int32
    seqlen_k: Int32
    n_blocks: Int32
    kv_heads: Int32
    descending: bool

    def first_place(self, tile: Int32) -> KeyPlace:
        """That of tile ``tile`` of the grid."""
        return self._place(tile, self.n_blocks)

    def place_again(self, tile: Int32) -> KeyPlace:
        """The same behind a loop, worked out anew."""
        return self._place(tile, cute.ceil_div(pin(self.seqlen_k, Int32), self.config.tile_n))

    def _place(self, tile: Int32, n_blocks: Int32) -> KeyPlace:
        n_block, head_batch = tile % n_blocks, tile // n_blocks
        if self.descending:
            n_block = n_blocks - 1 - n_block
        head_kv, batch = head_batch % self.kv_heads, head_batch // self.kv_heads
        return KeyPlace(n_block, n_blocks, head_kv, DenseSeqlens(self.seqlen_q, self.seqlen_k).of(batch))


@dataclass(frozen=True)
class PackedBatch(LoopInvariant):
    """Packed sequences, by a plan of key tiles."""

    config: AmpereBackwardConfig
    plan: cute.Tensor
    order: PackedTileOrder
    descending: bool

    def first_place(self, tile: Int32) -> KeyPlace:
        n_block, head_kv, sequence = self.order.coordinates(tile)
        seqlens = PackedSeqlens(self.plan).of(sequence)
        n_blocks = cute.ceil_div(seqlens.seqlen_k, self.config.tile_n)
        if self.descending:
            n_block = n_blocks - 1 - n_block
        return KeyPlace(n_block, n_blocks, head_kv, seqlens)

    def place_again(self, tile: Int32) -> KeyPlace:
        return self.first_place(tile)


class DenseQueries(LoopInvariant):
    """Rows over the queries of one of the sequences of one length, in Q and dO, and a number for each in LSE and delta,
    up to whole query tiles."""

    def __init__(self, rows: tuple, vectors: tuple, seqlens: SeqlenInfo):
        self.rows = tuple(tensor[seqlens.batch, None, None, None] for tensor in rows)
        self.vectors = tuple(vector[seqlens.batch, None, None] for vector in vectors)

    def head_rows(self, head: Int32) -> Iterator[cute.Tensor]:
        """(seqlen_q, columns) of Q, and then of dO."""
        return (rows[None, head, None] for rows in self.rows)

    def head_vectors(self, head: Int32) -> tuple:
        """The address of the first number of the sequence in LSE, and in delta."""
        return tuple(Int64(vector[head, None].iterator.toint()) for vector in self.vectors)


class PackedQueries(LoopInvariant):
    """The same of a packed sequence, which has whole tiles of LSE and delta of its own."""

    def __init__(self, config: AmpereBackwardConfig, rows: tuple, vectors: tuple, seqlens: SeqlenInfo):
        self.config, self.rows, self.vectors, self.seqlens = config, rows, vectors, seqlens

    def head_rows(self, head: Int32) -> Iterator[cute.Tensor]:
        place = PackedRows(pin(self.seqlens.offset_q, Int32), pin(self.seqlens.seqlen_q, Int32))
        return (rows_of(tensor, place, head) for tensor in self.rows)

    def head_vectors(self, head: Int32) -> tuple:
        offset, batch = pin(self.seqlens.offset_q, Int32), pin(self.seqlens.batch, Int32)
        tile_m = self.config.tile_m
        first = replace(self.seqlens, offset_q=offset, batch=batch).first_query_tile(tile_m) * tile_m
        numbers = (cute.domain_offset((first,), vector[head, None]) for vector in self.vectors)
        return tuple(Int64(of_head.iterator.toint()) for of_head in numbers)


@dataclass(frozen=True)
class DenseTiles(LoopInvariant):
    """Where query tiles of a sequence lie in the sums of dQ: (batch, heads, query tiles, ...)."""

    batch: Int32

    def pinned(self, head: Int32, m_block: Int32) -> tuple:
        """The coordinates of a tile."""
        return tuple(pin(x, Int32) for x in (self.batch, head, m_block))

    def m_block_of(self, pinned: tuple) -> Int32:
        return pinned[2]


@dataclass(frozen=True)
class PackedTiles(LoopInvariant):
    """The same in (heads, query tiles, ...); ``first`` is the first tile of the sequence."""

    first: Int32

    def pinned(self, head: Int32, m_block: Int32) -> tuple:
        return pin(head, Int32), pin(self.first, Int32) + pin(m_block, Int32)

    def m_block_of(self, pinned: tuple) -> Int32:
        return pinned[1] - pin(self.first, Int32)

"""What kernels read of a plan (``kernel.py``): the lengths of packed sequences, and which tile belongs to which.

A plan is a vector of int32::

    tiles of all sequences, 0, 0, 0 | offset_q, seqlen_q, offset_k, seqlen_k of each | sequence, first tile of it, ...
    PLAN_HEADER                     | RECORD each sequence                          | ENTRY each tile

Sequences with many keys come first. ``tiles`` are those of one head. Behind the sequences of the caller stands one
more, of the rows of Q, and of K, that belong to none: its queries see no key, and no query sees its keys.
"""

from dataclasses import dataclass, replace
from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from cute_kernels.integers import ceil_div
from cute_kernels.invariant import LoopInvariant
from cute_kernels.plan.config import ENTRY, PLAN_HEADER, RECORD
from cute_kernels.seqlen import SeqlenInfo
from cute_kernels.tile_scheduler import WORKERS, Sections, TileOrder, heads_of_last


@dataclass(frozen=True)
class PackedSeqlens(LoopInvariant):
    """The lengths of packed sequences. ``plan`` is int32, 16-byte aligned."""

    plan: cute.Tensor

    def of(self, batch: Int32) -> SeqlenInfo:
        record = cute.make_rmem_tensor(RECORD, Int32)
        cute.autovec_copy(cute.local_tile(self.plan, (RECORD,), (PLAN_HEADER // RECORD + batch,)), record)
        offset_q, seqlen_q, offset_k, seqlen_k = (record[i] for i in range(RECORD))
        return SeqlenInfo(seqlen_q, seqlen_k, batch, offset_q, offset_k, is_packed=True)

    def of_tile(self, m_block: Int32, batch: Int32) -> SeqlenInfo:
        """As query tile ``m_block`` counts them."""
        return self.of(batch)


@dataclass(frozen=True)
class PackedTileOrder(LoopInvariant):
    """``TileOrder`` of packed sequences: one after the other, and the tiles of each as if it were alone.

    ``sequences`` counts the last one, of rows that belong to none. ``num_heads`` share out the tiles of a sequence,
    ``group`` of them the same keys; ``tile`` rows are a tile, of Q or with ``of_keys`` of K.
    """

    plan: cute.Tensor
    sequences: Int32
    num_tiles: Int32
    num_heads: Int32
    group: Int32
    tile: int
    longest_first: bool
    of_keys: bool = False

    divisors = ()
    """None: each sequence has other tiles."""

    def with_group(self, group: Any) -> "PackedTileOrder":
        """The same, whose ``group`` is in another register."""
        return replace(self, group=group)

    @staticmethod
    def count(plan: cute.Tensor, num_heads: Int32) -> Int32:
        """``num_tiles``, read once and before the loop over tiles."""
        return plan[0] * num_heads

    @staticmethod
    def most(plan: cute.Tensor, sequences: Int32, num_heads: Int32) -> Int32:
        """What ``num_tiles`` may be at most by the size of the plan, for a grid with a CTA for each."""
        return (plan.shape[0] - PLAN_HEADER - RECORD * sequences) // ENTRY * num_heads

    def coordinates(self, tile: Any) -> tuple[Any, Any, Any]:
        """(block, head, batch) of a tile number below ``num_tiles``."""
        entry = cute.make_rmem_tensor(ENTRY, Int32)
        first_entry = (PLAN_HEADER + RECORD * self.sequences) // ENTRY
        place = first_entry + tile // self.num_heads
        cute.autovec_copy(cute.local_tile(self.plan, (ENTRY,), (place,)), entry)
        batch, before = entry[0], entry[1]
        order = self.order_of(PackedSeqlens(self.plan).of(self.sequence_of(batch)))
        block, head, _ = order.coordinates(tile - before * self.num_heads)
        return block, head, batch

    def sequence_of(self, number: Any) -> Any:
        """Whose tile it is that an entry has ``number`` for."""
        return number

    def order_of(self, seqlens: SeqlenInfo) -> Any:
        """That of the tiles of a sequence, from number 0 on."""
        rows = seqlens.seqlen_k if self.of_keys else seqlens.seqlen_q
        num_blocks, kv_heads = ceil_div(rows, self.tile), self.num_heads // self.group
        # One head a section, so that nothing is divided to count them.
        sections = Sections(self.group, kv_heads - heads_of_last(num_blocks, kv_heads, self.group, WORKERS))
        return TileOrder(num_blocks, self.num_heads, 1, sections, self.longest_first)

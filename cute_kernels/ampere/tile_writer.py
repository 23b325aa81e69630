"""Tiles from shared to global memory, without rows and columns past the end."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels.ampere.config import CHUNK_BYTES, ELEMENT_BYTES
from cute_kernels.ampere.instructions import load_words, store_words_global
from cute_kernels.ampere.shared_tile import SharedTile
from cute_kernels.invariant import LoopInvariant


class TileWriter(LoopInvariant):
    """What one of ``threads`` threads, number ``thread``, copies of a tile: whole chunks of 16 bytes."""

    def __init__(self, tile: SharedTile, threads: int, smem: Int32, head: cute.Tensor, thread: Int32):
        """``head`` is (seqlen, head_dim) in global memory, ``smem`` where the tile begins."""
        self.tile, self.smem, self.head = tile, smem, head
        self.rows_per_pass = threads // tile.span
        self.row, self.chunk = thread // tile.span, thread % tile.span

    @cute.jit
    def write(self, first_row: Int32, rows: cutlass.Constexpr[int]):
        """``rows`` rows of the tile, to those from ``first_row`` on."""
        target = Int64(self.head.iterator.toint()) + Int64(self.chunk * CHUNK_BYTES)
        for number in cutlass.range_constexpr(rows // self.rows_per_pass):
            row = self.row + number * self.rows_per_pass
            place = first_row + row
            if place < self.head.shape[0]:
                source = self.smem + self.tile.offset(row, self.chunk)
                line = target + Int64(place) * Int64(self.head.stride[0]) * ELEMENT_BYTES
                for i in cutlass.range_constexpr(self.tile.spans):
                    along = i * self.tile.span_bytes
                    if (self.chunk * CHUNK_BYTES + along) < self.head.shape[1] * ELEMENT_BYTES:
                        store_words_global(line, along, load_words(source, along))

"""Tiles from global to shared memory by cp.async, rows and columns past the end as zeros."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels.ampere.config import CHUNK_BYTES, ELEMENT_BYTES
from cute_kernels.ampere.instructions import cp_async_16
from cute_kernels.ampere.shared_tile import SharedTile
from cute_kernels.invariant import LoopInvariant


class TileLoader(LoopInvariant):
    """What one thread copies of each tile of ``rows`` rows of a head.

    Neighbouring threads take the chunks of a span, then the next row; a thread's places lie at constant distances, so
    that it keeps one address on either side.
    """

    def __init__(
        self, tile: SharedTile, rows: int, threads: int, smem: Int32, head: cute.Tensor, thread: Int32
    ):
        """``head`` is (seqlen, head_dim) in global memory, ``smem`` where a tile begins, ``thread`` the number of this
        one of ``threads``."""
        self.tile = tile
        self.rows_per_pass = threads // tile.span
        self.passes = rows // self.rows_per_pass
        self.row, chunk = thread // tile.span, thread % tile.span
        self.smem = smem + tile.offset(self.row, chunk)
        self.seqlen = head.shape[0]
        self.stride = Int64(head.stride[0]) * ELEMENT_BYTES
        self.source = (
            Int64(head.iterator.toint()) + Int64(chunk * CHUNK_BYTES) + Int64(self.row) * self.stride
        )
        self.bytes_left = head.shape[1] * ELEMENT_BYTES - chunk * CHUNK_BYTES

    def load(self, first_row: Int32, slot: Int32, is_guarded: bool) -> None:
        """Start the copy of the tile from ``first_row`` on, ``slot`` bytes further in shared memory.

        Without ``is_guarded`` all of its rows must exist.
        """
        target, source = self.smem + slot, self.source + Int64(first_row) * self.stride
        for number in range(self.passes):
            passed = number * self.rows_per_pass
            for i in range(self.tile.spans):
                along = i * self.tile.span_bytes
                exists = self.bytes_left - along
                if is_guarded:
                    exists = cutlass.min(exists, self.seqlen - first_row - self.row - passed)
                cp_async_16(target, passed * self.tile.pitch + along, source, along, exists)
            source = source + self.stride * self.rows_per_pass

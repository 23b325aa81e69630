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

    def __init__(self, tile: SharedTile, rows: int, threads: int, smem: Int32, head: cute.Tensor):
        """``head`` is (seqlen, head_dim) in global memory, ``smem`` where a tile begins."""
        thread = cute.arch.thread_idx()[0]
        self.tile = tile
        self.rows_per_pass = threads // tile.span
        self.passes = rows // self.rows_per_pass
        self.row, chunk = thread // tile.span, thread % tile.span
        self.smem = smem + tile.offset(self.row, chunk)
        self.seqlen = head.shape[0]
        self.stride = Int64(head.stride[0]) * ELEMENT_BYTES
        self.source = Int64(head.iterator.toint()) + Int64(chunk * CHUNK_BYTES)
        # Bytes of this thread's chunk in each span: 16, or 0 past head_dim.
        left = head.shape[1] * ELEMENT_BYTES - chunk * CHUNK_BYTES
        self.sizes = [_clamp(left - i * tile.span_bytes, CHUNK_BYTES) for i in range(tile.spans)]

    def load(self, first_row: Int32, slot: Int32, is_guarded: bool) -> None:
        """Start the copy of the tile from ``first_row`` on, ``slot`` bytes further in shared memory.

        Without ``is_guarded`` all of its rows must exist.
        """
        row, target = first_row + self.row, self.smem + slot
        source = self.source + Int64(row) * self.stride
        for number in range(self.passes):
            passed = number * self.rows_per_pass
            exists = _clamp(self.seqlen - row - passed, 1) if is_guarded else 1
            for i, size in enumerate(self.sizes):
                along = i * self.tile.span_bytes
                cp_async_16(target, passed * self.tile.pitch + along, source, along, size * exists)
            source = source + self.stride * self.rows_per_pass


def _clamp(x: Int32, most: int) -> Int32:
    """``x`` between 0 and ``most``."""
    return cutlass.max(cutlass.min(Int32(x), most), 0)

"""What a warp reads of a tile in shared memory as operands of mma.sync, and what it writes of its results."""

from __future__ import annotations

from copy import copy

from cutlass import Int32

from cute_kernels.ampere.config import MMA_ROWS
from cute_kernels.ampere.instructions import ldmatrix_x4, store_word
from cute_kernels.ampere.shared_tile import SharedTile
from cute_kernels.fragments import LANES_PER_ROW, ROW_STRIDE
from cute_kernels.invariant import LoopInvariant

WORD_BYTES = 4
CHUNKS_PER_STEP = 2
"""Chunks of 16 bytes in the 16 columns that one mma.sync, or two side by side, take."""


class WarpOperand(LoopInvariant):
    """16 x 16 blocks of a tile, each by one ldmatrix.

    ``address`` is that of the tile, or of this warp's rows in it, ``place`` a lane's row and chunk in a block. The
    first block is ``first_step`` to the right.
    """

    def __init__(
        self, tile: SharedTile, address: Int32, place: tuple, transpose: bool, first_step: Int32 | int = 0
    ):
        self.tile, self.transpose, self.offset = tile, transpose, 0
        row, chunk = place
        self.address = address + tile.place(row, chunk + CHUNKS_PER_STEP * first_step)

    def at(self, slot: Int32) -> WarpOperand:
        """The same of a tile in the buffer that begins at ``slot``."""
        other = copy(self)
        other.address = self.address + slot
        return other

    def beyond(self, offset: int) -> WarpOperand:
        """The same of a tile that lies ``offset`` bytes further. It needs no address of its own."""
        other = copy(self)
        other.offset += offset
        return other

    def block(self, band: int, step: int, slot: Int32 | int = 0) -> tuple[Int32, Int32, Int32, Int32]:
        """The block ``band`` blocks down and ``step`` to the right."""
        twist, along = self.tile.step(CHUNKS_PER_STEP * step)
        address = (self.address + slot) ^ twist if twist else self.address + slot
        return ldmatrix_x4(address, self.offset + along + band * MMA_ROWS * self.tile.pitch, self.transpose)


class WarpTarget(LoopInvariant):
    """Where a warp's results go in a tile, rounded to 16 bits: two neighbouring columns are a word.

    ``address`` is that of the tile, or of this warp's rows in it; its columns begin ``first_step`` blocks of 16 to the
    right.
    """

    def __init__(self, tile: SharedTile, address: Int32, lane: Int32, first_step: Int32 | int = 0):
        self.tile, self.offset = tile, 0
        place = tile.place(lane // LANES_PER_ROW, CHUNKS_PER_STEP * first_step)
        self.address = address + place + lane % LANES_PER_ROW * WORD_BYTES

    def at(self, slot: Int32) -> WarpTarget:
        """As of ``WarpOperand``."""
        other = copy(self)
        other.address = self.address + slot
        return other

    def beyond(self, offset: int) -> WarpTarget:
        """The same of a tile that lies ``offset`` bytes further. It needs no address of its own."""
        other = copy(self)
        other.offset += offset
        return other

    def store(self, band: int, chunk: int, r: int, word: Int32) -> None:
        """The word of row ``r`` of the thread's two in a band of 16, in the 8 columns number ``chunk``."""
        twist, along = self.tile.step(chunk)
        below = self.offset + (band * MMA_ROWS + r * ROW_STRIDE) * self.tile.pitch
        store_word(self.address ^ twist, along + below, word)

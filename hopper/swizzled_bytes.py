"""Addresses of single bytes in a swizzled tile, for instructions that are given one."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int16, Int32

from cute_kernels.invariant import LoopInvariant

SWIZZLED_ROWS = 8
"""After which a swizzle begins again."""

SWIZZLE_MASKS = {128: 7, 64: 3, 32: 1}
"""Bytes of a swizzled row -> which of the address bits from 7 on flip those from 4 on."""


class SwizzledBytes:
    """Addresses in a staged tile of bytes as ``swizzled_layout`` lays it out: (rows, columns)."""

    def __init__(self, tensor: cute.Tensor, rows: int, columns: int):
        self.base = tensor.iterator.toint()
        self.rows, self.columns = rows, columns
        self.width = next(width for width in SWIZZLE_MASKS if columns % width == 0)

    def address(self, stage: Int32, row: Int32, chunk: int | Int32) -> Int32:
        """Of 16 bytes: columns 16 chunk to 16 chunk + 15 of a row."""
        offset = stage * (self.rows * self.columns) + self._part(chunk) * (self.rows * self.width)
        offset += row * self.width + self._in_part(chunk) * 16
        return self.base + (offset ^ ((offset >> 7 & SWIZZLE_MASKS[self.width]) << 4))

    def _part(self, chunk: int | Int32) -> int | Int32:
        """Which ``width`` bytes of the columns a chunk lies in."""
        return chunk // (self.width // 16)

    def _in_part(self, chunk: int | Int32) -> int | Int32:
        """Its number there."""
        return chunk % (self.width // 16)

    def place(self, stage: Int32, row: Int32, chunk: int | Int32) -> "SwizzledPlace":
        """``address``, from which those of other rows and chunks are short ways."""
        return SwizzledPlace(self.address(stage, row, chunk), self.rows, self.width)


class BytesByBits(SwizzledBytes):
    """The same by shifts, which take fewer instructions of a chunk that is not known before: it might be negative, for
    all that a division knows. Decoding has not been timed with it."""

    def _part(self, chunk: int | Int32) -> int | Int32:
        return chunk >> (self.width // 16).bit_length() - 1

    def _in_part(self, chunk: int | Int32) -> int | Int32:
        return chunk & self.width // 16 - 1


@dataclass(frozen=True)
class SwizzledPlace(LoopInvariant):
    """The address ``first`` of a row and a chunk of a staged tile."""

    first: Int32
    rows: int
    width: int

    def address(self, rows: int, chunks: int) -> Int32:
        """So many rows down, a multiple of ``SWIZZLED_ROWS``, and so many chunks on, which may set bits of the number
        of the chunk but not carry: a swizzle flips bits, and it flips those of all these rows alike."""
        assert rows % SWIZZLED_ROWS == 0
        in_row = self.width // 16
        offset = chunks // in_row * (self.rows * self.width) + rows * self.width
        return (self.first ^ chunks % in_row * 16) + offset


def store_16_bits(address: Int32, word: Int16) -> None:
    """To shared memory."""
    cute.arch.inline_ptx("st.shared.b16 [{$r0}], {$r1};", read_only_args=[address, word])

"""Addresses of single bytes in a swizzled tile, for instructions that are given one."""

import cutlass.cute as cute
from cutlass import Int16, Int32

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
        chunks = self.width // 16
        offset = stage * (self.rows * self.columns) + chunk // chunks * (self.rows * self.width)
        offset += row * self.width + chunk % chunks * 16
        return self.base + (offset ^ ((offset >> 7 & SWIZZLE_MASKS[self.width]) << 4))


def store_16_bits(address: Int32, word: Int16) -> None:
    """To shared memory."""
    cute.arch.inline_ptx("st.shared.b16 [{$r0}], {$r1};", read_only_args=[address, word])

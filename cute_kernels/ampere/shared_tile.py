"""Where the elements of a tile lie in shared memory, so that neither cp.async nor ldmatrix meets a bank twice.

A tile is row-major, and within a row chunks of 16 bytes are permuted in spans of 8 or 4: chunk c of row r lies at
c ^ twist(r). Eight rows that a matrix is read from lie a multiple of the span apart, so their twists put the same
chunk of each into other banks. Every formula here takes plain and traced integers.
"""

from dataclasses import dataclass
from typing import Any

from cute_kernels.ampere.config import CHUNK_BYTES, ELEMENT_BYTES, swizzle_span

MATRIX_ROWS = 8

ALIGNMENT = 128
"""Bytes that the address of a tile is a multiple of."""


@dataclass(frozen=True)
class SharedTile:
    """A tile of rows of ``columns`` 16-bit elements; its first byte is aligned to 128."""

    columns: int

    @property
    def pitch(self) -> int:
        """Bytes from row to row."""
        return self.columns * ELEMENT_BYTES

    @property
    def span(self) -> int:
        """Chunks that are permuted among themselves."""
        return swizzle_span(self.columns)

    @property
    def spans(self) -> int:
        return self.columns * ELEMENT_BYTES // (CHUNK_BYTES * self.span)

    @property
    def span_bytes(self) -> int:
        return self.span * CHUNK_BYTES

    def twist(self, row: Any) -> Any:
        """What the chunk number of a row is xor-ed with; the same for rows 8 apart."""
        return row % 8 if self.span == 8 else row // 2 % 4

    def offset(self, row: Any, chunk: Any) -> Any:
        """Bytes from the start of the tile to a chunk below ``span``."""
        return row * self.pitch + (chunk ^ self.twist(row)) * CHUNK_BYTES

    def place(self, row: Any, chunk: Any) -> Any:
        """The same for any chunk of the row."""
        return self.offset(row, chunk % self.span) + chunk // self.span * self.span_bytes

    def step(self, chunk: int) -> tuple[int, int]:
        """From the address of a chunk of a row to that of the chunk ``chunk`` further, if no bit is set in both
        numbers: the bits to be xor-ed, and what is to be added then."""
        return chunk % self.span * CHUNK_BYTES, chunk // self.span * self.span_bytes


def rows_first(lane: Any) -> tuple[Any, Any]:
    """(row of 16, chunk of 2) whose address a lane gives, so that ldmatrix makes an A operand of a tile as it lies, or
    with transposition the B operands of two neighbouring 8 columns over 16 rows."""
    return lane % 16, lane // 16


def chunks_first(lane: Any) -> tuple[Any, Any]:
    """The same for the B operands of two neighbouring 8 rows, 16 columns deep, without transposition."""
    return lane % MATRIX_ROWS + lane // 16 * MATRIX_ROWS, lane // MATRIX_ROWS % 2

"""Rotation of the columns of a row by an angle each pair, in float32."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_kernels.append.config import VECTOR
from cute_kernels.integers import maximum, minimum
from cute_kernels.invariant import LoopInvariant


def load(row: cute.Tensor, number: Int32, elements: int) -> cute.Tensor:
    """The ``elements`` columns with this number of a row, in registers."""
    part = cute.make_rmem_tensor(elements, row.element_type)
    cute.autovec_copy(cute.local_tile(row, (elements,), (number,)), part)
    return part


def widen(part: cute.Tensor) -> cute.Tensor:
    """Registers in float32."""
    wide = cute.make_rmem_tensor(cute.size(part), Float32)
    wide.store(part.load().to(Float32))
    return wide


@dataclass(frozen=True)
class Rotary(LoopInvariant):
    """Cosines and sines of the angles of each position, (positions, rotary_dim / 2).

    (x, y) becomes (x cos - y sin, x sin + y cos). Of a pair, x and y are neighbours, or half of rotary_dim apart.
    Columns behind rotary_dim stay as they are.
    """

    cos: cute.Tensor
    sin: cute.Tensor
    is_interleaved: bool

    def _half(self) -> Int32:
        """Chunks of VECTOR columns in half of rotary_dim."""
        return self.cos.shape[1] // VECTOR

    @cute.jit
    def partner(self, chunk: Int32) -> Int32:
        """The chunk whose columns turn with those of ``chunk``; itself if none or its own do."""
        partner = chunk
        if const_expr(not self.is_interleaved):
            half = self._half()
            if chunk < 2 * half:
                partner = chunk + half if chunk < half else chunk - half
        return partner

    @cute.jit
    def angles(self, position: Int32, chunk: Int32) -> tuple[cute.Tensor, cute.Tensor]:
        """Cosines and sines for the columns of ``chunk``, of the nearest position that the tables have."""
        elements = VECTOR // 2 if const_expr(self.is_interleaved) else VECTOR
        row = minimum(maximum(position, 0), self.cos.shape[0] - 1)
        half = self._half()
        number = chunk
        if const_expr(self.is_interleaved):
            # A chunk that is not rotated reads the first angles, and uses none.
            number = chunk if chunk < 2 * half else Int32(0)
        else:
            number = chunk % half
        cos = load(self.cos[row, None], number, elements)
        return cos, load(self.sin[row, None], number, elements)

    @cute.jit
    def turn(self, own: cute.Tensor, other: cute.Tensor, angles: tuple, chunk: Int32):
        """Rotate ``own``, the columns of ``chunk`` in float32, in place; ``other`` are those of its partner."""
        half = self._half()
        if chunk < 2 * half:
            cos, sin = widen(angles[0]), widen(angles[1])
            if const_expr(self.is_interleaved):
                for i in cutlass.range_constexpr(VECTOR // 2):
                    x, y = own[2 * i], own[2 * i + 1]
                    own[2 * i] = x * cos[i] - y * sin[i]
                    own[2 * i + 1] = x * sin[i] + y * cos[i]
            else:
                sign = Float32(-1.0) if chunk < half else Float32(1.0)
                for i in cutlass.range_constexpr(VECTOR):
                    own[i] = own[i] * cos[i] + sign * sin[i] * other[i]

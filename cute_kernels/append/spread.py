"""Rows that lie across neighbouring lanes of a warp, VECTOR columns in each: their largest number, their Hadamard
transform. All lanes of a warp take part; those without columns have zeros."""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.append.config import MAX_SPREAD, SIGN_WORDS, VECTOR

STEPS = (MAX_SPREAD // VECTOR).bit_length() - 1
"""Of a walk over all lanes of a warp, which doubles its distance each time."""

LARGEST_E4M3 = 448.0
CHUNKS_OF_WORD = 32 // VECTOR


@cute.jit
def lanes_of(chunks: Int32) -> Int32:
    """Lanes that a row of so many chunks has: a power of two, so that no row lies in two warps."""
    lanes = Int32(1)
    for _ in cutlass.range_constexpr(STEPS):
        lanes = lanes if lanes >= chunks else lanes * 2
    return lanes


@cute.jit
def scale_of(values: cute.Tensor, lanes: Int32) -> Float32:
    """What the numbers of a row are divided by so that its largest is that of e4m3. NaN are passed over."""
    largest = Float32(0.0)
    for i in cutlass.range_constexpr(VECTOR):
        largest = cute.arch.fmax(largest, cute.arch.fmax(values[i], -values[i]))
    for step in cutlass.range_constexpr(STEPS):
        other = cute.arch.shuffle_sync_bfly(largest, offset=1 << step)
        largest = cute.arch.fmax(largest, other) if lanes > (1 << step) else largest
    return largest / Float32(LARGEST_E4M3)


@cute.jit
def multiply_by_hadamard(values: cute.Tensor, chunk: Int32, chunks: Int32):
    """x diag(signs) H in place, of which this lane has ``chunk``: H is made of one matrix for each power of two in the
    number of columns, the largest first.

    Such a block begins at a multiple of its size, so that its lanes are the same as their numbers say. It has as many
    chunks as the highest bit in which ``chunk`` and ``chunks`` differ.
    """
    minus = signs_of(chunk)
    for i in cutlass.range_constexpr(VECTOR):
        values[i] = -values[i] if (minus >> i) % 2 != 0 else values[i]
    for step in cutlass.range_constexpr(VECTOR.bit_length() - 1):
        for i in cutlass.range_constexpr(VECTOR):
            if cutlass.const_expr(i >> step & 1 == 0):
                low, high = values[i], values[i + (1 << step)]
                values[i], values[i + (1 << step)] = low + high, low - high
    factor, bits = Float32(1.0 / math.sqrt(VECTOR)), chunk ^ chunks
    for step in cutlass.range_constexpr(STEPS):
        is_within = bits >= (2 << step)
        sign = Float32(-1.0) if (chunk >> step) % 2 != 0 else Float32(1.0)
        for i in cutlass.range_constexpr(VECTOR):
            other = cute.arch.shuffle_sync_bfly(values[i], offset=1 << step)
            values[i] = sign * values[i] + other if is_within else values[i]
        factor = factor * Float32(math.sqrt(0.5)) if is_within else factor
    for i in cutlass.range_constexpr(VECTOR):
        values[i] = values[i] * factor


@cute.jit
def signs_of(chunk: Int32) -> Int32:
    """A bit for each column of a chunk, the first lowest, set for a minus; others above them."""
    word = Int32(0)
    for number in cutlass.range_constexpr(len(SIGN_WORDS)):
        word = Int32(as_signed(SIGN_WORDS[number])) if chunk // CHUNKS_OF_WORD == number else word
    return word >> (chunk % CHUNKS_OF_WORD * VECTOR)


def as_signed(bits: int) -> int:
    return bits - (1 << 32) if bits >> 31 else bits

"""Hadamard transform of rows that lie across the lanes of a warp, bit for bit what butterflies in PyTorch give."""

import math

import cutlass.cute as cute
from cutlass import Float32, Int32


def hadamard(values: cute.Tensor, first: int, size: int, lane: Int32, lanes: int, chunk: int):
    """x H in place, for one block of n columns of a row, n a power of two.

    ``lanes`` neighbouring lanes share the row, and ``values`` holds a lane's part: the block's chunks of ``chunk``
    columns are dealt out in turn, and this lane's ``size`` = n / lanes columns begin at ``first``. ``lane`` is its
    number among them. Butterflies run over the bits of the column, lowest first, so those in between are shuffles.
    """
    half = 1
    while half < size * lanes:
        if chunk <= half < chunk * lanes:
            _butterflies_across(values, first, size, lane, half // chunk)
        else:
            _butterflies_within(values, first, size, half if half < chunk else half // lanes)
        half *= 2


def _butterflies_within(values: cute.Tensor, first: int, size: int, distance: int):
    for i in range(size):
        if i // distance % 2 == 0:
            low, high = values[first + i], values[first + i + distance]
            values[first + i], values[first + i + distance] = low + high, low - high


def _butterflies_across(values: cute.Tensor, first: int, size: int, lane: Int32, distance: int):
    """The lower lane of two gets the sum, the upper one the difference."""
    sign = Float32(1 - lane // distance % 2 * 2)
    for i in range(first, first + size):
        other = cute.arch.shuffle_sync_bfly(values[i], offset=distance)
        values[i] = _add_signed(values[i], sign, other)


def _add_signed(x: Float32, sign: Float32, y: Float32) -> Float32:
    """sign x + y with sign +-1: the product is exact, so this is the sum or the difference, rounded once."""
    return cute.arch.inline_ptx(
        "fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Float32], read_only_args=[x, sign, y]
    )


def hadamard_factor(size: int) -> float:
    """What makes a Hadamard matrix of ``size`` rows orthogonal."""
    return 1.0 / math.sqrt(size)


def scale_part(values: cute.Tensor, first: int, size: int, factor: float):
    """Multiply ``size`` of the values, from ``first`` on. No sum may follow: it would be contracted to an FMA."""
    for i in range(first, first + size):
        values[i] = values[i] * Float32(factor)

"""How differences of means lie at the edges between runs: as operand B of WGMMA in 16 bits, whose A are sums of P."""

import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32

from cute_kernels.fast_math import pack, unpack
from hopper.mean.config import WORDS_OF_EDGES

WORDS_PER_PART = WORDS_OF_EDGES // 2
"""16 bytes of a column, which move together where the operand is swizzled."""

COLUMNS_PER_SWAP = 4
"""Of each so many columns the parts lie the other way round than of the last: a swizzle of 32 bytes."""


def store_difference(step: cute.Tensor, column: Int32, edge: Int32, difference: Float32):
    """To int32 (8 columns), in the order of shared memory, at an edge of ``EDGES_AT_ONCE``.

    A difference is a sum of two numbers of bfloat16, and so is a sum of P (``split``): of the 16 products of a step of
    WGMMA an edge has four, numbers 2 e and 2 e + 1 with the larger number and 8 + 2 e and 9 + 2 e with the smaller.
    """
    larger = pack(difference, difference, BFloat16)
    rest = difference - unpack(larger, BFloat16)[0]
    swap = (column // COLUMNS_PER_SWAP) % 2
    for part, word in enumerate((larger, pack(rest, rest, BFloat16))):
        step[WORDS_OF_EDGES * column + WORDS_PER_PART * (swap ^ part) + edge] = word


def split(x: Float32) -> Int32:
    """``x`` as a pair of bfloat16 of which it is the sum, to 17 bits."""
    larger = unpack(pack(x, x, BFloat16), BFloat16)[0]
    return pack(x, x - larger, BFloat16)

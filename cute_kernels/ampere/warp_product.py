"""Products of one warp by mma.sync, of any number of 16 x 16 blocks."""

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from cute_kernels.ampere.instructions import as_fragment, mma
from cute_kernels.fragments import COLUMNS_PER_GROUP

WORDS_PER_GROUP = 4
"""Elements that a thread holds of 16 rows by 8 columns."""


def make_accumulator(columns: int) -> cute.Tensor:
    """Of 16 rows, in the shape that ``cute_kernels.fragments`` describes."""
    return cute.make_rmem_tensor(((2, 2, columns // COLUMNS_PER_GROUP), 1, 1), Float32)


def mma_pair(acc: cute.Tensor, pair: int, a: cute.Tensor, b: tuple) -> None:
    """Two products side by side, 16 rows by 16 columns: acc, of columns number ``pair``, += A B."""
    for i in range(2):
        mma(acc, (2 * pair + i) * WORDS_PER_GROUP, a, as_fragment(b[2 * i : 2 * i + 2], a.element_type))


def multiply(
    accs: list[cute.Tensor],
    steps: int,
    dtype: type[cutlass.Numeric],
    a_block: Callable[[int, int], tuple],
    b_block: Callable[[int, int], tuple],
) -> None:
    """accs += A B, an accumulator for each band of 16 rows; 16 ``steps`` deep.

    ``a_block`` of (band, step) and ``b_block`` of (pair of 8 columns, step) give the words of operands of ``dtype``.
    They are called one pair before what they read is used.
    """
    pairs = cute.size(accs[0]) // (2 * WORDS_PER_GROUP)
    places = [(step, pair) for step in range(steps) for pair in range(pairs)]

    def read(step: int, pair: int) -> tuple[list[cute.Tensor], tuple]:
        bands = range(len(accs)) if pair == 0 else ()
        return [as_fragment(a_block(band, step), dtype) for band in bands], b_block(pair, step)

    a: list[cute.Tensor] = []
    following = read(*places[0])
    for number, (_, pair) in enumerate(places):
        a, b = following[0] or a, following[1]
        if number + 1 < len(places):
            following = read(*places[number + 1])
        for band, acc in enumerate(accs):
            mma_pair(acc, pair, a[band], b)

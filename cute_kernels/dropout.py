"""Dropout of P in a tile: which elements of a thread are kept. ``philox`` says how the mask is made."""

from dataclasses import dataclass, replace
from functools import reduce
from operator import or_

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from cute_kernels.fast_math import pin, unpack
from cute_kernels.fragments import (
    COLUMNS_PER_GROUP,
    COLUMNS_PER_PAIR,
    ROWS_PER_THREAD,
    ROWS_PER_WARP,
    as_rows,
)
from cute_kernels.invariant import LoopInvariant
from cute_kernels.philox import Words, mask_key, philox

STEPS = 256
"""Values of a random byte."""

# Bytes of a word: 1 in each, its highest bit (sign), and all bits but that.
EACH_BYTE, SIGNS, BELOW_SIGNS = 0x01010101, 0x80808080, 0x7F7F7F7F
NO_MAJORITY = 0x17
"""Truth table of a three-operand logic operation (LOP3): at most one of the three bits is set."""

OTHER_LANE = 4
"""Lanes so far apart hold the two rows of a pair, 2 a and 2 a + 1, and exchange words."""

PAIRS_PER_BLOCK = 4
"""By how much a word of Philox's counter grows from a block of 16 rows, or of as many columns, to the next."""

COLUMNS_PER_COUNT = ROWS_PER_WARP // PAIRS_PER_BLOCK
"""Columns for each count, though the four of a count do not lie next to each other (``philox``)."""

LAST_SLOT = 3
"""Half a byte has a bit for each of two columns in two blocks, from slot 0 up; a mark begins in the last slot."""

COLUMNS_PER_CALLS = 2 * ROWS_PER_WARP
"""Two blocks of columns, in which two lanes make a call each."""

COLUMNS_PER_WORD = 64
GROUPS_PER_WORD = COLUMNS_PER_WORD // COLUMNS_PER_GROUP
"""Groups of 8 columns, of which a thread holds two in each of two rows: 32 elements, a bit each."""


@dataclass(frozen=True)
class Dropout(LoopInvariant):
    """Dropout of one launch.

    ``key`` is that of Philox. Each byte of ``dropped`` is the number of values of a random byte, 0 to 255, for which an
    element is dropped. What is kept is multiplied by ``factor``, 256 / (256 - that number).
    """

    key: Words
    dropped: Uint32
    factor: Float32

    @staticmethod
    def of(words: cute.Tensor, kept: Int32) -> "Dropout":
        """From seed and offset, int64 (2,), and for how many values of a random byte, 1 to 256, an element is kept."""
        factor = Float32(float(STEPS)) / Float32(kept)
        return Dropout(mask_key(words), Uint32(STEPS - kept) * Uint32(EACH_BYTE), factor)

    @staticmethod
    def all_of(arguments: tuple) -> "tuple[Dropout, ...]":
        """(``of`` of the arguments,), or () without arguments: a config without dropout."""
        return (Dropout.of(*arguments),) if arguments else ()

    def for_rows(
        self, row: Int32, column: Int32, head: Int32, batch: Int32, is_transposed: bool = False
    ) -> "RowDropout":
        """Dropout in a thread's two rows, ``row`` and the one 8 further on, from ``column``, the thread's first. Rows
        are queries, or keys if ``is_transposed``."""
        return RowDropout(self, row, column, head, batch, is_transposed)

    def marks_kept(self, word: Uint32) -> Uint32:
        """A word in which the highest bit of each byte says whether its element is kept; other bits may be anything.

        A byte x is kept if it is less than 256 - d, d being that of ``dropped``: if x + d does not carry out of the
        byte. The lower 7 bits are added, and the carry out of bit 7 is the majority of both highest bits and the sum's.
        """
        low = (word & Uint32(BELOW_SIGNS)) + (self.dropped & Uint32(BELOW_SIGNS))
        return cute.arch.lop3(word, self.dropped, low, NO_MAJORITY)


@dataclass(frozen=True)
class RowDropout(LoopInvariant):
    """Dropout in a thread's two rows, 8 apart, of a head of Q and a sequence.

    ``row`` is the number of the first in its sequence, ``column`` that of the thread's first column in the first tile.
    """

    dropout: Dropout
    row: Int32
    column: Int32
    head: Int32
    batch: Int32
    is_transposed: bool

    def anew(self) -> "RowDropout":
        """The same behind a barrier to the compiler, which would else work out what all tiles share ahead of the loop
        and hold it in registers."""
        row, column, head, batch = (pin(x, Int32) for x in (self.row, self.column, self.head, self.batch))
        return RowDropout(self.dropout, row, column, head, batch, self.is_transposed)

    @property
    def odd(self) -> Uint32:
        """The last bit of the rows' numbers."""
        return Uint32(self.row & 1)

    def kept(self, tile: Int32, tile_columns: int, columns: int) -> "Kept":
        """What is kept of the ``columns`` columns in which the thread's warp has elements, of tile number ``tile``, the
        tiles having ``tile_columns`` each. Both are multiples of 32, or ``columns`` is 16.

        The compiler cannot put this off to where the bits are used, so it runs under the GEMM that was issued before.
        """
        first = Uint32(tile * (tile_columns // COLUMNS_PER_COUNT))
        if columns == ROWS_PER_WARP:
            marks, shifts = self._marks_of_one(first)
            return Kept(
                (pin(Int32(_gather([marks], shifts)), Int32),), self.is_transposed, self.dropout.factor
            )
        words, shifts = [], self._shifts((self.odd, self.odd ^ Uint32(1)))
        for start in range(0, columns, COLUMNS_PER_WORD):
            pairs = range(start, min(start + COLUMNS_PER_WORD, columns), COLUMNS_PER_CALLS)
            marks = [self._marks(first + Uint32(pair // COLUMNS_PER_COUNT)) for pair in pairs]
            words.append(pin(Int32(_gather(marks, shifts)), Int32))
        return Kept(tuple(words), self.is_transposed, self.dropout.factor)

    def _marks(self, count: Uint32) -> list[Uint32]:
        """``marks_kept`` of the four words that a thread needs of two neighbouring blocks of 16 columns: two of its own
        call of Philox, then the two that the other lane made."""
        words = self._call(count + self.odd * Uint32(PAIRS_PER_BLOCK))
        own, others = (words[::2], words[1::2]) if self.is_transposed else (words[:2], words[2:])
        received = (Uint32(cute.arch.shuffle_sync_bfly(Int32(x), offset=OTHER_LANE)) for x in others)
        return [self.dropout.marks_kept(word) for word in (*own, *received)]

    def _marks_of_one(self, count: Uint32) -> tuple[list[Uint32], list[Uint32]]:
        """``marks_kept`` of the two words that a thread needs of a single block, and their shifts. Both lanes of a pair
        make the same call, and nothing is exchanged."""
        words = self._call(count)
        first, second = (words[::2], words[1::2]) if self.is_transposed else (words[:2], words[2:])
        block = Uint32(self.column >> 4) + (count >> Uint32(2))
        is_first = (block ^ self.odd) & Uint32(1) == Uint32(0)
        chosen = [select(is_first, a, b) for a, b in zip(first, second, strict=True)]
        return [self.dropout.marks_kept(word) for word in chosen], self._shifts((Uint32(0),))

    def _call(self, count: Uint32) -> Words:
        """Philox's four words for the thread's rows, and for the columns ``count`` counts after its first."""
        line = Uint32((self.row >> 4) * PAIRS_PER_BLOCK + ((self.row >> 1) & 3))
        across = Uint32((self.column >> 4) * PAIRS_PER_BLOCK + ((self.column >> 1) & 3)) + count
        pair = (line, across) if self.is_transposed else (across, line)
        return philox((*pair, Uint32(self.head), Uint32(self.batch)), self.dropout.key)

    def _shifts(self, blocks: tuple[Uint32, ...]) -> list[Uint32]:
        """By how many bits the marks of each word are moved down in half a byte, so that they come to lie in the order
        of the columns: for each of ``blocks``, 0 or 1 in a pair, and each of two columns."""
        parity = Uint32((self.row >> 4) & 1)
        columns = (parity, parity ^ Uint32(1))
        return [
            Uint32(LAST_SLOT) - (block * Uint32(COLUMNS_PER_PAIR) + column)
            for block in blocks
            for column in columns
        ]


def _gather(pairs: list[list[Uint32]], shifts: list[Uint32]) -> Uint32:
    """The marks of one or two pairs of blocks as a word, a bit an element: those of the first pair in the lower half of
    each byte."""
    bits = []
    for number, shift in enumerate(shifts):
        word = (pairs[0][number] >> Uint32(4)) & Uint32(SIGNS >> 4)
        if len(pairs) > 1:
            word = (pairs[1][number] & Uint32(SIGNS)) | word
        bits.append(word >> shift)
    return reduce(or_, bits)


@dataclass(frozen=True)
class Kept(LoopInvariant):
    """A bit for each element of a thread's two rows in a tile, set for those that are kept: a word for 64 columns.
    What is kept is to be multiplied by ``factor``, which nothing here does."""

    words: tuple[Int32, ...]
    is_transposed: bool
    factor: Float32

    def places(self, groups: int) -> list[tuple[int, int]]:
        """(row, group of 8 columns) in the order of their bits: ptxas makes seven neighbouring bits predicates at
        once."""
        places = [(r, group) for r in range(ROWS_PER_THREAD) for group in range(groups)]
        return sorted(places, key=lambda place: (self._byte(*place), place[1]))

    def _byte(self, r: int, group: int) -> int:
        half = group % 2
        return ROWS_PER_THREAD * half + r if self.is_transposed else 2 * r + half

    def has(self, r: int, group: int, e: int) -> object:
        """Whether an element is kept: row ``r``, and of the two columns that the thread has in a group the one
        ``e``."""
        bit = 8 * self._byte(r, group) + COLUMNS_PER_PAIR * (group // 2 % 4) + e
        return (self.words[group // GROUPS_PER_WORD] & Int32(1 << bit if bit < 31 else -(1 << 31))) != 0

    def apply(self, acc: cute.Tensor, r: int, first_group: int = 0) -> None:
        """Zero what is dropped of row ``r`` of ``acc``, whose first columns are those of ``first_group``."""
        rows = as_rows(acc)
        for row, group in self.places(rows.shape[1][1]):
            if row == r:
                for e in range(COLUMNS_PER_PAIR):
                    rows[r, (e, group)] = self.choose(rows[r, (e, group)], r, first_group + group, e)

    @cute.jit
    def choose(
        self,
        x: Float32,
        r: cutlass.Constexpr[int],
        group: cutlass.Constexpr[int],
        e: cutlass.Constexpr[int],
    ) -> Float32:
        """x, or 0 if its element (``has``) is dropped."""
        return x if self.has(r, group, e) else Float32(0.0)


def zero_dropped(acc: cute.Tensor, r: int, kept: tuple[Kept, ...], first_group: int = 0) -> None:
    """``Kept.apply`` where there is dropout; ``kept`` is empty or of one."""
    for of_tile in kept:
        of_tile.apply(acc, r, first_group)


@cute.jit
def select(is_first, a: Uint32, b: Uint32) -> Uint32:
    return a if is_first else b


def drop_gradient(acc_dP: cute.Tensor, kept: tuple[Kept, ...]) -> None:
    """dP, in place, from the gradient of the dropped and scaled P: 0 where P was dropped, else times the factor."""
    for of_tile in kept:
        # Anew, or else the predicates of P, for which there is no room, would be kept till here.
        of_tile = replace(of_tile, words=tuple(pin(word, Int32) for word in of_tile.words))
        rows = as_rows(acc_dP)
        for r, group in of_tile.places(rows.shape[1][1]):
            for e in range(COLUMNS_PER_PAIR):
                rows[r, (e, group)] = of_tile.choose(rows[r, (e, group)], r, group, e)
        multiply_all(acc_dP, (of_tile.factor,))


@cute.jit
def drop_gradient_as(acc_dP: cute.Tensor, dropped: cute.Tensor, factor: Float32):
    """``drop_gradient`` without the bits: ``dropped`` is P in 16 bits after dropout, in the order of the accumulator,
    and an element counts as dropped where that is 0.

    Where P is 0 without being dropped this does no harm: dS = P (dP - delta) is 0 whatever dP is.
    """
    rows, words = as_rows(acc_dP), cute.recast_tensor(dropped, Int32)
    for group in cutlass.range_constexpr(rows.shape[1][1]):
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            pair = unpack(words[r + ROWS_PER_THREAD * group], dropped.element_type)
            for e in cutlass.range_constexpr(COLUMNS_PER_PAIR):
                x = rows[r, (e, group)]
                rows[r, (e, group)] = Float32(0.0) if pair[e] == Float32(0.0) else x * factor


def multiply_all(values: cute.Tensor, factors: tuple[Float32, ...]) -> None:
    """Multiply each of some registers by each factor, of which there may be none."""
    for factor in factors:
        for i in range(cute.size(values)):
            values[i] = values[i] * factor

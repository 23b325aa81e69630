"""How the key blocks of all sequences are shared out over CTAs.

Think of all key blocks in a row: those of a tile behind each other, the tiles of a sequence, the sequences of the
batch. Each CTA takes a piece of the row, all pieces as long as each other to within a block. So every CTA reads the
same number of bytes, whatever the lengths, and none is idle while another works. A tile of which more than one CTA has
a part is put together by another kernel (``combine``). (The idea is that of Stream-K, Osama et al., PPoPP 2023;
FlashMLA and FlashInfer share out decoding in this way.)

There is such a row for each of some K/V heads (``HeadsTogether``), all of the same lengths, and as many CTAs side by
side have the same piece of them.

Plain arithmetic on integers: the same functions serve the kernel (traced) and the host tests (Python ints).
"""

from dataclasses import dataclass
from typing import Any

from cute_kernels.integers import ceil_div, divide, maximum, minimum
from cute_kernels.invariant import LoopInvariant
from cute_kernels.seqlen import SeqlenInfo
from cute_kernels.visible import first_key, keys_end
from cute_kernels.window import Window


@dataclass(frozen=True)
class Pieces(LoopInvariant):
    """``units`` key blocks in a row, cut into pieces for ``ctas`` CTAs, the first of which may be a block longer."""

    units: Any
    ctas: Any

    def begin(self, cta: Any) -> Any:
        """The first block of a CTA, and the end of the one before."""
        base, longer = self._lengths()
        return cta * base + minimum(cta, longer)

    def owner(self, unit: Any) -> Any:
        """The last CTA whose piece begins at a block or before."""
        base, longer = self._lengths()
        in_longer = longer * (base + 1)
        behind = divide(maximum(unit - in_longer, 0), maximum(base, 1))
        return divide(minimum(unit, in_longer), base + 1) + behind

    def _lengths(self) -> tuple[Any, Any]:
        """Of most pieces, and how many are a block longer."""
        base = divide(self.units, self.ctas)
        return base, self.units - base * self.ctas


MOST_TOGETHER = 16
"""Neighbouring K/V heads: enough for 2 KB of keys side by side in memory."""


def heads_together(kv_heads: Any, ctas: Any) -> Any:
    """The most K/V heads, up to MOST_TOGETHER, such that as many CTAs visit each of them at the same time: a divisor of
    both counts."""
    most = 1
    for count in range(2, MOST_TOGETHER + 1):
        divides = 1 - minimum(kv_heads % count + ctas % count, 1)
        most = maximum(most, count * divides)
    return most


def launched_together(together: Any) -> Any:
    """CTAs side by side that are launched as a cluster, where ``together`` K/V heads are visited at the same time: two,
    which the SMs of a TPC take, if there are pairs of heads. What two heads have of a key lies side by side in memory,
    and such SMs stay in step (``decode_neighbours.json``). Clusters of four do not all fit at once."""
    return 2 - together % 2


@dataclass(frozen=True)
class HeadsTogether(LoopInvariant):
    """``count`` neighbouring K/V heads, which as many neighbouring CTAs visit at the same keys; ``own`` is the number
    of this CTA's among them. What they have side by side in memory is read at about the same time, and all of them have
    as many tiles."""

    count: Any = 1
    own: Any = 0

    def head(self, number: Any) -> Any:
        """The K/V head that is number ``number`` of this CTA's."""
        return number * self.count + self.own

    def row_tile(self, number: Any) -> Any:
        """The tile of a K/V head that is number ``number`` of this CTA's."""
        return number

    def cta(self, piece: Any) -> Any:
        """That which has a piece of this CTA's row."""
        return piece * self.count + self.own


@dataclass(frozen=True)
class TileParts(LoopInvariant):
    """One tile of ``blocks`` key blocks, which stand in the row from ``start`` on, and the parts of it that CTAs have.

    Parts begin at multiples of ``step`` blocks, so that there are no more of them than are allowed.
    """

    pieces: Pieces
    start: Any
    blocks: Any
    step: Any

    @staticmethod
    def of(pieces: Pieces, start: Any, blocks: Any, max_splits: Any) -> "TileParts":
        """With parts of any size where ``max_splits`` is None."""
        step = 1 if max_splits is None else divide(blocks + max_splits - 1, max_splits)
        return TileParts(pieces, start, blocks, step)

    def begin(self, cta: Any) -> Any:
        """The block of the tile at which a CTA's part begins and that of the one before ends: 0 for those before the
        tile, ``blocks`` for those behind it."""
        inside = maximum(self.pieces.begin(cta) - self.start, 0)
        if not isinstance(self.step, int) or self.step > 1:
            inside = divide(inside + self.step - 1, self.step) * self.step
        return minimum(inside, self.blocks)

    @property
    def first_cta(self) -> Any:
        """The CTA that has the first part."""
        return self.pieces.owner(self.start)

    @property
    def last_cta(self) -> Any:
        """A CTA behind which none has a part."""
        return self.pieces.owner(self.start + self.blocks - 1)


@dataclass(frozen=True)
class SequenceBlocks(LoopInvariant):
    """The key blocks of ``tile_n`` keys that the queries of a sequence visit, the same for each of its tiles: from
    ``begin`` to ``end``, one at least, so that queries without keys are written too."""

    seqlens: SeqlenInfo
    window: Window
    tile_n: int
    tile_cost: Any = 0

    @property
    def end(self) -> Any:
        return maximum(divide(self.seqlens.seqlen_k + self.tile_n - 1, self.tile_n), 1)

    @property
    def begin(self) -> Any:
        """The last block is visited in any case."""
        if not self.window.has_left:
            return 0
        return minimum(divide(self.first_seen, self.tile_n), self.end - 1)

    @property
    def first_seen(self) -> Any:
        """No query sees a key before this one."""
        if not self.window.has_left:
            return 0
        return maximum(first_key(self.window, self._first_level), 0)

    @property
    def count(self) -> Any:
        return self.end - self.begin

    @property
    def units(self) -> Any:
        """Of the row that pieces are cut from: the blocks, and ``tile_cost`` behind them."""
        return self.count if isinstance(self.tile_cost, int) else self.count + self.tile_cost

    @property
    def unmasked_end(self) -> Any:
        """One past the last block whose keys no query has behind the last that it sees."""
        keys = self.seqlens.seqlen_k
        if self.window.has_right:
            keys = minimum(keys, maximum(keys_end(self.window, self._first_level + 1), 0))
        return divide(keys, self.tile_n)

    @property
    def left_masked_end(self) -> Any:
        """One past the last block that has a key before the first that some query sees."""
        if not self.window.has_left:
            return 0
        return ceil_div(maximum(first_key(self.window, self.seqlens.seqlen_k - 1), 0), self.tile_n)

    @property
    def _first_level(self) -> Any:
        """The key that the first query is level with."""
        return self.seqlens.seqlen_k - self.seqlens.seqlen_q

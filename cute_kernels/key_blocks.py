"""The walk of a query tile over its keys: which key blocks it visits, and which of them need no mask.

Plain arithmetic on integers: the same functions serve the kernels (traced) and the host tests (Python ints).
"""

from dataclasses import dataclass
from typing import Any

from cute_kernels.integers import ceil_div, maximum, minimum
from cute_kernels.invariant import LoopInvariant
from cute_kernels.problem import ENTRY_BITS
from cute_kernels.seqlen import SeqlenInfo
from cute_kernels.visible import first_key, keys_end
from cute_kernels.window import Window


@dataclass(frozen=True)
class BlockRange:
    """Which key blocks tiles of ``tile_m`` queries visit, in blocks of ``tile_n`` keys. ``spare`` keys at the end, or
    fewer, are no block of their own where there is one before them: whoever visits that has them with it."""

    tile_m: int
    tile_n: int
    window: Window
    spare: int = 0

    def of(self, m_block: Any, seqlens: SeqlenInfo) -> "KeyBlocks":
        """Those of one tile."""
        return KeyBlocks(self, m_block, seqlens, self.end(m_block, seqlens), self.begin(m_block, seqlens))

    def end(self, m_block: Any, seqlens: SeqlenInfo) -> Any:
        """One past the last block with a visible key; at least 1, so that a row without keys is still written."""
        n_end = ceil_div(seqlens.seqlen_k, self.tile_n)
        if self.window.has_right:
            last_row_keys = self.keys_end((m_block + 1) * self.tile_m, seqlens)
            if self.spare:
                keys = minimum(seqlens.seqlen_k, last_row_keys)
                n_end = ceil_div(keys - self.spare, self.tile_n)
            else:
                n_end = minimum(n_end, ceil_div(last_row_keys, self.tile_n))
        return maximum(n_end, 1)

    def unmasked_end(self, m_block: Any, seqlens: SeqlenInfo) -> Any:
        """One past the last block in which no row of the tile has a last key that it sees, or the sequence an end."""
        n_full = seqlens.seqlen_k // self.tile_n
        if self.window.has_right:
            first_row_keys = self.keys_end(m_block * self.tile_m + 1, seqlens)
            n_full = minimum(n_full, maximum(first_row_keys, 0) // self.tile_n)
        return n_full

    def begin(self, m_block: Any, seqlens: SeqlenInfo) -> Any:
        """The first block with a visible key, if there is one; below ``end`` for every tile that has a query."""
        if not self.window.has_left:
            return 0
        return maximum(self._first_key(m_block * self.tile_m, seqlens), 0) // self.tile_n

    def left_masked_end(self, m_block: Any, seqlens: SeqlenInfo) -> Any:
        """One past the last block with a key that some row of the tile does not see as it lies too far before it."""
        if not self.window.has_left:
            return 0
        last_row = (m_block + 1) * self.tile_m - 1
        return ceil_div(maximum(self._first_key(last_row, seqlens), 0), self.tile_n)

    def _first_key(self, row: Any, seqlens: SeqlenInfo) -> Any:
        """That the row sees; negative where it sees all from the first on."""
        return first_key(self.window, row + seqlens.seqlen_k - seqlens.seqlen_q)

    def keys_end(self, row_end: Any, seqlens: SeqlenInfo) -> Any:
        """One past the last key that the row before ``row_end`` sees."""
        return keys_end(self.window, row_end + seqlens.seqlen_k - seqlens.seqlen_q)


@dataclass(frozen=True)
class KeyBlocks(LoopInvariant):
    """Key blocks of one query tile, visited from ``last`` = ``end`` - 1 down to ``begin``, at least one.

    Those from ``unmasked`` on, and those before ``left_masked``, hold keys that a row of the tile may not see. Without
    a left side both ``begin`` and ``left_masked`` are 0 when the kernel is compiled. The producer and every consumer
    walk by this, in all kernels, but for consumers that walk apart (``PartOfBlocks``), or without a query let all pass.
    """

    block_range: BlockRange
    m_block: Any
    seqlens: SeqlenInfo
    end: Any
    begin: Any

    @property
    def window(self) -> Window:
        return self.block_range.window

    @property
    def unmasked(self) -> Any:
        """Computed where it is asked for, since a producer never does."""
        return self.block_range.unmasked_end(self.m_block, self.seqlens)

    @property
    def left_masked(self) -> Any:
        return self.block_range.left_masked_end(self.m_block, self.seqlens)

    def right_masked(self, unmasked: Any) -> Any:
        """Blocks behind the first one visited that hold a key behind the last that some row sees."""
        if self.window.has_left:
            unmasked = maximum(unmasked, self.begin)
        return maximum(self.last - unmasked, 0)

    @property
    def last(self) -> Any:
        return self.end - 1

    @property
    def keys_of_first(self) -> Any:
        """Of the block that is visited first, keys up to the last one that a row sees."""
        return self.keys_of_last((self.m_block + 1) * self.block_range.tile_m)

    @property
    def count(self) -> Any:
        return self.number_from(self.last)

    def keys_of_last(self, row_end: Any) -> Any:
        """Of the block that is visited first, keys up to the last one that a row before ``row_end`` sees."""
        keys = self.seqlens.seqlen_k
        if self.window.has_right:
            keys = minimum(keys, self.block_range.keys_end(row_end, self.seqlens))
        return keys - self.last * self.block_range.tile_n

    def number(self, n_block: Any) -> Any:
        """The number of the key block that the walk visits at place ``n_block``: here the same."""
        return n_block

    def number_from(self, n_block: Any) -> Any:
        """Blocks from ``n_block`` down to ``begin``."""
        return n_block + 1 - self.begin


@dataclass(frozen=True)
class PartOfBlocks(KeyBlocks):
    """Of the key blocks ``of_tile`` those that one of several equal parts of the tile's rows visits.

    Its ``block_range`` and ``m_block`` are of tiles as high as a part. A part without a query visits one block all the
    same, the first.
    """

    of_tile: Any = None

    @staticmethod
    def of(of_tile: KeyBlocks, part: Any, parts: int) -> "PartOfBlocks":
        whole, seqlens = of_tile.block_range, of_tile.seqlens
        own = BlockRange(whole.tile_m // parts, whole.tile_n, whole.window, whole.spare)
        number = of_tile.m_block * parts + part
        has_query = minimum(maximum(seqlens.seqlen_q - number * own.tile_m, 0), 1)
        begin, end = of_tile.begin, of_tile.begin + 1
        end += (own.end(number, seqlens) - end) * has_query
        if whole.window.has_left:
            begin += (own.begin(number, seqlens) - begin) * has_query
        return PartOfBlocks(own, number, seqlens, end, begin, of_tile)

    @property
    def has_few(self) -> Any:
        """Whether the rows see ``spare`` keys or fewer behind the block visited first."""
        return self.keys_of_first > self.block_range.tile_n

    @property
    def left_out_before(self) -> Any:
        """Blocks of the tile's walk before the first one that the part visits."""
        return self.of_tile.end - self.end

    @property
    def left_out_behind(self) -> Any:
        """Blocks of the tile's walk behind the last one that the part visits."""
        return self.begin - self.of_tile.begin


@dataclass(frozen=True)
class SharedBlocks(KeyBlocks):
    """All key blocks of a tile, for number ``part`` of ``parts`` equal parts of its rows: in the block that is visited
    first it may see fewer keys than others."""

    part: Any = 0
    parts: int = 1

    @staticmethod
    def of(of_tile: KeyBlocks, part: Any, parts: int) -> "SharedBlocks":
        t = of_tile
        return SharedBlocks(t.block_range, t.m_block, t.seqlens, t.end, t.begin, part, parts)

    @property
    def keys_of_first(self) -> Any:
        """As that of ``PartOfBlocks``; 0 or less where the part sees none."""
        rows = self.block_range.tile_m // self.parts
        return self.keys_of_last((self.m_block * self.parts + self.part + 1) * rows)


@dataclass(frozen=True)
class ListedBlocks(KeyBlocks):
    """Key blocks of one query tile that stand in a list, visited from its last to its first, at least one.

    Places of the walk are places in the list, an int32 vector: how many blocks are visited, then an entry for each.
    Numbers of blocks ascend in it, so that the end of the sequence is in the block that is visited first, or in none.
    A tile that sees no block visits one all the same, whose entry says that it is hidden.
    """

    entries: Any = None

    @staticmethod
    def of(block_range: BlockRange, m_block: Any, seqlens: SeqlenInfo, entries: Any) -> "ListedBlocks":
        return ListedBlocks(block_range, m_block, seqlens, maximum(entries[0], 1), 0, entries)

    def entry(self, place: Any) -> Any:
        """The number of the block shifted by ``ENTRY_BITS``, and in the lower bits HIDDEN, PARTLY_SEEN or SEEN."""
        return self.entries[place + 1]

    def number(self, n_block: Any) -> Any:
        return self.entry(n_block) >> ENTRY_BITS

"""Which query tiles see a key tile, and which of them need no mask: the transpose of ``key_blocks``.

Plain arithmetic on integers: the same functions serve the kernels (traced) and the host tests (Python ints).
"""

from dataclasses import dataclass
from typing import Any

from cute_kernels.integers import ceil_div, maximum, minimum
from cute_kernels.invariant import LoopInvariant
from cute_kernels.problem import ENTRY_BITS
from cute_kernels.seqlen import SeqlenInfo
from cute_kernels.visible import first_key, first_query, keys_end, queries_end
from cute_kernels.window import Window


@dataclass(frozen=True)
class QueryRange:
    """Query tiles of a key tile, visited from ``begin`` up to ``end``.

    Those below ``unmasked_begin`` and those from ``unmasked_end`` on need a mask. A key tile that no query sees visits
    none; with ``least`` = 1 it visits the first query tile, all of it masked, if none other. So does the key tile of a
    sequence without queries then. With ``is_covered``, which goes with no left side, the first key tile begins at the
    first query tile, though queries there may see none of its keys: so that every query tile is visited.
    """

    tile_m: int
    tile_n: int
    window: Window
    least: int = 0
    is_covered: bool = False

    def tiles(self, seqlens: SeqlenInfo) -> Any:
        """All query tiles of the sequence."""
        return ceil_div(seqlens.seqlen_q, self.tile_m)

    def begin(self, n_block: Any, seqlens: SeqlenInfo) -> Any:
        """The first tile with a query that sees a key of the tile, if there is one; else 0."""
        if not self.window.has_right:
            return 0 * n_block
        first = maximum(first_query(self.window, n_block * self.tile_n, seqlens), 0) // self.tile_m
        return first * minimum(n_block, 1) if self.is_covered else first

    def end(self, n_block: Any, seqlens: SeqlenInfo) -> Any:
        """One past the last tile with a query that sees a key of the tile; at least ``least``."""
        end = self.tiles(seqlens)
        if self.window.has_left:
            past_last_key = minimum((n_block + 1) * self.tile_n, seqlens.seqlen_k)
            past_last_query = maximum(queries_end(self.window, past_last_key - 1, seqlens), 0)
            end = minimum(end, ceil_div(past_last_query, self.tile_m))
        return maximum(end, self.least) if self.least else end

    def unmasked_begin(self, n_block: Any, seqlens: SeqlenInfo) -> Any:
        """The first tile from which on no query comes before one that sees every key of the tile; ``end`` where keys
        are past the end of the sequence."""
        past_last_key = (n_block + 1) * self.tile_n
        first = self.begin(n_block, seqlens)
        if self.window.has_right:
            first_full_query = maximum(first_query(self.window, past_last_key - 1, seqlens), 0)
            first = maximum(first, ceil_div(first_full_query, self.tile_m))
        end = self.end(n_block, seqlens)
        # As arithmetic and not as a branch: 1 where the tile holds keys past the end.
        is_ragged = minimum(maximum(past_last_key - seqlens.seqlen_k, 0), 1)
        return minimum(first + is_ragged * end, end)

    def unmasked_end(self, n_block: Any, seqlens: SeqlenInfo) -> Any:
        """One past the last tile in which every query still sees the first key of the tile, rows past the end of the
        sequence counted as queries; no less than ``unmasked_begin``."""
        end = self.end(n_block, seqlens)
        if not self.window.has_left:
            return end
        full = maximum(queries_end(self.window, n_block * self.tile_n, seqlens), 0) // self.tile_m
        return maximum(minimum(full, end), self.unmasked_begin(n_block, seqlens))

    @property
    def last_keys_first(self) -> bool:
        """Whether key tiles that take turns have to be claimed from the last one on (``turn``)."""
        return self.window.has_right

    def first_visitor(self, m_block: Any, seqlens: SeqlenInfo) -> Any:
        """The first key tile that visits query tile ``m_block``."""
        if not self.window.has_left:
            return 0 * m_block
        key = first_key(self.window, m_block * self.tile_m + seqlens.seqlen_k - seqlens.seqlen_q)
        first = maximum(key, 0) // self.tile_n
        # Those that no query sees all come before the ones that the first query tile sees, and visit that one.
        return first * minimum(m_block, 1) if self.least else first

    def visitors_end(self, m_block: Any, num_n_blocks: Any, seqlens: SeqlenInfo) -> Any:
        """One past the last of ``num_n_blocks`` key tiles that visits query tile ``m_block``."""
        if not self.window.has_right:
            return num_n_blocks
        end = keys_end(self.window, (m_block + 1) * self.tile_m + seqlens.seqlen_k - seqlens.seqlen_q)
        return minimum(ceil_div(maximum(end, int(self.is_covered)), self.tile_n), num_n_blocks)

    def turn(self, n_block: Any, m_block: Any, num_n_blocks: Any, seqlens: SeqlenInfo) -> Any:
        """How many key tiles add to query tile ``m_block`` before this one does, where that has an order.

        Without a right side all key tiles begin at the first query tile, and come one behind the other. With one, as
        under a causal mask, each begins at its diagonal, and the last key tile is the first at its queries. So that key
        tiles wait only for those claimed before them, they are claimed in that order: from the first one on, or with
        ``last_keys_first`` from the last.
        """
        if not self.window.has_right:
            return n_block - self.first_visitor(m_block, seqlens) if self.window.has_left else n_block
        return self.visitors_end(m_block, num_n_blocks, seqlens) - 1 - n_block


@dataclass(frozen=True)
class Visit(LoopInvariant):
    """The query tiles that one key tile visits: from ``begin`` with a mask, from ``unmasked`` without, up to ``end``;
    where the window has a left side, from ``left_masked`` with a mask again."""

    begin: Any
    unmasked: Any
    left_masked: Any
    end: Any

    def number(self, place: Any) -> Any:
        """The number of the query tile that is visited at ``place``: here the same."""
        return place

    def masked(self, scores: Any, place: Any) -> Any:
        """What is done to scores (``KeyScoreTile``) at a place before ``unmasked``, or from ``left_masked`` on."""
        return scores

    def fully_seen(self, scores: Any) -> Any:
        """The same at the others."""
        return scores


@dataclass(frozen=True)
class ListedQueries(Visit):
    """The query tiles of one key tile and head that stand in a list, visited from its first to its last.

    Places are places in the list, int32 (1 + query tiles, 2). Its first row has ``unmasked`` and ``end``, then there is
    one for each query tile that is visited: its entry, which is its number shifted by ``ENTRY_BITS`` and in the lower
    bits HIDDEN, PARTLY_SEEN or SEEN; and its ``turn``. Tiles that are seen come last, so that what is before
    ``unmasked`` is not. A list from which no tile sees a key may have one all the same, whose entry says that it is
    hidden.
    """

    entries: Any

    @staticmethod
    def of(entries: Any) -> "ListedQueries":
        unmasked, end = entries[0, 0], entries[0, 1]
        return ListedQueries(0 * end, unmasked, end, end, entries)

    def number(self, place: Any) -> Any:
        return self.entries[place + 1, 0] >> ENTRY_BITS

    def kind(self, place: Any) -> Any:
        return self.entries[place + 1, 0] & ((1 << ENTRY_BITS) - 1)

    def turn(self, place: Any) -> Any:
        """How many key tiles add to the query tile before this one does, where that has an order: those with lower
        numbers that visit it."""
        return self.entries[place + 1, 1]

    def at(self, place: Any, is_seen: bool) -> "ListedQuery":
        """The query tile at a place; ``is_seen``: of ``unmasked`` or behind it."""
        return ListedQuery(self, place, is_seen)

    def masked(self, scores: Any, place: Any) -> Any:
        return scores.seen_as(self.kind(place))

    def fully_seen(self, scores: Any) -> Any:
        return scores.fully_seen()


@dataclass(frozen=True)
class ListedQuery(LoopInvariant):
    """One query tile of a list."""

    queries: ListedQueries
    place: Any
    is_seen: bool

    @property
    def turn(self) -> Any:
        return self.queries.turn(self.place)

    def scores(self, scores: Any) -> Any:
        """What is done to its scores (``KeyScoreTile``)."""
        return self.queries.fully_seen(scores) if self.is_seen else self.queries.masked(scores, self.place)

"""The keys of a CTA of the backward kernel, and the query tiles that see them."""

from dataclasses import dataclass
from typing import NamedTuple

from cutlass import Boolean, Int32

from cute_kernels.ampere.backward.config import AmpereBackwardConfig
from cute_kernels.invariant import LoopInvariant
from cute_kernels.query_range import ListedQueries, QueryRange
from cute_kernels.seqlen import SeqlenInfo
from cute_kernels.window import Window


class UnmaskedTiles(NamedTuple):
    """Query tiles from ``begin`` up to the only one of ``ends``, or with none up to the last."""

    begin: Int32
    ends: tuple

    def lacks(self, m_block: Int32) -> Boolean:
        """Whether a query tile is not among them."""
        is_before = m_block < self.begin
        return is_before | (m_block >= self.ends[0]) if self.ends else is_before


@dataclass(frozen=True)
class KeyTile(LoopInvariant):
    """Key tile ``n_block`` of the ``n_blocks`` of a sequence; ``window`` says which keys a query sees. ``lists`` is
    empty, or has the tensor from which ``ListedQueries`` are read."""

    config: AmpereBackwardConfig
    window: Window
    n_block: Int32
    n_blocks: Int32
    seqlens: SeqlenInfo
    lists: tuple = ()

    @property
    def queries(self) -> QueryRange:
        return QueryRange(self.config.tile_m, self.config.tile_n, self.window)

    def begin(self) -> Int32:
        """The first query tile that sees a key."""
        return self.queries.begin(self.n_block, self.seqlens)

    def unmasked(self) -> "UnmaskedTiles":
        """The query tiles of which every query sees all keys."""
        begin = self.queries.unmasked_begin(self.n_block, self.seqlens)
        if not self.window.has_left:
            return UnmaskedTiles(begin, ())
        return UnmaskedTiles(begin, (self.queries.unmasked_end(self.n_block, self.seqlens),))

    def end(self) -> Int32:
        """One past the last query tile that sees a key."""
        return self.queries.end(self.n_block, self.seqlens)

    def listed(self, head: Int32) -> ListedQueries:
        """The query tiles that are listed for a query head."""
        (lists,) = self.lists
        return ListedQueries.of(lists[self.seqlens.batch, head, self.n_block, None, None])

    def turn(self, m_block: Int32) -> Int32:
        """How many key tiles add to a query tile before this one, where that has an order."""
        return self.queries.turn(self.n_block, m_block, self.n_blocks, self.seqlens)

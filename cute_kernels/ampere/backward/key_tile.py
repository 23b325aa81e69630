"""The keys of a CTA of the backward kernel, and the query tiles that see them."""

from dataclasses import dataclass

from cutlass import Int32

from cute_kernels.ampere.backward.config import AmpereBackwardConfig
from cute_kernels.invariant import LoopInvariant
from cute_kernels.query_range import QueryRange
from cute_kernels.seqlen import SeqlenInfo
from cute_kernels.window import window_of


@dataclass(frozen=True)
class KeyTile(LoopInvariant):
    """Key tile ``n_block`` of ``n_blocks``."""

    config: AmpereBackwardConfig
    n_block: Int32
    n_blocks: Int32
    seqlens: SeqlenInfo

    @property
    def queries(self) -> QueryRange:
        return QueryRange(self.config.tile_m, self.config.tile_n, window_of(self.config.causal))

    def begin(self) -> Int32:
        """The first query tile that sees a key."""
        return self.queries.begin(self.n_block, self.seqlens)

    def unmasked(self) -> Int32:
        """The first one that needs no mask."""
        return self.queries.unmasked_begin(self.n_block, self.seqlens)

    def end(self) -> Int32:
        """One past the last query tile."""
        return self.queries.end(self.n_block, self.seqlens)

    def turn(self, m_block: Int32) -> Int32:
        """How many key tiles add to a query tile before this one, where that has an order."""
        return self.queries.turn(self.n_block, m_block, self.n_blocks, self.seqlens)

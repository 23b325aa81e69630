"""The way of a CTA of the backward kernel through the query tiles of one head."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cute_kernels.ampere.backward.config import AmpereBackwardConfig
from cute_kernels.ampere.backward.loader import QueryLoader
from cute_kernels.ampere.backward.mainloop import Mainloop
from cute_kernels.invariant import LoopInvariant
from cute_kernels.query_range import QueryRange


@dataclass(frozen=True)
class Walk(LoopInvariant):
    """From query tile to query tile, with the next one's loads under way; for key tile ``n_block`` of ``n_blocks``."""

    config: AmpereBackwardConfig
    loader: QueryLoader
    mainloop: Mainloop
    n_block: Int32
    n_blocks: Int32
    seqlen_q: Int32
    seqlen_k: Int32

    @property
    def queries(self) -> QueryRange:
        return QueryRange(self.config.tile_m, self.config.tile_n, self.config.causal)

    @cute.jit
    def head(self, batch: Int32, head: Int32):
        """All query tiles of a head that see the keys; first those that need a mask."""
        lengths = self.seqlen_q, self.seqlen_k
        begin = self.queries.begin(self.n_block, *lengths)
        unmasked = self.queries.unmasked_begin(self.n_block, *lengths)
        # All have done with the buffers, if there was a head before.
        cute.arch.sync_threads()
        self.loader.load(head, begin, Int32(0))
        self._blocks((batch, head), begin, self.queries.end(self.seqlen_q), Int32(0), unmasked)

    @cute.jit
    def _blocks(self, place: tuple, begin: Int32, end: Int32, stage: Int32, unmasked: Int32) -> Int32:
        """Query tiles from ``begin`` to ``end``, the first of them in buffer ``stage``; returns that of the next."""
        for m_block in cutlass.range(begin, end, unroll=1):
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            following = stage ^ (self.config.stages - 1)
            if const_expr(self.config.stages == 2):
                self._load(place, m_block + 1, following)
            turn = self.queries.turn(self.n_block, m_block, self.n_blocks, self.seqlen_q, self.seqlen_k)
            self.mainloop.block(m_block, stage, place, turn, unmasked)
            if const_expr(self.config.stages == 1):
                cute.arch.sync_threads()
                self._load(place, m_block + 1, following)
            stage = following
        return stage

    @cute.jit
    def _load(self, place: tuple, m_block: Int32, stage: Int32):
        if m_block < self.queries.end(self.seqlen_q):
            self.loader.load(place[1], m_block, stage)

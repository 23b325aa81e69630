"""The way of a CTA of the backward kernel through the query tiles of one head."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cute_kernels.ampere.backward.config import AmpereBackwardConfig
from cute_kernels.ampere.backward.key_tile import KeyTile
from cute_kernels.ampere.backward.loader import QueryLoader
from cute_kernels.ampere.backward.mainloop import Mainloop
from cute_kernels.invariant import LoopInvariant
from cute_kernels.query_range import ListedQueries


@dataclass(frozen=True)
class Walk(LoopInvariant):
    """From query tile to query tile, with the next one's loads under way."""

    config: AmpereBackwardConfig
    loader: QueryLoader
    mainloop: Mainloop
    key_tile: KeyTile

    @cute.jit
    def head(self, head: Int32):
        """All query tiles of a head that see the keys."""
        begin, end = self.key_tile.begin(), self.key_tile.end()
        # All have done with the buffers, if there was a head before.
        cute.arch.sync_threads()
        self.loader.load(head, begin, Int32(0))
        stage = Int32(0)
        for m_block in cutlass.range(begin, end, unroll=1):
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            following = stage ^ (self.config.stages - 1)
            if const_expr(self.config.stages == 2):
                if m_block + 1 < end:
                    self.loader.load(head, m_block + 1, following)
            self.mainloop.block((head, m_block), stage, self.key_tile.unmasked())
            if const_expr(self.config.stages == 1):
                cute.arch.sync_threads()
                if m_block + 1 < end:
                    self.loader.load(head, m_block + 1, following)
            stage = following

    @cute.jit
    def listed_head(self, head: Int32):
        """All query tiles that are listed for a head."""
        listed = self.key_tile.listed(head)
        cute.arch.sync_threads()
        if listed.end > 0:
            self.loader.load(head, listed.number(Int32(0)), Int32(0))
        stage = Int32(0)
        for place in cutlass.range(0, listed.unmasked, unroll=1):
            stage = self._listed_block(head, listed, place, stage, False)
        for place in cutlass.range(listed.unmasked, listed.end, unroll=1):
            stage = self._listed_block(head, listed, place, stage, True)

    @cute.jit
    def _listed_block(
        self,
        head: Int32,
        listed: ListedQueries,
        place: Int32,
        stage: Int32,
        is_seen: cutlass.Constexpr[bool],
    ) -> Int32:
        """The tile at a place in the list; returns the buffer of the next one."""
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        following = stage ^ (self.config.stages - 1)
        if const_expr(self.config.stages == 2):
            if place + 1 < listed.end:
                self.loader.load(head, listed.number(place + 1), following)
        block = (head, listed.number(place), listed.at(place, is_seen))
        self.mainloop.block(block, stage, self.key_tile.unmasked())
        if const_expr(self.config.stages == 1):
            cute.arch.sync_threads()
            if place + 1 < listed.end:
                self.loader.load(head, listed.number(place + 1), following)
        return following

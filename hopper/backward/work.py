"""The key tiles of a launch of the backward kernel, and the query tiles that each of them visits."""

from dataclasses import dataclass
from typing import NamedTuple

from cutlass import Int32, const_expr

from cute_kernels.invariant import LoopInvariant
from cute_kernels.query_range import QueryRange
from cute_kernels.seqlen import DenseSeqlens
from cute_kernels.tile_scheduler import TileOrder, TileScheduler
from hopper.backward.config import BackwardConfig


class Visit(NamedTuple):
    """The query tiles of one key tile: from ``begin`` with a mask, from ``unmasked`` without, up to ``end``."""

    begin: Int32
    unmasked: Int32
    end: Int32


@dataclass(frozen=True)
class BackwardWork(LoopInvariant):
    """Who hands out the ``num_tiles`` key tiles of a launch, in which order, and what they visit, of ``m_end`` query
    tiles a head. These two could be computed here, but from the launch they need no register.

    Where dQ is summed in a fixed order, a key tile waits at each query tile for some others. It waits for those alone
    that were claimed before it, so there is always one that waits for none. Without a mask they come one behind the
    other, since CTAs that have once waited stay apart. Under a causal mask each starts at its diagonal, and the last
    key tile is the first at its queries: so that one is claimed first.
    """

    config: BackwardConfig
    scheduler: TileScheduler
    order: TileOrder
    num_tiles: Int32
    m_end: Int32
    seqlens: DenseSeqlens
    heads_per_kv_head: Int32

    @property
    def queries(self) -> QueryRange:
        return QueryRange(self.config.tile_m, self.config.tile_n, self.config.causal)

    def coordinates(self, tile: Int32) -> tuple[Int32, Int32, Int32]:
        """(n_block, head_kv, batch) of a tile number."""
        n_block, head_kv, batch = self.order.coordinates(tile)
        if const_expr(self.config.ordered and self.config.causal):
            n_block = self.order.num_m_blocks - 1 - n_block
        return n_block, head_kv, batch

    def visit(self, n_block: Int32, batch: Int32) -> Visit:
        seqlens = self.seqlens.of(batch)
        return Visit(
            self.queries.begin(n_block, seqlens),
            self.queries.unmasked_begin(n_block, seqlens),
            self.m_end,
        )

    def turn(self, n_block: Int32, m_block: Int32, batch: Int32) -> Int32:
        """How many key tiles add to the query tile before this one."""
        if const_expr(not self.config.causal):
            return n_block
        num_n_blocks = self.order.num_m_blocks
        return self.queries.visitors(m_block, num_n_blocks, self.seqlens.of(batch)) - 1 - n_block

    def first_tile(self, head_kv: Int32, batch: Int32) -> Int32:
        """The number of the first query tile of the first query head of ``head_kv``, among all heads and batches."""
        return (batch * self.order.num_heads + head_kv) * self.heads_per_kv_head * self.m_end

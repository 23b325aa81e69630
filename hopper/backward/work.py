"""The key tiles of a launch of the backward kernel, and the query tiles that each of them visits."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32, const_expr

from cute_kernels.invariant import LoopInvariant
from cute_kernels.query_range import QueryRange
from cute_kernels.tile_scheduler import TileOrder, TileScheduler
from cute_kernels.turn_order import TurnOrder
from hopper.backward.config import BackwardConfig


@dataclass(frozen=True)
class Visit(LoopInvariant):
    """The query tiles of one key tile, in the order in which it visits them: ``steps`` from ``first`` on, wrapping around
    at ``end`` where ``wraps``. Those of the first ``masked`` steps need a mask."""

    first: Int32
    steps: Int32
    masked: Int32
    end: Int32
    wraps: bool

    @cute.jit
    def m_block(self, step: Int32) -> Int32:
        m_block = self.first + step
        if const_expr(self.wraps):
            m_block = m_block - self.end if m_block >= self.end else m_block
        return m_block


@dataclass(frozen=True)
class BackwardWork(LoopInvariant):
    """Who hands out the ``num_tiles`` key tiles of a launch, in which order, and what they visit, of ``m_end`` query tiles
    a head. These two could be computed here, but from the launch they need no register."""

    config: BackwardConfig
    scheduler: TileScheduler
    order: TileOrder
    num_tiles: Int32
    m_end: Int32
    turns: TurnOrder
    seqlen_q: Int32
    seqlen_k: Int32
    heads_per_kv_head: Int32

    @property
    def queries(self) -> QueryRange:
        return QueryRange(self.config.tile_m, self.config.tile_n, self.config.causal)

    def coordinates(self, tile: Int32) -> tuple[Int32, Int32, Int32]:
        """(n_block, head_kv, batch) of a tile number."""
        n_block, head_kv, batch = self.order.coordinates(tile)
        if const_expr(self.config.ordered):
            n_block = self.turns.claimed(n_block)
        return n_block, head_kv, batch

    def visit(self, n_block: Int32) -> Visit:
        begin = self.queries.begin(n_block, self.seqlen_q, self.seqlen_k)
        masked = self.queries.unmasked_begin(n_block, self.seqlen_q, self.seqlen_k) - begin
        first, wraps = begin, self.config.ordered and not self.config.causal
        if const_expr(wraps):
            first = self.turns.first(n_block, begin)
        return Visit(first, self.m_end - begin, masked, self.m_end, wraps)

    def turn(self, n_block: Int32, m_block: Int32) -> Int32:
        """How many key tiles add to the query tile before this one."""
        num_n_blocks = self.order.num_m_blocks
        visitors = self.queries.visitors(m_block, num_n_blocks, self.seqlen_q, self.seqlen_k)
        return self.turns.turn(n_block, m_block, visitors)

    def first_tile(self, head_kv: Int32, batch: Int32) -> Int32:
        """The number of the first query tile of the first query head of ``head_kv``, among all heads and batches."""
        return (batch * self.order.num_heads + head_kv) * self.heads_per_kv_head * self.m_end

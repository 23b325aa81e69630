"""The warps that add dQ to global memory in a fixed order, for gradients of the same bits in every run."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.pipeline import PipelineAsync, PipelineState

from cute_kernels.backward.turns import count_up, wait_for_turn
from cute_kernels.fast_math import pin
from cute_kernels.invariant import LoopInvariant
from cute_kernels.problem import DENSE
from cute_kernels.query_range import Visit
from cute_kernels.tile_scheduler import MAILBOX_STAGES, TileScheduler
from hopper.backward.config import BackwardConfig
from hopper.backward.consumer import previous_stage
from hopper.backward.dq import add_in_bulk, store_in_bulk, store_or_add_in_bulk
from hopper.backward.exchange import state_of
from hopper.backward.work import BackwardWork


class Courier(LoopInvariant):
    """Adds the parts of dQ that the consumers stage, each in its turn (``BackwardWork.turn``). With ``stores_first``
    the part whose turn is 0 is stored, over whatever was there.

    ``sdQ`` is float32 (words, buffers, warpgroups) in shared memory and ``mdQ`` (words, warpgroups, query tiles) in
    global memory. ``added`` is int32 (query tiles,), zero before the launch: how many key tiles have added to each.
    dQ of a block is staged when ``pipe`` is full of dS of the block behind it. There is a courier for each of the
    ``stages`` of ``pipe``, of number ``stage``: from its turn to the next one's a block takes longer than the
    consumers.
    """

    def __init__(
        self,
        config: BackwardConfig,
        pipe: PipelineAsync,
        sdQ: cute.Tensor,
        mdQ: cute.Tensor,
        added: cute.Tensor,
        stage: Int32,
    ):
        self.config, self.pipe, self.sdQ, self.mdQ, self.added = config, pipe, sdQ, mdQ, added
        self.stage = stage

    @cute.jit
    def run(self, work: BackwardWork):
        """Follow the consumers block by block. A block's part is added under the barrier of the next."""
        # Two counters in one register, of blocks modulo 4 and of mails: there is none to spare.
        clock = Int32(4)
        if self.stage == 0:
            self._release(clock & 3)
        tile = self._receive(work.scheduler, state_of(MAILBOX_STAGES, Int32(0)))
        while tile < work.num_tiles:
            n_block, head_kv, batch = work.coordinates(tile)
            visit, n_in_turn = work.visit(n_block, batch), work.in_turn(n_block, head_kv, batch)
            for i in cutlass.range(work.query_heads.count(head_kv), unroll=1):
                of_head = self._visit(work, visit, (batch, work.query_heads.first(head_kv) + i, n_block))
                first_tile = work.first_tile(head_kv, batch) + i * work.m_end
                for place in cutlass.range(of_head.begin, of_head.end, unroll=1):
                    clock = (clock & ~3) | ((clock + 1) & 3)
                    if clock & 1 == self.stage:
                        m_block, turn = (
                            of_head.number(place),
                            self._turn(work, of_head, place, n_in_turn, batch),
                        )
                        self._deliver(clock & 3, first_tile + m_block, turn)
            tile = self._receive(work.scheduler, state_of(MAILBOX_STAGES, clock >> 2))
            clock += 4

    def _visit(self, work: BackwardWork, of_tile: Visit, place: tuple[Int32, Int32, Int32]) -> Visit:
        """That of a head at ``place``, (batch, head, n_block), worked out anew where windows would take registers
        throughout."""
        if self.config.block_lists:
            return work.visit_of_head(of_tile, place)
        if self.config.can_miss_queries:
            batch, _, n_block = place
            return work.anew().visit(pin(n_block, Int32), batch)
        return of_tile

    def _turn(self, work: BackwardWork, visit: Visit, place: Int32, n_block: Int32, batch: Int32) -> Int32:
        """That of a block, worked out anew where lengths and windows would take registers throughout, and under a
        causal mask where the first one stores, which takes one more."""
        if self.config.block_lists:
            return visit.turn(place)
        if self.config.has_late_heads:
            return work.anew().turn(pin(n_block, Int32), place, batch)
        if self.config.can_miss_queries or (self.config.stores_first and self.config.causal):
            return work.anew().turn(n_block, place, batch)
        return work.turn(n_block, place, batch)

    @cute.jit
    def _receive(self, scheduler: TileScheduler, state: PipelineState) -> Int32:
        """``TileScheduler.receive`` without a lane number, for which there is no register."""
        scheduler.pipe.consumer_wait(state)
        tile = cute.arch.make_warp_uniform(scheduler.mailbox[state.index])
        with cute.arch.elect_one():
            scheduler.pipe.consumer_release(state)
        return tile

    @cute.jit
    def _release(self, block: Int32):
        """Under the first block there is nothing to add."""
        state = state_of(self.config.stages, block)
        self.pipe.consumer_wait(state)
        if cute.arch.lane_idx() == 0:
            self.pipe.consumer_release(state)

    @cute.jit
    def _deliver(self, block: Int32, tile: Int32, turn: Int32):
        """Add what is staged under dS of a block, once ``turn`` key tiles have added to query tile ``tile``."""
        state, place = state_of(self.config.stages, block), self.added.iterator + tile
        if cute.arch.lane_idx() == 0:
            # Before there is something to add: where its turn has come by then, nothing waits for the count.
            wait_for_turn(place, turn, self.config.layout != DENSE)
        cute.arch.sync_warp()
        self.pipe.consumer_wait(state)
        if cute.arch.lane_idx() == 0:
            buffer = previous_stage(self.config, state.index)
            for wg in cutlass.range_constexpr(self.config.consumers):
                source, target = self.sdQ[None, buffer, wg], self.mdQ[None, wg, tile]
                if const_expr(self.config.stores_first and self.config.layout != DENSE):
                    store_or_add_in_bulk(source, target, turn)
                elif const_expr(self.config.stores_first):
                    if turn == 0:
                        store_in_bulk(source, target)
                    else:
                        add_in_bulk(source, target)
                else:
                    add_in_bulk(source, target)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            self.pipe.consumer_release(state)
            # Until the sums are written, and not only read from here: what the count promises the next one.
            cute.arch.cp_async_bulk_wait_group(0, read=False)
            count_up(place, turn, self.config.layout != DENSE)

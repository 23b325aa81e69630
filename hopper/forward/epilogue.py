"""End of a tile: O from registers through shared memory to global memory, LSE straight to global memory."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warp
from cutlass.pipeline import PipelineState

from cute_kernels.dropout import multiply_all
from cute_kernels.fast_math import pin
from cute_kernels.invariant import LoopInvariant
from hopper.config import WARPGROUP_ROWS
from hopper.forward.barriers import sync_consumers, sync_warpgroup
from hopper.forward.consumer import Consumer
from hopper.forward.ending import TileEnding
from hopper.forward.operands import o_state, q_state
from hopper.forward.output import make_accumulator
from hopper.forward.places import TilePlace
from hopper.forward.store import DenseTmaStore
from hopper.forward.unscaled import NoCorrection


@dataclass(frozen=True)
class Epilogue(LoopInvariant):
    """Writes the 64 rows of one warpgroup.

    With ``recomputes_addresses`` they are made for each tile, and not kept from one to the next. ``factors`` has that
    of dropout, or none. Each warpgroup has its own stage of O and its own copy, so that no warpgroup waits for another.
    """

    store: DenseTmaStore
    correction: NoCorrection
    lane: Int32
    warp_in_group: Int32
    recomputes_addresses: bool
    factors: tuple[Float32, ...] = ()

    @cute.jit
    def finish(
        self,
        consumer: Consumer,
        place: TilePlace,
        row: Int32,
        q_turn: Int32,
        ending: TileEnding,
        kv_state: PipelineState,
    ):
        """Normalise and correct O, store O and LSE; release Q where O was staged in its place.

        ``row`` is the query index of the thread's first row, ``kv_state`` what ``attend`` has returned.
        """
        config = consumer.config
        inverse_sum, lse = ending.factors(consumer.softmax, place)
        multiply_all(inverse_sum, self.factors)
        if const_expr(config.ends_in_halves):
            self.store.lse(lse, place.head, place.seqlens, row, self.lane)
            self._store_halves(consumer, place, inverse_sum, kv_state)
        else:
            self._store_whole(consumer, place, (inverse_sum, lse), row, q_turn)

    @cute.jit
    def _store_whole(
        self,
        consumer: Consumer,
        place: TilePlace,
        factors: tuple[cute.Tensor, cute.Tensor],
        row: Int32,
        q_turn: Int32,
    ):
        """O at once; ``factors`` are those of O's rows, and LSE."""
        config, (inverse_sum, lse) = consumer.config, factors
        self.correction.normalize(consumer.output.acc, inverse_sum)
        self.store.lse(lse, place.head, place.seqlens, row, self.lane)
        if const_expr(config.o_from_registers):
            self.store.rows(consumer.output.acc, place.head, place.seqlens, row, self.lane)
        else:
            self._store_by_tma(consumer, place, q_turn)

    @cute.jit
    def _store_halves(
        self, consumer: Consumer, place: TilePlace, inverse_sum: cute.Tensor, kv_state: PipelineState
    ):
        """Each half of O's columns through shared memory once its last P V is done, the first under the second."""
        config, wg = consumer.config, consumer.wg
        is_store_warp = self.warp_in_group == 0
        if is_store_warp:
            self.store.wait()
        sync_warpgroup(wg)
        sO = self.store.o.smem[None, None, wg]
        row_block = place.m_block * config.consumers + wg
        for h in cutlass.range_constexpr(2):
            consumer.await_half(h, kv_state)
            acc = consumer.output.half(h)
            self.correction.normalize(acc, inverse_sum)
            dtype = self.store.o.smem.element_type
            rO = cute.make_rmem_tensor(acc.layout, dtype)
            rO.store(acc.load().to(dtype))
            half = cute.local_tile(sO, (WARPGROUP_ROWS, config.head_dim_v // 2), (0, h))
            self._registers_to_shared(consumer.output.half_mma, rO, half)
            cute.arch.fence_view_async_shared()
            sync_warpgroup(wg)
            if is_store_warp:
                self.store.start_half(wg, row_block, place.head, place.seqlens, h)

    @cute.jit
    def _store_by_tma(self, consumer: Consumer, place: TilePlace, q_turn: Int32):
        """Through shared memory."""
        config, wg = consumer.config, consumer.wg
        m_block, head, seqlens = place.m_block, place.head, place.seqlens
        is_store_warp = self.warp_in_group == 0
        if const_expr(config.o_shares_v):
            sync_consumers(config)
        elif const_expr(not config.o_shares_rows):
            # Who shares it with rows of V has awaited some that came after O of the tile before had been read.
            if is_store_warp:
                self.store.wait()
            sync_warpgroup(wg)
        sO = self.store.o.smem[None, None, wg]
        rO = self._rounded(consumer, self.store.o.smem.element_type)
        self._registers_to_shared(consumer.mmas.whole_pv, rO, sO)
        cute.arch.fence_view_async_shared()
        sync_warpgroup(wg)
        if is_store_warp:
            self.store.start(wg, m_block * config.consumers + wg, head, seqlens)
            if const_expr(config.o_shares_q or config.o_shares_v):
                # Whichever lane issued the copy, no lane of the warp goes on before it has been read.
                self.store.wait()
                cute.arch.sync_warp()
            if const_expr(config.o_shares_v):
                for pipe in consumer.pipes.o:
                    if self.lane == 0:
                        pipe.consumer_release(o_state(q_turn))
        if const_expr(config.o_shares_q):
            consumer.pipes.q.consumer_release(q_state(config, wg, q_turn))

    @cute.jit
    def drain(self):
        """Wait until the last copy has read its shared memory; the CTA may end only then."""
        if self.warp_in_group == 0:
            self.store.wait()

    @cute.jit
    def _registers_to_shared(self, mma: cute.TiledMma, rO: cute.Tensor, sO: cute.Tensor):
        """O in the output's dtype, in registers as ``mma`` leaves them."""
        operation = warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4)
        atom = cute.make_copy_atom(operation, self.store.o.smem.element_type)
        thread = self.warp_in_group * cute.arch.WARP_SIZE + self.lane
        if const_expr(self.recomputes_addresses):
            thread = pin(thread, Int32)
        copy = cute.make_tiled_copy_C(atom, mma).get_slice(thread)
        cute.copy(atom, copy.retile(rO), copy.partition_D(sO))

    def _rounded(self, consumer: Consumer, dtype: Any) -> cute.Tensor:
        """O in the output's dtype; of columns that P V leaves out, which nobody stores, zeros."""
        acc, config = consumer.output.acc, consumer.config
        rO = make_accumulator(consumer.mmas.whole_pv, config.head_dim_v, dtype)
        if config.columns_pv < config.head_dim_v:
            rO.fill(0.0)
        # The columns that there are come first.
        made = cute.make_tensor(rO.iterator, acc.layout)
        made.store(acc.load().to(dtype))
        return rO

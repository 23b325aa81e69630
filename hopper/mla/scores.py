"""The first consumer warpgroup: scores of the rows of a CTA, their softmax, and the first half of the columns of O."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.pipeline import PipelineState

from cute_kernels.invariant import LoopInvariant
from cute_kernels.score_tile import SoftCap
from hopper.config import WARPGROUP_THREADS
from hopper.decode.config import BOX_COLUMNS
from hopper.decode.masks import RowMask
from hopper.forward.barriers import sync_warpgroup
from hopper.forward.operands import Mmas
from hopper.mla.config import MlaConfig
from hopper.wide.exchange import WideBarrier, arrive
from hopper.wide.operands import FIRST_HALF, SECOND_HALF, WideTensors
from hopper.wide.scores import ScoresConsumer

WORDS_PER_BOX_ROW = BOX_COLUMNS // 2
"""32-bit words of a row of a box: one for each lane of a warp."""


@dataclass(frozen=True)
class PartScores(LoopInvariant):
    """What is done to the scores of the key blocks of a part; ``edges`` are left_masked_end and unmasked_end of
    ``SequenceBlocks``."""

    mask: RowMask
    edges: tuple[Int32, Int32]
    softcaps: tuple[SoftCap, ...]

    @cute.jit
    def finish(self, acc_S: cute.Tensor, n_block: Int32, is_masked: cutlass.Constexpr[bool]):
        left_masked_end, unmasked_end = self.edges
        for softcap in self.softcaps:
            softcap.apply(acc_S, n_block)
        if n_block >= unmasked_end or n_block < left_masked_end:
            self.mask.apply(acc_S, n_block)


class MlaScores(ScoresConsumer):
    """``ScoresConsumer`` on a part of the keys of a sequence. Rows of a WGMMA that no tile has are zero in Q, and stay
    zero in P."""

    def __init__(self, config: MlaConfig, mmas: Mmas, smem: WideTensors, *others: Any):
        super().__init__(config, mmas, smem, *others)
        self.sV, self.thread = smem.v, self.exchange.thread

    def clear(self):
        """Once, before the first tile."""
        cute.recast_tensor(self.tOrP, Int32).fill(0)

    @cute.jit
    def attend_to_part(
        self, scores: PartScores, first: Int32, end: Int32, state: PipelineState
    ) -> PipelineState:
        """Leave half of O of key blocks ``first`` to ``end``, one at least, in ``acc``, not normalised, and their sums
        in ``softmax``. Returns the state of the pipelines behind them."""
        self.softmax.start()
        self.acc.fill(0.0)
        keys = scores.mask.seqlens.seqlen_k - (end - 1) * self.config.tile_n
        if keys < self.config.tile_n:
            for pipe in self.pipes.v:
                pipe.consumer_wait(state)
            self._clear_values(cutlass.max(keys, 0), state.index)
        self._first_block(scores, end - 1, state)
        for step in cutlass.range(end - first - 1, unroll=1):
            state = self._next_block(scores, end - 2 - step, state, True)
        self._start_product(state)
        self._hand_over()
        if const_expr(self.config.holds_values):
            arrive(WideBarrier.SCORED)
        warpgroup.wait_group(0)
        self.pipes.v[FIRST_HALF].consumer_release(state)
        state.advance()
        return state

    @cute.jit
    def _next_block(
        self, scores: PartScores, n_block: Int32, state: PipelineState, is_masked: cutlass.Constexpr[bool]
    ) -> PipelineState:
        """As that of ``ScoresConsumer``. Without ``holds_values`` memory is the limit: V is given back before anything
        of the next block is waited for."""
        next_state = state.clone()
        next_state.advance()
        acc_S = self._make_acc_S()
        self._start_product(state)
        self._hand_over()
        if const_expr(self.config.holds_values):
            self._start_scores(acc_S, next_state)
            warpgroup.wait_group(1)
        else:
            warpgroup.wait_group(0)
        self.pipes.v[FIRST_HALF].consumer_release(state)
        if const_expr(not self.config.holds_values):
            self._start_scores(acc_S, next_state)
        self._continue_scores(acc_S, next_state)
        if const_expr(self.config.holds_values):
            warpgroup.wait_group(1)
            arrive(WideBarrier.SCORED)
        warpgroup.wait_group(0)
        self._release_scores(next_state)
        self._make_p(scores, acc_S, n_block, is_masked, False)
        return next_state

    @cute.jit
    def _make_p(
        self,
        scores: PartScores,
        acc_S: cute.Tensor,
        n_block: Int32,
        is_masked: cutlass.Constexpr[bool],
        is_first: cutlass.Constexpr[bool],
    ):
        """P of a block, in registers and for the other warpgroup, and O shrunk for a new maximum."""
        scores.finish(acc_S, n_block, is_masked)
        self.softmax.take_scores(acc_S, is_first)
        for r in cutlass.range_constexpr(self.config.rows_per_thread):
            self.softmax.exponentiate(acc_S, r, is_first)
            self.softmax.store_P(self.tOrP, acc_S, r)
        self._copy_p()
        if const_expr(not is_first):
            self.softmax.rescale_if_needed(self.acc)

    @cute.jit
    def _clear_values(self, keys: Int32, stage: Int32):
        """Zero the rows of V from ``keys`` on, which may hold NaN, as ``Consumer`` of the decode kernel does, before a
        product reads the block. The other warpgroup reads it behind barriers that come after this."""
        c = self.config
        parts = c.half // BOX_COLUMNS
        box = WORDS_PER_BOX_ROW * c.tile_n
        words = cute.make_tensor(
            cute.recast_ptr(self.sV.iterator, cute.make_swizzle(0, 4, 3), Int32),
            cute.make_layout(
                (WORDS_PER_BOX_ROW, c.tile_n, parts, 2 * c.stages),
                stride=(1, WORDS_PER_BOX_ROW, box, box * parts),
            ),
        )
        warps = WARPGROUP_THREADS // WORDS_PER_BOX_ROW
        for row in cutlass.range(keys + self.thread // WORDS_PER_BOX_ROW, c.tile_n, warps, unroll=1):
            for half in (FIRST_HALF, SECOND_HALF):
                for part in cutlass.range_constexpr(parts):
                    words[self.thread % WORDS_PER_BOX_ROW, row, part, half * c.stages + stage] = Int32(0)
        cute.arch.fence_view_async_shared()
        sync_warpgroup(FIRST_HALF)

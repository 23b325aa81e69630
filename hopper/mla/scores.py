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
from hopper.decode.config import BOX_COLUMNS
from hopper.decode.masks import RowMask
from hopper.decode.operands import clear_rows
from hopper.forward.operands import Mmas
from hopper.mla.config import MlaConfig
from hopper.wgmma import issue_gemm
from hopper.wide.exchange import Exchange, WideBarrier, arrive
from hopper.wide.operands import FIRST_HALF, SECOND_HALF, WideTensors, tile_state
from hopper.wide.scores import ScoresConsumer


@dataclass(frozen=True)
class PartScores(LoopInvariant):
    """What is done to the scores of the key blocks of a part, of which ``first`` is visited last; ``edges`` are
    left_masked_end and unmasked_end of ``SequenceBlocks``."""

    first: Int32
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
    """``ScoresConsumer`` on a part of the keys of a sequence. ``inverse`` tells the other warpgroup what O is
    multiplied by in the end. Rows of a WGMMA that no tile has are zero in Q, and stay zero in P."""

    def __init__(self, inverse: Exchange, config: MlaConfig, mmas: Mmas, smem: WideTensors, *others: Any):
        super().__init__(config, mmas, smem, *others)
        self.inverse, self.sV = inverse, smem.v

    def clear(self):
        """Once, before the first tile."""
        cute.recast_tensor(self.tOrP, Int32).fill(0)

    @cute.jit
    def start(self, scores: PartScores, end: Int32, state: PipelineState) -> PipelineState:
        """Key blocks from before ``end`` to ``scores.first``, one at least, until all sums are in ``softmax`` and P V
        of the last one is under way in both warpgroups. Returns the state of the pipelines for that one."""
        self.softmax.start()
        self.acc.fill(0.0)
        keys = scores.mask.seqlens.seqlen_k - (end - 1) * self.config.tile_n
        if keys < self.config.tile_n:
            for pipe in self.pipes.v:
                pipe.consumer_wait(state)
            # The other warpgroup reads V behind barriers that come after this.
            both = state.index, SECOND_HALF * self.config.stages + state.index
            clear_rows(self.sV, 2 * BOX_COLUMNS, cutlass.max(keys, 0), both, self.exchange.thread)
        self._first_block(scores, end - 1, state)
        for step in cutlass.range(end - scores.first - 1, unroll=1):
            state = self._next_block(scores, end - 2 - step, state, True)
        self._start_product(state)
        self._hand_over()
        if const_expr(self.config.holds_values):
            arrive(WideBarrier.SCORED)
        return state

    @cute.jit
    def finish(self, factors: cute.Tensor):
        """Tell what O is multiplied by, and leave half of it in ``acc``, not multiplied."""
        self.inverse.write_factors(factors)
        arrive(WideBarrier.SUMMED)
        warpgroup.wait_group(0)

    @cute.jit
    def _next_block(
        self, scores: PartScores, n_block: Int32, state: PipelineState, is_masked: cutlass.Constexpr[bool]
    ) -> PipelineState:
        """As that of ``ScoresConsumer``. With ``holds_values`` the tensor cores are the limit: S of K and of the first
        half of V is behind P V at once, and V is given back when that is issued, which takes as long as most of it
        runs. Without, memory is the limit: V is given back before anything of the next block is waited for."""
        next_state = state.clone()
        next_state.advance()
        acc_S = self._make_acc_S()
        self._start_product(state)
        self._hand_over()
        if const_expr(self.config.holds_values):
            self._start_first_half(acc_S, next_state)
            warpgroup.wait_group(1)
            self.pipes.v[FIRST_HALF].consumer_release(state)
            self._add_second_half(acc_S, next_state)
            warpgroup.wait_group(1)
            arrive(WideBarrier.SCORED)
        else:
            warpgroup.wait_group(0)
            self.pipes.v[FIRST_HALF].consumer_release(state)
            self._start_scores(acc_S, next_state)
            self._continue_scores(acc_S, next_state)
        warpgroup.wait_group(0)
        self._release_scores(next_state)
        self._make_p(scores, acc_S, n_block, is_masked, False)
        return next_state

    @cute.jit
    def _start_first_half(self, acc_S: cute.Tensor, state: PipelineState):
        """Start Q K^T and QV V^T of the first half of the columns, as one group of WGMMAs."""
        qk = self.mmas.qk
        self.pipes.k.consumer_wait(state)
        tSrQ, tSrK = self.tSrQ[None, None, None, 0], self.tSrK[None, None, None, state.index]
        issue_gemm(qk, acc_S, tSrQ, tSrK, False, closes=False)
        self.pipes.v[FIRST_HALF].consumer_wait(state)
        tSrQV = self.tSrQV[0][None, None, None, FIRST_HALF]
        issue_gemm(qk, acc_S, tSrQV, self.tSrV[None, None, None, state.index], True)

    @cute.jit
    def _make_p(
        self,
        scores: PartScores,
        acc_S: cute.Tensor,
        n_block: Int32,
        is_masked: cutlass.Constexpr[bool],
        is_first: cutlass.Constexpr[bool],
    ):
        """P of a block, in registers and for the other warpgroup, and O shrunk for a new maximum. Behind the scores of
        the last block Q may be replaced."""
        if const_expr(self.config.query_box > 0):
            if n_block == scores.first:
                self.pipes.q.consumer_release(tile_state(Int32(0)))
        scores.finish(acc_S, n_block, is_masked)
        self.softmax.take_scores(acc_S, is_first)
        for r in cutlass.range_constexpr(self.config.rows_per_thread):
            self.softmax.exponentiate(acc_S, r, is_first)
            self.softmax.store_P(self.tOrP, acc_S, r)
        self._copy_p()
        if const_expr(not is_first):
            self.softmax.rescale_if_needed(self.acc)

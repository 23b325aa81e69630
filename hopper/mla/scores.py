"""The first consumer warpgroup: scores of the rows of a CTA, their softmax, and the first part of the columns of O."""

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
from hopper.mla.boxes import wait_until_read
from hopper.mla.config import MlaConfig
from hopper.wgmma import keep_descriptor
from hopper.wide.exchange import WideBarrier, arrive
from hopper.wide.operands import WideTensors, tile_state
from hopper.wide.scores import LAST_STEPS, ScoresConsumer

STEP_COLUMNS = 16
"""Of Q and V that a WGMMA multiplies."""


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
    """``ScoresConsumer`` on a part of the keys of a sequence. ``smem.v`` has the parts of V. Rows of a WGMMA that no
    tile has are zero in Q, and stay zero in P."""

    def __init__(self, config: MlaConfig, mmas: Mmas, smem: WideTensors, *others: Any):
        super().__init__(config, mmas, smem._replace(v=smem.v[0]), *others)
        self.sV = smem.v
        qk, slice_of_qk = mmas.qk, mmas.qk.get_slice(0)
        of_others = (qk.make_fragment_B(slice_of_qk.partition_B(v)) for v in smem.v[1:])
        self.tSrVs = self.tSrV, *map(keep_descriptor, of_others)
        self.owed = cute.make_rmem_tensor(1, Int32)
        self.owed.fill(0)

    def clear(self):
        """Once, before the first tile."""
        cute.recast_tensor(self.tOrP, Int32).fill(0)

    @cute.jit
    def start(self, scores: PartScores, end: Int32, state: PipelineState) -> PipelineState:
        """Key blocks ``end`` - 1 to ``scores.first``, one at least, until P V of the last one is under way by both
        warpgroups, and all sums are in ``softmax``. Returns the state of the pipelines for the last one."""
        self.softmax.start()
        self.acc.fill(0.0)
        keys = scores.mask.seqlens.seqlen_k - (end - 1) * self.config.tile_n
        if keys < self.config.tile_n:
            # The other warpgroup reads V behind barriers that come after this.
            for sV, pipe in zip(self.sV, self.pipes.v, strict=True):
                pipe.consumer_wait(state)
                thread = self.exchange.thread
                clear_rows(sV, 2 * BOX_COLUMNS, cutlass.max(keys, 0), (state.index,), thread)
        self._first_block(scores, end - 1, state)
        for step in cutlass.range(end - scores.first - 1, unroll=1):
            state = self._next_block(scores, end - 2 - step, state, True)
        self._start_product(state)
        self._hand_over()
        if const_expr(self.config.holds_values):
            arrive(WideBarrier.SCORED)
        return state

    @cute.jit
    def give_back(self, state: PipelineState):
        """V of the block before ``state``, when O has been read that was staged in its place, if it was."""
        if self.owed[0] != 0:
            wait_until_read()
            before = state.clone()
            before.reverse()
            self.pipes.v[0].consumer_release(before)
            self.owed.fill(0)

    @cute.jit
    def _next_block(
        self, scores: PartScores, n_block: Int32, state: PipelineState, is_masked: cutlass.Constexpr[bool]
    ) -> PipelineState:
        """As that of ``ScoresConsumer``. With ``holds_values`` the tensor cores are the limit: S of K and of the first
        part of V is behind P V at once, and V is given back when that is issued, which takes as long as most of it
        runs. Without, memory is the limit: V is given back before anything of the next block is waited for."""
        next_state = state.clone()
        next_state.advance()
        acc_S = self._make_acc_S()
        self._start_product(state)
        self._hand_over()
        if const_expr(self.config.holds_values):
            self._start_scores(acc_S, next_state, closes=False)
            self._add_part(acc_S, 0, next_state, closes=True)
            warpgroup.wait_group(1)
            self.pipes.v[0].consumer_release(state)
            self._add_others(acc_S, next_state)
            warpgroup.wait_group(1)
            arrive(WideBarrier.SCORED)
        else:
            warpgroup.wait_group(0)
            self.pipes.v[0].consumer_release(state)
            self._start_scores(acc_S, next_state)
            self._continue_scores(acc_S, next_state)
        warpgroup.wait_group(0)
        self._release_scores(next_state)
        self._make_p(scores, acc_S, n_block, is_masked, False)
        return next_state

    @cute.jit
    def _continue_scores(self, acc_S: cute.Tensor, state: PipelineState):
        """Add QV V^T."""
        self.give_back(state)
        self._add_part(acc_S, 0, state, closes=False)
        self._add_others(acc_S, state)

    @cute.jit
    def _add_others(self, acc_S: cute.Tensor, state: PipelineState):
        """Add QV V^T of all parts but the first, as two groups of WGMMAs, of which the second is of the last
        ``LAST_STEPS``."""
        last = len(self.tSrVs) - 1
        for part in cutlass.range_constexpr(1, last):
            self._add_part(acc_S, part, state, closes=False)
        end = self.config.parts[last] // STEP_COLUMNS
        self._add_part(acc_S, last, state, closes=True, stop=end - LAST_STEPS)
        self._add_part(acc_S, last, state, closes=True, first=end - LAST_STEPS)

    @cute.jit
    def _add_part(
        self,
        acc_S: cute.Tensor,
        part: cutlass.Constexpr[int],
        state: PipelineState,
        closes: cutlass.Constexpr[bool],
        first: cutlass.Constexpr[int] = 0,
        stop: cutlass.Constexpr[int] = 0,
    ):
        """Add QV V^T of a part of V when it has come, or of its steps from ``first`` to before ``stop``; ``closes`` as
        in ``issue_gemm``."""
        parts = self.config.parts
        before = sum(parts[:part]) // STEP_COLUMNS
        if const_expr(first == 0):
            self.pipes.v[part].consumer_wait(state)
        atom = cute.make_mma_atom(self.mmas.qk.op)
        atom.set(warpgroup.Field.ACCUMULATE, True)
        tSrQV, tSrV = self.tSrQV[0][None, None, None, 0], self.tSrVs[part][None, None, None, state.index]
        warpgroup.fence()
        for step in cutlass.range_constexpr(first, stop or parts[part] // STEP_COLUMNS):
            cute.gemm(atom, acc_S, tSrQV[None, None, before + step], tSrV[None, None, step], acc_S)
        if const_expr(closes):
            warpgroup.commit_group()

    @cute.jit
    def _release_scores(self, state: PipelineState):
        """What S alone has read; the first part of V waits for P V."""
        self.pipes.k.consumer_release(state)
        for pipe in self.pipes.v[1:]:
            pipe.consumer_release(state)

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

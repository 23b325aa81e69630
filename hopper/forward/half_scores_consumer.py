"""A consumer warpgroup of the forward kernel whose scores are float16."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warpgroup
from cutlass.pipeline import PipelineState

from cute_kernels.fragments import ROWS_PER_THREAD
from cute_kernels.mask import TileMask
from hopper.forward.consumer import LaggingConsumer
from hopper.forward.operands import consumer_slot
from hopper.wgmma import issue_gemm


class HalfScoresConsumer(LaggingConsumer):
    """``LaggingConsumer`` with a ``HalfScoresSoftmax``, on blocks with a mask as on those without.

    Only the first block of a tile takes a maximum whatever its P is.
    """

    @cute.jit
    def _first_scores(self, mask: TileMask, n_block: Int32, kv_state: PipelineState):
        acc_S = self._make_acc_S()
        self.pipes.k.consumer_wait(kv_state)
        issue_gemm(self.mmas.qk, acc_S, self.tSrQ, self.tSrK[None, None, None, kv_state.index], False)
        self.softmax.start()
        self.softmax.enter_block(consumer_slot(kv_state))
        warpgroup.wait_group(0)
        self.pipes.k.consumer_release(kv_state)
        mask.apply(acc_S, n_block)
        self.softmax.take_new_unit()
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            self.softmax.take_maximum(acc_S, r)
            self.softmax.store_P(self.tOrP, acc_S, r)
        self.pipes.v.consumer_wait(kv_state)

    @cute.jit
    def _overlapped_block(
        self, mask: TileMask, n_block: Int32, v_state: PipelineState, is_masked: cutlass.Constexpr[bool]
    ) -> PipelineState:
        k_state = v_state.clone()
        k_state.advance()
        self._lagging_block(mask, n_block, (v_state, k_state), is_masked)
        return k_state

    @cute.jit
    def _scores_have_come(self, k_state: PipelineState):
        """They stay until P will do, so K is not wanted again."""
        self.pipes.k.consumer_release(k_state)

    @cute.jit
    def _recover(self, acc_S: cute.Tensor, k_state: PipelineState):
        self.softmax.recover(self.tOrP, acc_S, self.output.acc)

    def _leave_block(self, k_state: PipelineState):
        """Nothing is left to be released."""

"""The second consumer warpgroup: the second half of the columns of O, from P that the first one makes."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.pipeline import PipelineState

from hopper.wgmma import issue_gemm
from hopper.wide.exchange import WideBarrier, arrive, wait
from hopper.wide.operands import SECOND_HALF
from hopper.wide.values import ValuesConsumer


class MlaValues(ValuesConsumer):
    """``ValuesConsumer`` that need not hold P V back."""

    @cute.jit
    def attend_to_part(self, blocks: Int32, state: PipelineState) -> PipelineState:
        """Leave half of O of so many key blocks in ``acc``, not normalised. Returns the state of the pipeline behind
        them."""
        self.acc.fill(0.0)
        for _ in cutlass.range(blocks, unroll=1):
            wait(WideBarrier.WRITTEN)
            self._shrink()
            self.pipe.consumer_wait(state)
            if const_expr(self.config.holds_values):
                wait(WideBarrier.SCORED)
            stage = SECOND_HALF * self.config.stages + state.index
            issue_gemm(self.mma, self.acc, self.tOrP, self.tOrV[None, None, None, stage], True)
            warpgroup.wait_group(0)
            arrive(WideBarrier.READ)
            self.pipe.consumer_release(state)
            state.advance()
        return state

"""The second consumer warpgroup: the second half of the columns of O, from P that the first one makes."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup
from cutlass.pipeline import PipelineState

from cute_kernels.fragments import ROWS_PER_THREAD
from cute_kernels.invariant import LoopInvariant
from cute_kernels.softmax import scale_rows
from hopper.forward.output import make_accumulator
from hopper.wgmma import issue_gemm, keep_descriptor
from hopper.wide.config import WideForwardConfig
from hopper.wide.exchange import Exchange, WideBarrier, arrive, wait
from hopper.wide.operands import SECOND_HALF, WidePipelines, WideSmem
from hopper.wide.scores import values_operand


class ValuesConsumer(LoopInvariant):
    """P V of every block, issued when the scores of the block that is visited next are nearly done. ``acc`` is the
    second half of the columns of O, and ``factors`` what it is multiplied by in the end."""

    def __init__(
        self,
        config: WideForwardConfig,
        mma: cute.TiledMma,
        sV: cute.Tensor,
        smem: WideSmem,
        inverse: Exchange,
        pipes: WidePipelines,
        exchange: Exchange,
    ):
        self.config, self.mma, self.inverse, self.exchange = config, mma, inverse, exchange
        self.pipe = pipes.v[SECOND_HALF]
        self.tOrP = keep_descriptor(mma.make_fragment_A(mma.get_slice(0).partition_A(smem.p)))
        self.tOrV = keep_descriptor(values_operand(mma, sV))
        self.acc = make_accumulator(mma, config.half)
        self.factors = cute.make_rmem_tensor(ROWS_PER_THREAD, Float32)

    @cute.jit
    def attend(self, blocks: Int32, state: PipelineState) -> PipelineState:
        """Leave half of O of so many key blocks, one at least, in ``acc``, not multiplied by ``factors``. Returns the
        state of the last one, whose V is not given back."""
        self.acc.fill(0.0)
        for _ in cutlass.range(blocks - 1, unroll=1):
            self._add_block(state)
            arrive(WideBarrier.READ)
            self.pipe.consumer_release(state)
            state.advance()
        self._add_block(state)
        wait(WideBarrier.SUMMED)
        self.factors.store(self.inverse.read_factors().load())
        arrive(WideBarrier.READ)
        return state

    @cute.jit
    def _add_block(self, state: PipelineState):
        wait(WideBarrier.WRITTEN)
        self._shrink()
        self.pipe.consumer_wait(state)
        wait(WideBarrier.SCORED)
        stage = SECOND_HALF * self.config.stages + state.index
        issue_gemm(self.mma, self.acc, self.tOrP, self.tOrV[None, None, None, stage], True)
        warpgroup.wait_group(0)

    @cute.jit
    def _shrink(self):
        """For a new maximum, if some row of the warp has one."""
        factors = self.exchange.read_factors()
        if cute.arch.vote_any_sync(factors[0] != Float32(1.0) or factors[1] != Float32(1.0)):
            scale_rows(self.acc, factors)

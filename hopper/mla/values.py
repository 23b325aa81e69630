"""The second consumer warpgroup: the other columns of O, from P that the first one makes."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.pipeline import PipelineState

from cute_kernels.fragments import ROWS_PER_THREAD
from cute_kernels.invariant import LoopInvariant
from cute_kernels.softmax import scale_rows
from hopper.forward.output import make_accumulator
from hopper.mla.config import MlaConfig
from hopper.wgmma import issue_gemm, keep_descriptor
from hopper.wide.exchange import Exchange, WideBarrier, arrive, wait
from hopper.wide.operands import WidePipelines, WideSmem, WideTensors
from hopper.wide.scores import values_operand


class MlaValues(LoopInvariant):
    """P V of every block in all parts of V but the first. With ``holds_values`` it is issued when the scores of the
    block that is visited next are nearly done. ``accs`` are O in these columns, of the WGMMAs ``mmas``, and ``factors``
    what it is multiplied by in the end."""

    def __init__(
        self,
        config: MlaConfig,
        mmas: tuple[cute.TiledMma, ...],
        tensors: WideTensors,
        inverse: Exchange,
        pipes: WidePipelines,
        exchange: Exchange,
        smem: WideSmem,
    ):
        self.config, self.mmas, self.exchange, self.inverse = config, mmas, exchange, inverse
        self.pipes = pipes.v[1:]
        of_p = mmas[0].make_fragment_A(mmas[0].get_slice(0).partition_A(smem.p))
        self.tOrP = keep_descriptor(of_p)
        of_values = (values_operand(mma, v) for mma, v in zip(mmas, tensors.v[1:], strict=True))
        self.tOrVs = tuple(map(keep_descriptor, of_values))
        self.accs = tuple(make_accumulator(mma, n) for mma, n in zip(mmas, config.parts[1:], strict=True))
        self.factors = cute.make_rmem_tensor(ROWS_PER_THREAD, Float32)

    @cute.jit
    def attend(self, blocks: Int32, state: PipelineState) -> PipelineState:
        """Leave O of so many key blocks, one at least, in ``accs``, not multiplied by ``factors``. Returns the state of
        the last one, whose V is not given back."""
        for acc in self.accs:
            acc.fill(0.0)
        for _ in cutlass.range(blocks - 1, unroll=1):
            self._start_block(state)
            for i in cutlass.range_constexpr(len(self.accs)):
                warpgroup.wait_group(len(self.accs) - 1 - i)
                if const_expr(i == len(self.accs) - 1):
                    arrive(WideBarrier.READ)
                self.pipes[i].consumer_release(state)
            state.advance()
        self._start_block(state)
        warpgroup.wait_group(0)
        wait(WideBarrier.SUMMED)
        self.factors.store(self.inverse.read_factors().load())
        arrive(WideBarrier.READ)
        return state

    @cute.jit
    def _start_block(self, state: PipelineState):
        """Start P V, as a group of WGMMAs for each part of V."""
        wait(WideBarrier.WRITTEN)
        self._shrink()
        for pipe in self.pipes:
            pipe.consumer_wait(state)
        if const_expr(self.config.holds_values):
            wait(WideBarrier.SCORED)
        for i in cutlass.range_constexpr(len(self.accs)):
            tOrV = self.tOrVs[i][None, None, None, state.index]
            issue_gemm(self.mmas[i], self.accs[i], self.tOrP, tOrV, True)

    @cute.jit
    def _shrink(self):
        """For a new maximum, if some row of the warp has one."""
        factors = self.exchange.read_factors()
        if cute.arch.vote_any_sync(factors[0] != Float32(1.0) or factors[1] != Float32(1.0)):
            for acc in self.accs:
                scale_rows(acc, factors)

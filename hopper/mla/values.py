"""The second consumer warpgroup: the second half of the columns of O, from P that the first one makes."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.pipeline import PipelineState

from cute_kernels.fragments import ROWS_PER_THREAD
from hopper.wide.exchange import Exchange, WideBarrier, arrive, wait
from hopper.wide.values import ValuesConsumer


class MlaValues(ValuesConsumer):
    """``ValuesConsumer`` that does not give V of the last block back. ``inverse`` tells it what O is multiplied by in
    the end, the ``factors`` of a thread's rows."""

    def __init__(self, inverse: Exchange, *others: Any):
        super().__init__(*others)
        self.inverse = inverse
        self.factors = cute.make_rmem_tensor(ROWS_PER_THREAD, Float32)

    @cute.jit
    def attend_to_part(self, blocks: Int32, state: PipelineState) -> PipelineState:
        """Leave half of O of so many key blocks, one at least, in ``acc``, not multiplied by ``factors``. Returns the
        state of the pipeline for the last one."""
        self.acc.fill(0.0)
        for _ in cutlass.range(blocks - 1, unroll=1):
            self._add_block(state)
            arrive(WideBarrier.READ)
            self.pipe.consumer_release(state)
            state.advance()
        self._add_block(state)
        wait(WideBarrier.SUMMED)
        self.factors.store(self.inverse.read_factors().load())
        # Before the other warpgroup hands over P of another tile, and then factors.
        arrive(WideBarrier.READ)
        return state

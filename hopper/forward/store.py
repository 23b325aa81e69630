"""How O and LSE of 64 rows leave for global memory."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32

from cute_kernels.fragments import store_rows
from cute_kernels.invariant import LoopInvariant
from hopper.config import WARPGROUP_ROWS
from hopper.tiles import TmaOperand


@dataclass(frozen=True)
class DenseTmaStore(LoopInvariant):
    """For sequences of one length, each with rows of its own. O goes by TMA, which clips what lies past the end of the
    sequence or of head_dim_v; LSE, (seqlen_q or 0, heads, batch), straight from registers.

    One warp of each warpgroup calls all but ``lse``.
    """

    o: TmaOperand
    mLSE: cute.Tensor
    head_dim_v: int

    @cute.jit
    def lse(self, values: cute.Tensor, head: Int32, batch: Int32, row: Int32, lane: Int32):
        """Those of the thread's rows, of which the first is query ``row``."""
        store_rows(values, self.mLSE[None, head, batch], row, lane)

    @cute.jit
    def start(self, wg: Int32, row_block: Int32, head: Int32, batch: Int32):
        """Start the copy of stage ``wg`` of O to the block of 64 rows number ``row_block`` of the sequence."""
        tOsO, tOgO = self.o.partition((WARPGROUP_ROWS, self.head_dim_v), (row_block, 0), head, batch)
        cute.copy(self.o.atom, tOsO[None, wg], tOgO)
        cute.arch.cp_async_bulk_commit_group()

    def wait(self):
        """Until all copies have read their shared memory."""
        cute.arch.cp_async_bulk_wait_group(0, read=True)

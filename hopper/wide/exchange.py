"""What the two consumer warpgroups tell each other, by named barriers and shared memory."""

from enum import IntEnum

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warp

from cute_kernels.fragments import LANES_PER_ROW, ROW_STRIDE, ROWS_PER_THREAD, first_row_of_thread
from cute_kernels.invariant import LoopInvariant
from hopper.config import WARPGROUP_THREADS
from hopper.wide.operands import WideSmem


class WideBarrier(IntEnum):
    """Hardware ids. 1 and 2 are of one warpgroup each (``sync_warpgroup``), these of both."""

    WRITTEN = 3
    SCORED = 4
    READ = 5
    SUMMED = 6


def arrive(barrier: WideBarrier) -> None:
    cute.arch.barrier_arrive(barrier_id=barrier, number_of_threads=2 * WARPGROUP_THREADS)


def wait(barrier: WideBarrier) -> None:
    cute.arch.barrier(barrier_id=barrier, number_of_threads=2 * WARPGROUP_THREADS)


@cute.jit
def sync_cluster(ctas: cutlass.Constexpr[int]):
    """Barrier among all threads of a cluster, or of a CTA without one."""
    if const_expr(ctas > 1):
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    else:
        cute.arch.sync_threads()


class Exchange(LoopInvariant):
    """P of a key block, and a factor of each row of O, from the first warpgroup to the second.

    The first one writes when the second has READ what was there, and says WRITTEN. By SCORED it says that the WGMMAs of
    its next scores are nearly done, so that the tensor cores are free for P V of the second.

    What O is multiplied by in the end is handed over by an exchange of its own, whose factors are SUMMED once a tile
    and read before the P of the last block is said to be.

    No barrier is arrived at twice before the other side has waited for it: the first one arrives at WRITTEN, SCORED and
    SUMMED after a wait for READ, and the second one at READ after it has waited for all.
    """

    def __init__(self, smem: WideSmem, warp_in_group: Int32, lane: Int32):
        self.smem, self.lane = smem, lane
        self.thread = warp_in_group * cute.arch.WARP_SIZE + lane
        self.row = first_row_of_thread(warp_in_group, lane)

    def prime(self) -> None:
        """By the second warpgroup, once: there is nothing to read."""
        arrive(WideBarrier.READ)

    @cute.jit
    def write_factors(self, factors: cute.Tensor):
        """Those of the thread's two rows, after ``wait(READ)``."""
        if self.lane % LANES_PER_ROW == 0:
            for r in cutlass.range_constexpr(ROWS_PER_THREAD):
                self.smem.factors[self.row + r * ROW_STRIDE] = factors[r]

    def write_p(self, mma: cute.TiledMma, values: cute.Tensor) -> None:
        """P, laid out as an accumulator of ``mma`` is, after ``wait(READ)``."""
        dtype = self.smem.p.element_type
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), dtype)
        copy = cute.make_tiled_copy_C(atom, mma).get_slice(self.thread)
        cute.copy(atom, copy.retile(values), copy.partition_D(self.smem.p))
        cute.arch.fence_view_async_shared()

    def read_factors(self) -> cute.Tensor:
        """After ``wait(WRITTEN)``."""
        factors = cute.make_rmem_tensor(ROWS_PER_THREAD, Float32)
        for r in range(ROWS_PER_THREAD):
            factors[r] = self.smem.factors[self.row + r * ROW_STRIDE]
        return factors

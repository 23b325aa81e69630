"""Named barriers of the backward kernel (hardware ids; 0 belongs to ``sync_threads``)."""

from enum import IntEnum

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from hopper.backward.config import BackwardConfig
from hopper.config import WARPGROUP_THREADS


class BackwardBarrier(IntEnum):
    """CONSUMERS is of all consumer warpgroups; WARPGROUP is the first of one for each of them."""

    CONSUMERS = 1
    WARPGROUP = 2


@cute.jit
def sync_consumers(config: cutlass.Constexpr[BackwardConfig]):
    cute.arch.barrier(
        barrier_id=BackwardBarrier.CONSUMERS, number_of_threads=config.consumers * WARPGROUP_THREADS
    )


@cute.jit
def sync_warpgroup(wg: Int32):
    cute.arch.barrier(barrier_id=BackwardBarrier.WARPGROUP + wg, number_of_threads=WARPGROUP_THREADS)

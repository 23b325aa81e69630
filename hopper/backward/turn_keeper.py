"""The warps of the paired backward kernel that keep the order in which dQ is summed."""

import cutlass.cute as cute
from cutlass import Int32
from cutlass.pipeline import PipelineAsync

from cute_kernels.backward.turns import count_up_for_all, wait_for_count
from cute_kernels.invariant import LoopInvariant
from hopper.backward.exchange import state_of


class TurnKeeper(LoopInvariant):
    """Tells a consumer warpgroup when it may add its part of dQ to a query tile, and the next key tile when it has.

    ``pipe`` has one stage: full when it is the warpgroup's turn, empty when its warps have added. ``added`` is int32
    (query tiles of all heads,), zero before the launch: how many key tiles have added to this part of each; with
    ``is_shared`` these may be of several sequences (``turns.py``). To ask for the count and to wait until additions can
    be seen takes as long as a GEMM or two. So a warp does it that has nothing else to do, and the consumers compute
    meanwhile.
    """

    def __init__(self, pipe: PipelineAsync, added: cute.Tensor, is_shared: bool):
        self.pipe, self.added, self.is_shared = pipe, added, is_shared

    @cute.jit
    def keep(self, block: Int32, tile: Int32, turn: Int32):
        """The turn at block ``block`` of the CTA: at query tile ``tile``, after ``turn`` other key tiles."""
        if cute.arch.lane_idx() == 0:
            place = self.added.iterator + self.added.layout(tile)
            wait_for_count(place, turn, self.is_shared)
            self.pipe.producer_commit(state_of(1, block, is_producer=True))
            self.pipe.producer_acquire(state_of(1, block + 1, is_producer=True))
            # The additions are other warps'; they are seen before the count by whoever sees that.
            count_up_for_all(place, turn, self.is_shared)

"""Named barriers of the forward kernel (hardware ids; 0 belongs to ``sync_threads``)."""

from enum import IntEnum

import cutlass.cute as cute
from cutlass import Int32, const_expr

from cute_kernels.invariant import LoopInvariant
from hopper.config import WARPGROUP_THREADS, ForwardConfig

MAX_CONSUMERS = 3


class NamedBarrier(IntEnum):
    """First id of each family; a family has one barrier for each consumer warpgroup. V_READ is only one, and the id
    before it is taken by ``kv_source``."""

    EPILOGUE = 1
    PING_PONG = EPILOGUE + MAX_CONSUMERS
    V_READ = PING_PONG + MAX_CONSUMERS + 1


class PingPong(LoopInvariant):
    """Turn-taking of the consumer warpgroups on the tensor cores (FlashAttention-3, section 3.1).

    In the pipelined loop a warpgroup issues the two GEMMs of a block only in its turn, and passes the turn on once
    they are issued, so that its softmax runs while the next warpgroup's GEMMs do. Without the pipeline only Q K^T
    is taken in turns, and the turn passes when it has finished. Each turn is one barrier, shared by the warpgroup
    that waits and the one before it in the ring. Without ``config.ping_pong`` nothing is emitted.
    """

    def __init__(self, config: ForwardConfig, wg: Int32):
        self.config = config
        self.wg = wg

    @cute.jit
    def prime(self):
        """Give the first turn to warpgroup 0; called once, by every consumer."""
        if const_expr(self.config.ping_pong):
            if self.wg == self.config.consumers - 1:
                self._arrive(Int32(0))

    @cute.jit
    def take_turn(self):
        if const_expr(self.config.ping_pong):
            cute.arch.barrier(
                barrier_id=NamedBarrier.PING_PONG + self.wg, number_of_threads=2 * WARPGROUP_THREADS
            )

    @cute.jit
    def pass_turn(self):
        if const_expr(self.config.ping_pong):
            following = self.wg + 1
            self._arrive(Int32(0) if following == self.config.consumers else following)

    @cute.jit
    def _arrive(self, wg: Int32):
        cute.arch.barrier_arrive(
            barrier_id=NamedBarrier.PING_PONG + wg, number_of_threads=2 * WARPGROUP_THREADS
        )


@cute.jit
def sync_warpgroup(wg: Int32):
    """Barrier among the 128 threads of one consumer warpgroup."""
    cute.arch.barrier(barrier_id=NamedBarrier.EPILOGUE + wg, number_of_threads=WARPGROUP_THREADS)


@cute.jit
def sync_consumers(config: ForwardConfig):
    """Barrier among all consumer warpgroups: none of them reads V any more."""
    cute.arch.barrier(barrier_id=NamedBarrier.V_READ, number_of_threads=config.consumers * WARPGROUP_THREADS)

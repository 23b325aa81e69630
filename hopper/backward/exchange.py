"""How the warpgroups of the paired backward kernel, and the two CTAs of its clusters, hand blocks to each other."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.pipeline import PipelineAsync, PipelineState, PipelineTmaAsync

from cute_kernels.invariant import LoopInvariant
from hopper.backward.config import CLUSTER_CTAS, PairedBackwardConfig
from hopper.config import WARPGROUP_ROWS, WARPGROUP_THREADS

WARPS = WARPGROUP_THREADS // 32


class PairPipelines(NamedTuple):
    """From the producers of both CTAs to the consumers of both, and ``p`` from the first warpgroup to the second.
    A stage of Q comes with its LSE, one of dO with its delta. ``turns`` has one from a ``TurnKeeper`` to each
    warpgroup where dQ is summed in a fixed order; else it is empty."""

    kv: PipelineTmaAsync
    q: PipelineTmaAsync
    do: PipelineTmaAsync
    p: PipelineAsync
    turns: tuple[PipelineAsync, ...]


def state_of(stages: int, block: Int32, is_producer: bool = False) -> PipelineState:
    """Where a pipeline of one or two stages stands at a block, or anything else, counted from 0."""
    index = block & (stages - 1)
    phase = (block >> (stages - 1)) & 1
    return PipelineState(stages, block, index, phase ^ 1 if is_producer else phase)


class Exchange(LoopInvariant):
    """dS^T of a block, written by one warpgroup and read by both of both CTAs.

    A warp writes its 16 keys to ``own``, (keys, queries, buffers), and a bulk copy sends them to ``other`` of the other
    CTA, where they complete a transaction. Each buffer has three mbarriers: ``full`` says that ``own`` is written,
    ``other_full`` that ``other`` is, and ``empty`` that neither the own CTA nor the other one, which has a copy, reads
    the block any more.
    """

    def __init__(
        self,
        config: PairedBackwardConfig,
        barriers: tuple[cute.Pointer, cute.Pointer, cute.Pointer],
        buffers: tuple[cute.Tensor, cute.Tensor],
        rank: Int32,
    ):
        self.config = config
        self.full, self.other_full, self.empty = barriers
        self.own, self.other = buffers
        self.rank = rank

    @cute.jit
    def initialize(self):
        """By one thread, before any other use."""
        for i in cutlass.range_constexpr(self.config.stages):
            cute.arch.mbarrier_init(self.full + i, WARPS)
            cute.arch.mbarrier_init(self.other_full + i, 1)
            cute.arch.mbarrier_init(self.empty + i, CLUSTER_CTAS * self.config.consumers * WARPS)

    @cute.jit
    def acquire(self, block: Int32):
        """Wait until the buffers of ``block`` may be written."""
        state = self._state(block)
        cute.arch.mbarrier_wait(self.empty + state.index, state.phase ^ 1)

    @cute.jit
    def publish(self, block: Int32, warp: Int32):
        """Say that this warp's keys are written to ``own``, and send them to the other CTA."""
        index = self._state(block).index
        size = 2 * self.config.tile_m * WARPGROUP_ROWS
        offset = index * size + warp * (size // WARPS)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            if warp == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(self.other_full + index, size)
            cute.arch.mbarrier_arrive(self.full + index)
            cute.arch.inline_ptx(
                "{ .reg .b32 to, bar;"
                " mapa.shared::cluster.u32 to, {$r0}, {$r4}; mapa.shared::cluster.u32 bar, {$r3}, {$r4};"
                " cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
                " [to], [{$r1}], {$r2}, [bar]; }",
                read_only_args=[
                    self.other.iterator.toint() + offset,
                    self.own.iterator.toint() + offset,
                    Int32(size // WARPS),
                    (self.other_full + index).toint(),
                    self.rank ^ 1,
                ],
            )

    @cute.jit
    def wait_own(self, block: Int32):
        state = self._state(block)
        cute.arch.mbarrier_wait(self.full + state.index, state.phase)

    @cute.jit
    def wait_other(self, block: Int32):
        state = self._state(block)
        cute.arch.mbarrier_wait(self.other_full + state.index, state.phase)

    @cute.jit
    def release(self, block: Int32):
        """Say, by each warp and to both CTAs, that it has read the block."""
        barrier = self.empty + self._state(block).index
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            for rank in cutlass.range_constexpr(CLUSTER_CTAS):
                cute.arch.mbarrier_arrive(barrier, Int32(rank))

    def index(self, block: Int32) -> Int32:
        """The buffers of a block."""
        return self._state(block).index

    def _state(self, block: Int32) -> PipelineState:
        return state_of(self.config.stages, block)

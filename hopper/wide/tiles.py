"""How the CTAs of a cluster learn of the tile that they work on next."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.pipeline import Agent, CooperativeGroup, PipelineAsync, PipelineState

from cute_kernels.tile_scheduler import MAILBOX_STAGES, TileScheduler
from hopper.wide.operands import Place

LEADER = 0
"""The CTA of a cluster that claims its tiles."""

NUMBER_BYTES = 4
"""Of a tile's number."""


class ClusterTileScheduler(TileScheduler):
    """``TileScheduler`` of a cluster: the producer warp of its first CTA claims a tile for all, and stores the number
    in the mailbox of each by ``st.async``, which fills the slot.

    A slot is empty when all warps of the cluster that work on tiles have read theirs, of which only the first CTA's
    barrier is told. Each producer arms the barrier of its own CTA, and learns of the tile as consumers do.
    """

    def __init__(
        self, counter: cute.Tensor, mailbox: cute.Tensor, pipe: PipelineAsync, lane: Int32, place: Place
    ):
        super().__init__(counter, mailbox, pipe, lane)
        self.place = place

    @staticmethod
    def make_cluster_pipe(barriers: cute.Pointer, consumer_warps: int, ctas: int) -> PipelineAsync:
        """For so many consumer warps of each of so many CTAs."""
        return PipelineAsync.create(
            num_stages=MAILBOX_STAGES,
            producer_group=CooperativeGroup(Agent.Thread, 1),
            consumer_group=CooperativeGroup(Agent.Thread, (consumer_warps + 1) * ctas),
            barrier_storage=barriers,
            consumer_mask=Int32(LEADER),
            defer_sync=True,
        )

    def first(self) -> Int32:
        return cute.arch.block_idx()[0] // self.place.cluster

    def handed_out(self) -> Int32:
        return cute.arch.grid_dim()[0] // self.place.cluster

    @cute.jit
    def claim(self, state: PipelineState) -> Int32:
        if self.lane == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(self.pipe.producer_get_barrier(state), NUMBER_BYTES)
            if self.place.rank == LEADER:
                tile = self._next_number()
                self.pipe.producer_acquire(state)
                for rank in cutlass.range_constexpr(self.place.cluster):
                    self._send(tile, rank, state)
        return self.receive(PipelineState(MAILBOX_STAGES, state.count, state.index, state.phase ^ 1))

    def _send(self, tile: Int32, rank: int, state: PipelineState) -> None:
        """To the CTA of this rank."""
        cute.arch.inline_ptx(
            "{ .reg .b32 to, bar;"
            " mapa.shared::cluster.u32 to, {$r0}, {$r2}; mapa.shared::cluster.u32 bar, {$r1}, {$r2};"
            " st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [to], {$r3}, [bar]; }",
            read_only_args=[
                (self.mailbox.iterator + state.index).toint(),
                self.pipe.producer_get_barrier(state).toint(),
                Int32(rank),
                tile,
            ],
        )

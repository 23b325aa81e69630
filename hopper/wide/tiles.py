"""Which tile a CTA works on next."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32
from cutlass.pipeline import PipelineState

from cute_kernels.invariant import LoopInvariant
from cute_kernels.tile_scheduler import TileScheduler


@dataclass(frozen=True)
class ClaimedTiles(LoopInvariant):
    """Of CTAs by themselves: the next free one, from a counter. ``state`` is that of the mailbox."""

    scheduler: TileScheduler

    def first(self) -> Int32:
        return self.scheduler.first()

    def claim(self, tile: Int32, state: PipelineState) -> Int32:
        """Producer warp."""
        return self.scheduler.claim(state)

    def receive(self, tile: Int32, state: PipelineState) -> Int32:
        """Consumer warps."""
        return self.scheduler.receive(state)

    def finish(self) -> None:
        """Producer warp, once there are no more tiles."""
        self.scheduler.finish()


@dataclass(frozen=True)
class DealtTiles(LoopInvariant):
    """Of clusters: dealt out in turn, so that the CTAs of a cluster know the next one without telling each other. The
    longest tiles come first, so that all clusters get about as much work."""

    cluster: int

    def first(self) -> Int32:
        return cute.arch.block_idx()[0] // self.cluster

    def claim(self, tile: Int32, state: PipelineState) -> Int32:
        return tile + cute.arch.grid_dim()[0] // self.cluster

    def receive(self, tile: Int32, state: PipelineState) -> Int32:
        return self.claim(tile, state)

    def finish(self) -> None:
        """There is nothing to leave as it was."""

"""The producer warp of the kernel for decoding over a latent: brings K and V of the key blocks of its CTA."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from hopper.decode.config import BOX_COLUMNS
from hopper.decode.operands import RawKeys
from hopper.decode.producer import EVICT_FIRST, Producer
from hopper.wide.operands import Place


@dataclass(frozen=True)
class MlaProducer(Producer):
    """Walks and looks pages up as ``Producer``; ``keys`` is K, ``values`` are the parts of V. Each has a pipeline, and
    all have the same state. In a cluster a CTA loads its part of a block for all."""

    values: tuple[RawKeys, ...]
    place: Place

    @property
    def at_once(self) -> int:
        """More would need more than the 40 registers of a producer."""
        return 1

    @cute.jit
    def _load(self, head: Int32, page: Int32, row: Int32, state: pipeline.PipelineState):
        """K, then the parts of V in the order in which they become free."""
        self._load_part(self.keys, head, 0, (page, row), state)
        for part in cutlass.range_constexpr(len(self.values)):
            self._load_part(self.values[part], head, sum(self.config.parts[:part]), (page, row), state)

    @cute.jit
    def _load_part(
        self,
        keys: RawKeys,
        head: Int32,
        column: cutlass.Constexpr[int],
        place: tuple[Int32, Int32],
        state: pipeline.PipelineState,
    ):
        """Columns from ``column`` on, as many as a stage has. They leave L2 first."""
        keys.pipe.producer_acquire(state)
        barrier = keys.pipe.producer_get_barrier(state)
        target_stage = keys.smem[None, None, state.index]
        box = (self.config.box_rows, BOX_COLUMNS)
        page, row = place
        policy = {"cache_policy": Int64(EVICT_FIRST)}
        own = self.config.boxes // self.config.cluster
        for i in cutlass.range_constexpr(own):
            number = self.place.rank * own + i
            of_page = keys.cache[None, None, head, cute.arch.shuffle_sync(page, offset=number)]
            source = cute.domain_offset((cute.arch.shuffle_sync(row, offset=number), column), of_page)
            for part in cutlass.range_constexpr(cute.size(keys.smem, mode=[1]) // BOX_COLUMNS):
                target, found = cpasync.tma_partition(
                    keys.atom,
                    0,
                    cute.make_layout(1),
                    cute.group_modes(cute.local_tile(target_stage, box, (number, part)), 0, 2),
                    cute.group_modes(cute.local_tile(source, box, (0, part)), 0, 2),
                )
                cute.copy(keys.atom, found, target, tma_bar_ptr=barrier, **policy, **self.place.targets)

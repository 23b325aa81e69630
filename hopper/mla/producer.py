"""The producer warp of the kernel for decoding over a latent: brings K and V of the key blocks of its CTA."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from cute_kernels.integers import divide, maximum
from hopper.decode.config import BOX_COLUMNS
from hopper.decode.operands import RawKeys
from hopper.decode.producer import Producer
from hopper.wide.operands import Place


@dataclass(frozen=True)
class MlaProducer(Producer):
    """Walks and looks pages up as ``Producer``; ``keys`` is K. ``values`` are the halves of V, in shared memory that
    both share: stages of the first half, then of the second. Each has a pipeline, and all three the same state. In a
    cluster a CTA loads its part of a block for all.

    Two stages are little against the way from memory. With ``prefetches`` L2 is asked for a block while the one before
    it waits for a stage; its page is then looked up two blocks ahead.
    """

    values: tuple[RawKeys, RawKeys]
    place: Place

    @cute.jit
    def run(self):
        """All of this CTA's piece of the row of blocks."""
        work = self.work
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.config.stages)
        sequence, tile, start, end = work.first_tile(self.lane)
        while start < end:
            seqlens = work.batch.seqlens(sequence)
            blocks = work.batch.blocks(seqlens)
            parts = work.parts(start, blocks.count)
            first = blocks.begin + parts.begin(work.cta)
            block = blocks.begin + parts.begin(work.cta + 1) - 1
            head = divide(tile, work.batch.row_tiles(seqlens))
            first_row, keys = work.batch.first_row(sequence), seqlens.seqlen_k
            page, row = self._look_up(sequence, maximum(block, 0), first_row, keys)
            next_page, next_row = page, row
            if const_expr(self.config.prefetches):
                next_page, next_row = self._look_up(sequence, maximum(block - 1, first), first_row, keys)
            for _ in cutlass.range(maximum(block + 1 - first, 0), unroll=1):
                block -= 1
                if const_expr(self.config.prefetches):
                    later_page, later_row = self._look_up(
                        sequence, maximum(block - 1, first), first_row, keys
                    )
                    if block >= first:
                        self._prefetch(head, next_page, next_row)
                    self._load(head, page, row, state)
                    page, row, next_page, next_row = next_page, next_row, later_page, later_row
                else:
                    next_page, next_row = self._look_up(sequence, maximum(block, first), first_row, keys)
                    self._load(head, page, row, state)
                    page, row = next_page, next_row
                state.advance()
            start += blocks.count
            sequence, tile = work.batch.following(sequence, tile, work.batch.tiles(seqlens))

    @cute.jit
    def _load(self, head: Int32, page: Int32, row: Int32, state: pipeline.PipelineState):
        """K, then the halves of V in the order in which they become free."""
        self._load_part(self.keys, head, 0, (page, row), state.index, state)
        for half in cutlass.range_constexpr(len(self.values)):
            stage = half * self.config.stages + state.index
            self._load_part(self.values[half], head, half * self.config.half, (page, row), stage, state)

    @cute.jit
    def _load_part(
        self,
        keys: RawKeys,
        head: Int32,
        column: cutlass.Constexpr[int],
        place: tuple[Int32, Int32],
        stage: Int32,
        state: pipeline.PipelineState,
    ):
        """Columns from ``column`` on, as many as a stage has."""
        keys.pipe.producer_acquire(state)
        barrier = keys.pipe.producer_get_barrier(state)
        stage_of_keys = keys.smem[None, None, stage]
        for i in cutlass.range_constexpr(self._own_boxes):
            number = self.place.rank * self._own_boxes + i
            source = self._box_of(keys, head, column, place, number)
            for part in cutlass.range_constexpr(cute.size(keys.smem, mode=[1]) // BOX_COLUMNS):
                target, found = self._partition(keys, stage_of_keys, (number, part), source)
                cute.copy(keys.atom, found, target, tma_bar_ptr=barrier, **self.place.targets)

    @cute.jit
    def _prefetch(self, head: Int32, page: Int32, row: Int32):
        """Have L2 fetch this CTA's part of a block."""
        for keys in (self.keys, self.values[0]):
            columns = self.config.head_dim if const_expr(keys is self.keys) else self.config.head_dim_v
            for i in cutlass.range_constexpr(self._own_boxes):
                number = self.place.rank * self._own_boxes + i
                source = self._box_of(keys, head, 0, (page, row), number)
                # Unlike a copy it does not choose a lane by itself.
                with cute.arch.elect_one():
                    for part in cutlass.range_constexpr(columns // BOX_COLUMNS):
                        _, found = self._partition(keys, keys.smem[None, None, 0], (0, 0), source, part)
                        cute.prefetch(keys.atom, found)

    @property
    def _own_boxes(self) -> int:
        """Of a block, that this CTA loads."""
        return self.config.boxes // self.config.cluster

    def _box_of(self, keys: RawKeys, head: Int32, column: int, place: tuple, number: Int32) -> cute.Tensor:
        """The cache from box ``number`` of a block on."""
        page, row = (cute.arch.shuffle_sync(x, offset=number) for x in place)
        return cute.domain_offset((row, column), keys.cache[None, None, head, page])

    def _partition(
        self, keys: RawKeys, stage: cute.Tensor, at: tuple, source: cute.Tensor, part: int | None = None
    ) -> tuple[cute.Tensor, cute.Tensor]:
        """Box ``at`` of a stage, and its columns, or those of ``part``, of the cache."""
        box = (self.config.box_rows, BOX_COLUMNS)
        return cpasync.tma_partition(
            keys.atom,
            0,
            cute.make_layout(1),
            cute.group_modes(cute.local_tile(stage, box, at), 0, 2),
            cute.group_modes(cute.local_tile(source, box, (0, at[1] if part is None else part)), 0, 2),
        )

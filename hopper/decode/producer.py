"""The producer warps of the decode kernel: bring K or V of the key blocks of their CTA, box by box."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from cute_kernels.integers import divide, maximum, minimum
from cute_kernels.invariant import LoopInvariant
from hopper.decode.config import WARP_THREADS, DecodeConfig
from hopper.decode.operands import RawKeys, Work


@dataclass(frozen=True)
class Producer(LoopInvariant):
    """Loads K, or V, of every block that this CTA visits, the last of a tile first.

    ``table`` has int32 (batch, pages), the page of each ``page_size`` keys, or nothing where sequence b has page b. Its
    entries are looked up by a lane for each box, of as many blocks at once as there are lanes for, while those of the
    blocks before are used. Nothing is done with a number before that: who did so would wait for its load, between two
    loads of keys.
    """

    config: DecodeConfig
    work: Work
    keys: RawKeys
    table: tuple[cute.Tensor, ...]
    page_size: Int32
    lane: Int32

    @property
    def at_once(self) -> int:
        """Blocks whose page numbers are looked up together."""
        return WARP_THREADS // self.config.boxes

    @cute.jit
    def run(self):
        """All of this CTA's piece of the row of blocks."""
        work = self.work
        stages = self.config.raw_stages or self.config.stages
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, stages)
        sequence, tile, start, end = work.first_tile(self.lane)
        while start < end:
            seqlens = work.batch.seqlens(sequence)
            blocks = work.batch.blocks(seqlens)
            parts = work.parts(start, blocks.count)
            first = blocks.begin + parts.begin(work.cta)
            block = blocks.begin + parts.begin(work.cta + 1) - 1
            head = work.heads.head(divide(tile, work.batch.row_tiles(seqlens)))
            first_row, keys = work.batch.first_row(sequence), seqlens.seqlen_k
            number = self._look_up(sequence, block, first_row)
            while first <= block:
                next_number = self._look_up(sequence, block - self.at_once, first_row)
                count = minimum(block + 1 - first, self.at_once) if self.at_once > 1 else 1
                for i in cutlass.range(count, unroll=1):
                    page, row = self._page(number, i), self._row(block - i, first_row, keys)
                    self._load(head, page, row, state)
                    self._load_scales(
                        block - i, (blocks.first_seen, keys), head, (self.lane, page, row), state
                    )
                    state.advance()
                block -= count
                number = next_number
            start += blocks.units
            sequence, tile = work.batch.following(sequence, tile, work.batch.tiles(seqlens))

    def _look_up(self, sequence: Int32, block: Int32, first_row: Int32) -> Int32:
        """What is said to be the page of this lane's box, of key block ``block`` or of one before."""
        c = self.config
        key = maximum(block - self.lane // c.boxes, 0) * c.tile_n + self.lane % c.boxes * c.box_rows
        for table in self.table:
            # A box without keys may lie behind the last page.
            return table[sequence, minimum(divide(first_row + key, self.page_size), table.shape[1] - 1)]
        return sequence

    def _page(self, number: Int32, i: Int32) -> Int32:
        """That of this lane's box of the ``i``-th of the blocks that were looked up."""
        boxes = self.config.boxes
        page = cute.arch.shuffle_sync(number, offset=i * boxes + minimum(self.lane, boxes - 1))
        return minimum(maximum(page, 0), self.keys.cache.shape[3] - 1)

    @cute.jit
    def _row(self, block: Int32, first_row: Int32, keys: Int32) -> Int32:
        """The row of the page with which this lane's box of a key block begins: the one behind the last, where TMA
        finds zeros, for a box that has no key."""
        c = self.config
        key = block * c.tile_n + minimum(self.lane, c.boxes - 1) * c.box_rows
        row = first_row + key
        if const_expr(len(self.table) > 0):
            row -= divide(row, self.page_size) * self.page_size
        return row if key < keys else self.page_size

    def _load_scales(
        self, block: Int32, seen: tuple, head: Int32, place: tuple, state: pipeline.PipelineState
    ):
        for scales in self.keys.scales:
            barrier = self.keys.pipe.producer_get_barrier(state)
            scales.load(block, seen, head, place, barrier, state.index)

    @cute.jit
    def _load(self, head: Int32, page: Int32, row: Int32, state: pipeline.PipelineState):
        """A block, whose boxes lie where the lanes say."""
        keys = self.keys
        keys.pipe.producer_acquire(state)
        barrier = keys.pipe.producer_get_barrier(state)
        stage = keys.smem[None, None, state.index]
        box = (self.config.box_rows, keys.box_columns)
        for i in cutlass.range_constexpr(self.config.boxes):
            of_page = keys.cache[None, None, head, cute.arch.shuffle_sync(page, offset=i)]
            source = cute.domain_offset((cute.arch.shuffle_sync(row, offset=i), 0), of_page)
            for part in cutlass.range_constexpr(cute.size(keys.smem, mode=[1]) // keys.box_columns):
                target, found = cpasync.tma_partition(
                    keys.atom,
                    0,
                    cute.make_layout(1),
                    cute.group_modes(cute.local_tile(stage, box, (i, part)), 0, 2),
                    cute.group_modes(cute.local_tile(source, box, (0, part)), 0, 2),
                )
                cute.copy(keys.atom, found, target, tma_bar_ptr=barrier)

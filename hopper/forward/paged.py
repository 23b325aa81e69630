"""Keys and values in the pages of a cache: where each box of a key block lies, and how TMA loads it."""

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from cute_kernels.invariant import LoopInvariant
from cute_kernels.key_blocks import KeyBlocks
from cute_kernels.plan.parts import sequence_of_number
from cute_kernels.seqlen import PackedRows
from hopper.forward.kv_source import FoundTiles, WordOfNextTile
from hopper.forward.operands import PerOperand, Work
from hopper.forward.producer import NO_WORD, NoWord, Producer
from hopper.tiles import TmaOperand, ragged_view


@dataclass(frozen=True)
class Pages(LoopInvariant):
    """Where the keys of each sequence lie in a cache of ``number`` pages of ``size`` rows.

    ``table`` is int32 (batch, pages of a sequence); numbers outside of the cache count as the nearest page. ``leftpad``
    is int32, the first row of each sequence in the one page that it has, or (0,). A page begins ``step`` rows after the
    one before it, in K as in V.
    """

    table: cute.Tensor
    leftpad: cute.Tensor
    number: Int32
    step: Int32
    size: cute.FastDivmodDivisorV2

    @cute.jit
    def rows_of(self, batch: Int32, seqlen_k: Int32) -> tuple[Int32, Int32]:
        """The first row of a sequence, and one past its last, counted over its pages."""
        first, end = Int32(0), seqlen_k
        # The sequence behind the last one has no keys, and no pad.
        if batch < self.leftpad.shape[0]:
            size = self.size.divisor
            first = cutlass.min(cutlass.max(self.leftpad[batch], 0), size)
            end = cutlass.min(first + seqlen_k, size)
        return first, end

    @cute.jit
    def page_of(self, batch: Int32, row: Int32, end: Int32) -> Int32:
        """What the table has for a row of a sequence; 0 for one that is not from 0 to ``end``, which it may lack."""
        page = Int32(0)
        if row >= 0 and row < end:
            page = self.table[batch, row // self.size]
        return page

    def row_of(self, page: Int32, row: Int32) -> Int32:
        """In the cache, of a row of a sequence in a page as the table has it."""
        return cutlass.min(cutlass.max(page, 0), self.number - 1) * self.step + row % self.size


def page_view(tensor: cute.Tensor, order: tuple[int, int, int], row_mode: int) -> cute.Tensor:
    """A cache (pages, page_size, heads, columns) as TMA has to see it so that it stops at any row: a ``ragged_view`` of
    the modes in ``order``, rows that of ``row_mode``. A page is one more step of rows, whole ones."""
    return ragged_view(cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=order)), row_mode)


Q_WARP, K_WARP, V_WARP = range(3)


class PagedTma(FoundTiles):
    """K and V in the pages of a cache (``Pages``), by TMA in boxes of ``page_box`` rows that lie in one page each.

    A block may be many boxes, so each operand has a warp of its own. The fourth warp finds tiles, and that of K asks
    for them.

    A box ends where the sequence does, and reads as zeros from there on: neither what is left of a page nor a page that
    the sequence has not come to is ever read.
    """

    loading_warps = 3

    def arrange_k(self, mK: cute.Tensor, batch: Any) -> cute.Tensor:
        return page_view(mK, (1, 3, 2), 0)

    def arrange_v(self, mV: cute.Tensor) -> cute.Tensor:
        return page_view(mV, (3, 1, 2), self.v_row_mode)

    def pages(self, arguments: PerOperand, given: tuple) -> tuple:
        """One tuple of the fields of ``Pages``."""
        mK = arguments.k
        step = Int32(mK.stride[0] // mK.stride[1])
        return ((*given, mK.shape[0], step, cute.FastDivmodDivisorV2(mK.shape[1])),)

    def make_k_atom(self, mK: cute.Tensor, layout: cute.ComposedLayout) -> tuple[cute.CopyAtom, cute.Tensor]:
        box = self.config.page_box, self.config.head_dim
        return make_box_atom(mK, layout, box)

    def make_v_atom(self, mVt: cute.Tensor, dtype) -> tuple[cute.CopyAtom, cute.Tensor]:
        box = self.config.head_dim_v, self.config.page_box
        return make_box_atom(mVt, self.v_layout(dtype), box)

    @cute.jit
    def produce(self, work: Work, producer: Producer, storage: Any, warp: Int32):
        (pages,), lane = work.pages, cute.arch.lane_idx()
        if warp == Q_WARP:
            self._load_tiles(work, QueryLoader(producer), NO_WORD)
        elif warp == K_WARP:
            keys = BoxLoader(pages, producer.k, producer.pipes.k, self._box_of_k, (lane, self.config.split))
            self._load_tiles(work, keys, WordOfNextTile())
        elif warp == V_WARP:
            values = BoxLoader(pages, producer.v, producer.pipes.v, self._box_of_v, (lane, self.config.split))
            self._load_tiles(work, values, NO_WORD)
        else:
            self._find_tiles(work)

    @property
    def _box_of_k(self) -> tuple[int, int]:
        return self.config.page_box, self.config.head_dim

    @property
    def _box_of_v(self) -> tuple[int, int]:
        return self.config.head_dim_v, self.config.page_box


def make_box_atom(
    tensor: cute.Tensor, layout: cute.ComposedLayout, box: tuple[int, int]
) -> tuple[cute.CopyAtom, cute.Tensor]:
    """The TMA that loads a box of a block, of whose staged ``layout`` in shared memory it is a part."""
    block = cute.select(layout.outer, mode=[0, 1])
    of_box = cute.make_composed_layout(layout.inner, 0, cute.zipped_divide(block, box)[0])
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tensor, of_box, box)


class QueryLoader(LoopInvariant):
    """Loads Q of a tile. Its ``load_tile`` has the arguments of that of ``Producer``, as has ``BoxLoader``'s."""

    def __init__(self, producer: Producer):
        self.producer = producer

    @cute.jit
    def load_tile(
        self,
        coordinates: tuple,
        head_kv: Int32,
        blocks: KeyBlocks,
        kv_state: pipeline.PipelineState,
        q_phase: Int32,
        word: NoWord,
    ) -> pipeline.PipelineState:
        m_block, head, _ = coordinates
        self.producer.load_queries(m_block, head, blocks.seqlens, q_phase)
        return kv_state


class BoxLoader(LoopInvariant):
    """Loads K or V. Each lane of the warp finds the page of one box of a block, and does so a block ahead of the loads,
    which never wait for the table. ``lane`` is also told whether the number of a sequence has that of a part in it."""

    def __init__(
        self,
        pages: Pages,
        operand: TmaOperand,
        pipe: pipeline.PipelineTmaAsync,
        box: tuple[int, int],
        lane: tuple[Int32, bool],
    ):
        self.pages, self.pipe, self.box = pages, pipe, box
        self.lane, self.has_parts = lane
        self.rows = box[operand.row_mode]
        self.boxes = cute.size(operand.smem, mode=[operand.row_mode]) // self.rows
        self.operand = replace(operand, smem=cute.group_modes(cute.flat_divide(operand.smem, box), 2, 4))

    @cute.jit
    def load_tile(
        self,
        coordinates: tuple,
        head_kv: Int32,
        blocks: KeyBlocks,
        state: pipeline.PipelineState,
        q_phase: Int32,
        word: NoWord,
    ) -> pipeline.PipelineState:
        """Issue the loads of one output tile; returns the state of the operand's pipeline after it."""
        tile_n, batch = blocks.block_range.tile_n, self.sequence(coordinates[2])
        word.of_tile(blocks.count)
        first, end = self.pages.rows_of(batch, blocks.seqlens.seqlen_k)
        row = self.row_of_lane(first + blocks.last * tile_n)
        page = self.pages.page_of(batch, row, end)
        for step in cutlass.range(blocks.count, unroll=1):
            page_ahead = self.pages.page_of(batch, row - tile_n, end)
            self.load(page, row, end, head_kv, state)
            word.of_block(blocks.count - 1 - step)
            state.advance()
            page = page_ahead
            row -= tile_n
        return state

    def sequence(self, batch: Int32) -> Int32:
        """Whose keys the pages have, of what the coordinates of a tile say."""
        return sequence_of_number(batch) if self.has_parts else batch

    def row_of_lane(self, row: Int32) -> Int32:
        """The first row of this lane's box of a block that begins with ``row``."""
        return row + self.lane * self.rows if self.boxes > 1 else row

    @cute.jit
    def load(self, page: Int32, row: Int32, end: Int32, head_kv: Int32, state: pipeline.PipelineState):
        """Issue the loads of a block, of which this lane knows the first ``row`` of one box and its ``page``, of a
        sequence that ends with row ``end``."""
        length = cutlass.min(cutlass.max(end - row, 0), self.rows)
        row = self.pages.row_of(page, row)
        self.pipe.producer_acquire(state)
        barrier = self.pipe.producer_get_barrier(state)
        for number in cutlass.range(self.boxes, unroll=1):
            rows = PackedRows(self._of_lane(row, number), self._of_lane(length, number))
            smem, gmem = self.operand.partition(self.box, (0, 0), head_kv, rows)
            cute.copy(self.operand.atom, gmem, smem[None, number, state.index], tma_bar_ptr=barrier)

    def _of_lane(self, value: Int32, lane: int) -> Int32:
        return value if self.boxes == 1 else cute.arch.shuffle_sync(value, lane)

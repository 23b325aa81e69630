"""e4m3 keys and values in the pages of a cache, V in rows that the producer transposes."""

import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Boolean, Int32

from cute_kernels.key_blocks import KeyBlocks
from cute_kernels.seqlen import SeqlenInfo
from hopper.forward.batch import DenseBatch
from hopper.forward.fp8.kv_source import BlockLoads, PackedTransposingRows
from hopper.forward.fp8.transpose import VTransposer
from hopper.forward.operands import Work
from hopper.forward.paged import BoxLoader, PagedTma, make_box_atom, page_view
from hopper.forward.producer import Producer

KEYS_WARP, ROWS_WARP = range(2)

SEQUENCE, FIRST, END, PAGE = range(4)
"""Registers of ``LoadsFromPages``: the tile's sequence, its first row and the one behind its last, counted over its
pages, and the page of this lane's box of the block that is loaded next."""


class PagedTransposingRows(PackedTransposingRows):
    """``PackedTransposingRows`` in boxes of ``page_box`` rows that lie in one page each (``PagedTma``)."""

    pages = PagedTma.pages

    def arrange_k(self, mK: cute.Tensor, batch: DenseBatch) -> cute.Tensor:
        return page_view(mK, (1, 3, 2), 0)

    def arrange_v(self, mV: cute.Tensor) -> cute.Tensor:
        return page_view(mV, (1, 3, 2), self.v_row_mode)

    def make_k_atom(self, mK: cute.Tensor, layout: cute.ComposedLayout) -> tuple[cute.CopyAtom, cute.Tensor]:
        return make_box_atom(mK, layout, (self.config.page_box, self.config.head_dim))

    def make_v_atom(self, mV: cute.Tensor, dtype) -> tuple[cute.CopyAtom, cute.Tensor]:
        return make_box_atom(mV, self._rows_layout(dtype), (self.config.page_box, self.config.head_dim_v))

    def _make_loads(self, work: Work, producer: Producer, transposer: VTransposer) -> BlockLoads:
        (pages,), c = work.pages, self.config
        lane = cute.arch.lane_idx(), c.split
        keys = BoxLoader(pages, producer.k, producer.pipes.k, (c.page_box, c.head_dim), lane)
        rows = BoxLoader(pages, transposer.v, transposer.pipe_rows, (c.page_box, c.head_dim_v), lane)
        return LoadsFromPages(producer, transposer, keys, rows)


class LoadsFromPages(BlockLoads):
    """``BlockLoads`` by two warps, one for K and Q, one for the rows of V, as a block may be many boxes. A lane finds
    the page of one of them. The table is asked behind the loads of the block before, and is not waited for."""

    def __init__(self, producer: Producer, transposer: VTransposer, keys: BoxLoader, rows: BoxLoader):
        super().__init__(producer, transposer)
        self.keys, self.rows = keys, rows
        self.state = cute.make_rmem_tensor(4, Int32)

    @cute.jit
    def enter_tile(self, batch: Int32, blocks: KeyBlocks):
        sequence = self.keys.sequence(batch)
        first, end = self.keys.pages.rows_of(sequence, blocks.seqlens.seqlen_k)
        self.state[SEQUENCE], self.state[FIRST], self.state[END] = sequence, first, end
        self._find_page(blocks.last)

    def is_due(self) -> Boolean:
        return self.transposer.warp <= ROWS_WARP

    @cute.jit
    def load_queries(self, m_block: Int32, head: Int32, seqlens: SeqlenInfo, q_turn: Int32):
        if self.transposer.warp == KEYS_WARP:
            self.producer.load_queries(m_block, head, seqlens, q_turn)

    @cute.jit
    def load_keys(self, head_kv: Int32, seqlens: SeqlenInfo, n_block: Int32, state: pipeline.PipelineState):
        if self.transposer.warp == KEYS_WARP:
            self.keys.load(self.state[PAGE], self._row(n_block), self.state[END], head_kv, state)

    @cute.jit
    def load_rows(self, head_kv: Int32, seqlens: SeqlenInfo, n_block: Int32, state: pipeline.PipelineState):
        if self.transposer.warp == ROWS_WARP:
            self.rows.load(self.state[PAGE], self._row(n_block), self.state[END], head_kv, state)

    def fetch_rows(self, head_kv: Int32, seqlens: SeqlenInfo, n_block: Int32):
        """It is not worth as many boxes."""

    @cute.jit
    def leave_block(self, n_block: Int32):
        self._find_page(n_block - 1)

    @cute.jit
    def _find_page(self, n_block: Int32):
        row = self._row(n_block)
        self.state[PAGE] = self.keys.pages.page_of(self.state[SEQUENCE], row, self.state[END])

    def _row(self, n_block: Int32) -> Int32:
        """The first one of this lane's box."""
        first = self.state[FIRST] + n_block * self.transposer.config.tile_n
        return self.keys.row_of_lane(first)

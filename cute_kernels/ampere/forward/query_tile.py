"""One query tile of the forward kernel without WGMMA, from where it lies to its O and LSE."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32

from cute_kernels.ampere.config import MMA_ROWS, WARP_THREADS, AmpereForwardConfig
from cute_kernels.ampere.forward.epilogue import Epilogue
from cute_kernels.ampere.forward.mainloop import Mainloop, WarpBlocks
from cute_kernels.ampere.forward.ring import KeyValueRing
from cute_kernels.ampere.forward.shift import ShiftSinkSoftmax, ShiftSoftmax
from cute_kernels.ampere.forward.warp_tiles import WarpTiles
from cute_kernels.ampere.options import KernelOptions
from cute_kernels.ampere.shared_tile import ALIGNMENT, SharedTile
from cute_kernels.ampere.tile_loader import TileLoader
from cute_kernels.dropout import Dropout
from cute_kernels.dtypes import DSL_DTYPES
from cute_kernels.fast_math import pin
from cute_kernels.fragments import first_column_of_thread, first_row_of_thread
from cute_kernels.invariant import LoopInvariant
from cute_kernels.key_blocks import BlockRange, KeyBlocks, ListedBlocks
from cute_kernels.mask import TileMask
from cute_kernels.plan.packed import PackedSeqlens, PackedTileOrder
from cute_kernels.problem import VARLEN
from cute_kernels.score_tile import (
    LOG2_E,
    ScoreRules,
    ScoreTile,
    function_rules,
    scale_after_functions,
)
from cute_kernels.seqlen import DenseSeqlens, SeqlenInfo
from cute_kernels.sequence_rows import numbers_of, rows_of
from cute_kernels.tile_scheduler import TileOrder
from cute_kernels.window import Window, window_of


@dataclass(frozen=True)
class Place(LoopInvariant):
    """Tile ``m_block`` of query head ``head`` of a sequence."""

    m_block: Int32
    head: Int32
    seqlens: SeqlenInfo


@dataclass(frozen=True)
class QueryTile(LoopInvariant):
    """Tile ``number`` in ``order``, of sequences of these ``lengths``."""

    config: AmpereForwardConfig
    order: TileOrder | PackedTileOrder
    lengths: DenseSeqlens | PackedSeqlens
    options: KernelOptions
    number: Int32
    heads_per_kv_head: Int32

    @property
    def window(self) -> Window:
        """Which keys a query sees."""
        return window_of(self.config.causal, self.options.sides)

    def attend(self, inputs: tuple, outputs: tuple, scale_log2: Float32) -> None:
        """Write O and LSE of the tile. ``inputs`` are Q, K and V of all sequences, ``outputs`` O and LSE."""
        c, place = self.config, self._place(self.number)
        head_kv = place.head // self.heads_per_kv_head
        blocks = self._blocks(place)
        sQ, sKV = self._allocate()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        thread, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
        ring = self._start_loads(place, head_kv, blocks, inputs, (sQ, sKV), thread)
        first_row = self._first_row(place, warp)
        rules = self._rules(scale_log2)
        scores = self._scores(rules, place, first_row, lane, blocks)
        tiles = WarpTiles(c, sQ, sKV, warp, lane)
        softmax = [self._softmax(scale_log2) for _ in range(c.bands)]
        mainloop = Mainloop(c, DSL_DTYPES[c.dtype], ring, tiles, softmax)
        step = mainloop.attend(scores, self._blocks_of_warp(place, blocks, warp))
        # Anew: what follows from pinned values is worked out behind the loop, and not held in registers through it.
        if c.window:
            place, warp, lane = self._anew()
            blocks = self._blocks(place)
            of_warp = self._blocks_of_warp(place, blocks, warp)
            scores = self._scores(rules, place, self._first_row(place, warp), lane, blocks)
            mainloop.attend_left_side(scores, of_warp, *step)
        if c.window or c.layout == VARLEN or c.changes_scores:
            place, warp, lane = self._anew()
            first_row = self._first_row(place, warp)
        for of_band in softmax:
            of_band.enter_tile((), place.head, place.seqlens)
        mO, mLSE = outputs
        Epilogue(c, sQ, warp, lane).store(
            mainloop,
            rows_of(mO, place.seqlens.rows_q, place.head),
            numbers_of(mLSE, place.seqlens.rows_q, place.head),
            first_row,
            (head_kv, place.seqlens.batch),
            tuple(each.factor for each in rules.dropout),
        )

    def _place(self, number: Int32) -> Place:
        m_block, head, batch = self.order.coordinates(number)
        return Place(m_block, head, self.lengths.of(batch))

    def _anew(self) -> tuple[Place, Int32, Int32]:
        """The place of the tile, warp and lane from pinned values."""
        thread = pin(cute.arch.thread_idx()[0], Int32)
        warp = cute.arch.make_warp_uniform(thread // WARP_THREADS)
        return self._place(pin(self.number, Int32)), warp, thread % WARP_THREADS

    def _start_loads(
        self, place: Place, head_kv: Int32, blocks: KeyBlocks, inputs: tuple, smem: tuple, thread: Int32
    ) -> KeyValueRing:
        """Of Q, and of the first key blocks."""
        c, seqlens, (mQ, mK, mV), (sQ, sKV) = self.config, place.seqlens, inputs, smem
        q_tile, v_tile = SharedTile(c.head_dim), SharedTile(c.head_dim_v)
        q_rows = rows_of(mQ, seqlens.rows_q, place.head)
        q_loader = TileLoader(q_tile, c.tile_m, c.threads, sQ, q_rows, thread)
        ring = KeyValueRing(
            c,
            TileLoader(q_tile, c.tile_n, c.threads, sKV, rows_of(mK, seqlens.rows_k, head_kv), thread),
            TileLoader(v_tile, c.tile_n, c.threads, sKV, rows_of(mV, seqlens.rows_k, head_kv), thread),
            blocks,
        )
        q_loader.load(place.m_block * c.tile_m, Int32(0), True)
        ring.fill(blocks.last)
        return ring

    def _first_row(self, place: Place, warp: Int32) -> Int32:
        """Of the warp."""
        return place.m_block * self.config.tile_m + warp * self.config.rows_per_warp

    def _rules(self, scale_log2: Float32) -> ScoreRules:
        c, options = self.config, self.options
        inverse_scale = Float32(LOG2_E) / scale_log2 if c.alibi else 1.0
        softcaps, dropout = options.softcaps(DSL_DTYPES[c.dtype]), Dropout.all_of(options.dropout)
        functions = function_rules(c.functions, options.captured, scale_log2)
        return ScoreRules(softcaps, options.slopes, inverse_scale, dropout, functions)

    def _softmax(self, scale_log2: Float32) -> ShiftSoftmax:
        """Of a band."""
        scale_log2 = scale_after_functions(self.config.functions, scale_log2)
        if self.config.sinks:
            return ShiftSinkSoftmax(self.options.sinks[0], scale_log2)
        return ShiftSoftmax(scale_log2)

    def _scores(
        self, rules: ScoreRules, place: Place, first_row: Int32, lane: Int32, blocks: KeyBlocks
    ) -> list[ScoreTile]:
        """Of each band of the warp; ``blocks`` are the CTA's."""
        row, column = first_row + first_row_of_thread(0, lane), first_column_of_thread(lane)
        masks = (
            TileMask(self.window, self.config.tile_n, place.seqlens, row + band * MMA_ROWS, column)
            for band in range(self.config.bands)
        )
        head, batch = place.head, place.seqlens.batch
        if self.config.block_lists:
            return [rules.listed_tile(mask, head, batch, blocks) for mask in masks]
        return [rules.tile(mask, head, batch) for mask in masks]

    def _blocks(self, place: Place) -> KeyBlocks:
        """Of the CTA."""
        block_range = self._block_range(self.config.tile_m)
        for lists in self.options.lists:
            entries = lists[place.seqlens.batch, place.head, place.m_block, None]
            return ListedBlocks.of(block_range, place.m_block, place.seqlens, entries)
        return block_range.of(place.m_block, place.seqlens)

    def _blocks_of_warp(self, place: Place, of_cta: KeyBlocks, warp: Int32) -> WarpBlocks:
        c = self.config
        of_warp, of_band = self._block_range(c.rows_per_warp), self._block_range(MMA_ROWS)
        number = place.m_block * c.warps + warp
        bands = tuple(of_band.of(c.bands * number + i, place.seqlens) for i in range(c.bands))
        return WarpBlocks.of(of_cta, of_warp.of(number, place.seqlens), bands)

    def _block_range(self, rows: int) -> BlockRange:
        return BlockRange(rows, self.config.tile_n, self.window)

    def _allocate(self) -> tuple[Int32, Int32]:
        """Where Q, and the ring of K and V, begin in shared memory."""
        c = self.config

        @cute.struct
        class SharedStorage:
            sQ: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, c.q_bytes], ALIGNMENT]
            sKV: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, c.stages * c.stage_bytes], ALIGNMENT]

        storage = cutlass.memory.SmemAllocator().allocate(SharedStorage)
        return Int32(storage.sQ.data_ptr().toint()), Int32(storage.sKV.data_ptr().toint())

"""One query tile of the forward kernel without WGMMA, from where it lies to its O and LSE."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32

from cute_kernels.ampere.config import MMA_ROWS, AmpereForwardConfig
from cute_kernels.ampere.forward.epilogue import Epilogue
from cute_kernels.ampere.forward.mainloop import Mainloop, WarpBlocks
from cute_kernels.ampere.forward.ring import KeyValueRing
from cute_kernels.ampere.forward.warp_tiles import WarpTiles
from cute_kernels.ampere.shared_tile import ALIGNMENT, SharedTile
from cute_kernels.ampere.tile_loader import TileLoader
from cute_kernels.dtypes import DSL_DTYPES
from cute_kernels.fragments import first_column_of_thread, first_row_of_thread
from cute_kernels.invariant import LoopInvariant
from cute_kernels.key_blocks import BlockRange
from cute_kernels.mask import TileMask
from cute_kernels.score_tile import ScoreTile
from cute_kernels.seqlen import SeqlenInfo
from cute_kernels.sequence_rows import numbers_of, rows_of
from cute_kernels.window import Window


@dataclass(frozen=True)
class QueryTile(LoopInvariant):
    """Tile ``m_block`` of query head ``head`` of a sequence; ``window`` says which keys its queries see."""

    config: AmpereForwardConfig
    seqlens: SeqlenInfo
    window: Window
    m_block: Int32
    head: Int32
    heads_per_kv_head: Int32

    def attend(self, inputs: tuple, outputs: tuple, scale_log2: Float32) -> None:
        """Write O and LSE of the tile. ``inputs`` are Q, K and V of all sequences, ``outputs`` O and LSE."""
        c, seqlens, m_block = self.config, self.seqlens, self.m_block
        head_kv = self.head // self.heads_per_kv_head
        blocks = self._block_range(c.tile_m).of(m_block, seqlens)

        sQ, sKV = self._allocate()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        thread, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
        mQ, mK, mV = inputs
        q_tile, v_tile = SharedTile(c.head_dim), SharedTile(c.head_dim_v)
        q_loader = TileLoader(q_tile, c.tile_m, c.threads, sQ, rows_of(mQ, seqlens.rows_q, self.head), thread)
        ring = KeyValueRing(
            c,
            TileLoader(q_tile, c.tile_n, c.threads, sKV, rows_of(mK, seqlens.rows_k, head_kv), thread),
            TileLoader(v_tile, c.tile_n, c.threads, sKV, rows_of(mV, seqlens.rows_k, head_kv), thread),
            blocks.begin,
        )
        q_loader.load(m_block * c.tile_m, Int32(0), True)
        ring.fill(blocks.last)

        first_row = m_block * c.tile_m + warp * c.rows_per_warp
        row, column = first_row + first_row_of_thread(0, lane), first_column_of_thread(lane)
        scores = [
            ScoreTile(TileMask(self.window, c.tile_n, seqlens, row + band * MMA_ROWS, column))
            for band in range(c.bands)
        ]
        mainloop = Mainloop(c, DSL_DTYPES[c.dtype], ring, WarpTiles(c, sQ, sKV, warp, lane), scale_log2)
        of_warp, of_band = self._block_range(c.rows_per_warp), self._block_range(MMA_ROWS)
        number = m_block * c.warps + warp
        bands = tuple(of_band.of(c.bands * number + i, seqlens) for i in range(c.bands))
        mainloop.attend(scores, WarpBlocks.of(blocks, of_warp.of(number, seqlens), bands))
        mO, mLSE = outputs
        Epilogue(c, sQ, warp, lane).store(
            mainloop,
            rows_of(mO, seqlens.rows_q, self.head),
            numbers_of(mLSE, seqlens.rows_q, self.head),
            first_row,
            (head_kv, seqlens.batch),
        )

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

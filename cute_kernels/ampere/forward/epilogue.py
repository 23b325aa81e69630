"""End of a tile: O from registers through shared memory to global memory, LSE straight to global memory."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_kernels.ampere.config import (
    CHUNK_BYTES,
    ELEMENT_BYTES,
    MMA_ROWS,
    WARP_THREADS,
    AmpereForwardConfig,
)
from cute_kernels.ampere.forward.mainloop import Mainloop
from cute_kernels.ampere.instructions import load_words, store_word, store_words_global
from cute_kernels.ampere.shared_tile import SharedTile
from cute_kernels.fast_math import pack
from cute_kernels.fragments import (
    COLUMNS_PER_GROUP,
    LANES_PER_ROW,
    ROW_STRIDE,
    ROWS_PER_THREAD,
    as_rows,
    store_rows,
)
from cute_kernels.invariant import LoopInvariant
from cute_kernels.softmax import normalize_rows

WORD_BYTES = 4


class Epilogue(LoopInvariant):
    """Writes the rows of one warp, staged where its rows of Q were, so that no warp waits for another."""

    def __init__(self, config: AmpereForwardConfig, sQ: Int32, warp: Int32, lane: Int32):
        self.config, self.lane = config, lane
        self.tile = SharedTile(config.head_dim_v)
        self.smem = sQ + warp * config.rows_per_warp * config.head_dim * ELEMENT_BYTES

    @cute.jit
    def store(self, mainloop: Mainloop, gO: cute.Tensor, gLSE: cute.Tensor, row: Int32, head_batch: tuple):
        """Normalise and store O (seqlen_q, head_dim_v) and LSE of a head; ``row`` is the warp's first query."""
        cute.arch.sync_warp()
        for band in cutlass.range_constexpr(self.config.bands):
            inverse_sum, lse = (cute.make_rmem_tensor(ROWS_PER_THREAD, Float32) for _ in range(2))
            mainloop.softmax[band].finalize(inverse_sum, lse, *head_batch)
            normalize_rows(mainloop.acc_O[band], inverse_sum)
            store_rows(lse, gLSE, row + band * MMA_ROWS + self.lane // LANES_PER_ROW, self.lane)
            self._stage(mainloop.acc_O[band], band, mainloop.dtype)
        cute.arch.sync_warp()
        self._copy_out(gO, row)

    def _stage(self, acc_O: cute.Tensor, band: int, dtype: type[cutlass.Numeric]) -> None:
        """A band of O, rounded, to shared memory: a word is two neighbouring columns."""
        rows = as_rows(acc_O)
        place = self.tile.offset(self.lane // LANES_PER_ROW, 0) + self.lane % LANES_PER_ROW * WORD_BYTES
        for group in range(self.config.head_dim_v // COLUMNS_PER_GROUP):
            twist, along = self.tile.step(group)
            for r in range(ROWS_PER_THREAD):
                below = (band * MMA_ROWS + r * ROW_STRIDE) * self.tile.pitch
                word = pack(rows[r, (0, group)], rows[r, (1, group)], dtype)
                store_word((self.smem + place) ^ twist, along + below, word)

    @cute.jit
    def _copy_out(self, gO: cute.Tensor, first_row: Int32):
        """Whole chunks of 16 bytes to global memory, without rows past seqlen_q and columns past head_dim_v."""
        lane_row, chunk = self.lane // self.tile.span, self.lane % self.tile.span
        rows_per_pass = WARP_THREADS // self.tile.span
        target = Int64(gO.iterator.toint()) + Int64(chunk * CHUNK_BYTES)
        for number in cutlass.range_constexpr(self.config.rows_per_warp // rows_per_pass):
            row = lane_row + number * rows_per_pass
            query = first_row + row
            if query < gO.shape[0]:
                source = self.smem + self.tile.offset(row, chunk)
                line = target + Int64(query) * Int64(gO.stride[0]) * ELEMENT_BYTES
                for i in cutlass.range_constexpr(self.tile.spans):
                    along = i * self.tile.span_bytes
                    if (chunk * CHUNK_BYTES + along) < gO.shape[1] * ELEMENT_BYTES:
                        store_words_global(line, along, load_words(source, along))

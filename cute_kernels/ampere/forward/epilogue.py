"""End of a tile: O from registers through shared memory to global memory, LSE straight to global memory."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.ampere.config import (
    ELEMENT_BYTES,
    MMA_ROWS,
    WARP_THREADS,
    AmpereForwardConfig,
)
from cute_kernels.ampere.forward.mainloop import Mainloop
from cute_kernels.ampere.shared_tile import SharedTile
from cute_kernels.ampere.tile_writer import TileWriter
from cute_kernels.ampere.warp_operand import WarpTarget
from cute_kernels.dropout import multiply_all
from cute_kernels.fast_math import pack
from cute_kernels.fragments import (
    COLUMNS_PER_GROUP,
    LANES_PER_ROW,
    ROWS_PER_THREAD,
    as_rows,
    store_rows,
)
from cute_kernels.invariant import LoopInvariant
from cute_kernels.softmax import normalize_rows


class Epilogue(LoopInvariant):
    """Writes the rows of one warp, staged where its rows of Q were, so that no warp waits for another."""

    def __init__(self, config: AmpereForwardConfig, sQ: Int32, warp: Int32, lane: Int32):
        self.config, self.lane = config, lane
        self.tile = SharedTile(config.head_dim_v)
        self.smem = sQ + warp * config.rows_per_warp * config.head_dim * ELEMENT_BYTES

    @cute.jit
    def store(
        self,
        mainloop: Mainloop,
        gO: cute.Tensor,
        gLSE: cute.Tensor,
        row: Int32,
        head_batch: tuple,
        factors: tuple[Float32, ...],
    ):
        """Normalise and store O (seqlen_q, head_dim_v) and LSE of a head; ``row`` is the warp's first query.
        ``factors`` has that of dropout, or none."""
        cute.arch.sync_warp()
        for band in cutlass.range_constexpr(self.config.bands):
            inverse_sum, lse = (cute.make_rmem_tensor(ROWS_PER_THREAD, Float32) for _ in range(2))
            mainloop.softmax[band].finalize(inverse_sum, lse, *head_batch)
            multiply_all(inverse_sum, factors)
            normalize_rows(mainloop.acc_O[band], inverse_sum)
            store_rows(lse, gLSE, row + band * MMA_ROWS + self.lane // LANES_PER_ROW, self.lane)
            self._stage(mainloop.acc_O[band], band, mainloop.dtype)
        cute.arch.sync_warp()
        writer = TileWriter(self.tile, WARP_THREADS, self.smem, gO, self.lane)
        writer.write(row, self.config.rows_per_warp)

    def _stage(self, acc_O: cute.Tensor, band: int, dtype: type[cutlass.Numeric]) -> None:
        rows, target = as_rows(acc_O), WarpTarget(self.tile, self.smem, self.lane)
        for group in range(self.config.head_dim_v // COLUMNS_PER_GROUP):
            for r in range(ROWS_PER_THREAD):
                target.store(band, group, r, pack(rows[r, (0, group)], rows[r, (1, group)], dtype))

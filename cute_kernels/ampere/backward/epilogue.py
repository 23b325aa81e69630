"""dK and dV of a key tile, from registers through shared memory to global memory."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_kernels.ampere.backward.config import AmpereBackwardConfig
from cute_kernels.ampere.backward.mainloop import Mainloop
from cute_kernels.ampere.backward.operands import SharedMemory, WarpShare
from cute_kernels.ampere.config import WARP_THREADS
from cute_kernels.ampere.shared_tile import SharedTile
from cute_kernels.ampere.tile_writer import TileWriter
from cute_kernels.ampere.warp_operand import WarpTarget
from cute_kernels.fast_math import pack
from cute_kernels.fragments import ROWS_PER_THREAD, as_rows
from cute_kernels.invariant import LoopInvariant


class Epilogue(LoopInvariant):
    """Stages dK where K was and dV where V was, then stores both. ``thread`` is the number of this one."""

    def __init__(self, config: AmpereBackwardConfig, smem: SharedMemory, thread: Int32):
        self.config, self.smem, self.thread = config, smem, thread
        self.tile = SharedTile(config.head_dim)

    @cute.jit
    def store(self, mainloop: Mainloop, targets: tuple, n_block: Int32, softmax_scale: Float32):
        """``targets`` are dK and dV of the head, (seqlen_k, columns)."""
        c = self.config
        places = self.smem.k, self.smem.k + c.v_offset
        cute.arch.sync_threads()
        self._stage(mainloop.acc_dK, places[0], softmax_scale, mainloop.dtype)
        dropout = mainloop.rules.dropout
        factor = dropout[0].factor if const_expr(len(dropout) > 0) else Float32(1.0)
        self._stage(mainloop.acc_dV, places[1], factor, mainloop.dtype)
        cute.arch.sync_threads()
        for i in cutlass.range_constexpr(2):
            writer = TileWriter(self.tile, c.threads, places[i], targets[i], self.thread)
            writer.write(n_block * c.tile_n, c.tile_n)

    def _stage(
        self, accs: list[cute.Tensor], place: Int32, factor: Float32, dtype: type[cutlass.Numeric]
    ) -> None:
        """A warp's bands, times ``factor`` and rounded."""
        splits = self.config.gradient_splits
        share = WarpShare(self.config, cute.arch.make_warp_uniform(self.thread // WARP_THREADS))
        place = place + share.gradient_row * self.tile.pitch
        target = WarpTarget(self.tile, place, self.thread % WARP_THREADS, share.gradient_turn)
        for band, acc in enumerate(accs):
            rows = as_rows(acc)
            for group in range(rows.shape[1][1]):
                chunk = 2 * splits * (group // 2) + group % 2
                for r in range(ROWS_PER_THREAD):
                    low, high = rows[r, (0, group)] * factor, rows[r, (1, group)] * factor
                    target.store(band, chunk, r, pack(low, high, dtype))

"""Online softmax of scores that are held by keys: S^T, whose query rows are spread over the warpgroup."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_kernels.fast_math import exp2, maximum_of, multiply_rounded, pin
from cute_kernels.fragments import LANES_PER_ROW
from cute_kernels.invariant import LoopInvariant
from cute_kernels.score_tile import SoftCap
from cute_kernels.softmax import LEAST
from hopper.decode.config import DecodeConfig
from hopper.decode.operands import sync_consumers
from hopper.decode.rows import swapped_row
from hopper.tiles import WARPS_PER_WARPGROUP

OTHER_LANES = (4, 8, 16)
"""Bits of their numbers in which lanes that have the same query rows differ."""


class SwappedSoftmax(LoopInvariant):
    """``OnlineSoftmax`` of rows of which each warp has other keys: maxima are exchanged in shared memory.

    ``exchange`` is float32 (warps, tile_m). Before ``start`` it has the scales of the rows, for warp 0. Under a softcap
    these are factors of what the tanh is of, and ``capped_log2`` has the one scale of what comes out of it.
    """

    def __init__(
        self,
        config: DecodeConfig,
        exchange: cute.Tensor,
        warp: Int32,
        lane: Int32,
        capped_log2: tuple[Float32, ...] = (),
    ):
        self.config, self.exchange, self.warp, self.lane = config, exchange, warp, lane
        self.capped_log2 = capped_log2
        self.scale_log2, self.row_max, self.shift, self.row_sum, self.row_scale = (
            cute.make_rmem_tensor(config.rows_per_thread, Float32) for _ in range(5)
        )
        if const_expr(config.softcap):
            self.cap_factor = cute.make_rmem_tensor(config.rows_per_thread, Float32)

    @cute.jit
    def start(self):
        """Behind a barrier. The first ``offer`` writes what is read here, and so has a barrier before it."""
        for r in cutlass.range_constexpr(self.config.rows_per_thread):
            scale = self.exchange[0, swapped_row(self.lane, r)]
            if const_expr(self.config.softcap):
                self.cap_factor[r] = scale
                scale = self.capped_log2[0]
            self.scale_log2[r] = scale
            self.row_max[r], self.shift[r] = -Float32.inf, Float32(LEAST)
            self.row_sum[r], self.row_scale[r] = Float32(0.0), Float32(1.0)
        sync_consumers()

    @cute.jit
    def cap(self, scores: cute.Tensor):
        """Leave the tanh of scores if there is a softcap, whose outputs are bfloat16 here; before they are masked."""
        if const_expr(self.config.softcap):
            for r in cutlass.range_constexpr(self.config.rows_per_thread):
                SoftCap(self.cap_factor[r], is_precise=False).apply(scores[None, r], Int32(0))

    @cute.jit
    def offer(self, scores: cute.Tensor):
        """This warp's largest scores, to all warps."""
        for r in cutlass.range_constexpr(self.config.rows_per_thread):
            largest = maximum_of(scores[None, r], self.row_max[r])
            for bit in OTHER_LANES:
                largest = cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, offset=bit))
            self._put(r, largest)

    @cute.jit
    def exponentiate(self, scores: cute.Tensor):
        """Turn scores into exp2 of their distance to the largest that any warp has offered, and sum them. Sets
        ``row_scale``, by which what was summed before must shrink."""
        sync_consumers()
        for r in cutlass.range_constexpr(self.config.rows_per_thread):
            row_max = self.row_max[r]
            for warp in cutlass.range_constexpr(WARPS_PER_WARPGROUP):
                row_max = cute.arch.fmax(row_max, self.exchange[warp, swapped_row(self.lane, r)])
            shift = cute.arch.fmax(multiply_rounded(row_max, self.scale_log2[r]), Float32(LEAST))
            self.row_scale[r] = exp2(self.shift[r] - shift)
            self.row_max[r], self.shift[r] = row_max, shift
            total = Float32(0.0)
            for n in cutlass.range_constexpr(cute.size(scores, mode=[0])):
                scores[n, r] = exp2(scores[n, r] * self.scale_log2[r] - shift)
                total += scores[n, r]
            self.row_sum[r] = self.row_sum[r] * self.row_scale[r] + pin(total)

    @cute.jit
    def finish(self):
        """Sums over all keys in place of the thread's."""
        for r in cutlass.range_constexpr(self.config.rows_per_thread):
            total = self.row_sum[r]
            for bit in OTHER_LANES:
                total += cute.arch.shuffle_sync_bfly(total, offset=bit)
            self._put(r, total)
        sync_consumers()
        for r in cutlass.range_constexpr(self.config.rows_per_thread):
            total = Float32(0.0)
            for warp in cutlass.range_constexpr(WARPS_PER_WARPGROUP):
                total += self.exchange[warp, swapped_row(self.lane, r)]
            self.row_sum[r] = total
        sync_consumers()

    @cute.jit
    def _put(self, r: cutlass.Constexpr[int], number: Float32):
        if self.lane < LANES_PER_ROW:
            self.exchange[self.warp, swapped_row(self.lane, r)] = number

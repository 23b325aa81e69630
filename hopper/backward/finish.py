"""After the backward kernel: dQ from float32 sums in the order of the accumulators to the inputs' dtype."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.fast_math import pack
from hopper.backward.config import BackwardConfig
from hopper.backward.dq import WORDS_PER_STORE
from hopper.config import WARPGROUP_ROWS, WARPGROUP_THREADS
from hopper.forward.kernel import DSL_DTYPES


class FinishKernel:
    """dQ = softmax_scale times its sums, each thread reading what a thread of ``GradientOfQ`` has added to."""

    def __init__(self, config: BackwardConfig):
        self.config = config
        self.dtype = DSL_DTYPES[config.dtype]

    @cute.jit
    def __call__(self, mSums: cute.Tensor, mdQ: cute.Tensor, softmax_scale: Float32, stream):
        """Launch. mSums (batch, heads, query tiles, warpgroups, words), mdQ (batch, seqlen_q, heads, head_dim)."""
        c = self.config
        self.kernel(mSums, mdQ, softmax_scale).launch(
            grid=(mSums.shape[2], mSums.shape[1], mSums.shape[0]),
            block=(WARPGROUP_THREADS * c.consumers, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(self, mSums: cute.Tensor, mdQ: cute.Tensor, softmax_scale: Float32):
        c = self.config
        tile, head, batch = cute.arch.block_idx()
        wg = cute.arch.thread_idx()[0] // WARPGROUP_THREADS
        thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
        warp, lane = thread // cute.arch.WARP_SIZE, cute.arch.lane_idx()
        row = tile * c.tile_m + 16 * warp + lane // 4
        column = 2 * (lane % 4)
        if cutlass.const_expr(c.splits_columns):
            column += wg * c.dq_columns
        else:
            row += wg * WARPGROUP_ROWS
        words = mSums[batch, head, tile, wg, None]
        for group in cutlass.range_constexpr(c.dq_words // WARPGROUP_THREADS // WORDS_PER_STORE):
            four = cute.make_rmem_tensor(WORDS_PER_STORE, Float32)
            place = group * WARPGROUP_THREADS + thread
            cute.autovec_copy(cute.local_tile(words, (WORDS_PER_STORE,), (place,)), four)
            for half in cutlass.range_constexpr(2):
                low, high = four[2 * half] * softmax_scale, four[2 * half + 1] * softmax_scale
                self._store(
                    mdQ, (batch, row + 8 * half, head, column + 8 * group), pack(low, high, self.dtype)
                )

    @cute.jit
    def _store(self, mdQ: cute.Tensor, place: tuple, pair: Int32):
        batch, row, head, column = place
        if row < mdQ.shape[1] and column < mdQ.shape[3]:
            target = cute.local_tile(mdQ[batch, row, head, None], (2,), (column // 2,))
            cute.recast_tensor(target, Int32)[0] = pair

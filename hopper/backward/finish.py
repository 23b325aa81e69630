"""After the backward kernel: dQ from float32 sums in the order of the accumulators to the inputs' dtype."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.fast_math import pack
from cute_kernels.fragments import (
    COLUMNS_PER_GROUP,
    LANES_PER_ROW,
    ROW_STRIDE,
    ROWS_PER_THREAD,
    ROWS_PER_WARP,
)
from hopper.backward.config import BackwardConfig
from hopper.backward.dq import WORDS_PER_STORE
from hopper.config import WARPGROUP_ROWS, WARPGROUP_THREADS
from hopper.forward.kernel import DSL_DTYPES

WORDS_PER_CHUNK = WORDS_PER_STORE * LANES_PER_ROW
"""What the four lanes of a row have added in a group of columns: eight columns of two rows."""

GROUPS_AT_ONCE = 4
"""Groups of columns that neighbouring threads write: 64 bytes of a row."""


class FinishKernel:
    """dQ = softmax_scale times its sums. A thread reads whole chunks and writes 16 bytes of each of their rows."""

    def __init__(self, config: BackwardConfig):
        self.config = config
        self.dtype = DSL_DTYPES[config.dtype]

    @cute.jit
    def __call__(self, mSums: cute.Tensor, mdQ: cute.Tensor, softmax_scale: Float32, stream):
        """Launch. mSums (batch, heads, query tiles, parts, words), mdQ (batch, seqlen_q, heads, head_dim)."""
        c = self.config
        self.kernel(mSums, mdQ, softmax_scale).launch(
            grid=(mSums.shape[2], mSums.shape[1], mSums.shape[0]),
            block=(WARPGROUP_THREADS * c.dq_parts, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(self, mSums: cute.Tensor, mdQ: cute.Tensor, softmax_scale: Float32):
        c = self.config
        tile, head, batch = cute.arch.block_idx()
        wg = cute.arch.thread_idx()[0] // WARPGROUP_THREADS
        thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
        chunks_per_group = WARPGROUP_ROWS // ROWS_PER_THREAD
        chunk = thread // GROUPS_AT_ONCE
        row = tile * c.tile_m + chunk // ROW_STRIDE * ROWS_PER_WARP + chunk % ROW_STRIDE
        first_column = Int32(0)
        if cutlass.const_expr(c.splits_columns):
            first_column = wg * c.dq_columns
        else:
            row += wg * WARPGROUP_ROWS
        words = mSums[batch, head, tile, wg, None]
        for i in cutlass.range_constexpr(c.dq_columns // COLUMNS_PER_GROUP // GROUPS_AT_ONCE):
            group = i * GROUPS_AT_ONCE + thread % GROUPS_AT_ONCE
            sums = cute.make_rmem_tensor(WORDS_PER_CHUNK, Float32)
            place = group * chunks_per_group + chunk
            cute.autovec_copy(cute.local_tile(words, (WORDS_PER_CHUNK,), (place,)), sums)
            for r in cutlass.range_constexpr(ROWS_PER_THREAD):
                pairs = cute.make_rmem_tensor(LANES_PER_ROW, Int32)
                for lane in cutlass.range_constexpr(LANES_PER_ROW):
                    first = WORDS_PER_STORE * lane + 2 * r
                    low, high = sums[first] * softmax_scale, sums[first + 1] * softmax_scale
                    pairs[lane] = pack(low, high, self.dtype)
                column = first_column + group * COLUMNS_PER_GROUP
                self._store(mdQ, (batch, row + r * ROW_STRIDE, head, column), pairs)

    @cute.jit
    def _store(self, mdQ: cute.Tensor, place: tuple, pairs: cute.Tensor):
        batch, row, head, column = place
        if row < mdQ.shape[1] and column < mdQ.shape[3]:
            target = cute.local_tile(
                mdQ[batch, row, head, None], (COLUMNS_PER_GROUP,), (column // COLUMNS_PER_GROUP,)
            )
            cute.autovec_copy(pairs, cute.recast_tensor(target, Int32))

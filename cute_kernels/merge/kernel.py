"""Adds the result of attention to some more keys to that of all keys before them, by their log-sum-exp, in place."""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.dtypes import DSL_DTYPES
from cute_kernels.fast_math import exp2
from cute_kernels.integers import ceil_div, divide
from cute_kernels.merge.config import COLUMNS, LANES, VECTOR, WARPS, MergeConfig, validate_merge_config

LOG2_E = math.log2(math.e)


class MergeKernel:
    """A warp a row: sum = share of the sum * sum + share of the part * part, with shares exp(lse - lse of both).

    It is computed in float32, and rounded once where the sum has 16 bits. A row that the part has no keys for (lse
    -inf) is left as it is, and the part not read.
    """

    def __init__(self, config: MergeConfig):
        validate_merge_config(config)
        self.dtype = DSL_DTYPES[config.dtype]
        self.sum_dtype = Float32 if config.sums_in_float32 else self.dtype

    @cute.jit
    def __call__(
        self, mSum: cute.Tensor, mSumLSE: cute.Tensor, mPart: cute.Tensor, mPartLSE: cute.Tensor, stream
    ):
        """Launch. mSum and mPart (batch, seqlen, heads, columns), mSumLSE and mPartLSE (batch, seqlen, heads)."""
        rows = mSum.shape[0] * mSum.shape[1] * mSum.shape[2]
        self.kernel(mSum, mSumLSE, mPart, mPartLSE).launch(
            grid=(ceil_div(rows, WARPS), 1, 1), block=(WARPS * LANES, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, mSum: cute.Tensor, mSumLSE: cute.Tensor, mPart: cute.Tensor, mPartLSE: cute.Tensor):
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        row = cute.arch.block_idx()[0] * WARPS + warp
        batch, seqlen, heads, _ = mSum.shape
        if row < batch * seqlen * heads:
            entry = divide(row, seqlen * heads)
            row_of_entry = row - entry * (seqlen * heads)
            query = divide(row_of_entry, heads)
            head = row_of_entry - query * heads
            sum_lse, part_lse = mSumLSE[entry, query, head], mPartLSE[entry, query, head]
            # NaN is unlike -inf and is added.
            if part_lse != -Float32.inf:
                largest = cute.arch.fmax(sum_lse, part_lse)
                of_sum = exp2((sum_lse - largest) * Float32(LOG2_E))
                of_part = exp2((part_lse - largest) * Float32(LOG2_E))
                total = of_sum + of_part
                scale = Float32(1.0) / total
                self._add(
                    mSum[entry, query, head, None],
                    mPart[entry, query, head, None],
                    of_sum * scale,
                    of_part * scale,
                    lane,
                )
                # All lanes have read the LSE before one of them writes it.
                cute.arch.sync_warp()
                if lane == 0:
                    mSumLSE[entry, query, head] = largest + cute.math.log2(total, fastmath=True) * Float32(
                        1.0 / LOG2_E
                    )

    @cute.jit
    def _add(self, sums: cute.Tensor, part: cute.Tensor, keep: Float32, share: Float32, lane: Int32):
        """sums = keep * sums + share * part, of one row."""
        columns = sums.shape[0]
        for first in cutlass.range(0, columns, COLUMNS, unroll=1):
            chunk = first // VECTOR + lane
            if chunk * VECTOR < columns:
                here = cute.local_tile(sums, (VECTOR,), (chunk,))
                total = cute.make_rmem_tensor(VECTOR, self.sum_dtype)
                more = cute.make_rmem_tensor(VECTOR, self.dtype)
                cute.autovec_copy(here, total)
                cute.autovec_copy(cute.local_tile(part, (VECTOR,), (chunk,)), more)
                moved = total.load().to(Float32) * keep + more.load().to(Float32) * share
                total.store(moved.to(self.sum_dtype))
                cute.autovec_copy(total, here)

"""Online softmax of FP8 scores: scales of blocks of Q, K and V, and a P that uses e4m3's range."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_kernels.fast_math import exp2, max_over_lanes, maximum_of, multiply_rounded, pin
from cute_kernels.fragments import LANES_PER_ROW, ROWS_PER_THREAD, as_rows
from cute_kernels.softmax import LN_2, OnlineSoftmax

P_EXPONENT = 8.0
"""P in [0, 1] times 2^8 uses e4m3's range up to 256 of 448."""


class BlockScales(NamedTuple):
    """Scales in global memory, float32, and how many rows share one.

    ``q`` (batch, heads, blocks of Q) and ``k`` (batch, kv_heads, blocks of K) multiply S. A block of V has the
    scale ``v_max`` (batch, kv_heads) times 2^``v_log2`` (batch, kv_heads, blocks of K), the latter at most 0.
    """

    q: cute.Tensor
    k: cute.Tensor
    v_log2: cute.Tensor
    v_max: cute.Tensor
    block_q: Int32
    block_k: Int32


class BlockScaledSoftmax(OnlineSoftmax):
    """The softmax of ``OnlineSoftmax`` on x = scale S + bias, with scale and bias of the block.

    scale = softmax_scale log2(e) s_q s_k. bias = log2(s_v / largest s_v of the head), so that the V block's scale
    enters P through the exponent and no pass over O is needed; it enters the running maximum too, so that the
    largest P of a row is 2^8 whichever blocks the row sees, and exact. The row sum takes it out again.
    """

    def __init__(self, scale_log2: Float32, scales: BlockScales, tile_n: int):
        super().__init__(scale_log2)
        self.scales, self.tile_n = scales, tile_n
        self.where = cute.make_rmem_tensor(2, Int32)
        self.tile_scale, self.v_max, self.scale, self.bias = (
            cute.make_rmem_tensor(1, Float32) for _ in range(4)
        )

    @cute.jit
    def enter_tile(self, row: Int32, head: Int32, head_kv: Int32, batch: Int32):
        s = self.scales
        self.where[0], self.where[1] = batch, head_kv
        self.tile_scale[0] = s.q[batch, head, row // s.block_q] * self.scale_log2
        self.v_max[0] = s.v_max[batch, head_kv]

    @cute.jit
    def enter_block(self, n_block: Int32):
        s, batch, head_kv = self.scales, self.where[0], self.where[1]
        block = n_block * self.tile_n // s.block_k
        self.scale[0] = s.k[batch, head_kv, block] * self.tile_scale[0]
        self.bias[0] = s.v_log2[batch, head_kv, block]

    @cute.jit
    def update_max(self, acc_S: cute.Tensor, is_first: cutlass.Constexpr[bool]):
        scores = as_rows(acc_S)
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            block_max = max_over_lanes(maximum_of(scores[r, None], -Float32.inf), LANES_PER_ROW)
            shift = multiply_rounded(block_max, self.scale[0]) + self.bias[0]
            if const_expr(not is_first):
                shift = cute.arch.fmax(shift, self.shift[r])
            origin = Float32(0.0) if shift == -Float32.inf else shift
            if const_expr(is_first):
                self.row_scale[r] = Float32(1.0)
                self.row_sum[r] = Float32(0.0)
            else:
                self.row_scale[r] = exp2(self.shift[r] - origin)
                self.row_sum[r] = self.row_sum[r] * self.row_scale[r]
            self.shift[r], self.origin[r] = shift, origin

    @cute.jit
    def exponentiate(self, acc_S: cute.Tensor, r: cutlass.Constexpr[int]):
        row = as_rows(acc_S)[r, None]
        offset = self.bias[0] - self.origin[r] + Float32(P_EXPONENT)
        row.store(row.load() * self.scale[0] + offset)
        for i in cutlass.range_constexpr(cute.size(row)):
            row[i] = exp2(row[i])
        block_sum = pin(row.load().reduce(cute.ReductionOp.ADD, Float32(0.0), 0))
        self.row_sum[r] = self.row_sum[r] + block_sum * exp2(-self.bias[0])

    @cute.jit
    def finalize(self, inverse_sum: cute.Tensor, lse: cute.Tensor):
        """As in ``OnlineSoftmax``; ``inverse_sum`` carries the largest scale of V."""
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            total = cute.arch.warp_reduction_sum(self.row_sum[r], threads_in_group=LANES_PER_ROW)
            is_empty = total == Float32(0.0)
            inverse_sum[r] = Float32(0.0) if is_empty else cute.arch.rcp_approx(total) * self.v_max[0]
            log2_sum = self.shift[r] + cute.math.log2(total, fastmath=True) - Float32(P_EXPONENT)
            lse[r] = -Float32.inf if is_empty else log2_sum * Float32(LN_2)

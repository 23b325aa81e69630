"""Online softmax of FP8 scores: scales of rows of Q and blocks of K and V, and a P that uses e4m3's range."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_kernels.fast_math import exp2, maximum_or_nan, multiply_rounded, pin
from cute_kernels.fragments import LANES_PER_ROW, ROWS_PER_THREAD, as_rows
from cute_kernels.seqlen import SeqlenInfo
from cute_kernels.softmax import LEAST, LN_2, SMALLEST_SCALE, OnlineSoftmax
from hopper.forward.fp8.exp2 import exp2_of_pair, is_polynomial, sum_of_words
from hopper.forward.fp8.operand_a import store_row_as_operand_a_e4m3
from hopper.forward.fp8.row_maximum import row_maximum, thread_maximum
from hopper.forward.fp8.scales import blocks_before, blocks_of_sequence

P_EXPONENT = 8.0
"""P in [0, 1] times 2^8 uses e4m3's range up to 256 of 448."""


class ExactSoftmax(OnlineSoftmax):
    """The softmax of ``OnlineSoftmax`` on x = scale S, with scale = softmax_scale log2(e) s_q s_k of the block.

    The scale of a V block is the ``unit`` of O: O is kept as a multiple of that of the last block, and multiplied by
    the quotient of two units together with ``row_scale`` when they differ. Neighbouring blocks mostly have the same,
    since the quantizer's are powers of 16; then this costs nothing. P depends on the scores alone.

    ``tile_scales`` are (scales of Q, factors of the output, queries that share a scale), ``slots`` what
    ``enter_block`` finds a block's scales in: softmax_scale log2(e) s_k, and the unit, which is s_v unless that is too
    small. None is negative. Each of a thread's rows has a scale s_q. Of each 8 column pairs ``polynomial_pairs`` take
    their exponentials from the FMA pipe. Here those add nothing below 2^-23 of the row's largest to the row sum: less
    than a part in 64 after 2^17 keys, all that small, and one that is not.
    """

    def __init__(self, scale_log2: Float32, tile_scales: tuple, slots: cute.Tensor, polynomial_pairs: int):
        super().__init__(scale_log2)
        self.q_scale, self.o_scale, self.block_q = tile_scales
        self.slots, self.polynomial_pairs = slots, polynomial_pairs
        self.tile_scale, self.scale = (cute.make_rmem_tensor(ROWS_PER_THREAD, Float32) for _ in range(2))
        self.unit, self.unit_change = (cute.make_rmem_tensor(1, Float32) for _ in range(2))
        self.second_maximum = cute.make_rmem_tensor(1, Int32)

    @cute.jit
    def enter_tile(self, rows: tuple, head: Int32, seqlens: SeqlenInfo):
        self._find_tile_scale(rows, head, seqlens)
        self.unit[0] = Float32(0.0)

    @cute.jit
    def _find_tile_scale(self, rows: tuple, head: Int32, seqlens: SeqlenInfo):
        entry, first = blocks_of_sequence(seqlens, seqlens.offset_q, self.block_q)
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            self.tile_scale[r] = self.q_scale[entry, head, first + blocks_before(rows[r], self.block_q)]

    @cute.jit
    def enter_block(self, slot: Int32):
        self._find_scales(slot)

    @cute.jit
    def _find_scales(self, slot: Int32):
        scale_k, unit = self._read_slot(slot)
        self._take_scale(scale_k)
        self._take_unit(unit)

    @cute.jit
    def _read_slot(self, slot: Int32) -> tuple[Float32, Float32]:
        scale_k, unit = self.slots[slot, 0], self.slots[slot, 1]
        # All lanes have read before one of them releases the stage, and with it the slot.
        cute.arch.sync_warp()
        return scale_k, unit

    @cute.jit
    def _take_scale(self, scale_k: Float32):
        """No score may be masked by -inf times 0."""
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            self.scale[r] = maximum_or_nan(scale_k * self.tile_scale[r], Float32(SMALLEST_SCALE))

    @cute.jit
    def _take_unit(self, unit: Float32):
        quotient = self.unit[0] * cute.arch.rcp_approx(unit)
        self.unit_change[0] = Float32(1.0) if unit == self.unit[0] else quotient
        self.unit[0] = unit

    @cute.jit
    def take_scores(self, acc_S: cute.Tensor, is_first: cutlass.Constexpr[bool]):
        """As in ``OnlineSoftmax`` for the first row; the maximum of the second is found under its exponentials."""
        self._update_max(acc_S, 0, thread_maximum(acc_S, 0), is_first)
        self.second_maximum[0] = thread_maximum(acc_S, 1)

    @cute.jit
    def _update_max(
        self,
        acc_S: cute.Tensor,
        r: cutlass.Constexpr[int],
        of_thread: Int32,
        is_first: cutlass.Constexpr[bool],
    ):
        before = Float32(LEAST) if const_expr(is_first) else self.shift[r]
        shift = multiply_rounded(self._row_maximum(acc_S, r, of_thread), self.scale[r])
        self._move_shift(r, maximum_or_nan(shift, before), is_first)
        if const_expr(not is_first):
            self._follow_unit(r)

    def _follow_unit(self, r: int):
        """Where that of O changes."""
        self.row_scale[r] = self.row_scale[r] * self.unit_change[0]

    @cute.jit
    def exponentiate(self, acc_S: cute.Tensor, r: cutlass.Constexpr[int], is_first: cutlass.Constexpr[bool]):
        """As in ``OnlineSoftmax``. A polynomial pair leaves its two float16 in the register of its first score."""
        if const_expr(r > 0):
            self._enter_second_row(acc_S, is_first)
        total = self._exponentials(acc_S, r)
        if const_expr(r == 0):
            self._leave_first_row(acc_S, is_first)
        self.row_sum[r] = self.row_sum[r] + pin(total)

    @cute.jit
    def _exponentials(self, acc_S: cute.Tensor, r: cutlass.Constexpr[int]) -> Float32:
        """Those of row ``r``, in place. Returns the thread's sum of them."""
        rows = as_rows(acc_S)
        words = as_rows(cute.recast_tensor(acc_S, Int32))
        scale, offset = self.scale[r], Float32(P_EXPONENT) - self.shift[r]
        pairs = rows.shape[1][1]
        sums, polynomials = [], []
        for half in cutlass.range_constexpr(2):
            terms = []
            for j in cutlass.range_constexpr(pairs * half // 2, pairs * (half + 1) // 2):
                if const_expr(is_polynomial(j, self.polynomial_pairs)):
                    pair = self._exp2_of_pair(rows[r, (0, j)], rows[r, (1, j)], scale, offset)
                    polynomials.append(pair)
                    words[r, (0, j)] = pair
                else:
                    for e in cutlass.range_constexpr(2):
                        rows[r, (e, j)] = exp2(rows[r, (e, j)] * scale + offset)
                    terms.append(rows[r, (0, j)] + rows[r, (1, j)])
            if const_expr(len(terms) > 0):
                sums.append(sum(terms[1:], terms[0]))
        if const_expr(len(polynomials) > 0):
            sums.append(sum_of_words(polynomials))
        return sum(sums[1:], sums[0])

    def _exp2_of_pair(self, low: Float32, high: Float32, scale: Float32, offset: Float32) -> Int32:
        return exp2_of_pair(low, high, scale, offset)

    def _row_maximum(self, acc_S: cute.Tensor, r: cutlass.Constexpr[int], of_thread: Int32) -> Float32:
        return row_maximum(acc_S, r, of_thread)

    @cute.jit
    def _leave_first_row(self, acc_S: cute.Tensor, is_first: cutlass.Constexpr[bool]):
        """What must be known of the second row's maximum before the wait for P V."""
        self.second_maximum[0] = pin(self.second_maximum[0], Int32)

    @cute.jit
    def _enter_second_row(self, acc_S: cute.Tensor, is_first: cutlass.Constexpr[bool]):
        """The rest of it."""
        self._update_max(acc_S, 1, self.second_maximum[0], is_first)

    @cute.jit
    def store_P(self, operand: cute.Tensor, acc_S: cute.Tensor, r: cutlass.Constexpr[int]):
        store_row_as_operand_a_e4m3(operand, acc_S, r, self.polynomial_pairs)

    @cute.jit
    def finalize(self, inverse_sum: cute.Tensor, lse: cute.Tensor, head_kv: Int32, batch: Int32):
        """As in ``OnlineSoftmax``; ``inverse_sum`` carries the unit of O and the factor of the output."""
        factor = self._factor(head_kv, batch)
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            total = cute.arch.warp_reduction_sum(self.row_sum[r], threads_in_group=LANES_PER_ROW)
            # A negative scale of Q has turned maxima into minima.
            total = total if self.tile_scale[r] >= Float32(0.0) else Float32.nan
            inverse_sum[r], lse[r] = self._of_row(r, total, factor)

    @cute.jit
    def _of_row(self, r: cutlass.Constexpr[int], total: Float32, factor: Float32) -> tuple[Float32, Float32]:
        """What row ``r`` of O is multiplied by, whose P add up to ``total``, and its LSE."""
        is_empty = total == Float32(0.0)
        inverse = Float32(0.0) if is_empty else cute.arch.rcp_approx(total) * factor
        log2_sum = self.shift[r] + cute.math.log2(total, fastmath=True) - Float32(P_EXPONENT)
        return inverse, -Float32.inf if is_empty else log2_sum * Float32(LN_2)

    def _factor(self, head_kv: Int32, batch: Int32) -> Float32:
        """Of the output, before it is divided by the sums of its rows."""
        return self.o_scale[batch, head_kv, 0] * self.unit[0]

"""Online softmax of the two rows that a thread holds of a score tile (FlashAttention-2, algorithm 1)."""

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_kernels.fast_math import exp2, max_over_lanes, maximum_of, multiply_rounded, pin
from cute_kernels.fragments import LANES_PER_ROW, ROWS_PER_THREAD, as_rows, store_row_as_operand_a
from cute_kernels.invariant import LoopInvariant
from cute_kernels.seqlen import SeqlenInfo

LN_2 = math.log(2.0)

LEAST = -3.4028234663852886e38
"""The least finite float32."""

SMALLEST_SCALE = 2.0**-126
"""Of scores, where it has factors of e4m3 in it, which may make 0: a hidden score is -inf, and times 0 that is NaN."""


class OnlineSoftmax(LoopInvariant):
    """Running maximum and sum of a row, exponentials in base 2.

    ``row_max`` is the maximum of S before scaling and ``shift`` the same after, rounded once and finite: it is what
    exponents are measured from. ``row_scale`` is the factor by which everything summed before the current block must
    shrink. ``row_sum`` is this thread's share of the sum, added up over the four lanes of the row only once, in
    ``finalize``. ``scale_log2`` is softmax_scale * log2(e). ``bias`` is empty, or what the scores of the block at hand
    lack in each row.
    """

    def __init__(self, scale_log2: Float32):
        self.scale_log2 = scale_log2
        self.bias: tuple[Float32, ...] = ()
        self.row_max, self.shift, self.row_sum, self.row_scale = (
            cute.make_rmem_tensor(ROWS_PER_THREAD, Float32) for _ in range(4)
        )

    def enter_tile(self, rows: tuple, head: Int32, seqlens: SeqlenInfo):
        """Called once a tile: what a subclass has to look up for it. ``rows`` are the thread's, clipped to those that
        exist."""

    def enter_first_block(self):
        """Called once a tile, while the scores of its first block are being computed, before ``enter_block``."""

    def enter_block(self, slot: Int32):
        """Called once a key block, while its scores are being computed. ``slot`` is where its scales lie."""

    def take_bias(self, bias: tuple[Float32, ...]):
        """Called once a key block, before ``enter_block``: what is to be added to each score of a thread's rows, or
        nothing."""
        self.bias = bias

    def take_second_row(self, acc_S: cute.Tensor):
        """Called once a block but the first, after the exponentials of a thread's first row: what is left to do for its
        second one."""

    def start(self):
        """Before the first block, where no block is treated as the first: no scores so far."""
        for r in range(ROWS_PER_THREAD):
            self.row_max[r], self.shift[r] = -Float32.inf, Float32(LEAST)
            self.row_sum[r], self.row_scale[r] = Float32(0.0), Float32(1.0)

    @cute.jit
    def take_scores(self, acc_S: cute.Tensor, is_first: cutlass.Constexpr[bool]):
        """Take a block's scores into the running maximum; sets ``row_scale`` and shrinks ``row_sum``."""
        scores = as_rows(acc_S)
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            start = -Float32.inf if const_expr(is_first) else self.row_max[r]
            row_max = max_over_lanes(self._largest(scores[r, None], r, start), LANES_PER_ROW)
            shift = cute.arch.fmax(multiply_rounded(row_max, self.scale_log2), Float32(LEAST))
            self._move_shift(r, shift, is_first)
            self.row_max[r] = row_max

    def _largest(self, scores: cute.Tensor, r: int, start: Float32) -> Float32:
        """Of row ``r`` in this thread, with its bias, and of ``start``."""
        if not self.bias:
            return maximum_of(scores, start)
        return cute.arch.fmax(maximum_of(scores, -Float32.inf) + self.bias[r], start)

    def _base(self, r: int) -> Float32:
        """What is subtracted from a scaled score of row ``r`` for its exponent."""
        return self.shift[r] - self.bias[r] * self.scale_log2 if self.bias else self.shift[r]

    @cute.jit
    def _move_shift(self, r: cutlass.Constexpr[int], shift: Float32, is_first: cutlass.Constexpr[bool]):
        """Measure the exponents of row ``r`` from its new scaled maximum.

        It is no less than ``LEAST``, so that in a row that is all -inf so far exp2(-inf - shift) is 0 and not NaN.
        A row whose maximum stays gets a scale of exactly 1: both shifts are the
        same rounded product. (A residue of 1e-7 here, from an FMA, is an error of 5e-4 after a million keys.)
        """
        if const_expr(is_first):
            self.row_scale[r] = Float32(1.0)
            self.row_sum[r] = Float32(0.0)
        else:
            self.row_scale[r] = exp2(self.shift[r] - shift)
            self.row_sum[r] = self.row_sum[r] * self.row_scale[r]
        self.shift[r] = shift

    @cute.jit
    def has_new_maximum(self) -> cutlass.Boolean:
        """Whether some row of the warp has one since the block before: only then is there anything to shrink."""
        changed = self.row_scale[0] != Float32(1.0) or self.row_scale[1] != Float32(1.0)
        return cute.arch.vote_any_sync(changed)

    @cute.jit
    def rescale_if_needed(self, acc_O: cute.Tensor):
        """Shrink an accumulator by ``row_scale``, unless no row of the warp has a new maximum.

        Nothing is approximated. A maximum that lags behind the true one would skip more (FlashAttention-4), but
        then the largest P is no longer exactly 1: at head_dim 256 the RMSE on inputs with outliers grew by 9 %.
        """
        if self.has_new_maximum():
            scale_rows(acc_O, self.row_scale)

    @cute.jit
    def exponentiate(self, acc_S: cute.Tensor, r: cutlass.Constexpr[int], is_first: cutlass.Constexpr[bool]):
        """Turn the scores of row ``r`` into exp2 of their distance to the maximum, in place, and sum them.

        The block is summed on its own before it joins the running sum, which over millions of keys grows too
        large to take single exponentials without rounding them off.
        """
        row = as_rows(acc_S)[r, None]
        row.store(row.load() * self.scale_log2 - self._base(r))
        for i in cutlass.range_constexpr(cute.size(row)):
            row[i] = exp2(row[i])
        self.row_sum[r] = self.row_sum[r] + pin(row.load().reduce(cute.ReductionOp.ADD, Float32(0.0), 0))

    @cute.jit
    def store_P(self, operand: cute.Tensor, acc_S: cute.Tensor, r: cutlass.Constexpr[int]):
        """Round row ``r`` of P, which ``exponentiate`` has made, into the A operand of the second GEMM."""
        store_row_as_operand_a(operand, acc_S, r)

    @cute.jit
    def finalize(self, inverse_sum: cute.Tensor, lse: cute.Tensor, head_kv: Int32, batch: Int32):
        """Write 1 / row sum, 0 for a row without keys, and the natural-log LSE of the thread's rows."""
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            total = cute.arch.warp_reduction_sum(self.row_sum[r], threads_in_group=LANES_PER_ROW)
            is_empty = total == Float32(0.0)
            inverse_sum[r] = (
                Float32(0.0) if is_empty else cute.arch.rcp_approx(self._sum_of_rounded(r, total))
            )
            log_sum = (self.shift[r] + cute.math.log2(total, fastmath=True)) * Float32(LN_2)
            lse[r] = -Float32.inf if is_empty else log_sum

    def _sum_of_rounded(self, r: int, total: Float32) -> Float32:
        """What O, which was added up from rounded P, is divided by; ``total`` is the sum of P before rounding."""
        return total


class RoundingSoftmax(OnlineSoftmax):
    """Divides by a sum in which the largest P of a row is rounded to ``dtype``, as it is in P V.

    The largest P is 1 but for what rounding takes from the shift, half a step of the scaled maximum. Above 2^12 that
    shows in float16, and above 2^15 in bfloat16: where one key dominates, O would be off by as much as P was rounded
    by. Once a tile, this costs little; exact exponents would cost an instruction for each score.
    """

    def __init__(self, scale_log2: Float32, dtype: type[cutlass.Numeric]):
        super().__init__(scale_log2)
        self.dtype = dtype

    def _sum_of_rounded(self, r: int, total: Float32) -> Float32:
        largest = exp2(self.row_max[r] * self.scale_log2 - self.shift[r])
        return total - (largest - largest.to(self.dtype).to(Float32))


class WithSinks(OnlineSoftmax):
    """Mixin, to be put before a softmax: a logit a head joins the row sum and has no value (attention sinks, Xiao et
    al., ICLR 2024; as a learned logit in gpt-oss). A row without keys has nothing else.

    ``sinks`` are float32 (heads,), in base e and not scaled. ``softmax`` is what the softmax behind it is made of.
    """

    def __init__(self, sinks: cute.Tensor, *softmax: Any):
        super().__init__(*softmax)
        self.sinks, self.sink_log2 = sinks, cute.make_rmem_tensor(1, Float32)

    def enter_tile(self, rows: tuple, head: Int32, seqlens: SeqlenInfo):
        self.sink_log2[0] = self.sinks[head] * Float32(math.log2(math.e))

    @cute.jit
    def finalize(self, inverse_sum: cute.Tensor, lse: cute.Tensor, head_kv: Int32, batch: Int32):
        """From the larger of a row's maximum and the sink, so that neither exponential overflows."""
        sink = self.sink_log2[0]
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            total = cute.arch.warp_reduction_sum(self.row_sum[r], threads_in_group=LANES_PER_ROW)
            greater = cute.arch.fmax(self.shift[r], sink)
            shrink, of_sink = exp2(self.shift[r] - greater), exp2(sink - greater)
            rounded = self._sum_of_rounded(r, total) * shrink + of_sink
            # A sink of -inf leaves a row without keys empty.
            is_empty = rounded == Float32(0.0)
            inverse_sum[r] = Float32(0.0) if is_empty else shrink * cute.arch.rcp_approx(rounded)
            log_sum = greater + cute.math.log2(total * shrink + of_sink, fastmath=True)
            lse[r] = log_sum * Float32(LN_2)


class SinkSoftmax(WithSinks, RoundingSoftmax):
    """``RoundingSoftmax`` with sinks."""


@cute.jit
def scale_rows(acc: cute.Tensor, row_scale: cute.Tensor):
    """Multiply each of the thread's rows of an accumulator by its factor."""
    for r in cutlass.range_constexpr(ROWS_PER_THREAD):
        scale_row(acc, r, row_scale[r])


@cute.jit
def scale_row(acc: cute.Tensor, r: cutlass.Constexpr[int], factor: Float32):
    row = as_rows(acc)[r, None]
    row.store(row.load() * factor)


@cute.jit
def normalize_rows(acc: cute.Tensor, inverse_sum: cute.Tensor):
    """``scale_rows`` at the end of a row. One without keys becomes 0 even where a NaN of V has reached its tile."""
    rows = as_rows(acc)
    for r in cutlass.range_constexpr(ROWS_PER_THREAD):
        is_empty = inverse_sum[r] == Float32(0.0)
        for j in cutlass.range_constexpr(rows.shape[1][1]):
            for e in cutlass.range_constexpr(rows.shape[1][0]):
                rows[r, (e, j)] = Float32(0.0) if is_empty else rows[r, (e, j)] * inverse_sum[r]


@cute.jit
def clear_empty_rows(acc: cute.Tensor, inverse_sum: cute.Tensor):
    """Make rows 0 that are without keys: that have a factor of 0. They are rare, so a branch asks once a row."""
    rows = as_rows(acc)
    for r in cutlass.range_constexpr(ROWS_PER_THREAD):
        if inverse_sum[r] == Float32(0.0):
            for j in cutlass.range_constexpr(rows.shape[1][1]):
                for e in cutlass.range_constexpr(rows.shape[1][0]):
                    rows[r, (e, j)] = Float32(0.0)

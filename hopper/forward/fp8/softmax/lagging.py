"""The softmax of FP8 scores in float32 that takes no maximum in most blocks."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float16, Float32, Int32, const_expr

from cute_kernels.fast_math import (
    exp2,
    largest_bits,
    max_over_lanes,
    maximum_or_nan,
    multiply_rounded,
    pin,
    unpack,
)
from cute_kernels.fragments import LANES_PER_ROW, ROWS_PER_THREAD, as_rows
from cute_kernels.integers import minimum
from cute_kernels.key_blocks import KeyBlocks
from cute_kernels.softmax import scale_row
from hopper.forward.fp8.exp2 import exp2_of_pair_by_chords, is_polynomial, largest_pair, scale_words
from hopper.forward.fp8.operand_a import store_groups_as_operand_a_e4m3, store_row_as_operand_a_e4m3
from hopper.forward.fp8.row_maximum import over_lanes, row_maxima, thread_maximum
from hopper.forward.fp8.softmax.exact import P_EXPONENT
from hopper.forward.fp8.softmax.stale_maximum import (
    LARGEST_SUM_EXPONENT,
    LEAST_MAXIMUM_EXPONENT,
    NEARLY,
    StaleMaximumSoftmax,
    exponent_of,
    octaves_over,
)
from hopper.forward.fp8.warp_scores import WarpScores

RELIABLE = 2.0**64
"""Sums of P so far below what float32 holds that nothing has been lost at either end."""

FIRST_WARY_BLOCKS, KEYS_A_WARY_BLOCK = 3, 1024
"""For so many blocks a tile is wary at its beginning, but for no more than one in so many keys."""

GROUPS_AT_ONCE = 2
"""Where a block starts over, this many groups of 8 keys have registers at a time."""


class LaggingSoftmax(StaleMaximumSoftmax):
    """A stale maximum on scores in float32.

    ``exponentiate_by_stale_maximum`` makes P and its sums. Where ``maximum_suffices`` says no, ``recover`` repairs the
    block, in one of two ways:

    - Every P still has its value: the maximum of P, which has replaced the scores in their registers, is that of the
      scores. P, the running sum and O are divided by it.
    - A P has lost its value, because it was too large for float16 (polynomials) or float32: the warp computes the
      scores once more by mma.sync (``WarpScores``), and starts the block over. So the result is exact for any input.

    With each new maximum P of the row is lowered by a power of two besides (``LARGEST_SUM_EXPONENT``): the largest P of
    the row is 2^3 to 2^6 then. What this costs: the largest P is a power of two, which e4m3 has, only if its block
    takes a maximum. P becomes 0 at 2^-13 to 2^-16 of it instead of 2^-18. Made by chords it adds nothing to the row
    sum from 2^-16.9 to 2^-19.9 on instead of 2^-21.9. Chords are off by up to 1 %, and so is the sum of a row in
    which a single one counts.

    ``scores`` are the warp's, ``totals`` the thread's sums of P of the block, one for each row.
    """

    wary_blocks = 24  # to compute scores again takes long

    def __init__(
        self,
        scale_log2: Float32,
        tile_scales: tuple,
        slots: cute.Tensor,
        polynomial_pairs: int,
        scores: WarpScores,
    ):
        super().__init__(scale_log2, tile_scales, slots, polynomial_pairs)
        self.scores = scores

    def how_a_tile_begins(self, blocks: KeyBlocks) -> tuple[Any, Any]:
        """Wary in the first blocks without a mask: else this took 1.5 times as long where some tokens are large."""
        whole = minimum(blocks.unmasked, blocks.last)
        wary = minimum(blocks.seqlens.seqlen_k // KEYS_A_WARY_BLOCK, FIRST_WARY_BLOCKS)
        return whole, whole - 1 - wary

    @cute.jit
    def take_scores(self, acc_S: cute.Tensor, is_first: cutlass.Constexpr[bool]):
        self.take_new_unit()
        StaleMaximumSoftmax.take_scores(self, acc_S, is_first)
        self.has_risen[0] = Int32(0 if is_first else 1)

    @cute.jit
    def exponentiate(self, acc_S: cute.Tensor, r: cutlass.Constexpr[int], is_first: cutlass.Constexpr[bool]):
        """With a maximum, as in ``ExactSoftmax``."""
        if const_expr(r > 0):
            self._enter_second_row(acc_S, is_first)
        total = self._exponentials(acc_S, r)
        if const_expr(r == 0):
            self._leave_first_row(acc_S, is_first)
        self.row_sum[r] = self.row_sum[r] + total
        total = max_over_lanes(total, LANES_PER_ROW)
        if cute.arch.vote_any_sync(total >= Float32(2.0**LARGEST_SUM_EXPONENT)):
            largest = max_over_lanes(_largest(acc_S, r, self.polynomial_pairs), LANES_PER_ROW)
            factor = self._raise_shift(acc_S, r, octaves_over(total, largest), self.polynomial_pairs)
            self.row_scale[r] = self.row_scale[r] * factor

    def _exp2_of_pair(self, low: Float32, high: Float32, scale: Float32, offset: Float32) -> Int32:
        return exp2_of_pair_by_chords(low, high, scale, offset)

    @cute.jit
    def exponentiate_by_stale_maximum(self, acc_S: cute.Tensor, r: cutlass.Constexpr[int]):
        """By the maximum of the last block that has had one."""
        self.totals[r] = pin(self._exponentials(acc_S, r))

    @cute.jit
    def _may_rise(self, acc_S: cute.Tensor) -> Boolean:
        """Whether a score of the thread is above a row's limit; whether one of 0 would be counts as well, since
        ``thread_maximum`` is of those above 0."""
        may = Boolean(False)
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            of_thread = thread_maximum(acc_S, r).bitcast(Float32)
            offset = Float32(P_EXPONENT) - self.shift[r]
            exponent = cute.arch.fmax(of_thread * self.scale[r] + offset, offset)
            may = may | (exponent > Float32(self.wary_exponent + NEARLY))
        return may

    @cute.jit
    def _scaled_maxima(self, acc_S: cute.Tensor) -> tuple[Float32, Float32]:
        of_thread = [thread_maximum(acc_S, r) for r in range(ROWS_PER_THREAD)]
        first, second = row_maxima(acc_S, tuple(range(ROWS_PER_THREAD)), of_thread)
        return multiply_rounded(first, self.scale[0]), multiply_rounded(second, self.scale[1])

    def _place_shift(self, r: cutlass.Constexpr[int], shift: Float32):
        self.shift[r] = shift

    @cute.jit
    def recover(
        self,
        operand: cute.Tensor,
        acc_S: cute.Tensor,
        acc_O: cute.Tensor,
        n_block: Int32,
        place: tuple[Int32, Int32],
    ):
        """Make P, ``row_sum`` and O right after a block that needs a new maximum.

        ``place`` is its stage of K and its slot. The block's scales are read again where they are wanted: that costs
        less than the registers that kept them.
        """
        self.rescale_if_needed(acc_O)
        self._note_new_maximum(n_block)
        if cute.arch.vote_any_sync(self._has_lost_any()):
            self._compute_again(operand, acc_S, acc_O, place)
        else:
            self.row_scale.fill(1.0)
            for r in cutlass.range_constexpr(ROWS_PER_THREAD):
                if cute.arch.vote_any_sync(self._needs_maximum(r)):
                    self._take_largest(operand, acc_S, acc_O, r, self.polynomial_pairs)
                else:
                    self.row_sum[r] = self.row_sum[r] + self.totals[r]

    @cute.jit
    def _has_lost_any(self) -> Boolean:
        """Whether a sum of the thread is NaN, infinite, or so large that what is measured anew may vanish beside it."""
        return not self.totals[0] < Float32(RELIABLE) or not self.totals[1] < Float32(RELIABLE)

    @cute.jit
    def _compute_again(
        self, operand: cute.Tensor, acc_S: cute.Tensor, acc_O: cute.Tensor, place: tuple[Int32, Int32]
    ):
        """P from scores where a polynomial had made it, or all of it if float32 has lost some."""
        rows = as_rows(acc_S)
        groups = range(rows.shape[1][1])
        others = tuple(j for j in groups if not is_polynomial(j, self.polynomial_pairs))
        if const_expr(len(others) == len(groups)):
            self._start_over(operand, acc_S, acc_O, place)
        else:
            of_others = [rows[r, (e, j)] for r in range(ROWS_PER_THREAD) for j in others for e in range(2)]
            if cute.arch.vote_any_sync(not sum(of_others[1:], of_others[0]) < Float32(RELIABLE)):
                self._start_over(operand, acc_S, acc_O, place)
            else:
                self._replace(acc_S, place, tuple(j for j in groups if j not in others), others)
                for r in cutlass.range_constexpr(ROWS_PER_THREAD):
                    self._take_largest(operand, acc_S, acc_O, r, polynomial_pairs=0)

    def _find_scale_again(self, slot: Int32):
        self._take_scale(self._read_slot(slot)[0])

    @cute.jit
    def _start_over(
        self, operand: cute.Tensor, acc_S: cute.Tensor, acc_O: cute.Tensor, place: tuple[Int32, Int32]
    ):
        """All P from scores that are computed twice, a few keys at a time, for their maximum and for what comes of it.

        The largest P of the block is 2^3 then, unless the maximum is that of an earlier block.
        """
        stage, slot = place
        rows = as_rows(acc_S)
        groups = tuple(range(rows.shape[1][1]))
        tops = [-Float32.inf] * ROWS_PER_THREAD
        for first in cutlass.range_constexpr(0, len(groups), GROUPS_AT_ONCE):
            some = groups[first : first + GROUPS_AT_ONCE]
            self.scores.compute(acc_S, stage, some)
            tops = [_maximum_of_groups(acc_S, r, some, tops[r]) for r in range(ROWS_PER_THREAD)]
        self._find_scale_again(slot)
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            lowered = over_lanes(tops[r], maximum_or_nan) * self.scale[r] + Float32(
                P_EXPONENT - LEAST_MAXIMUM_EXPONENT
            )
            self._move_shift(r, maximum_or_nan(lowered, self.shift[r]), is_first=False)
            scale_row(acc_O, r, self.row_scale[r])
        for first in cutlass.range_constexpr(0, len(groups), GROUPS_AT_ONCE):
            some = groups[first : first + GROUPS_AT_ONCE]
            self.scores.compute(acc_S, stage, some)
            for r in cutlass.range_constexpr(ROWS_PER_THREAD):
                self._exponentials_of_groups(acc_S, r, some)
                self.row_sum[r] = self.row_sum[r] + _sum_of_groups(acc_S, r, some)
                store_groups_as_operand_a_e4m3(operand, acc_S, r, some, polynomial_pairs=0)

    @cute.jit
    def _replace(
        self,
        acc_S: cute.Tensor,
        place: tuple[Int32, Int32],
        groups: cutlass.Constexpr[tuple[int, ...]],
        others: cutlass.Constexpr[tuple[int, ...]],
    ):
        """P of some groups of 8 keys from their scores, measured from their maximum if it is a new one."""
        stage, slot = place
        self.scores.compute(acc_S, stage, groups)
        self._find_scale_again(slot)
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            top = over_lanes(_maximum_of_groups(acc_S, r, groups, -Float32.inf), maximum_or_nan)
            shift = maximum_or_nan(multiply_rounded(top, self.scale[r]), self.shift[r])
            self._move_shift(r, shift, is_first=False)
            _multiply(acc_S, r, self.row_scale[r], others)
            self._exponentials_of_groups(acc_S, r, groups)
            self.totals[r] = _sum_of_groups(acc_S, r, groups + others)

    @cute.jit
    def _exponentials_of_groups(
        self, acc_S: cute.Tensor, r: cutlass.Constexpr[int], groups: cutlass.Constexpr[tuple[int, ...]]
    ):
        rows = as_rows(acc_S)
        offset = Float32(P_EXPONENT) - self.shift[r]
        for i in cutlass.range_constexpr(len(groups)):
            for e in cutlass.range_constexpr(2):
                rows[r, (e, groups[i])] = exp2(rows[r, (e, groups[i])] * self.scale[r] + offset)

    @cute.jit
    def _take_largest(
        self,
        operand: cute.Tensor,
        acc_S: cute.Tensor,
        acc_O: cute.Tensor,
        r: cutlass.Constexpr[int],
        polynomial_pairs: cutlass.Constexpr[int],
    ):
        """Bring the largest P of row ``r`` down to a power of two, at most 2^8, and the sums of its threads below 2^6.

        Where it is below 2^3 it stays: other rows need this, perhaps in every block.

        ``polynomial_pairs`` says which pairs are two float16.
        """
        largest = max_over_lanes(_largest(acc_S, r, polynomial_pairs), LANES_PER_ROW)
        kept = cute.arch.fmin(Float32(exponent_of(largest)), Float32(P_EXPONENT))
        kept = cute.arch.fmax(kept, Float32(LEAST_MAXIMUM_EXPONENT))
        rise = cute.arch.fmax(cute.math.log2(largest, fastmath=True) - kept, Float32(0.0))
        quotient = exp2(-rise)
        total = max_over_lanes(self.totals[r], LANES_PER_ROW) * quotient
        octaves = octaves_over(total, largest * quotient)
        self.row_sum[r] = self.row_sum[r] + self.totals[r]
        factor = self._raise_shift(acc_S, r, rise + octaves, polynomial_pairs)
        store_row_as_operand_a_e4m3(operand, acc_S, r, polynomial_pairs)
        scale_row(acc_O, r, self.row_scale[r] * factor)

    @cute.jit
    def _raise_shift(
        self,
        acc_S: cute.Tensor,
        r: cutlass.Constexpr[int],
        octaves: Float32,
        polynomial_pairs: cutlass.Constexpr[int],
    ) -> Float32:
        """Lower what has come of row ``r`` so far, but for O; returns the factor, which O is to be multiplied with."""
        shift = self.shift[r] + octaves
        factor = exp2(self.shift[r] - shift)
        self.shift[r] = shift
        self.row_sum[r] = self.row_sum[r] * factor
        words = as_rows(cute.recast_tensor(acc_S, Int32))
        groups = range(words.shape[1][1])
        for j in cutlass.range_constexpr(len(groups)):
            if const_expr(is_polynomial(j, polynomial_pairs)):
                words[r, (0, j)] = scale_words(words[r, (0, j)], factor)
        _multiply(acc_S, r, factor, tuple(j for j in groups if not is_polynomial(j, polynomial_pairs)))
        return factor


@cute.jit
def _maximum_of_groups(
    acc_S: cute.Tensor, r: cutlass.Constexpr[int], groups: cutlass.Constexpr[tuple[int, ...]], start: Float32
) -> Float32:
    rows = as_rows(acc_S)
    top = Float32(start)
    for i in cutlass.range_constexpr(len(groups)):
        for e in cutlass.range_constexpr(2):
            top = maximum_or_nan(top, rows[r, (e, groups[i])])
    return top


@cute.jit
def _sum_of_groups(
    acc_P: cute.Tensor, r: cutlass.Constexpr[int], groups: cutlass.Constexpr[tuple[int, ...]]
) -> Float32:
    rows = as_rows(acc_P)
    total = Float32(0.0)
    for i in cutlass.range_constexpr(len(groups)):
        total = total + (rows[r, (0, groups[i])] + rows[r, (1, groups[i])])
    return total


@cute.jit
def _multiply(
    acc: cute.Tensor, r: cutlass.Constexpr[int], factor: Float32, groups: cutlass.Constexpr[tuple[int, ...]]
):
    """Some groups of 8 columns of row ``r``."""
    rows = as_rows(acc)
    for i in cutlass.range_constexpr(len(groups)):
        for e in cutlass.range_constexpr(2):
            rows[r, (e, groups[i])] = rows[r, (e, groups[i])] * factor


@cute.jit
def _largest(
    acc_S: cute.Tensor, r: cutlass.Constexpr[int], polynomial_pairs: cutlass.Constexpr[int]
) -> Float32:
    """A thread's largest P of row ``r``: as integers, values of one sign keep their order."""
    words = as_rows(cute.recast_tensor(acc_S, Int32))
    pairs = range(words.shape[1][1])
    others = [words[r, (e, j)] for j in pairs if not is_polynomial(j, polynomial_pairs) for e in range(2)]
    largest = largest_bits(others).bitcast(Float32) if const_expr(len(others) > 0) else Float32(0.0)
    polynomials = [words[r, (0, j)] for j in pairs if is_polynomial(j, polynomial_pairs)]
    if const_expr(len(polynomials) > 0):
        largest = cute.arch.fmax(largest, cute.arch.fmax(*unpack(largest_pair(polynomials), Float16)))
    return largest

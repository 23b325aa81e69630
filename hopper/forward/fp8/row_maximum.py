"""The largest score of a row of a tile, by integer comparisons."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from cute_kernels.fast_math import (
    as_float,
    largest_bits,
    maximum_of_halves,
    maximum_or_nan,
    minimum_of_halves,
    reduce_by_threes,
)
from cute_kernels.fragments import LANES_PER_ROW, as_rows


@cute.jit
def thread_maximum(acc_S: cute.Tensor, r: cutlass.Constexpr[int]) -> Int32:
    """The largest bits, as signed integers, of a thread's scores in its row ``r``.

    Hopper compares three integers in one instruction (VIMNMX3) but only two floats (FMNMX), at the same rate. The bits
    of floats are ordered as signed integers wherever one of them is positive; a positive NaN, which is what WGMMA
    gives, is above all. Where none is positive, this is one of the scores, but not the largest.
    """
    return largest_bits(_bits_of_row(acc_S, r, Int32))


@cute.jit
def row_maximum(acc_S: cute.Tensor, r: cutlass.Constexpr[int], of_thread: Int32) -> Float32:
    """``row_maxima`` of one row."""
    return row_maxima(acc_S, (r,), (of_thread,))[0]


@cute.jit
def row_maxima(acc_S: cute.Tensor, rows: cutlass.Constexpr[tuple[int, ...]], of_thread: tuple) -> list:
    """The largest scores of some rows over all their lanes, from what ``thread_maximum`` found.

    A warp with a row that has no positive score takes the smallest unsigned bits of each row instead, in a branch.
    """
    tops = [over_lanes(of_thread[i], cutlass.max) for i in range(len(rows))]
    has_negative = tops[0] < 0
    for i in cutlass.range_constexpr(1, len(rows)):
        has_negative = has_negative | (tops[i] < 0)
    if cute.arch.vote_any_sync(has_negative):
        for i in cutlass.range_constexpr(len(rows)):
            of_negatives = over_lanes(
                reduce_by_threes(_bits_of_row(acc_S, rows[i], Uint32), cutlass.min), cutlass.min
            )
            tops[i] = Int32(of_negatives) if tops[i] < 0 else tops[i]
    return [as_float(top) for top in tops]


@cute.jit
def thread_maximum_of_any(acc_S: cute.Tensor, r: cutlass.Constexpr[int]) -> Int32:
    """The bits of a thread's largest score in its row ``r``, positive or not, for twice as many instructions."""
    top = thread_maximum(acc_S, r)
    of_negatives = reduce_by_threes(_bits_of_row(acc_S, r, Uint32), cutlass.min)
    return Int32(of_negatives) if top < 0 else top


def maximum_over_lanes(of_thread: Int32) -> Float32:
    """The largest of the scores whose bits the lanes of a row have, in all of them; NaN if one of them is."""
    return over_lanes(as_float(of_thread), maximum_or_nan)


def larger_as_integers(a: Int32, b: Int32) -> Int32:
    """Of the halves of two words, which have the order of float16 where one of two is positive."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 b; mov.b32 b, {$r1}; max.s16x2 {$w0}, {$r0}, b; }",
        write_only_types=[Int32],
        read_only_args=[a, b],
    )


def _bits_of_row(acc_S: cute.Tensor, r: int, dtype: type[cutlass.Numeric]) -> list:
    rows = as_rows(cute.recast_tensor(acc_S, Int32))
    return [dtype(rows[r, i]) for i in range(cute.size(rows, mode=[1]))]


def ordered_over_lanes(of_lane: Int32) -> tuple[Int32, Int32, Int32]:
    """The largest, the second and the least of what the four lanes of a row have, of pairs of float16."""
    other = cute.arch.shuffle_sync_bfly(of_lane, offset=LANES_PER_ROW >> 1)
    upper, lower = maximum_of_halves(of_lane, other), minimum_of_halves(of_lane, other)
    others = [cute.arch.shuffle_sync_bfly(x, offset=LANES_PER_ROW >> 2) for x in (upper, lower)]
    second = maximum_of_halves(minimum_of_halves(upper, others[0]), maximum_of_halves(lower, others[1]))
    return maximum_of_halves(upper, others[0]), second, minimum_of_halves(lower, others[1])


def over_lanes(x, operation):
    """Of the lanes that hold a row, in each of them."""
    for i in range(LANES_PER_ROW.bit_length() - 1):
        x = operation(x, cute.arch.shuffle_sync_bfly(x, offset=LANES_PER_ROW >> (i + 1)))
    return x

"""What lies between the GEMMs of a block: P^T and dS^T of a thread, whose rows are keys and whose columns queries."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_kernels.dropout import Kept
from cute_kernels.fast_math import exp2, minimum_or_nan, pack, pin, unpack
from cute_kernels.fragments import (
    COLUMNS_PER_GROUP,
    COLUMNS_PER_PAIR,
    LANES_PER_ROW,
    ROWS_PER_THREAD,
    as_rows,
)


@cute.jit
def read_vector(
    vectors: cute.Tensor, stage: Int32, thread: Int32, tile_m: cutlass.Constexpr[int]
) -> cute.Tensor:
    """(pair, group): what the columns of a thread need of a vector over the queries, (tile_m, stages)."""
    groups = tile_m // COLUMNS_PER_GROUP
    pairs = cute.make_rmem_tensor((COLUMNS_PER_PAIR, groups), Float32)
    first = thread % 4 * 2
    for j in cutlass.range_constexpr(groups):
        for e in cutlass.range_constexpr(COLUMNS_PER_PAIR):
            pairs[e, j] = pin(vectors[first + COLUMNS_PER_GROUP * j + e, stage])
    return pairs


@cute.jit
def make_probabilities(
    acc_S: cute.Tensor,
    lse: cute.Tensor,
    scale_log2: Float32,
    clamps: cutlass.Constexpr[bool] = False,
    biases: tuple = (),
):
    """P^T = exp2(scale_log2 S^T - LSE) in place; LSE in base 2 is a number for each column.

    With ``clamps`` it is at most 1, as it should be, also for keys that are not there and had no part in the LSE.
    ``biases`` (``key_score_tile.BlockBias``) join the exponent.
    """
    rows = as_rows(acc_S)
    for j in cutlass.range_constexpr(rows.shape[1][1]):
        for e in cutlass.range_constexpr(COLUMNS_PER_PAIR):
            for r in cutlass.range_constexpr(ROWS_PER_THREAD):
                subtracted = without_biases(lse[e, j], biases, r, COLUMNS_PER_GROUP * j + e)
                rows[r, (e, j)] = probability(rows[r, (e, j)] * scale_log2 - subtracted, clamps)


def probability(exponent: Float32, clamps: bool) -> Float32:
    """2 to this, or at most to 0."""
    return exp2(minimum_or_nan(exponent, Float32(0.0)) if clamps else exponent)


def without_biases(lse: Float32, biases: tuple, r: int, column: int) -> Float32:
    """What is subtracted from a scaled score of key ``r`` of a thread and a query ``column`` behind its first."""
    for bias in biases:
        lse = lse - bias.at(r, column)
    return lse


@cute.jit
def make_gradient(acc_dP: cute.Tensor, acc_P: cute.Tensor, delta: cute.Tensor):
    """dS^T = P^T (dP^T - delta) in the place of dP^T."""
    p, dp = as_rows(acc_P), as_rows(acc_dP)
    for j in cutlass.range_constexpr(dp.shape[1][1]):
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            for e in cutlass.range_constexpr(COLUMNS_PER_PAIR):
                dp[r, (e, j)] = p[r, (e, j)] * (dp[r, (e, j)] - delta[e, j])


@cute.jit
def make_gradient_of_rounded(acc_dP: cute.Tensor, rounded: cute.Tensor, delta: cute.Tensor):
    """The same with P^T in 16 bits, two columns a word, in the order of the accumulator."""
    dp, words = as_rows(acc_dP), cute.recast_tensor(rounded, Int32)
    for j in cutlass.range_constexpr(dp.shape[1][1]):
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            pair = unpack(words[r + ROWS_PER_THREAD * j], rounded.element_type)
            for e in cutlass.range_constexpr(COLUMNS_PER_PAIR):
                dp[r, (e, j)] = pair[e] * (dp[r, (e, j)] - delta[e, j])


LANES_BETWEEN_ROWS = tuple(LANES_PER_ROW << i for i in range(3))
"""Distances over which the eight rows of a warp's lanes are added up."""


@cute.jit
def add_delta_of_keys(
    delta: cute.Tensor,
    acc_dP: cute.Tensor,
    probabilities: cute.Tensor,
    passes: cutlass.Constexpr[int],
    are_few: cutlass.Boolean,
):
    """Add to ``delta`` the sum of P dP over the 16 keys of a warp, where these ``are_few``: all of their sequence.

    ``probabilities`` is P^T in float32, or in 16 bits in the order of the accumulator. With two ``passes`` the sum is
    corrected by that of P (dP - sum), which the sum of P being 1 makes 0. So it is good to the last bits of dP though P
    is not, and for a single key it is dP.
    """
    dp = as_rows(acc_dP)
    for j in cutlass.range_constexpr(dp.shape[1][1]):
        pairs = [_pair_of(probabilities, r, j) for r in range(ROWS_PER_THREAD)]
        for e in cutlass.range_constexpr(COLUMNS_PER_PAIR):
            found = Float32(0.0)
            for _ in cutlass.range_constexpr(passes):
                part = Float32(0.0)
                for r in cutlass.range_constexpr(ROWS_PER_THREAD):
                    part = part + pairs[r][e] * (dp[r, (e, j)] - found)
                for lanes in LANES_BETWEEN_ROWS:
                    part = part + cute.arch.shuffle_sync_bfly(part, lanes)
                found = found + part
            delta[e, j] = delta[e, j] + (found if are_few else Float32(0.0))


def _pair_of(probabilities: cute.Tensor, r: int, j: int) -> tuple[Float32, ...]:
    """Both columns of row ``r`` of a thread in group ``j``."""
    if probabilities.element_type is Float32:
        rows = as_rows(probabilities)
        return tuple(rows[r, (e, j)] for e in range(COLUMNS_PER_PAIR))
    words = cute.recast_tensor(probabilities, Int32)
    return unpack(words[r + ROWS_PER_THREAD * j], probabilities.element_type)


@cute.jit
def round_into(rounded: cute.Tensor, acc: cute.Tensor, kept: tuple[Kept, ...] = ()):
    """An accumulator in 16 bits, two columns a word, in the same order: that of the register A operand of a WGMMA.
    Without what is not ``kept``, where there is dropout."""
    words, rows = cute.recast_tensor(rounded, Int32), as_rows(acc)
    if const_expr(len(kept) > 0):
        round_kept_into(words, rows, kept[0], rounded.element_type)
    else:
        for j in cutlass.range_constexpr(rows.shape[1][1]):
            for r in cutlass.range_constexpr(ROWS_PER_THREAD):
                words[r + ROWS_PER_THREAD * j] = pack(rows[r, (0, j)], rows[r, (1, j)], rounded.element_type)


def round_kept_into(words: cute.Tensor, rows: cute.Tensor, kept: Kept, dtype: type[cutlass.Numeric]) -> None:
    """``round_into`` where there is dropout."""
    for r, j in kept.places(rows.shape[1][1]):
        pair = (kept.choose(rows[r, (e, j)], r, j, e) for e in range(COLUMNS_PER_PAIR))
        words[r + ROWS_PER_THREAD * j] = pack(*pair, dtype)


def kept_or_zero(kept: tuple[Kept, ...], x: Float32, place: tuple[int, int, int]) -> Float32:
    """x of the row, group and column of a pair of an element, or 0 if dropout drops it."""
    for of_tile in kept:
        x = of_tile.choose(x, *place)
    return x

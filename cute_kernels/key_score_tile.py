"""Between K Q^T and dS^T: what a backward kernel does to a transposed score tile, whose rows are keys and whose
columns are queries. ``score_tile`` is the same of a forward kernel."""

import math
from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from cute_kernels.backward import scores
from cute_kernels.backward.scores import kept_or_zero, probability, without_biases
from cute_kernels.backward.step import FEW_KEYS
from cute_kernels.dropout import Dropout, Kept, RowDropout
from cute_kernels.fast_math import pack, unpack
from cute_kernels.fragments import COLUMNS_PER_GROUP, COLUMNS_PER_PAIR, ROW_STRIDE, ROWS_PER_THREAD, as_rows
from cute_kernels.function_values import FunctionValues, Known, select
from cute_kernels.invariant import LoopInvariant
from cute_kernels.key_mask import KeyMask
from cute_kernels.score_tile import LOG2_E, SoftCap, seen_in_block
from cute_kernels.user_functions import NO_FUNCTIONS, NOTHING, UserFunctions

LN_2 = math.log(2.0)


@dataclass(frozen=True)
class KeyRules(LoopInvariant):
    """What a launch does to scores, made of its arguments.

    ``scale_log2`` is that of ``scale_in_base_2``. Each of these is empty or of one: ``softcap`` the one for all tiles,
    ``slopes`` the tensor (batch, heads) of ALiBi, ``dropout`` that of P. ``functions`` are the user's, which read the
    tensors ``captured``.
    """

    scale_log2: Float32
    softcap: tuple[SoftCap, ...] = ()
    slopes: tuple[Any, ...] = ()
    dropout: tuple[Dropout, ...] = ()
    functions: UserFunctions = NO_FUNCTIONS
    captured: tuple[cute.Tensor, ...] = ()

    def for_head(self, mask: KeyMask, head: Int32, batch: Int32) -> "KeyScoreTile":
        """What is done to the scores of a thread's keys with the queries of a head of Q."""
        slopes_log2 = tuple(
            # Keys that belong to no sequence stand behind the last one.
            slopes[cutlass.min(batch, slopes.shape[0] - 1), head] * Float32(LOG2_E)
            for slopes in self.slopes
        )
        functions: tuple[FunctionValues, ...] = ()
        if self.functions:
            place = batch, head
            functions = (FunctionValues(self.functions, self.captured, place, "kv_idx", with_slope=True),)
        dropout = self.dropout_of(mask, head, batch)
        return KeyScoreTile(mask, self.scale_log2, self.softcap, slopes_log2, dropout, functions)

    def dropout_of(self, mask: KeyMask, head: Int32, batch: Int32) -> tuple[RowDropout, ...]:
        """Dropout in the rows of a thread's keys; () without dropout."""
        return tuple(each.for_rows(mask.key, mask.col, head, batch, True) for each in self.dropout)


@dataclass(frozen=True)
class BlockBias(LoopInvariant):
    """ALiBi's bias in base 2, -slope |i + seqlen_k - seqlen_q - j|, of a thread's keys in one block.

    ``behind`` is how far each key is behind the one that the thread's first query is level with. Under a causal mask no
    visible key is behind its query, so that the distance needs no absolute value.
    """

    behind: tuple[Float32, ...]
    slope_log2: Float32
    is_causal: bool

    def at(self, r: int, column: int) -> Float32:
        """Of key ``r`` and the query ``column`` after the first."""
        distance = self.behind[r] - Float32(column)
        if not self.is_causal:
            distance = -cute.arch.fmax(distance, -distance)
        return distance * self.slope_log2


@dataclass(frozen=True)
class KeyScoreTile(LoopInvariant):
    """What is done to the scores of a thread's two keys. Each tuple is empty or of one; with all of them empty that is
    a mask and an exponential.

    With a softcap c, a scaled score s becomes c t with t = tanh(s / c), so that dS = P (dP - delta) (1 - t^2), and dQ
    and dK get the factor softmax_scale as ever. ``scale_log2`` is c log2(e) then. The accumulator holds t until P takes
    its place, so ALiBi's bias is added in the exponent. A user's ``functions`` are worked out there too: they are given
    the scaled score in base e, and the derivative of the score function is one more factor of dS. ``kinds`` has that of
    the query tile where it comes from a list (``ListedQueries``) and may be HIDDEN or PARTLY_SEEN.
    """

    mask: KeyMask
    scale_log2: Float32
    softcap: tuple[SoftCap, ...] = ()
    slopes_log2: tuple[Float32, ...] = ()
    dropout: tuple[RowDropout, ...] = ()
    functions: tuple[FunctionValues, ...] = ()
    kinds: tuple[Int32, ...] = ()

    def seen_as(self, kind: Int32) -> "KeyScoreTile":
        """The same for a query tile from a list: the mask function counts where it is seen in part."""
        return replace(self, kinds=(kind,))

    def fully_seen(self) -> "KeyScoreTile":
        """The same for a query tile from a list of which all is seen: the mask function is not asked."""
        return replace(self, functions=tuple(values.without_mask() for values in self.functions))

    @property
    def has_factors(self) -> bool:
        """Whether dS is not P (dP - delta), but that times the slopes of what was done to the score."""
        return self.is_capped or any(values.functions.bends for values in self.functions)

    @property
    def follows_from_probabilities(self) -> bool:
        """Whether t can be worked out again from P. Not behind a user's score function, whose inverse is not known."""
        return not any(values.functions.has_score for values in self.functions)

    def kept(self, m_block: Int32, columns: int) -> tuple[Kept, ...]:
        """What dropout keeps of the thread's ``columns`` of query tile ``m_block``; nothing where there is none."""
        return tuple(each.kept(m_block, self.mask.tile_m, columns) for each in self.dropout)

    def kept_anew(self, m_block: Int32, columns: int) -> tuple[Kept, ...]:
        """The same, where the compiler may not keep what all blocks share in registers (``RowDropout.anew``)."""
        return replace(self, dropout=tuple(each.anew() for each in self.dropout)).kept(m_block, columns)

    @property
    def is_capped(self) -> bool:
        return bool(self.softcap)

    def cap(self, acc_S: cute.Tensor) -> None:
        """Scores become t, if they are capped: in every block, and before its mask."""
        for softcap in self.softcap:
            softcap.apply(acc_S, Int32(0))

    def make_probabilities(
        self, acc_S: cute.Tensor, lse: cute.Tensor, m_block: Int32, clamps: bool = False
    ) -> None:
        """``scores.make_probabilities`` of query tile ``m_block``."""
        if not self.functions:
            scores.make_probabilities(acc_S, lse, self.scale_log2, clamps, self._biases(m_block))
            return
        rows, block = as_rows(acc_S), self._block(m_block, clamps)
        for j in range(rows.shape[1][1]):
            for e in range(COLUMNS_PER_PAIR):
                column = block.column(COLUMNS_PER_GROUP * j + e)
                for r in range(ROWS_PER_THREAD):
                    rows[r, (e, j)] = column.probability(rows[r, (e, j)], lse[e, j], r)[0]

    def round_probabilities(
        self,
        rounded: cute.Tensor,
        acc_S: cute.Tensor,
        lse: cute.Tensor,
        m_block: Int32,
        clamps: bool = False,
        kept: tuple[Kept, ...] = (),
    ) -> None:
        """P^T in 16 bits into ``rounded``, as ``scores.round_into`` does, without what is not ``kept``. ``acc_S``
        becomes P^T times the factors of dS, such as 1 - t^2, in float32: what ``scores.make_gradient`` takes. So the
        factors need no registers of their own. ``kept`` is empty where there are a user's functions: no call has
        both."""
        if not self.has_factors:
            self.make_probabilities(acc_S, lse, m_block, clamps)
            scores.round_into(rounded, acc_S, kept)
            return
        words, rows = cute.recast_tensor(rounded, Int32), as_rows(acc_S)
        if self.functions:
            self._round_changed(words, rows, lse, self._block(m_block, clamps), rounded.element_type)
            return
        biases = self._biases(m_block)
        for j in range(rows.shape[1][1]):
            for r in range(ROWS_PER_THREAD):
                pair = []
                for e in range(COLUMNS_PER_PAIR):
                    t = rows[r, (e, j)]
                    subtracted = without_biases(lse[e, j], biases, r, COLUMNS_PER_GROUP * j + e)
                    pair.append(probability(t * self.scale_log2 - subtracted, clamps))
                    rows[r, (e, j)] = pair[e] * slope_of_tanh(t)
                    pair[e] = kept_or_zero(kept, pair[e], (r, j, e))
                words[r + ROWS_PER_THREAD * j] = pack(*pair, rounded.element_type)

    def _round_changed(
        self, words: cute.Tensor, rows: cute.Tensor, lse: cute.Tensor, block: "FunctionBlock", dtype: Any
    ) -> None:
        """``round_probabilities`` with a user's functions."""
        for j in range(rows.shape[1][1]):
            columns = [block.column(COLUMNS_PER_GROUP * j + e) for e in range(COLUMNS_PER_PAIR)]
            for r in range(ROWS_PER_THREAD):
                pair = []
                for e in range(COLUMNS_PER_PAIR):
                    p, factor = columns[e].probability(rows[r, (e, j)], lse[e, j], r)
                    pair.append(p)
                    rows[r, (e, j)] = p * factor
                words[r + ROWS_PER_THREAD * j] = pack(*pair, dtype)

    def make_gradient_of_rounded(
        self, acc_dP: cute.Tensor, rounded: cute.Tensor, delta: cute.Tensor, lse: cute.Tensor, m_block: Int32
    ) -> None:
        """dS^T in the place of dP^T, from P^T in 16 bits alone, as ``scores.make_gradient_of_rounded``.

        With a softcap t is worked out again from P^T and ``lse``; where P^T is 0 in 16 bits dS is 0, whatever t is.
        Where t does not follow from P^T (``follows_from_probabilities``), ``rounded`` has to be P^T times the factors
        of dS. ``lse`` is read for a softcap alone.
        """
        if not self.is_capped or not self.follows_from_probabilities:
            scores.make_gradient_of_rounded(acc_dP, rounded, delta)
            return
        dp, words, biases = as_rows(acc_dP), cute.recast_tensor(rounded, Int32), self._biases(m_block)
        inverse_scale = cute.arch.rcp_approx(self.scale_log2)
        for j in range(dp.shape[1][1]):
            for r in range(ROWS_PER_THREAD):
                pair = unpack(words[r + ROWS_PER_THREAD * j], rounded.element_type)
                for e in range(COLUMNS_PER_PAIR):
                    added = without_biases(lse[e, j], biases, r, COLUMNS_PER_GROUP * j + e)
                    t = (cute.math.log2(pair[e], fastmath=True) + added) * inverse_scale
                    ds = pair[e] * (dp[r, (e, j)] - delta[e, j])
                    dp[r, (e, j)] = ds * slope_of_tanh(t)

    def complete_delta(
        self, delta: cute.Tensor, acc_dP: cute.Tensor, probabilities: cute.Tensor, is_whole: bool = True
    ) -> None:
        """Of a sequence with no more than FEW_KEYS, add what dP says to ``delta`` (``scores.add_delta_of_keys``).
        ``probabilities`` are P^T, all of it or, without ``is_whole``, what dropout left."""
        are_few = self.mask.seqlens.seqlen_k <= FEW_KEYS
        scores.add_delta_of_keys(delta, acc_dP, probabilities, 2 if is_whole else 1, are_few)

    def _block(self, m_block: Int32, clamps: bool) -> "FunctionBlock":
        """What a user's functions do to query tile ``m_block``."""
        (values,), mask = self.functions, self.mask
        keys = tuple(mask.key + r * ROW_STRIDE for r in range(ROWS_PER_THREAD))
        lines = tuple(values.on_line(key) for key in keys)
        are_there = tuple(key < mask.seqlens.seqlen_k for key in keys)
        first = m_block * mask.tile_m + mask.col
        return FunctionBlock(self, values, lines, are_there, first, self._biases(m_block), clamps)

    def _biases(self, m_block: Int32) -> tuple[BlockBias, ...]:
        if not self.slopes_log2:
            return ()
        mask = self.mask
        level = m_block * mask.tile_m + mask.col + mask.seqlens.seqlen_k - mask.seqlens.seqlen_q
        behind = tuple(Float32(mask.key + r * ROW_STRIDE - level) for r in range(ROWS_PER_THREAD))
        return tuple(BlockBias(behind, slope, mask.window.is_causal) for slope in self.slopes_log2)


@dataclass(frozen=True)
class FunctionBlock(LoopInvariant):
    """A user's functions at a thread's two keys and the queries from ``first`` on.

    ``keys`` has the values that depend on the key alone, ``are_there`` whether it is one of the sequence. Behind the
    end of the sequence scores are 0, of which functions may make anything: so queries and keys there are hidden here,
    even in blocks that need no mask.
    """

    tile: KeyScoreTile
    values: FunctionValues
    keys: tuple[Known, ...]
    are_there: tuple[Boolean, ...]
    first: Int32
    biases: tuple[BlockBias, ...]
    clamps: bool

    def column(self, offset: int) -> "FunctionColumn":
        """At the query so far behind the first."""
        query = self.first + offset
        return FunctionColumn(
            self, offset, self.values.across(query), query < self.tile.mask.seqlens.seqlen_q
        )


@dataclass(frozen=True)
class FunctionColumn(LoopInvariant):
    """The same at one query, ``offset`` behind the first: ``known`` has the values that depend on it alone,
    ``is_there`` says whether it is one of the sequence."""

    block: FunctionBlock
    offset: int
    known: Known
    is_there: Boolean

    def probability(self, t: Float32, lse: Float32, r: int) -> tuple[Float32, Float32]:
        """P of key ``r``, and the factor of its dS; 0 both where the score is hidden. ``t`` is what the mask left of
        the accumulator, -inf for a hidden score."""
        block, tile, functions = self.block, self.block.tile, self.block.values.functions
        # ``without_biases`` subtracts biases, so of 0 it gives minus their sum.
        added = -without_biases(Float32(0.0), block.biases, r, self.offset) if block.biases else Float32(0.0)
        score_log2 = t * tile.scale_log2 + added
        known = block.values.at(block.keys[r], self.known, score_log2 * Float32(LN_2))
        factor = Float32(1.0)
        if functions.has_score:
            score_log2, factor = known[functions.score] * Float32(LOG2_E), known[functions.slope]
        if tile.is_capped:
            factor = factor * slope_of_tanh(t)
        is_seen = (t != -Float32.inf) & self.is_there & block.are_there[r]
        if functions.mask != NOTHING:
            is_seen = is_seen & self._is_seen(known[functions.mask])
        p = probability(score_log2 - lse, block.clamps)
        return select(is_seen, p, Float32(0.0)), select(is_seen, factor, Float32(0.0))

    def _is_seen(self, by_function: Boolean) -> Boolean:
        """What the mask function says, as far as it counts."""
        for kind in self.block.tile.kinds:
            return seen_in_block(by_function, kind)
        return by_function


def slope_of_tanh(t: Float32) -> Float32:
    """1 - t^2, the slope of tanh where it is t; 0 for what is beyond -1 and 1, as -inf is of a hidden score."""
    t = cute.arch.fmin(cute.arch.fmax(t, Float32(-1.0)), Float32(1.0))
    return Float32(1.0) - t * t

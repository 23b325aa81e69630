"""Between K Q^T and dS^T: what a backward kernel does to a transposed score tile, whose rows are keys and whose
columns are queries. ``score_tile`` is the same of a forward kernel."""

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.backward import scores
from cute_kernels.backward.scores import kept_or_zero, probability, without_biases
from cute_kernels.dropout import Dropout, Kept, RowDropout
from cute_kernels.fast_math import pack, unpack
from cute_kernels.fragments import COLUMNS_PER_GROUP, COLUMNS_PER_PAIR, ROW_STRIDE, ROWS_PER_THREAD, as_rows
from cute_kernels.invariant import LoopInvariant
from cute_kernels.key_mask import KeyMask
from cute_kernels.score_tile import LOG2_E, SoftCap


@dataclass(frozen=True)
class KeyRules(LoopInvariant):
    """What a launch does to scores, made of its arguments.

    ``scale_log2`` is that of ``scale_in_base_2``. ``softcap`` has none or the one for all tiles, ``slopes`` none or the
    tensor (batch, heads) of ALiBi, ``dropout`` none or that of P.
    """

    scale_log2: Float32
    softcap: tuple[SoftCap, ...] = ()
    slopes: tuple[Any, ...] = ()
    dropout: tuple[Dropout, ...] = ()

    def for_head(self, mask: KeyMask, head: Int32, batch: Int32) -> "KeyScoreTile":
        """Of a thread's keys and the queries of a head."""
        slopes_log2 = tuple(
            # Keys that belong to no sequence stand behind the last one.
            slopes[cutlass.min(batch, slopes.shape[0] - 1), head] * Float32(LOG2_E)
            for slopes in self.slopes
        )
        dropout = self.dropout_of(mask, head, batch)
        return KeyScoreTile(mask, self.scale_log2, self.softcap, slopes_log2, dropout)

    def dropout_of(self, mask: KeyMask, head: Int32, batch: Int32) -> tuple[RowDropout, ...]:
        """That of a thread's keys, where there is some."""
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
    """What is done to the scores of a thread's two keys. Without softcap and slopes, of which there is one or none,
    that is a mask and an exponential.

    With a softcap c, a score s, scaled, becomes c t with t = tanh(s / c), so that dS = P (dP - delta) (1 - t^2), and dQ
    and dK get the factor softmax_scale as ever. ``scale_log2`` is c log2(e) then. A bias joins the exponent, and not
    the scores, which are t until they are probabilities.
    """

    mask: KeyMask
    scale_log2: Float32
    softcap: tuple[SoftCap, ...] = ()
    slopes_log2: tuple[Float32, ...] = ()
    dropout: tuple[RowDropout, ...] = ()

    def kept(self, m_block: Int32, columns: int) -> tuple[Kept, ...]:
        """What dropout keeps of the thread's ``columns`` of query tile ``m_block``; nothing where there is none."""
        return tuple(each.kept(m_block, self.mask.tile_m, columns) for each in self.dropout)

    def kept_anew(self, m_block: Int32, columns: int) -> tuple[Kept, ...]:
        """The same, for a loop that has no registers for what is the same in all blocks."""
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
        scores.make_probabilities(acc_S, lse, self.scale_log2, clamps, self._biases(m_block))

    def round_probabilities(
        self,
        rounded: cute.Tensor,
        acc_S: cute.Tensor,
        lse: cute.Tensor,
        m_block: Int32,
        clamps: bool = False,
        kept: tuple[Kept, ...] = (),
    ) -> None:
        """P^T in 16 bits, as ``scores.round_into`` gives it, and in place P^T, or if capped P^T (1 - t^2): what
        ``scores.make_gradient`` takes. It needs no more registers for being capped."""
        if not self.is_capped:
            self.make_probabilities(acc_S, lse, m_block, clamps)
            scores.round_into(rounded, acc_S, kept)
            return
        words, rows, biases = cute.recast_tensor(rounded, Int32), as_rows(acc_S), self._biases(m_block)
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

    def make_gradient_of_rounded(
        self, acc_dP: cute.Tensor, rounded: cute.Tensor, delta: cute.Tensor, lse: cute.Tensor, m_block: Int32
    ) -> None:
        """dS^T in the place of dP^T, of nothing but P^T in 16 bits, as ``scores.make_gradient_of_rounded``. If capped,
        t is worked out again from P^T: of a P that is 0 in 16 bits it does not matter. Else ``lse`` is not read."""
        if not self.is_capped:
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

    def _biases(self, m_block: Int32) -> tuple[BlockBias, ...]:
        if not self.slopes_log2:
            return ()
        mask = self.mask
        level = m_block * mask.tile_m + mask.col + mask.seqlens.seqlen_k - mask.seqlens.seqlen_q
        behind = tuple(Float32(mask.key + r * ROW_STRIDE - level) for r in range(ROWS_PER_THREAD))
        return tuple(BlockBias(behind, slope, mask.window.is_causal) for slope in self.slopes_log2)


def slope_of_tanh(t: Float32) -> Float32:
    """1 - t^2, the slope of tanh where it is t; 0 for what is beyond -1 and 1, as -inf is of a hidden score."""
    t = cute.arch.fmin(cute.arch.fmax(t, Float32(-1.0)), Float32(1.0))
    return Float32(1.0) - t * t

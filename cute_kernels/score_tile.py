"""Between Q K^T and the softmax: the one place in which a kernel changes scores."""

import math
from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from cute_kernels.dropout import Dropout, Kept, RowDropout
from cute_kernels.fast_math import tanh, tanh_approx
from cute_kernels.fragments import COLUMNS_PER_GROUP, ROW_STRIDE, ROWS_PER_THREAD, as_rows
from cute_kernels.function_values import FunctionValues, Known, select
from cute_kernels.invariant import LoopInvariant
from cute_kernels.key_blocks import KeyBlocks
from cute_kernels.mask import TileMask
from cute_kernels.problem import ENTRY_BITS, PARTLY_SEEN, SEEN
from cute_kernels.user_functions import UserFunctions

LOG2_E = math.log2(math.e)


def scale_in_base_2(softmax_scale: Float32, caps: tuple[Float32, ...]) -> Float32:
    """What scores are multiplied by as exponents of 2: softmax_scale, or the cap if ``caps`` has one, times log2(e)."""
    return (caps[0] if caps else softmax_scale) * Float32(LOG2_E)


@dataclass(frozen=True)
class SoftCap(LoopInvariant):
    """s becomes c tanh(s / c), s being the scaled score. (Gemma 2's soft-capping.)

    The scores that are left lack the factor c, which the softmax brings in, as its scale. ``factor`` is softmax_scale
    / c. Without ``is_precise`` the tanh is one instruction with a relative error of 2^-11, an eighth of what rounding
    to bfloat16 may take.
    """

    factor: Float32
    is_precise: bool

    def apply(self, acc_S: cute.Tensor, n_block: Int32) -> None:
        function = tanh if self.is_precise else tanh_approx
        for i in range(cute.size(acc_S)):
            acc_S[i] = function(acc_S[i] * self.factor)


@dataclass(frozen=True)
class Alibi(LoopInvariant):
    """Adds -slope |i + seqlen_k - seqlen_q - j| to a scaled score: ALiBi, of Press et al., "Train short, test long".

    ``slope`` is divided by the scale that the softmax brings in. Under a causal mask no visible key is behind its
    query, so that the distance needs no absolute value.
    """

    mask: TileMask
    slope: Float32

    def apply(self, acc_S: cute.Tensor, n_block: Int32) -> None:
        rows = as_rows(acc_S)
        for r in range(ROWS_PER_THREAD):
            behind = Float32(n_block * self.mask.tile_n + self.mask.col - self.mask.level(r))
            for j in range(rows.shape[1][1]):
                for e in range(rows.shape[1][0]):
                    distance = behind + Float32(COLUMNS_PER_GROUP * j + e)
                    if not self.mask.window.is_causal:
                        distance = -cute.arch.fmax(distance, -distance)
                    rows[r, (e, j)] = distance * self.slope + rows[r, (e, j)]


class ColumnAlibi(Alibi):
    """The same under a causal mask in two parts: ``apply`` adds what the place of a column in the block decides, and
    ``of_rows`` has the rest, which is one number for each of the thread's rows."""

    def apply(self, acc_S: cute.Tensor, n_block: Int32) -> None:
        rows = as_rows(acc_S)
        for r in range(ROWS_PER_THREAD):
            for j in range(rows.shape[1][1]):
                for e in range(rows.shape[1][0]):
                    rows[r, (e, j)] = Float32(COLUMNS_PER_GROUP * j + e) * self.slope + rows[r, (e, j)]

    def of_rows(self, n_block: Int32) -> tuple[Float32, ...]:
        """What is left to add to the thread's rows of key block ``n_block``: the bias of its first column."""
        first = n_block * self.mask.tile_n + self.mask.col
        return tuple(Float32(first - self.mask.level(r)) * self.slope for r in range(ROWS_PER_THREAD))


@dataclass(frozen=True)
class FunctionRules(LoopInvariant):
    """A user's functions and the ``tensors`` that they read. What the accumulator holds, times ``scale``, is a score
    that is scaled and in base e, which is what they are given."""

    functions: UserFunctions
    tensors: tuple
    scale: Float32

    def for_tile(self, mask: TileMask, head: Int32, batch: Int32) -> "FunctionChange":
        """What they do to a thread's rows of one tile."""
        values = FunctionValues(self.functions, self.tensors, (batch, head), "q_idx")
        rows = tuple(values.on_line(mask.row + r * ROW_STRIDE) for r in range(ROWS_PER_THREAD))
        return FunctionChange(mask, values, rows, self.scale)


@dataclass(frozen=True)
class FunctionChange(LoopInvariant):
    """Works out a user's functions at every element of a thread's rows. A score function leaves scaled scores in base
    e, which the softmax multiplies by log2(e) alone (``scale_after_functions``); what the mask function hides becomes
    -inf. ``rows`` has the values that depend on the row alone.
    """

    mask: TileMask
    values: FunctionValues
    rows: tuple[Known, ...]
    scale: Float32

    def apply(self, acc_S: cute.Tensor, n_block: Int32) -> None:
        self.apply_listed(acc_S, n_block, None)

    def apply_listed(self, acc_S: cute.Tensor, n_block: Int32, kind: Int32 | None) -> None:
        """The same of a block from a list, of which ``kind`` is HIDDEN, PARTLY_SEEN or SEEN: the mask function counts
        where it is seen in part. None for a block that is of no list."""
        functions, scores = self.values.functions, as_rows(acc_S)
        first = n_block * self.mask.tile_n + self.mask.col
        for j in range(scores.shape[1][1]):
            for e in range(scores.shape[1][0]):
                column = self.values.across(first + (COLUMNS_PER_GROUP * j + e))
                for r in range(ROWS_PER_THREAD):
                    score = scores[r, (e, j)]
                    known = self.values.at(self.rows[r], column, score * self.scale)
                    if functions.has_score:
                        score = known[functions.score]
                    if functions.has_mask:
                        is_seen = known[functions.mask]
                        if kind is not None:
                            is_seen = seen_in_block(is_seen, kind)
                        score = select(is_seen, score, -Float32.inf)
                    scores[r, (e, j)] = score


def seen_in_block(is_seen: Boolean, kind: Int32) -> Boolean:
    """Whether an element of a listed block is seen of which the mask function says ``is_seen``; the block is of
    ``kind`` HIDDEN, PARTLY_SEEN or SEEN."""
    return (is_seen & (kind == PARTLY_SEEN)) | (kind == SEEN)


@dataclass(frozen=True)
class ScoreRules(LoopInvariant):
    """What a launch does to scores, made of its arguments.

    Each tuple is empty or of one: ``softcap`` the one for all tiles, ``slopes`` the tensor (batch, heads) of ALiBi,
    ``dropout`` that of P, ``functions`` the user's. ``inverse_scale`` is 1 / softmax_scale, or 1 / cap with a softcap:
    the unit of what the accumulator holds when ALiBi is added, since the scale comes later. ``alibi`` is how it is
    added.
    """

    softcap: tuple
    slopes: tuple
    inverse_scale: Float32 | float
    dropout: tuple[Dropout, ...] = ()
    functions: tuple[FunctionRules, ...] = ()
    alibi: type[Alibi] = Alibi

    def tile(self, mask: TileMask, head: Int32, batch: Int32) -> "ScoreTile":
        """What is done to the scores of a thread's rows of one tile, and to its P."""
        dropout = tuple(each.for_rows(mask.row, mask.col, head, batch) for each in self.dropout)
        return ScoreTile(mask, self.for_tile(mask, head, batch), dropout)

    def listed_tile(self, mask: TileMask, head: Int32, batch: Int32, blocks: KeyBlocks) -> "ScoreTile":
        """The same of a tile that visits listed ``blocks``."""
        tile = self.tile(mask, head, batch)
        return ListedScoreTile(mask, tile.changes, tile.dropout, blocks)

    def for_tile(self, mask: TileMask, head: Int32, batch: Int32) -> tuple[Any, ...]:
        """What changes the scores of a thread's rows of one tile, in order."""
        changes = self.softcap
        for slopes in self.slopes:
            # Rows that belong to no sequence stand behind the last one.
            slope = slopes[cutlass.min(batch, slopes.shape[0] - 1), head]
            changes = (*changes, self.alibi(mask, slope * self.inverse_scale))
        return *changes, *(functions.for_tile(mask, head, batch) for functions in self.functions)


def function_rules(
    functions: UserFunctions, tensors: tuple, scale_log2: Float32
) -> tuple[FunctionRules, ...]:
    """Those of a launch, or () without functions; ``scale_log2`` is that of ``scale_in_base_2``."""
    return (FunctionRules(functions, tensors, scale_log2 * Float32(1.0 / LOG2_E)),) if functions else ()


def scale_after_functions(functions: UserFunctions, scale_log2: Float32) -> Float32:
    """The factor that is left to the softmax: log2(e) after a score function, which leaves scaled scores in base e."""
    return Float32(LOG2_E) if functions.has_score else scale_log2


@dataclass(frozen=True)
class ScoreTile(LoopInvariant):
    """What is done to the scores of a thread's rows of one query tile, and with ``dropout`` to its P."""

    mask: TileMask
    changes: tuple[Any, ...] = ()
    dropout: tuple[RowDropout, ...] = ()

    @cute.jit
    def finish(self, acc_S: cute.Tensor, n_block: Int32, is_masked: cutlass.Constexpr[bool]):
        """Scores of key block ``n_block`` as the softmax takes them; without ``is_masked`` every row sees every key."""
        self.change(acc_S, n_block)
        if const_expr(is_masked):
            self.mask.apply(acc_S, n_block)

    def change(self, acc_S: cute.Tensor, n_block: Int32) -> None:
        """What is done before the mask, in every block."""
        for change in self.changes:
            change.apply(acc_S, n_block)

    def row_bias(self, n_block: Int32) -> tuple[Float32, ...]:
        """What ``finish`` leaves to be added to the scores of each of the thread's rows; () for nothing."""
        return tuple(
            bias
            for last in self.changes[-1:]
            if isinstance(last, ColumnAlibi)
            for bias in last.of_rows(n_block)
        )

    def kept(self, n_block: Int32) -> tuple[Kept, ...]:
        """What dropout keeps of key block ``n_block``; nothing where there is none."""
        tile_n = self.mask.tile_n
        return tuple(each.kept(n_block, tile_n, tile_n) for each in self.dropout)

    def kept_anew(self, n_block: Int32) -> tuple[Kept, ...]:
        """The same, where the compiler may not keep what all blocks share in registers (``RowDropout.anew``)."""
        return replace(self, dropout=tuple(each.anew() for each in self.dropout)).kept(n_block)


@dataclass(frozen=True)
class ListedScoreTile(ScoreTile):
    """The same of a tile that visits listed ``blocks``, the last of ``changes`` being a user's functions."""

    blocks: KeyBlocks | None = None

    @cute.jit
    def finish(self, acc_S: cute.Tensor, n_block: Int32, is_masked: cutlass.Constexpr[bool]):
        """``n_block`` is a place in the list."""
        self.change(acc_S, n_block)
        if const_expr(is_masked):
            self.mask.apply(acc_S, self.blocks.number(n_block))

    def change(self, acc_S: cute.Tensor, n_block: Int32) -> None:
        """``n_block`` is a place in the list."""
        entry = self.blocks.entry(n_block)
        number = entry >> ENTRY_BITS
        for change in self.changes[:-1]:
            change.apply(acc_S, number)
        self.changes[-1].apply_listed(acc_S, number, entry & ((1 << ENTRY_BITS) - 1))

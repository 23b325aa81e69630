"""The query tiles of a key tile, as one warp sees them: five products a block, and what lies between them."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cute_kernels.ampere.backward.config import AmpereBackwardConfig
from cute_kernels.ampere.backward.dq import GradientOfQ
from cute_kernels.ampere.backward.key_tile import UnmaskedTiles
from cute_kernels.ampere.backward.operands import SharedMemory, WarpOperands, WarpShare
from cute_kernels.ampere.config import MMA_ROWS
from cute_kernels.ampere.warp_operand import WarpOperand, WarpTarget
from cute_kernels.ampere.warp_product import WORDS_PER_GROUP, make_accumulator, multiply
from cute_kernels.backward.scores import make_gradient_of_rounded, read_vector, round_into
from cute_kernels.dropout import Kept, drop_gradient
from cute_kernels.fast_math import pin
from cute_kernels.fragments import COLUMNS_PER_GROUP, ROWS_PER_THREAD
from cute_kernels.invariant import LoopInvariant
from cute_kernels.key_mask import KeyMask
from cute_kernels.key_score_tile import KeyRules, KeyScoreTile

COLUMNS_PER_PAIR = 2 * COLUMNS_PER_GROUP
ReadBlock = Callable[[int, int], tuple]
"""Of (band, step): the words of an A operand."""


class Mainloop(LoopInvariant):
    """A warp's part of the five products of each block.

    ``acc_dK`` and ``acc_dV`` have an entry for each band of 16 keys. ``mask`` is that of the first band of
    scores, ``rules`` what is done to them beside it.
    """

    def __init__(
        self,
        config: AmpereBackwardConfig,
        dtype: type[cutlass.Numeric],
        smem: SharedMemory,
        share: WarpShare,
        mask: KeyMask,
        dq: GradientOfQ,
        rules: KeyRules,
    ):
        c = config
        self.config, self.dtype, self.mask, self.dq, self.rules = c, dtype, mask, dq, rules
        self.lane = cute.arch.lane_idx()
        self.operands = WarpOperands(c, smem, share, self.lane)
        layout = cute.make_layout((c.score_queries, c.stages), stride=(1, c.tile_m))
        self.lse, self.delta = (
            cute.make_tensor(vector + share.score_query, layout) for vector in (smem.lse, smem.delta)
        )
        columns = c.head_dim // c.gradient_splits
        self.acc_dK, self.acc_dV = (
            [make_accumulator(columns) for _ in range(c.gradient_bands)] for _ in range(2)
        )

    def clear(self) -> None:
        for acc in (*self.acc_dK, *self.acc_dV):
            acc.fill(0.0)

    @cute.jit
    def block(
        self,
        place: tuple,
        stage: Int32,
        unmasked: UnmaskedTiles,
    ):
        """The query tile at ``place``, (head, query tile) and of a list its ``ListedQuery``, whose Q and dO lie in
        buffer ``stage``; it needs a mask if it is not one of the ``unmasked``. All warps of the CTA meet once
        inside."""
        m_block = place[1]
        # Before there are scores, which leave no registers for it.
        kept = [tile.kept(m_block, self.config.score_queries) for tile in self._score_tiles(place)]
        acc_S, acc_dP = self._make_scores(), self._make_scores()
        operands = self._operands_in(m_block, stage)
        self._score(acc_S, operands.k, operands.q)
        tiles = self._score_tiles(place)
        for band in cutlass.range_constexpr(self.config.score_bands):
            tiles[band].cap(acc_S[band])
        lse = read_vector(self.lse, stage, self.lane, self.config.score_queries)
        if const_expr(self.config.has_mask):
            if unmasked.lacks(m_block):
                self._mask(acc_S, m_block)
        p, p_of_gradient = self._make_probabilities(tiles, acc_S, lse, m_block, kept)
        if const_expr(not self.config.keeps_probabilities):
            self._share(words_of(p), operands.p_target)
        self._score(acc_dP, operands.v, operands.do)
        delta = read_vector(self.delta, stage, self.lane, self.config.score_queries)
        for band in cutlass.range_constexpr(self.config.score_bands):
            drop_gradient(acc_dP[band], kept[band])
            make_gradient_of_rounded(acc_dP[band], p_of_gradient[band], delta)
        ds = self._round(acc_dP)
        if const_expr(not self.config.has_mask and self.dtype is cutlass.Float16):
            self._hide(words_of(ds), m_block)
        self._share(words_of(ds), operands.ds_target)
        if const_expr(self.config.keeps_probabilities):
            self._add_gradients(partial(operand_of, words_of(p)), partial(operand_of, words_of(ds)), operands)
            cute.arch.sync_threads()
        else:
            cute.arch.sync_threads()
        self.dq.add(partial(self._make_dq, operands), place)
        if const_expr(not self.config.keeps_probabilities):
            self._add_gradients(operands.p.block, operands.ds.block, operands)

    def _make_scores(self) -> list[cute.Tensor]:
        return [make_accumulator(self.config.score_queries) for _ in range(self.config.score_bands)]

    def _score(self, accs: list[cute.Tensor], keys: WarpOperand, queries: WarpOperand) -> None:
        """S^T = K Q^T, or dP^T = V dO^T."""
        steps = self.config.head_dim // MMA_ROWS
        for acc in accs:
            acc.fill(0.0)
        multiply(accs, steps, self.dtype, keys.block, queries.block)

    def _score_tiles(self, place: tuple) -> list[KeyScoreTile]:
        """Of each band, of the block at ``place``."""
        head, mask = place[0], self.mask
        if self.config.alibi or self.config.functions:
            # As in ``_mask``; and the slope is read anew for each block.
            mask, head = replace(mask, key=pin(mask.key, Int32), col=pin(mask.col, Int32)), pin(head, Int32)
        tile = self.rules.for_head(mask, head, mask.seqlens.batch)
        for listed in place[2:]:
            tile = listed.scores(tile)
        bands = range(self.config.score_bands)
        masks = [replace(mask, key=mask.key + band * MMA_ROWS) for band in bands]
        return [
            replace(tile, mask=of_band, dropout=self.rules.dropout_of(of_band, head, mask.seqlens.batch))
            for of_band in masks
        ]

    def _make_probabilities(
        self,
        tiles: list[KeyScoreTile],
        acc_S: list[cute.Tensor],
        lse: cute.Tensor,
        m_block: Int32,
        kept: list[tuple[Kept, ...]],
    ) -> tuple[list[cute.Tensor], list[cute.Tensor]]:
        """P^T in 16 bits, without what is not ``kept``, and what dS^T is made of: the same, but for factors, as
        those of a softcap, and for dropout."""
        clamps = not self.config.has_mask
        if not (tiles[0].has_factors or self.config.dropout):
            for tile, acc in zip(tiles, acc_S, strict=True):
                tile.make_probabilities(acc, lse, m_block, clamps)
            p = self._round(acc_S)
            return p, p
        p = [cute.make_rmem_tensor(cute.size(acc), self.dtype) for acc in acc_S]
        for tile, rounded, acc, of_band in zip(tiles, p, acc_S, kept, strict=True):
            tile.round_probabilities(rounded, acc, lse, m_block, clamps, of_band)
        return p, self._round(acc_S)

    def _hide(self, bands: list[cute.Tensor], m_block: Int32) -> None:
        """Without a mask: zero dS of keys past the end. Were it too large for float16, their K, which is zero,
        would make NaN of it. (bfloat16 has the range of float32.)"""
        key = self.mask.key + self._zero(m_block)
        for band, words in enumerate(bands):
            mask = replace(self.mask, key=key + band * MMA_ROWS)
            bits = [mask.bits(r) for r in range(ROWS_PER_THREAD)]
            for i in range(cute.size(words)):
                words[i] = words[i] & bits[i % ROWS_PER_THREAD]

    def _zero(self, m_block: Int32) -> Int32:
        """Zero, since the query tile has queries. The compiler does not know that, and so does not hold in registers,
        throughout the loop, what is computed from it."""
        return ((m_block * self.config.tile_m - self.mask.seqlens.seqlen_q) >> 31) + 1

    def _operands_in(self, m_block: Int32, stage: Int32) -> WarpOperands:
        # With a zero, or else all addresses that differ from an operand's by an xor would be held.
        return self.operands.at(stage * self.config.stage_bytes, self._zero(m_block))

    def _mask(self, accs: list[cute.Tensor], m_block: Int32) -> None:
        # Pinned, or else what is known of the keys is computed before the loop and held in registers.
        key = pin(self.mask.key, Int32)
        for band, acc in enumerate(accs):
            replace(self.mask, key=key + band * MMA_ROWS).apply(acc, m_block)

    def _add_gradients(self, p: ReadBlock, ds: ReadBlock, operands: WarpOperands) -> None:
        """dV += P^T dO and dK += dS^T Q."""
        c = self.config
        for accs, a, columns in ((self.acc_dV, p, operands.do_t), (self.acc_dK, ds, operands.q_t)):
            b = partial(read_columns, columns, c.gradient_splits)
            multiply(accs, c.tile_m // MMA_ROWS, self.dtype, a, b)

    def _make_dq(self, operands: WarpOperands, part: int) -> list[cute.Tensor]:
        """dQ = dS K of a part of this warp's columns."""
        c = self.config
        accs = [make_accumulator(c.dq_columns) for _ in range(c.dq_bands)]
        for acc in accs:
            acc.fill(0.0)
        ds_t, k_t = operands.ds_t, operands.k_t
        first_pair = part * c.dq_columns // COLUMNS_PER_PAIR
        multiply(
            accs,
            c.tile_n // MMA_ROWS,
            self.dtype,
            # Keys are the rows of what is read.
            lambda band, step: ds_t.block(step, band),
            lambda pair, step: read_columns(k_t, c.dq_splits, first_pair + pair, step),
        )
        return accs

    def _round(self, accs: list[cute.Tensor]) -> list[cute.Tensor]:
        """Each band in 16 bits, in the same order."""
        rounded = [cute.make_rmem_tensor(cute.size(acc), self.dtype) for acc in accs]
        for target, acc in zip(rounded, accs, strict=True):
            round_into(target, acc)
        return rounded

    def _share(self, bands: list[cute.Tensor], target: WarpTarget) -> None:
        """Write P^T or dS^T of this warp to shared memory."""
        for band, words in enumerate(bands):
            for i in range(cute.size(words)):
                target.store(band, i // ROWS_PER_THREAD, i % ROWS_PER_THREAD, words[i])


def words_of(rounded: list[cute.Tensor]) -> list[cute.Tensor]:
    """Bands of 16-bit elements as words of two queries."""
    return [cute.recast_tensor(band, Int32) for band in rounded]


def operand_of(bands: list[cute.Tensor], band: int, step: int) -> tuple:
    """16 queries of a band of P^T or dS^T, as the A operand that they are."""
    return tuple(bands[band][WORDS_PER_GROUP * step + i] for i in range(WORDS_PER_GROUP))


def read_columns(operand: WarpOperand, splits: int, pair: int, step: int) -> tuple:
    """16 columns of a warp's, which takes turns with ``splits`` warps, of 16 rows that are summed over."""
    return operand.block(step, splits * pair)

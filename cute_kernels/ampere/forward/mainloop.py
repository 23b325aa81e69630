"""The key blocks of a query tile, as one warp sees them: S = Q K^T, softmax, O += P V."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from cute_kernels.ampere.config import MMA_KEYS, MMA_ROWS, AmpereForwardConfig
from cute_kernels.ampere.forward.ring import KeyValueRing
from cute_kernels.ampere.forward.shift import ShiftSoftmax
from cute_kernels.ampere.forward.warp_tiles import WarpTiles
from cute_kernels.ampere.instructions import as_fragment
from cute_kernels.ampere.warp_product import WORDS_PER_GROUP, make_accumulator, mma_pair
from cute_kernels.dropout import Kept, zero_dropped
from cute_kernels.fast_math import pin
from cute_kernels.fragments import COLUMNS_PER_GROUP, ROWS_PER_THREAD
from cute_kernels.integers import minimum
from cute_kernels.invariant import LoopInvariant
from cute_kernels.key_blocks import KeyBlocks, ListedBlocks
from cute_kernels.problem import VARLEN
from cute_kernels.score_tile import ScoreTile
from cute_kernels.window import Window


@dataclass(frozen=True)
class WarpBlocks(LoopInvariant):
    """The part of a CTA's key blocks that the rows of one warp see: from ``end`` - 1 down to ``begin``, at least one.

    A band needs a mask from its one of ``unmasked_ends`` on, and below its one of ``left_masked_ends``; one number is
    that of all bands.
    """

    of_cta: KeyBlocks
    end: Int32
    begin: Int32 | int
    unmasked_ends: tuple[Int32, ...]
    left_masked_ends: tuple[Int32 | int, ...]

    @staticmethod
    def of(of_cta: KeyBlocks, of_warp: KeyBlocks, bands: tuple[KeyBlocks, ...]) -> "WarpBlocks":
        if isinstance(of_cta, ListedBlocks):
            # All warps alike. The end of the sequence is in the block that comes first, or in none.
            return WarpBlocks(of_cta, of_cta.end, 0, (of_cta.last,) * len(bands), (0,))
        if not of_cta.window.has_left:
            return WarpBlocks(of_cta, of_warp.end, 0, tuple(band.unmasked for band in bands), (0,))
        # Rows past the last query may see no block at all.
        begin = minimum(of_warp.begin, of_warp.last)
        # For all bands alike, which takes fewer registers.
        return WarpBlocks(of_cta, of_warp.end, begin, (of_warp.unmasked,), (of_warp.left_masked,))

    @property
    def window(self) -> Window:
        return self.of_cta.window

    def needs_mask(self, band: int, n_block: Int32) -> Boolean:
        if not self.window.has_left:
            return n_block >= self.unmasked_ends[band]
        return n_block >= 0


def columns_of(acc: cute.Tensor, step: int) -> cute.Tensor:
    """The 16 columns number ``step`` of an accumulator."""
    return cute.make_tensor(acc.iterator + 2 * WORDS_PER_GROUP * step, cute.make_layout(((2, 2, 2), 1, 1)))


class Mainloop(LoopInvariant):
    """A warp's one or two bands of 16 rows against all their key blocks.

    The bands share every fragment of K and V that is read. ``acc_O`` and ``softmax`` have one entry a band.
    """

    def __init__(
        self,
        config: AmpereForwardConfig,
        dtype: type[cutlass.Numeric],
        ring: KeyValueRing,
        tiles: WarpTiles,
        softmax: list[ShiftSoftmax],
    ):
        self.config, self.dtype, self.ring, self.tiles = config, dtype, ring, tiles
        self.softmax = softmax
        self.acc_O = [make_accumulator(config.head_dim_v) for _ in range(config.bands)]

    @cute.jit
    def attend(self, scores: list[ScoreTile], blocks: WarpBlocks) -> tuple[Int32, Int32]:
        """Leave O, not yet normalised, in ``acc_O`` and the row statistics in ``softmax``.

        The ring must have been filled from the CTA's last block on; all warps go from there down to its first
        together, and each computes what its own rows see. With a left side of a window it ends before the blocks that
        need its mask: for ``attend_left_side`` it returns the next block, and the slot of its K.
        """
        for band in cutlass.range_constexpr(self.config.bands):
            self.softmax[band].start()
            self.acc_O[band].fill(0.0)
        if const_expr(self.config.q_in_registers):
            self.ring.await_item()
            self.tiles.keep_q()
        slot = Int32(0)
        n_block = blocks.of_cta.last
        if const_expr(self.config.layout == VARLEN and not blocks.window.has_right):
            # Or else it is worked out again from the length, which takes more registers than there are.
            n_block = pin(n_block, Int32)
        if const_expr(blocks.window.has_right):
            for _ in cutlass.range(blocks.of_cta.end - blocks.end, unroll=1):
                slot = self._pass_by(n_block, slot, True)
                n_block -= 1
        masked = blocks.end - blocks.unmasked_ends[0]
        if const_expr(blocks.window.has_left):
            masked = blocks.end - cutlass.max(blocks.unmasked_ends[0], blocks.begin)
        for _ in cutlass.range(masked, unroll=1):
            slot = self._block(scores, blocks, n_block, slot, True, True)
            n_block -= 1
        unmasked_begin = blocks.left_masked_ends[-1]
        for _ in cutlass.range(n_block + 1 - unmasked_begin, unroll=1):
            slot = self._block(scores, blocks, n_block, slot, False, False)
            n_block -= 1
        return n_block, slot

    @cute.jit
    def attend_left_side(self, scores: list[ScoreTile], blocks: WarpBlocks, n_block: Int32, slot: Int32):
        """The blocks from ``n_block`` down to the CTA's first, which hide keys too far before a query.

        None of them reaches past the end: that was the one visited first, which is not among them.
        """
        for _ in cutlass.range(n_block + 1 - blocks.begin, unroll=1):
            slot = self._block(scores, blocks, n_block, slot, True, False)
            n_block -= 1
        for _ in cutlass.range(n_block + 1 - blocks.of_cta.begin, unroll=1):
            slot = self._pass_by(n_block, slot, False)
            n_block -= 1

    @cute.jit
    def _pass_by(self, n_block: Int32, k_slot: Int32, is_guarded: cutlass.Constexpr[bool]) -> Int32:
        """A block that its mask keeps from this warp, which still loads its share of what others need."""
        self.ring.await_item()
        self.ring.refill(0, n_block, k_slot, is_guarded)
        v_slot = self.ring.next_slot(k_slot)
        self.ring.await_item()
        self.ring.refill(1, n_block, v_slot, is_guarded)
        return self.ring.next_slot(v_slot)

    @cute.jit
    def _block(
        self,
        scores: list[ScoreTile],
        blocks: WarpBlocks,
        n_block: Int32,
        k_slot: Int32,
        is_masked: cutlass.Constexpr[bool],
        is_guarded: cutlass.Constexpr[bool],
    ) -> Int32:
        """One key block, which ``is_guarded`` says may reach past the end; returns the slot of the next one's K."""
        # Before there are scores, which leave no registers for it.
        kept = [scores[band].kept(n_block) for band in range(self.config.bands)]
        acc_S = [make_accumulator(self.config.tile_n) for _ in range(self.config.bands)]
        self.ring.await_item()
        self.ring.refill(0, n_block, k_slot, is_guarded)
        self._scores(acc_S, k_slot)
        for band in cutlass.range_constexpr(self.config.bands):
            # Always so, here and in a mask for a warp's first band. The branches keep both out of the products' basic
            # block, in which they would cost registers that are not there.
            if const_expr(len(scores[band].changes) > 0):
                if n_block >= 0:
                    scores[band].change(acc_S[band], n_block)
            if const_expr(is_masked):
                if blocks.needs_mask(band, n_block):
                    scores[band].mask.apply(acc_S[band], blocks.of_cta.number(n_block))
            self.softmax[band].take_scores(acc_S[band], is_first=False)
        v_slot = self.ring.next_slot(k_slot)
        self.ring.await_item()
        self.ring.refill(1, n_block, v_slot, is_guarded)
        for band in cutlass.range_constexpr(self.config.bands):
            # Only if a row of the warp has a new maximum, which is exact: the factors are 1 otherwise.
            self.softmax[band].rescale_if_needed(self.acc_O[band])
        self._add_values(acc_S, v_slot, kept)
        return self.ring.next_slot(v_slot)

    def _scores(self, acc_S: list[cute.Tensor], slot: Int32) -> None:
        """S = Q K^T. Each fragment of K is read one step before it is used."""
        c = self.config
        key_bands = c.tile_n // MMA_KEYS
        places = [(step, keys) for step in range(c.head_dim // MMA_ROWS) for keys in range(key_bands)]
        for acc in acc_S:
            acc.fill(0.0)
        k_next = self.tiles.k.block(0, 0, slot)
        for number, (step, keys) in enumerate(places):
            if keys == 0:
                q_blocks = [self._fragment(self.tiles.q_block(band, step)) for band in range(c.bands)]
            k_block = k_next
            if number + 1 < len(places):
                next_step, next_keys = places[number + 1]
                k_next = self.tiles.k.block(next_keys, next_step, slot)
            for band in range(c.bands):
                mma_pair(acc_S[band], keys, q_blocks[band], k_block)

    def _add_values(self, acc_S: list[cute.Tensor], slot: Int32, kept: list[tuple[Kept, ...]]) -> None:
        """O += P V, with P = exp2(S - shift) made 16 keys at a time under the products of the 16 before, or all of it
        first; dropout leaves what is ``kept`` of each band."""
        c = self.config
        steps, pairs = c.tile_n // MMA_KEYS, c.head_dim_v // (2 * COLUMNS_PER_GROUP)
        probabilities = [
            self._exponentiate(acc_S, step, kept) for step in range(steps) if not c.fused_exponentials
        ]
        v_next = self.tiles.v.block(0, 0, slot)
        for number in range(steps * pairs):
            step, pair = number // pairs, number % pairs
            if pair == 0:
                p_blocks = (
                    self._exponentiate(acc_S, step, kept) if c.fused_exponentials else probabilities[step]
                )
            v_block = v_next
            if number + 1 < steps * pairs:
                v_next = self.tiles.v.block((number + 1) // pairs, (number + 1) % pairs, slot)
            for band in range(c.bands):
                mma_pair(self.acc_O[band], pair, p_blocks[band], v_block)

    def _exponentiate(
        self, acc_S: list[cute.Tensor], step: int, kept: list[tuple[Kept, ...]]
    ) -> list[cute.Tensor]:
        """P of the 16 keys number ``step``, as an A operand for each band."""
        blocks = []
        for band in range(self.config.bands):
            scores = columns_of(acc_S[band], step)
            operand = cute.make_rmem_tensor(2 * WORDS_PER_GROUP, self.dtype)
            for r in range(ROWS_PER_THREAD):
                self.softmax[band].exponentiate(scores, r, is_first=False)
                zero_dropped(scores, r, kept[band], step * MMA_KEYS // COLUMNS_PER_GROUP)
                self.softmax[band].store_P(operand, scores, r)
            words = cute.recast_tensor(operand, Int32)
            blocks.append(self._fragment(tuple(words[i] for i in range(WORDS_PER_GROUP))))
        return blocks

    def _fragment(self, words: tuple) -> cute.Tensor:
        return as_fragment(words, self.dtype)

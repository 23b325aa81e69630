"""Softmaxes where all keys of a head share a scale, and all values, as those of e4m3 tensors with descales do."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from cute_kernels.fragments import ROWS_PER_THREAD
from cute_kernels.seqlen import SeqlenInfo
from hopper.forward.fp8.scales import ask_for_scale, scale_of_sequence, valid
from hopper.forward.fp8.softmax.any_codes import HalfScoresOfAnyCodes
from hopper.forward.fp8.softmax.eager import EagerSoftmax
from hopper.forward.fp8.softmax.exact import ExactSoftmax
from hopper.forward.fp8.softmax.lagging import LaggingSoftmax


class LoneScales:
    """Of a subclass of ``ExactSoftmax``: asks for the scales of K, V and the output as a tile begins, and takes them
    under its first Q K^T. So no block waits for them, nor for the producer that would publish them.

    ``head_scales`` are those of K and of V; all are as ``BlockScales`` has them then. ``asked`` are they and those of Q
    and the output, of tile ``sequence``. ``tile_scale`` has all that scores are multiplied with. What O is a multiple
    of never changes; ``unit`` has it times the factor of the output.
    """

    def __init__(self, *arguments: Any, head_scales: tuple, **more: Any):
        super().__init__(*arguments, **more)
        self.scales_of_head = *head_scales, self.q_scale, self.o_scale
        self.asked = cute.make_rmem_tensor(len(self.scales_of_head), Float32)
        self.sequence = cute.make_rmem_tensor(1, Int32)

    @cute.jit
    def enter_head(self, head: Int32, head_kv: Int32, sequence: Int32):
        """Called behind ``enter_tile``. What global memory answers is not looked at yet."""
        of_q = head - head_kv * Int32(self.q_scale.shape[2])
        places = Int32(0), Int32(0), of_q, Int32(0)
        for i in cutlass.range_constexpr(len(places)):
            self.asked[i] = ask_for_scale(self.scales_of_head[i], sequence, head_kv, places[i])
        self.sequence[0] = sequence
        self.tile_scale.fill(1.0)

    @cute.jit
    def enter_first_block(self):
        of_k, of_v, of_q, of_o = (
            scale_of_sequence(self.asked[i], self.scales_of_head[i], self.sequence[0]) for i in range(4)
        )
        scale = of_q * (valid(of_k) * self.scale_log2)
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            self.tile_scale[r] = self.tile_scale[r] * scale
        self._take_scale(Float32(1.0))
        self.unit[0] = valid(of_v) * of_o

    def _find_tile_scale(self, rows: tuple, head: Int32, seqlens: SeqlenInfo):
        """``enter_first_block`` does."""

    def _find_scales(self, slot: Int32):
        """They are known."""

    def _follow_unit(self, r: int):
        """It is the same in all blocks."""

    def _factor(self, head_kv: Int32, batch: Int32) -> Float32:
        return self.unit[0]


class LoneExact(LoneScales, ExactSoftmax):
    """``ExactSoftmax`` with ``LoneScales``."""


class LoneEager(LoneScales, EagerSoftmax):
    """``EagerSoftmax`` with ``LoneScales``."""


class LoneStale(LoneScales):
    """The same of a subclass of ``StaleMaximumSoftmax``."""

    def take_new_unit(self):
        """There is none."""

    def change_unit(self):
        """Nor here."""

    def _has_new_unit(self) -> Boolean:
        return Boolean(False)


class LoneLagging(LoneStale, LaggingSoftmax):
    """``LaggingSoftmax`` with ``LoneScales``."""

    def _find_scale_again(self, slot: Int32):
        """It is at hand."""


class LoneHalfScores(LoneStale, HalfScoresOfAnyCodes):
    """``HalfScoresOfAnyCodes`` with ``LoneScales``.

    ``makes_words_once`` says that there are registers to keep ``slopes`` and ``scales`` of a tile. Else each block
    makes them. ``blocks_a_wary_block`` is that of ``HalfScoresSoftmax``.
    """

    def __init__(self, *arguments: Any, makes_words_once: bool, blocks_a_wary_block: int, **more: Any):
        super().__init__(*arguments, **more)
        self.makes_words_once = makes_words_once
        self.blocks_a_wary_block = blocks_a_wary_block

    @cute.jit
    def enter_first_block(self):
        LoneStale.enter_first_block(self)
        if const_expr(self.makes_words_once):
            self._make_words()

    @cute.jit
    def enter_block(self, slot: Int32):
        if const_expr(not self.makes_words_once):
            self._make_words()

    @cute.jit
    def _make_words(self):
        self._take_scale(Float32(1.0))
        self._make_words_of_scales()

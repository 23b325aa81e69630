"""Softmaxes where all keys of a head share a scale, and all values, as those of e4m3 tensors with descales do."""

from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from cute_kernels.seqlen import SeqlenInfo
from hopper.forward.fp8.scales import scale_of_sequence, valid
from hopper.forward.fp8.softmax.any_codes import HalfScoresOfAnyCodes
from hopper.forward.fp8.softmax.eager import EagerSoftmax
from hopper.forward.fp8.softmax.exact import ExactSoftmax
from hopper.forward.fp8.softmax.lagging import LaggingSoftmax


class LoneScales:
    """Of a subclass of ``ExactSoftmax``: reads the scales of K, V and the output as a tile begins, while its first
    block is on its way. So no block waits for them, nor for the producer that would publish them.

    ``head_scales`` are those of K and of V; all are as ``BlockScales`` has them then. ``tile_scale`` has all that
    scores are multiplied with. What O is a multiple of never changes; ``unit`` has it times the factor of the output.
    """

    def __init__(self, *arguments: Any, head_scales: tuple, **more: Any):
        super().__init__(*arguments, **more)
        self.k_scale, self.v_scale = head_scales

    @cute.jit
    def enter_head(self, head: Int32, head_kv: Int32, sequence: Int32):
        """Called behind ``enter_tile``."""
        of_q = head - head_kv * Int32(self.q_scale.shape[2])
        scale_k = valid(scale_of_sequence(self.k_scale, sequence, head_kv, Int32(0))) * self.scale_log2
        scale = scale_of_sequence(self.q_scale, sequence, head_kv, of_q) * scale_k
        self.tile_scale.fill(scale)
        self._take_scale(Float32(1.0))
        of_v, of_o = (scale_of_sequence(x, sequence, head_kv, Int32(0)) for x in (self.v_scale, self.o_scale))
        self.unit[0] = valid(of_v) * of_o

    def _find_tile_scale(self, rows: tuple, head: Int32, seqlens: SeqlenInfo):
        """``enter_head`` does."""

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
    def lower_queries(self):
        HalfScoresOfAnyCodes.lower_queries(self)
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

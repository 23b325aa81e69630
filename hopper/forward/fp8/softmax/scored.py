"""Softmaxes of FP8 scores that a cap limits, or whose rows have a sink beside their keys."""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_kernels.fast_math import exp2, tanh_approx
from cute_kernels.fragments import ROWS_PER_THREAD, as_rows
from cute_kernels.invariant import LoopInvariant
from cute_kernels.seqlen import SeqlenInfo
from cute_kernels.softmax import LN_2
from hopper.forward.fp8.softmax.exact import P_EXPONENT, ExactSoftmax
from hopper.forward.grouped import place_of_row
from hopper.forward.split import part_of


@dataclass(frozen=True)
class ScaledSoftCap(LoopInvariant):
    """``SoftCap`` of scores whose rows have scales: s becomes c tanh(s / c), and what is left lacks the factor c.

    ``factors`` are registers, softmax_scale / c times the scales of each of the thread's rows. The tanh is one
    instruction, with an error that rounding P to e4m3 covers.
    """

    factors: cute.Tensor

    def apply(self, acc_S: cute.Tensor, n_block: Int32) -> None:
        rows = as_rows(acc_S)
        for r in range(ROWS_PER_THREAD):
            for j in range(rows.shape[1][1]):
                for e in range(rows.shape[1][0]):
                    rows[r, (e, j)] = tanh_approx(rows[r, (e, j)] * self.factors[r])


class WithSoftcap(ExactSoftmax):
    """Mixin, to be put before a softmax: scales of Q and K are used up under the tanh of a softcap, and the softmax has
    the cap in their place. What is its ``scale_log2`` elsewhere is softmax_scale / c here, ``cap_log2`` is c log2(e).
    """

    def __init__(self, *softmax: Any, cap_log2: Float32, **more: Any):
        super().__init__(*softmax, **more)
        self.cap_log2, self.factors = cap_log2, cute.make_rmem_tensor(ROWS_PER_THREAD, Float32)

    @cute.jit
    def _take_scale(self, scale_k: Float32):
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            self.factors[r] = scale_k * self.tile_scale[r]
            self.scale[r] = self.cap_log2


class WithRowSinks(ExactSoftmax):
    """Mixin, to be put before a softmax: ``WithSinks`` of P times 2^``P_EXPONENT``, in tiles of several heads too.

    ``sinks`` are float32 (heads,), in base e and not scaled. Where keys are ``in_parts`` the first one has them.
    """

    def __init__(self, *softmax: Any, sinks: cute.Tensor, heads_of_tile: int, in_parts: bool, **more: Any):
        super().__init__(*softmax, **more)
        self.sinks, self.heads_of_tile, self.in_parts = sinks, heads_of_tile, in_parts
        self.sink_log2 = cute.make_rmem_tensor(ROWS_PER_THREAD, Float32)

    def enter_tile(self, rows: tuple, head: Int32, seqlens: SeqlenInfo):
        super().enter_tile(rows, head, seqlens)
        self._find_sinks(rows, head)
        if self.in_parts:
            self._leave_to_first_part(part_of(seqlens))

    @cute.jit
    def _leave_to_first_part(self, part: Int32):
        if part > 0:
            self.sink_log2.fill(-Float32.inf)

    @cute.jit
    def _find_sinks(self, rows: tuple, head: Int32):
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            own = head
            if const_expr(self.heads_of_tile > 1):
                own = head * self.heads_of_tile + place_of_row(rows[r], self.heads_of_tile)[1]
            self.sink_log2[r] = self.sinks[own] * Float32(math.log2(math.e))

    @cute.jit
    def _of_row(self, r: cutlass.Constexpr[int], total: Float32, factor: Float32) -> tuple[Float32, Float32]:
        """From the larger of a row's maximum and the sink, so that neither exponential overflows."""
        greater = cute.arch.fmax(self.shift[r], self.sink_log2[r])
        shrink = exp2(self.shift[r] - greater)
        whole = total * shrink + exp2(self.sink_log2[r] - greater + Float32(P_EXPONENT))
        # A sink of -inf leaves a row without keys empty.
        is_empty = whole == Float32(0.0)
        inverse = Float32(0.0) if is_empty else shrink * cute.arch.rcp_approx(whole) * factor
        log2_sum = greater + cute.math.log2(whole, fastmath=True) - Float32(P_EXPONENT)
        return inverse, -Float32.inf if is_empty else log2_sum * Float32(LN_2)


@cache
def with_scores(kind: type[ExactSoftmax], softcap: bool, sinks: bool) -> type[ExactSoftmax]:
    """``kind`` with what there is of these."""
    mixins = (*((WithRowSinks,) if sinks else ()), *((WithSoftcap,) if softcap else ()))
    name = "".join(each.__name__.removeprefix("With") for each in (*mixins, kind))
    return type(name, (*mixins, kind), {}) if mixins else kind

"""The eager softmax where all keys of a head share a scale, and all values."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_kernels.fast_math import maximum_or_nan, multiply_rounded
from cute_kernels.seqlen import SeqlenInfo
from cute_kernels.softmax import LEAST
from hopper.forward.fp8.scales import valid
from hopper.forward.fp8.softmax.eager import EagerSoftmax


class LoneScalesSoftmax(EagerSoftmax):
    """``EagerSoftmax`` that reads the scales of K, V and the output as a tile begins, while its first block is on its
    way. So no block waits for them, nor for the producer that would publish them.

    ``head_scales`` are those of K and of V, (batch, kv_heads, 1) each. What O is a multiple of never changes; ``unit``
    has it times the factor of the output.
    """

    def __init__(
        self,
        scale_log2: Float32,
        tile_scales: tuple,
        slots: cute.Tensor,
        polynomial_pairs: int,
        head_scales: tuple,
    ):
        super().__init__(scale_log2, tile_scales, slots, polynomial_pairs)
        self.k_scale, self.v_scale = head_scales

    @cute.jit
    def enter_head(self, head_kv: Int32, seqlens: SeqlenInfo):
        """Called behind ``enter_tile``."""
        batch = seqlens.batch
        self._take_scale(valid(self.k_scale[batch, head_kv, 0]) * self.scale_log2)
        self.unit[0] = valid(self.v_scale[batch, head_kv, 0]) * self.o_scale[batch, head_kv, 0]

    def _find_scales(self, slot: Int32):
        """They are known."""

    @cute.jit
    def _update_max(
        self,
        acc_S: cute.Tensor,
        r: cutlass.Constexpr[int],
        of_thread: Int32,
        is_first: cutlass.Constexpr[bool],
    ):
        before = Float32(LEAST) if const_expr(is_first) else self.shift[r]
        shift = multiply_rounded(self._row_maximum(acc_S, r, of_thread), self.scale[r])
        self._move_shift(r, maximum_or_nan(shift, before), is_first)

    def _factor(self, head_kv: Int32, batch: Int32) -> Float32:
        return self.unit[0]

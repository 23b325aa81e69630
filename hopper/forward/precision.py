"""What the dtype of the inputs decides about a forward kernel: its softmax, its sums, and what goes with them."""

from dataclasses import dataclass
from typing import Any

from cutlass import Float16, Float32

from cute_kernels.dtypes import DSL_DTYPES
from cute_kernels.invariant import LoopInvariant
from cute_kernels.score_tile import ScoreTile, SoftCap
from cute_kernels.softmax import OnlineSoftmax, RoundingSoftmax, SinkSoftmax
from hopper.config import ForwardConfig
from hopper.forward.consumer import Consumer
from hopper.forward.operands import Mmas
from hopper.forward.output import Output, OutputInHalves
from hopper.forward.places import TilePlace
from hopper.forward.softmax import ComparingRoundingSoftmax, ComparingSinkSoftmax, ComparingSoftmax
from hopper.forward.unscaled import NoCorrection, NoScales


@dataclass(frozen=True)
class SixteenBits(LoopInvariant):
    """Inputs in float16 or bfloat16, and scores in float32.

    ``extras`` are arguments of a launch beyond the six tensors of every forward kernel: the sinks, if there are any.
    ``storage`` is the shared memory of ``ForwardKernel``, of which ``scale_floats`` float32 are for scales, and
    ``mean_floats`` for what a warpgroup adds to O.
    """

    config: ForwardConfig

    consumer_type = Consumer
    scale_floats = 0
    mean_floats = 0
    recomputes_addresses = False
    """Whether all registers are taken in a tile, so that what can be computed again after it is not kept."""

    def make_softmax(self, scale_log2: Float32, extras: tuple, storage: Any) -> OnlineSoftmax:
        c, dtype = self.config, DSL_DTYPES[self.config.dtype]
        late = (c.finds_second_maximum_late,) if c.compares_bits else ()
        if c.sinks:
            kind = ComparingSinkSoftmax if c.compares_bits else SinkSoftmax
            return kind(*extras, *late, scale_log2, dtype)
        if dtype is Float16:
            return (ComparingRoundingSoftmax if c.compares_bits else RoundingSoftmax)(
                *late, scale_log2, dtype
            )
        return (ComparingSoftmax if c.compares_bits else OnlineSoftmax)(*late, scale_log2)

    def softcaps(self, factors: tuple[Float32, ...]) -> tuple[SoftCap, ...]:
        """What a softcap does to all scores of a launch; ``factors`` is empty, or has softmax_scale / cap."""
        # float16 keeps digits that the tanh of one instruction would lose.
        return tuple(SoftCap(factor, DSL_DTYPES[self.config.dtype] is Float16) for factor in factors)

    def score_tile(self, scores: ScoreTile, softmax: OnlineSoftmax) -> ScoreTile:
        """``scores`` with what is done to them by scales that the softmax has."""
        return scores

    def enter_head(self, softmax: OnlineSoftmax, place: TilePlace):
        """What a consumer does for the head of K and V of a tile, as it begins."""

    def make_output(self, mmas: Mmas, part_mma: Any, consumer: Any) -> Output:
        """How P V reaches O; ``part_mma`` makes the tiled MMA of so many columns of V, ``consumer`` are the
        ``ConsumerParts``."""
        parts = self.config, mmas, consumer.operands.v.smem, consumer.softmax
        if self.config.ends_in_halves:
            return OutputInHalves(part_mma(self.config.head_dim_v // 2), *parts)
        return Output(*parts)

    def make_scales(self, scale_log2: Float32, extras: tuple, storage: Any) -> NoScales:
        """What the producer publishes beside each block of K."""
        return NoScales()

    def make_correction(self, extras: tuple, storage: Any) -> NoCorrection:
        """What the epilogue adds to O."""
        return NoCorrection()

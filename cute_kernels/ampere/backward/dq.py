"""dQ: summed over key tiles in global memory, in float32 and in the order of the accumulators.

The part of a warp is made of fragments, 16 rows by 8 columns, of ``WORDS_PER_FRAGMENT`` words: element 0 of each lane,
then element 1 of each, so that the additions of a warp go to words next to each other.
"""

import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from cute_kernels.ampere.backward.config import AmpereBackwardConfig
from cute_kernels.ampere.config import WARP_THREADS
from cute_kernels.backward.turns import count_up, wait_for_count
from cute_kernels.fast_math import pin
from cute_kernels.invariant import LoopInvariant

WORD_BYTES = 4


class GradientOfQ(LoopInvariant):
    """Adds a warp's part of dQ of a block to global memory.

    ``mdQ`` is float32 (batch, heads, query tiles, parts, words), zero before the launch. With ``ordered``, ``turns`` is
    int32 (batch, heads, query tiles, parts), zero before the launch: how many key tiles have added to each part.
    """

    def __init__(
        self, config: AmpereBackwardConfig, mdQ: cute.Tensor, turns: cute.Tensor, warp: Int32, lane: Int32
    ):
        self.config, self.mdQ, self.turns, self.warp, self.lane = config, mdQ, turns, warp, lane

    @cute.jit
    def add(self, accs: list[cute.Tensor], place: tuple, turn: Int32):
        """Add to the tile at ``place``, (batch, head, query tile); in a fixed order once ``turn`` key tiles have."""
        count = self.turns.iterator + self.turns.layout((*place, self.warp))
        if const_expr(self.config.ordered):
            wait_for_count(count, turn)
            cute.arch.sync_warp()
        # Pinned, or else addresses are computed before the loop over blocks and held in registers throughout.
        place = tuple(pin(x, Int32) for x in place)
        first = self.mdQ[(*place, self.warp, None)].iterator.toint() + Int64(self.lane * WORD_BYTES)
        for number, x in enumerate([acc[i] for acc in accs for i in range(cute.size(acc))]):
            cute.arch.inline_ptx(
                f"red.global.add.f32 [{{$r0}}+{number * WARP_THREADS * WORD_BYTES}], {{$r1}};",
                read_only_args=[first, x],
            )
        if const_expr(self.config.ordered):
            cute.arch.fence_acq_rel_gpu()
            cute.arch.sync_warp()
            if self.lane == 0:
                count_up(count, turn)

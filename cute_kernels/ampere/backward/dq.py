"""dQ: summed over key tiles in global memory, in float32 and in the order of the accumulators.

The part of a warp is made of fragments, 16 rows by 8 columns, of ``WORDS_PER_FRAGMENT`` words: element 0 of each lane,
then element 1 of each, so that the additions of a warp go to words next to each other.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from cute_kernels.ampere.backward.config import WORDS_PER_FRAGMENT, AmpereBackwardConfig
from cute_kernels.ampere.config import WARP_THREADS
from cute_kernels.backward.turns import count_up, wait_for_count
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
        batch, head, m_block = place
        if const_expr(self.config.ordered):
            count = self.turns.iterator + self.turns.layout((batch, head, m_block, self.warp))
            wait_for_count(count, turn)
            cute.arch.sync_warp()
        first = self.mdQ[batch, head, m_block, self.warp, None].iterator.toint() + Int64(
            self.lane * WORD_BYTES
        )
        for band in cutlass.range_constexpr(len(accs)):
            for i in cutlass.range_constexpr(cute.size(accs[band])):
                number = band * cute.size(accs[band]) + i
                cute.arch.inline_ptx(
                    f"red.global.add.f32 [{{$r0}}+{number * WARP_THREADS * WORD_BYTES}], {{$r1}};",
                    read_only_args=[first, accs[band][i]],
                )
        if const_expr(self.config.ordered):
            cute.arch.fence_acq_rel_gpu()
            cute.arch.sync_warp()
            if self.lane == 0:
                count_up(count, turn)


def row_and_column(config: AmpereBackwardConfig, part: int, word: int) -> tuple[int, int]:
    """Row in the query tile and column of word ``word`` of the part of warp ``part``."""
    c = config
    fragment, rest = divmod(word, WORDS_PER_FRAGMENT)
    element, lane = divmod(rest, WARP_THREADS)
    groups = c.head_dim // (8 * c.dq_splits)
    band, group = divmod(fragment, groups)
    row = (part % c.dq_warps * c.dq_bands + band) * 16 + lane // 4 + 8 * (element // 2)
    first = 2 * (part // c.dq_warps + c.dq_splits * (group // 2)) + group % 2
    return row, 8 * first + 2 * (lane % 4) + element % 2

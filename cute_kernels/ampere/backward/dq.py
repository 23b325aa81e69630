"""dQ: summed over key tiles in global memory, in float32 and in the order of the accumulators.

The part of a warp is made of fragments, 16 rows by 8 columns, of ``WORDS_PER_FRAGMENT`` words: element 0 of each lane,
then element 1 of each, so that the additions of a warp go to words next to each other.
"""

from collections.abc import Callable
from functools import partial

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

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
    def take_turn(self, place: tuple, turn: Int32):
        """Where the order is fixed, wait until ``turn`` key tiles have added to a tile: (batch, head, query tile)."""
        if const_expr(self.config.ordered):
            wait_for_count(self._count(place), turn)
            cute.arch.sync_warp()

    @cute.jit
    def pass_turn(self, place: tuple, turn: Int32):
        """Say so to the next, once all lanes' additions can be seen."""
        if const_expr(self.config.ordered):
            cute.arch.fence_acq_rel_gpu()
            cute.arch.sync_warp()
            if self.lane == 0:
                count_up(self._count(place), turn)

    def additions(self, accs: list[cute.Tensor], place: tuple) -> list[Callable[[], None]]:
        """Each call adds one element of each lane to the tile at ``place``."""
        first = self.mdQ[(*place, self.warp, None)].iterator.toint() + Int64(self.lane * WORD_BYTES)
        elements = [acc[i] for acc in accs for i in range(cute.size(acc))]
        return [
            partial(add, first, number * WARP_THREADS * WORD_BYTES, x) for number, x in enumerate(elements)
        ]

    def _count(self, place: tuple) -> cute.Pointer:
        return self.turns.iterator + self.turns.layout((*place, self.warp))


def add(address: Int64, offset: int, x: Float32) -> None:
    """Start adding to a float32 in global memory."""
    cute.arch.inline_ptx(f"red.global.add.f32 [{{$r0}}+{offset}], {{$r1}};", read_only_args=[address, x])


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

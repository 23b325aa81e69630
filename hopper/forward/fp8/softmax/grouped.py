"""The softmax of FP8 scores of tiles with several query heads, whose rows have scales of different heads."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cute_kernels.fragments import ROWS_PER_THREAD
from cute_kernels.integers import minimum
from cute_kernels.seqlen import SeqlenInfo
from hopper.config import WARPGROUP_ROWS
from hopper.forward.fp8.scales import blocks_before, blocks_of_sequence
from hopper.forward.fp8.softmax.eager import EagerSoftmax
from hopper.forward.grouped import place_of_row


class GroupedEager(EagerSoftmax):
    """``EagerSoftmax`` of tiles of ``group`` heads (``hopper.forward.grouped``), with block scales."""

    def __init__(self, *arguments, group: int):
        super().__init__(*arguments)
        self.group = group

    @cute.jit
    def _find_tile_scale(self, rows: tuple, head: Int32, seqlens: SeqlenInfo):
        """``rows`` count those of the tiles, and ``head`` groups. Behind the last query rows have its scales."""
        entry, first = blocks_of_sequence(seqlens, seqlens.offset_q, self.block_q)
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            query, of_group = place_of_row(rows[r], self.group)
            if const_expr(WARPGROUP_ROWS % self.group > 0):
                query = minimum(query, seqlens.seqlen_q - 1)
            block = first + blocks_before(query, self.block_q)
            self.tile_scale[r] = self.q_scale[entry, head * self.group + of_group, block]

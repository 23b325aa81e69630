"""How O and LSE of 64 rows leave for global memory."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_kernels.fragments import store_octets, store_quads, store_rows
from cute_kernels.invariant import LoopInvariant
from cute_kernels.seqlen import SeqlenInfo
from hopper.config import WARPGROUP_ROWS
from hopper.tiles import TmaOperand, box_of


@dataclass(frozen=True)
class DenseTmaStore(LoopInvariant):
    """For sequences of one length, each with rows of its own. O goes by TMA, which clips what lies past the end of the
    sequence or of head_dim_v; LSE, (seqlen_q or 0, heads, batch), straight from registers.
    Query numbers count those that lead (``SeqlenInfo``), of which nothing is stored.

    One warp of each warpgroup calls ``start`` and ``wait``, all threads the others. ``outputs`` has O as a tensor
    where it goes from registers, (seqlen_q, head_dim_v, heads, batch), else nothing; with ``has_quads`` its columns lie
    in registers as ``store_quads`` has them.
    """

    o: TmaOperand
    mLSE: cute.Tensor
    head_dim_v: int
    outputs: tuple = ()
    has_quads: bool = False

    @cute.jit
    def lse(self, values: cute.Tensor, head: Int32, seqlens: SeqlenInfo, row: Int32, lane: Int32):
        """Those of the thread's rows, of which the first is query ``row``."""
        store_rows(values, self._lse_of(head, seqlens), row - seqlens.lead_q, lane, seqlens.is_led)

    def _lse_of(self, head: Int32, seqlens: SeqlenInfo) -> cute.Tensor:
        return self.mLSE[None, head, seqlens.batch]

    @cute.jit
    def rows(self, acc: cute.Tensor, head: Int32, seqlens: SeqlenInfo, row: Int32, lane: Int32):
        """Store O of the thread's rows, of which the first is query ``row``, from registers."""
        (mO,) = self.outputs
        target = mO[None, None, head, seqlens.batch]
        if self.has_quads:
            store_quads(acc, target, row, lane)
        else:
            store_octets(acc, target, row - seqlens.lead_q, lane, seqlens.is_led)

    @cute.jit
    def start(self, wg: Int32, row_block: Int32, head: Int32, seqlens: SeqlenInfo):
        """Start the copy of stage ``wg`` of O to the block of 64 rows number ``row_block`` of the sequence."""
        tOsO, tOgO = self.o.partition((WARPGROUP_ROWS, self.head_dim_v), (row_block, 0), head, seqlens.rows_q)
        cute.copy(self.o.atom, tOsO[None, wg], tOgO)
        cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def start_half(
        self, wg: Int32, row_block: Int32, head: Int32, seqlens: SeqlenInfo, h: cutlass.Constexpr[int]
    ):
        """``start`` of half ``h`` of the columns, which are a box each."""
        tOsO, tOgO = self.o.partition((WARPGROUP_ROWS, self.head_dim_v), (row_block, 0), head, seqlens.rows_q)
        cute.copy(self.o.atom, box_of(tOsO[None, wg], h), box_of(tOgO, h))
        cute.arch.cp_async_bulk_commit_group()

    def wait(self):
        """Until all copies have read their shared memory."""
        cute.arch.cp_async_bulk_wait_group(0, read=True)


@dataclass(frozen=True)
class CutTmaStore(DenseTmaStore):
    """The same where the first query tile counts as a sequence of its own (``CutSeqlens``): ``first`` has O for it, the
    first ``tile_blocks`` blocks of 64 rows, which may end before they do."""

    first: tuple[TmaOperand, ...] = ()
    tile_blocks: int = 0

    @cute.jit
    def lse(self, values: cute.Tensor, head: Int32, seqlens: SeqlenInfo, row: Int32, lane: Int32):
        store_rows(values, self._lse_of(head, seqlens), row - seqlens.lead_q, lane)

    def _lse_of(self, head: Int32, seqlens: SeqlenInfo) -> cute.Tensor:
        mLSE = super()._lse_of(head, seqlens)
        rows = cutlass.min(seqlens.seqlen_q - seqlens.lead_q, mLSE.shape[0])
        return cute.make_tensor(mLSE.iterator, cute.make_layout((rows,), stride=mLSE.stride))

    @cute.jit
    def start(self, wg: Int32, row_block: Int32, head: Int32, seqlens: SeqlenInfo):
        if row_block < self.tile_blocks:
            self._copy(self.first[0], wg, row_block, head, seqlens)
        else:
            self._copy(self.o, wg, row_block, head, seqlens)
        cute.arch.cp_async_bulk_commit_group()

    def _copy(self, o: TmaOperand, wg: Int32, row_block: Int32, head: Int32, seqlens: SeqlenInfo):
        tOsO, tOgO = o.partition((WARPGROUP_ROWS, self.head_dim_v), (row_block, 0), head, seqlens.rows_q)
        cute.copy(o.atom, tOsO[None, wg], tOgO)


class PackedTmaStore(DenseTmaStore):
    """For packed sequences: O is a ``ragged_view``, which TMA clips at the end of each; LSE (total_q or 0, heads)."""

    def _lse_of(self, head: Int32, seqlens: SeqlenInfo) -> cute.Tensor:
        of_head = cute.domain_offset((seqlens.offset_q,), self.mLSE[None, head])
        rows = cutlass.min(seqlens.seqlen_q, self.mLSE.shape[0])
        return cute.make_tensor(of_head.iterator, cute.make_layout((rows,), stride=(self.mLSE.stride[0],)))

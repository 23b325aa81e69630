"""The consumer warpgroup of the decode kernel: the rows of a tile against the key blocks of its part."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.pipeline import PipelineState

from cute_kernels.fragments import COLUMNS_PER_GROUP, ROW_STRIDE, ROWS_PER_THREAD
from cute_kernels.invariant import LoopInvariant
from cute_kernels.mask import TileMask
from cute_kernels.score_tile import SoftCap
from cute_kernels.softmax import OnlineSoftmax, scale_rows
from hopper.config import WARPGROUP_ROWS, WARPGROUP_THREADS
from hopper.decode.config import BOX_COLUMNS, DecodeConfig
from hopper.decode.operands import Keys
from hopper.decode.rows import HeadRows
from hopper.wgmma import issue_gemm, keep_descriptor

WORDS_PER_BOX_ROW = BOX_COLUMNS // 2
"""32-bit words of a row of a box: one for each lane of a warp."""


@dataclass(frozen=True)
class RowMask(TileMask):
    """``TileMask`` where rows are heads of a token: ``levels`` are those of the thread's two rows."""

    levels: tuple[Int32, ...] = ()

    def level(self, r: int) -> Int32:
        return self.levels[r]


class Consumer(LoopInvariant):
    """Q in registers, as the A operand of Q K^T; O in ``acc``; K and V are read from shared memory, where they arrive.

    S is computed, then its softmax, then P V, with nothing overlapped within the warpgroup: memory takes longer than
    all three together.
    """

    def __init__(
        self,
        config: DecodeConfig,
        mmas: tuple[cute.TiledMma, cute.TiledMma],
        k: Keys,
        v: Keys,
        softmax: OnlineSoftmax,
        softcaps: tuple[SoftCap, ...],
        thread: Int32,
    ):
        self.config, self.k, self.v = config, k, v
        self.softmax, self.softcaps, self.thread = softmax, softcaps, thread
        self.qk, self.pv = mmas
        c = config
        self.tSrQ, self.tOrP = (
            cute.make_rmem_tensor(mma.partition_shape_A((WARPGROUP_ROWS, columns)), mma.op.a_dtype)
            for mma, columns in ((self.qk, c.head_dim), (self.pv, c.tile_n))
        )
        self.tSrK = keep_descriptor(self.qk.make_fragment_B(self.qk.get_slice(0).partition_B(k.smem)))
        transposed = cute.make_tensor(v.smem.iterator, cute.select(v.smem.layout, mode=[1, 0, 2]))
        self.tOrV = keep_descriptor(self.pv.make_fragment_B(self.pv.get_slice(0).partition_B(transposed)))
        self.acc = cute.make_rmem_tensor(self.pv.partition_shape_C((WARPGROUP_ROWS, c.head_dim_v)), Float32)

    @cute.jit
    def load_queries(self, mQ: cute.Tensor, rows: HeadRows):
        """The thread's rows of Q; zeros for rows and columns that there are not."""
        words = cute.recast_tensor(self.tSrQ, Int32)
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            row = cute.recast_tensor(rows.of(mQ, r), Int32)
            pairs = cute.size(row)
            for j in cutlass.range_constexpr(self.config.head_dim // COLUMNS_PER_GROUP):
                pair = j * (COLUMNS_PER_GROUP // 2) + rows.lane % 4
                word = Int32(0)
                if rows.exists(r) and pair < pairs:
                    word = row[pair]
                words[r + ROWS_PER_THREAD * j] = word

    @cute.jit
    def attend(
        self, mask: RowMask, blocks: tuple, first: Int32, end: Int32, state: PipelineState
    ) -> PipelineState:
        """Leave O of key blocks ``first`` to ``end`` in ``acc``, not normalised, and their sums in ``softmax``.

        ``blocks`` are ``SequenceBlocks``' left_masked_end and unmasked_end.
        """
        left_masked_end, unmasked_end = blocks
        self.softmax.start()
        self.acc.fill(0.0)
        for step in cutlass.range(end - first, unroll=1):
            block = end - 1 - step
            acc_S = cute.make_rmem_tensor(
                self.qk.partition_shape_C((WARPGROUP_ROWS, self.config.tile_n)), Float32
            )
            self.k.pipe.consumer_wait(state)
            issue_gemm(self.qk, acc_S, self.tSrQ, self.tSrK[None, None, None, state.index], False)
            warpgroup.wait_group(0)
            self.k.pipe.consumer_release(state)
            for softcap in self.softcaps:
                softcap.apply(acc_S, block)
            if block >= unmasked_end or block < left_masked_end:
                mask.apply(acc_S, block)
            self.softmax.take_scores(acc_S, is_first=False)
            for r in cutlass.range_constexpr(ROWS_PER_THREAD):
                self.softmax.exponentiate(acc_S, r, is_first=False)
                self.softmax.store_P(self.tOrP, acc_S, r)
            self.softmax.rescale_if_needed(self.acc)
            self.v.pipe.consumer_wait(state)
            keys = mask.seqlens.seqlen_k - block * self.config.tile_n
            if keys < self.config.tile_n:
                self._clear_values(keys, state.index)
            issue_gemm(self.pv, self.acc, self.tOrP, self.tOrV[None, None, None, state.index], True)
            warpgroup.wait_group(0)
            self.v.pipe.consumer_release(state)
            state.advance()
        return state

    @cute.jit
    def _clear_values(self, keys: Int32, stage: Int32):
        """Zero the rows of V from ``keys`` on: what is in a cache behind the last key may be NaN, which P = 0 does not
        hide. Swizzling moves nothing from one row of a box to another, so that rows are zeroed as they lie."""
        c = self.config
        words = cute.make_tensor(
            cute.recast_ptr(self.v.smem.iterator, cute.make_swizzle(0, 4, 3), Int32),
            cute.make_layout(
                (WORDS_PER_BOX_ROW, c.tile_n, c.head_dim_v // BOX_COLUMNS, c.stages),
                stride=(
                    1,
                    WORDS_PER_BOX_ROW,
                    WORDS_PER_BOX_ROW * c.tile_n,
                    c.tile_n * c.head_dim_v // 2,
                ),
            ),
        )
        warps = WARPGROUP_THREADS // WORDS_PER_BOX_ROW
        for row in cutlass.range(keys + self.thread // WORDS_PER_BOX_ROW, c.tile_n, warps, unroll=1):
            for part in cutlass.range_constexpr(c.head_dim_v // BOX_COLUMNS):
                words[self.thread % WORDS_PER_BOX_ROW, row, part, stage] = Int32(0)
        cute.arch.fence_view_async_shared()
        sync_consumers()


@cute.jit
def sync_consumers():
    """Barrier among the consumer's threads."""
    cute.arch.barrier(barrier_id=1, number_of_threads=WARPGROUP_THREADS)

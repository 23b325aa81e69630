"""A consumer warpgroup of the decode kernel: the rows of a tile against the key blocks of its part."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.pipeline import PipelineState

from cute_kernels.fast_math import pack, unpack
from cute_kernels.fragments import (
    COLUMNS_PER_GROUP,
    LANES_PER_ROW,
    ROWS_PER_THREAD,
    as_rows,
    first_column_of_thread,
)
from cute_kernels.invariant import LoopInvariant
from cute_kernels.score_tile import SoftCap
from cute_kernels.window import Window
from hopper.config import WARPGROUP_ROWS, WARPGROUP_THREADS
from hopper.decode.config import BOX_COLUMNS, DecodeConfig
from hopper.decode.masks import RowMask
from hopper.decode.operands import Keys, clear_rows
from hopper.decode.rows import HeadRows, TileRows
from hopper.decode.softmax import RowSoftmax, TileSoftCap, scale_of_scores
from hopper.wgmma import issue_gemm, keep_descriptor


class Consumer(LoopInvariant):
    """Q in registers, as the A operand of Q K^T; O in ``acc``; K and V are read from shared memory, where they arrive.

    Rows of a WGMMA that no tile has stay zero in Q, and nobody looks at what they have in P. A warp without a row of
    the tile leaves the softmax out: with 4 rows three of four, and a CTA reads 11 % faster (``decode_many.json``).
    """

    def __init__(
        self,
        config: DecodeConfig,
        mmas: tuple[cute.TiledMma, cute.TiledMma],
        k: Keys,
        v: Keys,
        softmax: RowSoftmax,
        softcaps: tuple[SoftCap | TileSoftCap, ...],
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
        cute.recast_tensor(self.tOrP, Int32).fill(0)
        # Whether the warp has a row of the tile.
        self.has_rows = cute.make_rmem_tensor(1, Int32)
        self.acc = cute.make_rmem_tensor(self.pv.partition_shape_C((WARPGROUP_ROWS, c.head_dim_v)), Float32)

    def rows_of(self, tile: TileRows) -> HeadRows:
        return HeadRows(self.config, tile, self.thread // 32, self.thread % 32)

    def mask_of(self, window: Window, rows: HeadRows) -> RowMask:
        column = first_column_of_thread(rows.lane)
        return RowMask(window, self.config.tile_n, rows.tile.seqlens, rows.tile.first, column, rows.levels())

    @property
    def pairs(self) -> int:
        """Pairs of columns of O that the thread has of a row."""
        return self.config.head_dim_v // COLUMNS_PER_GROUP

    def column(self, j: int) -> Int32:
        """The first of pair ``j``."""
        return j * COLUMNS_PER_GROUP + first_column_of_thread(self.thread % 32)

    def pair(self, r: int, j: int) -> tuple[Float32, Float32]:
        """Of O of the thread's row ``r``, not normalised."""
        acc = as_rows(self.acc)
        return acc[r, (0, j)], acc[r, (1, j)]

    def row_sum(self, r: int) -> tuple[Float32, Float32, Float32]:
        """What exponents of row ``r`` are measured from, the sum of P, and what O is divided by."""
        softmax = self.softmax
        total = cute.arch.warp_reduction_sum(softmax.row_sum[r], threads_in_group=LANES_PER_ROW)
        return softmax.shift[r], total, softmax.sum_of_rounded(r, total)

    @cute.jit
    def load_queries(self, mQ: cute.Tensor, rows: HeadRows, scale: Float32):
        """The thread's rows of Q; zeros for rows and columns that there are not. ``scale`` is that of exponents of 2,
        or where there are descales and a softcap of what its tanh is of."""
        has_descale = const_expr(bool(self.config.cache_dtype))
        if const_expr(has_descale and self.config.softcap):
            self.softcaps[0].factor[0] = scale
        else:
            self.softmax.scale_log2 = scale_of_scores(scale) if has_descale else scale
        self.has_rows[0] = Int32(rows.are_any)
        words = cute.recast_tensor(self.tSrQ, Int32)
        words.fill(0)
        for r in cutlass.range_constexpr(self.config.rows_per_thread):
            row = cute.recast_tensor(rows.of(mQ, r), Int32)
            pairs = cute.size(row)
            for j in cutlass.range_constexpr(self.config.head_dim // COLUMNS_PER_GROUP):
                pair = j * (COLUMNS_PER_GROUP // 2) + rows.lane % 4
                word = Int32(0)
                if rows.exists(r) and pair < pairs:
                    word = row[pair]
                if const_expr(self.config.is_widened and mQ.element_type is BFloat16):
                    word = pack(*unpack(word, BFloat16), Float16)
                words[r + ROWS_PER_THREAD * j] = word

    @cute.jit
    def attend(
        self, mask: RowMask, edges: tuple, first: Int32, end: Int32, state: PipelineState
    ) -> PipelineState:
        """Leave O of key blocks ``first`` to ``end``, one at least, in ``acc``, not normalised, and their sums in
        ``softmax``; ``edges`` are left_masked_end and unmasked_end of ``SequenceBlocks``.

        P V of a block is under way while the softmax of the next one is.
        """
        acc_S = cute.make_rmem_tensor(
            self.qk.partition_shape_C((WARPGROUP_ROWS, self.config.tile_n)), Float32
        )
        has_rows = self.has_rows[0] != 0
        self.softmax.start()
        self.acc.fill(0.0)
        self._start_scores(acc_S, state)
        warpgroup.wait_group(0)
        self.k.release(state, self.thread % 32)
        if has_rows:
            self._exponentiate(acc_S, mask, edges, end - 1)
            self._store_P(acc_S)
        for step in cutlass.range(end - first - 1, unroll=1):
            block = end - 1 - step
            v_state = state.clone()
            state.advance()
            self._start_scores(acc_S, state)
            self._start_product(mask.seqlens.seqlen_k, block, v_state)
            warpgroup.wait_group(1)
            self.k.release(state, self.thread % 32)
            if has_rows:
                self._exponentiate(acc_S, mask, edges, block - 1)
            warpgroup.wait_group(0)
            self.v.release(v_state, self.thread % 32)
            if has_rows:
                self.softmax.rescale_if_needed(self.acc)
                self._store_P(acc_S)
        self._start_product(mask.seqlens.seqlen_k, first, state)
        warpgroup.wait_group(0)
        self.v.release(state, self.thread % 32)
        state.advance()
        return state

    @cute.jit
    def _start_scores(self, acc_S: cute.Tensor, state: PipelineState):
        """Start Q K^T of the block at ``state``."""
        self.k.pipe.consumer_wait(state)
        issue_gemm(self.qk, acc_S, self.tSrQ, self.tSrK[None, None, None, state.index], False)

    @cute.jit
    def _start_product(self, seqlen_k: Int32, block: Int32, state: PipelineState):
        """Start O += P V of key block ``block``, whose V is at ``state``."""
        self.v.pipe.consumer_wait(state)
        keys = seqlen_k - block * self.config.tile_n
        if keys < self.config.tile_n:
            which, threads = (cutlass.max(keys, 0), (state.index,)), self.config.consumers * WARPGROUP_THREADS
            clear_rows(self.v.smem, 2 * BOX_COLUMNS, *which, self.thread, threads)
        issue_gemm(self.pv, self.acc, self.tOrP, self.tOrV[None, None, None, state.index], True)

    @cute.jit
    def _exponentiate(self, acc_S: cute.Tensor, mask: RowMask, edges: tuple, block: Int32):
        """Turn the scores of key block ``block`` into P."""
        left_masked_end, unmasked_end = edges
        for softcap in self.softcaps:
            softcap.apply(acc_S, block)
        if block >= unmasked_end or block < left_masked_end:
            mask.apply(acc_S, block)
        self.softmax.take_scores(acc_S, is_first=False)
        for r in cutlass.range_constexpr(self.config.rows_per_thread):
            self.softmax.exponentiate(acc_S, r, is_first=False)

    @cute.jit
    def _store_P(self, acc_S: cute.Tensor):
        """Round P into the A operand of P V."""
        for r in cutlass.range_constexpr(self.config.rows_per_thread):
            self.softmax.store_P(self.tOrP, acc_S, r)

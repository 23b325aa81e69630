"""The consumer warpgroup of a cache of e4m3: K and V are the first operands, V as it is, K widened in registers."""

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.pipeline import PipelineState
from cutlass.utils import hopper_helpers

from cute_kernels.fast_math import permute_bytes, split_e4m3
from cute_kernels.fragments import COLUMNS_PER_GROUP, LANES_PER_ROW
from cute_kernels.invariant import LoopInvariant
from cute_kernels.window import Window
from hopper.config import WARPGROUP_ROWS
from hopper.decode.config import DecodeConfig, query_words
from hopper.decode.masks import SwappedMask
from hopper.decode.operands import Keys, clear_rows, sync_consumers
from hopper.decode.row_scales import largest_of_block
from hopper.decode.rows import SwappedRows, TileRows
from hopper.decode.swapped_scores import SwappedScores
from hopper.decode.swapped_softmax import SwappedSoftmax
from hopper.swizzled_bytes import SwizzledBytes, store_16_bits
from hopper.tiles import WARPS_PER_WARPGROUP, swizzled_layout
from hopper.wgmma import issue_gemm

LANES = 32
KEYS_PER_STEP = 32
"""Of one WGMMA of e4m3."""

KEYS_PER_THREAD = 32
"""A thread has one of so many keys of an accumulator of S^T, the others being other lanes' and warps'."""

TERM_SCALE = 16.0
"""A second term is this much finer than the first: e4m3 has 4 bits."""

FEW_OF_O, MOST_OF_O = 8, 16
"""Numbers of O of a thread, beside which there are registers for all of the rest, and for most of it."""

P_SCALE = 256.0
"""P, of 1 at most, as it is split; e4m3 goes to 448."""


def has_registers(config: DecodeConfig) -> bool:
    """Whether K Q^T of a block may be found beside P V of the one before it: else a thread spills."""
    c = config
    numbers = 2 * c.head_dim_v // WARPGROUP_ROWS * c.rows_per_thread
    has_edges = c.window and (c.chunk or c.leftpad)
    return numbers <= (FEW_OF_O if has_edges else MOST_OF_O)


def swapped_mma(config: DecodeConfig) -> cute.TiledMma:
    """V^T P^T with V in registers."""
    return hopper_helpers.make_trivial_tiled_mma(
        Float8E4M3FN,
        Float8E4M3FN,
        OperandMajorMode.K,
        OperandMajorMode.K,
        Float32,
        (1, 1, 1),
        (WARPGROUP_ROWS, config.split_rows),
        a_source=warpgroup.OperandSource.RMEM,
    )


class SwappedConsumer(LoopInvariant):
    """S^T = K Q^T and O^T = V^T P^T: keys, and columns of V, are the 64 rows of a product, and query rows its columns,
    of which there may be as few as 8.

    So a few query rows need no tile of 64, and V, which WGMMA would want in columns as a second operand, is a first
    one: ``ldmatrix`` and byte permutations turn it on its way to registers.

    Scores come from ``SwappedScores``, as exact as float32 adds them up. P is split into two terms of e4m3, the second
    16 times finer, in two columns side by side: so it is as exact as bfloat16 has it. The four lanes of a row of an
    accumulator hold both terms of a query row each, and add them. O is added up in float32 from a product for each key
    block, since WGMMA cuts sums of e4m3 at 2^-13 of the largest term.

    Scales of single keys multiply their scores, before any is masked, and those of single values P before it is split.
    ``capped_log2`` is as in ``SwappedSoftmax``.
    """

    def __init__(
        self,
        config: DecodeConfig,
        k: Keys,
        v: Keys,
        memory: tuple,
        thread: Int32,
        capped_log2: tuple[Float32, ...] = (),
    ):
        self.config, self.k, self.v, self.thread = config, k, v, thread
        self.warp, self.lane = thread // LANES, thread % LANES
        c = config
        layout = swizzled_layout(c.split_rows, c.tile_n, 1, Float8E4M3FN)
        sQ = memory[0].get_tensor(cute.make_layout(query_words(c.tile_m, c.head_dim)))
        sP = memory[1].get_tensor(layout.outer, swizzle=layout.inner)
        exchange = memory[2].get_tensor(cute.make_layout((WARPS_PER_WARPGROUP, c.tile_m)))
        self.softmax = SwappedSoftmax(c, exchange, self.warp, self.lane, capped_log2)
        self.exchange = exchange
        self.scores = SwappedScores(c, k, sQ, self.warp, self.lane)
        self.pv = swapped_mma(c)
        self.tOrP = self.pv.make_fragment_B(self.pv.get_slice(0).partition_B(sP))[None, None, None, 0]
        self.tOrV = cute.make_rmem_tensor(self.pv.partition_shape_A((c.head_dim_v, c.tile_n)), Float8E4M3FN)
        self.acc = cute.make_rmem_tensor(self.pv.partition_shape_C((c.head_dim_v, c.split_rows)), Float32)
        self.values = SwizzledBytes(v.smem, c.tile_n, c.head_dim_v)
        self.weights = SwizzledBytes(sP, c.split_rows, c.tile_n)
        self.pairs = c.head_dim_v // WARPGROUP_ROWS
        self.o = cute.make_rmem_tensor((2, self.pairs, c.rows_per_thread), Float32)
        self.weight_factors = cute.make_rmem_tensor(c.tile_n // KEYS_PER_THREAD, Float32)
        self.product_factor = cute.make_rmem_tensor(1, Float32)

    def _terms(self, acc: cute.Tensor) -> cute.Tensor:
        """An accumulator by term, which of two rows of a WGMMA, query row and WGMMA."""
        rows = self.config.rows_per_thread
        shape = 2, 2, rows, cute.size(acc) // (4 * rows)
        return cute.make_tensor(acc.iterator, cute.make_layout(shape))

    def rows_of(self, tile: TileRows) -> SwappedRows:
        return SwappedRows(self.config, tile, self.warp, self.lane)

    def mask_of(self, window: Window, rows: SwappedRows) -> SwappedMask:
        key = self.warp * (2 * COLUMNS_PER_GROUP) + self.lane // LANES_PER_ROW
        return SwappedMask(window, self.config.tile_n, rows.tile.seqlens, rows.tile.first, key, rows.levels())

    def column(self, j: int) -> Int32:
        """The first of pair ``j`` of the thread's columns of O."""
        return WARPGROUP_ROWS * j + self.warp * 16 + self.lane // LANES_PER_ROW * 2

    def pair(self, r: int, j: int) -> tuple[Float32, Float32]:
        """Of O of the thread's row ``r``, not normalised."""
        return self.o[0, j, r] * Float32(1 / P_SCALE), self.o[1, j, r] * Float32(1 / P_SCALE)

    def row_sum(self, r: int) -> tuple[Float32, Float32, Float32]:
        """What exponents of row ``r`` are measured from, the sum of P, and what O is divided by."""
        return self.softmax.shift[r], self.softmax.row_sum[r], self.softmax.row_sum[r]

    @cute.jit
    def load_queries(self, mQ: cute.Tensor, rows: SwappedRows, scale: Float32):
        """Take the rows of Q, and begin. ``scale`` is that of scores as exponents of 2, or under a softcap of what its
        tanh is of."""
        self.scores.load_queries(mQ, rows, scale, self.exchange[0, None])
        sync_consumers()
        self.softmax.start()

    @cute.jit
    def attend(
        self, mask: SwappedMask, edges: tuple, first: Int32, end: Int32, state: PipelineState
    ) -> PipelineState:
        """Leave O of key blocks ``first`` to ``end``, one at least, in ``o``, not normalised, and their sums in
        ``softmax``; ``edges`` are left_masked_end and unmasked_end of ``SequenceBlocks``.

        K Q^T of a block is found while P V of the one before it is, if there are registers for both.
        """
        scores = self.scores.of_thread()
        is_early = has_registers(self.config)
        self.o.fill(0.0)
        self._take_scores(scores, state)
        for step in cutlass.range(end - first - 1, unroll=1):
            self._start_product(scores, mask, edges, end - 1 - step, state)
            state.advance()
            if const_expr(is_early):
                self._take_scores(scores, state)
            warpgroup.wait_group(0)
            self._add_product()
            if const_expr(not is_early):
                self._take_scores(scores, state)
        self._start_product(scores, mask, edges, first, state)
        warpgroup.wait_group(0)
        self._add_product()
        self.softmax.finish()
        state.advance()
        return state

    @cute.jit
    def _take_scores(self, scores: cute.Tensor, state: PipelineState):
        """The scores of the block at ``state``."""
        self.scores.take(state)
        self._scale_scores(scores, state)
        cute.arch.sync_warp()
        self.k.release(state, self.lane)
        self.softmax.cap(scores)

    def _key(self, n: int) -> Int32:
        """Of score ``n`` of a thread, in its block."""
        first = self.warp * (2 * COLUMNS_PER_GROUP) + self.lane // LANES_PER_ROW
        return first + n // 2 * WARPGROUP_ROWS + n % 2 * COLUMNS_PER_GROUP

    @cute.jit
    def _scale_scores(self, scores: cute.Tensor, state: PipelineState):
        """Multiply scores by the scales of their keys, if these have some."""
        for scales in self.k.scales:
            for n in cutlass.range_constexpr(cute.size(scores, mode=[0])):
                scale = scales[self._key(n), state.index]
                for r in cutlass.range_constexpr(self.config.rows_per_thread):
                    scores[n, r] = scores[n, r] * scale

    @cute.jit
    def _start_product(
        self, scores: cute.Tensor, mask: SwappedMask, edges: tuple, block: Int32, state: PipelineState
    ):
        """From the scores of key block ``block``, which is at ``state``, to V^T P^T. That is awaited within the same
        turn of the loop: ptxas takes WGMMAs one by one where one is awaited in the next."""
        left_masked_end, unmasked_end = edges
        if block >= unmasked_end or block < left_masked_end:
            mask.apply(scores, block)
        self.softmax.offer(scores)
        self._load_values(mask.seqlens.seqlen_k, block, state)
        self._store_P(scores)
        issue_gemm(self.pv, self.acc, self.tOrV, self.tOrP, False)

    @cute.jit
    def _store_P(self, scores: cute.Tensor):
        """Turn scores into P, and store both terms of it for the next product, whose keys are in the order in which
        ``_load_values`` has them."""
        self.softmax.exponentiate(scores)
        lane, warp = self.lane, self.warp
        of_step = lane // LANES_PER_ROW
        place = 16 * (warp % 2) + 4 * (of_step % 4) + 2 * (of_step // 4)
        for r in cutlass.range_constexpr(self.config.rows_per_thread):
            for m in cutlass.range_constexpr(cute.size(scores, mode=[0]) // 2):
                low, high = scores[2 * m, r], scores[2 * m + 1, r]
                factors = Float32(P_SCALE), Float32(P_SCALE)
                if const_expr(self.config.row_scales):
                    factors = self.weight_factors[2 * m], self.weight_factors[2 * m + 1]
                terms = split_e4m3(low * factors[0], high * factors[1], TERM_SCALE)
                position = KEYS_PER_STEP * (2 * m + warp // 2) + place
                for term, word in enumerate(terms):
                    line = COLUMNS_PER_GROUP * r + 2 * (lane % LANES_PER_ROW) + term
                    address = self.weights.address(Int32(0), line, position // 16) + position % 16
                    store_16_bits(address, word)
        cute.arch.fence_view_async_shared()
        sync_consumers()

    @cute.jit
    def _load_values(self, seqlen_k: Int32, block: Int32, state: PipelineState):
        """V^T of key block ``block``, at ``state``, to registers: a thread has four keys of a column in a word.

        ``ldmatrix.trans`` gives it two neighbouring columns of two keys, from each of four matrices of 8 keys. Line 2 i
        + e of matrix 2 h + b is key 16 h + 8 e + 4 b + i of 32, so that the keys of a row of an accumulator of S^T that
        a thread holds, 8 apart, are neighbours.
        """
        c = self.config
        self.v.pipe.consumer_wait(state)
        keys = seqlen_k - block * c.tile_n
        if keys < c.tile_n:
            clear_rows(self.v.smem, self.values.width, cutlass.max(keys, 0), (state.index,), self.thread)
        words = cute.recast_tensor(self.tOrV, Int32)
        line, matrix = self.lane % 8, self.lane // 8
        key = 16 * (matrix // 2) + 8 * (line % 2) + 4 * (matrix % 2) + line // 2
        for step in cutlass.range_constexpr(c.tile_n // KEYS_PER_STEP):
            for m in cutlass.range_constexpr(self.pairs):
                chunk = WARPS_PER_WARPGROUP * m + self.warp
                loaded = cute.arch.inline_ptx(
                    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
                    write_only_types=[Int32] * 4,
                    read_only_args=[self.values.address(state.index, key + KEYS_PER_STEP * step, chunk)],
                )
                for half in cutlass.range_constexpr(2):
                    for odd, selector in enumerate((0x6420, 0x7531)):
                        word = permute_bytes(loaded[2 * half], loaded[2 * half + 1], selector)
                        words[odd + 2 * half + 4 * (m + self.pairs * step)] = word
        self._load_factors(state)
        cute.arch.sync_warp()
        self.v.release(state, self.lane)

    @cute.jit
    def _load_factors(self, state: PipelineState):
        """The scales of V of the block at ``state``, if there are some, over the largest of them, by which the product
        of the block is multiplied: times P these are 1 at most, as split terms are to be."""
        for scales in self.v.scales:
            largest = largest_of_block(scales, state.index, self.lane)
            factor = Float32(P_SCALE) / largest
            for n in cutlass.range_constexpr(cute.size(self.weight_factors)):
                self.weight_factors[n] = scales[self._key(n), state.index] * factor
            self.product_factor[0] = largest

    @cute.jit
    def _add_product(self):
        """O, shrunk for the maximum of the block, and its product."""
        for r in cutlass.range_constexpr(self.config.rows_per_thread):
            for j in cutlass.range_constexpr(self.pairs):
                for e in cutlass.range_constexpr(2):
                    terms = self._terms(self.acc)
                    product = terms[1, e, r, j] * Float32(1 / TERM_SCALE) + terms[0, e, r, j]
                    if const_expr(self.config.row_scales):
                        product = product * self.product_factor[0]
                    self.o[e, j, r] = self.o[e, j, r] * self.softmax.row_scale[r] + product

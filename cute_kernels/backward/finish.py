"""After the backward kernel: dQ from float32 sums in the order of the accumulators to the inputs' dtype."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.backward.grid import from_the_last
from cute_kernels.backward.packed import find_query_tile, heads_as_batch, rows_as_batch
from cute_kernels.backward.step import SteppedConfig
from cute_kernels.backward.word_order import COLUMNS_PER_GROUP
from cute_kernels.dtypes import DSL_DTYPES
from cute_kernels.fast_math import pack
from cute_kernels.fragments import LANES_PER_ROW, ROW_STRIDE, ROWS_PER_THREAD

ELEMENTS = 4
"""Of a fragment in a lane: two columns of two rows."""

WORDS_PER_CHUNK = ELEMENTS * LANES_PER_ROW
WORDS_PER_VECTOR = 4
"""Of the chunk, which lie next to each other: the elements of a lane, or the lanes of an element."""

GROUPS_AT_ONCE = 4
"""Groups of columns that neighbouring threads write: 64 bytes of a row."""

MAX_THREADS = 1024


class FinishKernel:
    """dQ = softmax_scale times its sums. A thread reads chunks, what the four lanes of a row have added to a group of
    columns, and writes 16 bytes of each of their two rows."""

    def __init__(self, config: SteppedConfig):
        self.config, self.order = config, config.dq_order
        self.dtype = DSL_DTYPES[config.dtype]
        threads_per_band = ROW_STRIDE * GROUPS_AT_ONCE
        self.bands_at_once = min(self.order.bands, MAX_THREADS // (threads_per_band * config.dq_parts))
        self.threads_per_part = threads_per_band * self.bands_at_once

    @cute.jit
    def __call__(self, mSums: cute.Tensor, mdQ: cute.Tensor, softmax_scale: Float32, stream):
        """Launch. mSums (batch, heads, query tiles, parts, words), mdQ (batch, seqlen_q, heads, head_dim)."""
        self.kernel(mSums, mdQ, softmax_scale).launch(
            grid=(mSums.shape[2], mSums.shape[1], mSums.shape[0]),
            block=(self.threads_per_part * self.config.dq_parts, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(self, mSums: cute.Tensor, mdQ: cute.Tensor, softmax_scale: Float32):
        place = from_the_last(mSums.shape[2], mSums.shape[1], mSums.shape[0])
        self._finish(mSums, mdQ, place, softmax_scale)

    @cute.jit
    def _finish(self, mSums: cute.Tensor, mdQ: cute.Tensor, place: tuple, softmax_scale: Float32):
        """A query tile, at ``place``: its number, head and batch."""
        order = self.order
        tile, head, batch = place
        part = cute.arch.thread_idx()[0] // self.threads_per_part
        thread = cute.arch.thread_idx()[0] % self.threads_per_part
        chunk = thread // GROUPS_AT_ONCE
        words = mSums[batch, head, tile, part, None]
        for first_band in cutlass.range_constexpr(0, order.bands, self.bands_at_once):
            band = first_band + chunk // ROW_STRIDE
            for i in cutlass.range_constexpr(-(-order.groups // GROUPS_AT_ONCE)):
                group = i * GROUPS_AT_ONCE + thread % GROUPS_AT_ONCE
                if group < order.groups:
                    row, column = order.origin(part, band, group)
                    row += tile * self.config.tile_m + chunk % ROW_STRIDE
                    sums = self._read(words, band, group, chunk % ROW_STRIDE)
                    self._finish_chunk(sums, mdQ, (batch, row, head, column), softmax_scale)

    @cute.jit
    def _read(self, words: cute.Tensor, band: Int32, group: Int32, row: Int32) -> cute.Tensor:
        """(element, lane) of what four lanes have of row ``row`` of a fragment, and of the one 8 below it."""
        order = self.order
        has_elements_together = order.element_stride == 1
        vector_stride = order.lane_stride if has_elements_together else order.element_stride
        strides = (order.band_stride, order.group_stride, LANES_PER_ROW * order.lane_stride, vector_stride)
        per_band, per_group, per_row, per_vector = (stride // WORDS_PER_VECTOR for stride in strides)
        first = band * per_band + group * per_group + row * per_row
        vectors = cute.make_rmem_tensor((WORDS_PER_VECTOR, WORDS_PER_CHUNK // WORDS_PER_VECTOR), Float32)
        for i in cutlass.range_constexpr(WORDS_PER_CHUNK // WORDS_PER_VECTOR):
            source = cute.local_tile(words, (WORDS_PER_VECTOR,), (first + i * per_vector,))
            cute.autovec_copy(source, vectors[None, i])
        by_element = (1, WORDS_PER_VECTOR) if has_elements_together else (WORDS_PER_VECTOR, 1)
        return cute.make_tensor(
            vectors.iterator, cute.make_layout((ELEMENTS, LANES_PER_ROW), stride=by_element)
        )

    @cute.jit
    def _finish_chunk(self, sums: cute.Tensor, mdQ: cute.Tensor, place: tuple, softmax_scale: Float32):
        """Eight columns of two rows, the first of them at ``place``: batch, row, head, column."""
        batch, row, head, column = place
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            pairs = cute.make_rmem_tensor(LANES_PER_ROW, Int32)
            for lane in cutlass.range_constexpr(LANES_PER_ROW):
                low, high = (sums[2 * r + e, lane] * softmax_scale for e in range(2))
                pairs[lane] = pack(low, high, self.dtype)
            self._store(mdQ, (batch, row + r * ROW_STRIDE, head, column), pairs)

    @cute.jit
    def _store(self, mdQ: cute.Tensor, place: tuple, pairs: cute.Tensor):
        batch, row, head, column = place
        if row < mdQ.shape[1] and column < mdQ.shape[3]:
            target = cute.local_tile(
                mdQ[batch, row, head, None], (COLUMNS_PER_GROUP,), (column // COLUMNS_PER_GROUP,)
            )
            cute.autovec_copy(pairs, cute.recast_tensor(target, Int32))


class PackedFinishKernel(FinishKernel):
    """The same for packed sequences, whose sums lie in whole tiles (``packed.py``). dQ of all rows is written, also of
    those behind the last sequence and between the sequences, which have sums of 0."""

    @cute.jit
    def __call__(
        self,
        mSums: cute.Tensor,
        mdQ: cute.Tensor,
        mPlan: cute.Tensor,
        sequences: Int32,
        softmax_scale: Float32,
        stream,
    ):
        """Launch. mSums (heads, query tiles, parts, words), mdQ (total_q, heads, head_dim)."""
        self.packed(mSums, mdQ, mPlan, sequences, softmax_scale).launch(
            grid=(mSums.shape[1], mSums.shape[0], 1),
            block=(self.threads_per_part * self.config.dq_parts, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def packed(
        self,
        mSums: cute.Tensor,
        mdQ: cute.Tensor,
        mPlan: cute.Tensor,
        sequences: Int32,
        softmax_scale: Float32,
    ):
        tile, head, _ = from_the_last(mSums.shape[1], mSums.shape[0], Int32(1))
        place = find_query_tile(mPlan, sequences, mdQ.shape[0], tile, self.config.tile_m)
        offset = place.seqlens.offset_q
        rows = rows_as_batch(mdQ, offset, place.rows_end - offset)
        sums = heads_as_batch(mSums, tile - place.m_block)
        self._finish(sums, rows, (place.m_block, head, 0), softmax_scale)

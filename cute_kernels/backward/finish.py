"""After the backward kernel: dQ from float32 sums in the order of the accumulators to the inputs' dtype."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_kernels.backward.grid import from_the_last
from cute_kernels.backward.packed import find_query_tile, rows_as_batch
from cute_kernels.backward.step import SteppedConfig
from cute_kernels.backward.word_order import COLUMNS_PER_GROUP
from cute_kernels.dtypes import DSL_DTYPES
from cute_kernels.fast_math import pack
from cute_kernels.fragments import LANES_PER_ROW, ROW_STRIDE, ROWS_PER_THREAD
from cute_kernels.integers import minimum

ELEMENTS = 4
"""Of a fragment in a lane: two columns of two rows."""

WORDS_PER_CHUNK = ELEMENTS * LANES_PER_ROW
WORDS_PER_VECTOR = 4
"""Of the chunk, which lie next to each other: the elements of a lane, or the lanes of an element."""

GROUPS_AT_ONCE = 4
"""Groups of columns that neighbouring threads write: 64 bytes of a row."""

CHUNKS_AT_ONCE = 2
"""Which a thread reads before it writes any. Loads do not pass stores, which might be to the same place."""

MAX_THREADS = 1024


class FinishKernel:
    """dQ = softmax_scale times its sums. A thread reads chunks, what the four lanes of a row have added to a group of
    columns, and writes 16 bytes of each of their two rows."""

    def __init__(self, config: SteppedConfig):
        self.config, self.order, self.rows = config, config.dq_order, config.tile_m
        self.chunks_at_once = CHUNKS_AT_ONCE
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
        tile, head, batch = from_the_last(mSums.shape[2], mSums.shape[1], mSums.shape[0])
        sums = mSums[batch, head, tile, None, None]
        self._finish(self._read_round(sums, 0), sums, mdQ, (tile, head, batch), softmax_scale)

    @cute.jit
    def _read_round(self, sums: cute.Tensor, number: cutlass.Constexpr[int]) -> list[cute.Tensor]:
        """The chunks that a thread reads in a round, of (parts, words) of a query tile."""
        order = self.order
        part, thread = self._place_in_tile()
        row, chunks = thread // GROUPS_AT_ONCE % ROW_STRIDE, []
        for band, group in self._bands_and_groups(thread, number):
            # Past the last group that one is read again, and not written.
            words = self._words_of(sums, part)
            chunks.append(self._read(words, band, minimum(group, order.groups - 1), row))
        return chunks

    def _words_of(self, sums: cute.Tensor, part: Int32) -> cute.Tensor:
        """Those of a part of a tile, as ``_read`` takes them."""
        return sums[part, None]

    @cute.jit
    def _finish(
        self,
        first: list[cute.Tensor],
        sums: cute.Tensor,
        mdQ: cute.Tensor,
        place: tuple,
        softmax_scale: Float32,
    ):
        """The query tile at ``place``: its number, head and batch. ``first`` is its first round, already read."""
        tile, head, batch = place
        part, thread = self._place_in_tile()
        for number in cutlass.range_constexpr(-(-len(self._steps()) // self.chunks_at_once)):
            chunks = first if const_expr(number == 0) else self._read_round(sums, number)
            for chunk, (band, group) in zip(chunks, self._bands_and_groups(thread, number), strict=True):
                if group < self.order.groups:
                    row, column = self.order.origin(part, band, group)
                    row += tile * self.rows + thread // GROUPS_AT_ONCE % ROW_STRIDE
                    self._finish_chunk(chunk, mdQ, (batch, row, head, column), softmax_scale)

    @cute.jit
    def _finish_packed(
        self, mSums: cute.Tensor, mdQ: cute.Tensor, plan: tuple, place: tuple, softmax_scale: Float32
    ):
        """Query tile and head at ``place`` in the sums of packed sequences."""
        # Read before it is known whose they are: the search waits for memory, too.
        tile, head = place
        sums = mSums[head, tile, None, None]
        first = self._read_round(sums, 0)
        found = find_query_tile(*plan, mdQ.shape[0], tile, self.config.tile_m)
        offset = found.seqlens.offset_q
        rows = rows_as_batch(mdQ, offset, found.rows_end - offset)
        self._finish(first, sums, rows, (found.m_block, head, 0), softmax_scale)

    def _place_in_tile(self) -> tuple[Int32, Int32]:
        """The part of this thread, and its number there."""
        thread = cute.arch.thread_idx()[0]
        return thread // self.threads_per_part, thread % self.threads_per_part

    def _bands_and_groups(self, thread: Int32, number: int) -> list[tuple[Int32, Int32]]:
        """Of the chunks of a round, of which the last may lie past the last group."""
        steps = self._steps()[number * self.chunks_at_once :][: self.chunks_at_once]
        in_step = thread // (GROUPS_AT_ONCE * ROW_STRIDE), thread % GROUPS_AT_ONCE
        return [(band + in_step[0], group + in_step[1]) for band, group in steps]

    def _steps(self) -> list[tuple[int, int]]:
        """The first band and group that the threads of a part read together, of each time that they do."""
        bands = range(0, self.order.bands, self.bands_at_once)
        return [(band, group) for band in bands for group in range(0, self.order.groups, GROUPS_AT_ONCE)]

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
        self._finish_packed(mSums, mdQ, (mPlan, sequences), (tile, head), softmax_scale)

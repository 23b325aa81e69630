"""Before the backward kernel: what it needs to know of each row, and zeros to add dQ to where it needs some."""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_kernels.backward.grid import from_the_last
from cute_kernels.backward.packed import PackedQueryTile, find_query_tile, heads_as_batch, rows_as_batch
from cute_kernels.backward.step import CLEARING_WORDS, FEW_KEYS, SCHEDULER_WORDS, SteppedConfig
from cute_kernels.dtypes import DSL_DTYPES

THREADS = 128
ELEMENTS = 8
"""Of 16 bits, in the 16 bytes that a lane loads."""

WORDS = 4
"""Of the sums, in the 16 bytes that a thread clears."""

ROWS_UNDER_WAY = 8
"""Whose loads a thread has under way at a time: 128 KB of an SM, with four CTAs there."""


class PrepareKernel:
    """delta = rowsum(dO * O), and the log-sum-exp in base 2, for each row of a query tile, past the end too.

    A row without keys, and one past the end, gets a log-sum-exp of +inf and a delta of 0: its probabilities are then 0
    and it takes part in no gradient. ``lanes`` neighbouring lanes share a row, some of
    them idle where their number is no power of two.

    The float32 sums of dQ become 0, all that there are: a launch for that alone would cost the host as much as this.
    With ``config.stores_first`` they are left as they are.
    """

    def __init__(self, config: SteppedConfig):
        self.config = config
        self.dtype = DSL_DTYPES[config.dtype]
        self.lanes = 1 << (config.head_dim_v // ELEMENTS - 1).bit_length()

    @cute.jit
    def __call__(
        self,
        mO: cute.Tensor,
        mdO: cute.Tensor,
        mLSE: cute.Tensor,
        mLSE2: cute.Tensor,
        mDelta: cute.Tensor,
        mSums: cute.Tensor,
        stream,
    ):
        """Launch. mO, mdO (batch, seqlen_q, heads, head_dim_v), mLSE (batch, heads, seqlen_q) in base e, mLSE2 and
        mDelta (batch, heads, seqlen_q in whole query tiles), mSums (batch, heads, query tiles, parts, words)."""
        self.kernel(mO, mdO, mLSE, mLSE2, mDelta, mSums).launch(
            grid=(mDelta.shape[2] // self.config.tile_m, mO.shape[2], mO.shape[0]),
            block=(THREADS, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mO: cute.Tensor,
        mdO: cute.Tensor,
        mLSE: cute.Tensor,
        mLSE2: cute.Tensor,
        mDelta: cute.Tensor,
        mSums: cute.Tensor,
    ):
        place = from_the_last(mSums.shape[2], mSums.shape[1], mSums.shape[0])
        tile, head, batch = place
        self._prepare((mO, mdO, mLSE), (mLSE2, mDelta), place, mSums[batch, head, tile, None, None])

    @cute.jit
    def _prepare(self, inputs: tuple, results: tuple, place: tuple, sums: cute.Tensor, left_out: tuple = ()):
        """A query tile, at ``place``: its number, head and batch. ``inputs`` are mO, mdO, mLSE and perhaps mdLSE, which
        may have no rows; ``results`` are mLSE2 and mDelta; ``sums`` is (parts, words) of the tile, for zeros.
        ``left_out`` is empty, or says whether delta is to have no rowsum(dO * O).

        Loads of several rows are under way before the first of them is used, and while sums are cleared.
        """
        first_row = place[0] * self.config.tile_m + cute.arch.thread_idx()[0] // self.lanes
        rows_at_once = THREADS // self.lanes
        steps = self.config.tile_m // rows_at_once
        for first in cutlass.range_constexpr(0, steps, ROWS_UNDER_WAY):
            rows = [first_row + i * rows_at_once for i in range(first, min(first + ROWS_UNDER_WAY, steps))]
            loaded = [self._load(inputs, place, row) for row in rows]
            if const_expr(first == 0 and self._clears_sums):
                self._clear(sums)
            for row, (parts, numbers) in zip(rows, loaded, strict=True):
                self._write(results, (place[2], place[1], row), parts, numbers, left_out)

    @property
    def _clears_sums(self) -> bool:
        """Whether there are sums to clear."""
        return not self.config.stores_first

    @cute.jit
    def _load(self, inputs: tuple, place: tuple, row: Int32) -> tuple:
        """A lane's part of a row of O and dO, zeros past the end, and the row's LSE with what is subtracted from delta,
        in the first lane."""
        mO, mdO, mLSE, *mdLSE = inputs
        _, head, batch = place
        lane = cute.arch.thread_idx()[0] % self.lanes
        parts = tuple(cute.make_rmem_tensor(ELEMENTS, self.dtype) for _ in range(2))
        numbers = cute.make_rmem_tensor(2, Float32)
        for part in parts:
            part.fill(self.dtype(0.0))
        numbers[0], numbers[1] = -Float32.inf, Float32(0.0)
        if row < mO.shape[1]:
            if lane * ELEMENTS < mO.shape[3]:
                for i in cutlass.range_constexpr(2):
                    source = (mO, mdO)[i][batch, row, head, None]
                    cute.autovec_copy(cute.local_tile(source, (ELEMENTS,), (lane,)), parts[i])
            if lane == 0:
                numbers[0] = mLSE[batch, head, row]
                if const_expr(len(mdLSE) == 1):
                    if mdLSE[0].shape[2] > 0:
                        numbers[1] = mdLSE[0][batch, head, row]
        return parts, numbers

    @cute.jit
    def _clear(self, sums: cute.Tensor):
        """Zeros for the kernel to add to: (parts, words) of a query tile."""
        zeros = cute.make_rmem_tensor(WORDS, Float32)
        zeros.fill(Float32(0.0))
        for part in range(sums.shape[0]):
            words = sums[part, None]
            for vector in range(cute.arch.thread_idx()[0], sums.shape[1] // WORDS, THREADS):
                cute.autovec_copy(zeros, cute.local_tile(words, (WORDS,), (vector,)))

    @cute.jit
    def _write(self, results: tuple, place: tuple, parts: tuple, numbers: cute.Tensor, left_out: tuple):
        """LSE and delta of the row at ``place``, batch, head and row, of what its lanes have loaded; ``left_out`` as of
        ``_prepare``."""
        mLSE2, mDelta = results
        o, do = (part.load().to(Float32) for part in parts)
        total = (o * do).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        total = cute.arch.warp_reduction_sum(total, threads_in_group=self.lanes)
        for is_left_out in left_out:
            total = Float32(0.0) if is_left_out else total
        total = total - numbers[1]
        if cute.arch.thread_idx()[0] % self.lanes == 0:
            is_empty = numbers[0] == -Float32.inf
            mLSE2[place] = Float32.inf if is_empty else numbers[0] * Float32(math.log2(math.e))
            mDelta[place] = Float32(0.0) if is_empty else total


class PackedPrepareKernel(PrepareKernel):
    """The same for packed sequences, whose rows in mLSE2 and mDelta lie in whole tiles (``packed.py``). The gradient of
    the LSE is subtracted from delta: dS = P (dP - delta + dLSE). With ``config.few_keys`` delta of a
    sequence with no more than FEW_KEYS has nothing else: the kernel, which knows P and dP, adds the sum of their
    products, and not that of O in 16 bits.

    Before a kernel that clears sums itself (``config.clears_ahead``), or whose first key tile of each query tile stores
    (``config.stores_first``), those of query tiles that have rows and keys are left as they are. Others become 0: those
    of sequences without keys, and of rows that are in no sequence. So does the counter of a kernel that clears sums:
    SCHEDULER_WORDS, CLEARING_WORDS and one for each query tile of all heads. Sequences that overlap, which no
    caller may give, can have more key tiles than the plan has room for: dQ of theirs is then anything.
    """

    @property
    def _clears_sums(self) -> bool:
        return True

    @cute.jit
    def __call__(
        self,
        mO: cute.Tensor,
        mdO: cute.Tensor,
        mLSE: cute.Tensor,
        mdLSE: cute.Tensor,
        mLSE2: cute.Tensor,
        mDelta: cute.Tensor,
        mSums: cute.Tensor,
        mPlan: cute.Tensor,
        sequences: Int32,
        mCounter: cute.Tensor | None,
        stream,
    ):
        """Launch. mO, mdO (total_q, heads, head_dim_v), mLSE (heads, total_q) in base e, mdLSE (heads, total_q or 0),
        mLSE2 and mDelta (heads, rows of all query tiles), mSums (heads, all query tiles, parts, words). mCounter is
        int32 (words of the counter,), None of a config that does not clear ahead."""
        self.packed(mO, mdO, mLSE, mdLSE, mLSE2, mDelta, mSums, mPlan, sequences, mCounter).launch(
            grid=(mDelta.shape[1] // self.config.tile_m, mO.shape[1], 1),
            block=(THREADS, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def packed(
        self,
        mO: cute.Tensor,
        mdO: cute.Tensor,
        mLSE: cute.Tensor,
        mdLSE: cute.Tensor,
        mLSE2: cute.Tensor,
        mDelta: cute.Tensor,
        mSums: cute.Tensor,
        mPlan: cute.Tensor,
        sequences: Int32,
        mCounter: cute.Tensor | None,
    ):
        tile, head, _ = from_the_last(mSums.shape[1], mSums.shape[0], Int32(1))
        if const_expr(self.config.clears_ahead):
            self._clear_counter(mCounter, head * mSums.shape[1] + tile)
        place = find_query_tile(mPlan, sequences, mO.shape[0], tile, self.config.tile_m)
        sums = mSums[head, tile, None, None]
        if const_expr(self.config.clears_ahead or self.config.stores_first):
            sums = self._without_visited(sums, place)
        self._prepare_packed((mO, mdO, mLSE, mdLSE, mLSE2, mDelta), place, head, sums)

    @cute.jit
    def _clear_counter(self, mCounter: cute.Tensor, number: Int32):
        """The count of the query tile of this number of all heads; that of the first also what comes before counts."""
        thread, words = cute.arch.thread_idx()[0], SCHEDULER_WORDS + CLEARING_WORDS
        if thread == 0:
            mCounter[words + number] = Int32(0)
        if thread < words and number == 0:
            mCounter[thread] = Int32(0)

    @cute.jit
    def _without_visited(self, sums: cute.Tensor, place: PackedQueryTile) -> cute.Tensor:
        """(parts, words) of a query tile, without parts where it has rows and keys."""
        row = place.m_block * self.config.tile_m
        is_left = row >= 0 and row < place.seqlens.seqlen_q and place.seqlens.seqlen_k > 0
        parts = Int32(0) if is_left else sums.shape[0]
        layout = cute.make_layout((parts, sums.shape[1]), stride=sums.stride)
        return cute.make_tensor(sums.iterator, layout)

    def _prepare_packed(self, tensors: tuple, place: PackedQueryTile, head: Int32, sums: cute.Tensor) -> None:
        """A query tile of a head; ``tensors`` are the first six of ``__call__``, ``sums`` those for zeros."""
        mO, mdO, mLSE, mdLSE, mLSE2, mDelta = tensors
        seqlens, tile_m = place.seqlens, self.config.tile_m
        rows = (rows_as_batch(tensor, seqlens.offset_q, seqlens.seqlen_q) for tensor in (mO, mdO))
        first = seqlens.first_query_tile(tile_m) * tile_m
        results = tuple(heads_as_batch(tensor, first) for tensor in (mLSE2, mDelta))
        inputs = (*rows, *(heads_as_batch(tensor, seqlens.offset_q) for tensor in (mLSE, mdLSE)))
        left_out = (seqlens.seqlen_k <= FEW_KEYS,) if const_expr(self.config.few_keys) else ()
        self._prepare(inputs, results, (place.m_block, head, 0), sums, left_out)

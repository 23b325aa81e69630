"""Merges the results of attention to parts of the keys by their log-sum-exp."""

import math

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Boolean, Float32, Int32, const_expr

from cute_kernels.combine.config import (
    COLUMNS,
    END,
    FEW_SPLITS,
    LANES,
    MANY_JOBS,
    SHARES,
    VECTOR,
    WARPS,
    CombineConfig,
    validate_combine_config,
)
from cute_kernels.dtypes import DSL_DTYPES
from cute_kernels.fast_math import exp2
from cute_kernels.integers import ceil_div, divide, minimum

LOG2_E = math.log2(math.e)
CTAS_PER_SM = 7
"""That there are registers for. If nothing is asked for, the assembler spills."""

SMEM_PERCENT = 100
"""Of the memory that L1 shares, as for the kernels of attention, so that an SM need not change it between them. Unless
told, the DSL asks the GPU, and there may be none when compiling."""


class CombineKernel:
    """Of more than FEW_SPLITS splits, though any number will do (``few_kernel.py`` is for fewer).

    A warp for COLUMNS columns of a row, or all warps of a CTA, which then share the splits: out = sum of share *
    part, share = exp(lse_i - lse).

    A part without keys (lse -inf) has no share and is not read. Loads of FEW_SPLITS parts are under way at a time,
    those of the first while their shares are found. The order of sums depends on the number of splits and of rows.
    """

    def __init__(self, config: CombineConfig):
        validate_combine_config(config)
        self.config = config
        self.dtype = DSL_DTYPES[config.dtype]

    @cute.jit
    def __call__(
        self, mParts: cute.Tensor, mPartLSE: cute.Tensor, mO: cute.Tensor, mLSE: cute.Tensor, stream
    ):
        """Launch. mParts (splits, batch, seqlen, heads, columns), mPartLSE (splits, batch, seqlen, heads), mO (batch,
        seqlen, heads, columns), mLSE (batch, seqlen, heads)."""
        jobs = mO.shape[0] * mO.shape[1] * mO.shape[2] * ceil_div(mO.shape[3], COLUMNS)
        of_cta = rows_of_cta(jobs)
        self.kernel(mParts, mPartLSE, mO, mLSE, of_cta).launch(
            grid=(ceil_div(jobs, of_cta), 1, 1),
            block=(WARPS * LANES, 1, 1),
            min_blocks_per_mp=CTAS_PER_SM,
            preferred_smem_carveout=SMEM_PERCENT,
            use_pdl=self.config.starts_early,
            stream=stream,
        )

    def _shared_storage(self):
        @cute.struct
        class SharedStorage:
            shares: cute.struct.Align[cute.struct.MemRange[Float32, WARPS * SHARES], 16]
            sums: cute.struct.Align[cute.struct.MemRange[Float32, WARPS * COLUMNS], 16]

        return SharedStorage

    @cute.kernel
    def kernel(
        self,
        mParts: cute.Tensor,
        mPartLSE: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        rows_of_cta: Int32,
    ):
        storage = cutlass.memory.SmemAllocator().allocate(self._shared_storage())
        shares = storage.shares.get_tensor(cute.make_layout((SHARES, WARPS)))
        sums = storage.sums.get_tensor(cute.make_layout((COLUMNS, WARPS)))
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        is_alone = rows_of_cta == WARPS
        way, ways = (Int32(0), Int32(1)) if is_alone else (warp, Int32(WARPS))
        job = cute.arch.block_idx()[0] * rows_of_cta + (warp if is_alone else Int32(0))
        blocks = ceil_div(mO.shape[3], COLUMNS)
        row = divide(job, blocks)
        block = job - row * blocks
        _, seqlen, heads, _ = mO.shape
        rows = mO.shape[0] * seqlen * heads
        is_row = row < rows
        # Of a job past the end, the numbers of the first row: its warps take part in the barrier.
        row = row if is_row else Int32(0)
        entry = divide(row, seqlen * heads)
        row_of_entry = row - entry * (seqlen * heads)
        query = divide(row_of_entry, heads)
        head = row_of_entry - query * heads
        own_shares = shares[None, warp]
        chunk = block * LANES + lane
        has_columns = is_row and chunk * VECTOR < mO.shape[3]
        if const_expr(self.config.starts_early):
            # Parts are there once the kernel in front has ended. The next one may start, up to its own wait.
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        splits, parts = mParts.shape[0], mParts[None, entry, query, head, None]
        part_lse = mPartLSE[None, entry, query, head]
        log = -Float32.inf
        if lane < splits:
            log = part_lse[lane]
        if const_expr(self.config.has_ends):
            splits = number_of_splits(part_lse, log, lane)
            log = log if lane < splits else -Float32.inf
        loaded = self._load_first(parts, log, (way, ways), chunk, has_columns)
        lse, end = share_out(part_lse, splits, log, own_shares, lane)
        total = cute.make_rmem_tensor(VECTOR, Float32)
        total.fill(0.0)
        add_shares(loaded, own_shares, way, ways, total)
        if splits > FEW_SPLITS * ways:
            if has_columns:
                self._add_others(parts, own_shares, (way, ways, end), chunk, total)
        if ways > 1:
            cute.autovec_copy(total, cute.local_tile(sums[None, warp], (VECTOR,), (lane,)))
            cute.arch.sync_threads()
            if way == 0:
                for i in cutlass.range_constexpr(1, WARPS):
                    other = cute.make_rmem_tensor(VECTOR, Float32)
                    cute.autovec_copy(cute.local_tile(sums[None, i], (VECTOR,), (lane,)), other)
                    total.store(total.load() + other.load())
        if way == 0:
            if has_columns:
                result = cute.make_rmem_tensor(VECTOR, self.dtype)
                result.store(total.load().to(self.dtype))
                cute.autovec_copy(result, cute.local_tile(mO[entry, query, head, None], (VECTOR,), (chunk,)))
            if is_row and block == 0 and lane == 0:
                mLSE[entry, query, head] = lse

    @cute.jit
    def _load_first(
        self, parts: cute.Tensor, log: Float32, of_way: tuple, chunk: Int32, has_columns: Boolean
    ) -> cute.Tensor:
        """The first FEW_SPLITS parts of a way, all of them among the first LANES; 0 in place of those without keys.
        ``log`` is the log-sum-exp of the part that has the lane's number."""
        way, ways = of_way
        used = cute.arch.vote_ballot_sync(is_used(log))
        loaded = cute.make_rmem_tensor((VECTOR, FEW_SPLITS), Float32)
        loaded.fill(0.0)
        for i in cutlass.range_constexpr(FEW_SPLITS):
            number = way + i * ways
            if has_columns and ((used >> number) & 1) == 1:
                cute.autovec_copy(cute.local_tile(parts[number, None], (VECTOR,), (chunk,)), loaded[None, i])
        return loaded

    @cute.jit
    def _add_others(
        self, parts: cute.Tensor, shares: cute.Tensor, of_way: tuple, chunk: Int32, total: cute.Tensor
    ):
        """Add the shares of the parts that a way has behind its first ones: every `ways`-th up to ``end``."""
        way, ways, end = of_way
        for first in cutlass.range(way + FEW_SPLITS * ways, end, FEW_SPLITS * ways, unroll=1):
            loaded = cute.make_rmem_tensor((VECTOR, FEW_SPLITS), Float32)
            loaded.fill(0.0)
            for i in cutlass.range_constexpr(FEW_SPLITS):
                if shares[first + i * ways] != 0.0:
                    part = parts[first + i * ways, None]
                    cute.autovec_copy(cute.local_tile(part, (VECTOR,), (chunk,)), loaded[None, i])
            add_shares(loaded, shares, first, ways, total)


@cute.jit
def rows_of_cta(jobs: Int32) -> Int32:
    """How many of so many rows, each once for every COLUMNS columns, a CTA has: one for each warp if all
    multiprocessors are busy so, or else all warps share the splits of one."""
    return Int32(WARPS) if jobs >= MANY_JOBS else Int32(1)


def is_used(log: Float32) -> Boolean:
    """Whether a part has keys. NaN is not -inf."""
    return log != -Float32.inf


def is_end(log: Float32) -> Boolean:
    """Whether no more parts of a row follow."""
    return log.bitcast(Int32) == END


@cute.jit
def number_of_splits(part_lse: cute.Tensor, log: Float32, lane: Int32) -> Int32:
    """How many of a row come before the first ``END``; ``log`` is that of ``share_out``."""
    room = part_lse.shape[0]
    splits = first_of(is_end(log), Int32(0), room)
    if splits == room:
        for first in cutlass.range(LANES, room, LANES, unroll=1):
            other = -Float32.inf
            if first + lane < room:
                other = part_lse[first + lane]
            splits = minimum(splits, first_of(is_end(other), first, room))
    return splits


@cute.jit
def first_of(is_one: Boolean, offset: Int32, otherwise: Int32) -> Int32:
    """``offset`` and the first lane that ``is_one``."""
    ones = cute.arch.vote_ballot_sync(is_one)
    return offset + cute.arch.popc((ones & -ones) - 1) if ones != 0 else otherwise


@cute.jit
def share_out(
    part_lse: cute.Tensor, splits: Int32, log: Float32, shares: cute.Tensor, lane: Int32
) -> tuple[Float32, Int32]:
    """Write the share of each of ``splits``, and 0 behind; gives the log-sum-exp of all, and the end of the parts that
    have keys. ``log`` is that of split number ``lane``, or -inf; others stay in ``shares`` until all are known, since
    registers hold parts meanwhile."""
    largest, end = log, lane + 1 if is_used(log) else Int32(0)
    for i in cutlass.range(lane + LANES, splits, LANES, unroll=1):
        other = part_lse[i]
        shares[i] = other
        largest = cute.arch.fmax(largest, other)
        end = i + 1 if is_used(other) else end
    largest = cute.arch.warp_reduction_max(largest)
    # So that of a row without keys the difference is -inf and not NaN.
    shift = Float32(0.0) if largest == -Float32.inf else largest
    own = exp2((log - shift) * Float32(LOG2_E))
    total = own
    for i in cutlass.range(lane + LANES, splits, LANES, unroll=1):
        other = exp2((shares[i] - shift) * Float32(LOG2_E))
        shares[i] = other
        total += other
    total = cute.arch.warp_reduction_sum(total)
    scale = Float32(0.0) if total == 0.0 else Float32(1.0) / total
    # Where a part is NaN, so is the scale, but what is behind the last split is not to be read.
    shares[lane] = own * scale if lane < splits else Float32(0.0)
    behind = lane + LANES
    for i in cutlass.range(lane + LANES, splits, LANES, unroll=1):
        shares[i] = shares[i] * scale
        behind = i + LANES
    shares[behind] = Float32(0.0)
    cute.arch.sync_warp()
    lse = shift + cute.math.log2(total, fastmath=True) * Float32(1.0 / LOG2_E)
    return lse, cute.arch.warp_redux_sync(end, "max")


@cute.jit
def add_shares(loaded: cute.Tensor, shares: cute.Tensor, first: Int32, ways: Int32, total: cute.Tensor):
    """Add FEW_SPLITS parts from number ``first`` on, every `ways`-th."""
    for i in cutlass.range_constexpr(FEW_SPLITS):
        share = shares[first + i * ways]
        # NaN is unlike 0 and is added.
        if share != 0.0:
            total.store(total.load() + loaded[None, i].load() * share)

"""Merges the results of attention to parts of the keys by their log-sum-exp."""

import math

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32, const_expr

from cute_kernels.combine.config import (
    COLUMNS,
    FEW_SPLITS,
    LANES,
    MAX_SPLITS,
    VECTOR,
    WARPS,
    CombineConfig,
    shares_of,
    validate_combine_config,
)
from cute_kernels.dtypes import DSL_DTYPES
from cute_kernels.fast_math import exp2
from cute_kernels.integers import ceil_div, divide

LOG2_E = math.log2(math.e)
CTAS_PER_SM = 8
"""That there are registers for. If nothing is asked for, the assembler spills."""

SMEM_PERCENT = 100
"""Of the memory that L1 shares, as for the kernels of attention, so that an SM need not change it between them. Unless
told, the DSL asks the GPU, and there may be none when compiling."""


class CombineKernel:
    """A warp, or `ways` of them, for COLUMNS columns of a row: out = sum of share * part, share = exp(lse_i - lse).

    A part without keys (lse -inf) has no share and is not read. Loads of FEW_SPLITS parts are under way at a time.
    The order of sums depends on the number of splits alone.
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
        self.kernel(mParts, mPartLSE, mO, mLSE).launch(
            grid=(ceil_div(jobs, WARPS // self.config.ways), 1, 1),
            block=(WARPS * LANES, 1, 1),
            min_blocks_per_mp=CTAS_PER_SM,
            preferred_smem_carveout=SMEM_PERCENT,
            use_pdl=self.config.starts_early,
            stream=stream,
        )

    def _shared_storage(self):
        @cute.struct
        class SharedStorage:
            shares: cute.struct.Align[cute.struct.MemRange[Float32, WARPS * shares_of(self.config.ways)], 16]
            sums: cute.struct.Align[cute.struct.MemRange[Float32, WARPS * COLUMNS], 16]

        return SharedStorage

    @cute.kernel
    def kernel(self, mParts: cute.Tensor, mPartLSE: cute.Tensor, mO: cute.Tensor, mLSE: cute.Tensor):
        ways = self.config.ways
        storage = cutlass.memory.SmemAllocator().allocate(self._shared_storage())
        shares = storage.shares.get_tensor(cute.make_layout((shares_of(ways), WARPS)))
        sums = storage.sums.get_tensor(cute.make_layout((COLUMNS, WARPS)))
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        way = warp % ways
        job = cute.arch.block_idx()[0] * (WARPS // ways) + warp // ways
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
        if const_expr(self.config.starts_early):
            # Parts are there once the kernel in front has ended. The next one may start, up to its own wait.
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        lse = self._share_out(mPartLSE[None, entry, query, head], own_shares, lane)
        chunk = block * LANES + lane
        has_columns = is_row and chunk * VECTOR < mO.shape[3]
        total = cute.make_rmem_tensor(VECTOR, Float32)
        total.fill(0.0)
        if has_columns:
            self._add(mParts[None, entry, query, head, None], own_shares, way, chunk, total)
        if const_expr(ways > 1):
            cute.autovec_copy(total, cute.local_tile(sums[None, warp], (VECTOR,), (lane,)))
            cute.arch.sync_threads()
            if way == 0:
                for i in cutlass.range_constexpr(1, ways):
                    other = cute.make_rmem_tensor(VECTOR, Float32)
                    cute.autovec_copy(cute.local_tile(sums[None, warp + i], (VECTOR,), (lane,)), other)
                    total.store(total.load() + other.load())
        if way == 0:
            if has_columns:
                result = cute.make_rmem_tensor(VECTOR, self.dtype)
                result.store(total.load().to(self.dtype))
                cute.autovec_copy(result, cute.local_tile(mO[entry, query, head, None], (VECTOR,), (chunk,)))
            if is_row and block == 0 and lane == 0:
                mLSE[entry, query, head] = lse

    @cute.jit
    def _share_out(self, part_lse: cute.Tensor, shares: cute.Tensor, lane: Int32) -> Float32:
        """Write the share of each split, and 0 behind the last; gives the log-sum-exp of all."""
        splits = part_lse.shape[0]
        each = MAX_SPLITS // LANES
        logs = cute.make_rmem_tensor(each, Float32)
        logs.fill(-Float32.inf)
        for i in cutlass.range_constexpr(each):
            if lane + LANES * i < splits:
                logs[i] = part_lse[lane + LANES * i]
        largest = logs[0]
        for i in cutlass.range_constexpr(1, each):
            largest = cute.arch.fmax(largest, logs[i])
        largest = cute.arch.warp_reduction_max(largest)
        # So that of a row without keys the difference is -inf and not NaN.
        shift = Float32(0.0) if largest == -Float32.inf else largest
        total = Float32(0.0)
        for i in cutlass.range_constexpr(each):
            logs[i] = exp2((logs[i] - shift) * Float32(LOG2_E))
            total += logs[i]
        total = cute.arch.warp_reduction_sum(total)
        scale = Float32(0.0) if total == 0.0 else Float32(1.0) / total
        for i in cutlass.range_constexpr(each):
            # Where a part is NaN, so is the scale, but what is behind the last split is not to be read.
            is_there = lane + LANES * i < splits
            shares[lane + LANES * i] = logs[i] * scale if is_there else Float32(0.0)
        if const_expr(shares_of(self.config.ways) > MAX_SPLITS):
            if lane < shares_of(self.config.ways) - MAX_SPLITS:
                shares[MAX_SPLITS + lane] = Float32(0.0)
        cute.arch.sync_warp()
        return shift + cute.math.log2(total, fastmath=True) * Float32(1.0 / LOG2_E)

    @cute.jit
    def _add(self, parts: cute.Tensor, shares: cute.Tensor, way: Int32, chunk: Int32, total: cute.Tensor):
        """Add the shares of the splits that a way has: ``way``, and every `ways` from it."""
        ways = self.config.ways
        splits = parts.shape[0]
        for first in cutlass.range(way, splits, FEW_SPLITS * ways, unroll=1):
            own = [shares[first + i * ways] for i in range(FEW_SPLITS)]
            loaded = cute.make_rmem_tensor((VECTOR, FEW_SPLITS), Float32)
            loaded.fill(0.0)
            for i in cutlass.range_constexpr(FEW_SPLITS):
                # NaN is unlike 0 and is added.
                if own[i] != 0.0:
                    part = parts[first + i * ways, None]
                    cute.autovec_copy(cute.local_tile(part, (VECTOR,), (chunk,)), loaded[None, i])
            for i in cutlass.range_constexpr(FEW_SPLITS):
                total.store(total.load() + loaded[None, i].load() * own[i])

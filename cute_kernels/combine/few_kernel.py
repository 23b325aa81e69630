"""Merges the results of attention to a few parts of the keys by their log-sum-exp."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from cute_kernels.combine.config import COLUMNS, FEW_SPLITS, LANES, ROWS, VECTOR, WARPS, CombineConfig
from cute_kernels.combine.kernel import LOG2_E, SMEM_PERCENT, is_end, is_used
from cute_kernels.dtypes import DSL_DTYPES
from cute_kernels.fast_math import exp2
from cute_kernels.integers import ceil_div, divide

CTAS_PER_SM = 4
"""That there are registers for."""

AT_ONCE = 4
"""Splits of each row that are under way at a time."""


class FewCombineKernel:
    """``CombineKernel`` of FEW_SPLITS splits or fewer: a warp for COLUMNS columns of ROWS rows.

    A lane has the log-sum-exp of one part of one row, so that all of them are one load, and shares stay in registers.
    Parts of all rows are under way while shares are found. The order of sums depends on the number of splits alone.
    """

    def __init__(self, config: CombineConfig):
        self.config = config
        self.dtype = DSL_DTYPES[config.dtype]

    @cute.jit
    def __call__(
        self, mParts: cute.Tensor, mPartLSE: cute.Tensor, mO: cute.Tensor, mLSE: cute.Tensor, stream
    ):
        """Launch, as ``CombineKernel`` does."""
        rows = mO.shape[0] * mO.shape[1] * mO.shape[2]
        jobs = ceil_div(rows, ROWS) * ceil_div(mO.shape[3], COLUMNS)
        self.kernel(mParts, mPartLSE, mO, mLSE).launch(
            grid=(ceil_div(jobs, WARPS), 1, 1),
            block=(WARPS * LANES, 1, 1),
            min_blocks_per_mp=CTAS_PER_SM,
            preferred_smem_carveout=SMEM_PERCENT,
            use_pdl=self.config.starts_early,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, mParts: cute.Tensor, mPartLSE: cute.Tensor, mO: cute.Tensor, mLSE: cute.Tensor):
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        job = cute.arch.block_idx()[0] * WARPS + warp
        blocks = ceil_div(mO.shape[3], COLUMNS)
        number = divide(job, blocks)
        block = job - number * blocks
        chunk = block * LANES + lane
        # Each lane looks up the row whose log-sum-exp it has.
        split, row = lane % FEW_SPLITS, number * ROWS + lane // FEW_SPLITS
        _, seqlen, heads, _ = mO.shape
        is_row = row < mO.shape[0] * seqlen * heads
        row = row if is_row else Int32(0)
        entry = divide(row, seqlen * heads)
        row_of_entry = row - entry * (seqlen * heads)
        query = divide(row_of_entry, heads)
        head = row_of_entry - query * heads
        places = [
            tuple(cute.arch.shuffle_sync(each, FEW_SPLITS * r) for each in (entry, query, head))
            for r in range(ROWS)
        ]
        has_columns = chunk * VECTOR < mO.shape[3]
        if const_expr(self.config.starts_early):
            # Parts are there once the kernel in front has ended. The next one may start, up to its own wait.
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        log = -Float32.inf
        if is_row and split < mParts.shape[0]:
            log = mPartLSE[split, entry, query, head]
        if const_expr(self.config.has_ends):
            ends = cute.arch.vote_ballot_sync(is_end(log)) >> (lane - split)
            log = log if (ends & ((2 << split) - 1)) == 0 else -Float32.inf
        used = cute.arch.vote_ballot_sync(is_used(log))
        loaded = self._load(mParts, places, used, 0, chunk, has_columns)
        share, lse = shares_of_rows(log)
        totals = cute.make_rmem_tensor((VECTOR, ROWS), Float32)
        totals.fill(0.0)
        add_shares_of_rows(loaded, share, 0, totals)
        if mParts.shape[0] > AT_ONCE:
            more = self._load(mParts, places, used, AT_ONCE, chunk, has_columns)
            add_shares_of_rows(more, share, AT_ONCE, totals)
        for r in cutlass.range_constexpr(ROWS):
            exists = cute.arch.shuffle_sync(Int32(is_row), FEW_SPLITS * r) == 1
            if has_columns and exists:
                result = cute.make_rmem_tensor(VECTOR, self.dtype)
                result.store(totals[None, r].load().to(self.dtype))
                out = mO[(*places[r], None)]
                cute.autovec_copy(result, cute.local_tile(out, (VECTOR,), (chunk,)))
        if is_row and block == 0 and split == 0:
            mLSE[entry, query, head] = lse

    @cute.jit
    def _load(
        self,
        mParts: cute.Tensor,
        places: list,
        used: Int32,
        first: cutlass.Constexpr[int],
        chunk: Int32,
        has_columns: Boolean,
    ) -> cute.Tensor:
        """AT_ONCE parts of each row from number ``first`` on; 0 in place of those without keys. ``used`` has a bit for
        each lane, whether the part that is the lane's has keys."""
        loaded = cute.make_rmem_tensor((VECTOR, AT_ONCE, ROWS), Float32)
        loaded.fill(0.0)
        for r in cutlass.range_constexpr(ROWS):
            for i in cutlass.range_constexpr(AT_ONCE):
                if has_columns and ((used >> (FEW_SPLITS * r + first + i)) & 1) == 1:
                    part = mParts[(first + i, *places[r], None)]
                    cute.autovec_copy(cute.local_tile(part, (VECTOR,), (chunk,)), loaded[None, i, r])
        return loaded


@cute.jit
def shares_of_rows(log: Float32) -> tuple[Float32, Float32]:
    """The share of a lane's part, and the log-sum-exp of its row, whose parts FEW_SPLITS lanes have."""
    largest = cute.arch.warp_reduction_max(log, threads_in_group=FEW_SPLITS)
    # So that of a row without keys the difference is -inf and not NaN.
    shift = Float32(0.0) if largest == -Float32.inf else largest
    own = exp2((log - shift) * Float32(LOG2_E))
    total = cute.arch.warp_reduction_sum(own, threads_in_group=FEW_SPLITS)
    scale = Float32(0.0) if total == 0.0 else Float32(1.0) / total
    return own * scale, shift + cute.math.log2(total, fastmath=True) * Float32(1.0 / LOG2_E)


@cute.jit
def add_shares_of_rows(
    loaded: cute.Tensor, share: Float32, first: cutlass.Constexpr[int], totals: cute.Tensor
):
    """Add AT_ONCE parts of each row from number ``first`` on."""
    for r in cutlass.range_constexpr(ROWS):
        for i in cutlass.range_constexpr(AT_ONCE):
            factor = cute.arch.shuffle_sync(share, FEW_SPLITS * r + first + i)
            # NaN is unlike 0 and is added.
            if factor != 0.0:
                total = totals[None, r]
                total.store(total.load() + loaded[None, i, r].load() * factor)

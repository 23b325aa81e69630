"""Works out the plan of a launch on packed sequences (``packed.py``), on the GPU: no length is known on the host."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cute_kernels.integers import ceil_div, maximum, minimum
from cute_kernels.plan.config import ENTRY, PLAN_HEADER, RECORD, WARPS_PER_CTA, PlanConfig

LANES = 32


class PlanKernel:
    """A warp for each sequence. It adds up the tiles of all sequences that come before its own, and enters its own.

    Sequences whose tiles take longest come first: those with most rows on the other side, and among equals the ones
    with lower numbers. So a plan depends on nothing but the lengths. Every warp looks at every length: 20,000
    sequences are 4e8 comparisons, a fifth of a millisecond.

    Whatever the offsets say, the rows of a sequence lie within the tensors, so that kernels which go by a plan stay
    within them too; tiles that overlapping sequences have beyond the plan's memory are left out.
    """

    def __init__(self, config: PlanConfig):
        self.config = config

    @cute.jit
    def __call__(
        self,
        cu_seqlens_q: cute.Tensor,
        cu_seqlens_k: cute.Tensor,
        seqused_q: cute.Tensor,
        seqused_k: cute.Tensor,
        plan: cute.Tensor,
        total_q: Int32,
        total_k: Int32,
        tile: Int32,
        of_keys: Int32,
        stream,
    ):
        """Launch. cu_seqlens are int32 (batch + 1,), seqused int32 (batch,) or (0,) for all of each sequence. Tiles are
        ``tile`` rows of Q, or of K where ``of_keys`` is 1."""
        sequences = cu_seqlens_q.shape[0]
        self.kernel(
            cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, plan, total_q, total_k, tile, of_keys
        ).launch(
            grid=(cute.ceil_div(sequences, WARPS_PER_CTA), 1, 1),
            block=(LANES * WARPS_PER_CTA, 1, 1),
            use_pdl=self.config.starts_early,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        cu_seqlens_q: cute.Tensor,
        cu_seqlens_k: cute.Tensor,
        seqused_q: cute.Tensor,
        seqused_k: cute.Tensor,
        plan: cute.Tensor,
        total_q: Int32,
        total_k: Int32,
        tile: Int32,
        of_keys: Int32,
    ):
        batch = cu_seqlens_q.shape[0] - 1
        if const_expr(self.config.starts_early):
            # The next kernel makes ready meanwhile. Not sooner: its CTAs are to find all multiprocessors free.
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        own = cute.arch.block_idx()[0] * WARPS_PER_CTA + warp
        if own <= batch:
            offset_q, seqlen_q = rows_of(cu_seqlens_q, seqused_q, total_q, own)
            offset_k, seqlen_k = rows_of(cu_seqlens_k, seqused_k, total_k, own)
            is_last = own == batch
            own_rows = seqlen_k if of_keys == 1 else seqlen_q
            own_cost = seqlen_q if of_keys == 1 else seqlen_k
            own_cost = Int32(0) if is_last else own_cost
            first_entry = PLAN_HEADER + RECORD * (batch + 1)
            capacity = (plan.shape[0] - first_entry) // ENTRY
            before, of_all = Int32(0), Int32(0)
            for i in cutlass.range(lane, batch + 1, LANES, unroll=1):
                tiles, cost = Int32(0), Int32(0)
                _, rows_q = rows_of(cu_seqlens_q, seqused_q, total_q, i)
                _, rows_k = rows_of(cu_seqlens_k, seqused_k, total_k, i)
                rows = rows_k if of_keys == 1 else rows_q
                cost = rows_q if of_keys == 1 else rows_k
                cost = Int32(0) if i == batch else cost
                tiles = ceil_div(rows, tile)
                comes_before = cost > own_cost or (cost == own_cost and i < own)
                # No further than there is room: those of overlapping sequences might be more than 32 bits hold.
                before = minimum(before + (tiles if comes_before else Int32(0)), capacity)
                of_all = minimum(of_all + tiles, capacity)
            before = cute.arch.warp_reduction_sum(before)
            of_all = cute.arch.warp_reduction_sum(of_all)
            if lane == 0:
                if is_last:
                    plan[0] = minimum(of_all, capacity)
                record = PLAN_HEADER + RECORD * own
                plan[record] = offset_q
                plan[record + 1] = Int32(0) if is_last and of_keys == 1 else seqlen_q
                plan[record + 2] = offset_k
                plan[record + 3] = Int32(0) if is_last and of_keys == 0 else seqlen_k
            for i in cutlass.range(
                lane, minimum(ceil_div(own_rows, tile), capacity - before), LANES, unroll=1
            ):
                entry = first_entry + ENTRY * (before + i)
                plan[entry] = own
                plan[entry + 1] = before


@cute.jit
def rows_of(
    cu_seqlens: cute.Tensor, seqused: cute.Tensor, total: Int32, sequence: Int32
) -> tuple[Int32, Int32]:
    """First row of a sequence and their number, within the tensor; of the one behind the last, all rows that follow."""
    batch = cu_seqlens.shape[0] - 1
    offset = minimum(maximum(cu_seqlens[sequence], 0), total)
    rows = total - offset
    if sequence < batch:
        rows = minimum(rows, maximum(cu_seqlens[sequence + 1] - offset, 0))
        if seqused.shape[0] > 0:
            rows = minimum(rows, maximum(seqused[sequence], 0))
    return offset, rows

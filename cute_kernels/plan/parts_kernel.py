"""Works out the plan of a launch on packed sequences whose keys are in parts, on the GPU, where lengths are known."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_kernels.integers import divide, maximum, minimum
from cute_kernels.plan.config import ENTRY, PLAN_HEADER, RECORD, WARPS_PER_CTA, PlanConfig
from cute_kernels.plan.kernel import LANES, rows_of
from cute_kernels.plan.parts import number_of

TRIED = 11
"""How many numbers of parts are tried: 64, 48, 32, 24, 16 and so on to 2 of 64 of those that there may be."""

KEYS_OF_A_TILE = 384
"""What a tile takes beside its keys: as much as so many (``few_e4m3_times.py``, ``few_queries_times.py``)."""

KEYS_OF_RESULTS = 640
"""What the results of a tile take, which are written in float32, read and added up, when all multiprocessors do so:
this many keys of one."""

MOST_TILES = 2**23
"""Of a sequence, as far as they are counted, so that in parts they fit 32 bits, whatever offsets overlap. Sums by which
parts are chosen may be wrong then; entries are cut to those that there is room for."""

MOST_COUNTED = 2**20
"""Tiles of a head in all parts, as far as their time is counted: that of 256 heads fits 32 bits."""


class PartsPlanKernel:
    """``PlanKernel`` of query tiles whose keys are in parts (``parts.py``).

    A part has no more than so many key blocks, the same for all sequences: one of average length is in one part where
    the longest is in ten. How many is found by count (``_blocks_of_a_part``), by each warp for itself. So a plan
    depends on nothing but the lengths and what the launch has room for. Tiles of a part stand behind each other, the
    parts of a sequence too; those of long sequences come first.
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
        tile_n: Int32,
        seen: Int32,
        heads: Int32,
        slots: Int32,
        most_parts: Int32,
        stream,
    ):
        """Launch. Tensors are those of ``PlanKernel``. ``tile`` rows of Q are a tile, ``tile_n`` keys a block, of which
        a tile visits ``seen`` at most, and each tile is there for so many ``heads``; ``slots`` tiles run at a time, in
        ``most_parts`` parts or fewer."""
        sequences = cu_seqlens_q.shape[0]
        lengths = (cu_seqlens_q, seqused_q, total_q), (cu_seqlens_k, seqused_k, total_k)
        self.kernel(lengths, plan, (tile, tile_n, seen), heads, slots, most_parts).launch(
            grid=(cute.ceil_div(sequences, WARPS_PER_CTA), 1, 1),
            block=(LANES * WARPS_PER_CTA, 1, 1),
            use_pdl=self.config.starts_early,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        lengths: tuple,
        plan: cute.Tensor,
        tiles: tuple[Int32, Int32, Int32],
        heads: Int32,
        slots: Int32,
        most_parts: Int32,
    ):
        batch = lengths[0][0].shape[0] - 1
        if const_expr(self.config.starts_early):
            # The next kernel makes ready meanwhile. Not sooner: its CTAs are to find all multiprocessors free.
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        own = cute.arch.block_idx()[0] * WARPS_PER_CTA + warp
        if own <= batch:
            of_lane = counts_of(lengths, tiles, lane)
            each = self._blocks_of_a_part((lengths, tiles), of_lane, heads, slots, most_parts, lane)
            offset_q, seqlen_q, offset_k, seqlen_k = rows_of_both(lengths, own)
            first_entry = PLAN_HEADER + RECORD * (batch + 1)
            capacity = (plan.shape[0] - first_entry) // ENTRY
            before, of_all = entries_of(of_lane, (own, seqlen_k), lane, each, most_parts, capacity)
            for i in cutlass.range(lane + LANES, batch + 1, LANES, unroll=1):
                of_sequence = counts_of(lengths, tiles, i)
                in_front, more = entries_of(of_sequence, (own, seqlen_k), i, each, most_parts, capacity)
                # No further than there is room, as in ``PlanKernel``.
                before, of_all = minimum(before + in_front, capacity), minimum(of_all + more, capacity)
            before = cute.arch.warp_redux_sync(before, "add")
            of_all = cute.arch.warp_redux_sync(of_all, "add")
            tile, tile_n, seen = tiles
            parts = parts_of(blocks_of(seqlen_k, tile_n, seen), each, most_parts)
            if lane == 0:
                if own == batch:
                    plan[0] = minimum(of_all, capacity)
                record = PLAN_HEADER + RECORD * own
                plan[record] = offset_q
                plan[record + 1] = seqlen_q
                plan[record + 2] = offset_k
                plan[record + 3] = seqlen_k
            of_a_part = tiles_of(seqlen_q, tile)
            for i in cutlass.range(lane, minimum(of_a_part * parts, capacity - before), LANES, unroll=1):
                part = divide(i, of_a_part)
                entry = first_entry + ENTRY * (before + i)
                plan[entry] = number_of(own, part, parts)
                plan[entry + 1] = before + part * of_a_part

    @cute.jit
    def _blocks_of_a_part(
        self,
        problem: tuple,
        of_lane: tuple,
        heads: Int32,
        slots: Int32,
        most_parts: Int32,
        lane: Int32,
    ) -> Int32:
        """How many key blocks a part has at most: of ``TRIED`` numbers of parts of the longest sequence, a lane each,
        what takes least time by count (``cost_of_parts``), and of equals the fewest parts. ``of_lane`` is the
        ``counts_of`` of the lane's number."""
        lengths, tiles = problem
        batch, (_, tile_n, _) = lengths[0][0].shape[0] - 1, tiles
        _, number, blocks = of_lane
        number = number if lane < batch else Int32(0)
        longest, work = (blocks if number > 0 else Int32(0)), Float32(number) * Float32(blocks)
        for i in cutlass.range(lane + LANES, batch, LANES, unroll=1):
            _, more, blocks_of_it = counts_of(lengths, tiles, i)
            longest = maximum(longest, blocks_of_it if more > 0 else Int32(0))
            work += Float32(more) * Float32(blocks_of_it)
        longest = maximum(cute.arch.warp_redux_sync(longest, "max"), 1)
        work = cute.arch.warp_reduction_sum(work)
        tried = divide_up(longest, number_tried(most_parts, minimum(lane, TRIED - 1)))
        inverse = cute.arch.rcp_approx(Float32(tried))
        # Who has a part is decided by integers. Here half a block is more than what the product is off by.
        each = [
            (Float32(cute.arch.shuffle_sync(tried, j)) - Float32(0.5), cute.arch.shuffle_sync(inverse, j))
            for j in range(TRIED)
        ]
        numbers = cute.make_rmem_tensor(TRIED, Int32)
        for j in cutlass.range_constexpr(TRIED):
            numbers[j] = number * parts_by_inverse(blocks, each[j])
        for i in cutlass.range(lane + LANES, batch, LANES, unroll=1):
            _, more, blocks_of_it = counts_of(lengths, tiles, i)
            for j in cutlass.range_constexpr(TRIED):
                numbers[j] += more * parts_by_inverse(blocks_of_it, each[j])
        own = Int32(0)
        for j in cutlass.range_constexpr(TRIED):
            of_all = cute.arch.warp_redux_sync(numbers[j], "add")
            own = of_all if lane >= j else own
        # A cost is above 0, and such floats are in the order of their bits.
        cost = cost_of_parts(tried, own, work, tile_n, heads, slots).bitcast(Int32)
        least = cute.arch.warp_redux_sync(cost, "min")
        return cute.arch.warp_redux_sync(tried if cost == least else Int32(0), "max")


@cute.jit
def rows_of_both(lengths: tuple, i: Int32) -> tuple[Int32, Int32, Int32, Int32]:
    """A record of the plan; behind the last sequence no query has a key."""
    (cu_seqlens_q, seqused_q, total_q), (cu_seqlens_k, seqused_k, total_k) = lengths
    batch = cu_seqlens_q.shape[0] - 1
    offset_q, seqlen_q = rows_of(cu_seqlens_q, seqused_q, total_q, i)
    offset_k, seqlen_k = rows_of(cu_seqlens_k, seqused_k, total_k, i)
    return offset_q, seqlen_q, offset_k, Int32(0) if i == batch else seqlen_k


@cute.jit
def counts_of(lengths: tuple, tiles: tuple, i: Int32) -> tuple[Int32, Int32, Int32]:
    """(keys, query tiles of a head, key blocks) of a sequence, or of the rows behind all; nothing behind these."""
    batch, (tile, tile_n, seen) = lengths[0][0].shape[0] - 1, tiles
    _, seqlen_q, _, seqlen_k = rows_of_both(lengths, minimum(i, batch))
    number = tiles_of(seqlen_q, tile)
    return seqlen_k, Int32(0) if i > batch else number, blocks_of(seqlen_k, tile_n, seen)


@cute.jit
def entries_of(
    of_sequence: tuple, own: tuple, i: Int32, each: Int32, most_parts: Int32, capacity: Int32
) -> tuple[Int32, Int32]:
    """Tiles of a head in all parts of sequence ``i``, if they come before those of ``own``, a sequence and its keys,
    and if not."""
    keys, number, blocks = of_sequence
    entries = minimum(number * parts_of(blocks, each, most_parts), capacity)
    comes_before = (keys > own[1]) | ((keys == own[1]) & (i < own[0]))
    return entries if comes_before else Int32(0), entries


def parts_by_inverse(blocks: Int32, each: tuple) -> Int32:
    """``parts_of``, by blocks of a part less a half, and their inverse."""
    above, factor = each
    return maximum(Int32((Float32(blocks) + above) * factor), 1)


def divide_up(a: Int32, b: Int32) -> Int32:
    """``ceil_div`` of an a from 0 on and a b above 0."""
    return divide(a + b - 1, b)


def number_tried(most_parts: Any, i: Any) -> Any:
    """Number ``i`` of those tried, from few to all."""
    share = (2 + (i & 1)) << (i >> 1)
    return (most_parts * share + 63) >> 6


def cost_of_parts(
    tried: Int32, number: Int32, work: Float32, tile_n: Int32, heads: Int32, slots: Int32
) -> Float32:
    """In key blocks: as long as the longest part, or as all parts share out over the slots, by their mean; and what is
    made of their results. ``number`` are the tiles of a head in all parts, ``work`` all their blocks."""
    block = cute.arch.rcp_approx(Float32(tile_n))
    of_a_tile = Float32(KEYS_OF_A_TILE) * block
    number = minimum(maximum(number, 1), MOST_COUNTED)
    turns = divide_up(number * heads, slots)
    of_all = Float32(turns) * (work * cute.arch.rcp_approx(Float32(number)) + of_a_tile)
    of_results = (
        Float32(number * heads) * cute.arch.rcp_approx(Float32(slots)) * (Float32(KEYS_OF_RESULTS) * block)
    )
    return cute.arch.fmax(Float32(tried) + of_a_tile, of_all) + of_results


def tiles_of(rows: Int32, tile: Int32) -> Int32:
    return minimum(divide_up(rows, tile), MOST_TILES)


def blocks_of(keys: Int32, tile_n: Int32, seen: Int32) -> Int32:
    return minimum(divide_up(keys, tile_n), seen)


def parts_of(blocks: Int32, each: Int32, most_parts: Int32) -> Int32:
    """Of a sequence with so many key blocks, where a part has ``each`` at most; at least one."""
    return minimum(maximum(divide_up(blocks, each), 1), most_parts)

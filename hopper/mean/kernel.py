"""Finds the mean of V over the keys that is worth subtracting, in one pass over V."""

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32, Int64

from cute_kernels.dtypes import DSL_DTYPES
from cute_kernels.integers import ceil_div, divide, maximum
from hopper.mean.config import (
    CHANCE,
    CHUNK,
    CLUSTER,
    COLUMNS,
    COLUMNS_OF_CTA,
    CTAS_PER_SM,
    GROUPS,
    GROUPS_OF_CTA,
    LANES_OF_ROW,
    LOADS,
    OUTLYING,
    ROWS_OF_GROUP,
    ROWS_OF_WARP,
    STEP_EXPONENT,
    THREADS,
    WARP_THREADS,
    WARPS,
    WARPS_OF_GROUP,
    ValueMeanConfig,
    groups_of,
    validate_value_mean_config,
)
from hopper.quantize.words import reciprocal, widen, words_at

WORDS = CHUNK // 2
MANTISSA_BITS, BIAS = 23, 127
TO_WHOLE = 1.5 * 2.0**MANTISSA_BITS
"""Added to a float32 below 2^22 it rounds it to a whole number, ties to even."""


class ValueMeanKernel:
    """V (batch, keys, heads, columns) of 16 bits -> float32 (batch, heads, columns): what to subtract from each column.

    ``hopper_attention.quantization_rules.mean_worth_subtracting`` has the rule and its reasons. A cluster takes 64
    columns of a head, and each of its CTAs some groups of keys. Threads add up the differences from the first key of
    their group, and the squares of these: sums that cancel nothing where a mean is large against the spread. Each CTA
    then sends the mean and the variance of its groups to the CTA that finds the result of the column. There a warp has
    a group in each lane, so that a median is 32 shuffles.
    """

    def __init__(self, config: ValueMeanConfig):
        validate_value_mean_config(config)
        self.dtype = DSL_DTYPES[config.dtype]

    @cute.jit
    def __call__(self, mV: cute.Tensor, mMean: cute.Tensor, stream):
        """Launch; ``compile_value_mean`` says what the arguments are."""
        parts = ceil_div(mV.shape[3], COLUMNS)
        self.kernel(mV, mMean).launch(
            grid=(CLUSTER * parts * mV.shape[2] * mV.shape[0], 1, 1),
            block=(THREADS, 1, 1),
            cluster=(CLUSTER, 1, 1),
            stream=stream,
            min_blocks_per_mp=CTAS_PER_SM,
            # Unless told, the DSL asks the GPU for its shared memory, and there may be none when compiling.
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(self, mV: cute.Tensor, mMean: cute.Tensor):
        storage = cutlass.memory.SmemAllocator().allocate(self._shared_storage())
        sums = storage.sums.get_tensor(cute.make_layout((COLUMNS, WARPS, 2)))
        pivots = storage.pivots.get_tensor(cute.make_layout((COLUMNS, GROUPS_OF_CTA)))
        received = storage.received.get_tensor(cute.make_layout((GROUPS, COLUMNS_OF_CTA, 2)))
        # The quantizer may start, and wait: its CTAs take the place of those that end.
        cute.arch.griddepcontrol_launch_dependents()
        # No CTA sends to another one before that has started.
        cute.arch.cluster_arrive()
        thread, _, _ = cute.arch.thread_idx()
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        parts = ceil_div(mV.shape[3], COLUMNS)
        cluster = divide(cute.arch.block_idx()[0], CLUSTER)
        row = divide(cluster, parts)
        first_column = (cluster - row * parts) * COLUMNS
        batch = divide(row, mV.shape[2])
        head = row - batch * mV.shape[2]
        keys = Int32(mV.shape[1])
        groups, length = groups_of(keys)

        group = rank * GROUPS_OF_CTA + warp // WARPS_OF_GROUP
        column = first_column + lane % LANES_OF_ROW * CHUNK
        is_there = group < groups and column < mV.shape[3]
        # Of what is not there, some address that is.
        first = group * length if is_there else Int32(0)
        address = Int64(batch) * mV.stride[0] + Int64(first) * mV.stride[1] + Int64(head) * mV.stride[2]
        address = mV.iterator.toint() + 2 * (address + (column if is_there else Int32(0)))
        rows = length if is_there else Int32(0)
        self._add_up(address, 2 * Int64(mV.stride[1]), rows, (sums, pivots), (warp, lane))
        cute.arch.sync_threads()
        cute.arch.cluster_wait()
        if thread < GROUPS_OF_CTA * COLUMNS:
            self._send((sums, pivots), received, (thread, rank), groups, length)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        if warp < COLUMNS_OF_CTA:
            own = first_column + rank * COLUMNS_OF_CTA + warp
            result = worth_subtracting(received[lane, warp, 0], received[lane, warp, 1], keys, lane)
            if lane == 0 and own < mV.shape[3]:
                mMean[batch, head, own] = result

    @cute.jit
    def _add_up(self, address: Int64, stride: Int64, rows: Int32, shared: tuple, place: tuple):
        """Of the rows of a group, from byte ``address`` on: the sums of a warp, and the first row, to shared memory."""
        (sums, pivots), (warp, lane) = shared, place
        pivot_words = cute.make_rmem_tensor(WORDS, Int32)
        cute.autovec_copy(words_at(address, WORDS), pivot_words)
        pivot, total = cute.make_rmem_tensor(CHUNK, Float32), cute.make_rmem_tensor((CHUNK, 2), Float32)
        for w in cutlass.range_constexpr(WORDS):
            pivot[2 * w], pivot[2 * w + 1] = widen(pivot_words[w], self.dtype)
        total.fill(0.0)
        own = warp % WARPS_OF_GROUP * ROWS_OF_WARP + lane // LANES_OF_ROW
        for start in cutlass.range(0, rows, ROWS_OF_GROUP * LOADS, unroll=1):
            loaded = cute.make_rmem_tensor((WORDS, LOADS), Int32)
            for i in cutlass.range_constexpr(LOADS):
                # Of a row that is not there, the first, which adds nothing.
                for w in cutlass.range_constexpr(WORDS):
                    loaded[w, i] = pivot_words[w]
                row = start + own + i * ROWS_OF_GROUP
                if row < rows:
                    cute.autovec_copy(words_at(address + Int64(row) * stride, WORDS), loaded[None, i])
            for i in cutlass.range_constexpr(LOADS):
                for w in cutlass.range_constexpr(WORDS):
                    for e, value in enumerate(widen(loaded[w, i], self.dtype)):
                        difference = value - pivot[2 * w + e]
                        total[2 * w + e, 0] += difference
                        total[2 * w + e, 1] += difference * difference
        for i in cutlass.range_constexpr(2 * CHUNK):
            distance = LANES_OF_ROW
            while distance < WARP_THREADS:
                total[i] += cute.arch.shuffle_sync_bfly(total[i], offset=distance)
                distance *= 2
        if lane < LANES_OF_ROW:
            for which in cutlass.range_constexpr(2):
                of_warp = cute.local_tile(sums[None, warp, which], (CHUNK,), (lane,))
                cute.autovec_copy(total[None, which], of_warp)
            if warp % WARPS_OF_GROUP == 0:
                of_group = cute.local_tile(pivots[None, warp // WARPS_OF_GROUP], (CHUNK,), (lane,))
                cute.autovec_copy(pivot, of_group)

    @cute.jit
    def _send(self, shared: tuple, received: cute.Tensor, place: tuple, groups: Int32, length: Int32):
        """The mean and the variance of a column of a group, by a thread each, to the CTA that the column is of. The
        mean is NaN where the group is not there, or where one of the two is not finite."""
        (sums, pivots), (thread, rank) = shared, place
        part, column = thread // COLUMNS, thread % COLUMNS
        group = rank * GROUPS_OF_CTA + part
        total = [Float32(0.0), Float32(0.0)]
        for which in cutlass.range_constexpr(2):
            for w in cutlass.range_constexpr(WARPS_OF_GROUP):
                total[which] += sums[column, part * WARPS_OF_GROUP + w, which]
        inverse = reciprocal(Float32(length))
        shift = total[0] * inverse
        mean = pivots[column, part] + shift
        variance = total[1] * inverse - shift * shift
        is_finite = cute.math.absf(mean) < Float32.inf and cute.math.absf(variance) < Float32.inf
        mean = mean if is_finite and group < groups else Float32.nan
        place_there = received.iterator.toint() + 4 * (group + column % COLUMNS_OF_CTA * GROUPS)
        for which, value in enumerate((mean, variance)):
            cute.arch.inline_ptx(
                "{ .reg .b32 to; mapa.shared::cluster.u32 to, {$r0}, {$r1}; st.shared::cluster.f32 [to], {$r2}; }",
                read_only_args=[
                    Int32(place_there + which * 4 * GROUPS * COLUMNS_OF_CTA),
                    column // COLUMNS_OF_CTA,
                    value,
                ],
            )

    def _shared_storage(self) -> type:
        @cute.struct
        class SharedStorage:
            sums: cute.struct.Align[cute.struct.MemRange[Float32, 2 * WARPS * COLUMNS], 16]
            pivots: cute.struct.Align[cute.struct.MemRange[Float32, GROUPS_OF_CTA * COLUMNS], 16]
            received: cute.struct.Align[cute.struct.MemRange[Float32, 2 * GROUPS * COLUMNS_OF_CTA], 16]

        return SharedStorage


@cute.jit
def worth_subtracting(mean: Float32, variance: Float32, keys: Int32, lane: Int32) -> Float32:
    """What to subtract from a column of ``keys`` keys, by a warp, of whose groups each lane has one. A mean of NaN does
    not count."""
    has_mean = cute.math.absf(mean) < Float32.inf
    count = count_lanes(has_mean)
    of_group = mean if has_mean else Float32.inf
    middle = upper_median(of_group, count, lane)
    distance = cute.math.absf(of_group - middle) if has_mean else Float32.inf
    farthest = Float32(OUTLYING) * upper_median(distance, count, lane)
    counts = has_mean and distance <= farthest
    excess = cute.arch.warp_reduction_sum(of_group - middle if counts else Float32(0.0))
    robust = middle + excess * reciprocal(Float32(maximum(count_lanes(counts), 1)))
    squared = upper_median(variance if has_mean else Float32.inf, count, lane)
    result = on_the_grid(robust, squared)
    is_chance = robust * robust * Float32(keys) < Float32(CHANCE * CHANCE) * squared
    is_kept = count > 0 and not is_chance and cute.math.absf(result) < Float32.inf
    return result if is_kept else Float32(0.0)


@cute.jit
def on_the_grid(mean: Float32, variance: Float32) -> Float32:
    """A mean rounded to a multiple of the step of values of such a variance; itself if that is 0."""
    biased = variance.bitcast(Int32) >> MANTISSA_BITS
    exponent = (biased - BIAS >> 1) + STEP_EXPONENT
    step = ((BIAS + exponent) << MANTISSA_BITS).bitcast(Float32)
    steps = mean * ((BIAS - exponent) << MANTISSA_BITS).bitcast(Float32)
    whole = steps + Float32(TO_WHOLE) - Float32(TO_WHOLE)
    # From there on float32 has whole numbers alone, or nearly.
    steps = whole if cute.math.absf(steps) < Float32(2.0 ** (MANTISSA_BITS - 1)) else steps
    return steps * step if biased > 0 else mean


@cute.jit
def upper_median(x: Float32, count: Int32, lane: Int32) -> Float32:
    """Of the ``count`` numbers that the lanes of a warp have; the others have infinity, which is the median of none."""
    before = Int32(0)
    for other in cutlass.range_constexpr(WARP_THREADS):
        y = cute.arch.shuffle_sync(x, offset=other)
        comes_before = y < x or (y == x and other < lane)
        before += Int32(1) if comes_before else Int32(0)
    middle = cute.arch.vote_ballot_sync(before == count // 2 % WARP_THREADS)
    return cute.arch.shuffle_sync(x, offset=cute.arch.popc(middle - 1))


def count_lanes(predicate: cutlass.Boolean) -> Int32:
    return cute.arch.popc(cute.arch.vote_ballot_sync(predicate))

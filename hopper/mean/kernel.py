"""Finds the mean of V over the keys that is worth subtracting, in one pass over V."""

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from cute_kernels.dtypes import DSL_DTYPES
from cute_kernels.integers import ceil_div, divide, maximum, minimum
from cute_kernels.plan.kernel import rows_of
from hopper.mean.config import (
    CHANCE,
    CHUNK,
    COLUMNS,
    CTAS_PER_SM,
    E4M3_BITS,
    GROUPS,
    LANES_OF_ROW,
    MOST_KEPT,
    MOST_LEFT,
    MOST_LEFT_OF_SMALL,
    OUTLYING,
    ROWS_OF_WARP,
    RUN,
    SMALL_FIRST,
    SMALL_FIRSTS,
    STEP_EXPONENT,
    THREADS,
    WARP_THREADS,
    ValueMeanConfig,
    groups_of,
    halvings,
    run_of,
    sample_size,
    sorting_pairs,
    validate_value_mean_config,
)
from hopper.quantize.words import reciprocal, widen, words_at

WORDS = CHUNK // 2
MANTISSA_BITS, BIAS = 23, 127
TO_WHOLE = 1.5 * 2.0**MANTISSA_BITS
"""Added to a float32 below 2^22 and subtracted again, it rounds that to a whole number, ties to even."""


class ValueMeanKernel:
    """V (batch, keys, heads, columns) of 16 bits -> float32 (batch, heads, columns): what to subtract from each column.

    ``hopper_attention.value_mean_rules.mean_worth_subtracting`` has the rule and its reasons. A cluster, or one CTA,
    takes 64 columns of a head, and each of its CTAs some groups of keys. Threads add up the differences from the first
    key of their group, and the squares of these: sums that cancel nothing where a mean is large against the spread. All
    CTAs send the mean and the variance of their groups to the first one. There a thread has all groups of a column in
    registers, and finds medians by sorting them.
    """

    def __init__(self, config: ValueMeanConfig):
        validate_value_mean_config(config)
        self.config = config
        self.dtype = DSL_DTYPES[config.dtype]

    @cute.jit
    def __call__(self, mV: cute.Tensor, mMean: cute.Tensor, stream):
        """Launch; ``compile_value_mean`` says what the arguments are."""
        self._launch(mV, (mMean,), mMean.shape[0], (), stream)

    @cute.jit
    def _launch(self, mV: cute.Tensor, results: tuple, sequences: Int32, lengths: tuple, stream):
        c = self.config
        parts = ceil_div(mV.shape[3], COLUMNS)
        self.kernel(mV, results, lengths).launch(
            grid=(c.cluster * parts * mV.shape[2] * sequences, 1, 1),
            block=(THREADS, 1, 1),
            cluster=(c.cluster, 1, 1),
            stream=stream,
            min_blocks_per_mp=CTAS_PER_SM,
            # Unless told, the DSL asks the GPU for its shared memory, and there may be none when compiling.
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(self, mV: cute.Tensor, results: tuple, lengths: tuple):
        c = self.config
        # The quantizer may start, and wait: its CTAs take the place of those that end.
        cute.arch.griddepcontrol_launch_dependents()
        if const_expr(c.cluster > 1):
            # No CTA sends to the first one before that has started.
            cute.arch.cluster_arrive()
        storage = cutlass.memory.SmemAllocator().allocate(self._shared_storage())
        sums = storage.sums.get_tensor(cute.make_layout((COLUMNS, c.sums, 2)))
        pivots = storage.pivots.get_tensor(cute.make_layout((COLUMNS, c.groups)))
        received = storage.received.get_tensor(cute.make_layout((COLUMNS, GROUPS, 2)))
        thread, _, _ = cute.arch.thread_idx()
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        parts = ceil_div(mV.shape[3], COLUMNS)
        cluster = divide(cute.arch.block_idx()[0], c.cluster)
        row = divide(cluster, parts)
        first_column = (cluster - row * parts) * COLUMNS
        sequence = divide(row, mV.shape[2])
        head = row - sequence * mV.shape[2]
        entry, offset, keys = self._rows(mV, lengths, sequence)
        groups, length = groups_of(maximum(keys, 1), minimum, maximum)
        groups = groups if keys > 0 else Int32(0)

        column = first_column + lane % LANES_OF_ROW * CHUNK
        often = self._halvings(mV, keys)
        counted = sample_size(length, often) if often > 0 else length
        for i in cutlass.range_constexpr(c.groups_of_warp):
            part = warp * c.groups_of_warp + i
            group = rank * c.groups + part // c.warps_of_group
            is_there = group < groups and column < mV.shape[3]
            # Of what is not there, an address that is.
            key = offset + group * length if is_there else Int32(0)
            address = Int64(entry) * mV.stride[0] + Int64(key) * mV.stride[1] + Int64(head) * mV.stride[2]
            address = mV.iterator.toint() + 2 * (address + (column if is_there else Int32(0)))
            rows = counted if is_there else Int32(0)
            self._add_up(address, 2 * Int64(mV.stride[1]), (rows, often), (sums, pivots), (part, lane))
        cute.arch.sync_threads()
        if const_expr(c.cluster > 1):
            cute.arch.cluster_wait()
        for i in cutlass.range_constexpr(ceil_div(c.groups * COLUMNS, THREADS)):
            index = thread + i * THREADS
            if index < c.groups * COLUMNS:
                self._send((sums, pivots), received, (index, rank), groups, counted)
        if const_expr(c.cluster > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        own = first_column + thread
        if rank == 0 and thread < COLUMNS:
            looked_at = pivots[thread, 0], groups * counted
            self._finish(received, looked_at, results, (sequence, head, own, Int32(mV.shape[3])))

    def _rows(self, mV: cute.Tensor, lengths: tuple, sequence: Int32) -> tuple:
        """(entry of V that a sequence is in, its first row there, its rows)."""
        return sequence, Int32(0), Int32(mV.shape[1])

    def _halvings(self, mV: cute.Tensor, keys: Int32) -> Int32:
        """How often the keys of a sequence are halved."""
        return halvings(keys, Int32)

    @cute.jit
    def _finish(self, received: cute.Tensor, looked_at: tuple, results: tuple, place: tuple):
        """Write what a thread's column loses. ``looked_at`` are its first value and the number of keys that were looked
        at, ``place`` the sequence, the head, the column, and the columns there are."""
        (first, keys), (sequence, head, own, columns) = looked_at, place
        column = own % COLUMNS
        mean = worth_subtracting(received, column, (own, columns), first, keys)
        if own < columns:
            results[0][sequence, head, own] = mean

    @cute.jit
    def _add_up(self, address: Int64, stride: Int64, counted: tuple, shared: tuple, place: tuple):
        """Of the rows of a group, from byte ``address`` on: the sums of a warp, and the first row, to shared memory.
        ``counted`` are the rows that are looked at, and how often the rows were halved; ``place`` the number of the
        sums, warps of a group one behind the other, and the lane."""
        (rows, often), (sums, pivots), (part, lane) = counted, shared, place
        warps, loads = self.config.warps_of_group, self.config.loads
        pivot_words = cute.make_rmem_tensor(WORDS, Int32)
        cute.autovec_copy(words_at(address, WORDS), pivot_words)
        pivot, total = cute.make_rmem_tensor(CHUNK, Float32), cute.make_rmem_tensor((CHUNK, 2), Float32)
        for w in cutlass.range_constexpr(WORDS):
            pivot[2 * w], pivot[2 * w + 1] = widen(pivot_words[w], self.dtype)
        total.fill(0.0)
        own, step = part % warps * ROWS_OF_WARP + lane // LANES_OF_ROW, warps * ROWS_OF_WARP
        for start in cutlass.range(own, rows, step * loads, unroll=1):
            loaded = cute.make_rmem_tensor((WORDS, loads), Int32)
            for i in cutlass.range_constexpr(loads):
                number = start + i * step
                block = number // RUN
                row = ((block << often) + run_of(block, often)) * RUN + number % RUN
                # In place of a row that is not there the first, which adds nothing.
                row = row if number < rows else Int32(0)
                cute.autovec_copy(words_at(address + Int64(row) * stride, WORDS), loaded[None, i])
            for i in cutlass.range_constexpr(loads):
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
                of_warp = cute.local_tile(sums[None, part, which], (CHUNK,), (lane,))
                cute.autovec_copy(total[None, which], of_warp)
            if part % warps == 0:
                of_group = cute.local_tile(pivots[None, part // warps], (CHUNK,), (lane,))
                cute.autovec_copy(pivot, of_group)

    @cute.jit
    def _send(self, shared: tuple, received: cute.Tensor, place: tuple, groups: Int32, rows: Int32):
        """The mean and the variance of a column of a group, by a thread each, to the first CTA. The mean is NaN where
        the group is not there, or where one of the two is not finite."""
        (sums, pivots), (index, rank) = shared, place
        part, column = index // COLUMNS, index % COLUMNS
        group, warps = rank * self.config.groups + part, self.config.warps_of_group
        total = [Float32(0.0), Float32(0.0)]
        for which in cutlass.range_constexpr(2):
            for w in cutlass.range_constexpr(warps):
                total[which] += sums[column, part * warps + w, which]
        inverse = reciprocal(Float32(rows))
        shift = total[0] * inverse
        mean = pivots[column, part] + shift
        variance = total[1] * inverse - shift * shift
        is_finite = is_number(mean) and is_number(variance)
        mean = mean if is_finite and group < groups else Float32.nan
        for which, value in enumerate((mean, variance)):
            if const_expr(self.config.cluster == 1):
                received[column, group, which] = value
            else:
                place_there = received.iterator.toint() + 4 * ((which * GROUPS + group) * COLUMNS + column)
                cute.arch.inline_ptx(
                    "{ .reg .b32 to; mapa.shared::cluster.u32 to, {$r0}, 0; st.shared::cluster.f32 [to], {$r1}; }",
                    read_only_args=[Int32(place_there), value],
                )

    def _shared_storage(self) -> type:
        groups = self.config.groups

        @cute.struct
        class SharedStorage:
            sums: cute.struct.Align[cute.struct.MemRange[Float32, 2 * self.config.sums * COLUMNS], 16]
            pivots: cute.struct.Align[cute.struct.MemRange[Float32, groups * COLUMNS], 16]
            received: cute.struct.Align[cute.struct.MemRange[Float32, 2 * GROUPS * COLUMNS], 16]

        return SharedStorage


class PackedValueMeanKernel(ValueMeanKernel):
    """``ValueMeanKernel`` for packed sequences, whose V has a batch of 1."""

    @cute.jit
    def __call__(
        self, mV: cute.Tensor, mMean: cute.Tensor, cu_seqlens: cute.Tensor, seqused: cute.Tensor, stream
    ):
        """Launch; ``compile_value_mean`` says what the arguments are."""
        self._launch(mV, (mMean,), mMean.shape[0], (cu_seqlens, seqused), stream)

    def _rows(self, mV: cute.Tensor, lengths: tuple, sequence: Int32) -> tuple:
        offset, keys = rows_of(*lengths, Int32(mV.shape[1]), sequence)
        return Int32(0), offset, keys


@cute.jit
def worth_subtracting(
    received: cute.Tensor, column: Int32, place: tuple, first: Float32, keys: Int32
) -> Float32:
    """What to subtract from a column of a head, of which ``keys`` keys were looked at and which begins with ``first``.
    ``place`` are the number of the column and the columns there are."""
    robust, _, count = robust_mean(received, column)
    variance = median_variance(received, column)
    rounded = on_the_grid(robust, variance)
    is_chance = robust * robust * Float32(keys) < Float32(CHANCE * CHANCE) * variance
    (own, columns), size = place, cute.math.absf(rounded)
    # A warp has the neighbours.
    is_little = cute.math.absf(first) < Float32(SMALL_FIRSTS) * size
    all_little = cute.arch.vote_all_sync((own >= columns) | is_chance | is_little)
    is_kept = all_little and rounded * rounded * Float32(keys) < Float32(MOST_KEPT) * variance
    mean = Float32(0.0) if is_chance or is_kept or not is_number(rounded) else rounded
    result = sparing_the_first(mean, first, variance, keys)
    return result if count > 0 else Float32(0.0)


@cute.jit
def robust_mean(received: cute.Tensor, column: Int32) -> tuple[Float32, Float32, Int32]:
    """(the mean of a column, the mean of its variances in groups that count, the groups whose mean is a number). One
    whose mean is NaN does not count, nor one whose mean lies far from the others'."""
    means, count = with_fillers([received[column, group, 0] for group in range(GROUPS)])
    middle = upper_median(means)
    farthest = Float32(OUTLYING) * upper_median([distance_from(middle, mean) for mean in means])
    excess, variance, counted = Float32(0.0), Float32(0.0), Int32(0)
    for group in cutlass.range_constexpr(GROUPS):
        mean = means[group]
        counts = is_number(mean) and cute.math.absf(mean - middle) <= farthest
        excess += mean - middle if counts else Float32(0.0)
        variance += received[column, group, 1] if counts else Float32(0.0)
        counted += Int32(1) if counts else Int32(0)
    inverse = reciprocal(Float32(maximum(counted, 1)))
    return middle + excess * inverse, variance * inverse, count


@cute.jit
def median_variance(received: cute.Tensor, column: Int32) -> Float32:
    """The median of the variances of a column in groups whose mean is a number."""
    means, _ = with_fillers([received[column, group, 0] for group in range(GROUPS)])
    variances = []
    for group in cutlass.range_constexpr(GROUPS):
        variances.append(received[column, group, 1] if is_number(means[group]) else means[group])
    return upper_median(variances)


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
def sparing_the_first(mean: Float32, first: Float32, variance: Float32, keys: Int32) -> Float32:
    """The vector next to ``mean`` that leaves of the ``first`` value of the column a number that e4m3 has, ties to
    even, where the two are close enough for so many keys."""
    dropped = MANTISSA_BITS + 1 - E4M3_BITS
    bits = (first - mean).bitcast(Int32)
    code = ((bits + ((1 << dropped - 1) - 1) + (bits >> dropped & 1)) >> dropped << dropped).bitcast(Float32)
    exact = first - code
    left = exact - mean
    is_small = cute.math.absf(first) < Float32(SMALL_FIRST) * cute.math.absf(mean)
    most = Float32(MOST_LEFT_OF_SMALL) if is_small else Float32(MOST_LEFT)
    return exact if left * left * Float32(keys) < most * variance else mean


def is_number(x: Float32) -> Boolean:
    return cute.math.absf(x) < Float32.inf


@cute.jit
def with_fillers(values: list) -> tuple:
    """(the values, how many are numbers), with infinities of either sign in place of the others, such that the upper
    median of the numbers is that of all."""
    count = Int32(0)
    for value in values:
        count += Int32(1) if is_number(value) else Int32(0)
    filled, missing = [], Int32(0)
    for value in values:
        filler = -Float32.inf if missing < GROUPS // 2 - count // 2 else Float32.inf
        missing += Int32(0) if is_number(value) else Int32(1)
        filled.append(value if is_number(value) else filler)
    return filled, count


@cute.jit
def distance_from(middle: Float32, x: Float32) -> Float32:
    """Of a number; an infinity stays as it is."""
    return cute.math.absf(x - middle) if is_number(x) else x


def upper_median(values: list) -> Float32:
    """Of those that are numbers, among ``with_fillers``; infinity if none is."""
    x = list(values)
    for low, high in sorting_pairs(GROUPS):
        x[low], x[high] = cute.arch.fmin(x[low], x[high]), cute.arch.fmax(x[low], x[high])
    return x[GROUPS // 2]

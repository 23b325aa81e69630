"""Finds means of V that hold for runs of keys, where they lie far from the mean of all keys."""

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Boolean, Float32, Int32

from cute_kernels.integers import ceil_div, divide, maximum, minimum
from hopper.mean.config import (
    APART_VARIANCES,
    COLUMNS,
    EDGES_AT_ONCE,
    FAR_VARIANCES,
    FARTHEST,
    GROUPS,
    GROUPS_AT_ONCE,
    MOST_PARTS,
    RunMeansConfig,
    halvings_of_run,
)
from hopper.mean.edges import store_difference
from hopper.mean.kernel import (
    ValueMeanKernel,
    is_number,
    on_the_grid,
    robust_mean,
    sparing_the_first,
    worth_subtracting,
)
from hopper.quantize.words import reciprocal


class RunStatisticsKernel(ValueMeanKernel):
    """V -> float32 (2, batch, runs, heads, columns): the mean of each run of keys, and its variance.

    Runs are counted from the last key back, as attention comes to them: each has ``run`` keys, and the first one ends
    at key ``end``, which may lie behind the last of V. A run is what a sequence is to ``ValueMeanKernel``. The mean of
    one without numbers is NaN. The variance is the mean of those of groups that count, since it says how far off the
    mean may be: a median of few is too small where values are skewed.
    """

    @cute.jit
    def __call__(self, mV: cute.Tensor, mStatistics: cute.Tensor, run: Int32, end: Int32, stream):
        """Launch; ``compile_value_mean`` says what the arguments are."""
        runs = mStatistics.shape[2]
        self._launch(mV, (mStatistics,), mStatistics.shape[1] * runs, (runs, run, end), stream)

    @cute.jit
    def _rows(self, mV: cute.Tensor, lengths: tuple, sequence: Int32) -> tuple:
        runs, run, end = lengths
        entry = divide(sequence, runs)
        stop = end - (sequence - entry * runs) * run
        first = maximum(stop - run, 0)
        return entry, first, minimum(stop, mV.shape[1]) - first

    def _halvings(self, mV: cute.Tensor, keys: Int32) -> Int32:
        return halvings_of_run(keys, Int32(mV.shape[1]), Int32)

    @cute.jit
    def _finish(self, received: cute.Tensor, looked_at: tuple, results: tuple, place: tuple):
        (mStatistics,), (sequence, head, own, columns) = results, place
        entry = divide(sequence, mStatistics.shape[2])
        number = sequence - entry * mStatistics.shape[2]
        mean, variance, count = robust_mean(received, own % COLUMNS)
        if own < columns:
            mStatistics[0, entry, number, head, own] = mean if count > 0 else Float32.nan
            mStatistics[1, entry, number, head, own] = variance


class RunMeansKernel:
    """What ``RunStatisticsKernel`` has found -> float32 (batch, runs, heads, columns), what the keys of each run lose;
    int32 (batch, steps, heads, 8 columns), what those of the run in front lose more, ``EDGES_AT_ONCE`` runs a step, as
    ``store_difference`` has it; and int32 (batch, heads, MOST_PARTS), 1 where runs of some columns lose something else
    than the others, else 0. Of the first run, and of runs behind the last, the difference is 0.

    ``hopper_attention.value_mean_rules.means_of_runs`` has the rule. A CTA takes ``COLUMNS`` columns of a head, and
    a thread one of them in some of ``GROUPS`` groups of neighbouring runs.

    It starts while the kernel in front still works (programmatic dependent launch), as the quantizer does behind it. So
    its CTAs are small: one that waited for an SM to be empty would keep the quantizer from starting.
    """

    def __init__(self, config: RunMeansConfig):
        self.config = config

    @cute.jit
    def __call__(
        self,
        mV: cute.Tensor,
        mStatistics: cute.Tensor,
        mMeans: cute.Tensor,
        mDifferences: cute.Tensor,
        mChanges: cute.Tensor,
        run: Int32,
        end: Int32,
        stream,
    ):
        """Launch; ``compile_run_means`` says what the arguments are."""
        parts = ceil_div(mV.shape[3], COLUMNS)
        self.kernel(mV, mStatistics, mMeans, mDifferences, mChanges, run, end).launch(
            grid=(parts, mV.shape[2], mV.shape[0]),
            block=(COLUMNS * GROUPS_AT_ONCE, 1, 1),
            stream=stream,
            use_pdl=True,
            # Unless told, the DSL asks the GPU for its shared memory, and there may be none when compiling.
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(
        self,
        mV: cute.Tensor,
        mStatistics: cute.Tensor,
        mMeans: cute.Tensor,
        mDifferences: cute.Tensor,
        mChanges: cute.Tensor,
        run: Int32,
        end: Int32,
    ):
        cute.arch.griddepcontrol_launch_dependents()
        storage = cutlass.memory.SmemAllocator().allocate(self._shared_storage())
        received = storage.received.get_tensor(cute.make_layout((COLUMNS, GROUPS, 2)))
        of_all = storage.of_all.get_tensor(cute.make_layout(COLUMNS))
        changes = storage.changes.get_tensor(cute.make_layout(1))
        thread, _, _ = cute.arch.thread_idx()
        part, head, entry = cute.arch.block_idx()
        column, first_group = thread % COLUMNS, thread // COLUMNS
        own, columns, keys = part * COLUMNS + column, Int32(mV.shape[3]), Int32(mV.shape[1])
        readable = minimum(own, columns - 1)
        first = mV[entry, 0, head, readable].to(Float32)
        runs = Int32(mMeans.shape[1])
        looked_at = keys >> halvings_of_run(keys, keys, Int32)
        if thread == 0:
            changes[0] = Int32(0)
        cute.arch.griddepcontrol_wait()
        statistics = [mStatistics[i, entry, None, head, readable] for i in range(2)]
        self._join_runs(statistics, runs, received, (column, first_group))
        cute.arch.sync_threads()
        if first_group == 0:
            of_all[column] = worth_subtracting(received, column, (own, columns), first, looked_at)
        cute.arch.sync_threads()
        begin, stop = first_group * runs // GROUPS_AT_ONCE, (first_group + 1) * runs // GROUPS_AT_ONCE
        of_column, lengths = (first, of_all[column], own < columns), (run, end, keys)
        changed = Boolean(False)
        for number in cutlass.range(begin, stop, unroll=1):
            changed = changed | self._lies_apart(
                statistics, number, lengths, of_column, Float32(FAR_VARIANCES)
            )
        if changed:
            changes[0] = Int32(1)
        cute.arch.sync_threads()
        variances = Float32(APART_VARIANCES if changes[0] != 0 else FAR_VARIANCES)
        before = self._lost(statistics, maximum(begin - 1, 0), lengths, of_column, variances)
        for number in cutlass.range(begin, stop, unroll=1):
            lost = self._lost(statistics, number, lengths, of_column, variances)
            if own < columns:
                mMeans[entry, number, head, own] = lost
                self._store(mDifferences, (entry, number, head, own), before - lost)
            before = lost
        if first_group == 0 and own < columns:
            for number in cutlass.range(runs, mDifferences.shape[1] * EDGES_AT_ONCE, unroll=1):
                self._store(mDifferences, (entry, number, head, own), Float32(0.0))
        if thread < MOST_PARTS and (thread == part or (part == 0 and thread >= cute.arch.grid_dim()[0])):
            mChanges[entry, head, thread] = changes[0] if thread == part else Int32(0)

    def _store(self, mDifferences: cute.Tensor, place: tuple, difference: Float32):
        """``place`` is (entry of the batch, run, head, column)."""
        entry, number, head, own = place
        step = mDifferences[entry, number // EDGES_AT_ONCE, head, None]
        store_difference(step, own, number % EDGES_AT_ONCE, difference)

    @cute.jit
    def _join_runs(self, statistics: list, runs: Int32, received: cute.Tensor, place: tuple):
        """For each group the mean of its runs, and that of their variances; NaN where none has numbers. Loads of some
        groups are under way together."""
        (column, first_group), groups = place, minimum(runs, GROUPS)
        own = [first_group + i * GROUPS_AT_ONCE for i in range(GROUPS // GROUPS_AT_ONCE)]
        begins = [group * runs // groups for group in own]
        stops = [(group + 1) * runs // groups for group in own]
        totals, counts = cute.make_rmem_tensor((2, len(own)), Float32), cute.make_rmem_tensor(len(own), Int32)
        totals.fill(0.0)
        counts.fill(0)
        for i in cutlass.range(ceil_div(runs, groups), unroll=1):
            loaded = cute.make_rmem_tensor((2, len(own)), Float32)
            for g in cutlass.range_constexpr(len(own)):
                for which in cutlass.range_constexpr(2):
                    loaded[which, g] = statistics[which][minimum(begins[g] + i, runs - 1)]
            for g in cutlass.range_constexpr(len(own)):
                counts_too = own[g] < groups and begins[g] + i < stops[g] and is_number(loaded[0, g])
                for which in cutlass.range_constexpr(2):
                    totals[which, g] += loaded[which, g] if counts_too else Float32(0.0)
                counts[g] += Int32(1) if counts_too else Int32(0)
        for g in cutlass.range_constexpr(len(own)):
            inverse = reciprocal(Float32(maximum(counts[g], 1)))
            received[column, own[g], 0] = totals[0, g] * inverse if counts[g] > 0 else Float32.nan
            received[column, own[g], 1] = totals[1, g] * inverse

    @cute.jit
    def _lost(
        self, statistics: list, number: Int32, lengths: tuple, of_column: tuple, variances: Float32
    ) -> Float32:
        """What a column of a run loses, which is a mean of its own if that lies so far apart. ``lengths`` are the keys
        of a run, where the first run ends, and all keys; ``of_column`` are the first value of the column, the mean of
        all its keys, and whether it is there."""
        (run, end, _), (first, of_all, _) = lengths, of_column
        mean, variance = statistics[0][number], statistics[1][number]
        lies_apart = self._lies_apart(statistics, number, lengths, of_column, variances)
        lost = of_all + (on_the_grid(mean - of_all, variance) if lies_apart else Float32(0.0))
        spared = sparing_the_first(lost, first, variance, self._looked_at(number, lengths))
        return spared if lies_apart & (end - number * run <= run) else lost

    @cute.jit
    def _lies_apart(
        self, statistics: list, number: Int32, lengths: tuple, of_column: tuple, variances: Float32
    ) -> Boolean:
        """Whether the mean of a run lies so many variances of its keys from that of all."""
        (_, of_all, is_there), mean, variance = of_column, statistics[0][number], statistics[1][number]
        distance, counted = mean - of_all, Float32(self._looked_at(number, lengths))
        lies_apart = distance * distance * counted > variances * variance
        lies_apart = lies_apart & is_number(on_the_grid(distance, variance)) & is_there
        return lies_apart & (cute.math.absf(distance) < Float32(FARTHEST))

    def _looked_at(self, number: Int32, lengths: tuple) -> Int32:
        """Keys of a run whose values the statistics are of."""
        run, end, keys = lengths
        stop = end - number * run
        own_keys = minimum(stop, keys) - maximum(stop - run, 0)
        return own_keys >> halvings_of_run(own_keys, keys, Int32)

    def _shared_storage(self) -> type:
        @cute.struct
        class SharedStorage:
            received: cute.struct.Align[cute.struct.MemRange[Float32, 2 * GROUPS * COLUMNS], 16]
            of_all: cute.struct.Align[cute.struct.MemRange[Float32, COLUMNS], 16]
            changes: cute.struct.MemRange[Int32, 1]

        return SharedStorage

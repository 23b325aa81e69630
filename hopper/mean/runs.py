"""Finds means of V that hold for runs of keys, where they lie far from the mean of all keys."""

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Boolean, Float32, Int32

from cute_kernels.integers import ceil_div, divide, maximum, minimum
from hopper.mean.config import (
    COLUMNS,
    FAR_VARIANCES,
    GROUPS,
    MOST_PARTS,
    RUNS,
    RunMeansConfig,
    is_run_sampled,
)
from hopper.mean.kernel import (
    ValueMeanKernel,
    is_number,
    on_the_grid,
    robust_mean,
    sparing_the_first,
    worth_subtracting,
)
from hopper.quantize.words import reciprocal

LOG_RUNS = RUNS.bit_length() - 1


class RunStatisticsKernel(ValueMeanKernel):
    """V -> float32 (2, batch, runs, heads, columns): the mean of each run of keys, and its variance.

    Runs are counted from the last key back, as attention comes to them: each has ``run`` keys, and the first one ends
    at key ``end``, which may lie behind the last of V. A run is what a sequence is to ``ValueMeanKernel``. The mean of
    one without numbers is NaN.
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

    def _samples(self, mV: cute.Tensor, keys: Int32) -> Boolean:
        return is_run_sampled(keys, Int32(mV.shape[1]))

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
    """What ``RunStatisticsKernel`` has found -> float32 (batch, runs, heads, columns): what the keys of each run lose,
    and int32 (batch, heads, MOST_PARTS), not 0 where runs of some columns lose something else than the others.

    ``hopper_attention.quantization_rules.means_of_runs`` has the rule. A CTA takes ``COLUMNS`` columns of a head, and
    a thread one of them in one of ``GROUPS`` groups of neighbouring runs.

    It starts while the kernel in front still works (programmatic dependent launch), as the quantizer does behind it.
    """

    def __init__(self, config: RunMeansConfig):
        self.config = config

    @cute.jit
    def __call__(
        self,
        mV: cute.Tensor,
        mStatistics: cute.Tensor,
        mMeans: cute.Tensor,
        mChanges: cute.Tensor,
        run: Int32,
        end: Int32,
        stream,
    ):
        """Launch; ``compile_run_means`` says what the arguments are."""
        parts = ceil_div(mV.shape[3], COLUMNS)
        self.kernel(mV, mStatistics, mMeans, mChanges, run, end).launch(
            grid=(parts, mV.shape[2], mV.shape[0]),
            block=(COLUMNS * GROUPS, 1, 1),
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
        column, group = thread % COLUMNS, thread // COLUMNS
        own, columns, keys = part * COLUMNS + column, Int32(mV.shape[3]), Int32(mV.shape[1])
        readable = minimum(own, columns - 1)
        first = mV[entry, 0, head, readable].to(Float32)
        runs = Int32(mMeans.shape[1])
        groups = minimum(runs, GROUPS)
        begin, stop = group * runs // groups, (group + 1) * runs // groups
        stop = stop if group < groups else begin
        looked_at = keys >> LOG_RUNS if is_run_sampled(keys, keys) else keys
        if thread == 0:
            changes[0] = Int32(0)
        cute.arch.griddepcontrol_wait()
        statistics = [mStatistics[i, entry, None, head, readable] for i in range(2)]
        self._join_runs(statistics, (begin, stop), received, (column, group))
        cute.arch.sync_threads()
        if group == 0:
            of_all[column] = worth_subtracting(received, column, (own, columns), first, looked_at)
        cute.arch.sync_threads()
        changed = Boolean(False)
        for number in cutlass.range(begin, stop, unroll=1):
            mean, variance = statistics[0][number], statistics[1][number]
            last = end - number * run
            own_keys = minimum(last, keys) - maximum(last - run, 0)
            counted = own_keys >> LOG_RUNS if is_run_sampled(own_keys, keys) else own_keys
            distance = mean - of_all[column]
            rounded = on_the_grid(distance, variance)
            is_far = distance * distance * Float32(counted) > Float32(FAR_VARIANCES) * variance
            is_far = is_far & is_number(rounded) & is_number(mean) & (own < columns)
            lost = of_all[column] + (rounded if is_far else Float32(0.0))
            spared = sparing_the_first(lost, first, variance, counted)
            lost = spared if is_far & (number == runs - 1) else lost
            if own < columns:
                mMeans[entry, number, head, own] = lost
            changed = changed | is_far
        if changed:
            changes[0] = Int32(1)
        cute.arch.sync_threads()
        if thread < MOST_PARTS and (thread == part or (part == 0 and thread >= cute.arch.grid_dim()[0])):
            mChanges[entry, head, thread] = changes[0] if thread == part else Int32(0)

    @cute.jit
    def _join_runs(self, statistics: list, bounds: tuple, received: cute.Tensor, place: tuple):
        """The mean of runs, and that of their variances; NaN where none has numbers."""
        (begin, stop), (column, group) = bounds, place
        total, variances, count = Float32(0.0), Float32(0.0), Int32(0)
        for number in cutlass.range(begin, stop, unroll=2):
            mean = statistics[0][number]
            counts = is_number(mean)
            total += mean if counts else Float32(0.0)
            variances += statistics[1][number] if counts else Float32(0.0)
            count += Int32(1) if counts else Int32(0)
        inverse = reciprocal(Float32(maximum(count, 1)))
        received[column, group, 0] = total * inverse if count > 0 else Float32.nan
        received[column, group, 1] = variances * inverse

    def _shared_storage(self) -> type:
        @cute.struct
        class SharedStorage:
            received: cute.struct.Align[cute.struct.MemRange[Float32, 2 * GROUPS * COLUMNS], 16]
            of_all: cute.struct.Align[cute.struct.MemRange[Float32, COLUMNS], 16]
            changes: cute.struct.MemRange[Int32, 1]

        return SharedStorage

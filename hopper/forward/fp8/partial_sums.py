"""O of long rows, as the sum of what runs of key blocks add to it, where O is staged when its tile is done."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32

from cute_kernels.fast_math import exp2, pack, reduce_by_threes, unpack
from cute_kernels.fragments import COLUMNS_PER_GROUP, LANES_PER_ROW, ROWS_PER_THREAD, as_rows
from cute_kernels.integers import maximum
from hopper.config import WARPGROUP_THREADS
from hopper.forward.fp8.mean_v import MeansOfRuns
from hopper.forward.fp8.softmax.stale_maximum import exponent_of
from hopper.forward.output import Output

WORDS = 4
"""Of 32 bits that a thread loads at once: a pair of columns of O in float16, of two rows, in two groups of columns."""

GROUPS = WORDS // ROWS_PER_THREAD
LEAST_EXPONENT = -120


class PartialSumsOutput(Output):
    """``Output`` that leaves its registers behind every so many key blocks.

    FP8 WGMMA keeps 13 bits of its accumulator, so what it drops of a product grows with the sum that this is added to.
    The sum of a run starts at 0. What came before is in the shared memory where O is staged in the end: O in float16,
    divided by a power of two, so that the largest of a row is between 1 and 2. What a row is measured from, its shift
    and that power's exponent, and the unit are among the words of its warp (``Staging``). A thread's place is its
    own, so that nobody waits.
    """

    def __init__(self, means: MeansOfRuns, *output: Any):
        super().__init__(*output)
        self.means, self.staging = means, means.staging
        self.vectors = self.config.columns_pv // (GROUPS * COLUMNS_PER_GROUP)

    def note_change(self, run: Int32):
        """Before the sums count a block that is the first visited of ``run``, whose mean may be another."""
        self.means.note(self.softmax.row_sum, self.softmax.shift, run)

    @cute.jit
    def collect(self):
        """After the last P V of a tile."""
        if self.means.has_changes():
            self.means.add(self.acc, self.softmax.shift, self.softmax.unit[0])

    @cute.jit
    def end_run(self):
        """Between two blocks: O, without the P V that is still to be started, goes to the sums, and is 0."""
        if self.staging.has_sums():
            self._add_sums()
        else:
            self.softmax.rescale_if_needed(self.acc)
            self.staging.claim()
        octaves = [self._octaves_of(r) for r in range(ROWS_PER_THREAD)]
        inverse = [exp2(-x) for x in octaves]
        words = cute.make_rmem_tensor(WORDS, Int32)
        for j in cutlass.range_constexpr(self.vectors):
            for i in cutlass.range_constexpr(WORDS):
                pair, factor = self._pair(j, i), inverse[i % ROWS_PER_THREAD]
                words[i] = pack(pair[0] * factor, pair[1] * factor, Float16)
            cute.autovec_copy(words, self._vector(j))
        measures = [self.softmax.shift[r] + octaves[r] for r in range(ROWS_PER_THREAD)]
        self.staging.keep(measures, self.softmax.unit[0])
        self.acc.fill(0.0)

    @cute.jit
    def join_runs(self):
        """After the last run: add the sums to O, if there are any."""
        if self.staging.has_sums():
            self._add_sums()

    @cute.jit
    def _add_sums(self):
        self.softmax.rescale_if_needed(self.acc)
        unit, before = self.softmax.unit[0], self.staging.kept_unit()
        quotient = Float32(1.0) if before == unit else before * cute.arch.rcp_approx(unit)
        measures, shifts = self.staging.kept_measures(), self.softmax.shift
        factors = [quotient * exp2(measures[r] - shifts[r]) for r in range(ROWS_PER_THREAD)]
        words = cute.make_rmem_tensor(WORDS, Int32)
        for j in cutlass.range_constexpr(self.vectors):
            cute.autovec_copy(self._vector(j), words)
            for i in cutlass.range_constexpr(WORDS):
                pair = self._pair(j, i)
                for e, x in enumerate(unpack(words[i], Float16)):
                    pair[e] = pair[e] + x * factors[i % ROWS_PER_THREAD]

    def _octaves_of(self, r: int) -> Float32:
        """The exponent of the largest of row ``r`` of O; not so small that its inverse is infinite."""
        rows = as_rows(self.acc)
        of_thread = [cute.math.absf(rows[r, i]) for i in range(cute.size(rows, mode=[1]))]
        largest = reduce_by_threes(of_thread, cute.arch.fmax)
        of_row = cute.arch.warp_reduction_max(largest, threads_in_group=LANES_PER_ROW)
        return Float32(maximum(exponent_of(of_row), LEAST_EXPONENT))

    def _pair(self, j: int, i: int) -> cute.Tensor:
        """What word ``i`` of vector ``j`` has of O."""
        return cute.make_tensor(self.acc.iterator + 2 * (WORDS * j + i), cute.make_layout(2))

    def _vector(self, j: int) -> cute.Tensor:
        """The thread's vector ``j`` in shared memory, those of neighbouring threads side by side."""
        wg, thread = self.staging.place()
        memory = cute.recast_ptr(self.staging.floats[None, wg].iterator, dtype=Int32)
        place = memory + WORDS * (j * WARPGROUP_THREADS + thread)
        return cute.make_tensor(place, cute.make_layout(WORDS))

"""O of long rows, as the sum of what runs of key blocks add to it, in global memory."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float16, Float32, Int32, Int64

from cute_kernels.fast_math import exp2, pack, pin, reduce_by_threes, unpack
from cute_kernels.fragments import COLUMNS_PER_GROUP, ROWS_PER_THREAD, as_rows
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
    The sum of a run starts at 0. What came before is in ``sums``, int32, ``partial_words`` of the config for each CTA:
    O in float16, as the memory's bandwidth asks for, divided by a power of two, so that the largest of a thread's row
    is between 1 and 2; then what it is measured from, the shifts of both rows and that power's exponent, and the unit.
    A thread's place is its own, so that nobody waits, and stays in L2.
    """

    def __init__(self, first_thread: int, sums: cute.Tensor, means: MeansOfRuns, *output: Any):
        super().__init__(*output)
        self.first_thread, self.sums, self.means = first_thread, sums, means
        self.vectors = self.config.head_dim_v // (GROUPS * COLUMNS_PER_GROUP)

    def note_change(self, run: Int32):
        """Between two blocks, the second of which is the first visited of a run whose mean may be another."""
        self.means.note(self.softmax.row_sum, self.softmax.shift, run)

    @cute.jit
    def collect(self):
        """After the last P V of a tile."""
        if self.means.has_changes():
            self.means.add(self.acc, self.softmax.shift, self.softmax.unit[0])

    @cute.jit
    def end_run(self, has_sums: Boolean):
        """Between two blocks: O, without the P V that is still to be started, goes to the sums, and is 0."""
        if has_sums:
            self.join_runs()
        else:
            self.softmax.rescale_if_needed(self.acc)
        octaves = [self._octaves_of(r) for r in range(ROWS_PER_THREAD)]
        inverse = [exp2(-x) for x in octaves]
        words = cute.make_rmem_tensor(WORDS, Int32)
        for j in cutlass.range_constexpr(self.vectors):
            for i in cutlass.range_constexpr(WORDS):
                pair, factor = self._pair(j, i), inverse[i % ROWS_PER_THREAD]
                words[i] = pack(pair[0] * factor, pair[1] * factor, Float16)
            cute.autovec_copy(words, self._vector(j))
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            words[r] = (self.softmax.shift[r] + octaves[r]).bitcast(Int32)
        words[2], words[3] = self.softmax.unit[0].bitcast(Int32), Int32(0)
        cute.autovec_copy(words, self._vector(self.vectors))
        self.acc.fill(0.0)

    @cute.jit
    def join_runs(self):
        """Add the sums to O."""
        self.softmax.rescale_if_needed(self.acc)
        words = cute.make_rmem_tensor(WORDS, Int32)
        cute.autovec_copy(self._vector(self.vectors), words)
        unit, before = self.softmax.unit[0], words[2].bitcast(Float32)
        quotient = Float32(1.0) if before == unit else before * cute.arch.rcp_approx(unit)
        shifts = self.softmax.shift
        factors = [quotient * exp2(words[r].bitcast(Float32) - shifts[r]) for r in range(ROWS_PER_THREAD)]
        for j in cutlass.range_constexpr(self.vectors):
            words = cute.make_rmem_tensor(WORDS, Int32)
            cute.autovec_copy(self._vector(j), words)
            for i in cutlass.range_constexpr(WORDS):
                pair = self._pair(j, i)
                for e, x in enumerate(unpack(words[i], Float16)):
                    pair[e] = pair[e] + x * factors[i % ROWS_PER_THREAD]

    def _octaves_of(self, r: int) -> Float32:
        """The exponent of the largest of the thread's row ``r`` of O; not so small that its inverse is infinite."""
        rows = as_rows(self.acc)
        of_row = [cute.math.absf(rows[r, i]) for i in range(cute.size(rows, mode=[1]))]
        return Float32(maximum(exponent_of(reduce_by_threes(of_row, cute.arch.fmax)), LEAST_EXPONENT))

    def _pair(self, j: int, i: int) -> cute.Tensor:
        """What word ``i`` of vector ``j`` has of O."""
        return cute.make_tensor(self.acc.iterator + 2 * (WORDS * j + i), cute.make_layout(2))

    @cute.jit
    def _vector(self, j: cutlass.Constexpr[int]) -> cute.Tensor:
        """The thread's vector ``j`` in global memory, those of neighbouring threads side by side."""
        thread = pin(cute.arch.thread_idx()[0], Int32) - self.first_thread
        warpgroup = cute.arch.block_idx()[0] * self.config.consumers + thread // WARPGROUP_THREADS
        place = (warpgroup * (self.vectors + 1) + j) * WARPGROUP_THREADS + thread % WARPGROUP_THREADS
        address = self.sums.iterator.toint() + Int64(place) * (4 * WORDS)
        pointer = cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=4 * WORDS)
        return cute.make_tensor(pointer, cute.make_layout(WORDS))

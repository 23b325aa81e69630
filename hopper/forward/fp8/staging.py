"""Where a consumer's O is staged, and what lies there while its tile is worked on."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from cute_kernels.fast_math import pin
from cute_kernels.fragments import LANES_PER_ROW, ROWS_PER_THREAD
from cute_kernels.invariant import LoopInvariant
from hopper.config import WARPGROUP_THREADS
from hopper.forward.barriers import sync_warpgroup
from hopper.forward.fp8.config import RUN_FLOATS
from hopper.tiles import WARPS_PER_WARPGROUP

WARP_WORDS = RUN_FLOATS // WARPS_PER_WARPGROUP
"""Of ``Staging``, for each warp."""

LOG_WARPGROUP_THREADS, LOG_WARP_SIZE = (x.bit_length() - 1 for x in (WARPGROUP_THREADS, cute.arch.WARP_SIZE))

UNIT, MEASURES = 7, 8
"""Which of them say what sums are measured from; measures are one a row. Those in front are ``MeansOfRuns``'s."""

NO_SUMS = -1
"""In place of the unit of sums, which is no negative number."""


def place_behind(first_thread: int) -> tuple[Int32, Int32]:
    """(warpgroup, thread of it) of a thread, where consumers begin with this one: read where it is asked for."""
    thread = pin(cute.arch.thread_idx()[0], Int32) - first_thread
    # Not negative, which the compiler would not know.
    return thread >> LOG_WARPGROUP_THREADS, thread & (WARPGROUP_THREADS - 1)


@dataclass(frozen=True)
class Staging(LoopInvariant):
    """The shared memory of each consumer warpgroup that its O goes through when its tile is done, and words of each
    warp.

    Until then two others have it in turn, each once its warpgroup has claimed it: sums of runs
    (``PartialSumsOutput``), and then differences of means (``MeansOfRuns``). ``floats`` is float32 (64 rows of
    head_dim_v in 16 bits, consumers). The words are the last ``RUN_FLOATS`` of ``memory``, float32 (floats, consumers).
    """

    floats: cute.Tensor
    memory: cute.Tensor
    first_thread: int

    def place(self) -> tuple[Int32, Int32]:
        return place_behind(self.first_thread)

    @cute.jit
    def claim(self):
        """The warpgroup may write here: nobody reads O of the tile before, nor what it has written since."""
        wg, thread = self.place()
        # Who stores O has none under way that is still read.
        if thread < cute.arch.WARP_SIZE:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        sync_warpgroup(wg)

    @cute.jit
    def forget_sums(self):
        """By a warp, before a walk that may keep some."""
        if cute.arch.lane_idx() == 0:
            self.words_of_warp()[UNIT] = Int32(NO_SUMS)
        cute.arch.sync_warp()

    @cute.jit
    def keep(self, measures: list[Float32], unit: Float32):
        """What sums of the thread's rows are measured from, of which all lanes of a row say the same, and their unit.

        What was kept before has been read: shuffles of all lanes, by which they agree, wait for what came of it.
        """
        lane = cute.arch.lane_idx()
        if lane % LANES_PER_ROW == 0:
            for r in cutlass.range_constexpr(ROWS_PER_THREAD):
                self._measures()[lane // LANES_PER_ROW, r] = measures[r]
        if cute.arch.lane_idx() == 0:
            self.words_of_warp()[UNIT] = unit.bitcast(Int32)
        cute.arch.sync_warp()

    def has_sums(self) -> Boolean:
        """Whether some were kept since the walk began."""
        return self.words_of_warp()[UNIT] != NO_SUMS

    def kept_measures(self) -> list[Float32]:
        row = cute.arch.lane_idx() // LANES_PER_ROW
        return [self._measures()[row, r] for r in range(ROWS_PER_THREAD)]

    def kept_unit(self) -> Float32:
        return self.words_of_warp()[UNIT].bitcast(Float32)

    def words_of_warp(self) -> cute.Tensor:
        wg, thread = self.place()
        first = self.memory.shape[0] - RUN_FLOATS + (thread >> LOG_WARP_SIZE) * WARP_WORDS
        words = cute.recast_ptr(self.memory[None, wg].iterator + first, dtype=Int32)
        return cute.make_tensor(words, cute.make_layout(WARP_WORDS))

    def _measures(self) -> cute.Tensor:
        """Float32 (pairs of rows, rows of a thread)."""
        words = cute.recast_ptr(self.words_of_warp().iterator + MEASURES, dtype=Float32)
        pairs = cute.arch.WARP_SIZE // LANES_PER_ROW
        layout = cute.make_layout((pairs, ROWS_PER_THREAD), stride=(ROWS_PER_THREAD, 1))
        return cute.make_tensor(words, layout)

"""Means that V was quantized without, added back: that of all keys before the output is rounded, those of runs to O."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from cute_kernels.fast_math import exp2
from cute_kernels.fragments import (
    COLUMNS_PER_GROUP,
    COLUMNS_PER_PAIR,
    LANES_PER_ROW,
    ROWS_PER_THREAD,
    as_rows,
    pair_of_quads,
)
from cute_kernels.integers import minimum
from cute_kernels.softmax import clear_empty_rows, normalize_rows, scale_rows
from hopper.config import WARPGROUP_THREADS
from hopper.forward.barriers import sync_warpgroup
from hopper.forward.fp8.config import NOTE_FLOATS
from hopper.forward.fp8.staging import Staging, place_behind
from hopper.forward.unscaled import NoCorrection
from hopper.quantize.words import multiply_add

LOG_LANES_PER_ROW = LANES_PER_ROW.bit_length() - 1

HEAD, ENTRY, BEGIN = 4, 5, 6
"""Which of a warp's words is what, behind four that are not 0 where means of a head change."""

NOTE_WORDS = NOTE_FLOATS * LANES_PER_ROW // WARPGROUP_THREADS
"""Of two rows."""

RUNS_AT_HAND = 32
"""Whose differences have room where a warpgroup's O is staged, which is of 64 rows and 16 bits."""

COPIED = 4
"""Columns that a thread copies to shared memory: 16 bytes."""


@dataclass(frozen=True)
class MeanOfV(NoCorrection):
    """A vector for each key/value head: the mean that V was quantized without.

    ``vector`` is float32 (batch, kv_heads, head_dim_v), or (batch, kv_heads, 0) to add nothing. A copy of that of a
    tile's head is on its way to ``memory`` (head_dim_v, consumers) while the tile is worked on: in the epilogue nobody
    waits for global memory. Threads from ``first_thread`` on are consumers. With ``has_quads`` columns are in the order
    of ``pair_of_quads``. What only these two functions need is not kept in registers.
    """

    vector: cute.Tensor
    memory: cute.Tensor
    first_thread: int
    has_quads: bool

    @cute.jit
    def begin(self, head_kv: Int32, batch: Int32):
        """All warps of the warpgroup have read what is written over: a barrier of the last epilogue lies between."""
        wg, thread = self._place()
        if thread * COPIED < self.vector.shape[2]:
            offset = Int64(batch) * self.vector.stride[0] + Int64(head_kv) * self.vector.stride[1]
            source = self.vector.iterator.toint() + 4 * (offset + thread * COPIED)
            cute.arch.inline_ptx(
                "cp.async.cg.shared.global [{$r0}], [{$r1}], 16;",
                read_only_args=[self.memory[None, wg].iterator + thread * COPIED, source],
            )
        cute.arch.cp_async_commit_group()

    @cute.jit
    def normalize(self, acc: cute.Tensor, inverse_sum: cute.Tensor):
        """The product and the sum are one FMA, which rounds once. A row without keys becomes 0.

        Columns past head_dim_v, which the store clips, take what the last group of columns does: no branch a column.
        """
        columns = self.vector.shape[2]
        if columns > 0:
            cute.arch.cp_async_wait_group(0)
            wg, thread = self._place()
            sync_warpgroup(wg)
            rows, memory = as_rows(acc), self.memory[None, wg]
            for j in cutlass.range_constexpr(rows.shape[1][1]):
                pair = cute.make_rmem_tensor(COLUMNS_PER_PAIR, Float32)
                number = self._pair(j, thread)
                cute.autovec_copy(cute.local_tile(memory, (COLUMNS_PER_PAIR,), (number,)), pair)
                for r in cutlass.range_constexpr(ROWS_PER_THREAD):
                    for e in cutlass.range_constexpr(COLUMNS_PER_PAIR):
                        rows[r, (e, j)] = multiply_add(rows[r, (e, j)], inverse_sum[r], pair[e])
            clear_empty_rows(acc, inverse_sum)
            if const_expr(self.has_quads):
                # No barrier of the epilogue follows.
                sync_warpgroup(wg)
        elif const_expr(self.has_quads):
            scale_rows(acc, inverse_sum)
            clear_empty_rows(acc, inverse_sum)
        else:
            normalize_rows(acc, inverse_sum)

    def _pair(self, j: int, thread: Int32) -> Int32:
        """Number of a thread's pair of columns ``j``."""
        if self.has_quads:
            return pair_of_quads(j, thread)
        return j * LANES_PER_ROW + thread % LANES_PER_ROW

    def _place(self) -> tuple[Int32, Int32]:
        return place_behind(self.first_thread)


@dataclass(frozen=True)
class MeansOfRuns(MeanOfV):
    """``MeanOfV`` where runs of key blocks may have been quantized without a mean each.

    Runs are numbered as the walk comes to them, the run of the last keys first. ``differences`` is float32 (batch,
    runs, kv_heads, head_dim_v), 16-byte aligned, with as many columns behind its end as the config has more than it:
    the mean of the run in front, less a run's own; what the first run has is not read. ``changes`` is int32 (batch,
    kv_heads, 4), 0 where all runs of a head lost the same. Both have no runs and no heads where that is so of all.
    ``vector`` is the mean of the run that is visited last.

    That mean is added to the whole output. What O lacks is then, of each run but the last, the sum of the run's P times
    what its mean is more: by parts, the sum over the edges between two runs of P of all keys in front of the edge,
    times the difference there. So where the walk comes to an edge, the sums of the rows so far are noted, and at the
    end of the tile O is given what it lacks. Until then it holds what varies alone: FP8 WGMMA loses little of that.
    ``notes``, float32, has ``NOTE_FLOATS`` for each consumer and run: of each two rows of a thread their sums, and the
    shifts that these are measured from.

    A thread has a quarter of the columns, so from global memory each difference would come four times to each warp, and
    late. So those of ``RUNS_AT_HAND`` runs come to ``staging`` first. Among its words a warp keeps the changes of its
    tile's head, the head, the batch entry, and the run that the walk begins in.
    """

    differences: cute.Tensor
    changes: cute.Tensor
    notes: cute.Tensor
    staging: Staging

    @cute.jit
    def begin(self, head_kv: Int32, batch: Int32):
        words = self.staging.words_of_warp()
        if cute.arch.lane_idx() == 0:
            if self.changes.shape[1] > 0:
                heads_before = Int64(batch) * self.changes.shape[1] + head_kv
                source = self.changes.iterator.toint() + heads_before * (4 * COPIED)
                cute.arch.inline_ptx(
                    "cp.async.cg.shared.global [{$r0}], [{$r1}], 16;",
                    read_only_args=[words.iterator, source],
                )
            else:
                for i in cutlass.range_constexpr(COPIED):
                    words[i] = Int32(0)
            words[HEAD], words[ENTRY] = head_kv, batch
        MeanOfV.begin(self, head_kv, batch)

    @cute.jit
    def begin_walk(self, run: Int32):
        """In this run of the sequence."""
        words = self.staging.words_of_warp()
        if cute.arch.lane_idx() == 0:
            words[BEGIN] = run
            self.staging.forget_sums(words)

    @cute.jit
    def has_changes(self) -> Boolean:
        """Of the tile's head."""
        words = self.staging.words_of_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.cp_async_wait_group(0)
        cute.arch.sync_warp()
        changes = cute.make_rmem_tensor(COPIED, Int32)
        cute.autovec_copy(cute.make_tensor(words.iterator, changes.layout), changes)
        # All lanes say the same; so the compiler knows.
        return cute.arch.vote_any_sync((changes[0] | changes[1] | changes[2] | changes[3]) != 0)

    def runs_in_front(self, run: Int32) -> Int32:
        """Of a run that the walk has come to, those that it has visited."""
        return run - self._begin()

    @cute.jit
    def note(self, row_sum: cute.Tensor, shift: cute.Tensor, run: Int32):
        """The sums of the rows so far, of which the thread has parts, where the walk comes to ``run``."""
        note = cute.make_rmem_tensor(NOTE_WORDS, Float32)
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            note[r] = cute.arch.warp_reduction_sum(row_sum[r], threads_in_group=LANES_PER_ROW)
            note[ROWS_PER_THREAD + r] = shift[r]
        if cute.arch.lane_idx() % LANES_PER_ROW == 0:
            cute.autovec_copy(note, self._note_of(run))

    @cute.jit
    def add(self, acc: cute.Tensor, shift: cute.Tensor, unit: Float32):
        """Give O of a tile, in units of ``unit``, what it lacks; ``shift`` is what its rows are measured from.

        A lane of a row reads what was noted at one of four edges, and the next while these are worked on.
        """
        begin, runs = self._begin(), self.differences.shape[1]
        lane = self._place()[1] % cute.arch.WARP_SIZE
        of_row = lane % LANES_PER_ROW
        inverse = cute.arch.rcp_approx(unit)
        note = cute.make_rmem_tensor(NOTE_WORDS, Float32)
        for first in cutlass.range(begin + 1, runs, RUNS_AT_HAND, unroll=1):
            self._fetch(first)
            self._read_note(note, first + of_row)
            stop = minimum(first + RUNS_AT_HAND, runs)
            for start in cutlass.range(first, stop, LANES_PER_ROW, unroll=1):
                factors = self._sums_of(note, shift, inverse)
                self._read_note(note, start + LANES_PER_ROW + of_row)
                if start == first:
                    cute.arch.cp_async_wait_group(0)
                    sync_warpgroup(self._place()[0])
                for run in cutlass.range(start, minimum(start + LANES_PER_ROW, stop), unroll=1):
                    of_run = [cute.arch.shuffle_sync(x, lane - of_row + run - start) for x in factors]
                    self._add_difference(acc, of_run, run - first)

    @cute.jit
    def _fetch(self, first: Int32):
        """The differences of ``RUNS_AT_HAND`` runs of the tile's head, or fewer, are on their way to where O will be
        staged."""
        self.staging.claim()
        wg, thread = self._place()
        words, columns = self.staging.words_of_warp(), self.staging.floats.shape[0] // RUNS_AT_HAND
        lanes = columns // COPIED
        rows = WARPGROUP_THREADS // lanes
        number, column = thread // lanes, thread % lanes * COPIED
        offset, (by_entry, by_run, by_head) = Int64(column), self.differences.stride[:3]
        for index, stride in ((words[ENTRY], by_entry), (first + number, by_run), (words[HEAD], by_head)):
            offset += Int64(index) * stride
        source, target = (
            self.differences.iterator.toint() + 4 * offset,
            self.staging.floats[None, wg].iterator,
        )
        count = minimum(self.differences.shape[1] - first, RUNS_AT_HAND)
        for own in cutlass.range(number, count, rows, unroll=1):
            cute.arch.inline_ptx(
                "cp.async.cg.shared.global [{$r0}], [{$r1}], 16;",
                read_only_args=[target + own * columns + column, source],
            )
            source += Int64(4 * rows) * by_run
        cute.arch.cp_async_commit_group()

    @cute.jit
    def _read_note(self, note: cute.Tensor, run: Int32):
        """Of the thread's rows, at the edge in front of ``run``; of one that is not there that of the last."""
        cute.autovec_copy(self._note_of(minimum(run, self.differences.shape[1] - 1)), note)

    @cute.jit
    def _sums_of(self, note: cute.Tensor, shift: cute.Tensor, inverse: Float32) -> list[Float32]:
        """The sums of P of both rows that were noted, as O has them."""
        sums = []
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            so_far = note[r] * inverse * exp2(note[ROWS_PER_THREAD + r] - shift[r])
            # A row without a key so far has no shift.
            sums.append(so_far if note[r] != Float32(0.0) else Float32(0.0))
        return sums

    @cute.jit
    def _add_difference(self, acc: cute.Tensor, factors: list, number: Int32):
        """Add these times the difference that is number so of those at hand. Columns past head_dim_v, which the store
        clips, take what lies behind."""
        wg, thread = self._place()
        rows, columns = as_rows(acc), self.staging.floats.shape[0] // RUNS_AT_HAND
        first = number * columns + COLUMNS_PER_PAIR * self._pair(0, thread)
        difference = self.staging.floats[None, wg].iterator + first
        # Neighbouring pairs of columns are loaded at once.
        pairs = 2 if self.has_quads else 1
        for j in cutlass.range_constexpr(0, rows.shape[1][1], pairs):
            of_pairs = cute.make_rmem_tensor(pairs * COLUMNS_PER_PAIR, Float32)
            cute.autovec_copy(cute.make_tensor(difference + j * COLUMNS_PER_GROUP, of_pairs.layout), of_pairs)
            for r in cutlass.range_constexpr(ROWS_PER_THREAD):
                for i in cutlass.range_constexpr(pairs * COLUMNS_PER_PAIR):
                    e, pair = i % COLUMNS_PER_PAIR, j + i // COLUMNS_PER_PAIR
                    rows[r, (e, pair)] = multiply_add(of_pairs[i], factors[r], rows[r, (e, pair)])

    def _begin(self) -> Int32:
        """The run that the walk begins in. All lanes say the same; so the compiler knows."""
        return cute.arch.make_warp_uniform(self.staging.words_of_warp()[BEGIN])

    def _note_of(self, run: Int32) -> cute.Tensor:
        """Where that of the thread's rows is."""
        wg, thread = self._place()
        consumer = cute.arch.block_idx()[0] * self.memory.shape[1] + wg
        number = consumer * self.differences.shape[1] + run
        place = Int64(number) * NOTE_FLOATS + (thread >> LOG_LANES_PER_ROW) * NOTE_WORDS
        address = self.notes.iterator.toint() + 4 * place
        pointer = cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=4 * NOTE_WORDS)
        return cute.make_tensor(pointer, cute.make_layout(NOTE_WORDS))

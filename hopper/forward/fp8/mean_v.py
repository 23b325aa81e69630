"""Means that V was quantized without, added back: that of all keys before the output is rounded, those of runs to O."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from cute_kernels.fast_math import exp2, pin
from cute_kernels.fragments import (
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
from hopper.forward.fp8.config import NOTE_FLOATS, RUN_FLOATS
from hopper.forward.unscaled import NoCorrection
from hopper.quantize.words import multiply_add
from hopper.tiles import WARPS_PER_WARPGROUP

WARP_WORDS = RUN_FLOATS // WARPS_PER_WARPGROUP
"""Of ``MeansOfRuns``, for each warp."""

HEAD, ENTRY, BEGIN = 4, 5, 6
"""Which of them is what, behind four that are not 0 where means of a head change."""

NOTE_WORDS = NOTE_FLOATS * LANES_PER_ROW // WARPGROUP_THREADS
"""Of two rows."""

RUNS_AT_ONCE = 2
"""Of which a thread has the means under way."""

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
        """(warpgroup, thread of it): read where they are asked for."""
        thread = pin(cute.arch.thread_idx()[0], Int32) - self.first_thread
        return thread // WARPGROUP_THREADS, thread % WARPGROUP_THREADS


@dataclass(frozen=True)
class MeansOfRuns(MeanOfV):
    """``MeanOfV`` where runs of key blocks may have been quantized without a mean each.

    ``means`` is float32 (batch, runs, kv_heads, head_dim_v), 16-byte aligned, the run of the last keys first, with as
    many columns behind its end as the config has more than it. ``changes`` is int32 (batch, kv_heads, 4), 0 where all
    runs of a head lost the same. Both have no runs and no heads where that is so of all. ``vector`` is the mean of the
    run that is visited last.

    Of a run without its mean m, O lacks m times the sum of the run's P. So where the walk leaves a run, the sums of the
    rows so far are noted, and at the end of the tile O is given what it lacks. Until then it holds what varies alone:
    FP8 WGMMA loses little of that. ``notes``, float32, has ``NOTE_FLOATS`` for each consumer and run: of each two rows
    of a thread their sums, and the shifts that these are measured from.

    Behind the columns of ``memory`` a warp keeps the changes of its tile's head, the head, the batch entry, and the run
    that the walk begins in.
    """

    means: cute.Tensor
    changes: cute.Tensor
    notes: cute.Tensor

    @cute.jit
    def begin(self, head_kv: Int32, batch: Int32):
        words = self._words_of_warp()
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
        words = self._words_of_warp()
        if cute.arch.lane_idx() == 0:
            words[BEGIN] = run

    @cute.jit
    def has_changes(self) -> Boolean:
        """Of the tile's head."""
        words = self._words_of_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.cp_async_wait_group(0)
        cute.arch.sync_warp()
        changes = cute.make_rmem_tensor(COPIED, Int32)
        cute.autovec_copy(cute.make_tensor(words.iterator, changes.layout), changes)
        # All lanes say the same; so the compiler knows.
        return cute.arch.vote_any_sync((changes[0] | changes[1] | changes[2] | changes[3]) != 0)

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

        That is the sum over runs of the row's sum of P times the mean, but for the mean of the last run, which the
        output is given. Some runs at a time, so that loads are under way together.
        """
        words, runs = self._words_of_warp(), self.means.shape[1]
        inverse = cute.arch.rcp_approx(unit)
        before = cute.make_rmem_tensor(ROWS_PER_THREAD, Float32)
        before.fill(0.0)
        # A walk that begins in the last run has noted nothing.
        end = runs if words[BEGIN] + 1 < runs else Int32(0)
        for start in cutlass.range(words[BEGIN], end, RUNS_AT_ONCE, unroll=1):
            for i in cutlass.range_constexpr(RUNS_AT_ONCE):
                run = start + i
                note = cute.make_rmem_tensor(NOTE_WORDS, Float32)
                cute.autovec_copy(self._note_of(minimum(run + 1, runs - 1)), note)
                factors = []
                for r in cutlass.range_constexpr(ROWS_PER_THREAD):
                    so_far = note[r] * inverse * exp2(note[ROWS_PER_THREAD + r] - shift[r])
                    # A row without a key so far has no shift. In the last run all is there but what came before it.
                    so_far = so_far if note[r] != Float32(0.0) and run + 1 < runs else Float32(0.0)
                    factors.append(so_far - before[r])
                    before[r] = so_far
                self._add_mean(acc, factors, (words[ENTRY], minimum(run, runs - 1), words[HEAD]))

    @cute.jit
    def _add_mean(self, acc: cute.Tensor, factors: list, indices: tuple[Int32, Int32, Int32]):
        """Add these times the mean with these ``indices``. Columns past head_dim_v, which the store clips, take what
        lies behind."""
        thread, offset = pin(cute.arch.thread_idx()[0], Int32), Int64(0)
        for index, stride in zip(indices, self.means.stride[:3], strict=True):
            offset += Int64(index) * stride
        row = self.means.iterator.toint() + 4 * offset
        rows = as_rows(acc)
        # Neighbouring pairs of columns are loaded at once.
        pairs = 2 if self.has_quads else 1
        for j in cutlass.range_constexpr(0, rows.shape[1][1], pairs):
            columns = cute.make_rmem_tensor(pairs * COLUMNS_PER_PAIR, Float32)
            place = row + 4 * COLUMNS_PER_PAIR * self._pair(j, thread)
            pointer = cute.make_ptr(
                Float32, place, cute.AddressSpace.gmem, assumed_align=4 * cute.size(columns)
            )
            cute.autovec_copy(cute.make_tensor(pointer, columns.layout), columns)
            for r in cutlass.range_constexpr(ROWS_PER_THREAD):
                for i in cutlass.range_constexpr(pairs * COLUMNS_PER_PAIR):
                    e, number = i % COLUMNS_PER_PAIR, j + i // COLUMNS_PER_PAIR
                    rows[r, (e, number)] = multiply_add(columns[i], factors[r], rows[r, (e, number)])

    def _note_of(self, run: Int32) -> cute.Tensor:
        """Where that of the thread's rows is."""
        wg, thread = self._place()
        consumer = cute.arch.block_idx()[0] * self.memory.shape[1] + wg
        number = consumer * self.means.shape[1] + run
        place = Int64(number) * NOTE_FLOATS + thread // LANES_PER_ROW * NOTE_WORDS
        address = self.notes.iterator.toint() + 4 * place
        pointer = cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=4 * NOTE_WORDS)
        return cute.make_tensor(pointer, cute.make_layout(NOTE_WORDS))

    def _words_of_warp(self) -> cute.Tensor:
        wg, thread = self._place()
        first = self.memory.shape[0] - RUN_FLOATS + thread // cute.arch.WARP_SIZE * WARP_WORDS
        words = cute.recast_ptr(self.memory[None, wg].iterator + first, dtype=Int32)
        return cute.make_tensor(words, cute.make_layout(WARP_WORDS))

"""Means that V was quantized without, added back: that of all keys before the output is rounded, those of runs to O."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.nvgpu.warpgroup import OperandSource
from cutlass.utils import hopper_helpers

from cute_kernels.fast_math import exp2, pin
from cute_kernels.fragments import (
    COLUMNS_PER_PAIR,
    LANES_PER_ROW,
    ROWS_PER_THREAD,
    as_rows,
    pair_of_quads,
)
from cute_kernels.integers import maximum, minimum
from cute_kernels.softmax import clear_empty_rows, normalize_rows, scale_rows
from hopper.config import WARPGROUP_ROWS, WARPGROUP_THREADS
from hopper.forward.barriers import sync_warpgroup
from hopper.forward.fp8.config import NOTE_FLOATS, Fp8ForwardConfig
from hopper.forward.fp8.staging import Staging, place_behind
from hopper.forward.unscaled import NoCorrection
from hopper.mean.config import EDGES_AT_ONCE, WORDS_OF_EDGES
from hopper.mean.edges import split
from hopper.quantize.words import multiply_add
from hopper.tiles import swizzled_layout
from hopper.wgmma import issue_gemm

LOG_LANES_PER_ROW = LANES_PER_ROW.bit_length() - 1

HEAD, ENTRY, BEGIN = 4, 5, 6
"""Which of a warp's words is what, behind four that are not 0 where means of a head change."""

NO_EDGE = -1
"""In place of the number of a block behind an edge."""

NOTE_WORDS = NOTE_FLOATS * LANES_PER_ROW // WARPGROUP_THREADS
"""Of two rows."""

STEPS_AT_HAND = 4
"""Whose differences have room where a warpgroup's O is staged, which is of 64 rows and 16 bits."""

DEPTH = 2 * WORDS_OF_EDGES
"""Columns of operand A of a WGMMA."""

COPIED = 4
"""Columns that a thread copies to shared memory: 16 bytes."""


@dataclass(frozen=True)
class MeanOfV(NoCorrection):
    """A vector for each key/value head: the mean that V was quantized without.

    ``vector`` is float32 (batch, kv_heads, head_dim_v), or (batch, kv_heads, 0) to add nothing. A copy of that of a
    tile's head is on its way to ``memory`` (head_dim_v, consumers) while the tile is worked on: in the epilogue nobody
    waits for global memory. Threads from ``first_thread`` on are consumers. With ``has_quads`` columns are in the order
    of ``pair_of_quads``; with ``is_last`` O goes from registers, so that no barrier of the epilogue follows. What only
    these two functions need is not kept in registers.
    """

    vector: cute.Tensor
    memory: cute.Tensor
    first_thread: int
    has_quads: bool
    is_last: bool

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
            if const_expr(self.is_last):
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

    Runs are numbered as the walk comes to them, the run of the last keys first. ``differences`` is int32 (batch, steps,
    kv_heads, 8 head_dim_v), 16-byte aligned, with as many words behind its end as a head of the config has more than
    one of it: the mean of the run in front, less a run's own, four runs a step (``hopper.mean.edges``). ``changes`` is
    int32 (batch, kv_heads, 4), 1 where runs of a head lost something else than others, else 0. Both have no steps and
    no heads where all runs of all heads lost the same. ``vector`` is the mean of the run that is visited last.

    That mean is added to the whole output. What O lacks is then, of each run but the last, the sum of the run's P times
    what its mean is more: by parts, the sum over the edges between two runs of P of all keys in front of the edge,
    times the difference there. So where the walk comes to an edge, the sums of the rows so far are noted, and at the
    end of the tile O is given what it lacks: a product of two matrices, which the tensor cores make in 16 bits. Until
    then O holds what varies alone: FP8 WGMMA loses little of that. ``notes``, float32, has for each CTA and run
    ``NOTE_FLOATS`` of each consumer: of each two rows of a thread their sums, and the shifts that these are measured
    from.

    Differences of ``STEPS_AT_HAND`` come to ``staging`` first. Among its words a warp keeps the changes of its tile's
    head, the head, the batch entry, and the run that the walk begins in. What the walk asks for is in registers:
    ``changed`` is 1 where means of that head change, else 0; ``edge`` is then the next block behind an edge, else -1;
    ``first_end`` would be the block behind the edge at which the first sum of the tile ends.
    """

    config: Fp8ForwardConfig
    differences: cute.Tensor
    changes: cute.Tensor
    notes: cute.Tensor
    staging: Staging
    changed: cute.Tensor
    edge: cute.Tensor
    first_end: cute.Tensor

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
    def begin_walk(self, run: Int32, blocks_of_it: Int32, n_block: Int32):
        """With block ``n_block``, which has so many blocks of its ``run`` behind it: under the first product of a tile,
        where nobody waits for what ``begin`` has asked for."""
        words = self.staging.words_of_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.cp_async_wait_group(0)
        cute.arch.sync_warp()
        changes = cute.make_rmem_tensor(COPIED, Int32)
        cute.autovec_copy(cute.make_tensor(words.iterator, changes.layout), changes)
        # 0 or 1 each, as the finder writes them. All lanes say the same; so the compiler knows, and keeps the result in
        # a uniform register.
        self.changed[0] = cute.arch.warp_redux_sync(changes[0] | changes[1] | changes[2] | changes[3], "or")
        edge = n_block - (self.config.mean_blocks - blocks_of_it)
        self.edge[0] = self.changed[0] * (edge - NO_EDGE) + NO_EDGE
        self.first_end[0] = edge - (self.config.run_blocks - self.config.mean_blocks)
        if self.has_changes():
            if cute.arch.lane_idx() == 0:
                words[BEGIN] = run
            cute.arch.sync_warp()

    def has_changes(self) -> Boolean:
        """Of the tile's head."""
        return self.changed[0] != 0

    def runs_in_front(self, run: Int32) -> Int32:
        """Of a run that the walk has come to, those that it has visited."""
        return run - self._begin()

    @cute.jit
    def note(self, row_sum: cute.Tensor, shift: cute.Tensor, run: Int32):
        """The sums of the rows so far, of which the thread has parts, where the walk comes to ``run``. All lanes of a
        row write the same to one place: that is less than to ask who does."""
        note = cute.make_rmem_tensor(NOTE_WORDS, Float32)
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            note[r] = cute.arch.warp_reduction_sum(row_sum[r], threads_in_group=LANES_PER_ROW)
            note[ROWS_PER_THREAD + r] = shift[r]
        cute.autovec_copy(note, self._note_of(run))

    @cute.jit
    def add(self, acc: cute.Tensor, shift: cute.Tensor, unit: Float32):
        """Give O of a tile, in units of ``unit``, what it lacks; ``shift`` is what its rows are measured from.

        A lane of a row has what was noted at one of four edges. It reads those of all steps at hand at once, or those
        of the next step under a product.
        """
        first_edge, runs = self._begin() + 1, self.notes.shape[1]
        first_step, inverse = first_edge // EDGES_AT_ONCE, cute.arch.rcp_approx(unit)
        # None for a tile whose keys are of one run.
        steps = self.differences.shape[1] if first_edge < runs else first_step
        own = self._place()[1] % LANES_PER_ROW
        mma = self._mma(self.config.columns_pv)
        tA = cute.make_rmem_tensor(mma.partition_shape_A((WARPGROUP_ROWS, DEPTH)), BFloat16)
        # A descriptor says where they lie. How many columns are read is in the instruction.
        pairs, tB = cute.recast_tensor(tA, Int32), self._operand(self._mma(self._columns))
        ahead = STEPS_AT_HAND if self.config.reads_notes_at_once else 1
        notes = cute.make_rmem_tensor((NOTE_WORDS, ahead), Float32)
        for first in cutlass.range(first_step, steps, STEPS_AT_HAND, unroll=1):
            self._fetch(first)
            for i in cutlass.range_constexpr(ahead):
                self._read_note(notes[None, i], maximum((first + i) * EDGES_AT_ONCE + own, first_edge))
            cute.arch.cp_async_wait_group(0)
            cute.arch.fence_view_async_shared()
            sync_warpgroup(self._place()[0])
            for step in cutlass.range(first, minimum(first + STEPS_AT_HAND, steps), unroll=1):
                edge = step * EDGES_AT_ONCE + own
                is_there = (edge >= first_edge) & (edge < runs)
                sums = self._sums_of(notes[None, 0], shift, inverse, is_there)
                for r in cutlass.range_constexpr(ROWS_PER_THREAD):
                    # The larger numbers of a difference and the smaller ones are multiplied by the same.
                    pairs[r] = pairs[ROWS_PER_THREAD + r] = split(sums[r])
                issue_gemm(mma, acc, tA, tB[None, None, None, step - first], True)
                for i in cutlass.range_constexpr(1, ahead):
                    for w in cutlass.range_constexpr(NOTE_WORDS):
                        notes[w, i - 1] = notes[w, i]
                if const_expr(ahead < STEPS_AT_HAND):
                    self._read_note(notes[None, ahead - 1], edge + ahead * EDGES_AT_ONCE)
                warpgroup.wait_group(0)

    @cute.jit
    def _fetch(self, first: Int32):
        """The differences of ``STEPS_AT_HAND`` steps of the tile's head, or fewer, are on their way to where O will be
        staged."""
        self.staging.claim()
        wg, thread = self._place()
        words, (by_entry, by_step, by_head) = self.staging.words_of_warp(), self.differences.stride[:3]
        offset = Int64(thread * COPIED)
        for index, stride in ((words[ENTRY], by_entry), (first, by_step), (words[HEAD], by_head)):
            offset += Int64(index) * stride
        source = self.differences.iterator.toint() + 4 * offset
        target = self.staging.floats[None, wg].iterator + thread * COPIED
        words_of_step, at_once = self.staging.floats.shape[0] // STEPS_AT_HAND, WARPGROUP_THREADS * COPIED
        count = minimum(self.differences.shape[1] - first, STEPS_AT_HAND)
        for step in cutlass.range(count, unroll=1):
            for i in cutlass.range_constexpr(0, words_of_step, at_once):
                cute.arch.inline_ptx(
                    "cp.async.cg.shared.global [{$r0}], [{$r1}], 16;",
                    read_only_args=[target + step * words_of_step + i, source + 4 * i],
                )
            source += Int64(4) * by_step
        cute.arch.cp_async_commit_group()

    def _mma(self, columns: int) -> cute.TiledMma:
        """O += sums of P, in registers, times differences, in so many columns."""
        return hopper_helpers.make_trivial_tiled_mma(
            BFloat16,
            BFloat16,
            OperandMajorMode.K,
            OperandMajorMode.K,
            Float32,
            (1, 1, 1),
            (WARPGROUP_ROWS, columns),
            a_source=OperandSource.RMEM,
        )

    def _operand(self, mma: cute.TiledMma) -> cute.Tensor:
        """Operand B in shared memory, its steps last."""
        layout = swizzled_layout(self._columns, DEPTH, STEPS_AT_HAND, BFloat16)
        start = self.staging.floats[None, self._place()[0]].iterator
        smem = cute.make_tensor(cute.recast_ptr(start, layout.inner, BFloat16), layout.outer)
        return mma.make_fragment_B(mma.get_slice(0).partition_B(smem))

    @property
    def _columns(self) -> int:
        """Of the memory of O."""
        return self.staging.floats.shape[0] // (STEPS_AT_HAND * WORDS_OF_EDGES)

    @cute.jit
    def _read_note(self, note: cute.Tensor, run: Int32):
        """Of the thread's rows, at the edge in front of ``run``; of one that is not there that of the last."""
        cute.autovec_copy(self._note_of(minimum(run, self.notes.shape[1] - 1)), note)

    @cute.jit
    def _sums_of(
        self, note: cute.Tensor, shift: cute.Tensor, inverse: Float32, is_there: Boolean
    ) -> list[Float32]:
        """The sums of P of both rows that were noted, as O has them; 0 of an edge that the walk did not come to."""
        sums = []
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            so_far = note[r] * inverse * exp2(note[ROWS_PER_THREAD + r] - shift[r])
            # A row without a key so far has no shift.
            sums.append(so_far if is_there & (note[r] != Float32(0.0)) else Float32(0.0))
        return sums

    def _begin(self) -> Int32:
        """The run that the walk begins in. All lanes say the same; so the compiler knows."""
        return cute.arch.make_warp_uniform(self.staging.words_of_warp()[BEGIN])

    def _note_of(self, run: Int32) -> cute.Tensor:
        """Where that of the thread's rows is: those of consumers follow each other, as their threads do."""
        consumers = self.memory.shape[1]
        of_run = Int64(cute.arch.block_idx()[0] * self.notes.shape[1] + run) * (4 * NOTE_FLOATS * consumers)
        thread = pin(cute.arch.thread_idx()[0], Int32) - self.first_thread
        of_rows = (thread >> LOG_LANES_PER_ROW) * (4 * NOTE_WORDS)
        address = self.notes.iterator.toint() + of_run + Int64(of_rows)
        pointer = cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=4 * NOTE_WORDS)
        return cute.make_tensor(pointer, cute.make_layout(NOTE_WORDS))

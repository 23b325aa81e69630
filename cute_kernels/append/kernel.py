"""Writes new keys and values into a cache, in place, and rotates them and the queries."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_kernels.append.config import (
    BY_PAGE,
    BY_TOKEN,
    INTERLEAVED,
    THREADS,
    VECTOR,
    AppendConfig,
    validate_append_config,
)
from cute_kernels.append.rotary import Rotary, load, widen
from cute_kernels.append.spread import lanes_of, multiply_by_hadamard, scale_of
from cute_kernels.integers import ceil_div, divide, maximum, minimum
from cute_kernels.invariant import LoopInvariant

LANES, LOADS = 32, 4


@dataclass(frozen=True)
class Tokens(LoopInvariant):
    """New rows (batch, seqlen, heads, columns) with ``cu_seqlens`` (0,); or (1, total, heads, columns) of packed
    sequences, with their offsets (batch + 1,)."""

    rows: cute.Tensor
    cu_seqlens: cute.Tensor
    batch: Int32

    def count(self) -> Int32:
        return self.rows.shape[0] * self.rows.shape[1]

    def is_packed(self):
        return self.cu_seqlens.shape[0] > 0

    @cute.jit
    def find(self, row: Int32) -> tuple[Int32, Int32]:
        """(sequence, number in it) of a row, by a whole warp; (batch, 0) where no sequence has it.

        The sequence is as many as end before the row: every lane counts some, and no load waits for another.
        """
        sequence, number = Int32(self.batch), Int32(0)
        if row < self.count():
            if self.is_packed():
                found = cute.arch.warp_reduction_sum(self._count_ended(row))
                if found < self.batch:
                    first = self.cu_seqlens[found]
                    if first <= row:
                        sequence, number = found, row - first
            else:
                seqlen = self.rows.shape[1]
                sequence = divide(row, seqlen)
                number = row - sequence * seqlen
        return sequence, number

    @cute.jit
    def _count_ended(self, row: Int32) -> Int32:
        """Sequences that end before a row, of those that fall to this lane; some loads are under way at a time."""
        ended, last = Int32(0), self.batch - 1
        for first in cutlass.range(cute.arch.lane_idx(), self.batch, LANES * LOADS, unroll=1):
            numbers = [first + LANES * i for i in range(LOADS)]
            ends = [self.cu_seqlens[minimum(number, last) + 1] for number in numbers]
            for i in cutlass.range_constexpr(LOADS):
                ended += Int32(1) if ends[i] <= row and numbers[i] < self.batch else Int32(0)
        return ended

    @cute.jit
    def length(self, sequence: Int32) -> Int32:
        """Rows of a sequence."""
        length = self.rows.shape[1]
        if self.is_packed():
            length = maximum(self.cu_seqlens[sequence + 1] - self.cu_seqlens[sequence], 0)
        return length

    @cute.jit
    def place(self, row: Int32, sequence: Int32, number: Int32) -> tuple[Int32, Int32]:
        """Where in the tensor a row is, known before the sequence is where those are packed."""
        return (
            Int32(0) if self.is_packed() else sequence,
            row if self.is_packed() else number,
        )


@dataclass(frozen=True)
class Places(LoopInvariant):
    """Where the tokens of each sequence go.

    ``cache_seqlens`` (batch,) are the tokens there, ``batch_idx`` (batch,) or (0,) the entry of the table or of the
    cache that a sequence has, ``table`` (entries, pages) or (0, 0) for a cache without pages. A page holds
    ``page_size`` tokens.
    """

    cache_seqlens: cute.Tensor
    batch_idx: cute.Tensor
    table: cute.Tensor
    pages: Int32
    page_size: Int32

    def has_table(self):
        return self.table.shape[0] > 0

    @cute.jit
    def capacity(self) -> Int32:
        """Tokens that a sequence has room for."""
        return (self.table.shape[1] if self.has_table() else Int32(1)) * self.page_size

    @cute.jit
    def entry(self, sequence: Int32) -> Int32:
        entry = sequence
        if self.batch_idx.shape[0] > 0:
            entry = self.batch_idx[sequence]
        return entry

    @cute.jit
    def find(self, entry: Int32, position: Int32) -> tuple[Int32, Int32]:
        """(page, row in it) of a token; (-1, 0) where the cache has no place for it."""
        page, row = Int32(-1), Int32(0)
        entries = self.table.shape[0] if self.has_table() else self.pages
        if position >= 0 and position < self.capacity() and entry >= 0 and entry < entries:
            if self.has_table():
                number = divide(position, self.page_size)
                page, row = self.table[entry, number], position - number * self.page_size
            else:
                page, row = entry, position
        page = page if page < self.pages else Int32(-1)
        return page, row


class AppendKernel:
    """A CTA moves a part of a token: THREADS chunks of VECTOR columns, of any heads, of K, of V or of Q. A few more
    write lengths.

    So all of a decode step happens at once, and what a thread waits for is short: the length of its sequence, then the
    page and the angles, while its columns are already on their way. Whatever lengths, tables and offsets say, nothing
    outside of the tensors is read or written.
    """

    def __init__(self, config: AppendConfig):
        validate_append_config(config)
        self.config = config

    @cute.jit
    def __call__(
        self,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mKCache: cute.Tensor,
        mVCache: cute.Tensor,
        mCacheSeqlens: cute.Tensor,
        mCuSeqlensNew: cute.Tensor,
        mBatchIdx: cute.Tensor,
        mPageTable: cute.Tensor,
        mNewLengths: cute.Tensor,
        mKDescale: cute.Tensor | None,
        mVDescale: cute.Tensor | None,
        mCos: cute.Tensor | None,
        mSin: cute.Tensor | None,
        mFirstPositions: cute.Tensor | None,
        mQ: cute.Tensor | None,
        mQRotated: cute.Tensor | None,
        mCuSeqlensQ: cute.Tensor | None,
        query_step: Int32 | None,
        stream,
    ):
        """Launch, with what ``compile_append`` describes."""
        c = self.config
        parts = self._parts(mK, c.spreads_keys), self._parts(mV, c.spreads_values), Int32(0)
        rows = mK.shape[0] * mK.shape[1]
        if const_expr(self.config.rotates):
            parts = *parts[:2], self._parts(mQ, c.hadamard)
            rows = maximum(rows, mQ.shape[0] * mQ.shape[1])
        self.kernel(
            (mK, mV),
            (mKCache, mVCache),
            (mCacheSeqlens, mCuSeqlensNew, mBatchIdx, mPageTable),
            mNewLengths,
            (mKDescale, mVDescale) if const_expr(self.config.is_scaled) else (),
            (mCos, mSin, mFirstPositions) if const_expr(self.config.rotates) else (),
            (mQ, mQRotated, mCuSeqlensQ, query_step) if const_expr(self.config.rotates) else (),
            parts,
            rows,
        ).launch(
            grid=(rows + ceil_div(mCacheSeqlens.shape[0], THREADS), parts[0] + parts[1] + parts[2], 1),
            block=(THREADS, 1, 1),
            stream=stream,
        )

    @staticmethod
    def _parts(rows: cute.Tensor, spreads: bool) -> Int32:
        """CTAs for a token."""
        chunks = rows.shape[3] // VECTOR
        if const_expr(spreads):
            chunks = lanes_of(chunks)
        return ceil_div(rows.shape[2] * chunks, THREADS)

    @cute.kernel
    def kernel(
        self,
        new: tuple,
        caches: tuple,
        where: tuple,
        mNewLengths: cute.Tensor,
        descales: tuple,
        rotary: tuple,
        queries: tuple,
        parts: tuple,
        rows: Int32,
    ):
        row, part, _ = cute.arch.block_idx()
        mCacheSeqlens, mCuSeqlensNew, mBatchIdx, mPageTable = where
        batch = mCacheSeqlens.shape[0]
        places = Places(mCacheSeqlens, mBatchIdx, mPageTable, caches[0].shape[0], caches[0].shape[1])
        keys, values = (Tokens(tokens, mCuSeqlensNew, batch) for tokens in new)
        turns = ()
        if const_expr(self.config.rotates):
            turns = (Rotary(rotary[0], rotary[1], self.config.rotary == INTERLEAVED),)
        if row >= rows:
            # Behind the tokens, so that none waits for a length that is not its own.
            if part == 0:
                self._write_length(mNewLengths, keys, places, row - rows)
        elif part < parts[0]:
            scales = descales[:1]
            if const_expr(self.config.spreads_keys):
                self._append_spread(
                    keys, caches[0], places, scales, (turns, rotary[2:]), row, part, self.config.hadamard
                )
            else:
                self._append(keys, caches[0], places, scales, (turns, rotary[2:]), row, part)
        elif part < parts[0] + parts[1]:
            if const_expr(self.config.spreads_values):
                self._append_spread(
                    values, caches[1], places, descales[1:], ((), ()), row, part - parts[0], False
                )
            else:
                self._append(values, caches[1], places, descales[1:], ((), ()), row, part - parts[0])
        elif const_expr(self.config.rotates):
            asked = Tokens(queries[0], queries[2], batch)
            part_of_q = part - parts[0] - parts[1]
            if const_expr(self.config.hadamard):
                self._rotate_spread(
                    asked, queries[1], queries[3], places, (turns[0], rotary[2]), row, part_of_q
                )
            else:
                self._rotate(asked, queries[1], queries[3], places, (turns[0], rotary[2]), row, part_of_q)

    @cute.jit
    def _write_length(self, mNewLengths: cute.Tensor, keys: Tokens, places: Places, number: Int32):
        """A sequence for each thread: its tokens are those that there were and the new ones, if there is room."""
        sequence = number * THREADS + cute.arch.thread_idx()[0]
        if sequence < keys.batch:
            length = Int64(places.cache_seqlens[sequence]) + Int64(keys.length(sequence))
            mNewLengths[sequence] = Int32(minimum(maximum(length, Int64(0)), Int64(places.capacity())))

    @cute.jit
    def _append(
        self,
        tokens: Tokens,
        cache: cute.Tensor,
        places: Places,
        descale: tuple,
        rotary: tuple,
        row: Int32,
        part: Int32,
    ):
        """A chunk of K or V for each thread. ``rotary`` are a Rotary and its first positions, of V nothing."""
        turns, first_positions = rotary
        sequence, number = tokens.find(row)
        head, chunk = self._chunk(tokens.rows, part)
        if sequence < tokens.batch and head < tokens.rows.shape[2]:
            entry, index = tokens.place(row, sequence, number)
            source = tokens.rows[entry, index, head, None]
            own, other = load(source, chunk, VECTOR), ()
            if const_expr(len(turns) > 0):
                other = (load(source, turns[0].partner(chunk), VECTOR),)
            scale = Float32(1.0)
            if const_expr(self.config.is_scaled and self.config.scales != BY_PAGE):
                scale = descale[0][sequence, head]
            start = places.cache_seqlens[sequence]
            cache_entry = places.entry(sequence)
            angles = ()
            if const_expr(len(turns) > 0):
                first = self._first_position(first_positions[0], start, sequence)
                angles = turns[0].angles(first + number, chunk)
            page, slot = places.find(cache_entry, start + number)
            if page >= 0:
                target = cute.local_tile(cache[page, slot, head, None], (VECTOR,), (chunk,))
                if const_expr(len(turns) == 0 and not self.config.is_scaled):
                    cute.autovec_copy(own, target)
                else:
                    values = widen(own)
                    if const_expr(len(turns) > 0):
                        turns[0].turn(values, widen(other[0]), angles, chunk)
                    if const_expr(self.config.scales == BY_PAGE):
                        scale = descale[0][page, slot, head]
                    store(values, scale if const_expr(self.config.is_scaled) else None, target)

    @cute.jit
    def _append_spread(
        self,
        tokens: Tokens,
        cache: cute.Tensor,
        places: Places,
        descale: tuple,
        rotary: tuple,
        row: Int32,
        part: Int32,
        mixes: cutlass.Constexpr[bool],
    ):
        """``_append`` where the lanes that have a row need each other: for its largest number, whose scale is written,
        or with ``mixes`` for a Hadamard matrix."""
        turns, first_positions = rotary
        sequence, number = tokens.find(row)
        # The same for all lanes of a warp.
        if sequence < tokens.batch:
            head, chunk, chunks, lanes = self._spread_chunk(tokens.rows, part)
            is_there = head < tokens.rows.shape[2] and chunk < chunks
            start = places.cache_seqlens[sequence]
            values = cute.make_rmem_tensor(VECTOR, Float32)
            values.fill(0.0)
            if is_there:
                entry, index = tokens.place(row, sequence, number)
                source = tokens.rows[entry, index, head, None]
                values.store(load(source, chunk, VECTOR).load().to(Float32))
                if const_expr(len(turns) > 0):
                    other = load(source, turns[0].partner(chunk), VECTOR)
                    first = self._first_position(first_positions[0], start, sequence)
                    turns[0].turn(values, widen(other), turns[0].angles(first + number, chunk), chunk)
            if const_expr(mixes):
                multiply_by_hadamard(values, chunk, chunks)
            scale = Float32(1.0)
            if const_expr(self.config.scales == BY_TOKEN):
                scale = scale_of(values, lanes)
            page, slot = places.find(places.entry(sequence), start + number)
            if is_there and page >= 0:
                if const_expr(self.config.scales == BY_TOKEN):
                    if chunk == 0:
                        descale[0][page, slot, head] = scale
                    # Nothing but zeros has no largest number.
                    scale = Float32(1.0) if scale == Float32(0.0) else scale
                elif const_expr(self.config.scales == BY_PAGE):
                    scale = descale[0][page, slot, head]
                elif const_expr(self.config.is_scaled):
                    scale = descale[0][sequence, head]
                target = cute.local_tile(cache[page, slot, head, None], (VECTOR,), (chunk,))
                store(values, scale if const_expr(self.config.is_scaled) else None, target)

    @cute.jit
    def _rotate_spread(
        self,
        asked: Tokens,
        mRotated: cute.Tensor,
        step: Int32,
        places: Places,
        rotary: tuple,
        row: Int32,
        part: Int32,
    ):
        """``_rotate``, and a Hadamard matrix behind it."""
        turn, first_positions = rotary
        sequence, number = asked.find(row)
        if row < asked.count():
            head, chunk, chunks, _ = self._spread_chunk(asked.rows, part)
            entry, index = asked.place(row, sequence, number)
            is_there = head < asked.rows.shape[2] and chunk < chunks
            values = cute.make_rmem_tensor(VECTOR, Float32)
            values.fill(0.0)
            if is_there and sequence < asked.batch:
                source = asked.rows[entry, index, head, None]
                own, other = load(source, chunk, VECTOR), load(source, turn.partner(chunk), VECTOR)
                first = self._first_position(first_positions, places.cache_seqlens[sequence], sequence)
                values.store(own.load().to(Float32))
                turn.turn(values, widen(other), turn.angles(first + number * step, chunk), chunk)
            multiply_by_hadamard(values, chunk, chunks)
            if is_there:
                store(values, None, cute.local_tile(mRotated[entry, index, head, None], (VECTOR,), (chunk,)))

    @cute.jit
    def _rotate(
        self,
        asked: Tokens,
        mRotated: cute.Tensor,
        step: Int32,
        places: Places,
        rotary: tuple,
        row: Int32,
        part: Int32,
    ):
        """A chunk of Q for each thread, whose position is ``step`` behind that of the query before it; zeros in rows of
        no sequence."""
        turn, first_positions = rotary
        sequence, number = asked.find(row)
        head, chunk = self._chunk(asked.rows, part)
        if row < asked.count() and head < asked.rows.shape[2]:
            entry, index = asked.place(row, sequence, number)
            values = cute.make_rmem_tensor(VECTOR, Float32)
            values.fill(0.0)
            if sequence < asked.batch:
                source = asked.rows[entry, index, head, None]
                own, other = load(source, chunk, VECTOR), load(source, turn.partner(chunk), VECTOR)
                first = self._first_position(first_positions, places.cache_seqlens[sequence], sequence)
                angles = turn.angles(first + number * step, chunk)
                values.store(own.load().to(Float32))
                turn.turn(values, widen(other), angles, chunk)
            target = cute.local_tile(mRotated[entry, index, head, None], (VECTOR,), (chunk,))
            store(values, None, target)

    @staticmethod
    def _chunk(rows: cute.Tensor, part: Int32) -> tuple[Int32, Int32]:
        """(head, chunk of it) of this thread."""
        chunks = rows.shape[3] // VECTOR
        number = part * THREADS + cute.arch.thread_idx()[0]
        head = divide(number, chunks)
        return head, number - head * chunks

    @staticmethod
    def _spread_chunk(rows: cute.Tensor, part: Int32) -> tuple[Int32, Int32, Int32, Int32]:
        """(head, chunk of it, chunks that there are, lanes for them) of this thread."""
        chunks = rows.shape[3] // VECTOR
        lanes = lanes_of(chunks)
        number = part * THREADS + cute.arch.thread_idx()[0]
        head = divide(number, lanes)
        return head, number - head * lanes, chunks, lanes

    @staticmethod
    @cute.jit
    def _first_position(first_positions: cute.Tensor, start: Int32, sequence: Int32) -> Int32:
        """Position of the first new token of a sequence in the tables of a rotation."""
        first = start
        if first_positions.shape[0] > 0:
            first = first_positions[sequence]
        return first


@cute.jit
def store(values: cute.Tensor, scale, target: cute.Tensor):
    """Round float32 values, divided by ``scale`` unless that is None, and write them."""
    part = cute.make_rmem_tensor(VECTOR, target.element_type)
    if const_expr(scale is not None):
        for i in cutlass.range_constexpr(VECTOR):
            values[i] = values[i] / scale
    part.store(values.load().to(target.element_type))
    cute.autovec_copy(part, target)

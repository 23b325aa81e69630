"""What a CTA does to one item, a block or more of Q, K or V: load, rotate, find the scale, round, store."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float16, Float32, Int16, Int32, Int64, const_expr

from cute_kernels.fast_math import (
    join,
    multiply_add_halves,
    multiply_rounded,
    pack,
    pack_e4m3,
    pack_e4m3_of_float16,
    pin,
    subtract_halves,
)
from cute_kernels.hadamard import hadamard, hadamard_factor, scale_part
from cute_kernels.integers import maximum
from cute_kernels.invariant import LoopInvariant
from hopper.quantize.config import (
    CHUNK,
    FIT_SUMS,
    MIN_SCALE,
    MOST_FIT,
    MOST_OF_ELEMENT,
    BlockTiling,
    hadamard_blocks,
    is_power_of_two,
    length_feedback,
)
from hopper.quantize.halves import add_halves, halves_of, limit_halves, multiply_halves
from hopper.quantize.words import (
    coarse_reciprocal,
    load_async,
    multiply_add,
    permute,
    reciprocal,
    widen,
    widen_codes,
    words_at,
)

CHUNK_BYTES = 2 * CHUNK
CHUNK_WORDS = CHUNK // 2
SIGN = -0x80000000
FLOATS_PER_COPY = 4
SWAPPED = 0x1032
"""Selects the bytes of a word with its halves exchanged."""


@dataclass(frozen=True)
class Cta(LoopInvariant):
    """A thread's place in its CTA, and the shared memory that no operand owns.

    ``slots`` are 16 bytes a thread and chunk, which only that thread reads and writes: (4 words, thread, chunk).
    ``amax`` is (warp, 2, block): items that join take turns, so that one barrier each is enough. A warp that writes has
    passed the barrier of the item which had the other turn, and no warp came there before it had read what is now
    written over. An item without a barrier must not take a turn: nothing would stand between its two neighbours.
    """

    warps: int
    thread: Int32
    warp: Int32
    lane: Int32
    slots: cute.Tensor
    amax: cute.Tensor

    def take_slots(self, count: int) -> cute.Tensor:
        """The thread's chunks, once they have arrived: words in registers."""
        words = cute.make_rmem_tensor((CHUNK_WORDS, count), Int32)
        cute.arch.cp_async_wait_group(0)
        for i in range(count):
            cute.autovec_copy(self.slots[None, self.thread, i], words[None, i])
        return words

    @cute.jit
    def join(self, amax: cute.Tensor, turn: Int32):
        """Put the CTA's largest in place of each x >= 0. As integers, floats of one sign keep their order."""
        for b in cutlass.range_constexpr(cute.size(amax)):
            bits = cute.arch.warp_redux_sync(amax[b].bitcast(Int32), "max")
            if self.lane == 0:
                self.amax[self.warp, turn, b] = bits
        cute.arch.sync_threads()
        for b in cutlass.range_constexpr(cute.size(amax)):
            of_warp = self.amax[self.lane % self.warps, turn, b]
            amax[b] = cute.arch.warp_redux_sync(of_warp, "max").bitcast(Float32)


class DenseItems(LoopInvariant):
    """Where items lie in sequences of one length: a place is (item of the sequence, head, batch entry)."""

    def length(self, source: cute.Tensor, place: tuple) -> Int32:
        """Rows of the sequence."""
        return source.shape[1]

    def entry(self, place: tuple) -> Int32:
        """The entry of the first dimension of all tensors."""
        return place[2]

    def first_row(self, place: tuple) -> Int32 | int:
        """The first row of the sequence in its entry."""
        return 0

    def first_unit(self, place: tuple, rows: int) -> Int32 | int:
        """The first unit of ``rows`` rows that the sequence has to itself."""
        return 0

    def within(self, row: Int32, first_row: Int32 | int) -> Int32:
        """``row``, or the nearest that lies in the tensor; both are counted from row ``first_row`` of the entry. It may
        be negative where a packed sequence has no rows."""
        return row

    def is_own(self, block: Int32, of_all: Int32, rows: int, place: tuple) -> Boolean:
        """Whether the sequence has this block of ``rows`` rows; ``of_all`` is the number of blocks of an entry."""
        return block < of_all


class PackedItems(DenseItems):
    """In packed sequences, of which all tensors have one entry: a place is (item of the sequence, head, sequence, its
    first row, its rows)."""

    def length(self, source: cute.Tensor, place: tuple) -> Int32:
        return place[4]

    def entry(self, place: tuple) -> Int32 | int:
        return 0

    def first_row(self, place: tuple) -> Int32 | int:
        return place[3]

    def first_unit(self, place: tuple, rows: int) -> Int32 | int:
        return place[3] // rows + place[2]

    def within(self, row: Int32, first_row: Int32 | int) -> Int32:
        return maximum(row, -first_row)

    def is_own(self, block: Int32, of_all: Int32, rows: int, place: tuple) -> Boolean:
        """A sequence without rows has a block too, since attention reads the scale of the first one."""
        return block * rows < maximum(place[4], 1)


@dataclass(frozen=True)
class Operand(LoopInvariant):
    """Q or K: where its items come from and go to, and what is done to their rows.

    ``source`` is (batch, seqlen, heads, head_dim) of 16 bits, ``scale`` (batch, heads, blocks) float32, and ``data``
    e4m3 of the shape of ``source``, or the same numbers as float16. ``signs`` in shared memory are masks for pairs of
    columns, used if ``rotate``; ``mean`` float32 (batch, heads, head_dim) is subtracted if ``smooth``, by way of
    ``mean_memory`` (columns, 2) in shared memory. The largest of the values that share a scale
    becomes ``largest``. ``items`` says what a ``place`` is. Packed sequences have a batch of 1, a mean each, and blocks
    that none of them shares with another.
    """

    tiling: BlockTiling
    source: cute.Tensor
    data: cute.Tensor
    scale: cute.Tensor
    signs: cute.Tensor
    mean: cute.Tensor
    mean_memory: cute.Tensor
    rotate: bool
    smooth: bool
    largest: float
    items: DenseItems

    def rows_present(self, place: tuple) -> Int32:
        """Rows of an item that lie in the sequence; less than 1 where it has none."""
        rows = self.tiling.rows
        return cutlass.min(rows, self.items.length(self.source, place) - place[0] * rows)

    @property
    def _late_factor(self) -> float:
        """The rotation's factor where it is a power of two, and not applied to each value but to the maximum and
        to the inverse scale. These products are exact, but for values too small to leave a trace."""
        blocks = hadamard_blocks(self.tiling.head_dim)
        factor = hadamard_factor(blocks[0])
        return factor if self.rotate and len(blocks) == 1 and is_power_of_two(factor) else 1.0

    @cute.jit
    def start_loads(self, cta: Cta, place: tuple, parity: Int32):
        """Start loading an item into the slots, and the mean into the half of its memory that ``parity`` says. Rows
        behind the sequence become zeros."""
        t = self.tiling
        number, head = place[:2]
        present = self.rows_present(place)
        row_of_entry = self.items.first_row(place) + number * t.rows
        first = Int64(self.items.entry(place)) * self.source.stride[0]
        first = first + Int64(row_of_entry) * self.source.stride[1]
        first = first + Int64(head) * self.source.stride[2] + t.column(0, cta.lane)
        for p in cutlass.range_constexpr(t.passes):
            if t.is_full(p) or t.first_row(p, cta.warp) < t.rows:
                row = t.row(p, cta.warp, cta.lane)
                size = Int32(CHUNK_BYTES) if row < present else Int32(0)
                readable = self.items.within(cutlass.min(row, present - 1), row_of_entry)
                offset = first + Int64(readable) * self.source.stride[1]
                address = self.source.iterator.toint() + 2 * offset
                for c in cutlass.range_constexpr(t.chunks):
                    slot = cta.slots[None, cta.thread, p * t.chunks + c].iterator
                    load_async(slot, address + c * t.lanes * CHUNK_BYTES, size)
        if const_expr(self.smooth):
            if cta.thread < t.head_dim // FLOATS_PER_COPY:
                # Until the kernel in front, which may be at the mean still, has ended.
                cute.arch.griddepcontrol_wait()
                first = Int64(self._mean_of(place)) * self.mean.stride[0] + Int64(head) * self.mean.stride[1]
                first = first + cta.thread * FLOATS_PER_COPY
                half = self.mean_memory[None, parity].iterator + cta.thread * FLOATS_PER_COPY
                load_async(half, self.mean.iterator.toint() + 4 * first, Int32(CHUNK_BYTES))

    def _mean_of(self, place: tuple) -> Int32:
        """Which entry of ``mean`` an item loses."""
        return place[2]

    @cute.jit
    def quantize(self, cta: Cta, words: cute.Tensor, place: tuple, turn: Int32, parity: Int32) -> Int32:
        """Turn the words of an item, as ``Cta.take_slots`` gives them, into e4m3 and scales, and store both.

        ``turn`` is the half of ``Cta.amax`` that is free; returns the half for the next item. ``parity`` is that of
        ``start_loads``: a barrier after the mean has been read lies between this item and the next but one.
        """
        t = self.tiling
        mean = self.mean
        if const_expr(self.smooth):
            cute.arch.sync_threads()
            mean = self.mean_memory[None, parity]
        values = cute.make_rmem_tensor((CHUNK * t.chunks, t.passes), Float32)
        amax = cute.make_rmem_tensor(t.blocks, Float32)
        amax.fill(0.0)
        for p in cutlass.range_constexpr(t.passes):
            row = values[None, p]
            if const_expr(not t.is_full(p)):
                row.fill(0.0)  # else what idle warps do not set would be carried around the loop of the grid
            if t.is_full(p) or t.first_row(p, cta.warp) < t.rows:
                self._prepare(cta, row, words, p, place, mean)
                amax[t.block(p)] = cute.arch.fmax(amax[t.block(p)], finite_amax(row))
        cta.join(amax, turn)
        inverse = self._store_scales(cta, amax, place)
        for p in cutlass.range_constexpr(t.passes):
            self._put(cta, values[None, p], inverse[t.block(p)], p, place)
        self._finish(cta, place)
        return turn ^ 1

    @cute.jit
    def _prepare(
        self,
        cta: Cta,
        row: cute.Tensor,
        words: cute.Tensor,
        p: cutlass.Constexpr[int],
        place: tuple,
        mean: cute.Tensor,
    ):
        """What is rounded of the row of pass ``p``, but for a factor: less the mean, rotated, in float32."""
        self._widen(cta, row, words, p, place, mean)
        if const_expr(self.rotate):
            self._rotate(cta, row)

    @cute.jit
    def _widen(
        self,
        cta: Cta,
        row: cute.Tensor,
        words: cute.Tensor,
        p: cutlass.Constexpr[int],
        place: tuple,
        mean: cute.Tensor,
    ):
        """The row of pass ``p`` in float32, less the mean, its signs flipped."""
        t = self.tiling
        for c in cutlass.range_constexpr(t.chunks):
            flips = cute.make_rmem_tensor(CHUNK_WORDS, Int32)
            if const_expr(self.rotate):
                column = t.column(c, cta.lane)
                cute.autovec_copy(cute.local_tile(self.signs, (CHUNK_WORDS,), (column // CHUNK,)), flips)
            chunk = cute.make_tensor(row.iterator + c * CHUNK, cute.make_layout(CHUNK))
            for w in cutlass.range_constexpr(CHUNK_WORDS):
                word = words[w, p * t.chunks + c]
                if const_expr(self.rotate and not self.smooth):
                    word = word ^ flips[w]
                chunk[2 * w], chunk[2 * w + 1] = widen(word, self.source.element_type)
            if const_expr(self.smooth):
                is_present = t.row(p, cta.warp, cta.lane) < self.rows_present(place)
                self._subtract_mean(chunk, mean, t.column(c, cta.lane), is_present)
                if const_expr(self.rotate):
                    flip_signs(chunk, flips)

    @cute.jit
    def _subtract_mean(self, chunk: cute.Tensor, mean: cute.Tensor, column: Int32, is_present: Boolean):
        """A chunk less the mean; a row behind the sequence stays zero."""
        of_chunk = cute.make_rmem_tensor(CHUNK, Float32)
        cute.autovec_copy(cute.local_tile(mean, (CHUNK,), (column // CHUNK,)), of_chunk)
        factor = Float32(-1.0) if is_present else Float32(0.0)
        for i in cutlass.range_constexpr(CHUNK):
            chunk[i] = multiply_add(of_chunk[i], factor, chunk[i])

    @cute.jit
    def _rotate(self, cta: Cta, row: cute.Tensor):
        t = self.tiling
        first = 0
        for size in hadamard_blocks(t.head_dim):
            of_lane = size // t.lanes
            hadamard(row, first, of_lane, cta.lane % t.lanes, t.lanes, CHUNK)
            if const_expr(self._late_factor == 1.0):
                scale_part(row, first, of_lane, hadamard_factor(size))
            first += of_lane

    @cute.jit
    def _store_scales(self, cta: Cta, amax: cute.Tensor, place: tuple) -> cute.Tensor:
        """Store the scales of the blocks; returns what their rows are to be multiplied with."""
        number, head = place[:2]
        entry, blocks = self.items.entry(place), self.tiling.blocks
        rows = self.tiling.rows // blocks
        first = self.items.first_unit(place, rows)
        inverse = cute.make_rmem_tensor(blocks, Float32)
        for b in cutlass.range_constexpr(blocks):
            scale, inverse[b] = self._scale_of(amax[b])
            block = number * blocks + b
            if cta.thread == 0 and self.items.is_own(block, self.scale.shape[2], rows, place):
                self.scale[entry, head, first + block] = scale
        return inverse

    def _scale_of(self, amax: Float32) -> tuple[Float32, Float32]:
        """(the scale of values with this maximum, what they are to be multiplied with)."""
        largest = amax * Float32(self._late_factor)
        scale = self._final_scale(cute.arch.fmax(largest * Float32(self._unit), Float32(MIN_SCALE)))
        return scale, reciprocal(scale) * Float32(self._late_factor)

    @property
    def _unit(self) -> float:
        """Scale of values whose maximum is 1."""
        return 1.0 / self.largest

    def _final_scale(self, scale: Float32) -> Float32:
        return scale

    @cute.jit
    def _put(self, cta: Cta, row: cute.Tensor, inverse: Float32, p: cutlass.Constexpr[int], place: tuple):
        """Round the row of pass ``p`` and store it."""
        t, code_bytes = self.tiling, self.data.element_type.width // 8
        # Only the store is conditional: what an idle row computes is cheaper than registers that may be unset.
        codes = self._round(row, inverse)
        number, head = place[:2]
        row_of_item = t.row(p, cta.warp, cta.lane)
        row_of_entry = self.items.first_row(place) + number * t.rows + row_of_item
        offset = Int64(self.items.entry(place)) * self.data.stride[0]
        offset = offset + Int64(row_of_entry) * self.data.stride[1]
        offset = offset + Int64(head) * self.data.stride[2] + t.column(0, cta.lane)
        address = self.data.iterator.toint() + code_bytes * offset
        for c in cutlass.range_constexpr(t.chunks):
            words = (wide_words if code_bytes == 2 else code_words)(codes[c])
            if row_of_item < self.rows_present(place):
                first = address + c * t.lanes * CHUNK * code_bytes
                cute.autovec_copy(words, words_at(first, cute.size(words)))

    def _round(self, row: cute.Tensor, inverse: Float32) -> list[list[Int16]]:
        """A row times ``inverse`` in e4m3: pairs of codes of each chunk."""
        x = [row[i] * inverse for i in range(cute.size(row))]
        pairs = [pack_e4m3(*x[i : i + 2]) for i in range(0, len(x), 2)]
        return [pairs[i : i + CHUNK // 2] for i in range(0, len(pairs), CHUNK // 2)]

    def _finish(self, cta: Cta, place: tuple):
        """What is left to do once every row is put."""


@dataclass(frozen=True)
class RowScaledOperand(Operand):
    """Q with a scale for each row: ``scale`` is (batch, heads, seqlen). It is fitted to the codes once they are known
    (``hopper_attention.quantization_rules.fit_of_rows``).

    A row lies in one warp, so warps do not wait for each other, and what is done to one row is done before the next.
    """

    @cute.jit
    def quantize(self, cta: Cta, words: cute.Tensor, place: tuple, turn: Int32, parity: Int32) -> Int32:
        """As that of ``Operand``; without a barrier it takes no turn."""
        t = self.tiling
        for p in cutlass.range_constexpr(t.passes):
            if t.is_full(p) or t.first_row(p, cta.warp) < t.rows:
                row = cute.make_rmem_tensor(CHUNK * t.chunks, Float32)
                self._prepare(cta, row, words, p, place, self.mean)
                scale, inverse = self._scale_of(self._join_lanes(finite_amax(row), cute.arch.fmax))
                self._put(cta, row, inverse, p, place)
                self._store_scale(cta, scale * self._fit(row, inverse), p, place)
        return turn

    def _join_lanes(self, x: Float32 | Int32, join_two: Callable) -> Float32 | Int32:
        """What ``join_two`` makes of the lanes of a row."""
        distance = 1
        while distance < self.tiling.lanes:
            x = join_two(x, cute.arch.shuffle_sync_bfly(x, offset=distance))
            distance *= 2
        return x

    @cute.jit
    def _store_scale(self, cta: Cta, scale: Float32, p: cutlass.Constexpr[int], place: tuple):
        """Store the scale of the row of pass ``p``."""
        t = self.tiling
        number, head = place[:2]
        row_of_item = t.row(p, cta.warp, cta.lane)
        if cta.lane % t.lanes == 0 and row_of_item < self.rows_present(place):
            row = self.items.first_unit(place, 1) + number * t.rows + row_of_item
            self.scale[self.items.entry(place), head, row] = scale

    @cute.jit
    def _fit(self, row: cute.Tensor, inverse: Float32) -> Float32:
        """What the scale of a row is to be multiplied with for the least squared error, by its codes and their errors.

        Chunks have FIT_SUMS sums in turn, so that it does not matter how many lanes a row has.
        """
        t = self.tiling
        of_lane = FIT_SUMS // t.lanes
        errors, codes = ([pin(Int32(0), Int32) for _ in range(of_lane)] for _ in range(2))
        for c in cutlass.range_constexpr(t.chunks):
            for w in cutlass.range_constexpr(CHUNK // 2):
                first = c * CHUNK + 2 * w
                pair = row[first] * inverse, row[first + 1] * inverse
                code = widen_codes(pack_e4m3(*pair))
                error = subtract_halves(pack(*pair, Float16), code)
                errors[c % of_lane] = multiply_add_halves(code, error, errors[c % of_lane])
                codes[c % of_lane] = multiply_add_halves(code, code, codes[c % of_lane])
        both = [self._join_sums(*sums) for sums in zip(errors, codes, strict=True)]
        of_errors, of_codes = widen(reduce(add_halves, both), Float16)
        share = multiply_rounded(of_errors, coarse_reciprocal(of_codes))
        fit = Float32(1.0)
        if cute.math.absf(share) <= MOST_FIT:
            fit = 1.0 + share
        return fit

    def _join_sums(self, errors: Int32, codes: Int32) -> Int32:
        """Two sums of two float16 each, of all lanes of a row: that of errors and that of codes side by side."""
        lower, upper = permute(errors, codes, 0x5410), permute(errors, codes, 0x7632)
        return self._join_lanes(add_halves(lower, upper), add_halves)


@dataclass(frozen=True)
class LengthKeepingOperand(Operand):
    """K, whose rows keep their length (``hopper_attention.quantization_rules.round_rows``).

    Even and odd columns of four chunks are eight chains, pairs of float16: of one chunk in each lane where four share
    a row, of two in turn where two do. Behind each step of 32 columns they join.
    """

    def _round(self, row: cute.Tensor, inverse: Float32) -> list[list[Int16]]:
        t = self.tiling
        of_lane = FIT_SUMS // t.lanes
        # In registers, since these instructions take no constants.
        feedback = pin(Int32(halves_of(length_feedback(self.largest))), Int32)
        most = pin(Int32(halves_of(MOST_OF_ELEMENT)), Int32)
        total, codes = pin(Int32(0), Int32), []
        for step in range(0, t.chunks, of_lane):
            left = []
            for c in range(step, min(step + of_lane, t.chunks)):
                carry, pairs = total, []
                for i in range(c * CHUNK, (c + 1) * CHUNK, 2):
                    x = pack(row[i] * inverse, row[i + 1] * inverse, Float16)
                    code = pack_e4m3_of_float16(multiply_add_halves(x, limit_halves(carry, most), x))
                    error = subtract_halves(x, widen_codes(code))
                    carry = multiply_add_halves(multiply_halves(x, feedback), error, carry)
                    pairs.append(code)
                codes.append(pairs)
                left.append(subtract_halves(carry, total))
            total = add_halves(total, self._join_chains(left))
        return codes

    def _join_chains(self, left: list[Int32]) -> Int32:
        """The sum of what the chains have added in a step, in both halves of a word: of the chunks 0 and 2, of 1 and
        3, and of both."""
        of_lane = [add_halves(x, permute(x, x, SWAPPED)) for x in left]
        joined = reduce(add_halves, of_lane)
        distance = self.tiling.lanes // 2
        while distance:
            joined = add_halves(joined, cute.arch.shuffle_sync_bfly(joined, offset=distance))
            distance //= 2
        return joined


def flip_signs(chunk: cute.Tensor, flips: cute.Tensor):
    """Flip the signs of float32 values as masks for pairs of 16-bit values say."""
    for w in range(CHUNK_WORDS):
        chunk[2 * w] = (chunk[2 * w].bitcast(Int32) ^ (flips[w] << 16)).bitcast(Float32)
        chunk[2 * w + 1] = (chunk[2 * w + 1].bitcast(Int32) ^ (flips[w] & SIGN)).bitcast(Float32)


@cute.jit
def finite_amax(row: cute.Tensor) -> Float32:
    """The largest finite magnitude of some registers, at least 0. Infinities among them become NaN.

    The loop runs at most once. As a condition it would be turned into predicates, and be paid for every time.
    """
    amax = amax_without_nan(row)
    while amax == Float32.inf:
        nan_for_infinities(row)
        amax = amax_without_nan(row)
    return amax


def nan_for_infinities(row: cute.Tensor):
    """x + 0 x for each x."""
    for i in range(cute.size(row)):
        row[i] = cute.arch.inline_ptx(
            "fma.rn.f32 {$w0}, {$r0}, 0f00000000, {$r0};", write_only_types=[Float32], read_only_args=[row[i]]
        )


def amax_without_nan(row: cute.Tensor) -> Float32:
    amax = Float32(0.0)
    for i in range(cute.size(row)):
        amax = cute.arch.fmax(amax, cute.math.absf(row[i]))
    return amax


def code_words(pairs: list[Int16]) -> cute.Tensor:
    """Pairs of codes, two in each word."""
    words = cute.make_rmem_tensor(len(pairs) // 2, Int32)
    for w in range(len(pairs) // 2):
        words[w] = join(pairs[2 * w], pairs[2 * w + 1])
    return words


def wide_words(pairs: list[Int16]) -> cute.Tensor:
    """Pairs of codes in float16, one in each word."""
    words = cute.make_rmem_tensor(len(pairs), Int32)
    for w, pair in enumerate(pairs):
        words[w] = widen_codes(pair)
    return words

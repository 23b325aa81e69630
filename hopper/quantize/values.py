"""What a CTA does to a block of V: its scale is a power of 16, and it is rounded and stored by columns."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float16, Float32, Int16, Int32, Int64, const_expr

from cute_kernels.fast_math import (
    join,
    multiply_add_halves,
    pack,
    pack_e4m3_of_float16,
    permute_bytes,
    pin,
    subtract_halves,
)
from cute_kernels.integers import ceil_div, minimum
from hopper.forward.fp8.config import FP8_KEY_ORDER
from hopper.mean.config import are_sampled_in_runs
from hopper.quantize.config import (
    BLOCK_STEP,
    CARRY_KEYS,
    CHUNK,
    FEEDBACK,
    MOST_SHIFT,
    PAID,
    PAID_WHERE_SAMPLED,
    PAYING_KEYS,
    RUNS_OF_PATCH,
    VALUE_OCTAVES,
    RunTiling,
)
from hopper.quantize.halves import (
    add_halves,
    halves_of,
    limit_halves,
    magnitude_of_halves,
    multiply_halves,
    not_a_number,
)
from hopper.quantize.operand import Cta, Operand
from hopper.quantize.words import widen_codes, words_at

MANTISSA_BITS, BIAS = 23, 127
BELOW_STEP = (VALUE_OCTAVES << MANTISSA_BITS) - 1
OFFSET = BIAS % VALUE_OCTAVES << MANTISSA_BITS
"""Bits of float32: those that a scale has none of, but for these."""

CODES_OF_WORD, CODES_OF_STORE = 4, 16


@dataclass(frozen=True)
class TransposedOperand(Operand):
    """V. ``data`` is (batch, heads, head_dim, keys), keys a multiple of 32, each 32 in the order FP8_KEY_ORDER.

    Rows over their scale go to ``buffer`` in shared memory, in float16. From there a thread takes two columns of a run
    of 32 keys, rounds them key by key, carrying their errors on, and stores them. Where runs of blocks have means an
    attention kernel adds up many keys, and values pay for what its sums lose.
    ``hopper_attention.quantization_rules.round_runs`` has the rules and their reasons.
    """

    buffer: cute.Tensor
    transposed: RunTiling
    mean_blocks: int = 0

    def _mean_of(self, place: tuple) -> Int32:
        """With ``mean_blocks`` those of an entry's runs follow each other, the last keys' first."""
        if self.mean_blocks == 0:
            return place[2]
        blocks = ceil_div(self.source.shape[1], self.tiling.rows)
        return place[2] * ceil_div(blocks, self.mean_blocks) + (blocks - 1 - place[0]) // self.mean_blocks

    def _final_scale(self, scale: Float32) -> Float32:
        """Rounded up to a power of 16 (``hopper_attention.quantization_rules.scale_of_values``)."""
        return ((scale.bitcast(Int32) + (BELOW_STEP - OFFSET) & ~BELOW_STEP) + OFFSET).bitcast(Float32)

    def _rows_stored(self, place: tuple) -> Int32:
        """Rows of zeros fill up the last step of keys."""
        return ceil_div(self.rows_present(place), BLOCK_STEP) * BLOCK_STEP

    def _buffered(self, offset: Int32, words: int) -> cute.Tensor:
        """Words of the buffer at an offset in bytes that is aligned to them."""
        return cute.local_tile(self.buffer, (words,), (offset // (4 * words),))

    @cute.jit
    def _put(self, cta: Cta, row: cute.Tensor, inverse: Float32, p: cutlass.Constexpr[int], place: tuple):
        """Put the row of pass ``p`` into the buffer. Zeros behind the sequence lose the signs of a rotation."""
        t = self.tiling
        row_of_item = t.row(p, cta.warp, cta.lane)
        run, key = row_of_item // CARRY_KEYS, row_of_item % CARRY_KEYS
        is_present = row_of_item < self.rows_present(place)
        for c in cutlass.range_constexpr(t.chunks):
            words = cute.make_rmem_tensor(CHUNK // 2, Int32)
            for w in cutlass.range_constexpr(CHUNK // 2):
                first = c * CHUNK + 2 * w
                words[w] = pack(row[first] * inverse, row[first + 1] * inverse, Float16)
                if const_expr(self.rotate):
                    words[w] = words[w] if is_present else Int32(0)
            if row_of_item < self._rows_stored(place):
                offset = self.transposed.offset(run, key, t.column(c, cta.lane))
                cute.autovec_copy(words, self._buffered(offset, CHUNK // 2))

    @cute.jit
    def _finish(self, cta: Cta, place: tuple):
        """Round the buffer by columns, and store them 16 keys at a time."""
        number, head = place[:2]
        t = self.transposed
        first_key = self.items.first_unit(place, BLOCK_STEP) * BLOCK_STEP
        base = Int64(self.items.entry(place)) * self.data.stride[0] + Int64(head) * self.data.stride[1]
        base = self.data.iterator.toint() + base + (first_key + number * t.rows)
        cute.arch.sync_threads()
        for i in cutlass.range_constexpr(ceil_div(t.patches, cta.warps)):
            patch = cta.warp + i * cta.warps
            run, column = t.chain(patch, cta.lane)
            first_of_warp = run // RUNS_OF_PATCH * RUNS_OF_PATCH
            if patch < t.patches and first_of_warp * CARRY_KEYS < self._rows_stored(place):
                codes = self._round_run(minimum(run, t.runs - 1), column)
                address = base + Int64(column) * self.data.stride[2] + run * CARRY_KEYS
                self._store(codes, address, self._rows_stored(place) - run * CARRY_KEYS, cta.lane % 2)

    @cute.jit
    def _store(self, codes: cute.Tensor, address: Int64, rows: Int32, is_odd: Int32):
        """Codes of two columns of a run, which has keys where ``rows`` is above 0. Neighbouring lanes have neighbouring
        runs, ``is_odd`` says which. Each stores a half of either, so that they write 32 bytes together, what memory
        takes at once. All lanes of a warp come here."""
        words = CODES_OF_STORE // CODES_OF_WORD
        for c in cutlass.range_constexpr(2):
            even, odd = (cute.make_rmem_tensor(words, Int32) for _ in range(2))
            for w in cutlass.range_constexpr(words):
                kept, given = codes[w, 0, c], codes[w, 1, c]
                if is_odd == 1:
                    kept, given = given, kept
                taken = cute.arch.shuffle_sync_bfly(given, offset=1)
                even[w], odd[w] = kept, taken
                if is_odd == 1:
                    even[w], odd[w] = taken, kept
            half = address + c * self.data.stride[2] - is_odd * (CARRY_KEYS - CODES_OF_STORE)
            if rows + is_odd * CARRY_KEYS > 0:
                cute.autovec_copy(even, words_at(half, words))
            if rows - (1 - is_odd) * CARRY_KEYS > 0:
                cute.autovec_copy(odd, words_at(half + CARRY_KEYS, words))

    @cute.jit
    def _round_run(self, run: Int32, column: Int32) -> cute.Tensor:
        """Codes of two columns of a run, (4 words, stores, column): in the order FP8_KEY_ORDER, four to a word.

        A column with NaN carries NaN on. Then all is done once more, and this column has no shifts.
        """
        stores = CARRY_KEYS // CODES_OF_STORE
        codes = cute.make_rmem_tensor((CODES_OF_STORE // CODES_OF_WORD, stores, 2), Int32)
        # In registers: these instructions take no constants.
        feedback, most_shift = (pin(Int32(halves_of(x)), Int32) for x in (FEEDBACK, MOST_SHIFT))
        paid = self._paid()
        is_open = Boolean(True)
        while is_open:
            carry, pairs, owed = pin(Int32(0), Int32), [], Int32(0)
            for key in cutlass.range_constexpr(CARRY_KEYS):
                x = self._buffered(self.transposed.offset(run, key, column), 1)[0]
                bound = multiply_halves(magnitude_of_halves(x), most_shift)
                if const_expr(self.mean_blocks > 0 and key == 0):
                    owed = multiply_halves(bound, paid)
                pays = const_expr(self.mean_blocks > 0 and key % PAYING_KEYS == 1)
                code, carry = round_and_carry(x, carry, feedback, bound, (owed,) if pays else ())
                pairs.append(code)
            for word in cutlass.range_constexpr(CARRY_KEYS // CODES_OF_WORD):
                a, b, c, d = (pairs[key] for key in FP8_KEY_ORDER[4 * word : 4 * word + 4])
                low, high = join(a, b), join(c, d)
                codes[word % 4, word // 4, 0] = permute_bytes(low, high, 0x6420)
                codes[word % 4, word // 4, 1] = permute_bytes(low, high, 0x7531)
            remaining = most_shift & ~not_a_number(carry)
            is_open = remaining != most_shift
            most_shift = remaining
        return codes

    def _paid(self) -> Int32:
        """What a value pays of the first one of its run, over MOST_SHIFT."""
        fewest, most = (halves_of(share / MOST_SHIFT) for share in (PAID, PAID_WHERE_SAMPLED))
        return fewest + (most - fewest) * Int32(are_sampled_in_runs(Int32(self.source.shape[1])))


def round_and_carry(
    x: Int32, carry: Int32, feedback: Int32, bound: Int32, owed: tuple[Int32, ...] = ()
) -> tuple[Int16, Int32]:
    """(two values x in e4m3, the carry behind them). All are float16 in words: ``carry`` is what x is shifted by, but
    for the ``bound``; ``feedback`` is the share of its error that comes to the next one. With ``owed`` the magnitude of
    the code should have been larger by that, or twice as large if it is less."""
    code = pack_e4m3_of_float16(add_halves(x, limit_halves(carry, bound)))
    for most in owed:
        x = add_halves(x, limit_halves(x, most))
    return code, multiply_add_halves(subtract_halves(x, widen_codes(code)), feedback, carry)

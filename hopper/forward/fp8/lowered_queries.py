"""Rows of Q lowered by powers of two in shared memory, so that scores fit float16 whatever the codes are."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32

from cute_kernels.fast_math import pack, pin, unpack
from cute_kernels.fragments import LANES_PER_ROW, ROW_STRIDE, ROWS_PER_THREAD, first_row_of_thread
from cute_kernels.invariant import LoopInvariant
from hopper.config import WARPGROUP_ROWS, WARPGROUP_THREADS
from hopper.forward.barriers import sync_warpgroup
from hopper.forward.fp8.config import Fp8ForwardConfig
from hopper.forward.fp8.softmax.stale_maximum import FLOAT32_BIAS, FLOAT32_MANTISSA_BITS, exponent_of
from hopper.forward.fp8.warp_scores import WARP_THREADS, widen
from hopper.swizzled_bytes import SwizzledBytes
from hopper.tiles import WARPS_PER_WARPGROUP

CHUNK = 16
"""Bytes that a thread loads at once."""

CHUNK_WORDS = CHUNK // 4

LARGEST_CODE = 448.0
"""Of K."""

LARGEST_PRODUCT = 63000.0
"""Of a lowered row of Q and a row of K. Up to 65504, float16's largest, is room for the rounding of sums."""

SQUARED_BY, SQUARED_BY_PAIR = 2.0**-5, "0x28002800"
"""Codes are multiplied by this before they are squared, so that float16 holds the sum of 8 squares; a pair of it."""


@dataclass(frozen=True)
class LoweredQueries(LoopInvariant):
    """Lowers Q of a tile once it has come.

    No code of K exceeds 448, so a row q of Q has scores of at most |q| 448 sqrt(head_dim) (Cauchy and Schwarz). Each
    row is multiplied by the largest power of two, up to 1, with which that is no more than float16 holds. e4m3 keeps
    a code as it is unless it falls below 2^-6; it becomes a multiple of 2^-9 then. That moves a row by 2^-10 of its
    length at most at head_dim 64, 2^-9 at 128 and 2^-8 at 256; where codes are N(0, 1), by some 2^-15, 2^-13 and
    2^-11. A row with a NaN keeps it.

    ``sQ`` is Q in shared memory, staged by warpgroup. The four lanes that hold a row's scores share its 16-byte chunks
    such that eight lanes find theirs in different banks.
    """

    config: Fp8ForwardConfig
    sQ: cute.Tensor
    first_thread: int

    @cute.jit
    def lower(self) -> tuple[Float32, Float32]:
        """Factors that undo it in the scores of the thread's rows; by all threads of a warpgroup."""
        # Pinned, so that nothing that comes of it is kept in registers from tile to tile.
        thread = pin(cute.arch.thread_idx()[0], Int32) - self.first_thread
        wg, warp, lane = (
            thread // WARPGROUP_THREADS,
            thread // WARP_THREADS % WARPS_PER_WARPGROUP,
            thread % WARP_THREADS,
        )
        rows = SwizzledBytes(self.sQ, WARPGROUP_ROWS, self.config.head_dim)
        row = first_row_of_thread(warp, lane)
        chunks = [
            self._chunks(rows, wg, row + r * ROW_STRIDE, lane % LANES_PER_ROW) for r in range(ROWS_PER_THREAD)
        ]
        # Both rows are loaded before either is written, so that neither waits for the other.
        loaded = [[_words_of(chunk) for chunk in of_row] for of_row in chunks]
        squares = [_sum_of_squares(of_row) for of_row in loaded]
        halvings = [self._halvings_of(square) for square in squares]
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            _lower_words(loaded[r], halvings[r])
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            for i in cutlass.range_constexpr(len(chunks[r])):
                cute.autovec_copy(loaded[r][i], chunks[r][i])
        # WGMMA reads what all threads of the warpgroup have written.
        cute.arch.fence_view_async_shared()
        sync_warpgroup(wg)
        return _power_of_two(halvings[0]), _power_of_two(halvings[1])

    def _halvings_of(self, squares: Float32) -> Int32:
        """How often a row is halved, by a quarter of its sum of squares in each of four lanes."""
        squares = cute.arch.warp_reduction_sum(squares, threads_in_group=LANES_PER_ROW)
        return _halvings(squares * Float32(self._squares_too_large))

    @property
    def _squares_too_large(self) -> float:
        """What makes of a sum of squares a number that is above 1 where scores may be too large, by their square."""
        columns = self.config.used_head_dim or self.config.head_dim
        return columns * (LARGEST_CODE / (LARGEST_PRODUCT * SQUARED_BY)) ** 2

    def _chunks(self, rows: SwizzledBytes, wg: Int32, row: Int32, lane: Int32) -> list:
        """Those of a row that the lane of this number among its four takes: neighbours in each run of bytes that is
        swizzled as one."""
        in_run = rows.width // CHUNK
        per_lane = in_run // LANES_PER_ROW
        runs = self.config.head_dim // rows.width
        numbers = [run * in_run + lane * per_lane + i for run in range(runs) for i in range(per_lane)]
        return [self._chunk(rows, wg, row, number) for number in numbers]

    def _chunk(self, rows: SwizzledBytes, wg: Int32, row: Int32, chunk: Int32) -> cute.Tensor:
        address = rows.address(wg, row, chunk)
        pointer = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=CHUNK)
        return cute.make_tensor(pointer, cute.make_layout(CHUNK_WORDS))


def _halvings(square: Float32) -> Int32:
    """The least k of 0 or more with which 4^k is above a number that is not negative."""
    return cutlass.max((exponent_of(square) + 2) >> 1, 0)


def _power_of_two(exponent: Int32) -> Float32:
    return ((exponent + FLOAT32_BIAS) << FLOAT32_MANTISSA_BITS).bitcast(Float32)


def _words_of(chunk: cute.Tensor) -> cute.Tensor:
    words = cute.make_rmem_tensor(CHUNK_WORDS, Int32)
    cute.autovec_copy(chunk, words)
    return words


def _sum_of_squares(chunks: list) -> Float32:
    """Of codes, each times ``SQUARED_BY``; those of a chunk are added up in float16."""
    total = Float32(0.0)
    for words in chunks:
        pair = Int32(0)
        for i in range(CHUNK_WORDS):
            for codes in widen(words[i]):
                pair = _add_squares(codes, pair)
        low, high = unpack(pair, Float16)
        total = total + (low + high)
    return total


def _lower_words(chunks: list, halvings: Int32):
    factor = _power_of_two(-halvings)
    pair = pack(factor, factor, Float16)
    for words in chunks:
        for i in range(CHUNK_WORDS):
            words[i] = _lowered(words[i], pair)


def _add_squares(codes: Int32, pair: Int32) -> Int32:
    return cute.arch.inline_ptx(
        f"{{ .reg .b32 x, k; mov.b32 k, {SQUARED_BY_PAIR}; mul.rn.f16x2 x, {{$r0}}, k; "
        "mov.b32 k, {$r1}; fma.rn.f16x2 {$w0}, x, x, k; }",
        write_only_types=[Int32],
        read_only_args=[codes, pair],
    )


def _lowered(word: Int32, factor: Int32) -> Int32:
    """Four codes times a pair of float16."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 l, h; .reg .b32 a, b; mov.b32 {l, h}, {$r0}; "
        "cvt.rn.f16x2.e4m3x2 a, l; cvt.rn.f16x2.e4m3x2 b, h; "
        "mul.rn.f16x2 a, a, {$r1}; mul.rn.f16x2 b, b, {$r1}; "
        "cvt.rn.satfinite.e4m3x2.f16x2 l, a; cvt.rn.satfinite.e4m3x2.f16x2 h, b; mov.b32 {$w0}, {l, h}; }",
        write_only_types=[Int32],
        read_only_args=[word, factor],
    )

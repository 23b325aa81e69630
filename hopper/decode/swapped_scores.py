"""Scores of a cache of e4m3 by its warps: K is widened in registers."""

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int16, Int32, const_expr
from cutlass.pipeline import PipelineState

from cute_kernels.ampere.instructions import as_fragment, ldmatrix_x4, mma
from cute_kernels.fast_math import as_float, max_over_lanes, pack, unpack
from cute_kernels.fragments import COLUMNS_PER_GROUP, LANES_PER_ROW, ROW_STRIDE
from cute_kernels.invariant import LoopInvariant
from hopper.config import WARPGROUP_ROWS
from hopper.decode.config import ROWS_PER_GROUP, DecodeConfig
from hopper.decode.operands import Keys
from hopper.decode.rows import SwappedRows
from hopper.decode.softmax import scale_of_scores
from hopper.decode.widener import widen_e4m3
from hopper.swizzled_bytes import SwizzledBytes

LANES = 32
KEYS_PER_PRODUCT = 2 * ROW_STRIDE
COLUMNS_PER_STEP = 16
"""Of one product of a warp: 16 keys and 8 query rows."""

PAIRS_PER_STEP = COLUMNS_PER_STEP // 2

Q_EXPONENT = 14
"""Of the largest element of a row of Q as float16, whose least normal number is 2^-14."""

SCALED_QUERIES = {"smallest": 15, "infinite": 255}
"""Exponents of float32, with their bias of 127, that bound those of a row's largest element: no power of two is smaller
by which its row could be scaled, and none is greater."""


class SwappedScores(LoopInvariant):
    """S^T = K Q^T of a tile of few rows, by mma.sync of float16, whose sums are float32.

    WGMMA multiplies e4m3 as it is, but cuts sums at 2^-13 of the largest product, which the LSE of peaky inputs shows.
    float16 has every number of e4m3, and those of a row of bfloat16 once a power of two has brought the largest near
    the upper end: what lies up to 28 octaves below that keeps all of its digits.

    A warp has 16 keys of every 64 (``_key`` of ``SwappedConsumer``). A lane has four neighbouring columns of a key, and
    of a query row, in the places of columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of a product, which are added all the
    same. Query row 4 e + t of 8 is column 2 t + e of a product, so that a thread has scores of the rows that it has of
    O. ``queries`` in shared memory has the words of all lanes side by side (``query_words``).
    """

    def __init__(self, config: DecodeConfig, k: Keys, queries: cute.Tensor, warp: Int32, lane: Int32):
        self.config, self.k, self.warp, self.lane = config, k, warp, lane
        self.keys = SwizzledBytes(k.smem, config.tile_n, config.head_dim)
        self.steps = config.head_dim // COLUMNS_PER_STEP
        self.groups = max(config.tile_m // COLUMNS_PER_GROUP, 1)
        self.products = config.tile_n // WARPGROUP_ROWS
        self.queries = queries
        # At 128 keys a block four products do not wait for each other, whatever the rows.
        self.sums = tuple(
            cute.make_rmem_tensor(4 * self.groups * self.products, Float32) for _ in range(2 // self.groups)
        )

    def of_thread(self) -> cute.Tensor:
        """The accumulators as scores: (keys of a thread, rows of a thread)."""
        rows = min(self.config.rows_per_thread, 2)
        shape, stride = ((2, self.products), (rows, self.groups)), ((2, 4 * self.groups), (1, 4))
        return cute.make_tensor(self.sums[0].iterator, cute.make_layout(shape, stride=stride))

    @cute.jit
    def load_queries(self, mQ: cute.Tensor, rows: SwappedRows, scale: Float32, scales: cute.Tensor):
        """Take the rows of Q, a warp every fourth, zeros for rows and columns that there are not, and leave what their
        scores are to be multiplied with in ``scales``, (tile_m,) in shared memory. ``scale`` is that of all rows."""
        # All loads are under way before the first is waited for.
        loaded = [self._load_row(mQ, rows, i) for i in range(self.config.rows_per_thread)]
        for i, words in enumerate(loaded):
            inverse = Float32(1.0)
            if const_expr(self.config.e4m3_queries):
                words = [widen_e4m3(Int32(word))[0] for word in words]
            else:
                inverse, words = scaled_row([unpack(word, mQ.element_type) for word in words])
            for n, word in enumerate(words):
                number = n * LANES + self.lane
                lane = (2 * self.warp + i % 2) * LANES_PER_ROW + number // 2 % LANES_PER_ROW
                self.queries[number % 2, lane, number // PAIRS_PER_STEP, i // 2] = word
            if self.lane == 0:
                of_row = inverse * scale
                # A hidden score is -inf behind the tanh of a softcap, and is multiplied by another scale.
                scales[ROWS_PER_GROUP * i + self.warp] = (
                    of_row if const_expr(self.config.softcap) else scale_of_scores(of_row)
                )

    @cute.jit
    def _load_row(self, mQ: cute.Tensor, rows: SwappedRows, i: cutlass.Constexpr[int]) -> list:
        """The lane's pairs of elements of the warp's row ``i``."""
        pair = Int16 if const_expr(self.config.e4m3_queries) else Int32
        row, words = ROWS_PER_GROUP * i + self.warp, []
        source = cute.recast_tensor(rows.tile.of(mQ, row), pair)
        for n in cutlass.range_constexpr(self.config.head_dim // (2 * LANES)):
            number, word = n * LANES + self.lane, pair(0)
            if row < rows.tile.count and number < cute.size(source):
                word = source[number]
            words.append(word)
        return words

    @cute.jit
    def take(self, state: PipelineState):
        """Those of the block at ``state``, whose keys are read before this returns."""
        self.k.pipe.consumer_wait(state)
        for sums in self.sums:
            sums.fill(0.0)
        row = self.warp * KEYS_PER_PRODUCT + self.lane % KEYS_PER_PRODUCT
        place = self.keys.place(state.index, row, self.lane // KEYS_PER_PRODUCT)
        for step in cutlass.range_constexpr(0, self.steps, 2):
            queries = [[self._queries(step + half, j) for j in range(self.groups)] for half in range(2)]
            for m in cutlass.range_constexpr(self.products):
                words = ldmatrix_x4(place.address(WARPGROUP_ROWS * m, step), 0, transpose=False)
                for half in cutlass.range_constexpr(2):
                    (a0, a2), (a1, a3) = (widen_e4m3(word) for word in words[2 * half : 2 * half + 2])
                    keys, sums = as_fragment((a0, a1, a2, a3), Float16), self.sums[half % len(self.sums)]
                    for j in cutlass.range_constexpr(self.groups):
                        mma(sums, 4 * (j + self.groups * m), keys, queries[half][j])
        for other in self.sums[1:]:
            for n in cutlass.range_constexpr(cute.size(other)):
                self.sums[0][n] = self.sums[0][n] + other[n]

    def _queries(self, step: int, group: int) -> cute.Tensor:
        """The lane's words of a step, and of 8 rows."""
        words = cute.make_rmem_tensor(2, Int32)
        cute.autovec_copy(self.queries[None, self.lane, step, group], words)
        return as_fragment((words[0], words[1]), Float16)


def scaled_row(pairs: list) -> tuple[Float32, list]:
    """A row of Q, of which each lane of a warp has some pairs of elements, as pairs of float16, and what undoes the
    power of two that brings the largest of all near the upper end."""
    largest = Float32(0.0)
    for pair in pairs:
        for x in pair:
            largest = cute.arch.fmax(largest, cute.arch.fmax(x, -x))
    scale, inverse = scales_of(max_over_lanes(largest, LANES))
    return inverse, [pack(low * scale, high * scale, Float16) for low, high in pairs]


@cute.jit
def scales_of(largest: Float32) -> tuple[Float32, Float32]:
    """The power of two that brings a row of Q to ``Q_EXPONENT``, and its inverse: NaN for a row that is not finite,
    1 for one of zeros."""
    bits = cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[largest])
    exponent = cutlass.max(bits >> 23, SCALED_QUERIES["smallest"])
    of_scale = (2 * 127 + Q_EXPONENT - exponent) << 23
    of_inverse = (exponent - Q_EXPONENT) << 23
    of_inverse = Int32(-1) if exponent == SCALED_QUERIES["infinite"] else of_inverse
    # Of a row of zeros it is 1: scales of K may make 0 of 2^-126, and a hidden score is -inf times that.
    of_inverse = Int32(127 << 23) if bits == 0 else of_inverse
    return as_float(of_scale), as_float(of_inverse)

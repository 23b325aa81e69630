"""Scores of one warp by mma.sync, for the rare block whose scores are wanted again."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.fast_math import pin
from cute_kernels.fragments import (
    LANES_PER_ROW,
    ROW_STRIDE,
    ROWS_PER_THREAD,
    ROWS_PER_WARP,
    as_rows,
)
from cute_kernels.invariant import LoopInvariant

WARP_THREADS, WARPS_PER_WARPGROUP = 32, 4

WORDS_PER_STEP = 4
"""Of each row and each key, for one mma.sync: a word for each lane."""


@dataclass(frozen=True)
class WarpScores(LoopInvariant):
    """S = Q K^T of a warp's 16 rows, from e4m3 in shared memory, in the registers of a WGMMA accumulator.

    ``mQ`` is (rows, words, stages), ``mK`` (keys, words, stages), each word four e4m3 of a row. Their layouts say
    where a word would be without the swizzle, which is over ``swizzle_bytes``. The warpgroups that compute follow
    ``other_warpgroups``, and Q of each lies in the stage of its number.
    mma.sync m16n8k16 gives each thread the elements of a 16 x 8 tile that WGMMA gives it of a 64 x 8 one, so nothing
    has to move. It sums in float32, where FP8 WGMMA drops what is below 2^-13 of the largest product.
    """

    mQ: cute.Tensor
    mK: cute.Tensor
    swizzle_bytes: int
    other_warpgroups: int

    @cute.jit
    def compute(self, acc_S: cute.Tensor, stage: Int32, groups: cutlass.Constexpr[tuple[int, ...]]):
        """Those of some groups of 8 keys in ``stage``, whose copy to shared memory is known to be complete."""
        scores = as_rows(acc_S)
        for j in cutlass.range_constexpr(len(groups)):
            for r in cutlass.range_constexpr(ROWS_PER_THREAD):
                for e in cutlass.range_constexpr(2):
                    scores[r, (e, groups[j])] = Float32(0.0)
        thread = pin(cute.arch.thread_idx()[0], Int32)  # so that nothing that comes of it is kept elsewhere
        warp, lane = thread // WARP_THREADS, thread % WARP_THREADS
        wg, warp_in_group = warp // WARPS_PER_WARPGROUP, warp % WARPS_PER_WARPGROUP
        stage_of_q = wg - self.other_warpgroups
        row, word = warp_in_group * ROWS_PER_WARP + lane // LANES_PER_ROW, lane % LANES_PER_ROW
        key = lane // LANES_PER_ROW
        for step in cutlass.range(cute.size(self.mQ, mode=[1]) // WORDS_PER_STEP, unroll=1):
            at = step * WORDS_PER_STEP + word
            queries, keys = (
                self._every_eighth(self.mQ, (row, at, stage_of_q)),
                self._every_eighth(self.mK, (key, at, stage)),
            )
            (a0, a2), (a1, a3) = (widen(queries[r]) for r in range(ROWS_PER_THREAD))
            for i in cutlass.range_constexpr(len(groups)):
                j = groups[i]
                b = widen(keys[j])
                c = [scores[r, (e, j)] for r in range(ROWS_PER_THREAD) for e in range(2)]
                c = _multiply((a0, a1, a2, a3), b, c)
                for r in cutlass.range_constexpr(ROWS_PER_THREAD):
                    for e in cutlass.range_constexpr(2):
                        scores[r, (e, j)] = c[2 * r + e]
        cute.arch.sync_warp()

    def _every_eighth(self, words: cute.Tensor, place: tuple) -> cute.Tensor:
        """The word at ``place`` and those 8, 16, ... rows below, where a swizzle moves words alike."""
        address = Int32((words.iterator + cute.crd2idx(place, words.layout)).toint())
        swizzled = address ^ (address >> 3 & self.swizzle_bytes - 16)
        stride = cute.crd2idx((ROW_STRIDE, 0, 0), words.layout)
        rows = cute.make_layout(cute.size(words, mode=[0]) // ROW_STRIDE, stride=stride)
        pointer = cute.make_ptr(Int32, swizzled, cute.AddressSpace.smem, assumed_align=4)
        return cute.make_tensor(pointer, rows)


def widen(word: Int32) -> tuple[Int32, Int32]:
    """Four e4m3 as two pairs of float16, which has them all."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 l, h; mov.b32 {l, h}, {$r0}; cvt.rn.f16x2.e4m3x2 {$w0}, l; cvt.rn.f16x2.e4m3x2 {$w1}, h; }",
        write_only_types=[Int32, Int32],
        read_only_args=[word],
    )


def _multiply(a: tuple, b: tuple, c: list) -> tuple:
    """A B + C of 16 x 8 x 16. Which of the 16 columns comes where is up to both factors alike."""
    return cute.arch.inline_ptx(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 { {$w0}, {$w1}, {$w2}, {$w3} }, "
        "{ {$r0}, {$r1}, {$r2}, {$r3} }, { {$r4}, {$r5} }, { {$r6}, {$r7}, {$r8}, {$r9} };",
        write_only_types=[Float32] * 4,
        read_only_args=[*a, *b, *c],
    )

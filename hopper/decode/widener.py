"""The warpgroups that widen a cache of e4m3: from the stages where TMA leaves it to those that are multiplied."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Boolean, Int32
from cutlass.pipeline import PipelineState

from cute_kernels.invariant import LoopInvariant
from hopper.config import WARPGROUP_THREADS
from hopper.decode.config import BOX_COLUMNS, DecodeConfig
from hopper.decode.operands import Keys, RawKeys, Work

VECTOR = 16
"""Elements of e4m3 that a thread widens at a time, from 16 bytes to 32."""

CHUNK_WORDS = 4
"""32-bit words of 16 bytes, which swizzling moves as one."""

CHUNKS_PER_ROW = 8
"""Of a row of 128 bytes, within which they are swizzled by the row's number."""

AT_A_TIME = 4
"""Vectors that a thread has loaded before it widens the first."""


@dataclass(frozen=True)
class Widener(LoopInvariant):
    """Widens K, or V, of each block that this CTA visits, in the order in which its producer brings them."""

    config: DecodeConfig
    work: Work
    raw: RawKeys
    wide: Keys
    thread: Int32
    lane: Int32

    @cute.jit
    def run(self, begin: tuple = ()):
        work, c = self.work, self.config
        raw_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, c.raw_stages)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, c.stages)
        sequence, tile, start, end = work.begin(begin, self.lane)
        while start < end:
            seqlens = work.batch.seqlens(sequence)
            blocks = work.batch.blocks(seqlens).count
            parts = work.parts(start, blocks)
            for _ in cutlass.range(parts.begin(work.cta + 1) - parts.begin(work.cta), unroll=1):
                self._widen(raw_state, state)
                raw_state.advance()
                state.advance()
            start += blocks
            sequence, tile = work.batch.following(sequence, tile, work.batch.tiles(seqlens))

    @cute.jit
    def _widen(self, raw_state: PipelineState, state: PipelineState):
        """One block."""
        c, raw, wide = self.config, self.raw, self.wide
        columns = cute.size(raw.smem, mode=[1])
        vectors = c.tile_n * columns // VECTOR
        steps = -(-vectors // WARPGROUP_THREADS)
        source = self._vectors(raw, columns, raw_state.index)
        target = self._chunks(wide, columns, state.index)
        raw.pipe.consumer_wait(raw_state)
        wide.pipe.producer_acquire(state)
        for first in cutlass.range_constexpr(0, steps, AT_A_TIME):
            loaded = []
            for i in cutlass.range_constexpr(first, min(first + AT_A_TIME, steps)):
                words = cute.make_rmem_tensor(CHUNK_WORDS, Int32)
                self._load(source, i, words)
                loaded.append(words)
            for i in cutlass.range_constexpr(first, min(first + AT_A_TIME, steps)):
                vector = self.thread + i * WARPGROUP_THREADS
                place, words = (vector * VECTOR // columns, vector * VECTOR % columns), loaded[i - first]
                if is_there(i, vector, vectors):
                    self._store(target, *place, words)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        raw.pipe.consumer_release(raw_state)
        if self.lane == 0:
            wide.pipe.producer_commit(state)

    @cute.jit
    def _load(self, source: cute.Tensor, i: cutlass.Constexpr[int], words: cute.Tensor):
        """The thread's vector of step ``i``, if there is one."""
        vector, vectors = self.thread + i * WARPGROUP_THREADS, cute.size(source, mode=[1])
        if is_there(i, vector, vectors):
            cute.autovec_copy(source[None, vector], words)

    @cute.jit
    def _store(self, target: cute.Tensor, row: Int32, column: Int32, words: cute.Tensor):
        """Two chunks of a row, from ``column`` on."""
        for half in cutlass.range_constexpr(2):
            wide = cute.make_rmem_tensor(CHUNK_WORDS, Int32)
            for i in cutlass.range_constexpr(2):
                wide[2 * i], wide[2 * i + 1] = widen_e4m3(words[2 * half + i])
            chunk = (column // (VECTOR // 2) + half) % CHUNKS_PER_ROW
            part = column // BOX_COLUMNS
            cute.autovec_copy(wide, target[None, chunk ^ (row % CHUNKS_PER_ROW), row, part])

    def _vectors(self, raw: RawKeys, columns: int, stage: Int32) -> cute.Tensor:
        """(CHUNK_WORDS, vectors) of a stage."""
        words = self.config.tile_n * columns // 4
        start = cute.recast_ptr(raw.smem.iterator, dtype=Int32) + stage * words
        layout = cute.make_layout((CHUNK_WORDS, words // CHUNK_WORDS), stride=(1, CHUNK_WORDS))
        return cute.make_tensor(start.align(16), layout)

    def _chunks(self, wide: Keys, columns: int, stage: Int32) -> cute.Tensor:
        """(CHUNK_WORDS, CHUNKS_PER_ROW, tile_n, parts) of a stage, as it lies and not as its swizzle says."""
        c = self.config
        start = cute.recast_ptr(wide.smem.iterator, cute.make_swizzle(0, 4, 3), Int32)
        row = CHUNK_WORDS * CHUNKS_PER_ROW
        layout = cute.make_layout(
            (CHUNK_WORDS, CHUNKS_PER_ROW, c.tile_n, columns // BOX_COLUMNS),
            stride=(1, CHUNK_WORDS, row, row * c.tile_n),
        )
        return cute.make_tensor((start + stage * (c.tile_n * columns // 2)).align(16), layout)


def is_there(step: int, vector: Int32, vectors: int) -> bool | Boolean:
    """Whether a thread has a vector in a step: always, but in the last one of a block of few."""
    return True if (step + 1) * WARPGROUP_THREADS <= vectors else vector < vectors


def widen_e4m3(word: Int32) -> tuple[Int32, Int32]:
    """Four e4m3 numbers as two words of two float16, which hold them as they are."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 l, h; mov.b32 {l, h}, {$r0};"
        " cvt.rn.f16x2.e4m3x2 {$w0}, l; cvt.rn.f16x2.e4m3x2 {$w1}, h; }",
        write_only_types=[Int32, Int32],
        read_only_args=[word],
    )

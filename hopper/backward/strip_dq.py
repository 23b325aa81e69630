"""dQ of a strip of key tiles: summed on the chip, since the CTA that begins a query tile ends it too."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp
from cutlass.pipeline import PipelineState

from cute_kernels.fast_math import pin
from hopper.backward.config import BackwardConfig
from hopper.backward.dq import WORDS_PER_STORE, GradientOfQ, QueryTile
from hopper.config import WARPGROUP_ROWS, WARPGROUP_THREADS
from hopper.tiles import TmaOperand

HEAD_BITS = 16
"""Of a head beside a batch: either is at most ``MAX_BATCH_OR_HEADS``."""

SWIZZLE_BYTES = 1024
"""After which a swizzle repeats."""


class StripGradientOfQ(GradientOfQ):
    """The part of a dQ tile that one warpgroup computes, whose words stay in shared memory between two key tiles.

    A query tile has the buffer of its parity: at most two tiles wait for the next key tile, and these are neighbours. A
    thread reads the words that it has written, so nothing has to be waited for. What is complete is rounded, staged in
    the same buffer and stored by TMA, when and as ``GradientOfQ`` sends its sums.
    """

    accumulates = True

    def __init__(
        self,
        store: tuple,
        layout: cute.ComposedLayout,
        softmax_scale: Float32,
        config: BackwardConfig,
        mma: cute.TiledMma,
        *rest,
    ):
        """``store`` is the TMA atom and tensor of dQ, ``layout`` that of a rounded part in shared memory."""
        super().__init__(config, mma, *rest)
        self.store, self.layout, self.softmax_scale, self.mma = store, layout, softmax_scale, mma
        self.place = cute.make_rmem_tensor(2, Int32)
        self.flip, self.buffer, self.is_final = (cute.make_rmem_tensor(1, Int32) for _ in range(3))

    @cute.jit
    def clear(self):
        for part in (self.place, self.flip, self.buffer, self.is_final):
            part.fill(0)
        self.acc.fill(0.0)

    @cute.jit
    def begin_strip(self, m_block: Int32):
        """A strip begins at a query tile, whose buffer is not that of the part which is still to be sent."""
        self.flip[0] = (self.buffer[0] + m_block + 1) & 1

    @cute.jit
    def hold(self, tile: QueryTile):
        self.place[0], self.place[1] = tile.m_block, tile.head | tile.batch << HEAD_BITS
        self.buffer[0], self.is_final[0] = self._buffer_of(tile), Int32(tile.is_final)

    @cute.jit
    def resume(self, tile: QueryTile):
        """Take up what the key tile before has added."""
        if tile.is_carried:
            source, words = self._words(self._buffer_of(tile)), self._own_words()
            for i in cutlass.range_constexpr(cute.size(words, mode=[1])):
                cute.autovec_copy(source[None, self.thread, i], words[None, i])
        else:
            self.acc.fill(0.0)

    @cute.jit
    def stage(self, buffer: Int32, state: PipelineState):
        """Write the part in ``acc`` to the buffer of its tile: rounded if it is complete, else as it is."""
        if self.is_final[0] != 0:
            self._stage_rounded()
        else:
            target, words = self._words(self.buffer[0]), self._own_words()
            for i in cutlass.range_constexpr(cute.size(words, mode=[1])):
                cute.autovec_copy(words[None, i], target[None, self.thread, i])

    @cute.jit
    def _stage_rounded(self):
        dtype = self.mma.op.a_dtype
        scaled = self.acc.load() * self.softmax_scale
        rounded = cute.make_rmem_tensor_like(self.acc, dtype)
        rounded.store(scaled.to(dtype))
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), dtype)
        # Pinned, or else addresses are held in registers throughout.
        copy = cute.make_tiled_copy_C(atom, self.mma).get_slice(pin(self.thread, Int32))
        cute.copy(atom, copy.retile(rounded), copy.partition_D(self._staged()[None, None, 0]))

    @cute.jit
    def send(self, buffer: Int32):
        """Start the store of what is staged, if it is complete; fence and barrier lie behind."""
        if self.is_issuer:
            if self.is_final[0] != 0:
                c = self.config
                operand = TmaOperand(*self.store, self._staged())
                m_block = self.place[0]
                head, batch = (self.place[1] >> shift & ((1 << HEAD_BITS) - 1) for shift in (0, HEAD_BITS))
                tile = (m_block, self.wg) if c.splits_columns else (m_block * c.consumers + self.wg, 0)
                source, target = operand.partition((WARPGROUP_ROWS, c.dq_columns), tile, head, batch)
                cute.copy(operand.atom, source[None, 0], target)
                cute.arch.cp_async_bulk_commit_group()

    def free_buffer(self, buffer: Int32) -> Int32:
        """That of the tile which ``acc`` holds: what it had is in ``acc`` too, or was sent two blocks ago."""
        return self.buffer[0]

    def _buffer_of(self, tile: QueryTile) -> Int32:
        return (tile.m_block + self.flip[0]) & 1

    def _own_words(self) -> cute.Tensor:
        shape = (WORDS_PER_STORE, cute.size(self.acc) // WORDS_PER_STORE)
        return cute.make_tensor(self.acc.iterator, cute.make_layout(shape))

    def _words(self, buffer: Int32) -> cute.Tensor:
        """(words, threads, groups) of a buffer."""
        groups = self.config.dq_words // WARPGROUP_THREADS // WORDS_PER_STORE
        layout = cute.make_layout((WORDS_PER_STORE, WARPGROUP_THREADS, groups))
        return cute.make_tensor(self.sdQ[None, buffer].iterator, layout)

    def _staged(self) -> cute.Tensor:
        """(rows, columns, 1) of what is rounded."""
        place = self.sdQ[None, self.buffer[0]].iterator.align(SWIZZLE_BYTES)
        pointer = cute.recast_ptr(place, self.layout.inner, dtype=self.mma.op.a_dtype)
        return cute.make_tensor(pointer, self.layout.outer)

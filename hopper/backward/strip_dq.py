"""dQ of a strip of key tiles: summed on the chip, since the CTA that begins a query tile ends it too."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.pipeline import PipelineState

from hopper.backward.dq import WORDS_PER_STORE, QueryTile
from hopper.backward.written_dq import WrittenGradientOfQ
from hopper.config import WARPGROUP_THREADS


class StripGradientOfQ(WrittenGradientOfQ):
    """The part of a dQ tile that one warpgroup computes, whose words stay in shared memory between two key tiles.

    A query tile has the buffer of its parity: at most two tiles wait for the next key tile, and these are neighbours. A
    thread reads the words that it has written, so nothing has to be waited for. What is complete is rounded, staged in
    the same buffer and stored by TMA, when and as ``GradientOfQ`` sends its sums.
    """

    accumulates = True

    def __init__(self, *parts):
        super().__init__(*parts)
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
        super().hold(tile)
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
            self._stage_rounded(self.buffer[0])
        else:
            target, words = self._words(self.buffer[0]), self._own_words()
            for i in cutlass.range_constexpr(cute.size(words, mode=[1])):
                cute.autovec_copy(words[None, i], target[None, self.thread, i])

    @cute.jit
    def send(self, buffer: Int32):
        """Start the store of what is staged, if it is complete; fence and barrier lie behind."""
        if self.is_issuer:
            if self.is_final[0] != 0:
                self._store(self.buffer[0])

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

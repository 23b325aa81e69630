"""Copies pieces of several tensors of 16 bits in one launch, here, into the memory of other GPUs or out of it."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels.copies.config import (
    VECTOR,
    VECTORS_A_THREAD,
    CopiesConfig,
    validate_copies_config,
)
from cute_kernels.dtypes import DSL_DTYPES
from cute_kernels.integers import ceil_div, divide, maximum, minimum


class CopiesKernel:
    """CTAs walk over the tiles of one copy; a thread has some vectors of a tile, which it reads before it writes the
    first."""

    def __init__(self, config: CopiesConfig):
        validate_copies_config(config)
        self.sources, self.pieces, self.copies = config.sources, config.pieces, config.copies
        self.dtype, self.gathers = DSL_DTYPES[config.dtype], config.gathers
        self.threads, self.tile = config.threads, config.tile

    @cute.jit
    def __call__(self, *arguments):
        """Launch: sources, targets, the places of their pieces, the most CTAs of a copy, and the stream."""
        *given, most_ctas, stream = arguments
        targets = tuple(given[self.sources :][: self.copies])
        most = Int32(0)
        for i in cutlass.range_constexpr(self.copies):
            most = maximum(most, self._vectors(targets[i]))
        self.kernel(tuple(given[: self.sources]), targets, tuple(given[self.sources + self.copies :])).launch(
            grid=(minimum(ceil_div(most, self.tile), most_ctas), self.copies, 1),
            block=(self.threads, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(self, sources: tuple, targets: tuple, places: tuple):
        copy = cute.arch.block_idx()[1]
        for i in cutlass.range_constexpr(self.copies):
            if copy == i:
                piece = self._piece(sources[i // self.pieces], targets[i], places[2 * i], places[2 * i + 1])
                if cutlass.const_expr(self.gathers):
                    self._copy(piece, targets[i])
                else:
                    self._copy(targets[i], piece)

    def _piece(self, source: cute.Tensor, target: cute.Tensor, first: Int64, step: Int64) -> cute.Tensor:
        """Of a source what goes to ``target``, or comes from it, of its shape."""
        first, step = (cute.assume(x, divby=VECTOR) for x in (first, step))
        strides = source.stride[0], step, source.stride[1], 1
        return cute.make_tensor(source.iterator + first, cute.make_layout(target.shape, stride=strides))

    @cute.jit
    def _copy(self, target: cute.Tensor, source: cute.Tensor):
        """The tiles of this CTA. Threads behind the end write the last vector once more, as it is."""
        count = self._vectors(target)
        ctas = cute.arch.grid_dim()[0]
        for tile in cutlass.range(cute.arch.block_idx()[0], ceil_div(count, self.tile), ctas, unroll=1):
            first = tile * self.tile + cute.arch.thread_idx()[0]
            loaded = []
            for i in cutlass.range_constexpr(VECTORS_A_THREAD):
                place = self._place(target, minimum(first + i * self.threads, count - 1))
                words = cute.make_rmem_tensor(VECTOR, self.dtype)
                cute.autovec_copy(self._vector(source, place), words)
                loaded.append((place, words))
            for i in cutlass.range_constexpr(VECTORS_A_THREAD):
                place, words = loaded[i]
                cute.autovec_copy(words, self._vector(target, place))

    def _vectors(self, x: cute.Tensor):
        a, b, rows, columns = x.shape
        return a * b * rows * divide(columns, VECTOR)

    def _place(self, x: cute.Tensor, vector):
        """Where a vector lies, counted along the columns first."""
        _, b, rows, columns = x.shape
        of_row = divide(columns, VECTOR)
        row_of_all = divide(vector, of_row)
        block = divide(row_of_all, rows)
        entry = divide(block, b)
        return entry, block - entry * b, row_of_all - block * rows, vector - row_of_all * of_row

    def _vector(self, x: cute.Tensor, place: tuple) -> cute.Tensor:
        entry, block, row, vector = place
        return cute.local_tile(x[entry, block, row, None], (VECTOR,), (vector,))

"""Adds tensors of 16 bits to one, in float32 and rounded once."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from cute_kernels.addition.config import THREADS, VECTOR, AdditionConfig, validate_addition_config
from cute_kernels.dtypes import DSL_DTYPES
from cute_kernels.integers import ceil_div, divide


class AdditionKernel:
    """A thread a vector: total += the parts, in their order."""

    def __init__(self, config: AdditionConfig):
        validate_addition_config(config)
        self.parts, self.dtype = config.parts, DSL_DTYPES[config.dtype]

    @cute.jit
    def __call__(
        self, mTotal: cute.Tensor, mFirst: cute.Tensor, mSecond: cute.Tensor, mThird: cute.Tensor, stream
    ):
        """Launch. All (batch, rows, columns); the third is read where there are three parts."""
        vectors = mTotal.shape[0] * mTotal.shape[1] * divide(mTotal.shape[2], VECTOR)
        self.kernel(mTotal, mFirst, mSecond, mThird).launch(
            grid=(ceil_div(vectors, THREADS), 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, mTotal: cute.Tensor, mFirst: cute.Tensor, mSecond: cute.Tensor, mThird: cute.Tensor):
        batch, rows, columns = mTotal.shape
        of_row = divide(columns, VECTOR)
        vector = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        if vector < batch * rows * of_row:
            row_of_all = divide(vector, of_row)
            entry = divide(row_of_all, rows)
            place = entry, row_of_all - entry * rows, vector - row_of_all * of_row
            target = self._vector(mTotal, place)
            loaded = []
            for source in (
                target,
                *(self._vector(x, place) for x in (mFirst, mSecond, mThird)[: self.parts]),
            ):
                words = cute.make_rmem_tensor(VECTOR, self.dtype)
                cute.autovec_copy(source, words)
                loaded.append(words)
            total = loaded[0].load().to(Float32)
            for i in cutlass.range_constexpr(self.parts):
                total = total + loaded[i + 1].load().to(Float32)
            loaded[0].store(total.to(self.dtype))
            cute.autovec_copy(loaded[0], target)

    @cute.jit
    def _vector(self, x: cute.Tensor, place: tuple) -> cute.Tensor:
        entry, row, vector = place
        return cute.local_tile(x[entry, row, None], (VECTOR,), (vector,))

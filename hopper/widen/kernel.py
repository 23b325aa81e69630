"""Makes Q and K of e4m3 16 bits wide for the FP8 kernel of an exact LSE."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_kernels.integers import ceil_div, minimum
from hopper.widen.config import AT_A_TIME, THREADS, VECTOR, VECTORS_OF_CTA


class WidenKernel:
    """Q and K (vectors, VECTOR) of e4m3 -> float16, which has every number of e4m3, and NaN. A CTA has vectors of one
    of the two, and each thread loads all of its before it stores one."""

    @cute.jit
    def __call__(self, mQ: cute.Tensor, mK: cute.Tensor, mWideQ: cute.Tensor, mWideK: cute.Tensor, stream):
        """Launch; ``compile_widen`` says what the arguments are."""
        of_q, of_k = ceil_div(mQ.shape[0], VECTORS_OF_CTA), ceil_div(mK.shape[0], VECTORS_OF_CTA)
        self.kernel((mQ, mWideQ), (mK, mWideK), of_q).launch(
            grid=(of_q + of_k, 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, q: tuple, k: tuple, of_q: Int32):
        cta = cute.arch.block_idx()[0]
        if cta < of_q:
            self._widen(*q, cta)
        else:
            self._widen(*k, cta - of_q)

    @cute.jit
    def _widen(self, codes: cute.Tensor, wide: cute.Tensor, cta: Int32):
        vectors, first = codes.shape[0], cta * VECTORS_OF_CTA + cute.arch.thread_idx()[0]
        loaded = []
        for i in cutlass.range_constexpr(AT_A_TIME):
            part = cute.make_rmem_tensor(VECTOR, codes.element_type)
            # Past the end, the last is loaded again.
            cute.autovec_copy(codes[minimum(first + i * THREADS, vectors - 1), None], part)
            loaded.append(part)
        for i in cutlass.range_constexpr(AT_A_TIME):
            vector = first + i * THREADS
            values = cute.make_rmem_tensor(VECTOR, wide.element_type)
            values.store(loaded[i].load().to(wide.element_type))
            if vector < vectors:
                cute.autovec_copy(values, wide[vector, None])

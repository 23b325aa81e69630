"""A kernel small enough to compile in a test: dst = src * factor."""

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

THREADS = 128


@cute.kernel
def scale_kernel(src: cute.Tensor, dst: cute.Tensor, factor: cutlass.Float32):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * THREADS + thread
    if i < src.shape[0]:
        dst[i] = src[i] * factor


@cute.jit
def scale(src: cute.Tensor, dst: cute.Tensor, factor: cutlass.Float32, stream):
    blocks = cute.ceil_div(src.shape[0], THREADS)
    scale_kernel(src, dst, factor).launch(grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream)


def compile_scale():
    """A TVM FFI function (src, dst, factor) of float32 vectors, for sm_90a."""
    size = cute.sym_int()
    src, dst = (make_fake_compact_tensor(cutlass.Float32, (size,)) for _ in range(2))
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    options = "--enable-tvm-ffi --gpu-arch sm_90a"
    return cute.compile(scale, src, dst, cutlass.Float32(1.0), stream, options=options)

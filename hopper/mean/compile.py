"""Compile the kernels of the mean of V, for any sizes and strides, with or without a GPU."""

import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.arguments import compile_for_torch, strided, words
from cute_kernels.dtypes import DSL_DTYPES
from cute_kernels.problem import VARLEN
from hopper.mean.config import CHUNK, MOST_PARTS, WORDS_OF_EDGES, RunMeansConfig, ValueMeanConfig
from hopper.mean.kernel import PackedValueMeanKernel, ValueMeanKernel
from hopper.mean.runs import RunMeansKernel, RunStatisticsKernel


def compile_value_mean(config: ValueMeanConfig, options: str = ""):
    """Compile the kernel of ``config`` for sm_90a.

    Returns a TVM FFI function ``fn(v, mean)`` that launches on torch's current stream.

    - v (b, s, h, dv) in the config's dtype, dv a multiple of 8, the last stride 1, other strides in multiples of 8
      elements, 16-byte aligned.
    - mean float32 (b, h, dv): what to subtract from the columns of each head; 0 where there are no keys.

    With the layout "varlen" it is ``fn(v, mean, cu_seqlens_k, seqused_k)``: b of v is 1 and s are the rows of all
    sequences, cu_seqlens_k int32 (batch + 1,), seqused_k int32 (batch,) or (0,), and mean (batch + 1, h, dv). Rows
    behind the last sequence are taken for one more.

    With ``of_runs`` it is ``fn(v, statistics, run, end)``: statistics float32 (2, b, runs, h, dv) are the mean and the
    variance of each run. Run r has the keys from end - (r + 1) run to end - r run that there are, one at least.

    The next kernel of the stream may start before this one ends, if it is launched with ``use_pdl=True``. What callers
    must check: no size is 0, and ``count_mean_ctas`` is at most ``MAX_CTAS``.
    """
    b, s, h, entries = (cute.sym_int() for _ in range(4))
    dv = cute.sym_int(divisibility=CHUNK)
    is_packed = config.layout == VARLEN
    sizes = cute.sym_int(), cute.sym_int()
    if config.of_runs:
        return compile_for_torch(
            RunStatisticsKernel(config),
            strided(DSL_DTYPES[config.dtype], (b, s, h, dv), CHUNK),
            strided(Float32, (2, b, cute.sym_int(), h, dv), 1),
            Int32(0),
            Int32(0),
            options=options,
        )
    return compile_for_torch(
        PackedValueMeanKernel(config) if is_packed else ValueMeanKernel(config),
        strided(DSL_DTYPES[config.dtype], (b, s, h, dv), CHUNK),
        strided(Float32, (entries if is_packed else b, h, dv), 1),
        *(words(size) for size in sizes if is_packed),
        options=options,
    )


def compile_run_means(config: RunMeansConfig, options: str = ""):
    """Compile the kernel of ``config`` for sm_90a.

    Returns a TVM FFI function ``fn(v, statistics, means, differences, changes, run, end)``, whose v, statistics, run
    and end are those of the launch in front, that of ``compile_value_mean`` with ``of_runs``. It writes means float32
    (b, runs, h, dv), what the keys of each run lose; differences int32 (b, steps, h, 8 dv), what those of the run in
    front lose more, four runs a step (``hopper.mean.edges``); and changes int32 (b, h, 4), 0 or 1: not all 0 where
    not all lose the same. dv is at most 256.

    It starts before the launch in front has ended, and the next kernel may before it has, as behind that one.
    """
    b, s, h, runs, steps = (cute.sym_int() for _ in range(5))
    dv = cute.sym_int(divisibility=CHUNK)
    return compile_for_torch(
        RunMeansKernel(config),
        strided(DSL_DTYPES[config.dtype], (b, s, h, dv), CHUNK),
        strided(Float32, (2, b, runs, h, dv), 1),
        strided(Float32, (b, runs, h, dv), 1),
        strided(Int32, (b, steps, h, cute.sym_int(divisibility=WORDS_OF_EDGES * CHUNK)), 1),
        strided(Int32, (b, h, MOST_PARTS), 1),
        Int32(0),
        Int32(0),
        options=options,
    )

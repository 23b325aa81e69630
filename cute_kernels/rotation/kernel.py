"""Rotates queries and keys by their positions, in float32 and rounded once."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_kernels.integers import ceil_div, divide, minimum
from cute_kernels.rotation.config import HEADS, THREADS, VECTOR, RotationConfig, validate_rotation_config


class RotationKernel:
    """A thread has two vectors of a row that turn together, or one that is copied, of HEADS heads.

    So every number is read once and written once, and the heads of a thread share its angles. CTAs of Q come first,
    those of K behind them.
    """

    def __init__(self, config: RotationConfig):
        validate_rotation_config(config)
        self.config = config

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mLowCos: cute.Tensor,
        mLowSin: cute.Tensor,
        mHighCos: cute.Tensor,
        mHighSin: cute.Tensor,
        mQRotated: cute.Tensor,
        mKRotated: cute.Tensor,
        sign: Float32,
        stream,
    ):
        """Launch, with what ``compile_rotation`` describes."""
        of_q = ceil_div(self._units(mQ, mLowCos), THREADS)
        ctas = of_q + ceil_div(self._units(mK, mLowCos), THREADS)
        tables = (mLowCos, mLowSin, mHighCos, mHighSin)
        self.kernel((mQ, mQRotated), (mK, mKRotated), tables, sign, of_q).launch(
            grid=(ctas, 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @staticmethod
    def _of_head(rows: cute.Tensor, mCos: cute.Tensor) -> Int32:
        """Vectors of a head but for the second of each pair."""
        return divide(rows.shape[3], VECTOR) - divide(mCos.shape[2], VECTOR)

    def _units(self, rows: cute.Tensor, mCos: cute.Tensor) -> Int32:
        """Threads for all of Q or K."""
        groups = divide(rows.shape[2] + HEADS - 1, HEADS)
        return rows.shape[0] * rows.shape[1] * groups * self._of_head(rows, mCos)

    @cute.kernel
    def kernel(self, queries: tuple, keys: tuple, tables: tuple, sign: Float32, ctas_of_q: Int32):
        cta = cute.arch.block_idx()[0]
        if cta < ctas_of_q:
            self._turn(queries, tables, sign, cta)
        else:
            self._turn(keys, tables, sign, cta - ctas_of_q)

    @cute.jit
    def _turn(self, tensors: tuple, tables: tuple, sign: Float32, cta: Int32):
        """A unit for each thread. ``tensors`` are what is read and what is written."""
        rows, rotated = tensors
        seqlen, heads = rows.shape[1], rows.shape[2]
        of_head = self._of_head(rows, tables[0])
        groups = divide(heads + HEADS - 1, HEADS)
        number = cta * THREADS + cute.arch.thread_idx()[0]
        if number < self._units(rows, tables[0]):
            group_of_all = divide(number, of_head)
            unit = number - group_of_all * of_head
            row_of_all = divide(group_of_all, groups)
            head = HEADS * (group_of_all - row_of_all * groups)
            entry = divide(row_of_all, seqlen)
            row = row_of_all - entry * seqlen
            half = divide(tables[0].shape[2], VECTOR)
            # The last group may lack heads: it reads the last one again, and does not write it.
            source = [rows[entry, row, minimum(head + i, heads - 1), None] for i in range(HEADS)]
            high = [load(x, unit + half) for x in source]
            if unit < half:
                low = [load(x, unit) for x in source]
                angles = tuple(load(table[entry, row, None], unit) for table in tables)
                for i in cutlass.range_constexpr(HEADS):
                    turn_pair(low[i], high[i], angles, sign)
                    if const_expr(i == 0) or head + i < heads:
                        store(low[i], rotated[entry, row, head + i, None], unit)
            for i in cutlass.range_constexpr(HEADS):
                if const_expr(i == 0) or head + i < heads:
                    store(high[i], rotated[entry, row, head + i, None], unit + half)


@cute.jit
def turn_pair(low: cute.Tensor, high: cute.Tensor, angles: tuple, sign: Float32):
    """The columns of two vectors, in place."""
    low_cos, low_sin, high_cos, high_sin = angles
    for i in cutlass.range_constexpr(VECTOR):
        x, y = Float32(low[i]), Float32(high[i])
        turned = x * Float32(low_cos[i]) - y * (Float32(low_sin[i]) * sign)
        high[i] = (y * Float32(high_cos[i]) + x * (Float32(high_sin[i]) * sign)).to(high.element_type)
        low[i] = turned.to(low.element_type)


@cute.jit
def load(row: cute.Tensor, number: Int32) -> cute.Tensor:
    """The vector with this number of a row, in registers."""
    part = cute.make_rmem_tensor(VECTOR, row.element_type)
    cute.autovec_copy(cute.local_tile(row, (VECTOR,), (number,)), part)
    return part


@cute.jit
def store(part: cute.Tensor, row: cute.Tensor, number: Int32):
    """Write it there."""
    cute.autovec_copy(part, cute.local_tile(row, (VECTOR,), (number,)))

"""The mean that V was quantized without, added back to the output before it is rounded."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.fragments import (
    COLUMNS_PER_GROUP,
    COLUMNS_PER_PAIR,
    LANES_PER_ROW,
    ROWS_PER_THREAD,
    as_rows,
)
from hopper.forward.unscaled import NoCorrection


@dataclass(frozen=True)
class MeanOfV(NoCorrection):
    """A vector for each key/value head: the mean that V was quantized without.

    ``vector`` is float32 (batch, kv_heads, head_dim_v), or (batch, kv_heads, 0) to add nothing.
    """

    vector: cute.Tensor
    lane: Int32

    @cute.jit
    def add(self, acc: cute.Tensor, inverse_sum: cute.Tensor, head_kv: Int32, batch: Int32):
        """A row without keys stays 0.

        Columns past head_dim_v, which the store clips, take what the last group of columns does: no branch a column.
        """
        columns = self.vector.shape[2]
        if columns > 0:
            rows = as_rows(acc)
            of_head = self.vector[batch, head_kv, None]
            last_group = columns // COLUMNS_PER_GROUP - 1
            groups = rows.shape[1][1]
            pairs = cute.make_rmem_tensor((COLUMNS_PER_PAIR, groups), Float32)
            # All loads before the first addition, or each would wait for the one before it.
            for j in cutlass.range_constexpr(groups):
                number = cutlass.min(last_group, j) * LANES_PER_ROW + self.lane % LANES_PER_ROW
                cute.autovec_copy(cute.local_tile(of_head, (COLUMNS_PER_PAIR,), (number,)), pairs[None, j])
            for r in cutlass.range_constexpr(ROWS_PER_THREAD):
                is_empty = inverse_sum[r] == Float32(0.0)
                for j in cutlass.range_constexpr(groups):
                    for e in cutlass.range_constexpr(COLUMNS_PER_PAIR):
                        rows[r, (e, j)] = rows[r, (e, j)] + (Float32(0.0) if is_empty else pairs[e, j])

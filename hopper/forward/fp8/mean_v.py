"""The mean that V was quantized without, added back to the output before it is rounded."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_kernels.fast_math import pin
from cute_kernels.fragments import (
    COLUMNS_PER_PAIR,
    LANES_PER_ROW,
    ROWS_PER_THREAD,
    as_rows,
    pair_of_quads,
)
from cute_kernels.softmax import clear_empty_rows, normalize_rows, scale_rows
from hopper.config import WARPGROUP_THREADS
from hopper.forward.barriers import sync_warpgroup
from hopper.forward.unscaled import NoCorrection
from hopper.quantize.words import multiply_add

COPIED = 4
"""Columns that a thread copies to shared memory: 16 bytes."""


@dataclass(frozen=True)
class MeanOfV(NoCorrection):
    """A vector for each key/value head: the mean that V was quantized without.

    ``vector`` is float32 (batch, kv_heads, head_dim_v), or (batch, kv_heads, 0) to add nothing. A copy of that of a
    tile's head is on its way to ``memory`` (head_dim_v, consumers) while the tile is worked on: in the epilogue nobody
    waits for global memory. Threads from ``first_thread`` on are consumers. With ``has_quads`` columns are in the order
    of ``pair_of_quads``. What only these two functions need is not kept in registers.
    """

    vector: cute.Tensor
    memory: cute.Tensor
    first_thread: int
    has_quads: bool = False

    @cute.jit
    def begin(self, head_kv: Int32, batch: Int32):
        """All warps of the warpgroup have read what is written over: a barrier of the last epilogue lies between."""
        wg, thread = self._place()
        if thread * COPIED < self.vector.shape[2]:
            offset = Int64(batch) * self.vector.stride[0] + Int64(head_kv) * self.vector.stride[1]
            source = self.vector.iterator.toint() + 4 * (offset + thread * COPIED)
            cute.arch.inline_ptx(
                "cp.async.cg.shared.global [{$r0}], [{$r1}], 16;",
                read_only_args=[self.memory[None, wg].iterator + thread * COPIED, source],
            )
        cute.arch.cp_async_commit_group()

    @cute.jit
    def normalize(self, acc: cute.Tensor, inverse_sum: cute.Tensor):
        """The product and the sum are one FMA, which rounds once. A row without keys becomes 0.

        Columns past head_dim_v, which the store clips, take what the last group of columns does: no branch a column.
        """
        columns = self.vector.shape[2]
        if columns > 0:
            cute.arch.cp_async_wait_group(0)
            wg, thread = self._place()
            sync_warpgroup(wg)
            rows, memory = as_rows(acc), self.memory[None, wg]
            for j in cutlass.range_constexpr(rows.shape[1][1]):
                pair = cute.make_rmem_tensor(COLUMNS_PER_PAIR, Float32)
                number = self._pair(j, thread)
                cute.autovec_copy(cute.local_tile(memory, (COLUMNS_PER_PAIR,), (number,)), pair)
                for r in cutlass.range_constexpr(ROWS_PER_THREAD):
                    for e in cutlass.range_constexpr(COLUMNS_PER_PAIR):
                        rows[r, (e, j)] = multiply_add(rows[r, (e, j)], inverse_sum[r], pair[e])
            clear_empty_rows(acc, inverse_sum)
            if const_expr(self.has_quads):
                # No barrier of the epilogue follows.
                sync_warpgroup(wg)
        elif const_expr(self.has_quads):
            scale_rows(acc, inverse_sum)
            clear_empty_rows(acc, inverse_sum)
        else:
            normalize_rows(acc, inverse_sum)

    def _pair(self, j: int, thread: Int32) -> Int32:
        """Number of a thread's pair of columns ``j``."""
        if self.has_quads:
            return pair_of_quads(j, thread)
        return j * LANES_PER_ROW + thread % LANES_PER_ROW

    def _place(self) -> tuple[Int32, Int32]:
        """(warpgroup, thread of it): read where they are asked for."""
        thread = pin(cute.arch.thread_idx()[0], Int32) - self.first_thread
        return thread // WARPGROUP_THREADS, thread % WARPGROUP_THREADS

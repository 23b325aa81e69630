"""The producer warp of the backward kernel: issues every TMA load."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.pipeline import PipelineAsync, PipelineState, PipelineTmaAsync

from cute_kernels.integers import minimum
from cute_kernels.invariant import LoopInvariant
from cute_kernels.query_range import Visit
from cute_kernels.seqlen import PackedRows, SeqlenInfo
from hopper.backward.config import BackwardConfig
from hopper.tiles import TmaOperand


class BackwardOperands(NamedTuple):
    """What TMA loads: tiles of (rows, columns), and vectors of a number for each query. With ``one_tile`` ``lse`` is in
    base e, and in the place of ``delta`` come tiles of O."""

    q: TmaOperand
    k: TmaOperand
    v: TmaOperand
    do: TmaOperand
    lse: TmaOperand
    delta: TmaOperand


class BackwardPipelines(NamedTuple):
    """From the producer to the consumers, and ``ds`` from them to each other, of which the empty barriers are used
    with couriers only. A stage of Q comes with its LSE, one of dO with its delta."""

    kv: PipelineTmaAsync
    q: PipelineTmaAsync
    do: PipelineTmaAsync
    ds: PipelineAsync


@dataclass(frozen=True)
class BackwardProducer(LoopInvariant):
    """Loads K and V once, and Q and dO once a query tile of each query head that reads them."""

    config: BackwardConfig
    operands: BackwardOperands
    pipes: BackwardPipelines

    @cute.jit
    def load_keys(
        self,
        n_block: Int32,
        head_kv: Int32,
        seqlens: SeqlenInfo,
        state: PipelineState,
        part: cutlass.Constexpr[int] = 0,
    ):
        """Issue the loads of a key tile, or of a part of it."""
        c, ops = self.config, self.operands
        self.pipes.kv.producer_acquire(state)
        keys = c.tile_n // c.key_parts
        for operand, columns in ((ops.k, c.head_dim), (ops.v, c.head_dim_v)):
            smem, gmem = operand.partition((keys, columns), (None, 0), head_kv, keys_to_load(seqlens))
            source = gmem[None, n_block * c.key_parts + part]
            self._copy(operand, source, smem[None, part], self.pipes.kv, state)

    @cute.jit
    def load_queries(
        self, head: Int32, seqlens: SeqlenInfo, visit: Visit, state: PipelineState, sums: tuple = ()
    ) -> PipelineState:
        """Issue the loads of one query head; returns the state of Q's and dO's pipelines after it.

        ``sums`` is empty, or has those of dQ, to be brought to L2, and the head's first query tile among them."""
        c, ops = self.config, self.operands
        tQsQ, tQgQ = ops.q.partition((c.tile_m, c.head_dim), (None, 0), head, seqlens.rows_q)
        tOsO, tOgO = ops.do.partition((c.tile_m, c.head_dim_v), (None, 0), head, seqlens.rows_q)
        tLsL, tLgL = partition_vector(ops.lse, c.tile_m, head, seqlens)
        if const_expr(c.one_tile):
            tDsD, tDgD = ops.delta.partition((c.tile_m, c.head_dim_v), (None, 0), head, seqlens.rows_q)
        else:
            tDsD, tDgD = partition_vector(ops.delta, c.tile_m, head, seqlens)
        for place in cutlass.range(visit.begin, visit.end, unroll=1):
            m_block = visit.number(place)
            self.pipes.q.producer_acquire(state)
            self._copy(ops.q, tQgQ[None, m_block], tQsQ[None, state.index], self.pipes.q, state)
            for tensor, first_tile in sums:
                self._bring_to_l2(tensor[None, 0, first_tile + m_block])
            self._copy(ops.lse, tLgL[None, m_block], tLsL[None, state.index], self.pipes.q, state)
            self.pipes.do.producer_acquire(state)
            self._copy(ops.do, tOgO[None, m_block], tOsO[None, state.index], self.pipes.do, state)
            self._copy(ops.delta, tDgD[None, m_block], tDsD[None, state.index], self.pipes.do, state)
            state.advance()
        return state

    @cute.jit
    def _bring_to_l2(self, words: cute.Tensor):
        """Of the sums of a query tile; ``words`` are those of the first warpgroup, the others' lie behind them."""
        with cute.arch.elect_one():
            cute.arch.inline_ptx(
                "cp.async.bulk.prefetch.L2.global [{$r0}], {$r1};",
                read_only_args=[
                    words.iterator.toint(),
                    Int32(4 * self.config.dq_parts * self.config.dq_words),
                ],
            )

    @cute.jit
    def _copy(
        self,
        operand: TmaOperand,
        source: cute.Tensor,
        target: cute.Tensor,
        pipe: PipelineTmaAsync,
        state: PipelineState,
    ):
        cute.copy(operand.atom, source, target, tma_bar_ptr=pipe.producer_get_barrier(state))


def keys_to_load(seqlens: SeqlenInfo) -> PackedRows | Int32:
    """Where the rows of K and V lie. Of a packed sequence without queries none are read: rows that belong to no
    sequence may hold anything, and their gradients are zero."""
    if not seqlens.is_packed:
        return seqlens.batch
    return PackedRows(seqlens.offset_k, seqlens.seqlen_k * minimum(seqlens.seqlen_q, 1))


@cute.jit
def partition_vector(
    operand: TmaOperand, tile_m: cutlass.Constexpr[int], head: Int32, seqlens: SeqlenInfo
) -> tuple[cute.Tensor, cute.Tensor]:
    """(shared stages, global tiles) of a vector over the queries of one head."""
    if const_expr(seqlens.is_packed):
        first = seqlens.first_query_tile(tile_m) * tile_m
        vector = cute.domain_offset((first,), operand.gmem[None, head])
    else:
        vector = operand.gmem[None, head, seqlens.batch]
    tiles = cute.local_tile(vector, (tile_m,), (None,))
    return cpasync.tma_partition(operand.atom, 0, cute.make_layout(1), operand.smem, tiles)

"""The producer warp of the paired backward kernel: loads keys for its CTA, and half of each query tile for both."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32
from cutlass.pipeline import PipelineState, PipelineTmaAsync

from cute_kernels.invariant import LoopInvariant
from cute_kernels.query_range import Visit
from cute_kernels.seqlen import SeqlenInfo
from hopper.backward.config import CLUSTER_CTAS, PairedBackwardConfig
from hopper.backward.exchange import PairPipelines, state_of
from hopper.backward.producer import BackwardOperands, keys_to_load, partition_vector
from hopper.tiles import TmaOperand

BOTH_CTAS = 2**CLUSTER_CTAS - 1


@dataclass(frozen=True)
class PairProducer(LoopInvariant):
    """Loads K, V, and the columns of the other CTA's K that dQ needs here, once; Q and dO by multicast, each CTA of the
    cluster a half. ``other_k`` is the operand of those columns."""

    config: PairedBackwardConfig
    operands: BackwardOperands
    other_k: TmaOperand
    pipes: PairPipelines
    rank: Int32

    @cute.jit
    def load_keys(self, n_block: Int32, head_kv: Int32, seqlens: SeqlenInfo):
        c, ops, rank = self.config, self.operands, self.rank
        state = state_of(1, Int32(0), is_producer=True)
        self.pipes.kv.producer_acquire(state)
        for operand, columns, row, column in (
            (ops.k, c.head_dim, n_block, 0),
            (ops.v, c.head_dim_v, n_block, 0),
            (self.other_k, c.head_dim // CLUSTER_CTAS, n_block ^ 1, rank),
        ):
            smem, gmem = operand.partition((c.keys, columns), (None, None), head_kv, keys_to_load(seqlens))
            barrier = self.pipes.kv.producer_get_barrier(state)
            cute.copy(operand.atom, gmem[None, row, column], smem[None, 0], tma_bar_ptr=barrier)

    @cute.jit
    def load_queries(self, head: Int32, seqlens: SeqlenInfo, visit: Visit, block: Int32):
        """Issue the loads of one query head, whose first block is number ``block``."""
        c, ops = self.config, self.operands
        q, do = (
            self._partition(operand, vector, columns, head, seqlens)
            for operand, vector, columns in (
                (ops.q, ops.lse, c.head_dim),
                (ops.do, ops.delta, c.head_dim_v),
            )
        )
        for step in cutlass.range(visit.end - visit.begin, unroll=1):
            q_state = state_of(c.stages_of("q"), block + step, is_producer=True)
            m_block = visit.number(visit.begin + step)
            self._load((ops.q, ops.lse), q, m_block, self.pipes.q, q_state)
            do_state = state_of(c.stages_of("do"), block + step, is_producer=True)
            self._load((ops.do, ops.delta), do, m_block, self.pipes.do, do_state)

    @cute.jit
    def _partition(
        self,
        operand: TmaOperand,
        vector: TmaOperand,
        columns: cutlass.Constexpr[int],
        head: Int32,
        seqlens: SeqlenInfo,
    ) -> tuple[cute.Tensor, ...]:
        """(shared stages, global tiles) of this CTA's half of the tiles of a head, and of a vector over its rows."""
        tile_m = self.config.tile_m
        share = (self.rank, CLUSTER_CTAS)
        rows = operand.partition((tile_m, columns), (None, 0), head, seqlens.rows_q, share)
        return *rows, *partition_vector(vector, tile_m, head, seqlens)

    @cute.jit
    def _load(
        self,
        operands: tuple[TmaOperand, TmaOperand],
        parts: tuple[cute.Tensor, ...],
        m_block: Int32,
        pipe: PipelineTmaAsync,
        state: PipelineState,
    ):
        """A tile for both CTAs and its vector for this one, once both have released the stage."""
        smem, gmem, vector_smem, vector_gmem = parts
        pipe.producer_acquire(state)
        barrier = pipe.producer_get_barrier(state)
        cute.copy(
            operands[0].atom,
            gmem[None, m_block],
            smem[None, state.index],
            tma_bar_ptr=barrier,
            mcast_mask=Int16(BOTH_CTAS),
        )
        cute.copy(
            operands[1].atom, vector_gmem[None, m_block], vector_smem[None, state.index], tma_bar_ptr=barrier
        )

"""The producer warp of the kernel for wide values: every TMA load, tile after tile."""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32

from cute_kernels.invariant import LoopInvariant
from cute_kernels.key_blocks import KeyBlocks
from cute_kernels.tile_scheduler import MAILBOX_STAGES
from hopper.config import WARPGROUP_ROWS
from hopper.forward.operands import Work
from hopper.tiles import TmaOperand
from hopper.wide.config import WideForwardConfig
from hopper.wide.operands import FIRST_HALF, SECOND_HALF, Place, WidePipelines, WideTensors, tile_state


class DenseLoads(LoopInvariant):
    """How a key block reaches shared memory: K, then the halves of V in the order in which they become free. In a
    cluster each CTA loads a part of the block for all."""

    def __init__(self, config: WideForwardConfig, operands: WideTensors, pipes: WidePipelines, place: Place):
        self.config, self.k, self.v, self.pipes, self.place = config, operands.k, operands.v, pipes, place

    @cute.jit
    def load(
        self, head_kv: Int32, blocks: KeyBlocks, state: pipeline.PipelineState
    ) -> pipeline.PipelineState:
        """Issue the loads of all key blocks of a tile; returns the state of the pipelines after it."""
        c, rows = self.config, blocks.seqlens.rows_k
        share = self.place.rank, self.place.cluster
        tKsK, tKgK = self.k.partition((c.tile_n, c.head_dim), (None, 0), head_kv, rows, share)
        tVsV, tVgV = self.v.partition((c.tile_n, c.half), (None, None), head_kv, rows, share)
        n_block = blocks.last
        for _ in cutlass.range(blocks.count, unroll=1):
            self._load(self.pipes.k, self.k.atom, tKgK[None, n_block], tKsK[None, state.index], state)
            for half in cutlass.range_constexpr(2):
                stage = half * c.stages + state.index
                self._load(
                    self.pipes.v[half], self.v.atom, tVgV[None, n_block, half], tVsV[None, stage], state
                )
            state.advance()
            n_block -= 1
        return state

    @cute.jit
    def _load(
        self,
        pipe: pipeline.PipelineTmaAsync,
        atom: cute.CopyAtom,
        source: cute.Tensor,
        target: cute.Tensor,
        state: pipeline.PipelineState,
    ):
        """Into a stage of all CTAs of the cluster, as soon as it is free in all."""
        pipe.producer_acquire(state)
        barrier = pipe.producer_get_barrier(state)
        cute.copy(atom, source, target, tma_bar_ptr=barrier, **self.place.targets)


class WideProducer(LoopInvariant):
    """Claims tiles and loads them: Q and QV once a tile, K and V once a key block."""

    def __init__(
        self, config: WideForwardConfig, operands: WideTensors, pipes: WidePipelines, loads: DenseLoads
    ):
        self.config, self.q, self.qv = config, operands.q, operands.qv
        self.pipe, self.loads, self.place = pipes.q, loads, loads.place

    @cute.jit
    def run(self, work: Work):
        kv_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.config.stages)
        mail_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, MAILBOX_STAGES)
        q_phase = Int32(1)
        tile = work.scheduler.first()
        while tile < work.order.num_tiles:
            m_block, head, batch = work.order.coordinates(tile)
            blocks = work.key_blocks(m_block, head, batch)
            self._load_queries(self.place.own(m_block), head, blocks, q_phase)
            kv_state = self.loads.load(head // work.heads_per_kv_head, blocks, kv_state)
            q_phase ^= 1
            tile = work.scheduler.claim(mail_state)
            mail_state.advance()
        work.scheduler.finish()

    @cute.jit
    def _load_queries(self, m_block: Int32, head: Int32, blocks: KeyBlocks, phase: Int32):
        c, rows, state = self.config, blocks.seqlens.rows_q, tile_state(phase)
        tQsQ, tQgQ = self.q.partition((WARPGROUP_ROWS, c.head_dim), (m_block, 0), head, rows)
        self.pipe.producer_acquire(state)
        cute.copy(self.q.atom, tQgQ, tQsQ[None, 0], tma_bar_ptr=self.pipe.producer_get_barrier(state))
        for qv in self.qv:
            self._load_qv(qv, m_block, head, rows, state)

    def _load_qv(self, qv: TmaOperand, m_block: Int32, head: Int32, rows, state) -> None:
        """Under the barrier of Q, which is armed with the bytes of both."""
        tQsQ, tQgQ = qv.partition((WARPGROUP_ROWS, self.config.half), (m_block, None), head, rows)
        for half in (FIRST_HALF, SECOND_HALF):
            barrier = self.pipe.producer_get_barrier(state)
            cute.copy(qv.atom, tQgQ[None, half], tQsQ[None, half], tma_bar_ptr=barrier)

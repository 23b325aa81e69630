"""The producer warp of the kernel for wide values: every TMA load, tile after tile."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32

from cute_kernels.invariant import LoopInvariant
from cute_kernels.key_blocks import KeyBlocks
from cute_kernels.seqlen import SeqlenInfo
from cute_kernels.tile_scheduler import MAILBOX_STAGES
from hopper.config import WARPGROUP_ROWS
from hopper.forward.operands import Work
from hopper.tiles import TmaOperand
from hopper.wide.config import WideForwardConfig
from hopper.wide.operands import FIRST_HALF, SECOND_HALF, Place, WidePipelines, WideTensors, tile_state


class KeyTensors(NamedTuple):
    """Shared memory and global memory of the key blocks of a tile, for TMA: K (stages) and (blocks), V (stages of both
    halves) and (blocks, halves), each behind the elements of a copy."""

    sK: cute.Tensor
    gK: cute.Tensor
    sV: cute.Tensor
    gV: cute.Tensor


class DenseLoads(LoopInvariant):
    """How a key block reaches shared memory. In a cluster each CTA loads a part of the block for all."""

    def __init__(self, config: WideForwardConfig, operands: WideTensors, pipes: WidePipelines, place: Place):
        self.config, self.k, self.v, self.pipes, self.place = config, operands.k, operands.v, pipes, place

    def of_tile(self, head_kv: Int32, seqlens: SeqlenInfo) -> KeyTensors:
        """The keys of a sequence and a head."""
        c, rows = self.config, seqlens.rows_k
        share = self.place.rank, self.place.cluster
        return KeyTensors(
            *self.k.partition((c.tile_n, c.head_dim), (None, 0), head_kv, rows, share),
            *self.v.partition((c.tile_n, c.half), (None, None), head_kv, rows, share),
        )

    @cute.jit
    def start(self, keys: KeyTensors, n_block: Int32, state: pipeline.PipelineState):
        """K of a block and the first half of V, which become free before the second."""
        self._load(self.pipes.k, self.k.atom, keys.gK[None, n_block], keys.sK[None, state.index], state)
        self._load_half(keys, n_block, FIRST_HALF, state)

    @cute.jit
    def finish(self, keys: KeyTensors, n_block: Int32, state: pipeline.PipelineState):
        """The second half of V."""
        self._load_half(keys, n_block, SECOND_HALF, state)

    def _load_half(self, keys: KeyTensors, n_block: Int32, half: int, state: pipeline.PipelineState) -> None:
        source, target = keys.gV[None, n_block, half], keys.sV[None, half * self.config.stages + state.index]
        self._load(self.pipes.v[half], self.v.atom, source, target, state)

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
    """Claims tiles and loads them: K and V once a key block, Q and QV once a tile. The first block's K and half of V
    go first, as their stages are free while Q and QV of the tile before are still in use."""

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
            m_block, head, batch = map(cute.arch.make_warp_uniform, work.order.coordinates(tile))
            blocks = work.key_blocks(m_block, head, batch)
            keys = self.loads.of_tile(head // work.heads_per_kv_head, blocks.seqlens)
            n_block = blocks.last
            self.loads.start(keys, n_block, kv_state)
            self._load_queries(self.place.own(m_block), head, blocks, q_phase)
            self.loads.finish(keys, n_block, kv_state)
            kv_state.advance()
            for _ in cutlass.range(blocks.count - 1, unroll=1):
                n_block -= 1
                self.loads.start(keys, n_block, kv_state)
                self.loads.finish(keys, n_block, kv_state)
                kv_state.advance()
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

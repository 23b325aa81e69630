"""How FP8 key blocks reach shared memory: V K-major, as FP8 WGMMA wants it."""

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Boolean, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync
from cutlass.pipeline import Agent, CooperativeGroup, PipelineAsync, PipelineTmaAsync

from cute_kernels.dtypes import DSL_DTYPES
from cute_kernels.invariant import LoopInvariant
from cute_kernels.key_blocks import KeyBlocks
from cute_kernels.seqlen import SeqlenInfo
from cute_kernels.tile_scheduler import MAILBOX_STAGES
from hopper.forward.fp8.config import FP8_KEYS_PER_STEP, V_ROW_STAGES
from hopper.forward.fp8.transpose import PRODUCER_WARPS, VTransposer
from hopper.forward.kv_source import DenseTma, FoundTiles
from hopper.forward.operands import Work, o_state
from hopper.forward.producer import Producer
from hopper.tiles import TmaOperand, ragged_view, swizzled_layout


class WarpReleased(PipelineAsync):
    """A pipeline whose stages are filled by threads, and released by one lane for its warp."""

    @cute.jit
    def consumer_release(self, state: pipeline.PipelineState):
        if cute.arch.lane_idx() == 0:
            self.sync_object_empty.arrive(state.index, self.consumer_mask)


class TransposedTma(DenseTma):
    """``DenseTma`` for V that comes transposed, (batch, kv_heads, head_dim_v, keys), keys in ``FP8_KEY_ORDER``."""

    v_major = OperandMajorMode.K

    def arrange_v(self, mV: cute.Tensor) -> cute.Tensor:
        return cute.make_tensor(mV.iterator, cute.select(mV.layout, mode=[2, 3, 1, 0]))

    def v_layout(self, dtype) -> cute.ComposedLayout:
        c = self.config
        return swizzled_layout(c.head_dim_v, c.tile_n, c.stages, dtype)


class TransposingRows(TransposedTma):
    """For V in rows, (batch, keys, kv_heads, head_dim_v), as a cache holds it.

    All four warps of the producer warpgroup transpose (``VTransposer``); the first one loads, a block ahead. Instead of
    the row of ``ForwardKernel``'s table:

    | pipeline | stages | bytes of a full stage | arrivals that fill it, and that empty it |
    |---|---|---|---|
    | pipe_v | `stages` | - | 4, `4 * consumers` |
    | rows of V | 2 | `tile_n * head_dim_v` | 1, 4 |
    """

    v_row_mode = 0
    row_stages = V_ROW_STAGES

    @property
    def receiving_warps(self) -> int:
        return super().receiving_warps + PRODUCER_WARPS - 1

    def arrange_v(self, mV: cute.Tensor) -> cute.Tensor:
        return cute.make_tensor(mV.iterator, cute.select(mV.layout, mode=[1, 3, 2, 0]))

    def make_v_atom(self, mV: cute.Tensor, dtype) -> tuple[cute.CopyAtom, cute.Tensor]:
        load, tile = cpasync.CopyBulkTensorTileG2SOp(), (self.config.tile_n, self.config.head_dim_v)
        return cpasync.make_tiled_tma_atom(load, mV, self._rows_layout(dtype), tile)

    def _rows_layout(self, dtype) -> cute.ComposedLayout:
        return swizzled_layout(self.config.tile_n, self.config.head_dim_v, V_ROW_STAGES, dtype)

    def _make_v_pipeline(self, storage: Any, consumers: CooperativeGroup) -> PipelineAsync:
        pipe = PipelineAsync.create(
            num_stages=self.config.stages,
            producer_group=CooperativeGroup(Agent.Thread, PRODUCER_WARPS),
            consumer_group=consumers,
            barrier_storage=storage.barriers_v.data_ptr(),
            defer_sync=True,
        )
        return WarpReleased(pipe.sync_object_full, pipe.sync_object_empty, pipe.num_stages, None, None)

    def _make_row_pipelines(self, storage: Any) -> tuple[PipelineTmaAsync, ...]:
        c = self.config
        warps = CooperativeGroup(Agent.Thread, PRODUCER_WARPS)
        size = c.tile_n * c.head_dim_v * c.element_bytes
        return (self._tma_pipeline(storage.barriers_rows, V_ROW_STAGES, warps, size),)

    def _make_loads(self, work: Work, producer: Producer, transposer: VTransposer) -> "BlockLoads":
        return BlockLoads(producer, transposer)

    @cute.jit
    def produce(self, work: Work, producer: Producer, storage: Any, warp: Int32):
        """All warps transpose; the first one also claims tiles, and loads a block ahead of the transposition."""
        stages, dtype = self.config.stages, DSL_DTYPES[self.config.dtype]
        layout, rows = self.v_layout(dtype), self._rows_layout(dtype)
        v = TmaOperand(
            producer.v.atom,
            producer.v.gmem,
            storage.sVrows.get_tensor(rows.outer, swizzle=rows.inner),
        )
        sVt = storage.sV.get_tensor(layout.outer, swizzle=layout.inner)
        transposer = VTransposer(self.config, v, sVt, producer.pipes, warp)
        loads = self._make_loads(work, producer, transposer)
        loading, receiving = pipeline.PipelineUserType.Producer, pipeline.PipelineUserType.Consumer
        k_state = pipeline.make_pipeline_state(loading, stages)
        v_state = pipeline.make_pipeline_state(loading, stages)
        load_state = pipeline.make_pipeline_state(loading, V_ROW_STAGES)
        rows_state = pipeline.make_pipeline_state(receiving, V_ROW_STAGES)
        claim_state = pipeline.make_pipeline_state(loading, MAILBOX_STAGES)
        mail_state = pipeline.make_pipeline_state(receiving, MAILBOX_STAGES)
        tile = work.scheduler.first()
        while tile < work.order.num_tiles:
            # Two stages of the mailbox: their number is 0 and 1 in turns, and kept as it is.
            q_phase = Int32(1) ^ claim_state.index
            m_block, head, batch = work.order.coordinates(tile)
            head_kv = work.head_kv(head)
            blocks = work.key_blocks(m_block, head, batch)
            if const_expr(self.config.o_from_registers):
                # The place of the rows is free before the last Q K^T of the tile before has read Q and K.
                if loads.is_due():
                    loads.enter_tile(batch, blocks)
                    loads.load_rows(head_kv, blocks.seqlens, blocks.last, load_state)
                    if const_expr(self.config.has_short_beginnings):
                        producer.load_first((m_block, head), head_kv, blocks, k_state, q_phase)
                    else:
                        loads.load_queries(m_block, head, blocks.seqlens, q_phase)
                        loads.load_keys(head_kv, blocks.seqlens, blocks.last, k_state)
                    loads.leave_block(blocks.last)
            else:
                if loads.is_due():
                    loads.enter_tile(batch, blocks)
                    for _ in producer.pipes.o:
                        # Its place is free so much later that it would come from L2 as soon.
                        loads.fetch_rows(head_kv, blocks.seqlens, blocks.last)
                    loads.load_queries(m_block, head, blocks.seqlens, q_phase)
                # Q and K of a tile are loaded while O of the one before leaves the place of the rows.
                o_states = tuple(o_state(q_phase) for _ in producer.pipes.o)
                states = (k_state, load_state, *o_states)
                load_ahead(loads, head_kv, blocks, blocks.last, states)
            for step in cutlass.range(blocks.count, unroll=1):
                k_state.advance()
                load_state.advance()
                n_block = blocks.end - 2 - step
                load_ahead(loads, head_kv, blocks, n_block, (k_state, load_state))
                transposer.transpose(rows_state, v_state)
                rows_state.advance()
                v_state.advance()
            if warp == 0:
                tile = work.scheduler.claim(claim_state)
            else:
                tile = work.scheduler.receive(mail_state)
            claim_state.advance()
            mail_state.advance()
        if warp == 0:
            work.scheduler.finish()


class BlockLoads(LoopInvariant):
    """Issues the loads of Q, K and the rows of V, block by block; by one warp."""

    def __init__(self, producer: Producer, transposer: VTransposer):
        self.producer, self.transposer = producer, transposer

    def is_due(self) -> Boolean:
        """Whether it is for this warp to load; the other methods are for such warps."""
        return self.transposer.warp == 0

    def enter_tile(self, batch: Int32, blocks: KeyBlocks):
        """Before the loads of a tile."""

    def load_queries(self, m_block: Int32, head: Int32, seqlens: SeqlenInfo, q_turn: Int32):
        self.producer.load_queries(m_block, head, seqlens, q_turn)

    def load_keys(self, head_kv: Int32, seqlens: SeqlenInfo, n_block: Int32, state: pipeline.PipelineState):
        self.producer.load_keys(head_kv, seqlens, n_block, state)

    def load_rows(self, head_kv: Int32, seqlens: SeqlenInfo, n_block: Int32, state: pipeline.PipelineState):
        self.transposer.load(head_kv, seqlens, n_block, state)

    def fetch_rows(self, head_kv: Int32, seqlens: SeqlenInfo, n_block: Int32):
        """Have the rows of a block come to L2."""
        self.transposer.fetch(head_kv, seqlens, n_block)

    def leave_block(self, n_block: Int32):
        """Behind both loads of a block."""


@cute.jit
def load_ahead(
    loads: BlockLoads,
    head_kv: Int32,
    blocks: KeyBlocks,
    n_block: Int32,
    states: tuple,
):
    """Load K and the rows of V of a block, if there is one, by the warps for which it is.

    ``states`` are those of K, of the rows, and that of O where the rows have to wait for it.
    """
    k_state, rows_state, *o_states = states
    rows_first = loads.transposer.config.o_from_registers
    if loads.is_due() and n_block >= blocks.begin:
        if const_expr(rows_first):
            loads.load_rows(head_kv, blocks.seqlens, n_block, rows_state)
        loads.load_keys(head_kv, blocks.seqlens, n_block, k_state)
        for pipe, state in zip(loads.producer.pipes.o, o_states, strict=False):
            pipe.producer_acquire(state)
        if const_expr(not rows_first):
            loads.load_rows(head_kv, blocks.seqlens, n_block, rows_state)
        loads.leave_block(n_block)


class PackedTransposedTma(FoundTiles, TransposedTma):
    """``TransposedTma`` for packed sequences: V is (kv_heads, head_dim_v, keys), and each sequence has whole steps of
    32 keys to itself (``SeqlenInfo.padded_rows_k``)."""

    v_row_step = FP8_KEYS_PER_STEP

    def arrange_v(self, mV: cute.Tensor) -> cute.Tensor:
        transposed = cute.make_tensor(mV.iterator, cute.select(mV.layout, mode=[1, 2, 0]))
        return ragged_view(transposed, self.v_row_mode, self.v_row_step)


class PackedTransposingRows(TransposingRows):
    """``TransposingRows`` for packed sequences: V is (total_k, kv_heads, head_dim_v). All warps transpose, so none is
    left to find tiles."""

    def arrange_v(self, mV: cute.Tensor) -> cute.Tensor:
        rows = cute.make_tensor(mV.iterator, cute.select(mV.layout, mode=[0, 2, 1]))
        return ragged_view(rows, self.v_row_mode)

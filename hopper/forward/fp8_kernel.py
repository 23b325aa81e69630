"""The Hopper forward kernel for e4m3 inputs with block scales."""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float16, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync

from cute_kernels.block_scaled_softmax import BlockScaledSoftmax
from cute_kernels.eager_softmax import EagerSoftmax
from cute_kernels.fragments import COLUMNS_PER_GROUP
from cute_kernels.half_scores_softmax import HalfScoresSoftmax
from cute_kernels.lagging_softmax import LaggingSoftmax
from cute_kernels.softmax import OnlineSoftmax
from cute_kernels.tile_scheduler import MAILBOX_STAGES
from cute_kernels.warp_scores import WarpScores
from hopper.config import V_ROW_STAGES, WARPGROUP_ROWS, WARPGROUP_THREADS, Fp8ForwardConfig
from hopper.forward.addend import Addend
from hopper.forward.consumer import Consumer, LaggingConsumer
from hopper.forward.half_scores_consumer import HalfScoresConsumer
from hopper.forward.kernel import ForwardKernel, SmemLayouts
from hopper.forward.operands import Mmas, Work
from hopper.forward.output import Output, TwoLevelOutput
from hopper.forward.producer import Producer
from hopper.forward.scales import SLOT_FLOATS, BlockScales, ScalePublisher
from hopper.forward.transpose import PRODUCER_WARPS, VTransposer, load_ahead
from hopper.tiles import TmaOperand, swizzle_bytes, swizzled_layout

UNCROWDED_COLUMNS = 128
"""Of O, beside which a softmax that lags finds all registers that it wants."""


class Fp8ForwardKernel(ForwardKernel):
    """``ForwardKernel`` on e4m3 Q, K and V: the same roles and pipelines, with what FP8 WGMMA asks for.

    Both its operands are K-major, so V comes transposed, (batch, kv_heads, head_dim_v, keys); and its A operand
    in registers wants four neighbouring keys a word, which the accumulator of Q K^T does not hold, so V's keys
    come in the accumulator's order (``fragments.store_row_as_operand_a_e4m3``). Neither costs this kernel a move.
    """

    v_major = OperandMajorMode.K

    @property
    def is_crowded(self) -> bool:
        """As in ``ForwardKernel``."""
        return self.config.lagging and self.config.head_dim_v > UNCROWDED_COLUMNS

    @property
    def consumer_type(self) -> type[Consumer]:
        if self.config.half_scores:
            return HalfScoresConsumer
        return LaggingConsumer if self.config.lagging else Consumer

    @property
    def score_dtype(self) -> type[cutlass.Numeric]:
        return Float16 if self.config.half_scores else Float32

    def __init__(self, config: Fp8ForwardConfig):
        super().__init__(config)
        self.scale_slots = 2 * config.stages

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mVt: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        tile_counter: cute.Tensor,
        q_scale: cute.Tensor,
        k_scale: cute.Tensor,
        v_scale: cute.Tensor,
        o_scale: cute.Tensor,
        addend: cute.Tensor,
        block_q: Int32,
        block_k: Int32,
        softmax_scale: Float32,
        num_ctas: Int32,
        stream,
    ):
        """Launch. mQ, mK, mO are (batch, seqlen, heads, head_dim), mVt (batch, kv_heads, head_dim_v, keys); the
        scales and the addend are those of ``BlockScales``."""
        mVt = cute.make_tensor(mVt.iterator, cute.select(mVt.layout, mode=[2, 3, 1, 0]))
        scales = (q_scale, k_scale, v_scale, o_scale, addend, block_q, block_k)
        self._launch(mQ, mK, mVt, mO, mLSE, tile_counter, scales, softmax_scale, num_ctas, stream)

    def _make_softmax(self, scale_log2: Float32, scales: tuple, storage) -> OnlineSoftmax:
        s = BlockScales(*scales)
        tile_scales = (s.q, s.o, s.block_q)
        common = scale_log2, tile_scales, self._slots(storage), self.config.polynomial_pairs
        if self.config.half_scores:
            return HalfScoresSoftmax(*common, self.config.tile_n // COLUMNS_PER_GROUP)
        if self.config.lagging:
            return LaggingSoftmax(*common, self._warp_scores(storage))
        return (EagerSoftmax if self.config.eager else BlockScaledSoftmax)(*common)

    def _warp_scores(self, storage) -> WarpScores:
        layouts = self._smem_layouts()
        sQ, sK = storage.sQ.get_tensor(layouts.q.outer), storage.sK.get_tensor(layouts.k.outer)
        words = (cute.recast_tensor(operand, Int32) for operand in (sQ, sK))
        return WarpScores(*words, swizzle_bytes(self.config.head_dim), other_warpgroups=1)

    def _make_output(self, mmas: Mmas, sV: cute.Tensor, softmax: OnlineSoftmax) -> Output:
        if not self.config.two_level:
            return super()._make_output(mmas, sV, softmax)
        return TwoLevelOutput(self.config, mmas, self._pv_mma(self.config.pv_columns), sV, softmax)

    def _make_scales(self, scale_log2: Float32, scales: tuple, storage) -> ScalePublisher:
        largest_unit = cute.make_rmem_tensor(1, Float32)
        return ScalePublisher(
            scale_log2, BlockScales(*scales), self.config.tile_n, self._slots(storage), largest_unit
        )

    def _make_addend(self, scales: tuple, lane: Int32) -> Addend:
        return Addend(BlockScales(*scales).addend, lane)

    def _slots(self, storage) -> cute.Tensor:
        layout = cute.make_layout((self.scale_slots, SLOT_FLOATS), stride=(SLOT_FLOATS, 1))
        return storage.scales.get_tensor(layout)

    def _smem_layouts(self) -> SmemLayouts:
        c = self.config
        return SmemLayouts(
            q=swizzled_layout(WARPGROUP_ROWS, c.head_dim, c.consumers, self.dtype),
            k=swizzled_layout(c.tile_n, c.head_dim, c.stages, self.dtype),
            vt=swizzled_layout(c.head_dim_v, c.tile_n, c.stages, self.dtype),
            o=swizzled_layout(WARPGROUP_ROWS, c.head_dim_v, c.consumers, self.out_dtype),
        )


class Fp8RowsForwardKernel(Fp8ForwardKernel):
    """``Fp8ForwardKernel`` for V in rows, (batch, keys, kv_heads, head_dim_v), as a cache holds it.

    All four warps of the producer warpgroup transpose (``VTransposer``); the first one loads, a block ahead. Instead of
    the row of ``ForwardKernel``'s table:

    | pipeline | stages | bytes of a full stage | arrivals that fill it, and that empty it |
    |---|---|---|---|
    | pipe_v | `stages` | - | 4, `128 * consumers` |
    | rows of V | 2 | `tile_n * head_dim_v` | 1, 4 |
    """

    v_row_stages = V_ROW_STAGES

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        tile_counter: cute.Tensor,
        q_scale: cute.Tensor,
        k_scale: cute.Tensor,
        v_scale: cute.Tensor,
        o_scale: cute.Tensor,
        addend: cute.Tensor,
        block_q: Int32,
        block_k: Int32,
        softmax_scale: Float32,
        num_ctas: Int32,
        stream,
    ):
        """Launch. As ``Fp8ForwardKernel``, but for mV (batch, seqlen_k, kv_heads, head_dim_v)."""
        mV = cute.make_tensor(mV.iterator, cute.select(mV.layout, mode=[1, 3, 2, 0]))
        scales = (q_scale, k_scale, v_scale, o_scale, addend, block_q, block_k)
        self._launch(mQ, mK, mV, mO, mLSE, tile_counter, scales, softmax_scale, num_ctas, stream)

    def _rows_layout(self) -> cute.ComposedLayout:
        return swizzled_layout(self.config.tile_n, self.config.head_dim_v, V_ROW_STAGES, self.dtype)

    def _make_v_atom(self, mV: cute.Tensor, layouts: SmemLayouts):
        load, tile = cpasync.CopyBulkTensorTileG2SOp(), (self.config.tile_n, self.config.head_dim_v)
        return cpasync.make_tiled_tma_atom(load, mV, self._rows_layout(), tile)

    def _make_v_pipeline(self, create, barriers, consumers: pipeline.CooperativeGroup):
        threads = WARPGROUP_THREADS * self.config.consumers
        return pipeline.PipelineAsync.create(
            num_stages=self.config.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, PRODUCER_WARPS),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, threads),
            barrier_storage=barriers.data_ptr(),
            defer_sync=True,
        )

    def _receiving_warps(self) -> int:
        return super()._receiving_warps() + PRODUCER_WARPS - 1

    def _make_row_pipelines(self, create, storage) -> tuple[pipeline.PipelineTmaAsync, ...]:
        c = self.config
        warps = pipeline.CooperativeGroup(pipeline.Agent.Thread, PRODUCER_WARPS)
        return (create(storage.barriers_rows, V_ROW_STAGES, warps, c.tile_n * c.head_dim_v),)

    @cute.jit
    def _run_producers(self, work: Work, producer: Producer, storage, warp: Int32):
        """All warps transpose; the first one also claims tiles, and loads a block ahead of the transposition."""
        stages = self.config.stages
        layouts, rows = self._smem_layouts(), self._rows_layout()
        v = TmaOperand(
            producer.v.atom,
            producer.v.gmem,
            storage.sVrows.get_tensor(rows.outer, swizzle=rows.inner),
        )
        sVt = storage.sV.get_tensor(layouts.vt.outer, swizzle=layouts.vt.inner)
        transposer = VTransposer(self.config, v, sVt, producer.pipes, warp)
        loading, receiving = pipeline.PipelineUserType.Producer, pipeline.PipelineUserType.Consumer
        k_state = pipeline.make_pipeline_state(loading, stages)
        v_state = pipeline.make_pipeline_state(loading, stages)
        load_state = pipeline.make_pipeline_state(loading, V_ROW_STAGES)
        rows_state = pipeline.make_pipeline_state(receiving, V_ROW_STAGES)
        claim_state = pipeline.make_pipeline_state(loading, MAILBOX_STAGES)
        mail_state = pipeline.make_pipeline_state(receiving, MAILBOX_STAGES)
        q_phase = Int32(1)
        tile = work.scheduler.first()
        while tile < work.order.num_tiles:
            m_block, head, batch = work.order.coordinates(tile)
            head_kv = head // work.heads_per_kv_head
            n_end = work.n_end(m_block)
            if warp == 0:
                producer.load_queries(m_block, head, batch, q_phase)
            load_ahead(producer, transposer, (head_kv, batch), n_end - 1, (k_state, load_state))
            for step in cutlass.range(n_end, unroll=1):
                k_state.advance()
                load_state.advance()
                load_ahead(producer, transposer, (head_kv, batch), n_end - 2 - step, (k_state, load_state))
                transposer.transpose(rows_state, v_state)
                rows_state.advance()
                v_state.advance()
            q_phase ^= 1
            if warp == 0:
                tile = work.scheduler.claim(claim_state)
            else:
                tile = work.scheduler.receive(mail_state)
            claim_state.advance()
            mail_state.advance()
        if warp == 0:
            work.scheduler.finish()
